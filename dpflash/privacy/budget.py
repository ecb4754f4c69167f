"""PrivacyBudget: a limit on epsilon."""

from __future__ import annotations

from dataclasses import dataclass

from .._validate import finite, naming_unknown_fields, one_of, positive, probability

WHEN_SPENT = ("raise", "stop")


class BudgetSpent(RuntimeError):
    """Raised before a step that would exceed the `PrivacyBudget`.

    The step releases nothing, is not charged, writes no ledger line, and drops its batch.
    """


@naming_unknown_fields
@dataclass(frozen=True)
class PrivacyBudget:
    """A limit on the epsilon of all releases of one engine or of one ledger.

    Args:
        epsilon: the largest epsilon allowed at delta, > 0 and finite.
        delta: in (0, 1), well below 1 / number of samples.
        when_spent: with "raise", a step that would exceed the budget raises `BudgetSpent`. With
            "stop", the private loader also ends its loop before it samples a batch whose step
            would exceed the budget. If earlier runs have spent the budget, `make_private` warns,
            and the loop ends at once.

    Raises:
        ValueError: names the argument, its value and what to do.

    Guarantees:
        After each step that `make_private(..., budget=...)` allows, the engine's epsilon at delta
        is at most epsilon, including the steps of earlier runs in its ledger.
    """

    epsilon: float
    delta: float
    when_spent: str = "raise"

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon)
        finite(epsilon=self.epsilon)
        probability(delta=self.delta)
        one_of(when_spent=(self.when_spent, WHEN_SPENT))
