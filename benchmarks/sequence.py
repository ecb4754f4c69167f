"""The benchmark over the sequence length: private training steps, and dilated attention.

Letters: B samples, H heads, T tokens, D head dim, w segment length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import scipy.stats

from . import output as results
from .attention import DIRECTIONS, is_small
from .dilated import (
    DILATED_COLUMNS,
    EXPONENTS,
    curves,
    dilated_chart,
    dilated_measurement,
    exponent_rows,
)
from .document import Table, column, config
from .private_scaling import (
    SEQUENCE_CHARTS,
    SEQUENCE_TABLES,
    derive_sequence,
    sequence_plan,
)
from .suite import Comparison, Request, Row, Suite, of_section

_MIB = 2**20
_BYTES = {"float32": 4, "float16": 2}
FIXED, LONG, PROPORTIONAL = "dilated_fixed", "dilated_long", "dilated_proportional"
_CURVES = {
    FIXED: "Dilated attention, segments stay as T grows",
    LONG: "Dilated attention, segments stay as T grows 16-fold: for the exponent",
    PROPORTIONAL: "Dilated attention, segments [T/4, T/2] grow with T",
}
_LENGTHS = {
    FIXED: [2**n for n in range(9, 14)],
    LONG: [2**n for n in range(11, 16)],
    PROPORTIONAL: [2**n for n in range(9, 14)],
}
_QUICK_LENGTHS = {
    FIXED: [256, 512, 1024],
    LONG: [1024, 4096, 16384],
    PROPORTIONAL: [256, 512, 1024],
}
# On a CPU, where segments grow with T: the published tables are of forward passes alone.
_LONGEST_BACKWARD = 4096
# B and T of the quick table, with segments [T/4, T/2].
_QUICK_TABLE = ((2, 1024), (2, 2048), (2, 4096), (1, 8192), (1, 16384))


def _segments(section: str, tokens: int, request: Request) -> tuple[int, ...]:
    if section == LONG:
        return (128, 256, 512) if is_small(request) else (512, 1024, 2048)
    if section == FIXED:
        return (128, 256) if is_small(request) else (512, 1024)
    return tokens // 4, tokens // 2


def _plan(request: Request) -> Iterator[Comparison | Callable[[Request], Iterable[Row]]]:
    small = is_small(request)
    heads = 2 if small else 8
    lengths = _QUICK_LENGTHS if small else _LENGTHS
    growing = {
        PROPORTIONAL: [(1, tokens) for tokens in lengths[PROPORTIONAL]],
        "quick_table": _QUICK_TABLE[:1] if small else _QUICK_TABLE,
    }
    for direction in DIRECTIONS:
        fixed = [(1, tokens) for tokens in lengths[FIXED]]
        yield _comparison(FIXED, fixed, heads, direction, request)
        is_limited = request.where.type == "cpu" and direction == "forward+backward"
        for section, sizes in growing.items():
            tried = [size for size in sizes if not is_limited or size[1] <= _LONGEST_BACKWARD]
            yield _comparison(section, tried, heads, direction, request)
    sizes = [(1, tokens) for tokens in lengths[LONG]]
    yield _comparison(LONG, sizes, 2, "forward+backward", request)
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
            dilated_measurement(
                section,
                f"B{batch}-T{tokens}",
                direction,
                request,
                tokens,
                batch,
                heads,
                _segments(section, tokens, request),
            )
            for batch, tokens in sizes
        ]
    )


def _derive(rows: Sequence[Row]) -> Iterator[Row]:
    for section in _CURVES:
        own = _of_whole_segments(of_section(rows, section))
        yield from exponent_rows(own, section, "tokens")
    for direction, own in curves(rows, FIXED).items():
        measured = [row for row in own if row["peak_memory_mb"] is not None]
        if len(measured) >= 2:
            yield _memory(direction, measured)
    yield from derive_sequence(rows)


def _of_whole_segments(rows: Iterable[Row]) -> list[Row]:
    """Without sequences that are shorter than a segment, whose tokens have less work."""
    return [
        row
        for row in rows
        if row["config"]["tokens"] >= max(row["config"].get("segment_lengths", (0,)))
    ]


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


_COLUMNS = (*DILATED_COLUMNS, ("bytes/token", _bytes_per_token))

SUITE = Suite(
    name="sequence",
    title="Time and memory over the sequence length: private training, and attention alone",
    about=(
        "First, one private training step of causal attention over the tokens T of a sample. Then "
        "dilated attention (LongNet's, not causal, every first, second, fourth, ... token of its "
        "segments) by itself: where segments stay as T grows, a token has the same number of keys "
        "whatever T, and time is linear in it (exponent 1); where segments grow with T it is "
        "quadratic (exponent 2). The sizes are those of tables that earlier libraries published "
        "(dp-flash-attention for the steps, dilated-attention-pytorch for attention alone), but "
        f"for section {LONG}, which is there for the exponent. Before it is timed, a step's sum "
        "of clipped gradients is compared with a loop over single samples, attention with its "
        "definition in float64."
    ),
    plan=_plan,
    tables=(
        *SEQUENCE_TABLES,
        *(Table(section, title, _COLUMNS) for section, title in _CURVES.items()),
        Table(
            "quick_table",
            "Dilated attention, segments [T/4, T/2], at the batches of a published table",
            _COLUMNS,
        ),
        replace(
            EXPONENTS,
            note=f"{EXPONENTS.note} Lengths below the longest segment are left out of it: there a "
            "token has fewer keys.",
        ),
        Table(
            "bytes_per_token",
            "Memory of a token, where segments stay",
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
            dilated_chart(section, title, config("tokens", "T"), "median_ms", "ms")
            for section, title in _CURVES.items()
        ),
    ],
    derive=_derive,
)
