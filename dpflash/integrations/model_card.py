"""What a trainer writes beside a model: the card's section on privacy, and the run's report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._json import finite
from ..clipping.planner import clipping_for
from ..config import PerformanceConfig, PrivacyConfig
from ..engine import PrivacyEngine
from ..optimizer import PrivateOptimizer
from ..privacy.card import TITLE, follow_umask, privacy_section, versions, weights_digest
from ..privacy.ledger import Ledger
from ..privacy.ledger_runs import epsilon_by_run
from ..sampling.loader import PrivateDataLoader

REPORT = "report.json"


def write_card_and_report(folder: Path, report: dict[str, Any]) -> None:
    """Write report.json, and the section of README.md, or replace it."""
    follow_umask(folder)
    report = {**report, "weights": weights_digest(folder)}
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.exists() else "# Model card\n"
    before, is_there, old = before.partition(f"{TITLE}\n")
    # The first section, after the introduction of the model.
    parts = (f"\n{old}" if is_there else before).partition("\n## ")
    before = before if is_there else parts[0]
    section = "\n".join(privacy_section(report, report["config"]["unit"]))
    after = f"\n{(parts[1] + parts[2]).lstrip()}" if parts[1] else ""
    card.write_text(f"{before.rstrip()}\n\n{section}{after}", encoding="utf-8")


def report_of(
    engine: PrivacyEngine,
    loader: PrivateDataLoader,
    optimizer: PrivateOptimizer,
    privacy: PrivacyConfig,
    performance: PerformanceConfig,
    base: str,
) -> dict[str, Any]:
    """What `dpflash train` has in its report, without the values that epsilon does not cover.

    Args:
        engine, loader, optimizer, privacy, performance: of the run.
        base: the name of the pretrained model; empty for a new one.
    """
    assert privacy.target_delta is not None
    plan, steps = loader.plan, optimizer.releases
    public = engine.public.as_dict()
    del public["lengths"]  # unless it is declared, it says whether drawn samples differ
    ledgers = [] if engine.ledger is None else [Ledger(engine.ledger)]
    releases = ledgers[0].releases if ledgers else steps
    report = {
        "epsilon": engine.get_epsilon(privacy.target_delta),
        "delta": privacy.target_delta,
        "neighboring_relation": engine.neighboring_relation,
        "privacy_unit": engine.public.unit,
        "sampler": loader.sampler_name,
        "accountant": engine.accountant.mechanism(),
        "noise_multiplier": optimizer.noise_multiplier,
        "bands": plan.bands,
        "noise_coefficients": (1.0,) if plan.mechanism is None else plan.mechanism.coefficients,
        "max_grad_norm": optimizer.max_grad_norm,
        "clipping": clipping_for(
            performance.optimize, privacy.clipping, performance.grad_sample_mode
        ),
        "sample_rate": plan.sample_rate,
        "expected_batch_size": plan.expected_batch_size,
        "public": public,
        "steps": steps,
        "lost_steps": releases - steps,
        "ledger_head": engine.ledger_head,
        "by_run": epsilon_by_run(ledgers, privacy.target_delta, engine.accountant.mechanism()),
        "seeded": engine.seed is not None,
        "versions": versions(),
        "config": {"unit": plan.unit.split(": ")[-1], "model": Path(base).name or None},
    }
    return {key: finite(value) for key, value in report.items()}
