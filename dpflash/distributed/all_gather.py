"""Attention over keys and values gathered from all ranks in one all-gather.

Shapes: B samples, H query heads, G key/value heads, T tokens of all ranks, P ranks, L the largest
number of tokens of one rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.kernels.tile_graph import TileGraph

from .blockwise import BlockwiseBackward, BlockwiseForward, ShardedCall
from .exchange import all_gather, reduce_scatter
from .exchange_plan import ALL_RANKS, Piece, pieces


class AllGatherCall(ShardedCall):
    """One attention call on this rank, with an all-gather of keys and values."""

    @property
    def most_rows(self) -> int:
        """See `ShardedCall.most_rows`."""
        return self.sharded.num_kv_heads * self.sharded.longest

    def forward(
        self, forward: BlockwiseForward, k: Tensor, v: Tensor, runtime: TileGraph | None
    ) -> None:
        kv = self.gather(k, v, "forward")
        forward.add(self.pieces(k.device, runtime), *kv)

    def backward(
        self,
        backward: BlockwiseBackward,
        k: Tensor,
        v: Tensor,
        runtime: TileGraph | None,
        needs_dkv: bool,
    ) -> Sequence[Tensor] | None:
        kv = self.gather(k, v, "backward")
        dkv = backward.add(self.pieces(k.device, runtime), *kv)
        return self.scatter_sum(torch.stack(dkv)).unbind(0) if needs_dkv else None

    def pieces(self, device: torch.device, runtime: TileGraph | None) -> tuple[Piece, ...]:
        """Return the (queries, keys) pieces that this rank computes."""
        return pieces(self.sharded, self.rank, ALL_RANKS, device, self.by_chunk, runtime)

    def gather(self, k: Tensor, v: Tensor, phase: str) -> Tensor:
        """Return k and v of all ranks, `[2, B, G, T, D]`, in the order of the sequence."""
        own = F.pad(torch.stack((k, v)), (0, 0, 0, self.sharded.longest - k.shape[2]))
        shards = all_gather(own, self.group, "keys and values of all ranks", phase)
        return self.sharded.layout.joined(shards, 3, self.sharded.length)

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """Sum `[2, B, G, T, D]` over the ranks; return this rank's tokens `[2, B, G, T_p, D]`."""
        shape = (self.sharded.layout.world_size, *whole.shape[:3], self.sharded.longest)
        shards = whole.new_zeros((*shape, whole.shape[4]))
        for rank, chunk in self.sharded.layout.in_order(self.sharded.length):
            local = slice(chunk.local, chunk.local + chunk.length)
            shards[rank][:, :, :, local] = whole[:, :, :, chunk.start : chunk.start + chunk.length]
        operation = "gradients of keys and values"
        summed = reduce_scatter(shards, self.group, operation, "backward")
        return summed[:, :, :, : self.sharded.tokens(self.rank)]
