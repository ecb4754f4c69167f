"""BackwardRows: records per-sample gradients in a backward whose gradients are not summed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..packing import Units
from ..verification.digests import greatest, row_summaries
from ..verification.two_backwards import grad_before_backward
from ..verification.watch import Watch, WatchedGate

# Number of entries that are copied at a time.
_AT_ONCE = 1 << 24

Slot = tuple[int, int]  # (group, position of the parameter in it)
_MIXED = (
    "layer '{layer}' got a gradient for samples whose losses have weight 0, so nothing was "
    "released: after this layer, losses depend on several samples (a mean or other statistics of "
    "the batch, a contrastive loss, which has no per-sample gradients), or rows are sorted or "
    "flipped, so that a sample's row and its loss have different indices. Keep each sample in its "
    "row, in all layers and losses. Take negatives from the sample's own entry: negatives from "
    "other rows, even detached, couple samples. engine.check helps to find the operation"
)


class ProvableBackward(Protocol):
    """The part of a private backward that isolation tests use."""

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile compiled the model under `allow_second_backwards`."""

    def handles(self) -> Iterator[tuple[tuple[int, int], str, bool, Tensor]]:
        """Yield ((group, position), layer, whether to watch the handle's gradient, handle)."""

    def only_watched(self, watch: Watch) -> AbstractContextManager[None]:
        """In the with block, only this watch sees operations; clipping gates save no tensors."""

    @property
    def is_compared(self) -> bool:
        """Whether the backward is compared with that of an altered microbatch."""

    def crossed(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], size: int) -> None:
        """Receive a scalar loss's gradients `[B, ...]` with respect to the model's outputs."""

    def refuse_reduction(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], size: int
    ) -> None:
        """Raise if these gradients contradict the declared reduction."""

    def discard(self) -> None:
        """Drop the logical batch."""


class WatchedRows(Watch, Protocol):
    """Watches per-sample gradients, also in a backward that runs no clipping node (gate)."""

    def dense(self, slot: Slot, layer: str, grad: Tensor | None) -> Tensor | None:
        """Record a parameter's per-sample gradients; return the gradients to pass on."""


@dataclass
class _Use:
    """Describes the rows of an operation in a backward: digests, whether nonzero, shape."""

    summaries: Tensor
    nonzero: Tensor
    number: int
    lengths: torch.Size


class BackwardRows:
    """Records the rows of a backward in which some samples have weight 0.

    Args:
        weights, real: see Attributes.
        rounds: whether rows may differ by rounding on every device.

    Attributes:
        weights: `[B]`, bool: whether the sample's loss has weight 1.
        real: `[B]`, bool: whether the row is a sample.
        uses: the operations on each parameter, in order.
        layers: the name of each parameter's layer.
        refusal: message if a sample of weight 0 has a nonzero row; names the first such layer of
            the backward.
        is_foreign: whether there were rows of another batch; other code refuses such rows.
        has_met_gate: whether a clipping gate ran: then this is a backward of losses.
        left_out: `[B]`, bool: samples that are not compared, because a row is not finite.
        dtypes: the dtypes of all rows.
    """

    def __init__(self, weights: Tensor, real: Tensor, *, rounds: bool = False) -> None:
        self.weights = weights
        self.real = real
        self.rounds = rounds
        self.uses: dict[Slot, list[_Use]] = {}
        self.layers: dict[Slot, str] = {}
        self.refusal: str | None = None
        self.is_foreign = self.has_met_gate = False
        self.left_out = torch.zeros_like(weights)
        self.dtypes: set[torch.dtype] = set()
        self._numbers = itertools.count()

    def use(self, gate: WatchedGate, position: int, rows: tuple[Tensor, ...]) -> None:
        self._see((gate.index, position), gate.layer_of(position), *gate.by_sample(rows[0]))

    def gate(self, gate: WatchedGate, grads: Sequence[Tensor | None]) -> None:
        """Record a clipping gate's per-sample gradients; only the loop's backwards run gates."""
        self.has_met_gate = True
        for position, grad in enumerate(grads):
            if grad is not None and gate.is_dense(position):
                self._see((gate.index, position), gate.layer_of(position), grad)

    def dense(self, slot: Slot, layer: str, grad: Tensor | None) -> Tensor | None:
        """Record a parameter's per-sample gradients; return zeros that take no memory."""
        if grad is None:
            return None
        self._see(slot, layer, grad)
        return grad.new_zeros(()).expand_as(grad)

    def _see(self, slot: Slot, layer: str, rows: Tensor, units: Units | None = None) -> None:
        """Record each sample's row, `[B, ...]`, or with `units` all their entries `[n, ...]`."""
        rows = rows.detach()
        if not rows.ndim or (len(rows) if units is None else units.size) != len(self.weights):
            self.is_foreign = True
            return
        self.dtypes.add(rows.dtype)
        flat = rows.reshape(len(rows), rows.shape[1:].numel())
        sizes = greatest(flat)
        # Add 0.0, which turns -0.0 into 0.0: a sum of zeros may have either sign.
        parts = flat.split(max(1, _AT_ONCE // max(1, flat.shape[1])))
        summaries = torch.cat([row_summaries(part + 0.0, rounds=self.rounds) for part in parts])
        if units is not None:
            sizes = units.padded(sizes).amax(1)
            summaries = row_summaries(units.padded(summaries))
        self.left_out |= ~sizes.isfinite().cpu()
        use = _Use(summaries, (sizes != 0).cpu(), next(self._numbers), rows.shape[1:])
        self.uses.setdefault(slot, []).append(use)
        self.layers[slot] = layer
        if self.refusal is None and bool((~self.weights & use.nonzero & ~self.left_out).any()):
            self.refusal = _MIXED.format(layer=layer)


def allow_second_backwards() -> None:
    """Make torch.compile, in this thread, keep saved tensors for a second backward."""
    from torch._functorch import config  # slow to load

    config.donated_buffer = False


def differentiate(
    owner: ProvableBackward,
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    watch: WatchedRows,
    *,
    keeps_graph: bool = True,
) -> bool:
    """Run the backward up to the per-sample gradients, and show these gradients to the watch.

    Returns:
        Whether the backward could run: a compiled graph may allow only a single backward.
    """
    handles, hooks = [], []
    for slot, layer, counts, handle in owner.handles():
        handles.append(handle)
        if counts:
            hooks.append(handle.register_hook(functools.partial(watch.dense, slot, layer)))
    if not handles:
        return False  # No loss reaches a private layer: other code raises an error.
    for node in {x.grad_fn for x in outputs if x.grad_fn} if owner.is_compiled else ():
        # A GPU's backward runs in a thread that has its own settings of torch.compile.
        hooks.append(node.register_prehook(lambda grads: allow_second_backwards()))
    try:
        if keeps_graph:
            grad_before_backward(outputs, handles, grads)
        else:
            torch.autograd.grad(outputs, handles, grads, allow_unused=True)
    except RuntimeError as error:
        if "donated buffer" not in str(error):
            raise
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return True
