"""Predicts the bytes that attention over several ranks sends, and each rank's work and time.

`exchange.count_traffic` counts the same bytes at run time. Shapes: B samples, H query heads, G
key/value heads, T tokens, P ranks, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from dpflash import _validate
from dpflash.attn.functional import require_pattern
from dpflash.patterns import Adaptive, Pattern

from .agreement import MODES
from .exchange import all_reduced_bytes
from .exchange_plan import ShardedPattern, graph_of, shares
from .layout import Layout


class _Speed(NamedTuple):
    """Nominal speed of a rank's device and network. The choice of modes needs only ratios."""

    flops: float  # FLOP/s of attention kernels
    memory: float  # bytes/s, reads and writes together
    link: float  # bytes/s that a rank sends
    exchange: float  # least time of an exchange with its kernels, in seconds


# By device type, not by device name, since all ranks must choose the same mode. "cpu": one core of
# a server and 10 Gbit/s Ethernet. "cuda": an H200, whose attention reaches about half of the data
# sheet's 989 TFLOP/s, and NVLink (900 GB/s, both directions together).
_SPEEDS = {
    "cpu": _Speed(1.5e11, 2e10, 1.25e9, 1e-4),
    "cuda": _Speed(5e14, 4.8e12, 4.5e11, 4e-5),
}


class Traffic(NamedTuple):
    """Numbers of bytes that a rank sends in one call."""

    forward: int
    backward: int


class ModeCost(NamedTuple):
    """Cost of one attention call in a mode, forward and backward."""

    mode: str
    sent: Traffic  # bytes sent by the rank that sends most
    flops: int  # FLOP of the rank that computes most
    exchanges: int  # number of exchanges that run one after the other
    merged: int  # bytes read and written to add partial results
    seconds: float  # predicted time without overlap of exchanges and kernels


class ModeCall(NamedTuple):
    """One call of attention over several ranks, for which a mode is chosen."""

    sharded: ShardedPattern
    head_dim: int
    dtype: torch.dtype
    batch: int
    device: str  # device type


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
    device: str = "cpu",
) -> Traffic:
    """Return the bytes that one rank sends in one call of `ring_attention`.

    The number is exact: it equals that of `count_traffic` if q, k and v all need gradients. An
    `Adaptive` pattern counts as the dense pattern that it chooses from, plus the all-reduce of its
    block means.

    Args:
        pattern: a pattern of `dpflash.patterns`.
        num_tokens, num_heads, head_dim, batch, world_size: T, H, D, B and P.
        num_kv_heads: G; None means H.
        dtype: dtype of q, k and v.
        sharding: "contiguous" or "zigzag".
        mode: "ring", "all_gather", "ulysses", or "auto", see `ring_attention`.
        rank: index of the rank.
        device: device type, which mode "auto" depends on.

    Returns:
        `Traffic`: bytes in the forward and bytes in the backward.

    Raises:
        ValueError: if `ring_attention` refuses the arguments.
    """
    _validate.one_of(mode=(mode, (*MODES, "auto")))
    layout = Layout(num_tokens, world_size, sharding)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    sharded = ShardedPattern(require_pattern(pattern), num_tokens, num_heads, kv_heads, layout)
    call = ModeCall(sharded, head_dim, dtype, batch, device)
    resolved_mode = cheapest_mode(call) if mode == "auto" else mode
    require_enough_heads(sharded, resolved_mode)
    return _sent(call, resolved_mode, rank)


def edges_per_rank(
    pattern: Pattern,
    num_tokens: int,
    num_heads: int,
    world_size: int,
    sharding: str = "contiguous",
) -> list[int]:
    """Return the number of (query, key) pairs of each rank, over all heads of one sample.

    Args:
        pattern: a pattern of `dpflash.patterns`. An `Adaptive` pattern counts as the dense pattern
            that it chooses from.
        num_tokens, num_heads, world_size: T, H and P.
        sharding: "contiguous" or "zigzag".

    Raises:
        ValueError: fewer tokens than ranks, an unknown sharding, or a T or H that the pattern
            does not support.
    """
    layout = Layout(num_tokens, world_size, sharding)
    sharded = ShardedPattern(require_pattern(pattern), num_tokens, num_heads, num_heads, layout)
    return _edges_per_rank(sharded)


def _edges_per_rank(sharded: ShardedPattern) -> list[int]:
    return [share.edges for share in shares(sharded)]


def cheapest_mode(call: ModeCall) -> str:
    """Return the supported mode with the shortest predicted time; ties: ring, then ulysses.

    "all_gather" is chosen only if the keys of all ranks are no larger than one rank's queries,
    since sequences are sharded to save the memory of all keys.
    """
    heads, kv_heads = call.sharded.num_heads, call.sharded.num_kv_heads
    fits = kv_heads * call.sharded.layout.world_size <= heads
    costs = [cost for cost in mode_costs(call) if fits or cost.mode != "all_gather"]
    return min(costs, key=lambda cost: cost.seconds).mode


@functools.lru_cache(maxsize=256)
def mode_costs(call: ModeCall) -> tuple[ModeCost, ...]:
    """Return the cost of each supported mode. All ranks have equal costs, and so choose one mode.

    Times of exchanges and of kernels are added up, since measured rings overlapped exchanges and
    kernels little (PrimeIntellect-ai/prime-rl#2418, 64k tokens on 2 and 4 ranks: the ring was 29%
    and 32% slower, Ulysses 8% slower and 1% faster).
    """
    sharded, speed = call.sharded, _SPEEDS.get(call.device, _SPEEDS["cuda"])
    ranks = range(sharded.layout.world_size)
    steps, wide = len(ranks) - 1, torch.promote_types(call.dtype, torch.float32).itemsize
    edges, found = max(_edges_per_rank(sharded)), []
    for mode in ("ring", "ulysses", "all_gather"):
        if mode == "ulysses" and sharded.num_heads < len(ranks):
            continue
        sent = max((_sent(call, mode, rank) for rank in ranks), key=sum)
        exchanges, merged, pairs = 3, 0, edges
        if mode == "ring":
            steps_sent = _most_steps(sharded)
            exchanges = 3 * steps_sent
            # Adding to o (forward) or dq (backward) reads two tensors and writes one.
            row = call.batch * sharded.num_heads * call.head_dim * wide
            merged = 6 * steps_sent * sharded.longest * row
        elif mode == "ulysses":
            exchanges = 4  # (q, k, v), (o, lse), and the gradients of each
            parts = (sharded.of_heads(x.start, x.stop) for x in heads_per_rank(sharded)[0])
            pairs = max(graph_of(part, torch.device("cpu")).edges() for part in parts)
        # Two products in the forward and five in the backward.
        flops = 14 * call.batch * pairs * call.head_dim
        seconds = flops / speed.flops + sum(sent) / speed.link + merged / speed.memory
        seconds += (exchanges if steps else 0) * speed.exchange
        found.append(ModeCost(mode, sent, flops, exchanges, merged, seconds))
    return tuple(found)


def _most_steps(sharded: ShardedPattern) -> int:
    """Return the largest number of other ranks whose keys one rank attends to."""
    return max(
        sum(map(bool, rows[:rank] + rows[rank + 1 :]))
        for rank, (_, rows) in enumerate(shares(sharded))
    )


def describe_modes(calls: Iterable[tuple[ModeCall, str]]) -> str:
    """Return a table with the cost of each call in each supported mode, for `engine.plan`."""
    rows: list[tuple[str, ...]] = [
        ("attention", "mode", "MiB sent", "in backward", "GFLOP", "exchanges", "predicted ms")
    ]
    for call, mode in calls:
        name = type(call.sharded.pattern).__name__
        for cost in mode_costs(call):
            rows.append(
                (
                    name,
                    f"{cost.mode}{' (taken)' * (cost.mode == mode)}",
                    *(f"{size / 2**20:.3g}" for size in cost.sent),
                    f"{cost.flops / 1e9:.3g}",
                    str(cost.exchanges),
                    f"{1e3 * cost.seconds:.3g}",
                )
            )
            name = ""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    legend = "forward and backward: MiB of the rank that sends most, GFLOP of the busiest rank"
    return "\n".join([*lines, legend])


def require_enough_heads(sharded: ShardedPattern, mode: str) -> None:
    """Raise a ValueError for Ulysses with fewer heads than ranks."""
    size = sharded.layout.world_size
    if mode == "ulysses" and sharded.num_heads < size:
        raise ValueError(
            f"mode='ulysses' with {sharded.num_heads} heads and {size} ranks: expected at least "
            "one query head per rank; use mode='ring' or 'all_gather'"
        )


def heads_per_rank(sharded: ShardedPattern) -> tuple[list[slice], list[slice]]:
    """Return the query heads and the key/value heads of each rank in mode "ulysses".

    A rank has all query heads that use the rank's key/value heads. If there are fewer key/value
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


def _sent(call: ModeCall, mode: str, rank: int) -> Traffic:
    sharded, head_dim, dtype, batch, _ = call
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
    of_all = shares(sharded)
    own = of_all[rank].rows[rank]
    sent = sum(share.rows[rank] for share in of_all) - own
    received = sum(of_all[rank].rows) - own
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
