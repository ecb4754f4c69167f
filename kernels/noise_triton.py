"""Counter-based noise in Triton: ChaCha20 and Philox words, rounded normals, sums on a grid.

Other kernels compute noise themselves by `rounded_normals` of `words_of_groups`. A group is 8
consecutive elements, which share a block of ChaCha20. A `key` is a tuple of eight 32-bit words;
Philox takes the first two. `step_low`, `step_high` and `parameter_id` are 32-bit words.

If fp64 does not decide a rounding, a kernel writes NaN and appends the element to a list. `settle`
decides it in 128-bit integers, or on the CPU if further words are needed. So every GPU gives the
bits of the CPU, however its logarithm and fused multiply-adds round. Sums of words wrap around, so
they are exempt from the overflow checks of Triton's debug mode.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise_reference, rounded_normal
from .capture import sent
from .layout import on_device
from .noise import NoiseStream
from .normal_tail_triton import reciprocal_words, sides, tail_table
from .tensor_table import (
    TYPES,
    alike,
    has_vectors,
    row_of,
    size_of,
    tensor_table,
    written_to,
)

# ruff: noqa: N803

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
# Groups of 8 elements per program of the noise kernel.
GROUPS = 128
# Listed elements per program of the settling kernel, which compares eight borders for each.
SETTLE_BLOCK = 16
# Entries allocated at once for short lists of undecided elements.
SPARE = 1 << 15
# Arguments of the launcher whose values do not cause another compilation.
ADDRESS = [
    "grid_bits", "scale_bits", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7",
    "step_low", "step_high",
]  # fmt: skip

_CENTER_ABOVE = tl.constexpr(rounded_normal.CENTER[0])
_CENTER_BELOW = tl.constexpr(rounded_normal.CENTER[1])
_TAIL_ABOVE = tl.constexpr(rounded_normal.TAIL[0])
_TAIL_BELOW = tl.constexpr(rounded_normal.TAIL[1])
_FAR_ABOVE = tl.constexpr(rounded_normal.FAR[0])
_FAR_BELOW = tl.constexpr(rounded_normal.FAR[1])
_SPLIT = tl.constexpr(rounded_normal.SPLIT)
_SPLIT_SQUARE = tl.constexpr(rounded_normal.SPLIT_SQUARE)
_FAR_FROM = tl.constexpr(rounded_normal.FAR_FROM)
_TAIL_ORIGIN = tl.constexpr(rounded_normal.TAIL_ORIGIN)
_RELATIVE_ERROR = tl.constexpr(rounded_normal.RELATIVE_ERROR)
_MAGNITUDE = tl.constexpr((1 << 63) - 1)
# Two counts precede a list's columns: of all elements, and of elements left to the CPU.
_COUNTERS = tl.constexpr(2)
_COLUMNS = tl.constexpr(5)
# Columns of a row of `_settle_table`.
_SETTLE_COLUMNS = tl.constexpr(8)


@triton.jit
def _add(x, y):
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def _quarter_round(a, b, c, d):
    """Return the words after a quarter round, see RFC 8439, section 2.1."""
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
    """Return the sixteen 32-bit words of ChaCha20 blocks, see `noise_reference.chacha20`.

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
    """Return the four 32-bit words of Philox-4x32-10 blocks, see `noise_reference.philox`.

    blocks: any shape, uint32. Returns a tuple of 4 tensors of that shape.
    """
    zero = tl.zeros_like(blocks)
    return tl.philox_impl(
        blocks, zero + step_low, zero + step_high, zero + parameter_id, key[0], key[1]
    )


@triton.jit
def _wide(low, high):
    """Join the low and high 32 bits of words to signed words of 64 bits."""
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def words_of_groups(key, groups, step_low, step_high, parameter_id, PHILOX: tl.constexpr):
    """Return the 64-bit words of the stream's elements 8 g, ..., 8 g + 7 for each group g.

    groups: [N], uint32 (Philox: below 2^30). Returns [8 N], int64, in the order of the elements.
    """
    if PHILOX:
        a = philox_words(key, groups * 4, step_low, step_high, parameter_id)
        b = philox_words(key, groups * 4 + 1, step_low, step_high, parameter_id)
        c = philox_words(key, groups * 4 + 2, step_low, step_high, parameter_id)
        d = philox_words(key, groups * 4 + 3, step_low, step_high, parameter_id)
        w0, w1, w2, w3 = _wide(a[0], a[1]), _wide(a[2], a[3]), _wide(b[0], b[1]), _wide(b[2], b[3])
        w4, w5, w6, w7 = _wide(c[0], c[1]), _wide(c[2], c[3]), _wide(d[0], d[1]), _wide(d[2], d[3])
    else:
        w = chacha20_words(key, groups, step_low, step_high, parameter_id)
        w0, w1, w2, w3 = _wide(w[0], w[1]), _wide(w[2], w[3]), _wide(w[4], w[5]), _wide(w[6], w[7])
        w4, w5 = _wide(w[8], w[9]), _wide(w[10], w[11])
        w6, w7 = _wide(w[12], w[13]), _wide(w[14], w[15])
    # The last join gives the lowest bit of an element's number, which varies fastest.
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), [8 * groups.shape[0]])


@triton.jit
def _polynomials(x, ABOVE: tl.constexpr, BELOW: tl.constexpr):
    """Return the numerator and the denominator of a quotient of AS 241 at x."""
    above = tl.zeros_like(x) + ABOVE[7]
    below = tl.zeros_like(x) + BELOW[7]
    for i in tl.static_range(7):
        above = above * x + ABOVE[6 - i]
        below = below * x + BELOW[6 - i]
    return above, below


@triton.jit
def _quantiles(magnitudes, FAR: tl.constexpr):
    """Return x with P(N > x) = magnitudes * 2^-64, fp64; see `rounded_normal.tail_quantiles`.

    magnitudes: int64, above 0; without FAR at least 2^28, which is a tail of at least 2^-36.

    The error is at most RELATIVE_ERROR if that of the logarithm is at most 8 units in the last
    place (libdevice: 2), also with fused multiply-adds, which do not round the product.
    """
    r = tl.sqrt(-tl.log(magnitudes.to(tl.float64) * 2.0**-64))
    above, below = _polynomials(r - _TAIL_ORIGIN, _TAIL_ABOVE, _TAIL_BELOW)
    if FAR:
        far_above, far_below = _polynomials(r - _FAR_FROM, _FAR_ABOVE, _FAR_BELOW)
        above = tl.where(r <= _FAR_FROM, above, far_above)
        below = tl.where(r <= _FAR_FROM, below, far_below)
    # Compute 1/2 - p from the integer: near the median, rounding p first would lose its digits.
    q = (magnitudes ^ _MAGNITUDE).to(tl.float64) * 2.0**-64
    s = _SPLIT_SQUARE - q * q
    center_above, center_below = _polynomials(s, _CENTER_ABOVE, _CENTER_BELOW)
    central = q <= _SPLIT
    above = tl.where(central, q * center_above, above)
    return above / tl.where(central, center_below, below)


@triton.jit
def rounded_normals(words, scale):
    """Return ``round(scale * N)`` of words by fp64; see `rounded_normal.rounded_normals`.

    words: any shape, int64. scale: fp64. Returns fp64 integers, and which of them are undecided.
    Tails below 2^-36 are undecided too.
    """
    magnitudes = words & _MAGNITUDE
    y = _quantiles(magnitudes, False) * scale
    # N is within 1.26 / magnitude of the quantile; a quotient in fp32 is exact enough.
    margins = (2.0 / magnitudes.to(tl.float32)).to(tl.float64) * scale + y * _RELATIVE_ERROR
    whole = tl.floor(y)
    rest = y - whole
    undecided = (tl.abs(rest - 0.5) <= margins) | (magnitudes < (1 << 28))
    rounded = tl.where(rest > 0.5, whole + 1.0, whole)
    # 0 - rounded, not -rounded, so that a zero has no sign, as in Python's integers.
    return tl.where(words < 0, 0.0 - rounded, rounded), undecided


@triton.jit
def settled(words, there, table_ptr, scale, r2, r1, r0):
    """Return ``round(scale * N)`` of words by 128-bit integers; see `settled`, rounded_normal.h.

    words: [N], int64. there: [N], bool, False for padding. scale: fp64, below 2^45. table_ptr, r2,
    r1, r0: see `sides`. Returns the integers, int64, and which of them are decided.

    The fp64 quantile only chooses the eight borders to compare with, so the result is exact
    however fp64 rounds. The quantile is off by less than 3 borders, so eight are enough.
    """
    there = there & ((words & _MAGNITUDE) > 0)
    magnitudes = tl.where(there, words & _MAGNITUDE, 1)
    first = tl.floor(_quantiles(magnitudes, True) * scale + 0.5).to(tl.int64) - 4
    below, above = sides(
        table_ptr, first[:, None] + tl.arange(0, 8)[None, :], magnitudes.to(tl.uint64)[:, None],
        scale, r2, r1, r0,
    )  # fmt: skip
    below, above = tl.sum(below.to(tl.int32), 1), tl.sum(above.to(tl.int32), 1)
    integers = first + below
    is_settled = there & (below > 0) & (above > 0) & (below + above == 8)
    return tl.where(words < 0, -integers, integers), is_settled


@triton.jit
def _nearest(x):
    """Round fp64 numbers to the nearest integers, halves to even."""
    size = tl.abs(x)
    # Adding 2^52 rounds to an integer; numbers above it are integers already.
    whole = tl.where(size < 2.0**52, (size + 2.0**52) - 2.0**52, size)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def as_key(k0, k1, k2, k3, k4, k5, k6, k7):
    """Make a `key` from a kernel's arguments."""
    return (
        k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32),
        k4.to(tl.uint32), k5.to(tl.uint32), k6.to(tl.uint32), k7.to(tl.uint32),
    )  # fmt: skip


@triton.jit
def as_fp64(bits):
    """Return the fp64 number with these bits. A kernel's float arguments would be fp32."""
    return bits.to(tl.uint64).to(tl.float64, bitcast=True)


@triton.jit
def reciprocal_of_grid(grid_bits):
    """Return 1 / grid, for a grid that is a power of two."""
    return as_fp64((2046 << 52) - grid_bits.to(tl.uint64))


@triton.jit
def elements_of(row, program, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, VECTORS: tl.constexpr):
    """Return ([BLOCK] elements of a program, which of them exist, the first element's group).

    row: the tensor's row of a `TensorTable`. Unless ALIGNED, each program begins some elements
    earlier, so that it has whole groups of 8.
    """
    first, size = tl.load(row + 5), size_of(row, VECTORS)
    elements = program * BLOCK + tl.arange(0, BLOCK)
    inside = elements < size
    if not ALIGNED:
        elements -= first & 7
        inside = (elements >= 0) & (elements < size)
    return elements, inside, (first + program * BLOCK) >> 3


@triton.jit
def noisy(
    steps, elements, inside, place, row, group, open_ptr, capacity, grid_bits, scale_bits,
    key, step_low, step_high, PHILOX: tl.constexpr,
):  # fmt: skip
    """Return ``grid * (steps + Z)``, fp64, for each element of some groups; NaN if undecided.

    steps: [8 N], fp64 integers, the elements' sums. The groups are consecutive, from `group` on.
    Undecided elements are appended to the list, see `OpenList`.
    """
    groups = group + tl.arange(0, steps.shape[0] // 8)
    words = words_of_groups(
        key, groups.to(tl.uint32), step_low.to(tl.uint32), step_high.to(tl.uint32),
        tl.load(row + 4).to(tl.uint32), PHILOX,
    )  # fmt: skip
    integers, undecided = rounded_normals(words, as_fp64(scale_bits))
    undecided = undecided & inside
    places = tl.atomic_add(
        open_ptr + tl.zeros_like(elements), tl.zeros_like(elements) + 1, mask=undecided,
        sem="relaxed",
    )  # fmt: skip
    there = undecided & (places < capacity)
    at = open_ptr + _COUNTERS + places
    tl.store(at, tl.zeros_like(elements) + place, mask=there)
    tl.store(at + capacity, elements, mask=there)
    tl.store(at + 2 * capacity, words, mask=there)
    tl.store(at + 3 * capacity, steps.to(tl.int64, bitcast=True), mask=there)
    total = (steps + integers) * as_fp64(grid_bits)
    return tl.where(undecided, float("nan"), total)


@triton.jit(do_not_specialize=[*ADDRESS, "capacity"])
def _add_noise_kernel(
    rows_ptr, owners_ptr, open_ptr, capacity,
    grid_bits: tl.uint64, scale_bits: tl.uint64,
    k0: tl.uint32, k1: tl.uint32, k2: tl.uint32, k3: tl.uint32,
    k4: tl.uint32, k5: tl.uint32, k6: tl.uint32, k7: tl.uint32,
    step_low: tl.uint32, step_high: tl.uint32,
    DTYPE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, VECTORS: tl.constexpr,
    PHILOX: tl.constexpr,
):  # fmt: skip
    """Write ``out = grid * (round(out / grid) + Z)`` for each tensor of a table."""
    place, row, program = row_of(rows_ptr, owners_ptr, tl.program_id(0))
    elements, inside, group = elements_of(row, program, BLOCK, ALIGNED, VECTORS)
    out_ptr = written_to(row, DTYPE, VECTORS)
    out = tl.load(out_ptr + elements, mask=inside, other=0.0).to(tl.float64)
    total = noisy(
        _nearest(out * reciprocal_of_grid(grid_bits)), elements, inside, place, row, group,
        open_ptr, capacity, grid_bits, scale_bits,
        as_key(k0, k1, k2, k3, k4, k5, k6, k7), step_low, step_high, PHILOX,
    )  # fmt: skip
    tl.store(out_ptr + elements, total.to(DTYPE), mask=inside)


@triton.jit(do_not_specialize=["programs"])
def _settle_kernel(lists_ptr, tails_ptr, programs, BLOCK: tl.constexpr):
    """Write ``grid * (steps + Z)`` for the elements of lists that need no further words.

    lists_ptr: `_settle_table`. programs: programs per list. Elements that need further words are
    marked and counted. If a list has no room for all its elements, none of them is written.
    """
    row = lists_ptr + _SETTLE_COLUMNS * (tl.program_id(0) // programs)
    first = (tl.program_id(0) % programs) * BLOCK
    open_ptr, capacity = tl.load(row).to(tl.pointer_type(tl.int64)), tl.load(row + 1)
    count = tl.load(open_ptr)
    if (first < count) & (count <= capacity):
        numbers = first + tl.arange(0, BLOCK)
        there = numbers < count
        at = open_ptr + _COUNTERS + numbers
        words = tl.load(at + 2 * capacity, mask=there, other=1)
        integers, is_settled = settled(
            words, there, tails_ptr, as_fp64(tl.load(row + 4)), tl.load(row + 5).to(tl.uint64),
            tl.load(row + 6).to(tl.uint64), tl.load(row + 7).to(tl.uint64),
        )  # fmt: skip
        steps = tl.load(at + 3 * capacity, mask=there, other=0).to(tl.float64, bitcast=True)
        total = (steps + integers.to(tl.float64)) * as_fp64(tl.load(row + 3))
        out = lists_ptr + tl.load(row + 2) + 2 * tl.load(at, mask=there, other=0)
        elements = tl.load(at + capacity, mask=there, other=0)
        narrow = tl.load(out, mask=is_settled, other=0)
        narrow_ptr = narrow.to(tl.pointer_type(tl.float32)) + elements
        tl.store(narrow_ptr, total.to(tl.float32), mask=narrow != 0)
        wide = tl.load(out + 1, mask=is_settled, other=0)
        tl.store(wide.to(tl.pointer_type(tl.float64)) + elements, total, mask=wide != 0)
        is_left = (there & ~is_settled).to(tl.int64)
        tl.store(at + 4 * capacity, is_left, mask=there)
        left = tl.sum(is_left, 0)
        if left > 0:
            tl.atomic_add(open_ptr + 1, left, sem="relaxed")


def key_words(key: bytes, generator: str) -> tuple[int, ...]:
    """Return the eight words that kernels take as a key."""
    if generator == "philox":
        short = noise_reference.philox_key(key)
        return (short & 0xFFFFFFFF, short >> 32, 0, 0, 0, 0, 0, 0)
    return struct.unpack("<8I", key)


def bits_of(number: float) -> int:
    """Return the bits of an fp64 number, for `as_fp64`."""
    return int(struct.unpack("<Q", struct.pack("<d", number))[0])


def address_of(stream: NoiseStream) -> tuple[int, ...]:
    """Return the kernels' `ADDRESS` arguments, which are equal for all streams of a release."""
    step = int(stream.step)
    return (
        bits_of(float(stream.grid)),
        bits_of(float(stream.scale)),
        *key_words(stream.key, stream.generator),
        *(step & 0xFFFFFFFF, step >> 32),
    )


class OpenList(NamedTuple):
    """The list of elements whose noise fp64 does not decide. Kernels append to it.

    Attributes:
        outs: the results; a listed element is NaN until `settle` writes it.
        streams: the noise of each result, of one release.
        entries: [2 + 5 capacity], int64, on the results' device: the number of listed elements,
            the number of elements left to the CPU, and five columns. The columns have for each
            element the index of the result, the index in the result, the word, the bits of the sum
            before noise (fp64, in units of the grid), and whether the element is left to the CPU.
        spare: zeros after the entries, for the next lists of the release.
    """

    outs: tuple[Tensor, ...]
    streams: tuple[NoiseStream, ...]
    entries: Tensor
    spare: Tensor

    @property
    def capacity(self) -> int:
        """The number of elements that the list can hold."""
        return (self.entries.numel() - _COUNTERS.value) // _COLUMNS.value


def open_list(outs: Sequence[Tensor], streams: Sequence[NoiseStream]) -> OpenList:
    """Create an empty list for results on one device whose noise belongs to one release.

    The list is in `NoiseStream.unsettled` from now on, since even a failed launch may write to it.
    """
    elements = sum(out.numel() for out in outs)
    size = _COUNTERS.value + _COLUMNS.value * expected_capacity(elements, streams[0].scale)
    before = streams[0].unsettled
    spare = before[-1].spare if before else None
    # A list begins at a multiple of 16 bytes.
    end = size + size % 2
    if spare is None or spare.device != outs[0].device or spare.shape[0] < end:
        # Zeros for several lists, so that not every list needs a launch.
        spare = torch.zeros(max(end, SPARE), dtype=torch.int64, device=outs[0].device)
    entries, _, spare = spare.split([size, end - size, spare.shape[0] - end])
    found = OpenList(tuple(outs), tuple(streams), entries, spare)
    if before is not None:
        before.append(found)
    return found


def expected_capacity(elements: int, scale: float) -> int:
    """Return four times the mean number of undecided elements, plus 128.

    A list needs more entries with probability below 2^-100. An element is undecided with
    probability at most 2^-46 * (scale + 1).
    """
    return min(elements, math.ceil(elements * (scale + 1) * 2.0**-44) + 128)


def settle(lists: Sequence[OpenList]) -> bool:
    """Write the elements that kernels left undecided.

    A kernel decides all elements except about one in 2^60 / scale, which `NoiseStream.settled`
    decides. The function waits once for each device, and copies a list only if the CPU has to
    decide some of its elements. After an interruption, call it again.

    Returns:
        Whether there were such elements.

    Raises:
        RuntimeError: a kernel found more undecided elements than its list holds, so the device is
            faulty; these elements stay NaN.
    """
    each = alike([found.entries.device for found in lists])
    groups = [[lists[i] for i in numbers] for numbers in each]
    for group in groups:
        _launch_settle(group)
    was_any = False
    for group in groups:
        counts = torch.stack([found.entries[: _COUNTERS.value] for found in group]).cpu()
        for found, (count, left) in zip(group, counts.tolist(), strict=True):
            if count > found.capacity:
                raise RuntimeError(
                    f"more noise elements are undecided on {found.entries.device} than possible: "
                    "the device computes wrongly; do not release this sum, add noise on the CPU"
                )
            was_any |= count > 0
            if left:
                _settle_left(found, count)
    return was_any


def _launch_settle(lists: Sequence[OpenList]) -> None:
    """Decide on the device the elements that need no more random words; mark the others."""
    entries = lists[0].entries
    programs = triton.cdiv(max(found.capacity for found in lists), SETTLE_BLOCK)
    table = sent(_settle_table(lists), entries.device)
    with on_device(entries):
        _settle_kernel[(len(lists) * programs,)](
            table, tail_table(entries.device), programs, BLOCK=SETTLE_BLOCK
        )


def _settle_table(lists: Sequence[OpenList]) -> Tensor:
    """Return the tables of `_settle_kernel` for these lists, int64, on the CPU.

    Each list has a row: address, capacity, index of its first result's entries, bits of the grid,
    bits of the scale, `reciprocal_words`. After the rows, each result has two entries, for fp32
    and fp64: its address in the entry of its dtype, 0 in the other entry.
    """
    rows: list[int] = []
    addresses: list[int] = []
    for found in lists:
        grid, scale = float(found.streams[0].grid), found.streams[0].scale
        begin = _SETTLE_COLUMNS.value * len(lists) + len(addresses)
        rows += (found.entries.data_ptr(), found.capacity, begin, bits_of(grid), bits_of(scale))
        rows += reciprocal_words(scale)
        for out in found.outs:
            is_wide = out.dtype == torch.float64
            addresses += (0, out.data_ptr()) if is_wide else (out.data_ptr(), 0)
    # Unsigned, because the top bit of a reciprocal's word may be set.
    return torch.tensor(rows + addresses, dtype=torch.uint64, device="cpu").view(torch.int64)


def _settle_left(found: OpenList, count: int) -> None:
    """Write the marked elements among the first `count` of a list, decided on the CPU."""
    entries = found.entries[_COUNTERS.value :].view(_COLUMNS.value, -1)[:, :count].cpu()
    for place, element, word, bits, _ in entries[:, entries[4] > 0].t().tolist():
        stream, out = found.streams[place], found.outs[place]
        steps = struct.unpack("<d", struct.pack("<q", bits))[0] + stream.settled(element, word)
        out.view(-1)[element] = steps * stream.grid


def add_noise_(outs: Sequence[Tensor], streams: Sequence[NoiseStream]) -> None:
    """See `noise.add_noise_`, which checks the arguments. One device; no tensor is empty."""
    for numbers in alike([kind_of(*pair) for pair in zip(streams, outs, strict=True)]):
        own, of_own = [outs[i] for i in numbers], [streams[i] for i in numbers]
        found = open_list([out.detach() for out in own], of_own)
        sizes = [out.numel() for out in own]
        table = tensor_table(own, own, of_own, sizes=sizes, block=8 * GROUPS)
        with on_device(own[0]):
            _add_noise_kernel[(table.programs,)](
                table.rows, table.owners, found.entries, found.capacity, *address_of(of_own[0]),
                DTYPE=TYPES[own[0].dtype], BLOCK=8 * GROUPS, VECTORS=has_vectors(own[0]),
                ALIGNED=of_own[0].offset % 8 == 0, PHILOX=of_own[0].generator == "philox",
                **OPTIONS,
            )  # fmt: skip
        for out in own:
            # Autograd must notice the change, as it does with PyTorch's own operations.
            torch.autograd.graph.increment_version(out)
        settle_unless_kept(found)


def kind_of(stream: NoiseStream | None, *tensors: Tensor) -> tuple[object, ...]:
    """Return a key of tensors and their noise. Tensors with equal keys may share a launch."""
    of_noise = stream and (stream.offset % 8 == 0, stream.release, id(stream.unsettled))
    return (*(x.dtype for x in tensors), has_vectors(*tensors), of_noise)


def settle_unless_kept(found: OpenList) -> None:
    """Settle a list at once, unless its streams collect lists in `unsettled` to settle later."""
    if found.streams[0].unsettled is None:
        settle([found])
