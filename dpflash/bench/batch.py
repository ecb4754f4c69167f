"""The benchmark over the batch size: private training steps, and dilated attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

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
from .private_scaling import BATCH_CHARTS, BATCH_TABLES, batch_plan, derive_batch
from .suite import Comparison, Measurement, Request, Row, Suite

_BATCHES = (1, 2, 4, 8)


def _plan(request: Request) -> Iterator[Comparison | Callable[[Request], Iterable[Row]]]:
    yield from _dilated(request)
    yield from batch_plan(request)


def _dilated(request: Request) -> Iterator[Comparison]:
    tokens, heads = (512, 2) if is_small(request) else (2048, 8)
    for direction in DIRECTIONS:
        yield Comparison(
            [
                Measurement(
                    f"dilated_batch/{direction}/B{batch}",
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
                    {"section": "dilated_batch"},
                )
                for batch in _BATCHES
            ]
        )


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    for direction, own in curves(rows, "dilated_batch").items():
        yield exponent_row("dilated_batch", direction, own, "batch")
    yield from derive_batch(rows)


SUITE = Suite(
    name="batch",
    title="Batch sizes",
    about=(
        "Private training steps of attention over the batch size, beside steps without privacy; "
        "and dilated attention by itself, [512, 1024] / [1, 2], not causal."
    ),
    plan=_plan,
    tables=(
        *BATCH_TABLES,
        Table(
            "dilated_batch",
            "Dilated attention",
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
        *BATCH_CHARTS,
        *(
            Chart(
                "dilated_batch",
                f"Dilated attention, {direction}",
                config("batch", "B"),
                ("tokens/s", of_curve("tokens_per_s", direction=direction)),
                lambda row: "dpflash",
            )
            for direction in DIRECTIONS
        ),
    ],
    derive=_derive,
)
