"""Attention of some queries, key shard by key shard: what the shards give is merged or summed.

Letters: B samples, H query heads, G key/value heads, T query tokens, S keys of one shard, R runs,
D head dim; P and C chunks of queries and of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from dpflash.kernels.attention import attention_backward, attention_forward
from dpflash.kernels.merge import merge_
from dpflash.kernels.tile_graph import TileGraph

from .chosen import Choice
from .plan import Piece, Spread


class Attending:
    """The forward pass over the shards of keys, in the dtype of the sums.

    Args:
        q: `[B, H, T, D]`.
        sinks: `[B, H]` or None.
        slopes: `[B, H]` or None.
        scale: factor of the scores.
    """

    def __init__(
        self, q: Tensor, sinks: Tensor | None, slopes: Tensor | None, scale: float
    ) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self._q, self._slopes, self._scale = q, slopes, scale
        self._o = q.new_zeros(q.shape, dtype=dtype)
        self.lse = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
        if sinks is not None:
            # One more key for every query, whose value is 0.
            self.lse.copy_(sinks.unsqueeze(2).expand_as(self.lse))

    def add(self, pieces: Iterable[Piece], k: Tensor, v: Tensor) -> None:
        """Merges what the pieces give over a shard's k and v `[B, G, S, D]`."""
        for piece in pieces:
            rows, columns = piece.queries, piece.keys
            found = attention_forward(
                self._q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                piece.graph,
                self._scale,
                slopes=self._slopes,
                wide=True,
            )
            merge_(self._o[:, :, rows], self.lse[:, :, rows], *found)

    @property
    def o(self) -> Tensor:
        """`[B, H, T, D]`, dtype of q."""
        return self._o.to(self._q.dtype)


class Differentiating:
    """The backward pass over the shards of keys, with the o and lse over all of them.

    Args:
        saved: q, k, v, o, lse, sinks, slopes, blocks and gates of the forward pass.
        do: gradient of o, None for 0.
        dlse: gradient of lse, None for 0.
        scale: factor of the scores.
    """

    def __init__(
        self,
        saved: tuple[Tensor | None, ...],
        do: Tensor | None,
        dlse: Tensor | None,
        scale: float,
    ) -> None:
        q, _, _, o, lse, self._sinks, self._slopes, self._blocks, self._gates = saved
        assert q is not None and o is not None and lse is not None
        self._q, self._o, self._lse, self._scale = q, o, lse, scale
        self._do = torch.zeros_like(o) if do is None else do
        self._dlse = dlse
        self._dq = q.new_zeros(q.shape, dtype=lse.dtype)
        self._dslopes = lse.new_zeros(q.shape[:2])
        self._druns = lse.new_zeros(0 if self._gates is None else self._gates.numel())

    def runtime_graph(self, spread: Spread) -> TileGraph | None:
        """That of the whole sequence, of a pattern that chose."""
        return Choice.graph_of(self._blocks, self._gates, spread)

    def add(self, pieces: Iterable[Piece], k: Tensor, v: Tensor, dkv: Tensor) -> None:
        """Adds what the pieces give; to `dkv`, `[2, B, G, S, D]`, for the shard's k and v."""
        for piece in pieces:
            rows, columns = piece.queries, piece.keys
            grads = attention_backward(
                self._do[:, :, rows],
                None if self._dlse is None else self._dlse[:, :, rows],
                self._q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                self._o[:, :, rows],
                self._lse[:, :, rows],
                piece.graph,
                self._scale,
                slopes=self._slopes,
                run_grads=self._gates is not None,
                wide=True,
            )
            self._dq[:, :, rows] += grads.dq
            dkv[0][:, :, columns] += grads.dk
            dkv[1][:, :, columns] += grads.dv
            if grads.dslopes is not None:
                self._dslopes += grads.dslopes
            if grads.dlog_multiplicity is not None:
                by_chunk = (piece.chunks[0], len(self._druns), piece.chunks[1])
                self._druns += grads.dlog_multiplicity.view(by_chunk).sum((0, 2))

    def results(self, dkv: Tensor | None, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, sinks, slopes, blocks and gates, rounded to their dtypes."""
        sinks, slopes, gates = self._sinks, self._slopes, self._gates
        return (
            self._dq.to(self._q.dtype),
            None if dkv is None else dkv[0].to(k.dtype),
            None if dkv is None else dkv[1].to(v.dtype),
            None if sinks is None else self._sink_gradients(sinks),
            None if slopes is None else self._dslopes.to(slopes.dtype),
            None,
            None if gates is None else self._druns.view(gates.shape).to(gates.dtype),
        )

    def _sink_gradients(self, sinks: Tensor) -> Tensor:
        """`[B, H]`: ``-sum_i e^(sink - lse_i) (rowsum(do o) - dlse)``."""
        dtype = self._lse.dtype
        blind = self._lse == -math.inf
        delta = (self._do.to(dtype) * self._o.to(dtype)).sum(3)
        if self._dlse is not None:
            delta = delta - self._dlse
        p = (sinks.to(dtype).unsqueeze(2) - self._lse.masked_fill(blind, math.inf)).exp()
        return -(p * delta.masked_fill(blind, 0.0)).sum(2).to(sinks.dtype)
