"""Expected error of banded noise in the iterates, and the coefficients with the least error."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.float64]

# If a divisor has at least this many terms, Fourier transforms are faster than a recursion.
_LONG = 256


def workload(steps: int, momentum: float, weight_decay: float) -> _Array:
    """Return the effect of a gradient on the parameters after each step, at learning rate 1.

    The result `[T]` has the coefficients of 1 / ((1 - momentum x) (1 - (1 - weight_decay) x)).
    """
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    summed = divided(impulse, np.array([1.0, weight_decay - 1.0]))
    return divided(summed, np.array([1.0, -momentum]))


def squared_errors(coefficients: _Array, responses: _Array) -> _Array:
    """Return the variance of the iterates at each step, `[T]`, for noise z of variance 1."""
    return np.cumsum(divided(responses, coefficients) ** 2)


def square_root(bands: int) -> _Array:
    """Return binom(2 i, i) / 4^i, `[b]`: the coefficients of C with C C = prefix sums."""
    i = np.arange(1, bands)
    return np.cumprod(np.concatenate([[1.0], (2 * i - 1) / (2 * i)]))


@functools.lru_cache(maxsize=256)
def optimized(bands: int, steps: int, momentum: float, weight_decay: float) -> tuple[float, ...]:
    """Find coefficients with c_0 = 1 that minimize (mean squared error) * (norm of c)^2."""
    from scipy.optimize import minimize
    from scipy.signal import correlate

    responses = workload(steps, momentum, weight_decay)
    weights = np.arange(steps, 0, -1) / steps  # fraction of B's rows that contain each B_i

    def loss(free: _Array) -> tuple[float, _Array]:
        """Return log(|c|^2 sum of w_i B_i^2) and its gradient; B = A / C as power series."""
        c = np.concatenate([[1.0], free])
        b = divided(responses, c)
        norm, error = c @ c, (weights * b) @ b
        adjoint = divided((weights * b)[::-1], c)[::-1]
        of_error = correlate(adjoint, b)[steps : steps + bands - 1]
        return float(np.log(norm * error)), 2 * (free / norm - of_error / error)

    if bands == 1:
        return (1.0,)
    found = minimize(
        loss,
        square_root(bands)[1:],
        jac=True,
        method="L-BFGS-B",
        bounds=[(0.0, 1.0)] * (bands - 1),
        options={"maxiter": 1000, "ftol": 1e-14, "gtol": 1e-8},
    )
    # `Banded` requires coefficients that do not increase, which held for every optimum tried.
    return (1.0, *np.minimum.accumulate(found.x).tolist())


def divided(series: _Array, divisor: _Array) -> _Array:
    """Divide two power series; return as many coefficients as `series` has."""
    from scipy.signal import fftconvolve, lfilter

    if len(divisor) < _LONG:
        return np.asarray(lfilter([1.0], divisor, series))
    count, inverse = len(series), 1.0 / divisor[:1]
    while (have := len(inverse)) < count:  # Newton's iteration doubles the correct coefficients
        size = min(2 * have, count)
        product = fftconvolve(divisor[:size], inverse)[:size]
        inverse = np.pad(2 * inverse, (0, size - have)) - fftconvolve(inverse, product)[:size]
    return np.asarray(fftconvolve(series, inverse)[:count])
