"""Sharded parameters: each rank holds some rows of a DTensor, as FSDP2 shards them.

DTensor is slow to import, so it is imported only if it was imported before.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import collectives

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether this rank holds only some rows of the parameter."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(parameter, library.DTensor)


def require_rows(name: str, parameter: Tensor) -> None:
    """Raise a ValueError for a DTensor that is not ``Shard(0)`` over one mesh dimension."""
    if not is_sharded(parameter):
        return
    from torch.distributed.tensor import Shard

    if parameter.placements != (Shard(0),):
        raise ValueError(
            f"parameter '{name}' has placements {parameter.placements}: expected (Shard(dim=0),), "
            "whose elements are consecutive in the noise stream; call fully_shard with a mesh of "
            "one dimension and without shard_placement_fn"
        )


def local_rows(parameter: DTensor) -> tuple[int, int]:
    """First and end row of this rank's shard, as torch.chunk splits them."""
    rows = parameter.shape[0]
    size = -(-rows // parameter.device_mesh.size())
    begin = min(size * parameter.device_mesh.get_local_rank(), rows)
    return begin, min(begin + size, rows)


def first_element(parameter: Tensor) -> int:
    """Index of this rank's first element in the whole parameter."""
    if is_sharded(parameter):
        return local_rows(parameter)[0] * parameter.shape[1:].numel()
    return 0


def local_shape(parameter: Tensor) -> torch.Size:
    """Shape of this rank's shard; of the whole parameter if it is not sharded."""
    if is_sharded(parameter):
        begin, end = local_rows(parameter)
        return torch.Size((end - begin, *parameter.shape[1:]))
    return parameter.shape


def reduce_to_part(
    total: Tensor, parameter: DTensor, data: ProcessGroup | None, mark: int
) -> tuple[Tensor, Tensor]:
    """This rank's rows of a whole parameter's total, summed over the ranks of `data`.

    Also returns whether other ranks passed another `mark`, a number that identifies the parameter.
    """
    operation = "reduction of a sharded parameter's clipped sum"
    begin, end = local_rows(parameter)
    if data is None:
        return total[begin:end].clone(), total.new_zeros((), dtype=torch.bool)
    mesh, count = parameter.device_mesh, collectives.world_size(data)
    if mesh.size() == count and mesh.get_group() is data:
        shards = total.split(-(-total.shape[0] // count))
        send = total.new_zeros((count, shards[0].numel() + 1))
        send[:, -1] = mark
        for row, shard in zip(send, shards, strict=False):
            row[: shard.numel()] = shard.flatten()
        own = collectives.reduce_scatter(send, data, operation)
        rows = own[: total[begin:end].numel()].view(total[begin:end].shape)
    else:
        own = torch.cat([total.flatten(), total.new_full((1,), mark)])
        collectives.all_reduce_(own, data, operation)
        rows = own[:-1].view(total.shape)[begin:end].clone()
    return rows, own[-1] != count * mark


def as_grad(grad: Tensor, parameter: Tensor) -> Tensor:
    """Wrap this rank's shard of a gradient in the type that an optimizer expects in `.grad`."""
    if not is_sharded(parameter):
        return grad
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        grad,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
