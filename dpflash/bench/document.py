"""A suite's page and picture, from what its JSON holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .results import GREY, environment_table, markdown_table

if TYPE_CHECKING:
    from .suite import Suite

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], Any]]

_COLORS = ("#1f5fa8", "#d1601a", "#2d8a4e", "#8a3f9e", "#b02a37", "#7a6a00", "#2a8f9e", "#555555")


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
        logarithmic: both axes, to the base of 2; else both are linear and begin at 0.
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
    # JSON has no NaN and no infinity; they come back as None.
    if error is None or not math.isfinite(error):
        return "WRONG (no number)"
    return f"WRONG (error {error:.1e})"


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
    column("bound", "bound by"),
    column("roof_share", "of its roof"),
)
SPEEDUP: Column = ("speed-up", ratio)
CORRECT: tuple[Column, ...] = (column("correct"),)


def markdown(suite: Suite, found: Mapping[str, Any]) -> str:
    """The page."""
    environment = dict(found["environment"])
    roofs = environment.pop("roofs")
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in roofs["flops"].items())
    environment["roofs, measured"] = f"{rates} GFLOP/s; {roofs['bandwidth'] / 1e9:,.1f} GB/s"
    parts = [f"# {suite.title}", suite.about, environment_table(environment)]
    if environment["quick"]:
        parts.append("**A quick look: small sizes and few trials, no figures to quote.**")
    for table in suite.tables:
        rows = [row for row in found["rows"] if row.get("section") == table.section]
        if rows:
            lines = [[cell(row) for _, cell in table.columns] for row in rows]
            parts += [
                f"## {table.title}",
                markdown_table([header for header, _ in table.columns], lines),
            ]
            if table.note:
                parts.append(table.note)
    lost = [row for row in found["rows"] if row.get("failure") and not row.get("section")]
    if lost:
        lines = [[row["name"], row["failure"]] for row in lost]
        parts += ["## Failed as a whole", markdown_table(("part", "failure"), lines)]
    return "\n\n".join(parts) + "\n"


def draw(suite: Suite, found: Mapping[str, Any]) -> Any:
    """The picture: a matplotlib Figure with a panel for each chart."""
    from matplotlib.figure import Figure

    charts = list(suite.charts)
    columns = min(2, max(1, len(charts)))
    lines = max(1, -(-len(charts) // columns))
    figure = Figure(figsize=(6.4 * columns, 4.2 * lines + 0.4), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel, chart in zip(panels, charts, strict=False):
        _draw_chart(panel, chart, found["rows"])
    for panel in panels[len(charts) :]:
        panel.axis("off")
    environment = found["environment"]
    quick = ", a quick look" if environment["quick"] else ""
    figure.suptitle(f"{suite.title}\n{environment['device']}, {environment['date']}{quick}")
    return figure


def _draw_chart(panel: Any, chart: Chart, rows: Sequence[Row]) -> None:
    lines: dict[str, list[tuple[Any, float]]] = {}
    (x_label, x), (y_label, y) = chart.x, chart.y
    for row in rows:
        if row.get("section") == chart.section and y(row) is not None and x(row) is not None:
            lines.setdefault(chart.series(row), []).append((x(row), y(row)))
    for number, (name, points) in enumerate(lines.items()):
        color = _COLORS[number % len(_COLORS)]
        style = ("-", "--", ":")[number // len(_COLORS) % 3]
        if isinstance(points[0][0], str):
            panel.plot(*zip(*points, strict=True), color=color, marker="o", ls="", label=name)
        else:
            points.sort()
            panel.plot(*zip(*points, strict=True), color=color, marker=".", ls=style, label=name)
    panel.set_title(chart.title, fontsize=10)
    panel.set_xlabel(x_label)
    panel.set_ylabel(y_label)
    if not lines:
        panel.text(0.5, 0.5, "nothing was measured", ha="center", color=GREY)
        return
    if chart.logarithmic:
        panel.set_yscale("log")
        if not any(isinstance(x, str) for points in lines.values() for x, _ in points):
            panel.set_xscale("log", base=2)
    else:
        panel.set_ylim(bottom=0)
    panel.grid(color="#dddddd", linewidth=0.5)
    panel.legend(fontsize=7)
