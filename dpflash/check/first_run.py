"""First run of a check: loss_fn must return usable losses that train only the model."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from ..verification.nested import map_tensors
from ..verification.uncovered import Hidden, described, leaves_past_gates
from .report import ITSELF, LOSS_FN, LOSS_REMEDY, Findings, error_text
from .state import FIX_FIRST
from .subject import Subject

_DECLARE_REMEDY = (
    "or, if training calls loss.backward() on this scalar, declare loss_reduction='mean' or "
    "'sum' over samples, here and in make_private"
)


def first_run(subject: Subject, findings: Findings) -> bool:
    """Run loss_fn on the user's model and batch; return whether its result can be checked."""
    if not subject.trained:
        findings.add("run", ITSELF, "no parameter is trainable", "call requires_grad_(True)")
        return False
    called: list[str] = []
    hooks = [
        m.register_forward_hook(lambda *_: called.append("")) for m in subject.model.modules()
    ]
    try:
        losses = subject.losses(subject.batch)
    except Exception as error:
        message = f"loss_fn(model, batch) raised {error_text(error)}"
        findings.add("run", LOSS_FN, message, FIX_FIRST)
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
    if not _losses_fit(subject, losses, findings):
        return False
    _check_leaves(subject, losses, findings)
    return True


def _check_leaves(subject: Subject, losses: Tensor, findings: Findings) -> None:
    findings.checked.append("whether the losses train anything outside of the model")
    known = {id(p) for p in subject.trained.values()}
    model, again = subject.model, subject.losses(subject.batch)
    known_twice = {id(x) for x in leaves_past_gates(again.grad_fn, model)}
    for leaf in leaves_past_gates(losses.grad_fn, model):
        # If the loss computes gradients of inputs, the inputs are new tensors in each run.
        is_new = not isinstance(leaf, nn.Parameter | Hidden) and id(leaf) not in known_twice
        if id(leaf) not in known and not is_new:
            findings.add("outside_use", LOSS_FN, *described(leaf, model))


def _losses_fit(subject: Subject, losses: Any, findings: Findings) -> bool:
    reduction = subject.loss_reduction
    shape = "a scalar" if reduction else f"[{subject.size}]"
    expected = f"expected one loss per sample, {shape}"
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
    elif tuple(losses.shape) != subject.losses_shape(subject.size):
        found = f"it returned shape {tuple(losses.shape)}; {expected}"
    elif not losses.is_floating_point():
        found = f"it returned {losses.dtype}; expected a floating-point tensor"
    elif not losses.requires_grad:
        found = "its losses do not require grad: they were detached or computed under no_grad"
    elif not bool(losses.isfinite().all()):
        found = "its losses are not finite, so they cannot be compared"
    else:
        findings.checked.append(f"losses: {shape}, finite, differentiable")
        return True
    findings.add("loss", LOSS_FN, found, remedy)
    return False


def widened(subject: Subject, model: nn.Module, findings: Findings) -> Subject | None:
    """Return the subject in float64, or in its own dtype if float64 fails; None if both fail.

    Args:
        subject: the tested model, its loss and its batch; the first run succeeded.
        model: the model, of which another copy is made.
        findings: receives the errors.
    """
    batch = map_tensors(lambda t: t.double() if t.is_floating_point() else t, subject.batch)
    options = subject.loss_fn, batch, subject.size, subject.loss_reduction
    try:
        wide = Subject(copy.deepcopy(model).double(), *options, is_wide=True)
        wide.result(batch)
        return wide
    except Exception as error:
        why = f"the model or the loss does not support it ({error_text(error)})"
        findings.not_checked.append(f"float64: {why}")
    try:
        subject.result(subject.batch)
        return subject
    except Exception as error:
        name = "the scalar" if subject.loss_reduction else "losses[0]"
        message = f"the backward of {name} raised {error_text(error)}"
        findings.add("run", LOSS_FN, message, FIX_FIRST)
        return None
