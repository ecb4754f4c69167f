"""Packed documents: attention within each document, and none between documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpflash.kernels.tile_graph import UNBOUNDED, TileGraph

from . import _arguments, _builder
from .base import Pattern
from .within_documents import OfDocuments, WithinDocuments


@dataclass(frozen=True, kw_only=True)
class Documents(OfDocuments):
    """Query i sees key j if both belong to the same document.

    The borders apply to every sample of a batch. To batch documents of several samples, pack them
    into one sample, as for flash-attn's variable-length functions. For another packing, make a new
    pattern, which takes well under a millisecond.

    ``documents & pattern`` applies a pattern within each document, as if the document were the
    whole sequence.

    Args:
        cu_seqlens: the borders of the documents, ``(0, length of the first, ..., T)``, as integers
            or a 1-D integer tensor. They are stored as a tuple. A document may be empty.
        causal: no query sees a key later than its own position.

    Raises:
        PrivateRefusal: the borders are not integers, do not start with 0, decrease, or are fewer
            than 2.
    """

    cu_seqlens: Sequence[int]
    causal: bool = False

    def __post_init__(self) -> None:
        borders = _arguments.integers("cu_seqlens", self.cu_seqlens, 0)
        if len(borders) < 2:
            raise _arguments.refusal(
                "cu_seqlens",
                borders,
                "at least 2 borders",
                "pass (0, num_tokens) for one document",
            )
        if borders[0] != 0:
            raise _arguments.refusal("cu_seqlens", borders, "0 as first border", "prepend 0")
        if any(end < begin for begin, end in zip(borders, borders[1:], strict=False)):
            raise _arguments.refusal(
                "cu_seqlens", borders, "borders that never decrease", "pass cumulative lengths"
            )
        _arguments.store(self, cu_seqlens=borders)
        _arguments.flag("causal", self.causal)
        self._fix_key()

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        starts = torch.tensor(self.cu_seqlens)
        document = (torch.arange(num_tokens)[:, None] >= starts[None, :]).sum(1)
        seen = document[:, None] == document[None, :]
        if self.causal:
            seen = seen.tril()
        return seen.float().repeat(num_heads, 1, 1)

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        borders = np.array(self.cu_seqlens)
        start, length, one = borders[:-1], np.diff(borders), np.ones(len(borders) - 1, dtype=int)
        groups = np.stack((start, one, length, one), axis=1)
        runs = np.stack((start, one, length, -UNBOUNDED * one, UNBOUNDED * one), axis=1)
        rows = _builder.tables(groups, runs)
        return _builder.make_graph(num_tokens, [0] * num_heads, rows, rows, self.causal)


def within(documents: Documents, pattern: Pattern) -> Pattern:
    """Return the pattern within each document, causal if `documents` or `pattern` is causal."""
    causal = documents.causal or pattern.causal
    if isinstance(pattern, Documents):
        if pattern.cu_seqlens[-1] != documents.cu_seqlens[-1]:
            raise _arguments.refusal(
                "cu_seqlens",
                pattern.cu_seqlens,
                "the last border of the other documents",
                "describe the same sequence in both",
            )
        borders = sorted({*documents.cu_seqlens, *pattern.cu_seqlens})
        return Documents(cu_seqlens=borders if len(borders) > 1 else (0, 0), causal=causal)
    if isinstance(pattern, WithinDocuments):
        if pattern.cu_seqlens[-1] != documents.cu_seqlens[-1] or not set(
            documents.cu_seqlens
        ) <= set(pattern.cu_seqlens):
            raise _arguments.refusal(
                "cu_seqlens",
                documents.cu_seqlens,
                "some of the pattern's borders",
                "combine the two Documents first, then apply the inner pattern",
            )
        return within(Documents(cu_seqlens=pattern.cu_seqlens, causal=causal), pattern.inner)
    if causal and not pattern.causal:
        pattern = replace(pattern, causal=True)  # type: ignore[type-var]
    return WithinDocuments(cu_seqlens=documents.cu_seqlens, inner=pattern)
