"""Cuts a tile graph into dense, causal and masked pieces of equal shape, for `attention_cpu`."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_cpu_batch import (
    CAUSAL,
    FULL,
    MASKED,
    Batch,
    Pieces,
    batch_banded,
    batch_full,
    batch_stepped,
    concatenated,
)
from .attention_cpu_bias import cut_cells, cut_mixed
from .attention_cpu_join import cut_alike, join, step
from .tile_graph import Side, TileGraph, real_cpu_tensors

_TILE_ROWS = 256
# A tile's partial columns: at most about this many, so that masks stay small.
_TILE_COLUMNS = 4096
_PLANS_KEPT = 64
_COUNTED = 2**23
_LOCK = threading.Lock()


class Plan(NamedTuple):
    """The pieces of a graph, and what its first batches have exactly once.

    Attributes:
        batches: of which the first `first` have no row of a variant twice.
        first: so many batches, whose results need no sum yet.
        rows: variants of which these have all rows.
        columns: variants of which they have all columns, and none twice.
    """

    batches: list[Batch]
    first: int = 0
    rows: frozenset[int] = frozenset()
    columns: frozenset[int] = frozenset()


def plan(graph: TileGraph, clip: tuple[int, int] | None = None, joined: bool = True) -> Plan:
    """The graph's pieces, as `make_plan` gives them; kept in its plans."""
    kept: dict[Any, Plan] = graph.plans.setdefault("cpu", {})
    key = (clip, joined)
    found = kept.get(key)
    if found is None:
        with real_cpu_tensors():
            batches = make_plan(graph.rows, clip, joined)
            found = Plan(batches)
            if joined:
                found = _first_ones(batches, graph.num_queries, graph.num_keys)
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
    pairs = _seen(_pairs(side, clip))
    cells: list[Batch] = []
    mixed: list[Batch] = []
    if joined:
        cells, pairs = cut_cells(pairs)
        pairs = _seen(pairs)
    nearest, farthest = pairs.distances()
    full = (nearest >= pairs.lo) & (farthest <= pairs.hi)
    causal = ~full & (farthest <= pairs.hi) & (pairs.row_stride == pairs.column_stride)
    before, diagonal = _cut_causal(pairs.pick(causal))
    whole, partial = _cut_tiles(pairs.pick(~full & ~causal))
    dense = concatenated(pairs.pick(full), before)
    if joined:
        mixed, dense = cut_mixed(dense)
    dense = concatenated(dense, whole)
    stepped: list[Batch] = []
    if joined and len(dense.row):
        steps = step(join(dense, diagonal), diagonal)
        stepped = batch_stepped(steps.full, steps.diagonal)
        dense, diagonal = cut_alike(steps.other_full), steps.other_diagonal
    banded = batch_banded(CAUSAL, diagonal) + batch_banded(MASKED, partial)
    return cells + stepped + banded + mixed + batch_full(dense)


def _first_ones(batches: list[Batch], num_rows: int, num_columns: int) -> Plan:
    """Batches that share no row come first, if they have all rows of some variant."""
    variants = 1 + max((int(batch.variant.max()) for batch in batches), default=-1)
    # Counting takes long for very many tokens, whose first sums cost little.
    if not 0 < variants * max(num_rows, num_columns) <= _COUNTED:
        return Plan(batches)
    rows = torch.zeros(variants, num_rows, dtype=torch.bool)
    first: list[Batch] = []
    others: list[Batch] = []
    # Wide pieces of many rows leave least to sum; those on the diagonal may have columns once.
    # Tiles stay in their order, in which those of one bias follow each other.
    for batch in sorted(batches, key=_rank):
        own = _places(batch, batch.row_start.unsqueeze(1), batch.rows, batch.row_stride, num_rows)
        taken = bool(rows.view(-1)[own].any())
        (others if taken else first).append(batch)
        if not taken:
            rows.view(-1)[own] = True
    columns = torch.zeros(variants, num_columns, dtype=torch.bool)
    # As many places as there are: all are had only if none is had twice.
    if columns.numel() == sum(batch.columns * batch.column_start.numel() for batch in first):
        for batch in first:
            stride = batch.column_stride
            own = _places(batch, batch.column_start, batch.columns, stride, num_columns)
            columns.view(-1)[own] = True
    of_rows = frozenset(rows.all(1).nonzero().flatten().tolist())
    of_columns = frozenset(range(variants) if columns.all() else ())
    return Plan(first + others, len(first), of_rows, of_columns)


def _rank(batch: Batch) -> tuple[bool, bool, int]:
    is_tile = batch.bias is not None and batch.bias.window.rows > 1
    width = 0 if is_tile else batch.columns * batch.column_start.shape[1]
    return (batch.kind == FULL, not is_tile, -width)


def _places(batch: Batch, start: Tensor, length: int, stride: int, line: int) -> Tensor:
    """The progressions `[n, k]` of pieces, each variant on a line of its own."""
    place = start.unsqueeze(2) + stride * torch.arange(length)
    return (place + (line * batch.variant).view(-1, 1, 1)).flatten()


def _seen(pairs: Pieces) -> Pieces:
    """Those in which some row sees some column."""
    nearest, farthest = pairs.distances()
    return pairs.pick((farthest >= pairs.lo) & (nearest <= pairs.hi))


def _pairs(side: Side, clip: tuple[int, int] | None) -> Pieces:
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
    pieces = Pieces(variant, run, row, row_stride, rows, column, stride, columns, lo, hi, weight)
    return pieces.pick((rows > 0) & (columns > 0) & (weight > -torch.inf))


def _cut_causal(pairs: Pieces) -> tuple[Pieces, Pieces]:
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


def _cut_tiles(pairs: Pieces) -> tuple[Pieces, Pieces]:
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
    return full, concatenated(left, right)


def _columns_before(pieces: Pieces, position: Tensor) -> Tensor:
    """How many of a piece's columns lie at or before a position."""
    steps = (position - pieces.column).div(pieces.column_stride, rounding_mode="floor")
    return (steps + 1).clamp(min=0).minimum(pieces.columns)


def _columns_between(pieces: Pieces, begin: Tensor, end: Tensor) -> Pieces:
    column = pieces.column + begin * pieces.column_stride
    return pieces._replace(column=column, columns=end - begin).pick(end > begin)
