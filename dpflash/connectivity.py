"""Whether a pattern lets a sequence's end know of all that came before it, given enough layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .patterns import Adaptive, Pattern, SlidingWindow

Ints = NDArray[np.int64]


def reaches_all(pattern: Pattern, tokens: int, heads: int = 1) -> bool:
    """Whether what the last position sees, what that sees, and so on, is the whole sequence.

    One step is one layer, whose heads count together. A pattern of blocks that see themselves
    alone, or of segments that no branch joins, does not reach all.

    Args:
        pattern: whose positions are meant.
        tokens: T, at least 1.
        heads: H.
    """
    if isinstance(pattern, Adaptive):
        return True  # any block may be chosen
    if isinstance(pattern, SlidingWindow) and pattern.window > 0:
        return True  # from neighbour to neighbour, which would take T / window rounds below
    side = pattern.graph(tokens, heads).rows
    groups, runs = side.groups.long().numpy(), side.runs.long().numpy()
    reached = np.zeros(tokens, dtype=bool)
    reached[-1] = True
    # Most pairs lead back, so that one round from the end suffices for most patterns.
    order = np.argsort(-(groups[:, 0] + groups[:, 1] * (groups[:, 2] - 1)))
    followed = np.zeros(len(groups), dtype=np.int64)
    before = 0
    while before < reached.sum() < tokens:
        before = reached.sum()
        for group in order:
            start, stride, length, first, end = groups[group]
            rows = start + stride * np.flatnonzero(reached[start:][: stride * length : stride])
            if len(rows) > followed[group]:
                followed[group] = len(rows)
                for run in runs[first:end]:
                    reached[_seen(rows, run)] = True
    return bool(reached.all())


def _seen(rows: Ints, run: Ints) -> Ints:
    """The columns of a run that one of these rows sees, see `tile_graph.Side`."""
    column, step, count, lo, hi = run
    first = np.maximum(-((column + hi - rows) // step), 0)
    last = np.minimum((rows - lo - column) // step, count - 1)
    kept = first <= last
    begins, ends = (
        np.bincount(at[kept], minlength=count + 1)[: count + 1] for at in (first, last + 1)
    )
    return column + step * np.flatnonzero((begins - ends).cumsum() > 0)
