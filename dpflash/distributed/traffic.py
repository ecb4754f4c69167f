"""How many bytes attention over several workers sends, known before, and counted while it runs.

Not counted is what calls agree on, some numbers of 8 bytes for each worker. Letters: B samples, H
query heads, G key/value heads, T tokens, P workers, D head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dpflash import _validate
from dpflash.attn.functional import require_pattern
from dpflash.kernels.tile_graph import real_cpu_tensors
from dpflash.kernels.tile_shard import Chunk, restrict
from dpflash.patterns import Adaptive, Pattern

from .agreement import MODES
from .exchange_plan import Spread, need
from .layout import Layout


class Traffic(NamedTuple):
    """Bytes that a worker sends in one call.

    Attributes:
        forward: in the forward pass.
        backward: in the backward pass.
    """

    forward: int
    backward: int


@dataclass
class TrafficCount:
    """What this worker sent while `count_traffic` was open.

    Attributes:
        sends: (phase, what, bytes) of each exchange, in order; phase is "forward" or "backward".
    """

    sends: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def forward(self) -> int:
        """Bytes sent in forward passes."""
        return sum(size for phase, _, size in self.sends if phase == "forward")

    @property
    def backward(self) -> int:
        """Bytes sent in backward passes."""
        return sum(size for phase, _, size in self.sends if phase == "backward")


_open: list[TrafficCount] = []


@contextmanager
def count_traffic() -> Iterator[TrafficCount]:
    """Counts the bytes that this package hands to torch.distributed on this worker.

    A pairwise send counts its bytes; an all-to-all what leaves the worker; an all-gather P - 1
    times the worker's shard; a reduce-scatter P - 1 times one shard; an all-reduce
    ``2 (P - 1) / P`` times its tensor.
    """
    count = TrafficCount()
    _open.append(count)
    try:
        yield count
    finally:
        _open.remove(count)


def record(phase: str, what: str, size: int) -> None:
    """Notes bytes on their way, where somebody counts."""
    if size:
        for count in _open:
            count.sends.append((phase, what, size))


def all_reduced_bytes(size: int, world_size: int) -> int:
    """What a worker sends in an all-reduce of so many bytes."""
    return 2 * (world_size - 1) * size // world_size


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
    """The bytes that one worker sends in one call of `ring_attention`, forward and backward.

    Exact, and equal to what `count_traffic` counts where q, k and v all need gradients. An
    `Adaptive` pattern counts as what it can choose from, and its blocks' means beside.

    Args:
        pattern: one of `dpflash.patterns`.
        num_tokens: T.
        num_heads: H.
        num_kv_heads: G; None means H.
        head_dim: D.
        dtype: of q, k and v.
        batch: B.
        world_size: P.
        sharding: "contiguous" or "zigzag".
        mode: "ring", "all_gather", "ulysses", or "auto", see `ring_attention`.
        rank: the worker.

    Returns:
        `Traffic` (forward, backward).

    Raises:
        ValueError: as `ring_attention`.
    """
    _validate.one_of(mode=(mode, (*MODES, "auto")))
    layout = Layout(num_tokens, world_size, sharding)
    kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    spread = Spread(require_pattern(pattern), num_tokens, num_heads, kv_heads, layout)
    call = (head_dim, dtype, batch)
    chosen = cheapest_mode(spread, *call) if mode == "auto" else mode
    require_possible(spread, chosen)
    return _sent(spread, *call, chosen, rank)


def edges_per_rank(
    pattern: Pattern,
    num_tokens: int,
    num_heads: int,
    world_size: int,
    sharding: str = "contiguous",
) -> list[int]:
    """The pairs (query, key) that each worker computes, summed over the heads of one sample.

    Args:
        pattern: one of `dpflash.patterns`; an `Adaptive` one counts as what it can choose from.
        num_tokens: T.
        num_heads: H.
        world_size: P.
        sharding: "contiguous" or "zigzag".

    Raises:
        ValueError: fewer tokens than workers, an unknown sharding, or a T or H that the pattern
            does not take.
    """
    layout = Layout(num_tokens, world_size, sharding)
    spread = Spread(require_pattern(pattern), num_tokens, num_heads, num_heads, layout)
    everything = (Chunk(0, num_tokens, 0),)
    with real_cpu_tensors():
        graph = spread.static.graph(num_tokens, num_heads)
        return [
            restrict(graph, spread.chunks(r), spread.tokens(r), everything, num_tokens).edges()
            for r in range(world_size)
        ]


@functools.lru_cache(maxsize=256)
def cheapest_mode(spread: Spread, head_dim: int, dtype: torch.dtype, batch: int) -> str:
    """The possible mode whose busiest worker sends the fewest bytes; ring, then ulysses first."""
    size = spread.layout.world_size
    best, least = "ring", -1
    for mode in ("ring", "ulysses", "all_gather"):
        if mode == "ulysses" and spread.num_heads < size:
            continue
        busiest = max(sum(_sent(spread, head_dim, dtype, batch, mode, r)) for r in range(size))
        if least < 0 or busiest < least:
            best, least = mode, busiest
    return best


def require_possible(spread: Spread, mode: str) -> None:
    """Refuses Ulysses with fewer heads than workers."""
    size = spread.layout.world_size
    if mode == "ulysses" and spread.num_heads < size:
        raise ValueError(
            f"mode='ulysses' with {spread.num_heads} heads and {size} workers: expected at least "
            "one query head for each worker; use mode='ring' or 'all_gather'"
        )


def deal_heads(spread: Spread) -> tuple[list[slice], list[slice]]:
    """The query heads and the key/value heads of each worker under Ulysses.

    Whole groups of heads where there are enough; else k and v count as repeated to H heads.
    """
    size = spread.layout.world_size
    groups = spread.num_kv_heads
    if groups < size:
        groups = spread.num_heads
    each, longer = divmod(groups, size)
    borders = [rank * each + min(rank, longer) for rank in range(size + 1)]
    wide = spread.num_heads // groups
    kv = [slice(*borders[rank : rank + 2]) for rank in range(size)]
    return [slice(x.start * wide, x.stop * wide) for x in kv], kv


def _sent(
    spread: Spread, head_dim: int, dtype: torch.dtype, batch: int, mode: str, rank: int
) -> Traffic:
    item = dtype.itemsize
    wide = torch.promote_types(dtype, torch.float32).itemsize
    row = batch * head_dim
    if batch == 0 or spread.layout.world_size == 1:
        return Traffic(0, 0)
    if mode == "ring":
        forward, backward = _ring(spread, rank, row * item, row * wide)
    elif mode == "all_gather":
        shards = (spread.layout.world_size - 1) * 2 * spread.num_kv_heads * spread.longest * row
        forward, backward = shards * item, shards * (item + wide)
    else:
        return _ulysses(spread, rank, head_dim * item, wide, batch)
    if isinstance(spread.pattern, Adaptive):
        blocks = -(-spread.length // spread.pattern.block_size)
        means = (spread.num_heads + spread.num_kv_heads) * blocks * row * wide
        both = all_reduced_bytes(means, spread.layout.world_size)
        forward, backward = forward + both, backward + both
    return Traffic(forward, backward)


def _ring(spread: Spread, rank: int, row: int, wide_row: int) -> Traffic:
    device = torch.device("cpu")
    others = [other for other in range(spread.layout.world_size) if other != rank]
    given = 2 * row * sum(need(spread, other, rank, device).count for other in others)
    back = 2 * wide_row * sum(need(spread, rank, other, device).count for other in others)
    return Traffic(given, given + back)


def _ulysses(spread: Spread, rank: int, row: int, wide: int, batch: int) -> Traffic:
    heads, kv_heads = deal_heads(spread)
    tokens = spread.tokens(rank)
    mine = heads[rank].stop - heads[rank].start
    mine_kv = kv_heads[rank].stop - kv_heads[rank].start
    others = heads[-1].stop - mine
    others_kv = kv_heads[-1].stop - mine_kv
    elsewhere = spread.length - tokens
    forward = (others + 2 * others_kv) * tokens * row + mine * elsewhere * (row + wide)
    backward = others * tokens * (row + wide) + (mine + 2 * mine_kv) * elsewhere * row
    return Traffic(batch * forward, batch * backward)
