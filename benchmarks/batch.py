"""The benchmark over the batch size: private training steps, and dilated attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from .attention import DIRECTIONS, is_small
from .dilated import (
    DILATED_COLUMNS,
    EXPONENTS,
    dilated_chart,
    dilated_measurement,
    exponent_rows,
)
from .document import Table, config
from .private_scaling import BATCH_CHARTS, BATCH_TABLES, batch_plan, derive_batch
from .suite import Comparison, Request, Row, Suite

_BATCHES = (1, 2, 4, 8)


def _plan(request: Request) -> Iterator[Comparison | Callable[[Request], Iterable[Row]]]:
    yield from _dilated(request)
    yield from batch_plan(request)


def _dilated(request: Request) -> Iterator[Comparison]:
    small = is_small(request)
    tokens, heads, segments = (512, 2, (128, 256)) if small else (2048, 8, (512, 1024))
    for direction in DIRECTIONS:
        yield Comparison(
            [
                dilated_measurement(
                    "dilated_batch",
                    f"B{batch}",
                    direction,
                    request,
                    tokens,
                    batch,
                    heads,
                    segments,
                )
                for batch in _BATCHES
            ]
        )


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    yield from exponent_rows(rows, "dilated_batch", "batch")
    yield from derive_batch(rows)


SUITE = Suite(
    name="batch",
    title="Time, tokens/s and memory over the batch size: private training, and attention alone",
    about=(
        "First, one private training step of causal attention over the batch size B, beside the "
        "same step without privacy, and the batch size that is worth taking. Then dilated "
        "attention (LongNet's) by itself over B: segments of 512 tokens whole and segments of "
        "1024 every second token (a quick run on a CPU: 128 and 256), not causal. The sizes are "
        "those of tables that earlier libraries published (dp-flash-attention for the steps, "
        "dilated-attention-pytorch for attention alone). Before it is timed, a step's sum of "
        "clipped gradients is compared with a loop over single samples, attention with its "
        "definition in float64."
    ),
    plan=_plan,
    tables=(
        *BATCH_TABLES,
        Table("dilated_batch", "Dilated attention by itself, by batch", DILATED_COLUMNS),
        EXPONENTS,
    ),
    charts=[
        *BATCH_CHARTS,
        dilated_chart(
            "dilated_batch",
            "Dilated attention by itself",
            config("batch", "B"),
            "tokens_per_s",
            "tokens/s",
        ),
    ],
    derive=_derive,
)
