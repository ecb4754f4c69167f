"""ReplacedLabels: counts how often isolation tests (trials) replaced and kept each label.

A rare label may change the weights of all losses: a mean with class weights couples samples if a
batch has several classes. A microbatch is tried until trials have replaced and kept each class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..packing import Units
from .rows import entries_of, sample_of_rows

# Integers with more distinct values are assumed to be numbers, not classes.
_MOST = 64
# A label is known after this many trials, or once trials have both replaced and kept it.
_ENOUGH = 6


class ReplacedLabels:
    """Counts the trials of each label; labels are integers, one for each row."""

    def __init__(self) -> None:
        # Keys: (path of the labels in the batch, "tried", "replaced" or "kept").
        self._trials: dict[tuple[str, str], Counter[int]] = {}

    def has_new(self, batch: Any, real: Tensor, units: Units | None) -> bool:
        """Return whether a label of the samples `real` `[U]` needs more trials, see `_ENOUGH`."""
        for place, x in _labels(batch, real, units):
            own, (tried, *ways) = set(x), self._of(place)
            # Only with several labels: if all samples have one label, a trial changes no label.
            if len(own) > 1 and len(tried) < _MOST:
                if any(tried[v] < _ENOUGH and not all(way[v] for way in ways) for v in own):
                    return True
        return False

    def note(self, batch: Any, kept: Tensor, real: Tensor, units: Units | None) -> None:
        """Record the labels of a microbatch on which a trial runs.

        Args:
            batch: the unaltered microbatch.
            kept: `[U]`, bool: samples that are not replaced.
            real: `[U]`, bool: samples that are not padding.
            units: the samples if they are not single rows of the batch, else None.
        """
        if not bool(kept.any()):
            return  # Nothing is compared.
        parts = [dict(_labels(batch, own, units)) for own in (real, real & ~kept, kept)]
        for place, x in parts[0].items():
            if len(set(x)) > 1:
                for count, part in zip(self._of(place), parts, strict=True):
                    count.update(set(part[place]))

    def _of(self, place: str) -> list[Counter[int]]:
        """Return for the labels at `place` how often each was tried, replaced and kept."""
        names = ("tried", "replaced", "kept")
        return [self._trials.setdefault((place, name), Counter()) for name in names]


def _labels(batch: Any, included: Tensor, units: Units | None) -> Iterator[tuple[str, list[int]]]:
    """Yield (path, labels of the rows of the samples `included` `[U]`)."""
    sample_of = sample_of_rows(len(included), units)
    rows = torch.isin(sample_of, included.nonzero())
    for place, x in entries_of(batch, len(rows)):
        is_whole = not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
        if is_whole and 0 < x.numel() == len(rows):
            yield place, x.detach().cpu()[rows].flatten().tolist()
