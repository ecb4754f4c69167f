"""Speed of a device: peak FLOP/s of matrix products by dtype, and memory bandwidth.

`dpflash doctor --measure` writes measured figures to a file in the user's cache folder. Without
that file a GPU has the figures of its data sheet, and a CPU has nominal ones. The planner chooses
by them; they never depend on private data.
"""

from __future__ import annotations

import functools
import json
import math
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


@dataclass(frozen=True)
class Ceilings:
    """Peak speed of one device.

    Attributes:
        flops: FLOP/s of products by dtype ("float32", "bfloat16", ...); "tf32" is float32 with
            operands rounded to TF32. "float32" is always there.
        bandwidth: bytes/s of memory, reads and writes together.
        device: torch's device type, which decides what kernels run.
        name: of the device.
        source: where the figures come from, for tables.
    """

    flops: Mapping[str, float]
    bandwidth: float
    device: str = "cpu"
    name: str = "unknown"
    source: str = "given"

    def rate(self, dtype: str) -> float:
        """FLOP/s of products in a dtype; "tf32x3" is float32 by three TF32 products."""
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype == "tf32x3" and "tf32" in self.flops:
            return self.flops["tf32"] / 3
        return self.flops["float32"] / (2 if dtype == "float64" else 1)

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"


# Only ratios matter. These are of one core of a server, with its vector units and memory.
CPU_RULE = Ceilings(
    flops={"float32": 1.5e11}, bandwidth=2.0e10, name="CPU", source="nominal, not measured"
)

# Dense products (the sheets print those of sparse operands, twice as many); bytes/s of memory.
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
# For a GPU that no row fits: the smallest data-centre GPU that has all of these dtypes.
_CONSERVATIVE = ("A10", (4.88e11, 3.12e13, 6.25e13, 1.25e14), 6.0e11)


def cache_path() -> Path:
    """The file of measured ceilings: dpflash/ceilings.json in the user's cache folder."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        folder = Path(os.path.expanduser("~/.cache"))
    return folder / "dpflash" / "ceilings.json"


def cpu_model() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def device_name(device: torch.device) -> str:
    """The key of a device in the file; a CPU's figures are for a number of threads."""
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type


@functools.cache
def ceilings_for(device: torch.device) -> Ceilings:
    """The ceilings of a device: measured, else of its data sheet, else nominal.

    The file is read once in a process, so that a run keeps its choices. A file that cannot be
    used is ignored with a warning that names it.
    """
    name = device_name(device)
    held = _read(cache_path()).get(name)
    if held is not None:
        source = f"measured {held['date']}"
        return Ceilings(held["flops"], held["bandwidth"], device.type, name, source)
    if device.type == "cpu":
        return CPU_RULE
    row = next((row for row in _DATA_SHEETS if row[0] in name), _CONSERVATIVE)
    sheet, (double, single, tf32, half), bandwidth = row
    flops = {"float64": double, "float32": single, "bfloat16": half, "float16": half}
    if torch.version.hip is None:
        flops["tf32"] = tf32
    source = f"not measured; {sheet} data sheet"
    return Ceilings(flops, bandwidth, device.type, name, source)


def save_measured(entries: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write measured figures to the file; entries of other devices stay.

    Args:
        entries: for each device "flops" (by dtype) and "bandwidth" as in `Ceilings`, "date", and
            any further figures.

    Returns:
        The file.

    Raises:
        OSError: it cannot be written.
    """
    path = cache_path()
    held = {"format": FORMAT, "devices": {**_read(path), **entries}}
    # The compiled kernels lie in the same folder, which nobody else may be able to write.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")
    forget()
    return path


def forget() -> None:
    """Read the file again at the next use."""
    _read.cache_clear()
    ceilings_for.cache_clear()


@functools.cache
def _read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of the file by device name; none where it is missing or unusable."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(held, dict) or held.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        devices = held.get("devices")
        if not isinstance(devices, dict):
            raise ValueError("it has no devices")
        for name, entry in devices.items():
            _check(name, entry)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError, OverflowError) as error:
        warnings.warn(
            f"measured ceilings in {path} are ignored ({error}); delete the file, or let "
            "`dpflash doctor --measure` write it again",
            stacklevel=3,
        )
        return {}
    return devices


def _check(name: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not isinstance(entry.get("flops"), dict):
        raise ValueError(f"entry {name!r} has no flops")
    if "float32" not in entry["flops"] or not isinstance(entry.get("date"), str):
        raise ValueError(f"entry {name!r} lacks its float32 figure or its date")
    for figure in (entry.get("bandwidth"), *entry["flops"].values()):
        number = isinstance(figure, int | float) and not isinstance(figure, bool)
        if not number or not math.isfinite(figure) or figure <= 0:
            raise ValueError(f"entry {name!r} has the figure {figure!r}, which is none above 0")
