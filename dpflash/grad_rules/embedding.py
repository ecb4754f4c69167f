"""Rule for look-up tables: nn.Embedding, trained or frozen.

A sample with an index outside of the table gets NaN, so that it contributes zero. An error
instead would depend on a single private entry, and would end the process on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dpflash.kernels import embedding_per_sample_grad

from ..clipping.forward import PrivateForward
from ..clipping.planner import EmbeddingShape
from ..refusal import PrivateRefusal
from ..verification.second_order import differentiable_once
from .base import PrivateModule, Slot, plain_forward

_LOOK_UP = nn.Embedding.forward


def inside(indices: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Replace indices outside of a table by 0; return (indices, mask of the replaced indices).

    Does not wait for the device.
    """
    outside = (indices < 0) | (indices >= rows)
    return indices.masked_fill(outside, 0), outside


def nan_outside(y: Tensor, outside: Tensor, forward: PrivateForward) -> Tensor:
    """Set rows `[..., E]` of a table to NaN if their index `[...]` was outside of the table.

    In packed documents row 0 is used instead: NaN would spread to other documents (0 * NaN = NaN).
    """
    units = forward.units
    if units is not None and not units.are_rows:
        return y
    return y.masked_fill(outside.unsqueeze(-1), math.nan)


class _Embedding(torch.autograd.Function):
    """Rows of a table [V, E] at indices [B, T]; the backward returns per-sample gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        indices: Tensor,
        weight: Tensor,
        handle: Tensor,
        slot: Slot | None,
        padding_idx: int | None,
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        ctx.slot = slot
        ctx.padding_idx = padding_idx
        return F.embedding(indices, weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            dy = dy.masked_fill((indices == ctx.padding_idx).unsqueeze(-1), 0)
        if ctx.slot is None:
            grad: Tensor | None = embedding_per_sample_grad(indices, dy, ctx.rows)
        else:
            grad = ctx.slot.gate.take_embedding(ctx.slot.position, indices, dy)
        return None, None, grad, None, None


def look_up(
    indices: Tensor,
    weight: Tensor,
    handle: Tensor | None,
    slot: Slot | None,
    padding_idx: int | None = None,
) -> Tensor:
    """Return the rows `[B, T, E]` of a table at indices `[B, T]`; see `Handles` for the handle."""
    if handle is None:
        return F.embedding(indices, weight, padding_idx)
    result: Tensor = _Embedding.apply(indices, weight, handle, slot, padding_idx)
    return result


class Tables(TorchFunctionMode):
    """In this context, indices outside of a table raise no error.

    Args:
        forward: a private model's forward, to use `nan_outside`; None to look up row 0.
    """

    def __init__(self, forward: PrivateForward | None = None) -> None:
        self._forward = forward

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = self._look_up if func is F.embedding else func
        return run(*args, **(kwargs or {}))

    def _look_up(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        forward = self._forward
        if forward is not None and not forward.has_samples_in(input):
            return F.embedding(input, weight, *args, **kwargs)
        indices, outside = inside(input, weight.shape[0])
        y = F.embedding(indices, weight, *args, **kwargs)
        return y if forward is None else nan_outside(y, outside, forward)


def padding_rows(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the `padding_idx` of each table, except tables that other layers also use."""
    uses: dict[nn.Parameter, set[int | None]] = {}
    for module in model.modules():
        row = None
        if isinstance(module, nn.Embedding) and plain_forward(module) is _LOOK_UP:
            row = module.padding_idx
        for parameter in module.parameters(recurse=False):
            uses.setdefault(parameter, set()).add(row)
    rows = {parameter: next(iter(own)) for parameter, own in uses.items() if len(own) == 1}
    return {parameter: row for parameter, row in rows.items() if row is not None}


class FrozenTable(PrivateModule):
    """A table that is not trained and whose class has its own forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.is_private_call()  # raises if frozen parameters became trainable
        with Tables(self._dpflash.backward.forward):
            return super().forward(*args, **kwargs)


class PrivateEmbedding(PrivateModule):
    """Rows of a table at indices [B, ...], or at positions [1, T] or [T] for all samples."""

    takes_units = True
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        context = self._dpflash
        if not self.is_private_call():
            with Tables(context.backward.forward):
                return super().forward(input)
        indices = input
        if indices.ndim == 1 and (context.units is None or context.units.are_rows):
            indices = self._one_dimensional(indices)
        given = indices.unsqueeze(-1)  # has as many dimensions as the output
        are_samples = context.backward.forward.has_samples_in(indices)
        indices = context.check_batch(indices)
        samples = context.samples_of(indices)
        handles = self.private_handles(samples)
        weight = self._parameters["weight"]
        assert weight is not None
        rows, width = weight.shape
        outside = None
        if are_samples:
            indices, outside = inside(indices, rows)
        flat = indices.reshape(indices.shape[0], indices.shape[1:].numel()).long()
        tokens = flat.numel() // max(1, samples)  # of a sample, on average
        shape = EmbeddingShape(samples, tokens, width, rows, weight.dtype)
        slot = handles.slot("weight", shape)
        y = look_up(flat, weight.detach(), handles["weight"], slot, self.padding_idx)
        y = y.reshape(*indices.shape, width)
        if outside is not None:
            y = nan_outside(y, outside, context.backward.forward)
        return context.as_given(y, given)

    def _one_dimensional(self, indices: Tensor) -> Tensor:
        """Return positions [T] as [1, T], and one index per sample, [B], unchanged.

        If T = B, indices count as positions if an earlier call had positions with T != B.

        Raises:
            PrivateRefusal: T = B, and no earlier call had positions.
        """
        context = self._dpflash
        length = indices.shape[0]
        known = context.backward.forward.known_batch_size()
        if known is not None and length != known:
            # Indices [1] are not known to be positions: they may be the index of a single sample.
            if length > 1 and not torch.compiler.is_compiling():
                context.note_positions()
            return indices.unsqueeze(0)
        if length == 1:
            return indices
        if context.has_positions:
            return indices.unsqueeze(0)
        raise PrivateRefusal(
            f"indices of embedding '{self._dpflash.name}' have one dimension, so they may be one "
            "index for each sample, or positions that all samples share. If they are torch.unique "
            "values, look up the batch itself. Write embedding(indices[:, None]).squeeze(1) for "
            "one index per sample, or embedding(indices.expand(B, -1)) for positions",
            length=length,
        ) from None
