"""A pattern that is applied to each packed document separately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dpflash.kernels.tile_graph import Side, TileGraph, real_cpu_tensors

from . import _arguments
from .base import Pattern


class OfDocuments(Pattern):
    """Base class of patterns with documents. The last document must end with the sequence."""

    cu_seqlens: Sequence[int]

    def _check_size(self, num_tokens: int, num_heads: int) -> None:
        super()._check_size(num_tokens, num_heads)
        if num_tokens != self.cu_seqlens[-1]:
            raise _arguments.refusal(
                "num_tokens",
                num_tokens,
                "the last border of cu_seqlens",
                "let the last document end with the sequence",
            )


@dataclass(frozen=True, kw_only=True)
class WithinDocuments(OfDocuments):
    """Applies a pattern within each document, as if the document were the whole sequence.

    ``Documents(cu_seqlens=borders) & pattern`` makes such a pattern. Segments, offsets, blocks and
    global tokens are counted from each document's begin. No document sees another document.

    Args:
        cu_seqlens: the borders of the documents, see `Documents`.
        inner: the pattern within each document.

    Raises:
        ValueError: inner is not a pattern.
    """

    cu_seqlens: Sequence[int]
    inner: Pattern

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Pattern):
            raise _arguments.refusal(
                "inner", self.inner, "a pattern", "pass one of dpflash.patterns"
            )
        borders = _arguments.integers("cu_seqlens", self.cu_seqlens, 0)
        _arguments.store(self, cu_seqlens=borders, causal=self.inner.causal)
        self._fix_key(inner=self.inner.key)

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        mask = torch.zeros(num_heads, num_tokens, num_tokens)
        for begin, end in pairwise(self.cu_seqlens):
            mask[:, begin:end, begin:end] = self.inner.mask(end - begin, num_heads)
        return mask

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        documents = [(begin, end - begin) for begin, end in pairwise(self.cu_seqlens)]
        documents = [(begin, length) for begin, length in documents if length > 0]
        # Documents of one length share a graph.
        lengths = {length for _, length in documents}
        graphs = {length: self.inner.graph(length, num_heads) for length in lengths}
        with real_cpu_tensors():
            rows = _Sides([(begin, graphs[length].rows) for begin, length in documents])
            cols = _Sides([(begin, graphs[length].cols) for begin, length in documents])
            of_rows = [graphs[length].row_variants.tolist() for _, length in documents]
            of_cols = [graphs[length].col_variants.tolist() for _, length in documents]
            row_side, row_variants = rows.joined(of_rows, num_heads)
            col_side, col_variants = cols.joined(of_cols, num_heads)
        return TileGraph(
            num_queries=num_tokens,
            num_keys=num_tokens,
            rows=row_side,
            cols=col_side,
            row_variants=row_variants,
            col_variants=col_variants,
            causal=self.causal,
        )


class _Sides:
    def __init__(self, documents: Sequence[tuple[int, Side]]) -> None:
        self._begins = [begin for begin, _ in documents]
        self._sides = [_Tables(side) for _, side in documents]

    def joined(self, variants: Sequence[Sequence[int]], num_heads: int) -> tuple[Side, Tensor]:
        """Join the documents' sides to one side; return it, and the variant that each head uses.

        ``variants[d][h]`` is the variant that head h uses in the side of document d.
        """
        of_heads = [tuple(of[head] for of in variants) for head in range(num_heads)]
        distinct = list(dict.fromkeys(of_heads))
        groups, runs, logs, per_variant = [], [], [], []
        num_runs = 0
        for choice in distinct:
            count = 0
            for begin, tables, variant in zip(self._begins, self._sides, choice, strict=True):
                of_variant, first, end = tables.of(variant)
                moved = of_variant + np.array([begin, 0, 0, num_runs - first, num_runs - first])
                groups.append(moved)
                runs.append(tables.runs[first:end] + np.array([begin, 0, 0, 0, 0]))
                logs.append(tables.logs[first:end])
                num_runs += end - first
                count += len(moved)
            per_variant.append(count)
        side = _side(groups, runs, logs, per_variant)
        number = {choice: variant for variant, choice in enumerate(distinct)}
        return side, torch.tensor([number[x] for x in of_heads], dtype=torch.int32)


class _Tables:
    def __init__(self, side: Side) -> None:
        self.groups = side.groups.numpy().astype(np.int64)
        self.runs = side.runs.numpy().astype(np.int64)
        self.logs = side.log_multiplicity.numpy()
        self._variants = side.variants.tolist()

    def of(self, variant: int) -> tuple[np.ndarray, int, int]:
        """Return (groups of a variant, index of their first run, index after their last run)."""
        groups = self.groups[self._variants[variant] : self._variants[variant + 1]]
        if not len(groups):
            return groups, 0, 0
        return groups, int(groups[:, 3].min()), int(groups[:, 4].max())


def _side(
    groups: list[np.ndarray],
    runs: list[np.ndarray],
    logs: list[np.ndarray],
    per_variant: list[int],
) -> Side:
    rows = np.concatenate([np.empty((0, 5), np.int64), *groups])
    columns = np.concatenate([np.empty((0, 5), np.int64), *runs])
    ends = np.cumsum([0, *per_variant])
    return Side(
        groups=torch.from_numpy(rows.astype(np.int32)),
        runs=torch.from_numpy(columns.astype(np.int32)),
        log_multiplicity=torch.from_numpy(np.concatenate([np.empty(0), *logs])),
        variants=torch.from_numpy(ends.astype(np.int32)),
        max_groups=max(per_variant, default=0),
        max_length=int(rows[:, 2].max(initial=0)),
    )
