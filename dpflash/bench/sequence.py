"""The benchmark over the sequence length: private training steps, and dilated attention.

Letters: B samples, H heads, T tokens, D head dim, w segment length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import scipy.stats

from . import results
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
from .private_scaling import (
    SEQUENCE_CHARTS,
    SEQUENCE_TABLES,
    derive_sequence,
    sequence_plan,
)
from .suite import Comparison, Measurement, Request, Row, Suite

_MIB = 2**20
_HEAD_DIM = 64
_BYTES = {"float32": 4, "float16": 2}
_CURVES = {
    "dilated_fixed": "w = [512, 1024] whatever T",
    "dilated_proportional": "w = [T/4, T/2]",
}
# B and T of the report's table; w = [T/4, T/2] there too.
_QUICK_TABLE = ((2, 1024), (2, 2048), (2, 4096), (1, 8192), (1, 16384))


def _segments(section: str, tokens: int) -> tuple[int, int]:
    return (512, 1024) if section == "dilated_fixed" else (tokens // 4, tokens // 2)


def _plan(request: Request) -> Iterator[Comparison | Callable[[Request], Iterable[Row]]]:
    heads = 2 if is_small(request) else 8
    first, last = (256, 1024) if is_small(request) else (512, 16384)
    sizes = [(1, first << n) for n in range((last // first).bit_length())]
    table = _QUICK_TABLE[:1] if is_small(request) else _QUICK_TABLE
    for direction in DIRECTIONS:
        yield _comparison("dilated_fixed", sizes, heads, direction, request)
        # Quadratic, and up to 8192 in the report.
        proportional = [(batch, tokens) for batch, tokens in sizes if tokens <= 8192]
        yield _comparison("dilated_proportional", proportional, heads, direction, request)
        yield _comparison("quick_table", table, heads, direction, request)
    yield from sequence_plan(request)


def _comparison(
    section: str,
    sizes: Sequence[tuple[int, int]],
    heads: int,
    direction: str,
    request: Request,
) -> Comparison:
    return Comparison(
        [
            Measurement(
                f"{section}/{direction}/B{batch}-T{tokens}",
                dilated_subject,
                {
                    "segment_lengths": _segments(section, tokens),
                    "dilation_rates": (1, 2),
                    "direction": direction,
                    "tokens": tokens,
                    "batch": batch,
                    "heads": heads,
                    "head_dim": _HEAD_DIM,
                    "dtype": default_dtype(request),
                    "causal": False,
                },
                {"section": section},
            )
            for batch, tokens in sizes
        ]
    )


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    for section in _CURVES:
        for direction, own in curves(rows, section).items():
            yield exponent_row(section, direction, own, "tokens")
    for direction, own in curves(rows, "dilated_fixed").items():
        measured = [row for row in own if row["peak_memory_mb"] is not None]
        if len(measured) >= 2:
            yield _memory(direction, measured)
    yield from derive_sequence(rows)


def _memory(direction: str, rows: Sequence[Row]) -> Row:
    """Bytes that one more token takes, measured and by the model."""
    tokens = [row["config"]["batch"] * row["config"]["tokens"] for row in rows]
    peaks = [_MIB * row["peak_memory_mb"] for row in rows]
    return results.row(
        f"bytes_per_token/{direction}",
        {"direction": direction, "tokens": tokens},
        section="bytes_per_token",
        measured=float(scipy.stats.linregress(tokens, peaks).slope),
        model=model_bytes_per_token(rows[0]["config"]),
    )


def model_bytes_per_token(shape: Mapping[str, Any]) -> float:
    """What a call makes for each token: o, and going backward dq, dk and dv; sums in float32."""
    backward = shape["direction"] == "forward+backward"
    tensors = 4 if backward else 1
    sums = 2 if backward else 1  # lse, and rowsum(o do)
    row = tensors * shape["head_dim"] * _BYTES[shape["dtype"]] + 4 * sums
    return float(shape["heads"] * row)


def _bytes_per_token(row: Mapping[str, Any]) -> float | None:
    if row["peak_memory_mb"] is None:
        return None
    tokens: int = row["config"]["batch"] * row["config"]["tokens"]
    return float(_MIB * row["peak_memory_mb"] / tokens)


_COLUMNS = (
    config("direction"),
    config("segment_lengths", "w"),
    *SHAPE,
    *FIGURES,
    ("bytes/token", _bytes_per_token),
    *ROOFS,
    column("checked_rows", "checked rows"),
    *CORRECT,
)

SUITE = Suite(
    name="sequence",
    title="Sequence lengths",
    about=(
        "Private training steps of attention over the tokens of a sample; and dilated attention "
        "by itself, rates [1, 2], not causal: with segments whose lengths stay, its cost is "
        "linear in T, with segments that grow with T it is quadratic."
    ),
    plan=_plan,
    tables=(
        *SEQUENCE_TABLES,
        *(
            Table(section, f"Dilated attention, {rule}", _COLUMNS)
            for section, rule in _CURVES.items()
        ),
        Table(
            "quick_table", "Dilated attention, the report's quick table, w = [T/4, T/2]", _COLUMNS
        ),
        EXPONENTS,
        Table(
            "bytes_per_token",
            "Memory of a token, w = [512, 1024]",
            (
                config("direction"),
                column("measured", "bytes/token, measured"),
                column("model", "bytes/token, o, gradients and sums"),
            ),
            "Measured: the slope of the peak memory of a call over T, inputs not counted.",
        ),
    ),
    charts=[
        *SEQUENCE_CHARTS,
        *(
            Chart(
                section,
                f"Dilated attention, {rule}",
                config("tokens", "T"),
                ("ms", of_curve()),
                lambda row: row["config"]["direction"],
            )
            for section, rule in _CURVES.items()
        ),
    ],
    derive=_derive,
)
