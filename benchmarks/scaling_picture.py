"""The scaling benchmark's results as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .output import BLUE, GREY
from .reports_scaling import RING_DILATED_TABLE
from .scaling_document import MIB, SCHEMES, Row, rows_of

_COLORS = (BLUE, "#c4521b", "#2b8a4b", "#7b4aa0", "#a08a1b")
_MODE_LINES = {"ring": "-", "all_gather": "--", "ulysses": ":"}


def draw(found: Mapping[str, Any]) -> Any:
    """Efficiency, memory and bytes over the workers, and the model; a matplotlib Figure."""
    import matplotlib
    from matplotlib.figure import Figure

    rows: list[Row] = found["rows"]
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(15, 16), layout="constrained")
        axes = figure.subplots(3, 3)
    _draw_attention(axes[0, 0], rows, "strong", "efficiency", "Attention, strong scaling")
    _draw_attention(axes[0, 1], rows, "weak", "work_efficiency", "Attention, weak scaling")
    _draw_training(axes[0, 2], rows)
    _draw_memory(axes[1, 0], rows, "peak_memory_mb", "Peak memory of a worker, T fixed")
    _draw_memory(axes[1, 1], rows, "saved_mb", "Kept by autograd, T fixed")
    _draw_bytes(axes[1, 2], rows)
    _draw_report(axes[2, 0], rows)
    _draw_model(axes[2, 1], rows, "weak")
    _draw_model(axes[2, 2], rows, "strong")
    environment = found["environment"]
    figure.suptitle(
        f"{environment['device']}, {environment['cores']} cores, torch {environment['torch']}, "
        f"{environment['trials']} trials, {environment['date']}"
    )
    for panel in axes.flat:
        panel.grid(alpha=0.3)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(
                frameon=False,
                fontsize=7,
                ncols=2,
                handlelength=3.5,
                loc="upper center",
                bbox_to_anchor=(0.5, -0.16),
            )
        else:
            panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
    return figure


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    names = list(dict.fromkeys(row["what"] for row in rows))
    return {name: _COLORS[i % len(_COLORS)] for i, name in enumerate(names)}


def _lines(rows: Sequence[Row], key: str) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Points (workers, value) by (what, mode); one worker is the begin of every mode's line."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    names = {(row["what"], row["config"].get("mode", "")) for row in rows}
    for name in sorted(names):
        points = [
            (row["workers"], row[key])
            for row in rows
            if row["what"] == name[0]
            and (row["workers"] == 1 or row["config"].get("mode", "") == name[1])
            and row.get(key) is not None
        ]
        if points:
            found[name] = sorted(points)
    return found


def _over_workers(panel: Any, rows: Sequence[Row], title: str, unit: str) -> None:
    """Ticks where there are figures; how many cores there are."""
    ticks = sorted({row["workers"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("workers")
    panel.set_ylabel(unit)
    over = [row["workers"] for row in rows if row.get("oversubscribed")]
    if over:
        panel.axvspan(min(over) / 2**0.5, max(over) * 2**0.2, color=GREY, alpha=0.12)
        panel.text(
            min(over), 0.02, "more workers\nthan cores", fontsize=7, color=GREY, ha="center",
            transform=panel.get_xaxis_transform(),
        )  # fmt: skip


def _draw_attention(panel: Any, rows: list[Row], scaling: str, key: str, title: str) -> None:
    chosen = rows_of(rows, "attention", scaling=scaling)
    colors = _colors(chosen)
    for (what, mode), points in _lines(chosen, key).items():
        panel.plot(
            *zip(*points, strict=True),
            color=colors[what],
            linestyle=_MODE_LINES[mode],
            marker=".",
            label=f"{what}, {mode}",
        )
    if chosen:
        panel.axhline(1, color=GREY, linewidth=0.8)
        panel.set_ylim(bottom=0)
    _over_workers(panel, chosen, title, "efficiency")


def _draw_training(panel: Any, rows: list[Row]) -> None:
    for scaling, line in (("strong", "-"), ("weak", "--")):
        chosen = rows_of(rows, "training", scaling=scaling)
        colors = _colors(chosen)
        for (what, _), points in _lines(chosen, "efficiency").items():
            begin = [] if points[0][0] == 1 else [(1, 1.0)]
            panel.plot(
                *zip(*begin, *points, strict=True),
                color=colors[what],
                linestyle=line,
                marker=".",
                label=f"{SCHEMES[what]}, {scaling}",
            )
    chosen = rows_of(rows, "training")
    if chosen:
        panel.axhline(1, color=GREY, linewidth=0.8)
        panel.set_ylim(bottom=0)
    _over_workers(panel, chosen, "Private training steps", "efficiency")


def _draw_memory(panel: Any, rows: list[Row], key: str, title: str) -> None:
    chosen = [row for row in rows_of(rows, "memory") if row.get(key)]
    colors = _colors(chosen)
    for (what, mode), points in _lines(chosen, key).items():
        tokens = next(row["config"]["tokens"] for row in chosen if row["what"] == what)
        panel.plot(
            *zip(*points, strict=True),
            color=colors[what],
            linestyle=_MODE_LINES[mode],
            marker=".",
            label=f"{what}, {mode}, T {tokens:,}",
        )
        if mode == "ring" and points[0][0] == 1:
            ideal = [(workers, points[0][1] / workers) for workers, _ in points]
            panel.plot(
                *zip(*ideal, strict=True), color=GREY, linewidth=0.8, label="1 / P", zorder=0
            )
    _over_workers(panel, chosen, title, "MiB")
    if chosen:
        panel.set_yscale("log", base=2)


def _draw_bytes(panel: Any, rows: list[Row]) -> None:
    chosen = [
        row for row in rows_of(rows, "attention", scaling="strong") if row.get("bytes_counted")
    ]
    chosen = [
        {
            **row,
            "counted": max(map(sum, row["bytes_counted"])) / MIB,
            "predicted": max(map(sum, row["bytes_predicted"])) / MIB,
        }
        for row in chosen
        if row["workers"] > 1
    ]
    colors = _colors(rows_of(rows, "attention", scaling="strong"))
    for (what, mode), points in _lines(chosen, "counted").items():
        panel.plot(
            *zip(*points, strict=True),
            color=colors[what],
            linestyle="none",
            marker={"ring": "o", "all_gather": "s", "ulysses": "^"}[mode],
            fillstyle="none",
            label=f"{what}, {mode}",
        )
    for (what, mode), points in _lines(chosen, "predicted").items():
        panel.plot(
            *zip(*points, strict=True), color=colors[what], linestyle=_MODE_LINES[mode], zorder=0
        )
    title = "Sent by the busiest worker, strong scaling\n(marks counted, lines predicted)"
    _over_workers(panel, chosen, title, "MiB")


def _draw_report(panel: Any, rows: list[Row]) -> None:
    chosen = rows_of(rows, "reported", backward=False)
    for number, workers in enumerate(sorted({row["workers"] for row in chosen})):
        points = [
            (row["config"]["tokens"], row["peak_memory_mb"])
            for row in chosen
            if row["workers"] == workers and row["peak_memory_mb"]
        ]
        if points:
            panel.plot(
                *zip(*points, strict=True),
                color=_COLORS[number],
                marker=".",
                label=f"dpflash, {workers} worker{'s' * (workers > 1)}, forward",
            )
    panel.plot(
        [line[0] for line in RING_DILATED_TABLE],
        [line[2] for line in RING_DILATED_TABLE],
        color=GREY,
        marker="x",
        linestyle="--",
        label="reported, 2 GPUs (not this operation, see the text)",
    )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set_title("Dilated attention: peak memory of a worker", fontsize=10)
    panel.set_xlabel("tokens")
    panel.set_ylabel("MiB")


def _draw_model(panel: Any, rows: list[Row], scaling: str) -> None:
    chosen = [row for row in rows if row["kind"] == "model"]
    chosen = [row for row in chosen if row["config"]["scaling"] == scaling]
    if chosen:
        # What was given is for GPUs, whose links these are.
        source = chosen[-1]["config"]["flops_source"]
        if any(row["config"]["flops_source"].startswith("given") for row in chosen):
            source = next(
                row["config"]["flops_source"]
                for row in chosen
                if row["config"]["flops_source"].startswith("given")
            )
        chosen = [row for row in chosen if row["config"]["flops_source"] == source]
        panel.set_title(f"MODEL, not a measurement: {scaling} scaling\n{source}", fontsize=10)
    colors = _colors(chosen)
    links = list(dict.fromkeys(row["config"]["link"] for row in chosen))
    for what, color in colors.items():
        for link, line in zip(links, ("-", "--", ":"), strict=False):
            own = [r for r in chosen if r["what"] == what and r["config"]["link"] == link]
            panel.plot(
                [row["workers"] for row in own],
                [row["efficiency"] for row in own],
                color=color,
                linestyle=line,
                label=f"{what}, {link.split(',')[0]}",
            )
    ticks = sorted({row["workers"] for row in chosen})
    panel.set_xscale("log", base=2)
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.minorticks_off()
    panel.set_ylim(0, 1.05)
    panel.set_xlabel("workers")
    panel.set_ylabel("efficiency without overlap")
