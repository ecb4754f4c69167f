"""Plans which key rows each rank needs from each other rank, from the attention pattern alone.

Shapes: B samples, H query heads, G key/value heads, T tokens, S keys of one rank, D head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from dpflash.kernels.tile_graph import TileGraph, real_cpu_tensors
from dpflash.kernels.tile_shard import Chunk, is_empty, live_keys, restrict
from dpflash.patterns import Adaptive, Dense, Pattern

from .layout import Layout

ALL_RANKS = -1  # `pieces(keys_of=ALL_RANKS)`: the keys of all ranks, in the sequence's order


@dataclass(frozen=True)
class ShardedPattern:
    """An attention pattern over a sequence that is sharded over ranks."""

    pattern: Pattern  # which keys each query attends to
    length: int  # number of tokens without padding
    num_heads: int  # H
    num_kv_heads: int  # G
    layout: Layout  # which tokens each rank holds
    whole: ShardedPattern | None = None  # the pattern of all heads, if this one is of some heads
    first_head: int = 0  # index of the first query head in `whole`

    @property
    def static(self) -> Pattern:
        """The pattern itself; for `Adaptive`, the dense pattern from which it chooses blocks."""
        if isinstance(self.pattern, Adaptive):
            return Dense(causal=self.pattern.causal)
        return self.pattern

    def of_heads(self, first: int, end: int) -> ShardedPattern:
        """Return the pattern of query heads `first` to `end` - 1, and of their key/value heads."""
        count = end - first
        kv_heads = max(1, count * self.num_kv_heads // self.num_heads)
        return replace(self, num_heads=count, num_kv_heads=kv_heads, whole=self, first_head=first)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """Return the ranges of a rank's tokens."""
        return self.layout.chunks(rank, self.length)

    def tokens(self, rank: int) -> int:
        """Return the number of tokens of a rank."""
        return self.layout.local_length(rank, self.length)

    @property
    def longest(self) -> int:
        """The largest number of tokens of a rank."""
        return max(self.tokens(rank) for rank in range(self.layout.world_size))


class Piece(NamedTuple):
    """A slice of queries, a slice of keys, and the attended pairs between them (a tile graph)."""

    queries: slice  # of one shard
    keys: slice  # of the other shard
    graph: TileGraph  # positions in it are relative to the starts of the slices
    chunks: tuple[int, int]  # number of query chunks and of key chunks in the graph


@dataclass(frozen=True, eq=False)
class NeededRows:
    """The key rows of a shard to which another rank attends; a row is one token of one head."""

    count: int  # number of rows
    tokens: slice | None  # the tokens if all heads need the same contiguous range, else None
    # `[count]`, int64, if tokens is None: indices into the shard's rows, flattened (head, token)
    index: Tensor | None


@functools.lru_cache(maxsize=256)
def graph_of(sharded: ShardedPattern, device: torch.device) -> TileGraph:
    """Return the tile graph of the whole sequence; it may differ between heads."""
    if sharded.whole is None:
        with real_cpu_tensors():
            return sharded.static.graph(sharded.length, sharded.num_heads, device)
    return _of_heads(graph_of(sharded.whole, device), sharded)


class Share(NamedTuple):
    """The work of one rank, and the numbers of key rows that its queries attend to."""

    edges: int  # number of (query, key) pairs over all heads
    rows: tuple[int, ...]  # number of each rank's key rows (key head, token) that are needed


@functools.lru_cache(maxsize=64)
def shares(sharded: ShardedPattern) -> tuple[Share, ...]:
    """Return the `Share` of each rank."""
    ranks, found = range(sharded.layout.world_size), []
    for rank in ranks:
        with real_cpu_tensors():
            per_token = _seen_keys(sharded, rank).sum(0)
            before = [0, *per_token.cumsum(0).tolist()]  # key rows before each token
        rows = tuple(
            sum(before[x.start + x.length] - before[x.start] for x in sharded.chunks(owner))
            for owner in ranks
        )
        found.append(Share(_graph_of_queries(sharded, rank).edges(), rows))
    return tuple(found)


def needed_rows(
    sharded: ShardedPattern, receiver: int, owner: int, device: torch.device
) -> NeededRows:
    """Return the key rows of rank `owner` that queries of rank `receiver` attend to."""
    found = _needed_rows(sharded, receiver, owner)
    if found.index is None or device.type == "cpu":
        return found
    return _needed_rows_on(sharded, receiver, owner, device)


def pieces(
    sharded: ShardedPattern,
    queries_of: int,
    keys_of: int,
    device: torch.device,
    by_chunk: bool,
    runtime: TileGraph | None = None,
) -> tuple[Piece, ...]:
    """Return the pieces between the queries of one rank and the keys of one or all ranks.

    With `by_chunk`, each pair of chunks has its own piece, so that ALiBi can compute distances
    between tokens. `runtime` is an `Adaptive` pattern's tile graph of the whole sequence.
    """
    if runtime is None:
        return _static_pieces(sharded, queries_of, keys_of, device, by_chunk)
    if not _static_pieces(sharded, queries_of, keys_of, torch.device("cpu"), False):
        return ()
    return _restricted(runtime, sharded, queries_of, keys_of, by_chunk)


def pack(x: Tensor, needed: NeededRows) -> Tensor:
    """Return x's needed rows, `[B, n, D]` or `[B, G, n, D]`: a contiguous copy, or x itself."""
    if needed.tokens is not None:
        return x[:, :, needed.tokens].contiguous()
    assert needed.index is not None
    return x.flatten(1, 2).index_select(1, needed.index)


def packed_like(x: Tensor, needed: NeededRows) -> Tensor:
    """Return an uninitialized buffer for the result of `pack`, with the heads and dtype of x."""
    batch, heads, _, dim = x.shape
    if needed.tokens is not None:
        return x.new_empty((batch, heads, needed.count // heads, dim))
    return x.new_empty((batch, needed.count, dim))


def unpack(packed: Tensor, heads: int, tokens: int, needed: NeededRows) -> Tensor:
    """Return a shard `[B, G, S, D]` with the packed rows, 0 elsewhere; maybe `packed` itself."""
    if needed.count == heads * tokens and needed.tokens is not None:
        return packed
    batch, dim = packed.shape[0], packed.shape[-1]
    whole = packed.new_zeros((batch, heads, tokens, dim))
    if needed.tokens is not None:
        whole[:, :, needed.tokens] = packed
    else:
        assert needed.index is not None
        whole.view(batch, heads * tokens, dim).index_copy_(1, needed.index, packed)
    return whole


def add_packed_(whole: Tensor, packed: Tensor, needed: NeededRows) -> None:
    """Add packed rows, which are distinct, to a contiguous shard `[B, G, S, D]`."""
    if needed.tokens is not None:
        whole[:, :, needed.tokens] += packed
        return
    assert needed.index is not None
    rows = whole.view(whole.shape[0], -1, whole.shape[3])
    rows.index_copy_(1, needed.index, rows.index_select(1, needed.index) + packed)


@functools.lru_cache(maxsize=4)
def _graph_of_queries(sharded: ShardedPattern, rank: int) -> TileGraph:
    """Return the part of the whole tile graph with the queries of a rank, on the CPU."""
    with real_cpu_tensors():
        return restrict(
            graph_of(sharded, torch.device("cpu")),
            sharded.chunks(rank),
            sharded.tokens(rank),
            (Chunk(0, sharded.length, 0),),
            sharded.length,
        )


@functools.lru_cache(maxsize=4)
def _seen_keys(sharded: ShardedPattern, rank: int) -> Tensor:
    """Return which key rows of the sequence a rank's queries attend to: `[G, T]`, bool."""
    with real_cpu_tensors():
        heads = live_keys(_graph_of_queries(sharded, rank))  # [H, T]
        return heads.unflatten(0, (sharded.num_kv_heads, -1)).any(1)


def _of_shard(seen: Tensor, sharded: ShardedPattern, rank: int) -> Tensor:
    """Select a rank's tokens, in local order, from `seen` `[G, T]`; return `[G, S]`."""
    with real_cpu_tensors():
        shard = seen.new_zeros((len(seen), sharded.tokens(rank)))
        for start, length, local in sharded.chunks(rank):
            shard[:, local : local + length] = seen[:, start : start + length]
        return shard


@functools.lru_cache(maxsize=8192)
def _needed_rows(sharded: ShardedPattern, receiver: int, owner: int) -> NeededRows:
    with real_cpu_tensors():
        live = _of_shard(_seen_keys(sharded, receiver), sharded, owner)
        count = int(live.sum())
        if count == 0:
            return NeededRows(0, slice(0, 0), None)
        places = live[0].nonzero().squeeze(1)
        if count == sharded.num_kv_heads * len(places) and bool((live == live[0]).all()):
            first, end = int(places[0]), int(places[-1]) + 1
            if end - first == len(places):
                return NeededRows(count, slice(first, end), None)
        return NeededRows(count, None, live.flatten().nonzero().squeeze(1))


@functools.lru_cache(maxsize=1024)
def _needed_rows_on(
    sharded: ShardedPattern, receiver: int, owner: int, device: torch.device
) -> NeededRows:
    found = _needed_rows(sharded, receiver, owner)
    assert found.index is not None
    return replace(found, index=found.index.to(device))


@functools.lru_cache(maxsize=8192)
def _static_pieces(
    sharded: ShardedPattern, queries_of: int, keys_of: int, device: torch.device, by_chunk: bool
) -> tuple[Piece, ...]:
    with real_cpu_tensors():
        if sharded.whole is not None:
            # All heads share one copy of the tables on the device.
            found = _static_pieces(sharded.whole, queries_of, keys_of, device, by_chunk)
            found = tuple(x._replace(graph=_of_heads(x.graph, sharded)) for x in found)
            return tuple(piece for piece in found if not is_empty(piece.graph))
        whole = graph_of(sharded, torch.device("cpu"))
        found = _restricted(whole, sharded, queries_of, keys_of, by_chunk)
        return tuple(
            piece if device.type == "cpu" else piece._replace(graph=piece.graph.to(device))
            for piece in found
            if not is_empty(piece.graph)
        )


def _of_heads(graph: TileGraph, part: ShardedPattern) -> TileGraph:
    """Restrict a graph of all heads to the heads of `part`, without a copy of its tables."""
    heads = slice(part.first_head, part.first_head + part.num_heads)
    rows, cols = graph.row_variants[..., heads], graph.col_variants[..., heads]
    return replace(graph, row_variants=rows, col_variants=cols, plans={})


def _restricted(
    whole: TileGraph, sharded: ShardedPattern, queries_of: int, keys_of: int, by_chunk: bool
) -> tuple[Piece, ...]:
    queries, num_queries = sharded.chunks(queries_of), sharded.tokens(queries_of)
    keys: tuple[Chunk, ...] = (Chunk(0, sharded.length, 0),)
    num_keys = sharded.length
    if keys_of != ALL_RANKS:
        keys, num_keys = sharded.chunks(keys_of), sharded.tokens(keys_of)
    if not queries or not keys:
        return ()
    if not by_chunk:
        graph = restrict(whole, queries, num_queries, keys, num_keys)
        return (
            Piece(slice(0, num_queries), slice(0, num_keys), graph, (len(queries), len(keys))),
        )
    found = []
    for q in queries:
        for k in keys:
            own, other = q._replace(local=0), k._replace(local=0)
            graph = restrict(whole, (own,), q.length, (other,), k.length)
            rows, columns = (slice(c.local, c.local + c.length) for c in (q, k))
            found.append(Piece(rows, columns, graph, (1, 1)))
    return tuple(found)
