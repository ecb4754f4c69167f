"""Attention over tile graphs on the CPU, by the C++ kernels of attention_cpu.cpp.

Memory is O(T). If `native.library` is None, `attention.py` runs `attention_reference` instead.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim
of queries and keys, E that of values.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from . import native
from .attention_reference import (
    AttentionGrads,
    AttentionInputs,
    delta_of,
    sinks_grad,
    squared_norms,
)
from .tile_graph import Side, TileGraph, real_cpu_tensors

# Multiplications per thread; small calls use fewer threads.
_WORK_OF_A_THREAD = 2**22


def attention_forward(inputs: AttentionInputs, *, wide: bool = False) -> tuple[Tensor, Tensor]:
    """See `attention_reference.attention_forward`.

    Computes in float32 (float64 for float64). No bit of a sample's result depends on the number
    of threads or on other samples.

    Raises:
        MemoryError: the kernel has no memory for its own buffers.
        RuntimeError: torch has no memory for a tensor.
    """
    q, sinks = inputs.q, inputs.sinks
    dtype = torch.promote_types(q.dtype, torch.float32)
    o = q.new_empty((*q.shape[:3], inputs.v.shape[3]), dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    if not _visits_all_rows(inputs.graph):
        o.zero_()
        lse.copy_(lse.new_tensor(-math.inf) if sinks is None else sinks.unsqueeze(2))
    _run("forward", inputs, dtype, None, None, (o, lse, *(None,) * 9))
    return o if wide or o.dtype == q.dtype else o.to(q.dtype), lse


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
    """See `attention_reference.attention_backward`.

    No bit of a sample's dq, dk, dv and sums depends on the number of threads or on other samples.
    Several threads may share the work of one sample and key head, except with run_grads.

    Raises:
        MemoryError: the kernel has no memory for its own buffers.
        RuntimeError: torch has no memory for a tensor.
    """
    q, k, v, sinks = inputs.q, inputs.k, inputs.v, inputs.sinks
    dtype = lse.dtype
    new_dq = q.new_empty if _visits_all_rows(inputs.graph) else q.new_zeros
    dq = new_dq(q.shape, dtype=dtype)
    dk = k.new_zeros(*k.shape[:3], _padded(k.shape[3], dtype), dtype=dtype)
    dv = v.new_zeros(*v.shape[:3], _padded(v.shape[3], dtype), dtype=dtype)
    dbias = q.new_zeros((*q.shape[:3], k.shape[2]), dtype=dtype) if bias_grad else None
    row_sums = None
    if inputs.slopes is not None:
        row_sums = q.new_zeros((4, *q.shape[:3]), dtype=torch.float64)
    dweights = _RunGrads(inputs.graph, q.shape[:2]) if run_grads else None
    dlse = None if dlse is None else dlse.to(dtype).contiguous()
    runs = (None, None) if dweights is None else (dweights.of_heads, dweights.begin_of_runs)
    others = (None, None, lse.contiguous(), dlse, dq, dk, dv, dbias, runs[0], row_sums, runs[1])
    _run("backward", inputs, dtype, o, do, others)
    dk, dv = _unpadded(dk, k.shape[3]), _unpadded(dv, v.shape[3])
    needs_delta = sinks is not None or (row_sums is not None and all_keys)
    delta = delta_of(do, o, lse, dlse) if needs_delta else None
    dslopes = None if row_sums is None else -row_sums[2]
    if dslopes is not None and row_sums is not None and delta is not None and all_keys:
        dslopes -= _slopes_error(row_sums, sinks, lse, delta, dlse)
    q_sum, k_sum, v_sum = (x.sum(2) if token_sums else None for x in (dq, dk, dv))
    if not wide and q.dtype != dtype:
        dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    return AttentionGrads(
        dq,
        dk,
        dv,
        dsinks=None if sinks is None or delta is None else sinks_grad(sinks, lse, delta),
        dslopes=None if dslopes is None else dslopes.to(dtype),
        dlog_multiplicity=None if dweights is None else dweights.total().to(dtype),
        q_sum=q_sum,
        k_sum=k_sum,
        v_sum=v_sum,
        squares=squared_norms(dq, dk, dv) if squares else None,
        dbias=dbias,
    )


def _unpadded(x: Tensor, dim: int) -> Tensor:
    return x if x.shape[3] == dim else x.narrow(3, 0, dim).contiguous()


def _slopes_error(
    row_sums: Tensor, sinks: Tensor | None, lse: Tensor, delta: Tensor, dlse: Tensor | None
) -> Tensor:
    """Return the error of dslopes, `[B, H, T]`, if delta was computed from a rounded o.

    For the exact delta, ``sum_j p_ij (do_i v_j) = (delta_i + dlse_i) (sum_j p_ij + p_sink)`` over
    all keys. So the sums of ds and p give the error of delta, and thus of dslopes.

    Args:
        row_sums: `[4, B, H, T]`: sums over keys of ds, p, ds |i - j| and p |i - j|.
        sinks, lse, delta, dlse: arguments and intermediate results of the backward.
    """
    ds, p, _, far = row_sums.unbind(0)
    of_sink = torch.zeros_like(p)
    if sinks is not None:
        of_sink = (sinks.to(p.dtype).unsqueeze(2) - lse).exp()
    error = (delta * of_sink - ds) / (p + of_sink)
    error = error if dlse is None else error + dlse
    return (error * far).masked_fill(p == 0, 0.0)


def _visits_all_rows(graph: TileGraph) -> bool:
    """Return whether each row is in a group. Kernels write o, lse and dq of such rows only."""
    return not graph.rows.runtime and graph.rows.is_complete(graph.num_queries)


def _aligned(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return x in the dtype of the computation and with last stride 1, as the kernels need it."""
    if x is None:
        return None
    x = x if x.dtype == dtype else x.to(dtype)
    return (x if x.stride(3) == 1 else x.contiguous()).resolve_neg()


class _RunGrads:
    """Gradients of the runs' log multiplicities, for each head and each run that it uses."""

    def __init__(self, graph: TileGraph, heads: torch.Size) -> None:
        side = graph.rows
        with real_cpu_tensors():
            variants = graph.row_variants.long().expand(heads).flatten()
            num_runs, num_variants = len(side.runs), len(side.variants) - 1
            group = torch.arange(len(side.groups))
            of_group = torch.bucketize(group, side.variants.long()[1:], right=True)
            begin, end = side.groups[:, 3:].long().unbind(1)
            some = end > begin
            first = torch.full((num_variants,), num_runs)
            last = torch.zeros(num_variants, dtype=torch.int64)
            first.scatter_reduce_(0, of_group[some], begin[some], "amin")
            last.scatter_reduce_(0, of_group[some], end[some], "amax")
            self._num_runs = num_runs
            self._lengths = (last - first).clamp(min=0)[variants]
            begins = self._lengths.cumsum(0) - self._lengths
            self.begin_of_runs = (begins - first.minimum(last)[variants]).view(heads)
            self.of_heads = torch.zeros(int(self._lengths.sum()), dtype=torch.float64)

    def total(self) -> Tensor:
        """Return the gradients summed over samples and heads, `[R]`, float64."""
        with real_cpu_tensors():
            run = torch.arange(len(self.of_heads))
            run -= self.begin_of_runs.flatten().repeat_interleave(self._lengths)
            total = torch.zeros(self._num_runs, dtype=torch.float64)
            return total.index_add_(0, run, self.of_heads)


# The fields of Problem in tiles.h, in its order. _CALL has six tensors with three strides each,
# pointers to other tensors, sizes and two floats. _ROWS has tables of the graph's rows.
_CALL = struct.Struct(f"{6 * 4 + 14 + 11}q2d")
_ROWS = struct.Struct("7q")
_ABSENT = (0, 0, 0, 0)
_NUMBERS = {torch.float32: "float", torch.float64: "double"}


@functools.cache
def _lanes(dtype: torch.dtype) -> int:
    library = native.library()
    assert library is not None
    return int(library.vector_bytes()) // dtype.itemsize


def _padded(dim: int, dtype: torch.dtype) -> int:
    """Round a head dim up to a multiple of the vector length."""
    lanes = _lanes(dtype)
    return -(-dim // lanes) * lanes


def _run(
    direction: str,
    inputs: AttentionInputs,
    dtype: torch.dtype,
    o_in: Tensor | None,
    dout: Tensor | None,
    others: tuple[Tensor | None, ...],
) -> None:
    """Run a kernel, "forward" or "backward". Small calls spend most of their time here.

    `others` are contiguous tensors that the kernel reads or writes: o, lse, lse_in, dlse, dq, dk,
    dv, dbias, dweights, row_sums and dweights_of.
    """
    q, k, v, graph = inputs.q, inputs.k, inputs.v, inputs.graph
    sinks, slopes, key_range = inputs.sinks, inputs.slopes, inputs.key_range
    sinks = None if sinks is None else sinks.to(dtype).contiguous()
    slopes = None if slopes is None else slopes.to(dtype).contiguous()
    key_range = None if key_range is None else key_range.int().contiguous()
    batch, heads, queries, dim = q.shape
    _, key_heads, keys, value_dim = v.shape
    fields: list[int] = []
    # These lists keep the tensors alive until the kernel has run.
    strided = [_aligned(x, dtype) for x in (q, k, v, o_in, dout, inputs.bias)]
    for x in strided:
        fields += _ABSENT if x is None else (x.data_ptr(), *x.stride()[:3])
    pointed = [x if x is None else x.resolve_neg() for x in (sinks, slopes, *others, key_range)]
    fields += [0 if x is None else x.data_ptr() for x in pointed]
    tables = _tables(graph)
    threads = 1 + batch * heads * queries * keys * dim // _WORK_OF_A_THREAD
    problem = _CALL.pack(
        *fields,
        *(batch, heads, key_heads, queries, keys),
        *(dim, _padded(dim, dtype), value_dim, _padded(value_dim, dtype)),
        *(graph.distance_shift, min(torch.get_num_threads(), threads)),
        *(inputs.scale, inputs.softcap or 0.0),
    )
    kernel = getattr(native.library(), f"{direction}_{_NUMBERS[dtype]}")
    if kernel(problem + tables.fields):
        raise MemoryError(f"attention on the CPU, {direction}: no memory for its threads")


class _Tables(NamedTuple):
    """The tables of a graph's rows in the format of the kernels."""

    side: Side
    row_variants: Tensor
    held: tuple[Tensor, ...]
    fields: bytes


def _tables(graph: TileGraph) -> _Tables:
    side, variants = graph.rows, graph.row_variants
    known: _Tables | None = graph.plans.get("cpu")
    # A copy of a graph with other rows or variants shares the graph's `plans`.
    if known is not None and known.side is side and known.row_variants is variants:
        return known
    assert all(x.dtype == torch.int32 for x in (side.groups, side.runs, side.variants, variants))
    weights = side.log_multiplicity.detach().double()
    held = tuple(x.contiguous() for x in (side.groups, side.runs, weights, side.variants))
    of_samples = variants.stride(0) if variants.ndim == 2 and len(variants) > 1 else 0
    pointers = [x.data_ptr() for x in (*held, variants)]
    fields = _ROWS.pack(*pointers, of_samples, variants.stride(-1))
    found = _Tables(side, variants, held, fields)
    if not side.runtime:  # a graph built for one call
        graph.plans["cpu"] = found
    return found
