"""Gate: the autograd node that turns per-sample gradients into a clipped sum.

A private operation uses a handle in place of a parameter: the parameter expanded to [B, ...],
which needs no memory. The operation's backward returns per-sample gradients for the handle.
Autograd adds up these gradients over all operations on the parameter (tied weights, a module that
is called twice), and then runs the node that created the handle, the gate. The gate computes
norms, clips, sums over the samples and adds the sum to the logical batch. Flat clipping has one
gate for all parameters; per-layer clipping has one per module. For a matrix parameter, an
operation may save (x, dy) in the gate instead of computing per-sample gradients, see `planner`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpflash.kernels import clip_factors, clip_reduce, squared_norm
from dpflash.kernels.reference import rounded_down

from ..distributed.fsdp import is_sharded
from ..packing.units import Units
from ..verification.second_order import differentiable_once
from ..verification.watch import alive
from .deferred import DeferredGradients, TiledUse, shares, squared_norms
from .groups import Group
from .planner import LinearShape, Plan
from .precision import without_autocast
from .rules import BackwardRun, GateRules, GateStep

# The modes of `BackwardRun` in which gates use the planner's modes.
_CLIPS = ("clip", "prove")


class _ClipGate(torch.autograd.Function):
    """The gate's node. No parameter is its input, so no `.grad` gets a sum without noise."""

    @staticmethod
    def forward(ctx: Any, gate: Gate, stand_in: Tensor) -> tuple[Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        # Do not return views: autograd refuses views of parameters that are written in place.
        return tuple(_value(p).expand(gate.batch_size, *p.shape) for p in gate.group.parameters)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        gate = ctx.gate
        gate.rules.refuse_coarse_products(gate.device.type)
        gate.rules.refuse_coarse_use(gate.group.parameters[0])
        # The user may call `loss.backward()` inside an autocast region.
        with without_autocast(gate.device.type):
            gate.finish(grads)
        return None, None


def _value(parameter: nn.Parameter) -> Tensor:
    """Return the tensor that a handle expands: the parameter, or a dummy 0 if it is sharded."""
    if not is_sharded(parameter):
        return parameter.data
    return torch.zeros((), dtype=parameter.dtype, device=parameter.device)


class Gate:
    """One clipping group in one forward: creates its handles, and clips their gradients.

    Args:
        rules: objects and options that all gates of the model share.
        group: the clipping group.
        index: number of the group.
        batch_size: B, the number of samples of the forward.
        generation: number of the forward.
        units: the positions of the samples in the batch if samples are not rows, else None.
    """

    squares: Tensor | None

    def __init__(
        self,
        rules: GateRules,
        group: Group,
        index: int,
        batch_size: int,
        *,
        generation: int,
        units: Units | None,
    ):
        self._rules = weakref.ref(rules)
        self.group = group
        self.index = index
        self.batch_size = batch_size
        self.generation = generation
        self.units = units
        self.shapes: dict[int, list[LinearShape]] = {}
        self._dense: set[int] = set()
        self._read: dict[int, int] = {}
        self._plan: dict[int, str] | None = None
        # Samples whose terms cancel: from ghost clipping's first backward, for its second one.
        self._cancelling: dict[int, Tensor | None] = {}
        self._task = -1
        self.device = group.parameters[0].device
        self.reset()
        rules.refuse_coarse_products(self.device.type)

    def open(self) -> tuple[Tensor, ...]:
        """Return new handles. The gate does not keep them, since their graph refers to it."""
        stand_ins, device = self.rules.stand_ins, self.device
        if device not in stand_ins:
            stand_ins[device] = torch.zeros((), device=device, requires_grad=True)
        handles: tuple[Tensor, ...] = _ClipGate.apply(self, stand_ins[device])
        return handles

    @property
    def rules(self) -> GateRules:
        """The objects and options that all gates of the model share."""
        return alive(self._rules)

    @property
    def step(self) -> GateStep:
        """The logical batch to which clipped sums are added."""
        return self.rules.step

    @property
    def run(self) -> BackwardRun:
        """The mode of the current backward."""
        return self.rules.run()

    @property
    def size(self) -> int:
        """Number of parameters in the group."""
        return len(self.group.parameters)

    def by_sample(self, x: Tensor) -> tuple[Tensor, Units | None]:
        """See `dpflash.verification.watch.WatchedGate`."""
        return (x, None) if self.units is None else (x[0], self.units)

    def layer_of(self, position: int) -> str:
        """Return the dotted name of a parameter's module."""
        return self.rules.layer_of(self.group.parameters[position])

    def is_dense(self, position: int) -> bool:
        """Return whether an operation returns per-sample gradients to the parameter's handle."""
        return position not in self.shapes or position in self._dense

    def register(self, position: int, shape: LinearShape) -> None:
        """Note the shape of an operation on a matrix parameter, for the planner."""
        self.shapes.setdefault(position, []).append(shape)
        self._plan = None

    def register_dense(self, position: int) -> None:
        """Note an operation that returns its per-sample gradients to the handle."""
        self._dense.add(position)

    def register_read(self, position: int) -> None:
        """Note an operation whose forward and backward read the parameter through the handle."""
        self._read.setdefault(position, self.group.parameters[position]._version)

    def _refuse_written(self) -> None:
        for position, version in self._read.items():
            parameter = self.group.parameters[position]
            if parameter._version != version:
                name = self.step.sums.names[parameter]
                raise RuntimeError(
                    f"parameter '{name}' was changed in place between a "
                    "forward of this batch and the backward, which reads it again: change "
                    "parameters after optimizer.step(), or before the first forward of a batch"
                )

    def take_linear(
        self, position: int, x: Tensor, dy: Tensor, *, swapped: bool = False
    ) -> Tensor | None:
        """Take the tensors of a linear operation, G_i = dy_i^T x_i: x [B, T, I], dy [B, T, O].

        With `swapped` (for a transposed weight) x is the output gradient and dy the input. If
        samples are units, x is [1, n, I] and dy [1, n, O], with the entries of all units.

        Returns:
            The gradient of the handle, or None if (x, dy) is saved instead.
        """
        if self._only_seen(position, *((x, dy) if swapped else (dy, x))):
            return None
        return self._take_use(position, linear=[(x, dy)])

    def take_embedding(self, position: int, indices: Tensor, dy: Tensor) -> Tensor | None:
        """Take the tensors of a look-up, indices [B, T] and dy [B, T, E]; see `take_linear`."""
        if self._only_seen(position, dy, indices):
            return None
        return self._take_use(position, embedding=[(indices, dy)])

    def _take_use(self, position: int, **uses: list[tuple[Tensor, Tensor]]) -> Tensor | None:
        """Depending on the mode, add to norms or sums, save tensors, or return the gradient."""
        use, mode = self._deferred(position, **uses), self.run.mode
        if mode in ("sum", "norms") and self._single(position):
            self._take_once(position, use)
        elif mode in _CLIPS and self._way(position) == "instantiate":
            return use.dense()
        else:
            self._keep(position).save(use)
        return None

    def take_tiled(self, position: int, use: TiledUse) -> bool:
        """Take an operation that recomputes G_i; return False if the handle needs the gradient."""
        if self._only_seen(position, *(use.rows if self.run.watches else ())):
            return True
        mode = self.run.mode
        if mode in _CLIPS and self._way(position) == "instantiate":
            return False
        if mode in ("sum", "norms") and self._single(position):
            self._take_once(position, self._deferred(position, tiled=[use]))
        else:
            self._keep(position).tiled.append(use)
        return True

    @property
    def bound(self) -> float:
        """L2 bound of one sample's contribution to this group's sums."""
        return self.group.share * self.step.sums.bound

    def plan(self) -> Plan:
        """Return the planned modes of this gate's matrix parameters, in the order of `shapes`."""
        return self.rules.planner.plan(self.shapes)

    def _enter(self) -> None:
        """Drop tensors of an earlier backward, such as a backward for gradients of inputs."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self.step.before_gate()
            self.reset()
            self._task = task

    def _only_seen(self, position: int, *rows: Tensor) -> bool:
        """Show an operation's rows to the tests; return whether only tests need the operation."""
        self._enter()
        for watch in self.run.watches:
            watch.use(self, position, rows)
        return self.run.mode == "prove" and position not in self._dense

    def _single(self, position: int) -> bool:
        """Return whether only one operation uses the parameter, so G_i has no cross terms."""
        return len(self.shapes[position]) == 1 and position not in self._dense

    def _way(self, position: int) -> str:
        if self._plan is None:
            self._plan = dict(zip(self.shapes, self.plan().modes, strict=True))
        return self._plan[position]

    def _deferred(self, position: int, **uses: Any) -> DeferredGradients:
        rows = self.group.parameters[position].shape[0]
        known = self._cancelling.get(position)
        return DeferredGradients(rows, units=self.units, cancelling=known, **uses)

    def _keep(self, position: int) -> DeferredGradients:
        return self._kept.setdefault(position, self._deferred(position))

    def _take_once(self, position: int, use: DeferredGradients) -> None:
        """For ghost clipping, add the norm or the sum of the only operation on a parameter."""
        if self.run.mode == "sum":
            factors = self.run.factors
            if self.batch_size != len(factors):
                self.rules.refuse_size(self.batch_size, len(factors))
            self._sums[position] = use.clipped(*shares([use], factors, self.bound))
            if not self.run.norms_again:
                return
        (squares,) = squared_norms([use])
        self._cancelling[position] = use.cancelling
        self.squares = squares if self.squares is None else self.squares + squares

    def finish_norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the group's squared norms [B], from the handles' gradients and saved tensors."""
        parts = [] if self.squares is None else [self.squares]
        parts += squared_norms(self._kept.values(), [grads[i] for i in self._kept])
        self._cancelling |= {i: one.cancelling for i, one in self._kept.items()}
        rest = [g for i, g in enumerate(grads) if g is not None and i not in self._kept]
        if rest and not parts:
            return squared_norm(*rest)
        zeros = torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)
        squares = sum(parts, zeros)
        return squared_norm(*rest, into=squares) if rest else squares

    def finish(self, grads: Sequence[Tensor | None]) -> None:
        """Run the backward of the gate: add the clipped per-sample gradients to the sums."""
        self._enter()
        self._refuse_written()
        with self.step.dropping():
            if self.run.mode == "prove":  # the loop's own backward during a trial
                self.step.begin_trial()
                self.compare(grads)
            else:
                self.rules.admit(self)
                self.compare(grads)
                self._add_clipped(grads, self._factors(grads))
        self.reset()

    def compare(self, grads: Sequence[Tensor | None]) -> None:
        """Let the watches compare the handles' gradients, before anything is released."""
        for watch in self.run.watches:
            watch.gate(self, grads)

    def _factors(self, grads: Sequence[Tensor | None]) -> Tensor:
        rules = self.rules
        if self.run.mode == "sum":
            return self.run.factors
        scale = self.batch_size if rules.loss_reduction == "mean" else 1
        squares = self.finish_norms(grads)
        squares = squares if scale == 1 else squares * scale**2
        keep = self.step.rows.of(squares)
        factors = clip_factors(squares, self.bound, rules.clip_function, keep=keep)
        rules.statistics.note(squares, factors)
        return factors if scale == 1 else rounded_down(factors.double() * scale)

    def _add_clipped(self, grads: Sequence[Tensor | None], factors: Tensor) -> None:
        """Add clipped sums to the logical batch: sums rounded in float32, then exact sums."""
        step, parameters = self.step, self.group.parameters
        kept = dict(zip(self._kept, shares(self._kept.values(), factors, self.bound), strict=True))
        dense: dict[nn.Parameter, Tensor] = {}
        rounded: dict[nn.Parameter, int] = {}

        def total(i: int) -> Tensor:
            grad, parts = grads[i], [self._sums[i]] if i in self._sums else []
            parts += [self._kept[i].clipped(kept[i])] if i in kept else []
            parts += [] if grad is None else [clip_reduce(grad, factors, grid=step.sums.grid)]
            return functools.reduce(torch.add, parts)

        for position, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            sharded: bool = is_sharded(parameter)  # ranks exchange sharded sums in this order
            if position in self._sums or position in kept:
                if sharded:
                    step.add([parameter], [total(position)], is_exact=False)
                else:
                    rounded[parameter] = position
            elif grad is None:
                step.sums.add_zero(parameter)
            elif sharded:
                step.add_clipped([parameter], [grad], factors)
            else:
                dense[parameter] = grad
        if rounded:
            step.add(list(rounded), map(total, rounded.values()), is_exact=False)
        if dense:
            step.add_clipped(list(dense), list(dense.values()), factors)

    def reset(self) -> None:
        self._kept: dict[int, DeferredGradients] = {}
        self._sums: dict[int, Tensor] = {}
        self.squares = None
