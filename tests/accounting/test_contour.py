"""The flagship accountant: properties that hold anywhere, closed forms, and the other methods."""

import dataclasses
import math
import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import one_step_deltas
from scipy.special import ndtr, ndtri

from dpflash.accounting import (
    ContourAccountant,
    FixedSizeGaussian,
    Gaussian,
    GDPAccountant,
    PLDAccountant,
    PoissonGaussian,
    PRVAccountant,
    RDPAccountant,
    TruncatedPoissonGaussian,
    contour_integral,
    gaussian_delta,
    gaussian_epsilon,
)
from dpflash.accounting import contour as module
from dpflash.accounting.contour_integral import (
    ADD,
    REMOVE,
    RealAxis,
    cut_probability,
    integral_along,
)
from dpflash.accounting.pairs import Pair, canonical

FULL = os.environ.get("DPFLASH_FULL") == "1"
KINDS = (ContourAccountant, PLDAccountant, RDPAccountant, GDPAccountant, PRVAccountant)


def powers(low, high):
    return st.floats(low, high).map(lambda x: 10.0**x)


any_noise, any_rate = powers(math.log10(0.02), 4), st.one_of(st.just(1.0), powers(-9, 0))
any_steps = st.floats(0, 7).map(lambda x: round(10**x))
any_delta = powers(-15, math.log10(0.5))
noises, rates = powers(-0.4, 1.5), powers(-4, -0.001)
step_counts = st.floats(0.4, 4.5).map(lambda x: round(10**x))
deltas = powers(-12, -2)
phases = st.tuples(noises, rates, step_counts)


def of(*history, kind=ContourAccountant, relation="add_remove"):
    accountant = kind(neighboring_relation=relation)
    accountant.history = list(history)
    return accountant


def few(examples):
    examples = examples if FULL else examples // 3
    return settings(max_examples=examples, derandomize=True, deadline=None)


@given(any_noise, any_rate, any_steps, any_delta)
@few(60)
def test_anywhere_there_is_an_interval_and_a_finite_upper_end(noise, rate, steps, delta):
    accountant = of((noise, rate, steps))
    lower, upper = accountant.get_epsilon(delta, interval=True)
    assert 0 <= lower <= upper < math.inf
    assert accountant.get_epsilon(delta) == upper
    below, above = accountant.get_delta(upper, interval=True)
    assert 0 <= below <= above <= 1
    assert below <= delta * (1 + 1e-9)
    if noise >= 0.3:
        assert above <= delta * (1 + 1e-4)
    assert upper <= of((noise, rate, steps), kind=RDPAccountant).get_epsilon(delta) * (1 + 1e-9)
    whole = gaussian_epsilon(delta=delta, noise_multiplier=noise, steps=steps)
    assert upper <= whole * (1 + 1e-9)


@pytest.mark.parametrize("log_delta", [-20, -50, -100, -200, -299])
@pytest.mark.parametrize(
    "phase", [(1.0, 0.01, 1000), (5.0, 0.5, 500), (0.6, 1e-3, 10_000), (2.0, 1.0, 10)]
)
def test_delta_may_be_as_small_as_float64_has_it(phase, log_delta):
    delta = 10.0**log_delta
    accountant = of(phase)
    lower, upper = accountant.get_epsilon(delta, interval=True)
    assert 0 < upper * (1 - 1e-5) <= lower <= upper < math.inf
    assert upper <= of(phase, kind=RDPAccountant).get_epsilon(delta)
    below, above = accountant.get_delta(upper, interval=True)
    assert below <= delta * (1 + 1e-4) and above >= delta * (1 - 1e-4)
    if log_delta > -280:
        assert delta * (1 - 1e-2) <= below <= above <= delta * (1 + 1e-4)


@given(noises, rates, step_counts, deltas, powers(-4, 0.4).map(lambda x: 1 + x))
@few(20)
def test_epsilon_falls_with_noise_and_delta_and_rises_with_rate_and_steps(
    noise, rate, steps, delta, factor
):
    lower, upper = of((noise, rate, steps)).get_epsilon(delta, interval=True)
    # As wide as the interval is, at most 1e-6.
    assert upper - lower <= 1e-6 * upper
    less = upper * (1 + 1e-9) + (upper - lower)
    more = upper * (1 - 1e-9) - (upper - lower)
    assert of((noise * factor, rate, steps)).get_epsilon(delta) <= less
    assert of((noise, rate, steps)).get_epsilon(min(0.5, delta * factor)) <= less
    assert of((noise, min(1.0, rate * factor), steps)).get_epsilon(delta) >= more
    assert of((noise, rate, math.ceil(steps * factor))).get_epsilon(delta) >= more


@given(st.lists(phases, min_size=1, max_size=3), deltas, st.randoms(use_true_random=False))
@few(15)
def test_order_and_splits_of_the_history_change_no_bit(history, delta, random):
    whole = of(*history)
    parts = [(s, q, n) for s, q, steps in history for n in (steps // 3, steps - steps // 3)]
    random.shuffle(parts)
    split, composed = of(*parts), of()
    for noise, rate, steps in parts:
        composed.compose(PoissonGaussian(noise_multiplier=noise, sample_rate=rate), steps)
    integral_along.cache_clear()
    contour_integral._known_cumulants.cache_clear()
    contour_integral._rough_cumulants.cache_clear()
    found = whole.get_epsilon(delta, interval=True)
    assert found == split.get_epsilon(delta, interval=True)
    assert found == composed.get_epsilon(delta, interval=True)
    expected = whole.get_delta(1.0, interval=True)
    assert split.get_delta(1.0, interval=True) == expected
    assert composed.get_delta(1.0, interval=True) == expected


@given(st.lists(phases, min_size=1, max_size=3), deltas, st.booleans())
@few(12)
def test_contour_and_pld_agree(history, delta, replaced):
    relation = "replace_one" if replaced else "add_remove"
    ours = of(*history, relation=relation).get_epsilon(delta, interval=True)
    theirs = of(*history, kind=PLDAccountant, relation=relation).get_epsilon(delta, interval=True)
    slack = 1 + 1e-9
    assert theirs.lower <= ours.upper * slack
    assert ours.lower <= theirs.upper * slack
    # replace_one halves the noise; near 0.2 it is PLD that answers.
    assert ours.upper - ours.lower <= (1e-3 if replaced else 1e-6) * ours.upper


@pytest.mark.parametrize(
    ("history", "noise"),
    [
        ([(3.0, 1.0, 50)], 3.0 / math.sqrt(50)),
        ([(3.0, 1.0, 9), (4.0, 1.0, 16)], 1 / math.sqrt(2)),
        ([(1e4, 1.0, 1)], 1e4),
        ([(0.02, 1.0, 7)], 0.02 / math.sqrt(7)),
    ],
)
def test_without_subsampling_contour_is_the_closed_form(history, noise):
    for delta in (1e-2, 1e-6, 1e-15, 1e-300):
        truth = gaussian_epsilon(delta=delta, noise_multiplier=noise)
        lower, upper = of(*history).get_epsilon(delta, interval=True)
        assert lower <= truth * (1 + 1e-11)
        assert upper == pytest.approx(truth, rel=1e-11)
    truth = gaussian_delta(epsilon=1.0, noise_multiplier=noise)
    assert of(*history).get_delta(1.0) == pytest.approx(truth, rel=1e-9)


def test_the_contour_itself_has_the_closed_form_of_the_gaussian():
    # The accountant would not ask it.
    for noise, steps, epsilon in ((10.0, 100, 4.0), (3.0, 2, 0.5), (1.0, 1, 8.0), (20.0, 9, 0.01)):
        pairs = ((Pair(noise, 1.0), steps),)
        truth = gaussian_delta(epsilon=epsilon, noise_multiplier=noise, steps=steps)
        for side in (REMOVE, ADD):
            lower, upper = module._delta_of(pairs, side, epsilon)
            assert lower <= truth * (1 + 1e-12)
            assert truth * (1 - 1e-12) <= upper <= truth * (1 + 1e-6)


@pytest.mark.parametrize(
    ("noise", "rate", "epsilon"),
    [
        (1.0, 0.01, 0.005),
        (1.0, 0.01, 0.2),
        (1.0, 0.5, 0.3),
        (1.0, 0.9, 2.0),
        (0.5, 1e-3, 0.5),
        (3.0, 0.1, 0.02),
        (2.0, 1e-6, 5e-7),
        (0.3, 0.3, 6.0),
    ],
)
def test_the_contour_itself_has_the_closed_form_of_one_step(noise, rate, epsilon):
    pairs = ((Pair(noise, rate), 1),)
    truths = one_step_deltas(noise, rate, epsilon)
    for side, truth in zip((REMOVE, ADD), truths, strict=True):
        lower, upper = module._delta_of(pairs, side, epsilon)
        assert lower <= truth * (1 + 1e-11)
        assert truth * (1 - 1e-11) <= upper
        if side == REMOVE:
            assert upper <= truth * (1 + 1e-5)
            low, high = module._epsilon_of(pairs, side, truth)
            assert low * (1 - 1e-10) <= epsilon <= high * (1 + 1e-10)
            assert high - low <= 1e-5 * high
    symmetric = ((Pair(noise, rate, True), 1),)
    lower, upper = module._delta_of(symmetric, REMOVE, epsilon)
    assert lower <= truths[0] * (1 + 1e-11)
    assert truths[0] * (1 - 1e-11) <= upper <= truths[0] * (1 + 1e-5)


def two_steps(noise, rate, epsilon):
    """Deltas of two steps by brute force over outputs: removal, addition, symmetric."""
    h = 1.5e-3 * noise
    x = 0.5 + h * (np.arange(-round(13 * noise / h), round(13 * noise / h)) + 0.5)
    plain = np.exp(-((x / noise) ** 2) / 2) / (noise * math.sqrt(2 * math.pi)) * h
    loss = np.log1p(rate * np.expm1((x - 0.5) / noise**2))
    mixed = plain * np.exp(loss)
    upper = x > 0.5
    both_losses = np.concatenate((loss[upper], -loss[upper], [0.0]))
    both = np.concatenate((mixed[upper], plain[upper], [0.0]))
    both[-1] = 1 - both.sum()

    def delta(losses, masses):
        order = np.argsort(losses)
        losses, masses = losses[order], masses[order]
        p_above = np.append(np.cumsum(masses[::-1])[::-1], 0)
        q_above = np.append(np.cumsum((masses * np.exp(-losses))[::-1])[::-1], 0)
        start = np.searchsorted(losses, epsilon - losses)
        return float(masses @ (p_above[start] - np.exp(epsilon - losses) * q_above[start]))

    return delta(loss, mixed), delta(-loss, plain), delta(both_losses, both)


@pytest.mark.parametrize(
    ("noise", "rate", "epsilon"), [(1.0, 0.3, 0.4), (1.0, 0.9, 0.2), (0.7, 0.05, 0.05)]
)
def test_two_steps_equal_brute_force_in_both_directions(noise, rate, epsilon):
    removed, added, symmetric = two_steps(noise, rate, epsilon)
    pairs = ((Pair(noise, rate), 2),)
    for side, truth in ((REMOVE, removed), (ADD, added)):
        found = module._delta_of(pairs, side, epsilon)
        assert found.lower == pytest.approx(truth, rel=1e-4)
        assert found.upper == pytest.approx(truth, rel=1e-4)
    found = module._delta_of(((Pair(noise, rate, True), 2),), REMOVE, epsilon)
    assert found.upper == pytest.approx(symmetric, rel=1e-4)
    assert of((noise, rate, 2)).get_delta(epsilon) == pytest.approx(max(removed, added), rel=1e-4)
    # The symmetric pair is as bad as either, and worse in composition.
    assert symmetric >= max(removed, added) * (1 - 1e-4)


def test_the_added_direction_counts_where_it_is_the_worse():
    # The removal has the greater delta in all of the table, but not of every composition.
    other = ContourAccountant()
    other.history = [(1.0, 0.5, 50)]
    pairs = other._pairs()
    for epsilon in (0.0, 0.3, 3.0):
        removed = module._delta_of(pairs, REMOVE, epsilon)
        added = module._delta_of(pairs, ADD, epsilon)
        lower, upper = other.get_delta(epsilon, interval=True)
        assert upper >= max(removed.upper, added.lower) * (1 - 1e-12)
        assert lower >= max(removed.lower, 0) * (1 - 1e-12)


def test_both_directions_are_asked(monkeypatch):
    monkeypatch.setattr(module, "_largest_added_loss", lambda pairs: math.inf)
    delta_of, epsilon_of, swap = module._delta_of, module._epsilon_of, {1: -1, -1: 1}

    def delta(pairs, side, epsilon, *, enough=None):
        return delta_of(pairs, swap[side], epsilon, enough=enough)

    plain = of((1.0, 0.4, 60))
    expected = plain.get_epsilon(1e-6), plain.get_delta(1.0)
    monkeypatch.setattr(module, "_delta_of", delta)
    monkeypatch.setattr(
        module, "_epsilon_of", lambda pairs, side, delta: epsilon_of(pairs, swap[side], delta)
    )
    found = plain.get_epsilon(1e-6), plain.get_delta(1.0)
    assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("rate", [1e-3, 0.05, 0.6])
def test_fixed_batches_agree_with_pld_and_cost_at_least_poissons_at_half_the_noise(rate):
    size = round(1000 * rate)
    event = FixedSizeGaussian(noise_multiplier=2.4, batch_size=size, num_samples=1000)
    found = []
    for kind in (ContourAccountant, PLDAccountant):
        accountant = kind(neighboring_relation="replace_one")
        accountant.compose(event, 200)
        found.append(accountant.get_epsilon(1e-6, interval=True))
    ours, theirs = found
    assert theirs.lower <= ours.upper * (1 + 1e-9) and ours.lower <= theirs.upper * (1 + 1e-9)
    assert ours.upper - ours.lower <= 1e-6 * ours.upper
    half = of((1.2, rate, 200)).get_epsilon(1e-6)
    assert ours.upper >= half * (1 - 1e-9)
    assert ours.upper <= gaussian_epsilon(delta=1e-6, noise_multiplier=1.2, steps=200)
    # Poisson batches of which a sample is replaced have the same pair.
    replaced = of((2.4, rate, 200), relation="replace_one")
    assert replaced.get_epsilon(1e-6, interval=True) == ours


def test_many_distinct_phases_are_as_good_as_one_that_bounds_them():
    history = [(1.0 + k / 1000, 0.01, 25) for k in range(40)]
    lower, upper = of(*history).get_epsilon(1e-6, interval=True)
    assert upper - lower <= 1e-6 * upper
    assert of((1.039, 0.01, 1000)).get_epsilon(1e-6) < lower
    assert upper < of((1.0, 0.01, 1000)).get_epsilon(1e-6)


@given(phases, deltas)
@few(15)
def test_delta_is_the_inverse_of_epsilon(phase, delta):
    accountant = of(phase)
    lower, upper = accountant.get_epsilon(delta, interval=True)
    below, above = accountant.get_delta(upper, interval=True)
    # Both ends include float64's rounding of terms as large as 1.
    assert below <= above <= delta * (1 + 1e-6) + 2 * sys.float_info.epsilon
    if lower > 0:
        assert above >= delta * (1 - 1e-4)
        assert accountant.get_delta(lower) >= delta * (1 - 1e-9)


@pytest.mark.parametrize("phase", [(1.0, 0.01, 1000), (2.0, 0.5, 30), (0.8, 0.05, 1)])
def test_beta_is_a_trade_off_curve(phase):
    accountant = of(phase)
    alphas = np.linspace(0, 1, 11)
    betas = np.array([accountant.get_beta(float(alpha)) for alpha in alphas])
    assert np.all(betas >= 0) and np.all(betas <= 1 - alphas)
    assert np.all(np.diff(betas) <= 1e-9)
    assert np.all(np.diff(betas, 2) >= -1e-5)
    advantage = accountant.get_advantage()
    assert advantage == accountant.get_delta(0.0)
    assert np.all(betas >= 1 - alphas - advantage - 1e-12)
    # Somewhere the advantage is reached.
    assert min(betas + alphas) <= 1 - advantage * (1 - 0.05)
    for epsilon in (0.01, 0.3, 2.0):
        implied = 1 - accountant.get_delta(epsilon) - math.exp(epsilon) * alphas
        assert np.all(betas >= implied - 1e-6)


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 1), (10.0, 100), (3.0, 4), (0.5, 1)])
def test_beta_without_subsampling_is_that_of_the_gaussian(noise, steps):
    accountant, mu = of((noise, 1.0, steps)), math.sqrt(steps) / noise
    for alpha in (1e-6, 0.01, 0.05, 0.3, 0.5, 0.9, 0.999):
        truth = float(ndtr(ndtri(1 - alpha) - mu))
        beta = accountant.get_beta(alpha)
        assert beta <= truth + 1e-12
        assert beta == pytest.approx(truth, abs=1e-6)
    truth = float(ndtr(mu / 2) - ndtr(-mu / 2))
    assert accountant.get_advantage() == pytest.approx(truth, rel=1e-9)


def test_beta_at_the_edges():
    assert of().get_beta(0.3) == 0.7
    assert of((0.0, 0.5, 1)).get_beta(0.3) == 0.0
    assert of((1.0, 0.1, 10)).get_beta(1.0) == 0.0
    assert of((1.0, 0.1, 10)).get_beta(0.0) == pytest.approx(1.0, abs=1e-9)
    assert of().get_advantage() == 0.0
    assert of((0.0, 0.5, 1)).get_advantage() == 1.0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.mechanism())
@pytest.mark.parametrize(
    ("phase", "epsilon", "delta"),
    [
        ((0.0, 0.01, 10), math.inf, 1.0),
        ((0, 1, 1), math.inf, 1.0),
        ((0.0, 0.01, 0), 0.0, 0.0),
        ((1.0, 0.0, 10), 0.0, 0.0),
        ((0.0, 0.0, 10), 0.0, 0.0),
        ((math.inf, 0.5, 10), 0.0, 0.0),
    ],
    ids=["no-noise", "whole", "no-steps", "no-sampling", "neither", "all-noise"],
)
@pytest.mark.filterwarnings("ignore:accountant='gdp'")
def test_the_edges_of_every_accountant(kind, phase, epsilon, delta):
    accountant = of(phase, kind=kind)
    assert accountant.get_epsilon(1e-5, interval=True) == (epsilon, epsilon)
    assert accountant.get_delta(1.0, interval=True) == (delta, delta)
    if epsilon == math.inf:
        beside = of(phase, (1.0, 0.1, 10), kind=kind)
        assert beside.get_epsilon(1e-5) == math.inf and beside.get_delta(1.0) == 1.0


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.mechanism())
@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ((-1.0, 0.1, 1), "noise_multiplier"),
        ((True, 0.1, 1), "noise_multiplier"),
        ((1.0, 1.1, 1), "sample_rate"),
        ((1.0, False, 1), "sample_rate"),
        ((1.0, 0.1, -1), "steps"),
        ((1.0, 0.1, 1.5), "steps"),
        ((1.0, 0.1, True), "steps"),
    ],
)
def test_a_bad_phase_is_refused_by_name(kind, phase, name):
    accountant = of(phase, kind=kind)
    for ask in (
        lambda: accountant.get_epsilon(1e-5),
        lambda: accountant.get_delta(1.0),
        lambda: accountant.get_beta(0.5),
        lambda: accountant.get_advantage(),
    ):
        with pytest.raises(ValueError, match=f"^{name}="):
            ask()
    if name != "steps":
        empty = of(kind=kind)
        with pytest.raises(ValueError, match=f"^{name}="):
            empty.step(noise_multiplier=phase[0], sample_rate=phase[1])
        assert empty.history == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.mechanism())
def test_a_bad_question_is_refused_by_name(kind):
    accountant = of((1.0, 0.1, 10), kind=kind)
    for delta in (0.0, 0, 1.0, 1, -1e-5, 2.0, math.nan, math.inf, "1e-5", True, None):
        with pytest.raises(ValueError, match="^delta="):
            accountant.get_epsilon(delta)
    for epsilon in (-0.1, math.inf, math.nan, "1", True, None):
        with pytest.raises(ValueError, match="^epsilon="):
            accountant.get_delta(epsilon)
    for alpha in (-0.1, 1.1, math.nan, "0.5", False, None):
        with pytest.raises(ValueError, match="^alpha="):
            accountant.get_beta(alpha)
    with pytest.raises(ValueError, match="^neighboring_relation='any'"):
        kind(neighboring_relation="any")


@pytest.mark.parametrize("noise", [1e-3, 1e-100, 1e10, 1e100])
def test_beyond_reach_the_gaussian_bounds_remain(noise):
    lower, upper = of((noise, 0.5, 10)).get_epsilon(1e-5, interval=True)
    assert lower == 0 <= upper
    assert upper == gaussian_epsilon(delta=1e-5, noise_multiplier=noise, steps=10)


def test_the_claimed_error_holds_what_a_finer_rule_finds():
    # A line's value at its coarsest step differs from its finest by less than it claims.
    pairs = canonical([(Pair(0.6, 0.05), 20), (Pair(2.0, 0.3), 5)])
    axis = RealAxis(pairs, REMOVE, 1e-6)
    for epsilon in (0.5, 3.0, 8.0):
        truth = module._delta_of(pairs, REMOVE, epsilon)
        for contour in axis.contours(epsilon):
            line = integral_along(pairs, contour, True)
            for level in range(3):
                value, _, rounding, strip = line._sum(epsilon, level)
                assert value - rounding - strip <= truth.upper
                assert truth.lower <= value + rounding + strip


@pytest.mark.parametrize("step", [0.25, 0.5])
def test_a_coarse_rule_admits_by_how_much_it_errs(step, monkeypatch):
    pairs = ((Pair(1.0, 0.01), 1000),)
    truth = module._delta_of(pairs, REMOVE, 1.8).upper
    contour = next(RealAxis(pairs, REMOVE, 1e-6).contours(1.8))
    monkeypatch.setattr(contour_integral.Contour, "step", lambda self, level: step)
    contour_integral._known_cumulants.cache_clear()
    try:
        value, _, rounding, strip = contour_integral.ContourIntegral(pairs, contour, True)._sum(
            1.8, 0
        )
    finally:
        contour_integral._known_cumulants.cache_clear()
    wrong = abs(value - truth)
    assert 1e-9 * truth < wrong <= strip + rounding
    assert rounding < 0.1 * wrong


def test_what_is_cut_is_counted():
    pairs = ((Pair(5.0, 0.1), 1000),)
    assert cut_probability(pairs, None) == 0
    assert cut_probability(pairs, 8.0) == pytest.approx(2000 * float(ndtr(-8.0)))
    # A cut at 3 standard deviations leaves much out, and the interval says so.
    axis = RealAxis(pairs, REMOVE, 1e-6)
    axis.cut = 3.0
    truth = module._delta_of(pairs, REMOVE, 1.0)
    found = [contour for contour in axis.contours(1.0) if contour.cut == 3.0]
    assert found
    for contour in found:
        value, error, _ = integral_along(pairs, contour, True).delta(1.0)
        assert not error < cut_probability(pairs, 3.0)
        assert not value + error < truth.lower


def test_a_lines_error_counts_cut_and_rounding(monkeypatch):
    pairs = ((Pair(5.0, 0.1), 1000),)
    contour = next(RealAxis(pairs, REMOVE, 1e-6).contours(1.0))
    plain = contour_integral.ContourIntegral(pairs, dataclasses.replace(contour, cut=None), True)
    value, _, rounding, _ = plain._sum(1.0, 0)
    # The integrand itself is known to its cumulant's rounding at best.
    assert 1000 * 2.0**-54 * value < rounding < 1e-6 * value
    cut = contour_integral.ContourIntegral(pairs, dataclasses.replace(contour, cut=7.0), True)
    assert cut._sum(1.0, 0)[2] >= cut_probability(pairs, 7.0) > rounding
    # Where the line ends early, what is left of it counts.
    monkeypatch.setattr(contour_integral, "_LAST", 1.0)
    short = contour_integral.ContourIntegral(
        pairs, dataclasses.replace(contour, cut=None, width=7), True
    )
    found, _, rounding, _ = short._sum(1.0, 0)
    assert abs(found - value) <= rounding


def test_chernoffs_bound_counts_what_is_cut(monkeypatch):
    pairs = ((Pair(5.0, 0.1), 1000),)
    axis = RealAxis(pairs, REMOVE, 1e-6)
    before = axis.delta_bound(pairs, 3.0), axis.epsilon_bound(pairs, 1e-6)
    monkeypatch.setattr(contour_integral, "cut_probability", lambda pairs, cut: 5e-7)
    assert axis.delta_bound(pairs, 3.0) == pytest.approx(before[0] + 5e-7, rel=1e-6)
    assert axis.epsilon_bound(pairs, 1e-6) > before[1]


def test_chernoffs_bound_is_one():
    for phase in ((1.0, 0.01, 1000), (4.0, 0.3, 50)):
        pairs = of(phase)._pairs()
        for side in (REMOVE, ADD):
            axis = RealAxis(pairs, side, 1e-6)
            truth = module._delta_of(pairs, side, 0.8)
            assert truth.lower <= axis.delta_bound(pairs, 0.8) <= 30 * truth.upper
            bound = axis.epsilon_bound(pairs, 1e-6)
            assert module._delta_of(pairs, side, bound).lower <= 1e-6


def test_an_event_that_may_fail_is_never_given_less():
    event = TruncatedPoissonGaussian(
        noise_multiplier=1.0, sample_rate=0.01, max_batch_size=45, num_samples=1000
    )
    accountant = of()
    accountant.compose(event, 100)
    accountant.compose(Gaussian(noise_multiplier=20.0))
    plain = of((1.0, 0.01, 100), (20.0, 1.0, 1))
    assert accountant.get_epsilon(1e-6) > plain.get_epsilon(1e-6)
    assert accountant.get_delta(0.5) > plain.get_delta(0.5)
    assert accountant.get_advantage() > plain.get_advantage()
    assert accountant.get_beta(0.1) < plain.get_beta(0.1)
