"""Every leaf that private losses train is behind a clipping gate, or is refused by name."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.public = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        return self.last(self.public(torch.tanh(self.first(x))))


def _reentrant(model, x, outside):
    return checkpoint(functools.partial(outside.forward), model(x), use_reentrant=True)


def _compiled(model, x, outside):
    return torch.compile(outside, backend="aot_eager")(model(x))


LOSSES = {
    "head": lambda model, x, outside: outside(model(x)),
    "encoder": lambda model, x, outside: model(outside(x[:, :2]).repeat(1, 2)),
    "prompt": lambda model, x, outside: model(x + outside.bias.repeat(2)),
    "checkpointed": lambda model, x, outside: checkpoint(outside, model(x), use_reentrant=False),
    "reentrant": _reentrant,
    "compiled": _compiled,
    "temperature": lambda model, x, outside: model(x) / torch.ones((), requires_grad=True),
    "weights": lambda model, x, outside: model(x) * torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("scalar", [False, True], ids=["losses", "scalar"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_leaf_outside_of_the_private_model_gets_no_gradient(name, scalar, private):
    if scalar and name == "reentrant":
        pytest.skip("a scalar's backward does not see what checkpoints will recompute")
    engine, model, *_ = private(Body(), loss_reduction="sum" if scalar else None)
    outside = nn.Linear(2, 2)

    def train():
        losses = LOSSES[name](model, torch.randn(20, 4), outside).square().sum(1)
        losses.sum().backward() if scalar else engine.backward(losses)

    what = "tensor" if name in ("temperature", "weights") else r"parameter of shape \(2,.* outside"
    with pytest.raises(RuntimeError, match=f"^a {what}.*no private layer clips its gradient"):
        train()
    assert not engine._step.sums
    assert scalar or outside.bias.grad is None
    outside.requires_grad_(False)
    if what != "tensor" and name != "reentrant":
        train()


def test_a_frozen_layer_that_is_trained_later_is_refused_by_name(private):
    engine, model, *_ = private(Body())
    model.public.requires_grad_(True)
    with pytest.raises(RuntimeError, match="^'public.(weight|bias)'"):
        engine.backward(model(torch.randn(20, 4)).square().sum(1))


def test_inputs_may_ask_for_gradients_and_kept_tensors_may_not(private):
    """Adversarial training has a new perturbation for each batch; a kept one is trained."""
    engine, model, optimizer, _ = private(Body())
    for _ in range(3):
        x = torch.randn(20, 4, requires_grad=True)
        (direction,) = torch.autograd.grad(model(x).square().sum(), x)
        moved = (x + direction.sign()).detach().requires_grad_()
        engine.backward(model(moved).square().sum(1))
        assert moved.grad.shape == (20, 4)
        optimizer.step()
        optimizer.zero_grad()
    kept = torch.zeros(20, 4, requires_grad=True)
    engine.backward(model(torch.randn(20, 4) + kept).square().sum(1))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="^a tensor outside"):
        engine.backward(model(torch.randn(20, 4) + kept).square().sum(1))


def test_public_data_may_train_what_is_outside(private):
    engine, model, *_ = private(Body())
    outside = nn.Linear(2, 2)
    with engine.public_data():
        outside(model(torch.randn(5, 4))).square().sum().backward()
    assert outside.weight.grad is not None
    with torch.no_grad():
        weights = outside(torch.ones(20, 2)).sum(1)
    engine.backward(model(torch.randn(20, 4)).sum(1) * weights)
