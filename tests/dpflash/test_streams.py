"""The random streams: the ChaCha20 of the standard, addresses that never overlap, normals."""

import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.stats
import torch

from dpflash import streams
from dpflash.streams import (
    derive_key,
    gaussian_noise_,
    keystream,
    master_key,
    uniform_words,
)

KEY = bytes(range(32))


def test_the_keystream_is_that_of_rfc_8439_section_2_4_2():
    """Its nonce is the bytes 00 00 00 00 00 00 00 4a 00 00 00 00, its first block 1."""
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
    # first is the nonce's leading 64 bits, little-endian.
    first = int.from_bytes(bytes.fromhex("000000000000004a"), "little")
    found = keystream(KEY, first=first, second=0, block=1, count=15)
    assert bytes(a ^ b for a, b in zip(plaintext, found, strict=False)) == ciphertext


def test_consecutive_blocks_continue_the_keystream():
    whole = keystream(KEY, first=3, second=5, block=0, count=64)
    for block in range(8):
        part = keystream(KEY, first=3, second=5, block=block, count=8)
        assert part == whole[64 * block : 64 * (block + 1)]


def test_addresses_and_keys_do_not_share_words():
    seen = set()
    for key in (KEY, derive_key(KEY, "noise-0"), derive_key(KEY, "sampling-0")):
        for first in (0, 1, 2, 2**32, 2**40):
            for second in (0, 1, 2, 2**31):
                words = keystream(key, first=first, second=second, block=0, count=16)
                seen |= set(np.frombuffer(words, "<u8").tolist())
    assert len(seen) == 3 * 5 * 4 * 16


def test_an_address_beyond_the_32_bit_counter_is_refused():
    with pytest.raises(ValueError, match="count=17"):
        keystream(KEY, first=0, second=0, block=2**32 - 2, count=17)
    assert len(keystream(KEY, first=0, second=0, block=2**32 - 2, count=16)) == 128


def test_keys_come_from_the_operating_system_and_from_a_seed_only_on_demand():
    assert master_key() != master_key()
    assert master_key(3) == master_key(3) != master_key(4)
    assert {len(master_key()), len(master_key(0)), len(derive_key(KEY, "a"))} == {32}
    assert derive_key(KEY, "a") != derive_key(KEY, "b") != derive_key(master_key(0), "b")


@hypothesis.settings(max_examples=60, derandomize=True)
@hypothesis.given(st.integers(1, 60), st.integers(0, 100), st.booleans())
def test_a_part_of_a_parameter_gets_bit_for_bit_the_noise_it_has_in_the_whole(
    size, offset, double
):
    dtype = torch.float64 if double else torch.float32
    address = {"std": 1.7, "key": KEY, "step": 9, "parameter_id": 4}
    whole = gaussian_noise_(torch.zeros(161, dtype=dtype), **address)
    part = gaussian_noise_(torch.zeros(size, dtype=dtype), offset=offset, **address)
    assert torch.equal(part, whole[offset : offset + size])


def test_parts_agree_across_the_chunks_in_which_words_are_made(monkeypatch):
    address = {"std": 1.0, "key": KEY, "step": 1, "parameter_id": 2}
    whole = gaussian_noise_(torch.zeros(5, 200), **address)
    monkeypatch.setattr(streams, "_CHUNK_WORDS", 64)
    assert torch.equal(gaussian_noise_(torch.zeros(5, 200), **address), whole)
    odd = gaussian_noise_(torch.zeros(333), offset=101, **address)
    assert torch.equal(odd, whole.view(-1)[101:434])
    assert np.array_equal(
        uniform_words(KEY, index=7, count=300),
        np.frombuffer(keystream(KEY, first=7, second=0, block=0, count=300), "<u8"),
    )


def test_noise_is_added_to_what_is_there_and_nothing_is_drawn_for_nothing():
    address = {"std": 2.0, "key": KEY, "step": 0, "parameter_id": 0}
    noise = gaussian_noise_(torch.zeros(4, 3), **address)
    torch.testing.assert_close(gaussian_noise_(torch.ones(4, 3), **address), noise + 1)
    assert gaussian_noise_(torch.zeros(0), **address).numel() == 0
    assert gaussian_noise_(torch.zeros(()), **address) == noise[0, 0]


@pytest.fixture(scope="module")
def normals():
    parts = [
        gaussian_noise_(
            torch.zeros(62_500), std=1.0, key=master_key(1), step=step, parameter_id=parameter
        )
        for step in range(4)
        for parameter in range(4)
    ]
    return torch.cat(parts).double().numpy()


def test_normals_pass_the_kolmogorov_smirnov_test(normals):
    assert scipy.stats.kstest(normals, "norm").pvalue > 1e-3


def test_normals_have_mean_zero_variance_one_and_kurtosis_three(normals):
    count = normals.size
    assert abs(normals.mean()) <= 4 / math.sqrt(count)
    assert abs((normals**2).mean() - 1) <= 4 * math.sqrt(2 / count)
    assert abs((normals**3).mean()) <= 4 * math.sqrt(15 / count)
    assert abs((normals**4).mean() - 3) <= 4 * math.sqrt(96 / count)


def test_tails_have_their_gaussian_mass(normals):
    for threshold in (2.0, 3.0, 4.0):
        mass = 2 * scipy.stats.norm.sf(threshold)
        found = int((np.abs(normals) > threshold).sum())
        expected = mass * normals.size
        assert abs(found - expected) <= 4.5 * math.sqrt(expected)


def test_the_two_normals_of_a_pair_and_neighbouring_pairs_are_uncorrelated(normals):
    bound = 4.5 / math.sqrt(normals.size)
    for lag in (1, 2, 3, 8, 62_500):
        assert abs(np.mean(normals[:-lag] * normals[lag:])) <= bound
        # Squares too: a pair shares its radius, but independent normals do not show it.
        squares = normals**2 - 1
        assert abs(np.mean(squares[:-lag] * squares[lag:])) <= 2 * bound * math.sqrt(2)


def test_uniform_words_are_uniform():
    words = uniform_words(KEY, index=0, count=200_000)
    assert words.dtype == np.dtype("<u8")
    assert scipy.stats.kstest(words / 2.0**64, "uniform").pvalue > 1e-3
    bits = np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1).mean(0)
    assert np.abs(bits - 0.5).max() <= 5 * 0.5 / math.sqrt(words.size)
