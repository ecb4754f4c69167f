"""A model of ring attention on many workers: exact counts of work and bytes, assumed speeds.

Not a measurement. Letters: T tokens, P workers, T_p = T / P, H heads, D head dim.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dpflash import _validate
from dpflash.distributed import Layout, edges_per_rank, sent_bytes
from dpflash.distributed.exchange_plan import ShardedPattern, needed_rows
from dpflash.patterns import Dense, Dilated, Pattern, SlidingWindow

# Forward 2 products of 2 D operations, backward 5 of them.
FLOPS_OF_AN_EDGE = 14


@dataclass(frozen=True)
class Link:
    """What connects the workers.

    Attributes:
        name: in words.
        bandwidth: bytes/s that a worker sends.
        latency: seconds before a message's first byte arrives.
    """

    name: str
    bandwidth: float
    latency: float


LINKS = {
    "nvlink": Link("NVLink 4, 450 GB/s per GPU and direction", 450e9, 5e-6),
    "infiniband": Link("InfiniBand NDR, 50 GB/s per GPU", 50e9, 10e-6),
}


def link_of(name: str | None, gigabytes: float | None, microseconds: float | None) -> list[Link]:
    """The links of a model: those of a name, one of given speeds, or all that have names.

    Args:
        name: of LINKS.
        gigabytes: per second, instead of a name's.
        microseconds: of latency, instead of a name's; 5 where nothing is named.

    Raises:
        ValueError: an unknown name, or a speed that is not a number above 0.
    """
    _validate.one_of(link=(name, (None, *LINKS)))
    if gigabytes is not None:
        _validate.positive(link_gbps=gigabytes)
        _validate.finite(link_gbps=gigabytes)
    if microseconds is not None:
        _validate.non_negative(link_latency_us=microseconds)
        _validate.finite(link_latency_us=microseconds)
    named = [LINKS[name]] if name is not None else list(LINKS.values())
    if name is None and gigabytes is not None:
        named = [Link("given", 0.0, 5e-6)]
    found = []
    for link in named:
        bandwidth = link.bandwidth if gigabytes is None else 1e9 * gigabytes
        latency = link.latency if microseconds is None else 1e-6 * microseconds
        given = gigabytes is not None or microseconds is not None
        label = f"{bandwidth / 1e9:g} GB/s, {latency * 1e6:g} us (given)" if given else link.name
        found.append(Link(label, bandwidth, latency))
    return found


class Load(NamedTuple):
    """The work and the traffic of a step, forward and backward.

    Attributes:
        greatest: pairs (query, key) of the worker with the most, over all heads.
        mean: of all workers.
        sent: bytes of the worker that sends the most.
        messages: of the worker that sends the most of them.
    """

    greatest: int
    mean: float
    sent: int
    messages: int


class Time(NamedTuple):
    """Seconds of a step.

    Attributes:
        compute: of the busiest worker.
        exchange: of the one that sends the most.
        apart: one after the other.
        overlapped: both at once.
        efficient: what it would take if the work were dealt out evenly and links were free.
    """

    compute: float
    exchange: float
    apart: float
    overlapped: float
    efficient: float


def step_time(load: Load, head_dim: int, flops: float, link: Link) -> Time:
    """Seconds of a step, where no worker waits for another but for bytes.

    Args:
        load: what is to be done.
        head_dim: D.
        flops: FLOP/s of a worker.
        link: between workers.
    """
    each = FLOPS_OF_AN_EDGE * head_dim / flops
    compute, efficient = load.greatest * each, load.mean * each
    exchange = load.sent / link.bandwidth + load.messages * link.latency
    return Time(compute, exchange, compute + exchange, max(compute, exchange), efficient)


@functools.lru_cache(maxsize=1024)
def load_of(
    pattern: Pattern,
    tokens: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    workers: int,
    sharding: str,
) -> Load:
    """The load of ring attention, B = 1, counted exactly.

    Dense causal attention is counted by its ranges. Of a pattern whose queries see no farther than
    some tokens a stretch of neighbouring workers is counted, long enough to hold all that those
    in its middle see and whole segments of a dilated one; the others are as its middle.

    Args:
        pattern: dense causal, a causal sliding window without global tokens, or dilated.
        tokens: T, a multiple of P.
        heads: H, all of them key/value heads too.
        head_dim: D.
        dtype: of q, k and v.
        workers: P.
        sharding: "contiguous" or "zigzag"; "contiguous" for a pattern that is not dense.

    Raises:
        ValueError: another pattern, T that P does not divide, or segments that shards do not fit.
    """
    if tokens % workers:
        raise ValueError(
            f"tokens={tokens} over {workers} workers: the model deals out equal shards; pass a "
            "multiple of the number of workers"
        )
    if isinstance(pattern, Dense) and pattern.causal:
        return _dense(tokens, heads, head_dim, dtype, Layout(tokens, workers, sharding))
    own = tokens // workers
    period = -(-_reach(pattern, own) // own)
    # Whole segments, one of them with neighbours on both sides.
    stretch = min(workers, 4 * period)
    length = stretch * own
    edges = edges_per_rank(pattern, length, heads, stretch, sharding)
    sent = [
        sum(
            sent_bytes(
                pattern,
                length,
                heads,
                head_dim=head_dim,
                dtype=dtype,
                world_size=stretch,
                sharding=sharding,
                rank=rank,
            )
        )
        for rank in range(stretch)
    ]
    spread = ShardedPattern(pattern, length, heads, heads, Layout(length, stretch, sharding))
    moved = np.array(
        [
            [
                to != of and needed_rows(spread, to, of, torch.device("cpu")).count > 0
                for of in range(stretch)
            ]
            for to in range(stretch)
        ]
    )
    messages = 2 * moved.sum(0) + moved.sum(1)
    mean = (sum(edges) + (workers - stretch) * edges[stretch // 2]) / workers
    return Load(max(edges), mean, max(sent), int(messages.max()))


def _reach(pattern: Pattern, own: int) -> int:
    """How far a query sees, in tokens; shards of `own` tokens must fit segments."""
    if isinstance(pattern, SlidingWindow) and pattern.causal and not pattern.global_tokens:
        return max(1, pattern.window)
    if isinstance(pattern, Dilated):
        for length in pattern.segment_lengths:
            if own % length and length % own:
                raise ValueError(
                    f"segments of {length} tokens over shards of {own}: the model needs one to "
                    "be a multiple of the other; pass other tokens or workers"
                )
        return max(pattern.segment_lengths)
    raise ValueError(
        f"pattern={pattern!r}: the model knows dense causal attention, causal sliding windows "
        "without global tokens, and dilated attention; pass one of these"
    )


def _dense(tokens: int, heads: int, head_dim: int, dtype: torch.dtype, layout: Layout) -> Load:
    workers = layout.world_size
    edges, last = [], []
    starts = np.zeros((workers, 2), dtype=np.int64)
    lengths = np.zeros((workers, 2), dtype=np.int64)
    for rank in range(workers):
        chunks = layout.chunks(rank)
        ends = [chunk.start + chunk.length for chunk in chunks]
        edges.append(
            sum(e * (e + 1) - c.start * (c.start + 1) for c, e in zip(chunks, ends, strict=True))
            // 2
        )
        last.append(max(ends))
        for number, chunk in enumerate(chunks):
            starts[rank, number], lengths[rank, number] = chunk.start, chunk.length
    # [receiver, owner]: how many of the owner's tokens the receiver's last query sees.
    behind = np.array(last)[:, None, None] - starts[None]
    rows = np.clip(behind, 0, lengths[None]).sum(2)
    np.fill_diagonal(rows, 0)
    row = 2 * heads * head_dim
    wide = torch.promote_types(dtype, torch.float32).itemsize
    given, back = rows.sum(0), rows.sum(1)
    sent = row * (2 * dtype.itemsize * given + wide * back)
    messages = 2 * (rows > 0).sum(0) + (rows > 0).sum(1)
    mean = heads * tokens * (tokens + 1) / 2 / workers
    return Load(heads * max(edges), mean, int(sent.max()), int(messages.max()))


ASSUMPTIONS = (
    "only ring attention, forward and backward, of one sample; nothing else of a training step",
    f"{FLOPS_OF_AN_EDGE} D operations for each pair (query, key) and head, forward and backward; "
    "pairs and bytes are counted exactly, for the busiest worker",
    "every worker computes at the FLOP/s given or measured with one worker, however small its "
    "shard is; merging of partial results costs nothing",
    "every worker sends at the link's full bandwidth at all times, whoever it sends to; there is "
    "no congestion, and what it receives costs nothing more",
    "a message costs the link's latency once (an assumed figure for each link); keys and values "
    "of one shard are one message, and messages of a worker follow each other",
    "without overlap a step takes compute plus exchange, with overlap the longer of the two; a "
    "worker waits for nobody but for bytes",
    "efficiency is the time of evenly dealt work over free links, over the time of the step",
)
