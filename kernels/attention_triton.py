"""Flash attention over a tile graph: a forward kernel and a deterministic split backward.

A program processes one tile of rows and all runs of the tile's group. It clips the band of a run
to the tile in closed form: columns that no row sees are not loaded, and columns that every row
sees need no mask. Scores are in base 2. There are no atomics: results are bitwise reproducible.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim
of queries and keys, E that of values. A head dim is processed in one or two parts, which are
powers of two: D0 and D1, E0 and E1.
"""

import triton
import triton.language as tl

# ruff: noqa: N803


@triton.jit
def _load(
    ptr, offsets, seen,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Load dims FIRST .. FIRST + WIDTH - 1 of rows at `offsets`; 0 if dim >= D or row unseen."""
    dims = FIRST + tl.arange(0, WIDTH)
    ptrs = ptr + offsets[:, None] + dims[None, :]
    if FIRST + WIDTH > D:
        if MASKED:
            x = tl.load(ptrs, mask=seen[:, None] & (dims < D)[None, :], other=0.0)
        else:
            x = tl.load(ptrs, mask=(dims < D)[None, :], other=0.0)
    else:
        if MASKED:
            x = tl.load(ptrs, mask=seen[:, None], other=0.0)
        else:
            x = tl.load(ptrs)
    if UPCAST:
        # Triton's interpreter computes products of bfloat16 incorrectly.
        x = x.to(tl.float32)
    return x


@triton.jit
def _store(ptr, offsets, seen, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Store x in the layout that `_load` reads."""
    dims = FIRST + tl.arange(0, WIDTH)
    ptrs = ptr + offsets[:, None] + dims[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=seen[:, None] & (dims < D)[None, :])


@triton.jit
def _store_sum(ptr, x, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Sum x over the rows where `there` is True; store the sum in head dims from FIRST on."""
    dims = FIRST + tl.arange(0, WIDTH)
    tl.store(ptr + dims, tl.sum(tl.where(there[:, None], x, 0.0), 0), mask=dims < D)


@triton.jit
def _squares(ptr, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Round x to ptr's dtype; sum each row's squares in fp64, since 1e30^2 overflows fp32."""
    stored = x.to(ptr.dtype.element_ty).to(tl.float64)
    if FIRST + WIDTH > D:
        dims = FIRST + tl.arange(0, WIDTH)
        stored = tl.where((dims < D)[None, :], stored, 0.0)
    return tl.sum(stored * stored, 1)


@triton.jit
def _wide(positions):
    """Convert nonnegative positions to int64, through uint32, which takes fewer instructions."""
    return positions.to(tl.uint32).to(tl.int64)


@triton.jit
def _tile(tiles_ptr, head_variants_ptr, variant_at, index, num_tiles, HAS_VARIANTS: tl.constexpr):
    """Load tile number `index` of the variant of a head, see `Side.tiles`.

    Returns position of the first row, stride and number of the rows, position of the last row,
    first and end run, and the tile's index in its group.
    """
    tile = index.to(tl.int64)
    if HAS_VARIANTS:
        tile += tl.load(head_variants_ptr + variant_at).to(tl.int64) * num_tiles
    record = tiles_ptr + tile * 8
    first = tl.load(record)
    stride = tl.load(record + 1)
    length = tl.load(record + 2)
    last = first + stride * (length - 1)
    first_run = tl.load(record + 3)
    end_run = tl.load(record + 4)
    return first, stride, length, last, first_run, end_run, tl.load(record + 5)


@triton.jit
def _columns_below(bound, start, stride, reciprocal, shift):
    """Return the number of columns ``start + n * stride``, n = 0, 1, ..., below a bound.

    Divides by multiplication, see `Side.run_records`.
    """
    doubled = tl.maximum(bound - start + stride - 1, 0).to(tl.uint32) * 2
    return (tl.umulhi(doubled, reciprocal) >> shift).to(tl.int32)


@triton.jit
def _clip(runs_ptr, run, rows, first, last, column_begin, column_end, BLOCK_N: tl.constexpr):
    """Load a run, and clip it to the columns that some row of a tile sees, in chunks of BLOCK_N.

    Returns the run's start, stride and log multiplicity (base 2); begin <= left <= right <= end;
    and each row's first column and number of columns. Columns are numbered within the run. Every
    row sees the columns in [left, right). Columns in [begin, left) and [right, end) need a mask.
    """
    record = runs_ptr + run * 8
    start = tl.load(record)
    stride = tl.load(record + 1)
    length = tl.load(record + 2)
    lo = tl.load(record + 3)
    hi = tl.load(record + 4)
    bias = tl.load(record + 5).to(tl.float32, bitcast=True) * 1.4426950408889634
    reciprocal = tl.load(record + 6).to(tl.uint32, bitcast=True)
    shift = tl.load(record + 7).to(tl.uint32)
    begin_at = tl.maximum(first - hi, column_begin)
    end_at = tl.minimum(last - lo + 1, column_end)
    end = tl.minimum(_columns_below(end_at, start, stride, reciprocal, shift), length)
    begin = tl.minimum(_columns_below(begin_at, start, stride, reciprocal, shift), end)
    full_begin = tl.maximum(_columns_below(last - hi, start, stride, reciprocal, shift), begin)
    full_end = tl.minimum(_columns_below(first - lo + 1, start, stride, reciprocal, shift), end)
    left = tl.minimum(begin + (full_begin - begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
    right = left + tl.maximum(full_end - left, 0) // BLOCK_N * BLOCK_N
    row_begin = _columns_below(rows - hi, start, stride, reciprocal, shift)
    row_end = tl.minimum(_columns_below(rows - lo + 1, start, stride, reciprocal, shift), end)
    seen = tl.maximum(row_end - row_begin, 0).to(tl.uint32)
    return start, stride, bias, begin, left, right, end, row_begin, seen


@triton.jit
def _at_run(x_ptr, y_ptr, start, stride, stride_xt, stride_yt):
    """Return pointers to a run's first column in x and y, and the strides to its next column."""
    wide_start, wide_stride = start.to(tl.int64), stride.to(tl.int64)
    x_ptr += wide_start * stride_xt
    y_ptr += wide_start * stride_yt
    return x_ptr, y_ptr, wide_stride * stride_xt, wide_stride * stride_yt


@triton.jit
def _is_seen(columns, row_begin, row_seen):
    """Return ``row_begin <= column < row_begin + row_seen``, `[rows, columns]`, in one compare."""
    return (columns[None, :] - row_begin[:, None]).to(tl.uint32) < row_seen[:, None]


@triton.jit
def _plus_product(total, weights, x, ptr, PRECISION: tl.constexpr):
    """Return ``total + weights @ x``, with weights rounded to the dtype of the tensor at `ptr`."""
    rounded = weights.to(ptr.dtype.element_ty).to(x.dtype)
    return tl.dot(rounded, x, total, input_precision=PRECISION)


@triton.jit
def _tanh(x):
    """Return tanh(x), to a few units in the last place, also near 0."""
    square = x * x
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * square * series
    far = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def _bias(ptr, rows, columns, stride_row, stride_column, seen):
    """Load the bias of `[rows, columns]`, in base 2; 0 if unseen."""
    offsets = _wide(rows)[:, None] * stride_row + _wide(columns)[None, :] * stride_column
    return tl.load(ptr + offsets, mask=seen, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def _distance(rows, columns, shift):
    return tl.abs((rows + shift)[:, None] - columns[None, :]).to(tl.float32)


@triton.jit(do_not_specialize=["distance_shift"])
def _attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    sinks_ptr, slopes_ptr, key_range_ptr, bias_ptr,
    tiles_ptr, head_variants_ptr, runs_ptr,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_ob, stride_oh, stride_ot,
    stride_ib, stride_ih, stride_it, stride_is,
    stride_variant_b, heads, heads_per_group, num_queries, num_keys, num_tiles,
    distance_shift, scale_log2, softcap_log2,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_VARIANTS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_KEY_RANGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For a query tile, write ``o = sum_j m * e^s * v / e^lse``, ``lse = log sum_j m * e^s``."""
    log2e: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    index = pid % num_tiles
    head = (pid // num_tiles) % heads
    b = pid // num_tiles // heads
    first, row_stride, length, last, first_run, end_run, _place = _tile(
        tiles_ptr, head_variants_ptr, b * stride_variant_b + head, index, num_tiles, HAS_VARIANTS
    )
    if length == 0:
        return
    offsets = tl.arange(0, BLOCK_M)
    there = offsets < length
    rows = first + row_stride * offsets
    wide_first, wide_stride = first.to(tl.int64), row_stride.to(tl.int64)
    sample = b.to(tl.int64)
    kv_head = (head // heads_per_group).to(tl.int64)
    q_ptr += sample * stride_qb + head.to(tl.int64) * stride_qh + wide_first * stride_qt
    k_ptr += sample * stride_kb + kv_head * stride_kh
    v_ptr += sample * stride_vb + kv_head * stride_vh
    o_ptr += sample * stride_ob + head.to(tl.int64) * stride_oh + wide_first * stride_ot
    if HAS_BIAS:
        bias_ptr += sample * stride_ib + head.to(tl.int64) * stride_ih
    key_begin = 0
    key_end = num_keys
    if HAS_KEY_RANGE:
        key_begin = tl.load(key_range_ptr + b * 2)
        key_end = tl.load(key_range_ptr + b * 2 + 1)
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + b * heads + head) * log2e

    q0 = _load(q_ptr, offsets * (wide_stride * stride_qt), there, 0, D0, D, True, UPCAST)
    q1 = q0
    acc0 = tl.zeros([BLOCK_M, E0], tl.float32)
    acc1 = 0.0
    if D1 > 0:
        q1 = _load(q_ptr, offsets * (wide_stride * stride_qt), there, D0, D1, D, True, UPCAST)
    if E1 > 0:
        acc1 = tl.zeros([BLOCK_M, E1], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + b * heads + head) * log2e
        m = tl.zeros([BLOCK_M], tl.float32) + sink
        total = tl.where(m == float("-inf"), 0.0, 1.0)

    offs_n = tl.arange(0, BLOCK_N)
    for run in range(first_run, end_run):
        start, stride, bias, begin, left, right, end, row_begin, row_seen = _clip(
            runs_ptr, run, rows, first, last, key_begin, key_end, BLOCK_N
        )
        k_run_ptr, v_run_ptr, k_step, v_step = _at_run(
            k_ptr, v_ptr, start, stride, stride_kt, stride_vt
        )
        for MASKED in tl.static_range(2):
            # First the chunks that every row sees, then the chunks on either side of them.
            to = end - right + left if MASKED else right
            for n in range(begin if MASKED else left, to, BLOCK_N):
                if MASKED:
                    n += tl.where(n < left, 0, right - left)
                # The online softmax, in base 2.
                columns = n + offs_n
                keys = start + stride * columns
                seen_columns = columns < end
                k_offsets = _wide(columns) * k_step
                v_offsets = _wide(columns) * v_step
                k0 = _load(k_run_ptr, k_offsets, seen_columns, 0, D0, D, MASKED, UPCAST)
                s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
                if D1 > 0:
                    k1 = _load(k_run_ptr, k_offsets, seen_columns, D0, D1, D, MASKED, UPCAST)
                    s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
                factor = scale_log2
                if HAS_SOFTCAP or HAS_BIAS or HAS_SLOPES:
                    s = s * scale_log2
                    factor = 1.0
                if HAS_SOFTCAP:
                    s = softcap_log2 * _tanh(s / softcap_log2)
                if HAS_BIAS:
                    inside = there[:, None] & seen_columns[None, :]
                    s += _bias(bias_ptr, rows, keys, stride_it, stride_is, inside)
                if HAS_SLOPES:
                    s -= slope * _distance(rows, keys, distance_shift)
                if MASKED:
                    seen = _is_seen(offs_n, row_begin - n, row_seen)
                    s = tl.where(seen, s, float("-inf"))
                m_new = tl.maximum(m, tl.max(s, 1) * factor + bias)
                pivot = m_new
                if MASKED or HAS_BIAS:
                    # A bias of -inf masks keys too.
                    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
                p = tl.exp2(s * factor - (pivot - bias)[:, None])
                alpha = tl.exp2(m - pivot)
                total = total * alpha + tl.sum(p, 1)
                v0 = _load(v_run_ptr, v_offsets, seen_columns, 0, E0, E, MASKED, UPCAST)
                # Not _plus_product: with a bias and head dim 256 it spills on sm_90.
                rounded = p.to(v_ptr.dtype.element_ty).to(v0.dtype)
                acc0 = tl.dot(rounded, v0, acc0 * alpha[:, None], input_precision=PRECISION)
                if E1 > 0:
                    v1 = _load(v_run_ptr, v_offsets, seen_columns, E0, E1, E, MASKED, UPCAST)
                    acc1 = tl.dot(rounded, v1, acc1 * alpha[:, None], input_precision=PRECISION)
                m = m_new

    # Not "total > 0", since a NaN must stay NaN.
    fully_masked = total == 0.0
    total = tl.where(fully_masked, 1.0, total)
    inverse = tl.where(fully_masked, 0.0, 1.0 / total)
    _store(o_ptr, offsets * (wide_stride * stride_ot), there, acc0 * inverse[:, None], 0, E0, E)
    if E1 > 0:
        _store(
            o_ptr, offsets * (wide_stride * stride_ot), there, acc1 * inverse[:, None], E0, E1, E
        )
    lse = tl.where(fully_masked, float("-inf"), (m + tl.log2(total)) / log2e)
    lse_ptr += (pid // num_tiles).to(tl.int64) * num_queries
    tl.store(lse_ptr + rows, lse, mask=there)


@triton.jit
def _attention_delta_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, statistics_ptr,
    stride_ob, stride_oh, stride_ot,
    stride_db, stride_dh, stride_dt,
    heads, num_queries, num_blocks,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Write row statistics: ``pivot``, the lse in base 2, and ``delta = rowsum(o do) - dlse``.

    A fully masked row has lse = -inf; its pivot is +inf, which makes its probabilities 0.
    """
    pid = tl.program_id(0)
    rows = (pid % num_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = (pid // num_blocks % heads).to(tl.int64)
    sample = (pid // num_blocks // heads).to(tl.int64)
    there = rows < num_queries
    o_ptr += sample * stride_ob + head * stride_oh
    do_ptr += sample * stride_db + head * stride_dh
    o = _load(o_ptr, rows * stride_ot, there, 0, BLOCK_E, E, True, False).to(tl.float32)
    do = _load(do_ptr, rows * stride_dt, there, 0, BLOCK_E, E, True, False).to(tl.float32)
    delta = tl.sum(o * do, 1)
    at = (sample * heads + head) * num_queries + rows
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + at, mask=there, other=0.0)
    pivot = tl.load(lse_ptr + at, mask=there, other=0.0) * 1.4426950408889634
    pivot = tl.where(pivot == float("-inf"), float("inf"), pivot)
    tl.store(statistics_ptr + at * 2, pivot, mask=there)
    tl.store(statistics_ptr + at * 2 + 1, delta, mask=there)


@triton.jit
def _pivot_and_delta(statistics):
    """Split the 8 bytes of a row's statistics, loaded at once, into their two float32."""
    pivot = statistics.to(tl.int32).to(tl.float32, bitcast=True)
    return pivot, (statistics >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["distance_shift"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, statistics_ptr, dq_ptr,
    slopes_ptr, key_range_ptr, bias_ptr, dbias_ptr,
    q_sums_ptr, slope_sums_ptr, run_sums_ptr, squares_ptr,
    tiles_ptr, head_variants_ptr, runs_ptr,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_db, stride_dh, stride_dt,
    stride_dqb, stride_dqh, stride_dqt,
    stride_ib, stride_ih, stride_it, stride_is,
    stride_variant_b, heads, heads_per_group, num_queries, num_keys, num_tiles, num_runs,
    distance_shift, scale, scale_log2, softcap_log2,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_VARIANTS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_KEY_RANGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr,
    TOKEN_SUMS: tl.constexpr, RUN_GRADS: tl.constexpr, SQUARES: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``dq_i = scale * sum_j ds_ij * k_j`` for a tile of queries, and the optional sums."""
    log2e: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    index = pid % num_tiles
    head = (pid // num_tiles) % heads
    b = pid // num_tiles // heads
    first, row_stride, length, last, first_run, end_run, place = _tile(
        tiles_ptr, head_variants_ptr, b * stride_variant_b + head, index, num_tiles, HAS_VARIANTS
    )
    if length == 0:
        return
    offsets = tl.arange(0, BLOCK_M)
    there = offsets < length
    rows = first + row_stride * offsets
    wide_first, wide_stride = first.to(tl.int64), row_stride.to(tl.int64)
    sample = b.to(tl.int64)
    wide_head = head.to(tl.int64)
    kv_head = (head // heads_per_group).to(tl.int64)
    q_ptr += sample * stride_qb + wide_head * stride_qh + wide_first * stride_qt
    k_ptr += sample * stride_kb + kv_head * stride_kh
    v_ptr += sample * stride_vb + kv_head * stride_vh
    do_ptr += sample * stride_db + wide_head * stride_dh + wide_first * stride_dt
    dq_ptr += sample * stride_dqb + wide_head * stride_dqh + wide_first * stride_dqt
    at = (sample * heads + head) * num_queries
    if HAS_BIAS:
        bias_ptr += sample * stride_ib + wide_head * stride_ih
    if BIAS_GRAD:
        dbias_ptr += at * num_keys
    key_begin = 0
    key_end = num_keys
    if HAS_KEY_RANGE:
        key_begin = tl.load(key_range_ptr + b * 2)
        key_end = tl.load(key_range_ptr + b * 2 + 1)
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + b * heads + head) * log2e

    q0 = _load(q_ptr, offsets * (wide_stride * stride_qt), there, 0, D0, D, True, UPCAST)
    do0 = _load(do_ptr, offsets * (wide_stride * stride_dt), there, 0, E0, E, True, UPCAST)
    q1 = q0
    do1 = do0
    dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
    dq1 = 0.0
    if D1 > 0:
        q1 = _load(q_ptr, offsets * (wide_stride * stride_qt), there, D0, D1, D, True, UPCAST)
        dq1 = tl.zeros([BLOCK_M, D1], tl.float32)
    if E1 > 0:
        do1 = _load(do_ptr, offsets * (wide_stride * stride_dt), there, E0, E1, E, True, UPCAST)
    # For rows that do not exist, pivot = +inf and delta = 0.
    statistics = tl.load(statistics_ptr + at + rows, mask=there, other=0x7F800000)
    pivot, delta = _pivot_and_delta(statistics)
    slope_sum = tl.zeros([BLOCK_M], tl.float32)

    offs_n = tl.arange(0, BLOCK_N)
    for run in range(first_run, end_run):
        start, stride, bias, begin, left, right, end, row_begin, row_seen = _clip(
            runs_ptr, run, rows, first, last, key_begin, key_end, BLOCK_N
        )
        k_run_ptr, v_run_ptr, k_step, v_step = _at_run(
            k_ptr, v_ptr, start, stride, stride_kt, stride_vt
        )
        run_sum = tl.zeros([BLOCK_M], tl.float32)
        for MASKED in tl.static_range(2):
            # First the chunks that every row sees, then the chunks on either side of them.
            to = end - right + left if MASKED else right
            for n in range(begin if MASKED else left, to, BLOCK_N):
                if MASKED:
                    n += tl.where(n < left, 0, right - left)
                columns = n + offs_n
                keys = start + stride * columns
                seen_columns = columns < end
                k_offsets = _wide(columns) * k_step
                v_offsets = _wide(columns) * v_step
                k0 = _load(k_run_ptr, k_offsets, seen_columns, 0, D0, D, MASKED, UPCAST)
                v0 = _load(v_run_ptr, v_offsets, seen_columns, 0, E0, E, MASKED, UPCAST)
                k1 = k0
                s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
                dp = tl.dot(do0, tl.trans(v0), input_precision=PRECISION)
                if D1 > 0:
                    k1 = _load(k_run_ptr, k_offsets, seen_columns, D0, D1, D, MASKED, UPCAST)
                    s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
                if E1 > 0:
                    v1 = _load(v_run_ptr, v_offsets, seen_columns, E0, E1, E, MASKED, UPCAST)
                    dp = tl.dot(do1, tl.trans(v1), dp, input_precision=PRECISION)
                s = s * scale_log2
                tangent = s
                inside = there[:, None] & seen_columns[None, :]
                if HAS_SOFTCAP:
                    tangent = _tanh(s / softcap_log2)
                    s = softcap_log2 * tangent
                if HAS_BIAS:
                    s += _bias(bias_ptr, rows, keys, stride_it, stride_is, inside)
                if HAS_SLOPES:
                    s -= slope * _distance(rows, keys, distance_shift)
                p = tl.exp2(s - (pivot - bias)[:, None])
                if MASKED:
                    seen = _is_seen(offs_n, row_begin - n, row_seen)
                    p = tl.where(seen, p, 0.0)
                ds = p * (dp - delta[:, None])
                if HAS_SLOPES:
                    slope_sum += tl.sum(ds * _distance(rows, keys, distance_shift), 1)
                if RUN_GRADS:
                    run_sum += tl.sum(ds, 1)
                if BIAS_GRAD:
                    written = inside
                    if MASKED:
                        written = inside & seen
                    entries = _wide(rows)[:, None] * num_keys + _wide(keys)[None, :]
                    tl.store(dbias_ptr + entries, ds, mask=written)
                if HAS_SOFTCAP:
                    ds *= 1.0 - tangent * tangent
                dq0 = _plus_product(dq0, ds, k0, k_ptr, PRECISION)
                if D1 > 0:
                    dq1 = _plus_product(dq1, ds, k1, k_ptr, PRECISION)
        if RUN_GRADS:
            run_sum = tl.where(there, run_sum, 0.0)
            tl.store(run_sums_ptr + place.to(tl.int64) * num_runs + run, tl.sum(run_sum, 0))

    dq0 *= scale
    _store(dq_ptr, offsets * (wide_stride * stride_dqt), there, dq0, 0, D0, D)
    if D1 > 0:
        dq1 *= scale
        _store(dq_ptr, offsets * (wide_stride * stride_dqt), there, dq1, D0, D1, D)
    # The loops need nearly all registers, so offsets are computed after them. The terms of the
    # slopes' gradient, one per query, are stored as a column, in the layout of dq.
    partial = pid.to(tl.int64)
    if HAS_SLOPES:
        at = partial // num_tiles * num_queries
        tl.store(slope_sums_ptr + at + rows[:, None], -slope_sum[:, None], mask=there[:, None])
    if TOKEN_SUMS:
        # Rows that do not exist have pivot = inf, so p = 0, and add nothing.
        dims = tl.arange(0, D0)
        tl.store(q_sums_ptr + partial * D + dims, tl.sum(dq0, 0), mask=dims < D)
        if D1 > 0:
            more = D0 + tl.arange(0, D1)
            tl.store(q_sums_ptr + partial * D + more, tl.sum(dq1, 0), mask=more < D)
    if SQUARES:
        squares = _squares(dq_ptr, dq0, 0, D0, D)
        if D1 > 0:
            squares += _squares(dq_ptr, dq1, D0, D1, D)
        squares = tl.where(there, squares, 0.0)
        tl.store(squares_ptr + pid, tl.sum(squares, 0))


@triton.jit(do_not_specialize=["distance_shift"])
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, statistics_ptr, dk_ptr, dv_ptr,
    slopes_ptr, key_range_ptr, bias_ptr, k_sums_ptr, v_sums_ptr, squares_ptr,
    tiles_ptr, head_variants_ptr, runs_ptr,
    stride_qb, stride_qh, stride_qt,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_db, stride_dh, stride_dt,
    stride_dkb, stride_dkh, stride_dkt,
    stride_dvb, stride_dvh, stride_dvt,
    stride_ib, stride_ih, stride_it, stride_is,
    stride_variant_b, heads, heads_per_group, heads_per_program, num_queries, num_tiles,
    distance_shift, scale, scale_log2, softcap_log2,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    E: tl.constexpr, E0: tl.constexpr, E1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_VARIANTS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_KEY_RANGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKEN_SUMS: tl.constexpr, SQUARES: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write ``dv_j = sum_i p_ij * do_i``, ``dk_j = scale * sum_i ds_ij * q_i`` for a tile of keys.

    Sums over `heads_per_program` query heads, which share a variant and a key head.
    """
    log2e: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    index = pid % num_tiles
    programs = heads // heads_per_program
    out_head = (pid // num_tiles) % programs
    b = pid // num_tiles // programs
    first_head = out_head * heads_per_program
    first, row_stride, length, last, first_run, end_run, _place = _tile(
        tiles_ptr,
        head_variants_ptr,
        b * stride_variant_b + first_head,
        index,
        num_tiles,
        HAS_VARIANTS,
    )
    if length == 0:
        return
    offsets = tl.arange(0, BLOCK_M)
    there = offsets < length
    rows = first + row_stride * offsets
    wide_first, wide_stride = first.to(tl.int64), row_stride.to(tl.int64)
    sample = b.to(tl.int64)
    kv_head = (first_head // heads_per_group).to(tl.int64)
    k_ptr += sample * stride_kb + kv_head * stride_kh + wide_first * stride_kt
    v_ptr += sample * stride_vb + kv_head * stride_vh + wide_first * stride_vt
    seen_rows = there
    if HAS_KEY_RANGE:
        key_begin = tl.load(key_range_ptr + b * 2)
        key_end = tl.load(key_range_ptr + b * 2 + 1)
        seen_rows = there & (rows >= key_begin) & (rows < key_end)

    k0 = _load(k_ptr, offsets * (wide_stride * stride_kt), there, 0, D0, D, True, UPCAST)
    v0 = _load(v_ptr, offsets * (wide_stride * stride_vt), there, 0, E0, E, True, UPCAST)
    k1 = k0
    v1 = v0
    dk0 = tl.zeros([BLOCK_M, D0], tl.float32)
    dv0 = tl.zeros([BLOCK_M, E0], tl.float32)
    dk1 = 0.0
    dv1 = 0.0
    if D1 > 0:
        k1 = _load(k_ptr, offsets * (wide_stride * stride_kt), there, D0, D1, D, True, UPCAST)
        dk1 = tl.zeros([BLOCK_M, D1], tl.float32)
    if E1 > 0:
        v1 = _load(v_ptr, offsets * (wide_stride * stride_vt), there, E0, E1, E, True, UPCAST)
        dv1 = tl.zeros([BLOCK_M, E1], tl.float32)

    offs_n = tl.arange(0, BLOCK_N)
    # A value that is known to be at least 0 needs no second register for its sign.
    tl.assume(stride_qh >= 0)
    wide_head = first_head.to(tl.int64)
    q_ptr += sample * stride_qb + wide_head * stride_qh
    do_ptr += sample * stride_db + wide_head * stride_dh
    statistics_ptr += (sample * heads + wide_head) * num_queries
    if HAS_BIAS:
        bias_ptr += sample * stride_ib + wide_head * stride_ih
    dk_ptr += sample * stride_dkb + out_head.to(tl.int64) * stride_dkh + wide_first * stride_dkt
    dv_ptr += sample * stride_dvb + out_head.to(tl.int64) * stride_dvh + wide_first * stride_dvt
    for i in range(heads_per_program):
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + b * heads + first_head + i) * log2e
        for run in range(first_run, end_run):
            start, stride, bias, begin, left, right, end, row_begin, row_seen = _clip(
                runs_ptr, run, rows, first, last, 0, num_queries, BLOCK_N
            )
            q_run_ptr, do_run_ptr, q_step, do_step = _at_run(
                q_ptr, do_ptr, start, stride, stride_qt, stride_dt
            )
            for MASKED in tl.static_range(2):
                # First the chunks that every row sees, then the chunks on either side of them.
                to = end - right + left if MASKED else right
                for n in range(begin if MASKED else left, to, BLOCK_N):
                    if MASKED:
                        n += tl.where(n < left, 0, right - left)
                    columns = n + offs_n
                    queries = start + stride * columns
                    seen_columns = columns < end
                    q_offsets = _wide(columns) * q_step
                    do_offsets = _wide(columns) * do_step
                    q0 = _load(q_run_ptr, q_offsets, seen_columns, 0, D0, D, MASKED, UPCAST)
                    q1 = q0
                    s = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
                    if D1 > 0:
                        q1 = _load(q_run_ptr, q_offsets, seen_columns, D0, D1, D, MASKED, UPCAST)
                        s = tl.dot(k1, tl.trans(q1), s, input_precision=PRECISION)
                    if MASKED:
                        statistics = tl.load(statistics_ptr + queries, seen_columns, other=0)
                    else:
                        statistics = tl.load(statistics_ptr + queries)
                    pivot, delta = _pivot_and_delta(statistics)
                    s = s * scale_log2
                    tangent = s
                    if HAS_SOFTCAP:
                        tangent = _tanh(s / softcap_log2)
                        s = softcap_log2 * tangent
                    if HAS_BIAS:
                        inside = there[:, None] & seen_columns[None, :]
                        s += _bias(bias_ptr, rows, queries, stride_is, stride_it, inside)
                    if HAS_SLOPES:
                        # The shift applies to query - key, but here keys are the rows.
                        s -= slope * _distance(rows, queries, -distance_shift)
                    p = tl.exp2(s - (pivot - bias)[None, :])
                    if MASKED:
                        seen = _is_seen(columns, row_begin, row_seen)
                        p = tl.where(seen, p, 0.0)
                    if HAS_KEY_RANGE:
                        p = tl.where(seen_rows[:, None], p, 0.0)
                    do0 = _load(do_run_ptr, do_offsets, seen_columns, 0, E0, E, MASKED, UPCAST)
                    dv0 = _plus_product(dv0, p, do0, do_ptr, PRECISION)
                    dp = tl.dot(v0, tl.trans(do0), input_precision=PRECISION)
                    if E1 > 0:
                        do1 = _load(
                            do_run_ptr, do_offsets, seen_columns, E0, E1, E, MASKED, UPCAST
                        )
                        dv1 = _plus_product(dv1, p, do1, do_ptr, PRECISION)
                        dp = tl.dot(v1, tl.trans(do1), dp, input_precision=PRECISION)
                    ds = p * (dp - delta[None, :])
                    if HAS_SOFTCAP:
                        ds *= 1.0 - tangent * tangent
                    dk0 = _plus_product(dk0, ds, q0, q_ptr, PRECISION)
                    if D1 > 0:
                        dk1 = _plus_product(dk1, ds, q1, q_ptr, PRECISION)
        q_ptr += stride_qh
        do_ptr += stride_dh
        statistics_ptr += num_queries
        if HAS_BIAS:
            bias_ptr += stride_ih

    dk0 *= scale
    _store(dk_ptr, offsets * (wide_stride * stride_dkt), there, dk0, 0, D0, D)
    _store(dv_ptr, offsets * (wide_stride * stride_dvt), there, dv0, 0, E0, E)
    if D1 > 0:
        dk1 *= scale
        _store(dk_ptr, offsets * (wide_stride * stride_dkt), there, dk1, D0, D1, D)
    if E1 > 0:
        _store(dv_ptr, offsets * (wide_stride * stride_dvt), there, dv1, E0, E1, E)
    if TOKEN_SUMS:
        # Rows that do not exist have k = v = 0, but p = e^-lse; they are masked out here.
        partial = (sample * programs + out_head) * num_tiles + index
        _store_sum(k_sums_ptr + partial * D, dk0, there, 0, D0, D)
        _store_sum(v_sums_ptr + partial * E, dv0, there, 0, E0, E)
        if D1 > 0:
            _store_sum(k_sums_ptr + partial * D, dk1, there, D0, D1, D)
        if E1 > 0:
            _store_sum(v_sums_ptr + partial * E, dv1, there, E0, E1, E)
    if SQUARES:
        squares = _squares(dk_ptr, dk0, 0, D0, D) + _squares(dv_ptr, dv0, 0, E0, E)
        if D1 > 0:
            squares += _squares(dk_ptr, dk1, D0, D1, D)
        if E1 > 0:
            squares += _squares(dv_ptr, dv1, E0, E1, E)
        # Use `rows` and `last` for the mask, since the loop holds them in registers anyway.
        squares = tl.where(rows <= last, squares, 0.0)
        tl.store(squares_ptr + pid, tl.sum(squares, 0))
