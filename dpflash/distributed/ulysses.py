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
    """All-to-all between a sharded sequence and sharded heads."""

    sharded: ShardedPattern  # the pattern over the sharded sequence
    group: ProcessGroup  # the ranks that share the sequence
    heads: Sequence[slice]  # of each rank

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return rank_in(self.group)

    def to_heads(self, x: Tensor, operation: str, phase: str) -> Tensor:
        """`[B, H, T_p, ...]` to `[B, h, T, ...]`, with tokens in the order of the sequence."""
        own = self.heads[self.rank]
        count = own.stop - own.start
        shapes = [
            (x.shape[0], count, self.sharded.tokens(rank), *x.shape[3:])
            for rank in range(len(self.heads))
        ]
        shards = all_to_all(
            [x[:, heads] for heads in self.heads], shapes, self.group, operation, phase
        )
        return self.sharded.layout.joined(shards, 2, self.sharded.length)

    def to_tokens(self, x: Tensor, operation: str, phase: str) -> Tensor:
        """`[B, h, T, ...]` to `[B, H, T_p, ...]`; the inverse of `to_heads`."""
        shards = []
        for rank in range(len(self.heads)):
            chunks = self.sharded.chunks(rank)
            slices = [x[:, :, chunk.start : chunk.start + chunk.length] for chunk in chunks]
            shards.append(torch.cat(slices, dim=2) if slices else x[:, :, :0])
        tokens = self.sharded.tokens(self.rank)
        shapes = [
            (x.shape[0], heads.stop - heads.start, tokens, *x.shape[3:]) for heads in self.heads
        ]
        return torch.cat(all_to_all(shards, shapes, self.group, operation, phase), dim=1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: HeadExchange, name: str) -> Tensor:
        ctx.exchange, ctx.name = exchange, name
        return exchange.to_heads(x, f"{name} from tokens to heads", "forward")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        operation = f"gradients of {ctx.name} from heads to tokens"
        return ctx.exchange.to_tokens(grad, operation, "backward"), None, None


class _ToTokens(torch.autograd.Function):
    """`HeadExchange.to_tokens` of o and lse together: all ranks send both gradients or none."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, lse: Tensor, exchange: HeadExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return (
            exchange.to_tokens(o, "o from heads to tokens", "forward"),
            exchange.to_tokens(lse, "lse from heads to tokens", "forward"),
        )

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        return (
            ctx.exchange.to_heads(do, "gradients of o from tokens to heads", "backward"),
            ctx.exchange.to_heads(dlse, "gradients of lse from tokens to heads", "backward"),
            None,
        )


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
    """The gradient of sinks or slopes x `[B, H]`, from its terms `[B, H, T]`."""
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
    """``(o, lse)`` of this rank's tokens; each rank computes some heads over all tokens."""
    heads, kv_heads = heads_per_rank(sharded)
    if kv_heads[-1].stop != k.shape[1]:
        k, v = (x.repeat_interleave(sharded.num_heads // k.shape[1], dim=1) for x in (k, v))
    exchange = HeadExchange(sharded, group, heads)
    kv_exchange = HeadExchange(sharded, group, kv_heads)
    own = heads[exchange.rank]
    q = _ToHeads.apply(q, exchange, "q")
    k, v = _ToHeads.apply(k, kv_exchange, "k"), _ToHeads.apply(v, kv_exchange, "v")
    gates = None
    if isinstance(sharded.pattern, Adaptive):
        blocks, gates = sharded.pattern.choose(q, k, scale)
        graph = runtime_graph(blocks, gates, sharded.pattern, sharded.length)
    else:
        graph = graph_of(sharded.of_heads(own.start, own.stop), q.device)
    sinks, slopes = (None if x is None else x[:, own] for x in (sinks, slopes))
    o, lse = _OwnHeads.apply(q, k, v, sinks, slopes, gates, graph, scale)
    return _ToTokens.apply(o, lse, exchange)
