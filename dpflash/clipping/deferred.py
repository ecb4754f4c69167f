"""Deferred per-sample gradients: saved (activation, output gradient) pairs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dpflash.kernels import (
    clip_reduce,
    clipped_grad,
    embedding_clipped_grad,
    embedding_grad_inner,
    embedding_grad_norm,
    embedding_per_sample_grad,
    grad_norm,
    per_sample_grad,
    products_are_separate,
    squared_norm,
)
from dpflash.kernels.reference import HARMLESS_CANCELLATION, LARGEST_TERMS, PRODUCT_BITS

from ..packing.pack import EXACT_ALIGN
from ..packing.units import Units

# Samples with smaller clipping factors, near fp32's smallest number, are multiplied separately.
_LEAST_SHARED_FACTOR = 2.0**-90
# Relative rounding error of adding two clipped fp32 sums.
_SUM_OF_TWO = 2.0**-22


class TiledUse(Protocol):
    """A layer's call that recomputes the per-sample gradient G_i in tiles, and saves no dy."""

    @property
    def batch_size(self) -> int:
        """Number of samples B."""

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The tensors `[B, ...]` that determine G. G is linear in the first tensor."""

    @property
    def is_sparse(self) -> bool:
        """Whether each tile is one row of one sample, with G = 0 elsewhere; else tiles cover G."""

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield (samples, rows) of at least one tile; tiles fit into memory and do not overlap."""

    def grad(self, samples: slice, rows: slice) -> Tensor:
        """Return G_i of a tile, [samples, rows, ...], fp32 or wider, bitwise reproducible."""


class Use(NamedTuple):
    """Saved tensors of one application: (x, dy) of a linear layer, or (indices, dy) of a table."""

    first: Tensor
    dy: Tensor
    spans: tuple[tuple[int, int], ...] | None = None


class Share(NamedTuple):
    """Divides a parameter's samples between one shared product and separate products.

    Attributes:
        factors: [B], fp32, the clipping factors.
        shared: [B], the factors of the samples in the shared product, 0 for the other samples.
        apart: indices of the samples that are multiplied separately.
    """

    factors: Tensor
    shared: Tensor
    apart: list[int]


@dataclass
class DeferredGradients:
    """The saved tensors of one matrix parameter, whose per-sample gradient is G_i.

    G_i is the sum over the applications of the parameter. If one application is tiled, all are
    computed tile by tile, so that the norm of each tile includes the cross terms.

    Attributes:
        rows: number of rows of the parameter.
        linear: pairs (x [B, T, I], dy [B, T, O]), one for each call of a linear layer.
        embedding: pairs (indices [B, T], dy [B, T, E]), one for each look-up.
        tiled: applications that recompute their gradient.
        units: None if samples are rows. Otherwise the tensors of linear layers and look-ups are
            `[1, n, ...]`, with the entries of all samples, and B is the number of units.
        cancelling: [B], bool: True for samples whose terms nearly cancel. The norm of such a
            sample comes from a separate product. None before norms are computed, or if the
            norms of all samples come from separate products.
    """

    rows: int
    linear: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    embedding: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    tiled: list[TiledUse] = field(default_factory=list)
    units: Units | None = None
    cancelling: Tensor | None = None
    _magnitudes: Tensor | None = None

    def save(self, uses: DeferredGradients) -> None:
        """Save the tensors of more linear layers and look-ups."""
        self.linear += [(x.detach(), dy.detach()) for x, dy in uses.linear]
        self.embedding += [(indices, dy.detach()) for indices, dy in uses.embedding]

    @property
    def is_separate(self) -> bool:
        """Whether each sample has its own product, whose rounding `squares` then includes."""
        # With units, the sum adds a product per application, but norms use one joined product.
        are_joined = self.units is None or max(len(self.linear), len(self.embedding)) < 2
        uses = [*self.linear, *self.embedding]
        return not self.tiled and are_joined and products_are_separate(*(dy for _, dy in uses))

    def clipped(self, share: Share) -> Tensor:
        """Return sum_i factors_i G_i; only the sum is rounded, not each term."""
        if self.tiled:
            total: Tensor | None = None
            for samples, part, grad in self._tiles():
                if total is None:
                    total = grad.new_zeros(self.rows, *grad.shape[2:])
                total[part] += clip_reduce(grad, share.factors[samples])
            assert total is not None
            return total
        total = self._shared(share.shared)
        for i in share.apart:
            total += clip_reduce(self._sample(i).dense(), share.factors[i : i + 1])
        return total

    def bound_with(self, other: Tensor) -> Tensor:
        """Bound ||G_i + other_i||^2 from above, if both have separate clipped sums."""
        dense, others = self.dense(), squared_norm(other).sqrt()
        sizes = others + (squared_norm(dense).sqrt() if self.tiled else self.sizes())
        rounding = _SUM_OF_TWO if self.tiled else self.rounding() + _SUM_OF_TWO
        bounds = (squared_norm(other + dense).sqrt() + rounding * sizes).square()
        return bounds.masked_fill(sizes >= LARGEST_TERMS, math.inf)

    def of_sample(self, i: int) -> Tensor:
        """Return ||G_i||^2 of sample i alone, from its own product, [1], fp64."""
        return squared_norm(self._sample(i).dense())

    def _shared(self, factors: Tensor) -> Tensor:
        """Return sum_i factors_i G_i, computed by products over the tokens of all samples."""
        total: Tensor | None = None
        for indices, dy, spans in self._parts(self.embedding):
            of_use = embedding_clipped_grad(indices, dy, factors, self.rows, spans=spans)
            total = of_use if total is None else total.add_(of_use)
        for x, dy, spans in self._parts(self.linear):
            of_use = clipped_grad(x, dy, factors, spans=spans)
            total = of_use if total is None else total.add_(of_use)
        assert total is not None
        return total

    def dense(self) -> Tensor:
        """Compute the per-sample gradients G_i [B, rows, ...]."""
        if self.tiled:
            dense: Tensor | None = None
            for samples, part, grad in self._tiles():
                if dense is None:
                    dense = grad.new_zeros(self.tiled[0].batch_size, self.rows, *grad.shape[2:])
                dense[samples, part] = grad
            assert dense is not None
            return dense
        linear, embedding = self._joined(self.linear), self._joined(self.embedding)
        total: Tensor | None = None
        if linear is not None:
            total = per_sample_grad(linear.first, linear.dy, spans=linear.spans)
        if embedding is not None:
            of_use = embedding_per_sample_grad(
                embedding.first, embedding.dy, self.rows, spans=embedding.spans
            )
            total = of_use if total is None else total.add_(of_use)
        assert total is not None
        return total

    def squares(self) -> Tensor:
        """Return ||G_i||^2, [B]. The products' rounding is included only if `is_separate`."""
        if self.tiled:
            use = self.tiled[0]
            squares: Tensor | None = None
            for samples, _, grad in self._tiles():
                if squares is None:
                    squares = grad.new_zeros(use.batch_size, dtype=torch.float64)
                squares[samples] += squared_norm(grad)
            assert squares is not None
            return squares
        linear, embedding = self._joined(self.linear), self._joined(self.embedding)
        total: Tensor | None = None
        if linear is not None:
            total = grad_norm(linear.first, linear.dy, spans=linear.spans)
        if embedding is not None:
            of_use = embedding_grad_norm(embedding.first, embedding.dy, spans=embedding.spans)
            if total is None or linear is None:
                return of_use
            inner = _inner(embedding, linear)
            # The inner product is computed from exact gradients, but norms or the sum from rounded
            # gradients. So bound the inner product by the product of both norms (Cauchy-Schwarz).
            head = DeferredGradients(self.rows, linear=self.linear, units=self.units)
            error = head.rounding() * head.sizes()
            inner = inner + ((of_use if self.is_separate else total).sqrt() + error) * error
            inner = torch.minimum(inner, (of_use * total).sqrt())
            total = (total + of_use + 2 * inner).clamp(min=0)
        assert total is not None
        return total

    def sizes(self) -> Tensor:
        """Return, for each G_i, the sum of its terms' magnitudes, [B], fp64: at least ||G_i||."""
        if self._magnitudes is None:
            of_tokens = [_magnitudes_of_tokens(x, dy) for x, dy in self.linear]
            of_tokens += [_magnitudes_of_tokens(None, dy) for _, dy in self.embedding]
            sums = (t.sum(1) if self.units is None else self.units.summed(t[0]) for t in of_tokens)
            self._magnitudes = functools.reduce(torch.add, sums)
        return self._magnitudes

    def rounding(self) -> float | Tensor:
        """Bound the rounding error of a product over tokens, as a fraction of its `sizes`."""
        uses = [*self.linear, *self.embedding]
        # Count two more tokens for the Gram form in fp64, whose rounding is (I + O + T^2) 2^-46 of
        # the sizes; norms are at least 1/256 of the sizes.
        wide = all(dy.dtype == torch.float64 for _, dy in uses)
        of_token = 2.0 ** (-53 if wide else PRODUCT_BITS[uses[0][1].is_cuda])
        if self.units is None:
            return (sum(dy.shape[1] for _, dy in uses) + 2) * of_token
        spans = tuple(self.units.spans_of(dy.shape[1]) for _, dy in uses)
        return (_numbers_of_tokens(spans, uses[0][1].device) + 2) * of_token

    def _sample(self, i: int) -> DeferredGradients:
        return DeferredGradients(
            self.rows,
            linear=[self._of(slice(i, i + 1), *use) for use in self.linear],
            embedding=[self._of(slice(i, i + 1), *use) for use in self.embedding],
        )

    def _parts(self, uses: list[tuple[Tensor, Tensor]]) -> list[Use]:
        """Return the products that add up to G_i; join applications into one if possible."""
        if self.units is not None:
            return [Use(first, dy, self._spans(dy)) for first, dy in uses]
        joined = self._joined(uses)
        return [] if joined is None else [joined]

    def _spans(self, dy: Tensor) -> tuple[tuple[int, int], ...] | None:
        return None if self.units is None else self.units.spans_of(dy.shape[1])

    def _joined(self, uses: list[tuple[Tensor, Tensor]]) -> Use | None:
        """Join applications u into one, G = sum_u dy_u^T x_u, by concatenating their tokens."""
        if len(uses) < 2:
            return next((Use(first, dy, self._spans(dy)) for first, dy in uses), None)
        if self.units is None:
            return Use(
                torch.cat([first for first, _ in uses], 1), torch.cat([dy for _, dy in uses], 1)
            )
        return _side_by_side(uses, self.units)

    def _of(self, samples: slice, first: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the saved tensors of `samples`; with units, of a single sample."""
        if self.units is None:
            return first[samples], dy[samples]
        own = self.units.entries(samples.start, dy.shape[1])
        return first[:, own], dy[:, own]

    def _tiles(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (samples, rows, G over all applications) of tiles; G is bitwise reproducible."""
        covering = next((use for use in self.tiled if not use.is_sparse), None)
        assert covering is not None or not (self.linear or self.embedding)
        uses = self.tiled if covering is None else [covering]
        # Take the union of all tiles: a row of a sample may be a tile of only one sparse use.
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


def squared_norms(
    kept: Collection[DeferredGradients], others: Sequence[Tensor | None] | None = None
) -> list[Tensor]:
    """Return tensors [B] whose sum is at least the sum of ||G_i||^2 over the parameters.

    A sample whose terms nearly cancel gets a separate product for its own G_i, as in mode
    "instantiate"; finding such samples waits for the device. For samples with a separate product,
    the result is equal to this sum. For other samples, the norm includes the rounding bound of a
    product over T tokens: T 2^-24 times the sum of the terms' magnitudes.

    Args:
        kept: the saved tensors of each parameter, of one batch.
        others: for each parameter None, or [B, rows, ...], added to G_i in the norm only.
    """
    pairs = list(zip(kept, [None] * len(kept) if others is None else others, strict=True))
    alone = [one.squares() for one, other in pairs if other is None and one.is_separate]
    first = [torch.stack(alone).sum(0)] if alone else []
    pairs = [(one, other) for one, other in pairs if other is not None or not one.is_separate]
    found = [
        (one.squares() if one.tiled else None) if other is None else one.bound_with(other)
        for one, other in pairs
    ]
    plain = [one for (one, _), squares in zip(pairs, found, strict=True) if squares is None]
    if not plain:
        return first + [squares for squares in found if squares is not None]
    norms = torch.stack([one.squares() for one in plain]).clamp_(min=0).sqrt_()
    sizes = torch.stack([one.sizes() for one in plain])
    squares = (norms + _roundings(plain, norms.device) * sizes).square()
    # In the Gram form a norm may be finite although a sum of large terms overflows fp32.
    cancelling = (sizes > HARMLESS_CANCELLATION * norms) | (sizes >= LARGEST_TERMS)
    for one, own in zip(plain, cancelling, strict=True):
        one.cancelling = own
    for row, i in cancelling.nonzero().tolist():
        squares[row, i] = plain[row].of_sample(i)[0]
    own = iter(squares.unbind())
    return first + [next(own) if squares is None else squares for squares in found]


def shares(kept: Collection[DeferredGradients], factors: Tensor, bound: float) -> list[Share]:
    """Choose the samples that share one product. Waits for the device unless all are separate.

    One product sums the weighted gradients of several samples. A sample has a separate product if
    the shared product would round its gradient too coarsely, or if its norm came from a separate
    product. Norms of the other samples include the shared product's rounding.

    Args:
        kept: the saved tensors of each parameter, of one batch.
        factors: [B], fp32, the clipping factors.
        bound: L2 bound of one sample's contribution.
    """
    plain = [one for one in kept if not (one.tiled or one.is_separate)]
    if not plain:
        return [Share(factors, factors, [])] * len(kept)
    sizes = torch.stack([one.sizes() for one in plain])
    apart = factors.double() * sizes > HARMLESS_CANCELLATION * bound
    apart |= factors < _LEAST_SHARED_FACTOR
    for row, one in zip(apart, plain, strict=True):
        if one.cancelling is not None:
            row |= one.cancelling
    apart &= factors > 0
    shared = iter(factors.expand_as(apart).masked_fill(apart, 0).unbind())
    numbers: list[list[int]] = [[] for _ in plain]
    for row, i in apart.nonzero().tolist():
        numbers[row].append(i)
    left = iter(numbers)
    whole = Share(factors, factors, [])
    return [
        whole if one.tiled or one.is_separate else Share(factors, next(shared), next(left))
        for one in kept
    ]


def _roundings(kept: Sequence[DeferredGradients], device: torch.device) -> Tensor:
    """Return K parameters' relative rounding bounds: [K, 1], or [K, B] if samples are units."""
    found = [one.rounding() for one in kept]
    tensors = [rounding for rounding in found if isinstance(rounding, Tensor)]
    if tensors:
        return torch.stack(tensors)
    numbers = torch.tensor(found, dtype=torch.float64, device="cpu")
    return numbers.to(device, non_blocking=True).unsqueeze(1)


def _rows_of_embedding(indices: Tensor, dy: Tensor, rows: slice) -> Tensor:
    outside = (indices < rows.start) | (indices >= rows.stop)
    local = (indices - rows.start).masked_fill(outside, 0)
    dy = dy.masked_fill(outside.unsqueeze(-1), 0)
    return embedding_per_sample_grad(local, dy, rows.stop - rows.start)


def _side_by_side(uses: list[tuple[Tensor, Tensor]], units: Units) -> Use:
    """Join all applications of a parameter into one; the entries of each unit are consecutive.

    Each unit begins at a multiple of `EXACT_ALIGN`, so that its products keep their bits.
    """
    spans = [units.spans_of(dy.shape[1]) for _, dy in uses]
    own = list(zip(*spans, strict=True))  # for each unit, its span in each use
    lengths = [sum(end - start for start, end in of_uses) for of_uses in own]
    gaps = [-length % EXACT_ALIGN for length in lengths]
    starts = itertools.accumulate(map(sum, zip(lengths, gaps, strict=True)), initial=0)

    def together(column: int) -> Tensor:
        parts = []
        gap = uses[0][column].new_zeros(1, EXACT_ALIGN, *uses[0][column].shape[2:])
        for of_uses, behind in zip(own, gaps, strict=True):
            parts += [use[column][:, a:b] for use, (a, b) in zip(uses, of_uses, strict=True)]
            parts.append(gap[:, :behind])
        return torch.cat(parts, 1)

    places = tuple((a, a + length) for a, length in zip(starts, lengths, strict=False))
    return Use(together(0), together(1), places)


@functools.lru_cache(maxsize=8)
def _numbers_of_tokens(
    spans: tuple[tuple[tuple[int, int], ...], ...], device: torch.device
) -> Tensor:
    """Return the number of entries of each unit in all applications together, `[B]`, fp64."""
    counts = [sum(end - start for start, end in own) for own in zip(*spans, strict=True)]
    return torch.tensor(counts, dtype=torch.float64).to(device, non_blocking=True)


def _inner(embedding: Use, linear: Use) -> Tensor:
    """Return <G_i, H_i> `[B]` of a look-up's gradient G and a linear layer's gradient H."""
    if embedding.spans is None or linear.spans is None:
        return embedding_grad_inner(embedding.first, embedding.dy, linear.first, linear.dy)
    places = zip(embedding.spans, linear.spans, strict=True)
    own = (
        (*(x[:, a:b] for x in embedding[:2]), *(x[:, c:d] for x in linear[:2]))
        for (a, b), (c, d) in places
    )
    return torch.cat([embedding_grad_inner(*parts) for parts in own])


def _magnitudes_of_tokens(x: Tensor | None, dy: Tensor) -> Tensor:
    """Return each token's ||x_t|| ||dy_t||, or ||dy_t|| if x is None, `[B, T]`, fp64."""
    sizes = torch.linalg.vector_norm(dy, dim=2, dtype=torch.float64)
    return sizes if x is None else sizes * torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)
