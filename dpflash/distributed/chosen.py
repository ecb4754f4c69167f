"""`Adaptive` patterns over several workers: all choose the same blocks, from the same means.

Letters: B samples, H query heads, G key/value heads, T tokens, n blocks, K kept blocks, D head
dim.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed.collectives import rank_in
from dpflash.kernels.tile_graph import TileGraph
from dpflash.patterns import Adaptive
from dpflash.patterns.adaptive import block_counts, runtime_graph

from .exchange_plan import Spread
from .once import differentiable_once
from .wire import all_reduce


class Choice(NamedTuple):
    """The blocks that each block of queries sees in the whole sequence, None where static.

    Attributes:
        blocks: `[B, H, n, K]`, int32.
        gates: `[B, H, n, K]`, differentiable.
    """

    blocks: Tensor | None
    gates: Tensor | None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, spread: Spread, group: ProcessGroup, scale: float) -> Choice:
        """What an `Adaptive` pattern chooses for the whole sequence, on every worker.

        Args:
            q: `[B, H, T_p, D]`, this worker's.
            k: `[B, G, T_p, D]`, this worker's.
            spread: who has which tokens.
            group: the workers.
            scale: factor of the scores.
        """
        pattern = spread.pattern
        if not isinstance(pattern, Adaptive):
            return cls(None, None)
        sums = torch.cat([_block_sums(x, pattern.block_size, spread, group) for x in (q, k)], 1)
        counts = block_counts(spread.length, pattern.block_size, q.device)
        means = _SumOverWorkers.apply(sums, group) / counts.unsqueeze(1)
        q_means, k_means = means.split((q.shape[1], k.shape[1]), dim=1)
        return cls(*pattern.choose_from_means(q_means, k_means, scale))

    @staticmethod
    def graph_of(blocks: Tensor | None, gates: Tensor | None, spread: Spread) -> TileGraph | None:
        """The graph of the whole sequence, None where the pattern is static."""
        if blocks is None or gates is None:
            return None
        assert isinstance(spread.pattern, Adaptive)
        return runtime_graph(blocks, gates, spread.pattern, spread.length)


class _SumOverWorkers(torch.autograd.Function):
    """x summed over the workers; its gradient, too, is that of all workers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group, "means of the blocks that are chosen from", "forward")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        what = "gradients of the blocks that are chosen from"
        return all_reduce(grad, ctx.group, what, "backward"), None


def _block_sums(x: Tensor, size: int, spread: Spread, group: ProcessGroup) -> Tensor:
    """`[B, H, n, D]`, float32 at least: what this worker's tokens add to the sum of each block."""
    blocks = -(-spread.length // size)
    dtype = torch.promote_types(x.dtype, torch.float32)
    # Zeros that depend on x, so that workers without tokens, too, take part in the backward.
    total = x[:, :, :0].sum(2, keepdim=True, dtype=dtype).expand(-1, -1, blocks, -1)
    for chunk in spread.chunks(rank_in(group)):
        first, front = divmod(chunk.start, size)
        count = -(-(front + chunk.length) // size)
        tokens = x[:, :, chunk.local : chunk.local + chunk.length]
        padded = F.pad(tokens, (0, 0, front, count * size - front - chunk.length))
        sums = padded.unflatten(2, (count, size)).sum(3, dtype=dtype)
        total = total + F.pad(sums, (0, 0, first, blocks - first - count))
    return total
