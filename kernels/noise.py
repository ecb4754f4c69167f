"""Gaussian noise addressed by position: a pure function of (key, step, parameter, element).

No noise is used twice. Noise does not depend on the order of calls or on how a parameter is
divided: the key and the address suffice to compute it again. Noise is a multiple of a public grid,
rounded exactly, and is added to a sum on that grid before the result is rounded.
A *release* is the noisy sum of one step over all parameters.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from . import noise_cpu, noise_reference
from .capture import refuse_capture
from .grid import check_grid
from .rounded_normal import EXACT_INTEGERS, settle

if TYPE_CHECKING:
    from .noise_triton import OpenList

KEY_BYTES = 32
WORDS_PER_BLOCK = 8
# RFC 8439's block counter has 32 bits.
MAX_WORDS = (1 << 32) * WORDS_PER_BLOCK
# Elements of a stream: 2^32 blocks of 8 elements (ChaCha20) or 2 elements (Philox).
_ELEMENTS = {"chacha20": MAX_WORDS, "philox": 1 << 33}
# Bits of the numbers in a stream's address.
_BITS = {"step": 64, "parameter_id": 32, "offset": 64}
# Words made at a time: their scratch memory fits into a cache.
_CHUNK_WORDS = 1 << 17
_ZEROS = bytes(1 << 19)
# A function that returns the next n words of a stream.
_Words = Callable[[int], Tensor]
# Above this scale noise of ten standard deviations might not be exact in fp64.
MAX_SCALE = EXACT_INTEGERS / 2**8


def _keystream(
    key: bytes, *, step: int, parameter_id: int, block: int
) -> Callable[[bytearray | memoryview], None]:
    """Return a function that fills buffers, one after another, with the ChaCha20 keystream."""
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
    """Return words of the ChaCha20 keystream at an address.

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
    grid: float,
    key: bytes,
    step: int,
    parameter_id: int,
    offset: int = 0,
    generator: Literal["chacha20", "philox"] = "chacha20",
) -> Tensor:
    """Add Gaussian noise of the stream (key, step, parameter_id) to a tensor in place.

    The result is grid * (round(out / grid) + Z), rounded once to out's dtype, with Z = round(N)
    for a Gaussian N of standard deviation std / grid. If out is on the grid already, this is the
    Gaussian mechanism on out, rounded to the grid; this rounding is post-processing.

    A CUDA or ROCm tensor is noised by a Triton kernel, and a tensor on the CPU by a C++ kernel;
    both compute the random words themselves. Without a C++ compiler the words come from the
    `cryptography` package. Tensors on other devices get noise that the CPU made. Z is the
    correctly rounded value of a function of the words, so its bits are the same everywhere.

    Args:
        out: contiguous, fp32 or fp64, any device. To noise a narrower tensor, add the noise to its
            fp32 copy and round the sum once.
        std: standard deviation, finite and not negative, in the units of out; 0 adds no noise.
        grid: a power of two, in the units of out; public, see `grid_of`. std / grid is below 2^45.
        key: 32 bytes; for a release take them from `os.urandom`.
        step: number of the release, below 2^64.
        parameter_id: number of the parameter, below 2^32.
        offset: index of the stream's element that is added to out's first element, so that a part
            of a parameter gets the same noise as in the whole parameter. A stream has 2^35
            elements (Philox: 2^33).
        generator: "chacha20", or "philox", which is Philox-4x32-10 of a 64-bit hash of the key.
            Philox is faster on GPUs, slower on CPUs and statistically sound, but not
            cryptographic: from some values all others can be computed. Use it for speed tests,
            not for a release.

    Returns:
        out.

    Raises:
        ValueError: an argument is out of its range, or out is not contiguous, has another dtype
            or requires a gradient.
        RuntimeError: a CUDA stream is capturing: replays of its graph would repeat the noise.

    Guarantees:
        If ChaCha20 is a random function, elements are independent, and each is distributed
        exactly as a rounded Gaussian, see `rounded_normal`. Distinct (step, parameter_id,
        element) never share bits. The block counter (32 bits), step (64) and parameter_id (32)
        fill the counter and nonce of ChaCha20, and the counter of Philox, in this order, without
        overlap. Further words, if the first do not decide a rounding, come from a separate hash.

    Source: RFC 8439; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (2011); Mironov,
    On Significance of the Least Significant Bits for Differential Privacy (2012).
    """
    stream = NoiseStream(
        std=std,
        grid=grid,
        key=key,
        step=step,
        parameter_id=parameter_id,
        offset=offset,
        generator=generator,
    )
    return stream.add_to_(out)


@dataclass(frozen=True, kw_only=True)
class NoiseStream:
    """The address of noise that an operation adds to its result: consecutive rounded Gaussians.

    Attributes:
        std: standard deviation, finite and not negative, in the units of the sum; 0 adds nothing.
        grid: a power of two of which the noise is a multiple, in the units of the sum; public.
        key: 32 bytes, for a release from `os.urandom`; not shown by `repr`.
        step: number of the release, below 2^64.
        parameter_id: number of the parameter, below 2^32.
        offset: index of the stream's element that is added to the result's first element; the
            other elements follow in row-major order.
        generator: "chacha20", or "philox" for speed tests.
        unsettled: list of elements whose rounding fp64 does not decide. GPU kernels write NaN and
            append them; `settle_noise` later decides many at once. With None each kernel's
            elements are decided immediately, which waits for the GPU.

    Raises:
        ValueError: an attribute is out of its range.

    Guarantees:
        The added values are those of `gaussian_noise_`, with its guarantees, for any operation
        that adds them and any division into parts.
    """

    std: float
    grid: float
    key: bytes = field(repr=False)
    step: int
    parameter_id: int
    offset: int = 0
    generator: Literal["chacha20", "philox"] = "chacha20"
    unsettled: list[OpenList] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the address; no message has the key's bytes."""
        std, grid, key = self.std, self.grid, self.key
        number = type(std) is float or (isinstance(std, Real) and not isinstance(std, bool))
        if not number or not 0 <= std < math.inf:
            remedy = "0 or a greater finite number" if number else "a plain float"
            raise ValueError(f"std={std!r}: expected a finite number >= 0; pass {remedy}")
        check_grid(grid)
        if std / grid >= MAX_SCALE:
            raise ValueError(
                f"std={std!r} with grid={grid!r}: expected std / grid below 2^45, so that noise "
                "is exact in float64; pass a greater grid"
            )
        if not isinstance(key, bytes):
            raise ValueError(f"key: expected bytes, got {type(key).__name__}; pass bytes(key)")
        if len(key) != KEY_BYTES:
            raise ValueError(
                f"key: expected {KEY_BYTES} bytes, got {len(key)}; take them from os.urandom"
            )
        for name, bits in _BITS.items():
            _check_count(name, getattr(self, name), bits)
        if not isinstance(self.generator, str) or self.generator not in _ELEMENTS:
            raise ValueError(
                f"generator={self.generator!r}: expected one of {', '.join(_ELEMENTS)}; take "
                "chacha20 for a release"
            )
        # Numbers of other libraries, such as numpy's, would overflow.
        kinds = {"std": float, "grid": float, "step": int, "parameter_id": int, "offset": int}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if type(value) is not kind:
                object.__setattr__(self, name, kind(value))

    def at(self, parameter_id: int, offset: int = 0) -> NoiseStream:
        """Return the stream of another parameter, or part of a parameter, in the same release."""
        for name, value in (("parameter_id", parameter_id), ("offset", offset)):
            _check_count(name, value, _BITS[name])
        other = object.__new__(NoiseStream)  # the other attributes are checked already
        other.__dict__.update(self.__dict__, parameter_id=int(parameter_id), offset=int(offset))
        return other

    @property
    def release(self) -> tuple[object, ...]:
        """The attributes that all streams of a release have in common; secret."""
        return self.key, self.step, self.std, self.grid, self.generator

    @property
    def scale(self) -> float:
        """The standard deviation in units of the grid."""
        return self.std / self.grid

    def check_length(self, elements: int) -> None:
        """Raise if the stream is shorter than `elements` or a CUDA graph would capture noise."""
        refuse_capture("each replay would add the same noise")
        if self.offset + elements > _ELEMENTS[self.generator]:
            raise ValueError(
                f"offset={self.offset!r}: {elements} elements of out end beyond the stream's "
                f"{_ELEMENTS[self.generator]}; split the parameter over several parameter_ids"
            )

    def add_to_(self, out: Tensor) -> Tensor:
        """Call `gaussian_noise_` with this address."""
        return add_noise_([out], [self])[0]

    def add_slowly_(self, out: Tensor) -> None:
        """Add the noise to a tensor, with words of the `cryptography` package."""
        flat = out.view(-1)
        for start, integers in self.integers(out.numel()):
            part = flat[start : start + integers.numel()]
            total = (part.cpu().double() / self.grid).round_().add_(integers).mul_(self.grid)
            part.copy_(total)

    def integers(self, count: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first `count` values, in units of the grid, as (start index, fp64 values)."""
        skip = self.offset % WORDS_PER_BLOCK
        draw = _WORDS[self.generator](
            self.key,
            step=self.step,
            parameter_id=self.parameter_id,
            group=self.offset // WORDS_PER_BLOCK,
        )
        for start in range(0, skip + count, _CHUNK_WORDS):
            # The number of words is even: Philox makes pairs.
            size = min(_CHUNK_WORDS, skip + count - start)
            words = draw(size + size % 2)[skip if start == 0 else 0 : size]
            begin = max(0, start - skip)
            integers, undecided = noise_cpu.rounded_normals(words, self.scale)
            for place in undecided.nonzero().flatten().tolist():
                integers[place] = self.settled(begin + place, int(words[place]))
            yield begin, integers

    def settled(self, index: int, word: int) -> int:
        """Return the exact value at an index, from further words if the first is not enough."""
        return settle(word, self.scale, lambda number: self._further_word(index, number))

    def _further_word(self, index: int, number: int) -> int:
        address = (self.step, self.parameter_id, self.offset + index, number)
        digest = hashlib.blake2b(
            struct.pack("<QIQQ", *address), key=self.key, digest_size=8, person=b"further words"
        )
        return int.from_bytes(digest.digest(), "little")


def _chacha20_words(key: bytes, *, step: int, parameter_id: int, group: int) -> _Words:
    fill = _keystream(key, step=step, parameter_id=parameter_id, block=group)

    def draw(count: int) -> Tensor:
        buffer = bytearray(8 * count)
        fill(buffer)
        return torch.frombuffer(buffer, dtype=torch.int64)

    return draw


def _philox_words(key: bytes, *, step: int, parameter_id: int, group: int) -> _Words:
    block = group * 4

    def draw(count: int) -> Tensor:
        nonlocal block
        blocks = torch.arange(block, block + count // 2)
        block += count // 2
        stream = noise_reference.philox
        return stream(key, step=step, parameter_id=parameter_id, blocks=blocks).view(-1)

    return draw


_WORDS = {"chacha20": _chacha20_words, "philox": _philox_words}


def add_noise_(outs: Sequence[Tensor], streams: Sequence[NoiseStream]) -> Sequence[Tensor]:
    """Add the noise of a stream to each of several tensors in place, see `gaussian_noise_`.

    Args:
        outs: contiguous, fp32 or fp64, any device; no two share memory.
        streams: one stream for each tensor.

    Returns:
        outs.

    Raises:
        ValueError: as `gaussian_noise_`.
        RuntimeError: as `gaussian_noise_`.
    """
    on_cpu: dict[object, list[tuple[Tensor, NoiseStream]]] = {}
    on_gpu: dict[torch.device, list[tuple[Tensor, NoiseStream]]] = {}
    for out, stream in zip(outs, streams, strict=True):
        _check_out(out)
        stream.check_length(out.numel())
    for out, stream in zip(outs, streams, strict=True):
        if stream.std == 0 or out.numel() == 0:
            continue
        if out.is_cuda:
            on_gpu.setdefault(out.device, []).append((out, stream))
        elif noise_cpu.serves(out, stream):
            on_cpu.setdefault((out.dtype, stream.release), []).append((out, stream))
        else:
            stream.add_slowly_(out)
    for of_device in on_gpu.values():
        _noise_triton().add_noise_(*zip(*of_device, strict=True))
    for of_call in on_cpu.values():
        noise_cpu.add_noise_(*zip(*of_call, strict=True))
    return outs


def settle_noise(unsettled: Sequence[OpenList]) -> bool:
    """Decide the elements in `NoiseStream.unsettled`. Waits for the GPU once.

    Returns:
        Whether there were such elements.

    Raises:
        RuntimeError: there are more such elements than a correct GPU leaves; they stay NaN.
    """
    return bool(unsettled) and _noise_triton().settle(unsettled)


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


def _check_count(name: str, value: int, bits: int) -> None:
    if not _is_integer(value) or not 0 <= value < 1 << bits:
        raise ValueError(f"{name}={value!r}: expected an integer in [0, 2^{bits}); count from 0")


def _is_integer(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
