"""The devices that the kernels run on."""

from __future__ import annotations

import torch

# Triton's README names this as the oldest supported compute capability. Compiled for older GPUs,
# 16-bit tiles spill kilobytes (7.0, 7.5: no tensor cores), and noise does not compile (6.1).
_OLDEST_CAPABILITY = (8, 0)
_CPU = "train on the CPU, as after module.to('cpu')"


def problem_with(device: torch.device) -> str | None:
    """Return why a device is not supported and what to use instead, or None if it is."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return (
            f"device {device}: dpflash has kernels for CPUs and for GPUs of CUDA and ROCm; use "
            f"such a GPU, or {_CPU}"
        )
    if torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= _OLDEST_CAPABILITY:
        return None
    return (
        f"device {device}: {torch.cuda.get_device_name(device)} has compute capability "
        f"{'.'.join(map(str, capability))}, and Triton and bfloat16 need 8.0; use a GPU that has "
        f"it (A100, RTX 30 and later ones), or {_CPU}"
    )
