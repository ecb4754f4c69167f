"""Sharded parameters: each rank holds some rows of a DTensor, as FSDP2 shards them.

DTensor is slow to import, so it is imported only if it was imported before.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

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


def local_shape(parameter: Tensor) -> torch.Size:
    """Shape of this rank's shard; of the whole parameter if it is not sharded."""
    if is_sharded(parameter):
        begin, end = local_rows(parameter)
        return torch.Size((end - begin, *parameter.shape[1:]))
    return parameter.shape


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
