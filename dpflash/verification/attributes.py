"""Saves, restores and compares the attributes that modules keep between forwards.

Parameters, buffers and child modules are left out. Contents of Python's containers and of
`SimpleNamespace` are compared; other objects count as unchanged. Hooks of forwards and backwards,
and flags that a model has such hooks, are restored. Hooks of state dicts are not restored, since
FSDP2 adds them in its first forward only.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from types import NoneType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

# Attributes that torch keeps in the __dict__ of a module.
OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = [name for name in OF_TORCH if "_hooks" in name and "state_dict" not in name]
_DICTS = {dict, OrderedDict, defaultdict}
_LISTS = {list, deque}
_CONTAINERS = {*_DICTS, *_LISTS, set, tuple, SimpleNamespace}
_PLAIN = (set, bool, int, float, complex, str, bytes)
_HOLD_NO_DATA = (bool, NoneType, nn.Module, torch.dtype, torch.device)


def identity(value: Any, above: tuple[int, ...] = ()) -> Any:
    """Return a key that is equal for containers of the same objects; for other values, the id."""
    kind = type(value)
    if id(value) in above:
        return above.index(id(value))
    if kind not in _CONTAINERS:
        return id(value)
    if kind is set:
        return sorted(map(id, value))
    above = (*above, id(value))
    if kind in _DICTS or kind is SimpleNamespace:
        held = value if kind in _DICTS else vars(value)
        return {key: identity(x, above) for key, x in held.items()}
    return [identity(x, above) for x in value]


def copied(value: Any, copies: dict[int, Any], *, with_tensors: bool) -> Any:
    """Copy a container with all containers in it, and with `with_tensors` also the tensors.

    Args:
        value: a container, or a tensor to copy; any other value is returned itself.
        copies: the copies so far by id, so that an object that occurs twice is copied once.
        with_tensors: whether to copy tensors too, except parameters.
    """
    kind = type(value)
    # Not isinstance, which asks a proxy for the class of its object, and may raise.
    is_tensor = with_tensors and issubclass(kind, Tensor) and not issubclass(kind, nn.Parameter)
    if not is_tensor and kind not in _CONTAINERS:
        return value
    if id(value) in copies:
        return copies[id(value)]
    if is_tensor:
        copies[id(value)] = _clone(value, copies)
    elif kind in (set, tuple):
        parts = [copied(x, copies, with_tensors=with_tensors) for x in value]
        copies[id(value)] = kind(parts)
    else:
        copies[id(value)] = made = copy.copy(value)
        held = vars(made) if kind is SimpleNamespace else made
        # copy.copy has copied plain values already; replace only containers and tensors.
        for key, x in list(enumerate(held) if kind in _LISTS else held.items()):
            if type(x) in _CONTAINERS or with_tensors and issubclass(type(x), Tensor):
                held[key] = copied(x, copies, with_tensors=with_tensors)
    return copies[id(value)]


def _clone(x: Tensor, copies: dict[int, Any]) -> Tensor:
    """Copy a tensor; views of one tensor become views of one copy."""
    if type(x) is not Tensor or x.layout != torch.strided or x.is_meta or x.is_quantized:
        return x.detach().clone()
    storage = x.untyped_storage()
    key = -storage.data_ptr()  # negative, so it is no object's id
    if key not in copies:
        copies[key] = storage.clone()
    empty = torch.empty(0, dtype=x.dtype, device=x.device)
    return empty.set_(copies[key], x.storage_offset(), x.shape, x.stride())


def is_same(one: Any, two: Any, above: tuple[int, ...] = ()) -> bool:
    """Return whether two values have the same contents."""
    if one is two or id(one) in above:
        return True
    if type(one) is not type(two):
        return False
    if issubclass(type(one), Tensor):
        try:
            return one.dtype == two.dtype and bool(torch.equal(one, two))
        except (NotImplementedError, RuntimeError):
            # torch.equal lacks some layouts. A wrong False costs only two more forwards.
            return False
    if issubclass(type(one), _PLAIN):
        return bool(one == two)
    above = (*above, id(one))
    if type(one) is SimpleNamespace:
        one, two = vars(one), vars(two)
    if type(one) in _DICTS:
        return one.keys() == two.keys() and all(is_same(one[k], two[k], above) for k in one)
    if type(one) in _CONTAINERS:
        return len(one) == len(two) and all(
            is_same(x, y, above) for x, y in zip(one, two, strict=True)
        )
    return False


class OwnAttributes:
    """Saves the attributes of a model's modules.

    Args:
        named_modules: the (name, module) pairs of the model.
    """

    def __init__(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(named_modules)
        self._held = [
            {k: v for k, v in vars(module).items() if k not in OF_TORCH}
            for _, module in self._modules
        ]
        hooks = [vars(module).get(name) for _, module in self._modules for name in _HOOKS]
        self._hooks = [(own, dict(own)) for own in hooks if own is not None]
        self._copies = self._copies_of(self._held)

    def restore(self) -> None:
        """Restore the saved attributes themselves, not copies."""
        self._set(self._held)

    def restore_copies(self) -> None:
        """Set copies of the saved attributes on the modules; the originals stay unchanged."""
        self._set(self._copies_of(self._copies))

    def differing(self, other: OwnAttributes) -> list[str]:
        """Return the names of attributes that differ between two saved states of one model."""
        return [
            f"{name}.{key}" if name else key
            for (name, _), one, two in zip(self._modules, self._copies, other._copies, strict=True)
            for key in {**one, **two}
            if not is_same(one.get(key), two.get(key))
        ]

    def changed(self) -> list[tuple[nn.Module, str, Any, Any]]:
        """Return (module, name, saved contents, current value) of attributes that have changed."""
        return [
            (module, name, before.get(name), value)
            for (_, module), before in zip(self._modules, self._copies, strict=True)
            for name, value in vars(module).items()
            if name not in OF_TORCH and not is_same(before.get(name), value)
        ]

    def kept_since(self) -> list[str]:
        """Return the names of changed attributes that may hold data."""
        may_hold = {
            f"{name}.{key}" if name else key
            for name, module in self._modules
            for key, value in vars(module).items()
            if key != "_dpflash" and not isinstance(value, _HOLD_NO_DATA)
        }
        differing = self.differing(OwnAttributes(self._modules))
        return [name for name in differing if name in may_hold]

    @staticmethod
    def _copies_of(held: list[dict[str, Any]]) -> list[dict[str, Any]]:
        copies: dict[int, Any] = {}
        return [{k: copied(v, copies, with_tensors=True) for k, v in own.items()} for own in held]

    def _set(self, attributes: list[dict[str, Any]]) -> None:
        for own, contents in self._hooks:
            if own or contents:
                own.clear()
                own.update(contents)
        for (_, module), wanted in zip(self._modules, attributes, strict=True):
            own = module.__dict__
            for name in [k for k in own if k not in wanted and k not in OF_TORCH]:
                del own[name]
            own.update(wanted)
