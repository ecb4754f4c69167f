"""Per-sample losses: one number for each sample of the batch, computed from that sample alone.

A loss that divides by a number of the whole batch, such as its number of valid tokens (the default
of Hugging Face models), couples the samples: removing one sample rescales the gradients of all
others, and the clipped sum moves by several times the clipping bound. Here every divisor depends
on the sample alone, and the engine sums over the samples.

A sample with a target out of range has the loss NaN and a gradient of exact zeros. The functions
raise no error for such a target, since the error would depend on one private entry.

Letters: B samples, V classes.
"""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._validate import positive_int


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    *,
    sample_index: Tensor | None = None,
    num_samples: int | None = None,
) -> Tensor:
    """Cross-entropy of each sample: the mean over that sample's own valid positions.

    Args:
        logits: `[B, ..., V]`, floating point, classes last; dtypes narrower than float32 are
            converted to float32.
        targets: `[B, ...]`, int64 class indices, already shifted for next-token prediction.
            Every target must be in `0..V-1` or equal to ignore_index; otherwise the sample's loss
            is NaN and its gradient zero.
        ignore_index: positions with this target are left out of the mean. A sample with no other
            target has the loss 0 and a zero gradient.
        sample_index: int64, shape of `targets`; required for a packed batch. The index of the
            sample to which each position belongs; positions with an index outside of 0..B-1, such
            as -1, belong to no sample. None means that row i is sample i.
        num_samples: B, the packed batch's `max_documents`; required with sample_index.

    Returns:
        `[B]`, float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: the shapes do not match, or targets is not int64.

    Guarantees:
        Entry i depends on the logits and targets of sample i alone.
    """
    _require_floating(logits=logits)
    if targets.dtype != torch.int64:
        raise ValueError(
            f"targets have dtype {targets.dtype}: expected torch.int64 class indices. Pass "
            "targets.long() of integers, targets.argmax(-1) of one-hot rows; for probabilities "
            "torch.nn.functional.cross_entropy(logits, targets, reduction='none') returns [B] too"
        )
    if logits.ndim < 2 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit targets of shape "
            f"{tuple(targets.shape)}: expected logits [B, ..., V] and targets [B, ...]; classes "
            "come last (logits.movedim(1, -1) moves them there; one-hot targets become "
            "targets.argmax(-1)), and under context parallelism both are this rank's tokens"
        )
    valid, outside = kinds_of_targets(targets, logits.shape[-1], ignore_index)
    position_losses = F.cross_entropy(
        _at_least_float32(logits).flatten(0, -2),
        targets.masked_fill(outside, ignore_index).flatten(),
        ignore_index=ignore_index,
        reduction="none",
    )
    if sample_index is None:
        if num_samples is not None:
            raise ValueError(
                f"num_samples={num_samples!r} without sample_index: pass both for a packed batch"
            )
        return _mean_of_valid(position_losses.view(targets.shape), valid, outside)
    index, num_samples = _checked_index(sample_index, num_samples, targets)
    zeros = position_losses.new_zeros(num_samples + 1)
    sums = zeros.index_add(0, index, position_losses)
    counts = zeros.index_add(0, index, valid.flatten().to(sums.dtype))
    wrong = zeros.index_add(0, index, outside.flatten().to(sums.dtype)) > 0
    return (sums / counts.clamp(min=1)).masked_fill(wrong, math.nan)[:num_samples]


def kinds_of_targets(
    targets: Tensor, num_classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return two bool masks, shape of `targets`: True for valid, and for out-of-range targets."""
    inside = (targets >= 0) & (targets < num_classes)
    counted = targets != ignore_index
    return counted & inside, counted & ~inside


def causal_lm(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    *,
    sample_index: Tensor | None = None,
    num_samples: int | None = None,
) -> Tensor:
    """Next-token cross-entropy of each sample: the mean over that sample's own valid labels.

    The logits at position t predict the label at position t + 1, as in the causal models of
    Hugging Face, so pass labels that are not shifted, such as the input ids. Use this function in
    place of those models' own loss, which couples the samples: it is a mean over the whole batch.

    Args:
        logits: `[B, T, V]`, floating point; narrower dtypes are converted to float32.
        labels: `[B, T]`, int64; the first label of each sample is not used, since no logits
            predict it. Every other label must be in `0..V-1` or equal to ignore_index; otherwise
            the sample's loss is NaN and its gradient zero.
        ignore_index: labels of this value, such as padding, are left out of the mean. A sample
            whose labels after the first all have this value has the loss 0 and a zero gradient.
        sample_index, num_samples: for a packed batch, see `cross_entropy`. A label is left out of
            the mean if the label before it belongs to another sample.

    Returns:
        `[B]`, float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: the shapes do not match, or labels is not int64. Under context parallelism
            shift the labels before they are split, and use `cross_entropy`.

    Guarantees:
        Entry i depends on the logits and labels of sample i alone.
    """
    if logits.ndim != 3 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} do not fit labels of shape "
            f"{tuple(labels.shape)}: expected logits [B, T, V] and labels [B, T], both not "
            "shifted; use dpflash.losses.cross_entropy for other shapes or shifted labels"
        )
    targets, index = labels[:, 1:], None
    if sample_index is not None and sample_index.shape == labels.shape:
        index = sample_index[:, 1:]
        targets = targets.masked_fill(index != sample_index[:, :-1], ignore_index)
    elif sample_index is not None:
        _checked_index(sample_index, num_samples, labels)
    return cross_entropy(
        logits[:, :-1], targets, ignore_index, sample_index=index, num_samples=num_samples
    )


def mse(predictions: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error of each sample, over that sample's own elements.

    Args:
        predictions: `[B]`, `[B, 1]` or `[B, ...]`, floating point; narrower dtypes become float32.
        targets: shape of `predictions`, floating point.

    Returns:
        `[B]`, float32 (float64 if an argument is float64).

    Raises:
        ValueError: for unequal shapes ((B, 1) against (B,) would broadcast to all B x B pairs and
            couple the samples) or targets that are not floating point.

    Guarantees:
        Entry i depends on `predictions[i]` and `targets[i]` alone.
    """
    _require_alike(predictions, targets, "predictions")
    element_losses = (_at_least_float32(predictions) - targets).square()
    return _mean_of_each_sample(element_losses)


def binary_cross_entropy_with_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each sample, over that sample's own elements.

    Args:
        logits: `[B]`, `[B, 1]` or `[B, ...]`, floating point; converted to float32 if narrower.
        targets: shape of `logits`, floating point, probabilities of the positive class. A
            sample with a target outside of [0, 1] has the loss NaN and a zero gradient.

    Returns:
        `[B]`, float32 (float64 if an argument is float64), in nats.

    Raises:
        ValueError: for unequal shapes ((B, 1) against (B,) would broadcast to all B x B pairs and
            couple the samples) or targets that are not floating point.

    Guarantees:
        Entry i depends on `logits[i]` and `targets[i]` alone.
    """
    _require_alike(logits, targets, "logits")
    dtype = torch.promote_types(_at_least_float32(logits[:0]).dtype, targets.dtype)
    outside = ~((targets >= 0) & (targets <= 1))
    element_losses = F.binary_cross_entropy_with_logits(
        logits.to(dtype), targets.masked_fill(outside, 0).to(dtype), reduction="none"
    )
    return _nan_where(outside, _mean_of_each_sample(element_losses))


_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_OF_ELEMENTS = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss),
    *(nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.BCELoss),
)
# The criterion classes that `of_criterion` supports.
CRITERIA = (*_OF_CLASSES, *_OF_ELEMENTS)
NAMES_OF_CRITERIA = ", ".join(kind.__name__ for kind in CRITERIA)


def of_criterion(criterion: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each sample's loss under a criterion object of torch, ignoring its `reduction`.

    Args:
        criterion: CrossEntropyLoss, NLLLoss, MSELoss, L1Loss, SmoothL1Loss, HuberLoss,
            BCEWithLogitsLoss, BCELoss, KLDivLoss, PoissonNLLLoss or SoftMarginLoss. Class weights
            multiply the losses, but the losses are not divided by the batch's sum of weights.
            Class weights must be public, so do not compute them from counts of private labels.
        outputs: `[B, ...]`, in the shape that the criterion requires (classes in dimension 1);
            dtypes narrower than float32 are converted to float32.
        targets: in the criterion's shape and dtype. A sample with a class out of range (BCELoss:
            with an output or target outside of [0, 1]) has the loss NaN and a zero gradient.

    Returns:
        `[B]`: the mean over each sample's elements or, with class indices, its valid targets.

    Raises:
        ValueError: the criterion is not listed above, or the shapes differ and would broadcast.

    Guarantees:
        Entry i depends on `outputs[i]` and `targets[i]` alone.
    """
    kind = require_known(criterion)
    each: Any = copy.copy(criterion)
    vars(each).update(reduction="none")
    outputs = _at_least_float32(outputs)
    if kind in _OF_ELEMENTS or targets.is_floating_point():
        _require_alike(outputs, targets, "outputs")
        if kind is not nn.BCELoss:
            return _mean_of_each_sample(each(outputs, targets))
        outside = ~((outputs >= 0) & (outputs <= 1) & (targets >= 0) & (targets <= 1))
        found = each(outputs.masked_fill(outside, 0), targets.masked_fill(outside, 0))
        return _nan_where(outside, _mean_of_each_sample(found))
    if outputs.ndim < 2 or outputs.shape[:1] + outputs.shape[2:] != targets.shape:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} do not fit targets of shape "
            f"{tuple(targets.shape)}: expected [B, classes, ...] and [B, ...]"
        )
    valid, outside = kinds_of_targets(targets, outputs.shape[1], each.ignore_index)
    found = each(outputs, targets.masked_fill(outside, each.ignore_index))
    return _mean_of_valid(found, valid, outside)


def require_known(criterion: nn.Module) -> type[nn.Module]:
    """Return the criterion's class; raise ValueError unless it is one of `CRITERIA`."""
    kind = type(criterion)
    if kind not in CRITERIA:
        raise ValueError(
            f"criterion={kind.__name__}: dpflash computes the per-sample losses of "
            f"{NAMES_OF_CRITERIA} only. Build this criterion with reduction='none', and pass the "
            "losses [B] that it returns to engine.backward"
        )
    return kind


def _checked_index(
    sample_index: Tensor, num_samples: int | None, targets: Tensor
) -> tuple[Tensor, int]:
    """Return (flat sample index of each position, B); a position of no sample has index B."""
    if num_samples is None:
        raise ValueError(
            "num_samples=None with sample_index: pass num_samples=batch.max_documents too"
        )
    positive_int(num_samples=num_samples)
    if sample_index.shape != targets.shape or sample_index.dtype != torch.int64:
        raise ValueError(
            f"sample_index has shape {tuple(sample_index.shape)} and dtype {sample_index.dtype}: "
            f"expected torch.int64 of the targets' shape {tuple(targets.shape)}"
        )
    outside = (sample_index < 0) | (sample_index >= num_samples)
    return sample_index.masked_fill(outside, num_samples).flatten(), num_samples


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _rows(shape: torch.Size) -> tuple[int, int]:
    """Return (B, n), to reshape to one row per sample; (B, -1) would fail for an empty batch."""
    return shape[0], math.prod(shape[1:])


def _mean_of_each_sample(element_losses: Tensor) -> Tensor:
    rows = _rows(element_losses.shape)
    return element_losses.reshape(rows).sum(1) / max(rows[1], 1)


def _mean_of_valid(position_losses: Tensor, valid: Tensor, outside: Tensor) -> Tensor:
    """Average `[B, ...]` to `[B]` over valid positions; NaN if a target is out of range."""
    rows = _rows(valid.shape)
    losses = position_losses.reshape(rows).sum(1) / valid.reshape(rows).sum(1).clamp(min=1)
    return _nan_where(outside, losses)


def _nan_where(outside: Tensor, losses: Tensor) -> Tensor:
    """Set losses `[B]` to NaN, with zero gradient, if `outside` `[B, ...]` has a True entry."""
    return losses.masked_fill(outside.reshape(_rows(outside.shape)).any(1), math.nan)


def _require_floating(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"{name} have dtype {tensor.dtype}: expected a floating-point tensor; "
                f"convert them with {name}.float()"
            )


def _require_alike(values: Tensor, targets: Tensor, name: str) -> None:
    """Raise unless both are floating point, with a batch dimension and equal shapes."""
    _require_floating(**{name: values, "targets": targets})
    if values.ndim < 1 or values.shape != targets.shape:
        raise ValueError(
            f"{name} of shape {tuple(values.shape)} and targets of shape {tuple(targets.shape)}: "
            "expected equal shapes [B, ...] with the batch first; "
            f"reshape one, for example {name}.squeeze(-1) or targets.unsqueeze(-1)"
        )
