"""UnitSlots: the rows of microbatches whose samples are units of several entries."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from ..packing import Units
from .slots import Draws, SlotSampler
from .tracker import BatchMark
from .unit_groups import UnitGroups


class UnitSlots:
    """Yields the rows of each microbatch as indices of the dataset, and stores their marks.

    A unit in slot s has the rows from s k on, where k is the most entries of a unit in a draw; it
    may have fewer, and the rest of its rows are padding.

    Args:
        draws: the sampler of units, from whose key those of slots and entries derive.
        slots: units of each microbatch of each rank.
        groups: the entries of each unit.

    Attributes:
        marks: of the microbatches that were yielded and not taken yet, in order.
    """

    def __init__(self, draws: Draws, slots: int, groups: UnitGroups) -> None:
        self.slots = slots
        self.marks: deque[BatchMark] = deque()
        self._draws = draws
        self._groups = groups
        self._placing = SlotSampler(draws, slots)

    def __iter__(self) -> Iterator[list[int]]:
        # One queue for each epoch: an older epoch that is still open keeps its own marks.
        marks = None
        for draw, drawn in self._draws.logical_batches():
            if marks is None:
                marks = self.marks = deque()
            rounds = self._placing.placed(draw, drawn)
            for part, placed in enumerate(rounds):
                rows, spans = self._rows(placed, draw)
                last = part + 1 == len(rounds)
                real = torch.from_numpy(placed >= 0)
                units = Units((len(rows),), spans)
                marks.append(BatchMark(draw, self.slots, last, part, real, units))
                yield rows

    def _rows(
        self, placed: np.ndarray, draw: int
    ) -> tuple[list[int], tuple[tuple[int, int], ...]]:
        """The entries of a microbatch, and the rows of each slot's unit."""
        most = self._groups.limit
        filled = np.flatnonzero(placed >= 0)
        drawn = placed[filled].tolist()
        entries = self._groups.selected(drawn, key=self._draws.key, draw=draw)
        # Padding repeats an entry of the same batch, which adds no other length.
        filler = int(entries[0][0]) if entries else 0
        rows = np.full(len(placed) * most, filler)
        spans = [(0, 0)] * len(placed)
        for slot, own in zip(filled.tolist(), entries, strict=True):
            rows[slot * most : slot * most + len(own)] = own
            spans[slot] = (slot * most, slot * most + len(own))
        return rows.tolist(), tuple(spans)
