"""Sandbox: restores the state of model and loop that a run for a trial changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Number
from typing import Any, Protocol

import numpy as np
from torch import nn
from torch.optim import Optimizer

from ..refusal import PrivateRefusal
from ..verification.attributes import OwnAttributes, is_same
from .loop_state import Generators, Options

_NUMBERS = (Number, np.generic, str)
_COUNTED = (
    "the loop set optimizer option '{}' to different values for a microbatch and for its trial, "
    "so it counts iterations or measures their time: trials and microbatches are iterations, and "
    "their number is private. After optimizer.step() write\n"
    "    if loader.is_last: scheduler.step()\n"
    "and compute options that you set yourself from loader.releases"
)


class Restorable(Protocol):
    """Saved contents that can be restored."""

    def restore(self) -> None:
        """Restore the contents."""


class Sandbox:
    """Saves the state of model and loop, and restores it after each run of a microbatch.

    Values that the loop sets before the first forward (a learning rate, `model.tau`) are not
    restored, since the loop may set such values only once. Later runs, and the microbatch itself,
    keep the values of the first run. Numbers that the loop sets only after the microbatch itself
    (as with `if loader.is_last`) are not restored either. The loader seeds the global generators
    with the same seed for each run.

    Args:
        modules: (name, module) of the model; the modules' own attributes are restored.
        contents: function that returns the contents of buffers that a forward may change.
        optimizers: the optimizers whose options are restored.
        numbers: options of the next release, by name, which are restored too.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        contents: Callable[[], Restorable],
        optimizers: Sequence[Optimizer],
        numbers: dict[str, float],
    ) -> None:
        self._modules = list(modules)
        self._contents = contents
        self._optimizers = optimizers
        self._numbers = numbers
        self._of_model: list[Restorable] = []
        self._generators: Generators | None = None  # None outside of runs.
        self._begun: OwnAttributes | None = None  # When a run began, until its first forward.
        self._options: Options | None = None  # At the first forward of the first run.
        self._at_first: Options | None = None  # When the first run began.
        self._behind: Options | None = None  # At the end of the last run.
        self._counts = 0
        self._has_met = False
        self._after_forward: OwnAttributes | None = None
        self._set: list[tuple[nn.Module, str, Any]] = []  # Set by the loop, for all runs.

    def attributes(self) -> OwnAttributes:
        """Return the current attributes of the modules."""
        return OwnAttributes(self._modules)

    def enter(self, attributes: OwnAttributes | None = None) -> None:
        """Begin a run; the loop receives its batch next.

        Args:
            attributes: attributes to set on the modules; by default copies of the current ones.
        """
        held = self.attributes()
        self._generators = Generators()
        self._of_model = [held]
        if attributes is None:
            held.restore_copies()
        else:
            behind, self._after_forward = self._after_forward, None
            changed = [] if behind is None else behind.changed()
            attributes.restore()
            for module, name, before, value in changed:
                if isinstance(value, _NUMBERS) and is_same(vars(module).get(name), before):
                    vars(module)[name] = value
            self._set_again()
        self._begun = self.attributes()
        if self._options is None:
            self._at_first = self._present()

    def begin_forward(self) -> None:
        """Note a call of the model, in a run or for the microbatch itself."""
        if self._generators is None:
            if self._options is not None and not self._has_met:
                self._has_met = True
                self._set_once()
        elif self._begun is not None:
            self._set += [
                (module, name, value) for module, name, _, value in self._begun.changed()
            ]
            self._begun = None
            self._of_model.insert(0, self._contents())
            if self._options is None:
                self._options = self._present()
            else:
                self._set_once()

    def end_forward(self) -> None:
        """Note that a call of the model has returned."""
        if self._generators is None and self._options is not None:
            self._after_forward = self.attributes()

    def leave(self, *, loop: bool = True) -> None:
        """End the run; restore the model and, with `loop`, the loop's state."""
        if loop and self._generators is not None:
            self._generators.restore()
            if self._options is not None and self._at_first is not None:
                self._behind = self._present()
                self._at_first.restore()
        for held in self._of_model:
            held.restore()
        if self._of_model:
            self._set_again()
        self._generators, self._begun, self._of_model = None, None, []

    def end_microbatch(self) -> None:
        """End a microbatch, because the loop asks for another one.

        Raises:
            PrivateRefusal: for the second time, an option depended on the count of iterations.
        """
        if self._options is not None and self._behind is not None:
            changed = self._behind.changed_otherwise(self._options, self._present())
            # One change is allowed: a loop that sets options by releases may change one now.
            self._counts += changed is not None
            if changed is not None and self._counts > 1:
                raise PrivateRefusal(_COUNTED.format(changed)) from None
        self._options = self._at_first = self._behind = None
        self._has_met, self._set = False, []

    def _present(self) -> Options:
        schedulers = [] if self._generators is None else self._generators.schedulers
        return Options(self._optimizers, schedulers, self._numbers)

    def _set_once(self) -> None:
        """Set the first run's options again, since the loop may set options only once."""
        assert self._options is not None and self._at_first is not None
        changed = self._options.changed_otherwise(self._at_first, self._present())
        if changed is not None:
            raise PrivateRefusal(_COUNTED.format(changed)) from None
        self._options.restore(changed_since=self._at_first)

    def _set_again(self) -> None:
        for module, name, value in self._set:
            vars(module)[name] = value
