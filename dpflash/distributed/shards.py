"""Cutting a sequence into the workers' shards, and putting it together again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash import _validate
from dpflash.distributed.collectives import rank_in, world_size

from .agreement import Refusal, layout_agreed, length_within, lengths_agreed, resolve_group
from .layout import SHARDINGS, Layout
from .once import differentiable_once
from .wire import all_gather, reduce_scatter


def shard_sequence(
    x: Tensor,
    dim: int,
    group: ProcessGroup | None = None,
    sharding: str = "contiguous",
) -> Tensor:
    """This worker's tokens of a sequence that all workers hold.

    Args:
        x: any shape and dtype, the same shape on all workers; T tokens along `dim`.
        dim: dimension of the tokens.
        group: the workers, which all call this; None means the default group, or without
            torch.distributed this process by itself.
        sharding: "contiguous" or "zigzag", see `Layout`. T need not be a multiple of anything.

    Returns:
        A contiguous copy of this worker's tokens in the layout's order. Differentiable: the
        gradient of x is this worker's part, 0 elsewhere; the whole is its sum over the workers.

    Raises:
        ValueError: on all workers: T smaller than the number of workers, or a shape, dtype, dim or
            sharding that differs between workers or is not possible.
    """
    group = resolve_group(group)
    refusal = Refusal()
    values: dict[str, object] = {}
    with refusal.held():
        dim = _dimension(x, dim)
        _validate.one_of(sharding=(sharding, SHARDINGS))
        Layout(x.shape[dim], world_size(group), sharding)
        values = {
            "shape of x": tuple(x.shape),
            "dtype of x": x.dtype,
            "dim": dim,
            "sharding": sharding,
        }
    lengths_agreed("shard_sequence", values, 0, group, refusal.error)
    layout = Layout(x.shape[dim], world_size(group), sharding)
    parts = [x.narrow(dim, c.start, c.length) for c in layout.chunks(rank_in(group))]
    own = torch.cat(parts, dim)
    return own.clone(memory_format=torch.contiguous_format) if len(parts) == 1 else own


def unshard_sequence(
    x: Tensor,
    dim: int,
    group: ProcessGroup | None = None,
    sharding: str = "contiguous",
    length: int | None = None,
) -> Tensor:
    """The whole sequence, on every worker, from the workers' shards.

    Args:
        x: this worker's tokens along `dim`, as `shard_sequence` cuts them; other dimensions the
            same on all workers.
        dim: dimension of the tokens.
        group: the workers, which all call this; None as in `shard_sequence`.
        sharding: how the sequence was cut.
        length: how many tokens are no padding; what comes behind them is left out.

    Returns:
        All tokens in the order of the sequence. Differentiable: the gradient of x is this worker's
        part of the *sum over the workers* of the gradients of what they got. A loss that every
        worker computes from the whole therefore counts once for each worker.

    Raises:
        ValueError: on all workers: a shape, dtype, dim, sharding or length that differs between
            workers, shards that are not those of `shard_sequence`, or a length greater than the
            sequence.
    """
    group = resolve_group(group)
    refusal = Refusal()
    values: dict[str, object] = {}
    own = 0
    with refusal.held():
        dim = _dimension(x, dim)
        _validate.one_of(sharding=(sharding, SHARDINGS))
        if length is not None:
            _validate.positive_int(length=length)
        own = x.shape[dim]
        values = {
            "shape of x, tokens aside": [*x.shape[:dim], *x.shape[dim + 1 :]],
            "dtype of x": x.dtype,
            "dim": dim,
            "sharding": sharding,
            "length": None if length is None else int(length),
            "whether x needs a gradient": x.requires_grad and torch.is_grad_enabled(),
        }
    lengths = lengths_agreed("unshard_sequence", values, own, group, refusal.error)
    layout = layout_agreed("unshard_sequence", lengths, sharding)
    kept = length_within(length, layout.num_tokens)
    if group is None or world_size(group) == 1:
        return x.narrow(dim, 0, kept).clone(memory_format=torch.contiguous_format)
    return _Unshard.apply(x, dim, group, layout, kept)


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
        parts = [
            shards[rank, chunk.local : chunk.local + chunk.length]
            for rank, chunk in layout.in_order(length)
        ]
        return torch.cat(parts).movedim(0, dim).contiguous()

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        layout: Layout = ctx.layout
        dtype = torch.promote_types(grad.dtype, torch.float32)
        tokens = grad.movedim(ctx.dim, 0).to(dtype)
        shards = tokens.new_zeros((layout.world_size, _longest(layout), *tokens.shape[1:]))
        for rank, chunk in layout.in_order(ctx.length):
            part = tokens[chunk.start : chunk.start + chunk.length]
            shards[rank, chunk.local : chunk.local + chunk.length] = part
        own = reduce_scatter(shards, ctx.group, "gradient of a sequence", "backward")
        own = own[: layout.local_length(rank_in(ctx.group))].to(grad.dtype)
        return own.movedim(0, ctx.dim), None, None, None, None


def _longest(layout: Layout) -> int:
    return max(layout.local_length(rank) for rank in range(layout.world_size))


def _dimension(x: object, dim: int) -> int:
    """The dimension, counted from the front."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x is a {type(x).__name__}: expected a tensor; use torch.as_tensor")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"dim={dim!r}: expected a dimension of x, which has shape {tuple(x.shape)}; pass the "
            "one along which the tokens lie"
        )
    return dim % x.ndim
