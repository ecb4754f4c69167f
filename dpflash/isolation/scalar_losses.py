"""ScalarLosses: numbers that stand for the losses of samples where the loop has their sum or mean.

Letters: B samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..verification.nested import map_tensors, tensors_of
from .forward_rows import is_scalar

_AT_ONCE = 1 << 18  # entries of a sample


class ScalarLosses:
    """What a scalar loss shows of single samples in one run of a batch, without a backward.

    Of a scalar made of the model's outputs it is the product of a sample's outputs with their
    gradients: where the scalar is a reduction of losses of samples, it must stay as its loss must,
    and masked entries count for nothing. Of a scalar that the model returns it is the sum of the
    squares of the other outputs `[B, C]`.

    Args:
        declared: the loss_reduction.

    Attributes:
        losses: `[B]`, fp64; None before a backward.
        sizes: `[B]`, fp64: what their rounding is relative to.
        dtypes: of the outputs.
        outputs: the tensors at which backwards end.
    """

    def __init__(self, declared: str) -> None:
        self.losses: Tensor | None = None
        self.sizes: Tensor | None = None
        self.dtypes: set[torch.dtype] = set()
        self.outputs: list[Tensor] = []
        self._declared = declared

    def ends_at(self, outputs: Any, size: int) -> Any:
        """The outputs of a call of the model for B = `size`, at which the loop's backward ends."""
        rows = [x.detach() for _, x in tensors_of(outputs) if x.ndim == 2 and len(x) == size]

        def cut(x: Tensor) -> Tensor:
            if not x.requires_grad:
                return x
            own = x.detach().requires_grad_()
            self.outputs.append(own)
            self.dtypes.add(x.dtype)
            of_rows = x.ndim and len(x) and len(x) % size == 0
            if is_scalar(x) and size != 1:
                own.register_hook(lambda grad: self._add_squares(rows))
            elif of_rows:
                held = own.detach().reshape(size, -1)
                own.register_hook(lambda grad: self._add(held, grad.reshape(size, -1)))
            # The loop may change it in place.
            return own.clone()

        return map_tensors(cut, outputs)

    def _add_squares(self, outputs: list[Tensor]) -> None:
        for x in outputs:
            self._add(x, x)

    def _add(self, outputs: Tensor, grads: Tensor) -> None:
        """Add the products of outputs `[B, n]` and their gradients."""
        unit = 1 / len(outputs) if self._declared == "mean" else 1.0
        losses = torch.zeros(len(outputs), dtype=torch.float64, device=outputs.device)
        sizes, squares = losses.clone(), losses.clone()
        parts = zip(outputs.split(_AT_ONCE, 1), grads.split(_AT_ONCE, 1), strict=True)
        for x, grad in parts:
            products = x.double() * grad.double()
            losses += products.sum(1)
            sizes += products.abs().sum(1)
            squares += x.double().square().sum(1)
        # Gradients that cancel, as of likely classes, have the rounding of one sample's weight.
        sizes += unit * squares.sqrt()
        if self.losses is None or self.sizes is None:
            self.losses, self.sizes = losses, sizes
        elif len(losses) == len(self.losses):
            self.losses, self.sizes = self.losses + losses, self.sizes + sizes
