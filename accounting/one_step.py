"""One step of the Poisson-subsampled Gaussian mechanism, in closed form."""

import math

from scipy.special import ndtr

from ._search import least_that_passes
from .gaussian import gaussian_delta
from .pairs import Pair

__all__ = ["one_step_delta", "one_step_epsilon"]

_ROUNDING = 4e-16


def one_step_delta(pair: Pair, epsilon: float) -> float:
    """Delta of one step at epsilon, never below the truth.

    Removing a sample: the likelihood ratio is 1 - q + q r with that of the Gaussian, r, so that
    delta = q delta_Gaussian(log(1 + (e^epsilon - 1) / q)) (Balle, Barthe, Gaboardi 2018). Adding
    one: the region where 1 > e^epsilon (1 - q + q r) is a half-line. The symmetric pair has the
    profile of the former.
    """
    q, s = pair.rate, pair.noise
    if epsilon < 1:
        inner = math.log1p(math.expm1(epsilon) / q)
    else:
        inner = epsilon - math.log(q) + math.log1p(-(1 - q) * math.exp(-epsilon))
    removed = q * gaussian_delta(epsilon=inner, noise_multiplier=s)
    odds = math.expm1(-epsilon) + q
    if pair.symmetric or odds <= 0:
        return removed
    x = s * s * (math.log(odds) - math.log(q)) + 0.5
    told = float(ndtr(x / s))
    # odds > 0 bounds e^epsilon by 1 / (1 - q).
    untold = math.exp(epsilon) * ((1 - q) * told + q * float(ndtr((x - 1) / s)))
    return max(removed, told - untold + _ROUNDING * told)


def one_step_epsilon(pair: Pair, delta: float) -> float:
    """The least epsilon >= 0 with `one_step_delta` at most delta, to 1e-12 relative."""

    def passes(epsilon: float) -> bool:
        return one_step_delta(pair, epsilon) <= delta

    if passes(0.0):
        return 0.0
    high = 1.0
    while not passes(high):
        high *= 2
    return least_that_passes(passes, high=high, relative_tolerance=1e-12)
