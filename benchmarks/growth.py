"""The suites "sequence", "batch" and "heads": how the cost of private steps and attention grows.

Letters: B samples, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import scipy.stats

from . import output
from .attention import DIRECTIONS, SHAPE, dilated_subject, is_small, shape
from .document import (
    EXPONENTS,
    FIGURES,
    OVER_NONPRIVATE,
    ROOFS,
    chart,
    columns,
    fitted_row,
    insight,
    page,
)
from .private import AUTO, NONPRIVATE, private_subject
from .suite import Comparison, Measurement, Request, Row, Suite, compared, grouped, of_section

BATCHES = (1, 3, 5, 10, 19, 35, 64)
TOKENS = (128, 223, 389, 677, 1179, 2048)
FIXED, LONG, PROPORTIONAL = "dilated_fixed", "dilated_long", "dilated_proportional"

_MIB = 2**20
# The longest T for which a backward is measured on a CPU, if segments grow with T.
_LONGEST_BACKWARD = 4096
# (B, T) of a published table.
_QUICK_TABLE = ((2, 1024), (2, 2048), (2, 4096), (1, 8192), (1, 16384))
# The optimal batch is the smallest batch with at least this fraction of the highest tokens/s.
_CLOSE = 0.95


def _dilated(
    section: str, direction: str, request: Request, sizes: Iterable[tuple[int, int, int]]
) -> Comparison:
    """Return the rows of dilated attention (D = 64, not causal), one for each size (B, T, H)."""
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
        place = f"{section}/{direction}/B{batch}-T{tokens}-H{heads}"
        measurements.append(Measurement(place, dilated_subject, given, {"section": section}))
    return Comparison(measurements)


def _private(
    section: str,
    curves: Mapping[str, Sequence[tuple[int, int, int, int]]],
    providers: Sequence[str],
    request: Request,
) -> Iterator[Comparison]:
    dtype = "bfloat16" if request.where.type == "cuda" else "float32"
    for curve, shapes in curves.items():
        for batch, tokens, heads, head_dim in shapes:
            given = {"batch": batch, "tokens": tokens, "heads": heads, "head_dim": head_dim}
            yield compared(
                f"{section}/{curve}/B{batch}-T{tokens}",
                private_subject,
                "provider",
                providers,
                {"model": "attention", **given, "dtype": dtype},
                section=section,
                baseline=providers[0] if providers[1:] else None,
                columns={"curve": curve},
                curve=f"{section}/{curve}",
            )


def _sequences(request: Request) -> Iterator[Comparison]:
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
            yield _dilated(section, direction, request, tried)
    tried = [(1, tokens, 2) for tokens in long]
    yield _dilated(LONG, "forward+backward", request, tried)
    curves = {
        f"b16_h{heads}_d{dim}": [(16, tokens, heads, dim) for tokens in TOKENS]
        for heads, dim in ((12, 64), (16, 64), (20, 80))
    }
    if request.quick:
        curves = {"b4_h4_d32": [(4, tokens, 4, 32) for tokens in (32, 64, 128)]}
    yield from _private("private_sequence", curves, (AUTO,), request)


def _batches(request: Request) -> Iterator[Comparison]:
    tokens, heads = (512, 2) if is_small(request) else (2048, 8)
    sizes = [(batch, tokens, heads) for batch in (1, 2, 4, 8)]
    for direction in DIRECTIONS:
        yield _dilated("dilated_batch", direction, request, sizes)
    curves = {
        f"seq{tokens}_h{heads}_d{dim}": [(batch, tokens, heads, dim) for batch in BATCHES]
        for tokens, heads, dim in ((512, 12, 64), (1024, 16, 64), (2048, 20, 80))
    }
    if request.quick:
        curves = {"seq128_h4_d32": [(batch, 128, 4, 32) for batch in (1, 3, 10)]}
    yield from _private("private_batch", curves, (NONPRIVATE, AUTO), request)


def _heads(request: Request) -> Iterator[Comparison]:
    small = is_small(request)
    batch, tokens = (1, 512) if small else (2, 2048)
    sizes = [(batch, tokens, heads) for heads in ((2, 4, 8) if small else (2, 4, 8, 16, 32))]
    for direction in DIRECTIONS:
        yield _dilated("heads", direction, request, sizes)


def _exponents(rows: Iterable[Row], section: str, size: str) -> Iterator[Row]:
    for direction, own in _directions(rows, section).items():
        name, curve = f"exponents/{section}/{direction}", f"{section}, {direction}"
        yield fitted_row(name, own, size, section="exponents", curve=curve)


def _directions(rows: Iterable[Row], section: str) -> dict[str, list[Row]]:
    return grouped(of_section(rows, section), lambda row: row["config"]["direction"])


def _derive_sequences(rows: Sequence[Row]) -> Iterator[Row]:
    for section in (FIXED, LONG, PROPORTIONAL):
        # In a sequence shorter than a segment, each token has fewer keys.
        whole = [
            row
            for row in of_section(rows, section)
            if row["config"]["tokens"] >= max(row["config"].get("segment_lengths", (0,)))
        ]
        yield from _exponents(whole, section, "tokens")
    for direction, own in _directions(rows, FIXED).items():
        measured = [row for row in own if row["peak_memory_mb"] is not None]
        if len(measured) >= 2:
            yield _bytes_per_token(direction, measured)
    for curve, own in _curves(rows, "private_sequence").items():
        name = f"private_sequence_exponent/{curve}"
        yield fitted_row(name, own, "tokens", section="private_sequence_exponent", curve=curve)


def _derive_batches(rows: Sequence[Row]) -> Iterator[Row]:
    yield from _exponents(rows, "dilated_batch", "batch")
    best = []
    for curve, own in _curves(rows, "private_batch").items():
        columns = {"section": "private_batch_exponent", "curve": curve}
        name = f"private_batch_exponent/{curve}"
        yield fitted_row(name, own, "batch", "tokens_per_s", **columns)
        best.append(optimal_batch(curve, own))
    yield from best
    found = [row for row in best if row["batch"] is not None]
    if found:
        mean = sum(row["batch"] for row in found) / len(found)
        each = ", ".join(f"{row['batch']} ({row['curve']})" for row in found)
        text = f"The optimal batch is {mean:.1f} on average: {each}."
        yield insight("private_batch/optimal", text, mean_optimal_batch=mean)


def _curves(rows: Iterable[Row], section: str) -> dict[str, list[Row]]:
    own = [row for row in of_section(rows, section) if row["config"]["provider"] == AUTO]
    return grouped(own, lambda row: row["curve"])


def optimal_batch(curve: str, rows: Sequence[Row]) -> Row:
    """Return the smallest batch whose tokens/s are within 5% of the highest."""
    speeds = {
        row["config"]["batch"]: row["tokens_per_s"]
        for row in rows
        if row.get("tokens_per_s") is not None
    }
    best = [b for b, speed in speeds.items() if speed >= _CLOSE * max(speeds.values())]
    return output.row(
        f"private_batch_optimal/{curve}",
        {},
        section="private_batch_optimal",
        curve=curve,
        not_measured=[b for row in rows if (b := row["config"]["batch"]) not in speeds],
        batch=min(best, default=None),
        tokens_per_s=speeds[min(best)] if best else None,
        needs=None if best else "a size that was measured",
    )


def _not_measured(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row["not_measured"])) or "none"


def _bytes_per_token(direction: str, rows: Sequence[Row]) -> Row:
    tokens = [row["config"]["batch"] * row["config"]["tokens"] for row in rows]
    peaks = [_MIB * row["peak_memory_mb"] for row in rows]
    return output.row(
        f"bytes_per_token/{direction}",
        {"direction": direction, "tokens": tokens},
        section="bytes_per_token",
        measured=float(scipy.stats.linregress(tokens, peaks).slope),
    )


_CHECKED = "density | checked_rows: checked rows | correct"
_DILATED = columns("direction | segment_lengths: segments", SHAPE, FIGURES, ROOFS, _CHECKED)
_SEQUENCE_TABLES = {
    "private_sequence": columns("curve | tokens", FIGURES, ROOFS),
    "private_sequence_exponent": EXPONENTS,
    **dict.fromkeys((FIXED, LONG, PROPORTIONAL, "quick_table"), _DILATED),
    "exponents": EXPONENTS,
    "bytes_per_token": columns("direction | measured: bytes/token"),
}
BATCH_TABLES = {
    "private_batch": columns("curve | batch | provider", FIGURES, [OVER_NONPRIVATE], ROOFS),
    "private_batch_exponent": EXPONENTS,
    "private_batch_optimal": columns(
        "curve | batch: optimal batch | tokens_per_s: tokens/s", [("not measured", _not_measured)]
    ),
    "dilated_batch": _DILATED,
    "exponents": EXPONENTS,
}
_PRIVATE = "Private training step of attention"
_MS, _SPEED = "median_ms: ms", "tokens_per_s: tokens/s"

SEQUENCE = Suite(
    name="sequence",
    **page("sequence", _SEQUENCE_TABLES),
    plan=_sequences,
    charts=[
        chart("private_sequence", _PRIVATE, "tokens", _MS, "curve"),
        chart(FIXED, "Dilated attention, segments stay", "tokens: T", _MS, "direction"),
        chart(LONG, "Dilated attention, segments stay", "tokens: T", _MS, "direction"),
        chart(PROPORTIONAL, "Dilated attention, segments grow", "tokens: T", _MS, "direction"),
    ],
    derive=_derive_sequences,
)
BATCH = Suite(
    name="batch",
    **page("batch", BATCH_TABLES),
    plan=_batches,
    charts=[
        chart("private_batch", _PRIVATE, "batch", _SPEED, "curve provider"),
        chart("dilated_batch", "Dilated attention by itself", "batch: B", _SPEED, "direction"),
    ],
    derive=_derive_batches,
)
HEADS = Suite(
    name="heads",
    **page("heads", {"heads": _DILATED, "exponents": EXPONENTS}),
    plan=_heads,
    charts=[chart("heads", "Dilated attention", "heads: H", _MS, "direction")],
    derive=lambda rows: _exponents(rows, "heads", "heads"),
)
