"""Whether the model gets the batch at hand, with its rows in the loader's order.

Padding rows are known by their place. Who sorts a batch, by length for instance, would put padding
where a sample is known to be, and count a sample once for each row that repeats it. So would a
loop that asks for the next batch before it trains on this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .digests import row_digests
from .lengths import tensors_of
from .tracker import BatchMark

__all__ = ["RowOrder"]

# A loop does the same to each batch. On a CPU all are looked at; elsewhere that would wait for it.
_LOOKED_AT = 8
_REMEMBERED = 1 << 16
# Rows of fewer numbers may stand in another batch by chance.
_TELLING = 8
_REMEDY = (
    "so padding rows could not be told from samples and nothing was released: keep the loader's "
    "order, and sort inside of the model where a layer needs it (pack_padded_sequence has "
    "enforce_sorted=False)"
)


class RowOrder:
    """Compares what the model gets with the loader's batches, and looks for rows that repeat one.

    Rows that were changed at random (masked tokens, augmented images) are no copies any more, and
    tell nothing; neither does a batch all of whose rows are one sample. Of what a loop gives to
    the model only tensors with a row for each row of the batch are compared; targets that it
    gives to the loss alone are not seen.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT
        self._batch: list[Tensor] = []
        self._copies: Tensor | None = None
        self._size: int | None = None
        # Digests of whole tensors: of the batch at hand, and of those before it.
        self._present: set[int] = set()
        self._past: OrderedDict[int, None] = OrderedDict()

    def observe(self, batch: Any, mark: BatchMark) -> None:
        """The loop gets this batch.

        Raises:
            RuntimeError: the collate function put its rows in another order.
        """
        self._batch, self._copies, self._size = [], None, None
        if mark.real is None:
            return
        rows = (x for _, x in tensors_of(batch) if x.ndim and x.shape[0] == mark.size)
        held = [x for x in rows if x.layout == torch.strided]
        if not self._looks_at(held):
            return
        self._left = max(0, self._left - 1)
        self._batch, self._size = held, mark.size
        self._past.update(dict.fromkeys(self._present))
        while len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
        self._present = {_digest(x) for x in held if _tells(x)}
        for digest in self._present:
            self._past.pop(digest, None)
        if not 1 < mark.count < mark.size:
            return
        # Padding repeats the first sample, see `slots`.
        copies = ~mark.real
        copies[mark.real.int().argmax()] = True
        if _misplaced(held, copies):
            raise RuntimeError(
                "collate_fn put the rows of a batch in another order than the entries that it was "
                f"given, {_REMEDY}"
            )
        self._copies = copies

    def check(self, given: Sequence[Tensor]) -> None:
        """The model is called with these tensors.

        Raises:
            RuntimeError: one of them has the rows of the batch in another order, or they are those
                of an earlier batch.
        """
        copies, own = self._copies, self._batch
        rows = [x for x in given if len(x) == self._size and x.layout == torch.strided]
        if not self._looks_at(rows):
            return
        found = {_digest(x) for x in rows if _tells(x)}
        if not found & self._present and found & self._past.keys():
            raise RuntimeError(
                "the model got a batch that the loader gave before the one at hand, so padding "
                "rows could not be told from samples and nothing was released: train on each "
                "batch before the next one is asked for (no list of the private loader's batches, "
                "and no prefetching around it; the DataLoader's num_workers= fetches ahead)"
            )
        moved = copies is not None and _misplaced(rows, copies)
        if moved or any(_reordered(x, own) for x in rows):
            raise RuntimeError(
                f"the model got the rows of the loader's batch in another order, {_REMEDY}"
            )

    def _looks_at(self, tensors: Sequence[Tensor]) -> bool:
        return self._left > 0 or all(x.device.type == "cpu" for x in tensors)


def _tells(x: Tensor) -> bool:
    """Whether another batch hardly has the same tensor."""
    return x[0].numel() >= _TELLING and bool((x != x.reshape(-1)[0]).any())


def _digest(x: Tensor) -> int:
    return hash((x.shape, x.dtype, *row_digests(x).tolist()))


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


def _reordered(x: Tensor, batch: Sequence[Tensor]) -> bool:
    """Whether x is no tensor of the batch, but is one with its rows in another order."""
    found = row_digests(x).cpu()
    alike = [
        row_digests(own).cpu() for own in batch if (own.shape, own.dtype) == (x.shape, x.dtype)
    ]
    if any(torch.equal(found, own) for own in alike):
        return False
    return any(torch.equal(found.sort().values, own.sort().values) for own in alike)
