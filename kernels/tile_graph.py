"""Tile graphs: tables that list which keys each query sees, read by all attention kernels.

A side of the graph cuts its rows into *groups*, arithmetic progressions of token positions, and
gives each group *runs* of columns, again progressions. A run is never expanded: which of its
columns a tile of rows sees follows in closed form from the run's band ``lo <= row - col <= hi``,
so a graph takes memory by groups and runs, not by tiles or pairs of tokens.

Letters: B samples, H query heads, T query tokens, S key tokens, V variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# A band that is open on one side. Positions stay below it, so that int32 sums do not overflow.
UNBOUNDED = 2**30 - 1
MAX_TOKENS = UNBOUNDED


@contextmanager
def real_cpu_tensors() -> Iterator[None]:
    """Inside, tensors are real CPU tensors even under fake-tensor or device modes."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


@dataclass(frozen=True, eq=False)
class Side:
    """The rows of a graph and the columns that each of them sees.

    The groups of one variant share no row; a row in no group sees nothing. The runs of one group
    share no column. Every length may be 0.

    Attributes:
        groups: `[N, 5]`, int32: start, stride and length of the rows, first and end run.
        runs: `[R, 5]`, int32: start, stride and length of the columns, lo and hi of the band.
        log_multiplicity: `[R]`, float64 (run-time sides: float32): natural log of how often each
            column of a run counts.
        variants: `[V + 1]`, int32: variant x owns the groups ``variants[x] : variants[x + 1]``.
        max_groups: most groups in one variant.
        max_length: most rows in one group.
        runtime: the tables were built on the device and never seen by the host.
        partial: of a run-time side: some rows may be in no group, and may see nothing.
    """

    groups: Tensor
    runs: Tensor
    log_multiplicity: Tensor
    variants: Tensor
    max_groups: int
    max_length: int
    runtime: bool = False
    partial: bool = False
    _tiles: dict[tuple[int, bool], tuple[Tensor, Tensor, int]] = field(
        default_factory=dict, repr=False
    )
    _complete: dict[int, bool] = field(default_factory=dict, repr=False)
    _fully_masked: dict[int, bool] = field(default_factory=dict, repr=False)

    def tiles(self, block: int, last_first: bool) -> tuple[Tensor, Tensor, int]:
        """The rows in tiles of at most `block`.

        Args:
            block: most rows in a tile.
            last_first: list the tiles of the last groups and rows first (the heavy ones, where
                rows are causal queries), so that no long tile starts when all others have ended.

        Returns:
            `[M, 2]`, int32, (group, index of the tile in its group); `[V + 1]`, int32, the tiles
            of each variant; the most tiles in one variant. A run-time side may list tiles that
            begin behind the end of their group.
        """
        key = (block, last_first)
        if key not in self._tiles:
            if self.runtime:
                self._tiles[key] = self._runtime_tiles(block)
            else:
                with real_cpu_tensors():
                    self._tiles[key] = self._make_tiles(block, last_first)
        return self._tiles[key]

    def is_complete(self, num_rows: int) -> bool:
        """Whether every row is in a group of each variant; for run-time sides, see `partial`."""
        if self.runtime:
            return not self.partial
        if num_rows not in self._complete:
            with real_cpu_tensors():
                lengths = self.groups[:, 2].long().cpu().cumsum(0)
                totals = torch.cat((lengths.new_zeros(1), lengths))[self.variants.long().cpu()]
                self._complete[num_rows] = bool((totals.diff() == num_rows).all())
        return self._complete[num_rows]

    def has_fully_masked_rows(self, num_rows: int) -> bool:
        """Whether some row may see no column at all; False only if that is certain."""
        if self.runtime:
            return self.partial  # in a complete run-time side every row sees itself
        if num_rows not in self._fully_masked:
            self._fully_masked[num_rows] = not (self.is_complete(num_rows) and self._all_see())
        return self._fully_masked[num_rows]

    def _all_see(self) -> bool:
        """Whether each group has a run that all of its rows see, or that holds the row itself."""
        with real_cpu_tensors():
            groups, runs = self.groups.long().cpu(), self.runs.long().cpu()
            per_group = groups[:, 4] - groups[:, 3]
            group = torch.arange(len(groups)).repeat_interleave(per_group)
            run = (
                torch.arange(len(group)) + (groups[:, 3] - per_group.cumsum(0) + per_group)[group]
            )
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

    def float_log_multiplicity(self) -> Tensor:
        """The table as kernels read it."""
        return self.log_multiplicity.float()

    def _make_tiles(self, block: int, last_first: bool) -> tuple[Tensor, Tensor, int]:
        device = self.groups.device
        num_groups = self.groups.shape[0]
        counts = -(-self.groups[:, 2].long().cpu() // block)
        ends = counts.cumsum(0)
        group = torch.arange(num_groups).repeat_interleave(counts)
        index = torch.arange(group.shape[0]) - (ends - counts)[group]
        borders = torch.cat((ends.new_zeros(1), ends))[self.variants.long().cpu()]
        tiles = torch.stack((group, index), dim=1).int()
        if last_first:
            start = self.groups[:, 0].long().cpu()[group] + index * block
            variant = torch.bucketize(group, self.variants.long().cpu()[1:], right=True)
            order = torch.argsort(variant * (MAX_TOKENS + 1) - start, stable=True)
            tiles = tiles[order]
        most = int(borders.diff().max()) if len(borders) > 1 else 0
        return tiles.to(device), borders.int().to(device), most

    def _runtime_tiles(self, block: int) -> tuple[Tensor, Tensor, int]:
        device = self.groups.device
        num_groups = self.groups.shape[0]
        per_group = -(-self.max_length // block)
        group = torch.arange(num_groups, device=device).repeat_interleave(per_group)
        index = torch.arange(per_group, device=device).repeat(num_groups)
        tiles = torch.stack((group, index), dim=1).int()
        return tiles, self.variants * per_group, self.max_groups * per_group

    def to(self, device: torch.device) -> Side:
        """The side with its tables on `device`."""
        names = ("groups", "runs", "log_multiplicity", "variants")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return replace(self, **moved, _tiles={})

    @property
    def nbytes(self) -> int:
        """Memory of the tables."""
        tables = (self.groups, self.runs, self.log_multiplicity, self.variants)
        return sum(table.numel() * table.element_size() for table in tables)


@dataclass(frozen=True, eq=False)
class TileGraph:
    """Which queries and keys see each other, as tables by query and by key.

    Attributes:
        num_queries: T.
        num_keys: S.
        rows: queries as rows, keys as columns (forward and dq).
        cols: keys as rows, queries as columns (dk and dv); bands are those of key - query.
        row_variants: `[H]`, or `[B, H]` for graphs that differ between samples: int32, the
            variant of `rows` that each query head uses.
        col_variants: the same for `cols`.
        causal: no query sees a key behind its own position.
        distance_shift: added to query - key before slopes take the distance of the two:
            in a shard of a longer sequence, positions count from the shard's begin.
        plans: cache for data that a caller derives from the graph.
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
        """Memory of both sides' tables and of the heads' variants."""
        heads = self.row_variants.nbytes + self.col_variants.nbytes
        return self.rows.nbytes + self.cols.nbytes + heads

    def multiplicity(self) -> Tensor:
        """The graph as a matrix, for small T and for tests.

        Returns:
            `[H, T, S]`, or `[B, H, T, S]` for a graph that differs between samples: float64, how
            often each key counts for each query, 0 where it is not seen.
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
        """Pairs (query, key) that see each other, summed over the heads of one sample."""
        with real_cpu_tensors():
            per_variant = _edges_per_variant(self.rows)
            return int(per_variant[self.row_variants.long().cpu()].sum())

    def heads_share_cols(self, heads_per_group: int) -> bool:
        """Whether the query heads of each key head use one variant of `cols`."""
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
        """The graph with its tables on `device`."""
        names = ("rows", "cols", "row_variants", "col_variants")
        moved: dict[str, Any] = {name: getattr(self, name).to(device) for name in names}
        return replace(self, **moved, plans={})


def side_matrix(side: Side, variant: int, num_rows: int, num_columns: int) -> Tensor:
    """One variant of a side as a matrix `[rows, columns]` of multiplicities, float64."""
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
    """`[V]`, int64: pairs (row, column) of each variant."""
    groups, runs = side.groups.long().cpu(), side.runs.long().cpu()
    per_group = groups[:, 4] - groups[:, 3]
    group = torch.arange(len(groups)).repeat_interleave(per_group)
    begin = groups[:, 3] - (per_group.cumsum(0) - per_group)
    run = torch.arange(len(group)) + begin[group]
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
    """Pairs of rows ``stride * r`` and columns ``column + step * c`` within a band."""
    if lo <= -UNBOUNDED and hi >= UNBOUNDED:
        return length * count
    row = stride * torch.arange(length)
    last = (row - lo - column).div(step, rounding_mode="floor").clamp(max=count - 1)
    first = -(column - row + hi).div(step, rounding_mode="floor")
    return int((last - first.clamp(min=0) + 1).clamp(min=0).sum())
