"""Rule for look-up tables: nn.Embedding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.kernels import embedding_per_sample_grad

from ..clipping.planner import EmbeddingShape
from ..verification.second_order import differentiable_once
from .base import PrivateModule, Slot


class _Embedding(torch.autograd.Function):
    """Rows of a table [V, E] at indices [B, T]; per-sample gradients for the table's handle."""

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
    """Rows `[B, T, E]` of a table at indices `[B, T]`; handle and slot are those of the table."""
    if handle is None:
        return F.embedding(indices, weight, padding_idx)
    result: Tensor = _Embedding.apply(indices, weight, handle, slot, padding_idx)
    return result


class PrivateEmbedding(PrivateModule):
    """Rows of a table at indices [B, ...], or at positions shared by the batch: [1, T] or [T]."""

    takes_units = True
    padding_idx: int | None

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_private_call():
            return super().forward(input)
        context = self._dpflash
        indices = input
        if indices.ndim == 1 and (context.units is None or context.units.are_rows):
            indices = self._one_dimensional(indices)
        given = indices.unsqueeze(-1)  # as its output
        indices = context.check_batch(indices)
        samples = context.samples_of(indices)
        handles = self.private_handles(samples)
        handle = handles["weight"]
        weight = self._parameters["weight"]
        assert weight is not None
        if handle is None:
            y = F.embedding(indices, weight.detach(), self.padding_idx)
            return y if context.units is None else context.as_given(y, given)
        flat = indices.reshape(indices.shape[0], indices.shape[1:].numel()).long()
        rows, width = weight.shape
        tokens = flat.numel() // max(1, samples)  # of a sample, on average
        shape = EmbeddingShape(samples, tokens, width, rows, weight.dtype)
        slot = handles.slot("weight", shape)
        y = look_up(flat, weight.detach(), handle, slot, self.padding_idx)
        y = y.reshape(*indices.shape, width)
        return y if context.units is None else context.as_given(y, given)

    def _one_dimensional(self, indices: Tensor) -> Tensor:
        """Positions [T] become [1, T]; where T = B, only an earlier T tells them from [B]."""
        context = self._dpflash
        length = indices.shape[0]
        known = context.backward.forward.known_batch_size()
        if known is not None and length != known:
            # A single index may be of a position or of a sample.
            if length > 1 and not torch.compiler.is_compiling():
                context.note_positions()
            return indices.unsqueeze(0)
        if length == 1:
            return indices
        if context.has_positions:
            return indices.unsqueeze(0)
        raise ValueError(
            f"indices of embedding '{self._dpflash.name}' have shape ({length},), which may be "
            "one index for each sample or positions shared by all. Pass indices[:, None] for the "
            "former, indices[None, :] for the latter"
        )
