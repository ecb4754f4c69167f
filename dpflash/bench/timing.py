"""How long calls take: warmed up, taking turns, outliers out, the median with its interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.stats
import torch

Step = Callable[[], object]

HIGH_VARIANCE = 0.1  # of the coefficient of variation
_FENCES = 1.5  # of Tukey, in interquartile ranges


@dataclass(frozen=True)
class Effort:
    """How often a call is made.

    Attributes:
        warm_ups: calls that are not timed.
        trials: calls that are.
    """

    warm_ups: int = 5
    trials: int = 20


FULL = Effort()
QUICK = Effort(warm_ups=2, trials=5)


@dataclass(frozen=True)
class Statistics:
    """Of the trials of one call.

    Attributes:
        median_ms: of the trials kept, milliseconds.
        ci95_ms: 95% interval of the median by order statistics; of fewer than 6 trials, which
            have none, their range.
        cv: standard deviation over mean of the trials kept; None of one trial.
        trials: how many were timed.
        outliers: how many of them were left out, those beyond Tukey's fences.
    """

    median_ms: float
    ci95_ms: tuple[float, float]
    cv: float | None
    trials: int
    outliers: int

    @property
    def high_variance(self) -> bool:
        """Whether the figure is to be taken with care."""
        return self.cv is None or self.cv > HIGH_VARIANCE

    def as_row(self) -> dict[str, Any]:
        """The columns of a benchmark's row."""
        return {
            "median_ms": self.median_ms,
            "ci95_ms": list(self.ci95_ms),
            "cv": self.cv,
            "trials": self.trials,
            "outliers": self.outliers,
            "high_variance": self.high_variance,
        }


def within_fences(values: Sequence[float]) -> list[float]:
    """The values no more than 1.5 interquartile ranges beyond the quartiles (Tukey)."""
    low, high = np.quantile(values, [0.25, 0.75])
    reach = _FENCES * scipy.stats.iqr(values)
    return [value for value in values if low - reach <= value <= high + reach]


def summarize(seconds: Sequence[float]) -> Statistics:
    """The statistics of some trials.

    Args:
        seconds: of each trial, at least one.
    """
    if not seconds:
        raise ValueError("seconds=[]: expected at least one trial; time the call first")
    kept = [1e3 * value for value in within_fences(seconds)]
    interval = scipy.stats.quantile_test(kept, p=0.5).confidence_interval(0.95)
    low, high = float(interval.low), float(interval.high)
    if not np.isfinite([low, high]).all():
        low, high = min(kept), max(kept)
    cv = float(scipy.stats.variation(kept, ddof=1)) if len(kept) > 1 else None
    median = float(np.median(kept))
    return Statistics(median, (low, high), cv, len(seconds), len(seconds) - len(kept))


def time_steps(
    steps: Mapping[str, Step],
    *,
    effort: Effort,
    device: torch.device,
    before: Step = lambda: None,
) -> dict[str, list[float]]:
    """Seconds of each trial of each call.

    Calls take turns (A B C, B C A, ...), so that a drift of the machine's speed hits all alike.

    Args:
        steps: the calls, by name.
        effort: how often each is made.
        device: whose time it is; work queued on a GPU is waited for.
        before: made before each call and not timed, such as a barrier of several workers.
    """
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(effort.warm_ups + effort.trials):
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            before()
            taken = clocked(steps[name], device)
            if number >= effort.warm_ups:
                seconds[name].append(taken)
    return seconds


def clocked(step: Step, device: torch.device) -> float:
    """Seconds of one call: by events on a GPU, else by the wall's clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
