"""Closed forms of the Gaussian mechanism and of one subsampled step, and `GaussianAccountant`."""

import math
from collections.abc import Callable

from scipy.special import erfcx, ndtr

from . import _validate
from ._search import smallest_passing
from .accountant import Accountant, Interval
from .pairs import Pair, Pairs, check_allocation, joint_noise

_EXACT = 1e-9  # relative error of the closed form, which is never below the exact value
_ROUNDING = 4e-16


def gaussian_delta(*, epsilon: float, noise_multiplier: float, steps: int = 1) -> float:
    """Compute the exact delta of `steps` Gaussian mechanisms, each on the whole dataset.

    Args:
        epsilon: >= 0, finite.
        noise_multiplier: standard deviation of the noise divided by the sensitivity, >= 0.
        steps: number of mechanisms composed, >= 0.

    Returns:
        Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu) with mu = sqrt(steps) /
        noise_multiplier.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        No smaller delta holds at this epsilon, up to rounding. Steps may be adaptive.

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
    """Compute the exact epsilon of `steps` Gaussian mechanisms, each on the whole dataset.

    Args:
        delta: in (0, 1).
        noise_multiplier: standard deviation of the noise divided by the sensitivity, >= 0.
        steps: number of mechanisms composed, >= 0.

    Returns:
        The least epsilon >= 0 with `gaussian_delta` at most delta, or a value above it by at most
        1e-12 relative; inf without noise.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        No smaller epsilon holds at this delta, up to 1e-12. Steps may be adaptive.

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

    return _least(passes)


def one_step_delta(pair: Pair, epsilon: float) -> float:
    """Compute delta of one step at epsilon, never below the exact value.

    If a sample is removed, the likelihood ratio is 1 - q + q r with the Gaussian's ratio r, so
    delta = q delta_Gaussian(log(1 + (e^epsilon - 1) / q)) (Balle, Barthe, Gaboardi 2018). If a
    sample is added, delta is an integral over the region where 1 > e^epsilon (1 - q + q r), a
    half-line. The symmetric pair has the privacy profile of a removal.
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
    of_p = float(ndtr(x / s))
    # odds > 0 bounds e^epsilon by 1 / (1 - q).
    of_q = math.exp(epsilon) * ((1 - q) * of_p + q * float(ndtr((x - 1) / s)))
    return max(removed, of_p - of_q + _ROUNDING * of_p)


def one_step_epsilon(pair: Pair, delta: float) -> float:
    """Compute the least epsilon >= 0 with `one_step_delta` <= delta, to 1e-12 relative error."""
    return _least(lambda epsilon: one_step_delta(pair, epsilon) <= delta)


def _least(passes: Callable[[float], bool]) -> float:
    """Return the least epsilon >= 0 that passes, or a value at most 1e-12 (relative) above it."""
    if passes(0.0):
        return 0.0
    high = 1.0
    while not passes(high):
        high *= 2
    return smallest_passing(passes, high=high, relative_tolerance=1e-12)


class GaussianAccountant(Accountant):
    """The closed form of the Gaussian mechanism; it supports steps on the whole dataset only.

    Guarantees:
        Epsilon and delta are exact up to rounding. Subsampled steps are refused.

    Source:
        Balle and Wang 2018, Theorem 8.
    """

    _name = "gaussian"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        exact = gaussian_epsilon(delta=delta, noise_multiplier=_noise(pairs))
        return Interval(exact * (1 - _EXACT), exact)

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        exact = gaussian_delta(epsilon=epsilon, noise_multiplier=_noise(pairs))
        return Interval(exact * (1 - _EXACT), exact)


def _noise(pairs: Pairs) -> float:
    check_allocation(pairs, "gaussian")
    for pair, _ in pairs:
        if pair.rate != 1:
            raise ValueError(
                f"sample_rate={pair.rate!r}: accountant='gaussian' is for steps on the whole "
                "dataset only, sample_rate=1; use accountant='contour'"
            )
    return joint_noise(pairs)
