"""Clipping by blocks in plain PyTorch: each tile of a weight is a clipping group of its own.

Letters: B samples, T tokens of a sample, I inputs, O outputs of a linear layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import truncated
from .reference import ROOT_SLACK, hard_clip_factors, per_sample_grad, upper_bound
from .spans import Spans

# Elements of per-sample gradients that block_clipped_grad holds at a time, one sample at least.
_CHUNK = 1 << 21

# Outputs and inputs of a clipping group of block_clipped_grad. The release depends on
# it, so it is the same for every device, dtype and tuning.
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
    return bound * shares.sqrt() * ROOT_SLACK


def block_clipped_grad(
    x: Tensor,
    dy: Tensor,
    bound: float,
    *,
    block: tuple[int, int] = BLOCK,
    grid: float | None = None,
    into: Tensor | None = None,
    spans: Spans | None = None,
    return_factors: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """sum_i of G_i = dy_i^T x_i with each tile of G_i clipped to the tile's own bound.

    Holds the G_i of a few samples at a time, of one where it is large.

    Args:
        x: [B, T, I], fp16, bf16, fp32 or fp64: B samples of T tokens with I inputs each.
        dy: [B, T, O], the O outputs' gradient; fp64 where x is, else of any narrower dtype.
        bound: most that one sample may change the whole result by, in L2; above 0. math.inf clips
            nothing, but still removes the tiles whose norm is not finite.
        block: outputs and inputs of a tile, powers of two from 16 to 128. They define
            the result: the tiles are the clipping groups.
        grid: a power of two: each clipped tile is truncated toward zero onto the grid, and the
            sum is exact. None for a sum in fp32 (fp64), rounded.
        into: [O, I], contiguous, fp64, on the grid: the sum of earlier samples, which the sum of
            these is added to in place. Only with a grid.
        spans: see `per_sample_grad`.
        return_factors: also return the factors c_ik.

    Returns:
        [O, I], fp64 exact multiples of the grid, or without one fp32 (fp64 for fp64 operands);
        with return_factors also [B, tiles], fp32, tiles row by row. A factor is 0 where the
        tile's norm is not finite.

    Guarantees:
        c_ik ||tile k of G_i|| <= C_k (see `block_bounds`) in real arithmetic, for the very G_i
        that is summed; so one sample moves the sum by at most bound, exactly with a grid, up to
        the sum's rounding without. c_ik depends on sample i alone.
    """
    batch = x.shape[0] if spans is None else len(spans)
    outputs, inputs = dy.shape[2], x.shape[2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, dy = x.to(dtype), dy.to(dtype)
    total = _zeros(x, outputs, inputs, grid) if into is None else into
    tiles = block_bounds(outputs, inputs, bound, block).numel()
    factors = torch.empty(batch, tiles, dtype=torch.float32, device=x.device)
    chunk = max(1, _CHUNK // max(1, outputs * inputs))
    for start in range(0, batch, chunk):
        now = slice(start, start + chunk)
        own_x, own_dy, own_spans = some_samples(now, x, dy, spans)
        grads = per_sample_grad(own_x, own_dy, spans=own_spans)
        assert isinstance(grads, Tensor)
        factors[now] = _add_clipped(total, grads, bound, block, grid)
    return (total, factors) if return_factors else total


def some_samples(
    samples: slice, x: Tensor, dy: Tensor, spans: Spans | None
) -> tuple[Tensor, Tensor, Spans | None]:
    """(x, dy, spans) of some samples."""
    if spans is None:
        return x[samples], dy[samples], None
    return x, dy, spans[samples]


def block_clip_reduce(
    grads: Tensor,
    bound: float,
    *,
    block: tuple[int, int] = BLOCK,
    grid: float | None = None,
    into: Tensor | None = None,
    return_factors: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`block_clipped_grad` of stored per-sample gradients.

    Args:
        grads: [B, O, I], B samples, fp16, bf16, fp32 or fp64.
        bound, block, grid, into, return_factors: as for `block_clipped_grad`; bound may be
            math.inf.

    Returns:
        As `block_clipped_grad`.

    Guarantees:
        As `block_clipped_grad`.
    """
    total = _zeros(grads, grads.shape[1], grads.shape[2], grid) if into is None else into
    factors = _add_clipped(total, grads, bound, block, grid)
    return (total, factors) if return_factors else total


def _zeros(like: Tensor, outputs: int, inputs: int, grid: float | None) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32) if grid is None else torch.float64
    return torch.zeros(outputs, inputs, dtype=dtype, device=like.device)


def _add_clipped(
    total: Tensor, grads: Tensor, bound: float, block: tuple[int, int], grid: float | None
) -> Tensor:
    """Adds the clipped tiles of grads [b, O, I] to total; returns the factors [b, tiles]."""
    outputs, inputs = grads.shape[1:]
    bounds = block_bounds(outputs, inputs, bound, block)
    factors = torch.empty(grads.shape[0], *bounds.shape, dtype=torch.float32, device=grads.device)
    for i, top in enumerate(range(0, outputs, block[0])):
        for k, left in enumerate(range(0, inputs, block[1])):
            corner = (slice(top, top + block[0]), slice(left, left + block[1]))
            tiles = grads[:, corner[0], corner[1]].double()
            squares = upper_bound(tiles.square().sum((1, 2)), tiles[0:1].numel())
            own = hard_clip_factors(squares, float(bounds[i, k]))
            factors[:, i, k] = own
            weights = own.double().view(-1, 1, 1)
            clipped = torch.where(weights == 0, 0.0, tiles * weights)
            if grid is not None:
                clipped = truncated(clipped, grid)
            total[corner] += clipped.sum(0)
    return factors.flatten(1)
