"""The privacy loss's cumulant at complex orders: log M(a), M(a) = E_Q (dP/dQ)^a, for a `Pair`.

Letters: s is the noise, q the rate, l = log(dP/dQ) the loss of an output x ~ N(0, s^2) under Q,
and y = (2x - 1) / (2 s^2), so that e^l = 1 - q + q e^y. With g(w) = e^w - 1 - w,

    M(a) - 1 = E_Q [g(a l) - a g(l)]                               since E_Q e^l = 1
    M(a) - 1 = E_Q [g(a l) + g((1 - a) l) - g(l); l > 0]           for a symmetric pair

which are integrals of small terms if M is near 1, so that log M keeps its precision. Both are
computed along the real line of x by the trapezoidal rule. If terms e^(a l) nearly cancel there,
they are computed along the ray l = l_min + w e^(i omega), w > 0, on which e^(a l) decays. The
density is analytic there (e^y = 0 only at l_min), and the ray passes every zero of e^l - (1 - q)
on the same side as the real line. The loss of several examples (`mixture`) is also a function of
y; for it only the real line is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .mixture import mixture_of, quantile
from .pairs import Pair

_Real = NDArray[np.float64]
_Complex = NDArray[np.complex128]

_ROUNDING = 2.0**-52
_DIGITS = 38.0  # nats: e^-38 is 3e-17
_REAL_LINE_DIGITS = 33.0
_NEGLIGIBLE = 70.0  # nats below the largest value of an integrand
_FARTHEST = 60.0  # standard deviations within which an integrand is searched for
_LARGEST_ANGLE = 0.6  # of a ray; the Gaussian decays on rays of an angle below pi / 4
_ANGLE_STEP = 0.15
_MARGIN = 0.22  # angle between a ray and the one on which |e^(a l)| is constant
_RAY_STEP = 2 * math.pi * _MARGIN / 34.0  # distance of nodes on a ray, for an error of e^-34
_SPLIT = 1e-14  # error of M above which fewer orders are evaluated together
_TOGETHER = 32  # orders evaluated together
_PAIRS_TOGETHER = 64
_AT_ONCE = 1 << 15  # terms computed at once, so that they stay in a cache
_COARSE = 256  # number of nodes
_MOST_NODES = 6_000
_HEIGHTS = (0.03, 0.06, 0.12, 0.2, 0.35, 0.6, 1.0, 1.5)  # values of Im y tried in _mixture_step
_SMALL = 0.1
_SERIES = [1 / math.factorial(k) for k in range(2, 11)]


def log_mgf(
    pair: Pair, orders: _Complex, *, cut: float | None, enough: float
) -> tuple[_Complex, _Real]:
    """Compute log M at each order, up to multiples of 2 pi i, and its rounding error.

    Orders a must have Im a >= 0, and Re a >= 1 for a symmetric pair; sort them so that neighbors
    are close. With `cut`, outputs beyond 1 + cut standard deviations are left out of M (with
    several examples, outputs beyond an output of equal probability). If M's error on the real line
    is below `enough`, the real line is used; 0 gives the best accuracy, also for a small log M.
    Values out of float64's range are NaN.
    """
    if pair.rate == 1:
        exact = orders * (orders - 1) / (2 * pair.noise**2)
        return exact, 4 * _ROUNDING * np.abs(exact)
    excess, rounding = np.empty_like(orders), np.empty(orders.shape)
    with np.errstate(all="ignore"):
        parts = [np.arange(len(orders))[part] for part in _parts(orders)]
        while parts:
            part = parts.pop()
            if enough:
                window = _window(pair, orders[part], 0.0, cut, _REAL_LINE_DIGITS + 12)
                if window.error < enough:
                    excess[part], rounding[part] = _real_line_excess(pair, orders[part], window)
                    continue
            angles = {0.0, _angle(pair, orders[part], cut)}
            windows = [_window(pair, orders[part], angle, cut, _NEGLIGIBLE) for angle in angles]
            best = min(windows, key=lambda window: window.error)
            if best.error > _SPLIT and len(part) > 2:
                # Each order then has its own window.
                parts += np.array_split(part, 2)
                continue
            excess[part], rounding[part] = _excess(pair, orders[part], best, _DIGITS)
        return _log_of(excess, rounding)


def log_mgfs(
    pairs: Sequence[Pair], orders: _Complex, *, cut: float | None, enough: float
) -> tuple[_Complex, _Real]:
    """Compute `log_mgf` of each pair, [pairs, orders]; on the real line, many pairs at once."""
    values = np.empty((len(pairs), len(orders)), complex)
    errors = np.empty(values.shape)
    simple = [i for i, pair in enumerate(pairs) if enough and _is_simple(pair)]
    errors[:] = math.nan
    with np.errstate(all="ignore"):
        for begin in range(0, len(simple), _PAIRS_TOGETHER):
            rows = np.array(simple[begin : begin + _PAIRS_TOGETHER])
            excess, rounding = _real_line_excesses([pairs[i] for i in rows], orders, cut, enough)
            values[rows], errors[rows] = _log_of(excess, rounding)
    for part in _parts(orders):
        for i in np.flatnonzero(np.isnan(errors[:, part.start])):
            values[i, part], errors[i, part] = log_mgf(
                pairs[i], orders[part], cut=cut, enough=enough
            )
    return values, errors


def _parts(orders: _Complex) -> list[slice]:
    count = -(-len(orders) // _TOGETHER)
    ends = [len(orders) * i // count for i in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _is_simple(pair: Pair) -> bool:
    return pair.rate < 1 and not pair.symmetric and pair.examples == 1


def _log_of(excess: _Complex, rounding: _Real) -> tuple[_Complex, _Real]:
    value, size = _log1p(excess), np.abs(1 + excess)
    value.real = np.where(size < rounding, np.log(rounding), value.real)
    return value, rounding / np.maximum(size, rounding) + 2 * _ROUNDING * np.abs(value)


def _real_line_excesses(
    pairs: Sequence[Pair], orders: _Complex, cut: float | None, enough: float
) -> tuple[_Complex, _Real]:
    """Return `_real_line_excess` of many `_is_simple` pairs; NaN if it would be too inaccurate."""
    s, q = np.array([(pair.noise, pair.rate) for pair in pairs]).T[:, :, None]
    path, loss, log_density = _coarse_paths(tuple(pairs), cut)
    excess = np.empty((len(pairs), len(orders)), complex)
    rounding = np.empty(excess.shape)
    odds, rows = np.log1p(-q[:, 0]) - np.log(q[:, 0]), np.arange(len(pairs))
    for part in _parts(orders):
        # The same as in `_window`.
        forward, backward = orders[part].real.max(), orders[part].real.min()
        exponent = np.maximum(0, np.maximum(loss, np.maximum(forward * loss, backward * loss)))
        exponent += log_density
        peak = exponent.max(axis=1)
        significant = exponent > np.maximum(0, peak)[:, None] - (_REAL_LINE_DIGITS + 12)
        first = np.maximum(significant.argmax(axis=1) - 1, 0)
        last = np.minimum(path.shape[1] - significant[:, ::-1].argmax(axis=1), path.shape[1] - 1)
        low, high = path[rows, first], path[rows, last]
        lost = 2 * np.exp(np.minimum(700.0, exponent[rows, last])) / s[:, 0]
        is_known = _ROUNDING * np.exp(np.minimum(700.0, peak)) + lost < enough
        if cut is None:
            # The same as in `_tail_exponent`.
            is_known &= forward < _FARTHEST * s[:, 0]
        # The same as in `_line_step`.
        turn = np.abs(orders[part].imag).max() / (1 + np.exp(np.minimum(700.0, odds - high)))
        turn /= s[:, 0]
        strip = np.minimum(0.85 * math.pi * s[:, 0], math.sqrt(2 * _REAL_LINE_DIGITS))
        needed = _REAL_LINE_DIGITS + strip**2 / 2 + turn * strip
        count = (high - low) * needed / (2 * math.pi * strip) * s[:, 0]
        is_known &= count < _MOST_NODES
        # The number of nodes, and so each bit of a pair's result, must not depend on other pairs.
        count = 8 * np.ceil(np.where(is_known, count, 1) / 8).astype(np.intp) + 1
        rounding[~is_known, part] = math.nan
        for size in set(count[is_known].tolist()):
            alike = np.flatnonzero(is_known & (count == size))
            together = max(1, _AT_ONCE // (size * (part.stop - part.start)))
            for begin in range(0, len(alike), together):
                some = alike[begin : begin + together]
                found, error = _sums(s[some], q[some], low[some], high[some], orders[part], size)
                excess[some, part], rounding[some, part] = found, error + lost[some, None]
    return excess, rounding


def _sums(
    s: _Real, q: _Real, low: _Real, high: _Real, orders: _Complex, size: int
) -> tuple[_Complex, _Real]:
    """Return M - 1 of some pairs, computed with `size` nodes, and its rounding error."""
    y = low[:, None] + (high - low)[:, None] * _unit_grid(size)
    loss, log_density = _real_paths(s, q, y)
    log_density += np.log((high - low)[:, None] / (size - 1))
    modulus = orders.real[:, None] * loss[:, None]
    modulus += log_density[:, None]
    np.exp(modulus, out=modulus)
    # e^(i x) = (1 + i t)^2 / (1 + t^2) with t = tan(x / 2), so that cos x = 2 / (1 + t^2) - 1.
    tangent = (orders.imag / 2)[:, None] * loss[:, None]
    np.tan(tangent, out=tangent)
    part = np.square(tangent)
    part += 1
    np.divide(modulus, part, out=part)
    total = modulus.sum(axis=2)
    real = 2 * part.sum(axis=2) - total
    part *= tangent
    return real - 1 + 2j * part.sum(axis=2), 64 * _ROUNDING * total


@lru_cache(maxsize=1024)
def _unit_grid(size: int) -> _Real:
    return np.linspace(0, 1, size)


@lru_cache(maxsize=32)
def _coarse_paths(pairs: tuple[Pair, ...], cut: float | None) -> tuple[_Real, _Real, _Real]:
    """Return `_coarse_path` of simple pairs, [pairs, nodes]."""
    s, q = np.array([(pair.noise, pair.rate) for pair in pairs]).T[:, :, None]
    low, high = -_FARTHEST - 0.5 / s, (_FARTHEST if cut is None else cut) + 0.5 / s
    y = (low + (high - low) * _unit_grid(_COARSE)) / s
    return y, *_real_paths(s, q, y)


def _real_paths(s: _Real, q: _Real, y: _Real) -> tuple[_Real, _Real]:
    """Return `_real_path` of simple pairs, [pairs, nodes]."""
    log_density = s * y
    log_density += 0.5 / s
    np.square(log_density, out=log_density)
    log_density *= -0.5
    log_density += np.log(s / math.sqrt(2 * math.pi))
    near = np.minimum(y, 600.0)
    return np.log1p(q * np.expm1(near)) + (y - near), log_density


class RoughCumulants:
    """Computes `rough_log_mgf` of some pairs; caches values that do not depend on the order."""

    def __init__(self, pairs: tuple[Pair, ...]) -> None:
        self._pairs = pairs
        self._is_simple = all(_is_simple(pair) for pair in pairs)
        self._known: dict[tuple[float, float | None], _Real] = {}
        self._paths: dict[float | None, tuple[_Real, ...]] = {}

    def at(self, order: float, cut: float | None) -> _Real:
        """Return each pair's cumulant at a real order; inf if out of float64's range."""
        if (order, cut) not in self._known:
            self._known[order, cut] = self._new(order, cut)
        return self._known[order, cut]

    def _new(self, order: float, cut: float | None) -> _Real:
        if not self._is_simple:
            return np.array([rough_log_mgf(pair, order, cut) for pair in self._pairs])
        with np.errstate(all="ignore"):
            if cut not in self._paths:
                self._paths[cut] = self._path(cut)
            loss, log_density, weight, mean, step = self._paths[cut]
            total = (_real_g(order * loss, log_density, weight).sum(axis=1) - order * mean) * step
            result = np.where((total > -1) & (total < math.inf), np.log1p(total), math.inf)
        for i, pair in enumerate(self._pairs):
            if cut is None and _tail_exponent(pair, order) > -_DIGITS:
                result[i] = math.inf
        return np.asarray(result)

    def _path(self, cut: float | None) -> tuple[_Real, ...]:
        """Return loss, log density, density [pairs, nodes], and sum of g(loss), step [pairs]."""
        y, loss, log_density = _coarse_paths(self._pairs, cut)
        weight = np.exp(log_density)
        mean = _real_g(loss, log_density, weight).sum(axis=1)
        return loss, log_density, weight, mean, y[:, 1] - y[:, 0]


def rough_log_mgf(pair: Pair, order: float, cut: float | None) -> float:
    """Compute the cumulant at a real order to a few digits; inf if out of float64's range."""
    if pair.rate == 1:
        return order * (order - 1) / (2 * pair.noise**2)
    y, path, log_path = _coarse_path(pair, 0.0, cut)
    loss, log_density = path.real, log_path.real
    with np.errstate(all="ignore"):
        scaled = order * loss
        if cut is None and _tail_exponent(pair, order) > -_DIGITS:
            return math.inf
        if pair.symmetric:
            terms = _real_g(scaled, log_density) + _real_g(loss - scaled, log_density)
            terms -= _real_g(loss, log_density)
        else:
            terms = _real_g(scaled, log_density) - order * _real_g(loss, log_density)
        total = float(terms.sum() * (y[1] - y[0]))
    return math.log1p(total) if -1 < total < math.inf else math.inf


def _angle(pair: Pair, orders: _Complex, cut: float | None) -> float:
    """Return the angle of a ray that suits all orders; 0 for the real line."""
    needed = math.pi / 2 - float(np.angle(orders).min()) + _MARGIN
    # On a ray the Gaussian is e^((angle s)^2 / 2) times as large as on the line.
    largest = min(_LARGEST_ANGLE, 4.9 / pair.noise)
    # With a cut the integral ends at a finite output, so its path cannot be a ray.
    if largest < 2 * _MARGIN or cut is not None or pair.examples > 1:
        return 0.0
    return min(math.ceil(needed / _ANGLE_STEP) * _ANGLE_STEP, largest)


class _Window(NamedTuple):
    angle: float  # angle of the ray; 0 for the real line
    low: float  # range of y
    high: float
    error: float  # approximate error of M by rounding and the ends; inf if there is no window
    lost: float  # bound of the integral above the window


def _excess(
    pair: Pair, orders: _Complex, window: _Window, digits: float
) -> tuple[_Complex, _Real]:
    """Return M - 1, and its rounding error."""
    if window.error == math.inf:
        return np.full(orders.shape, np.nan + 0j), np.full(orders.shape, np.nan)
    step = _RAY_STEP if window.angle else _line_step(pair, orders, window.high, digits)
    if pair.symmetric:
        total, rounding = _symmetric_excess(pair, orders, window.angle, window.high, step)
        return total, rounding + window.lost
    y, step = _nodes(window.low, window.high, step)
    loss, log_density = _path(pair, y, window.angle)
    exponent = orders[:, None] * loss
    log_density += math.log(step)
    terms = _g(exponent, log_density) - orders[:, None] * _g(loss, log_density)
    exponents = np.abs(log_density) + np.abs(exponent)
    if pair.examples > 1:
        exponents += np.abs(orders)[:, None] * mixture_of(pair).exponents(_output(pair, y))
    total, rounding = _total(terms, exponents)
    return total, rounding + window.lost


def _real_line_excess(pair: Pair, orders: _Complex, window: _Window) -> tuple[_Complex, _Real]:
    """Return M - 1 on the real line, and its rounding error, which is relative to M."""
    if pair.symmetric:
        return _excess(pair, orders, window, _REAL_LINE_DIGITS)
    y, step = _nodes(
        window.low, window.high, _line_step(pair, orders, window.high, _REAL_LINE_DIGITS)
    )
    loss, log_density = _real_path(pair, y)
    terms = np.exp(np.multiply.outer(orders, loss) + (log_density + math.log(step)))
    digits: _Real | float = 64.0
    if pair.examples > 1:
        digits += np.abs(orders)[:, None] * mixture_of(pair).exponents(_output(pair, y))
    return terms.sum(axis=1) - 1, _ROUNDING * (digits * np.abs(terms)).sum(axis=1) + window.lost


def _real_path(pair: Pair, y: _Real) -> tuple[_Real, _Real]:
    s = pair.noise
    log_scale = math.log(s / math.sqrt(2 * math.pi))
    if pair.examples > 1:
        loss = mixture_of(pair).loss(_output(pair, y))
    else:
        loss = _loss(pair.rate, y)
    return loss, log_scale - (s * y + 0.5 / s) ** 2 / 2


def _path(pair: Pair, y: _Real, angle: float) -> tuple[_Complex, _Complex]:
    """Return the loss at each y, on the real line or the ray, and the log of y's density."""
    s, q = pair.noise, pair.rate
    log_scale = math.log(s / math.sqrt(2 * math.pi))
    if not angle:
        loss, log_density = _real_path(pair, y)
        return loss.astype(complex), log_density.astype(complex)
    odds, turn = math.log(q) - math.log1p(-q), np.exp(1j * angle)
    length = np.logaddexp(0, odds + y)  # w
    w = length * turn
    z = s * (_log_expm1(w) - odds) + 0.5 / s
    log_jacobian = 1j * angle + np.log(-np.expm1(-length)) - np.log(-np.expm1(-w))
    return math.log1p(-q) + w, log_scale - z * z / 2 + log_jacobian


def _window(pair: Pair, orders: _Complex, angle: float, cut: float | None, nats: float) -> _Window:
    """Return the range of y in which the integrand exceeds e^-nats times its largest value."""
    y, loss, log_density = _coarse_path(pair, angle, cut)
    forward = (orders * np.exp(1j * angle)).real if angle else orders.real
    extremes = orders[[int(np.argmax(forward)), int(np.argmin(forward))]]
    exponent = np.maximum(0, loss.real)
    for order in extremes:
        growth = (order * loss).real if angle else order.real * loss.real
        exponent = np.maximum(exponent, growth)
    exponent = exponent + log_density.real
    peak = float(exponent.max())
    beyond = -math.inf if cut is not None else _tail_exponent(pair, extremes[0], angle)
    significant = np.flatnonzero(exponent > max(0.0, peak) - nats)
    if not len(significant) or not beyond < max(0.0, peak) - _DIGITS:
        return _Window(angle, 0.0, 0.0, math.inf, math.inf)
    low, high = max(significant[0] - 1, 0), min(significant[-1] + 1, len(exponent) - 1)
    lost = 2 * math.exp(min(700.0, max(exponent[high], beyond))) / pair.noise
    error = _ROUNDING * math.exp(min(700.0, peak)) + lost
    return _Window(angle, float(y[low]), float(y[high]), error, lost)


def _tail_exponent(pair: Pair, order: complex, angle: float = 0.0) -> float:
    """Return the largest exponent of the integrand beyond the coarse path."""
    s = pair.noise
    growth = pair.examples * (order * np.exp(1j * angle)).real
    # Beyond the path the Gaussian decays faster than e^(growth * y) grows, and the loss grows at
    # most as fast as y times the number of examples.
    if growth < _FARTHEST * s * (1 - math.tan(angle) ** 2):
        return -math.inf
    y = np.geomspace(_FARTHEST / s + 0.5 / s**2, max(8 * growth, 1.0) / s**2, 100)
    loss, log_density = _path(pair, y, angle)
    return float(((order * loss).real + log_density.real).max())


@lru_cache(maxsize=2048)
def _coarse_path(pair: Pair, angle: float, cut: float | None) -> tuple[_Real, _Complex, _Complex]:
    s = pair.noise
    # From x = -60 s to 1 + 60 s, or to the cut.
    low = -_FARTHEST - 0.5 / s
    high = (_FARTHEST if cut is None else cut) + 0.5 / s
    if pair.examples > 1:
        farthest = mixture_of(pair).most + _FARTHEST * s if cut is None else quantile(pair, cut)
        high = (farthest - 0.5) / s
    y = np.linspace(low, high, math.ceil(4 * (high - low))) / s
    if pair.symmetric:
        y = y[y > 0]
    return y, *_path(pair, y, angle)


def _line_step(pair: Pair, orders: _Complex, high: float, digits: float) -> float:
    """Return the step of y. At Im y = t / s the integrand is e^(t^2 / 2 + |Im a| Im l) larger."""
    s = pair.noise
    if pair.examples > 1:
        return _mixture_step(pair, orders, high, digits)
    # The loss and its derivative increase with y.
    odds = math.log1p(-pair.rate) - math.log(pair.rate)
    slope = 1 / (1 + math.exp(min(700.0, odds - high)))
    turn = float(np.abs(orders.imag).max()) * slope / s
    strip = min(0.85 * math.pi * s, math.sqrt(2 * digits))
    return 2 * math.pi * strip / (digits + strip**2 / 2 + turn * strip) / s


def _mixture_step(pair: Pair, orders: _Complex, high: float, digits: float) -> float:
    """Return the step of y at which the trapezoidal error is e^-digits of the integrand's peak.

    The error is at most I / (e^(2 pi t / step) - 1), where I is the integral of the integrand's
    modulus along Im y = t and Im y = -t. On these lines |f| (see `mixture`) is at most its value
    on the real line. For t <= 1.5 the angle of f is at most 1.1 t E(j | x): the zeros of f are
    real and negative, so f's angle is the sum of the angles of factors 1 + w e^(i t).
    """
    mixture, s = mixture_of(pair), pair.noise
    y, path, log_path = _coarse_path(pair, 0.0, None)
    inside = y <= high
    y, loss, log_density = y[inside], path.real[inside], log_path.real[inside]
    forward, backward = float(orders.real.max()), float(orders.real.min())
    turn = 1.1 * float(np.abs(orders.imag).max()) * mixture.mean(_output(pair, y))
    real = np.maximum(0.0, np.maximum(forward * loss, backward * loss)) + log_density
    peak, best = float(real.max()), 0.0
    for height in _HEIGHTS:
        moved = np.maximum(0.0, forward * loss)
        if backward < 0:
            away = backward * mixture.log_modulus(_output(pair, y), s**2 * height)
            moved = np.maximum(moved, away)
        moved = moved + turn * height + (s * height) ** 2 / 2 + log_density
        excess = max(0.0, float(moved.max()) - peak)
        best = max(best, 2 * math.pi * height / (digits + 3 + excess))
    return best


def _output(pair: Pair, y: _Real) -> _Real:
    return pair.noise**2 * y + 0.5


def _symmetric_excess(
    pair: Pair, orders: _Complex, angle: float, top: float, step: float
) -> tuple[_Complex, _Real]:
    """Return M - 1 of a symmetric pair; integrate each of its three terms on its own ray.

    Nodes are equidistant in t with y = log(1 + e^t). Near the loss 0 the integrand decays as
    e^(3 t).
    """
    s, q = pair.noise, pair.rate
    top = top if top > 30 else math.log(math.expm1(top))
    t, step = _nodes(min(top, -2 * math.log(s)) - 16, top, min(step, 0.1))
    y = np.logaddexp(0, t)
    real = _loss(q, y)
    speed = np.exp(y - real) * q / (1 + np.exp(-t))  # d real / d t
    total: _Complex = np.zeros(len(orders), complex)
    size: _Real = np.zeros(len(orders))
    for factor, sign, side in (
        (orders, 1.0, angle),
        (1 - orders, 1.0, -angle),
        (np.ones_like(orders), -1.0, 0.0),
    ):
        turn = np.exp(1j * side)
        loss = real * turn
        # log(1 + (e^l - 1) / q), continuous along the ray
        x = s * s * (loss + np.log1p(-np.expm1(-loss) * (1 - q) / q)) + 0.5
        jacobian = turn * np.exp(loss) / (np.expm1(loss) + q)
        log_weight = np.log(jacobian * (speed * s * step / math.sqrt(2 * math.pi)))
        log_weight -= (x / s) ** 2 / 2
        exponent = factor[:, None] * loss
        part, sizes = _total(_g(exponent, log_weight), np.abs(log_weight) + np.abs(exponent))
        total, size = total + sign * part, size + sizes
    return total, size


def _nodes(low: float, high: float, step: float) -> tuple[_Real, float]:
    """Return nodes at most `step` apart, and their distance; NaN if there would be too many."""
    if not (high - low) / step < _MOST_NODES:
        return np.array([math.nan]), math.nan
    x, step = np.linspace(low, high, max(2, math.ceil((high - low) / step) + 1), retstep=True)
    return x, float(step)


def _total(terms: _Complex, exponents: _Real) -> tuple[_Complex, _Real]:
    """Return the sum of the terms, and its rounding error, which grows with the exponents."""
    return terms.sum(axis=1), _ROUNDING * (np.abs(terms) * (48 + exponents)).sum(axis=1)


def _loss(q: float, y: _Real) -> _Real:
    small = np.log1p(q * np.expm1(np.minimum(y, 1.0)))
    return np.where(y < 1.0, small, np.logaddexp(math.log1p(-q), math.log(q) + y))


def _g(w: _Complex, log_weight: _Complex) -> _Complex:
    weight = np.exp(log_weight)
    value = np.exp(w + log_weight)
    value -= (1 + w) * weight
    small = np.abs(w) < _SMALL
    if small.any():
        part = w[small]
        series = np.full_like(part, _SERIES[-1])
        for coefficient in reversed(_SERIES[:-1]):
            series *= part
            series += coefficient
        series *= part
        series *= part
        value[small] = series * np.broadcast_to(weight, w.shape)[small]
    return value


def _real_g(w: _Real, log_weight: _Real, weight: _Real | None = None) -> _Real:
    weight = np.exp(log_weight) if weight is None else weight
    small = weight * w * w * (0.5 + w / 6)
    return np.where(np.abs(w) < 1e-3, small, np.exp(w + log_weight) - weight * (1 + w))


def _log1p(x: _Complex) -> _Complex:
    """Return log(1 + x), accurate near 0, where numpy's log1p is inaccurate for complex x."""
    modulus = np.abs(1 + x)
    # Near -1 the log of the squared modulus would lose its precision.
    is_near = (modulus > 0.5) & (modulus < 2)
    near = np.where(is_near, x, 0)
    real = 0.5 * np.log1p(2 * near.real + near.real**2 + near.imag**2)
    real = np.where(is_near, real, np.log(modulus))
    return np.asarray(real + 1j * np.arctan2(x.imag, 1 + x.real))


def _log_expm1(w: _Complex) -> _Complex:
    """Return log(e^w - 1) for Re w > 0, with a continuous imaginary part."""
    return np.where(
        w.real > 1, w + np.log(-np.expm1(-w)), np.log(np.expm1(np.where(w.real > 1, 1, w)))
    )
