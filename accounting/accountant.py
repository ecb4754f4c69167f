"""The base class of all accountants: a history of noisy steps, and its epsilon and delta."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, TypeVar

from . import _validate
from .events import ADD_REMOVE, RELATIONS, Event, PoissonGaussian, event_from_dict
from .pairs import Pair, Pairs, canonical

Phase = tuple[float, float, int]  # noise_multiplier, sample_rate, steps
_T = TypeVar("_T")

_APPEND = (
    "Append each release of other code to the ledger before it is made: dpflash.privacy.ledger."
    "Ledger(FILE).append(run='a name', event=..., accountant='contour', unit='sample'), with the "
    "unit of the ledger's other lines, such as 'user: patient'"
)
_BY_NAME = (
    "Pass the name of an accountant: the engine then counts all releases of its ledger. Give the "
    f"same ledger to all engines whose releases are counted together. {_APPEND}"
)
_ROUNDS = 64
_FIRST_SLACK = 1e-9


class Interval(NamedTuple):
    """Certified lower and upper bound of a value; the lower bound is None if it is unknown."""

    lower: float | None
    upper: float


class _Held(list[_T]):
    """A list of an engine's releases that a caller cannot change in place."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "the history of a PrivacyEngine's accountant cannot be changed in place: call "
            "accountant.step(noise_multiplier=..., sample_rate=...), or assign a longer history, "
            "accountant.history += [...]"
        )

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __imul__ = _refuse
    __iadd__ = list.__add__  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)


class Accountant(ABC):
    """A history of noisy steps, and their total privacy cost.

    Methods, `history` and the state's keys match Opacus' IAccountant. So Opacus' engines can use
    this class, and this library's engines can use Opacus' accountants. `registry.ACCOUNTANTS` maps
    names to subclasses.

    Args:
        neighboring_relation: relation of the reported epsilon, "add_remove", "zero_out" or
            "replace_one".

    Attributes:
        history: the steps with Poisson sampling, in order; one (noise_multiplier, sample_rate,
            steps) for each phase of equal steps. It may be assigned, and is checked when epsilon
            or delta is computed. The history of an engine's accountant may only grow, see `hold`.
        events: (event, count) of the events that `compose` recorded.
        is_bound: whether the reported epsilon is an upper bound.

    Guarantees:
        Steps of the history are Poisson-subsampled Gaussian mechanisms: each sample enters each
        batch independently with probability sample_rate, and the noise's standard deviation is
        noise_multiplier times the L2 bound of one sample. Events define their own mechanism.
    """

    is_bound = True
    _name: ClassVar[str]

    def __init__(self, *, neighboring_relation: str = ADD_REMOVE) -> None:
        _validate.one_of(neighboring_relation=(neighboring_relation, RELATIONS))
        self.neighboring_relation = neighboring_relation
        self._is_held = False
        self._ledger: str | None = None  # its path; it has all counted releases
        self.unit: str | None = None  # the privacy unit of the engines that use this accountant
        self._history: list[Phase] = []
        self._events: list[tuple[Event, int]] = []

    @property
    def history(self) -> list[Phase]:
        return _Held(self._history) if self._is_held else self._history

    @history.setter
    def history(self, phases: list[Phase]) -> None:
        if self._is_held:
            self._require_no_ledger()
            phases = self._checked(phases)
            self._require_all("history", phases, self._events)
        self._history = phases

    @property
    def events(self) -> list[tuple[Event, int]]:
        return _Held(self._events) if self._is_held else self._events

    @events.setter
    def events(self, events: list[tuple[Event, int]]) -> None:
        if self._is_held:
            self._require_no_ledger()
            events = list(events)
            self._require_all("events", self._history, events)
        self._events = events

    def hold(self, *, ledger: str | None = None) -> None:
        """From now on, refuse to load or assign a history without all releases counted so far.

        An engine calls this method. With a ledger, releases can be added only within `counting`,
        and no other engine may use this accountant, because the other engine's releases would be
        missing from the ledger. Copies of the accountant have no such limits.

        Raises:
            ValueError: this ledger, or the ledger of an earlier engine, would lack releases.
        """
        name = self.mechanism()
        if self._is_held and (ledger, self._ledger) != (None, None):
            raise ValueError(
                f"accountant={name!r}: an engine with ledger={self._ledger!r} already uses this "
                f"object, and this engine has ledger={ledger!r}. If an engine has a ledger, no "
                f"other engine may use its accountant object. {_BY_NAME}"
            )
        if ledger is not None and (self._history or self._events):
            raise ValueError(
                f"accountant={name!r} has already counted releases, and ledger={ledger!r} may not "
                f"contain them: a later engine on it would report too small an epsilon. {_BY_NAME}"
            )
        self._is_held, self._ledger = True, ledger
        # The caller may have kept the lists, and could change them.
        self._history, self._events = list(self._history), list(self._events)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Context manager that allows adding releases; the ledger must already have them."""
        before, self._ledger = self._ledger, None
        try:
            yield
        finally:
            self._ledger = before

    @contextmanager
    def taken_back(self) -> Iterator[None]:
        """Context manager: an error in its block empties the history and undoes `hold`."""
        before = {**vars(self), "_is_held": False, "_ledger": None, "_history": [], "_events": []}
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    def _require_no_ledger(self) -> None:
        if self._ledger is not None:
            raise ValueError(
                "the accountant of a PrivacyEngine with a ledger counts the ledger's releases, "
                "and the next engine on that ledger would not know of this release. The engine "
                f"counts its own steps. {_APPEND}"
            )

    def for_trial(self) -> Self:
        """Return a copy to try steps on: they do not change this accountant."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickled accountants are not held, and have lists of their own.
        own = {"_history": list(self._history), "_events": list(self._events)}
        return {**vars(self), **own, "_is_held": False, "_ledger": None}

    def _require_all(
        self,
        name: str,
        phases: Iterable[Phase],
        events: Iterable[tuple[Event, int]],
        relation: str | None = None,
    ) -> None:
        """Refuse phases and events that lack releases that were counted so far."""
        given = _counts(phases, events)
        own = [(e.convert(relation or e.relation), count) for e, count in self._events]
        if any(given[key] < count for key, count in _counts(self._history, own).items()):
            raise ValueError(
                f"{name} lacks releases that this accountant of a PrivacyEngine has counted. "
                "Without them epsilon would be too small, even if the model is reset to earlier "
                "weights. To get epsilon of an earlier state, load it into a new accountant; to "
                "resume a run, load the run's checkpoint in a new engine, before any release"
            )

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Record one step in the history.

        Args:
            noise_multiplier: the noise's standard deviation divided by the bound, >= 0.
            sample_rate: the probability that a sample is in a batch, in [0, 1].

        Raises:
            ValueError: an argument is out of its range, or the accountant belongs to an engine
                with a ledger.
        """
        self._require_no_ledger()
        _validate.non_negative(noise_multiplier=noise_multiplier)
        _validate.rate(sample_rate=sample_rate)
        steps, history = 0, self._history
        if history and tuple(history[-1][:2]) == (noise_multiplier, sample_rate):
            steps = history.pop()[2]
        history.append((noise_multiplier, sample_rate, steps + 1))

    def compose(self, event: Event, count: int = 1) -> None:
        """Record an event of any kind, `count` times.

        Args:
            event: an event whose relation is this accountant's neighboring relation.
            count: >= 0.

        Raises:
            ValueError: the event has another relation (convert it first), or the accountant
                belongs to an engine with a ledger.
        """
        self._require_no_ledger()
        if not isinstance(event, Event):
            raise ValueError(
                f"event={event!r}: expected one of dpflash.accounting's events, such as "
                "PoissonGaussian(noise_multiplier=..., sample_rate=...)"
            )
        _validate.whole(0, count=count)
        if event.relation != self.neighboring_relation:
            remedy = f"make the accountant with neighboring_relation={event.relation!r}"
            if self.neighboring_relation in event.relations:
                remedy = f"compose event.convert({self.neighboring_relation!r}), or {remedy}"
            raise ValueError(
                f"event.relation={event.relation!r}: this accountant's epsilon is for "
                f"{self.neighboring_relation!r}; {remedy}"
            )
        if self._events and self._events[-1][0] == event:
            count += self._events.pop()[1]
        self._events.append((event, count))

    def convert(self, neighboring_relation: str) -> None:
        """Change the neighboring relation of the whole history.

        Raises:
            ValueError: an event has no guarantee under the new relation. Nothing is changed.
        """
        _validate.one_of(neighboring_relation=(neighboring_relation, RELATIONS))
        self._events = [(event.convert(neighboring_relation), n) for event, n in self._events]
        self.neighboring_relation = neighboring_relation

    def __getattr__(self, name: str) -> Any:
        if name == "get_privacy_spent":  # a method of earlier versions of Opacus
            raise AttributeError(
                f"{type(self).__name__}.get_privacy_spent: call get_epsilon(delta), which returns "
                "epsilon alone"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def get_epsilon(self, delta: float, interval: bool = False, **unknown: Any) -> Any:
        """Compute epsilon of the whole history at this delta.

        Args:
            delta: in (0, 1).
            interval: whether to return a lower bound too.

        Returns:
            A float >= 0 for which the history is (epsilon, delta)-private, inf if no such epsilon
            is known; with `interval` an `Interval(lower, upper)`.

        Raises:
            ValueError: delta is out of its range, or the history is malformed.
        """
        if unknown:
            raise TypeError(
                f"get_epsilon has no argument {next(iter(unknown))!r}: {type(self).__name__} "
                "chooses orders and precision itself; write get_epsilon(delta)"
            )
        _validate.probability(delta=delta)
        found = self._epsilon_interval(float(delta))
        return found if interval else found.upper

    def get_delta(self, epsilon: float, interval: bool = False) -> Any:
        """Compute delta of the whole history at this epsilon.

        Args:
            epsilon: >= 0, finite.
            interval: whether to return a lower bound too.

        Returns:
            A float in [0, 1] for which the history is (epsilon, delta)-private; with `interval`
            an `Interval(lower, upper)`.

        Raises:
            ValueError: epsilon is out of its range, or the history is malformed.
        """
        _validate.finite_non_negative(epsilon=epsilon)
        found = self._delta_interval(float(epsilon))
        return found if interval else found.upper

    def get_beta(self, alpha: float) -> float:
        """Bound the type II error of a test from its type I error alpha (f-DP trade-off curve).

        A test guesses from the outputs which of two neighboring datasets was used. If its
        error probability is at most alpha on the first dataset, its error probability on the
        second dataset is at least the returned value.

        Args:
            alpha: in [0, 1].

        Returns:
            The greatest lower bound that this accountant's deltas imply, in [0, 1 - alpha].

        Raises:
            ValueError: alpha is out of its range, or the history is malformed.

        Source:
            Dong, Roth, Su 2022, Proposition 2.5 (Wasserman and Zhou 2010):
            beta is the maximum, over all epsilon, of the two bounds 1 - delta - e^epsilon * alpha
            and e^-epsilon * (1 - delta - alpha). Any epsilon gives valid bounds, so an inexact
            search is safe.
        """
        _validate.error_rate(alpha=alpha)

        def beta(epsilon: float) -> float:
            rest = 1 - self._delta_interval(epsilon).upper
            falling = math.exp(-epsilon) if epsilon < 700 else 0.0
            rising = math.exp(epsilon) if epsilon < 700 else math.inf
            steep = rest - rising * alpha if alpha else rest
            return max(0.0, steep, falling * (rest - alpha))

        if not self._pairs() and not self._failure():
            return 1.0 - alpha
        return min(1.0 - alpha, _maximum(beta, self._epsilon_interval(1e-12).upper))

    def get_advantage(self) -> float:
        """Bound the advantage of a membership inference attack.

        Returns:
            delta at epsilon 0, which is the total variation distance. For every attack, the true
            positive rate minus the false positive rate is at most delta, and the accuracy is at
            most (1 + delta) / 2.

        Source:
            Yeom et al. 2018, Definition 4; Kairouz, Oh, Viswanath 2015.
        """
        return self._delta_interval(0.0).upper

    @abstractmethod
    def _epsilon(self, pairs: Pairs, delta: float) -> Interval:
        """Compute epsilon of composed dominating pairs: one or more, with finite noise > 0."""

    @abstractmethod
    def _delta(self, pairs: Pairs, epsilon: float) -> Interval:
        """Compute delta of composed dominating pairs: one or more, with finite noise > 0."""

    def _epsilon_interval(self, delta: float) -> Interval:
        pairs, failure = self._pairs(), self._failure()
        if any(pair.noise == 0 for pair, _ in pairs):
            return Interval(math.inf, math.inf)
        if failure:
            return with_failure(
                failure,
                delta,
                lambda delta: self._epsilon_of(pairs, delta),
                lambda epsilon: self._delta_of(pairs, epsilon),
            )
        return self._epsilon_of(pairs, delta)

    def _delta_interval(self, epsilon: float) -> Interval:
        pairs, failure = self._pairs(), self._failure()
        if any(pair.noise == 0 for pair, _ in pairs):
            return Interval(1.0, 1.0)
        found = self._delta_of(pairs, epsilon)
        if not failure:
            return found
        cost = failure * (1 + math.exp(epsilon)) if epsilon < 700 else math.inf
        lower = None if found.lower is None else max(0.0, found.lower - cost)
        return Interval(lower, min(1.0, found.upper + cost))

    def _epsilon_of(self, pairs: Pairs, delta: float) -> Interval:
        return self._epsilon(pairs, delta) if pairs else Interval(0.0, 0.0)

    def _delta_of(self, pairs: Pairs, epsilon: float) -> Interval:
        return self._delta(pairs, epsilon) if pairs else Interval(0.0, 0.0)

    @classmethod
    def mechanism(cls) -> str:
        """Return the accountant's name in `create_accountant` and in saved states."""
        return cls._name

    def __len__(self) -> int:
        """Return the number of the history's phases, as in Opacus; a phase may have many steps."""
        return len(self.history)

    def get_optimizer_hook_fn(self, sample_rate: float) -> Callable[[Any], None]:
        """Return a step hook for Opacus' optimizers that records each step.

        Args:
            sample_rate: the probability that a sample is in one of the optimizer's batches.

        Returns:
            A function of an optimizer with `noise_multiplier` and `accumulated_iterations`.
        """

        def hook_fn(optim: Any) -> None:
            self.step(
                noise_multiplier=optim.noise_multiplier,
                sample_rate=sample_rate * optim.accumulated_iterations,
            )

        return hook_fn

    def state_dict(self) -> dict[str, Any]:
        """Return the history and the accountant's name under Opacus' keys.

        If there are events, or the relation is not "add_remove", the keys "steps", "events" and
        "neighboring_relation" replace "history". Opacus refuses such a state. If it had the key
        "history", Opacus would ignore its other keys and report too small an epsilon.
        """
        state: dict[str, Any] = {"mechanism": self.mechanism()}
        if not self.events and self.neighboring_relation == ADD_REMOVE:
            return {"history": list(self.history), **state}
        return {
            **state,
            "neighboring_relation": self.neighboring_relation,
            "steps": list(self.history),
            "events": [{"event": event.as_dict(), "count": count} for event, count in self.events],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the history by a saved one.

        Args:
            state_dict: a state that `state_dict` of this class returned, or `state_dict` of
                Opacus' accountant for the same mechanism.

        Raises:
            ValueError: the state is empty or incomplete, names another mechanism, has a malformed
                history, or does not contain all releases of the engine that this accountant
                belongs to. The current history is unchanged then.
        """
        self._require_no_ledger()
        if not state_dict:
            raise ValueError(
                f"state_dict={state_dict!r}: expected the keys 'history' and 'mechanism'; "
                "pass the result of state_dict()"
            )
        whole = "steps" not in state_dict
        keys = ("history",) if whole else ("steps", "events", "neighboring_relation")
        for key in (*keys, "mechanism"):
            if key not in state_dict:
                raise ValueError(
                    f"state_dict has the keys {sorted(map(str, state_dict))} and no {key!r}; "
                    "pass the result of an accountant's state_dict()"
                )
        saved = state_dict["mechanism"]
        # In Opacus' registry the names of dpflash's accountants begin with this prefix.
        own = self.mechanism().removeprefix("dpflash_")
        if not isinstance(saved, str) or saved.removeprefix("dpflash_") != own:
            raise ValueError(
                f"state_dict of mechanism {saved!r} cannot be loaded into an accountant of "
                f"mechanism {self.mechanism()!r}; create an accountant of the saved mechanism, or "
                "assign the saved history to accountant.history"
            )
        history = state_dict[keys[0]]
        if not isinstance(history, tuple | list):
            raise ValueError(
                f"state_dict[{keys[0]!r}]={history!r}: expected a list of "
                "(noise_multiplier, sample_rate, steps); pass the result of state_dict()"
            )
        phases, relation, events = self._checked(history), ADD_REMOVE, []
        if not whole:
            relation = state_dict["neighboring_relation"]
            _validate.one_of(neighboring_relation=(relation, RELATIONS))
            saved_events = state_dict["events"]
            if not isinstance(saved_events, tuple | list):
                raise ValueError(
                    f"state_dict['events']={saved_events!r}: expected a list of events; pass "
                    "the result of state_dict()"
                )
            for entry in saved_events:
                if not isinstance(entry, Mapping) or entry.keys() != {"event", "count"}:
                    raise ValueError(
                        f"state_dict['events'] has the entry {entry!r}: expected the keys 'event' "
                        "and 'count'; pass the result of state_dict()"
                    )
                _validate.whole(0, count=entry["count"])
                event, count = event_from_dict(entry["event"]), entry["count"]
                if event.relation != relation:
                    raise ValueError(
                        f"state_dict has an event under {event.relation!r}, but "
                        f"neighboring_relation={relation!r}; pass the result of state_dict()"
                    )
                events.append((event, count))
        if self._is_held:
            self._require_all("state_dict", phases, events, relation)
        self._history, self.neighboring_relation, self._events = phases, relation, events

    def _pairs(self) -> Pairs:
        """Return the history's dominating pairs, except those with infinite noise."""
        relation = self.neighboring_relation
        releases = [
            (_poisson_pairs(relation, noise, rate), steps)
            for noise, rate, steps in self._checked(self._history)
        ]
        releases += [(event.pairs(), count) for event, count in self._events]
        return canonical(
            (pair, count * times)
            for pairs, times in releases
            for pair, count in pairs
            if pair.noise < math.inf
        )

    def _failure(self) -> float:
        return math.fsum(event.failure() * count for event, count in self._events)

    def _releases(self) -> list[tuple[Event, int]]:
        """Return (event, count) of all releases: the history's phases as events, then `events`."""
        relation = self.neighboring_relation
        steps: list[tuple[Event, int]] = [
            (PoissonGaussian(relation=relation, noise_multiplier=noise, sample_rate=rate), count)
            for noise, rate, count in self._checked(self._history)
            if count > 0
        ]
        return steps + self._events

    @staticmethod
    def _checked(history: list[Phase] | tuple[Phase, ...]) -> list[Phase]:
        for entry in history:
            _validate.phase(entry)
        return [(entry[0], entry[1], entry[2]) for entry in history]


def _counts(phases: Iterable[Phase], events: Iterable[tuple[Event, int]]) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for noise, rate, steps in phases:
        found[noise, rate] += steps
    for event, count in events:
        found[event] += count
    return found


@lru_cache(maxsize=1 << 12)
def _poisson_pairs(relation: str, noise: float, rate: float) -> list[tuple[Pair, int]]:
    event = PoissonGaussian(relation=relation, noise_multiplier=noise, sample_rate=rate)
    return event.pairs()


def _maximum(beta: Callable[[float], float], high: float) -> float:
    """Approximate the maximum on [0, high]: a grid search, then golden section near its best."""
    high = high if 0 < high < math.inf else 1.0
    grid = [0.0, *(high * 2.0 ** (-k / 2) for k in range(40, -1, -1))]
    values = [beta(epsilon) for epsilon in grid]
    best = max(range(len(grid)), key=values.__getitem__)
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    found, ratio = values[best], (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    of_left, of_right = beta(left), beta(right)
    for _ in range(40):
        if of_left >= of_right:
            high, right, of_right = right, left, of_left
            left = high - ratio * (high - low)
            of_left = beta(left)
        else:
            low, left, of_left = left, right, of_right
            right = low + ratio * (high - low)
            of_right = beta(right)
        found = max(found, of_left, of_right)
    return found


def with_failure(
    failure: float,
    delta: float,
    get_epsilon: Callable[[float], Interval],
    get_delta: Callable[[float], Interval],
) -> Interval:
    """Bound epsilon of a run that differs from the accounted run with a small probability.

    Let M be the accounted run (untruncated Poisson batches) and M' the actual run (truncated at a
    cap), on neighboring datasets D and D'. Let both use the same random numbers. M and M'
    are equal as long as no batch exceeds the cap, so by a union bound over the steps the outputs
    differ with probability at most m, the failure, on D and also on D'. So m bounds the total
    variation distance, and for every set S of outputs

        P[M'(D) in S] <= P[M(D) in S] + m
                      <= e^eps P[M(D') in S] + delta_M(eps) + m
                      <= e^eps P[M'(D') in S] + delta_M(eps) + (1 + e^eps) m.

    Hence delta_M'(eps) <= delta_M(eps) + (1 + e^eps) m, for any rule that chooses the samples to
    drop. Exchanging M and M' gives the lower bound.

    Args:
        failure: m, the sum of `truncation_probability` over the steps, > 0.
        delta: delta of the actual run, in (0, 1).
        get_epsilon, get_delta: functions that return epsilon and delta of the accounted run.

    Returns:
        Bounds of epsilon. The upper bound has delta_M(epsilon) + (1 + e^epsilon) m <= delta, and
        is inf if no such epsilon was found. If m is much smaller than delta, the upper bound is at
        most 1e-9 above the smallest such epsilon. Else it may be somewhat farther above.
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
        # The cost rises with epsilon, so no epsilon between the last candidate and `least` passes.
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
    return math.inf if epsilon > 700 else (1 + math.exp(epsilon)) * failure
