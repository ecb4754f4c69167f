"""The keys of the random streams, from the operating system, and the words that sampling draws.

A stream's value at an address is a pure function of (key, address): `dpflash.kernels.noise`.
"""

from __future__ import annotations

import hashlib
import os
from numbers import Integral

import numpy as np

from dpflash.kernels.noise import KEY_BYTES, WORDS_PER_BLOCK, keystream

_CHUNK_WORDS = 1 << 20


def master_key(seed: int | None = None) -> bytes:
    """A new 32-byte key: from the operating system, or from a seed for reproducible research."""
    if seed is None:
        return os.urandom(KEY_BYTES)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(
            f"seed={seed!r}: expected an integer, or None for keys from the operating system"
        )
    return hashlib.blake2b(
        str(int(seed)).encode(), digest_size=KEY_BYTES, person=b"dpflash-seed"
    ).digest()


def derive_key(key: bytes, purpose: str) -> bytes:
    """An independent 32-byte key for one purpose, so that sampling and noise never share bits."""
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES).digest()


def uniform_words(key: bytes, *, index: int, count: int) -> np.ndarray:
    """Uniform words [count], uint64, at address `index`."""
    parts = [
        np.frombuffer(
            keystream(
                key,
                first=index,
                second=0,
                block=start // WORDS_PER_BLOCK,
                count=min(_CHUNK_WORDS, count - start),
            ),
            dtype="<u8",
        )
        for start in range(0, count, _CHUNK_WORDS)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype="<u8")
