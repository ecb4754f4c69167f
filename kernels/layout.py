"""How results of attention lie in memory."""

from torch import Tensor


def heads_outside(x: Tensor) -> bool:
    """Whether `[B, H, T, D]` lies as such, heads outside of tokens; else tokens lie outside."""
    return x.stride(1) >= x.stride(2)
