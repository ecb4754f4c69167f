"""White-box scores: one log-likelihood ratio for each membership that the auditor draws.

The sample rate q of the audited run determines the experiment:

- q = 1. Every canary's membership is drawn anew before each release, by a fair coin that the
  engine does not see; a canary that is out has loss 0 ("zero_out"). A release depends on the coins
  of its own step alone. So each of the steps x canaries memberships is protected by one release,
  and the claim is the claim of one Gaussian mechanism. If y is the release's product with the
  canary's direction, divided by max_grad_norm, the score is (2 y - 1) / (2 sigma^2).
- q < 1. Membership is drawn once: the dataset has the canaries whose coin says "in", and the
  engine draws its batches from them ("add_remove"). Each canary's membership is protected by all
  releases together; the claim is the claim of `steps` Poisson-subsampled Gaussian mechanisms.
  The score is the sum over the steps t of log(1 - q + q exp((2 y_t - 1) / (2 sigma^2))), the
  log-likelihood ratio of the whole run. There is one score for each canary, not one for each of
  its products: a canary's products share its coin, and the claim is about all releases together.

With banded noise of b bands and coefficients c_i, the b parts of the data are sampled in turn, and
q is the sample rate inside the canary's part. Each release t that samples this part forms a round
with the b - 1 releases after it, and a round takes the place of one release. Let C be the banded
matrix of the c_i, and x the releases' products with the canary's direction, divided by
max_grad_norm. Then y is the sum over i < b of c_i (C x)_(t+i) / |c|^2, which is the canary's
contribution plus noise of standard deviation sigma, independent for each round. The run has b - 1
further releases to complete the last round of every part.

In both experiments the coins are fair and independent, as the one-run bound requires, and the
scores are independent given the coins, as the verdict and the Gaussian bound require.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dpflash.accounting import Accountant, Event, create_accountant

from ..config import PerformanceConfig, PrivacyConfig
from .bounds import Claim, Plan
from .releases import NewEngine, Run, mechanism_of
from .strength import Strength, log_likelihood_ratio

if TYPE_CHECKING:
    from ..engine import PrivacyEngine

# Limits of the simulation that chooses the cuts: canaries, and canaries times releases.
_SIMULATED, _SIMULATED_RELEASES = 200_000, 8_000_000


@dataclass(frozen=True)
class Scored:
    """Scores of canaries, and the claim to test with them."""

    scores: NDArray[np.float64]  # `[N]`, log-likelihood ratios
    included: NDArray[np.bool_]  # `[N]`, whether each canary was in the data
    claim: Claim  # the claim for the membership of one canary
    charged: float  # epsilon of all releases by the engine's accountant
    due: float  # epsilon of all releases, composed from the claimed mechanism
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
    """Run the engine for steps_per_epoch releases on canaries, and score the canaries.

    If one run is too short for a tight bound, further runs are made with all canaries in the
    data. `progress` is called after each release.
    """
    rate, noise, rounds = numbers_of(privacy)
    anew = rate == 1
    asked = replace(privacy, steps_per_epoch=releases_of(privacy))
    coins = rng.random(canaries) < 0.5
    # A dataset must not be empty: if no canary is in the data, all have entries with loss 0.
    numbers = None if anew or not coins.any() else np.flatnonzero(coins)
    engine = new_engine()
    run = Run(engine, asked, performance, canaries=canaries, numbers=numbers, device=device)
    run.dataset.include(coins)
    strength = Strength(noise, rate)
    total, scores, included = np.zeros(canaries), [], []
    for who, y, had in _products(run, privacy, coins, rng, anew=anew):
        found = log_likelihood_ratio(y, noise, rate)
        strength.note(y, had)
        if anew:
            scores.append(found)
            included.append(had)
        else:
            total[who] += found
        progress()
    everyone = np.ones(canaries, dtype=bool)
    for _ in range(strength.further_runs(canaries, rounds)):
        whole_run = Run(new_engine(), asked, performance, canaries=canaries, device=device)
        for _, y, had in _products(whole_run, privacy, everyone, rng):
            strength.note(y, had)
            progress()
    plan = run.loader.plan
    counts = 1, rounds, plan.events_of(releases_of(privacy))
    once, whole, due = (_composed(engine, plan.event(noise), count) for count in counts)
    limit, lower = strength.noise_multiplier(confidence), 0.0
    if math.isfinite(limit):
        count = 1 if anew else rounds
        lower = float(_composed(engine, plan.event(limit), count).get_epsilon(delta))
    return Scored(
        scores=np.concatenate(scores) if anew else total,
        included=np.concatenate(included) if anew else coins,
        claim=Claim(once if anew else whole, delta, _in_words(privacy)),
        charged=engine.get_epsilon(delta),
        due=float(due.get_epsilon(delta)),
        epsilon_lower=lower,
    )


_Products = tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]


def _products(
    run: Run,
    privacy: PrivacyConfig,
    coins: NDArray[np.bool_],
    rng: np.random.Generator,
    *,
    anew: bool = False,
) -> Iterator[_Products]:
    """After each release, yield `[n]` canaries whose round ends, their products y and their coins.

    `coins` `[canaries]` are the coins of the first release; `anew`: toss coins for each release.
    """
    mechanism = mechanism_of(privacy)
    bands, c = mechanism.bands, np.array(mechanism.coefficients)
    parts = _parts(run, bands, rng)
    direction = run.bounds / math.sqrt(float((run.bounds**2).sum())) / privacy.bound
    last: deque[NDArray[np.float64]] = deque(maxlen=bands)
    y, had = np.zeros(run.canaries), coins
    for number, release in enumerate(run.releases()):
        last.appendleft(direction @ release.sums)
        private = sum((k * x for k, x in zip(c, last, strict=False)), start=np.zeros_like(y))
        place = (number - parts) % bands
        y = np.where(place == 0, 0.0, y) + c[place] * private / (c @ c)
        had = np.where(place == 0, coins, had)
        who = np.flatnonzero((place == bands - 1) & (number >= parts + bands - 1))
        yield who, y[who], had[who]
        if anew:
            coins = rng.random(run.canaries) < 0.5
            run.dataset.include(coins)


def _parts(run: Run, bands: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return each canary's part p of the data, which releases p, p + bands, ... sample.

    If a canary is never sampled, it contributes to no release, and p is random.
    """
    parts = rng.integers(bands, size=run.canaries)
    if bands > 1:
        for number, drawn in enumerate(run.draws(run.loader.steps_per_epoch)):
            parts[run.dataset.numbers[drawn > 0]] = number % bands
    return parts


def numbers_of(privacy: PrivacyConfig) -> tuple[float, float, int]:
    """Return (sample rate in a part, noise multiplier, number of rounds of `bands` releases)."""
    rate, noise = privacy.sample_rate, privacy.noise_multiplier
    steps = privacy.steps_per_epoch
    assert rate is not None and noise is not None and steps is not None
    mechanism = mechanism_of(privacy)
    return mechanism.rate_of_part(rate), noise, -(-steps // mechanism.bands)


def releases_of(privacy: PrivacyConfig) -> int:
    """Return the number of releases that complete the rounds of every part."""
    bands = mechanism_of(privacy).bands
    return numbers_of(privacy)[2] * bands + bands - 1


def _composed(engine: PrivacyEngine, event: Event, count: int) -> Accountant:
    name = type(engine.accountant).mechanism()
    accountant = create_accountant(name, neighboring_relation=event.relation)
    accountant.compose(event, count)
    return accountant


def _in_words(privacy: PrivacyConfig) -> str:
    rate, noise, rounds = numbers_of(privacy)
    bands = mechanism_of(privacy).bands
    of = "" if bands == 1 else f" of {bands} releases with banded noise"
    one, several = ("release", "releases") if bands == 1 else ("round" + of, "rounds" + of)
    if rate == 1:
        return f"one {one}, noise multiplier {noise:g}, no subsampling"
    return f"{rounds} {several}, noise multiplier {noise:g}, Poisson sampling at rate {rate:g}"


def plan_for(
    privacy: PrivacyConfig,
    canaries: int,
    *,
    delta: float,
    confidence: float,
    rng: np.random.Generator,
) -> Plan:
    """Return the plan for scores of the claimed mechanism, from a simulation of the mechanism."""
    rate, noise, rounds = numbers_of(privacy)
    releases = 1 if rate == 1 else rounds
    count = min(_SIMULATED, max(2_000, _SIMULATED_RELEASES // releases))
    included = rng.random(count) < 0.5
    scores = np.zeros(count)
    for _ in range(releases):
        drawn = included & (rng.random(count) < rate)
        scores += log_likelihood_ratio(drawn + noise * rng.standard_normal(count), noise, rate)
    return Plan.of_scores(scores, included, canaries=canaries, delta=delta, confidence=confidence)
