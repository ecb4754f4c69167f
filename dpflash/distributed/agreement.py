"""What workers agree on before they exchange tensors, so that a mistake is an error, not a hang.

Letters: T tokens, P workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

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


@dataclass(frozen=True, eq=False)
class Context:
    """What workers agreed on: who has which tokens, and how attention reaches the others'.

    Attributes:
        group: the workers that share a sequence; None is a process by itself.
        layout: which tokens each has.
        mode: "ring", "all_gather", "ulysses" or "auto".
        length: positions from this one on are padding.
    """

    group: ProcessGroup | None
    layout: Layout
    mode: str
    length: int

    @property
    def rank(self) -> int:
        """This worker's number in the group."""
        return rank_in(self.group)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Where this worker's tokens that are no padding lie."""
        return self.layout.chunks(self.rank, self.length)

    @property
    def local_length(self) -> int:
        """How many of this worker's tokens are no padding; they come first."""
        return self.layout.local_length(self.rank, self.length)

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """`[T_p]`, int64: the position in the sequence of each of this worker's tokens."""
        return self.layout.positions(self.rank, device)


def resolve_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group meant: None is the default group, or without one the process by itself.

    Raises:
        ValueError: for what is no group, or one that this process is not in.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            f"group={group!r}: expected a torch.distributed process group that this process is "
            "in, or None for the default one; use mesh.get_group('context') of a DeviceMesh"
        )
    return group


class Refusal:
    """Holds back a ValueError raised inside ``with refusal.held():`` until all have met."""

    def __init__(self) -> None:
        self.error: ValueError | None = None

    @contextmanager
    def held(self) -> Any:
        """Keeps the error, and goes on behind the block."""
        try:
            yield
        except ValueError as error:
            self.error = error


def lengths_agreed(
    what: str,
    values: Mapping[str, object],
    length: int,
    group: ProcessGroup | None,
    refused: ValueError | None = None,
) -> list[int]:
    """Every worker's number of tokens, after all agreed on the values, in one small exchange.

    Args:
        what: names the call in messages.
        values: names and values, see `dpflash.workers.agree`.
        length: this worker's number of tokens.
        group: all of its workers call this.
        refused: why this worker cannot go on.

    Raises:
        ValueError: on all workers: the first refusal, or the first value that differs.
    """
    text = "\n".join(f"{name}={value!r}" for name, value in values.items())
    row = [int(refused is not None), digest(text), length]
    rows = gather_rows(row, group, what)
    if any(theirs[0] for theirs in rows):
        _raise_together(what, refused, group)
    if any(theirs[1] != row[1] for theirs in rows):
        agree(what, values, group)
    return [theirs[2] for theirs in rows]


def layout_agreed(
    what: str,
    lengths: list[int],
    sharding: str,
) -> Layout:
    """The layout in which workers have so many tokens.

    Raises:
        ValueError: there is none: somebody's shard is too long or too short.
    """
    layout = Layout(sum(lengths), len(lengths), sharding)
    expected = [layout.local_length(rank) for rank in range(len(lengths))]
    if lengths != expected:
        raise ValueError(
            f"{what}: the workers have {lengths} tokens: expected {expected} of "
            f"{sum(lengths)} tokens with sharding={sharding!r}; cut the sequence with "
            "dpflash.distributed.shard_sequence"
        )
    return layout


def length_within(length: object, num_tokens: int) -> int:
    """The number of tokens that are no padding; None means all."""
    if length is None:
        return num_tokens
    _validate.positive_int(length=length)
    assert isinstance(length, int)
    if length > num_tokens:
        raise ValueError(
            f"length={length}: expected at most the {num_tokens} tokens that the workers have "
            "together; pass how many of them are no padding"
        )
    return length


def _raise_together(what: str, refused: ValueError | None, group: ProcessGroup | None) -> NoReturn:
    said: list[object] = [None]
    if world_size(group) > 1:
        said *= world_size(group)
        with exchanging(what, group):
            dist.all_gather_object(said, None if refused is None else str(refused), group=group)
    if refused is not None:
        raise refused
    first = next(rank for rank, text in enumerate(said) if text is not None)
    raise ValueError(f"{what}: worker {first} refused its arguments: {said[first]}")
