"""The public grid on which clipped gradients are summed and noise is drawn.

A grid is a power of two. Values on the grid are its integer multiples. fp64 holds and adds these
exactly as long as the integers stay below 2^53, so a sum has the same bits in every order.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

# A bound C is at least 2^30 grid steps and less than 2^31.
_BITS = 30


def grid_of(bound: float) -> float:
    """Return the grid of a bound, 2^(floor(log2 bound) - 30).

    Args:
        bound: the largest L2 norm by which one sample may change a sum; positive and finite.
    """
    return math.ldexp(1.0, math.frexp(bound)[1] - 1 - _BITS)


def check_grid(grid: float) -> None:
    """Check that a grid is valid.

    Raises:
        ValueError: grid is not a power of two whose quotients are exact in fp64.
    """
    number = type(grid) is float or (isinstance(grid, Real) and not isinstance(grid, bool))
    if not number or not 2.0**-500 <= grid <= 2.0**500 or math.frexp(grid)[0] != 0.5:
        raise ValueError(
            f"grid={grid!r}: expected a power of two as a float; pass grid_of(bound) for the "
            "bound of the sum"
        )


def truncated(values: Tensor, grid: float) -> Tensor:
    """Truncate values toward zero onto the grid, in fp64. This never increases a vector's norm."""
    return (values.double() / grid).trunc_().mul_(grid)


def exact_slots(grid: float, bound: float) -> int:
    """Return the number of samples, of norm <= bound, whose noisy sum is exact in fp64."""
    return int(2.0**52 // math.ceil(bound / grid))


def is_on_grid(values: Tensor, grid: float) -> bool:
    """Return whether all values are integer multiples of the grid."""
    steps = values.double() / grid
    return bool(torch.equal(steps, steps.round()))
