"""The private steps that are measured: they are right, wrong ones are found, and their work."""

import math
import sys
import warnings

import pytest
import torch

from dpflash import PrivacyEngine
from dpflash.bench import private, private_tasks
from dpflash.bench.private import (
    DPFLASH,
    NONPRIVATE,
    PEERS,
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
LM = {"batch": 2, "tokens": 16, "heads": 2, "head_dim": 16, "layers": 1, "dtype": "float32"}
HERE = {"device": "cpu", "seed": 0}
RUN = {"target_delta": 1e-5, "sample_rate": 0.01, "steps": 1000}


def subject(model, provider, **changes):
    if provider in PEERS:
        pytest.importorskip(provider.split("-")[0])
    return private_subject(model=model, provider=provider, **{**SHAPE, **HERE, **changes})


def attention_task():
    return make_task(model="attention", **SHAPE, **HERE)


def training_of(task, provider):
    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    return make_training(task, provider, noise_multiplier=1.0, optimize=sgd)


@pytest.mark.parametrize("model", ["attention", "lm", "llama-lora"])
@pytest.mark.parametrize("provider", PROVIDERS)
def test_without_noise_every_provider_sums_what_a_loop_over_samples_sums(model, provider):
    measured = subject(model, provider)
    assert measured.error() <= measured.tolerance
    assert measured.tokens == 72
    if provider not in PEERS:
        # A step of the private loader raises no warning.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measured.step()
            measured.step()


@pytest.mark.parametrize("provider", ["dpflash-flat-auto", "opacus-ghost"])
def test_under_autocast_the_sum_is_right_to_the_digits_of_bfloat16(provider):
    measured = subject("lm", provider, dtype="bfloat16")
    assert 1e-4 < measured.error() <= measured.tolerance


@pytest.mark.parametrize("provider", ["dpflash-flat-auto", "dpflash-per_layer"])
def test_a_provider_that_clips_otherwise_than_it_says_is_found(monkeypatch, provider):
    kinds = {"dpflash-flat-auto": "per_layer", "dpflash-per_layer": "flat"}
    monkeypatch.setattr(private, "clipping_of", lambda provider: kinds[provider])
    measured = subject("attention", provider)
    assert measured.error() > 100 * measured.tolerance


def test_a_provider_that_forgets_a_sample_is_found(monkeypatch):
    task, expected = attention_task(), clipped_sums
    monkeypatch.setattr(
        private, "clipped_sums", lambda *args: [2 / 3 * total for total in expected(*args)]
    )
    assert gradient_error(task, "dpflash-flat-auto") == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize(("factor", "is_found"), [(0.999, True), (1.0005, False), (1.01, True)])
def test_norms_that_are_no_bounds_or_too_high_are_found(monkeypatch, factor, is_found):
    real = PrivacyEngine.diagnostics

    def diagnostics(engine):
        found = real(engine)
        return {**found, "per_sample_norms": found["per_sample_norms"] * factor}

    monkeypatch.setattr(PrivacyEngine, "diagnostics", diagnostics)
    error = gradient_error(attention_task(), "dpflash-flat-book_keeping")
    # Gradients that were clipped by other norms than these are off by as much.
    assert error == math.inf if is_found else error == pytest.approx(5e-4, rel=0.2)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_infinitely_wrong(monkeypatch, place, bad):
    real = private.GradientKeeper.step

    def poison(keeper, closure=None):
        real(keeper)
        keeper._given[place].view(-1)[0] = bad

    monkeypatch.setattr(private.GradientKeeper, "step", poison)
    assert gradient_error(attention_task(), "dpflash-flat-auto") == math.inf


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_every_sample_of_the_loop_is_clipped_to_the_whole_bound(clipping):
    task = attention_task()
    for i in range(task.batch):
        one = private_tasks.Task(task.build, task.x[i : i + 1], task.y[i : i + 1], task.loss)
        norm = sum(total.square().sum() for total in clipped_sums(one, clipping)).sqrt()
        assert norm.item() == pytest.approx(private.MAX_GRAD_NORM, rel=1e-5)


def test_a_private_step_is_accounted_for_as_one_of_the_private_loader():
    training = training_of(attention_task(), "dpflash-flat-auto")
    training.step()
    assert training.engine.sampler == "poisson"
    assert training.engine.neighboring_relation == "zero_out"
    assert training.engine.get_epsilon(1e-5) < float("inf")


def test_a_missing_peer_and_a_second_layer_of_attention_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="layers=2"):
        subject("attention", NONPRIVATE, layers=2)
    for peer, provider in [("opacus", "opacus-hooks"), ("opake.dpsgd.clipping", "opake")]:
        monkeypatch.setitem(sys.modules, peer, None)
        with pytest.raises(Unsupported, match=f"pip install {peer.split('.')[0]}"):
            private_subject(model="attention", provider=provider, **SHAPE, **HERE)


def test_work_of_a_step_is_that_of_the_formula():
    # Four projections forward and their weights' gradients, the gradient of one of their inputs
    # (the data need none), and the pairs of causal attention.
    batch, tokens, heads, head_dim = (SHAPE[k] for k in ("batch", "tokens", "heads", "head_dim"))
    projections = batch * tokens * 2 * (heads * head_dim) ** 2 * (4 + 4 + 1)
    pairs = 14 * head_dim * batch * heads * tokens * (tokens + 1) // 2
    assert subject("attention", NONPRIVATE).work().flops == projections + pairs


@pytest.mark.parametrize("provider", DPFLASH)
def test_work_by_the_planner_is_the_work_that_is_counted(provider):
    task = make_task(model="attention", **{**SHAPE, "batch": 2, "tokens": 200}, **HERE)
    training = training_of(task, provider)
    counted = count_work(training.step)
    plain = count_work(training_of(task, NONPRIVATE).step)
    planned = private.add_planned_work(plain, training.engine)
    assert planned.flops == pytest.approx(counted.flops, rel=0.01)
