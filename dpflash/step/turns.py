"""Turns: several optimizers step on one release, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch.optim import Optimizer

# What a call of step() is on; that of a microbatch, which ended no logical batch, does nothing.
Kind = Literal["microbatch", "release", "public gradients"]


class Turns:
    """The first optimizer to step decides what the step is on, and each other one follows once.

    A second step() of one optimizer is the first of another step. An optimizer that has not
    stepped until the next backward has missed its turn.
    """

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """The next step() is a first one."""
        self._kind: Kind | None = None
        self._gone: set[Optimizer] = set()

    def leave(self, optimizer: Optimizer) -> None:
        """The optimizer follows no more: its gradients were dropped."""
        self._gone.add(optimizer)

    def take(self, optimizer: Optimizer, decide: Callable[[], Kind], *, is_new: bool) -> Kind:
        """What the step of this optimizer is on.

        Args:
            optimizer: the wrapped one.
            decide: makes a first step for all optimizers; where it raises there was none.
            is_new: whether there is more to step on than the first one had.
        """
        if optimizer in self._gone:
            self.end()
        elif is_new and self._kind != "microbatch":
            self.end()
        if self._kind is None:
            self._kind = decide()
        self._gone.add(optimizer)
        return self._kind
