"""GDPAccountant: an estimate of epsilon by the central limit theorem, not a guarantee."""

from __future__ import annotations

import math
import warnings

from .accountant import Accountant, Interval
from .gaussian import gaussian_delta, gaussian_epsilon
from .pairs import Pair, Pairs, check_plain

_LARGEST_EXPONENT = 600.0


class GDPAccountant(Accountant):
    """Estimate epsilon by Gaussian differential privacy. **The estimate is not an upper bound.**

    The composition is approximated by one Gaussian mechanism with noise multiplier 1 / mu. mu^2 is
    the sum over the steps of q^2 * (exp(1 / s^2) - 1), for a step's noise multiplier s and sample
    rate q; at q = 1 a step adds 1 / s^2, which is exact. For few steps or small s the estimate is
    below the true epsilon, by a factor of up to 16. Each accountant warns at its first estimate.

    Attributes:
        is_bound: False.

    Source:
        Bu, Dong, Long, Su 2020, Deep Learning with Gaussian Differential Privacy, Section 3.2.
    """

    is_bound = False
    _name = "gdp"
    _has_warned = False

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        self._warn()
        return Interval(None, gaussian_epsilon(delta=delta, noise_multiplier=_noise(pairs)))

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        self._warn()
        return Interval(None, gaussian_delta(epsilon=epsilon, noise_multiplier=_noise(pairs)))

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "accountant='gdp' is an approximation and no bound: the true epsilon may be many "
                "times larger. Use accountant='contour' for a guarantee.",
                UserWarning,
                stacklevel=5,
            )


def _noise(pairs: Pairs) -> float:
    """Return 1 / mu, the noise of the closed form; 0 if mu is out of float64's range."""
    check_plain(pairs, "gdp")
    try:
        mu = math.sqrt(math.fsum(count * _squared_mean(pair) for pair, count in pairs))
    except OverflowError:
        return 0.0
    if not mu < 1e150:
        return 0.0
    return 1 / mu if mu else math.inf


def _squared_mean(pair: Pair) -> float:
    exponent = (1 / pair.noise) ** 2
    if pair.rate == 1:
        return exponent
    if exponent > _LARGEST_EXPONENT:
        return math.inf
    # The square of q may underflow even if the product does not.
    return pair.rate * (pair.rate * math.expm1(exponent))
