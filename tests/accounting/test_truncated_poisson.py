"""What cutting Poisson batches costs, against enumeration and exact hockey-stick divergences."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from dpflash.accounting import (
    ContourAccountant,
    PLDAccountant,
    RDPAccountant,
    TruncatedPoissonGaussian,
    truncation_probability,
)
from dpflash.accounting.accountant import with_failure


def accountant_of(*history, kind=RDPAccountant):
    accountant = kind()
    accountant.history = list(history)
    return accountant


def interval_of(accountant, delta, mass):
    return with_failure(
        mass,
        delta,
        lambda delta: accountant.get_epsilon(delta, interval=True),
        lambda epsilon: accountant.get_delta(epsilon, interval=True),
    )


def epsilon_of(accountant, delta, mass):
    return interval_of(accountant, delta, mass).upper


def truncated(noise_multiplier, sample_rate, steps, cap, num_samples, kind=RDPAccountant):
    event = TruncatedPoissonGaussian(
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        max_batch_size=cap,
        num_samples=num_samples,
    )
    accountant = kind()
    accountant.compose(event, steps)
    return accountant


@pytest.mark.parametrize(("num_samples", "sample_rate", "cap"), [(50, 0.1, 9), (1000, 0.02, 40)])
def test_truncation_probability_covers_the_data_set_and_its_neighbours(
    num_samples, sample_rate, cap
):
    bound = truncation_probability(num_samples, sample_rate, cap)
    for n in (num_samples - 1, num_samples, num_samples + 1):
        k = np.arange(cap + 1, n + 1)
        assert binom.pmf(k, n, sample_rate).sum() <= bound
    looser = binom.pmf(np.arange(cap, num_samples + 1), num_samples, sample_rate).sum()
    assert bound == pytest.approx(looser, rel=1e-9)


def test_truncation_probability_at_the_edges():
    assert truncation_probability(10, 0.0, 1) == 0.0
    assert truncation_probability(10, 1.0, 10) == 1.0
    assert truncation_probability(10, 0.5, 11) == 0.0


@pytest.mark.parametrize("kind", [ContourAccountant, PLDAccountant, RDPAccountant])
def test_without_truncation_epsilon_is_the_accountants(kind):
    # A cap that no batch can exceed.
    accountant = truncated(1.0, 0.01, 1000, cap=201, num_samples=200, kind=kind)
    assert accountant._failure() == 0
    plain = accountant_of((1.0, 0.01, 1000), kind=kind)
    found, expected = (a.get_epsilon(1e-5, interval=True) for a in (accountant, plain))
    assert found == expected
    assert accountant.get_delta(1.0) == plain.get_delta(1.0)


@pytest.mark.parametrize("kind", [ContourAccountant, PLDAccountant, RDPAccountant])
def test_an_event_pays_for_its_truncation_at_every_step(kind):
    accountant = truncated(1.0, 0.01, 1000, cap=40, num_samples=1000, kind=kind)
    mass = 1000 * truncation_probability(1000, 0.01, 40)
    assert 1e-12 < mass < 1e-8
    plain = accountant_of((1.0, 0.01, 1000), kind=kind)
    found = accountant.get_epsilon(1e-5, interval=True)
    assert found == interval_of(plain, 1e-5, mass)
    assert found.upper > plain.get_epsilon(1e-5)
    cost = (1 + math.e) * mass
    assert accountant.get_delta(1.0) == pytest.approx(plain.get_delta(1.0) + cost, rel=1e-12)
    if kind is not RDPAccountant:
        assert found.lower <= plain.get_epsilon(1e-5, interval=True).lower
        ours, theirs = (a.get_delta(1.0, interval=True).lower for a in (accountant, plain))
        assert ours == pytest.approx(theirs - cost, rel=1e-12)


def test_failures_of_unlike_events_add_up():
    accountant = truncated(1.0, 0.01, 1000, cap=40, num_samples=1000)
    other = TruncatedPoissonGaussian(
        noise_multiplier=1.0, sample_rate=0.02, max_batch_size=50, num_samples=1000
    )
    accountant.compose(other, 10)
    expected = 1000 * truncation_probability(1000, 0.01, 40)
    expected += 10 * truncation_probability(1000, 0.02, 50)
    assert accountant._failure() == pytest.approx(expected, rel=1e-12)


def test_both_ends_hold_whatever_the_truncation_does():
    # Between the ends lie the epsilons of all runs that differ by at most the mass.
    accountant = accountant_of((1.0, 0.01, 1000), kind=ContourAccountant)
    for mass in (1e-9, 1e-8, 1e-7):
        lower, upper = interval_of(accountant, 1e-5, mass)
        assert 0 < lower < accountant.get_epsilon(1e-5) < upper
        below = accountant.get_delta(lower * (1 - 1e-6), interval=True).lower
        assert below - (1 + math.exp(lower)) * mass > 1e-5
        assert accountant.get_delta(upper) + (1 + math.exp(upper)) * mass <= 1e-5


@given(
    st.floats(0.6, 5),
    st.floats(1e-4, 0.1),
    st.integers(1, 2000),
    st.floats(1e-9, 1e-3),
    st.floats(1e-8, 2),
)
@settings(max_examples=40)
def test_epsilon_meets_delta_with_the_truncation_and_is_the_least(
    noise_multiplier, sample_rate, steps, delta, mass_over_delta
):
    accountant = accountant_of((noise_multiplier, sample_rate, steps))
    mass = mass_over_delta * delta
    epsilon = epsilon_of(accountant, delta, mass)

    def total(epsilon):
        return accountant.get_delta(epsilon) + (1 + math.exp(epsilon)) * mass

    assert epsilon >= accountant.get_epsilon(delta)
    if epsilon < math.inf:
        assert total(epsilon) <= delta
    end = min(epsilon * (1 - 1e-3), 60.0) - 1e-6
    if end > 0:
        assert all(total(x) > delta for x in np.linspace(0, end, 300))


def test_no_noise_gives_no_epsilon():
    assert epsilon_of(accountant_of((0.0, 0.5, 1)), 1e-5, 1e-9) == math.inf
    accountant = truncated(0.0, 0.5, 1, cap=40, num_samples=50)
    assert accountant.get_epsilon(1e-5) == math.inf
    assert accountant.get_delta(1.0) == 1.0


def test_an_empty_history_still_pays_for_the_truncation():
    assert epsilon_of(accountant_of(), 1e-5, 1e-6) < 1e-8
    assert epsilon_of(accountant_of(), 1e-5, 6e-6) == math.inf
    # Infinite noise: the outputs reveal only which samples were cut.
    accountant = truncated(math.inf, 0.01, 1, cap=30, num_samples=1000)
    assert accountant._pairs() == ()
    failure = accountant._failure()
    assert accountant.get_epsilon(3 * failure) < 1e-8
    assert accountant.get_epsilon(1.9 * failure) == math.inf
    assert accountant.get_delta(0.0) == 2 * failure
    assert accountant.get_advantage() == 2 * failure


def test_the_bound_holds_for_an_adversarial_mechanism_computed_exactly():
    # One step on n samples of value -1 and one of +1 or none; a batch keeps its first `cap`
    # members, so that the extra sample, which comes first, also pushes another one out.
    n, sample_rate, cap, noise_multiplier = 9, 0.2, 4, 1.0
    outputs = np.linspace(-25, 15, 8001)

    def density(values):
        weights: dict[float, float] = {}
        for chosen in itertools.product((0, 1), repeat=len(values)):
            batch = [value for value, is_in in zip(values, chosen, strict=True) if is_in][:cap]
            size = sum(chosen)
            chance = sample_rate**size * (1 - sample_rate) ** (len(values) - size)
            weights[sum(batch)] = weights.get(sum(batch), 0.0) + chance
        normal = [
            w * np.exp(-((outputs - mean) ** 2) / (2 * noise_multiplier**2))
            for mean, w in weights.items()
        ]
        return np.sum(normal, axis=0) / math.sqrt(2 * math.pi * noise_multiplier**2)

    with_extra, without = density([1.0] + [-1.0] * n), density([-1.0] * n)
    mass = truncation_probability(n, sample_rate, cap)
    accountant = truncated(
        noise_multiplier, sample_rate, 1, cap=cap, num_samples=n, kind=ContourAccountant
    )
    assert accountant._failure() == mass
    spacing = outputs[1] - outputs[0]
    for delta in (0.3, 0.4, 0.5):
        epsilon = accountant.get_epsilon(delta)
        assert epsilon < math.inf
        for p, q in ((with_extra, without), (without, with_extra)):
            exact = np.maximum(0, p - math.exp(epsilon) * q).sum() * spacing
            assert exact <= delta


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 0.1, 5), "num_samples"), ((10, 1.5, 5), "sample_rate"), ((10, 0.1, 2.5), "cap")],
)
def test_a_bad_argument_is_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        truncation_probability(*arguments)
