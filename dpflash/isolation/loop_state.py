"""What a trial changes in the training loop, and what is restored after it."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_DEEP = 3
_MOST_PARTS = 64
_OF_FRAME = 3  # references to a frame's copy of its variables: the frame, ours, the argument


class LoopState:
    """The states of the random generators and schedulers that the running functions can reach.

    These are in their local and global variables, in containers there, and in attributes of
    these. The global generators of torch, NumPy and Python are not among them, see `RandomState`.

    Args:
        optimizers: whose options, such as learning rates, are restored too.
    """

    def __init__(self, optimizers: Sequence[Optimizer] = ()) -> None:
        self._groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        found: dict[int, Callable[[], object]] = {}
        frame: FrameType | None = sys._getframe(1)
        seen: set[int] = set()
        while frame is not None:
            own = frame.f_locals
            for variables in (own, frame.f_globals):
                if id(variables) not in seen:
                    seen.add(id(variables))
                    _collect(variables.values(), found, seen, _DEEP)
            is_copy = type(own) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED
            # It would keep alive what the function deletes. The function may have it by locals().
            if is_copy and sys.getrefcount(own) <= _OF_FRAME:
                own.clear()
            frame = frame.f_back
        self._restores: list[Callable[[], object]] = list(found.values())

    def restore(self) -> None:
        """Restore the states."""
        for restore in self._restores:
            restore()
        for group, options in self._groups:
            group.update(options)


def _collect(
    values: Any, found: dict[int, Callable[[], object]], seen: set[int], depth: int
) -> None:
    for value in list(values):
        if isinstance(value, type | ModuleType) or id(value) in seen:
            continue
        if (restore := _restore_of(value)) is not None:
            found.setdefault(id(value), restore)
        elif depth and (parts := _parts_of(value)):
            seen.add(id(value))
            _collect(parts, found, seen, depth - 1)


def _parts_of(value: Any) -> Collection[Any]:
    """The parts of a small container, or the attributes of another object."""
    if type(value) in (dict, list, tuple):
        parts = value.values() if type(value) is dict else value
        return parts if len(parts) <= _MOST_PARTS else ()
    if isinstance(value, partial):
        return (*value.args, *value.keywords.values())
    if isinstance(value, FunctionType):
        return [part for cell in value.__closure__ or () for part in _contents_of(cell)]
    try:  # without code of its class
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return ()
    return own.values() if type(own) is dict else ()


def _contents_of(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not assigned yet
        return []


def _restore_of(value: Any) -> Callable[[], object] | None:
    """Sets a generator or scheduler to its present state; None for other objects."""
    if isinstance(value, LRScheduler):
        inner = [_restore_of(part) for part in getattr(value, "_schedulers", ())]
        own = partial(vars(value).update, vars(value).copy())
        return lambda: [restore() for restore in (*inner, own) if restore is not None]
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return partial(value.set_state, state)
    if isinstance(value, np.random.Generator):
        held = value.bit_generator.state
        return partial(setattr, value.bit_generator, "state", held)
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state()
        return partial(value.set_state, legacy)
    if isinstance(value, random.Random):
        plain = value.getstate()
        return partial(value.setstate, plain)
    return None
