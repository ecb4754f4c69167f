"""ContourAccountant: epsilon and delta by inverting the privacy loss's cumulant along a contour.

Let M(a) = E_Q (dP/dQ)^a for the whole composition, a product over its steps. Then

    delta(epsilon) = (1 / 2 pi i) Integral M(a) e^(-epsilon m) / (a (a - 1)) da

upwards along Re a = 1 + c with m = a - 1 for P against Q ("remove"), and along Re a = -c with
m = -a for Q against P ("add"), where c > 0. K = log M is a sum over steps, so the time depends
only on the number of distinct steps, and delta may be arbitrarily small.

The contour bends to the right, a = apex + scale (sin(b) (cosh t - 1) + i cos(b) sinh t). The
integrand then decays even for few steps of tiny rate, although the Fourier transform of their loss
does not. In t the error of the trapezoidal rule with step h is at most

    (I(-w) + I(w)) / (e^(2 pi w / h) - 1),   I(w) = Integral |integrand(t + i w)| |dt|,

and t + i w is the same contour with b - w. If K is small, e^K - 1 replaces e^K to keep the
precision of tiny deltas; the term that is left out has the integral 0 for epsilon > 0.

Source: the method is known as the saddle-point accountant (Alghamdi et al. 2023); the formula is
the inversion of the Laplace transform of E_P (1 - e^(epsilon - L))_+.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .accountant import Accountant, Interval
from .contour_integral import (
    ADD,
    REMOVE,
    TARGET_ERROR,
    ContourIntegral,
    RealAxis,
    integral_along,
    representatives,
)
from .gaussian import gaussian_delta, gaussian_epsilon, one_step_delta, one_step_epsilon
from .pairs import Pairs, joint_noise
from .pld import pld_delta, pld_epsilon

_ROUNDS = 60
_GOOD = 1e-6  # relative width of an interval below which no other contour is tried
_LEAST_FLOAT = 5e-324
_LEAST_NOISE, _MOST_NOISE = 0.01, 1e9
_LATTICE_NOISE = 0.2
_LOOSE = 1e-3  # relative width of an interval above which PLD is computed too
_LEAST_PLD_DELTA = 1e-280
_EXACT = 1e-9  # relative error of a closed form, which is never below the exact value


class _Bounds(NamedTuple):
    lower: float
    upper: float


class ContourAccountant(Accountant):
    """Epsilon by contour inversion: tight at any delta, for any number of different steps.

    Guarantees:
        Both bounds of an interval include three errors. A theorem bounds the trapezoidal rule's
        error; its two integrals are evaluated numerically. The integrand at the contour's end and
        beyond bounds the error of the contour's finite length. The sizes of all terms bound the
        rounding errors of float64. Contours that contradict each other are dropped. If no contour
        has an error below 1e-3, or a subsampled step has noise below 0.2, Chernoff's bound and PLD
        are used. If a subsampled step has noise below 0.01 or above 1e9, it is accounted for
        without amplification. With random allocation, PLD computes the interval. Both directions,
        "remove" and "add", are evaluated, and the greater value is returned.

    Source:
        See the module.
    """

    _name = "contour"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        whole = gaussian_epsilon(delta=delta, noise_multiplier=joint_noise(pairs))
        if all(pair.rate == 1 for pair, _ in pairs):
            return Interval(whole * (1 - _EXACT), whole)
        if _is_one_example(pairs):
            once = one_step_epsilon(pairs[0][0], delta)
            return Interval(once * (1 - _EXACT), once)
        if not _has_moderate_noise(pairs):
            return Interval(0.0, whole)
        if _has_allocation(pairs):
            found = _Bounds(0.0, math.inf)
        elif _is_lattice(pairs):
            upper = max(axis.epsilon_bound(pairs, delta) for axis in _axes(pairs, delta))
            found = _Bounds(0.0, upper)
        else:
            found = _epsilon_of_both(pairs, delta)
        if found.lower < (1 - _LOOSE) * found.upper:
            found = _intersection(found, pld_epsilon(pairs, delta))
        return Interval(min(found.lower, whole), min(found.upper, whole))

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        whole = gaussian_delta(epsilon=epsilon, noise_multiplier=joint_noise(pairs))
        if all(pair.rate == 1 for pair, _ in pairs):
            return Interval(whole * (1 - _EXACT), whole)
        if _is_one_example(pairs):
            once = one_step_delta(pairs[0][0], epsilon)
            return Interval(once * (1 - _EXACT), once)
        if not _has_moderate_noise(pairs):
            return Interval(0.0, whole)
        if _has_allocation(pairs):
            found = _Bounds(0.0, 1.0)
        elif _is_lattice(pairs):
            axes = _axes(pairs, TARGET_ERROR)
            found = _Bounds(0.0, max(axis.delta_bound(pairs, epsilon) for axis in axes))
        else:
            found = _delta_of_both(pairs, epsilon)
        if found.lower < (1 - _LOOSE) * found.upper and found.upper > _LEAST_PLD_DELTA:
            found = _intersection(found, pld_delta(pairs, epsilon))
        return Interval(min(found.lower, whole), min(found.upper, whole))


def _is_one_example(pairs: Pairs) -> bool:
    """Return whether there is one step, with one example per unit: it has a closed form."""
    return len(pairs) == 1 and pairs[0][1] == 1 == pairs[0][0].examples == pairs[0][0].steps


def _has_allocation(pairs: Pairs) -> bool:
    """Return whether a pair describes random allocation, for which the cumulant is unknown."""
    return any(pair.steps > 1 for pair, _ in pairs)


def _epsilon_of_both(pairs: Pairs, delta: float) -> _Bounds:
    found = _epsilon_of(pairs, REMOVE, delta)
    if all(pair.symmetric for pair, _ in pairs):
        return found
    if _delta_of(pairs, ADD, found.upper, enough=delta).upper <= delta:
        return found
    other = _epsilon_of(pairs, ADD, delta)
    return _Bounds(max(found.lower, other.lower), max(found.upper, other.upper))


def _delta_of_both(pairs: Pairs, epsilon: float) -> _Bounds:
    found = _delta_of(pairs, REMOVE, epsilon)
    if all(pair.symmetric for pair, _ in pairs):
        return found
    other = _delta_of(pairs, ADD, epsilon, enough=found.upper)
    return _Bounds(max(found.lower, other.lower), max(found.upper, other.upper))


def _axes(pairs: Pairs, error: float) -> list[RealAxis]:
    few = representatives(pairs)
    return [RealAxis(few, side, error) for side in (REMOVE, ADD)]


def _intersection(mine: _Bounds, other: Interval) -> _Bounds:
    other_lower = other.lower or 0.0
    if max(mine.lower, other_lower) > min(mine.upper, other.upper):
        return _Bounds(min(mine.lower, other_lower), max(mine.upper, other.upper))
    return _Bounds(max(mine.lower, other_lower), min(mine.upper, other.upper))


def _has_moderate_noise(pairs: Pairs) -> bool:
    return all(_LEAST_NOISE <= pair.noise <= _MOST_NOISE for pair, _ in pairs)


def _is_lattice(pairs: Pairs) -> bool:
    """Return whether a loss nearly always has one of two values: its transform does not decay.

    The integrand along a contour then falls below the rounding error and rises again.
    """
    return any(pair.rate < 1 and pair.noise < _LATTICE_NOISE for pair, _ in pairs)


def _epsilon_of(pairs: Pairs, side: int, delta: float) -> _Bounds:
    axis = RealAxis(representatives(pairs), side, delta)
    start = axis.chernoff(delta)[0]
    if not 0 < start < math.inf:
        start = gaussian_epsilon(delta=delta, noise_multiplier=joint_noise(pairs)) or 1.0
    if side == ADD:
        start = min(start, _largest_added_loss(pairs))
    epsilon, low, high, last, checked = start, 0.0, math.inf, math.inf, False
    for _ in range(_ROUNDS):
        value, error, slope = _first_significant_delta(axis, epsilon, delta)
        if value > 2 * error and slope < 0:
            # Newton's step in log epsilon
            above = math.log(value / delta)
            factor = math.exp(min(2.0, max(-2.0, -above * value / (slope * epsilon))))
        elif value + error < delta or (low == 0 and not math.isfinite(error)):
            # If epsilon is far too large, the computed delta is only rounding error.
            above, factor = -math.inf, 0.25
        else:
            break
        low, high = (epsilon, high) if above > 0 else (low, epsilon)
        if abs(factor - 1) <= 1e-3 and abs(above) < 0.5:
            epsilon *= factor
            break
        if not checked and low == 0 and epsilon * factor < 1e-3 * start:
            checked = True
            if _delta_of(pairs, side, 0.0).upper <= delta:
                return _Bounds(0.0, 0.0)
        following = epsilon * factor
        if not low < following < high or abs(above) > 0.9 * abs(last):
            following = math.sqrt(max(low, high / 256) * min(high, 256 * low or math.inf))
        epsilon, last = following, above
    found = _Bounds(0.0, math.inf)
    for contour in axis.contours(epsilon):
        other = _epsilon_bounds(integral_along(pairs, contour, True), epsilon, delta)
        if other.lower > found.upper or other.upper < found.lower:
            # One of the two contours is wrong.
            found = _Bounds(0.0, math.inf)
            break
        found = _Bounds(max(found.lower, other.lower), min(found.upper, other.upper))
        if found.upper - found.lower <= _GOOD * found.lower:
            break
    if found.upper == math.inf:
        found = _Bounds(found.lower, axis.epsilon_bound(pairs, delta))
    if side == ADD:
        return _Bounds(found.lower, min(found.upper, _largest_added_loss(pairs)))
    return found


def _largest_added_loss(pairs: Pairs) -> float:
    """Return the supremum of the loss under "add": -log P(the added sample is never drawn)."""
    if any(pair.rate == 1 for pair, _ in pairs):
        return math.inf
    return -math.fsum(count * pair.log_absence for pair, count in pairs)


def _first_significant_delta(
    axis: RealAxis, epsilon: float, delta: float
) -> tuple[float, float, float]:
    """Return delta, its error bound and derivative, by the first contour that is exact enough."""
    found = (math.nan, math.nan, math.nan)
    for contour in axis.contours(epsilon):
        found = integral_along(axis.pairs, contour, False).delta(epsilon)
        value, error, _ = found
        if value > 2 * error or value + error < delta:
            break
    return found


def _epsilon_bounds(line: ContourIntegral, epsilon: float, delta: float) -> _Bounds:
    for _ in range(6):
        value, error, slope = line.delta(epsilon)
        if not value > 0 > slope or error > delta:
            return _Bounds(0.0, math.inf)
        following = epsilon - math.log(value / delta) * value / slope
        if not 0.5 * epsilon < following < 2 * epsilon:
            return _Bounds(0.0, math.inf)
        done = abs(following - epsilon) <= 1e-12 * epsilon
        epsilon = following
        if done:
            break
    ends = []
    for way in (-1, 1):
        step = 2 * error / -slope + 4e-15 * epsilon
        for _ in range(30):
            end = epsilon + way * step
            value, error, _ = line.delta(max(end, 0.0))
            if end <= 0 or (value - error >= delta if way < 0 else 0 <= value + error <= delta):
                break
            step *= 2
        else:
            end = 0.0 if way < 0 else math.inf
        ends.append(max(end, 0.0))
    return _Bounds(*ends)


def _delta_of(pairs: Pairs, side: int, epsilon: float, *, enough: float | None = None) -> _Bounds:
    """Return certified bounds of one direction's delta; stop at an upper bound <= `enough`."""
    if side == ADD and epsilon >= _largest_added_loss(pairs):
        return _Bounds(0.0, 0.0)
    few = representatives(pairs)
    bound = max(RealAxis(few, side, TARGET_ERROR).delta_bound(pairs, epsilon), _LEAST_FLOAT)
    if enough is not None and bound <= enough:
        return _Bounds(0.0, bound)
    found = _Bounds(0.0, bound)
    for contour in RealAxis(few, side, bound * TARGET_ERROR).contours(epsilon):
        value, error, _ = integral_along(pairs, contour, True).delta(epsilon)
        if not math.isfinite(value + error) or value + error < 0:
            continue
        if value - error > found.upper or value + error < found.lower:
            # One of the two contours is wrong.
            found = _Bounds(0.0, bound)
            break
        upper = min(found.upper, max(value + error, _LEAST_FLOAT))
        found = _Bounds(min(upper, max(found.lower, value - error)), upper)
        if found.upper - found.lower <= _GOOD * found.lower:
            break
    return found
