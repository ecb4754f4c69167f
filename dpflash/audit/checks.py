"""Named checks: tests of what scores of orthogonal canaries cannot see. No torch.

Each takes what a probe read and returns a `Check` that states how often it fails an honest run;
together that is at most `MOST_FALSE_ALARMS`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, chi2, poisson

MOST_FALSE_ALARMS = 1e-3
# Of each check that tests a hypothesis about random numbers.
RATE = 8e-5
_LOW_BITS = 8
# Of a contribution that is read off; squares of two shards added release sqrt(2) in place of 1.
_TOLERANCE = 0.25


@dataclass(frozen=True)
class Check:
    """Result of one named check.

    Attributes:
        name: what is checked.
        ok: whether it passed.
        false_alarm_rate: the most by which an honest run fails it.
        found: what was found.
    """

    name: str
    ok: bool
    false_alarm_rate: float
    found: str


@dataclass(frozen=True)
class Drawn:
    """How often each of N units was drawn in T draws, or in T rounds of cyclic draws."""

    counts: NDArray[np.int64]  # `[N]`: draws that each unit was in
    sizes: NDArray[np.int64]  # `[T]`: units of each draw
    most: int  # how often some unit was in one draw
    moved: int = 0  # units in draws of several parts

    @classmethod
    def of(cls, included: Iterable[NDArray[np.int64]], parts: int = 1) -> Drawn:
        """Of `[N]` for each draw: how often each unit is in it. `parts` draws are a round."""
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
    """Are units drawn independently at the claimed rate, in each draw?

    Four tests share the rate: the spread of the units' counts and of the draws' sizes, both from
    below (shuffling) and from above; the total; and the unit with the least likely count.
    """
    counts, sizes = drawn.counts, drawn.sizes
    draws, units = sizes.size, counts.size
    if rate == 1:
        missing = int((counts != draws).sum() + (sizes != units).sum()) + (drawn.most != 1)
        missing += drawn.moved
        return Check(name, not missing, 0.0, f"{missing} of {units} not included once a draw")
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
    """Binomial counts as standard normal numbers, by a uniform number within each step."""
    law = binom(trials, rate)
    uniform = law.cdf(counts - 1) + rng.random(counts.shape) * law.pmf(counts)
    return np.asarray(ndtri(np.clip(uniform, 1e-300, 1 - 1e-16)))


def _spread(numbers: NDArray[np.float64]) -> float:
    """p-value of the variance of standard normal numbers, two-sided."""
    law, total = chi2(numbers.size), float((numbers**2).sum())
    return min(1.0, 2 * float(min(law.cdf(total), law.sf(total))))


def _two_sided(count: int, trials: int, rate: float) -> float:
    law = binom(trials, rate)
    return min(1.0, 2 * float(min(law.cdf(count), law.sf(count - 1))))


def check_contributions(
    name: str, found: NDArray[np.float64], expected: NDArray[np.int64], std: float
) -> Check:
    """Does a release contain each drawn unit exactly once?"""
    error = np.abs(found - expected)
    wrong = int((error > _TOLERANCE).sum())
    return Check(
        name,
        not wrong,
        min(1.0, 2 * found.size * float(ndtr(-_TOLERANCE / std))),
        f"{wrong} of {found.size} differ; at most by {error.max():.3g} contributions",
    )


def check_noise_scale(name: str, vectors: NDArray[np.float64]) -> Check:
    """Is there as much noise as claimed? `vectors` are over the claimed standard deviation."""
    total = float((vectors**2).sum())
    value = float(chi2(vectors.size).cdf(total))
    std = (total / vectors.size) ** 0.5
    return Check(name, value > RATE, RATE, f"{std:.4f} of the claim; p {value:.2g}")


def check_noise_correlation(name: str, vectors: NDArray[np.float64]) -> Check:
    """Is the noise `[M, n]` of any two vectors independent: of steps, parameters, ranks?

    Under the claim the cosine r of two of them has (1 + r) / 2 ~ Beta((n - 1) / 2, (n - 1) / 2).
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
    """Is the noise `[T, ...]` of releases any fixed number of releases apart independent?

    It sees correlations that are small between any two of them, such as those that another
    coefficient leaves: over all pairs, the mean product is nearly normal.
    """
    rows = noise.reshape(len(noise), -1)
    products, pairs = rows @ rows.T, rows.shape[1] * np.arange(len(rows) - 1, 0, -1)
    found = [products.trace(lag) for lag in range(1, len(rows))] / np.sqrt(pairs)
    worst = int(np.abs(found).argmax())
    value = 2 * len(found) * float(ndtr(-abs(found[worst])))
    text = f"{found[worst]:.3g} standard errors at lag {worst + 1}; p {min(1.0, value):.2g}"
    return Check(name, value > RATE, RATE, text)


def check_repeats(vectors: NDArray[np.float64], std_in_steps: float) -> Check:
    """Does the same noise occur at other elements, with either sign?

    Equal magnitudes among N independent draws are about Poisson with mean N^2 / (2 sqrt(pi) s),
    for a standard deviation of s grid steps. `vectors` are noise of which no canary is subtracted,
    over its standard deviation.
    """
    steps = np.sort(np.abs(np.rint(vectors * std_in_steps)).ravel())
    _, runs = np.unique(steps, return_counts=True)
    repeats = int((runs * (runs - 1) // 2).sum())
    mean = steps.size**2 / (2 * np.pi**0.5 * std_in_steps)
    value = float(poisson(mean).sf(repeats - 1))
    found = f"{repeats} equal pairs, {mean:.3g} expected"
    return Check("noise drawn once", value > RATE, RATE, found)


def check_lattice(multiples: NDArray[np.float64], std_in_steps: float) -> Check:
    """Are all releases whole multiples of the public grid, with uniform low bits?

    Noise drawn in floating point is not on the grid, or has zeros in its low bits where it is
    large, and so reveals which sum it was added to (Mironov 2012). `multiples` are sums over the
    grid.
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
    """Do two ranks hold the same release, bit for bit?"""
    different = int((first != second).sum())
    return Check(name, not different, 0.0, f"{different} of {first.size} differ between ranks")


def check_charges(charged: float, due: float) -> Check:
    """Has the accountant been charged for every release of the scored run?"""
    found = f"epsilon {charged:.6g} charged, {due:.6g} due"
    return Check("charges", charged >= due * (1 - 1e-9), 0.0, found)
