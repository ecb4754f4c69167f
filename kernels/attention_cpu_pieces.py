"""The operations on pieces of a tile graph on the CPU, for `attention_cpu`, and what goes in.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim;
of pieces n, L, k and C as in `attention_cpu_plan.Batch`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_cpu_batch import CAUSAL, FULL
from .attention_cpu_work import Chunk, Index, take
from .tile_graph import TileGraph


class Tokens(NamedTuple):
    """The inputs, in the dtype of the computation."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, D]


class Upstream(NamedTuple):
    """What the backward gets, in the dtype of the computation."""

    do: Tensor  # [B, H, T, D]
    o: Tensor  # [B, H, T, D]
    lse: Tensor  # [B, H, T, 1], +inf for rows without key: their p = e^(s - inf) = 0


Grads = tuple[Tensor, Tensor, Tensor]


def flash_forward(tokens: Tokens, chunk: Chunk, scale: float) -> tuple[Tensor, Tensor]:
    """The chunk's o, and lse `[n, 1, L]` (first dimensions b, h for views)."""
    causal = chunk.batch.kind == CAUSAL and chunk.mask is None
    q = take(tokens.q, chunk.rows)
    k, v = take(tokens.k, chunk.columns), take(tokens.v, chunk.columns)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=chunk.bias, scale=scale
    )
    if chunk.batch.weighted:
        lse = lse + chunk.log_multiplicity.to(lse.dtype)
    if chunk.mask is not None and chunk.mask.blind is not None:
        # The operation gives a row that sees nothing an lse of 0.
        lse = lse.masked_fill(chunk.mask.blind, -math.inf)
    return o, lse


def flash_backward(tokens: Tokens, upstream: Upstream, chunk: Chunk, scale: float) -> Grads:
    """What the chunk adds to dq, dk and dv."""
    q, do, o, lse = (take(x, chunk.rows) for x in (tokens.q, *upstream))
    k, v = take(tokens.k, chunk.columns), take(tokens.v, chunk.columns)
    lse = lse.squeeze(3)
    if chunk.batch.weighted:
        # p = m e^s / e^lse
        lse = lse - chunk.log_multiplicity.to(lse.dtype)
    causal = chunk.batch.kind == CAUSAL and chunk.mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse.contiguous(), 0.0, causal, attn_mask=chunk.bias, scale=scale
    )


class Slopes(NamedTuple):
    """What grows with the distance |i - j + shift| is taken off the scores."""

    of_heads: Tensor  # [B * H]
    shift: int


class PlainGrads(NamedTuple):
    """Sums that only `plain_backward` adds to."""

    slopes: Tensor  # [B * H]
    log_multiplicity: Tensor  # [R]

    @classmethod
    def zeros(cls, heads: int, graph: TileGraph, dtype: torch.dtype) -> PlainGrads:
        """Nothing yet."""
        runs = graph.rows.runs.shape[0]
        return cls(torch.zeros(heads, dtype=dtype), torch.zeros(runs, dtype=dtype))


def plain_forward(
    tokens: Tokens, chunk: Chunk, scale: float, slopes: Slopes | None
) -> tuple[Tensor, Tensor]:
    """As `flash_forward`, with slopes."""
    scores = _scores(tokens, chunk, scale, slopes)
    lse = scores.logsumexp(3, keepdim=True)
    p = (scores - lse.masked_fill(lse == -math.inf, math.inf)).exp()
    return p @ take(tokens.v, chunk.columns), lse.squeeze(3)


def plain_backward(
    tokens: Tokens,
    upstream: Upstream,
    chunk: Chunk,
    scale: float,
    slopes: Slopes | None,
    sums: PlainGrads,
) -> Grads:
    """As `flash_backward`; also adds to the gradients of slopes and multiplicities."""
    q, do, o, lse = (take(x, chunk.rows) for x in (tokens.q, *upstream))
    k, v = take(tokens.k, chunk.columns), take(tokens.v, chunk.columns)
    p = (_scores(tokens, chunk, scale, slopes) - lse).exp()
    ds = p * (do @ v.transpose(2, 3) - (do * o).sum(3, keepdim=True))
    if slopes is not None:
        distances = _distances(tokens, chunk, slopes.shift)
        sums.slopes.index_add_(0, chunk.heads, -(ds * distances).sum((1, 2, 3)))
    runs = chunk.batch.run[chunk.pieces]
    of_runs = ds.sum((1, 2)).unflatten(1, (runs.shape[1], -1)).sum(2)
    sums.log_multiplicity.index_add_(0, runs.flatten(), of_runs.flatten())
    return scale * (ds @ k), scale * (ds.transpose(2, 3) @ q), p.transpose(2, 3) @ do


def _scores(tokens: Tokens, chunk: Chunk, scale: float, slopes: Slopes | None) -> Tensor:
    """`[n, 1, L, k * C]`, with the log of their multiplicity."""
    q, k = take(tokens.q, chunk.rows), take(tokens.k, chunk.columns)
    scores = scale * (q @ k.transpose(2, 3)) + chunk.log_multiplicity.unsqueeze(3).to(q.dtype)
    if slopes is not None:
        of_heads = slopes.of_heads[chunk.heads].view(-1, 1, 1, 1)
        scores -= of_heads * _distances(tokens, chunk, slopes.shift)
    if chunk.batch.kind != FULL:
        scores.masked_fill_(~chunk.batch.seen(chunk.begin, chunk.end), -math.inf)
    return scores


def _distances(tokens: Tokens, chunk: Chunk, shift: int) -> Tensor:
    """`[n, 1, L, k * C]`: |i - j + shift|."""
    assert isinstance(chunk.rows, Index) and isinstance(chunk.columns, Index)
    rows = chunk.rows.blocks % tokens.q.shape[2]
    columns = chunk.columns.blocks % tokens.k.shape[2]
    distances = (rows.unsqueeze(2) - columns.unsqueeze(1) + shift).abs()
    return distances.unsqueeze(1).to(tokens.q.dtype)
