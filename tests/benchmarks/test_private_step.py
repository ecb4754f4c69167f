"""The suite "private-step": its plan and its files."""

import pytest

from dpflash.bench import private
from dpflash.bench.private_step import SUITE
from dpflash.bench.suite import Request


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
