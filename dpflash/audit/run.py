"""Runs an audit (scores and named checks) with new engines that have the audited settings."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dpflash.accounting import Accountant

from .._validate import positive_int, probability
from ..config import PerformanceConfig, PrivacyConfig, resolved
from ..privacy.privacy_unit import SAMPLE
from ..refusal import warn
from .bounds import LEAST_CANARIES, Assessment, Claim, Plan, assess
from .checks import (
    Check,
    Drawn,
    check_charges,
    check_contributions,
    check_inclusions,
    check_lattice,
    check_noise_correlation,
    check_noise_lags,
    check_noise_scale,
    check_repeats,
    check_same,
)
from .probes import Prober, Probes
from .ranks import Audited, RankFindings, RankProbes
from .releases import mechanism_of
from .report import BLACK_BOX, SCORE_FALSE_ALARMS, WHITE_BOX, AuditReport
from .scores import numbers_of, plan_for, releases_of, score
from .strength import Strength

# Warn if the mean score of canaries in the data is this many standard errors below the others'.
_REVERSED = 5.0
_CURVE = np.concatenate([[0.0], np.geomspace(1e-4, 0.1, 12), np.linspace(0.15, 1.0, 18)])


def auditable(
    privacy: PrivacyConfig, performance: PerformanceConfig, *, sample_rate: float, steps: int
) -> tuple[PrivacyConfig, PerformanceConfig]:
    """Adapt the settings to the audit's own models; refuse settings that cannot be audited.

    Settings for the user's model, data or loop are reset: public_length, allow_buffers,
    loss_reduction, unit_of, dataset_size, budget, example, physical_batch_size, memory_budget,
    autocast and torch.compile. The joint bound replaces bounds of single groups.
    """
    positive_int(steps=steps)
    if privacy.sampling not in ("poisson", "cyclic_poisson"):
        raise ValueError(
            f"sampling={privacy.sampling!r}: the audit's claim is about Poisson sampling; audit "
            "a run with sampling='poisson' (sample_rate=1 for every sample in every batch)"
        )
    if privacy.max_batch_size is not None:
        raise ValueError(
            f"max_batch_size={privacy.max_batch_size}: the audit's datasets differ from yours in "
            "size, so truncation has another probability; audit the run without max_batch_size"
        )
    if not privacy.noise_multiplier:
        raise ValueError(
            f"noise_multiplier={privacy.noise_multiplier!r}: without noise there is no claim to "
            "audit; pass a number > 0"
        )
    if privacy.unit_sampling == "example":
        raise ValueError(
            f"unit_sampling={privacy.unit_sampling!r}: the audit's claim is about a unit that is "
            "sampled as a whole; audit a run with unit_sampling='unit', or without unit_of"
        )
    settings = resolved(replace(privacy, target_epsilon=None, target_delta=None), performance)
    privacy, performance = settings.privacy, settings.performance
    compiled = performance.optimize in ("balanced", "aggressive")
    return replace(
        privacy,
        max_grad_norm=privacy.bound,
        sample_rate=sample_rate,
        steps_per_epoch=steps,
        dataset_size=None,
        public_length=None,
        loss_reduction=None,
        unit_of=None,
        examples_per_unit=None,
        unit_name=None,
        budget=None,
        allow_buffers=(),
        example=None,
    ), replace(
        performance,
        physical_batch_size=None,
        memory_budget=None,
        optimize="conservative" if compiled else performance.optimize,
    )


def run_audit(
    audited: Audited,
    *,
    canaries: int,
    delta: float,
    confidence: float = 0.95,
    seed: int | None = None,
    ranks: bool = True,
    device: str = "cpu",
    progress: bool = False,
    privacy_unit: str = SAMPLE,
) -> AuditReport:
    """Run a white-box audit: canaries with orthogonal gradients, and the named checks.

    With sample_rate=1 there are steps x canaries scores, else one score for each canary, see
    `dpflash.audit.scores`. `confidence` is the confidence of each of the two bounds on epsilon.
    Without a seed, coins and keys are secret. With `ranks`, two ranks are probed too, in processes
    of their own. If a process fails, RankFailure is raised. The report shows `privacy_unit`.
    """
    positive_int(canaries=canaries)
    probability(delta=delta, confidence=confidence)
    _refuse_slow(str(audited.arguments.get("accountant")))
    privacy, performance = audited.privacy, audited.performance
    rate, noise, rounds = numbers_of(privacy)
    total = releases_of(privacy) * (1 + Strength(noise, rate).further_runs(canaries, rounds))
    rng = np.random.default_rng(seed)
    with (
        RankProbes(audited) if ranks else nullcontext() as started,
        tqdm(total=total, desc="audit", unit="release", disable=not progress) as bar,
    ):
        scored = score(
            audited.new_engine, privacy, performance,
            canaries=canaries, delta=delta, confidence=confidence, rng=rng, device=device,
            progress=bar.update,
        )  # fmt: skip
        bar.set_description("audit, named checks")
        prober = Prober(audited.new_engine, privacy, performance, device)
        probes, bands = prober.read(), mechanism_of(privacy).bands
        checks = [check_charges(scored.charged, scored.due), *named_checks(probes, rng, bands)]
        if started is not None:
            checks += rank_checks(started.read())
    plan = plan_for(privacy, len(scored.scores), delta=delta, confidence=confidence, rng=rng)
    assessment = assess(
        scored.scores, scored.included, plan, scored.claim,
        confidence=confidence, false_alarm_rate=SCORE_FALSE_ALARMS,
    )  # fmt: skip
    assessment = replace(assessment, epsilon_lower_gaussian=scored.epsilon_lower)
    return _report(
        scored.claim, assessment, checks=tuple(checks),
        confidence=confidence, canaries=canaries, steps=privacy.steps_per_epoch, mode=WHITE_BOX,
        seeded=seed is not None, privacy_unit=privacy_unit,
    )  # fmt: skip


def audit_losses(
    scores: NDArray[np.float64],
    included: NDArray[np.bool_],
    accountant: Accountant,
    *,
    steps: int,
    delta: float,
    confidence: float = 0.95,
    seed: int | None = None,
    privacy_unit: str = SAMPLE,
) -> AuditReport:
    """Run a black-box audit of a training run, by scores from losses of canary documents.

    Scores `[N]` are higher for canaries that look trained on. `included` `[N]` says which canaries
    were in the data; a fair coin for each canary decided this. The accountant has counted all
    releases. The cuts and the number of guesses are chosen on a random half of the canaries, and
    the other half is assessed. Losses of one model are dependent, so the verdict tests the number
    of right guesses alone. Warns if canaries in the data have clearly lower scores than others.
    """
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if scores.ndim != 1 or scores.shape != included.shape:
        raise ValueError(
            f"scores has shape {scores.shape} and included {included.shape}: expected shape [N] "
            "for both, one entry for each canary"
        )
    if included.dtype != np.bool_:
        raise ValueError(f"included has dtype {included.dtype}: expected bool for each canary")
    if not np.isfinite(scores).all():
        raise ValueError("scores contains values that are not finite; leave such canaries out")
    probability(delta=delta, confidence=confidence)
    _refuse_slow(type(accountant).mechanism())
    order = np.random.default_rng(seed).permutation(len(scores))
    first, second = np.array_split(order, 2)
    plan = Plan.of_scores(
        scores[first], included[first],
        canaries=len(second), delta=delta, confidence=confidence,
    )  # fmt: skip
    if not plan.positive + plan.negative:
        raise ValueError(
            f"included says that {included.sum()} of {len(included)} canaries were in the data: "
            "too few were in the data, or out of it, for guesses; pass at least "
            f"{LEAST_CANARIES} canaries, about half of them in the data"
        )
    _warn_if_reversed(scores[included], scores[~included])
    claim = Claim(accountant, delta, f"all {steps} releases of the run")
    assessment = assess(
        scores[second], included[second], plan, claim,
        confidence=confidence, false_alarm_rate=SCORE_FALSE_ALARMS, independent=False,
    )  # fmt: skip
    return _report(
        claim, assessment, checks=(),
        confidence=confidence, canaries=len(scores), steps=steps, mode=BLACK_BOX,
        seeded=seed is not None, privacy_unit=privacy_unit,
    )  # fmt: skip


def _warn_if_reversed(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> None:
    error = np.sqrt(inside.var() / len(inside) + outside.var() / len(outside))
    if inside.mean() - outside.mean() < -_REVERSED * error:
        warn(
            "scores of canaries that were in the data are clearly lower than the others, but the "
            "audit guesses that high scores were in the data. If scores are losses, pass minus "
            "the loss, or better the loss before training minus the loss after training",
        )


def _refuse_slow(mechanism: str) -> None:
    if mechanism == "prv":
        raise ValueError(
            "accountant='prv' needs half an hour to compute the claimed trade-off curve; audit "
            "with 'contour'"
        )


def named_checks(probes: Probes, rng: np.random.Generator, bands: int = 1) -> list[Check]:
    """Return the named checks that need no second rank; `bands` is the number of noise bands."""
    inclusions, divisor, noise = probes.inclusions, probes.divisor, probes.noise
    contributions = {
        "canaries in padding rows": probes.padding,
        "canaries in weights and biases": probes.layers,
        "canaries in packed neighbors": probes.packed,
        "canaries of two entries": probes.users,
    }
    included = np.rint(inclusions.units).astype(np.int64)
    checks = [
        check_inclusions("inclusion counts", Drawn.of(included, bands), inclusions.rate, rng),
        check_inclusions("draws of the sampler", probes.sampler, inclusions.rate, rng),
        *(
            check_contributions(name, read.units, read.drawn, read.std)
            for name, read in contributions.items()
        ),
        check_contributions(
            "divisor under a background sum",
            divisor.background,
            divisor.drawn.sum(1),
            divisor.background_std,
        ),
        check_noise_scale("noise scale", noise.vectors),
        check_noise_scale("noise of empty draws", probes.empty),
        check_noise_correlation(
            "noise across steps and parameters",
            noise.vectors.reshape(-1, noise.vectors.shape[-1]),
        ),
        check_noise_lags("noise of steps apart", noise.vectors),
        check_repeats(noise.alone, noise.std_in_steps),
    ]
    if noise.multiples is not None:
        checks.append(check_lattice(noise.multiples, noise.std_in_steps))
    return checks


def rank_checks(found: RankFindings) -> list[Check]:
    """Return the checks that need two ranks."""
    shards = found.shards
    return [
        check_noise_correlation("noise across ranks", found.own),
        check_noise_scale("noise scale, sharded tables", found.own),
        check_noise_scale("noise scale, whole tables", found.whole[0]),
        check_same("noise added once over ranks", *found.whole),
        check_contributions(
            "canaries across context shards", shards.units, shards.drawn, shards.std
        ),
    ]


def _report(claim: Claim, assessment: Assessment, **settings: Any) -> AuditReport:
    return AuditReport(
        claimed_epsilon=claim.epsilon,
        delta=claim.delta,
        claim=claim.mechanism,
        epsilon_lower=assessment.epsilon_lower,
        epsilon_lower_gaussian=assessment.epsilon_lower_gaussian,
        scores=assessment.scores,
        assessment=assessment,
        curve=tuple((float(x), claim.least_false_negatives(float(x))) for x in _CURVE),
        **settings,
    )
