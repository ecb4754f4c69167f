"""Registers dpflash's attention with transformers, as ``attn_implementation="dpflash"``.

Usage::

    from dpflash.integrations import transformers as dpflash_transformers
    dpflash_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="dpflash")

`DPTrainer` is defined in `trainer`, a module that is imported when DPTrainer is first used.

Letters: B samples, H query heads, T query tokens, S key tokens, D head dim.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ..attn.functional import attention
from ..patterns import Documents, Pattern, SlidingWindow
from ..refusal import PrivateRefusal

if TYPE_CHECKING:
    from .trainer import DPTrainer

__all__ = ["DPTrainer", "NAME", "NEUTRAL_NAME", "register"]

NAME = "dpflash"

# A second name, for models that treat any name with "flash" as FlashAttention (GPT-OSS, GPT-J).
NEUTRAL_NAME = "dp_attention"

_ELSEWHERE = 'use attn_implementation="sdpa" or "eager" for this'
_UNCACHED = f"pass the whole sequence with use_cache=False, or {_ELSEWHERE}"

_functorch = torch._C._functorch

# Keywords that models pass to attention functions and that need no action.
_IGNORED = frozenset(
    {
        "cache_position",
        "deterministic",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "return_dict",
        "use_cache",
    }
)
# Fields of configs that set dropout of attention weights and no other dropout.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_REMEDIES = {
    "head_mask": "prune the heads from the weights instead",
    "output_attentions": "leave it out, since attention weights are never stored in memory",
}

# The mask functions of transformers.masking_utils for which `_attention` has a pattern.
_CAUSAL = "causal_mask_function"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
_REMAPPED = "remap_positions_for_packed_sequence.<locals>.inner_mask"
_FOLLOWED = {
    _CAUSAL,
    _PACKED,
    "bidirectional_mask_function",
    "sliding_window_overlay.<locals>.inner_mask",
    "sliding_window_bidirectional_overlay.<locals>.inner_mask",
}


def __getattr__(name: str) -> Any:
    if name != "DPTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .trainer import DPTrainer

    return DPTrainer


def register() -> str:
    """Register ``attn_implementation="dpflash"`` with transformers. A second call does nothing.

    A model with this implementation trains and generates as with ``"sdpa"``, in memory O(T) for T
    tokens. It supports:

    - causal and bidirectional attention, sliding windows, and padding on the left or right
    - grouped heads, values with another head dim (DeepSeek), sinks (GPT-OSS), softcap (Gemma 2)
    - a bias on the scores (T5)
    - packed documents: `position_ids` that restart, or a row with `cu_seq_lens_q`, `cu_seq_lens_k`
    - decoding any number of tokens at a time from a growing or preallocated cache

    Not supported:

    - compiled models with packed documents, or with several new tokens on a filled or
      preallocated cache (other compiled models work)
    - attention dropout, head_mask, output_attentions, masks of more than two dimensions or with
      holes: the model raises an error when it runs

    At padded positions, the hidden states differ from ``"sdpa"``. They are finite, and no other
    token attends to these positions.

    Models whose code does not use transformers' attention interface (Falcon, BigBird, Longformer,
    DeBERTa, ...) raise ValueError when they are built with this name: train them with their own
    attention, ``attn_implementation="eager"``.

    After registration, transformers does not mistake "dpflash" for a FlashAttention package. Other
    code may mistake any name that contains "flash" for such a package. So the same attention is
    also registered as "dp_attention". For the experts of a mixture-of-experts model,
    ``experts_implementation="dpflash"`` is registered too.

    Returns:
        The name, "dpflash".

    Raises:
        ImportError: transformers is missing or older than 5.15.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "dpflash.integrations.transformers needs transformers>=5.15: install it"
        ) from error
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("dpflash.integrations.transformers needs transformers>=5.15: upgrade it")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for name in (NAME, NEUTRAL_NAME):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)
    _is_not_flash_attention()
    _refuse_models_with_their_own_attention()
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    return NAME


def _experts(
    module: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of a model that is not private, by transformers' own functions.

    `make_private` replaces the experts' computation for any `experts_implementation`.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # Grouped products do not support float64.
    wide = next(module.parameters()).dtype == torch.float64
    own = ALL_EXPERTS_FUNCTIONS["batched_mm" if wide else "grouped_mm"]
    result: Tensor = own(module, hidden_states, top_k_index, top_k_weights)
    return result


def _is_not_flash_attention() -> None:
    """Patch transformers so that it does not treat "dpflash" as a FlashAttention package."""
    from transformers.utils import generic

    asked = generic.is_flash_attention_requested
    if getattr(asked, "_dpflash", False):
        return

    @functools.wraps(asked)
    def is_requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: Any = None,
    ) -> bool:
        name = requested_attention_implementation
        if config is not None and name is None:
            name = config._attn_implementation
        if name == NAME:
            return False
        return asked(config, requested_attention_implementation, version)

    is_requested._dpflash = True  # type: ignore[attr-defined]
    generic.is_flash_attention_requested = is_requested
    # Replace the function in modules that imported it earlier. Copy sys.modules, since a finalizer
    # may import a module during the loop, and `list(sys.modules.items())` would raise then.
    for name, module in sys.modules.copy().items():
        if name.startswith("transformers.") and "is_flash_attention_requested" in vars(module):
            module.is_flash_attention_requested = is_requested  # type: ignore[attr-defined]


def _refuse_models_with_their_own_attention() -> None:
    """Patch transformers to raise for models that would run their own attention instead."""
    from transformers import PreTrainedModel

    check = PreTrainedModel._check_and_adjust_attn_implementation
    if getattr(check, "_dpflash", False):
        return

    @functools.wraps(check)
    def check_ours(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation in (NAME, NEUTRAL_NAME) and _has_its_own_attention(type(self)):
            raise ValueError(
                f'attn_implementation="{attn_implementation}" with {type(self).__name__}: its '
                "code never asks transformers' attention interface, but has its own attention; "
                'pass attn_implementation="eager"'
            )
        return check(self, attn_implementation, *args, **kwargs)

    check_ours._dpflash = True  # type: ignore[attr-defined]
    PreTrainedModel._check_and_adjust_attn_implementation = check_ours  # type: ignore[method-assign]


def _has_its_own_attention(model: type) -> bool:
    """Whether the model's source files define attention without transformers' interface."""
    modules = [vars(sys.modules[base.__module__]) for base in model.__mro__[:-1]]
    # Every model inherits from PreTrainedModel, whose module defines the interface.
    own = [names for names in modules if names["__name__"] != "transformers.modeling_utils"]
    if any("ALL_ATTENTION_FUNCTIONS" in names for names in own):
        return False
    return any(
        "Attention" in name and isinstance(value, type) and issubclass(value, torch.nn.Module)
        for names in own
        for name, value in names.items()
        if names["__name__"].rpartition(".")[2].startswith("modeling_")
    )


def _refuse(cause: str, why: str, remedy: str) -> NoReturn:
    raise ValueError(f'{cause} with attn_implementation="{NAME}": {why}; {remedy}')


def _refuse_data(cause: str, why: str, remedy: str, **found: Any) -> NoReturn:
    raise PrivateRefusal(
        f'{cause} with attn_implementation="{NAME}": {why}; {remedy}', **found
    ) from None


def _mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """Return the `attention_mask` argument of `_attention`: padding, borders, or None (no mask).

    Padding is a bool tensor `[B, S]`, True where a key is attended to. It has fewer than S columns
    if the last keys of a preallocated cache are not filled yet. For one query it is
    `[B, 1, 1, S]`. Borders `[n + 1]`, int32, are the token indices at which n packed documents
    begin and end.
    """
    if q_length == 1:
        from transformers.masking_utils import sdpa_mask

        # A mask of 4 dimensions, which models leave as it is if `generate` made it earlier.
        seen: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=1,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return seen

    compiling = torch.compiler.is_compiling()
    if compiling:  # windows and documents cannot be distinguished
        name = mask_function.__code__.co_name
        names = {_PACKED} if name == "and_mask" else {name}
    else:
        names = set(_names(mask_function))
    if compiling and local_size is not None:
        # When compiling, the function cannot be inspected, so recognize chunks by their size.
        if local_size == getattr(config, "attention_chunk_size", None):
            names.add("chunked_overlay")
    if use_vmap or not names <= _FOLLOWED:
        unknown = sorted(names - _FOLLOWED) or ["an overlay of the model's own"]
        _refuse(f"mask_function={unknown[0]}", "no pattern corresponds to this mask", _ELSEWHERE)
    known = kv_length
    if _CAUSAL in names and q_length != kv_length:
        if compiling or _PACKED in names:
            _refuse_data(
                "past_key_values with several new tokens",
                "when compiling or with packed documents, expected one new token or an empty "
                "cache that grows",
                _UNCACHED,
            )
        # Number of keys filled so far; the last of them are of the queries' own tokens.
        known = int(q_offset) + q_length - int(kv_offset)
    if attention_mask is not None:
        attention_mask = attention_mask[:, int(kv_offset) :][:, :known]
        return _padding(attention_mask, batch_size, known, kv_length)
    if known < kv_length:
        return torch.ones(batch_size, known, dtype=torch.bool, device=device)
    # With a window of one token, no token attends to another, so borders do not matter.
    if _PACKED in names and q_length == kv_length and local_size not in (0, 1):
        return _packed_borders(mask_function, batch_size, q_length, device)
    return None


def _names(mask_function: Callable[..., Any]) -> Iterator[str]:
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    if name == "and_masks.<locals>.and_mask":
        for part in _closure(mask_function)["mask_functions"]:
            yield from _names(part)
    elif name == _REMAPPED:
        yield from _names(_closure(mask_function)["mask_function"])
    else:
        yield name


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _padding(mask: Tensor, batch_size: int, known: int, keys: int) -> Tensor | None:
    """Return the padding of the first `known` keys; None if all `keys` are attended to."""
    if tuple(mask.shape) != (batch_size, known):
        _refuse_data(
            "attention_mask of another shape",
            "expected [B, S], nonzero where a key is attended to",
            f"pass the tokenizer's mask, or {_ELSEWHERE}",
            shape=tuple(mask.shape),
            expected=(batch_size, known),
        )
    mask = mask.bool()
    if known == keys and not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def _packed_borders(
    mask_function: Callable[..., Any], batch_size: int, tokens: int, device: torch.device | str
) -> Tensor | None:
    """Return the borders of packed documents; None if each row is one document."""
    batch = torch.arange(batch_size, device=device)[:, None]
    token = torch.arange(1, tokens, device=device)[None, :]
    # A token that does not attend to the previous token starts a document.
    starts = ~mask_function(batch, torch.zeros_like(batch), token, token - 1)
    if torch.compiler.is_compiling():
        torch._assert_async(~starts.any(), "packed position_ids: expected not while compiling")
        return None
    return _borders(starts) if starts.any() else None


def _borders(starts: Tensor) -> Tensor:
    """Return borders `[n + 1]`, int32, of the n documents in the flattened rows.

    starts: ``[B, T - 1]``, whether a document starts at token 1, 2, ...; token 0 always does.
    """
    rows = torch.nn.functional.pad(starts, (1, 0), value=True)
    return torch.nn.functional.pad(rows.flatten(), (0, 1), value=True).nonzero()[:, 0].int()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls. Return (o `[B, T, H, D]`, None)."""
    _refuse_unsupported(module, dropout, kwargs)
    padding = borders = None
    if attention_mask is not None and attention_mask.ndim == 1:
        borders = attention_mask
    elif attention_mask is not None:
        padding = _require_padding(attention_mask, query, key)
        known = padding.shape[1]
        key, value = key[:, :, :known], value[:, :, :known]
        position_bias = None if position_bias is None else position_bias[..., :known]
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)

    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        borders = _given_borders(cu_seq_lens_q, cu_seq_lens_k, borders, padding, query, key)
    elif position_ids is not None and (borders is None or query.shape[0] == 1):
        shown = _borders_of_positions(position_ids, padding, causal, query, key)
        borders = borders if shown is None else shown
    if kwargs.get("seq_idx") is not None and borders is None:
        _refuse("seq_idx", "expected cu_seq_lens_q and cu_seq_lens_k with it", "pass them too")

    shape = query.shape[0], query.shape[2]
    if borders is not None and query.shape[0] > 1:
        rows = query, key, value
        query, key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in rows)  # [1, H, B T, D]
        if position_bias is not None:
            cause = "position_bias with documents packed into several rows"
            _refuse_data(cause, "expected one row", _ELSEWHERE)
    pattern = _pattern(query.shape[2], key.shape[2], causal, sliding_window, borders, padding)
    o = attention(
        query,
        key,
        value,
        pattern=pattern,
        causal=pattern is None and causal and query.shape[2] > 1,
        softmax_scale=scaling,
        softcap=softcap,
        key_padding_mask=None if padding is None else ~padding,
        sinks=s_aux,
        position_bias=position_bias,
    )
    return o.transpose(1, 2).reshape(*shape, *o.shape[1::2]), None


def _refuse_unsupported(module: torch.nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        _refuse(
            f"dropout={dropout}",
            "expected 0.0 on attention weights",
            f"set {_dropout_names(module, dropout)} of the model's config to 0.0",
        )
    for name, value in kwargs.items():
        if value is None or name in _IGNORED or name == "seq_idx":
            continue
        if name == "output_attentions" and not value:
            continue
        _refuse(
            f"{name}={value!r}" if isinstance(value, (bool, str)) else name,
            "expected None, as it would change the result",
            f"{_REMEDIES[name]}, or {_ELSEWHERE}" if name in _REMEDIES else _ELSEWHERE,
        )
    if getattr(getattr(module, "config", None), "output_attentions", False):
        _refuse("output_attentions=True", "no weights are stored", _REMEDIES["output_attentions"])


def _dropout_names(module: torch.nn.Module, dropout: float) -> str:
    """Return the config's fields for dropout of attention weights, such as T5's dropout_rate."""
    config = getattr(module, "config", None)
    fields = {} if config is None else config.to_dict()
    of_attention = [name for name in _DROPOUTS if fields.get(name)]
    same = [name for name, value in fields.items() if "drop" in name and value == dropout]
    return ", ".join(of_attention or same or _DROPOUTS)


def _require_padding(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the padding as `[B, S]`; raise if the mask is not padding."""
    if query.shape[2] == 1 and mask.ndim == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    fits = mask.ndim == 2 and mask.shape[0] == key.shape[0] and mask.shape[1] <= key.shape[2]
    if mask.dtype != torch.bool or not fits:
        _refuse_data(
            f"attention_mask of another shape, or of dtype {mask.dtype}",
            "expected None or padding [B, S] of booleans",
            f"pass the tokenizer's 2-D mask to the model, or {_ELSEWHERE}",
            shape=tuple(mask.shape),
            expected=(key.shape[0], key.shape[2]),
        )
    return mask


def _given_borders(
    cu_seq_lens_q: Tensor | None,
    cu_seq_lens_k: Tensor | None,
    borders: Tensor | None,
    padding: Tensor | None,
    query: Tensor,
    key: Tensor,
) -> Tensor:
    """Check `cu_seq_lens_q` against the other arguments, and return it."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        name = "cu_seq_lens_k" if cu_seq_lens_k is None else "cu_seq_lens_q"
        _refuse(f"{name}=None", "expected both cu_seq_lens_q and cu_seq_lens_k", "pass both")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        _refuse_data(
            "cu_seq_lens_q with several rows or a cache",
            "expected one row and as many queries as keys",
            "flatten the batch into one row and use no cache",
        )
    if padding is not None:
        cause = "cu_seq_lens_q beside attention_mask"
        _refuse_data(cause, "expected only one of the two", "drop one of them")
    others = [cu_seq_lens_k] if borders is None else [cu_seq_lens_k, borders]
    for other in others:
        if cu_seq_lens_q.tolist() != other.tolist():
            _refuse_data(
                "cu_seq_lens_q",
                "cu_seq_lens_k or position_ids give other documents",
                "pass the same documents in all these arguments",
                borders=[cu_seq_lens_q.tolist(), other.tolist()],
            )
    return cu_seq_lens_q


def _borders_of_positions(
    position_ids: Tensor, padding: Tensor | None, causal: bool, query: Tensor, key: Tensor
) -> Tensor | None:
    """Return borders where position_ids restart; None if each row is one document."""
    batch_size, tokens = query.shape[0], query.shape[2]
    # Under vmap, unwrap the positions of all samples, so that Python can read their values.
    while _functorch.is_batchedtensor(position_ids):
        dim = _functorch.maybe_get_bdim(position_ids)
        position_ids = _functorch.get_unwrapped(position_ids).movedim(dim, 0).flatten(0, 1)
        batch_size = len(position_ids)
    if position_ids.ndim != 2 or not 1 < tokens == key.shape[2] == position_ids.shape[1]:
        return None
    if batch_size > 1 and not causal:
        return None
    starts = position_ids.diff(dim=1) != 1
    compiling = torch.compiler.is_compiling()
    if padding is not None:
        # Restarts are no borders if keys are padded. When compiling, check that keys are padded.
        if compiling and batch_size == 1:
            fine = ~starts.any() | ~padding.all()
            torch._assert_async(fine, "packed position_ids: not while compiling")
        return None
    if compiling or (batch_size > 1 and position_ids.is_cuda):
        torch._assert_async(
            ~starts.any(), "packed position_ids: expected one row, and not while compiling"
        )
        return None
    if not starts.any():
        return None
    restarts = position_ids == position_ids.min()
    if not (causal and restarts[:, 0].all() and torch.equal(starts, restarts[:, 1:])):
        _refuse_data(
            "position_ids",
            "expected consecutive positions in each row, or, in a causal model, packed documents "
            "whose positions all start at the same number",
            "pass cu_seq_lens_q and cu_seq_lens_k for packed documents",
            position_ids=position_ids[0].tolist(),
        )
    return _borders(starts)


def _pattern(
    queries: int,
    keys: int,
    causal: bool,
    sliding_window: int | None,
    borders: Tensor | None,
    padding: Tensor | None,
) -> Pattern | None:
    """Return the attention pattern of these arguments; None for dense attention or one query."""
    if borders is not None:
        documents = Documents(cu_seqlens=borders.tolist(), causal=causal)
        if sliding_window is not None and int(borders.diff().max()) > sliding_window:
            return documents & _sliding_window(sliding_window, causal)
        return documents
    if queries == 1:
        # With a single query the mask includes the window, see `_mask`.
        if sliding_window is not None and sliding_window < keys and padding is None:
            _refuse_data(
                f"sliding_window={sliding_window} with 1 query, more keys and no mask",
                "expected a mask of the keys in the window",
                _UNCACHED,
            )
        return None
    if queries > keys and causal or queries != keys and not causal and sliding_window is not None:
        cause = "is_causal=True" if causal else f"sliding_window={sliding_window}"
        _refuse_data(
            f"{cause} with different numbers of queries and keys",
            "expected as many queries as keys, or in a causal model at most as many as keys",
            _UNCACHED,
        )
    if sliding_window is not None and sliding_window < keys:
        return _sliding_window(sliding_window, causal)
    return None


# Patterns are built by Python code that torch.compile must not trace.
@torch.compiler.assume_constant_result
def _sliding_window(tokens: int, causal: bool) -> Pattern:
    """Return a window: a token, `tokens` - 1 before it and, if not causal, as many after it."""
    return SlidingWindow(window=tokens - 1, causal=causal)
