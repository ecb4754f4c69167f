"""Epsilon and delta by inverting the privacy loss's cumulant along a contour; the flagship.

With M(a) = E_Q (dP/dQ)^a of the whole composition, a product over its steps,

    delta(epsilon) = (1 / 2 pi i) Integral M(a) e^(-epsilon m) / (a (a - 1)) da

upwards along Re a = 1 + c, m = a - 1, for P against Q ("remove"), and along Re a = -c, m = -a,
for Q against P ("add"), c > 0. K = log M adds up over unlike steps, so a schedule costs what its
distinct steps do, and nothing limits how small delta may be.

The line is bent to the right, a = apex + scale (sin(b) (cosh t - 1) + i cos(b) sinh t): there the
integrand falls even where the loss of few steps of tiny rate has a Fourier transform that does
not. Along t the trapezoidal rule with step h errs by at most

    (I(-w) + I(w)) / (e^(2 pi w / h) - 1),   I(w) = Integral |integrand(t + i w)| |dt|,

and t + i w is the same contour with b - w. Where K is small, e^K - 1 takes the place of e^K, since
the 1 integrates to 0 for epsilon > 0: tiny deltas then keep their digits.

Source: the method is known as the saddle-point accountant (Alghamdi et al. 2023); the formula is
the inversion of the Laplace transform of E_P (1 - e^(epsilon - L))_+.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from .accountant import Accountant
from .cumulant import log_mgf, rough_log_mgf
from .gaussian import gaussian_delta, gaussian_epsilon
from .interval import Interval
from .one_step import one_step_delta, one_step_epsilon
from .pairs import Pair, Pairs

__all__ = ["ContourAccountant"]

_Real = NDArray[np.float64]
_Complex = NDArray[np.complex128]

_REMOVE, _ADD = 1, -1
_OCTAVE = 16  # apexes are 2^(k / 16), so that queries nearby find their cumulants cached
_LEAST_K, _MOST_K = -60 * _OCTAVE, 80 * _OCTAVE
_NARROW = 4  # width
_FINEST = 3  # halvings of the step
_MOST_WIDTH = 7  # a narrower contour bends into where K is large
_PIECE = 0.75  # of t, evaluated at once
_LAST = 42.0  # t at which e^-t is far below rounding
_EDGE_STEP = 0.375
_WANTED = 1e-10  # error of delta over delta, where rounding allows
_ROUNDS = 60
_FEW = 16  # pairs that stand for all of them while the contour is looked for
_CUT_FROM = 1.5  # noise from which it may help to leave outputs out
_GOOD = 1e-6  # width of an interval over its lower end with which no other contour is tried
_LEAST_FLOAT = 5e-324
_LEAST_NOISE, _MOST_NOISE = 0.01, 1e9
_EXACT = 1e-9  # what a closed form may lie above the truth, relatively
_ROUGH = 1e-4
_FAR = np.array([0.0, 0.3, 0.7, 1.2, 1.8, 2.5, 3.3, 4.2, 5.2, 6.5, 8.0, 10.0])  # of t
_ROUNDING = 2.0**-52
_ENOUGH = 1e-12  # error of M on the real line that needs no ray


class _Ends(NamedTuple):
    """An `Interval` whose lower end is known."""

    lower: float
    upper: float


class ContourAccountant(Accountant):
    """Epsilon by contour inversion: exact to about 1e-9, at any delta.

    Guarantees:
        Both ends of an interval include what the trapezoidal rule, the end of the contour and
        float64's rounding may err by: the first by a theorem whose two integrals are evaluated
        numerically, the second where the integrand has fallen below 1e-13 of the result. Where no
        contour is certain enough, the upper end is Chernoff's bound and the lower end is 0.

    Source:
        See the module; both directions, "remove" and "add", are evaluated and the greater counts.
    """

    @classmethod
    def mechanism(cls) -> str:
        """The name `"contour"`."""
        return "contour"

    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        whole = gaussian_epsilon(delta=delta, noise_multiplier=_joint_noise(pairs))
        if all(pair.rate == 1 for pair, _ in pairs):
            return Interval(whole * (1 - _EXACT), whole)
        if len(pairs) == 1 and pairs[0][1] == 1:
            once = one_step_epsilon(pairs[0][0], delta)
            return Interval(once * (1 - _EXACT), once)
        if not _is_within_reach(pairs):
            return Interval(0.0, whole)
        found = _epsilon_of(pairs, _REMOVE, delta)
        if not all(pair.symmetric for pair, _ in pairs):
            if _delta_of(pairs, _ADD, found.upper, enough=delta).upper > delta:
                other = _epsilon_of(pairs, _ADD, delta)
                found = _Ends(max(found.lower, other.lower), max(found.upper, other.upper))
        return Interval(min(found.lower, whole), min(found.upper, whole))

    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        whole = gaussian_delta(epsilon=epsilon, noise_multiplier=_joint_noise(pairs))
        if all(pair.rate == 1 for pair, _ in pairs):
            return Interval(whole * (1 - _EXACT), whole)
        if len(pairs) == 1 and pairs[0][1] == 1:
            once = one_step_delta(pairs[0][0], epsilon)
            return Interval(once * (1 - _EXACT), once)
        if not _is_within_reach(pairs):
            return Interval(0.0, whole)
        found = _delta_of(pairs, _REMOVE, epsilon)
        if not all(pair.symmetric for pair, _ in pairs):
            other = _delta_of(pairs, _ADD, epsilon, enough=found.upper)
            found = _Ends(max(found.lower, other.lower), max(found.upper, other.upper))
        return Interval(min(found.lower, whole), min(found.upper, whole))


def _is_within_reach(pairs: Pairs) -> bool:
    """Whether the noises are such that squares of them and their inverses are harmless."""
    return all(_LEAST_NOISE <= pair.noise <= _MOST_NOISE for pair, _ in pairs)


def _joint_noise(pairs: Pairs) -> float:
    """The noise of one Gaussian that is as far apart as all pairs without subsampling.

    A subsample is never less private than the whole, by joint convexity.
    """
    least = min(pair.noise for pair, _ in pairs)
    total = math.fsum(count * (least / pair.noise) ** 2 for pair, count in pairs)
    return least / math.sqrt(total)


def _epsilon_of(pairs: Pairs, side: int, delta: float) -> _Ends:
    """Certified epsilon of one direction at delta."""
    axis = _Axis(_representatives(pairs), side, delta)
    start = axis.chernoff(delta)[0]
    if not 0 < start < math.inf:
        start = gaussian_epsilon(delta=delta, noise_multiplier=_joint_noise(pairs)) or 1.0
    if side == _ADD:
        start = min(start, _largest_added_loss(pairs))
    epsilon, low, high, last, checked = start, 0.0, math.inf, math.inf, False
    for _ in range(_ROUNDS):
        value, error, slope = _clearest(axis, epsilon, delta)
        if value > 2 * error and slope < 0:
            # Newton's step in log epsilon
            above = math.log(value / delta)
            factor = math.exp(min(2.0, max(-2.0, -above * value / (slope * epsilon))))
        elif value + error < delta or (low == 0 and not math.isfinite(error)):
            # Nothing is known where epsilon is far too large.
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
                return _Ends(0.0, 0.0)
        following = epsilon * factor
        if not low < following < high or abs(above) > 0.9 * abs(last):
            following = math.sqrt(max(low, high / 256) * min(high, 256 * low or math.inf))
        epsilon, last = following, above
    found = _Ends(0.0, math.inf)
    for contour in axis.contours(epsilon):
        other = _around(_line(pairs, contour, True), epsilon, delta)
        found = _Ends(max(found.lower, other.lower), min(found.upper, other.upper))
        if found.upper - found.lower <= _GOOD * found.lower:
            break
    if found.upper == math.inf:
        found = _Ends(found.lower, axis.certain_epsilon(pairs, delta))
    if side == _ADD:
        return _Ends(found.lower, min(found.upper, _largest_added_loss(pairs)))
    return found


def _largest_added_loss(pairs: Pairs) -> float:
    """No output tells of an added sample more than that it was not drawn."""
    if any(pair.rate == 1 for pair, _ in pairs):
        return math.inf
    return -math.fsum(count * math.log1p(-pair.rate) for pair, count in pairs)


def _clearest(axis: _Axis, epsilon: float, delta: float) -> tuple[float, float, float]:
    """Delta, its error and derivative along the first contour that tells it apart from noise."""
    found = (math.nan, math.nan, math.nan)
    for contour in axis.contours(epsilon):
        found = _line(axis.pairs, contour, False).delta(epsilon)
        value, error, _ = found
        if value > 2 * error or value + error < delta:
            break
    return found


def _around(line: _Line, epsilon: float, delta: float) -> _Ends:
    """The epsilons on both sides of delta that this line is certain of."""
    for _ in range(6):
        value, error, slope = line.delta(epsilon)
        if not value > 0 > slope or error > delta:
            return _Ends(0.0, math.inf)
        following = epsilon - math.log(value / delta) * value / slope
        if not 0.5 * epsilon < following < 2 * epsilon:
            return _Ends(0.0, math.inf)
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
            if end <= 0 or (value - error >= delta if way < 0 else value + error <= delta):
                break
            step *= 2
        else:
            end = 0.0 if way < 0 else math.inf
        ends.append(max(end, 0.0))
    return _Ends(*ends)


def _delta_of(pairs: Pairs, side: int, epsilon: float, *, enough: float | None = None) -> _Ends:
    """Certified delta of one direction; any bound will do that is at most `enough`."""
    if side == _ADD and epsilon >= _largest_added_loss(pairs):
        return _Ends(0.0, 0.0)
    few = _representatives(pairs)
    bound = max(_Axis(few, side, _WANTED).certain_delta(pairs, epsilon), _LEAST_FLOAT)
    if enough is not None and bound <= enough:
        return _Ends(0.0, bound)
    found = _Ends(0.0, bound)
    for contour in _Axis(few, side, bound * _WANTED).contours(epsilon):
        value, error, _ = _line(pairs, contour, True).delta(epsilon)
        if math.isfinite(value + error):
            upper = min(found.upper, max(value + error, _LEAST_FLOAT))
            found = _Ends(min(upper, max(found.lower, value - error)), upper)
        if found.upper - found.lower <= _GOOD * found.lower:
            break
    return found


def _cut(delta: float, pairs: Pairs) -> float:
    """Standard deviations beyond which the outputs' chance is nothing against delta."""
    steps = sum(count for _, count in pairs)
    needed = math.sqrt(2 * (math.log(steps) - math.log(max(delta, 1e-300)) + 35))
    return 4.0 * math.ceil(needed / 4)


def _representatives(pairs: Pairs) -> Pairs:
    """Few pairs much like all of them, by which a contour can be chosen."""
    if len(pairs) <= _FEW:
        return pairs
    groups = np.array_split(np.arange(len(pairs)), _FEW)
    return tuple((pairs[g[len(g) // 2]][0], sum(pairs[i][1] for i in g)) for g in groups)


@dataclass(frozen=True)
class _Contour:
    """a = apex + scale (sin(b) (cosh t - 1) + i cos(b) sinh t).

    Attributes:
        side: 1 for an apex at 1 + c, -1 for one at -c; c = 2^(k / 16).
        k: of c.
        width: scale = c 2^(-width / 2).
        small: whether e^K - 1 is integrated instead of e^K.
        cut: as in `log_mgf`; what is left out is nothing against delta.
    """

    side: int
    k: int
    width: int
    small: bool
    cut: float | None

    @property
    def bend(self) -> float:
        """In radians; a narrow contour bends less, not into where K is large."""
        return 0.25 if self.width < _NARROW else 0.125

    @property
    def shift(self) -> float:
        """How far the strip in which the integrand is looked at reaches on both sides."""
        return 0.9 * self.bend

    def step(self, level: int) -> float:
        """Of t."""
        return 0.2 * self.bend / 2**level

    def orders(self, t: _Real, shift: float) -> tuple[_Complex, _Complex]:
        """(a, da / dt) at t + i shift."""
        c = 2.0 ** (self.k / _OCTAVE)
        scale = c * 2.0 ** (-self.width / 2)
        turned = self.bend - shift + 1j * t
        start = _apex(self.side, self.k) - scale * math.sin(self.bend)
        return start + scale * np.sin(turned), 1j * scale * np.cos(turned)


class _Axis:
    """The integrand on the real axis, where a contour's apex is looked for."""

    def __init__(self, pairs: Pairs, side: int, delta: float) -> None:
        self.pairs = pairs
        self.side = side
        self.cut = _cut(delta, pairs)
        self._may_cut = max(pair.noise for pair, _ in pairs) > _CUT_FROM
        variance = math.fsum(count * _variance(pair) for pair, count in pairs)
        self._start = round(_OCTAVE * math.log2(4 / math.sqrt(variance)))

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
        cumulant = _upper_cumulant(pairs, self.side, k, cut)
        rest = delta - _left_out(pairs, cut)
        return max(0.0, _chernoff_epsilon(cumulant, k, rest)) if rest > 0 else math.inf

    def certain_delta(self, pairs: Pairs, epsilon: float) -> float:
        """Chernoff's bound of delta for all of the pairs, rounding included."""
        bounds = [math.fsum(count * pair.rate for pair, count in pairs)]
        for cut in (None, self.cut):

            def log_delta(k: int, cut: float | None = cut) -> float:
                return _chernoff_log_delta(self.cumulant(k, cut), k, epsilon)

            k = self._lowest(log_delta, self._start)
            log = _chernoff_log_delta(_upper_cumulant(pairs, self.side, k, cut), k, epsilon)
            bounds.append(math.exp(min(0.0, log)) + _left_out(pairs, cut))
        return min(bounds)

    def contours(self, epsilon: float) -> Iterator[_Contour]:
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
    ) -> tuple[_Contour, float] | None:
        """A contour through the lowest point of its integrand's modulus, and the log of that."""
        if small and (self.side != _REMOVE or epsilon == 0):
            return None

        def modulus(k: int) -> float:
            c, cumulant = 2.0 ** (k / _OCTAVE), self.cumulant(k, cut)
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
        contour = _Contour(self.side, k, width, small, cut)
        return contour, modulus(k) + k * _LOG

    def _lowest(self, function: Callable[[int], float], start: int) -> int:
        """Where a function with one valley is least on the grid."""
        k = max(_LEAST_K, min(start, _MOST_K))
        while not math.isfinite(function(k)) and k > _LEAST_K:
            k -= _OCTAVE
        value = function(k)
        for step in (_OCTAVE, _OCTAVE // 2, 2, 1):
            moved = True
            while moved:
                moved = False
                for following in (k - step, k + step):
                    if function(following) < value:
                        k, value, moved = following, function(following), True
                        break
        return k


_LOG = math.log(2) / _OCTAVE


def _chernoff_epsilon(cumulant: float, k: int, delta: float) -> float:
    c = 2.0 ** (k / _OCTAVE)
    return (cumulant - math.log(delta) - _entropy(c)) / c


def _chernoff_log_delta(cumulant: float, k: int, epsilon: float) -> float:
    """E (1 - e^(epsilon - L))_+ <= E e^(c (L - epsilon)) max over x > 0 of (1 - e^-x) e^(-c x)."""
    c = 2.0 ** (k / _OCTAVE)
    return cumulant - c * epsilon - _entropy(c)


def _left_out(pairs: Pairs, cut: float | None) -> float:
    """The chance, times 2 for safety, of any output beyond 1 + cut standard deviations."""
    return 0.0 if cut is None else 2 * sum(count for _, count in pairs) * float(ndtr(-cut))


def _upper_cumulant(pairs: Pairs, side: int, k: int, cut: float | None) -> float:
    """K at an apex with its rounding error; inf where it is beyond reach."""
    total, order = 0.0, np.array([_apex(side, k) + 0j])
    for pair, count in pairs:
        value, error = log_mgf(pair, order, cut=cut, enough=_ENOUGH)
        total += count * float(value[0].real + error[0])
    return total if total == total else math.inf


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
    return rough_log_mgf(pair, _apex(side, k), cut)


def _apex(side: int, k: int) -> float:
    c = 2.0 ** (k / _OCTAVE)
    return 1 + c if side == _REMOVE else -c


@lru_cache(maxsize=1 << 15)
def _cumulant(
    pair: Pair, contour: _Contour, piece: int, level: int, edges: bool, enough: float
) -> tuple[_Complex, _Real]:
    """The cumulant and its error at a piece's nodes, then at those of the strip's edges."""
    orders = contour.orders(_nodes(piece, contour.step(level)), 0.0)[0]
    if edges:
        t = _nodes(piece, _EDGE_STEP)
        sides = [contour.orders(t, shift)[0] for shift in (-contour.shift, contour.shift)]
        orders = np.concatenate([orders, *sides])
    return log_mgf(pair, orders, cut=contour.cut, enough=enough)


@lru_cache(maxsize=1 << 13)
def _far_cumulant(pair: Pair, contour: _Contour, begin: float) -> tuple[_Complex, _Real]:
    orders = contour.orders(begin + _FAR, 0.0)[0]
    return log_mgf(pair, orders, cut=contour.cut, enough=_ROUGH)


def _nodes(piece: int, step: float) -> _Real:
    count = round(_PIECE / step)
    return np.asarray(step * np.arange(piece * count, (piece + 1) * count))


@lru_cache(maxsize=256)
def _line(pairs: Pairs, contour: _Contour, edges: bool) -> _Line:
    return _Line(pairs, contour, edges)


class _Line:
    """A composition's cumulant along a contour, and the deltas that follow from it."""

    def __init__(self, pairs: Pairs, contour: _Contour, edges: bool) -> None:
        self.pairs = pairs
        self.contour = contour
        self.edges = edges
        self._left_out = _left_out(pairs, contour.cut)
        self._sums: dict[tuple[float, int, int], tuple[_Complex, _Real]] = {}

    def delta(self, epsilon: float) -> tuple[float, float, float]:
        """Delta, a bound of its error (of rounding only, without edges), and its derivative."""
        best = (math.nan, math.inf, math.nan)
        for level in range(_FINEST + 1 if self.edges else 1):
            value, slope, rounding, strip = self._sum(epsilon, level)
            error = rounding + strip
            before, best = best[1], min(best, (value, error, slope), key=lambda found: found[1])
            if error <= _WANTED * abs(value) or error > before / 2:
                break
        return best

    def _sum(self, epsilon: float, level: int) -> tuple[float, float, float, float]:
        """Delta, its derivative, and what rounding and the end, and the step, may err by."""
        step = self.contour.step(level)
        value = slope = rounding = strip = tail = largest = 0.0
        edge_open, peaks, edge_tails = [True, True], [0.0, 0.0], [0.0, 0.0]
        for piece in range(math.ceil(_LAST / _PIECE)):
            t = _nodes(piece, step)
            # Where little is left of the integrand, its cumulant matters less.
            weight = tail / abs(value) if piece and value else 1.0
            decades = min(8, max(0, math.floor(-math.log10(weight)))) if weight > 0 else 8
            cumulant, error = self._composed(piece, level, decades)
            terms, moments, noise = self._terms(
                epsilon, t, 0.0, cumulant[: len(t)], error[: len(t)]
            )
            if piece == 0:
                terms[0], moments[0] = terms[0] / 2, moments[0] / 2
            size = np.abs(terms)
            end = _known(size, noise)
            value += step * float(terms[:end].imag.sum())
            slope += step * float(moments[:end].imag.sum())
            rounding += step * float(noise[:end].sum())
            largest = max(largest, float(size[:end].max(initial=0.0)))
            tail = _rest(size[:end], largest, end < len(t), tail)
            if self.edges:
                sides = self._edges(epsilon, piece, cumulant[len(t) :], error[len(t) :])
                for index, (size, known) in enumerate(sides):
                    if edge_open[index]:
                        strip += _EDGE_STEP * float(size[:known].sum())
                        peaks[index] = max(peaks[index], float(size[:known].max(initial=0.0)))
                        edge_tails[index] = _rest(
                            size[:known], peaks[index], known < len(size), edge_tails[index]
                        )
                        edge_open[index] = known == len(size)
            if end < len(t) or tail <= max(_WANTED * abs(value), 0.01 * rounding):
                break
        strip += sum(edge_tails)
        # Noise this great spreads the loss on one scale only, and nothing comes back.
        if self.edges and math.isfinite(tail) and self.contour.cut is None:
            tail += self._far(epsilon, t[min(end, len(t) - 1)])
        strip /= math.expm1(min(700.0, 2 * math.pi * self.contour.shift / step))
        return value, slope, rounding + tail + self._left_out, 2 * strip

    def _edges(
        self, epsilon: float, piece: int, cumulant: _Complex, error: _Real
    ) -> list[tuple[_Real, int]]:
        """The integrand's modulus along both edges of the strip, and how much of it is known."""
        t = _nodes(piece, _EDGE_STEP)
        sides = []
        for index, shift in enumerate((-self.contour.shift, self.contour.shift)):
            part = slice(index * len(t), (index + 1) * len(t))
            terms, _, noise = self._terms(epsilon, t, shift, cumulant[part], error[part])
            sides.append((np.abs(terms), _known(np.abs(terms), noise)))
        return sides

    def _far(self, epsilon: float, start: float) -> float:
        """The integral of the modulus behind the contour's end, where float64 knows it."""
        begin = math.ceil(start / _PIECE) * _PIECE
        key, t = (begin, -1, 0), begin + _FAR
        if key not in self._sums:
            total: _Complex | float = 0.0
            error: _Real | float = 0.0
            with np.errstate(invalid="ignore"):
                for pair, count in self.pairs:
                    value, wrong = _far_cumulant(pair, self.contour, begin)
                    total, error = total + count * value, error + count * wrong
            self._sums[key] = np.asarray(total), np.asarray(error)
        terms, _, noise = self._terms(epsilon, t, 0.0, *self._sums[key])
        size = np.abs(terms)
        return float(np.trapezoid(np.where(size > 2 * noise, size, 0.0), t))

    def _terms(
        self, epsilon: float, t: _Real, shift: float, cumulant: _Complex, error: _Real
    ) -> tuple[_Complex, _Complex, _Real]:
        """The integrand over pi, times -m, and its noise."""
        a, speed = self.contour.orders(t, shift)
        m = a - 1 if self.contour.side == _REMOVE else -a
        with np.errstate(all="ignore"):
            factor = speed / (math.pi * a * (a - 1))
            whole = np.exp(cumulant - epsilon * m) * factor
            noise = np.abs(whole) * (error + _ROUNDING * (4 + 2 * np.abs(epsilon * m)))
            if self.contour.small:
                less = np.exp(-epsilon * m) * factor
                terms = np.where(cumulant.real < 1, np.expm1(cumulant) * less, whole - less)
                noise += _ROUNDING * (4 + 2 * np.abs(epsilon * m)) * np.abs(terms)
                noise -= np.abs(whole) * _ROUNDING * (4 + 2 * np.abs(epsilon * m))
            else:
                terms = whole
            return terms, -m * terms, noise

    def _composed(self, piece: int, level: int, decades: int) -> tuple[_Complex, _Real]:
        """The pairs' cumulants, added up, and the error of the sum."""
        key = (piece, level, decades)
        if key not in self._sums:
            enough = 0.0 if self.contour.small else _ENOUGH * 10.0**decades
            total: _Complex | float = 0.0
            error: _Real | float = 0.0
            with np.errstate(invalid="ignore"):
                for pair, count in self.pairs:
                    value, wrong = _cumulant(pair, self.contour, piece, level, self.edges, enough)
                    total, error = total + count * value, error + count * wrong
            self._sums[key] = np.asarray(total), np.asarray(error)
        return self._sums[key]


def _known(size: _Real, noise: _Real) -> int:
    """How many terms there are before those of which float64 knows nothing."""
    unknown = ~(np.isfinite(size) & np.isfinite(noise) & (size > 2 * noise))
    return int(np.argmax(unknown)) if unknown.any() else len(size)


def _rest(size: _Real, largest: float, ends: bool, before: float) -> float:
    """What is left of an integral behind terms of this size, which fall at least as e^-t.

    Where float64 ends them, they must be seen to fall.
    """
    last = float(size[-2:].max()) if len(size) else before
    return last if not ends or 0 < last < 1e-3 * largest else math.inf
