"""Block-sparse attention: local, strided, global and random blocks, or explicit lists of them.

Letters: T tokens, H heads, n blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpflash.kernels.tile_graph import TileGraph

from . import _arguments, _builder
from .base import Pattern

_Lists = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class BlockSparse(Pattern):
    """Each block of queries sees the blocks of keys that rules or explicit lists select.

    With ``n = ceil(T / block_size)``, query block i sees key block j if at least one condition
    holds: ``|i - j| <= local_blocks``; ``(i - j) % stride_blocks == 0``; i or j is one of the
    first `global_blocks` blocks; j is among the random blocks of i. With `block_lists`, query
    block i sees exactly the listed blocks.

    Source: Child et al., arXiv:1904.10509 (strided); Zaheer et al., BigBird, arXiv:2007.14062.

    Args:
        block_size: tokens in a block; the last block may have fewer.
        local_blocks: number of neighboring blocks to each side, in addition to the own block.
        stride_blocks: the stride in blocks; 0 means no strided blocks.
        global_blocks: number of first blocks that see all blocks and are seen by all blocks.
        random_blocks: number of distinct blocks drawn for each head and block of queries, among
            all n blocks or, if causal, among earlier blocks (all of these if there are fewer).
        seed: seed of the random blocks, which depend on seed, head, n and causal only; 0 or more.
        causal: no query sees a key later than its own position.
        block_lists: for each block of queries, the list of the indices of blocks that it sees,
            which may be empty. Pass one such list of lists for all heads, or one for each head.
            With block_lists, local_blocks to random_blocks raise if above their defaults.

    Raises:
        ValueError: an argument of the wrong type or range, block_lists together with rules, or
            block_lists without any visible pair of blocks.
    """

    block_size: int
    local_blocks: int = 1
    stride_blocks: int = 0
    global_blocks: int = 0
    random_blocks: int = 0
    seed: int = 0
    causal: bool = False
    block_lists: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        _arguments.store(self, block_size=_arguments.integer("block_size", self.block_size, 1))
        for name in ("local_blocks", "stride_blocks", "global_blocks", "random_blocks", "seed"):
            _arguments.store(self, **{name: _arguments.integer(name, getattr(self, name), 0)})
        _arguments.flag("causal", self.causal)
        if self.block_lists is not None:
            most = {"local_blocks": 1, "stride_blocks": 0, "global_blocks": 0, "random_blocks": 0}
            for name, number in most.items():
                if (value := getattr(self, name)) > number:
                    expected = f"the default {number}, since block_lists is passed"
                    raise _arguments.refusal(name, value, expected, "leave it out")
            _arguments.store(self, block_lists=_tuples(self.block_lists))
            self._check_lists()
        self._fix_key()

    def _check_lists(self) -> None:
        of_heads = self._lists()
        num_blocks = len(of_heads[0]) if of_heads else 0
        for lists in of_heads:
            if len(lists) != num_blocks:
                raise _arguments.refusal(
                    "block_lists",
                    lists,
                    f"{num_blocks} lists for each head",
                    "list the same number of query blocks for each head",
                )
            for blocks in lists:
                _check_list(blocks, num_blocks)
        if not any(
            j <= i or not self.causal
            for lists in of_heads
            for i, blocks in enumerate(lists)
            for j in blocks
        ):
            raise _arguments.refusal(
                "block_lists", self.block_lists, "a visible block", "list the visible blocks"
            )

    def _lists(self) -> tuple[_Lists, ...]:
        assert self.block_lists is not None
        return tuple(self.block_lists) if self._is_per_head() else (tuple(self.block_lists),)

    def _is_per_head(self) -> bool:
        lists = self.block_lists or ()
        return any(isinstance(entry, tuple) for row in lists for entry in row)

    def _check_size(self, num_tokens: int, num_heads: int) -> None:
        super()._check_size(num_tokens, num_heads)
        if self.block_lists is None:
            return
        of_heads = self._lists()
        if self._is_per_head() and len(of_heads) != num_heads:
            raise _arguments.refusal(
                "num_heads", num_heads, f"{len(of_heads)}, as in block_lists", "list each head"
            )
        if -(-num_tokens // self.block_size) != len(of_heads[0]):
            raise _arguments.refusal(
                "num_tokens",
                num_tokens,
                f"{len(of_heads[0])} blocks of {self.block_size} tokens, as in block_lists",
                "list each block of queries",
            )

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        num_blocks = -(-num_tokens // self.block_size)
        blocks = torch.stack([self._block_mask(num_blocks, head) for head in range(num_heads)])
        block = torch.arange(num_tokens) // self.block_size
        mask = blocks[:, block][:, :, block].float()
        return mask.tril() if self.causal else mask

    def _block_mask(self, num_blocks: int, head: int) -> Tensor:
        """Return which query block sees which key block, `[n, n]`, by testing every pair."""
        i, j = torch.arange(num_blocks)[:, None], torch.arange(num_blocks)[None, :]
        seen = torch.zeros(num_blocks, num_blocks, dtype=torch.bool)
        if self.block_lists is not None:
            lists = self._lists()[head if self._is_per_head() else 0]
            for row, blocks in enumerate(lists):
                seen[row, list(blocks)] = True
            return seen
        seen |= (i - j).abs() <= self.local_blocks
        if self.stride_blocks:
            seen |= (i - j) % self.stride_blocks == 0
        seen |= (i < self.global_blocks) | (j < self.global_blocks)
        for row, column in self._random_pairs(num_blocks, head).tolist():
            seen[row, column] = True
        return seen

    def _random_pairs(self, num_blocks: int, head: int) -> np.ndarray:
        """Draw random pairs (query block, key block), `[K, 2]`, by Floyd's sampling algorithm."""
        row = np.arange(num_blocks)
        available = row if self.causal else np.full(num_blocks, num_blocks)
        wanted = np.minimum(min(self.random_blocks, num_blocks), available)
        rng = np.random.default_rng((self.seed, head))
        drawn = np.full((num_blocks, int(wanted.max(initial=0))), -1)
        for step in range(drawn.shape[1]):
            last = available - wanted + step
            block = (rng.random(num_blocks) * (last + 1)).astype(np.int64)
            block = np.where((drawn[:, :step] == block[:, None]).any(1), last, block)
            drawn[:, step] = np.where(step < wanted, block, -1)
        pairs = np.stack((np.broadcast_to(row[:, None], drawn.shape), drawn), axis=2)
        return pairs[drawn >= 0]

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        num_blocks = -(-num_tokens // self.block_size)
        differ = self.random_blocks > 0 or self._is_per_head()
        variants = range(num_heads if differ else 1)
        shared = self._rules(num_blocks)
        chosen = [self._pairs(num_blocks, variant) for variant in variants]

        def side(row: int, column: int) -> _builder.Tables:
            singles = [(p[:, row], p[:, column], p[:, column] + 1) for p in chosen]
            intervals = [np.concatenate((shared, np.stack(p, axis=1))) for p in singles]
            return _builder.block_tables(num_tokens, self.block_size, intervals)

        heads = list(variants) if differ else [0] * num_heads
        return _builder.make_graph(num_tokens, heads, side(0, 1), side(1, 0), self.causal)

    def _pairs(self, num_blocks: int, head: int) -> np.ndarray:
        """Return the random or listed pairs of blocks, `[K, 2]`; they may be asymmetric."""
        if self.block_lists is None:
            return self._random_pairs(num_blocks, head)
        lists = self._lists()[head]
        pairs = [(i, j) for i, blocks in enumerate(lists) for j in blocks]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def _rules(self, num_blocks: int) -> np.ndarray:
        """Return the intervals (row, begin, end), `[K, 3]`, of local, strided, global blocks."""
        if self.block_lists is not None:
            return np.zeros((0, 3), dtype=np.int64)
        row = np.arange(num_blocks)
        local, first = min(self.local_blocks, num_blocks), min(self.global_blocks, num_blocks)
        intervals = [
            (row, row - local, row + local + 1),
            (row, 0 * row, np.where(row < first, num_blocks, first)),
        ]
        if self.stride_blocks == 1:
            intervals.append((row, 0 * row, 0 * row + num_blocks))
        elif 0 < self.stride_blocks < num_blocks:
            firsts = row % self.stride_blocks
            counts = -((firsts - num_blocks) // self.stride_blocks)
            each = np.repeat(row, counts)
            index = np.arange(len(each)) - np.repeat(counts.cumsum() - counts, counts)
            column = firsts[each] + self.stride_blocks * index
            intervals.append((each, column, column + 1))
        return np.concatenate([np.stack(parts, axis=1) for parts in intervals])


def _tuples(lists: object) -> tuple[Any, ...]:
    rows = [_arguments.items("block_lists", row) for row in _arguments.items("block_lists", lists)]
    if not any(hasattr(entry, "__len__") for row in rows for entry in row):
        return tuple(_arguments.integers("block_lists", row, 0) for row in rows)
    return tuple(tuple(_arguments.integers("block_lists", list_, 0) for list_ in h) for h in rows)


def _check_list(blocks: tuple[int, ...], num_blocks: int) -> None:
    if len(set(blocks)) != len(blocks):
        raise _arguments.refusal(
            "block_lists", blocks, "each block once", "drop the repeated indices"
        )
    if blocks and max(blocks) >= num_blocks:
        raise _arguments.refusal(
            "block_lists",
            blocks,
            f"indices below {num_blocks}, the number of query blocks",
            "drop the larger indices",
        )
