"""Checks of a model's layers: private training supports them, and their inputs are batch-first."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from ..clipping.backward import PrivateBackward
from ..clipping.groups import flat_groups
from ..clipping.planner import STORED
from ..clipping.row_origin import is_flattened
from ..grad_rules import rule_for
from ..grad_rules.batch_second import batch_second
from ..grad_rules.convert import attach, check_module, owners, parts_of_layers
from ..grad_rules.generic import PrivateLeaf
from ..optimize.levels import PLAIN
from ..optimize.wrapper import ForwardWrapper
from ..sampling.tracker import BatchMark, BatchTracker
from ..step import ClippedSums
from .batch import tensors
from .report import ITSELF, LOSS_FN, Findings, error_text, message_and_remedy
from .subject import LossAndGrads, Trial

_BATCH_FIRST_REMEDY = (
    "make the batch the first dimension (batch_first=True, x.transpose(0, 1), [B, T] flattened "
    "right before the layer), or freeze the layer with requires_grad_(False)"
)
_INDICES_REMEDY = (
    "if all samples share its indices, such as positions, pass indices[None, :]; if there is one "
    "index per sample, indices[:, None]; do not flatten [B, T]; or freeze the layer with "
    "requires_grad_(False)"
)


def check_modules(model: nn.Module, findings: Findings) -> None:
    """Report every module that make_private would refuse."""
    findings.checked.append("every module against the rules of make_private")
    inside = parts_of_layers(model)
    for name, module in model.named_modules():
        try:
            check_module(name or ITSELF, module, is_inside=module in inside)
        except ValueError as error:
            findings.add("unsupported", name or ITSELF, *message_and_remedy(error))


def check_first_dimensions(trial: Trial, findings: Findings) -> None:
    """Check that the first dimension of the inputs of trained layers is B, for several B."""
    sizes = sorted({trial.size, trial.size - 1, 1}, reverse=True)
    seen: dict[int, dict[str, list[tuple[int, ...]]]] = {}
    for size in sizes:
        try:
            seen[size] = _shapes(trial, trial.pick(range(size)))
        except Exception as error:
            findings.add(
                "batch_size",
                LOSS_FN,
                f"{size} sample(s) alone raise {error_text(error)}",
                "private training varies the batch size: make the model independent of it",
            )
    findings.checked.append(
        f"first dimension of the inputs of trained layers, B = {', '.join(map(str, seen))}"
    )
    modules = dict(trial.subject.model.named_modules())
    for name in {n: None for shapes in seen.values() for n in shapes}:
        found = {size: set(shapes.get(name, ())) for size, shapes in seen.items()}
        # A first dimension of 1 is shared by all samples, such as positions [1, T].
        if all(f <= {(size,), (1,)} for size, f in found.items()):
            continue
        shown = ", ".join(
            f"{'/'.join(str(d[0]) if d else 'scalar' for d in sorted(f)) or 'not called'} "
            f"for B={size}"
            for size, f in found.items()
        )
        embedding = isinstance(modules["" if name == ITSELF else name], nn.Embedding)
        findings.add(
            "first_dimension",
            name,
            f"the first dimension of its input is not the batch: {shown}. If it happened to equal "
            "B, clipping would use norms of something other than samples",
            _INDICES_REMEDY if embedding else _BATCH_FIRST_REMEDY,
        )


def _shapes(trial: Trial, batch: Any) -> dict[str, list[tuple[int, ...]]]:
    """First dimensions of the inputs of each trained module; () for a scalar.

    Tokens whose rows are those of samples, in order, have B, as in private training.
    """
    subject = trial.subject
    shapes: dict[str, list[tuple[int, ...]]] = {}
    modules = dict(subject.model.named_modules())
    hooks, size = [], next(t.shape[0] for t in tensors(batch) if t.ndim)
    second = batch_second(subject.model)
    for name, _ in owners(subject.model, subject.trained.values()):

        def note(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
            if rule_for(module) is not PrivateLeaf:
                inputs = inputs[:1]
            dim = int(id(module) in second)
            shapes.setdefault(name or ITSELF, []).extend(
                (size,) if is_flattened(t, size) else tuple(t.shape[dim : dim + 1]) for t in inputs
            )

        hooks.append(modules[name].register_forward_pre_hook(note, with_kwargs=True))
    try:
        losses = subject.losses(batch)
    finally:
        for hook in hooks:
            hook.remove()
    expected = trial.losses_shape(size)
    if tuple(losses.shape) != expected:
        raise ValueError(f"losses has shape {tuple(losses.shape)}, expected {list(expected)}")
    return shapes


def check_reach(trial: Trial, samples: list[LossAndGrads], findings: Findings) -> None:
    """Report trainable parameters without a gradient, as one problem."""
    findings.checked.append("which trainable parameters get a gradient")
    names = [n for n in trial.subject.trained if all(s.grads[n] is None for s in samples)]
    if names:
        which, them = f"these {len(names)} trainable parameters", "them"
        if len(names) == 1:
            which, them = "this trainable parameter", "it"
        findings.add(
            "no_gradient",
            ", ".join(names),
            f"no loss depends on {which}: training would only add noise to {them}",
            f"freeze {them} with requires_grad_(False), or use {them}",
            "warning",
        )


def check_private_backward(
    trial: Trial, reference: dict[int, LossAndGrads], findings: Findings
) -> None:
    """Compare a private backward without clipping to ordinary gradients: norms and sums.

    Makes the model of the trial private.
    """
    comparison = "a private backward: per-sample norms and sums against ordinary gradients"
    if findings.errors():
        findings.not_checked.append(f"{comparison}: fix the errors first")
        return
    subject = trial.subject
    trained = list(subject.trained.values())
    sums = ClippedSums(
        trained, names={p: n for n, p in subject.trained.items()}, tracker=BatchTracker()
    )
    backward = PrivateBackward(
        flat_groups(trained),
        sums,
        STORED,
        loss_reduction=trial.loss_reduction,
        clip_function="hard",
    )
    for parameter in subject.trained.values():
        parameter.grad = None
    attach(subject.model, backward)
    ForwardWrapper(subject.model, backward, PLAIN).put()
    try:
        sums.tracker.begin_batch(BatchMark(0, trial.size, last=True), epoch=0)
        backward.backward(subject.losses(trial.batch))
    except Exception as error:
        named = re.search(r"'([^']+)'", str(error))
        where = named.group(1) if named else ITSELF
        findings.add("unsupported", where, *message_and_remedy(error))
        return
    findings.checked.append(comparison)
    tolerance = max(trial.tolerance, 1e-4)  # sums are fp32
    _compare_sums(sums.sums, subject.trained, tolerance, findings)
    if not (findings.errors() or trial.random or backward.statistics.squared_norms is None):
        norms = backward.statistics.squared_norms.sqrt().tolist()
        _compare_norms(trial, norms, reference, tolerance, findings)


def _compare_sums(
    sums: dict[nn.Parameter, Tensor],
    trained: dict[str, nn.Parameter],
    tolerance: float,
    findings: Findings,
) -> None:
    for name, parameter in trained.items():
        ordinary, private = parameter.grad, sums.get(parameter)
        if ordinary is None:
            continue
        private = torch.zeros_like(ordinary) if private is None else private
        distance = float((ordinary.double() - private.double()).norm())
        if not distance <= tolerance * float(ordinary.double().norm()):
            findings.add(
                "outside_use",
                name,
                "it is used outside of its own module, where its gradient is not clipped",
                "call the module itself, not F.linear(x, m.weight)",
            )


def _compare_norms(
    trial: Trial,
    norms: list[float],
    reference: dict[int, LossAndGrads],
    tolerance: float,
    findings: Findings,
) -> None:
    for index, sample in reference.items():
        private, plain = norms[index], sample.norm()
        if not abs(private - plain) <= tolerance * max(private, plain):
            loss = f"losses[{index}]"
            if trial.loss_reduction:
                loss = f"the loss of sample {index} alone"
            findings.add(
                "first_dimension",
                ITSELF,
                f"the gradient of {loss} has the norm {plain:.4g}, but the private backward "
                f"computes {private:.4g}",
                "pass every trained layer inputs whose first dimension is the batch",
            )
            return
