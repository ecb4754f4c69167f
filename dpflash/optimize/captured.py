"""CapturedCalls: the model's forward and its clipped backward, replayed as CUDA graphs.

A call of the model with gradients enabled is captured once for each kind of batch, in two graphs:
its forward, and its backward up to the clipped sums, which are added to persistent tensors. The
losses in between run as usual, and so does everything that privacy depends on: the checks of the
call and of the backward, accounting, noise and the release. No graph contains noise or accounting,
so a replay cannot repeat them.

    model(x):          copy x to the tensor that the graph reads; replay the forward
    losses:            the loop's own operations
    backward:          copy the outputs' gradient and the mask of rows that are no padding; run
                       the checks; replay the backward; add the sums to the logical batch
    optimizer.step():  as usual

Calls that cannot be captured run layer by layer, and `engine.optimization` reports the reason.
Calls on batches of an isolation test are not captured, nor calls with random masks, with hooks or
without instantiated per-sample gradients. A captured model must keep no results, and use only its
arguments, parameters and buffers: a replay would read and write other tensors of an old batch.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpflash.kernels import Kept

from ..clipping.backward import PrivateBackward
from ..clipping.gate import Gate
from ..clipping.precision import without_autocast
from ..clipping.rules import BackwardRun, GateRules
from ..clipping.statistics import ClipStatistics
from ..random_state import RandomState
from ..refusal import PrivateRefusal
from ..sampling.slots import RealRows
from ..step import ClippedSums, PrivateStep
from ..verification.second_order import differentiable_once
from .levels import Optimization

_log = logging.getLogger(__name__)

# Limits: kinds of batches that are captured; kinds whose calls are counted; calls of a kind before
# the kind is captured; changes of the addresses of the model's tensors.
_MOST_KINDS, _MOST_SEEN, _EAGER_CALLS, _MOST_MOVES = 4, 64, 3, 3
# Allowed relative difference between a replay and eager layers: kernels may reorder sums.
_ROUNDING = 2.0**-7
_PLAIN = (type(None), bool, int, float, str)
_OFF = "; or pass PerformanceConfig(cuda_graph=False)"


def obstacle(backward: PrivateBackward, optimization: Optimization) -> str | None:
    """Return why no call of a private model can be captured; None if calls may be captured."""
    device, ranks = _device(backward), backward.ranks
    if device.type != "cuda":
        return f"the model is on {device}"
    if ranks.everyone is not None:
        return "several ranks exchange data in each step"
    if optimization.compiled:
        return "torch.compile runs the model"
    return None


def _device(backward: PrivateBackward) -> torch.device:
    return backward.groups[0].parameters[0].device


class NotCaptured(RuntimeError):
    """A call cannot be captured; the message states the reason."""


class Recorder(Protocol):
    """Records the kernels that are launched inside a context, and replays them."""

    def aside(self) -> AbstractContextManager[None]:
        """Warm up: run the body on the stream of the recordings, without recording it."""

    def recording(self) -> AbstractContextManager[Callable[[], None]]:
        """Record the block; yields the function that replays it."""


class CudaGraphs:
    """Records CUDA graphs that share memory. Replay the graphs in the order of recording."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """See `Recorder`."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                before.wait_stream(self._stream)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], None]]:
        """See `Recorder`."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA during the capture, as a loader that pins memory does.
        mode = "thread_local"
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                    yield graph.replay
            except BaseException:
                torch.cuda.set_stream(before)  # a failed capture does not restore it
                raise


class CapturedCalls:
    """Captures and replays the calls of one private model.

    Args:
        module: the model.
        backward: the model's private backward.
        step: holds the sums of the current logical batch.
    """

    def __init__(self, module: nn.Module, backward: PrivateBackward, step: PrivateStep):
        self._module = module
        self._backward = backward
        self._step = step
        self._found: dict[Hashable, _CapturedCall | None] = {}
        self._counts: dict[Hashable, int] = {}
        self._open: tuple[_ReplayedGate, int] | None = None
        self._moves = 0
        self._is_off = False
        self._why = "the model was not called often enough yet with any kind of batch"

    @property
    def sentence(self) -> str:
        """A sentence on which calls are captured, or why none is."""
        if self._is_off or not any(self._found.values()):
            return f"left out: CUDA graphs, since {self._why}"
        # Do not name shapes, which are private if the longest sample of a batch determines them.
        return "CUDA graphs: forward and backward of batches of frequent shapes"

    def outputs(
        self,
        setting: Hashable,
        arguments: tuple[Any, Any],
        run: Callable[[Any, Any], Any],
        keeping_state: Callable[[], AbstractContextManager[object]],
    ) -> Any:
        """Return the model's outputs from a replay, or None if the model must run layer by layer.

        Args:
            setting: values that determine the capture, besides the kind of batch.
            arguments: (args, kwargs) of the call.
            run: function that runs the model on (args, kwargs).
            keeping_state: context that restores, on exit, the state that the model changes.
        """
        if self._is_off or not self._is_alone() or not self._backward.may_replay:
            return None
        if self._backward.is_past_calls:
            self._why = "the loop calls layers of the model by themselves"
            return None
        leaves, structure = tree_flatten(arguments)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if (why := self._unfit(leaves, tensors)) is not None:
            self._why = why
            return None
        kinds = [
            (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x)
            for x in leaves
        ]
        kind = (setting, repr(structure), tuple(kinds), self._step.bound)
        if kind not in self._found:
            if len(self._counts) > _MOST_SEEN or len(self._found) >= _MOST_KINDS:
                self._why = "batches have too many shapes, or numbers that the model keeps change"
                return None
            count = self._counts[kind] = self._counts.get(kind, 0) + 1
            if count <= _EAGER_CALLS:
                return None
            with keeping_state():
                self._found[kind] = self._capture(arguments, run)
        call = self._found[kind]
        if call is None:
            return None
        if not call.is_in_place():
            self._leave_place()
            return None
        return self._replayed(call, tensors)

    def _leave_place(self) -> None:
        self._found.clear()
        self._counts.clear()
        self._moves += 1
        if self._moves > _MOST_MOVES:
            self._is_off, self._why = True, "tensors of the model are replaced again and again"

    def _is_alone(self) -> bool:
        """Whether no earlier call still waits for its backward."""
        is_open = not self._backward.forward.state.is_over
        if self._open is not None:
            gate, microbatch = self._open
            is_open |= not gate.has_run and microbatch == self._step.tracker.received
        if is_open:
            self._is_off = True
            self._why = "the loop calls the model more than once for a backward"
        return not is_open

    def _unfit(self, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> str | None:
        """Return why arguments cannot be copied into the tensors that a graph reads, or None."""
        if self._backward.forward.units is not None:
            return "samples are not rows of the batch"
        device = _device(self._backward)
        if any(x.device != device for x in tensors):
            return f"an argument of the model is not on {device}"
        if any(x.requires_grad for x in tensors):
            return "an argument of the model requires a gradient"
        if not tensors:
            return "the model was given no tensor"
        others = [type(x) for x in leaves if not isinstance(x, (Tensor, *_PLAIN))]
        return f"the model was given {others[0].__name__}" if others else None

    def _capture(
        self, arguments: tuple[Any, Any], run: Callable[[Any, Any], Any]
    ) -> _CapturedCall | None:
        try:
            sums = _static_sums(self._step)
            return _CapturedCall(self._module, self._backward, sums, arguments, run)
        except NotCaptured as error:
            self._why = str(error)
        except Exception as error:
            # The text of the error may contain private values.
            self._why = f"capturing failed with {type(error).__name__}, which the log has"
            _log.debug("capturing failed", exc_info=True)
        return None

    def _replayed(self, call: _CapturedCall, tensors: Sequence[Tensor]) -> Any:
        forward = self._backward.forward
        gate = _ReplayedGate(self._backward.rules, self._backward.groups[0], call, forward.number)
        handle, *_ = handles = gate.open()
        forward.replay(gate, handles, call.state)
        call.replay_forward(gate, tensors)
        self._open = gate, self._step.tracker.received
        return call.outputs(_Replay.apply(call, handle))


class _CapturedCall:
    """The forward graph and the backward graph of one kind of batch, and their tensors.

    Args:
        module, backward: see `CapturedCalls`.
        sums: empty sums, to which the backward graph adds.
        arguments: (args, kwargs) of the first call of this kind.
        run: see `CapturedCalls.outputs`.

    Attributes:
        state: the state of `PrivateForward` after the captured forward.
        roots: the outputs that require a gradient.

    Raises:
        NotCaptured: this call cannot be captured.
        RuntimeError: the model waited for the device, or CUDA refused the capture.
    """

    def __init__(
        self,
        module: nn.Module,
        backward: PrivateBackward,
        sums: ClippedSums,
        arguments: tuple[Any, Any],
        run: Callable[[Any, Any], Any],
    ):
        recorder: Recorder = CudaGraphs(_device(backward))
        _refuse_hooks(module)
        self._module, self._backward = module, backward
        # Graphs read these tensors by address, so graphs would not see tensors that replace these.
        self._held = _tensors_in(module)
        self._places = _places(self._held)
        leaves, structure = tree_flatten(arguments)
        leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves]
        self._inputs = [x for x in leaves if isinstance(x, Tensor)]
        args, kwargs = tree_unflatten(leaves, structure)
        self._sums = sums
        self._noted = _Noted()
        self._kept = Kept()
        step, clip, forward = _Captured(self._sums), BackwardRun(), backward.forward

        def admit(gate: Gate) -> None:
            step.rows.set_size(gate.batch_size, gate.device)
            if gate.generation != forward.number or gate.batch_size != forward.state.batch_size:
                raise NotCaptured("layers of one call saw batches of several sizes")
            forward.finish()

        # Gates hold their rules by weak references.
        self._rules = replace(
            backward.rules, step=step, statistics=self._noted, run=lambda: clip, admit=admit
        )
        with forward.gates_with(functools.partial(Gate, self._rules)):
            self._run = functools.partial(self._forward, run, args, kwargs)
            with recorder.aside():
                with forward.aside():
                    reference = self._first()
                self._refuse_strangers()
            self._noted.found.clear()
            with forward.aside(), self._kept.capturing():
                with recorder.recording() as self._replay_forward:
                    self._flat, self._structure = self._run()
                with recorder.recording() as self._replay_backward:
                    self._differentiate()
                self.state = forward.state
        # Names of the autograd operations that made the outputs.
        self.stands_for = tuple(type(x.grad_fn).__name__ for x in self.roots)
        self._rows = step.rows
        self._kept.write()
        self._refuse_other(reference)

    def _forward(self, run: Any, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        # Autocast caches casts of the weights, which change later.
        torch.clear_autocast_cache()
        flat, structure = tree_flatten(run(args, kwargs))
        torch.clear_autocast_cache()
        self.roots = [x for x in flat if isinstance(x, Tensor) and x.requires_grad]
        if not self.roots:
            raise NotCaptured("no output of the model depends on trained parameters")
        if any(not isinstance(x, (Tensor, *_PLAIN)) for x in flat):
            raise NotCaptured("the model returns values other than tensors and plain values")
        return flat, structure

    def _differentiate(self) -> None:
        # Stop at the gates' stand-ins, since AccumulateGrad nodes would run on other streams.
        ends = list(self._rules.stand_ins.values())
        with without_autocast(_device(self._backward).type):
            torch.autograd.grad(self.roots, ends, self._grads, allow_unused=True)

    def _first(self) -> list[Tensor]:
        """Run layer by layer; return outputs and sums, with which a replay is compared."""
        device = _device(self._backward)
        before = RandomState(device)
        # The first run creates sums and persistent buffers of kernels. The second adds to these.
        self._run()
        self._grads = [torch.ones_like(x) for x in self.roots]
        self._differentiate()
        with self._kept.rehearsing():
            self._run()
            self._clear(self._sums.values())
            self._differentiate()
        if not RandomState(device).equals(before):
            raise NotCaptured("the model's forward draws random numbers, as dropout does")
        return [x.detach().clone() for x in (*self.roots, *self._sums.values())]

    def _refuse_strangers(self) -> None:
        """Raise NotCaptured if a replay would miss tensors that the forward reads or keeps."""
        seen = _Seen([*self._inputs, *self._held])
        with self._backward.forward.aside(), seen:
            self._run()
        self.roots = []
        if (refusal := seen.refusal()) is not None:
            raise NotCaptured(refusal)

    def _refuse_other(self, reference: Sequence[Tensor]) -> None:
        """Raise NotCaptured if the first replay has other outputs or sums than the eager run."""
        self._clear(self._sums.values())
        self._replay_forward()
        self._replay_backward()
        found = (*self.roots, *self._sums.values())
        for own, other in zip(found, reference, strict=True):
            # Allow nonfinite gradients of a sample that the eager run has too.
            is_finite = other.isfinite()
            same = torch.equal(own.isfinite(), is_finite)
            distance, size = (
                x.masked_fill(~is_finite, 0).double().norm() for x in (own - other, other)
            )
            if not same or not bool(distance <= _ROUNDING * size):
                raise NotCaptured("a replay gave other results than the model")

    @staticmethod
    def _clear(sums: Iterable[Tensor]) -> None:
        if totals := list(sums):
            torch._foreach_zero_(totals)

    def is_in_place(self) -> bool:
        """Whether the model's tensors have the addresses, shapes and flags of the capture."""
        return _places(_tensors_in(self._module)) == self._places

    def outputs(self, roots: Sequence[Tensor]) -> Any:
        """Return the outputs; `roots` replace the captured outputs that require a gradient."""
        own = iter(roots)
        return tree_unflatten(
            [next(own) if any(x is root for root in self.roots) else x for x in self._flat],
            self._structure,
        )

    def replay_forward(self, gate: _ReplayedGate, tensors: Sequence[Tensor]) -> None:
        """Replay the forward on tensors; overwrites the activations of the previous call."""
        self._gate = gate
        torch._foreach_copy_(self._inputs, list(tensors))
        self._replay_forward()
        self._versions = [x._version for x in self._of_forward()]

    def _of_forward(self) -> list[Tensor]:
        """Return the tensors that must not change between a forward and its backward."""
        return [*(x for x in self._flat if isinstance(x, Tensor)), *self._held]

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Copy the gradients of the outputs into the tensors that the backward reads."""
        for own, grad in zip(self._grads, grads, strict=True):
            own.zero_() if grad is None else own.copy_(grad)

    def replay_backward(self, gate: _ReplayedGate, rules: GateRules) -> None:
        """Add the clipped sums of the call to the logical batch.

        Raises:
            PrivateRefusal: after this call's forward, the graphs have run another batch, or the
                outputs, weights or max_grad_norm have changed.
        """
        if gate is not self._gate:
            raise PrivateRefusal(
                "losses come from an earlier call of the model, whose activations a later "
                "captured call has overwritten: call engine.backward after each forward" + _OFF
            ) from None
        if [x._version for x in self._of_forward()] != self._versions:
            raise PrivateRefusal(
                "outputs or weights of the model were changed in place after the model's call and "
                "before the backward. With cuda_graph=True the backward reads both again: change "
                "a clone of the outputs, and change weights after optimizer.step()" + _OFF
            ) from None
        step = rules.step
        if step.sums.bound != self._sums.bound:
            raise PrivateRefusal(
                "max_grad_norm changed between a call of the model and its backward. A captured "
                "backward clips to the earlier value: set max_grad_norm between steps" + _OFF
            ) from None
        self._rows.copy(step.rows)
        # Clear each sum, except sums of the logical batch, to which the replay adds.
        self._clear(total for p, total in self._sums.items() if step.sums.get(p) is not total)
        self._replay_backward()
        for squares, factors in self._noted.found:
            # Clones, since the next forward may overwrite the graph's memory.
            rules.statistics.note(squares.clone(), factors.clone())
        step.add(list(self._sums), self._sums.values())


class _Replay(torch.autograd.Function):
    """The replayed forward. Its backward copies the outputs' gradients for the backward graph."""

    @staticmethod
    def forward(ctx: Any, call: _CapturedCall, handle: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.stands_for = call, call.stands_for
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in call.roots)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        ctx.call.take(grads)
        return None, None


class _Seen(TorchDispatchMode):
    """Records the storages that the operations of a forward read and write.

    Args:
        known: the tensors that operations may read.
    """

    def __init__(self, known: Sequence[Tensor]):
        super().__init__()
        self._known = {_storage(x) for x in known}
        self._made: dict[int, StorageWeakRef] = {}
        self._refusal: str | None = None

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.numel()]
        is_written = any(
            a.alias_info and a.alias_info.is_write for a in operation._schema.arguments
        )
        if any(_storage(x) not in self._known and not self._is_made(x) for x in given):
            self._refusal = (
                "its forward reads a tensor that is no argument, parameter or buffer; pass it "
                "to the model as an argument, or register it as a buffer"
            )
        elif is_written and not self._is_made(given[0]):
            self._refusal = "its forward changes its arguments, parameters or buffers in place"
        found = operation(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.numel() and _storage(x) not in self._known:
                self._made[_storage(x)] = StorageWeakRef(x.untyped_storage())
        return found

    def _is_made(self, x: Tensor) -> bool:
        made = self._made.get(_storage(x))
        return made is not None and not made.expired()

    def refusal(self) -> str | None:
        """Return why this forward cannot be captured, or None. Delete its outputs before."""
        gc.collect()
        if self._refusal is None and not all(made.expired() for made in self._made.values()):
            return "its forward keeps tensors that it does not return, on the model or in a list"
        return self._refusal


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _tensors_in(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _places(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.requires_grad) for x in tensors]


class _ReplayedGate(Gate):
    """The clipping gate that takes the place of all clipping gates of a captured call."""

    def __init__(self, rules: GateRules, group: Any, call: _CapturedCall, number: int):
        one = replace(group, parameters=group.parameters[:1])
        size = call.state.batch_size
        assert size is not None
        super().__init__(rules, one, 0, size, generation=number + 1, units=None)
        self._call = call
        self.has_run = False

    def finish(self, grads: Sequence[Tensor | None]) -> None:
        """See `Gate.finish`."""
        self._enter()
        with self.step.dropping():
            if self.has_run:
                raise PrivateRefusal(
                    "a captured call runs its backward for a second time, but the first backward "
                    "may have overwritten its activations: call the model again" + _OFF
                ) from None
            self.has_run = True
            if self.run.mode != "clip":
                raise RuntimeError("a captured call ran a backward that does not clip")
            self.rules.admit(self)
            self.compare(grads)
            self._call.replay_backward(self, self.rules)
        self.reset()


class _Rows(RealRows):
    def __init__(self) -> None:
        super().__init__(lambda rows: None)
        self._mask = torch.empty(0)

    def set_size(self, rows: int, device: torch.device) -> None:
        """Create the mask, unless it has this size already."""
        if len(self._mask) != rows:
            self._mask = torch.ones(rows, dtype=torch.bool, device=device)

    def of(self, x: Tensor) -> Tensor:
        """See `RealRows.of`."""
        return self._mask

    def copy(self, rows: RealRows) -> None:
        """Copy the mask of a microbatch."""
        mask = rows.of(self._mask)
        self._mask.fill_(True) if mask is None else self._mask.copy_(mask)


class _Captured:
    """Stands in for the logical batch in a capture, so that graphs add clipped sums to `sums`."""

    def __init__(self, sums: ClippedSums):
        self.sums = sums
        self.rows = _Rows()

    def before_gate(self) -> None:
        """Do nothing: each replay's clipping gate calls `before_gate` of the logical batch."""

    def begin_trial(self) -> None:
        """Do nothing, since isolation tests (trials) are not captured."""

    def dropping(self) -> AbstractContextManager[None]:
        """Return a context manager that drops nothing."""
        return nullcontext()

    def add_clipped(
        self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor], factors: Tensor
    ) -> None:
        """See `PrivateStep.add_clipped`."""
        self.sums.add_clipped(parameters, grads, factors)

    def add(self, parameters: Sequence[nn.Parameter], *_: Any, **options: Any) -> None:
        """Raise NotCaptured, since these sums would be rounded."""
        raise NotCaptured(
            f"the planner keeps activations of '{self.sums.names[parameters[0]]}' instead of its "
            "per-sample gradients; pass grad_sample_mode='instantiate'"
        )


class _Noted(ClipStatistics):
    """Norms and clipping factors of each group, in the tensors that graphs write."""

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []

    def note(self, squares: Tensor, factors: Tensor) -> None:
        """See `ClipStatistics.note`."""
        self.found.append((squares, factors))


def _static_sums(step: PrivateStep) -> ClippedSums:
    own = step.sums
    sums = ClippedSums(own.trained, names=own.names, exact=own.exact)
    sums.begin(step.bound)
    if sums.grid is None:
        raise NotCaptured("sums are not exact; pass exact='auto' and a finite max_grad_norm")
    return sums


def plain_attributes(module: nn.Module) -> tuple[Any, ...]:
    """Return the modules' attributes that are numbers, flags or strings, for forwards to read."""
    return tuple(
        (name, type(x), x)
        for m in module.modules()
        for name, x in vars(m).items()
        if type(x) in _PLAIN
    )


def _refuse_hooks(module: nn.Module) -> None:
    for name, m in module.named_modules():
        hooks = [m._backward_hooks, m._backward_pre_hooks]
        # Forward hooks of the model itself may stay: they run outside of the captured forward.
        hooks += [m._forward_hooks, m._forward_pre_hooks] if name else []
        if any(hooks):
            raise NotCaptured(f"module '{name}' has hooks, which a replay would not call")
