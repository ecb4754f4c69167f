"""CollatedOrder: finds batches whose rows are in another order than their entries.

Padding rows are identified by their position. A collate function that sorts a batch, for example
by length, would move padding to the position of a sample, and a sample would be counted once for
each row that repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..verification.digests import as_words, row_digests
from .batch_tensors import batch_tensors

# On a CPU all batches are checked. On a GPU only 8 are, since a check waits for the device.
_LOOKED_AT = 8
SORTING = (
    "so padding rows could not be distinguished from samples and nothing was released: keep the "
    "loader's order, and sort inside the model if a layer needs it (pack_padded_sequence "
    "has enforce_sorted=False)"
)


class CollatedOrder:
    """Finds batches whose rows are in another order than the entries that were fetched.

    The content of an entry is the content of most of its rows when it is read repeatedly. Rows
    were moved if the row of entry b has the content of entry a, but entry b has other content when
    it is read again. Moves between equal entries are not detected.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT

    def is_moved(self, batch: Any, indices: list[int], again: Callable[[int], Any]) -> bool:
        """Return whether rows of a batch were moved.

        Args:
            batch: the batch of the entries `indices`.
            indices: B indices of the dataset, of which some may repeat.
            again: function that reads the entry of an index again, and returns a batch of the B
                entries and B + 1 more rows of this entry.
        """
        size, (index, count) = len(indices), Counter(indices).most_common(1)[0]
        if count == 1 or not self._left:
            return False
        tensors = _with_rows(batch_tensors(batch, size), size)
        if not tensors:
            return False
        repeats = torch.tensor([own == index for own in indices])
        if any(x.device.type != "cpu" for x in tensors):
            self._left -= 1
        if all(_are_equal(x[repeats]) for x in tensors):
            return False
        self._left -= 1
        digests, own = _digests(tensors), _always(again(index), size)
        if own is None or own.shape != digests.shape[1:]:
            return False
        held = ((digests == own).all(1) & ~repeats).nonzero().flatten().tolist()
        others = (_always(again(other), size) for other in {indices[row] for row in held})
        return any(other is not None and not torch.equal(other, own) for other in others)


def _always(batch: Any, size: int) -> Tensor | None:
    """Return the digests of the content that more than B of the 2 B + 1 rows have, or None.

    Args:
        batch: a batch of B entries and B + 1 rows of one entry.
        size: B.
    """
    tensors = _with_rows(batch_tensors(batch, 2 * size + 1), 2 * size + 1)
    if not tensors:
        return None
    found, counts = _digests(tensors).unique(dim=0, return_counts=True)
    return found[counts.argmax()] if int(counts.max()) > size else None


def _are_equal(rows: Tensor) -> bool:
    words = as_words(rows)
    return bool((words == words[:1]).all())


def _with_rows(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    return [
        x
        for x in tensors
        if x.ndim and x.layout == torch.strided and not x.is_nested and len(x) == size > 0
    ]


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([row_digests(x).cpu() for x in tensors], 1)
