"""Saves and restores the loop's state around a trial: generators, schedulers and options."""

from __future__ import annotations

import inspect
import os
import random
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..verification.attributes import copied, is_same

_DEEP = 3
_MOST_PARTS = 64
# Types whose values hold no generator.
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_NO_OBJECTS = (type, ModuleType)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Packages whose module variables do not belong to the training loop.
_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
# Number of references to a frame's copy of its variables: from the frame, a name, an argument.
_OF_FRAME = 3


class Generators:
    """The states of the random generators that the running functions can reach.

    The search covers the functions' local and global variables, containers in them, and
    attributes. Functions that call `locals()` are left out, since reading their variables changes
    the result of `locals()`. `RandomState` holds the global generators of torch, NumPy and Python.

    Attributes:
        schedulers: the learning rate schedulers, found in the same search.
    """

    def __init__(self) -> None:
        self.schedulers: list[LRScheduler] = []
        found: dict[int, Callable[[], object]] = {}
        frame: FrameType | None = sys._getframe(1)
        seen: dict[int, int] = {}  # Depth to which each object was searched, by its id.
        while frame is not None:
            own = {} if _shows_variables(frame.f_code) else frame.f_locals
            self._collect(own.values(), found, seen, _DEEP)
            shared = frame.f_globals
            if id(shared) not in seen and not frame.f_code.co_filename.startswith(_LIBRARIES):
                seen[id(shared)] = _DEEP
                self._collect(shared.values(), found, seen, _DEEP)
            is_copy = type(own) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
            # Clear the copy, which would keep variables alive that the function deletes.
            if is_copy and sys.getrefcount(own) <= _OF_FRAME:
                own.clear()
            frame = frame.f_back
        self._restores = list(found.values())

    def restore(self) -> None:
        for restore in self._restores:
            restore()

    def _collect(
        self,
        values: Any,
        found: dict[int, Callable[[], object]],
        seen: dict[int, int],
        depth: int,
    ) -> None:
        for value in list(values):
            kind = type(value)
            if kind in _PLAIN or seen.get(id(value), -1) >= depth or issubclass(kind, _NO_OBJECTS):
                continue
            if (restore := restore_of(value)) is not None:
                found.setdefault(id(value), restore)
            elif _is(value, LRScheduler):
                seen[id(value)] = _DEEP
                self.schedulers.append(value)
            elif depth and (parts := _parts_of(value)):
                seen[id(value)] = depth
                self._collect(parts, found, seen, depth - 1)


class Options:
    """Saved options of optimizers and of the next noisy step, and states of schedulers.

    Args:
        optimizers, schedulers: the optimizers and the learning rate schedulers.
        numbers: options of the next noisy step, by name, such as max_grad_norm.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        numbers: dict[str, float],
    ) -> None:
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = [(numbers, numbers.copy())]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                own = {name: value for name, value in group.items() if name != "params"}
                # Copy tensors too, since schedulers write into options that are tensors.
                self._held.append((group, copied(own, {}, with_tensors=True)))
        self._options = len(self._held)
        for scheduler in schedulers:
            inner = getattr(scheduler, "_schedulers", ())
            self._held += [(vars(x), vars(x).copy()) for x in (*inner, scheduler)]

    def restore(self, *, changed_since: Options | None = None) -> None:
        """Restore the options; with `changed_since`, only of groups that differ from it."""
        others = self._held if changed_since is None else changed_since._held
        for number, (own, held) in enumerate(self._held):
            if changed_since is not None and is_same(others[number][1], held):
                continue
            for name, value in held.items():
                now: Any = own.get(name)
                if _is(value, Tensor) and _is(now, Tensor) and now.shape == value.shape:
                    # Write in place, since other objects may reference the tensor.
                    if not is_same(now, value):
                        now.copy_(value)
                elif number < self._options:
                    own[name] = copied(value, {}, with_tensors=True)
                else:
                    own[name] = value

    def changed_otherwise(self, begin: Options, now: Options) -> str | None:
        """Return an option's name if it has three distinct values in begin, self, now; else None.

        Args:
            begin, now: options of the same optimizers; schedulers may differ.
        """
        found = zip(begin._held[: self._options], self._held, now._held, strict=False)
        for (_, before), (_, held), (_, value) in found:
            for name in before.keys() & held.keys() & value.keys():
                both = is_same(before[name], held[name]), is_same(held[name], value[name])
                if not any(both) and not is_same(before[name], value[name]):
                    return name
        return None


def _shows_variables(code: CodeType) -> bool:
    """Return whether a function calls locals(): reading its variables changes the result."""
    is_copied = sys.version_info < (3, 13) and bool(code.co_flags & inspect.CO_OPTIMIZED)
    # The assert statements of pytest call locals() too.
    return is_copied and "locals" in code.co_names and "@py_builtins" not in code.co_names


def _is(value: Any, *kinds: type) -> bool:
    """Return isinstance(value, kinds), and False for a weak proxy of a deleted object."""
    return issubclass(type(value), kinds)


def _parts_of(value: Any) -> Collection[Any]:
    """Return the parts of a small container, or the attributes of another object."""
    # Do not run code of the object's class, which may have side effects.
    for kind, parts in ((dict, dict.values), (list, list.copy), (tuple, tuple.__iter__)):
        if _is(value, kind):
            return list(parts(value)) if kind.__len__(value) <= _MOST_PARTS else ()
    if _is(value, MethodType, BuiltinMethodType):
        return (value.__self__,)
    if _is(value, partial):
        return (*value.args, *value.keywords.values())
    if _is(value, FunctionType):
        return [part for cell in value.__closure__ or () for part in _contents_of(cell)]
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return own.values() if type(own) is dict else ()


def _contents_of(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def restore_of(value: Any) -> partial[Any] | None:
    """Return a partial that restores a generator's state, its last argument; else None."""
    if not _is(value, *_GENERATORS):
        return None
    if _is(value, torch.Generator):
        state = value.get_state()
        return partial(value.set_state, state)
    if _is(value, np.random.Generator):
        held = value.bit_generator.state
        return partial(setattr, value.bit_generator, "state", held)
    if _is(value, np.random.RandomState):
        legacy = value.get_state()
        return partial(value.set_state, legacy)
    if _is(value, random.Random) and not _is(value, random.SystemRandom):
        plain = value.getstate()
        return partial(value.setstate, plain)
    return None
