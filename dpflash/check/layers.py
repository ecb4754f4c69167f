"""Checks that private training supports a model's layers and computes autograd's gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..grad_rules.convert import check_module, parts_of_layers
from .private import PrivateCopy
from .report import ITSELF, Findings, message_and_remedy
from .subject import Subject

NORMS = "a private backward: per-sample norms and sums against ordinary gradients"


def check_modules(model: nn.Module, findings: Findings) -> None:
    """Report every module that make_private would refuse."""
    findings.checked.append("every module against the rules of make_private")
    for name, error in refused_modules(model):
        findings.add("unsupported", name, *message_and_remedy(error))


def refused_modules(model: nn.Module) -> Iterator[tuple[str, ValueError]]:
    """Yield (name, error) of each module that make_private would refuse."""
    inside = parts_of_layers(model)
    for name, module in model.named_modules():
        try:
            check_module(name or ITSELF, module, is_inside=module in inside)
        except ValueError as error:
            yield name or ITSELF, error


def check_reach(subject: Subject, findings: Findings) -> None:
    """Report trainable parameters without a gradient, as one problem."""
    findings.checked.append("which trainable parameters get a gradient")
    total = subject.losses(subject.batch).sum()
    grads = torch.autograd.grad(total, [*subject.trained.values()], allow_unused=True)
    names = [n for n, grad in zip(subject.trained, grads, strict=True) if grad is None]
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


def check_private_backward(subject: Subject, findings: Findings) -> None:
    """Compare a private backward's per-sample norms with the norms of ordinary gradients.

    Also report parameters that are used outside of their module. Makes the tested model private.
    """
    samples = {} if subject.is_random else {i: subject.pick([i]) for i in subject.indices}
    norms = {i: subject.result(alone).sizes[1] for i, alone in samples.items()}
    private = PrivateCopy(subject)
    try:
        private.sums(subject.batch)
    except Exception as error:
        findings.add("unsupported", private.named_in(error), *message_and_remedy(error))
        return
    findings.checked.append(NORMS)
    outside = [n for n, parameter in subject.trained.items() if parameter.grad is not None]
    for name in outside:
        findings.add(
            "outside_use",
            name,
            "it is used outside of its own module, where its gradient is not clipped",
            "call the module itself, not F.linear(x, m.weight); use a parameter that the loss "
            "needs, such as a temperature, in the forward of the module that owns it",
        )
    squares = private.backward.statistics.squared_norms
    if outside or squares is None:
        return
    found = squares.sqrt().tolist()
    tolerance = max(subject.tolerance, 1e-4)  # sums are fp32
    for i, norm in norms.items():
        if not abs(found[i] - norm) <= tolerance * max(found[i], norm):
            findings.add(
                "first_dimension",
                ITSELF,
                f"the gradient of the loss of sample {i} alone has the norm {norm:.4g}, but the "
                f"private backward computes {found[i]:.4g}",
                "pass every trained layer inputs whose first dimension is the batch",
            )
            return
