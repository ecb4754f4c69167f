"""Parameters of which a worker holds a part, as FSDP2 leaves them: rows of a DTensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from . import workers


def is_sharded(parameter: Tensor) -> bool:
    """Whether this worker holds a part of the parameter only."""
    return isinstance(parameter, DTensor)


def require_rows(name: str, parameter: Tensor) -> None:
    """Refuse a DTensor that is not cut along its first dimension over one mesh dimension."""
    if isinstance(parameter, DTensor) and parameter.placements != (Shard(0),):
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
    if not isinstance(parameter, DTensor):
        return 0
    return local_rows(parameter)[0] * parameter.shape[1:].numel()


def local_shape(parameter: Tensor) -> torch.Size:
    """Of this worker's part."""
    if not isinstance(parameter, DTensor):
        return parameter.shape
    begin, end = local_rows(parameter)
    return torch.Size((end - begin, *parameter.shape[1:]))


def reduce_to_part(total: Tensor, parameter: DTensor, data: ProcessGroup | None) -> Tensor:
    """This worker's rows of a whole parameter's total, summed over the workers of `data`."""
    what = "reduction of a sharded parameter's clipped sum"
    begin, end = local_rows(parameter)
    if data is None:
        return total[begin:end].clone()
    mesh = parameter.device_mesh
    if mesh.size() == workers.world_size(data) and mesh.get_group() is data:
        size = -(-total.shape[0] // mesh.size())
        padded = total.new_zeros((size * mesh.size(), *total.shape[1:]))
        padded[: total.shape[0]] = total
        own = workers.reduce_scatter(padded.unflatten(0, (-1, size)), data, what)
        return own[: end - begin].clone()
    return workers.all_reduce_(total.contiguous(), data, what)[begin:end].clone()


def as_grad(grad: Tensor, parameter: nn.Parameter) -> Tensor:
    """This worker's part of a gradient, as what an optimizer expects in `.grad`."""
    if not isinstance(parameter, DTensor):
        return grad
    return DTensor.from_local(
        grad,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
