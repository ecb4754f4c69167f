"""What workers must have in common before they train one model together."""

import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from . import workers as _workers
from .ledger import Ledger, LedgerCopy
from .mesh import Workers
from .sharding import is_sharded, require_rows


def open_ledger(path: str | os.PathLike[str] | None, workers: Workers) -> Ledger | None:
    """The ledger at a path, which the first worker keeps and the others copy."""
    if path is None:
        return None
    kept: list[Ledger] = []

    def read() -> bytes:
        kept.append(Ledger(path))
        return kept[0].content

    content = workers.first_does(f"ledger={os.fspath(path)!r}", read)
    return kept[0] if kept else LedgerCopy(path, content)


def check_module(module: nn.Module, workers: Workers) -> None:
    """Refuse a model whose wrappers and shards do not belong to the engine's workers.

    Raises:
        ValueError: naming the module or parameter and the way out.
    """
    unknown: tuple[type, ...] = (DataParallel,)
    known: tuple[type, ...] = (DistributedDataParallel,)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to load, and by its users only
    if fsdp is not None:
        unknown += (fsdp.FullyShardedDataParallel,)
        known += (fsdp.FSDPModule,)
    for name, child in module.named_modules():
        where = f"module '{name}'" if name else "module"
        if isinstance(child, unknown):
            raise ValueError(
                f"{where} is {type(child).__name__}, which private training does not know: use "
                "torch.distributed.fsdp.fully_shard or DistributedDataParallel, and "
                "PrivacyEngine(mesh=...)"
            )
        if isinstance(child, DistributedDataParallel) and child is not module:
            raise ValueError(
                f"{where} is wrapped in DistributedDataParallel: wrap the whole model"
            )
        if workers.everyone is None and isinstance(child, known):
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"{where} is {type(child).__name__} over several workers, and the engine does "
                    "not know of them: each would add noise and count steps by itself. Pass "
                    "PrivacyEngine(mesh=init_device_mesh(..., mesh_dim_names=('data',)))"
                )
    for name, parameter in module.named_parameters():
        require_rows(name, parameter)
    _check_context(module, workers)
    if isinstance(module, DistributedDataParallel):
        _check_replicas(module, workers)


def _check_context(module: nn.Module, workers: Workers) -> None:
    """A model that sees a part of each sample needs a mesh that says so, and the reverse."""
    split = False
    for name, child in module.named_modules():
        context = getattr(child, "context_parallel", None)
        if context is None:
            continue
        group = context.group
        if _workers.world_size(group) == 1:
            continue
        split = True
        if workers.context is None or _ranks(group) != _ranks(workers.context):
            raise ValueError(
                f"module '{name}' is parallel over the context of {_workers.world_size(group)} "
                "workers, and the engine's mesh has no such dimension: norms would be of parts "
                "of samples. Pass PrivacyEngine(mesh=...) the mesh with its 'context' dimension"
            )
    if workers.context is not None and not split:
        raise ValueError(
            f"the mesh has a context of {_workers.world_size(workers.context)} workers, and the "
            "model is not parallel over it: each worker would take its tokens for whole samples. "
            "Call dpflash.distributed.context_parallel(model, mesh) before make_private"
        )


def _check_replicas(module: DistributedDataParallel, workers: Workers) -> None:
    if _ranks(module.process_group) != _ranks(workers.data):
        raise ValueError(
            f"module is DistributedDataParallel over the workers {_ranks(module.process_group)}, "
            f"and the data dimension of the engine's mesh holds {_ranks(workers.data)}; pass "
            "process_group=mesh.get_group('data')"
        )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    return [0] if group is None else list(dist.get_process_group_ranks(group))


def join(module: nn.Module, workers: Workers) -> None:
    """Make copies of parameters and buffers equal, and gradients the clipping gates' business."""
    copies: list[Tensor] = [*module.parameters(), *module.buffers()]
    workers.broadcast_(
        [x.detach() for x in copies if not is_sharded(x)], "the first worker's parameters"
    )
    if isinstance(module, DistributedDataParallel):
        held = module.__dict__.get(_REDUCTION)
        if held is None:
            held = module.__dict__[_REDUCTION] = _Reduction(module.process_group)
            module.register_comm_hook(held, _reduce)
        held.is_private = True


def part(module: nn.Module) -> None:
    """Undo what `join` did to the gradients of a wrapped module."""
    held = module.__dict__.get(_REDUCTION)
    if held is not None:
        held.is_private = False


# A module takes one hook, for good.
_REDUCTION = "_dpflash_reduction"


@dataclass
class _Reduction:
    """Who reduces the gradients of a DistributedDataParallel module over its workers."""

    group: dist.ProcessGroup
    is_private: bool = True


def _reduce(reduction: _Reduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Private gradients stay as they are: the optimizer's step sums what the gates made."""
    if not reduction.is_private:
        return allreduce_hook(reduction.group, bucket)
    own: torch.futures.Future[Tensor] = torch.futures.Future()
    own.set_result(bucket.buffer())
    return own
