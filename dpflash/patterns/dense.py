"""Dense attention: every query sees every key, or every key up to its own position."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dpflash.kernels.capture import kept_in_captures
from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph, real_cpu_tensors

from . import _arguments, _builder
from .base import Pattern


@dataclass(frozen=True, kw_only=True)
class Dense(Pattern):
    """Query i sees every key or, if causal, the keys j <= i.

    Args:
        causal: no query sees a key later than its own position.

    Raises:
        ValueError: causal is not a bool.
    """

    causal: bool = False

    def __post_init__(self) -> None:
        _arguments.flag("causal", self.causal)
        self._fix_key()

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        mask = torch.ones(num_heads, num_tokens, num_tokens)
        return mask.tril() if self.causal else mask

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        group, run = (0, 1, num_tokens, 1), (0, 1, num_tokens, -UNBOUNDED, UNBOUNDED)
        rows = _builder.tables([group], [run])
        return _builder.make_graph(num_tokens, [0] * num_heads, rows, rows, self.causal)


@kept_in_captures
@functools.lru_cache(maxsize=64)
def cross_graph(
    num_queries: int, num_keys: int, num_heads: int, device: torch.device
) -> TileGraph:
    """Return the tile graph of dense attention from T queries to S keys, for any T and S."""
    with real_cpu_tensors():
        variants = torch.zeros(num_heads, dtype=torch.int32)
        rows, cols = _side(num_queries, num_keys), _side(num_keys, num_queries)
    return TileGraph(num_queries, num_keys, rows, cols, variants, variants, False).to(device)


def _side(num_rows: int, num_columns: int) -> Side:
    def table(*values: int) -> Tensor:
        return torch.tensor([values], dtype=torch.int32)

    return Side(
        groups=table(0, 1, num_rows, 0, 1),
        runs=table(0, 1, num_columns, -UNBOUNDED, UNBOUNDED),
        log_multiplicity=torch.zeros(1, dtype=torch.float64),
        variants=table(0, 1)[0],
        max_groups=1,
        max_length=num_rows,
    )
