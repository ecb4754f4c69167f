"""LongNet's dilated attention, with all branches in one softmax.

A *branch* is a segment length with a dilation rate; `Dilated` defines which tokens are *live* in a
branch. The segment borders of all branches cut the sequence into intervals. In an interval, tokens
that are live in the same branches form arithmetic progressions, the groups of rows. A live token
sees keys at distances that are multiples of the rate. Groups that see the same columns, relative
to their first row, share a list of runs.

Letters: T tokens, H heads, W segment length, r dilation rate, m multiplicity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpflash.kernels.tile_graph import UNBOUNDED, TileGraph

from .. import _validate
from . import _arguments, _builder
from .base import Pattern


class _Branch(NamedTuple):
    length: int
    rate: int
    offset: int


# Start, stride and length of a group of rows, and the branches in which the rows are live.
_Group = tuple[int, int, int, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Dilated(Pattern):
    """LongNet's dilated attention: branches of several segment lengths and dilation rates.

    With ``W = min(w, T)``, token t is live in branch (w, r) of head h if
    ``((t mod W) mod r) == o(h)``, see `offset`. A live query sees the live keys of its segment.
    The branches are weighted by their softmax denominators. This equals one softmax in which a key
    counts m times: once for each branch in which query and key are live in the same segment.
    A token that is live in no branch sees nothing. The last segment may be short; T, w and r need
    not divide each other.

    Source: Ding et al., LongNet, arXiv:2307.02486, section 3.

    Args:
        segment_lengths: the segment length w of each branch, in tokens.
        dilation_rates: the dilation rate r of each branch, at most the branch's segment length w.
        causal: no query sees a key later than its own position.
        overlap: with "multiset" a key counts m times, with "set" it counts once if m > 0.
        offset: "head" means ``o(h) = h mod r``, as in the paper; "group" means ``o(h) = h //
            ceil(H / r)``, as in torchscale. The two differ by more than the order of the heads.
        heads: with "all" each head has all branches. With "grouped" each head has one branch: each
            of the k branches has H // k heads, and the first H % k branches have one head more.

    Raises:
        ValueError: an argument of the wrong type or range, or lists that do not fit together.
    """

    segment_lengths: Sequence[int]
    dilation_rates: Sequence[int]
    causal: bool = False
    overlap: str = "multiset"
    offset: str = "head"
    heads: str = "all"

    def __post_init__(self) -> None:
        lengths = _arguments.integers("segment_lengths", self.segment_lengths, 1)
        rates = _arguments.integers("dilation_rates", self.dilation_rates, 1)
        if not lengths:
            raise _arguments.refusal(
                "segment_lengths", lengths, "at least one branch", "pass for example (2048,)"
            )
        if len(lengths) != len(rates):
            raise _arguments.refusal(
                "dilation_rates",
                rates,
                f"as many as segment_lengths={lengths}",
                "pass one rate for each length",
            )
        for length, rate in zip(lengths, rates, strict=True):
            if rate > length:
                raise _arguments.refusal(
                    "dilation_rates",
                    rates,
                    f"rates of at most their segment length, but {rate} > {length}",
                    "lower the rate or lengthen the segment",
                )
        _validate.one_of(
            overlap=(self.overlap, ("multiset", "set")),
            offset=(self.offset, ("head", "group")),
            heads=(self.heads, ("all", "grouped")),
        )
        _arguments.flag("causal", self.causal)
        _arguments.store(self, segment_lengths=lengths, dilation_rates=rates)
        self._fix_key()

    def mask(self, num_tokens: int, num_heads: int = 1) -> Tensor:
        self._check_size(num_tokens, num_heads)
        t = torch.arange(num_tokens)
        m = torch.zeros(num_heads, num_tokens, num_tokens)
        for head in range(num_heads):
            for length, rate, offset in self._branches(head, num_tokens, num_heads):
                live = (t % length) % rate == offset
                same = (t // length)[:, None] == (t // length)[None, :]
                m[head] += live[:, None] & live[None, :] & same
        if self.overlap == "set":
            m = m.clamp(max=1)
        return m.tril() if self.causal else m

    def _branches(self, head: int, num_tokens: int, num_heads: int) -> tuple[_Branch, ...]:
        """Return the branches of a head, with segments cut to the length of the sequence."""
        pairs = list(zip(self.segment_lengths, self.dilation_rates, strict=True))
        if self.heads == "grouped":
            each, rest = divmod(num_heads, len(pairs))
            longer = rest * (each + 1)
            taken = head // (each + 1) if head < longer else rest + (head - longer) // each
            pairs = [pairs[taken]]
        offsets = [
            head % rate if self.offset == "head" else head // -(-num_heads // rate)
            for _, rate in pairs
        ]
        return tuple(
            _Branch(max(min(length, num_tokens), 1), rate, offset)
            for (length, rate), offset in zip(pairs, offsets, strict=True)
        )

    def _build(self, num_tokens: int, num_heads: int) -> TileGraph:
        of_heads = [self._branches(head, num_tokens, num_heads) for head in range(num_heads)]
        variants = list(dict.fromkeys(of_heads))
        rows = _tables(variants, num_tokens, self.overlap == "multiset")
        number = {branches: variant for variant, branches in enumerate(variants)}
        head_variants = [number[branches] for branches in of_heads]
        return _builder.make_graph(num_tokens, head_variants, rows, rows, self.causal)


def _tables(
    variants: Sequence[tuple[_Branch, ...]], num_tokens: int, multiset: bool
) -> _builder.Tables:
    groups: list[tuple[int, int, int]] = []
    per_variant = []
    # Segments, relative to the group's first row -> number of the list; most groups share a list.
    templates: dict[tuple[tuple[int, int, int], ...], int] = {}
    used = []
    for branches in variants:
        found = _row_groups(branches, num_tokens)
        per_variant.append(len(found))
        for start, stride, length, live in found:
            segments = []
            for width, rate, _ in (branches[i] for i in live):
                begin = start - start % width
                segments.append((begin - start, min(begin + width, num_tokens) - start, rate))
            groups.append((start, stride, length))
            used.append(templates.setdefault(tuple(segments), len(templates)))

    columns = [_columns(segments, multiset) for segments in templates]
    table = np.array([run for runs in columns for run in runs], dtype=np.int64).reshape(-1, 4)
    sizes = np.array([len(runs) for runs in columns], dtype=np.int64)
    template = np.array(used, dtype=np.int64)
    num_runs = sizes[template]
    begins = (sizes.cumsum() - sizes)[template] - (num_runs.cumsum() - num_runs)
    index = np.arange(num_runs.sum()) + np.repeat(begins, num_runs)
    rows = np.array(groups, dtype=np.int64).reshape(-1, 3)
    column = table[index, 0] + np.repeat(rows[:, 0], num_runs)
    band = np.full_like(column, UNBOUNDED)
    return _builder.Tables(
        groups=np.column_stack((rows, num_runs)),
        runs=np.column_stack((column, table[index, 1:3], -band, band)),
        multiplicity=table[index, 3].astype(np.float64),
        per_variant=np.array(per_variant),
    )


def _row_groups(branches: tuple[_Branch, ...], num_tokens: int) -> list[_Group]:
    """Group the rows into progressions whose tokens are live in the same branches and segments."""
    rates = tuple(branch.rate for branch in branches)
    period = math.lcm(*rates)
    cuts = {cut for branch in branches for cut in range(0, num_tokens, branch.length)}
    groups: list[_Group] = []
    # (stride, residue, branches) -> group that ends at the cut, and that an equal class continues.
    reaching: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for begin, end in pairwise(sorted(cuts | {num_tokens})):
        phases = tuple((b.offset - begin % b.length) % b.rate for b in branches)
        classes = _row_classes(rates, phases, min(end - begin, period))
        still: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for stride, phase, live in classes:
            first = begin + phase
            length = -((first - end) // stride)
            same = (stride, first % stride, live)
            index = reaching.get(same)
            if index is None or any(begin % branches[i].length == 0 for i in live):
                index = len(groups)
                groups.append((first, stride, length, live))
            else:
                start, _, before, _ = groups[index]
                groups[index] = (start, stride, before + length, live)
            still[same] = index
        reaching = still
    return groups


@functools.lru_cache(maxsize=4096)
def _row_classes(
    rates: tuple[int, ...], phases: tuple[int, ...], window: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (stride, phase, branches) of the tokens that are live in some branch.

    Token x is live in branch i if ``x = phases[i] modulo rates[i]``. `window` is the number of
    tokens, or the period after which the live branches repeat.
    """
    x = np.arange(window)
    live = np.stack([x % rate == phase for rate, phase in zip(rates, phases, strict=True)])
    sets, labels = np.unique(live, axis=1, return_inverse=True)
    labels = np.where(live.any(0), labels.reshape(-1) + 1, 0)
    branches = [tuple(np.flatnonzero(column).tolist()) for column in sets.T]
    return [
        (stride, phase, branches[label - 1]) for stride, phase, label in _classes(labels, rates)
    ]


def _columns(
    segments: tuple[tuple[int, int, int], ...], multiset: bool
) -> list[tuple[int, int, int, int]]:
    """Return (start, stride, length, m) of the keys that a query at position 0 sees.

    Each segment (begin, end, rate) contains 0; the live keys of a segment are multiples of rate.
    """
    borders = {border for begin, end, _ in segments for border in (begin, end)}
    runs: list[tuple[int, int, int, int]] = []
    reaching: dict[tuple[int, int, int], int] = {}
    for begin, end in pairwise(sorted(borders)):
        rates = tuple(sorted(r for first, last, r in segments if first <= begin and end <= last))
        period = math.lcm(*rates)
        window = min(period, end - begin)
        shift = begin if window < period else 0
        still: dict[tuple[int, int, int], int] = {}
        for stride, phase, m in _column_classes(rates, shift % period, window, multiset):
            residue = (phase + shift) % stride
            first = begin + (residue - begin) % stride
            length = -((first - end) // stride)
            same = (stride, residue, m)
            index = reaching.get(same)
            if index is None:
                index = len(runs)
                runs.append((first, stride, length, m))
            else:
                runs[index] = (*runs[index][:2], runs[index][2] + length, m)
            still[same] = index
        reaching = still
    return runs


@functools.lru_cache(maxsize=4096)
def _column_classes(
    rates: tuple[int, ...], shift: int, window: int, multiset: bool
) -> list[tuple[int, int, int]]:
    """Return (stride, phase, m) of the x < window with x + shift a multiple of some rate."""
    x = np.arange(window) + shift
    m = sum((x % rate == 0).astype(np.int64) for rate in rates)
    return _classes(m if multiset else np.minimum(m, 1), rates)


def _classes(labels: np.ndarray, rates: Sequence[int]) -> list[tuple[int, int, int]]:
    """Divide nonzero labels into progressions (stride, phase, label), smallest strides first."""
    window = len(labels)
    labels = labels.copy()
    strides = {1}
    for rate in rates:
        strides = {math.lcm(s, d) for s in strides for d in _divisors(rate)}
        strides = {stride for stride in strides if stride < window}
    classes = []
    for stride in (*sorted(strides), window):
        if not labels.any():
            break
        padded = np.full(-(-window // stride) * stride, -1)
        padded[:window] = labels
        by_phase = padded.reshape(-1, stride)
        agree = ((by_phase == by_phase[0]) | (by_phase == -1)).all(0) & (by_phase[0] > 0)
        for phase in np.flatnonzero(agree).tolist():
            classes.append((stride, phase, int(labels[phase])))
            labels[phase::stride] = 0
    return classes


def _divisors(number: int) -> set[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return {*small, *(number // d for d in small)}
