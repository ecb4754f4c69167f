"""Rule for torch.nn.MultiheadAttention: replaces the projections, but not the attention.

Letters: B samples, H heads, T query tokens, S key tokens, E model dim.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpflash.kernels import per_sample_bias_grad

from ..clipping.forward import ALL_ROWS
from ..clipping.planner import LinearShape
from ..refusal import PrivateRefusal
from ..verification.second_order import differentiable_once
from .base import Handles, PrivateModule, Slot, autocast_dtype, taken
from .batch_second import samples_first


class _Projections(torch.autograd.Function):
    """y_s = x_s W_s^T + b_s for sources x_s [B, T_s, I], where each W_s is some rows of one W.

    W has one linear operation on the tokens of all sources together. The output gradient of a
    token of source s is zero in the rows of W that belong to other sources.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        bias: Tensor | None,
        weight_handle: Tensor | None,
        bias_handle: Tensor | None,
        slot: Slot | None,
        rows: tuple[int, ...],
        *sources: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, *sources)
        ctx.slot = slot
        ctx.rows = rows
        biases = (None,) * len(rows) if bias is None else bias.split(rows)
        return tuple(
            F.linear(x, w, b) for x, w, b in zip(sources, weight.split(rows), biases, strict=True)
        )

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dweight = dbias = None
        if needs[2]:
            dweight = taken(ctx.slot, *_together(sources, grads))
        if needs[3]:
            dbias = torch.cat([per_sample_bias_grad(dy) for dy in grads], 1)
        dxs = [
            dy @ w if needed else None
            for dy, w, needed in zip(grads, weight.split(ctx.rows), needs[6:], strict=True)
        ]
        return (None, None, dweight, dbias, None, None, *dxs)


def _together(sources: list[Tensor], grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Join all sources into one operation: (x [B, sum of T_s, I], dy [B, sum of T_s, O])."""
    if len(sources) == 1:
        return sources[0], grads[0]
    x = torch.cat(sources, 1)
    dy = x.new_zeros(*x.shape[:2], sum(grad.shape[2] for grad in grads))
    token = row = 0
    for grad in grads:
        tokens, rows = grad.shape[1:]
        dy[:, token : token + tokens, row : row + rows] = grad
        token, row = token + tokens, row + rows
    return x, dy


class PrivateTorchMultiheadAttention(PrivateModule):
    """`torch.nn.MultiheadAttention` with the outputs, weights and masks of the plain module.

    With gradients it never uses torch's fused path, which would bypass per-sample gradients.
    Without gradients (evaluation under `no_grad`) the plain module runs.
    """

    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    out_proj: nn.Module

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        out_proj = self.out_proj
        private = [m.is_private_call() for m in (self, out_proj) if isinstance(m, PrivateModule)]
        if not any(private):
            options = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            plain: tuple[Tensor, Tensor | None] = super().forward(query, key, value, *options)
            return plain
        if is_causal and attn_mask is None:
            raise ValueError(
                f"module '{self._dpflash.name}' got is_causal=True without attn_mask; for torch, "
                "is_causal is only a hint about the mask. Pass both"
            )
        q, k, v = self._projected(*self._batch_first(query, key, value))
        # As in torch, is_causal replaces attn_mask unless another mask or need_weights is given.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else self._mask(q, k, attn_mask, key_padding_mask)
        q, k, v = (self._heads(t) for t in (q, k, v))
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        o, weights = self._attend(q, k, v, mask, need_weights, is_causal)
        out: Tensor = out_proj(o.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _batch_first(self, *inputs: Tensor) -> list[Tensor]:
        """Return the inputs with the batch first; equal inputs stay one tensor."""
        context, found = self._dpflash, {}
        for x in inputs:
            if x.is_nested or x.ndim != 3:
                expected = "[B, T, E]" if self.batch_first else "[T, B, E] (batch_first=False)"
                raise PrivateRefusal(
                    f"an input of module '{context.name}' (MultiheadAttention) is nested, or has "
                    f"no batch; private attention needs a batch, {expected}: pad to one length, "
                    "and give single samples a batch dimension with unsqueeze",
                    dimensions=x.ndim,
                ) from None
            if id(x) not in found:
                first = x if self.batch_first else samples_first(context, x)
                found[id(x)] = context.check_sequences(first)
        sizes = {x.shape[0] for x in found.values()}
        if len(sizes) > 1:
            raise PrivateRefusal(
                f"query, key and value of module '{context.name}' have different numbers of "
                f"samples; they must have the same. {ALL_ROWS}",
                sizes=sizes,
            ) from None
        return [found[id(x)] for x in inputs]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project to q [B, T, E] and k, v [B, S, E], including the tokens of `add_bias_kv`."""
        handles = self.private_handles(query.shape[0])
        width = self.embed_dim
        if self._parameters["in_proj_weight"] is None:
            q, k, v = (
                self._project(handles, f"{n}_proj_weight", [x], [width], i * width)[0]
                for i, (n, x) in enumerate(zip("qkv", (query, key, value), strict=True))
            )
        elif query is key and key is value:
            (y,) = self._project(handles, "in_proj_weight", [query], [3 * width])
            q, k, v = y.split(width, dim=2)
        elif key is value:
            sources, rows = [query, key], [width, 2 * width]
            q, kv = self._project(handles, "in_proj_weight", sources, rows)
            k, v = kv.split(width, dim=2)
        else:
            sources, rows = [query, key, value], [width] * 3
            q, k, v = self._project(handles, "in_proj_weight", sources, rows)
        if self._parameters.get("bias_k") is not None:
            k = torch.cat([k, self._learned(handles, "bias_k", k)], 1)
            v = torch.cat([v, self._learned(handles, "bias_v", v)], 1)
        return q, k, v

    def _project(
        self, handles: Handles, name: str, sources: list[Tensor], rows: list[int], start: int = 0
    ) -> tuple[Tensor, ...]:
        """Project source i by the next rows[i] rows of weight `name`; biases begin at `start`."""
        weight, bias = self._parameters[name], self._parameters["in_proj_bias"]
        assert weight is not None
        outputs, inputs = weight.shape
        first, dtype = sources[0], autocast_dtype(sources[0])
        dtype = dtype or first.dtype
        tokens = sum(x.shape[1] for x in sources)
        shape = LinearShape(first.shape[0], tokens, inputs, outputs, dtype)
        bias_handle = handles["in_proj_bias"] if bias is not None else None
        part = slice(start, start + outputs)
        projected: tuple[Tensor, ...] = _Projections.apply(
            weight.detach().to(dtype),
            None if bias is None else bias.detach()[part].to(dtype),
            handles[name],
            None if bias_handle is None else bias_handle[:, part],
            handles.slot(name, shape),
            tuple(rows),
            *(x.to(dtype) for x in sources),
        )
        return projected

    def _learned(self, handles: Handles, name: str, tokens: Tensor) -> Tensor:
        """Return the learned additional key or value of each sample, [B, 1, E]."""
        values, parameter = handles.values(name), self._parameters[name]
        assert parameter is not None
        if values is None:
            values = parameter.detach().expand(tokens.shape[0], -1, -1, -1)
        return values.flatten(1, 2).to(tokens.dtype)

    def _heads(self, x: Tensor) -> Tensor:
        """Reshape [B, T, E] to [B, H, T, E / H]."""
        return x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None
    ) -> Tensor | None:
        """Merge both masks into one that can be broadcast to [B, H, T, S] and added to scores."""
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        learned = int(self._parameters.get("bias_k") is not None)
        shapes = (queries, keys - learned), (batch * self.num_heads, queries, keys - learned)
        more, merged = learned + int(self.add_zero_attn), None
        if attn_mask is not None:
            mask = self._additive("attn_mask", attn_mask, shapes, q.dtype)
            if mask.ndim == 3:
                mask = mask.unflatten(0, (batch, self.num_heads))
            merged = F.pad(mask, (0, more))
        if padding is not None:
            shapes = ((batch, keys - learned),)  # type: ignore[assignment]
            mask = self._additive("key_padding_mask", padding, shapes, q.dtype)
            mask = F.pad(mask, (0, more))[:, None, None]
            merged = mask if merged is None else merged + mask
        return merged

    def _additive(
        self, name: str, mask: Tensor, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Tensor:
        if tuple(mask.shape) not in shapes or not (
            mask.dtype == torch.bool or mask.is_floating_point()
        ):
            raise PrivateRefusal(
                f"{name} of module '{self._dpflash.name}' has dtype {mask.dtype}, or a shape "
                "that does not fit: expected torch's shape and booleans (True: ignored) or floats",
                shape=tuple(mask.shape),
                expected=shapes,
            ) from None
        if mask.dtype != torch.bool:
            return mask.to(dtype)
        zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return zeros.masked_fill(mask, -math.inf)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, H, T, E / H] and, with `need_weights`, weights [B, H, T, S]."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(2, 3)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        if dropout > 0:
            weights = F.dropout(weights, dropout)
        return weights @ v, weights


class PrivateTransformerEncoder(PrivateModule):
    """`torch.nn.TransformerEncoder` that creates nested tensors only without gradients.

    Plain torch looks at the first layer only: if it is frozen, later layers get nested tensors.
    """

    @property
    def use_nested_tensor(self) -> bool:
        return not torch.is_grad_enabled() and bool(self.__dict__.get("use_nested_tensor"))
