"""One learned number for each attention head."""

import torch
from torch import Tensor, nn


class PerHead(nn.Module):
    """A parameter `[H]`, handed out for each sample so that it has per-sample gradients.

    Args:
        num_heads: H.
        device: where the parameter lies.
        dtype: dtype of the parameter.
    """

    def __init__(
        self,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def forward(self, samples: Tensor) -> Tensor:
        """The numbers, `[B, H]`, for `samples`, any tensor `[B, ...]`."""
        return self.weight.expand(samples.shape[0], -1)
