"""Reference implementation of the noise kernels, in plain PyTorch.

A 32-bit word is stored in an int64, because PyTorch has no arithmetic of unsigned integers. An
address is (key, step, parameter_id, block); no two addresses share a counter.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

from .rounded_normal import settle

_MASK = 0xFFFFFFFF
# "expand 32-byte k", little-endian.
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)


def _rotated(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) & _MASK) | (x >> (32 - bits))


def _as_64_bit(words: Tensor) -> Tensor:
    return words[:, 0::2] | (words[:, 1::2] << 32)


def chacha20(key: bytes, *, step: int, parameter_id: int, blocks: Tensor) -> Tensor:
    """Return blocks of the ChaCha20 keystream.

    Args:
        key: 32 bytes.
        step: 64 bits, the nonce's bytes 0 to 7 (little-endian).
        parameter_id: 32 bits, the nonce's bytes 8 to 11.
        blocks: [N], int64 in [0, 2^32): the block counters.

    Returns:
        [N, 8], int64: the 64 bytes of each block as little-endian words.

    Source: RFC 8439, section 2.3.
    """
    nonce = struct.unpack("<3I", struct.pack("<QI", step, parameter_id))
    fixed = [*_CONSTANTS, *struct.unpack("<8I", key)]
    first = [torch.full_like(blocks, word) for word in fixed]
    first += [blocks, *(torch.full_like(blocks, word) for word in nonce)]
    x = list(first)
    for _ in range(10):
        for a, b, c, d in _QUARTERS:
            x[a] = (x[a] + x[b]) & _MASK
            x[d] = _rotated(x[d] ^ x[a], 16)
            x[c] = (x[c] + x[d]) & _MASK
            x[b] = _rotated(x[b] ^ x[c], 12)
            x[a] = (x[a] + x[b]) & _MASK
            x[d] = _rotated(x[d] ^ x[a], 8)
            x[c] = (x[c] + x[d]) & _MASK
            x[b] = _rotated(x[b] ^ x[c], 7)
    return _as_64_bit(torch.stack([(a + b) & _MASK for a, b in zip(x, first, strict=True)], 1))


def philox_key(key: bytes) -> int:
    """Return Philox's 64-bit key, a hash: Philox can be inverted and must not reveal `key`."""
    digest = hashlib.blake2b(key=key, digest_size=8, person=b"dpflash-philox").digest()
    return int.from_bytes(digest, "little")


def philox_words(key: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
    """Return the words [N, 4] of Philox-4x32-10 for a 64-bit key and four counter words [N].

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK, key >> 32
    for _ in range(10):
        # The product of two 32-bit words wraps to the same 64 bits in a signed integer.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((b >> 32) & _MASK) ^ c1 ^ k0, ((a >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = b & _MASK, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), 1)


def philox(key: bytes, *, step: int, parameter_id: int, blocks: Tensor) -> Tensor:
    """Return blocks of a Philox-4x32-10 stream.

    Args:
        key: 32 bytes, which `philox_key` hashes to the 64 bits that Philox takes.
        step: 64 bits, the counter's words 1 (low) and 2.
        parameter_id: 32 bits, the counter's word 3.
        blocks: [N], int64 in [0, 2^32): the counter's word 0.

    Returns:
        [N, 2], int64.
    """
    rest = (torch.full_like(blocks, x) for x in (step & _MASK, step >> 32, parameter_id))
    c1, c2, c3 = rest
    return _as_64_bit(philox_words(philox_key(key), (blocks, c1, c2, c3)))


def gaussian_noise_(
    out: Tensor,
    *,
    std: float,
    grid: float,
    key: bytes,
    step: int,
    parameter_id: int,
    offset: int = 0,
    generator: str = "chacha20",
) -> Tensor:
    """See `noise.gaussian_noise_`. Makes all words at once and calls `settle` for each."""
    words = {"chacha20": 8, "philox": 2}[generator]
    stream = {"chacha20": chacha20, "philox": philox}[generator]
    blocks = torch.arange(offset // words, -(-(offset + out.numel()) // words))
    bits = stream(key, step=step, parameter_id=parameter_id, blocks=blocks)
    skip = offset % words
    integers = [
        settle(word, std / grid, lambda number: _no_further_word(number))
        for word in bits.flatten()[skip : skip + out.numel()].tolist()
    ]
    noise = torch.tensor(integers, dtype=torch.float64).view(out.shape).to(out.device)
    return out.copy_(((out.double() / grid).round() + noise) * grid)


def _no_further_word(number: int) -> int:
    raise AssertionError(f"{number + 1} further words needed, as for one element in 2^29 / scale")
