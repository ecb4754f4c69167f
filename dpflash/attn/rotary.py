"""Rotary positions: the angles by which queries and keys are turned, without parameters.

Source: Su et al., RoFormer (arXiv:2104.09864), section 3.2.2; here coordinate j is paired with
D/2 + j.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dpflash.kernels.capture import is_captured_by_others, kept_in_captures
from dpflash.kernels.rotary import is_traced

_BASE = 10_000.0
# Of a table that is kept. Larger ones cost little beside the attention of so many tokens.
_MOST_ELEMENTS = 1 << 21


class Turns(NamedTuple):
    """The cosine and sine `[T, D / 2]` of each token's and coordinate pair's angle."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Turns:
        """Turns for positions `[T]` and tensors of a dtype; of 16 bits they are float32."""
        # At position 10^6, float32 would be wrong by up to 0.06 rad.
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
        angles = positions.double().unsqueeze(1) * _BASE ** -(exponents / head_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return cls(angles.cos().to(wide), angles.sin().to(wide))

    @classmethod
    def of(cls, x: Tensor, head_dim: int) -> Turns:
        """Turns for the positions 0 to T - 1 of x `[B, H, T, ...]`; made once for each T."""
        tokens = x.shape[2]
        # Selective checkpointing counts operations, in a forward as in its recomputation.
        is_watched = is_traced() or is_captured_by_others(x.device)
        if is_watched or tokens * head_dim > 2 * _MOST_ELEMENTS:
            return cls.at(torch.arange(tokens, device=x.device), head_dim, x.dtype)
        return _of_first(tokens, head_dim, x.device, x.dtype)


@kept_in_captures
@functools.lru_cache(maxsize=4)
def _of_first(tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Turns:
    """Turns for the positions 0 to `tokens` - 1."""
    # Tensors of inference mode could not be saved for a backward later.
    with torch.inference_mode(False), torch.no_grad():
        return Turns.at(torch.arange(tokens, device=device), head_dim, dtype)


def document_positions(cu_seqlens: Sequence[int], device: torch.device) -> Tensor:
    """`[T]`, int64: the position of each token within its document."""
    borders = torch.tensor(cu_seqlens)
    starts = borders[:-1].repeat_interleave(borders.diff())
    return (torch.arange(int(borders[-1])) - starts).to(device)
