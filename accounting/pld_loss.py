"""The distribution of one step's privacy loss, and its discretization on a grid.

Letters: s is the pair's noise, q its rate, l(x) = log(1 - q + q exp((2x - 1) / (2 s^2))) its loss
at the output x. Losses of several examples are in `mixture`, of several steps in `allocation`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solveh_banded
from scipy.special import erf, log_ndtr

from .allocation import losses_of
from .mixture import Mixture, mixture_of
from .pairs import Pair

Array = NDArray[Any]

UNIT = float(np.finfo(np.float64).eps)
_REACH = 38.5  # standard deviations beyond which the density is 0 in float64
_NEWTON_STEPS = 6
_DAMPING = 1e-8  # limits opposite moves of adjacent boundaries, which change no loss
_NODES = {n: np.polynomial.legendre.leggauss(n) for n in (4, 6)}


@dataclass(frozen=True)
class LossDistribution:
    """The privacy loss of a pair in one direction, as an increasing function of t.

    If a sample is removed (P is the mixture), t is the output x; if one is added, t is -x.
    """

    noise: float
    rate: float
    sign: int  # 1: removed, -1: added
    mixture: Mixture | None = None  # if a unit has several examples

    def loss(self, t: Array) -> Array:
        if self.mixture:
            return self.sign * self.mixture.loss(self.sign * t)
        u = (2 * self.sign * t - 1) / (2 * self.noise**2)
        if self.rate == 1:
            return self.sign * u
        low, high = np.minimum(u, 500.0), np.maximum(u, 500.0)
        above = math.log(self.rate) + np.log1p((1 / self.rate - 1) * np.exp(-high))
        loss = np.log1p(self.rate * np.expm1(low))
        return self.sign * np.where(u > 500, high + above, loss)

    def place(self, loss: Array) -> Array:
        """Return the point with this loss; infinite if no point has it."""
        value = self.sign * loss
        if self.mixture:
            return self.sign * self.mixture.place(value)
        if self.rate == 1:
            return self.sign * (self.noise**2 * value + 0.5)
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.log1p(np.maximum(np.expm1(np.minimum(value, 30.0)) / self.rate, -1.0))
        high = np.maximum(value, 30.0)
        high = high - math.log(self.rate) + np.log1p((self.rate - 1) * np.exp(-high))
        return self.sign * (self.noise**2 * np.where(value > 30, high, low) + 0.5)

    def density(self, t: Array) -> Array:
        x = self.sign * t
        found = np.exp(-np.square(x / self.noise) / 2)
        if self.mixture and self.sign == 1:
            found = np.exp(self.mixture.loss(x) - np.square(x / self.noise) / 2)
        elif self.sign == 1:
            shifted = np.exp(-np.square((x - 1) / self.noise) / 2)
            found = (1 - self.rate) * found + self.rate * shifted
        return found / (self.noise * math.sqrt(2 * math.pi))

    def slope(self, t: Array) -> Array:
        """Return the loss's derivative: E(number of drawn examples | x) / s^2."""
        if self.mixture:
            return self.mixture.mean(self.sign * t) / self.noise**2
        u = (2 * self.sign * t - 1) / (2 * self.noise**2)
        return self.rate * np.exp(u - self.sign * self.loss(t)) / self.noise**2

    def log_tails(self, t: float, above: bool) -> tuple[float, float]:
        """Return the logs of the masses under P and under Q below (or above) t."""
        if self.mixture:
            tails = self.mixture.log_tails(self.sign * t, above == (self.sign == 1))
            return tails if self.sign == 1 else tails[::-1]
        side = -1.0 if above else 1.0
        x = side * t * self.sign if self.sign == 1 else side * t
        # Mirrored so that the tail is (-inf, x]: the shifted mean is at +-1.
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
        """Return the ends of the line's part on which the density is above 0 in float64."""
        reach, most = _REACH * self.noise, self.mixture.most if self.mixture else 1
        return (-reach, most + reach) if self.sign == 1 else (-most - reach, reach)

    def edge(self) -> float:
        """Return the loss's infimum (sign 1) or supremum (-1): +-log P(no example is drawn)."""
        if self.rate == 1:
            return -math.inf
        absence = self.mixture.log_p[0] if self.mixture else math.log1p(-self.rate)
        return float(absence * self.sign)

    def step(self) -> float:
        """Return a length on which loss and density are almost polynomials."""
        return min(self.noise / 8, self.noise**2 / 2)


def loss_distribution(pair: Pair, sign: int) -> LossDistribution:
    """Return the pair's loss distribution if a sample is removed (sign 1) or added (-1)."""
    sign = 1 if pair.symmetric or pair.rate == 1 else sign
    mixture = mixture_of(pair) if pair.examples > 1 else None
    return LossDistribution(pair.noise, pair.rate, sign, mixture)


@dataclass(frozen=True)
class Atoms:
    """Masses at the losses offset + D (first + 0, 1, ...), and the mass at infinite loss."""

    offset: float
    first: int
    masses: Array
    infinite: float = 0.0


def _integrals(dist: LossDistribution, edges: Array, references: Array) -> tuple[Array, Array]:
    """Return each cell's mass, and E (1 - exp(reference - L)) over the cell, by quadrature."""
    low, high = dist.ends()
    edges = np.clip(edges, low, high)
    widths = np.diff(edges)
    parts = np.maximum(1, np.ceil(widths / dist.step())).astype(np.intp)
    starts = np.cumsum(parts) - parts
    if len(parts) == 0:
        return np.empty(0), np.empty(0)
    points, weights = _NODES[4 if widths.max() < dist.step() / 8 else 6]
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
        density = dist.density(t) * (weight / 2)
        mass += density
        lift -= density * np.expm1(references - dist.loss(t))
    mass *= width
    lift *= width
    if parts.max() > 1:
        return np.add.reduceat(mass, starts), np.add.reduceat(lift, starts)
    return mass, lift


def pessimistic(pair: Pair, sign: int, spacing: float, span: tuple[float, float]) -> Atoms:
    """Split each loss onto the two grid points around it; masses under P and Q are preserved."""
    if pair.steps > 1:
        return _split(pair, sign, spacing, span)
    dist = loss_distribution(pair, sign)
    first, last = math.floor(span[0] / spacing), math.ceil(span[1] / spacing)
    start = 0 if pair.symmetric else first
    last = max(last, start + 1)
    losses = spacing * np.arange(start, last + 1)
    t = dist.place(losses)
    if pair.symmetric:
        t[0] = 0.5
    mass, lift = _integrals(dist, t, losses[:-1])
    to_upper = np.clip(lift / -math.expm1(-spacing), 0.0, mass)
    masses = np.zeros(len(losses))
    masses[:-1] += mass - to_upper
    masses[1:] += to_upper
    above_p, above_q = map(math.exp, dist.log_tails(float(t[-1]), above=True))
    if not pair.symmetric:
        masses[0] += math.exp(dist.log_tails(float(t[0]), above=False)[0])
        return Atoms(0.0, first, masses, above_p)
    mirrored = masses * np.exp(-losses)
    mirrored[-1] += above_q
    at_zero = (1 - pair.rate) * float(erf(1 / (pair.noise * math.sqrt(8))))
    masses[0] += mirrored[0] + at_zero
    masses = np.concatenate((mirrored[:0:-1], masses))
    begin = min(max(first, -last), last - 1)
    drop = begin + last
    inner = masses[drop:].copy()
    inner[0] += masses[:drop].sum()
    return Atoms(0.0, begin, inner, above_p)


def _split(pair: Pair, sign: int, spacing: float, span: tuple[float, float]) -> Atoms:
    """Return `pessimistic` for random allocation, whose losses are discrete."""
    losses, masses, _, infinite = losses_of(pair, sign, True)
    first = math.floor(span[0] / spacing)
    last = max(math.ceil(span[1] / spacing), first + 1)
    index = np.floor(losses / spacing)
    to_upper = masses * np.expm1(spacing * index - losses) / math.expm1(-spacing)
    is_above, is_below = index >= last, index < first
    at = np.clip(index, first, last - 1).astype(np.intp) - first
    to_upper[is_below] = 0.0
    inside = ~is_above
    found = np.bincount(at[inside], (masses - to_upper)[inside], last + 1 - first)
    found[1:] += np.bincount(at[inside], to_upper[inside], last + 1 - first)[:-1]
    return Atoms(0.0, first, found, infinite + float(masses[is_above].sum()))


def _merged(
    pair: Pair, sign: int, spacing: float, span: tuple[float, float]
) -> tuple[int, Array, Array]:
    """Return the first j, losses and masses of cells for random allocation (discrete losses).

    Each mass is spread halfway to its neighbors, so that the border of two cells may divide the
    mass. This is valid, because outputs with equal losses may be distinguished.
    """
    losses, of_p, of_q, _ = losses_of(pair, sign, False)
    first = math.floor(span[0] / spacing)
    borders = spacing * (np.arange(first, max(math.ceil(span[1] / spacing), first + 2)) + 0.5)
    ends = np.concatenate((losses[:1], (losses[:-1] + losses[1:]) / 2, losses[-1:]))
    places = np.concatenate(([0.0], np.interp(borders, ends, np.arange(len(ends))), [len(losses)]))
    # Differences of sums from the nearer end keep the precision of small masses.
    is_lower = places[1:] <= int(np.searchsorted(np.cumsum(of_p), 0.5))
    found, rounding = [], UNIT * (4 + np.diff(places))
    for masses in (of_p, of_q):
        below = np.concatenate(([0.0], np.cumsum(masses)))
        above = np.concatenate((np.cumsum(masses[::-1])[::-1], [0.0]))
        below, above = (np.interp(places, np.arange(len(sums)), sums) for sums in (below, above))
        inside = np.where(is_lower, np.diff(below), -np.diff(above))
        found.append((inside, rounding * np.where(is_lower, below[1:], above[:-1])))
    masses = np.maximum(found[0][0] - found[0][1], 0.0)
    return first, np.log(masses / (found[1][0] + found[1][1])), masses


def _cells(
    dist: LossDistribution, spacing: float, span: tuple[float, float], inner: float | None
) -> tuple[float, int, Array, Array, float]:
    """Partition the line into cells whose losses are as close to a grid as possible.

    A cell merged into one output has the loss log(P(cell) / Q(cell)). Newton's method moves the
    boundaries, by the smallest steps, until these losses are offset + D j. Much mass may lie near
    the loss log(1 - q); if cells reach it, the offset moves too. The line begins at `inner`.
    Returns the offset, the first j, the cells' losses and masses under P, the first boundary.
    """
    first = math.floor(span[0] / spacing) if inner is None else 0
    last = max(math.ceil(span[1] / spacing), first + 3)
    edge = dist.edge() if inner is None else -math.inf
    begins = dist.sign == 1 and first * spacing <= edge + spacing
    ends = dist.sign == -1 and edge <= (last + 1) * spacing
    offset = 0.0
    if begins or ends:
        nearest = math.floor(edge / spacing)
        first = nearest if begins else min(first, nearest - 3)
        last = nearest if ends else max(last, nearest + 3)
        offset = edge - nearest * spacing
    grid = spacing * np.arange(first, last + 1)
    edges = dist.place(grid[:-1] + offset + spacing / 2)
    for remaining in range(_NEWTON_STEPS, -1, -1):
        edges = np.clip(edges, *dist.ends())
        targets = grid + offset
        inside, lift = _integrals(dist, edges, targets[1:-1])
        below = dist.log_tails(float(edges[0]), above=False)
        above = dist.log_tails(float(edges[-1]), above=True)
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
        at, density = dist.loss(edges), dist.density(edges) / dist.slope(edges)
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
            # The offset is one more unknown: Sherman-Morrison formula.
            y = y - ones * (y[usable].sum() / (1 + ones[usable].sum()))
            offset += float(y[usable].sum())
        shift = -left[1:] * y[1:] - right[:-1] * y[:-1]
        targets = grid + offset
        at = np.clip(at + shift, targets[:-1] + 0.01 * spacing, targets[1:] - 0.01 * spacing)
        edges = np.maximum.accumulate(dist.place(at))
    return offset, first, targets + r, mass, float(edges[0])


def optimistic(
    pair: Pair, sign: int, spacing: float, span: tuple[float, float], theta: float
) -> Atoms:
    """Merge each cell into one output, and round the cells' losses down to a common grid."""
    if pair.steps > 1:
        offset, first, losses, masses = 0.0, *_merged(pair, sign, spacing, span)
    else:
        dist = loss_distribution(pair, sign)
        offset, first, losses, masses, inner = _cells(
            dist, spacing, span, 0.5 if pair.symmetric else None
        )
    top = first + len(losses) - 1
    if pair.symmetric:
        # The cell around 0 is its own mirror image.
        mass, lift = _integrals(dist, np.array([0.5, inner]), np.zeros(1))
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
    is_inside = index >= first - 1
    index = index[is_inside].astype(np.intp) - (first - 1)
    return Atoms(offset - shift, first - 1, np.bincount(index, weights=masses[is_inside]))


def _least_rounding(losses: Array, masses: Array, theta: float, spacing: float) -> float:
    """Return the shift of the grid that rounds the tilted losses by the least amount."""
    exponents = np.log(masses) + theta * losses
    weights = np.exp(exponents - exponents.max())
    rests = losses - spacing * np.floor(losses / spacing)
    order = np.argsort(rests)
    rests, weights = rests[order], weights[order]
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1]))
    cost = spacing * before - rests * weights.sum()
    best = float(rests[int(np.argmin(cost))])
    tiny = 1e-11 * spacing + 4 * UNIT * float(np.abs(losses).max())
    return (spacing - best if best > 0 else 0.0) + tiny
