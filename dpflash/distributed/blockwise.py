"""Attention of some queries, key shard by key shard: what the shards give is merged or summed.

Letters: B samples, H query heads, G key/value heads, T query tokens, S keys of one shard, R runs,
D head dim; P and C chunks of queries and of keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dpflash.kernels.attention import attention_backward, attention_forward
from dpflash.kernels.merge import merge_
from dpflash.kernels.tile_graph import TileGraph

from .chosen import Choice
from .exchange_plan import Piece, Spread


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
        self._q, self._slopes, self._scale = q, slopes, scale
        self._sinks = sinks
        self._merged: tuple[Tensor, Tensor] | None = None

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
            if self._merged is None and self._sinks is None and _is_all(rows, self._q):
                self._merged = found
            else:
                o, lse = self._results()
                merge_(o[:, :, rows], lse[:, :, rows], *found)

    def _results(self) -> tuple[Tensor, Tensor]:
        """What was merged so far, in the dtype of the sums."""
        if self._merged is None:
            dtype = torch.promote_types(self._q.dtype, torch.float32)
            lse = self._q.new_full(self._q.shape[:3], -math.inf, dtype=dtype)
            if self._sinks is not None:
                # One more key for every query, whose value is 0.
                lse.copy_(self._sinks.unsqueeze(2).expand_as(lse))
            self._merged = self._q.new_zeros(self._q.shape, dtype=dtype), lse
        return self._merged

    @property
    def o(self) -> Tensor:
        """`[B, H, T, D]`, dtype of q."""
        return self._results()[0].to(self._q.dtype)

    @property
    def lse(self) -> Tensor:
        """`[B, H, T]`, in the dtype of the sums."""
        return self._results()[1]


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
        self._dq: Tensor | None = None
        self._dslopes = lse.new_zeros(q.shape[:2])
        self._druns = lse.new_zeros(0 if self._gates is None else self._gates.numel())

    def runtime_graph(self, spread: Spread) -> TileGraph | None:
        """That of the whole sequence, of a pattern that chose."""
        return Choice.graph_of(self._blocks, self._gates, spread)

    def add(self, pieces: Iterable[Piece], k: Tensor, v: Tensor) -> list[Tensor]:
        """Adds what the pieces give to the queries' gradient.

        Returns:
            `[B, G, S, D]` twice, contiguous, in the dtype of the sums: gradients of the shard's k
            and v.
        """
        dkv: list[Tensor] | None = None
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
            if self._dq is None and _is_all(rows, self._q):
                self._dq = grads.dq
            else:
                self._sum_of_dq()[:, :, rows] += grads.dq
            # What one piece gives for a whole shard is the sum, without a copy of it.
            if dkv is None and _is_all(columns, k):
                dkv = [grads.dk.contiguous(), grads.dv.contiguous()]
            else:
                dkv = self._zeros(k, v) if dkv is None else dkv
                dkv[0][:, :, columns] += grads.dk
                dkv[1][:, :, columns] += grads.dv
            if grads.dslopes is not None:
                self._dslopes += grads.dslopes
            if grads.dlog_multiplicity is not None:
                by_chunk = (piece.chunks[0], len(self._druns), piece.chunks[1])
                self._druns += grads.dlog_multiplicity.view(by_chunk).sum((0, 2))
        return self._zeros(k, v) if dkv is None else dkv

    def _zeros(self, *like: Tensor) -> list[Tensor]:
        return [x.new_zeros(x.shape, dtype=self._lse.dtype) for x in like]

    def _sum_of_dq(self) -> Tensor:
        if self._dq is None:
            (self._dq,) = self._zeros(self._q)
        return self._dq

    def results(
        self, dkv: Sequence[Tensor] | None, k: Tensor, v: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v, sinks, slopes, blocks and gates, rounded to their dtypes."""
        sinks, slopes, gates = self._sinks, self._slopes, self._gates
        return (
            self._sum_of_dq().to(self._q.dtype),
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


def _is_all(tokens: slice, x: Tensor) -> bool:
    """Whether these are all tokens of x `[B, H, T, D]`."""
    return (tokens.start, tokens.stop) == (0, x.shape[2])
