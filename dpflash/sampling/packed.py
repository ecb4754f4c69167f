"""PackedSampler: divides the documents of a logical batch into microbatches of packed rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..packing import PackTo, Units
from ..privacy.seeds import seed_of, seed_reading
from ..random_state import random_state_kept, seed_generators
from ..refusal import PrivateRefusal
from .entries import Collated
from .slots import Draws, SlotSampler
from .unit_groups import UnitGroups

_FIRST = 7  # number of entries that are checked before the first batch


class DocumentsOf(Dataset[tuple[Any, int]]):
    """Reads the samples that `PackedSampler` yields: (index, number of tokens reserved for it).

    Args:
        dataset: dataset of single documents.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, placed: tuple[Any, int]) -> tuple[Any, int]:
        sample, room = placed
        if isinstance(sample, tuple):
            return [self._dataset[index] for index in sample], room
        return self._dataset[sample], room

    def __getitems__(self, samples: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
        seed_reading(samples)
        return [self[placed] for placed in samples]


class PackedCollate:
    """Packs the samples of a microbatch; samples that are not documents are bad rows."""

    def __init__(self, pack: PackTo) -> None:
        self.pack = pack

    def __call__(self, samples: list[Any]) -> Collated:
        return self.placed([(sample, self.pack.length_of(sample)) for sample in samples])

    def placed(self, samples: list[tuple[Any, int]]) -> Collated:
        """Pack samples of `DocumentsOf`, each truncated to the tokens reserved for it."""
        read = [self.pack.read(sample, room) for sample, room in samples]
        batch = self.pack.packed(read, [room for _, room in samples])
        return Collated(batch, [i for i, parts in enumerate(read) if not parts])


class PackedSampler(SlotSampler):
    """A `SlotSampler` of documents, which `PackTo.microbatches` divides into microbatches.

    All ranks get the same number of microbatches. Yields one list for each microbatch, with the
    pair (index, length) of each sample, or (tuple of indices, length) if units are sampled.

    Args:
        draws: the sampler, whose key also determines the choice of a unit's documents.
        dataset: dataset of documents. Most of its first entries must be documents. The length of a
            document is read when it is first sampled. A longer document from a later read is
            truncated to that length, so that no other document moves.
        collate: packs the samples of a microbatch.
        groups: the documents of each unit, if units are sampled. Documents of a unit that do not
            fit into a microbatch are left out.
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
                "entries of the dataset are not documents for PackTo: expected 1-D tensors or "
                "lists of token ids, or mappings with these as 'input_ids' (and 'labels' of the "
                "same length); convert the entries in the dataset"
            ) from None
        yield from super().__iter__()

    def _rows(self, placed: Any, draw: int) -> tuple[list[Any], Tensor, Units | None]:
        rows = [
            (sample if self._groups is not None else sample[0], sum(map(self._length, sample)))
            for sample in placed
        ]
        return rows, torch.arange(self.slots) < len(placed), None

    def _samples(self, draw: int, drawn: list[int]) -> list[tuple[int, ...]]:
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
        """Return the samples of each microbatch of this rank."""
        samples = self._samples(draw, drawn)
        rank, ranks = self._draws.rank_part
        lengths = [sum(map(self._length, sample)) for sample in samples]
        filled = [[samples[i] for i in own] for own in self._collate.microbatches(lengths)]
        rounds = max(1, -(-len(filled) // ranks))
        filled += [[] for _ in range(rounds * ranks - len(filled))]
        return filled[rank::ranks]

    def _length(self, index: int) -> int:
        if index not in self._lengths:
            with random_state_kept():
                # Seed, so that a random length is the same on all ranks.
                seed_generators(seed_of(self._draws.key, f"length-{index}"))
                self._lengths[index] = self._collate.length_of(self._dataset[index])
        return self._lengths[index]
