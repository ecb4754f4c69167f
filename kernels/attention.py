"""Attention over a tile graph: the tensors' device chooses how it is computed.

Signatures and semantics are those of the reference implementation, `attention_reference.py`.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from . import attention_cpu, attention_reference, native
from .attention_reference import AttentionGrads, squared_norms
from .layout import heads_outside as heads_outside
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
    """See `attention_reference.attention_forward`."""
    q, scale = _positive_scale(q, scale)
    return _backend(q).attention_forward(
        q, k, v, graph, scale, sinks=sinks, slopes=slopes, key_range=key_range, wide=wide
    )


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
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> AttentionGrads:
    """See `attention_reference.attention_backward`.

    Args beyond those of the reference implementation:
        out: where to write dq, dk and dv, for instance views of one buffer; last stride 1.

    Raises:
        ValueError: `out`, whose dtype decides, together with `wide`.
    """
    if wide and out is not None:
        raise ValueError(
            "wide=True together with out: expected one of them, since the dtype of out decides; "
            "pass out of the wanted dtype alone"
        )
    if key_range is not None or graph.rows.leaves_rows_blind(q.shape[2]):
        # A row without key has gradient 0 whatever comes from above, NaN included.
        blind = lse == -math.inf
        do = do.masked_fill(blind.unsqueeze(3), 0.0)
        dlse = None if dlse is None else dlse.masked_fill(blind, 0.0)
    turned, positive = _positive_scale(q, scale)
    backend = _backend(q)
    # Only the Triton kernels write into given buffers.
    where = {} if out is None or q.device.type == "cpu" else {"out": out}
    grads = backend.attention_backward(
        do,
        dlse,
        turned,
        k,
        v,
        o,
        lse,
        graph,
        positive,
        sinks=sinks,
        slopes=slopes,
        key_range=key_range,
        token_sums=token_sums,
        run_grads=run_grads,
        squares=squares,
        wide=wide,
        **where,
    )
    if scale <= 0:
        sign = -1.0 if scale < 0 else 0.0
        q_sum = None if grads.q_sum is None else sign * grads.q_sum
        grads = grads._replace(dq=sign * grads.dq, q_sum=q_sum)
    if squares and scale == 0:
        grads = grads._replace(squares=squared_norms(grads.dq, grads.dk, grads.dv))
    if out is None:
        return grads
    for written, grad in zip(out, (grads.dq, grads.dk, grads.dv), strict=True):
        if written is not grad:
            written.copy_(grad)
    return grads._replace(dq=out[0], dk=out[1], dv=out[2])


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Scores with a scale that is not positive, by another q: -inf * scale must stay -inf."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)


def _backend(q: Tensor) -> ModuleType:
    """The module that runs on q's device; `attention_reference` without a C++ compiler."""
    if q.device.type == "cpu":
        return attention_reference if native.library() is None else attention_cpu
    try:
        from . import attention_launch
    except ImportError as error:
        raise ImportError(
            f"attention on device {q.device} needs triton: pip install 'triton>=3.6', or move the "
            "tensors to the CPU"
        ) from error
    return attention_launch
