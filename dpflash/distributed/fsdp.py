"""Sharded parameters: each rank holds some rows of a DTensor, as FSDP2 shards them.

On a mesh of two dimensions (HSDP), ranks along the last dimension hold different rows, and ranks
along the first dimension hold copies.

DTensor is slow to import, so it is used only if other code has imported it already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .collectives import rank_in, world_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Return whether this rank holds only some rows of the parameter."""
    library = sys.modules.get("torch.distributed.tensor")
    return library is not None and isinstance(parameter, library.DTensor)


def require_rows(name: str, parameter: Tensor) -> None:
    """Raise a ValueError for a DTensor unless it is ``Shard(0)`` over the last mesh dimension.

    The mesh may have one more dimension before the last, over which the DTensor is replicated.
    """
    if not is_sharded(parameter):
        return
    from torch.distributed.tensor import Replicate, Shard

    if parameter.placements not in ((Shard(0),), (Replicate(), Shard(0))):
        raise ValueError(
            f"parameter '{name}' has placements {parameter.placements}: expected (Shard(dim=0),) "
            "or (Replicate(), Shard(dim=0)), so that each rank draws consecutive elements of the "
            "noise stream; call fully_shard with a mesh of one dimension, or of "
            "('dp_replicate', 'dp_shard'), and without shard_placement_fn"
        )


def holders(parameter: DTensor) -> list[int]:
    """Return the ranks of the parameter's mesh."""
    ranks: list[int] = parameter.device_mesh.mesh.flatten().tolist()
    return ranks


def sharding_group(parameter: DTensor) -> ProcessGroup:
    """Return the ranks that share the parameter's rows."""
    return parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1)


def replicating_group(parameter: DTensor) -> ProcessGroup | None:
    """Return the ranks that hold copies of this rank's rows of the parameter, or None."""
    mesh = parameter.device_mesh
    return mesh.get_group(0) if mesh.ndim > 1 else None


def local_rows(parameter: DTensor) -> tuple[int, int]:
    """Return (first row, end row) of this rank's shard; rows are split as by torch.chunk."""
    rows, group = parameter.shape[0], sharding_group(parameter)
    size = -(-rows // world_size(group))
    begin = min(size * rank_in(group), rows)
    return begin, min(begin + size, rows)


def local_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of this rank's shard, or of the parameter if it is not sharded."""
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
