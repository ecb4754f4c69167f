"""Attention over a tile graph, dispatched to the backend of the tensors' device.

Dense and causal calls on a GPU may run in another library's kernels, see `attention_vendor.py`.

Signatures and semantics are those of the reference implementation, `attention_reference.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from . import attention_configs, attention_cpu, attention_reference, attention_vendor, native
from .attention_reference import AttentionGrads, AttentionInputs, squared_norms


def attention_forward(inputs: AttentionInputs, *, wide: bool = False) -> tuple[Tensor, Tensor]:
    """See `attention_reference.attention_forward`."""
    kernel = attention_vendor.choice_of(inputs).forward
    inputs = _with_positive_scale(inputs)
    if kernel == attention_vendor.OWN:
        return _backend(inputs).attention_forward(inputs, wide=wide)
    return attention_vendor.attention_forward(inputs, kernel, wide=wide)


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
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> AttentionGrads:
    """See `attention_reference.attention_backward`.

    Args beyond those of the reference implementation:
        out: tensors to write dq, dk and dv to, for instance views of one buffer; last stride 1.

    Raises:
        ValueError: `out` and `wide` are both given: `out` already determines the gradients' dtype.
    """
    if wide and out is not None:
        raise ValueError(
            "wide=True together with out: the dtype of out already determines the dtype of the "
            "gradients; pass out with the wanted dtype, and leave wide out"
        )
    q, scale = inputs.q, inputs.scale
    masks = inputs.key_range is not None or inputs.bias is not None
    if masks or inputs.graph.rows.has_fully_masked_rows(q.shape[2]):
        # A fully masked row has gradient 0 for every do, NaN included.
        fully_masked = lse == -math.inf
        do = do.masked_fill(fully_masked.unsqueeze(3), 0.0)
        dlse = None if dlse is None else dlse.masked_fill(fully_masked, 0.0)
    kernel = attention_vendor.choice_of(
        inputs,
        has_dlse=dlse is not None,
        only_grads=not (token_sums or run_grads or bias_grad),
    ).backward
    given = (do, dlse, o, lse, _with_positive_scale(inputs))
    if kernel != attention_vendor.OWN:
        grads = attention_vendor.attention_backward(*given, kernel, squares=squares, wide=wide)
    else:
        backend = _backend(inputs)
        # Only the Triton kernels write into given buffers.
        triton = backend not in (attention_cpu, attention_reference)
        where = {"out": out} if out is not None and triton else {}
        grads = backend.attention_backward(
            *given,
            token_sums=token_sums,
            run_grads=run_grads,
            bias_grad=bias_grad,
            squares=squares,
            wide=wide,
            all_keys=all_keys,
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


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Merge the results over further keys into o and lse, in place.

    ``lse' = log(e^lse + e^lse_new)``, ``o' = e^(lse - lse') * o + e^(lse_new - lse') * o_new``.
    For a fully masked query, o and lse, or o_new and lse_new, are 0 and -inf.

    Args:
        o: `[B, H, T, E]`, float32 or float64; may be a view.
        lse: `[B, H, T]`, dtype of o; may be a view.
        o_new: `[B, H, T, E]`, the result over keys that o does not include.
        lse_new: `[B, H, T]`.
    """
    total = torch.logaddexp(lse, lse_new)
    pivot = total.masked_fill(total == -math.inf, 0.0)
    o.mul_((lse - pivot).exp().unsqueeze(3))
    o.addcmul_(o_new, (lse_new - pivot).exp().unsqueeze(3))
    lse.copy_(total)


def _with_positive_scale(inputs: AttentionInputs) -> AttentionInputs:
    """Make the scale positive, so -inf * scale is -inf: negate q or, for scale 0, set q to 0."""
    if inputs.scale > 0:
        return inputs
    if inputs.scale < 0:
        return replace(inputs, q=-inputs.q, scale=-inputs.scale)
    return replace(inputs, q=torch.zeros_like(inputs.q), scale=1.0)


def _backend(inputs: AttentionInputs) -> ModuleType:
    """Return the module that runs on q's device.

    It is `attention_reference` on a CPU without a C++ compiler, and on a GPU for head dims above
    256, whose tiles do not fit into shared memory.
    """
    q = inputs.q
    if q.device.type == "cpu":
        return attention_reference if native.library() is None else attention_cpu
    if max(q.shape[3], inputs.v.shape[3]) > attention_configs.HEAD_DIMS[-1]:
        return attention_reference
    try:
        from . import attention_launch
    except ImportError as error:
        raise ImportError(
            f"attention on device {q.device} needs triton: pip install 'triton>=3.6', or move the "
            "tensors to the CPU"
        ) from error
    return attention_launch
