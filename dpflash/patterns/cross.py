"""Cross attention: every query sees every key of another sequence."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph, real_cpu_tensors


@functools.lru_cache(maxsize=64)
def cross_graph(
    num_queries: int, num_keys: int, num_heads: int, device: torch.device
) -> TileGraph:
    """The tile graph of dense attention from T queries to S keys, T and S being independent."""
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
