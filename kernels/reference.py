"""Per-sample gradient operations in plain PyTorch: the oracle, the CPU path and the specification.

Letters: B samples, T tokens of a sample, I inputs, O outputs, V rows of an embedding table,
E its width, P elements of a parameter. A linear layer y = x W^T has the per-sample gradient
G_i = dy_i^T x_i. Everything is accumulated in fp32 or wider, whatever the operands are.

A factor of exactly 0 removes its sample, even one that holds NaN or Inf.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .noise import NoiseStream

# Below this many elements a sample, one vectorised pass beats a loop of fused calls.
_FUSED_CALL_ELEMENTS = 1 << 15
# Elements summed in fp32 before fp64 takes over; more would round beyond the clip's slack.
_FP32_ROW = 64


# Relative slack that pays for rounding a norm (1e-8), a factor and a product (2^-24 each).
ROUND_DOWN = 1.0 - 2.0**-22


def hard_clip_factors(squares: Tensor, bounds: Tensor | float) -> Tensor:
    """min(1, bounds / norms) in fp32, rounded down.

    Args:
        squares: any shape, fp64: squared norms.
        bounds: a number, or a tensor that broadcasts to it.

    Returns:
        The shape of `squares`, fp32. A non-finite norm gives 0, as does one so large that the
        factor would be subnormal: fp32 keeps too few digits there to round it down.
    """
    norms = squares.sqrt()
    factors = torch.where(norms > bounds, bounds / norms * ROUND_DOWN, 1.0)
    usable = torch.isfinite(norms) & (factors >= torch.finfo(torch.float32).tiny)
    return torch.where(usable, factors, 0.0).float()


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _without_removed(factors: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """Drop the samples of factor 0, so that what they hold cannot reach a sum as 0 * NaN."""
    keep = factors != 0
    if bool(keep.all()):
        return (factors, *operands)
    return tuple(t[keep] for t in (factors, *operands))


def squared_norm(grads: Tensor) -> Tensor:
    """Squared L2 norm of each sample's gradient.

    Args:
        grads: [B, ...], B samples, fp16, bf16, fp32 or fp64.

    Returns:
        [B], fp64. Short runs of elements are summed in fp32 and the runs in fp64 (on a GPU all in
        fp64); a sample whose squares overflow fp32 is summed in fp64, so the result is non-finite
        only where an element is.
    """
    grads = grads.unsqueeze(1) if grads.ndim == 1 else grads
    flat = _wide(grads).flatten(1)
    if flat.shape[1] % _FP32_ROW:
        return flat.double().square().sum(1)
    flat = flat.unflatten(1, (flat.shape[1] // _FP32_ROW, _FP32_ROW))
    squares = torch.linalg.vector_norm(flat, dim=2).double().square().sum(1)
    overflowed = ~torch.isfinite(squares)
    if bool(overflowed.any()):
        squares[overflowed] = flat[overflowed].double().square().sum((1, 2))
    return squares


def per_sample_grad(
    x: Tensor, dy: Tensor, *, return_squares: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Per-sample gradients G_i = dy_i^T x_i of the weight of a linear layer y = x W^T.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the O outputs' gradient; fp64 where x is, else of any narrower dtype.
        return_squares: also return the squared norms of the result, fp64.

    Returns:
        [B, O, I], fp32 (fp64 for fp64 operands); with return_squares also [B].
    """
    grads = torch.bmm(_wide(dy).transpose(1, 2), _wide(x))
    return (grads, squared_norm(grads)) if return_squares else grads


def per_sample_bias_grad(dy: Tensor) -> Tensor:
    """Per-sample gradients sum_t dy_t of the bias of a linear layer.

    Args:
        dy: [B, T, O], fp16, bf16, fp32 or fp64: for B samples of T tokens the gradient of the O
            outputs.

    Returns:
        [B, O], fp32 (fp64 for fp64 operands).
    """
    return dy.sum(1, dtype=torch.promote_types(dy.dtype, torch.float32))


def grad_inner(x: Tensor, dy: Tensor, other_x: Tensor, other_dy: Tensor) -> Tensor:
    """<G_i, H_i> for G = dy^T x and H = other_dy^T other_x, without either.

    sum over tokens s, t of (x_s . other_x_t)(dy_s . other_dy_t), in fp64: the terms may cancel
    by many orders of magnitude, and in fp32 the rounding of the large ones would hide the result.

    Args:
        x, other_x: [B, S, I] and [B, T, I].
        dy, other_dy: [B, S, O] and [B, T, O].

    Returns:
        [B], fp64.
    """
    inputs = torch.bmm(x.double(), other_x.double().transpose(1, 2))
    outputs = torch.bmm(dy.double(), other_dy.double().transpose(1, 2))
    return (inputs * outputs).sum((1, 2))


def grad_norm(x: Tensor, dy: Tensor, *, form: str | None = None) -> Tensor:
    """Squared norms ||G_i||^2 of G_i = dy_i^T x_i, holding at most one sample's G_i at a time.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the O outputs' gradient; fp64 where x is, else of any narrower dtype.
        form: "gram" (cost T^2 (I + O)), "tile" (G_i is computed, cost T I O), or None for the
            cheaper one.

    Returns:
        Squared norms [B], fp64: take the root before comparing them with a bound. Products that
        are summed in fp32 round by about 2^-24 of `grad_magnitude`, which matters only where
        tokens cancel far below it.
    """
    tokens, inputs, outputs = x.shape[1], x.shape[2], dy.shape[2]
    if form is None:
        if tokens == 1:
            return squared_norm(x.flatten(1)) * squared_norm(dy.flatten(1))
        # fp64 products cost twice what fp32 products do.
        form = "gram" if 2 * tokens * (inputs + outputs) < inputs * outputs else "tile"
    if form == "gram":
        return torch.cat(
            [
                grad_inner(x[i : i + 1], dy[i : i + 1], x[i : i + 1], dy[i : i + 1])
                for i in range(x.shape[0])
            ]
            or [x.new_zeros(0, dtype=torch.float64)]
        ).clamp(min=0)
    squares = x.new_zeros(x.shape[0], dtype=torch.float64)
    for i in range(x.shape[0]):
        squares[i] = squared_norm(torch.mm(_wide(dy[i]).t(), _wide(x[i])).unsqueeze(0))[0]
    return squares


def grad_magnitude(x: Tensor, dy: Tensor) -> Tensor:
    """sum_t ||x_t|| ||dy_t||, the size of what cancels in G_i; never below ||G_i||.

    Args:
        x: [B, T, I].
        dy: [B, T, O].

    Returns:
        [B], fp64.
    """
    x_norms = torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)
    return (x_norms * torch.linalg.vector_norm(dy, dim=2, dtype=torch.float64)).sum(1)


def clipped_grad(
    x: Tensor, dy: Tensor, factors: Tensor, *, noise: NoiseStream | None = None
) -> Tensor:
    """sum_i factors_i dy_i^T x_i as one product, with noise where asked for.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the O outputs' gradient; fp64 where x is, else of any narrower dtype.
        factors: [B], fp32 or narrower (for fp64 operands also fp64), each from 0 to the bound
            divided by the sample's norm, rounded down. Not checked, which would wait for the GPU:
            one that is negative, NaN or greater breaks the bound.
        noise: added to the sum, to element [o, i] the stream's element offset + o I + i.

    Returns:
        [O, I], fp32 (fp64 for fp64 operands).

    Guarantees:
        A factor of exactly 0 removes its sample, even one that holds NaN or Inf.
    """
    factors, x, dy = _without_removed(factors, x, dy)
    weighted = _wide(dy) * factors.view(-1, 1, 1)
    total = weighted.flatten(0, 1).t() @ _wide(x).flatten(0, 1)
    return total if noise is None else noise.add_to_(total)


def clip_reduce(
    grads: Tensor, factors: Tensor, *, divisor: float = 1.0, noise: NoiseStream | None = None
) -> Tensor:
    """(sum_i factors_i grads_i + noise) / divisor.

    Args:
        grads: [B, ...], B samples, fp16, bf16, fp32 or fp64.
        factors: [B], fp32 or narrower (for fp64 grads also fp64), each from 0 to the bound
            divided by the sample's norm, rounded down. Not checked, which would wait for the GPU:
            one that is negative, NaN or greater breaks the bound.
        divisor: of the sum, noise included; finite and above 0.
        noise: added to the sum, the stream's elements from its offset on in row-major order.

    Returns:
        [...], fp32 (fp64 for fp64 operands).

    Guarantees:
        A factor of exactly 0 removes its sample, even one that holds NaN or Inf.
    """
    factors, grads = _without_removed(factors, grads)
    wide = _wide(grads)
    total = factors.to(wide.dtype) @ (wide if wide.ndim == 1 else wide.flatten(1))
    if noise is not None:
        noise.add_to_(total)
    return (total if divisor == 1 else total / divisor).view(grads.shape[1:])


def embedding_per_sample_grad(indices: Tensor, dy: Tensor, num_embeddings: int) -> Tensor:
    """Per-sample gradient of an embedding table, dense.

    Args:
        indices: [B, T], int64 rows.
        dy: [B, T, E].
        num_embeddings: V.

    Returns:
        [B, V, E], fp32 (fp64 for fp64 operands).
    """
    batch, width = dy.shape[0], dy.shape[2]
    grads = _wide(dy).new_zeros(batch * num_embeddings, width)
    rows = indices + torch.arange(batch, device=indices.device).view(-1, 1) * num_embeddings
    grads.index_add_(0, rows.flatten(), _wide(dy).flatten(0, 1))
    return grads.view(batch, num_embeddings, width)


def embedding_grad_norm(indices: Tensor, dy: Tensor) -> Tensor:
    """Squared norm of each sample's table gradient, by the distinct rows a sample touches.

    Args:
        indices: [B, T], int32 or int64: rows of the table that T tokens of B samples look up.
        dy: [B, T, E], fp16, bf16, fp32 or fp64: the gradient of what was looked up, E wide.

    Returns:
        Squared norms [B], fp64: take the root before comparing them with a bound.
    """
    batch, tokens, width = dy.shape
    # A pair (sample, row) is one segment; only touched rows exist.
    stride = int(indices.max()) + 1 if indices.numel() else 1
    pairs = indices + torch.arange(batch, device=indices.device).view(-1, 1) * stride
    segments, of_token = torch.unique(pairs.flatten(), return_inverse=True)
    sums = dy.new_zeros(segments.numel(), width, dtype=torch.float64)
    sums.index_add_(0, of_token, dy.reshape(batch * tokens, width).double())
    squares = dy.new_zeros(batch, dtype=torch.float64)
    return squares.index_add_(0, segments // stride, sums.square().sum(1))


def embedding_clipped_grad(
    indices: Tensor, dy: Tensor, factors: Tensor, num_embeddings: int
) -> Tensor:
    """sum_i factors_i times sample i's table gradient.

    Args:
        indices: [B, T], int32 or int64: rows of the table that T tokens of B samples look up.
        dy: [B, T, E], fp16, bf16, fp32 or fp64: the gradient of what was looked up, E wide.
        factors: [B], fp32 or narrower (for fp64 dy also fp64), each from 0 to the bound
            divided by the sample's norm, rounded down. Not checked, which would wait for the GPU:
            one that is negative, NaN or greater breaks the bound.
        num_embeddings: V, rows of the table; indices are below it, which is not checked either.

    Returns:
        [V, E], fp32 (fp64 for fp64 operands).

    Guarantees:
        A factor of exactly 0 removes its sample, even one that holds NaN or Inf.
    """
    factors, indices, dy = _without_removed(factors, indices, dy)
    weighted = _wide(dy) * factors.view(-1, 1, 1)
    grad = weighted.new_zeros(num_embeddings, dy.shape[2])
    return grad.index_add_(0, indices.flatten(), weighted.flatten(0, 1))


def embedding_grad_inner(indices: Tensor, dy: Tensor, x: Tensor, other_dy: Tensor) -> Tensor:
    """<G_i, H_i> of a table's look-up gradient G and a linear gradient H = other_dy^T x.

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
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, ndim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of layer norm with per-sample gradients of its weight and bias.

    Args:
        dy, x: [B, ..., *S], B samples, S the normalised shape; fp16, bf16, fp32 or fp64.
        mean, rstd: as torch.native_layer_norm returns them.
        weight: [*S] or None.
        ndim: number of dimensions of S, at least 1 and below that of x.

    Returns:
        dx like x; the weight's and the bias's per-sample gradients [B, *S], fp32 (fp64 for fp64
        operands).
    """
    shape = list(x.shape[x.ndim - ndim :])
    dy = dy.contiguous()
    batch = x.shape[0]
    fused = (
        weight is not None
        and not torch.compiler.is_compiling()
        and batch > 0
        and x[0].numel() >= _FUSED_CALL_ELEMENTS
        and x.dtype in (torch.float32, torch.float64)
    )
    if fused:
        dx = torch.empty_like(x)
        dweight = x.new_empty(batch, *shape)
        dbias = x.new_empty(batch, *shape)
        for i in range(batch):
            outputs = torch.ops.aten.native_layer_norm_backward(
                dy[i], x[i], shape, mean[i], rstd[i], weight, weight, [True, True, True]
            )
            dx[i], dweight[i], dbias[i] = outputs
        return dx, dweight, dbias
    dx = torch.ops.aten.native_layer_norm_backward(
        dy, x, shape, mean, rstd, weight, None, [True, False, False]
    )[0]
    wide_dy = _wide(dy)
    normed = (_wide(x) - mean) * rstd
    middle = tuple(range(1, x.ndim - ndim))
    if not middle:
        return dx, wide_dy * normed, wide_dy
    return dx, (wide_dy * normed).sum(middle), wide_dy.sum(middle)


def rms_norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, ndim: int
) -> tuple[Tensor, Tensor]:
    """Backward of RMS norm y = x * rstd * weight with per-sample gradients of its weight.

    Args:
        dy, x: [B, ..., *S], B samples, S the normalised shape; fp16, bf16, fp32 or fp64.
        rstd: [B, ..., 1, ...], fp32 (fp64 for fp64 operands).
        weight: [*S] or None.
        ndim: number of dimensions of S, at least 1 and below that of x.

    Returns:
        dx like x; the weight's per-sample gradients [B, *S], fp32 (fp64 for fp64 operands).
    """
    last = tuple(range(x.ndim - ndim, x.ndim))
    middle = tuple(range(1, x.ndim - ndim))
    normed = _wide(x) * rstd
    wide_dy = _wide(dy)
    dnormed = wide_dy if weight is None else wide_dy * weight
    dx = rstd * (dnormed - normed * (dnormed * normed).mean(last, keepdim=True))
    dweight = wide_dy * normed
    return dx.to(x.dtype), dweight.sum(middle) if middle else dweight


def normals_from_bits(words: Tensor) -> Tensor:
    """Standard normal numbers from uniform 64-bit words by the Box-Muller transform.

    Two words make two normals: the first word's top 53 bits the radius, the second the angle.
    The smallest radius draw is 2^-54, so the tail reaches sqrt(2 * 54 * ln 2) = 8.65 standard
    deviations; beyond lies a mass of 5e-18.

    Args:
        words: [2 N], int64, uniform over all 2^64 values.

    Returns:
        [2 N], fp32; elements 2 k and 2 k + 1 come from words 2 k and 2 k + 1.

    Source: Box and Muller, A Note on the Generation of Random Normal Deviates (1958).
    """
    pairs = words.view(-1, 2)
    mantissa = (pairs[:, 0] >> 11) & ((1 << 53) - 1)
    uniform = ((mantissa.double() + 0.5) * 2.0**-53).float()
    radius = uniform.log_().mul_(-2).clamp_(min=0).sqrt_()
    angle = pairs[:, 1].float() * (math.pi * 2.0**-63)
    normals = torch.empty(pairs.shape, dtype=torch.float32, device=words.device)
    torch.mul(radius, angle.cos(), out=normals[:, 0])
    torch.mul(radius, angle.sin(), out=normals[:, 1])
    return normals.view(-1)
