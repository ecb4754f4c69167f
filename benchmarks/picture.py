"""Draws the picture of a suite from its JSON, with one panel for each chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .document import Chart, Row
    from .suite import Suite

# With ten colours, these eleven markers distinguish 110 series.
_MARKERS = "os^DvPX<>*p"
_SHAPE = {"batch": "B", "tokens": "T", "heads": "H", "head_dim": "D"}


def draw(suite: Suite, found: Mapping[str, Any]) -> Any:
    """Return the suite's picture, a matplotlib Figure."""
    from matplotlib.figure import Figure

    columns = min(2, max(1, len(suite.charts)))
    lines = max(1, -(-len(suite.charts) // columns))
    figure = Figure(figsize=(8.2 * columns, 4.4 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    looks: dict[str, int] = {}  # name of a series -> number of its color and marker in all panels
    for panel, chart in zip(panels, suite.charts, strict=False):
        _draw_chart(panel, chart, found["rows"], looks)
    for panel in panels[len(suite.charts) :]:
        panel.axis("off")
    environment = found["environment"]
    parts = [environment["device"], environment["date"]]
    parts += ["a quick look"] * environment["quick"] + ["broken off"] * (not found["complete"])
    figure.suptitle(f"{suite.title}\n{', '.join(parts)}")
    return figure


def _draw_chart(panel: Any, chart: Chart, rows: Sequence[Row], looks: dict[str, int]) -> None:
    (x_label, x), (y_label, y) = chart.x, chart.y
    drawn = [
        row
        for row in rows
        if row.get("section") == chart.section and x(row) is not None and y(row) is not None
    ]
    panel.set(xlabel=x_label, ylabel=y_label)
    panel.set_title(chart.title, fontsize=10)
    if not drawn:
        panel.text(0.5, 0.5, "nothing was measured", ha="center", transform=panel.transAxes)
        panel.set(xticks=[], yticks=[])
        return
    series: dict[str, list[Row]] = {}
    for row in drawn:
        series.setdefault(chart.series(row), []).append(row)
    panel.set_title(f"{chart.title}\n{_shape(drawn, chart.x[0])}".strip(), fontsize=10)
    has_words = isinstance(x(drawn[0]), str)
    for name, own in series.items():
        look = looks.setdefault(name, len(looks))
        points = own if has_words else sorted(own, key=x)
        reach = [_reach(row, y(row)) for row in points]
        panel.errorbar(
            [x(row) for row in points],
            [y(row) for row in points],
            yerr=list(zip(*reach, strict=True)) if any(map(any, reach)) else None,
            color=f"C{look % 10}",
            marker=_MARKERS[look % len(_MARKERS)],
            markersize=5,
            capsize=2,
            linestyle="" if has_words else "-",
            label=name,
        )
    if has_words:
        panel.tick_params(axis="x", rotation=30, labelsize=8)
    elif min(map(x, drawn)) >= 1:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(_plain)
    heights = [y(row) for row in drawn]
    if chart.logarithmic and min(heights) > 0:
        _logarithmic(panel, max(heights) / min(heights))
    else:
        panel.set_ylim(bottom=0)
    panel.grid(color="#dddddd", linewidth=0.5)
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _reach(row: Row, value: float) -> tuple[float, float]:
    """Return the value's distances to the lower and upper end of its 95% interval, or zeros."""
    for key, interval in (
        ("median_ms", "ci95_ms"),
        ("speedup", "speedup_ci95"),
        ("cpu_overhead", "cpu_overhead_ci95"),
    ):
        if row.get(interval) is not None and value == row[key]:
            low, high = row[interval]
            return max(0.0, value - low), max(0.0, high - value)
    return 0.0, 0.0


def _shape(drawn: Sequence[Row], across: str) -> str:
    parts = []
    for key, letter in _SHAPE.items():
        found = sorted({row["config"][key] for row in drawn if key in row["config"]})
        if found and across not in (key, letter):
            parts.append(f"{letter} {found[0]}" + f" to {found[-1]}" * (len(found) > 1))
    return ", ".join(parts)


def _logarithmic(panel: Any, span: float) -> None:
    """Make the y axis logarithmic, with about six ticks in plain numbers for every range."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    panel.set_yscale("log")
    few = MaxNLocator(6) if span < 10 else LogLocator(subs=(1, 2, 5) if span < 1e3 else (1,))
    panel.yaxis.set_major_locator(few)
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(_plain)


def _plain(value: float, position: int | None) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
