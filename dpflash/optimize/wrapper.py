"""Wraps the model's forward: batch size, isolation test, autocast, torch.compile.

The optimization level chooses autocast and compiler. Clipping and noise run in the clipping gates'
backward, outside of both. Until the model has passed the isolation test, each forward is repeated
with other samples. Forwards seed random masks, see `dpflash.privacy.seeds`.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dpflash.kernels.attention_vendor import AUTO, FAST, describe

from ..attn.backend import attention_backend_of_model, current_backend
from ..clipping.backward import PrivateBackward
from ..clipping.precision import without_autocast
from ..grad_rules import PrivateModule
from ..grad_rules.base import CopiedPlain, plain_class
from ..grad_rules.convert import plain_layers, refuse_compiled
from ..grad_rules.experts import refuse_router_losses
from ..isolation.alteration import kept_by, sources
from ..isolation.backward_rows import allow_second_backwards
from ..isolation.call import Call, LeftAlone, most_samples
from ..isolation.comparison import kept, mixed, reached
from ..isolation.copies import copied
from ..isolation.declared_reduction import exchanges, refuse_scalars
from ..isolation.forward_rows import ForwardRows
from ..isolation.place import PlaceTrial
from ..privacy.seeds import SecretMasks
from ..random_state import RandomState
from ..refusal import PrivateRefusal, PrivateWarning, warn
from ..sampling.seen_batches import SeenBatches
from ..verification.attributes import OwnAttributes
from ..verification.nested import map_tensors, tensors_of
from ..verification.second_order import refuse_transforms
from ..verification.tracing import refuse_tracing
from ..verification.unchanged import Contents, Unchanged
from ..verification.uncovered import Uncovered
from .captured import CapturedCalls, plain_attributes
from .levels import Optimization

# Tests set a faster backend.
_BACKEND = "inductor"
_LOW = (torch.bfloat16, torch.float16)
_LONGEST_REASON = 200
_CALLS_TO_WARN = 3
_UNREPLACED = (
    "calls of the private model had samples, or parts of samples{where}, that could not be "
    "replaced by others, so dpflash did not check whether its forward mixes samples; see "
    "engine.verified. Give the model its samples as tensors whose first dimension is the batch, "
    "or as lists with one element for each sample"
)


class ForwardWrapper:
    """Wraps the forward of a model: `put` adds the wrapper and `remove` removes it.

    The model's class is changed, as for private layers. The model stays the same object with the
    same `state_dict()`, and its copies and pickles are plain models.
    """

    def __init__(
        self,
        module: nn.Module,
        backward: PrivateBackward,
        optimization: Optimization,
        unchanged: Unchanged | None = None,
        masks: SecretMasks | None = None,
        seen: SeenBatches | None = None,
        uncovered: Uncovered | None = None,
        captured: CapturedCalls | None = None,
        attention_backend: str = AUTO,
    ):
        self._optimization = optimization
        self._attention_backend = attention_backend
        self.unchanged = unchanged
        self._module = module
        self._backward = backward
        self._masks = masks
        self._seen = seen
        self._uncovered = uncovered
        self._captured = captured
        self._structure = self._restarts = 0
        self._left = LeftAlone()
        self._unreplaced = 0
        self._original = type(module)
        self._parameter_device = backward.groups[0].parameters[0].device
        self._device = self._parameter_device.type
        self._compiled = self._compile() if optimization.compiled else None
        # The model inside DistributedDataParallel, whose state_dict users save.
        self._inner = module.module if isinstance(module, DistributedDataParallel) else None
        self._is_plain = self._runs_plain = False
        self._plain_original = plain_class(module)
        # (module, its class, the class that wraps its class, the class that wraps its plain class)
        around = [_class_around(kind, self) for kind in (self._original, self._plain_original)]
        self._classes = [(module, self._original, *around)]
        if self._inner is not None:
            kinds = type(self._inner), plain_class(self._inner)
            around = [_class_with(kind, _guards(kind, self, "module.")) for kind in kinds]
            self._classes.append((self._inner, kinds[0], *around))

    @property
    def optimization(self) -> Optimization:
        """The attention kernels, and the changes that optimization level and CUDA graphs make."""
        found = self._optimization.with_change(self.attention)
        return found if self._captured is None else found.with_change(self._captured.sentence)

    @property
    def attention(self) -> str:
        """The attention kernels that dense and causal calls of the model use, and the reason."""
        return describe(self._parameter_device, self._backend())

    def _backend(self) -> str:
        """Return the attention backend of the model or, if none was set, of the loop."""
        asked = self._attention_backend
        asked = current_backend() if asked == AUTO else asked
        # Both backwards of ghost clipping must give equal gradients, which FAST does not ensure.
        return AUTO if asked == FAST and self._backward.planner.may_be_ghost else asked

    def put(self) -> None:
        """Wrap the model's forward, and guard its state_dict."""
        for module, _, around, _ in self._classes:
            object.__setattr__(module, "__class__", around)

    def remove(self) -> None:
        """Give the model its class back."""
        for module, original, _, _ in self._classes:
            object.__setattr__(module, "__class__", original)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Context in which the model is a plain model, for public data.

        Layers do not clip. Forwards run no isolation test and draw no secret masks. The level's
        autocast and the checks of buffers and `state_dict` stay active.
        """
        # Restore these class objects on exit, and not equal ones: torch.compile guards on them.
        held = [(module, type(module)) for module, *_ in self._classes]
        with plain_layers(self._module):
            for module, _, _, plain in self._classes:
                object.__setattr__(module, "__class__", plain)
            self._is_plain = True
            try:
                with self._refusing_private():
                    yield
            finally:
                self._is_plain = False
                for module, kind in held:
                    object.__setattr__(module, "__class__", kind)
        if self.unchanged is not None and (refusal := self.unchanged.refusal(contents=False)):
            raise PrivateRefusal(refusal) from None

    @contextlib.contextmanager
    def _refusing_private(self) -> Iterator[None]:
        """Context that refuses calls of single layers on samples of the private loader."""

        def refuse(module: nn.Module, args: Any, kwargs: Any) -> None:
            # A tensor with a grad_fn was computed by a layer, so its rows are not the loader's.
            if not self._runs_plain:
                self._refuse_private([x for x in _tensors((args, kwargs)) if x.grad_fn is None])

        layers = [module for module in self._module.modules() if module is not self._module]
        hooks = [x.register_forward_pre_hook(refuse, with_kwargs=True) for x in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def leave_compiler(self, why: str) -> None:
        """Continue without torch.compile, and record the reason."""
        if self._compiled is None:
            return
        self._compiled = None
        self._optimization = self._optimization.without_compiler(why)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_plain:
            return self._plainly(module, args, kwargs)
        if torch.is_grad_enabled():
            refuse_tracing("(the model itself)")
        if torch.compiler.is_compiling():
            return self._eagerly(module, self._autocast_dtype(), args, kwargs)
        if torch.is_grad_enabled():
            refuse_transforms("(the model itself)")
            refuse_router_losses("the call of the model", kwargs)
        tensors = _tensors((args, kwargs))
        with (
            self._backward.call(_first_dimensions(tensors)) as outermost,
            self._watched(),
            self._seeded(),
        ):
            if self._seen is not None and torch.is_grad_enabled():
                self._seen.check(tensors)
            if not outermost or not torch.is_grad_enabled() or module is not self._module:
                return self._called(module, tensors, args, kwargs)
            units = self._backward.forward.units
            rows = self._backward.forward.batch_hint or 0
            most = max(rows, most_samples(args, kwargs)) if units is None else units.size
            # Do not restart with several ranks, which would have to restart the test together.
            if self.unchanged is not None and self._backward.proof.group is None:
                self._restart_proof(self.unchanged.structure())
            trial, place_trial = self._backward.trial, self._backward.place_trial
            with self._noting_leaves(module, tensors), self._sandboxed():
                if place_trial is not None and place_trial.is_running:
                    outputs = self._elsewhere(place_trial, module, tensors, args, kwargs)
                elif self._backward.recording is not None or (trial and trial.sees_rows):
                    outputs = self._tried(module, tensors, args, kwargs)
                elif self._backward.begin_proof(most):
                    outputs = self._proven(module, tensors, args, kwargs)
                elif (outputs := self._replayed(module, args, kwargs)) is None:
                    outputs = self._called(module, tensors, args, kwargs)
            return self._backward.expect_scalar(outputs, self._size_of_call(tensors), tensors)

    @contextlib.contextmanager
    def _sandboxed(self) -> Iterator[None]:
        trial = self._backward.trial
        if trial is not None:
            with self._backward.step.noting_refusals():
                trial.sandbox.begin_forward()
        yield
        if trial is not None:
            trial.sandbox.end_forward()

    def _replayed(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a captured call; None if the model must run layer by layer."""
        if self._captured is None:
            return None
        dtype = self._autocast_dtype()

        def run(args: Any, kwargs: Any) -> Any:
            with self._backward.call(_first_dimensions(_tensors((args, kwargs)))):
                return self._eagerly(module, dtype, args, kwargs)

        setting = self._structure, dtype, self._backend(), plain_attributes(module)
        return self._captured.outputs(setting, (args, kwargs), run, self._keeping_state)

    def _tried(self, module: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Run a forward that an isolation test records, or compares with the recorded forward."""
        backward, recording = self._backward, self._backward.recording
        if recording is not None and (not recording.has_rows or recording.had_backward):
            return self._called(module, tensors, args, kwargs)
        backward.proof.begin_forward(2, new_pass=backward.forward.state.is_over)
        with self._recorded(tensors, compares=recording is not None) as rows:
            outputs = self._called(module, tensors, args, kwargs)
            rows.note_outputs(outputs)
        if recording is None:
            backward.compare(rows)
        else:
            recording.calls.append(rows)
        return outputs

    def _elsewhere(
        self,
        place_trial: PlaceTrial,
        module: nn.Module,
        tensors: list[Tensor],
        args: Any,
        kwargs: Any,
    ) -> Any:
        before = RandomState(self._parameter_device)
        # Turn dropout off for the forward alone: an error in the loop could leave it off.
        recorded = self._recorded(tensors, only_dtypes=True)
        with recorded as rows, place_trial.without_dropout, _noting_outputs(rows):
            outputs = self._eagerly(module, self._autocast_dtype(), args, kwargs)
        is_random = not RandomState(self._parameter_device).equals(before)
        place_trial.forward(rows.dtypes, is_random=is_random)
        return outputs

    def _noting_leaves(
        self, module: nn.Module, tensors: list[Tensor]
    ) -> AbstractContextManager[None]:
        if self._uncovered is None:
            return nullcontext()
        own, is_foreign = tensors, self._backward.step.tracker.current is None
        if self._seen is not None and not is_foreign:
            own = self._seen.of_batch(tensors)
        return self._uncovered.call(tensors, own, is_compiled=self._compiles(module))

    def _restart_proof(self, structure: int) -> None:
        """Restart the isolation test if modules or hooks have changed since the previous call."""
        is_other = structure != self._structure
        if is_other:
            refuse_compiled(self._module)
        self._restarts = self._restarts + 1 if is_other else 0
        self._structure = structure
        if self._restarts:
            self._backward.proof.restart(self._module.modules())
        if self._restarts == 3:
            warn(
                "modules or hooks of the model changed before each of three calls. Each change "
                "restarts the test that no sample affects others, so a step takes several times "
                "as long: register hooks once, before make_private, and keep them",
            )

    def _proven(self, module: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Run the forwards of the isolation test, and then the forward of the loop's own call.

        The state before the test is restored after it. The loop's forward runs last, so that
        hooks and objects hold its results.
        """
        with self._keeping_state() as before, self._backward.forward.aside():
            run = functools.partial(self._repeated, module, before)
            self._compare_forwards(run, (args, kwargs), before.attributes)
        return self._called(module, tensors, args, kwargs)

    @contextlib.contextmanager
    def _keeping_state(self) -> Iterator[_State]:
        """Context that restores, on exit, the state that forwards inside may change."""
        contents = Contents(()) if self.unchanged is None else self.unchanged.allowed_contents()
        before = _State(RandomState(self._parameter_device), contents, self._attributes())
        try:
            yield before
        finally:
            before.restore()

    def _compare_forwards(
        self, run: Callable[..., ForwardRows], arguments: Any, attributes: OwnAttributes
    ) -> None:
        proof = self._backward.proof
        alone = proof.group is None
        first = run(arguments, compares=True)
        size, layers = first.size, first.layers
        refusal = None if self.unchanged is None else self.unchanged.refusal()
        if alone and refusal is not None:
            self._backward.discard()
            raise PrivateRefusal(refusal) from None
        if alone and size < 2:
            return
        real, units = self._backward.step.rows.mask_of(size), self._backward.forward.units
        samples = [*range(size)] if real is None else real.nonzero().flatten().tolist()
        call = Call(arguments, size, units)
        left = self._left.varying(call)
        if len(samples) > 1 and not (call.has_samples and left is None):
            # Warn at the third such call: one batch may have as many tokens as samples by chance.
            self._unreplaced += 1
            if self._unreplaced == _CALLS_TO_WARN:
                where = "" if left is None else f" (argument {left})"
                warn(_UNREPLACED.format(where=where), PrivateWarning)
        if alone and not call.has_samples:
            proof.forward_repeated(layers, 0)
            return
        kept_by_first, telling = self._attributes(), first.telling(samples)
        source = proof.draw(lambda rng: sources(arguments, size, real, units, rng, telling))
        unchanged, others = kept_by(source, real), call.altered(source)
        second = run(others)
        refusal = refusal or mixed(first, second, unchanged)
        differing: list[str] = []
        if proof.is_any(bool(attributes.differing(kept_by_first))):
            # Attributes may keep a sample that was not replaced: run one sample in all rows.
            run(call.of_one(source))
            kept_by_second = self._attributes()
            differing = kept_by_first.differing(kept_by_second)
        keeps = proof.is_any(bool(differing))
        if keeps:
            third, fourth = (run(others, then) for then in (kept_by_first, kept_by_second))
            refusal = refusal or kept(third, fourth, size, differing)
        declared = self._backward.loss_reduction
        if declared is not None and proof.is_any(bool(first.scalars)):
            others_too = [run(call.altered(exchange)).scalars for exchange in exchanges(size)]
            scalars = [first.scalars, *others_too]
            proof.note_scalars(refuse_scalars(scalars, declared))
        seen = left is None and reached(first, second, ~unchanged)
        compared = len(samples) if seen and len(samples) > 1 else 0
        try:
            proof.forward_repeated(layers, compared, refusal, keeps=keeps)
        except PrivateRefusal:
            self._backward.discard()
            raise

    def _repeated(
        self,
        module: nn.Module,
        state: _State,
        arguments: Any,
        attributes: OwnAttributes | None = None,
        *,
        compares: bool = False,
    ) -> ForwardRows:
        """Run a forward from `state`, with `attributes` if given; return its recorded rows."""
        state.restore()
        (attributes or state.attributes).restore_copies()
        args, kwargs = copied(arguments)
        tensors = _tensors((args, kwargs))
        with self._backward.call(_first_dimensions(tensors)), self._watched(again=True):
            with self._recorded(tensors, compares=compares) as rows:
                rows.note_outputs(self._again(module, tensors, args, kwargs))
        return rows

    @contextlib.contextmanager
    def _recorded(
        self, tensors: list[Tensor], *, compares: bool = False, only_dtypes: bool = False
    ) -> Iterator[ForwardRows]:
        """Context that records the rows of the forward inside."""
        forward = self._backward.forward
        rows = ForwardRows(compares=compares, only_dtypes=only_dtypes, units=forward.units)
        rows.dtypes.update(p.dtype for p in self._module.parameters())
        # Float8 enlarges differences in float32 rounding to the size of bfloat16 rounding.
        rows.dtypes.update([torch.bfloat16] * bool(self._optimization.float8))
        forward.record(rows)
        try:
            yield rows
        finally:
            forward.record(None)
        rows.set_call(self._size_of_call(tensors), forward.state.used)

    def _attributes(self) -> OwnAttributes:
        return OwnAttributes(self._module.named_modules())

    def _again(self, module: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        if self._compiles(module):
            return self._called(module, tensors, args, kwargs)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: None, _dropped):
            return self._eagerly(module, self._autocast_dtype(), args, kwargs, inner=True)

    def _seeded(self) -> AbstractContextManager[None]:
        """Return a context that seeds random masks from a secret in forwards with gradients."""
        if self._masks is None or not torch.is_grad_enabled():
            return nullcontext()
        return self._masks.seeded(recomputing=torch._C._current_graph_task_id() != -1)

    def _watched(self, *, again: bool = False) -> AbstractContextManager[None]:
        """Return a context that notes the trained parameters that a forward rewrites."""
        if self.unchanged is None or torch.jit.is_tracing():
            return nullcontext()
        return self.unchanged.forward(again=again)

    def _called(self, module: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        dtype = self._autocast_dtype()
        size = self._batch_size(tensors) if self._compiles(module) else 0
        if size:
            batch = [t for t in tensors if t.shape[0] == size]
            return self._through_compiler(size, batch, dtype, args, kwargs)
        return self._eagerly(module, dtype, args, kwargs)

    def _batch_size(self, tensors: list[Tensor]) -> int:
        """Return the loader's batch size if a tensor has as many rows, else the first tensor's."""
        drawn = self._backward.forward.batch_hint
        first = [t.shape[0] for t in tensors]
        return drawn if drawn in first else next(iter(first), 0)

    def _size_of_call(self, tensors: list[Tensor]) -> int:
        if self._backward.forward.units is not None:
            return self._backward.forward.units.size
        size = self._backward.forward.known_batch_size()
        return self._batch_size(tensors) if size is None else size

    def _autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of the user's autocast region, or else of the level's autocast."""
        if torch.is_autocast_enabled(self._device):
            return torch.get_autocast_dtype(self._device)
        return torch.bfloat16 if self._optimization.autocast else None

    def _eagerly(
        self,
        module: nn.Module,
        dtype: torch.dtype | None,
        args: Any,
        kwargs: Any,
        *,
        inner: bool = False,
    ) -> Any:
        autocast = nullcontext() if dtype is None else torch.autocast(self._device, dtype=dtype)
        with autocast, attention_backend_of_model(self._backend()):
            if inner and self._inner is not None:
                # Calling DistributedDataParallel itself would prepare for a backward.
                outputs = self._inner(*args, **kwargs)
            else:
                kind = self._plain_original if self._is_plain else self._original
                outputs = kind.forward(module, *args, **kwargs)
        return _widened(outputs) if self._optimization.autocast else outputs

    def _plainly(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._refuse_private(_tensors((args, kwargs)))
        # Of the inner model, not of DDP: the step averages public gradients over the ranks.
        inner = module is self._module
        self._runs_plain = True
        try:
            return self._eagerly(module, self._autocast_dtype(), args, kwargs, inner=inner)
        finally:
            self._runs_plain = False

    def _refuse_private(self, given: list[Tensor]) -> None:
        if self._seen is not None and not torch.compiler.is_compiling():
            with self._backward.step.noting_refusals():
                self._seen.refuse_private(given)

    def _compiles(self, module: nn.Module) -> bool:
        """Whether this call runs compiled: gradients are enabled, and no backward runs."""
        return (
            self._compiled is not None
            and module is self._module
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
        )

    def _compile(self) -> Callable[..., Any]:
        module, forward, device = self._module, self._original.forward, self._device
        widen = self._optimization.autocast

        def run(dtype: torch.dtype | None, args: Any, kwargs: Any) -> Any:
            if dtype is None:
                return forward(module, *args, **kwargs)
            with torch.autocast(device, dtype=dtype):
                outputs = forward(module, *args, **kwargs)
            return outputs.float() if widen and _is_low(outputs) else outputs

        # Copy the function: the compiler counts recompilations for each code object.
        own = types.FunctionType(
            run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__
        )
        return torch.compile(own, fullgraph=True, backend=_BACKEND)

    def _through_compiler(
        self, size: int, batch: list[Tensor], dtype: torch.dtype | None, args: Any, kwargs: Any
    ) -> Any:
        handles = self._backward.forward.prepared_handles
        if not handles or handles[0][0].shape[0] != size:
            # The private loader prepares handles, but this batch is from elsewhere.
            self._backward.forward.prepare(size)
        if size > 1:
            for tensor in (
                *batch,
                *(h for own in self._backward.forward.prepared_handles for h in own),
            ):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        assert self._compiled is not None
        if self._backward.proof.is_on:
            allow_second_backwards()
        self._backward.forward.set_compiled()
        # Inside the user's autocast region the compiler would autocast the backward too.
        try:
            with without_autocast(self._device), attention_backend_of_model(self._backend()):
                outputs = self._compiled(dtype, args, kwargs)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
        ) as error:
            # If the model itself fails, this call raises its error.
            outputs = self._eagerly(self._module, dtype, args, kwargs)
            text = " ".join(str(error).split())
            why = f"it failed: {type(error).__name__}: {text[:_LONGEST_REASON]}"
            self.leave_compiler(why)
            warn(
                f"optimize={self.optimization.level!r} goes on without torch.compile, since {why}",
            )
        return _widened(outputs) if self._optimization.autocast else outputs


class _State(NamedTuple):
    random: RandomState
    contents: Contents
    attributes: OwnAttributes

    def restore(self) -> None:
        for part in self:
            part.restore()


def _tensors(arguments: Any) -> list[Tensor]:
    return [t for _, t in tensors_of(arguments) if t.ndim]


def _first_dimensions(tensors: list[Tensor]) -> frozenset[int]:
    return frozenset(t.shape[0] for t in tensors)


@contextlib.contextmanager
def _noting_outputs(rows: ForwardRows) -> Iterator[None]:
    """Context that records the output dtypes of all modules, frozen ones too."""

    def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
        rows.dtypes.update(x.dtype for _, x in tensors_of(outputs))

    handle = nn.modules.module.register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _dropped(packed: None) -> Tensor:
    raise RuntimeError(
        "the losses use outputs of a forward that only tested the first batches: a call of the "
        "model also runs forwards as tests, and a hook may have put their outputs in a list. "
        "Clear the list when a forward begins, overwrite kept outputs, or return what losses need"
    )


def _is_low(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dtype in _LOW


def _widened(outputs: Any) -> Any:
    return map_tensors(lambda x: x.float() if _is_low(x) else x, outputs)


class _Wrapped(CopiedPlain):
    """Base class of a wrapped model that has no layer rule of its own."""


def _class_around(original: type[nn.Module], wrapper: ForwardWrapper) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, args, kwargs)

    return _class_with(original, {"forward": forward, **_guards(original, wrapper, "")})


def _class_with(original: type[nn.Module], methods: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    if not issubclass(original, PrivateModule):
        return type(original.__name__, (_Wrapped, original), {**methods, **names})
    # The second base must be the plain class, which private modules look up there.
    rule, plain = original.__bases__
    return type(original.__name__, (type(rule.__name__, (rule,), methods), plain), names)


def _guards(original: type[nn.Module], wrapper: ForwardWrapper, prefix: str) -> dict[str, Any]:
    """Return methods that check the model's state when it is saved or copied, and accept loads."""
    unchanged = wrapper.unchanged
    if unchanged is None:
        return {}

    @functools.wraps(original.state_dict)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with unchanged.forward():
            state = original.state_dict(self, *args, **kwargs)
        unchanged.compare(state, kwargs.get("prefix", ""), prefix)
        return state

    @functools.wraps(original.load_state_dict)
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.load_state_dict(self, state_dict, *args, **kwargs)
        unchanged.loaded({prefix + name for name in state_dict})
        return result

    @functools.wraps(original._apply)
    def apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with unchanged.moving():
            return original._apply(self, *args, **kwargs)

    base: Any = original.__bases__[0] if issubclass(original, PrivateModule) else _Wrapped

    def reduce(self: nn.Module, protocol: Any) -> Any:
        unchanged.compare_whole()
        return base.__reduce_ex__(self, protocol)

    def deepcopy(self: nn.Module, memo: dict[Any, Any]) -> Any:
        unchanged.compare_whole()
        return base.__deepcopy__(self, memo)

    return {
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "_apply": apply,
        "__reduce_ex__": reduce,
        "__deepcopy__": deepcopy,
    }
