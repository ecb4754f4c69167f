"""Counter-based noise in Triton: ChaCha20 and Philox words, rounded normals, sums on a grid.

Other kernels make noise where they need it, with `rounded_normals` of `words_of_groups`: runs of
8 elements share a block of ChaCha20. A `key` is a tuple of eight 32-bit words; Philox takes the
first two. `step_low`, `step_high` and `parameter_id` are 32-bit words.

Where fp64 leaves a rounding open, a kernel writes NaN and appends the element to a list; `settle`
makes it on the CPU, exactly. So every GPU gives the bits of the CPU, whatever its logarithm and
fused multiply-adds round. Words wrap around: sums of them are exempt from the overflow checks of
Triton's debug mode.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import noise_cpu, noise_reference, rounded_normal
from .capture import sent
from .layout import on_device
from .noise import NoiseStream
from .tensor_table import (
    COLUMNS,
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
# Groups of 8 elements that a program of the noise kernel makes.
GROUPS = 128
# What the launcher passes: nothing is compiled again for another address or grid.
ADDRESS = [
    "grid_bits", "scale_bits", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7",
    "step_low", "step_high",
]  # fmt: skip

_CENTER_ABOVE = tl.constexpr(rounded_normal.CENTER[0])
_CENTER_BELOW = tl.constexpr(rounded_normal.CENTER[1])
_TAIL_ABOVE = tl.constexpr(rounded_normal.TAIL[0])
_TAIL_BELOW = tl.constexpr(rounded_normal.TAIL[1])
_SPLIT = tl.constexpr(rounded_normal.SPLIT)
_SPLIT_SQUARE = tl.constexpr(rounded_normal.SPLIT_SQUARE)
_TAIL_ORIGIN = tl.constexpr(rounded_normal.TAIL_ORIGIN)
_RELATIVE_ERROR = tl.constexpr(rounded_normal.RELATIVE_ERROR)


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
def _wide(low, high):
    """Words of 64 bits, signed."""
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def words_of_groups(key, groups, step_low, step_high, parameter_id, PHILOX: tl.constexpr):
    """The 64-bit words of the elements 8 g, ..., 8 g + 7 of the stream for each group g.

    groups: [N], uint32 (Philox: below 2^30). Returns [8 N], int64: neighbours are neighbours.
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
    # The last join is the last, fastest, bit of an element's number.
    even = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    odd = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), [8 * groups.shape[0]])


@triton.jit
def rounded_normals(words, scale):
    """``round(scale * N)`` of 64-bit words where fp64 decides; `rounded_normal.rounded_normals`.

    words: any shape, int64. scale: fp64. Returns fp64 integers, and where they are undecided.

    The quantile's error is that derived for RELATIVE_ERROR, which leaves 8 units in the last bit
    to the logarithm (libdevice: 2) and does not count on every product being rounded before it is
    added. A tail below 2^-36, where TAIL ends, is undecided.
    """
    mask: tl.constexpr = (1 << 63) - 1
    magnitudes = words & mask
    t = tl.sqrt(-tl.log(magnitudes.to(tl.float64) * 2.0**-64)) - _TAIL_ORIGIN
    above = tl.zeros_like(t) + _TAIL_ABOVE[7]
    below = tl.zeros_like(t) + _TAIL_BELOW[7]
    for i in tl.static_range(7):
        above = above * t + _TAIL_ABOVE[6 - i]
        below = below * t + _TAIL_BELOW[6 - i]
    # 1/2 - p, which near the median would be lost in the rounding of p.
    q = (magnitudes ^ mask).to(tl.float64) * 2.0**-64
    s = _SPLIT_SQUARE - q * q
    center_above = tl.zeros_like(s) + _CENTER_ABOVE[7]
    center_below = tl.zeros_like(s) + _CENTER_BELOW[7]
    for i in tl.static_range(7):
        center_above = center_above * s + _CENTER_ABOVE[6 - i]
        center_below = center_below * s + _CENTER_BELOW[6 - i]
    central = q <= _SPLIT
    above = tl.where(central, q * center_above, above)
    below = tl.where(central, center_below, below)
    y = above / below * scale
    # N is within 1.26 / magnitude of the quantile; a quotient in fp32 is exact enough.
    margins = (2.0 / magnitudes.to(tl.float32)).to(tl.float64) * scale + y * _RELATIVE_ERROR
    whole = tl.floor(y)
    rest = y - whole
    undecided = (tl.abs(rest - 0.5) <= margins) | (magnitudes < (1 << 28))
    rounded = tl.where(rest > 0.5, whole + 1.0, whole)
    # Not -rounded: a zero has no sign, as in Python's integers.
    return tl.where(words < 0, 0.0 - rounded, rounded), undecided


@triton.jit
def _nearest(x):
    """Integers next to fp64 numbers, halves to the even one."""
    size = tl.abs(x)
    # Above 2^52 all are integers, and adding it rounds.
    whole = tl.where(size < 2.0**52, (size + 2.0**52) - 2.0**52, size)
    return tl.where(x < 0, -whole, whole)


@triton.jit
def as_key(k0, k1, k2, k3, k4, k5, k6, k7):
    """A `key` of a kernel's arguments."""
    return (
        k0.to(tl.uint32), k1.to(tl.uint32), k2.to(tl.uint32), k3.to(tl.uint32),
        k4.to(tl.uint32), k5.to(tl.uint32), k6.to(tl.uint32), k7.to(tl.uint32),
    )  # fmt: skip


@triton.jit
def as_fp64(bits):
    """Bits of an fp64 number as that number: a kernel's float arguments are fp32."""
    return bits.to(tl.uint64).to(tl.float64, bitcast=True)


@triton.jit
def reciprocal_of_grid(grid_bits):
    """1 / grid for a power of two."""
    return as_fp64((2046 << 52) - grid_bits.to(tl.uint64))


@triton.jit
def elements_of(row, program, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, VECTORS: tl.constexpr):
    """([BLOCK] elements of a tensor's program, which of them exist, the first one's group of 8).

    row: of a `TensorTable`. Unless ALIGNED the programs begin so many elements earlier that the
    noise's groups are whole.
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
    """``grid (steps + Z)``, fp64, for a run of whole groups; NaN where undecided.

    steps: [8 N], fp64 integers, of the groups from `group` on. Undecided elements are appended to
    the list, see `OpenList`.
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
    at = open_ptr + 1 + places
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
    """``out = grid (round(out / grid) + Z)`` for each tensor of a table."""
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


@triton.jit(do_not_specialize=["count"])
def _settle_kernel(
    rows_ptr, places_ptr, elements_ptr, values_ptr, count, DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a value to an element of a tensor of a table."""
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = numbers < count
    rows = rows_ptr + COLUMNS * tl.load(places_ptr + numbers, mask=there, other=0)
    out = tl.load(rows + 1, mask=there, other=0).to(tl.pointer_type(DTYPE))
    values = tl.load(values_ptr + numbers, mask=there, other=0.0)
    out += tl.load(elements_ptr + numbers, mask=there, other=0)
    tl.store(out, values.to(DTYPE), mask=there)


def key_words(key: bytes, generator: str) -> tuple[int, ...]:
    """The eight words that kernels take as a key."""
    if generator == "philox":
        short = noise_reference.philox_key(key)
        return (short & 0xFFFFFFFF, short >> 32, 0, 0, 0, 0, 0, 0)
    return struct.unpack("<8I", key)


def bits_of(number: float) -> int:
    """The bits of an fp64 number, for `as_fp64`."""
    return int(struct.unpack("<Q", struct.pack("<d", number))[0])


def address_of(stream: NoiseStream) -> tuple[int, ...]:
    """The kernels' `ADDRESS` arguments, which the streams of a release have in common."""
    step = int(stream.step)
    return (
        bits_of(float(stream.grid)),
        bits_of(float(stream.scale)),
        *key_words(stream.key, stream.generator),
        *(step & 0xFFFFFFFF, step >> 32),
    )


class OpenList(NamedTuple):
    """The elements of some results whose noise fp64 leaves undecided, where a kernel lists them.

    Attributes:
        outs: the results, which have NaN there until they are settled.
        streams: the noise of each, of one release.
        entries: [1 + 4 capacity], int64, on the results' device: how many elements there are;
            then, for each of them in any order, the number of its result, its number there, its
            word, and the bits of its sum before noise, fp64 in units of the grid.
    """

    outs: tuple[Tensor, ...]
    streams: tuple[NoiseStream, ...]
    entries: Tensor

    @property
    def capacity(self) -> int:
        """How many elements the list can hold."""
        return (self.entries.numel() - 1) // 4


def open_list(outs: Sequence[Tensor], streams: Sequence[NoiseStream]) -> OpenList:
    """An empty list for the noise of results on one device, of one release."""
    elements = sum(out.numel() for out in outs)
    size = 1 + 4 * expected_capacity(elements, streams[0].scale)
    entries = torch.zeros(size, dtype=torch.int64, device=outs[0].device)
    return OpenList(tuple(outs), tuple(streams), entries)


def expected_capacity(elements: int, scale: float) -> int:
    """For four times the mean number of undecided elements and 128: more has odds below 2^-100.

    An element is undecided with probability at most 2^-46 (scale + 1).
    """
    return min(elements, math.ceil(elements * (scale + 1) * 2.0**-44) + 128)


def settle(lists: Sequence[OpenList]) -> bool:
    """Write the elements that kernels left undecided, see `NoiseStream.settled`.

    Waits for the device once for all lists of one device and scale. The C++ kernel for words
    computes nearly all of the integers, `NoiseStream.settled` the others.

    Returns:
        Whether there were such elements.

    Raises:
        RuntimeError: a kernel found more undecided elements than its list holds, which no correct
            device does; the results keep NaN there.
    """
    was_any = False
    groups: dict[tuple[torch.device, float], list[OpenList]] = {}
    for found in lists:
        groups.setdefault((found.entries.device, found.streams[0].scale), []).append(found)
    for (_, scale), group in groups.items():
        host = torch.cat([found.entries for found in group]).cpu()
        hosts = host.split([found.entries.numel() for found in group])
        parts = [_undecided(found, part) for found, part in zip(group, hosts, strict=True)]
        words = torch.cat([part[2] for part in parts])
        if not len(words):
            continue
        was_any = True
        integers, left = noise_cpu.rounded_normals(words, scale)
        counts = [part.shape[1] for part in parts]
        each = zip(group, parts, integers.split(counts), left.split(counts), strict=True)
        for found, (places, elements, own_words, bits), own, open_ones in each:
            for i in open_ones.nonzero().flatten().tolist():
                stream = found.streams[int(places[i])]
                own[i] = stream.settled(int(elements[i]), int(own_words[i]))
            sums = (bits.contiguous().view(torch.float64) + own) * found.streams[0].grid
            if len(sums):
                _write(found.outs, places, elements, sums)
    return was_any


def _write(outs: Sequence[Tensor], places: Tensor, elements: Tensor, values: Tensor) -> None:
    """Write values, [N] on the CPU, to elements of the results with the numbers `places`."""
    device = outs[0].device
    table = tensor_table(outs, outs, sizes=[0] * len(outs), block=1)
    for dtype in {out.dtype for out in outs}:
        own = torch.tensor([out.dtype == dtype for out in outs], device="cpu")[places]
        at = [sent(x[own], device) for x in (places, elements, values)]
        with on_device(outs[0]):
            _settle_kernel[(triton.cdiv(len(at[0]), 256),)](
                table.rows, *at, len(at[0]), DTYPE=TYPES[dtype], BLOCK=256,
            )  # fmt: skip


def _undecided(found: OpenList, entries: Tensor) -> Tensor:
    """[4, count] of a list on the CPU: results, elements, words and the bits of sums."""
    count = int(entries[0])
    if count > found.capacity:
        raise RuntimeError(
            f"more elements of noise are undecided on {found.outs[0].device} than can be: its "
            "arithmetic is wrong. Nothing may be released; run the noise on the CPU"
        )
    return entries[1:].view(4, found.capacity)[:, :count]


def add_noise_(outs: Sequence[Tensor], streams: Sequence[NoiseStream]) -> None:
    """See `noise.add_noise_`, which checks the arguments; all on one device, none empty."""
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
        settle_or_keep(found)


def kind_of(stream: NoiseStream | None, *tensors: Tensor) -> tuple[object, ...]:
    """What the tensors of one launch, and their noise, must have in common."""
    of_noise = stream and (stream.offset % 8 == 0, stream.release, id(stream.unsettled))
    return (*(x.dtype for x in tensors), has_vectors(*tensors), of_noise)


def settle_or_keep(found: OpenList) -> None:
    """Settle a list now, or append it to `NoiseStream.unsettled` for later."""
    unsettled = found.streams[0].unsettled
    if unsettled is None:
        settle([found])
    else:
        unsettled.append(found)
