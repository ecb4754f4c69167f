"""Compares the rows of two tensors by short summaries.

On a deterministic device rows are compared bit for bit, by digests. On other devices they are
compared up to rounding, by their norms and some random projections.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

_WORDS = 4096  # words in a chunk, and multipliers in a table
_LEVELS = 4  # each level sums, in chunks, the chunk sums of the previous level
_AT_ONCE = {"cpu": 1 << 16}  # words that fit into a cache
_PROJECTIONS = 4
_PROJECTED = 1 << 18  # entries of a row that are projected at once

_tables: dict[torch.device, Tensor] = {}


def row_digests(x: Tensor) -> Tensor:
    """Return keyed digests `[B]`, int64, of the bits of the rows of x `[B, ...]`.

    A row's 32-bit words are multiplied by secret random 64-bit numbers and added modulo 2^64. Any
    two different rows of one shape and dtype have the same digest with probability below 2^-30.
    -0.0 and 0.0 have different digests. Up to 2^23 zero words at the end of a row do not change
    its digest. Digests of one process are comparable on all its devices; digests of different
    processes are not comparable.
    """
    if not x.numel():
        return torch.zeros(len(x), dtype=torch.int64, device=x.device)
    words, table = as_words(x.detach()), _table(x.device)
    sums = _chunk_sums(words, table[0])
    for level in range(1, _LEVELS):
        if level > 1 and sums.shape[1] == 1:
            break
        sums = _chunk_sums(sums.view(torch.int32), table[level])
    assert sums.shape[1] == 1
    return sums[:, 0]


def is_deterministic(device: torch.device) -> bool:
    """Return whether a repeated computation gives the same bits on this device."""
    if device.type == "cuda":
        return torch.are_deterministic_algorithms_enabled()
    return device.type == "cpu"


def row_summaries(x: Tensor, *, rounds: bool = False) -> Tensor:
    """Return summaries of the rows of x `[B, ...]`, to be compared by `differing`.

    On a deterministic device the summaries are digests `[B, 1]`, int64. On other devices, or if a
    repeated computation may round differently (`rounds`), they are fp64: each row's norm, and the
    row's projections on vectors of random signs.
    """
    if is_deterministic(x.device) and not rounds:
        return row_digests(x).unsqueeze(1)
    rows = x.detach().reshape(len(x), x.shape[1:].numel())
    generator = torch.Generator().manual_seed(int(_table(torch.device("cpu"))[0, 0]))
    width = min(rows.shape[1], _PROJECTED)
    signs = _signs(width, generator).to(x.device)
    sums = torch.zeros(len(x), 1 + _PROJECTIONS, dtype=torch.float64, device=x.device)
    # Signs for a whole row may not fit into memory: parts share them, times a random sign.
    for part in rows.split(_PROJECTED, 1) if width else ():
        wide = part.double()
        sums[:, 0] += wide.square().sum(1)
        sums[:, 1:] += (wide @ signs[: part.shape[1]]) * _signs(1, generator).to(x.device)
    sums[:, 0].sqrt_()
    return sums


def greatest(x: Tensor) -> Tensor:
    """Return the greatest absolute value of each row of x: `[B]`; NaN if the row has a NaN."""
    rows = x.detach().reshape(len(x), x.shape[1:].numel())
    if not rows.numel():
        return rows.abs().sum(1)
    # Faster on CPUs than a norm. Take few rows at a time, since abs() makes a copy.
    parts = rows.split(max(1, _AT_ONCE.get(x.device.type, 1 << 22) // rows.shape[1]))
    return torch.cat([part.abs().amax(1) for part in parts])


def differing(one: Tensor, two: Tensor, tolerance: float) -> Tensor:
    """Return which rows have different summaries: `[B]`, bool.

    Args:
        one, two: results of `row_summaries`; if shapes or dtypes differ, all rows differ.
        tolerance: allowed difference relative to a row's norm; not used for digests.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return torch.ones(len(two), dtype=torch.bool, device=two.device)
    if one.dtype == torch.int64:
        return (one != two).any(1)
    norms = torch.maximum(one[:, 0], two[:, 0])
    # The caller handles rows that are not finite.
    return ~((one - two).abs().amax(1) <= tolerance * norms)


def tolerance(dtypes: set[torch.dtype]) -> float:
    """Return the relative difference that counts as rounding: sqrt(eps) of the coarsest dtype."""
    floats = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    return math.sqrt(max(floats, default=0.0))


def _signs(count: int, generator: torch.Generator) -> Tensor:
    """Return random numbers 1 and -1, `[count, projections]`."""
    bits = torch.randint(0, 2, (count, _PROJECTIONS), generator=generator)
    return 2.0 * bits.double() - 1.0


def as_words(x: Tensor) -> Tensor:
    """Return the bits of x as integers `[B, n]`: int32 if rows have a multiple of 32 bits."""
    if x.layout != torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    rows = x.reshape(len(x), x.shape[1:].numel()).resolve_neg().contiguous()
    size = rows.shape[1] * rows.element_size()
    word = next(w for w in (torch.int32, torch.int16, torch.uint8) if size % w.itemsize == 0)
    if rows.storage_offset() * rows.element_size() % word.itemsize:
        rows = rows.clone()
    return rows.view(word)


def _chunk_sums(words: Tensor, multipliers: Tensor) -> Tensor:
    """Multiply each word of `[B, n]` by its multiplier; return each chunk's sum `[B, chunks]`."""
    whole = words.shape[1] // _WORDS
    parts = []
    if whole:
        chunks = words[:, : whole * _WORDS].unflatten(1, (whole, _WORDS))
        parts.append(_in_slabs(chunks, multipliers))
    if whole * _WORDS < words.shape[1]:
        rest = words[:, whole * _WORDS :].unsqueeze(1)
        parts.append(_in_slabs(rest, multipliers[: rest.shape[2]]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _in_slabs(chunks: Tensor, multipliers: Tensor) -> Tensor:
    """Sum chunks, some at a time, to limit the memory of the products."""
    batch, count, width = chunks.shape
    most = _AT_ONCE.get(chunks.device.type, 1 << 22) // width
    if batch * count <= most:
        return (chunks * multipliers).sum(2)
    sums = torch.empty((batch, count), dtype=torch.int64, device=chunks.device)
    rows = max(1, most // count)
    columns = count if rows > 1 else max(1, most)
    for i in range(0, batch, rows):
        for j in range(0, count, columns):
            slab = chunks[i : i + rows, j : j + columns]
            sums[i : i + rows, j : j + columns] = (slab * multipliers).sum(2)
    return sums


def _table(device: torch.device) -> Tensor:
    """Return secret multipliers `[levels, words]`, int64, equal on all devices of the process."""
    if device not in _tables:
        cpu = torch.device("cpu")
        if cpu not in _tables:
            drawn = bytearray(os.urandom(8 * _LEVELS * _WORDS))
            _tables[cpu] = torch.frombuffer(drawn, dtype=torch.int64).view(_LEVELS, _WORDS)
        _tables[device] = _tables[cpu].to(device)
    return _tables[device]
