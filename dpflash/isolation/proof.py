"""Proof: tests on the first batches whether a model keeps its samples apart.

An extra backward gives some losses the weight 0. In it, every operation of a private layer must
receive rows of zeros for the samples of weight 0, and for the other samples the same rows as in
the training backward. The forward is also repeated with some samples replaced, see `Call`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..distributed.collectives import broadcast_from_first, gather_rows
from ..random_state import random_state_kept
from ..refusal import UNTESTED, PrivateRefusal, warn
from ..verification.nested import map_tensors, tensors_of
from ..verification.watch import Watch, WatchedGate, alive, refuse_together
from .alteration import kept_by, sources
from .backward_rows import BackwardRows, ProvableBackward, differentiate
from .comparison import changed_use
from .forward_rows import is_scalar

# Number of compared samples, over all batches, after which a model counts as proven.
_ENOUGH = 16
# While a name is unproven, the first 8 batches are tried, and later batches at powers of two.
_ALL_TRIED = 8

_EXCHANGE = "the proof of the first batch"
_OTHERS = (
    "the gradient of layer '{layer}' for a sample changed as the losses of others got weight 0, "
    "so nothing was released: it depends on other samples (negatives from other rows, such as "
    "x.roll(1, 0), even detached), or two backwards of one batch differ (checkpointing without "
    "the random state, hooks that keep state; if only rounding differs, "
    f"torch.use_deterministic_algorithms(True) helps). {UNTESTED}"
)

_ELSEWHERE = (
    "on another rank, the scalar that the model returns is not the declared loss_reduction of "
    "losses of single samples, so nothing was released"
)


@dataclass
class _Progress:
    """Progress of one half of the test: the operations of backwards, or the layers of forwards.

    Attributes:
        known: names of the operations or layers seen so far.
        unproven: the known names that are not proven yet.
        samples: number of samples that were compared.
        batches: number of batches since the proof began, tried or not.
        woken: whether to try the next batch even if its number is not a power of two.
        missed: whether a batch could not be tried.
        keeps: whether forwards keep data of their samples in the model, which later forwards may
            begin to use.
        is_patient: whether batches are tried at powers of two even before a sample was compared.
    """

    known: set[Any] = field(default_factory=set)
    unproven: set[Any] = field(default_factory=set)
    samples: int = 0
    batches: int = 0
    woken: bool = False
    missed: bool = False
    keeps: bool = False
    is_patient: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether something is unproven."""
        return bool(self.unproven) or self.samples < _ENOUGH

    def is_due(self) -> bool:
        """Whether to try the next batch."""
        often = self.batches < _ALL_TRIED or self.batches & (self.batches - 1) == 0
        often |= self.samples < _ENOUGH and (self.samples > 0 or not self.is_patient)
        return (self.is_pending or self.keeps) and (often or self.woken)

    def take_turn(self) -> bool:
        """Count this batch; return whether to try it."""
        due = self.is_due()
        self.batches += self.is_pending or self.keeps
        return due

    def record(self, names: Iterable[Any]) -> bool:
        """Record the names in this forward or backward; return whether a name is new."""
        new = set(names) - self.known
        self.known |= new
        self.unproven |= new
        return bool(new)

    def restart(self) -> None:
        """Make the next batches be tried."""
        self.batches, self.woken = 0, True

    def prove(self, names: Iterable[Any]) -> None:
        names = set(names)
        self.known |= names
        self.unproven -= names


@dataclass
class _Mode:
    """The proof for one combination of the modules' training flags.

    Attributes:
        layers: progress in the forward, by name of the layer.
        uses: progress in the backward, by group and position of the parameter.
        is_trained: whether there was a backward.
        makes_scalars: whether the model returns a scalar loss.
        refusal: why a scalar that the model returns is not accepted as its loss, or None.
    """

    # Patient, since some models have no arguments in which samples could be replaced.
    layers: _Progress = field(default_factory=lambda: _Progress(is_patient=True))
    uses: _Progress = field(default_factory=_Progress)
    is_trained: bool = False
    makes_scalars: bool = False
    refusal: str | None = None


class Proof:
    """The test of one model: tracks which layers and operations passed it ("are proven").

    Args:
        modules: the model's modules.
        device: the device of its parameters.
        group: ranks that exchange gradients in the backward; they prove the model together.
        context: the ranks that hold other tokens of the same samples.
        is_on: whether the proof runs.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        *,
        device: torch.device | None = None,
        group: ProcessGroup | None = None,
        context: ProcessGroup | None = None,
        is_on: bool = True,
    ) -> None:
        self.is_on = is_on
        self.group = group
        self._modules = list(modules)
        self._device = device or torch.device("cpu")
        self._context = context
        self._modes: dict[bytes, _Mode] = {}
        self._mode = _Mode()
        self._calls = 0
        # Whether the forward since the last backward was repeated; None if there was none.
        self._repeated: bool | None = None
        self.resting: tuple[Watch, ...] = (_Idle(self),) if is_on else ()

    @property
    def verified(self) -> bool | Literal["pending", "gradients", "forward"]:
        """True if both tests passed; "gradients" or "forward" if only one test was possible."""
        if not self.is_on:
            return False
        modes = [mode for mode in self._modes.values() if mode.is_trained] or [_Mode()]
        untold = [mode for mode in modes if mode.uses.is_pending]
        unproven = [mode.layers for mode in modes if mode.layers.is_pending]
        if untold:
            scalars = all(mode.makes_scalars for mode in untold)
            return "forward" if scalars and not unproven else "pending"
        if not unproven:
            return True
        missed = all(layers.missed and not layers.samples for layers in unproven)
        return "gradients" if missed else "pending"

    @property
    def is_settled(self) -> bool:
        """Whether no more batches with the training flags of the last call will be tried."""
        halves = self._mode.layers, self._mode.uses
        return not self.is_on or not any(half.is_pending or half.keeps for half in halves)

    @property
    def waiting(self) -> tuple[bool, set[Any]]:
        """The pair (whether too few samples were compared, parameters not compared so far).

        A parameter is given as (number of its group, position in the group).
        """
        modes = [mode for mode in self._modes.values() if mode.is_trained]
        few = not all(mode.uses.samples >= _ENOUGH <= mode.layers.samples for mode in modes)
        return few or not modes, {slot for mode in modes for slot in mode.uses.unproven}

    def restart(self, modules: Iterable[nn.Module]) -> None:
        """Begin the proof again, with the modules that the model has now."""
        self._modules = list(modules)
        self._modes.clear()

    def _enter_mode(self) -> None:
        flags = bytes([module.training for module in self._modules])
        self._mode = self._modes.setdefault(flags, _Mode())
        self._repeated = bool(self._repeated)

    # Forward

    def begin_forward(self, size: int, *, new_pass: bool) -> bool:
        """Return whether to repeat the forward that is about to begin, with other samples.

        Args:
            size: upper bound of B.
            new_pass: whether the previous forward has had its backward.
        """
        if not self.is_on:
            return False
        self._enter_mode()
        self._calls = 1 if new_pass else self._calls + 1
        if self.group is None and size < 2:
            return False
        return self._mode.layers.take_turn()

    def forward_repeated(
        self,
        layers: Collection[str],
        samples: int,
        refusal: str | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """Record a forward that all ranks of the group have repeated.

        Args:
            layers: names of the layers that ran.
            samples: number of samples that were compared; 0 if no sample was replaced.
            refusal: message about a difference, or None.
            keeps: whether the model keeps data of the samples.

        Raises:
            RuntimeError: the forwards differed on this rank or on another rank.
        """
        refuse_together(refusal, self.group, _EXCHANGE)
        samples = max(row[0] for row in gather_rows([samples], self.group, _EXCHANGE))
        progress = self._mode.layers
        self._repeated = samples > 0
        progress.woken = False
        progress.samples += samples
        if samples:
            progress.keeps |= keeps
            progress.prove(layers)

    def note_scalars(self, refusal: str | None) -> None:
        """Record why a scalar output is not accepted as the loss; all ranks call this."""
        if self.is_any(refusal is not None):
            self._mode.refusal = refusal or _ELSEWHERE

    def is_any(self, flag: bool) -> bool:
        """Return whether the flag is set on a rank of the group; all ranks call this together."""
        return any(row[0] for row in gather_rows([flag], self.group, _EXCHANGE))

    def draw(self, values: Callable[[np.random.Generator], Tensor]) -> Tensor:
        """Draw secret int64 numbers, equal on all ranks that hold parts of the same samples."""
        own = values(np.random.default_rng(_secret())).numpy().astype("<i8").tobytes()
        drawn = broadcast_from_first(own, self._context, _EXCHANGE)
        return torch.from_numpy(np.frombuffer(drawn, dtype="<i8").astype(np.int64))

    # Backward

    def wants_backward(self, used: Iterable[str], size: int | None) -> bool:
        """Return whether to prove the backward that is about to begin.

        Args:
            used: names of the layers that ran in its forward.
            size: B if there is one loss for each sample, else None.
        """
        if not self.is_on or size is None:
            return False
        if self._repeated is None:
            self._enter_mode()
        mode, repeated, self._repeated = self._mode, self._repeated, None
        mode.is_trained = True
        if is_new := mode.layers.record(used):
            mode.layers.restart()
        # One sample proves nothing, but if another rank wants a proof, all ranks take part.
        if size < 2:
            return False
        mode.layers.missed |= not repeated
        return mode.uses.take_turn() or is_new

    def prove(
        self,
        owner: ProvableBackward,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor],
        size: int,
        real: Tensor | None,
    ) -> Watch | None:
        """Run a backward with weight 1 on a random half of the samples, and 0 on the others.

        Args:
            owner: the private backward.
            outputs: tensors from which the backward starts.
            seeds: the gradients `[B, ...]` of the outputs.
            size: B.
            real: `[B]`, bool: rows that are samples; None if all rows are.

        Returns:
            A watch that compares the training backward with this backward; None if this backward
            could not run, or if no rank has two samples to compare.

        Raises:
            RuntimeError: a sample of weight 0 had a nonzero row, here or on another rank.
        """
        real = torch.ones(size, dtype=torch.bool) if real is None else real
        if max(row[0] for row in gather_rows([int(real.sum())], self.group, _EXCHANGE)) < 2:
            return None
        largest = _largest_losses(outputs, seeds, real)
        source = self.draw(lambda rng: sources((), size, real, None, rng, largest))
        weighted = BackwardRows(kept_by(source, real), real)
        weights = [_masked(seed, weighted.weights) for seed in seeds]
        with owner.only_watched(weighted), random_state_kept(self._device):
            if not differentiate(owner, outputs, weights, weighted):
                return None
        watch = ComparedBackward(self, weighted, weighted.weights)
        self.refuse(weighted.refusal)
        return watch

    def refuse(self, refusal: str | None) -> None:
        """Raise if this rank or another rank refuses the backward."""
        try:
            refuse_together(refusal, self.group, _EXCHANGE)
        except RuntimeError:
            # If the loop catches the error, the next batches raise it again.
            self._mode.uses.restart()
            raise

    def cross(
        self, outputs: Any, size: int, owner: ProvableBackward, *, is_altered: bool = False
    ) -> Any:
        """Wrap the model's outputs, at which the test of a scalar loss's backward begins.

        Outputs for an altered microbatch are wrapped too, so that both backwards are the same.

        The test cannot weight a scalar's terms, so it sets rows of the scalar's gradient at the
        outputs to zero. Only `declared_reduction` tests the reduction, in the forms it knows.
        """
        uses = self._mode.uses
        # With ranks, `is_due` may differ: other ranks do not know of this rank's new operations.
        wanted = uses.is_due() if self.group is None else uses.is_pending
        crossing = list({id(x): x for _, x in tensors_of(outputs) if x.requires_grad}.values())
        refusal = self._mode.refusal
        if not crossing or not (wanted or refusal):
            if not is_altered:
                uses.take_turn()
            return outputs

        of_proof, of_owner = weakref.ref(self), weakref.ref(owner)

        def prove(inner: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
            proof, owner = alive(of_proof), alive(of_owner)
            reached = [(x, g) for x, g in zip(inner, grads, strict=True) if g is not None]
            if refusal is not None and any(
                is_scalar(x) and (size > 1 or not x.ndim) for x, _ in reached
            ):
                owner.discard()
                raise PrivateRefusal(refusal) from None
            owner.refuse_reduction([x for x, _ in reached], [g for _, g in reached], size)
            if proof._calls == 1 and all(x.ndim and x.shape[0] == size for x, _ in reached):
                # Zeros for outputs that the loss does not use: autograd runs their layers too.
                pairs = zip(inner, grads, strict=True)
                rows = [(x, g) for x, g in pairs if x.shape[:1] == (size,)]
                seeds = [torch.zeros_like(x) if g is None else g for x, g in rows]
                owner.crossed([x for x, _ in rows], seeds, size)
            else:
                uses.take_turn()
                proof._note_scalar(reached, is_compared=owner.is_compared)

        used = None if is_altered else prove
        behind = dict(zip(map(id, crossing), _Crossing.apply(used, *crossing), strict=True))
        wrapped = map_tensors(lambda x: behind.get(id(x), x), outputs)
        is_unseen = any(id(x) in behind for _, x in tensors_of(wrapped))
        if refusal is not None and is_unseen and not is_altered:
            # A scalar in a container of an unknown class cannot be wrapped.
            owner.discard()
            raise PrivateRefusal(refusal) from None
        return wrapped

    def _note_scalar(self, reached: Sequence[tuple[Tensor, Tensor]], *, is_compared: bool) -> None:
        mode = self._mode
        mode.is_trained = True
        if is_compared or mode.makes_scalars or all(x.ndim for x, _ in reached):
            return
        mode.makes_scalars = True
        warn(
            "the model returns its loss as a scalar, and this microbatch had no trial with which "
            "to compare its backward, so engine.verified will be 'forward'. BatchMemoryManager "
            "yields no trials: iterate over make_private's loader, with physical_batch_size=; or "
            "compute losses outside of the model, as by engine.backward("
            "dpflash.losses.cross_entropy(logits, targets))",
        )

    def _record_uses(self, gate: WatchedGate, samples: int, found: list[int]) -> None:
        """Record `found`, a number for each parameter: 0 if not seen, 1 if seen, 2 if proven."""
        rows = gather_rows([samples, *found], self.group, _EXCHANGE)
        best = [max(column) for column in zip(*rows, strict=True)]
        uses = self._mode.uses
        uses.samples += best[0]
        for position, value in enumerate(best[1:]):
            slot = (gate.index, position)
            if value:
                uses.record([slot])
            if value == 2:
                uses.prove([slot])


OFF = Proof(is_on=False)


class _Idle:
    """Watches for new operations while no batch is tried."""

    def __init__(self, proof: Proof) -> None:
        self._proof = proof

    def use(self, gate: WatchedGate, position: int, rows: tuple[Tensor, ...]) -> None:
        uses, slot = self._proof._mode.uses, (gate.index, position)
        if slot in uses.unproven:
            # Unproven, since all its gradients were zero: try again if they are nonzero now.
            uses.woken = uses.woken or bool(rows[0].any())
        elif uses.samples and uses.record([slot]):
            uses.restart()

    def gate(self, gate: WatchedGate, grads: Sequence[Tensor | None]) -> None:
        for position, grad in enumerate(grads):
            if grad is not None and gate.is_dense(position):
                self.use(gate, position, (grad,))


class ComparedBackward(BackwardRows):
    """Watches the training backward, and compares its rows with those of an earlier backward.

    Args:
        proof: the proof of the model.
        before: the earlier backward, of the losses of some samples or of an altered microbatch.
        kept: `[B]`, bool: samples whose rows must be the same in both backwards.
        text: the message if rows differ, into which the layer's name is formatted.
        refused: function that is called with the message.
    """

    def __init__(
        self,
        proof: Proof,
        before: BackwardRows,
        kept: Tensor,
        text: str = _OTHERS,
        refused: Callable[[str], object] = lambda text: None,
    ) -> None:
        super().__init__(torch.ones_like(kept), before.real, rounds=before.rounds)
        self._proof = proof
        self._before = before
        self._kept = kept
        self._text = text
        self._refused = refused
        self._is_counted = False
        proof._mode.uses.woken = False
        proof._mode.uses.record(before.uses)

    def gate(self, gate: WatchedGate, grads: Sequence[Tensor | None]) -> None:
        super().gate(gate, grads)
        if self.is_foreign:
            return
        refusal = changed_use(self._before, self, self._kept, self._text, gate.index)
        try:
            self._proof.refuse(refusal)
        except PrivateRefusal as error:
            # Report the message, so that a loop that catches the error gets the error again.
            self._refused(str(error))
            raise
        included = self.real & ~self.left_out & ~self._before.left_out
        samples = int(included.sum()) if self._shows(included) and not self._is_counted else 0
        self._is_counted = True
        found = []
        for position in range(gate.size):
            uses = self.uses.get((gate.index, position), [])
            shown = all(self._shows(use.nonzero & included) for use in uses)
            found.append(1 + shown if uses else 0)
        self._proof._record_uses(gate, samples, found)

    def _shows(self, rows: Tensor) -> bool:
        """Whether `rows` `[B]` includes both a sample to compare and a changed sample."""
        kept, others = rows & self._kept, rows & ~self._kept
        return bool(kept.any()) and (len(rows) == 1 or bool(others.any()))


class _Crossing(torch.autograd.Function):
    """Identity on the model's outputs; its backward gets the gradients of all outputs at once."""

    @staticmethod
    def forward(
        ctx: Any,
        prove: Callable[[Sequence[Tensor], Sequence[Tensor | None]], None] | None,
        *outputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.prove = prove
        ctx.outputs = outputs
        ctx.set_materialize_grads(False)
        # Clone the outputs, which the user may change in place.
        return tuple(x.clone() for x in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        prove, outputs = ctx.prove, ctx.outputs
        ctx.prove = ctx.outputs = None
        if prove is not None:
            prove(outputs, grads)
        return (None, *grads)


def _secret() -> int:
    """Return a random number from the operating system, not from the run's own streams."""
    return int.from_bytes(os.urandom(32), "little")


def _largest_losses(outputs: Sequence[Tensor], seeds: Sequence[Tensor], real: Tensor) -> list[int]:
    """Return the quarter of the real rows with the largest |outputs times gradients|.

    Such a row may determine a scale that the whole batch uses.
    """
    sizes = torch.zeros(len(real), dtype=torch.float64)
    for x, seed in zip(outputs, seeds, strict=True):
        products = x.detach().double() * seed.double()
        sizes += products.abs().unsqueeze(1).flatten(1).sum(1).nan_to_num(0.0, 0.0).cpu()
    sizes[~real] = -1.0
    return sizes.argsort(descending=True)[: int(real.sum()) // 4].tolist()


def _masked(seed: Tensor, weights: Tensor) -> Tensor:
    """Replace the rows of weight 0 by zeros, even if they are not finite."""
    weights = weights.to(seed.device).view(-1, *[1] * (seed.ndim - 1))
    return torch.where(weights, seed, torch.zeros((), dtype=seed.dtype, device=seed.device))
