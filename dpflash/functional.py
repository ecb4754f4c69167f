"""Attention as a function: q, k and v in, o (and on request its log-sum-exp) out.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim.
"""

import math
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _validate

# Rows of scores held at a time where the log-sum-exp is wanted and no gradient is.
_QUERY_CHUNK = 512


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: object = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: object = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: object = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, `o = softmax(softmax_scale * q k^T) v`, head by head.

    Query head h reads key/value head `h // (H // G)`. Strided views are taken as they are and an
    empty batch gives an empty result.

    Args:
        q: `[B, H, T, D]`, floating point.
        k: `[B, G, S, D]`, dtype and device of `q`; G divides H.
        v: `[B, G, S, D]`, dtype and device of `q`.
        pattern: None, dense attention; other patterns arrive with the kernels.
        causal: query t sees the keys 0..t only; needs T = S.
        softmax_scale: factor of the scores; None means `1 / sqrt(D)`.
        return_lse: also return the log-sum-exp of each query's scaled scores. This path holds
            `T * S` scores a head for the backward pass.

    Returns:
        o: `[B, H, T, D]`, dtype of `q`; with `return_lse` the pair (o, lse), where lse is
        `[B, H, T]`, natural logarithm, float32 (float64 for float64 inputs), differentiable.
        A query with no key has o = 0 and lse = -inf.

    Raises:
        ValueError: for a pattern, for shapes, dtypes or devices that do not fit, for causal
            attention with T != S, and for a softmax_scale that is not finite.

    Guarantees:
        Sample i of the result depends on sample i of q, k and v alone.
    """
    require_no_pattern(pattern)
    _require_fitting(q, k, v)
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"causal=True with {q.shape[2]} queries and {k.shape[2]} keys: which key is a query's "
            "own would be a guess; pass as many queries as keys"
        )
    if softmax_scale is not None:
        _validate.finite(softmax_scale=softmax_scale)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    if return_lse:
        return _attention_with_lse(q, k, v, causal=causal, scale=scale)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def require_no_pattern(pattern: object) -> None:
    """Refuses every pattern but None."""
    if pattern is not None:
        raise ValueError(
            f"pattern={pattern!r}: expected None; only dense attention exists so far, patterns "
            "arrive with the kernels; pass pattern=None, with causal=True for a causal mask"
        )


def _require_fitting(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses shapes, dtypes and devices that do not fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: expected 4 dimensions "
                "[batch, heads, tokens, head_dim]; add missing ones with unsqueeze or unflatten"
            )
        if not tensor.is_floating_point():
            raise ValueError(
                f"{name} has dtype {tensor.dtype}: expected a floating-point tensor; "
                f"convert it with {name}.float()"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: "
                f"expected one dtype and one device; use {name}.to(q)"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: expected equal shapes; "
            "pad the narrower head_dim or project to a common one"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: expected the same batch "
            "(dimension 0) and head_dim (dimension 3); lay q, k and v out as "
            "[batch, heads, tokens, head_dim]"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: expected a number of key/value "
            "heads that divides the number of query heads; heads are dimension 1, so "
            "q.transpose(1, 2) if tokens stand there"
        )


def _attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The same in plain operations, at least in float32, keeping each row's log-sum-exp."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    heads_per_group = q.shape[1] // k.shape[1]
    # Autocast would send these products back to the narrow dtype.
    with torch.autocast(q.device.type, enabled=False):
        keys = k.to(dtype).repeat_interleave(heads_per_group, dim=1)
        values = v.to(dtype).repeat_interleave(heads_per_group, dim=1)
        outputs, lses = [], []
        for start in range(0, max(q.shape[2], 1), _QUERY_CHUNK):
            queries = q[:, :, start : start + _QUERY_CHUNK].to(dtype) * scale
            # Keys behind a causal chunk's last query would only be masked.
            visible = start + queries.shape[2] if causal else keys.shape[2]
            scores = queries @ keys[:, :, :visible].transpose(2, 3)  # [B, H, chunk, visible]
            if causal:
                hidden = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
                scores = scores.masked_fill(hidden.triu(start + 1), -math.inf)
            lse = scores.logsumexp(3)
            outputs.append((scores - lse.unsqueeze(3)).exp() @ values[:, :, :visible])
            lses.append(lse)
        return torch.cat(outputs, dim=2).to(q.dtype), torch.cat(lses, dim=2)
