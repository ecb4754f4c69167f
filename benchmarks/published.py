"""Figures that other projects published, row by row, beside the rows of ours that answer them.

The figures are in `published.json`: theirs, measured on their machines. They are no baseline of
ours: the code behind them does not compute what it says, or was never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .document import bullets, milliseconds, ratio
from .output import markdown_table, shown
from .result_files import Files, Row

_FILE = Path(__file__).with_name("published.json")


class Figure(NamedTuple):
    """One of their figures.

    Attributes:
        value: a number, or a word.
        unit: of the number, or what the word is about.
        spread: the standard deviation, where they tell one.
    """

    value: float | str
    unit: str
    spread: float | None = None


@dataclass(frozen=True)
class Answer:
    """Rows of ours: those of a section which have these values.

    Attributes:
        suite: name of the suite, and of its JSON.
        section: of the suite.
        where: values that a row has, in its config or as a column.
        needs: what it takes, where a machine may have no such row; else a full run has one.
        options: of the command that measures it, `dpflash bench SUITE`.
    """

    suite: str
    section: str
    where: Mapping[str, Any] = field(default_factory=dict)
    needs: str = ""
    options: str = ""

    @property
    def command(self) -> str:
        """What measures it; DIR is a folder of results."""
        if self.suite == "scaling":
            return " ".join(["dpflash bench scaling", *self.options.split(), "--out DIR"])
        return f"dpflash bench {self.suite} --threads 1 --out DIR"

    def fits(self, config: Mapping[str, Any], columns: Mapping[str, Any]) -> bool:
        """Whether a row of the suite is meant."""
        values = {**columns, **config}
        return values.get("section") == self.section and all(
            key in values and plain(values[key]) == plain(value)
            for key, value in self.where.items()
        )


@dataclass(frozen=True)
class Reported:
    """A row of a report; exactly one of `answers`, `features` and `needs` says what stands beside.

    Attributes:
        named: what the row is about, with its configuration.
        figures: theirs.
        wrong: what is wrong with this row alone.
        answers: rows of ours.
        features: what of ours does it, where there is nothing to measure: names to import
            ("dpflash.x.y") and commands ("dpflash bench ...").
        needs: what it takes to answer, where this cannot be done here.
    """

    named: str
    figures: Sequence[Figure] = ()
    wrong: str = ""
    answers: Sequence[Answer] = ()
    features: Sequence[str] = ()
    needs: str = ""


@dataclass(frozen=True)
class ReportTable:
    """A table of a report.

    Attributes:
        id: under which users know it.
        title: what it is about.
        rows: its rows.
        wrong: what is wrong with all of them.
        honest: what ours measures in its place.
    """

    id: str
    title: str
    rows: Sequence[Reported]
    wrong: Sequence[str] = ()
    honest: str = ""


@dataclass(frozen=True)
class Report:
    """Tables of one document.

    Attributes:
        title: who reports, about what, on what.
        tables: in their order.
        id: what the ids of its tables begin with.
        repository: OWNER/NAME on GitHub.
        file: the document's path in it.
        commit: at which it has these figures.
        note: what else to know of all of its tables.
    """

    title: str
    tables: Sequence[ReportTable]
    id: str = ""
    repository: str = ""
    file: str = ""
    commit: str = ""
    note: str = ""


def plain(value: Any) -> Any:
    """The value as JSON has it: tuples are lists."""
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return value


def reported_rows(reports: Iterable[Report]) -> Iterator[tuple[ReportTable, Reported]]:
    """Every row with its table."""
    for report in reports:
        for table in report.tables:
            for row in table.rows:
                yield table, row


def read_reports(path: Path = _FILE) -> tuple[Report, ...]:
    """The reports of a file."""
    return tuple(map(_report, json.loads(path.read_text(encoding="utf-8"))))


def _report(held: Mapping[str, Any]) -> Report:
    return Report(**{**held, "tables": tuple(map(_report_table, held["tables"]))})


def _report_table(held: Mapping[str, Any]) -> ReportTable:
    return ReportTable(**{**held, "rows": tuple(map(_reported, held["rows"]))})


def _reported(held: Mapping[str, Any]) -> Reported:
    figures = tuple(Figure(*figure) for figure in held.get("figures", ()))
    answers = tuple(Answer(**answer) for answer in held.get("answers", ()))
    return Reported(**{**held, "figures": figures, "answers": answers})


_OURS = ("ours", "ms", "peak MiB", "tokens/s", "right", "more")
_WRONG = "what is wrong with theirs"
LEGEND = (
    "*theirs*, *their figures*: a row of a report and what it says; *what is wrong with theirs* "
    "was found by reading and running their code.",
    "*ours*: the device, the row's name in its JSON and its shape; a dash in a cell: this was not "
    "measured in this row.",
    "*right*: yes: the error was within the tolerance in this very run; NO: there are no figures.",
    "*more*: what else a row has, each with its name. *efficiency*: tokens/s of P workers over P "
    "times those of one; *efficiency for the work done*: the same of pairs (query, key) a second. "
    "They differ where T grows with P: a token of dense attention at twice the T has twice the "
    "pairs, so that 0.48 by tokens can be 0.96 by work. A held-out loss *over dense* says nothing "
    "where other seeds of dense itself differ as much: see the table of quality.",
)
# What else a row may have to say: header and key.
_MORE = (
    ("optimal batch", "batch"),
    ("steps/s", "tasks_per_s"),
    ("efficiency", "efficiency"),
    ("efficiency for the work done", "work_efficiency"),
    ("held-out loss", "held_out_loss"),
    ("bytes/token, measured", "measured"),
    ("bytes/token, of what a call makes", "model"),
)


def measured(reported: Reported, devices: Mapping[str, Files]) -> list[tuple[str, Row]]:
    """Our rows for one of theirs, each with its device."""
    return [
        (name, row)
        for name, files in devices.items()
        for answer in reported.answers
        for row in answered(answer, files)
    ]


def has_figures(reported: Reported, devices: Mapping[str, Files]) -> bool:
    """Whether any row of ours for it was measured, and was right."""
    return any(
        row["correct"] is not False and not row.get("needs")
        for _, row in measured(reported, devices)
    )


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
            f"`dpflash bench {answer.suite}` again, or mend the answer in {_FILE.name}"
        )
    return rows


def report_parts(report: Report, devices: Mapping[str, Files]) -> Iterator[str]:
    """The section of a report."""
    yield f"## {report.id}: {report.title}"
    if report.note:
        yield report.note
    for table in report.tables:
        yield f"### {table.id} {table.title}"
        if table.honest:
            yield f"Ours: {table.honest}."
        yield from _measured_part(table, devices)
        yield from _feature_part(table)
        if table.wrong:
            yield f"{_WRONG.capitalize()}:\n\n{bullets(table.wrong)}"


def _measured_part(table: ReportTable, devices: Mapping[str, Files]) -> Iterator[str]:
    rows = [row for row in table.rows if row.answers]
    if not rows:
        return
    has_wrong = any(row.wrong for row in rows)
    found = {row.named: measured(row, devices) for row in rows}
    if any(has_figures(row, devices) for row in rows):
        yield _table(rows, found, devices, has_wrong)
        return
    reasons = " or ".join(dict.fromkeys(text for row in rows for text in _ways(row, devices)))
    count = "The row is" if len(rows) == 1 else f"None of the {len(rows)} rows is"
    told = f"{count} {'not ' * (len(rows) == 1)}measured yet: {reasons}"
    yield f"<details><summary>{_html(told)}</summary>"
    if any(found.values()):
        yield _table(rows, found, devices, has_wrong)
    else:
        header = ["theirs", "their figures", *[_WRONG] * has_wrong]
        lines = [[row.named, _figures(row.figures), *[row.wrong] * has_wrong] for row in rows]
        yield markdown_table(header, lines)
    yield "</details>"


def _html(text: str) -> str:
    """Code as HTML has it; Markdown is not read in a summary."""
    parts = text.split("`")
    return "".join(
        f"<code>{part}</code>" if number % 2 else part for number, part in enumerate(parts)
    )


def _table(
    rows: Sequence[Reported],
    found: Mapping[str, Sequence[tuple[str, Row]]],
    devices: Mapping[str, Files],
    has_wrong: bool,
) -> str:
    lines = []
    for row in rows:
        told = [row.named, _figures(row.figures)]
        ours = [_cells(name, one) for name, one in found[row.named]]
        missing = f"not measured yet: {' or '.join(_ways(row, devices))}"
        for cells in ours or [[None, missing, *[None] * 4]]:
            lines.append([*told, *cells, *[row.wrong * bool(told[0])] * has_wrong])
            told = ["", ""]
    return markdown_table(["theirs", "their figures", *_OURS, *[_WRONG] * has_wrong], lines)


def _ways(reported: Reported, devices: Mapping[str, Files]) -> list[str]:
    """The commands that would measure it, with what a machine needs that a run lacked."""
    ways = {}
    for answer in reported.answers:
        command = f"`{answer.command}`"
        ran = any(
            answer.suite in files and not files[answer.suite].is_quick
            for files in devices.values()
        )
        # Which sections have it does not matter here.
        ways[command] = f"with {answer.needs} {command}" if ran and answer.needs else command
    return list(ways.values())


def _feature_part(table: ReportTable) -> Iterator[str]:
    rows = [row for row in table.rows if not row.answers]
    if not rows:
        return
    has_figures = any(row.figures for row in rows)
    header = ["theirs", *["their figures"] * has_figures, "what does it here", _WRONG]
    yield "Without figures of ours:\n\n" + markdown_table(
        header,
        [
            [
                row.named,
                *[_figures(row.figures)] * has_figures,
                f"needs: {row.needs}"
                if row.needs
                else ", ".join(f"`{name}`" for name in row.features),
                row.wrong or None,
            ]
            for row in rows
        ],
    )


def _cells(device: str, row: Row) -> list[Any]:
    return [
        f"{device}: {row['name']}{_shape(row['config'])}",
        milliseconds(row),
        row["peak_memory_mb"],
        row.get("tokens_per_s"),
        row["correct"],
        _more(row) or None,
    ]


def _shape(config: Mapping[str, Any]) -> str:
    letters = {"batch": "B", "tokens": "T", "heads": "H", "head_dim": "D"}
    told = [f"{letter} {config[key]}" for key, letter in letters.items() if key in config]
    if config.get("physical_batch") is not None:
        told.append(f"a physical batch of {config['physical_batch']} was timed")
    if "dtype" in config:
        told.append(config["dtype"])
    return f" ({', '.join(told)})" * bool(told)


def _more(row: Row) -> str:
    if row.get("text") is not None:
        return str(row["text"])
    told = [f"{header} {shown(row[key])}" for header, key in _MORE if row.get(key) is not None]
    if row.get("bound") is not None:
        told.append(f"bound by {row['bound'].removesuffix('_bound').replace('_', ' ')}")
    if row.get("not_measured"):
        told.append(f"not measured: {', '.join(map(str, row['not_measured']))}")
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
