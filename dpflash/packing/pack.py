"""Packs documents into rows: `pack` for one batch, `PackTo` for a DataLoader.

Letters: U documents, R rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from .._validate import positive_int
from ..refusal import PrivateRefusal
from .units import Units

Parts = list[tuple[Tensor, Tensor | None]]

IGNORED = -100
# Padding is divided into pieces of 64 tokens.
_PADDING = 64
# A document that begins at a multiple of 64 tokens has the same place in SIMD vectors and tiles,
# whatever documents are packed before it.
EXACT_ALIGN = 64


class PackedBatch(dict[str, Tensor]):
    """Documents packed into rows: a dict whose entries are also attributes.

    - ``input_ids`` `[R, T]`: tokens; 0 in padding.
    - ``labels`` `[R, T]`: the tokens to predict, unshifted, as Hugging Face's models require. -100
      in padding and for the first token of a document or row, which no position predicts.
    - ``sample_index`` `[R, T]`, int64: the index of each token's document; -1 in padding.
    - ``position_ids`` `[R, T]`, int64: positions from the document's first token, or from the
      first token of each row if the document has several rows; 0 in padding.
    - ``cu_seqlens`` `[S]`, int32: borders of documents and of pieces of padding, as positions in
      the concatenation of all rows. The last border is repeated up to length S. If each sample is
      one document, S depends on U, R and T alone.

    Attributes:
        units: the positions of the U documents; a document may have no position.
        longest: the largest number of tokens that attend to each other.
    """

    def __init__(
        self, entries: Mapping[str, Tensor], units: Units, longest: int | None = None
    ) -> None:
        super().__init__(entries)
        self.units = units
        self.longest = _longest(self.cu_seqlens, units) if longest is None else longest

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> Any:
        return type(self), (dict(self), self.units, self.longest)

    @property
    def max_documents(self) -> int:
        """U, the number of documents and of losses; documents may be empty."""
        return self.units.size

    @property
    def targets(self) -> Tensor:
        """`[R, T]`, int64: the token to predict at each position; -100 for no token."""
        if "targets" in self:
            return self["targets"]
        shifted = torch.full_like(self.labels, IGNORED)
        shifted[:, :-1] = self.labels[:, 1:]
        return shifted

    def columns(self, first: int, last: int) -> PackedBatch:
        """Return a batch with the tokens `first` to `last` - 1 of each row.

        The result has ``targets`` instead of labels, since a model would shift labels within the
        shorter rows. ``units`` is restricted too; ``cu_seqlens`` and ``longest`` are unchanged.
        """
        of_tokens = {**self, "targets": self.targets}
        del of_tokens["labels"], of_tokens["cu_seqlens"]
        own = {name: t[:, first:last].contiguous() for name, t in of_tokens.items()}
        entries = {**own, "cu_seqlens": self.cu_seqlens}
        return PackedBatch(entries, self.units.columns(first, last), self.longest)

    def to(self, *args: Any, **kwargs: Any) -> PackedBatch:
        """Return the batch with its tensors moved by `torch.Tensor.to`."""
        return self._changed({k: t.to(*args, **kwargs) for k, t in self.items()})

    def pin_memory(self) -> PackedBatch:
        """Return the batch in pinned memory."""
        return self._changed({k: t.pin_memory() for k, t in self.items()})

    def _changed(self, entries: Mapping[str, Tensor]) -> PackedBatch:
        return PackedBatch(entries, self.units, self.longest)


def _longest(cu_seqlens: Tensor, units: Units) -> int:
    index, borders = units.index, cu_seqlens.tolist()
    lengths = (
        end - start
        for start, end in zip(borders, borders[1:], strict=False)
        if start != end and index[start] != units.size
    )
    return max(lengths, default=0)


class Places:
    """Assigns positions in rows of equal length to documents, one after the other.

    A document longer than a row begins at the first of several empty rows.

    Args:
        tokens: number of tokens of all rows together.
        max_documents: U.
        rows: R.
        align: documents begin at multiples of `align` tokens in a row.
    """

    def __init__(self, tokens: int, max_documents: int, rows: int, align: int) -> None:
        self.spans: list[tuple[int, int]] = []
        self._max = max_documents
        self._width = tokens // rows
        self._align = align
        self._used = [0] * rows

    def add(self, length: int) -> bool:
        """Append the next document's positions to `spans`; return False if it does not fit."""
        if len(self.spans) == self._max:
            return False
        if length == 0:
            self.spans.append((0, 0))
            return True
        rows = -(-length // self._width)
        for row in range(len(self._used) - rows + 1):
            alone = rows == 1 or not any(self._used[row : row + rows])
            begin = self._used[row]
            if alone and (rows > 1 or begin + length <= self._width):
                start = row * self._width + begin
                self.spans.append((start, start + length))
                for number in range(row, row + rows - 1):
                    self._used[number] = self._width
                end = start + length - (row + rows - 1) * self._width
                self._used[row + rows - 1] = -(-end // self._align) * self._align
                return True
        return False


class PackTo:
    """A `collate_fn` that packs documents into rows. Each document is one sample.

    With a DataLoader of this collate_fn, `make_private` samples documents, and packs as many
    documents into a microbatch as fit. The shapes are public.

    Args:
        tokens: number of tokens of a microbatch, over all of its rows. A longer document is
            truncated to its first `tokens` tokens.
        max_documents: U, the number of losses of a microbatch, which holds at most U documents.
        rows: R, which must divide tokens. A document longer than a row is divided into windows of
            one row each, which do not attend to each other but are still one sample.
        align: documents begin at multiples of `align` tokens in a row; it must divide
            tokens / rows. With a multiple of 64, a document's gradients have the same bits
            wherever it is packed, see docs/packing.md.

    A document is a 1-D tensor or a list of token ids, or a mapping with ``input_ids`` of this type
    and, if needed, unshifted ``labels`` of the same length. A list of documents is one sample: its
    documents are packed one after the other and do not attend to each other. Any other object has
    no tokens and contributes zero, see "One bad entry" in docs/training.md.

    Raises:
        ValueError: an argument is not a positive integer, or does not divide as required.
    """

    def __init__(self, *, tokens: int, max_documents: int, rows: int = 1, align: int = 1) -> None:
        positive_int(tokens=tokens, max_documents=max_documents, rows=rows, align=align)
        if tokens % rows:
            raise ValueError(
                f"tokens={tokens} in rows={rows}: expected a multiple of rows; pass "
                f"tokens={tokens // rows * rows or rows}"
            )
        if tokens // rows % align:
            raise ValueError(
                f"align={align} in rows of {tokens // rows} tokens: must divide the row's length"
            )
        self.tokens = tokens
        self.max_documents = max_documents
        self.rows = rows
        self.align = align

    def places(self) -> Places:
        """Return the `Places` of an empty microbatch."""
        return Places(self.tokens, self.max_documents, self.rows, self.align)

    def length_of(self, document: Any) -> int:
        """Return a document's number of tokens, at most `tokens`; 0 if it is not a document."""
        return sum(len(tokens) for tokens, _ in self.read(document))

    def read(self, document: Any, at_most: int | None = None) -> Parts:
        """Return (tokens, labels) of each part of a document; [] if it is not a document.

        All parts together are truncated to `at_most` tokens, by default to `tokens`.
        """
        parts, left = [], self.tokens if at_most is None else at_most
        for tokens, labels in _parts_of(document):
            parts.append((tokens[:left], None if labels is None else labels[:left]))
            left -= len(parts[-1][0])
        return parts

    def microbatches(self, lengths: Sequence[int]) -> list[list[int]]:
        """Divide documents of these lengths into microbatches; return lists of their indices.

        The longest documents are placed first, each in the first microbatch that has room.
        """
        filled: list[list[int]] = []
        places: list[Places] = []
        for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            for documents, own in zip(filled, places, strict=True):
                if own.add(lengths[number]):
                    documents.append(number)
                    break
            else:
                places.append(self.places())
                places[-1].add(lengths[number])
                filled.append([number])
        return filled

    def __call__(self, documents: Sequence[Any]) -> PackedBatch:
        """Pack these documents into one batch, in this order."""
        return self.packed([self.read(document) for document in documents])

    def packed(self, given: Sequence[Parts], room: Sequence[int] | None = None) -> PackedBatch:
        """Pack documents that `read` returned into one batch.

        Args:
            given: the documents, as `read` returns them.
            room: number of tokens to reserve for each document, by default all its tokens.

        Raises:
            PrivateRefusal: the documents do not fit into one batch.
        """
        places = self.places()
        lengths = [sum(len(tokens) for tokens, _ in parts) for parts in given]
        for reserved in lengths if room is None else room:
            if not places.add(reserved):
                raise PrivateRefusal(
                    f"documents do not fit into one batch of max_documents={self.max_documents} "
                    f"and tokens={self.tokens} in rows={self.rows}. Pass fewer documents, or "
                    "larger tokens= or max_documents=",
                    number=len(places.spans),
                ) from None
        starts = (start for start, _ in places.spans)
        filled = [(s, s + n) if n else (0, 0) for s, n in zip(starts, lengths, strict=True)]
        empty = [(0, 0)] * (self.max_documents - len(given))
        shape = (self.rows, self.tokens // self.rows)
        units = Units(shape, (*filled, *empty))
        return PackedBatch(_entries(units, given), units)


def pack(
    documents: Sequence[Any],
    *,
    tokens: int,
    max_documents: int,
    rows: int = 1,
    align: int = 1,
) -> PackedBatch:
    """Pack documents into one batch; see `PackTo` for the arguments.

    Returns:
        The batch, in which document i is sample i. Samples after the last document are empty.

    Raises:
        ValueError: `PackTo` refuses an argument.
        PrivateRefusal: the documents do not fit.
    """
    return PackTo(tokens=tokens, max_documents=max_documents, rows=rows, align=align)(documents)


def _entries(units: Units, given: Sequence[Parts]) -> dict[str, Tensor]:
    rows, width = units.shape
    input_ids = torch.zeros(units.positions, dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    inner = []
    for (start, _), parts in zip(units.spans, given, strict=False):
        for tokens, own in parts:
            end = start + len(tokens)
            input_ids[start:end] = tokens
            labels[start:end] = tokens if own is None else own
            labels[start : start + 1] = IGNORED
            inner.append(end)
            start = end
    labels.view(rows, width)[:, 0] = IGNORED
    index = units.index.clone()
    index[index == units.size] = -1
    cu_seqlens = cu_seqlens_of(units, inner)
    starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff())
    positions = (torch.arange(units.positions) - starts).masked_fill_(index < 0, 0)
    flat = {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions,
        "sample_index": index,
    }
    return {**{name: t.view(rows, width) for name, t in flat.items()}, "cu_seqlens": cu_seqlens}


def cu_seqlens_of(units: Units, inner: Iterable[int]) -> Tensor:
    """Return ``cu_seqlens`` of a `PackedBatch`; `inner`: borders between a sample's documents."""
    rows, width = units.shape
    borders = {0, units.positions, *(end for span in units.spans for end in span), *inner}
    borders |= set(range(0, units.positions, width))
    # Divide the padding too: as one long piece, it would cost more attention than documents do.
    padded = (units.index == units.size).tolist()
    borders |= {t for t in range(0, units.positions, _PADDING) if padded[t]}
    most = 2 * (units.size + rows) + units.positions // _PADDING + 1
    cu_seqlens = torch.full((max(most, len(borders)),), units.positions, dtype=torch.int32)
    cu_seqlens[: len(borders)] = torch.tensor(sorted(borders), dtype=torch.int32)
    return cu_seqlens


def _parts_of(sample: Any) -> Parts:
    """Return (tokens, labels) of each document of a sample; leave out other objects."""
    several = isinstance(sample, list | tuple) and sample and not isinstance(sample[0], Number)
    if not several or isinstance(sample[0], Tensor) and sample[0].ndim == 0:
        sample = [sample]
    parts = []
    for document in sample:
        is_mapping = isinstance(document, Mapping)
        tokens = _ids(document.get("input_ids") if is_mapping else document)
        own = document.get("labels") if is_mapping else None
        labels = None if own is None else _ids(own)
        if tokens is not None and (own is None or labels is not None):
            if labels is None or len(labels) == len(tokens):
                parts.append((tokens, labels))
    return parts


def _ids(values: Any) -> Tensor | None:
    """Convert a 1-D tensor or a list of integers to `[n]`, int64; return None for other values."""
    try:
        ids = torch.as_tensor(values).cpu().to_dense()
    except Exception:
        return None
    if ids.ndim == 1 and not ids.numel():
        return ids.long()
    is_integer = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    return ids.long() if ids.ndim == 1 and is_integer else None
