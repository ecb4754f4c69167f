"""Rows of calls on several ranks, and the suite "ranks": private training over numbers of ranks.

Letters: B samples, T tokens, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from . import output
from .document import Chart, Column, column, columns, insight, milliseconds, page, ratio
from .environment import usable_cores
from .isolated import run_ranks
from .scaling_tasks import TrainingCase, measure_training
from .suite import Request, Row, Suite, Unsupported, needs, refuse, too_slow, worst
from .timing import Effort, speedup, summarize
from .timing import columns as time_columns

SAMPLES, CONTEXT, NODE = "private_training", "context", "nodes"
RANKS = (1, 2, 4, 8, 16)
CONTEXT_RANKS = NODES = (1, 2, 4, 8)

_TIMEOUT = 900.0  # of one launch of ranks, seconds


def fill(row: Row, returned: Sequence[Mapping[str, Any]], *, is_short: bool = False) -> None:
    """Writes the results of a function of `scaling_tasks` by rank into the row."""
    row.update(
        error=worst(one["error"] for one in returned),
        correct=all(one["correct"] for one in returned),
    )
    if not row["correct"]:
        return
    first = returned[0]
    row.update(first["columns"])
    for key in ("peak_memory_mb", "saved_mb"):
        if key in first:
            each = [one[key] for one in returned]
            row.update({key: None if None in each else max(each), f"{key}_per_rank": each})
    if "seconds" not in first:
        return
    # A trial ends when its slowest rank does.
    seconds = [max(trial) for trial in zip(*(one["seconds"] for one in returned), strict=True)]
    row.update(time_columns(seconds, is_short=is_short), alone=None, speedup=1.0, efficiency=1.0)
    row["tokens_per_s"] = 1e3 * first["tokens"] / row["median_ms"]
    gain = first["tokens"] / first["tokens_alone"]
    if "alone_seconds" in first:
        over = speedup(seconds, first["alone_seconds"])
        row["alone"] = summarize(first["alone_seconds"]).as_row()
        row["speedup"] = gain * over.median
        row["efficiency"] = row["speedup"] / len(returned)
        if not is_short:
            row["speedup_ci95"] = [gain * end for end in over.ci95]
            row["efficiency_ci95"] = [end / len(returned) for end in row["speedup_ci95"]]
    if "edges_per_rank" in row:
        edges, work = row["edges_per_rank"], sum(row["edges_per_rank"])
        row["work_efficiency"] = row["efficiency"] * work / row.pop("edges_alone") / gain
        row["balance"] = max(edges) * len(edges) / work
    if "counted" in first:
        row["bytes_counted"] = [one["counted"] for one in returned]
        row["bytes_predicted"] = [one["predicted"] for one in returned]
        row["bytes_equal"] = row["bytes_counted"] == row["bytes_predicted"]


def blank_row(section: str, name: str, case: Any, ranks: int, **more: Any) -> Row:
    """A row of a case of `scaling_tasks`, before it is measured."""
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
    """Runs a function on ranks and fills each row with its results."""
    ranks, device = rows[0]["ranks"], request.where.type
    try:
        if device == "cuda" and ranks > torch.cuda.device_count():
            raise Unsupported(f"{ranks} GPUs: this machine has {torch.cuda.device_count()}")
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


def training_row(
    section: str,
    case: TrainingCase,
    alone: TrainingCase,
    ranks: int,
    request: Request,
    effort: Effort,
) -> Row:
    """The row of a private step by ranks that each have a core, or a GPU, of their own."""
    row = blank_row(section, f"B{case.batch}/T{case.tokens}", case, ranks)
    if request.where.type == "cpu" and ranks > usable_cores():
        return {**row, "needs": f"{ranks} cores: this machine has {usable_cores()}"}
    given: dict[str, Any] = {"case": case, "alone": alone, "effort": effort}
    on_ranks([row], measure_training, request, is_short=effort != request.calls, **given)
    if row["median_ms"] is not None:
        row["tasks_per_s"] = 1e3 / row["median_ms"]
    return row


def step_seconds(case: TrainingCase, request: Request) -> float:
    """Seconds of one step by one rank; 0 of a wrong one, which its row reports."""
    given = {"case": case, "alone": case, "effort": Effort(0, 1)}
    device = request.where.type
    ((found,),) = run_ranks(measure_training, 1, device=device, timeout=_TIMEOUT, **given)
    return float(found["seconds"][0]) if found["correct"] else 0.0


def sample_cases(request: Request) -> list[TrainingCase]:
    """B and T of the steps, the smallest first; 12 heads of 64, as in a published table."""
    sizes = [(batch, tokens) for batch in (8, 16, 32) for tokens in (256, 512, 1024)]
    cases = [
        TrainingCase("replicated", *size, width=768, layers=1, heads=12)
        for size in ([(8, 32)] if request.quick else sizes)
    ]
    return sorted(cases, key=lambda case: (case.batch * case.tokens, case.batch))


def sample_rows(request: Request) -> Iterator[Row]:
    """Strong scaling: the samples of a step are spread over the ranks."""
    slow: list[tuple[TrainingCase, float]] = []
    for case in sample_cases(request):
        # A step with as many samples and tokens, or more, takes no less time.
        known = [
            one for one in slow if case.batch >= one[0].batch and case.tokens >= one[0].tokens
        ]
        effort = None
        if not known:
            seconds = step_seconds(case, request)
            effort = request.calls.within(seconds, request.limit)
            known = [(case, seconds)]
            slow += known if effort is None else []
        for ranks in RANKS:
            if effort is not None:
                yield training_row(SAMPLES, case, case, ranks, request, effort)
                continue
            other, seconds = known[0]
            size = "" if other == case else f" of B {other.batch}, T {other.tokens} already"
            reason = too_slow(f"one rank's step{size} takes {seconds:.3g} s", request.limit)
            row = blank_row(SAMPLES, f"B{case.batch}/T{case.tokens}", case, ranks)
            yield {**row, "needs": reason}


def context_rows(request: Request) -> Iterator[Row]:
    """Weak scaling: each rank has the same number of tokens of every sample."""
    alone = TrainingCase("context", 2, 128 if request.quick else 512)
    for ranks in CONTEXT_RANKS:
        case = replace(alone, tokens=alone.tokens * ranks)
        yield training_row(CONTEXT, case, alone, ranks, request, request.calls)


def node_rows(request: Request) -> Iterator[Row]:
    """Rows that need several machines."""
    for nodes in NODES:
        yield needs(
            f"{NODE}/P{nodes}",
            {"ranks": nodes, "model": "7B"},
            f"{nodes} machine{'s' * (nodes > 1)} with GPUs that hold a 7B model: "
            f"torchrun --nnodes {nodes} -m dpflash train --shard-parameters",
            section=NODE,
            ranks=nodes,
        )


def throughput_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """The speed-up of further ranks, as sentences."""
    for row in rows:
        if row.get("efficiency_ci95") is not None:
            ranks, case = row["ranks"], row["config"]
            yield insight(
                row["name"],
                f"{ranks} ranks with B = {case['batch']}, T = {case['tokens']:,} train "
                f"{ratio(row)} times the tokens/s of one, "
                f"{row['efficiency']:.0%} of {ranks} times.",
                efficiency=row["efficiency"],
            )


_STEPS = columns(
    [P],
    "batch: B | tokens: T",
    [("ms of a step", milliseconds)],
    "tasks_per_s: steps/s | tokens_per_s: tokens/s",
    [EFFICIENCY, PEAK],
    "correct",
)
_MACHINES = columns("ranks: machines", [("", milliseconds)])
SUITE = Suite(
    name="ranks",
    plan=lambda request: [sample_rows, context_rows, node_rows],
    derive=throughput_rows,
    on_ranks=True,
    **page("ranks", {SAMPLES: _STEPS, CONTEXT: _STEPS, NODE: _MACHINES}),
    charts=(
        Chart(
            SAMPLES,
            "Throughput, strong scaling",
            X,
            column("tasks_per_s", "steps/s"),
            lambda row: f"B {row['config']['batch']}, T {row['config']['tokens']}",
        ),
        Chart(
            CONTEXT,
            "Tokens/s, weak scaling",
            X,
            column("tokens_per_s", "tokens/s"),
            lambda row: f"B {row['config']['batch']}",
        ),
    ),
)
