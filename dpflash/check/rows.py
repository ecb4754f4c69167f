"""Checks whether a sample's gradient has the same bits in every row of a batch.

Kernels may round rows differently, for example in the scalar remainder of a vectorized loop. A
logical batch with one more microbatch may then shift samples to rows that round differently. The
result is reported, but it is not a problem.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..sampling.tracker import BatchMark
from .batch import Place
from .coupling import locate
from .private import made_private
from .report import ITSELF, LOSS_FN, Findings, error_text
from .subject import Subject, Trial

_ROWS = "a sample's row in the batch"


def check_rows(trial: Trial, model: nn.Module, batch: Any, findings: Findings) -> None:
    """Compare the gradient of one sample between all rows, with the other samples reordered.

    Args:
        trial: the trial of the other checks.
        model: a plain copy of the model, in its own dtype; becomes private.
        batch: the batch, in its own dtype.
        findings: receives the result.
    """
    if findings.errors() or trial.random:
        findings.not_checked.append(f"{_ROWS}: the model is random, or has errors")
        return
    own = Trial(
        Subject(model, trial.subject.loss_fn),
        batch,
        trial.size,
        trial.loss_reduction,
        tolerance=0.0,
        boundaries=trial.boundaries,
    )
    orders = [_order(row, trial.size) for row in range(trial.size)]
    try:
        found = _gradients(own, orders)
    except Exception as error:
        findings.not_checked.append(f"{_ROWS}: {error_text(error)}")
        return
    other = [row for row, bits in enumerate(found) if not _equal(bits, found[0])]
    if not other:
        findings.checked.append(f"{_ROWS}: its gradient has the same bits in all of them")
        return
    one, two = (
        Place(own.pick(orders[row]), orders[row].index(0), own.size) for row in (0, other[0])
    )
    where = locate(own, one, two)
    kind = ""
    if where not in (LOSS_FN, ITSELF):
        name = type(own.subject.model.get_submodule(where)).__name__
        kind = f" ({name.removeprefix('Private')})"
    findings.checked.append(
        f"{_ROWS}: its gradient has other bits in {len(other)} of {own.size}, first in "
        f"'{where}'{kind}, within rounding; sizes that are multiples of 16 usually avoid it"
    )


def _order(row: int, size: int) -> list[int]:
    """An order of all samples with sample 0 in this row; the others are rotated."""
    others = [1 + (row + i) % (size - 1) for i in range(size - 1)]
    return [*others[:row], 0, *others[row:]]


def _gradients(trial: Trial, orders: list[list[int]]) -> list[dict[str, Tensor]]:
    """The per-sample gradient of sample 0 in each order, from a private backward."""
    subject = trial.subject
    backward = made_private(subject, trial.loss_reduction)
    sums = backward.step
    found = []
    for order in orders:
        mask = torch.tensor([sample == 0 for sample in order])
        mark = BatchMark(0, trial.size, last=True, real=mask)
        sums.tracker.begin_microbatch(mark, epoch=0)
        backward.backward(subject.losses(trial.pick(order)))
        found.append(
            {n: s for n, p in subject.trained.items() if (s := sums.sums.get(p)) is not None}
        )
        sums.discard()
        sums.tracker.released()
    return found


def _equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
