"""ContextGate: the clipping gate for samples whose tokens are spread over several ranks.

A sample's gradient is the sum of the gradients of its shards, and the norm of a sum cannot be
computed from the norms of its terms. So the ranks exchange per-sample gradients: each rank adds up
its part of every parameter (a slice, see `dpflash.distributed.slices`), and computes the squared
norms [B] of this part. An all-reduce adds up the squared norms. Then each rank clips and sums its
slice, and the optimizer step joins the slices. One exchange (a bundle) has several parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpflash.kernels import clip_reduce, squared_norm

from ..distributed import collectives
from ..distributed.slices import reduce_to_owners
from .deferred import TiledUse
from .gate import Gate


class ContextGate(Gate):
    """A gate whose per-sample gradients are divided into slices, one for each rank."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.step.sums.ranks.context is not None
        self._group = self.step.sums.ranks.context

    def take_linear(
        self, position: int, x: Tensor, dy: Tensor, *, swapped: bool = False
    ) -> Tensor | None:
        """See `Gate.take_linear`; the handle gets no gradient."""
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
        """See `Gate.take_tiled`; the gradient is returned to the handle."""
        return self._only_seen(position, *use.rows)

    def finish_norms(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the squared norms [B] of the group, from the slices of all ranks."""
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
        self._waiting: dict[int, Tensor] = {}
        self._uses: Counter[int] = Counter()
        self._is_settled = False

    def _take(self, position: int, grad: Tensor) -> None:
        """Save per-sample gradients of this rank's tokens; exchange them once a bundle is full."""
        self._wait(position, grad)
        self._uses[position] += 1
        # Parameters whose gradients over all calls of their layer have been added up.
        all_uses = {i: len(self.shapes[i]) for i in self._waiting if i not in self._dense}
        ready = [i for i, count in all_uses.items() if self._uses[i] == count]
        if sum(self._waiting[i].nbytes for i in ready) >= collectives.BUNDLE_BYTES:
            self._exchange(ready)

    def _wait(self, position: int, grad: Tensor) -> None:
        parameter = self.group.parameters[position]
        dtype = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.reshape(grad.shape[0], parameter.numel()).to(dtype)
        held = self._waiting.get(position)
        self._waiting[position] = grad if held is None else held + grad

    def _exchange(self, positions: Sequence[int]) -> None:
        """Sum per-sample gradients over ranks; keep this rank's slice of each parameter."""
        grads = [self._waiting.pop(i) for i in positions]
        slices = self.step.sums.slices
        for bundle in collectives.bundles(grads):
            own, theirs = [positions[i] for i in bundle], [grads[i] for i in bundle]
            cuts = [slices.of_context(self.group.parameters[i]) for i in own]
            if self.batch_size:
                names = [self.index, *own]
                operation = "sum of the samples' gradients over their tokens"
                pieces = reduce_to_owners(theirs, cuts, self._group, names, operation)
            else:
                at = collectives.rank_in(self._group)
                pieces = [x[:, cut[at]] for x, cut in zip(theirs, cuts, strict=True)]
            for position, piece in zip(own, pieces, strict=True):
                self._receive(position, piece)

    def _receive(self, position: int, piece: Tensor) -> None:
        """Save a slice of per-sample gradients or, in ghost clipping, its norms or its sum."""
        mode = self.run.mode
        if mode not in ("norms", "sum") or self.is_dense(position) or not self._single(position):
            held = self._slices.get(position)
            self._slices[position] = piece if held is None else held + piece
            return
        if mode == "sum":
            self._sums[position] = clip_reduce(piece, self.run.factors, grid=self.step.sums.grid)
            if not self.run.norms_again:
                return
        squares = squared_norm(piece)
        self.squares = squares if self.squares is None else self.squares + squares

    def _settle(self, grads: Sequence[Tensor | None]) -> None:
        """Exchange the per-sample gradients that are left; a missing gradient counts as zeros.

        Raises:
            RuntimeError: ranks exchanged gradients of different parameters.
        """
        if self._is_settled:
            return
        self._is_settled = True
        for position, (parameter, grad) in enumerate(
            zip(self.group.parameters, grads, strict=True)
        ):
            if grad is None and position not in self._uses:
                grad = parameter.new_zeros(()).expand(self.batch_size, *parameter.shape)
            if grad is not None:
                self._wait(position, grad)
        self._exchange(sorted(self._waiting))

    def _factors(self, grads: Sequence[Tensor | None]) -> Tensor:
        if self.run.mode == "sum":
            self._settle(grads)
        return super()._factors(grads)

    def _add_clipped(self, grads: Sequence[Tensor | None], factors: Tensor) -> None:
        step, parameters = self.step, self.group.parameters
        dense = [i for i in range(self.size) if i not in self._sums]
        totals = []
        for position, total in self._sums.items():
            piece = self._slices.get(position)
            more = 0 if piece is None else clip_reduce(piece, factors, grid=step.sums.grid)
            totals.append(total + more)
        step.add([parameters[i] for i in self._sums], totals)
        # For every other parameter, `_settle` saved a slice.
        pieces = [self._slices[i] for i in dense]
        step.add_clipped([parameters[i] for i in dense], pieces, factors)
