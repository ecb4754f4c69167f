"""Collects the tensors of a batch, and converts its arrays and lists of numbers to tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..verification.nested import parts_within

_DEPTH = 8  # objects may hold each other
_WIDE = {torch.float64: torch.float32, torch.int32: torch.int64, torch.int16: torch.int64}


def batch_tensors(batch: Any, size: int) -> list[Tensor]:
    """Return the tensors of a batch, and its arrays and lists of numbers as tensors.

    A list with one tensor for each sample is also returned as one stacked tensor, padded with
    zeros. A list is not stacked if each of its tensors has one row per sample.

    Args:
        batch: the batch, arbitrarily nested.
        size: the number of rows of the batch.
    """
    leaves = list(_leaves(batch))
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for x in leaves:
        if x.ndim and not x.is_nested and x.layout == torch.strided:
            groups[x.dtype, x.device, x.shape[1:]].append(x.detach())
    of_samples = [own for own in groups.values() if len(own) >= max(size, 2)]
    of_samples = [own for own in of_samples if any(len(x) != size for x in own)]
    return leaves + [pad_sequence(own, True) for own in of_samples]


def _leaves(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biuf" and value.dtype.isnative:
            yield from _widened(torch.as_tensor(np.ascontiguousarray(value)))
    elif isinstance(value, list | tuple) and value and all(isinstance(x, Real) for x in value):
        yield from _widened(torch.tensor(value))
    elif depth < _DEPTH:
        for _, part in parts_within(value):
            yield from _leaves(part, depth + 1)


def _widened(x: Tensor) -> Iterator[Tensor]:
    """Yield the tensor, and also a copy in a wider dtype if models convert it to one."""
    yield x
    if x.dtype in _WIDE:
        yield x.to(_WIDE[x.dtype])
