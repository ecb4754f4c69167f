"""Writes the section of a model card on the privacy guarantee and on its limits."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .._json import finite
from .ledger import Ledger
from .ledger_runs import epsilon_by_run, facts_of
from .source import code_digest, library_version
from .spending import Spending, rounded_up

TITLE = "## Differential privacy"
CARD, REPORT = "README.md", "report.json"

_RELATIONS = {
    "zero_out": "of which one has nothing in place of a {unit} of the other (the number of "
    "{unit}s is public)",
    "add_remove": "of which one has one {unit} more than the other",
    "replace_one": "that differ in one {unit}",
}
_NOT_COVERED = (
    "Values computed from the private data before training, such as class weights, scalers, "
    "vocabularies and longest lengths.",
    "Training losses, speeds and the run's other files, such as its metrics, checkpoint and, of "
    "`dpflash train`, its report.",
    "Runs on the same data that are not listed above, whose epsilon adds to the one above "
    "(dpflash budget prints the sum), and the choice of this run or checkpoint among several.",
    "Data that the model was evaluated on; it did not train the model.",
    "People who appear as several {unit}s, or in the records of another {unit}: the guarantee is "
    "for one {unit}, and weaker for these people.",
    "The length of the longest text or sequence, which the model's input length may reveal if no "
    "length was declared (by `public_length`, `PadTo`, or `--dataset-size` of dpflash train).",
)
_OF_BASE = "The earlier training data of the base model"
_OF_RUNS = ", except in runs that the table of runs lists"
SEEDED = (
    "Whoever knows the seed of a seeded run can subtract that run's noise: for them, no row that "
    "includes the run holds."
)
_OF_OWN_LEDGER = "For the runs of its own ledger alone, the weights"


def privacy_section(
    report: Mapping[str, Any], unit: str, audit: Mapping[str, Any] | None = None
) -> list[str]:
    """Return the lines of the section, which begins with `TITLE` and has headings of level 3.

    Args:
        report: a run's report. The section uses only public values and values that epsilon covers.
            Its value "by_run" is the result of `ledger_runs.epsilon_by_run`.
        unit: name of a privacy unit, such as "patient".
        audit: the result of `dpflash audit --run` for the run's settings, or None.
    """
    by_run = report.get("by_run")
    total = by_run["total"] if by_run else {}
    report = {**report, **(total or {})}
    return [
        TITLE,
        "",
        _statement(report, unit, "The weights" if total is not None else _OF_OWN_LEDGER),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _rows(report).items()),
        f"| audit | {'none' if audit is None else 'see below'} |",
        "",
        *(_by_run_part(by_run, report["delta"]) if by_run else []),
        *([] if audit is None else _audit_part(audit, report["versions"].get("code"))),
        "### Not covered by epsilon",
        "",
        *(f"- {text.format(unit=unit)}" for text in _NOT_COVERED),
        *([f"- {_OF_BASE}{_OF_RUNS * bool(by_run)}."] if report["config"].get("model") else []),
        "",
    ]


def with_epsilon(
    report: Mapping[str, Any],
    spending: Spending,
    delta: float,
    *,
    run: str,
    seeded: bool,
    base: str | None,
) -> dict[str, Any]:
    """Return a run's report with the epsilon of this run and of other runs in its ledger added.

    Args:
        report: the result of `PrivateRun.report`.
        spending: the spending of the run's engine.
        delta: delta at which epsilon is computed.
        run: name of the run in the ledger.
        seeded: whether the noise was derived from a seed.
        base: name of the pretrained model; None for a new model.
    """
    ledger = None if spending.ledger is None else Ledger(spending.ledger.path)
    accountant = spending.accountant.mechanism()
    by_run = epsilon_by_run([] if ledger is None else [ledger], delta, accountant, run)
    found = {
        **report,
        "epsilon": spending.epsilon(delta).upper,
        "delta": delta,
        "neighboring_relation": spending.relation,
        "accountant": accountant,
        "lost_steps": 0 if ledger is None else ledger.releases - report["steps"],
        "ledger_head": None if ledger is None else ledger.head,
        "ledger_run": run,
        "by_run": by_run,
        "facts": {} if ledger is None else facts_of([ledger], run),
        "seeded": seeded,
        "config": {**report["config"], "model": base or None},
    }
    return {key: finite(value) for key, value in found.items()}


def write_card_and_report(folder: Path, report: dict[str, Any], description: str | None) -> Path:
    """Write report.json, add or replace README.md's section on privacy; return README.md's path.

    `description` introduces the model if there is no README.md yet.
    """
    follow_umask(folder)
    report = {**report, "weights": weights_digest(folder)}
    text = json.dumps(report, indent=2, allow_nan=False)
    (folder / REPORT).write_text(text + "\n", encoding="utf-8")
    card = folder / CARD
    before = "# Model card\n" + ("" if description is None else f"\n{description}\n")
    before = card.read_text(encoding="utf-8") if card.exists() else before
    before, is_there, old = before.partition(f"{TITLE}\n")
    # The section on privacy is the first one after the model's introduction.
    parts = (f"\n{old}" if is_there else before).partition("\n## ")
    before = before if is_there else parts[0]
    section = "\n".join(privacy_section(report, report["config"]["unit"]))
    after = f"\n{(parts[1] + parts[2]).lstrip()}" if parts[1] else ""
    card.write_text(f"{before.rstrip()}\n\n{section}{after}", encoding="utf-8")
    return card


def _weights(folder: Path) -> list[Path]:
    return sorted((*folder.glob("*model*.safetensors"), *folder.glob("*model*.bin")))


def follow_umask(folder: Path) -> None:
    """Give weight files the usual permissions; safetensors lets only the owner read them."""
    new = folder / f".{os.getpid()}.tmp"
    new.touch()
    mode = stat.S_IMODE(new.stat().st_mode)
    new.unlink()
    for path in _weights(folder):
        if not path.is_symlink():
            path.chmod(mode)


def weights_digest(folder: Path) -> str | None:
    """Return the SHA-256 of a model's weight files, for the report; None without such files."""
    found = None
    for path in _weights(folder):
        found = found or hashlib.sha256()
        with open(path, "rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    return None if found is None else found.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of Python, torch and dpflash, and the digest of dpflash's code."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "dpflash": library_version(),
        "code": code_digest(),
    }


def _statement(report: Mapping[str, Any], unit: str, weights: str) -> str:
    delta, of_own_run = report["delta"], (report.get("by_run") or {}).get("epsilon_of_own_run")
    if report["epsilon"] is None and of_own_run is None:
        why = "its epsilon is infinite at this delta"
        why = "it was trained without noise" if report["noise_multiplier"] == 0 else why
        return f"**This model is not private:** {why}."
    if report["epsilon"] is None:
        text = (
            "**This model may not be private:** another run in the table below has no finite "
            "epsilon, for instance because it had no noise. If the training of this model began "
            "from weights of that run, this model reveals them. Otherwise this run's own epsilon, "
            "in the table, holds for this run's data."
        )
    else:
        relation = _RELATIONS[report["neighboring_relation"]].format(unit=unit)
        text = (
            f"{weights} are ({rounded_up(report['epsilon'])}, {delta:g})-differentially private: "
            f"for two datasets {relation}, no set of weights is more than e^epsilon times as "
            "likely under one as under the other, except with a probability of delta."
        )
    if report.get("private_base"):
        text += (
            " **The base model was trained privately too:** for people in both datasets, its "
            "card's epsilon adds to this one (`dpflash export --ledgers` computes the sum)."
        )
    if report["seeded"]:
        text += (
            " **The run was seeded: the model is not private to a person who knows the seed and "
            "can recompute its noise. It is for research, not for release.**"
        )
    return text


def _rows(report: Mapping[str, Any]) -> dict[str, str]:
    public = report["public"]
    size = "declared" if public["dataset_size_declared"] else "treated as public"
    lost = ", and {} more in its ledger, which a crash lost or earlier runs made"
    lost = lost.format(report["lost_steps"]) if report["lost_steps"] else ""
    config, weights = report["config"], ""
    if config.get("class_weights"):
        pairs = zip(config["labels"], config["class_weights"], strict=True)
        weights = ", ".join(f"{label}: {weight:g}" for label, weight in pairs).replace("|", "/")
    is_of_all = bool((report.get("by_run") or {}).get("total"))
    of_all, of_run = (" of all runs together", " of this run") if is_of_all else ("", "")
    facts = (report.get("facts") or {}).items()
    found = {
        **{name: " ".join(fact.replace("|", "/").split()) for name, fact in facts},
        f"epsilon{of_all}": _shown(report["epsilon"]),
        "delta": f"{report['delta']:g}",
        "neighboring relation": report["neighboring_relation"],
        "privacy unit": report["privacy_unit"],
        f"dataset size{of_run}": f"{public['dataset_size']}, {size}",
        f"sampler{of_run}": f"{report['sampler']}, sample rate {report['sample_rate']:.6g}",
        f"steps{of_run}": f"{report['steps']}{lost}",
        "accountant": report["accountant"],
        "clipping": f"{report['clipping']}, max_grad_norm {report['max_grad_norm']:g}",
        **({"class weights": f"{weights}, stated as public"} if weights else {}),
        f"noise multiplier{of_run}": f"{report['noise_multiplier']:.6g}"
        + (f", banded noise of {report['bands']} bands" if report.get("bands", 1) > 1 else ""),
        f"expected batch size{of_run}": f"{report['expected_batch_size']}",
        "versions": ", ".join(f"{name} {number}" for name, number in report["versions"].items()),
        "head of the ledger after this run": (report.get("ledger_head") or "not recorded")
        + ("" if report.get("ledger_is_there", True) else " (the ledger was not compared)"),
    }
    if heads := report.get("heads_of_card"):
        named = [head if len(heads) == 1 else f"{path}: {head}" for path, head in heads]
        found["head of the ledger when this card was written"] = ", ".join(named).replace("|", "/")
    return found


def _by_run_part(by_run: Mapping[str, Any], delta: float) -> list[str]:
    if by_run["total"] is None:
        text = (
            "There is no epsilon of all together, since the runs' privacy units differ. The "
            "epsilon of a row is for someone with one unit in that run's data, and none elsewhere."
        )
    else:
        text = (
            "The last row, as in the first sentence, is for someone with one unit in the data of "
            "each run. Each other row is the epsilon of its steps alone. For someone in the data "
            "of several runs but not of all, epsilon is at most that of the last row."
        )
    if by_run.get("seeded"):
        text += f" {SEEDED}"
    return [
        "### Epsilon by run",
        "",
        f"| | steps | privacy unit | relation | epsilon at delta {delta:g} |",
        "|---|---|---|---|---|",
        *(
            f"| {' | '.join(str(x).replace('|', '/') for x in texts)} | {_shown(epsilon)} |"
            for *texts, epsilon in by_run["rows"]
        ),
        "",
        text,
        "",
    ]


def _shown(epsilon: float | None) -> str:
    return "none" if epsilon is None else rounded_up(epsilon)


def _audit_part(audit: Mapping[str, Any], code: str | None) -> list[str]:
    """Return the lines on the audit, whose numbers do not depend on the training data.

    `code` is the digest of the code that trained the model; None if it was not recorded.
    """
    passed = "nothing refuted the claim" if audit["ok"] else "**the claim was refuted**"
    checks = audit["checks"]
    failed = [check["name"] for check in checks if not check["ok"]]
    claimed = rounded_up(audit["claimed_epsilon"])
    named = f"{len(checks) - len(failed)} of {len(checks)} named checks passed"
    if failed:
        named += f" (failed: {', '.join(failed)})"
    if audit.get("ranks") is False:
        named += " (those on two ranks were left out)"
    library = "the library"
    if None not in (code, audit.get("code")):
        library = "the same library" if audit["code"] == code else "another version of the library"
    return [
        "### Audit",
        "",
        f"The run's settings were audited with canaries in place of its data, through {library} "
        f"({audit['mode'].replace('_', ' ')}, {audit['scores']} scores): {passed}; "
        f"{named}. An audit is a test, not a proof, and its bounds are lower bounds. The audited "
        "claim is the epsilon of this run, or of one step of this run. It does not include other "
        f"runs of the ledger. {audit.get('note', '')}".rstrip(),
        "",
        "| | |",
        "|---|---|",
        f"| audited claim | {audit['claim']} |",
        f"| epsilon of the audited claim, at delta {audit['delta']:g} | {claimed} |",
        f"| it is at least (assumption-free) | {audit['epsilon_lower']:.3g} |",
        f"| it is at least (assumes Gaussian noise) | {audit['epsilon_lower_gaussian']:.3g} |",
        f"| confidence of each bound | {audit['confidence']:.0%} |",
        f"| correct runs that an audit refutes, at most | {audit['false_alarm_rate']:.2g} |",
        "",
    ]
