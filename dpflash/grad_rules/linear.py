"""Rule for linear layers: nn.Linear and Hugging Face's Conv1D, whose W is transposed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpflash.kernels import ScaledRows, per_sample_bias_grad, scaled_product

from ..clipping.planner import LinearShape
from ..packing.units import Units
from ..refusal import PrivateRefusal
from ..verification.second_order import differentiable_once, is_in_transform
from .base import PrivateModule, Slot, autocast_dtype, taken


class _Linear(torch.autograd.Function):
    """y = x W^T + b for x [B, T, I]; the backward returns per-sample gradients of W and b.

    If casts of `Float8Weight` are given, products with W are computed in float8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_handle: Tensor | None,
        bias_handle: Tensor | None,
        slot: Slot | None,
        transposed: bool,
        units: Units | None,
        *casts: Tensor,
    ) -> Tensor:
        kept = casts[2:] or (weight,)
        ctx.save_for_backward(x if weight_handle is not None else None, *kept)
        ctx.slot = slot
        ctx.transposed = transposed
        ctx.units = units
        if casts:
            y = scaled_product(x, ScaledRows(*casts[:2]))
            y = y if bias is None else y.add_(bias)
        else:
            y = F.linear(x, weight.t() if transposed else weight, bias)
        # Torch may return a view, which the next layer could not change in place.
        is_view = torch.compiler.is_compiling() or y._is_view()
        return torch.ops.aten._unsafe_view(y, y.shape) if is_view else y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *scales = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0] and scales:
            dx = scaled_product(dy, ScaledRows(weight, *scales))
        elif ctx.needs_input_grad[0]:
            dx = dy @ (weight.t() if ctx.transposed else weight)
        if ctx.needs_input_grad[3]:
            left, right = (dy, x) if ctx.transposed else (x, dy)
            dweight = taken(ctx.slot, left, right, swapped=ctx.transposed)
        if ctx.needs_input_grad[4]:
            dbias = bias_grad(dy, ctx.units)
        return dx, None, None, dweight, dbias, *(None,) * (len(ctx.needs_input_grad) - 5)


def bias_grad(dy: Tensor, units: Units | None) -> Tensor:
    """Return the bias gradient of each sample, `[B, O]`."""
    return per_sample_bias_grad(dy) if units is None else units.summed(dy[0])


class PrivateLinear(PrivateModule):
    """y = x W^T + b with x [B, ..., I]."""

    takes_units = True
    _transposed = False

    # The arguments' names are those of the plain layer, since calls may use keywords.
    def forward(self, input: Tensor) -> Tensor:
        casts = self._casts(input)
        if not self.is_private_call():
            return self._ungated(input, casts) if casts else super().forward(input)
        x = self._dpflash.check_batch(input)
        if x.ndim == 1:
            raise PrivateRefusal(
                f"input of module '{self._dpflash.name}' has no batch; a private linear layer "
                "needs the batch first: [B, ..., features]; pass all rows in one call"
            ) from None
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        dtype = autocast_dtype(x)
        context, samples = self._dpflash, self._dpflash.samples_of(x)
        handles = self.private_handles(samples)
        flat = x if x.ndim == 3 else x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1])
        outputs = weight.shape[1 if self._transposed else 0]
        tokens = x.shape[0] * flat.shape[1] // max(1, samples)  # of a sample, on average
        shape = LinearShape(samples, tokens, x.shape[-1], outputs, dtype or x.dtype)
        slot = handles.slot("weight", shape)
        y = _Linear.apply(
            flat if dtype is None else flat.to(dtype),
            weight.detach() if dtype is None or casts else weight.detach().to(dtype),
            bias if bias is None else bias.detach().to(dtype or bias.dtype),
            handles["weight"],
            handles["bias"] if bias is not None else None,
            slot,
            self._transposed,
            context.units,
            *casts,
        )
        return context.as_given(y if x.ndim == 3 else y.reshape(*x.shape[:-1], outputs), input)

    def _casts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the float8 casts of the weight, or () if x is not multiplied in float8."""
        context, weight = self._dpflash, self._parameters["weight"]
        if context.float8 is None or weight is None:
            return ()
        if not torch.compiler.is_compiling() and is_in_transform():
            return ()
        if (autocast_dtype(x) or x.dtype) != (autocast_dtype(weight) or weight.dtype):
            return ()  # torch's own product raises for different dtypes
        if torch.compiler.is_compiling():  # guards on the step would cause recompilation
            return context.float8.casts(weight, None)
        step = context.backward.step
        trains = torch.is_grad_enabled() and step.tracker.current is not None
        is_open = trains and not step.tracker.is_charged
        return context.float8.casts(weight, step.releases if is_open else None)

    def _ungated(self, x: Tensor, casts: tuple[Tensor, ...]) -> Tensor:
        """Compute the output without per-sample gradients: in evaluation, or if frozen."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        x = x.to(autocast_dtype(x) or x.dtype)
        added = bias if bias is None else bias.detach().to(x.dtype)
        options = (None, None, None, self._transposed, None)
        y: Tensor = _Linear.apply(x, weight, added, *options, *casts)
        return y


class PrivateConv1D(PrivateLinear):
    """y = x W + b with x [B, ..., I], W [I, O]."""

    _transposed = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)
