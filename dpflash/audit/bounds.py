"""Statistics of an audit: computes lower bounds on epsilon and a verdict from canaries' scores.

The higher a canary's score, the more likely it was in the data. If each canary was put into the
data by a fair coin, independent of the other coins, the scores give three statistics.

- The verdict: at fixed score thresholds (cuts), upper confidence limits (Clopper and Pearson) of
  false positive and false negative rates are compared with the claimed trade-off curve. It assumes
  scores that are independent given the coins, as with orthogonal gradients and independent noise.
- The Gaussian bound is the epsilon of the Gaussian trade-off curve through such limits at one cut.
  It assumes that the mechanism is Gaussian.
- The assumption-free bound: the auditor guesses that canaries with the highest scores were in the
  data, and canaries with the lowest scores were not. Too many right guesses refute an epsilon.

A `Plan` holds the cuts and the numbers of guesses. Never make it from the scores that it is
applied to.

Source:
    Steinke, Nasr, Jagielski 2023, Privacy Auditing with One (1) Training Run, section 5 and
    appendix D. Nasr et al. 2023, Tight Auditing of Differentially Private Machine Learning, for
    the Gaussian bound. Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235) test
    trade-off curves in one run without independent scores, which is not done here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, bdtrc, betaincinv, expit, ndtri

from dpflash.accounting import Accountant, gaussian_epsilon

# Each rate gives two cuts: one with this false positive rate, one with this false negative rate.
_TAILS = (0.5, 0.1, 0.01, 0.001)
_GUESS_TAILS = np.geomspace(0.4, 1e-4, 20)
# Least number of errors in a tail that a plan may use: the rate of fewer errors is uncertain.
_LEAST_COUNTED = 16
# With half of this number of canaries, all plans but 1 in 6,000 have guesses.
LEAST_CANARIES = 240
# A plan assumes a number of right guesses that is this many standard deviations below the mean.
_CAUTION = 2.0
_MOST_EPSILON = 64.0
_SPREADS = 12.0
# Grid of the claimed trade-off curve; it treats all error rates below _LEAST_DELTA as equal.
_LINES, _LEAST_DELTA, _STEEPEST = 129, 1e-8, 500.0


@dataclass(frozen=True)
class Claim:
    """The privacy that is claimed for one canary's membership."""

    accountant: Accountant  # an accountant that has composed the claimed mechanism
    delta: float  # the delta at which epsilon is claimed
    mechanism: str  # the claimed mechanism in words

    @property
    def epsilon(self) -> float:
        """The claimed epsilon at delta."""
        return float(self.accountant.get_epsilon(self.delta))

    def least_false_negatives(self, false_positives: float) -> float:
        """Return the least false negative rate that the claim allows at a false positive rate.

        Each (epsilon, delta) of the accountant bounds this rate from below by two lines, as in
        `Accountant.get_beta`. The result is the maximum of these lines over a grid of epsilons.
        """
        epsilons, kept = self._lines
        steep = kept - np.exp(epsilons) * false_positives
        flat = np.exp(-epsilons) * (kept - false_positives)
        found = float(max(0.0, steep.max(), flat.max()))
        return min(1.0 - false_positives, found)

    @cached_property
    def _lines(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        most = min(float(self.accountant.get_epsilon(_LEAST_DELTA)), _STEEPEST)
        epsilons = np.linspace(0.0, most, _LINES)
        deltas = [self.accountant.get_delta(float(epsilon)) for epsilon in epsilons]
        return epsilons, 1 - np.array(deltas)


@dataclass(frozen=True)
class Plan:
    """Score thresholds (cuts) and numbers of guesses, chosen without the assessed scores."""

    cuts: tuple[float, ...]  # scores at which false positives and false negatives are counted
    middle: float  # the cut from which the Gaussian bound is computed
    positive: int  # number of canaries, with the highest scores, guessed to be in the data
    negative: int  # number of canaries, with the lowest scores, guessed to be out of the data

    @classmethod
    def of_scores(
        cls,
        scores: NDArray[np.float64],
        included: NDArray[np.bool_],
        *,
        canaries: int,
        delta: float,
        confidence: float,
    ) -> Plan:
        """Choose a plan from scores `[N]`, to be applied to scores of `canaries` other canaries.

        If fewer than 40 of the N canaries are in the data, or out of it, the plan has no guesses.
        """
        inside, outside = np.sort(scores[included]), np.sort(scores[~included])
        if not len(inside) or not len(outside):
            return cls((0.0,), 0.0, 0, 0)
        cuts = {float(np.quantile(outside, 1 - tail)) for tail in _TAILS}
        cuts |= {float(np.quantile(inside, tail)) for tail in _TAILS}
        both = np.sort(scores)
        errors = _above(outside, both) - (1 - _above(inside, both))
        middle = float(both[np.abs(errors).argmin()])
        best, positive, negative = -1.0, 0, 0
        fewest = _LEAST_COUNTED / min(len(inside), len(outside))
        for tail in (tail for tail in _GUESS_TAILS if tail >= fewest):
            high = max(float(np.quantile(outside, 1 - tail)), middle)
            low = min(float(np.quantile(inside, tail)), middle)
            right = canaries / 2 * (_above(inside, high) + 1 - _above(outside, low))
            wrong = canaries / 2 * (_above(outside, high) + 1 - _above(inside, low))
            says_in = round(canaries / 2 * (_above(inside, high) + _above(outside, high)))
            guesses = round(right + wrong)
            luck = _CAUTION * math.sqrt(right * wrong / max(right + wrong, 1))
            found = one_run_epsilon(
                correct=max(int(right - luck), 0),
                guesses=guesses,
                canaries=canaries,
                delta=delta,
                confidence=confidence,
                rounds=12,
            )
            if found > best:
                best, positive, negative = found, says_in, guesses - says_in
        return cls(tuple(sorted({*cuts, middle})), middle, positive, negative)


def _above(ordered: NDArray[np.float64], cut: Any) -> Any:
    return 1 - np.searchsorted(ordered, cut) / len(ordered)


@dataclass(frozen=True)
class Cut:
    """Errors of the test "a canary was in the data if its score is at least `score`".

    Attributes:
        score: the score threshold.
        false_positives: of the canaries out of the data, the fraction with at least this score.
        false_negatives: of the canaries in the data, the fraction with a lower score.
        most_false_positives: upper confidence limit of the false positive rate.
        most_false_negatives: upper confidence limit of the false negative rate.
        claimed_false_negatives: the least rate that the claim allows at `most_false_positives`.
    """

    score: float
    false_positives: float
    false_negatives: float
    most_false_positives: float
    most_false_negatives: float
    claimed_false_negatives: float

    @property
    def breaks_claim(self) -> bool:
        """Whether the whole confidence region lies below the claimed trade-off curve."""
        return self.most_false_negatives < self.claimed_false_negatives


@dataclass(frozen=True)
class Assessment:
    """Errors, lower bounds on epsilon, and the verdict of a set of scores.

    Attributes:
        cuts: errors at each cut of the plan, with joint confidence limits.
        epsilon_lower: lower bound on epsilon that assumes nothing about the mechanism.
        epsilon_lower_gaussian: lower bound that assumes a Gaussian mechanism's trade-off curve.
        correct: number of right guesses.
        guesses: number of canaries whose membership was guessed.
        scores: number of scores that were assessed.
        refuted: the reason why the scores refute the claim; empty if they do not.
    """

    cuts: tuple[Cut, ...]
    epsilon_lower: float
    epsilon_lower_gaussian: float
    correct: int
    guesses: int
    scores: int
    refuted: str


def assess(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    plan: Plan,
    claim: Claim,
    *,
    confidence: float,
    false_alarm_rate: float,
    independent: bool = True,
) -> Assessment:
    """Compute errors at the plan's cuts, lower bounds on epsilon, and the verdict on scores `[N]`.

    Fair coins must have decided which canaries were in the data. A true claim is refuted with a
    probability of at most `false_alarm_rate`. Pass `independent` if an honest mechanism's scores
    are independent given `included`: the rates at the cuts are compared with the claimed curve.
    Otherwise the number of right guesses is compared with (epsilon, delta), a weaker test.
    """
    inside, outside = np.sort(scores[included]), np.sort(scores[~included])
    # Divide the rate among the two limits at each cut.
    limit = false_alarm_rate / (2 * len(plan.cuts))
    cuts = tuple(_cut(inside, outside, score, limit, claim) for score in plan.cuts)
    middle = _cut(inside, outside, plan.middle, (1 - confidence) / 2, None)
    # The Gaussian trade-off curve through the upper limits of both rates.
    mu = -float(ndtri(middle.most_false_positives) + ndtri(middle.most_false_negatives))
    lower = gaussian_epsilon(delta=claim.delta, noise_multiplier=1 / mu) if mu > 0 else 0.0
    order = np.argsort(scores, kind="stable")
    positive = order[len(order) - plan.positive :]
    negative = order[: plan.negative]
    correct = int(included[positive].sum() + (~included[negative]).sum())
    counts = {
        "correct": correct,
        "guesses": plan.positive + plan.negative,
        "canaries": len(scores),
    }
    if independent:
        broken = (
            f"at the cut {c.score:.4g} false positives are at most {c.most_false_positives:.3g} "
            f"and false negatives at most {c.most_false_negatives:.3g}; the claim allows no less "
            f"than {c.claimed_false_negatives:.3g}"
            for c in cuts
            if c.breaks_claim
        )
        refuted = next(broken, "")
    else:
        value = one_run_p_value(**counts, epsilon=claim.epsilon, delta=claim.delta)
        right = f"{correct} of {counts['guesses']} guesses are right (p {value:.2g})"
        refuted = right if value <= false_alarm_rate else ""
    return Assessment(
        cuts=cuts,
        epsilon_lower=one_run_epsilon(**counts, delta=claim.delta, confidence=confidence),
        epsilon_lower_gaussian=lower,
        correct=correct,
        guesses=counts["guesses"],
        scores=len(scores),
        refuted=refuted,
    )


def _cut(
    inside: NDArray[np.float64],
    outside: NDArray[np.float64],
    score: float,
    limit: float,
    claim: Claim | None,
) -> Cut:
    """Return errors at one cut. Each upper limit is too low with probability <= `limit`."""
    positives = len(outside) - int(np.searchsorted(outside, score))
    negatives = int(np.searchsorted(inside, score))
    most = upper_limit(positives, len(outside), limit)
    return Cut(
        score=score,
        false_positives=positives / max(len(outside), 1),
        false_negatives=negatives / max(len(inside), 1),
        most_false_positives=most,
        most_false_negatives=upper_limit(negatives, len(inside), limit),
        claimed_false_negatives=math.nan if claim is None else claim.least_false_negatives(most),
    )


def upper_limit(successes: int, trials: int, level: float) -> float:
    """Return Clopper and Pearson's upper limit of a rate, too low with probability <= `level`."""
    if successes >= trials:
        return 1.0
    return float(betaincinv(successes + 1, trials - successes, 1 - level))


def one_run_p_value(
    *, correct: int, guesses: int, canaries: int, epsilon: float, delta: float
) -> float:
    """Return the largest probability of `correct` or more right guesses under the claim.

    With W ~ Binomial(guesses, 1 / (1 + e^-epsilon)) the result is P[W >= correct] + 2 * canaries *
    delta * max_i P[correct - i <= W < correct] / i. It holds even if the mechanism makes canaries
    dependent, and for any method that guesses a fixed number of memberships from its output.

    Args:
        correct: number of right guesses, in [0, guesses].
        guesses: number of canaries whose membership is guessed, at most `canaries`.
        canaries: number of canaries; each is in the data by a fair coin of its own.
        epsilon, delta: the claim, (epsilon, delta)-privacy of one canary's membership.

    Source:
        Steinke, Nasr, Jagielski 2023, section 5 and appendix D.
    """
    if correct <= 0:
        return 1.0
    right = float(expit(epsilon))
    # Do not search i above `far`. The probability of W below correct - far is negligible, so a
    # larger i only divides the same sum of probabilities by a larger number.
    spread = math.sqrt(guesses * right * (1 - right))
    far = correct - guesses * right + _SPREADS * spread + _SPREADS
    i = np.arange(1, min(correct, max(int(far), 1)) + 1)
    # i is at most correct, so the least argument is -1, which bdtr does not support.
    least = np.where(i < correct, bdtr(np.maximum(correct - 1 - i, 0), guesses, right), 0.0)
    below = bdtr(correct - 1, guesses, right) - least
    slack = 2 * canaries * delta * float((below / i).max())
    return min(1.0, float(bdtrc(correct - 1, guesses, right)) + slack)


def one_run_epsilon(
    *,
    correct: int,
    guesses: int,
    canaries: int,
    delta: float,
    confidence: float,
    rounds: int = 30,
) -> float:
    """Return a lower confidence bound on epsilon from the right guesses in one run.

    Args:
        correct, guesses, canaries, delta: see `one_run_p_value`.
        confidence: the confidence of the bound.
        rounds: steps of the binary search; the result is too low by at most 64 / 2^rounds.

    Returns:
        An epsilon >= 0. Smaller epsilons are refuted at this confidence.
    """

    def is_refuted(epsilon: float) -> bool:
        value = one_run_p_value(
            correct=correct, guesses=guesses, canaries=canaries, epsilon=epsilon, delta=delta
        )
        return value <= 1 - confidence

    low, high = 0.0, _MOST_EPSILON
    if not guesses or not is_refuted(low):
        return 0.0
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low
