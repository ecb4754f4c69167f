"""Tile graphs: tables of the keys that each query sees, read by all attention kernels.

A graph has two sides: queries as rows and keys as columns, and the reverse. A side divides its
rows into *groups*, arithmetic progressions of token positions. Each group has *runs* of columns,
which are progressions too. A row sees the columns within the run's band, ``lo <= row - col <=
hi``. A closed form gives the columns of a run that a tile of rows sees. So the memory of a graph
is proportional to the number of groups and runs, not of tiles.

Letters: B samples, H query heads, T query tokens, S key tokens, V variants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import _disable_current_modes

# The limit of an open side of a band. Positions are smaller, so that int32 sums do not overflow.
UNBOUNDED = 2**30 - 1
MAX_TOKENS = UNBOUNDED


@contextmanager
def real_cpu_tensors() -> Iterator[None]:
    """Context manager in which new tensors are real CPU tensors, despite fake or device modes."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a graph: its rows, and the columns that each row sees.

    A side has one or more *variants*, sets of groups; each head uses one variant. The groups of a
    variant share no row; a row in no group sees no column. The runs of a group share no column.

    Attributes:
        groups: `[N, 5]`, int32: start, stride and length (>= 0) of the rows, first and end run.
        runs: `[R, 5]`, int32: start, stride and length of the columns, lo and hi of the band.
        log_multiplicity: `[R]`, float64 (run-time sides: float32): natural log of how often each
            column of a run counts.
        variants: `[V + 1]`, int32: variant x owns the groups ``variants[x] : variants[x + 1]``.
        max_groups: largest number of groups in one variant.
        max_length: largest number of rows in one group.
        runtime: whether the tables were built on the device, where the host does not read them.
        partial: for run-time sides: whether some rows may be in no group, and may see nothing.
    """

    groups: Tensor
    runs: Tensor
    log_multiplicity: Tensor
    variants: Tensor
    max_groups: int
    max_length: int
    runtime: bool = False
    partial: bool = False
    _tables: dict[int, Tensor] = field(default_factory=dict, repr=False)
    _complete: dict[int, bool] = field(default_factory=dict, repr=False)
    _fully_masked: dict[int, bool] = field(default_factory=dict, repr=False)

    def tiles(self, block: int) -> Tensor:
        """Return the rows in tiles of at most `block`.

        The tiles of a variant are sorted by the number of columns that they see, largest first, so
        that long tiles do not start last. Tiles of a run-time side are in the order of its groups.

        Returns:
            `[V, M, 8]`, int32: position of the first row, stride and number of the rows, first
            and end run, index of the tile in its group, 0, 0. Tiles without rows pad the tables
            of a variant (in a run-time side, of a group).
        """
        make = self._runtime_tiles if self.runtime else self._make_tiles
        return self._table(block, lambda: make(block))

    def run_records(self) -> Tensor:
        """Return the runs in the format that kernels read.

        Kernels divide by the stride d of a run by multiplication: for 0 <= x < 2^31,
        ``x // d = (2 * x * m // 2^32) // 2^l``, where l is the number of bits of d - 1, and m the
        least integer >= ``2^(31 + l) / d``. Source: Granlund and Montgomery, "Division by
        Invariant Integers using Multiplication", 1994, theorem 4.2.

        Returns:
            `[R, 8]`, int32: start, stride and length of the columns, lo and hi of the band, the
            bits of the log multiplicity in float32, the bits of m as an unsigned integer, l.
        """
        return self._table(0, self._make_run_records)

    def _table(self, key: int, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._tables:
            with nullcontext() if self.runtime else real_cpu_tensors():
                self._tables[key] = make().to(self.groups.device)
        return self._tables[key]

    def is_complete(self, num_rows: int) -> bool:
        """Return whether the groups of each variant have all rows; at run time, see `partial`."""
        if self.runtime:
            return not self.partial
        if num_rows not in self._complete:
            with real_cpu_tensors():
                lengths = self.groups[:, 2].long().cpu().cumsum(0)
                totals = torch.cat((lengths.new_zeros(1), lengths))[self.variants.long().cpu()]
                self._complete[num_rows] = bool((totals.diff() == num_rows).all())
        return self._complete[num_rows]

    def has_fully_masked_rows(self, num_rows: int) -> bool:
        """Return False if every row certainly sees a column, True if a row may see no column."""
        if self.runtime:
            return self.partial  # in a complete run-time side every row sees itself
        if num_rows not in self._fully_masked:
            self._fully_masked[num_rows] = not (self.is_complete(num_rows) and self._all_see())
        return self._fully_masked[num_rows]

    def _all_see(self) -> bool:
        """Return whether each group with rows has a run that meets one of two conditions.

        1. All rows of the group see all columns of the run.
        2. Each row of the group sees the run's column at its own position.
        """
        with real_cpu_tensors():
            groups, runs = self.groups.long().cpu(), self.runs.long().cpu()
            group, run = ranges(groups[:, 3], groups[:, 4])
            start, stride, length = groups[group, :3].unbind(1)
            column, step, count, lo, hi = runs[run].unbind(1)
            open_band = (lo <= -UNBOUNDED) & (hi >= UNBOUNDED) & (count > 0)
            aligned = ((start - column) % step == 0) & (stride % step == 0)
            last_row, last_column = start + stride * (length - 1), column + step * (count - 1)
            inside = (start >= column) & (last_row <= last_column)
            own = aligned & inside & (lo <= 0) & (hi >= 0)
            found = torch.zeros(len(groups), dtype=torch.int64)
            found.index_add_(0, group, (open_band | own).long())
            return bool((found[groups[:, 2] > 0] > 0).all())

    def _make_tiles(self, block: int) -> Tensor:
        groups, variants = self.groups.long().cpu(), self.variants.long().cpu()
        counts = -(-groups[:, 2] // block)
        group, place = ranges(torch.zeros_like(counts), counts)
        tiles = _tile_records(groups[group], place, block)
        variant = torch.bucketize(group, variants[1:], right=True)
        columns = _columns_of_tiles(tiles.long(), self.runs.long().cpu())
        order = torch.argsort(variant * 2**40 - columns, stable=True)
        per_variant = torch.bincount(variant, minlength=len(variants) - 1)
        return pad_sequence(tiles[order].split(per_variant.tolist()), batch_first=True)

    def _runtime_tiles(self, block: int) -> Tensor:
        device = self.groups.device
        group = self.variants[:-1, None] + torch.arange(self.max_groups, device=device)
        exists = group < self.variants[1:, None]
        groups = self.groups[group * exists]
        groups[..., 2] *= exists
        place = torch.arange(-(-self.max_length // block), device=device)
        return _tile_records(groups.unsqueeze(2), place, block).flatten(1, 2)

    def _make_run_records(self) -> Tensor:
        stride = self.runs[:, 1].long().clamp(min=1)
        shift = torch.frexp((stride - 1).double()).exponent
        reciprocal = -(-(1 << (shift.long() + 31)) // stride)
        bits = self.log_multiplicity.float().view(torch.int32)
        return torch.column_stack((self.runs, bits, reciprocal.int(), shift))

    def to(self, device: torch.device) -> Side:
        """Return the side with its tables on `device`."""
        names = ("groups", "runs", "log_multiplicity", "variants")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return replace(self, **moved, _tables={})

    @property
    def nbytes(self) -> int:
        """Memory of the tables in bytes."""
        tables = (self.groups, self.runs, self.log_multiplicity, self.variants)
        return sum(table.numel() * table.element_size() for table in tables)


@dataclass(frozen=True, eq=False)
class TileGraph:
    """Which queries and keys see each other, as tables by query and by key.

    Attributes:
        num_queries: T.
        num_keys: S.
        rows: queries as rows, keys as columns (for the forward and dq).
        cols: keys as rows, queries as columns (for dk and dv); bands limit key - query.
        row_variants: `[H]`, or `[B, H]` for graphs that differ between samples: int32, the
            variant of `rows` that each query head uses.
        col_variants: the variant of `cols` that each query head uses, like `row_variants`.
        causal: no query sees a key after its own position.
        distance_shift: added to query - key to get the distance for slopes, since positions in a
            shard of a longer sequence count from the shard's begin.
        plans: cache of data that callers derive from the graph.
    """

    num_queries: int
    num_keys: int
    rows: Side
    cols: Side
    row_variants: Tensor
    col_variants: Tensor
    causal: bool
    distance_shift: int = 0
    plans: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Memory of both sides' tables and of the heads' variants, in bytes."""
        heads = self.row_variants.nbytes + self.col_variants.nbytes
        return self.rows.nbytes + self.cols.nbytes + heads

    def multiplicity(self) -> Tensor:
        """Return the graph as a matrix, for small T and for tests.

        Returns:
            `[H, T, S]`, or `[B, H, T, S]` for a graph that differs between samples: float64, how
            often each key counts for each query, 0 if the query does not see it.
        """
        variants = self.row_variants
        if variants.numel() == 0:
            shape = (*variants.shape, self.num_queries, self.num_keys)
            return torch.zeros(shape, dtype=torch.float64)
        matrices: dict[int, Tensor] = {}
        with real_cpu_tensors():
            for variant in variants.unique().tolist():
                matrices[variant] = side_matrix(
                    self.rows, variant, self.num_queries, self.num_keys
                )
            picked = [matrices[x] for x in variants.flatten().tolist()]
            return torch.stack(picked).unflatten(0, variants.shape)

    def edges(self) -> int:
        """Return the number of pairs (query, key) that see each other, over all heads."""
        with real_cpu_tensors():
            per_variant = _edges_per_variant(self.rows)
            return int(per_variant[self.row_variants.long().cpu()].sum())

    def heads_share_cols(self, heads_per_group: int) -> bool:
        """Return whether all query heads of a key head use the same variant of `cols`."""
        if heads_per_group == 1:
            return True
        if self.cols.runtime:
            return False
        name = f"heads_share_cols/{heads_per_group}"
        if name not in self.plans:
            per_group = self.col_variants.cpu().unflatten(-1, (-1, heads_per_group))
            self.plans[name] = bool((per_group == per_group[..., :1]).all())
        return self.plans[name]

    def to(self, device: torch.device) -> TileGraph:
        """Return the graph with its tables on `device`."""
        names = ("rows", "cols", "row_variants", "col_variants")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return replace(self, **moved, plans={})


def ranges(first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate ranges ``first[i] .. end[i] - 1``; return (the i of each number, numbers)."""
    counts = end - first
    owner = torch.arange(len(first)).repeat_interleave(counts)
    return owner, torch.arange(len(owner)) + (end - counts.cumsum(0))[owner]


def _tile_records(groups: Tensor, place: Tensor, block: int) -> Tensor:
    """Return records `[..., 8]`, see `Side.tiles`, for groups `[..., 5]` and tile indices."""
    start, stride, length, first_run, end_run = groups.unbind(-1)
    begin = place * block
    rows, none = (length - begin).clamp(0, block), torch.zeros_like(place)
    record = (start + stride * begin, stride, rows, first_run, end_run, place, none, none)
    return torch.stack(torch.broadcast_tensors(*record), dim=-1).int()


def _columns_of_tiles(tiles: Tensor, runs: Tensor) -> Tensor:
    """Return the number of columns that some row of each tile sees, `[M]`, int64."""
    first, stride, length, first_run, end_run = tiles[:, :5].unbind(1)
    tile, run = ranges(first_run, end_run)
    column, step, count, lo, hi = runs[run].unbind(1)
    last = (first + stride * (length - 1))[tile]
    begin = (-((column - first[tile] + hi) // step)).clamp(min=0)
    end = ((last - lo - column) // step + 1).minimum(count)
    seen = torch.zeros(len(tiles), dtype=torch.int64)
    return seen.index_add_(0, tile, (end - begin).clamp(min=0))


def side_matrix(side: Side, variant: int, num_rows: int, num_columns: int) -> Tensor:
    """Return one variant of a side as a matrix `[rows, columns]` of multiplicities, float64."""
    matrix = torch.zeros(num_rows, num_columns, dtype=torch.float64)
    first, end = side.variants[variant : variant + 2].tolist()
    for start, stride, length, first_run, end_run in side.groups[first:end].tolist():
        rows = start + stride * torch.arange(length)
        for run in range(first_run, end_run):
            column, step, count, lo, hi = side.runs[run].tolist()
            columns = column + step * torch.arange(count)
            distance = rows.unsqueeze(1) - columns
            seen = (distance >= lo) & (distance <= hi)
            weight = side.log_multiplicity[run].double().exp().cpu()
            matrix[rows.unsqueeze(1), columns] += seen * weight
    return matrix


def _edges_per_variant(side: Side) -> Tensor:
    """Return the number of pairs (row, column) of each variant, `[V]`, int64."""
    groups, runs = side.groups.long().cpu(), side.runs.long().cpu()
    group, run = ranges(groups[:, 3], groups[:, 4])
    start, stride, length = groups[group, :3].unbind(1)
    column, step, count, lo, hi = runs[run].unbind(1)
    # Only a run's position relative to its rows matters; few cases are distinct.
    relative = torch.stack((column - start, stride, length, step, count, lo, hi), dim=1)
    cases, case_of = relative.unique(dim=0, return_inverse=True)
    counts = torch.tensor([_pairs(*case) for case in cases.tolist()], dtype=torch.int64)[case_of]
    of_groups = torch.zeros(len(groups), dtype=torch.int64).index_add_(0, group, counts)
    totals = torch.cat((of_groups.new_zeros(1), of_groups.cumsum(0)))
    return totals[side.variants.long().cpu()].diff()


def _pairs(column: int, stride: int, length: int, step: int, count: int, lo: int, hi: int) -> int:
    """Count pairs in a band: rows ``0, stride, ...``, columns ``column, column + step, ...``."""
    if lo <= -UNBOUNDED and hi >= UNBOUNDED:
        return length * count
    row = stride * torch.arange(length)
    last = (row - lo - column).div(step, rounding_mode="floor").clamp(max=count - 1)
    first = -(column - row + hi).div(step, rounding_mode="floor")
    return int((last - first.clamp(min=0) + 1).clamp(min=0).sum())
