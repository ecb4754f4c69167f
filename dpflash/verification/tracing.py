"""Refuses to record a private layer in a program: torch.export, TorchScript, fx, ONNX."""

from __future__ import annotations

from typing import NoReturn

import torch

_OR_LATER = ", or trace in torch.no_grad()"


def refuse_tracing(layer: str) -> None:
    """Refuse to call a private layer with gradients while torch records the call.

    Raises:
        RuntimeError: torch records the call; the message names the layer.
    """
    if torch.compiler.is_compiling():
        if torch.compiler.is_exporting():
            refuse_recording(layer, "torch.export or torch.onnx.export")
    elif torch.jit.is_tracing():
        refuse_recording(layer, "torch.jit.trace or torch.onnx.export(dynamo=False)")
    elif torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        refuse_recording(layer, "torch.fx")


def refuse_recording(layer: str, found: str, also: str = _OR_LATER) -> NoReturn:
    """Raise an error: the recorder `found` would record a private layer."""
    raise RuntimeError(
        f"module '{layer}' is private, and {found} would record how it computes per-sample "
        "gradients. Call engine.detach(model) first, or use a plain copy, copy.deepcopy(model)"
        f"{also}"
    )
