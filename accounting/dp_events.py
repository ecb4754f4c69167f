"""Converts events and histories to and from the DpEvents of Google's dp_accounting.

dp_accounting need not be installed. A DpEvent has no neighboring relation; dp_accounting's
accountants have one, and interpret a noise_multiplier accordingly. If one sample is added, removed
or zeroed, a sum changes by at most one bound, and all interpretations agree. If one sample is
replaced, a sum may change by two bounds, and there are two interpretations. GaussianDpEvent's
documentation, PLDAccountant and TruncatedSubsampledGaussianDpEvent divide the noise by the bound
of one sample ("bound", as this library does). RdpAccountant divides it by the sensitivity, twice
the bound ("sensitivity"). Only RdpAccountant supports SampledWithoutReplacementDpEvent.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from . import _validate
from .accountant import Accountant
from .events import (
    ADD_REMOVE,
    RELATIONS,
    REPLACE_ONE,
    Composed,
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    SelfComposed,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    UnitPoissonGaussian,
    joint_noise_multiplier,
)

_READINGS = ("bound", "sensitivity")
_SAME_PROBABILITY = 1e-9  # relative tolerance of the binomial probabilities that are read


def to_dp_event(
    source: Event | Accountant,
    *,
    noise_relative_to: str | None = None,
    shuffled_as_gaussian: bool = False,
) -> Any:
    """Convert an event, or an accountant's whole history, to a DpEvent of dp_accounting.

    Args:
        source: an event, or an accountant, whose steps become PoissonSampledDpEvents.
        noise_relative_to: the interpretation of noise_multipliers if a sample is replaced:
            "bound" for dp_accounting's PLDAccountant, "sensitivity" for its RdpAccountant.
            Required for "replace_one" and for batches of fixed size, otherwise without effect.
        shuffled_as_gaussian: whether to convert a `ShuffledGaussian`, which has no DpEvent, to
            one GaussianDpEvent, which costs the same as the epoch.

    Returns:
        A `dp_accounting.DpEvent`, for an accountant of the same neighboring relation:
        ADD_OR_REMOVE_ONE for "add_remove", REPLACE_SPECIAL for "zero_out", REPLACE_ONE for
        "replace_one". For batches of fixed size, RdpAccountant supports only REPLACE_ONE, which
        costs the same as REPLACE_SPECIAL.

    Raises:
        ValueError: source is neither an event nor an accountant, or an argument is missing.
        ImportError: dp_accounting is not installed.
    """
    theirs = _dp_accounting()
    if noise_relative_to is not None:
        _validate.one_of(noise_relative_to=(noise_relative_to, _READINGS))
    writer = _Writer(theirs, noise_relative_to, shuffled_as_gaussian)
    if isinstance(source, Accountant):
        return theirs.ComposedDpEvent(
            [
                theirs.SelfComposedDpEvent(writer.write(event), count)
                for event, count in source._releases()
            ]
        )
    if not isinstance(source, Event):
        raise ValueError(
            f"source={source!r}: expected an event or an accountant of dpflash.accounting; "
            "pass one of these"
        )
    return writer.write(source)


def from_dp_event(
    dp_event: Any,
    *,
    neighboring_relation: str = ADD_REMOVE,
    noise_relative_to: str | None = None,
) -> Event:
    """Convert a DpEvent of dp_accounting to an event for `Accountant.compose`.

    Args:
        dp_event: a Gaussian event (also with Poisson sampling, truncated Poisson sampling or
            sampling without replacement); a mixture of Gaussians with the sensitivities 0, ..., k
            and binomial probabilities; or a composition of such events. A NoOpDpEvent becomes an
            empty composition, and a NonPrivateDpEvent a Gaussian without noise.
        neighboring_relation: the relation of the returned event.
        noise_relative_to: the interpretation of dp_event's noise_multipliers, "bound" or
            "sensitivity", see `to_dp_event`. Required under the same conditions.

    Returns:
        The event. Several Gaussians on one Poisson batch become one, at exactly the same cost.

    Raises:
        ValueError: an event has no counterpart under neighboring_relation, or noise_relative_to
            is missing.
        ImportError: dp_accounting is not installed.
    """
    theirs = _dp_accounting()
    _validate.one_of(neighboring_relation=(neighboring_relation, RELATIONS))
    if noise_relative_to is not None:
        _validate.one_of(noise_relative_to=(noise_relative_to, _READINGS))
    if not isinstance(dp_event, theirs.DpEvent):
        raise ValueError(
            f"dp_event={dp_event!r}: expected a dp_accounting.DpEvent; "
            "pass the result of to_dp_event or of an accountant's ledger"
        )
    return _Reader(theirs, neighboring_relation, noise_relative_to).read(dp_event)


class _Writer:
    def __init__(self, theirs: ModuleType, reading: str | None, shuffled: bool) -> None:
        self.theirs, self.reading, self.shuffled = theirs, reading, shuffled

    def write(self, event: Event) -> Any:
        theirs, kind = self.theirs, type(event)
        if isinstance(event, SelfComposed):
            return theirs.SelfComposedDpEvent(self.write(event.event), event.count)
        if isinstance(event, Composed):
            return theirs.ComposedDpEvent([self.write(part) for part in event.events])
        if kind is ShuffledGaussian and not self.shuffled:
            raise ValueError(
                f"event={event!r}: dp_accounting has no event for a shuffled epoch; pass "
                "shuffled_as_gaussian=True to convert the epoch to one Gaussian of equal cost"
            )
        if isinstance(event, Gaussian):
            return self._gaussian(event.noise_multiplier, event.relation == REPLACE_ONE)
        if isinstance(event, TruncatedPoissonGaussian):
            _check_not_sensitivity(event.relation == REPLACE_ONE and self.reading == "sensitivity")
            return _class(theirs, "TruncatedSubsampledGaussianDpEvent")(
                dataset_size=event.num_samples,
                sampling_probability=event.sample_rate,
                truncated_batch_size=event.max_batch_size,
                noise_multiplier=event.noise_multiplier,
            )
        if isinstance(event, UnitPoissonGaussian):
            counts = range(event.examples_per_unit + 1)
            probabilities = _binomial(event.sample_rate, event.examples_per_unit)
            return _class(theirs.dp_event, "MixtureOfGaussiansDpEvent")(
                event.noise_multiplier, [float(j) for j in counts], probabilities
            )
        if isinstance(event, PoissonGaussian) and kind is not CyclicPoissonGaussian:
            inner = self._gaussian(event.noise_multiplier, event.relation == REPLACE_ONE)
            return theirs.PoissonSampledDpEvent(event.sample_rate, inner)
        if isinstance(event, FixedSizeGaussian):
            inner = self._gaussian(event.noise_multiplier, True)
            return theirs.SampledWithoutReplacementDpEvent(
                event.num_samples, event.batch_size, inner
            )
        raise ValueError(
            f"event={event!r}: {kind.__name__} has no DpEvent; account for it with dpflash"
        )

    def _gaussian(self, noise_multiplier: float, replaced: bool) -> Any:
        return self.theirs.GaussianDpEvent(noise_multiplier / _sensitivity(self.reading, replaced))


class _Reader:
    def __init__(self, theirs: ModuleType, relation: str, reading: str | None) -> None:
        self.theirs, self.relation, self.reading = theirs, relation, reading

    def read(self, given: Any) -> Event:
        relation, replaced = self.relation, self.relation == REPLACE_ONE
        name = type(given).__name__
        # Compare exact types: the meaning of a subclass is unknown.
        if type(given) is not getattr(self.theirs.dp_event, name, None):
            raise _unknown(given)
        if name == "NoOpDpEvent":
            return Composed(relation=relation, events=())
        if name == "NonPrivateDpEvent":
            return Gaussian(relation=relation, noise_multiplier=0.0)
        if name == "SelfComposedDpEvent":
            inner = self.read(given.event)
            return SelfComposed(relation=relation, event=inner, count=given.count)
        if name == "ComposedDpEvent":
            events = tuple(self.read(part) for part in given.events)
            return Composed(relation=relation, events=events)
        if name == "GaussianDpEvent":
            return Gaussian(relation=relation, noise_multiplier=self._noise(given, replaced))
        if name == "PoissonSampledDpEvent":
            return PoissonGaussian(
                relation=relation,
                noise_multiplier=self._noise(given.event, replaced),
                sample_rate=given.sampling_probability,
            )
        if name == "SampledWithoutReplacementDpEvent":
            return FixedSizeGaussian(
                relation=relation,
                noise_multiplier=self._noise(given.event, True),
                batch_size=given.sample_size,
                num_samples=given.source_dataset_size,
            )
        if name == "MixtureOfGaussiansDpEvent":
            return self._mixture(given)
        if name == "TruncatedSubsampledGaussianDpEvent":
            _check_not_sensitivity(replaced and self.reading == "sensitivity")
            return TruncatedPoissonGaussian(
                relation=relation,
                noise_multiplier=given.noise_multiplier,
                sample_rate=given.sampling_probability,
                max_batch_size=given.truncated_batch_size,
                num_samples=given.dataset_size,
            )
        raise _unknown(given)

    def _mixture(self, given: Any) -> Event:
        """Convert a mixture over a unit's number of drawn examples to `UnitPoissonGaussian`."""
        examples = len(given.sensitivities) - 1
        if examples < 1 or list(given.sensitivities) != list(range(examples + 1)):
            raise _unknown(given, f" with the sensitivities {list(given.sensitivities)!r}")
        found = [float(p) for p in given.sampling_probs]
        rate = math.fsum(j * p for j, p in enumerate(found)) / examples
        expected = _binomial(rate, examples) if 0 <= rate <= 1 else []
        if len(found) != len(expected) or not all(
            math.isclose(p, e, rel_tol=_SAME_PROBABILITY)
            for p, e in zip(found, expected, strict=True)
        ):
            raise _unknown(given, " with probabilities that are not binomial")
        return UnitPoissonGaussian(
            relation=self.relation,
            noise_multiplier=given.standard_deviation,
            sample_rate=rate,
            examples_per_unit=examples,
        )

    def _noise(self, given: Any, replaced: bool) -> float:
        """Return the joint noise multiplier of Gaussians on one batch, relative to the bound."""
        return _joint(self.theirs, given) * _sensitivity(self.reading, replaced)


def _binomial(rate: float, count: int) -> list[float]:
    return [math.comb(count, j) * rate**j * (1 - rate) ** (count - j) for j in range(count + 1)]


def _joint(theirs: ModuleType, given: Any) -> float:
    kind = type(given)
    if kind is theirs.GaussianDpEvent:
        return float(given.noise_multiplier)
    if kind is theirs.SelfComposedDpEvent:
        _validate.whole(0, count=given.count)
        inner = _joint(theirs, given.event)
        return inner / math.sqrt(given.count) if given.count else math.inf
    if kind is theirs.ComposedDpEvent and given.events:
        return joint_noise_multiplier([_joint(theirs, part) for part in given.events])
    if kind in (theirs.ComposedDpEvent, theirs.NoOpDpEvent):
        return math.inf
    raise _unknown(given, " on a sampled batch")


def _sensitivity(reading: str | None, replaced: bool) -> float:
    """Return the divisor that converts dpflash's noise multiplier to dp_accounting's."""
    if not replaced:
        return 1.0
    if reading is None:
        raise ValueError(
            "noise_relative_to=None: if a sample is replaced, dp_accounting's accountants define "
            "noise_multiplier differently; pass 'bound' (noise divided by one sample's bound: "
            "PLDAccountant) or 'sensitivity' (noise divided by twice the bound: RdpAccountant)"
        )
    return 2.0 if reading == "sensitivity" else 1.0


def _check_not_sensitivity(refused: bool) -> None:
    if refused:
        raise ValueError(
            "noise_relative_to='sensitivity': TruncatedSubsampledGaussianDpEvent's noise is "
            "relative to one sample's bound, and RdpAccountant does not support it; pass 'bound'"
        )


def _unknown(given: Any, where: str = "") -> ValueError:
    kind = type(given)
    return ValueError(
        f"dp_event of {kind.__module__}.{kind.__name__}{where} has no counterpart in "
        "dpflash.accounting; leave it out, or account for it with dp_accounting"
    )


def _class(theirs: ModuleType, name: str) -> Any:
    if not hasattr(theirs, name):
        raise ImportError(
            f"the installed dp_accounting has no {name}; install dp-accounting 0.6 or newer"
        )
    return getattr(theirs, name)


def _dp_accounting() -> ModuleType:
    try:
        import dp_accounting
    except ImportError as error:
        raise ImportError(
            "DpEvents need Google's dp_accounting, which is not installed; "
            "install it with pip install dp-accounting"
        ) from error
    module: ModuleType = dp_accounting
    return module
