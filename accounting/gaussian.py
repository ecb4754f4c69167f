"""Closed form of the Gaussian mechanism without subsampling: the oracle of the accountants."""

import math

from scipy.special import erfcx, ndtr

from . import _validate
from ._search import least_that_passes

__all__ = ["gaussian_delta", "gaussian_epsilon"]


def gaussian_delta(*, epsilon: float, noise_multiplier: float, steps: int = 1) -> float:
    """The exact delta of `steps` Gaussian mechanisms, each on the whole data set.

    Args:
        epsilon: >= 0, finite.
        noise_multiplier: standard deviation of the noise over the sensitivity, >= 0.
        steps: number of mechanisms composed, >= 0.

    Returns:
        Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) with mu = sqrt(steps) /
        noise_multiplier.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        Tight, up to rounding: no smaller delta holds at this epsilon. Steps may be adaptive.

    Source:
        Balle and Wang 2018, Theorem 8. Composition: Dong, Roth, Su 2022, Corollary 3.3.
    """
    _validate.finite_non_negative(epsilon=epsilon)
    _validate.non_negative(noise_multiplier=noise_multiplier)
    _validate.whole(0, steps=steps)
    if steps == 0 or noise_multiplier == math.inf:
        return 0.0
    if noise_multiplier == 0:
        return 1.0
    mu = math.sqrt(steps) / noise_multiplier
    a = epsilon / mu - mu / 2
    # e^epsilon Phi(-mu/2 - epsilon/mu) = e^(-a^2/2) erfcx(.)/2, without the overflow.
    density = math.exp(-a * a / 2) / 2
    other = float(erfcx((epsilon / mu + mu / 2) / math.sqrt(2)))
    if a < 0:
        return max(0.0, float(ndtr(-a)) - density * other)
    return max(0.0, density * (float(erfcx(a / math.sqrt(2))) - other))


def gaussian_epsilon(*, delta: float, noise_multiplier: float, steps: int = 1) -> float:
    """The exact epsilon of `steps` Gaussian mechanisms, each on the whole data set.

    Args:
        delta: in (0, 1).
        noise_multiplier: standard deviation of the noise over the sensitivity, >= 0.
        steps: number of mechanisms composed, >= 0.

    Returns:
        The least epsilon >= 0 with `gaussian_delta` at most delta, to 1e-12 relative and never
        below; inf without noise.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        As for `gaussian_delta`.

    Source:
        Balle and Wang 2018, Theorem 8, solved for epsilon.
    """
    _validate.probability(delta=delta)
    _validate.non_negative(noise_multiplier=noise_multiplier)
    _validate.whole(0, steps=steps)
    if noise_multiplier == 0 and steps > 0:
        return math.inf

    def passes(epsilon: float) -> bool:
        found = gaussian_delta(epsilon=epsilon, noise_multiplier=noise_multiplier, steps=steps)
        return found <= delta

    if passes(0.0):
        return 0.0
    high = 1.0
    while not passes(high):
        high *= 2
    return least_that_passes(passes, high=high, relative_tolerance=1e-12)
