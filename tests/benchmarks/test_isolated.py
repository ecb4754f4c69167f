"""Functions in processes of their own: results and limits."""

import sys
from pathlib import Path

import pytest
import torch
from tqdm import tqdm

from dpflash.bench import isolated, suite
from dpflash.bench.isolated import OutOfTime, run_isolated
from dpflash.bench.suite import Bench, Comparison, Measurement, Request, Subject
from dpflash.bench.timing import Stopwatch
from dpflash.clipping.device_speed import Ceilings

sys.path.insert(0, str(Path(__file__).parent))
from suite_cases import (  # noqa: E402
    grow,
    leave,
    registered_with_a_bar,
    stand_still,
)


@pytest.mark.cases(0)
def test_an_isolated_call_returns_or_says_how_it_failed():
    assert run_isolated(grow, size=10) == 10
    with pytest.raises(isolated.OutOfMemory):
        run_isolated(grow, memory_limit=2**30, size=2**29)
    assert run_isolated(grow, memory_limit=2**31, size=2**27) == 2**27
    with pytest.raises(OutOfTime):
        run_isolated(stand_still, timeout=0.2)
    with pytest.raises(isolated.Failed, match="exit code 3"):
        run_isolated(leave)
    with pytest.raises(TypeError, match="size"):
        run_isolated(grow)
    # A semaphore would stay behind where a process with a bar is killed.
    assert run_isolated(registered_with_a_bar) == []


def test_a_row_that_is_out_of_time_names_its_limits(monkeypatch):
    def late(*arguments, timeout, **others):
        raise OutOfTime(f"it took longer than {timeout:g} seconds")

    monkeypatch.setattr(suite, "run_isolated", late)
    bench = Bench(
        Request(device="cpu", max_seconds=10.0),
        Stopwatch(torch.device("cpu")),
        Ceilings({"float32": 1e9}, 1e9),
        Path("traces"),
        tqdm(disable=True),
    )
    (found,) = bench.rows(Comparison([Measurement("a", Subject, {})]))
    assert found["needs"] == (
        "a faster device or a higher --max-seconds: it took longer than 70 seconds"
    )
