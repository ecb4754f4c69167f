"""Noise on the CPU by the C++ kernels of grads_cpu.cpp, which make ChaCha20's words themselves.

Its bits equal those of the reference implementation in `noise.py`. The kernels settle all words
but about one in 2^60 / scale, which Python settles. They need `native.library`.
"""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import native, rounded_normal

if TYPE_CHECKING:
    from .noise import NoiseStream

# Elements per thread.
_WORK_OF_A_THREAD = 1 << 17
_NUMBERS = {torch.float32: "float", torch.float64: "double"}


class _Open(ctypes.Structure):
    """The fields of grads_cpu.cpp's Open, in its order."""

    _fields_ = [
        ("index", ctypes.c_int64),
        ("word", ctypes.c_int64),
        ("steps", ctypes.c_double),
    ]


class _Noise(ctypes.Structure):
    """The fields of grads_cpu.cpp's Noise, in its order."""

    _fields_ = [
        ("key", ctypes.c_uint32 * 8),
        ("nonce", ctypes.c_uint32 * 3),
        ("offset", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("grid", ctypes.c_double),
        ("open", ctypes.POINTER(_Open)),
        ("open_count", ctypes.c_int64),
    ]


def serves(tensor: Tensor, stream: NoiseStream) -> bool:
    """Whether these kernels can make this stream's noise where the tensor is."""
    on_cpu = tensor.device.type == "cpu" and stream.generator == "chacha20"
    return on_cpu and native.library() is not None


def add_noise_(out: Tensor, stream: NoiseStream) -> Tensor:
    """See `noise.gaussian_noise_`."""
    return write_noised("noise_alone", stream, out)


def rounded_normals(words: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """See `rounded_normal.rounded_normals`, which leaves more undecided and needs no library."""
    if native.library() is None:
        return rounded_normal.rounded_normals(words, scale)
    words = words.contiguous()
    integers = torch.empty(words.shape, dtype=torch.float64, device="cpu")
    call("normals_of_words", integers.dtype, words, words.numel(), scale, integers)
    return integers, integers.isnan()


def write_noised(function: str, stream: NoiseStream, out: Tensor, *sums: Tensor | int) -> Tensor:
    """Calls a kernel that writes sums with the stream's noise.

    Args:
        function: the kernel's name, without its kind of numbers.
        stream: of ChaCha20, std above 0.
        out: contiguous, fp32 or fp64, on the CPU.
        sums: the kernel's arguments between the noise and the number of elements.
    """
    elements = out.numel()
    noise = _Noise(
        key=struct.unpack("<8I", stream.key),
        nonce=struct.unpack("<3I", struct.pack("<QI", stream.step, stream.parameter_id)),
        offset=stream.offset,
        threads=min(torch.get_num_threads(), 1 + elements // _WORK_OF_A_THREAD),
        scale=stream.scale,
        grid=stream.grid,
    )
    library = call(function, out.dtype, noise, *sums, elements, out)
    try:
        _settle(stream, out, noise.open[: noise.open_count])
    finally:
        library.forget(noise.open)
    return written(out)


def _settle(stream: NoiseStream, out: Tensor, left_open: list[_Open]) -> None:
    """Writes the elements that need further words. Until then they are NaN."""
    if not left_open:
        return
    totals = [
        (element.steps + stream.settled(element.index, element.word)) * stream.grid
        for element in left_open
    ]
    places = torch.tensor([element.index for element in left_open], device="cpu")
    values = torch.tensor(totals, dtype=torch.float64, device="cpu")
    out.view(-1)[places] = values.to(out.dtype)


def call(
    function: str, dtype: torch.dtype, *arguments: Tensor | ctypes.Structure | int | float
) -> ctypes.CDLL:
    """Calls a kernel for numbers of a dtype, fp32 or fp64, and returns its library.

    Raises:
        MemoryError: for working memory.
    """
    library = native.library()
    assert library is not None
    if getattr(library, f"{function}_{_NUMBERS[dtype]}")(*map(_argument, arguments)):
        raise MemoryError(f"{function} on the CPU: no memory for its threads")
    return library


def _argument(x: Tensor | ctypes.Structure | int | float) -> object:
    if isinstance(x, Tensor):
        return ctypes.c_void_p(x.data_ptr())
    if isinstance(x, ctypes.Structure):
        return ctypes.byref(x)
    return ctypes.c_double(x) if isinstance(x, float) else ctypes.c_int64(x)


def written(out: Tensor) -> Tensor:
    """Marks a tensor as changed in place, for autograd, and returns it."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    return out
