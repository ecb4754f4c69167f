"""Exponents of what grows with a size: their rows, and how a page shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import output as results
from .document import Table, column
from .suite import Row, needs
from .timing import exponent


def fitted_row(
    name: str, rows: Sequence[Row], size: str, value: str = "median_ms", **columns: Any
) -> Row:
    """A row with P of ``value = c size^P``, and its 95% interval.

    Args:
        name: of the row.
        rows: what was measured; those without the value do not count.
        size: the value of their config over which it grows.
        value: the column that grows.
        columns: further columns of the row, such as "section" and "curve".
    """
    measured = [(row["config"][size], row[value]) for row in rows if row.get(value) is not None]
    sizes = [one for one, _ in measured]
    columns.update(over=size, sizes=sizes, exponent=None, exponent_ci95=None)
    if len(set(sizes)) < 3:
        reason = f"three sizes: {len(sizes)} of {len(rows)} were measured"
        return needs(name, {}, reason, **columns)
    power, low, high = exponent(*zip(*measured, strict=True))
    columns.update(exponent=power, exponent_ci95=[low, high])
    return results.row(name, {}, **columns)


def _shown(row: Mapping[str, Any]) -> str:
    if row["exponent"] is None:
        return f"needs: {row['needs']}"
    low, high = row["exponent_ci95"]
    return f"{row['exponent']:.3f} [{low:.3f}, {high:.3f}]"


def exponent_table(section: str, title: str, note: str) -> Table:
    """The table of a section of such rows."""
    columns = (
        column("curve"),
        column("over"),
        ("exponent [95%]", _shown),
        ("sizes", lambda row: ", ".join(str(size) for size in row["sizes"]) or "none"),
    )
    note += " The interval is that of the fit to the logarithms."
    return Table(section, title, columns, note)
