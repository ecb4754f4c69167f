"""A linear head with its cross-entropy, in chunks of tokens: logits [B, T, V] are never stored.

The forward saves two numbers per token. The backward recomputes the logits' gradient by chunks:
dlogits = scale (softmax(x W^T + b) - onehot(targets)).

Letters: B samples, T tokens, E model dim, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.kernels import per_sample_grad

from ..clipping.planner import HeadShape
from ..losses import kinds_of_targets
from ..packing.units import Units
from ..verification.second_order import differentiable_once
from .base import Slot, autocast_dtype
from .linear import PrivateLinear

# Elements of the logits held at once: 64 MiB in fp32.
_CHUNK_ELEMENTS = 1 << 24
# Tokens per tile of the weight gradient. With more tokens, a tile would have too few classes.
_TILE_TOKENS = 2048


@dataclass(frozen=True)
class Head:
    """Tensors that the forward saves, from which the backward recomputes the logits' gradient.

    Attributes:
        x: [B, T, E].
        weight, bias: [V, E] and [V] or None, in x's dtype.
        targets: [B, T], int64; targets outside of 0..V-1 have scale 0.
        lse: [B, T], fp32 or wider, log-sum-exp of the logits.
        scale: [B, T], derivative of the loss with respect to each token's loss; 0 if ignored.
        chunk_tokens: number of rows of V logits in memory at once.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    lse: Tensor
    scale: Tensor
    chunk_tokens: int

    is_sparse: ClassVar[bool] = False

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.x.shape[0]

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """See `TiledUse`."""
        return self.scale, self.x, self.targets, self.lse

    def in_one_row(self) -> Head:
        """Return the same head with all tokens in a single row, `[1, B T]`."""
        tensors = (self.x, self.targets, self.lse, self.scale)
        x, targets, lse, scale = (t.flatten(0, 1).unsqueeze(0) for t in tensors)
        return replace(self, x=x, targets=targets, lse=lse, scale=scale)

    def dlogits(self, samples: slice, tokens: slice, rows: slice) -> Tensor:
        """Return the logits' gradient of some samples, tokens and classes, fp32 or wider."""
        bias = None if self.bias is None else self.bias[rows]
        lse = self.lse[samples, tokens].unsqueeze(-1)
        part = F.linear(self.x[samples, tokens], self.weight[rows], bias).to(lse.dtype)
        part.sub_(lse).exp_()
        targets = self.targets[samples, tokens].unsqueeze(-1)
        inside = (targets >= rows.start) & (targets < rows.stop)
        local = (targets - rows.start).clamp_(0, max(rows.stop - rows.start - 1, 0))
        part.scatter_add_(-1, local, -inside.to(part.dtype))
        return part.mul_(self.scale[samples, tokens].unsqueeze(-1))

    def gradients(
        self, *, x: bool, weight: bool, bias: bool, per_sample: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return dx, dW and db, None if not requested; dW and db are [B, ...] if `per_sample`."""
        batch, classes = self.x.shape[0], self.weight.shape[0]
        leading = (batch,) if per_sample else ()
        dx = torch.empty_like(self.x) if x else None
        dweight = self.lse.new_zeros(*leading, *self.weight.shape) if weight else None
        dbias = self.lse.new_zeros(*leading, classes) if bias else None
        with _no_autocast(self.x):
            for samples, tokens in _chunks(self.x, self.chunk_tokens):
                part = self.dlogits(samples, tokens, slice(0, classes))
                if dx is not None:
                    dx[samples, tokens] = part.to(dx.dtype) @ self.weight
                wide = self.x[samples, tokens].to(part.dtype)
                if dweight is not None and per_sample:
                    dweight[samples].baddbmm_(part.transpose(1, 2), wide)
                elif dweight is not None:
                    dweight.addmm_(part.flatten(0, 1).t(), wide.flatten(0, 1))
                if dbias is not None and per_sample:
                    dbias[samples] += part.sum(1)
                elif dbias is not None:
                    dbias += part.sum((0, 1))
        return dx, dweight, dbias

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield tiles with at most as many logits as a chunk, see `TiledUse`."""
        (batch, tokens, width), classes = self.x.shape, self.weight.shape[0]
        length = max(1, min(tokens, _TILE_TOKENS))
        group = max(1, min(batch, _TILE_TOKENS // length))
        # A tile of G_i, [group, height, E], is also in memory.
        height = self.chunk_tokens * classes // (group * max(length, width))
        height = max(1, min(classes, height))
        for i in range(0, max(batch, 1), group):
            for v in range(0, classes, height):
                yield slice(i, min(i + group, batch)), slice(v, min(v + height, classes))

    def grad(self, samples: slice, rows: slice) -> Tensor:
        """See `TiledUse`: G_i = dlogits_i^T x_i [samples, rows, E]."""
        tokens = self.x.shape[1]
        grad = None
        with _no_autocast(self.x):
            for t in range(0, max(tokens, 1), _TILE_TOKENS):
                part = slice(t, min(t + _TILE_TOKENS, tokens))
                own = per_sample_grad(self.x[samples, part], self.dlogits(samples, part, rows))
                grad = own if grad is None else grad.add_(own)
        assert grad is not None
        return grad


class UnitsHead:
    """Computes a head's gradients for samples of several rows or tokens (units), see `TiledUse`.

    Args:
        head: the head, with the tokens of all units in one row, `[1, n]`.
        units: the samples.
    """

    is_sparse = False

    def __init__(self, head: Head, units: Units) -> None:
        self._head = head
        self._units = units
        self.batch_size = units.size

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """See `TiledUse`."""
        return self._head.rows

    def _of(self, unit: int) -> Head:
        head = self._head
        own = self._units.entries(unit, head.x.shape[1])
        return replace(
            head,
            x=head.x[:, own],
            targets=head.targets[:, own],
            lse=head.lse[:, own],
            scale=head.scale[:, own],
        )

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield tiles unit by unit, see `TiledUse`."""
        for unit in range(self.batch_size):
            for _, rows in self._of(unit).tiles():
                yield slice(unit, unit + 1), rows

    def grad(self, samples: slice, rows: slice) -> Tensor:
        """See `TiledUse`."""
        units = range(samples.start or 0, samples.stop)
        return torch.cat([self._of(unit).grad(slice(0, 1), rows) for unit in units])

    def gradients(
        self, *, x: bool, weight: bool, bias: bool, per_sample: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """See `Head.gradients`."""
        if not per_sample:
            return self._head.gradients(x=x, weight=weight, bias=bias, per_sample=False)
        dx = torch.zeros_like(self._head.x) if x else None
        grads: list[list[Tensor | None]] = []
        for unit in range(self.batch_size):
            own_dx, *own = self._of(unit).gradients(x=x, weight=weight, bias=bias, per_sample=True)
            if dx is not None and own_dx is not None:
                dx[:, self._units.entries(unit, dx.shape[1])] = own_dx
            grads.append(own)
        dweight, dbias = (
            None if None in column else torch.cat(column) for column in zip(*grads, strict=True)
        )
        return dx, dweight, dbias


def _sums(x: Tensor, units: Units | None) -> Tensor:
    """Sum x over the tokens of each loss: a row of `[B, T]`, or a document in `[1, n]`."""
    return x.sum(1) if units is None or units.are_rows else units.summed(x[0])


def _of_tokens(values: Tensor, units: Units | None, tokens: int) -> Tensor:
    """Expand one value per loss to one per token: `[B, 1]`, to broadcast, or `[1, n]`."""
    if units is None or units.are_rows:
        return values.unsqueeze(1)
    return units.of_entries(values, tokens).unsqueeze(0)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    chunk_tokens: int | None,
    weight_handle: Tensor | None = None,
    bias_handle: Tensor | None = None,
    slot: Slot | None = None,
    units: Units | None = None,
) -> Tensor:
    """Return the losses [B] of x [B, ..., E] and targets [B, ...], which the caller checked."""
    flat = x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
    dtype = autocast_dtype(x)
    return _LinearCrossEntropy.apply(
        flat if dtype is None else flat.to(dtype),
        weight,
        bias,
        weight_handle,
        bias_handle,
        targets.reshape(flat.shape[:2]),
        slot,
        ignore_index,
        reduction,
        chunk_tokens or max(1, _CHUNK_ELEMENTS // weight.shape[0]),
        units,
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses [B] of x [B, T, E]; the backward returns summed or per-sample gradients of W, b."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_handle: Tensor | None,
        bias_handle: Tensor | None,
        targets: Tensor,
        slot: Slot | None,
        ignore_index: int,
        reduction: str,
        chunk_tokens: int,
        units: Units | None,
    ) -> Tensor:
        valid, outside = kinds_of_targets(targets, weight.shape[0], ignore_index)
        wrong = _sums(outside, units) > 0
        compiling = torch.compiler.is_compiling()
        forward = torch.ops.dpflash.linear_cross_entropy if compiling else _statistics
        lse, nll = forward(
            x, weight.to(x.dtype), _like(bias, x), targets.masked_fill(~valid, 0), chunk_tokens
        )
        nll = nll.masked_fill(~valid, 0)
        ctx.save_for_backward(x, weight, bias, targets, lse, wrong)
        ctx.slot = slot
        ctx.ignore_index = ignore_index
        ctx.mean = reduction == "mean"
        ctx.chunk_tokens = chunk_tokens
        ctx.units = units
        losses = _sums(nll, units)
        losses = losses / _sums(valid, units).clamp(min=1) if ctx.mean else losses
        return losses.masked_fill(wrong, math.nan)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, targets, lse, wrong = ctx.saved_tensors
        valid, _ = kinds_of_targets(targets, weight.shape[0], ctx.ignore_index)
        units: Units | None = ctx.units
        dlosses = dlosses.masked_fill(wrong, 0)
        scale = dlosses / _sums(valid, units).clamp(min=1) if ctx.mean else dlosses
        scale = torch.where(valid, _of_tokens(scale, units, x.shape[1]), 0)
        need_x, need_weight, need_bias, weight_handle, bias_handle = ctx.needs_input_grad[:5]
        # A parameter with a handle is detached. W and b both get per-sample grads, or none.
        per_sample = weight_handle or bias_handle
        arguments = (x.detach(), weight.to(x.dtype), _like(bias, x), targets, lse, scale)
        needs = (need_x, need_weight or weight_handle, need_bias or bias_handle, per_sample)
        if torch.compiler.is_compiling():
            backward = torch.ops.dpflash.linear_cross_entropy_backward
            dx, dweight, dbias = backward(*arguments, ctx.chunk_tokens, *needs)
        else:
            of_rows = Head(*arguments, ctx.chunk_tokens)
            head = of_rows if units is None else UnitsHead(of_rows.in_one_row(), units)
            slot: Slot | None = ctx.slot
            left = weight_handle and slot is not None and slot.gate.take_tiled(slot.position, head)
            dx, dweight, dbias = head.gradients(
                x=need_x, weight=needs[1] and not left, bias=needs[2], per_sample=per_sample
            )
        dweight = dweight if needs[1] else None
        dbias = dbias if needs[2] else None
        plain = (None, None) if per_sample else (_like(dweight, weight), _like(dbias, weight))
        handles = (dweight, dbias) if per_sample else (None, None)
        dx = dx.reshape(x.shape) if need_x else None
        return (dx, *plain, *handles, *(None,) * 6)


class PrivateLinearCrossEntropy(PrivateLinear):
    """Losses of x [B, ..., E] and targets [B, ...], or logits if there are no targets."""

    ignore_index: int
    reduction: str
    chunk_tokens: int | None

    def forward(
        self, x: Tensor, targets: Tensor | None = None, units: Units | None = None
    ) -> Tensor:
        if targets is None:
            return super().forward(x)
        if not self.is_private_call():
            plain: Tensor = super().forward(x, targets, units)  # type: ignore[call-arg]
            return plain
        current = self._dpflash.backward.forward.units
        if units != (None if current is None or current.are_rows else current):
            raise ValueError(
                f"head '{self._dpflash.name}' got the units of another batch, not of the private "
                "loader's latest: iterate over the loader that make_private returned, or call "
                "engine.prepare(batch) before the model"
            )
        self.check(x, targets)  # type: ignore[operator]
        x, targets = self._dpflash.check_sequences(x), self._dpflash.check_sequences(targets)
        if units is None and self._dpflash.units is not None:
            x, targets = x[0], targets[0]  # one loss for each row of a unit
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        samples = x.shape[0] if (own := self._dpflash.units) is None else own.size
        handles = self.private_handles(samples)
        tokens = x.shape[:-1].numel() // max(1, samples)  # of a sample, on average
        dtype = autocast_dtype(x) or x.dtype
        shape = HeadShape(samples, tokens, x.shape[-1], weight.shape[0], dtype)
        return linear_cross_entropy(
            x,
            weight.detach(),
            None if bias is None else bias.detach(),
            targets,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            chunk_tokens=self.chunk_tokens,
            weight_handle=handles["weight"],
            bias_handle=handles["bias"] if bias is not None else None,
            slot=handles.slot("weight", shape),
            units=own,
        )


def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Return (log-sum-exp of logits, that minus the target's logit), each [B, T]."""
    lse, nll = _fake_statistics(x, weight, bias, targets, chunk_tokens)
    with _no_autocast(x):
        for samples, tokens in _chunks(x, chunk_tokens):
            logits = F.linear(x[samples, tokens], weight, bias).to(lse.dtype)
            own = logits.gather(-1, targets[samples, tokens].unsqueeze(-1)).squeeze(-1)
            highest = logits.amax(-1, keepdim=True)
            sums = logits.sub_(highest).exp_().sum(-1)
            lse[samples, tokens] = sums.log_().add_(highest.squeeze(-1))
            nll[samples, tokens] = lse[samples, tokens] - own
    return lse, nll


def _chunks(x: Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield (samples, tokens) of at most `size` tokens: whole samples, or a part of a sample."""
    batch, tokens = x.shape[:2]
    length = max(1, min(tokens, size))
    group = max(1, size // max(1, tokens))
    for i in range(0, batch, group):
        for t in range(0, tokens, length):
            yield slice(i, min(i + group, batch)), slice(t, min(t + length, tokens))


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def _like(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(other.dtype)


# As operators, the loops are hidden from torch.compile, which would save what they recompute.
_LIBRARY = torch.library.Library("dpflash", "FRAGMENT")
_LIBRARY.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor targets, "
    "SymInt chunk_tokens) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "linear_cross_entropy_backward(Tensor x, Tensor weight, Tensor? bias, Tensor targets, "
    "Tensor lse, Tensor scale, SymInt chunk_tokens, bool need_x, bool need_weight, "
    "bool need_bias, bool per_sample) -> (Tensor, Tensor, Tensor)"
)


def _fake_statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(targets.shape, dtype=wide), x.new_empty(targets.shape, dtype=wide)


def _gradients(*given: Any) -> tuple[Tensor, ...]:
    *inputs, need_x, need_weight, need_bias, per_sample = given
    head, lse = Head(*inputs), inputs[4]
    grads = head.gradients(x=need_x, weight=need_weight, bias=need_bias, per_sample=per_sample)
    return tuple(lse.new_empty(0) if grad is None else grad for grad in grads)


def _fake_gradients(*given: Any) -> tuple[Tensor, ...]:
    x, weight, _, _, lse, _, _, need_x, need_weight, need_bias, per_sample = given
    leading = (x.shape[0],) if per_sample else ()
    return (
        torch.empty_like(x) if need_x else lse.new_empty(0),
        lse.new_empty(*leading, *weight.shape) if need_weight else lse.new_empty(0),
        lse.new_empty(*leading, weight.shape[0]) if need_bias else lse.new_empty(0),
    )


_LIBRARY.impl("linear_cross_entropy", _statistics, "CompositeExplicitAutograd")
_LIBRARY.impl("linear_cross_entropy_backward", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("dpflash::linear_cross_entropy", _fake_statistics, lib=_LIBRARY)
torch.library.register_fake(
    "dpflash::linear_cross_entropy_backward", _fake_gradients, lib=_LIBRARY
)
