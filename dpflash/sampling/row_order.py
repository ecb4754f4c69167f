"""Checks that the model gets the current batch, with each sample in the row of its entry.

Padding rows are known by their position. Code that sorts a batch, by length for instance, would
move padding to the position of a sample and count a sample once for each row that repeats it. So
would a loop that fetches the next batch before it trains on this one.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..refusal import PrivateRefusal, PrivateWarning
from ..verification.digests import as_words, row_digests
from .batch_tensors import batch_tensors, text_numbers
from .tracker import BatchMark

# A loop treats all batches alike. On a CPU all are checked; on a GPU each check waits for it.
_LOOKED_AT = 8
_REMEMBERED = 1 << 16
# Rows of fewer numbers may occur in another batch, or in another row, by chance.
_DISTINCTIVE = 8
_COLUMNS = 64  # so many numbers of a row are ranked
_RARE = math.log(1e-9)
_RARE_RUN = math.log(1e-6)
SORTING = (
    "so padding rows could not be distinguished from samples and nothing was released: keep the "
    "loader's order, and sort inside of the model where a layer needs it (pack_padded_sequence "
    "has enforce_sorted=False)"
)


# Of the loaders that are iterated over now.
_iterated: weakref.WeakSet[RowOrder] = weakref.WeakSet()


class CollatedOrder:
    """Finds batches whose rows are in another order than the entries that were fetched.

    Rows that repeat one entry are equal, unless its contents are random or rows were moved. They
    were moved if the row of another entry holds what this entry always becomes, and that other
    entry always becomes something else. So entries that are equal to each other show nothing.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT

    def is_moved(self, batch: Any, indices: list[int], again: Callable[[int], Any]) -> bool:
        """Whether rows of a batch were moved.

        Args:
            batch: of the entries `indices`.
            indices: of the dataset, some more than once.
            again: takes an index; returns a batch of these entries and B + 1 more rows of the
                entry with that index, which is fetched again.
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
    """Digests of the content that most rows of a batch have; None if there is none.

    Args:
        batch: `size` entries and more rows of one more entry.
        size: B.
    """
    tensors = _with_rows(batch_tensors(batch, 2 * size + 1), 2 * size + 1)
    if not tensors:
        return None
    found, counts = _digests(tensors).unique(dim=0, return_counts=True)
    return found[counts.argmax()] if int(counts.max()) > size else None


class RowOrder:
    """Compares the model's inputs with the loader's batches.

    Rows that were changed at random (masked tokens, augmented images) show nothing. Rows that
    were changed otherwise are recognized by the order of the numbers in their columns, if random
    numbers would have that order with a chance below 1e-9. Only tensors with one row for each row
    of the batch are compared; targets that reach the loss alone are not seen.
    """

    def __init__(self) -> None:
        self._left = _LOOKED_AT
        self._batch: list[_Rows] = []
        self._tensors: list[Tensor] = []
        self._is_trial = False
        self._copies: Tensor | None = None
        self._real: Tensor | None = None
        # By the number of the tensor in a call, see `_gather`.
        self._chances: defaultdict[int, float] = defaultdict(float)
        self._size: int | None = None
        # Hashes of whole tensors in earlier batches, and of single rows.
        self._past: OrderedDict[int, None] = OrderedDict()
        self._past_rows: OrderedDict[int, None] = OrderedDict()
        self._is_of_another = False
        self._has_unknown = self._has_warned = False

    @contextmanager
    def iterated(self) -> Iterator[None]:
        """The loop is inside of an epoch."""
        # At the exit of the interpreter the name may be gone.
        iterated = _iterated
        iterated.add(self)
        try:
            yield
        finally:
            iterated.discard(self)

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
        """
        for rows in self._batch:
            if rows.is_distinctive:
                if not self._is_trial:
                    self._past[rows.hash] = None
                self._past_rows.update((row, None) for row in rows.hashes)
        for past in (self._past, self._past_rows):
            while len(past) > _REMEMBERED:
                past.popitem(last=False)
        self._batch, self._copies, self._size = [], None, None
        self._is_trial = mark.is_trial
        self._real = None if mark.real is None else mark.real.repeat_interleave(each)
        tensors = self._tensors = batch_tensors(batch, mark.size * each)
        self._has_unknown = not tensors
        if not self._is_checked(tensors):
            return
        self._left = max(0, self._left - 1)
        self._batch = [_Rows(x) for x in [*tensors, *text_numbers(batch)] if _has_rows(x)]
        if mark.real is None:
            return
        self._size = mark.size * each
        for rows in self._batch:
            self._past.pop(rows.hash, None)
        if 1 < mark.count < mark.size:
            # Padding repeats the first sample, see `slots`.
            self._copies = ~mark.real
            self._copies[mark.real.int().argmax()] = True

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
        found = [_Rows(x) for x in _with_rows(batch_tensors(list(given), self._size), self._size)]
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
        orders = [(rows, own) for rows in found for own in _orders(rows, self._alike(rows))]
        # Few labels that were changed at random may be as many of each as before.
        moved = any(_is_rich(rows.x[rows.digests != own]) for rows, own in orders)
        moved = moved or any(self._moves(rows.x) for rows in found) or _are_moved_alike(orders)
        if moved or self._gather(found):
            raise PrivateRefusal(
                f"the model got the rows of the loader's batch in another order, {SORTING}. "
                "A negative must come of the sample's own entry, not of another row (x.roll(1, 0))"
            ) from None
        if any(self._repeats(rows) for rows in found):
            raise PrivateRefusal(
                "the model got a sample of the loader's batch in rows of others too, each clipped "
                "by itself, so nothing was released: compute views of a sample inside of the "
                "model, and give it the mean of their losses"
            ) from None

    def of_batch(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Those of the model's arguments that are the batch's tensors, or may be made of them.

        These are as many as the batch has: what comes beside them is of the loop.
        """
        left = Counter(x.shape[:2] for x in self._tensors)
        left.subtract(x.shape[:2] for x in given)
        own = _storages(self._tensors)
        return [x for x in given if left[x.shape[:2]] >= 0 or not own.isdisjoint(_storages([x]))]

    def _repeats(self, rows: _Rows) -> bool:
        """Whether all rows are of the batch, and samples are in the place of others."""
        alike = [own.digests for own in self._batch if own.form == rows.form]
        if self._real is None or not any(bool(torch.isin(rows.digests, x).all()) for x in alike):
            return False
        moved = [(rows.digests != own) & self._real for own in alike]
        # Rows that were emptied may be equal to an empty entry.
        return all(any(map(_is_telling, rows.x[apart])) for apart in moved)

    def _alike(self, rows: _Rows) -> list[_Rows]:
        """The batch's tensors, and these cropped to the length of the rows."""
        others = (x for x in self._tensors if x.dtype == rows.x.dtype)
        crops = (_cropped(x, rows.x) for x in others if _has_rows(x) and len(x) == len(rows.x))
        return self._batch + [_Rows(x) for x in crops if x is not None]

    def _gather(self, found: Sequence[_Rows]) -> bool:
        """Whether copies of the padding sample lie in other rows, in batch after batch.

        They do if some function was taken of each row and the rows are in another order. Rows that
        are drawn at random from a table do so in few batches running.
        """
        for number, rows in enumerate(found):
            chance = self._chance_of_copies(rows)
            if chance is not None:
                self._chances[number] = chance and self._chances[number] + chance
        return any(chance < _RARE_RUN for chance in self._chances.values())

    def _chance_of_copies(self, rows: _Rows) -> float | None:
        """Logarithm of a chance; 0 if other rows are equal, None where none may have moved.

        Random rows of B have one group of k equal ones with a chance of about B^(2 - k) / 2 at
        most, whatever the size of the table.
        """
        if self._copies is None:
            return None
        size, count = len(self._copies), int(self._copies.sum())
        batch = (_of_samples(own, size) for own in self._batch if len(own.x) % size == 0)
        if not any(_has_one_group(own, count) for own in batch):
            return None
        digests = _of_samples(rows, size)
        _, kinds, counts = digests.unique(return_inverse=True, return_counts=True)
        if not _has_one_group(digests, count):
            return 0.0
        if int((counts[kinds[self._copies]] == count).sum()) == count:
            return None
        return math.log(0.5) - (count - 2) * math.log(size)

    def _moves(self, x: Tensor) -> bool:
        """Whether these are rows of the batch in another order, with changed values.

        The order of the numbers in a column stays the same under any increasing function, such as
        a positive scale.
        """
        if self._copies is None or x.is_complex():
            return False
        size = len(self._copies)
        rows = x.reshape(size, -1)
        if _are_equal(rows[self._copies]):
            return False
        for tensor in _with_rows(self._tensors, len(x)):
            own = tensor if tensor[0].numel() == x[0].numel() else _cropped(tensor, x)
            if own is None or own.is_complex():
                continue
            kept = (own.to(x.dtype) if x.is_floating_point() else own).reshape(size, -1)
            step = max(1, rows.shape[1] // _COLUMNS)
            # Columns that are increasing functions of each other have equal ranks.
            now, before = (_Rows(_ranks(part[:, ::step]).cpu()) for part in (rows, kept))
            if any(_is_no_chance(now.x[now.digests != own]) for own in _orders(now, [before])):
                return True
        return False

    def refuse_private(self, given: Sequence[Tensor]) -> None:
        """Check the tensors with which the model is called on public data.

        Raises:
            PrivateRefusal: a row of one of them, of at least 8 different numbers, is of the
                private loader's last batch or of an earlier one.
        """
        if self._has_unknown and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "batches of the private loader hold no tensors, arrays or lists of numbers, so "
                "their rows would not be recognised inside engine.public_data(): give it public "
                "data alone",
                PrivateWarning,
                stacklevel=2,
            )
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
        x: the tensor.
        form: its shape and dtype.
        hash: of form and digests.
        hashes: the same of each row; of integers without the zeros that pad it to a length.
        is_distinctive: whether another batch is unlikely to have the same tensor.
    """

    def __init__(self, x: Tensor) -> None:
        self.form = x.shape, x.dtype
        self.x = x.detach()
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


def _has_one_group(digests: Tensor, count: int) -> bool:
    """Whether so many are equal, and all others different."""
    counts = digests.unique(return_counts=True)[1]
    return int(counts.max()) == count and len(counts) == len(digests) - count + 1


def _cropped(x: Tensor, given: Tensor) -> Tensor | None:
    """The first columns of x `[B, T, ...]`, as many as `given` has; None if it has not fewer."""
    if x.ndim < 2 or x.shape[2:] != given.shape[2:] or x.ndim != given.ndim:
        return None
    return x[:, : given.shape[1]] if 0 < given.shape[1] < x.shape[1] else None


def _of_samples(rows: _Rows, size: int) -> Tensor:
    """Digests `[size]` of samples, which may have several rows each."""
    if len(rows.x) == size:
        return rows.digests
    return row_digests(rows.x.reshape(size, -1)).cpu()


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tensors if _has_rows(x) and x.numel()}


def _is_telling(x: Tensor) -> bool:
    """Whether rows that are equal to it are hardly so by chance."""
    return len(x.unique()) >= _DISTINCTIVE


def _is_rich(x: Tensor) -> bool:
    """Whether random rows would hardly be these rows in another order."""
    is_fractional = x.is_floating_point() and bool((x != x.round()).any())
    width = x[0].numel()
    if width > 1 if is_fractional else width > 2 and _is_telling(x):
        return True
    return _is_no_chance(x.reshape(len(x), -1), lambda n: n.xlogy(n))


def _log_factorial(n: Tensor) -> Tensor:
    return (n + 1).lgamma()


def _is_no_chance(x: Tensor, weight: Callable[[Tensor], Tensor] = _log_factorial) -> bool:
    """Whether random columns have the rows of x `[B, n]` in some order with a chance below 1e-9.

    Columns that are equal to each other count once.

    Args:
        x: the rows.
        weight: of a number of equal entries: `log n!` for columns of the same entries in a random
            order; `n log n` for entries that are drawn at random, of the likeliest distribution.
    """
    columns = (_log_orders(column, weight) for column in x.unique(dim=1).T)
    return _log_orders(x) - sum(columns) < _RARE


def _log_orders(x: Tensor, weight: Callable[[Tensor], Tensor] = _log_factorial) -> float:
    """Logarithm of the number of different orders of its rows."""
    counts = x.unique(dim=0, return_counts=True)[1].double()
    return float(weight(counts.sum()) - weight(counts).sum())


def _are_equal(rows: Tensor) -> bool:
    words = as_words(rows)
    return bool((words == words[:1]).all())


def _has_rows(x: Tensor) -> bool:
    return bool(x.ndim) and x.layout == torch.strided and not x.is_nested and len(x) > 0


def _with_rows(tensors: Sequence[Tensor], size: int) -> list[Tensor]:
    """The tensors with one row for each of the `size` rows of the batch."""
    return [x for x in tensors if _has_rows(x) and len(x) == size]


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    """`[B, tensors]`: all together, since single numbers and masks are often equal by chance."""
    return torch.stack([row_digests(x).cpu() for x in tensors], 1)


def _ranks(x: Tensor) -> Tensor:
    """Of each number in x `[B, n]`: the number of smaller values that are in its column."""
    values, order = x.sort(stable=True, dim=0)
    steps = (values[1:] != values[:-1]).cumsum(0)
    ranks = torch.cat([torch.zeros_like(steps[:1]), steps])
    return torch.zeros_like(order).scatter_(0, order, ranks)


def _orders(rows: _Rows, batch: Sequence[_Rows]) -> list[Tensor]:
    """Digests of the batch's tensors that have these rows in another order; none if one is it."""
    alike = [own.digests for own in batch if own.form == rows.form]
    if any(torch.equal(rows.digests, own) for own in alike):
        return []
    ordered = rows.digests.sort().values
    return [own for own in alike if torch.equal(ordered, own.sort().values)]


def _are_moved_alike(orders: Sequence[tuple[_Rows, Tensor]]) -> bool:
    """Whether tensors were moved together, each of which alone may be so by chance.

    Args:
        orders: tensors, and the digests of one of the batch with the same rows.
    """
    pairs = {id(rows): (rows.digests, own) for rows, own in reversed(orders)}.values()
    if len(pairs) < 2:
        return False
    now, before = (torch.stack(digests, 1) for digests in zip(*pairs, strict=True))
    found = [x.unique(dim=0, return_counts=True) for x in (now, before)]
    if not all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(*found, strict=True)):
        return False
    return _is_no_chance(now[(now != before).any(1)], lambda n: n.xlogy(n))
