"""The page of results: others' figures and ours, row by row, from committed JSON and nothing else.

Where the files lie, `result_files` says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .document import bullets, legend
from .headline import PICTURE, newest, sentences
from .output import markdown_table
from .published import LEGEND, Report, has_figures, report_parts, reported_rows
from .result_files import Files, ResultFile, device_names, load
from .suites import SUITES, suite_named

_TITLE = "# Results"
_INTRO = (
    "Made by `python benchmarks/scripts/make_results.py` from the JSON files named here; nothing "
    "in it is typed by hand. Ours are medians with their 95% interval, of what was right when it "
    "was checked in the same run. Theirs are what the reports say, of their own machines: no "
    "ratio is taken between theirs and ours. A row that is not measured yet names the command "
    "that does it (DIR is `benchmarks/results/DEVICE`)."
)
_REPORTS = (
    "S0 to S4 are benchmark reports of attention libraries that others published, and S0.1 and so "
    "on number what each of them reports. At this commit the document has the figures that are "
    "repeated here."
)
# Rows of a table of ours; longer ones stay on their own page.
_LONGEST_TABLE = 100


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
    own: list[str] = []
    headers: list[str] = []
    for name, files in devices.items():
        for part, columns in _own_tables(name, files, reports, page):
            own.append(part)
            headers += columns
    first = newest(devices)
    head = []
    if first is not None:
        what = "Time, memory and loss of private training beside Opacus"
        head = [f"![{what}]({_relative(results / PICTURE, page)})", *sentences(*first)]
    parts = [_TITLE, *head, _INTRO, _count(reports, devices), "## What was measured"]
    for name, files in devices.items():
        parts += [f"### {name}", _summary(files.values(), page)]
    parts += ["## The reports", _REPORTS, _contents(reports), "## What the columns say"]
    told = legend(dict.fromkeys(("ms", "peak MiB", "tokens/s", "B", "T", "H", "D", *headers)))
    parts.append(bullets([*LEGEND, *told]))
    for report in reports:
        parts += report_parts(report, devices)
    return "\n\n".join([*parts, "## Our own tables", *own]) + "\n"


def _count(reports: Sequence[Report], devices: Mapping[str, Files]) -> str:
    rows = [row for _, row in reported_rows(reports)]
    asked = [row for row in rows if row.answers]
    found = sum(has_figures(row, devices) for row in asked)
    text = (
        f"**{found} of {len(asked)} rows of the reports that a suite can measure have figures.**"
    )
    others = (
        f" {len(rows) - len(asked)} more have no suite: they name what does it here or is lacking."
    )
    return text + others * (len(rows) > len(asked))


def _contents(reports: Sequence[Report]) -> str:
    lines = []
    for report in reports:
        home = f"https://github.com/{report.repository}"
        lines.append(
            [
                report.id,
                report.title,
                f"[{report.repository}]({home})",
                f"[{report.file}]({home}/blob/{report.commit}/{report.file})",
                report.commit,
            ]
        )
    return markdown_table(("", "report", "project", "document", "commit"), lines)


def _summary(files: Iterable[ResultFile], page: Path) -> str:
    """What ran when, on what, and which picture and page lie beside."""
    lines = []
    for file in files:
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
    return f"[{path.name}]({_relative(path, page)})"


def _relative(path: Path, page: Path) -> str:
    return Path(os.path.relpath(path, page.parent)).as_posix()


def _state(file: ResultFile) -> str:
    # Of tests/benchmarks/check_compare.py.
    if "made" in file.held:
        made, right = file.held["made"], file.held["right"]
        slower = file.environment["slowdown"]
        return (
            f"trials of `dpflash bench versus` on equal copies (A/A): {right['A/A']} of "
            f"{made['A/A']} right (nothing flagged); on a copy slowed by {slower:.0%} (A/B): "
            f"{right['A/B']} of {made['A/B']} right (every row slower)"
        )
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


def _own_tables(
    device: str, files: Files, reports: Iterable[Report], page: Path
) -> Iterable[tuple[str, Sequence[str]]]:
    """The tables of our suites that hold rows which no report asks for, each with its headers."""
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
            title = f"### {suite.title}: {table.title} ({device})\n\n"
            if len(rows) > _LONGEST_TABLE:
                link = _link(file.path.with_suffix(".md"), page)
                yield f"{title}{len(rows):,} rows: see {link}.", ()
                continue
            header = [head for head, _ in table.columns]
            lines = [[cell(row) for _, cell in table.columns] for row in rows]
            note = f"\n\n{table.note}" * bool(table.note)
            yield f"{title}{markdown_table(header, lines)}{note}", header
