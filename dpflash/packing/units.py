"""Units: the rows or tokens of a microbatch that belong to each privacy unit.

A packed document consists of tokens; a user with several entries, or a pair, consists of rows.

Letters: U units, R rows, T tokens of a row, N positions: R T tokens, or R rows if units are rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpflash.kernels import span_sum

from ..refusal import PrivateRefusal


@dataclass(frozen=True)
class Units:
    """The positions of each unit, which are contiguous in row-major order.

    Attributes:
        shape: leading dimensions of the batch: `(R,)` if units consist of rows, `(R, T)` if they
            consist of tokens.
        spans: (first position, end) of each unit; first = end for a unit without positions.
    """

    shape: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        places = sorted(span for span in self.spans if span[0] != span[1])
        ends = [0, *(end for _, end in places)]
        starts = [*(start for start, _ in places), math.prod(self.shape)]
        if any(end > start for end, start in zip(ends, starts, strict=True)):
            raise PrivateRefusal(
                "spans: two units overlap, or leave the batch", spans=self.spans
            ) from None
        if any(start > end for start, end in self.spans):
            raise PrivateRefusal("spans: a unit ends before it starts", spans=self.spans) from None

    @property
    def size(self) -> int:
        """U, the number of units."""
        return len(self.spans)

    @property
    def are_rows(self) -> bool:
        """Whether units consist of rows, not of tokens."""
        return len(self.shape) == 1

    def mean(self, values: Tensor) -> Tensor:
        """Average values `[N]` over each unit, to `[U]`; 0 for a unit without positions."""
        index = self.index.to(values.device)
        sums = values.new_zeros(self.size + 1).index_add(0, index, values)
        counts = torch.bincount(index, minlength=self.size + 1).clamp(min=1)
        return (sums / counts)[: self.size]

    @property
    def positions(self) -> int:
        """N, the number of positions."""
        return math.prod(self.shape)

    @cached_property
    def index(self) -> Tensor:
        """`[N]`, int64, on the CPU: the unit of each position; U for a position of no unit."""
        index = torch.full((self.positions,), self.size)
        for unit, (start, end) in enumerate(self.spans):
            index[start:end] = unit
        return index

    def columns(self, first: int, last: int) -> Units:
        """Return the units of a batch with the tokens `first` to `last` - 1 of each row.

        Units and rows keep their numbers; a unit may have no tokens left.
        """
        (rows, width), kept = self.shape, last - first

        def place(position: int) -> int:
            """Return the number of kept positions before a position."""
            row, column = divmod(position, width)
            return row * kept + min(max(column - first, 0), kept)

        spans = [(place(start), place(end)) for start, end in self.spans]
        return Units((rows, kept), tuple(s if s[0] != s[1] else (0, 0) for s in spans))

    def pieces(self) -> list[tuple[int, int]]:
        """Return (unit, number of positions) of each part of a unit within one row, in order.

        Positions of no unit form parts with unit U.
        """
        key = self.index.view(self.shape) + (self.size + 1) * torch.arange(self.shape[0])[:, None]
        keys, counts = torch.unique_consecutive(key, return_counts=True)
        return list(zip((keys % (self.size + 1)).tolist(), counts.tolist(), strict=True))

    def flattened(self, x: Tensor, layer: str) -> Tensor:
        """Reshape x `[*shape, ...]` to `[N, ...]`; return x `[N, ...]` unchanged.

        Raises:
            PrivateRefusal: x has other leading dimensions.
        """
        dims = len(self.shape)
        if tuple(x.shape[:dims]) == self.shape:
            return x if self.are_rows else x.flatten(0, dims - 1)
        if x.ndim and x.shape[0] == self.positions:
            return x
        raise PrivateRefusal(
            f"input of layer '{layer}' does not have one entry for each of the rows of users "
            "(unit_of) or pairs, or for each token of packed documents ([rows, tokens, ...] or "
            "[rows * tokens, ...]). The privacy unit of each entry is unknown. Pass all rows to "
            "the model in one call, and call it on other data under torch.no_grad()",
            shape=tuple(x.shape),
            batch=self.shape,
        ) from None

    def entries(self, unit: int, n: int) -> slice:
        """Return the slice of one unit's entries in tensors `[n, ...]`, n a multiple of N."""
        each = n // max(1, self.positions)
        start, end = self.spans[unit]
        return slice(start * each, end * each)

    def spans_of(self, n: int) -> tuple[tuple[int, int], ...]:
        """Return (first entry, end) of each unit in tensors `[n, ...]`, n a multiple of N."""
        each = n // max(1, self.positions)
        if each == 1:
            return self.spans
        return tuple((start * each, end * each) for start, end in self.spans)

    def of_entries(self, values: Tensor, n: int) -> Tensor:
        """Expand values `[U, ...]` of units to `[n, ...]` entries; 0 for entries of no unit."""
        none = values.new_zeros(1, *values.shape[1:])
        own = torch.cat([values, none])[self.index.to(values.device)]
        return own.repeat_interleave(n // max(1, self.positions), 0)

    def summed(self, x: Tensor) -> Tensor:
        """Sum x `[n, ...]` over the entries of each unit, to `[U, ...]`, in fp32 or wider."""
        return span_sum(x if x.is_floating_point() else x.float(), self.spans_of(len(x)))

    def padded(self, x: Tensor) -> Tensor:
        """Stack the entries of each unit of x `[n, ...]` to `[U, L, ...]`, padded with zeros."""
        entries = [x[start:end] for start, end in self.spans_of(len(x))]
        if not any(map(len, entries)):
            return x.new_zeros(self.size, 1, *x.shape[1:])
        return pad_sequence(entries, batch_first=True)

    def describes(self, x: Tensor) -> bool:
        """Return whether x `[*shape]` holds each token's unit index or position, not contents."""
        if self.are_rows or x.is_floating_point() or tuple(x.shape) != self.shape:
            return False
        flat, index = x.detach().flatten().cpu(), self.index
        own = index < self.size
        if torch.equal(flat[own], index[own].to(flat.dtype)):
            return True
        # x holds positions if values increase by one within a unit; they may restart in each row.
        width = self.shape[-1]
        for start, end in self.spans:
            steps = torch.arange(start, end) % width
            expected = steps if end - start > width else steps - start % width
            if not torch.equal(flat[start:end], expected.to(flat.dtype)):
                return False
        return True

    def order_of(self, source: Tensor) -> Tensor:
        """Return `[N]`, int64: for each position, the position from which it takes new contents.

        Args:
            source: `[U]`, int64: for each unit, the unit from which it takes new contents. The
                new contents are repeated or truncated to the length of the old contents.
        """
        order = torch.arange(self.positions)
        for unit, other in enumerate(source.tolist()):
            (start, end), (first, last) = self.spans[unit], self.spans[other]
            if unit != other and first != last:
                order[start:end] = first + torch.arange(end - start) % (last - first)
        return order
