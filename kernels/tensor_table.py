"""TensorTable: the addresses of several tensors, for one launch over all of them.

The first programs of a launch work on the first tensor, the next programs on the second tensor,
and so on. `owners` maps programs to tensors; `rows` has the address and sizes of each tensor.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .capture import kept_in_captures, sent
from .noise import NoiseStream

# ruff: noqa: N803
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

# Columns of a row: address that is read, address that is written, number of elements, first
# program, parameter's number in the noise's address, first element in the noise stream.
COLUMNS = tl.constexpr(6)

TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class TensorTable(NamedTuple):
    """The tensors of one launch.

    Attributes:
        rows: [P, COLUMNS], int64, on the device, for P tensors.
        owners: [programs], int32, on the device: the number of each program's tensor.
    """

    rows: Tensor
    owners: Tensor

    @property
    def programs(self) -> int:
        """The number of programs."""
        return self.owners.shape[0]  # len of a tensor is ten times slower


def tensor_table(
    read: Sequence[Tensor],
    written: Sequence[Tensor] | None = None,
    streams: Sequence[NoiseStream] | None = None,
    *,
    sizes: Sequence[int],
    block: int,
) -> TensorTable:
    """Make the table of contiguous tensors on one device, without synchronizing.

    Args:
        read, written: the tensors that are read and, if any, those that are written.
        streams: the noise of each tensor, if any.
        sizes: number of elements to visit in each tensor.
        block: elements per program. If noise begins within a group of 8 elements of its stream,
            the first program begins with this group.
    """
    device, rows, counts = read[0].device, [], []
    begin = 0
    for number, (tensor, size) in enumerate(zip(read, sizes, strict=True)):
        address = 0 if written is None else written[number].data_ptr()
        stream = None if streams is None else streams[number]
        parameter, first = (0, 0) if stream is None else (stream.parameter_id, stream.offset)
        rows.append((tensor.data_ptr(), address, size, begin, parameter, first))
        counts.append(-(-(size + first % 8) // block) if size else 0)
        begin += counts[-1]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, COLUMNS.value)
    return TensorTable(sent(table, device), _owners(tuple(counts), device))


@kept_in_captures
@functools.lru_cache(maxsize=32)
def _owners(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the number of each program's tensor, [programs], int32. Do not modify it."""
    numbers = torch.arange(len(counts), dtype=torch.int32, device="cpu")
    repeats = torch.tensor(counts, device="cpu")
    return numbers.repeat_interleave(repeats).to(device, non_blocking=True)


def alike(kinds: Sequence[Hashable]) -> list[list[int]]:
    """Group equal kinds, whose tensors may share a launch; return the indices of each group."""
    found: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        found.setdefault(kind, []).append(number)
    return list(found.values())


def has_vectors(*tensors: Tensor) -> bool:
    """Return whether kernels may load 16 bytes at a time from these contiguous tensors."""
    for x in tensors:  # a generator takes twice as long
        if x.data_ptr() % 16 or x.numel() % 16:
            return False
    return True


@triton.jit
def row_of(rows_ptr, owners_ptr, program):
    """Return (a program's tensor, the tensor's row, the program's number within the tensor)."""
    place = tl.load(owners_ptr + program).to(tl.int64)
    row = rows_ptr + COLUMNS * place
    return place, row, program.to(tl.int64) - tl.load(row + 3)


@triton.jit
def read_from(row, DTYPE: tl.constexpr, VECTORS: tl.constexpr):
    """Return the pointer to read from."""
    pointer = tl.load(row).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if VECTORS else pointer


@triton.jit
def written_to(row, DTYPE: tl.constexpr, VECTORS: tl.constexpr):
    """Return the pointer to write to."""
    pointer = tl.load(row + 1).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if VECTORS else pointer


@triton.jit
def size_of(row, VECTORS: tl.constexpr):
    """Return the tensor's number of elements."""
    size = tl.load(row + 2)
    return tl.multiple_of(size, 16) if VECTORS else size
