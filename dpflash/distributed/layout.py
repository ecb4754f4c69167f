"""Layout: which of a sequence's T tokens each of P ranks holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpflash import _validate
from dpflash.kernels.tile_shard import Chunk

SHARDINGS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class Layout:
    """T tokens that are split into ranges and distributed over P ranks.

    "contiguous": there are P ranges, and rank p holds range p. "zigzag": there are 2P ranges, and
    rank p holds ranges p and 2P - 1 - p, which balances the work of causal attention. The
    sizes of ranges, and of ranks' parts, differ by at most 1; the longer ranges come first.

    Args:
        num_tokens: T, at least P; P need not divide it.
        world_size: P.
        sharding: "contiguous" or "zigzag".
        rows: number of equally long rows in the sequence; each row is split separately.

    Raises:
        ValueError: an unknown sharding, or fewer tokens than ranks.
    """

    num_tokens: int
    world_size: int
    sharding: str = "contiguous"
    rows: int = 1

    def __post_init__(self) -> None:
        _validate.one_of(sharding=(self.sharding, SHARDINGS))
        _validate.positive_int(world_size=self.world_size)
        if self.num_tokens // self.rows < self.world_size:
            raise ValueError(
                f"num_tokens={self.num_tokens} over {self.world_size} ranks: expected at least "
                "one token per rank; use a smaller context group or a longer sequence"
            )

    def chunks(self, rank: int, length: int | None = None) -> tuple[Chunk, ...]:
        """Return the ranges of a rank's tokens before `length`; adjacent ranges are merged."""
        return _chunks(self, rank, self.num_tokens if length is None else length)

    def local_length(self, rank: int, length: int | None = None) -> int:
        """Return the number of a rank's tokens, by default of all tokens.

        With `length`, only tokens before this position count; they come first in local order.
        """
        return sum(chunk.length for chunk in self.chunks(rank, length))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the position in the sequence of each token of a rank, `[T_p]`, int64."""
        ranges = [(c.start, c.start + c.length) for c in self.chunks(rank)]
        return torch.cat([torch.arange(*ends, device=device) for ends in ranges])

    def in_order(self, length: int | None = None) -> list[tuple[int, Chunk]]:
        """Return (rank, chunk) for the chunks of all ranks, in the order of the sequence."""
        owned = [
            (rank, chunk) for rank in range(self.world_size) for chunk in self.chunks(rank, length)
        ]
        return sorted(owned, key=lambda pair: pair[1].start)

    def joined(self, shards: Tensor | Sequence[Tensor], dim: int, length: int) -> Tensor:
        """Join the shards of all ranks along `dim`, with tokens in the order of the sequence."""
        chunks = [shards[r].narrow(dim, c.local, c.length) for r, c in self.in_order(length)]
        return torch.cat(chunks, dim)


@functools.lru_cache(maxsize=4096)
def _chunks(layout: Layout, rank: int, length: int) -> tuple[Chunk, ...]:
    if layout.rows > 1:
        width, chunks = layout.num_tokens // layout.rows, list[Chunk]()
        row = Layout(width, layout.world_size, layout.sharding)
        for number in range(layout.rows):
            start, local = number * width, number * row.local_length(rank)
            chunks += [Chunk(c.start + start, c.length, c.local + local) for c in row.chunks(rank)]
        return tuple(chunks)
    num_ranges = layout.world_size
    indices = [rank]
    if layout.sharding == "zigzag":
        num_ranges *= 2
        indices.append(num_ranges - 1 - rank)
    size, longer = divmod(layout.num_tokens, num_ranges)
    chunks = []
    local = 0
    for index in indices:
        start = index * size + min(index, longer)
        end = min(start + size + (index < longer), length)
        if end <= start:
            continue
        if chunks and chunks[-1].start + chunks[-1].length == start:
            chunks[-1] = chunks[-1]._replace(length=end - chunks[-1].start)
        else:
            chunks.append(Chunk(start, end - start, local))
        local += end - start
    return tuple(chunks)
