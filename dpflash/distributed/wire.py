"""Tensors between workers: as raw bytes where they are moved, as numbers where they are summed.

All is recorded, see `traffic.count_traffic`.
Letters: P workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed import collectives as workers
from dpflash.distributed.collectives import as_bytes

from .traffic import all_reduced_bytes, record

_warm: WeakSet[ProcessGroup] = WeakSet()


@dataclass(frozen=True, eq=False)
class Pending:
    """A send and a receive under way; keeps both buffers alive."""

    what: str
    group: ProcessGroup
    works: list[Any]
    received: Sequence[Tensor] | None
    sent: Sequence[Tensor] | None

    def wait(self) -> Sequence[Tensor] | None:
        """What was received, None where nothing was to come."""
        with workers.exchanging(self.what, self.group):
            for work in self.works:
                work.wait()
        return self.received


def exchange(
    send: Sequence[Tensor] | None,
    to: int,
    received: Sequence[Tensor] | None,
    source: int,
    group: ProcessGroup,
    what: str,
    phase: str,
) -> Pending:
    """Starts sending to one worker and receiving from another.

    Args:
        send: contiguous; None, or of no elements: nothing is sent, and the other side knows.
        to: number of the receiving worker in the group.
        received: contiguous, to be filled; None, or of no elements: nothing comes.
        source: number of the sending worker.
        group: of both.
        what: names the exchange in messages.
        phase: "forward" or "backward".
    """
    operations = []
    for x in send or ():
        if x.numel():
            operations.append(dist.P2POp(dist.isend, as_bytes(x), group=group, group_peer=to))
    for x in received or ():
        if x.numel():
            operations.append(dist.P2POp(dist.irecv, as_bytes(x), group=group, group_peer=source))
    if send is not None and (sent := sum(x.nbytes for x in send)):
        record(phase, what, sent)
    works: list[Any] = []
    if operations:
        with workers.exchanging(what, group):
            works = dist.batch_isend_irecv(operations)
    return Pending(what, group, works, received, send)


def warm_up(group: ProcessGroup, device: torch.device) -> None:
    """Makes a group's connections, which pairwise exchanges need on GPUs; once for each group."""
    if device.type == "cpu" or group in _warm:
        return
    workers.all_reduce_(torch.zeros(1, device=device), group, "first exchange of a group")
    _warm.add(group)


def all_gather(x: Tensor, group: ProcessGroup, what: str, phase: str) -> Tensor:
    """`[P, *x.shape]`: every worker's x, all of one shape and dtype."""
    record(phase, what, (workers.world_size(group) - 1) * x.nbytes)
    flat = workers.all_gather(as_bytes(x.contiguous()), group, what)
    return (
        flat.view(x.dtype).view(-1, *x.shape)
        if x.numel()
        else flat.new_empty((workers.world_size(group), *x.shape), dtype=x.dtype)
    )


def reduce_scatter(x: Tensor, group: ProcessGroup, what: str, phase: str) -> Tensor:
    """`x[rank]`, summed over the workers, for x `[P, ...]` of float32 or float64."""
    if x.numel() == 0:
        return torch.empty_like(x[0])
    record(phase, what, (workers.world_size(group) - 1) * x[0].nbytes)
    return workers.reduce_scatter(x, group, what)


def all_reduce(x: Tensor, group: ProcessGroup, what: str, phase: str) -> Tensor:
    """The sum of x over the workers, a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return total
    record(phase, what, all_reduced_bytes(x.nbytes, workers.world_size(group)))
    return workers.all_reduce_(total, group, what)


def all_to_all(
    parts: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    group: ProcessGroup,
    what: str,
    phase: str,
) -> list[Tensor]:
    """From every worker what it has for this one.

    Args:
        parts: for each worker what is for it, all of one dtype.
        shapes: for each worker the shape of what comes from it.
        group: of all workers, which call this together.
        what: names the exchange in messages.
        phase: "forward" or "backward".
    """
    dtype, own = parts[0].dtype, workers.rank_in(group)
    record(phase, what, sum(part.nbytes for p, part in enumerate(parts) if p != own))
    send = torch.cat([as_bytes(part.contiguous()) for part in parts])
    sizes = [torch.Size(shape).numel() * parts[0].element_size() for shape in shapes]
    received = send.new_empty(sum(sizes))
    with workers.exchanging(what, group):
        dist.all_to_all_single(received, send, sizes, [part.nbytes for part in parts], group=group)
    return [
        flat.view(dtype).view(shape)
        for flat, shape in zip(received.split(sizes), shapes, strict=True)
    ]
