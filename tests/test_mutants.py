"""The list of mutants fits the code; `run_mutants.py` runs them."""

import runpy
from pathlib import Path

RUNNER = runpy.run_path(str(Path(__file__).with_name("run_mutants.py")))


def test_each_mutant_has_its_anchor_once_and_killers_that_exist_and_each_invariant_has_four():
    assert not RUNNER["problems"](RUNNER["read"]())


def test_a_killer_that_has_cases_names_one():
    test = "tests/dpflash/isolation/test_trial.py::test_a_batch_is_taken_apart_once"
    assert "has cases" in RUNNER["_problem_with"](test)
    assert RUNNER["_problem_with"](f"{test}[None]") is None
    assert "there is no test" in RUNNER["_problem_with"](f"{test}_only")
