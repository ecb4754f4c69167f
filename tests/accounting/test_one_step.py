"""One step in closed form against the same formulas in many digits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import one_step_deltas

from dpflash.accounting import (
    ContourAccountant,
    FixedSizeGaussian,
    PoissonGaussian,
    gaussian_delta,
    gaussian_epsilon,
)
from dpflash.accounting.gaussian import one_step_delta, one_step_epsilon
from dpflash.accounting.pairs import Pair

noises = st.floats(-1, 2).map(lambda x: 10**x)
rates = st.floats(-9, -0.001).map(lambda x: 10**x)
many = settings(max_examples=100, derandomize=True, deadline=None)


@given(noises, rates, st.floats(-8, 1.5).map(lambda x: 10**x))
@many
def test_delta_of_one_step_equals_its_formula_in_many_digits(noise, rate, epsilon):
    truths = one_step_deltas(noise, rate, epsilon)
    truth = max(truths)
    found = one_step_delta(Pair(noise, rate), epsilon)
    # Where epsilon is far below the rounding of 1 the profile is known to that rounding only.
    assert found == pytest.approx(truth, rel=1e-8, abs=2e-15)
    assert found >= truth * (1 - 1e-8)
    symmetric = one_step_delta(Pair(noise, rate, True), epsilon)
    assert symmetric == pytest.approx(truths[0], rel=1e-8, abs=2e-15 * rate)


@pytest.mark.parametrize(
    ("noise", "rate", "epsilon"),
    [(1.0, 0.5, 0.0), (1.0, 0.9, 0.1), (2.0, 0.9, 0.3), (0.5, 0.99, 1.0), (30.0, 0.999, 0.01)],
)
def test_both_directions_are_those_of_the_densities(noise, rate, epsilon):
    x = np.linspace(-40 * noise, 1 + 40 * noise, 2_000_001)
    plain = np.exp(-((x / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi))
    mixed = plain * (1 + rate * np.expm1((2 * x - 1) / (2 * noise**2)))
    both = [
        np.maximum(0, p - math.exp(epsilon) * q).sum() * (x[1] - x[0])
        for p, q in ((mixed, plain), (plain, mixed))
    ]
    # The grid knows nothing of the kink between two nodes.
    assert both == pytest.approx(one_step_deltas(noise, rate, epsilon), rel=1e-6)
    assert one_step_delta(Pair(noise, rate), epsilon) == pytest.approx(max(both), rel=1e-6)


def test_at_epsilon_0_both_directions_are_the_total_variation():
    for noise, rate in ((1.0, 0.01), (0.3, 1e-6), (40.0, 0.7)):
        truth = rate * gaussian_delta(epsilon=0.0, noise_multiplier=noise)
        assert one_step_delta(Pair(noise, rate), 0.0) == pytest.approx(truth, rel=1e-12, abs=1e-15)


@given(noises, rates, st.floats(-15, -1).map(lambda x: 10**x), st.booleans())
@many
def test_epsilon_of_one_step_is_the_least_that_meets_delta(noise, rate, delta, symmetric):
    pair = Pair(noise, rate, symmetric)
    epsilon = one_step_epsilon(pair, delta)
    assert one_step_delta(pair, epsilon) <= delta
    assert epsilon == 0 or one_step_delta(pair, epsilon * (1 - 1e-9)) > delta * (1 - 1e-9)


@given(noises, rates, st.floats(-15, -1).map(lambda x: 10**x))
@many
def test_the_contour_accountant_takes_one_step_for_what_it_is(noise, rate, delta):
    accountant = ContourAccountant()
    accountant.step(noise_multiplier=noise, sample_rate=rate)
    lower, upper = accountant.get_epsilon(delta, interval=True)
    assert upper == one_step_epsilon(Pair(noise, rate), delta)
    assert lower == pytest.approx(upper, rel=2e-9)
    if upper > 1e-4:
        truth = max(one_step_deltas(noise, rate, upper))
        assert truth <= delta * (1 + 1e-8)
        truth = max(one_step_deltas(noise, rate, lower * (1 - 1e-6)))
        assert truth >= delta * (1 - 1e-8)
    assert accountant.get_delta(1.0) == one_step_delta(Pair(noise, rate), 1.0)


def test_one_fixed_batch_is_the_removal_at_half_the_noise():
    accountant = ContourAccountant(neighboring_relation="replace_one")
    accountant.compose(FixedSizeGaussian(noise_multiplier=2.0, batch_size=20, num_samples=100))
    for epsilon in (0.0, 0.01, 0.2, 1.5, 7.0):
        truth, _ = one_step_deltas(1.0, 0.2, epsilon)
        assert accountant.get_delta(epsilon) == pytest.approx(truth, rel=1e-10)
    replaced = PoissonGaussian(relation="replace_one", noise_multiplier=2.0, sample_rate=0.2)
    other = ContourAccountant(neighboring_relation="replace_one")
    other.compose(replaced)
    assert other.get_epsilon(1e-6) == accountant.get_epsilon(1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 1.0, 600.0, 701.0, 5000.0, 1e6])
def test_one_step_is_in_range_at_any_epsilon(epsilon):
    for noise in (0.02, 1.0, 1e4):
        for rate in (1e-9, 0.3, 1 - 1e-12):
            for symmetric in (False, True):
                assert 0 <= one_step_delta(Pair(noise, rate, symmetric), epsilon) <= 1


@pytest.mark.parametrize(("noise", "rate", "delta"), [(0.02, 1e-9, None), (0.0267, 1e-9, 5e-10)])
def test_one_step_of_tiny_rate_is_in_range_near_epsilon_700(noise, rate, delta):
    accountant = ContourAccountant()
    accountant.step(noise_multiplier=noise, sample_rate=rate)
    if delta is None:
        assert 0 <= accountant.get_delta(699.0) <= rate
    else:
        assert 600 < accountant.get_epsilon(delta) < 800


def test_one_step_at_rate_1_is_the_gaussian():
    for epsilon in (0.0, 0.1, 3.0, 800.0):
        found = one_step_delta(Pair(1.3, 1.0), epsilon)
        assert found == pytest.approx(
            gaussian_delta(epsilon=epsilon, noise_multiplier=1.3), rel=1e-12, abs=1e-15
        )
    found = one_step_epsilon(Pair(1.3, 1.0), 1e-6)
    assert found == pytest.approx(gaussian_epsilon(delta=1e-6, noise_multiplier=1.3), rel=1e-9)
