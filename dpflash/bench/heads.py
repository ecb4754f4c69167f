"""The benchmark of dilated attention over its number of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .attention import (
    DIRECTIONS,
    EXPONENTS,
    SHAPE,
    curves,
    default_dtype,
    dilated_subject,
    exponent_row,
    is_small,
    of_curve,
)
from .document import CORRECT, FIGURES, ROOFS, Chart, Table, column, config
from .suite import Comparison, Measurement, Request, Row, Suite

_HEADS = (2, 4, 8, 16, 32)
_QUICK_HEADS = (2, 4, 8)


def _plan(request: Request) -> Iterator[Comparison]:
    tokens, batch = (512, 1) if is_small(request) else (2048, 2)
    for direction in DIRECTIONS:
        yield Comparison(
            [
                Measurement(
                    f"heads/{direction}/H{heads}",
                    dilated_subject,
                    {
                        "segment_lengths": (512, 1024),
                        "dilation_rates": (1, 2),
                        "direction": direction,
                        "tokens": tokens,
                        "batch": batch,
                        "heads": heads,
                        "head_dim": 64,
                        "dtype": default_dtype(request),
                        "causal": False,
                    },
                    {"section": "heads"},
                )
                for heads in (_QUICK_HEADS if is_small(request) else _HEADS)
            ]
        )


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    for direction, own in curves(rows, "heads").items():
        yield exponent_row("heads", direction, own, "heads")


SUITE = Suite(
    name="heads",
    title="Dilated attention over its heads",
    about=(
        "[512, 1024] / [1, 2], not causal. Heads are independent, so twice as many take twice as "
        "long once they fill the machine: the exponent tells how far it is from that."
    ),
    plan=_plan,
    tables=(
        Table(
            "heads",
            "Heads",
            (
                config("direction"),
                *SHAPE,
                *FIGURES,
                *ROOFS,
                column("checked_rows", "checked rows"),
                *CORRECT,
            ),
        ),
        EXPONENTS,
    ),
    charts=[
        Chart(
            "heads",
            f"Dilated attention, {direction}",
            config("heads", "H"),
            ("ms", of_curve(direction=direction)),
            lambda row: "dpflash",
        )
        for direction in DIRECTIONS
    ],
    derive=_derive,
)
