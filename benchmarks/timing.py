"""Times calls in turns; medians of the trials with 95% intervals, outliers left out."""

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

HIGH_VARIANCE = 0.1  # of the coefficient of variation
FEWEST_TRIALS = 3
_FENCES = 1.5  # of Tukey, in interquartile ranges
# On a GPU: more bytes than its last cache holds. Overwriting them so often before each call takes
# some milliseconds, in which the host queues the call that is timed.
_FLUSHED_BYTES = 2**28
_FLUSHES = 32


@dataclass(frozen=True)
class Effort:
    """How many calls are made without timing them, and how many are timed."""

    warm_ups: int = 5
    trials: int = 20

    @property
    def calls(self) -> int:
        """All calls."""
        return self.warm_ups + self.trials

    def within(self, seconds: float, limit: float) -> Effort | None:
        """This effort where calls of so many seconds fit into the limit, else fewer calls.

        Those are 1 warm-up and 3 to 23 trials; None where these do not fit.
        """
        if seconds * self.calls <= limit:
            return self
        fitting = int(min(limit / seconds, FULL.calls - 1, self.calls - 1)) - 1
        return Effort(1, fitting) if fitting >= FEWEST_TRIALS else None


FULL = Effort()
QUICK = Effort(warm_ups=2, trials=5)


@dataclass(frozen=True)
class Statistics:
    """Statistics of the trials of one call, without those beyond Tukey's fences."""

    median_ms: float
    # 95% interval of the median by order statistics; the range of fewer than 6 trials.
    ci95_ms: tuple[float, float]
    cv: float | None  # standard deviation over mean; None of one trial
    trials: int  # how many were timed
    outliers: int  # how many of them were left out

    @property
    def high_variance(self) -> bool:
        """Whether the coefficient of variation is above 10%, or unknown."""
        return self.cv is None or self.cv > HIGH_VARIANCE

    def as_row(self) -> dict[str, Any]:
        """The columns of a benchmark's row."""
        own = {**asdict(self), "ci95_ms": list(self.ci95_ms)}
        return {**own, "high_variance": self.high_variance}


def within_fences(values: Sequence[float]) -> list[float]:
    """The values no more than 1.5 interquartile ranges beyond the quartiles (Tukey)."""
    low, high = np.quantile(values, [0.25, 0.75])
    reach = _FENCES * scipy.stats.iqr(values)
    return [value for value in values if low - reach <= value <= high + reach]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the median by order statistics; the range of fewer than 6 values."""
    interval = scipy.stats.quantile_test(values, p=0.5).confidence_interval(0.95)
    low, high = float(interval.low), float(interval.high)
    if not np.isfinite([low, high]).all():
        return min(values), max(values)
    return low, high


def summarize(seconds: Sequence[float]) -> Statistics:
    """The statistics of some trials, at least one."""
    if not seconds:
        raise ValueError("seconds=[]: expected at least one trial; time the call first")
    kept = [1e3 * value for value in within_fences(seconds)]
    cv = float(scipy.stats.variation(kept, ddof=1)) if len(kept) > 1 else None
    median = float(np.median(kept))
    return Statistics(median, median_interval(kept), cv, len(seconds), len(seconds) - len(kept))


def columns(seconds: Sequence[float], *, is_short: bool) -> dict[str, Any]:
    """The columns of a row for its trials.

    Where fewer calls than asked for were made, since they are slow (`is_short`), the row has the
    range of its trials and no interval.
    """
    trials = [1e3 * value for value in seconds]
    if not is_short:
        return {**summarize(seconds).as_row(), "samples_ms": trials}
    median, limits = float(np.median(trials)), [min(trials), max(trials)]
    return {"median_ms": median, "range_ms": limits, "trials": len(trials)}


class Stopwatch:
    """Seconds of a call, by the clock that suits the device.

    On a GPU these are CUDA events, with the L2 cache overwritten before; on one CPU thread its
    process time, which other jobs of the machine disturb less; else, and with `wall`, as where
    processes wait for each other, the wall clock.
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
    """What the stopwatch returns, such as seconds, of each trial of each call.

    Calls take turns (A B C, B C A, ...), so that a drift of the machine's speed hits all alike.

    `before` is called before each of them and not timed, such as a barrier of several ranks.
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
    """Times a call.

    Args:
        call: a function without arguments.
        trials: number of calls that are timed, at least 1.
        warm_ups: number of calls before.
        device: "cpu" or "cuda"; work queued on a GPU is waited for.

    Returns:
        The median, its 95% interval and the coefficient of variation, outliers left out.

    Raises:
        ValueError: call cannot be called, a number is too small, or torch finds no such device.
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
    """The device of a name, "cpu", "cuda" or "cuda:1"; refuses one that torch does not find."""
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
    """The speed-up of a call over another one that took turns with it, over the rounds."""

    median: float
    ci95: tuple[float, float]  # of the median, by order statistics


def speedup(own: Sequence[float], other: Sequence[float]) -> Ratio:
    """The speed-up over another call, from the seconds of each round; outliers left out."""
    kept = within_fences([b / a for a, b in zip(own, other, strict=True)])
    return Ratio(float(np.median(kept)), median_interval(kept))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """The exponent p of ``value = c size^p``, and its 95% interval (low, high).

    It is fitted to the logarithms of at least three different sizes.
    """
    fit = scipy.stats.linregress(np.log(sizes), np.log(values))
    reach = float(scipy.stats.t.ppf(0.975, len(sizes) - 2) * fit.stderr)
    return float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach
