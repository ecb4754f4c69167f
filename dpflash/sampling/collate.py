"""Tests the user's collate function: row i must depend on entry i alone.

A value shared by all rows, such as a number, must not depend on the entries, unless it is a
length. The function must not store values of one batch for the next batch. The same is tested for
a dataset's `__getitems__`, which reads several entries at once.

The test does not detect
- mixing that is rare or below rounding, and mixing in `__getitem__`;
- functions that draw more random numbers for some entries than for others;
- state of a dataset, and state that a function keeps in objects that cannot be restored;
- results of unknown classes, and results whose first dimension is not the batch (packed rows).
If the function's random numbers cannot be reset, a warning says so.
"""

from __future__ import annotations

import math
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from ..isolation.function_state import FunctionState
from ..refusal import PrivateRefusal, PrivateWarning, warn
from ..verification.nested import leaves_of, parts_of, tensors_of
from .entries import Collate, Collated, FittingCollate, ReadableEntries, copied, name_of
from .order_trial import moves_rows

_ENTRIES = 6
# Each generator (Python's, torch's, NumPy's two) returns a first number below 0.05 for one of the
# first four seeds, and above 0.95 for another. So branches that are rarely taken run too.
_SEEDS = (56, 34, 119, 31, *range(20))
_REPEATS = 8
_ALIKE, _OTHERS = 24, 16
_LEAVES = (Tensor, np.ndarray, np.generic, int, float, str, bytes)
_SECONDS = 3.0
_ROUNDING = 1e-6


def refuse_mixing(loader: DataLoader, *, may_sort: bool) -> None:
    """Refuse a loader whose collate function makes batches that cannot be trained on privately.

    A collate function is refused if it visibly mixes or sorts the entries of a batch, keeps values
    of one batch for the next, makes nested tensors, or makes no field with one row for each entry.
    A dataset is refused if its `__getitems__` mixes or sorts entries. The function is called about
    150 times on entries of the dataset, or about 300 times if it or the dataset draws random
    numbers. Each test ends after three seconds. Random states are restored. If DataLoader workers
    fetch the entries, the workers run the tests, see `TriedCollate`. A function whose results on
    equal entries differ from call to call cannot be tested; a warning then says so.

    Args:
        may_sort: whether the rows may be in another order than the entries.

    Raises:
        PrivateRefusal: the message names the function and shows no value.
    """
    if not loader.num_workers:
        _try(FittingCollate(loader.collate_fn, ReadableEntries(loader.dataset)), may_sort)


class TriedCollate:
    """A collate function that each DataLoader worker tests before its first batch.

    A dataset may open files lazily; a test in the main process would open them before the fork.
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
    collate, dataset = fitting.collate, fitting.dataset
    is_known = _is_known(collate)
    if is_known and not dataset.reads_together:
        return
    last = len(dataset) - 1
    indices = sorted({last * k // (_ENTRIES - 1) for k in range(_ENTRIES)})
    own = f"data_loader.collate_fn={name_of(collate)}"
    either = "data_loader.dataset's __getitems__"
    if not is_known:
        either = f"{own} or {either}"
    with _randomness_kept(collate, dataset.dataset):
        if not is_known:
            before = FunctionState(collate)
            entries = [dataset[index] for index in indices]
            entries = list(compress(entries, fitting.fit(entries)))
            _refuse(own, collate, entries, before)
        if dataset.reads_together:
            fit = compress(indices, fitting.fit(indices, by_index=True))
            _refuse(either, lambda indices: collate(dataset.together(indices)), list(fit))
        if may_sort:
            return
        is_moved = moves_rows(fitting)
    if is_moved:
        name = either if dataset.reads_together else own
        raise PrivateRefusal(
            f"{name} puts the rows in another order than the entries that it is "
            "given. Padding rows are identified by their position, so keep the order, and sort "
            "inside the model if a layer needs it (pack_padded_sequence has "
            "enforce_sorted=False)"
        ) from None


def _is_known(collate: Collate) -> bool:
    return collate is default_collate or collate is default_convert


def _refuse(
    name: str, collate: Collate, entries: list[Any], before: FunctionState | None = None
) -> None:
    """Test a function, and refuse it if a test fails.

    Args:
        name: the function's name in messages.
        collate: the function.
        entries: entries that the function accepts, or indices if it also reads the entries.
        before: the function's state before its first call. None for a function that reads a
            dataset: its state is not restored, since a dataset may hold open files.
    """
    keeps = False
    try:
        trial = _Trial(collate, entries, of_indices=before is None)
        refusal = _odd_field(trial.two, len(entries[:2])) if before else None
        if before and refusal is None:
            keeps = trial.keeps_entries(before)
        mixes = refusal is None and not keeps and trial.mixes()
        joins = mixes and trial.joins()
        shared = None if refusal or keeps or mixes else trial.shared_of_entries()
    except Exception:
        return  # The function does not accept such batches.
    if keeps:
        raise PrivateRefusal(
            f"{name} keeps values computed from one batch for the next (such as a running mean, a "
            "scaler fitted on the first batch, or a numbering of labels in order of appearance), "
            "so one entry changes the rows of others. Compute these values once from public data, "
            "before training"
        ) from None
    if refusal is not None:
        raise PrivateRefusal(f"{name} {refusal}") from None
    if shared is not None:
        raise PrivateRefusal(
            f"{name} makes batch{shared} from all entries of the batch (such as a mean, a scale "
            "or a count), and every row's gradient would depend on it. Remove this field, and "
            "compute its value for each row, or once from public data"
        ) from None
    if joins:
        raise PrivateRefusal(
            f"{name} concatenates the rows of the entries (as "
            "pack_sequence does, or torch.cat with offsets), so that no dimension is the "
            "batch. Return padded rows [B, T] and their lengths [B], and pack them inside the "
            "model (pack_padded_sequence with enforce_sorted=False)"
        ) from None
    if mixes:
        raise PrivateRefusal(
            f"{name} mixes the entries of a batch: a row changes with the other entries (by "
            "mixup, batch statistics, or weights that sum to 1, for instance), so one entry may "
            "change the sum by more than max_grad_norm. Make each row from its own entry alone"
        ) from None
    if trial.is_unrepeated:
        warn(
            f"{name} could not be tried: two calls with the same entries return other rows. The "
            "function keeps state, or draws random numbers that cannot be reset "
            "(numpy.random.default_rng() or random.SystemRandom() inside the function). If it "
            "mixes the entries of a batch, one entry may change the sum by more than "
            "max_grad_norm. Draw from the global generators of torch, NumPy or Python, or from a "
            "generator in an attribute or a variable of the function",
            PrivateWarning,
        )


def _odd_field(batch: Any, size: int) -> str | None:
    """Return the error message for a nested tensor, or for a batch without rows; else None."""
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
        f"makes batch{place} of another size than its entries, and no field of the batch has one "
        "row for each entry: return one sample for each entry, with the samples in the first "
        "dimension, [B, ...], for example by batch.transpose(0, 1)"
    )


@contextmanager
def _randomness_kept(*functions: Any) -> Iterator[None]:
    """Restore the global generators and the functions' generators at the end of the with block."""
    generators = FunctionState(*functions, with_data=False)
    in_numpy, in_python = np.random.get_state(), random.getstate()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        np.random.set_state(in_numpy)
        random.setstate(in_python)
        generators.restore()


@dataclass
class _Collated:
    """The rows of a batch (lists of fields), and the random states before and after collating."""

    rows: list[list[Any]]
    before: bytes
    after: bytes

    @property
    def drew(self) -> bool:
        return self.before != self.after


class _Trial:
    """Runs a collate function on batches of different entries and compares the rows."""

    def __init__(self, collate: Collate, entries: list[Any], *, of_indices: bool = False):
        self._collate = collate
        self._entries = entries
        # If entries are read in order, the last two are never first, so no turn begins with them.
        self._turns = max(1, len(entries) - 2) if of_indices else len(entries)
        # The dimensions in which `two` differs from larger batches are the batch dimensions.
        self.two = self._batch(entries[:2])
        self._generators = FunctionState(collate, with_data=False)
        self._state: FunctionState | None = None
        self._draws = self._resets = False
        self.is_unrepeated = False

    def keeps_entries(self, before: FunctionState) -> bool:
        """Return whether a batch depends on the entries of the previous batch.

        Args:
            before: the function's state before its first call.
        """
        deadline = time.monotonic() + _SECONDS
        count = len(self._entries)
        # The first call may have made a generator.
        self._state = FunctionState(self._collate)
        for state in (before, self._state):
            for turn in range(count):
                if time.monotonic() > deadline:
                    return False
                one, a, b, c = (self._entries[(turn + k) % count] for k in range(4))
                batches = ([a, a, a, b], [one, a, b, one]), ([b, b, b, c], [one, a, b, one])
                first, second = (self._last_of(state, own, turn) for own in batches)
                if _equal(first, second) is False and all(
                    _equal(known, self._last_of(state, own, turn))
                    for known, own in zip((first, second), batches, strict=True)
                    for _ in range(_REPEATS)
                ):
                    return True
        return False

    def mixes(self) -> bool:
        """Return whether an entry's row depends on the other entries, at equal random states.

        The order of rows is ignored, because some loaders may sort. If equal calls give different
        results, the test is repeated, and restores the function's state before each call. If
        results still differ, batches that repeat one entry show whether each row is random by
        itself.
        """
        if self._mixes():
            return True
        if self.is_unrepeated and self._state is not None:
            self._resets, self.is_unrepeated = True, False
            if self._mixes():
                return True
        return self.is_unrepeated and self._is_random_by_others()

    def _mixes(self) -> bool:
        deadline = time.monotonic() + _SECONDS
        turns = self._turns
        differ, draws_depend = False, False
        for number, seed in enumerate(_SEEDS):
            if (number >= turns or differ) and not self._draws:
                break
            for first, second in self._pairs(number % turns):
                if time.monotonic() > deadline:
                    return differ and not draws_depend and number > turns
                try:
                    a, b = self._collated(first, seed), self._collated(second, seed)
                except Exception:
                    continue  # The function does not accept such a batch.
                self._draws |= a.drew or b.drew
                if a.after != b.after:
                    draws_depend |= len(first) == len(second)
                elif not differ and _differ(a.rows, b.rows):
                    differ = self._repeats(first, seed, a) and self._repeats(second, seed, b)
                    self.is_unrepeated |= not differ
        # If an entry determines how many numbers are drawn, later entries get other numbers.
        return differ and not draws_depend

    def joins(self) -> bool:
        """Return whether some tensor is a concatenation of the entries' rows."""
        try:
            ones = [dict(tensors_of(self._batch([entry]))) for entry in self._entries[:2]]
        except Exception:
            return False  # The function does not accept a batch of one.
        for place, x in tensors_of(self.two):
            parts = [one[place] for one in ones if place in one]
            if x.ndim and len(x) > 2 and len(x) == sum(len(part) for part in parts if part.ndim):
                return True
        return False

    def _is_random_by_others(self) -> bool:
        """Return whether equal calls differ for a batch of several entries, but not of one.

        A batch of one entry repeats this entry. If each row is random by itself, at most one of
        100,000 tests returns True by chance, for any probability that a row changes.
        """
        several, deadline = self._entries[:4], time.monotonic() + _SECONDS
        for entry in several:
            first = self._collated([entry] * 4, 0).rows
            for _ in range(_ALIKE):
                again = self._collated([entry] * 4, 0).rows
                if not _has_rows_of(first, again) or time.monotonic() > deadline:
                    return False
        found = [self._collated(several, 0).rows for _ in range(_OTHERS + 1)]
        changes = sum(not _has_rows_of(x, y) for x, y in pairwise(found))
        return len(several) > 1 and 4 * changes >= 3 * _OTHERS

    def shared_of_entries(self) -> str | None:
        """Return the name of a field that has no row per entry but depends on entries, or None.

        A number is allowed if it is the length of a tensor of the batch, which shows it anyway.
        """
        if len(self._entries) < 3:
            return None
        deadline = time.monotonic() + _SECONDS
        for turn in range(self._turns):
            if time.monotonic() > deadline:
                return None
            _, (first, second), *_ = self._pairs(turn)
            two = self._batch(first[:2])
            made = [self._made(own, _SEEDS[turn]) for own in (first, first, second, second)]
            if made[0][2] != made[2][2]:
                continue  # Random numbers may differ.
            batches = [batch for batch, *_ in made]
            found = [dict(_shared(batch, two, len(first))) for batch in batches]
            lengths = [_lengths(batch) for batch in batches]
            for place in found[0]:
                a, again, b, b_again = (values.get(place) for values in found)
                if not (_equal(a, b) is False and _equal(a, again) and _equal(b, b_again)):
                    continue  # equal, or different in each call, such as a counter of batches
                if not all(_is_length(x[place], n) for x, n in zip(found, lengths, strict=True)):
                    return place
        return None

    def _pairs(self, turn: int) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield pairs of batches that have one entry in common; `turn` selects this entry."""
        entries = self._entries
        one, mate, other = (entries[(turn + k) % len(entries)] for k in range(3))
        yield [one, mate, mate, mate], [one]
        if len(entries) > 2:
            yield [one, mate, mate, mate], [one, other, other, other]
            if not self._draws:
                yield [mate, one, mate, mate], [other, one, other, other]

    def _batch(self, entries: list[Any]) -> Any:
        # Copy the entries, since the function may change them in place in the dataset.
        return self._collate(list(map(copied, entries)))

    def _collated(self, entries: list[Any], seed: int) -> _Collated:
        batch, before, after = self._made(entries, seed)
        columns = _columns(batch, self.two, len(entries))
        return _Collated([list(row) for row in zip(*columns, strict=True)], before, after)

    def _last_of(self, state: FunctionState, batches: Sequence[list[Any]], seed: int) -> Any:
        """Set the function to `state`, collate the batches in turn, and return the last one."""
        assert self._state is not None
        state.restore()
        for entries in batches[:-1]:
            self._made(entries, seed)
        if not state.has_generators_of(self._state):  # generators that a call made are new
            FunctionState(self._collate, with_data=False).seed(seed)
        return self._made(batches[-1], seed)[0]

    def _made(self, entries: list[Any], seed: int) -> tuple[Any, bytes, bytes]:
        """Return a batch, and the random states before and after collating."""
        if self._resets and self._state is not None:
            self._state.restore()
        # Generators of other devices are ignored.
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self._generators.seed(seed)
        before = self._random_states()
        batch = self._batch(entries)
        return batch, before, self._random_states()

    def _random_states(self) -> bytes:
        in_torch = torch.get_rng_state().numpy().tobytes()
        others = pickle.dumps((np.random.get_state(), random.getstate()))
        return in_torch + others + self._generators.random_states()

    def _repeats(self, entries: list[Any], seed: int, known: _Collated) -> bool:
        """Return whether the same entries and random state always give the same batch."""
        again = (self._collated(entries, seed) for _ in range(_REPEATS))
        return all(_equal(known.rows, other.rows) for other in again)


def _columns(batch: Any, two: Any, size: int) -> Iterator[list[Any]]:
    """Yield each field with one row per entry; `batch` has `size` entries, and `two` has 2."""
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
    """Yield (name, value) of each field without rows that has the same shape in both batches."""
    if isinstance(batch, _LEAVES):
        if getattr(batch, "shape", ()) == getattr(two, "shape", ()):
            yield place, batch
    elif not _is_column(batch, two, size):
        others = dict(parts_of(two))
        for name, part in parts_of(batch):
            if name in others:
                yield from _shared(part, others[name], size, place + name)


def _lengths(batch: Any) -> set[int]:
    return {n for _, x in leaves_of(batch, kinds=(Tensor, np.ndarray)) for n in x.shape}


def _is_length(value: Any, lengths: set[int]) -> bool:
    if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1:
        value = value.reshape(()).item()
    return isinstance(value, int | float | np.number) and value in lengths


def _differ(rows: list[list[Any]], others: list[list[Any]]) -> bool:
    """Return whether the lists have rows of the same form, but no row in common."""
    found = [_equal(row, other) for row in rows for other in others]
    return False in found and True not in found


def _has_rows_of(rows: list[list[Any]], others: list[list[Any]]) -> bool:
    return all(any(_equal(row, other) for row in rows) for other in others)


def _equal(x: Any, y: Any) -> bool | None:
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
    # An object without parts is of an unknown class; ignore it.
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
