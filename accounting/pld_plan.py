"""Chooses the tilt, window and grid of a composition.

No value here needs to be exact: every plan gives valid bounds; a bad plan widens the interval.
Letters: D is the grid's spacing, K the log of a loss distribution's moment generating function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .allocation import losses_of
from .pairs import Pair, Pairs
from .pld_loss import Array, loss_distribution

TOLERANCE = 3e-4  # target error of each bound, relative to epsilon
_MOST_POINTS = 2**21
_LOG_OUTSIDE = -24.0  # log of the tilted mass that may lie outside of the window
_LEAST_LOG_DELTA = -650.0  # if delta is lower, only closed-form bounds are used


@dataclass(frozen=True)
class Query:
    """A query for epsilon at this delta, or for delta at this epsilon."""

    delta: float | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class Plan:
    """The tilt theta, the window [low, high] and each pair's range of losses."""

    epsilon: float
    theta: float
    low: float
    high: float
    taus: tuple[float, float]  # exponents that bound the tilted tails below and above the window
    ranges: tuple[tuple[float, float], ...]


@lru_cache(maxsize=256)
def _sample(pair: Pair, sign: int) -> tuple[Array, Array]:
    """Approximate a loss distribution by the midpoint rule: ascending losses, log masses."""
    if pair.steps > 1:
        losses, masses, _, _ = losses_of(pair, sign, True)
        return losses, np.log(masses / masses.sum())
    dist = loss_distribution(pair, sign)
    low, high = dist.ends()
    step = dist.step()
    if pair.symmetric:
        low = 0.5
    else:
        # No midpoint is 1/2, where a loss is exactly 0.
        low = 0.5 * dist.sign - math.ceil((0.5 * dist.sign - low) / step) * step
    t = low + step * (np.arange(math.ceil((high - low) / step)) + 0.5)
    losses, log_masses = dist.loss(t), np.log(dist.density(t)) + math.log(step)
    if pair.symmetric:
        mirrored = log_masses - losses
        rest = 1 - np.exp(log_masses).sum() - np.exp(mirrored).sum()
        at_zero = math.log(max(float(rest), 1e-300))
        losses = np.concatenate((-losses[::-1], [0.0], losses))
        log_masses = np.concatenate((mirrored[::-1], [at_zero], log_masses))
    known = log_masses > -745
    return losses[known], log_masses[known] - np.log(np.exp(log_masses).sum())


_Sampled = Sequence[tuple[Array, Array, int]]  # losses, log masses, count


def _cumulant(sampled: _Sampled, thetas: Array) -> Array:
    total = np.zeros(len(thetas))
    for losses, log_masses, count in sampled:
        for i, theta in enumerate(thetas):
            exponents = log_masses + theta * losses
            peak = exponents.max()
            total[i] += count * (peak + math.log(np.exp(exponents - peak).sum()))
    return total


def log_kernel(theta: Array | float) -> Array:
    """Return log max_l exp(-theta l) (1-exp(-l)) = theta log theta - (1+theta) log(1+theta)."""
    theta = np.asarray(theta, dtype=np.float64)
    return -np.log1p(theta) - theta * np.log1p(1 / theta)


def _chernoff(sampled: _Sampled, query: Query, deviation: float) -> tuple[float, float]:

    def bound(thetas: Array) -> Array:
        values = _cumulant(sampled, thetas) + log_kernel(thetas)
        if query.epsilon is None:
            values = (values - math.log(query.delta or 1.0)) / thetas
        else:
            values = values - thetas * query.epsilon
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
    total = 0.0
    for losses, log_masses, count in sampled:
        exponents = log_masses + theta * losses
        masses = np.exp(exponents - exponents.max())
        mean = masses @ losses / masses.sum()
        total += count * float(masses @ np.square(losses - mean) / masses.sum())
    return math.sqrt(total)


def plan_of(pairs: Pairs, sign: int, query: Query, near: float | None = None) -> Plan | None:
    """Choose a plan for an epsilon near `near`, or near the Chernoff bound if `near` is None."""
    whole = [(*_sample(pair, sign), n) for pair, n in pairs]
    sampled: _Sampled = whole
    steps = sum(n for _, n in pairs)
    asked = query if near is None else Query(epsilon=near)
    for _ in range(3):
        deviation = _deviation(sampled)
        if not 0 < deviation < math.inf:
            return None
        theta, value = _chernoff(sampled, asked, deviation)
        if not math.isfinite(value) or (asked.delta is None and value < _LEAST_LOG_DELTA):
            return None
        epsilon, log_delta = max(value, 0.0), math.log(query.delta or 1.0)
        if asked.epsilon is not None:
            epsilon = asked.epsilon
            log_delta = value if near is None else log_delta
        sampled, infinite = _truncated(whole, epsilon, log_delta, query.epsilon is None)
        if asked.delta is not None and query.delta is not None:
            asked = Query(delta=max(query.delta - infinite, query.delta / 4))
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
    return Plan(
        epsilon=epsilon,
        theta=theta,
        low=float(lows[down]),
        high=float(highs[up]),
        taus=(-float(taus[down]), float(taus[up])),
        ranges=tuple(ranges),
    )


def _truncated(
    whole: _Sampled, epsilon: float, log_delta: float, is_bounded: bool
) -> tuple[_Sampled, float]:
    """Drop losses that can be treated as infinite; return the others, and the dropped mass.

    Treating a loss as infinite adds at most exp(e) times its mass under Q to delta(e).
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


def spacing_of(pairs: Pairs, plan: Plan, query: Query) -> tuple[float, float]:
    """Return the spacing of the first grid, and the smallest spacing that is allowed.

    Splitting a loss onto two grid points raises K by theta (theta + 1) D^2 / 12 for each step, and
    so epsilon by (theta + 1) D^2 / 12.
    """
    steps = sum(n for _, n in pairs)
    aim = 0.4 * TOLERANCE * max(plan.epsilon, 0.1 / plan.theta)
    if query.epsilon is not None:
        aim = 0.4 * TOLERANCE / plan.theta
    span = max(plan.high - plan.low, *(high - low for low, high in plan.ranges))
    largest = max(abs(plan.high), *(abs(end) for ends in plan.ranges for end in ends))
    least = max(span / (0.9 * _MOST_POINTS), 1e-14 * largest)
    wanted = math.sqrt(12 * aim / (steps * (plan.theta + 1)))
    return max(least, min(wanted, span / 100, 400.0)), least
