"""UnitSlots: assigns units of several entries to the rows of microbatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import Units
from .slots import Draws, SlotSampler
from .unit_groups import UnitGroups


class UnitSlots(SlotSampler):
    """A `SlotSampler` whose samples are units.

    The unit in slot s has rows s * k to (s + 1) * k - 1 of the microbatch, where k is the largest
    number of entries of a unit. If the unit has fewer entries, its other rows are padding.

    Args:
        draws: the sampler of units; the keys of slots and entries are derived from its key.
        slots: largest number of units in each microbatch on each rank.
        groups: the entries of each unit.
    """

    def __init__(self, draws: Draws, slots: int, groups: UnitGroups) -> None:
        super().__init__(draws, slots)
        self._groups = groups

    def _rows(self, placed: Any, draw: int) -> tuple[list[Any], Tensor, Units | None]:
        most = self._groups.limit
        filled = np.flatnonzero(placed >= 0)
        drawn = placed[filled].tolist()
        entries = self._groups.selected(drawn, key=self._draws.key, draw=draw)
        # Padding repeats an entry of the same batch, so that it adds no new length.
        filler = int(entries[0][0]) if entries else 0
        rows = np.full(len(placed) * most, filler)
        spans = [(0, 0)] * len(placed)
        for slot, own in zip(filled.tolist(), entries, strict=True):
            rows[slot * most : slot * most + len(own)] = own
            spans[slot] = (slot * most, slot * most + len(own))
        units = Units((len(rows),), tuple(spans))
        return rows.tolist(), torch.from_numpy(placed >= 0), units
