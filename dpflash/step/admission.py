"""Admission: checks that options, ranks, loader and budget allow the next release or step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from .._validate import noise_fits
from ..distributed.collectives import digest
from ..refusal import TOGETHER, PrivateRefusal
from ..sampling.tracker import FOREIGN, BatchTracker
from ..verification.contents import checksums
from .charge import Charge
from .options import ReleaseOptions
from .sums import ClippedSums

if TYPE_CHECKING:
    from dpflash.accounting import Event

_STEPPED_TWICE = (
    "optimizer.step() was called again, with no engine.backward(losses) since the last release, "
    "so nothing was released: call step() once per batch of the private loader. Two "
    f"engines cannot share a loss. {TOGETHER}"
)
_NO_BATCH = (
    "optimizer.step() with no engine.backward(losses) on a batch of this engine's loader, so "
    f"nothing was released: iterate over the loader that make_private returned. {TOGETHER}"
)
_OF_A_RELEASE = (
    "noise_multiplier",
    "max_grad_norm",
    "expected_batch_size",
    "batch of the private loader",
    "place in its block",
    "options of the optimizers",
)
# Parameters are compared after 0, 1, 2, 4, 8, ... steps, and when a checkpoint is saved.
_REPLICAS = "what optimizers made of the parameters, by other code or hardware on one rank,"


class Order(NamedTuple):
    """An admitted release: the event to charge, and the noise and bound to use.

    Attributes:
        event: the privacy event to charge; None if the release is charged already.
        noise_multiplier: the noise's standard deviation divided by the bound.
        bound: L2 bound of one sample's contribution to the sum.
        is_foreign: whether the batch is not from the private loader.
        wants_trials: whether some rank wants trials of the next microbatches.
    """

    event: Event | None
    noise_multiplier: float
    bound: float
    is_foreign: bool
    wants_trials: bool


class Admission:
    """Checks whether the next release or optimizer step is allowed; does not charge it.

    Args:
        sums: the clipped sums of the logical batch.
        tracker: follows the microbatches of the training loop.
        options: noise multiplier, bound and divisor of the next release.
        charge: checks the budget and the accountant.
    """

    def __init__(
        self, sums: ClippedSums, tracker: BatchTracker, options: ReleaseOptions, charge: Charge
    ):
        self._sums = sums
        self._tracker = tracker
        self._options = options
        self._charge = charge

    def of_release(
        self, parameters: Sequence[nn.Parameter], *, signalled: bool, wants_trials: bool
    ) -> Order:
        """Admit the release of the logical batch, or raise an error.

        Args:
            parameters: the parameters that the release changes.
            signalled: whether another loader signalled that the logical batch ends here.
            wants_trials: whether this rank wants trials of the next microbatches.

        Raises:
            BudgetSpent: the release does not fit into the budget.
            ValueError: the accountant does not support the event, the ranks' releases differ, or
                noise or bound changed within a block of releases.
            RuntimeError: the batch is not from the private loader.
            PrivateRefusal: an option changed since the first backward.
        """
        options, sums = self._options, self._sums
        multiplier = options.noise_multiplier
        bound = sums.bound if sums.has_begun else options.max_grad_norm
        block = self._charge.block
        is_own = self._tracker.take_draw(signalled)
        # The epoch or round of a logical batch without a number is unknown, and may be uncharged.
        is_own &= block.round[0] == 1 or self._tracker.current is not None
        options.refuse_changed()
        noise_fits(max_grad_norm=bound, noise_multiplier=multiplier)
        given = multiplier, bound, options.expected_batch_size, is_own, block.place
        numbers = *given, options.of_optimizers()
        # `public` is not compared: the loop may add public gradients until the optimizer's step.
        release = dict(zip(_OF_A_RELEASE, numbers, strict=True)) | {_REPLICAS: None}
        number = self._charge.releases
        if sums.ranks.everyone is not None and not sums.is_sharded and not number & (number - 1):
            release[_REPLICAS] = digest(repr(checksums(parameters)))
        wanted = self._require_agreement("a private batch", parameters, (), release, wants_trials)
        if not is_own:
            self._refuse_foreign(signalled)
        block.check(bound, multiplier)
        event = self._charge.admit(multiplier, is_foreign=not is_own)
        return Order(event, multiplier, bound, not is_own, wanted)

    def of_step(
        self, kind: str, parameters: Sequence[nn.Parameter], public: Sequence[str]
    ) -> None:
        """Admit a step of an optimizer, or raise an error.

        Args:
            kind: what data the step uses, in words.
            parameters: the parameters of the optimizer that steps.
            public: names of the parameters with a public gradient.

        Raises:
            ValueError: on all ranks, if the ranks are about to make different steps.
        """
        numbers = dict.fromkeys((*_OF_A_RELEASE, _REPLICAS))
        self._require_agreement(kind, parameters, public, numbers)

    def _refuse_foreign(self, signalled: bool) -> None:
        if self._tracker.foreign_batches and self._sums.ranks.everyone is None:
            return
        if not signalled and not self._sums.has_begun:
            if self._tracker.received:  # a condition on losses may have led to this step
                raise PrivateRefusal(_STEPPED_TWICE) from None
            raise RuntimeError(_NO_BATCH)
        # A signal may depend on private data: on the samples that the loop skipped.
        raise PrivateRefusal(FOREIGN) if signalled else RuntimeError(FOREIGN)

    def _require_agreement(
        self,
        kind: str,
        parameters: Sequence[nn.Parameter],
        public: Sequence[str],
        release: dict[str, Any],
        wants_trials: bool = False,
    ) -> bool:
        """Raise unless all ranks make the same step. Return whether a rank wants trials."""
        ranks, tracker = self._sums.ranks, self._tracker
        if ranks.everyone is None:
            return wants_trials
        mark = tracker.current
        rows = ranks.agree(
            "optimizer.step()",
            {
                "data of the step": kind,
                "release": self._charge.releases,
                "logical batch": None if mark is None else (tracker.returns, mark.draw),
                **release,
                "trained parameters": [self._sums.names[p] for p in parameters],
                "parameters with a gradient": [
                    self._sums.names[p] for p in parameters if p.grad is not None
                ],
                "parameters with a public gradient": public,
            },
            [int(wants_trials)],
        )
        return any(row[0] for row in rows)
