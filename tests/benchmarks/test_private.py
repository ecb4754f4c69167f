"""The private steps that are measured: they are right, wrong ones are seen, and their work."""

import math
import warnings

import pytest
import torch

from dpflash import PrivacyEngine
from dpflash.bench import private, private_tasks
from dpflash.bench.private import (
    DPFLASH,
    NONPRIVATE,
    OPACUS,
    PROVIDERS,
    clipped_sums,
    gradient_error,
    make_training,
    private_subject,
)
from dpflash.bench.private_tasks import make_task
from dpflash.bench.suite import Unsupported
from dpflash.bench.work import count_work

SHAPE = {"batch": 3, "tokens": 24, "heads": 2, "head_dim": 80}


def subject(model, provider, **changes):
    arguments = {**SHAPE, "device": "cpu", "seed": 0, **changes}
    return private_subject(model=model, provider=provider, **arguments)


def attention_task(dtype="float32"):
    return make_task(model="attention", **SHAPE, dtype=dtype, device="cpu", seed=0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("model", ["attention", "lm"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_without_noise_every_provider_sums_what_a_loop_over_samples_sums(model, provider):
    if provider in OPACUS:
        pytest.importorskip("opacus")
    measured = subject(model, provider)
    assert measured.error() <= measured.tolerance


@pytest.mark.parametrize("provider", ["dpflash-flat-auto", "dpflash-per_block", "opacus-ghost"])
def test_under_autocast_the_sum_is_right_to_the_digits_of_bfloat16(provider):
    if provider in OPACUS:
        pytest.importorskip("opacus")
    measured = subject("lm", provider, dtype="bfloat16")
    assert 1e-4 < measured.error() <= measured.tolerance


@pytest.mark.parametrize("provider", ["dpflash-flat-auto", "dpflash-per_layer"])
def test_a_provider_that_clips_otherwise_than_it_says_is_seen(monkeypatch, provider):
    kinds = {"dpflash-flat-auto": "per_layer", "dpflash-per_layer": "per_block"}
    monkeypatch.setattr(private, "clipping_of", lambda provider: kinds[provider])
    measured = subject("attention", provider)
    assert measured.error() > 100 * measured.tolerance


def test_a_provider_that_forgets_a_sample_is_seen(monkeypatch):
    task, expected = attention_task(), clipped_sums
    monkeypatch.setattr(
        private,
        "clipped_sums",
        lambda *args: [2 / 3 * total for total in expected(*args)],
    )
    assert gradient_error(task, "dpflash-flat-auto") == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(("factor", "is_seen"), [(0.999, True), (1.0005, False), (1.01, True)])
def test_norms_that_are_no_bounds_or_too_high_are_seen(monkeypatch, factor, is_seen):
    real = PrivacyEngine.diagnostics

    def diagnostics(engine):
        found = real(engine)
        return {**found, "per_sample_norms": found["per_sample_norms"] * factor}

    assert gradient_error(attention_task(), "dpflash-flat-book_keeping") <= 1e-4
    monkeypatch.setattr(PrivacyEngine, "diagnostics", diagnostics)
    error = gradient_error(attention_task(), "dpflash-flat-book_keeping")
    # Gradients that were clipped by other norms than these are off by as much.
    assert error == math.inf if is_seen else error == pytest.approx(5e-4, rel=0.2)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_is_infinitely_wrong(monkeypatch, place, bad):
    real = private.GradientKeeper.step

    def poison(keeper, closure=None):
        real(keeper)
        keeper._given[place].view(-1)[0] = bad

    monkeypatch.setattr(private.GradientKeeper, "step", poison)
    assert gradient_error(attention_task(), "dpflash-flat-auto") == math.inf


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "per_block"])
def test_every_sample_of_the_loop_is_clipped_to_the_whole_bound(clipping):
    task = attention_task()
    for i in range(task.batch):
        one = private_tasks.Task(task.build, task.x[i : i + 1], task.y[i : i + 1], task.loss)
        norm = sum(total.square().sum() for total in clipped_sums(one, clipping)).sqrt()
        assert norm.item() == pytest.approx(private._MAX_GRAD_NORM, rel=1e-5)


@pytest.mark.parametrize("provider", [NONPRIVATE, *DPFLASH])
def test_steps_of_the_private_loader_raise_no_warning(provider):
    measured = subject("lm", provider)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured.step()
        measured.step()


def test_a_private_step_is_paid_for_as_one_drawn_by_the_private_loader():
    training = make_training(
        attention_task(), "dpflash-flat-auto", noise_multiplier=1.0, optimize=sgd
    )
    training.step()
    assert training.engine.sampler == "poisson"
    assert training.engine.neighboring_relation == "zero_out"
    assert training.engine.get_epsilon(1e-5) < float("inf")


def test_register_of_a_step_leaves_opacus_as_it_was():
    pytest.importorskip("opacus")
    from opacus.grad_sample import GradSampleModuleFastGradientClipping as Ghost

    before = dict(Ghost.NORM_SAMPLERS)
    inside = []
    task = attention_task()

    def loss(output, y):
        inside.append(dict(Ghost.NORM_SAMPLERS))
        return task.loss(output, y)

    spied = private_tasks.Task(task.build, task.x, task.y, loss)
    for provider in ("opacus-ghost", "opacus-ghost-registered"):
        make_training(spied, provider, noise_multiplier=1.0, optimize=sgd).step()
    assert Ghost.NORM_SAMPLERS == before
    assert inside[0] == before
    assert inside[-1] != before


def test_a_missing_opacus_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opacus", None)
    with pytest.raises(Unsupported, match="pip install opacus"):
        subject("attention", "opacus-hooks")


def test_work_of_a_step_is_that_of_the_hand_formula():
    by_hand = private_tasks.attention_step_flops(**SHAPE)
    assert subject("attention", NONPRIVATE).work().flops == by_hand


@pytest.mark.parametrize("provider", DPFLASH)
def test_work_by_the_planner_is_the_work_that_is_counted(provider):
    task = make_task(
        model="attention", **{**SHAPE, "batch": 2, "tokens": 200}, device="cpu", seed=0
    )
    plain = make_training(task, NONPRIVATE, noise_multiplier=1.0, optimize=sgd)
    training = make_training(task, provider, noise_multiplier=1.0, optimize=sgd)
    counted = count_work(training.step)
    formula = private._beyond(count_work(plain.step), training.engine)
    assert formula.flops == pytest.approx(counted.flops, rel=0.01)


def test_one_layer_is_all_that_attention_has():
    with pytest.raises(ValueError, match="layers=2"):
        subject("attention", NONPRIVATE, layers=2)
