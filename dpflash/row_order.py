"""Whether a collate function and a loop leave the rows of a batch in the loader's order.

Padding rows are known by their place. Whoever sorts a batch, by length for instance, would put
padding where a sample is known to be, and count a sample once for each row that repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .digests import row_digests
from .lengths import tensors_of
from .tracker import BatchMark

__all__ = ["RowOrder"]

# A loop does the same to each batch.
_LOOKED_AT = 8
_REMEDY = (
    "so padding rows could not be told from samples and nothing was released: keep the loader's "
    "order, and sort inside of the model where a layer needs it (pack_padded_sequence has "
    "enforce_sorted=False)"
)


class RowOrder:
    """Looks for the rows that repeat a sample, in the loader's batch and in what the model gets.

    Rows that were changed at random (masked tokens, augmented images) are no copies any more, and
    tell nothing; neither does a batch all of whose rows are one sample. Of what a loop gives to
    the model only tensors with a row for each row of the batch are compared, in the first batches
    with padding; targets that it gives to the loss alone are not seen.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT
        self._batch: list[Tensor] = []
        self._copies: Tensor | None = None

    def observe(self, batch: Any, mark: BatchMark) -> None:
        """The loop gets this batch.

        Raises:
            RuntimeError: the collate function put its rows in another order.
        """
        self._batch, self._copies = [], None
        if mark.real is None or not 1 < mark.count < mark.size:
            return
        # Padding repeats the first sample, see `slots`.
        copies = ~mark.real
        copies[mark.real.int().argmax()] = True
        rows = (x for _, x in tensors_of(batch) if x.ndim and x.shape[0] == mark.size)
        held = [x for x in rows if x.layout == torch.strided]
        if _misplaced(held, copies):
            raise RuntimeError(
                "collate_fn put the rows of a batch in another order than the entries that it was "
                f"given, {_REMEDY}"
            )
        if self._left:
            self._left -= 1
            self._batch, self._copies = held, copies

    def check(self, given: Sequence[Tensor]) -> None:
        """The model is called with these tensors.

        Raises:
            RuntimeError: one of them has the rows of the batch in another order.
        """
        copies = self._copies
        if copies is None:
            return
        rows = [x for x in given if len(x) == len(copies) and x.layout == torch.strided]
        pairs = ((x, own) for x in rows for own in self._batch)
        if _misplaced(rows, copies) or any(_reordered(x, own) for x, own in pairs):
            raise RuntimeError(
                f"the model got the rows of the loader's batch in another order, {_REMEDY}"
            )


def _misplaced(tensors: Sequence[Tensor], copies: Tensor) -> bool:
    """Whether rows `copies` `[B]`, bool, of one sample are different, and as many others equal."""
    if not tensors:
        return False
    # All tensors together: those of one number, or of a mask, are often equal by chance.
    digests = torch.stack([row_digests(x).cpu() for x in tensors], 1)
    if len(digests[copies].unique(dim=0)) == 1:
        return False
    _, counts = digests.unique(dim=0, return_counts=True)
    return int(counts.max()) >= int(copies.sum())


def _reordered(x: Tensor, own: Tensor) -> bool:
    """Whether x is a tensor of the batch with its rows in another order."""
    if (x.shape, x.dtype) != (own.shape, own.dtype):
        return False
    found, expected = row_digests(x).cpu(), row_digests(own).cpu()
    same = torch.equal(found.sort().values, expected.sort().values)
    return same and not torch.equal(found, expected)
