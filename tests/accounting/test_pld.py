"""The FFT accountant against closed forms, references of other methods and dp_accounting."""

import dataclasses
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.special import ndtr

from dpflash.accounting import gaussian_delta, gaussian_epsilon
from dpflash.accounting import pld as module
from dpflash.accounting.pairs import Pair
from dpflash.accounting.pld import PLDAccountant

noises = st.floats(0.5, 20)
rates = st.floats(-3.5, -0.01).map(lambda x: 10**x)
log_deltas = st.floats(-15, -2)
FULL = os.environ.get("DPFLASH_FULL") == "1"
few = settings(max_examples=12 if FULL else 6, derandomize=True, deadline=None)


def epsilon_of(pairs, delta):
    return PLDAccountant()._epsilon(tuple(pairs), delta)


def delta_of(pairs, epsilon):
    return PLDAccountant()._delta(tuple(pairs), epsilon)


def without_closed_form(pair, count, delta):
    """By the FFT alone: the accountant's own upper end is never above that of the Gaussian."""
    query = module.Query(delta=delta)
    return module._both_directions(((pair, count),), query, math.inf)


def delta_of_one_step(noise, rate, epsilon):
    """Closed forms: something is removed, something is added."""
    apart = math.log1p(math.expm1(epsilon) / rate)
    removed = rate * gaussian_delta(epsilon=apart, noise_multiplier=noise)
    if -math.expm1(-epsilon) >= rate:
        return removed, 0.0
    # The mixture's loss is below -epsilon where x < edge.
    edge = noise**2 * math.log1p(math.expm1(-epsilon) / rate) + 0.5
    shifted = float(ndtr((edge - 1) / noise))
    plain = float(ndtr(edge / noise))
    return removed, plain - math.exp(epsilon) * ((1 - rate) * plain + rate * shifted)


@pytest.mark.parametrize("steps", [1, 30, 1000, 1_000_000])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9, 1e-15])
@pytest.mark.parametrize("mu", [0.3, 2.0, 12.0])
def test_without_subsampling_the_fft_brackets_the_closed_form(steps, delta, mu):
    noise = math.sqrt(steps) / mu
    lower, upper = without_closed_form(Pair(noise, 1.0), steps, delta)
    truth = gaussian_epsilon(delta=delta, noise_multiplier=noise, steps=steps)
    assert lower * (1 - 1e-11) <= truth <= upper * (1 + 1e-11)
    assert upper - lower <= 1e-3 * truth


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (0.5, 0.01), (2.0, 0.7)])
def test_one_poisson_step_has_the_epsilon_of_the_closed_form(noise, rate):
    def excess(epsilon, delta):
        return max(delta_of_one_step(noise, rate, epsilon)) - delta

    for delta in (1e-3, 1e-6, 1e-12):
        truth = brentq(excess, 0, 100, args=(delta,), xtol=1e-13)
        lower, upper = epsilon_of([(Pair(noise, rate), 1)], delta)
        assert lower * (1 - 1e-9) <= truth <= upper * (1 + 1e-9)
        assert upper - lower <= 1e-3 * truth


@given(noises, rates, st.integers(1, 2000), log_deltas, st.booleans())
@few
def test_delta_and_epsilon_agree(noise, rate, steps, log_delta, symmetric):
    pairs, delta = [(Pair(noise, rate, symmetric), steps)], 10**log_delta
    lower, upper = epsilon_of(pairs, delta)
    assert 0 <= lower <= upper < math.inf
    if lower > 0:
        assert delta_of(pairs, lower).upper >= delta * (1 - 1e-9)
    assert delta_of(pairs, upper).lower <= delta * (1 + 1e-9)


@given(noises, rates, noises, rates)
@settings(max_examples=4, derandomize=True, deadline=None)
def test_phases_count_together_in_any_order(noise, rate, other_noise, other_rate):
    phases = [(noise, rate, 40), (other_noise, other_rate, 70), (noise, 1.0, 1)]
    forth, back, part = PLDAccountant(), PLDAccountant(), PLDAccountant()
    forth.history, back.history, part.history = phases, phases[::-1], phases[:2]
    assert forth.get_epsilon(1e-6) == back.get_epsilon(1e-6)
    assert part.get_epsilon(1e-6, interval=True).lower <= forth.get_epsilon(1e-6)


def test_equal_halves_are_the_whole():
    # 1.0 and its neighbour in float64 are two pairs, and as good as one.
    near = math.nextafter(1.0, 2.0)
    halves = epsilon_of([(Pair(1.0, 0.01), 500), (Pair(near, 0.01), 500)], 1e-5)
    assert halves.lower <= 1.82824 + 1e-5
    assert 1.82824 - 1e-5 <= halves.upper <= 1.82824 * 1.001


def test_gaussian_phases_of_different_noise_are_one_gaussian():
    pairs = ((Pair(3.0, 1.0), 7), (Pair(5.0, 1.0), 20))
    truth = gaussian_epsilon(delta=1e-6, noise_multiplier=(7 / 9 + 20 / 25) ** -0.5)
    lower, upper = module._both_directions(pairs, module.Query(delta=1e-6), math.inf)
    assert lower <= truth <= upper <= truth * 1.001


@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.3, 1.5])
def test_a_symmetric_step_has_the_delta_of_the_removal(epsilon):
    removed, _ = delta_of_one_step(1.0, 0.2, epsilon)
    lower, upper = delta_of([(Pair(1.0, 0.2, True), 1)], epsilon)
    assert lower <= removed * (1 + 1e-9)
    assert removed * (1 - 1e-9) <= upper <= removed * 1.001


def test_two_symmetric_steps_equal_brute_force():
    noise, rate, epsilon = 1.0, 0.3, 0.4
    h = 2e-3
    x = 0.5 + h * (np.arange(round(12 / h)) + 0.5)
    plain = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * h
    mixed = plain * (1 + rate * np.expm1(x - 0.5))
    loss = np.log1p(rate * np.expm1(x - 0.5))
    losses = np.concatenate((loss, -loss, [0.0]))
    masses = np.concatenate((mixed, plain, [1 - mixed.sum() - plain.sum()]))
    order = np.argsort(losses)
    losses, masses = losses[order], masses[order]
    p_above = np.append(np.cumsum(masses[::-1])[::-1], 0)
    q_above = np.append(np.cumsum((masses * np.exp(-losses))[::-1])[::-1], 0)
    start = np.searchsorted(losses, epsilon - losses)
    truth = masses @ (p_above[start] - np.exp(epsilon - losses) * q_above[start])
    lower, upper = delta_of([(Pair(noise, rate, True), 2)], epsilon)
    assert lower * (1 - 1e-5) <= truth <= upper * (1 + 1e-5)
    assert upper <= lower * 1.002


def test_without_the_tilt_delta_1e_minus_15_would_drown_in_rounding(monkeypatch):
    pairs = [(Pair(1.0, 0.01), 1000)]
    assert epsilon_of(pairs, 1e-15).upper < 4.86
    untilted = module.plan_of

    def plan(*args):
        found = untilted(*args)  # type: ignore[arg-type]
        return None if found is None else dataclasses.replace(found, theta=1e-3)

    monkeypatch.setattr(module, "plan_of", plan)
    # Still a bound: the rounding is counted, and so nothing is left of the interval.
    lower, upper = epsilon_of(pairs, 1e-15)
    assert lower <= 4.85454 <= upper
    assert upper > 5


@given(
    st.floats(-9, 0).map(lambda x: 10**x),
    st.floats(-2, 4).map(lambda x: 10**x),
    st.integers(1, 10**7),
    st.floats(-18, -0.01),
    st.booleans(),
)
@settings(max_examples=10, derandomize=True, deadline=None)
def test_anywhere_there_is_an_interval_and_a_finite_upper_end(
    rate, noise, steps, log_delta, symmetric
):
    lower, upper = epsilon_of([(Pair(noise, rate, symmetric), steps)], 10**log_delta)
    assert 0 <= lower <= upper < math.inf


@pytest.mark.parametrize("noise", [1e-100, 1e-3, 1e100])
def test_beyond_the_grid_the_closed_bounds_remain(noise):
    lower, upper = epsilon_of([(Pair(noise, 0.5), 10)], 1e-5)
    assert lower == 0 <= upper
    assert not math.isnan(upper)
