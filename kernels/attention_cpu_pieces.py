"""Runs pieces of a tile graph on the CPU, for `attention_cpu`: what goes in, and the operations.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim;
of pieces n, L, k and C as in `attention_cpu_plan.Batch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_cpu_plan import CAUSAL, FULL, MASKED, Batch, plan
from .tile_graph import TileGraph

# Most elements that are gathered at a time, unless a single piece has more.
_GATHERED = 2**21
# Most scores at a time in plain PyTorch, unless a single row has more.
_SCORES = 2**20


class Tokens(NamedTuple):
    """The inputs, in the dtype of the computation."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, D]


class Upstream(NamedTuple):
    """What the backward gets, in the dtype of the computation."""

    do: Tensor  # [B, H, T, D]
    o: Tensor  # [B, H, T, D]
    lse: Tensor  # [B, H, T, 1], +inf for rows without key: their p = e^(s - inf) = 0


Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some pieces of a batch, each in one head; or one piece in all heads.

    Attributes:
        batch: whose pieces.
        rows: `[n, L]`, in q flattened over samples and heads; or a slice of q's tokens.
        columns: `[n, k * C]`, in k flattened likewise; or a slice of k's tokens.
        pieces: `[n]`, index into the batch.
        heads: `[n]`, b * H + h.
        begin, end: the pieces' rows that take part.
    """

    batch: Batch
    rows: Tensor | slice
    columns: Tensor | slice
    pieces: Tensor
    heads: Tensor
    begin: int
    end: int

    @property
    def log_multiplicity(self) -> Tensor:
        """`[n, 1, 1, 1]`."""
        return self.batch.log_multiplicity[self.pieces].view(-1, 1, 1, 1)


@dataclass(frozen=True, eq=False)
class Work:
    """Which pieces run in which heads.

    Attributes:
        parts: batches, and `[B, H]`, the variant of each head, -1 where they are not for it.
        sizes: H, G, T, S, D.
        plain: pieces run in plain PyTorch, see `plain_forward`.
    """

    parts: list[tuple[Tensor, list[Batch]]]
    sizes: tuple[int, int, int, int, int]
    plain: bool

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, graph: TileGraph, key_range: Tensor | None, plain: bool
    ) -> Work:
        """The work for these shapes, samples with one key range together."""
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
        variants = graph.row_variants.long().cpu().expand(q.shape[:2])
        if key_range is None or q.shape[0] == 0:
            return cls([(variants, plan(graph))], sizes, plain)
        ranges = [(max(begin, 0), min(end, k.shape[2])) for begin, end in key_range.tolist()]
        parts = []
        for clip in sorted(set(ranges)):
            concerned = torch.tensor([clip == other for other in ranges])
            parts.append((variants.where(concerned.unsqueeze(1), -1), plan(graph, clip)))
        return cls(parts, sizes, plain)

    def takes_slices(self, variants: Tensor, batch: Batch) -> bool:
        """The batch is one piece that all heads share, so nothing need be gathered."""
        single = batch.column_start.numel() == 1 and not self.plain
        return single and variants.numel() > 0 and bool((variants == batch.variant).all())

    def gathers(self) -> bool:
        """Some batch indexes tokens flattened over samples and heads."""
        pairs = [(variants, batch) for variants, batches in self.parts for batch in batches]
        return not all(self.takes_slices(*pair) for pair in pairs)

    def whole(self) -> Chunk | None:
        """The only piece, where it has all rows and columns; its result is the result."""
        if len(self.parts) != 1 or len(self.parts[0][1]) != 1:
            return None
        variants, (batch,) = self.parts[0]
        covers = (batch.rows, batch.columns) == self.sizes[2:4]
        return _sliced(batch) if covers and self.takes_slices(variants, batch) else None

    def chunks(self) -> Iterator[Chunk]:
        """All pieces; no row is twice in a chunk."""
        for variants, batches in self.parts:
            heads = _HeadsByVariant.of(variants)
            for batch in batches:
                if self.takes_slices(variants, batch):
                    yield _sliced(batch)
                else:
                    yield from self._gathered(batch, heads)

    def _gathered(self, batch: Batch, by_variant: _HeadsByVariant) -> Iterator[Chunk]:
        pieces, heads = by_variant.instances(batch.variant)
        num_heads, num_groups, num_rows, num_columns, dim = self.sizes
        seen = batch.column_start.shape[1] * batch.columns
        height = min(batch.rows, max(_SCORES // seen, 1)) if self.plain else batch.rows
        at_once = _GATHERED // ((height + seen) * dim)
        if self.plain:
            at_once = min(at_once, _SCORES // (height * seen))
        kv_heads = heads // num_heads * num_groups
        kv_heads += heads % num_heads // (num_heads // num_groups)
        column_offsets = batch.column_stride * torch.arange(batch.columns)
        for part in torch.arange(len(pieces)).split(max(at_once, 1)):
            piece, head, kv_head = pieces[part], heads[part], kv_heads[part]
            columns = (batch.column_start[piece].unsqueeze(2) + column_offsets).flatten(1)
            columns += (kv_head * num_columns).unsqueeze(1)
            first = (head * num_rows + batch.row_start[piece]).unsqueeze(1)
            for begin in range(0, batch.rows, height):
                end = min(begin + height, batch.rows)
                rows = first + batch.row_stride * torch.arange(begin, end)
                yield Chunk(batch, rows, columns, piece, head, begin, end)


class _HeadsByVariant(NamedTuple):
    """The heads b * H + h in the order of their variants."""

    heads: Tensor
    begin: Tensor  # [V]
    counts: Tensor  # [V]

    @classmethod
    def of(cls, variants: Tensor) -> _HeadsByVariant:
        flat = variants.flatten() + 1
        count = torch.bincount(flat, minlength=1)
        begin = count.cumsum(0) - count
        return cls(torch.argsort(flat, stable=True), begin[1:], count[1:])

    def instances(self, variants: Tensor) -> tuple[Tensor, Tensor]:
        """Each piece in each head of its variant: pieces and heads."""
        known = variants < len(self.counts)
        counts = torch.zeros_like(variants)
        counts[known] = self.counts[variants[known]]
        pieces = torch.arange(len(variants)).repeat_interleave(counts)
        turn = torch.arange(len(pieces)) - (counts.cumsum(0) - counts)[pieces]
        return pieces, self.heads[self.begin[variants[pieces]] + turn]


def _sliced(batch: Batch) -> Chunk:
    row, column = int(batch.row_start), int(batch.column_start)
    row_end = row + batch.row_stride * (batch.rows - 1) + 1
    column_end = column + batch.column_stride * (batch.columns - 1) + 1
    rows = slice(row, row_end, batch.row_stride)
    columns = slice(column, column_end, batch.column_stride)
    zero = torch.zeros(1, dtype=torch.int64)
    return Chunk(batch, rows, columns, zero, zero, 0, batch.rows)


def take(x: Tensor, where: Tensor | slice) -> Tensor:
    """`[n, 1, L, D]`, or `[B, H, L, D]` for a slice: tokens of x, `[B, H, T, D]`."""
    if isinstance(where, slice):
        return x[:, :, where]
    rows, dim = where.shape[1], x.shape[3]
    return x.view(-1, dim).index_select(0, where.flatten()).view(-1, 1, rows, dim)


def put(x: Tensor, where: Tensor | slice, values: Tensor) -> None:
    """Overwrites tokens of x."""
    if isinstance(where, slice):
        x[:, :, where] = values
    else:
        x.view(-1, x.shape[3]).index_copy_(0, where.flatten(), values.reshape(-1, x.shape[3]))


def add(x: Tensor, where: Tensor | slice, values: Tensor) -> None:
    """Adds to tokens of x, in a fixed order where a token occurs several times."""
    if isinstance(where, slice):
        x[:, :, where] += values
    else:
        x.view(-1, x.shape[3]).index_add_(0, where.flatten(), values.reshape(-1, x.shape[3]))


def flash_forward(tokens: Tokens, chunk: Chunk, scale: float) -> tuple[Tensor, Tensor]:
    """The chunk's o and lse `[n, 1, L, 1]` (first dimensions B, H for slices)."""
    mask, causal = _mask(chunk, tokens.q.dtype), chunk.batch.kind == CAUSAL
    q = take(tokens.q, chunk.rows)
    k, v = take(tokens.k, chunk.columns), take(tokens.v, chunk.columns)
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    lse = lse.unsqueeze(3) + chunk.log_multiplicity.to(lse.dtype)
    if mask is not None:
        # The operation gives a row that sees nothing an lse of 0.
        lse = lse.masked_fill((mask == -math.inf).all(1, keepdim=True), -math.inf)
    return o, lse


def flash_backward(tokens: Tokens, upstream: Upstream, chunk: Chunk, scale: float) -> Grads:
    """What the chunk adds to dq, dk and dv."""
    q, do, o, lse = (take(x, chunk.rows) for x in (tokens.q, *upstream))
    k, v = take(tokens.k, chunk.columns), take(tokens.v, chunk.columns)
    # p = m e^s / e^lse
    lse = (lse - chunk.log_multiplicity.to(lse.dtype)).squeeze(3)
    causal, mask = chunk.batch.kind == CAUSAL, _mask(chunk, q.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, o, lse, 0.0, causal, attn_mask=mask, scale=scale
    )


def _mask(chunk: Chunk, dtype: torch.dtype) -> Tensor | None:
    """`[L, C]`: what is added to the scores."""
    if chunk.batch.kind != MASKED:
        return None
    return torch.zeros((), dtype=dtype).where(chunk.batch.seen(), -math.inf)


class Slopes(NamedTuple):
    """What grows with the distance |i - j + shift| is taken off the scores."""

    of_heads: Tensor  # [B * H]
    shift: int


class PlainGrads(NamedTuple):
    """Sums that only `plain_backward` adds to."""

    slopes: Tensor  # [B * H]
    log_multiplicity: Tensor  # [R]

    @classmethod
    def zeros(cls, heads: int, graph: TileGraph, dtype: torch.dtype) -> PlainGrads:
        """Nothing yet."""
        runs = graph.rows.runs.shape[0]
        return cls(torch.zeros(heads, dtype=dtype), torch.zeros(runs, dtype=dtype))


def plain_forward(
    tokens: Tokens, chunk: Chunk, scale: float, slopes: Slopes | None
) -> tuple[Tensor, Tensor]:
    """As `flash_forward`, with slopes."""
    scores = _scores(tokens, chunk, scale, slopes)
    lse = scores.logsumexp(3, keepdim=True)
    p = (scores - lse.masked_fill(lse == -math.inf, math.inf)).exp()
    return p @ take(tokens.v, chunk.columns), lse


def plain_backward(
    tokens: Tokens,
    upstream: Upstream,
    chunk: Chunk,
    scale: float,
    slopes: Slopes | None,
    sums: PlainGrads,
) -> Grads:
    """As `flash_backward`; also adds to the gradients of slopes and multiplicities."""
    q, do, o, lse = (take(x, chunk.rows) for x in (tokens.q, *upstream))
    k, v = take(tokens.k, chunk.columns), take(tokens.v, chunk.columns)
    p = (_scores(tokens, chunk, scale, slopes) - lse).exp()
    ds = p * (do @ v.transpose(2, 3) - (do * o).sum(3, keepdim=True))
    if slopes is not None:
        distances = _distances(tokens, chunk, slopes.shift)
        sums.slopes.index_add_(0, chunk.heads, -(ds * distances).sum((1, 2, 3)))
    runs = chunk.batch.run[chunk.pieces]
    of_runs = ds.sum((1, 2)).unflatten(1, (runs.shape[1], -1)).sum(2)
    sums.log_multiplicity.index_add_(0, runs.flatten(), of_runs.flatten())
    return scale * (ds @ k), scale * (ds.transpose(2, 3) @ q), p.transpose(2, 3) @ do


def _scores(tokens: Tokens, chunk: Chunk, scale: float, slopes: Slopes | None) -> Tensor:
    """`[n, 1, L, k * C]`, with the log of their multiplicity."""
    q, k = take(tokens.q, chunk.rows), take(tokens.k, chunk.columns)
    scores = scale * (q @ k.transpose(2, 3)) + chunk.log_multiplicity.to(q.dtype)
    if slopes is not None:
        of_heads = slopes.of_heads[chunk.heads].view(-1, 1, 1, 1)
        scores -= of_heads * _distances(tokens, chunk, slopes.shift)
    if chunk.batch.kind != FULL:
        scores.masked_fill_(~chunk.batch.seen(chunk.begin, chunk.end), -math.inf)
    return scores


def _distances(tokens: Tokens, chunk: Chunk, shift: int) -> Tensor:
    """`[n, 1, L, k * C]`: |i - j + shift|."""
    assert isinstance(chunk.rows, Tensor) and isinstance(chunk.columns, Tensor)
    rows, columns = chunk.rows % tokens.q.shape[2], chunk.columns % tokens.k.shape[2]
    distances = (rows.unsqueeze(2) - columns.unsqueeze(1) + shift).abs()
    return distances.unsqueeze(1).to(tokens.q.dtype)
