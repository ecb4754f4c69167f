"""Rotary position embeddings: the angles by which queries and keys are rotated.

Source: Su et al., RoFormer (arXiv:2104.09864), section 3.2.2, but coordinate j is paired with
coordinate D/2 + j.
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
# Largest cached table, in elements. Making a larger table takes far less time than attention.
_MOST_ELEMENTS = 1 << 21


class Turns(NamedTuple):
    """Cosine and sine, `[T, D / 2]`, of the angles of each token's pairs of coordinates."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Turns:
        """Return the turns for positions `[T]`, in float32 for 16-bit dtypes, else in `dtype`."""
        # At position 10^6, an angle in float32 would be wrong by up to 0.06 rad.
        exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
        angles = positions.double().unsqueeze(1) * _BASE ** -(exponents / head_dim)
        wide = torch.promote_types(dtype, torch.float32)
        return cls(angles.cos().to(wide), angles.sin().to(wide))

    @classmethod
    def of(cls, x: Tensor, head_dim: int) -> Turns:
        """Return the turns for the positions 0..T - 1 of x `[B, H, T, ...]`, cached by T."""
        tokens = x.shape[2]
        # Do not cache then: selective checkpointing needs the same operations in a recomputation.
        is_watched = is_traced() or is_captured_by_others(x.device)
        if is_watched or tokens * head_dim > 2 * _MOST_ELEMENTS:
            return cls.at(torch.arange(tokens, device=x.device), head_dim, x.dtype)
        return _of_first(tokens, head_dim, x.device, x.dtype)


@kept_in_captures
@functools.lru_cache(maxsize=4)
def _of_first(tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Turns:
    # Tensors made in inference mode could not be saved for a later backward.
    with torch.inference_mode(False), torch.no_grad():
        return Turns.at(torch.arange(tokens, device=device), head_dim, dtype)


def document_positions(cu_seqlens: Sequence[int], device: torch.device) -> Tensor:
    """Return the position of each token within its document, `[T]`, int64."""
    borders = torch.tensor(cu_seqlens)
    starts = borders[:-1].repeat_interleave(borders.diff())
    return (torch.arange(int(borders[-1])) - starts).to(device)
