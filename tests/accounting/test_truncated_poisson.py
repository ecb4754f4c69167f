"""What cutting Poisson batches costs, against enumeration and exact hockey-stick divergences."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from dpflash.accounting import (
    RDPAccountant,
    truncated_poisson_epsilon,
    truncation_probability,
)


def accountant_of(*history: tuple[float, float, int]) -> RDPAccountant:
    accountant = RDPAccountant()
    accountant.history = list(history)
    return accountant


@pytest.mark.parametrize(("num_samples", "sample_rate", "cap"), [(50, 0.1, 9), (1000, 0.02, 40)])
def test_truncation_probability_covers_the_data_set_and_its_neighbours(
    num_samples: int, sample_rate: float, cap: int
) -> None:
    bound = truncation_probability(num_samples, sample_rate, cap)
    for n in (num_samples - 1, num_samples, num_samples + 1):
        k = np.arange(cap + 1, n + 1)
        assert binom.pmf(k, n, sample_rate).sum() <= bound
    looser = binom.pmf(np.arange(cap, num_samples + 1), num_samples, sample_rate).sum()
    assert bound == pytest.approx(looser, rel=1e-9)


def test_truncation_probability_at_the_edges() -> None:
    assert truncation_probability(10, 0.0, 1) == 0.0
    assert truncation_probability(10, 1.0, 10) == 1.0
    assert truncation_probability(10, 0.5, 11) == 0.0


def test_without_truncation_epsilon_is_the_accountants() -> None:
    accountant = accountant_of((1.0, 0.01, 1000))
    epsilon = truncated_poisson_epsilon(accountant, 1e-5, truncation_mass=0.0)
    assert epsilon == accountant.get_epsilon(1e-5)


@given(
    st.floats(0.6, 5),
    st.floats(1e-4, 0.1),
    st.integers(1, 2000),
    st.floats(1e-9, 1e-3),
    st.floats(1e-8, 2),
)
@settings(max_examples=40)
def test_epsilon_meets_delta_with_the_truncation_and_is_the_least(
    noise_multiplier: float, sample_rate: float, steps: int, delta: float, mass_over_delta: float
) -> None:
    accountant = accountant_of((noise_multiplier, sample_rate, steps))
    mass = mass_over_delta * delta
    epsilon = truncated_poisson_epsilon(accountant, delta, truncation_mass=mass)

    def total(epsilon: float) -> float:
        return accountant.get_delta(epsilon) + (1 + math.exp(epsilon)) * mass

    assert epsilon >= accountant.get_epsilon(delta)
    if epsilon < math.inf:
        assert total(epsilon) <= delta
    end = min(epsilon * (1 - 1e-3), 60.0) - 1e-6
    if end > 0:
        assert all(total(x) > delta for x in np.linspace(0, end, 300))


def test_epsilon_rises_with_the_truncation_until_nothing_is_left() -> None:
    accountant = accountant_of((1.0, 0.01, 1000))
    masses = [0.0, 1e-12, 1e-9, 1e-8, 1e-7, 2e-7, 1e-5]
    epsilons = [
        truncated_poisson_epsilon(accountant, 1e-5, truncation_mass=mass) for mass in masses
    ]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < epsilons[3] < epsilons[5] < math.inf
    assert epsilons[-1] == math.inf


def test_no_noise_gives_no_epsilon() -> None:
    accountant = accountant_of((0.0, 0.5, 1))
    assert truncated_poisson_epsilon(accountant, 1e-5, truncation_mass=1e-9) == math.inf


def test_an_empty_history_still_pays_for_the_truncation() -> None:
    assert truncated_poisson_epsilon(accountant_of(), 1e-5, truncation_mass=1e-6) < 1e-8
    assert truncated_poisson_epsilon(accountant_of(), 1e-5, truncation_mass=6e-6) == math.inf


def test_the_bound_holds_for_an_adversarial_mechanism_computed_exactly() -> None:
    # One step on n samples of value -1 and one of +1 or none; a batch keeps its first `cap`
    # members, so that the extra sample, which comes first, also pushes another one out.
    n, sample_rate, cap, noise_multiplier = 9, 0.2, 4, 1.0
    outputs = np.linspace(-25, 15, 8001)

    def density(values: list[float]) -> np.ndarray:
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
    accountant = accountant_of((noise_multiplier, sample_rate, 1))
    spacing = outputs[1] - outputs[0]
    for delta in (0.3, 0.4, 0.5):
        epsilon = truncated_poisson_epsilon(accountant, delta, truncation_mass=mass)
        assert epsilon < math.inf
        for p, q in ((with_extra, without), (without, with_extra)):
            exact = np.maximum(0, p - math.exp(epsilon) * q).sum() * spacing
            assert exact <= delta


@pytest.mark.parametrize("mass", [-1e-9, math.nan, math.inf])
def test_a_bad_mass_is_refused(mass: float) -> None:
    with pytest.raises(ValueError, match="^truncation_mass="):
        truncated_poisson_epsilon(accountant_of(), 1e-5, truncation_mass=mass)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 0.1, 5), "num_samples"), ((10, 1.5, 5), "sample_rate"), ((10, 0.1, 2.5), "cap")],
)
def test_a_bad_argument_is_refused_by_name(arguments: tuple, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}="):
        truncation_probability(*arguments)
