"""The scaling benchmark's results as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .output import environment_table, markdown_table
from .reports_scaling import CONTEXT_PARALLEL, RING_DILATED, RING_DILATED_TABLE, Source

SCHEMES = {
    "replicated": "data parallel, replicated",
    "fsdp2": "data parallel, FSDP2",
    "context": "context parallel",
}
MIB = 2**20

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


def rows_of(rows: Sequence[Row], section: str, **wanted: Any) -> list[Row]:
    """The rows of a section whose config has some values."""
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
    config = rows_of(rows, "attention")[0]["config"] if rows_of(rows, "attention") else {}
    named = (("B", "batch"), ("H", "heads"), ("D", "head_dim"))
    sizes = [f"{letter} {config[name]}" for letter, name in named if name in config]
    return ", ".join(["dilated is [512, 1024] / [1, 2]", *sizes])


def _model_sizes(rows: Sequence[Row]) -> str:
    config = rows_of(rows, "training")[0]["config"]
    names = ("vocab", "width", "layers", "heads")
    return ", ".join(f"{name} {config[name]}" for name in names)


def _bytes(row: Row, key: str) -> str | None:
    """Of the busiest worker, MiB."""
    if not row.get(key):
        return None
    totals = [sum(each) if isinstance(each, list) else each for each in row[key]]
    return f"{max(totals) / MIB:.4g}"


def _attention(rows: list[Row]) -> list[str]:
    parts = []
    for scaling, title in (
        ("strong", "Attention, strong scaling: T fixed"),
        ("weak", "Attention, weak scaling: T of each worker fixed"),
    ):
        chosen = rows_of(rows, "attention", scaling=scaling)
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
    chosen = rows_of(rows, "memory")
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
    chosen = rows_of(rows, "reported")
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
        chosen = rows_of(rows, "training", scaling=scaling)
        if not chosen:
            continue
        lines = [
            (
                SCHEMES[row["what"]],
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
    most = max(rows_of(rows, "training"), key=lambda row: row["workers"])["workers"]
    purposes = [
        (SCHEMES[row["what"]], purpose, size / MIB)
        for row in rows_of(rows, "training", scaling="strong")
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


def _told(report: Source) -> str:
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
