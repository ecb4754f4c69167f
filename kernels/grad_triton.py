"""Per-sample gradient kernels: products, norms, clipped sums and the reductions of norm layers.

Each program owns its outputs and walks samples and tokens in order. No kernel uses atomics: what
several programs contribute to is written as partial sums and added outside, so results repeat bit
for bit. Products accumulate in fp32; squares are taken and added in fp64, where neither 1e30
overflows nor 1e-30 vanishes and the rounding is far below a clip's slack.

Letters: B samples, T tokens of a sample, I inputs, O outputs, E width, P elements of a parameter.
"""

import triton
import triton.language as tl

# ruff: noqa: N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False


@triton.jit
def _load_tile(ptr, stride, tokens, num_tokens, columns, num_columns, UPCAST: tl.constexpr):
    """``[tokens, columns]`` of one sample; 0 behind either end."""
    mask = (tokens < num_tokens)[:, None] & (columns < num_columns)[None, :]
    tile = tl.load(
        ptr + tokens.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0
    )
    if UPCAST:
        # Triton's interpreter gets products of bfloat16 wrong.
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _grad_tile(
    x_ptr, dy_ptr, stride_xt, stride_dyt, num_tokens, rows, num_outputs, columns, num_inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dy_i[:, rows]^T x_i[:, columns]`` of one sample, fp32."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, num_tokens, BLOCK_K):
        tokens = start + tl.arange(0, BLOCK_K)
        dy = _load_tile(dy_ptr, stride_dyt, tokens, num_tokens, rows, num_outputs, UPCAST)
        x = _load_tile(x_ptr, stride_xt, tokens, num_tokens, columns, num_inputs, UPCAST)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _sum_of_squares(tile):
    """``sum tile^2`` as an fp64 scalar."""
    wide = tile.to(tl.float64)
    return tl.sum(tl.sum(wide * wide, 1), 0)


@triton.jit
def _per_sample_grad_kernel(
    x_ptr, dy_ptr, grads_ptr, squares_ptr,
    stride_xb, stride_xt, stride_dyb, stride_dyt,
    num_tokens, num_inputs, num_outputs, tiles_i, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STORE: tl.constexpr, SQUARES: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of ``G_i = dy_i^T x_i``, its sum of squares, or both; [B, tiles] of the latter."""
    pid = tl.program_id(0)
    tile = pid % num_tiles
    b = (pid // num_tiles).to(tl.int64)
    rows = tile // tiles_i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % tiles_i * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _grad_tile(
        x_ptr + b * stride_xb, dy_ptr + b * stride_dyb, stride_xt, stride_dyt,
        num_tokens, rows, num_outputs, columns, num_inputs,
        BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, PRECISION,
    )  # fmt: skip
    if STORE:
        mask = (rows < num_outputs)[:, None] & (columns < num_inputs)[None, :]
        offsets = (b * num_outputs + rows.to(tl.int64)[:, None]) * num_inputs + columns[None, :]
        tl.store(grads_ptr + offsets, acc, mask=mask)
    if SQUARES:
        tl.store(squares_ptr + b * num_tiles + tile, _sum_of_squares(acc))


@triton.jit
def _gram_tile(
    ptr, stride, first, second, num_tokens, width,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``z_s . z_t`` for the tokens s of one tile and t of another, fp32."""
    acc = tl.zeros([BLOCK_M, BLOCK_M], dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        left = _load_tile(ptr, stride, first, num_tokens, columns, width, UPCAST)
        right = _load_tile(ptr, stride, second, num_tokens, columns, width, UPCAST)
        acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _grad_norm_gram_kernel(
    x_ptr, dy_ptr, pairs_ptr, squares_ptr,
    stride_xb, stride_xt, stride_dyb, stride_dyt,
    num_tokens, num_inputs, num_outputs, num_pairs,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``sum_st (x_s . x_t)(dy_s . dy_t)`` for a pair of token tiles t >= s; [B, pairs].

    The matrix is symmetric, so a pair of different tiles counts twice.
    """
    pid = tl.program_id(0)
    pair = pid % num_pairs
    b = (pid // num_pairs).to(tl.int64)
    s = tl.load(pairs_ptr + pair)
    t = tl.load(pairs_ptr + num_pairs + pair)
    first = s * BLOCK_M + tl.arange(0, BLOCK_M)
    second = t * BLOCK_M + tl.arange(0, BLOCK_M)
    inputs = _gram_tile(
        x_ptr + b * stride_xb, stride_xt, first, second, num_tokens, num_inputs,
        BLOCK_M, BLOCK_K, UPCAST, PRECISION,
    )  # fmt: skip
    outputs = _gram_tile(
        dy_ptr + b * stride_dyb, stride_dyt, first, second, num_tokens, num_outputs,
        BLOCK_M, BLOCK_K, UPCAST, PRECISION,
    )  # fmt: skip
    total = tl.sum(tl.sum(inputs.to(tl.float64) * outputs.to(tl.float64), 1), 0)
    if s != t:
        total = total * 2
    tl.store(squares_ptr + b * num_pairs + pair, total)


@triton.jit
def _clipped_grad_kernel(
    x_ptr, dy_ptr, factors_ptr, bounds_ptr, out_ptr,
    stride_xb, stride_xt, stride_dyb, stride_dyt,
    batch, num_tokens, num_inputs, num_outputs, tiles_i, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    CLIP: tl.constexpr, STORE_FACTORS: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of ``sum_i c_i dy_i^T x_i``; no G_i leaves the chip.

    c_i is ``factors[i]``, or with CLIP ``min(1, bounds[tile] / ||tile of G_i||)`` rounded down,
    which STORE_FACTORS writes to ``factors[i, tile]``. Where c_i is 0 the tile may hold NaN.
    """
    round_down: tl.constexpr = 1.0 - 2.0**-22
    least_normal: tl.constexpr = 2.0**-126
    tile = tl.program_id(0)
    rows = tile // tiles_i * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile % tiles_i * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for b in range(0, batch):
        sample = tl.cast(b, tl.int64)
        acc = _grad_tile(
            x_ptr + sample * stride_xb, dy_ptr + sample * stride_dyb, stride_xt, stride_dyt,
            num_tokens, rows, num_outputs, columns, num_inputs,
            BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, PRECISION,
        )  # fmt: skip
        if CLIP:
            bound = tl.load(bounds_ptr + tile)
            norm = tl.sqrt(_sum_of_squares(acc))
            over = norm > bound
            ratio = tl.where(over, bound / tl.where(over, norm, 1.0) * round_down, 1.0)
            # Not so for NaN and infinity either.
            usable = (norm < float("inf")) & (ratio >= least_normal)
            factor = tl.where(usable, ratio, 0.0).to(tl.float32)
            if STORE_FACTORS:
                tl.store(factors_ptr + sample * num_tiles + tile, factor)
        else:
            factor = tl.load(factors_ptr + sample)
        total += tl.where(factor != 0, acc * factor, 0.0)
    mask = (rows < num_outputs)[:, None] & (columns < num_inputs)[None, :]
    offsets = rows.to(tl.int64)[:, None] * num_inputs + columns[None, :]
    tl.store(out_ptr + offsets, total, mask=mask)


@triton.jit
def _clip_reduce_kernel(
    grads_ptr, factors_ptr, out_ptr, stride_b, batch, size, divisor,
    DIVIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``sum_i c_i G_i / divisor`` for a run of elements; rows of factor 0 are not read."""
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for b in range(0, batch):
        factor = tl.load(factors_ptr + b)
        if factor != 0:
            row = grads_ptr + tl.cast(b, tl.int64) * stride_b
            total += tl.load(row + elements, mask=inside, other=0.0).to(tl.float32) * factor
    # Noise on the sum belongs here: a function of the element's index alone.
    if DIVIDE:
        total = tl.div_rn(total, tl.cast(divisor, tl.float32))
    tl.store(out_ptr + elements, total, mask=inside)


@triton.jit
def _token_sums_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, products_ptr, sums_ptr,
    stride_dyb, stride_dyt, stride_xb, stride_xt,
    num_tokens, width, num_chunks, num_blocks,
    CHUNK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    PRODUCTS: tl.constexpr, HAS_MEAN: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """``sum_t dy (x - mean) rstd`` and ``sum_t dy`` over a chunk of tokens; [B, chunks, E]."""
    pid = tl.program_id(0)
    columns = pid % num_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    chunk = pid // num_blocks % num_chunks
    b = (pid // num_blocks // num_chunks).to(tl.int64)
    products = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    sums = tl.zeros([BLOCK_T, BLOCK_E], dtype=tl.float32)
    for start in range(0, CHUNK, BLOCK_T):
        tokens = chunk * CHUNK + start + tl.arange(0, BLOCK_T)
        dy = _load_tile(
            dy_ptr + b * stride_dyb, stride_dyt, tokens, num_tokens, columns, width, True
        )
        if PRODUCTS:
            x = _load_tile(
                x_ptr + b * stride_xb, stride_xt, tokens, num_tokens, columns, width, True
            )
            there = tokens < num_tokens
            if HAS_MEAN:
                x -= tl.load(mean_ptr + b * num_tokens + tokens, mask=there, other=0.0)[:, None]
            rstd = tl.load(rstd_ptr + b * num_tokens + tokens, mask=there, other=0.0)
            products += dy * (x * rstd[:, None])
        if SUMS:
            sums += dy
    offsets = (b * num_chunks + chunk) * width + columns
    if PRODUCTS:
        tl.store(products_ptr + offsets, tl.sum(products, 0), mask=columns < width)
    if SUMS:
        tl.store(sums_ptr + offsets, tl.sum(sums, 0), mask=columns < width)


@triton.jit
def _embedding_grad_norm_kernel(
    dy_ptr, order_ptr, ends_ptr, squares_ptr,
    stride_dyb, stride_dyt, num_tokens, width, num_blocks,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``||sum of dy_t over the tokens of one row||^2``, written where the row's tokens start.

    order: a sample's tokens sorted by row; ends: for each, the place behind its row's last one.
    """
    pid = tl.program_id(0)
    block = pid % num_blocks
    place = pid // num_blocks % num_tokens
    b = (pid // num_blocks // num_tokens).to(tl.int64)
    columns = block * BLOCK_E + tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + b * num_tokens + place).to(tl.int32)
    before = tl.load(ends_ptr + b * num_tokens + place - 1, mask=place > 0, other=0)
    # A place that does not start a row has no tokens of its own.
    end = tl.where(before.to(tl.int32) <= place, end, place)
    total = tl.zeros([BLOCK_E], dtype=tl.float64)
    for start in range(place, end, BLOCK_T):
        places = start + tl.arange(0, BLOCK_T)
        there = places < end
        tokens = tl.load(order_ptr + b * num_tokens + places, mask=there, other=0)
        dy = tl.load(
            dy_ptr + b * stride_dyb + tokens[:, None] * stride_dyt + columns[None, :],
            mask=there[:, None] & (columns < width)[None, :],
            other=0.0,
        )
        total += tl.sum(dy.to(tl.float64), 0)
    square = tl.sum(total * total, 0)
    tl.store(squares_ptr + (b * num_tokens + place) * num_blocks + block, square)


@triton.jit
def _embedding_clipped_grad_kernel(
    dy_ptr, order_ptr, rows_ptr, ends_ptr, factors_ptr, out_ptr,
    stride_dyb, stride_dyt, num_tokens, width, num_places, num_blocks,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``sum_i c_i sum_t dy_it`` over the tokens of one row of the table, all samples' sorted."""
    pid = tl.program_id(0)
    columns = pid % num_blocks * BLOCK_E + tl.arange(0, BLOCK_E)
    place = (pid // num_blocks).to(tl.int64)
    end = tl.load(ends_ptr + place)
    before = tl.load(ends_ptr + place - 1, mask=place > 0, other=0)
    if before <= place:
        total = tl.zeros([BLOCK_E], dtype=tl.float32)
        for start in range(place, end, BLOCK_T):
            places = start + tl.arange(0, BLOCK_T)
            there = places < end
            tokens = tl.load(order_ptr + places, mask=there, other=0)
            b = tokens // num_tokens
            factors = tl.load(factors_ptr + b, mask=there, other=0.0)
            offsets = b * stride_dyb + (tokens - b * num_tokens) * stride_dyt
            mask = (factors != 0)[:, None] & (columns < width)[None, :]
            dy = tl.load(dy_ptr + offsets[:, None] + columns[None, :], mask=mask, other=0.0)
            total += tl.sum(dy.to(tl.float32) * factors[:, None], 0)
        row = tl.load(rows_ptr + place)
        tl.store(out_ptr + row * width + columns, total, mask=columns < width)
