"""The mesh of ranks that cases share: making one is an exchange of all of them."""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def mesh_of(context: int) -> DeviceMesh:
    """All ranks, `context` of them sharing each sample."""
    shape = (dist.get_world_size() // context, context)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))
