"""Rows: which parts of a batch, or of a call's arguments, are of single samples."""

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
    """A copy of a batch of `size` with these of its rows, see `exchanged`."""
    return exchanged(batch, rows, size)[0]


def entries_of(batch: Any, size: int) -> Iterator[tuple[str, Tensor]]:
    """(place, tensor `[U, ...]`) of the tensors that have an entry for each of `size` samples."""
    for place, x in tensors_of(batch):
        if x.layout == torch.strided and not x.is_nested and x.ndim and x.shape[0] == size:
            yield place, x


def mask_sums(batch: Any, size: int) -> Iterator[Tensor]:
    """`[B]`, fp64: how many ones the rows of each mask in a batch have."""
    for _, x in entries_of(batch, size):
        # torch does not compare all numbers of 8 bits.
        if x.ndim < 2 or not x.numel() or x.itemsize == 1 and x.is_floating_point():
            continue
        if bool(((x == 0) | (x == 1)).all()):
            yield x.detach().reshape(size, -1).sum(1, dtype=torch.float64).cpu()


def sample_of_rows(size: int, units: Units | None) -> Tensor:
    """`[N]`, int64: the sample of each row of a batch of U samples; U for rows of none.

    Args:
        size: U.
        units: the samples where they are no rows. Documents have no rows of their own.
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
    """Copy a batch with other rows; returns (the copy, whether something in it has rows).

    Rows are those of tensors and arrays of this size, and the elements of lists of this size. A
    list in a batch may hold as many batches, or samples that are as long as the batch: then
    nothing has rows, unless it holds dicts with the same keys, which are samples. Tensors of the
    outermost list are fields.

    Args:
        batch: not changed.
        rows: numbers of the rows that the copy has.
        size: the number of rows; of units that of their positions.
        units: the samples where they are no rows; what describes them stays.
        lengths: of samples, for the arguments of a model. Other lists of numbers are settings
            there, and as many batches may be samples as long as the batch, so both stay.
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
    """Rows of a tensor, which its first dimensions number."""
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
    """Whether a list has an element for each sample: as many of one type."""
    if len(value) != size or len({type(part) for part in value}) != 1:
        return False
    first = value[0]
    is_number = isinstance(first, Number) or (isinstance(first, Tensor) and not first.ndim)
    return lengths is None or not is_number or tuple(value) in lengths


def _is_alike(one: Any, two: Any) -> bool:
    """Whether both are dicts with the same keys, as targets of two samples are."""
    return isinstance(one, Mapping) and isinstance(two, Mapping) and one.keys() == two.keys()


def _kinds(parts: Sequence[Any]) -> set[Any]:
    return {(type(x), getattr(x, "ndim", 0), getattr(x, "dtype", None)) for x in parts}


def _is_batch(value: Any, size: int) -> bool:
    if isinstance(value, list | tuple) and len(value) == size:
        # A sample of as many parts has parts of several kinds, such as (image, label).
        return len(_kinds(value)) == 1
    leaves = [leaf for _, leaf in leaves_of(value, kinds=(Tensor, np.ndarray, str, int))]
    return bool(leaves) and all(
        isinstance(t, Tensor | np.ndarray) and t.ndim and t.shape[0] == size for t in leaves
    )
