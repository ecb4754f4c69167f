"""Runs a benchmark: checks and times calls, and writes the results as JSON, a page and a picture.

A benchmark (`Suite`) is a plan of comparisons. Calls that are compared take turns, so that the
ratios of their times are also right on a shared machine. If a row's result is wrong, or its call
cannot run here, the row has a reason in place of figures. The JSON is written again after each
comparison, and the page and the picture also after Ctrl-C, so that no measurement is lost.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from dpflash import _validate
from dpflash.clipping.device_speed import Ceilings

from . import output
from .document import Chart, Table, markdown
from .environment import environment
from .isolated import OutOfMemory, OutOfTime, brief, is_out_of_memory, run_isolated
from .memory import device_memory, peak_growth
from .picture import draw
from .timing import (
    FULL,
    QUICK,
    Effort,
    Step,
    Stopwatch,
    columns,
    speedup,
    time_steps,
    usable_device,
)
from .work import Work, measured_roofs, place_under_roofs, trace_call

_MIB = 2**20
# The fraction of the machine's memory that a call on a CPU may use.
_MOST_MEMORY = 0.6
_SECONDS_TO_PREPARE = 60

Row = dict[str, Any]


class Unsupported(Exception):
    """Raised if a row cannot run here; the message names what it needs."""


@dataclass(frozen=True)
class Subject:
    """A call to measure, and the check of its result."""

    step: Step  # makes one call
    error: Callable[[], float]  # relative error of the result; called before the step is timed
    tolerance: float  # largest error of a correct result
    tokens: int | None = None  # number of tokens that one call processes
    work: Callable[[], Work] | None = None  # returns FLOP and moved bytes of one call
    dtype: str = "float32"  # dtype of the matrix products, which determines the roof
    figures: Mapping[str, Any] = field(default_factory=dict)  # other columns of the row
    late_figures: Callable[[], Mapping[str, Any]] = dict  # columns known after the last call


# Makes a subject from the keywords device, seed and the config of a measurement.
Build = Callable[..., Subject]


@dataclass(frozen=True)
class Measurement:
    """A row to measure.

    `columns` are further columns of the row, such as "section". If the column "peer" is True, the
    row measures another library: a wrong result is reported, but is no failure of dpflash.
    """

    name: str  # unique name of the row
    build: Build  # may raise `Unsupported`; called in other processes too
    config: Mapping[str, Any]  # keywords of `build`, plain values; the column "config"
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """One or more measurements that take turns."""

    measurements: Sequence[Measurement]
    baseline: str | None = None  # name of the measurement over which speed-ups are computed
    curve: str = ""  # sizes grow along a curve, which ends after a row that is too slow


def compared(
    place: str,
    build: Build,
    key: str,
    names: Iterable[str],
    given: Mapping[str, Any],
    section: str,
    baseline: str | None = None,
    *,
    peers: Sequence[str] = (),
    columns: Mapping[str, Any] | None = None,
    curve: str = "",
) -> Comparison:
    """Compare rows PLACE/NAME, whose configs differ in `key`; speed-ups are over `baseline`."""
    more = {"section": section, **(columns or {})}
    rows = [
        Measurement(
            f"{place}/{name}",
            build,
            {key: name, **given},
            {**more, **({"peer": True} if name in peers else {})},
        )
        for name in names
    ]
    return Comparison(rows, f"{place}/{baseline}" if baseline else None, curve)


@dataclass(frozen=True)
class Request:
    """The options of a run."""

    quick: bool = False  # whether sizes are small and trials few, for a first look
    device: str = "auto"  # "cpu", "cuda", or "auto" for a GPU if there is a GPU
    threads: int | None = None  # number of torch's CPU threads; None for all
    seed: int = 0  # seed of inputs and weights
    max_seconds: float | None = None  # seconds for all calls of a row; None: 60, or 10 if quick
    traces: bool = False  # whether to write a trace of each row
    has_progress: bool = True  # whether to show progress on stderr
    effort: Effort | None = None  # of a row; None: 5 warm-ups and 20 trials, or 2 and 5 if quick

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"device={self.device!r}: expected 'auto', 'cpu' or 'cuda'; 'cuda' is the GPU "
                "that torch finds first: choose it with CUDA_VISIBLE_DEVICES"
            )
        _validate.optional(_validate.positive_int, threads=self.threads)
        _validate.optional(_validate.positive, max_seconds=self.max_seconds)
        if self.device == "cuda":
            usable_device(self.device)

    @property
    def where(self) -> torch.device:
        """The device to measure on."""
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.device(auto if self.device == "auto" else self.device)

    @property
    def calls(self) -> Effort:
        """The number of calls of each row."""
        return self.effort or (QUICK if self.quick else FULL)

    @property
    def limit(self) -> float:
        """The limit in seconds for all calls of a row."""
        return self.max_seconds or (10.0 if self.quick else 60.0)


# A function that makes rows by its own measurements.
Part = Callable[[Request], Iterable[Row]]


@dataclass(frozen=True)
class Suite:
    """A benchmark: the plan of its measurements, and the layout of its page."""

    name: str  # name of the files, and on the command line
    title: str  # title of the page
    about: str  # text that explains the measurements and how to read the page
    plan: Callable[[Request], Iterable[Comparison | Part]]  # called before anything is measured
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    derive: Callable[[Sequence[Row]], Iterable[Row]] = (
        lambda rows: ()
    )  # computes other rows from the measured rows
    # Whether the parts start ranks, each with one thread. Ranks are timed by the wall clock, since
    # a rank that waits uses no processor time.
    on_ranks: bool = False


def run_suite(suite: Suite, request: Request, folder: Path) -> dict[str, Any]:
    """Run a suite, and write NAME.json, NAME.md and NAME.png into an existing folder.

    Returns the contents of the JSON: "environment", "complete" and "rows". After Ctrl-C, "rows"
    has the rows that were measured until then, and "complete" is False.
    """
    output.require_drawing()
    before = torch.get_num_threads()
    threads = 1 if suite.on_ranks else request.threads
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return _run(suite, request, folder)
    finally:
        torch.set_num_threads(before)


def _run(suite: Suite, request: Request, folder: Path) -> dict[str, Any]:
    device, path = request.where, folder / f"{suite.name}.json"
    plan = list(suite.plan(request))
    roofs = measured_roofs(device, quick=request.quick)
    stopwatch = Stopwatch(device, wall=suite.on_ranks)
    rows: list[Row] = []
    found: dict[str, Any] = {
        "environment": {
            **environment(device.type, torch.get_num_threads()),
            "suite": suite.name,
            "quick": request.quick,
            **dataclasses.asdict(request.calls),
            "clock": stopwatch.name,
            "seed": request.seed,
            "max_seconds": request.limit,
            "roofs": {"flops": dict(roofs.flops), "bandwidth": roofs.bandwidth},
        },
        "complete": False,
        "rows": rows,
    }
    total = sum(len(item.measurements) if isinstance(item, Comparison) else 1 for item in plan)
    shown = {"desc": suite.name, "unit": "row", "disable": not request.has_progress}
    try:
        with tqdm(total=total, file=sys.stderr, **shown) as progress:
            bench = Bench(request, stopwatch, roofs, folder / "traces", progress)
            for number, item in enumerate(plan):
                if isinstance(item, Comparison):
                    rows += bench.rows(item)
                else:
                    name = getattr(item, "__name__", "part").strip("_<>")
                    for row in _made(f"{name}/{number}", functools.partial(item, request)):
                        rows.append(row)
                        progress.set_postfix_str(row["name"])
                    progress.update()
                output.write_json(path, found)
        rows += list(_made("derived", functools.partial(suite.derive, tuple(rows))))
        found["complete"] = True
    finally:
        output.write_json(path, found)
        output.write_text(path.with_suffix(".md"), markdown(suite, found))
        output.write_picture(path.with_suffix(".png"), draw(suite, found))
    return found


def _made(name: str, make: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield the rows of `make`. If `make` raises, yield one more row, `name`, with the error."""
    try:
        yield from make()
    except Exception as error:
        failed = output.row(name, {})
        refuse(failed, error)
        yield failed


def refuse(row: Row, error: Exception) -> None:
    """Write into a row why it has no figures: "needs" for a requirement, else "failure"."""
    if isinstance(error, Unsupported | OutOfTime):
        row["needs"] = str(error)
    elif isinstance(error, OutOfMemory) or is_out_of_memory(error):
        row["needs"] = f"more memory: {str(error).splitlines()[0]}"
    else:
        # The run continues with its other rows.
        row.update(correct=False, failure=brief(error))


def _noting(step: Step, name: str, failed: dict[str, Exception]) -> Step:
    """Return a step that records its first error in `failed`, and then makes no more calls."""

    def call() -> None:
        if name not in failed:
            try:
                step()
            except Exception as error:
                failed[name] = error

    return call


class _Checked(NamedTuple):
    """A call whose result is correct, and the numbers of calls that fit the time limit."""

    subject: Subject
    effort: Effort


@dataclass(frozen=True)
class Bench:
    """Measures comparisons."""

    request: Request
    stopwatch: Stopwatch
    roofs: Ceilings
    traces: Path  # folder of the traces
    progress: tqdm[Any]
    slow: dict[str, str] = field(default_factory=dict)  # curve -> name of the row that is too slow

    def rows(self, comparison: Comparison) -> list[Row]:
        """Return a row for each measurement, in their order."""
        rows: dict[str, Row] = {}
        checked: dict[str, _Checked] = {}
        slow = dict(self.slow)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # printing a warning takes time
            for measurement in comparison.measurements:
                self.progress.set_postfix_str(f"{measurement.name}: probing, checking")
                row = output.row(measurement.name, measurement.config, **measurement.columns)
                assert measurement.name not in rows, measurement.name
                rows[measurement.name] = row
                if comparison.curve in slow:
                    row["needs"] = f"a faster device: {slow[comparison.curve]} is too slow already"
                elif right := self._checked(measurement, row, comparison.curve):
                    checked[measurement.name] = right
                gc.collect()
                if self.request.where.type == "cuda":
                    torch.cuda.empty_cache()
                self.progress.update()
            full = {n: c for n, c in checked.items() if c.effort == self.request.calls}
            self._time(full, self.request.calls, rows, comparison.baseline)
            for name, one in checked.items():
                if name not in full:
                    self._time({name: one}, one.effort, rows, None)
        return list(rows.values())

    def _checked(self, measurement: Measurement, row: Row, curve: str) -> _Checked | None:
        """Return the subject if its call is possible and correct, else write why not to `row`."""
        try:
            probed, effort = self._probed(measurement)
            subject = measurement.build(
                device=self.request.where.type, seed=self.request.seed, **measurement.config
            )
            row.update(subject.figures, error=subject.error())
            # False if the error is NaN.
            row["correct"] = row["error"] <= subject.tolerance
        except Exception as error:
            refuse(row, error)
            if isinstance(error, OutOfTime) and curve:
                self.slow[curve] = measurement.name
            return None
        if not row["correct"]:
            return None
        row["peak_memory_mb"] = probed.peak_mb
        return _Checked(subject, effort)

    def _probed(self, measurement: Measurement) -> tuple[_Probed, Effort]:
        """Return the cost of one call, and the number of calls that fit into the time limit."""
        request, limit = self.request, self.request.limit
        given: dict[str, Any] = {
            "build": measurement.build,
            "device": request.where.type,
            "seed": request.seed,
            "config": dict(measurement.config),
        }
        if request.where.type == "cuda":
            probed = _probe(**given)
        else:
            memory = int(_MOST_MEMORY * device_memory(request.where) * _MIB)
            seconds = limit + _SECONDS_TO_PREPARE
            try:
                probed = run_isolated(_probe, memory_limit=memory, timeout=seconds, **given)
            except OutOfTime as reason:
                raise OutOfTime(f"a faster device or a higher --max-seconds: {reason}") from None
        effort = request.calls.within(probed.seconds, limit)
        if effort is None:
            raise OutOfTime(too_slow(f"one call takes {probed.seconds:.3g} s", limit))
        return probed, effort

    def _time(
        self,
        checked: Mapping[str, _Checked],
        effort: Effort,
        rows: Mapping[str, Row],
        baseline: str | None,
    ) -> None:
        if not checked:
            return
        self.progress.set_postfix_str(f"{next(iter(checked))}: timing {len(checked)} in turns")
        failed: dict[str, Exception] = {}
        steps = {name: _noting(one.subject.step, name, failed) for name, one in checked.items()}
        seconds = time_steps(steps, effort=effort, stopwatch=self.stopwatch)
        figures: dict[str, Row] = {}
        for name, one in checked.items():
            try:
                if name in failed:
                    raise failed[name]
                figures[name] = self._figures(name, one.subject, seconds[name], rows[name], effort)
            except Exception as error:
                rows[name].update(correct=None, peak_memory_mb=None)
                refuse(rows[name], error)
        for name, own in figures.items():
            rows[name].update(own)
            if baseline in figures and baseline != name:
                over = speedup(seconds[name], seconds[baseline])
                rows[name].update(
                    baseline=baseline, speedup=over.median, speedup_ci95=list(over.ci95)
                )

    def _figures(
        self, name: str, subject: Subject, seconds: Sequence[float], row: Row, effort: Effort
    ) -> Row:
        found = columns(seconds, is_short=effort != self.request.calls)
        median = found["median_ms"] / 1e3
        if subject.tokens is not None:
            found["tokens_per_s"] = subject.tokens / median
        if subject.work is not None:
            capacity = device_memory(self.request.where)
            taken = row["peak_memory_mb"] and row["peak_memory_mb"] / capacity
            found.update(
                place_under_roofs(subject.work(), median, self.roofs, subject.dtype, taken)
            )
        if self.request.traces:
            trace_call(subject.step, self.traces / f"{name.replace('/', '_')}.json")
        return {**found, **subject.late_figures()}


def too_slow(reason: str, limit: float) -> str:
    """Return the text for a row without figures whose calls exceed the time limit."""
    return (
        f"a faster device or a higher --max-seconds: {reason}, and a warm-up and 3 trials do not "
        f"fit into the {limit:g} s of a row"
    )


class _Probed(NamedTuple):
    peak_mb: float | None
    seconds: float


def _probe(build: Build, device: str, seed: int, config: Mapping[str, Any]) -> _Probed:
    where = torch.device(device)
    stopwatch = Stopwatch(where)
    seconds = 0.0

    def step() -> None:
        nonlocal seconds
        seconds = stopwatch(subject.step)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = build(device=device, seed=seed, **config)
        subject.step()
        peak = peak_growth(step, where)
    return _Probed(peak, seconds)


def has_figures(found: Mapping[str, Any]) -> bool:
    """Whether at least one row was timed or is correct."""
    return any(row["correct"] is True or row["median_ms"] is not None for row in found["rows"])


def worst(errors: Iterable[float]) -> float:
    """Return the largest of one or more errors, or infinity if any error is not finite."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def wrong_rows(found: Mapping[str, Any], *, peers: bool = False) -> list[str]:
    """Return the names of dpflash's rows, or of peers' rows, whose result was wrong."""
    wrong = (row for row in found["rows"] if row["correct"] is False)
    return [row["name"] for row in wrong if bool(row.get("peer")) == peers]


def of_section(rows: Iterable[Row], section: str) -> Iterator[Row]:
    """Yield the rows of a section."""
    return (row for row in rows if row.get("section") == section)


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """Return the rows by the value of `key`, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
