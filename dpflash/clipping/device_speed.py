"""Speed of a device: peak FLOP/s of matrix products by dtype, memory bandwidth, launch time.

The planner uses these figures. Figures of GPUs come from data sheets; those of CPUs are nominal.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Ceilings:
    """Peak speed of one device.

    Attributes:
        flops: FLOP/s of matrix products by dtype ("float32", "bfloat16", ...). "tf32" is float32
            with operands rounded to TF32; "attention" is for attention's kernels. "noise" (adding
            noise) and "curved" (functions with an exponential) are in elements/s. "float32" is
            required; a missing key has the rate of float32.
        bandwidth: bytes/s of memory, reads and writes together.
        device: torch's device type, which determines the kernels that run.
        name: name of the device.
        source: the source of the figures, for tables.
        launch: seconds that launching a kernel takes.
    """

    flops: Mapping[str, float]
    bandwidth: float
    device: str = "cpu"
    name: str = "unknown"
    source: str = "given"
    launch: float = 0.0

    def rate(self, dtype: str) -> float:
        """Return FLOP/s of products in a dtype; "tf32x3" is float32 by three TF32 products."""
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype == "tf32x3" and "tf32" in self.flops:
            return self.flops["tf32"] / 3
        return self.flops["float32"] / (2 if dtype == "float64" else 1)

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"


# Nominal speed of one core of a server with vector instructions. Only ratios matter.
CPU_RULE = Ceilings({"float32": 1.5e11}, 2.0e10, launch=3e-6, name="CPU", source="nominal")
_GPU_LAUNCH = 5e-6

# FLOP/s of dense products (data sheets print twice that, for sparse operands); bytes/s of memory.
# Source: NVIDIA's data sheets "H200 Tensor Core GPU" (2024), "H100 Tensor Core GPU" (2023),
# "A100 Tensor Core GPU" (2021) and "A10 Tensor Core GPU" (2021).
_DATA_SHEETS = (
    ("H200", (3.4e13, 6.7e13, 4.947e14, 9.894e14), 4.8e12),
    ("H100 PCIe", (2.6e13, 5.1e13, 3.78e14, 7.565e14), 2.0e12),
    ("H100 NVL", (3.0e13, 6.0e13, 4.175e14, 8.355e14), 3.9e12),
    ("H100", (3.4e13, 6.7e13, 4.947e14, 9.894e14), 3.35e12),
    ("A100-SXM4-80GB", (9.7e12, 1.95e13, 1.56e14, 3.12e14), 2.039e12),
    ("A100 80GB PCIe", (9.7e12, 1.95e13, 1.56e14, 3.12e14), 1.935e12),
    ("A100", (9.7e12, 1.95e13, 1.56e14, 3.12e14), 1.555e12),
)
# Ratio of an H100's measured speed to the data sheet's (benchmarks/results/h100/gpu-time.json):
# "ceilings" (product of 8192 x 8192, copy), "attention" (causal, T = 16,384, D = 128).
_REACHED = {"flops": 7.886e14 / 9.894e14, "bandwidth": 2.972e12 / 3.35e12}
_ATTENTION = 3.154e14 / 9.894e14
# Speed assumed for other GPUs: that of the smallest data-centre GPU with all of these dtypes.
_CONSERVATIVE = ("A10", (4.88e11, 3.12e13, 6.25e13, 1.25e14), 6.0e11)


def cpu_model() -> str:
    """Return the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ceilings_for(device: torch.device) -> Ceilings:
    """Return the speed of a device, which is found by its name."""
    if device.type == "cpu":
        return CPU_RULE
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    row = next((row for row in _DATA_SHEETS if row[0] in name), _CONSERVATIVE)
    sheet, (double, single, tf32, half), bandwidth = row
    flops = {"float64": double, "float32": single, "bfloat16": half, "float16": half}
    if torch.version.hip is None:
        flops["tf32"] = tf32
    source = f"{sheet} data sheet"
    return Ceilings(flops, bandwidth, device.type, name, source, launch=_GPU_LAUNCH)


def reached_ceilings(name: str) -> Ceilings:
    """Return the speed that steps reach: measured for "h100", derived from it for "a100"."""
    sheet = {"h100": "H100", "a100": "A100-SXM4-80GB"}[name]
    _, (_, single, tf32, half), bandwidth = next(row for row in _DATA_SHEETS if row[0] == sheet)
    part = _REACHED["flops"]
    flops = {"float32": part * single, "tf32": part * tf32}
    flops |= dict.fromkeys(("bfloat16", "float16"), part * half) | {"attention": _ATTENTION * half}
    source = (
        "measured" if name == "h100" else "a model: its data sheet, as an H100 reached its own"
    )
    speed = _REACHED["bandwidth"] * bandwidth
    return Ceilings(flops, speed, "cuda", f"NVIDIA {sheet}", source, launch=_GPU_LAUNCH)
