"""Tensor exchanges of context parallelism, and a count of the bytes that they send.

Tensors are sent as raw bytes and summed in their own dtype. P is the number of ranks. `phase` is
"forward" or "backward"; `operation` is the name of the exchange in messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed import collectives
from dpflash.distributed.collectives import as_bytes

_connected: WeakSet[ProcessGroup] = WeakSet()


@dataclass
class TrafficCount:
    """The bytes that this rank sent while `count_traffic` was active."""

    # (phase, name, bytes) of each exchange, in order; phase is "forward" or "backward"
    sends: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def forward(self) -> int:
        """Bytes sent in the forward."""
        return sum(size for phase, _, size in self.sends if phase == "forward")

    @property
    def backward(self) -> int:
        """Bytes sent in the backward."""
        return sum(size for phase, _, size in self.sends if phase == "backward")


_active: list[TrafficCount] = []


@contextmanager
def count_traffic() -> Iterator[TrafficCount]:
    """Count the bytes that context parallelism passes to torch.distributed on this rank.

    With P ranks, these bytes are counted:

    - for a pairwise send, its bytes; for an all-to-all, the bytes that leave the rank
    - for an all-gather or a reduce-scatter, P - 1 times the bytes of one shard
    - for an all-reduce, ``2 (P - 1) / P`` times the bytes of its tensor

    The few integers by which ranks compare arguments before a call are not counted.
    """
    count = TrafficCount()
    _active.append(count)
    try:
        yield count
    finally:
        _active.remove(count)


def _record(phase: str, operation: str, size: int) -> None:
    if size:
        for count in _active:
            count.sends.append((phase, operation, size))


def all_reduced_bytes(size: int, world_size: int) -> int:
    """Return the bytes that each rank sends in an all-reduce of `size` bytes."""
    return 2 * (world_size - 1) * size // world_size


@dataclass(frozen=True, eq=False)
class PendingExchange:
    """A send and a receive in progress. Keeps the buffers alive until both are done."""

    operation: str
    group: ProcessGroup
    works: list[Any]
    received: Sequence[Tensor] | None
    sent: Sequence[Tensor] | None

    def wait(self) -> Sequence[Tensor] | None:
        """Wait for the send and the receive; return what was received, or None without buffers."""
        with collectives.exchanging(self.operation, self.group):
            for work in self.works:
                work.wait()
        return self.received


def send_and_receive(
    send: Sequence[Tensor] | None,
    to: int,
    received: Sequence[Tensor] | None,
    source: int,
    group: ProcessGroup,
    operation: str,
    phase: str,
) -> PendingExchange:
    """Start to send contiguous tensors to rank `to`, and to receive buffers from rank `source`.

    If `send` is None or has empty tensors, nothing is sent; rank `to` must then pass no buffers.
    """
    operations = []
    for x in send or ():
        if x.numel():
            operations.append(dist.P2POp(dist.isend, as_bytes(x), group=group, group_peer=to))
    for x in received or ():
        if x.numel():
            operations.append(dist.P2POp(dist.irecv, as_bytes(x), group=group, group_peer=source))
    if send is not None:
        _record(phase, operation, sum(x.nbytes for x in send))
    works: list[Any] = []
    if operations:
        with collectives.exchanging(operation, group):
            works = dist.batch_isend_irecv(operations)
    return PendingExchange(operation, group, works, received, send)


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Open the connections of a group before its first pairwise exchange on GPUs."""
    if device.type == "cpu" or group in _connected:
        return
    collectives.all_reduce_(torch.zeros(1, device=device), group, "first exchange of a group")
    _connected.add(group)


def all_gather(x: Tensor, group: ProcessGroup, operation: str, phase: str) -> Tensor:
    """Gather x from every rank: `[P, *x.shape]`. Shape and dtype are the same on all ranks."""
    _record(phase, operation, (collectives.world_size(group) - 1) * x.nbytes)
    flat = collectives.all_gather(as_bytes(x.contiguous()), group, operation)
    return (
        flat.view(x.dtype).view(-1, *x.shape)
        if x.numel()
        else flat.new_empty((collectives.world_size(group), *x.shape), dtype=x.dtype)
    )


def reduce_scatter(x: Tensor, group: ProcessGroup, operation: str, phase: str) -> Tensor:
    """Sum x `[P, ...]` (float32 or float64) over the ranks; return ``x[rank]`` of the sum."""
    if x.numel() == 0:
        return torch.empty_like(x[0])
    _record(phase, operation, (collectives.world_size(group) - 1) * x[0].nbytes)
    return collectives.reduce_scatter(x, group, operation)


def all_reduce(x: Tensor, group: ProcessGroup, operation: str, phase: str) -> Tensor:
    """Return the sum of x over the ranks as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return total
    _record(phase, operation, all_reduced_bytes(x.nbytes, collectives.world_size(group)))
    return collectives.all_reduce_(total, group, operation)


def all_to_all(
    tensors: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: ProcessGroup,
    operation: str,
    phase: str,
) -> list[list[Tensor]]:
    """Send several tensors to each rank and return the tensors from each rank, in one exchange.

    Args:
        tensors: for each rank, the tensors to send; all ranks have the same dtypes.
        shapes: for each rank, the shapes of the tensors to receive.
        group, operation, phase: see the module.
    """
    own, dtypes = collectives.rank_in(group), [x.dtype for x in tensors[0]]
    lengths = [sum(x.nbytes for x in some) for some in tensors]
    _record(phase, operation, sum(lengths) - lengths[own])
    send = torch.cat([as_bytes(x.contiguous()) for some in tensors for x in some])
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for some in shapes
        for shape, dtype in zip(some, dtypes, strict=True)
    ]
    each = len(dtypes)
    from_rank = [sum(sizes[at : at + each]) for at in range(0, len(sizes), each)]
    parts = iter(collectives.all_to_all(send, lengths, from_rank, group, operation).split(sizes))
    return [
        [_viewed(next(parts), dtype, shape) for shape, dtype in zip(some, dtypes, strict=True)]
        for some in shapes
    ]


def _viewed(flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View bytes as a tensor; copy the bytes first if their offset is not aligned to elements."""
    is_aligned = flat.storage_offset() % dtype.itemsize == 0
    return (flat if is_aligned else flat.clone()).view(dtype).view(shape)
