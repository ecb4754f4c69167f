"""What engine and optimizer let callers set is checked at once and takes effect; nothing else."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.noise import Banded

DATA = torch.randn(16, 3)


def one_step(run):
    engine, model, optimizer, loader = run
    for (x,) in loader:
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        if loader.is_last:
            return model.weight.grad


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("noise_multiplier", 50, "set noise_multiplier of the optimizer"),
        ("max_grad_norm", 0.3, "set max_grad_norm of the optimizer"),
        ("expected_batch_size", 64, "set expected_batch_size of the optimizer"),
        ("physical_batch_size", 64, "pass it to make_private"),
        ("accountant", "rdp", r"pass it to PrivacyEngine\(\.\.\.\)"),
        ("epochs", 3, "no attribute can be set"),
    ],
)
def test_the_engine_refuses_to_be_set_and_names_the_place(name, value, words, private):
    engine, *_ = private(nn.Linear(3, 2))
    with pytest.raises(AttributeError, match=f"PrivacyEngine.{name}={value!r}.*{words}"):
        setattr(engine, name, value)
    engine._private_mark = 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("noise_multipler", "did you mean 'noise_multiplier'"),
        ("loss_reduction", "make_private"),
        ("original_optimizer", "make_private"),
        ("lr", r"optimizer\.param_groups"),
        ("secure_mode", "ChaCha20"),
        ("anything", "what can be set: .*expected_batch_size, max_grad_norm, noise_multiplier"),
    ],
)
def test_the_optimizer_refuses_other_names_and_says_what_can_be_set(name, words, private):
    *_, optimizer, _ = private(nn.Linear(3, 2))
    with pytest.raises(AttributeError, match=f"PrivateOptimizer.{name}=.*{words}"):
        setattr(optimizer, name, 1.0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("noise_multiplier", [math.nan, -1.0, math.inf, 1e38, 2.0**14, 1e-320, "1", True, None]),
        ("max_grad_norm", [math.nan, -1.0, 0, math.inf, 1e38, 1e-45, [1.0, 2.0], None]),
        ("expected_batch_size", [math.nan, -1, 0, math.inf, "8", None]),
    ],
)
def test_a_bad_value_is_refused_when_it_is_set_and_the_old_one_stays(name, values, private):
    engine, model, optimizer, _ = private(nn.Linear(3, 2), DATA, noise_multiplier=1.0)
    before = getattr(optimizer, name)
    for value in values:
        with pytest.raises(ValueError, match=name):
            setattr(optimizer, name, value)
        assert getattr(optimizer, name) == before
    assert engine.accountant.history == []


def test_noise_that_is_set_is_drawn_and_accounted_for_from_the_next_release_on(private):
    released = {}
    for noise in (1.0, 3.0):
        run = private(nn.Linear(3, 2), DATA, noise_multiplier=1.0, batch_size=16, one_part=True)
        engine, model, optimizer, _ = run
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        optimizer.noise_multiplier = np.float32(noise)
        released[noise] = one_step(run)  # gradients are zero: noise alone
        ((charged, _, steps),) = engine.accountant.history
        assert (charged, steps) == (noise, 1)
    assert torch.allclose(released[3.0], 3 * released[1.0], rtol=1e-5, atol=1e-7)
    assert released[1.0].any()


def test_noise_scales_with_a_bound_that_is_set_and_samples_are_clipped_to_it(private):
    def run(bound, noise):
        made = private(nn.Linear(3, 2, bias=False), DATA, noise_multiplier=noise, batch_size=16)
        nn.init.ones_(made[1].weight)
        made[2].max_grad_norm = bound
        return one_step(made)

    clipped = run(1e-4, 0.0)
    assert 0 < float(clipped.norm()) * 16 <= 16e-4  # one sample's part is at most the bound
    first, second = run(1e-4, 2.0) - clipped, run(2e-4, 2.0) - run(2e-4, 0.0)
    assert torch.allclose(2 * first, second, rtol=1e-3, atol=1e-9)


def test_an_expected_batch_size_that_is_set_divides_and_changes_no_epsilon(private, tmp_path):
    def run(size):
        model = nn.Linear(3, 2, bias=False)
        nn.init.ones_(model.weight)
        made = private(model, DATA, noise_multiplier=1.0, batch_size=8, one_part=True)
        if size:
            made[2].expected_batch_size = size
        return made

    plain, other = run(None), run(64)
    assert torch.allclose(one_step(plain) / 8, one_step(other))
    assert plain[0].get_epsilon(1e-5) == other[0].get_epsilon(1e-5)
    other[0].save_checkpoint(tmp_path / "state")
    resumed = run(None)
    with pytest.warns(UserWarning, match="expected_batch_size is 64.0 from the checkpoint"):
        resumed[0].load_checkpoint(tmp_path / "state")
    assert resumed[2].expected_batch_size == 64


def test_an_expected_batch_size_is_refused_where_sums_are_released(private):
    *_, optimizer, _ = private(nn.Linear(3, 2), loss_reduction="sum")
    with pytest.raises(ValueError, match="expected_batch_size=64 with loss_reduction='sum'"):
        optimizer.expected_batch_size = 64


def test_noise_0_warns_that_epsilon_is_inf_from_now_on(private, recwarn):
    run = private(nn.Linear(3, 2), DATA, noise_multiplier=1.0, one_part=True)
    with pytest.warns(UserWarning, match="noise_multiplier=0: .*epsilon is inf then") as caught:
        run[2].noise_multiplier = 0
    assert caught[0].filename == __file__
    one_step(run)
    assert run[0].get_epsilon(1e-5) == math.inf
    recwarn.clear()
    private(nn.Linear(3, 2), DATA.clone(), noise_multiplier=0.0)[2].noise_multiplier = 0.0
    assert not recwarn


def test_learning_rate_schedulers_and_those_of_opacus_work_as_before(private):
    schedulers = pytest.importorskip("opacus.schedulers")
    run = private(nn.Linear(3, 2), DATA, noise_multiplier=1.0, one_part=True)
    optimizer = run[2]
    rate = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    noise = schedulers.ExponentialNoise(optimizer, gamma=0.9)
    bound = schedulers.ExponentialGradClip(optimizer, gamma=0.8)
    one_step(run)
    for scheduler in (rate, noise, bound):
        scheduler.step()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert optimizer.original_optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (0.9, 0.8)


def test_an_engine_without_a_model_refuses_too():
    with pytest.raises(AttributeError, match="PrivacyEngine.seed=3"):
        dpflash.PrivacyEngine().seed = 3


SAMPLINGS = {
    "poisson": {},
    "fixed_size": {"sampling": "fixed_size"},
    "shuffled": {"poisson_sampling": False},
    "cyclic_poisson": {
        "sampling": "cyclic_poisson",
        "noise_mechanism": Banded.optimized(bands=2, steps=8),
    },
}


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_what_draws_and_epsilon_are_of_cannot_be_set(kind, private):
    run = private(
        nn.Linear(3, 2), DATA, noise_multiplier=1.0, foreign_batches=False, **SAMPLINGS[kind]
    )
    engine, _, _, loader = run
    assert loader.sampler_name == kind
    for holder in (loader, loader.batch_sampler):
        names = [*vars(holder), *vars(type(holder))]
        for name in (n for n in names if not n.startswith("_")):
            with pytest.raises(AttributeError, match=f"{name} cannot be set: make_private"):
                setattr(holder, name, 1.0)
        holder._mark_of_a_framework = 1
    one_step(run)
    with pytest.raises(AttributeError, match="pass it to the DataLoader that make_private"):
        loader.collate_fn = list


def test_another_batch_size_in_a_run_is_another_make_private_of_the_engine(private):
    run = private(nn.Linear(3, 2), DATA, noise_multiplier=1.0, one_part=True)
    engine, model, optimizer, loader = run
    with pytest.raises(AttributeError, match=r"engine\.detach.*new DataLoader and the plain"):
        loader.batch_sampler.sample_rate = 1.0
    one_step(run)
    before, model = engine.get_epsilon(1e-5), engine.detach(model)
    made = engine.make_private(
        module=model,
        optimizer=optimizer.original_optimizer,
        data_loader=DataLoader(TensorDataset(DATA), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        physical_batch_size=16,
    )
    one_step((engine, *made))
    assert [phase[1] for phase in engine.accountant.history] == [0.25, 0.5]
    assert engine.get_epsilon(1e-5) > before
