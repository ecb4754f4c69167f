"""Draws a suite's picture from its JSON: a panel for each chart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .document import Chart
    from .suite import Suite

Row = Mapping[str, Any]

_GREY = "#666666"
_COLORS = (
    *("#1f5fa8", "#d1601a", "#2d8a4e", "#8a3f9e", "#b02a37", "#7a6a00"),
    *("#2a8f9e", "#555555", "#d66ba0", "#85561f", "#7fae2a", "#000000"),
)
# As many as have no divisor in common with the colours: 132 series that differ.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p")
_LABELS = {
    "ms": "ms of a call, median and 95% interval",
    "T": "T, tokens",
    "B": "B, sequences of a batch",
    "H": "H, heads",
    "batch": "sequences of a batch",
    "tokens": "tokens of a sequence",
}
_SHAPE = {"batch": "B", "tokens": "T", "heads": "H", "head_dim": "D", "steps": "steps"}
_MOST_TICKS = 9
# Of words side by side; more are turned.
_MOST_LETTERS = 45


def draw(suite: Suite, found: Mapping[str, Any]) -> Any:
    """The picture: a matplotlib Figure."""
    from matplotlib.figure import Figure

    charts = list(suite.charts)
    columns = min(2, max(1, len(charts)))
    lines = max(1, -(-len(charts) // columns))
    figure = Figure(figsize=(8.2 * columns, 4.4 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    # One look for each name in all panels.
    looks: dict[str, int] = {}
    for panel, chart in zip(panels, charts, strict=False):
        _draw_chart(panel, chart, found["rows"], looks)
    for panel in panels[len(charts) :]:
        panel.axis("off")
    figure.suptitle(f"{suite.title}\n{_subtitle(found)}")
    return figure


def _subtitle(found: Mapping[str, Any]) -> str:
    environment = found["environment"]
    parts = [environment["device"]]
    if environment.get("threads") and str(environment["device"]).startswith("CPU"):
        parts.append(f"{environment['threads']} thread{'s' * (environment['threads'] > 1)}")
    parts.append(environment["date"])
    if environment["quick"]:
        parts.append("a quick look")
    if not found.get("complete", True):
        parts.append("broken off")
    return ", ".join(parts)


def _draw_chart(panel: Any, chart: Chart, rows: Sequence[Row], looks: dict[str, int]) -> None:
    (x_label, x), (y_label, y) = chart.x, chart.y
    drawn = [
        row
        for row in rows
        if row.get("section") == chart.section and y(row) is not None and x(row) is not None
    ]
    panel.set_title(_title(chart, drawn), fontsize=10)
    panel.set_xlabel(_LABELS.get(x_label, x_label))
    panel.set_ylabel(_LABELS.get(y_label, y_label))
    if not drawn:
        panel.text(
            0.5, 0.5, "nothing was measured", ha="center", color=_GREY, transform=panel.transAxes
        )
        panel.set(xticks=[], yticks=[])
        return
    series: dict[str, list[Row]] = {}
    for row in drawn:
        series.setdefault(chart.series(row), []).append(row)
    has_words = isinstance(x(drawn[0]), str)
    place = _words(panel, [x(row) for row in drawn], len(series)) if has_words else None
    for number, (name, own) in enumerate(series.items()):
        look = looks.setdefault(name, len(looks))
        at = [place(x(row), number) if place else x(row) for row in own]
        # A line joins what differs in x alone, and not in the batch.
        for part, points in enumerate(_by_batch(chart, y, at, own)):
            places, values, below, above = zip(*points, strict=True)
            panel.errorbar(
                places,
                values,
                yerr=(below, above) if any(below) or any(above) else None,
                color=_COLORS[look % len(_COLORS)],
                marker=_MARKERS[look % len(_MARKERS)],
                markersize=5,
                capsize=2,
                linestyle="" if has_words else ("-", "--", ":")[look // len(_COLORS) % 3],
                label=name if part == 0 else None,
            )
    heights = [y(row) for row in drawn]
    if all(row.get("speedup") == y(row) for row in drawn):
        panel.axhline(1, color=_GREY, linewidth=1, zorder=0)
    if chart.logarithmic and min(heights) > 0:
        _logarithmic(panel.yaxis, panel.set_yscale, heights)
        if not has_words and min(x(row) for row in drawn) > 0:
            _sizes(panel, sorted({x(row) for row in drawn}), _batches(chart, drawn))
    else:
        if chart.x[0] == "P":
            _sizes(panel, sorted({x(row) for row in drawn}), {})
        tops = [y(row) + _reach(row, y(row))[1] for row in drawn]
        # Room for the marks of the highest ones.
        panel.set_ylim(0, 1.1 * max(tops) or None)
        panel.yaxis.set_major_formatter(_plain_ticks())
    panel.grid(color="#dddddd", linewidth=0.5)
    if len(series) > 1:
        panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)


def _reach(row: Row, value: float) -> tuple[float, float]:
    """How far the 95% interval goes below and above, where what is drawn has one."""
    for key, interval in (("median_ms", "ci95_ms"), ("speedup", "speedup_ci95")):
        if row.get(interval) is not None and value == row[key]:
            low, high = row[interval]
            return max(0.0, value - low), max(0.0, high - value)
    return 0.0, 0.0


def _by_batch(
    chart: Chart, y: Callable[[Row], Any], at: Sequence[float], rows: Sequence[Row]
) -> list[list[tuple[float, ...]]]:
    """The points (x, y, below, above) of each batch; of all where the batch is x."""
    parts: dict[Any, list[tuple[float, ...]]] = {}
    for place, row in sorted(zip(at, rows, strict=True), key=lambda one: one[0]):
        batch = None if chart.x[0] in ("batch", "B", "P") else row["config"].get("batch")
        parts.setdefault(batch, []).append((place, y(row), *_reach(row, y(row))))
    return list(parts.values())


def _batches(chart: Chart, drawn: Sequence[Row]) -> Mapping[float, int]:
    """B of each x, where it has one and they differ; else none."""
    found: dict[float, set[int]] = {}
    for row in drawn:
        if "batch" in row["config"] and chart.x[0] not in ("batch", "B"):
            found.setdefault(chart.x[1](row), set()).add(row["config"]["batch"])
    if any(len(batches) > 1 for batches in found.values()) or len({*map(min, found.values())}) < 2:
        return {}
    return {place: min(batches) for place, batches in found.items()}


def _title(chart: Chart, drawn: Sequence[Row]) -> str:
    """With what all rows have in common, or the range of it."""
    told = []
    names = {chart.series(row) for row in drawn}
    if len(names) == 1:
        told.append(str(*names))
    for key, letter in _SHAPE.items():
        found = sorted({row["config"][key] for row in drawn if key in row["config"]})
        if found and chart.x[0] not in (key, letter):
            told.append(f"{letter} {found[0]}" + f" to {found[-1]}" * (len(found) > 1))
    told += sorted({row["config"]["dtype"] for row in drawn if "dtype" in row["config"]})
    return chart.title + f"\n{', '.join(told)}" * bool(told)


def _words(panel: Any, words: Sequence[str], series: int) -> Callable[[str, int], float]:
    """Ticks of words; gives the place of a series at a word, each beside the others."""
    order = list(dict.fromkeys(words))
    panel.set_xticks(range(len(order)), order)
    if sum(max(len(line) for line in word.split("\n") or [""]) for word in order) > _MOST_LETTERS:
        panel.tick_params(axis="x", rotation=30, labelsize=8)
        for label in panel.get_xticklabels():
            label.set_horizontalalignment("right")
            label.set_rotation_mode("anchor")
    panel.set_xlim(-0.5, len(order) - 0.5)
    step = 0.7 / max(1, series)
    return lambda word, number: order.index(word) + (number - (series - 1) / 2) * step


def _sizes(panel: Any, sizes: Sequence[float], batches: Mapping[float, int]) -> None:
    """An axis to the base of 2 with the measured sizes as ticks, or powers of two.

    Args:
        panel: its axes.
        sizes: in their order.
        batches: told below the sizes which have one.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    panel.set_xscale("log", base=2)
    if len(sizes) > _MOST_TICKS or any(
        b < 1.25 * a for a, b in zip(sizes, sizes[1:], strict=False)
    ):
        low, high = math.ceil(math.log2(sizes[0])), math.floor(math.log2(sizes[-1]))
        step = max(1, (high - low) // _MOST_TICKS + 1)
        sizes = [2.0**power for power in range(low, high + 1, step)]
    panel.set_xticks(sizes)
    plain = _plain_ticks()
    panel.xaxis.set_major_formatter(
        FuncFormatter(
            lambda size, at: plain(size, at) + (f"\nB {batches[size]}" if size in batches else "")
        )
    )
    panel.xaxis.set_minor_locator(NullLocator())


def _logarithmic(axis: Any, set_scale: Callable[[str], None], values: Sequence[float]) -> None:
    """A logarithmic axis with some ticks in plain numbers, whatever it spans."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    set_scale("log")
    span = max(values) / min(values)
    if span < 10:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if span < 1e3 else (1,)))
    axis.set_major_formatter(_plain_ticks())
    axis.set_minor_locator(NullLocator())


def _plain_ticks() -> Any:
    """Numbers as one writes them, no powers of ten."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, at: f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
