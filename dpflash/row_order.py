"""Whether a loop gives the model the rows of a batch in the loader's order.

Padding rows are known by their place. A loop that sorts a batch, by length for instance, would put
padding where a sample is known to be, and count a sample that padding repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .lengths import tensors_of
from .tracker import BatchMark

__all__ = ["RowOrder"]

# A loop does the same to each batch.
_LOOKED_AT = 3


class RowOrder:
    """Compares what the model gets with the loader's batch, for the first batches with padding.

    What the loop makes of a batch before (other dtypes or shapes, other values) is not seen.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT
        self._batch: list[Tensor] = []

    def observe(self, batch: Any, mark: BatchMark) -> None:
        """The loop gets this batch."""
        self._batch = []
        if self._left and mark.real is not None and 1 < mark.count < mark.size:
            rows = (x for _, x in tensors_of(batch) if x.ndim and x.shape[0] == mark.size)
            self._batch = [x for x in rows if not x.is_sparse]

    def check(self, given: Sequence[Tensor]) -> None:
        """The model is called with these tensors.

        Raises:
            RuntimeError: one of them has the rows of the batch in another order.
        """
        compared, self._batch = self._batch, []
        for own in compared:
            for x in given:
                if x.shape != own.shape or x.dtype != own.dtype:
                    continue
                self._left = max(0, self._left - 1)
                if _reordered(x.detach().to(own.device), own):
                    raise RuntimeError(
                        "the model got the rows of the loader's batch in another order, so "
                        "padding rows could not be told from samples and nothing was released: "
                        "keep the loader's order, and sort inside of the model where a layer "
                        "needs it"
                    )


def _reordered(x: Tensor, own: Tensor) -> bool:
    x, own = (t.reshape(len(t), -1) for t in (x, own))
    if torch.equal(x, own):
        return False
    found, expected = (torch.unique(t, dim=0, return_counts=True) for t in (x, own))
    return len(found[0]) == len(expected[0]) and all(map(torch.equal, found, expected))
