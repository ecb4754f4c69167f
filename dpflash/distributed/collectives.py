"""What workers tell each other beside tensors, and what becomes of a worker whose peers are gone.

A group is a `torch.distributed` process group; None stands for a process by itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# As in DDP: large enough for the links, small enough to be no burden.
_BUCKET_BYTES = 25 * 2**20
# torch 2.13 renamed them; both names take (output, input, group=...).
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WorkerError(RuntimeError):
    """Another worker failed, died, or did not come in time."""


def world_size(group: ProcessGroup | None) -> int:
    """Number of workers of a group."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: ProcessGroup | None) -> int:
    """This worker's number in a group, from 0."""
    return 0 if group is None else dist.get_rank(group)


def digest(data: bytes | str) -> int:
    """64 bits that tell contents apart, as an int64."""
    content = data.encode() if isinstance(data, str) else data
    word = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(word, "little", signed=True)


@contextmanager
def exchanging(what: str, group: ProcessGroup | None) -> Iterator[None]:
    """Turns what torch.distributed raises inside into a WorkerError that says what failed.

    Args:
        what: names the exchange in the message.
        group: among whose workers it is.
    """
    try:
        yield
    except WorkerError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise WorkerError(
            f"{what}: worker {rank_in(group)} of {world_size(group)} lost the others "
            f"({reason[0]}). One of them died, or did not get here within the group's timeout. "
            "End all workers, look for the first error among their outputs, and go on from the "
            "last checkpoint"
        ) from error


def gather_rows(row: Sequence[int], group: ProcessGroup | None, what: str) -> list[list[int]]:
    """Every worker's row of integers, by rank; rows have one length."""
    if group is None or world_size(group) == 1:
        return [list(row)]
    device = control_device(group)
    own = torch.tensor(row, dtype=torch.int64, device=device)
    rows = torch.empty(world_size(group) * len(row), dtype=torch.int64, device=device)
    with exchanging(what, group):
        _all_gather(rows, own, group=group)
        table: list[list[int]] = rows.view(-1, len(row)).tolist()
    return table


def agree(
    what: str,
    values: Mapping[str, object],
    group: ProcessGroup | None,
    tell: Sequence[int] = (),
) -> list[list[int]]:
    """Refuse to go on where workers differ in what must be the same for all of them.

    Args:
        what: what the values are of, for the message.
        values: names and values with a repr that tells them apart; the same names everywhere.
        group: whose workers must agree; all of them call this.
        tell: integers that need not be the same, as many everywhere.

    Returns:
        What each worker told, by rank.

    Raises:
        ValueError: on all workers, naming the first value that differs, and each worker's.
    """
    if group is None or world_size(group) == 1:
        return [list(tell)]
    digests = [digest(repr(value)) for value in values.values()]
    rows = gather_rows([*digests, *tell], group, what)
    for index, name in enumerate(values):
        if len({row[index] for row in rows}) == 1:
            continue
        said: list[object] = [None] * len(rows)
        with exchanging(what, group):
            dist.all_gather_object(said, repr(values[name]), group=group)
        shown = (value if len(str(value)) < 200 else f"{str(value)[:200]}..." for value in said)
        listed = ", ".join(f"worker {rank} has {value}" for rank, value in enumerate(shown))
        raise ValueError(f"{what}: {name} differs between workers ({listed}); make it the same")
    return [row[len(values) :] for row in rows]


def all_gather(x: Tensor, group: ProcessGroup, what: str) -> Tensor:
    """`[P, *x.shape]`: every worker's x, all of one shape and dtype."""
    gathered = x.new_empty((world_size(group), *x.shape))
    with exchanging(what, group):
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=group)
    return gathered


def reduce_scatter(x: Tensor, group: ProcessGroup, what: str) -> Tensor:
    """`x[rank]`, summed over the workers, for x `[P, ...]`."""
    own = torch.empty_like(x[0], memory_format=torch.contiguous_format)
    with exchanging(what, group):
        _reduce_scatter(own.view(-1), x.contiguous().view(-1), group=group)
    return own


def all_reduce_(
    x: Tensor, group: ProcessGroup, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """x, reduced over the workers in place; the same bits on all of them. x is contiguous."""
    with exchanging(what, group):
        dist.all_reduce(x, op=op, group=group)
    return x


def all_reduce_all_(tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """All tensors, summed over the workers in place, some of them in each exchange."""
    if group is None:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in [t for t in tensors if t.dtype == dtype]:
            bucket.append(tensor)
            size += tensor.nbytes
            if size >= _BUCKET_BYTES:
                _all_reduce_bucket(bucket, group)
                bucket, size = [], 0
        _all_reduce_bucket(bucket, group)


def _all_reduce_bucket(bucket: list[Tensor], group: ProcessGroup) -> None:
    if not bucket:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    all_reduce_(flat, group, "sum of the clipped gradients over all samples")
    parts = flat.split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def as_bytes(x: Tensor) -> Tensor:
    """`[x.nbytes]`: the memory of a contiguous tensor, as not every backend knows every dtype."""
    return x.view(-1).view(torch.uint8)


def broadcast_(x: Tensor, group: ProcessGroup, what: str) -> None:
    """The first worker's x, written into that of all others; of any dtype and strides."""
    with torch.no_grad():
        held = x.contiguous()
        with exchanging(what, group):
            dist.broadcast(as_bytes(held), group=group, group_src=0)
        x.copy_(held)


def from_first(value: bytes, group: ProcessGroup | None, what: str) -> bytes:
    """The first worker's value, on all of them."""
    if group is None or world_size(group) == 1:
        return value
    held: list[object] = [value if rank_in(group) == 0 else None]
    with exchanging(what, group):
        dist.broadcast_object_list(held, group=group, group_src=0)
    assert isinstance(held[0], bytes)
    return held[0]


def control_device(group: ProcessGroup) -> torch.device:
    """Where small tensors of the group lie: on the CPU if its backends reach there."""
    kinds = [torch.device(kind).type for kind in group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())
