"""Interface of watches, which observe per-sample gradients at the clipping gates.

An operation is one layer call in a forward; `dpflash.clipping.gate` explains gates and handles.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..distributed.collectives import exchanging, gather_rows
from ..packing import Units
from ..refusal import PrivateRefusal

_T = TypeVar("_T")


def alive(reference: weakref.ref[_T]) -> _T:
    """Return the object of a weak reference that a node of autograd's graph holds.

    References from nodes are weak because Python's garbage collector does not see cycles there.
    """
    found = reference()
    if found is None:
        raise RuntimeError(
            "the losses are of a private model that does not exist any more: keep the model and "
            "its optimizer until the backward"
        )
    return found


class WatchedGate(Protocol):
    """The part of a clipping gate that a watch uses."""

    @property
    def index(self) -> int:
        """Number of the gate's clipping group."""

    @property
    def size(self) -> int:
        """The number of the gate's parameters."""

    def layer_of(self, position: int) -> str:
        """Return the dotted name of the layer that holds the parameter at this position."""

    def by_sample(self, x: Tensor) -> tuple[Tensor, Units | None]:
        """Return (x `[B, ...]`, None), or (x `[n, ...]`, units) if units group the n rows."""

    def is_dense(self, position: int) -> bool:
        """Return whether an operation returns the parameter's gradient to the handle."""

    def finish_norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the group's squared norms `[B]`; grads are the handles' gradients."""


class Watch(Protocol):
    """Observes each operation on a matrix parameter, then the gradients of a gate's handles."""

    def use(self, gate: WatchedGate, position: int, rows: tuple[Tensor, ...]) -> None:
        """Record an operation's tensors; the first tensor is linear in the losses' gradient."""

    def gate(self, gate: WatchedGate, grads: Sequence[Tensor | None]) -> None:
        """Record a gate after all its operations; raise PrivateRefusal to refuse the backward."""


def refuse_together(
    refusal: str | None,
    group: ProcessGroup | None,
    name: str,
    error: type[PrivateRefusal] = PrivateRefusal,
) -> None:
    """Raise on all ranks of a group if one of them refuses.

    Args:
        refusal: why this rank refuses, without values; None if it does not refuse.
        group: the ranks, all of which call this; None for a single process.
        name: name of the exchange, for messages.
        error: class of the error.

    Raises:
        PrivateRefusal: a rank refuses. The message is this rank's, or else another rank's.
    """
    rows = gather_rows([int(refusal is not None)], group, name)
    if not any(row[0] for row in rows):
        return
    reasons: list[str | None] = [refusal] * len(rows)
    if len(rows) > 1:
        with exchanging(name, group):
            dist.all_gather_object(reasons, refusal, group=group)
    reason = refusal or next(reason for reason in reasons if reason is not None)
    raise error(reason) from None
