"""Cuts a tile graph into dense, causal and masked pieces of equal shape, for `attention_cpu`."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tile_graph import Side, TileGraph, real_cpu_tensors

FULL, CAUSAL, MASKED = range(3)

_TILE_ROWS = 256
# A tile's partial columns: at most about this many, so that masks stay small.
_TILE_COLUMNS = 4096
# Tiles are joined up to about so many rows, where they share columns in runs of at least so many.
_JOINED_ROWS = 1024
_JOINED_COLUMNS = 128
# Progressions of different lengths are cut to one length, unless that were shorter than this.
_SHORTEST = 16
_PLANS_KEPT = 64
_LOCK = threading.Lock()
# Longer than any line of columns.
_LINE = 2**31


@dataclass(frozen=True, eq=False)
class Batch:
    """n pieces of one shape; no row of a variant is in two of them.

    A piece has L rows and sees k progressions of C columns each. Rows and columns count from the
    piece's first ones.

    Attributes:
        kind: FULL (all see all), CAUSAL (row i sees columns up to i) or MASKED (by the band).
        rows: L.
        row_stride: stride of the rows.
        columns: C.
        column_stride: stride of the columns.
        first: first row - first column.
        band: lo and hi of row - column.
        row_start: `[n]`, int64: the pieces' first rows.
        column_start: `[n, k]`, int64: first columns.
        log_multiplicity: `[n]`, float64.
        run: `[n, k]`, int64, row of `Side.runs`; means nothing in joined plans.
        variant: `[n]`, int64.
        row_unit, column_unit: rows (columns) may be taken in aligned blocks of so many.
        progressions: most progressions of columns in a piece, touching ones as one.
    """

    kind: int
    rows: int
    row_stride: int
    columns: int
    column_stride: int
    first: int
    band: tuple[int, int]
    row_start: Tensor
    column_start: Tensor
    log_multiplicity: Tensor
    run: Tensor
    variant: Tensor
    row_unit: int
    column_unit: int
    progressions: int

    def seen(self, begin: int = 0, end: int | None = None) -> Tensor:
        """`[end - begin, C]`, bool: which columns each row from `begin` to `end` sees."""
        rows = torch.arange(begin, self.rows if end is None else end).unsqueeze(1)
        columns = torch.arange(self.columns)
        if self.kind != MASKED:
            return (columns <= rows) | (self.kind == FULL)
        distance = self.first + self.row_stride * rows - self.column_stride * columns
        return (distance >= self.band[0]) & (distance <= self.band[1])


class _Pieces(NamedTuple):
    """Pieces before they are batched, one per entry; all int64 but `weight`."""

    variant: Tensor
    run: Tensor
    row: Tensor
    row_stride: Tensor
    rows: Tensor
    column: Tensor
    column_stride: Tensor
    columns: Tensor
    lo: Tensor
    hi: Tensor
    weight: Tensor  # log multiplicity

    def pick(self, index: Tensor) -> _Pieces:
        return _Pieces(*(values[index] for values in self))


def plan(
    graph: TileGraph, clip: tuple[int, int] | None = None, joined: bool = True
) -> list[Batch]:
    """The graph's pieces, as `make_plan` gives them; kept in its plans."""
    kept: dict[Any, list[Batch]] = graph.plans.setdefault("cpu", {})
    key = (clip, joined)
    found = kept.get(key)
    if found is None:
        with real_cpu_tensors():
            found = make_plan(graph.rows, clip, joined)
        with _LOCK:
            while len(kept) >= _PLANS_KEPT:
                kept.pop(next(iter(kept)))
            kept[key] = found
    return found


def make_plan(side: Side, clip: tuple[int, int] | None = None, joined: bool = True) -> list[Batch]:
    """The pieces of a side. Each pair (row, column) of the side is in exactly one of them.

    Args:
        side: groups and their runs.
        clip: keys are clipped to ``clip[0]`` up to ``clip[1] - 1``.
        joined: a piece may span several groups and runs.
    """
    pairs = _pairs(side, clip)
    row_last = pairs.row + pairs.row_stride * (pairs.rows - 1)
    column_last = pairs.column + pairs.column_stride * (pairs.columns - 1)
    nearest, farthest = pairs.row - column_last, row_last - pairs.column
    some = (farthest >= pairs.lo) & (nearest <= pairs.hi)
    full = some & (nearest >= pairs.lo) & (farthest <= pairs.hi)
    one_sided = (farthest <= pairs.hi) & (pairs.row_stride == pairs.column_stride)
    causal = some & ~full & one_sided
    before, diagonal = _cut_causal(pairs.pick(causal))
    whole, partial = _cut_tiles(pairs.pick(some & ~full & ~one_sided))
    dense = _concatenated(pairs.pick(full), before, whole)
    if joined and len(dense.row):
        dense = _cut_alike(_join(dense))
    return _batch_full(dense) + _batch_banded(CAUSAL, diagonal) + _batch_banded(MASKED, partial)


def _concatenated(*parts: _Pieces) -> _Pieces:
    return _Pieces(*(torch.cat(values) for values in zip(*parts, strict=True)))


def _pairs(side: Side, clip: tuple[int, int] | None) -> _Pieces:
    """Each group with each of its runs, without empty ones."""
    groups, runs = side.groups.long().cpu(), side.runs.long().cpu()
    counts = (groups[:, 4] - groups[:, 3]).clamp(min=0)
    group = torch.arange(len(groups)).repeat_interleave(counts)
    run = torch.arange(len(group)) - (counts.cumsum(0) - counts - groups[:, 3])[group]
    variant = torch.bucketize(group, side.variants.long().cpu()[1:], right=True)
    row, row_stride, rows = groups[group, :3].unbind(1)
    column, stride, columns, lo, hi = runs[run].unbind(1)
    if clip is not None:
        safe = stride.clamp(min=1)
        first = (-(column - clip[0]).div(safe, rounding_mode="floor")).clamp(min=0)
        end = -(column - clip[1]).div(safe, rounding_mode="floor")
        column = column + first * stride
        columns = (columns.minimum(end) - first).clamp(min=0)
    # The stride of a single token is free: equal strides make more pieces alike.
    row_stride = torch.where(rows == 1, torch.where(columns == 1, 1, stride), row_stride)
    stride = torch.where(columns == 1, row_stride, stride)
    weight = side.log_multiplicity.detach().double().cpu()[run]
    pieces = _Pieces(variant, run, row, row_stride, rows, column, stride, columns, lo, hi, weight)
    return pieces.pick((rows > 0) & (columns > 0) & (weight > -torch.inf))


def _cut_causal(pairs: _Pieces) -> tuple[_Pieces, _Pieces]:
    """Row i sees columns j <= i + d: full columns, then a causal piece with d = 0."""
    stride = pairs.row_stride
    ahead = (pairs.row - pairs.column - pairs.lo).div(stride, rounding_mode="floor")
    blind = (-ahead).clamp(min=0)
    ahead = ahead.clamp(min=0)
    row, rows = pairs.row + blind * stride, pairs.rows - blind
    before = pairs._replace(columns=ahead.minimum(pairs.columns)).pick(ahead > 0)
    diagonal = pairs._replace(
        row=row,
        rows=rows,
        column=pairs.column + ahead * stride,
        columns=(pairs.columns - ahead).minimum(rows),
    )
    return before, diagonal


def _cut_tiles(pairs: _Pieces) -> tuple[_Pieces, _Pieces]:
    """Tiles of rows, each with the range of columns that all rows see, and with the others."""
    band_rows = (pairs.hi - pairs.lo) // pairs.row_stride
    few = _TILE_COLUMNS * pairs.column_stride // pairs.row_stride
    most = band_rows.clamp(_TILE_ROWS // 4, _TILE_ROWS).minimum(few).clamp(min=1)
    tile = 2 ** most.double().log2().floor().long()
    counts = -(-pairs.rows // tile)
    index = torch.arange(int(counts.sum()))
    index = index - (counts.cumsum(0) - counts).repeat_interleave(counts)
    tiles = pairs.pick(torch.arange(len(counts)).repeat_interleave(counts))
    begin = index * tile.repeat_interleave(counts)
    tiles = tiles._replace(
        row=tiles.row + begin * tiles.row_stride,
        rows=(tiles.rows - begin).minimum(tile.repeat_interleave(counts)),
    )
    last = tiles.row + tiles.row_stride * (tiles.rows - 1)
    some_begin = _columns_before(tiles, tiles.row - tiles.hi - 1)
    some_end = _columns_before(tiles, last - tiles.lo)
    all_begin = _columns_before(tiles, last - tiles.hi - 1)
    all_end = _columns_before(tiles, tiles.row - tiles.lo)
    # A short full range costs less as part of one masked piece than as a piece of its own.
    alone = all_end - all_begin >= 2 * _TILE_ROWS
    all_end = torch.where(alone, all_end, some_begin)
    all_begin = torch.where(alone, all_begin, some_begin)
    full = _columns_between(tiles, all_begin, all_end)
    left = _columns_between(tiles, some_begin, all_begin)
    right = _columns_between(tiles, all_end, some_end)
    return full, _concatenated(left, right)


def _columns_before(pieces: _Pieces, position: Tensor) -> Tensor:
    """How many of a piece's columns lie at or before a position."""
    steps = (position - pieces.column).div(pieces.column_stride, rounding_mode="floor")
    return (steps + 1).clamp(min=0).minimum(pieces.columns)


def _columns_between(pieces: _Pieces, begin: Tensor, end: Tensor) -> _Pieces:
    column = pieces.column + begin * pieces.column_stride
    return pieces._replace(column=column, columns=end - begin).pick(end > begin)


class _Spans(NamedTuple):
    """Intervals on lines, disjoint on each line."""

    line: Tensor
    begin: Tensor
    end: Tensor

    def pick(self, index: Tensor) -> _Spans:
        return _Spans(*(values[index] for values in self))


def _covered(parts: list[tuple[_Spans, int]], least: int) -> _Spans:
    """The longest spans whose points have weights, the numbers beside the spans, of `least`."""
    places = [x.line * _LINE + place for x, _ in parts for place in (x.begin, x.end)]
    weights = [torch.full_like(x.line, w * sign) for x, w in parts for sign in (1, -1)]
    place, index = torch.unique(torch.cat(places), return_inverse=True)
    change = torch.zeros_like(place).index_add_(0, index, torch.cat(weights))
    inside = change.cumsum(0) >= least
    before = torch.cat((inside.new_zeros(1), inside[:-1]))
    begin, end = place[inside & ~before], place[before & ~inside]
    return _Spans(begin // _LINE, begin % _LINE, end % _LINE)


def _join(pieces: _Pieces) -> _Pieces:
    """Full pieces, joined where columns touch and where neighbouring rows see the same columns.

    Neighbouring tiles of rows are paired. Columns that both see go to the pair, if they are many
    of what the two see; the others stay. Pairs are paired again.
    """
    stride = pieces.column_stride
    kind, of_kind = _numbered(stride, pieces.column % stride, _codes(pieces.weight))
    residue = pieces.row % pieces.row_stride
    tile, of_tile = _numbered(pieces.variant, pieces.row_stride, residue, pieces.row, pieces.rows)
    begin = pieces.column // stride
    tiles, kinds = pieces.pick(of_tile), len(of_kind)
    found = _Spans(tile * kinds + kind, begin, begin + pieces.columns)
    spans = _covered([(found, 1)], 1)
    done = []
    while len(spans.line):
        first = _pairs_of(tiles)
        pair = torch.full_like(tiles.row, -1)
        pair[first] = pair[first + 1] = torch.arange(len(first))
        owner, of = pair[spans.line // kinds], spans.line % kinds
        both = spans._replace(line=owner * kinds + of).pick(owner >= 0)
        shared = _covered([(both, 1)], 2)
        shared = shared.pick(shared.end - shared.begin >= _JOINED_COLUMNS)
        common, total = (
            torch.zeros_like(first).index_add_(0, x.line // kinds, x.end - x.begin)
            for x in (shared, both)
        )
        joins = 4 * common >= total
        shared = shared.pick(joins[shared.line // kinds])
        owner, of = shared.line // kinds, shared.line % kinds
        taken = [shared._replace(line=(first[owner] + i) * kinds + of) for i in (0, 1)]
        rest = _covered([(spans, 1), (taken[0], -1), (taken[1], -1)], 1)
        done.append(_pieces_of(rest, tiles, pieces.pick(of_kind)))
        rows = tiles.rows[first] + tiles.rows[first + 1]
        tiles, spans = tiles.pick(first)._replace(rows=rows), shared
    return _concatenated(*done)


def _pairs_of(tiles: _Pieces) -> Tensor:
    """The first tile of each pair of neighbours; tiles come in the order of their rows."""
    end = tiles.row + tiles.rows * tiles.row_stride
    near = (tiles.variant[1:] == tiles.variant[:-1]) & (tiles.row[1:] == end[:-1])
    near &= tiles.row_stride[1:] == tiles.row_stride[:-1]
    near &= tiles.rows[1:] + tiles.rows[:-1] <= _JOINED_ROWS
    index = torch.arange(len(end))
    starts = torch.cat((near.new_ones(1), ~near))
    chain = index.where(starts, 0).cummax(0).values
    return index[:-1][near & ((index - chain)[:-1] % 2 == 0)]


def _pieces_of(spans: _Spans, tiles: _Pieces, kinds: _Pieces) -> _Pieces:
    """The spans on line t * len(kinds) + x as pieces of tile t, columns as those of kind x."""
    count = len(kinds.row)
    rows, columns = tiles.pick(spans.line // count), kinds.pick(spans.line % count)
    stride = columns.column_stride
    return rows._replace(
        column=spans.begin * stride + columns.column % stride,
        column_stride=stride,
        columns=spans.end - spans.begin,
        weight=columns.weight,
    )


def _cut_alike(pieces: _Pieces) -> _Pieces:
    """Cuts pieces of the same rows into equal numbers of columns, so that they can be batched."""
    tile, first = _numbered(
        *(pieces.variant, pieces.row, pieces.row_stride, pieces.rows),
        *(pieces.column_stride, _codes(pieces.weight)),
    )
    divisors = [0] * len(first)
    for of, columns in zip(tile.tolist(), pieces.columns.tolist(), strict=True):
        divisors[of] = math.gcd(divisors[of], columns)
    common = torch.tensor(divisors)[tile]
    unit = torch.where(common >= _SHORTEST, common, pieces.columns)
    parts = pieces.columns // unit
    index = torch.arange(int(parts.sum())) - (parts.cumsum(0) - parts).repeat_interleave(parts)
    cut = pieces._replace(columns=unit).pick(torch.arange(len(parts)).repeat_interleave(parts))
    return cut._replace(column=cut.column + index * cut.columns * cut.column_stride)


def _batch_full(pieces: _Pieces) -> list[Batch]:
    """Full pieces alike in all but their columns are joined into one with k progressions."""
    tile, _ = _numbered(pieces.variant, pieces.row, pieces.row_stride, pieces.rows)
    shape = (pieces.column_stride, pieces.columns)
    joined, _ = _numbered(tile, *shape, _codes(pieces.weight))
    order = torch.argsort(joined, stable=True)
    k = torch.bincount(joined)
    first = order[k.cumsum(0) - k]
    # Joined pieces of one tile that differ in their weight only go into different batches.
    turn = _occurrence(_numbered(tile[first], *(x[first] for x in shape), k)[0])
    rows, stride, row = (x[first] for x in (pieces.rows, pieces.row_stride, pieces.row))
    alike, _ = _numbered(rows, stride, *(x[first] for x in shape), k, turn)
    line = _numbered(alike, pieces.variant[first], row % stride)[0] * _LINE + row
    line, order_of = torch.sort(line)
    if (line.diff() < (rows * stride)[order_of[:-1]]).any():
        # Perhaps two share rows: those that start at equal phases do not.
        alike, _ = _numbered(alike, row.div(stride, rounding_mode="floor") % rows)
    batches = []
    for members in _members(alike):
        count = int(k[members[0]])
        begin = (k.cumsum(0) - k)[members]
        entries = order[begin.unsqueeze(1) + torch.arange(count)]
        batches.append(_make_batch(FULL, pieces, entries))
    return batches


def _batch_banded(kind: int, pieces: _Pieces) -> list[Batch]:
    """Pieces with the same rows and columns, seen from their first row."""
    shape = [pieces.rows, pieces.row_stride, pieces.columns, pieces.column_stride]
    # Also where kind is CAUSAL: runs of other residues must not share a batch with a run.
    shape.append(pieces.row - pieces.column)
    if kind == MASKED:
        shape += [pieces.lo, pieces.hi]
    members = _members(_numbered(*shape)[0])
    return [_make_batch(kind, pieces, entries.unsqueeze(1)) for entries in members]


def _make_batch(kind: int, pieces: _Pieces, entries: Tensor) -> Batch:
    """The batch of the pieces `entries`, `[n, k]`."""
    lead = entries[:, 0]
    one = pieces.pick(lead[0])
    rows, columns = int(one.rows), int(one.columns)
    row_stride, column_stride = int(one.row_stride), int(one.column_stride)
    row_start, column_start = pieces.row[lead], pieces.column[entries]
    gaps = (column_start.diff(dim=1) != columns * column_stride).sum(1)
    return Batch(
        *(kind, rows, row_stride, columns, column_stride),
        int(one.row - one.column),
        (int(one.lo), int(one.hi)),
        row_start=row_start,
        column_start=column_start,
        log_multiplicity=pieces.weight[lead],
        run=pieces.run[entries],
        variant=pieces.variant[lead],
        row_unit=_unit(rows, row_stride, row_start),
        column_unit=_unit(columns, column_stride, column_start),
        progressions=int(gaps.max()) + 1,
    )


def _unit(length: int, stride: int, start: Tensor) -> int:
    """The largest number that divides the progressions' length and where they start."""
    return math.gcd(length, *start.flatten().tolist()) if stride == 1 else 1


def _codes(values: Tensor) -> Tensor:
    """Numbers 0, 1, ... for distinct values."""
    return torch.unique(values, return_inverse=True)[1]


def _numbered(*columns: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers 0, 1, ... for the distinct rows of a table, in their order; one row of each."""
    ids, count = torch.zeros_like(columns[0]), 1
    for column in columns:
        values, inverse = torch.unique(column, return_inverse=True)
        ids = ids * len(values) + inverse
        count *= len(values)
        if count > 2**31:
            kept, ids = torch.unique(ids, return_inverse=True)
            count = len(kept)
    values, ids = torch.unique(ids, return_inverse=True)
    one = torch.empty_like(values).scatter_(0, ids, torch.arange(len(ids)))
    return ids, one


def _occurrence(ids: Tensor) -> Tensor:
    """How many earlier entries have an entry's id."""
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids)
    begin = (counts.cumsum(0) - counts)[ids[order]]
    return torch.empty_like(ids).scatter_(0, order, torch.arange(len(ids)) - begin)


def _members(ids: Tensor) -> list[Tensor]:
    """The entries of each id."""
    order = torch.argsort(ids, stable=True)
    return list(order.split(torch.bincount(ids).tolist())) if len(ids) else []
