"""Attention to the neighborhood, with global tokens that see all and are seen by all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpflash.kernels.tile_graph import UNBOUNDED, TileGraph

from . import _arguments, _builder
from .base import Pattern


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Pattern):
    """Query i sees key j where ``|i - j| <= window``, or i or j is a global token.

    Source: Beltagy et al., Longformer, arXiv:2004.05150, section 3.1.

    Args:
        window: tokens to each side, 0 or more; with 0 each token sees only itself.
        global_tokens: the first so many tokens see all and are seen by all.
        causal: no query sees a key later than its own position, global or not.

    Raises:
        ValueError: an argument of the wrong type or below 0.
    """

    window: int
    global_tokens: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        window = _arguments.integer("window", self.window, 0)
        global_tokens = _arguments.integer("global_tokens", self.global_tokens, 0)
        _arguments.store(self, window=window, global_tokens=global_tokens)
        _arguments.flag("causal", self.causal)
        self._fix_key()

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        i, j = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None, :]
        seen = ((i - j).abs() <= self.window) | (i < self.global_tokens) | (j < self.global_tokens)
        if self.causal:
            seen = seen & (i >= j)
        return seen.float().repeat(num_heads, 1, 1)

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        first = min(self.global_tokens, num_tokens)
        window, rest = min(self.window, UNBOUNDED), num_tokens - first
        groups = [(0, 1, first, 1), (first, 1, rest, 2)]
        runs = [
            (0, 1, num_tokens, -UNBOUNDED, UNBOUNDED),
            (0, 1, first, -UNBOUNDED, UNBOUNDED),
            (first, 1, rest, -window, window),
        ]
        rows = _builder.tables(groups, runs)
        return _builder.make_graph(num_tokens, [0] * num_heads, rows, rows, self.causal)
