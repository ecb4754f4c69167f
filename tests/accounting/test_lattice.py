"""Small noise and tiny rates: a step's loss has almost two values, and its transform no end."""

import math

import pytest
from scipy.stats import binom, norm

from dpflash.accounting import Interval, create_accountant
from dpflash.accounting import contour as contour_module
from dpflash.accounting.contour import _Bounds, _intersection
from dpflash.accounting.contour_integral import RealAxis, integral_along
from dpflash.accounting.pairs import Pair

# (noise, rate, steps, delta) at which a contour once said 288.88 instead of 1032.59, and its like.
SETTINGS = [
    (0.05928440525096655, 2.982704732044792e-05, 6239, 2.8614548291847564e-11),
    (0.03082416535049256, 2.515905284203464e-07, 92023, 1e-6),
    (0.03, 1e-5, 1000, 1e-6),
    (0.113, 1e-4, 986, 1e-9),
    (0.2, 1e-5, 10_000, 1e-7),
]


def delta_by_counting(noise, rate, steps, epsilon):
    """Where drawn and undrawn steps tell apart for certain, the loss is that of j Gaussians.

    j is binomial; a drawn step's loss is N(1 / (2 s^2) + log q, 1 / s^2), an undrawn one's
    log(1 - q).
    """
    total = 0.0
    for j in range(1, 60):
        weight = binom.pmf(j, steps, rate)
        mean = j * (1 / (2 * noise**2) + math.log(rate)) + (steps - j) * math.log1p(-rate)
        spread = math.sqrt(j) / noise
        # E (1 - e^(epsilon - L))_+ of a Gaussian loss
        above = norm.sf((epsilon - mean) / spread)
        less = norm.logsf((epsilon - mean + spread**2) / spread)
        total += weight * (above - math.exp(epsilon - mean + spread**2 / 2 + less))
    return total


@pytest.mark.parametrize(("epsilon", "noise", "rate", "steps"), [
    (777.8, 0.03, 1e-5, 1000),
    (391.7982918082908, 0.03082416535049256, 2.515905284203464e-07, 92023),
    (288.877668, 0.05928440525096655, 2.982704732044792e-05, 6239),
])  # fmt: skip
def test_delta_of_almost_two_losses_is_that_of_counting_the_drawn(epsilon, noise, rate, steps):
    truth = delta_by_counting(noise, rate, steps, epsilon)
    accountant = create_accountant("contour")
    accountant.history = [(noise, rate, steps)]
    found = accountant.get_delta(epsilon, interval=True)
    assert found.lower <= truth * (1 + 1e-6)
    assert found.upper >= truth * (1 - 1e-6)
    assert found.upper <= truth * 1.02


@pytest.mark.parametrize(("noise", "rate", "steps", "delta"), SETTINGS)
def test_epsilon_of_almost_two_losses_agrees_with_pld(noise, rate, steps, delta):
    intervals = []
    for name in ("contour", "pld"):
        accountant = create_accountant(name)
        accountant.history = [(noise, rate, steps)]
        intervals.append(accountant.get_epsilon(delta, interval=True))
    contour, pld = intervals
    assert max(contour.lower, pld.lower) <= min(contour.upper, pld.upper)
    assert contour.upper <= pld.upper * 1.001
    assert delta_by_counting(noise, rate, steps, contour.upper) <= delta * (1 + 1e-6)


def test_contradicting_intervals_leave_the_safe_ends():
    assert _intersection(_Bounds(1.0, 2.0), Interval(3.0, 4.0)) == (1.0, 4.0)
    assert _intersection(_Bounds(1.0, 3.5), Interval(3.0, 4.0)) == (3.0, 3.5)
    assert _intersection(_Bounds(1.0, 2.0), Interval(None, math.inf)) == (1.0, 2.0)


def test_contours_that_contradict_each_other_are_both_dropped(monkeypatch):
    answers = iter([_Bounds(1.0, 1.1), _Bounds(2.0, 2.1)] * 10)
    monkeypatch.setattr(contour_module, "_epsilon_bounds", lambda *_: next(answers))
    monkeypatch.setattr(contour_module, "_GOOD", 0.0)
    found = contour_module._epsilon_of(((Pair(1.0, 0.1), 100),), 1, 1e-5)
    assert found.lower == 0.0
    assert found.upper > 1.1


def test_a_step_too_coarse_for_the_integrand_is_noticed():

    pairs = ((Pair(0.05928440525096655, 2.982704732044792e-05), 6239),)
    epsilon = 288.877668190919
    truth = delta_by_counting(0.05928440525096655, 2.982704732044792e-05, 6239, epsilon)
    for contour in RealAxis(pairs, 1, 1e-11).contours(epsilon):
        value, error, _ = integral_along(pairs, contour, True).delta(epsilon)
        assert not abs(value - truth) > error
