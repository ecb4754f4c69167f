"""Reference implementation of banded noise in Python integers.

See `Banded` for C, s, y and z; k_i = 2^8 c_i are the coefficients as integers. In units of the
grid, the noise of step t is

    y_t = floor(z_t / 2^8 - sum over 0 < i < b of c_i y_(t-i) + 1/2),

where z_t is in units of 2^-8 of the grid. This rounding (of halves up) commutes with adding whole
numbers; rounding halves to even does not. So, for the clipped sums s in units of the grid,

    correlated(2^8 C s + z) == s + correlated(z).

Therefore a release s + y is a function of 2^8 C s + z alone, a rounded Gaussian mechanism. If z
were rounded to the grid first, the release would also depend on fractions of C s.
"""

from collections.abc import Sequence

# With more bits, z would be exact in float64 only if it were smaller (`dpflash.kernels.noise`).
FRACTION_BITS = 8
# The standard deviation of z over the bound must be below this: `_validate._MOST_NOISE` / 2^8.
MOST_NOISE = 2.0**6


def correlated(z: Sequence[int], integers: Sequence[int]) -> list[int]:
    """Compute the correlated noise y of independent noise z.

    Args:
        z: the noise of one element at each step, in units of 2^-8 of the grid.
        integers: 2^8 times the coefficients, `Banded.integers`.

    Returns:
        y, in units of the grid. y_t depends on z_t and on the last b - 1 values of y.
    """
    y: list[int] = []
    for value in z:
        y.append(value - _past(y, integers) + (1 << (FRACTION_BITS - 1)) >> FRACTION_BITS)
    return y


def independent(y: Sequence[int], integers: Sequence[int]) -> list[int]:
    """Return C y in units of 2^-8 of the grid: z, rounded by at most half a grid unit."""
    return [(value << FRACTION_BITS) + _past(y[:t], integers) for t, value in enumerate(y)]


def _past(y: Sequence[int], integers: Sequence[int]) -> int:
    """Return the sum over 0 < i < b of k_i y_(t-i), where t is the length of y."""
    return sum(k * x for k, x in zip(integers[1:], reversed(y), strict=False))
