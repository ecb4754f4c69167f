"""Banded noise in integers: what is private, and its covariance."""

import random
from fractions import Fraction

import numpy as np
from scipy.stats import chi2

from dpflash.noise import Banded
from dpflash.noise.reference import correlated, independent

UNIT = 2**8


def _noise(random_source):
    bands = random_source.randint(1, 6)
    falling = sorted((random_source.random() for _ in range(bands - 1)), reverse=True)
    return Banded(bands=bands, coefficients=(1.0, *falling))


def test_a_release_is_a_function_of_what_is_private():
    """Of C s + z, halves of a grid step included, which even rounding would treat by s."""
    source = random.Random(2)
    for _ in range(100):
        integers = _noise(source).integers
        s = [source.randint(-99, 99) for _ in range(20)]
        z = [source.choice([source.randint(-(10**9), 10**9), UNIT // 2]) for _ in range(20)]
        private = [x + y for x, y in zip(independent(s, integers), z, strict=True)]
        released = [x + y for x, y in zip(s, correlated(z, integers), strict=True)]
        assert correlated(private, integers) == released


def test_the_inverse_is_z_up_to_half_a_grid_step():
    source = random.Random(3)
    for _ in range(100):
        integers = _noise(source).integers
        z = [source.randint(-(10**14), 10**14) for _ in range(20)]
        back = independent(correlated(z, integers), integers)
        assert all(-UNIT // 2 < x - y <= UNIT // 2 for x, y in zip(back, z, strict=True))
        y = [source.randint(-(10**9), 10**9) for _ in range(20)]
        assert correlated(independent(y, integers), integers) == y


def test_an_impulse_gives_the_columns_of_the_inverse_exactly():
    noise, steps = Banded(bands=4), 6
    c = [Fraction(k, UNIT) for k in noise.integers] + [Fraction(0)] * steps
    inverse = [Fraction(1)]
    for t in range(1, steps):
        inverse.append(-sum(c[i] * inverse[t - i] for i in range(1, t + 1)))
    one = UNIT ** (steps + 1)  # so large that nothing is rounded
    y = correlated([one] + [0] * (steps - 1), noise.integers)
    assert [Fraction(value * UNIT, one) for value in y] == inverse


def test_the_covariance_of_y_is_that_of_the_inverse():
    """Chi-square of the whitened sample covariance, at a false-alarm rate of 1e-6."""
    steps, draws, std = 8, 20_000, 1e4
    noise = Banded.optimized(bands=3, steps=steps)
    z = np.rint(np.random.default_rng(5).normal(scale=std * UNIT, size=(draws, steps)))
    y = np.array([correlated(row, noise.integers) for row in z.astype(int).tolist()])
    c = sum(x * np.eye(steps, k=-i) for i, x in enumerate(noise.coefficients))
    inverse = np.linalg.inv(c)
    root = np.linalg.inv(np.linalg.cholesky(std**2 * inverse @ inverse.T))
    white = root @ (y.T @ y / draws) @ root.T
    off = white[np.triu_indices(steps, 1)]
    statistic = draws * ((off**2).sum() + ((np.diag(white) - 1) ** 2).sum() / 2)
    assert statistic < chi2.isf(1e-6, steps * (steps + 1) // 2)
