"""The privacy loss of n steps, one of which, chosen at random, has the sample: certified bounds.

Letters: s is the noise. The likelihood ratio of a step's output x ~ N(0, s^2), with the sample
against without it, is R = e^((2x - 1) / (2 s^2)). The ratio of the outputs of all n steps is
A = (R_1 + ... + R_n) / n, the mean of independent copies of R under Q, and

    delta = E_Q (A - e^epsilon)_+  (remove),    delta = E_Q (1 - e^epsilon A)_+  (add).

Both are convex in A, and in the A of each part of a composition, whose A is the product of its
parts' A. So a law (a distribution of A) that is greater in convex order gives an upper bound, and
a lesser law a lower bound. A law becomes greater if mass is split onto two values of A with the
same mean. It becomes lesser if mass is merged at the mean or, for the two functions above, left
out. Means of independent laws keep the order. Laws are stored on a grid of log A. The law for n
steps is computed by doubling n. All terms are positive: no cancellation, both tails are precise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from .pairs import Pair

_Array = NDArray[Any]
_Index = NDArray[np.intp]

_FINENESS = 1 / 24  # spacing of a law's grid divided by the standard deviation of log A
_REACH = 9.3  # standard deviations of x that are covered
_TAIL = 1e-20  # mass that may be cut off at each end of a law
_DENSE = 5.0  # deviations around the mean of log A beyond which the grid is coarser
_ROWS = 32  # rows evaluated together
_UNIT = 2.0**-53
_MASS_ERROR = 1e-13  # relative error of one step's masses
_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(8)
POSITION_ERROR = 1e-11  # error of log A that the rounding of all doublings causes


@dataclass(frozen=True)
class Law:
    """A distribution of A (see the module): masses on a grid of log A, at A = 0 and infinity.

    Attributes:
        steps: n.
        spacing: the spacing of the grid of log A.
        stride: the spacing of R's grid divided by `spacing`, a power of 2.
        index: log A divided by the spacing, ascending; rounded down if masses were merged.
        mass: the mass under Q.
        moment: mass times A, which is the mass under P.
        zero: the mass under Q at A = 0.
        infinite: the mass under P at A = infinity.
        error: the relative error of the masses.
    """

    steps: int
    spacing: float
    stride: int
    index: _Index
    mass: _Array
    moment: _Array
    zero: float
    infinite: float
    error: float

    def deviation(self) -> tuple[float, float]:
        """Return the mean and standard deviation of log A under Q."""
        total = self.mass.sum()
        mean = float(self.mass @ self.index / total)
        variance = float(self.mass @ np.square(self.index - mean) / total)
        return mean * self.spacing, math.sqrt(variance) * self.spacing

    def refined(self) -> Law:
        """Return the same law on a grid of half the spacing."""
        return replace(
            self, spacing=self.spacing / 2, stride=2 * self.stride, index=2 * self.index
        )


@lru_cache(maxsize=64)
def law_of(noise: float, steps: int, is_upper: bool) -> Law:
    """Bound the distribution of A in n steps in convex order, from above if `is_upper`."""
    law = first = _one_step(1 / noise, is_upper)
    for bit in bin(steps)[3:]:
        for is_odd in (False, True)[: 1 + int(bit)]:
            if _FINENESS * law.deviation()[1] / math.sqrt(2) < law.spacing / math.sqrt(2):
                law = law.refined()
            while first.spacing > law.spacing:
                first = first.refined()
            law = _trimmed(_mean(law, first if is_odd else law, is_upper), is_upper)
    return law


def _one_step(deviation: float, is_upper: bool) -> Law:
    """Return the law of R, whose logarithm is N(-deviation^2 / 2, deviation^2)."""
    # Doubling n halves A if only one R is large, so half of a grid value must be on the grid.
    spacing = math.log(2) / max(1, math.ceil(math.log(2) / (_FINENESS * deviation)))
    width = spacing / deviation
    low = math.floor((-_REACH - deviation / 2) / width)
    high = math.ceil((_REACH + deviation / 2) / width)
    index = np.arange(low, high + 1)
    cells = index[:-1, None] + (1 + _POINTS) / 2
    x = cells * width + deviation / 2  # in standard deviations
    masses = np.exp(-np.square(x) / 2) * (_WEIGHTS * (width / math.sqrt(8 * math.pi)))
    if not is_upper:
        moment = (masses * np.exp(cells * spacing)).sum(axis=1)
        mass = masses.sum(axis=1)
        return Law(1, spacing, 1, index[:-1], mass, moment, 0.0, 0.0, _MASS_ERROR)
    rise = np.expm1((1 + _POINTS) / 2 * spacing) / math.expm1(spacing)
    mass = np.zeros(len(index))
    mass[:-1] += (masses * (1 - rise)).sum(axis=1)
    mass[1:] += (masses * rise).sum(axis=1)
    # Mass below is split onto 0 and the lowest grid point, mass above onto the highest grid point
    # and infinity.
    ends = np.exp(index[[0, -1]] * spacing)
    below, above = (
        float(ndtr(side * (end * width + deviation / 2))) for side, end in ((1, low), (-1, high))
    )
    below_p, above_p = (
        float(ndtr(side * (end * width - deviation / 2))) for side, end in ((1, low), (-1, high))
    )
    mass[0] += below_p / ends[0]
    mass[-1] += above
    return Law(
        1,
        spacing,
        1,
        index,
        mass,
        mass * np.exp(index * spacing),
        max(0.0, below - below_p / ends[0]),
        max(0.0, above_p - above * ends[1]),
        _MASS_ERROR,
    )


def _mean(a: Law, b: Law, is_upper: bool) -> Law:
    """Return the law of the mean over the steps of a and b, independent laws of equal spacing."""
    steps = a.steps + b.steps
    of_a, of_b, spacing = a.steps / steps, b.steps / steps, a.spacing
    # log A - log A_a depends on log A_b - log A_a only.
    least = int(b.index[0] - a.index[-1])
    apart = np.arange(least, int(b.index[-1] - a.index[0]) + 1)
    shift = np.log1p(of_b * np.expm1(apart * spacing)) / spacing
    whole = np.floor(shift)
    rise = np.expm1((shift - whole) * spacing) / math.expm1(spacing)
    step = whole.astype(np.intp)
    begin = int(a.index[0] + step[int(b.index[0] - a.index[0]) - least])
    end = int(a.index[-1] + step[int(b.index[-1] - a.index[-1]) - least])
    size = end - begin + 2
    found, moment = np.zeros(size), np.zeros(size)
    for first in range(0, len(a.mass), _ROWS):
        rows = slice(first, first + _ROWS)
        for columns, times in _columns(a, b, first):
            at = b.index[None, columns] - (a.index[rows, None] + least)
            index = (step[at] + (a.index[rows, None] - begin)).ravel()
            mass = np.multiply.outer(times * a.mass[rows], b.mass[columns])
            if is_upper:
                up = mass * rise[at]
                found += np.bincount(index, (mass - up).ravel(), size)
                moment += np.bincount(index, up.ravel(), size)
            else:
                found += np.bincount(index, mass.ravel(), size)
                both = np.multiply.outer(times * of_a * a.moment[rows], b.mass[columns])
                both += np.multiply.outer(times * a.mass[rows], of_b * b.moment[columns])
                moment += np.bincount(index, both.ravel(), size)
    if is_upper:
        found[1:] += moment[:-1]
        moment = found * np.exp(np.arange(begin, begin + size) * spacing)
    kept = np.flatnonzero(found > 0)
    places = kept + begin
    # If A is 0 in a or in b, the mean is split onto 0 and infinity.
    zero = a.zero + b.zero
    infinite = of_a * (a.infinite + b.zero) + of_b * (b.infinite + a.zero)
    error = a.error + b.error + (len(a.mass) + len(b.mass) + 32) * _UNIT
    return Law(steps, spacing, a.stride, places, found[kept], moment[kept], zero, infinite, error)


def _columns(a: Law, b: Law, first: int) -> list[tuple[slice, float]]:
    """Return slices of b to combine with a's rows, and weights that use the symmetry if a is b."""
    if a is not b:
        return [(slice(None), 1.0)]
    end = first + _ROWS
    return [(slice(first, end), 1.0), (slice(end, None), 2.0)][: 1 + (end < len(b.mass))]


def _trimmed(law: Law, is_upper: bool) -> Law:
    """Return the law without its negligible ends, on coarser grids far from the mean."""
    mass, index, spacing, stride = law.mass, law.index, law.spacing, law.stride
    zero, infinite = law.zero, law.infinite
    begin = int(np.searchsorted(np.cumsum(mass), _TAIL))
    end = len(mass) - int(np.searchsorted(np.cumsum(law.moment[::-1]), _TAIL))
    if is_upper:
        lowest, highest = np.exp(index[[begin, end - 1]] * spacing)
        low, high = slice(None, begin), slice(end, None)
        lost = mass[low].sum(), law.moment[low].sum(), mass[high].sum(), law.moment[high].sum()
        mass = mass.copy()
        mass[begin] += lost[1] / lowest
        mass[end - 1] += lost[2]
        zero += max(0.0, float(lost[0] - lost[1] / lowest))
        infinite += max(0.0, float(lost[3] - lost[2] * highest))
    mass, index, moment = mass[begin:end], index[begin:end], law.moment[begin:end]
    if not is_upper:
        index = np.floor(np.log(moment / mass) / spacing).astype(np.intp)
    middle, deviation = law.deviation()
    far = np.abs(index * spacing - middle) / (_DENSE * deviation)
    width = np.minimum(np.exp2(np.floor(np.log2(np.maximum(far, 1.0)))), stride).astype(np.intp)
    coarse = np.floor_divide(index, width) * width
    start = int(coarse.min())
    if is_upper:
        rise = np.expm1((index - coarse) * spacing) / np.expm1(width * spacing)
        size = int((coarse + width).max()) - start + 1
        found = np.bincount(coarse - start, mass * (1 - rise), size)
        found += np.bincount(coarse - start + width, mass * rise, size)
    else:
        found = np.bincount(coarse - start, mass)
    kept = np.flatnonzero(found > 0)
    places = kept + start
    if is_upper:
        moment = found[kept] * np.exp(places * spacing)
    else:
        moment = np.bincount(coarse - start, moment)[kept]
    error = law.error + 8 * _UNIT
    return Law(law.steps, spacing, stride, places, found[kept], moment, zero, infinite, error)


def losses_of(pair: Pair, sign: int, is_upper: bool) -> tuple[_Array, _Array, _Array, float]:
    """Return ascending losses, their masses under P and Q, and P's mass at infinite loss."""
    law = law_of(pair.noise, pair.steps, is_upper)
    log_a = law.index * law.spacing if is_upper else np.log(law.moment / law.mass)
    order = np.argsort(sign * log_a, kind="stable")
    losses = sign * log_a[order] + (POSITION_ERROR if is_upper else -POSITION_ERROR)
    mass, moment = law.mass[order], law.moment[order]
    if sign == 1:
        return losses, moment, mass, law.infinite
    return losses, mass, moment, law.zero


def mass_error(pair: Pair) -> float:
    """Return the relative error of the masses of `losses_of`."""
    return max(law_of(pair.noise, pair.steps, is_upper).error for is_upper in (True, False))
