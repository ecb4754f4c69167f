"""RowOrder: checks that the model gets the current batch, with rows in the loader's order.

Padding rows are known by their position. Code that sorts a batch, by length for instance, would
move padding to the position of a sample and count a sample once for each row that repeats it. So
would a loop that fetches the next batch before it trains on this one.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..refusal import PrivateRefusal
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


# Of the loaders that are iterated over now.
_iterated: weakref.WeakSet[RowOrder] = weakref.WeakSet()


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
        self._real: Tensor | None = None
        self._size: int | None = None
        # Hashes of whole tensors in earlier batches, and of single rows.
        self._past: OrderedDict[int, None] = OrderedDict()
        self._past_rows: OrderedDict[int, None] = OrderedDict()
        self._is_of_another = False

    @contextmanager
    def iterated(self) -> Iterator[None]:
        """The loop is inside of an epoch."""
        _iterated.add(self)
        try:
            yield
        finally:
            _iterated.discard(self)

    def refusal(self) -> str | None:
        """Why the losses of the model's last call may not be released, or None."""
        if not self._is_of_another:
            return None
        return (
            "the model got the batch of another private loader: which of its rows are padding, "
            "which repeats a sample, is unknown here. Give each private model a loop over its own "
            "loader, or make one module of both"
        )

    def observe(self, batch: Any, mark: BatchMark, each: int = 1) -> None:
        """Record a batch that the loop receives.

        Args:
            batch: with `[B each, ...]` where samples have several rows each.
            mark: of B samples.
            each: the number of rows of a sample.

        Raises:
            PrivateRefusal: the collate function changed the order of its rows.
        """
        for rows in self._batch:
            if rows.is_distinctive:
                self._past[rows.hash] = None
                self._past_rows.update((row, None) for row in rows.hashes)
        for past in (self._past, self._past_rows):
            while len(past) > _REMEMBERED:
                past.popitem(last=False)
        self._batch, self._copies, self._size = [], None, None
        self._real = None if mark.real is None else mark.real.repeat_interleave(each)
        tensors = self._tensors = [x for _, x in tensors_of(batch)]
        if not self._is_checked(tensors):
            return
        self._left = max(0, self._left - 1)
        self._batch = _rows_of(tensors, mark.size * each)
        if mark.real is None:
            return
        self._size = mark.size * each
        for rows in self._batch:
            self._past.pop(rows.hash, None)
        if not 1 < mark.count < mark.size:
            return
        # Padding repeats the first sample, see `slots`.
        copies = ~mark.real
        copies[mark.real.int().argmax()] = True
        if _misplaced(self._batch, copies):
            raise PrivateRefusal(
                "collate_fn put the rows of a batch in another order than the entries that it was "
                f"given, {_REMEDY}"
            ) from None
        self._copies = copies

    def check(self, given: Sequence[Tensor], *, is_released: bool) -> None:
        """Check the tensors with which the model is called.

        Args:
            given: the tensors.
            is_released: whether the batch was released, so that this call is not of it.

        Raises:
            PrivateRefusal: one of them has the rows of the batch in another order or repeats some,
                or they are those of an earlier batch.
        """
        others = {at for order in _iterated for at in _storages(order._tensors)}
        others -= _storages(self._tensors)
        self._is_of_another = bool(others) and not others.isdisjoint(_storages(given))
        if self._size is None or not self._is_checked(given):
            return
        found = _rows_of(given, self._size)
        is_present = any(rows.hash == own.hash for rows in found for own in self._batch)
        if not is_present and any(
            rows.is_distinctive and rows.hash in self._past for rows in found
        ):
            raise PrivateRefusal(
                "the model got a batch that the loader gave before the current one, so padding "
                "rows could not be distinguished from samples and nothing was released: train on "
                "each batch before you fetch the next one (no list of the private loader's "
                "batches, and no prefetching around it; the DataLoader's num_workers= fetches "
                "ahead)"
            ) from None
        if is_released:
            return
        moved = self._copies is not None and _misplaced(found, self._copies)
        if moved or any(_reordered(rows, self._batch) for rows in found):
            raise PrivateRefusal(
                f"the model got the rows of the loader's batch in another order, {_REMEDY}"
            ) from None
        if any(self._repeats(rows) for rows in found):
            raise PrivateRefusal(
                "the model got a sample of the loader's batch in rows of others too, each clipped "
                "by itself, so nothing was released: compute views of a sample inside of the "
                "model, and give it the mean of their losses"
            ) from None

    def _repeats(self, rows: _Rows) -> bool:
        """Whether all rows are of the batch, and samples are in the place of others."""
        alike = [own.digests for own in self._batch if own.form == rows.form]
        if self._real is None or not alike or not _is_telling(rows.first):
            return False
        moved = (not torch.equal(rows.digests[self._real], own[self._real]) for own in alike)
        return all(moved) and any(bool(torch.isin(rows.digests, own).all()) for own in alike)

    def refuse_private(self, given: Sequence[Tensor]) -> None:
        """Check the tensors with which the model is called on public data.

        Raises:
            PrivateRefusal: a row of one of them, of at least 8 different numbers, is of the
                private loader's last batch or of an earlier one.
        """
        found = self.drawn(given)
        if found:
            raise PrivateRefusal(
                "the model got rows of the private loader's batches inside engine.public_data(), "
                "where nothing protects them: give it public data alone",
                rows=found,
            ) from None

    def drawn(self, given: Sequence[Tensor]) -> list[int]:
        """Rows of some tensor that are of the loader's last batches. PRIVATE.

        Rows of less than 8 different numbers show nothing, and neither do those that the loop
        has changed.
        """
        own = {row for x in self._tensors if _has_rows(x) for row in _Rows(x).hashes}
        found = set()
        for x in given:
            rows = _Rows(x) if _has_rows(x) else None
            if rows is not None and rows.is_distinctive:
                for i, row in enumerate(rows.hashes):
                    if (row in own or row in self._past_rows) and _is_telling(x[i]):
                        found.add(i)
        return sorted(found)

    def _is_checked(self, tensors: Sequence[Tensor]) -> bool:
        return self._left > 0 or all(x.device.type == "cpu" for x in tensors)


class _Rows:
    """Digests of the rows of a tensor, on the CPU.

    Attributes:
        form: shape and dtype of the tensor.
        first: its first row.
        hash: of form and digests.
        hashes: the same of each row; of integers without the zeros that pad it to a length.
        is_distinctive: whether another batch is unlikely to have the same tensor.
    """

    def __init__(self, x: Tensor) -> None:
        self.form = x.shape, x.dtype
        self.first = x[0]
        self.digests = row_digests(x).cpu()
        self.hash = hash((self.form, *self.digests.tolist()))
        self.is_distinctive = x[0].numel() >= _DISTINCTIVE and bool((x != x.reshape(-1)[0]).any())

    @property
    def hashes(self) -> list[int]:
        shape, dtype = self.form
        # Zeros at the end of a row add nothing to its digest.
        is_text = len(shape) == 2 and not dtype.is_floating_point
        form = (dtype,) if is_text else (shape[1:], dtype)
        return [hash((form, row)) for row in self.digests.tolist()]


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if _has_rows(x) and x.numel()}


def _is_telling(row: Tensor) -> bool:
    """Whether equal rows are hardly so by chance."""
    return len(row.unique()) >= _DISTINCTIVE


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
