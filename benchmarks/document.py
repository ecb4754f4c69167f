"""Makes the page of a suite from its JSON and the texts in suite_pages.md."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import output
from .output import markdown_table
from .timing import exponent

if TYPE_CHECKING:
    from .suite import Suite

INSIGHTS = "insights"  # section of the rows that are sentences about other rows
QUICK = (
    "A quick look: small sizes and few trials, no figures to quote. At full sizes the order of "
    "what is compared may be the reverse, since fixed costs weigh more in small calls."
)
BROKEN_OFF = "Broken off: only the rows that were measured until then are here."

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], Any]]  # header, and cell of a row


@dataclass(frozen=True)
class Table:
    """A table of the rows of one section."""

    section: str  # the table shows rows whose column "section" has this value
    title: str  # heading above the table
    columns: Sequence[Column]
    note: str = ""  # text below the table


@dataclass(frozen=True)
class Chart:
    """A panel of the picture, with the rows of one section that have values for x and y."""

    section: str
    title: str  # heading above the panel
    x: Column  # (label, function that returns a row's value)
    y: Column
    series: Callable[[Row], str]  # returns the name of the line to which a row belongs
    logarithmic: bool = True  # if False, the y axis is linear and begins at 0


def page(
    name: str, tables: Mapping[str, Sequence[Column]], values: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields title, about and tables of a suite, from suite_pages.md.

    `tables` maps sections to columns; `values` replace words in braces in the texts.
    """

    def filled(key: str) -> tuple[str, str]:
        title, text = texts()[key]
        return title.format_map(values or {}), text.format_map(values or {})

    title, about = filled(name)
    made = []
    for section, own in tables.items():
        heading, note = filled(f"{name}/{section}")
        made.append(Table(section, heading, own, note))
    return {"title": title, "about": about, "tables": made}


def glossary(name: str) -> dict[str, str]:
    """Return the items "- TERM: text" below a heading, as {TERM: text}."""
    items = (item.removeprefix("- ") for item in re.split(r" (?=- )", texts()[name][1]))
    return {term: text for term, _, text in (item.partition(": ") for item in items)}


@functools.cache
def texts() -> dict[str, tuple[str, str]]:
    """Return (title, text) of each heading of suite_pages.md, by SUITE or SUITE/SECTION."""
    source = Path(__file__).with_name("suite_pages.md").read_text(encoding="utf-8")
    found, suite = {}, ""
    for part in re.split(r"^(?=##? )", source, flags=re.MULTILINE)[1:]:
        heading, _, text = part.partition("\n")
        mark, _, words = heading.partition(" ")
        name, _, title = words.partition(": ")
        suite = name if mark == "#" else suite
        # A paragraph becomes one line.
        paragraphs = [" ".join(lines.split()) for lines in text.strip().split("\n\n")]
        found[suite if mark == "#" else f"{suite}/{name}"] = title, "\n\n".join(paragraphs)
    return found


LEGEND = glossary("legend")


def column(key: str, header: str | None = None) -> Column:
    """Return a column that shows the value `key` of a row, or of the row's config."""
    return header or key, functools.partial(_value, key)


def columns(
    *parts: str | Sequence[Column], computed: Mapping[str, Callable[[Row], Any]] | None = None
) -> tuple[Column, ...]:
    """Return columns; each part is a list of columns, or a string "key | key: header | ...".

    The cell of a key is `computed[key](row)` if this exists, else the value in row or config.
    """
    known = computed or {}
    found: list[Column] = []
    for part in parts:
        for one in part.split(" | ") if isinstance(part, str) else part:
            found.append(_named(one, known) if isinstance(one, str) else one)
    return tuple(found)


def _named(part: str, known: Mapping[str, Callable[[Row], Any]] | None = None) -> Column:
    key, _, header = part.partition(": ")
    return (key, known[key]) if known and key in known else column(key, header or None)


def _value(key: str, row: Row) -> Any:
    return row[key] if key in row else row["config"].get(key)


def chart(
    section: str,
    title: str,
    x: str | Column,
    y: str | Column,
    series: str,
    *,
    logarithmic: bool = True,
    only: Mapping[str, Any] | None = None,
) -> Chart:
    """Return a chart of the rows whose config has the values `only`.

    x and y are columns, or strings "key: header". Rows with equal values of `series` form a line.
    """
    label, value = _named(y) if isinstance(y, str) else y

    def figure(row: Row) -> Any:
        fits = all(row["config"].get(key) == wanted for key, wanted in (only or {}).items())
        return value(row) if fits else None

    def name(row: Row) -> str:
        return " ".join(str(_value(key, row)) for key in series.split())

    across = _named(x) if isinstance(x, str) else x
    return Chart(section, title, across, (label, figure), name, logarithmic)


def why_not(row: Row) -> str | None:
    """Return the reason why a row has no figures, or None if it may have figures."""
    if row.get("failure"):
        return f"FAILED: {row['failure']}"
    if row["correct"] is False:
        error = row.get("error")
        # JSON has no NaN and no infinity; both are read back as None.
        is_number = error is not None and math.isfinite(error)
        size = f"error {error:.1e}" if is_number else "no number"
        return f"{'the peer is ' * bool(row.get('peer'))}WRONG ({size})"
    return f"needs: {row['needs']}" if row.get("needs") else None


def milliseconds(row: Row) -> str | None:
    """Return the median time with its interval or range, or the reason why it is missing."""
    if reason := why_not(row):
        return reason
    if row["median_ms"] is None:
        return None
    if row.get("range_ms"):
        low, high = row["range_ms"]
        return f"{row['median_ms']:.4g} ({row['trials']} calls: {low:.4g} to {high:.4g})"
    low, high = row["ci95_ms"]
    mark = f" (high variance, CV {row['cv']:.0%})" if row.get("high_variance") else ""
    return f"{row['median_ms']:.4g} [{low:.4g}, {high:.4g}]{mark}"


def with_interval(key: str, header: str, form: str) -> Column:
    """Return a column that shows the figure `key` and its 95% interval."""

    def cell(row: Row) -> str | None:
        if row.get(key) is None:
            return None
        low, high = row[f"{key}_ci95"]
        return f"{row[key]:{form}} [{low:{form}}, {high:{form}}]"

    return header, cell


TIME: tuple[Column, ...] = (("ms", milliseconds),)
FIGURES = columns(TIME, "tokens_per_s: tokens/s | peak_memory_mb: peak MiB")
ROOFS = columns("gflop_per_s: GFLOP/s | roof | roof_fraction: of its roof | bound: bound by")
SPEEDUP = with_interval("speedup", "speed-up", ".2f")
ratio = SPEEDUP[1]


def overhead(row: Row) -> float | None:
    """Return a step's time divided by the nonprivate step's time, the comparison's baseline."""
    return None if row.get("speedup") is None else 1 / row["speedup"]


def _shown_overhead(row: Row) -> str | None:
    if row.get("speedup") is None:
        return None
    low, high = row["speedup_ci95"]
    return f"{1 / row['speedup']:.2f} [{1 / high:.2f}, {1 / low:.2f}]"


OVER_NONPRIVATE: Column = ("time over nonprivate", _shown_overhead)


def markdown(suite: Suite, found: Mapping[str, Any]) -> str:
    """Return the suite's page in Markdown."""
    environment, rows = dict(found["environment"]), found["rows"]
    roofs = environment.pop("roofs", None)
    if roofs is not None:
        rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in roofs["flops"].items())
        environment["roofs, measured"] = f"{rates} GFLOP/s; {roofs['bandwidth'] / 1e9:,.1f} GB/s"
    about = [(key, str(value)) for key, value in environment.items()]
    parts = [f"# {suite.title}", suite.about, markdown_table(("", "value"), about)]
    parts += [f"**{BROKEN_OFF}**"] * (not found["complete"])
    parts += [f"**{QUICK}**"] * environment["quick"]
    parts += ["## Key insights", bullets(key_insights(rows))]
    headers: list[str] = []
    for table in suite.tables:
        own = [row for row in rows if row.get("section") == table.section]
        if own and table.section != INSIGHTS:
            head = [header for header, _ in table.columns]
            cells = [[cell(row) for _, cell in table.columns] for row in own]
            headers += head
            parts += [
                f"## {table.title}",
                markdown_table(head, cells),
                *[table.note] * bool(table.note),
            ]
    lost = [row for row in rows if row.get("failure") and not row.get("section")]
    lists = {
        "What the columns say": legend(headers),
        "Failed as a whole": [f"{row['name']}: {row['failure']}" for row in lost],
    }
    for title, lines in lists.items():
        parts += [f"## {title}", bullets(lines)] if lines else []
    return "\n\n".join(parts) + "\n"


def bullets(lines: Sequence[str]) -> str:
    """Return the lines as a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def key_insights(rows: Sequence[Row]) -> list[str]:
    """Return the suite's own insights, and a sentence that counts rows with figures."""
    own = [str(row["text"]) for row in rows if row.get("section") == INSIGHTS]
    timed = sum(row["median_ms"] is not None for row in rows)
    few, lacking = (sum(bool(row.get(key)) for row in rows) for key in ("range_ms", "needs"))
    wrong = sum(row["correct"] is False for row in rows)
    return [
        *own,
        f"Rows: {timed} timed ({few} with few calls, since they are slow), {lacking} that need "
        f"what is not here, {wrong} wrong or failed.",
    ]


def insight(name: str, text: str, **numbers: float) -> dict[str, Any]:
    """Return a row of section "insights": a sentence about other rows, and numbers."""
    return output.row(f"insights/{name}", {}, section=INSIGHTS, text=text, **numbers)


def fitted_row(
    name: str, rows: Sequence[Row], size: str, value: str = "median_ms", **columns: Any
) -> dict[str, Any]:
    """Return a row with the fitted exponent p of ``value = c * size^p``, and its 95% interval.

    `size` is a key of the rows' config, `value` a column; rows without a value are left out.
    """
    measured = [(row["config"][size], row[value]) for row in rows if row.get(value) is not None]
    sizes = [one for one, _ in measured]
    power = interval = needs = None
    if len(set(sizes)) >= 3:
        power, *interval = exponent(*zip(*measured, strict=True))
    else:
        needs = f"three sizes: {len(sizes)} of {len(rows)} were measured"
    fit = {"exponent": power, "exponent_ci95": interval, "needs": needs}
    return output.row(name, {}, over=size, sizes=sizes, **fit, **columns)


_EXPONENT = with_interval("exponent", "exponent [95%]", ".3f")
EXPONENTS = columns(
    "curve | over",
    [
        (_EXPONENT[0], lambda row: why_not(row) or _EXPONENT[1](row)),
        ("sizes", lambda row: ", ".join(map(str, row["sizes"])) or "none"),
    ],
)


def legend(headers: Iterable[str]) -> list[str]:
    """Return a line for each column header that LEGEND explains, in the given order."""
    # Some headers are "speed-up" followed by the name of the baseline.
    terms = ("speed-up" if header.startswith("speed-up ") else header for header in headers)
    return [f"*{term}*: {LEGEND[term]}." for term in dict.fromkeys(terms) if term in LEGEND]
