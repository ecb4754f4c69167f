"""Writes the report of a training job: report.json and a plot of loss and epsilon."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .._json import finite
from .._validate import counted
from ..checkpoint.state import replaced
from ..privacy.card import REPORT, versions
from .config import TrainingConfig
from .data import has_several_documents, noun_of

if TYPE_CHECKING:
    from ..engine import PrivacyEngine
    from .run import TrainingRun

PLOT = "training.png"

_NOT_COVERED = {
    "history.loss": "losses of the training documents",
    "history_nonprivate": "losses of a run without privacy",
    "bits_per_byte_nonprivate": "result of a run without privacy",
    "clip_fraction": "computed from the gradients of single documents",
    "tokens_per_second": "depends on which documents were sampled",
    "peak_memory_mb": "depends on which documents were sampled",
    "verified": "depends on how many documents were sampled together",
    "num_documents": "treated as public, with num_units, sample_rate and noise_multiplier, unless "
    "public.dataset_size_declared",
    "window_len": "treated as public, like num_documents; at most the longest document's length",
    "accuracy": "measured on the held-out documents, which epsilon does not cover",
    "bits_per_byte_before": "measured on the held-out documents, which epsilon does not cover",
    "bits_per_byte_after": "measured on the held-out documents, which epsilon does not cover; it "
    "covers the training documents",
}
_UNITS = {
    "file": "one file",
    "record": "one record, a line of a JSONL file",
}
_UNVERIFIED = (
    "the first batches do not prove that the model keeps documents apart (verified): too few "
    "documents were seen together, or some gradients are still zero"
)
_ROUNDED = (
    "clipped gradients of the parameters in rounded_sums were summed in float32 in some batch; "
    "all other sums, and all noise, are exact"
)
_SEEDED = "seeded: anyone who knows the seed can subtract the noise. For research, not for release"


def _unit_in_words(config: TrainingConfig, unit: str) -> str:
    part = "all of {}, packed" if config.pack else "one window of {}"
    part = part if config.labels is None else "the label and the first tokens of {}"
    if not has_several_documents(config.unit):
        return f"{unit} ({_UNITS[config.unit]}); each step trains on {part.format('it')}"
    documents = "one folder with all its files"
    if config.unit != "folder":
        documents = f"all records with one value of the field {noun_of(config.unit)!r}"
    return (
        f"{unit} ({documents}); each step trains on at most "
        f"{config.examples_per_unit} of them, {part.format('each')}, clipped as one"
    )


def make_report(job: TrainingRun, engine: PrivacyEngine) -> dict[str, Any]:
    """Return the report of a job as plain values; numbers that are not finite become None.

    The entry "ranks" describes how ranks divide the job now; a --resume may have changed this.
    """
    config, state, token = job.config, job.state, job.token
    epsilon = engine.get_epsilon(config.delta, interval=True)
    is_shared = job.shares_ledger()
    alone = job.epsilon_alone() if is_shared else epsilon.upper
    seen = state.seen_samples
    report = {
        "epsilon": epsilon.upper,
        "epsilon_lower": epsilon.lower,
        "epsilon_of_run": alone,
        "delta": config.delta,
        "target_epsilon": config.target_epsilon,
        "max_epsilon": config.max_epsilon,
        "neighboring_relation": engine.neighboring_relation,
        "privacy_unit": _unit_in_words(config, engine.privacy_unit),
        "unit_name": noun_of(config.unit, engine.privacy_unit.partition(": ")[2]),
        "ledger_head": engine.ledger_head,
        "ledger_run": engine.ledger_run,
        "ledger_is_shared": is_shared,
        "verified": state.verified,
        "rounded_sums": state.rounded_sums,
        "sampler": engine.sampler,
        "accountant": config.accountant,
        "noise_multiplier": state.noise_multiplier,
        "noise_mechanism": "independent" if job.noise.bands == 1 else "banded",
        "bands": job.noise.bands,
        "noise_coefficients": job.noise.coefficients,
        "noise_state_bytes": job.noise.state_bytes(num_trained(job.model)),
        "max_grad_norm": config.max_grad_norm,
        "clipping": config.clipping,
        "sample_rate": config.sample_rate(job.num_units),
        "expected_batch_size": config.batch_size,
        "num_documents": job.num_documents,
        "num_units": job.num_units,
        "public": engine.public.as_dict(),
        "window_len": job.window_len,
        "steps": len(state.history),
        "planned_steps": job.total_steps,
        "lost_steps": job.lost_steps,
        "stopped": state.stopped,
        "seeded": config.seed is not None,
        "loss_per": token,
        f"bits_per_{token}_before": state.bits_before,
        f"bits_per_{token}_after": state.bits_after,
        f"bits_per_{token}_nonprivate": state.bits_nonprivate,
        **{f"accuracy_{when}": found for when, found in state.accuracies.items()},
        "tokens_per_second": state.tokens / state.seconds if state.seconds else None,
        "tokens_counted": "targets of the sampled documents, without padding",
        "peak_memory_mb": state.peak_memory_mb,
        "peak_memory_of": "the rank with the highest peak",
        "clip_fraction": state.clipped_samples / seen if seen else None,
        "ranks": job.ranks,
        "num_parameters": sum(p.numel() for p in job.model.parameters()),
        "notes": _notes(job),
        "not_covered_by_epsilon": {
            key.replace("byte", token): why for key, why in _NOT_COVERED.items()
        },
        "config": config.as_dict(),
        "versions": versions(),
        "history": state.history,
        "history_nonprivate": state.baseline_losses,
    }
    return {key: finite(value) for key, value in report.items()}


def _notes(job: TrainingRun) -> list[str]:
    config, state = job.config, job.state
    notes: list[str] = []
    if config.seed is not None:
        notes.append(_SEEDED)
    if state.stopped is not None:
        notes.append(state.stopped)
    elif len(state.history) < job.total_steps:
        notes.append(
            f"interrupted after step {len(state.history)} of {job.total_steps}; dpflash train "
            "--resume continues"
        )
    if job.lost_steps:
        notes.append(
            f"{job.lost_steps} step(s) were released by a process that died before its next "
            "checkpoint; epsilon counts these steps, but the model does not contain them"
        )
    if config.baseline and state.bits_nonprivate is None and job.ranks["shard_parameters"]:
        notes.append(
            "the non-private comparison run was skipped: it does not support sharded parameters"
        )
    if state.noise_multiplier == 0:
        notes.append("no noise: this run has no privacy")
    if job.pack is not None:
        notes.append(
            f"packed into {counted(job.pack.rows, 'row')} of {job.window_len} tokens: if a "
            f"{config.document} has more than {job.pack.tokens} tokens, each step trains on a "
            "window with this number of tokens"
        )
    if state.verified is not True:
        notes.append(_UNVERIFIED)
    if state.rounded_sums:
        notes.append(_ROUNDED)
    return notes


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write report.json, and the plot if matplotlib is installed; both contain private losses."""
    with replaced(folder / REPORT) as file:
        file.write(f"{json.dumps(report, indent=2, allow_nan=False)}\n".encode())
    try:
        import matplotlib
    except ImportError:
        return
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10, "axes.spines.top": False}):
        figure = Figure(figsize=(8, 6.5), layout="constrained")
        _draw(figure, report)
        with replaced(folder / PLOT) as file:
            figure.savefig(file, dpi=150, format="png")


def _draw(figure: Any, report: dict[str, Any]) -> None:
    loss_axes, epsilon_axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    blue, orange, grey = "#1f5fa8", "#d9822b", "#666666"
    history = [entry for entry in report["history"] if entry["loss"] is not None]
    steps = [entry["step"] for entry in history]
    loss_axes.plot(steps, [e["loss"] for e in history], color=blue, label="private, training")
    baseline = report["history_nonprivate"]
    if baseline:
        loss_axes.plot(
            range(1, len(baseline) + 1), baseline, color=orange, label="non-private, training"
        )
    last = report["steps"]
    bits = f"bits_per_{report['loss_per']}"
    held_out = (
        ("held out, before", 0, f"{bits}_before", grey),
        ("held out, private", last, f"{bits}_after", blue),
        ("held out, non-private", last, f"{bits}_nonprivate", orange),
    )
    for label, step, key, color in held_out:
        if report[key] is not None:
            loss_axes.plot(
                [step], [report[key]], "o", color=color, clip_on=False, zorder=3,
                label=f"{label}: {report[key]:.2f}",
            )  # fmt: skip
    loss_axes.set_ylabel(f"loss ({bits.replace('_', ' ')})")
    if loss_axes.get_legend_handles_labels()[0]:
        loss_axes.legend(frameon=False)
    points = [(e["step"], e["epsilon"]) for e in report["history"] if e["epsilon"] is not None]
    if points:
        epsilon_axes.plot(*zip(*points, strict=True), color=blue, marker="." * (len(points) == 1))
        epsilon_axes.set_ylim(bottom=0)
    else:
        epsilon_axes.text(0.5, 0.5, "no noise, no epsilon", transform=epsilon_axes.transAxes)
    if report["target_epsilon"] is not None:
        epsilon_axes.axhline(
            report["target_epsilon"], color=grey, linestyle="--", linewidth=1, label="target"
        )
        epsilon_axes.legend(frameon=False, loc="lower right")
    epsilon_axes.set_ylabel(f"epsilon{_of_ledger(report)} at delta = {report['delta']:g}")
    epsilon_axes.set_xlabel("step")
    for axes in (loss_axes, epsilon_axes):
        axes.spines["right"].set_visible(False)
        axes.grid(alpha=0.3)
    figure.suptitle(_title(report))
    figure.supxlabel("epsilon does not cover the losses: not for release", fontsize=8, color=grey)


def noun_in(report: Mapping[str, Any]) -> str:
    """Return the name of a privacy unit in a report."""
    own: str | None = report.get("unit_name")  # missing in reports of earlier versions
    return own or noun_of(report["config"]["unit"], report["config"].get("unit_name"))


def _of_ledger(report: Mapping[str, Any]) -> str:
    return " of the ledger" if report.get("ledger_is_shared") else ""


def _title(report: dict[str, Any]) -> str:
    if report["epsilon"] is None:
        return f"{counted(report['steps'], 'step')} without privacy"
    epsilon = math.ceil(report["epsilon"] * 100) / 100
    return (
        f"epsilon{_of_ledger(report)} {epsilon:.2f} at delta {report['delta']:g} after "
        f"{counted(report['steps'], 'step')} of about "
        f"{counted(report['expected_batch_size'], noun_in(report))}"
    )


def num_trained(model: torch.nn.Module) -> int:
    """Return the number of trained parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def peak_memory_mb(device: str) -> float:
    """Return the peak memory so far in MiB: of the GPU, or of this process (NaN on Windows)."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        import resource
    except ImportError:
        return math.nan
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
