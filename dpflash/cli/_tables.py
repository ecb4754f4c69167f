"""Output of `epsilon`, `calibrate` and `budget`: tables of text, and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from dpflash._json import finite
from dpflash.accounting import Accountant

from ._parser import add_options

_OPTIONS = {
    "--json": "print one JSON object instead. null stands for a value that is unknown, not "
    "finite, or does not apply to the run",
    "--plot FILE.png": "write a plot of epsilon over the steps and of the trade-off curve; needs "
    "matplotlib",
}

_SHOWN_DIGITS = 6
_NO_BOUND = "no bound (approximation)"


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --json and --plot."""
    add_options(parser, _OPTIONS)


def rounded_up(value: float) -> str:
    """Return the value rounded up to a few digits."""
    return _rounded(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """Return the value rounded down to a few digits."""
    return _rounded(value, ROUND_FLOOR)


def _rounded(value: float, rounding: str) -> str:
    return str(Context(prec=_SHOWN_DIGITS, rounding=rounding).create_decimal_from_float(value))


def upper_end(name: str, accountant: Accountant) -> str:
    """Return the label of an epsilon: "upper bound", or for some accountants an approximation."""
    return f"{name} (upper bound)" if accountant.is_bound else f"{name}, {_NO_BOUND}"


def described(accountant: Accountant) -> str:
    """Return the accountant's name, with a note if its epsilon is not an upper bound."""
    name = accountant.mechanism()
    return name if accountant.is_bound else f"{name}, {_NO_BOUND}"


def as_json(report: dict[str, Any]) -> str:
    """Return the report as one JSON object."""
    return json.dumps(finite(report), indent=2, allow_nan=False)


def table(rows: Sequence[Sequence[str]], header: Sequence[str] | None = None) -> str:
    """Return rows of cells, all of one length, as a table; `header` names the columns."""
    lines = [*([] if header is None else [header]), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [[f"{c:<{w}}" for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)
