"""What a batch is: nested tensors whose first dimension are the samples, taken and altered.

Letters: B samples, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_IGNORED = -100  # torch's and transformers' mark of a target that does not count
_SCALE = 8.0
_TARGET_NAMES = ("labels", "label", "targets", "target", "y")

VALUES, MASKS, TARGETS = "values", "masks", "targets"


@dataclass(frozen=True)
class Place:
    """One sample in its company: a batch, the sample's index in it, and how many there are."""

    batch: Any
    index: int
    size: int


class Altered(NamedTuple):
    """A batch of which some samples were altered: which kind of tensors, and how."""

    kind: str
    how: str
    batch: Any


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def batch_size(batch: Any) -> int:
    """B; a ValueError for what is no batch, or one that cannot be compared."""
    shapes = [tuple(t.shape) for t in tensors(batch) if t.ndim]
    if not shapes:
        raise ValueError(
            f"batch={type(batch).__name__} holds no tensor: expected a tensor, a tuple or a dict "
            "of tensors whose first dimension is the batch"
        )
    sizes = {shape[0] for shape in shapes}
    if len(sizes) > 1:
        raise ValueError(
            f"batch holds tensors of shapes {shapes}: expected the batch first in each; put what "
            "is not per sample into loss_fn"
        )
    size = sizes.pop()
    if size < 2:
        raise ValueError(
            f"batch holds {size} sample(s): expected two or more, since a sample is compared with "
            "itself in company; 4 to 8 are enough"
        )
    return size


def mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with each of its tensors changed; scalars stay."""
    return tree_map_only(Tensor, lambda t: change(t) if t.ndim else t, batch)


def pick(batch: Any, rows: Iterable[int]) -> Any:
    """The batch of these samples; a sample may come several times."""
    index = torch.tensor(list(rows), dtype=torch.long)
    return mapped(batch, lambda t: t[index.to(t.device)])


def rows_of(value: Any, index: int, size: int) -> list[Tensor]:
    """What of the tensors belongs to one sample; all of it where that cannot be told."""
    rows = []
    for t in tensors(value):
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
    """The batch with these samples, called `who`, scaled, masked, or in part without targets."""
    chosen = torch.tensor(list(rows), dtype=torch.long)

    def scaled(t: Tensor) -> Tensor:
        return _replaced(t, chosen, t[chosen.to(t.device)] * _SCALE)

    def cut(t: Tensor) -> Tensor:
        part = t[chosen.to(t.device)]
        part[:, part.shape[1] // 2 :] = 0
        return _replaced(t, chosen, part)

    def ignored(t: Tensor) -> Tensor:
        part = t[chosen.to(t.device)]
        mark = int(t.min()) if int(t.min()) < 0 else _IGNORED
        part.view(part.shape[0], -1)[:, part[0].numel() // 2 :] = mark
        return _replaced(t, chosen, part)

    changes: tuple[tuple[str, str, Callable[[Tensor], Tensor], Callable[..., bool]], ...] = (
        (VALUES, f"{who} are scaled by {_SCALE:g}", scaled, _is_value),
        (MASKS, f"masks of {who} are cut short", cut, _is_mask),
        (TARGETS, f"targets of {who} are ignored from the middle on", ignored, _is_target),
    )
    for kind, how, change, wanted in changes:
        other, count = _map_leaves(batch, change, wanted)
        if count:
            yield Altered(kind, how, other)


def _replaced(t: Tensor, chosen: Tensor, rows: Tensor) -> Tensor:
    return t.detach().clone().index_copy(0, chosen.to(t.device), rows.detach().to(t.dtype))


def _map_leaves(
    batch: Any, change: Callable[[Tensor], Tensor], wanted: Callable[[Tensor, str, int], bool]
) -> tuple[Any, int]:
    """The batch with its wanted tensors changed, and how many there were."""
    count = 0

    def visit(part: Any, key: str, position: int) -> Any:
        nonlocal count
        if isinstance(part, Tensor):
            if part.ndim == 0 or not wanted(part, key, position):
                return part
            count += 1
            return change(part)
        if isinstance(part, dict):
            return type(part)({k: visit(v, str(k), 0) for k, v in part.items()})
        if isinstance(part, list | tuple):
            entries = [visit(p, "", n) for n, p in enumerate(part)]
            return type(part)(*entries) if hasattr(part, "_fields") else type(part)(entries)
        return part

    return visit(batch, "", 0), count


def _is_binary(t: Tensor) -> bool:
    return t.dtype == torch.bool or bool(((t == 0) | (t == 1)).all())


def _is_mask(t: Tensor, key: str, position: int) -> bool:
    return t.ndim > 1 and not t.is_complex() and _is_binary(t)


def _is_value(t: Tensor, key: str, position: int) -> bool:
    return t.is_floating_point() and not _is_binary(t)


def _is_target(t: Tensor, key: str, position: int) -> bool:
    """Integers that may hold marks of what is ignored."""
    if t.dtype not in (torch.int64, torch.int32) or t.numel() == 0:
        return False
    if bool((t < 0).any()):
        return True
    # Elsewhere a mark that is not known as one would be an assertion of the device.
    return t.device.type == "cpu" and (key in _TARGET_NAMES or position > 0)
