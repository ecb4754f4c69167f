"""Comparison: finds differences between two runs, for samples with equal contents in both runs.

On a deterministic device all results must be equal bit for bit. On other devices rows may differ
by sqrt(eps) of their norm, and losses by eps^(2/3) (eps: machine epsilon). Rounding causes smaller
differences, and a dependence on other samples usually larger differences. `PlaceTrial` compares
gradients of samples that moved to other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..refusal import MORE_CAUSES, UNTESTED
from ..verification.digests import differing, is_deterministic, tolerance
from .backward_rows import BackwardRows
from .forward_rows import OUTPUT, ForwardRows

_WHICH = "which layers"
_CHANGED = (
    "{where} changed for a sample as other samples of the batch were replaced, so nothing was "
    "released. Compute it per sample; engine.check helps to find the operation. Before it\n"
    "  - an operation mixes samples (statistics or a scale of the batch, routing with a capacity, "
    "rows in another order, mixup)\n"
    "  - or the loop writes weights or an attribute of the model in each iteration (write them "
    "after optimizer.step(), if loader.is_last)\n"
    "  - or it draws random numbers whose count depends on the contents (draw for the whole "
    "shape, then mask) or from a generator of its own\n"
    f"{MORE_CAUSES}"
)
_LAYERS = (
    "{where} changed as other samples of the batch were replaced, so nothing was released. Run "
    "the same layers on all rows of each batch. Change a loop that ends when all samples have "
    "halted into one that takes a fixed number of steps (halted samples with weight 0), and a "
    "branch on the batch into torch.where. nn.AdaptiveLogSoftmaxWithLoss leaves out clusters "
    "without targets: use nn.Linear or dpflash.nn.LinearCrossEntropy"
)
_LENGTH = (
    "{where} changed as other samples of the batch were replaced, so nothing was released: the "
    "loop or the model cuts or pads the batch to its longest sample (a tokenizer with "
    "padding=True, pad_packed_sequence without total_length=), whose length then affects how the "
    "other samples are computed. Pad to one public length: dpflash.sampling.PadTo(512) as the "
    "collate_fn, or tokenizer(..., padding='max_length', max_length=512, truncation=True)"
)
_CHANGED_DOCUMENT = (
    "{where} changed for a document as other documents of the batch were replaced, so nothing "
    "was released: an operation before it mixes documents. Attention must see one document: "
    "models of Hugging Face need position_ids=batch.position_ids, use_cache=False and no "
    "attention_mask; LongContextLM needs packed=batch; attention of your own needs a mask that is "
    "True where batch.sample_index of query and key are equal"
)
_COMPARED = (
    "the model's output of shape [B, B] changed for a sample as other samples of the batch were "
    "replaced, so nothing was released: it compares the samples of a batch, most likely for a "
    "contrastive loss. Such a loss has no per-sample gradients, since each sample is in the "
    "losses of all others. Train with a loss of each sample by itself, such as classification, or "
    "with negatives from the sample's own entry. If B is the number of outputs of a sample, an "
    "earlier operation mixes samples, such as a mean over the batch; engine.check names it"
)
_COUNTS = (
    "the gradient reached layer '{layer}' a different number of times, or not at all, in one of "
    "two backwards of the same batch, so nothing was released. Losses must come from the last "
    "forward and, if loss_reduction is declared, from the outputs of the model. "
    f"{UNTESTED}"
)
_KEPT = (
    "{where} depends on data that an earlier forward has kept in {attributes}, so nothing was "
    "released: samples of one batch would affect the gradients of the next batch. Keep no data of "
    "a batch in the model, or reset it before each call"
)


def mixed(first: ForwardRows, second: ForwardRows, unchanged: Tensor) -> str | None:
    """Return a message about the first difference of two forwards for the samples `unchanged`."""
    found = _first_difference(first, second, unchanged)
    if found is None:
        return None
    where, one, two = found
    if where == OUTPUT and one[1:2] == one[:1]:
        return _COMPARED
    is_packed = first.units is not None and not first.units.are_rows
    if not is_packed and (where.startswith(_WHICH) or one[:1] != two[:1]):
        return _LAYERS.format(where=where)
    if not is_packed and one != two and one[:1] == two[:1]:
        return _LENGTH.format(where=where)
    return (_CHANGED_DOCUMENT if is_packed else _CHANGED).format(where=where)


def reached(first: ForwardRows, second: ForwardRows, replaced: Tensor) -> bool:
    """Return whether the input of some layer differs for the samples `replaced` `[B]`.

    If not, the model reads its samples from an object in which no sample can be replaced.
    """
    tolerated = tolerance(first.dtypes)
    return any(
        bool((differing(a, b, tolerated).cpu() & replaced).any())
        for a, b in zip(first.summaries, second.summaries, strict=False)
        if len(a) == len(b) == len(replaced)
    )


def kept(first: ForwardRows, second: ForwardRows, size: int, attributes: list[str]) -> str | None:
    """Return a message if changed attributes of the model changed its results, or None.

    Args:
        first, second: two forwards of one batch.
        size: B.
        attributes: names of the attributes that differed.
    """
    found = _first_difference(first, second, torch.ones(size, dtype=torch.bool))
    named = ", ".join(f"'{name}'" for name in attributes[:3]) + ", ..." * (len(attributes) > 3)
    return None if found is None else _KEPT.format(where=found[0], attributes=named)


def _first_difference(
    first: ForwardRows, second: ForwardRows, unchanged: Tensor
) -> tuple[str, torch.Size, torch.Size] | None:
    """Return (name of the first tensor that differs, its shapes in both forwards), or None."""
    tolerated = tolerance(first.dtypes)
    for i in range(max(len(first.where), len(second.where))):
        if first.where[i : i + 1] != second.where[i : i + 1]:
            where = (first.where[i:] + second.where[i:])[0]
            return f"{_WHICH} run, seen at {where},", torch.Size(), torch.Size()
        one, two = first.shapes[i], second.shapes[i]
        if one != two:
            return f"the shape of {first.where[i]}", one, two
        if one[0] != len(unchanged):
            continue
        apart = differing(first.summaries[i], second.summaries[i], tolerated).cpu()
        if bool((apart & unchanged).any()):
            return first.where[i], one, two
    return None


def changed_losses(
    before: Tensor,
    now: Tensor,
    kept: Tensor,
    *,
    rounding: float | None = None,
    sizes: Tensor | None = None,
    least: float = 0.0,
) -> Tensor:
    """Return which samples of `kept` have different losses: `[U]`, bool, on the CPU.

    If a deterministic device repeats a computation, losses must be equal bit for bit. Otherwise
    losses may differ by eps^(2/3) of the largest of three values: the sample's loss, the mean over
    `kept`, and the median of all samples. A mean over all samples could include a huge loss of a
    replaced sample.

    Args:
        before, now: losses of two runs; or `[U, K]`, products of gradients with K random vectors.
            The RMS over K of a difference estimates the norm of the gradients' difference.
        kept: `[U]`, bool, on the CPU.
        rounding: the allowed relative difference if the second run rounds differently; None if the
            second run repeats the first.
        sizes: `[U]`, norms of gradients if products are compared; None for losses.
        least: a difference that is always allowed.
    """
    now = now.detach()
    apart = (before - now).abs()
    was_finite, is_finite = before.isfinite(), now.isfinite()
    if now.ndim == 2:
        apart = apart.square().mean(1).sqrt()
        was_finite, is_finite = was_finite.all(1), is_finite.all(1)
    both = was_finite & is_finite
    compared = both & kept.to(both.device)
    if rounding is None and is_deterministic(now.device):
        allowed = torch.zeros_like(apart)
    else:
        sizes = torch.maximum(before.abs(), now.abs()) if sizes is None else sizes
        usual = 0.0
        if bool(compared.any()):
            usual = max(float(sizes[compared].mean()), float(sizes[both].median()))
        rounding = rounding or torch.finfo(now.dtype).eps ** (2 / 3)
        allowed = (rounding * sizes.clamp(min=usual)).clamp(min=least)
    same = both & (apart <= allowed) | ~(was_finite | is_finite)
    return (~same).cpu() & kept


def changed_rows(before: list[Tensor], now: list[Tensor]) -> Tensor | None:
    """Return which rows differ in a tensor, `[U]`, bool, given each tensor's digests `[U]`.

    Returns None if the two batches do not have the same tensors.
    """
    if [x.shape for x in before] != [x.shape for x in now]:
        return None
    if not now:
        return torch.zeros((), dtype=torch.bool)
    apart = [one != two for one, two in zip(before, now, strict=True)]
    return torch.stack([x.cpu() for x in apart]).any(0)


def changed_use(
    before: BackwardRows, now: BackwardRows, kept: Tensor, text: str, group: int | None = None
) -> str | None:
    """Return a message on the first layer of the backward whose kept rows changed, or None.

    Args:
        before, now: the rows of two backwards.
        kept: `[B]`, bool.
        text: the message, into which the layer's name is formatted.
        group: the clipping group whose parameters are compared; None for all groups.
    """
    if not bool(kept.any()):
        return None
    included = kept & ~before.left_out & ~now.left_out
    tolerated, found = tolerance(before.dtypes | now.dtypes), []
    for slot, layer in (now.layers | before.layers).items():
        if group not in (None, slot[0]):
            continue
        one, two = before.uses.get(slot, []), now.uses.get(slot, [])
        if len(one) != len(two):
            return _COUNTS.format(layer=layer)
        for a, b in zip(one, two, strict=True):
            # If samples run one by one, a recurrent layer pads to the longest sample so far.
            if now.rounds and a.lengths != b.lengths:
                continue
            if bool((differing(a.summaries, b.summaries, tolerated).cpu() & included).any()):
                found.append((b.number, layer))
    return text.format(layer=min(found)[1]) if found else None
