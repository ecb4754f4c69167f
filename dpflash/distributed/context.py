"""Whole models over sequences whose tokens lie on several workers.

Letters: B samples, T tokens, T_p those of worker p.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dpflash import _validate
from dpflash.distributed.collectives import digest, gather_rows, world_size

from .agreement import (
    MODES,
    Context,
    layout_agreed,
    length_within,
    lengths_agreed,
    resolve_group,
)
from .layout import SHARDINGS
from .shards import shard_sequence, unshard_sequence
from .wire import all_reduce

CONTEXT = "context"
_ENOUGH = 32  # tokens of a worker that are not alike by chance
_Model = TypeVar("_Model", bound=nn.Module)

# What mixes tokens by itself, and what then would be wrong without a word.
_MIXES_TOKENS: dict[tuple[type[nn.Module], ...], str] = {
    (nn.MultiheadAttention,): "attends to this worker's tokens only; use "
    "dpflash.nn.MultiheadAttention",
    (nn.RNNBase, nn.RNNCellBase): "would start anew on every worker; leave it out",
    (nn.modules.conv._ConvNd,): "would see the borders of shards as those of the sequence; for "
    "kernels of one token use torch.nn.Linear",
    (nn.modules.batchnorm._NormBase, nn.GroupNorm): "takes its statistics over this worker's "
    "tokens only; use torch.nn.LayerNorm",
    (
        nn.modules.pooling._MaxPoolNd,
        nn.modules.pooling._AvgPoolNd,
        nn.modules.pooling._AdaptiveMaxPoolNd,
        nn.modules.pooling._AdaptiveAvgPoolNd,
        nn.modules.pooling._LPPoolNd,
        nn.modules.pooling._MaxUnpoolNd,
        nn.FractionalMaxPool2d,
        nn.FractionalMaxPool3d,
    ): "pools over this worker's tokens only; pool behind the model, over "
    "dpflash.distributed.unshard_sequence",
}


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """Among whom a model's sequences are sharded, and how.

    Attributes:
        group: the workers that share sequences; None is a process by itself.
        mode: how keys and values travel, see `ring_attention`.
        sharding: who has which tokens, see `Layout`.
    """

    group: ProcessGroup | None
    mode: str = "auto"
    sharding: str = "contiguous"

    @classmethod
    def of(
        cls, mesh: DeviceMesh, mode: str = "auto", sharding: str | None = None
    ) -> ContextParallel:
        """That of a mesh with a dimension named "context", or of one without names.

        Args:
            mesh: its dimension "context" holds the workers that share sequences.
            mode: "ring", "all_gather", "ulysses" or "auto".
            sharding: "contiguous", which None means, or "zigzag".

        Raises:
            ValueError: the mesh has no such dimension, or an unknown mode or sharding.
        """
        sharding = "contiguous" if sharding is None else sharding
        _validate.one_of(mode=(mode, (*MODES, "auto")), sharding=(sharding, SHARDINGS))
        return cls(_group_of(mesh), mode, sharding)

    def agreed(
        self,
        tokens: int,
        *,
        length: int | None = None,
        refused: ValueError | None = None,
        **values: object,
    ) -> Context:
        """The context of one call, after all workers have said that it is the same call.

        Args:
            tokens: T_p, how many tokens this worker has.
            length: positions from this one on are padding.
            refused: why this worker cannot go on; all workers then raise it.
            values: what must be the same on all workers; of a repr that tells it apart.

        Raises:
            ValueError: on all workers: what was refused or differs, shards that are not those of
                `shard`, or a length greater than the sequence.
        """
        everything = {**values, "length": length, "mode": self.mode, "sharding": self.sharding}
        what = "context parallelism"
        lengths = lengths_agreed(what, everything, tokens, self.group, refused)
        layout = layout_agreed(what, lengths, self.sharding)
        return Context(self.group, layout, self.mode, length_within(length, layout.num_tokens))

    def warn_of_copies(self, context: Context, x: Tensor) -> None:
        """Warn where all workers have the same tokens, as if nobody had cut the sequence.

        Args:
            context: of the call.
            x: `[B, T_p]`, integers.
        """
        layout, size = context.layout, context.layout.world_size
        # The same answer on all workers, for they exchange behind it.
        if (
            size == 1
            or layout.num_tokens % size
            or layout.num_tokens * x.shape[0] < _ENOUGH * size
        ):
            return
        content = x.detach().cpu().contiguous().numpy().tobytes()
        rows = gather_rows([digest(content)], self.group, "first look at the tokens")
        if len({row[0] for row in rows}) == 1:
            warnings.warn(
                f"all {size} workers of the context have the same {x.shape[1]} tokens, which "
                f"count as one sequence of {layout.num_tokens}: give each its own, x = "
                "model.context_parallel.shard(x), the targets too",
                stacklevel=4,
            )

    def spread(self, model: nn.Module) -> None:
        """Tell a model's modules of it; see `context_parallel`, which refuses the same."""
        takers = []
        for name, module in model.named_modules():
            where = f"'{name}'" if name else "the model itself"
            for kinds, why in _MIXES_TOKENS.items():
                if isinstance(module, kinds):
                    raise ValueError(f"{where} is a {type(module).__name__}: it {why}")
            if not getattr(module, "takes_context_parallel", False):
                continue
            if getattr(module, "context_parallel", None) is not None:
                raise ValueError(
                    f"{where} is context parallel already: expected a model that is not; call "
                    "context_parallel once"
                )
            refuse = getattr(module, "refuse_context_parallel", None)
            reason = None if refuse is None else refuse()
            if reason is not None:
                raise ValueError(f"{where} is a {type(module).__name__}: {reason}")
            takers.append(module)
        if not takers:
            raise ValueError(
                f"model={type(model).__name__} has no attention that reaches other workers' "
                "tokens; use dpflash.nn.MultiheadAttention, or "
                "dpflash.distributed.ring_attention in its forward"
            )
        # Also where the model itself takes none: its `shard` cuts the inputs alike.
        for module in (*takers, model):
            module.context_parallel = self

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This worker's tokens of a sequence that all workers hold, see `shard_sequence`."""
        return x.clone() if self.group is None else shard_sequence(x, dim, *self._cut())

    def unshard(self, x: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """The whole sequence on every worker, see `unshard_sequence`."""
        if self.group is None:
            return x.narrow(dim, 0, length_within(length, x.shape[dim])).clone()
        return unshard_sequence(x, dim, *self._cut(), length)

    def _cut(self) -> tuple[ProcessGroup | None, str]:
        return self.group, self.sharding


def context_parallel(
    model: _Model, mesh: DeviceMesh, *, mode: str = "auto", sharding: str = "contiguous"
) -> _Model:
    """Makes a model take this worker's tokens of each sequence instead of whole sequences.

    Its attention reaches the other workers' tokens, its positions are those of the whole
    sequence; everything else works on each token by itself and stays as it is.

    Args:
        model: its attention modules are those of `dpflash.nn`; changed in place.
        mesh: a DeviceMesh with a dimension named "context".
        mode: how keys and values travel, see `ring_attention`.
        sharding: who has which tokens, see `Layout`; give `shard_sequence` the same.

    Returns:
        The model; ``model.context_parallel.shard(x)`` cuts its inputs and targets.

    Raises:
        ValueError: the model has no attention of `dpflash.nn`, has a module that mixes tokens by
            itself, or is context parallel already; the mesh has no dimension "context".
    """
    ContextParallel.of(mesh, mode, sharding).spread(model)
    return model


def loss_weights(
    targets: Tensor,
    mesh_or_group: DeviceMesh | ProcessGroup | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """What part of each sample's valid targets this worker has.

    ``losses.cross_entropy(logits, targets) * loss_weights(targets, mesh)``, summed over the
    workers of the context group, is the mean over all valid targets of each sample.

    Args:
        targets: `[B, T_p, ...]`, this worker's; already shifted before they were cut.
        mesh_or_group: a DeviceMesh with a dimension "context", or the group itself; None means the
            default group, or without torch.distributed this process by itself.
        ignore_index: targets of this value do not count.

    Returns:
        `[B]`, float32: valid targets of this worker over those of all, 0 where none is valid.

    Raises:
        ValueError: targets without a dimension of samples, a number of samples that differs
            between workers, or a mesh without a dimension "context".
    """
    if isinstance(mesh_or_group, DeviceMesh):
        group = _group_of(mesh_or_group)
    else:
        group = resolve_group(mesh_or_group)
    refused = None
    if not isinstance(targets, Tensor) or targets.ndim < 2:
        shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        refused = ValueError(
            f"targets={shape}: expected a tensor [B, T_p, ...]; add the dimension of samples with "
            "unsqueeze(0)"
        )
    values = {
        "number of samples": None if refused else targets.shape[0],
        "ignore_index": ignore_index,
    }
    lengths_agreed("loss_weights", values, 0, group, refused)
    own = (targets != ignore_index).flatten(1).sum(1)
    if group is None or world_size(group) == 1:
        total = own
    else:
        total = all_reduce(own, group, "number of valid targets", "forward")
    return own.to(torch.float32) / total.clamp(min=1).to(torch.float32)


def _group_of(mesh: object) -> ProcessGroup | None:
    """The group of a mesh's dimension "context"."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh={type(mesh).__name__}: expected a DeviceMesh; make one with "
            "torch.distributed.device_mesh.init_device_mesh(device_type, (workers,), "
            "mesh_dim_names=('context',))"
        )
    names = mesh.mesh_dim_names
    if names is not None and CONTEXT in names:
        return mesh.get_group(CONTEXT)
    if names is None and mesh.ndim == 1:
        return mesh.get_group(0)
    raise ValueError(
        f"mesh has dimensions {names or mesh.ndim}: expected one named 'context', the workers "
        "that share a sequence; pass mesh_dim_names=('data', 'context') to init_device_mesh"
    )
