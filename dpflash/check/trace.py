"""Finds the first module whose output for a sample depends on other samples."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..verification.nested import tensors_of
from .batch import Place
from .report import ITSELF, LOSS_FN
from .subject import Subject


class _Call(NamedTuple):
    """One call of a module: the rows of its inputs and outputs that belong to one sample."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def locate(subject: Subject, one: Place, two: Place) -> str:
    """Return the first module whose outputs for a sample differ in two batches at equal inputs."""
    try:
        calls, other_calls = _trace(subject, one), _trace(subject, two)
    except Exception:
        return LOSS_FN
    for a, b in zip(calls, other_calls, strict=False):
        if a.name != b.name:
            break
        if subject.agree(a.inputs, b.inputs) and not subject.agree(a.outputs, b.outputs):
            return a.name or ITSELF
    return LOSS_FN


def coupling_problem(subject: Subject, where: str, message: str) -> tuple[str, str]:
    """Return (message, remedy) for a module that `locate` returned."""
    module = subject.model.get_submodule("" if where == ITSELF else where)
    message = (
        "the first module whose output for a sample depends on other samples "
        f"({type(module).__name__}): {message}"
    )
    return message, _remedy(module)


def _trace(subject: Subject, place: Place) -> list[_Call]:
    calls: list[_Call] = []
    pending: list[list[Tensor]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        pending.append(_rows_of((args, kwargs), place, module))

    hooks = []
    for name, module in subject.model.named_modules():

        def after(module: nn.Module, _: Any, __: Any, out: Any, name: str = name) -> None:
            calls.append(_Call(name, pending.pop(), _rows_of(out, place, module)))

        hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        subject.losses(place.batch)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _rows_of(value: Any, place: Place, module: nn.Module) -> list[Tensor]:
    """Return the sample's rows of each tensor, or the whole tensor if its rows are unknown."""
    rows: list[Tensor] = []
    for _, t in tensors_of(value):
        if t.ndim == 0:
            continue
        first = t.shape[0] and t.shape[0] % place.size == 0  # [B, ...] or [B * T, ...]
        if isinstance(module, nn.RNNBase) and t.ndim == 3 and (rows or not module.batch_first):
            first = False  # states [layers, B, H], or a sequence [T, B, E]
        if first:
            t = t.unflatten(0, (place.size, -1))[place.index]
        elif t.ndim > 1 and t.shape[1] == place.size:
            t = t[:, place.index]
        rows.append(t.detach().flatten().clone())
    return rows


def _remedy(module: nn.Module) -> str:
    kind = type(module).__name__.lower()
    if isinstance(module, _BatchNorm) or "norm" in kind:
        return "replace it by nn.GroupNorm or nn.LayerNorm, whose statistics are per sample"
    if "quant" in kind or "fp8" in kind or "float8" in kind:
        return "compute its scale per sample: amax over all dimensions but the first"
    if "moe" in kind or "rout" in kind or "expert" in kind:
        return "route each sample separately, without a capacity that the batch shares"
    if "attention" in kind:
        return (
            "choose keys for each sample, like dpflash.patterns.Adaptive, and not by a mean over "
            "the batch"
        )
    return "make it per sample: reduce over dimensions 1 and up, never over the first"
