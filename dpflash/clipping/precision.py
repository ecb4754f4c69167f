"""Refuses precision settings of torch with which one sample could exceed its bound."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter

import torch
from torch import Tensor, nn

WHY_NO_COARSE_MEAN = (
    "dividing by the batch size would be rounded into every sample's gradient, so that one "
    "sample could change the sum by more than max_grad_norm"
)
INSTEAD_OF_A_MEAN = (
    "declare loss_reduction='sum' and sum the losses, or call engine.backward(losses) with one "
    "loss per sample"
)
OF_16_BIT = (
    "16 bit in batches without public slots or lengths (BatchMemoryManager, batches that are not "
    "the private loader's, a collate_fn that pads to the longest sample): their shape chooses the "
    "kernels, so that one more sample may change the sum by slightly more than max_grad_norm"
)
_COARSE = ("tf32", "bf16")
# Settings below torch.backends, by device type.
_SETTINGS = {"cpu": ("mkldnn.matmul", "mkldnn.conv"), "cuda": ("cuda.matmul", "cudnn.conv")}


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context without autocast: norms and sums in 16 bit would exceed the bound."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def refuse_coarse_mean(found: str | None) -> None:
    """Refuse loss_reduction='mean' if a setting or parameter rounds more than float32 does.

    The mean's factor 1 / B goes through the backward, which then rounds differently for each B. So
    one more sample would change the contribution of every other sample.

    Args:
        found: the setting or parameter that rounds more, for the message; None if there is none.

    Raises:
        ValueError: `found` is not None.
    """
    if found is not None:
        raise ValueError(
            f"loss_reduction='mean' with {found}: {WHY_NO_COARSE_MEAN}; {INSTEAD_OF_A_MEAN}"
        )


def refuse_coarse_products(device_type: str) -> None:
    """Refuse to train on a CPU if torch may multiply float32 with less precision.

    Torch uses less precision if operands exceed some size. One more sample could then change the
    rounding of every sample's gradient and of the sums of clipped gradients.

    Raises:
        ValueError: a setting allows less precision.
    """
    found = coarse_products(device_type) if device_type == "cpu" else None
    if found is not None:
        way_out = "set it to 'ieee'"
        if "matmul" in found:
            way_out = "call torch.set_float32_matmul_precision('highest')"
        raise ValueError(
            f"{found} on a CPU: from some batch size on, torch would round float32 products, so "
            f"that one sample could change the sum by more than max_grad_norm; {way_out}"
        )


def coarse_products(device_type: str, *, convolves: bool = True) -> str | None:
    """Return the setting that lets torch round the operands of float32 products, or None.

    Args:
        device_type: "cpu" or "cuda"; other types have no such setting.
        convolves: whether to include cudnn's convolutions, which round by default.
    """
    for name in _SETTINGS.get(device_type, ()):
        precision = attrgetter(f"{name}.fp32_precision")(torch.backends)
        # Allow "tf32", which scripts for GPUs set, on CPUs that do not have it.
        if device_type == "cpu" and precision == "tf32" and not torch.cpu._is_amx_fp16_supported():
            continue
        if precision in _COARSE and (convolves or name != "cudnn.conv"):
            return f"torch.backends.{name}.fp32_precision={precision!r}"
    return None


def coarse_use(x: Tensor) -> str | None:
    """Return, for a message, why an operation on x rounds more than float32 does, or None."""
    if _is_narrow(x):
        return f"a tensor of {x.dtype}"
    if torch.is_autocast_enabled(x.device.type):
        return f"autocast to {torch.get_autocast_dtype(x.device.type)}"
    return None


def narrow_parameters(model: nn.Module) -> list[str]:
    """Return the names of parameters narrower than float32, including frozen parameters."""
    return [name for name, parameter in model.named_parameters() if _is_narrow(parameter)]


def _is_narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize < 4
