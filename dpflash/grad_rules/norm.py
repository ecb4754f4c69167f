"""Rules for normalization over features: nn.LayerNorm, nn.RMSNorm and a frozen batch norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpflash.kernels import layer_norm_backward, rms_norm_backward

from ..packing.units import Units
from ..refusal import PrivateRefusal
from ..verification.second_order import differentiable_once
from .base import PrivateModule, autocast_dtype


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        weight_handle: Tensor | None,
        bias_handle: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        units: Units | None,
    ) -> Tensor:
        x = x.contiguous()
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.ndim = len(shape)
        ctx.units = units
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        needs, spans = ctx.needs_input_grad, _spans(ctx.units, x)
        dx, dweight, dbias = layer_norm_backward(dy, x, mean, rstd, weight, ctx.ndim, spans=spans)
        of_handles = dweight if needs[3] else None, dbias if needs[4] else None
        return dx, None, None, *of_handles, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        handle: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        units: Units | None,
    ) -> Tensor:
        last = tuple(range(x.ndim - len(shape), x.ndim))
        wide = x if x.dtype == torch.float64 else x.float()
        rstd = torch.rsqrt(wide.square().mean(last, keepdim=True) + eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.ndim = len(shape)
        ctx.units = units
        y = wide * rstd
        return (y if weight is None else y * weight).to(x.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        spans = _spans(ctx.units, x)
        dx, dweight = rms_norm_backward(dy, x, rstd, weight, ctx.ndim, spans=spans)
        return dx, None, dweight if ctx.needs_input_grad[2] else None, None, None, None


class PrivateLayerNorm(PrivateModule):
    """Layer norm over the trailing dimensions of x [B, ..., *normalized_shape]."""

    takes_units = True
    normalized_shape: tuple[int, ...]
    eps: float

    def forward(self, input: Tensor) -> Tensor:
        if not self.is_private_call():
            return super().forward(input)
        x = _checked(self, input)
        handles = self.private_handles(self._dpflash.samples_of(x))
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        y = _LayerNorm.apply(
            x,
            None if weight is None else weight.detach(),
            None if bias is None else bias.detach(),
            handles.dense("weight"),
            handles.dense("bias"),
            tuple(self.normalized_shape),
            self.eps,
            self._dpflash.units,
        )
        return self._dpflash.as_given(y, input)


class FrozenBatchNorm(PrivateModule):
    """Batch norm in eval mode without trained parameters: the same affine map for all samples."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            raise RuntimeError(
                f"module '{self._dpflash.name}' is a batch norm in training mode, in which it "
                "mixes the samples of a batch; call its .eval() after model.train()"
            )
        self.is_private_call()  # raises if frozen parameters became trainable
        return super().forward(input)


class PrivateRMSNorm(PrivateModule):
    """RMS norm over the trailing dimensions of x [B, ..., *normalized_shape]."""

    takes_units = True
    normalized_shape: tuple[int, ...]
    eps: float | None

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_private_call():
            return super().forward(x)
        given, x = x, _checked(self, x)
        handles = self.private_handles(self._dpflash.samples_of(x))
        weight = self._parameters["weight"]
        # torch's default eps is that of the dtype in which torch computes, not that of x.
        wide = torch.promote_types(x.dtype, torch.float32)
        y = _RMSNorm.apply(
            x,
            None if weight is None else weight.detach(),
            handles.dense("weight"),
            tuple(self.normalized_shape),
            torch.finfo(wide).eps if self.eps is None else self.eps,
            self._dpflash.units,
        )
        return self._dpflash.as_given(y, given)


def _spans(units: Units | None, x: Tensor) -> tuple[tuple[int, int], ...] | None:
    """Return (first, end) of each unit in x `[1, n, ...]`; None if samples are rows."""
    return None if units is None else units.spans_of(x.shape[1])


def _checked(module: Any, x: Tensor) -> Tensor:
    x = module._dpflash.check_batch(x)
    shape = tuple(module.normalized_shape)
    if x.ndim <= len(shape):
        raise PrivateRefusal(
            f"input of module '{module._dpflash.name}' has no batch; a private norm needs the "
            "batch first: [B, ..., *normalized_shape]",
            dimensions=x.ndim,
        ) from None
    return x.float() if autocast_dtype(x) is not None else x
