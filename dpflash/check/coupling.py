"""Whether losses[i] and its gradient are those of sample i alone, whatever the others are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batch import TARGETS, VALUES, Place, alterations, mapped, tensors
from .report import LOSS_FN, LOSS_REMEDY, Findings, listed, said
from .subject import LossAndGrads, Trial
from .trace import blamed, locate


class _Company(NamedTuple):
    """A place for a sample: how it came about, and what kind of tensors of the others changed."""

    how: str
    place: Place
    altered: str = ""


@dataclass
class _Difference:
    """Sample `index` is not in this company what it was in the batch."""

    index: int
    company: _Company
    loss: float
    grads: dict[str, float]

    def worst_grad(self) -> float:
        return max(self.grads.values(), default=0.0)


def check_coupling(trial: Trial, findings: Findings) -> dict[int, LossAndGrads]:
    """Sample i in the batch, against sample i alone and in other companies.

    Returns some of the samples with their losses and gradients.
    """
    reference: dict[int, LossAndGrads] = {}
    differences: list[_Difference] = []
    foreign: list[str] = []
    compared: dict[str, str] = {}
    flagged = {problem.where for problem in findings.problems}
    for index in trial.indices:
        reference[index] = trial.subject.loss_and_grads(trial.batch, index)
        for company in _companies(trial, index):
            place = company.place
            try:
                found = trial.subject.loss_and_grads(place.batch, place.index)
            except Exception as error:
                findings.leave_out(f"samples when {company.how}: {said(error)}")
                continue
            compared[company.how] = company.altered
            if not found.finite() and company.altered == VALUES:
                continue
            loss, grads = _difference(trial, reference, index, found)
            if loss or grads:
                differences.append(_Difference(index, company, loss, grads))
        foreign += _derivatives_by_others(trial, index, flagged)
    findings.checked.append(
        f"loss and gradient of samples {', '.join(map(str, trial.indices))}, up to "
        f"{trial.tolerance:.0e} of their size, when " + "; ".join(compared)
    )
    if TARGETS not in compared.values():
        findings.not_checked.append("other targets to ignore: found no integer targets to vary")
    if differences:
        _report(trial, differences, foreign[:1], findings)
    elif foreign:
        findings.add("coupling", LOSS_FN, foreign[0], LOSS_REMEDY)
    return reference


def _companies(trial: Trial, index: int) -> Iterator[_Company]:
    size = trial.size
    yield _Company("all are copies of it", Place(trial.pick([index] * size), index, size))
    neighbours = [(index + 1) % size] * size
    neighbours[index] = index
    yield _Company(
        "the others are copies of one other", Place(trial.pick(neighbours), index, size)
    )
    others = [other for other in range(size) if other != index]
    for kind, how, batch in alterations(trial.batch, others, "the others"):
        yield _Company(how, Place(batch, index, size), kind)
    if not trial.random:
        backwards = trial.pick(range(size - 1, -1, -1))
        yield _Company("the batch is reversed", Place(backwards, size - 1 - index, size))
        yield _Company("it is alone", Place(trial.pick([index]), 0, 1))


def _difference(
    trial: Trial, reference: dict[int, LossAndGrads], index: int, b: LossAndGrads
) -> tuple[float, dict[str, float]]:
    """Relative differences beyond the tolerance: of the loss, and of each parameter's grad."""
    a = reference[index]
    usual = max(abs(s.loss) for s in reference.values())
    scale = max(abs(a.loss), abs(b.loss), usual)
    loss = abs(a.loss - b.loss) / scale if scale else 0.0
    # One small gradient may be all rounding; what counts is its part in the sample's own.
    largest = max(s.norm() for s in reference.values())
    grads = trial.apart(a.grads, b.grads, max(a.norm(), b.norm(), 1e-3 * largest))
    return (0.0 if loss <= trial.tolerance else loss), grads


def _derivatives_by_others(trial: Trial, index: int, flagged: set[str]) -> list[str]:
    """Derivatives of losses[i] by inputs[j], and by what embeddings give for sample j."""
    batch = mapped(
        trial.batch,
        lambda t: t.detach().clone().requires_grad_() if t.is_floating_point() else t,
    )
    leaves = [("the batch's tensors", t) for t in tensors(batch) if t.requires_grad]
    hooks = []
    for name, module in trial.subject.model.named_modules():
        if isinstance(module, nn.Embedding) and name not in flagged:

            def note(_: Any, __: Any, out: Tensor, name: str = name) -> None:
                if out.requires_grad and out.ndim and out.shape[0] == trial.size:
                    leaves.append((f"the output of '{name}'", out))

            hooks.append(module.register_forward_hook(note))
    try:
        losses = trial.subject.losses(batch)
    finally:
        for hook in hooks:
            hook.remove()
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
                f"losses[{index}] has a derivative by other samples in {name}, "
                f"{math.sqrt(foreign / total):.1e} of the whole"
            )
    return found


def _report(
    trial: Trial, differences: list[_Difference], foreign: list[str], findings: Findings
) -> None:
    by_place: dict[str, list[_Difference]] = {}
    located: dict[str, str] = {}
    for difference in differences:
        how, place, _ = difference.company
        if how not in located:
            here = Place(trial.batch, difference.index, trial.size)
            located[how] = locate(trial, here, place)
        by_place.setdefault(located[how], []).append(difference)
    order = _another_order(trial)
    for where, group in by_place.items():
        worst = max(group, key=lambda d: max(d.loss, d.worst_grad()))
        hows = list(dict.fromkeys(d.company.how for d in group))
        hows.remove(worst.company.how)
        message = (
            f"losses[{worst.index}] moves by {worst.loss:.1e} and its gradient by "
            f"{worst.worst_grad():.1e} of its size when {worst.company.how}"
        )
        if hows:
            message += f" (likewise when {'; '.join(hows)})"
        if worst.grads:
            message += f". Parameters: {listed(list(worst.grads))}"
        message = ". ".join([message, *foreign, *order])
        remedy = LOSS_REMEDY
        if where != LOSS_FN:
            message, remedy = blamed(trial, where, message)
        findings.add("coupling", where, message, remedy)


def _another_order(trial: Trial) -> list[str]:
    """Whether the losses are those of the single samples, at other places."""
    if trial.random:
        return []
    losses = trial.subject.losses(trial.batch).detach().double()
    moved = []
    for index in range(trial.size):
        try:
            alone = trial.subject.losses(trial.pick([index])).detach().double()
        except Exception:  # reported by its batch size already
            return []
        distance = (losses - alone).abs() / losses.abs().max().clamp(min=1e-300)
        if float(distance[index]) > trial.tolerance:
            if float(distance.min()) > trial.tolerance:
                return []
            moved.append(f"that of sample {index} is losses[{int(distance.argmin())}]")
    return [f"The losses are in another order than the batch: {listed(moved)}"] if moved else []
