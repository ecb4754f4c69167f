"""What a trial changes in the training loop: states of generators, schedulers and options."""

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
# Values of these types hold no generator.
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})
_NO_OBJECTS = (type, ModuleType)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Packages whose module variables belong to no training loop.
_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, str(Path(torch.__file__).parent) + os.sep)
_OF_FRAME = 3  # references to a frame's copy of its variables: the frame, ours, the argument


class Generators:
    """The states of the random generators that the running functions can reach.

    These are in their local and global variables, in containers there, and in attributes of
    these. The global generators of torch, NumPy and Python are not among them, see `RandomState`.
    Functions that call `locals()` are left out: what is read of them would appear in its result.

    Attributes:
        schedulers: of learning rates, found likewise.
    """

    def __init__(self) -> None:
        self.schedulers: list[LRScheduler] = []
        found: dict[int, Callable[[], object]] = {}
        frame: FrameType | None = sys._getframe(1)
        seen: dict[int, int] = {}  # How deep each object was searched.
        while frame is not None:
            own = {} if _shows_variables(frame.f_code) else frame.f_locals
            self._collect(own.values(), found, seen, _DEEP)
            shared = frame.f_globals
            if id(shared) not in seen and not frame.f_code.co_filename.startswith(_LIBRARIES):
                seen[id(shared)] = _DEEP
                self._collect(shared.values(), found, seen, _DEEP)
            is_copy = type(own) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
            # It would keep alive what the function deletes.
            if is_copy and sys.getrefcount(own) <= _OF_FRAME:
                own.clear()
            frame = frame.f_back
        self._restores = list(found.values())

    def restore(self) -> None:
        """Restore the states."""
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
    """The options of optimizers and of releases, and learning rate schedulers, at one time.

    Args:
        optimizers, schedulers: whose.
        numbers: of the next release, by name.
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
                # Schedulers write into options that are tensors.
                self._held.append((group, copied(own, {}, with_tensors=True)))
        self._options = len(self._held)
        for scheduler in schedulers:
            inner = getattr(scheduler, "_schedulers", ())
            self._held += [(vars(x), vars(x).copy()) for x in (*inner, scheduler)]

    def restore(self, *, changed_since: Options | None = None) -> None:
        """Restore the options; given later options of the same objects, only those that differ."""
        others = self._held if changed_since is None else changed_since._held
        for number, (own, held) in enumerate(self._held):
            if changed_since is not None and is_same(others[number][1], held):
                continue
            for name, value in held.items():
                now: Any = own.get(name)
                if _is(value, Tensor) and _is(now, Tensor) and now.shape == value.shape:
                    # Whoever else has the tensor is to see it.
                    if not is_same(now, value):
                        now.copy_(value)
                elif number < self._options:
                    own[name] = copied(value, {}, with_tensors=True)
                else:
                    own[name] = value

    def changed_otherwise(self, begin: Options, now: Options) -> str | None:
        """An option that is not what it was at the begin, neither here nor now, or None.

        Args:
            begin, now: of the same objects, but for schedulers.
        """
        found = zip(begin._held[: self._options], self._held, now._held, strict=False)
        for (_, before), (_, held), (_, value) in found:
            for name in before.keys() & held.keys() & value.keys():
                both = is_same(before[name], held[name]), is_same(held[name], value[name])
                if not any(both) and not is_same(before[name], value[name]):
                    return name
        return None


def _shows_variables(code: CodeType) -> bool:
    """Whether a function may hold the dict that is its frame's `f_locals`."""
    is_copied = sys.version_info < (3, 13) and bool(code.co_flags & inspect.CO_OPTIMIZED)
    # pytest's assert statements call it too.
    return is_copied and "locals" in code.co_names and "@py_builtins" not in code.co_names


def _is(value: Any, *kinds: type) -> bool:
    """Whether a value is of one of the kinds; proxies are of their own, dead ones too."""
    return issubclass(type(value), kinds)


def _parts_of(value: Any) -> Collection[Any]:
    """The parts of a small container, or the attributes of another object."""
    # Without code of its class, which may compute.
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
    """Sets a generator to its present state, the last argument; None for other objects."""
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
