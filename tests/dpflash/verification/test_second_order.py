"""Private layers have no second derivatives: who asks for one is refused by the layer's name."""

import copy
import importlib
import pkgutil

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import dpflash
from dpflash.verification import second_order


class Attending(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


class Scaled(nn.Module):
    """A parameter of the module itself, and a layer below it."""

    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(8)), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(x * self.scale)


LAYERS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 1, bias=False)), "0"),
    "conv_linear": (lambda: nn.Sequential(nn.Conv1d(3, 2, 1), nn.Linear(8, 1)), "1"),
    "layer_norm": (lambda: nn.Sequential(nn.LayerNorm(8)), "0"),
    "rms_norm": (lambda: nn.Sequential(nn.RMSNorm(8)), "0"),
    "gru": (lambda: nn.Sequential(nn.GRU(8, 8, batch_first=True)), "0"),
    "torch_attention": (lambda: Attending(nn.MultiheadAttention(8, 2, batch_first=True)), "layer"),
    "attention": (lambda: Attending(dpflash.nn.MultiheadAttention(8, 1)), "layer"),
    "owner": (Scaled, "last"),
}


@pytest.mark.parametrize(("make", "name"), LAYERS.values(), ids=LAYERS)
def test_a_gradient_penalty_through_a_private_layer_is_refused_by_name(make, name, private):
    """Its incoming gradient is constant, so torch's once_differentiable is silent."""
    _, model, *_ = private(make())
    x = torch.randn(4, 3, 8, requires_grad=True)
    outputs = model(x)
    total = (outputs[0] if isinstance(outputs, tuple) else outputs).sum()
    torch.autograd.grad(total, x, retain_graph=True)  # a saliency map needs no graph
    with pytest.raises(RuntimeError, match=rf"^the gradient of layer '{name}.*create_graph=True"):
        torch.autograd.grad(total, x, create_graph=True)


def test_a_loss_head_and_a_scalar_backward_have_no_second_derivatives(private):
    head = dpflash.nn.LinearCrossEntropy(8, 5)
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="^the gradient of LinearCrossEntropy.*create_graph"):
        torch.autograd.grad(head(x, torch.arange(4)).sum(), x, create_graph=True)
    _, model, *_ = private(nn.Sequential(nn.Conv1d(3, 2, 1)), loss_reduction="sum")
    with pytest.raises(RuntimeError, match="create_graph=True"):
        model(torch.randn(4, 3, 8)).sum().backward(create_graph=True)


def test_the_penalty_of_a_layer_that_runs_sample_by_sample_is_trained(private, oracle):
    def losses(model, x):
        x = x.clone().requires_grad_()
        y = model(x).square().flatten(1).sum(1)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return gradient.square().flatten(1).sum(1) + 0 * y

    model, x = nn.Sequential(nn.Conv1d(3, 2, 2)), torch.randn(6, 3, 8)
    expected = oracle(model, losses, x).clipped_sum(50.0)
    engine, model, *_ = private(model, max_grad_norm=50.0)
    engine.backward(losses(model, x))
    for name, parameter in model.named_parameters():
        total = engine._step.sums[parameter].double()
        torch.testing.assert_close(total, expected[name], rtol=1e-5, atol=1e-5)


def test_every_backward_of_ours_is_differentiable_or_refuses_a_graph():
    for package in (dpflash, dpflash.kernels):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.startswith(("dpflash.integrations", "dpflash.bench")):
                importlib.import_module(found.name)
    refusing = second_order.differentiable_once(lambda ctx: ()).__code__
    # The first three make a node of their backward that raises; `_Crossing` is an identity, and
    # the backward of `_Rotary` is another `_Rotary`.
    others = {"Attention", "_EagerAttention", "_AttentionBackward", "_Crossing", "_Rotary"}
    kinds, waiting = set(), [torch.autograd.Function]
    while waiting:
        below = waiting.pop().__subclasses__()
        waiting += below
        kinds |= {k for k in below if k.__module__.startswith("dpflash")}
    assert len(kinds) > 15
    assert {k.__name__ for k in kinds if k.backward.__code__ is not refusing} == others


def _forward_mode(model, x):
    with forward_ad.dual_level():
        return model(forward_ad.make_dual(x, x))


def _of_parameters(model, x):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    return torch.func.grad(loss)(dict(model.named_parameters()))


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "grad_of_parameters": _of_parameters,
    "layer_alone": lambda model, x: torch.func.grad(lambda x: model[0](x).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "forward_mode": _forward_mode,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_a_private_model_are_refused_by_name(transform, private):
    _, model, *_ = private(nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4)))
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=r"^module '.*' was called inside (torch\.func|forw)"):
        transform(model, x)
    transform(copy.deepcopy(model), x)
    with torch.no_grad():
        _forward_mode(model, x)
