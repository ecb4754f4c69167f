"""The optimization levels as the benchmark measures them."""

import math

import pytest
import torch

from dpflash import optimization
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
    assert any(change.startswith("privacy") for change in subject.told()["changes"])
    assert subject.told()["fell_back"] is None


def test_a_sum_that_is_not_clipped_is_told(monkeypatch):
    subject = optimize.optimize_subject(level="conservative", device="cpu", seed=0, **TINY)
    monkeypatch.setattr(optimize, "_MAX_GRAD_NORM", 1e6)
    assert subject.error() > 0.1


def test_a_gradient_that_is_no_number_is_infinitely_wrong(monkeypatch):
    real = optimize.GradientKeeper.step

    def poison(keeper, closure=None):
        real(keeper)
        keeper._given[-1].fill_(math.nan)

    monkeypatch.setattr(optimize.GradientKeeper, "step", poison)
    subject = optimize.optimize_subject(level="conservative", device="cpu", seed=0, **TINY)
    assert subject.error() == math.inf


def test_a_row_whose_compiler_failed_says_so_and_is_the_eager_one(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no such instruction")

    torch.compiler.reset()
    monkeypatch.setattr(optimization, "_BACKEND", fails)
    monkeypatch.setattr(optimization, "_missing_compiler", lambda device: None)
    subject = optimize.optimize_subject(level="aggressive", device="cpu", seed=0, **TINY)
    assert "torch.compile" in subject.told()["summary"] and subject.told()["fell_back"] is None
    with pytest.warns(UserWarning, match=r"goes on without torch\.compile"):
        subject.step()
    told = subject.told()
    assert "torch.compile" not in told["summary"]
    assert "no such instruction" in told["fell_back"] and told["fell_back"] in told["changes"]
    cells = dict(optimize.SUITE.tables[0].columns)
    assert "no such instruction" in cells["fell back"](told)


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
