"""Per-sample losses of transformers' models, from their logits and labels.

The models' own loss is a mean over the tokens of the whole batch, which couples its samples. Here
each sample's loss is the mean over its own valid labels, so for a batch of one sample both are
equal, and `require_same_loss` compares them there. `require_equal_in_company` compares batches of
one sample with a batch of several.

Letters: B samples, T tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import losses
from ..grad_rules.embedding import Tables
from ..packing import PackedBatch, PackTo
from ..refusal import PrivateRefusal
from ..sampling.entries import Collated, FittingCollate, ReadableEntries
from ..sampling.packed import PackedCollate
from ..verification.nested import tensors_of

_COUPLED = (
    "the loss of an entry of train_dataset changes in a batch with others, so it depends on them, "
    "or on how far it is padded: padding on the left, which shifts absolute positions and has the "
    "first token predicted; no attention_mask; or a compute_loss_func that divides by a number of "
    "the batch. Pad on the right, or all entries to one length (padding='max_length', or "
    "dpflash.sampling.PadTo), pass the attention_mask, and compute each loss of its own sample"
)
PACKED_COUPLED = (
    "the loss of a document changes as others are packed with it, so the model does not keep them "
    "apart by position_ids. Load a model of attention layers with attn_implementation='sdpa', "
    "'eager', 'flash_attention_2' or 'dpflash', or train with one document a row "
    "(dpflash.sampling.PadTo in place of PackTo)"
)

SampleLoss = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> [B]

# Entries of which the shortest, the longest and a few others are tried.
_MEASURED, _TRIED = 32, 4
_PASS_YOUR_OWN = (
    "pass compute_loss_func=f, where f(outputs, labels, num_items_in_batch) returns one loss for "
    "each sample, [B], made of that sample alone"
)


def sample_loss(model: nn.Module) -> SampleLoss:
    """The per-sample loss of a model with a head for a known task, by the name of its class."""
    from transformers.models.auto import modeling_auto as auto

    base = plain_model(model)
    kinds: tuple[tuple[SampleLoss, tuple[str, ...]], ...] = (
        (
            lambda logits, labels: _classification(logits, labels, base.config),
            ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION"),
        ),
        (
            losses.cross_entropy,
            ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "TOKEN_CLASSIFICATION"),
        ),
        (losses.causal_lm, ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT")),
    )
    for loss, tasks in kinds:
        for task in tasks:
            classes = getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values()
            if any(type(base).__name__ in ((c,) if isinstance(c, str) else c) for c in classes):
                return loss
    raise ValueError(
        f"model={type(base).__name__}: its loss is not known for single samples; {_PASS_YOUR_OWN}"
    )


def plain_model(model: nn.Module) -> Any:
    """The model of transformers inside of a model with PEFT's adapters."""
    base: Any = getattr(model, "get_base_model", None)
    return model if base is None else base()


def losses_of(model: nn.Module, inputs: Mapping[str, Any], loss: SampleLoss) -> tuple[Tensor, Any]:
    """(losses `[B]`, outputs) of a model on inputs, which must have labels."""
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
    outputs = model(**inputs)
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
    return loss(logits, labels), outputs


def packed_losses(model: nn.Module, batch: PackedBatch) -> tuple[Tensor, Any]:
    """(losses `[max_documents]`, outputs) of a causal language model on packed documents."""
    # With a cache, transformers' models do not look for documents in position_ids.
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
    """The losses of a packed batch's documents that have tokens; all losses of another batch."""
    if not isinstance(batch, PackedBatch):
        return found
    return found[[start != end for start, end in batch.units.spans]]


def require_labels(inputs: Mapping[str, Any]) -> None:
    """Refuse inputs without labels, naming what there is."""
    if inputs.get("labels") is None:
        raise ValueError(
            f"the entries of train_dataset have no 'labels', only {', '.join(map(repr, inputs))}: "
            "add them, or pass data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            f", or {_PASS_YOUR_OWN}"
        )


def batches_to_try(loader: DataLoader) -> list[Any]:
    """Batches of one entry each, and twice the batch of all of them.

    The shortest and the longest of the first entries are among them, where they fit together.
    Entries that cannot be part of a batch are not, nor are those without tokens; the list is empty
    where no other ones are left.
    """
    dataset = ReadableEntries(loader.dataset)
    first = range(min(_MEASURED, len(dataset)))
    pack = loader.collate_fn if isinstance(loader.collate_fn, PackTo) else None
    if pack is None:
        numbers = {
            i: [x.numel() for _, x in tensors_of(batch)]
            for i, (batch, bad) in enumerate(_collated(loader, [[i] for i in first]))
            if not bad
        }
        # A field may be empty in all entries.
        full = {i for i, own in numbers.items() if all(own)} or numbers.keys()
        sizes = {i: sum(numbers[i]) for i in full}
    else:
        sizes = {i: pack.length_of(dataset[i]) for i in first}
    by_size = sorted(sizes, key=sizes.__getitem__)
    if pack is not None:
        # A document without a token, or with one, has the loss 0 everywhere.
        by_size = [i for i in by_size if sizes[i] > 1] or by_size[-1:]
    chosen = [*by_size[:1], *by_size[1:][-1:], *by_size[1:-1][: _TRIED - 2]]
    if pack is not None:
        together = max(pack.microbatches([sizes[i] for i in chosen]), key=len)
        chosen = [chosen[number] for number in together]
    wanted = [*([i] for i in chosen), chosen, chosen] if chosen else []
    return [batch for batch, _ in _collated(loader, wanted)]


def _collated(loader: DataLoader, batches: list[list[int]]) -> list[Collated]:
    """Batches of these entries, made as the loader makes them."""
    dataset, collate = ReadableEntries(loader.dataset), loader.collate_fn
    fitting: Any = FittingCollate(collate, dataset)
    made: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=batches,
        collate_fn=PackedCollate(collate) if isinstance(collate, PackTo) else fitting,
        # In the main process, files that the dataset opens lazily would be open before a fork.
        num_workers=min(1, loader.num_workers),
    )
    return list(made)


def are_equal(one: Any, two: Any) -> bool:
    """Whether two batches of the same entries have equal tensors."""
    pairs = zip(tensors_of(one), tensors_of(two), strict=True)
    return all(x.shape == y.shape and torch.equal(x, y) for (_, x), (_, y) in pairs)


def require_equal_in_company(
    losses_of_batch: Callable[[Mapping[str, Any]], Tensor],
    alone: Sequence[Mapping[str, Any]],
    together: Mapping[str, Any],
    again: Mapping[str, Any],
    *,
    rounding: float,
    refusal: str | None = None,
) -> None:
    """Refuse losses that differ between a sample's own batch and one batch of all samples.

    `alone` are batches of one sample, `together` is one of the same in this order, so the shorter
    ones are padded. Where `again`, the same once more, has other losses, these are random, and
    nothing is compared. `rounding` is relative and absolute.
    """
    in_company = losses_of_batch(together).float()
    repeated = losses_of_batch(again).float()
    if not torch.allclose(in_company, repeated, rtol=rounding, atol=rounding, equal_nan=True):
        return
    for batch, other in zip(alone, in_company, strict=True):
        own = losses_of_batch(batch).float().reshape(())
        if not torch.allclose(own, other, rtol=rounding, atol=rounding) and own.isfinite():
            raise PrivateRefusal(refusal or _COUPLED) from None


def require_same_loss(model: nn.Module, inputs: Mapping[str, Any], loss: SampleLoss) -> bool:
    """Refuse a model whose own loss of one sample, with labels, is not the per-sample loss.

    Returns whether they could be compared: both are finite.
    """
    require_labels(inputs)
    ours = losses_of(model, inputs, loss)[0]
    if not bool(ours.isfinite().all()):  # The model's own would raise for a label out of range.
        return False
    given = inputs
    if isinstance(inputs, PackedBatch):
        given = {name: inputs[name] for name in ("input_ids", "position_ids", "labels")}
    outputs = model(**given)
    own = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
    if own is None or not bool(own.isfinite().all()):
        return False
    tolerance = rounding_of(model)
    ours = of_documents(ours, inputs)
    if not torch.allclose(ours.float(), own.float().reshape(1), rtol=tolerance, atol=tolerance):
        raise PrivateRefusal(
            f"model={type(plain_model(model)).__name__}: for one sample its own loss is not the "
            "mean over that sample's labels, so it has further terms (such as a router's) or "
            f"other targets; turn these off in the model's config, or {_PASS_YOUR_OWN}"
        ) from None
    return True


def rounding_of(model: nn.Module) -> float:
    """The difference of two losses that are equal but for rounding."""
    narrow = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters())
    return 3e-2 if narrow else 1e-3


@contextmanager
def tried(model: nn.Module) -> Iterator[None]:
    """In the block the model is in eval mode, makes no graph and takes any token."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), Tables():
            yield
    finally:
        for module, mode in modes.items():
            module.train(mode)  # parents come first


def _classification(logits: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Logits `[B, V]` of samples; the config names the kind of labels, or their dtype does."""
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
