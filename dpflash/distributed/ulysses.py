"""Ulysses: each worker exchanges its tokens of all heads for all tokens of some heads, and back.

Source: Jacobs et al., arXiv:2309.14509. Letters: B samples, H query heads, G key/value heads, T
tokens of all workers, T_p those of worker p, h heads of one worker, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed.collectives import rank_in
from dpflash.kernels.attention import attention_backward, attention_forward
from dpflash.kernels.tile_graph import TileGraph
from dpflash.patterns import Adaptive
from dpflash.patterns.adaptive import runtime_graph

from .exchange_plan import Spread
from .once import differentiable_once
from .traffic import deal_heads
from .wire import all_to_all


@dataclass(frozen=True, eq=False)
class Deal:
    """Who has which tokens before, and which heads between.

    Attributes:
        spread: who has which tokens.
        group: the workers.
        heads: the heads of each worker.
    """

    spread: Spread
    group: ProcessGroup
    heads: Sequence[slice]

    @property
    def rank(self) -> int:
        """This worker's number."""
        return rank_in(self.group)

    def to_heads(self, x: Tensor, what: str, phase: str) -> Tensor:
        """`[B, h, T, ...]`, in the order of the sequence, from `[B, H, T_p, ...]`."""
        own = self.heads[self.rank]
        count = own.stop - own.start
        shapes = [
            (x.shape[0], count, self.spread.tokens(rank), *x.shape[3:])
            for rank in range(len(self.heads))
        ]
        shards = all_to_all([x[:, heads] for heads in self.heads], shapes, self.group, what, phase)
        parts = [
            shards[rank][:, :, chunk.local : chunk.local + chunk.length]
            for rank, chunk in self.spread.layout.in_order(self.spread.length)
        ]
        return torch.cat(parts, dim=2)

    def to_tokens(self, x: Tensor, what: str, phase: str) -> Tensor:
        """`[B, H, T_p, ...]` from `[B, h, T, ...]`; undoes `to_heads`."""
        parts = []
        for rank in range(len(self.heads)):
            chunks = self.spread.chunks(rank)
            cut = [x[:, :, chunk.start : chunk.start + chunk.length] for chunk in chunks]
            parts.append(torch.cat(cut, dim=2) if cut else x[:, :, :0])
        tokens = self.spread.tokens(self.rank)
        shapes = [
            (x.shape[0], heads.stop - heads.start, tokens, *x.shape[3:]) for heads in self.heads
        ]
        return torch.cat(all_to_all(parts, shapes, self.group, what, phase), dim=1)


class _ToHeads(torch.autograd.Function):
    """`Deal.to_heads`, differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, deal: Deal, name: str) -> Tensor:
        ctx.deal, ctx.name = deal, name
        return deal.to_heads(x, f"{name} from tokens to heads", "forward")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        what = f"gradients of {ctx.name} from heads to tokens"
        return ctx.deal.to_tokens(grad, what, "backward"), None, None


class _ToTokens(torch.autograd.Function):
    """`Deal.to_tokens` of o and lse together, so that all workers send both gradients or none."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, lse: Tensor, deal: Deal) -> tuple[Tensor, Tensor]:
        ctx.deal = deal
        return (
            deal.to_tokens(o, "o from heads to tokens", "forward"),
            deal.to_tokens(lse, "lse from heads to tokens", "forward"),
        )

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        return (
            ctx.deal.to_heads(do, "gradients of o from tokens to heads", "backward"),
            ctx.deal.to_heads(dlse, "gradients of lse from tokens to heads", "backward"),
            None,
        )


class _OwnHeads(torch.autograd.Function):
    """Attention of some heads over all tokens."""

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
        o, lse = attention_forward(q, k, v, graph, scale, sinks=sinks, slopes=slopes)
        ctx.save_for_backward(q, k, v, o, lse, sinks, slopes, gates)
        ctx.graph, ctx.scale = graph, scale
        return o, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
        q, k, v, o, lse, sinks, slopes, gates = ctx.saved_tensors
        grads = attention_backward(
            do,
            dlse,
            q,
            k,
            v,
            o,
            lse,
            ctx.graph,
            ctx.scale,
            sinks=sinks,
            slopes=slopes,
            run_grads=gates is not None,
        )
        of_gates = grads.dlog_multiplicity
        return (
            grads.dq,
            grads.dk,
            grads.dv,
            None if sinks is None or grads.dsinks is None else grads.dsinks.to(sinks.dtype),
            None if slopes is None or grads.dslopes is None else grads.dslopes.to(slopes.dtype),
            None if gates is None or of_gates is None else of_gates.view(gates.shape),
            None,
            None,
        )


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    spread: Spread,
    group: ProcessGroup,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``(o, lse)`` of this worker's tokens, computed head by head on all workers.

    Args:
        q: `[B, H, T_p, D]`.
        k: `[B, G, T_p, D]`.
        v: `[B, G, T_p, D]`.
        sinks: `[B, H]`.
        slopes: `[B, H]`.
        spread: who has which tokens.
        group: the workers.
        scale: factor of the scores.
    """
    heads, kv_heads = deal_heads(spread)
    if kv_heads[-1].stop != k.shape[1]:
        k, v = (x.repeat_interleave(spread.num_heads // k.shape[1], dim=1) for x in (k, v))
    deal, kv_deal = Deal(spread, group, heads), Deal(spread, group, kv_heads)
    mine = heads[deal.rank]
    q = _ToHeads.apply(q, deal, "q")
    k, v = _ToHeads.apply(k, kv_deal, "k"), _ToHeads.apply(v, kv_deal, "v")
    gates = None
    if isinstance(spread.pattern, Adaptive):
        blocks, gates = spread.pattern.choose(q, k, scale)
        graph = runtime_graph(blocks, gates, spread.pattern, spread.length)
    else:
        graph = _graph_of_heads(spread, mine.start, mine.stop, q.device)
    sinks, slopes = (None if x is None else x[:, mine] for x in (sinks, slopes))
    o, lse = _OwnHeads.apply(q, k, v, sinks, slopes, gates, graph, scale)
    return _ToTokens.apply(o, lse, deal)


@functools.lru_cache(maxsize=256)
def _graph_of_heads(spread: Spread, first: int, end: int, device: torch.device) -> TileGraph:
    """The pattern's graph, which may differ between heads, for some of all heads."""
    graph = spread.pattern.graph(spread.length, spread.num_heads, device)
    rows, cols = graph.row_variants[first:end], graph.col_variants[first:end]
    return replace(graph, row_variants=rows, col_variants=cols, plans={})
