"""Pieces whose pairs differ in multiplicity, for `attention_cpu_plan`: one with a bias for each.

Where residue classes of rows or columns differ in what they see, as under a dilated pattern, they
interleave. Cut apart they are many strided pieces; together they are an interval of a lattice.

Letters: n points of an interval, h rows of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_cpu_batch import (
    LINE,
    Batch,
    Bias,
    Pieces,
    biased_batch,
    codes,
    concatenated,
    members,
    numbered,
    occurrence,
)

# Tiles of rows of a cell: tall ones are faster, low ones leave fewer pairs that nothing sees.
_TALL, _LOW = 256, 128
_TALL_FROM = 2048
# A single causal run is one operation, whose own tiles waste little of a long interval.
_ALONE_FROM, _ALONE_TO = 1024, 4096
# Longer intervals are cut: a rectangle before the diagonal is faster than low tiles.
_LONGEST = 2048
# Rows that see alike are many from here on.
_MANY = 256
# Codes of weights are uint8, and 0 is none.
_WEIGHTS = 255
# Most pairs of a cell's tiles for each pair that is seen.
_WASTE = 1.6
# Components of more parts than this are left as they are.
_PARTS = 64


class _Intervals(NamedTuple):
    """Sets of progressions that touch each other's extent; one entry for each set."""

    of: Tensor  # the set of each progression
    begin: Tensor
    last: Tensor
    step: Tensor  # all points lie on a lattice of this step
    full: Tensor  # the progressions are the lattice from begin to last
    parts: Tensor  # how many progressions

    def size(self) -> Tensor:
        """Points of the lattice."""
        return (self.last - self.begin) // self.step + 1


def cut_cells(pairs: Pieces) -> tuple[list[Batch], Pieces]:
    """Cells, where interleaving rows see up to the diagonal of their own interval, and the rest.

    Args:
        pairs: groups with runs, of which each row is in one group; none of them is empty.
    """
    if not len(pairs.row):
        return [], pairs
    pairs = _split_long(pairs)
    found, cell = _rows_together(pairs)
    step, first, last = found.step[cell], found.begin[cell], found.last[cell]
    size = found.size()
    before, until = _count_to(pairs, first - 1), _count_to(pairs, last)
    begin = pairs.column + before * pairs.column_stride
    on_lattice = ((begin - first) % step == 0) & (
        (pairs.column_stride % step == 0) | (until - before == 1)
    )
    nearest, farthest = pairs.distances()
    # Rows that see alike and all of the interval are as good by themselves, if they are many.
    banded = ~_all(nearest >= pairs.lo, cell, found)
    good = found.full & (size <= _LONGEST) & (banded | (size < _MANY * found.parts))
    good &= _all((on_lattice & (farthest <= pairs.hi)) | (until == before), cell, found)
    # That a bound does not cut a cell makes it equal to other cells.
    lo = (-(-pairs.lo).div(step, rounding_mode="floor")).maximum(-size[cell])
    parts = torch.stack(
        (
            *((pairs.row - first) // step, (pairs.row_stride // step).clamp(min=1), pairs.rows),
            *((begin - first) // step, (pairs.column_stride // step).clamp(min=1)),
            *(until - before, lo, codes(pairs.weight)),
        ),
        1,
    )
    weights = pairs.weight.unique()
    inside = (good[cell] & (until > before)).nonzero().flatten()
    batches: list[Batch] = []
    done = torch.zeros_like(good)
    variant = torch.zeros_like(size).index_copy_(0, cell, pairs.variant)
    for (points, alike), of_shape in _shapes(cell[inside], parts[inside], found).items():
        shape = _Cell.of(points, alike, weights)
        if shape is not None:
            where = torch.tensor(of_shape)
            done[where] = True
            batches += shape.batches(found.begin[where], found.step[where], variant[where])
    left = pairs._replace(columns=before)
    right = pairs._replace(
        column=pairs.column + until * pairs.column_stride, columns=pairs.columns - until
    )
    rest = [part.pick(done[cell] & (part.columns > 0)) for part in (left, right)]
    return batches, concatenated(pairs.pick(~done[cell]), *rest)


def _rows_together(pairs: Pieces) -> tuple[_Intervals, Tensor]:
    """Groups whose rows interleave, and which of these sets each pair belongs to."""
    tile, of_tile = numbered(pairs.variant, pairs.row, pairs.row_stride, pairs.rows)
    tiles = pairs.pick(of_tile)
    found = _intervals(tiles.variant, tiles.row, tiles.row_stride, tiles.rows)
    return found, found.of[tile]


def _split_long(pairs: Pieces) -> Pieces:
    """Rows of long intervals in several parts, so that each sees all of what lies before it."""
    found, cell = _rows_together(pairs)
    size = found.size()
    counts = torch.where(found.full & (found.parts > 1), -(-size // _LONGEST), 1)
    height = -(-size // counts) * found.step
    repeats = counts[cell]
    turn = torch.arange(int(repeats.sum()))
    turn -= (repeats.cumsum(0) - repeats).repeat_interleave(repeats)
    cell = cell.repeat_interleave(repeats)
    parts = pairs.pick(torch.arange(len(repeats)).repeat_interleave(repeats))
    begin = found.begin[cell] + turn * height[cell]
    before, until = (
        (-(parts.row - border).div(parts.row_stride, rounding_mode="floor"))
        .clamp(min=0)
        .minimum(parts.rows)
        for border in (begin, begin + height[cell])
    )
    row = parts.row + before * parts.row_stride
    return parts._replace(row=row, rows=until - before).pick(until > before)


def cut_mixed(pieces: Pieces) -> tuple[list[Batch], Pieces]:
    """Columns of different weight that together are an interval, which all rows of a group see.

    Args:
        pieces: all rows see all columns; two have the same rows or none in common.
    """
    if not len(pieces.row):
        return [], pieces
    tile, _ = numbered(pieces.variant, pieces.row, pieces.row_stride, pieces.rows)
    found = _intervals(tile, pieces.column, pieces.column_stride, pieces.columns)
    weight, weights = codes(pieces.weight), pieces.weight.unique()
    order = torch.zeros_like(found.begin).index_copy_(0, found.of, weight)
    good = found.full & ~_all(order[found.of] == weight, found.of, found)
    if len(weights) > _WEIGHTS:
        return [], pieces
    chosen = good[found.of]
    step, first = found.step[found.of], found.begin[found.of]
    stride = (pieces.column_stride // step).clamp(min=1)
    parts = torch.stack(((pieces.column - first) // step, stride, pieces.columns, weight), 1)
    index = chosen.nonzero().flatten()
    batches = []
    lead = torch.zeros_like(found.begin).index_copy_(0, found.of, torch.arange(len(tile)))
    for (size, alike), of_shape in _shapes(found.of[index], parts[index], found).items():
        row = torch.zeros(1, size, dtype=torch.uint8)
        for start, every, count, which in alike:
            row[0, start : start + every * count : every] = which + 1
        bias = _bias(row, weights, size)
        where = torch.tensor(of_shape)
        rows, begin, steps = pieces.pick(lead[where]), found.begin[where], found.step[where]
        turn = occurrence(tile[lead[where]])
        for some in members(numbered(rows.rows, rows.row_stride, steps, turn)[0]):
            own = rows.pick(some)
            batches.append(
                biased_batch(
                    *(bias, 0, int(own.rows[0]), int(own.row_stride[0]), own.row),
                    *(size, int(steps[some[0]]), begin[some], own.variant),
                )
            )
    return batches, pieces.pick(~chosen)


def _intervals(line: Tensor, begin: Tensor, stride: Tensor, count: Tensor) -> _Intervals:
    """Progressions on lines, those together whose extents overlap."""
    last = begin + stride * (count - 1)
    order = torch.argsort(line * LINE + begin, stable=True)
    reach = (line * LINE + last)[order].cummax(0).values
    starts = torch.ones_like(order, dtype=torch.bool)
    starts[1:] = (line * LINE + begin)[order][1:] > reach[:-1]
    of = torch.empty_like(order).scatter_(0, order, starts.long().cumsum(0) - 1)
    sets = int(starts.sum())
    low = torch.full((sets,), LINE).scatter_reduce_(0, of, begin, "amin")
    high = torch.zeros(sets, dtype=torch.long).scatter_reduce_(0, of, last, "amax")
    points = torch.zeros(sets, dtype=torch.long).index_add_(0, of, count)
    turn, parts = occurrence(of), torch.bincount(of)
    step = torch.zeros_like(low)
    for i in range(min(int(parts.max()), _PARTS)):
        now = turn == i
        own = stride[now].where(count[now] > 1, 0).gcd(begin[now] - low[of[now]])
        step[of[now]] = step[of[now]].gcd(own)
    step = step.clamp(min=1)
    full = (points == (high - low) // step + 1) & (parts <= _PARTS)
    return _Intervals(of, low, high, step, full, parts)


def _all(holds: Tensor, of: Tensor, sets: _Intervals) -> Tensor:
    """Whether something holds for all members of each set."""
    fails = torch.zeros(len(sets.begin), dtype=torch.long).index_add_(0, of, (~holds).long())
    return fails == 0


def _count_to(pairs: Pieces, position: Tensor) -> Tensor:
    """How many of the columns lie at or before a position."""
    steps = (position - pairs.column).div(pairs.column_stride, rounding_mode="floor")
    return (steps + 1).clamp(min=0).minimum(pairs.columns)


_Parts = tuple[tuple[int, ...], ...]


def _shapes(of: Tensor, parts: Tensor, sets: _Intervals) -> dict[tuple[int, _Parts], list[int]]:
    """The sets of each shape: their size n, and their parts in order."""
    order = torch.argsort(of, stable=True)
    by_set: dict[int, list[tuple[int, ...]]] = {}
    for number, part in zip(of[order].tolist(), parts[order].tolist(), strict=True):
        by_set.setdefault(number, []).append(tuple(part))
    sizes = sets.size().tolist()
    found: dict[tuple[int, _Parts], list[int]] = {}
    for number, alike in by_set.items():
        found.setdefault((sizes[number], tuple(sorted(alike))), []).append(number)
    return found


def _bias(which: Tensor, weights: Tensor, columns: int) -> Bias:
    """Of each pair's place in the weights, from 1 on; 0 is what is not seen.

    Its last `columns`, or more, are used.
    """
    values = torch.cat((torch.full((1,), -math.inf, dtype=weights.dtype), weights))
    blind = not which[:, which.shape[1] - columns :].any(1).all()
    return Bias(which, values, bool(blind))


class _Tile(NamedTuple):
    """Rows, from the interval's first row on, and what they see; all in steps of the lattice."""

    row: int
    column: int
    columns: int
    bias: Bias
    bias_first: int


class _Cell(NamedTuple):
    """What the rows of an interval see of it, tile by tile."""

    tiles: list[_Tile]

    @classmethod
    def of(cls, size: int, parts: Sequence[Sequence[int]], weights: Tensor) -> _Cell | None:
        """The cell of some parts; None if it is not worth it."""
        banded = any(lo > -size for *_, lo, _ in parts)
        height = _LOW if banded and size < _TALL_FROM else _TALL
        if size <= _LOW or len(weights) > _WEIGHTS:
            return None
        if len(parts) == 1 and not _ALONE_FROM <= size < _ALONE_TO:
            return None
        seen = area = 0
        tiles: list[tuple[int, int, Tensor]] = []
        for row in range(0, size, height):
            which = torch.zeros(min(height, size - row), size, dtype=torch.uint8)
            for part in parts:
                _mark(which, row, part)
            columns = which.any(0).nonzero().flatten().tolist()
            if columns:
                which = which[:, columns[0] : columns[-1] + 1]
                tiles.append((row, columns[0], which))
                seen, area = seen + int(which.count_nonzero()), area + which.numel()
        if area > _WASTE * seen:
            return None
        return cls(list(_shared(tiles, weights)))

    def batches(self, begin: Tensor, step: Tensor, variant: Tensor) -> Iterator[Batch]:
        """The tiles at each of the places where the cell is."""
        for tile in self.tiles:
            for some in members(numbered(step)[0]):
                stride = int(step[some[0]])
                yield biased_batch(
                    *(tile.bias, tile.bias_first, tile.bias.codes.shape[0], stride),
                    *(begin[some] + stride * tile.row, tile.columns, stride),
                    *(begin[some] + stride * tile.column, variant[some]),
                )


def _mark(which: Tensor, row: int, part: Sequence[int]) -> None:
    """Sets what the rows from `row` on see through one part."""
    start, stride, rows, column, column_stride, columns, lo, weight = part
    first = max(-((start - row) // stride), 0)
    end = min(-((start - row - len(which)) // stride), rows)
    if first >= end:
        return
    i = start + stride * torch.arange(first, end).unsqueeze(1)
    j = column + column_stride * torch.arange(columns)
    begin = start + stride * first - row
    some = which[
        begin : begin + stride * (end - first - 1) + 1 : stride,
        column : column + column_stride * (columns - 1) + 1 : column_stride,
    ]
    some[i - j >= lo] = weight + 1


def _shared(tiles: Sequence[tuple[int, int, Tensor]], weights: Tensor) -> Iterator[_Tile]:
    """Tiles that see what the last columns of the widest see share its bias."""
    _, _, widest = max(tiles, key=lambda tile: tile[2].shape[1])
    alike = [
        torch.equal(which, widest[:, widest.shape[1] - which.shape[1] :]) for _, _, which in tiles
    ]
    least = min(which.shape[1] for (_, _, which), same in zip(tiles, alike, strict=True) if same)
    common = _bias(widest, weights, least)
    for (row, column, which), same in zip(tiles, alike, strict=True):
        columns = which.shape[1]
        if same:
            yield _Tile(row, column, columns, common, widest.shape[1] - columns)
        else:
            yield _Tile(row, column, columns, _bias(which, weights, columns), 0)
