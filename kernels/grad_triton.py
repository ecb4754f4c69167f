"""Per-sample gradient kernels: products, norms, clipped sums and the reductions of norm layers.

Each program writes its own outputs and visits samples and tokens in order. There are no atomics:
programs write partial sums, which are added outside, so results are bitwise reproducible. Products
accumulate in fp32. Squares are taken and added in fp64, where neither 1e30 overflows nor 1e-30
vanishes.

A sample is a row of T tokens or, with ``spans_ptr`` [U, 2], a span of the only row. A program
starts at the sample's first token, so the result's bits do not depend on the sample's position.

Kernels are not recompiled for another number of samples or tokens.

Letters: B samples, T tokens of a sample, I inputs, O outputs, E width, P elements of a parameter.
"""

import triton
import triton.language as tl

from .noise_triton import ADDRESS, as_fp64, as_key, elements_of, noisy, reciprocal_of_grid
from .reference import (
    FP64_SLACK,
    HARMLESS_CANCELLATION,
    LARGEST_TERMS,
    PRODUCT_BITS,
    STABILITY,
)
from .tensor_table import read_from, row_of, size_of, written_to

# ruff: noqa: N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False


_SLACK = tl.constexpr(FP64_SLACK)
_STABILITY = tl.constexpr(STABILITY)
# The least normal number of fp32.
_LEAST_NORMAL = tl.constexpr(2.0**-126)
_HARMLESS_CANCELLATION = tl.constexpr(HARMLESS_CANCELLATION)
_LARGEST_TERMS = tl.constexpr(LARGEST_TERMS)
_PRODUCT_ROUNDING = tl.constexpr(2.0 ** PRODUCT_BITS[True])


@triton.jit
def _place(spans_ptr, sample, num_tokens):
    """Return a sample's row and first token in it, both int64, and its number of tokens."""
    if spans_ptr is None:
        row = sample
        first = sample * 0
        count = num_tokens
    else:
        row = sample * 0
        first = tl.load(spans_ptr + 2 * sample)
        count = (tl.load(spans_ptr + 2 * sample + 1) - first).to(tl.int32)
    return row, first, count


@triton.jit
def _load_tile(ptr, stride, tokens, num_tokens, columns, num_columns, UPCAST: tl.constexpr):
    """Load ``[tokens, columns]`` of one sample; entries out of range are 0."""
    mask = (tokens < num_tokens)[:, None] & (columns < num_columns)[None, :]
    tile = tl.load(
        ptr + tokens.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0
    )
    if UPCAST:
        # Triton's interpreter computes products of bfloat16 incorrectly.
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _grad_tile(
    x_ptr, dy_ptr, stride_xt, stride_dyt, num_tokens, rows, num_outputs, columns, num_inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``dy_i[:, rows]^T x_i[:, columns]`` of one sample, fp32."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, num_tokens, BLOCK_K):
        tokens = start + tl.arange(0, BLOCK_K)
        dy = _load_tile(dy_ptr, stride_dyt, tokens, num_tokens, rows, num_outputs, UPCAST)
        x = _load_tile(x_ptr, stride_xt, tokens, num_tokens, columns, num_inputs, UPCAST)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sum_of_squares(tile):
    wide = tile.to(tl.float64)
    return tl.sum(wide * wide)


@triton.jit(do_not_specialize=["num_tokens"])
def _per_sample_grad_kernel(
    x_ptr, dy_ptr, spans_ptr, grads_ptr, squares_ptr,
    stride_xb, stride_xt, stride_dyb, stride_dyt,
    num_tokens, num_inputs, num_outputs, tiles_i, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SQUARES: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of ``G_i = dy_i^T x_i`` and, with SQUARES, its sum of squares, [B, tiles]."""
    pid = tl.program_id(0)
    tile = pid % num_tiles
    b = (pid // num_tiles).to(tl.int64)
    rows = tile // tiles_i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % tiles_i * BLOCK_N + tl.arange(0, BLOCK_N)
    row, first, count = _place(spans_ptr, b, num_tokens)
    acc = _grad_tile(
        x_ptr + row * stride_xb + first * stride_xt,
        dy_ptr + row * stride_dyb + first * stride_dyt, stride_xt, stride_dyt,
        count, rows, num_outputs, columns, num_inputs,
        BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, PRECISION,
    )  # fmt: skip
    mask = (rows < num_outputs)[:, None] & (columns < num_inputs)[None, :]
    offsets = (b * num_outputs + rows.to(tl.int64)[:, None]) * num_inputs + columns[None, :]
    tl.store(grads_ptr + offsets, acc, mask=mask)
    if SQUARES:
        tl.store(squares_ptr + b * num_tiles + tile, _sum_of_squares(acc))


@triton.jit
def _gram_tile(
    ptr, stride, first, second, num_tokens, width,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return ``z_s . z_t`` for the tokens s of one tile and t of another, fp32.

    The columns of each run are summed first, then the runs, so that a term is rounded less often.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_M], dtype=tl.float32)
    for run in range(0, width, RUN):
        part = tl.zeros([BLOCK_M, BLOCK_M], dtype=tl.float32)
        for start in range(run, run + RUN, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            left = _load_tile(ptr, stride, first, num_tokens, columns, width, UPCAST)
            right = _load_tile(ptr, stride, second, num_tokens, columns, width, UPCAST)
            part = tl.dot(left, tl.trans(right), part, input_precision=PRECISION)
        acc += part
    return acc


@triton.jit(do_not_specialize=["num_tokens", "num_pairs"])
def _grad_norm_gram_kernel(
    x_ptr, dy_ptr, spans_ptr, pairs_ptr, parts_ptr,
    stride_xb, stride_xt, stride_dyb, stride_dyt,
    num_tokens, num_inputs, num_outputs, num_pairs,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, RUN: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``sum_st (x_s . x_t)(dy_s . dy_t)`` for a pair of token tiles t >= s; [B, pairs].

    The matrix is symmetric, so a pair of different tiles counts twice. For spans, the table of
    pairs has the sample of each pair, and the output is [pairs].
    """
    pid = tl.program_id(0)
    pair = pid % num_pairs
    if spans_ptr is None:
        b = (pid // num_pairs).to(tl.int64)
    else:
        b = tl.load(pairs_ptr + 2 * num_pairs + pair).to(tl.int64)
    s = tl.load(pairs_ptr + pair)
    t = tl.load(pairs_ptr + num_pairs + pair)
    first = s * BLOCK_M + tl.arange(0, BLOCK_M)
    second = t * BLOCK_M + tl.arange(0, BLOCK_M)
    row, start, count = _place(spans_ptr, b, num_tokens)
    inputs = _gram_tile(
        x_ptr + row * stride_xb + start * stride_xt, stride_xt, first, second, count, num_inputs,
        BLOCK_M, BLOCK_K, RUN, UPCAST, PRECISION,
    )  # fmt: skip
    outputs = _gram_tile(
        dy_ptr + row * stride_dyb + start * stride_dyt, stride_dyt, first, second, count,
        num_outputs, BLOCK_M, BLOCK_K, RUN, UPCAST, PRECISION,
    )  # fmt: skip
    total = tl.sum(tl.sum(inputs.to(tl.float64) * outputs.to(tl.float64), 1), 0)
    if s != t:
        total = total * 2
    tl.store(parts_ptr + pid, total)


@triton.jit(do_not_specialize=["num_tokens"])
def _token_norms_kernel(
    x_ptr, dy_ptr, norms_ptr, stride_xb, stride_xt, stride_dyb, stride_dyt,
    num_tokens, num_inputs, num_outputs, num_blocks,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write ``||x_t||`` and ``||dy_t||`` in fp64 for a block of tokens, [B, T, 2]."""
    pid = tl.program_id(0)
    b = (pid // num_blocks).to(tl.int64)
    tokens = pid % num_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    inputs = _squares_of_tokens(
        x_ptr + b * stride_xb, stride_xt, tokens, num_tokens, num_inputs, BLOCK_T, BLOCK_E
    )
    outputs = _squares_of_tokens(
        dy_ptr + b * stride_dyb, stride_dyt, tokens, num_tokens, num_outputs, BLOCK_T, BLOCK_E
    )
    there, at = tokens < num_tokens, norms_ptr + 2 * (b * num_tokens + tokens)
    tl.store(at, tl.sqrt(inputs), mask=there)
    tl.store(at + 1, tl.sqrt(outputs), mask=there)


@triton.jit
def _squares_of_tokens(
    ptr, stride, tokens, num_tokens, width, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr
):
    total = tl.zeros([BLOCK_T], dtype=tl.float64)
    for start in range(0, width, BLOCK_E):
        columns = start + tl.arange(0, BLOCK_E)
        tile = _load_tile(ptr, stride, tokens, num_tokens, columns, width, False).to(tl.float64)
        total += tl.sum(tile * tile, 1)
    return total


@triton.jit(do_not_specialize=["num_tokens", "num_pairs", "rounding_bits"])
def _gram_bound_kernel(
    parts_ptr, of_samples_ptr, norms_ptr, spans_ptr, squares_ptr, apart_ptr,
    num_tokens, num_pairs, num_inputs, num_outputs, rounding_bits: tl.uint64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a bound of a sample's ``||H_i||^2`` from Gram products, see `grad_launch.grad_norm`.

    parts: sums of the pairs of tiles. of_samples: each span's range of pairs. apart: output, 1 if
    the bound must not be used, since tokens nearly cancel or may overflow; else 0.
    """
    b = tl.program_id(0).to(tl.int64)
    row, first, count = _place(of_samples_ptr, b, num_pairs)
    total = _sum_of(parts_ptr + row * num_pairs + first, count, BLOCK)
    # -inf comes from an overflow, not from cancellation.
    total = tl.where(total < 0, tl.where(total == float("-inf"), float("inf"), 0.0), total)
    row, first, count = _place(spans_ptr, b, num_tokens)
    norms_ptr += 2 * (row * num_tokens + first)
    sizes = tl.zeros([BLOCK], dtype=tl.float64)
    x_sizes = tl.zeros([BLOCK], dtype=tl.float64)
    dy_sizes = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, count, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(norms_ptr + 2 * tokens, mask=tokens < count, other=0.0)
        dy = tl.load(norms_ptr + 2 * tokens + 1, mask=tokens < count, other=0.0)
        sizes += x * dy
        x_sizes += x
        dy_sizes += dy
    size, x_size, dy_size = tl.sum(sizes, 0), tl.sum(x_sizes, 0), tl.sum(dy_sizes, 0)
    tokens = count.to(tl.float64)
    # The error of an underflowed product is multiplied by a product of the other operand's tokens.
    vanished = num_inputs * dy_size * dy_size + num_outputs * x_size * x_size
    rounding = as_fp64(rounding_bits) + tokens * tokens * 2.0**-52
    norm = tl.sqrt(total + rounding * size * size + _LEAST_NORMAL * vanished)
    bound = norm + (tokens + 2) * _PRODUCT_ROUNDING * size
    tl.store(squares_ptr + b, bound * bound)
    # A sum of terms this large may overflow in fp32, even if the exact sum is smaller.
    is_harmless = (size <= _HARMLESS_CANCELLATION * norm) & (size < _LARGEST_TERMS)
    tl.store(apart_ptr + b, tl.where(is_harmless, 0.0, 1.0))


@triton.jit
def _sum_of(ptr, count, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(0, count, BLOCK):
        numbers = start + tl.arange(0, BLOCK)
        total += tl.load(ptr + numbers, mask=numbers < count, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["num_parts", "scale_bits"])
def _sum_squares_kernel(
    parts_ptr, apart_ptr, squares_ptr, num_parts, scale_bits: tl.uint64,
    INTO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``scale`` times the sum of a sample's parts [B, num_parts]; with INTO, add to squares.

    If the sample's entry of apart is 0, its entry of squares is not changed.
    """
    b = tl.program_id(0).to(tl.int64)
    is_due = True
    if apart_ptr is not None:
        is_due = tl.load(apart_ptr + b) != 0
    if is_due:
        square = _sum_of(parts_ptr + b * num_parts, num_parts, BLOCK) * as_fp64(scale_bits)
        if INTO:
            square += tl.load(squares_ptr + b)
        tl.store(squares_ptr + b, square)


@triton.jit(do_not_specialize=["is_norm", "batch", "num_tokens"])
def _clipped_grad_kernel(
    x_ptr, dy_ptr, spans_ptr, factors_ptr, out_ptr, squares_ptr, is_norm,
    stride_xb, stride_xt, stride_dyb, stride_dyt,
    batch, num_tokens, num_inputs, num_outputs, tiles_i, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of ``sum_i c_i H_i`` in fp32, with H_i the fp32 product ``dy_i^T x_i``.

    No H_i is stored in memory. c_i is ``factors[i]``; if it is 0, H_i is not computed.

    With is_norm, a program has one sample, and writes the sum of squares of its tile of H_i,
    [B, tiles]. Norms and sums come from one compiled kernel, so the norms are of the summed H_i.
    """
    pid = tl.program_id(0)
    tile = pid % num_tiles
    first = pid // num_tiles
    end = batch
    if is_norm:
        end = first + 1
    rows = tile // tiles_i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % tiles_i * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for b in range(first, end):
        sample = tl.cast(b, tl.int64)
        factor = tl.load(factors_ptr + sample)
        if factor != 0:
            row, start, count = _place(spans_ptr, sample, num_tokens)
            acc = _grad_tile(
                x_ptr + row * stride_xb + start * stride_xt,
                dy_ptr + row * stride_dyb + start * stride_dyt, stride_xt, stride_dyt,
                count, rows, num_outputs, columns, num_inputs,
                BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, PRECISION,
            )  # fmt: skip
            total = tl.fma(acc, factor, total)
            if is_norm:
                tl.store(squares_ptr + sample * num_tiles + tile, _sum_of_squares(acc))
    if is_norm == 0:
        mask = (rows < num_outputs)[:, None] & (columns < num_inputs)[None, :]
        offsets = rows.to(tl.int64)[:, None] * num_inputs + columns[None, :]
        tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def _plus_clipped(total, grad, factor, reciprocal, EXACT: tl.constexpr):
    """Return ``total + factor * grad``, fp32; if EXACT, in fp64 units of the grid, truncated."""
    if EXACT:
        # Both products are exact: 24 bits times 24 bits, then times a power of two.
        steps = grad.to(tl.float64) * factor.to(tl.float64) * reciprocal
        size = tl.floor(tl.abs(steps))
        return total + tl.where(steps < 0, -size, size)
    return tl.fma(grad.to(tl.float32), factor, total)


@triton.jit(do_not_specialize=["batch", "capacity", *ADDRESS])
def _clip_reduce_kernel(
    rows_ptr, owners_ptr, factors_ptr, open_ptr, capacity, batch,
    grid_bits: tl.uint64, scale_bits: tl.uint64,
    k0: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32,
    k4: tl.uint32, k5: tl.uint32, k6: tl.uint32, k7: tl.uint32,
    step_low: tl.uint32, step_high: tl.uint32,
    GRADS: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
    INTO: tl.constexpr, NOISE: tl.constexpr, ALIGNED: tl.constexpr, VECTORS: tl.constexpr,
    PHILOX: tl.constexpr,
):  # fmt: skip
    """Write ``sum_i c_i G_i`` for each tensor of a table; samples with c_i = 0 are not read.

    c_i is ``factors[i]``. The sum is in fp32. If EXACT, the sum is in fp64 and its terms are
    multiples of the grid; with INTO it is added to out. With NOISE, `noisy` adds the stream's
    noise, and the result is rounded to fp32 once.
    """
    place, row, program = row_of(rows_ptr, owners_ptr, tl.program_id(0))
    elements, inside, group = elements_of(row, program, BLOCK, ALIGNED, VECTORS)
    grads_ptr, out_ptr = read_from(row, GRADS, VECTORS), written_to(row, OUT, VECTORS)
    stride = size_of(row, VECTORS)
    reciprocal = reciprocal_of_grid(grid_bits)
    total = tl.zeros([BLOCK], dtype=tl.float64 if EXACT else tl.float32)
    if INTO:
        total = tl.load(out_ptr + elements, mask=inside, other=0.0) * reciprocal
    for b in range(0, batch):
        sample = tl.cast(b, tl.int64)
        factor = tl.load(factors_ptr + b)
        if factor != 0:
            grad = tl.load(grads_ptr + sample * stride + elements, mask=inside, other=0.0)
            total = _plus_clipped(total, grad, factor, reciprocal, EXACT)
    if NOISE:
        total = noisy(
            total, elements, inside, place, row, group, open_ptr, capacity, grid_bits, scale_bits,
            as_key(k0, k1, k2, k3, k4, k5, k6, k7), step_low, step_high, PHILOX,
        )  # fmt: skip
    elif EXACT:
        total *= as_fp64(grid_bits)
    tl.store(out_ptr + elements, total.to(OUT), mask=inside)


@triton.jit(do_not_specialize=["num_programs"])
def _squares_kernel(
    rows_ptr, owners_ptr, parts_ptr, num_programs, GRADS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, VECTORS: tl.constexpr,
):  # fmt: skip
    """Write the sum of squares, in fp64, of a chunk of a sample's elements: [B, programs]."""
    # The grid has one dimension, since the other dimensions are limited to 65,535 programs.
    pid = tl.program_id(0)
    _, row, program = row_of(rows_ptr, owners_ptr, pid % num_programs)
    sample, size = (pid // num_programs).to(tl.int64), size_of(row, VECTORS)
    grads_ptr = read_from(row, GRADS, VECTORS) + sample * size
    total = tl.zeros([BLOCK], dtype=tl.float64)
    for start in range(program * CHUNK, tl.minimum(size, (program + 1) * CHUNK), BLOCK):
        elements = start + tl.arange(0, BLOCK)
        grad = tl.load(grads_ptr + elements, mask=elements < size, other=0.0).to(tl.float64)
        total += grad * grad
    tl.store(parts_ptr + pid, tl.sum(total, 0))


@triton.jit(do_not_specialize=["batch", "bound_bits"])
def _clip_factors_kernel(
    squares_ptr, keep_ptr, factors_ptr, batch, bound_bits: tl.uint64,
    HARD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `reference.clip_factors`."""
    samples = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there, bound = samples < batch, as_fp64(bound_bits)
    norms = tl.sqrt(tl.load(squares_ptr + samples, mask=there, other=0.0))
    if HARD:
        norms *= 1 + _SLACK
        factors = tl.where(norms > bound, bound / norms * (1 - _SLACK), 1.0)
        factors = tl.where(norms < float("inf"), factors, 0.0)
    else:
        factors = bound / (norms + _STABILITY) * (1 - 2 * _SLACK)
    narrow = factors.to(tl.float32)
    # If a factor was rounded up, take the next number towards 0.
    bits = narrow.to(tl.int32, bitcast=True) - (narrow.to(tl.float64) > factors).to(tl.int32)
    narrow = bits.to(tl.float32, bitcast=True)
    narrow = tl.where(narrow >= _LEAST_NORMAL, narrow, 0.0)
    if keep_ptr is not None:
        narrow = tl.where(tl.load(keep_ptr + samples, mask=there, other=0) != 0, narrow, 0.0)
    tl.store(factors_ptr + samples, narrow, mask=there)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _token_sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, spans_ptr, products_ptr, sums_ptr,
    stride_dyb, stride_dyt, stride_xb, stride_xt,
    num_tokens, width, num_chunks, num_blocks,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    PRODUCTS: tl.constexpr, HAS_MEAN: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Write ``sum_t dy * (x - mean) * rstd``, ``sum_t dy`` of a chunk of tokens, [B, chunks, E].

    Each span is one chunk: [U, E]. ``sum_t dy`` is in the dtype of sums_ptr, fp32 or fp64.
    """
    pid = tl.program_id(0)
    columns = pid % num_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    chunk = (pid // num_blocks).to(tl.int64)
    row, first, count = _place(spans_ptr, chunk // num_chunks, num_tokens)
    if spans_ptr is None:
        first += chunk % num_chunks * CHUNK
        count = tl.minimum(num_tokens - first, CHUNK).to(tl.int32)
    dy_ptr += row * stride_dyb + first * stride_dyt
    of_tokens = row * num_tokens + first
    products = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    if SUMS:
        sums = tl.zeros([BLOCK_T, BLOCK_E], dtype=sums_ptr.dtype.element_ty)
    for start in range(0, count, BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        dy = _load_tile(dy_ptr, stride_dyt, tokens, count, columns, width, False)
        if PRODUCTS:
            x = _load_tile(
                x_ptr + row * stride_xb + first * stride_xt, stride_xt, tokens, count, columns,
                width, True,
            )  # fmt: skip
            there = tokens < count
            if HAS_MEAN:
                x -= tl.load(mean_ptr + of_tokens + tokens, mask=there, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + of_tokens + tokens, mask=there, other=0.0)
            products += dy.to(tl.float32) * (x * rstd[:, None])
        if SUMS:
            sums += dy.to(sums.dtype)
    offsets = chunk * width + columns
    if PRODUCTS:
        tl.store(products_ptr + offsets, tl.sum(products, 0), mask=columns < width)
    if SUMS:
        tl.store(sums_ptr + offsets, tl.sum(sums, 0), mask=columns < width)


@triton.jit(do_not_specialize=["num_tokens"])
def _embedding_grad_norm_kernel(
    dy_ptr, order_ptr, ends_ptr, squares_ptr,
    stride_dyb, stride_dyt, num_tokens, width, num_blocks,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write ``||sum of dy_t over the tokens of one row||^2`` at the position of the first token.

    Fp64 sums of n terms, here and in the clipped sum, round by less than (n - 1) 2^-53 of the sum
    of magnitudes. Before squaring, each element's magnitude is raised by both rounding errors.

    order: a sample's tokens, sorted by row. ends: for each entry of order, where its row ends.
    """
    pid = tl.program_id(0)
    block = pid % num_blocks
    place = pid // num_blocks % num_tokens
    b = (pid // num_blocks // num_tokens).to(tl.int64)
    columns = block * BLOCK_E + tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + b * num_tokens + place).to(tl.int32)
    before = tl.load(ends_ptr + b * num_tokens + place - 1, mask=place > 0, other=0)
    # Only the program at the position of a row's first token has work.
    end = tl.where(before.to(tl.int32) <= place, end, place)
    total = tl.zeros([BLOCK_E], dtype=tl.float64)
    sizes = tl.zeros([BLOCK_E], dtype=tl.float64)
    for start in range(place, end, BLOCK_T):
        places = start + tl.arange(0, BLOCK_T)
        there = places < end
        tokens = tl.load(order_ptr + b * num_tokens + places, mask=there, other=0)
        dy = tl.load(
            dy_ptr + b * stride_dyb + tokens[:, None] * stride_dyt + columns[None, :],
            mask=there[:, None] & (columns < width)[None, :],
            other=0.0,
        ).to(tl.float64)
        total += tl.sum(dy, 0)
        sizes += tl.sum(tl.abs(dy), 0)
    terms = tl.where(end - place > 1, end - place, 0).to(tl.float64)
    bound = tl.abs(total) + sizes * (terms * 2.0**-52)
    square = tl.sum(bound * bound, 0)
    tl.store(squares_ptr + (b * num_tokens + place) * num_blocks + block, square)


@triton.jit
def _sample_of(samples_ptr, tokens, num_tokens):
    if samples_ptr is None:
        return tokens // num_tokens
    else:
        return tl.load(samples_ptr + tokens)


@triton.jit(do_not_specialize=["batch", "num_tokens"])
def _embedding_clipped_grad_kernel(
    dy_ptr, order_ptr, rows_ptr, ends_ptr, samples_ptr, factors_ptr, out_ptr,
    stride_dyb, stride_dyt, batch, num_tokens, width, num_blocks,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write ``sum_i c_i H_i`` of one table row, with H_i = ``sum_t dy_it`` over the row's tokens.

    H_i is in fp64. order: all tokens sorted by row, then by sample; samples: the sample of each
    token, for spans.
    """
    pid = tl.program_id(0)
    columns = pid % num_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    place = (pid // num_blocks).to(tl.int64)
    end = tl.load(ends_ptr + place)
    before = tl.load(ends_ptr + place - 1, mask=place > 0, other=0)
    if before <= place:
        row = tl.load(rows_ptr + place)
        total = tl.zeros([BLOCK_E], dtype=tl.float64)
        own = tl.zeros([BLOCK_E], dtype=tl.float64)
        sample = place * 0 - 1
        factor = tl.full([], 0.0, tl.float32)
        while place < end:
            places = place + tl.arange(0, BLOCK_T)
            there = places < end
            tokens = tl.load(order_ptr + places, mask=there, other=0)
            row_of_token = tokens // num_tokens
            offsets = row_of_token * stride_dyb
            offsets += (tokens - row_of_token * num_tokens) * stride_dyt
            first = _sample_of(samples_ptr, tl.load(order_ptr + place), num_tokens)
            if first != sample:
                total += own * factor
                own = tl.zeros([BLOCK_E], dtype=tl.float64)
                sample = first
                factor = tl.load(factors_ptr + sample, mask=sample < batch, other=0.0)
            theirs = there & (_sample_of(samples_ptr, tokens, num_tokens) == sample)
            if factor != 0:
                mask = theirs[:, None] & (columns < width)[None, :]
                dy = tl.load(dy_ptr + offsets[:, None] + columns[None, :], mask=mask, other=0.0)
                own += tl.sum(dy.to(tl.float64), 0)
            # If the token belongs to no sample (such tokens may lie between samples), skip it.
            place += tl.where(sample < batch, tl.sum(theirs.to(tl.int32), 0), 1)
        total += own * factor
        tl.store(out_ptr + row * width + columns, total, mask=columns < width)
