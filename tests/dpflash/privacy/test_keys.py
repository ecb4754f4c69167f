"""The keys of the random streams, and the words that sampling draws."""

import math

import numpy as np
import scipy.stats

from dpflash.distributed.mesh import Ranks
from dpflash.kernels.noise import keystream
from dpflash.privacy import keys as streams
from dpflash.privacy.keys import RunKeys, derive_key, master_key, uniform_words

KEY = bytes(range(32))


def test_purposes_do_not_share_words():
    seen = set()
    for key in (KEY, derive_key(KEY, "noise-0"), derive_key(KEY, "sampling-0")):
        for index in (0, 1, 2, 2**32, 2**40):
            seen |= set(uniform_words(key, index=index, count=64).tolist())
    assert len(seen) == 3 * 5 * 64


def test_the_keys_of_a_run_are_all_different():
    """Noise under the key of the draws would be known to whoever knows who was drawn."""
    for seed in (None, 0):
        keys = RunKeys(seed, Ranks())
        found = [keys.master, keys.noise, keys.sampling]
        keys.begin_model()
        found += [keys.master, keys.noise, keys.sampling]
        assert len(set(found)) == 6


def test_keys_come_from_the_operating_system_and_from_a_seed_only_on_demand():
    assert master_key() != master_key()
    assert master_key(3) == master_key(3) != master_key(4)
    assert {len(master_key()), len(master_key(0)), len(derive_key(KEY, "a"))} == {32}
    assert derive_key(KEY, "a") != derive_key(KEY, "b") != derive_key(master_key(0), "b")


def test_words_agree_across_the_chunks_in_which_they_are_made(monkeypatch):
    whole = np.frombuffer(keystream(KEY, first=7, second=0, block=0, count=300), "<u8")
    assert np.array_equal(uniform_words(KEY, index=7, count=300), whole)
    monkeypatch.setattr(streams, "_CHUNK_WORDS", 64)
    assert np.array_equal(uniform_words(KEY, index=7, count=300), whole)
    assert uniform_words(KEY, index=7, count=0).size == 0


def test_uniform_words_are_uniform():
    words = uniform_words(KEY, index=0, count=200_000)
    assert words.dtype == np.dtype("<u8")
    assert scipy.stats.kstest(words / 2.0**64, "uniform").pvalue > 1e-3
    bits = np.unpackbits(words.view(np.uint8).reshape(-1, 8), axis=1).mean(0)
    assert np.abs(bits - 0.5).max() <= 5 * 0.5 / math.sqrt(words.size)
