"""Checks that all ranks made the same call before they exchange tensors.

A mistake on one rank then raises an error on all ranks instead of blocking them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash import _validate
from dpflash.distributed.collectives import (
    agree,
    digest,
    exchanging,
    gather_rows,
    rank_in,
    world_size,
)
from dpflash.kernels.tile_shard import Chunk

from .layout import Layout

MODES = ("ring", "all_gather", "ulysses")

# Results of `agree_on_lengths(once=True)`, by group and call.
_known: WeakKeyDictionary[ProcessGroup, dict[tuple[object, ...], list[int]]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Context:
    """A sharded sequence that all ranks of a call agreed on."""

    group: ProcessGroup | None  # the ranks that share the sequence; None for a single process
    layout: Layout  # which tokens each rank holds
    mode: str  # "ring", "all_gather", "ulysses" or "auto"
    length: int  # positions from `length` on are padding
    calls: dict[Any, Any] | None = None  # `ContextParallel.calls`

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return rank_in(self.group)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Ranges of this rank's tokens, without padding."""
        return self.layout.chunks(self.rank, self.length)

    @property
    def local_length(self) -> int:
        """Number of this rank's tokens without padding; padding comes last."""
        return self.layout.local_length(self.rank, self.length)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the position in the sequence of each token of this rank, `[T_p]`, int64."""
        return self.layout.positions(self.rank, device)


def resolve_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Resolve None to the default group, or to None in a single process."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group={group!r}: expected a torch.distributed process group that contains this "
            "process, or None for the default group; use mesh.get_group('context') of a DeviceMesh"
        )
    return group


class DeferredError:
    """Stores a ValueError of this rank until all ranks can raise it together."""

    def __init__(self) -> None:
        self.error: ValueError | None = None

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Store a ValueError raised in the body, and continue after the body."""
        try:
            yield
        except ValueError as error:
            self.error = error


def agree_on_lengths(
    operation: str,
    values: Mapping[str, object],
    length: int,
    group: ProcessGroup | None,
    error: ValueError | None = None,
    *,
    once: bool = False,
) -> list[int]:
    """Check that `values` are equal on all ranks; return the number of tokens of each rank.

    All ranks of the group call this together, which takes one small exchange. If ranks pass an
    `error`, all ranks raise a ValueError with the first of these errors. If a value differs, all
    ranks raise a ValueError that names the first such value, see `collectives.agree`.

    Args:
        operation: the name of the exchange in messages.
        values: see `collectives.agree`.
        length: number of tokens of this rank.
        group: the ranks.
        error: why this rank cannot continue, or None.
        once: whether to skip the exchange if the same call was checked before. If a rank then
            makes a different call, only the next exchange fails, so calls must send no tensors.
    """
    text = "\n".join(f"{name}={value!r}" for name, value in values.items())
    own = [int(error is not None), digest(text), length]
    known = _known.setdefault(group, {}) if once and group is not None else {}
    key = (operation, *own)
    if key in known:
        return known[key]
    rows = gather_rows(own, group, operation)
    if any(row[0] for row in rows):
        _raise_together(operation, error, group)
    if any(row[1] != own[1] for row in rows):
        agree(operation, values, group)
    known[key] = [row[2] for row in rows]
    return known[key]


def layout_of(operation: str, lengths: list[int], sharding: str, rows: int = 1) -> Layout:
    """Return the layout with these `lengths` of ranks; refuse lengths that `sharding` excludes."""
    layout = Layout(sum(lengths), len(lengths), sharding)
    expected = [layout.local_length(rank) for rank in range(len(lengths))]
    if lengths != expected:
        raise ValueError(
            f"{operation}: the ranks have {lengths} tokens: expected {expected} for "
            f"{sum(lengths)} tokens with sharding={sharding!r}; split the sequence with "
            "dpflash.distributed.shard_sequence"
        )
    return layout if rows == 1 else Layout(rows * layout.num_tokens, len(lengths), sharding, rows)


def unpadded_length(length: object, num_tokens: int) -> int:
    """Return the number of tokens without padding; `length` None means no padding."""
    if length is None:
        return num_tokens
    _validate.positive_int(length=length)
    assert isinstance(length, int)
    if length > num_tokens:
        raise ValueError(
            "length: expected at most the number of tokens over all ranks; pass the number of "
            "tokens that are not padding"
        )
    return length


def _raise_together(
    operation: str, error: ValueError | None, group: ProcessGroup | None
) -> NoReturn:
    texts: list[object] = [None]
    if world_size(group) > 1:
        texts *= world_size(group)
        with exchanging(operation, group):
            dist.all_gather_object(texts, None if error is None else str(error), group=group)
    if error is not None:
        raise error
    first = next(rank for rank, text in enumerate(texts) if text is not None)
    raise ValueError(f"{operation}: rank {first} raised: {texts[first]}")
