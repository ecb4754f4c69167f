"""What a call takes of memory, and what autograd keeps of it."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_MIB = 2**20
_PROCESS = Path("/proc/self")


def peak_growth(step: Callable[[], object], device: torch.device) -> float | None:
    """MiB by which the memory grows at most during a call.

    On a GPU what the allocator gave out, else the resident memory of this process (Linux); None
    where the system does not tell.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - held) / _MIB
    try:
        _give_back()
        (_PROCESS / "clear_refs").write_text("5")  # begins a new peak
        before = _resident()
    except OSError:
        step()
        return None
    step()
    return max(0.0, _peak() - before)


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes of memory that autograd keeps between a forward pass and its backward.

    Args:
        forward: makes the pass and returns its output, inputs among what is kept count too.
    """
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    def unpack(x: Tensor) -> Tensor:
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = forward()
    del output
    return sum(kept.values())


def _give_back() -> None:
    """Hands free memory back to the system, so that using it again is growth."""
    library: Any = ctypes.CDLL(None)
    trim = getattr(library, "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident() -> float:
    pages = int((_PROCESS / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def _peak() -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text())
    assert found is not None
    return int(found.group(1)) / 2**10
