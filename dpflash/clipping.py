"""Clip factors, and the groups of parameters that are clipped together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dpflash.kernels.reference import FP64_SLACK, hard_clip_factors, rounded_down

# gamma of automatic clipping, as in its paper.
_STABILITY = 0.01


def clip_factors(squared_norms: Tensor, bound: float, function: str = "hard") -> Tensor:
    """c_i = min(1, bound / n_i), or bound / (n_i + 0.01) for "automatic", rounded down.

    Args:
        squared_norms: [B], fp64, upper bounds of the n_i^2, see `squared_norm`.
        bound: clipping bound, in the units of the norms.
        function: "hard" or "automatic"; the latter needs a finite bound.

    Source: automatic clipping is AUTO-S of Bu et al. (arXiv:2206.07136).

    Returns:
        [B], fp32. A non-finite norm gives 0, as does one so large that c_i would be subnormal.

    Guarantees:
        c_i n_i <= bound in real arithmetic; c_i depends on sample i alone.
    """
    squares = squared_norms.double()
    if function == "hard":
        return hard_clip_factors(squares, bound)
    norms = squares.sqrt()
    return rounded_down(bound / (norms + _STABILITY) * (1 - 2 * FP64_SLACK))


@dataclass(frozen=True)
class Group:
    """Parameters with one common per-sample norm.

    Attributes:
        name: dotted name of the module, or "all".
        parameters: the trainable parameters, each once.
        share: the group's bound as a fraction of max_grad_norm.
        tiled: the one parameter is a matrix, and each of its tiles is clipped by itself to its
            part of the group's bound, see `dpflash.kernels.block_clipped_grad`.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    share: float
    tiled: bool = False


def flat_groups(parameters: Sequence[nn.Parameter]) -> list[Group]:
    """One group of everything, with the whole bound."""
    return [Group("all", tuple(parameters), 1.0)]


def per_layer_groups(modules: Iterable[tuple[str, Sequence[nn.Parameter]]]) -> list[Group]:
    """One group a module, modules that share a parameter merged, each with an equal part of C^2.

    Guarantees:
        The shares' squares sum to at most 1, so that one sample moves all groups together by at
        most max_grad_norm.
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
    # Rounded down by more than the root and the later products round.
    share = 1.0 if len(merged) < 2 else math.sqrt(1.0 / len(merged)) * (1.0 - 2.0**-50)
    return [Group(name, tuple(own.values()), share) for name, own in merged]


def per_block_groups(
    parameters: Sequence[nn.Parameter], names: dict[nn.Parameter, str], tiled: set[int]
) -> list[Group]:
    """One group a parameter, those whose id is in `tiled` cut into tiles, C^2 by element count.

    Guarantees:
        The shares' squares sum to at most 1, so that one sample moves all groups together by at
        most max_grad_norm.
    """
    elements = sum(p.numel() for p in parameters)
    # Rounded down by more than the root and the later products round.
    shares = [math.sqrt(p.numel() / elements) * (1.0 - 2.0**-50) for p in parameters]
    return [
        Group(names[p], (p,), share, id(p) in tiled)
        for p, share in zip(parameters, shares, strict=True)
    ]
