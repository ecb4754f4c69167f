"""Privacy events: the mechanisms that accountants compose, each under a neighboring relation.

Under every relation a noise_multiplier is the noise's standard deviation divided by the L2 bound
of one sample's contribution. Under "replace_one" a sum may change by twice that bound; events
include this factor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from scipy.special import betainc

from . import _validate
from .pairs import Pair

ADD_REMOVE, ZERO_OUT, REPLACE_ONE = "add_remove", "zero_out", "replace_one"
RELATIONS = (ADD_REMOVE, ZERO_OUT, REPLACE_ONE)
_MOST_EXAMPLES = 1000  # of one unit; accountants sum one term for each example
_LONGEST_BLOCK = 10**7  # steps of a block in random allocation; longer blocks take too much memory

_Event = TypeVar("_Event", bound="Event")


@dataclass(frozen=True, kw_only=True)
class Event(ABC):
    """A mechanism that was applied to the data, and the neighboring relation of its guarantee.

    Attributes:
        relation: "add_remove" (one sample is added or removed), "zero_out" (one sample is
            replaced by nothing; the size of the dataset is public) or "replace_one" (one sample
            is replaced by another). For `UnitPoissonGaussian`, read "one unit" for "one sample".
    """

    relation: str = ADD_REMOVE

    sampler: ClassVar[str]
    relations: ClassVar[tuple[str, ...]] = RELATIONS

    def __post_init__(self) -> None:
        _validate.one_of(relation=(self.relation, RELATIONS))
        if self.relation not in self.relations:
            raise ValueError(
                f"relation={self.relation!r}: {type(self).__name__} has no guarantee for it; "
                f"pass one of {', '.join(map(repr, self.relations))}"
            )

    def convert(self: _Event, relation: str) -> _Event:
        """Return the same event under another relation.

        Raises:
            ValueError: this kind of event has no guarantee under that relation.
        """
        return replace(self, relation=relation)

    @abstractmethod
    def pairs(self) -> list[tuple[Pair, int]]:
        """Return the dominating pairs, each with the number of times that it is composed."""

    def failure(self) -> float:
        """Bound the probability that the mechanism differs from that described by `pairs`."""
        return 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the event as plain values, for `event_from_dict`."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"event": type(self).__name__, **own}

    def _sensitivity(self) -> float:
        """Return the largest change of a sum between neighbors, divided by a sample's bound."""
        return 2.0 if self.relation == REPLACE_ONE else 1.0


@dataclass(frozen=True, kw_only=True)
class Gaussian(Event):
    """A sum over the whole dataset, with Gaussian noise.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by the bound of one sample, >= 0.
    """

    noise_multiplier: float
    sampler: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.non_negative(noise_multiplier=self.noise_multiplier)

    def pairs(self) -> list[tuple[Pair, int]]:
        return [(Pair(self.noise_multiplier / self._sensitivity(), 1.0), 1)]


@dataclass(frozen=True, kw_only=True)
class ShuffledGaussian(Gaussian):
    """An epoch of disjoint batches, whose sums are released with Gaussian noise.

    The order of the data may be public. A sample is in one batch of the epoch and does not affect
    the other batches, so the epoch costs one Gaussian. No amplification is claimed.

    Attributes:
        noise_multiplier: the least noise multiplier of the epoch's steps, >= 0.
    """

    relation: str = ZERO_OUT
    sampler: ClassVar[str] = "shuffled"
    relations: ClassVar[tuple[str, ...]] = (ZERO_OUT, REPLACE_ONE)


@dataclass(frozen=True, kw_only=True)
class PoissonGaussian(Event):
    """A sum over a Poisson batch, which each sample enters independently, with Gaussian noise.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by the bound of one sample, >= 0.
        sample_rate: the probability that a sample is in a batch, in [0, 1].
    """

    noise_multiplier: float
    sample_rate: float
    sampler: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.non_negative(noise_multiplier=self.noise_multiplier)
        _validate.rate(sample_rate=self.sample_rate)

    def pairs(self) -> list[tuple[Pair, int]]:
        if self.sample_rate == 0:
            return []
        noise = self.noise_multiplier / self._sensitivity()
        return [(Pair(noise, self.sample_rate, self.relation == REPLACE_ONE), 1)]


@dataclass(frozen=True, kw_only=True)
class UnitPoissonGaussian(PoissonGaussian):
    """A `PoissonGaussian` on the data of units, such as users, with several examples each.

    Each example enters the batch independently and is clipped separately (example-level sampling).
    The guarantee is for a unit: all of its examples, at most `examples_per_unit`, are added,
    removed or zeroed together. The guarantee does not depend on the units' numbers of examples.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by the bound of one example, >= 0.
        sample_rate: the probability that an example is in a batch, in [0, 1].
        examples_per_unit: k >= 1, the largest number of examples of one unit. With 1 the event
            costs the same as `PoissonGaussian`.

    Guarantees:
        Let P be the mixture sum over j of Binom(k, sample_rate)(j) * N(j, noise_multiplier^2), and
        Q = N(0, noise_multiplier^2). The pair dominates one step's sum on any two neighbors, in
        both directions, and is attained. Proof: let J be the number of the unit's drawn examples,
        and V their contribution divided by the bound, so |V| <= J. Under Q, P / Q is a sum of
        lognormals, one for each value of V. So E (P / Q - alpha)_+ is greatest if all V point in
        one direction (comonotone terms have the greatest sum in convex order). Then P / Q > alpha
        on a half-line of outputs, whose probability increases with V. A unit of fewer examples has
        a stochastically smaller J.

    Source:
        Mixture of Gaussians mechanisms: Choquette-Choo, Ganesh, Steinke, Thakurta 2024 (arXiv
        2310.15526). With the binomial, for groups: Ganesh 2024 (arXiv 2401.10294); for users, as
        DP-SGD-ELS: Charles et al. 2024 (arXiv 2407.07737).
    """

    examples_per_unit: int
    relations: ClassVar[tuple[str, ...]] = (ADD_REMOVE, ZERO_OUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.whole(1, examples_per_unit=self.examples_per_unit)
        if self.examples_per_unit > _MOST_EXAMPLES:
            raise ValueError(
                f"examples_per_unit={self.examples_per_unit!r}: expected at most {_MOST_EXAMPLES};"
                " pass a smaller bound and drop further examples, or sample units, not examples"
            )

    def pairs(self) -> list[tuple[Pair, int]]:
        if self.sample_rate == 0:
            return []
        pair = Pair(self.noise_multiplier, self.sample_rate, examples=self.examples_per_unit)
        return [(pair, 1)]


@dataclass(frozen=True, kw_only=True)
class TruncatedPoissonGaussian(PoissonGaussian):
    """A Poisson batch of which at most `max_batch_size` samples are used, chosen by any rule.

    Attributes:
        max_batch_size: the largest number of samples that a step uses, >= 1.
        num_samples: the size of the dataset, >= 1.

    Guarantees:
        A step differs from a Poisson step with probability <= `failure()`, see `with_failure`.
    """

    max_batch_size: int
    num_samples: int
    sampler: ClassVar[str] = "truncated_poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.whole(1, max_batch_size=self.max_batch_size, num_samples=self.num_samples)

    def failure(self) -> float:
        return truncation_probability(self.num_samples, self.sample_rate, self.max_batch_size)


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonGaussian(PoissonGaussian):
    """A round of cyclic Poisson sampling with banded noise: one batch from each part, in turn.

    The dataset is divided into `bands` parts, at random or by a rule. Each sample independently
    enters the batch of its part. Rounds compose. A shorter last round costs no more.

    Attributes:
        noise_multiplier: the standard deviation of z / (norm of a column of C * bound), >= 0. For
            the noise z and the matrix C see `dpflash.noise.Banded`.
        sample_rate: the probability that a sample is in the batch of its part, in [0, 1].
        bands: b >= 1, the number of parts and of batches in a round.

    Guarantees:
        A round costs the same as a `PoissonGaussian` with this noise multiplier and sample rate.

    Source:
        Choquette-Choo et al. 2023 (arXiv 2306.08153), Theorem 4.
    """

    bands: int
    sampler: ClassVar[str] = "cyclic_poisson"

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.whole(1, bands=self.bands)


@dataclass(frozen=True, kw_only=True)
class RandomAllocationGaussian(Event):
    """A run of T sums with Gaussian noise, in which each sample takes part in k steps.

    The steps are divided into k blocks of consecutive steps, whose lengths differ by at most one.
    In each block a sample is in one step, which is chosen uniformly at random and independently of
    the other samples and blocks, and stays secret. With k = 1 a sample is in one random step of
    the run ("balls in bins", "balanced iteration"). Compose one event for each of several epochs.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by the bound of one sample, >= 0.
        steps: T >= 1, the number of steps of the run.
        participations: k, the number of steps that a sample takes part in, 1 <= k <= steps.

    Guarantees:
        Let a block have n steps. The pair (1/n) sum over t of N(e_t, noise_multiplier^2 I) against
        N(0, noise_multiplier^2 I), in n dimensions, dominates the block in both directions and is
        attained. The sample changes only its own step's sum, by at most one bound, and the change
        may depend on earlier outputs. So the block's sums can be computed step by step from one
        output of the pair: scale each coordinate by the change, and add noise. Blocks are
        independent, so their pairs compose. The bound also holds for the sampler that draws k of
        all T steps uniformly, without blocks. Equivalently, that sampler divides the steps at
        random into k sets of the blocks' lengths, and draws one step from each set. Even if this
        division is published, the sets cost the same as the blocks.

    Source:
        Feldman and Shenfeld 2025, Privacy amplification by random allocation (arXiv 2502.08202);
        2026, Efficient privacy loss accounting for subsampling and random allocation (arXiv
        2602.17284). Balls in bins: Chua et al. 2024 (arXiv 2412.16802).
    """

    noise_multiplier: float
    steps: int
    participations: int = 1
    sampler: ClassVar[str] = "random_allocation"
    relations: ClassVar[tuple[str, ...]] = (ADD_REMOVE, ZERO_OUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.non_negative(noise_multiplier=self.noise_multiplier)
        _validate.whole(1, steps=self.steps, participations=self.participations)
        if self.participations > self.steps:
            raise ValueError(
                f"participations={self.participations!r}: expected at most steps={self.steps!r}; "
                "pass fewer participations or more steps"
            )
        if self.steps > _LONGEST_BLOCK * self.participations:
            raise ValueError(
                f"steps={self.steps!r}: expected blocks of at most {_LONGEST_BLOCK} steps; pass "
                "more participations, or divide the run into several events"
            )

    def pairs(self) -> list[tuple[Pair, int]]:
        length, longer = divmod(self.steps, self.participations)
        counts = [(length, self.participations - longer), (length + 1, longer)]
        return [
            (Pair(self.noise_multiplier, 1 / steps, steps=steps), count)
            for steps, count in counts
            if count
        ]


@dataclass(frozen=True, kw_only=True)
class FixedSizeGaussian(Event):
    """A sum over a batch of fixed size, drawn without replacement, with Gaussian noise.

    Under both of its relations the event is charged as if one sample were replaced by another, so
    that the sum may change by twice the bound. Under "zero_out" this is only an upper bound.

    Attributes:
        noise_multiplier: the noise's standard deviation divided by the bound of one sample, >= 0.
        batch_size: the number of samples in a batch, 1 <= batch_size <= num_samples.
        num_samples: the size of the dataset.

    Source:
        Balle, Barthe, Gaboardi 2018, Theorem 11; see `Pair`.
    """

    relation: str = REPLACE_ONE
    noise_multiplier: float
    batch_size: int
    num_samples: int
    sampler: ClassVar[str] = "fixed_size"
    relations: ClassVar[tuple[str, ...]] = (REPLACE_ONE, ZERO_OUT)

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.non_negative(noise_multiplier=self.noise_multiplier)
        _validate.whole(1, batch_size=self.batch_size, num_samples=self.num_samples)
        if self.batch_size > self.num_samples:
            raise ValueError(
                f"batch_size={self.batch_size!r}: expected at most num_samples="
                f"{self.num_samples!r}; pass a smaller batch"
            )

    def pairs(self) -> list[tuple[Pair, int]]:
        return [(Pair(self.noise_multiplier / 2, self.batch_size / self.num_samples, True), 1)]


@dataclass(frozen=True, kw_only=True)
class SelfComposed(Event):
    """The composition of one event with itself.

    Attributes:
        event: an event under the same relation.
        count: the number of times that the event is composed, >= 0.
    """

    event: Event
    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.whole(0, count=self.count)
        _same_relation(self.relation, [self.event])

    @property
    def sampler(self) -> str:  # type: ignore[override]
        return self.event.sampler

    def convert(self, relation: str) -> SelfComposed:
        return replace(self, event=self.event.convert(relation), relation=relation)

    def pairs(self) -> list[tuple[Pair, int]]:
        return [(pair, times * self.count) for pair, times in self.event.pairs()]

    def failure(self) -> float:
        return self.event.failure() * self.count

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "event": "SelfComposed", "of": self.event.as_dict()}


@dataclass(frozen=True, kw_only=True)
class Composed(Event):
    """Several events on the same data. Each may depend on the results of earlier events.

    Attributes:
        events: events under the same relation.
    """

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "events", tuple(self.events))
        _same_relation(self.relation, self.events)

    @property
    def sampler(self) -> str:  # type: ignore[override]
        return ", ".join(sorted({event.sampler for event in self.events}))

    def convert(self, relation: str) -> Composed:
        converted = tuple(event.convert(relation) for event in self.events)
        return replace(self, events=converted, relation=relation)

    def pairs(self) -> list[tuple[Pair, int]]:
        return [pair for event in self.events for pair in event.pairs()]

    def failure(self) -> float:
        return math.fsum(event.failure() for event in self.events)

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "events": [event.as_dict() for event in self.events]}


_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        Gaussian,
        ShuffledGaussian,
        PoissonGaussian,
        UnitPoissonGaussian,
        TruncatedPoissonGaussian,
        CyclicPoissonGaussian,
        RandomAllocationGaussian,
        FixedSizeGaussian,
        SelfComposed,
        Composed,
    )
}


def event_from_dict(values: Mapping[str, Any]) -> Event:
    """Return the event whose `as_dict` returned these values.

    Raises:
        ValueError: the values do not describe an event.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"event={values!r}: expected a mapping; pass the result of as_dict()")
    arguments = dict(values)
    name = arguments.pop("event", None)
    if name not in _KINDS:
        raise ValueError(f"event={name!r}: expected one of {', '.join(map(repr, _KINDS))}")
    try:
        if name == "SelfComposed":
            arguments["event"] = event_from_dict(arguments.pop("of"))
        if name == "Composed":
            arguments["events"] = tuple(event_from_dict(event) for event in arguments["events"])
        return _KINDS[name](**arguments)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name} cannot be made of {sorted(arguments)}: {error}") from error


def joint_noise_multiplier(noise_multipliers: Sequence[float]) -> float:
    """Return one noise multiplier for groups of coordinates with separate clipping and noise.

    Args:
        noise_multipliers: for each group, the noise's standard deviation divided by the bound.

    Returns:
        (sum of 1 / noise_multiplier^2)^(-1/2): with this noise multiplier, all groups of one batch
        together are one Gaussian mechanism.

    Raises:
        ValueError: there is no group, or a value is negative or not a number.
    """
    if not len(noise_multipliers):
        raise ValueError("noise_multipliers=[]: expected one number per group; pass at least one")
    for noise_multiplier in noise_multipliers:
        _validate.non_negative(noise_multiplier=noise_multiplier)
    least = min(noise_multipliers)
    if least == 0 or least == math.inf:
        return float(least)
    # Dividing by the least multiplier keeps all squares within float64's range.
    return float(least / math.sqrt(math.fsum((least / s) ** 2 for s in noise_multipliers)))


def truncation_probability(num_samples: int, sample_rate: float, cap: int) -> float:
    """Bound the probability that one Poisson batch exceeds the cap.

    Args:
        num_samples: number of samples n in the dataset, >= 1.
        sample_rate: the probability that a sample is in a batch, in [0, 1].
        cap: the largest batch that is not truncated, in samples, >= 1.

    Returns:
        P[Binomial(n, sample_rate) + 1 > cap]. For T steps multiply it by T.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        The result bounds the probability of a truncation for this dataset and for every neighbor
        with one sample more or less: a neighbor's batch has at most one sample that is not among
        the n samples of this dataset.
    """
    _validate.whole(1, num_samples=num_samples, cap=cap)
    _validate.rate(sample_rate=sample_rate)
    if cap > num_samples:
        return 0.0
    # P[Binomial(n, p) >= k] = I_p(k, n - k + 1).
    return float(betainc(cap, num_samples - cap + 1, sample_rate))


def _same_relation(relation: str, events: Sequence[Event]) -> None:
    for event in events:
        if event.relation != relation:
            raise ValueError(
                f"relation={relation!r}: an event has relation={event.relation!r}, so there is no "
                f"common guarantee; convert the event, event.convert({relation!r})"
            )
