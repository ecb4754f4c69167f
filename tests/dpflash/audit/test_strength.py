"""The bound of a subsampled Gaussian's strength holds, and is tight."""

import math

import numpy as np
import pytest

from dpflash.audit.strength import Strength


def limits(rate, noise, contribution, *, seed, canaries=500, steps=20):
    """The limit of noise over contribution, for products of a mechanism that differs."""
    rng = np.random.default_rng(seed)
    found = Strength(1.0, rate)
    for _ in range(steps):
        included = rng.random(canaries) < 0.5
        drawn = included & (rng.random(canaries) < rate)
        found.note(contribution * drawn + noise * rng.standard_normal(canaries), included)
    return found.noise_multiplier(0.95)


@pytest.mark.parametrize("rate", [1.0, 0.25])
@pytest.mark.parametrize(
    ("noise", "contribution"),
    [(1.0, 1.0), (0.5, 1.0), (1.0, 2.5), (2.0, 1.0)],
    ids=["honest", "less noise", "unclipped", "more noise"],
)
def test_the_limit_is_above_the_truth_and_close_to_it(rate, noise, contribution):
    """At confidence 0.95, 6 of 40 limits or more are wrong with probability 0.014."""
    truth = noise / contribution
    found = [limits(rate, noise, contribution, seed=seed) for seed in range(40)]
    assert sum(limit < truth for limit in found) <= 5
    # The relative standard error of the contribution, of 5,000 products, and of the noise.
    spread = (noise**2 + rate * (1 - rate) * contribution**2) ** 0.5
    error = math.hypot(spread / (contribution * rate * 5000**0.5), 1 / 20_000**0.5)
    assert np.median(found) < truth / (1 - 2.2 * error)


@pytest.mark.parametrize("contribution", [0.0, -1.0])
def test_where_no_canary_shows_the_noise_is_not_bounded(contribution):
    found = [limits(0.5, 1.0, contribution, seed=seed) for seed in range(20)]
    assert sum(map(math.isinf, found)) >= 16


def test_further_runs_are_made_where_one_is_too_short():
    assert Strength(1.0, 1.0).further_runs(10, 1) == 0
    assert Strength(0.7, 0.125).further_runs(4000, 256) == 0
    assert Strength(7.6, 0.125).further_runs(4000, 256) == 2
