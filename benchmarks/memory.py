"""Measures the growth of memory during a call."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch

_MIB = 2**20
_PROCESS = Path("/proc/self")


class PeakMemory:
    """Measures the peak growth of memory in a block: ``with PeakMemory() as peak: ...``.

    After the block, `cpu_mb` is the peak growth of this process's resident memory in MiB (None if
    the system does not report it; Linux does), and `gpu_mb` is the peak growth of the memory that
    torch's allocator handed out on the current GPU.
    """

    cpu_mb: float | None = None
    gpu_mb: float | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._held: int | None = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()
        self._before = _begin_resident()
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            found = re.search(r"VmHWM:\s+(\d+) kB", (_PROCESS / "status").read_text())
            assert found is not None
            self.cpu_mb = max(0.0, int(found.group(1)) / 2**10 - self._before)
        if self._held is not None:
            torch.cuda.synchronize()
            self.gpu_mb = (torch.cuda.max_memory_allocated() - self._held) / _MIB


def peak_growth(step: Callable[[], object], device: torch.device) -> float | None:
    """Return the peak growth of memory during a call, in MiB.

    On a GPU, the memory handed out by torch's allocator is measured; on a CPU, the resident memory
    of this process, or None if the system does not report it.
    """
    with PeakMemory() as peak:
        step()
    return peak.gpu_mb if device.type == "cuda" else peak.cpu_mb


def device_memory(device: torch.device) -> float:
    """Return the total memory of the device in MiB."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory) / _MIB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _MIB


def _begin_resident() -> float | None:
    """Reset the peak, and return the resident memory in MiB; None if it is not reported."""
    try:
        # Return free memory to the system, so that using it again counts as growth.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        (_PROCESS / "clear_refs").write_text("5")
        pages = int((_PROCESS / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB
    except OSError:
        return None
