"""The batch of a check: its size, and versions of the batch with other masks and targets.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..isolation.alteration import entries_of, rows_of
from ..verification.nested import tensors_of

_IGNORED = -100  # ignore_index of torch and transformers
_TARGET_NAMES = ("labels", "label", "targets", "target", "y")

MASKS, TARGETS = "masks of the others are shortened", "targets of the others are ignored"


@dataclass(frozen=True)
class Place:
    """One sample of a batch: the batch, the index of the sample, and the batch size."""

    batch: Any
    index: int
    size: int


def batch_size(batch: Any) -> int:
    """Return B; raise a ValueError if `batch` is not a batch, or has fewer than two samples."""
    shapes = [tuple(t.shape) for _, t in tensors_of(batch) if t.ndim]
    if not shapes:
        raise ValueError(
            f"batch={type(batch).__name__} holds no tensor: expected a tensor, a tuple or a dict "
            "of tensors whose first dimension is the batch"
        )
    size = shapes[0][0]
    if any(shape[0] != size for shape in shapes):
        raise ValueError(
            f"batch holds tensors of shapes {shapes}: expected the batch as the first dimension "
            "of each; move tensors without a row for each sample into loss_fn"
        )
    if size < 2:
        raise ValueError(
            f"batch holds {size} sample(s): expected two or more, because the check changes the "
            "other samples of a batch; pass 4 to 8 samples"
        )
    return size


def altered(batch: Any, size: int) -> Iterator[tuple[str, Any]]:
    """Yield (description, batch of 2 B samples): the samples of `batch`, then altered copies.

    In the copies, the second half of each mask is 0, or the second half of the targets is ignored.
    """
    for how in (MASKS, TARGETS):
        doubled = rows_of(batch, [*range(size)] * 2, size)
        found = False
        for place, t in entries_of(doubled, 2 * size):
            own = t[size:]
            if how == MASKS and own.ndim > 1 and _is_binary(own):
                own[:, own.shape[1] // 2 :] = 0
            elif how == TARGETS and _is_target(own, place):
                least = int(own.min())
                flat = own.view(size, -1)
                flat[:, flat.shape[1] // 2 :] = least if least < 0 else _IGNORED
            else:
                continue
            found = True
        if found:
            yield how, doubled


def _is_binary(t: Tensor) -> bool:
    return t.dtype == torch.bool or bool(((t == 0) | (t == 1)).all())


def _is_target(t: Tensor, place: str) -> bool:
    """Return whether a tensor has integer targets that may contain an ignore_index."""
    if t.dtype not in (torch.int64, torch.int32) or t.numel() == 0:
        return False
    if bool((t < 0).any()):
        return True
    # The last key, field name or position in `place`.
    last = re.split(r"[\[.]", place)[-1].strip("]'")
    is_named = int(last) > 0 if last.isdigit() else last in _TARGET_NAMES
    # On a GPU, a target out of range that is not ignored would trigger a device assertion.
    return t.device.type == "cpu" and is_named
