"""Runs a benchmark: checks, measures and times what it compares, and writes what it found.

A benchmark (`Suite`) is a plan of comparisons. What is compared takes turns, so that its ratios
hold on a machine that others use too; what is wrong, or cannot run here, has no figures but a
reason. The JSON is written again after each comparison, so that nothing is lost.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from dpflash import _validate
from dpflash.ceilings import Ceilings

from . import results
from .document import Chart, Table, draw, markdown
from .environment import environment
from .isolated import OutOfMemory, OutOfTime, brief, is_out_of_memory, run_isolated
from .memory import device_memory, peak_growth
from .roofline import measured_roofs, place_under_roofs
from .timing import FULL, QUICK, Effort, Step, Stopwatch, speedup, summarize, time_steps
from .trace import trace_call
from .work import Work

Row = dict[str, Any]

_MIB = 2**20
# Of the machine's memory, on a CPU.
_MOST_MEMORY = 0.6
_SECONDS_TO_PREPARE = 60


class Unsupported(Exception):
    """This cannot run here; the message says what it would need."""


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        step: one call.
        error: relative error of what it computes; called before anything is timed, None where
            `what is right` is checked by another row of the comparison.
        tolerance: that the error may have.
        tokens: that one call goes through.
        work: of one call, where it is known.
        dtype: of its products, for the roofs.
        figures: further columns of its row.
        told: further columns that only its calls tell; read after the last one.
    """

    step: Step
    error: Callable[[], float]
    tolerance: float
    tokens: int | None = None
    work: Callable[[], Work] | None = None
    dtype: str = "float32"
    figures: Mapping[str, Any] = field(default_factory=dict)
    told: Callable[[], Mapping[str, Any]] = dict


# Makes a subject from device, seed and a measurement's config, all by keyword.
Build = Callable[..., Subject]


@dataclass(frozen=True)
class Measurement:
    """A row to be.

    Attributes:
        name: of the row, unlike all others.
        build: makes the subject, may raise `Unsupported`. Called in other processes too.
        config: what it is called with, besides device and seed; plain values. Column "config".
        columns: further columns of the row, such as "section".
    """

    name: str
    build: Build
    config: Mapping[str, Any]
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Measurements that take turns.

    Attributes:
        measurements: at least one.
        baseline: name of the one over whose time the others' "speedup" is; None for none.
    """

    measurements: Sequence[Measurement]
    baseline: str | None = None


@dataclass(frozen=True)
class Request:
    """How to measure.

    Attributes:
        quick: small sizes and few trials, for a look.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        threads: of torch on the CPU; None for as many as it has.
        seed: of inputs and weights.
        max_seconds: that a row may take for all of its calls; None for 60, quick 10.
        traces: whether a trace of each row is written.
        has_progress: whether a bar is drawn on stderr.
        effort: calls of each row; None for 5 + 20, quick 2 + 5.
    """

    quick: bool = False
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    max_seconds: float | None = None
    traces: bool = False
    has_progress: bool = True
    effort: Effort | None = None

    def __post_init__(self) -> None:
        _validate.one_of(device=(self.device, ("auto", "cpu", "cuda")))
        if self.threads is not None:
            _validate.positive_int(threads=self.threads)
        if self.max_seconds is not None:
            _validate.positive(max_seconds=self.max_seconds)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda': torch finds no GPU here; pass device='cpu'")

    @property
    def where(self) -> torch.device:
        """The device that "auto" stands for."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(auto if self.device == "auto" else self.device)

    @property
    def calls(self) -> Effort:
        """How often each row is called."""
        return self.effort or (QUICK if self.quick else FULL)

    @property
    def limit(self) -> float:
        """Seconds for all calls of a row."""
        return self.max_seconds or (10.0 if self.quick else 60.0)


@dataclass(frozen=True)
class Suite:
    """A benchmark.

    Attributes:
        name: of its files and on the command line.
        title: of its page.
        about: a paragraph on what is measured and how to read it.
        plan: comparisons, and rows that need no timing; called before anything is measured.
        derive: further rows, from those measured (exponents, recommendations).
        tables, charts: of its page and its picture.
        reported: rows of what others report; column "kind" is "reported".
    """

    name: str
    title: str
    about: str
    plan: Callable[[Request], Iterable[Comparison | Callable[[Request], Iterable[Row]]]]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    derive: Callable[[Sequence[Row]], Iterable[Row]] = lambda rows: ()
    reported: Callable[[], Sequence[Row]] = lambda: ()


def run_suite(suite: Suite, request: Request, folder: Path) -> dict[str, Any]:
    """Measures, and writes NAME.json, NAME.md and NAME.png into a folder that is there.

    Returns:
        What the JSON holds: "environment", "complete", "rows" and "reported".
    """
    results.require_drawing()
    threads = torch.get_num_threads()
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    try:
        return _run(suite, request, folder)
    finally:
        torch.set_num_threads(threads)


def _run(suite: Suite, request: Request, folder: Path) -> dict[str, Any]:
    device, path = request.where, folder / f"{suite.name}.json"
    plan = list(suite.plan(request))
    roofs = measured_roofs(device, quick=request.quick)
    stopwatch = Stopwatch(device)
    found: dict[str, Any] = {
        "environment": {
            **environment(device.type, torch.get_num_threads()),
            "suite": suite.name,
            "quick": request.quick,
            **asdict(request.calls),
            "clock": stopwatch.name,
            "seed": request.seed,
            "max_seconds": request.limit,
            "roofs": {"flops": dict(roofs.flops), "bandwidth": roofs.bandwidth},
        },
        "complete": False,
        "rows": [],
        "reported": list(suite.reported()),
    }
    with tqdm(
        total=len(plan),
        desc=suite.name,
        unit="comparison",
        disable=not request.has_progress,
        file=sys.stderr,
    ) as bar:
        for number, item in enumerate(plan):
            if isinstance(item, Comparison):
                bench = _Bench(request, stopwatch, roofs, folder / "traces", bar.set_postfix_str)
                found["rows"] += bench.rows(item)
            else:
                name = f"{getattr(item, '__name__', type(item).__name__)}/{number}"
                _append(found["rows"], name, functools.partial(item, request))
            results.write_json(path, found)
            bar.update()
    measured = tuple(found["rows"])
    _append(found["rows"], "derived", lambda: suite.derive(measured))
    found["complete"] = True
    results.write_json(path, found)
    results.write_text(path.with_suffix(".md"), markdown(suite, found))
    results.write_picture(path.with_suffix(".png"), draw(suite, found))
    return found


def _append(rows: list[Row], name: str, make: Callable[[], Iterable[Row]]) -> None:
    """Appends what is made; where that raises, a row of this name that says so."""
    try:
        for row in make():
            rows.append(row)
    except Exception as error:
        rows.append(results.row(name, {}))
        _refuse(rows[-1], error)


def _refuse(row: Row, error: Exception) -> None:
    """Writes into a row why it has no figures: what it needs, or that it failed."""
    if isinstance(error, Unsupported | OutOfMemory | OutOfTime):
        row["needs"] = str(error)
    elif is_out_of_memory(error):
        row["needs"] = f"more memory: {str(error).splitlines()[0]}"
    else:
        # What else was asked for must not be lost.
        row.update(correct=False, failure=brief(error))


def has_figures(found: Mapping[str, Any]) -> bool:
    """Whether anything was measured, and was right."""
    return any(row["correct"] is True or row["median_ms"] is not None for row in found["rows"])


def worst(errors: Iterable[float]) -> float:
    """The largest of some errors, at least one; infinite where one is no finite number."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def wrong_rows(found: Mapping[str, Any]) -> list[str]:
    """Names of what did not compute the right thing, and has no figures therefore."""
    return [row["name"] for row in found["rows"] if row["correct"] is False]


@dataclass(frozen=True)
class _Bench:
    request: Request
    stopwatch: Stopwatch
    roofs: Ceilings
    traces: Path
    say: Callable[[str], None]

    def rows(self, comparison: Comparison) -> list[Row]:
        """A row for each measurement, in their order."""
        rows: dict[str, Row] = {}
        subjects: dict[str, Subject] = {}
        for measurement in comparison.measurements:
            self.say(measurement.name)
            row = results.row(measurement.name, measurement.config, **measurement.columns)
            assert measurement.name not in rows, measurement.name
            rows[measurement.name] = row
            subject = self._checked(measurement, row)
            self._collect()
            if subject is not None:
                subjects[measurement.name] = subject
        self._timed(comparison, subjects, rows)
        return list(rows.values())

    def _checked(self, measurement: Measurement, row: Row) -> Subject | None:
        """The subject of a row, where it runs here and is right; else the row says why not."""
        try:
            peak = self._probed(measurement)
            subject = self._build(measurement)
            row.update(subject.figures, error=subject.error())
            # Not of an error that is NaN.
            row["correct"] = row["error"] <= subject.tolerance
        except Exception as error:
            _refuse(row, error)
            return None
        if not row["correct"]:
            return None
        row["peak_memory_mb"] = peak
        return subject

    def _build(self, measurement: Measurement) -> Subject:
        return measurement.build(
            device=self.request.where.type, seed=self.request.seed, **measurement.config
        )

    def _probed(self, measurement: Measurement) -> float | None:
        """Peak MiB of a call, that fits the limits of memory and time."""
        calls = sum(asdict(self.request.calls).values())
        device = self.request.where
        build, seed = measurement.build, self.request.seed
        config = dict(measurement.config)
        if device.type == "cuda":
            peak, seconds = _probe(build, "cuda", seed, config)
        else:
            limit = int(_MOST_MEMORY * device_memory(device) * _MIB)
            # Two calls and what it takes to get there.
            timeout = self.request.limit + _SECONDS_TO_PREPARE
            try:
                peak, seconds = run_isolated(
                    _probe,
                    memory_limit=limit,
                    timeout=timeout,
                    build=build,
                    device="cpu",
                    seed=seed,
                    config=config,
                )
            except OutOfMemory as reason:
                raise OutOfMemory(f"more memory than {limit / 2**30:.0f} GiB: {reason}") from None
            except OutOfTime:
                raise OutOfTime(
                    f"a faster device: two calls took longer than {timeout:g} s"
                ) from None
        if seconds * calls > self.request.limit:
            raise OutOfTime(
                f"a faster device: one call takes {seconds:.3g} s, and {calls} calls more than "
                f"the {self.request.limit:g} s of a row (--max-seconds)"
            )
        return peak

    def _timed(
        self, comparison: Comparison, subjects: dict[str, Subject], rows: dict[str, Row]
    ) -> None:
        if not subjects:
            return
        self.say(f"{comparison.measurements[0].name} and {len(subjects) - 1} more, timed")
        steps = {name: subject.step for name, subject in subjects.items()}
        failed: dict[Step, Exception] = {}

        def stopwatch(step: Step) -> float:
            if step not in failed:
                try:
                    return self.stopwatch(step)
                except Exception as error:
                    failed[step] = error
            return math.nan

        seconds = time_steps(steps, effort=self.request.calls, stopwatch=stopwatch)
        figures: dict[str, Row] = {}
        for name, subject in subjects.items():
            try:
                if subject.step in failed:
                    raise failed[subject.step]
                figures[name] = self._figures(name, subject, seconds[name], rows[name])
            except Exception as error:
                rows[name].update(correct=None, peak_memory_mb=None)
                _refuse(rows[name], error)
        for name, own in figures.items():
            rows[name].update(own)
            if comparison.baseline in figures and comparison.baseline != name:
                over = speedup(seconds[name], seconds[comparison.baseline])
                rows[name].update(
                    baseline=comparison.baseline,
                    speedup=over.median,
                    speedup_ci95=list(over.ci95),
                )

    def _figures(self, name: str, subject: Subject, seconds: Sequence[float], row: Row) -> Row:
        """The columns of what was timed."""
        found = {**summarize(seconds).as_row(), "samples_ms": [1e3 * one for one in seconds]}
        median = found["median_ms"] / 1e3
        if subject.tokens is not None:
            found["tokens_per_s"] = subject.tokens / median
        if subject.work is not None:
            capacity = device_memory(self.request.where)
            share = row["peak_memory_mb"] and row["peak_memory_mb"] / capacity
            found.update(
                place_under_roofs(subject.work(), median, self.roofs, subject.dtype, share)
            )
        if self.request.traces:
            trace_call(subject.step, self.traces / f"{name.replace('/', '_')}.json")
        return {**found, **subject.told()}

    def _collect(self) -> None:
        gc.collect()
        if self.request.where.type == "cuda":
            torch.cuda.empty_cache()


def _probe(
    build: Build, device: str, seed: int, config: Mapping[str, Any]
) -> tuple[float | None, float]:
    """Peak MiB and seconds of the second call."""
    subject = build(device=device, seed=seed, **config)
    subject.step()
    where = torch.device(device)
    stopwatch = Stopwatch(where, wall=True)
    seconds = 0.0

    def step() -> None:
        nonlocal seconds
        seconds = stopwatch(subject.step)

    return peak_growth(step, where), seconds


def needs(name: str, config: Mapping[str, Any], reason: str, **columns: Any) -> Row:
    """A row of something that cannot be measured here."""
    return results.row(name, config, needs=reason, **columns)


def of_section(rows: Iterable[Row], section: str) -> Iterator[Row]:
    """The rows of a section of the suite."""
    return (row for row in rows if row.get("section") == section)
