"""Noise on the CPU by the C++ kernels of grads_cpu.cpp, which compute ChaCha20's words themselves.

The bits equal those of the slower path in `noise.py`. The kernels decide all elements except
about one in 2^60 / scale, which Python decides. They need `native.library`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import native, rounded_normal

if TYPE_CHECKING:
    from .noise import NoiseStream

# Elements per thread.
_WORK_OF_A_THREAD = 1 << 17
_NUMBERS = {torch.float32: "float", torch.float64: "double"}


class Part(ctypes.Structure):
    """One parameter of a call, as struct Part in grads_cpu.cpp, with the same order of fields."""

    _fields_ = [
        ("grads", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("elements", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("id", ctypes.c_int64),
    ]


class _Open(ctypes.Structure):
    """The fields of grads_cpu.cpp's Open, in its order."""

    _fields_ = [
        ("part", ctypes.c_int64),
        ("index", ctypes.c_int64),
        ("word", ctypes.c_int64),
        ("steps", ctypes.c_double),
    ]


class _Noise(ctypes.Structure):
    """The fields of grads_cpu.cpp's Noise, in its order."""

    _fields_ = [
        ("key", ctypes.c_uint32 * 8),
        ("nonce", ctypes.c_uint32 * 3),
        ("scale", ctypes.c_double),
        ("grid", ctypes.c_double),
        ("open", ctypes.POINTER(_Open)),
        ("open_count", ctypes.c_int64),
    ]


_Argument = Tensor | ctypes.Structure | ctypes.Array[Part] | int | float


def serves(tensor: Tensor, stream: NoiseStream) -> bool:
    """Return whether these kernels can add this stream's noise to the tensor."""
    on_cpu = tensor.device.type == "cpu" and stream.generator == "chacha20"
    return on_cpu and native.library() is not None


def add_noise_(outs: Sequence[Tensor], streams: Sequence[NoiseStream]) -> None:
    """See `noise.add_noise_`. All tensors have one dtype, all streams belong to one release."""
    parts = [Part(None, 0, *noised_part(*each)) for each in zip(outs, streams, strict=True)]
    write_noised("noise_alone", streams, outs, parts)


def noised_part(out: Tensor, stream: NoiseStream) -> tuple[int, int, int, int, int]:
    """Return the last fields of a `Part`, from `elements` on."""
    elements = out.numel()
    threads = min(torch.get_num_threads(), 1 + elements // _WORK_OF_A_THREAD)
    return elements, out.data_ptr(), threads, stream.offset, stream.parameter_id


def rounded_normals(words: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `rounded_normal.rounded_normals`; the library leaves fewer elements undecided."""
    if native.library() is None:
        return rounded_normal.rounded_normals(words, scale)
    words = words.contiguous()
    integers = torch.empty(words.shape, dtype=torch.float64, device="cpu")
    call("normals_of_words", integers.dtype, words, words.numel(), scale, integers)
    return integers, integers.isnan()


def write_noised(
    function: str,
    streams: Sequence[NoiseStream],
    outs: Sequence[Tensor],
    parts: Sequence[Part],
    *rest: Tensor | int,
) -> None:
    """Call a kernel that writes sums with noise; decide the elements that it leaves undecided.

    Args:
        function: the kernel's name, without the suffix for its dtype.
        streams: ChaCha20 streams of one release, std above 0.
        outs: contiguous, fp32 or fp64, on the CPU; one tensor for each stream.
        parts: one for each tensor.
        rest: the kernel's arguments after the parts.
    """
    first = streams[0]
    noise = _Noise(
        key=struct.unpack("<8I", first.key),
        nonce=struct.unpack("<3I", struct.pack("<QI", first.step, 0)),
        scale=first.scale,
        grid=first.grid,
    )
    library = call(function, outs[0].dtype, noise, *table(parts), *rest)
    try:
        _settle(streams, outs, noise.open[: noise.open_count])
    finally:
        library.forget(noise.open)
    for out in outs:
        written(out)


def table(parts: Sequence[Part]) -> tuple[ctypes.Array[Part], int]:
    """Return the parts as an argument of a kernel, and their number."""
    return (Part * len(parts))(*parts), len(parts)


def _settle(
    streams: Sequence[NoiseStream], outs: Sequence[Tensor], left_open: list[_Open]
) -> None:
    """Write the elements that need further words. Until then they are NaN."""
    for element in left_open:
        stream = streams[element.part]
        steps = element.steps + stream.settled(element.index, element.word)
        outs[element.part].view(-1)[element.index] = steps * stream.grid


def call(function: str, dtype: torch.dtype, *arguments: _Argument) -> ctypes.CDLL:
    """Call the kernel for a dtype, fp32 or fp64, and return its library.

    Raises:
        MemoryError: there is no memory for the kernel's threads.
    """
    library = native.library()
    assert library is not None
    if getattr(library, f"{function}_{_NUMBERS[dtype]}")(*map(_argument, arguments)):
        raise MemoryError(f"{function} on the CPU: no memory for its threads")
    return library


def _argument(x: _Argument) -> object:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Array):
        return x
    if isinstance(x, ctypes.Structure):
        return ctypes.byref(x)
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x)


def written(out: Tensor) -> Tensor:
    """Mark a tensor as changed in place, for autograd, and return it."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
