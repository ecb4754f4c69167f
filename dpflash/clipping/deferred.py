"""Deferred per-sample gradients: saved (activation, output gradient) pairs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dpflash.kernels import (
    block_clipped_grad,
    clip_reduce,
    clipped_grad,
    embedding_clipped_grad,
    embedding_grad_inner,
    embedding_grad_norm,
    embedding_per_sample_grad,
    grad_magnitude,
    grad_norm,
    per_sample_grad,
    per_span_grad,
    squared_norm,
)

from ..packing.units import Units
from ..sampling.slots import RealRows

# A product over the tokens of all samples rounds by about 2^-24 of the sum of their magnitudes. A
# sample whose tokens cancel by more than this factor, or whose clipping factor is near the end of
# fp32's range, is multiplied separately.
_HARMLESS_CANCELLATION = 256.0
_LEAST_SHARED_FACTOR = 2.0**-90
# log2 of the relative rounding of an fp32 product: on a CPU; as three TF32 products on a GPU.
_PRODUCT_BITS = {False: -24, True: -20}
# Rounding of two fp32 sums that are clipped separately, relative to their sizes.
_SUM_OF_TWO = 2.0**-22


class TiledUse(Protocol):
    """A use that saves no output gradient but recomputes G_i, some samples and rows at a time."""

    @property
    def batch_size(self) -> int:
        """Number of samples B."""

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors `[B, ...]` that determine G; the first is linear in the losses' gradient."""

    @property
    def is_sparse(self) -> bool:
        """Whether each tile is one row of one sample, and G is 0 outside; else tiles cover G."""

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """(samples, rows) of tiles that fit into memory, at least one; they do not overlap."""

    def grad(self, samples: slice, rows: slice) -> Tensor:
        """G_i of a tile, [samples, rows, ...], fp32 or wider; the same bits in every call."""


@dataclass
class DeferredGradients:
    """The saved uses of one matrix parameter: its per-sample gradient G_i is their sum.

    Where one use is tiled, the others are computed tile by tile too, so that the norm of each
    tile includes the cross terms.

    Attributes:
        rows: of the parameter.
        linear: pairs (x [B, T, I], dy [B, T, O]).
        embedding: pairs (indices [B, T], dy [B, T, E]).
        tiled: uses that recompute their gradient.
        units: where samples are no rows: the tensors of linear uses and look-ups are then
            `[1, n, ...]`, with the entries of all samples, and B is the number of units.
    """

    rows: int
    linear: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    embedding: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    tiled: list[TiledUse] = field(default_factory=list)
    units: Units | None = None
    _magnitudes: Tensor | None = None

    def drop_padding(self, rows: RealRows) -> None:
        """Set the output gradients of linear uses to zero in padding rows."""
        if self.units is not None:
            return  # Padding is of no unit.
        self.linear = [(x, rows.only(dy)) for x, dy in self.linear]

    def squared_norm(self, other: Tensor | None = None) -> Tensor:
        """Upper bound [B] of ||G_i||^2 of the sum over the uses, cross terms included.

        A product over T tokens rounds by at most T 2^-24 of the sum of the magnitudes of its
        terms; that much is added to the norm. Where a sample's tokens nearly cancel, `clipped`
        reduces its own G_i, as mode "instantiate" does, and its norm is taken of that G_i.

        Args:
            other: [B, rows, ...], added to G_i; it is clipped by itself.
        """
        if self.units is not None and not self.tiled:
            return torch.cat(
                [
                    self._sample(i).squared_norm(None if other is None else other[i : i + 1])
                    for i in range(self.units.size)
                ]
            )
        if other is not None:
            dense, others = self.dense(), squared_norm(other).sqrt()
            sizes = others + (squared_norm(dense).sqrt() if self.tiled else self._sizes())
            rounding = _SUM_OF_TWO if self.tiled else self._rounding() + _SUM_OF_TWO
            return (squared_norm(other + dense).sqrt() + rounding * sizes).square()
        if self.tiled:
            return self._squares()
        norms, sizes = self._squares().clamp(min=0).sqrt(), self._sizes()
        squares = (norms + self._rounding() * sizes).square()
        for i in (sizes > _HARMLESS_CANCELLATION * norms).nonzero().flatten().tolist():
            squares[i] = squared_norm(self._sample(i).dense())[0]
        return squares

    def clipped(self, factors: Tensor, bound: float) -> Tensor:
        """sum_i factors_i G_i, rounded as a whole.

        Args:
            factors: [B], fp32.
            bound: L2 bound of one sample's contribution.
        """
        if self.tiled:
            total: Tensor | None = None
            for samples, part, grad in self._tiles():
                if total is None:
                    total = grad.new_zeros(self.rows, *grad.shape[2:])
                total[part] += clip_reduce(grad, factors[samples])
            assert total is not None
            return total
        apart = factors.double() * self._sizes() > _HARMLESS_CANCELLATION * bound
        apart |= (factors > 0) & (factors < _LEAST_SHARED_FACTOR)
        shared = factors.masked_fill(apart, 0)
        total = self._shared(shared)
        for i in apart.nonzero().flatten().tolist():
            total += clip_reduce(self._sample(i).dense(), factors[i : i + 1])
        return total

    def _shared(self, factors: Tensor) -> Tensor:
        """sum_i factors_i G_i as products over the tokens of all samples."""
        total: Tensor | None = None
        linear, embedding = self.linear, self.embedding
        if self.units is None:
            linear, embedding = (
                [] if (use := _joined(uses)) is None else [use] for uses in (linear, embedding)
            )
        for use in embedding:
            indices, dy, own = self._with_factors(use, factors)
            part = embedding_clipped_grad(indices, dy, own, self.rows)
            total = part if total is None else total.add_(part)
        for use in linear:
            part = clipped_grad(*self._with_factors(use, factors))
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _with_factors(
        self, use: tuple[Tensor, Tensor], factors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A use and the factors of its rows; where samples are units, each token is a row."""
        first, dy = use
        if self.units is None:
            return first, dy, factors
        own = self.units.of_entries(factors, dy.shape[1])
        return first.transpose(0, 1), dy.transpose(0, 1), own

    def block_clipped(
        self, bound: float, grid: float | None, into: Tensor | None, *, scale: int
    ) -> tuple[Tensor, Tensor]:
        """(sum over i of scale G_i with each tile clipped, factors [B, tiles]).

        Linear uses only; grid and into are `block_clipped_grad`'s.
        """
        assert not self.embedding and not self.tiled
        if self.units is None:
            linear = _joined(self.linear)
            assert linear is not None
            x, dy = linear
            dy = dy if scale == 1 else dy * scale
            return block_clipped_grad(x, dy, bound, grid=grid, into=into, return_factors=True)
        total, all_factors = into, []
        for i in range(self.units.size):
            sum_to_extend = total if grid is not None else None
            added, factors = self._sample(i).block_clipped(bound, grid, sum_to_extend, scale=scale)
            total = added if grid is not None or total is None else total + added
            all_factors.append(factors)
        assert total is not None
        return total, torch.cat(all_factors)

    def dense(self) -> Tensor:
        """The per-sample gradients G_i [B, rows, ...], computed."""
        linear, embedding = _joined(self.linear), _joined(self.embedding)
        if self.tiled:
            dense: Tensor | None = None
            for samples, part, grad in self._tiles():
                if dense is None:
                    dense = grad.new_zeros(self.tiled[0].batch_size, self.rows, *grad.shape[2:])
                dense[samples, part] = grad
            assert dense is not None
            return dense
        if self.units is not None and not self.embedding and len(self.linear) == 1:
            ((x, dy),) = self.linear
            return per_span_grad(x[0], dy[0], self.units.spans_of(dy.shape[1]))
        if self.units is not None:
            first = self._sample(0).dense()
            grads = first.new_empty(self.units.size, *first.shape[1:])
            grads[0] = first[0]
            for i in range(1, self.units.size):
                grads[i] = self._sample(i).dense()[0]
            return grads
        if linear is None:
            assert embedding is not None
            return embedding_per_sample_grad(*embedding, self.rows)
        total = per_sample_grad(*linear)
        if embedding is not None:
            total += embedding_per_sample_grad(*embedding, self.rows)
        return total

    def _squares(self) -> Tensor:
        linear, embedding = _joined(self.linear), _joined(self.embedding)
        if self.tiled:
            use = self.tiled[0]
            squares: Tensor | None = None
            for samples, _, grad in self._tiles():
                if squares is None:
                    squares = grad.new_zeros(use.batch_size, dtype=torch.float64)
                squares[samples] += squared_norm(grad)
            assert squares is not None
            return squares
        if linear is None:
            assert embedding is not None
            return embedding_grad_norm(*embedding)
        squares = grad_norm(*linear)
        if embedding is not None:
            squares = squares + embedding_grad_norm(*embedding)
            squares = squares + 2 * embedding_grad_inner(*embedding, *linear)
        return squares

    def _sizes(self) -> Tensor:
        """[B], fp64: the sum of the magnitudes of the terms of G_i, never below ||G_i||."""
        if self._magnitudes is None:
            # Where samples are units, first those of their tokens.
            linear, embedding = self.linear, self.embedding
            if self.units is not None:
                linear, embedding = (
                    [(first.transpose(0, 1), dy.transpose(0, 1)) for first, dy in uses]
                    for uses in (linear, embedding)
                )
            sizes = [grad_magnitude(*use) for use in linear]
            for _, dy in embedding:
                lengths = torch.linalg.vector_norm(dy, dim=2, dtype=torch.float64)
                sizes.append(lengths.sum(1))
            if self.units is not None:
                sizes = [self.units.summed(of_tokens) for of_tokens in sizes]
            self._magnitudes = torch.stack(sizes).sum(0)
        return self._magnitudes

    def _rounding(self) -> float:
        """Rounding of a product over the tokens, relative to the magnitudes of its terms."""
        uses = [*self.linear, *self.embedding]
        tokens = sum(dy.shape[1] for _, dy in uses)
        wide = all(dy.dtype == torch.float64 for _, dy in uses)
        # Two more for the Gram form in fp64: (I + O + T^2) 2^-46 of the sizes, with norms of at
        # least 1/256 of these.
        return (tokens + 2) * 2.0 ** (-53 if wide else _PRODUCT_BITS[uses[0][1].is_cuda])

    def _sample(self, i: int) -> DeferredGradients:
        """The linear uses and look-ups of one sample."""
        return DeferredGradients(
            self.rows,
            linear=[self._of(slice(i, i + 1), *use) for use in self.linear],
            embedding=[self._of(slice(i, i + 1), *use) for use in self.embedding],
        )

    def _of(self, samples: slice, first: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """The part of a use of some samples, of one where they are units."""
        if self.units is None:
            return first[samples], dy[samples]
        own = self.units.entries(samples.start, dy.shape[1])
        return first[:, own], dy[:, own]

    def _tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """(samples, rows, their G), summed over all uses; the same bits in every call."""
        covering = next((use for use in self.tiled if not use.is_sparse), None)
        assert covering is not None or not (self.linear or self.embedding)
        uses = self.tiled if covering is None else [covering]
        # A row of a sample that only one of several sparse uses has counts too.
        tiles = {
            (samples.start, samples.stop, rows.start, rows.stop): (samples, rows)
            for use in uses
            for samples, rows in use.tiles()
        }
        for samples, rows in tiles.values():
            grad = self.tiled[0].grad(samples, rows)
            for use in self.tiled[1:]:
                grad = grad + use.grad(samples, rows)
            for pair in self.linear:
                x, dy = self._of(samples, *pair)
                grad = grad + per_sample_grad(x, dy[:, :, rows])
            for pair in self.embedding:
                grad = grad + _rows_of_embedding(*self._of(samples, *pair), rows)
            yield samples, rows, grad


def _rows_of_embedding(indices: Tensor, dy: Tensor, rows: slice) -> Tensor:
    """Rows `rows` of the per-sample gradient of a look-up."""
    outside = (indices < rows.start) | (indices >= rows.stop)
    local = (indices - rows.start).masked_fill(outside, 0)
    dy = dy.masked_fill(outside.unsqueeze(-1), 0)
    return embedding_per_sample_grad(local, dy, rows.stop - rows.start)


def _joined(uses: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Concatenate uses along the tokens: G = sum_u dy_u^T x_u."""
    if len(uses) < 2:
        return uses[0] if uses else None
    return torch.cat([first for first, _ in uses], 1), torch.cat([dy for _, dy in uses], 1)
