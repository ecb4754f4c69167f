"""Measures a device: memory bandwidth, FLOP/s of products by dtype, and noise throughput."""

from __future__ import annotations

import datetime
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpflash.kernels import gaussian_noise_

_FIRST_MATRIX = 256
_LEAST_TRIALS = 3


@dataclass(frozen=True)
class Effort:
    """Size and length of a measurement.

    Attributes:
        copied_bytes: size of the tensor that is copied; several times the last-level cache.
        largest_matrix: most rows of the square matrices.
        product_seconds: matrices grow until their product takes this long.
        noised_elements: fp32 elements that get noise.
        trials, warm_up: timed runs, and untimed runs before them.
        seconds: time limit of a figure, which has at least 3 trials.
    """

    copied_bytes: int
    largest_matrix: int
    product_seconds: float
    noised_elements: int
    trials: int = 20
    warm_up: int = 3
    seconds: float = 2.0


EFFORTS = {
    "cpu": Effort(
        copied_bytes=1 << 28,
        largest_matrix=4096,
        product_seconds=0.02,
        noised_elements=1 << 22,
    ),
    "cuda": Effort(
        copied_bytes=1 << 30,
        largest_matrix=8192,
        product_seconds=0.02,
        noised_elements=1 << 28,
    ),
}


def measure(
    device: torch.device, effort: Effort, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Measure one device.

    Args:
        device: "cpu", or a CUDA or ROCm device.
        effort: how large and how often.
        progress: gets a line for each figure.

    Returns:
        "flops" (FLOP/s by dtype; "tf32" is float32 with TF32 allowed), "bandwidth" (bytes/s of a
        copy, read and written bytes together), "noise" (bytes/s of fp32 elements noised with
        ChaCha20; None where there is no such path), "spread" (interquartile range over median of
        each figure's times), "date" and "versions". Figures are those of the median time; dtypes
        that the device cannot multiply are left out.
    """
    spread: dict[str, float] = {}

    def figure(name: str, unit: str, amount: float, run: Callable[[], object]) -> float:
        seconds = _times(run, device, effort)
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        spread[name] = (high - low) / median
        progress(
            f"{device}  {name:<9} {amount / median / 1e9:10,.1f} G{unit}  "
            f"(median of {len(seconds)}, spread {spread[name]:.0%})"
        )
        return amount / median

    bandwidth = figure("copy", "B/s", 2 * effort.copied_bytes, _copy(device, effort))
    flops = {}
    for name, dtype, allow_tf32 in _products(device):
        with _float32_products(allow_tf32):
            matrices = _matrices(dtype, device, effort)
            if matrices is not None:
                left, right, out = matrices
                work = 2 * left.shape[0] ** 3
                multiply = _multiply(left, right, out)
                flops[name] = figure(name, "FLOP/s", work, multiply)
    noised = torch.zeros(effort.noised_elements, device=device)
    add_noise = _add_noise(noised)
    noise = None
    if add_noise is not None:
        noise = figure("noise", "B/s", 4 * effort.noised_elements, add_noise)
    return {
        "flops": flops,
        "bandwidth": bandwidth,
        "noise": noise,
        "spread": spread,
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }


def _copy(device: torch.device, effort: Effort) -> Callable[[], Tensor]:
    source = torch.ones(effort.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _products(device: torch.device) -> Iterator[tuple[str, torch.dtype, bool]]:
    """(name, dtype, whether TF32 is allowed)."""
    yield "float32", torch.float32, False
    if device.type == "cuda" and torch.version.hip is None:
        yield "tf32", torch.float32, True
    yield "bfloat16", torch.bfloat16, False
    yield "float16", torch.float16, False


@contextmanager
def _float32_products(allow_tf32: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allow_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _matrices(
    dtype: torch.dtype, device: torch.device, effort: Effort
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Square matrices that take long enough to multiply; None where the device cannot."""
    size = min(_FIRST_MATRIX, effort.largest_matrix)
    while True:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        multiply = _multiply(left, right, out)
        try:
            multiply()
        except RuntimeError:
            return None
        seconds = min(_clocked(multiply, device) for _ in range(_LEAST_TRIALS))
        if seconds >= effort.product_seconds or 2 * size > effort.largest_matrix:
            return left, right, out
        size *= 2


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.mm(left, right, out=out)


def _add_noise(out: Tensor) -> Callable[[], Tensor] | None:
    """Adds ChaCha20 noise to a tensor; None where this machine has no such kernel."""

    def add_noise() -> Tensor:
        # Nothing is released here, so any key will do.
        return gaussian_noise_(out, std=1.0, grid=2.0**-30, key=bytes(32), step=0, parameter_id=0)

    try:
        from cryptography.exceptions import UnsupportedAlgorithm

        add_noise()
    except ImportError:
        return None
    except UnsupportedAlgorithm:
        return None
    return add_noise


def _times(run: Callable[[], object], device: torch.device, effort: Effort) -> list[float]:
    """Seconds of each trial."""
    for _ in range(effort.warm_up):
        run()
    found: list[float] = []
    while len(found) < effort.trials:
        if len(found) >= _LEAST_TRIALS and sum(found) > effort.seconds:
            break
        found.append(_clocked(run, device))
    return found


def _clocked(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, on the device's own clock where it has one."""
    if device.type != "cuda":
        # CPU time of one thread, which other jobs on the machine disturb less.
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        run()
        return clock() - start
    with torch.cuda.device(device):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run()
        after.record()
        after.synchronize()
    return before.elapsed_time(after) / 1e3
