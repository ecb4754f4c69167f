"""Self-attention with its projections as one autograd node.

The node's backward computes per-sample gradients of the output projection, runs the flash backward
into one buffer of dq, dk and dv, and computes per-sample gradients of the input projection, sinks
and slopes. The flash backward's epilogue computes the per-sample gradients of input biases. Then
the clipping gates compute norms and clip, and add noise at the end of a logical batch.

Letters: B samples, H query heads, G key/value heads, T tokens, D head dim, E model dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dpflash.kernels import apply_rotary
from dpflash.kernels.attention import attention_backward
from dpflash.kernels.attention_reference import AttentionInputs

from ..attn.backend import current_backend
from ..attn.functional import attention, resolve_pattern
from ..attn.ops import graph_of, key_range_of
from ..attn.rotary import Turns, document_positions
from ..clipping.planner import LinearShape
from ..distributed.agreement import Context
from ..packing.units import Units
from ..patterns import Adaptive, Documents, Pattern
from ..verification.second_order import differentiable_once
from .base import PrivateModule, Slot, autocast_dtype, plain_class, taken
from .linear import PrivateLinear, bias_grad


@dataclass(frozen=True)
class _Heads:
    """Layout of the projected tokens `[B, T, (H + 2 G) D]`, and the attention pattern."""

    heads: int
    kv_heads: int
    head_dim: int
    pattern: Pattern
    rotary: bool
    documents: tuple[int, ...] | None = None

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views: q `[B, H, T, D]`, k and v `[B, G, T, D]`."""
        heads = qkv.unflatten(2, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v

    def turn_(self, qkv: Tensor, *, back: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Turn queries and keys of qkv by rotary positions; or write `back` there, turned back."""
        if not self.rotary:
            return qkv
        if not torch.compiler.is_compiling() and is_in_torch_dispatch_mode():
            qkv = qkv.clone()  # A selective checkpoint may have saved this tensor.
        q, k, _ = self.split(qkv)
        if self.documents is None:
            turns = Turns.of(q, self.head_dim)
        else:
            positions = document_positions(self.documents, q.device)
            turns = Turns.at(positions, self.head_dim, q.dtype)
        apply_rotary(*(back or (q, k)), *turns, back=back is not None, out=(q, k))
        return qkv


class _SelfAttention(torch.autograd.Function):
    """y = attention(x W_qkv^T + b_qkv) W_out^T + b_out for x [B, T, E]."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # Each weight and bias, the sinks and the slopes have a handle, see `backward`.
        x, qkv_weight, qkv_bias, out_weight, out_bias, sinks, slopes, padding = inputs[:8]
        *_handles, qkv_slot, out_slot, heads, units = inputs[8:]
        qkv = heads.turn_(F.linear(x, qkv_weight, qkv_bias))
        q, k, v = heads.split(qkv)
        options = {"key_padding_mask": padding, "sinks": sinks, "alibi_slopes": slopes}
        o, lse = attention(q, k, v, pattern=heads.pattern, return_lse=True, **options)
        ctx.save_for_backward(x, qkv, o, lse, qkv_weight, out_weight, sinks, slopes, padding)
        ctx.slots, ctx.heads, ctx.units = (qkv_slot, out_slot), heads, units
        ctx.backend = current_backend()
        y = F.linear(o.transpose(1, 2).flatten(2), out_weight, out_bias)
        # Torch may return a view, which the next layer could not change in place.
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, qkv, o, lse, qkv_weight, out_weight, sinks, slopes, padding = ctx.saved_tensors
        heads: _Heads = ctx.heads
        qkv_slot, out_slot = ctx.slots
        needs = ctx.needs_input_grad
        dqkv_weight = dqkv_bias = dout_weight = dout_bias = dsinks = dslopes = dx = None
        if needs[10]:
            dout_weight = taken(out_slot, o.transpose(1, 2).flatten(2), dy)
        if needs[11]:
            dout_bias = bias_grad(dy, ctx.units)
        q, k, v = heads.split(qkv)
        dqkv = torch.empty_like(qkv)
        dq, dk, dv = heads.split(dqkv)
        # The kernel sums dq, dk and dv over tokens before `turn_`, so not with rotary positions.
        sums_of_rows = not heads.rotary and ctx.units is None
        # The CPU's kernels do not write to `out`: `turn_` writes dq and dk, without another copy.
        moves = heads.rotary and qkv.is_cpu
        graph, scale = graph_of(q, k, heads.pattern), 1 / math.sqrt(heads.head_dim)
        options: Any = {"key_range": key_range_of(padding), "backend": ctx.backend}
        grads = attention_backward(
            (dy @ out_weight).unflatten(2, (heads.heads, heads.head_dim)).transpose(1, 2),
            None,
            o,
            lse,
            AttentionInputs(q, k, v, graph, scale, sinks, slopes, **options),
            token_sums=needs[9] and sums_of_rows,
            out=None if moves else (dq, dk, dv),
        )
        if moves:
            dv.copy_(grads.dv)
        dqkv = heads.turn_(dqkv, back=(grads.dq, grads.dk))
        if needs[8]:
            dqkv_weight = taken(qkv_slot, x, dqkv)
        if needs[9] and not sums_of_rows:
            dqkv_bias = bias_grad(dqkv, ctx.units)
        elif needs[9]:
            sums = cast("tuple[Tensor, ...]", (grads.q_sum, grads.k_sum, grads.v_sum))
            dqkv_bias = torch.cat([part.flatten(1) for part in sums], dim=1)
        if needs[12]:
            dsinks = _of_samples(grads.dsinks, ctx.units)
        if needs[13]:
            dslopes = _of_samples(grads.dslopes, ctx.units)
        if needs[0]:
            dx = dqkv @ qkv_weight
        handles = (dqkv_weight, dqkv_bias, dout_weight, dout_bias, dsinks, dslopes)
        return (dx, *(None,) * 7, *handles, None, None, None, None)


def _of_samples(terms: Tensor | None, units: Units | None) -> Tensor:
    """Return the gradient of each sample, `[B, H]`: `terms` `[B, H, T]` summed over tokens."""
    assert terms is not None
    return terms.sum(2) if units is None else units.summed(terms[0].mT)


class PrivateMultiheadAttention(PrivateModule):
    """`dpflash.nn.MultiheadAttention`, with its projections as one autograd node if possible."""

    def _output(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        context: Context | None,
    ) -> Tensor:
        module: Any = self
        plain = module.pattern is None and module.sinks is None and module.alibi_slopes is None
        # The ordinary forward is needed for masks of scores, tokens on other ranks, dropout, and
        # patterns that are chosen at run time.
        masked = attn_mask is not None or (plain and key_padding_mask is not None)
        split = module.context_parallel is not None
        dropped = module.training and module.dropout > 0
        chosen = isinstance(module.pattern, Adaptive)
        units = module.qkv_proj._dpflash.units if _is_one_node(module) else None
        if units is not None and not units.are_rows:
            raise ValueError(
                "attention over a batch of packed documents without cu_seqlens: tokens would see "
                "other documents; pass the batch's cu_seqlens to the module (LongContextLM takes "
                "packed=batch)"
            )
        # Attention runs on each row of a unit by itself; gradients are summed over the unit.
        of_rows = units is not None
        ordinary = masked or split or dropped or chosen or of_rows or _in_float8(module)
        if ordinary or not _is_one_node(module):
            return super()._output(  # type: ignore[misc]
                query, key, value, key_padding_mask, attn_mask, is_causal, context
            )
        pattern = resolve_pattern(module.pattern, is_causal, query.shape[1], query.shape[1])
        return _attend(module, query, key_padding_mask, pattern)

    def _packed_output(
        self, x: Tensor, documents: Documents, is_causal: bool, context: Context | None
    ) -> Tensor:
        module: Any = self
        tokens = documents.cu_seqlens[-1]
        inner = resolve_pattern(module.pattern, is_causal, tokens, tokens)
        split = module.context_parallel is not None
        ordinary = split or isinstance(inner, Adaptive) or _in_float8(module)
        if ordinary or not _is_one_node(module):
            return super()._packed_output(  # type: ignore[misc]
                x, documents, is_causal, context
            )
        return _attend(module, x, None, documents & inner, tuple(documents.cu_seqlens))

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, inner: Pattern
    ) -> Tensor:
        """Compute attention, with one call per document if its sinks or slopes are trained."""
        per_head = [child for child in (self.sinks, self.alibi_slopes) if child is not None]
        trained = [c for c in per_head if isinstance(c, PrivateModule) and c.is_private_call()]
        units = trained[0]._dpflash.units if trained else None
        if units is None:
            return super()._attend_packed(q, k, v, documents, inner)  # type: ignore[misc]
        sinks, slopes = (_of_documents(c, units) for c in (self.sinks, self.alibi_slopes))
        results = []
        for begin, end in pairwise(documents.cu_seqlens):
            if begin == end:
                continue
            own = units.index[begin : begin + 1]
            o = attention(
                *(x[:, :, begin:end] for x in (q, k, v)),
                pattern=inner,
                sinks=None if sinks is None else sinks[own],
                alibi_slopes=None if slopes is None else slopes[own],
            )
            results.append(o)
        return torch.cat(results, 2)


def _of_documents(child: Any, units: Units) -> Tensor | None:
    """Return a copy of sinks or slopes per document and one for padding, `[U + 1, H]`."""
    if child is None:
        return None
    numbers: Tensor = child.weight.detach().expand(units.size + 1, -1)
    if not (isinstance(child, PrivateModule) and child.is_private_call()):
        return numbers
    own = child.private_handles(units.size).values("weight")
    assert own is not None
    return torch.cat([own, numbers[:1]])


def _is_one_node(module: Any) -> bool:
    """Return whether both projections are trained plain linear layers without hooks."""
    if not module.self_attention or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    projections = (module.qkv_proj, module.out_proj)
    per_head = (module.sinks, module.alibi_slopes)
    children = [child for child in (*projections, *per_head) if child is not None]
    return (
        all(isinstance(p, PrivateLinear) and plain_class(p) is nn.Linear for p in projections)
        and all(isinstance(child, PrivateModule) and child.is_private_call() for child in children)
        and not any(map(_is_watched, children))
    )


def _in_float8(module: Any) -> bool:
    """Return whether a projection multiplies in float8, which needs the projection's own rule."""
    projections = (module.qkv_proj, module.out_proj)
    return any(isinstance(p, PrivateLinear) and p._dpflash.float8 for p in projections)


def _is_watched(module: nn.Module) -> bool:
    """Return whether a module has hooks or a replaced forward, which must see each call."""
    return bool(
        "forward" in module.__dict__
        or torch.nn.modules.module._has_any_global_hook()
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _attend(
    module: Any,
    query: Tensor,
    padding: Tensor | None,
    pattern: Pattern,
    documents: tuple[int, ...] | None = None,
) -> Tensor:
    qkv_proj, out_proj = module.qkv_proj, module.out_proj
    x = qkv_proj._dpflash.check_sequences(query)
    units, batch = qkv_proj._dpflash.units, qkv_proj._dpflash.samples_of(x)
    tokens = x.shape[0] * x.shape[1] // max(1, batch)  # of a sample, on average
    dtype = autocast_dtype(x)

    def plain(parameter: Tensor | None) -> Tensor | None:
        return parameter if parameter is None else parameter.detach().to(dtype or parameter.dtype)

    handles: list[Tensor | None] = []
    slots: list[Slot | None] = []
    for projection in (qkv_proj, out_proj):
        own = projection.private_handles(batch)
        outputs, inputs = projection.weight.shape
        shape = LinearShape(batch, tokens, inputs, outputs, dtype or x.dtype)
        slots.append(own.slot("weight", shape))
        handles += [own["weight"], own["bias"]]
    numbers: list[Tensor | None] = []
    for child in (module.sinks, module.alibi_slopes):
        numbers.append(None if child is None else child.weight.detach().expand(len(x), -1))
        handles.append(None if child is None else child.private_handles(batch).dense("weight"))
    sizes = (module.num_heads, module.num_kv_heads, module.head_dim)
    heads = _Heads(*sizes, pattern, module.rotary, documents)
    y: Tensor = _SelfAttention.apply(
        x if dtype is None else x.to(dtype),
        plain(qkv_proj.weight),
        plain(qkv_proj.bias),
        plain(out_proj.weight),
        plain(out_proj.bias),
        *numbers,
        padding,
        *handles,
        *slots,
        heads,
        units,
    )
    return qkv_proj._dpflash.as_given(y, query)
