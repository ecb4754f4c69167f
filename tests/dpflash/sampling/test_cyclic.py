"""Cyclic Poisson draws: parts in turn, and each sample independently."""

import numpy as np
import pytest
from scipy.stats import binom

from dpflash.sampling import CyclicPoissonBatchSampler, PoissonBatchSampler

KEY = bytes(range(32))


def sampler(samples=500, rate=0.2, parts=4, key=KEY):
    return CyclicPoissonBatchSampler(samples, rate, parts=parts, steps_per_epoch=20, key=key)


def test_one_sample_more_changes_no_draw_of_the_others():
    few, more = sampler(500), sampler(501)
    for t in range(40):
        assert few.draw(t) == [i for i in more.draw(t) if i < 500]


def test_draws_of_a_sample_are_a_multiple_of_the_parts_apart():
    made = sampler()
    draws = [[] for _ in range(500)]
    for t in range(80):
        for i in made.draw(t):
            draws[i].append(t)
    assert all(set(np.diff(of) % 4) <= {0} for of in draws)
    assert sum(map(len, draws)) > 1000


def test_parts_are_uniform_and_secret_and_draws_have_the_rate():
    """Each count within its binomial bounds, at a false-alarm rate of 1e-6 in all."""
    samples, parts, rate = 20_000, 5, 0.3
    made = sampler(samples, 1.0, parts)
    sizes = [len(made.draw(t)) for t in range(parts)]
    low, high = binom.interval(1 - 1e-7, samples, 1 / parts)
    assert sum(sizes) == samples and all(low <= size <= high for size in sizes)
    other = sampler(samples, 1.0, parts, key=bytes(32))
    assert other.draw(0) != made.draw(0)
    drawn = sampler(samples, rate, parts)
    for t in range(3):
        low, high = binom.interval(1 - 1e-7, sizes[t], rate)
        assert low <= len(drawn.draw(t)) <= high and set(drawn.draw(t)) <= set(made.draw(t))


def test_a_sampler_that_is_set_back_has_other_parts():
    made = sampler(rate=1.0)
    list(made.logical_batches())
    before = made.draw(0)
    made.resume(0)
    assert made.draw(0) != before


def test_one_part_is_poisson_sampling():
    poisson = PoissonBatchSampler(500, 0.2, steps_per_epoch=20, key=KEY)
    assert [sampler(parts=1).draw(t) for t in range(9)] == [poisson.draw(t) for t in range(9)]


def test_parts_is_a_number():
    with pytest.raises(ValueError, match="parts=0: expected an integer >= 1"):
        sampler(parts=0)
