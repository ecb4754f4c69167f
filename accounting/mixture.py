"""The privacy loss of a `Pair` with several examples, at real outputs.

Letters: s is the noise, q the rate, k the number of examples, and p_j = C(k, j) q^j (1-q)^(k-j)
the probability that j examples are drawn. At the output x the likelihood ratio f of
sum p_j N(j, s^2) and N(0, s^2), and the loss l, are

    f(x) = sum over j of p_j r_j,    r_j = e^((2 j x - j^2) / (2 s^2)),    l = log f,

so l increases with x and is convex. f is a polynomial in e^(x / s^2) whose zeros are real and
negative: so are those of (1 - q + q u)^k, and multiplying the coefficients by e^(-j^2 / (2 s^2))
preserves this (Polya and Schur 1914: a multiplier sequence). So l is analytic for |Im x| < pi s^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf, log_ndtr, logsumexp

from .pairs import Pair

_Real = NDArray[Any]

_LEAST_LOG = -745.0  # log of the least positive number in float64
_NEGLIGIBLE = 45.0  # nats below the largest term of a sum
_AT_ONCE = 1 << 19  # terms evaluated together
_NEWTON_STEPS = 60
_NEAR = 0.5  # absolute loss below which a formula that keeps precision is used


class Mixture:
    """The privacy loss of the mixture sum over j of p_j * N(j, s^2) against N(0, s^2)."""

    def __init__(self, noise: float, rate: float, examples: int) -> None:
        self.noise, self.rate, self.examples = noise, rate, examples
        drawn, absent = math.log(rate), math.log1p(-rate)
        # log p_j for j = 0, ..., k.
        self.log_p = np.array(
            [
                math.log(math.comb(examples, j)) + j * drawn + (examples - j) * absent
                for j in range(examples + 1)
            ]
        )
        # The greatest j whose p_j is above 0 in float64.
        self.most = int(np.flatnonzero(self.log_p > _LEAST_LOG).max())
        # The greatest j whose p_j is not negligible in 1 - p_0.
        some = self.log_p[1:]
        self._usual = 1 + int(np.flatnonzero(some > some.max() - _NEGLIGIBLE).max())

    def loss(self, x: _Real) -> _Real:
        """Return l(x), accurate near 0."""
        return self._in_parts(x, self._loss)

    def mean(self, x: _Real) -> _Real:
        """Return the mean of j given x, which is s^2 times the derivative of l."""
        return self._in_parts(x, self._mean)

    def log_modulus(self, x: _Real, height: float) -> _Real:
        """Return log |f(x + i height)|."""
        return self._in_parts(x, lambda j, x, logs: self._log_modulus(j, x, logs, height))

    def place(self, loss: _Real) -> _Real:
        """Return the output with this loss; -inf if no output has this loss.

        Newton's method for log(f - p_0), a convex function of x, starts above the solution.
        """
        loss = np.asarray(loss, dtype=np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            # log(e^l - p_0)
            target = loss + np.log(-np.expm1(self.log_p[0] - loss))
        x = np.full(target.shape, -np.inf)
        open_ = np.isfinite(target)
        if not open_.any():
            return x
        wanted = target[open_]
        found = np.full(wanted.shape, np.inf)
        for j in range(1, self.most + 1):
            found = np.minimum(found, self.noise**2 * (wanted - self.log_p[j]) / j + j / 2)
        for _ in range(_NEWTON_STEPS):
            value, slope = self._in_parts(found, self._rest)
            step = (value - wanted) / slope
            found = found - step
            if np.all(np.abs(step) <= 1e-15 * np.abs(found) + 1e-16 * self.noise):
                break
        x[open_] = found
        return x

    def log_tails(self, x: float, above: bool) -> tuple[float, float]:
        """Return log P(output below (or above) x) for the mixture, and for N(0, s^2)."""
        side = -1.0 if above else 1.0
        j = np.arange(self.most + 1)
        mixed = logsumexp(self.log_p[: self.most + 1] + log_ndtr(side * (x - j) / self.noise))
        return float(mixed), float(log_ndtr(side * x / self.noise))

    def total_variation(self) -> float:
        """Bound the total variation distance of the two distributions, by convexity."""
        j = np.arange(1, self.most + 1)
        apart = erf(j / (self.noise * math.sqrt(8)))
        return float(np.exp(self.log_p[1 : self.most + 1]) @ apart)

    def exponents(self, x: _Real) -> _Real:
        """Approximate the scale of the rounding error of l(x): |log p_j| of the likely j."""
        j = np.clip(np.rint(self.mean(x)).astype(np.intp), 0, self.examples)
        return np.asarray(8 + 2 * np.abs(self.log_p[j]))

    def loss_variance(self) -> float:
        """Approximate the loss's variance: min(chi-squared divergence, variance at rate 1)."""
        whole = (self.examples / self.noise) ** 2
        j, log_p = np.arange(1, self.most + 1), self.log_p[1 : self.most + 1]
        exponent = np.outer(j, j) / self.noise**2
        # Searches start from this value, so exponents beyond float64's range may be clipped.
        excess = exponent + np.log(-np.expm1(-exponent)) + log_p + log_p[:, None]
        chi_squared = float(np.exp(np.clip(excess, -700.0, 600.0)).sum())
        return min(whole + whole**2 / 4, chi_squared)

    def _in_parts(self, x: _Real, function: Callable[[_Real, _Real, _Real], Any]) -> Any:
        """Apply `function` to (j, x, log r_j [x, j]) for parts of x; omit negligible large j."""
        flat = np.asarray(x, dtype=np.float64).reshape(-1)
        parts: list[Any] = []
        begin = 0
        while begin < len(flat) or not parts:
            # Outputs mostly ascend, so the last j that is not negligible mostly ascends too.
            last = self._last(float(flat[begin : begin + 256].max(initial=0.0)))
            end = begin + max(256, _AT_ONCE // last)
            part = flat[begin:end]
            j = np.arange(1.0, self._last(float(part.max(initial=0.0))) + 1)
            logs = (2 * part[:, None] - j) * (j / (2 * self.noise**2))
            parts.append(function(j, part, logs))
            begin = end
        if isinstance(parts[0], tuple):
            return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))
        return np.concatenate(parts).reshape(np.shape(x))

    def _last(self, x: float) -> int:
        """Return the greatest j whose term is not negligible, for outputs up to x."""
        if not math.isfinite(x):
            return self._usual
        j = np.arange(1, self.examples + 1)
        terms = self.log_p[1:] + (2 * x - j) * (j / (2 * self.noise**2))
        return max(self._usual, 1 + int(np.flatnonzero(terms > terms.max() - _NEGLIGIBLE).max()))

    def _loss(self, j: _Real, x: _Real, logs: _Real) -> _Real:
        log_p = self.log_p[1 : len(j) + 1]
        weights = logs + log_p
        peak = np.maximum(weights.max(axis=1), self.log_p[0])
        total = np.exp(weights - peak[:, None]).sum(axis=1) + np.exp(self.log_p[0] - peak)
        result = peak + np.log(total)
        near = np.abs(result) < _NEAR
        # f - 1 is the sum of p_j (r_j - 1).
        small, p = logs[near], np.exp(log_p)
        terms = np.where(small > 1, np.exp(weights[near]) - p, p * np.expm1(np.minimum(small, 1)))
        result[near] = np.log1p(terms.sum(axis=1))
        return result

    def _mean(self, j: _Real, x: _Real, logs: _Real) -> _Real:
        weights = logs + self.log_p[1 : len(j) + 1]
        peak = np.maximum(weights.max(axis=1), self.log_p[0])
        terms = np.exp(weights - peak[:, None])
        return np.asarray(terms @ j / (terms.sum(axis=1) + np.exp(self.log_p[0] - peak)))

    def _log_modulus(self, j: _Real, x: _Real, logs: _Real, height: float) -> _Real:
        weights = logs + self.log_p[1 : len(j) + 1]
        peak = np.maximum(weights.max(axis=1), self.log_p[0])
        turns = np.exp(1j * (height / self.noise**2) * j)
        total = np.exp(weights - peak[:, None]) @ turns + np.exp(self.log_p[0] - peak)
        return np.asarray(peak + np.log(np.abs(total)))

    def _rest(self, j: _Real, x: _Real, logs: _Real) -> tuple[_Real, _Real]:
        """Return log(f - p_0) and its derivative."""
        weights = logs + self.log_p[1 : len(j) + 1]
        peak = weights.max(axis=1)
        terms = np.exp(weights - peak[:, None])
        total = terms.sum(axis=1)
        return peak + np.log(total), terms @ j / (total * self.noise**2)


@lru_cache(maxsize=1024)
def mixture_of(pair: Pair) -> Mixture:
    """Return the cached mixture of a pair of rate < 1."""
    return Mixture(pair.noise, pair.rate, pair.examples)


@lru_cache(maxsize=1024)
def quantile(pair: Pair, deviations: float) -> float:
    """Return an output that the mixture exceeds with probability at most Phi(-deviations)."""
    mixture = mixture_of(pair)
    wanted = float(log_ndtr(-deviations))
    low, high = deviations * pair.noise, mixture.most + deviations * pair.noise
    while high - low > 0.01 * pair.noise:
        middle = (low + high) / 2
        is_rare = mixture.log_tails(middle, above=True)[0] <= wanted
        low, high = (low, middle) if is_rare else (middle, high)
    return high
