"""Rotary position embeddings: rotate queries and keys by each token's angles, in one kernel.

Letters: B samples, H query heads, G key heads, T tokens, D head dim.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import native
from .layout import new_like
from .noise_cpu import call, written

# Elements per thread; small calls use fewer threads.
_WORK_OF_A_THREAD = 1 << 18
_CPU_DTYPES = (torch.bfloat16, torch.float32, torch.float64)
_GPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    back: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the coordinate pairs (j, D / 2 + j) of queries and keys, see `rotate`.

    A CPU runs a C++ kernel, a GPU one launch of a Triton kernel. `rotate` runs instead: without a
    compiler or Triton; for float16 on a CPU; for float64 on a GPU; on other devices; in traced or
    transformed functions; and if autograd records a call with `out`. Without `out` the result is
    differentiable any number of times.

    Args:
        q: `[B, H, T, D]`; may be a view.
        k: `[B, G, T, D]`, dtype of q.
        cos: `[T, D / 2]`, cosines of the angles, float32 (float64 for float64).
        sin: sines of the angles, like `cos`.
        back: rotate by the negative angles: the transposed rotation, which the gradient needs.
        out: tensors to write the results to, for instance (q, k); None means new tensors.

    Returns:
        The rotated (q, k), in their dtype, rounded once.

    Guarantees:
        No bit of a sample's result depends on other samples.
    """
    tensors = (q, k, *(out or ()))
    if _is_fused(tensors, cos, sin):
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*tensors, cos, sin)):
            return _turned(q, k, cos, sin, back, out)
        if out is None and not (cos.requires_grad or sin.requires_grad):
            turned: tuple[Tensor, Tensor] = _Rotary.apply(q, k, cos, sin, back)
            return turned
    new_q, new_k = (rotate(x, cos, sin, back=back) for x in (q, k))
    return (new_q, new_k) if out is None else (out[0].copy_(new_q), out[1].copy_(new_k))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """Reference implementation of `apply_rotary` for one tensor.

    ``(a*cos - b*sin, b*cos + a*sin)`` for ``a = x[..., :D / 2]``, ``b = x[..., D / 2:]``.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=3)
    sin = -sin if back else sin
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=3).to(x.dtype)


def is_traced() -> bool:
    """Return whether the current operations are traced, intercepted or transformed."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def _is_fused(tensors: tuple[Tensor, ...], cos: Tensor, sin: Tensor) -> bool:
    """Return whether a kernel can replace `rotate`. `tensors`: q, k and, if given, the outputs."""
    q, k, *outs = tensors
    every = (*tensors, cos, sin)
    if is_traced() or not all(type(x) is Tensor and torch._C._has_storage(x) for x in every):
        return False
    if q.is_cpu:
        serves = q.dtype in _CPU_DTYPES and native.library() is not None
    else:
        serves = q.is_cuda and q.dtype in _GPU_DTYPES and _HAS_TRITON
    wide = torch.promote_types(q.dtype, torch.float32)
    return (
        serves
        and all(x.device == q.device for x in every)
        and all(x.dtype == q.dtype and _has_rows(x) for x in tensors)
        and q.shape[:1] + q.shape[2:] == k.shape[:1] + k.shape[2:]
        and [x.shape for x in outs] in ([], [q.shape, k.shape])
        and all(x.dtype == wide and x.is_contiguous() for x in (cos, sin))
        and cos.shape == sin.shape == (q.shape[2], q.shape[3] / 2)
    )


def _has_rows(x: Tensor) -> bool:
    """Return whether x `[B, H, T, D]` has last stride 1 and no lazy negation."""
    return x.ndim == 4 and x.stride(3) == 1 and not x.is_neg()


def _turned(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    back: bool,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `apply_rotary` by the device's kernel."""
    new_q, new_k = (new_like(q, q.dtype), new_like(k, k.dtype)) if out is None else out
    if q.is_cpu:
        threads = min(torch.get_num_threads(), 1 + (q.numel() + k.numel()) // _WORK_OF_A_THREAD)
        heads = [_Heads(x.data_ptr(), *x.stride()[:3], x.shape[1]) for x in (q, k, new_q, new_k)]
        sizes = q.shape[0], *cos.shape, back, q.dtype == torch.bfloat16, threads
        tables = cos.data_ptr(), sin.data_ptr()
        call("apply_rotary", cos.dtype, _Rotation(*heads, *tables, *sizes))
    else:
        from . import rotary_triton

        rotary_triton.launch(q, k, cos, sin, back, new_q, new_k)
    return written(new_q), written(new_k)


class _Rotary(torch.autograd.Function):
    """`apply_rotary` as an autograd node, whose backward is differentiable too."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        return _turned(q, k, cos, sin, back)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return (*apply_rotary(dq, dk, *ctx.saved_tensors, back=not ctx.back), None, None, None)


class _Heads(ctypes.Structure):
    """The fields of rotary_cpu.cpp's Heads, in its order."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sample", "head", "token", "count")),
    ]


class _Rotation(ctypes.Structure):
    """The fields of rotary_cpu.cpp's Rotation, in its order."""

    _fields_ = [
        *((name, _Heads) for name in ("q", "k", "new_q", "new_k")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((n, ctypes.c_int64) for n in ("batch", "tokens", "pairs", "back", "narrow", "threads")),
    ]
