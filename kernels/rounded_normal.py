"""Normal numbers rounded exactly to integers: a function of uniform words, equal on any machine.

Z = round(scale * N) for a standard normal N. A 64-bit word gives a sign and bounds of N's tail
probability that differ by 2^-64, so N lies in an interval. In fp64 the interval's ends, widened by
a proven bound on the arithmetic's error, nearly always round to the same integer. If not, the ends
are compared with the rounding border in as many bits as needed. If the border is in the interval,
further words decide. Z is exactly a rounded Gaussian; no bit depends on a math library.

Source of the fp64 quantile: Wichura, Algorithm AS 241: The Percentage Points of the Normal
Distribution (1988), PPND16.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# (Numerator, denominator) of AS 241, constants first; TAIL is beyond CENTER, and FAR beyond TAIL.
CENTER = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
TAIL = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
FAR = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
# CENTER is used for q = 1/2 - p up to SPLIT, at SPLIT_SQUARE - q^2.
SPLIT = 0.425
SPLIT_SQUARE = 0.180625
# FAR is used for r = sqrt(-log(p)) above FAR_FROM, at r - FAR_FROM; TAIL at r - TAIL_ORIGIN.
FAR_FROM = 5.0
TAIL_ORIGIN = 1.6

# Bounds the relative error of the fp64 quantile, which is at most 50 in units of 2^-53. All
# coefficients and arguments are positive, so no step cancels. Two polynomials of degree 7 with
# rounded coefficients add 15 each, a quotient and a product 2, AS 241 itself 2. In CENTER an error
# of 2 in q moves the result by 2.1 times as much; q^2 and the difference are off by 0.5
# absolutely, and |log(CENTER)'| <= 3.1. In TAIL an error of 8 in the logarithm makes the root off
# by 5, which moves the result by 1.91 times as much; the difference adds at most 4.2 times 1.2.
# FAR: 1.2 and 0.3.
RELATIVE_ERROR = 2.0**-47

_MAGNITUDE = (1 << 63) - 1
# fp64 sums of integers are exact if they are below this number.
EXACT_INTEGERS = 2.0**53


def rounded_normals(words: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute round(scale * N) from a word per element; report elements that fp64 cannot decide.

    Args:
        words: [N], int64, uniform over all 2^64 values.
        scale: standard deviation in units of the grid, above 0 and below 2^45.

    Returns:
        (integers [N], fp64; undecided [N], bool): an undecided element's integer is a guess, which
        `settle` replaces.
    """
    magnitudes = words & _MAGNITUDE
    # Subtract integers: near the median, 1/2 - p in fp64 would lose its precision.
    q = (_MAGNITUDE - magnitudes).double() * 2.0**-64
    magnitudes = magnitudes.double()
    y = tail_quantiles(magnitudes * 2.0**-64, q).mul_(scale)
    # The ends of N's interval differ by 2^-64 / density <= 2 / (magnitude of the word).
    margins = y * RELATIVE_ERROR + 2 * scale / magnitudes
    whole = y.floor()
    undecided = ~((y - whole - 0.5).abs() > margins)
    rounded = torch.where(y - whole > 0.5, whole + 1, whole)
    # Return no negative zeros: added to a zero, a negative zero would reveal that zero's sign.
    return torch.where(words < 0, 0.0 - rounded, rounded), undecided


def tail_quantiles(p: Tensor, q: Tensor) -> Tensor:
    """Return the x >= 0 with P(N > x) = p in fp64, to `RELATIVE_ERROR`.

    Args:
        p: fp64, rounded, from 0 (x is then infinite) to 1/2.
        q: 1/2 - p, rounded separately, so that its relative error is as small as p's.
    """
    center = q * _ratio(CENTER, SPLIT_SQUARE - q * q)
    r = p.log().neg_().clamp_(min=0).sqrt_()
    tail = _ratio(TAIL, r - TAIL_ORIGIN)
    far = _ratio(FAR, r - FAR_FROM)
    return torch.where(q <= SPLIT, center, torch.where(r <= FAR_FROM, tail, far))


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], x: Tensor) -> Tensor:
    above, below = (torch.full_like(x, part[-1]) for part in coefficients)
    for a, b in zip(coefficients[0][-2::-1], coefficients[1][-2::-1], strict=True):
        above, below = above.mul_(x).add_(a), below.mul_(x).add_(b)
    return above.div_(below)


def settle(word: int, scale: float, further: Callable[[int], int]) -> int:
    """Compute round(scale * N) of one word exactly, with further words if they are needed.

    Args:
        word: 64 bits, as an integer of either sign.
        scale: as for `rounded_normals`.
        further: a function that maps 0, 1, ... to independent uniform 64-bit words, integers >= 0.
    """
    sign, p, bits = -1 if word >> 63 & 1 else 1, word & _MAGNITUDE, 64
    number = 0
    while True:
        # N lies between the quantiles of (p + 1) / 2^bits and p / 2^bits.
        least = _borders_below(p + 1, bits, scale, _guess(p + 1, bits, scale))
        if p and not _is_below(least, p, bits, scale):
            return sign * least
        p = p << 64 | further(number)
        bits += 64
        number += 1


def _guess(p: int, bits: int, scale: float) -> int:
    half = 1 << bits - 1
    ends = torch.tensor([[p / (2 * half)], [(half - p) / (2 * half)]], dtype=torch.float64)
    return math.floor(scale * float(tail_quantiles(*ends)))


def _borders_below(p: int, bits: int, scale: float, guess: int) -> int:
    """Count the k >= 0 with (k + 1/2) / scale < x, for the x with P(N > x) = p / 2^bits."""
    # The result is the least k with (k + 1/2) / scale >= x, mostly the guess or a neighbour.
    low, high, stride = guess, guess, 1
    if _is_below(guess, p, bits, scale):
        low = guess + 1
        while _is_below(high := low + stride - 1, p, bits, scale):
            low, stride = high + 1, 2 * stride
    else:
        while low > 0 and not _is_below(low - 1, p, bits, scale):
            low, high, stride = max(0, low - stride), low - 1, 2 * stride
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _is_below(middle, p, bits, scale) else (low, middle)
    return low


def _is_below(k: int, p: int, bits: int, scale: float) -> bool:
    """Return whether (k + 1/2) / scale < x for the x with P(N > x) = p / 2^bits, 0 < p."""
    import mpmath

    precision = bits + 64
    while True:
        with mpmath.workprec(precision):
            border = (mpmath.mpf(k) + 0.5) / mpmath.mpf(scale)
            tail = mpmath.erfc(border / mpmath.sqrt(2)) / 2
            difference = tail - mpmath.ldexp(mpmath.mpf(p), -bits)
            if abs(difference) > mpmath.ldexp(tail, 16 - precision):
                return bool(difference > 0)
        precision *= 2
