"""Whether a call takes longer than another one, from the times of both.

Of trials that took turns each launch of the two processes is independent of the next. The trials
of separate runs share the state of their machine: they say how far the runs differ, not why, so
a difference counts only where all of it is beyond the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy.stats

from .timing import median_interval

CONFIDENCE = 0.95
# Where launches are fewer, each round counts as independent.
_FEWEST_LAUNCHES = 3


@dataclass(frozen=True)
class Test:
    """A test of log(new / old)."""

    estimate: float
    interval: tuple[float, float]  # of the estimate
    p: Mapping[str, float]  # of no change, against "slower" and against "faster"; none if separate


def of_turns(old: np.ndarray, new: np.ndarray, launches: int) -> Test:
    """Student's t over the launches, or over the rounds where launches are few."""
    units = np.log(new / old)
    if launches >= _FEWEST_LAUNCHES:
        units = np.median(units.reshape(launches, -1), axis=1)
    p = {
        verdict: float(
            np.nan_to_num(scipy.stats.ttest_1samp(units, 0.0, alternative=way).pvalue, nan=1.0)
        )
        for verdict, way in (("slower", "greater"), ("faster", "less"))
    }
    reach = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(units) - 1) * scipy.stats.sem(units))
    mean = float(np.mean(units))
    return Test(mean, (mean - reach, mean + reach), p)


def of_separate_runs(old: np.ndarray, new: np.ndarray) -> Test:
    """The ratio of the medians, between the farthest ends of their 95% intervals."""
    (old_low, old_high), (new_low, new_high) = (median_interval(list(x)) for x in (old, new))
    estimate = math.log(np.median(new) / np.median(old))
    return Test(estimate, (math.log(new_low / old_high), math.log(new_high / old_low)), {})


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of each name."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p) - number)))
        adjusted[name] = largest
    return adjusted
