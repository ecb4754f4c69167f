"""What a report of others is made of, and how its rows find ours; the reports are in `reports`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
