"""Measures a comparison: probes, checks and times its calls, and says why one has no figures."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dpflash.clipping.device_speed import Ceilings

from . import output as results
from .isolated import OutOfMemory, OutOfTime, brief, is_out_of_memory, run_isolated, tell
from .memory import device_memory, peak_growth
from .plan import Build, Comparison, Measurement, Request, Row, Subject, Unsupported
from .progress import Progress
from .roofline import place_under_roofs
from .timing import Step, Stopwatch, speedup, summarize, time_steps
from .trace import trace_call

_MIB = 2**20
# Of the machine's memory, on a CPU.
_MOST_MEMORY = 0.6
_SECONDS_TO_PREPARE = 60


def refuse(row: Row, error: Exception) -> None:
    """Writes into a row why it has no figures: what it needs, or that it failed."""
    if isinstance(error, Unsupported | OutOfMemory | OutOfTime):
        row["needs"] = str(error)
    elif is_out_of_memory(error):
        row["needs"] = f"more memory: {str(error).splitlines()[0]}"
    else:
        # What else was asked for must not be lost.
        row.update(correct=False, failure=brief(error))


@dataclass(frozen=True)
class Bench:
    """Measures comparisons.

    Attributes:
        request: how.
        stopwatch: by which clock.
        roofs: of the machine.
        traces: folder of traces, where they are asked for.
        progress: is told of each row.
    """

    request: Request
    stopwatch: Stopwatch
    roofs: Ceilings
    traces: Path
    progress: Progress

    def rows(self, comparison: Comparison) -> list[Row]:
        """A row for each measurement, in their order."""
        rows: dict[str, Row] = {}
        subjects: dict[str, Subject] = {}
        for measurement in comparison.measurements:
            self.progress.begin(f"{measurement.name}: probing, checking")
            row = results.row(measurement.name, measurement.config, **measurement.columns)
            assert measurement.name not in rows, measurement.name
            rows[measurement.name] = row
            subject = self._checked(measurement, row)
            self._collect()
            if subject is not None:
                subjects[measurement.name] = subject
        with warnings.catch_warnings():
            # They were recorded when it was checked; printing one takes time.
            warnings.simplefilter("ignore")
            self._timed(comparison, subjects, rows)
        return list(rows.values())

    def _checked(self, measurement: Measurement, row: Row) -> Subject | None:
        """The subject of a row, where it runs here and is right; else the row says why not."""
        warned: list[str] = []
        try:
            probed = self._probed(measurement)
            warned += probed.warned
            with recorded_warnings(warned):
                subject = self._build(measurement)
                row.update(subject.figures, error=subject.error())
            # Not of an error that is NaN.
            row["correct"] = row["error"] <= subject.tolerance
        except Exception as error:
            refuse(row, error)
            return None
        finally:
            if warned:
                row["warnings"] = list(dict.fromkeys(warned))
        if not row["correct"]:
            return None
        row["peak_memory_mb"] = probed.peak_mb
        return subject

    def _build(self, measurement: Measurement) -> Subject:
        return measurement.build(
            device=self.request.where.type, seed=self.request.seed, **measurement.config
        )

    def _probed(self, measurement: Measurement) -> _Probed:
        """What a call takes, that fits the limits of memory and time."""
        calls = sum(asdict(self.request.calls).values())
        device = self.request.where
        build, seed = measurement.build, self.request.seed
        config = dict(measurement.config)
        if device.type == "cuda":
            probed = _probe(build, "cuda", seed, config)
        else:
            limit = int(_MOST_MEMORY * device_memory(device) * _MIB)
            # Two calls and what it takes to get there.
            timeout = self.request.limit + _SECONDS_TO_PREPARE
            try:
                probed = run_isolated(
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
            except OutOfTime as reason:
                raise OutOfTime(
                    f"a faster device: {reason} (limit of the row: {self.request.limit:g} s, "
                    f"--max-seconds, and {_SECONDS_TO_PREPARE} s to get ready)"
                ) from None
        if probed.seconds * calls > self.request.limit:
            raise OutOfTime(
                f"a faster device or a higher --max-seconds: one call takes {probed.seconds:.3g} "
                f"s, and {calls} calls more than the {self.request.limit:g} s of a row"
            )
        return probed

    def _timed(
        self, comparison: Comparison, subjects: dict[str, Subject], rows: dict[str, Row]
    ) -> None:
        if not subjects:
            return
        first, *others = subjects
        beside = f" and {len(others)} that take turns with it" * bool(others)
        calls = self.request.calls
        self.progress.say(f"timing {first}{beside}: {calls.warm_ups} + {calls.trials} calls each")
        steps = {name: subject.step for name, subject in subjects.items()}
        failed: dict[Step, Exception] = {}

        def stopwatch(step: Step) -> float:
            if step not in failed:
                try:
                    return self.stopwatch(step)
                except Exception as error:
                    failed[step] = error
            return math.nan

        seconds = time_steps(steps, effort=calls, stopwatch=stopwatch)
        figures: dict[str, Row] = {}
        for name, subject in subjects.items():
            try:
                if subject.step in failed:
                    raise failed[subject.step]
                figures[name] = self._figures(name, subject, seconds[name], rows[name])
            except Exception as error:
                rows[name].update(correct=None, peak_memory_mb=None)
                refuse(rows[name], error)
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


class _Probed(NamedTuple):
    """Of the second call: how far memory grew, and how long it took; and what was warned of."""

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
        tell("building it")
        subject = build(device=device, seed=seed, **config)
        tell("building it and its first call (compiling included)")
        subject.step()
        tell("two calls")
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
