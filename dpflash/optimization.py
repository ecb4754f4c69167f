"""Optimization levels: what each changes, and what stands around a model's own forward for it.

none          textbook DP-SGD: each layer keeps its per-sample gradients.
conservative  a planner picks the way of flat clipping; nothing changes but rounding.
balanced      conservative, and the model's forward under bfloat16 autocast.
aggressive    balanced, per-layer clipping and a compiled forward.

No level changes how much privacy a step costs: batches, noise and bounds are the same. Clipping
and noise sit in the gates' backward, outside of what is autocast or compiled.
"""

from __future__ import annotations

import copyreg
import functools
import types
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .gate import PrivateBackward
from .grad_rules import PrivateModule
from .mesh import Workers

__all__ = ["LeveledForward", "Optimization", "choose"]

# Tests take one that is quicker.
_BACKEND = "inductor"
_LOW = (torch.bfloat16, torch.float16)
_LONGEST_REASON = 200


@dataclass(frozen=True)
class Optimization:
    """What an optimization level does to a private model.

    Attributes:
        level: "none", "conservative", "balanced" or "aggressive".
        clipping: "flat", "per_layer" or "per_block".
        autocast: whether the model's forward runs under bfloat16 autocast.
        compiled: whether the model's forward goes through torch.compile where it trains.
        changes: sentences, each begun by what it is about: privacy, clipping, numerics, memory,
            kernels, or what was left out and why.
    """

    level: str
    clipping: str
    autocast: bool
    compiled: bool
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join((f"optimize={self.level!r}", *self.changes))

    @property
    def summary(self) -> str:
        """One line."""
        parts = [f"{self.clipping} clipping"]
        parts += ["bfloat16 autocast"] * self.autocast + ["torch.compile"] * self.compiled
        return f"optimize={self.level!r}: {', '.join(parts)}"


def choose(
    level: str,
    *,
    module: nn.Module,
    trained: Sequence[nn.Parameter],
    clipping: str,
    is_own_clipping: bool,
    way: str,
    public_batch_size: int,
    memory_budget: int,
    workers: Workers,
) -> Optimization:
    """What a level does to this model on this device.

    Args:
        level: one of `planner.LEVELS`.
        module: the model, not yet private.
        trained: its trained parameters.
        clipping: what will be used.
        is_own_clipping: whether the level chose it, and not the user.
        way: as the user asked.
        public_batch_size: samples of a physical batch, as planned for.
        memory_budget: bytes that their stored gradients may take.
        workers: who trains the model.

    Raises:
        ValueError: for a device that cannot do what the level is about.
    """
    changes = [_PRIVACY]
    if level == "none":
        changes += _of_none(clipping)
        return Optimization(level, clipping, False, False, tuple(changes))
    changes.append(_clipping(level, clipping, is_own_clipping, way))
    if level == "conservative":
        changes += _CONSERVATIVE
        return Optimization(level, clipping, False, False, tuple(changes))
    autocast, numerics = _autocast(level, trained)
    changes += [*numerics, _kernels(trained[0].device)]
    if level == "balanced":
        return Optimization(level, clipping, autocast, False, tuple(changes))
    size = _stored_bytes(trained, public_batch_size)
    obstacle = _obstacle(module, trained[0].device, way, workers, size, memory_budget)
    changes += _compilation(obstacle, size)
    return Optimization(level, clipping, autocast, obstacle is None, tuple(changes))


_PRIVACY = (
    "privacy: epsilon is that of every other level: sampling, noise and the bound of a sample are "
    "the same, and norms, clip factors, sums and noise stay float32 or wider"
)
_CONSERVATIVE = (
    "numerics: those of the model as it is; ways differ by rounding alone",
    "memory: gradients that the planner stores stay within memory_budget",
    "left out: a fused optimizer step, since the optimizer is yours; torch.optim.AdamW(..., "
    "fused=True) is one",
)


def _of_none(clipping: str) -> tuple[str, ...]:
    tiles = " but the tiles of per_block, which are clipped as they are made"
    return (
        f"clipping: {clipping}; each layer keeps its per-sample gradients"
        f"{tiles if clipping == 'per_block' else ''}; no planner",
        "numerics: those of the model as it is",
        "memory: one gradient of each matrix for each sample of the batch, whatever "
        "memory_budget says",
    )


def _clipping(level: str, clipping: str, is_own: bool, way: str) -> str:
    """What becomes of the clipping, in words."""
    aggressive = level == "aggressive"
    text = f"clipping: {clipping}"
    if aggressive and not is_own:
        text += " as asked for"
        text += "" if clipping == "per_layer" else " (this level would clip per_layer)"
    if way != "auto":
        text += f", way={way!r} as asked for"
    elif clipping == "flat":
        text += ", the planner picks each layer's way"
    if not aggressive or not is_own:
        return text
    if clipping == "flat":
        return f"{text}, so not per_layer"
    return (
        f"{text} instead of flat, each module with an equal share of the squared bound: another "
        "estimate of the gradient, so learning rate and max_grad_norm may want tuning. per_block "
        "is no faster; clipping='flat' keeps one norm for all"
    )


def _autocast(level: str, trained: Sequence[nn.Parameter]) -> tuple[bool, tuple[str, ...]]:
    """Whether autocast is used, and what it changes.

    Raises:
        ValueError: where the device cannot multiply in bfloat16.
    """
    device = trained[0].device
    others = sorted({str(p.dtype) for p in trained} - {"torch.float32"})
    if others:
        return False, (f"left out: autocast, since parameters are {', '.join(others)}",)
    able = torch.amp.is_autocast_available(device.type)
    if able and device.type == "cuda":
        able = torch.cuda.is_bf16_supported(including_emulation=False)
    if not able:
        raise ValueError(
            f"optimize={level!r}: the device {device} has no bfloat16; pass "
            "optimize='conservative', which keeps the model's own dtype"
        )
    text = (
        "numerics: the model's forward multiplies in bfloat16 (about 3 digits), its backward too; "
        "outputs are float32, so losses are. In an autocast region of your own, yours counts"
    )
    if device.type == "cpu" and not _has_bfloat16():
        text += ". This CPU is not known to have bfloat16 instructions, so it may be slower"
    return True, (text, "memory: activations that the backward needs take about half")


def _has_bfloat16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _kernels(device: torch.device) -> str:
    if device.type != "cuda":
        return f"kernels: nothing is tuned for {device.type}; tables of tile sizes are for GPUs"
    from dpflash.kernels.attention_configs import architecture

    return (
        f"kernels: attention takes the tile sizes of {architecture(device)} for 16 bit from "
        "kernels/attention_configs.json"
    )


def _compilation(obstacle: str | None, size: int) -> tuple[str, ...]:
    if obstacle is not None:
        return (f"left out: torch.compile, since {obstacle}",)
    return (
        "numerics: torch.compile fuses the model's operations where it trains, and rounds less "
        "often; the first batches take up to minutes; batch sizes do not recompile, but a batch "
        "of one sample does, once",
        "memory: per-sample gradients of all layers leave the compiled backward together, "
        f"{size / 2**20:,.1f} MiB for a batch of the planned size, whatever ways were planned",
        "left out: CUDA graphs, since it is not proven on a GPU yet that a replay is safe",
    )


def _stored_bytes(trained: Sequence[nn.Parameter], batch_size: int) -> int:
    """Of all per-sample gradients, fp32 at least."""
    return batch_size * sum(max(4, p.element_size()) * p.numel() for p in trained)


def _obstacle(
    module: nn.Module,
    device: torch.device,
    way: str,
    workers: Workers,
    size: int,
    memory_budget: int,
) -> str | None:
    """Why the model cannot be compiled; None where it can."""
    compiled = (
        isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl is not None
        for m in module.modules()
    )
    if any(compiled):
        return "the model is compiled already"
    if way != "auto" and way != "stored":
        return f"way={way!r} was asked for, and a compiled model stores"
    if workers.everyone is not None:
        return "several workers exchange what a compiled backward would hold back"
    if size > memory_budget:
        return (
            f"its per-sample gradients would take {size} bytes together, beyond "
            f"memory_budget={memory_budget}"
        )
    return _missing_compiler(device)


def _missing_compiler(device: torch.device) -> str | None:
    if not torch._dynamo.is_dynamo_supported():
        return "torch.compile does not know this Python"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is missing"
    if device.type != "cpu":
        return f"it is not tried on {device.type}"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++ or clang++)"
    return None


class LeveledForward:
    """A model's own forward with what a level puts around it, from `put` to `remove`.

    The model changes its class, as private layers do: it is the same object with the same
    `state_dict()`, and copies and pickles are of the plain one.

    Attributes:
        optimization: what is done, also once the compiler has failed.
    """

    def __init__(self, module: nn.Module, backward: PrivateBackward, optimization: Optimization):
        self.optimization = optimization
        self._module = module
        self._backward = backward
        self._original = type(module)
        self._trained = [p for group in backward.groups for p in group.parameters]
        self._device = self._trained[0].device.type
        self._is_put = False
        self._compiled = self._compile() if optimization.compiled else None

    def put(self) -> None:
        """Stand around the model's forward, where the level has something to put there."""
        if self.optimization.autocast or self.optimization.compiled:
            self._is_put = True
            object.__setattr__(self._module, "__class__", _class_around(self._original, self))

    def remove(self) -> None:
        """Give the model its class back."""
        if self._is_put:
            object.__setattr__(self._module, "__class__", self._original)

    def leave_compiler(self, why: str) -> None:
        """Go on without torch.compile, and write so."""
        if self._compiled is None:
            return
        self._compiled = None
        size = _stored_bytes(self._trained, self._backward.public_batch_size)
        gone = _compilation(None, size)
        changes = tuple(c for c in self.optimization.changes if c not in gone)
        changes += _compilation(why, size)
        self.optimization = replace(self.optimization, compiled=False, changes=changes)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What the model's forward is now."""
        dtype = self._autocast_dtype()
        if self._compiles(module):
            batch = _batched(args, kwargs)
            if batch:
                return self._through_compiler(batch, dtype, args, kwargs)
        return self._eagerly(module, dtype, args, kwargs)

    def _autocast_dtype(self) -> torch.dtype | None:
        """In what the forward multiplies: a region of the user's own counts."""
        if torch.is_autocast_enabled(self._device):
            return torch.get_autocast_dtype(self._device)
        return torch.bfloat16 if self.optimization.autocast else None

    def _eagerly(
        self, module: nn.Module, dtype: torch.dtype | None, args: Any, kwargs: Any
    ) -> Any:
        with self._autocast(dtype):
            outputs = self._original.forward(module, *args, **kwargs)
        return _widened(outputs) if self.optimization.autocast else outputs

    def _autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        return nullcontext() if dtype is None else torch.autocast(self._device, dtype=dtype)

    def _compiles(self, module: nn.Module) -> bool:
        """Whether this call goes through the compiler: one that trains, outside of a backward."""
        return (
            not torch.compiler.is_compiling()
            and self._compiled is not None
            and module is self._module
            and torch.is_grad_enabled()
            and torch._C._current_graph_task_id() == -1
        )

    def _compile(self) -> Callable[..., Any]:
        module, forward, device = self._module, self._original.forward, self._device
        widen = self.optimization.autocast

        def run(dtype: torch.dtype | None, args: Any, kwargs: Any) -> Any:
            if dtype is None:
                return forward(module, *args, **kwargs)
            with torch.autocast(device, dtype=dtype):
                outputs = forward(module, *args, **kwargs)
            return outputs.float() if widen and _is_low(outputs) else outputs

        # The compiler counts recompilations by code object, which all models would share.
        own = types.FunctionType(
            run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__
        )
        return torch.compile(own, fullgraph=True, backend=_BACKEND)

    def _through_compiler(
        self, batch: list[Tensor], dtype: torch.dtype | None, args: Any, kwargs: Any
    ) -> Any:
        size = batch[0].shape[0]
        handles = self._backward._prepared
        if not handles or handles[0][0].shape[0] != size:
            # A batch that did not come from the private loader.
            self._backward.prepare(size)
        if size > 1:
            for tensor in (*batch, *(h for own in self._backward._prepared for h in own)):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        assert self._compiled is not None
        # Inside of the user's autocast the compiler would put the backward there too.
        within = torch.is_autocast_enabled(self._device)
        try:
            with torch.autocast(self._device, enabled=False) if within else nullcontext():
                outputs = self._compiled(dtype, args, kwargs)
        except (
            torch._dynamo.exc.TorchDynamoException,
            torch._dynamo.exc.FailOnRecompileLimitHit,
        ) as error:
            # Of an error of the model's own, this one tells.
            outputs = self._eagerly(self._module, dtype, args, kwargs)
            text = " ".join(str(error).split())
            why = f"it failed: {type(error).__name__}: {text[:_LONGEST_REASON]}"
            self.leave_compiler(why)
            warnings.warn(
                f"optimize={self.optimization.level!r} goes on without torch.compile, since {why}",
                stacklevel=6,
            )
        return _widened(outputs) if self.optimization.autocast else outputs


def _is_low(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dtype in _LOW


def _widened(outputs: Any) -> Any:
    """The outputs with 16-bit tensors as float32."""
    if isinstance(outputs, Tensor):
        return outputs.float() if _is_low(outputs) else outputs
    return tree_map_only(Tensor, _widened, outputs)


def _batched(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments that have the first one's batch; none for an empty one."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim]
    return [t for t in tensors if t.shape[0] == tensors[0].shape[0] > 0]


class _Leveled(nn.Module):
    """A model whose own class has no rule for private training, with a level's forward."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles are of the plain model, as those of private layers.
        twin: nn.Module = object.__new__(type(self).__bases__[1])
        twin.__dict__ = dict(self.__dict__)
        build, *rest = tuple(twin.__reduce_ex__(protocol))
        return (_new if build is copyreg.__newobj__ else build, *rest)  # type: ignore[attr-defined]


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _class_around(original: type[nn.Module], leveled: LeveledForward) -> type[nn.Module]:
    """A subclass under the same name, whose forward is a level's."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return leveled(self, args, kwargs)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    if not issubclass(original, PrivateModule):
        return type(original.__name__, (_Leveled, original), {"forward": forward, **names})
    # Its second base is its plain class, by which private modules find that.
    rule, plain = original.__bases__
    leveled_rule = type(rule.__name__, (rule,), {"forward": forward})
    return type(original.__name__, (leveled_rule, plain), names)
