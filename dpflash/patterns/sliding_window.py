"""Attention to nearby keys, with global tokens that see all tokens and are seen by all tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dpflash.kernels.tile_graph import UNBOUNDED, TileGraph

from . import _arguments, _builder
from .base import Pattern


@dataclass(frozen=True, kw_only=True, repr=False)
class SlidingWindow(Pattern):
    """Query i sees key j if ``i - left <= j <= i + right``, or if i or j is a global token.

    Source: Beltagy et al., Longformer, arXiv:2004.05150, section 3.1.

    Args:
        window: number of tokens to each side, 0 or more; with 0 each token sees only itself. Pass
            either window, or both left and right.
        left: number of earlier tokens that a query sees, 0 or more.
        right: number of later tokens that a query sees, 0 or more; ignored if causal.
        global_tokens: number of first tokens that see all tokens and are seen by all tokens.
        causal: no query sees a key later than its own position, global or not.

    Raises:
        ValueError: an argument of the wrong type or below 0, window together with left or right,
            or only one of left and right.
    """

    window: int | None = None
    left: int | None = None
    right: int | None = None
    global_tokens: int = 0
    causal: bool = False

    def __post_init__(self) -> None:
        window, left, right = self.window, self.left, self.right
        if (left is None) != (window is not None) or (left is None) != (right is None):
            raise _arguments.refusal(
                "window",
                window,
                f"either window or both of left={left} and right={right}",
                "pass for example window=256 alone, or left=256 and right=0",
            )
        if window is None:
            left = _arguments.integer("left", left, 0)
            right = _arguments.integer("right", right, 0)
            if left == right:  # equal patterns have equal fields
                window, left, right = left, None, None
        else:
            window = _arguments.integer("window", window, 0)
        global_tokens = _arguments.integer("global_tokens", self.global_tokens, 0)
        _arguments.store(self, window=window, left=left, right=right, global_tokens=global_tokens)
        _arguments.flag("causal", self.causal)
        self._fix_key()

    def __repr__(self) -> str:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        shown = (f"{name}={value}" for name, value in named.items() if value is not None)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def reach(self) -> tuple[int, int]:
        """The numbers of earlier and of later tokens that a query sees, without global tokens."""
        left = self.window if self.left is None else self.left
        right = self.window if self.right is None else self.right
        assert left is not None and right is not None
        return left, 0 if self.causal else right

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        i, j = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None, :]
        left, right = self.reach
        near = (i - j <= left) & (j - i <= right)
        seen = near | (i < self.global_tokens) | (j < self.global_tokens)
        if self.causal:
            seen = seen & (i >= j)
        return seen.float().repeat(num_heads, 1, 1)

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        first = min(self.global_tokens, num_tokens)
        rest = num_tokens - first
        left, right = (min(side, UNBOUNDED) for side in self.reach)
        groups = [(0, 1, first, 1), (first, 1, rest, 2)]

        def side(lo: int, hi: int) -> _builder.Tables:
            runs = [
                (0, 1, num_tokens, -UNBOUNDED, UNBOUNDED),
                (0, 1, first, -UNBOUNDED, UNBOUNDED),
                (first, 1, rest, lo, hi),
            ]
            return _builder.tables(groups, runs)

        rows, cols = side(-right, left), side(-left, right)
        return _builder.make_graph(num_tokens, [0] * num_heads, rows, cols, self.causal)
