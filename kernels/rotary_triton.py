"""Rotary position embeddings: one Triton kernel for queries and keys, and its launch.

Letters: B samples, H query heads, G key heads, T tokens, D head dim.
"""

import triton
import triton.language as tl
from torch import Tensor

from .layout import on_device

# ruff: noqa: N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

# Coordinate pairs of one head per program, and heads that a program rotates by the same angles.
PAIRS_AT_ONCE = 1024
HEADS = 4
# Without fused multiply-add, the bits equal those of the reference implementation.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _turn(
    x_ptr, new_ptr, stride_xh, stride_nh, first_head, heads, there, cos, sin,
    PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Write ``(a*cos - b*sin, b*cos + a*sin)`` for the pairs (a, b) of HEADS heads."""
    for i in tl.static_range(HEADS):
        head = (first_head + i).to(tl.int64)
        x, new = x_ptr + head * stride_xh, new_ptr + head * stride_nh
        mask = tl.where(head < heads, there, False)  # Triton 3.9's interpreter fails for & here
        a = tl.load(x, mask=mask, other=0.0).to(cos.dtype)
        b = tl.load(x + PAIRS, mask=mask, other=0.0).to(cos.dtype)
        tl.store(new, (a * cos - b * sin).to(new_ptr.dtype.element_ty), mask=mask)
        tl.store(new + PAIRS, (b * cos + a * sin).to(new_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _rotary_kernel(
    q_ptr, k_ptr, new_q_ptr, new_k_ptr, cos_ptr, sin_ptr,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_nqb, stride_nqh, stride_nqt, stride_nkb, stride_nkh, stride_nkt,
    heads, key_heads, num_tokens, num_blocks,
    PAIRS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, HEADS: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """Rotate HEADS heads of q or of k in a block of a sample's tokens."""
    pid = tl.program_id(0)
    query_groups = tl.cdiv(heads, HEADS)
    groups = query_groups + tl.cdiv(key_heads, HEADS)
    group = pid % groups
    tokens = (pid // groups % num_blocks * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    b = (pid // groups // num_blocks).to(tl.int64)
    pairs = tl.arange(0, BLOCK_P)[None, :]
    there = (tokens < num_tokens) & (pairs < PAIRS)
    cos = tl.load(cos_ptr + tokens * PAIRS + pairs, mask=there, other=0.0)
    sin = tl.load(sin_ptr + tokens * PAIRS + pairs, mask=there, other=0.0)
    if BACK:
        sin = -sin
    if group < query_groups:
        _turn(
            q_ptr + b * stride_qb + tokens * stride_qt + pairs,
            new_q_ptr + b * stride_nqb + tokens * stride_nqt + pairs, stride_qh, stride_nqh,
            group * HEADS, heads, there, cos, sin, PAIRS, HEADS,
        )  # fmt: skip
    else:
        _turn(
            k_ptr + b * stride_kb + tokens * stride_kt + pairs,
            new_k_ptr + b * stride_nkb + tokens * stride_nkt + pairs, stride_kh, stride_nkh,
            (group - query_groups) * HEADS, key_heads, there, cos, sin, PAIRS, HEADS,
        )  # fmt: skip


def blocks(pairs: int) -> dict[str, int]:
    """Return the tile sizes of a program, for heads with this number of coordinate pairs."""
    block = triton.next_power_of_2(pairs)
    tokens = max(1, PAIRS_AT_ONCE // block)
    return {"PAIRS": pairs, "BLOCK_P": block, "BLOCK_T": tokens, "HEADS": HEADS}


def launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool, new_q: Tensor, new_k: Tensor
) -> None:
    """Write the rotated q and k to new_q and new_k, see `rotary.apply_rotary`."""
    (batch, heads, tokens, _), key_heads = q.shape, k.shape[1]
    sizes = blocks(cos.shape[1])
    num_blocks = triton.cdiv(tokens, sizes["BLOCK_T"])
    groups = triton.cdiv(heads, HEADS) + triton.cdiv(key_heads, HEADS)
    if batch * num_blocks * groups:
        with on_device(q):
            _rotary_kernel[(batch * num_blocks * groups,)](
                q, k, new_q, new_k, cos, sin,
                *(stride for x in (q, k, new_q, new_k) for stride in x.stride()[:3]),
                heads, key_heads, tokens, num_blocks, **sizes, BACK=back, **OPTIONS,
            )  # fmt: skip
