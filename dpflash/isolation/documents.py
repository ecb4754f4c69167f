"""Packed batches for trials, in which documents are changed, left out or moved."""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing.pack import IGNORED, PackedBatch, cu_seqlens_of
from ..packing.units import Units

# Values that fill the positions without a document.
_PADDING = {"input_ids": 0, "labels": IGNORED, "position_ids": 0, "sample_index": -1}


def with_changed_documents(batch: PackedBatch, number: int) -> tuple[PackedBatch, Tensor]:
    """Return a copy of a batch in which some documents are left out and some have other tokens.

    Trials come in pairs, of two types in turn. In the first, one trial changes even documents, the
    other odd documents (later, groups of 2, 4, ... alternate). In the second, one changes the
    longer half, the other the shorter half. A document that is left out becomes padding, so the
    borders and the numbers of documents, tokens and labels change. Other changed documents keep
    position and length, but get the next document's tokens and labels, reversed.

    Args:
        batch: the batch, which is not changed.
        number: number of the trial, from 0; it determines which documents are changed.

    Returns:
        (the batch; `[U]`, bool: whether the document is unchanged while others changed).
    """
    units = batch.units
    filled = sorted(range(units.size), key=lambda unit: units.spans[unit])
    filled = [unit for unit in filled if _length(batch, unit)]
    entries = {name: x.clone() for name, x in batch.items()}
    kept = torch.zeros(units.size, dtype=torch.bool)
    changed, left_out = _chosen(batch, filled, number) if len(filled) > 1 else ([], [])
    if changed:
        kept[[unit for unit in filled if unit not in changed]] = True
    tokens, labels = batch.input_ids.flatten(), batch.labels.flatten()
    for unit in changed:
        own = slice(*units.spans[unit])
        if unit in left_out:
            for name, padding in _PADDING.items():
                entries[name].view(-1)[own] = padding
            continue
        first, last = units.spans[filled[(filled.index(unit) + 1) % len(filled)]]
        entries["input_ids"].view(-1)[own] = _reversed(tokens[first:last], _length(batch, unit))
        counts = (labels[own] != IGNORED).nonzero().flatten()
        theirs = labels[first:last]
        theirs = theirs[theirs != IGNORED]
        if len(counts) and len(theirs):
            entries["labels"].view(-1)[own][counts] = _reversed(theirs, len(counts))
    spans = tuple((0, 0) if unit in left_out else span for unit, span in enumerate(units.spans))
    left = Units(units.shape, spans)
    inner = batch.cu_seqlens[batch.cu_seqlens < left.positions].long()
    entries["cu_seqlens"] = cu_seqlens_of(left, inner[left.index[inner] < left.size].tolist())
    return PackedBatch(entries, left), kept


def moved(batch: PackedBatch) -> PackedBatch | None:
    """Return a copy of a batch in which the whole documents of each row are in reverse order.

    A document that spans several rows stays in its position. Documents keep their numbers.

    Returns:
        The copy; None if no row contains two whole documents.
    """
    units, width = batch.units, batch.units.shape[-1]
    rows: dict[int, list[int]] = {}
    for unit, (start, end) in enumerate(units.spans):
        if start < end and start // width == (end - 1) // width:
            rows.setdefault(start // width, []).append(unit)
    if all(len(row) < 2 for row in rows.values()):
        return None
    spans, entries = list(units.spans), {name: x.clone() for name, x in batch.items()}
    for row in rows.values():
        begin, end = min(spans[unit][0] for unit in row), max(spans[unit][1] for unit in row)
        for name, padding in _PADDING.items():
            entries[name].view(-1)[begin:end] = padding
        for unit in row:
            first, last = units.spans[unit]
            spans[unit] = own = (begin + end - last, begin + end - first)
            for name in _PADDING:
                entries[name].view(-1)[slice(*own)] = batch[name].view(-1)[first:last]
    there = Units(units.shape, tuple(spans))
    borders = batch.cu_seqlens[batch.cu_seqlens < units.positions].tolist()
    inner = []
    for border in borders:
        unit = int(units.index[border])
        if unit < units.size:
            inner.append(border + spans[unit][0] - units.spans[unit][0])
    entries["cu_seqlens"] = cu_seqlens_of(there, inner)
    return PackedBatch(entries, there)


def _chosen(batch: PackedBatch, filled: list[int], number: int) -> tuple[list[int], list[int]]:
    """Return (documents to change, subset of them to leave out); `filled` has at least two."""
    pair, odd = divmod(number, 2)
    by_length = sorted(filled, key=lambda unit: -_length(batch, unit))
    half = (len(filled) + 1) // 2
    if pair % 2:
        changed = by_length[half:] if odd else by_length[:half]
        return changed, changed[:-1]
    bit = pair // 2 % (len(filled) - 1).bit_length()
    changed = [unit for place, unit in enumerate(filled) if (place >> bit) % 2 == odd]
    # The later half of the changed documents, so one trial of a pair leaves out the last document.
    return changed, sorted(changed)[len(changed) // 2 :]


def _length(batch: PackedBatch, unit: int) -> int:
    start, end = batch.units.spans[unit]
    return end - start


def _reversed(values: Tensor, length: int) -> Tensor:
    return values.flip(0)[torch.arange(length) % len(values)]
