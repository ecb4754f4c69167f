"""Estimates memory and time of a training step, private or not, without running it on data.

The step runs on fake tensors, which have shapes but no memory, under a `Tape`. Autograd nodes
replace the clipping gates: they keep the gates' tensors, and add the predicted time.

Letters: B samples, T tokens, I inputs, O outputs, P ranks of a context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..distributed.collectives import BUNDLE_BYTES
from ..verification.second_order import differentiable_once
from .planner import EmbeddingShape, HeadShape, LinearShape, Planner, Work, cost
from .tape import Tape

PARTS = (
    *("weights", "optimizer state", "activations", "logits and loss", "gradients"),
    *("per-sample gradients", "clipped sums", "workspace"),
)
# Class names of layers whose modes are planned, besides nn.Linear and nn.Embedding.
_PLANNED = ("Conv1D", "LinearCrossEntropy")
_NOISE_BYTES = 2 * 8
# Time of a gate's Python code per parameter, as a number of launches; measured on a CPU.
_LAUNCHES = 25


@dataclass(frozen=True)
class StepCost:
    """The predicted memory and time of one step.

    Attributes:
        memory_bytes: peak memory on one rank.
        seconds: time of a step.
        parts: the bytes of each part at the peak, which add up to memory_bytes.
        modes: how many parameters use each grad_sample_mode; empty without privacy.
        is_limited: whether the fastest modes would exceed the planner's memory budget.
    """

    memory_bytes: int
    seconds: float
    parts: Mapping[str, int]
    modes: Mapping[str, int]
    is_limited: bool = False


@dataclass(frozen=True)
class Workload:
    """The training step to estimate.

    Attributes:
        model: the model, on fake tensors.
        losses: function (model, tokens [B, T]) that returns the losses [B].
        batch, tokens: B and T on this rank.
        microbatch: largest number of samples in a forward; None means all.
        head: the layer that computes the logits; None if unknown.
        optimizer: function that returns the optimizer of the trained parameters.
    """

    model: nn.Module
    losses: Callable[[nn.Module, Tensor], Tensor]
    batch: int
    tokens: int
    microbatch: int | None = None
    head: nn.Module | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = torch.optim.AdamW


class _Use(torch.autograd.Function):
    """Identity on a layer's output; saves the layer's input x, and calls `take(x, dy)`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, stand_in: Tensor, take: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.take = take
        return y.view_as(y)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.take(*ctx.saved_tensors, dy)
        return dy, None, None, None


@dataclass
class _Gates:
    """Replaces the gates of a private step: keeps the tensors that the gates would keep."""

    tape: Tape
    model: nn.Module
    planner: Planner
    clipping: str
    ranks: int
    microbatches: int
    batch: int
    shapes: dict[nn.Parameter, list[LinearShape]] = field(default_factory=dict)
    modes: dict[nn.Parameter, str] = field(default_factory=dict)
    is_limited: bool = False
    kept: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trained = trained_parameters(self.model)
        self.stand_in = torch.zeros((), requires_grad=True)
        self.is_forward = True
        self.takes_norms = False
        self.normed: list[int] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """In the body, layers save their inputs for the gates.

        For the other parameters, such as biases, autograd computes summed gradients. Per-sample
        gradients read the same tensors, so they are assumed to take as long.
        """
        with ExitStack() as stack:
            trained, planned = set(self.trained), set[Any]()
            for module in self.model.modules():
                is_planned = isinstance(module, nn.Linear | nn.Embedding)
                is_planned |= type(module).__name__ in _PLANNED
                weight = module._parameters.get("weight")
                if isinstance(module, nn.RMSNorm) and weight in trained:
                    # Its rule keeps no normalized input, which autograd would keep.
                    planned.add(weight)
                    stack.callback(module.register_forward_hook(self._note_norm).remove)
                if is_planned and weight in trained:
                    planned.add(weight)
                    stack.callback(module.register_forward_hook(self._watch).remove)
                if type(module).__name__ == "MultiheadAttention" and self.ranks == 1:
                    self._as_one_node(module, stack)
            for parameter in planned:
                parameter.requires_grad_(False)
                stack.callback(parameter.requires_grad_, True)
            yield

    def _watch(self, module: nn.Module, given: tuple[Any, ...], y: Tensor) -> Tensor:
        weight, x = module._parameters["weight"], given[0]
        assert weight is not None
        rows, columns = weight.shape
        tokens = max(1, x.numel() // self.batch)
        shape: LinearShape
        if isinstance(module, nn.Embedding):
            tokens = max(tokens, x.numel() if x.shape[0] != self.batch else 0)
            shape = EmbeddingShape(self.batch, tokens, columns, rows, weight.dtype)
        else:
            if type(module).__name__ == "Conv1D":
                rows, columns = columns, rows
            kind = HeadShape if len(given) > 1 and given[1] is not None else LinearShape
            shape = kind(self.batch, max(1, tokens // columns), columns, rows, y.dtype)
            x = x.to(y.dtype)
        if self.is_forward:
            self.shapes.setdefault(weight, []).append(shape)
        result: Tensor = _Use.apply(
            y, x, self.stand_in, lambda x, dy: self._take(weight, shape, x, dy)
        )
        return result

    def _note_norm(self, module: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        """Note the bytes of the weight's gradient: read dy and x, write and read the product."""
        if self.is_forward:
            self.normed.append(4 * y.nbytes)

    def _as_one_node(self, module: nn.Module, stack: ExitStack) -> None:
        """Save only x, qkv, o and lse of a `dpflash.nn.MultiheadAttention`."""
        hooks: list[saved_tensors_hooks] = []

        def enter(module: Any, *_: Any) -> None:
            hooks.append(
                saved_tensors_hooks(
                    lambda x: (x.shape, x.stride(), x.dtype),
                    lambda form: torch.empty_strided(*form[:2], dtype=form[2]),
                )
            )
            hooks[-1].__enter__()

        def leave(module: Any, given: Any, kept: Any, out: Any) -> Any:
            hooks.pop().__exit__(None, None, None)
            x = given[0]
            count, tokens, width = x.shape
            of_tokens = 2 * width + 2 * module.num_kv_heads * module.head_dim
            y: Tensor = _Use.apply(out[0], x, self.stand_in, lambda *_: None)
            for columns, dtype in ((of_tokens, y.dtype), (module.num_heads, torch.float32)):
                saved = torch.empty(count, tokens, columns, dtype=dtype)
                y = _Use.apply(y, saved, self.stand_in, lambda *_: None)
            return y, *out[1:]

        stack.callback(module.register_forward_pre_hook(enter).remove)
        stack.callback(
            module.register_forward_hook(
                lambda m, args, kwargs, out: leave(m, args, kwargs, out), with_kwargs=True
            ).remove
        )

    def plan(self) -> None:
        """Choose the modes; the forward must have noted all shapes."""
        self.is_forward = False
        groups = [list(self.shapes)]
        if self.clipping == "per_layer":
            groups = [[parameter] for parameter in self.shapes]
        for group in groups:
            found = self.planner.plan({i: self.shapes[p] for i, p in enumerate(group)})
            self.modes.update(zip(group, found.modes, strict=True))
            self.is_limited |= found.is_limited

    @property
    def is_ghost(self) -> bool:
        """Whether the step has two backwards (ghost clipping)."""
        return "ghost" in self.modes.values()

    def _take(self, weight: nn.Parameter, shape: LinearShape, x: Tensor, dy: Tensor) -> None:
        mode, size = self.modes[weight], shape.stored_bytes
        if self.clipping == "per_layer":
            if mode == "instantiate":
                self.tape.allocate(size, "per-sample gradients")
            self._sum(weight)
        elif mode == "book_keeping":
            self.pairs.append((x, dy))
        elif mode == "ghost":
            if not self.takes_norms:
                self._sum(weight)
        else:
            grad = self.tape.allocate(size, "per-sample gradients")
            if self.ranks > 1:
                # A full bundle is sent to the other ranks; this rank keeps its slice.
                self.tape.allocate(min(size, BUNDLE_BYTES), "workspace")
                grad = self.tape.allocate(-(-size // self.ranks), "per-sample gradients")
            self.kept.setdefault(weight, grad)

    def _sum(self, parameter: nn.Parameter) -> None:
        """Allocate a clipped sum: float64 if the sum is exact and noise is added later."""
        is_last = self.microbatches == 1 and self.ranks == 1
        is_exact = self.modes.get(parameter, "instantiate") == "instantiate"
        size = (8 if is_exact and not is_last else 4) * parameter.numel()
        if self.ranks > 1 and self.microbatches == self.batch == 1 and parameter in self.kept:
            self.sums[parameter] = self.kept[parameter]  # clipped only at the release
        if parameter not in self.sums:
            share = -(-size // self.ranks)
            self.sums[parameter] = self.tape.allocate(share, "clipped sums")

    def finish(self) -> None:
        """End a backward: add the time of norms, and allocate the clipped sums."""
        ceilings = self.tape.ceilings
        for parameter in self.trained:
            parameter.grad = None
        if self.sums:  # add to the sums of the microbatches before
            self.tape.add(Work(moved=3 * 4 * sum(p.numel() for p in self.trained)))
        for parameter, shapes in self.shapes.items():
            mode = self.modes[parameter]
            # Ghost clipping ran its second backward on the tape, which counted the time.
            known = cost(shapes, "book_keeping" if mode == "ghost" else mode, ceilings)
            self.tape.seconds += known.seconds
        self.tape.add(Work(launches=_LAUNCHES * len(self.trained)))
        self.tape.add(Work(moved=sum(self.normed), launches=2 * len(self.normed)))
        self.normed.clear()
        rest = [p for p in self.trained if p not in self.shapes]
        dense = {
            p: self.tape.allocate(4 * self.batch * p.numel() // self.ranks, "per-sample gradients")
            for p in rest
        }
        self.tape.add(Work(moved=3 * 4 * self.batch * sum(p.numel() for p in rest)))
        for _, dy in self.pairs:
            if ceilings.device == "cpu":
                self.tape.allocate(4 * dy.numel(), "workspace")
        for parameter in self.trained:
            self._sum(parameter)
        del dense
        self.kept.clear()
        self.pairs.clear()

    def release(self) -> None:
        """Add the time of noise, and allocate the gradients for the optimizer."""
        count = sum(p.numel() for p in self.trained)
        own = -(-count // self.ranks)
        self.tape.add(Work(own, _NOISE_BYTES * own, "noise"))
        self.tape.add(Work(moved=8 * count))
        for parameter in self.trained:
            with self.tape.counting("gradients"):
                parameter.grad = torch.empty_like(parameter)
        self.sums.clear()


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def estimate_step(
    workload: Workload,
    tape: Tape,
    planner: Planner | None = None,
    *,
    clipping: str = "flat",
) -> StepCost:
    """Return the cost of a step after the first one. Without a planner, the step is not private.

    Must run under the `FakeTensorMode` in which the model was built.

    Args:
        workload: the step.
        tape: a new tape; it knows the device's speed and P, the number of ranks.
        planner: chooses the modes; None for a step without privacy.
        clipping: "flat" or "per_layer".
    """
    model, batch = workload.model, workload.batch
    trained = trained_parameters(model)
    optimizer = workload.optimizer(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for tensor in (*model.parameters(), *model.buffers()):
        tape.hold(tensor, "weights")
    for state in optimizer.state.values():
        for tensor in state.values():
            if isinstance(tensor, Tensor):
                tape.hold(tensor, "optimizer state")
    microbatch = min(batch, workload.microbatch or batch)
    rounds = math.ceil(batch / microbatch)
    gates = None
    if planner is not None:
        gates = _Gates(tape, model, planner, clipping, tape.ranks, rounds, microbatch)
    with tape, ExitStack() as stack:
        if workload.head is not None:
            hook = workload.head.register_forward_pre_hook(tape.begin_loss)
            stack.callback(hook.remove)
        if gates is not None:
            stack.enter_context(gates.attached())
        # All microbatches but the first cost the same, so run two at most.
        for number in range(min(rounds, 2)):
            before = tape.seconds
            _forward_and_backward(workload, microbatch, tape, gates)
            if number:
                tape.seconds += (rounds - 2) * (tape.seconds - before)
        if gates is not None:
            gates.release()
        stack.close()
        with tape.counting("workspace"):
            optimizer.step()
            optimizer.zero_grad()
    parts = {name: tape.peak[name] for name in PARTS}
    modes: dict[str, int] = {}
    for mode in gates.modes.values() if gates is not None else ():
        modes[mode] = modes.get(mode, 0) + 1
    is_limited = gates is not None and gates.is_limited
    return StepCost(tape.peak.total(), tape.seconds, parts, modes, is_limited)


def _forward_and_backward(
    workload: Workload, batch: int, tape: Tape, gates: _Gates | None
) -> None:
    with tape.counting("activations"):
        if gates is not None:
            gates.is_forward, gates.shapes = True, {}
        inputs = torch.zeros(batch, workload.tokens, dtype=torch.int64)
        losses = workload.losses(workload.model, inputs).sum()
    with tape.counting("workspace"):
        if gates is None:
            losses.backward()
        else:
            gates.plan()
            if gates.is_ghost:
                gates.takes_norms = True
                losses.backward(retain_graph=True)
                gates.takes_norms = False
            losses.backward()
            gates.finish()
    for parameter in trained_parameters(workload.model) if gates is None else ():
        if parameter.grad is not None:
            tape.hold(parameter.grad, "gradients")
