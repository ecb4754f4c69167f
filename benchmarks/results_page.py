"""The page of results: others' figures and ours, row by row, from committed JSON and nothing else.

Where the files lie, `result_files` says.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from .document import bullets, glossary, legend, texts
from .headline import PICTURE, newest, sentences
from .output import markdown_table
from .published import Report, report_parts, reported_rows
from .result_files import Files, ResultFile, device_names, load


def render(results: Path, reports: Sequence[Report], page: Path) -> str:
    """The page.

    Args:
        results: folder of the devices' folders.
        reports: whose tables are answered.
        page: where it will lie; links are relative to that.

    Raises:
        ValueError: a full run of a suite has no row for what a report's row asks.
    """
    devices = {name: load(results, name) for name in device_names(results)}
    title, about = texts()["results"]
    parts = [f"# {title}"]
    first = newest(devices)
    if first is not None:
        alt = "Time, memory and loss of private training beside Opacus"
        parts += [f"!{_link(results / PICTURE, page, alt)}", *sentences(*first)]
    parts += [about, _count(reports, devices), "## What was measured"]
    for name, files in devices.items():
        parts += [f"### {name}", _summary(files, page)]
    terms = [f"*{term}*: {text}." for term, text in glossary("results/columns").items()]
    terms += legend(("ms", "peak MiB", "tokens/s", "B", "T", "H", "D"))
    parts += ["## {}\n\n{}".format(*texts()["results/reports"])]
    parts += ["## What the columns say", bullets(terms)]
    for report in reports:
        parts += report_parts(report, devices)
    return "\n\n".join(parts) + "\n"


def _count(reports: Sequence[Report], devices: Mapping[str, Files]) -> str:
    rows = [row for _, row in reported_rows(reports)]
    asked = [row for row in rows if row.answers]
    found = sum(row.has_figures(devices) for row in asked)
    return (
        f"**{found} of {len(asked)} rows of the reports that a suite can measure have figures.** "
        f"{len(rows) - len(asked)} more have no suite: they name what does it here or is lacking."
    )


def _summary(files: Files, page: Path) -> str:
    """The files of a device, each with its date, machine, picture and page."""
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
    if "made" in file.held:  # of tests/benchmarks/check_compare.py
        made, right = file.held["made"], file.held["right"]
        trials = {kind: f"{right[kind]} of {made[kind]} right" for kind in made}
        slowed = f"on a copy slowed by {file.environment['slowdown']:.0%} (A/B): {trials['A/B']}"
        return f"`dpflash bench versus` on equal copies (A/A): {trials['A/A']}; {slowed}"
    if file.is_quick or not file.is_complete:
        return "a quick look: no figures to quote" if file.is_quick else "broken off"
    wrong = [row for row in file.rows if row.get("correct") is False]
    peers = sum(bool(row.get("peer")) for row in wrong)
    ours = f", {len(wrong) - peers} WRONG" * (len(wrong) > peers)
    return f"{len(file.rows)}{ours}" + f", {peers} of peers wrong" * bool(peers)
