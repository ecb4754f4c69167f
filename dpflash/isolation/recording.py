"""Recording: each sample's losses, layer inputs and gradients in a run."""

from __future__ import annotations

import torch
from torch import Tensor

from .backward_rows import BackwardRows
from .forward_rows import ForwardRows


class Recording:
    """Losses, layers' inputs and per-sample gradients of a run that trains nothing.

    A batch is "taken apart" if its losses are computed one sample at a time.

    Args:
        real: `[U]`, bool: the samples that are not padding.
        has_rows: whether inputs and gradients are recorded besides the losses.

    Attributes:
        calls: the calls of the model, in order.
        batch: digests `[U]` of the tensors of a batch that is taken apart.
        losses: `[U]`, or a scalar; None before the backward.
        backward: watches the per-sample gradients; None if there was no backward.
        rows: for a batch that is taken apart, a watch of each sample's gradients, or None if
            the sample's backward could not run.
    """

    def __init__(self, real: Tensor, *, has_rows: bool) -> None:
        self.has_rows = has_rows
        self.calls: list[ForwardRows] = []
        self.losses: Tensor | None = None
        self.batch: list[Tensor] = []
        self.backward: BackwardRows | None = None
        self.rows: list[BackwardRows | None] = []
        self._real = real

    @property
    def had_backward(self) -> bool:
        """Whether a loss was backpropagated; a backward for gradients of inputs does not count."""
        backward = self.backward
        return self.losses is not None or (backward is not None and backward.has_met_gate)

    def take_apart(self, batch: list[Tensor]) -> None:
        """Note that losses are computed one sample at a time, from rows with these digests."""
        self.has_rows, self.backward, self.batch, self.rows = False, None, batch, []

    def hold(self, losses: Tensor) -> None:
        self.losses = losses.detach().clone()

    def watch(self) -> BackwardRows:
        """Begin to watch a backward; return the watch."""
        self.backward = BackwardRows(self._real | ~self._real, self._real)
        return self.backward

    def watch_row(self) -> BackwardRows:
        """Begin to watch the backward of the next sample, if losses are computed one by one.

        Two runs may round differently, since a recurrent layer pads each sample to the longest
        sample that the layer has received so far.
        """
        one = torch.ones(1, dtype=torch.bool)
        watch = BackwardRows(one, one, rounds=True)
        self.rows.append(watch)
        return watch

    def drop_backward(self) -> None:
        """Note that the backward could not run."""
        self.backward = None
