"""What stands around a model's own forward: where a call begins and ends, and its level.

The level brings autocast and the compiler; clipping and noise sit in the gates' backward, outside
of both. The generators of random masks are seeded around the forward, see `masks`.
"""

from __future__ import annotations

import copyreg
import functools
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .gate import PrivateBackward
from .grad_rules import PrivateModule
from .masks import SecretMasks
from .optimization import Optimization
from .precision import without_autocast
from .row_order import RowOrder

__all__ = ["LeveledForward"]

# Tests take one that is quicker.
_BACKEND = "inductor"
_LOW = (torch.bfloat16, torch.float16)
_LONGEST_REASON = 200


class LeveledForward:
    """A model's own forward with what stands around it, from `put` to `remove`.

    The model changes its class, as private layers do: it is the same object with the same
    `state_dict()`, and copies and pickles are of the plain one.

    Attributes:
        optimization: what is done, also once the compiler has failed.
    """

    def __init__(
        self,
        module: nn.Module,
        backward: PrivateBackward,
        optimization: Optimization,
        masks: SecretMasks | None = None,
        order: RowOrder | None = None,
    ):
        self.optimization = optimization
        self._module = module
        self._backward = backward
        self._masks = masks
        self._order = order
        self._original = type(module)
        self._device = backward.groups[0].parameters[0].device.type
        self._compiled = self._compile() if optimization.compiled else None

    def put(self) -> None:
        """Stand around the model's forward."""
        object.__setattr__(self._module, "__class__", _class_around(self._original, self))

    def remove(self) -> None:
        """Give the model its class back."""
        object.__setattr__(self._module, "__class__", self._original)

    def leave_compiler(self, why: str) -> None:
        """Go on without torch.compile, and write so."""
        if self._compiled is None:
            return
        self._compiled = None
        self.optimization = self.optimization.without_compiler(why)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What the model's forward is now."""
        if torch.compiler.is_compiling():
            return self._eagerly(module, self._autocast_dtype(), args, kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim]
        if self._order is not None and torch.is_grad_enabled():
            self._order.check(tensors)
        with self._backward.call(frozenset(t.shape[0] for t in tensors)), self._seeded():
            return self._called(module, tensors, args, kwargs)

    def _seeded(self) -> AbstractContextManager[None]:
        """Random masks of a forward that trains come from a secret seed."""
        if self._masks is None or not torch.is_grad_enabled():
            return nullcontext()
        return self._masks.seeded(recomputing=torch._C._current_graph_task_id() != -1)

    def _called(self, module: nn.Module, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        dtype = self._autocast_dtype()
        size = self._batch_size(tensors) if self._compiles(module) else 0
        if size:
            batch = [t for t in tensors if t.shape[0] == size]
            return self._through_compiler(size, batch, dtype, args, kwargs)
        return self._eagerly(module, dtype, args, kwargs)

    def _batch_size(self, tensors: list[Tensor]) -> int:
        """B of a call: that of the batch last drawn, if it is in the call, else of the first."""
        drawn = self._backward.batch_hint
        first = [t.shape[0] for t in tensors]
        return drawn if drawn in first else next(iter(first), 0)

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
            self._compiled is not None
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
        self, size: int, batch: list[Tensor], dtype: torch.dtype | None, args: Any, kwargs: Any
    ) -> Any:
        handles = self._backward._prepared
        if not handles or handles[0][0].shape[0] != size:
            # A batch that did not come from the private loader.
            self._backward.prepare(size)
        if size > 1:
            for tensor in (*batch, *(h for own in self._backward._prepared for h in own)):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        assert self._compiled is not None
        # Inside of the user's autocast the compiler would put the backward there too.
        try:
            with without_autocast(self._device):
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
                stacklevel=7,
            )
        return _widened(outputs) if self.optimization.autocast else outputs


def _is_low(output: Any) -> bool:
    return isinstance(output, Tensor) and output.dtype in _LOW


def _widened(outputs: Any) -> Any:
    """The outputs with 16-bit tensors as float32."""
    if isinstance(outputs, Tensor):
        return outputs.float() if _is_low(outputs) else outputs
    return tree_map_only(Tensor, _widened, outputs)


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
