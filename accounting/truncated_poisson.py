"""Poisson batches cut at a cap: what the cut costs on top of the accountant's epsilon."""

import math

from scipy.stats import binom

from . import _validate
from .accountant import Accountant

__all__ = ["truncated_poisson_epsilon", "truncation_probability"]

_ROUNDS = 64
_FIRST_SLACK = 1e-9


def truncation_probability(num_samples: int, sample_rate: float, cap: int) -> float:
    """A bound on the chance that one Poisson batch exceeds the cap.

    Args:
        num_samples: number of samples n in the data set, >= 1.
        sample_rate: the chance of one sample to be in the batch, in [0, 1].
        cap: the largest batch that is not cut, in samples, >= 1.

    Returns:
        P[Binomial(n, sample_rate) + 1 > cap]. Over T steps the truncation mass is T times this.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        It bounds the chance of a cut for this data set and for every neighbour of it with one
        sample more or less: a neighbour's batch has at most one sample beyond those drawn from
        these n.
    """
    _validate.whole(1, num_samples=num_samples, cap=cap)
    _validate.rate(sample_rate=sample_rate)
    return float(binom.sf(cap - 1, num_samples, sample_rate))


def truncated_poisson_epsilon(
    accountant: Accountant, delta: float, *, truncation_mass: float
) -> float:
    """Epsilon of the accountant's history when each Poisson batch was cut at a cap.

    Let M be the run without cuts and M' the run with them, on neighbouring data sets D and D'.
    Run both on the same coins: as long as no batch exceeds the cap they are one and the same, so
    by a union bound over the steps their outputs differ with probability at most m, the
    truncation mass, on D and likewise on D'. That bounds the total variation distance, and for
    every set S of outputs

        P[M'(D) in S] <= P[M(D) in S] + m
                      <= e^eps P[M(D') in S] + delta_M(eps) + m
                      <= e^eps P[M'(D') in S] + delta_M(eps) + (1 + e^eps) m.

    Hence delta_M'(eps) <= delta_M(eps) + (1 + e^eps) m, whatever rule chooses the samples that
    are cut.

    Args:
        accountant: holds the history as if nothing had been cut.
        delta: the delta of the run with cuts, in (0, 1).
        truncation_mass: the sum of `truncation_probability` over the steps, >= 0.

    Returns:
        An epsilon with delta_M(epsilon) + (1 + e^epsilon) truncation_mass <= delta, at most 1e-9
        above the smallest one where the mass is small against delta (somewhat more where there
        is barely any); inf where none was found.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        The run with cuts is (epsilon, delta)-private if the accountant's bounds hold.
    """
    _validate.probability(delta=delta)
    _validate.finite_non_negative(truncation_mass=truncation_mass)
    if truncation_mass == 0:
        return accountant.get_epsilon(delta)
    epsilon, slack = 0.0, _FIRST_SLACK
    for _ in range(_ROUNDS):
        room = delta - _cost(epsilon, truncation_mass)
        if room <= 0:
            return math.inf
        # Nothing between the last candidate and this can pass: the cost only rises with epsilon.
        least = accountant.get_epsilon(room)
        if least == math.inf:
            return math.inf
        epsilon = max(least, epsilon) + slack * max(least, 1.0)
        if _cost(epsilon, truncation_mass) >= delta:
            return math.inf
        if accountant.get_delta(epsilon) + _cost(epsilon, truncation_mass) <= delta:
            return epsilon
        slack *= 2
    return math.inf


def _cost(epsilon: float, truncation_mass: float) -> float:
    """(1 + e^epsilon) truncation_mass; inf beyond float64's range."""
    return math.inf if epsilon > 700 else (1 + math.exp(epsilon)) * truncation_mass
