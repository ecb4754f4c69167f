"""The two backwards of ghost clipping: what is summed must be what was normed.

The first one norms the samples' gradients, the second one sums them by factors of these norms.
What differs between the two would be summed without a bound. So where a device repeats its bits,
keyed digests of each use's rows are compared; elsewhere the norms are taken again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .digests import is_deterministic, row_digests
from .watch import WatchedGate, refuse_together

__all__ = ["BackwardsDiffer", "First", "Second"]

# How much larger a norm may be in the second backward by rounding alone, relative.
_ROUNDING = 2.0**-12
_ROUNDING_16_BIT = 2.0**-9

_DIFFERENT = (
    "{where} had other gradients in the second backward of grad_sample_mode='ghost' than in the "
    "first, whose norms bound them, so nothing was released: something between forward and "
    "backward is random or keeps state (checkpointing around Python's random or without the "
    "random state, a hook), or adds in parallel (torch.use_deterministic_algorithms(True) helps "
    "there). Make it repeatable, or pass grad_sample_mode='instantiate' or 'book_keeping'"
)


class BackwardsDiffer(RuntimeError):
    """The two backwards of one batch had different gradients."""


class First:
    """Sees the backward that norms.

    Attributes:
        exact: whether digests are compared; else norms.
        uses: digests of all rows of each use, by parameter, in the order in which they came.
        dtypes: of all rows.
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
        """The squared norms `[B]` to clip by: the greatest that the second backward may have."""
        if self.exact:
            return squares
        narrow = any(dtype.itemsize < 4 for dtype in self.dtypes)
        return squares * (1 + (_ROUNDING_16_BIT if narrow else _ROUNDING)) ** 2


class Second(First):
    """Sees the backward that sums, and compares it with the first.

    Args:
        first: of the same gate.
        squares: of its norms, `[B]`, as `first.allowed` gave them.
        group: ranks that raise together.
    """

    def __init__(self, first: First, squares: Tensor, group: ProcessGroup | None) -> None:
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
            # A sample whose norm is not finite is removed.
            if bool((~(squares <= self._squares) & self._squares.isfinite()).any()):
                refusal = refusal or _DIFFERENT.format(where="the layers")
        refuse_together(refusal, self._group, "the second backward", BackwardsDiffer)

    def _unequal(self, gate: WatchedGate) -> str | None:
        """The first parameter whose uses differ, in words; None where none do."""
        first, second = self._first.uses, self.uses
        found: list[tuple[int, Tensor]] = []
        # In the order in which they came, so that the one nearest to the losses is named.
        for position in {**first, **second}:
            one, two = first.get(position, []), second.get(position, [])
            where = _DIFFERENT.format(where=f"layer '{gate.layer_of(position)}'")
            if [len(rows) for rows in one] != [len(rows) for rows in two]:
                return where
            for before, after in zip(itertools.chain(*one), itertools.chain(*two), strict=True):
                if before.shape != after.shape:
                    return where
                found.append((position, (before != after).any()))
        # One answer of the device for all of them.
        if not found or not bool(torch.stack([differs for _, differs in found]).any()):
            return None
        position = next(position for position, differs in found if bool(differs))
        return _DIFFERENT.format(where=f"layer '{gate.layer_of(position)}'")
