"""Float8: chooses the linear layers that multiply in float8 with `PerformanceConfig(fp8=True)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from dpflash.kernels import multiplies_float8

from ..distributed.fsdp import is_sharded
from ..grad_rules import rule_for
from ..grad_rules.convert import Layer
from ..grad_rules.linear import PrivateConv1D, PrivateLinear
from .levels import Optimization

# e4m3 products need dimensions that are multiples of 16. Memory traffic limits the products of
# narrow layers, such as adapters, and float8 casts would add to this traffic.
_MULTIPLE, _LEAST = 16, 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NAMED = 3  # largest number of layers that a sentence names


def with_float8(
    optimization: Optimization,
    module: nn.Module,
    layers: Sequence[Layer],
    trained: Sequence[nn.Parameter],
) -> Optimization:
    """Return the optimization with float8 products in the linear layers that support them.

    Raises:
        ValueError: parameters are sharded, no layer supports float8, or the model computes in
            float32 on a GPU, where isolation tests allow float32 rounding but not float8 rounding.
    """
    sharded = next((n for n, p in module.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise ValueError(
            f"fp8=True with parameter '{sharded}' sharded by fully_shard: weights are gathered "
            "for each call, so they would be cast in each call; pass fp8=False, or do not shard"
        )
    device = trained[0].device
    if device.type != "cpu" and not (
        optimization.autocast or all(p.dtype in _DTYPES[1:] for p in trained)
    ):
        raise ValueError(
            f"fp8=True with optimize={optimization.level!r} and float32 on {device}: the tests "
            "that no sample affects others allow only float32 rounding, and float8 rounds more. "
            "Pass optimize='balanced', or a model in bfloat16"
        )
    chosen: list[str] = []
    left_out: dict[str, list[str]] = {}
    for name, why in _linear_layers(module, layers):
        (chosen if why is None else left_out.setdefault(why, [])).append(name)
    if not chosen:
        whys = "; ".join(f"'{names[0]}' {why}" for why, names in left_out.items())
        raise ValueError(
            f"fp8=True: no linear layer of the model can multiply in float8 ({whys or 'none'}); "
            "pass fp8=False"
        )
    sentences = [_NUMERICS.format(layers=_some(chosen)), _MEMORY]
    if not multiplies_float8(device):
        sentences.append(
            f"left out: float8 hardware, since {device} has none. Numbers are rounded to float8 "
            "and multiplied in float32, which is slower than without fp8"
        )
    for why, names in left_out.items():
        sentences.append(f"left out: float8 in {_some(names)}, since it {why}")
    changes = (*optimization.changes, *sentences)
    return replace(optimization, float8=frozenset(chosen), changes=changes)


def _some(names: Sequence[str]) -> str:
    some = ", ".join(f"'{name}'" for name in names[:_NAMED])
    return some + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


_NUMERICS = (
    "numerics: {layers} multiply in float8 (e4m3, about 1 digit), in the forward and "
    "for the gradient of their input. Each token's row and each channel of a weight has its own "
    "scale, so no sample affects the rounding of another. Weight gradients, clipping and noise "
    "are computed without float8. Evaluations of the private model multiply in float8 too; "
    "copies, public_data() and the model after engine.detach do not. If the number of rows of a "
    "batch is not public (BatchMemoryManager, batches from elsewhere), this number may determine "
    "which kernels run, and float8 may enlarge the difference in rounding between kernels"
)
_MEMORY = (
    "memory: 2 bytes per element of these layers' weights, for two float8 copies that are made "
    "once per logical batch; with torch.compile they are made in each call"
)


def _linear_layers(module: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[str, str | None]]:
    """Yield (name of a linear layer, reason why it cannot use float8, or None)."""
    linear = [layer for layer in layers if issubclass(rule_for(layer.module), PrivateLinear)]
    inside = {
        id(child)
        for parent in module.modules()
        if isinstance(parent, nn.MultiheadAttention)
        for child in parent.children()
    }
    owners = Counter(id(p) for m in module.modules() for p in m._parameters.values())
    for layer in linear:
        weight, why = layer.module._parameters["weight"], None
        assert weight is not None
        if layer is linear[-1] or rule_for(layer.module) not in (PrivateLinear, PrivateConv1D):
            why = "is the last linear layer, whose rounding would directly affect the losses"
        elif owners[id(weight)] > 1:
            why = "shares its weight with another layer"
        elif id(layer.module) in inside:
            why = "is part of nn.MultiheadAttention, which computes its own products"
        elif weight.dtype not in _DTYPES:
            why = f"has a weight of {weight.dtype}"
        elif any(size % _MULTIPLE or size < _LEAST for size in weight.shape):
            sizes = " x ".join(map(str, weight.shape))
            why = f"is {sizes}: both sizes have to be multiples of {_MULTIPLE}, at least {_LEAST}"
        yield layer.name, why
