"""Times calls in turns, and computes medians with 95% intervals, without outliers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy.stats
import torch

from dpflash import _validate

Step = Callable[[], object]
_Trial = TypeVar("_Trial")

HIGH_VARIANCE = 0.1  # a coefficient of variation above this is high
FEWEST_TRIALS = 3
_FENCES = 1.5  # distance of Tukey's fences from the quartiles, in interquartile ranges
# More bytes than a GPU's last-level cache holds. Overwriting them several times before each call
# takes some milliseconds, during which the host queues the timed call.
_FLUSHED_BYTES = 2**28
_FLUSHES = 32


@dataclass(frozen=True)
class Effort:
    """The number of untimed warm-up calls and of timed calls."""

    warm_ups: int = 5
    trials: int = 20

    @property
    def calls(self) -> int:
        """The number of all calls."""
        return self.warm_ups + self.trials

    def within(self, seconds: float, limit: float) -> Effort | None:
        """Return this effort if its calls, of `seconds` each, fit into `limit`, else fewer calls.

        Reduced efforts have 1 warm-up and 3 to 23 trials. If 3 trials do not fit, return None.
        """
        if seconds * self.calls <= limit:
            return self
        fitting = int(min(limit / seconds, FULL.calls - 1, self.calls - 1)) - 1
        return Effort(1, fitting) if fitting >= FEWEST_TRIALS else None


FULL = Effort()
QUICK = Effort(warm_ups=2, trials=5)


@dataclass(frozen=True)
class Statistics:
    """Statistics of the trials of one call, without trials beyond Tukey's fences."""

    median_ms: float
    # The 95% interval of the median by order statistics; the range of fewer than 6 trials.
    ci95_ms: tuple[float, float]
    cv: float | None  # standard deviation / mean; None for a single trial
    trials: int  # number of timed calls
    outliers: int  # number of trials that were left out

    @property
    def high_variance(self) -> bool:
        """Whether the coefficient of variation is above 10%, or unknown."""
        return self.cv is None or self.cv > HIGH_VARIANCE

    def as_row(self) -> dict[str, Any]:
        """Return the statistics as columns of a benchmark's row."""
        own = {**asdict(self), "ci95_ms": list(self.ci95_ms)}
        return {**own, "high_variance": self.high_variance}


def within_fences(values: Sequence[float]) -> list[float]:
    """Return the values at most 1.5 interquartile ranges beyond the quartiles (Tukey's fences)."""
    low, high = np.quantile(values, [0.25, 0.75])
    reach = _FENCES * scipy.stats.iqr(values)
    return [value for value in values if low - reach <= value <= high + reach]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the median's 95% interval by order statistics; the range if fewer than 6 values."""
    interval = scipy.stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    low, high = float(interval.low), float(interval.high)
    if not np.isfinite([low, high]).all():
        return min(values), max(values)
    return low, high


def summarize(seconds: Sequence[float]) -> Statistics:
    """Return the statistics of one or more trials."""
    if not seconds:
        raise ValueError("seconds=[]: expected at least one trial; time the call first")
    kept = [1e3 * value for value in within_fences(seconds)]
    cv = float(scipy.stats.variation(kept, ddof=1)) if len(kept) > 1 else None
    median = float(np.median(kept))
    return Statistics(median, median_interval(kept), cv, len(seconds), len(seconds) - len(kept))


def columns(seconds: Sequence[float], *, is_short: bool) -> dict[str, Any]:
    """Return the columns of a row for the seconds of its trials.

    If `is_short`, fewer calls than requested were made because they are slow; the row then has
    the range of its trials in place of an interval.
    """
    trials = [1e3 * value for value in seconds]
    if not is_short:
        return {**summarize(seconds).as_row(), "samples_ms": trials}
    median, limits = float(np.median(trials)), [min(trials), max(trials)]
    return {"median_ms": median, "range_ms": limits, "trials": len(trials)}


class Stopwatch:
    """Measures the seconds of a call, by a clock that depends on the device.

    On a GPU, CUDA events are used, and the L2 cache is overwritten before each call. With one CPU
    thread, process time is used, which other jobs disturb less. With several threads, or if `wall`
    is set because processes wait for each other, the wall clock is used.
    """

    def __init__(self, device: torch.device, *, wall: bool = False):
        self.is_cuda = device.type == "cuda"
        one_thread = torch.get_num_threads() == 1 and not wall
        self._clock = time.process_time if one_thread else time.perf_counter
        self.name = "process time" if one_thread else "wall"
        if self.is_cuda:
            self.name = "CUDA events, L2 overwritten, queued ahead"
            self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)

    def __call__(self, step: Step) -> float:
        if not self.is_cuda:
            begin = self._clock()
            step()
            return self._clock() - begin
        torch.cuda.synchronize(self._flushed.device)
        for _ in range(_FLUSHES):
            self._flushed.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def time_steps(
    steps: Mapping[str, Step],
    *,
    effort: Effort,
    stopwatch: Callable[[Step], _Trial],
    before: Step = lambda: None,
) -> dict[str, list[_Trial]]:
    """Return the stopwatch's result, such as seconds, for each trial of each call.

    Calls take turns (A B C, B C A, ...), so that the machine's speed affects all calls equally.
    `before`, such as a barrier of several ranks, is called before each call and is not timed.
    """
    names = list(steps)
    found: dict[str, list[_Trial]] = {name: [] for name in names}
    for number in range(effort.calls):
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            before()
            taken = stopwatch(steps[name])
            if number >= effort.warm_ups:
                found[name].append(taken)
    return found


def time_call(
    call: Step, *, trials: int = 20, warm_ups: int = 5, device: str = "cpu"
) -> Statistics:
    """Time a call.

    Args:
        call: a function without arguments.
        trials: number of timed calls, at least 1.
        warm_ups: number of untimed calls before the trials.
        device: "cpu" or "cuda"; the time of a call includes the work that it queues on a GPU.

    Returns:
        The median, its 95% interval and the coefficient of variation, without outliers.

    Raises:
        ValueError: call is not callable, a number is too small, or torch finds no such device.
    """
    if not callable(call):
        raise ValueError(f"call={call!r}: expected a function without arguments; pass a lambda")
    _validate.positive_int(trials=trials)
    if isinstance(warm_ups, bool) or not isinstance(warm_ups, int) or warm_ups < 0:
        raise ValueError(f"warm_ups={warm_ups!r}: expected a whole number of 0 or more, such as 5")
    stopwatch = Stopwatch(usable_device(device))
    seconds = time_steps({"": call}, effort=Effort(warm_ups, trials), stopwatch=stopwatch)
    return summarize(seconds[""])


def usable_device(device: str) -> torch.device:
    """Return the device with a name such as "cuda:1"; ValueError if torch does not find it."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: expected 'cpu' or 'cuda'; pass one of these")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ValueError(f"device={device!r}: torch finds {count} GPUs here; pass device='cpu'")
    return found


class Ratio(NamedTuple):
    """The median speed-up of a call over another call that took turns with it."""

    median: float
    ci95: tuple[float, float]  # 95% interval of the median, by order statistics


def speedup(own: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return the speed-up over another call, from the seconds of each round, without outliers."""
    kept = within_fences([b / a for a, b in zip(own, other, strict=True)])
    return Ratio(float(np.median(kept)), median_interval(kept))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the exponent p of ``value = c * size^p``, and the ends of its 95% interval.

    The exponent is fitted to the logarithms of at least three different sizes.
    """
    fit = scipy.stats.linregress(np.log(sizes), np.log(values))
    reach = float(scipy.stats.t.ppf(0.975, len(sizes) - 2) * fit.stderr)
    return float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach
