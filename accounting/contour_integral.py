"""The integral along one contour: a composition's cumulant, and its delta with an error bound.

Letters: a is the order, K = log M(a) the whole composition's cumulant; `contour` defines m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from .cumulant import RoughCumulants, log_mgf, log_mgfs
from .mixture import mixture_of
from .pairs import Pair, Pairs

_Real = NDArray[np.float64]
_Complex = NDArray[np.complex128]

REMOVE, ADD = 1, -1
OCTAVE = 16  # apexes are 2^(k / 16), so that nearby queries reuse cached cumulants
TARGET_ERROR = 1e-10  # relative error of delta, if rounding allows
_NARROW = 4  # contours of this `width` or more bend less
_FINEST = 3  # halvings of the step
_PIECE = 1.0  # length in t that is evaluated at once
_EDGE_STEP = 0.5
_LAST = 42.0  # t at which e^-t is far below rounding
_REMAINDER_NODES = np.array([0.0, 0.3, 0.7, 1.2, 1.8, 2.5, 3.3, 4.2, 5.2, 6.5, 8.0, 10.0])  # t
_ENOUGH, _ROUGH = 1e-12, 1e-4  # errors of M up to which the real line is used
_FEW = 16
_ROUNDING = 2.0**-52
_UNKNOWN = 1e300  # error reported if the step is too coarse for a bound
_LEAST_K, _MOST_K = -60 * OCTAVE, 80 * OCTAVE
_LOG = math.log(2) / OCTAVE
_MOST_WIDTH = 7  # a narrower contour bends into a region of large K
_CUT_FROM = 1.5  # noise above which leaving out far outputs may help
_TRIES = 24
_MOST_KNOWN = 1024  # number of cached pairs


@dataclass(frozen=True)
class Contour:
    """The contour a(t) = apex + scale (sin(b) (cosh t - 1) + i cos(b) sinh t)."""

    side: int  # 1 for an apex at 1 + c, -1 for an apex at -c
    k: int  # c = 2^(k / 16)
    width: int  # scale = c 2^(-width / 2)
    small: bool  # whether e^K - 1 is integrated instead of e^K
    cut: float | None  # as in `log_mgf`; the probability left out is negligible against delta

    @property
    def bend(self) -> float:
        """The angle b in radians; a narrow contour bends less, to avoid large K."""
        return 0.25 if self.width < _NARROW else 0.125

    @property
    def shift(self) -> float:
        """w: the integrand is evaluated in the strip |Im t| <= w."""
        return 0.9 * self.bend

    def step(self, level: int) -> float:
        """Return the step of t, halved with each level."""
        return 0.2 * self.bend / 2**level

    def orders(self, t: _Real, shift: float) -> tuple[_Complex, _Complex]:
        """Return (a, da / dt) at t + i shift."""
        c = 2.0 ** (self.k / OCTAVE)
        scale = c * 2.0 ** (-self.width / 2)
        turned = self.bend - shift + 1j * t
        start = apex_of(self.side, self.k) - scale * math.sin(self.bend)
        return start + scale * np.sin(turned), 1j * scale * np.cos(turned)


def apex_of(side: int, k: int) -> float:
    """Return the real order 1 + c or -c, c = 2^(k / 16)."""
    c = 2.0 ** (k / OCTAVE)
    return 1 + c if side == REMOVE else -c


def representatives(pairs: Pairs) -> Pairs:
    """Return a few pairs that represent all pairs, for the choice of a contour."""
    if len(pairs) <= _FEW:
        return pairs
    groups = np.array_split(np.arange(len(pairs)), _FEW)
    return tuple((pairs[g[len(g) // 2]][0], sum(pairs[i][1] for i in g)) for g in groups)


def cut_probability(pairs: Pairs, cut: float | None) -> float:
    """Return twice a bound of P(some output is beyond `cut`), see `log_mgf`; 0 without a cut."""
    return 0.0 if cut is None else 2 * sum(count for _, count in pairs) * float(ndtr(-cut))


@lru_cache(maxsize=64)
def _known_cumulants(*at: Any) -> dict[Pair, tuple[_Complex, _Real]]:
    """Return the cache of single pairs' cumulants for given arguments of `_cumulants`."""
    return {}


def _cumulants(
    pairs: Pairs, contour: Contour, piece: int, level: int, edges: bool, enough: float
) -> tuple[_Complex, _Real]:
    """Return the composed cumulant and its error, on the contour, then on the strip's edges."""
    known = _known_cumulants(contour, piece, level, edges, enough)
    missing = [pair for pair, _ in pairs if pair not in known]
    if len(known) + len(missing) > _MOST_KNOWN:
        known.clear()
        missing = [pair for pair, _ in pairs]
    if missing:
        orders = _orders(contour, piece, level, edges)
        found = log_mgfs(missing, orders, cut=contour.cut, enough=enough)
        known.update(zip(missing, zip(*found, strict=True), strict=True))
    counts = np.array([count for _, count in pairs], dtype=np.float64)
    rows = [known[pair] for pair, _ in pairs]
    values, errors = (np.array(column) for column in zip(*rows, strict=True))
    with np.errstate(invalid="ignore"):
        return counts @ values, counts @ errors


def _orders(contour: Contour, piece: int, level: int, edges: bool) -> _Complex:
    orders = contour.orders(_nodes(piece, contour.step(level)), 0.0)[0]
    if edges:
        t = _nodes(piece, _EDGE_STEP)
        sides = [contour.orders(t, shift)[0] for shift in (-contour.shift, contour.shift)]
        orders = np.concatenate([orders, *sides])
    return orders


@lru_cache(maxsize=1 << 13)
def _remainder_cumulant(pair: Pair, contour: Contour, begin: float) -> tuple[_Complex, _Real]:
    orders = contour.orders(begin + _REMAINDER_NODES, 0.0)[0]
    return log_mgf(pair, orders, cut=contour.cut, enough=_ROUGH)


def _nodes(piece: int, step: float) -> _Real:
    count = round(_PIECE / step)
    return np.asarray(step * np.arange(piece * count, (piece + 1) * count))


@lru_cache(maxsize=256)
def integral_along(pairs: Pairs, contour: Contour, edges: bool) -> ContourIntegral:
    """Return the cached integral of these pairs along a contour."""
    return ContourIntegral(pairs, contour, edges)


class ContourIntegral:
    """A composition's cumulant along a contour, and the deltas that follow from it."""

    def __init__(self, pairs: Pairs, contour: Contour, edges: bool) -> None:
        self.pairs = pairs
        self.contour = contour
        self.edges = edges
        self._cut_probability = cut_probability(pairs, contour.cut)
        self._sums: dict[tuple[float, int, int], tuple[_Complex, _Real]] = {}
        self._factors: dict[tuple[float, int, float], tuple[_Complex, _Complex]] = {}

    def delta(self, epsilon: float) -> tuple[float, float, float]:
        """Return delta, its error bound (with the step's error if `edges`), its derivative."""
        best = (math.nan, math.inf, math.nan)
        for level in range(_FINEST + 1 if self.edges else 1):
            value, slope, rounding, strip = self._sum(epsilon, level)
            error = rounding + strip
            before, best = best[1], min(best, (value, error, slope), key=lambda found: found[1])
            if (
                error <= 10 * TARGET_ERROR * abs(value)
                or error > before / 2 > 0
                or before == error
            ):
                break
        return best

    def _sum(self, epsilon: float, level: int) -> tuple[float, float, float, float]:
        """Return delta, its derivative, rounding plus truncation error, and trapezoidal error."""
        step = self.contour.step(level)
        value = slope = rounding = strip = tail = largest = coarser = 0.0
        edge_open, peaks, edge_tails = [True, True], [0.0, 0.0], [0.0, 0.0]
        for piece in range(math.ceil(_LAST / _PIECE)):
            t = _nodes(piece, step)
            # Where the integrand is small, a larger error of the cumulant is acceptable.
            weight = tail / abs(value) if piece and value else 1.0
            decades = min(8, max(0, math.floor(-math.log10(weight)))) if weight > 0 else 8
            key = (piece, level, decades)
            if key not in self._sums:
                enough = 0.0 if self.contour.small else _ENOUGH * 10.0**decades
                at = (self.contour, piece, level, self.edges, enough)
                self._sums[key] = _cumulants(self.pairs, *at)
            cumulant, error = self._sums[key]
            terms, moments, noise = self._terms(
                epsilon, t, 0.0, cumulant[: len(t)], error[: len(t)]
            )
            if piece == 0:
                terms[0], moments[0] = terms[0] / 2, moments[0] / 2
            size = np.abs(terms)
            end = _count_significant(size, noise)
            value += step * float(terms[:end].imag.sum())
            coarser += 2 * step * float(terms[:end:2].imag.sum())
            slope += step * float(moments[:end].imag.sum())
            rounding += step * float(noise[:end].sum())
            largest = max(largest, float(size[:end].max(initial=0.0)))
            tail = _tail_bound(size[:end], largest, end < len(t), tail)
            behind = size[end:][size[end:] > 2 * noise[end:]]
            if behind.size and not float(behind.max()) < 1e-3 * largest:
                # The integrand rises again, so the small terms after `end` are not its tail.
                tail = math.inf
            if self.edges:
                sides = self._edges(epsilon, piece, cumulant[len(t) :], error[len(t) :])
                for index, (edge, known) in enumerate(sides):
                    if edge_open[index]:
                        strip += _EDGE_STEP * float(edge[:known].sum())
                        peaks[index] = max(peaks[index], float(edge[:known].max(initial=0.0)))
                        edge_tails[index] = _tail_bound(
                            edge[:known], peaks[index], known < len(edge), edge_tails[index]
                        )
                        edge_open[index] = known == len(edge)
            if end < len(t) or tail <= max(TARGET_ERROR * abs(value), 0.01 * rounding):
                break
        strip += sum(edge_tails)
        # With a cut the noise is large: the loss has one scale, and no integrand rises again.
        if self.edges and math.isfinite(tail) and self.contour.cut is None:
            tail += self._remainder(epsilon, t[min(end, len(t) - 1)])
        # The theorem also bounds the error of the sum with twice the step. If the two sums differ
        # by more than this bound, the strip's integrals are not reliable.
        exponent = 2 * math.pi * self.contour.shift / step
        allowed = 2 * strip / math.expm1(exponent / 2) + rounding + tail
        if self.edges and not abs(value - coarser) <= 2 * allowed:
            return value, slope, rounding + tail, _UNKNOWN
        return (
            value,
            slope,
            rounding + tail + self._cut_probability,
            2 * strip / math.expm1(exponent),
        )

    def _edges(
        self, epsilon: float, piece: int, cumulant: _Complex, error: _Real
    ) -> list[tuple[_Real, int]]:
        """Return |integrand| on each edge, and the number of values before rounding dominates."""
        t = _nodes(piece, _EDGE_STEP)
        sides = []
        for index, shift in enumerate((-self.contour.shift, self.contour.shift)):
            part = slice(index * len(t), (index + 1) * len(t))
            terms, _, noise = self._terms(epsilon, t, shift, cumulant[part], error[part])
            sides.append((np.abs(terms), _count_significant(np.abs(terms), noise)))
        return sides

    def _remainder(self, epsilon: float, start: float) -> float:
        """Integrate the modulus beyond the contour's end, as far as float64 resolves it."""
        begin = math.ceil(start / _PIECE) * _PIECE
        key, t = (begin, -1, 0), begin + _REMAINDER_NODES
        if key not in self._sums:
            few = representatives(self.pairs)
            self._sums[key] = _composed(few, _remainder_cumulant, self.contour, begin)
        terms, _, noise = self._terms(epsilon, t, 0.0, *self._sums[key])
        size = np.abs(terms)
        return float(np.trapezoid(np.where(size > 2 * noise, size, 0.0), t))

    def _terms(
        self, epsilon: float, t: _Real, shift: float, cumulant: _Complex, error: _Real
    ) -> tuple[_Complex, _Complex, _Real]:
        """Return the integrand / pi, the integrand times -m / pi, and the rounding error."""
        key = (float(t[0]), len(t), shift)
        if key not in self._factors:
            a, speed = self.contour.orders(t, shift)
            m = a - 1 if self.contour.side == REMOVE else -a
            self._factors[key] = m, speed / (math.pi * a * (a - 1))
        m, factor = self._factors[key]
        with np.errstate(all="ignore"):
            whole = np.exp(cumulant - epsilon * m) * factor
            terms = whole
            if self.contour.small:
                less = np.exp(-epsilon * m) * factor
                terms = np.where(cumulant.real < 1, np.expm1(cumulant) * less, whole - less)
            rounding = _ROUNDING * (4 + 2 * np.abs(epsilon * m))
            return terms, -m * terms, np.abs(whole) * error + np.abs(terms) * rounding


def _composed(
    pairs: Pairs, cumulant: Callable[..., tuple[_Complex, _Real]], *at: Any
) -> tuple[_Complex, _Real]:
    total: _Complex | float = 0.0
    error: _Real | float = 0.0
    with np.errstate(invalid="ignore"):
        for pair, count in pairs:
            value, wrong = cumulant(pair, *at)
            total, error = total + count * value, error + count * wrong
    return np.asarray(total), np.asarray(error)


def _count_significant(size: _Real, noise: _Real) -> int:
    unknown = ~(np.isfinite(size) & np.isfinite(noise) & (size > 2 * noise))
    return int(np.argmax(unknown)) if unknown.any() else len(size)


def _tail_bound(size: _Real, largest: float, ends: bool, before: float) -> float:
    """Bound the integral beyond the last term, for terms that decay at least as fast as e^-t.

    If rounding errors exceed the terms before the terms have decayed, the bound is infinite.
    """
    last = float(size[-2:].max()) if len(size) else before
    return last if not ends or 0 < last < 1e-3 * largest else math.inf


class RealAxis:
    """The integrand on the real axis, for Chernoff's bounds and for the choice of contours."""

    def __init__(self, pairs: Pairs, side: int, delta: float) -> None:
        self.pairs = pairs
        self.side = side
        self._counts = np.array([count for _, count in pairs], dtype=np.float64)
        self._known: dict[tuple[int, float | None], float] = {}
        self._cumulants = _rough_cumulants(tuple(pair for pair, _ in pairs))
        self.cut = _cut(delta, pairs)
        self._may_cut = any(pair.noise > _CUT_FROM or pair.examples > 1 for pair, _ in pairs)
        variance = math.fsum(count * _variance(pair) for pair, count in pairs)
        self._start = round(OCTAVE * math.log2(4 / math.sqrt(variance)))

    def cumulant(self, k: int, cut: float | None = None) -> float:
        """Return K at the apex of k; inf if it cannot be computed."""
        if not _LEAST_K <= k <= _MOST_K:
            return math.inf
        if (k, cut) not in self._known:
            total = float(self._counts @ self._cumulants.at(apex_of(self.side, k), cut))
            self._known[k, cut] = total if total == total else math.inf
        return self._known[k, cut]

    def chernoff(self, delta: float) -> tuple[float, int, float | None]:
        """Return about the least epsilon of Chernoff's bound at delta, and its k and cut."""
        found = []
        for cut in (None, self.cut):

            def epsilon(k: int, cut: float | None = cut) -> float:
                return _chernoff_epsilon(self.cumulant(k, cut), k, delta)

            k = self._lowest(epsilon, self._start)
            found.append((max(0.0, epsilon(k)), k, cut))
        return min(found, key=lambda bound: bound[0])

    def epsilon_bound(self, pairs: Pairs, delta: float) -> float:
        """Return Chernoff's bound of epsilon for all pairs, rounding error included."""
        _, k, cut = self.chernoff(delta)
        k, cumulant = _upper_cumulant(pairs, self.side, k, cut)
        rest = delta - cut_probability(pairs, cut)
        return max(0.0, _chernoff_epsilon(cumulant, k, rest)) if rest > 0 else math.inf

    def delta_bound(self, pairs: Pairs, epsilon: float) -> float:
        """Return Chernoff's bound of delta for all pairs, rounding error included."""
        found = []
        for cut in (None, self.cut):

            def log_delta(k: int, cut: float | None = cut) -> float:
                return _chernoff_log_delta(self.cumulant(k, cut), k, epsilon)

            k = self._lowest(log_delta, self._start)
            found.append((log_delta(k), k, cut))
        _, k, cut = min(found, key=lambda bound: bound[0])
        k, cumulant = _upper_cumulant(pairs, self.side, k, cut)
        log = _chernoff_log_delta(cumulant, k, epsilon)
        chernoff = math.exp(min(0.0, log)) + cut_probability(pairs, cut)
        return min(chernoff, math.fsum(count * _presence(pair) for pair, count in pairs))

    def contours(self, epsilon: float) -> Iterator[Contour]:
        """Yield contours for this epsilon >= 0, in order of their estimated accuracy."""
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
        """Return a contour through the modulus's minimum, and the minimum's approximate log."""
        if small and (self.side != REMOVE or epsilon == 0):
            return None

        def modulus(k: int) -> float:
            c, cumulant = 2.0 ** (k / OCTAVE), self.cumulant(k, cut)
            if not small:
                return cumulant - epsilon * c - math.log(c) - math.log1p(c)
            if not 0 < cumulant < math.inf:
                return math.inf
            log = cumulant + math.log(-math.expm1(-cumulant))
            # The factor 1.1 keeps the minimum away from c = 0, where the modulus is flat.
            return log - epsilon * c - 1.1 * math.log(c) - math.log1p(c)

        k = self._lowest(modulus, self._start)
        if not math.isfinite(modulus(k)):
            return None
        # The contour first goes to greater orders and then up, away from large K.
        for _ in range(8):
            if modulus(k + 6) > modulus(k) + 30 and modulus(k - 4) < modulus(k) + 2:
                k -= 4
        right = k + 4 if math.isfinite(modulus(k + 4)) else k
        curve = (modulus(right - 8) + modulus(right) - 2 * modulus(right - 4)) / (4 * _LOG) ** 2
        width = min(_MOST_WIDTH, round(math.log2(curve / 16))) if 16 < curve < math.inf else 0
        contour = Contour(self.side, k, width, small, cut)
        return contour, modulus(k) + k * _LOG

    def _lowest(self, function: Callable[[int], float], start: int) -> int:
        """Return the minimizer of a unimodal function on the grid."""
        k = max(_LEAST_K, min(start, _MOST_K))
        while not math.isfinite(function(k)) and k > _LEAST_K:
            k -= OCTAVE
        value = function(k)
        for step in (OCTAVE, OCTAVE // 2, 2, 1):
            moved = True
            while moved:
                moved = False
                for following in (k - step, k + step):
                    found = function(following)
                    if found < value:
                        k, value, moved = following, found, True
                        break
        return k


def _cut(delta: float, pairs: Pairs) -> float:
    """Return a number of standard deviations that outputs exceed with probability << delta."""
    steps = sum(count for _, count in pairs)
    needed = math.sqrt(2 * (math.log(steps) - math.log(max(delta, 1e-300)) + 35))
    return 4.0 * math.ceil(needed / 4)


def _chernoff_epsilon(cumulant: float, k: int, delta: float) -> float:
    c = 2.0 ** (k / OCTAVE)
    return (cumulant - math.log(delta) - _entropy(c)) / c


def _chernoff_log_delta(cumulant: float, k: int, epsilon: float) -> float:
    """Bound log delta by (1 - e^-u)_+ <= e^(c u) max_x (1 - e^-x) e^(-c x), u = L - epsilon."""
    c = 2.0 ** (k / OCTAVE)
    return cumulant - c * epsilon - _entropy(c)


def _upper_cumulant(pairs: Pairs, side: int, k: int, cut: float | None) -> tuple[int, float]:
    """Lower k until K at its apex is finite; return k and an upper bound of K, inf if none is."""
    for _ in range(_TRIES):
        order = np.array([apex_of(side, k) + 0j])
        found, errors = log_mgfs([pair for pair, _ in pairs], order, cut=cut, enough=_ENOUGH)
        rows = zip((found.real + errors)[:, 0].tolist(), pairs, strict=True)
        total = math.fsum(count * value for value, (_, count) in rows)
        if math.isfinite(total):
            return k, total
        k -= OCTAVE // 2
    return k, math.inf


def _entropy(c: float) -> float:
    """Return (1 + c) log(1 + c) - c log c."""
    return math.log1p(c) + c * math.log1p(1 / c)


def _presence(pair: Pair) -> float:
    return -math.expm1(pair.log_absence) if pair.rate < 1 else 1.0


def _variance(pair: Pair) -> float:
    if pair.examples > 1:
        return mixture_of(pair).loss_variance()
    precision = pair.noise**-2
    whole = precision + precision**2 / 4
    return min(whole, pair.rate**2 * math.expm1(min(precision, 700.0))) or 1e-300


_rough_cumulants = lru_cache(maxsize=256)(RoughCumulants)
