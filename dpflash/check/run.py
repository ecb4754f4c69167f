"""One check from its arguments to its report: the first runs, then everything that they allow."""

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
from .batch import batch_size, mapped
from .coupling import check_coupling
from .layers import check_first_dimensions, check_modules, check_private_backward, check_reach
from .reduction import check_reduction
from .report import ITSELF, LOSS_FN, LOSS_REMEDY, CheckReport, Findings, listed, said
from .rows import check_rows
from .subject import LossFunction, Subject, Trial, coarsest_eps, randomness_restored

_MEND = "mend it first"
_DECLARE_REMEDY = (
    "or, where loss.backward() is called on this scalar in training, declare loss_reduction="
    "'mean' or 'sum' over samples, here and in make_private"
)
_EMPTY_REMEDY = (
    "nothing, over the private loader, whose batches are never empty; under BatchMemoryManager "
    "skip the forward and backward with `if len(x):`, never optimizer.step()"
)

_DATA = (
    "the data set and its collate_fn: each row must come of its own entry alone (no mixup, no "
    "statistics or weights over the batch)"
)


def run_check(
    model: nn.Module, batch: Any, loss_fn: LossFunction, *, loss_reduction: str | None = None
) -> CheckReport:
    """`PrivacyEngine.check`, see there."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={type(model).__name__}: expected a torch.nn.Module")
    one_of(loss_reduction=(loss_reduction, (None, "mean", "sum")))
    if not callable(loss_fn):
        raise ValueError(
            f"loss_fn={type(loss_fn).__name__}: expected a function loss_fn(model, batch) -> "
            f"{'a scalar' if loss_reduction else 'losses [B]'}"
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
            "noise of boundaries: switched off for the comparisons, with their clipping left on"
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
    # A copy of a private model is plain.
    try:
        plain = copy.deepcopy(model)
    except Exception as error:
        findings.add("run", ITSELF, f"it cannot be copied: {said(error)}", "mend copy.deepcopy")
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
        findings.not_checked.append("what comes after a failed run: mend it and check again")
        return
    check_first_dimensions(trial, findings)
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
        findings.not_checked.append("dropout: switched off for the comparisons")
    if not model.training:
        findings.not_checked.append("training mode: the model is in eval mode; call model.train()")


def _first_run(trial: Trial, findings: Findings) -> bool:
    """Whether the loss can be had as the user has it."""
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
        findings.add("run", LOSS_FN, f"loss_fn(model, batch) raised {said(error)}", _MEND)
        return False
    finally:
        for hook in hooks:
            hook.remove()
    if not called:
        findings.add(
            "run",
            LOSS_FN,
            "it calls no module of the model that it is given",
            "call the argument of loss_fn, not a model of the outside",
        )
        return False
    return _losses_fit(trial, losses, findings)


def _losses_fit(trial: Trial, losses: Any, findings: Findings) -> bool:
    reduction = trial.loss_reduction
    expected = f"expected one loss per sample, [{trial.size}]"
    remedy = LOSS_REMEDY
    if reduction:
        expected = f"expected a scalar, as loss_reduction={reduction!r} declares"
        remedy = (
            f"return losses.{reduction}() over samples, or leave loss_reduction=None where "
            "training calls engine.backward(losses)"
        )
    if not isinstance(losses, Tensor):
        found = f"it returned {type(losses).__name__}; {expected}"
    elif losses.ndim == 0 and not reduction:
        found = f"it returned a scalar, in which samples cannot be told apart; {expected}"
        remedy = f"{LOSS_REMEDY}; {_DECLARE_REMEDY}"
    elif tuple(losses.shape) != trial.losses_shape(trial.size):
        found = f"it returned shape {tuple(losses.shape)}; {expected}"
    elif not losses.is_floating_point():
        found = f"it returned {losses.dtype}; expected a floating-point tensor"
    elif not losses.requires_grad:
        found = "its losses do not require grad: they were detached or made under no_grad"
    elif not bool(losses.isfinite().all()):
        found = "its losses are not finite, so they cannot be compared"
    else:
        shape = "a scalar" if reduction else f"[{trial.size}]"
        findings.checked.append(f"losses: {shape}, finite, differentiable")
        return True
    findings.add("loss", LOSS_FN, found, remedy)
    return False


def _widen(trial: Trial, model: nn.Module, findings: Findings) -> bool:
    """Take the comparisons to float64 where the model can; whether there is a backward."""
    index = None if trial.loss_reduction else 0
    wide = mapped(trial.batch, lambda t: t.double() if t.is_floating_point() else t)
    try:
        subject = Subject(copy.deepcopy(model).double(), trial.subject.loss_fn)
        subject.loss_and_grads(wide, index)
    except Exception as error:
        findings.not_checked.append(f"float64: the model does not take it ({said(error)})")
    else:
        trial.try_on(subject, wide)
    try:
        trial.subject.loss_and_grads(trial.batch, index)
    except Exception as error:
        what = "the scalar" if index is None else "losses[0]"
        findings.add("run", LOSS_FN, f"the backward of {what} raised {said(error)}", _MEND)
        return False
    # Between rounding, which grows with depth, and what coupling does.
    trial.allow(coarsest_eps(trial.subject, trial.batch) ** (2 / 3))
    return True


def _repeats(trial: Trial, findings: Findings) -> bool:
    """Whether the same batch gives the same losses again, and with another seed."""
    subject = trial.subject
    first = subject.losses(trial.batch).detach()
    for index in trial.indices:
        subject.losses(trial.pick([index] * trial.size))
    again = subject.losses(trial.batch).detach()
    if changed := subject.changed_parameters():
        findings.add(
            "state",
            changed[0],
            "the forward changes this parameter, so without noise",
            "leave parameters alone in forward",
        )
        return False
    if not trial.close(first, again):
        findings.add(
            "state",
            ITSELF,
            "a batch gives other losses after another one was seen: "
            "something outside of the buffers is kept between calls",
            "keep nothing of a batch between calls",
        )
        return False
    if not trial.close(first, subject.losses(trial.batch, seed=1).detach()):
        trial.set_random()
        remedy = "to have the rest checked, switch the randomness off"
        if dropping := subject.dropping():
            remedy = (
                "switch dropout off while checking (dropout=0.0 or model.eval()): "
                f"{listed(dropping)} may drop inside of an operation of its own; or switch off "
                "what else is random"
            )
        findings.add(
            "random",
            ITSELF,
            "the losses depend on the seed, dropout layers apart; samples are "
            "compared at their own place in batches of the same size only",
            remedy,
            "warning",
        )
        findings.not_checked.append("samples alone or at another place: the model is random")
    return True


def _check_state(trial: Trial, findings: Findings) -> None:
    """Buffers that a batch leaves behind are released without noise."""
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
        # Such a module is to be replaced, with its buffers.
        if (name.rpartition(".")[0] or ITSELF) in unsupported:
            continue
        findings.add(
            "state",
            name,
            "this buffer is computed from the samples of the batch: it "
            "carries them into later batches and into the state_dict, without noise",
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
        found = f"gives losses of shape {tuple(losses.shape)}, not {list(expected)}"
    except Exception as error:
        found = f"raises {said(error)}"
    findings.add("empty_batch", LOSS_FN, f"an empty batch {found}", _EMPTY_REMEDY, "warning")
