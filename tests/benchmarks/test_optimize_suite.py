"""The optimization levels as the benchmark measures them."""

import pytest

from dpflash.bench import optimize
from dpflash.bench.results import row
from dpflash.bench.suite import Request
from dpflash.planner import LEVELS

TINY = {"batch": 3, "physical_batch": 3, "tokens": 24, "heads": 2, "head_dim": 8}


@pytest.mark.parametrize("level", LEVELS[:3])
def test_a_level_is_measured_on_what_a_loop_over_samples_confirms(level):
    subject = optimize.optimize_subject(level=level, device="cpu", seed=0, **TINY)
    assert subject.error() <= subject.tolerance
    assert (subject.dtype == "bfloat16") == (level == "balanced")
    assert subject.tokens == 72
    subject.step()
    assert any(change.startswith("privacy") for change in subject.figures["changes"])


def test_a_sum_that_is_not_clipped_is_told(monkeypatch):
    subject = optimize.optimize_subject(level="conservative", device="cpu", seed=0, **TINY)
    monkeypatch.setattr(optimize, "_MAX_GRAD_NORM", 1e6)
    assert subject.error() > 0.1


def test_every_level_takes_turns_with_none_on_every_workload_of_the_report():
    comparisons = list(optimize.SUITE.plan(Request(device="cpu")))
    assert len(comparisons) == len(optimize.WORKLOADS)
    for comparison, workload in zip(comparisons, optimize.WORKLOADS, strict=True):
        configs = [one.config for one in comparison.measurements]
        assert tuple(config["level"] for config in configs) == LEVELS
        assert comparison.baseline == comparison.measurements[0].name
        for config in configs:
            sizes = (config["batch"], config["tokens"], config["heads"], config["head_dim"])
            assert sizes == workload
            assert 1 <= config["physical_batch"] <= config["batch"]


def test_gains_are_the_range_over_the_workloads_that_ran():
    rows = [
        row("none", {"level": "none"}, section="levels", changes=["a"]),
        row("one", {"level": "balanced"}, section="levels", changes=["b", "c"], speedup=1.5),
        row("two", {"level": "balanced"}, section="levels", changes=["b", "c"], speedup=2.0),
        row("left out", {"level": "aggressive"}, section="levels", needs="a GPU"),
    ]
    derived = list(optimize.SUITE.derive(rows))
    texts = [(one["config"]["level"], one["text"]) for one in derived if "text" in one]
    assert texts == [("none", "a"), ("balanced", "b"), ("balanced", "c")]
    (gain,) = [one for one in derived if one["section"] == "gains"]
    assert (gain["least"], gain["most"], gain["workloads"]) == (1.5, 2.0, 2)
