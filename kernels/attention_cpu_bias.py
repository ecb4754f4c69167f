"""Pieces whose pairs differ in multiplicity, for `attention_cpu_plan`: one with a bias for each.

Where residue classes of rows or columns differ in what they see, as under a dilated pattern, they
interleave. Cut apart they are many strided pieces; together they are an interval of a lattice.

Letters: n points of an interval, h rows of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_cpu_batch import (
    LINE,
    Batch,
    Bias,
    Part,
    Pieces,
    Window,
    biased_batch,
    concatenated,
    members,
    numbered,
    occurrence,
)

# Tiles of rows of a cell: tall ones are faster, low ones leave fewer pairs that nothing sees.
_TALL, _LOW = 256, 128
_TALL_FROM = 2048
# Longer intervals are cut: a rectangle before the diagonal is faster than low tiles.
_LONGEST = 2048
# Rows that see alike are many from here on.
_MANY = 256
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
    parts = (
        (pairs.row - first) // step,
        (pairs.row_stride // step).clamp(min=1),
        pairs.rows,
        (begin - first) // step,
        (pairs.column_stride // step).clamp(min=1),
        until - before,
        lo,
        pairs.weight,
    )
    inside = (good[cell] & (until > before)).nonzero().flatten()
    batches: list[Batch] = []
    done = torch.zeros_like(good)
    variant = torch.zeros_like(size).index_copy_(0, cell, pairs.variant)
    for (points, alike), of_shape in _shapes(cell, parts, inside, found).items():
        tiles = _tiles(points, alike)
        if tiles:
            where = torch.tensor(of_shape)
            done[where] = True
            batches += _at(tiles, found.begin[where], found.step[where], variant[where])
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
    weight = torch.zeros_like(pieces.weight[: len(found.begin)])
    weight.index_copy_(0, found.of, pieces.weight)
    chosen = (found.full & ~_all(weight[found.of] == pieces.weight, found.of, found))[found.of]
    step, first = found.step[found.of], found.begin[found.of]
    zero, one = torch.zeros_like(first), torch.ones_like(first)
    parts = (
        *(zero, one, one, (pieces.column - first) // step),
        *((pieces.column_stride // step).clamp(min=1), pieces.columns),
        *(zero - found.size()[found.of], pieces.weight),
    )
    batches: list[Batch] = []
    index = chosen.nonzero().flatten()
    lead = torch.zeros_like(found.begin).index_copy_(0, found.of, torch.arange(len(tile)))
    for (size, alike), of_shape in _shapes(found.of, parts, index, found).items():
        bias = Bias(alike, Window(0, 1, 0, size), False)
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


_Parts = tuple[Part, ...]


def _shapes(
    of: Tensor, parts: Sequence[Tensor], some: Tensor, sets: _Intervals
) -> dict[tuple[int, _Parts], list[int]]:
    """The sets of each shape: their size n, and their parts in order."""
    by_set: dict[int, list[Part]] = {}
    for number, *part in zip(of[some].tolist(), *(x[some].tolist() for x in parts), strict=True):
        by_set.setdefault(number, []).append(Part(*part))
    sizes = sets.size().tolist()
    found: dict[tuple[int, _Parts], list[int]] = {}
    for number, alike in by_set.items():
        found.setdefault((sizes[number], tuple(sorted(alike))), []).append(number)
    return found


class _Tile(NamedTuple):
    """Rows, from an interval's first row on, and what they see; all in steps of the lattice."""

    row: int
    column: int
    columns: int
    bias: Bias
    bias_first: int


@functools.lru_cache(maxsize=1024)
def _tiles(size: int, parts: _Parts) -> tuple[_Tile, ...]:
    """Tiles of the rows of an interval; none if that is not worth it."""
    # One part is one operation.
    if size <= _LOW or len(parts) == 1:
        return ()
    banded = any(part.lo > -size for part in parts)
    height = _LOW if banded and size < _TALL_FROM else _TALL
    found = (_window(parts, row, min(height, size - row)) for row in range(0, size, height))
    windows = [window for window in found if window is not None]
    seen = 0
    for part in parts:
        rows = part.row + part.row_stride * torch.arange(part.rows)
        steps = (rows - part.lo - part.column).div(part.column_stride, rounding_mode="floor") + 1
        seen += int(steps.clamp(0, part.columns).sum())
    area = sum(window.rows * window.columns for window in windows)
    return tuple(_shared(windows, parts)) if area <= _WASTE * seen else ()


def _window(parts: _Parts, row: int, rows: int) -> Window | None:
    """Some rows with the columns that they see."""
    begin, end = [], []
    for part in parts:
        own, _ = Window(row, rows, 0, 0).of(part)
        count = part.seen_by(row + own.stop - 1) if own.stop > own.start else 0
        if count:
            begin.append(part.column)
            end.append(part.column + part.column_stride * (count - 1) + 1)
    return Window(row, rows, min(begin), max(end) - min(begin)) if begin else None


def _shared(windows: Sequence[Window], parts: _Parts) -> Iterator[_Tile]:
    """Tiles that see what the last columns of the widest see share its bias."""
    widest = max(windows, key=lambda window: window.columns)
    alike = [_alike(window, widest, parts) for window in windows]
    blind = any(_blind(x, parts) for x, same in zip(windows, alike, strict=True) if same)
    common = Bias(parts, widest, blind)
    for window, same in zip(windows, alike, strict=True):
        if same:
            bias, first = common, widest.columns - window.columns
        else:
            bias, first = Bias(parts, window, _blind(window, parts)), 0
        yield _Tile(window.row, window.column, window.columns, bias, first)


def _alike(window: Window, wider: Window, parts: _Parts) -> bool:
    """Whether the rows see what those of the wider window see of its last columns."""
    first = wider.column + wider.columns - window.columns
    last = wider._replace(column=first, columns=window.columns)
    return window.rows == wider.rows and _seen_in(window, parts) == _seen_in(last, parts)


def _seen_in(window: Window, parts: _Parts) -> set[tuple[Part, bool]]:
    """The parts as seen from a window's first row and column, and whether all of it is seen."""
    found = set()
    for part in parts:
        rows, _ = window.of(part)
        last = part._replace(columns=part.seen_by(window.row + rows.stop - 1))
        _, columns = window.of(last)
        if rows.stop > rows.start and columns.stop > columns.start:
            lo = part.lo - (window.row - window.column)
            all_seen = rows.start - (columns.stop - 1) >= lo
            lines = (rows.start, rows.step, rows.stop, columns.start, columns.step, columns.stop)
            found.add((Part(*lines, 0 if all_seen else lo, part.weight), all_seen))
    return found


def _blind(window: Window, parts: _Parts) -> bool:
    """Whether some row sees nothing."""
    sees = torch.zeros(window.rows, dtype=torch.bool)
    for part in parts:
        _, columns = window.of(part)
        if columns.stop > columns.start:
            nearest = part.lo + window.column + columns.start
            before = max(-((part.row - nearest) // part.row_stride), 0)
            row = part.row + before * part.row_stride
            rows, _ = window.of(part._replace(row=row, rows=max(part.rows - before, 0)))
            sees[rows] = True
    return not bool(sees.all())


def _at(tiles: Sequence[_Tile], begin: Tensor, step: Tensor, variant: Tensor) -> Iterator[Batch]:
    """The tiles at each of the places where their interval is."""
    for some in members(numbered(step)[0]):
        stride = int(step[some[0]])
        for tile in tiles:
            yield biased_batch(
                *(tile.bias, tile.bias_first, tile.bias.window.rows, stride),
                *(begin[some] + stride * tile.row, tile.columns, stride),
                *(begin[some] + stride * tile.column, variant[some]),
            )
