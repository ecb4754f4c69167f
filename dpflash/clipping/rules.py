"""GateRules: objects and options that all clipping gates share; the mode of a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..sampling.slots import RealRows
from ..sampling.tracker import BatchTracker
from ..step import ClippedSums, Clipper
from ..verification.watch import Watch
from .planner import Planner
from .precision import coarse_products, coarse_use, refuse_coarse_mean, refuse_coarse_products
from .statistics import ClipStatistics


class GateStep(Protocol):
    """The methods of a logical batch that gates use."""

    sums: ClippedSums

    @property
    def rows(self) -> RealRows:
        """Which rows of the microbatch are samples."""

    def begin_trial(self) -> None:
        """Begin the backward of a trial."""

    def before_gate(self) -> None:
        """Note that a backward has reached a use of a private parameter, or a gate."""

    def add_clipped(
        self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor], factors: Tensor
    ) -> None:
        """Sum per-sample gradients times their clipping factors, and add the sums."""

    def add(
        self,
        parameters: Sequence[nn.Parameter],
        totals: Iterable[Tensor],
        *,
        is_exact: bool = True,
    ) -> None:
        """Add a microbatch's clipped sums."""

    def dropping(self) -> AbstractContextManager[None]:
        """Drop the logical batch if the block raises."""


class Step(GateStep, Protocol):
    """The logical batch of a backward and its gates, see `dpflash.step.PrivateStep`."""

    tracker: BatchTracker

    @property
    def releases(self) -> int:
        """Number of releases charged so far."""

    def attach(self, clipper: Clipper) -> None:
        """Report to `clipper` the begin of microbatches and the end of logical batches."""

    def begin_backward(self) -> None:
        """Begin a backward."""

    def end_backward(self) -> None:
        """End a backward."""

    def discard(self) -> None:
        """Drop the logical batch."""

    def noting_refusals(self) -> AbstractContextManager[None]:
        """Write a private refusal of the block to the ledger."""


@dataclass(frozen=True)
class BackwardRun:
    """The mode of the current backward.

    Attributes:
        mode: "clip"; "prove" if the backward is only compared; "norms" and "sum" in the first and
            second backward of ghost clipping.
        watches: objects that are shown each use of a matrix parameter, and each gate.
        factors: clipping factors in mode "sum".
        norms_again: whether mode "sum" computes norms too.
    """

    mode: str = "clip"
    watches: tuple[Watch, ...] = ()
    factors: Tensor = field(default_factory=lambda: torch.empty(0))
    norms_again: bool = False


@dataclass(frozen=True)
class GateRules:
    """Objects and options that all clipping gates of a model share.

    Attributes:
        step: the logical batch that clipped sums are added to.
        planner: chooses how the gradients of matrix parameters are computed.
        clip_function: see `clip_factors`.
        loss_reduction: "mean" or "sum" if the loss is a scalar; None for losses `[B]`.
        convolves: whether the model has convolutions, which cudnn rounds by default.
        statistics: how many samples were clipped.
        run: returns the mode of the current backward.
        admit: checks a gate whose backward runs.
        refuse_size: called with the gate's number of samples and that of losses; raises.
        stand_ins: by device, the tensor that is the gates' input in place of parameters.
    """

    step: GateStep
    planner: Planner
    clip_function: str
    loss_reduction: str | None
    convolves: bool
    statistics: ClipStatistics
    run: Callable[[], BackwardRun]
    admit: Callable[[Any], None]
    refuse_size: Callable[[int, int], None]
    stand_ins: dict[torch.device, Tensor] = field(default_factory=dict)

    def layer_of(self, parameter: nn.Parameter) -> str:
        """Dotted name of the module that holds a parameter."""
        return self.step.sums.names[parameter].rpartition(".")[0] or "(the model itself)"

    def refuse_coarse_use(self, x: Tensor) -> None:
        """Refuse a mean over samples if x has fewer digits than float32 or autocast is on."""
        if self.loss_reduction == "mean":
            refuse_coarse_mean(coarse_use(x))

    def refuse_coarse_products(self, device_type: str) -> None:
        """Refuse torch settings with which one sample changes the rounding of others."""
        refuse_coarse_products(device_type)
        if self.loss_reduction == "mean":
            refuse_coarse_mean(coarse_products(device_type, convolves=self.convolves))
