"""Prints what of the software and of the machine a GPU's figures depend on, as JSON."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

import dpflash  # that it can be imported is part of the answer


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


found = {
    "dpflash": dpflash.__version__,
    "python": platform.python_version(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    **{name: installed(name) for name in ("triton", "pytest", "cryptography", "opacus")},
    **{name: shutil.which(name) for name in ("c++", "nvcc", "compute-sanitizer", "ncu")},
    "flash_attn": importlib.util.find_spec("flash_attn") is not None,
}
print(json.dumps(found, indent=1))
raise SystemExit(0 if found["device"] or "cpu" in sys.argv else "no GPU")
