"""Dominating pairs, by which accountants describe mechanisms.

Letters: s is the noise's standard deviation divided by one example's shift of the mean. q is the
sample rate, k a unit's number of examples, n the number of steps, one of which has the example.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Two distributions that dominate a mechanism's outputs on any two neighboring datasets.

    Attributes:
        noise: s, finite and > 0.
        rate: q, in (0, 1]; with 1 the pair is the Gaussian mechanism itself.
        symmetric: if False, the pair is (1-q) N(0, s^2) + q N(1, s^2) against N(0, s^2), or the
            reverse if its delta is greater. If True, each direction of the pair has the privacy
            profile of that first direction for epsilon >= 0.
        examples: k. Above 1, the pair is sum over j of Binom(k, q)(j) N(j, s^2) against N(0, s^2),
            or the reverse; see `UnitPoissonGaussian`. Such a pair is not symmetric.
        steps: n. Above 1, q = 1 / n and the pair describes all n steps, one of which has the
            example: the mean over t of N(e_t, s^2 I) against N(0, s^2 I), or the reverse; see
            `RandomAllocationGaussian`. Such a pair is not symmetric and has k = 1.

    Source:
        Zhu, Dong, Wang 2022, Optimal Accounting of Differential Privacy via Characteristic
        Function, Theorems 10 and 11. The symmetric pair: for alpha >= 1 advanced joint convexity
        (Balle, Barthe, Gaboardi 2018, Theorem 2) bounds H_alpha by that of the first direction,
        and for alpha < 1 H_alpha(P, Q) = alpha H_{1/alpha}(Q, P) + 1 - alpha.
    """

    noise: float
    rate: float
    symmetric: bool = False
    examples: int = 1
    steps: int = 1

    @property
    def whole_noise(self) -> float:
        """The noise of the Gaussian that the pair would be without subsampling."""
        return self.noise / self.examples

    @property
    def log_absence(self) -> float:
        """The log of the probability that no example is drawn, for q < 1."""
        if self.steps > 1:
            return -math.inf
        return self.examples * math.log1p(-self.rate)


Pairs = tuple[tuple[Pair, int], ...]  # (pair, number of times it is composed)


def canonical(pairs: Iterable[tuple[Pair, int]]) -> Pairs:
    """Merge and sort the pairs, so that the order of composition does not change the result."""
    counts: Counter[Pair] = Counter()
    for pair, count in pairs:
        # At rate 1, pairs of all kinds are the same Gaussian.
        whole = pair.rate == 1
        counts[Pair(pair.whole_noise, 1.0) if whole else pair] += count
    return tuple(sorted((item for item in counts.items() if item[1]), key=_order))


def _order(item: tuple[Pair, int]) -> tuple[float, float, bool, int, int]:
    pair = item[0]
    return pair.noise, pair.rate, pair.symmetric, pair.examples, pair.steps


def check_plain(pairs: Pairs, accountant: str) -> None:
    """Refuse units of several examples and random allocation."""
    check_allocation(pairs, accountant)
    for pair, _ in pairs:
        if pair.examples > 1:
            raise ValueError(
                f"examples_per_unit={pair.examples!r}: accountant={accountant!r} is for units of "
                "one example only; use accountant='contour'"
            )


def check_allocation(pairs: Pairs, accountant: str) -> None:
    """Refuse random allocation, for accountants that have no bound for it."""
    if any(pair.steps > 1 for pair, _ in pairs):
        raise ValueError(
            f"accountant={accountant!r} does not support RandomAllocationGaussian; use "
            "accountant='contour' or 'pld'"
        )


def joint_noise(pairs: Pairs) -> float:
    """Return the noise of one Gaussian that is at most as private as all pairs together.

    Subsampling is ignored; by joint convexity it only adds privacy. Without pairs return inf.
    """
    if not pairs:
        return math.inf
    least = min(pair.whole_noise for pair, _ in pairs)
    total = math.fsum(count * (least / pair.whole_noise) ** 2 for pair, count in pairs)
    return least / math.sqrt(total)
