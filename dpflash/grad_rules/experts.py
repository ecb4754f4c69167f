"""Rule for mixtures of experts: transformers' modules whose experts are 3-D parameters.

The pairs (token, expert) are sorted by the token's sample and, within a sample, by expert. The
pairs of one sample and one expert are a segment, and products are computed segment by segment. So
the rounding of a sample's numbers depends only on the sample's own tokens, and the sample's
gradient for an expert is dy^T x over one segment.

Letters: B samples, T tokens of a sample, K experts of a token, N experts, S = B T K pairs,
I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpflash.kernels import per_sample_bias_grad, per_sample_grad

from ..clipping.planner import ExpertsShape
from ..packing import Units
from ..refusal import PrivateRefusal
from ..verification.second_order import differentiable_once
from .base import Handles, PrivateModule, Slot, autocast_dtype, plain_forward


@dataclass(frozen=True)
class Routing:
    """The pairs (token, expert) of a batch.

    Attributes:
        batch_size: B.
        experts: N.
        order: `[S]`, the index of the pair at each sorted position.
        inverse: `[S]`, the sorted position of each pair.
        segments: (sample, expert, first position, end) of each segment, in order. Segments of
            tokens that belong to no sample come last, with sample number B.
        units: the samples if they are packed documents, else None.
    """

    batch_size: int
    experts: int
    order: Tensor
    inverse: Tensor
    segments: tuple[tuple[int, int, int, int], ...]
    units: Units | None = None

    @classmethod
    def of(cls, chosen: Tensor, experts: int, batch_size: int, units: Units | None) -> Routing:
        """Return the routing of a batch's tokens to their experts `chosen`, `[tokens, K]`."""
        tokens, per_token = chosen.shape
        if units is None:
            sample = torch.arange(batch_size).repeat_interleave(tokens // max(1, batch_size))
        else:
            sample = units.index.repeat_interleave(tokens // units.positions)
        sample = sample.to(chosen.device).unsqueeze(1).expand(-1, per_token)
        segment = (sample * experts + chosen).flatten()
        order = segment.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        segments, end = [], 0
        found, counts = segment.unique(return_counts=True)
        for number, count in zip(found.tolist(), counts.tolist(), strict=True):
            segments.append((number // experts, number % experts, end, end + count))
            end += count
        return cls(batch_size, experts, order, inverse, tuple(segments), units)

    def of_samples(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the segments whose tokens belong to a sample."""
        return (one for one in self.segments if one[0] < self.batch_size)


class _Sorted(torch.autograd.Function):
    """x[order] for x `[S, ...]` and a permutation `order`; the backward inverts the order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy[ctx.saved_tensors[0]], None, None


class ExpertsUse:
    """Per-sample gradients of the experts' weights, see `clipping.deferred.TiledUse`.

    Args:
        x: `[S, I]`, sorted.
        dy: `[S, O]`.
        routing: the routing of the pairs.
        transposed: whether the weights are `[N, I, O]`.
    """

    is_sparse = True

    def __init__(self, x: Tensor, dy: Tensor, routing: Routing, transposed: bool):
        self._x, self._dy = (dy, x) if transposed else (x, dy)
        self._routing = routing
        self._at = {(one[0], one[1]): one for one in routing.segments}
        self._given = dy, x
        self.batch_size = routing.batch_size

    @property
    def rows(self) -> tuple[Tensor, ...]:
        if self._routing.units is not None:
            return tuple(t[self._routing.inverse].unsqueeze(0) for t in self._given)
        pairs = len(self._given[0]) // max(1, self.batch_size)
        return tuple(t.reshape(self.batch_size, pairs, t.shape[1]) for t in self._given)

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield one tile for each (sample, expert) with tokens; other gradients are zero."""
        tiles = [
            (slice(sample, sample + 1), slice(expert, expert + 1))
            for sample, expert, _, _ in self._routing.of_samples()
        ]
        yield from tiles or [(slice(0, 0), slice(0, 1))]

    def grad(self, samples: slice, rows: slice) -> Tensor:
        """Return G `[samples, experts, O, I]` of these samples and experts."""
        first, last = samples.start or 0, samples.stop
        lowest, highest = rows.start or 0, rows.stop
        dtype = torch.promote_types(self._dy.dtype, torch.float32)
        shape = (last - first, highest - lowest, self._dy.shape[1], self._x.shape[1])
        grads = self._x.new_zeros(shape, dtype=dtype)
        segments = self._routing.segments
        if (last - first, highest - lowest) == (1, 1):
            # Find a single tile without a search through the segments of all samples.
            pair = (first, lowest)
            segments = (self._at[pair],) if pair in self._at else ()
        for sample, expert, start, end in segments:
            if first <= sample < last and lowest <= expert < highest:
                part = self._x[start:end].unsqueeze(0), self._dy[start:end].unsqueeze(0)
                grads[sample - first, expert - lowest] = per_sample_grad(*part)[0]
        return grads


class _Projection(torch.autograd.Function):
    """y_s = W_e x_s + b_e for each pair s of expert e; the backward returns per-sample grads."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_handle: Tensor | None,
        bias_handle: Tensor | None,
        slot: Slot | None,
        routing: Routing,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x if weight_handle is not None else None, weight)
        ctx.slot, ctx.routing, ctx.transposed = slot, routing, transposed
        y = x.new_empty(len(x), weight.shape[2 if transposed else 1])
        for _, expert, start, end in routing.segments:
            own = weight[expert] if transposed else weight[expert].t()
            torch.mm(x[start:end], own, out=y[start:end])
            if bias is not None:
                y[start:end] += bias[expert]
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        routing: Routing = ctx.routing
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(len(dy), weight.shape[1 if ctx.transposed else 2])
            for _, expert, start, end in routing.segments:
                own = weight[expert].t() if ctx.transposed else weight[expert]
                torch.mm(dy[start:end], own, out=dx[start:end])
        if ctx.needs_input_grad[3]:
            use = ExpertsUse(x.detach(), dy, routing, ctx.transposed)
            slot: Slot | None = ctx.slot
            if slot is None or not slot.gate.take_tiled(slot.position, use):
                dweight = use.grad(slice(0, routing.batch_size), slice(0, routing.experts))
        if ctx.needs_input_grad[4]:
            wide = torch.promote_types(dy.dtype, torch.float32)
            dbias = dy.new_zeros(routing.batch_size, routing.experts, dy.shape[1], dtype=wide)
            for sample, expert, start, end in routing.of_samples():
                dbias[sample, expert] = per_sample_bias_grad(dy[start:end].unsqueeze(0))[0]
        return dx, None, None, dweight, dbias, None, None, None


class PrivateExperts(PrivateModule):
    """The experts of a mixture, applied to hidden states `[B T, I]`; see `is_experts`.

    Frozen experts also run by segments, so that a sample's rounding depends on its own tokens.
    """

    takes_documents = True
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    down_proj: nn.Parameter
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, top_k_index, top_k_weights)
        self.is_private_call()
        if getattr(self, "_is_expert_parallel", False):
            raise ValueError(
                f"module '{self._dpflash.name}' is spread over ranks (expert parallelism), which "
                "has no rule for private training; load the model with all experts on each rank"
            )
        context = self._dpflash
        batch = context.samples_of(context.check_batch(hidden_states))
        tokens = hidden_states.flatten(0, -2)
        chosen, weights = (t.flatten(0, -2) for t in (top_k_index, top_k_weights))
        of_rows = 1 if context.units is not None else max(1, batch)
        if len(tokens) // of_rows * of_rows != len(chosen) or weights.shape != chosen.shape:
            raise PrivateRefusal(
                f"module '{self._dpflash.name}' got hidden states, expert indices and weights "
                "that lack tokens of the batch: expected [B T, I], [B T, K] and [B T, K]",
                shapes=[tuple(x.shape) for x in (hidden_states, top_k_index, top_k_weights)],
                batch_size=batch,
            ) from None
        routing = Routing.of(chosen, self.down_proj.shape[0], batch, context.units)
        handles = self.private_handles(batch)
        copies = tokens.unsqueeze(1).expand(-1, chosen.shape[1], -1).flatten(0, 1)
        pairs = _Sorted.apply(copies, routing.order, routing.inverse)
        if self.has_gate:
            pairs = self._apply_gate(self._project(pairs, "gate_up_proj", handles, routing))
        else:
            pairs = self.act_fn(self._project(pairs, "up_proj", handles, routing))
        pairs = self._project(pairs, "down_proj", handles, routing)
        pairs = _Sorted.apply(pairs, routing.inverse, routing.order)
        weighted = pairs.unflatten(0, chosen.shape) * weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype).reshape(hidden_states.shape)

    def _project(self, x: Tensor, name: str, handles: Handles, routing: Routing) -> Tensor:
        weight, bias = self._parameters[name], self._parameters.get(f"{name}_bias")
        assert weight is not None
        dtype = autocast_dtype(x) or weight.dtype
        experts, *sizes = weight.shape
        outputs, inputs = reversed(sizes) if self.is_transposed else sizes
        pairs = len(x) // max(1, routing.batch_size)
        shape = ExpertsShape(routing.batch_size, pairs, inputs, outputs, dtype, experts)
        return _Projection.apply(
            x.to(dtype),
            weight.detach().to(dtype),
            None if bias is None else bias.detach().to(dtype),
            handles[name],
            None if bias is None else handles.dense(f"{name}_bias"),
            handles.slot(name, shape),
            routing,
            self.is_transposed,
        )


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds transformers' experts, with a forward from the registry."""
    forward = plain_forward(module)
    where = getattr(forward, "__globals__", {}).get("__name__")
    return where == "transformers.integrations.moe" and hasattr(module, "is_transposed")


def check_routing(name: str, module: nn.Module) -> None:
    """Refuse routing, and losses of routing, that depend on the other samples of a batch.

    Raises:
        ValueError: the module has such routing; the message names it.
    """
    refuse_router_losses(f"the config of module '{name}'", getattr(module, "config", None))
    if getattr(module, "expert_capacity", None) is not None:
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) has expert_capacity="
            f"{module.expert_capacity!r}: it drops tokens if many tokens choose one expert, so "
            "samples depend on each other. Use a model that routes each token by itself "
            "(Mixtral, Qwen3-MoE, GPT-OSS, DeepSeek)"
        )
    if is_experts(module) and getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) normalizes after each expert "
            "(has_post_expert_norm), which has no rule for private training"
        )


def refuse_router_losses(name: str, config: object) -> None:
    """Refuse a configuration (or arguments of a call) that adds a loss of the router."""
    asked = "output_router_logits"
    given = config.get(asked) if isinstance(config, dict) else getattr(config, asked, None)
    if given is True:
        raise ValueError(
            f"{name} has output_router_logits=True: transformers then adds a loss that balances "
            "the experts over all tokens of a batch, so no sample's gradient can be bounded. Set "
            "output_router_logits=False"
        )
