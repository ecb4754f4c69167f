"""Checks that losses[i] and its gradient depend on sample i alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..verification.nested import tensors_of
from .batch import TARGETS, VALUES, Place, alterations, mapped
from .report import LOSS_FN, LOSS_REMEDY, Findings, error_text, listed
from .subject import LossAndGrads, Trial
from .trace import coupling_problem, locate


class _Variant(NamedTuple):
    """A sample among other samples: a description, its place, and the kind of altered tensors."""

    how: str
    place: Place
    altered: str = ""


@dataclass
class _Difference:
    """Relative differences of sample `index` between the batch and a variant of it."""

    index: int
    variant: _Variant
    loss: float
    grads: dict[str, float]

    def worst_grad(self) -> float:
        return max(self.grads.values(), default=0.0)


def check_coupling(trial: Trial, findings: Findings) -> dict[int, LossAndGrads]:
    """Compare sample i in the batch with sample i alone and among other samples.

    Returns the losses and gradients of some samples, by index.
    """
    reference: dict[int, LossAndGrads] = {}
    differences: list[_Difference] = []
    foreign: list[str] = []
    compared: dict[str, str] = {}
    tried: set[str] = set()
    shared = _shared_embeddings(trial)
    for index in trial.indices:
        reference[index] = trial.subject.loss_and_grads(trial.batch, index)
        for variant in _variants(trial, index):
            place = variant.place
            try:
                found = trial.subject.loss_and_grads(place.batch, place.index)
            except Exception as error:
                tried.add(variant.altered)
                error_raised = f"the losses raise {error_text(error)}"
                findings.leave_out(f"samples when {variant.how}: {error_raised}")
                continue
            compared[variant.how] = variant.altered
            if not found.finite() and variant.altered == VALUES:
                continue
            loss, grads = _difference(trial, reference, index, found)
            if loss or grads:
                differences.append(_Difference(index, variant, loss, grads))
        foreign += _derivatives_by_others(trial, index, shared)
    findings.checked.append(
        f"loss and gradient of samples {', '.join(map(str, trial.indices))}, up to "
        f"{trial.tolerance:.0e} of their size, when " + "; ".join(compared)
    )
    if TARGETS not in {*compared.values(), *tried}:
        findings.not_checked.append("ignored targets: found no integer targets to alter")
    if differences:
        _report(trial, differences, foreign[:1], findings)
    elif foreign:
        findings.add("coupling", LOSS_FN, foreign[0], LOSS_REMEDY)
    return reference


def _variants(trial: Trial, index: int) -> Iterator[_Variant]:
    size = trial.size
    yield _Variant("all are copies of it", Place(trial.pick([index] * size), index, size))
    neighbors = [(index + 1) % size] * size
    neighbors[index] = index
    yield _Variant("the others are copies of one other", Place(trial.pick(neighbors), index, size))
    others = [other for other in range(size) if other != index]
    for kind, how, batch in alterations(trial.batch, others, "the others"):
        yield _Variant(how, Place(batch, index, size), kind)
    if not trial.random:
        backwards = trial.pick(range(size - 1, -1, -1))
        yield _Variant("the batch is reversed", Place(backwards, size - 1 - index, size))
        yield _Variant("it is alone", Place(trial.pick([index]), 0, 1))


def _difference(
    trial: Trial, reference: dict[int, LossAndGrads], index: int, b: LossAndGrads
) -> tuple[float, dict[str, float]]:
    """Relative differences beyond the tolerance: of the loss and of each parameter's gradient."""
    a = reference[index]
    largest_loss = max(abs(s.loss) for s in reference.values())
    scale = max(abs(a.loss), abs(b.loss), largest_loss)
    loss = abs(a.loss - b.loss) / scale if scale else 0.0
    # Compare with the norm of the whole gradient: a small parameter gradient may be all rounding.
    largest = max(s.norm() for s in reference.values())
    grads = trial.apart(a.grads, b.grads, max(a.norm(), b.norm(), 1e-3 * largest))
    return (0.0 if loss <= trial.tolerance else loss), grads


def _shared_embeddings(trial: Trial) -> list[bool]:
    """Whether each call of an embedding returns another number of rows than samples.

    Found with one sample less, since B samples may have B positions.
    """
    try:
        _, outputs = _embedded(trial, trial.pick(range(trial.size - 1)))
    except Exception:  # already reported as kind "batch_size"
        return []
    return [out.shape[0] != trial.size - 1 for _, out in outputs]


def _derivatives_by_others(trial: Trial, index: int, shared: list[bool]) -> list[str]:
    """Nonzero derivatives of losses[i] by other samples' inputs and embedding outputs."""
    batch = mapped(
        trial.batch,
        lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t,
    )
    leaves = [("the batch's tensors", t) for _, t in tensors_of(batch) if t.requires_grad]
    losses, outputs = _embedded(trial, batch)
    if len(shared) != len(outputs):
        shared = [False] * len(outputs)
    leaves += [
        (f"the output of '{name}'", out)
        for (name, out), is_shared in zip(outputs, shared, strict=True)
        if out.requires_grad and out.shape[0] == trial.size and not is_shared
    ]
    if not leaves or not losses.requires_grad:
        return []
    derivatives = torch.autograd.grad(losses[index], [t for _, t in leaves], allow_unused=True)
    found = []
    for (name, _), grad in zip(leaves, derivatives, strict=True):
        if grad is None:
            continue
        squares = grad.double().square().unsqueeze(1).flatten(1).sum(1)
        total = float(squares.sum())
        foreign = total - float(squares[index])
        if foreign > trial.tolerance**2 * total and foreign > 0:
            found.append(
                f"losses[{index}] has a nonzero derivative with respect to other samples in "
                f"{name}, {math.sqrt(foreign / total):.1e} of the total"
            )
    return found


def _embedded(trial: Trial, batch: Any) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """The losses of a batch, and the output of each call of an embedding, with its name."""
    outputs: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: outputs.append((name, out)))
        for name, module in trial.subject.model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        return trial.subject.losses(batch), outputs
    finally:
        for hook in hooks:
            hook.remove()


def _report(
    trial: Trial, differences: list[_Difference], foreign: list[str], findings: Findings
) -> None:
    by_place: dict[str, list[_Difference]] = {}
    located: dict[str, str] = {}
    for difference in differences:
        how, place, _ = difference.variant
        if how not in located:
            original = Place(trial.batch, difference.index, trial.size)
            located[how] = locate(trial, original, place)
        by_place.setdefault(located[how], []).append(difference)
    order = _another_order(trial)
    for where, group in by_place.items():
        worst = max(group, key=lambda d: max(d.loss, d.worst_grad()))
        hows = list(dict.fromkeys(d.variant.how for d in group))
        hows.remove(worst.variant.how)
        changes = (
            f"changes by {worst.loss:.1e} and its gradient by {worst.worst_grad():.1e} of its size"
        )
        if not math.isfinite(worst.loss + worst.worst_grad()):
            changes = "or its gradient becomes NaN or infinite"
        message = f"losses[{worst.index}] {changes} when {worst.variant.how}"
        if hows:
            message += f" (likewise when {'; '.join(hows)})"
        if worst.grads:
            message += f". Parameters: {listed(list(worst.grads))}"
        message = ". ".join([message, *foreign, *order])
        remedy = LOSS_REMEDY
        if where != LOSS_FN:
            message, remedy = coupling_problem(trial, where, message)
        findings.add("coupling", where, message, remedy)


def _another_order(trial: Trial) -> list[str]:
    """A message if the losses equal those of single samples, but in another order."""
    if trial.random:
        return []
    losses = trial.subject.losses(trial.batch).detach().double()
    moved = []
    for index in range(trial.size):
        try:
            alone = trial.subject.losses(trial.pick([index])).detach().double()
        except Exception:  # already reported as kind "batch_size"
            return []
        distance = (losses - alone).abs() / losses.abs().max().clamp(min=1e-300)
        if float(distance[index]) > trial.tolerance:
            if float(distance.min()) > trial.tolerance:
                return []
            moved.append(f"that of sample {index} is losses[{int(distance.argmin())}]")
    return [f"The losses are in another order than the batch: {listed(moved)}"] if moved else []
