"""Writes a benchmark's results as JSON, Markdown tables and a picture.

The JSON is ``{"schema": 3, "environment": {...}, "rows": [...]}``. Each row has at least the keys
of `COLUMNS`: a name, its config, the figures of `timing.Statistics` (None if nothing was timed),
the peak memory, and whether its result was correct. Keys that end in "_mb" are in MiB (2^20
bytes). Other programs rely on these names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 3
COLUMNS = ("name", "config", "median_ms", "ci95_ms", "cv", "trials", "peak_memory_mb", "correct")


def row(name: str, config: Mapping[str, Any], **figures: Any) -> dict[str, Any]:
    """Return a row with all columns; missing figures are None, and missing `trials` are 0."""
    empty: dict[str, Any] = dict.fromkeys(COLUMNS)
    return {**empty, "name": name, "config": dict(config), "trials": 0, **figures}


def require_drawing() -> None:
    """Raise ValueError if the picture cannot be drawn; call this before any measurement."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "the picture needs matplotlib, which is not installed; pip install 'dpflash[plot]'"
        ) from error


def make_folder(out: str | os.PathLike[str]) -> Path:
    """Return the folder of the results; create it if missing, raise ValueError if impossible."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"out={os.fspath(out)!r}: it cannot be a folder ({error.strerror}); pass another"
        ) from error
    return folder


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Write results atomically; NaN and infinity, which JSON does not have, become null."""
    for entry in found["rows"]:
        missing = [column for column in COLUMNS if column not in entry]
        if missing:
            raise ValueError(f"row {entry.get('name')!r} lacks {missing}; make it with row()")
    finite = json.loads(json.dumps({"schema": SCHEMA, **found}), parse_constant=lambda name: None)
    write_text(path, json.dumps(finite, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: other processes see the old or the new content."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_picture(path: Path, figure: Any) -> None:
    """Write a matplotlib Figure as a PNG file, atomically."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    figure.savefig(part, dpi=110, format="png")
    part.replace(path)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; None is shown as a dash, a float with three digits."""
    lines = [header, ["---"] * len(header), *([shown(cell) for cell in line] for line in rows)]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def shown(value: Any) -> str:
    """Return the text of a value in a table's cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
