"""Packed batches in which some documents have other tokens, for the proof of the losses."""

from __future__ import annotations

import torch
from torch import Tensor

from .pack import IGNORED, PackedBatch


def with_changed_documents(batch: PackedBatch, number: int) -> tuple[PackedBatch, Tensor]:
    """A copy of a batch in which every other document has other tokens.

    A changed document gets the tokens of the next one in reverse order, so that its first token
    changes even where all documents begin alike. It keeps its place and length. Its labels are
    reversed with them, every other one is dropped, and none is added.

    Args:
        batch: not changed.
        number: whether the first, third, ... document is changed (odd), or the others (even).

    Returns:
        (batch, `[U]`, bool: documents that are unchanged while others changed).
    """
    units = batch.units
    filled = sorted(range(units.size), key=lambda unit: units.spans[unit])
    filled = [unit for unit in filled if _length(batch, unit)]
    entries = {name: x.clone() for name, x in batch.items()}
    kept = torch.zeros(units.size, dtype=torch.bool)
    changed = filled[(number + 1) % 2 :: 2] if len(filled) > 1 else []
    if changed:
        kept[[u for u in filled if u not in changed]] = True
    tokens, labels = batch.input_ids.flatten(), batch.labels.flatten()
    for unit in changed:
        other = filled[(filled.index(unit) + 1) % len(filled)]
        own, (first, last) = slice(*units.spans[unit]), units.spans[other]
        entries["input_ids"].view(-1)[own] = _reversed(tokens[first:last], _length(batch, unit))
        counts = (labels[own] != IGNORED).nonzero().flatten()
        theirs = labels[first:last]
        theirs = theirs[theirs != IGNORED]
        if len(counts) and len(theirs):
            new = _reversed(theirs, len(counts))
            new[1::2] = IGNORED
            entries["labels"].view(-1)[own][counts] = new
    return PackedBatch(entries, units), kept


def _length(batch: PackedBatch, unit: int) -> int:
    start, end = batch.units.spans[unit]
    return end - start


def _reversed(values: Tensor, length: int) -> Tensor:
    """Values from the last to the first, again and again."""
    return values.flip(0)[torch.arange(length) % len(values)]
