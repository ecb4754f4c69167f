"""Makes the page of results and the picture at its top from committed JSON files alone.

The page shows other projects' published figures beside dpflash's. `result_files` reads the files.
"""

from __future__ import annotations

import json
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
    "opacus-hooks": "Opacus (hooks)",
    "opacus-ghost": "Opacus (ghost)",
    "opake": "opake",
    NONPRIVATE: "no privacy",
}
_OURS, _OPACUS, _OPAKE, _PLAIN = "#1f5fa8", "#d1601a", "#3f8f4f", "#999999"
# Method in pretrained.json -> (name, color, line style).
_METHODS = {
    "no privacy": ("no privacy", _PLAIN, "--"),
    "opake banded": ("opake, banded noise", _OPAKE, "s-"),
    "banded": ("dpflash, banded noise", _OURS, "o-"),
    "opake": ("opake", _OPAKE, "s:"),
    "independent": ("dpflash", _OURS, "o:"),
    "Opacus": ("Opacus", _OPACUS, "^:"),
}

Ends = tuple[float, float, float]  # (figure, lower end, upper end of its interval)


def render(results: Path, reports: Sequence[Report], page: Path) -> str:
    """Return the page as Markdown; raise ValueError if a complete run lacks rows that it shows."""
    devices = {name: load(results, name) for name in device_names(results)}
    title, about = texts()["results"]
    parts = [f"# {title}"]
    shown = newest(results, devices)
    if shown is not None:
        alt = "Time, memory and accuracy of private training beside Opacus and opake"
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


def _sentences(steps: ResultFile, quality: ResultFile) -> Iterator[str]:
    for shape, named in _SHAPES.items():
        times = {name: ends[0] for name, ends in _ratios(steps, shape).items()}
        yield (
            f"At {named} a private step takes {times['dpflash-flat-auto']:.2f} times as long as a "
            f"non-private one, with Opacus {times['opacus-hooks']:.2f} and with opake "
            f"{times['opake']:.2f} times. Batches are equal, without padding rows."
        )
    means = {name: f"{found[3.0][0]:.1f}%" for name, found in _accuracies(quality).items()}
    yield (
        f"At epsilon 3 the test accuracy of a small text model is {means['banded']} with banded "
        f"noise of dpflash and {means['independent']} with independent noise, {means['Opacus']} "
        f"with Opacus, {means['opake banded']} and {means['opake']} with opake, and "
        f"{means['no privacy']} without privacy ([setup](../docs/quality.md))."
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
    ours = f", {len(wrong) - peers} wrong or failed" * (len(wrong) > peers)
    return f"{len(file.rows) or '-'}{ours}" + f", {peers} of peers wrong" * bool(peers)


def newest(results: Path, devices: Mapping[str, Files]) -> tuple[ResultFile, ResultFile] | None:
    """Return (newest full private-step.json with opake at all shapes, pretrained.json) or None."""
    quality = results / "pretrained.json"
    full = [
        files["private-step"]
        for files in devices.values()
        if "private-step" in files and not files["private-step"].is_quick
        if all("opake" in _ratios(files["private-step"], shape) for shape in _SHAPES)
    ]
    if not full or not quality.exists():
        return None
    steps = max(full, key=lambda file: str(file.environment["date"]))
    return steps, ResultFile(quality, json.loads(quality.read_text(encoding="utf-8")))


def draw_headline(steps: ResultFile, quality: ResultFile) -> Any:
    """Draw time, memory and accuracy at equal epsilon, beside Opacus and opake."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.4), layout="constrained")
    *times, memory, accuracy = figure.subplots(2, 2).flat
    for axis, (shape, named) in zip(times, _SHAPES.items(), strict=True):
        _bars(axis, _ratios(steps, shape), "%.2f")
        axis.axvline(1, color="#666666", linewidth=1)
        axis.set(title=f"Time of a step, {named}", xlabel="times a non-private step")
    shape, named = next(iter(_SHAPES.items()))
    peaks = {
        row["name"].removeprefix(f"step/{shape}/"): row["peak_memory_mb"] for row in steps.rows
    }
    _bars(memory, {n: (peaks[n],) * 3 for n in _LABELS if peaks.get(n) is not None}, "%.0f")
    memory.set(title=f"Memory of a step, {named}", xlabel="peak, MiB")
    for nth, (method, found) in enumerate(_accuracies(quality).items()):
        label, color, line = _METHODS[method]
        means, deviations = zip(*found.values(), strict=True)
        places = [place + 0.04 * (nth - 3) for place in range(len(found))]
        accuracy.errorbar(places, means, deviations, fmt=line, color=color, label=label, capsize=2)
    accuracy.set_xticks(range(3), ["1", "3", "8"])
    accuracy.set(title="Quality at equal epsilon", xlabel="epsilon", ylabel="test accuracy, %")
    accuracy.set_ylim(49.5, 60.5)
    accuracy.legend(fontsize=8, ncols=2, loc="lower right")
    about = steps.environment
    where = f"{about['device']}, {about['date']}, torch {about['torch']}"
    figure.suptitle(f"Time and memory: {where}")
    return figure


def _bars(axis: Any, found: Mapping[str, Ends], form: str) -> None:
    colors = {
        NONPRIVATE: _PLAIN,
        "opake": _OPAKE,
        "opacus-hooks": _OPACUS,
        "opacus-ghost": _OPACUS,
    }
    lengths = [value for value, _, _ in found.values()]
    bars = axis.barh(
        [_LABELS[name] for name in found],
        lengths,
        xerr=np.array([(value - low, high - value) for value, low, high in found.values()]).T,
        color=[colors.get(name, _OURS) for name in found],
    )
    axis.bar_label(bars, fmt=form, padding=6)
    axis.set_xlim(0, 1.25 * max(lengths, default=1))
    axis.invert_yaxis()


def _accuracies(file: ResultFile) -> dict[str, dict[float, tuple[float, float]]]:
    """Return {method: {epsilon: (mean, deviation) in percent}} of unit "entry", frozen body."""
    own = [row for row in file.rows if (row["unit"], row["tuning"]) == ("entry", "frozen")]
    found: dict[str, dict[float, tuple[float, float]]] = {name: {} for name in _METHODS}
    for row in (row for row in own if row["method"] in found):
        ends = 100 * float(np.mean(row["accuracy"])), 100 * float(np.std(row["accuracy"], ddof=1))
        for epsilon in (1.0, 3.0, 8.0) if row["epsilon"] is None else (row["epsilon"],):
            found[row["method"]][epsilon] = ends
    return found


def _ratios(file: ResultFile, shape: str) -> dict[str, Ends]:
    """Return {provider: time divided by a non-private step's, and ends of the 95% interval}."""
    found = {}
    for row in file.rows:
        provider = row["name"].removeprefix(f"step/{shape}/")
        if provider in _LABELS and row.get("speedup") and row.get("correct") is not False:
            low, high = row["speedup_ci95"]
            found[provider] = (1 / row["speedup"], 1 / high, 1 / low)
    return found
