"""Blockwise attention over key/value shards: merge by log-sum-exp, accumulate gradients.

`BlockChoice` lets an `Adaptive` pattern choose the same key blocks on all ranks.

Shapes: B samples, H query heads, G key/value heads, T query tokens (T_p of this rank), S keys of
one shard, n blocks, K chosen blocks, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash.distributed.collectives import rank_in
from dpflash.kernels.attention import attention_backward, attention_forward, merge_
from dpflash.kernels.attention_reference import AttentionInputs, delta_of, needs_wide_o, sinks_grad
from dpflash.kernels.tile_graph import TileGraph
from dpflash.patterns import Adaptive
from dpflash.patterns.adaptive import block_counts, runtime_graph

from ..attn.backend import current_backend
from ..verification.second_order import differentiable_once
from .exchange import all_reduce
from .exchange_plan import Piece, ShardedPattern

Tensors = Sequence[Tensor | None]


class BlockChoice(NamedTuple):
    """The key blocks to which each query block of an `Adaptive` pattern attends."""

    blocks: Tensor | None  # `[B, H, n, K]`, int32, over the whole sequence
    gates: Tensor | None  # `[B, H, n, K]`, differentiable

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, sharded: ShardedPattern, group: ProcessGroup, scale: float
    ) -> BlockChoice:
        """Choose the blocks of an `Adaptive` pattern from means over all tokens.

        All ranks choose the same blocks. q `[B, H, T_p, D]` and k `[B, G, T_p, D]` are local.
        """
        pattern = sharded.pattern
        if not isinstance(pattern, Adaptive):
            return cls(None, None)
        sums = torch.cat([_block_sums(x, pattern.block_size, sharded, group) for x in (q, k)], 1)
        counts = block_counts(sharded.length, pattern.block_size, q.device)
        means = _SumOverRanks.apply(sums, group) / counts.unsqueeze(1)
        q_means, k_means = means.split((q.shape[1], k.shape[1]), dim=1)
        return cls(*pattern.choose_from_means(q_means, k_means, scale))

    @staticmethod
    def graph_of(
        blocks: Tensor | None, gates: Tensor | None, sharded: ShardedPattern
    ) -> TileGraph | None:
        """Return the tile graph of the whole sequence; None for static patterns."""
        if blocks is None or gates is None:
            return None
        assert isinstance(sharded.pattern, Adaptive)
        return runtime_graph(blocks, gates, sharded.pattern, sharded.length)


# A call holds up to 13 temporary tensors, each as large as a shard, besides its results o, dq, dk
# and dv. With eight parts, they take less than half the memory of the results.
_MOST_PARTS = 8
# Least bytes of keys in one exchange of a part. With smaller parts, the network's latency would
# dominate, and a GPU's multiprocessors would not all have queries.
_LEAST_BYTES = {"cpu": 2**20, "cuda": 2**23}


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """One call of attention on this rank; subclasses exchange keys and values between ranks."""

    sharded: ShardedPattern  # the pattern over the sharded sequence
    group: ProcessGroup  # the ranks that share the sequence
    scale: float  # softmax scale
    by_chunk: bool  # compute each pair of chunks separately, since ALiBi needs distances
    # attention backend of the forward and the backward
    backend: str = field(default_factory=current_backend)

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return rank_in(self.group)

    @property
    def most_rows(self) -> int:
        """Most key rows that two ranks exchange at once; a row is one token of one key head."""
        raise NotImplementedError

    def by_heads(
        self,
        compute: Callable[[Any, Tensors], Tensors],
        inputs: Tensors,
        shapes: Sequence[tuple[torch.Size, torch.dtype] | None],
    ) -> Tensors:
        """Return the results of ``compute(part, inputs)`` over all parts, joined along heads.

        A large call is computed in parts to save memory. Each part has whole groups of query heads
        that share a key/value head. A call with an `Adaptive` pattern is a single part.

        Args:
            compute: function of a part (a call with some of the heads) and its inputs.
            inputs: tensors `[B, H, ...]`; the second one is this rank's k.
            shapes: shapes and dtypes of the results `[B, H, ...]`.
        """
        k = inputs[1]
        assert k is not None
        count = self._number_of_parts(k)
        if count == 1:
            return compute(self, inputs)
        # Allocate the results first: among temporary tensors they would fragment the heap.
        wholes = [None if x is None else k.new_empty(x[0], dtype=x[1]) for x in shapes]
        heads = self.sharded.num_heads // count
        for i in range(count):
            part = replace(self, sharded=self.sharded.of_heads(i * heads, (i + 1) * heads))
            own = [None if x is None else x.chunk(count, 1)[i] for x in inputs]
            for whole, result in zip(wholes, compute(part, own), strict=True):
                if whole is not None and result is not None:
                    whole.chunk(count, 1)[i].copy_(result)
            result = None  # freed before the next part is computed
        return wholes

    def _number_of_parts(self, k: Tensor) -> int:
        if isinstance(self.sharded.pattern, Adaptive):
            return 1
        size = self.most_rows * k.shape[0] * k.shape[3] * k.element_size()
        most = min(_MOST_PARTS, size // _LEAST_BYTES.get(k.device.type, 2**23))
        return next((n for n in range(most, 1, -1) if k.shape[1] % n == 0), 1)


class _SumOverRanks(torch.autograd.Function):
    """Sums x over the ranks. The backward also sums the gradient over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(x, group, "block means of an Adaptive pattern", "forward")

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        operation = "gradients of the block means of an Adaptive pattern"
        return all_reduce(grad, ctx.group, operation, "backward"), None


def _block_sums(x: Tensor, size: int, sharded: ShardedPattern, group: ProcessGroup) -> Tensor:
    """Return the sum over this rank's tokens in each block, `[B, H, n, D]`, float32 or wider."""
    blocks = -(-sharded.length // size)
    dtype = torch.promote_types(x.dtype, torch.float32)
    # Zeros that depend on x, so that ranks without tokens take part in the backward too.
    total = x[:, :, :0].sum(2, keepdim=True, dtype=dtype).expand(-1, -1, blocks, -1)
    for chunk in sharded.chunks(rank_in(group)):
        first, front = divmod(chunk.start, size)
        count = -(-(front + chunk.length) // size)
        tokens = x[:, :, chunk.local : chunk.local + chunk.length]
        padded = F.pad(tokens, (0, 0, front, count * size - front - chunk.length))
        sums = padded.unflatten(2, (count, size)).sum(3, dtype=dtype)
        total = total + F.pad(sums, (0, 0, first, blocks - first - count))
    return total


class BlockwiseForward:
    """Computes the forward over key/value shards that are added one at a time.

    Sums are float32 or wider. q is `[B, H, T, D]`, sinks and slopes are `[B, H]` or None.
    """

    def __init__(
        self,
        q: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        scale: float,
        backend: str,
    ) -> None:
        self._q, self._slopes, self._options = q, slopes, (scale, slopes, backend)
        self._sinks = sinks
        self._merged: tuple[Tensor, Tensor] | None = None

    def add(self, pieces: Iterable[Piece], k: Tensor, v: Tensor) -> None:
        """Add attention over the pieces of a shard's k and v, `[B, G, S, D]`, to the results."""
        for piece in pieces:
            rows = piece.queries
            inputs = _inputs_of(piece, self._q, k, v, *self._options)
            partial = attention_forward(inputs, wide=True)
            if self._merged is None and self._sinks is None and _is_all(rows, self._q):
                self._merged = partial
            else:
                o, lse = self._results()
                merge_(o[:, :, rows], lse[:, :, rows], *partial)

    def _results(self) -> tuple[Tensor, Tensor]:
        if self._merged is None:
            dtype = torch.promote_types(self._q.dtype, torch.float32)
            lse = self._q.new_full(self._q.shape[:3], -math.inf, dtype=dtype)
            if self._sinks is not None:
                # A sink is an additional key for every query; its value is 0.
                lse.copy_(self._sinks.unsqueeze(2).expand_as(lse))
            self._merged = self._q.new_zeros(self._q.shape, dtype=dtype), lse
        return self._merged

    @property
    def o(self) -> Tensor:
        """This rank's output, `[B, H, T, D]`, dtype of q."""
        return self._results()[0].to(self._q.dtype)

    @property
    def wide_o(self) -> Tensor | None:
        """`o` in float32 or wider if the backward needs it (see `needs_wide_o`), else None."""
        wide = needs_wide_o(self._q, self._sinks, self._slopes)
        return self._results()[0] if wide else None

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the scores, `[B, H, T]`, in the accumulation dtype."""
        return self._results()[1]


class BlockwiseBackward:
    """Computes the backward over key/value shards that are added one at a time.

    `saved` holds q, k, v, o (or `BlockwiseForward.wide_o`), lse, sinks, slopes, blocks and gates.
    o and lse are the results over all shards. If do or dlse is None, it counts as 0.
    """

    def __init__(
        self,
        saved: Tensors,
        do: Tensor | None,
        dlse: Tensor | None,
        scale: float,
        backend: str,
    ) -> None:
        q, _, _, o, lse, self._sinks, self._slopes, _, self._gates = saved
        assert q is not None and o is not None and lse is not None
        self._q, self._o, self._lse, self._options = q, o, lse, (scale, self._slopes, backend)
        self._do = torch.zeros_like(o, dtype=q.dtype) if do is None else do
        self._dlse = dlse
        self._dq: Tensor | None = None
        self._dslopes = torch.zeros_like(lse)  # [B, H, T]
        self._druns = lse.new_zeros(0 if self._gates is None else self._gates.numel())

    def add(self, pieces: Iterable[Piece], k: Tensor, v: Tensor) -> list[Tensor]:
        """Add a shard's part of dq, and return the shard's dk and dv in float32 or wider."""
        dkv: list[Tensor] | None = None
        for piece in pieces:
            rows, columns = piece.queries, piece.keys
            inputs = _inputs_of(piece, self._q, k, v, *self._options)
            grads = attention_backward(
                self._do[:, :, rows],
                None if self._dlse is None else self._dlse[:, :, rows],
                self._o[:, :, rows],
                self._lse[:, :, rows],
                inputs,
                run_grads=self._gates is not None,
                wide=True,
            )
            if self._dq is None and _is_all(rows, self._q):
                self._dq = grads.dq
            else:
                self._sum_of_dq()[:, :, rows] += grads.dq
            # If one piece covers the whole shard, its gradient is the sum: avoid a copy.
            if dkv is None and _is_all(columns, k):
                dkv = [grads.dk.contiguous(), grads.dv.contiguous()]
            else:
                dkv = self._zeros(k, v) if dkv is None else dkv
                dkv[0][:, :, columns] += grads.dk
                dkv[1][:, :, columns] += grads.dv
            if grads.dslopes is not None:
                self._dslopes[:, :, rows] += grads.dslopes
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
        """Return gradients of q, k, v, sinks, slopes, blocks and gates, in the inputs' dtypes."""
        sinks, slopes, gates = self._sinks, self._slopes, self._gates
        dsinks = None
        if sinks is not None:
            delta = delta_of(self._do, self._o, self._lse, self._dlse)
            dsinks = sinks_grad(sinks, self._lse, delta).sum(2).to(sinks.dtype)
        return (
            self._sum_of_dq().to(self._q.dtype),
            None if dkv is None else dkv[0].to(k.dtype),
            None if dkv is None else dkv[1].to(v.dtype),
            dsinks,
            None if slopes is None else self._dslopes.sum(2).to(slopes.dtype),
            None,
            None if gates is None else self._druns.view(gates.shape).to(gates.dtype),
        )


def _inputs_of(
    piece: Piece,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    slopes: Tensor | None,
    backend: str,
) -> AttentionInputs:
    """Return the attention inputs of a piece: slices of this rank's q and of a shard's k and v."""
    rows, columns = piece.queries, piece.keys
    parts = (q[:, :, rows], k[:, :, columns], v[:, :, columns])
    return AttentionInputs(*parts, piece.graph, scale, slopes=slopes, backend=backend)


def _is_all(tokens: slice, x: Tensor) -> bool:
    return (tokens.start, tokens.stop) == (0, x.shape[2])
