"""RDP of the subsampled Gaussian against Opacus, mpmath and the true epsilon."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant as OpacusRDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp as opacus_compute_rdp

from dpflash.accounting import RDPAccountant, compute_rdp, gaussian_epsilon

OPACUS_ORDERS = OpacusRDPAccountant.DEFAULT_ALPHAS


noise_multipliers = st.floats(0.3, 50)
sample_rates = st.floats(1e-6, 1)
step_counts = st.integers(1, 100_000)
deltas = st.floats(1e-12, 0.1)
phases = st.tuples(noise_multipliers, sample_rates, step_counts)


def epsilon_of(history, delta):
    accountant = RDPAccountant()
    accountant.history = history
    return accountant.get_epsilon(delta)


def log_moment_by_mpmath(sigma, q, order):
    """log A(a) by adaptive quadrature in 40 digits."""
    with mpmath.workdps(40):
        s, q_, a = mpmath.mpf(sigma), mpmath.mpf(q), mpmath.mpf(order)

        def integrand(x):
            return mpmath.npdf(x, 0, s) * (1 - q_ + q_ * mpmath.exp((2 * x - 1) / (2 * s**2))) ** a

        middle = s**2 * mpmath.log(1 / q_ - 1) + mpmath.mpf(1) / 2
        marks = sorted({-14 * s, mpmath.mpf(0), middle, a, a + 14 * s})
        marks = [x for x in marks if -14 * s <= x <= a + 14 * s]
        pieces = [
            x + (y - x) * k / 6 for x, y in zip(marks, marks[1:], strict=False) for k in range(6)
        ]
        return float(mpmath.log(mpmath.quad(integrand, [*pieces, marks[-1]])))


@pytest.mark.parametrize("noise_multiplier", [0.05, 0.3, 1.0, 3.0, 100.0, 1e4])
@pytest.mark.parametrize("sample_rate", [0.001, 0.01, 0.2, 0.5, 0.999, 1.0])
def test_rdp_equals_opacus(noise_multiplier, sample_rate):
    ours = compute_rdp(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, orders=OPACUS_ORDERS
    )
    theirs = opacus_compute_rdp(
        q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=OPACUS_ORDERS
    )
    # Opacus sums A itself, so that it knows log A = (a - 1) rdp to 1e-12 only.
    log_moment_error = np.abs(ours - theirs) * (np.array(OPACUS_ORDERS) - 1)
    assert np.all(log_moment_error <= 1e-9 * theirs * (np.array(OPACUS_ORDERS) - 1) + 1e-12)


@pytest.mark.parametrize(
    ("noise_multiplier", "sample_rate", "order"),
    [
        (1.0, 0.01, 1.01),
        (1.0, 1e-6, 2.5),
        (1.0, 1e-6, 3.0),
        (0.5, 0.3, 10.9),
        (0.2, 1e-3, 1.3),
        (0.05, 0.01, 1.1),
        (0.05, 1e-9, 7.7),
        (3.0, 0.999, 4.4),
        (40.0, 1e-4, 9.9),
        (1e4, 0.01, 1.5),
        (1e4, 0.01, 60.0),
        (1.0, 0.01, 300.5),
    ],
)
def test_rdp_keeps_its_digits(noise_multiplier, sample_rate, order):
    ours = compute_rdp(noise_multiplier=noise_multiplier, sample_rate=sample_rate, orders=[order])[
        0
    ]
    truth = log_moment_by_mpmath(noise_multiplier, sample_rate, order) / (order - 1)
    assert ours == pytest.approx(truth, rel=1e-10)


@pytest.mark.parametrize("order", [1.001, 7.7])
@pytest.mark.parametrize("noise_multiplier", [0.02, 0.049])
def test_rdp_below_the_quadrature_is_still_an_upper_bound(noise_multiplier, order):
    ours = compute_rdp(noise_multiplier=noise_multiplier, sample_rate=0.3, orders=[order])[0]
    truth = log_moment_by_mpmath(noise_multiplier, 0.3, order) / (order - 1)
    assert truth <= ours <= order / (2 * noise_multiplier**2)


@given(noise_multipliers, sample_rates)
@settings(max_examples=30)
def test_rdp_rises_with_the_order(noise_multiplier, sample_rate):
    orders = [1.01, 1.5, 2.0, 2.01, 2.5, 3.0, 10.5, 11.0, 63.0, 1000.0, 10_000.0]
    rdp = compute_rdp(noise_multiplier=noise_multiplier, sample_rate=sample_rate, orders=orders)
    assert np.all(np.diff(rdp) >= -1e-10 * rdp[1:])


def test_rdp_without_sampling_is_zero_and_without_noise_is_infinite():
    assert compute_rdp(noise_multiplier=0.0, sample_rate=0.0, orders=[2.0, 2.5]).tolist() == [0, 0]
    assert np.all(np.isinf(compute_rdp(noise_multiplier=0.0, sample_rate=0.5, orders=[2.0, 2.5])))
    assert compute_rdp(noise_multiplier=math.inf, sample_rate=0.5, orders=[2.5]).tolist() == [0]


@given(noise_multipliers, step_counts, deltas)
@settings(max_examples=50)
def test_epsilon_of_the_whole_data_set_is_at_least_the_closed_form(noise_multiplier, steps, delta):
    exact = gaussian_epsilon(delta=delta, noise_multiplier=noise_multiplier, steps=steps)
    ours = epsilon_of([(noise_multiplier, 1.0, steps)], delta)
    assert ours >= exact * (1 - 1e-9)


def test_epsilon_of_the_whole_data_set_is_near_the_closed_form():
    exact = gaussian_epsilon(delta=1e-6, noise_multiplier=30.0, steps=100)
    assert epsilon_of([(30.0, 1.0, 100)], 1e-6) <= 1.15 * exact


@given(noise_multipliers, sample_rates, step_counts, deltas, st.floats(1, 3))
@settings(max_examples=40)
def test_epsilon_falls_with_noise_and_delta_and_rises_with_rate_and_steps(
    noise_multiplier, sample_rate, steps, delta, factor
):
    base = epsilon_of([(noise_multiplier, sample_rate, steps)], delta)
    less = base * (1 + 1e-9) + 1e-12
    assert base >= 0
    assert epsilon_of([(noise_multiplier * factor, sample_rate, steps)], delta) <= less
    assert epsilon_of([(noise_multiplier, sample_rate / factor, steps)], delta) <= less
    assert epsilon_of([(noise_multiplier, sample_rate, math.ceil(steps / factor))], delta) <= less
    assert epsilon_of([(noise_multiplier, sample_rate, steps)], min(0.5, delta * factor)) <= less


@given(st.lists(phases, min_size=1, max_size=4), deltas, st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_epsilon_ignores_the_order_of_the_phases_and_how_they_are_split(history, delta, random):
    whole = epsilon_of(history, delta)
    pieces = [(s, q, n) for s, q, steps in history for n in (steps // 3, steps - steps // 3)]
    random.shuffle(pieces)
    assert epsilon_of(pieces, delta) == pytest.approx(whole, rel=1e-11, abs=1e-14)


@given(st.lists(phases, min_size=1, max_size=3), deltas)
@settings(max_examples=30)
def test_a_further_phase_never_lowers_epsilon(history, delta):
    assert epsilon_of(history[:-1], delta) <= epsilon_of(history, delta) * (1 + 1e-12)


@given(st.lists(phases, min_size=1, max_size=3), deltas)
@settings(max_examples=30)
def test_delta_and_epsilon_are_inverse(history, delta):
    accountant = RDPAccountant()
    accountant.history = history
    epsilon = accountant.get_epsilon(delta)
    back = accountant.get_delta(epsilon)
    if epsilon > 0:
        assert back == pytest.approx(delta, rel=1e-6)
    else:
        assert back <= delta * (1 + 1e-12)


def test_delta_is_at_least_the_exact_one_and_at_most_one():
    from dpflash.accounting import gaussian_delta

    accountant = RDPAccountant()
    accountant.history = [(2.0, 1.0, 10)]
    for epsilon in (0.0, 0.5, 2.0, 8.0, 20.0):
        exact = gaussian_delta(epsilon=epsilon, noise_multiplier=2.0, steps=10)
        assert exact <= accountant.get_delta(epsilon) <= 1.0


@given(
    st.one_of(st.just(0.0), st.floats(0.05, 1e4), st.floats(1e-300, 0.05), st.floats(1e4, 1e300)),
    st.floats(0, 1),
    st.integers(0, 10**9),
    st.floats(1e-300, 1, exclude_max=True),
    st.floats(0, 1e6),
)
@settings(max_examples=60)
def test_no_history_gives_nan_or_a_negative_value(
    noise_multiplier, sample_rate, steps, delta, epsilon
):
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, steps)]
    assert accountant.get_epsilon(delta) >= 0
    assert 0 <= accountant.get_delta(epsilon) <= 1


def test_tiny_epsilons_are_reached():
    assert 0 < epsilon_of([(1000.0, 0.01, 1000)], 1e-6) < 0.005


def test_a_repeated_query_computes_no_order_anew(monkeypatch):
    import dpflash.accounting.rdp as rdp

    accountant = RDPAccountant()
    accountant.history = [(1.0 + k / 10, 0.01, 100) for k in range(8)]
    first = accountant.get_epsilon(1e-5)

    def refuse(*arguments):
        raise AssertionError("computed anew")

    monkeypatch.setattr(rdp, "_rdp", refuse)
    assert accountant.get_epsilon(1e-5) == first
    assert accountant.get_epsilon(1e-6) > first
    accountant.history = [(1.0 + k / 10, 0.01, 200 + k) for k in range(8)]
    assert accountant.get_epsilon(1e-5) > first


@pytest.mark.parametrize("order", [1.0, 0.5, -2, math.inf, math.nan])
def test_an_order_outside_its_range_is_refused(order):
    with pytest.raises(ValueError, match="^order="):
        compute_rdp(noise_multiplier=1.0, sample_rate=0.1, orders=[order])
