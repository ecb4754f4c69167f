"""Modes around the guarantees that a review found, each refused or paid for."""

import contextlib
import os
import resource
import subprocess
import sys
import warnings

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import dpflash
from dpflash.accounting import Gaussian

DATA = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)))


def make(model=None, engine=None, **kwargs):
    model = model or nn.Linear(3, 2)
    engine = engine or dpflash.PrivacyEngine()
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "foreign_batches": True, **kwargs}
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(DATA, batch_size=16),
        **arguments,
    )
    return engine, model, optimizer, loader


def take(engine, model, optimizer, x):
    optimizer.zero_grad()
    engine.backward(model(x).square().mean(1))
    optimizer.step()


def test_loading_an_old_checkpoint_after_detach_does_not_forget_spent_privacy(tmp_path):
    engine, model, optimizer, loader = make()
    engine.save_checkpoint(tmp_path / "old")
    for (x,) in loader:
        take(engine, model, optimizer, x)
    spent = engine.get_epsilon(1e-5)
    engine.detach(model)
    make(model, engine)
    with pytest.raises(RuntimeError, match="spent privacy already"):
        engine.load_checkpoint(tmp_path / "old")
    assert engine.get_epsilon(1e-5) == spent > 0


@pytest.mark.parametrize("is_taken", [True, False])
@pytest.mark.parametrize("poisson", [True, False])
def test_signals_on_a_foreign_loader_buy_no_cheap_epsilon(poisson, is_taken):
    engine, model, optimizer, _ = make(poisson_sampling=poisson, foreign_batches=is_taken)
    plain = DataLoader(DATA, batch_size=16)
    refusal = pytest.raises(dpflash.PrivateRefusal, match="the batch is not of the private loader")
    for _ in range(3):
        with (
            contextlib.nullcontext() if is_taken else refusal,
            BatchMemoryManager(
                data_loader=plain, max_physical_batch_size=8, optimizer=optimizer
            ) as physical,
        ):
            for (x,) in physical:
                take(engine, model, optimizer, x)
    assert engine.accountant.history == []
    foreign = Gaussian(relation="zero_out", noise_multiplier=1.0)
    assert engine.accountant.events == ([(foreign, 12)] if is_taken else [])
    assert ("not from its loader" in engine.sampler) == is_taken


def test_a_resumed_run_under_signals_draws_other_batches(tmp_path):
    def drawn(optimizer, loader, engine, model):
        sizes = []
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=8, optimizer=optimizer
        ) as physical:
            for (x,) in physical:
                sizes.append(x.sum().item())
                take(engine, model, optimizer, x)
        return sizes

    engine, model, optimizer, loader = make()
    before = drawn(optimizer, loader, engine, model)
    assert engine.sampler == "poisson"
    engine.save_checkpoint(tmp_path / "c")
    engine, model, optimizer, loader = make()
    engine.load_checkpoint(tmp_path / "c")
    assert not set(before) & set(drawn(optimizer, loader, engine, model))


def test_a_second_backward_on_a_hand_made_batch_is_refused():
    engine, model, optimizer, _ = make(noise_multiplier=0.0)
    x = 100 * torch.randn(1, 3)
    engine.backward(model(x).square().mean(1))
    with pytest.raises(RuntimeError, match="second backward"):
        engine.backward(model(x).square().mean(1))
    optimizer.zero_grad()
    engine.backward(model(x).square().mean(1))


def test_a_failed_backward_may_be_tried_again():
    engine, model, _, _ = make(noise_multiplier=0.0)
    x = torch.randn(4, 3)
    with pytest.raises(RuntimeError, match="did not reach"):
        engine.backward(torch.ones(4, requires_grad=True) * 2)
    engine.backward(model(x).square().mean(1))


def test_tensors_hidden_in_a_tuple_do_not_reach_the_generic_rule():
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 3))

        def forward(self, x, state):
            return x @ self.w + state[0]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = Cell()

        def forward(self, x):
            return self.cell(x, (x,))

    _, model, _, _ = make(Net())
    with pytest.raises(ValueError, match="'cell'.*tuple"):
        model(torch.randn(4, 3))


def test_losses_of_two_prepared_passes_do_not_mix():
    engine, model, _, _ = make(noise_multiplier=0.0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 3)
    engine.prepare(2)
    first = compiled(x).square().mean(1)
    engine.prepare(2)
    second = compiled(x).square().mean(1)
    with pytest.raises(RuntimeError, match="more than one forward"):
        engine.backward(first + second)


def test_a_parameter_that_was_tied_afterwards_is_refused_by_name():
    _, model, _, _ = make(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    model[1].weight = model[0].weight
    with pytest.raises(RuntimeError, match=r"'1\.weight'"):
        model(torch.randn(4, 3))


def test_a_sampler_subclass_is_refused():
    class Same(SequentialSampler):
        def __iter__(self):
            return iter([0] * len(self))

    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="Same"):
        dpflash.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(DATA, batch_size=16, sampler=Same(DATA)),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )


def test_double_backward_is_refused():
    _, model, _, _ = make()
    x = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="asked for with create_graph=True"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_a_full_disk_leaves_the_ledger_readable(tmp_path):
    engine, model, optimizer, _ = make(engine=dpflash.PrivacyEngine(ledger=tmp_path / "l"))
    x = torch.randn(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        take(engine, model, optimizer, x)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "l").stat().st_size + 5, limits[1]))
        try:
            with pytest.raises(OSError):
                take(engine, model, optimizer, x)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        take(engine, model, optimizer, x)
    foreign = Gaussian(relation="zero_out", noise_multiplier=1.0)
    assert dpflash.PrivacyEngine(ledger=tmp_path / "l").accountant.events == [(foreign, 2)]


def test_two_engines_on_one_ledger_are_refused(tmp_path):
    first = make(engine=dpflash.PrivacyEngine(ledger=tmp_path / "l"))
    second = make(engine=dpflash.PrivacyEngine(ledger=tmp_path / "l"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        take(*first[:3], torch.randn(4, 3))
        with pytest.raises(RuntimeError, match="another process or engine"):
            take(*second[:3], torch.randn(4, 3))


def test_the_optimizer_that_was_passed_in_cannot_step_past_the_noise():
    model = nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = dpflash.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=plain,
        data_loader=DataLoader(DATA, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        foreign_batches=True,
    )
    before = model.weight.detach().clone()
    engine.backward(model(torch.randn(4, 3)).square().mean(1))
    with pytest.raises(RuntimeError, match="make_private returned"):
        plain.step()
    assert torch.equal(model.weight, before)
    engine.detach(model)
    plain.step()


def test_a_convolution_without_a_channel_dimension_is_refused_as_in_the_plain_layer():
    _, model, _, _ = make(nn.Conv1d(1, 4, 2))
    with pytest.raises(ValueError, match="channels first"):
        model(torch.randn(4, 3))


@pytest.mark.cases(0)
def test_a_convolution_in_16_bit_takes_transposed_inputs_of_length_1_on_older_cpus():
    program = """
import torch, dpflash
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Conv1d(6, 4, 3, padding=1).bfloat16()
engine = dpflash.PrivacyEngine()
optimizer = torch.optim.SGD(model.parameters())
loader = DataLoader(TensorDataset(torch.zeros(9, 1)), batch_size=3)
engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1, max_grad_norm=1,
    foreign_batches=True,
)
x = torch.randn(3, 1, 6).bfloat16()
engine.backward(torch.tanh(model(x.transpose(1, 2))).float().square().mean((1, 2)))
"""
    # oneDNN without arithmetic in bfloat16.
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_of_another_optimizer_is_refused_and_one_with_a_scheduler_is_not(tmp_path):
    engine, _, optimizer, _ = make()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.save_checkpoint(tmp_path / "c")
    engine, *_ = make()
    engine.load_checkpoint(tmp_path / "c")
    model = nn.Linear(3, 2)
    engine = dpflash.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        data_loader=DataLoader(DATA, batch_size=16),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises(ValueError, match="the optimizer"):
        engine.load_checkpoint(tmp_path / "c")
