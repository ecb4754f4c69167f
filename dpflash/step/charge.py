"""Charge: charges releases to the accountant and the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..distributed.mesh import Ranks
from ..refusal import warn
from ..sampling.tracker import BatchTracker
from .block import Allocation, Block

if TYPE_CHECKING:
    from dpflash.accounting import Event

    from ..privacy.keys import RunKeys
    from ..privacy.spending import Spending
    from ..sampling.plan import SamplingPlan
    from .admission import Order


class Charge:
    """Charges each release to the accountant and the ledger, identically on all ranks.

    Args:
        spending: the privacy cost of all releases so far.
        keys: the keys of the noise.
        plan: how logical batches are sampled, and the privacy cost of each.
        tracker: follows the microbatches of the training loop.
        ranks: this process and its peers.

    Attributes:
        releases: number of releases charged so far; each has its own noise.
        block: the group of releases with correlated noise, or charged as one event.

    Guarantees:
        The accountant and the ledger contain a release before `pay` returns its number.
    """

    def __init__(
        self,
        spending: Spending,
        keys: RunKeys,
        plan: SamplingPlan,
        tracker: BatchTracker,
        ranks: Ranks,
    ):
        self.releases = 0
        self.block = (
            Allocation(plan.steps_per_epoch, keys, tracker)
            if plan.is_allocated
            else Block(plan.mechanism, keys, tracker)
        )
        self._spending = spending
        self._keys = keys
        self._plan = plan
        self._tracker = tracker
        self._ranks = ranks
        self._calibrated: tuple[int, int, float] | None = None
        self._events = 0
        self._is_first = False
        # Number and noise multiplier of the last epoch of a shuffled loader that was charged.
        self._paid = (0, math.inf)

    def resume(self, releases: int) -> None:
        """Continue after `releases` releases."""
        self.releases, self._events = releases, self._plan.events_of(releases)

    def leave_ranks(self) -> None:
        """Continue as a single process."""
        self._ranks = Ranks()

    def admit(self, noise_multiplier: float, *, is_foreign: bool) -> Event | None:
        """Check that budget and accountant allow the next release.

        Args:
            noise_multiplier: the noise multiplier of the release.
            is_foreign: whether the batch is not from the private loader.

        Returns:
            The event to charge; None if the release is charged already.

        Raises:
            BudgetSpent: the release does not fit into the budget.
            ValueError: the accountant does not support this event.
        """
        event: Event | None
        if is_foreign:
            # Models that are not private do not need this import, which is slow.
            from dpflash.accounting import Gaussian

            # It is unknown how a foreign batch was sampled: no amplification by sampling.
            event = Gaussian(relation="zero_out", noise_multiplier=noise_multiplier)
        else:
            event = self._next_event(noise_multiplier)
        self._is_first = not self.releases and self._spending.is_empty
        self._spending.admit(event)
        return event

    def pay(self, order: Order, carry: Callable[[bool], bool] | None) -> int:
        """Charge a release that was admitted, and return its number.

        Rank 0, which writes the ledger, charges first, then the other ranks. `carry` is an
        exchange that can tell them whether rank 0 failed, see `Ranks.run_on_first`.
        """
        event, noise_multiplier, bound, is_foreign, _ = order
        keys = self._keys
        if self._spending.ledger is None and noise_multiplier > 0:
            keys.claim(self.releases)

        def charge() -> bytes:
            self._spending.charge(
                event, run=keys.run, branch=keys.branch, bound=bound, is_foreign=is_foreign
            )
            return b""

        self._ranks.run_on_first("the payment of a release", charge, carry)
        if not self._ranks.is_first:
            charge()
        if not is_foreign and event is not None:
            self._paid = (self._tracker.epochs, noise_multiplier)
        self._events += event is not None
        number = self.releases
        self.releases += 1
        return number

    def _next_event(
        self, noise_multiplier: float, *, new_epoch: bool = False, draw: int | None = None
    ) -> Event | None:
        event = self._plan.event(noise_multiplier)
        if self._plan.event_covers_epoch and not new_epoch:
            # Batches of an epoch are disjoint: the event with the least noise pays for them all.
            epoch, least = self._paid
            if epoch == self._tracker.epochs and noise_multiplier >= least:
                return None
        return None if self.block.has_paid(draw) else event

    # The budget

    def may_begin(
        self, noise_multiplier: float, *, new_epoch: bool, draw: int | None = None
    ) -> bool:
        """Return whether the budget allows the release of a batch that is not sampled yet."""
        budget = self._spending.budget
        if budget is None or budget.when_spent != "stop":
            return True
        event = self._next_event(noise_multiplier, new_epoch=new_epoch, draw=draw)
        return self._spending.fits(event)

    def remaining_steps(self, noise_multiplier: float) -> int | None:
        """Return how many more releases the budget allows, or None if there is no budget."""
        if self._spending.budget is None:
            return None
        fit = self._spending.remaining(self._plan.event(noise_multiplier))
        if not self._plan.event_covers_epoch:
            return self.block.remaining(fit)
        left, whole = self._tracker.left_of_epoch, self._plan.steps_per_epoch
        if self._next_event(noise_multiplier) is None:
            return left + fit * whole
        return left + (fit - 1) * whole if fit and left else fit * whole

    # Warnings

    def expect(self, releases: int, *, target_epsilon: float) -> None:
        """Set the number of further releases for which noise is calibrated; a later one warns."""
        most = self._events + self._plan.events_of(releases)
        self._calibrated = (self.releases + releases, most, target_epsilon)

    def warn_beyond_target(self) -> None:
        """Warn once if there are more releases than the noise was calibrated for."""
        if self._calibrated is None:
            return
        most, rounds, epsilon = self._calibrated
        size, in_words = self.block.round
        is_split = size > 1 and self._events > rounds
        if self.releases <= most and not is_split:
            return
        self._calibrated = None
        why = f"the noise was calibrated for {most} releases"
        if is_split:
            why += f" in {rounds} {in_words} begins another one"
        warn(
            f"release {self.releases}: {why}, so epsilon is above target_epsilon={epsilon!r} from "
            "now on. Pass the epochs or steps that you train for to make_private_with_epsilon; "
            "budget=PrivacyBudget(...) stops training by itself",
        )

    def warn_of_forgotten_releases(self) -> None:
        """Warn if the optimizer has already made steps but epsilon counts no releases."""
        if self._is_first:
            warn(
                "the optimizer's state is from an earlier run, and this engine counts none of its "
                "steps. If these steps used private data, epsilon is too small: resume with "
                "engine.save_checkpoint and load_checkpoint (Lightning: callbacks=[KeepPrivacy("
                "engine)]), or save engine.state_dict() with the states of model and optimizer, "
                "and load all three before the first step",
            )

    def note_refusal(self, *, may_be: bool = False) -> None:
        """Record in the ledger that private data ended the loop, or may have ended it."""
        # An error of the ledger is suppressed here; the next release raises it.
        with suppress(OSError, RuntimeError):
            self._spending.note_refusal(self._keys.run, may_be=may_be)
