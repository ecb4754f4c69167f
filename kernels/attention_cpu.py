"""Attention over tile graphs on the CPU: torch's flash operation on pieces of the graph.

Pieces are merged by their log-sum-exp, so memory is linear in T. The backward of a piece is the
flash backward with the o and lse of the whole row. For slopes and gradients of multiplicities,
which torch's operation does not have, plain PyTorch runs the pieces, a bounded part at a time.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_cpu_pieces import (
    Grads,
    PlainGrads,
    Slopes,
    Tokens,
    Upstream,
    flash_backward,
    flash_forward,
    plain_backward,
    plain_forward,
)
from .attention_cpu_work import Chunk, Index, View, Work, add, put, take
from .attention_reference import AttentionGrads, squared_norms
from .merge import merge_
from .tile_graph import TileGraph


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    graph: TileGraph,
    scale: float,
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    key_range: Tensor | None = None,
    wide: bool = False,
) -> tuple[Tensor, Tensor]:
    """``o = sum_j m e^s v / sum_j m e^s`` with ``s = scale * q k - slope * |i - j|``.

    Computes in float32 (float64 for float64) and gives the same bits each time.

    Args:
        q: `[B, H, T, D]`; query head h reads key/value head `h // (H // G)`.
        k: `[B, G, S, D]`.
        v: `[B, G, S, D]`.
        graph: whose runs give m, the multiplicity of key j for query i in head h.
        scale: factor of q k.
        sinks: `[B, H]`, the score of one more key whose value is 0.
        slopes: `[B, H]`, of ALiBi (Press et al., arXiv:2108.12409); |i - j| is
            ``|i - j + graph.distance_shift|``.
        key_range: `[B, 2]`, int32: sample b sees only keys of ``key_range[b, 0]`` up to, not
            including, ``key_range[b, 1]``.
        wide: give o in the dtype of lse, before it is rounded.

    Returns:
        o `[B, H, T, D]`, dtype of q, and lse `[B, H, T]`, natural log of the denominator, float32
        (float64 for float64). A query without key (and sink) has o = 0 and lse = -inf.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    work = Work.of(q, k, graph, key_range, plain=slopes is not None)
    tokens = Tokens(*_widen((q, k, v), dtype, work))
    biases = None if slopes is None else Slopes(slopes.to(dtype).flatten(), graph.distance_shift)

    def run(chunk: Chunk) -> tuple[Tensor, Tensor]:
        if work.plain:
            return plain_forward(tokens, chunk, scale, biases)
        return flash_forward(tokens, chunk, scale)

    whole = work.whole()
    if whole is not None:
        o, lse = run(whole)
    else:
        once = work.rows_once()
        o = q.new_empty(q.shape, dtype=dtype)
        lse = q.new_empty(q.shape[:3], dtype=dtype)
        if not once:
            o.zero_()
            lse.fill_(-math.inf)
        for chunk in work.chunks():
            if once and chunk.first:
                of_rows, lse_of_rows = run(chunk)
                put(o, chunk.rows, of_rows)
                put(lse.unsqueeze(3), chunk.rows, lse_of_rows.unsqueeze(3))
            else:
                _merge(o, lse, chunk.rows, *run(chunk))
    if sinks is not None:
        before, lse = lse, torch.logaddexp(lse, sinks.to(dtype).unsqueeze(2))
        pivot = lse.masked_fill(lse == -math.inf, 0.0)
        o = o * (before - pivot).exp().unsqueeze(3)
    return o if wide else o.to(q.dtype), lse


def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    graph: TileGraph,
    scale: float,
    *,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    key_range: Tensor | None = None,
    token_sums: bool = False,
    run_grads: bool = False,
    squares: bool = False,
    wide: bool = False,
) -> AttentionGrads:
    """``ds = p (do v - delta)`` with ``delta = rowsum(do o) - dlse``; all gradients follow.

    Args:
        do: gradient of o, shape of o; may be wider than q, as o may.
        dlse: gradient of lse, shape of lse; None means 0.
        q, k, v, graph, scale, sinks, slopes, key_range: as they went into `attention_forward`.
        o, lse: as they came out of it; or those over more keys than the graph has, of which the
            gradients are then the part that goes through the graph's keys.
        token_sums: also return the sums of dq, dk and dv over tokens.
        run_grads: also return the gradient of ``graph.rows.log_multiplicity``.
        squares: also return the squared norms of (dq, dk, dv).
        wide: give dq, dk and dv in the dtype of lse, before they are rounded.

    Returns:
        See `AttentionGrads`. Sums are taken in float32 before dq, dk and dv are rounded, squared
        norms in float64 after.
    """
    dtype = lse.dtype
    work = Work.of(q, k, graph, key_range, plain=slopes is not None or run_grads)
    wide_q, wide_k, wide_v, wide_do, wide_o = _widen((q, k, v, do, o), dtype, work, dlse)
    tokens = Tokens(wide_q, wide_k, wide_v)
    blind = (lse == -math.inf).unsqueeze(3)
    upstream = Upstream(
        wide_do, wide_o, lse.unsqueeze(3).masked_fill(blind, math.inf).contiguous()
    )
    biases = None if slopes is None else Slopes(slopes.to(dtype).flatten(), graph.distance_shift)
    sums = PlainGrads.zeros(q.shape[0] * q.shape[1], graph, dtype)

    def run(chunk: Chunk) -> Grads:
        if work.plain:
            return plain_backward(tokens, upstream, chunk, scale, biases, sums)
        return flash_backward(tokens, upstream, chunk, scale)

    dq, dk, dv = (x[..., : q.shape[3]] for x in _over_pieces(work, tokens, run))
    dsinks = None
    if sinks is not None:
        p = (sinks.to(dtype)[:, :, None, None] - upstream.lse).exp()
        dsinks = -(p * (wide_do * wide_o).sum(3, keepdim=True)).sum((2, 3))
    if not wide:
        results = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    else:
        results = dq, dk, dv
    return AttentionGrads(
        *results,
        dsinks,
        None if slopes is None else sums.slopes.view(slopes.shape),
        sums.log_multiplicity if run_grads else None,
        dq.sum(2) if token_sums else None,
        dk.sum(2) if token_sums else None,
        dv.sum(2) if token_sums else None,
        squared_norms(*results) if squares else None,
    )


def _over_pieces(work: Work, tokens: Tokens, run: Callable[[Chunk], Grads]) -> Grads:
    """dq, dk and dv, summed over all pieces."""
    whole = work.whole()
    if whole is not None:
        return run(whole)
    once = work.rows_once(), work.columns_once(), work.columns_once()
    grads = [
        x.new_empty(x.shape) if of_x else x.new_zeros(x.shape)
        for x, of_x in zip(tokens, once, strict=True)
    ]
    for chunk in work.chunks():
        places = chunk.rows, chunk.columns, chunk.columns
        for grad, place, part, of_x in zip(grads, places, run(chunk), once, strict=True):
            (put if of_x and chunk.first else add)(grad, place, part)
    dq, dk, dv = grads
    return dq, dk, dv


def _widen(
    inputs: Sequence[Tensor], dtype: torch.dtype, work: Work, dlse: Tensor | None = None
) -> list[Tensor]:
    """In the dtype of the computation, and contiguous as far as the operations need it."""
    wide = [x.to(dtype) for x in inputs]
    if dlse is not None:
        # One more column turns rowsum(do o) into rowsum(do o) - dlse and nothing else; the
        # others up to a multiple of 8 are for speed.
        wide = [F.pad(x, (0, 8 - x.shape[3] % 8)) for x in wide]
        wide[-2][..., -1] = dlse
        wide[-1][..., -1] = -1.0
    if work.gathers():
        return [x.contiguous() for x in wide]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in wide]


def _merge(o: Tensor, lse: Tensor, where: View | Index, o_new: Tensor, lse_new: Tensor) -> None:
    """Takes a piece's result into o and lse."""
    if isinstance(where, View):
        (o_old,), (lse_old,) = where.of(o), where.of(lse)
        merge_(o_old, lse_old, o_new, lse_new)
        return
    o_old, lse_old = take(o, where), take(lse.unsqueeze(3), where).squeeze(3)
    merge_(o_old, lse_old, o_new, lse_new)
    put(o, where, o_old)
    put(lse.unsqueeze(3), where, lse_old.unsqueeze(3))
