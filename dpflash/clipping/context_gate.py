"""The clipping gate where a sample's tokens lie on several workers.

A sample's gradient is then the sum of what its shards give, and the norm of a sum does not follow
from the norms of its terms. So per-sample gradients are summed over the context group, each worker
getting a share of every parameter's elements (reduce-scatter); it norms its share, the squares of
all shares make the norm (one all-reduce of B numbers), and each worker clips, sums and noises its
share. The whole sum is put together from the shares (all-gather).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dpflash.kernels import (
    block_clip_reduce,
    bound_share,
    clip_reduce,
    embedding_per_sample_grad,
    per_sample_grad,
    squared_norm,
)
from dpflash.kernels.block_reference import BLOCK

from ..distributed import collectives
from ..step import refuse_mixed
from .deferred import TiledUse
from .gate import Gate


class ContextGate(Gate):
    """A gate each of whose workers holds a share of the per-sample gradients' elements."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert self.owner.ranks.context is not None
        self._group = self.owner.ranks.context
        self._shares: dict[int, Tensor] = {}
        self._taken: set[int] = set()
        self._mixed: list[Tensor] = []
        self._is_settled = False

    def take_linear(
        self, position: int, x: Tensor, dy: Tensor, *, swapped: bool = False
    ) -> Tensor | None:
        """See `Gate.take_linear`; what it returns has been taken already."""
        self._only_seen(position, *((x, dy) if swapped else (dy, x)))
        if self.owner.mode != "prove":
            self._take(position, per_sample_grad(x, dy))
        return None

    def take_embedding(self, position: int, indices: Tensor, dy: Tensor) -> Tensor | None:
        """See `Gate.take_embedding`."""
        self._only_seen(position, dy, indices)
        if self.owner.mode != "prove":
            self._take(position, embedding_per_sample_grad(indices, dy, self._rows(position)))
        return None

    def take_tiled(self, position: int, use: TiledUse) -> bool:
        """See `Gate.take_tiled`: its gradient goes to the handle."""
        return self._only_seen(position, *use.rows)

    def finish_norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Squared norms [B] of the group, from all shares of all workers."""
        self._settle(grads)
        squares = torch.zeros(self.batch_size, dtype=torch.float64, device=self.device)
        if self.squares is not None:
            squares += self.squares
        for share in self._shares.values():
            squares += squared_norm(share)
        if self.batch_size:
            collectives.all_reduce_(squares, self._group, "norms of the samples' gradients")
        return squares

    def reset(self) -> None:
        super().reset()
        self._shares = {}
        self._taken = set()
        self._mixed = []
        self._is_settled = False

    def _take(self, position: int, grad: Tensor) -> None:
        """A use's per-sample gradients of this worker's tokens; keep a share of everyone's."""
        share = self._share(position, grad)
        mode = self.owner.mode
        if mode not in ("norms", "sum") or not self._single(position):
            self._add_share(position, share)
            return
        if mode == "sum":
            self._sums[position] = clip_reduce(share, self.owner.factors, grid=self.step.grid)
            if not self.owner.norms_again:
                return
        squares = squared_norm(share)
        self.squares = squares if self.squares is None else self.squares + squares

    def _add_share(self, position: int, share: Tensor) -> None:
        held = self._shares.get(position)
        self._shares[position] = share if held is None else held + share

    def _settle(self, grads: Sequence[Tensor | None]) -> None:
        """Take what reached the handles by autograd, once; zeros for what got no gradient here.

        Raises:
            RuntimeError: gradients of different parameters met.
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
                self._add_share(position, self._share(position, grad))
        refuse_mixed(self._mixed)

    def _factors(self, grads: Sequence[Tensor | None]) -> Tensor:
        if self.owner.mode == "sum":
            self._settle(grads)
        return super()._factors(grads)

    def _clipped(
        self, position: int, parameter: nn.Parameter, grad: Tensor | None, factors: Tensor
    ) -> Tensor | None:
        total, share = self._sums.get(position), self._shares.get(position)
        if share is not None:
            own = clip_reduce(share, factors, grid=self.step.grid)
            total = own if total is None else total + own
        # `_settle` left no parameter out.
        assert total is not None
        self.step.sum_to_extend(parameter)
        return self.step.add(parameter, self._whole(position, total))

    def _finish_tiles(self, grad: Tensor | None) -> list[Tensor | None]:
        owner = self.owner
        (parameter,) = self.group.parameters
        self._settle([grad])
        share = self._shares[0]
        scale = max(1, self.batch_size) if owner.loss_reduction == "mean" else 1
        width = parameter.shape[1]
        own = self.step.rows.only(share) * scale
        matrix = own.view(self.batch_size, share.shape[1] // width, width)
        dtype = share.dtype if self.step.grid is None else torch.float64
        total, factors = share.new_zeros(0, dtype=dtype), share.new_ones(self.batch_size, 0)
        if matrix.shape[1]:
            total, factors = block_clip_reduce(
                matrix, self._tile_bound(matrix.shape[1]), grid=self.step.grid, return_factors=True
            )
        owner.statistics.note(None, self._least(factors))
        whole = self._whole(0, total.flatten())
        self.reset()
        self.step.sum_to_extend(parameter)
        return [self.step.add(parameter, whole)]

    def _tile_bound(self, rows: int) -> float:
        """The part of the bound that so many rows of the tiled parameter have."""
        return self.bound * bound_share(rows, self._rows(0))

    def _cut(self, position: int) -> tuple[int, int, int]:
        """Where this worker's share of a parameter begins and ends; the greatest share's size."""
        parameter = self.group.parameters[position]
        # Tiles are not cut.
        unit = BLOCK[0] * parameter.shape[1] if self.group.tiled else 1
        count = collectives.world_size(self._group)
        size = -(-parameter.numel() // (unit * count)) * unit
        begin = min(size * collectives.rank_in(self._group), parameter.numel())
        return begin, min(begin + size, parameter.numel()), size

    def _share(self, position: int, grad: Tensor) -> Tensor:
        """This worker's share `[B, n]` of per-sample gradients `[B, ...]` summed over all."""
        begin, end, size = self._cut(position)
        parameter = self.group.parameters[position]
        batch, count = grad.shape[0], collectives.world_size(self._group)
        grad = grad.reshape(batch, parameter.numel())
        dtype = torch.promote_types(grad.dtype, torch.float32)
        self._taken.add(position)
        if batch == 0:
            return grad.new_zeros((0, end - begin), dtype=dtype)
        # One more number tells whether the others' gradients are of the same parameter.
        mark = self.step.mark_of(parameter)
        sent = grad.new_zeros((count, batch * size + 1), dtype=dtype)
        sent[:, -1] = mark
        for worker, row in enumerate(sent):
            theirs = grad[:, size * worker : size * (worker + 1)]
            row[:-1].view(batch, size)[:, : theirs.shape[1]] = theirs
        own = collectives.reduce_scatter(
            sent, self._group, "sum of the samples' gradients over their tokens"
        )
        self._mixed.append(own[-1] != count * mark)
        return own[:-1].view(batch, size)[:, : end - begin]

    def _whole(self, position: int, share: Tensor) -> Tensor:
        """A parameter's total, put together from the shares of it."""
        parameter = self.group.parameters[position]
        size = self._cut(position)[2]
        padded = F.pad(share.flatten(), (0, size - share.numel()))
        whole = collectives.all_gather(padded, self._group, "clipped sums of all workers' shares")
        return whole.flatten()[: parameter.numel()].view(parameter.shape)

    def _least(self, factors: Tensor) -> Tensor:
        """`[B]`: the least factor of each sample over all workers' tiles `[B, tiles]`."""
        # A worker may have no tile.
        least = F.pad(factors, (0, 1), value=1.0).amin(1)
        if len(least):
            collectives.all_reduce_(
                least, self._group, "factors of the samples' tiles", dist.ReduceOp.MIN
            )
        return least
