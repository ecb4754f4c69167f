"""Clipping factors, and the parts of a bound that groups and tiles of parameters have."""

from __future__ import annotations

import math

from torch import Tensor

from .reference import FP64_SLACK, hard_clip_factors, rounded_down

# gamma of automatic clipping, as in its paper.
_STABILITY = 0.01
# Rounds a root down by more than the root, and later products with it, may round up.
ROOT_SLACK = 1.0 - 2.0**-50


def clip_factors(squared_norms: Tensor, bound: float, function: str = "hard") -> Tensor:
    """c_i = min(1, bound / n_i), or bound / (n_i + 0.01) for "automatic", rounded down.

    Args:
        squared_norms: [B], fp64, upper bounds of the n_i^2, see `squared_norm`.
        bound: clipping bound, in the units of the norms.
        function: "hard" or "automatic"; the latter needs a finite bound.

    Source: automatic clipping is AUTO-S of Bu et al. (arXiv:2206.07136).

    Returns:
        [B], fp32. A non-finite norm gives 0, as does one so large that c_i would be subnormal.

    Guarantees:
        c_i n_i <= bound in real arithmetic; c_i depends on sample i alone.
    """
    squares = squared_norms.double()
    if function == "hard":
        return hard_clip_factors(squares, bound)
    norms = squares.sqrt()
    return rounded_down(bound / (norms + _STABILITY) * (1 - 2 * FP64_SLACK))


def bound_share(part: int, whole: int) -> float:
    """sqrt(part / whole), rounded down: the bound of a part, as a fraction of the whole bound.

    Guarantees:
        The squares of the shares of disjoint parts sum to at most 1.
    """
    return math.sqrt(part / whole) * ROOT_SLACK
