"""Noise streams: the standards' own vectors, addresses, normals and who gets which of them.

Four ways make the same words: C++ (CPUs), `cryptography` (CPUs without a C++ compiler), the Triton
kernel (GPUs; without one it runs in Triton's interpreter) and the reference implementation.
Triton's part is `test_noise_triton.py`, C++'s `test_grads_cpu.py`, the rounding of normals
`test_rounded_normal.py`.
"""

import dataclasses
import math
import os
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from dpflash.kernels import (
    NoiseStream,
    gaussian_noise_,
    native,
    noise,
    noise_reference,
)
from dpflash.kernels.noise import keystream

FULL = os.environ.get("DPFLASH_FULL") == "1"
KEY = bytes(range(32))
OTHER_KEY = bytes(range(1, 33))
GENERATORS = ["chacha20", "philox"]
SIZES = {"chacha20": 8, "philox": 2}
GRID = 2.0**-30
REFERENCES = {"chacha20": noise_reference.chacha20, "philox": noise_reference.philox}


def stream(
    count, *, std=1.0, grid=GRID, key=KEY, step=0, parameter_id=0, dtype=torch.float32, **more
):
    return gaussian_noise_(
        torch.zeros(count, dtype=dtype),
        std=std,
        grid=grid,
        key=key,
        step=step,
        parameter_id=parameter_id,
        **more,
    )


def nonce(text):
    """The address whose nonce RFC 8439 writes as these bytes."""
    data = bytes.fromhex(text)
    return {
        "step": int.from_bytes(data[:8], "little"),
        "parameter_id": int.from_bytes(data[8:], "little"),
    }


def by_cryptography(*, step, parameter_id, block, count):
    return bytes(keystream(KEY, first=step, second=parameter_id, block=block, count=8 * count))


def by_the_reference(*, step, parameter_id, block, count):
    blocks = torch.arange(block, block + count)
    words = noise_reference.chacha20(KEY, step=step, parameter_id=parameter_id, blocks=blocks)
    return words.numpy().tobytes()


RFC_BLOCK = bytes.fromhex(
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)
RFC_PLAINTEXT = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
    b"future, sunscreen would be it."
)
RFC_CIPHERTEXT = bytes.fromhex(
    "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0b"
    "f91b65c5524733ab8f593dabcd62b3571639d624e65152ab8f530c359f0861d8"
    "07ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab7793736"
    "5af90bbf74a35be6b40b8eedf2785e42874d"
)
# Counter and key as Random123's kat_vectors writes them, and the result.
PHILOX_VECTORS = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("block_function", [by_cryptography, by_the_reference])
def test_the_block_is_that_of_rfc_8439_section_2_3_2(block_function):
    found = block_function(**nonce("000000090000004a00000000"), block=1, count=1)
    assert found == RFC_BLOCK


@pytest.mark.parametrize("block_function", [by_cryptography, by_the_reference])
def test_the_keystream_is_that_of_rfc_8439_section_2_4_2(block_function):
    found = block_function(**nonce("000000000000004a00000000"), block=1, count=2)
    encrypted = bytes(a ^ b for a, b in zip(RFC_PLAINTEXT, found, strict=False))
    assert encrypted == RFC_CIPHERTEXT


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS, ids=["0", "1", "pi"])
def test_philox_is_that_of_random123(counter, key, expected):
    words = tuple(torch.tensor([x]) for x in counter)
    found = noise_reference.philox_words(key[0] | key[1] << 32, words)
    assert " ".join(f"{x:08x}" for x in found[0].tolist()) == expected


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 3),
)
def test_the_reference_and_cryptography_make_the_same_words(key, step, parameter_id, block):
    found = keystream(key, first=step, second=parameter_id, block=block, count=24)
    blocks = torch.arange(block, block + 3)
    reference = noise_reference.chacha20(key, step=step, parameter_id=parameter_id, blocks=blocks)
    assert reference.numpy().tobytes() == bytes(found)


def test_consecutive_blocks_continue_the_keystream(monkeypatch):
    whole = keystream(KEY, first=3, second=5, block=0, count=64)
    for block in range(8):
        part = keystream(KEY, first=3, second=5, block=block, count=8)
        assert part == whole[64 * block : 64 * (block + 1)]
    monkeypatch.setattr(noise, "_ZEROS", bytes(64))
    assert keystream(KEY, first=3, second=5, block=0, count=64) == whole


def test_an_address_beyond_the_32_bit_counter_is_refused():
    with pytest.raises(ValueError, match="count=17"):
        keystream(KEY, first=0, second=0, block=2**32 - 2, count=17)
    assert len(keystream(KEY, first=0, second=0, block=2**32 - 2, count=16)) == 128


@pytest.mark.parametrize("generator", GENERATORS)
def test_no_two_addresses_share_a_word(generator):
    """By chance one of 43 000 words of 64 bits repeats with probability 5e-11."""
    last = 2**32 - 1
    blocks = torch.tensor([0, 1, 2, 3, 255, 256, 65536, 2**31, last])
    words = [
        REFERENCES[generator](key, step=step, parameter_id=parameter_id, blocks=blocks).flatten()
        for key in (KEY, OTHER_KEY, bytes(32))
        for step in (0, 1, 2, 3, last, 2**32, 2**32 + 1, 2**33, 2**40, 2**63, 2**64 - 1)
        for parameter_id in (0, 1, 2, 256, 2**31, last)
    ]
    words = torch.cat(words)
    assert words.unique().numel() == words.numel() == 3 * 11 * 6 * 9 * SIZES[generator]


@pytest.mark.parametrize("generator", GENERATORS)
def test_no_two_steps_parameters_or_keys_have_equal_streams(generator):
    addresses = [
        {"key": key, "step": step, "parameter_id": parameter_id}
        for key in (KEY, OTHER_KEY)
        for step in (0, 1, 2**32, 2**63)
        for parameter_id in (0, 1, 2**31)
    ]
    streams = [stream(64, generator=generator, **address) for address in addresses]
    for i, one in enumerate(streams):
        for other in streams[:i]:
            assert not (one == other).any()


def test_the_two_generators_share_no_values_and_philox_does_not_take_the_key_itself():
    assert not (stream(256) == stream(256, generator="philox")).any()
    short = noise_reference.philox_key(KEY).to_bytes(8, "little")
    assert short not in KEY and short != noise_reference.philox_key(OTHER_KEY).to_bytes(
        8, "little"
    )


def test_the_values_of_a_stream_are_what_they_have_always_been():
    address = {"std": 1.5, "grid": 2.0**-30, "key": KEY, "step": 2**40 + 3, "parameter_id": 6}
    found = stream(5, offset=3, dtype=torch.float64, **address) * 2**30
    assert found.tolist() == [-3502635825, -3879943868, 46899266, -1484088781, 31443327]


@pytest.fixture(params=["C++", "torch"])
def way(request, monkeypatch):
    """What makes the noise of a CPU."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize(("count", "offset"), [(1, 0), (1, 7), (150, 0), (6, 2**33 - 6)])
def test_noise_on_the_cpu_is_that_of_the_reference_implementation(count, offset, generator, way):
    address = {"std": 0.3, "grid": GRID, "key": KEY, "step": 2**33 + 1, "parameter_id": 2**31 + 1}
    address |= {"offset": offset, "generator": generator}
    for dtype in (torch.float32, torch.float64):
        start = torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(0))
        found = gaussian_noise_(start.clone(), **address)
        assert torch.equal(found, noise_reference.gaussian_noise_(start.clone(), **address))


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(
    st.integers(1, 60), st.integers(0, 100), st.booleans(), st.sampled_from(GENERATORS)
)
def test_a_part_of_a_parameter_gets_bit_for_bit_the_noise_it_has_in_the_whole(
    size, offset, double, generator
):
    dtype = torch.float64 if double else torch.float32
    address = {"std": 1.7, "step": 9, "parameter_id": 4, "dtype": dtype, "generator": generator}
    whole = stream(161, **address)
    assert torch.equal(stream(size, offset=offset, **address), whole[offset : offset + size])


@pytest.mark.parametrize("generator", GENERATORS)
@pytest.mark.parametrize("cuts", [(1, 2, 3), (97, 500, 501), (333, 666), (8, 64, 512)])
def test_shards_together_are_the_unsharded_parameter_bit_for_bit(cuts, generator):
    address = {"std": 0.7, "step": 5, "parameter_id": 1, "generator": generator}
    borders = [0, *cuts, 1000]
    shards = [
        stream(end - begin, offset=begin, **address)
        for begin, end in zip(borders, borders[1:], strict=False)
    ]
    assert torch.equal(torch.cat(shards), stream(1000, **address))


@pytest.mark.parametrize("generator", GENERATORS)
def test_parts_agree_across_the_chunks_in_which_words_are_made(generator, way, monkeypatch):
    address = {"step": 1, "parameter_id": 2, "generator": generator}
    whole = stream(1000, **address)
    for chunk in (8, 64, 104):
        monkeypatch.setattr(noise, "_CHUNK_WORDS", chunk)
        assert torch.equal(stream(1000, **address), whole)
        assert torch.equal(stream(333, offset=101, **address), whole[101:434])


@pytest.mark.parametrize("generator", GENERATORS)
def test_the_last_element_of_a_stream_exists_and_the_next_does_not(generator):
    elements = {"chacha20": 2**35, "philox": 2**33}[generator]
    last = stream(9, offset=elements - 9, generator=generator)
    assert last.isfinite().all() and last.unique().numel() == 9
    with pytest.raises(ValueError, match=f"offset={elements - 8}: 9 elements .*parameter_id"):
        stream(9, offset=elements - 8, generator=generator)


def test_noise_is_added_to_what_is_there_and_nothing_is_drawn_for_nothing(monkeypatch):
    address = {"std": 2.0, "grid": GRID, "key": KEY, "step": 0, "parameter_id": 0}
    noise_alone = gaussian_noise_(torch.zeros(4, 3).double(), **address)
    ones = torch.ones(4, 3).double()
    assert gaussian_noise_(ones, **address) is ones
    assert torch.equal(ones, noise_alone + 1)
    assert gaussian_noise_(torch.zeros(()).double(), **address) == noise_alone[0, 0]
    monkeypatch.setattr(noise, "_WORDS", {})
    monkeypatch.setattr(noise, "noise_cpu", None)
    assert gaussian_noise_(torch.zeros(0), **address).numel() == 0
    off_the_grid = torch.tensor([1e-12, -0.0])
    assert gaussian_noise_(off_the_grid, **{**address, "std": 0.0}).tolist() == [
        float(torch.tensor(1e-12)),
        0.0,
    ]


@pytest.mark.parametrize("generator", GENERATORS)
def test_noise_is_a_multiple_of_the_grid_and_so_is_the_sum(generator, way):
    """A tie goes to the even multiple; what is added is that of another tensor's."""
    for grid in (2.0**-10, 1.0, 2.0**20):
        alone = stream(300, std=3 * grid, grid=grid, dtype=torch.float64, generator=generator)
        steps = alone / grid
        assert torch.equal(steps, steps.round()) and steps.unique().numel() > 5
        assert not bool(steps.signbit()[steps == 0].any())
        start = torch.tensor([0.5, 1.5, -0.5, -0.2, 7.3, -0.0]).double().repeat(50) * grid
        rounded = torch.tensor([0.0, 2, 0, 0, 7, 0]).double().repeat(50) * grid
        address = {"std": 3 * grid, "grid": grid, "step": 0, "parameter_id": 0}
        found = gaussian_noise_(start, key=KEY, generator=generator, **address)
        assert torch.equal(found, rounded + alone) and torch.equal(found.signbit(), found < 0)


def test_numbers_of_numpy_do_not_overflow():
    found = stream(4, std=np.float64(2.0), step=np.int64(2**40), parameter_id=np.uint8(200))
    assert torch.equal(found, stream(4, std=2.0, step=2**40, parameter_id=200))
    offset = np.int32(2**31 - 16)
    assert torch.equal(stream(8, offset=offset), stream(8, offset=2**31 - 16))


def test_a_narrow_tensor_takes_noise_by_the_remedy_that_the_message_names():
    narrow = torch.ones(5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"out\.dtype=torch\.bfloat16: .*out\.float\(\)"):
        gaussian_noise_(narrow, **GOOD)
    wide = gaussian_noise_(narrow.float(), **GOOD)
    assert torch.equal(wide.bfloat16(), (stream(5, dtype=torch.float64) + 1).float().bfloat16())


GOOD = {"std": 1.0, "grid": GRID, "key": KEY, "step": 0, "parameter_id": 0}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"std": -1}, r"std=-1: expected a finite number >= 0; pass 0 or a greater finite n"),
        ({"std": math.inf}, r"std=inf: expected a finite number >= 0; pass 0 or a greater"),
        ({"std": True}, r"std=True: expected a finite number >= 0; pass a plain float"),
        ({"std": 2.0**15}, r"std=32768\.0 with grid=9\.31.*e-10: expected std / grid below 2\^45"),
        ({"grid": 0.0}, r"grid=0\.0: expected a power of two as a float; pass grid_of\(bound\)"),
        ({"grid": 0.3}, r"grid=0\.3: expected a power of two"),
        ({"grid": math.inf}, r"grid=inf: expected a power of two"),
        ({"grid": 2.0**501}, r"grid=6\.5.*e\+150: expected a power of two"),
        ({"grid": 2.0**-501}, r"grid=1\.5.*e-151: expected a power of two"),
        ({"grid": True}, r"grid=True: expected a power of two"),
        ({"key": b"\x07" * 31}, r"key: expected 32 bytes, got 31; take them from os\.urandom"),
        ({"key": "k" * 32}, r"key: expected bytes, got str"),
        ({"step": -1}, r"step=-1: expected an integer in \[0, 2\^64\); count"),
        ({"step": 2**64}, r"step=18446744073709551616: expected"),
        ({"parameter_id": -1}, r"parameter_id=-1: expected an integer in \[0, 2\^32\)"),
        ({"parameter_id": 2**32}, r"parameter_id=4294967296: expected"),
        ({"offset": -1}, r"offset=-1: expected an integer in \[0"),
        ({"generator": "mt19937"}, r"generator='mt19937': expected one of chacha20, philox"),
        ({"generator": ["philox"]}, r"generator=\['philox'\]: expected one of chacha20, philox"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_what_is_out_of_range_is_refused_by_name_before_anything_is_written(changed, message):
    out = torch.zeros(3)
    with pytest.raises(ValueError, match=message):
        gaussian_noise_(out, **{**GOOD, **changed})
    assert not out.any()
    with pytest.raises(ValueError, match=message):
        NoiseStream(**{**GOOD, **changed})


@pytest.mark.parametrize("out", [[0.0, 0.0], np.zeros(3, dtype=np.float32), None], ids=repr)
def test_what_is_no_tensor_takes_no_noise(out):
    name = type(out).__name__
    with pytest.raises(ValueError, match=f"out: expected a Tensor, got {name}; pass torch.as_ten"):
        gaussian_noise_(out, **GOOD)


def test_a_refused_key_is_not_in_the_message():
    with pytest.raises(ValueError) as error:
        gaussian_noise_(torch.zeros(3), **{**GOOD, "key": b"secret"})
    assert "secret" not in str(error.value) and b"secret".hex() not in str(error.value)
    shown = repr(NoiseStream(**{**GOOD, "key": b"secret" + bytes(26)}))
    assert "secret" not in shown and "step=0" in shown


def test_a_stream_as_one_value_adds_the_noise_of_its_address():
    address = {**GOOD, "step": 3, "parameter_id": 4, "offset": 5, "generator": "philox"}
    one = NoiseStream(**address)
    assert torch.equal(one.add_to_(torch.ones(9)), gaussian_noise_(torch.ones(9), **address))
    assert one == NoiseStream(**address) != NoiseStream(**{**address, "step": 4})
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.step = 5


def test_what_is_not_contiguous_or_differentiable_is_refused():
    out = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"out: not contiguous .*out\.contiguous\(\)"):
        gaussian_noise_(out.t()[1:], **GOOD)
    with pytest.raises(ValueError, match=r"out\.requires_grad=True: .*no_grad"):
        gaussian_noise_(out.requires_grad_(), **GOOD)
    assert not out.any()
    with torch.no_grad():
        assert gaussian_noise_(out, **GOOD).any()


@pytest.mark.parametrize("generator", GENERATORS)
def test_keys_steps_and_parameters_that_differ_in_one_bit_are_uncorrelated(generator):
    """107 correlations within 5 standard errors; false alarm: 6e-5."""
    count = 40_000
    base = {"key": KEY, "step": 0, "parameter_id": 0}
    addresses = [base | {"step": 1 << bit} for bit in range(0, 64, 3)]
    addresses += [base | {"parameter_id": 1 << bit} for bit in range(0, 32, 2)]
    for bit in range(0, 256, 17):
        key = (int.from_bytes(KEY, "little") ^ 1 << bit).to_bytes(32, "little")
        addresses.append(base | {"key": key})
    one = stream(count, generator=generator, **base).double()
    for address in addresses:
        other = stream(count, generator=generator, **address).double()
        assert abs(float((one * other).mean())) <= 5 / math.sqrt(count)


@pytest.mark.parametrize("generator", GENERATORS)
def test_many_draws_keep_every_bound(generator):
    """Moments, distribution, tails and correlations of 4 * 10^6 draws; 10^8 with DPFLASH_FULL=1.

    The distribution: Kolmogorov-Smirnov over 2^14 borders, which is not above the statistic over
    all. Bounds of 4.5 standard errors and a level of 1e-5: false alarm below 2e-4 altogether.
    """
    count, chunk, bins = 100_000_000 if FULL else 4_000_000, 400_000, 1 << 14
    lags, borders = (1, 2, 3, 4, 7, 8, 16), (2.0, 3.0, 4.0, 5.0)
    histogram = torch.zeros(bins, dtype=torch.int64)
    moments = torch.zeros(4, dtype=torch.float64)
    products = torch.zeros(2 * len(lags) + 4, dtype=torch.float64)
    tails = torch.zeros(len(borders), dtype=torch.int64)
    drawn: list[torch.Tensor] = []
    for i in range(count // chunk):
        # Of 5 parameters in each step; the last before it is of another parameter or step.
        step, parameter_id = divmod(i, 5)
        address = {"step": step, "parameter_id": parameter_id, "generator": generator}
        wide = stream(chunk, key=OTHER_KEY, **address).double()
        tails += torch.stack([(wide.abs() > border).sum() for border in borders])
        histogram += torch.histc(torch.special.ndtr(wide), bins, 0, 1).long()
        square = wide * wide
        moments += torch.stack([wide.sum(), square.sum(), wide @ square, square @ square])
        pairs = [(wide[:-lag], wide[lag:]) for lag in lags]
        pairs += [(wide, other) for other in (drawn[-1:] + drawn[:1])]
        # Squares too: a pair shares its radius, but independent normals do not show it.
        found = [x @ y for x, y in pairs] + [(x * x - 1) @ (y * y - 1) for x, y in pairs]
        products[: len(found)] += torch.stack(found) if len(pairs) > len(lags) else 0.0
        drawn = [*drawn[-4:], wide]
    error = 4.5 / math.sqrt(count)
    expected = torch.tensor([0.0, 1.0, 0.0, 3.0])
    bounds = error * torch.tensor([1.0, 2.0, 15.0, 96.0]).sqrt()
    assert ((moments / count - expected).abs() <= bounds).all()
    assert (products[: len(products) // 2].abs() <= error * count).all()
    assert (products.abs() <= 2 * error * count).all()
    for border, far in zip(borders, tails.tolist(), strict=True):
        mass = 2 * scipy.stats.norm.sf(border) * count
        assert abs(far - mass) <= 5.5 * math.sqrt(mass)
    distribution = histogram.cumsum(0)[:-1].double() / count
    distance = (distribution - torch.arange(1, bins) / bins).abs().max()
    assert float(distance) <= scipy.special.kolmogi(1e-5) / math.sqrt(count)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_noise_does_not_depend_on_the_default_dtype(dtype, way):
    expected = stream(100, step=3)
    torch.set_default_dtype(dtype)
    try:
        out = torch.zeros(100, dtype=torch.float32)
        assert torch.equal(gaussian_noise_(out, **{**GOOD, "step": 3}), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_noise_in_inference_mode_is_the_same_noise(way):
    with torch.inference_mode():
        inside = stream(100, step=3).clone()
    assert torch.equal(inside, stream(100, step=3))


@pytest.mark.parametrize("generator", GENERATORS)
def test_noise_drawn_while_noise_is_drawn_changes_neither(generator, way):
    """As several threads do it."""
    expected = [stream(20_000, step=step, generator=generator) for step in range(4)]
    with ThreadPoolExecutor(4) as pool:
        draw = lambda step: stream(20_000, step=step, generator=generator)  # noqa: E731
        for found, wanted in zip(pool.map(draw, range(4)), expected, strict=True):
            assert torch.equal(found, wanted)


def test_no_two_further_words_have_one_address():
    address = {"std": 1.0, "grid": 1.0, "key": KEY, "step": 3, "parameter_id": 5}
    stream = NoiseStream(**address, offset=7)
    others = [
        NoiseStream(**address, offset=8),
        NoiseStream(**{**address, "step": 4}, offset=7),
        NoiseStream(**{**address, "parameter_id": 6}, offset=7),
        NoiseStream(**{**address, "key": bytes(32)}, offset=7),
    ]
    words = [stream._further_word(index, number) for index in range(3) for number in range(3)]
    words += [other._further_word(2, number) for other in others for number in range(3)]
    assert len(set(words)) == len(words)
    # An element's words are its own, wherever a part of the parameter begins.
    assert others[0]._further_word(1, 2) == stream._further_word(2, 2)


def test_elements_with_further_words_have_the_same_bits_in_every_part():
    """On the greatest scale some ten of 300,000 words hold a border, each of one of two values."""
    address = {"std": 1.9 * 2.0**44, "grid": 1.0, "key": KEY, "step": 3}
    if native.library() is None:
        pytest.skip("without the kernels each word would be settled in Python")

    def part(offset, count):
        stream = NoiseStream(**address, parameter_id=5, offset=offset)
        return stream.add_to_(torch.zeros(count, dtype=torch.float64))

    whole = part(0, 300_000)
    assert torch.equal(whole, torch.cat([part(k, 1000) for k in range(0, 300_000, 1000)]))
