"""RowOrder: checks that the model gets the current batch, with rows in the loader's order.

Padding rows are known by their position. Code that sorts a batch, by length for instance, would
move padding to the position of a sample and count a sample once for each row that repeats it. So
would a loop that fetches the next batch before it trains on this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..verification.digests import row_digests
from ..verification.nested import tensors_of
from .tracker import BatchMark

# A loop treats all batches alike. On a CPU all are checked; on a GPU each check waits for it.
_LOOKED_AT = 8
_REMEMBERED = 1 << 16
# Rows of fewer numbers may occur in another batch by chance.
_DISTINCTIVE = 8
_REMEDY = (
    "so padding rows could not be distinguished from samples and nothing was released: keep the "
    "loader's order, and sort inside of the model where a layer needs it (pack_padded_sequence "
    "has enforce_sorted=False)"
)


class RowOrder:
    """Compares the model's inputs with the loader's batches, and padding rows with samples.

    Rows that were changed at random (masked tokens, augmented images) are no copies and show
    nothing; neither does a batch all of whose rows are one sample. Only tensors with one row for
    each row of the batch are compared; targets that reach the loss alone are not seen.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT
        self._batch: list[_Rows] = []
        self._tensors: list[Tensor] = []
        self._copies: Tensor | None = None
        self._size: int | None = None
        # Hashes of whole tensors in earlier batches.
        self._past: OrderedDict[int, None] = OrderedDict()

    def observe(self, batch: Any, mark: BatchMark, each: int = 1) -> None:
        """Record a batch that the loop receives.

        Args:
            batch: with `[B each, ...]` where samples have several rows each.
            mark: of B samples.
            each: the number of rows of a sample.

        Raises:
            RuntimeError: the collate function changed the order of its rows.
        """
        self._past.update((rows.hash, None) for rows in self._batch if rows.is_distinctive)
        while len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)
        self._batch, self._copies, self._size = [], None, None
        tensors = self._tensors = [x for _, x in tensors_of(batch)]
        if mark.real is None or not self._is_checked(tensors):
            return
        self._left = max(0, self._left - 1)
        self._size = mark.size * each
        self._batch = _rows_of(tensors, self._size)
        for rows in self._batch:
            self._past.pop(rows.hash, None)
        if not 1 < mark.count < mark.size:
            return
        # Padding repeats the first sample, see `slots`.
        copies = ~mark.real
        copies[mark.real.int().argmax()] = True
        if _misplaced(self._batch, copies):
            raise RuntimeError(
                "collate_fn put the rows of a batch in another order than the entries that it was "
                f"given, {_REMEDY}"
            )
        self._copies = copies

    def check(self, given: Sequence[Tensor]) -> None:
        """Check the tensors with which the model is called.

        Raises:
            RuntimeError: one of them has the rows of the batch in another order, or they are those
                of an earlier batch.
        """
        if self._size is None or not self._is_checked(given):
            return
        found = _rows_of(given, self._size)
        is_present = any(rows.hash == own.hash for rows in found for own in self._batch)
        if not is_present and any(
            rows.is_distinctive and rows.hash in self._past for rows in found
        ):
            raise RuntimeError(
                "the model got a batch that the loader gave before the current one, so padding "
                "rows could not be distinguished from samples and nothing was released: train on "
                "each batch before you fetch the next one (no list of the private loader's "
                "batches, and no prefetching around it; the DataLoader's num_workers= fetches "
                "ahead)"
            )
        moved = self._copies is not None and _misplaced(found, self._copies)
        if moved or any(_reordered(rows, self._batch) for rows in found):
            raise RuntimeError(
                f"the model got the rows of the loader's batch in another order, {_REMEDY}"
            )

    def refuse_private(self, given: Sequence[Tensor]) -> None:
        """Check the tensors with which the model is called on public data.

        Raises:
            RuntimeError: all rows of one of them are of the private loader's last batch, or it is
                a tensor of an earlier one.
        """
        own = [_Rows(x) for x in self._tensors if _has_rows(x)]
        for rows in (_Rows(x) for x in given if _has_rows(x)):
            if rows.is_distinctive and (
                rows.hash in self._past or any(rows.are_among(others) for others in own)
            ):
                raise RuntimeError(
                    "the model got rows of the private loader's batch inside "
                    "engine.public_data(), where nothing protects them: give it public data alone"
                )

    def _is_checked(self, tensors: Sequence[Tensor]) -> bool:
        return self._left > 0 or all(x.device.type == "cpu" for x in tensors)


class _Rows:
    """Digests of the rows of a tensor, on the CPU.

    Attributes:
        form: shape and dtype of the tensor.
        hash: of form and digests.
        is_distinctive: whether another batch is unlikely to have the same tensor.
    """

    def __init__(self, x: Tensor) -> None:
        self.form = x.shape, x.dtype
        self.digests = row_digests(x).cpu()
        self.hash = hash((self.form, *self.digests.tolist()))
        self.is_distinctive = x[0].numel() >= _DISTINCTIVE and bool((x != x.reshape(-1)[0]).any())

    def are_among(self, others: _Rows) -> bool:
        """Whether each row is one of these."""
        (shape, dtype), (theirs, their_dtype) = self.form, others.form
        return (shape[1:], dtype) == (theirs[1:], their_dtype) and bool(
            torch.isin(self.digests, others.digests).all()
        )


def _has_rows(x: Tensor) -> bool:
    return bool(x.ndim) and len(x) > 0 and x.layout == torch.strided


def _rows_of(tensors: Sequence[Tensor], size: int) -> list[_Rows]:
    """Digests of the tensors with one row for each of the `size` rows of the batch."""
    batched = (x for x in tensors if x.ndim and len(x) == size and x.layout == torch.strided)
    return [_Rows(x) for x in batched]


def _misplaced(tensors: Sequence[_Rows], copies: Tensor) -> bool:
    """Whether the samples `copies` `[B]`, all of one, differ while as many others are equal."""
    if not tensors:
        return False
    # All tensors together, since single numbers and masks are often equal by chance.
    digests = torch.stack([rows.digests for rows in tensors], 1).view(len(copies), -1)
    if len(digests[copies].unique(dim=0)) == 1:
        return False
    _, counts = digests.unique(dim=0, return_counts=True)
    return int(counts.max()) >= int(copies.sum())


def _reordered(rows: _Rows, batch: Sequence[_Rows]) -> bool:
    """Whether this is a tensor of the batch with its rows in another order."""
    alike = [own.digests for own in batch if own.form == rows.form]
    if any(torch.equal(rows.digests, own) for own in alike):
        return False
    return any(torch.equal(rows.digests.sort().values, own.sort().values) for own in alike)
