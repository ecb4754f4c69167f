"""The suite "private-step": its plan, and the conclusions from its rows."""

from dataclasses import replace

import pytest

from dpflash.bench import private, private_step, suite
from dpflash.bench.output import row
from dpflash.bench.private_step import ABSENT, AUTO, SUITE
from dpflash.bench.suite import Comparison, Request, run_suite
from dpflash.bench.timing import Effort, speedup, summarize
from dpflash.clipping.device_speed import Ceilings


def planned(request):
    """Measurements by name, and the rows that are not measured."""
    measurements, rows = {}, []
    for item in SUITE.plan(request):
        if isinstance(item, Comparison):
            assert item.baseline in (None, *(one.name for one in item.measurements))
            for one in item.measurements:
                assert one.name not in measurements
                measurements[one.name] = one
        else:
            rows += item(request)
    return measurements, rows


@pytest.mark.parametrize("quick", [True, False])
def test_the_plan_has_every_section_and_says_what_is_absent(quick):
    measurements, rows = planned(Request(quick=quick, device="cpu"))
    sections = {one.columns["section"] for one in measurements.values()}
    assert sections == {"step", "ghost", "head"}
    assert {one["config"]["provider"] for one in rows} == set(ABSENT)
    assert all(one["median_ms"] is None for one in rows)
    # Nothing has looked for them.
    assert all(one["needs"].startswith("not measured here: ") for one in rows)


def test_a_cpu_measures_every_provider_the_fast_ones_on_a_long_sequence_and_peers_are_marked():
    measurements, _ = planned(Request(device="cpu"))
    short, long = (
        {name.split("/")[2] for name in measurements if name.startswith(f"step/{place}/")}
        for place in ("B16-T256", "B4-T2048")
    )
    assert short == {*private.PROVIDERS} - {"opacus-ghost-registered"}
    ours = {f"dpflash-{c}" for c in ("flat-auto", "flat-stored", "per_layer", "per_block")}
    assert long == {"nonprivate", "opacus-hooks", *ours}
    peers = {one.config["provider"] for one in measurements.values() if one.columns.get("peer")}
    assert peers == {"opacus-hooks", "opacus-ghost"}


def timed(provider, samples, *, section="step", peak=5.0, nonprivate=None, **config):
    """A row with the figures of a run; nonprivate are the samples of the baseline."""
    columns = {}
    if nonprivate is not None:
        over = speedup(samples, nonprivate)
        columns = {"speedup": over.median, "speedup_ci95": list(over.ci95)}
    return row(
        f"{section}/{provider}",
        {"provider": provider, **config},
        section=section,
        shape="B4",
        median_ms=summarize(samples).median_ms / 1e3,
        samples_ms=samples,
        peak_memory_mb=peak,
        **columns,
    )


def derived(rows):
    return {one["name"]: one for one in SUITE.derive(rows)}


def test_conclusions_follow_from_the_rows():
    plain = [10.0] * 6
    rows = [
        timed("nonprivate", plain),
        timed(AUTO, [12.0] * 6, peak=9.0, nonprivate=plain),
        timed("dpflash-per_layer", [11.0] * 6, peak=7.0, nonprivate=plain),
        timed("dpflash-per_block", [10.0, 12.5, 10.5, 12.5, 10.5, 12.5], nonprivate=plain),
    ]
    best = derived(rows)["insights/clipping/B4"]["text"]
    assert "per_layer is the fastest private step, 11 ms, 1.10 [1.10, 1.10] times a non" in best
    assert "no slower for certain: dpflash-per_block;" in best
    assert "dpflash-per_block takes the least memory, 5 MiB" in best


def test_ratios_are_those_of_the_rounds_and_have_their_interval():
    # A machine that became ten times as slow: medians of all rounds are not the ratio.
    ours = [1.0, 1.0, 1.0, 1.0, 10.0, 10.0, 10.0]
    theirs = [3.0, 3.0, 3.0, 20.0, 20.0, 20.0, 20.0]
    found = derived([timed(AUTO, ours), timed("opacus-hooks", theirs)])["insights/opacus-hooks/B4"]
    rounds = speedup(ours, theirs)
    assert found["ratio"] == rounds.median == 2.5
    assert (found["low"], found["high"]) == rounds.ci95
    assert f"2.50 [{rounds.ci95[0]:.2f}, {rounds.ci95[1]:.2f}] times" in found["text"]


def test_the_benchmark_writes_figures_and_conclusions(monkeypatch, tmp_path):
    def in_this_process(function, *, memory_limit, timeout, **given):
        return function(**given)

    # Tests of the limits of memory and time are in test_suite.py.
    monkeypatch.setattr(suite, "run_isolated", in_this_process)
    roofs = Ceilings({"float32": 1e11}, 1e10)
    monkeypatch.setattr(suite, "measured_roofs", lambda *_, **__: roofs)
    lm = {"batch": 2, "tokens": 16, "heads": 2, "head_dim": 16, "layers": 1, "dtype": "float32"}

    def plan(request):
        yield Comparison(private_step.steps(lm, [AUTO]).measurements[:1])

    request = Request(quick=True, device="cpu", threads=1, has_progress=False, effort=Effort(1, 3))
    found = run_suite(replace(SUITE, plan=plan), request, tmp_path)
    measured = [one for one in found["rows"] if one["correct"] is not None]
    assert len(measured) == 1
    assert all(one["correct"] and one["median_ms"] and one["gflop_per_s"] for one in measured)
    page = (tmp_path / "private-step.md").read_text()
    assert "B2-T16: dpflash-flat-auto is the fastest private step" in page
