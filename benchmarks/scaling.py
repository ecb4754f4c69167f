"""The scaling benchmark: attention and private training on several worker processes.

It checks every configuration against one process, counts the bytes that workers send beside those
predicted, times strong and weak scaling, measures memory for each worker, sets figures that others
report beside, and ends with a model of larger clusters, which is none of these measurements.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dpflash import _validate
from dpflash.distributed import edges_per_rank

from . import output as results
from .environment import environment, usable_cores
from .reports_scaling import RING_DILATED_TABLE, claimed_rows
from .scaling_model import ASSUMPTIONS, FLOPS_OF_AN_EDGE, Link, link_of, load_of, step_time
from .scaling_tasks import (
    MODES,
    PATTERNS,
    SCHEMES,
    AttentionCase,
    TrainingCase,
    measure_attention,
    measure_attention_memory,
    measure_training,
)
from .timing import FULL, QUICK, Effort, summarize
from .workers import Task, TaskError, run_workers

SECTIONS = ("attention", "memory", "reported", "training", "model")
WORKERS = (1, 2, 4)

_WORKERS_A_CORE = 8
# Name, pattern, sharding.
_SPREADS = (
    ("dense causal", "dense causal", "contiguous"),
    ("dense causal, zigzag", "dense causal", "zigzag"),
    ("dilated", "dilated", "contiguous"),
    ("sliding window", "sliding window", "contiguous"),
)


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        heads, head_dim: of attention, float32.
        strong: T of strong scaling, by pattern; others are left out.
        weak: T of each worker in weak scaling, by pattern.
        modes: how keys and values travel.
        memory: (pattern, sharding, modes, T) whose memory is measured.
        reported: (T, B) of the rows of the report.
        checked_tokens: T of the comparison with one process.
        training: of strong scaling over samples and over tokens; weak scaling gives each worker
            `training_part` of its samples, or of its tokens.
        training_part: divisor of B and of T.
        schemes: of training.
        modelled: tokens of each worker (weak) and of all (strong), by name in the model.
        modelled_workers: P of the model.
    """

    heads: int = 8
    head_dim: int = 64
    strong: Mapping[str, int] = field(
        default_factory=lambda: {"dense causal": 4096, "dilated": 8192, "sliding window": 8192}
    )
    weak: Mapping[str, int] = field(
        default_factory=lambda: {"dense causal": 2048, "dilated": 4096, "sliding window": 4096}
    )
    modes: Sequence[str] = MODES
    memory: Sequence[tuple[str, str, Sequence[str], int]] = (
        ("dense causal", "zigzag", MODES, 16384),
        ("dilated", "contiguous", ("ring",), 65536),
    )
    reported: Sequence[tuple[int, int]] = tuple(line[:2] for line in RING_DILATED_TABLE)
    checked_tokens: int = 2051
    training: TrainingCase = TrainingCase("replicated", 16, 512)
    training_part: int = 4
    schemes: Sequence[str] = SCHEMES
    modelled: Mapping[str, int] = field(
        default_factory=lambda: {"weak": 8192, "strong": 1024 * 1024}
    )
    modelled_workers: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024)


FULL_SIZES = Sizes()
QUICK_SIZES = Sizes(
    strong={"dense causal": 1024, "dilated": 2048, "sliding window": 2048},
    weak={"dense causal": 512, "dilated": 1024, "sliding window": 1024},
    memory=(
        ("dense causal", "zigzag", ("ring",), 4096),
        ("dilated", "contiguous", ("ring",), 16384),
    ),
    reported=tuple(line[:2] for line in RING_DILATED_TABLE[:3]),
    checked_tokens=1027,
    training=TrainingCase("replicated", 8, 128, width=64),
)


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        workers: numbers of worker processes.
        effort: how often each call is timed.
        sizes: how large everything is.
        sections: of SECTIONS.
        device: "auto" (a GPU for each worker where there are as many, else the CPU), "cpu" or
            "cuda".
        timeout: seconds that a task of the workers may take.
        flops: FLOP/s of workers that the model assumes beside the measured ones.
        link: of LINKS, for the model; None for all.
        link_gbps: GB/s of the model's link.
        link_latency_us: microseconds of the model's link.
        has_progress: whether a bar is drawn on stderr.
    """

    workers: Sequence[int] = WORKERS
    effort: Effort = FULL
    sizes: Sizes = FULL_SIZES
    sections: Sequence[str] = SECTIONS
    device: str = "auto"
    timeout: float = 900.0
    flops: Sequence[float] = ()
    link: str | None = None
    link_gbps: float | None = None
    link_latency_us: float | None = None
    has_progress: bool = True

    @classmethod
    def quick(cls, **changes: Any) -> Request:
        """Small sizes and few trials."""
        return cls(**{"effort": QUICK, "sizes": QUICK_SIZES, **changes})


def run_scaling(request: Request, path: Path) -> dict[str, Any]:
    """Measures, and writes the JSON, a Markdown and a PNG of the same name beside it.

    The JSON is written again after each task, "complete" tells whether it was the last.

    Args:
        request: what to measure.
        path: of the JSON; its folder is there.

    Returns:
        What the JSON holds.

    Raises:
        ValueError: for a request that cannot be met, before anything is started.
        TaskError: a worker failed; what was measured before is in the JSON.
    """
    from .scaling_document import markdown
    from .scaling_picture import draw

    device, links = _check(request)
    results.require_drawing()
    found: dict[str, Any] = {
        "environment": {
            **environment(device, 1),
            "workers": list(request.workers),
            "warm_ups": request.effort.warm_ups,
            "trials": request.effort.trials,
            "quick": request.effort.trials < FULL.trials,
            "clock": "CUDA events" if device == "cuda" else "wall",
            "time_of_a_trial": "of the slowest worker; all begin behind a barrier",
            "efficiency": "over worker 0 alone, which takes turns in the same processes",
            "memory": "growth of the allocator's peak"
            if device == "cuda"
            else "growth of VmHWM during a call",
        },
        "complete": False,
        "rows": [],
        "reported": claimed_rows(),
        "assumptions": list(ASSUMPTIONS),
    }
    plan = list(_plan(request))
    cores = torch.cuda.device_count() if device == "cuda" else usable_cores()
    with tqdm(
        total=sum(len(jobs) for _, jobs in plan),
        desc="scaling",
        unit="task",
        disable=not request.has_progress,
        file=sys.stderr,
    ) as bar:
        for workers, jobs in plan:
            tasks = [job.task for job in jobs]
            told = run_workers(tasks, workers, device=device, timeout=request.timeout)
            for job in jobs:
                bar.set_postfix_str(f"{workers} worker{'s' * (workers > 1)}, {job.name}")
                try:
                    said = next(told)
                except TaskError as error:
                    raise TaskError(
                        f"{job.name} on {workers} workers: {error}\nWhat was measured before is "
                        f"in {path}"
                    ) from error
                for row in job.rows(said):
                    row["oversubscribed"] = workers > cores
                    found["rows"].append(row)
                results.write_json(path, found)
                bar.update()
            next(told, None)  # they end by themselves
    if "model" in request.sections:
        found["rows"] += _model_rows(request, links, found["rows"])
    found["complete"] = True
    results.write_json(path, found)
    results.write_text(path.with_suffix(".md"), markdown(found))
    results.write_picture(path.with_suffix(".png"), draw(found))
    return found


def _check(request: Request) -> tuple[str, list[Link]]:
    """The device and the model's links of a request that can be met."""
    _validate.one_of(device=(request.device, ("auto", "cpu", "cuda")))
    if not request.workers:
        raise ValueError("workers=(): expected at least one number; pass such as 1,2,4")
    for number in request.workers:
        _validate.positive_int(workers=number)
    for section in request.sections:
        _validate.one_of(sections=(section, SECTIONS))
    _validate.positive(timeout=request.timeout)
    _validate.finite(timeout=request.timeout)
    for flops in request.flops:
        _validate.positive(flops=flops)
        _validate.finite(flops=flops)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    most = max(request.workers)
    device = request.device
    if device == "auto":
        device = "cuda" if gpus >= most else "cpu"
    if device == "cuda" and most > gpus:
        raise ValueError(
            f"workers={most} on {gpus} GPUs: each worker needs one of its own; pass fewer "
            "workers, or device='cpu'"
        )
    limit = _WORKERS_A_CORE * usable_cores()
    if device == "cpu" and most > limit:
        raise ValueError(
            f"workers={most}: this machine has {usable_cores()} cores, on which at most {limit} "
            "workers tell anything; pass fewer"
        )
    links = link_of(request.link, request.link_gbps, request.link_latency_us)
    return device, links


@dataclass(frozen=True)
class _Job:
    """A task, and the rows that come of what workers return."""

    name: str
    task: Task
    rows: Callable[[list[Any]], list[dict[str, Any]]]


def _plan(request: Request) -> Iterator[tuple[int, list[_Job]]]:
    """(number of workers, what they do one after the other), each with processes of its own."""
    for workers in request.workers:
        jobs: list[_Job] = []
        if "attention" in request.sections:
            jobs += _attention_jobs(request, workers)
        if "reported" in request.sections:
            jobs += _reported_jobs(request, workers)
        if "training" in request.sections:
            jobs += _training_jobs(request, workers)
        if jobs:
            yield workers, jobs
    if "memory" in request.sections:
        for workers in request.workers:
            for job in _memory_jobs(request, workers):
                yield workers, [job]


def _modes(request: Request, workers: int, modes: Sequence[str]) -> list[str]:
    """Those that differ and are possible on so many workers."""
    if workers == 1:
        return ["ring"]
    return [mode for mode in modes if mode != "ulysses" or request.sizes.heads >= workers]


def _attention_jobs(request: Request, workers: int) -> Iterator[_Job]:
    sizes = request.sizes
    for scaling in ("strong", "weak"):
        lengths = sizes.strong if scaling == "strong" else sizes.weak
        for name, pattern, sharding in _SPREADS:
            if pattern not in lengths:
                continue
            alone = lengths[pattern]
            tokens = alone * (workers if scaling == "weak" else 1)
            cases = [
                AttentionCase(
                    pattern,
                    tokens,
                    sizes.heads,
                    sizes.head_dim,
                    sharding=sharding,
                    mode=mode,
                    checked_tokens=sizes.checked_tokens,
                )
                for mode in _modes(request, workers, sizes.modes)
            ]
            yield _attention_job("attention", scaling, name, cases, workers, alone, request.effort)


def _reported_jobs(request: Request, workers: int) -> Iterator[_Job]:
    sizes = request.sizes
    for tokens, batch in sizes.reported:
        case = AttentionCase(
            "dilated",
            tokens,
            sizes.heads,
            sizes.head_dim,
            batch,
            checked_tokens=sizes.checked_tokens,
        )
        cases = [case, replace(case, backward=False)]
        yield _attention_job(
            "reported", "strong", "dilated", cases, workers, tokens, request.effort
        )


def _attention_job(
    section: str,
    scaling: str,
    name: str,
    cases: list[AttentionCase],
    workers: int,
    alone: int,
    effort: Effort,
) -> _Job:
    def rows(said: list[Any]) -> list[dict[str, Any]]:
        return [
            _attention_row(
                section, scaling, name, case, workers, alone, [one[number] for one in said]
            )
            for number, case in enumerate(cases)
        ]

    title = f"{section}, {scaling}, {name}, {cases[0].tokens} tokens"
    keywords = {"cases": cases, "tokens_alone": alone, "effort": effort}
    return _Job(title, (measure_attention, keywords), rows)


def _attention_row(
    section: str,
    scaling: str,
    name: str,
    case: AttentionCase,
    workers: int,
    alone: int,
    said: list[dict[str, Any]],
) -> dict[str, Any]:
    direction = "forward+backward" if case.backward else "forward"
    config = {**asdict(case), "workers": workers, "scaling": scaling, "dtype": "float32"}
    label = f"{section}/{scaling}/{name}/{case.mode}/{direction}/T{case.tokens}/P{workers}"
    row = results.row(
        label,
        config,
        kind="measurement",
        section=section,
        what=name,
        workers=workers,
        correct=all(one["correct"] for one in said),
        error=max(one["error"] for one in said),
    )
    if not row["correct"]:
        return row
    edges = edges_per_rank(PATTERNS[case.pattern], case.tokens, case.heads, workers, case.sharding)
    counted = [one["counted"] for one in said]
    predicted = [one["predicted"] for one in said]
    (edges_alone,) = edges_per_rank(PATTERNS[case.pattern], alone, case.heads, 1)
    times = _times_alone(said)
    row.update(
        _timed(said, case.batch * case.tokens),
        efficiency=case.tokens / alone / times / workers,
        work_efficiency=sum(edges) / edges_alone / times / workers,
        edges_per_rank=[case.batch * number for number in edges],
        balance=max(edges) / statistics.mean(edges),
        bytes_counted=counted,
        bytes_predicted=predicted,
        bytes_equal=counted == predicted,
    )
    return row


def _times_alone(said: list[dict[str, Any]]) -> float:
    """How many times as long as one worker alone: the median over the rounds; 1 of one worker."""
    base = said[0].get("alone_seconds")
    if base is None:
        return 1.0
    return statistics.median(own / one for own, one in zip(_slowest(said), base, strict=True))


def _slowest(said: list[dict[str, Any]]) -> list[float]:
    """Seconds of each trial, which are those of its slowest worker."""
    return [max(trial) for trial in zip(*(one["seconds"] for one in said), strict=True)]


def _timed(said: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
    """Statistics of the trials, of those of one worker alone, and what follows."""
    found = summarize(_slowest(said))
    alone = said[0].get("alone_seconds")
    peaks = [one["peak_memory_mb"] for one in said]
    return {
        **found.as_row(),
        "tokens_per_s": 1e3 * tokens / found.median_ms,
        "alone": None if alone is None else summarize(alone).as_row(),
        "peak_memory_mb": None if None in peaks else max(peaks),
        "peak_memory_mb_per_rank": peaks,
    }


def _memory_jobs(request: Request, workers: int) -> Iterator[_Job]:
    sizes = request.sizes
    for pattern, sharding, modes, tokens in sizes.memory:
        for mode in _modes(request, workers, modes):
            case = AttentionCase(
                pattern,
                tokens,
                sizes.heads,
                sizes.head_dim,
                sharding=sharding,
                mode=mode,
                checked_tokens=min(sizes.checked_tokens, tokens),
            )
            yield _memory_job(case, workers)


def _memory_job(case: AttentionCase, workers: int) -> _Job:
    def rows(said: list[Any]) -> list[dict[str, Any]]:
        peaks = [one.get("peak_memory_mb") for one in said]
        saved = [one.get("saved_mb") for one in said]
        return [
            results.row(
                f"memory/{case.pattern}/{case.mode}/T{case.tokens}/P{workers}",
                {**asdict(case), "workers": workers, "dtype": "float32"},
                kind="measurement",
                section="memory",
                what=case.pattern,
                workers=workers,
                correct=all(one["correct"] for one in said),
                error=max(one["error"] for one in said),
                peak_memory_mb=None if None in peaks else max(peaks),
                peak_memory_mb_per_rank=peaks,
                saved_mb=None if None in saved else max(saved),
                saved_mb_per_rank=saved,
            )
        ]

    title = f"memory, {case.pattern}, {case.mode}, {case.tokens} tokens"
    return _Job(title, (measure_attention_memory, {"case": case}), rows)


def _training_jobs(request: Request, workers: int) -> Iterator[_Job]:
    sizes, part = request.sizes, request.sizes.training_part
    for scheme in sizes.schemes:
        case = replace(sizes.training, scheme=scheme)
        if workers == 1 and scheme == "fsdp2":
            continue  # the same as replicated
        yield _training_job(case, case, "strong", workers, request.effort)
        if scheme == "context":
            alone = replace(case, tokens=case.tokens // part)
            weak = replace(alone, tokens=alone.tokens * workers)
        else:
            alone = replace(case, batch=max(1, case.batch // part))
            weak = replace(alone, batch=alone.batch * workers)
        yield _training_job(weak, alone, "weak", workers, request.effort)


def _training_job(
    case: TrainingCase, alone: TrainingCase, scaling: str, workers: int, effort: Effort
) -> _Job:
    def rows(said: list[Any]) -> list[dict[str, Any]]:
        row = results.row(
            f"training/{scaling}/{case.scheme}/B{case.batch}/T{case.tokens}/P{workers}",
            {**asdict(case), "workers": workers, "scaling": scaling, "dtype": "float32"},
            kind="measurement",
            section="training",
            what=case.scheme,
            workers=workers,
            correct=all(one["correct"] for one in said),
            error=max(one["error"] for one in said),
        )
        if row["correct"]:
            counted = [one["counted"] for one in said]
            predicted = [one["predicted"] for one in said]
            row.update(
                _timed(said, tokens),
                efficiency=tokens / tokens_alone / _times_alone(said) / workers,
                parameters=said[0]["parameters"],
                bytes_counted=counted,
                bytes_predicted=predicted,
                bytes_equal=counted == predicted,
                bytes_by_purpose=said[0]["by_purpose"],
            )
        return [row]

    tokens, tokens_alone = case.batch * case.tokens, alone.batch * alone.tokens
    title = f"training, {scaling}, {case.scheme}"
    keywords = {"case": case, "alone": alone, "effort": effort}
    return _Job(title, (measure_training, keywords), rows)


def measured_flops(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """FLOP/s of one worker in forward and backward passes, by pattern, where it was measured."""
    found: dict[str, float] = {}
    for row in rows:
        config = row["config"]
        if row["section"] != "attention" or config["scaling"] != "strong" or not row["correct"]:
            continue
        milliseconds = (row["alone"] or row)["median_ms"]
        operations = FLOPS_OF_AN_EDGE * config["head_dim"] * sum(row["edges_per_rank"])
        found.setdefault(config["pattern"], 1e3 * operations / milliseconds)
    return found


def _model_rows(
    request: Request, links: Sequence[Link], rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    sizes = request.sizes
    speeds = [("measured with one worker", measured_flops(rows), torch.float32)]
    for flops in request.flops:
        given = dict.fromkeys(PATTERNS, flops)
        speeds.append((f"given, {flops:g} FLOP/s", given, torch.bfloat16))
    found = []
    for scaling, length in sizes.modelled.items():
        for name, pattern, sharding in _SPREADS:
            for workers in sizes.modelled_workers:
                tokens = length * workers if scaling == "weak" else length
                for source, flops_of, dtype in speeds:
                    if pattern not in flops_of:
                        continue
                    load = load_of(
                        PATTERNS[pattern],
                        tokens,
                        sizes.heads,
                        sizes.head_dim,
                        dtype,
                        workers,
                        sharding,
                    )
                    for link in links:
                        taken = step_time(load, sizes.head_dim, flops_of[pattern], link)
                        config = {
                            "pattern": pattern,
                            "scaling": scaling,
                            "tokens": tokens,
                            "heads": sizes.heads,
                            "head_dim": sizes.head_dim,
                            "dtype": str(dtype).removeprefix("torch."),
                            "sharding": sharding,
                            "workers": workers,
                            "flops": flops_of[pattern],
                            "flops_source": source,
                            "link": link.name,
                            "link_bytes_per_s": link.bandwidth,
                            "link_latency_s": link.latency,
                        }
                        label = f"model/{scaling}/{name}/P{workers}/{source}/{link.name}"
                        found.append(
                            results.row(
                                label,
                                config,
                                kind="model",
                                section="model",
                                what=name,
                                workers=workers,
                                edges=load.greatest,
                                bytes_sent=load.sent,
                                messages=load.messages,
                                compute_ms=1e3 * taken.compute,
                                exchange_ms=1e3 * taken.exchange,
                                modelled_ms=1e3 * taken.apart,
                                modelled_overlapped_ms=1e3 * taken.overlapped,
                                efficiency=taken.efficient / taken.apart,
                                efficiency_overlapped=taken.efficient / taken.overlapped,
                            )
                        )
    return found
