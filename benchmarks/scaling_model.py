"""A model of ring attention on many ranks: exact counts of work and bytes, assumed speeds.

Not a measurement. Letters: T tokens, P ranks, H heads, D head dim.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dpflash.distributed import Layout, edges_per_rank, sent_bytes
from dpflash.distributed.exchange_plan import ShardedPattern, needed_rows
from dpflash.patterns import Dense, Dilated, Pattern, SlidingWindow

from . import output as results
from .scaling_tasks import PATTERNS, SPREADS, spread

# Forward 2 products of 2 D operations, backward 5 of them.
_FLOPS_OF_AN_EDGE = 14
ASSUMPTIONS = (
    "only ring attention, forward and backward, of one sample; nothing else of a training step",
    f"{_FLOPS_OF_AN_EDGE} D operations for each pair (query, key) and head, forward and backward; "
    "pairs and bytes are counted exactly, for the busiest rank",
    "every rank computes at the FLOP/s given or measured on one rank, however small its shard is; "
    "merging of partial results costs nothing",
    "every rank sends at the link's full bandwidth at all times, whoever it sends to; there is no "
    "congestion, and receiving costs nothing more",
    "a message costs the link's latency once (an assumed figure for each link); keys and values "
    "of one shard are one message, and messages of a rank follow each other",
    "without overlap a step takes compute plus exchange, with overlap the longer of the two; a "
    "rank waits for nothing but bytes",
    "efficiency is the time of evenly spread work over free links, over the time of the step",
)


class Link(NamedTuple):
    """A link between ranks: its name, bytes/s that a rank sends, and seconds of latency."""

    name: str
    bandwidth: float
    latency: float


LINKS = (
    Link("NVLink 4, 450 GB/s per GPU and direction", 450e9, 5e-6),
    Link("InfiniBand NDR, 50 GB/s per GPU", 50e9, 10e-6),
)


class Load(NamedTuple):
    """The work and the traffic of a step, forward and backward."""

    greatest: int  # pairs (query, key) of the rank with the most, over all heads
    mean: float  # pairs of all ranks
    sent: int  # bytes of the rank that sends most
    messages: int  # of the rank that sends most of them


def model_rows(
    rows: Sequence[Mapping[str, Any]],
    given_flops: Sequence[float],
    links: Sequence[Link],
    lengths: Sequence[tuple[str, int]],
    ranks: Sequence[int],
    heads: int,
    head_dim: int,
) -> Iterator[dict[str, Any]]:
    """The rows of the model.

    Args:
        rows: measured ones, of which the FLOP/s of one rank are taken.
        given_flops: FLOP/s of a rank to assume beside.
        links: between ranks.
        lengths: ("weak", T of each rank) or ("strong", T of all).
        ranks: numbers of them.
        heads: H.
        head_dim: D.
    """
    speeds = [("measured on one rank", measured_flops(rows), torch.float32)]
    for flops in given_flops:
        speeds.append((f"given, {flops:g} FLOP/s", dict.fromkeys(PATTERNS, flops), torch.bfloat16))
    cases = itertools.product(lengths, SPREADS, ranks, speeds, links)
    for (scaling, length), (pattern, sharding), number, (source, flops_of, dtype), link in cases:
        if pattern not in flops_of:
            continue
        tokens = length * number if scaling == "weak" else length
        load = load_of(PATTERNS[pattern], tokens, heads, head_dim, dtype, number, sharding)
        shape = {
            "pattern": pattern,
            "scaling": scaling,
            "tokens": tokens,
            "heads": heads,
            "head_dim": head_dim,
            "dtype": str(dtype).removeprefix("torch."),
            "sharding": sharding,
            "ranks": number,
            "flops": flops_of[pattern],
            "flops_source": source,
            "link": link.name,
            "link_bytes_per_s": link.bandwidth,
            "link_latency_s": link.latency,
        }
        yield results.row(
            f"model/{scaling}/{spread(pattern, sharding)}/P{number}/{source}/{link.name}",
            shape,
            section="model",
            ranks=number,
            edges=load.greatest,
            bytes_sent=load.sent,
            messages=load.messages,
            **step_times(load, head_dim, flops_of[pattern], link),
        )


def measured_flops(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """FLOP/s of one rank in forward and backward, by pattern, where it was measured."""
    found: dict[str, float] = {}
    for row in rows:
        shape = row["config"]
        if row["section"] == "attention" and shape["scaling"] == "strong" and row["correct"]:
            operations = _FLOPS_OF_AN_EDGE * shape["head_dim"] * sum(row["edges_per_rank"])
            seconds = (row["alone"] or row)["median_ms"] / 1e3
            found.setdefault(shape["pattern"], operations / seconds)
    return found


def step_times(load: Load, head_dim: int, flops: float, link: Link) -> Mapping[str, Any]:
    """Milliseconds and efficiency of a step, where ranks wait for nothing but bytes."""
    each = 1e3 * _FLOPS_OF_AN_EDGE * head_dim / flops
    compute, even = load.greatest * each, load.mean * each
    exchange = 1e3 * (load.sent / link.bandwidth + load.messages * link.latency)
    return {
        "compute_ms": compute,
        "exchange_ms": exchange,
        "modelled_ms": compute + exchange,
        "modelled_overlapped_ms": max(compute, exchange),
        "efficiency": even / (compute + exchange),
        "efficiency_overlapped": even / max(compute, exchange),
    }


@functools.lru_cache(maxsize=1024)
def load_of(
    pattern: Pattern,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    ranks: int,
    sharding: str,
) -> Load:
    """The load of ring attention, B = 1, counted exactly.

    Dense causal attention is counted by its ranges. Where queries see only some tokens back, a
    stretch of neighbouring ranks is counted, long enough to hold all that those in its middle see
    and whole segments of a dilated pattern; the other ranks are like its middle.
    """
    assert tokens % ranks == 0, (tokens, ranks)
    if isinstance(pattern, Dense):
        assert pattern.causal
        return _dense(heads, head_dim, dtype, Layout(tokens, ranks, sharding))
    own = tokens // ranks
    # Whole segments, one of them with neighbours on both sides.
    stretch = min(ranks, 4 * -(-_reach(pattern, own) // own))
    length = stretch * own
    edges = edges_per_rank(pattern, length, heads, stretch, sharding)
    sent = functools.partial(sent_bytes, pattern, length, heads, head_dim=head_dim, dtype=dtype)
    most = max(
        sum(sent(world_size=stretch, sharding=sharding, rank=rank)) for rank in range(stretch)
    )
    spread = ShardedPattern(pattern, length, heads, heads, Layout(length, stretch, sharding))
    cpu = torch.device("cpu")
    moved = [
        [to != of and needed_rows(spread, to, of, cpu).count > 0 for of in range(stretch)]
        for to in range(stretch)
    ]
    mean = (sum(edges) + (ranks - stretch) * edges[stretch // 2]) / ranks
    return Load(max(edges), mean, most, _messages(np.array(moved)))


def _messages(moved: np.ndarray[Any, Any]) -> int:
    """Most messages of a rank: keys and values from each owner, to it their gradients."""
    return int((2 * moved.sum(0) + moved.sum(1)).max())


def _reach(pattern: Pattern, own: int) -> int:
    """How far back a query sees, in tokens; shards of `own` tokens must fit segments."""
    if isinstance(pattern, SlidingWindow):
        assert pattern.causal and not pattern.global_tokens
        return max(1, pattern.window)
    assert isinstance(pattern, Dilated)
    assert all(own % n == 0 or n % own == 0 for n in pattern.segment_lengths), own
    return max(pattern.segment_lengths)


def _dense(heads: int, head_dim: int, dtype: torch.dtype, layout: Layout) -> Load:
    chunks = [layout.chunks(rank) for rank in range(layout.world_size)]
    ranges = [[(c.start, c.length) for c in own] + [(0, 0)] * (2 - len(own)) for own in chunks]
    starts, lengths = np.moveaxis(np.array(ranges, dtype=np.int64), 2, 0)  # [rank, chunk]
    ends = starts + lengths
    edges = (ends * (ends + 1) - starts * (starts + 1)).sum(1) // 2
    # [receiver, owner]: how many of the owner's tokens the receiver's last query sees.
    rows = np.clip(ends.max(1)[:, None, None] - starts, 0, lengths).sum(2)
    np.fill_diagonal(rows, 0)
    wide = torch.promote_types(dtype, torch.float32).itemsize
    sent = 2 * heads * head_dim * (2 * dtype.itemsize * rows.sum(0) + wide * rows.sum(1))
    greatest, mean = heads * int(edges.max()), heads * float(edges.mean())
    return Load(greatest, mean, int(sent.max()), _messages(rows > 0))
