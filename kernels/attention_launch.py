"""Launches the Triton attention kernels: allocation, grids, and sums of their partial results.

Signatures are those of `attention_reference.py`, plus the tensors to write to.
Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim
of queries and keys, E that of values.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
import triton
from torch import Tensor

from . import attention_triton as kernels
from .attention_configs import INTERPRETED, Config, Kernel, architecture, config, precision
from .attention_reference import AttentionGrads, AttentionInputs, sinks_grad, squared_norms
from .layout import is_aligned, new_like, on_device

_LOG2E = math.log2(math.e)
_INTERPRETED = not isinstance(kernels._attention_forward_kernel, triton.JITFunction)


def attention_forward(inputs: AttentionInputs, *, wide: bool = False) -> tuple[Tensor, Tensor]:
    """See `attention_reference.attention_forward`; scale > 0, and o has the memory layout of q."""
    q, k, v = (_unit_stride(x) for x in (inputs.q, inputs.k, inputs.v))
    graph, sinks, slopes, key_range = inputs.graph, inputs.sinks, inputs.slopes, inputs.key_range
    batch, heads, queries, head_dim = q.shape
    complete = graph.rows.is_complete(queries)
    o = _result_like(q, complete, wide, v.shape[3])
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if not complete:
        lse.fill_(-math.inf)
        if sinks is not None:
            lse = torch.maximum(lse, sinks.float().unsqueeze(2))
    sizes = _config("forward", inputs)
    tiles = graph.rows.tiles(sizes.block_m)
    num_tiles = tiles.shape[1]
    if o.numel() and num_tiles:
        with on_device(q):
            kernels._attention_forward_kernel[_grid(num_tiles, batch, heads)](
                q, k, v, o, lse,
                _vector(sinks), _vector(slopes), key_range, inputs.bias,
                tiles, graph.row_variants, graph.rows.run_records(),
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
                *_bias_strides(inputs),
                _sample_stride(graph.row_variants), heads, heads // k.shape[1],
                queries, k.shape[2], num_tiles, _distance_shift(inputs), inputs.scale * _LOG2E,
                _softcap(inputs), **_head_dims(head_dim, v.shape[3], is_aligned(q, k, v, o)),
                **_options(q, sizes),
                HAS_VARIANTS=len(tiles) > 1,
                HAS_SINKS=sinks is not None, HAS_SLOPES=slopes is not None,
                HAS_KEY_RANGE=key_range is not None,
                HAS_SOFTCAP=inputs.softcap is not None, HAS_BIAS=inputs.bias is not None,
            )  # fmt: skip
    return o, lse


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
    """See `attention_reference.attention_backward`; scale > 0.

    Args beyond those of the reference implementation:
        out: tensors to write dq, dk and dv to, for instance views of one buffer; last stride 1.
    """
    do, o, q, k, v = (_unit_stride(x) for x in (do, o, inputs.q, inputs.k, inputs.v))
    inputs = replace(inputs, q=q, k=k, v=v, slopes=_vector(inputs.slopes))
    graph, sinks = inputs.graph, inputs.sinks
    statistics = _row_statistics(o, do, lse.contiguous(), dlse)
    # Triton's products need operands of one dtype; delta was computed from the unrounded do.
    do = do.to(q.dtype)
    if out is None:
        rows_complete = graph.rows.is_complete(q.shape[2])
        cols_complete = graph.cols.is_complete(k.shape[2])
        dq = _result_like(q, rows_complete, wide)
        dk = _result_like(k, cols_complete, wide)
        dv = _result_like(v, cols_complete, wide)
    else:
        dq, dk, dv = out
        for side, grads in ((graph.rows, (dq,)), (graph.cols, (dk, dv))):
            if not side.is_complete(grads[0].shape[2]):
                for grad in grads:
                    grad.zero_()
    dbias = None
    if bias_grad:
        dbias = q.new_zeros((*q.shape[:3], k.shape[2]), dtype=torch.float32)
    rows = do, statistics.view(torch.int64)
    q_sum, dslopes, dlog, q_squares = _launch_dq(
        dq, dbias, *rows, inputs, token_sums=token_sums, run_grads=run_grads, squares=squares
    )
    k_sum, v_sum, kv_squares = _launch_dkdv(
        dk, dv, *rows, inputs, token_sums=token_sums, squares=squares
    )
    of_samples = None
    if q_squares is not None and kv_squares is not None:
        of_samples = q_squares + kv_squares
    dsinks = None if sinks is None else sinks_grad(sinks, lse, statistics[..., 1])
    sums = q_sum, k_sum, v_sum
    return AttentionGrads(dq, dk, dv, dsinks, dslopes, dlog, *sums, of_samples, dbias)


def _row_statistics(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """Return lse in base 2 (+inf in place of -inf) and ``rowsum(o do) - dlse``, `[B, H, T, 2]`."""
    batch, heads, queries, head_dim = o.shape
    statistics = o.new_empty((batch, heads, queries, 2), dtype=torch.float32)
    block = 64
    num_blocks = -(-queries // block)
    if statistics.numel():
        with on_device(o):
            kernels._attention_delta_kernel[_grid(num_blocks, batch, heads)](
                o, do, lse, None if dlse is None else dlse.float().contiguous(), statistics,
                *o.stride()[:3], *do.stride()[:3], heads, queries, num_blocks,
                E=head_dim, BLOCK_E=max(16, 1 << (head_dim - 1).bit_length()), BLOCK_M=block,
                HAS_DLSE=dlse is not None,
            )  # fmt: skip
    return statistics


def _launch_dq(
    dq: Tensor,
    dbias: Tensor | None,
    do: Tensor,
    statistics: Tensor,
    inputs: AttentionInputs,
    *,
    token_sums: bool,
    run_grads: bool,
    squares: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Write dq and dbias.

    Returns:
        The sum of dq over tokens, dslopes, the runs' gradient, the squared norms of dq.
    """
    q, k, v, graph, scale = inputs.q, inputs.k, inputs.v, inputs.graph, inputs.scale
    slopes, key_range = inputs.slopes, inputs.key_range
    batch, heads, queries, head_dim = q.shape
    sizes = _config("dq", inputs)
    side = graph.rows
    tiles = side.tiles(sizes.block_m)
    num_tiles = tiles.shape[1]
    num_runs = side.runs.shape[0]
    places = -(-side.max_length // sizes.block_m)
    # Variants may have fewer tiles than `num_tiles`: entries that no tile writes must be 0.
    zeros = functools.partial(torch.zeros, dtype=torch.float32, device=q.device)
    q_sums = zeros((batch, heads, num_tiles, head_dim)) if token_sums else None
    slope_sums = zeros((batch, heads, queries)) if slopes is not None else None
    run_sums = zeros((places, num_runs)) if run_grads else None
    partial = zeros((batch, heads * num_tiles), dtype=torch.float64) if squares else None
    if dq.numel() and num_tiles:
        with on_device(q):
            kernels._attention_dq_kernel[_grid(num_tiles, batch, heads)](
                q, k, v, do, statistics, dq,
                slopes, key_range, inputs.bias, dbias, q_sums, slope_sums, run_sums, partial,
                tiles, graph.row_variants, side.run_records(),
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3],
                *dq.stride()[:3], *_bias_strides(inputs),
                _sample_stride(graph.row_variants), heads, heads // k.shape[1],
                queries, k.shape[2], num_tiles, num_runs,
                _distance_shift(inputs), scale, scale * _LOG2E, _softcap(inputs),
                **_head_dims(head_dim, v.shape[3], is_aligned(q, k, v, do, dq)),
                **_options(q, sizes),
                HAS_VARIANTS=len(tiles) > 1,
                HAS_SLOPES=slopes is not None, HAS_KEY_RANGE=key_range is not None,
                HAS_SOFTCAP=inputs.softcap is not None, HAS_BIAS=inputs.bias is not None,
                BIAS_GRAD=dbias is not None,
                TOKEN_SUMS=token_sums, RUN_GRADS=run_grads, SQUARES=squares,
            )  # fmt: skip
    return (
        None if q_sums is None else q_sums.sum(2),
        slope_sums,
        None if run_sums is None else run_sums.sum(0),
        None if partial is None else partial.sum(1),
    )


def _launch_dkdv(
    dk: Tensor,
    dv: Tensor,
    do: Tensor,
    statistics: Tensor,
    inputs: AttentionInputs,
    *,
    token_sums: bool,
    squares: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Write dk and dv; return their sums over tokens and their squared norms.

    If query heads of one key head use different variants, each query head has its own program. The
    results of these query heads are then added, and norms are computed from the sums.
    """
    q, k, v, graph, scale = inputs.q, inputs.k, inputs.v, inputs.graph, inputs.scale
    slopes, key_range = inputs.slopes, inputs.key_range
    batch, heads, queries, head_dim = q.shape
    groups, keys = k.shape[1:3]
    sizes = _config("dkdv", inputs)
    value_dim = v.shape[3]
    side = graph.cols
    tiles = side.tiles(sizes.block_m)
    num_tiles = tiles.shape[1]
    shared = graph.heads_share_cols(heads // groups)
    heads_per_program = heads // groups if shared else 1
    results = dk, dv
    zeros = functools.partial(torch.zeros, device=q.device)
    if not shared:
        dk = zeros((batch, heads, keys, head_dim), dtype=torch.float32)
        dv = zeros((batch, heads, keys, value_dim), dtype=torch.float32)
    programs = heads // heads_per_program
    k_sums = v_sums = None
    if token_sums:
        of_tiles = (batch, programs, num_tiles)
        k_sums = zeros((*of_tiles, head_dim), dtype=torch.float32)
        v_sums = zeros((*of_tiles, value_dim), dtype=torch.float32)
    partial = None
    if squares and shared:
        partial = zeros((batch, programs * num_tiles), dtype=torch.float64)
    if dk.numel() and num_tiles:
        with on_device(q):
            kernels._attention_dkdv_kernel[_grid(num_tiles, batch, programs)](
                q, k, v, do, statistics, dk, dv,
                slopes, key_range, inputs.bias, k_sums, v_sums, partial,
                tiles, graph.col_variants, side.run_records(),
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3],
                *dk.stride()[:3], *dv.stride()[:3], *_bias_strides(inputs),
                _sample_stride(graph.col_variants), heads, heads // groups, heads_per_program,
                queries, num_tiles, _distance_shift(inputs), scale, scale * _LOG2E,
                _softcap(inputs),
                **_head_dims(head_dim, value_dim, is_aligned(q, k, v, do, dk, dv)),
                **_options(q, sizes),
                HAS_VARIANTS=len(tiles) > 1,
                HAS_SLOPES=slopes is not None, HAS_KEY_RANGE=key_range is not None,
                HAS_SOFTCAP=inputs.softcap is not None, HAS_BIAS=inputs.bias is not None,
                TOKEN_SUMS=token_sums, SQUARES=partial is not None,
            )  # fmt: skip
    if not shared:
        for result, per_query_head in zip(results, (dk, dv), strict=True):
            result.copy_(per_query_head.unflatten(1, (groups, -1)).sum(2))
    of_samples = None
    if squares:
        of_samples = squared_norms(*results) if partial is None else partial.sum(1)
    if k_sums is None or v_sums is None:
        return None, None, of_samples
    of_groups = (batch, groups, programs // groups * num_tiles)
    k_sum = k_sums.reshape(*of_groups, head_dim).sum(2)
    return k_sum, v_sums.reshape(*of_groups, value_dim).sum(2), of_samples


def _grid(num_tiles: int, batch: int, heads: int) -> tuple[int]:
    """Return the grid with one program for each tile of each head of each sample."""
    programs = num_tiles * batch * heads
    if programs >= 2**31:
        raise ValueError(
            f"{batch} samples x {heads} heads x {num_tiles} tiles: expected fewer than 2^31 "
            "programs; split the batch"
        )
    return (programs,)


def _distance_shift(inputs: AttentionInputs) -> int:
    """Return the graph's `distance_shift`; kernels without slopes do not read it."""
    return 0 if inputs.slopes is None else inputs.graph.distance_shift


def _sample_stride(variants: Tensor) -> int:
    """Return the stride between the variants of two samples; 0 if the samples share them."""
    return variants.shape[1] if variants.ndim == 2 else 0


def _softcap(inputs: AttentionInputs) -> float:
    """Return the softcap in base 2; kernels without softcap do not read it."""
    return 0.0 if inputs.softcap is None else inputs.softcap * _LOG2E


def _bias_strides(inputs: AttentionInputs) -> tuple[int, int, int, int]:
    bias = inputs.bias
    return (0, 0, 0, 0) if bias is None else tuple(bias.stride())  # type: ignore[return-value]


def _head_dims(head_dim: int, value_dim: int, aligned: bool) -> dict[str, int]:
    """Return D and E, and the parts into which kernels divide them."""
    d0, d1 = _parts(head_dim, aligned)
    e0, e1 = _parts(value_dim, aligned)
    return {"D": head_dim, "D0": d0, "D1": d1, "E": value_dim, "E0": e0, "E1": e1}


def _parts(head_dim: int, aligned: bool) -> tuple[int, int]:
    """Cover a head dim by one power of two, or by two if less is wasted, as in 80 = 64 + 16.

    Tensors that are not aligned have one part: Triton 3.6 miscompiles two parts of such tensors
    for sm_90 (seen on an H100; `tests/kernels/test_attention_triton.py` compares both).
    """
    whole = max(16, 1 << (head_dim - 1).bit_length())
    low = whole // 2
    rest = max(16, 1 << (head_dim - low - 1).bit_length()) if head_dim > 16 else 0
    if whole == head_dim or head_dim <= 16 or rest >= low or not aligned:
        return whole, 0
    return low, rest


def _config(kernel: Kernel, inputs: AttentionInputs) -> Config:
    if _INTERPRETED:
        return INTERPRETED
    q, head_dim = inputs.q, max(inputs.q.shape[3], inputs.v.shape[3])
    has_bias = inputs.bias is not None
    return config(kernel, head_dim, q.dtype, architecture(q.device), has_bias=has_bias)


def _options(q: Tensor, sizes: Config) -> dict[str, object]:
    return {
        "BLOCK_M": sizes.block_m,
        "BLOCK_N": sizes.block_n,
        "UPCAST": _INTERPRETED,
        "PRECISION": precision(torch.version.hip is not None),
        "num_warps": sizes.num_warps,
        "num_stages": sizes.num_stages,
        "enable_fp_fusion": True,
    }


def _vector(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _result_like(x: Tensor, complete: bool, wide: bool, head_dim: int | None = None) -> Tensor:
    dtype = torch.float32 if wide else x.dtype
    return new_like(x, dtype, zeros=not complete, head_dim=head_dim)
