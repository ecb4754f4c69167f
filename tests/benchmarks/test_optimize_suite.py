"""The optimization levels as the benchmark measures them."""

import pytest
import torch

from dpflash.bench import private_step as optimize
from dpflash.bench.output import row
from dpflash.bench.suite import Request
from dpflash.clipping.planner import LEVELS
from dpflash.optimize import wrapper as leveled

TINY = {"batch": 3, "physical_batch": 3, "tokens": 24, "heads": 2, "head_dim": 8}


@pytest.mark.parametrize("level", LEVELS[:3])
def test_a_loop_over_samples_confirms_the_gradient_of_a_level(level):
    subject = optimize.optimize_subject(level=level, device="cpu", seed=0, **TINY)
    assert subject.error() <= subject.tolerance
    assert (subject.dtype == "bfloat16") == (level == "balanced")
    assert subject.tokens == 72
    subject.step()
    used = subject.late_figures()
    assert used["fell_back"] is None and used["compiled"] is False
    assert (used["dtype"], used["clipping"]) == (subject.dtype, "flat")


@pytest.mark.cases(0)
def test_a_row_whose_compiler_failed_names_it_and_ran_eagerly(monkeypatch):
    def fails(graph, inputs):
        raise RuntimeError("no such instruction")

    torch.compiler.reset()
    monkeypatch.setattr(leveled, "_BACKEND", fails)
    subject = optimize.optimize_subject(level="aggressive", device="cpu", seed=0, **TINY)
    assert subject.late_figures()["compiled"] and subject.late_figures()["fell_back"] is None
    with pytest.warns(UserWarning, match=r"goes on without torch\.compile"):
        subject.step()
    used = subject.late_figures()
    assert used["compiled"] is False
    assert (used["dtype"], used["clipping"]) == ("bfloat16", "per_layer")
    assert "no such instruction" in used["fell_back"]
    cells = dict(optimize.OPTIMIZE.tables[0].columns)
    assert "no such instruction" in cells["fell back"](used)
    # It is clipped by the clipping of its row, not flat.
    with pytest.warns(UserWarning, match=r"goes on without torch\.compile"):
        assert subject.error() <= subject.tolerance


def test_every_level_takes_turns_with_none_on_every_workload():
    sizes = []
    for item in optimize.OPTIMIZE.plan(Request(device="cpu")):
        configs = [one.config for one in item.measurements]
        sizes.append(size_of(configs[0]))
        assert all(size_of(config) == sizes[-1] for config in configs)
        assert tuple(config["level"] for config in configs) == LEVELS
        assert item.baseline == item.measurements[0].name
        assert all(1 <= config["physical_batch"] <= config["batch"] for config in configs)
    assert set(sizes) <= set(optimize.WORKLOADS) and len(sizes) == 3


def size_of(config):
    return tuple(config[key] for key in ("batch", "tokens", "heads", "head_dim"))


def test_no_step_is_measured_twice_under_two_names():
    plan = optimize.OPTIMIZE.plan(Request(device="cpu"))
    steps = [{**one.config, "batch": None} for item in plan for one in item.measurements]
    assert all(step not in steps[:number] for number, step in enumerate(steps))


def level_row(level, **columns):
    return row(
        f"{level}/{len(columns)}",
        {"level": level},
        section="levels",
        fell_back=columns.pop("fell_back", None),
        **columns,
    )


def test_gains_are_the_range_over_the_workloads_that_ran_as_the_level_has_it():
    rows = [
        level_row("none"),
        level_row("balanced", speedup=1.5),
        level_row("balanced", speedup=2.0),
        level_row("aggressive", speedup=9.0, fell_back="left out: torch.compile, since ..."),
        row("left out", {"level": "aggressive"}, section="levels", needs="a GPU"),
    ]
    (gain,) = [one for one in optimize.OPTIMIZE.derive(rows) if one["section"] == "gains"]
    assert gain["config"]["level"] == "balanced"
    assert (gain["least"], gain["most"], gain["workloads"]) == (1.5, 2.0, 2)
