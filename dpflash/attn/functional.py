"""The attention function: takes q, k and v, and returns o and, with return_lse, the log-sum-exp.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim of
queries and keys, E that of values.
"""

import math
from itertools import pairwise
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.kernels.attention_vendor import OWN

from .. import _validate
from ..patterns import Adaptive, Dense, Pattern, WithinDocuments
from .backend import current_backend, is_in_private_model
from .boundary import Boundary, cross, release_of
from .ops import ReleasedAttention, attend, is_eager

_MAX_HEAD_DIM = 576
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHORT = 2**21  # largest number of multiplications in q k^T for which torch's kernel may run
_DENSE = {False: Dense(causal=False), True: Dense(causal=True)}


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    position_bias: Tensor | None = None,
    boundary: Boundary | None = None,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    return_lse: Literal[True],
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    position_bias: Tensor | None = None,
    boundary: Boundary | None = None,
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    position_bias: Tensor | None = None,
    boundary: Boundary | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention over the keys that a pattern selects, in O(T) memory.

    ``o_i = sum_j m_ij e^(s_ij) v_j / sum_j m_ij e^(s_ij)`` with ``s_ij = softmax_scale * q_i k_j``
    and m_ij the multiplicity of key j for query i. Query head h reads key/value head `h // (H //
    G)`. Strided views with last stride 1 are not copied. An empty batch gives an empty result. o
    and lse are differentiable once, with respect to q, k, v, sinks, alibi_slopes, position_bias.
    Under `torch.autocast` q, k and v are converted to its dtype, as by torch's
    `scaled_dot_product_attention`.

    If there are fewer queries than keys, the queries are the last T of S tokens (except in dense
    attention that is not causal): query t has position ``S - T + t``, as in decoding with a
    key/value cache. Use key_padding_mask if the samples of a cache differ in length.

    Args:
        q: `[B, H, T, D]`, float16, bfloat16, float32 (float64 on the CPU). Heads come
            before tokens, as in torch and unlike in flash-attn: with `[B, T, H, D]` the function
            would attend over heads, which no check can detect. D is at most 576; on a GPU, D or E
            above 256 runs in plain torch, in O(TS) memory.
        k: `[B, G, S, D]`, dtype and device of `q`; G divides H.
        v: `[B, G, S, E]`, dtype and device of `q`; E is at most 576.
        pattern: a pattern of `dpflash.patterns`; None means dense attention.
        causal: for dense attention, whether no query sees a key after its own position; a pattern
            has its own argument `causal`.
        softmax_scale: factor of the scores; None means `1 / sqrt(D)`.
        softcap: a positive bound c of the scores: ``c tanh(s_ij / c)`` replaces s_ij
            (Gemma 2, arXiv:2408.00118, section 2); None means no bound.
        return_lse: also return the log-sum-exp of each query's scores.
        key_padding_mask: `[B, S]`, bool, True if a key is *not* attended to, as in torch's
            MultiheadAttention (a tokenizer's attention_mask has the opposite meaning). The
            unmasked keys of a sample must be consecutive.
        sinks: `[H]` or `[B, H]`: the score of an extra key, whose value is 0.
        alibi_slopes: `[H]` or `[B, H]`: ``slope * |i - j|`` is subtracted from the scores (ALiBi,
            Press et al., arXiv:2108.12409, equation in section 3).
        position_bias: floating point, broadcastable to `[B, H, T, S]` (4 dimensions): added to
            the scores after `softcap`. -inf masks a key; if all biases of a query are
            `torch.finfo(...).min`, its output is the mean of v. A bias that the batch shares, as
            in T5, is not copied, but its gradient is computed per sample, `[B, H, T, S]`.
        boundary: clip the gradients of q, k and v and add noise before they are returned; a
            sample's three gradients are clipped by their joint norm. For the guarantee see
            `dpflash.private_boundary`. With an `Adaptive` pattern, gradients through the choice of
            blocks are included. Sinks, alibi_slopes and position_bias cannot be passed with a
            boundary, which does not clip their gradients.

    Returns:
        o: `[B, H, T, E]`, dtype of `q`; with `return_lse` the pair (o, lse), where lse is
        `[B, H, T]`, natural logarithm, float32 (float64 for float64 inputs), differentiable.
        A query with no key and no sink has o = 0, lse = -inf and gradient 0.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; the pattern does not support T or H;
            T > S with a pattern or causal=True; causal=True with a pattern that is not causal;
            softmax_scale is not finite; softcap is not positive; the padding mask has a hole.

    Guarantees:
        Sample i of the result depends on sample i of q, k and v (and row i of key_padding_mask,
        sinks, alibi_slopes and position_bias) alone. Results are bitwise reproducible, except
        gradients under ``attention_backend("fast")``. On a CPU, torch's own
        `scaled_dot_product_attention` computes dense calls without further options in two cases:
        one query and no gradient; or, outside of private models, one short sample (up to 2^21
        multiplications). The number of samples may then change the last bits; "own" prevents this.
    """
    if not isinstance(q, Tensor) or torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q), autocast(k), autocast(v)
    require_fitting(q, k, v, equal_head_dims=False)
    pattern = resolve_pattern(pattern, causal, q.shape[2], k.shape[2])
    _validate.optional(_validate.finite, softmax_scale=softmax_scale)
    scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
    softcap = _require_softcap(softcap)
    sinks = per_head("sinks", sinks, q)
    alibi_slopes = per_head("alibi_slopes", alibi_slopes, q)
    bias = None if position_bias is None else _bias(position_bias, q, k)
    if key_padding_mask is not None:
        _require_padding(key_padding_mask, k)
    extras = (sinks, alibi_slopes, bias, key_padding_mask, softcap, boundary)
    if type(pattern) is Dense and not return_lse and all(x is None for x in extras):
        if _runs_in_torch(q, k, v, pattern.causal):
            is_causal, grouped = pattern.causal and q.shape[2] > 1, q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped
            )
    if boundary is not None:
        if not isinstance(boundary, Boundary):
            raise ValueError(
                f"boundary={boundary!r}: expected dpflash.Boundary(max_grad_norm=..., "
                "noise_multiplier=...) or None"
            )
        if sinks is not None or alibi_slopes is not None or bias is not None:
            raise ValueError(
                "boundary together with sinks, alibi_slopes or position_bias, whose gradients it "
                "does not clip: leave these three out, or use PrivacyEngine in place of boundary"
            )
        adaptive = pattern.inner if isinstance(pattern, WithinDocuments) else pattern
        if not isinstance(adaptive, Adaptive):
            o, lse = ReleasedAttention.apply(
                release_of(boundary), q, k, v, key_padding_mask, pattern.key, scale, softcap
            )
            return (o, lse) if return_lse else o
        # Not within attention: the choice of blocks adds to the gradients of q and k.
        q, k, v = cross(boundary, q, k, v)
    if isinstance(pattern, WithinDocuments) and isinstance(pattern.inner, Adaptive):
        # Blocks are chosen within a document, from its own queries and keys.
        named: dict[str, Any] = {"softmax_scale": scale, "softcap": softcap}
        named |= {"sinks": sinks, "alibi_slopes": alibi_slopes}
        o, lse = _document_by_document(q, k, v, pattern, key_padding_mask, bias, named)
        return (o, lse) if return_lse else o
    if torch.compiler.is_compiling():
        # Dynamo refuses one tensor as two arguments of an autograd.Function.
        k = k.view_as(k) if k is q else k
        v = v.view_as(v) if v is q or v is k else v
    blocks = gates = None
    if isinstance(pattern, Adaptive):
        if key_padding_mask is not None:
            raise ValueError(
                "key_padding_mask with pattern=Adaptive(...): padding would enter the means by "
                "which blocks are chosen; use another pattern, or batch samples of one length"
            )
        blocks, gates = pattern.choose(q, k, scale)
    tensors = (q, k, v, sinks, alibi_slopes, key_padding_mask, blocks, gates, bias)
    o, lse = attend(*tensors, pattern.key, scale, softcap, return_lse=return_lse)
    return (o, lse) if return_lse else o


def _runs_in_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return whether torch's kernel is faster and as good, for example for a short CPU sample.

    For a short sample, calling dpflash's kernels from Python takes longer than torch's whole call.
    The kernels vectorize over queries, so a single query leaves most of a vector empty.
    """
    if not q.is_cpu or 0 in k.shape or q.shape[3] != v.shape[3]:
        return False
    trains = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    alone = q.shape[2] == 1
    if trains or not alone:
        # In private models no bit of a sample's result may depend on the number of samples.
        short = q.shape[0] == 1 and q.numel() * k.shape[2] <= _SHORT
        if not short or q.dtype not in (torch.float32, torch.float64) or is_in_private_model():
            return False
        # Checkpointing compares the tensors that a forward and its recomputation save, so both
        # must use the same kernel. But `is_in_private_model` is False during the recomputation.
        if trains and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return False
        # With fewer queries than keys, torch's causal attention takes queries as the first tokens.
        if causal and not alone and q.shape[2] != k.shape[2]:
            return False
    return current_backend() != OWN and is_eager((q, k, v))


def _document_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: WithinDocuments,
    key_padding_mask: Tensor | None,
    bias: Tensor | None,
    named: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    pattern._check_size(q.shape[2], q.shape[1])
    results = []
    for begin, end in pairwise(pattern.cu_seqlens):
        tokens = slice(begin, end)
        of_document = attention(
            *(x[:, :, tokens] for x in (q, k, v)),
            pattern=pattern.inner,
            return_lse=True,
            key_padding_mask=None if key_padding_mask is None else key_padding_mask[:, tokens],
            position_bias=None if bias is None else bias[:, :, tokens, tokens],
            **named,
        )
        results.append(of_document)
    outputs, lses = zip(*results, strict=True)
    return torch.cat(outputs, 2), torch.cat(lses, 2)


def resolve_pattern(pattern: object, causal: bool, queries: int, keys: int) -> Pattern:
    """Return the call's pattern; raise if it does not support these numbers of tokens."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r}: expected True or False; pass one of the two")
    resolved = _DENSE[causal] if pattern is None else require_pattern(pattern)
    if causal and not resolved.causal:
        raise ValueError(
            f"causal=True with pattern={type(resolved).__name__}: the pattern is not causal; "
            "build it with causal=True"
        )
    plain = isinstance(resolved, Dense) and not resolved.causal
    if queries > keys and not plain:
        name = f"causal={causal}" if pattern is None else f"pattern={type(pattern).__name__}"
        raise ValueError(
            f"{name} with {queries} queries and {keys} keys: expected no more queries than keys, "
            "since the queries are the last tokens of the sequence; pass the keys of all queries, "
            "or use dense attention that is not causal"
        )
    inner = resolved.inner if isinstance(resolved, WithinDocuments) else resolved
    if queries < keys and isinstance(inner, Adaptive):
        raise ValueError(
            f"pattern={type(pattern).__name__} with {queries} queries and {keys} keys: expected "
            "equal numbers, since blocks of queries choose among the blocks of the sequence; pass "
            "the whole sequence"
        )
    return resolved


def autocast(x: Tensor) -> Tensor:
    """Convert to autocast's dtype if autocast is on, as torch's own attention does."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _require_softcap(softcap: object) -> float | None:
    """Return softcap as a float, or None; raise unless it is positive and finite, or None."""
    if softcap is None:
        return None
    _validate.finite(softcap=softcap)
    # Kernels compute scores in float32.
    if not float(softcap) >= torch.finfo(torch.float32).tiny:  # type: ignore[arg-type]
        raise ValueError(
            f"softcap={softcap!r}: expected a positive number, of at least the smallest normal "
            "number of float32; pass None for no bound"
        )
    return float(softcap)  # type: ignore[arg-type]


def _bias(bias: object, q: Tensor, k: Tensor) -> Tensor:
    """Convert a bias to the dtype of the scores and expand it to `[B, H, T, S]`."""
    shape = (*q.shape[:3], k.shape[2])
    expected = f"expected [B, H, T, S]={list(shape)}, or 1 in place of any of these"
    if not isinstance(bias, Tensor):
        raise ValueError(f"position_bias is a {type(bias).__name__}: {expected}")
    sizes = zip(bias.shape, shape, strict=False)
    if bias.ndim != 4 or any(own not in (1, size) for own, size in sizes):
        raise ValueError(f"position_bias has shape {tuple(bias.shape)}: {expected}")
    if not bias.is_floating_point() or bias.device != q.device:
        raise ValueError(
            f"position_bias is {bias.dtype} on {bias.device}: expected floating point on "
            f"{q.device}; use position_bias.float().to(q.device)"
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    if bias.dtype == torch.float64 and dtype != torch.float64:
        # A bias of torch.finfo(torch.float64).min masks no key, so do not convert it to -inf.
        finite = torch.finfo(dtype)
        bias = torch.where(bias.isinf(), bias, bias.clamp(finite.min, finite.max))
    # Convert before expanding: samples share one copy, and the sum of gradients is rounded last.
    return bias.to(dtype).expand(shape)


def require_pattern(pattern: object) -> Pattern:
    """Return the pattern; raise ValueError if the object is not a `Pattern`."""
    if not isinstance(pattern, Pattern):
        shown = repr(pattern) if isinstance(pattern, str | type) else type(pattern).__name__
        raise ValueError(
            f"pattern={shown}: expected None or a pattern such as "
            "dpflash.patterns.SlidingWindow(window=256, causal=True)"
        )
    return pattern


def per_head(name: str, x: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand sinks or slopes, `[H]` or `[B, H]`, to `[B, H]`; None stays None."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: expected a tensor; use torch.as_tensor")
    if tuple(x.shape) not in ((q.shape[1],), tuple(q.shape[:2])):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: expected [H]={[q.shape[1]]} or "
            f"[B, H]={list(q.shape[:2])}; give one number per query head"
        )
    if not x.is_floating_point() or x.device != q.device:
        raise ValueError(
            f"{name} is {x.dtype} on {x.device}: expected floating point on {q.device}; "
            f"use {name}.float().to(q.device)"
        )
    return x.expand(q.shape[:2])


def _require_padding(mask: object, k: Tensor) -> None:
    expected = (
        f"expected [B, S]={[k.shape[0], k.shape[2]]} of torch.bool, True where a key is ignored"
    )
    if not isinstance(mask, Tensor):
        raise ValueError(f"key_padding_mask is a {type(mask).__name__}: {expected}")
    if tuple(mask.shape) != (k.shape[0], k.shape[2]) or mask.dtype != torch.bool:
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}: {expected}"
        )
    if mask.device != k.device:
        raise ValueError(
            f"key_padding_mask is on {mask.device}, k on {k.device}: expected one device; use "
            "key_padding_mask.to(k.device)"
        )


def require_fitting(q: Tensor, k: Tensor, v: Tensor, *, equal_head_dims: bool = True) -> None:
    """Raise ValueError unless shapes, dtypes and devices of q, k and v fit together."""
    if type(q) is type(k) is type(v) is Tensor and q.shape == k.shape == v.shape:
        common = q.dtype == k.dtype == v.dtype and q.is_cpu and k.is_cpu and v.is_cpu
        if common and q.ndim == 4 and q.dtype in _DTYPES:
            if q.shape[1] and 1 <= q.shape[3] <= _MAX_HEAD_DIM:
                return  # skip the checks below, which take longer than a small call
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} is a {type(tensor).__name__}: expected a tensor; use torch.as_tensor"
            )
        if tensor.ndim != 4:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: expected 4 dimensions "
                "[batch, heads, tokens, head_dim]; add missing ones with unsqueeze or unflatten"
            )
        if tensor.dtype not in _DTYPES or (tensor.is_cuda and tensor.dtype == torch.float64):
            raise ValueError(
                f"{name} has dtype {tensor.dtype} on {tensor.device}: expected float16, bfloat16, "
                f"float32, or on the CPU float64; convert it with {name}.float()"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: "
                f"expected one dtype and one device; use {name}.to(q)"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: expected the same batch, heads "
            "and tokens; only the head_dim (dimension 3) of v may differ"
        )
    if equal_head_dims and k.shape[3] != v.shape[3]:
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
    for name, tensor in (("q", q), ("v", v)):
        if not 1 <= tensor.shape[3] <= _MAX_HEAD_DIM:
            raise ValueError(
                f"{name} has head_dim {tensor.shape[3]} (dimension 3): expected 1 to "
                f"{_MAX_HEAD_DIM}; use more heads of a smaller head_dim"
            )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}: expected a number of key/value "
            "heads that divides the number of query heads; heads are dimension 1: if dimension 1 "
            "is tokens, pass q.transpose(1, 2)"
        )
