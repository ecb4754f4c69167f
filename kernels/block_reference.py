"""Clipping by blocks in plain PyTorch: each tile of a weight is a clipping group of its own.

Letters: B samples, T tokens of a sample, I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .reference import _FP32_ROW, hard_clip_factors

if TYPE_CHECKING:
    from .noise import NoiseStream

# Elements of per-sample gradients that block_clipped_grad holds at a time, one sample at least.
_CHUNK = 1 << 21
# Samples from which one pass over all of them beats a pass over each.
_MANY = 16

# Outputs and inputs of a clipping group of block_clipped_grad. It says what is released, so it
# depends on no device, dtype or tuning.
BLOCK = (128, 128)


def block_bounds(
    outputs: int, inputs: int, bound: float, block: tuple[int, int] = BLOCK
) -> Tensor:
    """The bounds C_k of a weight's tiles: bound times the root of a tile's part of the elements.

    Args:
        outputs, inputs: O and I.
        bound: of the whole weight.
        block: outputs and inputs of a tile; those at the far edges are smaller.

    Returns:
        [tiles of O, tiles of I], fp64, on the CPU.

    Guarantees:
        sum_k C_k^2 <= bound^2: each C_k is rounded down by more than its own arithmetic rounds.
    """
    heights, widths = (
        torch.tensor(
            [min(side, size - start) for start in range(0, size, side)], dtype=torch.float64
        )
        for size, side in ((outputs, block[0]), (inputs, block[1]))
    )
    shares = heights.unsqueeze(1) * widths / max(1, outputs * inputs)
    return bound * shares.sqrt() * (1.0 - 2.0**-50)


def block_clipped_grad(
    x: Tensor,
    dy: Tensor,
    bound: float,
    *,
    block: tuple[int, int] = BLOCK,
    return_factors: bool = False,
    noise: NoiseStream | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """sum_i of G_i = dy_i^T x_i with each tile of G_i clipped to the tile's own bound.

    Holds the G_i of a few samples at a time, of one where it is large.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the O outputs' gradient; fp64 where x is, else of any narrower dtype.
        bound: what one sample may move the whole result by, in L2; above 0. math.inf clips
            nothing, but still removes the tiles whose norm is not finite.
        block: outputs and inputs of a tile, powers of two from 16 to 128. Part of what the
            result means: the tiles are the clipping groups.
        return_factors: also return the factors c_ik.
        noise: added to the sum, to element [o, i] the stream's element offset + o I + i.

    Returns:
        [O, I], fp32 (fp64 for fp64 operands); with return_factors also [B, tiles], fp32, tiles
        row by row. A factor is 0 where the tile's norm is not finite.

    Guarantees:
        c_ik ||tile k of G_i|| <= C_k (see `block_bounds`) in fp32 arithmetic, for the very G_i
        that is summed; so one sample moves the sum by at most bound. c_ik depends on sample i
        alone.
    """
    batch, outputs, inputs = x.shape[0], dy.shape[2], x.shape[2]
    bounds = block_bounds(outputs, inputs, bound, block).to(x.device)
    (down, height), (across, width) = _tiling(outputs, block[0]), _tiling(inputs, block[1])
    if width > _FP32_ROW:
        width = -(-width // _FP32_ROW) * _FP32_ROW
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, dy = x.to(dtype), dy.to(dtype)
    elements = down * height * across * width
    chunk = max(1, min(batch, _CHUNK // max(1, elements)))
    # Behind the edges stay zeros.
    whole = (outputs, inputs) == (down * height, across * width)
    make = x.new_empty if whole else x.new_zeros
    grads = make((chunk, down * height, across * width))
    total = x.new_zeros(down * height, across, width)
    factors = x.new_empty(batch, down, across, dtype=torch.float32)
    for start in range(0, batch if elements else 0, chunk):
        part = grads[: batch - start]
        now = slice(start, start + chunk)
        torch.bmm(dy[now].transpose(1, 2), x[now], out=part[:, :outputs, :inputs])
        tiles = part.view(-1, down, height, across, width)
        factors[now] = hard_clip_factors(_tile_squares(tiles), bounds)
        _add_clipped(total, tiles, factors[now])
    result = total.view(down * height, across * width)[:outputs, :inputs].contiguous()
    if noise is not None:
        noise.add_to_(result)
    return (result, factors.flatten(1)) if return_factors else result


def block_clip_reduce(
    grads: Tensor,
    bound: float,
    *,
    block: tuple[int, int] = BLOCK,
    return_factors: bool = False,
    noise: NoiseStream | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`block_clipped_grad` of stored per-sample gradients.

    Args:
        grads: [B, O, I], B samples, fp16, bf16, fp32 or fp64.
        bound, block, return_factors, noise: as for `block_clipped_grad`; bound may be math.inf.

    Returns:
        As `block_clipped_grad`.

    Guarantees:
        As `block_clipped_grad`.
    """
    batch, outputs, inputs = grads.shape
    bounds = block_bounds(outputs, inputs, bound, block).to(grads.device)
    dtype = torch.promote_types(grads.dtype, torch.float32)
    total = torch.zeros(outputs, inputs, dtype=dtype, device=grads.device)
    factors = torch.ones(batch, *bounds.shape, dtype=torch.float32, device=grads.device)
    for i, top in enumerate(range(0, outputs, block[0])):
        for k, left in enumerate(range(0, inputs, block[1])):
            corner = (slice(top, top + block[0]), slice(left, left + block[1]))
            tiles = grads[:, corner[0], corner[1]].to(dtype)
            squares = torch.linalg.vector_norm(tiles, dim=(1, 2), dtype=torch.float64).square()
            own = hard_clip_factors(squares, bounds[i, k])
            factors[:, i, k] = own
            weights = own.to(dtype).view(-1, 1, 1)
            total[corner] = torch.where(weights == 0, 0.0, tiles * weights).sum(0)
    if noise is not None:
        noise.add_to_(total)
    return (total, factors.flatten(1)) if return_factors else total


def _tiling(size: int, side: int) -> tuple[int, int]:
    """How many tiles a side has, and how long they are."""
    return -(-size // side), min(size, side)


def _tile_squares(tiles: Tensor) -> Tensor:
    """Squared norms [b, down, across] of tiles [b, down, height, across, width], fp64."""
    samples, down, height, across, width = tiles.shape
    runs = tiles.unflatten(4, (-1, min(width, _FP32_ROW)))
    squares = torch.linalg.vector_norm(runs, dim=5).double().square_()
    squares = (
        squares.view(samples * down, height, -1).sum(1).view(samples, down, across, -1).sum(3)
    )
    overflowed = ~torch.isfinite(squares)
    if bool(overflowed.any()):
        squares = torch.where(overflowed, tiles.double().square().sum((2, 4)), squares)
    return squares


def _add_clipped(total: Tensor, tiles: Tensor, factors: Tensor) -> None:
    """Adds sum_i factors_i tiles_i to total; a factor of 0 removes what may be NaN."""
    removed = factors == 0
    if bool(removed.any()):
        tiles = torch.where(removed[:, :, None, :, None], 0.0, tiles)
    of_rows = factors.repeat_interleave(tiles.shape[2], 1).unsqueeze(3).to(total.dtype)
    rows = tiles.flatten(1, 2)
    if rows.shape[0] > _MANY:
        total += (rows * of_rows).sum(0)
        return
    for grad, weights in zip(rows, of_rows, strict=True):
        total.addcmul_(grad, weights)
