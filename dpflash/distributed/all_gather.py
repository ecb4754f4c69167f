"""Attention over keys and values gathered from all ranks in one all-gather.

Shapes: B samples, H query heads, G key/value heads, T tokens of all ranks, P ranks, L the largest
number of tokens of one rank, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed.collectives import rank_in
from dpflash.kernels.tile_graph import TileGraph

from ..verification.second_order import differentiable_once
from .blockwise import BlockChoice, BlockwiseBackward, BlockwiseForward
from .exchange import all_gather, reduce_scatter
from .exchange_plan import ALL_RANKS, Piece, ShardedPattern, pieces


@dataclass(frozen=True, eq=False)
class AllGatherCall:
    """One call on this rank. The attributes are those of `Ring`."""

    sharded: ShardedPattern
    group: ProcessGroup
    scale: float
    by_chunk: bool

    def pieces(self, device: torch.device, runtime: TileGraph | None) -> tuple[Piece, ...]:
        """The (queries, keys) pieces that this rank computes."""
        rank = rank_in(self.group)
        return pieces(self.sharded, rank, ALL_RANKS, device, self.by_chunk, runtime)

    def gather(self, k: Tensor, v: Tensor, phase: str) -> Tensor:
        """`[2, B, G, T, D]`: k and v of all ranks, in the order of the sequence."""
        own = F.pad(torch.stack((k, v)), (0, 0, 0, self.sharded.longest - k.shape[2]))
        shards = all_gather(own, self.group, "keys and values of all ranks", phase)
        chunks = [
            shards[rank][:, :, :, chunk.local : chunk.local + chunk.length]
            for rank, chunk in self.sharded.layout.in_order(self.sharded.length)
        ]
        return torch.cat(chunks, dim=3)

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This rank's tokens `[2, B, G, T_p, D]` of the sum over ranks of `[2, B, G, T, D]`."""
        shape = (self.sharded.layout.world_size, *whole.shape[:3], self.sharded.longest)
        shards = whole.new_zeros((*shape, whole.shape[4]))
        for rank, chunk in self.sharded.layout.in_order(self.sharded.length):
            local = slice(chunk.local, chunk.local + chunk.length)
            shards[rank][:, :, :, local] = whole[:, :, :, chunk.start : chunk.start + chunk.length]
        operation = "gradients of keys and values"
        summed = reduce_scatter(shards, self.group, operation, "backward")
        return summed[:, :, :, : self.sharded.tokens(rank_in(self.group))]


class GatheredAttention(torch.autograd.Function):
    """``(o, lse)`` of this rank's queries over the keys of all ranks.

    Saves q, k, v, o and lse of this rank only; the backward gathers keys and values again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        blocks: Tensor | None,
        gates: Tensor | None,
        call: AllGatherCall,
    ) -> tuple[Tensor, Tensor]:
        runtime = BlockChoice.graph_of(blocks, gates, call.sharded)
        keys, values = call.gather(k, v, "forward")
        forward = BlockwiseForward(q, sinks, slopes, call.scale)
        forward.add(call.pieces(q.device, runtime), keys, values)
        o, lse = forward.o, forward.lse
        ctx.save_for_backward(q, k, v, forward.o_to_save(o), lse, sinks, slopes, blocks, gates)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call: AllGatherCall = ctx.call
        # Read only once: activation checkpointing returns saved tensors a single time.
        saved = ctx.saved_tensors
        _, k, v, *_ = saved
        backward = BlockwiseBackward(saved, do, dlse, call.scale)
        runtime = backward.runtime_graph(call.sharded)
        kv = call.gather(k, v, "backward")
        dkv = backward.add(call.pieces(k.device, runtime), *kv)
        own = None
        if any(ctx.needs_input_grad[1:3]):
            own = call.scatter_sum(torch.stack(dkv)).unbind(0)
        return *backward.results(own, k, v), None
