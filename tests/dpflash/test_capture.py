"""A release cannot be captured in a CUDA graph. The state of the stream is faked here."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from dpflash import private_boundary
from dpflash.attn.boundary import Boundary, release_of

BATCH = torch.linspace(-1, 1, 12).view(4, 3)


@contextmanager
def capturing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_a_step_is_refused_unpaid_while_a_stream_captures(noise_multiplier, private):
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2), BATCH, noise_multiplier=noise_multiplier, verify_first_batch=False
    )
    (x,) = next(iter(loader))
    engine.backward(model(x).sum(1))
    before = model.weight.detach().clone()
    history, releases = list(engine.accountant.history), optimizer.releases
    called = []
    with capturing(), pytest.raises(RuntimeError, match=r"capturing a graph.*release again"):
        optimizer.step(closure=lambda: called.append(1))
    assert torch.equal(model.weight, before) and not called
    assert engine.accountant.history == history and optimizer.releases == releases
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert optimizer.releases == 1


def test_a_backward_that_would_release_is_refused_unpaid_while_a_stream_captures(private):
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2), BATCH, noise_multiplier=1.0, verify_first_batch=False
    )
    (x,) = next(iter(loader))
    losses = model(x).sum(1)
    with capturing(), pytest.raises(RuntimeError, match=r"capturing a graph.*release again"):
        engine.backward(losses)
    assert engine.accountant.history == [] and optimizer.releases == 0
    assert all(p.grad is None for p in model.parameters())
    engine.backward(model(x).sum(1))
    optimizer.step()
    assert optimizer.releases == 1


def test_a_boundary_is_refused_while_a_stream_captures():
    x = BATCH.clone().requires_grad_()
    y = private_boundary(x, max_grad_norm=1.0, noise_multiplier=1.0)
    with capturing(), pytest.raises(RuntimeError, match="capturing"):
        y.sum().backward()
    assert x.grad is None


def test_the_boundary_of_a_fused_backward_is_refused_while_a_stream_captures():
    release = release_of(Boundary(max_grad_norm=1.0, noise_multiplier=1.0))
    with capturing(), pytest.raises(RuntimeError, match="capturing"):
        release([BATCH], BATCH.double().square().sum(1))
