"""Measures `dpflash audit`: how tight its bounds are, which bugs it detects, how often it errs.

    python benchmarks/scripts/audit_figures.py --out benchmarks/results/audit.json

`--part bounds` measures bounds of honest runs at delta 1e-5 and epsilon 1, 2, 4 and 8. Without
subsampling, there are 100,000 scores (1,000 canaries, 100 releases). With Poisson sampling at rate
1/8, there are 256 releases, and 4,000 or a million canaries. Seconds are CPU time of one thread.
`--part power` runs every seeded bug of `tests/dpflash/audit/seeded_bugs.py` 20 times and an honest
audit 100 times; `--part ranks` runs the bugs of two ranks 20 times. `--bug NAME` measures only the
rows of one bug again; NAME is "none" for honest audits.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dpflash.accounting import get_noise_multiplier
from dpflash.audit.checks import Check
from dpflash.audit.ranks import Audited, RankProbes
from dpflash.audit.report import AuditReport
from dpflash.audit.run import auditable, rank_checks, run_audit
from dpflash.config import PerformanceConfig, PrivacyConfig
from dpflash.engine import PrivacyEngine

ROOT = Path(__file__).resolve().parent.parent.parent
BUGS = ROOT / "tests" / "dpflash" / "audit"
PARTS = ("bounds", "power", "ranks")
DELTA, EPSILONS = 1e-5, (1.0, 2.0, 4.0, 8.0)
# Name of a claim -> (sample rate, releases, canaries, runs).
BOUNDS = {
    "100,000 scores, no subsampling": (1.0, 100, 1000, 3),
    "4,000 canaries, Poisson 1/8, 256 releases": (0.125, 256, 4000, 3),
    "1,000,000 canaries, Poisson 1/8, 256 releases": (0.125, 256, 1_000_000, 1),
}
# Settings of `power`: name -> (sample rate, releases); number of canaries; noise multiplier.
POWER, CANARIES, NOISE = {"no subsampling": (1.0, 4), "Poisson 1/8": (0.125, 16)}, 300, 1.0
OF_SAMPLING = ("shuffling", "sampling rate 1.1 times the claimed")


def audited(rate: float, steps: int, noise: float, bug: str | None = None) -> Audited:
    """Return the audited settings; `bug` applies only in the processes of ranks."""
    settings = auditable(
        PrivacyConfig(max_grad_norm=1.0, noise_multiplier=noise),
        PerformanceConfig(),
        sample_rate=rate,
        steps=steps,
    )
    engine: Any = PrivacyEngine
    if bug is not None:
        import seeded_bugs

        engine = functools.partial(seeded_bugs.engine_with, bug)
    return Audited(engine, {}, *settings)


def bounds() -> list[dict[str, Any]]:
    rows = []
    for name, (rate, steps, canaries, runs) in BOUNDS.items():
        for epsilon in EPSILONS:
            noise = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=DELTA,
                sample_rate=rate,
                steps=1 if rate == 1 else steps,
            )
            for number in range(runs):
                begin = time.process_time()
                what = audited(rate, steps, noise)
                report = run_audit(what, canaries=canaries, delta=DELTA, ranks=False)
                row = {
                    "claim": name,
                    "epsilon": epsilon,
                    "noise_multiplier": noise,
                    "run": number,
                    "scores": report.scores,
                    "gaussian_over_claim": report.epsilon_lower_gaussian / report.claimed_epsilon,
                    "free_over_claim": report.epsilon_lower / report.claimed_epsilon,
                    "ok": report.ok,
                    "seconds": time.process_time() - begin,
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def power(bug_runs: int, honest_runs: int, only: list[str] | None) -> list[dict[str, Any]]:
    """Count the failed audits of one process, for each bug and without bugs."""
    sys.path.insert(0, str(BUGS))
    import seeded_bugs

    rows = []
    for name, bug in {"none": None, **seeded_bugs.BUGS}.items():
        if only and name not in only:
            continue
        for setting, (rate, steps) in POWER.items():
            # Bugs of sampling need subsampling; other bugs run without subsampling.
            if bug is not None and (name in OF_SAMPLING) != (rate < 1):
                continue
            reports: list[AuditReport] = []
            for _ in range(honest_runs // len(POWER) if bug is None else bug_runs):
                with pytest.MonkeyPatch.context() as patch:
                    if bug is not None:
                        bug(patch.setattr)
                    what = audited(rate, steps, NOISE)
                    reports.append(run_audit(what, canaries=CANARIES, delta=DELTA, ranks=False))
            checks = [check for report in reports for check in report.checks]
            by_scores = sum(bool(report.assessment.refuted) for report in reports)
            rows.append(_row(name, setting, [r.ok for r in reports], checks, by_scores))
    return rows


def ranks(bug_runs: int) -> list[dict[str, Any]]:
    """Count the failed probes of two ranks, for each bug and without bugs."""
    sys.path.insert(0, str(BUGS))
    os.environ["PYTHONPATH"] = str(BUGS)
    import seeded_bugs

    rows = []
    for name in ("none", *seeded_bugs.RANK_BUGS):
        found = []
        for _ in range(bug_runs):
            with RankProbes(audited(1.0, 4, NOISE, None if name == "none" else name)) as started:
                found.append(rank_checks(started.read()))
        fine = [all(check.ok for check in checks) for checks in found]
        rows.append(_row(name, "two ranks", fine, [c for checks in found for c in checks], 0))
    return rows


def _row(
    bug: str, setting: str, fine: list[bool], checks: list[Check], by_scores: int
) -> dict[str, Any]:
    failed = [check.name for check in checks if not check.ok]
    row = {
        "bug": bug,
        "setting": setting,
        "runs": len(fine),
        "accused": fine.count(False),
        "by_scores": by_scores,
        "by_checks": {name: failed.count(name) for name in sorted(set(failed))},
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--bug-runs", type=int, default=20)
    parser.add_argument("--honest-runs", type=int, default=100)
    parser.add_argument("--bug", action="append", help="of power: only the rows of this bug")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    torch.set_num_threads(1)
    found["environment"] = {
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }
    kept = [row for row in found.get("power", []) if args.bug and row["bug"] not in args.bug]
    measure = {
        "bounds": bounds,
        "power": lambda: kept + power(args.bug_runs, args.honest_runs, args.bug),
        "ranks": lambda: ranks(args.bug_runs),
    }
    for part in args.part or PARTS:
        found[part] = measure[part]()
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
