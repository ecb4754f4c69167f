"""What workers must have in common before they train one model together."""

import hashlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..privacy.keys import derive_key, uniform_words
from ..privacy.ledger import Ledger, LedgerCopy
from . import collectives as _workers
from .fsdp import is_sharded, require_rows
from .mesh import Workers


def open_ledger(path: str | os.PathLike[str] | None, workers: Workers) -> Ledger | None:
    """The ledger at a path, which the first worker keeps and the others copy."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"ledger={path!r}: expected the path of a file, or None for no ledger")
    kept: list[Ledger] = []

    def read() -> bytes:
        kept.append(Ledger(path))
        return kept[0].content()

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
    # What fully_shard cut knows how to put itself together; what else did, does not.
    within = {
        id(p)
        for child in module.modules()
        if fsdp is not None and isinstance(child, fsdp.FSDPModule)
        for p in child.parameters()
    }
    for name, parameter in module.named_parameters():
        require_rows(name, parameter)
        if is_sharded(parameter) and id(parameter) not in within:
            raise ValueError(
                f"parameter '{name}' is a DTensor, and no module around it went through "
                "fully_shard: tensor parallelism has no rule for private training. Use a plain "
                "parameter, or fully_shard"
            )
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
    if module._comm_hooks and module.__dict__.get(_REDUCTION) is None:
        raise ValueError(
            "module has a communication hook of its own, which would see gradients before the "
            "noise; leave register_comm_hook out"
        )
    if _ranks(module.process_group) != _ranks(workers.data):
        raise ValueError(
            f"module is DistributedDataParallel over the workers {_ranks(module.process_group)}, "
            f"and the data dimension of the engine's mesh holds {_ranks(workers.data)}; pass "
            "process_group=mesh.get_group('data')"
        )


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    if group is None:
        return [dist.get_rank() if dist.is_initialized() else 0]
    return list(dist.get_process_group_ranks(group))


def digests_of(dataset: Any, key: bytes) -> list[str]:
    """Digests of some entries, keyed; of one that differs from call to call an empty one."""
    count = len(dataset)
    indices = {0, count - 1}
    words = uniform_words(derive_key(key, "entries to compare"), index=0, count=_COMPARED)
    indices |= {int(word) % count for word in words}
    found = []
    for index in sorted(indices):
        first, second = (_entry_digest(dataset[index], key) for _ in range(2))
        found.append(first if first == second else "")
    return found


def require_same_data(digests: list[str], workers: Workers) -> None:
    """Refuse data sets that differ between workers in one of the entries that were compared.

    Raises:
        ValueError: on all of them.
    """
    for entry in zip(*workers.gather(digests, "make_private"), strict=True):
        if "" not in entry and len(set(entry)) > 1:
            raise ValueError(
                "data_loader.dataset holds other entries on other workers: expected the same data "
                "set on all of them, from which each draw is dealt out; do not cut it up before"
            )


_COMPARED = 14


def _entry_digest(entry: Any, key: bytes) -> str:
    """The same for equal entries, whatever objects they share; empty where that is not known."""
    if isinstance(entry, Tensor) and entry.layout is torch.strided:
        held = entry.detach().cpu().contiguous()
        kind = f"{entry.dtype} {tuple(entry.shape)}"
        content = _workers.as_bytes(held).numpy().tobytes()
    elif isinstance(entry, np.ndarray | np.generic) and not entry.dtype.hasobject:
        kind, content = f"{entry.dtype} {entry.shape}", entry.tobytes()
    elif isinstance(entry, Mapping | list | tuple):
        kind = "mapping" if isinstance(entry, Mapping) else "sequence"
        inside = entry.items() if isinstance(entry, Mapping) else entry
        parts = [_entry_digest(x, key) for x in inside]
        if "" in parts:
            return ""
        content = "".join(sorted(parts) if kind == "mapping" else parts).encode()
    elif isinstance(entry, str):
        kind, content = "str", entry.encode("utf-8", "surrogatepass")
    elif isinstance(entry, bytes):
        kind, content = "bytes", entry
    elif entry is None or isinstance(entry, int | float | complex):
        kind, content = "number", repr(entry).encode()
    else:
        return ""
    whole = kind.encode() + b"\0" + content
    return hashlib.blake2b(whole, key=key, digest_size=16).hexdigest()


def join(module: nn.Module, workers: Workers) -> None:
    """Make copies of parameters and buffers equal, and gradients the clipping gates' business."""
    copies = [x.detach() for x in (*module.parameters(), *module.buffers())]
    what = "the first worker's parameters"
    workers.broadcast_([x for x in copies if not is_sharded(x)], what)
    if workers.context is not None:
        apart = set(_ranks(workers.context)) - {dist.get_rank()}
        for x in copies:
            # Rows that the workers of a context hold alike, each from its own group of data.
            if is_sharded(x) and not apart & set(x.device_mesh.mesh.flatten().tolist()):
                _workers.broadcast_(x.to_local(), workers.context, what)
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
