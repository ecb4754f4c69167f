"""Random streams addressed by position: ChaCha20 keyed from the operating system.

A stream's value at an address is a pure function of (key, address). Nothing is drawn twice,
nothing depends on the order of calls, and a replay needs the key and the address only.
"""

from __future__ import annotations

import hashlib
import os
import struct

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from dpflash.kernels import normals_from_bits

KEY_BYTES = 32
_BLOCK_BYTES = 64
_WORDS_PER_BLOCK = 8
_CHUNK_WORDS = 1 << 20
_ZEROS = bytes(_CHUNK_WORDS * 8)
# RFC 8439's block counter has 32 bits.
_MAX_WORDS = (1 << 32) * _WORDS_PER_BLOCK


def master_key(seed: int | None = None) -> bytes:
    """A new 32-byte key: from the operating system, or from a seed for reproducible research."""
    if seed is None:
        return os.urandom(KEY_BYTES)
    return hashlib.blake2b(
        str(int(seed)).encode(), digest_size=KEY_BYTES, person=b"dpflash-seed"
    ).digest()


def derive_key(key: bytes, purpose: str) -> bytes:
    """An independent 32-byte key for one purpose, so that sampling and noise never share bits."""
    return hashlib.blake2b(purpose.encode(), key=key, digest_size=KEY_BYTES).digest()


def keystream(key: bytes, *, first: int, second: int, block: int, count: int) -> bytearray:
    """Words of the ChaCha20 keystream at an address.

    Args:
        key: 32 bytes.
        first: 64-bit part of the nonce (the step).
        second: 32-bit part of the nonce (the parameter).
        block: first 64-byte block.
        count: number of 64-bit words.

    Returns:
        8 * count bytes.

    Source: RFC 8439; the nonce is (first, second) little-endian after the block counter.
    """
    if block * _WORDS_PER_BLOCK + count > _MAX_WORDS:
        raise ValueError(f"count={count}: one address holds {_MAX_WORDS} words; split the tensor")
    nonce = struct.pack("<IQI", block, first, second)
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()
    out = bytearray(8 * count)
    encryptor.update_into(memoryview(_ZEROS)[: 8 * count], out)
    return out


def uniform_words(key: bytes, *, index: int, count: int) -> np.ndarray:
    """Uniform words [count], uint64, at address `index`."""
    parts = [
        np.frombuffer(
            keystream(
                key,
                first=index,
                second=0,
                block=start // _WORDS_PER_BLOCK,
                count=min(_CHUNK_WORDS, count - start),
            ),
            dtype="<u8",
        )
        for start in range(0, count, _CHUNK_WORDS)
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype="<u8")


def gaussian_noise_(
    out: Tensor, *, std: float, key: bytes, step: int, parameter_id: int, offset: int = 0
) -> Tensor:
    """Add Gaussian noise of the stream (key, step, parameter_id) to a tensor in place.

    Args:
        out: contiguous, fp32 or fp64, any device.
        std: standard deviation, in the units of out.
        key: 32 bytes.
        step: number of the release.
        parameter_id: number of the parameter.
        offset: element of the stream that out's first element gets, so that a part of a parameter
            gets exactly the noise it has in the whole.

    Returns:
        out.

    Guarantees:
        Elements are independent standard normals times std, as far as ChaCha20 is a random
        function and fp32 arithmetic allows; distinct (step, parameter_id, element) never share
        bits. Tail: see `dpflash.kernels.normals_from_bits`.
    """
    flat = out.view(-1)
    done = 0
    while done < flat.numel():
        start = offset + done
        skip = start % _WORDS_PER_BLOCK
        count = min(_CHUNK_WORDS - skip, flat.numel() - done)
        words = skip + count + (skip + count) % 2
        bits = keystream(
            key,
            first=step,
            second=parameter_id,
            block=start // _WORDS_PER_BLOCK,
            count=words,
        )
        normals = normals_from_bits(torch.frombuffer(bits, dtype=torch.int64))
        flat[done : done + count].add_(normals[skip : skip + count].to(out.device), alpha=std)
        done += count
    return out
