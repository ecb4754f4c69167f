"""SeenBatches: recognizes batches of the private loader in the arguments of the model."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..refusal import PrivateRefusal, PrivateWarning, warn
from ..verification.digests import row_digests
from .batch_tensors import batch_tensors
from .tracker import BatchMark

# On a CPU all batches are checked. On a GPU only 8 are, since a check waits for the device.
_LOOKED_AT = 8
_REMEMBERED = 1 << 16
# A row with fewer different numbers than this may equal a row of another batch by chance.
_DISTINCTIVE = 8

# The `SeenBatches` of all loaders over which a loop iterates now.
_iterated: weakref.WeakSet[SeenBatches] = weakref.WeakSet()


class SeenBatches:
    """Stores digests of the rows of the batches that the loop received from a private loader.

    Padding rows are known only by their position in the current batch. So the model must not get a
    batch of another private loader, or an earlier batch of this loader (trials included). Trials
    test whether rows are in the loader's order, see `dpflash.isolation.trial`.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT
        self._batch: list[_Rows] = []
        self._tensors: list[Tensor] = []
        self._size: int | None = None
        # Hashes of whole tensors in earlier batches, and of their single rows.
        self._past: OrderedDict[int, None] = OrderedDict()
        self._past_rows: OrderedDict[int, None] = OrderedDict()
        # `_shared`: hashes of rows that were equal for all samples of a batch.
        self._shared: OrderedDict[int, None] = OrderedDict()
        self._row_of_each: list[int] = []
        self._rows = 0
        self._is_of_another = False
        self._has_unknown = self._has_warned = False

    @contextmanager
    def iterated(self) -> Iterator[None]:
        """Mark in the with block that the loop iterates over an epoch of the loader."""
        # Use a local name: when the interpreter exits, the global name may be gone.
        iterated = _iterated
        iterated.add(self)
        try:
            yield
        finally:
            iterated.discard(self)

    def refusal(self) -> str | None:
        """Return the reason why losses of the model's last call must not be used, or None."""
        if not self._is_of_another:
            return None
        return (
            "the model got the batch of another private loader: it is unknown here which rows of "
            "that batch are padding rows, which repeat a sample. Give each private model a loop "
            "over its own loader, or combine both models in one module"
        )

    def observe(self, batch: Any, mark: BatchMark, each: int = 1) -> None:
        """Record a batch that the loop receives.

        Args:
            batch: the batch, with tensors `[B each, ...]`.
            mark: the mark of the batch, with B samples.
            each: the number of rows of each sample.
        """
        for rows in self._batch:
            if rows.is_distinctive:
                self._past[rows.hash] = None
                self._past_rows.update((row, None) for row in rows.hashes)
        for past in (self._past, self._past_rows, self._shared):
            while len(past) > _REMEMBERED:
                past.popitem(last=False)
        self._batch, self._size = [], None
        self._row_of_each = _row_of_each(mark, each)
        self._rows = mark.size * each
        tensors = self._tensors = batch_tensors(batch, self._rows)
        self._has_unknown = not tensors
        if not self._is_checked(tensors):
            return
        self._left = max(0, self._left - 1)
        self._batch = self._rows_of_batch()
        if mark.real is None:
            return
        self._size = self._rows
        for rows in self._batch:
            self._past.pop(rows.hash, None)

    def check(self, given: Sequence[Tensor]) -> None:
        """Check the tensors with which the model is called.

        Raises:
            PrivateRefusal: one tensor is from an earlier batch, and none from the current batch.
        """
        others = {at for seen in _iterated for at in _storages(seen._tensors)}
        others -= _storages(self._tensors)
        self._is_of_another = bool(others) and not others.isdisjoint(_storages(given))
        size = self._size
        if size is None or not self._is_checked(given):
            return
        tensors = batch_tensors(list(given), size)
        found = [_Rows(x) for x in tensors if _has_rows(x) and len(x) == size]
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

    def of_batch(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the model's arguments that are, or may be computed from, the batch's tensors.

        If more arguments than tensors of the batch have the same shape, the loop may have created
        them. Then only arguments that share memory with the batch are returned.
        """
        left = Counter(x.shape[:2] for x in self._tensors)
        left.subtract(x.shape[:2] for x in given)
        own = _storages(self._tensors)
        return [x for x in given if left[x.shape[:2]] >= 0 or not own.isdisjoint(_storages([x]))]

    def refuse_private(self, given: Sequence[Tensor]) -> None:
        """Check the tensors with which the model is called on public data.

        Raises:
            PrivateRefusal: a row is from a batch of the private loader, see `drawn`.
        """
        if self._has_unknown and not self._has_warned:
            self._has_warned = True
            warn(
                "batches of the private loader hold no tensors, arrays or lists of numbers, so "
                "their rows would not be recognised inside engine.public_data(): pass only public "
                "data to the model there",
                PrivateWarning,
            )
        found = self.drawn(given)
        if found:
            raise PrivateRefusal(
                "the model got rows of the private loader's batches inside engine.public_data(), "
                "where nothing protects them: pass only public data to the model there",
                rows=found,
            ) from None

    def drawn(self, given: Sequence[Tensor]) -> list[int]:
        """Return the indices of rows that come from the loader's last batches. PRIVATE.

        Rows are not recognized if they have fewer than 8 different numbers, if the loop has
        changed them, or if they were equal for all samples of a batch, like position_ids.
        """
        own = {row for rows in self._rows_of_batch() for row in rows.hashes}
        found = set()
        for x in given:
            rows = _Rows(x) if _has_rows(x) else None
            if rows is not None and rows.is_distinctive:
                for i, row in enumerate(rows.hashes):
                    is_drawn = row in own or row in self._past_rows
                    if is_drawn and row not in self._shared and _is_telling(x[i]):
                        found.add(i)
        return sorted(found)

    def _rows_of_batch(self) -> list[_Rows]:
        """Return `_Rows` of the current batch's tensors, and record rows that all samples share.

        Record no rows if all samples are equal: they may be one sample that padding repeats.
        """
        found = [_Rows(x) for x in self._tensors if _has_rows(x)]
        each = self._row_of_each
        of_samples = [rows for rows in found if len(rows.digests) == self._rows]
        varied = [rows for rows in of_samples if len(rows.digests[each].unique()) > 1]
        if varied:
            for rows in of_samples:
                if len(rows.digests.unique()) == 1:
                    self._shared[rows.hashes[0]] = None
            for row in (row for rows in varied for row in rows.hashes):
                self._shared.pop(row, None)
        return found

    def _is_checked(self, tensors: Sequence[Tensor]) -> bool:
        return self._left > 0 or all(x.device.type == "cpu" for x in tensors)


class _Rows:
    """Digests of the rows of a tensor, on the CPU.

    Attributes:
        form: shape and dtype of the tensor.
        hash: hash of `form` and of the digests.
        hashes: hash of each row; zeros at the end of a row of integers do not change its hash.
        is_distinctive: whether another batch is unlikely to contain an equal tensor.
    """

    def __init__(self, x: Tensor) -> None:
        self.form = x.shape, x.dtype
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


def _row_of_each(mark: BatchMark, each: int) -> list[int]:
    """Return the index of one row of each sample; [] for trials and for packed documents."""
    units = mark.units
    if mark.is_trial:
        return []
    if units is None or each > 1:
        real = [True] * mark.size if mark.real is None else mark.real.tolist()
        return [i * each for i, is_real in enumerate(real) if is_real]
    if not units.are_rows:
        return []
    owners = enumerate(units.index.tolist())
    return list({owner: row for row, owner in owners if owner < units.size}.values())


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if _has_rows(x) and x.numel()}


def _is_telling(x: Tensor) -> bool:
    return len(x.unique()) >= _DISTINCTIVE


def _has_rows(x: Tensor) -> bool:
    return bool(x.ndim) and x.layout == torch.strided and not x.is_nested and len(x) > 0
