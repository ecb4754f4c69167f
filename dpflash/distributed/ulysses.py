"""Ulysses attention: all-to-all exchanges shards of the sequence for shards of the heads and back.

Source: Jacobs et al., arXiv:2309.14509. Shapes: B samples, H query heads, G key/value heads, T
tokens of all ranks, T_p tokens of rank p, h heads of one rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed.collectives import rank_in
from dpflash.kernels.attention import attention_backward, attention_forward
from dpflash.kernels.attention_reference import AttentionInputs, needs_wide_o
from dpflash.kernels.tile_graph import TileGraph
from dpflash.patterns import Adaptive
from dpflash.patterns.adaptive import runtime_graph

from ..attn.backend import current_backend
from ..verification.second_order import differentiable_once
from .exchange import all_to_all
from .exchange_plan import ShardedPattern, graph_of
from .traffic import heads_per_rank


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """All-to-all of several tensors at once, between a sharded sequence and sharded heads."""

    sharded: ShardedPattern  # the pattern over the sharded sequence
    group: ProcessGroup  # the ranks that share the sequence
    heads: Sequence[slice]  # query heads of each rank
    kv_heads: Sequence[slice]  # key/value heads of each rank

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return rank_in(self.group)

    def _heads_of(self, x: Tensor) -> Sequence[slice]:
        return self.heads if x.shape[1] == self.heads[-1].stop else self.kv_heads

    def to_heads(self, tensors: Sequence[Tensor], operation: str, phase: str) -> list[Tensor]:
        """Exchange each `[B, H, T_p, ...]` for `[B, h, T, ...]`, in the sequence's order."""
        heads = [self._heads_of(x) for x in tensors]
        counts = [own[self.rank].stop - own[self.rank].start for own in heads]
        ranks = range(len(self.heads))
        shapes = [
            [
                (x.shape[0], count, self.sharded.tokens(rank), *x.shape[3:])
                for x, count in zip(tensors, counts, strict=True)
            ]
            for rank in ranks
        ]
        sent = [[x[:, own[rank]] for x, own in zip(tensors, heads, strict=True)] for rank in ranks]
        received = all_to_all(sent, shapes, self.group, operation, phase)
        layout, length = self.sharded.layout, self.sharded.length
        return [layout.joined(shards, 2, length) for shards in zip(*received, strict=True)]

    def to_tokens(
        self,
        tensors: Sequence[Tensor],
        heads: Sequence[Sequence[slice]],
        operation: str,
        phase: str,
    ) -> list[Tensor]:
        """Exchange each `[B, h, T, ...]` for `[B, H, T_p, ...]`; the inverse of `to_heads`.

        `heads` lists, for each tensor, which of its heads are on each rank.
        """
        ranks, tokens = range(len(self.heads)), self.sharded.tokens(self.rank)
        sent = []
        for rank in ranks:
            chunks = self.sharded.chunks(rank)
            slices = [slice(chunk.start, chunk.start + chunk.length) for chunk in chunks]
            sent.append(
                [torch.cat([x[:, :, c] for c in slices] or [x[:, :, :0]], 2) for x in tensors]
            )
        shapes = [
            [
                (x.shape[0], own[rank].stop - own[rank].start, tokens, *x.shape[3:])
                for x, own in zip(tensors, heads, strict=True)
            ]
            for rank in ranks
        ]
        received = all_to_all(sent, shapes, self.group, operation, phase)
        return [torch.cat(shards, dim=1) for shards in zip(*received, strict=True)]


class _ToHeads(torch.autograd.Function):
    """Differentiable `HeadExchange.to_heads` of q, k and v; missing gradients are sent as 0."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *qkv: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.to_heads(qkv, "q, k and v from tokens to heads", "forward"))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        exchange, operation = ctx.exchange, "gradients of q, k and v from heads to tokens"
        heads = [exchange.heads, exchange.kv_heads, exchange.kv_heads]
        return None, *exchange.to_tokens(grads, heads, operation, "backward")


class _ToTokens(torch.autograd.Function):
    """Differentiable `HeadExchange.to_tokens` of o and lse; missing gradients are sent as 0."""

    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, *o_lse: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        heads = [exchange.heads] * 2
        return tuple(exchange.to_tokens(o_lse, heads, "o and lse from heads to tokens", "forward"))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        operation = "gradients of o and lse from tokens to heads"
        return None, *ctx.exchange.to_heads(grads, operation, "backward")


class _OwnHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        gates: Tensor | None,
        graph: TileGraph,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.backend = current_backend()
        inputs = AttentionInputs(q, k, v, graph, scale, sinks, slopes, backend=ctx.backend)
        o, lse = attention_forward(inputs, wide=needs_wide_o(q, sinks, slopes))
        ctx.save_for_backward(q, k, v, o, lse, sinks, slopes, gates)
        ctx.graph, ctx.scale = graph, scale
        return o.to(q.dtype), lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse, sinks, slopes, gates = ctx.saved_tensors
        options = (ctx.graph, ctx.scale, sinks, slopes)
        inputs = AttentionInputs(q, k, v, *options, backend=ctx.backend)
        grads = attention_backward(do, dlse, o, lse, inputs, run_grads=gates is not None)
        dgates = grads.dlog_multiplicity
        return (
            grads.dq,
            grads.dk,
            grads.dv,
            _summed(grads.dsinks, sinks),
            _summed(grads.dslopes, slopes),
            None if gates is None or dgates is None else dgates.view(gates.shape),
            None,
            None,
        )


def _summed(terms: Tensor | None, x: Tensor | None) -> Tensor | None:
    """Sum terms `[B, H, T]` over T, which gives the gradient of sinks or slopes x, `[B, H]`."""
    return None if terms is None or x is None else terms.sum(2).to(x.dtype)


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    sharded: ShardedPattern,
    group: ProcessGroup,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` of this rank's tokens; each rank computes some heads of all tokens."""
    heads, kv_heads = heads_per_rank(sharded)
    if kv_heads[-1].stop != k.shape[1]:
        k, v = (x.repeat_interleave(sharded.num_heads // k.shape[1], dim=1) for x in (k, v))
    exchange = HeadExchange(sharded, group, heads, kv_heads)
    own = heads[exchange.rank]
    q, k, v = _ToHeads.apply(exchange, q, k, v)
    gates = None
    if isinstance(sharded.pattern, Adaptive):
        blocks, gates = sharded.pattern.choose(q, k, scale)
        graph = runtime_graph(blocks, gates, sharded.pattern, sharded.length)
    else:
        graph = graph_of(sharded.of_heads(own.start, own.stop), q.device)
    sinks, slopes = (None if x is None else x[:, own] for x in (sinks, slopes))
    return _ToTokens.apply(exchange, *_OwnHeads.apply(q, k, v, sinks, slopes, gates, graph, scale))
