"""GateRules: the objects and options that all clipping gates share; the mode of a backward."""

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
        """Tells which rows of the microbatch are samples."""

    def begin_trial(self) -> None:
        """Begin the backward of a trial."""

    def before_gate(self) -> None:
        """Note that a backward has reached a gate, or an operation on a private parameter."""

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
        """Drop the logical batch if the body raises."""


class Step(GateStep, Protocol):
    """The logical batch as its backward uses it, see `dpflash.step.PrivateStep`."""

    tracker: BatchTracker

    @property
    def releases(self) -> int:
        """Number of releases charged so far."""

    def attach(self, clipper: Clipper) -> None:
        """Tell `clipper` when microbatches begin and logical batches end."""

    def begin_backward(self) -> None:
        """Begin a backward."""

    def end_backward(self) -> None:
        """End a backward."""

    def discard(self) -> None:
        """Drop the logical batch."""

    def noting_refusals(self) -> AbstractContextManager[None]:
        """Record a `PrivateRefusal` of the body in the ledger."""


@dataclass(frozen=True)
class BackwardRun:
    """The mode of the current backward.

    Attributes:
        mode: "clip" to clip and sum; "prove" to only compare gradients; "norms" and "sum" in the
            first and second backward of ghost clipping.
        watches: tests that see each operation on a matrix parameter, and each gate.
        factors: the clipping factors in mode "sum".
        norms_again: whether mode "sum" also computes norms.
    """

    mode: str = "clip"
    watches: tuple[Watch, ...] = ()
    factors: Tensor = field(default_factory=lambda: torch.empty(0))
    norms_again: bool = False


@dataclass(frozen=True)
class GateRules:
    """The objects and options that all clipping gates of a model share.

    Attributes:
        step: the logical batch to which clipped sums are added.
        planner: chooses how the gradients of matrix parameters are computed.
        clip_function: see `clip_factors`.
        loss_reduction: "mean" or "sum" if the loss is a scalar; None for losses `[B]`.
        convolves: whether the model has convolutions, whose operands cudnn rounds by default.
        statistics: counts of clipped samples.
        run: function that returns the mode of the current backward.
        admit: function that checks a gate before it clips.
        refuse_size: function that raises since there are more or fewer losses than samples.
        stand_ins: for each device, the tensor that the gates take as input instead of parameters.
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
        """Return the dotted name of the module that holds a parameter."""
        return self.step.sums.names[parameter].rpartition(".")[0] or "(the model itself)"

    def refuse_coarse_use(self, x: Tensor) -> None:
        """Refuse a mean over samples if x is narrower than float32 or autocast is on."""
        if self.loss_reduction == "mean":
            refuse_coarse_mean(coarse_use(x))

    def refuse_coarse_products(self, device_type: str) -> None:
        """Refuse settings of torch with which one sample changes the rounding of others."""
        refuse_coarse_products(device_type)
        if self.loss_reduction == "mean":
            refuse_coarse_mean(coarse_products(device_type, convolves=self.convolves))
