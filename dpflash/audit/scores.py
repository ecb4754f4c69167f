"""White-box scores: one log-likelihood ratio for each membership that the auditor draws.

Two experiments, by the sample rate q of the audited run:

- q = 1. Every canary's membership is drawn anew before each release, by a fair coin that is kept
  from the engine; a canary that is out has loss 0 ("zero_out"). A release depends on the coins of
  its own step alone, so each of the steps x canaries memberships is protected by one release, and
  that is the claim: one Gaussian mechanism. The score of y, the release's product with the
  canary's direction over max_grad_norm, is (2 y - 1) / (2 sigma^2).
- q < 1. Membership is drawn once: the dataset has the canaries whose coin said so, and the engine
  draws its batches from them ("add_remove"). Each of the canaries' memberships is protected by
  all releases together, and that is the claim: `steps` Poisson-subsampled Gaussian mechanisms.
  The score is the sum over the steps of log(1 - q + q exp((2 y_t - 1) / (2 sigma^2))), the
  likelihood ratio of the whole run. Of the steps x canaries products one score a canary remains:
  the products of one canary share its coin, and no independent claim covers each.

In both the coins are fair and independent, which the one-run bound needs, and the scores are
independent given the coins, which the verdict and the Gaussian bound need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpflash.accounting import Accountant, Event, create_accountant

from ..config import PerformanceConfig, PrivacyConfig
from .bounds import Claim, Plan
from .releases import NewEngine, Run
from .strength import Strength, log_likelihood_ratio

if TYPE_CHECKING:
    from ..engine import PrivacyEngine

# Canaries, and releases of all of them, that are simulated to choose the cuts.
_SIMULATED, _SIMULATED_RELEASES = 200_000, 8_000_000


@dataclass(frozen=True)
class Scored:
    """Scores of canaries, and what they are compared with."""

    scores: NDArray[np.float64]  # `[N]`, log-likelihood ratios
    included: NDArray[np.bool_]  # `[N]`, which canaries were in
    claim: Claim  # for one of them
    charged: float  # epsilon of all releases, as the engine has charged them
    due: float  # epsilon of all releases, as the claim composes
    epsilon_lower: float  # lower bound on the claim's epsilon, see `dpflash.audit.strength`


def score(
    new_engine: NewEngine,
    privacy: PrivacyConfig,
    performance: PerformanceConfig,
    *,
    canaries: int,
    delta: float,
    confidence: float,
    rng: np.random.Generator,
    device: str = "cpu",
    progress: Callable[[], object] = lambda: None,
) -> Scored:
    """Run the engine on canaries and score them; steps_per_epoch is the number of releases.

    Where one run is too short for a tight bound, further runs have all canaries in the data.
    `progress` is called after each release.
    """
    rate, noise, steps = numbers_of(privacy)
    anew = rate == 1
    coins = rng.random(canaries) < 0.5
    # An engine needs an entry: where no canary is in, the first one, with loss 0.
    numbers = None if anew or not coins.any() else np.flatnonzero(coins)
    engine = new_engine()
    run = Run(engine, privacy, performance, canaries=canaries, numbers=numbers, device=device)
    run.dataset.include(coins)
    strength = Strength(noise, rate)
    total, scores, included = np.zeros(canaries), [], []
    for y in _products(run, privacy.bound):
        found = log_likelihood_ratio(y, noise, rate)
        strength.note(y, coins)
        if anew:
            scores.append(found)
            included.append(coins)
            coins = rng.random(canaries) < 0.5
            run.dataset.include(coins)
        else:
            total += found
        progress()
    for _ in range(strength.further_runs(canaries, steps)):
        whole_run = Run(new_engine(), privacy, performance, canaries=canaries, device=device)
        for y in _products(whole_run, privacy.bound):
            strength.note(y, np.ones(canaries, dtype=bool))
            progress()
    once, whole = (_composed(engine, run.loader.plan.event(noise), n) for n in (1, steps))
    limit, lower = strength.noise_multiplier(confidence), 0.0
    if math.isfinite(limit):
        found_event = run.loader.plan.event(limit)
        lower = float(_composed(engine, found_event, 1 if anew else steps).get_epsilon(delta))
    return Scored(
        scores=np.concatenate(scores) if anew else total,
        included=np.concatenate(included) if anew else coins,
        claim=Claim(once if anew else whole, delta, _in_words(privacy)),
        charged=engine.get_epsilon(delta),
        due=float(whole.get_epsilon(delta)),
        epsilon_lower=lower,
    )


def _products(run: Run, bound: float) -> Iterator[NDArray[np.float64]]:
    """`[canaries]` of each release: its product with a canary's direction, over the bound."""
    direction = run.bounds / math.sqrt(float((run.bounds**2).sum())) / bound
    for release in run.releases():
        yield direction @ release.sums


def numbers_of(privacy: PrivacyConfig) -> tuple[float, float, int]:
    """(sample rate, noise multiplier, number of releases)."""
    rate, noise = privacy.sample_rate, privacy.noise_multiplier
    steps = privacy.steps_per_epoch
    assert rate is not None and noise is not None and steps is not None
    return rate, noise, steps


def _composed(engine: PrivacyEngine, event: Event, count: int) -> Accountant:
    """An accountant of the engine's kind that has composed `count` events."""
    name = type(engine.accountant).mechanism()
    accountant = create_accountant(name, neighboring_relation=event.relation)
    accountant.compose(event, count)
    return accountant


def _in_words(privacy: PrivacyConfig) -> str:
    rate, noise, steps = numbers_of(privacy)
    if rate == 1:
        return f"one release, noise multiplier {noise:g}, no subsampling"
    return f"{steps} releases, noise multiplier {noise:g}, Poisson sampling at rate {rate:g}"


def plan_for(
    privacy: PrivacyConfig,
    canaries: int,
    *,
    delta: float,
    confidence: float,
    rng: np.random.Generator,
) -> Plan:
    """The plan for scores of the claimed mechanism, by simulating it."""
    rate, noise, steps = numbers_of(privacy)
    releases = 1 if rate == 1 else steps
    count = min(_SIMULATED, max(2_000, _SIMULATED_RELEASES // releases))
    included = rng.random(count) < 0.5
    scores = np.zeros(count)
    for _ in range(releases):
        drawn = included & (rng.random(count) < rate)
        scores += log_likelihood_ratio(drawn + noise * rng.standard_normal(count), noise, rate)
    return Plan.of_scores(scores, included, canaries=canaries, delta=delta, confidence=confidence)
