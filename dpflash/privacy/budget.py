"""PrivacyBudget: a limit on epsilon."""

from __future__ import annotations

from dataclasses import dataclass

from .._validate import finite, naming_unknown_fields, one_of, positive, probability

WHEN_SPENT = ("raise", "stop")


class BudgetSpent(RuntimeError):
    """A step was refused before it was taken: it would have exceeded the `PrivacyBudget`.

    Nothing was released, charged or written; the batch is dropped.
    """


@naming_unknown_fields
@dataclass(frozen=True)
class PrivacyBudget:
    """A limit on the epsilon of everything that one engine, or one ledger, has released.

    Args:
        epsilon: the limit at delta, > 0 and finite.
        delta: in (0, 1), well below 1 / number of samples.
        when_spent: with "raise", a step that would exceed the budget raises `BudgetSpent`. With
            "stop", a loop over the private loader also ends before it draws a batch that no step
            could release. If earlier runs have spent the budget, `make_private` warns, and the
            loop ends at once.

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
