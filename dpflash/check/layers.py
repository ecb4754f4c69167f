"""Checks of a model's layers: private training supports them, and clips what autograd computes."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..grad_rules.convert import check_module, parts_of_layers
from ..sampling.tracker import BatchMark
from .private import made_private, named_in
from .report import ITSELF, Findings, message_and_remedy
from .subject import LossAndGrads, Trial


def check_modules(model: nn.Module, findings: Findings) -> None:
    """Report every module that make_private would refuse."""
    findings.checked.append("every module against the rules of make_private")
    for name, error in refused_modules(model):
        findings.add("unsupported", name, *message_and_remedy(error))


def refused_modules(model: nn.Module) -> Iterator[tuple[str, ValueError]]:
    """(name, error) of every module that make_private would refuse."""
    inside = parts_of_layers(model)
    for name, module in model.named_modules():
        try:
            check_module(name or ITSELF, module, is_inside=module in inside)
        except ValueError as error:
            yield name or ITSELF, error


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
    backward = made_private(subject, trial.loss_reduction)
    try:
        backward.step.tracker.begin_microbatch(BatchMark(0, trial.size, last=True), epoch=0)
        backward.backward(subject.losses(trial.batch))
    except Exception as error:
        findings.add("unsupported", named_in(error, subject.model), *message_and_remedy(error))
        return
    findings.checked.append(comparison)
    tolerance = max(trial.tolerance, 1e-4)  # sums are fp32
    for name, parameter in subject.trained.items():
        if parameter.grad is not None:
            findings.add(
                "outside_use",
                name,
                "it is used outside of its own module, where its gradient is not clipped",
                "call the module itself, not F.linear(x, m.weight); what the loss needs, such as "
                "a temperature, use in the forward of the module that owns it",
            )
    if not (findings.errors() or trial.random or backward.statistics.squared_norms is None):
        norms = backward.statistics.squared_norms.sqrt().tolist()
        _compare_norms(trial, norms, reference, tolerance, findings)


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
