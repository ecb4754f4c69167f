"""Replaces entries that cannot be part of a batch by padding. Checks each entry by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from ..privacy.seeds import seed_reading
from ..random_state import RandomState, random_state_kept
from ..refusal import PrivateRefusal
from ..verification.digests import as_words
from ..verification.nested import map_leaves, parts_of, parts_within
from .lengths import PadTo
from .row_order import SORTING, CollatedOrder

Collate = Callable[[list[Any]], Any]

# Number of first entries from which the common form is determined.
_FIRST = 7
# An entry that is equal in this number of reads counts as equal in all reads.
_REPEATS = 8
_IMMUTABLE = {int, float, bool, str, bytes, NoneType}
_FAILED: Any = object()
# Lists up to this length are compared by element; longer ones by the set of element types.
_FIELDS = 16
# Objects at a deeper level of nesting are compared by type alone.
_DEPTH = 6
_STORAGE = ("dtype", "layout", "device", "requires_grad")
# For each of its first `_SHORTENED` batches, a DataLoader worker also makes at most `_VARIANTS`
# versions without the longer entries, see `Shorter`.
_SHORTENED = 32
_VARIANTS = 3
# Smallest number of samples at which `BadShare` decides.
_JUDGED = 64


@dataclass(frozen=True)
class Unreadable:
    """Replaces an entry whose `__getitem__` failed.

    Attributes:
        error: the text of the error that was raised. PRIVATE.
    """

    error: str = field(repr=False)


class _Fetched(list[Any]):
    """The entries of a batch.

    Args:
        entries: the entries, in the order of `indices`.
        indices: their indices in the dataset.
        are_together: False if `__getitems__` failed, so that each entry was read by itself.
    """

    def __init__(self, entries: list[Any], indices: list[int], *, are_together: bool) -> None:
        super().__init__(entries)
        self.indices = indices
        self.are_together = are_together


class Together(NamedTuple):
    """A result of a dataset's `__getitems__` that is not one object for each entry.

    Attributes:
        whole: the result; `Unreadable` if the call failed.
        indices: the indices of the entries in the dataset.
    """

    whole: Any
    indices: list[int]


class ReadableEntries(Dataset[Any]):
    """A dataset that returns `Unreadable` for an entry that cannot be read.

    Args:
        dataset: the user's map-style dataset.

    Attributes:
        dataset: the argument.
        reads_together: whether the dataset has a `__getitems__`, which reads several entries.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.reads_together = _reads_together(dataset)
        self._makes_lists: bool | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            return Unreadable(repr(error))

    def __getitems__(self, indices: list[Any]) -> Any:
        seed_reading(indices)
        if not self.reads_together:
            return _Fetched([self[index] for index in indices], indices, are_together=True)
        found = self.together(indices)
        if not self._makes_lists:
            return Together(found, indices)
        if isinstance(found, Unreadable):
            return _Fetched([self[index] for index in indices], indices, are_together=False)
        if len(found) != len(indices):
            return Together(found, indices)
        return _Fetched(found, indices, are_together=True)

    def together(self, indices: Sequence[int]) -> Any:
        """Return the result of the dataset's `__getitems__`, or `Unreadable` if it fails."""
        if self._makes_lists is None:
            with random_state_kept():
                ones = (self._read([index]) for index in range(min(_FIRST, len(self))))
                one = next((x for x in ones if not isinstance(x, Unreadable)), [None])
            self._makes_lists = not isinstance(one, Mapping) and len(one) == 1
        found = self._read(indices)
        is_list = self._makes_lists and not isinstance(found, Unreadable)
        return list(found) if is_list else found

    def _read(self, indices: Sequence[int]) -> Any:
        try:
            return self.dataset.__getitems__(list(indices))
        except Exception as error:
            return Unreadable(repr(error))


def _reads_together(dataset: Any) -> bool:
    # A Subset of a dataset without `__getitems__` reads entries one by one.
    if type(dataset) is Subset:
        return _reads_together(dataset.dataset)
    return hasattr(dataset, "__getitems__")


class Shorter(NamedTuple):
    """A version of a batch with copies of a shorter entry in place of its longer entries.

    Attributes:
        batch: the version, with the same number of rows and less padding.
        kept: for each row, whether its entry was kept.
    """

    batch: Any
    kept: list[bool]


class Collated(NamedTuple):
    """A batch, and information about its rows.

    Attributes:
        batch: the batch that the collate function made.
        bad: the rows in which padding replaces an entry.
        shorter: versions of the batch without its longer entries.
    """

    batch: Any
    bad: Sequence[int] = ()
    shorter: Sequence[Shorter] = ()


class FittingCollate:
    """A collate function that replaces entries that do not fit by padding.

    Most of the first `_FIRST` entries have one form; the first such entry is the model entry, with
    which all entries are compared. An entry fits if the collate function accepts it, alone and
    together with the model entry, and the batch has the fields and dtypes of a batch of the model
    entry (also its shapes, if the length is public). Numbers of narrower dtypes, such as integers
    among fractions, are converted. So whether an entry fits, and its row, do not depend on the
    other entries of the batch. Each entry is tested by itself, since a batch may hide a field that
    only one entry has. Entries with the types and dtypes of an entry that fits unchanged need no
    test. If one entry is added to the dataset, the model entry may be lost, but its fields never
    change. If a dataset reads several entries at once, entries are compared as read together.

    A dataset may change the form of all its entries, for example in a curriculum of lengths. So if
    an entry does not fit, the model entry is read again. If the model entry no longer fits, the
    form is determined again; if only single entries have changed, the form stays the same.

    Args:
        collate: the user's function.
        dataset: `ReadableEntries`, whose first entries are read before the first batch.
        has_public_length: whether all rows have one public length.
        each: the number of contiguous rows of a unit.

    Raises:
        PrivateRefusal: the function fails on the first entries or on a batch of entries that fit,
            changes the order of entries, or is a `PadTo` with a padding value for a field that the
            model entry lacks.
    """

    def __init__(
        self, collate: Collate, dataset: Any, *, has_public_length: bool = False, each: int = 1
    ) -> None:
        self.collate = collate
        self.dataset = dataset
        self._exact = has_public_length
        self._form: _Form | None = None
        self._is_looked_up = False
        self._known: set[Hashable] = set()
        self._error = ""
        self._uncopied: type | None = None
        self._order = CollatedOrder()
        self._shortens = False
        self._left = 0 if has_public_length else _SHORTENED
        self._each = each

    def __call__(self, entries: list[Any] | Together) -> Collated:
        form = self._looked_up()
        fetched = isinstance(entries, Together | _Fetched)
        indices: list[int] = list(getattr(entries, "indices", []))
        # Entries that are read together may depend on each other, for example by padding.
        by_index = fetched and self.dataset.reads_together
        items = indices if by_index else list(entries)
        random_state = RandomState()
        batch = self._of_fetched(entries)
        size = len(items)
        is_whole = batch is not _FAILED
        if form is not None and is_whole:
            batch = form.adopted(batch)
            is_whole = form.has_made(batch, size)
            is_whole = is_whole and self._are_known(entries, items, form, by_index=by_index)
        if is_whole:
            self._refuse_moved(batch, items, indices, by_index=by_index)
            return Collated(batch, (), self._shortened(batch, items, form, by_index=by_index))
        if form is not None:
            form = self._current(form)
            if not by_index:
                items = [_with_floats(entry, form.entry) for entry in items]
        fit = self.fit(items, by_index=by_index)
        good = next((e for e, fits in zip(items, fit, strict=True) if fits), None)
        if good is None and form is not None:
            good = form.index if by_index else form.entry
        random_state.restore()
        chosen = [e if fits or good is None else good for e, fits in zip(items, fit, strict=True)]
        batch = self._made(chosen, by_index=by_index)
        if form is not None and batch is not _FAILED:
            batch = form.adopted(batch)
        if batch is _FAILED or not (form is None or form.has_fields_of(batch, size)):
            name = name_of(self.collate)
            if self._uncopied:
                raise PrivateRefusal(
                    f"entries hold an object of type {self._uncopied.__name__}, which "
                    f"copy.deepcopy cannot copy, but data_loader.collate_fn={name} gets copies: "
                    "return tensors, arrays, numbers, strings, or containers of these from "
                    "__getitem__. `details['error']` of this exception has the reason",
                    error=self._error,
                ) from None
            raise PrivateRefusal(
                f"data_loader.collate_fn={name} failed on a batch. Possible causes: it "
                "accepts each entry alone but not the whole batch; or most of the dataset's first "
                "seven entries differ in form or cannot be read (__getitem__ failed). "
                "`details['error']` of this exception has the message of the failure. Entries of "
                "several lengths need a function that pads to a public length "
                "(collate_fn=dpflash.sampling.PadTo, or the data_collator of a Trainer); replace "
                "None in a field by a number",
                error=self._error,
            ) from None
        if form is not None:
            form.note_lengths(batch, size)
        if any(fit):
            first = fit.index(True)
            own = [i if fits else indices[first] for i, fits in zip(indices, fit, strict=False)]
            self._refuse_moved(batch, chosen, own, by_index=by_index)
        bad = [row for row, fits in enumerate(fit) if not fits]
        return Collated(batch, bad, self._shortened(batch, chosen, form, by_index=by_index))

    def _shortened(
        self, batch: Any, items: list[Any], form: _Form | None, *, by_index: bool
    ) -> tuple[Shorter, ...]:
        """Return versions of a batch without its longer items (entries or indices).

        There is one version for each length that varies, and no version if collating is random.
        """
        if form is None or len(items) < 2 or not self._may_shorten():
            return ()
        found = []
        with random_state_kept():
            before = RandomState()
            alone = [self._made([item], by_index=by_index) for item in items]
            for kept in self._kept_rows(alone):
                first = kept.index(True)
                chosen = [x if own else items[first] for x, own in zip(items, kept, strict=True)]
                found.append(Shorter(self._made(chosen, by_index=by_index), kept))
            again = self._made(items, by_index=by_index) if found else _FAILED
            drew = not RandomState().equals(before)
        if drew or again is _FAILED:
            return ()
        stable = _stable(batch, form.adopted(again))
        return tuple(
            Shorter(shorter, kept)
            for own, kept in found
            if own is not _FAILED
            and (shorter := _with_places_of(batch, form.adopted(own), stable)) is not None
        )

    def shorten(self, on: bool) -> None:
        """Set whether later batches come with versions that lack their longer entries.

        DataLoader workers always make such versions of their first batches.
        """
        self._shortens = on

    def _may_shorten(self) -> bool:
        if torch.utils.data.get_worker_info() is None:
            return self._shortens
        self._left -= 1
        return self._left >= 0

    def _kept_rows(self, alone: list[Any]) -> list[list[bool]]:
        """Return, for each shorter version of the batch, whether it keeps each row's entry."""
        if any(batch is _FAILED for batch in alone):
            return []
        shapes = [{n: x.shape for n, x in _numbers_of(batch)} for batch in alone]
        kept: dict[tuple[bool, ...], None] = {}
        for place in shapes[0]:
            own = [found.get(place, ()) for found in shapes]
            for lengths in zip(*own, strict=False):
                rows = _longest_in_each(lengths, self._each)
                most = min(sorted(rows)[(len(rows) - 1) // 2], max(rows) - 1)
                kept[tuple(length <= most for length in rows)] = None
        return [list(own) for own in kept if any(own)][:_VARIANTS]

    def _refuse_moved(
        self, batch: Any, items: list[Any], indices: list[int], *, by_index: bool
    ) -> None:
        def again(index: int) -> Any:
            with random_state_kept():
                anew = [self._item(index, by_index=by_index) for _ in range(_REPEATS)]
                more = [anew[i % _REPEATS] for i in range(len(items) + 1)]
                found = self._made([*more, *items], by_index=by_index)
            return None if found is _FAILED else found

        if indices and self._order.is_moved(batch, indices, again):
            raise PrivateRefusal(
                "collate_fn put the rows of a batch in another order than the entries that it was "
                "given, or the dataset's __getitems__ returned entries in another order, "
                f"{SORTING}"
            ) from None

    def fit(self, items: Sequence[Any], *, by_index: bool = False) -> list[bool]:
        """Return for each entry whether it fits.

        Args:
            items: entries, or their indices.
            by_index: whether items are indices.
        """
        form = self._looked_up()
        if form is None:
            return [not isinstance(entry, Unreadable) for entry in items]
        with random_state_kept():
            return [
                self._fits(x if by_index else _with_floats(x, form.entry), form, by_index=by_index)
                for x in items
            ]

    def _are_known(self, entries: Any, items: list[Any], form: _Form, *, by_index: bool) -> bool:
        """Return whether each entry has types and dtypes of an entry that fits unchanged."""
        if isinstance(entries, Together):
            return True
        kinds = {
            _kind_of(entry, with_lengths=self._exact): item
            for entry, item in zip(entries, items, strict=True)
        }
        new = kinds.keys() - self._known
        if new:
            with random_state_kept():
                self._known |= {
                    kind
                    for kind in new
                    if self._fits(kinds[kind], form, by_index=by_index, adopts=False)
                }
        return kinds.keys() <= self._known

    def _looked_up(self) -> _Form | None:
        if not self._is_looked_up:
            form = self._common_form()
            # Check the model entry alone, since entries of other forms become padding.
            pad = self.collate if isinstance(self.collate, PadTo) else None
            if pad and form and (unknown := pad.unknown(form.entry)):
                raise PrivateRefusal(
                    f"collate_fn=PadTo(..., {{{unknown[0]!r}: ...}}): the entries have no such "
                    "field, and the field that you meant would be padded with 0; pass the name of "
                    "a field, or its position if entries are tuples"
                ) from None
            if pad and form and (targets := pad.without_value(form.entry)):
                raise PrivateRefusal(
                    f"collate_fn=PadTo(...): would pad the targets in field {targets[0]!r} with "
                    "0, which is a class. Pass the index that the loss ignores, such as "
                    f"PadTo(..., {{{targets[0]!r}: -100}}), or 0 if they are not targets of tokens"
                ) from None
            self._form, self._is_looked_up = form, True
        return self._form

    def _current(self, form: _Form) -> _Form:
        """Return the form, or a new form if the model entry no longer has this form."""
        by_index = self.dataset.reads_together
        with random_state_kept():
            item = self._item(form.index, by_index=by_index)
            has_it = self._fits(item, form, by_index=by_index)
        if not has_it:
            self._form = form = self._common_form() or form
            self._known = set()
        return form

    def _common_form(self) -> _Form | None:
        by_index = self.dataset.reads_together
        with random_state_kept():
            first = range(min(_FIRST, len(self.dataset)))
            items = [self._item(index, by_index=by_index) for index in first]
            forms = (self._form_of(i, item, by_index) for i, item in enumerate(items))
            return next((form for form in forms if form and self._is_common(form, items)), None)

    def _form_of(self, index: int, item: Any, by_index: bool) -> _Form | None:
        two, three = (self._made([item] * n, by_index=by_index) for n in (2, 3))
        if two is _FAILED or three is _FAILED:
            return None
        return _Form(index, self.dataset[index] if by_index else item, two, three)

    def _is_common(self, form: _Form, items: list[Any]) -> bool:
        """Return whether at least half of the items fit the form, even without one of them."""
        by_index = self.dataset.reads_together
        count = sum(self._fits(x, form, by_index=by_index, adopts=False) for x in items)
        return len(items) == 1 or 2 * (count - 1) >= len(items)

    def _fits(self, item: Any, form: _Form, *, by_index: bool, adopts: bool = True) -> bool:
        """Return whether an entry has the form, alone and together with the model entry.

        Args:
            item: the entry, or its index.
            form: the form of the model entry.
            by_index: whether the item is an index.
            adopts: whether numbers of narrower dtypes may be converted.
        """
        model = form.index if by_index else form.entry
        # Test the entry alone too, since stack() converts an integer among floating-point numbers.
        for pair in ((item, item), (model, item), (item, model)):
            batch = self._made(pair, by_index=by_index)
            if batch is not _FAILED and adopts:
                batch = form.adopted(batch)
            same = form.has_made if self._exact else form.has_fields_of
            if batch is _FAILED or not same(batch, 2):
                return False
        return True

    def _item(self, index: int, *, by_index: bool) -> Any:
        return index if by_index else self.dataset[index]

    def _of_fetched(self, entries: list[Any] | Together) -> Any:
        if isinstance(entries, Together):
            return self._tried(entries.whole)
        if isinstance(entries, _Fetched) and not entries.are_together:
            return _FAILED
        return self._made(entries, by_index=False)

    def _made(self, items: Sequence[Any], *, by_index: bool) -> Any:
        """Return the batch of copies of these items (entries or indices), or `_FAILED`.

        Copy, since the function may change its arguments, and entries are collated repeatedly.
        """
        try:
            copies = self.dataset.together(items) if by_index else list(map(copied, items))
        except _Uncopied as error:
            return self._failed(repr(error.__cause__), uncopied=error.args[0])
        except Exception as error:
            return self._failed(repr(error))
        return self._tried(copies)

    def _tried(self, whole: Any) -> Any:
        parts = whole if isinstance(whole, list) else [whole]
        unreadable = next((e for e in parts if isinstance(e, Unreadable)), None)
        if unreadable is not None:
            return self._failed(unreadable.error)
        try:
            return self.collate(whole)
        except Exception as error:
            return self._failed(repr(error))

    def _failed(self, error: str, *, uncopied: type | None = None) -> Any:
        self._error, self._uncopied = error, uncopied
        return _FAILED


class _Uncopied(TypeError):
    """Raised if an object cannot be copied; the argument is the object's type."""


class BadShare:
    """Raises an error if padding replaces most samples, since steps would be mostly noise.

    The check runs at the end of a logical batch, once `_JUDGED` samples have been counted. One
    unit may have `per_unit` bad samples in each logical batch, so this many are not counted. So
    one unit, whatever its contents, can end training only if more than half of the other samples
    are bad. If logical batches have one or two samples, this check never ends training.

    Args:
        per_unit: the largest number of samples of a privacy unit in a logical batch.
    """

    def __init__(self, per_unit: int = 1) -> None:
        self._per_unit = per_unit
        self._samples = self._bad = self._excused = 0

    def observe(self, samples: int, bad: int, *, is_last: bool) -> None:
        """Count the samples and the bad samples of a microbatch.

        Args:
            samples: number of samples of the microbatch.
            bad: number of bad samples among them.
            is_last: whether the microbatch ends its logical batch.

        Raises:
            PrivateRefusal: most samples are bad.
        """
        self._samples += samples
        self._bad += bad
        self._excused += self._per_unit * is_last
        if not is_last or self._samples < _JUDGED:
            return
        if 2 * (self._bad - self._excused) > self._samples:
            raise PrivateRefusal(
                "most of the entries of the last batches could not be read, or are not like most "
                "of the dataset's first seven entries (other fields, dtypes or shapes, such as "
                "fractions instead of integers), so steps would release little but noise: give "
                "all entries the same form in the dataset or in collate_fn",
                samples=self._samples,
                bad=self._bad,
            ) from None
        self._samples = self._bad = self._excused = 0


class _Form:
    """The fields, dtypes and lengths that a batch of fitting entries must have.

    Args:
        index: index of the model entry in the dataset.
        entry: the model entry.
        two, three: batches of two and of three copies of the model entry; the dimensions in which
            the batches differ are the rows.
    """

    def __init__(self, index: int, entry: Any, two: Any, three: Any) -> None:
        self.index = index
        self.entry = entry
        self._samples = (two, three)
        self._fields, self._lengths = self._of(two, 2)
        self._dtypes = {place: x.dtype for place, x in _numbers_of(two)}
        self._varying: set[str] = set()
        # From now on only shapes are read, so free the values, which may be large.
        with suppress(Exception):  # some containers refuse other values
            kinds = (Tensor, np.ndarray)
            shapes = tuple(map_leaves(_without_values, x, kinds=kinds) for x in (two, three))
            self._samples = shapes

    def adopted(self, batch: Any) -> Any:
        """Convert numbers of narrower dtypes in a batch to the dtypes of the form.

        So a field's dtype is the same whether or not an entry of the batch holds a fraction.
        """
        new = {}
        for place, x in _numbers_of(batch):
            own = self._dtypes.get(place, x.dtype)
            if x.dtype != own and type(own) is type(x.dtype) and _holds(own, x.dtype):
                new[id(x)] = x.to(own) if isinstance(x, Tensor) else x.astype(own)
        return _replaced(batch, new) if new else batch

    def has_fields_of(self, batch: Any, size: int) -> bool:
        """Return whether a batch of `size` entries has the form's fields and dtypes."""
        return self._of(batch, size)[0] == self._fields

    def has_made(self, batch: Any, size: int) -> bool:
        """Like `has_fields_of`, but also compare the lengths that all fitting entries share."""
        fields, lengths = self._of(batch, size)
        return fields == self._fields and all(
            lengths[place] == own or place in self._varying for place, own in self._lengths.items()
        )

    def note_lengths(self, batch: Any, size: int) -> None:
        """Record which lengths of a batch of fitting entries differ from the form's lengths."""
        _, lengths = self._of(batch, size)
        self._varying |= {p for p, own in self._lengths.items() if lengths[p] != own}

    def _of(self, batch: Any, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
        fields, lengths = {}, {}
        for place, kind, own in _described(batch, *self._samples, size):
            fields[place], lengths[place] = kind, own
        return fields, lengths


def _numbers_of(batch: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of all tensors and arrays of a batch."""
    if isinstance(batch, Tensor | np.ndarray):
        yield place, batch
    elif depth < _DEPTH:
        for name, part in parts_within(batch):
            yield from _numbers_of(part, place + name, depth + 1)


def _without_values(x: Any) -> Any:
    """Return a tensor or array of the same shape that stores a single value."""
    if isinstance(x, np.ndarray):
        return np.broadcast_to(np.empty((), x.dtype), x.shape)
    if type(x) is not Tensor or x.is_nested or x.layout != torch.strided or x.is_quantized:
        return x
    return x.new_empty(()).expand(x.shape)


def _longest_in_each(lengths: Sequence[int], each: int) -> list[int]:
    """Return, for each row, the largest length among the rows of its unit."""
    parts = [max(lengths[i : i + each]) for i in range(0, len(lengths), each)]
    return [length for length in parts for _ in range(each)][: len(lengths)]


def _stable(batch: Any, again: Any) -> set[str]:
    """Return the fields whose values have the same bits in two batches of the same entries."""
    others = dict(_numbers_of(again))
    return {n for n, x in _numbers_of(batch) if n in others and _is_same(x, others[n])}


def _with_places_of(batch: Any, shorter: Any, stable: Collection[str]) -> Any | None:
    """Return `shorter`, but take fields that are not `stable` (such as a time) from `batch`.

    Return None if such a field has different shapes in the two batches.
    """
    own, new = dict(_numbers_of(batch)), {}
    for place, x in _numbers_of(shorter):
        if place not in stable:
            if place not in own or own[place].shape != x.shape:
                return None
            new[id(x)] = own[place]
    return _replaced(shorter, new) if new else shorter


def _is_same(x: Any, y: Any) -> bool:
    if type(x) is not type(y) or x.dtype != y.dtype or x.shape != y.shape:
        return False
    if isinstance(x, np.ndarray):
        return np.array_equal(x, y) if x.dtype.hasobject else x.tobytes() == y.tobytes()
    if x.is_nested or y.is_nested or not x.numel():
        return not x.numel()
    return torch.equal(as_words(x.unsqueeze(0)), as_words(y.unsqueeze(0)))


def _holds(dtype: Any, other: Any) -> bool:
    """Return whether `dtype` can hold `other`, that is, whether their promotion is `dtype`."""
    if isinstance(dtype, torch.dtype):
        return torch.promote_types(dtype, other) == dtype
    return {dtype.kind, other.kind} <= set("biuf") and np.promote_types(dtype, other) == dtype


def _replaced(batch: Any, new: dict[int, Any], depth: int = 0) -> Any:
    """Replace tensors and arrays of a batch; `new` maps ids of old ones to new ones."""
    if next(iter(parts_of(batch)), None) is None and not isinstance(batch, Tensor | np.ndarray):
        for name, part in parts_within(batch) if depth < _DEPTH else ():
            changed = _replaced(part, new, depth + 1)
            if changed is not part:
                object.__setattr__(batch, name[1:], changed)  # it may be frozen
        return batch
    return map_leaves(lambda x: new.get(id(x), x), batch, kinds=(Tensor, np.ndarray))


def _described(
    batch: Any, two: Any, three: Any, size: int, place: str = ""
) -> Iterator[tuple[str, tuple[Any, ...], tuple[int, ...]]]:
    """Yield (name, types, sizes of the dimensions other than the rows) of each part of a batch."""
    if isinstance(batch, Tensor) and batch.is_nested:
        yield place, (type(batch), batch.dtype), ()
        return
    if isinstance(batch, Tensor | np.ndarray):
        shapes = [getattr(x, "shape", ()) for x in (two, three)]
        dims = list(zip_longest(batch.shape, *shapes))
        rows = tuple(dim == (size, 2, 3) for dim in dims)
        lengths = tuple(n for (n, *_), is_rows in zip(dims, rows, strict=True) if not is_rows)
        storage = [getattr(batch, name, None) for name in _STORAGE]
        yield place, (type(batch), *storage, rows), lengths
        return
    yield place, (type(batch),), ()
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        others = [len(x) for x in (two, three) if isinstance(x, list | tuple)]
        if [len(batch), *others] == [size, 2, 3]:
            return  # One object for each entry.
    of_two, of_three = dict(parts_within(two)), dict(parts_within(three))
    is_container = next(iter(parts_of(batch)), None) is not None
    for name, part in parts_within(batch):
        # In objects of other classes, compare tensors and arrays alone.
        if is_container or isinstance(part, Tensor | np.ndarray):
            yield from _described(part, of_two.get(name), of_three.get(name), size, place + name)


def _kind_of(x: Any, *, with_lengths: bool, depth: int = 0) -> Hashable:
    """Return the types, dtypes and names of an entry's parts, and lengths if `with_lengths`."""
    if isinstance(x, Tensor | np.ndarray):
        storage = tuple(str(getattr(x, name, None)) for name in _STORAGE)
        objects: Any = x if getattr(x.dtype, "hasobject", False) else np.empty(0)
        own = frozenset(map(type, objects.flat))
        return type(x), storage, own, tuple(x.shape) if with_lengths else x.ndim
    if depth == _DEPTH:
        return (type(x),)
    if isinstance(x, list | tuple) and len(x) > _FIELDS:
        simple = frozenset(map(type, x))
        parts: Hashable = simple
        if not simple <= {int, float, bool, str}:
            parts = frozenset(_kind_of(y, with_lengths=with_lengths, depth=depth + 1) for y in x)
        return type(x), parts, len(x) if with_lengths else None
    return type(x), tuple(
        (name, _kind_of(part, with_lengths=with_lengths, depth=depth + 1))
        for name, part in parts_within(x)
    )


def _with_floats(entry: Any, own: Any, depth: int = 0) -> Any:
    """Return the entry, with integers converted to float wherever the entry `own` has floats."""
    if isinstance(entry, Tensor | np.ndarray):
        if type(entry) is not type(own) or not _is_floating(own) or not _is_integer(entry):
            return entry
        dtype: Any = own.dtype
        return entry.to(dtype) if isinstance(entry, Tensor) else entry.astype(dtype)
    if _is_integer(entry) and _is_floating(own) and not isinstance(own, Tensor | np.ndarray):
        with suppress(OverflowError):  # a huge integer is kept, and does not fit
            return type(own)(entry)
    if type(entry) is not type(own) or depth == _DEPTH:
        return entry
    depth += 1
    if isinstance(entry, dict):
        changed = copy.copy(entry)
        changed.update({n: _with_floats(x, own[n], depth) for n, x in entry.items() if n in own})
        return changed
    if isinstance(entry, list | tuple):
        parts = [_with_floats(x, y, depth) for x, y in zip(entry, own, strict=False)]
        parts += entry[len(parts) :]
        return type(entry)(*parts) if hasattr(entry, "_fields") else type(entry)(parts)
    return entry


def _is_integer(x: Any) -> bool:
    if isinstance(x, Tensor):
        return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    return x.dtype.kind in "iu" if isinstance(x, np.ndarray | np.generic) else type(x) is int


def _is_floating(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.is_floating_point()
    return x.dtype.kind == "f" if isinstance(x, np.ndarray | np.generic) else type(x) is float


def copied(entry: Any, depth: int = 0) -> Any:
    """Copy an entry like `copy.deepcopy`, but faster.

    A tensor that was computed from others is copied without its autograd graph.

    Raises:
        _Uncopied: an object cannot be copied.
    """
    if isinstance(entry, Tensor) and not entry.is_leaf:
        entry = entry.detach()
    kind = type(entry)
    if kind is Tensor and entry.layout == torch.strided and not entry.requires_grad:
        return entry.clone()
    if kind is np.ndarray and entry.dtype.kind != "O":
        return entry.copy()
    if kind is dict and depth < _DEPTH:
        return {name: copied(part, depth + 1) for name, part in entry.items()}
    if (kind is list or kind is tuple) and depth < _DEPTH:
        is_plain = set(map(type, entry)) <= _IMMUTABLE
        return kind(entry) if is_plain else kind(copied(part, depth + 1) for part in entry)
    if kind in _IMMUTABLE:
        return entry
    try:
        return copy.deepcopy(entry)
    except Exception as error:
        raise _Uncopied(kind) from error


def name_of(collate: Collate) -> str:
    """Return the name of a collate function for messages."""
    return str(getattr(collate, "__qualname__", type(collate).__name__))
