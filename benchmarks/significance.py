"""Tests of whether a call takes longer than another one, from the times of both.

Of trials that took turns each launch of the two processes is independent of the next. The trials
of separate runs share the state of their machine: a test of them says how far the runs differ,
not why, so a difference counts only where all of its interval is beyond the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.stats

# Where launches are fewer, each round counts as independent.
_FEWEST_LAUNCHES = 3
# Of fewer trials a bootstrap of the median tells little, and the rank test has few values of p.
FEWEST_TRIALS = 8


@dataclass(frozen=True)
class Test:
    """A test of log(new / old).

    Attributes:
        estimate: log(new / old).
        interval: of the estimate.
        p, p_faster: of "it is not slower" and "it is not faster"; None of two intervals.
        slower, faster: whether it is beyond the threshold; counts where p is significant.
    """

    estimate: float
    interval: tuple[float, float]
    p: float | None
    p_faster: float | None
    slower: bool
    faster: bool


def of_turns(
    old: np.ndarray, new: np.ndarray, launches: int, confidence: float, threshold: float
) -> Test:
    """Student's t over the launches, or over the rounds where launches are few.

    The null hypothesis is a ratio of at most 1; the estimate must be beyond the threshold.
    """
    units = np.log(new / old)
    if launches >= _FEWEST_LAUNCHES:
        units = np.median(units.reshape(launches, -1), axis=1)
    p, p_faster = (
        float(np.nan_to_num(scipy.stats.ttest_1samp(units, 0.0, alternative=way).pvalue, nan=1.0))
        for way in ("greater", "less")
    )
    reach = float(scipy.stats.t.ppf((1 + confidence) / 2, len(units) - 1) * scipy.stats.sem(units))
    mean, edge = float(np.mean(units)), math.log1p(threshold)
    return Test(mean, (mean - reach, mean + reach), p, p_faster, mean > edge, mean < -edge)


def of_samples(
    estimate: float, old: np.ndarray, new: np.ndarray, confidence: float, threshold: float
) -> Test:
    """Mann and Whitney's test, and the bootstrap of the ratio of medians.

    The null hypothesis is a ratio of at most 1 + threshold. Fewer than `FEWEST_TRIALS` trials
    have no p, and the interval of their ranges.
    """
    if min(len(old), len(new)) < FEWEST_TRIALS:
        return of_intervals(estimate, (min(old), max(old)), (min(new), max(new)), threshold)
    interval = (estimate, estimate)
    if np.ptp(old) or np.ptp(new):
        found = scipy.stats.bootstrap(
            (new, old),
            lambda y, x, axis: np.log(np.median(y, axis=axis) / np.median(x, axis=axis)),
            n_resamples=2000,
            vectorized=True,
            confidence_level=confidence,
            method="percentile",
            random_state=np.random.default_rng(0),
        ).confidence_interval
        interval = (float(found.low), float(found.high))
    p = scipy.stats.mannwhitneyu(new, old * (1 + threshold), alternative="greater").pvalue
    p_faster = scipy.stats.mannwhitneyu(new * (1 + threshold), old, alternative="less").pvalue
    return _beyond(estimate, interval, threshold, float(p), float(p_faster))


def of_intervals(
    estimate: float, old: Sequence[float], new: Sequence[float], threshold: float
) -> Test:
    """Whether two intervals are apart by more than the threshold."""
    interval = (math.log(new[0] / old[1]), math.log(new[1] / old[0]))
    return _beyond(estimate, interval, threshold, None, None)


def _beyond(
    estimate: float,
    interval: tuple[float, float],
    threshold: float,
    p: float | None,
    p_faster: float | None,
) -> Test:
    edge = math.log1p(threshold)
    return Test(estimate, interval, p, p_faster, interval[0] > edge, interval[1] < -edge)


def holm(p: Mapping[str, float | None]) -> dict[str, float]:
    """Holm's adjusted p of the names that have one."""
    known = sorted((value, name) for name, value in p.items() if value is not None)
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (value, name) in enumerate(known):
        largest = max(largest, min(1.0, value * (len(known) - number)))
        adjusted[name] = largest
    return adjusted
