"""Decides whether attention of a pattern reaches the whole sequence, given enough layers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .adaptive import Adaptive
from .base import Pattern
from .sliding_window import SlidingWindow


def reaches_all(pattern: Pattern, tokens: int, heads: int = 1) -> bool:
    """Return whether the last of T >= 1 positions depends on all tokens, given enough layers.

    The function follows, from the last position, the keys that each position sees in any head.
    The result is False, for example, if blocks see only themselves or no branch connects segments.
    """
    if isinstance(pattern, Adaptive):
        return True  # any block may be chosen
    if isinstance(pattern, SlidingWindow) and pattern.reach[0] > 0:
        return True  # each token sees the previous one, so no loop of T / window rounds is needed
    side = pattern.graph(tokens, heads).rows
    groups, runs = side.groups.long().numpy(), side.runs.long().numpy()
    reached = np.zeros(tokens, dtype=bool)
    reached[-1] = True
    # Most keys precede their queries, so one round from the last group on mostly suffices.
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
                    reached[_columns(rows, run)] = True
    return bool(reached.all())


def _columns(rows: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the columns of a run that some of these rows see, see `tile_graph.Side`."""
    column, step, count, lo, hi = run
    first = np.maximum(-((column + hi - rows) // step), 0)
    last = np.minimum((rows - lo - column) // step, count - 1)
    is_seen = first <= last
    begins, ends = (
        np.bincount(at[is_seen], minlength=count + 1)[: count + 1] for at in (first, last + 1)
    )
    return column + step * np.flatnonzero((begins - ends).cumsum() > 0)
