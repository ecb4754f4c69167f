"""What users see of the clipping: its groups, and how the gradients of each are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from dpflash.kernels import BLOCK

from .clipping import Group
from .gate import PrivateBackward
from .planner import LinearShape


@dataclass(frozen=True)
class GroupInfo:
    """Parameters that are clipped together, or a matrix that is clipped tile by tile.

    Attributes:
        name: dotted name of the module or parameter, or "all".
        parameters: dotted names.
        elements: number of elements.
        bound: what one sample may move these parameters' sum by, in L2.
        tiles: clipping groups inside; 1 unless the matrix is clipped tile by tile.
    """

    name: str
    parameters: tuple[str, ...]
    elements: int
    bound: float
    tiles: int


@dataclass(frozen=True)
class ClippingGroups:
    """All groups; one sample moves all of them together by at most `sensitivity` in L2."""

    groups: tuple[GroupInfo, ...]
    sensitivity: float

    def __iter__(self) -> Iterator[GroupInfo]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        rows = [("group", "elements", "tiles", "bound")]
        rows += [(g.name, f"{g.elements:,}", str(g.tiles), f"{g.bound:.6g}") for g in self.groups]
        return f"{_table(rows)}\nsensitivity {self.sensitivity:.6g} (add or remove one sample)"


@dataclass(frozen=True)
class PlannedUse:
    """How one matrix parameter's clipped gradient is computed.

    Attributes:
        parameter: dotted name.
        way: "stored", "book_keeping", "two_pass" or "tiles" (per_block clipping).
        flops: of the way, beyond those of a non-private backward.
        memory_bytes: that it keeps until the clip.
        why: in words.
    """

    parameter: str
    way: str
    flops: int
    memory_bytes: int
    why: str


@dataclass(frozen=True)
class ClippingPlan:
    """The uses of all matrix parameters in the last forward pass."""

    uses: tuple[PlannedUse, ...]

    def __iter__(self) -> Iterator[PlannedUse]:
        return iter(self.uses)

    def __len__(self) -> int:
        return len(self.uses)

    def __str__(self) -> str:
        rows = [("parameter", "way", "extra MFLOP", "MiB", "why")]
        rows += [
            (u.parameter, u.way, f"{u.flops / 1e6:.1f}", f"{u.memory_bytes / 2**20:.2f}", u.why)
            for u in self.uses
        ]
        return _table(rows)


def describe_groups(
    groups: Sequence[Group], names: dict[nn.Parameter, str], max_grad_norm: float
) -> ClippingGroups:
    """See `PrivacyEngine.groups`."""
    found = tuple(
        GroupInfo(
            name=group.name,
            parameters=tuple(names[p] for p in group.parameters),
            elements=sum(p.numel() for p in group.parameters),
            bound=group.share * max_grad_norm,
            tiles=_tiles(group.parameters[0]) if group.tiled else 1,
        )
        for group in groups
    )
    sensitivity = math.sqrt(sum(group.share**2 for group in groups)) * max_grad_norm
    return ClippingGroups(found, min(sensitivity, max_grad_norm))


def _tiles(weight: nn.Parameter) -> int:
    return math.prod(-(-size // side) for size, side in zip(weight.shape, BLOCK, strict=True))


def explain_plan(backward: PrivateBackward) -> ClippingPlan:
    """See `PrivacyEngine.plan`."""
    if not backward.last_shapes:
        raise ValueError(
            "plan() before the private model has run: call the model on a batch first"
        )
    uses = []
    for group, shapes in backward.last_shapes.items():
        planned = backward.plan_for(shapes)
        for (position, of_parameter), way in zip(shapes.items(), planned.ways, strict=True):
            name = backward.names[backward.groups[group].parameters[position]]
            uses.append(_explain(name, backward, group, of_parameter, way))
    return ClippingPlan(tuple(uses))


def _explain(
    name: str, backward: PrivateBackward, group: int, shapes: list[LinearShape], way: str
) -> PlannedUse:
    stored = max(s.stored_bytes for s in shapes)
    kept = sum(s.book_keeping_bytes for s in shapes)
    if backward.groups[group].tiled:
        why = "tiles are clipped as they are made; no per-sample gradient is kept"
        return PlannedUse(name, "tiles", 0, kept, why)
    stored_time = 1e3 * max(s.stored_seconds for s in shapes)
    kept_time = 1e3 * sum(s.book_keeping_seconds for s in shapes) * len(shapes)
    costs = f"nominal {stored_time:.2f} ms stored, {kept_time:.2f} ms book-kept"
    if backward.way != "auto":
        costs = f"way={backward.way!r} was asked for"
    if way == "stored":
        return PlannedUse(name, way, 0, stored, costs)
    if way == "book_keeping":
        return PlannedUse(name, way, sum(s.norm_flops for s in shapes), kept, costs)
    flops = sum(s.norm_flops + s.backward_flops for s in shapes)
    why = costs if backward.way != "auto" else "neither fits into the memory budget"
    return PlannedUse(name, way, flops, 0, why)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
