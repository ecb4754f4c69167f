"""Checks that the loss of a sample, and its gradient, depend on that sample alone.

If loss_fn returns the sum of the losses, one sample's loss is the sum over all B samples minus the
sum over the other B - 1 samples. Means are first multiplied by B and B - 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..isolation.alteration import rows_of
from .batch import TARGETS, Place, altered
from .report import LOSS_FN, LOSS_REMEDY, Findings, error_text, listed
from .subject import NOTHING, Result, Subject
from .trace import coupling_problem, locate

_OVER_SAMPLES = (
    "compute each sample's loss from that sample alone and reduce over samples last: "
    "dpflash.losses.cross_entropy(logits, targets).{reduction}(). A mean over the batch's valid "
    "tokens, the default of Hugging Face models, is not a reduction over samples. Nor is a mean "
    "weighted by classes (nn.CrossEntropyLoss(weight=...)). dpflash.losses.of_criterion divides "
    "by neither"
)
_BOUNDARY = (
    "a boundary in the model clips gradients that this mean has divided by the batch size: "
    "return losses [B] with loss_reduction=None, or return losses.sum() and declare "
    "loss_reduction='sum'"
)
_UNVARIED = (
    "samples of unequal lengths: integer targets could not be ignored, so a loss "
    "divided by the batch's tokens is found only if the samples of the batch have unequal lengths"
)
_WHICH = "whether the scalar is a mean or a sum: the model is random, or takes no sample alone"


class _Variant(NamedTuple):
    """A new batch from the samples `rows` of `batch`; its row `row` holds the tested sample."""

    how: str
    batch: Any
    size: int
    rows: list[int]
    row: int
    is_altered: bool = False

    def place(self) -> Place:
        return Place(rows_of(self.batch, self.rows, self.size), self.row, len(self.rows))


class _Difference(NamedTuple):
    """Relative differences of a sample's loss and gradients between the batch and a variant."""

    sample: int
    variant: _Variant
    loss: float
    grads: dict[str, float]

    def grad(self) -> float:
        return max(self.grads.values(), default=0.0)

    def worst(self) -> float:
        found = [self.loss, *self.grads.values()]
        return max(found) if all(map(math.isfinite, found)) else math.inf


def check_coupling(subject: Subject, findings: Findings, *, has_boundary: bool) -> None:
    """Compare each sample's loss and gradient in the batch, alone, and among other samples.

    Args:
        subject: the model and its loss.
        findings: receives the result.
        has_boundary: whether the model has private boundaries, which clip gradients inside it.
    """
    reduction = subject.loss_reduction
    is_alone = not subject.is_random and all(p.kind != "batch_size" for p in findings.problems)
    compared = _differences(subject, reduction, is_alone, findings)
    hows = dict.fromkeys(d.variant.how for d in compared)
    findings.checked.append(
        f"loss and gradient of samples {', '.join(map(str, subject.indices))}, up to "
        f"{subject.tolerance:.0e} of their size, when {'; '.join(hows)}"
        + (f", as the {reduction} of the single samples'" if reduction else "")
    )
    if TARGETS not in hows:
        findings.leave_out(_UNVARIED)
    if reduction and not is_alone:
        findings.leave_out(_WHICH)
    if not any(map(_Difference.worst, compared)):
        return
    if reduction and is_alone:
        other, fix = ("sum", "divide") if reduction == "mean" else ("mean", "multiply")
        if not any(map(_Difference.worst, _differences(subject, other, is_alone, Findings()))):
            findings.add(
                "reduction",
                LOSS_FN,
                f"the scalar is the {other} of its samples' own losses, not their {reduction} as "
                f"loss_reduction={reduction!r} declares, so gradients would be clipped at the "
                "wrong scale",
                f"declare loss_reduction='{other}', in make_private too, or {fix} the scalar by "
                "the number of samples in the batch",
            )
            return
    _report(subject, compared, findings, has_boundary=has_boundary)


def _differences(
    subject: Subject, reduction: str | None, is_alone: bool, findings: Findings
) -> list[_Difference]:
    compared = []
    size = subject.size
    whole = [_Variant("", subject.batch, size, [*range(size)], i) for i in subject.indices]
    references = [_of_sample(subject, variant, reduction, is_alone) for variant in whole]
    # A small gradient may be rounding errors alone: differences are relative to the largest.
    finite = [reference.sizes for reference in references if reference.is_finite()]
    floors = (
        max((loss for loss, _ in finite), default=0.0),
        1e-3 * max((norm for _, norm in finite), default=0.0),
    )
    for reference, sample in zip(references, subject.indices, strict=True):
        for variant in _variants(subject, sample, is_alone):
            try:
                found = _of_sample(subject, variant, reduction, is_alone)
            except Exception as error:
                findings.leave_out(f"samples when {variant.how}: {error_text(error)}")
                continue
            if variant.is_altered and not found.is_finite():
                findings.leave_out(f"samples when {variant.how}: the loss is not finite")
                continue
            apart = _apart(subject, reference, found, floors)
            compared.append(_Difference(sample, variant, *apart))
    return compared


def _variants(subject: Subject, sample: int, is_alone: bool) -> Iterator[_Variant]:
    batch, size = subject.batch, subject.size
    yield _Variant("all are copies of it", batch, size, [sample] * size, sample)
    for how, doubled in altered(batch, size):
        rows = [row if row == sample else size + row for row in range(size)]
        yield _Variant(how, doubled, 2 * size, rows, sample, is_altered=True)
    if is_alone:
        yield _Variant("it is alone", batch, size, [sample], 0)


def _of_sample(
    subject: Subject, variant: _Variant, reduction: str | None, is_alone: bool
) -> Result:
    """Return the loss of the sample in row `variant.row`, and its gradient.

    If loss_fn returns a scalar, subtract the scalar of a second batch. If `is_alone`, the second
    batch leaves out the tested sample; otherwise it has another sample in its place.
    """
    batch, size, rows = variant.batch, variant.size, variant.rows
    if reduction is None:
        return subject.result(rows_of(batch, rows, size), variant.row)
    others = rows[: variant.row] + rows[variant.row + 1 :]
    if not is_alone:
        others.insert(variant.row, (rows[variant.row] + 1) % subject.size)
    result = NOTHING
    for sign, chosen in ((1, rows), (-1, others)):
        if chosen:
            factor = sign * (len(chosen) if reduction == "mean" else 1)
            result = result.plus(factor, subject.result(rows_of(batch, chosen, size)))
    return result


def _apart(
    subject: Subject, a: Result, b: Result, floors: tuple[float, float]
) -> tuple[float, dict[str, float]]:
    """Return the relative differences of losses, and of gradients by name, above the tolerance."""
    # Relative to the whole gradient: a single parameter's gradient may be rounding errors alone.
    loss_size, grad_size = map(max, a.sizes, b.sizes, floors)
    apart = {"": abs(a.loss - b.loss) / loss_size if loss_size else 0.0}
    for name in a.grads.keys() | b.grads.keys():
        difference = torch.as_tensor(a.grads.get(name, 0.0) - b.grads.get(name, 0.0))
        apart[name] = float(difference.double().norm()) / grad_size if grad_size else 0.0
    apart = {name: x for name, x in apart.items() if not x <= subject.tolerance}
    loss = apart.pop("", 0.0)
    return loss, {name: apart[name] for name in subject.trained if name in apart}


def _report(
    subject: Subject, compared: list[_Difference], findings: Findings, *, has_boundary: bool
) -> None:
    """Report the differences, as one problem for each module where samples mix."""
    reduction = subject.loss_reduction
    located: dict[str, str] = {}
    for difference in compared:
        how = difference.variant.how
        if located.setdefault(how, LOSS_FN) == LOSS_FN:
            original = Place(subject.batch, difference.sample, subject.size)
            located[how] = locate(subject, original, difference.variant.place())
    modules = [where for where in located.values() if where != LOSS_FN]
    if reduction and modules:  # A scalar contains all samples, of which another one may differ.
        located = dict.fromkeys(located, modules[0])
    by_place: dict[str, list[_Difference]] = {}
    for difference in filter(_Difference.worst, compared):
        by_place.setdefault(located[difference.variant.how], []).append(difference)
    for where, group in by_place.items():
        worst = max(group, key=_Difference.worst)
        changes = f"changes by {worst.loss:.1e} and its gradient by {worst.grad():.1e} of its size"
        if not math.isfinite(worst.worst()):
            changes = "or its gradient becomes NaN or infinite"
        message = f"losses[{worst.sample}] {changes} when {worst.variant.how}"
        kind, remedy = "coupling", LOSS_REMEDY
        if reduction:
            message = (
                f"the scalar is not the {reduction} of its samples' own losses, as "
                f"loss_reduction={reduction!r} declares: its part for sample {worst.sample} "
                f"{changes} when {worst.variant.how}"
            )
            kind, remedy = "reduction", _OVER_SAMPLES.format(reduction=reduction)
            if has_boundary and reduction == "mean" and not any(d.loss for d in group):
                remedy = _BOUNDARY
        hows = dict.fromkeys(d.variant.how for d in group if d.variant.how != worst.variant.how)
        if hows:
            message += f" (likewise when {'; '.join(hows)})"
        if worst.grads:
            message += f". Parameters: {listed(list(worst.grads))}"
        if where != LOSS_FN:
            kind = "coupling"
            message, remedy = coupling_problem(subject, where, message)
        findings.add(kind, where, message, remedy)
