"""Whether a call takes longer than another one did: the tests of `compare`, on logs of times.

What is independent decides on the test. Of trials that took turns a launch of the two processes
is independent of the next. Of separate runs nothing is: the trials of a run share its machine's
state, and a test of them says how far the two runs differ, not why. Such a difference therefore
counts where all of its interval lies beyond the threshold.
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
    """Of log(new / old).

    Attributes:
        estimate: of it.
        interval: of it.
        p: of "it is not slower", before any correction; None where there are only intervals.
        p_faster: of "it is not faster", likewise.
        slower, faster: whether it is beyond the threshold, which counts where p is significant.
    """

    estimate: float
    interval: tuple[float, float]
    p: float | None
    p_faster: float | None
    slower: bool
    faster: bool


def of_pairs(
    old: np.ndarray, new: np.ndarray, launches: int, confidence: float, threshold: float
) -> Test:
    """Student's t over the launches of trials that took turns, or over the rounds of few launches.

    p is of the null hypothesis that the ratio is at most 1; the estimate must be beyond the
    threshold.
    """
    units = np.log(new / old)
    if launches >= _FEWEST_LAUNCHES:
        units = np.median(units.reshape(launches, -1), axis=1)
    p, p_faster = (
        float(np.nan_to_num(scipy.stats.ttest_1samp(units, 0.0, alternative=way).pvalue, nan=1.0))
        for way in ("greater", "less")
    )
    reach = scipy.stats.t.ppf((1 + confidence) / 2, len(units) - 1) * scipy.stats.sem(units)
    mean, edge = float(np.mean(units)), math.log1p(threshold)
    interval = (mean - float(reach), mean + float(reach))
    return Test(mean, interval, p, p_faster, slower=mean > edge, faster=mean < -edge)


def of_two_samples(
    estimate: float, old: np.ndarray, new: np.ndarray, confidence: float, threshold: float
) -> Test:
    """Mann and Whitney's test of separate trials, and the bootstrap of the medians' ratio.

    p is of the null hypothesis that the ratio is at most 1 + threshold, and the whole interval
    must be beyond it too. Of fewer than `FEWEST_TRIALS` trials there is no p, and the interval is
    that of their ranges.
    """
    if min(len(old), len(new)) < FEWEST_TRIALS:
        return of_intervals(estimate, (min(old), max(old)), (min(new), max(new)), threshold)
    if np.ptp(old) == np.ptp(new) == 0:
        interval = (estimate, estimate)
    else:
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
    """Of two intervals: whether they lie apart by more than the threshold."""
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
    slower, faster = interval[0] > edge, interval[1] < -edge
    return Test(estimate, interval, p, p_faster, slower, faster)


def holm(p: Mapping[str, float | None]) -> dict[str, float]:
    """Holm's adjusted p of those that have one."""
    known = sorted((value, name) for name, value in p.items() if value is not None)
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (value, name) in enumerate(known):
        largest = max(largest, min(1.0, value * (len(known) - number)))
        adjusted[name] = largest
    return adjusted
