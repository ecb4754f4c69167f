"""Attributes that modules keep between forwards: saved, restored and compared.

Parameters, buffers and children are not among them. Contents are seen through lists, dicts, sets,
tuples and deques; other objects count as unchanged. Hooks are restored too, since models that
install hooks in their first forward keep a flag about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Attributes that torch keeps in the __dict__ of a module.
OF_TORCH = frozenset(vars(nn.Module()))
_HOOKS = [name for name in OF_TORCH if "_hooks" in name]
_CONTAINERS = (list, dict, set, tuple, deque)


def identity(value: Any) -> Any:
    """What is equal for two containers of the same objects, and for one object alone."""
    if type(value) is dict:
        return {key: identity(x) for key, x in value.items()}
    if type(value) is set:
        return sorted(map(id, value))
    return [identity(x) for x in value] if type(value) in _CONTAINERS else id(value)


def copied(value: Any, copies: dict[int, Any], *, with_tensors: bool) -> Any:
    """A copy of a container with all containers in it, and of its tensors if asked for.

    Args:
        value: returned as it is where it is none of both.
        copies: the copies so far by id, so that what occurs twice stays one object.
        with_tensors: copy the contents of tensors too, except of parameters.
    """
    if id(value) in copies:
        return copies[id(value)]
    if with_tensors and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        copies[id(value)] = value.detach().clone()
    elif type(value) is dict:
        made: dict[Any, Any] = {}
        copies[id(value)] = made
        made.update((k, copied(x, copies, with_tensors=with_tensors)) for k, x in value.items())
    elif type(value) in (list, deque):
        own: Any = [] if type(value) is list else deque((), value.maxlen)
        copies[id(value)] = own
        own.extend(copied(x, copies, with_tensors=with_tensors) for x in value)
    elif type(value) in (set, tuple):
        parts = [copied(x, copies, with_tensors=with_tensors) for x in value]
        copies[id(value)] = type(value)(parts)
    return copies.get(id(value), value)


def is_same(one: Any, two: Any) -> bool:
    """Whether two values have the same contents."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        return one.shape == two.shape and one.dtype == two.dtype and bool(torch.equal(one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(is_same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(two) and all(map(is_same, one, two))
    if isinstance(one, set | bool | int | float | complex | str | bytes):
        return bool(one == two)
    return False


class OwnAttributes:
    """The attributes of a model's modules at one time.

    Args:
        named_modules: (name, module) of the model.
    """

    def __init__(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        copies: dict[int, Any] = {}
        modules = list(named_modules)
        self._held = [
            (
                name,
                module,
                {k: (v, _contents(v)) for k, v in vars(module).items() if k not in OF_TORCH},
            )
            for name, module in modules
        ]
        hooks = [vars(module).get(name) for _, module in modules for name in _HOOKS]
        self._hooks = [(own, dict(own)) for own in hooks if own is not None]
        self._copies = [
            {k: copied(v, copies, with_tensors=True) for k, (v, _) in held.items()}
            for _, _, held in self._held
        ]

    def restore(self) -> None:
        """Restore the attributes themselves, and the contents of containers."""
        self._restore_hooks()
        for _, module, held in self._held:
            _set_attributes(module, {name: value for name, (value, _) in held.items()})
            for value, contents in held.values():
                if contents is not None:
                    value.clear()
                    (value.update if isinstance(value, dict | set) else value.extend)(contents)

    def restore_copies(self) -> None:
        """Have the modules continue with copies, which they may change in place."""
        self._restore_hooks()
        copies: dict[int, Any] = {}
        for (_, module, _), held in zip(self._held, self._copies, strict=True):
            _set_attributes(
                module, {k: copied(v, copies, with_tensors=True) for k, v in held.items()}
            )

    def _restore_hooks(self) -> None:
        for own, contents in self._hooks:
            if own or contents:
                own.clear()
                own.update(contents)

    def differing(self, other: OwnAttributes) -> list[str]:
        """Names of the attributes whose contents differ in two states of one model."""
        return [
            f"{name}.{key}" if name else key
            for (name, _, _), one, two in zip(self._held, self._copies, other._copies, strict=True)
            for key in {**one, **two}
            if not is_same(one.get(key), two.get(key))
        ]


def _set_attributes(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = module.__dict__
    for name in [k for k in own if k not in attributes and k not in OF_TORCH]:
        del own[name]
    own.update(attributes)


def _contents(value: Any) -> Any:
    """A copy of a container that can be changed in place."""
    return value.copy() if type(value) in _CONTAINERS and type(value) is not tuple else None
