"""Agreement: ranks are about to make the same step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..sampling.tracker import BatchTracker
from .charge import Charge
from .sums import ClippedSums

_OF_A_RELEASE = (
    "noise_multiplier",
    "max_grad_norm",
    "expected_batch_size",
    "batch of the private loader",
)


class Agreement:
    """Compares the steps that ranks are about to make.

    Args:
        sums: of the logical batch.
        tracker: follows the microbatches of the training loop.
        charge: knows how many releases were charged.
    """

    def __init__(self, sums: ClippedSums, tracker: BatchTracker, charge: Charge):
        self._sums = sums
        self._tracker = tracker
        self._charge = charge

    def on_release(self, parameters: Sequence[nn.Parameter], *numbers: float) -> None:
        """Raise a ValueError on all ranks where they are about to make different releases.

        Args:
            parameters: those that the release changes.
            numbers: noise, bound, divisor, and whether the batch is of the private loader.
        """
        # Public gradients are made until the release's step.
        release = dict(zip(_OF_A_RELEASE, numbers, strict=True))
        self._check("a private batch", parameters, (), release)

    def on_step(
        self, kind: str, parameters: Sequence[nn.Parameter], public: Sequence[str]
    ) -> None:
        """Raise a ValueError on all ranks where they are about to make different steps.

        Args:
            kind: what the step is on.
            parameters: those that a release changes.
            public: names of the parameters with a public gradient.
        """
        self._check(kind, parameters, public, dict.fromkeys(_OF_A_RELEASE))

    def _check(
        self,
        kind: str,
        parameters: Sequence[nn.Parameter],
        public: Sequence[str],
        release: dict[str, Any],
    ) -> None:
        ranks, tracker = self._sums.ranks, self._tracker
        if ranks.everyone is None:
            return
        mark = tracker.current
        ranks.agree(
            "optimizer.step()",
            {
                "data of the step": kind,
                "release": self._charge.releases,
                "draw": None if mark is None else (tracker.returns, mark.draw),
                **release,
                "trained parameters": [self._sums.names[p] for p in parameters],
                "parameters with a public gradient": public,
            },
        )
