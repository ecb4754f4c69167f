"""The benchmark of dilated attention over its number of heads."""

from __future__ import annotations

from collections.abc import Iterator

from .attention import DIRECTIONS, is_small
from .dilated import (
    DILATED_COLUMNS,
    EXPONENTS,
    dilated_chart,
    dilated_measurement,
    exponent_rows,
)
from .document import Table, config
from .suite import Comparison, Request, Suite

_HEADS = (2, 4, 8, 16, 32)
_QUICK_HEADS = (2, 4, 8)


def _plan(request: Request) -> Iterator[Comparison]:
    small = is_small(request)
    tokens, batch, segments = (512, 1, (128, 256)) if small else (2048, 2, (512, 1024))
    for direction in DIRECTIONS:
        yield Comparison(
            [
                dilated_measurement(
                    "heads", f"H{heads}", direction, request, tokens, batch, heads, segments
                )
                for heads in (_QUICK_HEADS if small else _HEADS)
            ]
        )


SUITE = Suite(
    name="heads",
    title="Time and memory of dilated attention over its number of heads",
    about=(
        "Dilated attention (LongNet's) by itself: segments of 512 tokens whole and segments of "
        "1024 every second token (a quick run on a CPU: 128 and 256), not causal; all else stays, "
        "the number of heads H grows. Heads are independent, so twice as many take twice as long "
        "once they fill the machine (exponent 1); a smaller exponent says that few heads do not. "
        "T, B, H and D are those of a table that an earlier library (dilated-attention-pytorch) "
        "published. Each row's output and gradients are compared with the definition in float64 "
        "before it is timed."
    ),
    plan=_plan,
    tables=(Table("heads", "Heads", DILATED_COLUMNS), EXPONENTS),
    charts=[dilated_chart("heads", "Dilated attention", config("heads", "H"), "median_ms", "ms")],
    derive=lambda rows: exponent_rows(rows, "heads", "heads"),
)
