"""Batches, failures and copies that once broke a guarantee."""

import copy
import os
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import PrivacyEngine

GRAD_SAMPLE_MODES = ("instantiate", "book_keeping", "ghost")


def data(n=24, width=3):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(1))


def linear(inputs=3, outputs=2):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def released(engine, model, x, scales=None):
    losses = model(x).flatten(1).sum(1)
    engine.backward(losses if scales is None else losses * scales)
    return torch.cat([s.double().flatten() for s in engine._step.sums.values()])


def cancelling(tokens, size=2.0**12, width=16):
    """A sample whose tokens cancel far: large, and its gradient is small.

    Whole numbers, so that on any processor the order of a sum does not matter.
    """
    x = torch.zeros(1, tokens, width)
    x[0, 0], x[0, 1] = size, -size
    x[0, 2] = torch.arange(width)
    return x


@pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
def test_a_sample_whose_tokens_cancel_is_clipped_alike_by_every_way(private, mode):
    torch.manual_seed(0)
    x = torch.cat([cancelling(8), torch.randn(2, 8, 16)])
    found = []
    for chosen in ("instantiate", mode):
        engine, model, _, _ = private(
            copy.deepcopy(linear(16, 16)),
            batch_size=3,
            max_grad_norm=1e-3,
            grad_sample_mode=chosen,
        )
        found.append(released(engine, model, x))
    assert float((found[0] - found[1]).norm()) <= 1e-5 * 1e-3


class Weighted(nn.Module):
    """Losses whose gradient of the layer's output is a given dy."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x, dy):
        return (self.layer(x) * dy).sum((1, 2))


def weighted_sum(private, x, dy, mode):
    engine, model, _, _ = private(
        Weighted(x.shape[2], dy.shape[2]), batch_size=2, grad_sample_mode=mode
    )
    engine.backward(model(x, dy))
    return engine._step.sums[model.layer.weight].double()


@pytest.mark.parametrize("mode", ["auto", *GRAD_SAMPLE_MODES])
def test_padding_by_a_longer_mate_changes_no_contribution(private, mode):
    """With a mate that makes the batch long, so that another way may be chosen."""
    torch.manual_seed(0)
    x, dy = torch.zeros(2, 512, 256), torch.zeros(2, 512, 256)
    x[0, 0], dy[0, :2] = torch.randn(256).round() * 2**12, torch.randn(256).round() * 2**12
    x[0, 1] = -x[0, 0]
    x[0, 2, 0], dy[0, 2, 0] = 1, 2
    x[1, 0, 0], dy[1, 0, 0] = 1, 2
    alone = weighted_sum(private, x[:1, :3], dy[:1, :3], mode)
    together = weighted_sum(private, x, dy, mode)
    assert float((together - alone).norm()) <= 1 + 2.0**-20


@pytest.mark.parametrize("mode", ["auto", *GRAD_SAMPLE_MODES])
def test_a_mate_of_gradient_zero_changes_nothing(private, mode):
    """Not even the rounding of samples whose tokens cancel, here of whole numbers and to 0."""
    torch.manual_seed(0)
    x, dy = torch.randint(-(2**12), 2**12, (512, 64, 8)), torch.randint(-9, 10, (512, 64, 8))
    x[:, 32:], dy[:, 32:] = -x[:, :32], dy[:, :32]
    x, dy = x.float(), dy.float()
    alone = weighted_sum(private, x, dy, mode)
    mate, its_dy = torch.zeros(1, 64, 8), torch.randn(1, 64, 8)
    together = weighted_sum(private, torch.cat([mate, x]), torch.cat([its_dy, dy]), mode)
    assert float((together - alone).norm()) <= 1e-3


@pytest.mark.parametrize("bound", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize(
    "kind", [{"grad_sample_mode": w} for w in GRAD_SAMPLE_MODES] + [{"clipping": "per_layer"}]
)
def test_operands_near_the_end_of_fp32_are_clipped_to_the_bound(private, kind, bound):
    engine, model, _, _ = private(linear(), batch_size=1, max_grad_norm=bound, **kind)
    model.bias.requires_grad_(False)
    x = torch.tensor([[[1.98e38, 0.0, 0.0]]])
    engine.backward(model(x)[:, 0, 0] * 1e-7)
    total = engine._step.sums[model.weight].double().norm()
    assert float(total) <= bound * (1 + 2.0**-20)


def test_a_sum_that_was_not_stored_does_not_count_as_noised(private):
    engine, model, optimizer, loader = private(
        linear(), data(), batch_size=12, physical_batch_size=3, noise_multiplier=50.0,
        loss_reduction="sum", max_grad_norm=1.0,
    )  # fmt: skip
    step = engine._step
    for (x,) in loader:
        last = engine._step.tracker.current.last
        if not last or not step.sums:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            continue
        before = {p: s.clone() for p, s in step.sums.items()}
        step.sums = _Full(step.sums)
        with pytest.raises(MemoryError):
            model(x).square().sum().backward()
        step.sums = dict(step.sums)
        optimizer.step()
        for parameter, clipped in before.items():
            assert float((parameter.grad - clipped).abs().max()) > 0.1
        break


class _Full(dict):
    def __setitem__(self, key, value):
        raise MemoryError


def signalled(private):
    opacus = pytest.importorskip("opacus.utils.batch_memory_manager")
    engine, model, optimizer, loader = private(
        linear(), data(64), batch_size=16, noise_multiplier=1.0
    )
    manager = opacus.BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    )
    return engine, model, optimizer, manager


def test_a_batch_that_a_managed_loop_skips_is_noticed(private):
    engine, model, optimizer, manager = signalled(private)
    with manager as batches, pytest.raises(RuntimeError, match="must follow every physical"):
        for number, (x,) in enumerate(batches):
            optimizer.zero_grad()
            if number == 1:
                continue
            engine.backward(model(x).square().mean(1))
            optimizer.step()


def test_a_failed_release_lets_no_further_samples_in(private, monkeypatch):
    engine, model, optimizer, manager = signalled(private)

    def full(*arguments, **options):
        raise OSError("no space left on device")

    charge = engine._spending.charge
    with manager as batches:
        with pytest.raises(RuntimeError, match="second backward|two draws"):
            for (x,) in batches:
                engine.backward(model(x).square().mean(1))
                engine._spending.charge = full
                try:
                    optimizer.step()
                except OSError:
                    engine._spending.charge = charge


def test_a_forked_process_has_noise_of_its_own(private):
    model = linear()
    engine = PrivacyEngine()
    _, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data()), batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        foreign_batches=True,
    )
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, engine._keys.noise)
        os._exit(0)
    os.waitpid(child, 0)
    own = engine._keys.noise
    assert os.read(reader, 32) != own == engine._keys.noise


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_an_engine_cannot_be_copied(duplicate):
    with pytest.raises(TypeError, match="same noise"):
        duplicate(PrivacyEngine())


def a_scheduler(optimizer):
    return copy.deepcopy(torch.optim.lr_scheduler.StepLR(optimizer, 1))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps, a_scheduler])
def test_an_optimizer_cannot_be_copied_and_the_try_harms_none(duplicate, private):
    runs = [private(linear(), data(), noise_multiplier=1.0) for _ in range(2)]
    with pytest.raises(TypeError, match="same noise"):
        duplicate(runs[0][2])
    for engine, model, optimizer, loader in runs:
        for (x,) in loader:
            engine.backward(model(x).sum(1))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.releases == len(loader)


def test_a_restored_state_puts_no_hooks_around_the_steps_of_others(private):
    """As unpickling does: PyTorch patches the class, and the hooks are the wrapped optimizer's."""
    (_, _, restored, _), (engine, model, optimizer, loader) = (
        private(linear(), data(), noise_multiplier=1.0) for _ in range(2)
    )
    restored.__setstate__({})
    for (x,) in loader:
        engine.backward(model(x).sum(1))
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.releases == len(loader)


@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 3), (4, 2, 5, 3)])
def test_what_a_private_layer_returns_may_be_changed_in_place(private, shape):
    engine, model, _, _ = private(nn.Sequential(linear(), nn.ReLU(inplace=True)), batch_size=4)
    engine.backward(model(torch.randn(shape)).flatten(1).sum(1))
    attention = dpflash.nn.MultiheadAttention(4, 2)
    engine, attention, _, _ = private(attention, batch_size=4)
    engine.backward(attention(torch.randn(4, 5, 4))[0].relu_().sum((1, 2)))


def test_a_forward_put_on_a_projection_later_is_called(private):
    engine, model, _, _ = private(dpflash.nn.MultiheadAttention(4, 2), batch_size=4)
    plain, called = model.out_proj.forward, []
    model.out_proj.forward = lambda x: called.append(1) or plain(x)
    engine.backward(model(torch.randn(4, 5, 4))[0].sum((1, 2)))
    assert called
