"""Pieces of a tile graph, and batches of pieces of one shape, for `attention_cpu_plan`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FULL, CAUSAL, MASKED, BIASED = range(4)

# Longer than any line of columns.
LINE = 2**31


class Part(NamedTuple):
    """Rows and columns, as progressions, and the log multiplicity of their pairs.

    Row i sees column j where i - j >= lo.
    """

    row: int
    row_stride: int
    rows: int
    column: int
    column_stride: int
    columns: int
    lo: int
    weight: float

    def seen_by(self, row: int) -> int:
        """How many of the columns a row sees."""
        steps = (row - self.lo - self.column) // self.column_stride + 1
        return min(max(steps, 0), self.columns)


class Window(NamedTuple):
    """Some rows and columns that follow each other."""

    row: int
    rows: int
    column: int
    columns: int

    def of(self, part: Part) -> tuple[slice, slice]:
        """The part's rows and columns in it, counted from its first ones; slices may be empty."""
        return (
            _within(part.row, part.row_stride, part.rows, self.row, self.rows),
            _within(part.column, part.column_stride, part.columns, self.column, self.columns),
        )


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to scores: the log multiplicity of each pair, made when it is needed.

    Attributes:
        parts: no pair is in two.
        window: L rows, or 1 for rows that see alike, and C columns.
        blind: some row may see nothing, in some of the columns.
    """

    parts: tuple[Part, ...]
    window: Window
    blind: bool

    def dense(self, dtype: torch.dtype) -> Tensor:
        """`[L, C]`, -inf for what is not seen."""
        row, rows, column, columns = self.window
        found = torch.full((rows, columns), -math.inf, dtype=dtype)
        for lo in {part.lo for part in self.parts}:
            all_seen = row - (column + columns - 1) >= lo
            of_lo = found if all_seen else torch.full_like(found, -math.inf)
            for part in self.parts:
                if part.lo == lo:
                    of_lo[self.window.of(part)] = part.weight
            if not all_seen:
                hidden = torch.ones_like(found, dtype=torch.bool).triu_(row - column - lo + 1)
                found = found.maximum(of_lo.masked_fill_(hidden, -math.inf))
        return found


def _within(start: int, stride: int, count: int, begin: int, length: int) -> slice:
    """The progression's places among `length` ones from `begin` on."""
    first = max(-((start - begin) // stride), 0)
    end = min(-((start - begin - length) // stride), count)
    if first >= end:
        return slice(0, 0)
    return slice(start + first * stride - begin, start + (end - 1) * stride - begin + 1, stride)


class Run(NamedTuple):
    """Pieces of a variant that repeat the first one, each `spacing` tokens on, without overlap."""

    pieces: list[int]
    spacing: int
    row: int  # first row of the first piece
    columns: list[tuple[int, int]]  # of the first piece: first ones, and how many touch


@dataclass(frozen=True, eq=False)
class Batch:
    """n pieces of one shape; no row of a variant is in two of them.

    A piece has L rows and sees k progressions of C columns each. Rows and columns count from the
    piece's first ones.

    Attributes:
        kind: FULL (all see all), CAUSAL (row i sees columns up to i of the last progression, and
            all others), MASKED (by the band) or BIASED.
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
        bias: of BIASED pieces, else None; from its column `bias_first` on.
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
    bias: Bias | None = None
    bias_first: int = 0

    @functools.cached_property
    def weighted(self) -> bool:
        """Some piece has a multiplicity other than 1."""
        return bool(self.log_multiplicity.any())

    @functools.cached_property
    def runs(self) -> dict[int, list[Run]]:
        """All pieces, by their variants."""
        runs: dict[int, list[Run]] = {}
        offsets = self.column_start - self.row_start.unsqueeze(1)
        alike, _ = numbered(self.variant, *offsets.unbind(1))
        for some in members(alike):
            columns = self._touching(int(some[0]))
            longest = max(length for _, length in columns)
            extent = 1 + max(self.row_stride * (self.rows - 1), self.column_stride * (longest - 1))
            steps = self.row_start[some].diff().tolist()
            pieces, rows = some.tolist(), self.row_start[some].tolist()
            begin = 0
            while begin < len(pieces):
                end = begin + 1
                while end < len(pieces) and steps[end - 1] == steps[begin] >= extent:
                    end += 1
                spacing = steps[begin] if end - begin > 1 else 0
                moved = rows[begin] - rows[0]
                own = [(start + moved, length) for start, length in columns]
                run = Run(pieces[begin:end], spacing, rows[begin], own)
                runs.setdefault(int(self.variant[some[0]]), []).append(run)
                begin = end
        return runs

    def _touching(self, piece: int) -> list[tuple[int, int]]:
        """First column and number of columns of a piece's progressions, touching ones as one."""
        found: list[tuple[int, int]] = []
        for start in self.column_start[piece].tolist():
            last, length = found[-1] if found else (0, -1)
            if start == last + length * self.column_stride and found:
                found[-1] = (last, length + self.columns)
            else:
                found.append((start, self.columns))
        return found

    def seen(self, begin: int = 0, end: int | None = None) -> Tensor:
        """`[end - begin, k * C]`, bool: which columns each row from `begin` to `end` sees.

        Of BIASED pieces what the bias does not hide.
        """
        rows = torch.arange(begin, self.rows if end is None else end).unsqueeze(1)
        columns = torch.arange(self.columns)
        if self.kind == MASKED:
            distance = self.first + self.row_stride * rows - self.column_stride * columns
            return (distance >= self.band[0]) & (distance <= self.band[1])
        seen = torch.ones(len(rows), self.column_start.shape[1] * self.columns, dtype=torch.bool)
        if self.kind == CAUSAL:
            seen[:, -self.columns :] = columns <= rows
        return seen


class Pieces(NamedTuple):
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

    def pick(self, index: Tensor) -> Pieces:
        """Some of them."""
        return Pieces(*(values[index] for values in self))

    def distances(self) -> tuple[Tensor, Tensor]:
        """The least and the greatest row - column of each."""
        row_last = self.row + self.row_stride * (self.rows - 1)
        column_last = self.column + self.column_stride * (self.columns - 1)
        return self.row - column_last, row_last - self.column


def concatenated(*parts: Pieces) -> Pieces:
    """All of them."""
    return Pieces(*(torch.cat(values) for values in zip(*parts, strict=True)))


def batch_full(pieces: Pieces) -> list[Batch]:
    """Full pieces alike in all but their columns are joined into one with k progressions."""
    tile, _ = numbered(pieces.variant, pieces.row, pieces.row_stride, pieces.rows)
    shape = (pieces.column_stride, pieces.columns)
    joined, _ = numbered(tile, *shape, codes(pieces.weight))
    order = torch.argsort(joined, stable=True)
    k = torch.bincount(joined)
    first = order[k.cumsum(0) - k]
    # Joined pieces of one tile that differ in their weight only go into different batches.
    turn = occurrence(numbered(tile[first], *(x[first] for x in shape), k)[0])
    rows, stride, row = (x[first] for x in (pieces.rows, pieces.row_stride, pieces.row))
    alike, _ = numbered(rows, stride, *(x[first] for x in shape), k, turn)
    line = numbered(alike, pieces.variant[first], row % stride)[0] * LINE + row
    line, order_of = torch.sort(line)
    if (line.diff() < (rows * stride)[order_of[:-1]]).any():
        # Perhaps two share rows: those that start at equal phases do not.
        alike, _ = numbered(alike, row.div(stride, rounding_mode="floor") % rows)
    batches = []
    for some in members(alike):
        count = int(k[some[0]])
        begin = (k.cumsum(0) - k)[some]
        entries = order[begin.unsqueeze(1) + torch.arange(count)]
        batches.append(_make_batch(FULL, pieces, entries))
    return batches


def batch_stepped(full: Pieces, diagonal: Pieces) -> list[Batch]:
    """Each piece of `diagonal` with all of `full` that have its rows, stride and weight.

    All are as wide as high.
    """
    # Columns come in their order and the diagonal last.
    pieces = concatenated(full.pick(torch.argsort(full.column)), diagonal)
    tile, _ = of_one_tile(pieces)
    order = torch.argsort(tile, stable=True)
    k = torch.bincount(tile)
    end = k.cumsum(0)
    last = order[end - 1]
    shape = (x[last] for x in (pieces.rows, pieces.row_stride, pieces.column_stride))
    alike, _ = numbered(*shape, k, (pieces.row - pieces.column)[last])
    batches = []
    for some in members(alike):
        count = int(k[some[0]])
        entries = order[end[some].unsqueeze(1) + torch.arange(-count, 0)]
        batches.append(_make_batch(CAUSAL, pieces, entries))
    return batches


def batch_banded(kind: int, pieces: Pieces) -> list[Batch]:
    """Pieces with the same rows and columns, seen from their first row."""
    shape = [pieces.rows, pieces.row_stride, pieces.columns, pieces.column_stride]
    # Also where kind is CAUSAL: runs of other residues must not share a batch with a run.
    shape.append(pieces.row - pieces.column)
    if kind == MASKED:
        shape += [pieces.lo, pieces.hi]
    alike = members(numbered(*shape)[0])
    return [_make_batch(kind, pieces, some.unsqueeze(1)) for some in alike]


def _make_batch(kind: int, pieces: Pieces, entries: Tensor) -> Batch:
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


def biased_batch(
    bias: Bias,
    bias_first: int,
    rows: int,
    row_stride: int,
    row_start: Tensor,
    columns: int,
    column_stride: int,
    column_start: Tensor,
    variant: Tensor,
) -> Batch:
    """Pieces of one bias."""
    return Batch(
        *(BIASED, rows, row_stride, columns, column_stride, 0, (0, 0)),
        row_start=row_start,
        column_start=column_start.unsqueeze(1),
        log_multiplicity=torch.zeros(len(row_start), dtype=torch.float64),
        run=torch.zeros(len(row_start), 1, dtype=torch.long),
        variant=variant,
        row_unit=_unit(rows, row_stride, row_start),
        column_unit=_unit(columns, column_stride, column_start),
        progressions=1,
        bias=bias,
        bias_first=bias_first,
    )


def _unit(length: int, stride: int, start: Tensor) -> int:
    """The largest number that divides the progressions' length and where they start."""
    return math.gcd(length, *start.flatten().tolist()) if stride == 1 else 1


def codes(values: Tensor) -> Tensor:
    """Numbers 0, 1, ... for distinct values."""
    return torch.unique(values, return_inverse=True)[1]


def numbered(*columns: Tensor) -> tuple[Tensor, Tensor]:
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


def of_one_tile(pieces: Pieces) -> tuple[Tensor, Tensor]:
    """Numbers for what may be one piece: of equal rows, stride and weight; one piece of each."""
    return numbered(
        *(pieces.variant, pieces.row, pieces.row_stride, pieces.rows),
        *(pieces.column_stride, codes(pieces.weight)),
    )


def occurrence(ids: Tensor) -> Tensor:
    """How many earlier entries have an entry's id."""
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids)
    begin = (counts.cumsum(0) - counts)[ids[order]]
    return torch.empty_like(ids).scatter_(0, order, torch.arange(len(ids)) - begin)


def members(ids: Tensor) -> list[Tensor]:
    """The entries of each id."""
    order = torch.argsort(ids, stable=True)
    return list(order.split(torch.bincount(ids).tolist())) if len(ids) else []
