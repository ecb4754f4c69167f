"""Context parallelism for causal language models of transformers.

A hook on the model's forward passes the positions of this rank's tokens in the whole sequence. An
attention function, registered with transformers, attends to the tokens of all ranks.

Shapes: B samples, H heads, T tokens, T_p tokens of rank p, D head dim.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attn.functional import resolve_pattern
from ..patterns import Documents, Pattern, SlidingWindow
from ..refusal import PrivateRefusal
from .agreement import Context, DeferredError
from .attention import attend
from .layout import Layout

if TYPE_CHECKING:
    from .context import ContextParallel

# The name must not contain "flash", which transformers takes to mean FlashAttention.
NAME = "dp_context"

# Families whose attention calls transformers' attention interface, and whose other modules work on
# single tokens. tests/distributed/test_pretrained_models.py compares each with one process
_FAMILIES = ("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3")
_MODELS = {f"{name}{kind}" for name in _FAMILIES for kind in ("Model", "ForCausalLM")}
_MODELS.add("GPT2LMHeadModel")

_CALL = "context_parallel"  # the keyword that carries a `_Call` from the hook to attention
# Arguments of a model's call that may be passed per rank; arguments that attention may get.
_TAKEN = {"input_ids", "attention_mask", "position_ids", "output_hidden_states", "return_dict"}
_PASSED_ON = {*_TAKEN, "cache_position", "position_embeddings"}
_REMEDIES = {
    "labels": "labels are shifted within a rank's tokens: shift them before you shard them, and "
    "use dpflash.losses.cross_entropy(logits, targets) * "
    "dpflash.distributed.loss_weights(targets, mesh)",
    "inputs_embeds": "pass input_ids, this rank's tokens",
    "past_key_values": "pass the whole sequence without a cache, or generate in one process",
    "use_cache": "pass the whole sequence without a cache, or generate in one process",
    "output_attentions": "no attention weights are stored; leave it out",
    "cu_seq_lens_q": "pass position_ids that restart with each packed document",
    "cu_seq_lens_k": "pass position_ids that restart with each packed document",
}


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, without importing transformers."""
    loaded = sys.modules.get("transformers.modeling_utils")
    return loaded is not None and isinstance(module, loaded.PreTrainedModel)


def refusal(module: Any) -> str | None:
    """Return why a model of transformers cannot process shards of sequences; None if it can."""
    if not _MODELS & {kind.__name__ for kind in type(module).__mro__}:
        return (
            "of the models of transformers, context_parallel supports the causal language models "
            f"of {', '.join(_FAMILIES)}; use one of them or dpflash.nn.LongContextLM"
        )
    if not module._can_set_attn_implementation():
        return "its code does not use transformers' attention interface; use its base class"
    for part in (module.config, *module.modules()):
        if getattr(part, "is_causal", True) is False:
            return (
                "is_causal=False, as in cross attention: attention over a context is causal; "
                "leave is_causal and add_cross_attention out"
            )
    for child in module.modules():
        kind = getattr(child, "rope_type", "default")
        if kind in ("dynamic", "longrope"):
            return (
                f"rope_type={kind!r} chooses frequencies by the positions on one rank, so ranks "
                "would disagree; use another rope_type, such as 'yarn' or 'linear'"
            )
    return None


def attend_across(module: Any) -> None:
    """Make a model of transformers process this rank's tokens, see its `context_parallel`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    module.set_attn_implementation(NAME)
    module.register_forward_pre_hook(_Entry(), with_kwargs=True)


@dataclass(frozen=True, eq=False)
class _Call:
    """The facts about one forward of the model that its attention layers need."""

    context: Context  # the agreed sequence; with packed documents, all rows as one sequence
    tokens: int  # T
    documents: Documents | None  # documents of all rows joined; None if each row is one document

    def pattern(self, sliding_window: int | None) -> Pattern:
        """Return the causal pattern of a layer; a window includes the query's own token."""
        inner = None
        if sliding_window is not None and sliding_window < self.tokens:
            inner = SlidingWindow(window=sliding_window - 1, causal=True)
        if self.documents is None:
            return resolve_pattern(inner, True, self.tokens, self.tokens)
        return self.documents if inner is None else self.documents & inner


class _Entry:
    """A hook before a model's forward: compares calls over the ranks and passes a `_Call`."""

    def __init__(self) -> None:
        self._looked = False

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if _CALL in kwargs:  # called by a model whose hook ran
            return None
        parallel: ContextParallel = module.context_parallel
        deferred = DeferredError()
        given: dict[str, Tensor] = {}
        with deferred.catch():
            given = _arguments(args, kwargs)
        tokens = given.get("input_ids", torch.zeros(0, 0))
        context = parallel.agree(
            tokens.shape[1],
            samples=len(tokens),
            given=sorted(given),
            training=module.training,
            autocast=torch.is_autocast_enabled(tokens.device.type),
            error=deferred.error,
        )
        if not self._looked and len(tokens):
            self._looked = True
            parallel.warn_of_copies(context, tokens)
        if "attention_mask" in given:
            _require_padding_last(parallel.unshard(given["attention_mask"].to(torch.int8)))
        positions, documents, longest = given.get("position_ids"), None, context.length
        if positions is None:
            positions = context.positions(tokens.device).unsqueeze(0)
        elif positions.numel():
            whole = parallel.unshard(positions)
            documents, longest = _documents(whole, len(tokens)), int(whole.max()) + 1
        _require_embedded(module, longest)
        tokens_of_all = context.length
        if documents is not None:
            rows = len(tokens)
            split = context.layout
            layout = Layout(rows * split.num_tokens, split.world_size, split.sharding, rows)
            context = replace(context, layout=layout, length=rows * context.length)
        call = _Call(context, tokens_of_all, documents)
        changes = {"position_ids": positions, "attention_mask": None, "use_cache": False}
        return (), {**kwargs, "input_ids": tokens, **changes, _CALL: call}


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a call by name; refuse arguments that cannot be used per rank."""
    if len(args) > 1:
        raise ValueError(
            "a model with context_parallel takes only input_ids by position; pass the other "
            "arguments by name"
        )
    given = {**kwargs, **dict(zip(("input_ids",), args, strict=False))}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        is_off = isinstance(value, bool | int) and not value
        if name not in _TAKEN and not is_off:
            remedy = _REMEDIES.get(name, "leave it out")
            raise ValueError(f"{name} with context_parallel: {remedy}")
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    tokens = tensors.get("input_ids")
    if tokens is None or tokens.ndim != 2:
        raise ValueError(
            "input_ids with context_parallel: expected this rank's tokens [B, T_p]; pass "
            "model.context_parallel.shard(input_ids)"
        )
    for name in ("attention_mask", "position_ids"):
        shape = tensors[name].shape if name in tensors else tokens.shape
        fits = shape == tokens.shape or (name == "position_ids" and shape == (1, tokens.shape[1]))
        if not fits:
            raise ValueError(
                f"{name} of shape {tuple(shape)} with context_parallel: expected "
                f"{list(tokens.shape)}, the shape of input_ids; pass "
                f"model.context_parallel.shard({name})"
            )
    return tensors


def _require_padding_last(mask: Tensor) -> None:
    if (mask.diff(dim=1) > 0).any():
        raise PrivateRefusal(
            "attention_mask with context_parallel: expected padding after the tokens of each "
            "sample, where causal attention never reads it; pad on the right, and give padding "
            "the target -100"
        ) from None


def _require_embedded(module: Any, length: int) -> None:
    """Refuse a sequence with more positions than GPT-2 has embeddings for."""
    wpe = getattr(module.base_model, "wpe", None)
    if wpe is not None and length > wpe.num_embeddings:
        raise PrivateRefusal(
            "input_ids of all ranks have more positions together than "
            f"n_positions={wpe.num_embeddings}; shorten the sequence before "
            "model.context_parallel.shard",
            length=length,
        ) from None


def _documents(positions: Tensor, rows: int) -> Documents | None:
    """Return the documents between restarts of positions `[B, T]` or `[1, T]`, or None."""
    starts, restarts = positions.diff(dim=1) != 1, positions == positions.min()
    if not starts.any():
        return None
    if not (restarts[:, 0].all() and torch.equal(starts, restarts[:, 1:])):
        raise PrivateRefusal(
            "position_ids with context_parallel: expected consecutive positions that restart at "
            "the same value in each document; pass the result of model.context_parallel.shard"
        ) from None
    borders = restarts.expand(rows, -1).flatten().nonzero()[:, 0].tolist()
    return Documents(cu_seqlens=[*borders, rows * positions.shape[1]], causal=True)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return ``(o, None)`` for this rank's q `[B, H, T_p, D]`, with o `[B, T_p, H, D]`."""
    call: _Call | None = kwargs.pop(_CALL, None)
    if call is None:
        raise ValueError(
            f"{type(module).__name__} with context_parallel was called outside of its model's "
            "forward, or shares its config with a context parallel model; call the whole model, "
            "and give each further model copy.deepcopy(config)"
        )
    on = (name for name, value in kwargs.items() if value is not None and value is not False)
    foreign = [name for name in on if name not in _PASSED_ON]
    reason = None
    if dropout:
        reason = (
            f"dropout={dropout} of attention weights with context_parallel: a rank does not know "
            "the dropout masks of the others; set attention_dropout or attn_pdrop of the model's "
            "config to 0.0"
        )
    elif foreign:
        reason = f"{foreign[0]} with context_parallel: {_REMEDIES.get(foreign[0], 'leave it out')}"
    if reason is not None:
        raise ValueError(reason)
    pattern, packed = call.pattern(sliding_window), call.documents is not None
    batch, _, own, head_dim = query.shape
    if packed:  # join all rows into one
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in (query, key, value))
    scale = 1 / math.sqrt(head_dim) if scaling is None else scaling
    o, _ = attend(query, key, value, pattern=pattern, scale=scale, context=call.context)
    o = o.transpose(1, 2)
    return o.unflatten(1, (batch, own))[0] if packed else o, None
