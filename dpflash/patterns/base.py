"""The base class of attention patterns. Letters: T tokens, S key tokens, H query heads."""

from __future__ import annotations

import functools
import json
import os
from abc import ABC, abstractmethod
from dataclasses import fields
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from dpflash.kernels.capture import kept_in_captures
from dpflash.kernels.tile_graph import MAX_TOKENS, TileGraph, real_cpu_tensors
from dpflash.kernels.tile_shard import Chunk, restrict

from . import _arguments


class Pattern(ABC):
    """Base class of patterns: the keys that each query sees, and how often each key counts.

    Patterns are frozen dataclasses: hashable, comparable, without tensors, independent of T and H.
    Make them outside of compiled functions, which recompile for each pattern.

    Attributes:
        causal: whether no query sees a key later than its own position.
        key: the pattern as JSON; `dpflash.patterns.from_key` restores the pattern.
    """

    causal: bool
    key: ClassVar[str]

    @abstractmethod
    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        """Return the pattern's definition as a matrix of multiplicities, for small T.

        Args:
            num_tokens: T.
            num_heads: H.

        Returns:
            `[H, T, T]`, float32: ``m[h, i, j]`` is how often key j counts for query i in head h, 0
            if the query does not see it. Attention is ``softmax_j(s_ij + log m_ij) v_j``, so
            torch's `scaled_dot_product_attention` gives the same result with
            ``attn_mask=mask.log()``.

        Raises:
            ValueError: the pattern does not support this T or H.
        """

    @abstractmethod
    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        """Build the tile graph on the CPU, without visiting every pair of tokens.

        Groups share no row and the runs of one group share no column, see
        `dpflash.kernels.tile_graph.Side`.
        """

    def _check_size(self, num_tokens: int, num_heads: int) -> None:
        _arguments.integer("num_heads", num_heads, 1)
        if _arguments.integer("num_tokens", num_tokens, 0) > MAX_TOKENS:
            expected = f"at most {MAX_TOKENS}"
            raise _arguments.refusal("num_tokens", num_tokens, expected, "split the sequence")

    def graph(
        self, num_tokens: int, num_heads: int = 1, device: torch.device | str = "cpu"
    ) -> TileGraph:
        """Return the tile graph of this pattern, cached by (pattern, T, H, device).

        Args:
            num_tokens: T, below 2^30.
            num_heads: H.
            device: device of the graph's tables.

        Returns:
            The graph, see `dpflash.kernels.tile_graph`.

        Raises:
            ValueError: the pattern does not support this T or H.
        """
        self._check_size(num_tokens, num_heads)
        return _cached_graph(self, num_tokens, num_heads, torch.device(device))

    def last_rows(
        self, num_queries: int, num_keys: int, num_heads: int, device: torch.device | str = "cpu"
    ) -> TileGraph:
        """Return the tile graph between the last queries of a sequence and all of its keys.

        Args:
            num_queries: T, at most S; the queries have the positions S - T to S - 1.
            num_keys: S.
            num_heads: H.
            device: device of the graph's tables.

        Raises:
            ValueError: the pattern does not support this S or H.
        """
        self._check_size(num_keys, num_heads)
        return _cached_last_rows(self, num_queries, num_keys, num_heads, torch.device(device))

    def edges(self, num_tokens: int, num_heads: int = 1) -> int:
        """Return the number of pairs (query, key) that see each other, summed over the heads."""
        return self.graph(num_tokens, num_heads).edges()

    def density(self, num_tokens: int, num_heads: int = 1) -> float:
        """Return the fraction of the T x T pairs that see each other, averaged over the heads."""
        pairs = num_heads * num_tokens**2
        return self.edges(num_tokens, num_heads) / pairs if pairs else 0.0

    def describe(self, num_tokens: int, num_heads: int = 1) -> str:
        """Describe the pattern as text, with figures and a small picture of head 0.

        Args:
            num_tokens: T.
            num_heads: H.

        Returns:
            Lines of text: density, edges, groups and runs, the graph's memory, and the picture.

        Raises:
            ValueError: the pattern does not support this T or H.
        """
        from .report import describe

        return describe(self, num_tokens, num_heads)

    def plot(
        self, num_tokens: int, path: str | os.PathLike[str] | None = None, *, num_heads: int = 1
    ) -> Path:
        """Plot how often each key counts for each query, for any T.

        Args:
            num_tokens: T.
            path: path of the PNG; None means ``<name>_T<num_tokens>.png`` in the current folder.
            num_heads: H; each of the first four distinct heads has a panel.

        Returns:
            The path of the PNG.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: the pattern does not support this T or H, or T = 0.
        """
        from .report import plot

        return plot(self, num_tokens, path, num_heads=num_heads)

    def __and__(self, other: object) -> Pattern:
        """Apply a pattern within each document: ``Documents(...) & pattern``, in either order."""
        from .documents import Documents, within

        if isinstance(self, Documents) and isinstance(other, Pattern):
            return within(self, other)
        if isinstance(other, Documents):
            return within(other, self)
        return NotImplemented

    def _fix_key(self, **as_json: object) -> None:
        """Set `key` at the end of `__post_init__`; torch.compile could not trace it later.

        `as_json` replaces the fields that are not JSON values.
        """
        named = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        named |= as_json
        _arguments.store(self, key=json.dumps({"pattern": type(self).__name__, **named}))


@kept_in_captures
@functools.lru_cache(maxsize=64)
def _cached_graph(
    pattern: Pattern, num_tokens: int, num_heads: int, device: torch.device
) -> TileGraph:
    if device.type == "cpu":
        with real_cpu_tensors():
            return pattern._build(num_tokens, num_heads)
    return _cached_graph(pattern, num_tokens, num_heads, torch.device("cpu")).to(device)


@functools.lru_cache(maxsize=64)
def _cached_last_rows(
    pattern: Pattern, num_queries: int, num_keys: int, num_heads: int, device: torch.device
) -> TileGraph:
    with real_cpu_tensors():
        whole = pattern._build(num_keys, num_heads)
        queries = Chunk(num_keys - num_queries, num_queries, 0)
        graph = restrict(whole, [queries], num_queries, [Chunk(0, num_keys, 0)], num_keys)
    return graph.to(device)
