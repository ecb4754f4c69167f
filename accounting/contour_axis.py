"""The real axis: where a contour's apex lies, and Chernoff's bounds, which need no contour."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from .contour_line import OCTAVE, REMOVE, Contour, apex_of, left_out
from .cumulant import log_mgf, rough_log_mgf
from .pairs import Pair, Pairs

__all__ = ["Axis"]

_LEAST_K, _MOST_K = -60 * OCTAVE, 80 * OCTAVE
_LOG = math.log(2) / OCTAVE
_MOST_WIDTH = 7  # a narrower contour bends into where K is large
_CUT_FROM = 1.5  # noise from which it may help to leave outputs out
_TRIES = 24
_ENOUGH = 1e-12  # error of M on the real line that needs no ray


class Axis:
    """The integrand on the real axis, where a contour's apex is looked for."""

    def __init__(self, pairs: Pairs, side: int, delta: float) -> None:
        self.pairs = pairs
        self.side = side
        self.cut = _cut(delta, pairs)
        self._may_cut = max(pair.noise for pair, _ in pairs) > _CUT_FROM
        variance = math.fsum(count * _variance(pair) for pair, count in pairs)
        self._start = round(OCTAVE * math.log2(4 / math.sqrt(variance)))

    def cumulant(self, k: int, cut: float | None = None) -> float:
        """K at the apex of k; inf where it is beyond reach."""
        if not _LEAST_K <= k <= _MOST_K:
            return math.inf
        total = 0.0
        for pair, count in self.pairs:
            total += count * _on_axis(pair, self.side, k, cut)
        return total if total == total else math.inf

    def chernoff(self, delta: float) -> tuple[float, int, float | None]:
        """About the least epsilon that Chernoff's bound knows at this delta, its apex and cut."""
        found = []
        for cut in (None, self.cut):

            def epsilon(k: int, cut: float | None = cut) -> float:
                return _chernoff_epsilon(self.cumulant(k, cut), k, delta)

            k = self._lowest(epsilon, self._start)
            found.append((max(0.0, epsilon(k)), k, cut))
        return min(found, key=lambda bound: bound[0])

    def certain_epsilon(self, pairs: Pairs, delta: float) -> float:
        """Chernoff's bound of epsilon for all of the pairs, rounding included."""
        _, k, cut = self.chernoff(delta)
        k, cumulant = _upper_cumulant(pairs, self.side, k, cut)
        rest = delta - left_out(pairs, cut)
        return max(0.0, _chernoff_epsilon(cumulant, k, rest)) if rest > 0 else math.inf

    def certain_delta(self, pairs: Pairs, epsilon: float) -> float:
        """Chernoff's bound of delta for all of the pairs, rounding included."""
        found = []
        for cut in (None, self.cut):

            def log_delta(k: int, cut: float | None = cut) -> float:
                return _chernoff_log_delta(self.cumulant(k, cut), k, epsilon)

            k = self._lowest(log_delta, self._start)
            found.append((log_delta(k), k, cut))
        _, k, cut = min(found, key=lambda bound: bound[0])
        k, cumulant = _upper_cumulant(pairs, self.side, k, cut)
        log = _chernoff_log_delta(cumulant, k, epsilon)
        chernoff = math.exp(min(0.0, log)) + left_out(pairs, cut)
        return min(chernoff, math.fsum(count * pair.rate for pair, count in pairs))

    def contours(self, epsilon: float) -> Iterator[Contour]:
        """Contours for this epsilon >= 0, those that promise most digits first."""
        found = []
        for cut in (None, self.cut) if self._may_cut else (None,):
            small, whole = (self._contour(epsilon, cut, kind) for kind in (True, False))
            if small and whole and whole[1] - small[1] < 3:
                small, whole = whole, small
            found += [candidate[0] for candidate in (small, whole) if candidate]
        for narrower in (0, 3):
            for contour in found:
                yield replace(contour, width=contour.width + narrower)

    def _contour(
        self, epsilon: float, cut: float | None, small: bool
    ) -> tuple[Contour, float] | None:
        """A contour through the lowest point of its integrand's modulus, and the log of that."""
        if small and (self.side != REMOVE or epsilon == 0):
            return None

        def modulus(k: int) -> float:
            c, cumulant = 2.0 ** (k / OCTAVE), self.cumulant(k, cut)
            if not small:
                return cumulant - epsilon * c - math.log(c) - math.log1p(c)
            if not 0 < cumulant < math.inf:
                return math.inf
            log = cumulant + math.log(-math.expm1(-cumulant))
            # Flat towards 0, where nothing is gained.
            return log - epsilon * c - 1.1 * math.log(c) - math.log1p(c)

        k = self._lowest(modulus, self._start)
        if not math.isfinite(modulus(k)):
            return None
        # The contour goes to greater orders before it goes up: away from where K is large.
        for _ in range(8):
            if modulus(k + 6) > modulus(k) + 30 and modulus(k - 4) < modulus(k) + 2:
                k -= 4
        right = k + 4 if math.isfinite(modulus(k + 4)) else k
        curve = (modulus(right - 8) + modulus(right) - 2 * modulus(right - 4)) / (4 * _LOG) ** 2
        width = min(_MOST_WIDTH, round(math.log2(curve / 16))) if 16 < curve < math.inf else 0
        contour = Contour(self.side, k, width, small, cut)
        return contour, modulus(k) + k * _LOG

    def _lowest(self, function: Callable[[int], float], start: int) -> int:
        """Where a function with one valley is least on the grid."""
        k = max(_LEAST_K, min(start, _MOST_K))
        while not math.isfinite(function(k)) and k > _LEAST_K:
            k -= OCTAVE
        value = function(k)
        for step in (OCTAVE, OCTAVE // 2, 2, 1):
            moved = True
            while moved:
                moved = False
                for following in (k - step, k + step):
                    if function(following) < value:
                        k, value, moved = following, function(following), True
                        break
        return k


def _cut(delta: float, pairs: Pairs) -> float:
    """Standard deviations beyond which the outputs' chance is nothing against delta."""
    steps = sum(count for _, count in pairs)
    needed = math.sqrt(2 * (math.log(steps) - math.log(max(delta, 1e-300)) + 35))
    return 4.0 * math.ceil(needed / 4)


def _chernoff_epsilon(cumulant: float, k: int, delta: float) -> float:
    c = 2.0 ** (k / OCTAVE)
    return (cumulant - math.log(delta) - _entropy(c)) / c


def _chernoff_log_delta(cumulant: float, k: int, epsilon: float) -> float:
    """E (1 - e^(epsilon - L))_+ <= E e^(c (L - epsilon)) max over x > 0 of (1 - e^-x) e^(-c x)."""
    c = 2.0 ** (k / OCTAVE)
    return cumulant - c * epsilon - _entropy(c)


def _upper_cumulant(pairs: Pairs, side: int, k: int, cut: float | None) -> tuple[int, float]:
    """The nearest smaller apex at which K is known, and K there with its rounding error."""
    for _ in range(_TRIES):
        total, order = 0.0, np.array([apex_of(side, k) + 0j])
        for pair, count in pairs:
            value, error = log_mgf(pair, order, cut=cut, enough=_ENOUGH)
            total += count * float(value[0].real + error[0])
        if math.isfinite(total):
            return k, total
        k -= OCTAVE // 2
    return k, math.inf


def _entropy(c: float) -> float:
    """(1 + c) log(1 + c) - c log c."""
    return math.log1p(c) + c * math.log1p(1 / c)


def _variance(pair: Pair) -> float:
    """About the variance of the loss."""
    precision = pair.noise**-2
    whole = precision + precision**2 / 4
    return min(whole, pair.rate**2 * math.expm1(min(precision, 700.0))) or 1e-300


@lru_cache(maxsize=1 << 16)
def _on_axis(pair: Pair, side: int, k: int, cut: float | None) -> float:
    return rough_log_mgf(pair, apex_of(side, k), cut)
