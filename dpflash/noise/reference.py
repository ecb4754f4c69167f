"""Reference implementation of banded noise in Python integers.

With k_i = 2^8 c_i, the coefficients as integers, the noise of step t in steps of the grid is

    y_t = floor(z_t / 2^8 - sum over 0 < i < b of c_i y_(t-i) + 1/2),

with z_t in units of 2^-8 of the grid. This rounding, halves up, commutes with adding whole
numbers; rounding halves to even does not. So, for the clipped sums s in steps of the grid,

    correlated(2^8 C s + z) == s + correlated(z):

a release s + y is a function of 2^8 C s + z alone, which is one Gaussian mechanism, rounded. If z
were rounded to the grid first, it would not be: the release would depend on the fractions of C s.
"""

from collections.abc import Sequence

# More bits would leave less room for z, which is exact in float64 (`dpflash.kernels.noise`).
FRACTION_BITS = 8
# Standard deviation of z over the bound must be less: of `_validate._MOST_NOISE`, 2^14, the
# fraction takes 8 bits.
MOST_NOISE = 2.0**6


def correlated(z: Sequence[int], integers: Sequence[int]) -> list[int]:
    """The correlated noise y of independent noise z.

    Args:
        z: of one element, for each step, in units of 2^-8 of the grid.
        integers: 2^8 times the coefficients, `Banded.integers`.

    Returns:
        y, in steps of the grid. y_t depends on z_t and on the last b - 1 values of y.
    """
    y: list[int] = []
    for value in z:
        y.append(value - _past(y, integers) + (1 << (FRACTION_BITS - 1)) >> FRACTION_BITS)
    return y


def independent(y: Sequence[int], integers: Sequence[int]) -> list[int]:
    """C y, in units of 2^-8 of the grid: z up to what was rounded, at most half a grid step."""
    return [(value << FRACTION_BITS) + _past(y[:t], integers) for t, value in enumerate(y)]


def _past(y: Sequence[int], integers: Sequence[int]) -> int:
    """The sum over 0 < i < b of k_i y_(t-i), with t the length of y."""
    return sum(k * x for k, x in zip(integers[1:], reversed(y), strict=False))
