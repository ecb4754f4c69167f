"""Attention over tile graphs on the CPU, by the C++ kernels of attention_cpu.cpp.

Memory is linear in T. Needs `native.library`; without it `attention` runs `attention_reference`.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim
of queries and keys, E that of values.
"""

from __future__ import annotations

import ctypes
import math

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
    call = _Call(inputs, dtype)
    o = q.new_empty((*q.shape[:3], inputs.v.shape[3]), dtype=dtype)
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    if sinks is not None:
        sinks = sinks.to(dtype).contiguous()
    if not _visits_all_rows(inputs.graph):
        o.zero_()
        lse.copy_(lse.new_tensor(-math.inf) if sinks is None else sinks.unsqueeze(2))
    call.run("forward", sinks=sinks, o=o, lse=lse)
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
    call = _Call(inputs, dtype)
    new_dq = q.new_empty if _visits_all_rows(inputs.graph) else q.new_zeros
    dq = new_dq(q.shape, dtype=dtype)
    dk = k.new_zeros(*k.shape[:3], call.padded, dtype=dtype)
    dv = v.new_zeros(*v.shape[:3], call.value_padded, dtype=dtype)
    dbias = q.new_zeros((*q.shape[:3], k.shape[2]), dtype=dtype) if bias_grad else None
    row_sums = None
    if inputs.slopes is not None:
        row_sums = q.new_zeros((4, *q.shape[:3]), dtype=torch.float64)
    dweights = _RunGrads(inputs.graph, q.shape[:2]) if run_grads else None
    call.run(
        "backward",
        o_in=_aligned(o, dtype),
        dout=_aligned(do, dtype),
        lse_in=lse.contiguous(),
        dlse=None if dlse is None else dlse.to(dtype).contiguous(),
        **{"dq": dq, "dk": dk, "dv": dv, "dbias": dbias},
        row_sums=row_sums,
        dweights=None if dweights is None else dweights.of_heads,
        dweights_of=None if dweights is None else dweights.begin_of_runs,
    )
    dk, dv = dk[..., : k.shape[3]], dv[..., : v.shape[3]]
    needs_delta = sinks is not None or (row_sums is not None and all_keys)
    delta = delta_of(do, o, lse, dlse) if needs_delta else None
    dslopes = None if row_sums is None else -row_sums[2]
    if dslopes is not None and row_sums is not None and delta is not None and all_keys:
        dslopes -= _slopes_error(row_sums, sinks, lse, delta, dlse)
    grads = AttentionGrads(
        dq,
        dk,
        dv,
        dsinks=None if sinks is None or delta is None else sinks_grad(sinks, lse, delta),
        dslopes=None if dslopes is None else dslopes.to(dtype),
        dlog_multiplicity=None if dweights is None else dweights.total().to(dtype),
        dbias=dbias,
    )
    if token_sums:
        grads = grads._replace(q_sum=dq.sum(2), k_sum=dk.sum(2), v_sum=dv.sum(2))
    if not wide:
        dq, dk, dv = dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    grads = grads._replace(dq=dq, dk=dk.contiguous(), dv=dv.contiguous())
    return grads._replace(squares=squared_norms(dq, dk, dv)) if squares else grads


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


def _aligned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype of the computation; the numbers of a token next to each other."""
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
        *((name, _Tokens) for name in ("q", "k", "v", "o_in", "dout", "bias")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("sinks", "slopes", "o", "lse", "lse_in", "dlse", "dq", "dk", "dv"),
                *("dbias", "dweights", "row_sums", "dweights_of"),
                *("groups", "runs", "weights", "variants", "row_variants", "key_range"),
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("variant_sample", "variant_head", "batch", "heads", "key_heads", "queries"),
                *("keys", "dim", "padded", "value_dim", "value_padded"),
                *("distance_shift", "threads"),
            )
        ),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
    ]


_STRIDED = {field[0] for field in _Problem._fields_ if field[1] is _Tokens}


class _Call:
    """Arguments of forward and backward as the C++ kernels read them; keeps their memory alive."""

    def __init__(self, inputs: AttentionInputs, dtype: torch.dtype) -> None:
        q, k, v, graph = inputs.q, inputs.k, inputs.v, inputs.graph
        library = native.library()
        assert library is not None
        self._library = library
        self._dtype = dtype
        tables, problem = _tables(graph)
        self._held: list[Tensor] = [*tables]
        self._problem = _Problem.from_buffer_copy(problem)
        lanes = library.vector_bytes() // dtype.itemsize
        batch, heads, queries, dim = q.shape
        key_heads, keys, value_dim = v.shape[1:]
        self.padded, self.value_padded = (-(-x // lanes) * lanes for x in (dim, value_dim))
        variants = graph.row_variants
        problem = self._problem
        problem.variant_sample = (
            variants.stride(0) if variants.ndim == 2 and len(variants) > 1 else 0
        )
        problem.variant_head = variants.stride(-1)
        problem.batch, problem.heads, problem.queries, problem.dim = batch, heads, queries, dim
        problem.key_heads, problem.keys, problem.value_dim = key_heads, keys, value_dim
        problem.padded, problem.value_padded = self.padded, self.value_padded
        problem.distance_shift = graph.distance_shift
        pairs = batch * heads * queries * keys * dim
        problem.threads = min(torch.get_num_threads(), 1 + pairs // _WORK_OF_A_THREAD)
        problem.scale, problem.softcap = inputs.scale, inputs.softcap or 0.0
        self._set(
            q=_aligned(q, dtype),
            k=_aligned(k, dtype),
            v=_aligned(v, dtype),
            bias=None if inputs.bias is None else _aligned(inputs.bias, dtype),
            row_variants=variants,
            key_range=None if inputs.key_range is None else inputs.key_range.int().contiguous(),
            slopes=None if inputs.slopes is None else inputs.slopes.to(dtype).contiguous(),
        )

    def run(self, direction: str, **tensors: Tensor | None) -> None:
        """Runs the kernel on its further tensors."""
        self._set(**tensors)
        number = "double" if self._dtype == torch.float64 else "float"
        if getattr(self._library, f"{direction}_{number}")(ctypes.byref(self._problem)):
            raise MemoryError(f"attention on the CPU, {direction}: no memory for its threads")

    def _set(self, **fields: Tensor | None) -> None:
        problem = self._problem
        for name, value in fields.items():
            if value is None:
                continue
            if value.is_neg():
                value = value.resolve_neg()
            self._held.append(value)
            if name in _STRIDED:
                setattr(problem, name, (value.data_ptr(), *value.stride()[:3]))
            else:
                setattr(problem, name, value.data_ptr())


def _tables(graph: TileGraph) -> tuple[tuple[Tensor, ...], _Problem]:
    """The tables of the graph's rows, and a problem that points to them and says no more."""
    side = graph.rows
    known: tuple[Side, tuple[Tensor, ...], _Problem] | None = graph.plans.get("cpu")
    if known is not None and known[0] is side:
        return known[1], known[2]
    tables = side.groups, side.runs, side.variants, graph.row_variants
    assert all(table.dtype == torch.int32 for table in tables)
    named = {
        "groups": side.groups.contiguous(),
        "runs": side.runs.contiguous(),
        "weights": side.log_multiplicity.detach().double().contiguous(),
        "variants": side.variants.contiguous(),
    }
    problem = _Problem(**{name: table.data_ptr() for name, table in named.items()})
    held = tuple(named.values())
    if not side.runtime:  # a graph built for one call
        graph.plans["cpu"] = (side, held, problem)
    return held, problem
