"""Rows: finds which parts of a batch, or of a call's arguments, belong to which sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import Units
from ..verification.nested import leaves_of, map_leaves, tensors_of
from .copies import copied, with_layout_of


def rows_of(batch: Any, rows: list[int], size: int) -> Any:
    """Return a copy of some rows of a batch of `size` rows, see `exchanged`."""
    return exchanged(batch, rows, size)[0]


def entries_of(batch: Any, size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor `[U, ...]`) of tensors with an entry for each of `size` samples."""
    for place, x in tensors_of(batch):
        if x.layout == torch.strided and not x.is_nested and x.ndim and x.shape[0] == size:
            yield place, x


def mask_sums(batch: Any, size: int) -> Iterator[Tensor]:
    """Yield, for each mask in a batch, the number of ones in each row, `[B]`, fp64."""
    for _, x in entries_of(batch, size):
        # Not float8: torch cannot compare numbers of every 8-bit floating-point dtype.
        if x.ndim < 2 or not x.numel() or x.itemsize == 1 and x.is_floating_point():
            continue
        if bool(((x == 0) | (x == 1)).all()):
            yield x.detach().reshape(size, -1).sum(1, dtype=torch.float64).cpu()


def sample_of_rows(size: int, units: Units | None) -> Tensor:
    """Return the sample of each row of a batch: `[N]`, int64; U if a row has no sample.

    Args:
        size: U, the number of samples.
        units: the samples if they are not single rows, else None. For documents, N is U.
    """
    return torch.arange(size) if units is None or not units.are_rows else units.index


def exchanged(
    batch: Any,
    rows: list[int],
    size: int,
    *,
    units: Units | None = None,
    lengths: Collection[tuple[int, ...]] | None = None,
) -> tuple[Any, bool]:
    """Copy a batch with other rows; return (the copy, whether a part of it has rows).

    Rows are the entries of tensors and arrays whose first dimension is `size`, and the elements of
    lists of length `size`. A list of `size` tensors, each with first dimension `size`, is
    ambiguous: a tensor may be a field of the batch, or a sample with `size` entries. If a batch
    has such a list, nothing in the batch counts as rows. There are two exceptions. In an inner
    list of dicts with the same keys, each dict is a sample. In the outermost list, each tensor is
    a field.

    Args:
        batch: the batch, which is not changed.
        rows: for each row of the copy, the number of the row that it contains.
        size: the number of rows; with units, the number of their positions.
        units: the samples if they are not single rows; tensors that describe units stay.
        lengths: lengths of the samples if the batch is the arguments of a model, else None. With
            `lengths`, ambiguous lists and lists of numbers other than lengths are copied
            unchanged, as settings.
    """
    shape = (size,) if units is None else units.shape
    has_rows = is_unclear = False

    def is_of_rows(x: Tensor | np.ndarray) -> bool:
        if isinstance(x, np.ndarray):
            return x.shape[:1] == (size,)
        if x.is_nested or tuple(x.shape[: len(shape)]) != shape:
            return False
        return units is None or not units.describes(x)

    def own(x: Any) -> Any:
        nonlocal has_rows, is_unclear
        if isinstance(x, Tensor | np.ndarray):
            if not is_of_rows(x):
                return copied(x)
            has_rows = True
            return x[rows] if isinstance(x, np.ndarray) else _chosen(x, rows, len(shape))
        if hasattr(x, "_fields"):
            return type(x)(*map(inner, x))
        if type(x) not in (list, tuple):
            return x
        is_field = x is not batch
        if len(x) == size and all(_is_batch(part, size) for part in x):
            if not (is_field and all(_is_alike(x[0], part) for part in x)):
                lists = [_kinds(part) for part in x if isinstance(part, list | tuple)]
                is_unclear |= is_field or len(lists) == size and lists.count(lists[0]) == size
                return x if lengths is not None else type(x)(map(inner, x))
        if not _is_of_samples(x, size, lengths):
            return type(x)(map(inner, x))
        has_rows = True
        return type(x)(x[row] for row in rows)

    def inner(x: Any) -> Any:
        return map_leaves(own, x, kinds=(Tensor, np.ndarray, list, tuple))

    changed = inner(batch)
    return changed, has_rows and not (is_unclear and lengths is None)


def _chosen(x: Tensor, rows: list[int], dims: int) -> Tensor:
    """Flatten the first `dims` dimensions of a tensor to rows, and return the chosen rows."""
    index = torch.tensor(rows, dtype=torch.int64, device=x.device)
    if x.layout != torch.strided:
        chosen = x.detach().to_sparse_coo().index_select(0, index)
        return chosen.to_sparse(layout=x.layout)
    chosen = x.detach().flatten(0, dims - 1)[index]
    if len(rows) != x.shape[:dims].numel():
        return chosen
    return with_layout_of(x, chosen.view(x.shape))


def _is_of_samples(
    value: Sequence[Any], size: int, lengths: Collection[tuple[int, ...]] | None
) -> bool:
    """Return whether a list has `size` elements of one type, one for each sample."""
    if len(value) != size or len({type(part) for part in value}) != 1:
        return False
    first = value[0]
    is_number = isinstance(first, Number) or (isinstance(first, Tensor) and not first.ndim)
    return lengths is None or not is_number or tuple(value) in lengths


def _is_alike(one: Any, two: Any) -> bool:
    """Return whether both are dicts with the same keys, such as two samples' targets."""
    return isinstance(one, Mapping) and isinstance(two, Mapping) and one.keys() == two.keys()


def _kinds(parts: Sequence[Any]) -> set[Any]:
    return {(type(x), getattr(x, "ndim", 0), getattr(x, "dtype", None)) for x in parts}


def _is_batch(value: Any, size: int) -> bool:
    if isinstance(value, list | tuple) and len(value) == size:
        # Elements of several types are the fields of one sample with `size` fields.
        return len(_kinds(value)) == 1
    leaves = [leaf for _, leaf in leaves_of(value, kinds=(Tensor, np.ndarray, str, int))]
    return bool(leaves) and all(
        isinstance(t, Tensor | np.ndarray) and t.ndim and t.shape[0] == size for t in leaves
    )
