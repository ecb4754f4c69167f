"""Runs a benchmark: checks and times what it compares, and writes JSON, a page and a picture.

A benchmark (`Suite`) is a plan of comparisons. Calls that are compared take turns, so that their
ratios hold on a machine that others use too. A row whose result is wrong, or that cannot run here,
has no figures but a reason. The JSON is written again after each comparison, and page and picture
also after Ctrl-C, so that nothing is lost.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpflash import _validate
from dpflash.clipping.device_speed import Ceilings

from . import output
from .document import Chart, Table, markdown
from .environment import environment
from .isolated import (
    OutOfMemory,
    OutOfTime,
    brief,
    is_out_of_memory,
    run_isolated,
)
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
# Of the machine's memory, on a CPU.
_MOST_MEMORY = 0.6
_SECONDS_TO_PREPARE = 60

Row = dict[str, Any]


class Unsupported(Exception):
    """This cannot run here; the message says what it would need."""


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    step: Step  # one call
    error: Callable[[], float]  # relative, of the step's result; called before it is timed
    tolerance: float  # largest error that is right
    tokens: int | None = None  # that one call processes
    work: Callable[[], Work] | None = None  # of one call
    dtype: str = "float32"  # of its products, for the roofs
    figures: Mapping[str, Any] = field(default_factory=dict)  # further columns of its row
    late_figures: Callable[[], Mapping[str, Any]] = dict  # columns known after the last call


# Makes a subject from device, seed and a measurement's config, all by keyword.
Build = Callable[..., Subject]


@dataclass(frozen=True)
class Measurement:
    """A row to be measured.

    `columns` are further columns, such as "section". "peer" is True for another library's code: a
    wrong result is reported, but is no failure of dpflash.
    """

    name: str  # of the row, unlike all others
    build: Build  # may raise `Unsupported`; called in other processes too
    config: Mapping[str, Any]  # keywords of `build`, plain values; column "config"
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Measurements that take turns, at least one."""

    measurements: Sequence[Measurement]
    baseline: str | None = None  # name of the measurement that speed-ups are relative to
    # Comparisons of one curve grow in size. After one that is too slow, the others are left out.
    curve: str = ""


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
    """Rows PLACE/NAME whose configs differ in one key, the name; speed-ups are over `baseline`."""
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
    """How to measure."""

    quick: bool = False  # small sizes and few trials, for a first look
    device: str = "auto"  # a GPU where there is one; or "cpu" or "cuda"
    threads: int | None = None  # of torch on the CPU; None for all
    seed: int = 0  # of inputs and weights
    max_seconds: float | None = None  # for all calls of a row; None for 60, quick 10
    traces: bool = False  # write a trace of each row
    has_progress: bool = True  # on stderr
    effort: Effort | None = None  # calls of each row; None for 5 + 20, quick 2 + 5

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"device={self.device!r}: expected 'auto', 'cpu' or 'cuda'; 'cuda' is any GPU "
                "that torch knows, and CUDA_VISIBLE_DEVICES says which"
            )
        if self.threads is not None:
            _validate.positive_int(threads=self.threads)
        if self.max_seconds is not None:
            _validate.positive(max_seconds=self.max_seconds)
        if self.device == "cuda":
            usable_device(self.device)

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


# A function that makes rows of its own. Progress shows its docstring.
Part = Callable[[Request], Iterable[Row]]


def _no_rows(rows: Sequence[Row]) -> Iterable[Row]:
    return ()


@dataclass(frozen=True)
class Suite:
    """A benchmark."""

    name: str  # of its files and on the command line
    title: str  # of its page
    about: str  # what is measured, and how to read it
    plan: Callable[[Request], Iterable[Comparison | Part]]  # called before anything is measured
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    derive: Callable[[Sequence[Row]], Iterable[Row]] = _no_rows  # further rows from those measured
    # Its parts start ranks of one thread each. Their time is the wall clock's: a rank that waits
    # uses no processor time.
    on_ranks: bool = False


def run_suite(suite: Suite, request: Request, folder: Path) -> dict[str, Any]:
    """Measures, and writes NAME.json, NAME.md and NAME.png into an existing folder.

    After Ctrl-C they hold what was measured until then, and "complete" is False.

    Returns:
        What the JSON holds: "environment", "complete" and "rows".
    """
    output.require_drawing()
    before = torch.get_num_threads()
    threads = 1 if suite.on_ranks else request.threads
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        return _run(suite, request, folder, Progress(suite.name, request.has_progress))
    finally:
        torch.set_num_threads(before)


def _run(suite: Suite, request: Request, folder: Path, progress: Progress) -> dict[str, Any]:
    device, path = request.where, folder / f"{suite.name}.json"
    plan = list(suite.plan(request))
    progress.total = sum(
        len(item.measurements) if isinstance(item, Comparison) else 1 for item in plan
    )
    progress.say("measuring the machine's roofs: bytes/s of its memory, FLOP/s of its products")
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
    bench = Bench(request, stopwatch, roofs, folder / "traces", progress)
    try:
        for number, item in enumerate(plan):
            if isinstance(item, Comparison):
                rows += bench.rows(item)
            else:
                _add_part(rows, item, number, request, progress)
            output.write_json(path, found)
        progress.say("deriving")
        measured = tuple(rows)
        _add(rows, "derived", lambda: suite.derive(measured))
        found["complete"] = True
    finally:
        output.write_json(path, found)
        output.write_text(path.with_suffix(".md"), markdown(suite, found))
        output.write_picture(path.with_suffix(".png"), draw(suite, found))
    return found


def _add_part(
    rows: list[Row], part: Part, number: int, request: Request, progress: Progress
) -> None:
    """Adds the rows that a part of the plan makes, each as it comes."""
    # For a nested function, the name of the function around it.
    name = getattr(part, "__qualname__", type(part).__name__).split(".")[0].strip("_<>")
    about = (part.__doc__ or name.replace("_", " ")).splitlines()[0].rstrip(".")
    progress.begin(about, "part")
    _add(
        rows,
        f"{name}/{number}",
        lambda: part(request),
        lambda name: progress.say(f"{about}: {name}"),
    )


def _add(
    rows: list[Row],
    name: str,
    make: Callable[[], Iterable[Row]],
    report: Callable[[str], None] = lambda name: None,
) -> None:
    """Adds the rows that `make` yields. If it raises, adds a row of this name with the error."""
    try:
        for row in make():
            rows.append(row)
            report(row["name"])
    except Exception as error:
        failed = output.row(name, {})
        refuse(failed, error)
        rows.append(failed)


class Progress:
    """Reports on stderr which row is measured, and counts rows."""

    def __init__(self, name: str, is_shown: bool = True):
        self.total = self._row = 0  # a part that makes rows of its own counts as one
        self._name, self._is_shown, self._begin = name, is_shown, time.monotonic()

    def say(self, text: str) -> None:
        """Writes a line."""
        if self._is_shown:
            seconds = int(time.monotonic() - self._begin)
            taken = f"{seconds // 60}:{seconds % 60:02}"
            print(f"{self._name} {taken} {text}", file=sys.stderr, flush=True)

    def begin(self, text: str, unit: str = "row") -> None:
        """Goes on to the next row, or part."""
        self._row += 1
        self.say(f"{unit} {self._row} of {self.total}: {text}")


def refuse(row: Row, error: Exception) -> None:
    """Writes into a row why it has no figures: what it needs, or that it failed."""
    if isinstance(error, Unsupported | OutOfMemory | OutOfTime):
        row["needs"] = str(error)
    elif is_out_of_memory(error):
        row["needs"] = f"more memory: {str(error).splitlines()[0]}"
    else:
        # Other rows of the run must not be lost.
        row.update(correct=False, failure=brief(error))


class _Checked(NamedTuple):
    """A subject that is right, and how often its calls can be made."""

    subject: Subject
    effort: Effort


@dataclass(frozen=True)
class Bench:
    """Measures comparisons."""

    request: Request
    stopwatch: Stopwatch
    roofs: Ceilings
    traces: Path  # a folder
    progress: Progress
    slow: dict[str, str] = field(default_factory=dict)  # the row that was too slow, by curve

    def rows(self, comparison: Comparison) -> list[Row]:
        """A row for each measurement, in their order."""
        rows: dict[str, Row] = {}
        checked: dict[str, _Checked] = {}
        slow = dict(self.slow)
        for measurement in comparison.measurements:
            self.progress.begin(f"{measurement.name}: probing, checking")
            row = output.row(measurement.name, measurement.config, **measurement.columns)
            assert measurement.name not in rows, measurement.name
            rows[measurement.name] = row
            if comparison.curve in slow:
                row["needs"] = f"a faster device: {slow[comparison.curve]} is too slow already"
                continue
            right = self._checked(measurement, row, comparison.curve)
            gc.collect()
            if self.request.where.type == "cuda":
                torch.cuda.empty_cache()
            if right is not None:
                checked[measurement.name] = right
        with warnings.catch_warnings():
            # They were recorded by the check; printing one takes time.
            warnings.simplefilter("ignore")
            full = {n: c for n, c in checked.items() if c.effort == self.request.calls}
            self._time(full, self.request.calls, rows, comparison.baseline)
            for name, one in checked.items():
                if name not in full:
                    self._time({name: one}, one.effort, rows, None)
        return list(rows.values())

    def _checked(self, measurement: Measurement, row: Row, curve: str) -> _Checked | None:
        """The subject of a row, where it runs here and is right; else the row says why not."""
        warned: list[str] = []
        try:
            probed, effort = self._probed(measurement)
            warned += probed.warned
            with recorded_warnings(warned):
                subject = measurement.build(
                    device=self.request.where.type, seed=self.request.seed, **measurement.config
                )
                row.update(subject.figures, error=subject.error())
            # An error that is NaN is not within the tolerance.
            row["correct"] = row["error"] <= subject.tolerance
        except Exception as error:
            refuse(row, error)
            if isinstance(error, OutOfTime) and curve:
                self.slow[curve] = measurement.name
            return None
        finally:
            if warned:
                row["warnings"] = list(dict.fromkeys(warned))
        if not row["correct"]:
            return None
        row["peak_memory_mb"] = probed.peak_mb
        return _Checked(subject, effort)

    def _probed(self, measurement: Measurement) -> tuple[_Probed, Effort]:
        """What a call takes, and how many calls fit into the limit of time."""
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
            try:
                probed = run_isolated(
                    _probe, memory_limit=memory, timeout=limit + _SECONDS_TO_PREPARE, **given
                )
            except OutOfMemory as reason:
                raise OutOfMemory(f"more memory than {memory / 2**30:.0f} GiB: {reason}") from None
            except OutOfTime as reason:
                raise OutOfTime(
                    f"a faster device: {reason} (limit of the row: {limit:g} s, "
                    f"--max-seconds, and {_SECONDS_TO_PREPARE} s to get ready)"
                ) from None
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
        """Times calls that take turns, and writes the figures into their rows."""
        if not checked:
            return
        first, *others = checked
        beside = f" and {len(others)} that take turns with it" * bool(others)
        self.progress.say(
            f"timing {first}{beside}: {effort.warm_ups} + {effort.trials} calls each"
        )
        failed: dict[Step, Exception] = {}

        def stopwatch(step: Step) -> float:
            if step not in failed:
                try:
                    return self.stopwatch(step)
                except Exception as error:
                    failed[step] = error
            return math.nan

        steps = {name: one.subject.step for name, one in checked.items()}
        seconds = time_steps(steps, effort=effort, stopwatch=stopwatch)
        figures: dict[str, Row] = {}
        for name, (subject, _) in checked.items():
            try:
                if subject.step in failed:
                    raise failed[subject.step]
                figures[name] = self._figures(name, subject, seconds[name], rows[name], effort)
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
        """The columns of what was timed."""
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
    """The reason of a row whose smallest number of calls exceeds the limit of time."""
    return (
        f"a faster device or a higher --max-seconds: {reason}, and a warm-up and 3 trials do not "
        f"fit into the {limit:g} s of a row"
    )


class _Probed(NamedTuple):
    """Growth of memory and duration of the second call, and all warnings."""

    peak_mb: float | None
    seconds: float
    warned: list[str]


def _probe(build: Build, device: str, seed: int, config: Mapping[str, Any]) -> _Probed:
    where = torch.device(device)
    stopwatch = Stopwatch(where)
    seconds, warned = 0.0, list[str]()

    def step() -> None:
        nonlocal seconds
        seconds = stopwatch(subject.step)

    with recorded_warnings(warned):
        subject = build(device=device, seed=seed, **config)
        subject.step()
        peak = peak_growth(step, where)
    return _Probed(peak, seconds, warned)


@contextmanager
def recorded_warnings(into: list[str]) -> Iterator[None]:
    """Collects warnings instead of printing them, as "Category: message"."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            into += [f"{one.category.__name__}: {one.message}" for one in caught]


def has_figures(found: Mapping[str, Any]) -> bool:
    """Whether any row was timed, or is right."""
    return any(row["correct"] is True or row["median_ms"] is not None for row in found["rows"])


def worst(errors: Iterable[float]) -> float:
    """The largest of some errors, at least one; infinite where one is no finite number."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def wrong_rows(found: Mapping[str, Any], *, peers: bool = False) -> list[str]:
    """Names of rows of dpflash, or of peers, whose result was wrong; they have no figures."""
    wrong = (row for row in found["rows"] if row["correct"] is False)
    return [row["name"] for row in wrong if bool(row.get("peer")) == peers]


def needs(name: str, config: Mapping[str, Any], reason: str, **columns: Any) -> Row:
    """A row of something that cannot be measured here."""
    return output.row(name, config, needs=reason, **columns)


def not_measured(measurements: Sequence[Measurement], reason: str) -> Part:
    """A part of a plan: the rows of measurements that are left out here, with the reason."""

    def left_out(request: Request) -> Iterator[Row]:
        """Listing rows that are not measured here."""
        for one in measurements:
            yield needs(one.name, one.config, reason, **one.columns)

    return left_out


def of_section(rows: Iterable[Row], section: str) -> Iterator[Row]:
    """The rows of a section of the suite."""
    return (row for row in rows if row.get("section") == section)


def grouped(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows of each value of a key, in their order."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
