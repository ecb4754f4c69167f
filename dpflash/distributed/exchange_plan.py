"""What each worker needs of whom, known to all from the pattern alone.

Letters: B samples, H query heads, G key/value heads, T tokens, S keys of one worker, D head dim.
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


@dataclass(frozen=True)
class Spread:
    """A pattern over tokens that several workers have.

    Attributes:
        pattern: which query sees which keys.
        length: tokens that are no padding.
        num_heads: H.
        num_kv_heads: G.
        layout: who has which tokens.
    """

    pattern: Pattern
    length: int
    num_heads: int
    num_kv_heads: int
    layout: Layout

    @property
    def static(self) -> Pattern:
        """The pattern; for one that chooses at run time, what it can choose from."""
        if isinstance(self.pattern, Adaptive):
            return Dense(causal=self.pattern.causal)
        return self.pattern

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """Where a worker's tokens lie."""
        return self.layout.chunks(rank, self.length)

    def tokens(self, rank: int) -> int:
        """How many a worker has."""
        return self.layout.local_length(rank, self.length)

    @property
    def longest(self) -> int:
        """The most tokens that a worker has."""
        return max(self.tokens(rank) for rank in range(self.layout.world_size))


class Piece(NamedTuple):
    """Some queries and some keys of two shards, and the graph between them.

    Attributes:
        queries: in the one shard.
        keys: in the other.
        graph: in coordinates from the begin of these slices.
        chunks: how many chunks of queries and of keys the graph was restricted to.
    """

    queries: slice
    keys: slice
    graph: TileGraph
    chunks: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Need:
    """The rows (key head, token) of a shard that some query of another sees.

    Attributes:
        count: how many.
        tokens: they are these tokens in all heads; None where they are scattered.
        index: `[count]`, int64: where they are in a shard flattened over heads and tokens.
    """

    count: int
    tokens: slice | None
    index: Tensor | None


def need(spread: Spread, receiver: int, owner: int, device: torch.device) -> Need:
    """What the queries of `receiver` see of the keys of `owner`."""
    found = _need(spread, receiver, owner)
    if found.index is None or device.type == "cpu":
        return found
    return _need_on(spread, receiver, owner, device)


def pieces(
    spread: Spread,
    queries_of: int,
    keys_of: int,
    device: torch.device,
    by_chunk: bool,
    runtime: TileGraph | None = None,
) -> tuple[Piece, ...]:
    """What is to be computed between the queries of one worker and the keys of another.

    Args:
        spread: the pattern and who has what.
        queries_of: the one worker.
        keys_of: the other; -1 for the keys of all, in the order of the sequence.
        device: of the graphs.
        by_chunk: one piece for each pair of chunks, whose distances are known.
        runtime: the graph of the whole sequence, of a pattern that chooses at run time.
    """
    if runtime is None:
        return _static_pieces(spread, queries_of, keys_of, device, by_chunk)
    if not _static_pieces(spread, queries_of, keys_of, torch.device("cpu"), False):
        return ()
    return _cut(runtime, spread, queries_of, keys_of, by_chunk)


def pack(x: Tensor, needed: Need) -> Tensor:
    """`[B, n, D]` or `[B, G, n, D]`, contiguous: the needed rows; x itself where that is all."""
    if needed.tokens is not None:
        return x[:, :, needed.tokens].contiguous()
    assert needed.index is not None
    return x.flatten(1, 2).index_select(1, needed.index)


def packed_like(x: Tensor, needed: Need) -> Tensor:
    """An empty buffer for what `pack` gives of a shard with the heads and dtype of x."""
    batch, heads, _, dim = x.shape
    if needed.tokens is not None:
        return x.new_empty((batch, heads, needed.count // heads, dim))
    return x.new_empty((batch, needed.count, dim))


def unpack(packed: Tensor, heads: int, tokens: int, needed: Need) -> Tensor:
    """`[B, G, S, D]`: a shard, 0 where nothing was needed; the packed rows where that is all."""
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


def add_packed_(whole: Tensor, packed: Tensor, needed: Need) -> None:
    """Adds packed rows to a contiguous shard `[B, G, S, D]`; no row comes twice."""
    if needed.tokens is not None:
        whole[:, :, needed.tokens] += packed
        return
    assert needed.index is not None
    rows = whole.view(whole.shape[0], -1, whole.shape[3])
    rows.index_copy_(1, needed.index, rows.index_select(1, needed.index) + packed)


@functools.lru_cache(maxsize=8192)
def _need(spread: Spread, receiver: int, owner: int) -> Need:
    tokens = spread.tokens(owner)
    with real_cpu_tensors():
        graph = spread.static.graph(spread.length, spread.num_heads)
        graph = restrict(
            graph, spread.chunks(receiver), spread.tokens(receiver), spread.chunks(owner), tokens
        )
        heads = live_keys(graph)  # [H, S]
        live = heads.unflatten(0, (spread.num_kv_heads, -1)).any(1)
        count = int(live.sum())
        if count == 0:
            return Need(0, slice(0, 0), None)
        places = live[0].nonzero().squeeze(1)
        if count == spread.num_kv_heads * len(places) and bool((live == live[0]).all()):
            first, end = int(places[0]), int(places[-1]) + 1
            if end - first == len(places):
                return Need(count, slice(first, end), None)
        return Need(count, None, live.flatten().nonzero().squeeze(1))


@functools.lru_cache(maxsize=1024)
def _need_on(spread: Spread, receiver: int, owner: int, device: torch.device) -> Need:
    found = _need(spread, receiver, owner)
    assert found.index is not None
    return replace(found, index=found.index.to(device))


@functools.lru_cache(maxsize=1024)
def _static_pieces(
    spread: Spread, queries_of: int, keys_of: int, device: torch.device, by_chunk: bool
) -> tuple[Piece, ...]:
    with real_cpu_tensors():
        whole = spread.static.graph(spread.length, spread.num_heads)
        found = _cut(whole, spread, queries_of, keys_of, by_chunk)
        return tuple(
            piece if device.type == "cpu" else piece._replace(graph=piece.graph.to(device))
            for piece in found
            if not is_empty(piece.graph)
        )


def _cut(
    whole: TileGraph, spread: Spread, queries_of: int, keys_of: int, by_chunk: bool
) -> tuple[Piece, ...]:
    queries, num_queries = spread.chunks(queries_of), spread.tokens(queries_of)
    keys: tuple[Chunk, ...] = (Chunk(0, spread.length, 0),)
    num_keys = spread.length
    if keys_of >= 0:
        keys, num_keys = spread.chunks(keys_of), spread.tokens(keys_of)
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
