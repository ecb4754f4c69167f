"""Makes the copy under test private: without clipping bounds that bind, and without noise."""

from __future__ import annotations

import re

from torch import nn

from ..clipping.backward import PrivateBackward
from ..clipping.groups import flat_groups
from ..clipping.planner import STORED
from ..grad_rules.convert import attach, layers_of
from ..optimize.levels import PLAIN
from ..optimize.wrapper import ForwardWrapper
from ..sampling.tracker import BatchTracker
from ..step import ClippedSums
from .report import ITSELF
from .subject import Subject


def made_private(subject: Subject, loss_reduction: str | None) -> PrivateBackward:
    """Make the model of a subject private; the sums are in `.step`."""
    trained = list(subject.trained.values())
    sums = ClippedSums(
        trained, names={p: n for n, p in subject.trained.items()}, tracker=BatchTracker()
    )
    backward = PrivateBackward(
        flat_groups(trained),
        sums,
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
