"""`dpflash bench compare`: two result files, or all of equal names in two folders."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .comparable import MAKE_IT, Unusable
from .compare import Report, compare
from .results import write_text

# The chance of a false alarm, over all rows of all files.
_ALPHA = 0.05


def run_compare(
    old_path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    threshold: float = 0.05,
    force: bool = False,
    json_path: str | os.PathLike[str] | None = None,
) -> int:
    """Compare two files, or the results of two folders, and print the tables.

    Args:
        old_path: the baseline; a JSON that `dpflash bench` writes, or a folder of some.
        new_path: what is judged; a folder where the other is one.
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
                    *(_read(path) for path in files),
                    names=(os.fspath(files[0]), os.fspath(files[1])),
                    threshold=threshold,
                    confidence=1 - _ALPHA / len(pairs),
                    force=force,
                )
            except Unusable as error:
                problems.append(str(error))
        if json_path is not None and reports:
            _write(Path(json_path), reports, is_folder=old.is_dir())
    except Unusable as error:
        problems.append(str(error))
    for name, report in reports.items():
        title = f"## {name}\n\n" if old.is_dir() else ""
        print(f"{title}{report.markdown()}")
    for problem in problems:
        print(f"dpflash: error: {problem}", file=sys.stderr)
    if any(report.exit_code for report in reports.values()):
        return 1
    return 2 if problems else 0


def _pairs(old: Path, new: Path, problems: list[str], force: bool) -> dict[str, tuple[Path, Path]]:
    """The files to compare, by name; adds what a folder lacks to the problems."""
    if not old.is_dir() and not new.is_dir():
        return {old.name: (old, new)}
    for path, other in ((old, new), (new, old)):
        if not path.is_dir():
            raise Unusable(
                f"{path} is no folder and {other} is one; pass two files or two folders"
                f"{_meant(path)}"
            )
    names_old, names_new = _results(old), _results(new)
    common = [name for name in names_old if name in names_new]
    if not common:
        raise Unusable(
            f"{old} and {new} have no result of one name ({', '.join(names_old) or 'none'}; "
            f"{', '.join(names_new) or 'none'}); {MAKE_IT}, or pass two files"
        )
    missing = [name for name in names_old if name not in names_new]
    if missing and not force:
        problems.append(
            f"{new} has no {', '.join(missing)}, and what is missing may be slower; measure it, "
            "or compare what is there with --force"
        )
    return {name: (old / name, new / name) for name in common}


def _results(folder: Path) -> list[str]:
    """Names of the JSON files in a folder that are results, or cannot be read."""
    names = []
    for path in sorted(folder.glob("*.json")):
        try:
            found = _read(path)
        except Unusable:
            names.append(path.name)
            continue
        if isinstance(found, Mapping) and {"environment", "rows"} <= found.keys():
            names.append(path.name)
    return names


def _meant(path: Path) -> str:
    """A question for the file that was meant instead of one that is not there; else nothing."""
    if path.exists() or not path.parent.is_dir():
        return ""
    close = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=1)
    return f"; did you mean {os.fspath(path.parent / close[0])}?" if close else ""


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unusable(
            f"{path}: not a readable JSON file ({error}); {MAKE_IT}{_meant(path)}"
        ) from None


def _write(path: Path, reports: Mapping[str, Report], *, is_folder: bool) -> None:
    each = {name: report.as_dict() for name, report in reports.items()}
    found = each if is_folder else next(iter(each.values()))
    try:
        write_text(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise Unusable(
            f"{path}: it cannot be written ({error.strerror}); pass --json another file"
        ) from None
