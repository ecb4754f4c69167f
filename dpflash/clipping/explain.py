"""Tables for users: the clipping groups, and the planner's choices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..privacy.public_facts import PublicFacts
from .backward import PrivateBackward
from .device_speed import Ceilings
from .groups import Group
from .planner import LinearShape, cost

_LEGEND = """\
mode: the grad_sample_mode. sum: exact, or rounded in float32. +MFLOP, +MiB: operations, and bytes
  read and written, beyond a non-private backward. kept MiB: memory until gradients are clipped.
  time: part of the predicted {milliseconds:.3g} ms. why: the other mode's time / this mode's;
  norms use T x T products (gram), per-sample gradients (tile) or rows of tokens (rows)"""

_STORED = "stored per-sample gradients, if used, without a plan"


@dataclass(frozen=True)
class GroupInfo:
    """Parameters that are clipped together.

    Attributes:
        name: dotted name of the module or parameter, or "all".
        parameters: dotted names of the parameters.
        elements: number of elements of the parameters.
        bound: L2 bound of one sample's contribution to the sum of these parameters.
    """

    name: str
    parameters: tuple[str, ...]
    elements: int
    bound: float


@dataclass(frozen=True)
class ClippingGroups:
    """All clipping groups. One sample changes all sums together by `sensitivity` at most (L2)."""

    groups: tuple[GroupInfo, ...]
    sensitivity: float

    def __iter__(self) -> Iterator[GroupInfo]:
        return iter(self.groups)

    def __getitem__(self, index: int) -> GroupInfo:
        return self.groups[index]

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        rows = [("group", "elements", "bound")]
        rows += [(g.name, f"{g.elements:,}", f"{g.bound:.6g}") for g in self.groups]
        return f"{_table(rows)}\nsensitivity {self.sensitivity:.6g} (one sample)"


@dataclass(frozen=True)
class PlannedUse:
    """How the clipped gradient of one matrix parameter is computed.

    Attributes:
        parameter: dotted name of the parameter.
        grad_sample_mode: "instantiate", "book_keeping" or "ghost".
        flops: FLOPs in addition to a non-private backward; fp64 products count twice.
        moved_bytes: bytes read and written in addition to a non-private backward.
        memory_bytes: bytes kept until the gradients are clipped.
        seconds: predicted time, including the product of the ordinary weight gradient.
        share: this parameter's fraction of the predicted time of all parameters, 0 to 1.
        why: the reason for the choice of the mode.
        exact: True if the clipped sum is exact, False if it is rounded in float32.
    """

    parameter: str
    grad_sample_mode: str
    flops: int
    moved_bytes: int
    memory_bytes: int
    seconds: float
    share: float
    why: str
    exact: bool = False


@dataclass(frozen=True)
class ClippingPlan:
    """How the clipped gradients of all matrix parameters in the last forward are computed.

    The modes differ in time and memory. Every mode bounds each sample, and sums of finite
    gradients are equal up to rounding. The plan is the same on all devices of one type.

    Attributes:
        uses: one entry for each parameter.
        ceilings: assumed speed of the device, from which times were predicted.
        public: the public facts about the batches.
        attention: which library's kernels run dense and causal attention, and why.
        context: a table of the modes of context-parallel attention; empty without a context.
        unplanned: dotted names of the trained matrices without an entry. If the last forward
            used such a matrix, its per-sample gradients are stored.
    """

    uses: tuple[PlannedUse, ...]
    ceilings: Ceilings
    public: PublicFacts
    attention: str
    context: str = ""
    unplanned: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[PlannedUse]:
        return iter(self.uses)

    def __getitem__(self, index: int) -> PlannedUse:
        return self.uses[index]

    def __len__(self) -> int:
        return len(self.uses)

    def __str__(self) -> str:
        rows = [("parameter", "mode", "sum", "+MFLOP", "+MiB", "kept MiB", "time", "why")]
        rows += [
            (
                u.parameter,
                u.grad_sample_mode,
                "exact" if u.exact else "rounded",
                f"{u.flops / 1e6:.1f}",
                f"{u.moved_bytes / 2**20:.1f}",
                f"{u.memory_bytes / 2**20:.1f}",
                f"{u.share:.0%}",
                u.why,
            )
            for u in self.uses
        ]
        lines = (
            _table(rows),
            _LEGEND.format(milliseconds=1e3 * sum(use.seconds for use in self.uses)),
            *([f"{_STORED}: {', '.join(self.unplanned)}"] if self.unplanned else []),
            f"ceilings: {self.ceilings}",
            self.attention,
            *([self.context] if self.context else ()),
            str(self.public),
        )
        return "\n".join(lines)


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
        )
        for group in groups
    )
    sensitivity = math.sqrt(sum(group.share**2 for group in groups)) * max_grad_norm
    return ClippingGroups(found, min(sensitivity, max_grad_norm))


def explain_plan(
    backward: PrivateBackward, public: PublicFacts, attention: str, context: str = ""
) -> ClippingPlan:
    """See `PrivacyEngine.plan`."""
    if not any(backward.forward.state.shapes.values()):
        raise ValueError(
            "plan() before the private model has run: call the model on a batch first"
        )
    planner, ceilings, uses = backward.planner, backward.planner.ceilings, []
    for group, shapes in backward.forward.state.shapes.items():
        modes = planner.plan(shapes).modes
        for (position, of_parameter), mode in zip(shapes.items(), modes, strict=True):
            found = cost(of_parameter, mode, ceilings)
            asked = planner.mode != "auto"
            use = PlannedUse(
                parameter=backward.names[backward.groups[group].parameters[position]],
                grad_sample_mode=mode,
                flops=found.flops,
                moved_bytes=found.moved,
                memory_bytes=found.kept,
                seconds=found.seconds,
                share=0.0,
                why="you asked for it" if asked else _why(of_parameter, mode, ceilings),
                exact=backward.step.sums.exact and mode == "instantiate",
            )
            uses.append(use)
    total = sum(use.seconds for use in uses)
    shared = (replace(use, share=use.seconds / total) for use in uses)
    planned = {use.parameter for use in uses}
    others = (
        name
        for group in backward.groups
        for p in group.parameters
        if p.ndim > 1 and (name := backward.names[p]) not in planned
    )
    return ClippingPlan(tuple(shared), ceilings, public, attention, context, tuple(others))


def _why(shapes: list[LinearShape], mode: str, ceilings: Ceilings) -> str:
    if mode == "ghost":
        return "memory budget is too small"
    other = "book_keeping" if mode == "instantiate" else "instantiate"
    ratio = cost(shapes, other, ceilings).seconds / cost(shapes, mode, ceilings).seconds
    if ratio < 1:
        return f"memory budget; {other} is {1 / ratio:.1f}x as fast"
    forms = {shape.norm_form(ceilings.device != "cpu"): None for shape in shapes}
    return f"{other} takes {ratio:.2f}x; norm: {'+'.join(forms)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
