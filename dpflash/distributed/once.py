"""Backward passes that are not differentiated again: refused, not wrong without a word."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def differentiable_once(
    backward: Callable[..., tuple[Any, ...]],
) -> Callable[..., tuple[Any, ...]]:
    """Makes differentiating what a backward returns an error, whatever its inputs need."""

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        return _Refused.apply(torch.empty(0, requires_grad=True), *found)

    return once


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _: Tensor, *found: Any) -> tuple[Any, ...]:
        return tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        raise RuntimeError(
            "attention over several workers is differentiable once: its gradient has no gradient. "
            "For gradient penalties or Hessians use one worker and torch's own attention"
        )
