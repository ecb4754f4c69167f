"""Poisson batches cut at a cap: what the cut costs on top of the accountant's epsilon."""

import math
from collections.abc import Callable

from scipy.special import betainc

from . import _validate
from .interval import Interval

__all__ = ["truncation_probability", "with_failure"]

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
    if cap > num_samples:
        return 0.0
    # P[Binomial(n, p) >= k] = I_p(k, n - k + 1).
    return float(betainc(cap, num_samples - cap + 1, sample_rate))


def with_failure(
    failure: float,
    delta: float,
    get_epsilon: Callable[[float], Interval],
    get_delta: Callable[[float], Interval],
) -> Interval:
    """Epsilon of a run that differs from an accounted one with some probability.

    Let M be the accounted run (Poisson batches without cuts) and M' the one that was made (cut at
    a cap), on neighbouring data sets D and D'. Run both on the same coins: as long as no batch
    exceeds the cap they are one and the same, so by a union bound over the steps their outputs
    differ with probability at most m, the failure, on D and likewise on D'. That bounds the total
    variation distance, and for every set S of outputs

        P[M'(D) in S] <= P[M(D) in S] + m
                      <= e^eps P[M(D') in S] + delta_M(eps) + m
                      <= e^eps P[M'(D') in S] + delta_M(eps) + (1 + e^eps) m.

    Hence delta_M'(eps) <= delta_M(eps) + (1 + e^eps) m, whatever rule chooses the samples that
    are cut; exchanging M and M' gives the lower end.

    Args:
        failure: m, the sum of `truncation_probability` over the steps, > 0.
        delta: of the run that was made, in (0, 1).
        get_epsilon, get_delta: of the accounted run.

    Returns:
        The upper end has delta_M(epsilon) + (1 + e^epsilon) m <= delta and is at most 1e-9 above
        the smallest such epsilon where m is small against delta (somewhat more where there is
        barely any); inf where none was found.
    """
    upper = _least_upper(failure, delta, get_epsilon, get_delta)
    reached = delta + _cost(upper, failure)
    lower = get_epsilon(reached).lower if reached < 1 else 0.0
    return Interval(lower, upper)


def _least_upper(
    failure: float,
    delta: float,
    get_epsilon: Callable[[float], Interval],
    get_delta: Callable[[float], Interval],
) -> float:
    epsilon, slack = 0.0, _FIRST_SLACK
    for _ in range(_ROUNDS):
        room = delta - _cost(epsilon, failure)
        if room <= 0:
            return math.inf
        # Nothing between the last candidate and this can pass: the cost only rises with epsilon.
        least = get_epsilon(room).upper
        if least == math.inf:
            return math.inf
        epsilon = max(least, epsilon) + slack * max(least, 1.0)
        if _cost(epsilon, failure) >= delta:
            return math.inf
        if get_delta(epsilon).upper + _cost(epsilon, failure) <= delta:
            return epsilon
        slack *= 2
    return math.inf


def _cost(epsilon: float, failure: float) -> float:
    """(1 + e^epsilon) failure; inf beyond float64's range."""
    return math.inf if epsilon > 700 else (1 + math.exp(epsilon)) * failure
