"""The page of results, and the picture on top of it, from committed JSON and nothing else.

The page has others' figures and ours, row by row. Where the files lie, `result_files` says.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .document import bullets, glossary, legend, texts
from .output import markdown_table
from .private import NONPRIVATE
from .published import Report, report_parts
from .result_files import Files, ResultFile, device_names, load

PICTURE = "private-step.png"

_SHAPES = {"B16-T256": "B=16, T=256", "B4-T2048": "B=4, T=2048"}
_LABELS = {
    "dpflash-flat-auto": "dpflash, flat",
    "dpflash-per_layer": "dpflash, per_layer",
    "dpflash-per_block": "dpflash, per_block",
    "opacus-hooks": "Opacus (hooks)",
    "opacus-ghost": "Opacus (ghost)",
    "opake": "opake",
    NONPRIVATE: "no privacy",
}
_LOSS_LABELS = {"dpflash": "dpflash", "opacus": "Opacus", NONPRIVATE: "no privacy"}

Ends = tuple[float, float, float]  # a figure and the ends of its interval


def render(results: Path, reports: Sequence[Report], page: Path) -> str:
    """The page; refuses a full run that lacks a row for what a report's row asks."""
    devices = {name: load(results, name) for name in device_names(results)}
    title, about = texts()["results"]
    parts = [f"# {title}"]
    shown = newest(devices)
    if shown is not None:
        alt = "Time, memory and loss of private training beside Opacus"
        parts += [f"!{_link(results / PICTURE, page, alt)}", *_sentences(*shown)]
    parts += [about, "## What was measured"]
    for name, files in devices.items():
        parts += [f"### {name}", _summary(files, page)]
    terms = [f"*{term}*: {text}." for term, text in glossary("results/columns").items()]
    terms += legend(("ms", "peak MiB", "tokens/s", "B", "T", "H", "D"))
    parts += ["## {}\n\n{}".format(*texts()["results/reports"])]
    parts += ["## What the columns say", bullets(terms)]
    for report in reports:
        parts += report_parts(report, devices)
    return "\n\n".join(parts) + "\n"


def _sentences(steps: ResultFile, losses: ResultFile) -> Iterator[str]:
    for shape, named in _SHAPES.items():
        found = {name: ends[0] for name, ends in _ratios(steps, shape).items()}
        peer = min((name for name in found if "opacus" in name), key=lambda name: found[name])
        ours = found["dpflash-flat-auto"]
        yield (
            f"At {named} a private step takes {ours:.2f} times as long as a non-private one, with "
            f"{_LABELS[peer]} {found[peer]:.2f} times: dpflash is {found[peer] / ours:.2f} times "
            "as fast. Batches are equal, without padding rows."
        )
    means = {name: f"{mean:.3f}" for name, (mean, _, _) in _losses(losses).items()}
    yield (
        f"At epsilon {losses.held['config']['target_epsilon']:g} the held-out loss of a small "
        f"model is {means['dpflash']} nats a byte, {means['opacus']} with Opacus and "
        f"{means[NONPRIVATE]} without privacy."
    )


def _summary(files: Files, page: Path) -> str:
    keys = ("device", "threads", "date", "torch", "dpflash", "commit")
    lines = []
    for file in files.values():
        beside = [path for end in (".md", ".png") if (path := file.path.with_suffix(end)).exists()]
        links = ", ".join(_link(path, page, path.name) for path in (file.path, *beside))
        lines.append([links, *(file.environment.get(key) for key in keys), _state(file)])
    return markdown_table(("files", *keys, "rows"), lines)


def _link(path: Path, page: Path, text: str) -> str:
    return f"[{text}]({Path(os.path.relpath(path, page.parent)).as_posix()})"


def _state(file: ResultFile) -> str:
    if file.is_quick or not file.is_complete:
        return "a quick look: no figures to quote" if file.is_quick else "broken off"
    wrong = [row for row in file.rows if row.get("correct") is False]
    peers = sum(bool(row.get("peer")) for row in wrong)
    ours = f", {len(wrong) - peers} WRONG" * (len(wrong) > peers)
    return f"{len(file.rows) or '-'}{ours}" + f", {peers} of peers wrong" * bool(peers)


def newest(devices: Mapping[str, Files]) -> tuple[ResultFile, ResultFile] | None:
    """The newest full private-step.json with the shapes shown, and private-loss.json beside it."""
    full = [
        (files["private-step"], files["private-loss"])
        for files in devices.values()
        if {"private-step", "private-loss"} <= files.keys()
        and not files["private-step"].is_quick
        and all(_ratios(files["private-step"], shape) for shape in _SHAPES)
    ]
    return max(full, key=lambda files: str(files[0].environment["date"]), default=None)


def draw_headline(steps: ResultFile, losses: ResultFile) -> Any:
    """Bars of time, memory and held-out loss beside Opacus: a matplotlib Figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    *times, memory, loss = figure.subplots(2, 2).flat
    for axis, (shape, named) in zip(times, _SHAPES.items(), strict=True):
        _bars(axis, _ratios(steps, shape), _LABELS, "%.2f")
        axis.axvline(1, color="#666666", linewidth=1)
        axis.set(title=f"Time, {named}", xlabel="time of a step over a non-private one")
    shape, named = next(iter(_SHAPES.items()))
    peaks = {
        row["name"].removeprefix(f"step/{shape}/"): row["peak_memory_mb"] for row in steps.rows
    }
    known = {name: (peaks[name],) * 3 for name in _LABELS if peaks.get(name) is not None}
    _bars(memory, known, _LABELS, "%.0f")
    memory.set(title=f"Memory, {named}", xlabel="peak memory of a step, MiB")
    _bars(loss, _losses(losses), _LOSS_LABELS, "%.3f")
    epsilon = losses.held["config"]["target_epsilon"]
    title = f"Loss at epsilon {epsilon:g}, mean and range of seeds"
    loss.set(title=title, xlabel="held-out loss, nats a byte")
    about = steps.environment
    figure.suptitle(f"{about['device']}, {about['date']}, torch {about['torch']}")
    return figure


def _bars(axis: Any, found: Mapping[str, Ends], labels: Mapping[str, str], form: str) -> None:
    colors = {NONPRIVATE: "#999999"} | {name: "#d1601a" for name in found if "opacus" in name}
    lengths = [value for value, _, _ in found.values()]
    bars = axis.barh(
        [labels[name] for name in found],
        lengths,
        xerr=np.array([(value - low, high - value) for value, low, high in found.values()]).T,
        color=[colors.get(name, "#1f5fa8") for name in found],
    )
    axis.bar_label(bars, fmt=form, padding=6)
    axis.set_xlim(0, 1.25 * max(lengths, default=1))
    axis.invert_yaxis()


def _losses(file: ResultFile) -> dict[str, Ends]:
    """Held-out losses by provider: mean and range over the seeds."""
    runs: Sequence[Mapping[str, Any]] = file.held["runs"]
    found = {
        name: [run["held_out_loss"] for run in runs if run["provider"] == name]
        for name in _LOSS_LABELS
    }
    return {name: (float(np.mean(x)), min(x), max(x)) for name, x in found.items()}


def _ratios(file: ResultFile, shape: str) -> dict[str, Ends]:
    """Time over a non-private step, with its 95% interval, by provider."""
    found = {}
    for row in file.rows:
        provider = row["name"].removeprefix(f"step/{shape}/")
        if provider in _LABELS and row.get("speedup") and row.get("correct") is not False:
            low, high = row["speedup_ci95"]
            found[provider] = (1 / row["speedup"], 1 / high, 1 / low)
    return found
