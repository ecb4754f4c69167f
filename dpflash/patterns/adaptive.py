"""Attention to the key blocks that score highest.

Letters: B samples, H query heads, T tokens, n blocks, K chosen blocks, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.kernels.tile_graph import UNBOUNDED, Side, TileGraph

from . import _arguments
from .base import Pattern

_SCORES_AT_A_TIME = 2**22


@dataclass(frozen=True, kw_only=True)
class Adaptive(Pattern):
    """Each block of queries sees its own block and the `keep - 1` blocks that score highest.

    The score of a block of keys for a block of queries is ``softmax_scale * mean(q) . mean(k)``,
    computed in each sample and head separately. The gate ``log sigmoid(score)`` is added to the
    attention scores of a chosen block, so that the choice has a gradient; the own block has no
    gate. If causal, a block of queries chooses among earlier blocks by the mean of the queries in
    the block *before* it, so no output depends on a later token.

    Args:
        block_size: tokens in a block, 16 to 256.
        keep: number of blocks that each block of queries sees, including its own block.
        causal: query t sees keys 0..t of the chosen blocks only.

    Raises:
        ValueError: an argument of the wrong type or range.
    """

    block_size: int = 64
    keep: int = 4
    causal: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "keep"):
            _arguments.store(self, **{name: _arguments.integer(name, getattr(self, name), 1)})
        _arguments.flag("causal", self.causal)
        if not 16 <= self.block_size <= 256:
            raise ValueError(
                f"block_size={self.block_size}: expected 16 to 256; 64 is a good start"
            )
        self._fix_key()

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        """Raise ValueError, since the keys that a query sees depend on q and k."""
        raise ValueError(
            f"{self!r} has no fixed mask, since it chooses blocks by q and k: call "
            "choose(q, k, softmax_scale), which returns the chosen blocks"
        )

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        raise ValueError(
            f"{self!r} has no fixed graph or picture, since it chooses blocks by q and k: call "
            "choose(q, k, softmax_scale), which returns the chosen blocks"
        )

    def edges(self, num_tokens: int, num_heads: int = 1) -> int:
        """Return the number of pairs (query, key) that see each other, summed over the heads.

        The number is exact if all blocks are full. It is an upper bound if the last block is
        short, since a query may choose this block in place of a full one.
        """
        self._check_size(num_tokens, num_heads)
        size = self.block_size
        blocks = -(-num_tokens // size)
        pairs = 0
        for block in range(blocks):
            rows = min(size, num_tokens - block * size)
            others = min(self.keep - 1, block if self.causal else blocks - 1)
            own = rows * (rows + 1) // 2 if self.causal else rows * rows
            elsewhere = block * size if self.causal else num_tokens - rows
            pairs += own + rows * min(size * others, elsewhere)
        return pairs * num_heads

    def choose(self, q: Tensor, k: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Choose the blocks that each block of queries sees.

        Args:
            q: `[B, H, T, D]`.
            k: `[B, G, T, D]`, G divides H.
            softmax_scale: factor of q k.

        Returns:
            blocks `[B, H, n, K]`, int32, with K = min(keep, n), padded with -1 if a query block
            sees fewer blocks; gates, of the same shape, float32, differentiable in q and k.
        """
        q_means = _block_means(q, self.block_size)
        k_means = _block_means(k, self.block_size)
        return self.choose_from_means(q_means, k_means, softmax_scale)

    def choose_from_means(
        self, q_means: Tensor, k_means: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Like `choose`, but from the means of blocks, q `[B, H, n, D]` and k `[B, G, n, D]`."""
        k_means = k_means.repeat_interleave(q_means.shape[1] // k_means.shape[1], dim=1)
        if self.causal:
            # Use the previous block's mean, since the own block's mean depends on later tokens.
            q_means = F.pad(q_means, (0, 0, 1, 0))[:, :, :-1]
        n = q_means.shape[2]
        own = torch.arange(n, device=q_means.device).expand(*q_means.shape[:3]).unsqueeze(3)
        if n == 0 or min(self.keep, n) == 1:
            return own.int(), torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        others = self._top(q_means.detach(), k_means.detach(), softmax_scale)
        index = others.clamp(min=0).flatten(2).unsqueeze(3).expand(-1, -1, -1, k_means.shape[3])
        chosen = k_means.gather(2, index).unflatten(2, others.shape[2:])
        scores = softmax_scale * (q_means.unsqueeze(3) * chosen).sum(4)
        gates = F.pad(F.logsigmoid(scores), (1, 0))
        return torch.cat((own, others), dim=3).int(), gates

    def _top(self, q_means: Tensor, k_means: Tensor, softmax_scale: float) -> Tensor:
        """Return the K - 1 best other blocks, `[B, H, n, K - 1]`, with -1 for missing blocks."""
        n = q_means.shape[2]
        kept = min(self.keep, n) - 1
        rows = max(1, _SCORES_AT_A_TIME // n)
        index = torch.arange(n, device=q_means.device)
        found = []
        for first in range(0, n, rows):
            # The rounding of a product may depend on the number of samples. Compute products in
            # float64 and round to float32, so that near-equal scores are equal in any batch.
            products = q_means[:, :, first : first + rows].double() @ k_means.double().mT
            scores = (softmax_scale * products).float()
            own = index[first : first + rows].unsqueeze(1)
            taken = index >= own if self.causal else index == own
            best = scores.masked_fill(taken, -torch.inf).topk(kept, dim=3)
            found.append(best.indices.masked_fill(best.values == -torch.inf, -1))
        return torch.cat(found, dim=2)


def _block_means(x: Tensor, block_size: int) -> Tensor:
    """Return each block's mean over its tokens, `[B, H, n, D]`, in float32 or wider."""
    tokens = x.shape[2]
    blocks = -(-tokens // block_size)
    padded = F.pad(x, (0, 0, 0, blocks * block_size - tokens))
    dtype = torch.promote_types(x.dtype, torch.float32)
    sums = padded.unflatten(2, (blocks, block_size)).sum(3, dtype=dtype)
    return sums / block_counts(tokens, block_size, x.device).unsqueeze(1)


def block_counts(num_tokens: int, block_size: int, device: torch.device) -> Tensor:
    """Return the number of tokens in each block, `[n]`, int64."""
    index = torch.arange(-(-num_tokens // block_size), device=device)
    return (num_tokens - index * block_size).clamp(max=block_size)


def runtime_graph(blocks: Tensor, gates: Tensor, pattern: Adaptive, num_tokens: int) -> TileGraph:
    """Build the tile graph of chosen blocks on their device, without synchronizing with it.

    `Adaptive.choose` returns blocks and gates, `[B, H, n, K]`. Run r of the query side has the log
    multiplicity ``gates.flatten()[r]``.
    """
    batch, heads, n, kept = blocks.shape
    device, size = blocks.device, pattern.block_size
    variants = torch.arange(batch * heads, device=device, dtype=torch.int32)
    borders = torch.arange(batch * heads + 1, device=device, dtype=torch.int32) * n
    starts = torch.arange(n, device=device).repeat(batch * heads) * size
    lengths = (num_tokens - starts).clamp(max=size)

    chosen = blocks.reshape(-1).long()
    none = chosen < 0
    lo, hi = (0 if pattern.causal else -UNBOUNDED), UNBOUNDED
    run_lengths = (num_tokens - chosen * size).clamp(max=size).masked_fill(none, 0)
    first_run = torch.arange(batch * heads * n, device=device) * kept
    rows = Side(
        _groups(starts, lengths, first_run, first_run + kept),
        _runs(chosen.clamp(min=0) * size, run_lengths, lo, hi),
        gates.detach().reshape(-1),
        borders,
        max_groups=n,
        max_length=min(size, num_tokens),
        runtime=True,
    )

    # The key side has the same pairs, sorted by (sample, head, key block).
    head = torch.arange(batch * heads, device=device).repeat_interleave(n * kept)
    order = torch.argsort(head * (n + 1) + chosen.masked_fill(none, n), stable=True)
    sorted_keys = (head * (n + 1) + chosen.masked_fill(none, n))[order]
    wanted = torch.arange(batch * heads, device=device).repeat_interleave(n) * (n + 1)
    wanted = wanted + torch.arange(n, device=device).repeat(batch * heads)
    first = torch.searchsorted(sorted_keys, wanted)
    end = torch.searchsorted(sorted_keys, wanted, right=True)
    query_block = (order // kept) % n
    cols = Side(
        _groups(starts, lengths, first, end),
        _runs(query_block * size, (num_tokens - query_block * size).clamp(max=size), -hi, -lo),
        gates.detach().reshape(-1)[order],
        borders,
        max_groups=n,
        max_length=min(size, num_tokens),
        runtime=True,
    )
    per_sample = variants.view(batch, heads)
    return TileGraph(num_tokens, num_tokens, rows, cols, per_sample, per_sample, pattern.causal)


def _groups(starts: Tensor, lengths: Tensor, first: Tensor, end: Tensor) -> Tensor:
    return torch.stack((starts, torch.ones_like(starts), lengths, first, end), dim=1).int()


def _runs(starts: Tensor, lengths: Tensor, lo: int, hi: int) -> Tensor:
    ones = torch.ones_like(starts)
    return torch.stack((starts, ones, lengths, lo * ones, hi * ones), dim=1).int()
