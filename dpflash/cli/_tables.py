"""What `epsilon`, `calibrate` and `budget` print: tables for a terminal or a paper, and JSON."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from dpflash._validate import one_of
from dpflash.accounting import Accountant

__all__ = [
    "add_output_arguments",
    "as_json",
    "check_output_arguments",
    "described",
    "rounded_down",
    "rounded_up",
    "table",
    "upper_end",
]

FORMATS = ("text", "markdown", "latex")

_SHOWN_DIGITS = 6
_NO_BOUND = "no bound (approximation)"
_LATEX_ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """How the answer is told."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead; null stands for no finite or no known value, or for "
        "what the run does not have",
    )
    parser.add_argument(
        "--format",
        metavar="F",
        help="how the table is written: text (default), markdown or latex",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw epsilon over the steps and the trade-off curve; needs matplotlib",
    )


def check_output_arguments(args: argparse.Namespace) -> None:
    """Refuse contradictory or unknown ones."""
    one_of(format=(args.format, (None, *FORMATS)))
    if args.json and args.format is not None:
        raise ValueError(
            f"format={args.format!r}: --json prints no table; leave one of --format and --json out"
        )


def rounded_up(value: float) -> str:
    """The value in some digits, never below it."""
    return _rounded(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """The value in some digits, never above it."""
    return _rounded(value, ROUND_FLOOR)


def _rounded(value: float, rounding: str) -> str:
    return str(Context(prec=_SHOWN_DIGITS, rounding=rounding).create_decimal_from_float(value))


def upper_end(name: str, accountant: Accountant) -> str:
    """The name of a value of which this accountant tells the upper end."""
    return f"{name} (upper bound)" if accountant.is_bound else f"{name}, {_NO_BOUND}"


def described(accountant: Accountant) -> str:
    """The accountant's name, and whether it bounds nothing."""
    name = accountant.mechanism()
    return name if accountant.is_bound else f"{name}, {_NO_BOUND}"


def as_json(report: dict[str, Any]) -> str:
    """The report as one JSON object."""
    return json.dumps(_finite(report), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """The value with None for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def table(
    rows: Sequence[Sequence[str]], *, style: str | None, header: Sequence[str] | None = None
) -> str:
    """Rows of cells as a table.

    Args:
        rows: all of the same length.
        style: one of FORMATS; None is "text".
        header: the columns' names; without, the first column names the rows.
    """
    if style == "markdown":
        return _markdown(rows, header)
    if style == "latex":
        return _latex(rows, header)
    lines = [*([] if header is None else [header]), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [[f"{c:<{w}}" for c, w in zip(line, widths, strict=True)] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def _markdown(rows: Sequence[Sequence[str]], header: Sequence[str] | None) -> str:
    columns = len(rows[0]) if header is None else len(header)
    head = [""] * columns if header is None else header
    lines = [head, ["---"] * columns, *rows]
    escaped = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _latex(rows: Sequence[Sequence[str]], header: Sequence[str] | None) -> str:
    """A tabular of plain LaTeX, which needs no package."""
    columns = len(rows[0]) if header is None else len(header)
    lines = [rf"\begin{{tabular}}{{{'l' * columns}}}", r"\hline"]
    if header is not None:
        lines += [_latex_line(header), r"\hline"]
    return "\n".join([*lines, *map(_latex_line, rows), r"\hline", r"\end{tabular}"])


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(map(_latex_cell, cells)) + r" \\"


def _latex_cell(cell: str) -> str:
    if cell == "Infinity":
        return r"$\infty$"
    power = re.fullmatch(r"(\d+(?:\.\d+)?)[eE]([+-]?\d+)", cell)
    if power is not None:
        return rf"${power[1]} \times 10^{{{int(power[2])}}}$"
    return "".join(_LATEX_ESCAPES.get(character, character) for character in cell)
