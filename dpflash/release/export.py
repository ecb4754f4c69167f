"""Exports the model of a run: weights, architecture and a model card in one folder."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from .._json import finite
from ..audit.report import AUDIT
from ..nn import LongContextLM
from ..privacy.card import CARD, TITLE, follow_umask, weights_digest
from ..privacy.ledger import Ledger
from ..privacy.ledger_proof import heads
from ..privacy.ledger_runs import alone, epsilon_by_run, facts_of, lines_of, opened
from ..privacy.spending import Spending
from ..refusal import PrivateWarning, warn
from ..train.language_models import write_architecture
from ..train.pretrained import (
    ADAPTER,
    CAUSAL,
    CLASSIFIER,
    CONFIG,
    adapted_folder,
    head_of,
    load_model,
    load_tokenizer,
    quiet,
    require_transformers,
)
from ..train.report import REPORT
from ..train.run import LEDGER, checkpoint_of
from .card import model_card
from .load import SAFETENSORS, is_pretrained, load, pretrained_folder, report_of

_TOKENIZER = "tokenizer_config.json"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
# Class of transformers -> (noun for the model, name of its task on the Hub).
_KINDS = {
    CAUSAL: ("causal language model", "text-generation"),
    CLASSIFIER: ("classifier of texts", "text-classification"),
}
_LOAD = "import dpflash\n\nmodel = dpflash.load(FOLDER)"
_LOAD_MODEL = "from transformers import {head}\n\nmodel = {head}.from_pretrained(FOLDER)"
_LOAD_ADAPTERS = (
    "from peft import PeftModel\nfrom transformers import {head}\n\n"
    "base = {head}.from_pretrained(FOLDER_OF_THE_BASE_MODEL)\n"
    "model = PeftModel.from_pretrained(base, FOLDER)"
)


def export(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    keep_adapters: bool = False,
    ledgers: Sequence[str | os.PathLike[str]] = (),
) -> Path:
    """Write the model of a run, with a model card, to a folder that can be published.

    Args:
        run: folder of a `dpflash train` run that ended or was interrupted, the output_dir of a
            `DPTrainer`, or a folder that its `save_model` wrote.
        out: new folder, for model.safetensors, config.json, README.md (the model card), and the
            tokenizer of a model of transformers.
        keep_adapters: whether to write LoRA adapters unmerged, to be loaded with peft and the base
            model. Otherwise they are merged into the base model's weights.
        ledgers: ledgers of other runs that the weights come from, such as the base model's. The
            card states the epsilon of each ledger, and also their joint epsilon if all have the
            same privacy unit.

    Returns:
        The path `out`.

    Raises:
        FileNotFoundError, ValueError: the run has no model, the run made noisy steps after the
            model was written, out exists, or an argument does not match the run.

    Guarantees:
        The folder depends on the data only through the private weights and the numbers that the
        report declares or treats as public.
    """
    run, out = Path(run), Path(out)
    report = _report(run, ledgers)
    if report.get("verified") == "pending":
        warn(
            "the run had too few steps to finish the isolation tests, so it is not tested that "
            "each sample's loss depends on this sample alone; train for more steps",
            PrivateWarning,
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={str(out)!r}: exists already; choose a new folder")
    is_adapter = (pretrained_folder(run) / ADAPTER).is_file()
    if keep_adapters and not is_adapter:
        raise ValueError(
            f"keep_adapters=True: the run in {str(run)!r} has no adapters; drop keep_adapters"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    # Write to another name first, so that a folder with the final name is always complete.
    work = out.with_name(f".{out.name}.{secrets.token_hex(8)}")
    work.mkdir()
    try:
        if is_pretrained(run):
            _write_pretrained(pretrained_folder(run), work, keep_adapters)
        else:
            _write_own(run, work)
        (work / CARD).write_text(_card(run, report, keep_adapters), encoding="utf-8")
        follow_umask(work)
        if out.exists():
            out.rmdir()
        os.replace(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


def _report(run: Path, others: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Return a run's report with the epsilon of all ledgers; raise if report and ledger differ."""
    if not run.is_dir():
        raise FileNotFoundError(f"run={str(run)!r}: no such folder; pass the folder of a run")
    resume = f"dpflash train --resume {run}"
    path = report_of(run)
    if not path.is_file() and not (run / LEDGER).is_file() and checkpoint_of(run) is None:
        raise ValueError(
            f"run={str(run)!r}: not the folder of a dpflash train run, nor of a DPTrainer"
        )
    if not path.is_file():
        raise ValueError(
            f"run={str(run)!r}: has no {REPORT}, so it has not ended; continue it with {resume}, "
            "or by DPTrainer.train(resume_from_checkpoint=True)"
        )
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    own = Path(report["config"].get("ledger") or run / LEDGER).resolve()
    # A folder that `save_model` wrote outside of output_dir has no ledger.
    ledger = Ledger(own) if own.is_file() else None
    others = [path for path in others if ledger is None or Path(path).resolve() != own]
    ledgers = [*([] if ledger is None else [ledger]), *opened(others)]
    if "data" in report["config"] and not ledgers:  # the run is one of `dpflash train`
        raise ValueError(
            f"run={str(run)!r}: its ledger {str(own)!r} is missing, so the ledger's other runs "
            "are unknown; restore it and its .guard file, or pass --ledgers FILE if it has moved"
        )
    if others and not any(report.get("ledger_head") in heads(one.content()) for one in ledgers):
        raise ValueError(
            f"ledgers={list(map(str, others))}: none is that of the run in {str(run)!r}, "
            "whose epsilon counts too; pass the run's ledger too"
        )
    if ledgers:
        by_run = (report["delta"], report["accountant"], report.get("ledger_run"))
        report["by_run"] = epsilon_by_run(ledgers, *by_run)
        report["facts"] = facts_of(ledgers, report.get("ledger_run"))
        places = ["/".join(one.path.resolve().parts[-2:]) for one in ledgers]
        report["heads_of_card"] = [
            (place, one.head) for place, one in zip(places, ledgers, strict=True)
        ]
    if ledger is not None:
        _require_same(run, report, ledger)
    if ledgers and (report["by_run"] or {"total": {}})["total"] is None:
        # The ledgers have no joint epsilon. That of the own ledger grows with its other runs.
        head = report.get("ledger_head")
        own_ledger = next(one for one in ledgers if head in heads(one.content()))
        spending = Spending(report["accountant"], ledger=own_ledger)
        report["epsilon"] = finite(spending.epsilon(report["delta"]).upper)
        report["neighboring_relation"] = spending.relation
    report["ledger_is_there"] = bool(ledgers)
    report["private_base"] = not others and _has_card(report["config"].get("model"))
    if "weights" in report and report["weights"] != weights_digest(pretrained_folder(run)):
        raise ValueError(
            f"run={str(run)!r}: its weights are not those that its {REPORT} describes, so the "
            "weights' epsilon is not known; write weights and report by DPTrainer.save_model"
        )
    # Privacy units may have been renamed after the report was written.
    for was, unit in ({} if ledger is None else ledger.names).items():
        report["privacy_unit"] = report["privacy_unit"].replace(f"{was} (", f"{unit} (", 1)
        report["unit_name"] = unit.partition(": ")[2]
    return report


def _require_same(run: Path, report: dict[str, Any], ledger: Ledger) -> None:
    written = report["steps"] + report["lost_steps"]
    stated, lines = report["epsilon"], ledger.lines
    spending = Spending(report["accountant"], ledger=ledger)
    if report.get("ledger_is_shared", report["config"].get("ledger") is not None):
        stated, lines = report["epsilon_of_run"], lines_of(ledger, report["ledger_run"])
        spending = alone(lines, spending)
    elif (head := report.get("ledger_head")) in (own := heads(ledger.content())):
        # Leave out runs that used this run's ledger later, by --ledger.
        earlier = {line.run for line in lines[: own.index(head)]}
        lines = [line for line in lines if line.run in earlier]
        if len(lines) < len(ledger.lines):
            spending = alone(lines, spending)
    released = sum(line.steps for line in lines)
    if released < written:
        raise ValueError(
            f"run={str(run)!r}: its model was written after {written} releases, but its ledger "
            f"has only {released}, so it lost lines; restore ledger and .guard file from a copy"
        )
    if released > written:
        raise ValueError(
            f"run={str(run)!r}: its model was written after {written} releases, and its ledger "
            f"has {released}; continue the run with dpflash train --resume {run}, or by "
            "DPTrainer.train(resume_from_checkpoint=True)"
        )
    spent = spending.epsilon(report["delta"]).upper
    stated = math.inf if stated is None else stated
    is_of_it = report.get("ledger_head") in (None, *heads(ledger.content()))
    if not is_of_it or stated < spent * (1 - 1e-6):
        raise ValueError(
            f"run={str(run)!r}: its {REPORT} states epsilon {stated:g} and the ledger's head "
            f"{report.get('ledger_head')}, but its ledger has epsilon {spent:g} and head "
            f"{ledger.head}: one of them was changed; restore both from a copy"
        )
    report["seeded"] |= any((line.about or {}).get("seeded") == "yes" for line in lines)


def _has_card(base: str | None) -> bool:
    card = None if base is None else Path(base) / CARD
    return card is not None and card.is_file() and TITLE in card.read_text(encoding="utf-8")


def _write_own(run: Path, out: Path) -> None:
    model = load(run)
    assert isinstance(model, LongContextLM)
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.architecture["tie_embeddings"]:
        del weights["lm_head.weight"]  # safetensors files do not support shared tensors
    metadata = {"format": "pt", "architecture": json.dumps(model.architecture)}
    save_file(weights, out / SAFETENSORS, metadata=metadata)
    write_architecture(model, out)


def _write_pretrained(trained: Path, out: Path, keep_adapters: bool) -> None:
    transformers = require_transformers(trained)
    # Copy named files only, since the folder may contain checkpoints and their secret keys.
    copied = [trained / name for name in _PROCESSORS]
    if keep_adapters:
        copied += [trained / CONFIG, *trained.glob("adapter_*")]
    for path in copied:
        if path.is_file():
            shutil.copy(path, out)
    if (trained / _TOKENIZER).is_file():
        load_tokenizer(trained).save_pretrained(out)
    if keep_adapters:
        # Write the base model's name in place of its path on this machine.
        config = json.loads((out / ADAPTER).read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = adapted_folder(trained).name
        (out / ADAPTER).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return
    model: Any = load_model(trained, merge=True)
    with quiet(transformers):
        model.save_pretrained(out)


def _card(run: Path, report: Mapping[str, Any], keep_adapters: bool) -> str:
    trained = pretrained_folder(run)
    library, head, how = "dpflash", CAUSAL, _LOAD
    if is_pretrained(run):
        library, head = "transformers", head_of(trained)
        how = (_LOAD_ADAPTERS if keep_adapters else _LOAD_MODEL).format(head=head)
    kind, task = _KINDS.get(head, (head, None))
    configured = report["config"].get("model")
    base = adapted_folder(trained).name if (trained / ADAPTER).is_file() else None
    if base is None and configured is not None:
        base = Path(configured).name
    return model_card(
        report,
        kind=kind,
        task=task,
        library=library,
        base=base,
        how=how,
        audit=_audit(run, report),
    )


def _audit(run: Path, report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the result of `dpflash audit --run`; raise if it was for other settings."""
    path = run / AUDIT
    if not path.is_file():
        return None
    audit: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    steps = report["steps"] + report["lost_steps"]
    for name, value in audit["settings"].items():
        if value != (steps if name == "steps" else report[name]):
            raise ValueError(
                f"run={str(run)!r}: {AUDIT} is for {name}={value!r}, which the run no longer has; "
                f"repeat dpflash audit --run {run}, or delete the file"
            )
    return audit
