"""Layers with inputs [T, B, ...]: torch's attention, transformer and recurrent layers if
batch_first=False (the default), and the projections of Longformer's attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..clipping.forward import ALL_ROWS
from ..refusal import PrivateRefusal
from .base import ModuleContext, name_of_forward, plain_forward

# Layers inside these modules have inputs in the module's layout, except layers of attention.
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)
# Names of forwards of attention that transposes [B, T, E] before its projections.
_TURNING = (
    "transformers.models.longformer.modeling_longformer.LongformerSelfAttention.forward",
    "transformers.models.led.modeling_led.LEDEncoderSelfAttention.forward",
)
# Forwards that treat each token by itself, in any order of the leading dimensions.
_OF_TOKENS = (nn.Linear.forward, nn.LayerNorm.forward, nn.RMSNorm.forward)


def batch_second(model: nn.Module) -> set[int]:
    """Return the ids of a model's modules whose first input is [T, B, ...].

    These are modules with ``batch_first=False``. Linear layers and norms are included if they are
    inside torch's transformer layers or stacks, or inside attention that transposes its input.
    """
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first:
            found.add(id(module))
        elif _is_batch_second(module) or name_of_forward(module) in _TURNING:
            found |= {id(layer) for layer in _token_layers(module)}
    return found


def _is_batch_second(module: nn.Module) -> bool:
    layer = next(iter(module.layers), module) if isinstance(module, _STACKS) else module
    is_known = isinstance(module, (*_LAYERS, *_STACKS))
    return is_known and not getattr(getattr(layer, "self_attn", None), "batch_first", True)


def _token_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers and norms below a module, except in attention and in stacks."""
    for child in module.children():
        if isinstance(child, nn.MultiheadAttention | nn.ModuleList):
            continue
        if plain_forward(child) in _OF_TOKENS:
            yield child
        yield from _token_layers(child)


def samples_first(context: ModuleContext, x: Tensor) -> Tensor:
    """Transpose x [T, B, ...] to [B, T, ...].

    Raises:
        PrivateRefusal: B differs from the batch size in earlier layers, or from the first
            dimension of every tensor that was passed to the model.
    """
    forward = context.backward.forward
    size, known = x.shape[1], forward.known_batch_size()
    if torch.compiler.is_compiling():
        return x.transpose(0, 1)
    sizes = forward.call_sizes
    if known in (None, size) and (sizes is None or size in sizes):
        return x.transpose(0, 1)
    raise PrivateRefusal(
        f"module '{context.name}' has batch_first=False, so the second dimension of its input "
        "must be the batch. But the size of this dimension is not the batch size of earlier "
        "layers, or no tensor that the model got has a first dimension of this size. Build the "
        "module with batch_first=True. Or put the batch first in the inputs of the model and of "
        f"all other layers, and transpose the inputs of this module. {ALL_ROWS}",
        shape=tuple(x.shape),
        known=known,
    ) from None


class BatchSecond(nn.Module):
    """Mixin for layers with inputs and outputs [T, B, ...]; the layer's rule gets [B, T, ...]."""

    _dpflash: ModuleContext

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled() or input.ndim < 3:
            return super().forward(input)
        return super().forward(samples_first(self._dpflash, input)).transpose(0, 1)
