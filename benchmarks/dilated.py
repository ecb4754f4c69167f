"""Dilated attention over one size: what the suites over batch, heads and tokens share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .attention import SHAPE, default_dtype, dilated_subject, exponent_row
from .document import (
    CORRECT,
    FIGURES,
    LEAST_SIZES,
    ROOFS,
    Chart,
    Column,
    column,
    config,
    exponent_table,
)
from .private_scaling import insight
from .suite import Measurement, Request, Row, of_section


def dilated_measurement(
    section: str,
    name: str,
    direction: str,
    request: Request,
    tokens: int,
    batch: int,
    heads: int,
    segment_lengths: Sequence[int],
) -> Measurement:
    """A row of dilated attention, D = 64, not causal: rates 1, 2, 4, ... of its segments."""
    return Measurement(
        f"{section}/{direction}/{name}",
        dilated_subject,
        {
            "segment_lengths": tuple(segment_lengths),
            "dilation_rates": tuple(2**n for n in range(len(segment_lengths))),
            "direction": direction,
            "tokens": tokens,
            "batch": batch,
            "heads": heads,
            "head_dim": 64,
            "dtype": default_dtype(request),
            "causal": False,
        },
        {"section": section},
    )


def dilated_chart(section: str, title: str, x: Column, y: str, label: str) -> Chart:
    """A panel of a section of dilated attention, a line for each direction."""
    return Chart(section, title, x, column(y, label), lambda row: row["config"]["direction"])


def curves(rows: Iterable[Row], section: str) -> dict[str, list[Row]]:
    """The rows of a section by their direction."""
    found: dict[str, list[Row]] = {}
    for row in of_section(rows, section):
        found.setdefault(row["config"]["direction"], []).append(row)
    return found


def exponent_rows(rows: Iterable[Row], section: str, size: str) -> Iterator[Row]:
    """How time grows with a size in each direction of a section, as a row and as a sentence."""
    for direction, own in curves(rows, section).items():
        row = exponent_row(section, direction, own, size)
        yield row
        if row["exponent"] is not None and len(row["sizes"]) >= LEAST_SIZES:
            low, high = row["exponent_ci95"]
            text = (
                f"The time of dilated attention ({section}, {direction}) grows with the {size} to "
                f"the power {row['exponent']:.2f} [{low:.2f}, {high:.2f}]."
            )
            yield insight(f"{section}/{direction}", text, exponent=row["exponent"])


DILATED_COLUMNS = (
    config("direction"),
    config("segment_lengths", "segments"),
    *SHAPE,
    *FIGURES,
    *ROOFS,
    column("density"),
    column("checked_rows", "checked rows"),
    *CORRECT,
)
EXPONENTS = exponent_table(
    "exponents", "Time grows to the power", "1: linear in the size, 2: quadratic."
)
