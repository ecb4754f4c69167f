"""The sum of the losses of all steps, by one FFT of tilted masses, its errors bounded.

D is the spacing of the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft

from .pairs import Pairs
from .pld_cells import optimistic, pessimistic
from .pld_law import UNIT, Array
from .pld_plan import Plan, log_kernel

__all__ = ["Composition", "compose"]

_MASS_ERROR = 1e-14  # relative, of one step's masses; and of the sums over the window:
_SUM_ERROR = 1e-9
_MARGIN = 32  # grid points added to the window at each end
_FFT_ERROR = 2.5 * UNIT  # of one level of the FFT, relative to the sum of its inputs' moduli


@dataclass(frozen=True)
class Composition:
    """The sum's tilted masses on `losses`, and what is not known about them.

    delta(e) = exp(log_scale) sum masses exp(-theta (loss - reference)) (1 - exp(e - loss))_+, up
    to `outside` exp(-theta (e - reference)) exp(log_kernel(theta)), and `infinite`.
    """

    losses: Array
    weights: Array  # masses exp(-theta (loss - reference))
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
        """Norms of exp(-theta l) (1 - exp(-l)) on l = D, 2 D, ..., of order 1 and 2."""
        rates = np.array([0.0, 1.0, 2.0])
        one = 1 / np.expm1((self.theta + rates) * self.spacing)
        two = 1 / np.expm1((2 * self.theta + rates) * self.spacing)
        first = one[0] - one[1] + 1e-12 * one[0]
        second = two[0] - 2 * two[1] + two[2] + 1e-12 * two[0]
        return float(first), math.sqrt(max(0.0, float(second)))


def compose(pairs: Pairs, sign: int, plan: Plan, spacing: float, is_upper: bool) -> Composition:
    """The whole composition on one grid, for an upper end of delta or for a lower one."""
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
    rounding = present * (4 * UNIT * doubt * math.pi - 4 * UNIT * log_modulus + error)
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
        relative=_SUM_ERROR + _MASS_ERROR * steps,
        is_upper=is_upper,
    )


def _log_means(masses: Array, losses: Array, taus: Array) -> Array:
    """Log E exp(tau L) for each tau."""
    known = masses > 0
    masses, losses = masses[known], losses[known]
    result = np.empty(len(taus))
    for i, tau in enumerate(taus):
        peak = float((tau * losses).max())
        result[i] = peak + math.log(float(masses @ np.exp(tau * losses - peak)))
    return result


def _folded(masses: Array, first: int, size: int) -> Array:
    """The masses of indices modulo `size`."""
    start = first % size
    padded = np.zeros(-(-(start + len(masses)) // size) * size)
    padded[start : start + len(masses)] = masses
    return padded.reshape(-1, size).sum(axis=0)
