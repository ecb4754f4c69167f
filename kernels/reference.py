"""Reference implementation of the per-sample gradient operations, in plain PyTorch.

Letters: B samples, T tokens of a sample, I inputs, O outputs, V rows of an embedding table,
E its width, P elements of a parameter. A linear layer y = x W^T has the per-sample gradient
G_i = dy_i^T x_i. All sums are accumulated in fp32 or wider, whatever the operands' dtype.

Without `spans` a sample is a row of [B, T, ...]. With `spans` operations take one row [1, N, ...]
of N tokens, in which each of U samples is a span, and return [U, ...] in place of [B, ...].

A factor of exactly 0 removes its sample, even if the sample holds NaN or Inf.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from .grid import truncated
from .spans import Spans, samples_of_tokens, tokens_as_samples

if TYPE_CHECKING:
    from .noise import NoiseStream

# Elements of per-sample gradients that are widened to fp64 at a time.
_CHUNK = 1 << 18
# Bound of the relative fp64 error of a sum of <= 2^12 squares, then a root, quotient, product.
FP64_SLACK = 2.0**-40
# A computed root times this factor is below the exact root, also after a few rounded products.
ROOT_SLACK = 1.0 - 2.0**-50
# A product over the tokens of all samples rounds by about 2^-24 of the sum of their magnitudes. If
# a sample's terms cancel by more than this factor, the sample's product is computed separately.
HARMLESS_CANCELLATION = 256.0
# A sum of terms whose magnitudes add up to less than this does not overflow in fp32.
LARGEST_TERMS = 2.0**126
# log2 of the relative rounding of fp32 products; on a GPU (True) one is three TF32 products.
PRODUCT_BITS = {False: -24, True: -20}
# gamma of automatic clipping, as in the paper.
STABILITY = 0.01

_Squares = TypeVar("_Squares", Tensor, float)


def clip_factors(
    squared_norms: Tensor, bound: float, function: str = "hard", *, keep: Tensor | None = None
) -> Tensor:
    """Compute the clipping factors c_i = min(1, bound / n_i) of norms n_i, rounded down.

    Args:
        squared_norms: [B], fp64, upper bounds of the n_i^2, see `squared_norm`.
        bound: clipping bound, in the units of the norms.
        function: "hard", or "automatic" for c_i = bound / (n_i + 0.01) with a finite bound.
        keep: [B], bool: False for samples that get the factor 0; None to keep all samples.

    Source: automatic clipping is AUTO-S of Bu et al. (arXiv:2206.07136).

    Returns:
        [B], fp32. c_i is 0 if n_i is not finite, or so large that c_i would be subnormal.

    Guarantees:
        c_i n_i <= bound in real arithmetic; c_i depends on sample i alone.
    """
    squares = squared_norms.double()
    if function == "hard":
        factors = hard_clip_factors(squares, bound)
    else:
        factors = rounded_down(bound / (squares.sqrt() + STABILITY) * (1 - 2 * FP64_SLACK))
    return factors if keep is None else factors * keep


def bound_share(part: int, whole: int) -> float:
    """Return the bound's fraction for `part` of `whole` groups, sqrt(part / whole) rounded down.

    Guarantees:
        The squares of the fractions of disjoint parts sum to at most 1.
    """
    return math.sqrt(part / whole) * ROOT_SLACK


def hard_clip_factors(squares: Tensor, bounds: Tensor | float) -> Tensor:
    """Compute the factors min(1, bounds / norms) in fp32, rounded down.

    Args:
        squares: any shape, fp64: upper bounds of squared norms, up to a relative error of 2^-41.
        bounds: a number, or a tensor that broadcasts to the shape of `squares`.

    Returns:
        The shape of `squares`, fp32. A factor is 0 if its norm is not finite, or if the factor
        would be subnormal, for which fp32 has too few digits to round down.

    Guarantees:
        In real arithmetic, a factor times its norm is at most the bound.
    """
    norms = squares.sqrt() * (1 + FP64_SLACK)
    factors = torch.where(norms > bounds, bounds / norms * (1 - FP64_SLACK), 1.0)
    return rounded_down(torch.where(torch.isfinite(norms), factors, 0.0))


def rounded_down(factors: Tensor) -> Tensor:
    """Round factors from 0 to 1 down to fp32; NaN and fp32 subnormals become 0."""
    narrow = factors.float()
    narrow = torch.where(narrow > factors, torch.nextafter(narrow, narrow.new_zeros(())), narrow)
    return torch.where(narrow >= torch.finfo(torch.float32).tiny, narrow, 0.0)


def upper_bound(squares: _Squares, terms: int) -> _Squares:
    """Bound the exact sums of `terms` squares from their fp64 sums, added in any order."""
    return squares * (1 + (terms + 1) * 2.0**-52)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _without_removed(factors: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """Drop the samples of factor 0, so that 0 * NaN does not enter a sum."""
    keep = factors != 0
    if bool(keep.all()):
        return (factors, *operands)
    return tuple(t[keep] for t in (factors, *operands))


def by_span(operation: Callable[..., Tensor], spans: Spans, *operands: Tensor) -> Tensor:
    """Run an operation on each sample's tokens as if they were the only row; return [U, ...]."""
    found = [operation(*(x[:, start:end] for x in operands)) for start, end in spans]
    return torch.cat(found) if found else operation(*(x[:0] for x in operands))


def squared_norm(*grads: Tensor, into: Tensor | None = None) -> Tensor:
    """Compute an upper bound of the squared L2 norm of each sample's gradient.

    Args:
        grads: [B, ...], B samples of P elements, fp16, bf16, fp32 or fp64. On a GPU the order of
            additions depends on the dtype and the alignment.
        into: [B], contiguous, fp64: a tensor that is increased by the result and returned. So
            calls can add up a norm over several parameters. The addition rounds to nearest.

    Returns:
        [B], fp64: never below the squared norm in real arithmetic; its relative excess is at most
        (P + 1) * 2^-51. Not finite if an element of the sample is not. A sample's bits do not
        depend on other samples.
    """
    first = grads[0]
    if into is None:
        into = torch.zeros(first.shape[0], dtype=torch.float64, device=first.device)
    for own in grads:
        squares = torch.zeros_like(into)
        # A sum over several samples at once adds in an order that depends on their number.
        for i, grad in enumerate(own):
            for part in grad.reshape(-1).split(_CHUNK):
                squares[i] += part.double().square().sum()
        into += upper_bound(squares, own.shape[1:].numel())
    return into


def per_sample_grad(
    x: Tensor, dy: Tensor, *, spans: Spans | None = None, return_squares: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the per-sample gradients G_i = dy_i^T x_i of a linear layer's weight, y = x W^T.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the gradient of the O outputs; fp64 if x is, else any narrower dtype.
        spans: (first token, end) of each of U samples, if x and dy are [1, N, ...] with the
            tokens of all samples. A sample without tokens has first token = end. Tokens that
            belong to no sample may hold NaN.
        return_squares: whether to return the squared norms of the result too, fp64.

    Returns:
        [B, O, I], fp32 (fp64 for fp64 operands); with return_squares also [B].
    """
    x, dy = _wide(x), _wide(dy)
    if spans is None:
        grads = torch.bmm(dy.transpose(1, 2), x)
    else:
        grads = x.new_empty(len(spans), dy.shape[2], x.shape[2])
        for i, (start, end) in enumerate(spans):
            torch.mm(dy[0, start:end].t(), x[0, start:end], out=grads[i])
    return (grads, squared_norm(grads)) if return_squares else grads


def span_sum(x: Tensor, spans: Spans) -> Tensor:
    """Sum x over the tokens of each sample, in the order of the tokens.

    Args:
        x: [N, ...], fp16, bf16, fp32 or fp64: N tokens.
        spans: (first token, end) of each of U samples, see `per_sample_grad`.

    Returns:
        [U, ...], fp32 (fp64 for fp64 x).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = x.new_zeros(len(spans), *x.shape[1:], dtype=dtype)
    for i, (start, end) in enumerate(spans):
        if start != end:
            torch.sum(x[start:end], 0, dtype=dtype, out=sums[i])
    return sums


def per_sample_bias_grad(dy: Tensor) -> Tensor:
    """Compute the per-sample gradients sum_t dy_t of a linear layer's bias.

    Args:
        dy: [B, T, O], fp16, bf16, fp32 or fp64: the gradient of the O outputs.

    Returns:
        [B, O], fp32 (fp64 for fp64 operands).
    """
    return dy.sum(1, dtype=torch.promote_types(dy.dtype, torch.float32))


def grad_inner(x: Tensor, dy: Tensor, other_x: Tensor, other_dy: Tensor) -> Tensor:
    """Compute <G_i, H_i> for G = dy^T x and H = other_dy^T other_x, without forming G or H.

    It is the sum over tokens s, t of (x_s . other_x_t)(dy_s . other_dy_t), in fp64. The terms may
    cancel by many orders of magnitude, so fp32 rounding could exceed the result.

    Args:
        x, other_x: [B, S, I] and [B, T, I].
        dy, other_dy: [B, S, O] and [B, T, O].

    Returns:
        [B], fp64.
    """
    inputs = torch.bmm(x.double(), other_x.double().transpose(1, 2))
    outputs = torch.bmm(dy.double(), other_dy.double().transpose(1, 2))
    return (inputs * outputs).sum((1, 2))


def grad_norm(
    x: Tensor, dy: Tensor, *, form: str | None = None, spans: Spans | None = None
) -> Tensor:
    """Compute the squared norms of G_i = dy_i^T x_i, with one sample's G_i in memory at a time.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the gradient of the O outputs; fp64 if x is, else any narrower dtype.
        form: "gram" (cost T^2 (I + O)), "tile" (G_i is computed, cost T I O), or None for the
            cheaper form; with spans the form is chosen for each sample.
        spans: see `per_sample_grad`.

    Returns:
        Squared norms [B], fp64: take the root before comparing them with a bound. Products summed
        in fp32 are rounded by about 2^-24 of `grad_magnitude`, which matters only if the terms of
        a sample's tokens cancel to far less than `grad_magnitude`.
    """
    if spans is not None:
        return by_span(functools.partial(grad_norm, form=form), spans, x, dy)
    if form is None:
        if x.shape[1] == 1:
            return squared_norm(x.flatten(1)) * squared_norm(dy.flatten(1))
        form = cheaper_norm(x.shape[1], x, dy)
    squares = x.new_zeros(x.shape[0], dtype=torch.float64)
    for i in range(x.shape[0]):
        if form == "gram":
            own = x[i : i + 1], dy[i : i + 1]
            squares[i] = grad_inner(*own, *own)[0].clamp(min=0)
            continue
        squares[i] = squared_norm(torch.mm(_wide(dy[i]).t(), _wide(x[i])).unsqueeze(0))[0]
    return squares


def products_are_separate(*dy: Tensor) -> bool:
    """Return whether `clipped_grad` computes each sample's gradient separately, for these dy.

    Args:
        dy: tensors that would be passed as `dy`.

    Returns:
        If True, `clipped_grad` and `embedding_clipped_grad` multiply each sample's rounded
        gradient by its clipping factor. `grad_norm` and `embedding_grad_norm` return upper bounds
        of the squared norms of these rounded gradients.
    """
    return False


def norm_costs(tokens: int, inputs: int, outputs: int, *, fused: bool) -> dict[str, int]:
    """Return the FLOPs per token of each form of `grad_norm`; an fp64 operation counts twice.

    Triton computes half of the symmetric Gram matrix. PyTorch computes all of it, in fp64.
    """
    gram = tokens * (inputs + outputs)
    return {"tile": 2 * inputs * outputs, "gram": gram if fused else 4 * gram}


def cheaper_norm(tokens: int, x: Tensor, dy: Tensor, *, fused: bool = False) -> str:
    """Return the form of `grad_norm` that costs less, or "tile" if both cost the same."""
    costs = norm_costs(tokens, x.shape[2], dy.shape[2], fused=fused)
    return min(costs, key=costs.__getitem__)


def grad_magnitude(x: Tensor, dy: Tensor) -> Tensor:
    """Compute sum_t ||x_t|| ||dy_t||, the sum of the norms of G_i's terms; at least ||G_i||.

    Args:
        x: [B, T, I].
        dy: [B, T, O].

    Returns:
        [B], fp64.
    """
    x_norms = torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)
    return (x_norms * torch.linalg.vector_norm(dy, dim=2, dtype=torch.float64)).sum(1)


def clipped_grad(x: Tensor, dy: Tensor, factors: Tensor, *, spans: Spans | None = None) -> Tensor:
    """Compute sum_i factors_i * dy_i^T x_i as one product.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the gradient of the O outputs; fp64 if x is, else any narrower dtype.
        factors: [B], fp32 or narrower (for fp64 operands also fp64), each at least 0 and at most
            the bound divided by the sample's norm, rounded down. Other factors, or NaN, break the
            bound. Factors are not checked, since a check would wait for the GPU.
        spans: see `per_sample_grad`; factors are then [U].

    Returns:
        [O, I], fp32 (fp64 for fp64 operands). The sum over all samples' tokens is rounded.

    Guarantees:
        A factor of exactly 0 removes its sample, even if the sample holds NaN or Inf.
    """
    if spans is not None:
        factors, x, dy = tokens_as_samples(factors, spans, x, dy)
    factors, x, dy = _without_removed(factors, x, dy)
    weighted = _wide(dy) * factors.view(-1, 1, 1)
    return weighted.flatten(0, 1).t() @ _wide(x).flatten(0, 1)


def clip_reduce(
    grads: Tensor,
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Tensor | None = None,
    noise: NoiseStream | None = None,
) -> Tensor:
    """Compute the clipped sum sum_i factors_i * grads_i, and add noise if a stream is given.

    Args:
        grads: [B, ...], B samples, fp16, bf16, fp32 or fp64.
        factors: [B], fp32 or narrower (for fp64 grads also fp64), each at least 0 and at most the
            bound divided by the sample's norm, rounded down. Other factors, or NaN, break the
            bound. Factors are not checked, since a check would wait for the GPU.
        grid: a power of two: each factors_i * grads_i is truncated toward zero onto the grid, and
            the sum is exact. None for a rounded sum in fp32 (fp64).
        into: [...], contiguous, fp64, on the grid: the sum of earlier samples, to which the sum of
            these samples is added in place. It requires a grid, and excludes noise.
        noise: the stream whose elements, from its offset on, are added in row-major order.

    Returns:
        [...]. With a grid and without noise: fp64, exact multiples of the grid (`into`, if given).
        Otherwise fp32 (fp64 for fp64 operands), rounded once, after the noise.

    Guarantees:
        A factor of exactly 0 removes its sample, even if the sample holds NaN or Inf. If a grid is
        given and sums stay below 2^53 * grid, the result has the same bits for every order of the
        samples and every division into batches. Sample i then changes the result by at most
        factors_i * ||grads_i||.
    """
    factors, grads = _without_removed(factors, grads)
    wide = torch.promote_types(grads.dtype, torch.float32)
    if grid is None:
        flat = grads.reshape(grads.shape[0], grads.shape[1:].numel()).to(wide)
        total = (factors.to(wide) @ flat).view(grads.shape[1:])
        return total if noise is None else noise.add_to_(total)
    total = grads.new_zeros(grads.shape[1:], dtype=torch.float64) if into is None else into
    flat = total.view(-1)
    for grad, factor in zip(grads, factors.double(), strict=True):
        for part, own in zip(flat.split(_CHUNK), grad.reshape(-1).split(_CHUNK), strict=True):
            part += truncated(own.double() * factor, grid)
    return total if noise is None else noise.add_to_(total).to(wide)


def clip_reduce_all(
    grads: Sequence[Tensor],
    factors: Tensor,
    *,
    grid: float | None = None,
    into: Sequence[Tensor] | None = None,
    noise: Sequence[NoiseStream] | None = None,
) -> Sequence[Tensor]:
    """Compute `clip_reduce` of several parameters, on the CPU in one call of C++.

    Args:
        grads: `[B, ...]` of each parameter.
        factors: [B], as in `clip_reduce`.
        grid: as in `clip_reduce`.
        into: one tensor for each parameter, or None.
        noise: one stream for each parameter, or None.

    Returns:
        The sum of each parameter. New sums may share one buffer.
    """
    return [
        clip_reduce(own, factors, grid=grid, into=total, noise=stream)
        for own, total, stream in of_each(grads, into, noise)
    ]


def of_each(
    grads: Sequence[Tensor],
    into: Sequence[Tensor] | None,
    noise: Sequence[NoiseStream] | None,
) -> Iterator[tuple[Tensor, Tensor | None, NoiseStream | None]]:
    """Pair each parameter's gradient with its sum and its noise, for `clip_reduce_all`."""
    none = [None] * len(grads)
    return zip(
        grads, none if into is None else into, none if noise is None else noise, strict=True
    )


def embedding_per_sample_grad(
    indices: Tensor, dy: Tensor, num_embeddings: int, *, spans: Spans | None = None
) -> Tensor:
    """Compute the dense per-sample gradients of an embedding table.

    Args:
        indices: [B, T], int32 or int64: rows of the table that T tokens of B samples look up.
        dy: [B, T, E], fp16, bf16, fp32 or fp64: the gradient of the looked-up rows.
        num_embeddings: V, rows of the table. Indices must be below it, which is not checked.
        spans: see `per_sample_grad`.

    Returns:
        [B, V, E], fp32 (fp64 for fp64 operands).
    """
    if spans is not None:
        grads = _wide(dy).new_zeros(len(spans), num_embeddings, dy.shape[2])
        for i, (start, end) in enumerate(spans):
            grads[i].index_add_(0, indices[0, start:end], _wide(dy[0, start:end]))
        return grads
    batch, width = dy.shape[0], dy.shape[2]
    grads = _wide(dy).new_zeros(batch * num_embeddings, width)
    rows = indices + torch.arange(batch, device=indices.device).view(-1, 1) * num_embeddings
    grads.index_add_(0, rows.flatten(), _wide(dy).flatten(0, 1))
    return grads.view(batch, num_embeddings, width)


def embedding_grad_norm(indices: Tensor, dy: Tensor, *, spans: Spans | None = None) -> Tensor:
    """Compute the squared norm of each sample's table gradient, from the rows that it looks up.

    Args:
        indices: [B, T], int32 or int64: rows of the table that T tokens of B samples look up.
        dy: [B, T, E], fp16, bf16, fp32 or fp64: the gradient of the looked-up rows.
        spans: see `per_sample_grad`.

    Returns:
        Squared norms [B], fp64: take the root before comparing them with a bound.
    """
    batch, tokens, width = dy.shape
    # A segment is a pair (sample, row) that occurs.
    stride = int(indices.max()) + 1 if indices.numel() else 1
    samples = torch.arange(batch, device=indices.device).view(-1, 1)
    if spans is not None:
        # Tokens of no sample are counted as one additional sample, after the other samples.
        batch, samples = len(spans) + 1, samples_of_tokens(spans, tokens, indices.device)
    pairs = indices + samples * stride
    segments, of_token = torch.unique(pairs.flatten(), return_inverse=True)
    sums = dy.new_zeros(segments.numel(), width, dtype=torch.float64)
    sums.index_add_(0, of_token, dy.reshape(-1, width).double())
    squares = dy.new_zeros(batch, dtype=torch.float64)
    squares.index_add_(0, segments // stride, sums.square().sum(1))
    return squares if spans is None else squares[:-1]


def embedding_clipped_grad(
    indices: Tensor,
    dy: Tensor,
    factors: Tensor,
    num_embeddings: int,
    *,
    spans: Spans | None = None,
) -> Tensor:
    """Compute the sum over samples of factors_i times sample i's table gradient.

    Args:
        indices: [B, T], int32 or int64: rows of the table that T tokens of B samples look up.
        dy: [B, T, E], fp16, bf16, fp32 or fp64: the gradient of the looked-up rows.
        factors: [B], fp32 or narrower (for fp64 dy also fp64), each at least 0 and at most the
            bound divided by the sample's norm, rounded down. Other factors, or NaN, break the
            bound. Factors are not checked, since a check would wait for the GPU.
        num_embeddings: V, rows of the table. Indices must be below it, which is not checked.
        spans: see `per_sample_grad`; factors are then [U].

    Returns:
        [V, E], fp32 (fp64 for fp64 operands).

    Guarantees:
        A factor of exactly 0 removes its sample, even if the sample holds NaN or Inf.
    """
    if spans is not None:
        factors, indices, dy = tokens_as_samples(factors, spans, indices, dy)
    factors, indices, dy = _without_removed(factors, indices, dy)
    weighted = _wide(dy) * factors.view(-1, 1, 1)
    grad = weighted.new_zeros(num_embeddings, dy.shape[2])
    return grad.index_add_(0, indices.flatten(), weighted.flatten(0, 1))


def embedding_grad_inner(indices: Tensor, dy: Tensor, x: Tensor, other_dy: Tensor) -> Tensor:
    """Compute <G_i, H_i> of a table's look-up gradient G and a linear gradient H = other_dy^T x.

    The cross term of tied weights: sum over s, t of (x_s . dy_t) other_dy_s[index_t], in fp64.

    Args:
        indices: [B, T], int64 rows.
        dy: [B, T, E].
        x: [B, S, E].
        other_dy: [B, S, V].

    Returns:
        [B], fp64.
    """
    inner = dy.new_zeros(dy.shape[0], dtype=torch.float64)
    for i in range(dy.shape[0]):
        weights = x[i].double() @ dy[i].double().t()
        inner[i] = (weights * other_dy[i].double()[:, indices[i]]).sum()
    return inner


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    ndim: int,
    *,
    spans: Spans | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the backward of layer norm, with per-sample gradients of its weight and bias.

    Args:
        dy, x: [B, ..., *S], B samples, S the normalised shape; fp16, bf16, fp32 or fp64.
        mean, rstd: the outputs of torch.native_layer_norm.
        weight: [*S] or None.
        ndim: number of dimensions of S, at least 1 and below that of x.
        spans: see `per_sample_grad`; dy and x are then [1, N, ..., *S].

    Returns:
        dx, like x, and the per-sample gradients of weight and bias, [B, *S], fp32 (fp64 for fp64
        operands).
    """
    shape = list(x.shape[x.ndim - ndim :])
    dy = dy.contiguous()
    dx = torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, None, [True, False, False]
    )[0]
    wide_dy = _wide(dy)
    normed = (_wide(x) - mean) * rstd
    return (
        dx,
        _sums_of_samples(wide_dy * normed, ndim, spans),
        _sums_of_samples(wide_dy, ndim, spans),
    )


def _sums_of_samples(x: Tensor, ndim: int, spans: Spans | None) -> Tensor:
    """Sum x [B, ..., *S], where S has `ndim` dimensions, to [B, *S], or with spans to [U, *S]."""
    first = 1 if spans is None else 2
    middle = tuple(range(first, x.ndim - ndim))
    x = x.sum(middle) if middle else x
    return x if spans is None else span_sum(x[0], spans)


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    ndim: int,
    *,
    spans: Spans | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the backward of RMS norm y = x * rstd * weight, with its per-sample gradients.

    Args:
        dy, x: [B, ..., *S], B samples, S the normalised shape; fp16, bf16, fp32 or fp64.
        rstd: [B, ..., 1, ...], fp32 (fp64 for fp64 operands).
        weight: [*S] or None.
        ndim: number of dimensions of S, at least 1 and below that of x.
        spans: see `per_sample_grad`; dy and x are then [1, N, ..., *S].

    Returns:
        dx, like x, and the weight's per-sample gradients [B, *S], fp32 (fp64 for fp64 operands).
    """
    last = tuple(range(x.ndim - ndim, x.ndim))
    normed = _wide(x) * rstd
    wide_dy = _wide(dy)
    dnormed = wide_dy if weight is None else wide_dy * weight
    dx = rstd * (dnormed - normed * (dnormed * normed).mean(last, keepdim=True))
    return dx.to(x.dtype), _sums_of_samples(wide_dy * normed, ndim, spans)
