"""Output of `epsilon`, `calibrate` and `budget`: text, Markdown and LaTeX tables, and JSON."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Any

from dpflash._json import finite
from dpflash._validate import one_of
from dpflash.accounting import Accountant

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
    """Add the options --json, --format and --plot."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead; null stands for a value that is not finite, unknown "
        "or does not apply to the run",
    )
    parser.add_argument(
        "--format",
        metavar="F",
        help="format of the table: text (default), markdown or latex",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="plot epsilon over the steps and the trade-off curve; needs matplotlib",
    )


def check_output_arguments(args: argparse.Namespace) -> None:
    """Raise a ValueError for unknown or conflicting output options."""
    one_of(format=(args.format, (None, *FORMATS)))
    if args.json and args.format is not None:
        raise ValueError(
            f"format={args.format!r}: --json prints no table; drop one of --format and --json"
        )


def rounded_up(value: float) -> str:
    """The value rounded up to a few digits."""
    return _rounded(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """The value rounded down to a few digits."""
    return _rounded(value, ROUND_FLOOR)


def _rounded(value: float, rounding: str) -> str:
    return str(Context(prec=_SHOWN_DIGITS, rounding=rounding).create_decimal_from_float(value))


def upper_end(name: str, accountant: Accountant) -> str:
    """The label of a value: an upper bound, or an approximation if the accountant has no bound."""
    return f"{name} (upper bound)" if accountant.is_bound else f"{name}, {_NO_BOUND}"


def described(accountant: Accountant) -> str:
    """The accountant's name, with a note if it is an approximation and not a bound."""
    name = accountant.mechanism()
    return name if accountant.is_bound else f"{name}, {_NO_BOUND}"


def as_json(report: dict[str, Any]) -> str:
    """The report as one JSON object."""
    return json.dumps(finite(report), indent=2, allow_nan=False)


def table(
    rows: Sequence[Sequence[str]], *, style: str | None, header: Sequence[str] | None = None
) -> str:
    """Rows of cells as a table.

    Args:
        rows: rows of the same length.
        style: one of FORMATS; None means "text".
        header: names of the columns; without it the first column holds the names of the rows.
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
    """A LaTeX tabular that needs no package."""
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
