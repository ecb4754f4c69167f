"""Spending: the privacy cost of all releases on one dataset, and its limit.

dpflash's accountants support every event. Opacus' accountants support only the Gaussian mechanism
with Poisson sampling, and do not distinguish neighboring relations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from dpflash.accounting import (
    Accountant,
    Event,
    Gaussian,
    Interval,
    PoissonGaussian,
    RandomAllocationGaussian,
    create_accountant,
    noise_multiplier_for,
    remaining_steps,
)
from dpflash.accounting.events import ADD_REMOVE, RELATIONS, REPLACE_ONE, ZERO_OUT
from dpflash.accounting.registry import as_accountant, as_phase, copied

from .._json import finite
from .._validate import class_name, one_of
from .budget import BudgetSpent, PrivacyBudget
from .ledger import LOST, REFUSED, Ledger, LedgerLine
from .privacy_unit import SAMPLE, is_unnamed

DEFAULT_ACCOUNTANT = "contour"
# Accountants whose epsilon `_check_epsilon` recomputes: they give upper bounds quickly.
_RECOMPUTED = ("contour", "rdp")


@dataclass
class _Remaining:
    """How many more releases of `event` the budget allows at the accountant's `state`."""

    event: Event
    count: int
    state: tuple[Any, ...]


class Spending:
    """The releases of an engine and of its ledger, their epsilon, and the remaining budget.

    `relation` is the requested neighboring relation; None for the relation of the events. `delta`
    is the delta of the epsilon in ledger lines; None for lines without epsilon. `unit` is the
    privacy unit of all releases; None before the first release.
    """

    def __init__(
        self,
        accountant: str | Accountant,
        *,
        relation: str | None = None,
        ledger: Ledger | None = None,
    ):
        one_of(neighboring_relation=(relation, (None, *RELATIONS)))
        self.accountant: Accountant = as_accountant(accountant)
        self.is_ours = isinstance(self.accountant, Accountant)
        where = None if ledger is None else str(ledger.path)
        if ledger is not None:
            _check_epsilon(ledger)
        if self.is_ours:
            self.accountant.hold(ledger=where)
        elif ledger is not None:
            raise ValueError(
                f"accountant={class_name(self.accountant)} with ledger={where!r}: other code can "
                "add releases to this accountant without recording them in the ledger; pass the "
                "name of one of dpflash's accountants, such as accountant='rdp'"
            )
        if self.is_ours and relation is None:
            own = self.accountant.neighboring_relation
            relation = None if own == ADD_REMOVE else own
        if not self.is_ours and relation == REPLACE_ONE:
            raise ValueError(
                f"neighboring_relation={relation!r}: {class_name(self.accountant)} does not "
                f"support it; use accountant={DEFAULT_ACCOUNTANT!r}"
            )
        self.asked = relation
        self.budget: PrivacyBudget | None = None
        self.delta: float | None = None
        self.noiseless = False
        self.has_foreign_batches = False
        self.unit: str | None = None
        self._grouping: str | None = None
        self._about: Mapping[str, Any] | None = None
        self._relation = ADD_REMOVE if relation is None else relation
        self._remaining: _Remaining | None = None
        self._last: Event | None = None
        self._counted: tuple[int, tuple[float, ...]] | None = None
        if relation is not None:
            self._convert(relation)
        self.ledger = ledger
        if ledger is not None:
            with self.accountant.taken_back():
                self.include(ledger.lines, ledger.names)

    # Spent so far

    @property
    def relation(self) -> str:
        """The neighboring relation that epsilon is for."""
        return self.accountant.neighboring_relation if self.is_ours else self._relation

    @property
    def is_empty(self) -> bool:
        """Whether there has been no release so far."""
        events = self.accountant.events if self.is_ours else []
        return not (self.noiseless or self.accountant.history or events)

    def epsilon(self, delta: float) -> Interval:
        """Return a lower and an upper bound of epsilon at delta; inf if a release had no noise."""
        self._require_counted()
        if self.noiseless:
            return Interval(math.inf, math.inf)
        if self.is_empty:
            return Interval(0.0, 0.0)
        return self._epsilon_of(self.accountant, delta)

    def include(self, lines: Iterable[LedgerLine], names: Mapping[str, str]) -> None:
        """Count the releases of a ledger's lines; raise ValueError for another privacy unit.

        `names` maps units that the ledger renamed to their last names.
        """
        for line in lines:
            unit = names.get(line.unit, line.unit)
            self._check_unit(unit)
            self.unit = unit
            if line.event is not None:
                self.add(line.event, line.steps)

    def add(self, event: Event, count: int = 1) -> None:
        """Add an event `count` times to the accountant, without charge or ledger line."""
        event = self.adopt(event)
        if _is_noiseless(event):
            self.noiseless = True
            return
        with self.accountant.counting() if self.is_ours else nullcontext():
            self._compose(self.accountant, event, count)
        self._note_counted()

    def adopt(self, event: Event) -> Event:
        """Convert the event and all earlier events to a common relation; return the event.

        Raises if the relation or the accountant does not support the event; nothing is changed.
        """
        event = self.check(event)
        if event.relation != self.relation:
            self._convert(event.relation)
        return event

    def check(self, event: Event) -> Event:
        """Return or raise what `adopt` would return or raise, but change nothing."""
        event = convert_event(event, self._relation_with(event))
        if not self.is_ours:
            as_phase(self.accountant, event)
        return event

    def admit(self, event: Event | None) -> None:
        """Check an event before it is charged, without changing anything.

        Raises BudgetSpent if it would exceed the budget, ValueError if it is not supported.
        """
        if event is None:
            return
        self._require_counted()
        self.check(event)
        if not self.fits(event):
            raise BudgetSpent(self._refusal(event))
        if not self.is_ours and not _is_noiseless(event):
            # Opacus' accountants lose their history if they refuse a step, so use a copy.
            self._compose(copied(self.accountant), event, 1)

    def charge(
        self,
        event: Event | None,
        *,
        run: str,
        bound: float,
        branch: str = "",
        is_foreign: bool = False,
    ) -> None:
        """Charge for one release, which `admit` has accepted, before it is made.

        `event` is None if an earlier event includes the cost. `bound`, the bound of one sample's
        gradient, is written to the ledger.
        """
        self.has_foreign_batches |= is_foreign
        if event is not None:
            event = self.adopt(event)
        if self.ledger is not None:
            self.ledger.append(
                run=run,
                branch=branch,
                event=event,
                epsilon=self._epsilon_with(event),
                delta=self.delta,
                accountant=self.accountant.mechanism(),
                unit=self.unit or SAMPLE,
                about=self._about and {**self._about, "max_grad_norm": finite(bound)},
            )
        if event is None:
            return
        left = self._known(event)
        self.add(event)
        self._last = event
        if left is not None:
            left.count -= 1
            left.state = self._state()

    def note_refusal(self, run: str, *, may_be: bool) -> None:
        """Write to the ledger that a PrivateRefusal ended the run, or may have done so."""
        if self.ledger is not None:
            unit = self.unit or SAMPLE
            note = LOST if may_be else REFUSED
            self.ledger.note(note, run=run, accountant=self.accountant.mechanism(), unit=unit)

    # Remaining budget

    def set_budget(self, budget: PrivacyBudget | None) -> None:
        """Set the limit of epsilon; None for no limit."""
        self.budget = budget

    def set_delta(self, delta: float) -> None:
        """From now on, write epsilon at this delta into the ledger's lines."""
        self.delta = delta

    def fits(self, event: Event | None) -> bool:
        """Return whether the budget allows the event once more."""
        if self.budget is None or event is None:
            return True
        event = convert_event(event, self._relation_with(event))
        # Computing the number of remaining steps is slow, and a noise scheduler may change the
        # event in each step. So if the event differs from the last event, check one step only.
        if event != self._last and self._known(event) is None:
            return self._after(event, self.budget.delta) <= self.budget.epsilon
        return self.remaining(event) > 0

    def remaining(self, event: Event) -> int:
        """Return how many such events the budget allows; computed once, and then counted down."""
        assert self.budget is not None
        if _is_noiseless(event) or self.noiseless:
            return 0
        event = convert_event(event, self._relation_with(event))
        left = self._known(event)
        if left is None:
            trial = copied(self.accountant)
            if self.is_ours:
                _convert_all(trial, event.relation)
            count = remaining_steps(
                trial, event, target_epsilon=self.budget.epsilon, target_delta=self.budget.delta
            )
            self._remaining = left = _Remaining(event, count, self._state())
        return left.count

    def _known(self, event: Event) -> _Remaining | None:
        """Return the event's remaining steps if they are known at the accountant's state."""
        left = self._remaining
        return left if left and (left.event, left.state) == (event, self._state()) else None

    def _check_unit(self, unit: str) -> None:
        """Raise if the releases so far have another privacy unit: no epsilon covers both."""
        # Another engine may have added releases to the same accountant.
        before = self.unit or (self.accountant.unit if self.is_ours else None)
        if before not in (None, unit):
            raise ValueError(
                f"the privacy unit is a {unit!r} here, and a {before!r} in the releases so far "
                "(of the ledger or the accountant): one epsilon cannot be for both. Use another "
                "ledger and engine, and report both epsilons. If both name the same users, pass "
                "the unit_name= of the earlier releases, or correct the ledger: dpflash ledger "
                "rename FILE --unit-name NAME"
            )

    def begin(
        self,
        event: Event,
        budget: PrivacyBudget | None,
        *,
        unit: str = SAMPLE,
        grouping: str | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare for a run whose steps cost `event`.

        If no step is possible, raise and change nothing. `about` holds the facts that the ledger
        records about the run, see `source.about_run`. `grouping` is a digest of the entries'
        units, and is never written: with the digest, a person who knows the units of all entries
        but one could find out the last unit.
        """
        self.check(event)
        if self.is_ours and isinstance(event, RandomAllocationGaussian):
            self._after(event, 0.5)  # raises if the accountant does not support the event
        if self.ledger is not None and is_unnamed(unit):
            raise ValueError(
                f"unit_name=None with unit_of and ledger={str(self.ledger.path)!r}, whose lines "
                "must name the units that its epsilon protects: pass the name of a unit, such as "
                "unit_name='patient'"
            )
        if self.ledger is not None:
            unit = self.ledger.called(unit)
        if not self.is_empty:
            self._check_unit(unit)
            if is_unnamed(unit) and self._grouping != grouping:
                raise ValueError(
                    "unit_of groups the entries otherwise than in this engine's earlier releases, "
                    "so the units may differ. If the units are the same, such as patients who "
                    "have more entries now, pass the same unit_name= both times. If not, use "
                    "another engine, and report both epsilons"
                )
        before, self.budget = self.budget, budget
        try:
            if budget is not None and _is_noiseless(event):
                raise ValueError(
                    f"budget={budget!r} with noise_multiplier=0: the epsilon of steps without "
                    "noise is infinite; pass a noise_multiplier > 0, or leave budget out"
                )
            if budget is not None and self.is_ours and not self.accountant.is_bound:
                raise ValueError(
                    f"budget={budget!r} with accountant={self.accountant.mechanism()!r}, whose "
                    "epsilon is an estimate and no upper bound; use accountant='contour'"
                )
            may_end = not self.is_empty and budget is not None and budget.when_spent == "stop"
            if budget is not None and not may_end and self.remaining(event) == 0:
                raise ValueError(f"budget={budget!r}: {self._refusal(event)}")
        except BaseException:
            self.budget = before
            raise
        self.delta = None if budget is None else budget.delta
        self.unit, self._grouping, self._about = unit, grouping, about
        if self.is_ours:
            self.accountant.unit = unit
        self.adopt(event)

    def noise_for(
        self, event: Callable[[float], Event], count: int, *, epsilon: float, delta: float
    ) -> float:
        """Return the noise multiplier at which `count` events spend (epsilon, delta)."""
        relation = self._relation_with(event(1.0))
        return noise_multiplier_for(
            lambda noise_multiplier: convert_event(event(noise_multiplier), relation),
            count,
            target_epsilon=epsilon,
            target_delta=delta,
            accountant=self.accountant,
        )

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the spending as plain values."""
        return {
            "accountant": self.accountant.state_dict(),
            "relation": self.relation,
            "noiseless": self.noiseless,
            "has_foreign_batches": self.has_foreign_batches,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a checkpoint's spending; with a ledger, use the ledger's events instead."""
        if self.ledger is None and self.is_ours:
            loaded = copied(self.accountant)
            loaded.load_state_dict(state["accountant"])
            relation = self.relation
            if loaded.history or loaded.events:
                relation = common_relation((state["relation"], relation))
            _convert_all(loaded, self.asked or relation)
            self.accountant.load_state_dict(loaded.state_dict())
        elif self.ledger is None:
            self.accountant.history = [tuple(p) for p in state["accountant"]["history"]]
            self._relation = common_relation((self._relation, state["relation"]))
        self._note_counted()
        self.noiseless |= state["noiseless"]
        self.has_foreign_batches |= state["has_foreign_batches"]

    # Internals

    def _note_counted(self) -> None:
        """Save the length and the last entry of the history, for an accountant of Opacus."""
        history = [] if self.is_ours else self.accountant.history
        self._counted = (len(history), tuple(history[-1])) if history else None

    def _require_counted(self) -> None:
        """Raise if Opacus' accountant has lost releases (dpflash's accountants check this too)."""
        if self._counted is None:
            return
        count, last = self._counted
        now = tuple(self.accountant.history[count - 1 : count])
        if not now or tuple(now[0][:2]) != last[:2] or now[0][2] < last[2]:
            raise RuntimeError(
                "the history of the engine's accountant lacks releases that were made: it was "
                "cleared, replaced, or loaded from an earlier state, so epsilon would be too "
                "small. Restore it; resume a run in a new engine, before its first release"
            )

    def _relation_with(self, event: Event) -> str:
        if self.asked is not None:
            return self.asked
        own = event.relation if self.is_empty else self.relation
        return common_relation((own, event.relation))

    def _convert(self, relation: str) -> None:
        if self.is_ours:
            _convert_all(self.accountant, relation)
        self._relation = relation

    def _state(self) -> tuple[Any, ...]:
        """A value that changes whenever the accountant changes."""
        history = self.accountant.history
        events = self.accountant.events if self.is_ours else []
        return (
            *(len(history), tuple(history[-1]) if history else None),
            *(len(events), events[-1] if events else None),
            *(self.relation, self.budget),
        )

    def _compose(self, accountant: Accountant, event: Event, count: int) -> None:
        if not self.is_ours:
            noise_multiplier, sample_rate = as_phase(accountant, event)
        elif type(event) is PoissonGaussian:
            noise_multiplier, sample_rate = event.noise_multiplier, event.sample_rate
        else:
            accountant.compose(event, count)
            return
        accountant.step(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
        if count > 1:
            *before, (noise_multiplier, sample_rate, steps) = accountant.history
            accountant.history = [*before, (noise_multiplier, sample_rate, steps + count - 1)]

    def _epsilon_of(self, accountant: Accountant, delta: float) -> Interval:
        if self.is_ours:
            found: Interval = accountant.get_epsilon(delta, interval=True)
            return found
        return Interval(None, float(accountant.get_epsilon(delta)))

    def _after(self, event: Event, delta: float) -> float:
        if _is_noiseless(event) or self.noiseless:
            return math.inf
        trial = copied(self.accountant)
        if self.is_ours:
            _convert_all(trial, event.relation)
        self._compose(trial, event, 1)
        return self._epsilon_of(trial, delta).upper

    def _epsilon_with(self, event: Event | None) -> float | None:
        if self.delta is None:
            return None
        delta = self.delta
        found = self.epsilon(delta).upper if event is None else self._after(event, delta)
        return found if math.isfinite(found) else None

    def _refusal(self, event: Event) -> str:
        assert self.budget is not None
        event = convert_event(event, self._relation_with(event))
        limit, delta = self.budget.epsilon, self.budget.delta
        spent, after = self.epsilon(delta).upper, self._after(event, delta)
        names = {"shuffled": "epoch", "none": "step on a batch of unknown origin"}
        names["random_allocation"] = "epoch of random allocation"
        name = names.get(event.sampler, f"{event.sampler} step")
        if after == math.inf and event.failure() > 0:
            return (
                f"the privacy budget epsilon={limit:g} at delta={delta:g} allows no step: batches "
                f"exceed max_batch_size with a probability of {event.failure():.3g}, and "
                "delta must be larger. Pass a greater max_batch_size, or leave it out"
            )
        return (
            f"the privacy budget epsilon={limit:g} at delta={delta:g} allows no further step: "
            f"{spent:.6g} is spent and one more {name} would reach {after:.6g}. "
            "Nothing was released. Stop here (PrivacyBudget(when_spent='stop') does it for you), "
            "raise noise_multiplier, or pass a greater budget=PrivacyBudget(...)"
        )


def _check_epsilon(ledger: Ledger) -> None:
    """Raise if the last epsilon that a ledger states is larger than its events give."""
    lines = list(ledger.lines)
    while lines and not (lines[-1].epsilon and lines[-1].accountant in _RECOMPUTED):
        lines.pop()
    counts: Counter[Event] = Counter()
    for line in lines:
        if line.event is not None:
            counts[line.event] += line.steps
            relation = line.event.relation
    if not lines or any(map(_is_noiseless, counts)):
        return
    last = lines[-1]
    assert last.epsilon is not None and last.delta is not None
    trial = create_accountant(last.accountant, neighboring_relation=relation)
    try:
        for event, count in counts.items():
            trial.compose(convert_event(event, relation), count)
        found = float(trial.get_epsilon(last.delta))
    except (ValueError, ArithmeticError):
        return
    if found < last.epsilon * (1 - 1e-6):
        raise ValueError(
            f"ledger {ledger.path}: the events up to line {len(lines)} give epsilon {found!r}, "
            f"but the line states {last.epsilon!r}: the file was changed. Restore it from a copy"
        )


def _convert_all(accountant: Accountant, relation: str) -> None:
    if accountant.neighboring_relation != relation:
        for event, _ in accountant.events:
            convert_event(event, relation)  # raises before anything is changed
        accountant.convert(relation)


def _is_noiseless(event: Event) -> bool:
    return getattr(event, "noise_multiplier", 1.0) == 0


def common_relation(relations: Iterable[str]) -> str:
    """Return the relation under which events of these relations are accounted for together.

    If all relations are equal, return this relation. Otherwise return "zero_out", under which
    every sampler has a guarantee. Under it, Poisson sampling costs the same as under "add_remove".
    Under "add_remove", shuffled and fixed-size batches have no guarantee.
    """
    given = set(relations)
    return given.pop() if len(given) == 1 else ZERO_OUT


def convert_event(event: Event, relation: str) -> Event:
    """Convert an event to another relation; raise if the event has no guarantee under it."""
    if event.relation == relation:
        return event
    if type(event) is Gaussian and relation == ADD_REMOVE:
        raise ValueError(
            f"neighboring_relation={relation!r}: a batch that did not come from a private loader "
            "has no guarantee for it, since one more sample in the data could change the whole "
            f"batch; use {ZERO_OUT!r}"
        )
    takes_size = isinstance(event, PoissonGaussian | RandomAllocationGaussian)
    if takes_size and (event.relation, relation) == (ZERO_OUT, ADD_REMOVE):
        raise ValueError(
            f"neighboring_relation={relation!r}: the {event.sampler} sampler counted the size of "
            "the dataset as public, but one more sample changes the size and the sample rate; "
            f"pass a public size, make_private(dataset_size=...), or use {ZERO_OUT!r}"
        )
    try:
        return event.convert(relation)
    except ValueError as error:
        raise ValueError(
            f"neighboring_relation={relation!r}: the {event.sampler} sampler has no guarantee "
            f"for it ({error})"
        ) from error


def rounded_up(epsilon: float) -> str:
    """Return epsilon with three decimals, rounded up."""
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}"
