"""Attention over tile graphs on the CPU, by the C++ kernels of attention_cpu.cpp.

Memory is linear in T. Needs `native.library`; without it `attention` runs `attention_reference`.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim
of queries and keys, E that of values.
"""

from __future__ import annotations

import math
import struct

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

# Multiplications per thread.
_WORK_OF_A_THREAD = 2**22


def attention_forward(inputs: AttentionInputs, *, wide: bool = False) -> tuple[Tensor, Tensor]:
    """See `attention_reference.attention_forward`.

    Computes in float32 (float64 for float64). No bit of a sample's result depends on the number
    of threads or on other samples.

    Raises:
        MemoryError: no memory for the kernel's own buffers; torch raises for tensors.
    """
    q, sinks = inputs.q, inputs.sinks
    dtype = torch.promote_types(q.dtype, torch.float32)
    o = q.new_empty((*q.shape[:3], inputs.v.shape[3]), dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    if sinks is not None:
        sinks = sinks.to(dtype).contiguous()
    if not _visits_all_rows(inputs.graph):
        o.zero_()
        lse.copy_(lse.new_tensor(-math.inf) if sinks is None else sinks.unsqueeze(2))
    _run("forward", inputs, dtype, sinks=sinks, o=o, lse=lse)
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
    With run_grads one thread works on each sample and key head, otherwise several may.

    Raises:
        MemoryError: no memory for the kernel's own buffers; torch raises for tensors.
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
    _run(
        "backward",
        inputs,
        dtype,
        o_in=o,
        dout=do,
        lse_in=lse.contiguous(),
        dlse=None if dlse is None else dlse.to(dtype).contiguous(),
        **{"dq": dq, "dk": dk, "dv": dv, "dbias": dbias},
        row_sums=row_sums,
        dweights=None if dweights is None else dweights.of_heads,
        dweights_of=None if dweights is None else dweights.begin_of_runs,
    )
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
    """A tensor without the padding of its last vectors."""
    return x if x.shape[3] == dim else x.narrow(3, 0, dim).contiguous()


def _slopes_error(
    row_sums: Tensor, sinks: Tensor | None, lse: Tensor, delta: Tensor, dlse: Tensor | None
) -> Tensor:
    """`[B, H, T]`: the error of dslopes that comes from delta, by which distances are multiplied.

    A row of all keys has ``sum_j p_ij (do_i v_j) = (delta_i + dlse_i) (sum_j p_ij + p_sink)``, so
    that ds and p tell the error of a delta that was computed from a rounded o.

    Args:
        row_sums: `[4, B, H, T]`: sums over keys of ds, p, ds |i - j| and p |i - j|.
        sinks, lse, delta, dlse: of the backward.
    """
    ds, p, _, far = row_sums.unbind(0)
    of_sink = torch.zeros_like(p)
    if sinks is not None:
        of_sink = (sinks.to(p.dtype).unsqueeze(2) - lse).exp()
    error = (delta * of_sink - ds) / (p + of_sink)
    error = error if dlse is None else error + dlse
    return (error * far).masked_fill(p == 0, 0.0)


def _visits_all_rows(graph: TileGraph) -> bool:
    """Whether the kernels write every row of o, lse and dq: they visit no row without a group."""
    return not graph.rows.runtime and graph.rows.is_complete(graph.num_queries)


def _aligned(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A tensor in the dtype of the computation, with the numbers of a token side by side."""
    if x is None:
        return None
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.stride(3) == 1 else x.contiguous()


class _RunGrads:
    """Gradients of the runs' weights: each head sums those of its own variant."""

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
        """`[R]`, float64, over samples and heads."""
        with real_cpu_tensors():
            run = torch.arange(len(self.of_heads))
            run -= self.begin_of_runs.flatten().repeat_interleave(self._lengths)
            total = torch.zeros(self._num_runs, dtype=torch.float64)
            return total.index_add_(0, run, self.of_heads)


# The fields of attention_cpu.cpp's Problem, in its order: tensors with their strides, other
# pointers, sizes, two numbers.
_STRIDED = ("q", "k", "v", "o_in", "dout", "bias")
_POINTERS = (
    *("sinks", "slopes", "o", "lse", "lse_in", "dlse", "dq", "dk", "dv"),
    *("dbias", "dweights", "row_sums", "dweights_of"),
    *("groups", "runs", "weights", "variants", "row_variants", "key_range"),
)
_SIZES = (
    *("variant_sample", "variant_head", "batch", "heads", "key_heads", "queries"),
    *("keys", "dim", "padded", "value_dim", "value_padded", "distance_shift", "threads"),
)
_NUMBERS = ("scale", "softcap")
_PROBLEM = struct.Struct(f"{4 * len(_STRIDED) + len(_POINTERS) + len(_SIZES)}q{len(_NUMBERS)}d")
_ABSENT = (0, 0, 0, 0)


def _padded(dim: int, dtype: torch.dtype) -> int:
    """A head dim, rounded up to whole vectors."""
    library = native.library()
    assert library is not None
    lanes = int(library.vector_bytes()) // dtype.itemsize
    return -(-dim // lanes) * lanes


def _run(
    direction: str, inputs: AttentionInputs, dtype: torch.dtype, **tensors: Tensor | None
) -> None:
    """Run a kernel on its inputs and on further `tensors`, which it reads or writes."""
    graph, bias, slopes = inputs.graph, inputs.bias, inputs.slopes
    batch, heads, queries, dim = inputs.q.shape
    key_heads, keys, value_dim = inputs.v.shape[1:]
    tensors |= {"q": inputs.q, "k": inputs.k, "v": inputs.v, "bias": bias}
    tensors |= {name: _aligned(tensors[name], dtype) for name in _STRIDED if name in tensors}
    tensors["slopes"] = None if slopes is None else slopes.to(dtype).contiguous()
    if inputs.key_range is not None:
        tensors["key_range"] = inputs.key_range.int().contiguous()
    # Not among the tables: a copy of the graph with other variants shares its plans.
    tensors |= {**_tables(graph), "row_variants": graph.row_variants}
    # Holds their memory until the kernel has run.
    held = {name: x.resolve_neg() for name, x in tensors.items() if x is not None}
    variants = graph.row_variants
    pairs = batch * heads * queries * keys * dim
    fields: list[int] = []
    for name in _STRIDED:
        x = held.get(name)
        fields += _ABSENT if x is None else (x.data_ptr(), *x.stride()[:3])
    fields += [held[name].data_ptr() if name in held else 0 for name in _POINTERS]
    problem = _PROBLEM.pack(
        *fields,
        variants.stride(0) if variants.ndim == 2 and len(variants) > 1 else 0,
        *(variants.stride(-1), batch, heads, key_heads, queries, keys),
        *(dim, _padded(dim, dtype), value_dim, _padded(value_dim, dtype)),
        graph.distance_shift,
        min(torch.get_num_threads(), 1 + pairs // _WORK_OF_A_THREAD),
        *(inputs.scale, inputs.softcap or 0.0),
    )
    number = "double" if dtype == torch.float64 else "float"
    if getattr(native.library(), f"{direction}_{number}")(problem):
        raise MemoryError(f"attention on the CPU, {direction}: no memory for its threads")


def _tables(graph: TileGraph) -> dict[str, Tensor]:
    """The tables of the graph's rows, as the kernels read them."""
    side = graph.rows
    known: tuple[Side, dict[str, Tensor]] | None = graph.plans.get("cpu")
    if known is not None and known[0] is side:
        return known[1]
    tables = side.groups, side.runs, side.variants, graph.row_variants
    assert all(table.dtype == torch.int32 for table in tables)
    named = {
        "groups": side.groups.contiguous(),
        "runs": side.runs.contiguous(),
        "weights": side.log_multiplicity.detach().double().contiguous(),
        "variants": side.variants.contiguous(),
    }
    if not side.runtime:  # a graph built for one call
        graph.plans["cpu"] = (side, named)
    return named
