"""Attention as torch operators: opaque to torch.compile, differentiable, with vmap rules.

A pattern is passed as a string, its key, so that a compiled graph holds no tables. The operator
looks up the tile graph when it runs. The backward's operator returns an empty tensor in place of a
gradient that does not exist.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, D head dim of
queries and keys, E that of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dpflash.kernels import attention as kernels
from dpflash.kernels.attention_reference import AttentionInputs, needs_wide_o
from dpflash.kernels.attention_vendor import AUTO
from dpflash.kernels.layout import heads_outside, new_like
from dpflash.kernels.tile_graph import TileGraph

from ..patterns import Adaptive, Dense, Pattern, from_key
from ..patterns.adaptive import runtime_graph
from ..patterns.dense import cross_graph
from ..refusal import PrivateRefusal
from ..verification.second_order import differentiable_once
from .backend import current_backend

_LIBRARY = torch.library.Library("dpflash", "DEF")

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? slopes, Tensor? padding, "
    "Tensor? blocks, Tensor? gates, Tensor? bias"
)
_OPTIONS = "str pattern, float scale, float? softcap=None, str backend='auto'"
_LIBRARY.define(f"attention({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"attention_backward(Tensor do, Tensor? dlse, Tensor o, Tensor lse, {_INPUTS}, "
    f"{_OPTIONS}, bool bias_grad=False, bool squares=False) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# Named overloads save torch the search for a matching overload.
_FORWARD = torch.ops.dpflash.attention.default
_BACKWARD = torch.ops.dpflash.attention_backward.default

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None), str, float, bool))


class Attention(torch.autograd.Function):
    """`kernels.attention_forward` as an autograd node, differentiable in all floating inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        padding: Tensor | None,
        blocks: Tensor | None,
        gates: Tensor | None,
        bias: Tensor | None,
        pattern: str,
        scale: float,
        softcap: float | None,
        backend: str,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor]:
        tensors = (q, k, v, sinks, slopes, padding, blocks, gates, bias)
        return _FORWARD(*tensors, pattern, scale, softcap, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensors, (*ctx.options, ctx.return_lse) = inputs[:9], inputs[9:]
        ctx.save_for_backward(*output, *tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        o, lse, *tensors = ctx.saved_tensors
        if do is None and dlse is None:
            return (None,) * 14
        do = torch.zeros_like(o) if do is None else do
        if not ctx.return_lse:
            dlse = None  # The compiler passes zeros.
        _, _, _, sinks, slopes, _, _, gates, bias = tensors
        bias_grad = bias is not None and ctx.needs_input_grad[8]
        arguments = (do, dlse, o, lse, *tensors, *ctx.options, bias_grad)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            # Without grad mode no node is needed, and the compiler supports no node inside a node.
            grads = (_gradients if _is_plain(arguments) else _BACKWARD)(*arguments)
        else:
            grads = _AttentionBackward.apply(*arguments)
        dq, dk, dv, dsinks, dslopes, dgates, dbias, _ = grads
        dsinks = None if sinks is None else dsinks
        dslopes = None if slopes is None else dslopes
        dgates = None if gates is None else dgates
        dbias = dbias if bias_grad else None
        return (dq, dk, dv, dsinks, dslopes, None, None, dgates, dbias, *(None,) * 5)


class _AttentionBackward(torch.autograd.Function):
    """The backward as an autograd node; raises on double backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.dpflash.attention_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise RuntimeError(
            "attention is differentiable once: double backward is not supported. For gradient "
            "penalties or Hessians use torch's own attention with the math backend"
        )


class _EagerAttention(torch.autograd.Function):
    """`Attention` without torch.func, whose support costs time in each call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = (_forward if _is_plain(inputs) else _FORWARD)(*inputs[:-1])
        Attention.setup_context(ctx, inputs, output)
        return output

    backward = Attention.backward


def is_eager(inputs: Sequence[Any]) -> bool:
    """Return whether only autograd is active: no subclass, dispatch mode, transform or tracer."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    return _PLAIN.issuperset(map(type, inputs))


def _is_plain(inputs: Sequence[Any]) -> bool:
    plain = inputs[0].is_cpu and is_eager(inputs)
    return plain and not torch._C._autograd._profiler_enabled()


def attend(*inputs: Any, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Compute (o, lse) as `Attention` does, through the cheapest autograd node.

    Without `return_lse` the caller must not differentiate lse.
    """
    trains = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:9])
    if not trains and forward_ad._current_level < 0 and _is_plain(inputs):
        return _forward(*inputs, current_backend())
    func = torch._C._are_functorch_transforms_active()
    node = Attention if func or torch.compiler.is_compiling() else _EagerAttention
    return node.apply(*inputs, current_backend(), return_lse)


class ReleasedAttention(torch.autograd.Function):
    """`Attention` with the clipped, noisy gradients `release(grads, squared norms)`.

    One node computes the norms and adds the noise, so no operation in between can change the
    gradients. The node has no `setup_context`, so torch.func raises and does not vectorize noise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        release: Callable[[Sequence[Tensor], Tensor], Sequence[Tensor]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None,
        pattern: str,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        inputs = (q, k, v, None, None, padding, None, None, None)
        ctx.options = (pattern, scale, softcap, current_backend())
        o, lse = torch.ops.dpflash.attention(*inputs, *ctx.options)
        ctx.save_for_backward(o, lse, *inputs)
        ctx.release = release
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        o, lse, *inputs = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        *grads, _, _, _, _, squares = torch.ops.dpflash.attention_backward(
            do, dlse, o, lse, *inputs, *ctx.options, squares=True
        )
        return (None, *ctx.release(grads, squares), None, None, None, None)


def graph_of(
    q: Tensor,
    k: Tensor,
    pattern: Pattern,
    blocks: Tensor | None = None,
    gates: Tensor | None = None,
) -> TileGraph:
    """Return a call's tile graph; `Adaptive.choose` returns the `blocks` and their `gates`."""
    queries, keys = q.shape[2], k.shape[2]
    if isinstance(pattern, Adaptive):
        assert blocks is not None and gates is not None
        return runtime_graph(blocks, gates, pattern, queries)
    if queries != keys:
        if isinstance(pattern, Dense) and not pattern.causal:
            return cross_graph(queries, keys, q.shape[1], q.device)
        return pattern.last_rows(queries, keys, q.shape[1], q.device)
    return pattern.graph(queries, q.shape[1], q.device)


def key_range_of(padding: Tensor | None) -> Tensor | None:
    """Return each sample's (first key, end) as `[B, 2]`, int32; raise if the mask has a hole."""
    if padding is None:
        return None
    keys = padding.shape[1]
    position = torch.arange(keys, device=padding.device)
    if keys == 0:
        return torch.zeros(padding.shape[0], 2, dtype=torch.int32, device=padding.device)
    begin = position.masked_fill(padding, keys).amin(1)
    end = (position + 1).masked_fill(padding, 0).amax(1)
    consecutive = ((~padding).sum(1) == (end - begin).clamp(min=0)).all()
    if padding.device.type == "cpu" and not consecutive:
        raise PrivateRefusal(
            "key_padding_mask has a hole: expected the keys that are attended to in a sample to "
            "be consecutive; move padding to the ends, or pack with patterns.Documents"
        ) from None
    # On a GPU, reading the result would synchronize with the device.
    torch._assert_async(consecutive, "key_padding_mask has a hole: keys must be consecutive")
    return torch.stack((begin, end), dim=1).int()


def _inputs_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    padding: Tensor | None,
    blocks: Tensor | None,
    gates: Tensor | None,
    bias: Tensor | None,
    pattern: str,
    scale: float,
    softcap: float | None = None,
    backend: str = AUTO,
) -> AttentionInputs:
    graph = graph_of(q, k, from_key(pattern), blocks, gates)
    key_range = key_range_of(padding)
    extras = (sinks, slopes, key_range, softcap, bias)
    return AttentionInputs(q, k, v, graph, scale, *extras, backend)


def _forward(*given: Any) -> tuple[Tensor, Tensor]:
    o, lse = kernels.attention_forward(_inputs_of(*given))
    return _laid_out(o, given[0]), lse.contiguous()


def _backward(*given: Any) -> tuple[Tensor, ...]:
    """Return the results of `_gradients`, with an empty tensor in place of each None."""
    return tuple(_absent(given[4]) if x is None else x for x in _gradients(*given))


def _absent(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], 0))


def _gradients(
    do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, *given: Any
) -> tuple[Tensor | None, ...]:
    inputs, (bias_grad, squares) = _inputs_of(*given[:13]), _asked(given)
    q, k, v, sinks, slopes, _, _, gates, bias = given[:9]
    if needs_wide_o(q, sinks, slopes):
        o, _ = kernels.attention_forward(inputs, wide=True)
    grads = kernels.attention_backward(
        *(do, dlse, o, lse, inputs),
        run_grads=gates is not None,
        bias_grad=bias_grad,
        squares=squares,
        all_keys=True,
    )
    dgates = grads.dlog_multiplicity
    if gates is not None and dgates is not None:
        dgates = dgates.view(gates.shape)
    optional = (
        (None if grads.dsinks is None else grads.dsinks.sum(2), sinks),
        (None if grads.dslopes is None else grads.dslopes.sum(2), slopes),
        (dgates, gates),
        (grads.dbias, bias),
    )
    dqkv = (_laid_out(*pair) for pair in ((grads.dq, q), (grads.dk, k), (grads.dv, v)))
    rest = (None if grad is None else grad.to(x.dtype) for grad, x in optional)
    return *dqkv, *rest, grads.squares


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    if heads_outside(like):
        return x.contiguous()
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    o = new_like(q, q.dtype, head_dim=v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=dtype)


def _asked(given: Sequence[Any]) -> tuple[bool, bool]:
    """Return (bias_grad, squares) from a backward's arguments; both are False by default."""
    bias_grad, squares = (*given[13:], False, False)[:2]
    return bias_grad, squares


def _fake_backward(*given: Any) -> tuple[Tensor, ...]:
    q, k, v, sinks, slopes, _, _, gates, bias = given[4:13]
    bias_grad, squares = _asked(given[4:])
    optional = (sinks, slopes, gates, bias if bias_grad else None)
    grads = (_absent(q) if x is None else x.new_empty(x.shape) for x in optional)
    of_samples = q.new_empty(q.shape[0], dtype=torch.float64) if squares else _absent(q)
    return *(new_like(x, x.dtype) for x in (q, k, v)), *grads, of_samples


def _folded(op: Any) -> Any:
    """Make a vmap rule that folds the mapped dimension into the batch dimension."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        def fold(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            if dim is None:
                return x.unsqueeze(0).expand(info.batch_size, *x.shape).flatten(0, 1)
            return x.movedim(dim, 0).flatten(0, 1)

        folded = [fold(x, dim) for x, dim in zip(args, in_dims, strict=True)]
        batch = next(x.shape[0] for x in folded if isinstance(x, Tensor))
        batch = batch // info.batch_size if info.batch_size else 0
        unfolded = tuple(x.unflatten(0, (info.batch_size, batch)) for x in op(*folded))
        return unfolded, (0,) * len(unfolded)

    return rule


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("attention", _forward, _device)
    _LIBRARY.impl("attention_backward", _backward, _device)
torch.library.register_fake("dpflash::attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("dpflash::attention_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_vmap(
    "dpflash::attention", _folded(torch.ops.dpflash.attention), lib=_LIBRARY
)
torch.library.register_vmap(
    "dpflash::attention_backward", _folded(torch.ops.dpflash.attention_backward), lib=_LIBRARY
)
