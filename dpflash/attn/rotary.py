"""Rotary positions: queries and keys turned by their position, without parameters.

Source: Su et al., RoFormer (arXiv:2104.09864), section 3.2.2; here coordinate j is paired with
D/2 + j.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_BASE = 10_000.0


def rotary_angles(positions: Tensor, head_dim: int) -> Tensor:
    """`[T, D / 2]`, float64: the angle of each of positions `[T]` and coordinate pair.

    At position 10^6, float32 would be wrong by up to 0.06 rad.
    """
    device = positions.device
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    return positions.double().unsqueeze(1) * _BASE**-exponents


def document_positions(cu_seqlens: Sequence[int], device: torch.device) -> Tensor:
    """`[T]`, int64: the position of each token within its document."""
    borders = torch.tensor(cu_seqlens)
    starts = borders[:-1].repeat_interleave(borders.diff())
    return (torch.arange(int(borders[-1])) - starts).to(device)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns coordinate pairs of x `[B, H, T, D]` by their angles `[T, D / 2]`, in its dtype."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = x.to(dtype).chunk(2, dim=3)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=3).to(x.dtype)


def rotate_(x: Tensor, angles: Tensor) -> Tensor:
    """`rotate` in place, with less memory traffic; x may be a view."""
    if x.dtype not in (torch.float32, torch.float64):
        return x.copy_(rotate(x, angles))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=3)
    turned = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(turned)
    return x
