"""Turns: decides which gradients optimizers step on. Each optimizer steps once on a release."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from ..refusal import PrivateRefusal
from .step import PrivateStep

# The gradients that step() uses; with "microbatch" none, since more microbatches follow.
Kind = Literal["microbatch", "release", "public gradients"]

_IN_TURNS = (
    "one of several private optimizers stepped in some microbatches of a logical batch and not in "
    "others, so the number of microbatches, which is private, would determine its releases: "
    "call step() of each optimizer in every iteration, or choose by loader.releases: "
    "`if loader.releases % 5 == 0: optimizers[1].step()`"
)


class Turns:
    """Decides on which gradients the optimizers of a model step; all use the same gradients.

    If one of the optimizers steps a second time, a new step begins. An optimizer that does not
    step before the next microbatch or backward skips the release.

    Args:
        optimizer: the wrapped optimizer, or several as one.
        step: the `PrivateStep`, which owns the logical batch.
    """

    def __init__(self, optimizer: Optimizer, step: PrivateStep):
        self._optimizer = optimizer
        self._step = step
        self._draw: int | None = None
        # For each optimizer, the microbatches in which it stepped, except the last microbatch.
        self._stepped_in: dict[Optimizer, set[int]] = {}
        self._end()

    def _end(self) -> None:
        self._kind: Kind | None = None
        self._gone: set[Optimizer] = set()
        self._progress = self._step.progress

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer's parameters, and the sums of the logical batch."""
        step = self._step
        self._gone.add(optimizer)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        step.public.drop(own)
        step.gradients.drop(own)
        if step.is_open:  # `drop_sums` also ends a forward that waits for its backward
            step.drop_sums()

    def take(self, optimizer: Optimizer) -> Kind:
        """Prepare `.grad` for a step of the optimizer, and return what it contains.

        Raises:
            RuntimeError: the released gradients were cleared.
            PrivateRefusal: see `PrivateOptimizer.step`; or an optimizer stepped in only some
                microbatches of a logical batch.
        """
        step = self._step
        step.options.refuse_changed()
        has_more = step.public.are_waiting and self._kind != "microbatch"
        if optimizer in self._gone or has_more or self._progress != step.progress:
            self._end()
        if self._kind is None:
            self._kind = self._step_first(optimizer)
        elif self._kind != "microbatch":
            self._agree("the turn of another optimizer", optimizer)
        self._gone.add(optimizer)
        if self._kind == "microbatch":
            self._note_microbatch(optimizer)
        if self._kind == "release":
            with step.dropping():
                step.gradients.refuse_cleared(step.parameters_of(optimizer))
        return self._kind

    def _note_microbatch(self, optimizer: Optimizer) -> None:
        """Refuse optimizers that step in different microbatches of a logical batch.

        An optimizer that steps in the last microbatch alone is allowed.
        """
        tracker = self._step.tracker
        if tracker.current is None:  # a batch of Opacus' BatchMemoryManager
            return
        if tracker.current.draw != self._draw:
            each, self._stepped_in = self._stepped_in, {}
            self._draw = tracker.current.draw
            everywhere = set().union(*each.values())
            if any(own != everywhere for own in each.values()):
                raise PrivateRefusal(_IN_TURNS) from None
        self._stepped_in.setdefault(optimizer, set()).add(tracker.received)

    def _step_first(self, optimizer: Optimizer) -> Kind:
        """End the microbatch or logical batch; return which gradients the step uses."""
        step = self._step
        if step.public.are_waiting and not step.is_open and step.tracker.has_left_trial:
            self._set_public_gradients(optimizer)
            return "public gradients"
        if step.tracker.step_ends_microbatch():
            step.public.begin_microbatch(begins_draw=False)
            return "microbatch"
        step.gradients.refuse_frozen(self._optimizer)
        if step.public.are_waiting and not step.is_open and step.tracker.is_between_batches:
            self._set_public_gradients(optimizer)
            return "public gradients"
        self._take_release(optimizer)
        return "release"

    def _take_release(self, optimizer: Optimizer) -> None:
        """End the logical batch; set `.grad` to its release plus gradients of public data."""
        step = self._step
        if step.released is None:
            step.release(signalled=step.tracker.signalled_now)
        gradients = self._public_gradients("a private batch", optimizer)
        with step.dropping():
            step.gradients.refuse_cleared(step.released or ())
        for parameter, grad in gradients.items():
            if parameter.grad is not None:
                parameter.grad.add_(grad)
        step.public.drop()
        step.end()

    def _set_public_gradients(self, optimizer: Optimizer) -> None:
        """Set `.grad` to gradients of public data alone; nothing is released or charged."""
        step = self._step
        step.gradients.drop()
        for parameter, grad in self._public_gradients("public data alone", optimizer).items():
            parameter.grad = grad
        step.public.drop()
        step.parameters_change()

    def _public_gradients(self, kind: str, optimizer: Optimizer) -> dict[nn.Parameter, Tensor]:
        """Return public gradients averaged over the ranks, which call this together."""
        self._agree(kind, optimizer)
        return self._step.public.mean(self._step.sums.ranks)

    def _agree(self, kind: str, optimizer: Optimizer) -> None:
        """Raise unless all ranks step with the same optimizer on the same type of gradients."""
        step = self._step
        step.admission.of_step(kind, step.parameters_of(optimizer), step.public.names)
