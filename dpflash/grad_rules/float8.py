"""Float8Weight: the weight of a linear layer in float8, cast once per logical batch.

The products y = x W^T and dx = dy W have operands in e4m3. x and dy have one scale per token. W
has one scale per output channel when y is computed, and one per input channel when dx is computed.

Each token has its own scale, and the scales of W are computed from released parameters, so no
sample's bits depend on another sample. Weight gradients are computed from the uncast x and dy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpflash.kernels import scaled_rows


class Float8Weight:
    """Casts one weight to float8 twice: for y and for dx.

    Weights do not change within a logical batch, so all its microbatches use the same casts. All
    other calls cast again: torch's version counter cannot show that a weight is unchanged, since
    fused optimizers, weight averages and merges of adapters do not advance it.

    Args:
        transposed: whether the weight is `[I, O]` instead of `[O, I]`.
    """

    def __init__(self, *, transposed: bool) -> None:
        self._transposed = transposed
        self._weight: Tensor | None = None
        self._state: tuple[int, ...] = ()
        self._casts: tuple[Tensor, ...] = ()

    def casts(self, weight: Tensor, logical_batch: int | None) -> tuple[Tensor, ...]:
        """Return values and scales of W `[O, I]`, for y, and values and scales of W^T, for dx.

        Args:
            weight: the parameter.
            logical_batch: number of the logical batch of this call, or None.
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
