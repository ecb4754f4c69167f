"""Merging attention over some keys with attention over others, by their log-sum-exp.

Letters: B samples, H query heads, T query tokens, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Takes the result over further keys into o and lse, in place.

    ``lse' = log(e^lse + e^lse_new)`` and ``o' = e^(lse - lse') o + e^(lse_new - lse') o_new``. A
    query without key has o = 0 and lse = -inf, on either side.

    Args:
        o: `[B, H, T, D]`, float32 or float64; may be a view.
        lse: `[B, H, T]`, of the same dtype; may be a view.
        o_new: `[B, H, T, D]`, over keys that o has not seen.
        lse_new: `[B, H, T]`.
    """
    total = torch.logaddexp(lse, lse_new)
    pivot = total.masked_fill(total == -math.inf, 0.0)
    o.mul_((lse - pivot).exp().unsqueeze(3))
    o.addcmul_(o_new, (lse_new - pivot).exp().unsqueeze(3))
    lse.copy_(total)
