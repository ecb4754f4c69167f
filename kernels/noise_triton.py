"""Counter-based noise in Triton: ChaCha20 and Philox words, normals made of them, noise added.

Other kernels make noise where they need it: `normals_of_groups` for runs of 8 elements, which
share a block of ChaCha20, `normals_of_rows` for longer runs from any element on, and `normals_at`
for any elements, at up to 8 times the cost. A `key` is a tuple of eight 32-bit words; Philox takes
the first two. `step_low`, `step_high` and `parameter_id` are 32-bit words.

A kernel compiled without `enable_fp_fusion` gets the same normals on every GPU, bit for bit.
Words wrap around: sums of them are exempt from the overflow checks of Triton's debug mode.
"""

import struct
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise_reference

# ruff: noqa: N803

# Without fusion every GPU rounds alike, and every specialisation of a kernel does.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _add(x, y):
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def _quarter_round(a, b, c, d):
    """RFC 8439, section 2.1."""
    a = _add(a, b)
    d ^= a
    d = (d << 16) | (d >> 16)
    c = _add(c, d)
    b ^= c
    b = (b << 12) | (b >> 20)
    a = _add(a, b)
    d ^= a
    d = (d << 8) | (d >> 24)
    c = _add(c, d)
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def chacha20_words(key, blocks, step_low, step_high, parameter_id):
    """The sixteen 32-bit words of each ChaCha20 block; `noise_reference.chacha20`.

    blocks: any shape, uint32. Returns a tuple of 16 tensors of that shape.
    """
    zero = tl.zeros_like(blocks)
    f0 = zero + 0x61707865
    f1 = zero + 0x3320646E
    f2 = zero + 0x79622D32
    f3 = zero + 0x6B206574
    f4, f5, f6, f7 = zero + key[0], zero + key[1], zero + key[2], zero + key[3]
    f8, f9, f10, f11 = zero + key[4], zero + key[5], zero + key[6], zero + key[7]
    f12, f13, f14, f15 = blocks, zero + step_low, zero + step_high, zero + parameter_id
    x0, x1, x2, x3, x4, x5, x6, x7 = f0, f1, f2, f3, f4, f5, f6, f7
    x8, x9, x10, x11, x12, x13, x14, x15 = f8, f9, f10, f11, f12, f13, f14, f15
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        _add(x0, f0), _add(x1, f1), _add(x2, f2), _add(x3, f3),
        _add(x4, f4), _add(x5, f5), _add(x6, f6), _add(x7, f7),
        _add(x8, f8), _add(x9, f9), _add(x10, f10), _add(x11, f11),
        _add(x12, f12), _add(x13, f13), _add(x14, f14), _add(x15, f15),
    )  # fmt: skip


@triton.jit
def philox_words(key, blocks, step_low, step_high, parameter_id):
    """The four 32-bit words of each Philox-4x32-10 block; `noise_reference.philox`.

    blocks: any shape, uint32. Returns a tuple of 4 tensors of that shape.
    """
    zero = tl.zeros_like(blocks)
    return tl.philox_impl(
        blocks, zero + step_low, zero + step_high, zero + parameter_id, key[0], key[1]
    )


@triton.jit
def _log(u):
    """The logarithm of a normal fp32 number 0 < u <= 1; u = 2^e (1 + f) with |f| < 0.42.

    Source: Moshier, Cephes (logf): ln(1 + f) = f - f^2/2 + f^3 p(f).
    """
    # From sqrt(1/2), so that f is exact and small around u = 1.
    bits = u.to(tl.int32, bitcast=True) + (0x3F800000 - 0x3F3504F3)
    e = ((bits >> 23) - 127).to(tl.float32)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    p = f * 7.0376836292e-2 - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    square = f * f
    low = p * f * square + e * -2.12194440e-4 - 0.5 * square
    return f + low + e * 0.693359375


@triton.jit
def _cos_and_sin(angle):
    """Of an fp32 angle in [-pi, pi], which is reduced to [-pi/4, pi/4].

    Source: Moshier, Cephes (sinf).
    """
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    # pi/2 in three parts; their products with quarter, at most 2, are exact.
    x = angle - quarter * 1.5707963705062866
    x = x - quarter * -4.371138828673793e-08
    x = x - quarter * -1.7151245100058819e-15
    z = x * x
    sin = (z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1
    sin = sin * z * x + x
    cos = (z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2
    cos = cos * z * z - 0.5 * z + 1.0
    quadrant = quarter.to(tl.int32)
    odd = (quadrant & 1) != 0
    x = tl.where(odd, sin, cos)
    y = tl.where(odd, cos, sin)
    x = tl.where(((quadrant + 1) & 2) != 0, -x, x)
    y = tl.where((quadrant & 2) != 0, -y, y)
    return x, y


@triton.jit
def box_muller(radius_low, radius_high, angle_low, angle_high):
    """Two normals of two 64-bit words, each given as two uint32; `normals_from_bits`."""
    # (m + 0.5) 2^-53 of the top 53 bits m in fp64 and then in fp32, without fp64: where m has all
    # 53 bits, m + 0.5 rounds to the even neighbour of m.
    m = ((radius_high.to(tl.int64) << 32) | radius_low.to(tl.int64)) >> 11
    m &= (1 << 53) - 1
    twice = tl.where(m >= (1 << 52), (m + (m & 1)) * 2, m * 2 + 1)
    u = twice.to(tl.float32) * 5.551115123125783e-17
    radius = tl.sqrt_rn(tl.maximum(_log(u) * -2.0, 0.0))
    turns = (angle_high.to(tl.int64) << 32) | angle_low.to(tl.int64)
    cos, sin = _cos_and_sin(turns.to(tl.float32) * 3.4061215800865545e-19)
    return radius * cos, radius * sin


@triton.jit
def normals_of_groups(key, groups, step_low, step_high, parameter_id, PHILOX: tl.constexpr):
    """Standard normals of the elements 8 g, ..., 8 g + 7 of the stream for each group g.

    groups: [N], uint32 (Philox: below 2^30). Returns [8 N], fp32: neighbours are neighbours.
    """
    if PHILOX:
        a = philox_words(key, groups * 4, step_low, step_high, parameter_id)
        b = philox_words(key, groups * 4 + 1, step_low, step_high, parameter_id)
        c = philox_words(key, groups * 4 + 2, step_low, step_high, parameter_id)
        d = philox_words(key, groups * 4 + 3, step_low, step_high, parameter_id)
        n0, n1 = box_muller(a[0], a[1], a[2], a[3])
        n2, n3 = box_muller(b[0], b[1], b[2], b[3])
        n4, n5 = box_muller(c[0], c[1], c[2], c[3])
        n6, n7 = box_muller(d[0], d[1], d[2], d[3])
    else:
        w = chacha20_words(key, groups, step_low, step_high, parameter_id)
        n0, n1 = box_muller(w[0], w[1], w[2], w[3])
        n2, n3 = box_muller(w[4], w[5], w[6], w[7])
        n4, n5 = box_muller(w[8], w[9], w[10], w[11])
        n6, n7 = box_muller(w[12], w[13], w[14], w[15])
    # The last join is the last, fastest, bit of an element's number.
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    return tl.reshape(tl.join(even, odd), [8 * groups.shape[0]])


@triton.jit
def normals_of_rows(
    key, first, step_low, step_high, parameter_id,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, PHILOX: tl.constexpr,
):  # fmt: skip
    """Standard normals of the elements first, ..., first + COLUMNS - 1 of the stream.

    first: [N], int64 in [0, 2^35) (Philox: 2^33); multiples of 8 if ALIGNED, which halves the
    cost. COLUMNS: a power of 2 from 8 on. Returns [N, COLUMNS], fp32.
    """
    # A run from within a group ends within another.
    RUN: tl.constexpr = COLUMNS if ALIGNED else 2 * COLUMNS
    groups = _add((first >> 3).to(tl.uint32)[:, None], tl.arange(0, RUN // 8).to(tl.uint32)[None])
    groups = tl.reshape(groups, [first.shape[0] * (RUN // 8)])
    normals = normals_of_groups(key, groups, step_low, step_high, parameter_id, PHILOX)
    normals = tl.reshape(normals, [first.shape[0], RUN])
    if not ALIGNED:
        places = (first & 7).to(tl.int32)[:, None] + tl.arange(0, COLUMNS)[None]
        normals = tl.gather(normals, places, 1)
    return normals


@triton.jit
def _chosen(index, a, b, c, d):
    return tl.where(index < 2, tl.where(index == 0, a, b), tl.where(index == 2, c, d))


@triton.jit
def normals_at(key, elements, step_low, step_high, parameter_id, PHILOX: tl.constexpr):
    """Standard normals of any elements of the stream.

    elements: any shape, int64 in [0, 2^35) (Philox: 2^33). Returns fp32 of that shape.
    """
    if PHILOX:
        blocks = (elements >> 1).to(tl.uint32)
        a, b, c, d = philox_words(key, blocks, step_low, step_high, parameter_id)
    else:
        blocks = (elements >> 3).to(tl.uint32)
        w = chacha20_words(key, blocks, step_low, step_high, parameter_id)
        pair = (elements >> 1) & 3
        a = _chosen(pair, w[0], w[4], w[8], w[12])
        b = _chosen(pair, w[1], w[5], w[9], w[13])
        c = _chosen(pair, w[2], w[6], w[10], w[14])
        d = _chosen(pair, w[3], w[7], w[11], w[15])
    x, y = box_muller(a, b, c, d)
    return tl.where((elements & 1) == 0, x, y)


@triton.jit
def as_key(k0, k1, k2, k3, k4, k5, k6, k7):
    """A `key` of a kernel's arguments."""
    return (
        k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32),
        k4.to(tl.uint32), k5.to(tl.uint32), k6.to(tl.uint32), k7.to(tl.uint32),
    )  # fmt: skip


@triton.jit
def as_std(std_bits, dtype: tl.constexpr):
    """A standard deviation of the bits of its fp64."""
    return std_bits.to(tl.uint64).to(tl.float64, bitcast=True).to(dtype)


@triton.jit(
    do_not_specialize=[
        "std_bits", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7",
        "step_low", "step_high", "parameter_id", "first_group",
    ]
)  # fmt: skip
def _gaussian_noise_kernel(
    out_ptr, std_bits: tl.uint64,
    k0: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32,
    k4: tl.uint32, k5: tl.uint32, k6: tl.uint32, k7: tl.uint32,
    step_low: tl.uint32, step_high: tl.uint32, parameter_id: tl.uint32,
    first_group: tl.uint32, skip, num_elements,
    BLOCK: tl.constexpr, PHILOX: tl.constexpr,
):  # fmt: skip
    """``out += std * normal`` for the elements of BLOCK groups.

    Element i of out is element ``8 first_group + skip + i`` of the stream.
    """
    dtype = out_ptr.dtype.element_ty
    key = as_key(k0, k1, k2, k3, k4, k5, k6, k7)
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    groups = _add((begin + tl.arange(0, BLOCK)).to(tl.uint32), first_group.to(tl.uint32))
    normals = normals_of_groups(
        key, groups, step_low.to(tl.uint32), step_high.to(tl.uint32), parameter_id.to(tl.uint32),
        PHILOX,
    )  # fmt: skip
    offsets = begin * 8 + tl.arange(0, 8 * BLOCK) - skip
    there = (offsets >= 0) & (offsets < num_elements)
    std = as_std(std_bits, dtype)
    out = tl.load(out_ptr + offsets, mask=there)
    tl.store(out_ptr + offsets, tl.fma(normals.to(dtype), std, out), mask=there)


def key_words(key: bytes, generator: str) -> tuple[int, ...]:
    """The eight words that kernels take as a key."""
    if generator == "philox":
        short = noise_reference.philox_key(key)
        return (short & 0xFFFFFFFF, short >> 32, 0, 0, 0, 0, 0, 0)
    return struct.unpack("<8I", key)


def stream_words(
    std: float, key: bytes, step: int, parameter_id: int, generator: str
) -> tuple[int, ...]:
    """What kernels take from `std_bits` to `parameter_id`."""
    return (
        struct.unpack("<Q", struct.pack("<d", std))[0],
        *key_words(key, generator),
        *(step & 0xFFFFFFFF, step >> 32, parameter_id),
    )


def gaussian_noise_(
    out: Tensor,
    *,
    std: float,
    key: bytes,
    step: int,
    parameter_id: int,
    offset: int = 0,
    generator: str = "chacha20",
    block: int = 128,
) -> None:
    """See `noise.gaussian_noise_`, which checks the arguments; out is not empty.

    block: groups of 8 elements that a program makes; the result does not depend on it.
    """
    skip = offset % 8
    grid = (triton.cdiv(skip + out.numel(), 8 * block),)
    with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
        _gaussian_noise_kernel[grid](
            out.detach(), *stream_words(std, key, step, parameter_id, generator),
            offset // 8, skip, out.numel(),
            BLOCK=block, PHILOX=generator == "philox", **OPTIONS,
        )  # fmt: skip
    # Autograd shall notice that out has changed, as it does with PyTorch's own operations.
    torch.autograd.graph.increment_version(out)
