"""Alteration: a microbatch in which some samples have been replaced, changed or left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import PackedBatch, Units
from .copies import copied
from .documents import with_changed_documents
from .rows import entries_of, exchanged, mask_sums, rows_of, sample_of_rows


@dataclass(frozen=True, eq=False)
class Alteration:
    """A microbatch in which some samples have been replaced, changed or left out.

    Attributes:
        batch: the altered microbatch, as the loop receives it.
        kept: `[U]`, bool, on the CPU: samples with kept contents, whose results must not change.
        units: the samples of `batch` if they are not single rows, else None.
    """

    batch: Any
    kept: Tensor
    units: Units | None = None

    @property
    def is_packed(self) -> bool:
        """Whether samples are documents of a packed batch."""
        return self.units is not None and not self.units.are_rows


def of_documents(batch: PackedBatch, number: int) -> Alteration:
    """Leave out some documents and change the tokens of others; see `with_changed_documents`."""
    changed, kept = with_changed_documents(batch, number)
    return Alteration(changed, kept, changed.units)


def of_one(batch: Any, before: Any | None, real: Tensor) -> Alteration:
    """Return the microbatch to run before a single-sample `batch`: `before`, or a copy.

    Args:
        batch: the microbatch, which is not changed.
        before: another microbatch of the logical batch; None to run a copy of `batch`.
        real: `[U]`, bool: True for the sample, False for padding.
    """
    given, kept = (copied(batch), real.clone()) if before is None else (before, real & ~real)
    units = given.units if isinstance(given, PackedBatch) else None
    return Alteration(given, kept, units)


def is_single(batch: Any, size: int) -> bool:
    """Return whether a microbatch of `size` samples has a single row or document."""
    if not isinstance(batch, PackedBatch):
        return size == 1
    return sum(start != end for start, end in batch.units.spans) == 1


def of_samples(
    batch: Any, size: int, real: Tensor | None, units: Units | None, rng: np.random.Generator
) -> Alteration | None:
    """Give some samples the contents of another sample, see `sources`.

    Args:
        batch: the microbatch, which is not changed.
        size: U, the number of samples including padding.
        real: `[U]`, bool: which samples are not padding; None if there is no padding.
        units: the samples if they are not single rows of the batch, else None.
        rng: a secret generator.

    Returns:
        The altered microbatch, or None if no part of the batch has an entry for each sample.
    """
    source = sources(batch, size, real, units, rng)
    rows = source if units is None else units.order_of(source)
    altered, has_rows = exchanged(batch, rows.tolist(), len(rows), units=units)
    return Alteration(altered, kept_by(source, real), units) if has_rows else None


def sources(
    batch: Any,
    size: int,
    real: Tensor | None,
    units: Units | None,
    rng: np.random.Generator,
    telling: Collection[int] = (),
) -> Tensor:
    """Return, for each sample, the sample whose contents it receives: `[U]`, int64.

    All padding and a random half of the samples receive the contents of one sample. If experts
    have a capacity, so many equal samples exceed it.
    - Samples that may determine a scale or a weight of the batch, see `_telling`, are replaced
      first. In half of the cases the copied sample has the rarest label.
    - If there are four samples or more, the samples with the most and the least padding in a mask
      are kept. Otherwise operators could run other kernels, which round differently, or the loop
      could cut the batch to another length.

    Args:
        batch, size, real, units, rng: see `of_samples`.
        telling: more samples to replace first.
    """
    samples = np.arange(size) if real is None else real.nonzero().flatten().numpy()
    sample_of = sample_of_rows(size, units)
    rows = np.isin(sample_of, samples).nonzero()[0].tolist()
    rare, extreme, least, most = (
        {int(sample_of[row]) for row in found}
        for found in (
            *_telling(batch, len(sample_of), rows),
            *_filled(batch, len(sample_of), rows),
        )
    )
    rare, extreme = (x if 2 * len(x) <= len(samples) else set() for x in (rare, extreme))
    extreme |= set(telling)
    order = rng.permutation(samples).tolist()
    # If a class's weight depends on its own count, only losses of the class itself change.
    copies_rare = len(least | most) < len(order) // 2 and bool(rng.integers(2))
    first = next((s for s in order if copies_rare and s in rare), None)
    order.sort(key=lambda s: (s != first, s not in least, s not in most, s in rare, s in extreme))
    unchanged = order[: max(1, len(order) // 2)]
    drawn = int(rng.integers(max(1, len(unchanged)))) if first is None else 0
    source = torch.full((size,), unchanged[drawn] if unchanged else 0)
    source[unchanged] = torch.tensor(unchanged, dtype=torch.int64)
    return source


def kept_by(source: Tensor, real: Tensor | None) -> Tensor:
    """Return which real samples keep their contents, `[U]`, bool; none if there is only one."""
    own = source == torch.arange(len(source))
    real = torch.ones_like(own) if real is None else real
    return own & real & (real.sum() > 1)


def complement(batch: Any, first: Alteration, rng: np.random.Generator) -> Alteration:
    """Overwrite the samples that `first` left unchanged with one of the other samples.

    Args:
        batch: the microbatch, which is not changed, with one row per sample.
        first: an alteration of this batch.
        rng: the generator that chooses the sample.
    """
    others = (~first.kept).nonzero().flatten()
    rows = torch.arange(len(first.kept))
    rows[first.kept] = others[int(rng.integers(len(others)))]
    return Alteration(rows_of(batch, rows.tolist(), len(rows)), ~first.kept)


def _filled(batch: Any, size: int, rows: list[int]) -> tuple[set[int], set[int]]:
    """Return the rows with the least and the greatest sum of each mask whose row sums differ."""
    sums = [own[rows] for own in mask_sums(batch, size) if rows]
    sums = [own for own in sums if bool((own != own[0]).any())]
    return {rows[int(own.argmin())] for own in sums}, {rows[int(own.argmax())] for own in sums}


def _telling(batch: Any, size: int, rows: list[int]) -> tuple[set[int], set[int]]:
    """Return (rows with the rarest label, rows whose largest |entry| is greatest or least)."""
    rare: set[int] = set()
    extreme: set[int] = set()
    for _, x in entries_of(batch, size):
        if not rows or not x.numel() or x.is_complex():
            continue
        own = x.detach()[rows].cpu().reshape(len(rows), -1)
        own = own.double() if x.is_floating_point() else own.long()
        if x.is_floating_point():
            sizes = own.abs().amax(1)
            extreme |= {rows[int(sizes.argmax())], rows[int(sizes.argmin())]}
        elif own.shape[1] == 1:
            _, kinds, counts = own[:, 0].unique(return_inverse=True, return_counts=True)
            rare |= {rows[int(i)] for i in (kinds == counts.argmin()).nonzero()}
    return rare, extreme
