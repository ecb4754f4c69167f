"""Reference implementation of the attention kernels, which holds the whole score matrix.

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
        graph: the tile graph, whose runs give m, the multiplicity of key j for query i in head h.
        scale: factor of the products q k.
        sinks: `[B, H]`, the score of an extra key, whose value is 0.
        slopes: `[B, H]`, slopes of ALiBi (Press et al., arXiv:2108.12409); the distance of query
            i and key j is ``|i - j + graph.distance_shift|``.
        key_range: `[B, 2]`, int32: sample b sees only the keys from ``key_range[b, 0]`` up to, but
            not including, ``key_range[b, 1]``.
        softcap: a bound c of the scores: ``c tanh(scale q k / c)`` replaces scale q k
            (Gemma 2, arXiv:2408.00118, section 2); None means no bound.
        bias: `[B, H, T, S]`, added to the scores after the softcap; any strides, also 0.
        backend: one of `attention_vendor.BACKENDS`, which determines the libraries whose kernels
            may run. A backward uses the backend of its forward.
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
        dq, dk, dv: gradients, with the shapes and dtypes of q, k and v; dtype of lse if `wide`.
        dsinks: `[B, H, T]`: each query's term of the gradient of the sinks, which is the sum over
            the queries; None without sinks.
        dslopes: `[B, H, T]`: each query's term of the gradient of the slopes, or None.
        dlog_multiplicity: `[R]`, for the runs of `graph.rows`, or None.
        q_sum, k_sum, v_sum: `[B, H, D]`, `[B, G, D]`, `[B, G, E]`: dq, dk and dv summed over
            tokens, that is, the per-sample gradients of biases of q, k and v; or None.
        squares: `[B]`, float64: squared L2 norm of each sample's (dq, dk, dv) as returned, that
            is, after rounding; not finite if one of the values is not finite; or None.
        dbias: `[B, H, T, S]`, or None.

    Optional fields except squares are float32 (float64 for float64 inputs).
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
    """Return ``o = sum_j m*e^s*v / sum_j m*e^s``, ``s = scale * q k - slope * |i - j| + bias``.

    Args:
        inputs: see `AttentionInputs`.
        wide: return o in the dtype of lse, without rounding it to the dtype of q.

    Returns:
        o `[B, H, T, E]`, dtype of q, and lse `[B, H, T]`, natural log of the denominator, float32
        (float64 for float64). A query with no key and no sink has o = 0 and lse = -inf.
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
    """Return the gradients from ``ds = p * (do v - delta)``, ``delta = rowsum(do * o) - dlse``.

    Args:
        do: gradient of o, shape of o. The dtypes of do and o may be wider than the dtype of q.
        dlse: gradient of lse, shape of lse; None means 0.
        o, lse: results of `attention_forward`, or results over more keys than the graph has. The
            gradients are then those that flow through the graph's keys.
        inputs: inputs of `attention_forward`.
        token_sums: also return the sums of dq, dk and dv over tokens.
        run_grads: also return the gradient of ``graph.rows.log_multiplicity``.
        bias_grad: also return the gradient of the bias.
        squares: also return the squared norms of (dq, dk, dv).
        wide: return dq, dk and dv in the dtype of lse, without rounding them.
        all_keys: whether o and lse are results over exactly the graph's keys. If so, a backend
            that sums in float64 subtracts delta's error from the slopes' gradient. all_keys has no
            effect here or on a GPU, where float32 sums have an error of the same size.

    Returns:
        See `AttentionGrads`. Sums are taken in float32 before dq, dk and dv are rounded; squared
        norms are taken in float64 after rounding.
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
    """Return ``rowsum(do o) - dlse``, `[B, H, T]`, in the dtype of lse."""
    delta = (do.to(lse.dtype) * o.to(lse.dtype)).sum(3)
    return delta if dlse is None else delta - dlse.to(lse.dtype)


def needs_wide_o(q: Tensor, sinks: Tensor | None, slopes: Tensor | None) -> bool:
    """Return whether the backward needs o before it is rounded to the 16-bit dtype of q.

    Gradients of sinks and slopes are sums over all queries, in which rounding errors of o add up.
    """
    return q.dtype.itemsize == 2 and not (sinks is None and slopes is None)


def sinks_grad(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return ``-e^(sink - lse_i) delta_i``, `[B, H, T]`, dtype of lse; a sink's value is 0."""
    p = (sinks.to(lse.dtype).unsqueeze(2) - _finite(lse)).exp()
    return -(p * delta.masked_fill(lse == -math.inf, 0.0))


def squared_norms(*grads: Tensor) -> Tensor:
    """Return the squared joint norm of each sample's gradients `[B, ...]`: `[B]`, float64."""
    norms = [torch.linalg.vector_norm(x, dim=(1, 2, 3), dtype=torch.float64) for x in grads]
    return torch.stack(norms).square().sum(0)


def _of_query_heads(x: Tensor, inputs: AttentionInputs, dtype: torch.dtype) -> Tensor:
    """Repeat keys or values for the query heads that read them: `[B, H, S, D]`."""
    return x.to(dtype).repeat_interleave(inputs.q.shape[1] // x.shape[1], dim=1)


def _scores(inputs: AttentionInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scores with all added terms, and scores after the softcap only, `[B, H, T, S]` each.

    The added terms are bias, slopes and the log of the multiplicity, -inf for unseen keys.
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
    """Return the distances |i - j| of positions in the whole sequence, `[T, S]`."""
    queries = torch.arange(graph.num_queries, device=device)
    keys = torch.arange(graph.num_keys, device=device)
    return (queries.unsqueeze(1) - keys + graph.distance_shift).abs().to(dtype)


def _finite(lse: Tensor) -> Tensor:
    """Replace -inf, the lse of fully masked rows, by +inf, so that their probabilities are 0."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _run_grads(ds: Tensor, graph: TileGraph) -> Tensor:
    """Sum ds over the pairs of each run: `[R]`."""
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
