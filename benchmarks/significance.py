"""Tests of whether a call takes longer than another one, from the times of both.

Of trials that took turns each launch of the two processes is independent of the next. The trials
of separate runs share the state of their machine: a test of them says how far the runs differ,
not why, so a difference counts only where all of its interval is beyond the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy.stats

# Where launches are fewer, each round counts as independent.
_FEWEST_LAUNCHES = 3


@dataclass(frozen=True)
class Test:
    """A test of log(new / old)."""

    estimate: float
    interval: tuple[float, float]  # of the estimate
    p_slower: float  # of "it is not slower"
    p_faster: float  # of "it is not faster"
    is_slower: bool  # whether it is beyond the threshold; counts where p is significant
    is_faster: bool


def of_turns(
    old: np.ndarray, new: np.ndarray, launches: int, confidence: float, threshold: float
) -> Test:
    """Student's t over the launches, or over the rounds where launches are few.

    The null hypothesis is a ratio of at most 1; the estimate must be beyond the threshold.
    """
    units = np.log(new / old)
    if launches >= _FEWEST_LAUNCHES:
        units = np.median(units.reshape(launches, -1), axis=1)
    p_slower, p_faster = (
        float(np.nan_to_num(scipy.stats.ttest_1samp(units, 0.0, alternative=way).pvalue, nan=1.0))
        for way in ("greater", "less")
    )
    reach = float(scipy.stats.t.ppf((1 + confidence) / 2, len(units) - 1) * scipy.stats.sem(units))
    mean, edge = float(np.mean(units)), math.log1p(threshold)
    interval = (mean - reach, mean + reach)
    return Test(mean, interval, p_slower, p_faster, mean > edge, mean < -edge)


def of_samples(old: np.ndarray, new: np.ndarray, confidence: float, threshold: float) -> Test:
    """Mann and Whitney's test, and the bootstrap of the ratio of medians.

    The null hypothesis is a ratio of at most 1 + threshold.
    """
    estimate = math.log(np.median(new) / np.median(old))
    low = high = estimate
    if np.ptp(old) or np.ptp(new):
        interval = scipy.stats.bootstrap(
            (new, old),
            lambda y, x, axis: np.log(np.median(y, axis=axis) / np.median(x, axis=axis)),
            n_resamples=2000,
            vectorized=True,
            confidence_level=confidence,
            method="percentile",
            random_state=np.random.default_rng(0),
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    grown = 1 + threshold
    p_slower = scipy.stats.mannwhitneyu(new, old * grown, alternative="greater").pvalue
    p_faster = scipy.stats.mannwhitneyu(new * grown, old, alternative="less").pvalue
    edge = math.log(grown)
    return Test(estimate, (low, high), float(p_slower), float(p_faster), low > edge, high < -edge)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p of each name."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (name, value) in enumerate(sorted(p.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, value * (len(p) - number)))
        adjusted[name] = largest
    return adjusted
