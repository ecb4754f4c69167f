"""Private training on several worker processes: what each further worker adds.

Letters: B samples of a step, T tokens of each, P workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from . import output as results
from .document import Chart, Column, Table, column, config, milliseconds
from .environment import usable_cores
from .private_scaling import insight
from .scaling_tasks import TrainingCase, measure_training
from .suite import Request, Row, Suite, needs, worst
from .timing import Effort, speedup, summarize
from .workers import run_workers

WORKERS = (1, 2, 4, 8, 16)
CONTEXT_WORKERS = NODES = (1, 2, 4, 8)
SAMPLES, CONTEXT, NODE = "private_training", "context", "nodes"

_TIMEOUT = 900.0
_PROBE = Effort(warm_ups=0, trials=1)
# 12 heads of 64, in one layer, as in the table that these sizes come from.
_WIDTH, _HEADS, _LAYERS = 768, 12, 1


@dataclass(frozen=True)
class Task:
    """A private step.

    Attributes:
        section: of its rows.
        case: of all workers.
        alone: of one worker by itself, whose throughput is that of P = 1.
    """

    section: str
    case: TrainingCase
    alone: TrainingCase

    def row(self, workers: int, **columns: Any) -> Row:
        """The row of so many workers."""
        case = self.case
        return results.row(
            f"{self.section}/B{case.batch}/T{case.tokens}/P{workers}",
            {**asdict(case), "workers": workers, "dtype": "float32"},
            section=self.section,
            workers=workers,
            **columns,
        )


def task_row(task: Task, workers: int, said: Sequence[Mapping[str, Any]]) -> Row:
    """The row of a task, from what the workers returned, see `measure_training`."""
    row = task.row(
        workers,
        error=worst(one["error"] for one in said),
        correct=all(one["correct"] for one in said),
    )
    if not row["correct"]:
        return row
    # A step is through when its slowest worker is.
    seconds = [max(trial) for trial in zip(*(one["seconds"] for one in said), strict=True)]
    peaks = [one["peak_memory_mb"] for one in said]
    tokens, alone = (case.batch * case.tokens for case in (task.case, task.alone))
    row.update(
        summarize(seconds).as_row(),
        samples_ms=[1e3 * one for one in seconds],
        peak_memory_mb=None if None in peaks else max(peaks),
        parameters=said[0]["parameters"],
    )
    row["tasks_per_s"] = 1e3 / row["median_ms"]
    row["tokens_per_s"] = tokens * row["tasks_per_s"]
    if workers > 1:
        over = speedup(seconds, said[0]["alone_seconds"])
        gain = tokens / alone
        row.update(
            speedup=gain * over.median,
            speedup_ci95=[gain * end for end in over.ci95],
            efficiency=gain * over.median / workers,
            efficiency_ci95=[gain * end / workers for end in over.ci95],
        )
    else:
        row.update(speedup=1.0, speedup_ci95=None, efficiency=1.0, efficiency_ci95=None)
    return row


def _capacity(device: torch.device) -> int:
    """Workers that each have a core, or a GPU, of their own."""
    return torch.cuda.device_count() if device.type == "cuda" else usable_cores()


def _measured(task: Task, workers: int, request: Request) -> Row:
    capacity = _capacity(request.where)
    if workers > capacity:
        what = "GPUs" if request.where.type == "cuda" else "cores"
        return task.row(workers, needs=f"{workers} {what}: this machine has {capacity}")
    keywords = {"case": task.case, "alone": task.alone, "effort": request.calls}
    (said,) = run_workers(
        [(measure_training, keywords)], workers, device=request.where.type, timeout=_TIMEOUT
    )
    return task_row(task, workers, said)


def step_seconds(case: TrainingCase, request: Request) -> float:
    """Seconds of one step by one worker."""
    keywords = {"case": case, "alone": case, "effort": _PROBE}
    ((told,),) = run_workers(
        [(measure_training, keywords)], 1, device=request.where.type, timeout=_TIMEOUT
    )
    # What is wrong has no time, and is found to be wrong again where it has a row.
    return float(told["seconds"][0]) if told["correct"] else 0.0


def sample_tasks(request: Request) -> list[TrainingCase]:
    """B and T of the steps, the smallest first."""
    if request.quick:
        return [TrainingCase("replicated", 8, 32, width=_WIDTH, layers=_LAYERS, heads=_HEADS)]
    cases = [
        TrainingCase("replicated", batch, tokens, width=_WIDTH, layers=_LAYERS, heads=_HEADS)
        for batch in (8, 16, 32)
        for tokens in (256, 512, 1024)
    ]
    return sorted(cases, key=lambda case: (case.batch * case.tokens, case.batch))


def sample_rows(
    request: Request, seconds_of: Callable[[TrainingCase, Request], float] = step_seconds
) -> Iterator[Row]:
    """Strong scaling: the samples of a step are dealt out.

    Args:
        request: how to measure.
        seconds_of: a step by one worker, which tells whether a row's calls fit into its time.
    """
    calls = sum(asdict(request.calls).values())
    too_long: list[tuple[TrainingCase, float]] = []
    for case in sample_tasks(request):
        task = Task(SAMPLES, case, case)
        if not any(_contains(case, other) for other, _ in too_long):
            seconds = seconds_of(case, request)
            if seconds * calls <= request.limit:
                for workers in WORKERS:
                    yield _measured(task, workers, request)
                continue
            too_long.append((case, seconds))
        other, seconds = next(pair for pair in too_long if _contains(case, pair[0]))
        of_that = "" if other == case else f" of B {other.batch}, T {other.tokens} already"
        reason = (
            f"a faster device: one worker's step{of_that} takes {seconds:.3g} s, and {calls} "
            f"calls more than the {request.limit:g} s of a row (--max-seconds)"
        )
        for workers in WORKERS:
            yield task.row(workers, needs=reason)


def _contains(case: TrainingCase, other: TrainingCase) -> bool:
    """Whether a step does all that another one does, or more."""
    return case.batch >= other.batch and case.tokens >= other.tokens


def context_rows(request: Request) -> Iterator[Row]:
    """Weak scaling: each worker has so many tokens of every sample."""
    alone = TrainingCase("context", 2, 128 if request.quick else 512)
    for workers in CONTEXT_WORKERS:
        case = replace(alone, tokens=alone.tokens * workers)
        yield _measured(Task(CONTEXT, case, alone), workers, request)


def node_rows(request: Request) -> Iterator[Row]:
    """What several machines would be needed for."""
    for workers in NODES:
        yield needs(
            f"{NODE}/P{workers}",
            {"workers": workers, "model": "7B"},
            f"{workers} machine{'s' * (workers > 1)} with GPUs that hold a 7B model: "
            f"torchrun --nnodes {workers} -m dpflash train --shard-parameters",
            section=NODE,
            workers=workers,
        )


def throughput_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """What further workers add, as sentences."""
    for row in rows:
        if row.get("efficiency_ci95") is None:
            continue
        workers, case = row["workers"], row["config"]
        low, high = row["speedup_ci95"]
        yield insight(
            row["name"],
            f"{workers} workers with B = {case['batch']}, T = {case['tokens']:,} train "
            f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}] times the tokens/s of one, "
            f"{row['efficiency']:.0%} of {workers} times.",
            efficiency=row["efficiency"],
        )


def _efficiency(row: Mapping[str, Any]) -> str | None:
    if row.get("efficiency") is None:
        return None
    if row["efficiency_ci95"] is None:
        return f"{row['efficiency']:.0%}"
    low, high = row["efficiency_ci95"]
    return f"{row['efficiency']:.0%} [{low:.0%}, {high:.0%}]"


_FIGURES: tuple[Column, ...] = (
    column("workers", "P"),
    config("batch", "B"),
    config("tokens", "T"),
    ("ms of a step", milliseconds),
    column("tasks_per_s", "steps/s"),
    column("tokens_per_s", "tokens/s"),
    ("efficiency", _efficiency),
    column("peak_memory_mb", "peak MiB of a worker"),
    column("correct"),
)

SUITE = Suite(
    name="workers",
    title="Private training on several worker processes: throughput and efficiency",
    about=(
        "Private steps (per-sample clipping, noise, one sum over all workers) of a transformer "
        "on P worker processes of this machine: a GPU each, or "
        "one core and one thread each, and never more workers than cores. Efficiency is "
        "throughput(P) / (P throughput(1)); worker 0 by itself takes turns with all of them in "
        "the same processes, so that both see the same machine. Before anything is timed, the "
        "workers' step without noise is compared with a loop over single samples in one process. "
        "P, B and T are those of tables that earlier libraries published (dp-flash-attention and "
        "torchbridge). Bytes, memory and more ways to share the work are in `dpflash bench "
        "scaling`."
    ),
    plan=lambda request: [sample_rows, context_rows, node_rows],
    derive=throughput_rows,
    wall=True,
    tables=(
        Table(
            SAMPLES,
            "The samples of a step dealt out to P workers: strong scaling",
            _FIGURES,
            "A layer of 12 heads of 64; B and T stay as P grows.",
        ),
        Table(
            CONTEXT,
            "The tokens of each sample dealt out to P workers: weak scaling",
            _FIGURES,
            "Two layers of 4 heads of 32. T grows with P; attention is dense, so a token's work "
            "grows too, and an efficiency below 100% is not lost time alone. For attention by "
            "itself see `dpflash bench scaling`.",
        ),
        Table(NODE, "Several machines", (column("workers", "machines"), ("", milliseconds))),
    ),
    charts=(
        Chart(
            SAMPLES,
            "Throughput, strong scaling",
            ("workers", lambda row: row["workers"]),
            ("steps/s", lambda row: row.get("tasks_per_s")),
            lambda row: f"B {row['config']['batch']}, T {row['config']['tokens']}",
        ),
        Chart(
            CONTEXT,
            "Tokens/s, weak scaling",
            ("workers", lambda row: row["workers"]),
            ("tokens/s", lambda row: row.get("tokens_per_s")),
            lambda row: f"B {row['config']['batch']}",
        ),
    ),
)
