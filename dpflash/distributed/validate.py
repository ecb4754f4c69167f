"""Checks that all ranks share model, dataset and ledger, and synchronizes their parameters."""

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..privacy.keys import derive_key, uniform_words
from ..privacy.ledger import Ledger, LedgerCopy
from . import collectives
from .collectives import ranks_of
from .fsdp import holders, is_sharded, replicating_group, require_rows
from .mesh import Ranks

_OF_OPACUS = "DifferentiallyPrivateDistributedDataParallel"
_COMPARED = 14  # number of random entries that ranks compare, besides the first and the last entry


def open_ledger(path: str | os.PathLike[str] | None, ranks: Ranks) -> Ledger | None:
    """Open the ledger at a path on rank 0; return a read-only copy on the other ranks."""
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"ledger={path!r}: expected the path of a file, or None for no ledger")
    opened: list[Ledger] = []

    def read() -> bytes:
        opened.append(Ledger(path))
        return opened[0].content()

    content = ranks.run_on_first(f"ledger={os.fspath(path)!r}", read)
    return opened[0] if opened else LedgerCopy(path, content)


def check_module(module: nn.Module, ranks: Ranks) -> None:
    """Refuse a model whose wrappers or shards do not match the engine's ranks."""
    unsupported: tuple[type, ...] = (DataParallel,)
    supported: tuple[type, ...] = (DistributedDataParallel,)
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import: only if already imported
    if fsdp is not None:
        unsupported += (fsdp.FullyShardedDataParallel,)
        supported += (fsdp.FSDPModule,)
    for name, child in module.named_modules():
        where = f"module '{name}'" if name else "module"
        if isinstance(child, unsupported):
            raise ValueError(
                f"{where} is {type(child).__name__}, which private training does not support: use "
                "torch.distributed.fsdp.fully_shard or DistributedDataParallel, and "
                "PrivacyEngine(mesh=...)"
            )
        if isinstance(child, DistributedDataParallel) and child is not module:
            raise ValueError(
                f"{where} is wrapped in DistributedDataParallel: wrap the whole model"
            )
        is_replica = isinstance(child, supported) or type(child).__name__ == _OF_OPACUS
        if ranks.everyone is None and is_replica:
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"{where} is {type(child).__name__} over several ranks, but the engine has no "
                    "mesh: each rank would add its own noise and count its own steps. Pass "
                    "PrivacyEngine(mesh=init_device_mesh(..., mesh_dim_names=('data',)))"
                )
    # Modules of fully_shard gather their parameters for the forward. Other DTensors stay sharded.
    fully_sharded = {
        id(p)
        for child in module.modules()
        if fsdp is not None and isinstance(child, fsdp.FSDPModule)
        for p in child.parameters()
    }
    groups = [set(ranks_of(group)) for group in (ranks.everyone, ranks.data, ranks.context)]
    for name, parameter in module.named_parameters():
        require_rows(name, parameter)
        if not is_sharded(parameter):
            continue
        if id(parameter) not in fully_sharded:
            raise ValueError(
                f"parameter '{name}' is a DTensor that fully_shard did not make: private training "
                "does not support tensor parallelism. Use a plain parameter, or fully_shard"
            )
        if set(holders(parameter)) not in groups:
            raise ValueError(
                f"parameter '{name}' is sharded over the ranks {holders(parameter)}: expected all "
                "ranks of the mesh, of its data dimensions, or of its context dimension; call "
                "fully_shard with mesh['data'], or with mesh['dp_replicate', 'dp_shard'] if the "
                "mesh has these dimensions"
            )
    _check_context(module, ranks)
    if isinstance(module, DistributedDataParallel):
        _check_replicas(module, ranks)


def _check_context(module: nn.Module, ranks: Ranks) -> None:
    is_context_parallel = False
    for name, child in module.named_modules():
        context = getattr(child, "context_parallel", None)
        if context is None:
            continue
        group = context.group
        if collectives.world_size(group) == 1:
            continue
        is_context_parallel = True
        if ranks.context is None or ranks_of(group) != ranks_of(ranks.context):
            raise ValueError(
                f"module '{name}' is context parallel over {collectives.world_size(group)} ranks, "
                "but the engine's mesh has no such dimension: each norm would cover only one "
                "rank's part of a sample. "
                "Pass PrivacyEngine(mesh=...) the mesh with its 'context' dimension"
            )
    if ranks.context is not None and not is_context_parallel:
        raise ValueError(
            f"the mesh has a context of {collectives.world_size(ranks.context)} ranks, but the "
            "model is not context parallel: each rank would treat its tokens as whole samples. "
            "Call dpflash.distributed.context_parallel(model, mesh) before make_private"
        )


def _check_replicas(module: DistributedDataParallel, ranks: Ranks) -> None:
    if module._comm_hooks:
        raise ValueError(
            "module has its own communication hook, which would see gradients before the noise is "
            "added; remove the call to register_comm_hook"
        )
    if module.static_graph:
        raise ValueError(
            "module is DistributedDataParallel(static_graph=True), which reduces gradients itself "
            "in the first backward, but private training reduces them in the step: leave "
            "static_graph out"
        )
    if ranks_of(module.process_group) != ranks_of(ranks.data):
        raise ValueError(
            f"module is DistributedDataParallel over the ranks {ranks_of(module.process_group)}, "
            f"but the data dimension of the engine's mesh has the ranks {ranks_of(ranks.data)}; "
            "pass process_group=mesh.get_group('data')"
        )


def digests_of(dataset: Any, key: bytes) -> list[str]:
    """Return keyed digests of some entries; "" for an entry that differs between two reads."""
    count = len(dataset)
    indices = {0, count - 1}
    words = uniform_words(derive_key(key, "entries to compare"), index=0, count=_COMPARED)
    indices |= {int(word) % count for word in words}
    found = []
    for index in sorted(indices):
        first, second = (_entry_digest(dataset[index], key) for _ in range(2))
        found.append(first if first == second else "")
    return found


def require_same_data(digests: list[str], ranks: Ranks) -> None:
    """Raise a ValueError on all ranks if a compared entry differs between ranks."""
    for entry in zip(*ranks.gather(digests, "make_private"), strict=True):
        if "" not in entry and len(set(entry)) > 1:
            raise ValueError(
                "data_loader.dataset differs between ranks: expected the same entries in the same "
                "order on all of them, because the loader divides each logical batch over the "
                "ranks. Sort lists of files (glob, os.listdir) and sets, shuffle with the same "
                "seed on all ranks, and do not split the dataset yourself"
            )


def _entry_digest(entry: Any, key: bytes) -> str:
    """Return a digest of an entry, equal for equal entries; "" if its type has no digest."""
    if isinstance(entry, Tensor) and entry.layout is torch.strided:
        kind = f"{entry.dtype} {tuple(entry.shape)}"
        content = collectives.as_bytes(entry.detach().cpu().contiguous()).numpy().tobytes()
    elif isinstance(entry, np.ndarray | np.generic) and not entry.dtype.hasobject:
        kind, content = f"{entry.dtype} {entry.shape}", entry.tobytes()
    elif isinstance(entry, Mapping | list | tuple):
        kind = "mapping" if isinstance(entry, Mapping) else "sequence"
        inside = entry.items() if isinstance(entry, Mapping) else entry
        digests = [_entry_digest(x, key) for x in inside]
        if "" in digests:
            return ""
        content = "".join(sorted(digests) if kind == "mapping" else digests).encode()
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


def synchronize_ranks(module: nn.Module, ranks: Ranks) -> None:
    """Broadcast parameters and buffers from rank 0, and disable DDP's all-reduce of gradients."""
    tensors = [x.detach() for x in (*module.parameters(), *module.buffers())]
    operation = "broadcast of rank 0's parameters"
    ranks.broadcast_([x for x in tensors if not is_sharded(x)], operation)
    for x in filter(is_sharded, tensors):
        copies = [replicating_group(x)]
        for group in (ranks.data, ranks.context):
            # Ranks outside of the parameter's mesh hold copies of the same rows in other meshes.
            if set(ranks_of(group)) & set(holders(x)) == {dist.get_rank()}:
                copies.append(group)
        for group in copies:
            if group is not None:
                collectives.broadcast_(x.to_local(), group, operation)
    if isinstance(module, DistributedDataParallel):
        # The step sums over ranks. DDP's reducer would only write zeros into `.grad`.
        module.require_backward_grad_sync = False


def release_ranks(module: nn.Module) -> None:
    """Enable DDP's all-reduce of gradients again, see `synchronize_ranks`."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = True
