"""`dpflash bench compare`: two result files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .compare import Unusable, compare
from .output import write_text
from .schema import upgraded

_MAKE_IT = "pass the JSON that `dpflash bench` writes"
_COLUMNS = {
    "name": str,
    "config": Mapping,
    "median_ms": int | float | None,
    "peak_memory_mb": int | float | None,
    "correct": bool | None,
}


def run_compare(
    old_path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    threshold: float = 0.05,
    json_path: str | os.PathLike[str] | None = None,
) -> int:
    """Compare two files, and print the table or why they cannot be compared.

    Args:
        old_path: the baseline; a JSON that `dpflash bench` writes.
        new_path: the result that is judged.
        threshold: share by which a time or a peak memory may grow.
        json_path: where the verdicts are written too.

    Returns:
        1 for a regression, 2 where they cannot be compared, else 0.
    """
    paths = (Path(old_path), Path(new_path))
    try:
        report = compare(*(checked(_read(path), path) for path in paths), threshold=threshold)
        if json_path is not None:
            write_text(Path(json_path), json.dumps(report.as_dict(), indent=1) + "\n")
    except Unusable as error:
        print(f"dpflash: error: {error} ({paths[0]}, {paths[1]})", file=sys.stderr, flush=True)
        return 2
    except OSError as error:
        told = f"dpflash: error: {json_path}: {error.strerror}; pass --json another file"
        print(told, file=sys.stderr, flush=True)
        return 2
    print(report.markdown())
    return report.exit_code


def _read(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return upgraded(found) if isinstance(found, Mapping) else found
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}; {_MAKE_IT}") from None
    except ValueError as error:
        raise Unusable(f"{path}: {error}; {_MAKE_IT}") from None


def checked(found: Any, file: str | os.PathLike[str]) -> Mapping[str, Any]:
    """A result in which `compare` finds all that it reads.

    Raises:
        Unusable: something is missing or of another type, or a name is there twice.
    """
    held = found if isinstance(found, Mapping) else {}
    environment, rows = held.get("environment"), held.get("rows")
    if not (isinstance(environment, Mapping) and isinstance(rows, list)):
        raise Unusable(f"{file}: it has no environment and rows; {_MAKE_IT}")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise Unusable(f"{file}: row {number} is no object; {_MAKE_IT}")
        bad = [k for k, kind in _COLUMNS.items() if k not in row or not isinstance(row[k], kind)]
        if bad:
            raise Unusable(f"{file}: row {row.get('name', number)!r}: its {bad[0]}; {_MAKE_IT}")
    if len({row["name"] for row in rows}) < len(rows):
        raise Unusable(f"{file}: a row is there twice; {_MAKE_IT}")
    return held
