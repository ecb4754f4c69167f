"""Alteration: a microbatch in which some samples have other contents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import PackedBatch, Units
from ..verification.nested import leaves_of, map_leaves, tensors_of
from .documents import with_changed_documents
from .replacement import is_list_of_batches, with_layout_of


@dataclass(frozen=True, eq=False)
class Alteration:
    """A microbatch in which some samples have other contents.

    Attributes:
        batch: as the loop gets it.
        kept: `[U]`, bool, on the CPU: samples whose results must stay as they are.
        units: the samples of `batch` where they are no rows.
        places: whether all samples are in their places in the batch.
    """

    batch: Any
    kept: Tensor
    units: Units | None = None
    places: bool = True


def of_documents(batch: PackedBatch, number: int) -> Alteration:
    """Leaves some documents out, and gives others other tokens; see `with_changed_documents`."""
    changed, kept = with_changed_documents(batch, number)
    return Alteration(changed, kept, changed.units, places=False)


def rows_of(batch: Any, rows: list[int], size: int) -> Any:
    """A copy of a batch of `size` with these of its rows.

    Rows are those of tensors and arrays with as many, and the elements of lists with as many.
    """

    def own(x: Any) -> Any:
        if isinstance(x, Tensor) and not x.is_nested and x.ndim and x.shape[0] == size:
            index = torch.tensor(rows, dtype=torch.int64, device=x.device)
            if x.layout != torch.strided:
                chosen = x.detach().to_sparse_coo().index_select(0, index)
                return chosen.to_sparse(layout=x.layout)
            chosen = x.detach()[index]
            return with_layout_of(x, chosen) if len(rows) == size else chosen
        if isinstance(x, Tensor):
            return x.detach().clone()
        if isinstance(x, np.ndarray):
            return x[rows] if x.ndim and len(x) == size else x.copy()
        if hasattr(x, "_fields"):
            return type(x)(*(rows_of(part, rows, size) for part in x))
        if type(x) not in (list, tuple):
            return x
        if _is_of_samples(x, size):
            return type(x)(x[row] for row in rows)
        return type(x)(rows_of(part, rows, size) for part in x)

    return map_leaves(own, batch, kinds=(Tensor, np.ndarray, list, tuple))


def _is_of_samples(value: Sequence[Any], size: int) -> bool:
    """Whether a list has an element for each sample: as many of one type, and no batches."""
    is_alike = len(value) == size and len({type(part) for part in value}) == 1
    return is_alike and not is_list_of_batches(value, size)


def _has_rows(value: Any, size: int) -> bool:
    """Whether something in a batch has `size` rows, see `rows_of`."""
    for _, x in leaves_of(value, kinds=(Tensor, np.ndarray, list, tuple)):
        if isinstance(x, Tensor | np.ndarray):
            found = bool(x.ndim) and len(x) == size
        else:
            found = not hasattr(x, "_fields") and _is_of_samples(x, size)
            found = found or any(_has_rows(part, size) for part in x)
        if found:
            return True
    return False


def copied(batch: Any) -> Any:
    """A copy of a batch, which the loop may change in place."""
    if isinstance(batch, PackedBatch):
        return PackedBatch({k: x.clone() for k, x in batch.items()}, batch.units, batch.longest)
    return rows_of(batch, [], -1)


def entries_of(batch: Any, size: int) -> Iterator[tuple[str, Tensor]]:
    """(place, tensor `[U, ...]`) of the tensors that have an entry for each of `size` samples."""
    for place, x in tensors_of(batch):
        if x.layout == torch.strided and not x.is_nested and x.ndim and x.shape[0] == size:
            yield place, x


def of_one(batch: Any, before: Any | None, real: Tensor) -> Alteration:
    """A microbatch of a single sample, in place of which another one may be.

    Args:
        batch: not changed.
        before: another microbatch of the draw, which is run instead; None for the same again.
        real: `[U]`, bool: which one it is, if any.
    """
    given, kept = (copied(batch), real.clone()) if before is None else (before, real & ~real)
    units = given.units if isinstance(given, PackedBatch) else None
    return Alteration(given, kept, units, places=units is None)


def is_single(batch: Any, size: int) -> bool:
    """Whether a microbatch of `size` samples has room for one, or holds one document."""
    if not isinstance(batch, PackedBatch):
        return size == 1
    return sum(start != end for start, end in batch.units.spans) == 1


def of_samples(
    batch: Any, size: int, real: Tensor | None, units: Units | None, rng: np.random.Generator
) -> Alteration | None:
    """Gives a random half of the samples, and all padding, the contents of one of the others.

    Many copies of one sample crowd any routing. Samples that may set a scale or a weight of the
    batch, see `_telling`, are among those that others replace. The rows with most and least
    padding in a mask keep their contents: without any padding operators run other kernels, which
    round differently, and a loop may cut a batch to its longest sample.

    Args:
        batch: not changed.
        size: U, its samples with those of padding.
        real: `[U]`, bool: which are samples; None for all.
        units: the samples where they are no rows of the batch.
        rng: a secret one.

    Returns:
        None where nothing in the batch has an entry for each sample.
    """
    samples = np.arange(size) if real is None else real.nonzero().flatten().numpy()
    rare, extreme = _telling(batch, size, samples.tolist())
    filled = _filled(batch, size if units is None else len(units.index))
    least, most = (
        rows if units is None else {int(units.index[row]) for row in rows} for rows in filled
    )
    order = rng.permutation(samples).tolist()
    order.sort(key=lambda s: (s not in least, s not in most, s in rare, s in extreme))
    unchanged = order[: max(1, len(order) // 2)]
    source = torch.full((size,), unchanged[int(rng.integers(len(unchanged)))] if unchanged else 0)
    source[unchanged] = torch.tensor(unchanged, dtype=torch.int64)
    rows = source if units is None else units.order_of(source)
    if not _has_rows(batch, len(rows)):
        return None
    kept = torch.zeros(size, dtype=torch.bool)
    if len(samples) > 1:
        kept[unchanged] = True
    return Alteration(rows_of(batch, rows.tolist(), len(rows)), kept, units)


def complement(batch: Any, first: Alteration, rng: np.random.Generator) -> Alteration:
    """Gives the samples that another alteration kept the contents of one that it did not keep.

    Args:
        batch: not changed, with a row for each sample.
        first: of this batch.
        rng: of the choice.
    """
    others = (~first.kept).nonzero().flatten()
    rows = torch.arange(len(first.kept))
    rows[first.kept] = others[int(rng.integers(len(others)))]
    return Alteration(rows_of(batch, rows.tolist(), len(rows)), ~first.kept)


def _filled(batch: Any, size: int) -> tuple[set[int], set[int]]:
    """The rows with the fewest entries in a mask, and with the most; none without a mask."""
    least: set[int] = set()
    most: set[int] = set()
    for _, x in entries_of(batch, size):
        if x.ndim < 2 or not x.numel() or x.itemsize == 1 and x.is_floating_point():
            continue
        if bool(((x == 0) | (x == 1)).all()):
            entries = x.detach().reshape(size, -1).sum(1, dtype=torch.float64)
            least.add(int(entries.argmin()))
            most.add(int(entries.argmax()))
    return least, most


def _telling(batch: Any, size: int, samples: list[int]) -> tuple[set[int], set[int]]:
    """Samples with the rarest labels of a batch, and those with its largest or smallest entries.

    Neither are more than half of the samples.
    """
    rare: set[int] = set()
    extreme: set[int] = set()
    for _, x in entries_of(batch, size):
        if not samples or not x.numel() or x.is_complex():
            continue
        own = x.detach()[samples].cpu().reshape(len(samples), -1)
        own = own.double() if x.is_floating_point() else own.long()
        if x.is_floating_point():
            sizes = own.abs().amax(1)
            extreme |= {samples[int(sizes.argmax())], samples[int(sizes.argmin())]}
        elif own.shape[1] == 1:
            _, kinds, counts = own[:, 0].unique(return_inverse=True, return_counts=True)
            rare |= {samples[int(i)] for i in (kinds == counts.argmin()).nonzero()}
    most = len(samples) // 2
    return rare if len(rare) <= most else set(), extreme if len(extreme) <= most else set()
