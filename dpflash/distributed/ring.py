"""Ring attention: keys and values come from each worker in turn, gradients go straight back.

In step t a worker computes with the keys of the worker t places before it. Only rows that one of
its queries sees are sent, which all know from the pattern alone; steps without such rows are
neither computed nor sent. What comes next travels while the present is computed, in buffers of
its own.

Letters: B samples, H query heads, G key/value heads, T, S tokens of a worker, P workers, D head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed.collectives import rank_in
from dpflash.kernels.tile_graph import TileGraph

from .blockwise import Attending, Differentiating
from .chosen import Choice
from .exchange_plan import (
    Need,
    Piece,
    Spread,
    add_packed_,
    need,
    pack,
    packed_like,
    pieces,
    unpack,
)
from .once import differentiable_once
from .wire import Pending, exchange, warm_up


@dataclass(frozen=True, eq=False)
class Ring:
    """One worker's place in one call.

    Attributes:
        spread: who needs what.
        group: the workers.
        scale: factor of the scores.
        by_chunk: distances matter, so each pair of chunks is computed by itself.
    """

    spread: Spread
    group: ProcessGroup
    scale: float
    by_chunk: bool

    @property
    def rank(self) -> int:
        """This worker's number."""
        return rank_in(self.group)

    @property
    def size(self) -> int:
        """P."""
        return self.spread.layout.world_size

    def before(self, step: int) -> int:
        """The worker so many places before this one."""
        return (self.rank - step) % self.size

    def after(self, step: int) -> int:
        """The worker so many places behind this one."""
        return (self.rank + step) % self.size

    def needed(self, step: int, device: torch.device) -> Need:
        """What this worker needs in a step."""
        return need(self.spread, self.rank, self.before(step), device)

    def given(self, step: int, device: torch.device) -> Need:
        """What this worker gives in a step."""
        return need(self.spread, self.after(step), self.rank, device)

    def pieces(
        self, step: int, device: torch.device, runtime: TileGraph | None
    ) -> tuple[Piece, ...]:
        """What is to be computed in a step."""
        owner = self.before(step)
        return pieces(self.spread, self.rank, owner, device, self.by_chunk, runtime)

    def fetch(self, step: int, k: Tensor, v: Tensor, phase: str) -> Pending | None:
        """Starts the exchange of keys and values for a step."""
        if step >= self.size:
            return None
        given, needed = self.given(step, k.device), self.needed(step, k.device)
        return exchange(
            [pack(x, given) for x in (k, v)] if given.count else None,
            self.after(step),
            [packed_like(x, needed) for x in (k, v)] if needed.count else None,
            self.before(step),
            self.group,
            f"keys and values of ring attention, step {step} of {self.size - 1}",
            phase,
        )

    def arrived(self, step: int, pending: Pending | None) -> list[Tensor] | None:
        """`[B, G, S, D]` twice: the keys and values of a step, None where none are needed."""
        received = None if pending is None else pending.wait()
        if received is None:
            return None
        tokens, heads = self.spread.tokens(self.before(step)), self.spread.num_kv_heads
        needed = self.needed(step, received[0].device)
        return [unpack(x, heads, tokens, needed) for x in received]

    def give_back(
        self, step: int, found: Sequence[Tensor] | None, own: Sequence[Tensor]
    ) -> Pending:
        """Starts returning the gradients `[B, G, S, D]` of a step's keys and values."""
        device = own[0].device
        needed, given = self.needed(step, device), self.given(step, device)
        return exchange(
            None if found is None else [pack(x, needed) for x in found],
            self.before(step),
            [packed_like(x, given) for x in own] if given.count else None,
            self.after(step),
            self.group,
            f"gradients of ring attention, step {step} of {self.size - 1}",
            "backward",
        )

    def take_back(self, step: int, pending: Pending | None, own: Sequence[Tensor]) -> None:
        """Adds what another worker found for this one's keys and values."""
        received = None if pending is None else pending.wait()
        if received is not None:
            given = self.given(step, own[0].device)
            for whole, packed in zip(own, received, strict=True):
                add_packed_(whole, packed, given)


class RingAttention(torch.autograd.Function):
    """``(o, lse)`` of this worker's queries over the keys of all workers.

    Source: Liu et al., arXiv:2310.01889. Keeps q, k, v, o and lse of this worker alone.
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
        ring: Ring,
    ) -> tuple[Tensor, Tensor]:
        warm_up(ring.group, q.device)
        runtime = Choice.graph_of(blocks, gates, ring.spread)
        attending = Attending(q, sinks, slopes, ring.scale)
        pending: Pending | None = None
        for step in range(ring.size):
            coming = ring.fetch(step + 1, k, v, "forward")
            kv = (k, v) if step == 0 else ring.arrived(step, pending)
            if kv is not None:
                attending.add(ring.pieces(step, q.device, runtime), *kv)
            pending, kv = coming, None
        o, lse = attending.o, attending.lse
        ctx.save_for_backward(q, k, v, o, lse, sinks, slopes, blocks, gates)
        ctx.ring = ring
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        ring: Ring = ctx.ring
        # Once: activation checkpointing hands them out a single time.
        saved = ctx.saved_tensors
        _, k, v, *_ = saved
        differentiating = Differentiating(saved, do, dlse, ring.scale)
        runtime = differentiating.runtime_graph(ring.spread)
        pending = ring.fetch(1, k, v, "backward")
        own = differentiating.add(ring.pieces(0, k.device, runtime), k, v)
        returns = any(ctx.needs_input_grad[1:3])
        returning: Pending | None = None
        for step in range(1, ring.size):
            coming = ring.fetch(step + 1, k, v, "backward")
            kv = ring.arrived(step, pending)
            found = None
            if kv is not None:
                found = differentiating.add(ring.pieces(step, k.device, runtime), *kv)
            pending, kv = coming, None
            if returns:
                # What comes home is added in the order of the steps, always the same.
                sent = ring.give_back(step, found, own)
                ring.take_back(step - 1, returning, own)
                returning = sent
        ring.take_back(ring.size - 1, returning, own)
        return *differentiating.results(own, k, v), None
