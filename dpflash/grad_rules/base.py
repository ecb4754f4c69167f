"""Base classes of private layers: their handles on parameters, and how they are pickled."""

from __future__ import annotations

import copy
import copyreg
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dpflash.kernels import per_sample_grad

from ..clipping.backward import PrivateBackward
from ..clipping.gate import Gate
from ..clipping.planner import LinearShape
from ..distributed.fsdp import is_sharded
from ..packing.units import Units
from ..refusal import PrivateRefusal
from ..verification.attributes import OF_TORCH, copied, identity
from ..verification.second_order import differentiable_once, refuse_transforms
from ..verification.tracing import refuse_recording, refuse_tracing
from .float8 import Float8Weight


@dataclass(frozen=True)
class Slot:
    """A matrix parameter's index in a clipping gate, which gets pairs (input, output gradient)."""

    gate: Gate
    position: int


def taken(slot: Slot | None, x: Tensor, dy: Tensor, *, swapped: bool = False) -> Tensor | None:
    """Pass (x, dy) to `Gate.take_linear`; without a slot, return per-sample gradients dy^T x."""
    if slot is None:
        return per_sample_grad(x, dy)
    return slot.gate.take_linear(slot.position, x, dy, swapped=swapped)


@dataclass
class ModuleContext:
    """Connects one module to the private backward of its model.

    Attributes:
        backward: the private backward, which all modules of the model share.
        name: dotted name in the model.
        slots: (group, position in the group) of each privately trained parameter.
        frozen: own parameters that were not trainable when the model was made private.
        takes_units: whether the rule supports units: samples that are not rows of the batch.
        takes_documents: whether the rule supports units of tokens, but not units of whole rows.
        is_whole: whether the module owns its children's parameters, see `convert.is_whole`.
        float8: the weight in float8, for a linear layer that multiplies in float8.
        has_positions: whether an embedding received indices [T] whose length is not B.
        longest: largest number of steps in the packed sequences that the module received.
        places: whether each one-dimensional argument is a "batch" or "positions"; keys are the
            call's structure and the argument's index.
        left_out: the last empty key/value cache that was removed from a call's arguments.
        compared: keys of the calls whose outputs were compared with a forward of the whole batch:
            (structure of the arguments, vmap dimensions) or, in the generic rule, `training`.
    """

    backward: PrivateBackward
    name: str
    slots: dict[str, tuple[int, int]]
    frozen: frozenset[str]
    takes_units: bool = False
    takes_documents: bool = False
    is_whole: bool = False
    float8: Float8Weight | None = None
    has_positions: bool = False
    longest: int = 0
    places: dict[tuple[str, int] | None, str] = field(default_factory=dict)
    left_out: weakref.ref[Any] | None = None
    compared: set[Any] = field(default_factory=set)

    def note_positions(self) -> None:
        """Note that an embedding received indices [T] whose length is not B."""
        self.has_positions = True

    def note_length(self, length: int) -> int:
        """Note the number of steps of a packed sequence; return the largest number so far."""
        self.longest = max(self.longest, length)
        return self.longest

    def note_left_out(self, cache: Any) -> bool:
        """Note that a call leaves out `cache`; return False if the previous one did so too."""
        last, self.left_out = self.left_out, weakref.ref(cache)
        return last is None or last() is not cache

    @property
    def units(self) -> Units | None:
        """The samples as units (documents, users, pairs) if the rule supports units; else None."""
        units = self.backward.forward.units
        if units is None or self.takes_units or (self.takes_documents and not units.are_rows):
            return units
        return None

    def check_batch(self, x: Tensor, *, is_padded: bool = False) -> Tensor:
        """Expand a shared x to `[B, ...]`, or view tokens `[B n, ...]` as `[B, n, ...]`.

        If `units` are the samples, x becomes `[1, n, ...]`, with the entries of all units.

        Args:
            x: input of the layer.
            is_padded: whether the layer padded dimension 1 to the length of the longest sample.
        """
        if x.ndim == 0:
            raise PrivateRefusal(
                f"input of module '{self.name}' is a scalar; its first dimension must be the batch"
            ) from None
        if torch.compiler.is_compiling():
            return x
        forward = self.backward.forward
        units = forward.units
        if units is None or units.are_rows:
            size = forward.batch_size_for(x, self.name)
            if x.shape[0] not in (1, size):
                x = x.unflatten(0, (size, -1))
            if x.shape[0] == 1 and size != 1:
                x = x.expand(size, *x.shape[1:])
        length = x.shape[1] if is_padded else None
        rows = x if units is None else units.flattened(x, self.name)
        if units is not None and self.units is not None:
            x = rows.unsqueeze(0)
        if forward.rows is not None:
            forward.rows.note(self.name, rows, padded_to=length)
        return x

    def check_sequences(self, x: Tensor, *, is_padded: bool = False) -> Tensor:
        """Like `check_batch`, for a rule that takes one sequence per sample.

        Raises:
            PrivateRefusal: x has several rows per sample in its first dimension.
        """
        found = self.check_batch(x, is_padded=is_padded)
        if self.units is None and found.ndim > x.ndim:
            raise PrivateRefusal(
                f"input of module '{self.name}' has several rows of each sample in its first "
                "dimension, such as [B n, ...], but must have one sequence per sample. Call the "
                "module n times on [B, ...], or freeze it with requires_grad_(False)"
            ) from None
        return found

    def samples_of(self, x: Tensor) -> int:
        """Return B for a tensor x that `check_batch` returned."""
        return x.shape[0] if self.units is None else self.units.size

    def as_given(self, y: Tensor, given: Tensor) -> Tensor:
        """Restore the leading dimensions of a layer's input in its output y."""
        if self.units is not None:
            leading = tuple(given.shape[: given.ndim + 2 - y.ndim])
            if self.units.are_rows and leading[0] == 1:  # all rows share the input
                leading = (self.units.positions, *leading[1:])
            return y.reshape(*leading, *y.shape[2:])
        return y if given.shape[0] in (1, y.shape[0]) else y.flatten(0, 1)


class _OfPositions(torch.autograd.Function):
    """Repeats a unit's handle at each position of the unit; the backward sums over positions."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, units: Units) -> Tensor:
        ctx.units = units
        # A handle repeats the same parameter for each unit: expand its first entry.
        return handle[:1].expand(units.positions, *handle.shape[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.units.summed(grad), None


def of_units(handle: Tensor, units: Units) -> Tensor:
    """Return the handle of the unit of each position, `[N, ...]`."""
    result: Tensor = _OfPositions.apply(handle, units)
    return result


class Handles:
    """Handles by parameter name: tensors [B, ...] whose gradients are per-sample gradients."""

    def __init__(self, module: PrivateModule, context: ModuleContext, batch_size: int):
        self._units = context.backward.forward.units if context.units is None else None
        self._slots = context.slots
        self._parameters = module.own_parameters()
        self._gates: dict[int, Gate] = {}
        self._context = context
        self._batch_size = batch_size
        self.compiling = torch.compiler.is_compiling()

    def _gate(self, group: int) -> Gate:
        context = self._context
        return context.backward.forward.gate(group, self._batch_size, context.name)

    def __getitem__(self, name: str) -> Tensor | None:
        """Return a parameter's handle `[B, ...]`; None if the parameter is not trained."""
        if name not in self._slots:
            return None
        parameter = self._parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            return None
        group, position = self._slots[name]
        own = self._context.backward.groups[group].parameters[position]
        if parameter is not own and not is_sharded(own):
            raise RuntimeError(
                f"parameter '{self._context.name}.{name}' is not the one that was made "
                "private: it was replaced, sharded (fully_shard) or tied since. Call "
                "engine.detach(model), build the optimizer again, then make_private again"
            )
        self._context.backward.rules.refuse_coarse_use(parameter)
        if self.compiling:
            return self._context.backward.forward.prepared(group)[position]
        self._gate(group)
        handle = self._context.backward.forward.state.handles[group][position]
        return handle if self._units is None else of_units(handle, self._units)

    def dense(self, name: str) -> Tensor | None:
        """Return the handle for an operation that returns a gradient (`Gate.register_dense`)."""
        handle = self[name]
        if handle is not None and not self.compiling:
            group, position = self._slots[name]
            self._gate(group).register_dense(position)
        return handle

    def values(self, name: str) -> Tensor | None:
        """Return a trained parameter's values [B, ...]; their gradient goes to `dense(name)`.

        A sharded parameter's handle holds no values, so the gathered values are added to it.
        """
        handle = self.dense(name)
        if handle is None:
            return None
        group, position = self._slots[name]
        if not is_sharded(self._context.backward.groups[group].parameters[position]):
            if not self.compiling:
                self._gate(group).register_read(position)
            return handle
        parameter = self._parameters[name]
        assert parameter is not None
        # With mixed precision, the gathered values have another dtype than the handle.
        return parameter.detach() + (handle - handle.detach()).to(parameter.dtype)

    def slot(self, name: str, shape: LinearShape) -> Slot | None:
        """Return the slot in which an operation on a matrix parameter saves (x, dy), or None."""
        if self.compiling or name not in self._slots or self._units is not None:
            return None
        group, position = self._slots[name]
        gate = self._gate(group)
        if torch._C._current_graph_task_id() == -1:
            gate.register(position, shape)
        return Slot(gate, position)


class CopiedPlain(nn.Module):
    """Base of private classes: a copy or pickle contains the plain module, without an engine."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        build, *rest = tuple(plain_copy(self).__reduce_ex__(protocol))
        # pickle's __newobj__ only creates an object of the class that is pickled: use `_new`.
        return (_new if build is copyreg.__newobj__ else build, *rest)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        # The plain class may have its own __deepcopy__, as parametrized classes do. `memo` makes
        # references to this module point to the plain module, and so to the copy in progress.
        return copy.deepcopy(memo.setdefault((CopiedPlain, id(self)), plain_copy(self)), memo)


class PrivateModule(CopiedPlain):
    """Base of the private layers. A module becomes private when its class is changed."""

    _dpflash: ModuleContext
    takes_units = False
    takes_documents = False

    def private_handles(self, batch_size: int) -> Handles:
        refuse_transforms(self._dpflash.name)
        return Handles(self, self._dpflash, batch_size)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters whose gradients this layer computes, by name."""
        if self._dpflash.is_whole:
            return dict(self.named_parameters())
        return {name: p for name, p in self._parameters.items() if p is not None}

    def is_private_call(self) -> bool:
        """Return whether this call may need gradients of the module's own parameters."""
        context = self._dpflash
        trainable = False
        for name, parameter in self.own_parameters().items():
            if parameter.requires_grad:
                trainable = True
                if name in context.frozen:
                    raise RuntimeError(
                        f"parameter '{context.name}.{name}' was frozen when the model was made "
                        "private and is trainable now; call engine.detach(model), then "
                        "make_private again"
                    )
        if not trainable or not torch.is_grad_enabled():
            return False
        refuse_tracing(context.name)
        units = context.backward.forward.units
        if units is not None and not units.are_rows and context.units is None:
            self.refuse_documents()
        return True

    def refuse_stored(self, name: str) -> NoReturn:
        """Refuse a forward that stores values of the samples in an attribute."""
        raise RuntimeError(
            f"the forward of {described(self)} sets its attribute '{name}', which would "
            "keep one batch's samples for the next. Return the value instead, or move the "
            "module's parameters into a module of their own"
        )

    def refuse_documents(self) -> NoReturn:
        """Refuse a batch of packed documents."""
        raise ValueError(
            f"{described(self)} in a batch of packed documents: its rule computes no "
            "per-document gradients; freeze it with requires_grad_(False), or train with one "
            "document per row"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_recording(self._dpflash.name, "torch.jit.script", also="")


# A value of another type may keep a sample's tensors after the call, as a cache does.
PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def _new(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the original class of a private module."""
    return type(module).__bases__[1] if isinstance(module, CopiedPlain) else type(module)


def described(module: PrivateModule) -> str:
    """Return a private module's name and original class, for messages."""
    name = module._dpflash.name or "(the model itself)"
    return f"module '{name}' ({plain_class(module).__name__})"


def refuse_without_tensor(module: PrivateModule) -> NoReturn:
    """Refuse a call without a tensor from which the batch size could be inferred."""
    raise ValueError(
        f"{described(module)} was called without a tensor, so the batch size is unknown. Let "
        "its forward(self, x) take the batch, as in return x + self.weight; or freeze the "
        "module with requires_grad_(False)"
    )


def plain_forward(module: nn.Module) -> Any:
    """Return the forward of a module's class; None for a scripted module, which has none."""
    return None if isinstance(module, torch.jit.ScriptModule) else type(module).forward


def name_of_forward(module: nn.Module) -> str:
    """Return the full name of the forward of a module's class, even if it cannot be imported."""
    forward = plain_forward(module)
    # A forward may be any callable, even one without a name.
    names = (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", ""))
    return ".".join(map(str, names))


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a copy with the original class that shares parameters, buffers and children."""
    made = object.__new__(plain_class(module))
    made.__dict__ = {k: v for k, v in module.__dict__.items() if k != "_dpflash"}
    made.__dict__["_parameters"] = dict(module._parameters)
    made.__dict__["_buffers"] = dict(module._buffers)
    return made


def copy_to_store_in(module: nn.Module) -> nn.Module:
    """Return a copy of a module; tensors that its forward stores do not reach the module."""
    made, copies = plain_copy(module), dict[int, Any]()
    for name, value in made.__dict__.items():
        if name not in OF_TORCH:
            made.__dict__[name] = copied(value, copies, with_tensors=False)
    return made


def stored(module: nn.Module, own_copy: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of attributes and buffers that a forward set in `own_copy`."""
    before = _contents(module)
    for name, content in _contents(own_copy).items():
        if content != before.get(name):
            held = own_copy.__dict__ if name in own_copy.__dict__ else own_copy._buffers
            yield name, held[name]


def _contents(module: nn.Module) -> dict[str, Any]:
    """Map each attribute and buffer to a key that changes whenever its contents change."""
    held = {k: v for k, v in module.__dict__.items() if k not in {*OF_TORCH, "_dpflash"}}
    return {name: identity(value) for name, value in {**held, **module._buffers}.items()}


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for products on x's device; None without autocast or in float64."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return None
