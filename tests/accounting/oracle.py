"""The truth about composed subsampled Gaussians, by means of its own: nothing of the library.

A setting is a list of phases (s, q, T): T steps of sample rate q with noise s. Of one step
P = (1-q) N(0, s^2) + q N(1, s^2) and Q = N(0, s^2) ("remove"), or the two exchanged ("add");
L = log dP/dQ; 1 + u = 1 - q + q exp((2x - 1) / (2 s^2)) is P/Q of "remove" at x. The profile
delta(epsilon) = E_P (1 - exp(epsilon - sum of L))_+ is found in two unrelated ways:

- closed forms (`gaussian_delta`, `one_step_delta`) and quadrature over the outputs x of the first
  steps with the closed form for the last (`few_steps_delta`), in mpmath;
- `Contour`: delta(epsilon) = (1 / 2 pi i) int (M(z) - 1) / (z (z+1)) e^(-epsilon z) dz, where M(z)
  is the product of the steps' E_P e^(zL) = E (1+u)^v over x ~ N(0, s^2), v = z + 1 ("remove") or
  -z ("add"). The integrand is entire, so that the line may pass 0 on either side and be bent by
  any angle at which it decays ("add" keeps the 1 and stays right of 0). x runs over a curve too,
  one on which e^(zL) cancels little. 80-bit numbers, each sum with a bound of its error; a row's
  digits are those in which two lines of other angles and finer nodes agree, less what the bounds
  leave open. test_oracle.py holds this against the former for one and two steps.

    python tests/accounting/oracle.py     # rows of truth.json that have no epsilon get theirs
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mpmath
import numpy as np
from mpmath import mp, mpf

TRUTH = Path(__file__).with_name("truth.json")
REMOVE, ADD = "remove", "add"
DIRECTIONS = (REMOVE, ADD)

Phases = tuple[tuple[float, float, int], ...]

_Long = np.longdouble
_ROUNDING = float(np.finfo(_Long).eps)
_PI = _Long("3.14159265358979323846264338327950288")
_NATS = -math.log(_ROUNDING) + 3  # to which sums over x are carried
_LINES = ((78.0, 1 / 100), (84.0, 1 / 160), (88.0, 1 / 300), (89.5, 1 / 400))
_OTHER_LINES = ((82.0, 1 / 120), (86.0, 1 / 200), (89.0, 1 / 400), (72.0, 1 / 70))


# Closed forms and quadrature over x, mpmath.


def gaussian_delta(epsilon, mu):
    """Profile of N(mu, 1) against N(0, 1), at any real epsilon."""
    epsilon, mu = mpf(epsilon), mpf(mu)
    here = mpmath.ncdf(mu / 2 - epsilon / mu)
    return here - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def one_step_delta(epsilon, noise, rate, direction):
    """Profile of one step at any real epsilon."""
    epsilon, s, q = mpf(epsilon), mpf(noise), mpf(rate)
    edge = mpmath.exp(epsilon if direction == REMOVE else -epsilon)  # 1 + u > or < edge
    if edge <= 1 - q:
        return 1 - mpmath.exp(epsilon) if direction == REMOVE else mpf(0)
    x = mpf(1) / 2 + s**2 * mpmath.log((edge - (1 - q)) / q)
    if direction == REMOVE:
        above, above_shifted = mpmath.ncdf(-x / s), mpmath.ncdf((1 - x) / s)
        # P - e^epsilon Q of {x > x*}
        return q * above_shifted - (edge - (1 - q)) * above
    below, below_shifted = mpmath.ncdf(x / s), mpmath.ncdf((x - 1) / s)
    return below - mpmath.exp(epsilon) * ((1 - q) * below + q * below_shifted)


def one_step_deltas(noise, rate, epsilon):
    """`one_step_delta` of something removed and of something added, from 60 digits."""
    with mp.workdps(60):
        return tuple(float(one_step_delta(epsilon, noise, rate, d)) for d in DIRECTIONS)


def few_steps_delta(epsilon, noise, rate, steps, direction, degree=60):
    """Profile of up to three steps: Gauss-Legendre over x of all but the last."""
    if steps == 1:
        return one_step_delta(epsilon, noise, rate, direction)
    epsilon, s, q = mpf(epsilon), mpf(noise), mpf(rate)

    def loss(x):
        found = mpmath.log1p(q * mpmath.expm1((2 * x - 1) / (2 * s**2)))
        return found if direction == REMOVE else -found

    def density(x):
        base = mpmath.npdf(x, 0, s)
        return (1 - q) * base + q * mpmath.npdf(x, 1, s) if direction == REMOVE else base

    reach = mpmath.sqrt(2 * (mp.dps + 5) * mpmath.log(10)) * s
    ends = [-reach, mpf(0), reach] if direction == ADD else [-reach, mpf(0), mpf(1), 1 + reach]
    # Where the rest passes the least loss it can have, the profile has a point of no analyticity.
    least = mpmath.log1p(-q) * (steps - 1) if q < 1 else -mpmath.inf
    kink = epsilon - least if direction == REMOVE else -epsilon - least
    edge = mpmath.expm1(kink) / q + 1 if q < 1 else mpf(0)
    if edge > 0:
        # Next to it the rest's profile falls within a change of q in the loss.
        middle = mpf(1) / 2 + s**2 * mpmath.log(edge)
        ends += [middle] + [middle + sign * s / 2**k for k in range(45) for sign in (-1, 1)]
    ends = sorted({min(max(end, ends[0]), max(ends)) for end in ends})
    step, cells = s / 2 if steps == 2 else s, []
    for a, b in zip(ends, ends[1:], strict=False):
        count = max(1, int(mpmath.ceil((b - a) / step)))
        cells += [(a + (b - a) * k / count, (b - a) / count) for k in range(count)]
    nodes = _gauss_legendre(degree, mp.dps)
    total = mpf(0)
    for start, width in cells:
        for node, weight in nodes:
            x = start + width * node
            p = density(x)
            if p > mpf(10) ** (-mp.dps - 25):
                rest = few_steps_delta(epsilon - loss(x), s, q, steps - 1, direction, degree)
                total += weight * width * p * rest
    return total


@lru_cache(maxsize=16)
def _gauss_legendre(degree, dps):
    """Nodes and weights on [0, 1]."""
    found = []
    with mp.workdps(dps + 10):
        for k in range(degree):
            x = mpmath.cos(mp.pi * (k + mpf(3) / 4) / (degree + mpf(1) / 2))
            for _ in range(100):
                older, newer = mpf(1), x
                for n in range(2, degree + 1):
                    older, newer = newer, ((2 * n - 1) * x * newer - (n - 1) * older) / n
                slope = degree * (x * newer - older) / (x * x - 1)
                change = newer / slope
                x -= change
                if abs(change) < mpf(10) ** (-dps - 5):
                    break
            found.append(((1 - x) / 2, 1 / ((1 - x * x) * slope**2)))
    return tuple(found)


# The moment E_Q (1+u)^v on curves of x, 80 bits.


@dataclass(frozen=True)
class Curve:
    """x(r) = r + i y(r): y = height, bent to `slope` right of where q exp(...) is 1 - q."""

    noise: float
    rate: float
    height: float
    slope: float
    reach: float  # the last r
    nats: float  # the logarithm of the accuracy that the nodes are for

    def nodes(self):
        """r, y, and dy/dr, and the step; long doubles."""
        s = self.noise
        step = min(4.8 * s**2 / self.nats, 3.1 * s / math.sqrt(self.nats))
        first = -(math.sqrt(2 * self.nats) + 2) * s - abs(self.height)
        r = first + step * np.arange(math.ceil((self.reach - first) / step) + 1, dtype=_Long)
        t = r - self.turn
        root = np.hypot(t, _Long(s * s))
        return r, self.height + self.slope * (t + root) / 2, self.slope * (1 + t / root) / 2, step

    @property
    def turn(self):
        return 0.5 + self.noise**2 * math.log((1 - self.rate) / self.rate)


def _series(x, coefficients):
    """sum of coefficients[k] x^(k + 2), for small complex x."""
    total = np.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * x + coefficient
    return total * x * x


_EXP = [1 / _Long(math.factorial(k)) for k in range(2, 22)]
_LOG = [_Long((-1) ** (k + 1)) / k for k in range(2, 40)]


def _expm1_less(w):
    """e^w - 1 - w."""
    small = np.abs(w) < 0.5
    safe = np.where(small, 0, w)
    return np.where(small, _series(np.where(small, w, 0), _EXP), np.exp(safe) - 1 - safe)


def _log1p_less(u):
    """log(1 + u) - u, principal branch."""
    small = np.abs(u) < 0.25
    safe = np.where(small, 0, u)
    return np.where(small, _series(np.where(small, u, 0), _LOG), np.log(1 + safe) - safe)


_SHAPES = [
    (0.0, "short"),
    (0.0, "long"),
    (0.15, "long"),
    (0.35, "bent"),
    (0.6, "bent"),
    (0.9, "bent"),
]  # slope, reach


class Step:
    """Moments of one step."""

    def __init__(self, noise, rate, nats=_NATS):
        self.noise, self.rate, self.nats = noise, rate, nats
        self.reach = math.sqrt(2 * nats) + 1
        self._tables = {}

    def table(self, curve):
        """Weights, log(1+u), log(1+u) - u and the logarithm of the density's exponential."""
        if curve not in self._tables:
            r, y, slope, step = curve.nodes()
            x, dx = r + 1j * y, step * (1 + 1j * slope)
            s, q = _Long(self.noise), _Long(self.rate)
            ratio = (2 * x - 1) / (2 * s * s)
            u = q * (_expm1_less(ratio) + ratio)
            less = _log1p_less(u)
            log = np.where(np.abs(u) < 0.25, less + u, np.log(1 + u))
            # The curve passes below the branch point: right of it the branch is the exponent's.
            turns = np.where(r > curve.turn, np.round((ratio.imag - log.imag) / (2 * np.pi)), 0)
            turn = 2j * _PI * turns
            weight = dx / (s * np.sqrt(2 * _PI))
            self._tables[curve] = (weight, log + turn, less + turn, -x * x / (2 * s * s))
        return self._tables[curve]

    def curves(self, v):
        """Candidates for values of v whose imaginary parts have one sign."""
        s, q, sign = self.noise, self.rate, -1 if v.imag.min() < 0 else 1
        short = 1.0 + self.reach * s
        # Up to about v, where the Gaussian of rate 1 has its saddle, if that can be seen.
        visible = v.real[self.saddle(v) > -self.nats - 20]
        long = max(short, float(visible.max(initial=0)) + self.reach * s)
        found = [Curve(s, q, 0.0, 0.0, long, self.nats)]
        if np.any(v.imag != 0):
            bent = max(long, max(short, min(found[0].turn, 9 * s)) + self.reach * s)
            for angle in (0.0, 0.3, 0.7, 1.2):
                height = angle * min(s * s, 3 * s)
                for slope, reach in _SHAPES:
                    reach = {"short": short, "long": long, "bent": bent}[reach] + height
                    found.append(Curve(s, q, sign * height, sign * slope, reach, self.nats))
        return found

    def saddle(self, v):
        """The logarithm of q^v exp(v (v-1) / (2 s^2)), what the integrand around x = v is."""
        v = np.asarray(v, dtype=complex)
        return (v * math.log(self.rate) + v * (v - 1) / (2 * self.noise**2)).real

    def log_moment(self, v):
        """log E_Q (1+u)^v and a bound of its error, for complex long doubles v."""
        v = np.asarray(v, dtype=np.clongdouble)
        if self.rate == 1:
            exponent = v * (v - 1) / (2 * _Long(self.noise) ** 2)
            return exponent, 4 * _ROUNDING * np.abs(exponent)
        curves = self.curves(v)
        best, cost = self.choose(curves, v)
        log = np.zeros(len(v), dtype=np.clongdouble)
        error = np.zeros(len(v), dtype=_Long)
        for k, curve in enumerate(curves):
            own = np.nonzero(best == k)[0]
            for part in np.array_split(own, len(own) // 100 + 1):
                if len(part):
                    log[part], error[part] = self._sum(curve, v[part])
        # The constant 1 of M - 1 has no risk, so that a cost of rounding's size is known better.
        with np.errstate(over="ignore"):
            risk = np.exp(cost - log.real)
        return log, error + np.where(risk > 1e-17, risk, 0)

    def choose(self, curves, v):
        """For each v the curve with the least error, as 64 bits tell, and that error's log."""
        v = np.asarray(v, dtype=complex)[:, None]
        costs = []
        for curve in curves:
            weight, log, _, gauss = (np.asarray(part, dtype=complex) for part in self.table(curve))
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                exponent = v * log + gauss
                peak = exponent.real.max(axis=1)
                terms = weight * np.exp(exponent - peak[:, None])
                size = np.abs(terms).sum(axis=1)
                cost = _ROUNDING * size + _aliased(terms, size)
                cost += np.abs(terms[:, 0]) + np.abs(terms[:, -1])
                # Sums of terms that turn too fast may be wrong without showing it.
                fast = np.abs(np.diff(exponent.imag)) > 2.6
                risk = np.where(fast, np.abs(terms[:, 1:]), 0).max(axis=1)
                cost = np.log(cost + risk) + peak
                beyond = v[:, 0].real + 8 * self.noise > curve.reach
                cost = np.where(beyond, np.logaddexp(cost, self.saddle(v[:, 0])), cost)
            costs.append(np.where(np.isnan(cost), 1e9, cost))
        return np.argmin(costs, axis=0), np.min(costs, axis=0)

    def _sum(self, curve, v):
        weight, log, less, gauss = self.table(curve)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            w = v[:, None] * log
            density = weight * np.exp(gauss)
            powers = weight * np.exp(w + gauss)
            sizes = np.abs(powers)
            whole = powers.sum(axis=1)
            # Exponents' own rounding grows with their size; of small w no digit is lost.
            lost = (sizes * (np.abs(w) + np.abs(gauss) + 2)).sum(axis=1) * 2 * _ROUNDING
            lost += _aliased(powers, sizes.sum(axis=1)) + sizes[:, 0] + sizes[:, -1]
            # Near 1: M - 1, as a sum without cancellation.
            terms, linear = weight * _tilted(w, gauss), density * less
            excess = terms.sum(axis=1) + v * linear.sum()
            small = np.abs(w) < 0.5
            digits = np.abs(gauss) + 2 + np.where(small, 0, np.abs(w))
            cut = np.where(small, 0, np.abs(density) * (1 + np.abs(w)))
            wrong = (np.abs(terms) * digits + cut).sum(axis=1) + np.abs(v) * np.abs(linear).sum()
            wrong = 2 * _ROUNDING * wrong + np.abs(terms[:, 0]) + np.abs(terms[:, -1])
            wrong += _aliased(terms, np.abs(terms).sum(axis=1))
            near = np.abs(excess) < 0.5
            excess = np.where(near, excess, 0)
            found = np.where(near, _log1p_less(excess) + excess, np.log(whole))
            error = np.where(near, wrong / np.abs(1 + excess), lost / np.abs(whole))
        known = np.isfinite(found) & np.isfinite(error)
        return np.where(known, found, 0), np.where(known, error, np.inf)

    def real(self, v):
        """E_Q (1+u)^v - 1 and its first two derivatives at a real v; inf beyond 80 bits."""
        v = _Long(v)
        if self.rate == 1:
            s2 = _Long(self.noise) ** 2
            exponent, slope = v * (v - 1) / (2 * s2), (2 * v - 1) / (2 * s2)
            if exponent > 11_000:
                return np.inf, np.inf, np.inf
            value = np.exp(exponent)
            return np.expm1(exponent), value * slope, value * (slope**2 + 1 / s2)
        x = np.linspace(0, max(float(v), 0), 400)
        with np.errstate(over="ignore", invalid="ignore"):
            ratio = (2 * x - 1) / (2 * self.noise**2)
            exponent = float(v) * np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + ratio)
        if not (exponent - x * x / (2 * self.noise**2)).max() < 11_000:
            return np.inf, np.inf, np.inf
        top = max(1.0, float(v)) + self.reach * self.noise
        # A power of two, so that neighbouring v share a table.
        curve = Curve(self.noise, self.rate, 0.0, 0.0, 2.0 ** math.ceil(math.log2(top)), self.nats)
        weight, log, less, gauss = (part.real for part in self.table(curve))
        w = v * log
        if (w + gauss).max() > 11_000:
            return np.inf, np.inf, np.inf
        value = (weight * _tilted(w, gauss)).sum()
        density, powers = weight * np.exp(gauss), weight * np.exp(w + gauss)
        value += v * (density * less).sum()
        near = np.abs(w) < 0.5
        first = np.where(near, density * np.expm1(np.where(near, w, 0)), powers - density)
        return value, (first * log + density * less).sum(), (powers * log * log).sum()


def _aliased(terms, size):
    """The error of a trapezoidal sum: halving the step squares it, relatively."""
    halved = np.abs(terms.sum(axis=-1) - 2 * terms[..., ::2].sum(axis=-1))
    return np.where(size > 0, halved * (halved / np.where(size > 0, size, 1)), 0)


def _tilted(w, gauss):
    """(e^w - 1 - w) e^gauss, where w alone may be beyond the range."""
    small = np.abs(w) < 0.5
    near = _series(np.where(small, w, 0), _EXP) * np.exp(gauss)
    return np.where(small, near, np.exp(w + gauss) - np.exp(gauss) * (1 + w))


# From moments to delta and epsilon.


class Contour:
    """The profile of phases in one direction.

    Attributes:
        lines: (angle, step) of lines that may be taken, the first that loses no digits: degrees
            from the real axis at which it leaves, and the step of the trapezoidal rule along it.
        nats: the logarithm of the accuracy of each moment's nodes.
    """

    def __init__(self, phases, direction, *, lines=_LINES, nats=_NATS):
        self.phases, self.direction = tuple(phases), direction
        self.lines, self.nats = lines, nats
        self.parts = [(_step(noise, rate, nats), steps) for noise, rate, steps in self.phases]
        self.line = None

    def v(self, z):
        return z + 1 if self.direction == REMOVE else -z

    def log_moment(self, z):
        """log M(z), up to whole turns, and a bound of its rounding."""
        total, error = np.zeros(len(z), dtype=np.clongdouble), np.zeros(len(z), dtype=_Long)
        for part, steps in self.parts:
            log, lost = part.log_moment(self.v(z))
            total += steps * log
            error += steps * (lost + _ROUNDING * np.abs(log))
        return total, error

    def height(self, c):
        """The logarithm of the integrand without e^(-epsilon z), at a real c, and its first two
        derivatives; convex.
        """
        total = slope = curve = _Long(0)
        for part, steps in self.parts:
            value, first, second = part.real(self.v(_Long(c)))
            if not np.isfinite(value):
                return np.inf, np.inf, np.inf
            first /= 1 + value
            total += steps * np.log1p(value)
            slope += steps * first
            curve += steps * (second / (1 + value) - first**2)
        slope = slope if self.direction == REMOVE else -slope
        # "add" keeps the 1: e^(-epsilon z) grows where its line goes.
        share = -1 / np.expm1(-total) if self.direction == REMOVE else _Long(1)
        c = _Long(c)
        log = total - np.log(np.abs(share * c * (c + 1)))
        first = slope * share - 1 / c - 1 / (c + 1)
        second = curve * share + slope**2 * (share - share**2) + 1 / c**2 + 1 / (c + 1) ** 2
        return log, first, second

    def saddle(self, reached: Callable[[float, tuple], bool]) -> float:
        """The least c (> 0 for "add") at which a predicate that turns true once is true."""

        def passes(c):
            found = self.height(c)
            return not np.isfinite(found[0]) or reached(c, found)

        middle, sign = (-0.5, 1) if self.direction == REMOVE else (0.0, 1)
        if self.direction == REMOVE and passes(middle + 1e-6):
            sign = -1
        low, high = 1e-5, 1e9  # |c - middle|
        for _ in range(50):
            distance = math.sqrt(low * high)
            # Off the removable poles, next to which digits are lost.
            if passes(middle + sign * distance * (1 + 1e-7)) == (sign > 0):
                high = distance
            else:
                low = distance
        return middle + sign * low

    def draw(self, epsilon):
        """Lay the line of z for an epsilon and compute the moments on it."""
        c = self.saddle(lambda _, found: found[1] >= epsilon)
        best = np.inf
        for number, (angle, step) in enumerate(self.lines):
            line = self._along(c, math.radians(angle), step)
            self.line, older = line, self.line
            value, _, lost = self.delta(epsilon)
            error = abs(lost / value) if np.isfinite(lost) and value > 0 else np.inf
            if number and not error < best:
                self.line = older
            best = min(best, error)
            if best < 1e-11:
                break
        return best

    def _along(self, c, angle, step):
        scale = 1 / np.sqrt(abs(self.height(c)[2]))
        sign = 1 if self.direction == REMOVE else -1
        along, up = sign * _Long(math.cos(angle)), _Long(math.sin(angle))
        one = 0 if self.direction == REMOVE else -np.inf
        parts, block, greatest = [], 40, -np.inf
        epsilon = float(self.height(c)[1])
        for number in range(90):
            tau = step * np.arange(number * block, (number + 1) * block, dtype=_Long)
            z = c + scale * (along * (np.cosh(tau) - 1) + 1j * up * np.sinh(tau))
            dz = scale * (along * np.sinh(tau) + 1j * up * np.cosh(tau))
            log, error = self.log_moment(z)
            parts.append((z, dz, log, error))
            sizes = np.log(np.abs(dz / (z * (z + 1)))) + np.maximum(log.real, one)
            sizes -= epsilon * z.real
            greatest = max(greatest, float(sizes.max()))
            if not sizes.max() > greatest - _NATS - 6 or not np.isfinite(error).any():
                break
        return step, *(np.concatenate(part) for part in zip(*parts, strict=True))

    def delta(self, epsilon):
        """delta, its derivative, and a bound of delta's error, from the drawn line."""
        step, z, dz, log, error = self.line
        epsilon = _Long(epsilon)
        with np.errstate(over="ignore", invalid="ignore"):
            powers, damping = np.exp(log - epsilon * z), np.exp(-epsilon * z)
            small = np.abs(log) < 0.5
            near = (_series(np.where(small, log, 0), _EXP) + log) * damping
            far = powers - damping if self.direction == REMOVE else powers
            sizes = np.abs(powers)
            if self.direction == REMOVE:
                sizes = sizes + np.abs(damping)
                far, sizes = np.where(small, near, far), np.where(small, np.abs(near), sizes)
            terms = far * dz / (z * (z + 1))
            lost = np.abs(powers) * np.minimum(error, 1e9)
            lost += sizes * _ROUNDING * (2 + np.abs(epsilon * z))
            lost = (lost * np.abs(dz / (z * (z + 1)))).sum()
        terms[0] /= 2
        size = np.abs(terms).sum()
        halved = terms[::2].imag.sum() * 2 - terms.imag.sum()
        lost += size * _ROUNDING + np.abs(terms[-1]) + halved**2 / size
        share = step / _PI
        return share * terms.imag.sum(), -share * (terms * z).imag.sum(), share * lost

    def at(self, epsilon):
        """delta and the bound of its rounding, on a line drawn for this epsilon."""
        self.draw(epsilon)
        value, _, lost = self.delta(epsilon)
        return value, lost

    def epsilon(self, delta):
        """The epsilon > 0 of this delta, which exists, and a bound of its relative error."""

        def reached(c, found):
            log, epsilon, curve = found
            return log - epsilon * c - np.log(2 * np.pi * curve) / 2 < math.log(delta)

        # First the saddle point's approximation, then Newton's steps, each round on a line of its
        # own: one that was drawn for a far epsilon may misjudge.
        found = max(self.height(self.saddle(reached))[1], _Long(1e-12))
        for _ in range(40):
            if self.draw(found) > 0.1:
                # The approximation is far above where few large losses make up delta.
                found /= 2
                continue
            start, least, most = found, found / 4, found * 4
            for _ in range(30):
                value, slope, _ = self.delta(found)
                target = found * (1.5 if value > delta else 2 / 3)
                if value > 0 > slope:
                    target = found - (value / slope) * np.log(value / _Long(delta))
                target = min(max(target, least), most)
                change, found = abs(target / found - 1), target
                if change < 1e-17:
                    break
            if abs(found / start - 1) < 1e-3 and change < 1e-12:
                break
        value, slope, lost = self.delta(found)
        return found, float((lost + abs(value - _Long(delta))) / abs(slope * found))


@lru_cache(maxsize=8)
def _step(noise, rate, nats):
    return Step(noise, rate, nats)


def largest_add_loss(phases):
    """No sum of losses of "add" exceeds it."""
    return sum(-steps * math.log1p(-q) if q < 1 else math.inf for _, q, steps in phases)


def contour_epsilon(phases, delta):
    """(epsilon, digits, direction) of the greater direction, on two lines; epsilon may be 0."""
    # Both directions have the same delta at 0, the total variation.
    none, lost = Contour(phases, ADD).at(0)
    if none <= delta:
        assert none + lost < delta
        return _Long(0), 17, ADD
    found, error, direction = *Contour(phases, REMOVE).epsilon(delta), REMOVE
    if found < largest_add_loss(phases) and Contour(phases, ADD).at(found)[0] > delta:
        other, lost = Contour(phases, ADD).epsilon(delta)
        if other > found:
            found, error, direction = other, lost, ADD
    check = Contour(phases, direction, lines=_OTHER_LINES, nats=1.2 * _NATS)
    value, lost = check.at(found)
    slope = check.delta(found)[1]
    error = max(error, float((abs(value - _Long(delta)) + lost) / abs(slope * found)))
    error = error if math.isfinite(error) else 1.0
    return found, max(0, min(17, int(-math.log10(min(error, 1.0))))), direction


# The table.


def truth(phases, delta):
    """The table's row of phases."""
    with mp.workdps(60):
        if all(rate == 1 for _, rate, _ in phases):
            mu = mpmath.sqrt(sum(steps / mpf(noise) ** 2 for noise, _, steps in phases))
            method, profile = "closed form", lambda epsilon: gaussian_delta(epsilon, mu)
        elif len(phases) == 1 and phases[0][2] == 1:
            noise, rate, _ = phases[0]
            method, profile = "closed form", lambda e: one_step_delta(e, noise, rate, REMOVE)
        else:
            found, digits, direction = contour_epsilon(phases, delta)
            text = np.format_float_positional(found, precision=19, fractional=False, trim="0")
            return {"epsilon": text, "method": f"contours, {direction}", "digits": digits}
        if profile(mpf(0)) <= delta:
            return {"epsilon": "0.0", "method": method, "digits": 30}
        root = solve(profile, delta)
        return {"epsilon": mpmath.nstr(root, 30), "method": method, "digits": 30}


def solve(profile, delta):
    """The epsilon > 0 of a falling profile."""
    low, high = mpf(0), mpf(1)
    while profile(high) > delta:
        low, high = high, 2 * high
    while profile(high / 16) <= delta:
        high /= 16
    low = max(low, high / 16)

    def distance(log):
        return mpmath.log(profile(mpmath.exp(log)) / mpf(delta))

    ends = (mpmath.log(low), mpmath.log(high))
    tolerance = mpf(10) ** (-2 * mp.dps)
    root = mpmath.findroot(distance, ends, solver="anderson", tol=tolerance, verify=False)
    return mpmath.exp(root)


def phases_of(row):
    if "phases" in row:
        return [tuple(phase) for phase in row["phases"]]
    return [(row["noise_multiplier"], row["sample_rate"], row["steps"])]


def name(row):
    if "phases" in row:
        return f"{len(row['phases'])}-phases-d{row['delta']:g}"
    rate, noise = row["sample_rate"], row["noise_multiplier"]
    return f"q{rate:g}-s{noise:g}-T{row['steps']}-d{row['delta']:g}"


def read():
    """The rows of the written table."""
    return json.loads(TRUTH.read_text())


def write(path, rows):
    lines = ",\n ".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n {lines}\n]\n")


def main():
    """Compute the rows of the table that have no epsilon."""
    np.seterr(all="ignore")
    table = read()
    for row in table:
        if "epsilon" not in row:
            row |= truth(phases_of(row), row["delta"])
            print(row, flush=True)
            assert row["digits"] >= 10
            write(TRUTH, table)


if __name__ == "__main__":
    main()
