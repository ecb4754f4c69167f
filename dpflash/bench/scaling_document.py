"""The scaling benchmark's results for readers: Markdown tables and a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .results import BLUE, GREY, environment_table, markdown_table
from .scaling_reports import CONTEXT_PARALLEL, RING_DILATED, RING_DILATED_TABLE, Reported

_COLORS = (BLUE, "#c4521b", "#2b8a4b", "#7b4aa0", "#a08a1b")
_MODE_LINES = {"ring": "-", "all_gather": "--", "ulysses": ":"}
_SCHEMES = {
    "replicated": "data parallel, replicated",
    "fsdp2": "data parallel, FSDP2",
    "context": "context parallel",
}
_MIB = 2**20

Row = dict[str, Any]


def markdown(found: Mapping[str, Any]) -> str:
    """All tables, with how they were measured and what the model assumes."""
    rows: list[Row] = found["rows"]
    environment = found["environment"]
    parts = [
        "# Scaling over workers",
        environment_table(environment),
        "Every figure is the median of its trials (outliers beyond Tukey's fences left out) with "
        "its 95% interval (of fewer than 6 trials their range); a trial is as long as its slowest "
        "worker, and calls that are compared take turns. Nothing is timed before its result was "
        "compared with that of one process; what was wrong has no figures. Efficiency is "
        "throughput over that of one worker, divided by the number of workers; the one worker is "
        "one of them, which takes turns with all of them while the others wait (the median over "
        "the rounds). Where it says *over*, workers share cores: efficiency can be no more than "
        "cores / workers then, whatever the code does. *Spread* marks a coefficient of variation "
        "above 10%.",
        *(["Few trials and small sizes: a first look only."] if environment["quick"] else []),
    ]
    builders: tuple[Callable[[list[Row]], list[str]], ...] = (
        _attention,
        _memory,
        _against_report,
        _training,
    )
    for build in builders:
        parts += build(rows)
    parts += _others(found["reported"])
    parts += _model(rows, found["assumptions"])
    return "\n\n".join(parts) + "\n"


def _of(rows: Sequence[Row], section: str, **wanted: Any) -> list[Row]:
    return [
        row
        for row in rows
        if row["section"] == section
        and all(row["config"].get(key) == value for key, value in wanted.items())
    ]


def _workers(row: Row) -> str:
    return f"{row['workers']}{' over' if row.get('oversubscribed') else ''}"


def _milliseconds(row: Row) -> str | None:
    if row["median_ms"] is None:
        return None
    low, high = row["ci95_ms"]
    mark = " *spread*" if row["high_variance"] else ""
    return f"{row['median_ms']:.4g} [{low:.4g}, {high:.4g}]{mark}"


def _alone(row: Row) -> float | None:
    """Milliseconds of the one worker in the same rounds."""
    alone = row.get("alone")
    return row["median_ms"] if alone is None else alone["median_ms"]


def _sizes(rows: Sequence[Row]) -> str:
    """What the attention measurements have in common."""
    config = _of(rows, "attention")[0]["config"] if _of(rows, "attention") else {}
    named = (("B", "batch"), ("H", "heads"), ("D", "head_dim"))
    sizes = [f"{letter} {config[name]}" for letter, name in named if name in config]
    return ", ".join(["dilated is [512, 1024] / [1, 2]", *sizes])


def _model_sizes(rows: Sequence[Row]) -> str:
    config = _of(rows, "training")[0]["config"]
    names = ("vocab", "width", "layers", "heads")
    return ", ".join(f"{name} {config[name]}" for name in names)


def _bytes(row: Row, key: str) -> str | None:
    """Of the busiest worker, MiB."""
    if not row.get(key):
        return None
    totals = [sum(each) if isinstance(each, list) else each for each in row[key]]
    return f"{max(totals) / _MIB:.4g}"


def _attention(rows: list[Row]) -> list[str]:
    parts = []
    for scaling, title in (
        ("strong", "Attention, strong scaling: T fixed"),
        ("weak", "Attention, weak scaling: T of each worker fixed"),
    ):
        chosen = _of(rows, "attention", scaling=scaling)
        if not chosen:
            continue
        header = ["pattern", "mode", "workers", "T", "ms", "1 worker ms", "tokens/s", "efficiency"]
        header += ["of work", "MiB sent", "as predicted", "balance", "peak MiB", "correct"]
        lines = [
            (
                row["what"],
                row["config"]["mode"],
                _workers(row),
                row["config"]["tokens"],
                _milliseconds(row),
                _alone(row),
                row.get("tokens_per_s"),
                row.get("efficiency"),
                row.get("work_efficiency"),
                _bytes(row, "bytes_counted"),
                row.get("bytes_equal"),
                row.get("balance"),
                row["peak_memory_mb"],
                row["correct"],
            )
            for row in chosen
        ]
        parts += [f"## {title}", markdown_table(header, lines)]
    if parts:
        parts.append(
            f"`ring_attention`, forward and backward, float32, {_sizes(rows)}. *1 worker ms*: of "
            "the one worker, in the same rounds, by which efficiency is taken (in weak scaling on "
            "its own T). MiB sent: by the busiest worker in "
            "a call, counted; *as predicted*: whether the count of every worker is, to the byte, "
            "what `sent_bytes` says before. *balance*: pairs (query, key) of the busiest worker "
            "over the mean. *peak*: growth during a call. *of work*: efficiency of pairs computed "
            "a second instead of tokens, which in weak scaling of dense attention grow with T."
        )
    return parts


def _memory(rows: list[Row]) -> list[str]:
    chosen = _of(rows, "memory")
    if not chosen:
        return []
    alone = {row["what"]: row for row in chosen if row["workers"] == 1}
    lines = []
    for row in chosen:
        base = alone.get(row["what"], {})
        lines.append(
            (
                row["what"],
                row["config"]["mode"],
                _workers(row),
                row["config"]["tokens"],
                row["peak_memory_mb"],
                _ratio(row["peak_memory_mb"], base.get("peak_memory_mb")),
                _times(row["peak_memory_mb"], row["workers"]),
                row.get("saved_mb"),
                _ratio(row.get("saved_mb"), base.get("saved_mb")),
                _times(row.get("saved_mb"), row["workers"]),
                row["correct"],
            )
        )
    header = ["pattern", "mode", "workers", "T", "peak MiB", "over P = 1"]
    header += ["times workers", "saved MiB", "over P = 1", "times workers", "correct"]
    return [
        "## Memory of each worker, T fixed",
        markdown_table(header, lines),
        f"`ring_attention`, float32, {_sizes(rows)}. Each line in processes of its own. Peak: "
        "growth during forward and backward over what "
        "the worker held before, its q, k, v and gradient of o; saved: what autograd keeps "
        "between the passes, q, k and v among it. Both of the worker with the most. Where memory "
        "falls as 1 / P, *times workers* stays the same.",
    ]


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _times(value: float | None, factor: int) -> float | None:
    return None if value is None else value * factor


def _against_report(rows: list[Row]) -> list[str]:
    chosen = _of(rows, "reported")
    if not chosen:
        return []
    theirs = {line[0]: line for line in RING_DILATED_TABLE}
    lines = []
    for row in chosen:
        config = row["config"]
        tokens, batch = config["tokens"], config["batch"]
        reported = theirs.get(tokens)
        peak = row["peak_memory_mb"]
        lines.append(
            (
                tokens,
                batch,
                _workers(row),
                "forward, backward" if config["backward"] else "forward",
                _milliseconds(row),
                row.get("tokens_per_s"),
                peak,
                None if peak is None else 1024 * peak / (batch * tokens),
                _bytes(row, "bytes_counted") or "0",
                row.get("bytes_equal"),
                row["correct"],
                *(reported[2:] if reported and row["workers"] == 2 else (None,) * 3),
            )
        )
    header = ["N", "B", "workers", "passes", "ms", "tokens/s", "peak MiB", "KiB/token", "MiB sent"]
    header += ["as predicted", "correct", "their MB", "their KB/token", "their tokens/s"]
    return [
        "## Beside a report: dilated attention, [512, 1024] / [1, 2], H 8, D 64, float32",
        markdown_table(header, lines),
        "The batch is that of the report. Peak: growth during the call, of the worker with the "
        "most. Shards of a multiple of 1024 tokens hold whole segments, so nothing is sent.",
        _told(RING_DILATED),
    ]


def _training(rows: list[Row]) -> list[str]:
    parts = []
    for scaling in ("strong", "weak"):
        chosen = _of(rows, "training", scaling=scaling)
        if not chosen:
            continue
        lines = [
            (
                _SCHEMES[row["what"]],
                _workers(row),
                row["config"]["batch"],
                row["config"]["tokens"],
                _milliseconds(row),
                _alone(row),
                row.get("tokens_per_s"),
                row.get("efficiency"),
                _bytes(row, "bytes_counted") or "0",
                row.get("bytes_equal"),
                row["peak_memory_mb"],
                row["correct"],
            )
            for row in chosen
        ]
        header = ["workers are", "workers", "B", "T", "ms", "1 worker ms", "tokens/s"]
        header += ["efficiency"]
        header += ["MiB sent", "as predicted", "peak MiB", "correct"]
        parts += [f"## Private training steps, {scaling} scaling", markdown_table(header, lines)]
    if not parts:
        return []
    most = max(_of(rows, "training"), key=lambda row: row["workers"])["workers"]
    purposes = [
        (_SCHEMES[row["what"]], purpose, size / _MIB)
        for row in _of(rows, "training", scaling="strong")
        if row["workers"] == most
        for purpose, size in (row.get("bytes_by_purpose") or {}).items()
    ]
    if purposes:
        parts += [
            f"Bytes that worker 0 of {most} sends in a step of strong scaling, by formula:",
            markdown_table(("workers are", "what for", "MiB"), purposes),
        ]
    parts.append(
        f"A `LongContextLM` ({_model_sizes(rows)}), flat clipping, noise, SGD, one physical "
        "batch. Weak scaling fixes the "
        "samples of each worker, of context parallel the tokens. Before, a step without noise was "
        "compared with a loop over single samples. MiB sent: numbers handed to collectives and "
        "pairwise exchanges, counted; what workers agree on before (some words a call) is left "
        "out. Efficiency is over one worker with the plain model."
    )
    return parts


def _others(reported: Sequence[Row]) -> list[str]:
    lines = [(row["what"], row["workers"], row["efficiency"]) for row in reported if "what" in row]
    return [
        "## What others report of scaling",
        markdown_table(("what", "workers", "their efficiency"), lines),
        _told(CONTEXT_PARALLEL),
    ]


def _told(report: Reported) -> str:
    return f"Source: {report.source}. What is wrong with it: {'; '.join(report.wrong)}."


def _model(rows: list[Row], assumptions: Sequence[str]) -> list[str]:
    chosen = [row for row in rows if row["kind"] == "model"]
    if not chosen:
        return []
    header = ["scaling", "pattern", "FLOP/s", "link", "workers", "T", "compute ms"]
    header += ["exchange ms", "ms", "overlapped ms", "efficiency", "overlapped"]
    lines = [
        (
            row["config"]["scaling"],
            row["what"],
            f"{row['config']['flops']:.3g} ({row['config']['flops_source'].split(',')[0]})",
            row["config"]["link"],
            row["workers"],
            row["config"]["tokens"],
            row["compute_ms"],
            row["exchange_ms"],
            row["modelled_ms"],
            row["modelled_overlapped_ms"],
            row["efficiency"],
            row["efficiency_overlapped"],
        )
        for row in chosen
    ]
    return [
        "## Model, not a measurement",
        "No worker ran for what follows. It assumes:",
        "\n".join(f"- {assumption};" for assumption in assumptions),
        markdown_table(header, lines),
    ]


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
    chosen = _of(rows, "attention", scaling=scaling)
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
        chosen = _of(rows, "training", scaling=scaling)
        colors = _colors(chosen)
        for (what, _), points in _lines(chosen, "efficiency").items():
            begin = [] if points[0][0] == 1 else [(1, 1.0)]
            panel.plot(
                *zip(*begin, *points, strict=True),
                color=colors[what],
                linestyle=line,
                marker=".",
                label=f"{_SCHEMES[what]}, {scaling}",
            )
    chosen = _of(rows, "training")
    if chosen:
        panel.axhline(1, color=GREY, linewidth=0.8)
        panel.set_ylim(bottom=0)
    _over_workers(panel, chosen, "Private training steps", "efficiency")


def _draw_memory(panel: Any, rows: list[Row], key: str, title: str) -> None:
    chosen = [row for row in _of(rows, "memory") if row.get(key)]
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
    chosen = [row for row in _of(rows, "attention", scaling="strong") if row.get("bytes_counted")]
    chosen = [
        {
            **row,
            "counted": max(map(sum, row["bytes_counted"])) / _MIB,
            "predicted": max(map(sum, row["bytes_predicted"])) / _MIB,
        }
        for row in chosen
        if row["workers"] > 1
    ]
    colors = _colors(_of(rows, "attention", scaling="strong"))
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
    chosen = _of(rows, "reported", backward=False)
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
