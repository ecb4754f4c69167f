"""Checks that a scalar loss is the reduction over samples that the caller declares.

The gradients of single samples can be recovered from a scalar loss only if the scalar of every
batch is the mean (or the sum) of the scalars of its single samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from .batch import TARGETS, Place, alterations, pick
from .report import LOSS_FN, Findings, error_text, listed
from .subject import LossAndGrads, Trial, ends_and_middle
from .trace import coupling_problem, locate

_OVER_SAMPLES = (
    "compute each sample's loss from that sample alone and reduce over samples last: "
    "dpflash.losses.cross_entropy(logits, targets).{reduction}(). A mean over the batch's valid "
    "tokens, the default of Hugging Face models, is not a reduction over samples"
)
_BOUNDARY = (
    "a boundary in the model clips gradients that this mean has divided by the batch size: "
    "return losses [B] with loss_reduction=None, or return losses.sum() and declare "
    "loss_reduction='sum'"
)
_UNVARIED = (
    "samples of unequal lengths: no integer targets could be ignored, so a loss divided by the "
    "batch's tokens is found only if the samples of the batch itself have unequal lengths"
)


class _Equation(NamedTuple):
    """Batches `left` and `right` whose scalars are related if the declared reduction is right.

    Either `right` are the single samples of `left`, or both are two batches of the same samples.
    `same` are pairs of places of one sample, left and right; the model must treat the sample
    equally at both. `altered` is the kind of tensors that were altered.
    """

    how: str
    left: list[Any]
    right: list[Any]
    same: list[tuple[Place, Place]]
    altered: str = ""


@dataclass
class _Sum:
    """A sum of scalars and gradients, and the sums of their absolute values and norms."""

    loss: float = 0.0
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    loss_size: float = 0.0
    grad_size: float = 0.0

    def add(self, found: LossAndGrads) -> None:
        self.loss += found.loss
        self.loss_size += abs(found.loss)
        self.grad_size += found.norm()
        for name, grad in found.grads.items():
            total = self.grads.get(name)
            self.grads[name] = total if grad is None else grad if total is None else total + grad

    def finite(self) -> bool:
        return math.isfinite(self.loss_size) and math.isfinite(self.grad_size)


class _Floors(NamedTuple):
    """Minimum scales for relative differences, used if the terms of an equation are smaller."""

    loss: float
    grad: float


class _Outcome(NamedTuple):
    """The relative errors of an equation; 0 within rounding.

    `other_fits` is whether the equation holds for the reduction that was not declared.
    """

    equation: _Equation
    loss: float
    grads: dict[str, float]
    other_fits: bool

    def worst(self) -> float:
        errors = [self.loss, *self.grads.values()]
        return max(errors) if all(map(math.isfinite, errors)) else math.inf


def check_reduction(trial: Trial, findings: Findings) -> dict[int, LossAndGrads]:
    """Compare the scalars of several batches with those of their single samples.

    Returns the scalars and gradients of some single samples, by index; empty if they cannot be
    computed.
    """
    singles = _singles(trial, findings)
    finite = [single for single in singles.values() if single.finite()]
    # A small gradient may be all rounding, so compare with the largest one.
    floors = _Floors(
        max((abs(single.loss) for single in finite), default=0.0),
        1e-3 * max((single.norm() for single in finite), default=0.0),
    )
    outcomes = []
    for equation in _compositions(trial) if singles else _exchanges(trial):
        try:
            outcome = _outcome(trial, equation, floors)
        except Exception as error:
            findings.leave_out(f"the scalar for {equation.how}: {error_text(error)}")
            continue
        if outcome is None:
            findings.leave_out(f"the scalar for {equation.how}: it is not finite")
        else:
            outcomes.append(outcome)
    which = (
        f"as the {trial.loss_reduction} of the single samples'" if singles else "of two batches"
    )
    findings.checked.append(
        f"scalar and gradient {which}, up to {trial.tolerance:.0e} of their size, for "
        + "; ".join(outcome.equation.how for outcome in outcomes)
    )
    if all(outcome.equation.altered != TARGETS for outcome in outcomes):
        findings.leave_out(_UNVARIED)
    _report(trial, outcomes, findings)
    return singles


def _singles(trial: Trial, findings: Findings) -> dict[int, LossAndGrads]:
    """Losses and gradients of single samples; empty if the model is random or fails on them."""
    why = "the model is random"
    if not trial.random:
        try:
            return {
                index: trial.subject.loss_and_grads(trial.pick([index]), None)
                for index in trial.indices
            }
        except Exception as error:
            why = f"a sample alone raises {error_text(error)}"
    findings.leave_out(f"whether the scalar is a mean or a sum: {why}")
    return {}


def _compositions(trial: Trial) -> Iterator[_Equation]:
    """Equations between a batch and its single samples."""
    size = trial.size
    rows = {"the whole batch": list(range(size))}
    for index in trial.indices:
        rows[f"samples {index} and {(index + 1) % size}"] = [index, (index + 1) % size]
    rows["sample 0 twice and sample 1"] = [0, 0, 1]
    rows[f"{size} copies of sample {size - 1}"] = [size - 1] * size
    batches = [(how, trial.pick(indices), len(indices), "") for how, indices in rows.items()]
    for kind, how, batch in alterations(trial.batch, _later(size), "the later samples"):
        batches.append((f"the batch when {how}", batch, size, kind))
    for how, batch, count, kind in batches:
        alone = [pick(batch, [index]) for index in range(count)]
        same = [(Place(batch, i, count), Place(alone[i], 0, 1)) for i in ends_and_middle(count)]
        yield _Equation(how, [batch], alone, same, kind)


def _exchanges(trial: Trial) -> Iterator[_Equation]:
    """Equations between two batches and the same two with their later samples exchanged.

    Every sample keeps its index.
    """
    size = trial.size
    later = _later(size)
    earlier, turned = range(later.start), [*range(1, size), 0]
    one, two = trial.batch, trial.pick(turned)
    mixed = trial.pick([*earlier, *turned[later.start :]])
    back = trial.pick([*turned[: later.start], *later])
    quads = [("an exchange of samples between two batches", one, two, mixed, back, "")]
    for every, last, first in zip(
        alterations(one, range(size), "all samples"),
        alterations(one, later, "the later samples"),
        alterations(one, earlier, "the earlier samples"),
        strict=True,
    ):
        how = f"an exchange after which {last.how}"
        quads.append((how, one, every.batch, last.batch, first.batch, last.kind))
    for how, a, b, ab, ba, kind in quads:
        same = [
            (Place(a, 0, size), Place(ab, 0, size)),
            (Place(a, size - 1, size), Place(ba, size - 1, size)),
        ]
        yield _Equation(how, [a, b], [ab, ba], same, kind)


def _later(size: int) -> range:
    return range(size // 2, size)


def _outcome(trial: Trial, equation: _Equation, floors: _Floors) -> _Outcome | None:
    """The errors of an equation; None if altered samples have scalars that are not finite."""
    left, right = _Sum(), _Sum()
    for side, batches in ((left, equation.left), (right, equation.right)):
        for batch in batches:
            side.add(trial.subject.loss_and_grads(batch, None))
    if equation.altered and not (left.finite() and right.finite()):
        return None
    mean = len(equation.left) / len(equation.right)
    declared, other = (mean, 1.0) if trial.loss_reduction == "mean" else (1.0, mean)
    loss, grads = _apart(trial, left, right, declared, floors)
    other_fits = mean < 1 and _apart(trial, left, right, other, floors) == (0.0, {})
    return _Outcome(equation, loss, grads, other_fits)


def _apart(
    trial: Trial, left: _Sum, right: _Sum, factor: float, floors: _Floors
) -> tuple[float, dict[str, float]]:
    scaled = {n: None if g is None else g * factor for n, g in right.grads.items()}
    # Relative to the sizes of the terms: they may cancel, but their rounding errors do not.
    loss_scale = max((left.loss_size + factor * right.loss_size) / 2, floors.loss)
    grad_scale = max((left.grad_size + factor * right.grad_size) / 2, floors.grad)
    loss = abs(left.loss - factor * right.loss) / loss_scale if loss_scale else 0.0
    grads = trial.apart(left.grads, scaled, grad_scale)
    return (0.0 if loss <= trial.tolerance else loss), grads


def _report(trial: Trial, outcomes: list[_Outcome], findings: Findings) -> None:
    failing = [outcome for outcome in outcomes if outcome.loss or outcome.grads]
    if not failing:
        return
    if all(outcome.other_fits for outcome in outcomes):
        declared = trial.loss_reduction
        other, fix = ("sum", "divide") if declared == "mean" else ("mean", "multiply")
        findings.add(
            "reduction",
            LOSS_FN,
            f"the scalar is the {other} of its samples' own losses, not their {declared} as "
            f"loss_reduction={declared!r} declares, so gradients would be clipped at the wrong "
            f"scale: {_differs(failing)}",
            f"declare loss_reduction='{other}', in make_private too, or {fix} the scalar by the "
            "number of samples in the batch",
        )
        return
    by_place: dict[str, list[_Outcome]] = {}
    for outcome in failing:
        places = (locate(trial, one, two) for one, two in outcome.equation.same)
        where = next((place for place in places if place != LOSS_FN), LOSS_FN)
        by_place.setdefault(where, []).append(outcome)
    for where, group in by_place.items():
        message = (
            f"the scalar is not the {trial.loss_reduction} of its samples' own losses, as "
            f"loss_reduction={trial.loss_reduction!r} declares: {_differs(group)}"
        )
        if where == LOSS_FN:
            remedy = _OVER_SAMPLES.format(reduction=trial.loss_reduction)
            values_agree = not any(outcome.loss for outcome in group)
            if trial.boundaries.crossed and values_agree and trial.loss_reduction == "mean":
                remedy = _BOUNDARY
            findings.add("reduction", where, message, remedy)
        else:
            findings.add("coupling", where, *coupling_problem(trial, where, message))


def _differs(group: list[_Outcome]) -> str:
    worst = max(group, key=_Outcome.worst)
    how = worst.equation.how
    text = (
        f"it differs by {worst.loss:.1e} and its gradient by "
        f"{max(worst.grads.values(), default=0.0):.1e} of their size for {how}"
    )
    if math.isinf(worst.worst()):
        text = f"it is finite for {how}, but not for each of its samples alone"
    if others := [outcome.equation.how for outcome in group if outcome is not worst]:
        text += f" (likewise for {'; '.join(others)})"
    return text + (f". Parameters: {listed(list(worst.grads))}" if worst.grads else "")
