"""The clipping gate: the autograd node where per-sample gradients become a clipped sum.

A private operation does not take a parameter but a handle on it, the parameter expanded to
[B, ...] without memory. Its backward returns per-sample gradients for the handle, autograd adds
those of all uses (tied weights, a module called twice), and the handle's own node, the gate, runs
once all of them have arrived: it norms, clips, sums over the samples and passes the sum on to the
parameter. Flat clipping has one gate for all parameters, per-layer clipping one for each module.

Matrix parameters need not materialise their per-sample gradients: they may leave (x, dy) with the
gate instead (see `planner`), and autograd still tells when the last use is through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dpflash.kernels import (
    block_clip_reduce,
    clip_reduce,
    embedding_per_sample_grad,
    per_sample_grad,
    squared_norm,
)
from dpflash.kernels.reference import rounded_down

from .ceilings import ceilings_for
from .clipping import Group, clip_factors
from .kept import KeptUses, TiledUse
from .planner import LinearShape, Plan, plan
from .precision import (
    coarse_products,
    coarse_use,
    refuse_coarse_mean,
    refuse_coarse_products,
    without_autocast,
)
from .proof import OFF, Proof
from .rehearsal import ForwardRows
from .sharding import is_sharded
from .step import ClippedSums
from .twice import BackwardsDiffer, First, Second
from .watch import Watch, refuse_together
from .workers import agree, gather_rows

# In these a gate does what its plan says. "prove" only looks.
_CLIPS = ("clip", "prove")
# What `aside` puts back.
_OF_A_PASS = (
    "_gates",
    "_used",
    "_shared",
    "_batch_size",
    "_stale",
    "_call",
    "last_shapes",
    "_shapes_generation",
)
_SHARED = (
    "[1, ...] is taken for what all samples share only in a call of the model itself, after a "
    "layer that got the batch; elsewhere expand it"
)


class _ClipGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        shapes = (p.shape for p in gate.group.parameters)
        return tuple(
            p.expand(gate.batch_size, *shape) for p, shape in zip(parameters, shapes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gate = ctx.gate
        gate.owner.refuse_coarse_products(gate.device.type)
        gate.owner.refuse_coarse_use(gate.group.parameters[0])
        # `loss.backward()` may stand in the user's own autocast region.
        with without_autocast(gate.device.type):
            sums = gate.finish(grads)
            return (None, *gate.step.settled(gate.group.parameters, sums))


def _recomputing() -> bool:
    """Whether this is a forward inside of a backward."""
    return torch._C._current_graph_task_id() != -1


def _source(parameter: nn.Parameter) -> Tensor:
    """What a handle hangs on; of a sharded parameter, whose whole comes and goes, a stand-in."""
    if not is_sharded(parameter):
        return parameter
    stand_in = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return stand_in.requires_grad_()


class Gate:
    """One clipping group in one forward pass: its handles and what its uses left behind."""

    def __init__(self, owner: PrivateBackward, group: Group, batch_size: int, generation: int):
        self.owner = owner
        self.step = owner.step
        self.group = group
        self.batch_size = batch_size
        self.generation = generation
        self.shapes: dict[int, list[LinearShape]] = {}
        self._dense: set[int] = set()
        self._plan: dict[int, str] | None = None
        self._task = -1
        self._kept: dict[int, KeptUses] = {}
        self._sums: dict[int, Tensor] = {}
        self.squares: Tensor | None = None
        self.device = group.parameters[0].device
        owner.refuse_coarse_products(self.device.type)
        self.handles: tuple[Tensor, ...] = _ClipGate.apply(self, *map(_source, group.parameters))

    @property
    def index(self) -> int:
        """Number of its group."""
        return self.owner._index[id(self.group)]

    @property
    def size(self) -> int:
        """How many parameters it has."""
        return len(self.group.parameters)

    def layer_of(self, position: int) -> str:
        """Dotted name of the module of a parameter."""
        return self.owner.layer_of(self.group.parameters[position])

    def is_dense(self, position: int) -> bool:
        """Whether the gradient at the handle has a use in it that leaves nothing with the gate."""
        return position not in self.shapes or position in self._dense

    def register(self, position: int, shape: LinearShape) -> None:
        """Note a use of a matrix parameter, so that its way can be planned."""
        self.shapes.setdefault(position, []).append(shape)
        self._plan = None
        self.owner.note_shapes(self)

    def register_dense(self, position: int) -> None:
        """Note a use whose per-sample gradient reaches the handle by autograd alone."""
        self._dense.add(position)

    def take_linear(
        self, position: int, x: Tensor, dy: Tensor, *, swapped: bool = False
    ) -> Tensor | None:
        """A use G_i = dy_i^T x_i: x [B, T, I], dy [B, T, O]. Returns the handle's gradient.

        Where they are `swapped`, for a transposed weight, x is what the losses' gradient makes.
        """
        if self._only_seen(position, *((x, dy) if swapped else (dy, x))):
            return None
        mode = self.owner.mode
        if mode in ("sum", "norms") and self._single(position):
            self._take_once(position, KeptUses(self._rows(position), linear=[(x, dy)]))
        elif mode in _CLIPS and not self.group.tiled and self._way(position) == "stored":
            return per_sample_grad(x, dy)
        else:
            self._keep(position).linear.append((x, dy))
        return None

    def take_embedding(self, position: int, indices: Tensor, dy: Tensor) -> Tensor | None:
        """A look-up: indices [B, T], dy [B, T, E]. Returns the handle's gradient."""
        if self._only_seen(position, dy, indices):
            return None
        mode = self.owner.mode
        rows = self._rows(position)
        if mode in ("sum", "norms") and self._single(position):
            self._take_once(position, KeptUses(rows, embedding=[(indices, dy)]))
        elif mode in _CLIPS and self._way(position) == "stored":
            return embedding_per_sample_grad(indices, dy, rows)
        else:
            self._keep(position).embedding.append((indices, dy))
        return None

    def take_tiled(self, position: int, use: TiledUse) -> bool:
        """A use that makes its gradient anew. False: return it to the handle instead."""
        if self._only_seen(position, *use.rows):
            return True
        mode = self.owner.mode
        if mode in _CLIPS and self._way(position) == "stored":
            return False
        if mode in ("sum", "norms") and self._single(position):
            self._take_once(position, KeptUses(self._rows(position), tiled=[use]))
        else:
            self._keep(position).tiled.append(use)
        return True

    @property
    def bound(self) -> float:
        """What one sample may move this group's sums by."""
        return self.group.share * self.step.bound

    def plan(self) -> Plan:
        """The planner's choice for this gate's matrix parameters, in the order of `shapes`."""
        return self.owner.plan_for(self.shapes)

    def _enter(self) -> None:
        """Drop what a foreign backward left, such as one for the gradient of the inputs."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self.reset()
            self._task = task

    def _only_seen(self, position: int, *rows: Tensor) -> bool:
        """Show a use's rows to the watches; whether that is all that the backward is for."""
        self._enter()
        for watch in self.owner.watches:
            watch.use(self, position, rows)
        return self.owner.mode == "prove" and position not in self._dense

    def _single(self, position: int) -> bool:
        """Whether a use is the parameter's only one, so that there is no cross term."""
        return len(self.shapes[position]) == 1 and position not in self._dense

    def _way(self, position: int) -> str:
        if self._plan is None:
            self._plan = dict(zip(self.shapes, self.plan().ways, strict=True))
        return self._plan[position]

    def _rows(self, position: int) -> int:
        return self.group.parameters[position].shape[0]

    def _keep(self, position: int) -> KeptUses:
        return self._kept.setdefault(position, KeptUses(self._rows(position)))

    def _take_once(self, position: int, use: KeptUses) -> None:
        """A pass of two, and the parameter's only use: nothing needs to be kept."""
        if self.owner.mode == "sum":
            self._sums[position] = use.clipped(self.owner.factors, self.bound)
            if not self.owner.norms_again:
                return
        squares = use.squared_norm()
        self.squares = squares if self.squares is None else self.squares + squares

    def finish_norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Squared norms [B] of the group, from the handles' gradients and what was left."""
        squares = torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)
        if self.squares is not None:
            squares += self.squares
        for position, grad in enumerate(grads):
            kept = self._kept.get(position)
            if kept is not None:
                squares += kept.squared_norm(grad)
            elif grad is not None:
                squares += squared_norm(grad)
        return squares

    def finish(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The backward of the gate: per-sample gradients in, clipped sums out."""
        self._enter()
        self.owner.arrived(self)
        self.owner.compare(self, grads)
        if self.group.tiled:
            return self._finish_tiles(grads[0])
        factors = self._factors(grads)
        results: list[Tensor | None] = []
        for position, (parameter, grad) in enumerate(
            zip(self.group.parameters, grads, strict=True)
        ):
            results.append(self._clipped(position, parameter, grad, factors))
        self.reset()
        return results

    def _factors(self, grads: Sequence[Tensor | None]) -> Tensor:
        """What each sample's gradients are multiplied by, `[B]`."""
        owner = self.owner
        if owner.mode == "sum":
            return owner.factors
        scale = self.batch_size if owner.loss_reduction == "mean" else 1
        squares = self.finish_norms(grads) * scale**2
        factors = self.step.rows.only(clip_factors(squares, self.bound, owner.clip_function))
        owner.note(squares, factors)
        return factors if scale == 1 else rounded_down(factors.double() * scale)

    def _clipped(
        self, position: int, parameter: nn.Parameter, grad: Tensor | None, factors: Tensor
    ) -> Tensor | None:
        """Add the clipped sum of one parameter; returns what autograd adds to `.grad`."""
        step = self.step
        total, kept = self._sums.get(position), self._kept.get(position)
        if kept is not None:
            own = kept.clipped(factors, self.bound)
            total = own if total is None else total + own
        if grad is None and total is None:
            step.add_zero(parameter)
            return None
        if total is None:
            assert grad is not None
            return step.add_clipped(parameter, grad, factors)
        step.sum_to_extend(parameter)
        if grad is not None:
            total = total + clip_reduce(grad, factors, grid=step.grid)
        return step.add(parameter, total, is_exact=False)

    def _finish_tiles(self, grad: Tensor | None) -> list[Tensor | None]:
        """`finish` for the one parameter of a group that is clipped tile by tile."""
        owner, step = self.owner, self.step
        (parameter,) = self.group.parameters
        scale = max(1, self.batch_size) if owner.loss_reduction == "mean" else 1
        kept = self._kept.get(0)
        if kept is None and grad is None or not parameter.numel():
            step.add_zero(parameter)
            self.reset()
            return [None]
        into = step.sum_to_extend(parameter)
        if kept is not None and grad is None:
            # Factors are made tile by tile, so padding rows lose their gradients instead.
            kept.linear = [(x, step.rows.only(dy)) for x, dy in kept.linear]
            total, factors = kept.block_clipped(self.bound, step.grid, into, scale=scale)
        else:
            assert grad is not None
            dense = step.rows.only(grad if kept is None else grad + kept.dense())
            total, factors = block_clip_reduce(
                dense * scale, self.bound, grid=step.grid, into=into, return_factors=True
            )
        owner.note(None, factors.amin(1))
        self.reset()
        return [step.add(parameter, total)]

    def reset(self) -> None:
        self._kept = {}
        self._sums = {}
        self.squares = None


@dataclass
class _Call:
    """A call of the model itself.

    Attributes:
        sizes: first dimensions of the tensors that the model was given.
        batch_size: first dimension of what its first private operation got.
    """

    sizes: frozenset[int]
    batch_size: int | None = None


class PrivateBackward:
    """What the private operations of one model share, from forward to clipped sums.

    Attributes:
        groups: the clipping groups.
        names: dotted name of each parameter.
        step: the logical batch that clipped sums are added to.
        public_batch_size: samples of a physical batch for which memory_budget shall last; never
            the drawn number, so that nobody's presence decides how the others are clipped.
        batch_hint: rows of the microbatch drawn last; None where batches are not ours.
        convolves: whether the model has modules that convolve, for which cudnn rounds by default.
        proof: whether the model keeps samples apart, as far as it is proven.
        watches: what sees the uses of the backward under way.
        forward_rows: what notes the layers' inputs in the forward under way; None for nothing.
        norms_again: whether a pass that sums also norms.
        compiled: whether the forward goes through this library's own torch.compile.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        step: ClippedSums,
        *,
        way: str,
        memory_budget: int,
        public_batch_size: int,
        loss_reduction: str | None,
        clip_function: str,
        flat: bool,
        gate_type: type[Gate] = Gate,
        convolves: bool = False,
        proof: Proof = OFF,
        refusal: Callable[[], str | None] = lambda: None,
    ):
        self.groups = list(groups)
        self.step = step
        self.workers = step.ranks
        self.names = step.names
        self._gate_type = gate_type
        self.way = way
        self.memory_budget = memory_budget
        self.public_batch_size = public_batch_size
        self.loss_reduction = loss_reduction
        self.clip_function = clip_function
        self.two_pass_allowed = loss_reduction is None and flat
        self.convolves = convolves
        self.slots = {
            id(p): (g, i) for g, group in enumerate(groups) for i, p in enumerate(group.parameters)
        }
        self.mode = "clip"
        self.proof = proof
        self._refusal = refusal
        self.watches: tuple[Watch, ...] = ()
        self.forward_rows: ForwardRows | None = None
        self.norms_again = False
        self.compiled = False
        self.batch_hint: int | None = None
        self._squares: tuple[Tensor | None, Tensor | None] = (None, None)
        self._counted = [0, 0]
        self._counts: list[Tensor] = []
        self.seen_samples = 0
        self.last_shapes: dict[int, dict[int, list[LinearShape]]] = {}
        self._shapes_generation = 0
        self._index = {id(group): index for index, group in enumerate(self.groups)}
        self._gates: dict[int, Gate] = {}
        self._prepared: list[tuple[Tensor, ...]] = []
        self._used: dict[str, int] = {}
        self._shared: set[str] = set()
        self._call: _Call | None = None
        self._generation = 0
        self._batch_size: int | None = None
        self._stale = True
        self._task = -1
        self._in_backward = False
        self._expected_size: int | None = None
        self._arrived: set[int] = set()
        self._arrived_generation: int | None = None
        self.factors = torch.empty(0)
        self._removed: Tensor | None = None
        self._summing: Gate | None = None
        step.attach(self)

    # Forward

    @contextmanager
    def call(self, sizes: frozenset[int]) -> Iterator[bool]:
        """A call of the model itself, given tensors with these first dimensions.

        B is told anew in each: what another call left, differentiated or not, tells nothing.
        Yields whether it is a call from outside: not from the model itself, nor in a backward.
        """
        if self._call is not None or _recomputing():
            yield False
            return
        self._call = _Call(sizes)
        self.watches = self.proof.resting
        try:
            yield True
        finally:
            self._call = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A forward which is no part of the pass under way, and leaves nothing."""
        held = {name: getattr(self, name) for name in _OF_A_PASS}
        self._gates, self._used, self._shared = {}, {}, set()
        self._call, self._stale = None, True
        try:
            yield
        finally:
            self._release_gates()
            for name, value in held.items():
                setattr(self, name, value)

    def batch_size_for(self, x: Tensor, name: str) -> int:
        """B of the pass to which an operation of module `name` on x belongs.

        It is x's first dimension, unless that is a 1 which the samples of this call share.

        Raises:
            ValueError: x may be one sample as well.
        """
        leading, call = x.shape[0], self._call
        if _recomputing():
            shared = leading == 1 and name in self._shared and self._batch_size is not None
            return self._batch_size if shared else leading  # type: ignore[return-value]
        # A layer that is called by itself may have got one sample.
        if call is None:
            return leading
        if call.batch_size is None:
            call.batch_size = leading
        size = call.batch_size
        if leading != 1 or size == 1:
            return leading
        if x.requires_grad:
            why = "and depends on layers that are trained: one sample, or a sum over samples"
        elif size not in call.sizes:
            why = f"no tensor that the model got has {size} of them: it may be one sample"
        else:
            self._shared.add(name)
            return size
        raise ValueError(
            f"input of module '{name}' has shape {tuple(x.shape)} after others with {size} "
            f"entries in the first dimension, {why}. Give each layer inputs whose first dimension "
            f"is the batch; what does not depend on the data, as x.expand({size}, ...)"
        )

    @property
    def used(self) -> Collection[str]:
        """Names of the modules that ran in the pass under way."""
        return self._used.keys()

    def known_batch_size(self) -> int | None:
        """B where an operation of this call has told it, or the compiler has to be told."""
        if torch.compiler.is_compiling():
            return self.batch_hint
        if _recomputing():
            return self._batch_size
        return None if self._call is None else self._call.batch_size

    def gate(self, group: int, batch_size: int, name: str) -> Gate:
        """The group's gate of the current pass; a new pass starts after a backward."""
        recomputing = _recomputing()
        if recomputing:
            if name not in self._used:
                raise RuntimeError(
                    f"module '{name}' ran its first differentiable forward inside a backward, as "
                    "reentrant activation checkpointing does; clipping would then see a part of "
                    "the gradient. Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
                )
        elif self._stale or batch_size != self._batch_size:
            self._generation += 1
            self._release_gates()
            self._used = {}
            self._shared = set()
            self._batch_size = batch_size
            self._stale = False
        if not recomputing:
            self._used[name] = self._used.get(name, 0) + 1
        gate = self._gates.get(group)
        if gate is None:
            gate = self._gate_type(self, self.groups[group], batch_size, self._generation)
            self._gates[group] = gate
        return gate

    def plan_for(self, shapes: dict[int, list[LinearShape]]) -> Plan:
        """The planner's choice for the uses of a gate's matrix parameters."""
        return plan(
            list(shapes.values()),
            way=self.way,
            memory_budget=self.memory_budget,
            batch_size=self.public_batch_size,
            two_pass_allowed=self.two_pass_allowed,
            book_keeping_allowed=self.workers.context is None,
            ceilings=ceilings_for(self.groups[0].parameters[0].device),
        )

    def begin_batch(self, size: int) -> None:
        """A physical batch of this size comes next."""
        self.batch_hint = size
        self._stale = True
        self.prepare(size)

    def prepare(self, batch_size: int) -> None:
        """Make the handles that a compiled model will read; an eager model makes its own."""
        self._generation += 1
        gates = [
            self._gate_type(self, group, batch_size, self._generation) for group in self.groups
        ]
        self._prepared = [gate.handles for gate in gates]
        for gate in gates:
            gate.handles = ()

    def prepared(self, group: int) -> tuple[Tensor, ...]:
        if not self._prepared:
            raise RuntimeError(
                "a compiled private model needs its gradient handles before the call: iterate "
                "over the loader that make_private returned, or call engine.prepare(batch_size)"
            )
        return self._prepared[group]

    def refuse_coarse_use(self, x: Tensor) -> None:
        """Refuse a mean over samples where x has fewer digits than float32 or autocast is on."""
        if self.loss_reduction == "mean":
            refuse_coarse_mean(coarse_use(x))

    def refuse_coarse_products(self, device_type: str) -> None:
        """Refuse settings of torch by which a sample would change how others are rounded."""
        refuse_coarse_products(device_type)
        if self.loss_reduction == "mean":
            refuse_coarse_mean(coarse_products(device_type, convolves=self.convolves))

    # Backward

    def backward(self, losses: Tensor) -> None:
        """Run the backward of [B] losses, or of a scalar where loss_reduction is declared."""
        self._in_backward = True
        self._expected_size = losses.shape[0] if losses.ndim else None
        self.watches = self.proof.resting
        try:
            self.refuse_coarse_use(losses)
            self._begin()
            gates = list(self._gates.values())
            twice = len(self.groups) == 1 and bool(gates) and self._two_pass(gates[0])
            twice, proving = self._meet(twice, self._wants_proof(self._expected_size))
            seed = torch.ones_like(losses)
            if self.loss_reduction == "mean":
                seed /= max(1, losses.numel())
            if proving:
                self._prove([losses], [seed], len(losses))
            if twice:
                self._backward_twice(losses, seed, gates[0])
            else:
                torch.autograd.backward(losses, seed)
            if not self._arrived:
                raise RuntimeError(
                    "losses did not reach any private layer: no parameter got a gradient. Compute "
                    "losses from the output of the model given to make_private, with gradients on"
                )
        except BaseException:
            self.discard()
            raise
        finally:
            self.mode = "clip"
            self.watches = self.proof.resting
            self.norms_again = False
            self._summing = None
            self._in_backward = False
            self._expected_size = None

    @property
    def meeting(self) -> ProcessGroup | None:
        """The workers whose gradients meet in the backward; None where none do."""
        return self.workers.everyone if self.step.is_sharded else self.workers.context

    def _meet(self, twice: bool = False, proving: bool = False) -> tuple[bool, bool]:
        """Make sure that workers whose gradients meet are about to do the same.

        Args:
            twice: whether this worker would go backward in two passes.
            proving: whether it would prove this batch.

        Returns:
            Whether one of the workers would, and so all of them do.

        Raises:
            ValueError: on all of them, naming what differs.
            RuntimeError: on all of them, where something was changed that is never released.
        """
        workers, group = self.workers, self.meeting
        try:
            refuse_together(self._refusal(), group, "engine.backward")
        except RuntimeError:
            self.discard()
            raise
        if group is None:
            return twice, proving
        what = "engine.backward"
        # Other modules, or another order, and gradients of one would be added to another's.
        same = {
            "(draw, part) of the batch": self.step.tracker.place(),
            "max_grad_norm": self.step.bound,
            "modules that ran, and how often": list(self._used.items()),
        }
        size = {"number of samples": self._batch_size}
        if group is workers.context:
            same |= size
        told = agree(what, same, group, tell=[int(twice), int(proving)])
        if group is not workers.context:
            agree(what, size, workers.context)
        return any(row[0] for row in told), any(row[1] for row in told)

    def _two_pass(self, gate: Gate) -> bool:
        return self.two_pass_allowed and bool(gate.shapes) and gate.plan().two_pass

    def _backward_twice(self, losses: Tensor, seed: Tensor, gate: Gate) -> None:
        # Both passes are the same computation, and the gate applies the factors to what the
        # second one brings. Weighted losses would round anew at every layer, beyond the bound.
        first = First(gate.device)
        self.watches = (*self.watches, first)
        self.mode = "norms"
        grads = torch.autograd.grad(
            losses, gate.handles, grad_outputs=seed, retain_graph=True, allow_unused=True
        )
        # What the uses left is attached to the graph.
        with torch.no_grad():
            self.compare(gate, grads)
            squares = gate.finish_norms(grads)
            gate.reset()
            if squares.shape != losses.shape:
                self._refuse_size(gate.batch_size, losses.shape[0])
            allowed = first.allowed(squares)
            factors = clip_factors(allowed, gate.bound, self.clip_function)
            self.factors = self.step.rows.only(factors)
            self.note(squares, self.factors)
        del grads
        self._summing = gate
        self.watches = (Second(first, allowed, self.meeting),)
        self.norms_again = not first.exact
        self.mode = "sum"
        try:
            torch.autograd.backward(losses, seed)
        except BackwardsDiffer:
            # The planner does not come back to it.
            self.two_pass_allowed = self.two_pass_allowed and self.way != "auto"
            raise

    # Proof

    def begin_proof(self, size: int) -> bool:
        """A call of the model begins, of `size` samples at most; whether the proof repeats it."""
        return self.proof.begin_forward(size, new_pass=self._stale)

    def expect_scalar(self, outputs: Any, size: int) -> Any:
        """The model's outputs, for a loss that may be a scalar where that is declared."""
        if self.loss_reduction is None or not self.proof.is_on:
            return outputs
        return self.proof.cross(outputs, size, self)

    def _wants_proof(self, size: int | None) -> bool:
        return self.proof.wants_backward(self._used, size)

    def _prove(self, outputs: Sequence[Tensor], seeds: Sequence[Tensor], size: int) -> None:
        """A backward that only looks; the ordinary one is compared with it as it runs."""
        watch = self.proof.prove(self, outputs, seeds, size, self.step.rows.mask_of(size))
        if watch is not None:
            self.watches = (watch,)

    def crossed(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], size: int) -> None:
        """See `dpflash.proof.CrossedBackward`: the rows of a scalar's gradient are weighted."""
        if self._expected_size is not None:
            return  # Losses are weighted one by one.
        try:
            wanted = self._wants_proof(size)
            rows = gather_rows([int(wanted)], self.meeting, "the proof of the first batch")
            if any(row[0] for row in rows):
                self._prove(outputs, grads, size)
        except BaseException:
            self.discard()
            raise

    def compare(self, gate: Gate, grads: Sequence[Tensor | None]) -> None:
        """Have the watches compare what has arrived at a gate, before anything is released."""
        try:
            for watch in self.watches:
                watch.gate(gate, grads)
        except BaseException:
            self.discard()
            raise

    def handles(self) -> Iterator[tuple[tuple[int, int], str, bool, Tensor]]:
        """See `dpflash.proof.ProvableBackward`."""
        for index, gate in self._gates.items():
            for position, handle in enumerate(gate.handles):
                yield (index, position), gate.layer_of(position), gate.is_dense(position), handle
        for index, handles in enumerate(self._prepared):
            for position, handle in enumerate(handles):
                layer = self.layer_of(self.groups[index].parameters[position])
                yield (index, position), layer, True, handle

    def layer_of(self, parameter: nn.Parameter) -> str:
        """Dotted name of the module that holds a parameter."""
        return self.names[parameter].rpartition(".")[0] or "(the model itself)"

    @contextmanager
    def only_watched(self, watch: Watch) -> Iterator[None]:
        """See `dpflash.proof.ProvableBackward`."""
        held = self.mode, self.watches
        self.mode, self.watches = "prove", (watch,)
        try:
            yield
        finally:
            self.mode, self.watches = held
            for gate in self._gates.values():
                gate.reset()

    def _begin(self) -> None:
        self._arrived = set()
        self._arrived_generation = None
        self._removed = None
        self._task = -1
        self.step.begin_backward()

    def arrived(self, gate: Gate) -> None:
        """Called by each gate as its backward runs; refuses what would break the sensitivity."""
        if not self._in_backward:
            if self.loss_reduction is None:
                raise RuntimeError(
                    "loss.backward() was called on a private model. Call engine.backward(losses) "
                    "with one loss per sample, or declare make_private(..., loss_reduction='mean' "
                    "or 'sum') if the scalar really is that reduction over samples"
                )
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._begin()
                self._meet()
                self._task = task
                self.step.tracker.before_backward(gate.batch_size)
        elif self._expected_size is None and not self._arrived:
            self.step.tracker.before_backward(gate.batch_size)
        if self._expected_size is not None and gate.batch_size != self._expected_size:
            self._refuse_size(gate.batch_size, self._expected_size)
        if id(gate) in self._arrived:
            raise RuntimeError(
                "the clipping gate ran twice in one backward, so a sample would be clipped in "
                "parts. Use non-reentrant checkpointing and a single backward"
            )
        mixed = self._arrived_generation not in (None, gate.generation)
        if mixed or (self.mode == "sum" and gate is not self._summing):
            raise RuntimeError(
                "losses mix forward passes of different batches, or are not of the model's last "
                "one; call engine.backward after each forward pass, and give every layer inputs "
                f"whose first dimension is the batch. {_SHARED}"
            )
        self.step.refuse_inexact(gate.batch_size)
        self._arrived.add(id(gate))
        self._arrived_generation = gate.generation
        self._stale = True

    @staticmethod
    def _refuse_size(gate_size: int, loss_size: int) -> None:
        raise ValueError(
            f"losses has {loss_size} entries but the model saw a batch of {gate_size}: give one "
            "loss per sample of the forward pass, batch first"
            + (f". {_SHARED}" if gate_size == 1 else "")
        )

    def note(self, squares: Tensor | None, factors: Tensor) -> None:
        """Keep what reports show. Private: it depends on the data and is not noised.

        Numbers stay on their device until they are asked for.
        """
        real = self.step.rows.of(factors)
        self._squares = (None if squares is None else squares.detach(), real)
        removed, clipped = factors == 0, factors < 1
        if real is not None:
            removed, clipped = removed & real, clipped & real
        # A sample that several groups remove is one sample.
        anew = removed if self._removed is None else removed & ~self._removed
        self._removed = removed if self._removed is None else removed | self._removed
        counts = torch.stack([anew.sum(), clipped.sum() - removed.sum()])
        if self._counts and self._counts[-1].device == counts.device:
            self._counts[-1] = self._counts[-1] + counts
        else:
            self._counts.append(counts)
        self.seen_samples += self.step.rows.count(len(factors))

    def _count(self) -> list[int]:
        """Samples that were removed, and clipped, so far. Waits for the device if some are new."""
        if self._counts:
            device = self._counts[0].device
            new = torch.stack([counts.to(device) for counts in self._counts]).sum(0).tolist()
            self._counted = [held + n for held, n in zip(self._counted, new, strict=True)]
            self._counts = []
        return self._counted

    @property
    def nonfinite_samples(self) -> int:
        """Samples that contributed nothing, since a gradient of theirs was NaN or infinite."""
        return self._count()[0]

    @property
    def clipped_samples(self) -> int:
        """How often a sample was clipped, by whichever group, and not removed."""
        return self._count()[1]

    @property
    def squared_norms(self) -> Tensor | None:
        """Of the samples of the last backward's last group, `[n]`; None if it has none."""
        squares, real = self._squares
        return squares if squares is None or real is None else squares[real]

    def note_shapes(self, gate: Gate) -> None:
        """Keep what `engine.plan` explains: the uses of the last forward pass, by group."""
        if gate.generation != self._shapes_generation:
            self.last_shapes = {}
            self._shapes_generation = gate.generation
        self.last_shapes[self._index[id(gate.group)]] = gate.shapes

    def discard(self) -> None:
        """Drop the logical batch; see `ClippedSums.discard`."""
        self.step.discard()

    def end_batch(self, *, released: bool) -> None:
        """The logical batch was released, and parameters are about to change, or was dropped."""
        self.watches = self.proof.resting
        self._release_gates()
        self._stale = True
        if released:
            self.batch_hint = None
            # They are views of the parameters as they were.
            self._prepared = []

    def _release_gates(self) -> None:
        # A gate, its handles and their autograd node refer to each other; nothing else frees them.
        for gate in self._gates.values():
            gate.handles = ()
            gate.reset()
        self._gates = {}
