"""Comparison: what differs between two runs for samples that had the same contents in both.

On a deterministic device all must be equal bit for bit. Elsewhere rows may differ by sqrt(eps) of
their norm, and losses by the rounding of a sum in another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..verification.digests import differing, is_deterministic, tolerance
from .backward_rows import BackwardRows
from .forward_rows import OUTPUT, ForwardRows

_CHANGED = (
    "{where} changed for a sample as other samples of the batch were replaced, so nothing was "
    "released: an operation before it mixes samples (statistics or a scale of the batch, routing "
    "with a capacity, rows in another order, mixup, pad_packed_sequence without total_length=), "
    "draws random numbers whose count depends on the contents (draw for the whole shape, then "
    "mask) or from a generator of its own, or is of another model that the loop trains with each "
    "microbatch (train it where loader.is_last), or the loop sets an attribute of the model where "
    "loader.is_last (do so behind optimizer.step()). Make it per sample; engine.check helps"
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
    "with negatives from the sample's own entry"
)
_KEPT = (
    "{where} depends on what an earlier forward has kept in {attributes}, so nothing was "
    "released: samples of one batch would affect the gradients of the next. Keep nothing of a "
    "batch in the model, or set it back before each call"
)


def mixed(first: ForwardRows, second: ForwardRows, unchanged: Tensor) -> str | None:
    """A message about the first difference of two forwards for the samples `unchanged` `[B]`."""
    where = _first_difference(first, second, unchanged)
    if where == OUTPUT:
        shape = first.shapes[first.where.index(where)]
        if shape[1:2] == shape[:1]:
            return _COMPARED
    if where is None:
        return None
    is_packed = first.units is not None and not first.units.are_rows
    return (_CHANGED_DOCUMENT if is_packed else _CHANGED).format(where=where)


def reached(first: ForwardRows, second: ForwardRows, replaced: Tensor) -> bool:
    """Whether some layer saw the contents of the samples `replaced` `[B]`.

    A model may read its samples from where none can be replaced.
    """
    tolerated = tolerance(first.dtypes)
    return any(
        bool((differing(a, b, tolerated).cpu() & replaced).any())
        for a, b in zip(first.summaries, second.summaries, strict=False)
        if len(a) == len(b) == len(replaced)
    )


def kept(first: ForwardRows, second: ForwardRows, size: int, attributes: list[str]) -> str | None:
    """A message about the first difference of two forwards that began with other attributes.

    Args:
        first, second: two forwards of one batch.
        size: B.
        attributes: names of those that differed.
    """
    where = _first_difference(first, second, torch.ones(size, dtype=torch.bool))
    named = ", ".join(f"'{name}'" for name in attributes[:3]) + ", ..." * (len(attributes) > 3)
    return None if where is None else _KEPT.format(where=where, attributes=named)


def _first_difference(first: ForwardRows, second: ForwardRows, unchanged: Tensor) -> str | None:
    tolerated = tolerance(first.dtypes)
    for i in range(max(len(first.where), len(second.where))):
        if first.where[i : i + 1] != second.where[i : i + 1]:
            where = (first.where[i:] + second.where[i:])[0]
            return f"which layers run, seen at {where},"
        if first.shapes[i] != second.shapes[i]:
            return f"the shape of {first.where[i]}"
        if first.shapes[i][0] != len(unchanged):
            continue
        apart = differing(first.summaries[i], second.summaries[i], tolerated).cpu()
        if bool((apart & unchanged).any()):
            return first.where[i]
    return None


def changed_losses(before: Tensor, now: Tensor, roots: Tensor | None = None) -> Tensor:
    """`[U]`, bool, on the CPU: samples whose losses `[U]` differ.

    On a deterministic device losses must be equal bit for bit; elsewhere a sum of n numbers in
    another order is rounded by some sqrt(n) eps.

    Args:
        before, now: of two runs.
        roots: `[U]`, sqrt(n) of each sample; None for 1.
    """
    now = now.detach()
    apart = (before - now).abs()
    if is_deterministic(now.device):
        allowed = torch.zeros_like(apart)
    else:
        terms = 9.0 if roots is None else 8 + roots.to(now)
        allowed = torch.finfo(now.dtype).eps * terms * now.abs()
    same = (apart <= allowed) | ~(before.isfinite() | now.isfinite())
    return (~same).cpu()


def changed_rows(before: list[Tensor], now: list[Tensor]) -> Tensor | None:
    """`[U]`, bool: rows with other contents in some tensor, by their digests `[U]`.

    None where there are other tensors.
    """
    if [x.shape for x in before] != [x.shape for x in now]:
        return None
    if not now:
        return torch.zeros((), dtype=torch.bool)
    apart = [one != two for one, two in zip(before, now, strict=True)]
    return torch.stack([x.cpu() for x in apart]).any(0)


def changed_use(before: BackwardRows, now: BackwardRows, kept: Tensor) -> str | None:
    """The first layer in which a kept sample has another gradient, or None.

    Args:
        before, now: of two backwards.
        kept: `[B]`, bool.
    """
    included = kept & ~before.left_out & ~now.left_out
    tolerated = tolerance(before.dtypes | now.dtypes)
    for slot, uses in now.uses.items():
        others = before.uses.get(slot, [])
        if len(others) != len(uses):
            return now.layers[slot]
        for one, two in zip(others, uses, strict=True):
            apart = differing(one.summaries, two.summaries, tolerated).cpu()
            if bool((apart & included).any()):
                return now.layers[slot]
    return None
