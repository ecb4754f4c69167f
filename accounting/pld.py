"""Epsilon by composing discretised privacy losses with the FFT, both ends of it certified.

A law is the distribution of the loss L = log(dP/dQ) under P; delta(e) = E (1 - exp(e - L))_+.
s is a pair's noise, q its rate, l(x) = log(1 - q + q exp((2x - 1) / (2 s^2))) its loss at the
output x, D the spacing of the grid. K is the log of the moment generating function of a law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.linalg import solveh_banded
from scipy.optimize import brentq
from scipy.special import erf, log_ndtr

from .accountant import Accountant
from .gaussian import gaussian_delta, gaussian_epsilon
from .interval import Interval
from .pairs import Pair, Pairs

__all__ = ["PLDAccountant"]

_Array = NDArray[Any]

_TOLERANCE = 3e-4  # aimed at, relative to epsilon, each way
_MOST_POINTS = 2**21
_ATTEMPTS = 5
_REACH = 38.5  # standard deviations beyond which float64 knows no density
_SMALLEST_NOISE, _LARGEST_NOISE = 0.005, 1e8  # beyond, only the closed bounds
_LOG_OUTSIDE = -24.0  # log of the tilted mass that may lie outside of the window
_MASS_ERROR = 1e-14  # relative, of one step's masses; and of the sums over the window:
_SUM_ERROR = 1e-9
_NEWTON_STEPS = 6
_DAMPING = 1e-8  # of the mode in which neighbouring boundaries move oppositely: it moves no loss
_LEAST_LOG_DELTA = -650.0  # below, only the closed bounds
_MARGIN = 32  # grid points added to the window at each end
_UNIT = float(np.finfo(np.float64).eps)
_FFT_ERROR = 2.5 * _UNIT  # of one level of the FFT, relative to the sum of its inputs' moduli
_NODES = {n: np.polynomial.legendre.leggauss(n) for n in (4, 6)}


class PLDAccountant(Accountant):
    """Epsilon by the FFT: some hundredths of a percent loose, and the lower end says how much.

    Guarantees:
        Under the assumptions of `Accountant` the history is (get_epsilon(delta), delta)-private
        and (epsilon, get_delta(epsilon))-private, and no value below the lower end would do. The
        rounding of the FFT, what falls outside of its window and what wraps around are bounded
        and counted against us at both ends.

    Source:
        Upper end: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, Connect the Dots. Lower end:
        merging outputs is post-processing; cells are moved until their losses lie on a grid.
        Exponential tilting, so that rounding is relative to delta instead of to 1: Koskela,
        Jaelkoe, Prediger, Honkela 2021 compose without it; Cramer 1938.
    """

    @classmethod
    def mechanism(cls) -> str:
        """The name `"pld"`."""
        return "pld"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        if _total_variation(pairs) <= delta:
            return Interval(0.0, 0.0)
        closed = gaussian_epsilon(delta=delta, noise_multiplier=_joint_noise(pairs))
        return _both_directions(pairs, _Question(delta=delta), closed)

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        closed = gaussian_delta(epsilon=epsilon, noise_multiplier=_joint_noise(pairs))
        closed = min(1.0, _total_variation(pairs), closed * (1 + 1e-9) + 1e-300)
        return _both_directions(pairs, _Question(epsilon=epsilon), closed)


@dataclass(frozen=True)
class _Question:
    """What is asked: epsilon at this delta, or delta at this epsilon."""

    delta: float | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class _Plan:
    """Where a composition matters: the tilt theta, the window [low, high], each pair's range."""

    epsilon: float
    log_delta: float
    theta: float
    low: float
    high: float
    taus: tuple[float, float]  # at which the tilted tails below and above the window are bounded
    ranges: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class _Atoms:
    """Masses on the grid offset + D (first + 0, 1, ...), and the mass at infinite loss."""

    offset: float
    first: int
    masses: _Array
    infinite: float = 0.0


@dataclass(frozen=True)
class _Law:
    """One direction of one pair on a line on which its loss rises.

    The line is x if something is removed (P is the mixture), and -x if something is added.
    """

    noise: float
    rate: float
    sign: int  # 1: removed, -1: added

    def loss(self, t: _Array) -> _Array:
        u = (2 * self.sign * t - 1) / (2 * self.noise**2)
        if self.rate == 1:
            return self.sign * u
        low, high = np.minimum(u, 500.0), np.maximum(u, 500.0)
        above = math.log(self.rate) + np.log1p((1 / self.rate - 1) * np.exp(-high))
        loss = np.log1p(self.rate * np.expm1(low))
        return self.sign * np.where(u > 500, high + above, loss)

    def place(self, loss: _Array) -> _Array:
        """Where the loss is this one; infinite beyond the losses that occur."""
        value = self.sign * loss
        if self.rate == 1:
            return self.sign * (self.noise**2 * value + 0.5)
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.log1p(np.maximum(np.expm1(np.minimum(value, 30.0)) / self.rate, -1.0))
        high = np.maximum(value, 30.0)
        high = high - math.log(self.rate) + np.log1p((self.rate - 1) * np.exp(-high))
        return self.sign * (self.noise**2 * np.where(value > 30, high, low) + 0.5)

    def density(self, t: _Array) -> _Array:
        x = self.sign * t
        found = np.exp(-np.square(x / self.noise) / 2)
        if self.sign == 1:
            shifted = np.exp(-np.square((x - 1) / self.noise) / 2)
            found = (1 - self.rate) * found + self.rate * shifted
        return found / (self.noise * math.sqrt(2 * math.pi))

    def slope(self, t: _Array) -> _Array:
        """The loss's derivative: P(sampled | x) / s^2."""
        u = (2 * self.sign * t - 1) / (2 * self.noise**2)
        return self.rate * np.exp(u - self.sign * self.loss(t)) / self.noise**2

    def log_tails(self, t: float, above: bool) -> tuple[float, float]:
        """Logarithms of the masses under P and under Q of what is below (or above) t."""
        side = -1.0 if above else 1.0
        x = side * t * self.sign if self.sign == 1 else side * t
        # In the frame in which the tail is (-inf, x]: the shifted mean is at +-1.
        mean = side * self.sign
        plain = float(log_ndtr(x / self.noise))
        shifted = float(log_ndtr((x - mean) / self.noise))
        both = shifted
        if self.rate < 1:
            both = float(
                np.logaddexp(math.log1p(-self.rate) + plain, math.log(self.rate) + shifted)
            )
        return (both, plain) if self.sign == 1 else (plain, both)

    def ends(self) -> tuple[float, float]:
        """The finite part of the line that has a density in float64."""
        reach = _REACH * self.noise
        return (-reach, 1 + reach) if self.sign == 1 else (-1 - reach, reach)

    def step(self) -> float:
        """A length within which everything is nearly a polynomial."""
        return min(self.noise / 8, self.noise**2 / 2)


def _law(pair: Pair, sign: int) -> _Law:
    return _Law(pair.noise, pair.rate, 1 if pair.symmetric or pair.rate == 1 else sign)


def _joint_noise(pairs: Pairs) -> float:
    """All pairs without subsampling are one Gaussian mechanism with this noise."""
    least = min(pair.noise for pair, _ in pairs)
    return least / math.sqrt(math.fsum(n * (least / pair.noise) ** 2 for pair, n in pairs))


def _total_variation(pairs: Pairs) -> float:
    """The sum of the pairs' total variations, q (2 Phi(1 / (2 s)) - 1): it bounds every delta."""
    return (1 + 1e-12) * math.fsum(
        n * pair.rate * float(erf(1 / (pair.noise * math.sqrt(8)))) for pair, n in pairs
    )


def _both_directions(pairs: Pairs, question: _Question, closed: float) -> Interval:
    """The greater of both directions; `closed` is an upper end that is known anyway."""
    noises = [pair.noise for pair, _ in pairs]
    if min(noises) < _SMALLEST_NOISE or max(noises) > _LARGEST_NOISE:
        return Interval(0.0, closed)
    found = _one_direction(pairs, 1, question, None)
    lower, upper = found.lower or 0.0, found.upper
    if any(pair.rate < 1 and not pair.symmetric for pair, _ in pairs):
        other = _one_direction(pairs, -1, question, upper)
        lower, upper = max(lower, other.lower or 0.0), max(upper, other.upper)
    upper = min(upper, closed)
    return Interval(max(0.0, min(lower, upper)), upper)


def _one_direction(pairs: Pairs, sign: int, question: _Question, enough: float | None) -> Interval:
    """One direction; where `enough` is known to be an end of the other, no tighter than it."""
    lower, upper, gap = 0.0, math.inf, math.inf
    if sign == -1 and all(pair.rate < 1 and not pair.symmetric for pair, _ in pairs):
        # No loss of an addition exceeds -log(1 - q).
        most = -(1 + 1e-12) * math.fsum(n * math.log1p(-pair.rate) for pair, n in pairs)
        if question.epsilon is None:
            upper = most
        elif question.epsilon >= most:
            upper = 0.0
        if enough is not None and upper <= enough:
            return Interval(0.0, upper)
    with np.errstate(all="ignore"):
        plan = _plan(pairs, sign, question)
        if plan is None:
            return Interval(lower, upper)
        spacing, least = _spacing(pairs, plan, question)
        if enough is not None:
            spacing *= 3
        for _ in range(_ATTEMPTS):
            spacing = max(spacing, least)
            upper = min(upper, _answer(_compose(pairs, sign, plan, spacing, True), question))
            if enough is not None and upper <= enough:
                return Interval(0.0, upper)
            lower = max(lower, _answer(_compose(pairs, sign, plan, spacing, False), question))
            gap, before = upper - lower, gap
            allowed = 2 * _TOLERANCE * upper
            if question.epsilon is None:
                allowed = max(allowed, 0.1 * _TOLERANCE / plan.theta)
            if gap <= allowed or spacing == least or gap > 0.7 * before:
                break
            factor = 0.8 * math.sqrt(allowed / gap) if gap < 0.99 * upper else 0.25
            spacing *= min(0.6, max(0.1, factor))
            if question.epsilon is None and upper < 0.9 * plan.epsilon:
                # Where the Chernoff bound is far off, so is its theta.
                plan = _plan(pairs, sign, question, upper) or plan
                wanted, least = _spacing(pairs, plan, question)
                spacing = min(spacing, wanted)
    return Interval(lower, upper)


# Where the composition matters: everything here only chooses, nothing here is certified.


@lru_cache(maxsize=256)
def _sample(pair: Pair, sign: int) -> tuple[_Array, _Array]:
    """A law by a midpoint rule: losses, rising, and the logarithms of their masses."""
    law = _law(pair, sign)
    low, high = law.ends()
    step = law.step()
    if pair.symmetric:
        low = 0.5
    else:
        # The midpoints stay off 1/2, where a loss is exactly 0.
        low = 0.5 * law.sign - math.ceil((0.5 * law.sign - low) / step) * step
    t = low + step * (np.arange(math.ceil((high - low) / step)) + 0.5)
    losses, log_masses = law.loss(t), np.log(law.density(t)) + math.log(step)
    if pair.symmetric:
        mirrored = log_masses - losses
        rest = 1 - np.exp(log_masses).sum() - np.exp(mirrored).sum()
        at_zero = math.log(max(float(rest), 1e-300))
        losses = np.concatenate((-losses[::-1], [0.0], losses))
        log_masses = np.concatenate((mirrored[::-1], [at_zero], log_masses))
    known = log_masses > -745
    return losses[known], log_masses[known] - np.log(np.exp(log_masses).sum())


_Sampled = Sequence[tuple[_Array, _Array, int]]  # losses, log masses, count


def _cumulant(sampled: _Sampled, thetas: _Array) -> _Array:
    """K of the sum at each theta."""
    total = np.zeros(len(thetas))
    for losses, log_masses, count in sampled:
        for i, theta in enumerate(thetas):
            exponents = log_masses + theta * losses
            peak = exponents.max()
            total[i] += count * (peak + math.log(np.exp(exponents - peak).sum()))
    return total


def _log_kernel(theta: _Array | float) -> _Array:
    """Log max over l of exp(-theta l) (1 - exp(-l)) = theta log theta - (1+theta) log(1+theta)."""
    theta = np.asarray(theta, dtype=np.float64)
    return -np.log1p(theta) - theta * np.log1p(1 / theta)


def _chernoff(sampled: _Sampled, question: _Question, deviation: float) -> tuple[float, float]:
    """The theta of the best Chernoff bound, and that bound on epsilon or on log delta."""

    def bound(thetas: _Array) -> _Array:
        values = _cumulant(sampled, thetas) + _log_kernel(thetas)
        if question.epsilon is None:
            values = (values - math.log(question.delta or 1.0)) / thetas
        else:
            values = values - thetas * question.epsilon
        return np.where(np.isnan(values), math.inf, values)

    grid = np.linspace(-14, 9, 47)
    for _ in range(2):
        values = bound(np.exp(grid) / deviation)
        best = int(np.argmin(values))
        around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        found = math.exp(grid[best]) / deviation, float(values[best])
        grid = np.linspace(*around, 11)
    return found


def _deviation(sampled: _Sampled, theta: float = 0.0) -> float:
    """The standard deviation of the tilted sum."""
    total = 0.0
    for losses, log_masses, count in sampled:
        exponents = log_masses + theta * losses
        masses = np.exp(exponents - exponents.max())
        mean = masses @ losses / masses.sum()
        total += count * float(masses @ np.square(losses - mean) / masses.sum())
    return math.sqrt(total)


def _plan(pairs: Pairs, sign: int, question: _Question, near: float | None = None) -> _Plan | None:
    """For epsilon of about `near`; if that is not known, of about the Chernoff bound's."""
    whole = [(*_sample(pair, sign), n) for pair, n in pairs]
    sampled: _Sampled = whole
    steps = sum(n for _, n in pairs)
    asked = question if near is None else _Question(epsilon=near)
    for _ in range(3):
        deviation = _deviation(sampled)
        if not 0 < deviation < math.inf:
            return None
        theta, value = _chernoff(sampled, asked, deviation)
        if not math.isfinite(value) or (asked.delta is None and value < _LEAST_LOG_DELTA):
            return None
        epsilon, log_delta = max(value, 0.0), math.log(question.delta or 1.0)
        if asked.epsilon is not None:
            epsilon = asked.epsilon
            log_delta = value if near is None else log_delta
        sampled, infinite = _truncated(whole, epsilon, log_delta, question.epsilon is None)
        if asked.delta is not None and question.delta is not None:
            asked = _Question(delta=max(question.delta - infinite, question.delta / 4))
    middle = float(_cumulant(sampled, np.array([theta]))[0])
    taus = np.exp(np.linspace(-8, 7, 61)) / _deviation(sampled, theta)
    highs = (_cumulant(sampled, theta + taus) - middle - _LOG_OUTSIDE) / taus
    lows = (_cumulant(sampled, theta - taus) - middle - _LOG_OUTSIDE) / -taus
    if np.isnan(highs).all() or np.isnan(lows).all():
        return None
    up, down = int(np.nanargmin(highs)), int(np.nanargmax(lows))
    ranges = []
    for losses, log_masses, _ in sampled:
        alone = float(_cumulant([(losses, log_masses, 1)], np.array([theta]))[0])
        rounded = np.log(np.cumsum(np.exp(log_masses))) + theta * losses
        first = int(np.searchsorted(rounded, alone - 21 - math.log(steps)))
        ranges.append((float(losses[max(first - 1, 0)]), float(losses[-1])))
    return _Plan(
        epsilon=epsilon,
        log_delta=log_delta,
        theta=theta,
        low=float(lows[down]),
        high=float(highs[up]),
        taus=(-float(taus[down]), float(taus[up])),
        ranges=tuple(ranges),
    )


def _truncated(
    whole: _Sampled, epsilon: float, log_delta: float, is_bounded: bool
) -> tuple[_Sampled, float]:
    """Without the losses that may as well be infinite, and their mass.

    Instead of E (1 - exp(e - L)) they cost at most exp(e) times their mass under Q more.
    """
    steps = sum(count for _, _, count in whole)
    log_share = log_delta - math.log(steps)
    result, infinite = [], 0.0
    for losses, log_masses, count in whole:
        log_q = np.logaddexp.accumulate((log_masses - losses)[::-1])[::-1]
        negligible = log_q <= log_share - epsilon - 19
        log_p = np.logaddexp.accumulate(log_masses[::-1])[::-1]
        if is_bounded:
            negligible &= log_p <= log_share - 0.7
        end = max(2, int(np.count_nonzero(~negligible)) + 1)
        if end < len(losses):
            infinite += count * math.exp(log_p[end])
        result.append((losses[:end], log_masses[:end], count))
    return result, infinite


def _spacing(pairs: Pairs, plan: _Plan, question: _Question) -> tuple[float, float]:
    """The grid's spacing to begin with, and the least.

    Splitting a loss onto two atoms raises K by theta (theta + 1) D^2 / 12 for each step, that is
    epsilon by (theta + 1) D^2 / 12.
    """
    steps = sum(n for _, n in pairs)
    aim = 0.4 * _TOLERANCE * max(plan.epsilon, 0.1 / plan.theta)
    if question.epsilon is not None:
        aim = 0.4 * _TOLERANCE / plan.theta
    span = max(plan.high - plan.low, *(high - low for low, high in plan.ranges))
    largest = max(abs(plan.high), *(abs(end) for ends in plan.ranges for end in ends))
    least = max(span / (0.9 * _MOST_POINTS), 1e-14 * largest)
    wanted = math.sqrt(12 * aim / (steps * (plan.theta + 1)))
    return max(least, min(wanted, span / 100, 400.0)), least


# Discretisation.


def _integrals(law: _Law, edges: _Array, references: _Array) -> tuple[_Array, _Array]:
    """Of each cell between two edges: its mass, and E (1 - exp(reference - L)), by Gauss."""
    low, high = law.ends()
    edges = np.clip(edges, low, high)
    widths = np.diff(edges)
    parts = np.maximum(1, np.ceil(widths / law.step())).astype(np.intp)
    starts = np.cumsum(parts) - parts
    if len(parts) == 0:
        return np.empty(0), np.empty(0)
    points, weights = _NODES[4 if widths.max() < law.step() / 8 else 6]
    width = widths / parts
    if parts.max() > 1:
        index = np.arange(int(parts.sum())) - np.repeat(starts, parts)
        width = np.repeat(width, parts)
        left = np.repeat(edges[:-1], parts) + index * width
        references = np.repeat(references, parts)
    else:
        left = edges[:-1]
    mass, lift = np.zeros(len(left)), np.zeros(len(left))
    for point, weight in zip(points, weights, strict=True):
        t = left + width * ((1 + point) / 2)
        density = law.density(t) * (weight / 2)
        mass += density
        lift -= density * np.expm1(references - law.loss(t))
    mass *= width
    lift *= width
    if parts.max() > 1:
        return np.add.reduceat(mass, starts), np.add.reduceat(lift, starts)
    return mass, lift


def _pessimistic(pair: Pair, sign: int, spacing: float, span: tuple[float, float]) -> _Atoms:
    """Each loss on the two grid points around it, so that the masses under P and Q stay."""
    law = _law(pair, sign)
    first, last = math.floor(span[0] / spacing), math.ceil(span[1] / spacing)
    start = 0 if pair.symmetric else first
    last = max(last, start + 1)
    losses = spacing * np.arange(start, last + 1)
    t = law.place(losses)
    if pair.symmetric:
        t[0] = 0.5
    mass, lift = _integrals(law, t, losses[:-1])
    to_upper = np.clip(lift / -math.expm1(-spacing), 0.0, mass)
    masses = np.zeros(len(losses))
    masses[:-1] += mass - to_upper
    masses[1:] += to_upper
    above_p, above_q = map(math.exp, law.log_tails(float(t[-1]), above=True))
    if not pair.symmetric:
        masses[0] += math.exp(law.log_tails(float(t[0]), above=False)[0])
        return _Atoms(0.0, first, masses, above_p)
    mirrored = masses * np.exp(-losses)
    mirrored[-1] += above_q
    at_zero = (1 - pair.rate) * float(erf(1 / (pair.noise * math.sqrt(8))))
    masses[0] += mirrored[0] + at_zero
    masses = np.concatenate((mirrored[:0:-1], masses))
    begin = min(max(first, -last), last - 1)
    drop = begin + last
    kept = masses[drop:].copy()
    kept[0] += masses[:drop].sum()
    return _Atoms(0.0, begin, kept, above_p)


def _cells(
    law: _Law, spacing: float, span: tuple[float, float], inner: float | None
) -> tuple[float, int, _Array, _Array, float]:
    """A partition of the line whose cells have losses on a grid, as nearly as can be.

    Merged into one output, a cell has the loss log(P / Q) of its masses. Newton's method moves
    the boundaries, by the least way, until these are offset + D j; where log(1 - q), near which
    much mass may lie, is among the losses, the offset moves too. Returns the offset, the first j,
    the cells' losses and masses under P, the first boundary. The line begins at `inner`.
    """
    first = math.floor(span[0] / spacing) if inner is None else 0
    last = max(math.ceil(span[1] / spacing), first + 3)
    edge = math.log1p(-law.rate) * law.sign if inner is None and law.rate < 1 else -math.inf
    begins = law.sign == 1 and first * spacing <= edge + spacing
    ends = law.sign == -1 and edge <= (last + 1) * spacing
    offset = 0.0
    if begins or ends:
        nearest = math.floor(edge / spacing)
        first = nearest if begins else min(first, nearest - 3)
        last = nearest if ends else max(last, nearest + 3)
        offset = edge - nearest * spacing
    grid = spacing * np.arange(first, last + 1)
    edges = law.place(grid[:-1] + offset + spacing / 2)
    for remaining in range(_NEWTON_STEPS, -1, -1):
        edges = np.clip(edges, *law.ends())
        targets = grid + offset
        inside, lift = _integrals(law, edges, targets[1:-1])
        below = law.log_tails(float(edges[0]), above=False)
        above = law.log_tails(float(edges[-1]), above=True)
        mass = np.concatenate(([math.exp(below[0])], inside, [math.exp(above[0])]))
        r = np.concatenate(
            (
                [below[0] - below[1] - targets[0]],
                -np.log1p(-lift / inside),
                [above[0] - above[1] - targets[-1]],
            )
        )
        usable = (mass > 1e-290) & np.isfinite(r)
        usable[0] &= begins
        usable[-1] &= ends
        if not remaining or np.abs(r[usable & (mass > 1e-40)]).max(initial=0.0) < 1e-12 * spacing:
            break
        at, density = law.loss(edges), law.density(edges) / law.slope(edges)
        left, right = np.zeros_like(r), np.zeros_like(r)
        left[1:] = density / mass[1:] * np.expm1(targets[1:] + r[1:] - at)
        right[:-1] = -density / mass[:-1] * np.expm1(targets[:-1] + r[:-1] - at)
        left = np.where(usable & np.isfinite(left), left, 0.0)
        right = np.where(usable & np.isfinite(right), right, 0.0)
        bands = np.zeros((2, len(r)))
        bands[0, 1:] = left[1:] * right[:-1]
        bands[1] = left**2 + right**2 + _DAMPING
        wanted = np.stack((np.where(usable, r, 0.0), usable.astype(np.float64)), axis=1)
        y, ones = solveh_banded(bands, wanted, check_finite=False).T
        if begins or ends:
            # One more unknown, the offset, by the formula of Sherman and Morrison.
            y = y - ones * (y[usable].sum() / (1 + ones[usable].sum()))
            offset += float(y[usable].sum())
        shift = -left[1:] * y[1:] - right[:-1] * y[:-1]
        targets = grid + offset
        at = np.clip(at + shift, targets[:-1] + 0.01 * spacing, targets[1:] - 0.01 * spacing)
        edges = np.maximum.accumulate(law.place(at))
    return offset, first, targets + r, mass, float(edges[0])


def _optimistic(
    pair: Pair, sign: int, spacing: float, span: tuple[float, float], theta: float
) -> _Atoms:
    """Merged cells, their losses rounded down onto a common grid."""
    law = _law(pair, sign)
    offset, first, losses, masses, inner = _cells(
        law, spacing, span, 0.5 if pair.symmetric else None
    )
    top = first + len(losses) - 1
    if pair.symmetric:
        # The cell around 0 is its own mirror image.
        mass, lift = _integrals(law, np.array([0.5, inner]), np.zeros(1))
        at_zero = (1 - pair.rate) * float(erf(1 / (pair.noise * math.sqrt(8))))
        middle = float(2 * mass[0] - lift[0]) + at_zero
        losses, masses = losses[1:], masses[1:]
        mirrored = masses * np.exp(-losses)
        losses = np.concatenate((-losses[::-1], [0.0], losses))
        masses = np.concatenate((mirrored[::-1], [middle], masses))
        first = min(math.floor(span[0] / spacing), 0)
    known = (masses > 0) & np.isfinite(losses)
    losses, masses = losses[known], masses[known]
    shift = _least_rounding(losses - offset, masses, theta, spacing)
    index = np.floor((losses - offset + shift) / spacing)
    index = np.minimum(index, top)
    kept = index >= first - 1
    index = index[kept].astype(np.intp) - (first - 1)
    return _Atoms(offset - shift, first - 1, np.bincount(index, weights=masses[kept]))


def _least_rounding(losses: _Array, masses: _Array, theta: float, spacing: float) -> float:
    """The shift of the grid by which the tilted losses are rounded down least."""
    exponents = np.log(masses) + theta * losses
    weights = np.exp(exponents - exponents.max())
    rests = losses - spacing * np.floor(losses / spacing)
    order = np.argsort(rests)
    rests, weights = rests[order], weights[order]
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
    cost = spacing * before - rests * weights.sum()
    best = float(rests[int(np.argmin(cost))])
    tiny = 1e-11 * spacing + 4 * _UNIT * float(np.abs(losses).max())
    return (spacing - best if best > 0 else 0.0) + tiny


# Composition.


@dataclass(frozen=True)
class _Composed:
    """The sum's tilted masses on `losses`, and what is not known about them.

    delta(e) = exp(log_scale) sum masses exp(-theta (loss - reference)) (1 - exp(e - loss))_+, up
    to `outside` exp(-theta (e - reference)) exp(_log_kernel(theta)), and `infinite`.
    """

    losses: _Array
    weights: _Array  # masses exp(-theta (loss - reference))
    reference: float
    theta: float
    spacing: float
    log_scale: float
    outside: float
    rounding: tuple[float, float]  # bounds on the masses' errors: of each, of their 2-norm
    infinite: float
    relative: float
    is_upper: bool

    def delta(self, epsilon: float) -> float:
        """An upper or a lower end of delta at this epsilon."""
        exponent = self.theta * (self.reference - epsilon)
        kernel = float(_log_kernel(self.theta))
        log_chernoff = self.log_scale + exponent + kernel + self.relative
        chernoff = math.exp(min(log_chernoff, 0.0))
        if exponent > 600 or abs(self.log_scale) > 690:
            return min(1.0, chernoff + self.infinite) + 5e-324 if self.is_upper else 0.0
        start = int(np.searchsorted(self.losses, epsilon, side="right"))
        found = float(self.weights[start:] @ -np.expm1(epsilon - self.losses[start:]))
        top, sums = math.exp(kernel), self._kernel_sums()
        error = self.outside * top
        error += min(self.rounding[0] * (sums[0] + top), self.rounding[1] * (sums[1] + top))
        error *= math.exp(exponent)
        scale = math.exp(self.log_scale)
        if not self.is_upper:
            return max(0.0, (found * (1 - self.relative) - error) * scale)
        total = min((found * (1 + self.relative) + error) * scale, chernoff)
        return min(1.0, total + self.infinite) + 5e-324

    def _kernel_sums(self) -> tuple[float, float]:
        """Norms of exp(-theta l) (1 - exp(-l)) on l = D, 2 D, ..., of order 1 and 2."""
        rates = np.array([0.0, 1.0, 2.0])
        one = 1 / np.expm1((self.theta + rates) * self.spacing)
        two = 1 / np.expm1((2 * self.theta + rates) * self.spacing)
        first = one[0] - one[1] + 1e-12 * one[0]
        second = two[0] - 2 * two[1] + two[2] + 1e-12 * two[0]
        return float(first), math.sqrt(max(0.0, float(second)))


def _compose(pairs: Pairs, sign: int, plan: _Plan, spacing: float, is_upper: bool) -> _Composed:
    theta = plan.theta
    atoms = [
        _pessimistic(pair, sign, spacing, span)
        if is_upper
        else _optimistic(pair, sign, spacing, span, theta)
        for (pair, _), span in zip(pairs, plan.ranges, strict=True)
    ]
    counts = [count for _, count in pairs]
    offset = math.fsum(n * a.offset for a, n in zip(atoms, counts, strict=True))
    size = next_fast_len(math.ceil((plan.high - plan.low) / spacing) + 2 * _MARGIN, real=True)
    begin = math.floor((plan.low - offset) / spacing) - _MARGIN
    low, high = offset + begin * spacing, offset + (begin + size) * spacing
    log_modulus = np.zeros(size // 2 + 1)
    log_raised, phase, doubt = np.zeros_like(log_modulus), np.zeros_like(log_modulus), 0.0
    total = 0.0
    # Bounds exp(E exp(tau (S - end))) on the tilted mass outside; a coarse grid wants a small tau.
    downs, ups = (
        np.unique([sign * min(abs(tau), c / spacing) for c in (math.inf, 2.0, 0.5, 0.1)])
        for sign, tau in zip((-1, 1), plan.taus, strict=True)
    )
    below, above = -downs * low, -ups * high
    error = _FFT_ERROR * math.log2(2 * size)
    for a, count in zip(atoms, counts, strict=True):
        losses = a.offset + spacing * np.arange(a.first, a.first + len(a.masses))
        exponents = np.log(a.masses) + theta * losses
        peak = float(exponents.max())
        tilted = np.exp(exponents - peak)
        norm = float(tilted.sum())
        tilted /= norm
        total += count * (peak + math.log(norm))
        below += count * _log_means(tilted, losses, downs)
        above += count * _log_means(tilted, losses, ups)
        transformed = rfft(_folded(tilted, a.first, size))
        modulus = np.abs(transformed)
        log_modulus += count * np.log(np.maximum(modulus, 1e-300))
        log_raised += count * np.log(modulus + error)
        phase += count * np.angle(transformed)
        doubt += count
    spectrum = np.exp(log_modulus + 1j * phase)
    present = np.exp(log_modulus)
    rounding = present * (4 * _UNIT * doubt * math.pi - 4 * _UNIT * log_modulus + error)
    unsure = np.exp(log_raised) - present + np.where(present > 0, rounding, 0.0)
    each, norm = 2 * float(unsure.sum()) / size, math.sqrt(2 * float(unsure @ unsure) / size)
    masses = irfft(spectrum, size)
    if doubt == 1:
        masses, each, norm = _folded(tilted, atoms[0].first, size), 0.0, 0.0
    masses = np.roll(masses, -(begin % size))
    losses = offset + spacing * np.arange(begin, begin + size)
    reference = plan.epsilon
    log_scale = total - theta * reference
    steps = sum(counts)
    return _Composed(
        losses=losses,
        weights=masses * np.exp(np.minimum(theta * (reference - losses), 600.0)),
        reference=reference,
        theta=theta,
        spacing=spacing,
        log_scale=log_scale,
        rounding=(each, norm),
        outside=math.exp(min(0.0, below.min())) + math.exp(min(0.0, above.min())),
        infinite=math.fsum(n * a.infinite for a, n in zip(atoms, counts, strict=True)),
        relative=_SUM_ERROR + _MASS_ERROR * steps,
        is_upper=is_upper,
    )


def _log_means(masses: _Array, losses: _Array, taus: _Array) -> _Array:
    """Log E exp(tau L) for each tau."""
    known = masses > 0
    masses, losses = masses[known], losses[known]
    result = np.empty(len(taus))
    for i, tau in enumerate(taus):
        peak = float((tau * losses).max())
        result[i] = peak + math.log(float(masses @ np.exp(tau * losses - peak)))
    return result


def _folded(masses: _Array, first: int, size: int) -> _Array:
    """The masses of indices modulo `size`."""
    start = first % size
    padded = np.zeros(-(-(start + len(masses)) // size) * size)
    padded[start : start + len(masses)] = masses
    return padded.reshape(-1, size).sum(axis=0)


def _answer(composed: _Composed, question: _Question) -> float:
    if question.epsilon is not None:
        return composed.delta(question.epsilon)
    return _epsilon_at(composed, question.delta or 0.0)


def _epsilon_at(composed: _Composed, delta: float) -> float:
    """The epsilon at which delta is this, on the safe side."""
    is_upper = composed.is_upper

    def excess(epsilon: float) -> float:
        found = composed.delta(epsilon)
        return math.log(found / delta) if found > 0 else -1e3

    # The lower end of delta is of use near the reference only, hence steps away from there.
    high = composed.reference
    step = 0.02 / composed.theta
    while excess(high) > 0:
        high, step = high + step, 2 * step
        if not high < 1e300:
            return math.inf if is_upper else composed.reference
    low, step = high, 0.02 / composed.theta
    while excess(low) <= 0:
        if low == 0:
            return 0.0
        high, low, step = low, max(0.0, low - step), 2 * step
    root = float(brentq(excess, low, high, xtol=1e-10 * high, rtol=1e-12))
    step = 1e-10 * high
    while low <= root <= high:
        if excess(root) <= 0 if is_upper else excess(root) > 0:
            return root
        root += step if is_upper else -step
        step *= 2
    return high if is_upper else low
