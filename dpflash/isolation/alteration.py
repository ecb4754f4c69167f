"""Alteration: a microbatch in which some samples have other contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import PackedBatch, Units
from ..verification.forward_rows import is_list_of_batches, with_layout_of
from ..verification.nested import leaves_of, map_leaves, tensors_of
from .documents import with_changed_documents


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
        if isinstance(x, Tensor) and x.ndim and x.shape[0] == size:
            chosen = x.detach()[torch.tensor(rows, dtype=torch.int64).to(x.device)]
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
    return rows_of(batch, [], -1)


def of_one(batch: Any, before: Any | None, real: Tensor | None) -> Alteration:
    """A microbatch of a single sample, in place of which another one may be.

    Args:
        batch: not changed.
        before: another microbatch of the draw, which is run instead; None for the same again.
        real: `[1]`, bool: whether it is a sample; None for yes.
    """
    if before is not None:
        return Alteration(before, torch.zeros(1, dtype=torch.bool))
    kept = torch.ones(1, dtype=torch.bool) if real is None else real.clone()
    return Alteration(copied(batch), kept)


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
    last = _telling(batch, size, samples.tolist())
    least, most = (set(), set()) if units is not None else _filled(batch, size)
    order = rng.permutation(samples).tolist()
    order.sort(key=lambda s: (s not in least, s not in most, s in last))
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


def _filled(batch: Any, size: int) -> tuple[set[int], set[int]]:
    """The rows with the fewest entries in a mask, and with the most; none without a mask."""
    least: set[int] = set()
    most: set[int] = set()
    for _, x in tensors_of(batch):
        if x.ndim < 2 or x.shape[0] != size or not x.numel():
            continue
        if bool(((x == 0) | (x == 1)).all()):
            entries = x.detach().reshape(size, -1).sum(1, dtype=torch.float64)
            least.add(int(entries.argmin()))
            most.add(int(entries.argmax()))
    return least, most


def _telling(batch: Any, size: int, samples: list[int]) -> set[int]:
    """Samples with the largest or smallest entries of a batch, or with its rarest labels."""
    found: set[int] = set()
    for _, x in tensors_of(batch):
        if not samples or x.ndim == 0 or x.shape[0] != size or not x.numel() or x.is_complex():
            continue
        own = x.detach()[samples].cpu().reshape(len(samples), -1)
        if x.is_floating_point():
            sizes = own.abs().amax(1)
            found |= {samples[int(sizes.argmax())], samples[int(sizes.argmin())]}
        elif own.shape[1] == 1:
            _, kinds, counts = own[:, 0].unique(return_inverse=True, return_counts=True)
            found |= {samples[int(i)] for i in (kinds == counts.argmin()).nonzero()}
    return found if len(found) <= len(samples) // 2 else set()
