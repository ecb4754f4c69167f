"""RDPAccountant: Renyi differential privacy of the Poisson-subsampled Gaussian.

Formulas use sigma for noise_multiplier, q for sample_rate, a for an order, and
A(a) = E_{x ~ N(0, sigma^2)} (1 + u(x))^a with u(x) = q (exp((2x - 1) / (2 sigma^2)) - 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import binom, gammaln

from . import _validate
from .accountant import Accountant, Interval
from .cumulant import log_mgf
from .pairs import Pair, Pairs, check_allocation

_Array = NDArray[np.float64]


# Orders are dense near 1 (for large epsilon), then tenths, integers, and 5% steps (tiny epsilon).
_ORDERS: tuple[float, ...] = tuple(
    sorted(
        {
            *(1 + np.geomspace(0.01, 0.99, 48)).tolist(),
            *(1 + x / 10 for x in range(1, 100)),
            *map(float, range(11, 65)),
            *np.geomspace(64, 10_000, 104).round().tolist(),
        }
    )
)
_DIGITS = 42.0  # nats of accuracy of the quadrature: e^-42 is far below float64's rounding
_REACH = 11.0  # standard deviations of the integrand that are covered on each side
_SMALLEST_QUADRATURE_SIGMA = 0.05  # for a smaller sigma, nodes grow like 1 / sigma^2
_SMALLEST_SIGMA, _LARGEST_SIGMA = 1e-100, 1e100  # sigma^2 stays within float64
_SERIES_TERMS = 18
_BLOCK = 200_000  # entries of one block of (order, node)


class RDPAccountant(Accountant):
    """Epsilon by Renyi differential privacy: a fast upper bound, a few percent too large.

    Guarantees:
        Under the assumptions of `Accountant` the history is (get_epsilon(delta), delta)-private
        and (epsilon, get_delta(epsilon))-private.

    Source:
        Composition and orders: Mironov 2017. Conversion: Canonne, Kamath, Steinke 2020,
        Proposition 12; Balle et al. 2020, Theorem 21.
    """

    _name = "rdp"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        orders, rdp = np.array(_ORDERS), _composed(pairs)
        epsilons = rdp + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
        return Interval(None, max(0.0, float(epsilons.min())))

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        orders, rdp = np.array(_ORDERS), _composed(pairs)
        with np.errstate(over="ignore"):
            log_deltas = (orders - 1) * (rdp - epsilon)
        log_deltas += orders * np.log1p(-1 / orders) - np.log(orders - 1)
        return Interval(None, math.exp(min(0.0, float(log_deltas.min()))))


def _composed(pairs: Pairs) -> _Array:
    check_allocation(pairs, "rdp")
    rdp = np.zeros(len(_ORDERS))
    for pair, count in pairs:
        rdp += count * _default_rdp(pair)
    return rdp


def compute_rdp(
    *, noise_multiplier: float, sample_rate: float, orders: Sequence[float]
) -> NDArray[np.float64]:
    """Compute the RDP of one Poisson-subsampled Gaussian step, log A(a) / (a - 1) at order a.

    Args:
        noise_multiplier: standard deviation of the noise divided by the sensitivity, >= 0.
        sample_rate: the probability that a sample is in a batch, in [0, 1].
        orders: Renyi orders, each a finite number > 1.

    Returns:
        One value >= 0 per order, in nats; the values of steps add up. 0 if sample_rate is 0, else
        inf if noise_multiplier is 0. Below a noise_multiplier of 0.05, values at fractional orders
        are upper bounds; all other values are exact to about 1e-11 relative.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        The values bound both directions (a sample added, a sample removed).

    Source:
        Mironov, Talwar, Zhang 2019, Renyi Differential Privacy of the Sampled Gaussian Mechanism,
        Theorems 4 and 5, Section 3.3. For whole orders A - 1 is computed as a sum of positive
        terms, for fractional orders as an integral of them, so that tiny values keep precision.
    """
    _validate.non_negative(noise_multiplier=noise_multiplier)
    _validate.rate(sample_rate=sample_rate)
    for order in orders:
        _validate.positive(order=order)
        if order <= 1:
            raise ValueError(f"order={order!r}: expected an order > 1; leave this order out")
    return _rdp(float(noise_multiplier), float(sample_rate), np.array(orders, dtype=np.float64))


@lru_cache(maxsize=4096)
def _default_rdp(pair: Pair) -> _Array:
    orders = np.array(_ORDERS)
    if pair.symmetric or pair.examples > 1:
        rdp = _quadrature_rdp(pair, orders)
    else:
        rdp = _rdp(pair.noise, pair.rate, orders)
    rdp.flags.writeable = False
    return rdp


def _quadrature_rdp(pair: Pair, orders: _Array) -> _Array:
    """Compute RDP by quadrature: the greater of both directions' values (equal if symmetric)."""
    whole = orders / (2 * pair.whole_noise**2)
    rdp = np.zeros_like(orders)
    for signed in (orders,) if pair.symmetric else (orders, 1 - orders):
        value, error = log_mgf(pair, signed.astype(complex), cut=None, enough=0.0)
        with np.errstate(invalid="ignore"):
            # fmin also replaces the NaN of a value beyond float64's range.
            rdp = np.maximum(rdp, np.fmin((value.real + error) / (orders - 1), whole))
    return rdp


def _rdp(sigma: float, q: float, orders: _Array) -> _Array:
    if q == 0 or sigma == math.inf:
        return np.zeros_like(orders)
    with np.errstate(all="ignore"):
        # By joint quasi-convexity, a subsample is at least as private as the whole dataset.
        without_subsampling: _Array = orders / (2 * np.square(sigma))
        if q == 1 or not _SMALLEST_SIGMA < sigma < _LARGEST_SIGMA:
            return without_subsampling
        is_whole = orders == np.floor(orders)
        log_a = np.empty_like(orders)
        log_a[is_whole] = _whole_order_log_a(sigma, q, tuple(orders[is_whole].tolist()))
        fractional = orders[~is_whole]
        if sigma >= _SMALLEST_QUADRATURE_SIGMA:
            log_a[~is_whole] = _fractional_order_log_a(sigma, q, fractional)
        else:
            log_a[~is_whole] = _log_a_between_whole_orders(sigma, q, fractional)
        # fmin also replaces the NaN of an exponent beyond float64's range.
        return np.fmin(log_a / (orders - 1), without_subsampling)


def _whole_order_log_a(sigma: float, q: float, orders: tuple[float, ...]) -> _Array:
    """Return log A, A = 1 + sum_{k=2}^a C(a,k) (1-q)^(a-k) q^k (exp(k(k-1)/(2 sigma^2)) - 1)."""
    if not orders:
        return np.empty(0)
    index, starts, log_binomials = _log_binomials(orders)
    k = np.arange(2.0, max(orders) + 1)
    exponent = k * (k - 1) / (2 * sigma**2)
    log_powers = k * (math.log(q) - math.log1p(-q)) + exponent + np.log(-np.expm1(-exponent))
    terms = log_binomials + log_powers[index]
    peaks = np.maximum.reduceat(terms, starts)
    lengths = np.diff(starts, append=len(terms))
    sums = np.add.reduceat(np.exp(terms - np.repeat(peaks, lengths)), starts)
    return np.logaddexp(0, np.array(orders) * math.log1p(-q) + peaks + np.log(sums))


@lru_cache(maxsize=16)
def _log_binomials(
    orders: tuple[float, ...],
) -> tuple[NDArray[np.intp], NDArray[np.intp], _Array]:
    """Return three lists: k - 2 for all a and k = 2..a, each a's first index, log C(a, k)."""
    lengths = np.array(orders, dtype=np.intp) - 1
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])).astype(np.intp)
    index = np.arange(lengths.sum(), dtype=np.intp) - np.repeat(starts, lengths)
    log_factorials = gammaln(np.arange(max(orders) + 1) + 1)
    a = np.repeat(lengths + 1, lengths)
    log_binomials = log_factorials[a] - log_factorials[index + 2] - log_factorials[a - index - 2]
    return index, starts, log_binomials


def _fractional_order_log_a(sigma: float, q: float, orders: _Array) -> _Array:
    """Return the log of A = 1 + E((1 + u)^a - 1 - a u), with E by the trapezoidal rule.

    The integrand is positive (Bernoulli; E u = 0) and analytic for |Im x| < pi sigma^2, since 1 +
    u has no zero there. On a line Im x = s in this strip its modulus is larger by at most exp(s^2
    / (2 sigma^2)), so a step h has a relative error of exp(s^2 / (2 sigma^2) - 2 pi s / h).
    """
    if not orders.size:
        return np.empty(0)
    strip = min(0.9 * math.pi * sigma**2, sigma * math.sqrt(2 * _DIGITS))
    step = 2 * math.pi * strip / (_DIGITS + strip**2 / (2 * sigma**2))
    last = max(2.0, float(orders.max())) + _REACH * sigma
    x: _Array = np.arange(-_REACH * sigma, last + step, step, dtype=np.float64)
    log_weights = math.log(step / (sigma * math.sqrt(2 * math.pi))) - (x / sigma) ** 2 / 2
    blocks = max(1, len(x) * len(orders) // _BLOCK)
    log_excess = [
        np.logaddexp.reduce(_log_excess(sigma, q, part[:, None], x) + log_weights, axis=1)
        for part in np.array_split(orders, min(blocks, len(orders)))
    ]
    return np.logaddexp(0, np.concatenate(log_excess))


def _log_excess(sigma: float, q: float, a: _Array, x: _Array) -> _Array:
    """Return log((1 + u)^a - 1 - a u), [orders, nodes], for a [orders, 1], ascending x [nodes].

    Nodes with u below, around and above 0 are computed by three formulas that keep precision.
    """
    log_ratio = (2 * x - 1) / (2 * sigma**2)
    u = q * np.expm1(np.minimum(log_ratio, 700.0))
    around = min(0.1, 0.5 / float(a.max()))
    first, last = np.searchsorted(u, (-around, around))

    below = u[:first]
    log_below = np.log(np.expm1(a * np.log1p(below)) - a * below)

    near = u[first:last]
    terms = np.arange(2, _SERIES_TERMS + 2)
    log_near = 2 * np.log(np.abs(near)) + np.log(binom(a, terms) @ near ** (terms[:, None] - 2))

    above = log_ratio[last:]
    power = a * np.logaddexp(math.log1p(-q), math.log(q) + above)
    log_u = math.log(q) + above + np.log(-np.expm1(-above))
    log_above = power + np.log(-np.expm1(np.logaddexp(0, np.log(a) + log_u) - power))
    return np.concatenate((log_below, log_near, log_above), axis=1)


def _log_a_between_whole_orders(sigma: float, q: float, orders: _Array) -> _Array:
    """Bound log A from above, by interpolation: log A is convex in the order, and 0 at order 1."""
    lower = np.floor(orders)
    whole = np.unique(np.concatenate((lower, lower + 1)))
    whole = whole[whole > 1]
    log_a = np.concatenate(([0.0], _whole_order_log_a(sigma, q, tuple(whole.tolist()))))
    return np.interp(orders, np.concatenate(([1.0], whole)), log_a)
