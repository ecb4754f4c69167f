"""Sandbox: what an altered microbatch may change in model and loop, and what is restored after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from ..verification.attributes import OwnAttributes
from .loop_state import LoopState


class Restorable(Protocol):
    """Contents at one time."""

    def restore(self) -> None:
        """Restore them."""


class Sandbox:
    """Takes the state of model and loop, and restores it.

    The loader seeds the global generators for each microbatch, with its trials alike.

    Args:
        modules: (name, module) of the model, whose own attributes are restored.
        contents: returns the buffers' contents that a forward may change.
        optimizers: whose options are restored.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        contents: Callable[[], Restorable],
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._modules = list(modules)
        self._contents = contents
        self._optimizers = optimizers
        self._of_model: list[Restorable] = []
        self._of_loop: LoopState | None = None

    def attributes(self) -> OwnAttributes:
        """What the modules keep now."""
        return OwnAttributes(self._modules)

    def enter(self, attributes: OwnAttributes | None = None) -> None:
        """Hold the state.

        Args:
            attributes: what the modules are to find; copies of what they keep by default.
        """
        held = self.attributes()
        self._of_loop = LoopState(self._optimizers)
        self._of_model = [self._contents(), held]
        if attributes is None:
            held.restore_copies()
        else:
            attributes.restore()

    def leave(self, *, loop: bool = True) -> None:
        """Restore the state; that of the loop only if asked for."""
        if loop and self._of_loop is not None:
            self._of_loop.restore()
        for held in self._of_model:
            held.restore()
        self._of_loop, self._of_model = None, []
