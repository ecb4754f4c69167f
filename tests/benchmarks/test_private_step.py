"""The benchmark of private steps: its plan, what it checks, and what it concludes."""

from dataclasses import replace

import pytest
import torch

from dpflash.bench import private, private_parts, private_step
from dpflash.bench.output import row
from dpflash.bench.private_parts import (
    ALONE,
    epsilon_subject,
    ghost_subject,
    head_subject,
    noise_subject,
)
from dpflash.bench.private_step import ABSENT, AUTO, EPSILONS, SUITE
from dpflash.bench.suite import Comparison, Request, run_suite
from dpflash.bench.timing import Effort, speedup, summarize

LM = {"batch": 2, "tokens": 16, "heads": 2, "head_dim": 16, "layers": 1, "dtype": "float32"}
HERE = {"device": "cpu", "seed": 0}


def planned(request):
    """Measurements by name, and the rows of what is not measured."""
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
    assert sections == {"step", "ghost", "head", "throughput_batch", "throughput_epsilon"}
    assert {one["config"]["provider"] for one in rows} == set(ABSENT)
    assert all(one["median_ms"] is None for one in rows)
    # Nothing has looked for them.
    assert all(one["needs"].startswith("not measured here: ") for one in rows)


def test_steps_on_a_cpu_are_of_every_provider_and_on_a_long_sequence_of_the_fast_ones():
    measurements, _ = planned(Request(device="cpu"))
    short = {n.split("/")[2] for n in measurements if n.startswith("step/B16-T256/")}
    assert short == {*private.PROVIDERS, *ALONE} - {"opacus-ghost-registered"}
    long = {n.split("/")[2] for n in measurements if n.startswith("step/B4-T2048/")}
    ours = {f"dpflash-{c}" for c in ("flat-auto", "flat-stored", "per_layer", "per_block")}
    assert {"nonprivate", "opacus-hooks", *ours} <= long < short


def test_what_others_wrote_is_marked_as_a_peer():
    measurements, _ = planned(Request(device="cpu"))
    peers = {one.config["provider"] for one in measurements.values() if one.columns.get("peer")}
    assert peers == {"opacus-hooks", "opacus-ghost"}


@pytest.mark.parametrize("provider", ALONE)
def test_noise_alone_is_standard_normal_and_a_copy_is_a_copy(provider):
    subject = noise_subject(provider=provider, **{**LM, "head_dim": 64}, **HERE)
    assert subject.error() <= subject.tolerance


def test_noise_of_another_scale_is_seen():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40_000, generator=generator)
    tolerance = private_parts._NOISE_TOLERANCE
    assert private_parts._off_standard_normal([noise]) <= tolerance
    assert private_parts._off_standard_normal([1.1 * noise]) > tolerance
    assert private_parts._off_standard_normal([noise + 0.1]) > tolerance


@pytest.mark.parametrize("provider", ["nonprivate", "opacus-ghost", "opacus-ghost-registered"])
def test_ghost_clipping_is_right_with_and_without_register(provider):
    pytest.importorskip("opacus")
    subject = ghost_subject(provider=provider, batch=2, tokens=32, width=16, layers=2, **HERE)
    assert subject.error() <= subject.tolerance


HEADS = [one for family in private_step._HEAD_FAMILIES.values() for one in family]


@pytest.mark.parametrize(("head", "provider"), HEADS)
def test_a_head_gets_the_right_sums_and_its_input_a_gradient(head, provider):
    subject = head_subject(
        head=head, provider=provider, batch=2, tokens=32, classes=300, width=16, **HERE
    )
    assert subject.error() <= subject.tolerance
    subject.step()


def test_noise_falls_with_the_epsilon_that_is_asked_for():
    run = {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 1000}
    noise = [
        epsilon_subject(target_epsilon=epsilon, **run, **LM, **HERE).figures["noise_multiplier"]
        for epsilon in EPSILONS[:2]
    ]
    assert noise[0] > noise[1] > 0.5


def test_a_step_for_an_epsilon_has_the_noise_of_that_epsilon(monkeypatch):
    given = []

    def build(**arguments):
        given.append(arguments["noise_multiplier"])
        return private.private_subject(**arguments)

    monkeypatch.setattr(private_parts, "private_subject", build)
    run = {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 10}
    subject = epsilon_subject(target_epsilon=2.0, **run, **LM, **HERE)
    assert given == [subject.figures["noise_multiplier"]]
    assert given != [1.0]


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


def test_the_ratio_beside_opacus_is_that_of_the_rounds_and_has_their_interval():
    # A machine that grew ten times as slow on its way: medians of rounds are not its ratio.
    ours = [1.0, 1.0, 1.0, 1.0, 10.0, 10.0, 10.0]
    theirs = [3.0, 3.0, 3.0, 20.0, 20.0, 20.0, 20.0]
    found = derived([timed(AUTO, ours), timed("opacus-hooks", theirs)])["insights/opacus-hooks/B4"]
    rounds = speedup(ours, theirs)
    assert found["ratio"] == rounds.median == 2.5
    assert (found["low"], found["high"]) == rounds.ci95
    assert f"2.50 [{rounds.ci95[0]:.2f}, {rounds.ci95[1]:.2f}] times" in found["text"]


def test_steps_for_two_epsilons_are_compared_by_rounds():
    rows = [
        timed(f"{epsilon}", samples, section="throughput_epsilon", target_epsilon=epsilon)
        for epsilon, samples in ((1.0, [1.0, 10.0, 10.0]), (8.0, [1.1, 1.1, 11.0]))
    ]
    (found,) = SUITE.derive(rows)
    assert found["ratio"] == pytest.approx(1.1)
    assert "epsilon 8 takes 1.10 [" in found["text"]


@pytest.mark.slow
def test_the_benchmark_writes_figures_and_conclusions(tmp_path):
    def plan(request):
        yield private_step._throughput(LM, 1000.0)
        yield private_step._steps(LM, ["nonprivate", AUTO])

    request = Request(quick=True, device="cpu", threads=1, has_progress=False, effort=Effort(1, 3))
    found = run_suite(replace(SUITE, plan=plan), request, tmp_path)
    measured = [one for one in found["rows"] if one["correct"] is not None]
    assert len(measured) == 6
    assert all(one["correct"] and one["median_ms"] for one in measured)
    assert measured[2]["gflop_per_s"] > 0
    page = (tmp_path / "private-step.md").read_text()
    assert "2 is the optimal batch of the lm" in page
    assert "B2-T16: dpflash-flat-auto is the fastest private step" in page
