"""The closed form against 50 digits and against dp_accounting."""

import math

import dp_accounting
import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpflash.accounting import gaussian_delta, gaussian_epsilon


def delta_by_mpmath(epsilon, noise_multiplier, steps):
    with mpmath.workdps(60):
        mu = mpmath.sqrt(steps) / mpmath.mpf(noise_multiplier)
        e = mpmath.mpf(epsilon)
        return float(mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu))


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("noise_multiplier", [0.1, 1.0, 10.0, 200.0])
@pytest.mark.parametrize("steps", [1, 100])
def test_delta_equals_its_formula_in_many_digits(epsilon, noise_multiplier, steps):
    ours = gaussian_delta(epsilon=epsilon, noise_multiplier=noise_multiplier, steps=steps)
    truth = delta_by_mpmath(epsilon, noise_multiplier, steps)
    assert ours == pytest.approx(truth, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize("noise_multiplier", [0.2, 1.0, 10.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
def test_epsilon_equals_dp_accounting(noise_multiplier, delta):
    theirs = dp_accounting.get_epsilon_gaussian(noise_multiplier, delta)
    ours = gaussian_epsilon(delta=delta, noise_multiplier=noise_multiplier)
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@given(st.floats(0.05, 100), st.integers(1, 10_000), st.floats(1e-15, 0.5))
@settings(max_examples=60)
def test_epsilon_is_the_least_that_meets_delta(noise_multiplier, steps, delta):
    epsilon = gaussian_epsilon(delta=delta, noise_multiplier=noise_multiplier, steps=steps)

    def delta_at(epsilon):
        return gaussian_delta(epsilon=epsilon, noise_multiplier=noise_multiplier, steps=steps)

    assert delta_at(epsilon) <= delta
    assert epsilon == 0 or delta_at(epsilon * (1 - 1e-9)) > delta * (1 - 1e-9)


def test_the_edges():
    assert gaussian_delta(epsilon=1.0, noise_multiplier=0.0) == 1.0
    assert gaussian_delta(epsilon=1.0, noise_multiplier=0.0, steps=0) == 0.0
    assert gaussian_delta(epsilon=0.0, noise_multiplier=math.inf) == 0.0
    assert gaussian_epsilon(delta=1e-5, noise_multiplier=0.0) == math.inf
    assert gaussian_epsilon(delta=1e-5, noise_multiplier=0.0, steps=0) == 0.0
    assert gaussian_epsilon(delta=0.5, noise_multiplier=10.0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"delta": 0.0, "noise_multiplier": 1.0}, "delta"),
        ({"delta": 0.1, "noise_multiplier": -1.0}, "noise_multiplier"),
        ({"delta": 0.1, "noise_multiplier": 1.0, "steps": 1.5}, "steps"),
        ({"delta": 0.1, "noise_multiplier": 1.0, "steps": -1}, "steps"),
    ],
)
def test_a_bad_argument_is_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        gaussian_epsilon(**arguments)
