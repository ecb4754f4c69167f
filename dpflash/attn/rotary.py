"""Rotary positions: the angles by which queries and keys are turned, without parameters.

Source: Su et al., RoFormer (arXiv:2104.09864), section 3.2.2; here coordinate j is paired with
D/2 + j.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpflash.kernels.rotary import is_traced

_BASE = 10_000.0
# How many tables are kept, and the elements of one at most. Larger ones cost little beside the
# attention of so many tokens.
_MOST_KEPT, _MOST_ELEMENTS = 4, 1 << 21
_kept: dict[tuple[int, int, torch.device, torch.dtype], Turns] = {}


class Turns(NamedTuple):
    """The cosine and sine `[T, D / 2]` of each token's and coordinate pair's angle."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Turns:
        """Of positions `[T]`, for tensors of a dtype; 16-bit ones are turned in float32."""
        # At position 10^6, float32 would be wrong by up to 0.06 rad.
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
        angles = positions.double().unsqueeze(1) * _BASE ** -(exponents / head_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return cls(angles.cos().to(wide), angles.sin().to(wide))

    @classmethod
    def of(cls, x: Tensor, head_dim: int) -> Turns:
        """Of the positions 0 to T - 1 of x `[B, H, T, ...]`; made once for each T."""
        tokens = x.shape[2]
        # Selective checkpointing counts operations, in a forward as in its recomputation.
        is_watched = is_traced() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
        if is_watched or tokens * head_dim > 2 * _MOST_ELEMENTS:
            return cls.at(torch.arange(tokens, device=x.device), head_dim, x.dtype)
        key = (tokens, head_dim, x.device, x.dtype)
        if (known := _kept.get(key)) is None:
            # Tensors of inference mode could not be saved for a backward later.
            with torch.inference_mode(False), torch.no_grad():
                known = cls.at(torch.arange(tokens, device=x.device), head_dim, x.dtype)
            while len(_kept) >= _MOST_KEPT:
                _kept.pop(next(iter(_kept)), None)
            _kept[key] = known
        return known


def document_positions(cu_seqlens: Sequence[int], device: torch.device) -> Tensor:
    """`[T]`, int64: the position of each token within its document."""
    borders = torch.tensor(cu_seqlens)
    starts = borders[:-1].repeat_interleave(borders.diff())
    return (torch.arange(int(borders[-1])) - starts).to(device)
