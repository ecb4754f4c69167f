"""Captures of CUDA graphs: what a replay reads stays where the capture found it.

A graph keeps the addresses of what its kernels read, and no reference to it. What was copied from
the CPU while a stream captured would be copied again in each replay, from memory that others have
by then. So `Kept` holds what launches made or looked up during a capture, and writes tables from
the CPU once, after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# Of the capture under way. Not by thread: autograd runs a GPU's nodes in threads of its own.
_kept: Kept | None = None


class Kept:
    """What the kernels of a captured graph read beside the tensors of the model.

    It must live as long as the graph.
    """

    def __init__(self) -> None:
        self._tables: list[tuple[Tensor, Tensor]] = []
        self._objects: list[object] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Hold what launches inside the block use; one capture at a time."""
        global _kept
        held, _kept = _kept, self
        try:
            yield
        finally:
            _kept = held

    def place_of(self, table: Tensor, device: torch.device) -> Tensor:
        """Memory on the device for a table on the CPU, which `write` copies there."""
        there = torch.empty_like(table, device=device)
        self._tables.append((there, table))
        return there

    def hold(self, found: object) -> None:
        """Hold what holds tensors."""
        self._objects.append(found)

    def write(self) -> None:
        """Copy the tables to the device; once, after the capture and before the first replay."""
        for there, table in self._tables:
            there.copy_(table)


def kept_in_captures(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function that keeps tensors in a cache: a captured graph holds what it used."""

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        found = function(*args, **kwargs)
        if _kept is not None:
            _kept.hold(found)
        return found

    return call


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x, on a CPU, on a device, which is not waited for.

    Raises:
        RuntimeError: a CUDA stream captures a graph without `Kept`.
    """
    if _kept is not None:
        return _kept.place_of(x, device)
    if device.type != "cuda":
        return x.to(device)
    refuse_capture("each replay would copy a table from memory that is no longer its own")
    return x.pin_memory().to(device, non_blocking=True)


def is_captured_by_others(device: torch.device) -> bool:
    """Whether a stream captures a graph without `Kept`, so that caches must not be used."""
    is_cuda = device.type == "cuda" and _kept is None
    return is_cuda and torch.cuda.is_current_stream_capturing()


def refuse_capture(reason: str) -> None:
    """Raise RuntimeError while the current CUDA stream is capturing.

    Args:
        reason: the effect of a replay, for the message.
    """
    # The second call raises without CUDA; nothing captures before CUDA is initialized.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA stream is capturing a graph, and {reason}. Leave it out of the capture: call "
            "it outside of torch.cuda.graph, make_graphed_callables and the like"
        )
