"""The audit of a private run: `PrivacyEngine.audit`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from ..engine import PrivacyEngine
    from .report import AuditReport


def audit(
    engine: PrivacyEngine,
    *,
    steps: int | None = None,
    canaries: int = 1000,
    delta: float = 1e-5,
    confidence: float = 0.95,
    scores: ArrayLike | None = None,
    included: ArrayLike | None = None,
    seed: int | None = None,
    ranks: bool = True,
) -> AuditReport:
    """Test whether this engine's settings keep the epsilon that they claim.

    Without scores (white box), new engines train canaries: samples with orthogonal gradients. The
    new engines have this engine's accountant, noise, bound, clipping, sample rate and exactness.
    Its model and data are not used, and no epsilon is spent. With scores (black box), the training
    run itself is audited by the losses of canary documents in its data.

    Args:
        steps: number of releases of the claimed run; None for one epoch of the loader.
        canaries: number of canaries of the white-box audit; more canaries give tighter bounds.
        delta: the delta of the claim and of the bounds.
        confidence: the confidence of each of the two bounds on epsilon.
        scores: `[N]`, higher for canaries that look trained on, such as the loss before minus
            the loss after training. The claim is then the epsilon spent so far. Pass at
            least 240 scores; fewer may be too few for any guess.
        included: `[N]`, bool, required with scores: whether each canary was in the data. A fair
            coin for each canary must have decided this.
        seed: seed of a reproducible audit; None for secret keys and coins.
        ranks: whether to test two ranks too, in two processes that take some seconds.

    Returns:
        An `AuditReport` with `.ok`, the claimed epsilon, two lower bounds and the named checks;
        `print` shows it as a table. The audit is a test, not a proof.

    Raises:
        ValueError: no model is private, an argument is out of its range, there are too few
            canaries for a guess, or sampling is not Poisson.

    Source:
        Steinke, Nasr, Jagielski 2023; see `dpflash.audit.bounds`.
    """
    # Imported here: scipy's distributions and torch's FSDP take a second to import.
    from .ranks import Audited
    from .run import audit_losses, auditable, run_audit

    run = engine._described("audit")
    if (scores is None) != (included is None):
        raise ValueError("scores and included come together; pass both, or neither")
    if scores is not None:
        return audit_losses(
            np.asarray(scores, dtype=np.float64), np.asarray(included), engine.accountant,
            steps=run.step.releases, delta=delta, confidence=confidence, seed=seed,
            privacy_unit=engine.privacy_unit,
        )  # fmt: skip
    privacy, performance = auditable(
        replace(run.settings.privacy, noise_multiplier=run.step.options.noise_multiplier),
        run.settings.performance,
        sample_rate=run.loader.sample_rate or 1.0,
        steps=run.loader.steps_per_epoch if steps is None else steps,
    )
    arguments = {"accountant": type(engine.accountant).mechanism(), "seed": seed}
    return run_audit(
        Audited(type(engine), arguments, privacy, performance),
        canaries=canaries, delta=delta, confidence=confidence, seed=seed, ranks=ranks,
        device=str(next(run.model.parameters()).device), privacy_unit=engine.privacy_unit,
    )  # fmt: skip
