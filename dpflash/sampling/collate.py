"""Tries the user's collate function: row i must depend on entry i alone.

What all rows share, such as a number, must not depend on the entries at all; lengths may.

It does not see mixing below rounding, or that is rare; randomness from a generator of the
function's own, or with more random numbers for some entries than for others; results whose first
dimension is not the batch (packed ones), or of unknown classes; and mixing in `__getitem__`.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from ..refusal import PrivateRefusal
from ..verification.nested import leaves_of, parts_of, tensors_of
from .entries import Collate, Collated, FittingCollate, ReadableEntries, copied, name_of
from .order_trial import moves_rows

_ENTRIES = 6
_SEEDS = 24
_REPEATS = 8
_LEAVES = (Tensor, np.ndarray, np.generic, int, float, str, bytes)
_SECONDS = 3.0
_ROUNDING = 1e-6


def refuse_mixing(loader: DataLoader, *, may_sort: bool) -> None:
    """Refuse a loader whose collate function makes batches that cannot be trained on privately.

    That is one that visibly mixes or sorts the entries of a batch, makes nested tensors, or has
    no field with one row for each entry. So is a dataset whose `__getitems__` sorts them. The
    function is called about 80 times on entries of the dataset, or about 200 times if it or the
    dataset draws random numbers; each of three trials ends after three seconds. Global random
    states are restored. Where DataLoader workers fetch the entries, these workers try it, see
    `TriedCollate`.

    Args:
        may_sort: whether rows may be in another order than the entries.

    Raises:
        ValueError: naming the function; no value is shown.
    """
    if not loader.num_workers:
        _try(FittingCollate(loader.collate_fn, ReadableEntries(loader.dataset)), may_sort)


class TriedCollate:
    """A collate function that a DataLoader worker tries before its first batch.

    In the main process, files that the dataset opens lazily would be open before the fork.
    """

    def __init__(self, collate: FittingCollate, *, may_sort: bool):
        self.collate = collate
        self.may_sort = may_sort
        self.is_tried = False

    def __call__(self, entries: list[Any]) -> Collated:
        if not self.is_tried:
            self.is_tried = True
            _try(self.collate, self.may_sort)
        return self.collate(entries)


def _try(fitting: FittingCollate, may_sort: bool) -> None:
    """Try the function on entries from all over the dataset, as `refuse_mixing` says."""
    last = len(fitting.dataset) - 1
    if not _is_known(fitting.collate):
        with _randomness_kept():
            indices = {last * k // (_ENTRIES - 1) for k in range(_ENTRIES)}
            entries = [fitting.dataset[index] for index in sorted(indices)]
            entries = list(compress(entries, fitting.fit(entries)))
        _refuse(fitting.collate, entries)
    elif not fitting.dataset.reads_together:
        return
    if may_sort:
        return
    with _randomness_kept():
        is_moved = moves_rows(fitting)
    if is_moved:
        name = f"data_loader.collate_fn={name_of(fitting.collate)}"
        own = "data_loader.dataset's __getitems__"
        if fitting.dataset.reads_together:
            name = own if _is_known(fitting.collate) else f"{name} or {own}"
        raise PrivateRefusal(
            f"{name} puts the rows in another order than the entries that it is "
            "given. Padding rows are known by their position, so keep the order, and sort inside "
            "of the model where a layer needs it (pack_padded_sequence has enforce_sorted=False)"
        ) from None


def _is_known(collate: Collate) -> bool:
    return collate is default_collate or collate is default_convert


def _refuse(collate: Collate, entries: list[Any]) -> None:
    name = name_of(collate)
    with _randomness_kept():
        try:
            trial = _Trial(collate, entries)
            refusal = _odd_field(trial.two, len(entries[:2]))
            mixes = refusal is None and trial.mixes()
            shared = None if refusal or mixes else trial.shared_of_entries()
        except Exception:
            return  # The function does not accept such batches.
    if refusal is not None:
        raise PrivateRefusal(f"data_loader.collate_fn={name} {refusal}") from None
    if shared is not None:
        raise PrivateRefusal(
            f"data_loader.collate_fn={name} makes batch{shared} from all entries of the batch (as "
            "a mean, a scale or a count), and every row's gradient would depend on it. Leave it "
            "out, and compute it for each row, or once from public data"
        ) from None
    if mixes:
        raise PrivateRefusal(
            f"data_loader.collate_fn={name} mixes the entries of a batch: a row changes with the "
            "other entries (as by mixup, batch statistics, or weights that sum to 1), so one "
            "entry may change the sum by more than max_grad_norm. Make each row of its own entry "
            "alone"
        ) from None


def _odd_field(batch: Any, size: int) -> str | None:
    """What is wrong with a batch of two entries (or one), by the name of the field, or None."""
    tensors = list(tensors_of(batch))
    for place, x in tensors:
        if x.is_nested:
            return (
                f"makes batch{place} a nested tensor, whose rows cannot be compared: pad its "
                "samples to one length, such as with dpflash.sampling.PadTo"
            )
    if size < 2 or not tensors or any(True for _ in _columns(batch, batch, size)):
        return None
    place, x = tensors[0]
    return (
        f"makes batch{place} of another size than it got entries, and no field of the batch has "
        "one row for each entry: return the samples in the first dimension, [B, ...], "
        "such as by batch.transpose(0, 1), and one sample for each entry"
    )


@contextmanager
def _randomness_kept() -> Iterator[None]:
    """Restore the global generators at the end of the block."""
    in_numpy, in_python = np.random.get_state(), random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(in_numpy)
        random.setstate(in_python)


def _random_states() -> bytes:
    """States of the global generators of the CPU."""
    others = pickle.dumps((np.random.get_state(), random.getstate()))
    return torch.get_rng_state().numpy().tobytes() + others


@dataclass
class _Collated:
    """The rows of a batch, each a list of parts, and the random states before and after."""

    rows: list[list[Any]]
    before: bytes
    after: bytes

    @property
    def drew(self) -> bool:
        return self.before != self.after


class _Trial:
    """Tries a collate function on batches of different entries."""

    def __init__(self, collate: Collate, entries: list[Any]):
        self._collate = collate
        self._entries = entries
        # A batch of another size shows which dimensions are the batch.
        self.two = self._batch(entries[:2])
        self._draws = False

    def mixes(self) -> bool:
        """Whether an entry's row depends on the other entries, given one random state.

        The order of rows is ignored, because some loaders may sort.
        """
        deadline = time.monotonic() + _SECONDS
        turns = len(self._entries)
        differ, draws_depend = False, False
        for seed in range(_SEEDS):
            if (seed >= turns or differ) and not self._draws:
                break
            for first, second in self._pairs(seed % turns):
                if time.monotonic() > deadline:
                    return differ and not draws_depend and seed > turns
                try:
                    a, b = self._collated(first, seed), self._collated(second, seed)
                except Exception:
                    continue  # The function does not accept such a batch.
                self._draws |= a.drew or b.drew
                if a.after != b.after:
                    draws_depend |= len(first) == len(second)
                elif not differ and _differ(a.rows, b.rows):
                    differ = self._repeats(first, seed, a) and self._repeats(second, seed, b)
        # Where the number of random draws depends on the entries, they shift between entries.
        return differ and not draws_depend

    def shared_of_entries(self) -> str | None:
        """The place of a value that is no row of an entry and depends on entries, or None.

        A number that is a length of some tensor in the batch is as public as that length.
        """
        if self._draws or len(self._entries) < 3:
            return None
        deadline = time.monotonic() + _SECONDS
        for turn in range(len(self._entries)):
            if time.monotonic() > deadline:
                return None
            _, (first, second), *_ = self._pairs(turn)
            two = self._batch(first[:2])
            batches = [self._batch(entries) for entries in (first, first, second, second)]
            found = [dict(_shared(batch, two, len(first))) for batch in batches]
            lengths = [_lengths(batch) for batch in batches]
            for place in found[0]:
                a, again, b, b_again = (values.get(place) for values in found)
                if not (_equal(a, b) is False and _equal(a, again) and _equal(b, b_again)):
                    continue  # equal, or such as a counter of batches
                if not all(_is_length(x[place], n) for x, n in zip(found, lengths, strict=True)):
                    return place
        return None

    def _pairs(self, turn: int) -> Iterator[tuple[list[Any], list[Any]]]:
        """Batches that share one entry; each in turn, since the longest decides the padding."""
        entries = self._entries
        one, mate, other = entries[turn], entries[turn - 1], entries[turn - 2]
        yield [one, mate, mate, mate], [one]
        if len(entries) > 2:
            yield [one, mate, mate, mate], [one, other, other, other]
            if not self._draws:
                yield [mate, one, mate, mate], [other, one, other, other]

    def _batch(self, entries: list[Any]) -> Any:
        # A function may change its entries in place, and they may belong to the dataset.
        return self._collate(list(map(copied, entries)))

    def _collated(self, entries: list[Any], seed: int) -> _Collated:
        # Generators of other devices are ignored.
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = _random_states()
        batch = self._batch(entries)
        after = _random_states()
        columns = _columns(batch, self.two, len(entries))
        return _Collated([list(row) for row in zip(*columns, strict=True)], before, after)

    def _repeats(self, entries: list[Any], seed: int, known: _Collated) -> bool:
        """Whether entries and random state determine a batch."""
        again = (self._collated(entries, seed) for _ in range(_REPEATS))
        return all(_equal(known.rows, other.rows) for other in again)


def _columns(batch: Any, two: Any, size: int) -> Iterator[list[Any]]:
    """The parts of a batch for each of its `size` entries; `two` is a batch of two."""
    if _is_column(batch, two, size):
        yield list(batch)
    elif not isinstance(batch, Tensor | np.ndarray):
        others = dict(parts_of(two))
        for place, part in parts_of(batch):
            yield from _columns(part, others[place], size)


def _is_column(batch: Any, two: Any, size: int) -> bool:
    if isinstance(batch, Tensor | np.ndarray):
        return bool(batch.ndim and two.ndim and (len(batch), len(two)) == (size, 2))
    is_sequence = isinstance(batch, list | tuple) and not hasattr(batch, "_fields")
    return is_sequence and (len(batch), len(two)) == (size, 2)


def _shared(batch: Any, two: Any, size: int, place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of what has the same shape in both batches, so it belongs to no entry."""
    if isinstance(batch, _LEAVES):
        if getattr(batch, "shape", ()) == getattr(two, "shape", ()):
            yield place, batch
    elif not _is_column(batch, two, size):
        others = dict(parts_of(two))
        for name, part in parts_of(batch):
            if name in others:
                yield from _shared(part, others[name], size, place + name)


def _lengths(batch: Any) -> set[int]:
    """All dimensions of the tensors and arrays of a batch."""
    return {n for _, x in leaves_of(batch, kinds=(Tensor, np.ndarray)) for n in x.shape}


def _is_length(value: Any, lengths: set[int]) -> bool:
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1:
        value = value.reshape(()).item()
    return isinstance(value, int | float | np.number) and value in lengths


def _differ(rows: list[list[Any]], others: list[list[Any]]) -> bool:
    """Whether no two rows are equal, in any order, though some have the same form."""
    found = [_equal(row, other) for row in rows for other in others]
    return False in found and True not in found


def _equal(x: Any, y: Any) -> bool | None:
    """Whether two rows, or parts of them, are equal; None if their forms differ."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return _equal_tensors(x, y)
    if type(x) is not type(y):
        return None
    if isinstance(x, np.ndarray | np.generic):
        if x.dtype.hasobject or x.dtype.kind not in "biufc":
            return bool(np.array_equal(x, y)) if x.shape == y.shape else None
        return _equal_tensors(torch.as_tensor(x), torch.as_tensor(y))
    if isinstance(x, float):
        return _equal_tensors(torch.tensor(x), torch.tensor(y))
    if isinstance(x, int | str | bytes):
        return x == y
    parts, others = dict(parts_of(x)), dict(parts_of(y))
    if parts.keys() != others.keys():
        return None
    # Without parts it is of an unknown class, and the other parts of the row decide.
    found = [_equal(part, others[place]) for place, part in parts.items()]
    return None if None in found else all(found)


def _equal_tensors(x: Tensor, y: Tensor) -> bool | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return None
    if not x.dtype.is_floating_point:
        return torch.equal(x, y)
    relative = max(_ROUNDING, 8 * torch.finfo(x.dtype).eps)
    x, y = x.double(), y.double()
    finite = x[x.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(x, y, rtol=0, atol=relative * largest, equal_nan=True)
