"""What a call does, which roof of the machine bounds it, and a profile of it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dpflash.attn import attention
from dpflash.clipping.device_speed import Ceilings
from dpflash.clipping.tape import attention_flops, attention_formulas
from dpflash.kernels import NoiseStream, add_noise_

from .timing import Effort, Stopwatch, time_steps

_CPU = torch.device("cpu")
_LONG_ENOUGH = 0.02  # seconds of the product that is timed
# Two roofs within this factor of each other are called balanced.
_BALANCED = 1.25
# A call below this fraction of its roof is bound by overhead, for which no roof stands.
_FAR_BELOW = 0.5
# From this fraction of the device's memory on, memory is what keeps a call from being larger.
_FULL = 0.8


class Work(NamedTuple):
    """What a call does."""

    flops: float  # of matrix products and of attention's pairs; additions are left out
    moved_bytes: float  # inputs and outputs of each torch operation, once


def count_work(call: Callable[[], object]) -> Work:
    """Makes one call and counts its work.

    Attention counts the pairs that its pattern has: 4 D each forward and 10 D backward, or with
    values of another head dim E 2 (D + E) and 6 D + 4 E.
    """
    counter = FlopCounterMode(display=False, custom_mapping=attention_formulas())
    moved = _MovedBytes()
    # What is compiled shows no operations.
    with torch.compiler.set_stance("force_eager"), counter, moved:
        call()
    return Work(float(counter.get_total_flops()), float(moved.total))


class _MovedBytes(TorchDispatchMode):
    """Sums the bytes of inputs and outputs of operations, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if not _is_view(func):
            for value in tree_leaves((args, kwargs, given)):
                if isinstance(value, Tensor):
                    self.total += value.numel() * value.element_size()
        return given


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    aliased = [r.alias_info for r in returns if r.alias_info is not None]
    return bool(aliased) and not any(info.is_write for info in aliased)


def measured_roofs(device: torch.device, *, quick: bool = False) -> Ceilings:
    """FLOP/s and bytes/s of the device, measured with the threads of this process.

    They are those of the median copy and of the median product of square matrices. "tf32" is
    float32 with TF32 allowed; dtypes that the device cannot multiply are left out.
    """
    is_cuda, trials = device.type == "cuda", 3 if quick else 20
    largest, elements = (8192, 2**28) if is_cuda else (4096, 2**26)
    stopwatch = Stopwatch(device)

    def median(call: Callable[[], object], trials: int) -> float:
        effort = Effort(warm_ups=1, trials=trials)
        return statistics.median(time_steps({"": call}, effort=effort, stopwatch=stopwatch)[""])

    def rate(dtype: torch.dtype) -> float:
        size, seconds = 128, 0.0
        while seconds < _LONG_ENOUGH and size < largest:
            size *= 2
            left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            product = functools.partial(torch.mm, left, right)
            seconds = median(product, 1)
        return 2 * size**3 / median(product, trials)

    source = torch.ones(elements, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    flops, before = {}, torch.get_float32_matmul_precision()
    for name in ("float32", *["tf32"] * is_cuda, "bfloat16", "float16"):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        try:
            flops[name] = rate(torch.float32 if name == "tf32" else getattr(torch, name))
        except RuntimeError:
            continue
        finally:
            torch.set_float32_matmul_precision(before)
    bandwidth = 2 * 4 * elements / median(copy, trials)
    return Ceilings(flops, bandwidth, device.type, source="measured")


def measured_ceilings() -> Ceilings:
    """The roofs of this CPU, and what attention, noise and small operations reach on it."""
    roofs, stopwatch = measured_roofs(torch.device("cpu"), quick=True), Stopwatch(_CPU)
    q, k, v = (torch.randn(1, 4, 1024, 64, requires_grad=True) for _ in range(3))
    out, little, one = torch.zeros(2**18), torch.zeros(8), [0]

    def attend() -> None:
        attention(q, k, v, causal=True).sum().backward()

    def draw() -> None:
        one[0] += 1
        add_noise_([out], [NoiseStream(1.0, 2.0**-30, bytes(32), one[0], 0)])

    def small() -> None:
        for _ in range(1000):
            little.add(1.0)

    effort = Effort(warm_ups=1, trials=5)
    found = time_steps(
        {"attend": attend, "draw": draw, "small": small}, effort=effort, stopwatch=stopwatch
    )
    attending, drawing, many = (statistics.median(x) for x in found.values())
    pairs = 4 * 1024 * 1025 // 2
    rates = {
        "attention": attention_flops(pairs, 64, forward=True, backward=True) / attending,
        "noise": out.numel() / drawing,
    }
    return replace(roofs, flops={**roofs.flops, **rates}, launch=many / 1000)


def place_under_roofs(
    work: Work, seconds: float, roofs: Ceilings, dtype: str, memory_fraction: float | None = None
) -> dict[str, Any]:
    """The roofline columns of a row (Williams et al., CACM 52(4), 2009), of one call's work.

    "roof" is the lower one, "compute" or "memory", "roof_fraction" the achieved FLOP/s over what
    it allows, and "bound" is "memory_capacity" (four fifths of the device's memory are taken),
    else "overhead" (less than half of the roof is reached), "balanced" (the roofs are within a
    quarter of each other), or by the lower roof "compute_bound" or "memory_bandwidth".
    """
    compute = work.flops / roofs.rate(dtype)
    memory = work.moved_bytes / roofs.bandwidth
    least = max(compute, memory)
    if memory_fraction is not None and memory_fraction >= _FULL:
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
        "roof_fraction": least / seconds,
        "bound": bound,
    }


def trace_call(call: Callable[[], object], path: Path) -> Path:
    """Profiles one call and writes the trace, in Chrome's format, to a path, which it returns."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        call()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return path
