"""Named checks for mistakes that scores of orthogonal canaries do not show. Imports no torch.

Each check takes the readings of a probe and returns a `Check`, which states the false-alarm rate
for an honest run. All rates together are at most `MOST_FALSE_ALARMS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, chi2, poisson

MOST_FALSE_ALARMS = 1e-3
# False-alarm rate of each check that tests a hypothesis about random numbers.
RATE = 8e-5
_LOW_BITS = 8
# Allowed error of a contribution of 1. It would be sqrt(2) if two ranks added squares of shards.
_TOLERANCE = 0.25


@dataclass(frozen=True)
class Check:
    """Result of one named check.

    Attributes:
        name: what is checked.
        ok: whether the check passed.
        false_alarm_rate: upper bound of the rate at which an honest run fails the check.
        found: the measured values, as text.
    """

    name: str
    ok: bool
    false_alarm_rate: float
    found: str


@dataclass(frozen=True)
class Drawn:
    """How often N units were sampled in T logical batches, or in T rounds of cyclic sampling."""

    counts: NDArray[np.int64]  # `[N]`: how often each unit was sampled
    sizes: NDArray[np.int64]  # `[T]`: number of units in each logical batch or round
    most: int  # the largest count of one unit in one logical batch or round
    moved: int = 0  # number of units that were sampled in several parts of a round

    @classmethod
    def of(cls, included: Iterable[NDArray[np.int64]], parts: int = 1) -> Drawn:
        """Add up the counts `[N]` of logical batches: by round of `parts` batches, and all."""
        sizes, most = [], 0
        counts = whole = np.zeros(0, dtype=np.int64)
        seen = np.zeros((parts, 0), dtype=bool)
        for number, draw in enumerate(included):
            part = number % parts
            if not number:
                counts, seen = np.zeros_like(draw), np.zeros((parts, len(draw)), dtype=bool)
            seen[part] |= draw > 0
            whole = draw + whole if part else draw
            if part == parts - 1:
                counts += whole
                sizes.append(int(whole.sum()))
                most = max(most, int(whole.max()))
        return cls(counts, np.array(sizes), most, int((seen.sum(0) > 1).sum()))


def check_inclusions(name: str, drawn: Drawn, rate: float, rng: np.random.Generator) -> Check:
    """Test whether each logical batch samples units independently at the claimed rate.

    Four tests share the false-alarm rate: the variance of the units' counts, the variance of the
    batch sizes (shuffling makes both too small), the sum of all counts, and the rarest count.
    """
    counts, sizes = drawn.counts, drawn.sizes
    draws, units = sizes.size, counts.size
    if rate == 1:
        missing = int((counts != draws).sum() + (sizes != units).sum()) + (drawn.most != 1)
        missing += drawn.moved
        return Check(name, not missing, 0.0, f"{missing} of {units} not sampled once a batch")
    of_counts = _continuous(counts, draws, rate, rng)
    values = {
        "counts of units": _spread(of_counts),
        "sizes of batches": _spread(_continuous(sizes, units, rate, rng)),
        "inclusions": _two_sided(int(counts.sum()), draws * units, rate),
        "count of one unit": min(1.0, units * float(2 * ndtr(-np.abs(of_counts).max()))),
        "inclusions of a unit in one release": float(drawn.most <= 1),
        "units in draws of several parts": float(not drawn.moved),
    }
    worst = min(values, key=lambda key: values[key])
    value = min(1.0, 4 * values[worst])
    found = f"{counts.sum()} of {draws * units * rate:.0f} expected; p {value:.2g} ({worst})"
    return Check(name, value > RATE, RATE, found)


def _continuous(
    counts: NDArray[np.int64], trials: int, rate: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Map binomial counts to standard normal numbers, drawn uniformly in a count's CDF step."""
    law = binom(trials, rate)
    uniform = law.cdf(counts - 1) + rng.random(counts.shape) * law.pmf(counts)
    return np.asarray(ndtri(np.clip(uniform, 1e-300, 1 - 1e-16)))


def _spread(numbers: NDArray[np.float64]) -> float:
    """Return the two-sided p-value of the variance of numbers that should be standard normal."""
    law, total = chi2(numbers.size), float((numbers**2).sum())
    return min(1.0, 2 * float(min(law.cdf(total), law.sf(total))))


def _two_sided(count: int, trials: int, rate: float) -> float:
    law = binom(trials, rate)
    return min(1.0, 2 * float(min(law.cdf(count), law.sf(count - 1))))


def check_contributions(
    name: str, found: NDArray[np.float64], expected: NDArray[np.int64], std: float
) -> Check:
    """Test whether a release contains the contribution of each sampled unit exactly once."""
    error = np.abs(found - expected)
    wrong = int((error > _TOLERANCE).sum())
    return Check(
        name,
        not wrong,
        min(1.0, 2 * found.size * float(ndtr(-_TOLERANCE / std))),
        f"{wrong} of {found.size} differ; at most by {error.max():.3g} contributions",
    )


def check_noise_scale(name: str, vectors: NDArray[np.float64]) -> Check:
    """Test for too little noise; `vectors` are divided by the claimed standard deviation."""
    total = float((vectors**2).sum())
    value = float(chi2(vectors.size).cdf(total))
    std = (total / vectors.size) ** 0.5
    return Check(name, value > RATE, RATE, f"{std:.4f} of the claim; p {value:.2g}")


def check_noise_correlation(name: str, vectors: NDArray[np.float64]) -> Check:
    """Test whether M noise vectors `[M, n]`, of several steps or ranks, are pairwise independent.

    If they are, the cosine r of two vectors has (1 + r) / 2 ~ Beta((n - 1) / 2, (n - 1) / 2).
    """
    count, width = vectors.shape
    norms = np.linalg.norm(vectors, axis=1)
    cosines = vectors @ vectors.T / np.maximum(np.outer(norms, norms), 1e-300)
    pairs = np.abs(cosines[np.triu_indices(count, 1)])
    half = (width - 1) / 2
    value = 2 * pairs.size * float(beta(half, half).sf(min(1.0, (1 + pairs.max()) / 2)))
    found = f"largest of {pairs.size} correlations {pairs.max():.3g}; p {min(1.0, value):.2g}"
    return Check(name, value > RATE, RATE, found)


def check_noise_lags(name: str, noise: NDArray[np.float64]) -> Check:
    """Test, for each lag, whether releases t and t + lag have independent `noise`, `[T, ...]`.

    The noise's mean product over all pairs of releases at one lag is nearly normal. So the test
    also finds correlations that are small in each pair, as from a wrong band coefficient.
    """
    rows = noise.reshape(len(noise), -1)
    products, pairs = rows @ rows.T, rows.shape[1] * np.arange(len(rows) - 1, 0, -1)
    found = [products.trace(lag) for lag in range(1, len(rows))] / np.sqrt(pairs)
    worst = int(np.abs(found).argmax())
    value = 2 * len(found) * float(ndtr(-abs(found[worst])))
    text = f"{found[worst]:.3g} standard errors at lag {worst + 1}; p {min(1.0, value):.2g}"
    return Check(name, value > RATE, RATE, text)


def check_repeats(vectors: NDArray[np.float64], std_in_steps: float) -> Check:
    """Test whether the same noise value occurs at several elements, with either sign.

    The number of pairs of equal magnitude among N independent values is nearly Poisson with mean
    N^2 / (2 sqrt(pi) s), where s is the standard deviation in grid steps. `vectors` are noise
    divided by its standard deviation, at elements to which no canary contributes.
    """
    steps = np.sort(np.abs(np.rint(vectors * std_in_steps)).ravel())
    _, runs = np.unique(steps, return_counts=True)
    repeats = int((runs * (runs - 1) // 2).sum())
    mean = steps.size**2 / (2 * np.pi**0.5 * std_in_steps)
    value = float(poisson(mean).sf(repeats - 1))
    found = f"{repeats} equal pairs, {mean:.3g} expected"
    return Check("noise drawn once", value > RATE, RATE, found)


def check_lattice(multiples: NDArray[np.float64], std_in_steps: float) -> Check:
    """Test whether all releases are whole multiples of the public grid, with uniform low bits.

    Noise drawn in floating point is not on the grid or, if it is large, has low bits of zero. Both
    reveal the sum to which the noise was added (Mironov 2012). `multiples` are the released sums
    divided by the grid's spacing.
    """
    name = "lattice of the release"
    off = int((multiples != np.rint(multiples)).sum())
    if off:
        return Check(name, False, RATE, f"{off} of {multiples.size} are off the grid")
    bins = 1 << _LOW_BITS
    if std_in_steps < 16 * bins:
        return Check(name, True, 0.0, "all on the grid; too little noise to test low bits")
    bits = np.mod(multiples, bins).astype(np.int64).ravel()
    expected = bits.size / bins
    observed = np.bincount(bits, minlength=bins)
    value = float(chi2(bins - 1).sf(((observed - expected) ** 2 / expected).sum()))
    return Check(name, value > RATE, RATE, f"all on the grid; low bits p {value:.2g}")


def check_same(name: str, first: NDArray[np.float64], second: NDArray[np.float64]) -> Check:
    """Test whether two ranks hold the same release, bit for bit."""
    different = int((first != second).sum())
    return Check(name, not different, 0.0, f"{different} of {first.size} differ between ranks")


def check_charges(charged: float, due: float) -> Check:
    """Test whether the accountant counted every release of the scored run."""
    found = f"epsilon {charged:.6g} charged, {due:.6g} due"
    return Check("charges", charged >= due * (1 - 1e-9), 0.0, found)
