"""Groups of parameters that are clipped together, each with its own bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from dpflash.kernels import bound_share
from dpflash.kernels.reference import ROOT_SLACK

_ONE_FOR_EACH_PARAMETER = (
    "One bound per parameter is for Opacus' per_layer, which clips each parameter by itself; "
    "here the parameters of a layer are clipped together, with one bound. Give one bound for each "
    "group, or a dict {name: bound}"
)

# One bound for each clipping group: in the order of the groups, or by name.
Bounds = Sequence[float] | Mapping[str, float]


@dataclass(frozen=True)
class Group:
    """Parameters that are clipped by one common per-sample norm.

    Attributes:
        name: dotted name of the module, or "all".
        parameters: the trainable parameters, each once.
        share: the group's bound as a fraction of max_grad_norm.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    share: float


def flat_groups(parameters: Sequence[nn.Parameter]) -> list[Group]:
    """Return a single group of all parameters, with the whole bound."""
    return [Group("all", tuple(parameters), 1.0)]


def per_layer_groups(modules: Iterable[tuple[str, Sequence[nn.Parameter]]]) -> list[Group]:
    """Return one group per module with equal bounds; modules that share a parameter are merged.

    Guarantees:
        The squares of the groups' shares sum to at most 1, so that one sample changes the sums of
        all groups together by at most max_grad_norm.
    """
    merged: list[tuple[str, dict[int, nn.Parameter]]] = []
    for name, parameters in modules:
        own = {id(p): p for p in parameters}
        if not own:
            continue
        touching = [entry for entry in merged if entry[1].keys() & own.keys()]
        for entry in touching:
            merged.remove(entry)
            own = {**entry[1], **own}
        merged.append(("+".join([entry[0] for entry in touching] + [name]), own))
    share = 1.0 if len(merged) < 2 else bound_share(1, len(merged))
    return [Group(name, tuple(own.values()), share) for name, own in merged]


def joint_bound(bounds: Bounds) -> float:
    """Return sqrt(sum C_k^2): the L2 bound of one sample over all groups, whose bounds are C_k."""
    return math.hypot(*(bounds.values() if isinstance(bounds, Mapping) else bounds))


def with_bounds(groups: Sequence[Group], bounds: Bounds) -> list[Group]:
    """Return the groups with these bounds, stored as fractions (shares) of their joint bound.

    Guarantees:
        The squares of the shares sum to at most 1, and a group's share times the joint bound is
        at most the group's bound.

    Raises:
        ValueError: the number of bounds, or a name, does not match the groups.
    """
    names = [group.name for group in groups]
    listed = ", ".join(map(repr, names))
    if isinstance(bounds, Mapping):
        wrong = [f"{n!r} is no group" for n in bounds if n not in names] + [
            f"{n!r} is missing" for n in names if n not in bounds
        ]
        if wrong:
            raise ValueError(
                f"max_grad_norm={dict(bounds)!r}: expected one bound for each clipping group by "
                f"its name, but {', '.join(wrong)}. The names are {listed}; '' is the model's own "
                "parameters"
            )
        values = [bounds[name] for name in names]
    else:
        values = list(bounds)
    if len(values) != len(groups):
        each = len(values) == sum(len(group.parameters) for group in groups)
        raise ValueError(
            f"max_grad_norm has {len(values)} bounds, but the model has {len(groups)} clipping "
            f"groups: {listed}; '' is the model's own parameters. "
            + (_ONE_FOR_EACH_PARAMETER if each else "Give one for each, or a dict by name")
        )
    whole = joint_bound(values)
    return [
        replace(group, share=value / whole * ROOT_SLACK)
        for group, value in zip(groups, values, strict=True)
    ]
