"""The suites "sequence", "batch" and "heads": how private steps and dilated attention grow.

Letters: B samples, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import scipy.stats

from . import output as results
from .attention import DIRECTIONS, SHAPE, dilated_subject, is_small, shape
from .document import (
    CORRECT,
    FIGURES,
    LEAST_SIZES,
    ROOFS,
    Chart,
    Column,
    Table,
    column,
    columns,
    config,
    exponent_table,
    fitted_row,
)
from .private_scaling import (
    BATCH_CHARTS,
    BATCH_TABLES,
    SEQUENCE_CHARTS,
    SEQUENCE_TABLES,
    batch_plan,
    derive_batch,
    derive_sequence,
    insight,
    sequence_plan,
)
from .suite import Comparison, Measurement, Part, Request, Row, Suite, of_section

_MIB = 2**20
FIXED, LONG, PROPORTIONAL = "dilated_fixed", "dilated_long", "dilated_proportional"
_TITLES = {
    FIXED: "Dilated attention, segments stay as T grows",
    LONG: "Dilated attention, segments stay as T grows 16-fold: for the exponent",
    PROPORTIONAL: "Dilated attention, segments [T/4, T/2] grow with T",
}
# With segments that grow with T: the longest T of a backward on a CPU.
_LONGEST_BACKWARD = 4096
# (B, T) of a published table.
_QUICK_TABLE = ((2, 1024), (2, 2048), (2, 4096), (1, 8192), (1, 16384))
_LIKE_THEIRS = (
    "segments of 512 tokens whole and segments of 1024 every second token (a quick run on a CPU: "
    "128 and 256), not causal"
)
_SOURCES = (
    "The sizes are those of tables that earlier libraries published (dp-flash-attention for the "
    "steps, dilated-attention-pytorch for attention alone). Before it is timed, a step's sum of "
    "clipped gradients is compared with a loop over single samples, attention with its definition "
    "in float64."
)


def _comparison(
    section: str,
    direction: str,
    request: Request,
    name: str,
    sizes: Iterable[tuple[int, int, int]],
) -> Comparison:
    """Dilated attention, D = 64, not causal; a row for each (B, T, H), with the given name."""
    measurements = []
    for batch, tokens, heads in sizes:
        segments: tuple[int, ...] = (tokens // 4, tokens // 2)
        if section not in (PROPORTIONAL, "quick_table"):
            shortest = 128 if is_small(request) else 512
            segments = tuple(shortest * 2**n for n in range(3 if section == LONG else 2))
        given = {
            "segment_lengths": segments,
            "dilation_rates": tuple(2**n for n in range(len(segments))),
            **shape(request, direction, tokens, batch, heads),
        }
        place = f"{section}/{direction}/" + name.format(B=batch, T=tokens, H=heads)
        measurements.append(Measurement(place, dilated_subject, given, {"section": section}))
    return Comparison(measurements)


def _sequences(request: Request) -> Iterator[Comparison | Part]:
    small, heads = is_small(request), 2 if is_small(request) else 8
    lengths = [256, 512, 1024] if small else [2**n for n in range(9, 14)]
    long = [1024, 4096, 16384] if small else [2**n for n in range(11, 16)]
    once = [(1, tokens, heads) for tokens in lengths]
    table = [(*size, heads) for size in (_QUICK_TABLE[:1] if small else _QUICK_TABLE)]
    for direction in DIRECTIONS:
        limited = request.where.type == "cpu" and direction == "forward+backward"
        for section, sizes in ((FIXED, once), (PROPORTIONAL, once), ("quick_table", table)):
            short = [size for size in sizes if size[1] <= _LONGEST_BACKWARD]
            tried = short if limited and section != FIXED else sizes
            yield _comparison(section, direction, request, "B{B}-T{T}", tried)
    tried = [(1, tokens, 2) for tokens in long]
    yield _comparison(LONG, "forward+backward", request, "B{B}-T{T}", tried)
    yield from sequence_plan(request)


def _batches(request: Request) -> Iterator[Comparison | Part]:
    tokens, heads = (512, 2) if is_small(request) else (2048, 8)
    sizes = [(batch, tokens, heads) for batch in (1, 2, 4, 8)]
    for direction in DIRECTIONS:
        yield _comparison("dilated_batch", direction, request, "B{B}", sizes)
    yield from batch_plan(request)


def _heads(request: Request) -> Iterator[Comparison | Part]:
    small = is_small(request)
    batch, tokens = (1, 512) if small else (2, 2048)
    sizes = [(batch, tokens, heads) for heads in ((2, 4, 8) if small else (2, 4, 8, 16, 32))]
    for direction in DIRECTIONS:
        yield _comparison("heads", direction, request, "H{H}", sizes)


def _by_direction(rows: Iterable[Row], section: str) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in of_section(rows, section):
        found.setdefault(row["config"]["direction"], []).append(row)
    return found


def _exponents(rows: Iterable[Row], section: str, size: str) -> Iterator[Row]:
    """The exponent of time over a size in each direction; a sentence too, of enough sizes."""
    for direction, own in _by_direction(rows, section).items():
        name, curve = f"exponents/{section}/{direction}", f"{section}, {direction}"
        row = fitted_row(name, own, size, section="exponents", curve=curve)
        yield row
        if row["exponent"] is not None and len(row["sizes"]) >= LEAST_SIZES:
            low, high = row["exponent_ci95"]
            text = (
                f"The time of dilated attention ({curve}) grows with the {size} to the power "
                f"{row['exponent']:.2f} [{low:.2f}, {high:.2f}]."
            )
            yield insight(f"{section}/{direction}", text, exponent=row["exponent"])


def _derive_sequences(rows: Sequence[Row]) -> Iterator[Row]:
    for section in _TITLES:
        # A sequence shorter than a segment has fewer keys for each token.
        whole = [
            row
            for row in of_section(rows, section)
            if row["config"]["tokens"] >= max(row["config"].get("segment_lengths", (0,)))
        ]
        yield from _exponents(whole, section, "tokens")
    for direction, own in _by_direction(rows, FIXED).items():
        measured = [row for row in own if row["peak_memory_mb"] is not None]
        if len(measured) >= 2:
            yield _bytes_per_token(direction, measured)
    yield from derive_sequence(rows)


def _derive_batches(rows: Sequence[Row]) -> Iterator[Row]:
    yield from _exponents(rows, "dilated_batch", "batch")
    yield from derive_batch(rows)


def _bytes_per_token(direction: str, rows: Sequence[Row]) -> Row:
    """Bytes for each further token: measured, and the sizes of the results and sums."""
    tokens = [row["config"]["batch"] * row["config"]["tokens"] for row in rows]
    peaks = [_MIB * row["peak_memory_mb"] for row in rows]
    shape = rows[0]["config"]
    # o and lse; with the backward dq, dk, dv and rowsum(o do) too. The sums are float32.
    tensors, sums = (4, 2) if direction == "forward+backward" else (1, 1)
    itemsize = 4 if shape["dtype"] == "float32" else 2
    return results.row(
        f"bytes_per_token/{direction}",
        {"direction": direction, "tokens": tokens},
        section="bytes_per_token",
        measured=float(scipy.stats.linregress(tokens, peaks).slope),
        model=float(shape["heads"] * (tensors * shape["head_dim"] * itemsize + 4 * sums)),
    )


def _peak_over_tokens(row: Mapping[str, Any]) -> float | None:
    if row["peak_memory_mb"] is None:
        return None
    tokens: int = row["config"]["batch"] * row["config"]["tokens"]
    return float(_MIB * row["peak_memory_mb"] / tokens)


def _chart(section: str, title: str, x: Column, y: Column) -> Chart:
    return Chart(section, title, x, y, lambda row: row["config"]["direction"])


_COLUMNS = (
    *columns("direction | segment_lengths: segments"),
    *SHAPE,
    *FIGURES,
    *ROOFS,
    *columns("density | checked_rows: checked rows"),
    *CORRECT,
)
_WITH_BYTES = (*_COLUMNS, ("bytes/token", _peak_over_tokens))
_EXPONENTS = exponent_table(
    "exponents", "Time grows to the power", "1: linear in the size, 2: quadratic."
)
_MS = column("median_ms", "ms")

SEQUENCE = Suite(
    name="sequence",
    title="Time and memory over the sequence length: private training, and attention alone",
    about=(
        "First, one private training step of causal attention over the tokens T of a sample. Then "
        "dilated attention (LongNet's, not causal, every first, second, fourth, ... token of its "
        "segments) by itself: where segments stay as T grows, a token has the same number of keys "
        "whatever T, and time is linear in it (exponent 1); where segments grow with T it is "
        f"quadratic (exponent 2). {_SOURCES} Section {LONG} is there for the exponent alone."
    ),
    plan=_sequences,
    tables=(
        *SEQUENCE_TABLES,
        *(Table(section, title, _WITH_BYTES) for section, title in _TITLES.items()),
        Table(
            "quick_table",
            "Dilated attention, segments [T/4, T/2], at the batches of a published table",
            _WITH_BYTES,
        ),
        replace(
            _EXPONENTS,
            note=f"{_EXPONENTS.note} Lengths below the longest segment are left out of it: "
            "there a token has fewer keys.",
        ),
        Table(
            "bytes_per_token",
            "Memory of a token, where segments stay",
            columns(
                "direction | measured: bytes/token, measured | "
                "model: bytes/token, o, gradients and sums"
            ),
            "Measured: the slope of the peak memory of a call over T, inputs not counted.",
        ),
    ),
    charts=[
        *SEQUENCE_CHARTS,
        *(
            _chart(section, title, config("tokens", "T"), _MS)
            for section, title in _TITLES.items()
        ),
    ],
    derive=_derive_sequences,
)
BATCH = Suite(
    name="batch",
    title="Time, tokens/s and memory over the batch size: private training, and attention alone",
    about=(
        "First, one private training step of causal attention over the batch size B, beside the "
        "same step without privacy, and the batch size that is worth taking. Then dilated "
        f"attention (LongNet's) by itself over B: {_LIKE_THEIRS}. {_SOURCES}"
    ),
    plan=_batches,
    tables=(
        *BATCH_TABLES,
        Table("dilated_batch", "Dilated attention by itself, by batch", _COLUMNS),
        _EXPONENTS,
    ),
    charts=[
        *BATCH_CHARTS,
        _chart(
            "dilated_batch",
            "Dilated attention by itself",
            config("batch", "B"),
            column("tokens_per_s", "tokens/s"),
        ),
    ],
    derive=_derive_batches,
)
HEADS = Suite(
    name="heads",
    title="Time and memory of dilated attention over its number of heads",
    about=(
        f"Dilated attention (LongNet's) by itself: {_LIKE_THEIRS}; the number of heads H grows. "
        "Heads are independent: twice as many take twice as long once they fill the machine "
        f"(exponent 1). {_SOURCES}"
    ),
    plan=_heads,
    tables=(Table("heads", "Heads", _COLUMNS), _EXPONENTS),
    charts=[_chart("heads", "Dilated attention", config("heads", "H"), _MS)],
    derive=lambda rows: _exponents(rows, "heads", "heads"),
)
