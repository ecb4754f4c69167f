"""Replacement: a call of the model is repeated with other contents in some of its samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from hashlib import sha256
from numbers import Number
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..packing import Units
from ..verification.nested import leaves_of, map_leaves, map_tensors, parts_within, tensors_of
from .forward_rows import ForwardRows

# Elements after which an address is aligned as before.
_ALIGNED = 64
# Elements of a list that are settings, not samples.
_SETTINGS = (
    *(Number, NoneType, Enum, slice, range, torch.dtype, torch.device, type),
    *(FunctionType, BuiltinFunctionType, partial, nn.Module),
)
_DEPTH = 8  # objects may hold each other


@dataclass(frozen=True)
class Replacement:
    """The rows of a batch that get the contents of another sample.

    Attributes:
        source: `[B]`, int64: the row that the contents come from.
        has_exempt: whether the row with most padding keeps its contents.
    """

    source: Tensor
    has_exempt: bool = False

    @property
    def unchanged(self) -> Tensor:
        """`[B]`, bool: rows with their own contents."""
        return self.source == torch.arange(len(self.source))

    @classmethod
    def drawn(
        cls,
        arguments: Any,
        size: int,
        real: Tensor | None,
        first: ForwardRows,
        draw: Callable[[Callable[[np.random.Generator], np.ndarray]], np.ndarray],
    ) -> Replacement:
        """Keep a secret random half of the samples; all others become copies of one of them.

        Many copies of one sample crowd any routing. Samples that may set a scale of the batch are
        replaced, and so are the first and the last one: code may use them for the whole batch.

        Args:
            arguments: of the model.
            size: B.
            real: `[B]`, bool: rows that are samples, padding rows repeat the first one; None if
                all rows are.
            first: inputs of the layers in the first forward.
            draw: returns secret random numbers, equal on all ranks that share samples.
        """
        samples = [*range(size)] if real is None else real.nonzero().flatten().tolist()
        # A packed batch has no masks.
        least = None if first.units is not None else _least_filled(arguments, size)
        count = len(samples)
        extremes = first.extremes(count // 8)

        def source(rng: np.random.Generator) -> np.ndarray:
            if not count:
                return np.arange(size)
            drawn = [samples[i] for i in rng.permutation(count)]
            last = {*extremes, *((samples[0], samples[-1]) if count > 3 else ())} - {least}
            order = [row for row in drawn if row not in last] + [r for r in drawn if r in last]
            order.sort(key=lambda row: row != least)
            unchanged = order[: max(1, count // 2)]
            rows = np.full(size, unchanged[rng.integers(len(unchanged))])
            if least is not None:
                unchanged.append(least)
            rows[unchanged] = unchanged
            return rows

        return cls(torch.from_numpy(draw(source).copy()), least is not None)

    @classmethod
    def exchanges(cls, size: int) -> tuple[Replacement, Replacement, Replacement]:
        """Three batches a, b, c of the samples of one: in each row two of the four hold a sample
        each, a and the batch itself, and b and c hold the same two.
        """
        own = torch.arange(size)
        turned, is_even = own.roll(-1), own % 2 == 0
        return (
            cls(turned),
            cls(torch.where(is_even, own, turned)),
            cls(torch.where(is_even, turned, own)),
        )

    def of_one(self) -> Replacement:
        """All rows get the contents of the one that the replaced rows have."""
        if not len(self.source):
            return self
        rows, counts = self.source.unique(return_counts=True)
        return Replacement(torch.full_like(self.source, int(rows[counts.argmax()])))

    def applied(self, arguments: Any, units: Units | None = None) -> tuple[Any, bool | None]:
        """(arguments with replaced contents, whether any changed; None if none can be replaced)"""
        of_samples = () if units is not None else _of_samples(arguments, len(self.source))
        chosen = {id(t) for t in of_samples}
        changed: bool | None = None if units is None else False

        if units is None:
            (args, kwargs), rows = arguments, self.source.tolist()
            lists = [x for v in (*args, *kwargs.values()) for x in _lists_of_samples(v, len(rows))]
            if lists and rows != [*range(len(rows))]:
                changed = True
            lengths = {length for own in lists for length in _lengths(own)}
            arguments = (
                tuple(_exchanged(value, rows, lengths) for value in args),
                {name: _exchanged(value, rows, lengths) for name, value in kwargs.items()},
            )

        def replaced(t: Tensor | np.ndarray) -> Tensor | np.ndarray:
            nonlocal changed
            if isinstance(t, np.ndarray):
                if id(t) not in chosen:
                    return t
                changed = changed or rows != [*range(len(rows))]
                return t[self.source.numpy()]
            if units is None:
                if id(t) not in chosen:
                    return t
                values = t.detach()[self.source.to(t.device)]
            elif tuple(t.shape[: len(units.shape)]) != units.shape or units.describes(t):
                return t
            else:
                values = units.exchanged(t.detach(), self.source)
            changed = changed or not torch.equal(values, t.detach())
            return with_layout_of(t, values)

        return map_leaves(replaced, arguments, kinds=(Tensor, np.ndarray)), changed


class LeftAlone:
    """Tracks arguments that replacements do not reach: whether they are the same in all calls."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, object], object] = {}

    def varying(self, arguments: Any, size: int, units: Units | None) -> str | None:
        """The first argument with contents that are not known to be the same in all calls.

        Args:
            arguments: of the model.
            size: B.
            units: the samples of a packed batch.
        """
        args, kwargs = arguments
        replaced = {id(t) for t in _of_samples(arguments, size)} if units is None else ()
        found = None
        for name, value in (*enumerate(args), *kwargs.items()):
            lists = {id(own) for own in _lists_of_samples(value, size)}
            for place, leaf in _outside_lists(value, size, f"{name}", lists=lists):
                if id(leaf) in replaced or (isinstance(leaf, Tensor) and _is_shared(leaf, units)):
                    continue
                key = (place, getattr(leaf, "shape", None))
                known, now = self._known.get(key), _contents(leaf)
                self._known[key] = now
                is_same = known is now or (isinstance(now, str | bytes) and known == now)
                if found is None and not is_same:
                    found = f"{name}"
        return found


def _is_shared(leaf: Tensor, units: Units | None) -> bool:
    """Whether a tensor has nothing of single samples, or is replaced with the packed batch."""
    if units is not None:
        # Integers of another shape tell where documents begin.
        is_packed = tuple(leaf.shape[: len(units.shape)]) == units.shape
        return is_packed or not leaf.is_floating_point()
    return leaf.numel() < 2 or isinstance(leaf, nn.Parameter)


def _contents(leaf: Any) -> object:
    """What is equal in two calls where a leaf's contents are; an object of others is itself."""
    if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
        leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return sha256(leaf.tobytes()).digest() if isinstance(leaf, np.ndarray) else leaf


def most_samples(args: Any, kwargs: Any) -> int:
    """A bound on B in a call of a model, by its tensors and lists."""
    values = (*args, *kwargs.values())
    lists = [v for value in values for _, v in leaves_of(value, kinds=(list, tuple))]
    dims = [t.shape[0] for _, t in tensors_of(values) if t.ndim]
    return max([*map(len, lists), *dims], default=0)


def own_copies(arguments: Any) -> Any:
    """Copies of the arguments, since a model may change its inputs."""
    return map_tensors(lambda t: with_layout_of(t, t), arguments)


def with_layout_of(t: Tensor, values: Tensor) -> Tensor:
    """A copy of values with the strides and alignment of t, since kernels depend on both."""
    values = values.detach()
    if t.layout != torch.strided:
        return values.clone().requires_grad_(t.requires_grad)
    offset = t.storage_offset() % _ALIGNED
    extent = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    flat = t.new_empty(offset + (extent if t.numel() else 0))
    copy = flat.as_strided(t.shape, t.stride(), offset)
    # An expanded tensor stores several entries in one place.
    single = [slice(1) if s == 0 else slice(None) for s in t.stride()]
    copy[tuple(single)].copy_(values[tuple(single)])
    # Detached, it is no view, so that views of it are told to be those of a batch.
    return copy.detach().requires_grad_(t.requires_grad)


def _of_samples(arguments: Any, size: int) -> Sequence[Tensor | np.ndarray]:
    """Tensors and arrays whose first dimension is the batch; none where that is ambiguous."""
    args, kwargs = arguments
    leaves = (x for value in (*args, *kwargs.values()) for _, x in _outside_lists(value, size))
    reached = {id(t) for _, t in leaves_of(arguments, kinds=(Tensor, np.ndarray))}
    found = [t for t in leaves if id(t) in reached and t.ndim and t.shape[0] == size]
    found = [t for t in found if isinstance(t, np.ndarray) or t.layout == torch.strided]
    if len(found) > 1 and any(t.ndim > 1 and t.shape[1] == size for t in found):
        # With as many tokens as samples, a table of positions looks like a batch.
        return ()
    return found


def _outside_lists(
    value: Any, size: int, place: str = "", *, lists: Collection[int] | None = None, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """(place, leaf) for all leaves outside of lists of samples, except numbers and settings.

    Args:
        value: of any nesting.
        size: B.
        place: of the value.
        lists: ids of the lists of samples; None for all lists that may be some.
        depth: of the value.
    """
    if type(value) in (list, tuple):
        if _is_list_of_samples(value, size) if lists is None else id(value) in lists:
            return
    parts = () if isinstance(value, str | bytes) or depth == _DEPTH else [*parts_within(value)]
    if not parts and not isinstance(value, _SETTINGS):
        yield place, value
    for name, part in parts:
        yield from _outside_lists(part, size, place + name, lists=lists, depth=depth + 1)


def _exchanged(value: Any, rows: list[int], lengths: Collection[tuple[int, ...]]) -> Any:
    """The value, with the elements of these rows in its lists of samples, in their own shapes."""

    def change(found: Any) -> Any:
        if hasattr(found, "_fields"):
            return type(found)(*(_exchanged(part, rows, lengths) for part in found))
        if type(found) not in (list, tuple) or is_list_of_batches(found, len(rows)):
            return found
        # Numbers may be the lengths of samples, but also a setting of the model.
        if _is_list_of_samples(found, len(rows)) or _numbers(found) in lengths:
            return type(found)(found[row] for row in rows)
        return type(found)(_exchanged(part, rows, lengths) for part in found)

    return map_leaves(change, value, kinds=(list, tuple))


def _numbers(value: Sequence[Any]) -> tuple[int, ...] | None:
    return tuple(value) if all(type(x) is int for x in value) else None


def _lengths(samples: Sequence[Any]) -> Iterator[tuple[int, ...]]:
    """The lengths of the samples in a list, in each dimension."""
    shapes = [
        x.shape if isinstance(x, Tensor) else (len(x),) for x in samples if hasattr(x, "__len__")
    ]
    yield from zip(*shapes, strict=False) if len(shapes) == len(samples) else ()


def _lists_of_samples(value: Any, size: int) -> Iterator[Sequence[Any]]:
    """The lists in a value, of any nesting, that have an element for each sample."""
    for _, found in leaves_of(value, kinds=(list, tuple)):
        if type(found) not in (list, tuple) or not _is_list_of_samples(found, size):
            for part in found:
                yield from _lists_of_samples(part, size)
        elif not is_list_of_batches(found, size):
            yield found


def _is_list_of_samples(value: Sequence[Any], size: int) -> bool:
    """Whether a list may have an element for each sample: they are of one kind."""
    if len(value) != size or len({_kind(part) for part in value}) != 1:
        return False
    is_number = isinstance(value[0], Tensor) and not value[0].ndim
    return not is_number and not isinstance(value[0], _SETTINGS)


def is_list_of_batches(value: Sequence[Any], size: int) -> bool:
    """Whether a list of B elements may be of batches, such as the keys of the layers."""
    return len(value) == size and all(_is_batch(part, size) for part in value)


def _kind(value: Any) -> tuple[Any, ...]:
    return (Tensor, value.ndim, value.dtype) if isinstance(value, Tensor) else (type(value),)


def _is_batch(value: Any, size: int) -> bool:
    if isinstance(value, list | tuple) and len(value) == size:
        return True
    leaves = [leaf for _, leaf in leaves_of(value, kinds=(Tensor, np.ndarray, str, int))]
    return bool(leaves) and all(
        isinstance(t, Tensor | np.ndarray) and t.ndim and t.shape[0] == size for t in leaves
    )


def _least_filled(arguments: Any, size: int) -> int | None:
    """The row with the fewest entries in a mask; None if all masks have equal rows.

    This row keeps its contents: without any padding, operators on masked batches run other
    kernels, which round differently.
    """
    for t in _of_samples(arguments, size):
        if (
            not isinstance(t, Tensor)
            or t.ndim < 2
            or not t.numel()
            or not bool(((t == 0) | (t == 1)).all())
        ):
            continue
        entries = t.reshape(len(t), -1).sum(1, dtype=torch.float64)
        if bool((entries != entries[0]).any()):
            return int(entries.argmin())
    return None
