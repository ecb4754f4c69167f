"""The suites "sequence", "batch" and "heads": how private steps and dilated attention grow.

Letters: B samples, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import scipy.stats

from . import output as results
from . import private_scaling as private
from .attention import DIRECTIONS, SHAPE, dilated_subject, is_small, shape
from .document import EXPONENTS, FIGURES, LEAST_SIZES, ROOFS, chart, columns, fitted_row
from .suite import Comparison, Measurement, Part, Request, Row, Suite, of_section
from .suite_pages import page

_MIB = 2**20
FIXED, LONG, PROPORTIONAL = "dilated_fixed", "dilated_long", "dilated_proportional"
# With segments that grow with T: the longest T of a backward on a CPU.
_LONGEST_BACKWARD = 4096
# (B, T) of a published table.
_QUICK_TABLE = ((2, 1024), (2, 2048), (2, 4096), (1, 8192), (1, 16384))


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
    yield from private.sequence_plan(request)


def _batches(request: Request) -> Iterator[Comparison | Part]:
    tokens, heads = (512, 2) if is_small(request) else (2048, 8)
    sizes = [(batch, tokens, heads) for batch in (1, 2, 4, 8)]
    for direction in DIRECTIONS:
        yield _comparison("dilated_batch", direction, request, "B{B}", sizes)
    yield from private.batch_plan(request)


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
            yield private.insight(f"{section}/{direction}", text, exponent=row["exponent"])


def _derive_sequences(rows: Sequence[Row]) -> Iterator[Row]:
    for section in (FIXED, LONG, PROPORTIONAL):
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
    yield from private.derive_sequence(rows)


def _derive_batches(rows: Sequence[Row]) -> Iterator[Row]:
    yield from _exponents(rows, "dilated_batch", "batch")
    yield from private.derive_batch(rows)


def _bytes_per_token(direction: str, rows: Sequence[Row]) -> Row:
    """Bytes for each further token: measured, and the sizes of the results and sums."""
    tokens = [row["config"]["batch"] * row["config"]["tokens"] for row in rows]
    peaks = [_MIB * row["peak_memory_mb"] for row in rows]
    given = rows[0]["config"]
    # o and lse; with the backward dq, dk, dv and rowsum(o do) too. The sums are float32.
    tensors, sums = (4, 2) if direction == "forward+backward" else (1, 1)
    itemsize = 4 if given["dtype"] == "float32" else 2
    return results.row(
        f"bytes_per_token/{direction}",
        {"direction": direction, "tokens": tokens},
        section="bytes_per_token",
        measured=float(scipy.stats.linregress(tokens, peaks).slope),
        model=float(given["heads"] * (tensors * given["head_dim"] * itemsize + 4 * sums)),
    )


def _peak_over_tokens(row: Mapping[str, Any]) -> float | None:
    if row["peak_memory_mb"] is None:
        return None
    tokens: int = row["config"]["batch"] * row["config"]["tokens"]
    return float(_MIB * row["peak_memory_mb"] / tokens)


_COLUMNS = columns(
    "direction | segment_lengths: segments",
    SHAPE,
    FIGURES,
    ROOFS,
    "density | checked_rows: checked rows | correct",
)
_WITH_BYTES = (*_COLUMNS, ("bytes/token", _peak_over_tokens))
_TABLES = dict.fromkeys((FIXED, LONG, PROPORTIONAL, "quick_table"), _WITH_BYTES) | {
    "exponents": EXPONENTS,
    "bytes_per_token": columns(
        "direction | measured: bytes/token, measured | model: bytes/token, o, gradients and sums"
    ),
}
_SEQUENCE = page("sequence", {**private.SEQUENCE_TABLES, **_TABLES})
_BATCH_TABLES = {**private.BATCH_TABLES, "dilated_batch": _COLUMNS, "exponents": EXPONENTS}
_MS = "median_ms: ms"

SEQUENCE = Suite(
    name="sequence",
    **_SEQUENCE,
    plan=_sequences,
    charts=[
        private.SEQUENCE_CHART,
        *(
            chart(table.section, table.title, "tokens: T", _MS, "direction")
            for table in _SEQUENCE["tables"]
            if table.section in (FIXED, LONG, PROPORTIONAL)
        ),
    ],
    derive=_derive_sequences,
)
BATCH = Suite(
    name="batch",
    **page("batch", _BATCH_TABLES),
    plan=_batches,
    charts=[
        private.BATCH_CHART,
        chart(
            "dilated_batch",
            "Dilated attention by itself",
            "batch: B",
            "tokens_per_s: tokens/s",
            "direction",
        ),
    ],
    derive=_derive_batches,
)
HEADS = Suite(
    name="heads",
    **page("heads", {"heads": _COLUMNS, "exponents": EXPONENTS}),
    plan=_heads,
    charts=[chart("heads", "Dilated attention", "heads: H", _MS, "direction")],
    derive=lambda rows: _exponents(rows, "heads", "heads"),
)
