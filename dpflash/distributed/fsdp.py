"""Parameters of which a worker holds a part, as FSDP2 leaves them: rows of a DTensor.

DTensor is slow to load, so it is only asked for where somebody else has loaded it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import collectives as workers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether this worker holds a part of the parameter only."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(parameter, library.DTensor)


def require_rows(name: str, parameter: Tensor) -> None:
    """Refuse a DTensor that is not cut along its first dimension over one mesh dimension."""
    if not is_sharded(parameter):
        return
    from torch.distributed.tensor import Shard

    if parameter.placements != (Shard(0),):
        raise ValueError(
            f"parameter '{name}' is placed as {parameter.placements}: expected (Shard(dim=0),), "
            "whose elements are consecutive in the noise stream; call fully_shard with a mesh of "
            "one dimension and without shard_placement_fn"
        )


def local_rows(parameter: DTensor) -> tuple[int, int]:
    """First and end row of this worker's part, as torch.chunk cuts them."""
    rows = parameter.shape[0]
    size = -(-rows // parameter.device_mesh.size())
    begin = min(size * parameter.device_mesh.get_local_rank(), rows)
    return begin, min(begin + size, rows)


def first_element(parameter: Tensor) -> int:
    """Where this worker's elements begin in the whole parameter."""
    if is_sharded(parameter):
        return local_rows(parameter)[0] * parameter.shape[1:].numel()
    return 0


def local_shape(parameter: Tensor) -> torch.Size:
    """Of this worker's part."""
    if is_sharded(parameter):
        begin, end = local_rows(parameter)
        return torch.Size((end - begin, *parameter.shape[1:]))
    return parameter.shape


def reduce_to_part(
    total: Tensor, parameter: DTensor, data: ProcessGroup | None, mark: int
) -> tuple[Tensor, Tensor]:
    """This worker's rows of a whole parameter's total, summed over the workers of `data`.

    Also whether other workers brought another mark, which tells parameters apart.
    """
    what = "reduction of a sharded parameter's clipped sum"
    begin, end = local_rows(parameter)
    if data is None:
        return total[begin:end].clone(), total.new_zeros((), dtype=torch.bool)
    mesh, count = parameter.device_mesh, workers.world_size(data)
    if mesh.size() == count and mesh.get_group() is data:
        parts = total.split(-(-total.shape[0] // count))
        sent = total.new_zeros((count, parts[0].numel() + 1))
        sent[:, -1] = mark
        for row, part in zip(sent, parts, strict=False):
            row[: part.numel()] = part.flatten()
        own = workers.reduce_scatter(sent, data, what)
        rows = own[: total[begin:end].numel()].view(total[begin:end].shape)
    else:
        own = torch.cat([total.flatten(), total.new_full((1,), mark)])
        workers.all_reduce_(own, data, what)
        rows = own[:-1].view(total.shape)[begin:end].clone()
    return rows, own[-1] != count * mark


def as_grad(grad: Tensor, parameter: Tensor) -> Tensor:
    """This worker's part of a gradient, as what an optimizer expects in `.grad`."""
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
