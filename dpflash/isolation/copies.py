"""Copies of batches and of arguments, which models and loops may change in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..verification.nested import map_leaves

# Offsets that are equal modulo this number of elements have the same alignment.
_ALIGNED = 64


def copied(batch: Any) -> Any:
    """Return a copy of a batch with copies of its tensors and arrays."""

    def own(x: Tensor | np.ndarray) -> Tensor | np.ndarray:
        return with_layout_of(x, x) if isinstance(x, Tensor) else x.copy()

    return map_leaves(own, batch, kinds=(Tensor, np.ndarray))


def with_layout_of(t: Tensor, values: Tensor) -> Tensor:
    """Copy values with the strides and alignment of t, since these determine the kernels."""
    values = values.detach()
    if t.layout != torch.strided or t.is_nested:
        return values.clone().requires_grad_(t.requires_grad)
    offset = t.storage_offset() % _ALIGNED
    extent = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1
    flat = t.new_empty(offset + (extent if t.numel() else 0))
    copy = flat.as_strided(t.shape, t.stride(), offset)
    # An expanded tensor stores several entries at one address.
    single = [slice(1) if s == 0 else slice(None) for s in t.stride()]
    copy[tuple(single)].copy_(values[tuple(single)])
    # Detach: if the copy were a view, `_base` of its views would not be the copy.
    return copy.detach().requires_grad_(t.requires_grad)
