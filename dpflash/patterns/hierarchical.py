"""Hierarchical attention: levels in which fewer blocks of queries see farther.

Letters: T tokens, H heads, n blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpflash.kernels.tile_graph import TileGraph

from . import _arguments, _builder
from .base import Pattern


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Pattern):
    """Levels of (stride, window) in tokens; a query sees the keys of all of its levels.

    With ``b = block_size``, query block i sees key block j if some level meets two conditions:
    ``|i - j| <= max(1, window // b) // 2`` or window is -1; and i is a multiple of
    ``max(1, stride // b)``. A query block always sees the key block at its own position.

    Args:
        levels: pairs (stride, window); stride is at least 1, and window at least 1, or -1 for
            all keys.
        block_size: tokens in a block; the last block may have fewer.
        causal: no query sees a key later than its own position.

    Raises:
        ValueError: an argument of the wrong type or range.
    """

    levels: Sequence[Sequence[int]]
    block_size: int = 64
    causal: bool = False

    def __post_init__(self) -> None:
        levels = [_level(level) for level in _arguments.items("levels", self.levels)]
        if not levels:
            raise _arguments.refusal(
                "levels", (), "at least one level", "pass for example ((64, 256),)"
            )
        block_size = _arguments.integer("block_size", self.block_size, 1)
        _arguments.store(self, levels=tuple(levels), block_size=block_size)
        _arguments.flag("causal", self.causal)
        self._fix_key()

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        block = torch.arange(num_tokens) // self.block_size
        i, j = block[:, None], block[None, :]
        seen = i == j
        for stride, window in self.levels:
            takes_part = i % max(1, stride // self.block_size) == 0
            near = (i - j).abs() <= max(1, window // self.block_size) // 2
            seen = seen | (takes_part & (near | (window == -1)))
        if self.causal:
            seen = seen.tril()
        return seen.float().repeat(num_heads, 1, 1)

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        n = -(-num_tokens // self.block_size)
        block = np.arange(n)
        diagonal = (block, block, block + 1)
        rows: list[tuple[np.ndarray, ...]] = [diagonal]
        cols: list[tuple[np.ndarray, ...]] = [diagonal]
        for stride, window in self.levels:
            step = max(1, stride // self.block_size)
            reach = n if window == -1 else min(max(1, window // self.block_size) // 2, n)
            query = block[::step]
            rows.append((query, query - reach, query + reach + 1))
            cols.append(_seen_by(block, step, reach))

        def side(intervals: list[tuple[np.ndarray, ...]]) -> _builder.Tables:
            table = np.concatenate([np.stack(parts, axis=1) for parts in intervals])
            return _builder.block_tables(num_tokens, self.block_size, [table])

        heads = [0] * num_heads
        return _builder.make_graph(num_tokens, heads, side(rows), side(cols), self.causal)


def _seen_by(key: np.ndarray, step: int, reach: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return intervals (key, begin, end) of the multiples of `step` that see each key block."""
    if step == 1:
        return key, key - reach, key + reach + 1
    first = -(-np.maximum(key - reach, 0) // step)
    last = np.minimum(key + reach, len(key) - 1) // step
    counts = last - first + 1
    each = np.repeat(key, counts)
    index = np.arange(len(each)) - np.repeat(counts.cumsum() - counts, counts)
    query = step * (np.repeat(first, counts) + index)
    return each, query, query + 1


def _level(level: object) -> tuple[int, int]:
    pair = _arguments.integers("levels", level, -1)
    if len(pair) != 2:
        raise _arguments.refusal("levels", pair, "pairs (stride, window)", "pass two integers")
    stride, window = pair
    if stride < 1:
        raise _arguments.refusal("levels", pair, "a stride >= 1", "pass a positive stride")
    if window < 1 and window != -1:
        raise _arguments.refusal(
            "levels", pair, "a window >= 1, or -1 for all", "pass one of the two"
        )
    return stride, window
