"""PackedSampler: which documents of a draw go into which microbatch of packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..packing import PackTo, Units
from ..privacy.seeds import seed_reading
from ..refusal import PrivateRefusal
from .entries import Collated
from .slots import Draws, SlotSampler
from .unit_groups import UnitGroups

_FIRST = 7  # entries that are looked at before the first batch


class DocumentsOf(Dataset[list[Any]]):
    """The documents of samples that have several.

    Args:
        dataset: of single documents.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, indices: tuple[int, ...]) -> list[Any]:
        return [self._dataset[index] for index in indices]

    def __getitems__(self, samples: list[tuple[int, ...]]) -> list[list[Any]]:
        seed_reading(samples)
        return [self[indices] for indices in samples]


class PackedCollate:
    """Packs the samples of a microbatch, and names those that are no documents."""

    def __init__(self, pack: PackTo) -> None:
        self.pack = pack

    def __call__(self, samples: list[Any]) -> Collated:
        read = [self.pack.read(sample) for sample in samples]
        return Collated(self.pack.packed(read), [i for i, parts in enumerate(read) if not parts])


class PackedSampler(SlotSampler):
    """A `SlotSampler` of documents, whose slots are those of packed rows.

    `PackTo.microbatches` places them; all ranks get the same number of microbatches.

    Args:
        draws: the sampler, whose key also chooses documents of units.
        dataset: of the documents, whose lengths are looked up when they are drawn first. Most of
            the first ones must be documents.
        collate: packs the samples of a microbatch.
        groups: the documents of each unit, where units are drawn. The sampler then yields tuples
            of indices; documents for which a microbatch has no room are left out of a unit.
    """

    def __init__(
        self, draws: Draws, dataset: Any, collate: PackTo, groups: UnitGroups | None
    ) -> None:
        super().__init__(draws, collate.max_documents)
        self._dataset = dataset
        self._collate = collate
        self._groups = groups
        self._lengths: dict[int, int] = {}

    def __iter__(self) -> Iterator[list[Any]]:
        first = [self._dataset[i] for i in range(min(_FIRST, len(self._dataset)))]
        if 2 * sum(not self._collate.read(entry) for entry in first) > len(first):
            raise PrivateRefusal(
                "entries of the dataset are no documents for PackTo: expected 1-D tensors or "
                "lists of token ids, or mappings with these as 'input_ids' (and 'labels' of the "
                "same length); convert them in the dataset"
            ) from None
        yield from super().__iter__()

    def _rows(self, placed: Any, draw: int) -> tuple[list[Any], Tensor, Units | None]:
        rows = placed if self._groups is not None else [index for (index,) in placed]
        return rows, torch.arange(self.slots) < len(placed), None

    def _samples(self, draw: int, drawn: list[int]) -> list[tuple[int, ...]]:
        """The documents of each drawn sample."""
        if self._groups is None:
            return [(index,) for index in drawn]
        samples = []
        for documents in self._groups.selected(drawn, key=self._draws.key, draw=draw):
            fitting: list[int] = []
            left = self._collate.tokens
            for index in documents.tolist():
                if self._length(index) <= left:
                    fitting.append(index)
                    left -= self._length(index)
            samples.append(tuple(fitting))
        return samples

    def placed(self, draw: int, drawn: list[int]) -> Any:
        """The samples of each microbatch of this rank."""
        samples = self._samples(draw, drawn)
        rank, ranks = self._draws.rank_part
        lengths = [sum(map(self._length, sample)) for sample in samples]
        filled = [[samples[i] for i in own] for own in self._collate.microbatches(lengths)]
        rounds = max(1, -(-len(filled) // ranks))
        filled += [[] for _ in range(rounds * ranks - len(filled))]
        return filled[rank::ranks]

    def _length(self, index: int) -> int:
        if index not in self._lengths:
            self._lengths[index] = self._collate.length_of(self._dataset[index])
        return self._lengths[index]
