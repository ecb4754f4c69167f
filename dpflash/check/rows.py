"""Checks whether a sample's gradient has the same bits in every row of a batch.

Kernels may round rows differently, for example in the scalar remainder of a vectorized loop. If a
logical batch needs an additional microbatch, its samples may move to other rows, where they are
rounded differently. The result is listed in the report, but not as a problem.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Place
from .private import PrivateCopy
from .report import ITSELF, LOSS_FN, Findings, error_text
from .trace import locate

ROWS = "a sample's row in the batch"


def check_rows(private: PrivateCopy, findings: Findings) -> None:
    """Compare the gradient of one sample in all rows, with the other samples reordered.

    Args:
        private: the private copy, in the model's own dtype.
        findings: receives the result.
    """
    subject = private.subject
    size = subject.size
    # One order for each row: sample 0 is in that row, and the other samples are rotated.
    orders = [[1 + (row + i) % (size - 1) for i in range(size - 1)] for row in range(size)]
    for row, order in enumerate(orders):
        order.insert(row, 0)
    places = [Place(subject.pick(order), row, size) for row, order in enumerate(orders)]
    try:
        found = [private.sums(p.batch, torch.arange(size) == p.index) for p in places]
    except Exception as error:
        findings.not_checked.append(f"{ROWS}: {error_text(error)}")
        return
    other = [row for row, bits in enumerate(found) if not _equal(bits, found[0])]
    if not other:
        findings.checked.append(f"{ROWS}: its gradient has the same bits in all rows")
        return
    where = locate(subject, places[0], places[other[0]])
    kind = ""
    if where not in (LOSS_FN, ITSELF):
        kind = f" ({type(private.modules[where]).__name__.removeprefix('Private')})"
    findings.checked.append(
        f"{ROWS}: its gradient has other bits in {len(other)} of {size}, first in "
        f"'{where}'{kind}, within rounding; batch sizes that are multiples of 16 usually avoid it"
    )


def _equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
