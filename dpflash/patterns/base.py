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
    """Which keys each query sees, and how often each counts.

    Patterns are frozen dataclasses: hashable, comparable, without tensors, whatever T and H. Make
    them outside of functions that torch compiles; a compiled function recompiles for each pattern.

    Attributes:
        causal: no query sees a key later than its own position.
        key: the pattern as JSON; `dpflash.patterns.from_key` turns it back.
    """

    causal: bool
    key: ClassVar[str]

    @abstractmethod
    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        """Definition of the pattern: the multiplicity m of each key for each query, for small T.

        Args:
            num_tokens: T.
            num_heads: H.

        Returns:
            `[H, T, T]`, float32: ``m[h, i, j]`` is how often key j counts for query i in head h, 0
            where it is not seen. Attention is ``softmax_j(s_ij + log m_ij) v_j``, so
            ``attn_mask=mask.log()`` gives the same result in torch's
            `scaled_dot_product_attention`.

        Raises:
            ValueError: for a T or H that the pattern does not take.
        """

    @abstractmethod
    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        """The tile graph on the CPU, built without looking at pairs of tokens.

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
        """The tile graph of this pattern; built once for each (pattern, T, H, device).

        Args:
            num_tokens: T, below 2^30.
            num_heads: H.
            device: where its tables lie.

        Returns:
            The graph, see `dpflash.kernels.tile_graph`.

        Raises:
            ValueError: for a T or H that the pattern does not take.
        """
        self._check_size(num_tokens, num_heads)
        return _cached_graph(self, num_tokens, num_heads, torch.device(device))

    def last_rows(
        self, num_queries: int, num_keys: int, num_heads: int, device: torch.device | str = "cpu"
    ) -> TileGraph:
        """The tile graph of the last queries of a sequence with all of its keys.

        Args:
            num_queries: T, at most S: queries that stand at positions S - T to S - 1.
            num_keys: S.
            num_heads: H.
            device: where its tables lie.

        Raises:
            ValueError: for an S or H that the pattern does not take.
        """
        self._check_size(num_keys, num_heads)
        return _cached_last_rows(self, num_queries, num_keys, num_heads, torch.device(device))

    def edges(self, num_tokens: int, num_heads: int = 1) -> int:
        """Pairs (query, key) that see each other, summed over the heads."""
        return self.graph(num_tokens, num_heads).edges()

    def density(self, num_tokens: int, num_heads: int = 1) -> float:
        """The part of all T x T pairs that see each other, mean over the heads."""
        pairs = num_heads * num_tokens**2
        return self.edges(num_tokens, num_heads) / pairs if pairs else 0.0

    def describe(self, num_tokens: int, num_heads: int = 1) -> str:
        """The pattern in words and figures, with a small picture of head 0.

        Args:
            num_tokens: T.
            num_heads: H.

        Returns:
            Some lines of text: density, edges, groups and runs, the graph's memory, the picture.

        Raises:
            ValueError: for a T or H that the pattern does not take.
        """
        from .report import describe

        return describe(self, num_tokens, num_heads)

    def plot(
        self, num_tokens: int, path: str | os.PathLike[str] | None = None, *, num_heads: int = 1
    ) -> Path:
        """Draws how often each key counts for each query, for any T.

        Args:
            num_tokens: T.
            path: of the PNG; None, ``<name>_T<num_tokens>.png`` in the current folder.
            num_heads: H; up to four heads that differ get a panel each.

        Returns:
            The path of the PNG.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: for a T or H that the pattern does not take, or T = 0.
        """
        from .report import plot

        return plot(self, num_tokens, path, num_heads=num_heads)

    def __and__(self, other: object) -> Pattern:
        """``Documents(...) & pattern``, in either order: the pattern within each document."""
        from .documents import Documents, within

        if isinstance(self, Documents) and isinstance(other, Pattern):
            return within(self, other)
        if isinstance(other, Documents):
            return within(other, self)
        return NotImplemented

    def _fix_key(self, **as_json: object) -> None:
        """Sets `key`, at the end of every constructor: a compiler cannot trace it.

        `as_json` has fields that JSON does not know, as it does.
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
