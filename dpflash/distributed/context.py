"""Context parallelism: shard sequences over ranks and run whole models on the shards.

Shapes: B samples, T tokens, T_p tokens of rank p.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dpflash import _validate
from dpflash.distributed.collectives import digest, gather_rows, rank_in, world_size
from dpflash.packing import PackedBatch, Units

from ..refusal import PrivateWarning, warn
from ..verification.second_order import differentiable_once
from . import pretrained
from .agreement import (
    MODES,
    Context,
    DeferredError,
    agree_on_lengths,
    layout_of,
    resolve_group,
    unpadded_length,
)
from .exchange import all_gather, all_reduce, reduce_scatter
from .layout import SHARDINGS, Layout
from .mesh import OF_CONTEXT
from .traffic import ModeCall, describe_modes

_ENOUGH = 32  # equal tokens on all ranks are no coincidence if each rank has this number of tokens
_Model = TypeVar("_Model", bound=nn.Module)

# Modules that mix the tokens of one rank only -> why results would be wrong; the replacement.
_MIXES_TOKENS: dict[tuple[type[nn.Module], ...], str] = {
    (nn.MultiheadAttention,): "attends to this rank's tokens only; use "
    "dpflash.nn.MultiheadAttention",
    (nn.RNNBase, nn.RNNCellBase): "would restart on every rank; remove it",
    (nn.modules.conv._ConvNd,): "would treat the ends of a shard as the ends of the sequence; for "
    "kernels of one token use torch.nn.Linear",
    (nn.modules.batchnorm._NormBase, nn.GroupNorm): "computes its statistics over this rank's "
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
    ): "pools over this rank's tokens only; pool the result of "
    "dpflash.distributed.unshard_sequence after the model",
}


def shard_sequence(
    x: Tensor,
    dim: int,
    group: ProcessGroup | None = None,
    sharding: str = "contiguous",
) -> Tensor:
    """Return this rank's tokens of a sequence that all ranks hold.

    Args:
        x: any shape and dtype, the same shape on all ranks; T tokens along `dim`.
        dim: dimension of the tokens.
        group: the ranks that share the sequence; all of them call this function. None means the
            default group, or a single process without torch.distributed.
        sharding: "contiguous" or "zigzag", see `Layout`. Any T is supported.

    Returns:
        A contiguous copy of this rank's tokens in the layout's order. It is differentiable. The
        gradient of x is 0 for the tokens of other ranks: sum this gradient over the ranks.

    Raises:
        ValueError: on all ranks: T is smaller than the number of ranks, or a shape, dtype, dim or
            sharding is invalid or differs between ranks.
    """
    group = resolve_group(group)
    deferred = DeferredError()
    values: dict[str, object] = {}
    with deferred.catch():
        dim = _dimension(x, dim)
        _validate.one_of(sharding=(sharding, SHARDINGS))
        Layout(x.shape[dim], world_size(group), sharding)
        values = {
            "shape of x": tuple(x.shape),
            "dtype of x": x.dtype,
            "dim": dim,
            "sharding": sharding,
        }
    agree_on_lengths("shard_sequence", values, 0, group, deferred.error, once=True)
    layout = Layout(x.shape[dim], world_size(group), sharding)
    chunks = [x.narrow(dim, c.start, c.length) for c in layout.chunks(rank_in(group))]
    own = torch.cat(chunks, dim)
    return own.clone(memory_format=torch.contiguous_format) if len(chunks) == 1 else own


def unshard_sequence(
    x: Tensor,
    dim: int,
    group: ProcessGroup | None = None,
    sharding: str = "contiguous",
    length: int | None = None,
) -> Tensor:
    """Gather the whole sequence on every rank; the inverse of `shard_sequence`.

    Args:
        x: this rank's tokens along `dim`; other dimensions are the same on all ranks.
        dim: dimension of the tokens.
        group: as in `shard_sequence`.
        sharding: as in `shard_sequence`.
        length: number of tokens without padding; the padding after them is dropped.

    Returns:
        All tokens in the order of the sequence. The result is differentiable. The result's
        gradients are *summed over the ranks*, and the gradient of x is this rank's part of the
        sum. So a loss that every rank computes from the whole sequence counts once per rank.

    Raises:
        ValueError: on all ranks: a shape, dtype, dim, sharding or length differs between ranks, a
            shard has a wrong number of tokens, or length exceeds the sequence.
    """
    group = resolve_group(group)
    deferred = DeferredError()
    values: dict[str, object] = {}
    own = 0
    with deferred.catch():
        dim = _dimension(x, dim)
        _validate.one_of(sharding=(sharding, SHARDINGS))
        _validate.optional(_validate.positive_int, length=length)
        own = x.shape[dim]
        values = {
            "shape of x, tokens aside": [*x.shape[:dim], *x.shape[dim + 1 :]],
            "dtype of x": x.dtype,
            "dim": dim,
            "sharding": sharding,
            "length": None if length is None else int(length),
            "whether x needs a gradient": x.requires_grad and torch.is_grad_enabled(),
        }
    lengths = agree_on_lengths("unshard_sequence", values, own, group, deferred.error)
    layout = layout_of("unshard_sequence", lengths, sharding)
    kept = unpadded_length(length, layout.num_tokens)
    if group is None or world_size(group) == 1:
        return x.narrow(dim, 0, kept).clone(memory_format=torch.contiguous_format)
    return _Unshard.apply(x, dim, group, layout, kept)


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """How a model's sequences are sharded, and over which ranks.

    Attributes:
        group: the ranks that share sequences; None for a single process.
        mode: how keys and values are exchanged, see `ring_attention`.
        sharding: which tokens each rank holds, see `Layout`.
        calls: for each type of attention call, the last call and its mode.
    """

    group: ProcessGroup | None
    mode: str = "auto"
    sharding: str = "contiguous"
    calls: dict[Any, tuple[ModeCall, str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, mesh: DeviceMesh, mode: str = "auto", sharding: str | None = None
    ) -> ContextParallel:
        """Return the context of a mesh: the dimension "context", or a single unnamed dimension.

        A sharding of None means "contiguous".
        """
        sharding = "contiguous" if sharding is None else sharding
        _validate.one_of(mode=(mode, (*MODES, "auto")), sharding=(sharding, SHARDINGS))
        return cls(_group_of(mesh), mode, sharding)

    def agree(
        self,
        tokens: int,
        *,
        rows: int = 1,
        length: int | None = None,
        error: ValueError | None = None,
        **values: object,
    ) -> Context:
        """Check that all ranks make the same call, and return the sharded sequence of the call.

        The sequence consists of `rows` rows, each with `tokens` (T_p) tokens on this rank.
        Positions from `length` on are padding. All ranks raise `error`, the reason why this rank
        cannot continue. `values` must have the same repr on all ranks.
        """
        everything = {**values, "rows": rows, "length": length}
        everything |= {"mode": self.mode, "sharding": self.sharding}
        operation = "context parallelism"
        lengths = agree_on_lengths(operation, everything, tokens, self.group, error)
        layout = layout_of(operation, lengths, self.sharding, rows)
        kept = unpadded_length(length, layout.num_tokens)
        return Context(self.group, layout, self.mode, kept, self.calls)

    def plan(self) -> str:
        """Return a table with the mode of each type of attention call; empty before a call."""
        return describe_modes(self.calls.values()) if self.calls else ""

    def warn_of_copies(self, context: Context, x: Tensor) -> None:
        """Warn if all ranks have the same tokens x `[B, T_p]`, as if x was not sharded."""
        layout, size = context.layout, context.layout.world_size
        # The condition is the same on all ranks, since an exchange follows.
        if (
            size == 1
            or layout.num_tokens % size
            or layout.num_tokens * x.shape[0] < _ENOUGH * size
        ):
            return
        content = x.detach().cpu().contiguous().numpy().tobytes()
        rows = gather_rows([digest(content)], self.group, "comparison of the tokens")
        if len({row[0] for row in rows}) == 1:
            warn(
                "all ranks of the context have the same tokens, which are processed as different "
                "parts of one longer sequence: shard inputs and targets, x = "
                "model.context_parallel.shard(x)",
                PrivateWarning,
            )

    def apply(self, model: nn.Module) -> None:
        """Set this object on the modules of a model; raise as `context_parallel` does."""
        attentions = []
        for name, module in model.named_modules():
            where = f"'{name}'" if name else "the model itself"
            for kinds, why in _MIXES_TOKENS.items():
                if isinstance(module, kinds):
                    raise ValueError(f"{where} is a {type(module).__name__}: it {why}")
            is_pretrained = pretrained.is_pretrained(module)
            if not (is_pretrained or getattr(module, "takes_context_parallel", False)):
                continue
            if getattr(module, "context_parallel", None) is not None:
                raise ValueError(
                    f"{where} is context parallel already; call context_parallel once"
                )
            refuse = getattr(module, "refuse_context_parallel", lambda: None)
            reason = pretrained.refusal(module) if is_pretrained else refuse()
            if reason is not None:
                raise ValueError(f"{where} is a {type(module).__name__}: {reason}")
            attentions.append(module)
        if not attentions:
            raise ValueError(
                f"model={type(model).__name__} has no attention that reaches other ranks' "
                "tokens; use dpflash.nn.MultiheadAttention, or "
                "dpflash.distributed.ring_attention in its forward"
            )
        # Also set it on the model, so that callers can use model.context_parallel.shard.
        for module in (*attentions, model):
            module.context_parallel = self
        for module in filter(pretrained.is_pretrained, attentions):
            pretrained.attend_across(module)

    @overload
    def shard(self, x: Tensor, dim: int = 1) -> Tensor: ...
    @overload
    def shard(self, x: PackedBatch, dim: int = 1) -> PackedBatch: ...
    def shard(self, x: Tensor | PackedBatch, dim: int = 1) -> Tensor | PackedBatch:
        """Return this rank's tokens of a sequence that all ranks hold, see `shard_sequence`.

        For a packed batch, return this rank's tokens of each row, see `PackedBatch.columns`.

        Raises:
            ValueError: see `shard_sequence`; also for a packed batch with sharding="zigzag".
        """
        if isinstance(x, PackedBatch):
            self.require_packable()
            layout = Layout(x.units.shape[1], world_size(self.group))
            (own,) = layout.chunks(rank_in(self.group))
            return x.columns(own.start, own.start + own.length)
        if self.group is None:
            return x.clone()
        return shard_sequence(x, dim, self.group, self.sharding)

    def require_packable(self) -> None:
        """Refuse a sharding with which a rank would hold several parts of a packed document."""
        if self.sharding != "contiguous":
            raise ValueError(
                f"sharding={self.sharding!r} with packed documents is not supported: each rank "
                "must hold one contiguous part of a row; pass sharding='contiguous'"
            )

    def unshard(self, x: Tensor, dim: int = 1, length: int | None = None) -> Tensor:
        """Return the whole sequence on every rank, see `unshard_sequence`."""
        if self.group is None:
            return x.narrow(dim, 0, unpadded_length(length, x.shape[dim])).clone()
        return unshard_sequence(x, dim, self.group, self.sharding, length)


def context_parallel(
    model: _Model, mesh: DeviceMesh, *, mode: str = "auto", sharding: str = "contiguous"
) -> _Model:
    """Make a model process this rank's tokens of each sequence instead of whole sequences.

    Attention then includes the tokens of other ranks, and positions count over the whole
    sequence. All other modules work on single tokens and do not change.

    Args:
        model: a model with attention modules of `dpflash.nn`, or a model that is or contains a
            causal language model of transformers (GPT-2, Llama, Mistral, Qwen2, Qwen3), with or
            without LoRA adapters. It is changed in place.
        mesh: a DeviceMesh with a dimension named "context", or "cp".
        mode: how keys and values are exchanged, see `ring_attention`.
        sharding: which tokens each rank holds, see `Layout`; pass the same to `shard_sequence`.

    Returns:
        The model; ``model.context_parallel.shard(x)`` shards its inputs and targets.

    Raises:
        ValueError: the model has no such attention, has another module that mixes tokens, or is
            already context parallel; or the mesh has no dimension "context".
    """
    ContextParallel.of(mesh, mode, sharding).apply(model)
    return model


def loss_weights(
    targets: Tensor,
    mesh_or_group: DeviceMesh | ProcessGroup | None = None,
    ignore_index: int = -100,
    units: Units | None = None,
) -> Tensor:
    """Return the fraction of each sample's valid targets that this rank holds.

    The sum of ``losses.cross_entropy(logits, targets) * loss_weights(targets, mesh)`` over the
    ranks of the context group is the mean over all valid targets of each sample.

    Args:
        targets: `[B, T_p, ...]`, this rank's targets. Shift targets before you shard them.
        mesh_or_group: a DeviceMesh with a dimension "context", or the group itself; None means the
            default group, or a single process without torch.distributed.
        ignore_index: targets with this value are not valid.
        units: for a packed batch, the positions of its B documents (samples) in this rank's part.

    Returns:
        `[B]`, float32: number of valid targets on this rank divided by the number on all ranks;
        0 if no target of a sample is valid.

    Raises:
        ValueError: targets have no batch dimension, the number of samples differs between ranks,
            or the mesh has no dimension "context".
    """
    if isinstance(mesh_or_group, DeviceMesh):
        group = _group_of(mesh_or_group)
    else:
        group = resolve_group(mesh_or_group)
    error = None
    if not isinstance(targets, Tensor) or targets.ndim < 2:
        shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        error = ValueError(
            f"targets={shape}: expected a tensor [B, T_p, ...]; add the batch dimension with "
            "unsqueeze(0)"
        )
    values = {
        "number of samples": None if error else len(targets) if units is None else units.size,
        "ignore_index": ignore_index,
    }
    agree_on_lengths("loss_weights", values, 0, group, error)
    return weights_of(targets, group, ignore_index, units)


def weights_of(
    targets: Tensor, group: ProcessGroup | None, ignore_index: int, units: Units | None
) -> Tensor:
    """Compute `loss_weights`, but do not compare the number of samples between ranks."""
    counted = targets != ignore_index
    if units is None:
        own = counted.flatten(1).sum(1)
    else:
        own = units.summed(units.flattened(counted.double(), "loss_weights")).long()
    if group is None or world_size(group) == 1:
        total = own
    else:
        total = all_reduce(own, group, "number of valid targets", "forward")
    return own.to(torch.float32) / total.clamp(min=1).to(torch.float32)


def _group_of(mesh: object) -> ProcessGroup | None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh={type(mesh).__name__}: expected a DeviceMesh; make one with "
            "torch.distributed.device_mesh.init_device_mesh(device_type, (ranks,), "
            "mesh_dim_names=('context',))"
        )
    names = mesh.mesh_dim_names
    for name in OF_CONTEXT:
        if name in (names or ()):
            return mesh.get_group(name)
    if names is None and mesh.ndim == 1:
        return mesh.get_group(0)
    raise ValueError(
        f"mesh has dimensions {names or mesh.ndim}: expected one named 'context' or 'cp', with "
        "the ranks of a sequence; pass mesh_dim_names=('data', 'context') to init_device_mesh"
    )


class _Unshard(torch.autograd.Function):
    """An all-gather whose gradient is a reduce-scatter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, group: ProcessGroup, layout: Layout, length: int
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.layout, ctx.length = dim, group, layout, length
        tokens = x.movedim(dim, 0)
        longest = _longest(layout)
        padded = tokens.new_zeros((longest, *tokens.shape[1:]))
        padded[: tokens.shape[0]] = tokens
        shards = all_gather(padded, group, "shards of a sequence", "forward")
        return layout.joined(shards, 0, length).movedim(0, dim).contiguous()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        layout: Layout = ctx.layout
        dtype = torch.promote_types(grad.dtype, torch.float32)
        tokens = grad.movedim(ctx.dim, 0).to(dtype)
        shards = tokens.new_zeros((layout.world_size, _longest(layout), *tokens.shape[1:]))
        for rank, chunk in layout.in_order(ctx.length):
            local = slice(chunk.local, chunk.local + chunk.length)
            shards[rank, local] = tokens[chunk.start : chunk.start + chunk.length]
        own = reduce_scatter(shards, ctx.group, "gradient of a sequence", "backward")
        own = own[: layout.local_length(rank_in(ctx.group))].to(grad.dtype)
        return own.movedim(0, ctx.dim), None, None, None, None


def _longest(layout: Layout) -> int:
    return max(layout.local_length(rank) for rank in range(layout.world_size))


def _dimension(x: object, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise ValueError(f"x is a {type(x).__name__}: expected a tensor; use torch.as_tensor")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim={dim!r}: expected a dimension of x, which has shape {tuple(x.shape)}; pass the "
            "dimension of the tokens"
        )
    return dim % x.ndim
