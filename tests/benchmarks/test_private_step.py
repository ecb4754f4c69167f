"""The suite "private-step": its plan and its files."""

from dataclasses import replace

import pytest

from dpflash.bench import private, private_step, suite
from dpflash.bench.private import AUTO
from dpflash.bench.private_step import SUITE
from dpflash.bench.suite import Comparison, Request, run_suite
from dpflash.bench.timing import Effort
from dpflash.clipping.device_speed import Ceilings


def planned(request):
    """Measurements by name."""
    measurements = {}
    for item in SUITE.plan(request):
        assert item.baseline in (None, *(one.name for one in item.measurements))
        for one in item.measurements:
            assert one.name not in measurements
            measurements[one.name] = one
    return measurements


@pytest.mark.parametrize("quick", [True, False])
def test_the_plan_has_steps_of_every_provider(quick):
    measurements = planned(Request(quick=quick, device="cpu"))
    assert {one.columns["section"] for one in measurements.values()} == {"step"}
    found = {one.config["provider"] for one in measurements.values()}
    assert found == set(private.PROVIDERS)


def test_a_cpu_measures_the_fast_providers_on_a_long_sequence_and_peers_are_marked():
    measurements = planned(Request(device="cpu"))
    short, long = (
        {name.split("/")[2] for name in measurements if name.startswith(f"step/{place}/")}
        for place in ("B16-T256", "B4-T2048")
    )
    assert short == {*private.PROVIDERS}
    ours = {f"dpflash-{c}" for c in ("flat-auto", "flat-instantiate", "per_layer")}
    assert long == {"nonprivate", "opacus-hooks", "opake", *ours}
    peers = {one.config["provider"] for one in measurements.values() if one.columns.get("peer")}
    assert peers == {"opacus-hooks", "opacus-ghost", "opake"}


def test_the_benchmark_writes_figures(monkeypatch, tmp_path):
    def in_this_process(function, *, memory_limit, timeout, **given):
        return function(**given)

    # Tests of the limits of memory and time are in test_suite.py.
    monkeypatch.setattr(suite, "run_isolated", in_this_process)
    roofs = Ceilings({"float32": 1e11}, 1e10)
    monkeypatch.setattr(suite, "measured_roofs", lambda *_, **__: roofs)
    lm = {
        "model": "lm",
        "batch": 2,
        "tokens": 16,
        "heads": 2,
        "head_dim": 16,
        "layers": 1,
        "dtype": "float32",
    }

    def plan(request):
        yield Comparison(private_step.steps(lm, [AUTO]).measurements[:1])

    request = Request(quick=True, device="cpu", threads=1, has_progress=False, effort=Effort(1, 3))
    found = run_suite(replace(SUITE, plan=plan), request, tmp_path)
    measured = [one for one in found["rows"] if one["correct"] is not None]
    assert len(measured) == 1
    assert all(one["correct"] and one["median_ms"] and one["gflop_per_s"] for one in measured)
    page = (tmp_path / "private-step.md").read_text()
    assert "| B2-T16 | 1 | dpflash-flat-auto |" in page
