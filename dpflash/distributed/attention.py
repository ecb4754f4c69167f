"""`ring_attention`: attention over a sequence that is sharded over ranks.

Shapes: B samples, H query heads, G key/value heads, T tokens, T_p tokens of rank p, D head dim.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from dpflash import _validate
from dpflash.attn.functional import attention, per_head, require_fitting, resolve_pattern
from dpflash.distributed.collectives import world_size
from dpflash.kernels.attention_reference import needs_wide_o
from dpflash.patterns import Pattern

from ..verification.second_order import differentiable_once
from .agreement import (
    MODES,
    Context,
    DeferredError,
    agree_on_lengths,
    layout_of,
    resolve_group,
    unpadded_length,
)
from .all_gather import AllGatherCall
from .blockwise import BlockChoice, BlockwiseBackward, BlockwiseForward, Tensors
from .exchange_plan import ShardedPattern, graph_of
from .layout import SHARDINGS
from .ring import Ring
from .traffic import ModeCall, cheapest_mode, require_enough_heads
from .ulysses import ulysses_attention

_WHAT = "ring_attention"


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None,
    group: ProcessGroup | None = None,
    mode: str = "ring",
    sharding: str = "contiguous",
    return_lse: Literal[False] = False,
    softmax_scale: float | None = None,
    length: int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None,
    group: ProcessGroup | None = None,
    mode: str = "ring",
    sharding: str = "contiguous",
    return_lse: Literal[True],
    softmax_scale: float | None = None,
    length: int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern | None,
    group: ProcessGroup | None = None,
    mode: str = "ring",
    sharding: str = "contiguous",
    return_lse: bool = False,
    softmax_scale: float | None = None,
    length: int | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `dpflash.attention` over a sequence that is sharded over ranks, for every pattern.

    All ranks of the group call this function together, each with its own tokens from
    `dpflash.distributed.shard_sequence`. Either all ranks run the backward, or none does.

    - "ring": each rank receives keys and values from one rank after another, as far as its queries
      attend to them, and returns their gradients directly (Liu et al., arXiv:2310.01889). It saves
      q, k, v, o and lse of this rank, and needs memory for one more shard while it runs.
    - "all_gather": one all-gather of keys and values in the forward and one in the backward, and
      one reduce-scatter of their gradients. It needs memory for the keys and values of the whole
      sequence while it runs.
    - "ulysses": an all-to-all, after which each rank has all tokens of some heads (Jacobs et al.,
      arXiv:2309.14509). It needs at least one query head per rank, and saves q, k and v of the
      rank's heads. If there are fewer key/value heads than ranks, k and v are first repeated to H.
    - "auto": the supported mode with the shortest predicted time. The prediction counts the bytes
      that the busiest rank sends (see `sent_bytes`), its work and the number of exchanges.
      "all_gather" is chosen only if the keys of all ranks are no larger than one rank's queries.

    Large calls of "ring" and "all_gather" split the heads into up to eight parts. The parts run
    one after the other, so that a call needs memory for one part at a time.

    Args:
        q: `[B, H, T_p, D]`, this rank's tokens, with a dtype that `dpflash.attention` supports.
        k: `[B, G, T_p, D]`, dtype and device of `q`; G divides H.
        v: `[B, G, T_p, D]`, dtype and device of `q`.
        pattern: a pattern of `dpflash.patterns` over the whole sequence; None means dense
            attention without causal mask.
        group: the ranks that share the sequence; None means the default group, or a single
            process without torch.distributed.
        mode: how keys and values are exchanged, see above.
        sharding: "contiguous" or "zigzag", see `Layout`.
        return_lse: also return the log-sum-exp of each query's scores.
        softmax_scale: factor of the scores; None means `1 / sqrt(D)`.
        length: positions from `length` on are padding, which is masked and not computed.
        sinks: `[H]` or `[B, H]`, equal on all ranks: score of an additional key whose value is 0.
        alibi_slopes: `[H]` or `[B, H]`, the same on all ranks: ``slope * |i - j|`` is subtracted
            from the scores; i and j are positions in the whole sequence.

    Returns:
        o: `[B, H, T_p, D]`, dtype of `q`: this rank's rows of `dpflash.attention` over the whole
        sequence; with `return_lse` the pair (o, lse), lse `[B, H, T_p]`, float32 (float64 for
        float64 inputs). A fully masked row (a query without key or sink, or of padding) has
        o = 0, lse = -inf and gradient 0.

    Raises:
        ValueError: on all ranks, if `dpflash.attention` refuses the arguments, if arguments
            differ between ranks, or if a shard has a wrong number of tokens.
        RankError: a rank died, or did not answer within the timeout of the group.

    Guarantees:
        Differentiable once in q, k, v, sinks and alibi_slopes, through o and lse. Gradients of
        sinks and alibi_slopes are this rank's part; sum them over the ranks.
        Partial results are merged, and gradients are summed over ranks, in float32 (float64 for
        float64 inputs) in a fixed order. They are rounded to the inputs' dtype once, except that
        "ulysses" rounds gradients of repeated heads before their sum. Repeated runs of "ring" give
        the same bits; repeated runs of other modes do if the backend's collectives do.
    """
    group = resolve_group(group)
    deferred = DeferredError()
    values: dict[str, Any] = {}
    scale = 1.0
    with deferred.catch():
        require_fitting(q, k, v)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q has {q.shape[2]} tokens and k {k.shape[2]}: expected the same tokens of one "
                "sequence; split both with shard_sequence"
            )
        _validate.one_of(mode=(mode, (*MODES, "auto")), sharding=(sharding, SHARDINGS))
        _validate.optional(_validate.finite, softmax_scale=softmax_scale)
        scale = 1 / math.sqrt(q.shape[3]) if softmax_scale is None else float(softmax_scale)
        pattern = resolve_pattern(pattern, False, q.shape[2], q.shape[2])
        sinks = per_head("sinks", sinks, q)
        alibi_slopes = per_head("alibi_slopes", alibi_slopes, q)
        _validate.optional(_validate.positive_int, length=length)
        values = {
            "[B, H, D] of q": [*q.shape[:2], q.shape[3]],
            "[B, G, D] of k": [*k.shape[:2], k.shape[3]],
            "dtype of q": q.dtype,
            "device type of q": q.device.type,
            "pattern": pattern.key,
            "mode": mode,
            "sharding": sharding,
            "softmax_scale": scale,
            "length": None if length is None else int(length),
            "dtype of sinks": None if sinks is None else sinks.dtype,
            "dtype of alibi_slopes": None if alibi_slopes is None else alibi_slopes.dtype,
            "which of q, k, v, sinks, alibi_slopes need gradients": tuple(
                x is not None and x.requires_grad and torch.is_grad_enabled()
                for x in (q, k, v, sinks, alibi_slopes)
            ),
        }
    own = q.shape[2] if values else 0
    lengths = agree_on_lengths(_WHAT, values, own, group, deferred.error)
    layout = layout_of(_WHAT, lengths, sharding)
    context = Context(group, layout, mode, unpadded_length(length, layout.num_tokens))
    assert pattern is not None
    o, lse = attend(
        q, k, v, pattern=pattern, scale=scale, context=context, sinks=sinks, slopes=alibi_slopes
    )
    return (o, lse) if return_lse else o


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    pattern: Pattern,
    scale: float,
    context: Context,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `ring_attention`, but do not compare arguments between ranks.

    q, k and v must have passed `require_fitting`, and have the T_p tokens of the agreed layout;
    sinks and slopes are `[B, H]`. If mode, T or H is not supported, all ranks raise.
    """
    if q.shape[2] != context.layout.local_length(context.rank):
        raise ValueError(
            "context is of another number of tokens than q of this rank: pass the context that "
            "context_parallel.agree returned for this call"
        )
    own, padding = context.local_length, q.shape[2] - context.local_length
    if padding:
        q, k, v = (x[:, :, :own] for x in (q, k, v))
    group, mode = context.group, context.mode
    sharded = ShardedPattern(pattern, context.length, q.shape[1], k.shape[1], context.layout)
    # Check T and H: this raises if the pattern does not support them.
    graph_of(sharded, torch.device("cpu"))
    call = ModeCall(sharded, q.shape[3], q.dtype, q.shape[0], q.device.type)
    if mode == "auto":
        mode = cheapest_mode(call)
    require_enough_heads(sharded, mode)
    if context.calls is not None and group is not None:
        kind_of_call = type(pattern), q.shape[1], k.shape[1], q.shape[3]
        context.calls[kind_of_call] = call, mode
    if group is None or world_size(group) == 1:
        options: Any = {"softmax_scale": scale, "sinks": sinks, "alibi_slopes": slopes}
        o, lse = attention(q, k, v, pattern=pattern, return_lse=True, **options)
    elif q.shape[0] == 0:
        # Empty outputs must depend on all inputs, so that the autograd graph has the same nodes.
        o = q + sum(x.sum() for x in (k, v, sinks, slopes) if x is not None)
        lse = o.sum(3, dtype=torch.promote_types(q.dtype, torch.float32))
    elif mode == "ulysses":
        o, lse = ulysses_attention(q, k, v, sinks, slopes, sharded, group, scale)
    else:
        choice = BlockChoice.of(q, k, sharded, group, scale)
        kind = Ring if mode == "ring" else AllGatherCall
        exchange = kind(sharded, group, scale, slopes is not None)
        o, lse = _ShardedAttention.apply(q, k, v, sinks, slopes, *choice, exchange)
    if padding:
        o = F.pad(o, (0, 0, 0, padding))
        lse = F.pad(lse, (0, padding), value=-math.inf)
    return o, lse


class _ShardedAttention(torch.autograd.Function):
    """Computes ``(o, lse)`` of this rank's queries over the keys of all ranks.

    Saves q, k, v, o and lse of this rank only; the backward exchanges keys and values again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        slopes: Tensor | None,
        blocks: Tensor | None,
        gates: Tensor | None,
        call: Ring | AllGatherCall,
    ) -> tuple[Tensor, Tensor]:
        runtime = BlockChoice.graph_of(blocks, gates, call.sharded)

        def compute(part: Ring | AllGatherCall, inputs: Tensors) -> Tensors:
            q, k, v, sinks, slopes = inputs
            assert q is not None and k is not None and v is not None
            forward = BlockwiseForward(q, sinks, slopes, call.scale, call.backend)
            part.forward(forward, k, v, runtime)
            return forward.o, forward.lse, forward.wide_o

        wide = torch.promote_types(q.dtype, torch.float32)
        of_wide_o = (q.shape, wide) if needs_wide_o(q, sinks, slopes) else None
        shapes = ((q.shape, q.dtype), (q.shape[:3], wide), of_wide_o)
        o, lse, wide_o = call.by_heads(compute, (q, k, v, sinks, slopes), shapes)
        assert o is not None and lse is not None
        saved_o = o if wide_o is None else wide_o
        ctx.save_for_backward(q, k, v, saved_o, lse, sinks, slopes, blocks, gates)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        call: Ring | AllGatherCall = ctx.call
        # Read the tuple once: activation checkpointing allows a single read of saved tensors.
        saved = ctx.saved_tensors
        runtime = BlockChoice.graph_of(saved[-2], saved[-1], call.sharded)

        def compute(part: Ring | AllGatherCall, inputs: Tensors) -> Tensors:
            *saved, do, dlse = inputs
            k, v = saved[1:3]
            assert k is not None and v is not None
            backward = BlockwiseBackward(saved, do, dlse, call.scale, call.backend)
            own = part.backward(backward, k, v, runtime, any(ctx.needs_input_grad[1:3]))
            return backward.results(own, k, v)

        results = (*saved[:3], *saved[5:])
        shapes = [None if x is None else (x.shape, x.dtype) for x in results]
        return *call.by_heads(compute, (*saved, do, dlse), shapes), None
