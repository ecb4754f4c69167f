"""Calibration: never below the target in privacy, hardly above it in noise."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpflash.accounting import (
    RDPAccountant,
    create_accountant,
    epochs_to_steps,
    get_noise_multiplier,
)


def epsilon_of(noise_multiplier: float, sample_rate: float, steps: int, delta: float) -> float:
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("target_epsilon", "target_delta", "sample_rate", "steps"),
    [
        (8.0, 1e-5, 0.01, 1000),
        (1.0, 1e-5, 0.01, 1000),
        (0.1, 1e-5, 0.01, 1000),
        (0.005, 1e-5, 0.01, 1000),
        (0.005, 1e-9, 1.0, 100),
        (100.0, 1e-5, 0.1, 1000),
        (100.0, 1e-5, 1.0, 1),
        (3.0, 1e-9, 1e-4, 100_000),
    ],
)
def test_the_noise_meets_the_target_and_a_little_less_would_not(
    target_epsilon: float, target_delta: float, sample_rate: float, steps: int
) -> None:
    noise_multiplier = get_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
    )
    assert epsilon_of(noise_multiplier, sample_rate, steps, target_delta) <= target_epsilon
    less = noise_multiplier * (1 - 1.01e-4)
    assert epsilon_of(less, sample_rate, steps, target_delta) > target_epsilon


@given(st.floats(0.005, 100), st.floats(1e-10, 1e-2), st.floats(1e-4, 1), st.integers(1, 100_000))
@settings(max_examples=20)
def test_epsilon_at_the_returned_noise_never_exceeds_the_target(
    target_epsilon: float, target_delta: float, sample_rate: float, steps: int
) -> None:
    noise_multiplier = get_noise_multiplier(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        sample_rate=sample_rate,
        steps=steps,
    )
    assert epsilon_of(noise_multiplier, sample_rate, steps, target_delta) <= target_epsilon


def test_a_target_that_any_noise_meets_gets_the_least_noise() -> None:
    noise_multiplier = get_noise_multiplier(
        target_epsilon=1e6, target_delta=1e-2, sample_rate=1e-6, steps=1
    )
    assert noise_multiplier == 0.01


def test_an_impossible_target_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"^target_epsilon=1e-09: .*raise target_epsilon"):
        get_noise_multiplier(target_epsilon=1e-9, target_delta=1e-12, sample_rate=1.0, steps=10**6)


def test_epochs_of_a_loader_are_its_length_for_every_length() -> None:
    for batches in range(1, 2001):
        for epochs in (1, 3, 7):
            steps = epochs_to_steps(epochs=epochs, sample_rate=1 / batches)
            assert steps == epochs * batches


def test_a_begun_step_is_counted() -> None:
    assert epochs_to_steps(epochs=1, sample_rate=0.3) == 4
    assert epochs_to_steps(epochs=0.5, sample_rate=0.4) == 2
    assert epochs_to_steps(epochs=1e-12, sample_rate=1.0) == 1


def test_epochs_and_their_steps_give_the_same_noise() -> None:
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 1 / 93}
    assert get_noise_multiplier(**target, epochs=2) == get_noise_multiplier(**target, steps=186)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0.0}, "^target_epsilon=0.0: expected"),
        ({"target_epsilon": math.inf}, "^target_epsilon=inf: expected"),
        ({"target_delta": 0.0}, "^target_delta=0.0: expected"),
        ({"target_delta": 1.0}, "^target_delta=1.0: expected"),
        ({"sample_rate": 0.0}, "^sample_rate=0.0: expected"),
        ({"sample_rate": 1.5}, "^sample_rate=1.5: expected"),
        ({"steps": 0}, "^steps=0: expected"),
        ({"steps": 2.5}, "^steps=2.5: expected"),
        ({"steps": None}, "^steps=None, epochs=None: expected exactly one"),
        ({"epochs": 1}, "^steps=100, epochs=1: expected exactly one"),
        ({"steps": None, "epochs": -1}, "^epochs=-1: expected"),
        ({"steps": None, "epochs": 1e300, "sample_rate": 1e-300}, "^epochs=1e"),
        ({"accountant": "pld"}, "^accountant='pld': expected one of 'rdp'"),
    ],
)
def test_a_bad_argument_is_refused_by_name(change: dict, message: str) -> None:
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 100}
    with pytest.raises(ValueError, match=message):
        get_noise_multiplier(**{**arguments, **change})


def test_an_unknown_keyword_is_an_error() -> None:
    with pytest.raises(TypeError):
        get_noise_multiplier(
            target_epsilon=1.0,
            target_delta=1e-5,
            sample_rate=0.1,
            steps=10,
            epsilon_tolerance=0.1,  # type: ignore[call-arg]
        )


def test_accountants_are_created_by_name() -> None:
    assert type(create_accountant("rdp")) is RDPAccountant
    assert create_accountant("rdp").history == []


@pytest.mark.parametrize("name", ["gdp", "", "RDP"])
def test_an_unknown_accountant_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=f"^accountant='{name}': expected one of 'rdp'"):
        create_accountant(name)
