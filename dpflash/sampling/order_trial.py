"""Tests before training that a dataset and its collate function keep the order of entries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import permutations
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..verification.nested import parts_within
from .entries import FittingCollate, ReadableEntries, Unreadable, copied

_CANDIDATES = 32
_CHOICES = 4
_BATCHES = 8
# Means of equally distributed rows differ by more than 3 standard errors in 1 of 100 cases.
_ERRORS = 3.0
_AGREE = 3
_SECONDS = 3.0
_DEPTH = 8  # objects may hold each other


def moves_rows(fitting: FittingCollate) -> bool:
    """Return whether rows are in another order than the entries from which they are made.

    Batches of three entries are made in several orders, to find out which row holds each entry.
    Random contents (augmentation, dropout) are compared by their means over 8 batches. The three
    entries are of different lengths, or adjacent in the dataset. An order of rows that depends on
    other entries or on random numbers is not detected.

    Args:
        fitting: the function and the dataset, of which at most 32 entries are read.
    """
    read = _read(fitting.dataset)
    deadline = time.monotonic() + _SECONDS

    def made(indices: list[int]) -> Any:
        if time.monotonic() > deadline:
            raise TimeoutError
        if fitting.dataset.reads_together:
            return fitting.collate(fitting.dataset.together(indices))
        # Copy the entries, since the function may change them in place in the dataset.
        return fitting.collate([copied(read[index]) for index in indices])

    for chosen in _choices(read):
        rotated, swapped = [*chosen[1:], chosen[0]], [chosen[1], chosen[0], *chosen[2:]]
        for other in (rotated, swapped):
            try:
                if all(_is_moved(made, chosen, other) for _ in range(_AGREE)):
                    return True
            except TimeoutError:
                return False
            except Exception:
                continue  # The function does not accept such a batch.
    return False


def _read(dataset: ReadableEntries) -> dict[int, Any]:
    deadline = time.monotonic() + _SECONDS
    last = len(dataset) - 1
    read: dict[int, Any] = {}
    for k in range(_CANDIDATES):
        index = last * k // (_CANDIDATES - 1)
        entry = read[index] if index in read else dataset[index]
        if not isinstance(entry, Unreadable):
            read[index] = entry
        if time.monotonic() > deadline:
            break
    return read


def _choices(read: dict[int, Any]) -> Iterator[list[int]]:
    """Yield three indices: of a short, a long and a medium entry, or of adjacent entries."""
    sizes = {index: _vector(entry).numel() for index, entry in read.items()}
    by_size = sorted(sizes, key=sizes.__getitem__)
    half = len(by_size) // 2
    for k in range(min(_CHOICES, half)):
        yield list(dict.fromkeys([by_size[k], by_size[-1 - k], by_size[half]]))
    for k in range(0, min(3 * _CHOICES, len(sizes) - 2), 3):
        yield list(sizes)[k : k + 3]


def _is_moved(make: Callable[[list[int]], Any], entries: list[int], others: list[int]) -> bool:
    """Return whether some field's rows are reordered, and no field keeps the entries' order.

    Args:
        make: function that makes a batch from indices.
        entries: indices of the dataset.
        others: the same indices in another order.
    """
    moved, size = False, len(entries)
    batches = (_fields(make, own) for own in ([entries[0]] * size, entries, others))
    expected = tuple(map(others.index, entries))
    for alone, before, after in zip(*batches, strict=True):
        if any(_is_apart(*_distance(alone[:, 0], alone[:, row])) for row in range(1, size)):
            continue  # The field contains row numbers.
        length = max(before.shape[2], after.shape[2])
        x, y = (F.pad(rows, (0, length - rows.shape[2])) for rows in (before, after))
        found = {}
        for order in permutations(range(size)):
            pairs = [_distance(x[:, row], y[:, order[row]]) for row in range(size)]
            found[order] = [sum(each) for each in zip(*pairs, strict=True)]
        best = min(found, key=lambda order: found[order][0])
        worst = max(found.values())
        if best == expected and _is_apart(*worst):
            return False
        moved |= _is_apart(*found[expected]) and found[best][0] < found[expected][0] / 2
    return moved


def _distance(x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the distance between the means of two samples `[n, d]`, and its standard error."""
    error = sum(float(z.var(0, correction=1).sum()) / len(z) for z in (x, y)) ** 0.5
    return float((x.mean(0) - y.mean(0)).norm()), error


def _is_apart(distance: float, error: float) -> bool:
    return distance > _ERRORS * error


def _fields(make: Callable[[list[int]], Any], indices: list[int]) -> list[Tensor]:
    """Return the numbers `[n, B, d]` of each field with B rows, from n batches of B entries."""
    size = len(indices)
    batches = [list(_columns(make(indices), size)) for _ in range(2)]
    if any(not torch.equal(x, y) for x, y in zip(*batches, strict=True)):
        more = range(_BATCHES - len(batches))
        batches += [list(_columns(make(indices), size)) for _ in more]
    fields = []
    for of_batches in zip(*batches, strict=True):
        rows = pad_sequence([x.T for x in of_batches], batch_first=True)
        fields.append(rows.transpose(1, 2))
    return fields


def _columns(batch: Any, size: int, depth: int = 0) -> Iterator[Tensor]:
    """Yield the numbers of each part of a batch that has length B, `[B, d]`."""
    is_array = isinstance(batch, Tensor | np.ndarray)
    if (batch.ndim if is_array else isinstance(batch, list | tuple)) and len(batch) == size:
        yield pad_sequence([_vector(row) for row in batch], batch_first=True)
    if not is_array and depth < _DEPTH:
        for _, part in parts_within(batch):
            yield from _columns(part, size, depth + 1)


def _vector(value: Any, depth: int = 0) -> Tensor:
    """Return all numbers and strings in a value as one vector `[d]`, float64."""
    if isinstance(value, np.ndarray | np.generic):
        is_number = value.dtype.kind in "biuf"
        value = torch.as_tensor(value.astype(np.float64)) if is_number else value.tolist()
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        value = torch.tensor(list(value))
    if isinstance(value, Real):
        value = torch.tensor(float(value))
    if isinstance(value, Tensor):
        x = torch.view_as_real(value) if value.is_complex() else value
        return x.detach().double().nan_to_num(0, 0, 0).flatten()
    parts = parts_within(value) if depth < _DEPTH else ()
    vectors = [_vector(part, depth + 1) for _, part in parts]
    return torch.cat(vectors) if vectors else torch.zeros(0, dtype=torch.double)
