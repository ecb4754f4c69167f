"""Gaussian noise addressed by position: a pure function of (key, step, parameter, element).

Nothing is drawn twice, nothing depends on the order of calls or on how a parameter is cut, and a
replay needs the key and the address only.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from . import noise_reference
from .capture import refuse_capture

KEY_BYTES = 32
WORDS_PER_BLOCK = 8
# RFC 8439's block counter has 32 bits.
MAX_WORDS = (1 << 32) * WORDS_PER_BLOCK
# Both counters have 32 bits for the block, which holds 8 elements or 2.
_ELEMENTS = {"chacha20": MAX_WORDS, "philox": 1 << 33}
# What one thread turns into normals at a time: the scratch memory of it stays in its cache.
_CHUNK_WORDS = 1 << 17
_MAX_CHUNK_WORDS = 1 << 20
_ZEROS = bytes(1 << 19)
# The next so many words of a stream, valid until the scratch memory is used again.
_Words = Callable[[int, "_Scratch"], Tensor]


def _keystream(
    key: bytes, *, step: int, parameter_id: int, block: int
) -> Callable[[bytearray | memoryview], None]:
    """What fills one buffer after another with the ChaCha20 keystream, from a block on."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    nonce = struct.pack("<IQI", block, step, parameter_id)
    encryptor = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor()

    def fill(buffer: bytearray | memoryview) -> None:
        view = memoryview(buffer)
        for start in range(0, len(buffer), len(_ZEROS)):
            piece = view[start : start + len(_ZEROS)]
            encryptor.update_into(memoryview(_ZEROS)[: len(piece)], piece)

    return fill


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
    if block * WORDS_PER_BLOCK + count > MAX_WORDS:
        raise ValueError(f"count={count}: one address holds {MAX_WORDS} words; split the tensor")
    out = bytearray(8 * count)
    _keystream(key, step=first, parameter_id=second, block=block)(out)
    return out


def gaussian_noise_(
    out: Tensor,
    *,
    std: float,
    key: bytes,
    step: int,
    parameter_id: int,
    offset: int = 0,
    generator: Literal["chacha20", "philox"] = "chacha20",
) -> Tensor:
    """Add Gaussian noise of the stream (key, step, parameter_id) to a tensor in place.

    A CUDA or ROCm tensor is served by a Triton kernel that makes its words itself. On a CPU the
    words come from the `cryptography` package; other devices get noise that the CPU made. The
    words are the same bits everywhere. Of them the CPU makes normals by PyTorch's logarithm, sine
    and cosine and the kernel by polynomials: the normals of the two differ by at most 8 units in
    the last place, and on the same path never.

    Args:
        out: contiguous, fp32 or fp64, any device. To noise a narrower tensor, add the noise to its
            fp32 copy and round the sum once.
        std: standard deviation, finite and not negative, in the units of out; 0 leaves out as is.
        key: 32 bytes, for a release from `os.urandom`.
        step: number of the release, below 2^64.
        parameter_id: number of the parameter, below 2^32.
        offset: element of the stream that out's first element gets, so that a part of a parameter
            gets exactly the noise it has in the whole. A stream has 2^35 elements (Philox: 2^33).
        generator: "chacha20", or "philox": Philox-4x32-10 of a 64-bit hash of the key. Faster on
            GPUs (on CPUs slower), statistically sound, but not cryptographic: from some values
            all others can be computed. For speed tests, not for a release.

    Returns:
        out.

    Raises:
        ValueError: an argument is out of its range, or out of memory order, dtype or autograd's
            sight.
        RuntimeError: a CUDA stream is capturing: replays of its graph would repeat the noise.

    Guarantees:
        Elements are independent standard normals times std, as far as ChaCha20 is a random
        function and fp32 arithmetic allows; distinct (step, parameter_id, element) never share
        bits. The block counter (32 bits), step (64) and parameter_id (32) fill the counter and
        nonce of ChaCha20, and the counter of Philox, in this order, without overlap.
        Tail: a pair of elements shares the radius sqrt(-2 ln u) of a 64-bit word, whose top 53
        bits make u >= 2^-54. So the tail reaches 8.65 standard deviations; a mass of 5e-18 lies
        beyond. u is rounded to fp32, whose greatest value below 1 gives the radius 3.5e-4;
        a pair is 0 with probability 2^-25.

    Source: RFC 8439; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011); Box and
    Muller, A Note on the Generation of Random Normal Deviates (1958).
    """
    _check_out(out)
    _check_stream(std, key, step, parameter_id, offset, generator)
    _check_use(out.numel(), offset, generator)
    # Numbers of other libraries, for instance numpy's, would overflow.
    step, parameter_id, offset = int(step), int(parameter_id), int(offset)
    if std == 0 or out.numel() == 0:
        return out
    if out.is_cuda:
        _noise_triton().gaussian_noise_(
            out,
            std=std,
            key=key,
            step=step,
            parameter_id=parameter_id,
            offset=offset,
            generator=generator,
        )
        return out
    words = _WORDS[generator](key, step=step, parameter_id=parameter_id, group=offset // 8)
    _add_normals_(out.view(-1), float(std), words, skip=offset % 8)
    return out


@dataclass(frozen=True, kw_only=True)
class NoiseStream:
    """Noise for an operation to add to its result: std times a run of a stream's normals.

    Attributes:
        std: standard deviation, finite and not negative, in the units of the sum; 0 adds nothing.
        key: 32 bytes, for a release from `os.urandom`; not shown by `repr`.
        step: number of the release, below 2^64.
        parameter_id: number of the parameter, below 2^32.
        offset: element of the stream that the result's first element gets; the others follow in
            row-major order.
        generator: "chacha20", or "philox" for speed tests.

    Raises:
        ValueError: an attribute is out of its range.

    Guarantees:
        Those of `gaussian_noise_`, of which the added values are: whoever adds them, and in how
        many parts.
    """

    std: float
    key: bytes = field(repr=False)
    step: int
    parameter_id: int
    offset: int = 0
    generator: Literal["chacha20", "philox"] = "chacha20"

    def __post_init__(self) -> None:
        _check_stream(
            self.std, self.key, self.step, self.parameter_id, self.offset, self.generator
        )

    def check_length(self, elements: int) -> None:
        """ValueError where a result of so many elements leaves the stream.

        RuntimeError where a CUDA graph would capture the noise.
        """
        _check_use(elements, self.offset, self.generator)

    def add_to_(self, out: Tensor) -> Tensor:
        """`gaussian_noise_` with this address."""
        return gaussian_noise_(
            out,
            std=self.std,
            key=self.key,
            step=self.step,
            parameter_id=self.parameter_id,
            offset=self.offset,
            generator=self.generator,
        )


def _chacha20_words(key: bytes, *, step: int, parameter_id: int, group: int) -> _Words:
    fill = _keystream(key, step=step, parameter_id=parameter_id, block=group)

    def draw(count: int, scratch: _Scratch) -> Tensor:
        buffer = memoryview(scratch.bytes)[: 8 * count]
        fill(buffer)
        return torch.frombuffer(buffer, dtype=torch.int64)

    return draw


def _philox_words(key: bytes, *, step: int, parameter_id: int, group: int) -> _Words:
    block = group * 4

    def draw(count: int, scratch: _Scratch) -> Tensor:
        nonlocal block
        blocks = torch.arange(block, block + count // 2)
        block += count // 2
        stream = noise_reference.philox
        return stream(key, step=step, parameter_id=parameter_id, blocks=blocks).view(-1)

    return draw


_WORDS = {"chacha20": _chacha20_words, "philox": _philox_words}


def _add_normals_(flat: Tensor, std: float, draw: _Words, *, skip: int) -> None:
    """Adds the normals of the drawn words times std, without those of the first `skip` words."""
    total = skip + flat.numel()
    size = min(_CHUNK_WORDS * torch.get_num_threads(), _MAX_CHUNK_WORDS)
    scratch = _memory.take(min(size, total + total % 2) // 2)
    for start in range(0, total, size):
        count = min(size, total - start)
        words = draw(count + count % 2, scratch)
        normals = scratch.normals(words)[skip if start == 0 else 0 : count]
        done = max(start - skip, 0)
        flat[done : done + normals.numel()].add_(normals.to(flat.device), alpha=std)
    _memory.give_back(scratch)


class _Scratch:
    """`normals_from_bits`, the same operations in memory that is used again."""

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.bytes = bytearray(16 * pairs)
        self._integer = torch.empty(pairs, dtype=torch.int64, device="cpu")
        self._double = torch.empty(pairs, dtype=torch.float64, device="cpu")
        self._single = torch.empty(4, pairs, dtype=torch.float32, device="cpu")
        self._normals = torch.empty(pairs, dtype=torch.complex64, device="cpu")

    def normals(self, words: Tensor) -> Tensor:
        pairs = words.view(-1, 2)
        count = pairs.shape[0]
        integer, double = self._integer[:count], self._double[:count]
        radius, angle, x, y = self._single[:, :count]
        torch.bitwise_right_shift(pairs[:, 0], 11, out=integer)
        double.copy_(integer.bitwise_and_((1 << 53) - 1)).add_(0.5)
        # The factor is a power of two: before the rounding or after it, the result is the same.
        radius.copy_(double).mul_(2.0**-53).log_().mul_(-2).clamp_(min=0).sqrt_()
        angle.copy_(pairs[:, 1]).mul_(math.pi * 2.0**-63)
        torch.cos(angle, out=x).mul_(radius)
        torch.sin(angle, out=y).mul_(radius)
        # Many times as fast as to write every second element.
        normals = torch.complex(x, y, out=self._normals[:count])
        return torch.view_as_real(normals).view(-1)


class _Memory(threading.local):
    """A thread's memory for noise, kept: fresh pages cost as much as the normals in them.

    It is taken while in use, so that noise which a signal handler draws in between has its own.
    """

    free: _Scratch | None = None

    def take(self, pairs: int) -> _Scratch:
        found, self.free = self.free, None
        if found is None or found.pairs < pairs:
            with torch.inference_mode(False):
                return _Scratch(pairs)
        return found

    def give_back(self, scratch: _Scratch) -> None:
        self.free = scratch


_memory = _Memory()


def _noise_triton() -> ModuleType:
    try:
        from . import noise_triton
    except ImportError as error:
        raise ImportError(
            "noise on a GPU is made by a Triton kernel, and triton cannot be imported; install "
            "the triton that belongs to this build of torch, or move the tensor to the CPU"
        ) from error
    return noise_triton


def _check_out(out: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise ValueError(
            f"out: expected a Tensor, got {type(out).__name__}; pass torch.as_tensor(out), which "
            "the noise is added to in place"
        )
    if out.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"out.dtype={out.dtype}: expected float32 or float64; add the noise to out.float() "
            "and round the sum once"
        )
    if not out.is_contiguous():
        raise ValueError(
            f"out: not contiguous (shape {tuple(out.shape)}, stride {out.stride()}); add the "
            "noise to out.contiguous() and copy the sum back"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out.requires_grad=True: expected no gradient; use torch.no_grad()")


def _check_stream(
    std: float, key: bytes, step: int, parameter_id: int, offset: int, generator: str
) -> None:
    """Refuses what is no address of a stream; the key's bytes stay out of the message."""
    number = isinstance(std, Real) and not isinstance(std, bool)
    if not number or not 0 <= std < math.inf:
        remedy = "0 or a greater finite number" if number else "a plain float"
        raise ValueError(f"std={std!r}: expected a finite number >= 0; pass {remedy}")
    if not isinstance(key, bytes):
        raise ValueError(f"key: expected bytes, got {type(key).__name__}; pass bytes(key)")
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"key: expected {KEY_BYTES} bytes, got {len(key)}; take them from os.urandom"
        )
    for name, value, bits in (("step", step, 64), ("parameter_id", parameter_id, 32)):
        if not _is_integer(value) or not 0 <= value < 1 << bits:
            raise ValueError(
                f"{name}={value!r}: expected an integer in [0, 2^{bits}); count from 0"
            )
    if not isinstance(generator, str) or generator not in _ELEMENTS:
        raise ValueError(
            f"generator={generator!r}: expected one of {', '.join(_ELEMENTS)}; take chacha20 "
            "for a release"
        )
    if not _is_integer(offset) or offset < 0:
        raise ValueError(
            f"offset={offset!r}: expected an integer >= 0; pass the element at which out begins"
        )


def _check_use(elements: int, offset: int, generator: str) -> None:
    """What every way to draw noise passes before it does."""
    refuse_capture("each replay would add the same noise")
    if offset + elements > _ELEMENTS[generator]:
        raise ValueError(
            f"offset={offset!r}: with {elements} elements of out it leaves the stream's "
            f"{_ELEMENTS[generator]}; split the parameter over several parameter_ids"
        )


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
