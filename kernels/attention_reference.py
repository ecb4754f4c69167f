"""Reference implementation of the attention kernels: holds every score of the tile graph.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .tile_graph import TileGraph


class AttentionGrads(NamedTuple):
    """The results of attention's backward.

    Attributes:
        dq, dk, dv: shapes and dtypes of q, k and v; dtype of lse if asked for as wide.
        dsinks: `[B, H]`, or None without sinks.
        dslopes: `[B, H]`, or None without slopes.
        dlog_multiplicity: `[R]`, of the runs of `graph.rows`, or None if not asked for.
        q_sum, k_sum, v_sum: `[B, H, D]`, `[B, G, D]` twice: dq, dk and dv summed over tokens,
            which is each sample's gradient of a bias of q, k or v; or None.
        squares: `[B]`, float64: squared L2 norm of each sample's (dq, dk, dv) together, of the
            values returned, rounded as they are; not finite where one of them is not. Or None.

    The other optional ones are float32 (float64 for float64).
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None
    dslopes: Tensor | None = None
    dlog_multiplicity: Tensor | None = None
    q_sum: Tensor | None = None
    k_sum: Tensor | None = None
    v_sum: Tensor | None = None
    squares: Tensor | None = None


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
    scores = _scores(q, k, graph, scale, slopes, key_range, dtype)
    if sinks is not None:
        column = sinks.to(dtype)[:, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.cat((scores, column), dim=3).logsumexp(3)
    else:
        lse = scores.logsumexp(3)
    p = (scores - _finite(lse).unsqueeze(3)).exp()
    values = v.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    o = p @ values
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
    heads_per_group = q.shape[1] // k.shape[1]
    scores = _scores(q, k, graph, scale, slopes, key_range, dtype)
    p = (scores - _finite(lse).unsqueeze(3)).exp()
    keys = k.to(dtype).repeat_interleave(heads_per_group, dim=1)
    values = v.to(dtype).repeat_interleave(heads_per_group, dim=1)
    delta = (do.to(dtype) * o.to(dtype)).sum(3)
    if dlse is not None:
        delta = delta - dlse.to(dtype)
    ds = p * (do.to(dtype) @ values.transpose(2, 3) - delta.unsqueeze(3))
    dq = scale * (ds @ keys)
    dk = scale * (ds.transpose(2, 3) @ q.to(dtype)).unflatten(1, (k.shape[1], -1)).sum(2)
    dv = (p.transpose(2, 3) @ do.to(dtype)).unflatten(1, (k.shape[1], -1)).sum(2)
    dsinks = dslopes = dlog = None
    if sinks is not None:
        dsinks = -((sinks.to(dtype).unsqueeze(2) - _finite(lse)).exp() * delta).sum(2)
    if slopes is not None:
        dslopes = -(ds * _distances(graph, dtype, ds.device)).sum((2, 3))
    if run_grads:
        dlog = _run_grads(ds, graph)
    sums = (dq.sum(2), dk.sum(2), dv.sum(2)) if token_sums else (None, None, None)
    if not wide:
        dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    grads = AttentionGrads(dq, dk, dv, dsinks, dslopes, dlog, *sums)
    return grads._replace(squares=squared_norms(dq, dk, dv)) if squares else grads


def squared_norms(*grads: Tensor) -> Tensor:
    """`[B]`, float64: the squared norm of each sample's gradients `[B, ...]`, all together."""
    norms = [torch.linalg.vector_norm(x, dim=(1, 2, 3), dtype=torch.float64) for x in grads]
    return torch.stack(norms).square().sum(0)


def _scores(
    q: Tensor,
    k: Tensor,
    graph: TileGraph,
    scale: float,
    slopes: Tensor | None,
    key_range: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`[B, H, T, S]`: scores with the log of their multiplicity, -inf where nothing is seen."""
    keys = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = scale * (q.to(dtype) @ keys.transpose(2, 3))
    if slopes is not None:
        distances = _distances(graph, dtype, q.device)
        scores = scores - slopes.to(dtype)[:, :, None, None] * distances
    scores = scores + graph.multiplicity().to(q.device).to(dtype).log()
    if key_range is not None:
        position = torch.arange(k.shape[2], device=q.device)
        seen = (position >= key_range[:, :1]) & (position < key_range[:, 1:])
        scores = scores.masked_fill(~seen[:, None, None, :], -math.inf)
    return scores


def _distances(graph: TileGraph, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[T, S]`: |i - j|, of positions in the whole sequence."""
    queries = torch.arange(graph.num_queries, device=device)
    keys = torch.arange(graph.num_keys, device=device)
    return (queries.unsqueeze(1) - keys + graph.distance_shift).abs().to(dtype)


def _finite(lse: Tensor) -> Tensor:
    """The lse, +inf where a row has no key, so that its probabilities come out as 0."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _run_grads(ds: Tensor, graph: TileGraph) -> Tensor:
    """`[R]`: ds summed over the pairs of each run."""
    side = graph.rows
    grads = torch.zeros(side.runs.shape[0], dtype=ds.dtype, device=ds.device)
    variants = graph.row_variants.expand(ds.shape[0], ds.shape[1])
    for b, h in torch.cartesian_prod(torch.arange(ds.shape[0]), torch.arange(ds.shape[1])):
        variant = int(variants[b, h])
        first, end = side.variants[variant : variant + 2].tolist()
        for start, stride, length, first_run, end_run in side.groups[first:end].tolist():
            rows = start + stride * torch.arange(length, device=ds.device)
            for run in range(first_run, end_run):
                column, step, count, _, _ = side.runs[run].tolist()
                columns = column + step * torch.arange(count, device=ds.device)
                grads[run] += ds[b, h][rows.unsqueeze(1), columns].sum()
    return grads
