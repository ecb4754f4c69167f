"""Compares the two backwards of ghost clipping.

The first backward computes the norms; the second sums gradients with factors from these norms. A
gradient that differs between the backwards would be summed without a bound. On a deterministic
device, digests of each operation's rows are compared; on other devices, norms are compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils import checkpoint

from ..refusal import PrivateRefusal
from .digests import is_deterministic, row_digests
from .watch import WatchedGate, refuse_together

# Relative growth of a norm in the second backward that counts as rounding.
_ROUNDING = 2.0**-12
_ROUNDING_16_BIT = 2.0**-9

_DIFFERENT = (
    "{where} had other gradients in the second backward of grad_sample_mode='ghost' than in the "
    "first, whose norms bound them, so nothing was released. An operation is random, keeps state "
    "(a hook, checkpointing around Python's random or without the random state), or adds in a "
    "varying order on parallel threads. Make it repeatable "
    "(torch.use_deterministic_algorithms(True) fixes the order), or pass "
    "grad_sample_mode='instantiate' or 'book_keeping'"
)


@contextmanager
def _selected_kept() -> Iterator[None]:
    """Make selective activation checkpointing keep saved tensors after their first use."""
    kind: Any = checkpoint._CachedTorchDispatchMode
    enter, leave = kind.__enter__, kind.__exit__
    held: dict[int, dict[Any, Any]] = {}

    def hold(mode: Any) -> Any:
        held[id(mode)] = {key: copy.copy(saved) for key, saved in mode.storage.items()}
        return enter(mode)

    def restore(mode: Any, *error: Any) -> Any:
        mode.storage.update(held.pop(id(mode)))
        return leave(mode, *error)

    with patch.multiple(kind, __enter__=hold, __exit__=restore):
        yield


def grad_before_backward(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the outputs; keep the graph for the backward that follows."""
    with _selected_kept():
        return torch.autograd.grad(
            outputs, inputs, grad_outputs=seeds, retain_graph=True, allow_unused=True
        )


class BackwardsDiffer(PrivateRefusal):
    """The two backwards of one batch had different gradients."""


class FirstBackward:
    """Watches the backward that computes norms.

    Attributes:
        exact: True if digests are compared, False if norms are compared.
        uses: digests of the rows of each operation, by parameter, in order.
        dtypes: the floating-point dtypes of the rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.exact = is_deterministic(device)
        self.uses: dict[int, list[list[Tensor]]] = {}
        self.dtypes: set[torch.dtype] = set()

    def use(self, gate: WatchedGate, position: int, rows: tuple[Tensor, ...]) -> None:
        self.dtypes |= {t.dtype for t in rows if t.is_floating_point()}
        digests = [row_digests(t) for t in rows] if self.exact else []
        self.uses.setdefault(position, []).append(digests)

    def gate(self, gate: WatchedGate, grads: Sequence[Tensor | None]) -> None:
        for position, grad in enumerate(grads):
            if grad is not None and gate.is_dense(position):
                self.use(gate, position, (grad,))

    def allowed(self, squares: Tensor) -> Tensor:
        """Return the squared norms `[B]` to clip by, with a margin for rounding unless exact."""
        if self.exact:
            return squares
        narrow = any(dtype.itemsize < 4 for dtype in self.dtypes)
        return squares * (1 + (_ROUNDING_16_BIT if narrow else _ROUNDING)) ** 2


class SecondBackward(FirstBackward):
    """Watches the backward that sums, and compares it with the first backward.

    Args:
        first: watch of the first backward.
        squares: squared norms `[B]` from `first.allowed`.
        group: ranks that raise an error together.
    """

    def __init__(self, first: FirstBackward, squares: Tensor, group: ProcessGroup | None) -> None:
        super().__init__(squares.device)
        self.exact = first.exact
        self._first = first
        self._squares = squares
        self._group = group

    def gate(self, gate: WatchedGate, grads: Sequence[Tensor | None]) -> None:
        super().gate(gate, grads)
        refusal = self._unequal(gate)
        if not self.exact:
            squares = gate.finish_norms(grads)
            # Samples whose norm is not finite contribute zero, so they are not compared.
            if bool((~(squares <= self._squares) & self._squares.isfinite()).any()):
                refusal = refusal or _DIFFERENT.format(where="the layers")
        refuse_together(refusal, self._group, "the second backward", BackwardsDiffer)

    def _unequal(self, gate: WatchedGate) -> str | None:
        """Return a message about the first parameter whose operations differ, or None."""
        first, second = self._first.uses, self.uses
        found: list[tuple[int, Tensor]] = []
        # In order of arrival, so that the message names the layer nearest to the losses.
        for position in {**first, **second}:
            one, two = first.get(position, []), second.get(position, [])
            where = _DIFFERENT.format(where=f"layer '{gate.layer_of(position)}'")
            if [len(rows) for rows in one] != [len(rows) for rows in two]:
                return where
            for before, after in zip(itertools.chain(*one), itertools.chain(*two), strict=True):
                if before.shape != after.shape:
                    return where
                found.append((position, (before != after).any()))
        # Wait for the device once.
        if not found or not bool(torch.stack([differs for _, differs in found]).any()):
            return None
        position = next(position for position, differs in found if bool(differs))
        return _DIFFERENT.format(where=f"layer '{gate.layer_of(position)}'")
