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
from .output import write_text
from .schema import upgraded

# Of the names of two files, without their suffix.
_NEAR = 0.75
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
    """Compare two files, or the results of two folders, and print what is amiss and the tables.

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
    """The files to compare, by name; adds what a folder lacks to the problems."""
    if not old.is_dir() and not new.is_dir():
        return {old.name: (old, new)}
    for path, other in ((old, new), (new, old)):
        if not path.exists():
            raise Unusable(f"{path}: no such folder{_meant(path)}")
        if not path.is_dir():
            raise Unusable(
                f"{path} is no folder and {other} is one; pass two files or two folders"
            )
    names_old, names_new = _results(old), _results(new)
    common = [name for name in names_old if name in names_new]
    if not common:
        raise Unusable(
            f"{old} and {new} have no result of one name ({', '.join(names_old) or 'none'}; "
            f"{', '.join(names_new) or 'none'}); {MAKE_IT}, or pass two files"
        )
    missing = [name for name in names_old if name not in names_new]
    told = f"{new} has no {', '.join(missing)}, and what is missing may be slower"
    if missing and force:
        print(f"Warning: {told}.\n")
    elif missing:
        problems.append(f"{told}; measure it, or compare what is there with --force")
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
            names.append(path.name)
            continue
        if isinstance(found, Mapping) and {"environment", "rows"} <= found.keys():
            names.append(path.name)
    return names


def _meant(path: Path) -> str:
    """A question for the file that was meant instead of one that is not there; else nothing."""
    if path.exists() or not path.parent.is_dir():
        return ""
    # The suffix, which most have, makes no names alike.
    others = {one.stem: one for one in path.parent.iterdir() if one.suffix == path.suffix}
    close = difflib.get_close_matches(path.stem, others, n=1, cutoff=_NEAR)
    return f"; did you mean {os.fspath(others[close[0]])}?" if close else ""


def _read(path: Path) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Unusable(f"{path}: no such file{_meant(path) or f'; {MAKE_IT}'}") from None
    except OSError as error:
        raise Unusable(f"{path}: it cannot be read ({error.strerror}); {MAKE_IT}") from None
    except ValueError as error:
        raise Unusable(f"{path}: not a JSON file ({error}); {MAKE_IT}") from None
    if not isinstance(found, Mapping):
        return found
    try:
        return upgraded(found)
    except ValueError as error:
        raise Unusable(f"{path}: {error}") from None


def _write(path: Path, reports: Mapping[str, Report], *, is_folder: bool) -> None:
    each = {name: report.as_dict() for name, report in reports.items()}
    found = each if is_folder else next(iter(each.values()))
    try:
        write_text(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        raise Unusable(
            f"{path}: it cannot be written ({error.strerror}); pass --json another file"
        ) from None
