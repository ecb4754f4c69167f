"""Samples that are spans of tokens, as in a packed batch.

Tables that depend on the spans are made on the CPU, once per batch, and cached on the device.

Letters: U samples, N tokens in total.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

# (first token, end) of each sample; equal if the sample has no tokens. Spans do not overlap.
Spans = tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=64)
def check_spans(spans: Spans, tokens: int) -> None:
    """Raise ValueError if spans overlap or do not fit into `tokens` tokens."""
    if any(not 0 <= start <= end <= tokens for start, end in spans):
        raise ValueError(f"spans: give pairs 0 <= start <= end <= {tokens}")
    own = sorted(span for span in spans if span[0] != span[1])
    if any(end > start for (_, end), (start, _) in itertools.pairwise(own)):
        raise ValueError("spans: two spans overlap; give each token to one sample at most")


@functools.lru_cache(maxsize=64)
def places(spans: Spans | None, device: torch.device) -> Tensor | None:
    """Copy spans to a device, [U, 2], int64, without synchronizing; None stays None."""
    if spans is None:
        return None
    return torch.tensor(spans, dtype=torch.int64).view(-1, 2).to(device, non_blocking=True)


@functools.lru_cache(maxsize=4)
def samples_of_tokens(spans: Spans, tokens: int, device: torch.device) -> Tensor:
    """Return each token's sample, [N], int64, U for tokens of no sample. Do not modify it."""
    index = torch.full((tokens,), len(spans))
    for sample, (start, end) in enumerate(spans):
        index[start:end] = sample
    return index.to(device, non_blocking=True)


def tokens_as_samples(factors: Tensor, spans: Spans, *operands: Tensor) -> tuple[Tensor, ...]:
    """Make each token a sample; return factors [N], 0 outside of spans, operands [N, 1, ...]."""
    index = samples_of_tokens(spans, operands[0].shape[1], factors.device)
    own = torch.cat([factors, factors.new_zeros(1)])[index]
    return (own, *(x.transpose(0, 1) for x in operands))


def in_sequence(lengths: tuple[int, ...]) -> Spans:
    """Return adjacent spans of these lengths."""
    return tuple(itertools.pairwise([0, *itertools.accumulate(lengths)]))


@functools.lru_cache(maxsize=64)
def chunks(spans: Spans, most: int) -> tuple[Spans, Spans]:
    """Cut spans into chunks of <= `most` tokens; return chunks, and each span's chunk range."""
    cut = [
        [(first, min(first + most, end)) for first in range(start, end, most)] or [(start, end)]
        for start, end in spans
    ]
    return tuple(itertools.chain(*cut)), in_sequence(tuple(map(len, cut)))


@functools.lru_cache(maxsize=16)
def pairs_of_tiles(spans: Spans, tile: int, device: torch.device) -> tuple[Tensor, Spans]:
    """Return pairs of tiles (s, t >= s, sample), [3, pairs], int32, and each span's pair range."""
    own = [torch.triu_indices(n, n) for n in (-(-(end - start) // tile) for start, end in spans)]
    numbered = [F.pad(pairs, (0, 0, 0, 1), value=sample) for sample, pairs in enumerate(own)]
    table = torch.cat(numbered, 1) if numbered else torch.empty(3, 0)
    counts = tuple(pairs.shape[1] for pairs in own)
    return table.to(torch.int32).to(device, non_blocking=True), in_sequence(counts)
