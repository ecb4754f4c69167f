"""The mesh of ranks that cases share: making one is an exchange of all of them."""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@functools.cache
def mesh_of(context: int) -> DeviceMesh:
    """All ranks, `context` of them sharing each sample."""
    shape = (dist.get_world_size() // context, context)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "context"))


@functools.cache
def hybrid_mesh_of(context: int) -> DeviceMesh:
    """The same in torchtitan's dimensions, with two copies of sharded parameters."""
    shape = (2, dist.get_world_size() // (2 * context), context)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
