"""Epsilon by composing discretised privacy losses with the FFT, both ends of it certified.

A law is the distribution of the loss L = log(dP/dQ) under P; delta(e) = E (1 - exp(e - L))_+.
`pld_law` is one step's, `pld_plan` chooses a window and a grid, `pld_cells` puts the law on it,
`pld_composition` composes. s is a pair's noise, q its rate.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import erf

from .accountant import Accountant
from .gaussian import gaussian_delta, gaussian_epsilon
from .interval import Interval
from .pairs import Pairs, joint_noise
from .pld_composition import Composition, compose
from .pld_plan import TOLERANCE, Question, plan_of, spacing_of

__all__ = ["PLDAccountant", "pld_delta", "pld_epsilon"]

_ATTEMPTS = 5
_SMALLEST_NOISE, _LARGEST_NOISE = 0.005, 1e8  # beyond, only the closed bounds


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
        return pld_epsilon(pairs, delta)

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        return pld_delta(pairs, epsilon)


def pld_epsilon(pairs: Pairs, delta: float) -> Interval:
    """Both ends of epsilon at delta."""
    if _total_variation(pairs) <= delta:
        return Interval(0.0, 0.0)
    closed = gaussian_epsilon(delta=delta, noise_multiplier=joint_noise(pairs))
    return _both_directions(pairs, Question(delta=delta), closed)


def pld_delta(pairs: Pairs, epsilon: float) -> Interval:
    """Both ends of delta at epsilon."""
    closed = gaussian_delta(epsilon=epsilon, noise_multiplier=joint_noise(pairs))
    closed = min(1.0, _total_variation(pairs), closed * (1 + 1e-9) + 1e-300)
    return _both_directions(pairs, Question(epsilon=epsilon), closed)


def _total_variation(pairs: Pairs) -> float:
    """The sum of the pairs' total variations, q (2 Phi(1 / (2 s)) - 1): it bounds every delta."""
    return (1 + 1e-12) * math.fsum(
        n * pair.rate * float(erf(1 / (pair.noise * math.sqrt(8)))) for pair, n in pairs
    )


def _both_directions(pairs: Pairs, question: Question, closed: float) -> Interval:
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


def _one_direction(pairs: Pairs, sign: int, question: Question, enough: float | None) -> Interval:
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
        plan = plan_of(pairs, sign, question)
        if plan is None:
            return Interval(lower, upper)
        spacing, least = spacing_of(pairs, plan, question)
        if enough is not None:
            spacing *= 3
        for _ in range(_ATTEMPTS):
            spacing = max(spacing, least)
            upper = min(upper, _answer(compose(pairs, sign, plan, spacing, True), question))
            if enough is not None and upper <= enough:
                return Interval(0.0, upper)
            lower = max(lower, _answer(compose(pairs, sign, plan, spacing, False), question))
            gap, before = upper - lower, gap
            allowed = 2 * TOLERANCE * upper
            if question.epsilon is None:
                allowed = max(allowed, 0.1 * TOLERANCE / plan.theta)
            if gap <= allowed or spacing == least or gap > 0.7 * before:
                break
            factor = 0.8 * math.sqrt(allowed / gap) if gap < 0.99 * upper else 0.25
            spacing *= min(0.6, max(0.1, factor))
            if question.epsilon is None and upper < 0.9 * plan.epsilon:
                # Where the Chernoff bound is far off, so is its theta.
                plan = plan_of(pairs, sign, question, upper) or plan
                wanted, least = spacing_of(pairs, plan, question)
                spacing = min(spacing, wanted)
    return Interval(lower, upper)


def _answer(composition: Composition, question: Question) -> float:
    if question.epsilon is not None:
        return composition.delta(question.epsilon)
    return _epsilon_at(composition, question.delta or 0.0)


def _epsilon_at(composition: Composition, delta: float) -> float:
    """The epsilon at which delta is this, on the safe side."""
    is_upper = composition.is_upper

    def excess(epsilon: float) -> float:
        found = composition.delta(epsilon)
        return math.log(found / delta) if found > 0 else -1e3

    # The lower end of delta is of use near the reference only, hence steps away from there.
    high = composition.reference
    step = 0.02 / composition.theta
    while excess(high) > 0:
        high, step = high + step, 2 * step
        if not high < 1e300:
            return math.inf if is_upper else composition.reference
    low, step = high, 0.02 / composition.theta
    while excess(low) <= 0:
        if low == 0:
            return 0.0
        high, low, step = low, max(0.0, low - step), 2 * step
    # Half of the time that importing this package takes.
    from scipy.optimize import brentq

    root = float(brentq(excess, low, high, xtol=1e-10 * high, rtol=1e-12))
    step = 1e-10 * high
    while low <= root <= high:
        if excess(root) <= 0 if is_upper else excess(root) > 0:
            return root
        root += step if is_upper else -step
        step *= 2
    return high if is_upper else low
