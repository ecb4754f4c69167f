"""Collectives over a process group, which raise `RankError` if another rank is lost.

A group is a `torch.distributed` process group, or None for a single process. `operation` is the
name of the exchange in messages. P is the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..refusal import PrivateRefusal

# The size of DistributedDataParallel's buckets.
BUNDLE_BYTES = 25 * 2**20
# `agree` pads to a multiple of 16 integers: gloo aborts if sizes differ between ranks.
_AGREED = 16
# `broadcast_from_first`: bytes of the first exchange, and of the length at its beginning.
_SHORT, _LENGTH_BYTES = 64, 8
# torch 2.13 renamed these functions; both versions take (output, input, group=...).
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankError(RuntimeError):
    """Another rank raised an error, died, or did not reach a collective within the timeout."""


class PrivateRankError(RankError, PrivateRefusal):
    """This rank lost other ranks in a logical batch; one may have raised a `PrivateRefusal`.

    The error depends on private data, as a `PrivateRefusal` does.
    """


def world_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in a group."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: ProcessGroup | None) -> int:
    """Return the index of this rank in a group, from 0."""
    return 0 if group is None else dist.get_rank(group)


def ranks_of(group: ProcessGroup | None) -> list[int]:
    """Return the global ranks of a group, in the group's order."""
    if group is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return list(dist.get_process_group_ranks(group))


def digest(data: bytes | str) -> int:
    """Return a 64-bit hash of the contents, as an int64."""
    content = data.encode() if isinstance(data, str) else data
    word = hashlib.blake2b(content, digest_size=8).digest()
    return int.from_bytes(word, "little", signed=True)


@contextmanager
def exchanging(operation: str, group: ProcessGroup | None) -> Iterator[None]:
    """Convert errors of torch.distributed that the body raises to `RankError`."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RankError(
            f"{operation}: rank {rank_in(group)} of {world_size(group)} lost the others "
            f"({reason[0]}). One of them died, or did not reach this call within the group's "
            "timeout; most likely one rank alone made a call that all ranks must make, such as "
            "`if rank == 0: engine.save_checkpoint(...)`. "
            "End all ranks, look for the first error in their outputs, and resume from the last "
            "checkpoint"
        ) from error


def gather_rows(row: Sequence[int], group: ProcessGroup | None, operation: str) -> list[list[int]]:
    """Gather a row of integers from every rank. All rows must have the same length."""
    if group is None or world_size(group) == 1:
        return [list(row)]
    device = control_device(group)
    own = torch.tensor(row, dtype=torch.int64, device=device)
    rows = torch.empty(world_size(group) * len(row), dtype=torch.int64, device=device)
    with exchanging(operation, group):
        _all_gather(rows, own, group=group)
        table: list[list[int]] = rows.view(-1, len(row)).tolist()
    return table


def agree(
    operation: str,
    values: Mapping[str, object],
    group: ProcessGroup | None,
    extra: Sequence[int] = (),
    refusal: str | None = None,
) -> list[list[int]]:
    """Check that values are equal on all ranks of a group, which call this together.

    Args:
        operation: see the module.
        values: values by name; names and reprs must be equal on all ranks.
        group: see the module.
        extra: integers that may differ between ranks.
        refusal: why this rank refuses, without private values; None if it does not.

    Returns:
        `extra` of each rank.

    Raises:
        PrivateRefusal: on all ranks, if a rank refuses. The text is this rank's `refusal`, or else
            the `refusal` of the first rank that has one.
        ValueError: on all ranks, if a value differs (the message lists the value of each rank), or
            if a rank checks another operation.
    """
    if group is None or world_size(group) == 1:
        if refusal is not None:
            raise PrivateRefusal(refusal) from None
        return [list(extra)]
    digests = [digest(repr(value)) for value in values.values()]
    call = operation.partition("(")[0]
    row = [digest(call), *digests, *extra, int(refusal is not None)]
    rows = gather_rows(row + [0] * (-len(row) % _AGREED), group, operation)

    def texts_of(text: str) -> list[str]:
        texts = [""] * len(rows)
        with exchanging(operation, group):
            dist.all_gather_object(texts, text, group=group)
        return texts

    if len({own[0] for own in rows}) == 1 and any(own[len(row) - 1] for own in rows):
        reasons = texts_of(refusal or "")
        raise PrivateRefusal(refusal or next(filter(None, reasons))) from None
    if len({row[0] for row in rows}) > 1:
        calls = ", ".join(f"rank {rank} in {own}" for rank, own in enumerate(texts_of(call)))
        raise ValueError(
            f"the ranks are in different calls ({calls}): all ranks must make these calls in the "
            "same order; do not put `if rank == 0:` around them"
        )
    for index, name in enumerate(values, 1):
        if len({row[index] for row in rows}) == 1:
            continue
        texts = texts_of(repr(values[name]))
        shown = (text if len(str(text)) < 200 else f"{str(text)[:200]}..." for text in texts)
        listed = ", ".join(f"rank {rank} has {text}" for rank, text in enumerate(shown))
        raise ValueError(f"{operation}: {name} differs between ranks ({listed}); make it the same")
    begin = 1 + len(values)
    return [row[begin : begin + len(extra)] for row in rows]


def all_gather(x: Tensor, group: ProcessGroup, operation: str) -> Tensor:
    """Gather x from every rank: `[P, *x.shape]`. Shape and dtype are the same on all ranks."""
    gathered = x.new_empty((world_size(group), *x.shape))
    with exchanging(operation, group):
        _all_gather(gathered.view(-1), x.contiguous().view(-1), group=group)
    return gathered


def all_to_all(
    x: Tensor, sizes: Sequence[int], received: Sequence[int], group: ProcessGroup, operation: str
) -> Tensor:
    """Send each rank its part of x, and return the parts from all ranks in one tensor.

    Args:
        x: `[sum(sizes)]`, contiguous.
        sizes: number of elements to send to each rank.
        received: number of elements to receive from each rank.
        group, operation: see the module.
    """
    parts = x.new_empty(sum(received))
    with exchanging(operation, group):
        dist.all_to_all_single(parts, x, list(received), list(sizes), group=group)
    return parts


def reduce_scatter(x: Tensor, group: ProcessGroup, operation: str) -> Tensor:
    """Sum x `[P, ...]` over the ranks and return ``x[rank]`` of the sum."""
    own = torch.empty_like(x[0], memory_format=torch.contiguous_format)
    with exchanging(operation, group):
        _reduce_scatter(own.view(-1), x.contiguous().view(-1), group=group)
    return own


def all_reduce_(
    x: Tensor, group: ProcessGroup, operation: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Sum a contiguous x over the ranks in place, or reduce it by `op`; all get equal bits."""
    with exchanging(operation, group):
        dist.all_reduce(x, op=op, group=group)
    return x


def all_reduce_all_(tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Sum tensors over the ranks in place, in bundles."""
    if group is None:
        return
    for bundle in bundles(tensors):
        theirs = [tensors[i] for i in bundle]
        flat = torch.cat([tensor.reshape(-1) for tensor in theirs])
        all_reduce_(flat, group, "sum of gradients over the ranks")
        parts = flat.split([tensor.numel() for tensor in theirs])
        for tensor, part in zip(theirs, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def bundles(tensors: Sequence[Tensor], lengths: Sequence[int] = ()) -> Iterator[list[int]]:
    """Yield lists of indices of tensors to send together: one dtype and about 25 MiB per list.

    Args:
        tensors: the tensors; all ranks must pass the same dtypes.
        lengths: number of elements of each tensor to send, equal on all ranks; by default all.
    """
    sizes = lengths or [x.numel() for x in tensors]
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        bundle, size = list[int](), 0
        for i, x in enumerate(tensors):
            if x.dtype == dtype:
                bundle.append(i)
                size += sizes[i] * dtype.itemsize
            if size >= BUNDLE_BYTES:
                yield bundle
                bundle, size = [], 0
        if bundle:
            yield bundle


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as bytes `[x.nbytes]`, for backends that lack its dtype."""
    return x.view(-1).view(torch.uint8)


def broadcast_(x: Tensor, group: ProcessGroup, operation: str) -> None:
    """Overwrite x, of any dtype and strides, on all ranks with x of the group's rank 0."""
    with torch.no_grad():
        buffer = x.contiguous()
        with exchanging(operation, group):
            dist.broadcast(as_bytes(buffer), group=group, group_src=0)
        x.copy_(buffer)


def broadcast_from_first(value: bytes, group: ProcessGroup | None, operation: str) -> bytes:
    """Return the value of the group's rank 0 on all ranks of the group."""
    if group is None or world_size(group) == 1:
        return value
    device, content = control_device(group), value if rank_in(group) == 0 else b""
    # The length precedes the value, so that a short value takes one exchange.
    row = torch.zeros(_SHORT, dtype=torch.uint8)
    head = len(content).to_bytes(_LENGTH_BYTES, "little") + content[: _SHORT - _LENGTH_BYTES]
    row[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    row = row.to(device)
    broadcast_(row, group, operation)
    found = bytes(row.tolist())
    length = int.from_bytes(found[:_LENGTH_BYTES], "little")
    found = found[_LENGTH_BYTES:][:length]
    if length > len(found):
        rest = torch.zeros(length - len(found), dtype=torch.uint8)
        if content:
            rest = torch.frombuffer(bytearray(content[len(found) :]), dtype=torch.uint8)
        rest = rest.to(device)
        broadcast_(rest, group, operation)
        found += bytes(rest.tolist())
    return found


def control_device(group: ProcessGroup) -> torch.device:
    """Return the device for a group's small tensors: the CPU if a backend supports it."""
    kinds = [torch.device(kind).type for kind in group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.accelerator.current_device_index())
