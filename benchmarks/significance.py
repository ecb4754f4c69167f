"""Tests whether a call takes longer than another call, from the times of both.

If trials took turns, the launches (pairs of fresh processes) are independent. If two runs were
separate, a difference may also come from the state of the machine during each run. Such a
difference counts only if its whole interval is beyond the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy.stats

from .timing import median_interval

CONFIDENCE = 0.95
# With fewer launches, rounds are treated as independent.
_FEWEST_LAUNCHES = 3


@dataclass(frozen=True)
class Test:
    """A test of the log of the ratio of new to old times."""

    estimate: float
    interval: tuple[float, float]  # 95% interval of the estimate
    p: Mapping[str, float]  # p-values for "slower" and "faster"; empty for separate runs


def of_turns(old: np.ndarray, new: np.ndarray, launches: int) -> Test:
    """Return Student's t test over launches, or over rounds if launches are fewer than 3."""
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
    """Return the log of the medians' ratio, with the extreme ratios within both intervals."""
    (old_low, old_high), (new_low, new_high) = (median_interval(list(x)) for x in (old, new))
    estimate = math.log(np.median(new) / np.median(old))
    return Test(estimate, (math.log(new_low / old_high), math.log(new_high / old_low)), {})


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Return each name's p-value adjusted by Holm's method."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p) - number)))
        adjusted[name] = largest
    return adjusted
