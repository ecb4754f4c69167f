"""The benchmark of private steps: its plan, what it checks, and what it concludes."""

from dataclasses import replace

import pytest
import torch

from dpflash.bench import private, private_step
from dpflash.bench.private_step import (
    ABSENT,
    ALONE,
    AUTO,
    EPSILONS,
    SUITE,
    epsilon_subject,
    ghost_subject,
    head_subject,
    noise_subject,
)
from dpflash.bench.results import row
from dpflash.bench.suite import Comparison, Request, run_suite
from dpflash.bench.timing import Effort

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


def test_steps_on_a_cpu_have_the_shapes_and_providers_of_the_old_figures():
    measurements, _ = planned(Request(device="cpu"))
    short = {n.split("/")[2] for n in measurements if n.startswith("step/B16-T256/")}
    assert short == {*private.PROVIDERS, *ALONE} - {"opacus-ghost-registered"}
    long = {n.split("/")[2] for n in measurements if n.startswith("step/B4-T2048/")}
    assert {"nonprivate", AUTO, "opacus-hooks", "opacus-ghost"} <= long < short


@pytest.mark.parametrize("provider", ALONE)
def test_noise_alone_is_standard_normal_and_a_copy_is_a_copy(provider):
    subject = noise_subject(provider=provider, **{**LM, "head_dim": 64}, **HERE)
    assert subject.error() <= subject.tolerance


def test_noise_of_another_scale_is_seen():
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40_000, generator=generator)
    tolerance = private_step._NOISE_TOLERANCE
    assert private_step._off_standard_normal([noise]) <= tolerance
    assert private_step._off_standard_normal([1.1 * noise]) > tolerance
    assert private_step._off_standard_normal([noise + 0.1]) > tolerance


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

    monkeypatch.setattr(private_step, "private_subject", build)
    run = {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 10}
    subject = epsilon_subject(target_epsilon=2.0, **run, **LM, **HERE)
    assert given == [subject.figures["noise_multiplier"]]
    assert given != [1.0]


def test_conclusions_follow_from_the_rows():
    def step(provider, ms, peak, speedup):
        return row(
            f"step/{provider}",
            {"provider": provider},
            section="step",
            shape="B4",
            median_ms=ms,
            peak_memory_mb=peak,
            speedup=speedup,
        )

    rows = [
        step("nonprivate", 10.0, 5.0, None),
        step(AUTO, 12.0, 9.0, 10 / 12),
        step("dpflash-per_layer", 11.0, 7.0, 10 / 11),
        step("dpflash-per_block", 13.0, 6.0, 10 / 13),
        step("opacus-hooks", 24.0, 8.0, 10 / 24),
    ]
    found = {one["name"]: one for one in SUITE.derive(rows)}
    best = found["insights/clipping/B4"]["text"]
    assert "dpflash-per_layer is the fastest private step, 11 ms, 1.10 times" in best
    assert "dpflash-per_block takes the least memory, 6 MiB" in best
    assert found["insights/opacus-hooks/B4"]["ratio"] == 2.0


def test_spread_over_epsilon_is_of_tokens_per_second():
    rows = [
        row(
            f"{epsilon}",
            {"target_epsilon": epsilon},
            section="throughput_epsilon",
            median_ms=1.0,
            tokens_per_s=speed,
        )
        for epsilon, speed in ((1.0, 100.0), (8.0, 103.0))
    ]
    (found,) = SUITE.derive(rows)
    assert found["spread"] == pytest.approx(0.03)


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
