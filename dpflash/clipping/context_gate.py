"""ContextGate: the clipping gate for samples whose tokens are spread over several ranks.

A sample's gradient is the sum of the gradients of its shards, and the norm of a sum does not
follow from the norms of its terms. So a reduce-scatter over the context group adds per-sample
gradients up and leaves each rank a slice of every parameter's elements. Each rank computes the
squared norms of its slice, one all-reduce of B numbers adds them up, each rank clips and sums its
slice, and an all-gather puts the whole sum together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.kernels import clip_reduce, squared_norm

from ..distributed import collectives
from ..step import refuse_mixed
from .deferred import TiledUse
from .gate import Gate


class ContextGate(Gate):
    """A gate of which each rank holds a slice of the per-sample gradients."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.step.sums.ranks.context is not None
        self._group = self.step.sums.ranks.context

    def take_linear(
        self, position: int, x: Tensor, dy: Tensor, *, swapped: bool = False
    ) -> Tensor | None:
        """See `Gate.take_linear`; nothing is left for the handle."""
        self._only_seen(position, *((x, dy) if swapped else (dy, x)))
        if self.run.mode != "prove":
            self._take(position, self._deferred(position, linear=[(x, dy)]).dense())
        return None

    def take_embedding(self, position: int, indices: Tensor, dy: Tensor) -> Tensor | None:
        """See `Gate.take_embedding`."""
        self._only_seen(position, dy, indices)
        if self.run.mode != "prove":
            use = self._deferred(position, embedding=[(indices, dy)])
            self._take(position, use.dense())
        return None

    def take_tiled(self, position: int, use: TiledUse) -> bool:
        """See `Gate.take_tiled`: its gradient goes to the handle."""
        return self._only_seen(position, *use.rows)

    def finish_norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Squared norms [B] of the group, from the slices of all ranks."""
        self._settle(grads)
        squares = torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)
        if self.squares is not None:
            squares += self.squares
        if self._slices:
            squared_norm(*self._slices.values(), into=squares)
        if self.batch_size:
            collectives.all_reduce_(squares, self._group, "norms of the samples' gradients")
        return squares

    def reset(self) -> None:
        super().reset()
        self._slices: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        self._mixed: list[Tensor] = []
        self._is_settled = False

    def _take(self, position: int, grad: Tensor) -> None:
        """Exchange per-sample gradients of this rank's tokens, and keep its slice of the sum."""
        piece = self._slice(position, grad)
        mode = self.run.mode
        if mode not in ("norms", "sum") or not self._single(position):
            self._add_slice(position, piece)
            return
        if mode == "sum":
            self._sums[position] = clip_reduce(piece, self.run.factors, grid=self.step.sums.grid)
            if not self.run.norms_again:
                return
        squares = squared_norm(piece)
        self.squares = squares if self.squares is None else self.squares + squares

    def _add_slice(self, position: int, piece: Tensor) -> None:
        held = self._slices.get(position)
        self._slices[position] = piece if held is None else held + piece

    def _settle(self, grads: Sequence[Tensor | None]) -> None:
        """Exchange the handles' gradients, once; zeros where this rank has none.

        Raises:
            RuntimeError: ranks exchanged gradients of different parameters.
        """
        if self._is_settled:
            return
        self._is_settled = True
        refuse_mixed(self._mixed)
        for position, (parameter, grad) in enumerate(
            zip(self.group.parameters, grads, strict=True)
        ):
            if grad is None and position not in self._taken:
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                shape = (self.batch_size, *parameter.shape)
                grad = torch.zeros(shape, dtype=dtype, device=self.device)
            if grad is not None:
                self._add_slice(position, self._slice(position, grad))
        refuse_mixed(self._mixed)

    def _factors(self, grads: Sequence[Tensor | None]) -> Tensor:
        if self.run.mode == "sum":
            self._settle(grads)
        return super()._factors(grads)

    def _add_clipped(self, grads: Sequence[Tensor | None], factors: Tensor) -> None:
        self.step.add(
            self.group.parameters,
            (self._whole(i, self._own(i, factors)) for i in range(self.size)),
        )

    def _own(self, position: int, factors: Tensor) -> Tensor:
        """This rank's slice of a parameter's clipped sum."""
        total, piece = self._sums.get(position), self._slices.get(position)
        if piece is not None:
            own = clip_reduce(piece, factors, grid=self.step.sums.grid)
            total = own if total is None else total + own
        # `_settle` has a slice of every parameter.
        assert total is not None
        return total

    def _cut(self, position: int) -> tuple[int, int, int]:
        """(begin, end, size): this rank's slice of a parameter, and the largest slice's size."""
        parameter = self.group.parameters[position]
        size = -(-parameter.numel() // collectives.world_size(self._group))
        begin = min(size * collectives.rank_in(self._group), parameter.numel())
        return begin, min(begin + size, parameter.numel()), size

    def _slice(self, position: int, grad: Tensor) -> Tensor:
        """This rank's slice `[B, n]` of the sum over ranks of per-sample gradients `[B, ...]`."""
        begin, end, size = self._cut(position)
        parameter = self.group.parameters[position]
        batch, count = grad.shape[0], collectives.world_size(self._group)
        grad = grad.reshape(batch, parameter.numel())
        dtype = torch.promote_types(grad.dtype, torch.float32)
        self._taken.add(position)
        if batch == 0:
            return grad.new_zeros((0, end - begin), dtype=dtype)
        # The last element tells gradients of different parameters apart.
        mark = self.step.sums.mark_of(parameter)
        sent = grad.new_zeros((count, batch * size + 1), dtype=dtype)
        sent[:, -1] = mark
        for rank, row in enumerate(sent):
            theirs = grad[:, size * rank : size * (rank + 1)]
            row[:-1].view(batch, size)[:, : theirs.shape[1]] = theirs
        own = collectives.reduce_scatter(
            sent, self._group, "sum of the samples' gradients over their tokens"
        )
        self._mixed.append(own[-1] != count * mark)
        return own[:-1].view(batch, size)[:, : end - begin]

    def _whole(self, position: int, piece: Tensor) -> Tensor:
        """A parameter's clipped sum, put together from the slices of all ranks."""
        parameter = self.group.parameters[position]
        size = self._cut(position)[2]
        padded = F.pad(piece.flatten(), (0, size - piece.numel()))
        whole = collectives.all_gather(padded, self._group, "clipped sums of all ranks' slices")
        return whole.flatten()[: parameter.numel()].view(parameter.shape)
