"""Runs all checks of a model, a batch and a loss function: `run_check`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import one_of
from ..attn.boundary import NoiseOff, without_noise
from ..clipping.precision import (
    INSTEAD_OF_A_MEAN,
    OF_16_BIT,
    WHY_NO_COARSE_MEAN,
    narrow_parameters,
)
from ..packing import PackedBatch
from ..verification.nested import leaves_of, tensors_of
from ..verification.uncovered import Hidden, described, leaves_past_gates
from .batch import batch_size, mapped
from .coupling import check_coupling
from .first_dimensions import check_first_dimensions
from .layers import check_modules, check_private_backward, check_reach
from .reduction import check_reduction
from .report import ITSELF, LOSS_FN, LOSS_REMEDY, CheckReport, Findings, error_text, listed
from .rows import check_rows
from .subject import LossFunction, Subject, Trial, coarsest_eps, randomness_restored

_FIX_FIRST = "fix this first"
_UNPACK = (
    f"{_FIX_FIRST}; pad_packed_sequence needs total_length=x.shape[1], or the longest sample of "
    "the batch decides the length"
)
_DECLARE_REMEDY = (
    "or, if training calls loss.backward() on this scalar, declare loss_reduction='mean' or "
    "'sum' over samples, here and in make_private"
)
_EMPTY_REMEDY = (
    "the private loader needs nothing, because its batches are never empty; with "
    "BatchMemoryManager skip the forward and backward with `if len(x):`, never optimizer.step()"
)
_DATA = (
    "the data set and its collate_fn: each row must depend on its own entry alone (no mixup, no "
    "statistics or weights over the batch, no padding to the longest sample that the model does "
    "not mask)"
)


def run_check(
    model: nn.Module, batch: Any, loss_fn: LossFunction, *, loss_reduction: str | None = None
) -> CheckReport:
    """Try on one batch whether losses[i] and its gradient depend on sample i alone.

    Args:
        model: plain or private; the check works on a plain copy and changes nothing.
        batch: argument of loss_fn: a tensor, a tuple or a dict of tensors whose first
            dimension is the batch, of at least two samples; four to eight are enough. No
            epsilon covers the report, so use data of nobody. Each row counts as a sample of
            its own; where users have several rows (unit_of), that finds more than is needed.
        loss_fn: loss_fn(model, batch) -> losses [B]; it calls the model that it is given.
        loss_reduction: "mean" or "sum" as declared to make_private; loss_fn then returns a
            scalar, and the check compares the scalar of several batches, and its gradient,
            with that reduction over their samples.

    Returns:
        A CheckReport: `.ok`, `.problems`, and as text what was and was not checked. It is a
        test on this batch, not a proof.

    Raises:
        ValueError: for a batch that holds no tensor, one sample, or samples of unequal number,
            or is packed; and for another loss_reduction than None, "mean" and "sum".
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={type(model).__name__}: expected a torch.nn.Module; pass one")
    one_of(loss_reduction=(loss_reduction, (None, "mean", "sum")))
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={type(loss_fn).__name__}: expected a function loss_fn(model, batch) -> "
            f"{'a scalar' if loss_reduction else 'losses [B]'}; pass one"
        )
    if any(leaves_of(batch, kinds=(PackedBatch,))):
        raise ValueError(
            "batch holds a PackedBatch, whose samples are documents and no rows, which the check "
            "does not take: pass a batch of documents one a row (dpflash.sampling.PadTo), with a "
            "loss_fn for it. The packed batches themselves are tested as training begins, see "
            "make_private(verify_first_batch=...)"
        )
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        batch = dict(batch)
    size = batch_size(batch)
    findings = Findings(not_checked=[_DATA])
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
    # Copying a private model makes a plain one.
    try:
        plain = copy.deepcopy(model)
    except Exception as error:
        findings.add(
            "run",
            ITSELF,
            f"it cannot be copied: {error_text(error)}",
            "make the model work with copy.deepcopy",
        )
        return
    check_modules(plain, findings)
    trial = Trial(Subject(plain, loss_fn), batch, size, loss_reduction, 0.0, boundaries)
    narrow = narrow_parameters(plain)
    if loss_reduction == "mean" and narrow:
        message = f"it is one of {len(narrow)} parameters in 16 bit: {WHY_NO_COARSE_MEAN}"
        findings.add("reduction", narrow[0], message, INSTEAD_OF_A_MEAN)
    elif narrow:
        findings.not_checked.append(OF_16_BIT)
    first = _first_run(trial, findings) and _widen(trial, model, findings)
    if not (first and _repeats(trial, findings)):
        findings.not_checked.append("everything after the failed run: fix it and check again")
        return
    check_first_dimensions(trial, copy.deepcopy(model), batch, findings)
    _check_state(trial, findings)
    if loss_reduction is None:
        reference = check_coupling(trial, findings)
        samples = list(reference.values())
    else:
        reference = check_reduction(trial, findings)
        samples = [trial.subject.loss_and_grads(trial.batch, None)]
    check_reach(trial, samples, findings)
    _check_empty_batch(trial, findings)
    check_private_backward(trial, reference, findings)
    check_rows(trial, copy.deepcopy(model), batch, findings)
    if trial.subject.dropout:
        findings.not_checked.append("dropout: disabled for the comparisons")
    if not model.training:
        findings.not_checked.append("training mode: the model is in eval mode; call model.train()")


def _first_run(trial: Trial, findings: Findings) -> bool:
    """Run loss_fn as the user does; returns whether its result can be checked."""
    subject = trial.subject
    if not subject.trained:
        findings.add("run", ITSELF, "no parameter is trainable", "call requires_grad_(True)")
        return False
    called: list[str] = []
    hooks = [
        m.register_forward_hook(lambda *_: called.append("")) for m in subject.model.modules()
    ]
    try:
        losses = subject.losses(trial.batch)
    except Exception as error:
        message = f"loss_fn(model, batch) raised {error_text(error)}"
        findings.add("run", LOSS_FN, message, _FIX_FIRST)
        return False
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        findings.add(
            "run",
            LOSS_FN,
            "it does not call the model that is passed to it",
            "call the first argument of loss_fn, not a model from an outer scope",
        )
        return False
    if not _losses_fit(trial, losses, findings):
        return False
    _check_leaves(trial, losses, findings)
    return True


def _check_leaves(trial: Trial, losses: Tensor, findings: Findings) -> None:
    """Report what the losses train outside of the model."""
    findings.checked.append("whether the losses train anything outside of the model")
    known = {id(p) for p in trial.subject.trained.values()}
    known |= {id(t) for _, t in tensors_of(trial.batch)}
    model, again = trial.subject.model, trial.subject.losses(trial.batch)
    known_twice = {id(x) for x in leaves_past_gates(again.grad_fn, model)}
    for leaf in leaves_past_gates(losses.grad_fn, model):
        # Inputs whose gradients the loss asks for are new tensors each time.
        is_new = not isinstance(leaf, nn.Parameter | Hidden) and id(leaf) not in known_twice
        if id(leaf) not in known and not is_new:
            findings.add("outside_use", LOSS_FN, *described(leaf, model))


def _losses_fit(trial: Trial, losses: Any, findings: Findings) -> bool:
    reduction = trial.loss_reduction
    expected = f"expected one loss per sample, [{trial.size}]"
    remedy = LOSS_REMEDY
    if reduction:
        expected = f"expected a scalar, as loss_reduction={reduction!r} declares"
        remedy = (
            f"return losses.{reduction}() over samples, or pass loss_reduction=None if training "
            "calls engine.backward(losses)"
        )
    if not isinstance(losses, Tensor):
        found = f"it returned {type(losses).__name__}; {expected}"
    elif losses.ndim == 0 and not reduction:
        found = f"it returned a scalar, which does not separate samples; {expected}"
        remedy = f"{LOSS_REMEDY}; {_DECLARE_REMEDY}"
    elif tuple(losses.shape) != trial.losses_shape(trial.size):
        found = f"it returned shape {tuple(losses.shape)}; {expected}"
    elif not losses.is_floating_point():
        found = f"it returned {losses.dtype}; expected a floating-point tensor"
    elif not losses.requires_grad:
        found = "its losses do not require grad: they were detached or computed under no_grad"
    elif not bool(losses.isfinite().all()):
        found = "its losses are not finite, so they cannot be compared"
    else:
        shape = "a scalar" if reduction else f"[{trial.size}]"
        findings.checked.append(f"losses: {shape}, finite, differentiable")
        return True
    findings.add("loss", LOSS_FN, found, remedy)
    return False


def _widen(trial: Trial, model: nn.Module, findings: Findings) -> bool:
    """Run comparisons in float64 if the model supports it; returns whether a backward works."""
    index = None if trial.loss_reduction else 0
    wide = mapped(trial.batch, lambda t: t.double() if t.is_floating_point() else t)
    try:
        subject = Subject(copy.deepcopy(model).double(), trial.subject.loss_fn)
        subject.loss_and_grads(wide, index)
    except Exception as error:
        findings.not_checked.append(
            f"float64: the model does not support it ({error_text(error)})"
        )
    else:
        trial.replace_subject(subject, wide)
    try:
        trial.subject.loss_and_grads(trial.batch, index)
    except Exception as error:
        name = "the scalar" if index is None else "losses[0]"
        message = f"the backward of {name} raised {error_text(error)}"
        findings.add("run", LOSS_FN, message, _FIX_FIRST)
        return False
    # Above rounding errors, which grow with depth, and below the effect of coupling.
    trial.set_tolerance(coarsest_eps(trial.subject, trial.batch) ** (2 / 3))
    return True


def _repeats(trial: Trial, findings: Findings) -> bool:
    """Check that the same batch has the same losses again, also with another seed.

    Returns False if the losses are not repeatable with the same seed, or a batch raises.
    """
    subject = trial.subject
    first = subject.losses(trial.batch).detach()
    try:
        for index in trial.indices:
            subject.losses(trial.pick([index] * trial.size))
    except Exception as error:
        message = f"a batch of copies of one sample raised {error_text(error)}"
        is_recurrent = any(isinstance(m, nn.RNNBase) for m in subject.model.modules())
        findings.add("run", LOSS_FN, message, _UNPACK if is_recurrent else _FIX_FIRST)
        return False
    again = subject.losses(trial.batch).detach()
    changed = subject.changed()
    for name in changed:
        findings.add(
            "state",
            name,
            "the forward changes it, and state_dict() releases it, without noise",
            "let the optimizer alone change parameters, and keep nothing of a batch in "
            "state_dict() (metrics with persistent=False)",
        )
    if not dict(subject.model.named_parameters()).keys().isdisjoint(changed):
        return False
    if not trial.close(first, again):
        findings.add(
            "state",
            ITSELF,
            "a batch has other losses after another batch was processed: "
            "the model keeps state outside of its buffers between calls",
            "do not keep data of a batch between calls",
        )
        return False
    if not trial.close(first, subject.losses(trial.batch, seed=1).detach()):
        trial.set_random()
        remedy = (
            "to run the skipped checks, draw random numbers such as timesteps and noise before "
            "the loss function and pass them in the batch, or disable the randomness"
        )
        if dropping := subject.dropping():
            remedy = (
                "disable dropout for the check (dropout=0.0 or model.eval()): "
                f"{listed(dropping)} may apply dropout inside of another operation; or disable "
                "other randomness"
            )
        findings.add(
            "random",
            ITSELF,
            "the losses depend on the seed, even without dropout layers; samples are "
            "compared at the same index in batches of the same size only",
            remedy,
            "warning",
        )
        findings.not_checked.append("samples alone or at another index: the model is random")
    return True


def _check_state(trial: Trial, findings: Findings) -> None:
    """Report buffers that depend on the batch: they would be released without noise."""
    subject = trial.subject
    unsupported = {p.where for p in findings.problems if p.kind == "unsupported"}
    subject.losses(trial.batch)
    left = subject.buffers()
    found: dict[str, None] = {}
    for index in trial.indices:
        subject.losses(trial.pick([index] * trial.size))
        for name, value in subject.buffers().items():
            before = left.get(name)
            if before is None or not trial.agree([before], [value]):
                found[name] = None
    for name in found:
        # An unsupported module must be replaced anyway, with its buffers.
        if (name.rpartition(".")[0] or ITSELF) in unsupported:
            continue
        findings.add(
            "state",
            name,
            "this buffer is computed from the samples of the batch: it affects later batches and "
            "is in the state_dict, without noise",
            "freeze it, or compute it from public data before training",
        )
    findings.checked.append("buffers after two different batches")


def _check_empty_batch(trial: Trial, findings: Findings) -> None:
    findings.checked.append("an empty batch")
    expected = trial.losses_shape(0)
    try:
        losses = trial.subject.losses(trial.pick([]))
        if tuple(losses.shape) == expected:
            return
        found = f"has losses of shape {tuple(losses.shape)}, not {list(expected)}"
    except Exception as error:
        found = f"raises {error_text(error)}"
    findings.add("empty_batch", LOSS_FN, f"an empty batch {found}", _EMPTY_REMEDY, "warning")
