"""Predicts the bytes that attention over several ranks sends and the work of each rank.

`exchange.count_traffic` counts the same bytes while it runs. Shapes: B samples, H query heads, G
key/value heads, T tokens, P ranks, D head dim.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dpflash import _validate
from dpflash.attn.functional import require_pattern
from dpflash.kernels.tile_graph import real_cpu_tensors
from dpflash.kernels.tile_shard import Chunk, restrict
from dpflash.patterns import Adaptive, Pattern

from .agreement import MODES
from .exchange import all_reduced_bytes
from .exchange_plan import ShardedPattern, needed_rows
from .layout import Layout


class Traffic(NamedTuple):
    """Bytes that a rank sends in one call."""

    forward: int
    backward: int


def sent_bytes(
    pattern: Pattern,
    num_tokens: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int,
    dtype: torch.dtype,
    batch: int = 1,
    world_size: int,
    sharding: str = "contiguous",
    mode: str = "ring",
    rank: int = 0,
) -> Traffic:
    """The bytes that one rank sends in one call of `ring_attention`, forward and backward.

    Exact: equal to `count_traffic` if q, k and v all need gradients. An `Adaptive` pattern counts
    as the dense pattern that it chooses from, plus the all-reduce of its block means.

    Args:
        pattern: one of `dpflash.patterns`.
        num_tokens, num_heads, head_dim, batch, world_size: T, H, D, B and P.
        num_kv_heads: G; None means H.
        dtype: of q, k and v.
        sharding: "contiguous" or "zigzag".
        mode: "ring", "all_gather", "ulysses", or "auto", see `ring_attention`.
        rank: index of the rank.

    Returns:
        `Traffic` (forward, backward).

    Raises:
        ValueError: for the arguments for which `ring_attention` raises it.
    """
    _validate.one_of(mode=(mode, (*MODES, "auto")))
    layout = Layout(num_tokens, world_size, sharding)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sharded = ShardedPattern(require_pattern(pattern), num_tokens, num_heads, kv_heads, layout)
    call = (head_dim, dtype, batch)
    resolved_mode = cheapest_mode(sharded, *call) if mode == "auto" else mode
    require_enough_heads(sharded, resolved_mode)
    return _sent(sharded, *call, resolved_mode, rank)


def edges_per_rank(
    pattern: Pattern,
    num_tokens: int,
    num_heads: int,
    world_size: int,
    sharding: str = "contiguous",
) -> list[int]:
    """Number of (query, key) pairs that each rank computes, over all heads of one sample.

    Args:
        pattern: one of `dpflash.patterns`; an `Adaptive` one counts as the dense pattern that it
            chooses from.
        num_tokens, num_heads, world_size: T, H and P.
        sharding: "contiguous" or "zigzag".

    Raises:
        ValueError: fewer tokens than ranks, an unknown sharding, or a T or H that the pattern
            does not support.
    """
    layout = Layout(num_tokens, world_size, sharding)
    sharded = ShardedPattern(require_pattern(pattern), num_tokens, num_heads, num_heads, layout)
    everything = (Chunk(0, num_tokens, 0),)
    with real_cpu_tensors():
        graph = sharded.static.graph(num_tokens, num_heads)
        return [
            restrict(graph, sharded.chunks(r), sharded.tokens(r), everything, num_tokens).edges()
            for r in range(world_size)
        ]


@functools.lru_cache(maxsize=256)
def cheapest_mode(sharded: ShardedPattern, head_dim: int, dtype: torch.dtype, batch: int) -> str:
    """The mode whose busiest rank sends the fewest bytes; ties go to ring, then to ulysses."""
    size = sharded.layout.world_size
    best, least = "ring", -1
    for mode in ("ring", "ulysses", "all_gather"):
        if mode == "ulysses" and sharded.num_heads < size:
            continue
        busiest = max(sum(_sent(sharded, head_dim, dtype, batch, mode, r)) for r in range(size))
        if least < 0 or busiest < least:
            best, least = mode, busiest
    return best


def require_enough_heads(sharded: ShardedPattern, mode: str) -> None:
    """Raise a ValueError for Ulysses with fewer heads than ranks."""
    size = sharded.layout.world_size
    if mode == "ulysses" and sharded.num_heads < size:
        raise ValueError(
            f"mode='ulysses' with {sharded.num_heads} heads and {size} ranks: expected at least "
            "one query head per rank; use mode='ring' or 'all_gather'"
        )


def heads_per_rank(sharded: ShardedPattern) -> tuple[list[slice], list[slice]]:
    """The query heads and the key/value heads of each rank in mode "ulysses".

    Each rank gets whole groups of query heads that share a key/value head. With fewer key/value
    heads than ranks, k and v count as repeated to H heads.
    """
    size = sharded.layout.world_size
    groups = sharded.num_kv_heads
    if groups < size:
        groups = sharded.num_heads
    each, longer = divmod(groups, size)
    borders = [rank * each + min(rank, longer) for rank in range(size + 1)]
    group_size = sharded.num_heads // groups
    kv = [slice(*borders[rank : rank + 2]) for rank in range(size)]
    return [slice(x.start * group_size, x.stop * group_size) for x in kv], kv


def _sent(
    sharded: ShardedPattern, head_dim: int, dtype: torch.dtype, batch: int, mode: str, rank: int
) -> Traffic:
    item = dtype.itemsize
    wide = torch.promote_types(dtype, torch.float32).itemsize
    row = batch * head_dim
    if batch == 0 or sharded.layout.world_size == 1:
        return Traffic(0, 0)
    if mode == "ring":
        forward, backward = _ring(sharded, rank, row * item, row * wide)
    elif mode == "all_gather":
        shards = (sharded.layout.world_size - 1) * 2 * sharded.num_kv_heads * sharded.longest * row
        forward, backward = shards * item, shards * (item + wide)
    else:
        return _ulysses(sharded, rank, head_dim * item, wide, batch)
    if isinstance(sharded.pattern, Adaptive):
        blocks = -(-sharded.length // sharded.pattern.block_size)
        means = (sharded.num_heads + sharded.num_kv_heads) * blocks * row * wide
        all_reduced = all_reduced_bytes(means, sharded.layout.world_size)
        forward, backward = forward + all_reduced, backward + all_reduced
    return Traffic(forward, backward)


def _ring(sharded: ShardedPattern, rank: int, row: int, wide_row: int) -> Traffic:
    device = torch.device("cpu")
    others = [other for other in range(sharded.layout.world_size) if other != rank]
    sent = sum(needed_rows(sharded, other, rank, device).count for other in others)
    received = sum(needed_rows(sharded, rank, other, device).count for other in others)
    keys_values, gradients = 2 * row * sent, 2 * wide_row * received
    return Traffic(keys_values, keys_values + gradients)


def _ulysses(sharded: ShardedPattern, rank: int, row: int, wide: int, batch: int) -> Traffic:
    heads, kv_heads = heads_per_rank(sharded)
    tokens = sharded.tokens(rank)
    own = heads[rank].stop - heads[rank].start
    own_kv = kv_heads[rank].stop - kv_heads[rank].start
    others = heads[-1].stop - own
    others_kv = kv_heads[-1].stop - own_kv
    other_tokens = sharded.length - tokens
    forward = (others + 2 * others_kv) * tokens * row + own * other_tokens * (row + wide)
    backward = others * tokens * (row + wide) + (own + 2 * own_kv) * other_tokens * row
    return Traffic(batch * forward, batch * backward)
