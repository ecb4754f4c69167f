"""Counts the work of a call, compares it with the roofline model, and profiles it."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from dpflash.attn.functional import attention
from dpflash.clipping.device_speed import Ceilings, cpu_model
from dpflash.clipping.tape import attention_flops, attention_formulas
from dpflash.kernels import NoiseStream, add_noise_
from dpflash.nn import LongContextLM

from .timing import Effort, Step, Stopwatch, time_steps

_CPU = torch.device("cpu")
_KERNELS = 439  # kernels in a step of a two-block model, counted by `dpflash.clipping.tape`
_LONG_ENOUGH = 0.02  # smallest duration of a timed product, in seconds
# Two roofs within this factor of each other are called balanced.
_BALANCED = 1.25
# A call below this fraction of its roof is bound by overhead, which the roofs do not measure.
_FAR_BELOW = 0.5
# A call that uses at least this fraction of the device's memory is bound by memory capacity.
_FULL = 0.8


class Work(NamedTuple):
    """The FLOP and the moved bytes of a call."""

    flops: float  # FLOP of matrix products and of attention's pairs; other operations count 0
    moved_bytes: float  # bytes of inputs and outputs, summed over torch operations


def count_work(call: Callable[[], object]) -> Work:
    """Make one call, and count its FLOP and moved bytes.

    Attention counts 4 D FLOP per (query, key) pair of its pattern in the forward and 10 D in the
    backward. If values have another head dim E, it counts 2 (D + E) and 6 D + 4 E.
    """
    counter = FlopCounterMode(display=False, custom_mapping=attention_formulas())
    moved = _MovedBytes()
    # Operations inside compiled code are not visible.
    with torch.compiler.set_stance("force_eager"), counter, moved:
        call()
    return Work(float(counter.get_total_flops()), float(moved.total))


class _MovedBytes(TorchDispatchMode):
    """Sums the bytes of inputs and outputs of operations, except views."""

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
    """Measure FLOP/s and bytes/s of the device, with the threads of this process.

    FLOP/s are medians over products of square matrices, bytes/s are medians over copies. "tf32" is
    float32 with TF32 allowed. Dtypes that the device cannot multiply are left out.
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
    """Measure the roofs of this CPU, the rates of attention and noise, and a small kernel's time.

    Each figure is computed from the median time of several calls.
    """
    stopwatch, tokens, heads, width = Stopwatch(_CPU), 1024, 4, 64
    q, k, v = (torch.randn(1, heads, tokens, width, requires_grad=True) for _ in range(3))
    wide, step = torch.randn(2**20, requires_grad=True), itertools.count()
    model, tiny = LongContextLM(16, 8, 2, 1, max_seq_len=4), torch.zeros(1, 4, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    grads = [torch.ones_like(x) for x in (q, wide)]
    noised, square, copied = torch.zeros(2**18), torch.randn(1024, 1024), torch.ones(2**22)

    def draw() -> None:
        address: dict[str, Any] = {"key": bytes(32), "step": next(step), "parameter_id": 0}
        add_noise_([noised], [NoiseStream(std=1.0, grid=2.0**-30, **address)])

    def train() -> None:
        model(tiny, tiny).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    calls: dict[str, tuple[Step, float]] = {
        "float32": (lambda: square @ square, 2.0 * len(square) ** 3),
        "attention": (
            lambda: attention(q, k, v, causal=True).backward(grads[0]),
            attention_flops(
                heads * tokens * (tokens + 1) // 2, width, forward=True, backward=True
            ),
        ),
        "curved": (
            lambda: functional.gelu(wide, approximate="tanh").backward(grads[1]),
            2 * wide.numel(),
        ),
        "noise": (draw, noised.numel()),
        "copy": (lambda: copied.clone(), 2.0 * copied.nbytes),
        "train": (train, _KERNELS),
    }
    steps = {name: call for name, (call, _) in calls.items()}
    found = time_steps(steps, effort=Effort(warm_ups=1, trials=7), stopwatch=stopwatch)
    rates = {name: amount / statistics.median(found[name]) for name, (_, amount) in calls.items()}
    bandwidth, launch = rates.pop("copy"), 1 / rates.pop("train")
    return Ceilings(rates, bandwidth, "cpu", f"CPU {cpu_model()}", "measured", launch)


def place_under_roofs(
    work: Work, seconds: float, roofs: Ceilings, dtype: str, memory_fraction: float | None = None
) -> dict[str, Any]:
    """Return the roofline columns of a row (Williams et al., CACM 52(4), 2009), for one call.

    "roof" is the lower roof, "compute" or "memory"; "roof_fraction" is the achieved rate over the
    rate that the roof allows. "bound" is the first that applies: "memory_capacity" (four fifths of
    the device's memory are used), "overhead" (less than half of the roof is reached), "balanced"
    (the roofs are within a quarter of each other), "compute_bound" or "memory_bandwidth".
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
    """Profile one call, write the trace in Chrome's format to `path`, and return `path`."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        call()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return path
