"""Call: the arguments of one call of the model, in which samples can be replaced."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import Enum
from numbers import Number
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..packing import Units
from ..verification.digests import row_digests
from ..verification.nested import leaves_of, parts_within, tensors_of
from .rows import exchanged

_SETTINGS = (Number, NoneType, Enum, slice, range, torch.dtype, torch.device)
_DEPTH = 8  # objects may reference each other


class Call:
    """The arguments of a call of the model.

    Args:
        arguments: (args, kwargs), which are not changed.
        size: U, the number of samples.
        units: the samples if they are not single rows, else None.

    Attributes:
        has_samples: whether samples can be replaced. False if the numbers of tokens and samples
            are equal, since a table of positions then looks like a batch.
    """

    def __init__(self, arguments: Any, size: int, units: Units | None) -> None:
        args, kwargs = arguments
        self._named = {**dict(enumerate(args)), **kwargs}
        self._positional = len(args)
        self._units = units
        self._size = size if units is None else units.positions
        if units is None:
            leaves = leaves_of(self._named, kinds=(Tensor, np.ndarray))
            found = [x.shape[:2] for _, x in leaves if x.shape[:1] == (size,)]
            if len(found) > 1 and (size, size) in found:
                self._size = -1  # the size of no argument
        self._lengths = set(_lengths(self._named, self._size))
        self._rest, self.has_samples = self._exchanged([])

    def altered(self, source: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) in which sample i has the contents of sample `source[i]`."""
        order = source if self._units is None else self._units.order_of(source)
        named, _ = self._exchanged(order.tolist())
        return tuple(named.pop(place) for place in range(self._positional)), named

    def of_one(self, source: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with copies of one sample, the most frequent one in `source`."""
        return self.altered(torch.full_like(source, int(source.bincount(minlength=1).argmax())))

    def rest(self) -> Iterator[tuple[object, str, Any]]:
        """Yield (argument, path, leaf) of tensors and other values in which no sample is replaced.

        With packed documents, integer tensors are left out, since they hold documents' borders.
        """
        for name, value in self._rest.items():
            for place, leaf in _leaves_within(value):
                is_integer = isinstance(leaf, Tensor) and not leaf.is_floating_point()
                if not (is_integer and self._units is not None):
                    yield name, place, leaf

    def _exchanged(self, rows: list[int]) -> tuple[dict[Any, Any], bool]:
        return exchanged(self._named, rows, self._size, units=self._units, lengths=self._lengths)


class LeftAlone:
    """Detects changes between calls in the arguments that `Call` leaves unaltered."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], object] = {}

    def varying(self, call: Call) -> str | None:
        """Return the first argument with other contents than in earlier calls, or None."""
        found = None
        for name, place, leaf in call.rest():
            key = (name, place, getattr(leaf, "shape", None))
            known, now = self._known.get(key), _contents(leaf)
            self._known[key] = now
            if known is not now and not (isinstance(now, int | str | bytes) and known == now):
                found = found or f"{name}"
        return found


def most_samples(args: Any, kwargs: Any) -> int:
    """Return an upper bound on B in a model's call: the largest first dimension or list length."""
    values = (*args, *kwargs.values())
    lists = [v for value in values for _, v in leaves_of(value, kinds=(list, tuple))]
    dims = [t.shape[0] for _, t in tensors_of(values) if t.ndim]
    return max([*map(len, lists), *dims], default=0)


def _contents(leaf: Any) -> object:
    """Return a key that is equal for equal contents; for an unknown class, the object itself."""
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        return int(row_digests(leaf.unsqueeze(0)))
    return hash(leaf.tobytes()) if isinstance(leaf, np.ndarray) else leaf


def _leaves_within(value: Any, place: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for all nested leaves except numbers, settings and parameters."""
    parts = () if isinstance(value, str | bytes) or depth == _DEPTH else [*parts_within(value)]
    if isinstance(value, Tensor | np.ndarray):
        is_setting = math.prod(value.shape) < 2 or isinstance(value, nn.Parameter)
    else:
        is_empty = isinstance(value, list | tuple | Mapping) and not value
        is_setting = is_empty or isinstance(value, _SETTINGS) or callable(value)
    if not parts and not is_setting:
        yield place, value
    for name, part in parts:
        yield from _leaves_within(part, place + name, depth + 1)


def _lengths(value: Any, size: int) -> Iterator[tuple[int, ...]]:
    """Yield tuples of the samples' sizes, one for each dimension of a list of `size` samples."""
    for _, found in leaves_of(value, kinds=(list, tuple)):
        if len(found) == size and all(hasattr(x, "__len__") for x in found):
            shapes = [x.shape if hasattr(x, "shape") else (len(x),) for x in found]
            yield from zip(*shapes, strict=False)
        for part in found:
            yield from _lengths(part, size)
