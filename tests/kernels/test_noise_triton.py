"""The Triton noise kernels: the standards' vectors, the reference's words, the CPU's bits.

Without a GPU they run in Triton's interpreter, few programs at a time.
"""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from normal_words import as_tensor, magnitudes, near_borders

from dpflash.kernels import (
    NoiseStream,
    gaussian_noise_,
    native,
    noise,
    noise_reference,
    rounded_normal,
    settle_noise,
)

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("dpflash.kernels.noise_triton")
tl = pytest.importorskip("triton.language")

# numpy tells of the NaN and infinity that tests put into the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = pytest.mark.gpu
KEY = bytes(range(32))
GENERATORS = ["chacha20", "philox"]
GRID = 2.0**-30


@triton.jit
def _key(key_ptr):
    return (
        tl.load(key_ptr), tl.load(key_ptr + 1), tl.load(key_ptr + 2), tl.load(key_ptr + 3),
        tl.load(key_ptr + 4), tl.load(key_ptr + 5), tl.load(key_ptr + 6), tl.load(key_ptr + 7),
    )  # fmt: skip


@triton.jit
def _words_kernel(out_ptr, key_ptr, counter_ptr, BLOCK: tl.constexpr, PHILOX: tl.constexpr):
    """``out[j, i]``: word j of block ``counter[0] + i``."""
    lanes = tl.arange(0, BLOCK)
    blocks = tl.load(counter_ptr) + lanes.to(tl.uint32)
    address = (tl.load(counter_ptr + 1), tl.load(counter_ptr + 2), tl.load(counter_ptr + 3))
    if PHILOX:
        words = kernels.philox_words(_key(key_ptr), blocks, address[0], address[1], address[2])
        for j in tl.static_range(4):
            tl.store(out_ptr + j * BLOCK + lanes, words[j])
    else:
        words = kernels.chacha20_words(_key(key_ptr), blocks, address[0], address[1], address[2])
        for j in tl.static_range(16):
            tl.store(out_ptr + j * BLOCK + lanes, words[j])


@triton.jit
def _rounded_kernel(out_ptr, undecided_ptr, words_ptr, scale_ptr, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + lanes)
    integers, undecided = kernels.rounded_normals(words, tl.load(scale_ptr))
    tl.store(out_ptr + lanes, integers)
    tl.store(undecided_ptr + lanes, undecided)


def unsigned(words):
    """32-bit words as a tensor that Triton takes for unsigned."""
    return torch.tensor(list(words), dtype=torch.int64).to(torch.uint32).to(DEVICE)


def words_of(key_words, counter, count, generator):
    """[count, 16] or [count, 4], int64."""
    width = {"chacha20": 16, "philox": 4}[generator]
    out = torch.zeros(width, count, dtype=torch.uint32, device=DEVICE)
    _words_kernel[(1,)](
        out, unsigned(key_words), unsigned(counter), BLOCK=count, PHILOX=generator == "philox"
    )
    return out.cpu().to(torch.int64).t()


def counter_of(block, step, parameter_id):
    return (block, step & 0xFFFFFFFF, step >> 32, parameter_id)


def rounded(words, scale):
    """Integers, and where they are undecided, of 64-bit words in Python's integers."""
    size = triton.next_power_of_2(len(words))
    padded = [word - 2**64 if word >= 2**63 else word for word in words] + [1] * size
    out = torch.full((size,), torch.nan, dtype=torch.float64, device=DEVICE)
    undecided = torch.zeros(size, dtype=torch.bool, device=DEVICE)
    given = torch.tensor(padded[:size], device=DEVICE)
    _rounded_kernel[(1,)](
        out, undecided, given, torch.tensor(scale, dtype=torch.float64, device=DEVICE), BLOCK=size
    )
    return out.cpu()[: len(words)], undecided.cpu()[: len(words)]


def stream(**changed):
    address = {"std": 0.7, "grid": GRID, "key": KEY, "step": 2**40 + 7, "parameter_id": 2**31 + 5}
    return NoiseStream(**{**address, **changed})


def sums(count, dtype=torch.float32, seed=0):
    """Numbers on and off the grid, in either half of it, at its end, and what is none."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    special = [0.0, -0.0, GRID / 2, -GRID / 2, 3 * GRID / 2, -GRID / 4, 2.0**21, -(2.0**22)]
    special += [2.0**23 + 1, 1e30, math.inf, -math.inf, math.nan]
    values[: len(special)] = torch.tensor(special, dtype=dtype)[:count]
    return values


def added(out, noise, groups=512):
    """out with noise of the kernel, on the CPU."""
    out = out.clone().to(DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "GROUPS", groups)
        kernels.add_noise_([out], [noise])
    return out.cpu()


def on_the_cpu(out, noise):
    return noise.add_to_(out.clone())


def same_bits(found, expected):
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}[expected.dtype]
    # NaN has many.
    there = ~expected.isnan()
    assert torch.equal(found.isnan(), expected.isnan())
    return torch.equal(found[there].view(integers), expected[there].view(integers))


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(
    ("block", "step", "parameter_id"),
    [(0, 0, 0), (2**32 - 8, 2**64 - 1, 2**32 - 1), (2**31 - 4, 2**31, 2**31)],
    ids=["zeros", "ones", "signs"],
)
def test_the_kernels_words_are_those_of_the_reference_bit_for_bit(
    block, step, parameter_id, generator
):
    key = bytes(range(100, 132))
    found = words_of(
        kernels.key_words(key, generator), counter_of(block, step, parameter_id), 8, generator
    )
    reference = {"chacha20": noise_reference.chacha20, "philox": noise_reference.philox}[generator]
    blocks = torch.arange(block, block + 8)
    expected = reference(key, step=step, parameter_id=parameter_id, blocks=blocks)
    assert torch.equal(found[:, 0::2] | found[:, 1::2] << 32, expected)


def test_quantiles_are_as_exact_as_their_margins_say():
    mpmath = pytest.importorskip("mpmath")
    ends = [2**28, 2**36 - 1, 2**62, 2**63 - 1, 2**63 - 2**20, 2**63 - 2**21 - 600, 2**63 - 2**40]
    split = int((0.5 - rounded_normal.SPLIT) * 2**64)
    spread = [2**63 * i // 37 for i in range(1, 37)] + [3**i for i in range(20, 40)]
    words = ends + [split - 2**12, split + 2**12] + spread
    # At such a scale integers have all digits of fp64.
    found, _ = rounded(words, 2.0**90)
    with mpmath.workprec(200):
        for word, quantile in zip(words, found.tolist(), strict=True):
            p = (mpmath.mpf(word) + 0.5) / 2**64
            true = -mpmath.sqrt(2) * mpmath.erfinv(2 * p - 1)
            width = 1.26 / word
            allowed = rounded_normal.RELATIVE_ERROR * true + width
            assert abs(mpmath.mpf(quantile) / 2**90 - true) <= allowed, word


# At the last one fp64 rounds some to the wrong side, and may decide few.
@pytest.mark.parametrize("scale", [0.3, 2.0**30 * 0.7, 2.0**40, 2.0**46], ids="{:.3g}".format)
def test_what_is_decided_is_the_correctly_rounded_normal(scale):
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, 2**63 - 1, (200,), generator=generator).tolist()
    words += [word + 2**63 for word in words[:50]]
    # Tails of all sizes, and the neighbourhood of the median, where 1/2 - p has few digits.
    words += [2**i + 1 for i in range(63)] + [2**63 - 2**i - 3 for i in range(62)]
    words += [0, 2**63 - 1, 2**63, 2**64 - 1]
    words += [2**63 - int(2**63 * 2.5066 / 2 / scale / 2) + i for i in range(-900, 900, 137)]
    words = [word for word in words if 0 <= word < 2**64]
    found, undecided = rounded(words, scale)
    assert not (found.view(torch.int64) == torch.tensor(-0.0).double().view(torch.int64)).any()
    for word, integer, is_open in zip(words, found.tolist(), undecided.tolist(), strict=True):
        if not is_open:
            # A decision needs no further word.
            assert integer == rounded_normal.settle(word, scale, None), hex(word)
    tails = torch.tensor([word % 2**63 for word in words]) < 2**27
    assert bool(undecided[tails].all())
    assert float(undecided[~tails].float().mean()) < (0.1 if scale < 2**41 else 0.9)


def test_undecided_is_about_as_much_as_the_lists_expect():
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**63), 2**63 - 1, (1 << 15,), generator=generator).tolist()
    for scale in (2.0**40, 2.0**43):
        _, undecided = rounded([word % 2**64 for word in words], scale)
        count = int(undecided.sum())
        assert 100 < count < len(words) * (scale + 1) * 2.0**-46 * 1.2
        assert 2 * count < kernels.expected_capacity(len(words), scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    ("generator", "offset"), [("chacha20", 13), ("chacha20", 8), ("philox", 13), ("philox", 0)]
)
def test_the_kernels_noise_is_that_of_the_cpu_bit_for_bit(generator, offset, dtype):
    noise, out = stream(generator=generator, offset=offset), sums(4000, dtype)
    found = added(out, noise)
    assert same_bits(found, on_the_cpu(out, noise))
    assert not torch.equal(found, out)


@pytest.mark.parametrize("generator", GENERATORS)
def test_the_kernels_noise_reaches_the_end_of_the_stream(generator):
    elements = {"chacha20": 2**35, "philox": 2**33}[generator]
    noise, out = stream(generator=generator, offset=elements - 21), sums(21)
    assert same_bits(added(out, noise, groups=16), on_the_cpu(out, noise))


@pytest.mark.parametrize("std", [1e-12, 1e-9, 3.3, 1e4])
def test_the_kernels_noise_of_any_scale_is_that_of_the_cpu(std):
    # Below the grid, at it, and where one element in six is undecided.
    noise, out = stream(std=std, generator="philox"), sums(300, torch.float64)
    assert same_bits(added(out, noise, groups=64), on_the_cpu(out, noise))


@pytest.mark.parametrize(("count", "offset"), [(1, 0), (1, 7), (65, 1), (100, 8), (130, 31)])
def test_the_kernels_noise_depends_on_neither_block_nor_offset(count, offset):
    zeros = torch.zeros(256, dtype=torch.float64)
    whole = on_the_cpu(zeros, stream(generator="philox"))
    part = added(zeros[:count], stream(offset=offset, generator="philox"), groups=8)
    assert same_bits(part, whole[offset : offset + count])


def test_the_kernel_writes_nothing_beside_its_tensor():
    guarded = torch.full((120,), torch.nan, device=DEVICE)
    out, noise = guarded[20:97].zero_(), stream(offset=5, generator="philox")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "GROUPS", 8)
        kernels.add_noise_([out], [noise])
    assert same_bits(out.cpu(), on_the_cpu(torch.zeros(77), noise))
    assert guarded[:20].isnan().all() and guarded[97:].isnan().all()


def test_autograd_notices_noise_and_an_empty_tensor_is_left_alone():
    out, empty = torch.zeros(3, 5, device=DEVICE), torch.zeros(0, 3, device=DEVICE)
    version = out._version
    kernels.add_noise_([out], [stream()])
    kernels.add_noise_([empty], [stream()])
    assert out._version > version and bool(out.all())


class EverythingUndecided:
    """Margins of 1: the kernel decides nothing, and its list is as long as the result."""

    def __init__(self, monkeypatch, capacity=None):
        monkeypatch.setattr(kernels, "_RELATIVE_ERROR", tl.constexpr(1.0))
        monkeypatch.setattr(
            kernels, "expected_capacity", lambda elements, scale: capacity or elements
        )
        monkeypatch.setattr(kernels, "SETTLE_BLOCK", 64)
        self.lists = []
        settle = kernels.settle
        monkeypatch.setattr(kernels, "settle", lambda lists: settle(self.seen(lists)))

    def seen(self, lists):
        self.lists += lists
        return lists


@triton.jit
def _sides_of_even_words(table_ptr, k, magnitudes, scale, r2, r1, r0):
    """Odd words are left to the CPU, as if each border lay among their normals."""
    below, above = kernels.SIDES(table_ptr, k, magnitudes, scale, r2, r1, r0)
    is_even = (magnitudes & 1) == 0
    return below & is_even, above & is_even


interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="patches what the interpreter reads"
)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_what_is_settled_has_the_bits_of_what_is_decided(generator, dtype, monkeypatch):
    noise, out = stream(offset=3, generator=generator), sums(60, dtype)
    expected = on_the_cpu(out, noise)
    everything = EverythingUndecided(monkeypatch)
    assert same_bits(added(out, noise, groups=8), expected)
    (found,) = everything.lists
    # No normal of these words is within 2 of 0, in units of the grid.
    assert int(found.entries[0]) == 60


@interpreted
@pytest.mark.parametrize("has_compiler", [True, False])
def test_several_results_are_settled_later_and_at_once(has_compiler, monkeypatch):
    if not has_compiler:
        monkeypatch.setattr(native, "library", lambda: None)
    kinds = [(torch.float32, 0.7), (torch.float64, 100.0), (torch.float32, 0.7)]
    pairs = [
        (sums(30, dtype), stream(parameter_id=i, std=std, offset=i, generator="philox"))
        for i, (dtype, std) in enumerate(kinds)
    ]
    expected = [on_the_cpu(out, own) for out, own in pairs]
    everything = EverythingUndecided(monkeypatch)
    unsettled, outs = [], [out.clone().to(DEVICE) for out, _ in pairs]
    for out, (_, own) in zip(outs, pairs, strict=True):
        kernels.add_noise_([out], [replace(own, unsettled=unsettled)])
        assert out.isnan().all() and not everything.lists
    nothing = kernels.open_list([torch.zeros(0)], [stream()])
    assert settle_noise([*unsettled, nothing]) and not settle_noise([nothing])
    for found, bits in zip(outs, expected, strict=True):
        assert same_bits(found.cpu(), bits)
    assert not settle_noise([])


def filled_list(outs, streams, words, steps):
    """A list of all elements of results, one result after another."""
    found = kernels.open_list(outs, streams)
    places = torch.tensor([i for i, out in enumerate(outs) for _ in range(out.numel())])
    elements = torch.cat([torch.arange(out.numel()) for out in outs])
    count, columns = len(words), found.entries[2:].view(5, -1)
    columns[:4, :count] = torch.stack([places, elements, words, steps.view(torch.int64)])
    found.entries[0] = count
    return found


@pytest.mark.parametrize("std", [1e-12, 0.7, 2.0**14])
def test_a_list_is_settled_to_the_bits_of_the_cpu(std):
    """Far tails, and words that need further words, which the CPU has."""
    near = near_borders(std / GRID, 30)
    words = torch.cat([near, as_tensor([*magnitudes(1), *(w | 2**63 for w in magnitudes(1))])])
    outs = [
        torch.full((size,), torch.nan, dtype=dtype, device=DEVICE)
        for size, dtype in [(50, torch.float32), (len(words) - 50, torch.float64)]
    ]
    streams = [stream(std=std, parameter_id=i, offset=3) for i in range(2)]
    steps = torch.randint(-(2**40), 2**40, (len(words),)).double()
    steps[3:6] = torch.tensor([math.nan, math.inf, -0.0])
    found = filled_list(outs, streams, words, steps)
    sizes = [out.numel() for out in outs]
    parts = zip(streams, words.split(sizes), steps.split(sizes), strict=True)
    expected = [
        torch.tensor([own.settled(i, word) for i, word in enumerate(part.tolist())]).add(before)
        for own, part, before in parts
    ]
    for _ in range(2):  # as if the first time had been interrupted
        assert settle_noise([found])
        for out, values in zip(outs, expected, strict=True):
            assert same_bits(out.cpu(), (values * GRID).to(out.dtype))
        outs[1].fill_(math.nan)
    assert int(found.entries[1]) >= 2


@interpreted
@pytest.mark.parametrize("some_are_left", [False, True])
def test_lists_are_waited_for_once_and_copied_where_some_are_left(some_are_left, monkeypatch):
    if some_are_left:
        monkeypatch.setattr(kernels, "SIDES", kernels.sides, raising=False)
        monkeypatch.setattr(kernels, "sides", _sides_of_even_words)
    EverythingUndecided(monkeypatch)
    unsettled, copies, cpu = [], [], torch.Tensor.cpu
    pairs = [(sums(30, seed=i), stream(parameter_id=i, unsettled=unsettled)) for i in range(3)]
    outs = [out.clone().to(DEVICE) for out, _ in pairs]
    for out, (_, own) in zip(outs, pairs, strict=True):
        kernels.add_noise_([out], [own])
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copies.append(x.numel()) or cpu(x))
    assert settle_noise(unsettled)
    assert copies == ([6, 150, 150, 150] if some_are_left else [6])
    left = [int(found.entries[1]) for found in unsettled]
    assert all(0 < n < 30 for n in left) if some_are_left else not any(left)
    for out, (plain, own) in zip(outs, pairs, strict=True):
        assert same_bits(out, on_the_cpu(plain, own))


@interpreted
def test_the_order_in_which_a_kernel_lists_elements_changes_nothing(monkeypatch):
    noise, out = stream(generator="philox"), sums(60)
    expected = on_the_cpu(out, noise)
    everything = EverythingUndecided(monkeypatch)

    def shuffled(lists):
        for found in lists:
            entries = found.entries[2:].view(5, -1)
            entries.copy_(entries[:, torch.randperm(60)])
        return lists

    everything.seen = shuffled
    assert same_bits(added(out, noise, groups=8), expected)


@interpreted
def test_a_list_that_is_too_short_is_refused_and_nothing_without_noise_is_left(monkeypatch):
    noise, out = stream(generator="philox"), torch.ones(60)
    EverythingUndecided(monkeypatch, capacity=1)
    with pytest.raises(RuntimeError, match="computes wrongly; do not release"):
        kernels.add_noise_([out], [noise])
    assert out.isnan().all()


class OnAGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = True


def test_a_tensor_on_a_gpu_goes_to_the_kernel(monkeypatch):
    seen = []
    monkeypatch.setattr(kernels, "add_noise_", lambda outs, noise: seen.extend(noise))
    expected = stream(offset=3, generator="philox")
    expected.add_to_(torch.zeros(3).as_subclass(OnAGpu))
    assert seen == [expected]


def test_without_triton_a_gpu_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpflash.kernels.noise_triton", None)
    monkeypatch.delattr(noise.__package__ + ".noise_triton", raising=False)
    out = torch.zeros(3).as_subclass(OnAGpu)
    with pytest.raises(ImportError, match="install the triton"):
        gaussian_noise_(out, std=1.0, grid=GRID, key=KEY, step=0, parameter_id=0)


def test_the_kernel_is_launched_on_the_device_of_its_tensor(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.cuda, "device", devices.append)
    kernels.on_device(torch.zeros(3).as_subclass(OnAGpu))
    kernels.on_device(torch.zeros(3))
    assert devices == [torch.device("cpu")]


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("offset", [0, 1, 2**32 + 3])
@pytest.mark.parametrize("std", [0.7, 100.0])
def test_gpu_and_cpu_have_the_same_noise_bit_for_bit(std, offset, generator, dtype):
    noise, out = stream(std=std, offset=offset, generator=generator), sums(1_000_003, dtype)
    assert same_bits(added(out, noise, groups=128), on_the_cpu(out, noise))


@GPU
@pytest.mark.parametrize("generator", GENERATORS)
def test_shards_on_a_gpu_get_the_noise_of_the_whole_bit_for_bit(generator):
    zeros = torch.zeros(1_000_003)
    whole = added(zeros, stream(generator=generator), groups=128)
    for begin, end in ((0, 1), (1, 500_000), (7, 1_000_003), (16, 999_984), (999_999, 1_000_003)):
        part = added(zeros[begin:end], stream(offset=begin, generator=generator), groups=128)
        assert same_bits(part, whole[begin:end])


def test_a_list_after_a_launch_that_failed_begins_behind_what_it_may_have_written(monkeypatch):
    noise_triton = pytest.importorskip("dpflash.kernels.noise_triton")
    unsettled = []
    own = [stream(parameter_id=i, unsettled=unsettled) for i in range(2)]

    def failing(found):
        found.entries.fill_(7)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(noise_triton, "settle_unless_kept", failing)
        noise_triton.add_noise_([sums(30)], own[:1])
    failed, found = unsettled[0], noise_triton.open_list([sums(30)], own[1:])
    assert not found.entries.any() and failed.entries.data_ptr() != found.entries.data_ptr()


def test_a_stream_in_the_same_release_takes_numbers_of_other_libraries():
    other = stream().at(np.uint8(3), np.int32(250))
    assert other == stream().at(3, 250)
    assert {type(other.parameter_id), type(other.offset)} == {int}
