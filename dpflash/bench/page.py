"""The page of results: others' figures and ours, row by row, from committed JSON and nothing else.

Results lie in ``<results>/<device>/<suite>.json``; those of scaling over workers, which is a
program of its own, in ``<results>/scaling_<device>.json`` too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .document import milliseconds, ratio
from .reported import Answer, Figure, Report, Reported, ReportTable, reported_rows
from .results import markdown_table, shown
from .suites import SUITES, suite_named

Row = Mapping[str, Any]

_TITLE = "# Results"
_INTRO = (
    "Made by `python benchmarks/make_results.py` from the JSON files named here; nothing in it is "
    "typed by hand. Ours are medians with their 95% interval, of what was right when it was "
    "checked in the same run. Theirs are what the reports say, of their own machines: no ratio is "
    "taken between theirs and ours. A row without figures says what it needs."
)
# Rows of a table of ours; longer ones stay on their own page.
_LONGEST_TABLE = 100
_PROGRAMS = ("scaling", "scaling_memory")
# What else a row may have to say: header and key.
_MORE = (
    ("optimal batch", "batch"),
    ("steps/s", "tasks_per_s"),
    ("efficiency", "efficiency"),
    ("for the work done", "work_efficiency"),
    ("held-out loss", "held_out_loss"),
    ("bound by", "bound"),
    ("bytes/token, measured", "measured"),
    ("bytes/token, of what a call makes", "model"),
)


@dataclass(frozen=True)
class ResultFile:
    """One JSON file and what it holds."""

    path: Path
    held: Mapping[str, Any]

    @property
    def rows(self) -> Sequence[Row]:
        """Those of a benchmark; none in a file of another kind."""
        rows: Sequence[Row] = self.held.get("rows", ())
        return rows

    @property
    def environment(self) -> Mapping[str, Any]:
        """On what it was measured."""
        environment: Mapping[str, Any] = self.held.get("environment", {})
        return environment

    @property
    def is_quick(self) -> bool:
        """Whether its sizes are small and its trials few."""
        return bool(self.environment.get("quick"))

    @property
    def is_complete(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.held.get("complete", True))


Files = Mapping[str, ResultFile]


def load(results: Path, device: str) -> dict[str, ResultFile]:
    """The files of a device, by the names of what was run."""
    paths = {path.stem: path for path in (results / device).glob("*.json")}
    for program in _PROGRAMS:
        path = results / f"{program}_{device}.json"
        if path.exists():
            paths.setdefault(program, path)
    return {
        name: ResultFile(path, json.loads(path.read_text(encoding="utf-8")))
        for name, path in sorted(paths.items())
    }


def device_names(results: Path) -> list[str]:
    """The devices that have results."""
    return sorted(path.name for path in results.iterdir() if any(path.glob("*.json")))


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
    parts = [_TITLE, _INTRO, "## What was measured"]
    for name, files in devices.items():
        parts += [f"### {name}", _summary(files, page)]
    for report in reports:
        parts.append(f"## {report.title}")
        for table in report.tables:
            parts += _report_table(table, devices)
    parts.append("## Our own tables")
    for name, files in devices.items():
        parts += _own_tables(name, files, reports, page)
    return "\n\n".join(parts) + "\n"


def _summary(files: Files, page: Path) -> str:
    """What ran when, on what, and which picture and page lie beside."""
    lines = []
    for file in files.values():
        beside = [
            path
            for suffix in ("md", "png")
            if (path := file.path.with_suffix(f".{suffix}")).exists()
        ]
        links = [_link(path, page) for path in (file.path, *beside)]
        keys = ("device", "threads", "date", "torch", "dpflash", "commit")
        lines.append(
            [", ".join(links), *(file.environment.get(key) for key in keys), _state(file)]
        )
    return markdown_table(
        ("files", "device", "threads", "date", "torch", "dpflash", "commit", "rows"), lines
    )


def _link(path: Path, page: Path) -> str:
    return f"[{path.name}]({Path(os.path.relpath(path, page.parent)).as_posix()})"


def _state(file: ResultFile) -> str:
    if file.is_quick:
        return "a quick look: no figures to quote"
    if not file.is_complete:
        return "broken off"
    wrong = [row for row in file.rows if row.get("correct") is False]
    peers = sum(bool(row.get("peer")) for row in wrong)
    ours = len(wrong) - peers
    return (
        f"{len(file.rows)}"
        + f", {ours} WRONG" * bool(ours)
        + f", {peers} of peers wrong" * (peers > 0)
    )


def _report_table(table: ReportTable, devices: Mapping[str, Files]) -> Iterator[str]:
    yield f"### {table.id} {table.title}"
    if table.honest:
        yield f"Ours: {table.honest}."
    has_wrong = any(row.wrong for row in table.rows)
    header = ["theirs", "their figures", "ours", "ms", "peak MiB", "tokens/s", "right", "more"]
    lines = []
    for reported in table.rows:
        told = [reported.named, _figures(reported.figures)]
        for ours in _ours(reported, devices):
            lines.append([*told, *ours, *[reported.wrong * bool(told[0])] * has_wrong])
            told = ["", ""]
    yield markdown_table([*header, *["what is wrong with theirs"] * has_wrong], lines)
    if table.wrong:
        yield "What is wrong with theirs:\n\n" + "\n".join(f"- {text}" for text in table.wrong)


def _ours(reported: Reported, devices: Mapping[str, Files]) -> list[list[Any]]:
    """Cells of ours, at least one line."""
    if reported.features:
        return [[", ".join(f"`{name}`" for name in reported.features), *[""] * 5]]
    if reported.needs:
        return [["", f"needs: {reported.needs}", *[None] * 4]]
    lines = []
    for name, files in devices.items():
        for answer in reported.answers:
            lines += [_cells(name, row) for row in answered(answer, files)]
    if lines:
        return lines
    needed = dict.fromkeys(
        answer.needs or f"a full run of `dpflash bench {answer.suite}`"
        for answer in reported.answers
    )
    return [["", f"needs: {' and '.join(needed)}", *[None] * 4]]


def answered(answer: Answer, files: Files) -> list[Row]:
    """The rows of a device's results which an answer means; none where it was a quick look only.

    Raises:
        ValueError: a full run has none.
    """
    file = files.get(answer.suite)
    if file is None or file.is_quick:
        return []
    rows = [row for row in file.rows if answer.fits(row["config"], row)]
    if file.is_complete and not rows and not answer.needs:
        raise ValueError(
            f"{file.path}: no row of section {answer.section!r} with {dict(answer.where)}; run "
            f"`dpflash bench {answer.suite}` again, or mend the answer in dpflash/bench/reports.py"
        )
    return rows


def _cells(device: str, row: Row) -> list[Any]:
    return [
        f"{device}: {row['name']}{_shape(row['config'])}",
        milliseconds(row),
        row["peak_memory_mb"],
        row.get("tokens_per_s"),
        row["correct"],
        _more(row),
    ]


def _shape(config: Mapping[str, Any]) -> str:
    letters = {"batch": "B", "tokens": "T", "heads": "H", "head_dim": "D"}
    told = [f"{letter} {config[key]}" for key, letter in letters.items() if key in config]
    if "dtype" in config:
        told.append(config["dtype"])
    return f" ({', '.join(told)})" * bool(told)


def _more(row: Row) -> str:
    if row.get("text") is not None:
        return str(row["text"])
    told = [f"{header} {shown(row[key])}" for header, key in _MORE if row.get(key) is not None]
    if row.get("least") is not None and row.get("most") is not None:
        told.append(f"{row['least']:.2f} to {row['most']:.2f} times as fast as none")
    if row.get("max_tokens") is not None:
        told.append(f"longest T {row['max_tokens']:,}, stopped by {row['stopped_by']}")
    if row.get("density") is not None:
        told.append(f"{row['density']:.1%} of T x T pairs")
    if row.get("exponent") is not None:
        low, high = row["exponent_ci95"]
        told.append(f"exponent {row['exponent']:.2f} [{low:.2f}, {high:.2f}]")
    if row.get("relative_difference") is not None:
        low, high = row["difference_ci95"]
        told.append(
            f"{row['relative_difference']:+.2%} ({row['difference']:+.4f} [{low:+.4f}, "
            f"{high:+.4f}]) over {row['baseline']}"
        )
    if row.get("baseline") is not None and row.get("speedup") is not None:
        told.append(f"{ratio(row)} times as fast as {row['baseline']}")
    return ", ".join(told)


def _figures(figures: Sequence[Figure]) -> str:
    return ", ".join(_figure(figure) for figure in figures) or "-"


def _figure(figure: Figure) -> str:
    if isinstance(figure.value, str):
        return f"{figure.value} ({figure.unit})" if figure.unit else figure.value
    value = f"{figure.value:.4g}" if figure.value >= 1e7 else f"{figure.value:,}"
    spread = f" ± {figure.spread:,}" if figure.spread is not None else ""
    return f"{value}{spread} {figure.unit}"


def _own_tables(device: str, files: Files, reports: Iterable[Report], page: Path) -> Iterator[str]:
    """The tables of our suites that hold rows which no report asks for."""
    answers = [answer for _, row in reported_rows(reports) for answer in row.answers]
    for name, file in files.items():
        if name not in SUITES or file.is_quick:
            continue
        suite = suite_named(name)
        asked = [answer for answer in answers if answer.suite == name]
        for table in suite.tables:
            rows = [row for row in file.rows if row.get("section") == table.section]
            if all(any(answer.fits(row["config"], row) for answer in asked) for row in rows):
                continue
            yield f"### {suite.title}: {table.title} ({device})"
            if len(rows) > _LONGEST_TABLE:
                yield f"{len(rows):,} rows: see {_link(file.path.with_suffix('.md'), page)}."
                continue
            header = [head for head, _ in table.columns]
            yield markdown_table(
                header, [[cell(row) for _, cell in table.columns] for row in rows]
            )
            if table.note:
                yield table.note


# What a recommendation reads of a file.
_ENVIRONMENT = ("device", "threads", "date", "torch", "dpflash", "commit", "quick")
_COLUMNS = (
    *("name", "section", "config", "pattern_key", "operator", "correct"),
    *("median_ms", "peak_memory_mb", "needs"),
    *("what", "baseline", "sparsity", "difference", "difference_ci95", "relative_difference"),
)


def recommendation_data(results: Path) -> dict[str, Any]:
    """What `dpflash.recommend` needs of the results: "runs", as it reads them."""
    runs = []
    for device in device_names(results):
        for name in ("attention", "variants", "sequence"):
            file = load(results, device).get(name)
            if file is None:
                continue
            rows = [
                {key: row[key] for key in _COLUMNS if row.get(key) is not None}
                for row in file.rows
                if row.get("operator") == "dpflash" or row.get("section") == "quality"
            ]
            runs.append(
                {
                    "environment": {key: file.environment.get(key) for key in _ENVIRONMENT},
                    "rows": rows,
                }
            )
    return {"runs": runs}
