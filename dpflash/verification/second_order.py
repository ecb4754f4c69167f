"""Refuses gradients of gradients, which the private backwards do not support."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

_INSTEAD = (
    "Freeze the layer with requires_grad_(False), compute the penalty on public data inside "
    "engine.public_data(), where layers are plain, or use a penalty of first derivatives, such as "
    "a finite difference of two outputs of the model"
)


def differentiable_once(
    backward: Callable[..., tuple[Any, ...]],
) -> Callable[..., tuple[Any, ...]]:
    """Decorate the backward of an autograd function: raise if it runs with create_graph=True.

    torch's `once_differentiable` raises only if the incoming gradient has a graph. The incoming
    gradient of a gradient penalty is constant, so the penalty would silently get no gradient.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            refuse_second_order(_layer_of(ctx))
        with torch.no_grad():
            return backward(ctx, *grads)

    return wrapped


def refuse_second_order(layer: str) -> NoReturn:
    """Refuse a backward with create_graph=True."""
    raise RuntimeError(
        f"the gradient of {layer} was asked for with create_graph=True, as gradient penalties "
        "(WGAN-GP, R1), losses on derivatives (PINN) and Hessians do: a private layer cannot "
        f"differentiate it again, so the penalty would not be trained. {_INSTEAD}"
    )


def refuse_transforms(layer: str) -> None:
    """Refuse a private layer inside torch.func's transforms or forward-mode differentiation.

    Raises:
        RuntimeError: the layer is inside such a transform; the message names the layer.
    """
    if torch.compiler.is_compiling():
        return
    if is_in_transform():
        found = "torch.func (grad, vjp, jvp, jacrev, vmap, ...)"
    elif forward_ad._current_level >= 0:
        found = "forward-mode differentiation (torch.autograd.forward_ad, jvp)"
    else:
        return
    raise RuntimeError(
        f"module '{layer}' was called inside {found}, which a private layer does not support: its "
        "per-sample gradients come from engine.backward(losses) alone. Call the model outside of "
        "it, or use a plain copy, copy.deepcopy(model), on public data"
    )


def is_in_transform() -> bool:
    """Return whether torch.func's transforms (vmap, grad, jvp, ...) run this code."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _layer_of(node: Any) -> str:
    """Return the name of the private layer whose parameter is an input of an autograd node."""
    inputs = list(node.next_functions)
    # With units, another node is between the handle and the operation.
    for parent, position in inputs + [i for n, _ in inputs if n for i in n.next_functions]:
        gate = getattr(parent, "gate", None)
        if gate is not None:
            return f"layer '{gate.layer_of(position)}'"
    return type(node).__name__.strip("_").removesuffix("Backward")
