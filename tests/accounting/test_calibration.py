"""Calibration: never below the target in privacy, hardly above it in noise."""

import copy
import os
import warnings

import opacus.accountants
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpflash.accounting import (
    ContourAccountant,
    FixedSizeGaussian,
    Gaussian,
    GaussianAccountant,
    GDPAccountant,
    PLDAccountant,
    PoissonGaussian,
    PRVAccountant,
    RDPAccountant,
    SelfComposed,
    ShuffledGaussian,
    create_accountant,
    epochs_to_steps,
    gaussian_epsilon,
    get_noise_multiplier,
    get_sample_rate,
    get_steps,
    remaining_steps,
)

KINDS = {
    "contour": ContourAccountant,
    "pld": PLDAccountant,
    "rdp": RDPAccountant,
    "gdp": GDPAccountant,
    "gaussian": GaussianAccountant,
    "prv": PRVAccountant,
}
LISTED = ", ".join(map(repr, KINDS))

bounds = pytest.mark.parametrize("accountant", ["contour", "rdp"])
FULL = os.environ.get("DPFLASH_FULL") == "1"
few = settings(max_examples=20 if FULL else 4, derandomize=True, deadline=None)


def epsilon_of(noise_multiplier, sample_rate, steps, delta, accountant="contour"):
    trial = create_accountant(accountant)
    trial.history = [(noise_multiplier, sample_rate, steps)]
    return trial.get_epsilon(delta)


def noise_of(target_epsilon, target_delta, sample_rate, steps, accountant):
    """The least noise for a target, and epsilon as a function of the noise."""
    target = {"target_epsilon": target_epsilon, "target_delta": target_delta}
    run = {"sample_rate": sample_rate, "steps": steps, "accountant": accountant}
    setting = (sample_rate, steps, target_delta, accountant)
    return get_noise_multiplier(**target, **run), lambda noise: epsilon_of(noise, *setting)


@bounds
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
    target_epsilon, target_delta, sample_rate, steps, accountant
):
    noise_multiplier, epsilon = noise_of(
        target_epsilon, target_delta, sample_rate, steps, accountant
    )
    assert target_epsilon * (1 - 1e-3) <= epsilon(noise_multiplier) <= target_epsilon
    assert epsilon(noise_multiplier * (1 - 1.01e-4)) > target_epsilon


@pytest.mark.parametrize("steps", [1, 100])
def test_without_subsampling_the_noise_is_that_of_the_closed_form(steps):
    target = {"target_epsilon": 2.0, "target_delta": 1e-6}
    found = get_noise_multiplier(**target, sample_rate=1.0, steps=steps)
    epsilon = gaussian_epsilon(delta=1e-6, noise_multiplier=found, steps=steps)
    assert epsilon <= 2.0 < epsilon * (1 + 2e-4)


def test_contour_needs_less_noise_than_pld_and_pld_less_than_rdp():
    target = {"target_epsilon": 2.0, "target_delta": 1e-6, "sample_rate": 0.01, "steps": 1000}
    default = get_noise_multiplier(**target)
    contour, pld, rdp = (
        get_noise_multiplier(**target, accountant=name) for name in ("contour", "pld", "rdp")
    )
    assert default == contour
    assert contour <= pld * (1 + 1e-4) and pld <= contour * (1 + 1e-3)
    assert rdp > 1.02 * contour


@bounds
@given(
    target_epsilon=st.floats(0.005, 100),
    target_delta=st.floats(1e-10, 1e-2),
    sample_rate=st.floats(1e-4, 1),
    steps=st.integers(1, 100_000),
)
@few
def test_epsilon_at_the_returned_noise_never_exceeds_the_target(
    target_epsilon, target_delta, sample_rate, steps, accountant
):
    noise_multiplier, epsilon = noise_of(
        target_epsilon, target_delta, sample_rate, steps, accountant
    )
    assert epsilon(noise_multiplier) <= target_epsilon
    if noise_multiplier > 0.01:
        assert epsilon(noise_multiplier * (1 - 2e-4)) > target_epsilon


def test_a_target_that_any_noise_meets_gets_the_least_noise():
    noise_multiplier = get_noise_multiplier(
        target_epsilon=1e6, target_delta=1e-2, sample_rate=1e-6, steps=1
    )
    assert noise_multiplier == 0.01


def test_an_impossible_target_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"^target_epsilon=1e-09: .*raise target_epsilon"):
        get_noise_multiplier(target_epsilon=1e-9, target_delta=1e-12, sample_rate=1.0, steps=10**6)


def test_epochs_of_a_loader_are_its_length_for_every_length():
    for batches in range(1, 2001):
        for epochs in (1, 3, 7):
            steps = epochs_to_steps(epochs=epochs, sample_rate=1 / batches)
            assert steps == epochs * batches


def test_a_begun_step_is_counted():
    assert epochs_to_steps(epochs=1, sample_rate=0.3) == 4
    assert epochs_to_steps(epochs=0.5, sample_rate=0.4) == 2
    assert epochs_to_steps(epochs=1e-12, sample_rate=1.0) == 1


def test_epochs_and_their_steps_give_the_same_noise():
    target = {"target_epsilon": 2.0, "target_delta": 1e-5, "sample_rate": 1 / 93}
    assert get_noise_multiplier(**target, epochs=2) == get_noise_multiplier(**target, steps=186)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0.0}, "^target_epsilon=0.0: expected"),
        ({"target_delta": 0.0}, "^target_delta=0.0: expected"),
        ({"sample_rate": 0.0}, "^sample_rate=0.0: expected"),
        ({"steps": 0}, "^steps=0: expected"),
        ({"steps": None}, "^steps=None, epochs=None: expected exactly one"),
        ({"epochs": 1}, "^steps=100, epochs=1: expected exactly one"),
        ({"steps": None, "epochs": -1}, "^epochs=-1: expected"),
        ({"steps": None, "epochs": 1e300, "sample_rate": 1e-300}, "^epochs=1e"),
        ({"accountant": "moments"}, f"^accountant='moments': expected one of {LISTED};"),
    ],
)
def test_a_bad_argument_is_refused_by_name(change, message):
    arguments = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.1, "steps": 100}
    with pytest.raises(ValueError, match=message):
        get_noise_multiplier(**{**arguments, **change})


@pytest.mark.parametrize("name", KINDS)
def test_accountants_are_created_by_name(name):
    accountant = create_accountant(name)
    assert type(accountant) is KINDS[name]
    assert accountant.mechanism() == name
    assert accountant.history == accountant.events == []
    assert accountant.neighboring_relation == "add_remove"


def test_the_accountant_that_is_passed_is_asked_and_left_alone():
    target = {"target_epsilon": 2.0, "target_delta": 1e-6, "sample_rate": 0.02, "steps": 100}
    accountant = ContourAccountant(neighboring_relation="replace_one")
    accountant.history = [(0.5, 0.5, 10)]
    accountant.compose(Gaussian(relation="replace_one", noise_multiplier=1.0), 3)
    before = copy.deepcopy(accountant.state_dict())
    found = get_noise_multiplier(**target, accountant=accountant)
    assert accountant.state_dict() == before
    # Its relation counts, its history does not.
    assert found == get_noise_multiplier(
        **target, accountant=ContourAccountant(neighboring_relation="replace_one")
    )
    assert found > get_noise_multiplier(**target)


@bounds
@pytest.mark.parametrize(
    ("target_epsilon", "target_delta", "noise_multiplier", "steps"),
    [
        (1.0, 1e-5, 1.0, 1000),
        (0.05, 1e-9, 5.0, 10),
        (8.0, 1e-6, 0.5, 1),
        (100.0, 1e-5, 0.7, 10**5),
    ],
)
def test_the_sample_rate_meets_the_target_and_a_little_more_would_not(
    target_epsilon, target_delta, noise_multiplier, steps, accountant
):
    rate = get_sample_rate(
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        noise_multiplier=noise_multiplier,
        steps=steps,
        accountant=accountant,
    )
    assert 0 < rate < 1
    setting = (steps, target_delta, accountant)
    assert epsilon_of(noise_multiplier, rate, *setting) <= target_epsilon
    assert epsilon_of(noise_multiplier, rate * (1 + 1.01e-4), *setting) > target_epsilon


def test_the_sample_rate_is_at_most_1_and_an_impossible_one_is_refused():
    target = {"target_delta": 1e-6, "noise_multiplier": 5.0, "steps": 10}
    assert get_sample_rate(target_epsilon=100.0, **target) == 1.0
    # Without privacy at rate 1, a rate with a chance of 1e-6 to be drawn at all costs nothing.
    free = get_sample_rate(target_epsilon=1e-3, target_delta=1e-6, noise_multiplier=0.01, steps=1)
    assert 1e-6 * (1 - 1e-4) <= free <= 1e-6 * (1 + 1e-9)
    with pytest.raises(
        ValueError, match=r"^target_epsilon=1e-12: no sample_rate .*raise the noise"
    ):
        get_sample_rate(
            target_epsilon=1e-12,
            target_delta=1e-300,
            noise_multiplier=1.0,
            steps=10**9,
            accountant="rdp",
        )


@bounds
@pytest.mark.parametrize(
    ("target_epsilon", "noise_multiplier", "sample_rate"),
    [(1.0, 1.0, 0.01), (8.0, 0.6, 0.001), (0.3, 20.0, 1.0), (0.2, 1.0, 0.01), (30.0, 1.0, 0.9)],
)
def test_so_many_steps_fit_and_one_more_does_not(
    target_epsilon, noise_multiplier, sample_rate, accountant
):
    steps = get_steps(
        target_epsilon=target_epsilon,
        target_delta=1e-5,
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        accountant=accountant,
    )
    assert type(steps) is int
    if steps:
        reached = epsilon_of(noise_multiplier, sample_rate, steps, 1e-5, accountant)
        assert reached <= target_epsilon
    more = epsilon_of(noise_multiplier, sample_rate, steps + 1, 1e-5, accountant)
    assert more > target_epsilon


def test_no_step_and_the_most_steps_are_returned_as_such():
    target = {"target_epsilon": 1.0, "target_delta": 1e-5, "sample_rate": 0.5}
    assert get_steps(**target, noise_multiplier=0.5) == 0
    assert get_steps(**target, noise_multiplier=1e8) == 10**12


@given(
    st.floats(0.5, 20),
    st.floats(0.5, 5),
    st.floats(1e-3, 1),
    st.integers(0, 200),
    st.floats(0.05, 20),
)
@few
def test_remaining_steps_count_the_history_so_far(noise, other_noise, rate, steps, target_epsilon):
    accountant = ContourAccountant()
    accountant.history = [(noise, rate, steps)]
    accountant.compose(Gaussian(noise_multiplier=50.0))
    before = copy.deepcopy(accountant.state_dict())
    event = PoissonGaussian(noise_multiplier=other_noise, sample_rate=rate)
    target = {"target_epsilon": target_epsilon, "target_delta": 1e-6}
    left = remaining_steps(accountant, event, **target)
    assert accountant.state_dict() == before
    for count, fits in ((left, True), (left + 1, False)):
        if count:
            whole = copy.deepcopy(accountant)
            whole.compose(event, count)
            assert (whole.get_epsilon(1e-6) <= target_epsilon) is fits


def test_remaining_steps_of_every_kind_of_event():
    target = {"target_epsilon": 5.0, "target_delta": 1e-5}
    accountant = ContourAccountant(neighboring_relation="replace_one")
    accountant.history = [(2.0, 0.01, 100)]
    twice = SelfComposed(
        relation="replace_one",
        event=PoissonGaussian(relation="replace_one", noise_multiplier=2.0, sample_rate=0.01),
        count=2,
    )
    pairs = remaining_steps(accountant, twice, **target)
    assert remaining_steps(accountant, twice.event, **target) in (2 * pairs, 2 * pairs + 1)
    for event in (
        FixedSizeGaussian(noise_multiplier=3.0, batch_size=10, num_samples=1000),
        ShuffledGaussian(relation="replace_one", noise_multiplier=9.0),
    ):
        left = remaining_steps(accountant, event, **target)
        whole = copy.deepcopy(accountant)
        whole.compose(event, left)
        assert left > 0 and whole.get_epsilon(1e-5) <= 5.0
        whole.compose(event)
        assert whole.get_epsilon(1e-5) > 5.0
    with pytest.raises(ValueError, match="^event.relation='add_remove'"):
        remaining_steps(accountant, Gaussian(noise_multiplier=1.0), **target)


@pytest.mark.parametrize("name", ["RDPAccountant", "GaussianAccountant", "PRVAccountant"])
@pytest.mark.filterwarnings("ignore")
def test_accountants_of_opacus_are_asked_for_their_own_epsilon(name):
    def new():
        return getattr(opacus.accountants, name)()

    history = [(1.3, 0.01, 7)]
    accountant = new()
    accountant.history = list(history)
    target = {"target_epsilon": 2.0, "target_delta": 1e-5}
    noise = get_noise_multiplier(**target, sample_rate=0.01, steps=500, accountant=accountant)
    assert accountant.history == history
    trial = new()
    trial.history = [(noise, 0.01, 500)]
    assert trial.get_epsilon(1e-5) <= 2.0
    trial.history = [(noise * (1 - 2e-4), 0.01, 500)]
    assert trial.get_epsilon(1e-5) > 2.0

    event = PoissonGaussian(noise_multiplier=1.3, sample_rate=0.01)
    left = remaining_steps(accountant, event, **target)
    assert accountant.history == history
    # What was taken and what is left are one phase, of which alone GaussianAccountant knows.
    trial.history = [(1.3, 0.01, 7 + left)]
    assert trial.get_epsilon(1e-5) <= 2.0
    trial.history = [(1.3, 0.01, 8 + left)]
    assert trial.get_epsilon(1e-5) > 2.0


def test_opacus_accountants_know_whole_batches_and_no_other_events():
    accountant = opacus.accountants.RDPAccountant()
    accountant.history = [(5.0, 1.0, 2)]
    target = {"target_epsilon": 5.0, "target_delta": 1e-5}
    event = Gaussian(noise_multiplier=5.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        left = remaining_steps(accountant, event, **target)
        trial = opacus.accountants.RDPAccountant()
        trial.history = [(5.0, 1.0, 2 + left)]
        assert trial.get_epsilon(1e-5) <= 5.0
        trial.history = [(5.0, 1.0, 3 + left)]
        assert trial.get_epsilon(1e-5) > 5.0
    for event in (
        Gaussian(relation="replace_one", noise_multiplier=5.0),
        FixedSizeGaussian(noise_multiplier=3.0, batch_size=10, num_samples=1000),
        SelfComposed(event=Gaussian(noise_multiplier=5.0), count=2),
    ):
        with pytest.raises(ValueError, match="supports Poisson sampling only"):
            remaining_steps(accountant, event, **target)


def bad(**change):
    good = {"target_epsilon": 1.0, "target_delta": 1e-5, "noise_multiplier": 1.0}
    return {**good, **change}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon"),
        ({"target_delta": 1.0}, "target_delta"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": "1"}, "noise_multiplier"),
    ],
)
def test_bad_arguments_of_the_other_searches_are_refused_by_name(change, name):
    with pytest.raises(ValueError, match=f"^{name}="):
        get_sample_rate(**bad(**change), steps=10)
    with pytest.raises(ValueError, match=f"^{name}="):
        get_steps(**bad(**change), sample_rate=0.1)
    with pytest.raises(ValueError, match="^steps="):
        get_sample_rate(**bad(), steps=0)
    with pytest.raises(ValueError, match="^sample_rate="):
        get_steps(**bad(), sample_rate=0.0)
    if name.startswith("target"):
        target = {key: value for key, value in bad(**change).items() if key.startswith("target")}
        with pytest.raises(ValueError, match=f"^{name}="):
            remaining_steps(RDPAccountant(), Gaussian(noise_multiplier=1.0), **target)
