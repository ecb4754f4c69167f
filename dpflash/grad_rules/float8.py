"""Float8Weight: the weight of a linear layer in float8, cast once a logical batch.

    y = x W^T and dx = dy W, from operands in e4m3
    scales: x and dy by the row of each token, W by output channel for y, by input channel for dx

A token's row has a scale of its own, and scales of W are functions of released parameters, so no
sample's bits depend on another sample. Weight gradients are of x and dy as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpflash.kernels import scaled_rows


class Float8Weight:
    """Both casts of one weight.

    They are kept for the microbatches of one logical batch, within which weights do not change.
    All other calls cast again: fused optimizers, weight averages and merges of adapters write to
    weights without advancing torch's version counter.

    Args:
        transposed: whether the weight is `[I, O]`, not `[O, I]`.
    """

    def __init__(self, *, transposed: bool) -> None:
        self._transposed = transposed
        self._weight: Tensor | None = None
        self._state: tuple[int, ...] = ()
        self._casts: tuple[Tensor, ...] = ()

    def casts(self, weight: Tensor, logical_batch: int | None) -> tuple[Tensor, ...]:
        """Values and scales of W `[O, I]`, which y needs, then those of W^T, which dx needs.

        Args:
            weight: the parameter.
            logical_batch: number of the one that the call is of, or None.
        """
        if torch.compiler.is_compiling() or logical_batch is None:
            return self._cast(weight.detach())
        state = (weight.data_ptr(), weight._version, logical_batch)
        if weight is not self._weight or state != self._state:
            with torch.no_grad():
                self._casts = self._cast(weight)
            self._weight, self._state = weight, state
        return self._casts

    def _cast(self, weight: Tensor) -> tuple[Tensor, ...]:
        outputs_first = weight.t() if self._transposed else weight
        return *scaled_rows(outputs_first), *scaled_rows(outputs_first.t())
