"""PackedSampler: which documents of a draw go into which microbatch of packed rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from ..packing import PackTo
from .slots import Draws
from .tracker import BatchMark


class PackedSampler:
    """Yields the documents of each microbatch as indices of the dataset, and stores their marks.

    The longest documents of a draw are placed first, each in the first microbatch that has room
    for it; all ranks get the same number of microbatches.

    Args:
        draws: the sampler.
        dataset: of the documents, whose lengths are looked up when they are drawn first.
        collate: packs the documents of a microbatch.

    Attributes:
        marks: of the microbatches that were yielded and not taken yet, in order.
    """

    def __init__(self, draws: Draws, dataset: Any, collate: PackTo) -> None:
        self.marks: deque[BatchMark] = deque()
        self._draws = draws
        self._dataset = dataset
        self._collate = collate
        self._lengths: dict[int, int] = {}

    def __iter__(self) -> Iterator[list[int]]:
        # One queue for each epoch: an older epoch that is still open keeps its own marks.
        marks = None
        for draw, drawn in self._draws.logical_batches():
            if marks is None:
                marks = self.marks = deque()
            microbatches = self._placed(drawn)
            for part, documents in enumerate(microbatches):
                size = self._collate.max_documents
                real = torch.arange(size) < len(documents)
                last = part + 1 == len(microbatches)
                marks.append(BatchMark(draw, size, last, part, real))
                yield documents

    def _placed(self, drawn: list[int]) -> list[list[int]]:
        """The documents of each microbatch of this rank."""
        rank, ranks = self._draws.rank_part
        together = self._collate.batches([self._length(index) for index in drawn])
        filled = [[drawn[number] for number in numbers] for numbers in together]
        rounds = max(1, -(-len(filled) // ranks))
        filled += [[] for _ in range(rounds * ranks - len(filled))]
        return filled[rank::ranks]

    def _length(self, index: int) -> int:
        if index not in self._lengths:
            self._lengths[index] = self._collate.length_of(self._dataset[index])
        return self._lengths[index]
