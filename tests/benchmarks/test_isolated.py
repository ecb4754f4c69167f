"""Functions in processes of their own: what is said of one that is ended, and what it leaves."""

import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from dpflash.bench import isolated, measuring
from dpflash.bench.isolated import OutOfTime, run_isolated, tell
from dpflash.bench.measuring import Bench
from dpflash.bench.progress import Progress
from dpflash.bench.suite import Comparison, Measurement, Request, Subject
from dpflash.bench.timing import Stopwatch
from dpflash.clipping.device_speed import Ceilings

sys.path.insert(0, str(Path(__file__).parent))
from isolated_cases import registered_with_a_bar, told_and_done  # noqa: E402


def test_a_bar_leaves_no_semaphore_behind_where_its_process_is_killed():
    assert run_isolated(registered_with_a_bar) == []


def test_a_process_that_is_out_of_time_says_in_which_phase(monkeypatch):
    ours, theirs = Pipe(duplex=False)
    with pytest.raises(OutOfTime, match=r"^it took longer than 0\.01 seconds$"):
        isolated._result(ours, timeout=0.01)
    monkeypatch.setattr(isolated, "_pipe", theirs)
    tell("building")
    tell("compiling")
    with pytest.raises(OutOfTime, match=r"^compiling took longer than 0\.01 seconds$"):
        isolated._result(ours, timeout=0.01)


def test_what_a_process_tells_is_not_taken_for_its_result():
    assert run_isolated(told_and_done, timeout=60) == "done"
    tell("no process waits for this one")


def test_a_row_that_is_out_of_time_tells_its_phase_and_its_limit(monkeypatch):
    def late(*arguments, timeout, **others):
        raise OutOfTime(f"its first call took longer than {timeout:g} seconds")

    monkeypatch.setattr(measuring, "run_isolated", late)
    bench = Bench(
        Request(device="cpu", max_seconds=10.0),
        Stopwatch(torch.device("cpu")),
        Ceilings({"float32": 1e9}, 1e9),
        Path("traces"),
        Progress("toy", is_shown=False),
    )
    (found,) = bench.rows(Comparison([Measurement("a", Subject, {})]))
    assert found["needs"] == (
        "a faster device: its first call took longer than 70 seconds (limit of the row: 10 s, "
        "--max-seconds, and 60 s to get ready)"
    )


def test_a_probe_tells_before_it_builds_before_the_first_call_and_before_the_others(monkeypatch):
    did = []
    monkeypatch.setattr(measuring, "tell", did.append)

    def build(*, device, seed):
        did.append("built")
        return Subject(lambda: did.append("called"), lambda: 0.0, 1.0)

    measuring._probe(build, "cpu", 0, {})
    assert did[:4] == [
        *("building it", "built"),
        *("building it and its first call (compiling included)", "called"),
    ]
    assert did[4:6] == ["two calls", "called"]
