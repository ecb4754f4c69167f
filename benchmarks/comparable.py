"""What a comparison reads of a result file, and which files it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

MAKE_IT = "pass the JSON that `dpflash bench` writes"

# Loads that differ by more than this, as a factor and as a number, make times differ too.
_LOADS_FACTOR, _LOADS_APART = 2, 1
_MUST_AGREE = ("suite", "device", "threads", "clock", "quick")
_SHOULD_AGREE = ("cores", "python", "torch")
_NUMBER = (int, float)
_ROUNDING = 1e-9
_COLUMNS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "config": (Mapping,),
    "median_ms": (*_NUMBER, type(None)),
    "peak_memory_mb": (*_NUMBER, type(None)),
    "correct": (bool, type(None)),
}


class Unusable(ValueError):
    """The two files cannot be compared; the message says why."""


def checked_rows(found: Any, file: str) -> dict[str, Row]:
    """The rows by their names, each with what a comparison reads of it."""
    held = found if isinstance(found, Mapping) else {}
    environment, rows = held.get("environment"), held.get("rows")
    if not (isinstance(environment, Mapping) and isinstance(rows, list)):
        raise Unusable(f"{file}: it has no environment (an object) and rows (a list); {MAKE_IT}")
    turns = environment.get("versus")
    if turns is not None and not (
        isinstance(turns, Mapping) and _is_count(turns.get("launches")) and "run" in turns
    ):
        raise Unusable(
            f"{file}: its environment's versus is {turns!r} and tells no run and launches; pass "
            "what `dpflash bench versus` writes"
        )
    named: dict[str, Row] = {}
    for number, row in enumerate(rows):
        lack = _lack(row)
        if lack:
            name = row.get("name") if isinstance(row, Mapping) else None
            raise Unusable(f"{file}: row {name or number!r}: {lack}; {MAKE_IT}")
        if row["name"] in named:
            raise Unusable(
                f"{file}: row {row['name']!r}: it is there twice, so that it is not clear which "
                "to take; measure again"
            )
        named[row["name"]] = row
    return named


def _lack(row: Any) -> str:
    """What keeps a row from being one; empty where nothing does."""
    if not isinstance(row, Mapping):
        return f"expected an object, got {type(row).__name__}"
    for key, kinds in _COLUMNS.items():
        if key not in row:
            return f"it has no {key}"
        if not isinstance(row[key], kinds) or (isinstance(row[key], bool) and bool not in kinds):
            return f"its {key} is {row[key]!r}"
    for key in ("samples_ms", "ci95_ms", "range_ms"):
        numbers = row.get(key) or []
        if not (isinstance(numbers, list) and all(map(_is_number, numbers))):
            return f"its {key} is {numbers!r}"
    # Rows that are too slow for an interval have a range.
    interval = row.get("ci95_ms") or row.get("range_ms") or []
    trials = row.get("samples_ms") or interval
    median = row["median_ms"]
    if trials and median is not None and not bad_figures(row):
        # Milliseconds and seconds round apart.
        low, high = min(trials) * (1 - _ROUNDING), max(trials) * (1 + _ROUNDING)
        if not low <= median <= high:
            return f"its median_ms is {median!r}, and its trials are from {low:g} to {high:g}"
    needed = median is not None and row["correct"] is not None
    if needed and not row.get("samples_ms") and len(interval) != 2:
        return "it has a median and neither trials nor an interval"
    return ""


def is_figure(*rows: Row | None) -> bool:
    """Whether rows of one name follow from measurements, such as an exponent, and are none."""
    there = [row for row in rows if row is not None]
    measured = any(
        row["correct"] is not None or row.get("samples_ms") or row.get("ci95_ms") for row in there
    )
    return not measured and not all(row.get("needs") for row in there)


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def broken_off(old: Row, new: Row, names: tuple[str, str], force: bool) -> list[str]:
    """Warnings of runs that did not come to their end, of which the new one is refused."""
    files = zip((old, new), names, strict=True)
    texts = [f"{name}: the run was broken off" for found, name in files if not _is_whole(found)]
    if not _is_whole(new) and not force:
        raise Unusable(
            f"{texts[-1]}, and what is missing may be slower; measure again, or compare what is "
            "there with --force"
        )
    return texts


def _is_whole(found: Row) -> bool:
    return bool(found.get("complete", True))


def unlike_loads(old: Row, new: Row) -> str:
    """The load averages of two environments where they are too unlike to compare; else empty."""
    loads: list[Any] = [environment.get("load_average") for environment in (old, new)]
    if not all(_is_number(load) for load in loads):
        return ""
    low, high = sorted(loads)
    if high <= _LOADS_FACTOR * low or high - low <= _LOADS_APART:
        return ""
    return f"load averages {loads[0]:g} and {loads[1]:g}"


def turns_of(found: Mapping[str, Any]) -> Any:
    """Of which run of `versus` a result is; None of another one."""
    return found["environment"].get("versus")


def differences(old: Row, new: Row, force: bool) -> list[str]:
    """Warnings of what was measured in another way, some of which is refused without force."""

    def told(keys: Iterable[str]) -> list[str]:
        unlike = [key for key in keys if old.get(key) != new.get(key)]
        return [f"{key} is {old.get(key)!r} in OLD and {new.get(key)!r} in NEW" for key in unlike]

    refused = told(_MUST_AGREE)
    if refused and not force:
        raise Unusable(f"{'; '.join(refused)}: measure both alike, or compare them with --force")
    return refused + told(_SHOULD_AGREE)


def bad_figures(row: Row) -> str:
    """Those that cannot be measurements, in words; empty where there are none."""
    times = [row["median_ms"], *(row.get("samples_ms") or row.get("ci95_ms") or ())]
    if row["median_ms"] is not None and not all(0 < ms < math.inf for ms in times):
        return f"a time that is no finite number above 0 (median {row['median_ms']!r} ms)"
    peak = row["peak_memory_mb"]
    if peak is not None and not 0 <= peak < math.inf:
        return f"a peak memory of {peak!r} MiB"
    return ""
