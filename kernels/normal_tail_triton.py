"""Computes P(N > x) of a standard normal N, and compares it with words, in 128-bit integers.

As in normal_tail.h, no result depends on floating-point rounding. Numbers below 1 are two words
of 64 bits, the high and the low word, in units of 2^-128.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

# ruff: noqa: N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

# Nodes of the Taylor expansions per unit of x, and coefficients of each node.
NODES = tl.constexpr(64)
TERMS = tl.constexpr(14)
# Beyond END the tail is below a word's resolution: P(N > 9.2) < 2^-65.
END = tl.constexpr(9.2)
# `reciprocal_words` returns units of 2^-182: a value below 1024 has at most 192 bits.
_RECIPROCAL_BITS = 182
_WORD = 2**64 - 1


@functools.lru_cache(maxsize=8)
def tail_table(device: torch.device) -> Tensor:
    """Return P(N > (j + t) / 64) as a polynomial in t for each node j. Do not change the result.

    Returns:
        [nodes, 14, 2], int64, on the device: coefficients, constants first, each as its low and
        its high word in two's complement.
    """
    import mpmath

    table = bytearray()
    with mpmath.workprec(192):
        for j in range(int(END.value * NODES.value) + 1):
            x = mpmath.mpf(j) / NODES.value
            density = mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * mpmath.pi)
            tail = mpmath.erfc(x / mpmath.sqrt(2)) / 2
            # Derivatives of the density over n!: n b_n = -(x b_(n-1) + b_(n-2)).
            before, derivative = 0, int(mpmath.ldexp(density, 192))
            coefficients = [int(mpmath.ldexp(tail, 192))]
            for n in range(1, TERMS.value):
                coefficients.append(-derivative // (n * NODES.value**n))
                before, derivative = derivative, -(derivative * j // NODES.value + before) // n
            for coefficient in coefficients:
                table += (coefficient >> 64).to_bytes(17, "little", signed=True)[:16]
    words = torch.frombuffer(table, dtype=torch.int64)
    return words.view(-1, TERMS.value, 2).to(device)


def reciprocal_words(scale: float) -> tuple[int, int, int]:
    """Return 32 / scale, rounded down, for `sides`: three words, the highest first."""
    # For a scale of at most 1/20 no border (k + 1/2) / scale is below END.
    above, below = max(scale, 0.05).as_integer_ratio()
    units = (NODES.value // 2 * below << _RECIPROCAL_BITS) // above
    return units >> 128, units >> 64 & _WORD, units & _WORD


@triton.jit
def _sum(high, low, addend):
    """Return the sum of a number of two words and a number of one word."""
    total = low + addend
    return high + (total < low).to(tl.uint64), total


@triton.jit
def tails(table_ptr, node, high, low, there):
    """Return P(N > (node + t) / 64) with an error below 2^-104, for 0 <= t = (high, low) < 1.

    The terms beyond degree 13 are below 2^-105 (Cramer: |b_n| < 0.44 / sqrt(n!)). Each other term
    adds an error below 5 units, because its product and its coefficient are rounded down.
    """
    at = table_ptr + node * (2 * TERMS) + 2 * (TERMS - 1)
    sum_low = tl.load(at, mask=there, other=0).to(tl.uint64, bitcast=True)
    sum_high = tl.load(at + 1, mask=there, other=0).to(tl.uint64, bitcast=True)
    for _ in range(TERMS - 1):
        at -= 2
        # Read as unsigned, a negative sum is too great by 1, and its product with t by t.
        is_negative = 0 - (sum_high >> 63)
        excess_high, excess_low = high & is_negative, low & is_negative
        product_high, product_low = _sum(
            tl.umulhi(sum_high, high), sum_high * high, tl.umulhi(sum_high, low)
        )
        product_high, product_low = _sum(product_high, product_low, tl.umulhi(sum_low, high))
        product_high -= excess_high + (product_low < excess_low).to(tl.uint64)
        product_low -= excess_low
        constant = tl.load(at, mask=there, other=0).to(tl.uint64, bitcast=True)
        sum_high, sum_low = _sum(product_high, product_low, constant)
        sum_high += tl.load(at + 1, mask=there, other=0).to(tl.uint64, bitcast=True)
    return sum_high, sum_low


@triton.jit
def sides(table_ptr, k, magnitudes, scale, r2, r1, r0):
    """Return two bools: whether border (k + 1/2) / scale is below, and above, a word's interval.

    The interval has all x with P(N > x) from m * 2^-64 to (m + 1) * 2^-64. A border with k < 0 is
    below. Both bools are False if the border lies in the interval, or if an error of 2^-96 could
    change them. k: int64, below 2^49. m: `magnitudes`, uint64, from 1 to 2^63 - 1. scale: fp64.
    """
    is_near = (k >= 0) & (k.to(tl.float64) + 0.5 < END * scale)
    odd = tl.where(is_near, 2 * k + 1, 1).to(tl.uint64)
    # 64 (k + 1/2) / scale in units of 2^-118, rounded down.
    high, low = _sum(tl.umulhi(odd, r1), odd * r1, tl.umulhi(odd, r0))
    high += odd * r2
    node = tl.where(is_near, high >> 54, 0).to(tl.int32)
    high, low = tails(table_ptr, node, (high << 10) | (low >> 54), low << 10, is_near)
    error: tl.constexpr = 1 << 32
    is_below = high > magnitudes + (low < error).to(tl.uint64)
    is_above = high + (low + error < low).to(tl.uint64) < magnitudes
    return (k < 0) | (is_near & is_below), (k >= 0) & (~is_near | is_above)
