"""The lower bound on epsilon that assumes that releases are subsampled Gaussian mechanisms.

The product y of a release with a canary's direction has the law (1 - q) N(0, s^2) + q N(c, s^2) if
the canary is in the data, else N(0, s^2). The rate q is the claimed rate. The contribution c and
the noise's standard deviation s are estimated, so too little noise and missing clipping are found.
All products are used; a guess for each canary would use only one bit of its products.

Source:
    Agrawal et al. 2026 (arXiv 2606.12733) use the sum of a canary's products in place of guesses.
    Here the products' likelihood is used; for weak contributions its limit is the sum.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import ndtri

# Width and range of the bins in which products are counted, in standard deviations.
_BIN, _FARTHEST = 0.01, 12.0
# Largest contribution that is considered, divided by the claimed contribution.
_MOST = 8.0
# Wanted precision: the contribution's lower confidence limit is 8% below the estimate.
_WANTED = 0.08


def log_likelihood_ratio(
    y: NDArray[np.float64], noise_multiplier: float, sample_rate: float, contribution: float = 1.0
) -> NDArray[np.float64]:
    """Return log(likelihood of y if the canary is in the data / likelihood if it is not)."""
    whole: NDArray[np.float64] = contribution * (2 * y - contribution) / (2 * noise_multiplier**2)
    if sample_rate == 1:
        return whole
    return np.asarray(np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + whole))


class Strength:
    """Counts the products of releases with canaries, and bounds the mechanism's strength."""

    def __init__(self, noise_multiplier: float, sample_rate: float):
        self._noise, self._rate = noise_multiplier, sample_rate
        far = _FARTHEST * noise_multiplier
        self._edges = np.arange(-far, far + _MOST, _BIN * noise_multiplier)
        self._counts = np.zeros(len(self._edges) + 1)
        self._sums = np.zeros(len(self._edges) + 1)
        self._squares, self._products = 0.0, 0

    def note(self, y: NDArray[np.float64], included: NDArray[np.bool_]) -> None:
        """Record the products y `[N]` of one release with N canaries, divided by max_grad_norm."""
        inside = y[included]
        bins = np.searchsorted(self._edges, inside)
        self._counts += np.bincount(bins, minlength=len(self._counts))
        self._sums += np.bincount(bins, weights=inside, minlength=len(self._counts))
        self._squares += float((y**2).sum())
        self._products += len(y)

    def further_runs(self, canaries: int, steps: int) -> int:
        """Return the number of further runs (0 to 2), with all canaries in, for a tight bound."""
        if self._rate == 1:
            return 0
        needed = (float(ndtri(0.95)) * self._noise / (_WANTED * self._rate)) ** 2 / steps
        return int(min(2, max(0, math.ceil(needed / canaries - 0.5))))

    def noise_multiplier(self, confidence: float) -> float:
        """Return an upper limit of noise std / contribution; inf if no contribution is found."""
        if self._products < 2 or not self._counts.any():
            return math.inf
        used = self._counts > 0
        counts, means = self._counts[used], self._sums[used] / self._counts[used]
        spread = math.sqrt(self._squares / self._products)

        def likelihood(ratio: float, noise: float) -> float:
            of_noise = self._products * math.log(noise) + self._squares / (2 * noise**2)
            in_data = log_likelihood_ratio(means, noise, self._rate, ratio * noise)
            return float(counts @ in_data) - of_noise

        def greatest(ratio: float) -> float:
            """Return the log-likelihood, maximized over the noise."""
            found = minimize_scalar(
                lambda noise: -likelihood(ratio, noise),
                bounds=(spread / 4, 2 * spread),
                method="bounded",
                options={"xatol": 1e-6 * spread},
            )
            return -float(found.fun)

        best = minimize_scalar(
            lambda ratio: -greatest(ratio), bounds=(0.0, _MOST / spread), method="bounded"
        )
        # Wilks' theorem, one-sided.
        lost = float(ndtri(confidence)) ** 2 / 2

        def above(ratio: float) -> float:
            return -float(best.fun) - greatest(ratio) - lost

        return 1 / float(brentq(above, 0.0, best.x)) if above(0.0) > 0 else math.inf
