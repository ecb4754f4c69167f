"""Which tokens of a sequence each worker has.

Letters: T tokens, P workers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dpflash import _validate
from dpflash.kernels.tile_shard import Chunk

SHARDINGS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Layout:
    """T tokens cut into ranges, dealt to P workers.

    "contiguous": P ranges, worker p has range p. "zigzag": 2P ranges, worker p has the ranges p
    and 2P - 1 - p, which gives all workers the same work where queries see all earlier keys. Sizes
    of ranges differ by at most one token, the longer ones first, and so do workers' shares.

    Args:
        num_tokens: T, at least P; P need not divide it.
        world_size: P.
        sharding: "contiguous" or "zigzag".

    Raises:
        ValueError: an unknown sharding, or fewer tokens than workers.
    """

    num_tokens: int
    world_size: int
    sharding: str = "contiguous"

    def __post_init__(self) -> None:
        _validate.one_of(sharding=(self.sharding, SHARDINGS))
        _validate.positive_int(world_size=self.world_size)
        if self.num_tokens < self.world_size:
            raise ValueError(
                f"num_tokens={self.num_tokens} over {self.world_size} workers: expected at least "
                "one token for each; use a smaller context group or a longer sequence"
            )

    def chunks(self, rank: int, length: int | None = None) -> tuple[Chunk, ...]:
        """The ranges of a worker in its local order, without empty ones; neighbours are merged.

        Args:
            rank: the worker.
            length: leave out positions from this one on.
        """
        return _chunks(self, rank, self.num_tokens if length is None else length)

    def local_length(self, rank: int, length: int | None = None) -> int:
        """How many tokens a worker has; with `length`, those before that position.

        They are the first ones in local order.
        """
        return sum(chunk.length for chunk in self.chunks(rank, length))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """`[T_p]`, int64: the position in the sequence of each of a worker's tokens."""
        parts = [
            torch.arange(chunk.start, chunk.start + chunk.length, device=device)
            for chunk in self.chunks(rank)
        ]
        return torch.cat(parts)

    def in_order(self, length: int | None = None) -> list[tuple[int, Chunk]]:
        """All workers' chunks, each with its worker, by their start in the sequence."""
        owned = [
            (rank, chunk) for rank in range(self.world_size) for chunk in self.chunks(rank, length)
        ]
        return sorted(owned, key=lambda pair: pair[1].start)


@functools.lru_cache(maxsize=4096)
def _chunks(layout: Layout, rank: int, length: int) -> tuple[Chunk, ...]:
    pieces = layout.world_size
    numbers = [rank]
    if layout.sharding == "zigzag":
        pieces *= 2
        numbers.append(pieces - 1 - rank)
    size, longer = divmod(layout.num_tokens, pieces)
    chunks: list[Chunk] = []
    local = 0
    for number in numbers:
        start = number * size + min(number, longer)
        end = min(start + size + (number < longer), length)
        if end <= start:
            continue
        if chunks and chunks[-1].start + chunks[-1].length == start:
            chunks[-1] = chunks[-1]._replace(length=end - chunks[-1].start)
        else:
            chunks.append(Chunk(start, end - start, local))
        local += end - start
    return tuple(chunks)
