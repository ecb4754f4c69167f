"""Flash attention over a tile graph: a forward kernel and a deterministic split backward.

A program owns one tile of rows and walks the runs of its group. The band of a run is clipped to
the tile in closed form: columns that no row sees are never touched, columns that every row sees
need no mask. Scores are kept in base 2. No kernel uses atomics, so results repeat bit for bit.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim
of queries and keys, E that of values. A head dim is taken in one part or two, powers of two: D0
and D1, E0 and E1.
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
    """Head dims FIRST.. of the rows at `offsets`, `[rows, WIDTH]`; 0 behind D and where unseen."""
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
        # Triton's interpreter gets products of bfloat16 wrong.
        x = x.to(tl.float32)
    return x


@triton.jit
def _store(ptr, offsets, seen, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Writes the layout that `_load` reads."""
    dims = FIRST + tl.arange(0, WIDTH)
    ptrs = ptr + offsets[:, None] + dims[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=seen[:, None] & (dims < D)[None, :])


@triton.jit
def _store_sum(ptr, x, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Writes the sum over the rows that are there to head dims FIRST.. at `ptr`."""
    dims = FIRST + tl.arange(0, WIDTH)
    tl.store(ptr + dims, tl.sum(tl.where(there[:, None], x, 0.0), 0), mask=dims < D)


@triton.jit
def _squares(ptr, x, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Each row's sum of squares, as rounded by `_store`; in fp64, which holds 1e30^2."""
    stored = x.to(ptr.dtype.element_ty).to(tl.float64)
    if FIRST + WIDTH > D:
        dims = FIRST + tl.arange(0, WIDTH)
        stored = tl.where((dims < D)[None, :], stored, 0.0)
    return tl.sum(stored * stored, 1)


@triton.jit
def _tile(
    tiles_ptr,
    tile_borders_ptr,
    head_variants_ptr,
    groups_ptr,
    variant_at,
    index,
    BLOCK_M: tl.constexpr,
):
    """The rows of the variant's tile number `index`.

    Returns whether it exists, its place in its group, positions of the rows, which of them are
    there, the first and last of these, and the runs of the group.
    """
    variant = tl.load(head_variants_ptr + variant_at)
    tile = tl.load(tile_borders_ptr + variant) + index
    exists = tile < tl.load(tile_borders_ptr + variant + 1)
    group = tl.load(tiles_ptr + tile * 2, mask=exists, other=0)
    place = tl.load(tiles_ptr + tile * 2 + 1, mask=exists, other=0)
    start = tl.load(groups_ptr + group * 5, mask=exists, other=0)
    stride = tl.load(groups_ptr + group * 5 + 1, mask=exists, other=0)
    length = tl.load(groups_ptr + group * 5 + 2, mask=exists, other=0)
    first_run = tl.load(groups_ptr + group * 5 + 3, mask=exists, other=0)
    end_run = tl.load(groups_ptr + group * 5 + 4, mask=exists, other=0)
    offsets = place * BLOCK_M + tl.arange(0, BLOCK_M)
    there = offsets < length
    first = start + stride * (place * BLOCK_M)
    last = start + stride * (tl.minimum(place * BLOCK_M + BLOCK_M, length) - 1)
    exists = exists & (place * BLOCK_M < length)
    return exists, place, start + stride * offsets, there, first, last, first_run, end_run


@triton.jit
def _clip(
    runs_ptr, log_multiplicity_ptr, run, first, last, column_begin, column_end,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A run, and its columns seen by some row of a tile, in chunks of BLOCK_N.

    Returns its start, stride, band and log multiplicity in base 2, and begin <= left <= right <=
    end: the chunks of [left, right) are whole and seen by every row, those of [begin, left) and
    [right, end) need a mask. Column n is ``start + n stride``, so the least n at or above a bound
    is ``max(bound - start + stride - 1, 0) // stride``.
    """
    start = tl.load(runs_ptr + run * 5)
    stride = tl.load(runs_ptr + run * 5 + 1)
    length = tl.load(runs_ptr + run * 5 + 2)
    lo = tl.load(runs_ptr + run * 5 + 3)
    hi = tl.load(runs_ptr + run * 5 + 4)
    bias = tl.load(log_multiplicity_ptr + run) * 1.4426950408889634
    above = tl.maximum(first - hi, column_begin) - start
    below = tl.minimum(last - lo, column_end - 1) - start
    begin = tl.maximum(above + stride - 1, 0) // stride
    end = tl.minimum(tl.maximum(below + stride, 0) // stride, length)
    begin = tl.minimum(begin, end)
    full_begin = tl.maximum(tl.maximum(last - hi - start + stride - 1, 0) // stride, begin)
    full_end = tl.minimum(tl.maximum(first - lo - start + stride, 0) // stride, end)
    left = tl.minimum(begin + (full_begin - begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N, end)
    right = left + tl.maximum(full_end - left, 0) // BLOCK_N * BLOCK_N
    return start, stride, lo, hi, bias, begin, left, right, end


@triton.jit
def _plus_product(total, weights, x, ptr, PRECISION: tl.constexpr):
    """``total + weights x``, with weights rounded to the dtype of the tensor at `ptr`."""
    rounded = weights.to(ptr.dtype.element_ty).to(x.dtype)
    return tl.dot(rounded, x, total, input_precision=PRECISION)


@triton.jit
def _tanh(x):
    """tanh, to some units in the last place also near 0."""
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
    """The bias in base 2 of `[rows, columns]`, 0 where unseen."""
    offsets = (
        rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
    )
    return tl.load(ptr + offsets, mask=seen, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit(do_not_specialize=["distance_shift"])
def _attention_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    sinks_ptr, slopes_ptr, key_range_ptr, bias_ptr,
    tiles_ptr, tile_borders_ptr, head_variants_ptr, groups_ptr, runs_ptr, log_multiplicity_ptr,
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
    HAS_SINKS: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_KEY_RANGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``o = sum_j m e^s v / sum_j m e^s`` and ``lse = log sum_j m e^s`` for a tile of queries."""
    log2e: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    index = pid % num_tiles
    head = (pid // num_tiles) % heads
    b = pid // num_tiles // heads
    exists, _place, rows, there, first, last, first_run, end_run = _tile(
        tiles_ptr, tile_borders_ptr, head_variants_ptr, groups_ptr,
        b * stride_variant_b + head, index, BLOCK_M,
    )  # fmt: skip
    if not exists:
        return
    sample = b.to(tl.int64)
    kv_head = (head // heads_per_group).to(tl.int64)
    q_ptr += sample * stride_qb + head.to(tl.int64) * stride_qh
    k_ptr += sample * stride_kb + kv_head * stride_kh
    v_ptr += sample * stride_vb + kv_head * stride_vh
    o_ptr += sample * stride_ob + head.to(tl.int64) * stride_oh
    if HAS_BIAS:
        bias_ptr += sample * stride_ib + head.to(tl.int64) * stride_ih
    lse_ptr += (sample * heads + head) * num_queries
    key_begin = 0
    key_end = num_keys
    if HAS_KEY_RANGE:
        key_begin = tl.load(key_range_ptr + b * 2)
        key_end = tl.load(key_range_ptr + b * 2 + 1)
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + b * heads + head) * log2e

    row_offsets = rows.to(tl.int64)
    q0 = _load(q_ptr, row_offsets * stride_qt, there, 0, D0, D, True, UPCAST)
    q1 = q0
    acc0 = tl.zeros([BLOCK_M, E0], tl.float32)
    acc1 = 0.0
    if D1 > 0:
        q1 = _load(q_ptr, row_offsets * stride_qt, there, D0, D1, D, True, UPCAST)
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
        start, stride, lo, hi, bias, begin, left, right, end = _clip(
            runs_ptr, log_multiplicity_ptr, run, first, last, key_begin, key_end, BLOCK_N
        )
        columns = start + stride * offs_n
        for MASKED in tl.static_range(2):
            # First the chunks that every row sees, then those on either side of them.
            to = end - right + left if MASKED else right
            for n in range(begin if MASKED else left, to, BLOCK_N):
                if MASKED:
                    n += tl.where(n < left, 0, right - left)
                # The online softmax, in base 2.
                keys = columns + n * stride
                seen_columns = n + offs_n < end
                positions = keys.to(tl.int64)
                k_offsets = positions * stride_kt
                v_offsets = positions * stride_vt
                k0 = _load(k_ptr, k_offsets, seen_columns, 0, D0, D, MASKED, UPCAST)
                s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
                if D1 > 0:
                    k1 = _load(k_ptr, k_offsets, seen_columns, D0, D1, D, MASKED, UPCAST)
                    s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
                distance = rows[:, None] - keys[None, :]
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
                    s -= slope * tl.abs(distance + distance_shift).to(tl.float32)
                if MASKED:
                    seen = seen_columns[None, :] & (distance >= lo) & (distance <= hi)
                    s = tl.where(seen, s, float("-inf"))
                m_new = tl.maximum(m, tl.max(s, 1) * factor + bias)
                pivot = m_new
                if MASKED or HAS_BIAS:
                    # A bias of -inf masks, too.
                    pivot = tl.where(m_new == float("-inf"), 0.0, m_new)
                p = tl.exp2(s * factor - (pivot - bias)[:, None])
                alpha = tl.exp2(m - pivot)
                total = total * alpha + tl.sum(p, 1)
                v0 = _load(v_ptr, v_offsets, seen_columns, 0, E0, E, MASKED, UPCAST)
                # Not _plus_product: with a bias and head dim 256 it spills on sm_90.
                rounded = p.to(v_ptr.dtype.element_ty).to(v0.dtype)
                acc0 = tl.dot(rounded, v0, acc0 * alpha[:, None], input_precision=PRECISION)
                if E1 > 0:
                    v1 = _load(v_ptr, v_offsets, seen_columns, E0, E1, E, MASKED, UPCAST)
                    acc1 = tl.dot(rounded, v1, acc1 * alpha[:, None], input_precision=PRECISION)
                m = m_new

    # Not "total > 0": a NaN must stay one.
    fully_masked = total == 0.0
    total = tl.where(fully_masked, 1.0, total)
    inverse = tl.where(fully_masked, 0.0, 1.0 / total)
    _store(o_ptr, row_offsets * stride_ot, there, acc0 * inverse[:, None], 0, E0, E)
    if E1 > 0:
        _store(o_ptr, row_offsets * stride_ot, there, acc1 * inverse[:, None], E0, E1, E)
    lse = tl.where(fully_masked, float("-inf"), (m + tl.log2(total)) / log2e)
    tl.store(lse_ptr + rows, lse, mask=there)


@triton.jit
def _attention_delta_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, pivot_ptr,
    stride_ob, stride_oh, stride_ot,
    stride_db, stride_dh, stride_dt,
    heads, num_queries, num_blocks,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """``delta = rowsum(o do) - dlse``, and ``pivot``, the lse in base 2.

    A row without key has lse = -inf; its pivot is +inf, which makes its probabilities 0.
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
    tl.store(delta_ptr + at, delta, mask=there)
    pivot = tl.load(lse_ptr + at, mask=there, other=0.0) * 1.4426950408889634
    pivot = tl.where(pivot == float("-inf"), float("inf"), pivot)
    tl.store(pivot_ptr + at, pivot, mask=there)


@triton.jit(do_not_specialize=["distance_shift"])
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, pivot_ptr, delta_ptr, dq_ptr,
    slopes_ptr, key_range_ptr, bias_ptr, dbias_ptr,
    q_sums_ptr, slope_sums_ptr, run_sums_ptr, squares_ptr,
    tiles_ptr, tile_borders_ptr, head_variants_ptr, groups_ptr, runs_ptr, log_multiplicity_ptr,
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
    HAS_SLOPES: tl.constexpr, HAS_KEY_RANGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, BIAS_GRAD: tl.constexpr,
    TOKEN_SUMS: tl.constexpr, RUN_GRADS: tl.constexpr, SQUARES: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dq_i = scale sum_j ds_ij k_j`` for one tile of queries, and the optional sums."""
    log2e: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    index = pid % num_tiles
    head = (pid // num_tiles) % heads
    b = pid // num_tiles // heads
    exists, place, rows, there, first, last, first_run, end_run = _tile(
        tiles_ptr, tile_borders_ptr, head_variants_ptr, groups_ptr,
        b * stride_variant_b + head, index, BLOCK_M,
    )  # fmt: skip
    if not exists:
        return
    sample = b.to(tl.int64)
    wide_head = head.to(tl.int64)
    kv_head = (head // heads_per_group).to(tl.int64)
    q_ptr += sample * stride_qb + wide_head * stride_qh
    k_ptr += sample * stride_kb + kv_head * stride_kh
    v_ptr += sample * stride_vb + kv_head * stride_vh
    do_ptr += sample * stride_db + wide_head * stride_dh
    dq_ptr += sample * stride_dqb + wide_head * stride_dqh
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

    row_offsets = rows.to(tl.int64)
    q0 = _load(q_ptr, row_offsets * stride_qt, there, 0, D0, D, True, UPCAST)
    do0 = _load(do_ptr, row_offsets * stride_dt, there, 0, E0, E, True, UPCAST)
    q1 = q0
    do1 = do0
    dq0 = tl.zeros([BLOCK_M, D0], tl.float32)
    dq1 = 0.0
    if D1 > 0:
        q1 = _load(q_ptr, row_offsets * stride_qt, there, D0, D1, D, True, UPCAST)
        dq1 = tl.zeros([BLOCK_M, D1], tl.float32)
    if E1 > 0:
        do1 = _load(do_ptr, row_offsets * stride_dt, there, E0, E1, E, True, UPCAST)
    pivot = tl.load(pivot_ptr + at + rows, mask=there, other=float("inf"))
    delta = tl.load(delta_ptr + at + rows, mask=there, other=0.0)
    slope_sum = tl.zeros([BLOCK_M], tl.float32)

    offs_n = tl.arange(0, BLOCK_N)
    for run in range(first_run, end_run):
        start, stride, lo, hi, bias, begin, left, right, end = _clip(
            runs_ptr, log_multiplicity_ptr, run, first, last, key_begin, key_end, BLOCK_N
        )
        columns = start + stride * offs_n
        run_sum = tl.zeros([BLOCK_M], tl.float32)
        for MASKED in tl.static_range(2):
            # First the chunks that every row sees, then those on either side of them.
            to = end - right + left if MASKED else right
            for n in range(begin if MASKED else left, to, BLOCK_N):
                if MASKED:
                    n += tl.where(n < left, 0, right - left)
                keys = columns + n * stride
                seen_columns = n + offs_n < end
                positions = keys.to(tl.int64)
                k_offsets = positions * stride_kt
                v_offsets = positions * stride_vt
                k0 = _load(k_ptr, k_offsets, seen_columns, 0, D0, D, MASKED, UPCAST)
                v0 = _load(v_ptr, v_offsets, seen_columns, 0, E0, E, MASKED, UPCAST)
                k1 = k0
                s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
                dp = tl.dot(do0, tl.trans(v0), input_precision=PRECISION)
                if D1 > 0:
                    k1 = _load(k_ptr, k_offsets, seen_columns, D0, D1, D, MASKED, UPCAST)
                    s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
                if E1 > 0:
                    v1 = _load(v_ptr, v_offsets, seen_columns, E0, E1, E, MASKED, UPCAST)
                    dp = tl.dot(do1, tl.trans(v1), dp, input_precision=PRECISION)
                distance = rows[:, None] - keys[None, :]
                s = s * scale_log2
                tangent = s
                inside = there[:, None] & seen_columns[None, :]
                if HAS_SOFTCAP:
                    tangent = _tanh(s / softcap_log2)
                    s = softcap_log2 * tangent
                if HAS_BIAS:
                    s += _bias(bias_ptr, rows, keys, stride_it, stride_is, inside)
                if HAS_SLOPES:
                    s -= slope * tl.abs(distance + distance_shift).to(tl.float32)
                p = tl.exp2(s - (pivot - bias)[:, None])
                if MASKED:
                    seen = seen_columns[None, :] & (distance >= lo) & (distance <= hi)
                    p = tl.where(seen, p, 0.0)
                ds = p * (dp - delta[:, None])
                if HAS_SLOPES:
                    slope_sum += tl.sum(ds * tl.abs(distance + distance_shift).to(tl.float32), 1)
                if RUN_GRADS:
                    run_sum += tl.sum(ds, 1)
                if BIAS_GRAD:
                    written = inside
                    if MASKED:
                        written = inside & (distance >= lo) & (distance <= hi)
                    entries = rows.to(tl.int64)[:, None] * num_keys + positions[None, :]
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
    _store(dq_ptr, row_offsets * stride_dqt, there, dq0, 0, D0, D)
    if D1 > 0:
        dq1 *= scale
        _store(dq_ptr, row_offsets * stride_dqt, there, dq1, D0, D1, D)
    # The loops need nearly all registers, so offsets are computed here and not before them. The
    # slopes' terms, one for each query, are stored as a column: that is dq's layout.
    partial = pid.to(tl.int64)
    if HAS_SLOPES:
        at = partial // num_tiles * num_queries
        tl.store(slope_sums_ptr + at + rows[:, None], -slope_sum[:, None], mask=there[:, None])
    if TOKEN_SUMS:
        # Rows that are not there have p = 0 through pivot = inf, so they add nothing.
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
    q_ptr, k_ptr, v_ptr, do_ptr, pivot_ptr, delta_ptr, dk_ptr, dv_ptr,
    slopes_ptr, key_range_ptr, bias_ptr, k_sums_ptr, v_sums_ptr, squares_ptr,
    tiles_ptr, tile_borders_ptr, head_variants_ptr, groups_ptr, runs_ptr, log_multiplicity_ptr,
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
    HAS_SLOPES: tl.constexpr, HAS_KEY_RANGE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKEN_SUMS: tl.constexpr, SQUARES: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dv_j = sum_i p_ij do_i`` and ``dk_j = scale sum_i ds_ij q_i`` for one tile of keys.

    Sums over `heads_per_program` query heads, which use the same variant and key head.
    """
    log2e: tl.constexpr = 1.4426950408889634
    pid = tl.program_id(0)
    index = pid % num_tiles
    programs = heads // heads_per_program
    out_head = (pid // num_tiles) % programs
    b = pid // num_tiles // programs
    first_head = out_head * heads_per_program
    exists, _place, rows, there, first, last, first_run, end_run = _tile(
        tiles_ptr, tile_borders_ptr, head_variants_ptr, groups_ptr,
        b * stride_variant_b + first_head, index, BLOCK_M,
    )  # fmt: skip
    if not exists:
        return
    sample = b.to(tl.int64)
    kv_head = (first_head // heads_per_group).to(tl.int64)
    k_ptr += sample * stride_kb + kv_head * stride_kh
    v_ptr += sample * stride_vb + kv_head * stride_vh
    seen_rows = there
    if HAS_KEY_RANGE:
        key_begin = tl.load(key_range_ptr + b * 2)
        key_end = tl.load(key_range_ptr + b * 2 + 1)
        seen_rows = there & (rows >= key_begin) & (rows < key_end)

    row_offsets = rows.to(tl.int64)
    k0 = _load(k_ptr, row_offsets * stride_kt, there, 0, D0, D, True, UPCAST)
    v0 = _load(v_ptr, row_offsets * stride_vt, there, 0, E0, E, True, UPCAST)
    k1 = k0
    v1 = v0
    dk0 = tl.zeros([BLOCK_M, D0], tl.float32)
    dv0 = tl.zeros([BLOCK_M, E0], tl.float32)
    dk1 = 0.0
    dv1 = 0.0
    if D1 > 0:
        k1 = _load(k_ptr, row_offsets * stride_kt, there, D0, D1, D, True, UPCAST)
        dk1 = tl.zeros([BLOCK_M, D1], tl.float32)
    if E1 > 0:
        v1 = _load(v_ptr, row_offsets * stride_vt, there, E0, E1, E, True, UPCAST)
        dv1 = tl.zeros([BLOCK_M, E1], tl.float32)

    # The shift is one of query - key, and keys are rows here. One matrix of distances for slopes
    # and band spares registers.
    shifted = rows - distance_shift if HAS_SLOPES else rows
    offs_n = tl.arange(0, BLOCK_N)
    for i in range(heads_per_program):
        head = first_head + i
        wide_head = first_head.to(tl.int64) + i
        head_q_ptr = q_ptr + sample * stride_qb + wide_head * stride_qh
        head_do_ptr = do_ptr + sample * stride_db + wide_head * stride_dh
        head_pivot_ptr = pivot_ptr + (sample * heads + head) * num_queries
        head_delta_ptr = delta_ptr + (sample * heads + head) * num_queries
        head_bias_ptr = bias_ptr
        if HAS_BIAS:
            head_bias_ptr = bias_ptr + sample * stride_ib + wide_head * stride_ih
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + b * heads + head) * log2e
        for run in range(first_run, end_run):
            start, stride, lo, hi, bias, begin, left, right, end = _clip(
                runs_ptr, log_multiplicity_ptr, run, first, last, 0, num_queries, BLOCK_N
            )
            if HAS_SLOPES:
                lo -= distance_shift
                hi -= distance_shift
            columns = start + stride * offs_n
            for MASKED in tl.static_range(2):
                # First the chunks that every row sees, then those on either side of them.
                to = end - right + left if MASKED else right
                for n in range(begin if MASKED else left, to, BLOCK_N):
                    if MASKED:
                        n += tl.where(n < left, 0, right - left)
                    queries = columns + n * stride
                    seen_columns = n + offs_n < end
                    positions = queries.to(tl.int64)
                    q_offsets = positions * stride_qt
                    do_offsets = positions * stride_dt
                    q0 = _load(head_q_ptr, q_offsets, seen_columns, 0, D0, D, MASKED, UPCAST)
                    q1 = q0
                    s = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
                    if D1 > 0:
                        q1 = _load(head_q_ptr, q_offsets, seen_columns, D0, D1, D, MASKED, UPCAST)
                        s = tl.dot(k1, tl.trans(q1), s, input_precision=PRECISION)
                    if MASKED:
                        pivot = tl.load(
                            head_pivot_ptr + queries, mask=seen_columns, other=float("inf")
                        )
                        delta = tl.load(head_delta_ptr + queries, mask=seen_columns, other=0.0)
                    else:
                        pivot = tl.load(head_pivot_ptr + queries)
                        delta = tl.load(head_delta_ptr + queries)
                    s = s * scale_log2
                    tangent = s
                    if HAS_SOFTCAP:
                        tangent = _tanh(s / softcap_log2)
                        s = softcap_log2 * tangent
                    if HAS_BIAS:
                        inside = there[:, None] & seen_columns[None, :]
                        s += _bias(head_bias_ptr, rows, queries, stride_is, stride_it, inside)
                    distance = shifted[:, None] - queries[None, :]
                    if HAS_SLOPES:
                        s -= slope * tl.abs(distance).to(tl.float32)
                    p = tl.exp2(s - (pivot - bias)[None, :])
                    if MASKED:
                        seen = seen_columns[None, :] & (distance >= lo) & (distance <= hi)
                        p = tl.where(seen, p, 0.0)
                    if HAS_KEY_RANGE:
                        p = tl.where(seen_rows[:, None], p, 0.0)
                    do0 = _load(head_do_ptr, do_offsets, seen_columns, 0, E0, E, MASKED, UPCAST)
                    dv0 = _plus_product(dv0, p, do0, head_do_ptr, PRECISION)
                    dp = tl.dot(v0, tl.trans(do0), input_precision=PRECISION)
                    if E1 > 0:
                        do1 = _load(
                            head_do_ptr, do_offsets, seen_columns, E0, E1, E, MASKED, UPCAST
                        )
                        dv1 = _plus_product(dv1, p, do1, head_do_ptr, PRECISION)
                        dp = tl.dot(v1, tl.trans(do1), dp, input_precision=PRECISION)
                    ds = p * (dp - delta[None, :])
                    if HAS_SOFTCAP:
                        ds *= 1.0 - tangent * tangent
                    dk0 = _plus_product(dk0, ds, q0, head_q_ptr, PRECISION)
                    if D1 > 0:
                        dk1 = _plus_product(dk1, ds, q1, head_q_ptr, PRECISION)

    dk_ptr += sample * stride_dkb + out_head.to(tl.int64) * stride_dkh
    dv_ptr += sample * stride_dvb + out_head.to(tl.int64) * stride_dvh
    dk0 *= scale
    _store(dk_ptr, row_offsets * stride_dkt, there, dk0, 0, D0, D)
    _store(dv_ptr, row_offsets * stride_dvt, there, dv0, 0, E0, E)
    if D1 > 0:
        dk1 *= scale
        _store(dk_ptr, row_offsets * stride_dkt, there, dk1, D0, D1, D)
    if E1 > 0:
        _store(dv_ptr, row_offsets * stride_dvt, there, dv1, E0, E1, E)
    if TOKEN_SUMS:
        # Rows that are not there have k = v = 0, but p = e^-lse; they are masked out here.
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
        # Existing rows, from values that the loop holds in registers anyway.
        squares = tl.where(rows <= last, squares, 0.0)
        tl.store(squares_ptr + pid, tl.sum(squares, 0))
