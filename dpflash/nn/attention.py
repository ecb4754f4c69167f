"""Multi-head attention with the signature of `torch.nn.MultiheadAttention`.

Letters: B samples, H query heads, G key/value heads, T query tokens, S key tokens, E model dim.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dpflash.kernels import apply_rotary

from .. import _validate
from ..attn.functional import attention, require_pattern, resolve_pattern
from ..attn.rotary import Turns, document_positions
from ..distributed import ContextParallel
from ..distributed.agreement import Context
from ..distributed.attention import attend
from ..patterns import Adaptive, Documents, Pattern


class PerHead(nn.Module):
    """One learned number for each attention head.

    The forward expands the parameter `[H]` to `[B, H]`, so that it has per-sample gradients.
    """

    def __init__(
        self,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def forward(self, samples: Tensor) -> Tensor:
        """Return the numbers, `[B, H]`; `samples` is any tensor `[B, ...]`."""
        return self.weight.expand(samples.shape[0], -1)


class MultiheadAttention(nn.Module):
    """Multi-head attention: projections to q, k and v, attention, and an output projection.

    Self-attention uses one fused projection, `qkv_proj`, whose rows project to q, k and v, in
    this order, as in torch's `in_proj_weight`. With ``self_attention=False`` the module has
    `q_proj`, `k_proj` and `v_proj`, and keys and values may come from other tensors.

    Args:
        embed_dim: E; `num_heads` divides it.
        num_heads: H.
        dropout: probability of dropping an attention weight while training.
        bias: whether the projections have biases.
        add_bias_kv: must be False.
        add_zero_attn: must be False.
        kdim: width of `key`; None means E. Other widths need ``self_attention=False``.
        vdim: width of `value`; None means E. Other widths need ``self_attention=False``.
        batch_first: must be True (torch's default is False).
        device: device of the parameters.
        dtype: dtype of the parameters.
        num_kv_heads: G, which divides H; None means H.
        pattern: a pattern of `dpflash.patterns`; None means dense attention. With a pattern,
            attn_mask, floating-point key_padding_mask and dropout of weights are not supported.
        context_parallel: a DeviceMesh with a dimension "context", or a
            `dpflash.distributed.ContextParallel`. The inputs are then this rank's tokens, which
            attend to the tokens of all ranks. Needs self-attention, no masks and no dropout of
            weights, and all ranks must call the module together.
        self_attention: whether query, key and value are always the same tensor.
        rotary: apply rotary position embeddings; needs self-attention.
        attention_sinks: learn one attention sink per head, the score of an extra key with value 0.
        alibi: learn one slope per head; ``slope * distance`` is subtracted from the scores
            (ALiBi). The slope of head h starts at ``2^(-8 (h + 1) / H)``.

    Raises:
        ValueError: an argument is outside of the ranges above.

    Guarantees:
        Sample i of the output depends on sample i of the inputs alone (and on a shared attn_mask).
    """

    takes_context_parallel = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        pattern: Pattern | None = None,
        context_parallel: DeviceMesh | ContextParallel | None = None,
        self_attention: bool = True,
        rotary: bool = False,
        attention_sinks: bool = False,
        alibi: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kdim = embed_dim if kdim is None else kdim
        vdim = embed_dim if vdim is None else vdim
        _require_supported(add_bias_kv, add_zero_attn, batch_first)
        _validate.positive_int(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            kdim=kdim,
            vdim=vdim,
        )
        require_dropout(dropout)
        for name, flag in (("attention_sinks", attention_sinks), ("alibi", alibi)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name}={flag!r}: expected True or False; pass one of the two")
        if embed_dim % num_heads != 0:
            raise ValueError(
                f"num_heads={num_heads}: expected a divisor of embed_dim={embed_dim}; "
                "change one of the two"
            )
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"num_kv_heads={num_kv_heads}: expected a divisor of num_heads={num_heads}; "
                "change one of the two"
            )
        if self_attention and (kdim != embed_dim or vdim != embed_dim):
            raise ValueError(
                f"kdim={kdim}, vdim={vdim}: self-attention projects one tensor of width "
                f"embed_dim={embed_dim}; pass self_attention=False for other keys and values"
            )
        self.pattern = None if pattern is None else require_pattern(pattern)
        if dropout > 0 and (pattern is not None or attention_sinks or alibi):
            raise ValueError(
                f"dropout={dropout} with a pattern, attention_sinks or alibi: weights are only "
                "dropped in plain dense attention; pass dropout=0"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.kdim = kdim
        self.vdim = vdim
        self.self_attention = self_attention
        self.rotary = rotary
        self.context_parallel: ContextParallel | None = None
        if context_parallel is not None:
            reason = self.refuse_context_parallel()
            if reason is not None:
                raise ValueError(f"context_parallel={context_parallel!r}: {reason}")
            if not isinstance(context_parallel, ContextParallel):
                context_parallel = ContextParallel.of(context_parallel)
            self.context_parallel = context_parallel
        if rotary and (not self_attention or self.head_dim % 2 != 0):
            raise ValueError(
                f"rotary=True with self_attention={self_attention} and "
                f"head_dim={self.head_dim}: expected self-attention and an even head_dim "
                "(embed_dim / num_heads); change these or pass rotary=False"
            )

        kv_dim = num_kv_heads * self.head_dim
        if self_attention:
            self.qkv_proj = nn.Linear(embed_dim, embed_dim + 2 * kv_dim, bias, device, dtype)
        else:
            self.q_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
            self.k_proj = nn.Linear(kdim, kv_dim, bias, device, dtype)
            self.v_proj = nn.Linear(vdim, kv_dim, bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.sinks = PerHead(num_heads, device, dtype) if attention_sinks else None
        self.alibi_slopes = PerHead(num_heads, device, dtype) if alibi else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize input projections as torch does (Xavier), biases and sinks with 0."""
        if self.alibi_slopes is not None:
            head = torch.arange(1, self.num_heads + 1)
            with torch.no_grad():
                self.alibi_slopes.weight.copy_(2.0 ** (-8.0 * head / self.num_heads))
        if self.sinks is not None:
            nn.init.zeros_(self.sinks.weight)
        for projection in self.children():
            if not isinstance(projection, nn.Linear):
                continue
            if projection is self.out_proj:
                projection.reset_parameters()
            else:
                nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        context: Context | None = None,
    ) -> tuple[Tensor, None]:
        """Attend from query to key and value.

        Args:
            query: `[B, T, E]`.
            key: `[B, S, kdim]`; None means `query`. For self-attention it must be `query`.
            value: `[B, S, vdim]`; None means `key`. For self-attention it must be `query`.
            key_padding_mask: `[B, S]`, boolean (True: this key is ignored) or floating point
                (added to the scores).
            need_weights: must be False.
            attn_mask: `[T, S]` or `[B * H, T, S]`, boolean (True: not attended to) or floating
                point (added to the scores).
            average_attn_weights: has no effect, since no weights are returned.
            is_causal: query t attends to the keys 0..t only, in addition to the masks; unlike in
                torch's module, no attn_mask is needed as well.
            cu_seqlens: borders of the documents that are packed into the batch, ``(0, end of the
                first document, ..., B * T)``: the rows, one after another, form one sequence. Each
                token attends within its own document, and rotary positions count from the
                document's first token. Needs self-attention, no masks and no dropout of weights.
                With context_parallel the borders count the tokens of all ranks; sinks, slopes and
                `Adaptive` patterns are then not supported.
            context: with context_parallel, the result of ``context_parallel.agree``, so that the
                ranks agree on the sequence once per forward, not in every layer.

        Returns:
            The pair (output `[B, T, E]`, None). The output of a fully masked query is the bias of
            the output projection, never NaN.

        Raises:
            ValueError: need_weights=True, shapes that do not fit, another key or value in
                self-attention, or cu_seqlens with an argument that it does not support.
        """
        if need_weights:
            raise ValueError(
                "need_weights=True: the attention weights are never held as a matrix; pass "
                "need_weights=False (here the default)"
            )
        key = query if key is None else key
        value = key if value is None else value
        self._require_inputs(query, key, value)
        if cu_seqlens is not None:
            self._require_packable(key_padding_mask, attn_mask)
            if isinstance(cu_seqlens, Tensor):
                cu_seqlens = cu_seqlens.tolist()
            documents = Documents(cu_seqlens=cu_seqlens)
            return self._packed_output(query, documents, is_causal, context), None
        masks = key_padding_mask, attn_mask
        return self._output(query, key, value, *masks, is_causal, context), None

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
        """Return `[B, T, E]`; private training replaces this method by one autograd node."""
        if self.context_parallel is not None:
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            o = self._attend_across(query, masks, is_causal, context)
            return self._merged(o)
        q, k, v = self._project(query, key, value)
        if self.rotary:
            q, k = apply_rotary(q, k, *Turns.of(q, self.head_dim))
        if self.pattern is None and self.sinks is None and self.alibi_slopes is None:
            o = self._attend_densely(q, k, v, key_padding_mask, attn_mask, is_causal)
            return self._merged(o)
        if attn_mask is not None:
            raise ValueError(
                f"attn_mask of shape {tuple(attn_mask.shape)} with pattern="
                f"{type(self.pattern).__name__}: expected None; define visible keys with the "
                "pattern, or build the module without pattern, attention_sinks and alibi"
            )
        o = attention(
            *(q, k, v),
            pattern=self.pattern,
            causal=is_causal,
            key_padding_mask=key_padding_mask,
            sinks=None if self.sinks is None else self.sinks(query),
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes(query),
        )
        return self._merged(o)

    def _packed_output(
        self, x: Tensor, documents: Documents, is_causal: bool, context: Context | None
    ) -> Tensor:
        """Return `[B, T, E]` for documents that are packed into x, see `_output`."""
        q, k, v = (
            # One row holds all tokens.
            t.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)
            for t in self._project(x, x, x)
        )
        inner = resolve_pattern(self.pattern, is_causal, q.shape[2], q.shape[2])
        positions = document_positions(documents.cu_seqlens, q.device)
        if self.context_parallel is not None:
            context = self._context_of(x, documents & inner, len(positions), context)
            positions = positions[context.positions(q.device)]
        if self.rotary:
            q, k = self._rotated(q, k, positions)
        if context is None:
            o = self._attend_packed(q, k, v, documents, inner)
        else:
            o, _ = attend(
                *(q, k, v),
                pattern=documents & inner,
                scale=1 / math.sqrt(self.head_dim),
                context=context,
            )
        return self._merged(o.transpose(1, 2).unflatten(1, x.shape[:2])[0].transpose(1, 2))

    def _context_of(
        self, x: Tensor, pattern: Pattern, tokens: int, context: Context | None
    ) -> Context:
        """Return the Context of a packed batch, of which x `[R, T_p, E]` is this rank's part."""
        assert self.context_parallel is not None
        self.context_parallel.require_packable()
        if context is None:
            context = self.context_parallel.agree(
                x.shape[1], rows=x.shape[0], dtype=x.dtype, pattern=pattern.key
            )
        if context.length != tokens:
            raise ValueError(
                f"cu_seqlens ends at {tokens}, but the inputs of all ranks have {context.length} "
                "tokens: divide the packed batch by model.context_parallel.shard(batch)"
            )
        return context

    def _attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, inner: Pattern
    ) -> Tensor:
        return attention(
            q,
            k,
            v,
            pattern=documents & inner,
            sinks=None if self.sinks is None else self.sinks(q),
            alibi_slopes=None if self.alibi_slopes is None else self.alibi_slopes(q),
        )

    def _require_packable(self, *masks: Tensor | None) -> None:
        reason = None
        has_numbers = self.sinks is not None or self.alibi_slopes is not None
        if not self.self_attention:
            reason = "self_attention=False is not supported; pass self_attention=True"
        elif any(mask is not None for mask in masks):
            reason = "a mask beside it is not supported; omit the mask, make padding a document"
        elif self.context_parallel is not None and has_numbers:
            reason = (
                "attention_sinks or alibi has no per-document gradients over several ranks; "
                "leave both out, or train without context_parallel"
            )
        elif self.context_parallel is not None and isinstance(self.pattern, Adaptive):
            reason = (
                f"pattern={self.pattern!r} would choose blocks across documents over several "
                "ranks; pass another pattern, or train without context_parallel"
            )
        elif self.training and self.dropout > 0:
            reason = f"dropout={self.dropout} of weights is not supported; pass dropout=0"
        if reason is not None:
            raise ValueError(f"cu_seqlens with {reason}")

    def _merged(self, o: Tensor) -> Tensor:
        out: Tensor = self.out_proj(o.transpose(1, 2).flatten(2))
        return out

    def _rotated(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary(q, k, *Turns.at(positions, self.head_dim, q.dtype))

    def _attend_across(
        self,
        query: Tensor,
        masks: dict[str, Tensor | None],
        is_causal: bool,
        context: Context | None,
    ) -> Tensor:
        """Return attention `[B, H, T, D]` of this rank's queries over the keys of all ranks."""
        assert self.context_parallel is not None
        given = [name for name, mask in masks.items() if mask is not None]
        reason = self.refuse_context_parallel() if self.training else None
        if given:
            reason = (
                f"{given[0]} with context_parallel: a mask over other ranks' tokens is not "
                "known here; define visible keys with pattern=, and mark padding in the targets"
            )
        pattern = resolve_pattern(self.pattern, is_causal, query.shape[1], query.shape[1])
        if context is not None and reason is not None:
            raise ValueError(reason)
        if context is None:
            context = self.context_parallel.agree(
                query.shape[1],
                error=None if reason is None else ValueError(reason),
                samples=query.shape[0],
                dtype=query.dtype,
                pattern=pattern.key,
            )
        q, k, v = self._project(query, query, query)
        if self.rotary:
            q, k = self._rotated(q, k, context.positions(q.device))
        o, _ = attend(
            q,
            k,
            v,
            pattern=pattern,
            scale=1 / math.sqrt(self.head_dim),
            context=context,
            sinks=None if self.sinks is None else self.sinks(query),
            slopes=None if self.alibi_slopes is None else self.alibi_slopes(query),
        )
        return o

    def refuse_context_parallel(self) -> str | None:
        """Return why the module cannot attend to other ranks' tokens, or None if it can."""
        if not self.self_attention:
            return "keys of another source are not sharded; pass self_attention=True"
        if self.dropout > 0:
            return (
                f"dropout={self.dropout} of attention weights: a rank does not know the "
                "dropout masks of the other ranks; pass dropout=0"
            )
        return None

    def _require_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if self.self_attention and (key is not query or value is not query):
            raise ValueError(
                "key or value is another tensor than query, but this module was built for "
                "self-attention; build it with self_attention=False or pass the same tensor"
            )
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), tensor in zip(widths.items(), (query, key, value), strict=True):
            if tensor.ndim != 3 or tensor.shape[2] != width:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}: expected [batch, tokens, {width}]; "
                    "add a missing batch dimension with unsqueeze(0)"
                )
        if query.shape[0] != key.shape[0] or key.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}: "
                "expected one batch size, and as many values as keys; the batch comes first"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to q `[B, H, T, D]` and k, v `[B, G, S, D]`; all three are strided views."""
        kv_dim = self.num_kv_heads * self.head_dim
        if self.self_attention:
            q, k, v = self.qkv_proj(query).split((self.embed_dim, kv_dim, kv_dim), dim=2)
        else:
            q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        return (
            q.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2),
            k.unflatten(2, (self.num_kv_heads, self.head_dim)).transpose(1, 2),
            v.unflatten(2, (self.num_kv_heads, self.head_dim)).transpose(1, 2),
        )

    def _attend_densely(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """Return dense attention `[B, H, T, D]` with the masks, and with dropout in training."""
        masks = _score_masks(q, k, key_padding_mask, attn_mask)
        dropout_p = self.dropout if self.training else 0.0
        if not masks and dropout_p == 0.0:
            return attention(q, k, v, causal=is_causal)
        if is_causal and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"is_causal=True with {q.shape[2]} queries and {k.shape[2]} keys: expected equal "
                "numbers; pass attn_mask to define the keys that each query sees"
            )
        if is_causal and masks:
            causal_mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
            masks.append(causal_mask.triu(1))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_merge_masks(masks, q.dtype),
            dropout_p=dropout_p,
            is_causal=is_causal and not masks,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )

    def extra_repr(self) -> str:
        """Return the settings that the printed projections do not show."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"dropout={self.dropout}, rotary={self.rotary}, pattern={self.pattern}"
        )


def require_dropout(dropout: float) -> None:
    """Raise ValueError unless 0 <= dropout < 1."""
    _validate.non_negative(dropout=dropout)
    if dropout >= 1:
        raise ValueError(f"dropout={dropout}: expected 0 <= dropout < 1; 0 switches it off")


def _require_supported(add_bias_kv: bool, add_zero_attn: bool, batch_first: bool) -> None:
    if add_bias_kv:
        raise ValueError(
            "add_bias_kv=True: its parameters would lie outside of any layer with a gradient "
            "rule; pass False"
        )
    if add_zero_attn:
        raise ValueError("add_zero_attn=True: not supported; pass False")
    if not batch_first:
        raise ValueError(
            "batch_first=False: per-sample clipping needs the samples in dimension 0; pass True "
            "and inputs of shape [batch, tokens, embed_dim]"
        )


def _score_masks(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
) -> list[Tensor]:
    """Return the masks that are not None, each broadcastable to `[B, H, T, S]`."""
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    masks = []
    if key_padding_mask is not None:
        _require_mask("key_padding_mask", key_padding_mask, [(batch, keys)])
        masks.append(key_padding_mask.reshape(batch, 1, 1, keys))
    if attn_mask is not None:
        shapes = [(queries, keys), (batch * heads, queries, keys)]
        _require_mask("attn_mask", attn_mask, shapes)
        per_head = (batch, heads, queries, keys)
        masks.append(attn_mask.reshape(per_head) if attn_mask.ndim == 3 else attn_mask)
    return masks


def _require_mask(name: str, mask: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if tuple(mask.shape) not in shapes:
        listed = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: expected {listed}; reshape it")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{name} has dtype {mask.dtype}: expected torch.bool (True: ignored) or floating "
            f"point (added to the scores); convert it with {name}.bool()"
        )


def _merge_masks(masks: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Merge masks for `scaled_dot_product_attention`, whose True means attended to."""
    if not masks:
        return None
    merged = masks[0]
    for mask in masks[1:]:
        if merged.dtype == mask.dtype == torch.bool:
            merged = merged | mask
        else:
            merged = _additive(merged, dtype) + _additive(mask, dtype)
    return ~merged if merged.dtype == torch.bool else merged.to(dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a boolean mask to a mask that is added to the scores: -inf in place of True."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
