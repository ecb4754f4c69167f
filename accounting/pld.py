"""PLDAccountant: composes discretized privacy losses with the FFT; both bounds are certified.

The privacy loss is L = log(dP/dQ) under P, and delta(e) = E (1 - exp(e - L))_+. `pld_loss`
discretizes the loss of one step, `pld_plan` chooses the grid and its window, and this file
composes the discretized losses. Letters: s is a pair's noise, q its rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import erf

from .accountant import Accountant, Interval
from .allocation import mass_error
from .gaussian import gaussian_delta, gaussian_epsilon
from .mixture import mixture_of
from .pairs import Pair, Pairs, joint_noise
from .pld_loss import UNIT, Array, optimistic, pessimistic
from .pld_plan import TOLERANCE, Plan, Query, log_kernel, plan_of, spacing_of

_ATTEMPTS = 5
_SMALLEST_NOISE, _LARGEST_NOISE = 0.005, 1e8  # outside, only closed-form bounds are used
_SMALLEST_NOISE_OF_ALLOCATION = 0.1
_MASS_ERROR = 1e-14  # relative error of one step's masses
_MIXTURE_ERROR = 1e-13  # relative error for units of several examples
_SUM_ERROR = 1e-9  # relative error of the sums over the window
_MARGIN = 32  # grid points added to the window at each end
_FFT_ERROR = 2.5 * UNIT  # error of one level of the FFT, relative to the sum of inputs' moduli


class PLDAccountant(Accountant):
    """Epsilon by the FFT: an upper bound, too large by hundredths of a percent, and a lower bound.

    Guarantees:
        Under the assumptions of `Accountant` the history is (get_epsilon(delta), delta)-private
        and (epsilon, get_delta(epsilon))-private. With an epsilon or delta below its lower
        bound it is not private. Both bounds include bounds of three errors: the FFT's rounding,
        the mass outside of its window, and the mass that wraps around.

    Source:
        Upper bound: Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, Connect the Dots. Lower
        bound: merging outputs to cells is post-processing; cells are chosen with losses on a grid.
        Exponential tilting (Cramer 1938) makes rounding errors relative to delta, not to 1.
        Koskela, Jaelkoe, Prediger, Honkela 2021 compose without tilting.
    """

    _name = "pld"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        return pld_epsilon(pairs, delta)

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        return pld_delta(pairs, epsilon)


def pld_epsilon(pairs: Pairs, delta: float) -> Interval:
    """Return the lower and upper bound of epsilon at delta."""
    if _total_variation(pairs) <= delta:
        return Interval(0.0, 0.0)
    closed = gaussian_epsilon(delta=delta, noise_multiplier=joint_noise(pairs))
    return _both_directions(pairs, Query(delta=delta), closed)


def pld_delta(pairs: Pairs, epsilon: float) -> Interval:
    """Return the lower and upper bound of delta at epsilon."""
    closed = gaussian_delta(epsilon=epsilon, noise_multiplier=joint_noise(pairs))
    closed = min(1.0, _total_variation(pairs), closed * (1 + 1e-9) + 1e-300)
    return _both_directions(pairs, Query(epsilon=epsilon), closed)


def _total_variation(pairs: Pairs) -> float:
    """Bound delta at every epsilon by the sum of the pairs' total variation distances."""
    return (1 + 1e-12) * math.fsum(n * _variation(pair) for pair, n in pairs)


def _variation(pair: Pair) -> float:
    """Return a pair's total variation: n q (2 Phi(1 / (2 s)) - 1) for one example in n steps."""
    if pair.examples > 1:
        return mixture_of(pair).total_variation()
    return pair.rate * pair.steps * float(erf(1 / (pair.noise * math.sqrt(8))))


def _smallest_noise(pair: Pair) -> float:
    return _SMALLEST_NOISE if pair.steps == 1 else _SMALLEST_NOISE_OF_ALLOCATION


def _both_directions(pairs: Pairs, query: Query, closed: float) -> Interval:
    if not all(_smallest_noise(pair) <= pair.noise <= _LARGEST_NOISE for pair, _ in pairs):
        return Interval(0.0, closed)
    found = _one_direction(pairs, 1, query, None)
    lower, upper = found.lower or 0.0, found.upper
    if any(pair.rate < 1 and not pair.symmetric for pair, _ in pairs):
        other = _one_direction(pairs, -1, query, upper)
        lower, upper = max(lower, other.lower or 0.0), max(upper, other.upper)
    upper = min(upper, closed)
    return Interval(max(0.0, min(lower, upper)), upper)


def _one_direction(pairs: Pairs, sign: int, query: Query, enough: float | None) -> Interval:
    lower, upper, gap = 0.0, math.inf, math.inf
    # The laws of random allocation are discrete: errors on the first grid are larger than planned,
    # and part of the error remains on any grid.
    has_allocation = any(pair.steps > 1 for pair, _ in pairs)
    tolerance = TOLERANCE * (10 if has_allocation else 1)
    if sign == -1 and all(pair.rate < 1 and not pair.symmetric for pair, _ in pairs):
        # No loss of an addition exceeds -log of the probability that no example is drawn.
        most = -(1 + 1e-12) * math.fsum(n * pair.log_absence for pair, n in pairs)
        if query.epsilon is None:
            upper = most
        elif query.epsilon >= most:
            upper = 0.0
        if enough is not None and upper <= enough:
            return Interval(0.0, upper)
    with np.errstate(all="ignore"):
        plan = plan_of(pairs, sign, query)
        if plan is None:
            return Interval(lower, upper)
        spacing, least = spacing_of(pairs, plan, query)
        if has_allocation:
            spacing /= 16
        if enough is not None:
            spacing *= 3
        for _ in range(_ATTEMPTS):
            spacing = max(spacing, least)
            upper = min(upper, _answer(compose(pairs, sign, plan, spacing, True), query))
            if enough is not None and upper <= enough:
                return Interval(0.0, upper)
            lower = max(lower, _answer(compose(pairs, sign, plan, spacing, False), query))
            gap, before = upper - lower, gap
            allowed = 2 * tolerance * upper
            if query.epsilon is None:
                allowed = max(allowed, 0.1 * tolerance / plan.theta)
            if gap <= allowed or spacing == least or gap > 0.7 * before:
                break
            factor = 0.8 * math.sqrt(allowed / gap) if gap < 0.99 * upper else 0.25
            spacing *= min(0.6, max(0.1, factor))
            if query.epsilon is None and upper < 0.9 * plan.epsilon:
                # If the Chernoff bound is far from epsilon, its theta is unsuitable.
                plan = plan_of(pairs, sign, query, upper) or plan
                wanted, least = spacing_of(pairs, plan, query)
                spacing = min(spacing, wanted)
    return Interval(lower, upper)


def _answer(composition: Composition, query: Query) -> float:
    if query.epsilon is not None:
        return composition.delta(query.epsilon)
    return _epsilon_at(composition, query.delta or 0.0)


def _epsilon_at(composition: Composition, delta: float) -> float:
    is_upper = composition.is_upper

    def excess(epsilon: float) -> float:
        found = composition.delta(epsilon)
        return math.log(found / delta) if found > 0 else -1e3

    # The lower bound of delta is useful only near the reference, so the search starts there.
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
    # Imported here, since it takes half of this package's import time.
    from scipy.optimize import brentq

    root = float(brentq(excess, low, high, xtol=1e-10 * high, rtol=1e-12))
    step = 1e-10 * high
    while low <= root <= high:
        if excess(root) <= 0 if is_upper else excess(root) > 0:
            return root
        root += step if is_upper else -step
        step *= 2
    return high if is_upper else low


@dataclass(frozen=True)
class Composition:
    """Tilted masses of the composed privacy loss on a grid, and bounds of the masses' errors.

    A tilted mass is the probability of a loss times e^(theta loss), divided by the sum over all
    losses. With these masses
    delta(e) = exp(log_scale) sum masses exp(-theta (loss - reference)) (1 - exp(e - loss))_+, with
    an error of at most `outside` exp(-theta (e - reference)) exp(log_kernel(theta)) + `infinite`.
    """

    losses: Array
    weights: Array  # masses exp(-theta (loss - reference))
    reference: float
    theta: float
    spacing: float
    log_scale: float
    outside: float
    rounding: tuple[float, float]  # bounds of each mass's error, and of the errors' 2-norm
    infinite: float
    relative: float
    is_upper: bool

    def delta(self, epsilon: float) -> float:
        """Return an upper bound of delta at this epsilon if `is_upper`, else a lower bound."""
        exponent = self.theta * (self.reference - epsilon)
        kernel = float(log_kernel(self.theta))
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
        """Return 1-norm and 2-norm of exp(-theta l) * (1 - exp(-l)), l = spacing * (1, 2, ...)."""
        rates = np.array([0.0, 1.0, 2.0])
        one = 1 / np.expm1((self.theta + rates) * self.spacing)
        two = 1 / np.expm1((2 * self.theta + rates) * self.spacing)
        first = one[0] - one[1] + 1e-12 * one[0]
        second = two[0] - 2 * two[1] + two[2] + 1e-12 * two[0]
        return float(first), math.sqrt(max(0.0, float(second)))


def compose(pairs: Pairs, sign: int, plan: Plan, spacing: float, is_upper: bool) -> Composition:
    """Compose all pairs on one grid, for an upper or a lower bound of delta."""
    theta = plan.theta
    atoms = [
        pessimistic(pair, sign, spacing, span)
        if is_upper
        else optimistic(pair, sign, spacing, span, theta)
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
    # exp(E exp(tau (S - end))) bounds the tilted mass outside; a coarse grid needs a small tau.
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
        transformed = rfft(_fold(tilted, a.first, size))
        modulus = np.abs(transformed)
        log_modulus += count * np.log(np.maximum(modulus, 1e-300))
        log_raised += count * np.log(modulus + error)
        phase += count * np.angle(transformed)
        doubt += count
    spectrum = np.exp(log_modulus + 1j * phase)
    present = np.exp(log_modulus)
    rounding = present * (4 * UNIT * doubt * math.pi - 4 * UNIT * log_modulus + error)
    unsure = np.exp(log_raised) - present + np.where(present > 0, rounding, 0.0)
    each, norm = 2 * float(unsure.sum()) / size, math.sqrt(2 * float(unsure @ unsure) / size)
    masses = irfft(spectrum, size)
    if doubt == 1:
        masses, each, norm = _fold(tilted, atoms[0].first, size), 0.0, 0.0
    masses = np.roll(masses, -(begin % size))
    losses = offset + spacing * np.arange(begin, begin + size)
    reference = plan.epsilon
    log_scale = total - theta * reference
    return Composition(
        losses=losses,
        weights=masses * np.exp(np.minimum(theta * (reference - losses), 600.0)),
        reference=reference,
        theta=theta,
        spacing=spacing,
        log_scale=log_scale,
        rounding=(each, norm),
        outside=math.exp(min(0.0, below.min())) + math.exp(min(0.0, above.min())),
        infinite=math.fsum(n * a.infinite for a, n in zip(atoms, counts, strict=True)),
        relative=_SUM_ERROR + math.fsum(n * _mass_error(pair) for pair, n in pairs),
        is_upper=is_upper,
    )


def _mass_error(pair: Pair) -> float:
    if pair.steps > 1:
        return mass_error(pair)
    return _MASS_ERROR if pair.examples == 1 else _MIXTURE_ERROR


def _log_means(masses: Array, losses: Array, taus: Array) -> Array:
    known = masses > 0
    masses, losses = masses[known], losses[known]
    result = np.empty(len(taus))
    for i, tau in enumerate(taus):
        peak = float((tau * losses).max())
        result[i] = peak + math.log(float(masses @ np.exp(tau * losses - peak)))
    return result


def _fold(masses: Array, first: int, size: int) -> Array:
    """Return the masses added up by their index modulo `size`."""
    start = first % size
    padded = np.zeros(-(-(start + len(masses)) // size) * size)
    padded[start : start + len(masses)] = masses
    return padded.reshape(-1, size).sum(axis=0)
