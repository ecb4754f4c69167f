"""Joins pieces in which all rows see all columns, for `attention_cpu_plan`."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_cpu_batch import LINE, Pieces, codes, concatenated, numbered, of_one_tile

# Tiles are joined up to about so many rows, where they share columns in runs of at least so many.
_JOINED_ROWS = 1024
_JOINED_COLUMNS = 128
# Tiles of at least so many rows take back columns that two of them share, if each has others.
_TILE_ROWS = 128
# Most scores of a diagonal and the columns before it in one piece, which takes a mask.
_STEPPED = 2**19
# Progressions of different lengths are cut to one length, unless that were shorter than this.
_SHORTEST = 16


class _Spans(NamedTuple):
    """Intervals on lines, disjoint on each line."""

    line: Tensor
    begin: Tensor
    end: Tensor

    def pick(self, index: Tensor) -> _Spans:
        return _Spans(*(values[index] for values in self))


def _covered(parts: list[tuple[_Spans, int]], least: int) -> _Spans:
    """The longest spans whose points have weights, the numbers beside the spans, of `least`."""
    places = [x.line * LINE + place for x, _ in parts for place in (x.begin, x.end)]
    weights = [torch.full_like(x.line, w * sign) for x, w in parts for sign in (1, -1)]
    place, index = torch.unique(torch.cat(places), return_inverse=True)
    change = torch.zeros_like(place).index_add_(0, index, torch.cat(weights))
    inside = change.cumsum(0) >= least
    before = torch.cat((inside.new_zeros(1), inside[:-1]))
    begin, end = place[inside & ~before], place[before & ~inside]
    return _Spans(begin // LINE, begin % LINE, end % LINE)


def join(pieces: Pieces, diagonal: Pieces) -> Pieces:
    """Full pieces, joined where columns touch and where neighbouring rows see the same columns.

    Neighbouring tiles of rows are paired. Columns that both see go to the pair, if they are many
    of what the two see; the others stay. Pairs are paired again. A pair's columns that do not go
    on go back to its tiles, if each has others: on the diagonal, or that it did not share.
    """
    stride = pieces.column_stride
    kind, of_kind = numbered(stride, pieces.column % stride, codes(pieces.weight))
    residue = pieces.row % pieces.row_stride
    tile, of_tile = numbered(pieces.variant, pieces.row_stride, residue, pieces.row, pieces.rows)
    begin = pieces.column // stride
    tiles, kinds = pieces.pick(of_tile), len(of_kind)
    found = _Spans(tile * kinds + kind, begin, begin + pieces.columns)
    spans = _covered([(found, 1)], 1)
    own = _having(tiles, diagonal)
    below: _Level | None = None
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
        if below is not None:
            back = below.takes_back(tiles)[rest.line // kinds]
            given = rest.pick(back)
            for i in (0, 1):
                line = (below.first[given.line // kinds] + i) * kinds + given.line % kinds
                half = given._replace(line=line)
                done.append(_pieces_of(half, below.tiles, pieces.pick(of_kind)))
            rest = rest.pick(~back)
        done.append(_pieces_of(rest, tiles, pieces.pick(of_kind)))
        below = _Level(tiles, first, own.index_fill(0, rest.line // kinds, True))
        rows = tiles.rows[first] + tiles.rows[first + 1]
        tiles, spans = tiles.pick(first)._replace(rows=rows), shared
        own = torch.zeros_like(tiles.row, dtype=torch.bool)
    return concatenated(*done)


class _Level(NamedTuple):
    """Tiles, the first of each pair of them, and whether they have pieces of their own."""

    tiles: Pieces
    first: Tensor
    own: Tensor

    def takes_back(self, pairs: Pieces) -> Tensor:
        """For each pair whether its columns go back to its two tiles."""
        one, other = self.first, self.first + 1
        least = self.tiles.rows[one].minimum(self.tiles.rows[other])
        fits = (least >= _TILE_ROWS) & (pairs.rows <= 4 * _TILE_ROWS)
        return fits & self.own[one] & self.own[other]


def _having(tiles: Pieces, diagonal: Pieces) -> Tensor:
    """Whether a diagonal has a tile's rows."""
    both = concatenated(tiles, diagonal)
    same, _ = numbered(both.variant, both.row, both.row_stride, both.rows)
    return torch.isin(same[: len(tiles.row)], same[len(tiles.row) :])


class Stepped(NamedTuple):
    """Diagonals with the columns before them, and what is left."""

    full: Pieces  # as wide as high
    diagonal: Pieces
    other_full: Pieces
    other_diagonal: Pieces


def step(full: Pieces, diagonal: Pieces) -> Stepped:
    """Takes together diagonals and full pieces of their rows that can be cut into squares."""
    both = concatenated(full, diagonal)
    tile, _ = of_one_tile(both)
    is_diagonal = torch.arange(len(tile)) >= len(full.row)
    fits = both.columns % both.rows == 0
    square = is_diagonal & (both.columns == both.rows)
    ones, rows, scores = (torch.zeros(len(tile), dtype=torch.long) for _ in range(3))
    ones.index_add_(0, tile, square.long())
    rows.index_add_(0, tile, (~is_diagonal & fits).long())
    scores.index_add_(0, tile, both.rows * both.columns * fits)
    steps = ((ones == 1) & (rows > 0) & (scores <= _STEPPED))[tile] & fits
    steps &= ~is_diagonal | square
    of_full, of_diagonal = steps.split([len(full.row), len(diagonal.row)])
    return Stepped(
        _cut(full.pick(of_full), full.rows[of_full]),
        diagonal.pick(of_diagonal),
        full.pick(~of_full),
        diagonal.pick(~of_diagonal),
    )


def _pairs_of(tiles: Pieces) -> Tensor:
    """The first tile of each pair of neighbours; tiles come in the order of their rows."""
    end = tiles.row + tiles.rows * tiles.row_stride
    near = (tiles.variant[1:] == tiles.variant[:-1]) & (tiles.row[1:] == end[:-1])
    near &= tiles.row_stride[1:] == tiles.row_stride[:-1]
    near &= tiles.rows[1:] + tiles.rows[:-1] <= _JOINED_ROWS
    index = torch.arange(len(end))
    starts = torch.cat((near.new_ones(1), ~near))
    chain = index.where(starts, 0).cummax(0).values
    # Pairs start where they would if their tiles were the first ones, so that pairs find pairs.
    odd = tiles.row.div(tiles.rows * tiles.row_stride, rounding_mode="floor")[chain]
    return index[:-1][near & ((index - chain + odd)[:-1] % 2 == 0)]


def _pieces_of(spans: _Spans, tiles: Pieces, kinds: Pieces) -> Pieces:
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


def cut_alike(pieces: Pieces) -> Pieces:
    """Cuts pieces of the same rows into equal numbers of columns, so that they can be batched."""
    tile, first = of_one_tile(pieces)
    divisors = [0] * len(first)
    for of, columns in zip(tile.tolist(), pieces.columns.tolist(), strict=True):
        divisors[of] = math.gcd(divisors[of], columns)
    common = torch.tensor(divisors, dtype=torch.long)[tile]
    return _cut(pieces, torch.where(common >= _SHORTEST, common, pieces.columns))


def _cut(pieces: Pieces, unit: Tensor) -> Pieces:
    """Cuts pieces into parts of so many columns."""
    parts = pieces.columns // unit
    index = torch.arange(int(parts.sum())) - (parts.cumsum(0) - parts).repeat_interleave(parts)
    cut = pieces._replace(columns=unit).pick(torch.arange(len(parts)).repeat_interleave(parts))
    return cut._replace(column=cut.column + index * cut.columns * cut.column_stride)
