"""Unchanged: checks that training changes no buffer and no frozen parameter.

`model.state_dict()` releases them without noise, and values that a forward writes into them affect
later batches. Version counters are compared in every backward. Contents are compared now and then,
because writes to `.data` do not advance a counter.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.fsdp import is_sharded
from ..refusal import PrivateRefusal
from .digests import row_digests

# Contents are compared in the first backward, and then once in this many.
_EVERY = 64


@dataclass(frozen=True)
class _Place:
    """Place of a tensor in the model.

    Attributes:
        module: the module that holds it.
        key: its name in the module.
        is_buffer: whether it is a buffer; else it is a frozen parameter.
        part: this rank's part of a sharded parameter, which is in the module between forwards.
    """

    module: nn.Module
    key: str
    is_buffer: bool
    part: Tensor | None = None

    @property
    def is_public(self) -> bool:
        """Whether it is in `state_dict`."""
        return not self.is_buffer or self.key not in self.module._non_persistent_buffers_set

    def tensor(self) -> Tensor | None:
        if self.part is not None:
            return self.part
        held = self.module._buffers if self.is_buffer else self.module._parameters
        return held.get(self.key)


@dataclass(frozen=True)
class _State:
    """Last known state of a tensor."""

    tensor: Tensor
    version: int | None
    shape: torch.Size
    digest: int

    @classmethod
    def of(cls, tensor: Tensor) -> _State:
        return cls(tensor, _version(tensor), tensor.shape, _digest(tensor))


class Unchanged:
    """The buffers and frozen parameters of one model, and their contents.

    Args:
        module: the model.
        trained: the parameters that are trained.
        allowed: names of buffers and frozen parameters that may change.
    """

    def __init__(
        self, module: nn.Module, trained: Collection[nn.Parameter], allowed: Collection[str] = ()
    ) -> None:
        check_allowed(module, trained, allowed)
        self._module = module
        places = _places_of(module, trained)
        # A tensor of several names is allowed under all of them.
        ids = {id(places[name].tensor()) for name in allowed if places[name].tensor() is not None}
        self._allowed = {n for n, p in places.items() if n in allowed or id(p.tensor()) in ids}
        self._allowed_places = [places[name] for name in sorted(self._allowed)]
        self._places = {n: p for n, p in places.items() if n not in self._allowed}
        self._states = {
            n: _State.of(t) for n, p in self._places.items() if (t := p.tensor()) is not None
        }
        self._backwards = 0
        self._structure = _Structure(module)

    def before_backward(self) -> str | None:
        """`refusal` for a backward; compares contents in the first one and in every 64th."""
        refusal = self.refusal(contents=self._backwards % _EVERY == 0) or self._entered()
        # A refused change is refused again the next time.
        self._backwards += refusal is None
        return refusal

    def changed(self, *, contents: bool = True) -> list[str]:
        """Names of buffers and frozen parameters that changed.

        Args:
            contents: compare all contents, also where no version counter advanced.
        """
        if contents:
            for name, place in _buffers_of(self._module):
                if name not in self._allowed:
                    self._places.setdefault(name, place)
        return [n for n, place in self._places.items() if self._has_changed(n, place, contents)]

    def refusal(self, *, contents: bool = True) -> str | None:
        """A message that names the changed tensors; None if there are none. See `changed`."""
        changed = self.changed(contents=contents)
        if not changed:
            return None
        shown = ", ".join(f"'{name}'" for name in changed[:3]) + ", ..." * (len(changed) > 3)
        return (
            f"{shown} changed since make_private: buffers and frozen parameters get no noise, so "
            "data that a forward writes there is released with the weights and affects later "
            "batches. Keep nothing of a batch in the model. Set weights before make_private, or "
            "by model.load_state_dict; if its contents are public, pass "
            f"allow_buffers=[{changed[0]!r}]"
        )

    def compare(self) -> None:
        """Compare all contents.

        Raises:
            PrivateRefusal: some changed.
        """
        refusal = self.refusal() or self._entered()
        if refusal is not None:
            raise PrivateRefusal(refusal) from None

    def _entered(self) -> str | None:
        """A message that names a parameter which entered the model; None if there is none."""
        name = self._structure.entered(self._allowed)
        if name is None:
            return None
        return (
            f"'{name}' entered the model after make_private, or took another parameter's place: "
            "its gradient would be neither clipped nor noised, and state_dict() would release it. "
            "Call engine.detach(model), change the model, build the optimizer again, then "
            "make_private again"
        )

    def loaded(self, names: Iterable[str]) -> None:
        """Accept the contents that `load_state_dict` has set under these names."""
        found = [self._places[name].tensor() for name in names if name in self._places]
        ids = {id(t) for t in found if t is not None}
        for name, place in self._places.items():
            tensor = place.tensor()
            if tensor is not None and id(tensor) in ids:
                self._states[name] = _State.of(tensor)

    def moved(self, apart_from: Collection[str] = ()) -> None:
        """Accept all contents, after a change of device or dtype."""
        for name, place in self._places.items():
            tensor = place.tensor()
            if tensor is not None and name not in apart_from:
                self._states[name] = _State.of(tensor)

    def allowed_contents(self) -> Contents:
        """Current contents of the tensors that may change."""
        return Contents(self._allowed_places)

    def _has_changed(self, name: str, place: _Place, contents: bool) -> bool:
        tensor, seen = place.tensor(), self._states.get(name)
        if tensor is None:
            # A tensor that no longer exists cannot be released.
            return False
        if seen is not None and tensor is seen.tensor and not contents:
            if seen.version is not None and _version(tensor) == seen.version:
                return False
        now = _State.of(tensor)
        if seen is None or now.shape != seen.shape:
            # Outside of `state_dict` tables of angles and masks grow with the longest sequence.
            same = not place.is_public
        else:
            same = now.digest == seen.digest
        if same:
            self._states[name] = now
        return not same


class _Structure:
    """The parameters of a model and their places, compared by identity."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._note()

    def _note(self) -> None:
        modules = list(self._module.modules())
        # fully_shard puts other parameters into a module for its forward.
        still = [m for m in modules if not any(map(_is_shard, m._parameters.values()))]
        dicts: list[dict[str, Any]] = [m._parameters for m in still]
        self._dicts = dicts + [m._modules for m in modules]
        self._held = [x for held in self._dicts for x in held.values()]
        self._places = {
            (id(m), key): p for m in modules for key, p in m._parameters.items() if p is not None
        }
        self._modules = {id(m): m for m in modules}  # Keeps ids from being used again.
        self._known = {id(p) for p in self._places.values()}

    def entered(self, allowed: Collection[str]) -> str | None:
        """Name of a parameter that was not in the model, or not in this place; None if none."""
        now = chain.from_iterable(held.values() for held in self._dicts)
        if sum(map(len, self._dicts)) == len(self._held) and all(map(is_, now, self._held)):
            return None
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            for key, parameter in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                held = self._places.get((id(module), key))
                if parameter is None or name in allowed or (held is not None and _is_shard(held)):
                    continue
                is_new = id(module) not in self._modules and id(parameter) in self._known
                if parameter is not held and not is_new:
                    return name
        self._note()
        return None


def _is_shard(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and is_sharded(parameter)


def check_allowed(
    module: nn.Module, trained: Collection[nn.Parameter], allowed: Collection[str]
) -> None:
    """Refuse names that are neither buffers nor frozen parameters of the module.

    Raises:
        ValueError: naming the first.
    """
    places = _places_of(module, trained)
    for name in allowed:
        if name not in places:
            close = difflib.get_close_matches(name, places, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"allow_buffers has {name!r}, which is no buffer and no frozen parameter of the "
                f"module{hint}"
            )


class Contents:
    """Saved contents of some buffers and parameters."""

    def __init__(self, places: Iterable[_Place]) -> None:
        held = [(place, place.tensor()) for place in places]
        self._held = [(p, t, t.detach().clone()) for p, t in held if t is not None]

    def restore(self) -> None:
        """Restore the contents."""
        for place, tensor, contents in self._held:
            if place.is_buffer:
                place.module._buffers[place.key] = tensor
            with torch.no_grad():
                tensor.copy_(contents)


def _buffers_of(module: nn.Module) -> Iterator[tuple[str, _Place]]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key in owner._buffers:
            yield f"{prefix}.{key}" if prefix else key, _Place(owner, key, True)


def _places_of(module: nn.Module, trained: Collection[nn.Parameter]) -> dict[str, _Place]:
    ids = {id(p) for p in trained}
    return {**dict(_buffers_of(module)), **dict(_frozen_of(module, ids))}


def _frozen_of(module: nn.Module, trained: Collection[int]) -> Iterator[tuple[str, _Place]]:
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in trained:
                part = parameter if is_sharded(parameter) else None
                yield f"{prefix}.{key}" if prefix else key, _Place(owner, key, False, part)


def _version(tensor: Tensor) -> int | None:
    """Version counter of a tensor; None if it has none."""
    return None if tensor.is_inference() else _here(tensor)._version


def _here(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _digest(tensor: Tensor) -> int:
    held = _here(tensor).detach()
    if held.is_meta:
        return 0
    if held.is_quantized:
        held = held.int_repr()
    if held.layout != torch.strided:
        held = held.to_dense()
    return int(row_digests(held.reshape(1, held.numel()))[0])
