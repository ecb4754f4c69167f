"""ReplacedLabels: which labels trials have replaced, since a rare one may weight the whole batch.

A mean with class weights couples samples only where a batch has several classes. So a microbatch
with a class that no trial has replaced is tried when it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .alteration import entries_of

# Integers of more kinds are numbers, not classes.
_MOST = 64
# A label is known after so many trials, or after one that replaced it.
_ENOUGH = 3


class ReplacedLabels:
    """How often labels, integers of which each sample has one, took part in trials."""

    def __init__(self) -> None:
        self._trials: dict[str, Counter[int]] = {}

    def has_new(self, batch: Any, real: Tensor) -> bool:
        """Whether the samples `real` `[U]` of a batch have a label that no trial replaced."""
        for place, x in _labels(batch, len(real)):
            own, trials = set(x[real].tolist()), self._trials.get(place, Counter())
            # Where all samples have one label, a trial would replace it by itself.
            if len(own) > 1 and len(trials) < _MOST and any(trials[v] < _ENOUGH for v in own):
                return True
        return False

    def note(self, batch: Any, kept: Tensor, real: Tensor) -> None:
        """Record the labels of a microbatch that is tried.

        Args:
            batch: as it was.
            kept: `[U]`, bool: samples that are not replaced.
            real: `[U]`, bool: samples that are not padding.
        """
        for place, x in _labels(batch, len(kept)):
            trials = self._trials.setdefault(place, Counter())
            trials.update(dict.fromkeys(x[real].tolist(), 1))
            trials.update(dict.fromkeys(x[real & ~kept].tolist(), _ENOUGH))


def _labels(batch: Any, size: int) -> Iterator[tuple[str, Tensor]]:
    for place, x in entries_of(batch, size):
        is_whole = not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
        if is_whole and x.numel() == size:
            yield place, x.detach().cpu().flatten()
