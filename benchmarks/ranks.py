"""Rows measured on several ranks, and the suite "ranks": private training by number of ranks.

Letters: B samples, T tokens, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from dpflash.clipping.device_speed import usable_cores

from . import output
from .document import Column, chart, column, columns, milliseconds, page, with_interval
from .isolated import run_ranks
from .scaling_tasks import TrainingCase, measure_training
from .suite import Request, Row, Suite, Unsupported, refuse, too_slow, worst
from .timing import Effort, speedup, summarize
from .timing import columns as time_columns

SAMPLES, CONTEXT, NODE = "private_training", "context", "nodes"
RANKS = (1, 2, 4, 8, 16)
CONTEXT_RANKS = NODES = (1, 2, 4, 8)
# B and T of the steps, which have 12 heads of 64, as in a published table.
SIZES = ((8, 256), (16, 512))

_TIMEOUT = 900.0  # seconds that one launch of ranks may take
_MIB = 2**20


def fill(row: Row, returned: Sequence[Mapping[str, Any]], *, is_short: bool = False) -> None:
    """Write the results of a `scaling_tasks` function, one result per rank, into the row."""
    row.update(
        error=worst(one["error"] for one in returned),
        correct=all(one["correct"] for one in returned),
    )
    if not row["correct"]:
        return
    first = returned[0]
    peaks = [one["peak_memory_mb"] for one in returned]
    row["peak_memory_mb"] = None if None in peaks else max(peaks)
    if "seconds" not in first:
        return
    # A trial ends when its slowest rank does.
    seconds = [max(trial) for trial in zip(*(one["seconds"] for one in returned), strict=True)]
    row.update(time_columns(seconds, is_short=is_short), alone=None, speedup=1.0, efficiency=1.0)
    row["tokens_per_s"] = 1e3 * first["tokens"] / row["median_ms"]
    gain = first["tokens"] / first["tokens_alone"]
    if first.get("alone_seconds"):
        over = speedup(seconds, first["alone_seconds"])
        row["alone"] = summarize(first["alone_seconds"]).as_row()
        row["speedup"] = gain * over.median
        row["efficiency"] = row["speedup"] / len(returned)
        if not is_short:
            row["speedup_ci95"] = [gain * end for end in over.ci95]
            row["efficiency_ci95"] = [end / len(returned) for end in row["speedup_ci95"]]
    if "plain_seconds" in first:
        row.update(_over_plain(seconds, returned, is_short=is_short))
    if "edges" in first:
        row["work_efficiency"] = row["efficiency"] * first["edges"] / first["edges_alone"] / gain


def _over_plain(
    seconds: Sequence[float], returned: Sequence[Mapping[str, Any]], *, is_short: bool
) -> Row:
    """Return the columns that compare a private step with the plain step of the same ranks."""

    def trials(key: str) -> Iterator[tuple[float, ...]]:
        return zip(*(one[key] for one in returned), strict=True)

    found: Row = {}
    for key in ("collectives", "sent_bytes"):
        for name in (key, f"plain_{key}"):
            found[name] = max(one[name] for one in returned)
    plain = [max(trial) for trial in trials("plain_seconds")]
    found["plain_ms"] = summarize(plain).median_ms
    ratios = {"overhead": speedup(plain, seconds)}
    if "cpu_seconds" in returned[0]:
        # A rank uses no processor time while it waits, so the mean over the ranks is used.
        own, others = (
            [sum(trial) / len(trial) for trial in trials(key)]
            for key in ("cpu_seconds", "plain_cpu_seconds")
        )
        found["cpu_ms"], found["plain_cpu_ms"] = (summarize(x).median_ms for x in (own, others))
        ratios["cpu_overhead"] = speedup(others, own)
    for key, ratio in {} if is_short else ratios.items():
        found.update({key: ratio.median, f"{key}_ci95": list(ratio.ci95)})
    return found


def blank_row(section: str, name: str, case: Any, ranks: int, **more: Any) -> Row:
    """Return the row of a case of `scaling_tasks` before it is measured."""
    shape = {**asdict(case), "ranks": ranks, **more, "dtype": "float32"}
    return output.row(f"{section}/{name}/P{ranks}", shape, section=section, ranks=ranks)


def on_ranks(
    rows: Sequence[Row],
    function: Callable[..., list[dict[str, Any]]],
    request: Request,
    *,
    is_short: bool = False,
    **arguments: Any,
) -> Sequence[Row]:
    """Run a function on ranks and fill each row with its results."""
    ranks, device = rows[0]["ranks"], request.where.type
    try:
        if device == "cuda" and ranks > torch.cuda.device_count():
            raise Unsupported(f"{ranks} GPUs: this machine has {torch.cuda.device_count()}")
        config = rows[0]["config"]
        if config.get("scheme", "context") != "context" and config["batch"] < ranks:
            raise Unsupported(f"{ranks} samples, one for each rank of the plain step")
        returned = run_ranks(function, ranks, device=device, timeout=_TIMEOUT, **arguments)
        for number, row in enumerate(rows):
            row["oversubscribed"] = device == "cpu" and ranks > usable_cores()
            fill(row, [one[number] for one in returned], is_short=is_short)
    except Exception as error:
        for row in rows:
            refuse(row, error)
    return rows


def _efficiency(row: Mapping[str, Any]) -> str | None:
    if row.get("efficiency") is None:
        return None
    interval = row.get("efficiency_ci95")
    shown = f" [{interval[0]:.0%}, {interval[1]:.0%}]" if interval else ""
    return f"{row['efficiency']:.0%}{shown}"


P: Column = ("P", lambda row: f"{row['ranks']}{' over' * bool(row.get('oversubscribed'))}")
X: Column = ("P", lambda row: row["ranks"])
PEAK = column("peak_memory_mb", "peak MiB of a rank")
EFFICIENCY: Column = ("efficiency", _efficiency)
CPU_OVERHEAD = with_interval("cpu_overhead", "CPU time over nonprivate", ".2f")


def _with_plain(key: str, header: str, unit: float, form: str) -> Column:
    """Return a column that shows a private step's figure, and the plain step's in brackets."""

    def cell(row: Mapping[str, Any]) -> str | None:
        if row.get(key) is None:
            return None
        private, plain = (row[name] / unit for name in (key, f"plain_{key}"))
        return f"{private:{form}} ({plain:{form}})"

    return header, cell


OVER_PLAIN: Sequence[Column] = (
    with_interval("overhead", "time over nonprivate", ".2f"),
    CPU_OVERHEAD,
    _with_plain("collectives", "calls (nonprivate)", 1, ".0f"),
    _with_plain("sent_bytes", "MiB sent (nonprivate)", _MIB, ".2f"),
)


def training_row(
    section: str,
    case: TrainingCase,
    alone: TrainingCase,
    ranks: int,
    request: Request,
    effort: Effort,
) -> Row:
    """Return the row of a private step on several ranks, each with its own core or GPU."""
    row = blank_row(section, f"B{case.batch}/T{case.tokens}", case, ranks)
    if request.where.type == "cpu" and ranks > usable_cores():
        return {**row, "needs": f"{ranks} cores: this machine has {usable_cores()}"}
    given: dict[str, Any] = {"case": case, "alone": alone, "effort": effort}
    on_ranks([row], measure_training, request, is_short=effort != request.calls, **given)
    if row["median_ms"] is not None:
        row["tasks_per_s"] = 1e3 / row["median_ms"]
    return row


def step_seconds(case: TrainingCase, request: Request) -> float:
    """Return the seconds of a step on one rank, or 0 if the step's result is wrong."""
    given = {"case": case, "alone": case, "effort": Effort(0, 1)}
    device = request.where.type
    ((found,),) = run_ranks(measure_training, 1, device=device, timeout=_TIMEOUT, **given)
    return float(found["seconds"][0]) if found["correct"] else 0.0


def sample_rows(request: Request) -> Iterator[Row]:
    """Yield rows of strong scaling: the ranks divide the samples of a step."""
    for size in [(8, 32)] if request.quick else SIZES:
        case = TrainingCase("replicated", *size, width=768, layers=1, heads=12)
        seconds = step_seconds(case, request)
        effort = request.calls.within(seconds, request.limit)
        for ranks in RANKS:
            if effort is not None:
                yield training_row(SAMPLES, case, case, ranks, request, effort)
                continue
            reason = too_slow(f"one rank's step takes {seconds:.3g} s", request.limit)
            row = blank_row(SAMPLES, f"B{case.batch}/T{case.tokens}", case, ranks)
            yield {**row, "needs": reason}


def context_rows(request: Request) -> Iterator[Row]:
    """Yield rows of weak scaling: each rank has a fixed number of tokens of every sample."""
    alone = TrainingCase("context", 2, 128 if request.quick else 512)
    for ranks in CONTEXT_RANKS:
        case = replace(alone, tokens=alone.tokens * ranks)
        yield training_row(CONTEXT, case, alone, ranks, request, request.calls)


def node_rows(request: Request) -> Iterator[Row]:
    """Yield rows without figures for runs that need several machines."""
    command = "dpflash train --shard-parameters"
    for nodes in NODES:
        machines = f"{nodes} machine{'s' * (nodes > 1)} with GPUs that hold a 7B model"
        reason = f"{machines}: torchrun --nnodes {nodes} -m {command}"
        columns = {"needs": reason, "section": NODE, "ranks": nodes}
        yield output.row(f"{NODE}/P{nodes}", {"ranks": nodes}, **columns)


_STEPS = columns(
    [P],
    "batch: B | tokens: T",
    [("ms of a step", milliseconds)],
    "tasks_per_s: steps/s | tokens_per_s: tokens/s",
    [EFFICIENCY, *OVER_PLAIN, PEAK],
    "correct",
)


SUITE = Suite(
    name="ranks",
    plan=lambda request: [sample_rows, context_rows, node_rows],
    on_ranks=True,
    **page(
        "ranks",
        {SAMPLES: _STEPS, CONTEXT: _STEPS, NODE: columns("ranks: machines", [("", milliseconds)])},
    ),
    charts=[
        chart(SAMPLES, "Throughput, strong scaling", X, "tasks_per_s: steps/s", "batch tokens"),
        chart(CONTEXT, "Tokens/s, weak scaling", X, "tokens_per_s: tokens/s", "batch"),
    ],
)
