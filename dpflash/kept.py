"""What the uses of one matrix parameter leave with its gate instead of a per-sample gradient."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpflash.kernels import (
    clipped_grad,
    embedding_clipped_grad,
    embedding_grad_inner,
    embedding_grad_norm,
    embedding_per_sample_grad,
    grad_magnitude,
    grad_norm,
    per_sample_grad,
)

# A product over a sample's tokens rounds by about 2^-24 of the sum of their magnitudes, which
# matters only where they cancel far below it.
_ROUNDING = 4 * 2.0**-24
_HARMLESS_CANCELLATION = 256.0


@dataclass
class KeptUses:
    """Linear uses (x [B, T, I], dy [B, T, O]) and look-ups (indices [B, T], dy [B, T, E])."""

    linear: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    embedding: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def squared_norm(self) -> Tensor:
        """||G_i||^2 [B] of the sum over the uses, cross terms included.

        What is released is a weighted product over the whole batch, not G_i itself. Where a
        sample's tokens cancel so far that the product's rounding would outweigh G_i, the norm is
        raised by that rounding, so that the clip bounds it too.
        """
        linear, embedding = _joined(self.linear), _joined(self.embedding)
        squares = magnitudes = None
        if linear is not None:
            squares, magnitudes = grad_norm(*linear), grad_magnitude(*linear)
        if embedding is not None:
            own = embedding_grad_norm(*embedding)
            size = embedding[1].double().norm(dim=2).sum(1)
            squares = own if squares is None else squares + own
            magnitudes = size if magnitudes is None else magnitudes + size
            if linear is not None:
                squares = squares + 2 * embedding_grad_inner(*embedding, *linear)
        assert squares is not None and magnitudes is not None
        norms = squares.clamp(min=0).sqrt()
        excess = (magnitudes - _HARMLESS_CANCELLATION * norms).clamp(min=0)
        return (norms + _ROUNDING * excess).square()

    def clipped(self, factors: Tensor, rows: int) -> Tensor:
        """sum_i factors_i G_i for a parameter with `rows` rows."""
        linear, embedding = _joined(self.linear), _joined(self.embedding)
        if linear is None:
            assert embedding is not None
            return embedding_clipped_grad(*embedding, factors, rows)
        total = clipped_grad(*linear, factors)
        if embedding is not None:
            total += embedding_clipped_grad(*embedding, factors, rows)
        return total

    def dense(self, rows: int) -> Tensor:
        """The per-sample gradients G_i [B, rows, ...] after all."""
        linear, embedding = _joined(self.linear), _joined(self.embedding)
        if linear is None:
            assert embedding is not None
            return embedding_per_sample_grad(*embedding, rows)
        total = per_sample_grad(*linear)
        if embedding is not None:
            total += embedding_per_sample_grad(*embedding, rows)
        return total


def _joined(uses: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Uses of one kind are one use of a longer sequence: G = sum_u dy_u^T x_u."""
    if len(uses) < 2:
        return uses[0] if uses else None
    return torch.cat([first for first, _ in uses], 1), torch.cat([dy for _, dy in uses], 1)
