"""Random allocation: each sample once in an epoch, independently of the others."""

import numpy as np
from scipy.stats import binom, chi2

from dpflash.sampling import RandomAllocationBatchSampler

KEY = bytes(range(32))
STEPS = 8


def sampler(samples=500, steps=STEPS, key=KEY):
    return RandomAllocationBatchSampler(samples, steps_per_epoch=steps, key=key)


def steps_of(made, epoch):
    """`[num_samples]`: the step of each sample, which has exactly one."""
    found = np.full(made.num_samples, -1)
    for step in range(made.steps_per_epoch):
        drawn = made.draw(epoch * made.steps_per_epoch + step)
        assert drawn == sorted(drawn) and (found[drawn] == -1).all()
        found[drawn] = step
    assert (found >= 0).all()
    return found


def test_each_sample_is_in_exactly_one_draw_of_each_epoch():
    made = sampler()
    epochs = [steps_of(made, epoch) for epoch in range(5)]
    assert len({tuple(of) for of in epochs}) == 5
    # Any order of draws gives the same ones.
    np.testing.assert_array_equal(steps_of(sampler(), 3), epochs[3])


def test_one_sample_more_changes_no_draw_of_the_others():
    few, more = sampler(500), sampler(501)
    for t in range(3 * STEPS):
        assert few.draw(t) == [i for i in more.draw(t) if i < 500]


def test_steps_are_uniform_and_independent_over_epochs_and_secret():
    """Chi-square of pairs of steps of two epochs, at a false-alarm rate of 1e-6."""
    samples = 40_000
    made = sampler(samples)
    first, second = steps_of(made, 0), steps_of(made, 1)
    counts = np.bincount(first * STEPS + second, minlength=STEPS**2)
    expected = samples / STEPS**2
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-6, STEPS**2 - 1)
    other = steps_of(sampler(samples, key=bytes(32)), 0)
    low, high = binom.interval(1 - 1e-6, samples, 1 / STEPS)
    assert low <= (other == first).sum() <= high


def test_sizes_vary_as_those_of_balls_in_bins():
    """Not a shuffle into batches of one size; some draws are empty."""
    sizes = [len(sampler(6, 4, key=bytes([k] * 32)).draw(0)) for k in range(250)]
    empty = sizes.count(0) / len(sizes)
    assert abs(empty - 0.75**6) < 5 * np.sqrt(0.75**6 / len(sizes))
    assert abs(np.var(sizes) - 6 * 3 / 16) < 0.5


def test_passes_that_are_left_go_on_in_their_epoch():
    made, drawn = sampler(), {}
    for passed in (3, 1, 8, 8, 4):
        for _, (t, samples) in zip(range(passed), made.logical_batches(), strict=False):
            drawn[t] = samples
    assert list(drawn) == list(range(3 * STEPS))
    for epoch in range(3):
        own = [drawn[t] for t in range(epoch * STEPS, (epoch + 1) * STEPS)]
        assert sorted(sum(own, [])) == list(range(500))


def test_a_sampler_that_is_set_back_allocates_anew():
    made = sampler()
    list(made.logical_batches())
    before = steps_of(made, 0)
    made.resume(0)
    assert (steps_of(made, 0) != before).any()
