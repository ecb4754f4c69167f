"""The environment of a measurement: device, versions, commit, threads, date."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from dpflash import __version__
from dpflash.clipping.device_speed import cpu_model, usable_cores
from dpflash.kernels import native


def environment(device: str, threads: int) -> dict[str, Any]:
    """Return the environment for a result's JSON; `threads` is the number per process."""
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU {cpu_model()}",
        "device_count": torch.cuda.device_count() if device == "cuda" else 1,
        "cores": usable_cores(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "threads": threads,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "attention_on_cpu": native.describe(),
        "dpflash": __version__,
        "commit": commit(),
    }


def commit(folder: Path | None = None) -> str | None:
    """Return the commit of `folder` or this package, with "-dirty" if files differ; else None."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    folder = (folder or Path(__file__).parent).resolve()
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # An installed package may lie in another project's checkout, whose commit is meaningless.
    if done.returncode != 0 or "site-packages" in folder.parts:
        return None
    return done.stdout.strip() or None
