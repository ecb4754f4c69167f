"""Entries: checks the values in `state_dict()` that are neither parameters nor buffers.

Metrics, `get_extra_state` and hooks add such entries. Data in an entry would be released without
noise, so entries must not change.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterator, Mapping
from hashlib import blake2b
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .contents import digest


class Entries:
    """Compares the entries of a model's `state_dict()` that are neither a parameter nor a buffer.

    Args:
        module: the model, before it becomes private.
        allowed: names of entries that may change.

    Raises:
        ValueError: an entry cannot be compared.
    """

    def __init__(self, module: nn.Module, allowed: Collection[str]) -> None:
        self._module = module
        self._allowed = allowed
        self._state = module.state_dict
        self._seen = self._others(self._state())
        for name in self.changed():
            raise ValueError(
                f"'{name}' of state_dict() cannot be pickled, or is pickled to different bytes "
                "each time, so whether data changes it would be unknown: leave it out of "
                f"state_dict(), or, if it is public, pass allow_buffers=[{name!r}]"
            )

    def changed(
        self, state: Mapping[str, Any] | None = None, prefix: str = "", within: str = ""
    ) -> list[str]:
        """Return the names of entries that are new or have changed.

        Args:
            state: a result of `state_dict()`, by default of the whole model.
            prefix: the prefix of the model's names in `state`. Names without it are left out.
            within: the prefix of returned names, which replaces `prefix`.
        """
        others = self._others(self._state() if state is None else state, prefix, within)
        return [n for n, now in others.items() if now is None or self._seen.get(n) != now]

    def accept(
        self, names: Collection[str] | None = None, apart_from: Collection[str] = ()
    ) -> None:
        """Accept the current contents of entries, by default of all known entries."""
        names = [n for n in self._seen if (names is None or n in names) and n not in apart_from]
        if names:
            now = self._others(self._state())
            self._seen |= {name: now.get(name) for name in names}

    def _others(
        self, state: Mapping[str, Any], prefix: str = "", within: str = ""
    ) -> dict[str, bytes | None]:
        held = {n: t for n, t in _released(self._module) if not is_lazy(t)}
        known = {place for tensor in held.values() for place in _storages(tensor)}
        found: dict[str, bytes | None] = {}
        for key, value in _entries(state):
            name = within + key.removeprefix(prefix)
            if not key.startswith(prefix) or name in self._allowed or is_lazy(value):
                continue
            if isinstance(value, Tensor):
                places = _storages(value)
                if places and places <= known or _is_cast(value, held.get(name)):
                    continue
            found[name] = _summary(value)
        return found


def _entries(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from state.items()
    metadata: Mapping[str, Any] = getattr(state, "_metadata", {})
    for module, own in metadata.items():
        for key, value in own.items() if isinstance(own, Mapping) else [("_metadata", own)]:
            if key != "version":
                yield f"{module}.{key}" if module else key, value


def _released(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of parameters and buffers that `state_dict()` has without hooks."""
    yield from module.named_parameters(remove_duplicate=False)
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, buffer in owner._buffers.items():
            if buffer is not None and key not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def _storages(tensor: Tensor) -> set[int]:
    """Return the addresses of a tensor's storages; the empty set if it has none."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        # In newer torch, the names include the mesh of a DTensor.
        parts = [getattr(tensor, name) for name in names]
        return {place for part in parts if isinstance(part, Tensor) for place in _storages(part)}
    try:
        return {tensor.untyped_storage()._cdata}
    except (NotImplementedError, RuntimeError):
        return set()


def _is_cast(value: Tensor, held: Tensor | None) -> bool:
    """Return whether a value equals the model's tensor `held`, cast to the value's dtype."""
    if held is None or held.shape != value.shape:
        return False
    return bool(digest(held.detach().to(value.dtype)) == digest(value))


def _summary(value: Any) -> bytes | None:
    """Return a key that is equal for equal values, or None if the value cannot be pickled."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.fast = True  # else a repeated object would be written as a reference
    try:
        pickler.dump(value)
    except Exception:
        return None
    return blake2b(file.getvalue()).digest()


class _Pickler(pickle.Pickler):
    """Writes digests of tensors' contents, also inside objects, instead of their addresses."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        return tuple, ((str(value.dtype), tuple(value.shape), int(digest(value))),)
