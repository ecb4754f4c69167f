"""PrivateCopy: a private copy of the model under test, with infinite bounds and no noise."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from ..clipping.backward import PrivateBackward
from ..clipping.groups import flat_groups
from ..clipping.planner import STORED
from ..grad_rules.convert import attach, layers_of
from ..optimize.levels import PLAIN
from ..optimize.wrapper import ForwardWrapper
from ..packing import Units
from ..sampling.slots import RealRows
from ..sampling.tracker import BatchMark, BatchTracker
from ..step import ClippedSums, Clipper
from .report import ITSELF
from .subject import Subject


class PrivateCopy:
    """Makes the tested model private, with infinite bounds and without noise.

    Attributes:
        subject: the tested model, its loss and its batch.
        modules: the modules by name.
        backward: the private backward of the model.
    """

    def __init__(self, subject: Subject):
        trained = subject.trained
        self.subject = subject
        self.modules = {n or ITSELF: m for n, m in subject.model.named_modules()}
        sums = ClippedSums([*trained.values()], names={p: n for n, p in trained.items()})
        self._step = _Unreleased(sums)
        self.backward = PrivateBackward(
            flat_groups([*trained.values()]),
            self._step,
            STORED,
            loss_reduction=subject.loss_reduction,
            clip_function="hard",
        )
        for parameter in trained.values():
            parameter.grad = None
        attach(subject.model, layers_of(subject.model), self.backward)
        ForwardWrapper(subject.model, self.backward, PLAIN).put()

    def sums(self, batch: Any, real: Tensor | None = None) -> dict[str, Tensor]:
        """Run a private backward; return gradients summed over the samples in the mask `real`."""
        subject, step = self.subject, self._step
        mark = BatchMark(0, subject.size, last=True, real=real)
        step.tracker.begin_microbatch(mark, epoch=0)
        self.backward.backward(subject.losses(batch))
        found = {n: x for n, p in subject.trained.items() if (x := step.sums.get(p)) is not None}
        step.discard()
        step.tracker.released()
        return found

    def named_in(self, error: Exception) -> str:
        """Return the first module that an error names, or the model itself if it names none."""
        return next((n for n in re.findall(r"'([^']+)'", str(error)) if n in self.modules), ITSELF)


def frozen(model: nn.Module, names: set[str]) -> nn.Module:
    """Freeze the modules `names` of a model, and return the model."""
    for name, module in model.named_modules():
        if (name or ITSELF) in names:
            module.eval().requires_grad_(False)
    return model


class _Unreleased:
    """Replaces the private step: holds the sums of one backward, and makes no optimizer step."""

    def __init__(self, sums: ClippedSums):
        self.sums = sums
        self.tracker = BatchTracker()
        self.rows = RealRows(self.tracker.real_rows)
        self.add, self.add_clipped = sums.add, sums.add_clipped
        self.noting_refusals = self.dropping = nullcontext
        self.releases, self.is_open = 0, False
        self.tracker.attach(self)

    def attach(self, clipper: Clipper) -> None:
        self._clipper = clipper

    def begin_microbatch(self, samples: int, units: Units | None, *, begins_draw: bool) -> None:
        self._clipper.begin_microbatch(samples, units)

    def may_begin(self, new_epoch: bool, draw: int | None) -> bool:
        return True

    def begin_backward(self) -> None:
        self.sums.begin(math.inf)

    def _nothing(self) -> None:
        """Do nothing: a check runs no batch row by row, and no isolation tests (trials)."""

    begin_row = begin_trial = before_gate = end_backward = _nothing

    def discard(self) -> None:
        self.sums.clear()
        self.tracker.dropped()
        self._clipper.end_batch(parameters_change=False)

    abandon = discard
