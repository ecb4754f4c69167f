"""Runs all checks of a model, a batch and a loss function: `run_check`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .._validate import one_of
from ..attn.boundary import NoiseOff, without_noise
from ..clipping.precision import (
    INSTEAD_OF_A_MEAN,
    OF_16_BIT,
    WHY_NO_COARSE_MEAN,
    narrow_parameters,
)
from ..packing import PackedBatch
from ..verification.nested import leaves_of
from .batch import batch_size
from .coupling import check_coupling
from .first_dimensions import check_first_dimensions
from .first_run import first_run, widened
from .layers import NORMS, check_modules, check_private_backward, check_reach
from .private import PrivateCopy, frozen
from .report import ITSELF, CheckReport, Findings, error_text
from .rows import ROWS, check_rows
from .state import check_sizes, check_state
from .subject import LossFunction, Subject, randomness_restored

_DATA = (
    "the dataset and its collate_fn: each row must depend on its own entry alone (no mixup, no "
    "statistics or weights over the batch, no padding to the longest sample that the model does "
    "not mask)"
)
_BEFORE = (
    "values computed from the data before, such as class weights of a loss, scalers and "
    "vocabularies: they must be public, and counts of private labels are not public"
)


def run_check(
    model: nn.Module, batch: Any, loss_fn: LossFunction, *, loss_reduction: str | None = None
) -> CheckReport:
    """Test on one batch whether losses[i] and its gradient depend on sample i alone.

    Args:
        model: a plain or private model; the check works on a plain copy and changes nothing.
        batch: the second argument of loss_fn: a tensor, a tuple or a dict of tensors whose first
            dimension is the batch, with at least two samples; four to eight are enough. Epsilon
            does not cover the report, so use made-up or public data. Each row is tested as one
            sample; if users have several rows (unit_of), this is stricter than needed.
        loss_fn: loss_fn(model, batch) -> losses [B]; must call the model that is passed to it.
        loss_reduction: "mean" or "sum" as declared to make_private. loss_fn then returns a
            scalar, and the check tests on several batches whether the scalar and its gradient are
            the declared mean or sum over the samples.

    Returns:
        A CheckReport: `.ok`, `.problems`, and str() with all comparisons made and skipped. It is a
        test on this batch, not a proof.

    Raises:
        ValueError: the batch has no tensor, one sample only, tensors of unequal batch sizes, or
            packed documents; or loss_reduction is not None, "mean" or "sum".
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={type(model).__name__}: expected a torch.nn.Module; pass one")
    one_of(loss_reduction=(loss_reduction, (None, "mean", "sum")))
    if not callable(loss_fn) or isinstance(loss_fn, nn.modules.loss._Loss):
        raise ValueError(
            f"loss_fn={type(loss_fn).__name__}: expected a function loss_fn(model, batch) -> "
            f"{'a scalar' if loss_reduction else 'losses [B]'}; pass one, such as lambda model, "
            "batch: dpflash.losses.of_criterion(criterion, model(batch[0]), batch[1])"
        )
    if any(leaves_of(batch, kinds=(PackedBatch,))):
        raise ValueError(
            "batch holds a PackedBatch, which the check does not support, since its samples are "
            "documents instead of rows: pass documents, one a row (dpflash.sampling.PadTo), and a "
            "loss_fn for such a batch. Packed batches are tested when training begins, see "
            "make_private(verify_first_batch=...)"
        )
    size = batch_size(batch)
    findings = Findings(not_checked=[_DATA, _BEFORE])
    plain = getattr(model, "_orig_mod", model)
    with randomness_restored(batch), torch.enable_grad(), without_noise() as boundaries:
        _check(plain, batch, loss_fn, size, loss_reduction, boundaries, findings)
    if boundaries.silenced:
        findings.not_checked.append(
            "noise of boundaries: disabled for the comparisons; their clipping stays enabled"
        )
    return findings.report()


def _check(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    size: int,
    loss_reduction: str | None,
    boundaries: NoiseOff,
    findings: Findings,
) -> None:
    # The copy of a private model is a plain model.
    try:
        plain = copy.deepcopy(model)
    except Exception as error:
        message = f"it cannot be copied: {error_text(error)}"
        findings.add("run", ITSELF, message, "make the model work with copy.deepcopy")
        return
    check_modules(plain, findings)
    if any(map(is_lazy, plain.parameters())):
        findings.add("run", ITSELF, "it has lazy parameters", "run the model once before")
        return
    options = loss_fn, batch, size, loss_reduction
    first = Subject(plain, *options)
    narrow = narrow_parameters(plain)
    if loss_reduction == "mean" and narrow:
        message = f"it is one of {len(narrow)} parameters in 16 bit: {WHY_NO_COARSE_MEAN}"
        findings.add("reduction", narrow[0], message, INSTEAD_OF_A_MEAN)
    elif narrow:
        findings.not_checked.append(OF_16_BIT)
    subject = widened(first, model, findings) if first_run(first, findings) else None
    if subject is None or not check_state(subject, findings):
        findings.not_checked.append("everything after the failed run: fix the run, check again")
        return
    sizes = check_sizes(subject, findings)
    other = frozen(copy.deepcopy(model), findings.unsupported())
    own = Subject(other, *options, is_exact=True)
    private = PrivateCopy(own) if own.trained else None
    if private is not None:
        check_first_dimensions(private, sizes, findings)
    check_coupling(subject, findings, has_boundary=boundaries.crossed)
    check_reach(subject, findings)
    if not findings.errors():
        check_private_backward(subject, findings)
    else:
        findings.not_checked.append(f"{NORMS}: fix the errors first")
    if private is None or findings.errors() or subject.is_random:
        findings.not_checked.append(f"{ROWS}: the model is random, or has errors")
    else:
        check_rows(private, findings)
    if subject.dropout:
        findings.not_checked.append("dropout: disabled for the comparisons")
    if not model.training:
        findings.not_checked.append("training mode: the model is in eval mode; call model.train()")
