"""Restricts tile graphs to shards of a sequence: some queries and some keys, local coordinates.

A step of ring attention uses the graph of the whole sequence, restricted to the queries of one
rank and the keys of another. Merging all steps by log-sum-exp gives attention over all keys.

Letters: H query heads, T query tokens, S key tokens, N groups, R runs, P chunks of rows, C chunks
of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .tile_graph import UNBOUNDED, Side, TileGraph, ranges, real_cpu_tensors

# Maximum number of pairs (key, run) that are examined at once.
_PAIRS = 2**20


class Chunk(NamedTuple):
    """Tokens ``start .. start + length - 1`` of a sequence, which begin at `local` in a shard."""

    start: int
    length: int
    local: int


def restrict(
    graph: TileGraph,
    queries: Sequence[Chunk],
    num_queries: int,
    keys: Sequence[Chunk],
    num_keys: int,
) -> TileGraph:
    """Restrict a graph to the queries of one shard and the keys of another.

    Rows of a shard that are in no chunk see nothing and are not seen. A graph built at run time
    keeps every run, once for each pair of chunks. To get the contribution of this pair of shards
    to the gradient of the graph's R runs, view the gradient of the result's runs as
    ``(len(queries), R, len(keys))`` and sum it over the first and last dimension.

    Args:
        graph: graph of the whole sequence.
        queries: chunks of query positions, disjoint in the sequence and in the shard.
        num_queries: number of tokens of the queries' shard.
        keys: chunks of key positions, disjoint in the sequence and in the shard.
        num_keys: number of tokens of the keys' shard.

    Returns:
        The graph in local coordinates, on the device of `graph`. Its `distance_shift` gives the
        distances in the sequence if all pairs of chunks are equally far apart (a single pair is).
        Otherwise distances are wrong: with slopes, restrict to one pair of chunks at a time.

    Raises:
        ValueError: a chunk does not fit into its shard.
    """
    _check("queries", queries, num_queries)
    _check("keys", keys, num_keys)
    shifts = {(q.start - q.local) - (k.start - k.local) for q in queries for k in keys}
    device = graph.rows.groups.device
    return TileGraph(
        num_queries,
        num_keys,
        _restrict_side(graph.rows, queries, keys).to(device),
        _restrict_side(graph.cols, keys, queries).to(device),
        graph.row_variants,
        graph.col_variants,
        graph.causal,
        distance_shift=graph.distance_shift + shifts.pop() if len(shifts) == 1 else 0,
    )


def is_empty(graph: TileGraph) -> bool:
    """Return whether no query sees a key; graphs built at run time are not examined (False)."""
    if graph.cols.runtime:
        return False
    if "is_empty" not in graph.plans:
        with real_cpu_tensors():
            variants = graph.col_variants.cpu().unique().tolist()
            graph.plans["is_empty"] = not any(
                bool(_live(graph.cols, variant, graph.num_keys).any()) for variant in variants
            )
    return graph.plans["is_empty"]


def live_keys(graph: TileGraph) -> Tensor:
    """Return which keys are seen by some query.

    Returns:
        `[H, S]` (`[B, H, S]` for a graph that differs between samples), bool, on the CPU.

    Raises:
        ValueError: the graph was built at run time, on the device.
    """
    if graph.cols.runtime:
        raise ValueError(
            "live_keys of a graph built at run time: expected a static graph, since the host "
            "does not read tables on the device; treat all keys as live"
        )
    with real_cpu_tensors():
        used, place = graph.col_variants.cpu().unique(return_inverse=True)
        live = torch.zeros(len(used), graph.num_keys, dtype=torch.bool)
        for row, variant in zip(live, used.tolist(), strict=True):
            row.copy_(_live(graph.cols, variant, graph.num_keys))
        return live[place]


def _check(name: str, chunks: Sequence[Chunk], size: int) -> None:
    for chunk in chunks:
        if min(chunk) < 0 or chunk.local + chunk.length > size:
            raise ValueError(
                f"{name} has {chunk}: expected numbers >= 0 with local + length <= {size}, the "
                "number of tokens of the shard"
            )


def _restrict_side(side: Side, rows: Sequence[Chunk], columns: Sequence[Chunk]) -> Side:
    if side.runtime:
        return _runtime_side(side, rows, columns)
    with real_cpu_tensors():
        return _static_side(side, rows, columns)


def _static_side(side: Side, row_chunks: Sequence[Chunk], column_chunks: Sequence[Chunk]) -> Side:
    """Restrict a static side; drop empty groups and runs, and keep the order of the variants."""
    groups, runs = side.groups.long().cpu(), side.runs.long().cpu()
    rows = _within(groups[:, :3], row_chunks)
    parent, row_chunk = (rows[:, :, 2] > 0).nonzero().unbind(1)
    rows = rows[parent, row_chunk]
    group, run = ranges(groups[parent, 3], groups[parent, 4])
    columns = _within(runs[:, :3], column_chunks)[run]
    entry, column_chunk = (columns[:, :, 2] > 0).nonzero().unbind(1)
    group, run = group[entry], run[entry]
    shift = _offsets(row_chunks)[row_chunk[group]] - _offsets(column_chunks)[column_chunk]
    band = _shifted(runs[run, 3:], shift.unsqueeze(1))
    kept, runs = _clean(rows[group], columns[entry, column_chunk], band)
    group, run = group[kept], run[kept]

    num_runs = torch.bincount(group, minlength=len(parent))
    ends = num_runs.cumsum(0)
    rows[:, 1].masked_fill_(rows[:, 2] == 1, 1)
    table = torch.column_stack((rows, ends - num_runs, ends))[num_runs > 0]
    variant = torch.bucketize(parent[num_runs > 0], side.variants.long().cpu()[1:], right=True)
    per_variant = torch.bincount(variant, minlength=len(side.variants) - 1)
    return Side(
        groups=table.int(),
        runs=runs.int(),
        log_multiplicity=side.log_multiplicity.cpu()[run],
        variants=torch.cat((per_variant.new_zeros(1), per_variant.cumsum(0))).int(),
        max_groups=max(per_variant.tolist(), default=0),
        max_length=max(table[:, 2].tolist(), default=0),
    )


def _clean(rows: Tensor, columns: Tensor, band: Tensor) -> tuple[Tensor, Tensor]:
    """Clip runs to the columns that some row reaches; return (mask of nonempty runs, the runs).

    Args:
        rows: `[n, 3]`, the rows of each run.
        columns: `[n, 3]`, the columns of each run.
        band: `[n, 2]`, the band of each run; limits that exclude no pair become unbounded.
    """
    first_row, stride, length = rows.unbind(1)
    last_row = first_row + stride * (length - 1)
    column, step, count = columns.unbind(1)
    lo, hi = band.unbind(1)
    skipped = (-((column - (first_row - hi)) // step)).clamp(min=0)
    count = count.minimum((last_row - lo - column) // step + 1) - skipped
    column = column + skipped * step
    last_column = column + step * (count - 1)
    lo = lo.masked_fill(first_row - last_column >= lo, -UNBOUNDED)
    hi = hi.masked_fill(last_row - column <= hi, UNBOUNDED)
    step = step.masked_fill(count == 1, 1)
    kept = count > 0
    return kept, torch.stack((column, step, count, lo, hi), dim=1)[kept]


def _runtime_side(side: Side, row_chunks: Sequence[Chunk], column_chunks: Sequence[Chunk]) -> Side:
    """Restrict a run-time side to `[N, P]` groups and `[P, R, C]` runs, some of them empty."""
    device = side.groups.device
    groups, runs = side.groups.long(), side.runs.long()
    rows, columns = _within(groups[:, :3], row_chunks), _within(runs[:, :3], column_chunks)
    num_runs, copies = len(runs), len(row_chunks)
    block = torch.arange(copies, device=device).unsqueeze(1) * num_runs
    of_runs = (block + groups[:, None, 3:]) * len(column_chunks)
    shift = _offsets(row_chunks, device).unsqueeze(1) - _offsets(column_chunks, device)
    band = _shifted(runs[:, None, 3:], shift[:, None, :, None])
    table = torch.cat((columns.expand(copies, -1, -1, -1), band), dim=3)
    weights = side.log_multiplicity.unsqueeze(1).expand(copies, -1, len(column_chunks))
    return Side(
        groups=torch.cat((rows, of_runs), dim=2).flatten(0, 1).int(),
        runs=table.flatten(0, 2).int(),
        log_multiplicity=weights.flatten(),
        variants=side.variants * copies,
        max_groups=side.max_groups * copies,
        max_length=min(side.max_length, max((x.length for x in row_chunks), default=0)),
        runtime=True,
        partial=True,
    )


def _within(progressions: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Return intersections of progressions `[n, 3]` and chunks, `[n, chunks, 3]`, local positions.

    Empty progressions start at 0, so that no position lies outside of the shard.
    """
    table = torch.tensor(chunks, dtype=torch.int64, device=progressions.device).view(-1, 3)
    begin, size, local = table.unbind(1)
    start, stride, length = (x.unsqueeze(1) for x in progressions.unbind(1))
    stride = stride.clamp(min=1)
    first = (-((start - begin) // stride)).clamp(min=0)
    end = (-((start - begin - size) // stride)).minimum(length)
    left = (end - first).clamp(min=0)
    start = (start + first * stride - begin + local).masked_fill(left == 0, 0)
    return torch.stack((start, stride.expand_as(start), left), dim=2)


def _offsets(chunks: Sequence[Chunk], device: torch.device | None = None) -> Tensor:
    """Return each chunk's position in the sequence minus its position in the shard, `[chunks]`."""
    offsets = [chunk.start - chunk.local for chunk in chunks]
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def _shifted(band: Tensor, shift: Tensor) -> Tensor:
    """Subtract `shift` from the limits of bands `[..., 2]`; unbounded limits stay unbounded."""
    moved = (band - shift).clamp(-UNBOUNDED, UNBOUNDED)
    return torch.where(band.abs() >= UNBOUNDED, band, moved)


def _live(side: Side, variant: int, num_rows: int) -> Tensor:
    """Return which rows of a variant see some column, `[num_rows]`, bool."""
    first, end = side.variants[variant : variant + 2].tolist()
    groups, runs = side.groups[first:end].long().cpu(), side.runs.long().cpu()
    start, stride, length, first_run, end_run = groups.unbind(1)
    group, run = ranges(first_run, end_run)
    counts = (runs[run, 2] > 0) & (side.log_multiplicity.cpu()[run] > -torch.inf)
    group, run = group[counts], run[counts]
    column, step, count, lo, hi = runs[run].unbind(1)

    # All rows that see a column lie between `begin` and `stop`. All rows between them see a column
    # unless the band is so narrow that it may fall between two columns.
    reach = column + step * (count - 1) + hi
    begin = -((start[group] - column - lo) // stride[group])
    begin = begin.clamp(min=0).minimum(length[group])
    stop = ((reach - start[group]) // stride[group] + 1).minimum(length[group]).maximum(begin)
    narrow = hi - lo < step - 1
    wide = ~narrow

    # The rows of all groups are concatenated, with one extra entry after each group.
    base = (length + 1).cumsum(0) - (length + 1)
    changes = torch.zeros(int((length + 1).sum()), dtype=torch.int64)
    where = base[group[wide]]
    one = torch.ones_like(where)
    changes.index_add_(0, where + begin[wide], one).index_add_(0, where + stop[wide], -one)
    seen = changes.cumsum(0) > 0
    entries = narrow.nonzero().squeeze(1)
    sizes = (stop - begin)[entries]
    within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    entries = entries.repeat_interleave(sizes)
    for part in torch.arange(len(entries)).split(_PAIRS):
        entry = entries[part]
        place = begin[entry] + within[part]
        row = start[group[entry]] + stride[group[entry]] * place
        beyond = (row - column[entry] - lo[entry]) % step[entry]
        hit = beyond <= (hi - lo)[entry]
        seen[(base[group[entry]] + place)[hit]] = True

    live = torch.zeros(num_rows, dtype=torch.bool)
    owner = torch.arange(len(groups)).repeat_interleave(length + 1)
    place = torch.arange(len(owner)) - base[owner]
    live[(start[owner] + stride[owner] * place)[seen]] = True
    return live
