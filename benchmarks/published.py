"""Figures that other projects published (`published.json`), beside dpflash's measurements.

The published figures were measured on the projects' machines. They are no baseline for dpflash:
the projects' code does not compute what it claims to compute, or was never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .document import bullets, milliseconds
from .output import markdown_table, shown
from .result_files import Files, Row

_FILE = Path(__file__).with_name("published.json")


class Figure(NamedTuple):
    """A number or word that a project published, with its unit."""

    value: float | str
    unit: str  # unit of a number, or the quantity that a word describes
    spread: float | None = None  # the published standard deviation, if any

    def __str__(self) -> str:
        if isinstance(self.value, str):
            return f"{self.value} ({self.unit})" if self.unit else self.value
        value = f"{self.value:.4g}" if self.value >= 1e7 else f"{self.value:,}"
        spread = f" ± {self.spread:,}" if self.spread is not None else ""
        return f"{value}{spread} {self.unit}"


@dataclass(frozen=True)
class Answer:
    """Selects dpflash's rows of a section that have the values `where`."""

    suite: str  # name of the suite, and of its JSON
    section: str
    where: Mapping[str, Any] = field(default_factory=dict)  # values in the row or its config
    needs: str = ""  # requirement of the rows that some machines do not meet
    options: str = ""  # options of the command

    @property
    def command(self) -> str:
        """The command that measures the rows; DIR is a folder of results."""
        options = self.options if self.suite == "scaling" else "--threads 1"
        return " ".join(["dpflash bench", self.suite, *options.split(), "--out DIR"])

    def fits(self, row: Row) -> bool:
        """Whether this selection contains a row of the suite."""
        values = {**row, **row["config"]}
        wanted = {**self.where, "section": self.section}
        return all(key in values and values[key] == value for key, value in wanted.items())

    def rows(self, files: Files) -> list[Row]:
        """Return a device's selected rows; raise ValueError if a complete run has no such row."""
        file = files.get(self.suite)
        if file is None or file.is_quick:
            return []
        rows = [row for row in file.rows if self.fits(row)]
        if file.is_complete and not rows and not self.needs:
            raise ValueError(
                f"{file.path}: no row of section {self.section!r} with {dict(self.where)}; run "
                f"`dpflash bench {self.suite}` again, or correct the answer in {_FILE.name}"
            )
        return rows


@dataclass(frozen=True)
class Reported:
    """A published row. Either `answers`, `features` or `needs` has dpflash's answer to the row."""

    named: str  # name and configuration
    figures: Sequence[Figure] = ()
    wrong: str = ""  # mistakes of this row only
    answers: Sequence[Answer] = ()
    features: Sequence[str] = ()  # names to import ("dpflash.x.y") and commands, not measured
    needs: str = ""  # the requirement for an answer that cannot be measured here

    def measured(self, devices: Mapping[str, Files]) -> list[tuple[str, Row]]:
        """Return (device, row) for each measured row of dpflash that `answers` select."""
        return [
            (name, row)
            for name, files in devices.items()
            for answer in self.answers
            for row in answer.rows(files)
        ]


@dataclass(frozen=True)
class ReportTable:
    """A table of a report."""

    id: str
    title: str
    rows: Sequence[Reported]
    wrong: Sequence[str] = ()  # mistakes of all rows
    honest: str = ""  # the quantity that dpflash reports instead


@dataclass(frozen=True)
class Report:
    """The tables of one published document."""

    title: str
    tables: Sequence[ReportTable]
    id: str = ""  # the first part of the tables' ids
    repository: str = ""  # OWNER/NAME on GitHub
    file: str = ""  # path of the document in the repository
    commit: str = ""
    note: str = ""


def read_reports() -> tuple[Report, ...]:
    """Read the reports of `published.json`."""
    return tuple(json.loads(_FILE.read_text(encoding="utf-8"), object_hook=_read))


def _read(held: dict[str, Any]) -> Any:
    """Convert a JSON object of published.json to the class that its keys determine."""
    if "figures" in held:
        held["figures"] = tuple(Figure(*figure) for figure in held["figures"])
    classes = {"tables": Report, "rows": ReportTable, "named": Reported, "suite": Answer}
    return next((made(**held) for key, made in classes.items() if key in held), held)


_WRONG = "what is wrong with theirs"
_OURS = ("ours", "ms", "peak MiB", "tokens/s", "right", "more")
_HEADER = ("theirs", "their figures", *_OURS, _WRONG)
# Further figures of a row: key -> format.
_MORE = {
    "batch": "optimal batch {0}",
    "tasks_per_s": "steps/s {0}",
    "efficiency": "efficiency {0}",
    "work_efficiency": "efficiency for the work done {0}",
    "held_out_loss": "held-out loss {0}",
    "measured": "bytes/token, measured {0}",
    "model": "bytes/token, of what a call makes {0}",
    "bound": "bound: {0}",
    "not_measured": "not measured: {0}",
    "most": "{least:.2f} to {most:.2f} times as fast as none",
    "max_tokens": "longest T {max_tokens:,}, stopped by {stopped_by}",
    "density": "{density:.1%} of T x T pairs",
    "exponent": "exponent {exponent:.2f} [{exponent_ci95[0]:.2f}, {exponent_ci95[1]:.2f}]",
    "relative_difference": "{relative_difference:+.2%} ({difference:+.4f} "
    "[{difference_ci95[0]:+.4f}, {difference_ci95[1]:+.4f}]) over {baseline}",
    "speedup": "{speedup:.2f} [{speedup_ci95[0]:.2f}, {speedup_ci95[1]:.2f}] times as fast as "
    "{baseline}",
}


def report_parts(report: Report, devices: Mapping[str, Files]) -> Iterator[str]:
    """Yield the Markdown paragraphs and tables of a report's section."""
    yield f"## {report.id}: {report.title}"
    home = f"https://github.com/{report.repository}"
    document = f"[{report.file}]({home}/blob/{report.commit}/{report.file})"
    yield f"Source: {document} of [{report.repository}]({home}) at commit {report.commit}."
    if report.note:
        yield report.note
    for table in report.tables:
        yield f"### {table.id} {table.title}"
        if table.honest:
            yield f"Ours: {table.honest}."
        lines = [line for row in table.rows for line in _lines(row, devices)]
        # Drop empty columns, except the names of the published row and of dpflash's row.
        keep = [
            number
            for number, cells in enumerate(zip(*lines, strict=True))
            if number in (0, 2) or not {*map(str, cells)} <= {"None", ""}
        ]
        yield markdown_table(
            [_HEADER[n] for n in keep], [[line[n] for n in keep] for line in lines]
        )
        if table.wrong:
            yield f"{_WRONG.capitalize()}:\n\n{bullets(table.wrong)}"


def _lines(row: Reported, devices: Mapping[str, Files]) -> Iterator[list[Any]]:
    """Yield a line for each row of dpflash; the first line also shows the published row."""
    theirs = [row.named, ", ".join(map(str, row.figures)) or None]
    wrong = row.wrong or None
    for device, own in row.measured(devices):
        figures = (own["peak_memory_mb"], own.get("tokens_per_s"), own["correct"])
        ours = f"{device}: {own['name']}{_shape(own['config'])}"
        yield [*theirs, ours, milliseconds(own), *figures, _more(own) or None, wrong]
        theirs, wrong = ["", ""], ""
    if row.answers and theirs[0]:
        ways = {f"with {one.needs} " * bool(one.needs) + f"`{one.command}`" for one in row.answers}
        ours = f"not measured yet: {' or '.join(sorted(ways))}"
    else:
        ours = f"needs: {row.needs}" if row.needs else ", ".join(f"`{x}`" for x in row.features)
    if theirs[0]:
        yield [*theirs, ours, *[None] * 5, wrong]


def _shape(config: Mapping[str, Any]) -> str:
    letters = {"batch": "B", "physical_batch": "physical B", "tokens": "T"}
    letters |= {"heads": "H", "head_dim": "D"}
    parts = [f"{letter} {config[key]}" for key, letter in letters.items() if key in config]
    parts += [config["dtype"]] if "dtype" in config else []
    return f" ({', '.join(parts)})" * bool(parts)


def _more(row: Row) -> str:
    if row.get("text") is not None:
        return str(row["text"])
    return ", ".join(
        form.format(shown(row[key]), **row)
        for key, form in _MORE.items()
        if row.get(key) not in (None, []) and (key != "speedup" or row.get("baseline"))
    )
