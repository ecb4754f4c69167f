"""Per-sample losses of transformers' models, from their logits and labels.

The models' own loss is a mean over the tokens of the whole batch, which couples the samples. Here
the loss of a sample is the mean over the sample's own valid labels. For a batch of one sample the
two losses are equal, which `other_loss` checks. `changed_in_company` checks that a sample's loss
is the same in a batch of one sample and in a batch of several.

Letters: B samples, T tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import losses
from ..grad_rules.embedding import Tables
from ..packing import PackedBatch
from ..verification.nested import tensors_of

_COUPLED = (
    "the loss of a made-up entry is {own:.6g} alone and {other:.6g} in a batch with others, so "
    "it depends on the other entries, or on how far it is padded: padding on the left may shift "
    "absolute positions or make the first token a target; other causes are a missing "
    "attention_mask, and a compute_loss_func that divides by a number of the batch. Pad on the "
    "right or to one length (padding='max_length', or dpflash.sampling.PadTo), pass the "
    "attention_mask, and compute each loss from its own sample"
)
_PACKED_COUPLED = (
    "the loss of a made-up document is {own:.6g} alone and {other:.6g} when packed with others, "
    "so the model does not keep them apart by position_ids. Load a model of attention layers "
    "with attn_implementation='sdpa', 'eager', 'flash_attention_2' or 'dpflash', or train "
    "with one document per row (dpflash.sampling.PadTo in place of PackTo)"
)

SampleLoss = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> [B]

_PASS_YOUR_OWN = (
    "pass compute_loss_func=f, where f(outputs, labels, num_items_in_batch) returns one loss for "
    "each sample, [B], computed from that sample alone; or override compute_loss of DPTrainer, "
    "which receives the whole batch and must return losses [B]"
)


def sample_loss(model: nn.Module) -> SampleLoss:
    """Return the per-sample loss function for a model's class; raise if none is known."""
    from transformers.models.auto import modeling_auto as auto

    base = plain_model(model)
    kinds: tuple[tuple[SampleLoss, tuple[str, ...]], ...] = (
        (
            lambda logits, labels: _classification(logits, labels, base.config),
            ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
        ),
        (
            losses.cross_entropy,
            ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "MASKED_LM", "TOKEN_CLASSIFICATION"),
        ),
        (losses.causal_lm, ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")),
    )
    for loss, tasks in kinds:
        for task in tasks:
            classes = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values()
            if any(type(base).__name__ in ((c,) if isinstance(c, str) else c) for c in classes):
                return loss
    raise ValueError(
        f"model={type(base).__name__}: its per-sample loss is not known; {_PASS_YOUR_OWN}"
    )


def plain_model(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT model; any other model is returned itself."""
    base: Any = getattr(model, "get_base_model", None)
    return model if base is None else base()


def losses_of(model: nn.Module, inputs: Mapping[str, Any], loss: SampleLoss) -> tuple[Tensor, Any]:
    """Return (losses `[B]`, outputs) of a model on inputs, which must contain labels."""
    if isinstance(inputs, PackedBatch):
        return packed_losses(model, inputs)
    require_labels(inputs)
    inputs = dict(inputs)
    labels = inputs.pop("labels")
    base = plain_model(model)
    if getattr(base.config, "is_encoder_decoder", False) and "decoder_input_ids" not in inputs:
        make = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        if make is not None:
            inputs["decoder_input_ids"] = make(labels=labels)
        elif base.can_generate():  # Whisper
            inputs["decoder_input_ids"] = _shifted_right(labels, base.config)
    outputs = model(**inputs)
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return loss(logits, _with_virtual_tokens(labels, logits, model)), outputs


def _shifted_right(labels: Tensor, config: Any) -> Tensor:
    """Return decoder inputs for labels `[B, T]`: the start token, then all but the last label."""
    first = torch.full_like(labels[:, :1], config.decoder_start_token_id)
    tokens = torch.cat([first, labels[:, :-1]], dim=1)
    return tokens.masked_fill(tokens == -100, config.pad_token_id)


def _with_virtual_tokens(labels: Tensor, logits: Tensor, model: nn.Module) -> Tensor:
    """Prepend a label -100 (no target) for each virtual token of PEFT's prompt tuning.

    The last virtual token predicts the first label, as in PEFT's own loss.
    """
    config: Any = getattr(model, "active_peft_config", None)
    if not getattr(config, "is_prompt_learning", False) or labels.ndim != 2 or logits.ndim != 3:
        return labels
    # With prefix tuning, virtual tokens have no logits, so this prepends nothing.
    return nn.functional.pad(labels, (logits.shape[1] - labels.shape[1], 0), value=-100)


def packed_losses(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Any]:
    """Return (losses `[max_documents]`, outputs) of a causal model on packed documents."""
    # With a cache, transformers' models ignore the document borders in position_ids.
    has_cache = hasattr(plain_model(model).config, "use_cache")
    outputs = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        **({"use_cache": False} if has_cache else {}),
    )
    found = losses.causal_lm(
        outputs["logits"] if isinstance(outputs, Mapping) else outputs[0],
        batch.labels,
        sample_index=batch.sample_index,
        num_samples=batch.max_documents,
    )
    return found, outputs


def of_documents(found: Tensor, batch: Any) -> Tensor:
    """Return the losses of documents that have tokens; all losses if the batch is not packed."""
    if not isinstance(batch, PackedBatch):
        return found
    return found[[start != end for start, end in batch.units.spans]]


def require_labels(inputs: Mapping[str, Any]) -> None:
    """Raise ValueError if the inputs have no labels."""
    if inputs.get("labels") is None:
        raise ValueError(
            f"the entries of train_dataset have no 'labels', only {', '.join(map(repr, inputs))}: "
            "add them, or pass data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            f", or {_PASS_YOUR_OWN}"
        )


def are_equal(one: Any, two: Any) -> bool:
    """Whether two batches of the same entries are equal, that is, collating them is not random."""
    pairs = zip(tensors_of(one), tensors_of(two), strict=True)
    return all(x.shape == y.shape and torch.equal(x, y) for (_, x), (_, y) in pairs)


def changed_in_company(
    losses_of_batch: Callable[[Mapping[str, Any]], Tensor],
    alone: Sequence[Mapping[str, Any]],
    together: Mapping[str, Any],
    again: Mapping[str, Any],
    *,
    rounding: float,
) -> str | None:
    """Return an error message if a sample's loss changes in a batch with others, else None.

    Each batch in `alone` has one sample. The batch `together` begins with these samples, in the
    same order. `again` repeats `together`: if its losses differ, losses are random, and None is
    returned. `rounding` is the relative and absolute tolerance.
    """
    in_company = losses_of_batch(together).float()
    repeated = losses_of_batch(again).float()
    if not torch.allclose(in_company, repeated, rtol=rounding, atol=rounding, equal_nan=True):
        return None
    for batch, other in zip(alone, in_company, strict=False):
        own = losses_of_batch(batch).float().reshape(())
        if not torch.allclose(own, other, rtol=rounding, atol=rounding) and own.isfinite():
            text = _PACKED_COUPLED if isinstance(together, PackedBatch) else _COUPLED
            return text.format(own=float(own), other=float(other))
    return None


def other_loss(model: nn.Module, inputs: Mapping[str, Any], loss: SampleLoss) -> str | None:
    """Return an error message if the model's own loss of one sample differs from `loss`.

    Return None if the losses agree, or if one of the two losses is not finite.
    """
    ours = of_documents(losses_of(model, inputs, loss)[0], inputs)
    given = inputs
    if isinstance(inputs, PackedBatch):
        given = {name: inputs[name] for name in ("input_ids", "position_ids", "labels")}
    outputs = model(**given)
    own = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    if own is None or not bool(own.isfinite().all() and ours.isfinite().all()):
        return None
    tolerance = rounding_of(model)
    if torch.allclose(ours.float(), own.float().reshape(1), rtol=tolerance, atol=tolerance):
        return None
    return (
        f"model={type(plain_model(model)).__name__}: for one sample its own loss is "
        f"{float(own):.6g}, and the mean over that sample's labels is {float(ours):.6g}, so the "
        "model's loss has further terms (such as a router's) or other targets; turn these off in "
        f"the model's config, or {_PASS_YOUR_OWN}"
    )


def rounding_of(model: nn.Module) -> float:
    """Return the tolerance for two losses that should be equal up to rounding."""
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return 3e-2 if narrow else 1e-3


@contextmanager
def tried(model: nn.Module) -> Iterator[None]:
    """Context in which the model runs in eval mode, without autograd, and takes any token id.

    On exit the modules' attributes, submodules and training flags are restored, because BigBird,
    for example, replaces its attention layers permanently at the first short batch.
    """
    before = [
        (held, dict(held))
        for module in model.modules()
        for held in (vars(module), module._modules, module._parameters, module._buffers)
    ]
    model.eval()
    try:
        with torch.no_grad(), Tables():
            yield
    finally:
        for held, contents in before:
            held.clear()
            held.update(contents)


def _classification(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return losses `[B]` of logits `[B, V]`, by config.problem_type or else the labels' dtype."""
    problem = config.problem_type
    if problem is None:
        if config.num_labels == 1:
            problem = "regression"
        else:
            is_class = not labels.is_floating_point()
            problem = "single_label_classification" if is_class else "multi_label_classification"
    if problem == "single_label_classification":
        return losses.cross_entropy(logits, labels.long().view(-1))
    targets = labels.to(logits.dtype).view_as(logits)
    if problem == "regression":
        return losses.mse(logits, targets)
    return losses.binary_cross_entropy_with_logits(logits, targets)
