"""Tests on the first batches whether a scalar loss is the reduction that was declared.

If the model returns the scalar, the scalars of four batches with exchanged samples are compared.
If the loop computes the scalar from the model's outputs, the scalar's gradient at the outputs is
tested, since the gradient of a cross-entropy shows the weight of each token.

Letters: B samples, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_AT_ONCE = 1 << 22  # logits
_FITS = 1e-3  # allowed error / token's weight; losses other than cross-entropy exceed it
_SAME = 1e-4  # allowed relative difference of samples' weights
# After this many repeats of classes in other samples, weights count as weights of classes.
_REPEATED = 4
# Relative rounding error of a scalar that is a sum of many terms.
_SCALAR_ROUNDING = 1e-5

REMEDY = (
    "Pass losses of single samples, without loss_reduction: engine.backward(criterion, (outputs, "
    "targets)); or engine.backward(dpflash.losses.causal_lm(logits, labels)), which shifts the "
    "labels (dpflash.losses.cross_entropy does not). If classes are weighted, multiply each loss "
    "by the weight of its sample"
)
_OVER_TOKENS = (
    "loss_reduction={declared!r}, but the scalar is a mean over all valid tokens of the batch "
    "(the default of Hugging Face models and torch's cross_entropy), over its class weights "
    "(CrossEntropyLoss(weight=)), or over some of its rows, such as loader.is_real (use all "
    "rows), so nothing was released: the divisor differs between batches, so each sample's "
    "gradient depends on the others. " + REMEDY
)
_OF_NO_KNOWN_SCALE = (
    "loss_reduction={declared!r}, but the tokens' weights in the scalar are not those of a "
    "{declared} over samples, so nothing was released: it may be a mean over the valid "
    "tokens of the batch, or over their class weights, times a factor, and then each sample's "
    "gradient depends on the others. Leave out a division for gradient accumulation (loss / 4): "
    "the loader cuts batches, and a step is divided by optimizer.expected_batch_size. " + REMEDY
)
_OTHER_REDUCTION = (
    "loss_reduction={declared!r}, but the scalar is the {other} over the samples of the batch, so "
    "nothing was released: gradients would be clipped at {scale} of their scale. Declare "
    "loss_reduction={other!r}, or change the loss"
)
_NOT_A_SUM = (
    "loss_reduction={declared!r}, but the scalar that the model returns is not the {declared} of "
    "losses of single samples, so nothing was released: exchanging samples of two batches changes "
    "the sum of their scalars. A mean over the batch's valid tokens, the default of Hugging Face "
    "models, does this. " + REMEDY
)


def exchanges(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three batches a, b and c of the samples of a batch d, each as indices `[B]` into d.

    In each row, a and d together hold the same two samples as b and c.
    """
    own = torch.arange(size)
    turned, is_even = own.roll(-1), own % 2 == 0
    return turned, torch.where(is_even, own, turned), torch.where(is_even, turned, own)


def refuse_scalars(batches: Sequence[Sequence[Tensor]], declared: str) -> str | None:
    """Return a message if the scalars of four batches are not reductions over samples, or None.

    Args:
        batches: 0-dim outputs a, b, c, d of the model for four batches. In each row, the first two
            batches together must hold the same two samples as the last two.
        declared: "mean" or "sum".

    Means and sums over samples satisfy a + b = c + d, even if each row has its own random mask.
    """
    if len({len(batch) for batch in batches}) != 1:
        return None  # The model returned different numbers of scalars.
    for of_place in zip(*batches, strict=True):
        a, b, c, d = (float(x) for x in of_place)
        size = abs(a) + abs(b) + abs(c) + abs(d)
        rounding = max(_SCALAR_ROUNDING, 8 * torch.finfo(of_place[0].dtype).eps)
        if math.isfinite(size) and abs(a + b - c - d) > rounding * size:
            return _NOT_A_SUM.format(declared=declared)
    return None


def refuse_weights(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], size: int, declared: str
) -> str | None:
    """Return a message if a cross-entropy weights the samples otherwise than declared, or None.

    Args:
        outputs: outputs of the model; those of shape `[B, ...]` or `[B * T, V]` are tested.
        grads: the scalar's gradients with respect to the outputs.
        size: B.
        declared: "mean" or "sum".
    """
    for x, grad in zip(outputs, grads, strict=True):
        rows = x.shape[0] if x.ndim else 0
        if x.ndim == 2 and rows > size and rows % size == 0:
            x, grad = x.unflatten(0, (size, -1)), grad.unflatten(0, (size, -1))
        elif rows != size:
            continue
        found = _weights(x.detach(), grad.detach())
        if found is None or len(found[0]) < 2:
            continue
        of_tokens, targets = found
        weights = of_tokens.sum(1)
        least, most = float(weights.min()), float(weights.max())
        if most - least > _SAME * most:
            # If only one sample has a weight, this weight is 1 in a correct sum, too.
            is_of_several = int((weights > _SAME * most).sum()) > 1 or declared == "mean"
            if abs(float(weights.sum()) - 1) < _SAME and is_of_several:
                return _OVER_TOKENS.format(declared=declared)
            unit = 1.0 if declared == "sum" else 1 / len(weights)
            if _is_of_no_known_scale(of_tokens, targets, unit):
                return _OF_NO_KNOWN_SCALE.format(declared=declared)
            continue
        other, factor = ("sum", 1.0) if declared == "mean" else ("mean", 1 / len(weights))
        if abs(most - factor) < _SAME * factor:
            scale = "B times" if declared == "mean" else "1/B"
            return _OTHER_REDUCTION.format(declared=declared, other=other, scale=scale)
    return None


def _is_of_no_known_scale(weights: Tensor, targets: Tensor, unit: float) -> bool:
    """Return whether each token's weight is its class's weight times an unknown factor.

    Args:
        weights: `[B, T]`, with different sums for different samples.
        targets: `[B, T]`, the classes.
        unit: weight of a sample in the declared reduction.

    Returns False if all weights are equal with a known factor (a sum over a sample's tokens, a
    mean over T tokens, or over T - 1 for shifted labels). Also returns False if tokens of one
    class have different weights (the loss weights samples, or tokens by probability).
    """
    used = weights > 0
    classes, index = targets[used].unique(return_inverse=True)
    weights, length = weights[used], weights.shape[1]
    least, most = (
        weights.new_zeros(len(classes)).scatter_reduce(0, index, weights, how, include_self=False)
        for how in ("amin", "amax")
    )
    if bool((most - least > _SAME * most).any()):
        return False
    if float(most.max() - least.min()) > _SAME * float(most.max()):
        samples = used.nonzero()[:, 0]
        pairs = torch.stack([index, samples]).unique(dim=1).shape[1]
        return pairs >= len(classes) + _REPEATED
    known = (unit / n for n in (1, length, length - 1) if n)
    return not any(abs(float(most.max()) - x) < _SAME * x for x in known)


def _weights(logits: Tensor, grad: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (weights of each sample's tokens in a cross-entropy, classes), `[B, T]` each.

    The gradient of w * cross_entropy(z, y) is w * (softmax(z) - onehot(y)). Returns None if the
    gradient does not have this form, or if its dtype is too coarse.
    """
    if logits.dtype not in (torch.float32, torch.float64) or grad.dtype != logits.dtype:
        return None
    for classes in {logits.ndim - 1, 1} if logits.ndim > 1 else ():
        z, g = (
            x.movedim(classes, -1).flatten(1, -2) if x.ndim > 2 else x.unsqueeze(1)
            for x in (logits, grad)
        )
        chunks = [_token_weights(*pair) for pair in _chunks(z, g)]
        found = [pair for pair in chunks if pair is not None]
        if chunks and len(found) == len(chunks):
            whole = [torch.cat(x).view(z.shape[:2]).cpu() for x in zip(*found, strict=True)]
            return whole[0], whole[1]
    return None


def _chunks(z: Tensor, g: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return logits and gradients in chunks of n tokens, `[n, V]`."""
    z, g = z.flatten(0, 1), g.flatten(0, 1)
    count = max(1, _AT_ONCE // max(1, z.shape[1]))
    return list(zip(z.split(count), g.split(count), strict=True)) if z.shape[1] > 1 else []


def _token_weights(z: Tensor, g: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (weights, classes) of n tokens, `[n]` each, or None, see `_weights`.

    Tokens without a gradient have weight 0.
    """
    rounding = 4 * torch.finfo(g.dtype).eps
    z, g = z.double(), g.double()
    if bool((g.ne(0).sum(1) <= 1).all() and (g <= 0).all() and g.any()):
        # z may be log-probabilities, whose gradient is nonzero only at the target.
        are_logs = z.logsumexp(1)[g.any(1)].abs() < 8 * rounding * z.shape[1]
        return (-g.sum(1), g.argmin(1)) if bool(are_logs.all()) else None
    least, target = g.min(1, keepdim=True)
    # If the target's probability rounds to 1, its gradient is 0.
    target = torch.where(least < 0, target, z.argmax(1, keepdim=True))
    others = z.softmax(1).scatter(1, target, 0.0)
    of_others = others.sum(1)
    used = g.ne(0).any(1)
    # If p is almost 1, 1 - p cancels at the target, but sums over the other classes do not.
    weights = g.scatter(1, target, 0.0).sum(1) / of_others
    weights = torch.where(used, weights, torch.zeros_like(weights))
    expected = (weights.unsqueeze(1) * others).scatter(1, target, -(weights * of_others)[:, None])
    allowed = _FITS * g.abs().amax(1) + rounding * weights
    fits = ((g - expected).abs() <= allowed.unsqueeze(1)).all(1)
    return (weights, target.squeeze(1)) if bool((fits & (weights >= 0)).all()) else None
