"""Makes the copy under test private: without clipping bounds that bind, and without noise."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from ..clipping.backward import PrivateBackward
from ..clipping.groups import flat_groups
from ..clipping.planner import STORED
from ..grad_rules.convert import attach, layers_of
from ..optimize.levels import PLAIN
from ..optimize.wrapper import ForwardWrapper
from ..packing import Units
from ..sampling.slots import RealRows
from ..sampling.tracker import BatchTracker
from ..step import ClippedSums, Clipper
from .report import ITSELF
from .subject import Subject


class _Unreleased:
    """Clipped sums of one backward, in place of a private step: nothing is charged or released."""

    def __init__(self, sums: ClippedSums):
        self.sums = sums
        self.tracker = BatchTracker()
        self.rows = RealRows(self.tracker.real_rows)
        self.add, self.add_clipped = sums.add, sums.add_clipped
        self.noting_refusals = nullcontext
        self.releases, self.is_open = 0, False
        self.tracker.attach(self)

    def attach(self, clipper: Clipper) -> None:
        self._clipper = clipper

    def begin_microbatch(self, samples: int, units: Units | None, *, begins_draw: bool) -> None:
        self._clipper.begin_microbatch(samples, units)

    def begin_row(self) -> None:
        """No batch is taken apart here."""

    def may_begin(self, new_epoch: bool) -> bool:
        return True

    def begin_backward(self) -> None:
        self.sums.begin(math.inf)

    def begin_trial(self) -> None:
        """There are no trials here."""

    def before_gate(self) -> None:
        """Gates of public data are not told apart."""

    def end_backward(self) -> None:
        """The sums are read from here."""

    def discard(self) -> None:
        for parameter in self.sums.trained:
            parameter.grad = None
        self.sums.clear()
        self.tracker.dropped()
        self._clipper.end_batch(parameters_change=False)

    abandon = discard

    @contextmanager
    def dropping(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard()
            raise


def made_private(subject: Subject, loss_reduction: str | None) -> PrivateBackward:
    """Make the model of a subject private; the sums are in `.step.sums`."""
    trained = list(subject.trained.values())
    sums = ClippedSums(trained, names={p: n for n, p in subject.trained.items()})
    backward = PrivateBackward(
        flat_groups(trained),
        _Unreleased(sums),
        STORED,
        loss_reduction=loss_reduction,
        clip_function="hard",
    )
    for parameter in trained:
        parameter.grad = None
    attach(subject.model, layers_of(subject.model), backward)
    ForwardWrapper(subject.model, backward, PLAIN).put()
    return backward


def named_in(error: Exception, model: nn.Module) -> str:
    """The first module of a model that an error names; the model itself if it names none."""
    modules = dict(model.named_modules())
    return next((n for n in re.findall(r"'([^']+)'", str(error)) if n in modules), ITSELF)
