"""Selects and alters samples of a batch: nested tensors whose first dimension is the batch.

Shapes: B samples, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..verification.nested import map_tensors, tensors_of

_IGNORED = -100  # ignore_index of torch and transformers
_SCALE = 8.0
_TARGET_NAMES = ("labels", "label", "targets", "target", "y")

_Change = Callable[[Tensor, Tensor], Tensor]

VALUES, MASKS, TARGETS = "values", "masks", "targets"


@dataclass(frozen=True)
class Place:
    """One sample of a batch: the batch, the sample's index in it, and the batch size."""

    batch: Any
    index: int
    size: int


class Altered(NamedTuple):
    """A batch with altered samples: the kind of tensors that changed, how, and the batch."""

    kind: str
    how: str
    batch: Any


def batch_size(batch: Any) -> int:
    """B; raises a ValueError if `batch` is not a batch, or has fewer than two samples."""
    shapes = [tuple(t.shape) for _, t in tensors_of(batch) if t.ndim]
    if not shapes:
        raise ValueError(
            f"batch={type(batch).__name__} holds no tensor: expected a tensor, a tuple or a dict "
            "of tensors whose first dimension is the batch"
        )
    sizes = {shape[0] for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(
            f"batch holds tensors of shapes {shapes}: expected the batch as the first dimension "
            "of each; move tensors that are not per sample into loss_fn"
        )
    size = sizes.pop()
    if size < 2:
        raise ValueError(
            f"batch holds {size} sample(s): expected two or more, because a sample is compared "
            "with itself among other samples; pass 4 to 8"
        )
    return size


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with `change` applied to each tensor that is not a scalar."""
    return map_tensors(lambda t: change(t) if t.ndim else t, batch)


def pick(batch: Any, rows: Iterable[int]) -> Any:
    """A batch of these samples; a sample may occur several times."""
    index = torch.tensor(list(rows), dtype=torch.long)
    return mapped(batch, lambda t: t[index.to(t.device)])


def rows_of(value: Any, index: int, size: int) -> list[Tensor]:
    """The rows of the tensors that belong to one sample; whole tensors if that is ambiguous."""
    rows = []
    for _, t in tensors_of(value):
        if t.ndim == 0:
            continue
        if t.shape[0] == size:
            row = t[index]
        elif t.shape[0] and t.shape[0] % size == 0:  # [B * T, ...]
            row = t.unflatten(0, (size, -1))[index]
        else:
            row = t[0] if t.shape[0] == 1 else t
        rows.append(row.detach().clone())
    return rows


def alterations(batch: Any, rows: Iterable[int], who: str) -> Iterator[Altered]:
    """Batches with some samples altered: scaled, masked, or half of their targets ignored.

    `who` names these samples in messages.
    """
    index = torch.tensor(list(rows), dtype=torch.long)

    def shortened(own: Tensor, t: Tensor) -> Tensor:
        own[:, own.shape[1] // 2 :] = 0
        return own

    def ignored(own: Tensor, t: Tensor) -> Tensor:
        label = int(t.min()) if int(t.min()) < 0 else _IGNORED
        own.view(own.shape[0], -1)[:, own[0].numel() // 2 :] = label
        return own

    # (kind, how, the new rows of a tensor, which tensors).
    changes: tuple[tuple[str, str, _Change, Callable[[Tensor, str], bool]], ...] = (
        (
            VALUES,
            f"{who} are scaled by {_SCALE:g}",
            lambda own, t: own * _SCALE,
            lambda t, _: t.is_floating_point() and not _is_binary(t),
        ),
        (
            MASKS,
            f"masks of {who} are shortened",
            shortened,
            lambda t, _: t.ndim > 1 and not t.is_complex() and _is_binary(t),
        ),
        (TARGETS, f"targets of {who} are ignored from the middle on", ignored, _is_target),
    )
    # One tensor may be in several places, as inputs and labels.
    batch = map_tensors(lambda t: t.detach().requires_grad_(t.requires_grad), batch)
    for kind, how, change, wanted in changes:
        changed = {}
        for place, t in tensors_of(batch):
            if t.ndim and wanted(t, place):
                at = index.to(t.device)
                own = change(t[at], t).detach().to(t.dtype)
                changed[id(t)] = t.detach().clone().index_copy(0, at, own)
        if changed:
            yield Altered(kind, how, _replaced(batch, changed))


def _replaced(batch: Any, changed: dict[int, Tensor]) -> Any:
    return map_tensors(lambda t: changed.get(id(t), t), batch)


def _is_binary(t: Tensor) -> bool:
    return t.dtype == torch.bool or bool(((t == 0) | (t == 1)).all())


def _is_target(t: Tensor, place: str) -> bool:
    """Whether these are integer targets that may contain an ignore_index."""
    if t.dtype not in (torch.int64, torch.int32) or t.numel() == 0:
        return False
    if bool((t < 0).any()):
        return True
    # The last key or field of the place, or the last position.
    last = re.split(r"[\[.]", place)[-1].strip("]'")
    is_named = int(last) > 0 if last.isdigit() else last in _TARGET_NAMES
    # On a GPU an out-of-range target that is not ignored would trigger a device assertion.
    return t.device.type == "cpu" and is_named
