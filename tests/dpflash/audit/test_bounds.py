"""Statistics of an audit, on scores whose law is known."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import beta, binom

from dpflash.accounting import ContourAccountant, Gaussian, PoissonGaussian
from dpflash.audit.bounds import (
    Claim,
    Plan,
    assess,
    one_run_epsilon,
    one_run_p_value,
    upper_limit,
)
from dpflash.audit.scores import log_likelihood_ratio, plan_for
from dpflash.config import PrivacyConfig

DELTA = 1e-5


def claim_of(noise_multiplier, *, rate=1.0, steps=1):
    accountant = ContourAccountant()
    event = PoissonGaussian(noise_multiplier=noise_multiplier, sample_rate=rate)
    accountant.compose(event, steps)
    return Claim(accountant, DELTA, "claimed")


def gaussian_scores(rng, count, noise_multiplier):
    included = rng.random(count) < 0.5
    y = included + noise_multiplier * rng.standard_normal(count)
    return log_likelihood_ratio(y, noise_multiplier, 1.0), included


def plan_of(noise_multiplier, count, *, rate=1.0, steps=1):
    privacy = PrivacyConfig(
        max_grad_norm=1.0,
        noise_multiplier=noise_multiplier,
        sample_rate=rate,
        steps_per_epoch=steps,
    )
    rng = np.random.default_rng(1)
    return plan_for(privacy, count, delta=DELTA, confidence=0.95, rng=rng)


def test_upper_limit_is_exact():
    for successes, trials, level in ((0, 10, 0.05), (3, 10, 0.01), (999, 1000, 0.3)):
        limit = upper_limit(successes, trials, level)
        assert limit == pytest.approx(beta.ppf(1 - level, successes + 1, trials - successes))
        # At the limit so few successes have just this probability.
        assert binom.cdf(successes, trials, limit) == pytest.approx(level)
    assert upper_limit(10, 10, 0.05) == 1.0
    assert upper_limit(0, 0, 0.05) == 1.0


def test_p_value_of_guesses_is_the_formula_of_the_paper():
    for guesses, epsilon, delta in itertools.product((1, 7, 30), (0.0, 0.5, 3.0), (0.0, 1e-3)):
        law = binom(guesses, 1 / (1 + math.exp(-epsilon)))
        probabilities = law.pmf(np.arange(guesses + 1))
        for correct in range(1, guesses + 1):
            terms = [
                sum(probabilities[correct - j] for j in range(1, i + 1)) / i
                for i in range(1, correct + 1)
            ]
            expected = law.sf(correct - 1) + 2 * 100 * delta * max(terms)
            found = one_run_p_value(
                correct=correct, guesses=guesses, canaries=100, epsilon=epsilon, delta=delta
            )
            assert found == pytest.approx(min(1.0, expected), rel=1e-9)


def test_no_mechanism_of_pure_epsilon_beats_the_one_run_bound_more_often_than_stated():
    """Randomized response is the worst case; 200 runs, false-alarm rate of this test 1e-6."""
    rng = np.random.default_rng(0)
    epsilon, canaries = 1.0, 500
    correct = rng.binomial(canaries, 1 / (1 + math.exp(-epsilon)), 200)
    above = sum(
        one_run_epsilon(
            correct=int(c), guesses=canaries, canaries=canaries, delta=0.0, confidence=0.9
        )
        > epsilon
        for c in correct
    )
    assert 0 < above <= binom.isf(1e-6, 200, 0.1)  # above 0: the bound is tight


def test_a_mechanism_that_publishes_a_canary_with_probability_delta_is_no_violation():
    """Name and shame: each canary's bit is published with probability delta, else nothing is."""
    rng = np.random.default_rng(0)
    canaries, delta = 1000, 0.01
    for _ in range(50):
        published = rng.random(canaries) < delta
        guesses = 50
        correct = min(guesses, int(published.sum()))
        correct += int(rng.binomial(guesses - correct, 0.5))
        value = one_run_p_value(
            correct=correct, guesses=guesses, canaries=canaries, epsilon=1e-9, delta=delta
        )
        assert value > 0.001


def test_one_run_epsilon_is_where_the_p_value_is_one_minus_the_confidence():
    counts = {"correct": 90, "guesses": 100, "canaries": 1000}
    epsilon = one_run_epsilon(**counts, delta=DELTA, confidence=0.95)
    assert one_run_p_value(**counts, epsilon=epsilon, delta=DELTA) == pytest.approx(0.05, abs=1e-6)
    assert one_run_epsilon(**(counts | {"correct": 50}), delta=DELTA, confidence=0.95) == 0
    assert one_run_epsilon(correct=0, guesses=0, canaries=9, delta=DELTA, confidence=0.95) == 0


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
def test_bounds_of_the_gaussian_mechanism_are_as_tight_as_promised(epsilon):
    from dpflash.accounting import get_noise_multiplier

    noise = get_noise_multiplier(
        target_epsilon=epsilon, target_delta=DELTA, sample_rate=1.0, steps=1
    )
    scores, included = gaussian_scores(np.random.default_rng(0), 100_000, noise)
    claim = claim_of(noise)
    found = assess(
        scores, included, plan_of(noise, len(scores)), claim,
        confidence=0.95, false_alarm_rate=1e-3,
    )  # fmt: skip
    assert not found.refuted
    assert 0.8 * epsilon <= found.epsilon_lower_gaussian <= epsilon
    assert 0.45 * epsilon <= found.epsilon_lower <= epsilon


@pytest.mark.parametrize("independent", [True, False])
def test_honest_scores_are_accused_no_more_often_than_stated(independent):
    """100 runs at a stated rate of 5%; the bounds hold at 95%. Each count fails at most 1e-4."""
    rng = np.random.default_rng(0)
    noise, runs = 0.8, 100
    claim, plan = claim_of(noise), plan_of(noise, 500)
    accused = too_high = too_high_gaussian = 0
    for _ in range(runs):
        scores, included = gaussian_scores(rng, 500, noise)
        found = assess(
            scores, included, plan, claim,
            confidence=0.95, false_alarm_rate=0.05, independent=independent,
        )  # fmt: skip
        accused += bool(found.refuted)
        too_high += found.epsilon_lower > claim.epsilon
        too_high_gaussian += found.epsilon_lower_gaussian > claim.epsilon
    most = binom.isf(1e-4, runs, 0.05)
    assert max(accused, too_high, too_high_gaussian) <= most


@pytest.mark.parametrize("less", [0.5, 0.9])
def test_scores_of_a_mechanism_with_less_noise_are_refuted(less):
    noise = 1.0
    rng = np.random.default_rng(0)
    included = rng.random(100_000) < 0.5
    y = included + less * noise * rng.standard_normal(len(included))
    scores = log_likelihood_ratio(y, noise, 1.0)
    found = assess(
        scores, included, plan_of(noise, len(scores)), claim_of(noise),
        confidence=0.95, false_alarm_rate=1e-3,
    )  # fmt: skip
    assert "the claim allows no less" in found.refuted


def test_a_leak_of_few_canaries_is_refuted_though_the_middle_cut_does_not_show_it():
    """One canary in 50 is published outright, at a claim of delta 1e-5."""
    noise = 5.0
    rng = np.random.default_rng(0)
    scores, included = gaussian_scores(rng, 20_000, noise)
    leaked = rng.random(len(scores)) < 0.02
    scores[leaked] = np.where(included[leaked], 50.0, -50.0)
    found = assess(
        scores, included, plan_of(noise, len(scores)), claim_of(noise),
        confidence=0.95, false_alarm_rate=1e-3,
    )  # fmt: skip
    assert found.refuted


def test_claimed_curve_is_never_above_the_accountants_and_close_to_it():
    for claim in (claim_of(1.0), claim_of(2.3, rate=0.125, steps=256)):
        for rate in (0.0, 1e-3, 0.3):
            exact = claim.accountant.get_beta(rate)
            assert exact * (1 - 2e-3) - 1e-9 <= claim.least_false_negatives(rate)
            assert claim.least_false_negatives(rate) <= exact * (1 + 1e-9) + 1e-12


def test_scores_of_a_poisson_run_are_its_log_likelihood_ratios():
    noise, rate, steps = 0.7, 0.3, 5
    y = np.random.default_rng(0).normal(size=(steps, 4))
    density = lambda z, mean: np.exp(-((z - mean) ** 2) / (2 * noise**2))  # noqa: E731
    inside = (1 - rate) * density(y, 0) + rate * density(y, 1)
    expected = np.log(inside / density(y, 0)).sum(0)
    found = log_likelihood_ratio(y, noise, rate).sum(0)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # Tiny noise does not overflow.
    assert np.isfinite(log_likelihood_ratio(np.array([-9.0, 0.0, 9.0]), 1e-3, 0.01)).all()


@pytest.mark.parametrize("independent", [True, False])
def test_a_plan_of_other_scores_accuses_honest_runs_no_more_often_than_stated(independent):
    """No signal at all, 100 runs at a stated rate of 5%; the test fails at most 1e-4 of seeds."""
    rng = np.random.default_rng(0)
    accountant = ContourAccountant()
    accountant.compose(Gaussian(noise_multiplier=1e4))
    claim, accused = Claim(accountant, DELTA, "nothing"), 0
    for _ in range(100):
        scores, included = rng.standard_normal(400), rng.random(400) < 0.5
        plan = Plan.of_scores(
            scores[200:], included[200:], canaries=200, delta=DELTA, confidence=0.5
        )
        found = assess(
            scores[:200], included[:200], plan, claim,
            confidence=0.95, false_alarm_rate=0.05, independent=independent,
        )  # fmt: skip
        accused += bool(found.refuted)
    assert accused <= binom.isf(1e-4, 100, 0.05)


def test_a_plan_does_not_guess_one_canary_twice():
    """Neither where scores are separated nor where they overlap."""
    rng = np.random.default_rng(0)
    included = rng.random(200) < 0.5
    for scores in (included + 0.1 * rng.random(200), rng.standard_normal(200)):
        plan = Plan.of_scores(scores, included, canaries=200, delta=DELTA, confidence=0.95)
        assert 0 < plan.positive and 0 < plan.negative
        assert plan.positive + plan.negative <= 200
