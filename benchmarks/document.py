"""A suite's page, and what is said at its end, from what its JSON holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .legend import legend
from .output import environment_table, markdown_table

if TYPE_CHECKING:
    from .suite import Suite

Row = Mapping[str, Any]

INSIGHTS = "insights"  # the section
QUICK = (
    "A quick look: small sizes and few trials, no figures to quote. At full sizes the order of "
    "what is compared may be the reverse, since fixed costs weigh more in small calls."
)
BROKEN_OFF = (
    "Broken off: only what was measured until then is here, and nothing that follows from all of "
    "it."
)
# Of an exponent in the insights; the interval of fewer says nothing.
LEAST_SIZES = 4
Column = tuple[str, Callable[[Row], Any]]


@dataclass(frozen=True)
class Table:
    """Rows of one section.

    Attributes:
        section: which rows, by their column "section".
        title: above it.
        columns: (header, cell of a row).
        note: below it.
    """

    section: str
    title: str
    columns: Sequence[Column]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A panel of the picture; rows of one section that have both values.

    Attributes:
        section: which rows.
        title: above it.
        x, y: (label, value of a row).
        series: what a row's line is named.
        logarithmic: both axes; else both are linear and the upright one begins at 0.
    """

    section: str
    title: str
    x: Column
    y: Column
    series: Callable[[Row], str]
    logarithmic: bool = True


def config(key: str, header: str | None = None) -> Column:
    """A column with a value of the rows' config."""
    return header or key, lambda row: row["config"].get(key)


def column(key: str, header: str | None = None) -> Column:
    """A column with a value of the rows."""
    return header or key, lambda row: row.get(key)


def milliseconds(row: Row) -> str | None:
    """The median with its interval, or what a row needs to have one."""
    if row.get("failure"):
        return f"FAILED: {row['failure']}"
    if row["correct"] is False:
        return wrong(row)
    if row.get("needs"):
        return f"needs: {row['needs']}"
    if row["median_ms"] is None:
        return None
    low, high = row["ci95_ms"]
    mark = f" (high variance, CV {row['cv']:.0%})" if row.get("high_variance") else ""
    return f"{row['median_ms']:.4g} [{low:.4g}, {high:.4g}]{mark}"


def wrong(row: Row) -> str:
    """How far off a row is that has no figures for it."""
    error = row.get("error")
    whose = "the peer is " * bool(row.get("peer"))
    # JSON has no NaN and no infinity; they come back as None.
    if error is None or not math.isfinite(error):
        return f"{whose}WRONG (no number)"
    return f"{whose}WRONG (error {error:.1e})"


def ratio(row: Row) -> str | None:
    """The speed-up over the comparison's baseline, with its interval."""
    if row.get("speedup") is None:
        return None
    low, high = row["speedup_ci95"]
    return f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}]"


TIME: tuple[Column, ...] = (("ms", milliseconds),)
FIGURES: tuple[Column, ...] = (
    *TIME,
    column("tokens_per_s", "tokens/s"),
    column("peak_memory_mb", "peak MiB"),
)
ROOFS: tuple[Column, ...] = (
    column("gflop_per_s", "GFLOP/s"),
    column("roof"),
    column("roof_share", "of its roof"),
    column("bound", "bound by"),
)
SPEEDUP: Column = ("speed-up", ratio)
CORRECT: tuple[Column, ...] = (column("correct"),)


def markdown(suite: Suite, found: Mapping[str, Any]) -> str:
    """The page."""
    environment, rows = dict(found["environment"]), found["rows"]
    roofs = environment.pop("roofs")
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in roofs["flops"].items())
    environment["roofs, measured"] = f"{rates} GFLOP/s; {roofs['bandwidth'] / 1e9:,.1f} GB/s"
    parts = [f"# {suite.title}", suite.about, environment_table(environment)]
    if not found["complete"]:
        parts.append(f"**{BROKEN_OFF}**")
    if environment["quick"]:
        parts.append(f"**{QUICK}**")
    parts += ["## Key insights", bullets(key_insights(rows))]
    headers: list[str] = []
    for table in suite.tables:
        own = [row for row in rows if row.get("section") == table.section]
        # They stand above.
        if own and table.section != INSIGHTS:
            lines = [[cell(row) for _, cell in table.columns] for row in own]
            head = [header for header, _ in table.columns]
            headers += head
            parts += [f"## {table.title}", markdown_table(head, lines)]
            if table.note:
                parts.append(table.note)
    explained = legend(headers)
    if explained:
        parts += ["## What the columns say", bullets(explained)]
    warned = _warned(rows)
    if warned:
        parts += ["## Warnings of what was measured", bullets(warned)]
    lost = [row for row in rows if row.get("failure") and not row.get("section")]
    if lost:
        lines = [[row["name"], row["failure"]] for row in lost]
        parts += ["## Failed as a whole", markdown_table(("part", "failure"), lines)]
    return "\n\n".join(parts) + "\n"


def bullets(lines: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


def key_insights(rows: Sequence[Row]) -> list[str]:
    """What the rows come to in some sentences, at least one.

    Those that the suite wrote itself (section "insights"); else the range of each speed-up and
    the exponents. Behind them how many rows have figures.
    """
    told = [str(row["text"]) for row in rows if row.get("section") == INSIGHTS and row.get("text")]
    return [*(told or _derived(rows)), _counts(rows)]


def _derived(rows: Sequence[Row]) -> list[str]:
    return [*_over_dense(rows), *_speedups(rows), *_exponents(rows)]


def _over_dense(rows: Sequence[Row]) -> Iterator[str]:
    """How fast each pattern is over dense attention, at the longest T that has both."""
    curves: dict[tuple[Any, ...], dict[tuple[int, ...], dict[str, float]]] = {}
    for row in rows:
        held = row["config"]
        if held.get("operator") != "dpflash" or "pattern" not in held or not row["median_ms"]:
            continue
        curve = tuple(held[key] for key in ("direction", "causal", "head_dim", "dtype"))
        shape = tuple(held[key] for key in ("tokens", "batch", "heads"))
        curves.setdefault(curve, {}).setdefault(shape, {})[held["pattern"]] = row["median_ms"]
    for (direction, causal, head_dim, dtype), shapes in curves.items():
        both = [shape for shape, found in shapes.items() if "dense" in found and len(found) > 1]
        if not both:
            continue
        longest = max(both)
        others = dict(shapes[longest])
        dense = others.pop("dense")
        told = [f"{name} {dense / ms:.2f}" for name, ms in sorted(others.items(), key=_of_item)]
        yield (
            f"{direction}, {'causal' if causal else 'not causal'}, D={head_dim}, {dtype}, at the "
            f"longest T with both, {longest[0]:,}: times as fast as dense attention, which sees "
            f"more, are {', '.join(told)}."
        )


def _of_item(item: tuple[str, float]) -> float:
    return item[1]


def _speedups(rows: Sequence[Row]) -> Iterator[str]:
    """Rows are named PLACE/OPERATOR, in the place of their baseline, if they have one."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.get("speedup") is not None and row.get("baseline"):
            pair = row["name"].rsplit("/")[-1], row["baseline"].rsplit("/")[-1]
            found.setdefault(pair, []).append(row["speedup"])
    for (own, other), ratios in found.items():
        low, high = f"{min(ratios):.3g}", f"{max(ratios):.3g}"
        span = low if low == high else f"{low} to {high}"
        places = f", in {len(ratios)} rows" * (len(ratios) > 1)
        yield f"{own} is {span} times as fast as {other}{places}."


def _exponents(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        if row.get("exponent") is None or not row.get("curve"):
            continue
        if len(row["sizes"]) < LEAST_SIZES:
            yield f"{row['curve']}: too few sizes for an exponent ({len(row['sizes'])})."
        else:
            low, high = row["exponent_ci95"]
            yield f"{row['curve']}: the exponent is {row['exponent']:.2f} [{low:.2f}, {high:.2f}]."


def _counts(rows: Sequence[Row]) -> str:
    timed = sum(row["median_ms"] is not None for row in rows)
    lacking = sum(bool(row.get("needs")) for row in rows)
    wrong = [row for row in rows if row["correct"] is False]
    peers = sum(bool(row.get("peer")) for row in wrong)
    told = [f"{timed} rows were timed"]
    if lacking:
        told.append(f"{lacking} need time or things that are not here (they say what)")
    if wrong:
        told.append(f"{len(wrong)} are wrong or failed, {peers} of them of peers")
    return ", ".join(told) + "."


def _warned(rows: Sequence[Row]) -> list[str]:
    """Each warning once, with the rows that gave it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for text in row.get("warnings") or ():
            found.setdefault(" ".join(text.split()), []).append(row["name"])
    return [f"{text} ({', '.join(names)})" for text, names in found.items()]
