"""The audited run on layers with weights and biases: a linear layer and a layer norm.

Canary i's loss is a multiple of the sum of output i of the linear layer and output i of the norm.
So the canary's gradient has one nonzero element in each of four parameters, equal in size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .releases import Run


class LayersCanaryModel(nn.Module):
    """Computes losses [B] of canaries; each canary has one element in each of four parameters."""

    def __init__(self, canaries: int, *, scale: float):
        super().__init__()
        self.layer, self.norm = nn.Linear(1, canaries), nn.LayerNorm(canaries, eps=0.0)
        self.background = None
        self.canaries, self.scale = canaries, scale

    def forward(self, numbers: Tensor, weights: Tensor) -> Tensor:
        """Return losses [B] of canaries `numbers` [B], multiplied by `weights` [B]."""
        # Alternating signs, +1 at the canary: with mean 0 and variance 1 the norm keeps them.
        elements = torch.arange(self.canaries, device=numbers.device)
        signs = (1 - 2 * ((elements - numbers[:, None]) % 2)).to(weights.dtype)
        outputs = self.layer(weights.new_ones(len(numbers), 1)) + self.norm(signs)
        return outputs.gather(1, numbers[:, None])[:, 0] * (self.scale * weights)


class LayersRun(Run):
    """A run of this model, with the arguments and attributes of `Run`."""

    _model_type = LayersCanaryModel
