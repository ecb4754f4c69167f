"""Builds the tables of a tile graph from arithmetic progressions of tokens or lists of blocks.

Patterns list the runs (progressions of columns) of each group of rows as if attention was not
causal. `make_graph` then clips each run to the columns that some row of its group may see, and
drops empty runs. Each run has a band; a limit of the band that excludes no pair becomes UNBOUNDED.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph

Ints = NDArray[np.int64]


class Tables(NamedTuple):
    """The query side or the key side of a tile graph, before its runs are clipped."""

    groups: Ints  # `[N, 4]`: start, stride and length of the rows, number of runs
    runs: Ints  # `[R, 5]`: start, stride and length of the columns, lo and hi of the band
    multiplicity: NDArray[np.float64]  # `[R]`: how often each column of a run counts
    per_variant: Ints  # `[V]`: number of groups of each variant


def tables(groups: ArrayLike, runs: ArrayLike) -> Tables:
    """Make the tables of one variant, in which every column counts once."""
    rows = np.asarray(groups, dtype=np.int64).reshape(-1, 4)
    columns = np.asarray(runs, dtype=np.int64).reshape(-1, 5)
    return Tables(rows, columns, np.ones(len(columns)), np.array([len(rows)]))


def make_graph(
    num_tokens: int, head_variants: Sequence[int], rows: Tables, cols: Tables, causal: bool
) -> TileGraph:
    """Make the tile graph from `rows` (queries) and `cols` (keys), clipped to the causal band.

    A pattern that is symmetric except for causality passes the same tables as `rows` and `cols`.
    """
    past = (0, UNBOUNDED) if causal else (-UNBOUNDED, UNBOUNDED)
    variants = torch.tensor(head_variants, dtype=torch.int32)
    return TileGraph(
        num_queries=num_tokens,
        num_keys=num_tokens,
        rows=_make_side(rows, *past),
        cols=_make_side(cols, -past[1], -past[0]),
        row_variants=variants,
        col_variants=variants.clone(),
        causal=causal,
    )


def _make_side(side: Tables, lo: int, hi: int) -> Side:
    start, stride, length, num_runs = side.groups.T
    group = np.repeat(np.arange(len(start)), num_runs)
    first_row = start[group]
    last_row = first_row + stride[group] * (length[group] - 1)
    column, step, count, low, high = side.runs.T
    low, high = np.maximum(low, lo), np.minimum(high, hi)
    skipped = np.maximum(-((column - (first_row - high)) // step), 0)
    count = np.minimum(count, (last_row - low - column) // step + 1) - skipped
    column = column + skipped * step
    last_column = column + step * (count - 1)
    low = np.where(first_row - last_column >= low, -UNBOUNDED, low)
    high = np.where(last_row - column <= high, UNBOUNDED, high)

    kept = (count > 0) & (length[group] > 0)
    step = np.where(count == 1, 1, step)
    runs = np.stack((column, step, count, low, high), axis=1)[kept]
    num_runs = np.bincount(group[kept], minlength=len(start))
    ends = num_runs.cumsum()
    stride = np.where(length == 1, 1, stride)
    groups = np.stack((start, stride, length, ends - num_runs, ends), axis=1)[num_runs > 0]
    variant = np.repeat(np.arange(len(side.per_variant)), side.per_variant)[num_runs > 0]
    per_variant = np.bincount(variant, minlength=len(side.per_variant))
    return Side(
        groups=_int32(groups),
        runs=_int32(runs),
        log_multiplicity=torch.from_numpy(np.log(side.multiplicity[kept])),
        variants=_int32(np.concatenate(([0], per_variant.cumsum()))),
        max_groups=int(per_variant.max(initial=0)),
        max_length=int(groups[:, 2].max(initial=0)),
    )


def _int32(table: Ints) -> Tensor:
    return torch.from_numpy(table.astype(np.int32))


def block_tables(num_tokens: int, block_size: int, variants: Sequence[Ints]) -> Tables:
    """Make the tables of a block pattern; neighboring rows with equal columns form one group.

    Each variant is `[K, 3]`: block row ``[k, 0]`` sees the column blocks from ``[k, 1]`` up to,
    but not including, ``[k, 2]``. Intervals may be in any order, overlap, or exceed the sequence.
    """
    num_blocks = -(-num_tokens // block_size)
    groups, runs = [], []
    for intervals in variants:
        row, begin, end = _merged(intervals, num_blocks)
        first = np.flatnonzero(_starts_group(row, begin, end, num_blocks))
        after = np.append(first[1:], num_blocks)
        kept = np.isin(row, first)
        num_runs = np.bincount(row[kept], minlength=num_blocks)[first]
        start, stop = first * block_size, np.minimum(after * block_size, num_tokens)
        groups.append(np.stack((start, np.ones_like(start), stop - start, num_runs), axis=1))
        column = begin[kept] * block_size
        count = np.minimum(end[kept] * block_size, num_tokens) - column
        band = np.full_like(column, UNBOUNDED)
        runs.append(np.stack((column, np.ones_like(column), count, -band, band), axis=1))
    all_runs = np.concatenate(runs)
    per_variant = np.array([len(of_variant) for of_variant in groups])
    return Tables(np.concatenate(groups), all_runs, np.ones(len(all_runs)), per_variant)


def _merged(intervals: Ints, num_blocks: int) -> tuple[Ints, Ints, Ints]:
    """Sort intervals into (row, begin, end); merge intervals of a row that overlap or touch."""
    bounds = intervals[:, 1:].clip(0, num_blocks)
    kept = bounds[:, 0] < bounds[:, 1]
    # Put the rows on one line, one after the other, with gaps so that rows never touch.
    offset = intervals[kept, 0] * (num_blocks + 1)
    order = np.argsort(offset + bounds[kept, 0], kind="stable")
    begin, end = (offset + bounds[kept, 0])[order], (offset + bounds[kept, 1])[order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], begin[1:] > reach[:-1]))[: len(begin)])
    last = np.append(first[1:], len(begin))[: len(first)] - 1
    row = begin[first] // (num_blocks + 1)
    line = row * (num_blocks + 1)
    return row, begin[first] - line, reach[last] - line


def _starts_group(row: Ints, begin: Ints, end: Ints, num_blocks: int) -> NDArray[np.bool_]:
    """Return, for each block row, whether it sees other columns than the row before: `[n]`."""
    counts = np.bincount(row, minlength=num_blocks)
    starts = np.ones(num_blocks, dtype=bool)
    starts[1:] = counts[1:] != counts[:-1]
    before = np.arange(len(row)) - counts[row]
    differs = (begin != begin[before]) | (end != end[before])
    starts[row[differs]] = True
    return starts
