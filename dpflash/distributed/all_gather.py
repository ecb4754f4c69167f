"""Attention to keys and values gathered from all workers at once.

Letters: B samples, H query heads, G key/value heads, T tokens of all workers, P workers, L the
most tokens of one worker, D head dim.
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

from .blockwise import Attending, Differentiating
from .chosen import Choice
from .exchange_plan import Piece, Spread, pieces
from .once import differentiable_once
from .wire import all_gather, reduce_scatter

_ALL = -1


@dataclass(frozen=True, eq=False)
class Gathering:
    """One call; attributes as those of `Ring`."""

    spread: Spread
    group: ProcessGroup
    scale: float
    by_chunk: bool

    def pieces(self, device: torch.device, runtime: TileGraph | None) -> tuple[Piece, ...]:
        """What this worker computes."""
        rank = rank_in(self.group)
        return pieces(self.spread, rank, _ALL, device, self.by_chunk, runtime)

    def gather(self, k: Tensor, v: Tensor, phase: str) -> Tensor:
        """`[2, B, G, T, D]`: k and v of all workers, in the order of the sequence."""
        own = F.pad(torch.stack((k, v)), (0, 0, 0, self.spread.longest - k.shape[2]))
        shards = all_gather(own, self.group, "keys and values of all workers", phase)
        parts = [
            shards[rank][:, :, :, chunk.local : chunk.local + chunk.length]
            for rank, chunk in self.spread.layout.in_order(self.spread.length)
        ]
        return torch.cat(parts, dim=3)

    def scatter_sum(self, whole: Tensor) -> Tensor:
        """This worker's part `[2, B, G, T_p, D]` of the sum over workers of `[2, B, G, T, D]`."""
        shape = (self.spread.layout.world_size, *whole.shape[:3], self.spread.longest)
        shards = whole.new_zeros((*shape, whole.shape[4]))
        for rank, chunk in self.spread.layout.in_order(self.spread.length):
            local = slice(chunk.local, chunk.local + chunk.length)
            shards[rank][:, :, :, local] = whole[:, :, :, chunk.start : chunk.start + chunk.length]
        what = "gradients of keys and values"
        summed = reduce_scatter(shards, self.group, what, "backward")
        return summed[:, :, :, : self.spread.tokens(rank_in(self.group))]


class GatheredAttention(torch.autograd.Function):
    """``(o, lse)`` of this worker's queries; keys and values are gathered in each pass anew.

    Keeps q, k, v, o and lse of this worker alone.
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
        call: Gathering,
    ) -> tuple[Tensor, Tensor]:
        runtime = Choice.graph_of(blocks, gates, call.spread)
        keys, values = call.gather(k, v, "forward")
        attending = Attending(q, sinks, slopes, call.scale)
        attending.add(call.pieces(q.device, runtime), keys, values)
        o, lse = attending.o, attending.lse
        ctx.save_for_backward(q, k, v, o, lse, sinks, slopes, blocks, gates)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call: Gathering = ctx.call
        # Once: activation checkpointing hands them out a single time.
        saved = ctx.saved_tensors
        _, k, v, *_ = saved
        differentiating = Differentiating(saved, do, dlse, call.scale)
        runtime = differentiating.runtime_graph(call.spread)
        kv = call.gather(k, v, "backward")
        dkv = differentiating.add(call.pieces(k.device, runtime), *kv)
        own = None
        if any(ctx.needs_input_grad[1:3]):
            own = call.scatter_sum(torch.stack(dkv)).unbind(0)
        return *differentiating.results(own, k, v), None
