"""Attention over tile graphs on the CPU, by the C++ kernels of attention_cpu.cpp.

Memory is linear in T. Where there is no compiler, the plain twin runs (`native.library` warns).

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from . import attention_reference, native
from .attention_reference import AttentionGrads, squared_norms
from .tile_graph import TileGraph

# Products of numbers that are worth another thread.
_WORK_OF_A_THREAD = 2**22


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
    """See `attention_reference.attention_forward`.

    Computes in float32 (float64 for float64). The same bits each time, whatever the threads.
    """
    library = native.library()
    if library is None:
        return attention_reference.attention_forward(
            q, k, v, graph, scale, sinks=sinks, slopes=slopes, key_range=key_range, wide=wide
        )
    dtype = torch.promote_types(q.dtype, torch.float32)
    o = q.new_zeros(q.shape, dtype=dtype)
    lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    call = _Call(library, q, k, v, graph, scale, slopes, key_range, dtype)
    call.run("forward", o=o, lse=lse)
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
    """See `attention_reference.attention_backward`.

    The same bits each time with as many threads. dk and dv are summed by one thread for each
    sample and key head; threads beyond these take parts of the queries, and memory for dk and dv.
    """
    library = native.library()
    if library is None:
        return attention_reference.attention_backward(
            *(do, dlse, q, k, v, o, lse, graph, scale),
            sinks=sinks,
            slopes=slopes,
            key_range=key_range,
            token_sums=token_sums,
            run_grads=run_grads,
            squares=squares,
            wide=wide,
        )
    dtype = lse.dtype
    call = _Call(library, q, k, v, graph, scale, slopes, key_range, dtype)
    parts = call.parts(q.shape[0] * k.shape[1])
    dq = q.new_zeros(q.shape, dtype=dtype)
    dk, dv = (x.new_zeros(parts, *x.shape[:3], call.padded, dtype=dtype) for x in (k, v))
    dslopes = dweights = None
    if slopes is not None:
        dslopes = q.new_zeros(parts, *q.shape[:2], dtype=torch.float64)
    if run_grads:
        num_runs = graph.rows.runs.shape[0]
        dweights = q.new_zeros(parts, *k.shape[:2], num_runs, dtype=torch.float64)
    call.run(
        "backward",
        o_in=_aligned(o, dtype),
        dout=_aligned(do, dtype),
        lse_in=lse.contiguous(),
        dlse=None if dlse is None else dlse.to(dtype).contiguous(),
        **{"dq": dq, "dk": dk, "dv": dv, "dslopes": dslopes, "dweights": dweights},
    )
    dk, dv = (x.sum(0) if parts > 1 else x[0] for x in (dk, dv))
    dk, dv = dk[..., : q.shape[3]], dv[..., : q.shape[3]]
    grads = AttentionGrads(
        dq,
        dk,
        dv,
        dsinks=None if sinks is None else _sinks_grad(sinks, lse, do, o, dlse),
        dslopes=None if dslopes is None else dslopes.sum(0).to(dtype),
        dlog_multiplicity=None if dweights is None else dweights.sum((0, 1, 2)).to(dtype),
    )
    if token_sums:
        grads = grads._replace(q_sum=dq.sum(2), k_sum=dk.sum(2), v_sum=dv.sum(2))
    if not wide:
        dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    grads = grads._replace(dq=dq, dk=dk.contiguous(), dv=dv.contiguous())
    return grads._replace(squares=squared_norms(dq, dk, dv)) if squares else grads


def _sinks_grad(sinks: Tensor, lse: Tensor, do: Tensor, o: Tensor, dlse: Tensor | None) -> Tensor:
    """`[B, H]`: a sink is a key whose value is 0, so that its ds is -p delta."""
    dtype = lse.dtype
    delta = (do.to(dtype) * o.to(dtype)).sum(3)
    if dlse is not None:
        delta -= dlse.to(dtype)
    blind = lse == -math.inf
    p = (sinks.to(dtype).unsqueeze(2) - lse.masked_fill(blind, math.inf)).exp()
    return -(p * delta).sum(2)


def _aligned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the computation; the numbers of a token next to each other."""
    x = x.to(dtype)
    return x if x.stride(3) == 1 else x.contiguous()


class _Tokens(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("sample", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("token", ctypes.c_int64),
    ]


class _Problem(ctypes.Structure):
    """The fields of attention_cpu.cpp's Problem, in its order."""

    _fields_ = [
        *((name, _Tokens) for name in ("q", "k", "v", "o_in", "dout")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("o", "lse", "lse_in", "dlse", "dq", "dk", "dv", "dslopes", "dweights"),
                *("scratch", "groups", "runs", "weights", "variants", "row_variants"),
                *("key_range", "slopes"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("variant_sample", "variant_head", "batch", "heads", "key_heads", "queries"),
                *("keys", "dim", "padded", "num_runs", "distance_shift", "threads", "parts"),
            )
        ),
        ("scale", ctypes.c_double),
    ]


class _Call:
    """The inputs of both directions as the kernels read them, and what holds their memory."""

    def __init__(
        self,
        library: ctypes.CDLL,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        graph: TileGraph,
        scale: float,
        slopes: Tensor | None,
        key_range: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._library = library
        self._dtype = dtype
        self._held: list[Tensor] = []
        self._problem = _Problem()
        lanes = library.vector_bytes() // dtype.itemsize
        self.padded = -(-q.shape[3] // lanes) * lanes
        side = graph.rows
        variants = graph.row_variants.expand(q.shape[:2])
        batch, heads, queries, dim = q.shape
        pairs = batch * heads * queries * k.shape[2] * dim
        self._set(
            q=_aligned(q, dtype),
            k=_aligned(k, dtype),
            v=_aligned(v, dtype),
            groups=side.groups.contiguous(),
            runs=side.runs.contiguous(),
            weights=side.log_multiplicity.detach().double().contiguous(),
            variants=side.variants.contiguous(),
            row_variants=variants,
            key_range=None if key_range is None else key_range.int().contiguous(),
            slopes=None if slopes is None else slopes.to(dtype).contiguous(),
            variant_sample=variants.stride(0),
            variant_head=variants.stride(1),
            **{"batch": batch, "heads": heads, "queries": queries, "dim": dim},
            key_heads=k.shape[1],
            keys=k.shape[2],
            padded=self.padded,
            num_runs=side.runs.shape[0],
            distance_shift=graph.distance_shift,
            threads=min(torch.get_num_threads(), 1 + pairs // _WORK_OF_A_THREAD),
            parts=1,
            scale=scale,
        )

    def parts(self, units: int) -> int:
        """How many threads share a unit, a sample's key head, in the backward."""
        self._problem.parts = max(1, self._problem.threads // max(1, units))
        return self._problem.parts

    def run(self, direction: str, **tensors: Tensor | None) -> None:
        """Runs the kernel on its further tensors."""
        self._set(**tensors)
        number = "double" if self._dtype == torch.float64 else "float"
        problem = ctypes.byref(self._problem)
        size = getattr(self._library, f"scratch_elements_{number}")(problem)
        elements = self._problem.threads * size
        self._set(scratch=torch.empty(elements, dtype=self._dtype, device="cpu"))
        getattr(self._library, f"{direction}_{number}")(problem)

    def _set(self, **fields: Tensor | int | float | None) -> None:
        for name, value in fields.items():
            if not isinstance(value, Tensor):
                setattr(self._problem, name, value)
                continue
            self._held.append(value)
            if isinstance(getattr(self._problem, name), _Tokens):
                setattr(self._problem, name, _Tokens(value.data_ptr(), *value.stride()[:3]))
            else:
                setattr(self._problem, name, value.data_ptr())
