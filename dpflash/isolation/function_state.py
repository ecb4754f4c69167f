"""FunctionState: the random generators and data that a function keeps between its calls."""

from __future__ import annotations

import dis
import math
import pickle
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .loop_state import restore_of

_DEEP = 8
_MOST_PARTS = 64
_MOST_OBJECTS = 4096
_MOST_NUMBERS = 1 << 20
_LIBRARIES = {"dpflash", "torch", "numpy", *sys.stdlib_module_names}
_CONTAINERS = {dict, OrderedDict, defaultdict, Counter, list, set, deque}
_MISSING: Any = object()


class FunctionState:
    """Saves the random generators and the data that functions can reach.

    The search covers the functions' closures, the globals that their code names, attributes of
    objects and of their classes, and small containers found there. The following is not saved:
    - larger containers, and more than 2^20 numbers in tensors and arrays;
    - the state of dpflash, torch, NumPy and the standard library;
    - data of objects of other packages than the functions'. A restored object could contradict its
      open files, or threads that wait on its queue.

    Args:
        functions: functions, or objects with methods.
        with_data: whether to save data too, or generators only.
    """

    def __init__(self, *functions: Any, with_data: bool = True) -> None:
        self._generators: list[tuple[Any, partial[Any]]] = []
        self._restores: list[Callable[[], None]] = []
        self._numbers = 0
        self._own = {_package_of(value) for value in functions} | {"__main__"}
        seen: dict[int, Any] = {}
        level = [(value, with_data) for value in functions]
        for _ in range(_DEEP):
            parts: list[tuple[Any, bool]] = []
            for value, self._holds in level:
                if id(value) not in seen and len(seen) < _MOST_OBJECTS:
                    seen[id(value)] = value
                    parts += [(part, self._holds) for part in self._parts_of(value)]
            level = parts

    def restore(self) -> None:
        """Restore the saved generators and data."""
        for restore in self._restores:
            restore()
        for _, restore_generator in self._generators:
            restore_generator()

    def seed(self, seed: int) -> None:
        """Seed the generators."""
        for generator, _ in self._generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                own = generator.bit_generator
                own.state = type(own)(seed).state
            else:
                generator.seed(seed)

    def has_generators_of(self, other: FunctionState) -> bool:
        """Return whether this state has all generators of the other state."""
        own, others = ({id(x) for x, _ in state._generators} for state in (self, other))
        return others <= own

    def random_states(self) -> bytes:
        """Return the current states of the generators, pickled."""
        states = [restore_of(generator) for generator, _ in self._generators]
        held = [state.args[-1] for state in states if state is not None]
        # Convert tensors to NumPy arrays, since pickles of equal tensors may differ.
        return pickle.dumps([x.numpy() if isinstance(x, Tensor) else x for x in held])

    def _parts_of(self, value: Any) -> Iterator[Any]:
        kind = type(value)  # isinstance would access dead weak proxies
        if issubclass(kind, ModuleType | type):
            return
        if (restore := restore_of(value)) is not None:
            self._generators.append((value, restore))
        elif kind is Tensor or kind is np.ndarray:
            self._hold_array(value)
        elif kind in _CONTAINERS:
            if len(value) <= _MOST_PARTS:
                self._hold(_container_restore(value))
                yield from value.values() if isinstance(value, dict) else value
        elif issubclass(kind, tuple):
            yield from value[:_MOST_PARTS]
        elif kind is MethodType:
            yield from (value.__self__, value.__func__)
        elif kind is FunctionType:
            yield from self._parts_of_function(value)
        else:
            yield from self._parts_of_object(value)

    def _parts_of_function(self, function: FunctionType) -> Iterator[Any]:
        yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
        for cell in function.__closure__ or ():
            held = _contents_of(cell)
            self._hold(partial(_restore_cell, cell, held))
            yield held
        if not _is_of_library(function.__module__):
            variables = function.__globals__
            held = {name: variables.get(name, _MISSING) for name in _names_in(function.__code__)}
            self._hold(partial(_restore_names, variables, held))
            yield from held.values()

    def _parts_of_object(self, value: Any) -> Iterator[Any]:
        if type(value) is partial:
            yield from (value.func, *value.args, *value.keywords.values())
        self._holds &= _package_of(value) in self._own
        try:  # Runs no code of the object's class.
            own = object.__getattribute__(value, "__dict__")
        except AttributeError:
            own = {}
        if type(own) is dict:
            self._hold(partial(_restore_names, own, own.copy(), all_names=True))
            yield from own.values()
        for base in type(value).__mro__:
            if not _is_of_library(base.__module__):
                for part in vars(base).values():
                    is_method = type(part) in (classmethod, staticmethod)
                    yield part.__func__ if is_method else part

    def _hold(self, restore: Callable[[], None]) -> None:
        if self._holds:
            self._restores.append(restore)

    def _hold_array(self, value: Any) -> None:
        """Copy a writable tensor or array, if all copies have at most `_MOST_NUMBERS` elements."""
        if isinstance(value, Tensor):
            can_be_set = value.is_cpu and value.layout == torch.strided and value.is_leaf
            can_be_set = can_be_set and not value.is_inference() and not value.is_shared()
        else:
            can_be_set = value.flags.writeable and not value.dtype.hasobject
        count = math.prod(value.shape)
        if self._holds and can_be_set and self._numbers + count <= _MOST_NUMBERS:
            self._numbers += count
            if isinstance(value, Tensor):
                self._hold(partial(_write_tensor, value, value.detach().clone()))
            else:
                self._hold(partial(_write_array, value, value.copy()))


def _package_of(value: Any) -> str:
    while type(value) is partial:
        value = value.func
    if type(value) is MethodType:
        value = value.__self__
    is_function = isinstance(value, FunctionType)
    module = value.__module__ if is_function else type(value).__module__
    return (module or "").partition(".")[0]


def _is_of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals in the code and in functions that the code defines."""
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    own = {x.argval for x in dis.get_instructions(code) if x.opname.endswith("_GLOBAL")}
    return own.union(*inner)


def _contents_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def _restore_cell(cell: Any, held: Any) -> None:
    if held is not _MISSING and _contents_of(cell) is not held:
        setattr(cell, "cell_contents", held)  # noqa: B010


def _restore_names(
    variables: dict[str, Any], held: dict[str, Any], *, all_names: bool = False
) -> None:
    for name in set(variables) - set(held) if all_names else ():
        del variables[name]
    for name, value in held.items():
        if value is _MISSING:
            variables.pop(name, None)
        elif variables.get(name, _MISSING) is not value:
            variables[name] = value


def _write_tensor(value: Tensor, held: Tensor) -> None:
    if value.shape == held.shape and not torch.equal(value, held):
        with torch.no_grad():
            value.copy_(held)


def _write_array(value: Any, held: Any) -> None:
    if value.shape == held.shape and not np.array_equal(value, held):
        value[...] = held


def _container_restore(value: Any) -> Callable[[], None]:
    held = value.copy()

    def restore() -> None:
        is_same = len(value) == len(held) and all(map(is_, value, held))
        if isinstance(value, dict):
            is_same = is_same and all(map(is_, value.values(), held.values()))
        if not is_same:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(held)

    return restore
