"""`dpflash bench compare`: two result files, or all of equal names in two folders."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .compare import Report, Unusable, compare
from .output import write_text
from .schema import upgraded

_MAKE_IT = "pass the JSON that `dpflash bench` writes"
# The chance of a false alarm, over all rows of all files.
_ALPHA = 0.05
_NUMBER = (int, float)
_COLUMNS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "config": (Mapping,),
    "median_ms": (*_NUMBER, type(None)),
    "peak_memory_mb": (*_NUMBER, type(None)),
    "correct": (bool, type(None)),
}


def run_compare(
    old_path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    threshold: float = 0.05,
    force: bool = False,
    json_path: str | os.PathLike[str] | None = None,
) -> int:
    """Compare two files, or the results of two folders, and print tables and problems.

    Args:
        old_path: the baseline; a JSON that `dpflash bench` writes, or a folder of some.
        new_path: the result that is judged; a folder where the other is one.
        threshold: share by which a time or a peak memory may grow.
        force: compare what was measured in another way, broken off, or is missing.
        json_path: where the verdicts are written too; those of folders by file.

    Returns:
        1 for a regression, else 2 where anything cannot be compared, else 0.
    """
    old, new = Path(old_path), Path(new_path)
    reports: dict[str, Report] = {}
    problems: list[str] = []
    try:
        pairs = _pairs(old, new, problems, force)
        for name, files in pairs.items():
            try:
                reports[name] = compare(
                    *(checked(_read(path), os.fspath(path)) for path in files),
                    names=(os.fspath(files[0]), os.fspath(files[1])),
                    threshold=threshold,
                    confidence=1 - _ALPHA / len(pairs),
                    force=force,
                )
            except Unusable as error:
                problems.append(str(error))
        if json_path is not None and reports:
            found = {name: report.as_dict() for name, report in reports.items()}
            held = found if old.is_dir() else next(iter(found.values()))
            write_text(Path(json_path), json.dumps(held, indent=1) + "\n")
    except Unusable as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{json_path}: {error.strerror}; pass --json another file")
    # Behind the tables they would be missed.
    for problem in problems:
        print(f"dpflash: error: {problem}", file=sys.stderr, flush=True)
    for name, report in reports.items():
        title = f"## {name}\n\n" if old.is_dir() else ""
        print(f"{title}{report.markdown()}")
    if any(report.exit_code for report in reports.values()):
        return 1
    return 2 if problems else 0


def _pairs(old: Path, new: Path, problems: list[str], force: bool) -> dict[str, tuple[Path, Path]]:
    """The files to compare, by name; adds the files that a folder lacks to the problems."""
    if not old.is_dir() and not new.is_dir():
        return {old.name: (old, new)}
    for path in (old, new):
        if not path.is_dir():
            raise Unusable(f"{path}: no such folder; pass two files or two folders")
    names_old, names_new = _results(old), _results(new)
    common = [name for name in names_old if name in names_new]
    if not common:
        raise Unusable(f"{old} and {new} have no result of one name; {_MAKE_IT}, or two files")
    missing = [name for name in names_old if name not in names_new]
    text = f"{new} has no {', '.join(missing)}, and what is missing may be slower"
    if missing and force:
        print(f"Warning: {text}.\n")
    elif missing:
        problems.append(f"{text}; measure it, or compare what is there with --force")
    extra = [name for name in names_new if name not in names_old]
    if extra:
        print(f"Not compared, since {old} lacks it: {', '.join(extra)}.\n")
    return {name: (old / name, new / name) for name in common}


def _results(folder: Path) -> list[str]:
    """Names of the JSON files in a folder that are results, or cannot be read."""
    names = []
    for path in sorted(folder.glob("*.json")):
        try:
            found = _read(path)
        except Unusable:
            found = {"environment": {}, "rows": []}
        if isinstance(found, Mapping) and {"environment", "rows"} <= found.keys():
            names.append(path.name)
    return names


def _read(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return upgraded(found) if isinstance(found, Mapping) else found
    except FileNotFoundError:
        raise Unusable(f"{path}: no such file; {_MAKE_IT}") from None
    except OSError as error:
        raise Unusable(f"{path}: it cannot be read ({error.strerror}); {_MAKE_IT}") from None
    except json.JSONDecodeError as error:
        raise Unusable(f"{path}: not a JSON file ({error}); {_MAKE_IT}") from None
    except ValueError as error:
        raise Unusable(f"{path}: {error}") from None


def checked(found: Any, file: str) -> Mapping[str, Any]:
    """A result in which `compare` finds all that it reads.

    Raises:
        Unusable: something is missing or of another type, or a name is there twice.
    """
    held = found if isinstance(found, Mapping) else {}
    environment, rows = held.get("environment"), held.get("rows")
    if not (isinstance(environment, Mapping) and isinstance(rows, list)):
        raise Unusable(f"{file}: it has no environment (an object) and rows (a list); {_MAKE_IT}")
    turns = environment.get("versus")
    launches = turns.get("launches") if isinstance(turns, Mapping) and "run" in turns else None
    if turns is not None and not (type(launches) is int and launches >= 1):
        raise Unusable(f"{file}: its environment's versus is {turns!r}; {_MAKE_IT}")
    seen: set[str] = set()
    for number, row in enumerate(rows):
        problem = _problem(row) or ("it is there twice" if row["name"] in seen else "")
        if problem:
            name = row.get("name") if isinstance(row, Mapping) else None
            raise Unusable(f"{file}: row {name or number!r}: {problem}; {_MAKE_IT}")
        seen.add(row["name"])
    return held


def _problem(row: Any) -> str:
    """Why this is no row; empty where it is one."""
    if not isinstance(row, Mapping):
        return f"expected an object, got {type(row).__name__}"
    for key, kinds in _COLUMNS.items():
        if key not in row:
            return f"it has no {key}"
        if not isinstance(row[key], kinds) or (isinstance(row[key], bool) and bool not in kinds):
            return f"its {key} is {row[key]!r}"
    trials = row.get("samples_ms") or []
    if not (isinstance(trials, list) and all(type(x) in _NUMBER for x in trials)):
        return f"its samples_ms is {trials!r}"
    return ""
