"""The noise of a release is added inside the last backward of its logical batch, exactly once."""

from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash import PrivacyEngine, PrivateRefusal
from dpflash.clipping import backward as backward_module
from dpflash.kernels import NoiseStream, gaussian_noise_, grid_of
from dpflash.step import noise, sums

KINDS = [{"grad_sample_mode": mode} for mode in ("instantiate", "book_keeping", "ghost")]
KINDS.append({"clipping": "per_layer"})
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=[k.get("grad_sample_mode", k.get("clipping")) for k in KINDS]
)


@pytest.fixture
def untried(private):
    """`private`, whose loader yields no trials."""
    return partial(private, verify_first_batch=False)


def losses_of(model, x):
    return model(x).square().mean(1)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def data():
    return torch.randn(24, 3, generator=torch.Generator().manual_seed(1))


def fails(*_, **__):
    raise MemoryError


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("per_layer", torch.bfloat16), ("book_keeping", torch.float32), ("outside", torch.float32)],
    ids=["per_layer", "book_keeping", "outside"],
)
def test_noise_that_a_gpu_left_undecided_is_there_when_a_backward_is_done(
    untried, kernels_of_a_gpu, kind, dtype, monkeypatch
):
    options = (
        {"clipping": "per_layer"} if kind == "per_layer" else {"grad_sample_mode": "book_keeping"}
    )
    found = []
    for undecided in (False, True):
        if undecided:
            kernels_of_a_gpu()
        engine, model, optimizer, loader = untried(
            small().to(dtype), data().to(dtype), noise_multiplier=2.0, one_part=True, **options
        )
        x = data()[:8].to(dtype) if kind == "outside" else next(iter(loader))[0]
        # Autograd's anomaly mode refuses a gate that hands on NaN.
        monkeypatch.setattr(backward_module, "refuse_anomaly_mode", lambda: None)
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            engine.backward(losses_of(model, x))
        now = [] if kind == "outside" else [p.grad.clone() for p in model.parameters()]
        assert all(grad.isfinite().all() for grad in now)
        optimizer.step()
        found.append([*now, *[p.detach().clone() for p in model.parameters()]])
    for plain, settled in zip(*found, strict=True):
        assert bool(settled.isfinite().all()) and torch.equal(plain, settled)


def test_a_draw_of_several_batches_is_settled_in_the_sum_that_is_released(
    private, kernels_of_a_gpu
):
    kernels_of_a_gpu()
    engine, model, optimizer, loader = private(
        small(),
        data(),
        noise_multiplier=2.0,
        grad_sample_mode="instantiate",
        physical_batch_size=2,
    )
    batches = 0
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        batches += 1
        if loader.is_last and batches > 1:
            break
        optimizer.step()
        batches = 0 if loader.is_last else batches
    assert batches > 1 and all(p.grad.isfinite().all() for p in model.parameters())


def test_a_step_after_a_backward_that_failed_behind_its_gate_releases_no_nan(
    untried, kernels_of_a_gpu, monkeypatch
):
    kernels_of_a_gpu()
    engine, model, optimizer, loader = untried(
        small(), data(), noise_multiplier=2.0, one_part=True, grad_sample_mode="book_keeping",
        loss_reduction="sum",
    )  # fmt: skip

    (x,) = next(iter(loader))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine._step, "release", fails)
        losses_of(model, x).sum().backward()
    assert all(total.isnan().all() for total in engine._step.sums.values())
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert optimizer.releases == 1


def test_a_release_that_a_failed_backward_left_open_is_not_used_by_the_next_draw(
    private, monkeypatch
):
    """Its noise would stand in the first of several batches, and exact sums would follow it."""
    engine, model, optimizer, loader = private(
        build(), data(), noise_multiplier=2.0, physical_batch_size=8, loss_reduction="sum",
        grad_sample_mode="instantiate",
    )  # fmt: skip

    batches = iter(loader)
    (x,) = next(batches)
    while not loader.is_last or engine._step.sums:
        losses_of(model, x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        (x,) = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(sums, "clip_reduce_all", fails)
        with pytest.raises(MemoryError):
            losses_of(model, x).sum().backward()
    assert engine._step.noise is None and not engine._step.sums
    with pytest.raises(RuntimeError, match="lacks a microbatch"):
        next(batches)


@pytest.mark.cases(0)
def test_a_step_whose_noise_could_not_be_settled_can_be_tried_again(
    untried, kernels_of_a_gpu, monkeypatch
):
    kernels_of_a_gpu()
    engine, model, optimizer, loader = untried(
        small(), data(), noise_multiplier=2.0, one_part=True, grad_sample_mode="book_keeping",
        loss_reduction="sum",
    )  # fmt: skip

    (x,) = next(iter(loader))
    with monkeypatch.context() as patch:
        patch.setattr(noise, "settle_noise", fails)
        with pytest.raises(MemoryError):
            losses_of(model, x).sum().backward()
        with pytest.raises(MemoryError):
            optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@every_kind
def test_the_gradient_has_its_noise_before_the_step(untried, kind):
    runs = [
        untried(build(), data(), noise_multiplier=m, one_part=True, **kind) for m in (0.0, 2.0)
    ]
    for engine, *_ in runs:
        engine._step.options.set_expected_batch_size(1.0)
    for engine, model, _, loader in runs:
        for (x,) in loader:
            engine.backward(losses_of(model, x))
            break
    (plain, quiet, *_), (engine, noisy, optimizer, _) = runs
    pairs = zip(quiet.named_parameters(), noisy.parameters(), strict=True)
    for number, ((_, without), with_noise) in enumerate(pairs):
        noise = torch.zeros_like(without)
        key = engine._keys.noise
        grid = grid_of(1.0)
        gaussian_noise_(noise, std=2.0, grid=grid, key=key, step=0, parameter_id=number)
        torch.testing.assert_close(with_noise.grad - without.grad, noise, atol=1e-5, rtol=0)
    assert optimizer.releases == 1 and engine.accountant.history == [(2.0, 1 / 6, 1)]
    before = {p: p.grad.clone() for p in noisy.parameters()}
    optimizer.step()
    assert all(torch.equal(p.grad, before[p]) for p in noisy.parameters())
    assert optimizer.releases == 1 and engine.accountant.history == [(2.0, 1 / 6, 1)]


@every_kind
def test_only_the_last_physical_batch_is_noised(private, kind, monkeypatch):
    engine, model, optimizer, loader = private(
        build(), data(), noise_multiplier=1.0, batch_size=12, physical_batch_size=3, **kind
    )
    drawn = []

    def count(stream, parameter_id, offset):
        drawn.append((stream.step, parameter_id))
        return at(stream, parameter_id, offset)

    at = NoiseStream.at
    monkeypatch.setattr(NoiseStream, "at", count)
    parts = 0
    for (x,) in loader:
        optimizer.zero_grad()
        last = engine._step.tracker.current.last
        so_far = len(drawn)
        engine.backward(losses_of(model, x))
        assert (len(drawn) > so_far) == last
        optimizer.step()
        parts += 1
    assert parts > optimizer.releases == 2
    assert sorted(drawn) == [(step, number) for step in (0, 1) for number in range(6)]


def test_the_noise_is_the_same_wherever_it_is_added(untried):
    """A part of an empty draw, or a gradient that is missing, is noised by the release."""

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    engine, model, optimizer, loader = untried(
        Partly(), data(), noise_multiplier=3.0, one_part=True
    )
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        break
    noise = torch.zeros(2, 3)
    key = engine._keys.noise
    gaussian_noise_(noise, std=3.0, grid=grid_of(1.0), key=key, step=0, parameter_id=2)
    assert torch.equal(model.unused.weight.grad, noise / 4)


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
@pytest.mark.parametrize("drop", ["cleared", "failing_backward"])
def test_a_draw_whose_release_was_dropped_is_paid_for_and_not_released_again(
    drop, sampling, untried, monkeypatch
):
    """Two releases of one draw, charged as those of two draws, cost more (2.58 for 4.48)."""
    options = {"one_part": True} if sampling == "poisson" else {"sampling": sampling}
    engine, model, optimizer, loader = untried(
        build(), data(), noise_multiplier=1.0, accountant="contour", **options
    )
    for (x,) in loader:
        if optimizer.releases:
            engine.backward(losses_of(model, x))
            optimizer.step()
            break
        x.requires_grad_()
        if drop == "failing_backward":
            hook = x.register_hook(lambda grad: _interrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.backward(losses_of(model, x))
            hook.remove()
        else:
            engine.backward(losses_of(model, x))
            with pytest.raises(RuntimeError, match="would drop the released gradient"):
                optimizer.zero_grad()
            model.zero_grad()
            with pytest.raises(RuntimeError, match="its release is lost"):
                optimizer.step()
        optimizer.zero_grad()
        spent = engine.get_epsilon(1e-5)
        with pytest.raises(RuntimeError, match="batch whose release was charged and dropped"):
            engine.backward(losses_of(model, x))
        assert not engine._step.sums and all(p.grad is None for p in model.parameters())
        assert optimizer.releases == 1 and engine.get_epsilon(1e-5) == spent > 0
    assert optimizer.releases == 2
    # A shuffled epoch is paid for at its first draw.
    assert engine.get_epsilon(1e-5) > spent or sampling == "shuffled"


def test_an_interrupted_step_goes_on_with_the_same_release(untried, monkeypatch):
    runs = []
    for interrupted in (False, True):
        engine, model, optimizer, loader = untried(
            build(), data(), noise_multiplier=1.0, one_part=True
        )
        model[2].requires_grad_(True)
        for (x,) in loader:
            with monkeypatch.context() as patch:
                if interrupted:
                    patch.setattr(engine._step.sums, "clear", _interrupt)
                with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
                    engine.backward(losses_of(model, x))
            optimizer.step()
            break
        assert optimizer.releases == 1 and len(engine.accountant) == 1
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def _interrupt():
    raise KeyboardInterrupt


def test_a_backward_after_an_interrupted_release_does_not_get_its_noise(untried, monkeypatch):
    engine, model, optimizer, loader = untried(
        build(), data(), noise_multiplier=1.0, one_part=True, loss_reduction="sum"
    )
    before = [p.detach().clone() for p in model.parameters()]
    for (x,) in loader:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine._step.gradients, "set", lambda *_: _interrupt())
            losses_of(model, x).sum().backward()
        with pytest.raises(RuntimeError, match="after the release of this logical batch had"):
            losses_of(model, x).sum().backward()
        with pytest.raises(RuntimeError, match="lacks a microbatch"):
            optimizer.step()
        break
    assert optimizer.releases == 1 == sum(steps for *_, steps in engine.accountant.history)
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))


def test_noise_of_another_multiplier_than_the_backward_s_is_never_released(untried):
    engine, model, optimizer, loader = untried(
        build(), data(), noise_multiplier=1.0, one_part=True
    )
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        optimizer.noise_multiplier = 0.0
        with pytest.raises(PrivateRefusal, match="optimizer.noise_multiplier changed"):
            optimizer.step()
        break
    assert engine.accountant.history == [(1.0, 1 / 6, 1)] and not engine._spending.noiseless


def test_a_checkpoint_between_backward_and_step_repeats_neither_noise_nor_draw(untried, tmp_path):
    engine, model, optimizer, loader = untried(
        build(), data(), noise_multiplier=1.0, one_part=True
    )
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        engine.save_checkpoint(tmp_path / "state")
        break
    seen, rows = model[0].weight.grad.clone(), x[loader.is_real]
    engine, model, optimizer, loader = untried(
        build(), data(), noise_multiplier=1.0, one_part=True
    )
    engine.load_checkpoint(tmp_path / "state")
    for (x,) in loader:
        engine.backward(losses_of(model, x))
        break
    assert optimizer.releases == 2 and engine.accountant.history == [(1.0, 1 / 6, 2)]
    assert not torch.equal(model[0].weight.grad, seen)
    assert {*map(tuple, rows.tolist())} != {*map(tuple, x[loader.is_real].tolist())}


def test_two_engines_of_one_checkpoint_cannot_both_step(untried, tmp_path):
    def run():
        return untried(build(), data(), noise_multiplier=1.0, one_part=True)

    def step(engine, model, optimizer, loader):
        for (x,) in loader:
            engine.backward(losses_of(model, x))
            optimizer.step()
            break

    original, first, second, third = run(), run(), run(), run()
    original[0].save_checkpoint(tmp_path / "state")
    for restored in (first, second):
        restored[0].load_checkpoint(tmp_path / "state")
    step(*first)
    with pytest.raises(RuntimeError, match="restored from the same checkpoint.*ledger"):
        step(*second)
    assert second[2].releases == 0 and not second[0].accountant.history
    # One after the other is a resumed run, from whichever point was not gone beyond.
    first[0].save_checkpoint(tmp_path / "later")
    third[0].load_checkpoint(tmp_path / "later")
    step(*third)
    with pytest.raises(RuntimeError, match="restored from the same checkpoint"):
        step(*first)


def test_the_run_that_wrote_a_checkpoint_and_one_restored_from_it_are_told_apart(tmp_path):
    def run():
        model = build()
        engine = PrivacyEngine()
        parts = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(data()), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            foreign_batches=True,
            physical_batch_size=24,
            max_batch_size=24,
            verify_first_batch=False,
        )
        return engine, *parts

    def step(engine, model, optimizer, loader):
        for (x,) in loader:
            optimizer.zero_grad()
            engine.backward(losses_of(model, x))
            optimizer.step()
            break

    original, restored = run(), run()
    original[0].save_checkpoint(tmp_path / "state")
    step(*original)
    restored[0].load_checkpoint(tmp_path / "state")
    with pytest.warns(UserWarning, match="neither engine.s epsilon includes"):
        step(*restored)
    pairs = zip(original[1].parameters(), restored[1].parameters(), strict=True)
    assert not any(torch.equal(a, b) for a, b in pairs)
    assert original[0]._keys.sampling != restored[0]._keys.sampling


@pytest.mark.parametrize("extra", [{"a": Path("x")}, {"a": {"b": [object]}}, "text"])
def test_what_a_checkpoint_could_not_be_read_with_is_not_written(private, tmp_path, extra):
    engine, *_ = private(build(), data())
    with pytest.raises(ValueError, match="extra"):
        engine.save_checkpoint(tmp_path / "state", extra=extra)
    assert not list(tmp_path.iterdir())
    engine.save_checkpoint(tmp_path / "state", extra={"a": [1.5, "b", None, torch.ones(2)]})
    again, *_ = private(build(), data())
    assert again.load_checkpoint(tmp_path / "state")["a"][0] == 1.5


def test_another_clipping_than_the_checkpoints_is_told(private, tmp_path):
    engine, *_ = private(build(), data())
    engine.save_checkpoint(tmp_path / "state")
    again, *_ = private(build(), data(), clipping="per_layer")
    with pytest.warns(UserWarning, match="clipping was 'flat'"):
        again.load_checkpoint(tmp_path / "state")


def test_a_forgotten_zero_grad_adds_no_release_twice(private):
    found = []
    for forgets in (False, True):
        _, model, optimizer, loader = made = private(build(), data(), noise_multiplier=1.0)
        for (x,) in loader:
            made[0].backward(losses_of(model, x))
            optimizer.step()
            if not forgets:
                optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_optimizers_made_later_and_kept_gradients_see_releases_alone(private):
    """An optimizer of the loop's own steps before and after each backward."""
    engine, model, optimizer, loader = private(
        build(), data(), noise_multiplier=1e4, physical_batch_size=2
    )
    later = torch.optim.SGD(model.parameters(), lr=1e-9)
    kept, noisy = [], 0
    for (x,) in loader:
        later.step()
        engine.backward(losses_of(model, x))
        later.step()
        ends = loader.is_last
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert bool(grads) == ends and all(g.abs().max() > 100 for g in grads)
        kept += [(g, g.clone()) for g in grads]
        noisy += ends
        optimizer.step()
        optimizer.zero_grad()  # else `later` would step once more in each microbatch
    assert optimizer.releases == noisy > 1
    assert all(torch.equal(now, before) for now, before in kept)


def test_an_option_that_changed_within_a_draw_is_refused_before_the_charge(untried):
    engine, model, optimizer, loader = untried(
        build(), data(), noise_multiplier=2.0, physical_batch_size=2
    )
    batches = iter(loader)
    for (x,) in batches:
        engine.backward(losses_of(model, x))
        optimizer.step()
        if not loader.is_last:
            break
    before = optimizer.releases
    optimizer.noise_multiplier = 0.01
    with pytest.raises(PrivateRefusal, match="noise_multiplier changed"):
        for (x,) in batches:
            engine.backward(losses_of(model, x))
    assert optimizer.releases == before


@pytest.mark.parametrize("verify", [True, False])
def test_gradients_may_be_cleared_between_forward_and_backward(verify, private):
    runs = []
    for is_between in (False, True):
        engine, model, optimizer, loader = private(
            build(), data(), noise_multiplier=1.0, seed=3, verify_first_batch=verify
        )
        for (x,) in chain.from_iterable([loader] * 2):
            losses = losses_of(model, x)
            if is_between:
                optimizer.zero_grad()
            engine.backward(losses)
            optimizer.step()
            if not is_between:
                optimizer.zero_grad()
        runs.append([p.detach().clone() for p in model.parameters()])
        assert optimizer.releases > 2 and engine.verified is verify
    assert all(map(torch.equal, *runs))
