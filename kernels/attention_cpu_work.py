"""Which pieces of a tile graph run in which heads on the CPU, and the tokens that they take.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim;
of pieces n, L, k and C as in `attention_cpu_plan.Batch`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_cpu_batch import CAUSAL, MASKED, Batch, Bias, Run
from .attention_cpu_plan import Plan, plan
from .tile_graph import TileGraph

# Most elements that are gathered at a time, unless there are fewer pieces than threads then. So
# few that memory is used again: to take it anew from the system costs more than the copy.
_GATHERED = 2**18
# Most elements that are viewed at a time, likewise.
_VIEWED = 2**18
# How many products of a score's dim take as long as one operation on a view.
_PRODUCTS = 2**20
# Most scores at a time in plain PyTorch, unless a single row has more.
_SCORES = 2**20
_NONE = torch.empty(0, dtype=torch.long)


class Heads(NamedTuple):
    """Some heads of some samples; heads `step` apart."""

    sample: int
    samples: int
    head: int
    heads: int
    step: int


class View(NamedTuple):
    """Tokens of some samples and heads of x, `[B, H, T, ...]`, as views of x.

    Several pieces, each `spacing` tokens after the one before, take the place of samples, of
    which there is one then.
    """

    heads: Heads
    tokens: tuple[tuple[int, int], ...]  # first ones of the first piece, and how many
    stride: int
    pieces: int = 1
    spacing: int = 0

    def of(self, x: Tensor) -> list[Tensor]:
        """A view `[b or n, h, L, ...]` for each progression of tokens."""
        sample, samples, head, heads, step = self.heads
        of_sample, of_head, of_token, *inner = x.stride()
        begin = x.storage_offset() + sample * of_sample + head * of_head
        lead, of_lead = samples, of_sample
        if self.pieces > 1:
            lead, of_lead = self.pieces, self.spacing * of_token
        strides = (of_lead, step * of_head, self.stride * of_token, *inner)
        return [
            x.as_strided((lead, heads, n, *x.shape[3:]), strides, begin + first * of_token)
            for first, n in self.tokens
        ]


class Index(NamedTuple):
    """Tokens of x, `[B, H, T, D]`, flattened over samples and heads and cut into blocks."""

    blocks: Tensor  # [n, m]
    size: int  # tokens in a block

    def flat(self, x: Tensor) -> Tensor:
        """`[B * H * T / size, size * D]`: the blocks of x."""
        return x.view(-1, self.size * x.shape[3])


def take(x: Tensor, where: View | Index) -> Tensor:
    """`[n, 1, L, D]`, of a view `[b, h, L, D]`: tokens of x."""
    if isinstance(where, View):
        views = where.of(x)
        return views[0] if len(views) == 1 else torch.cat(views, 2)
    taken = where.flat(x).index_select(0, where.blocks.flatten())
    return taken.view(len(where.blocks), 1, where.blocks.shape[1] * where.size, x.shape[3])


def put(x: Tensor, where: View | Index, values: Tensor) -> None:
    """Overwrites tokens of x."""
    if isinstance(where, View):
        views = where.of(x)
        parts = values.split([view.shape[2] for view in views], 2)
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)
        return
    flat = where.flat(x)
    flat.index_copy_(0, where.blocks.flatten(), values.reshape(-1, flat.shape[1]))


def add(x: Tensor, where: View | Index, values: Tensor) -> None:
    """Adds to tokens of x, in a fixed order where a token occurs several times."""
    if isinstance(where, View):
        views = where.of(x)
        parts = values.split([view.shape[2] for view in views], 2)
        for view, part in zip(views, parts, strict=True):
            view += part
    else:
        flat = where.flat(x)
        flat.index_add_(0, where.blocks.flatten(), values.reshape(-1, flat.shape[1]))


class Mask(NamedTuple):
    """What is added to the scores of a piece."""

    bias: Tensor  # [L, C]
    blind: Tensor | None  # [L]: rows that see nothing; None if it is known that there are none


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some pieces of a batch, each in one head; or one piece in several, as views.

    Attributes:
        batch: whose pieces.
        rows: of q, L for each piece; one slice of a view.
        columns: of k, k * C for each piece.
        pieces: `[n]`, index into the batch.
        heads: `[n]`, b * H + h; of views it means nothing.
        begin, end: the pieces' rows that take part.
        mask: what is added to the scores; None for other kinds and in plain PyTorch.
        first: it is of the plan's first batches.
    """

    batch: Batch
    rows: View | Index
    columns: View | Index
    pieces: Tensor
    heads: Tensor
    begin: int
    end: int
    mask: Mask | None
    first: bool

    @property
    def bias(self) -> Tensor | None:
        """`[L, C]`: what is added to the scores."""
        return None if self.mask is None else self.mask.bias

    @property
    def log_multiplicity(self) -> Tensor:
        """`[n, 1, 1]`; of views only where the batch is weighted."""
        return self.batch.log_multiplicity[self.pieces].view(-1, 1, 1)


@dataclass(frozen=True, eq=False)
class Work:
    """Which pieces run in which heads.

    Attributes:
        parts: pieces, and the variants of the heads that they are for.
        sizes: H, G, T, S, D.
        dtype: of the computation.
        plain: pieces run in plain PyTorch, see `plain_forward`.
    """

    parts: list[tuple[_Variants, Plan]]
    sizes: tuple[int, int, int, int, int]
    dtype: torch.dtype
    plain: bool

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, graph: TileGraph, key_range: Tensor | None, plain: bool
    ) -> Work:
        """The work for these shapes, samples with one key range together."""
        sizes = (q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3])
        dtype = torch.promote_types(q.dtype, torch.float32)
        heads_per_group = max(q.shape[1] // max(k.shape[1], 1), 1)
        variants = graph.row_variants.long().cpu().expand(q.shape[:2])
        if key_range is None or q.shape[0] == 0:
            parts = [(_Variants(variants, heads_per_group), plan(graph, joined=not plain))]
            return cls(parts, sizes, dtype, plain)
        ranges = [(max(begin, 0), min(end, k.shape[2])) for begin, end in key_range.tolist()]
        parts = []
        for clip in sorted(set(ranges)):
            concerned = torch.tensor([clip == other for other in ranges])
            of_clip = _Variants(variants.where(concerned.unsqueeze(1), -1), heads_per_group)
            parts.append((of_clip, plan(graph, clip, joined=not plain)))
        return cls(parts, sizes, dtype, plain)

    def gathers(self) -> bool:
        """Some batch indexes tokens flattened over samples and heads."""
        return any(
            not self._views(variants, batch, variant)
            for variants, found in self.parts
            for batch in found.batches
            for variant in set(batch.variant.tolist())
        )

    def rows_once(self) -> bool:
        """The first chunks have every row of every head, and none twice."""
        return all(variants.known() <= found.rows for variants, found in self.parts)

    def columns_once(self) -> bool:
        """The first chunks have every column of every key head, and none twice."""
        one_head = self.sizes[0] == self.sizes[1]
        return one_head and all(
            variants.known() <= found.columns for variants, found in self.parts
        )

    def whole(self) -> Chunk | None:
        """The only piece, where it has all rows and columns; its result is the result."""
        if self.plain or len(self.parts) != 1 or len(self.parts[0][1].batches) != 1:
            return None
        variants, ((batch,), *_) = self.parts[0]
        covers = (batch.rows, batch.columns) == self.sizes[2:4]
        if not (covers and batch.column_start.numel() == 1 and variants.all(int(batch.variant))):
            return None
        ((run,),) = batch.runs.values()
        return _viewed(batch, run, 0, 1, variants.everywhere(), _Masks(self.dtype).of(batch), True)

    def chunks(self) -> Iterator[Chunk]:
        """All pieces; no row is twice in a chunk."""
        masks = _Masks(self.dtype)
        for variants, found in self.parts:
            for index, batch in enumerate(found.batches):
                first = index < found.first
                mask = None if self.plain else masks.of(batch)
                others = torch.zeros(len(batch.variant), dtype=torch.bool)
                for variant in batch.variant.unique().tolist():
                    if not self._views(variants, batch, variant):
                        others |= batch.variant == variant
                        continue
                    for run in batch.runs[variant]:
                        for box, at_once in self._boxes(variants, batch, variant, len(run.pieces)):
                            for begin in range(0, len(run.pieces), at_once):
                                end = min(begin + at_once, len(run.pieces))
                                yield _viewed(batch, run, begin, end, box, mask, first)
                some = others.nonzero().flatten()
                yield from self._gathered(batch, some, variants, mask, first)

    def _views(self, variants: _Variants, batch: Batch, variant: int) -> bool:
        """Whether the variant's heads are views: pieces are large enough for operations each."""
        if self.plain:
            return False
        seen = batch.column_start.shape[1] * batch.columns
        operations = 4 + 2 * batch.progressions
        enough = _PRODUCTS * operations // (batch.rows * seen * self.sizes[4])
        return variants.fewest(variant) >= enough

    def _boxes(
        self, variants: _Variants, batch: Batch, variant: int, pieces: int
    ) -> list[tuple[_Box, int]]:
        """The variant's heads, each box with how many pieces it may take at once."""
        seen = batch.column_start.shape[1] * batch.columns
        at_once = _VIEWED // ((batch.rows + seen) * self.sizes[4])
        return variants.boxes(variant, at_once, pieces)

    def _gathered(
        self, batch: Batch, some: Tensor, variants: _Variants, mask: Mask | None, first: bool
    ) -> Iterator[Chunk]:
        turns, heads = variants.instances(batch.variant[some])
        if len(turns) == 0:
            return
        pieces = some[turns]
        num_heads, num_groups, num_rows, num_columns, dim = self.sizes
        seen = batch.column_start.shape[1] * batch.columns
        if self.plain:
            height = min(batch.rows, max(_SCORES // seen, 1))
            at_once = min(_GATHERED // ((height + seen) * dim), _SCORES // (height * seen))
            at_once = max(at_once, 1)
            row_size = column_size = 1
        else:
            height = batch.rows
            at_once = max(_GATHERED // ((height + seen) * dim), torch.get_num_threads())
            row_size = math.gcd(batch.row_unit, num_rows)
            column_size = math.gcd(batch.column_unit, num_columns)
        kv_heads = heads // num_heads * num_groups
        kv_heads += heads % num_heads // (num_heads // num_groups)
        column_offsets = batch.column_stride * torch.arange(batch.columns // column_size)
        for part in torch.arange(len(pieces)).split(at_once):
            piece, head, kv_head = pieces[part], heads[part], kv_heads[part]
            start = batch.column_start[piece] + (kv_head * num_columns).unsqueeze(1)
            start = (start // column_size).unsqueeze(2)
            columns = Index((start + column_offsets).flatten(1), column_size)
            start = (head * num_rows + batch.row_start[piece]).unsqueeze(1) // row_size
            for begin in range(0, batch.rows, height):
                end = min(begin + height, batch.rows)
                rows = Index(
                    start + batch.row_stride * torch.arange(begin, end // row_size), row_size
                )
                yield Chunk(batch, rows, columns, piece, head, begin, end, mask, first)


class _Masks:
    """The masks of batches; batches that follow each other may share one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bias: Bias | None = None
        self._dense = torch.empty(0)

    def of(self, batch: Batch) -> Mask | None:
        """None if all is seen, or what the operation can do by itself."""
        if batch.kind == CAUSAL and batch.column_start.shape[1] > 1:
            return Mask(self._hide(batch.seen()), None)
        if batch.kind == MASKED:
            seen = batch.seen()
            return Mask(self._hide(seen), ~seen.any(1))
        if batch.bias is None:
            return None
        if batch.bias is not self._bias:
            self._bias, self._dense = batch.bias, batch.bias.dense(self._dtype)
        first = batch.bias_first
        bias = self._dense[:, first : first + batch.columns]
        blind = (bias == -math.inf).all(1) if batch.bias.blind else None
        return Mask(bias.expand(batch.rows, -1), blind)

    def _hide(self, seen: Tensor) -> Tensor:
        return torch.zeros((), dtype=self._dtype).where(seen, -math.inf)


class _Box(NamedTuple):
    """Query heads of some samples, and the key heads that they read."""

    heads: Heads
    kv_heads: Heads


class _Variants:
    """`[B, H]`, the variant of each head, -1 for none."""

    def __init__(self, variants: Tensor, heads_per_group: int) -> None:
        self._variants, self._heads_per_group = variants, heads_per_group
        flat = variants.flatten() + 1
        count = torch.bincount(flat, minlength=1)
        self._begin, self._counts = (count.cumsum(0) - count)[1:], count[1:]
        self._heads = torch.argsort(flat, stable=True)
        # Of each variant: samples, and heads in all of them.
        self._alike: dict[int, list[tuple[range, range]]] = {}
        samples = variants.tolist()
        step = len(samples) if all(of == samples[0] for of in samples) else 1
        for begin in range(0, len(samples), max(step, 1)):
            for variant in set(samples[begin]):
                heads = [head for head, of in enumerate(samples[begin]) if of == variant]
                self._alike.setdefault(variant, []).extend(
                    (range(begin, begin + step), part)
                    for part in _progressions(heads, heads_per_group)
                )

    def known(self) -> frozenset[int]:
        """The variants that some head has."""
        return frozenset(self._variants.unique().tolist()) - {-1}

    def all(self, variant: int) -> bool:
        """Whether there are heads and all have the variant."""
        return self._variants.numel() > 0 and bool((self._variants == variant).all())

    def instances(self, variants: Tensor) -> tuple[Tensor, Tensor]:
        """Each piece, given by its variant, in each head of it: pieces, and heads b * H + h."""
        known = variants < len(self._counts)
        counts = torch.zeros_like(variants)
        counts[known] = self._counts[variants[known]]
        pieces = torch.arange(len(variants)).repeat_interleave(counts)
        turn = torch.arange(len(pieces)) - (counts.cumsum(0) - counts)[pieces]
        return pieces, self._heads[self._begin[variants[pieces]] + turn]

    def fewest(self, variant: int) -> int:
        """Fewest heads of the variant that are alike."""
        found = self._alike.get(variant, [])
        return min((len(samples) * len(heads) for samples, heads in found), default=sys.maxsize)

    def boxes(self, variant: int, at_once: int, pieces: int) -> list[tuple[_Box, int]]:
        """The variant's heads, about `at_once` in a box, or pieces of heads.

        Boxes have several samples, or one and come with how many pieces go into `at_once`: pieces
        first, since those of one head lie closer together than those of several.
        """
        boxes = []
        threads = torch.get_num_threads()
        for samples, heads in self._alike.get(variant, []):
            aligned = heads.step == 1 and len(heads) % self._heads_per_group == 0
            least = self._heads_per_group if aligned else 1
            times = min(max(at_once // least, 1), pieces)
            some_heads = max(at_once // times, threads)
            height = max(some_heads // least, 1) * least
            step = max(some_heads // len(heads), 1) if times == 1 else 1
            for first in range(0, len(heads), height):
                own = heads[first : first + height]
                for begin in range(0, len(samples), step):
                    some = samples[begin : begin + step]
                    boxes.append((self._box(some, own), times))
        return boxes

    def everywhere(self) -> _Box:
        """All heads of all samples."""
        samples, heads = self._variants.shape
        return self._box(range(samples), range(heads))

    def _box(self, samples: range, heads: range) -> _Box:
        of_group = self._heads_per_group
        first, last = heads[0] // of_group, heads[-1] // of_group
        step = max(heads.step // of_group, 1)
        return _Box(
            Heads(samples.start, len(samples), heads.start, len(heads), heads.step),
            Heads(samples.start, len(samples), first, (last - first) // step + 1, step),
        )


def _progressions(heads: list[int], heads_per_group: int) -> list[range]:
    """Heads in progressions with each its own key head, or with all that read theirs."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    whole = range(heads[0], heads[-1] + 1, step)
    aligned = step == 1 and heads[0] % heads_per_group == len(heads) % heads_per_group == 0
    if list(whole) == heads and (aligned or step % heads_per_group == 0):
        return [whole]
    return [range(head, head + 1) for head in heads]


def _viewed(
    batch: Batch, run: Run, begin: int, end: int, box: _Box, mask: Mask | None, first: bool
) -> Chunk:
    """Some pieces of a run, in all heads of a box."""
    moved = begin * run.spacing
    columns = tuple((start + moved, length) for start, length in run.columns)
    pieces = end - begin
    rows = ((run.row + moved, batch.rows),)
    some = torch.tensor(run.pieces[begin:end]) if batch.weighted else _NONE
    return Chunk(
        batch,
        View(box.heads, rows, batch.row_stride, pieces, run.spacing),
        View(box.kv_heads, columns, batch.column_stride, pieces, run.spacing),
        pieces=some,
        heads=some,
        begin=0,
        end=batch.rows,
        mask=mask,
        first=first,
    )
