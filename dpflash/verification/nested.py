"""Finds and changes the tensors in nested batches: mappings, sequences, dataclasses, pytrees.

Mappings are dicts and similar classes, such as transformers' BatchEncoding. All other values in a
batch (None, numbers, strings, arrays, objects) are left unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_OTHERS = (type, ModuleType, Tensor, np.ndarray, nn.Module)


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for all tensors in a batch; a path is, say, "['labels'][0]"."""
    return leaves_of(value, kinds=(Tensor,))


def leaves_of(value: Any, *, kinds: tuple[type, ...], place: str = "") -> Iterator[Any]:
    """Yield (path, leaf) for all values of these types in a batch."""
    if isinstance(value, kinds):
        yield place, value
        return
    for name, part in parts_of(value):
        yield from leaves_of(part, kinds=kinds, place=place + name)


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, part) for the parts of a container; nothing for any other value."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif names := _field_names(value):
        yield from ((f".{name}", getattr(value, name)) for name in names)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | range):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    elif (flat := _flattened(value)) is not None:
        yield from ((f"[{number}]", part) for number, part in enumerate(flat[0]))


def parts_within(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for the parts of a container, or for the attributes of an object."""
    parts = list(parts_of(value))
    if not parts and hasattr(value, "__dict__") and not isinstance(value, _OTHERS):
        parts = [(f".{name}", part) for name, part in vars(value).items()]
    yield from parts


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return a copy of a batch with `change` applied to all its tensors, see `map_leaves`."""
    return map_leaves(change, value, kinds=(Tensor,))


def map_leaves(change: Callable[[Any], Any], value: Any, *, kinds: tuple[type, ...]) -> Any:
    """Return a copy of a batch with `change` applied to all values of these types.

    Copied containers keep their classes. Their attributes that hold a changed value are changed
    too. The result shares all other objects with `value`, and containers in which nothing changes,
    unless pytrees know their class. A container whose copy would share its parts is not changed.
    """
    if isinstance(value, kinds):
        return change(value)
    flat = _flattened(value)
    if flat is not None:
        parts = [map_leaves(change, part, kinds=kinds) for part in flat[0]]
        return tree_unflatten(parts, flat[1])
    changed = [(n, map_leaves(change, p, kinds=kinds), p) for n, p in _settable_parts(value)]
    if all(new is old for _, new, old in changed):
        return value
    copied = copy.copy(value)
    for name, new, _ in changed:
        _set_part(copied, name, new)
    if any(_part(value, name) is not old for name, _, old in changed):
        for name, _, old in changed:
            _set_part(value, name, old)
        return value
    by_identity = {id(old): new for _, new, old in changed}
    attributes = vars(copied) if hasattr(copied, "__dict__") else {}
    for name, held in list(attributes.items()):
        attributes[name] = by_identity.get(id(held), held)
    return copied


def _part(value: Any, name: Any) -> Any:
    return getattr(value, name) if dataclasses.is_dataclass(value) else value[name]


def _set_part(value: Any, name: Any, part: Any) -> None:
    if dataclasses.is_dataclass(value):
        object.__setattr__(value, name, part)  # it may be frozen
    else:
        value[name] = part


def _flattened(value: Any) -> tuple[list[Any], Any] | None:
    """Return the parts and structure of a container that torch's pytrees know, or None."""
    parts, structure = tree_flatten(value, is_leaf=lambda part: part is not value)
    return None if structure.is_leaf() else (parts, structure)


def _settable_parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key, part) for the parts of a container whose class pytrees do not know."""
    if isinstance(value, MutableMapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value):
        yield from ((name, getattr(value, name)) for name in _field_names(value))
    elif isinstance(value, list):
        yield from enumerate(value)


def _field_names(value: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
    return tuple(value._fields) if isinstance(value, tuple) and hasattr(value, "_fields") else ()
