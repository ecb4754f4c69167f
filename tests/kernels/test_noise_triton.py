"""The Triton noise kernels: the standards' vectors, the twin's words, the CPU's normals.

Without a GPU they run in Triton's interpreter, few programs at a time.
"""

import math
import sys

import pytest
import torch

from dpflash.kernels import gaussian_noise_, noise, noise_reference, normals_from_bits

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("dpflash.kernels.noise_triton")
tl = pytest.importorskip("triton.language")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = pytest.mark.gpu
KEY = bytes(range(32))
GENERATORS = ["chacha20", "philox"]
# The most by which a kernel's normal and the CPU's differ; 5 were seen.
ULPS = 8


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
def _box_muller_kernel(out_ptr, words_ptr, BLOCK: tl.constexpr):
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(words_ptr + pairs * 4)
    b = tl.load(words_ptr + pairs * 4 + 1)
    c = tl.load(words_ptr + pairs * 4 + 2)
    d = tl.load(words_ptr + pairs * 4 + 3)
    x, y = kernels.box_muller(a, b, c, d)
    tl.store(out_ptr + pairs * 2, x)
    tl.store(out_ptr + pairs * 2 + 1, y)


@triton.jit
def _normals_at_kernel(
    out_ptr, elements_ptr, key_ptr, counter_ptr, BLOCK: tl.constexpr, PHILOX: tl.constexpr
):
    lanes = tl.arange(0, BLOCK)
    address = (tl.load(counter_ptr + 1), tl.load(counter_ptr + 2), tl.load(counter_ptr + 3))
    normals = kernels.normals_at(
        _key(key_ptr), tl.load(elements_ptr + lanes), address[0], address[1], address[2], PHILOX
    )
    tl.store(out_ptr + lanes, normals)


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


def added(count, *, offset=0, dtype=torch.float32, std=1.0, **more):
    address = {"key": KEY, "step": 2**40 + 7, "parameter_id": 2**31 + 5, **more}
    out = torch.zeros(count, dtype=dtype, device=DEVICE)
    kernels.gaussian_noise_(out, std=std, offset=offset, **address)
    return out.cpu()


def on_the_cpu(count, *, dtype=torch.float32, std=1.0, **more):
    address = {"key": KEY, "step": 2**40 + 7, "parameter_id": 2**31 + 5, **more}
    return gaussian_noise_(torch.zeros(count, dtype=dtype), std=std, **address)


def assert_within_ulps(found, expected):
    """Units in the last place of the fp32 normal."""
    size = expected.float().abs()
    unit = torch.nextafter(size, torch.tensor(math.inf)) - size
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert ((found.double() - expected.double()).abs() <= ULPS * unit.double()).all()


def test_the_kernel_makes_the_block_of_rfc_8439_section_2_3_2():
    key = kernels.key_words(KEY, "chacha20")
    found = words_of(key, (1, 0x09000000, 0x4A000000, 0), 2, "chacha20")[0]
    expected = """
        e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
        466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2
    """
    assert [f"{word:08x}" for word in found.tolist()] == expected.split()


def test_the_kernel_makes_the_keystream_of_rfc_8439_section_2_4_2():
    plaintext = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    ciphertext = bytes.fromhex(
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
        "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
        "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
        "5af90bbf74a35be6b40b8eedf2785e42874d"
    )
    key = kernels.key_words(KEY, "chacha20")
    words = words_of(key, (1, 0, 0x4A000000, 0), 2, "chacha20")
    found = words.to(torch.uint32).contiguous().numpy().tobytes()
    assert bytes(a ^ b for a, b in zip(plaintext, found, strict=False)) == ciphertext


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["0", "1", "pi"],
)
def test_the_kernels_philox_is_that_of_random123(counter, key, expected):
    found = words_of([*key, 0, 0, 0, 0, 0, 0], counter, 1, "philox")[0]
    assert " ".join(f"{word:08x}" for word in found.tolist()) == expected


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(
    ("block", "step", "parameter_id"),
    [(0, 0, 0), (2**32 - 8, 2**64 - 1, 2**32 - 1), (2**31 - 4, 2**31, 2**31)],
    ids=["zeros", "ones", "signs"],
)
def test_the_kernels_words_are_those_of_the_twin_bit_for_bit(block, step, parameter_id, generator):
    key = bytes(range(100, 132))
    found = words_of(
        kernels.key_words(key, generator), counter_of(block, step, parameter_id), 8, generator
    )
    twin = {"chacha20": noise_reference.chacha20, "philox": noise_reference.philox}[generator]
    blocks = torch.arange(block, block + 8)
    expected = twin(key, step=step, parameter_id=parameter_id, blocks=blocks)
    assert torch.equal(found[:, 0::2] | found[:, 1::2] << 32, expected)


def box_muller(words):
    out = torch.full((words.numel(),), torch.nan, device=DEVICE)
    block = triton.next_power_of_2(words.numel() // 2)
    assert block * 2 == words.numel()
    _box_muller_kernel[(1,)](out, words.view(torch.uint32).to(DEVICE), BLOCK=block)
    return out.cpu()


def test_the_kernels_normals_are_those_of_the_same_words_within_the_documented_ulps():
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**63), 2**63 - 1, (2**17,), generator=generator)
    # Radii over all their range: as many leading zeros, or ones, as there can be.
    few = torch.arange(2**16) % 64
    words[0::4] >>= few[: 2**15]
    assert_within_ulps(box_muller(words), normals_from_bits(words))


def test_extreme_words_give_the_same_extreme_normals():
    extremes = [0, 1, 2**11 - 1, 2**11, 2**62, 2**63 - 1, -(2**63), -(2**63) + 1, -(2**11), -1]
    # Uniforms midway between two of fp32, near 1 where neighbours have different radii, and what
    # fp64 rounds there first.
    middles = [2**64 - ((2 * i + 1) << 39) + j for i in range(6) for j in (-2049, -2048, 0, 2047)]
    words = extremes + [x - 2**64 if x >= 2**63 else x for x in middles]
    words += [0] * (64 - len(words))
    pairs = torch.cartesian_prod(torch.tensor(words), torch.tensor(words)).flatten()
    found, expected = box_muller(pairs), normals_from_bits(pairs)
    assert_within_ulps(found, expected)
    assert found.abs().max() == pytest.approx(math.sqrt(2 * 54 * math.log(2)), rel=3e-7)
    assert torch.equal(found == 0, expected == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_the_kernels_noise_is_that_of_the_cpu_within_the_documented_ulps(generator, dtype):
    address = {"generator": generator, "dtype": dtype, "offset": 13, "std": 1.0}
    found = added(4000, block=512, **address)
    assert_within_ulps(found, on_the_cpu(4000, **address))


@pytest.mark.parametrize("generator", GENERATORS)
def test_the_kernels_noise_reaches_the_end_of_the_stream(generator):
    elements = {"chacha20": 2**35, "philox": 2**33}[generator]
    address = {"generator": generator, "offset": elements - 21}
    assert_within_ulps(added(21, block=16, **address), on_the_cpu(21, **address))


def test_a_std_in_float64_is_not_rounded_to_float32():
    std = 1.0 + 2.0**-40
    found = added(16, std=std, dtype=torch.float64, block=16)
    assert torch.equal(found, added(16, dtype=torch.float64, block=16) * std)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(("count", "offset"), [(1, 0), (1, 7), (65, 1), (100, 8), (130, 31)])
def test_the_kernels_noise_depends_on_neither_block_nor_offset(count, offset, generator):
    whole = added(256, block=32, generator=generator)
    part = added(count, offset=offset, block=8, generator=generator)
    assert torch.equal(part, whole[offset : offset + count])


@pytest.mark.parametrize("generator", GENERATORS)
def test_shards_of_a_parameter_get_the_kernels_noise_of_the_whole_bit_for_bit(generator):
    whole = added(512, block=64, generator=generator)
    borders = [0, 3, 100, 301, 512]
    shards = [
        added(end - begin, offset=begin, block=32, generator=generator)
        for begin, end in zip(borders, borders[1:], strict=False)
    ]
    assert torch.equal(torch.cat(shards), whole)


@pytest.mark.parametrize("generator", GENERATORS)
def test_normals_of_single_elements_are_those_of_the_run(generator):
    elements = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 130, 9, 63, 64, 201, 17, 30, 255])
    out = torch.full((16,), torch.nan, device=DEVICE)
    _normals_at_kernel[(1,)](
        out, elements.to(DEVICE), unsigned(kernels.key_words(KEY, generator)),
        unsigned(counter_of(0, 2**40 + 7, 2**31 + 5)), BLOCK=16, PHILOX=generator == "philox",
        enable_fp_fusion=False,
    )  # fmt: skip
    assert torch.equal(out.cpu(), added(256, block=32, generator=generator)[elements])


@pytest.mark.parametrize("offset", [0, 5])
def test_the_kernel_writes_nothing_beside_its_tensor(offset):
    guarded = torch.full((120,), torch.nan, device=DEVICE)
    out = guarded[20:97].zero_()
    kernels.gaussian_noise_(
        out, std=1.0, key=KEY, step=2**40 + 7, parameter_id=2**31 + 5, offset=offset, block=8
    )
    assert torch.equal(out.cpu(), added(77, offset=offset, block=16))
    assert guarded[:20].isnan().all() and guarded[97:].isnan().all()


def test_the_kernel_adds_to_what_is_there_and_autograd_notices():
    out = torch.full((3, 5), 2.0, device=DEVICE)
    version = out._version
    kernels.gaussian_noise_(out, std=0.5, key=KEY, step=2**40 + 7, parameter_id=2**31 + 5, block=8)
    torch.testing.assert_close(out.cpu().view(-1), 2 + 0.5 * added(15, block=8))
    assert out._version == version + 1


class OnAGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = True


def test_a_tensor_on_a_gpu_goes_to_the_kernel(monkeypatch):
    seen = {}
    monkeypatch.setattr(kernels, "gaussian_noise_", lambda out, **named: seen.update(named))
    out = torch.zeros(3).as_subclass(OnAGpu)
    address = {"std": 2.0, "key": KEY, "step": 1, "parameter_id": 2, "offset": 3}
    gaussian_noise_(out, **address, generator="philox")
    assert seen == {**address, "generator": "philox"}


def test_without_triton_a_gpu_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "dpflash.kernels.noise_triton", None)
    monkeypatch.delattr(noise.__package__ + ".noise_triton", raising=False)
    out = torch.zeros(3).as_subclass(OnAGpu)
    with pytest.raises(ImportError, match="install the triton"):
        gaussian_noise_(out, std=1.0, key=KEY, step=0, parameter_id=0)


@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("offset", [0, 1, 2**32 + 3])
def test_gpu_and_cpu_have_the_same_stream(offset, generator, dtype):
    address = {"std": 1.0, "key": KEY, "step": 3, "parameter_id": 4, "offset": offset}
    address["generator"] = generator
    found = gaussian_noise_(torch.zeros(1_000_003, dtype=dtype, device="cuda"), **address)
    expected = gaussian_noise_(torch.zeros(1_000_003, dtype=dtype), **address)
    assert_within_ulps(found.cpu(), expected)


@GPU
@pytest.mark.parametrize("generator", GENERATORS)
def test_shards_on_a_gpu_get_the_noise_of_the_whole_bit_for_bit(generator):
    address = {"std": 0.7, "key": KEY, "step": 3, "parameter_id": 4, "generator": generator}
    whole = gaussian_noise_(torch.zeros(1_000_003, device="cuda"), **address)
    for begin, end in ((0, 1), (1, 500_000), (7, 1_000_003), (16, 999_984), (999_999, 1_000_003)):
        part = torch.zeros(end - begin, device="cuda")
        gaussian_noise_(part, offset=begin, **address)
        assert torch.equal(part, whole[begin:end])
