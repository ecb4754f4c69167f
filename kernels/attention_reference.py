"""Reference implementation of the attention kernels: holds every score of the tile graph.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim of
queries and keys, E head dim of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .tile_graph import TileGraph


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of attention.

    Attributes:
        q: `[B, H, T, D]`; query head h reads key/value head `h // (H // G)`.
        k: `[B, G, S, D]`.
        v: `[B, G, S, E]`.
        graph: whose runs give m, the multiplicity of key j for query i in head h.
        scale: factor of q k.
        sinks: `[B, H]`, the score of one more key whose value is 0.
        slopes: `[B, H]`, of ALiBi (Press et al., arXiv:2108.12409); |i - j| is
            ``|i - j + graph.distance_shift|``.
        key_range: `[B, 2]`, int32: sample b sees only keys of ``key_range[b, 0]`` up to, not
            including, ``key_range[b, 1]``.
        softcap: a bound c of the scores: ``c tanh(scale q k / c)`` takes the place of scale q k
            (Gemma 2, arXiv:2408.00118, section 2); None for no bound.
        bias: `[B, H, T, S]`, added to the scores after the bound; any strides, 0 included.
        backend: one of `attention_vendor.BACKENDS`: whose kernels may run. A backward gets the
            choice of its forward.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    graph: TileGraph
    scale: float
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    key_range: Tensor | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    backend: str = "auto"


class AttentionGrads(NamedTuple):
    """The results of attention's backward.

    Attributes:
        dq, dk, dv: shapes and dtypes of q, k and v; dtype of lse if asked for as wide.
        dsinks: `[B, H, T]`, or None without sinks: the terms of each query, whose sum over the
            queries is the gradient.
        dslopes: `[B, H, T]`, or None without slopes: likewise.
        dlog_multiplicity: `[R]`, of the runs of `graph.rows`, or None if not asked for.
        q_sum, k_sum, v_sum: `[B, H, D]`, `[B, G, D]` twice: dq, dk and dv summed over tokens,
            which is each sample's gradient of a bias of q, k or v; or None.
        squares: `[B]`, float64: squared L2 norm of each sample's (dq, dk, dv) together, of the
            values returned, rounded as they are; not finite where one of them is not. Or None.
        dbias: `[B, H, T, S]`, or None if not asked for.

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
    dbias: Tensor | None = None


def attention_forward(inputs: AttentionInputs, *, wide: bool = False) -> tuple[Tensor, Tensor]:
    """``o = sum_j m e^s v / sum_j m e^s`` with ``s = scale * q k - slope * |i - j| + bias``.

    Args:
        inputs: see `AttentionInputs`.
        wide: return o in the dtype of lse, before it is rounded.

    Returns:
        o `[B, H, T, E]`, dtype of q, and lse `[B, H, T]`, natural log of the denominator, float32
        (float64 for float64). A query without key (and sink) has o = 0 and lse = -inf.
    """
    dtype = torch.promote_types(inputs.q.dtype, torch.float32)
    scores, _ = _scores(inputs, dtype)
    if inputs.sinks is not None:
        column = inputs.sinks.to(dtype)[:, :, None, None].expand(*scores.shape[:3], 1)
        lse = torch.cat((scores, column), dim=3).logsumexp(3)
    else:
        lse = scores.logsumexp(3)
    p = (scores - _finite(lse).unsqueeze(3)).exp()
    o = p @ _of_query_heads(inputs.v, inputs, dtype)
    return o if wide else o.to(inputs.q.dtype), lse


def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    inputs: AttentionInputs,
    *,
    token_sums: bool = False,
    run_grads: bool = False,
    bias_grad: bool = False,
    squares: bool = False,
    wide: bool = False,
    all_keys: bool = False,
) -> AttentionGrads:
    """``ds = p (do v - delta)`` with ``delta = rowsum(do o) - dlse``; all gradients follow.

    Args:
        do: gradient of o, shape of o; may be wider than q, as o may.
        dlse: gradient of lse, shape of lse; None means 0.
        o, lse: results of `attention_forward`; or results over more keys than the graph has: the
            gradients are then the part that flows through the graph's keys.
        inputs: of `attention_forward`.
        token_sums: also return the sums of dq, dk and dv over tokens.
        run_grads: also return the gradient of ``graph.rows.log_multiplicity``.
        bias_grad: also return the gradient of the bias.
        squares: also return the squared norms of (dq, dk, dv).
        wide: return dq, dk and dv in the dtype of lse, before they are rounded.
        all_keys: o and lse are over the keys of the graph, not more. With that a backend that
            sums in float64 takes the error of delta from the gradient of slopes; here and on a
            GPU, where sums are float32, their own error is as large, and nothing changes.

    Returns:
        See `AttentionGrads`. Sums are taken in float32 before dq, dk and dv are rounded, squared
        norms in float64 after.
    """
    dtype = lse.dtype
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.scale
    scores, capped = _scores(inputs, dtype)
    p = (scores - _finite(lse).unsqueeze(3)).exp()
    keys, values = (_of_query_heads(x, inputs, dtype) for x in (k, v))
    delta = delta_of(do, o, lse, dlse)
    ds = p * (do.to(dtype) @ values.transpose(2, 3) - delta.unsqueeze(3))
    dbias = ds if bias_grad else None
    dslopes = dlog = None
    if inputs.slopes is not None:
        dslopes = -(ds * _distances(inputs.graph, dtype, ds.device)).sum(3)
    if run_grads:
        dlog = _run_grads(ds, inputs.graph)
    if inputs.softcap is not None:
        ds = ds * (1 - (capped / inputs.softcap).square())
    dq = scale * (ds @ keys)
    dk = scale * (ds.transpose(2, 3) @ q.to(dtype)).unflatten(1, (k.shape[1], -1)).sum(2)
    dv = (p.transpose(2, 3) @ do.to(dtype)).unflatten(1, (k.shape[1], -1)).sum(2)
    dsinks = None if inputs.sinks is None else sinks_grad(inputs.sinks, lse, delta)
    sums = (dq.sum(2), dk.sum(2), dv.sum(2)) if token_sums else (None, None, None)
    if not wide:
        dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    grads = AttentionGrads(dq, dk, dv, dsinks, dslopes, dlog, *sums)._replace(dbias=dbias)
    return grads._replace(squares=squared_norms(dq, dk, dv)) if squares else grads


def delta_of(do: Tensor, o: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """`[B, H, T]`, dtype of lse: ``rowsum(do o) - dlse``."""
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(3)
    return delta if dlse is None else delta - dlse.to(lse.dtype)


def needs_wide_o(q: Tensor, sinks: Tensor | None, slopes: Tensor | None) -> bool:
    """Whether the backward needs o before it is rounded to the 16 bits of q.

    Gradients of sinks and slopes are sums over all queries, in which the rounding of o stays.
    """
    return q.dtype.itemsize == 2 and not (sinks is None and slopes is None)


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """`[B, H, T]`, dtype of lse: ``-e^(sink - lse_i) delta_i``; a sink's value is 0."""
    p = (sinks.to(lse.dtype).unsqueeze(2) - _finite(lse)).exp()
    return -(p * delta.masked_fill(lse == -math.inf, 0.0))


def squared_norms(*grads: Tensor) -> Tensor:
    """`[B]`, float64: the squared norm of each sample's gradients `[B, ...]`, all together."""
    norms = [torch.linalg.vector_norm(x, dim=(1, 2, 3), dtype=torch.float64) for x in grads]
    return torch.stack(norms).square().sum(0)


def _of_query_heads(x: Tensor, inputs: AttentionInputs, dtype: torch.dtype) -> Tensor:
    """`[B, H, S, D]`: keys or values, repeated for the query heads that read them."""
    return x.to(dtype).repeat_interleave(inputs.q.shape[1] // x.shape[1], dim=1)


def _scores(inputs: AttentionInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[B, H, T, S]` twice: scores with all that is added to them, and without, after the bound.

    Added are bias, slopes and the log of the multiplicity, -inf where nothing is seen.
    """
    q, graph, key_range = inputs.q, inputs.graph, inputs.key_range
    keys = _of_query_heads(inputs.k, inputs, dtype)
    scores = inputs.scale * (q.to(dtype) @ keys.transpose(2, 3))
    if inputs.softcap is not None:
        scores = inputs.softcap * (scores / inputs.softcap).tanh()
    capped = scores
    if inputs.bias is not None:
        scores = scores + inputs.bias.to(dtype)
    if inputs.slopes is not None:
        distances = _distances(graph, dtype, q.device)
        scores = scores - inputs.slopes.to(dtype)[:, :, None, None] * distances
    scores = scores + graph.multiplicity().to(q.device).to(dtype).log()
    if key_range is not None:
        position = torch.arange(keys.shape[2], device=q.device)
        seen = (position >= key_range[:, :1]) & (position < key_range[:, 1:])
        scores = scores.masked_fill(~seen[:, None, None, :], -math.inf)
    return scores, capped


def _distances(graph: TileGraph, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[T, S]`: |i - j|, of positions in the whole sequence."""
    queries = torch.arange(graph.num_queries, device=device)
    keys = torch.arange(graph.num_keys, device=device)
    return (queries.unsqueeze(1) - keys + graph.distance_shift).abs().to(dtype)


def _finite(lse: Tensor) -> Tensor:
    """The lse, +inf for fully masked rows, so that their probabilities are 0."""
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
