"""What bounds a call: its work and time beside the measured roofs of the machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dpflash.clipping.device_speed import Ceilings, device_name
from dpflash.clipping.measure_speed import EFFORTS, measure

from .work import Work

# Within this factor of each other the two roofs are as low.
_BALANCED = 1.25
# Below this part of its roof a call is bound by something that no roof stands for.
_FAR_BELOW = 0.5
# From this part of the device's memory on, memory is what keeps a call from being larger.
_FULL = 0.8


def measured_roofs(device: torch.device, *, quick: bool = False) -> Ceilings:
    """FLOP/s and bytes/s of this machine, with the threads that this process has.

    Args:
        device: "cpu" or a GPU.
        quick: 3 trials of each instead of 20.
    """
    effort = EFFORTS[device.type]
    if quick:
        effort = dataclasses.replace(effort, trials=3, warm_up=1, seconds=0.2)
    found = measure(device, effort, lambda line: None)
    return Ceilings(
        found["flops"],
        found["bandwidth"],
        device.type,
        device_name(device),
        f"measured {found['date']}",
    )


def place_under_roofs(
    work: Work, seconds: float, roofs: Ceilings, dtype: str, memory_share: float | None = None
) -> dict[str, Any]:
    """The roofline columns of a row (Williams et al., CACM 52(4), 2009).

    Args:
        work: of one call.
        seconds: that it takes.
        roofs: of the machine.
        dtype: of the products, as in `Ceilings.flops`.
        memory_share: peak memory over the device's, where it is known.

    Returns:
        "gflop_per_s", "gbyte_per_s", "intensity" (FLOPs a byte), "roof" (the lower one, "compute"
        or "memory"), "roof_share" (achieved FLOP/s over what it allows) and "bound":
        "memory_capacity" (four fifths of the memory is taken), else "overhead" (less than half
        of the roof is reached), "balanced" (the roofs are within a quarter of each other), or by
        the lower roof "compute_bound" or "memory_bandwidth".
    """
    compute = work.flops / roofs.rate(dtype)
    memory = work.moved_bytes / roofs.bandwidth
    least = max(compute, memory)
    if memory_share is not None and memory_share >= _FULL:
        bound = "memory_capacity"
    elif least < _FAR_BELOW * seconds:
        bound = "overhead"
    elif max(compute, memory) <= _BALANCED * min(compute, memory):
        bound = "balanced"
    else:
        bound = "compute_bound" if compute > memory else "memory_bandwidth"
    return {
        "gflop_per_s": work.flops / seconds / 1e9,
        "gbyte_per_s": work.moved_bytes / seconds / 1e9,
        "intensity": work.flops / work.moved_bytes if work.moved_bytes else None,
        "roof": "compute" if compute > memory else "memory",
        "roof_share": least / seconds,
        "bound": bound,
    }
