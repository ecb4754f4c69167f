"""Captures of CUDA graphs: keeps alive the memory that a replay reads.

A graph stores the addresses that its kernels read, but no references to the tensors. A copy from
the CPU that is captured would be repeated in each replay, from memory that may have been reused.
So `Kept` holds the tensors that launches made or looked up during a capture, and copies tables
from the CPU once, after the capture.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# The `Kept` of the current capture. Not thread-local: autograd runs GPU nodes in other threads.
_kept: Kept | None = None


class Kept:
    """Holds the tensors, besides those of the model, that kernels of a captured graph read.

    Keep this object as long as the graph. Tables are allocated in a rehearsal, a run of the code
    before the capture. During the capture they would be in the graph's pool, which reuses memory.
    """

    def __init__(self) -> None:
        self._places: list[Tensor] = []
        self._tables: list[Tensor] = []
        self._objects: list[object] = []
        self._rehearses = False

    @contextmanager
    def _is_current(self) -> Iterator[None]:
        global _kept
        held, _kept = _kept, self
        try:
            yield
        finally:
            _kept = held

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Context manager for the rehearsal, before `capturing`; holds its launches' tensors."""
        self._rehearses = True
        with self._is_current():
            yield
        self._rehearses = False

    def capturing(self) -> AbstractContextManager[None]:
        """Context manager for the capture; it uses the tensors that the rehearsal held."""
        return self._is_current()

    def serves(self, device: torch.device) -> bool:
        """Return whether a table requested now is for this capture, not for another thread."""
        is_cuda = device.type == "cuda" and not self._rehearses
        return not is_cuda or torch.cuda.is_current_stream_capturing()

    def place_of(self, table: Tensor, device: torch.device) -> Tensor:
        """Return memory on the device for a table on the CPU; `write` copies the table there.

        Raises:
            RuntimeError: the rehearsal requested other tables.
        """
        if self._rehearses:
            self._places.append(table.to(device, copy=True))
            return self._places[-1]
        number = len(self._tables)
        self._tables.append(table)
        if number < len(self._places):
            there = self._places[number]
            if (there.shape, there.dtype, there.device) == (table.shape, table.dtype, device):
                return there
        raise RuntimeError("a capture launches other kernels than its rehearsal")

    def hold(self, found: object) -> None:
        """Keep a reference to an object that holds tensors."""
        self._objects.append(found)

    def write(self) -> None:
        """Copy the tables to the device, once, after the capture and before the first replay."""
        for there, table in zip(self._places, self._tables, strict=True):
            there.copy_(table)


def kept_in_captures(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function that returns cached tensors, so that a capture keeps them alive."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        found = function(*args, **kwargs)
        if _kept is not None:
            _kept.hold(found)
        return found

    return call


def sent(x: Tensor, device: torch.device) -> Tensor:
    """Copy x from the CPU to a device, without synchronizing.

    Raises:
        RuntimeError: a CUDA stream captures a graph without `Kept`.
    """
    if _kept is not None and _kept.serves(device):
        return _kept.place_of(x, device)
    if device.type != "cuda":
        return x.to(device)
    refuse_capture("each replay would copy a table from memory that may have been reused")
    return x.pin_memory().to(device, non_blocking=True)


def is_captured_by_others(device: torch.device) -> bool:
    """Return whether a stream captures without `Kept`: no tensor may be cached or reused then."""
    is_cuda = device.type == "cuda" and _kept is None
    return is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_capture(reason: str) -> None:
    """Raise RuntimeError while the current CUDA stream is capturing.

    Args:
        reason: the effect of a replay, for the error message.
    """
    # The second call raises without CUDA; no stream captures before CUDA is initialized.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA stream is capturing a graph, and {reason}. Make this call outside of the "
            "capture, that is, outside of torch.cuda.graph and make_graphed_callables"
        )
