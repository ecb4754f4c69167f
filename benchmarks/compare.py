"""`dpflash bench compare`: compares two results of a benchmark row by row and finds slower rows.

If `dpflash bench versus` measured two checkouts in turns, their trials are compared in pairs. Two
separate runs are compared by the intervals of their medians. `significance` has the tests.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpflash import _validate

from .output import SCHEMA, markdown_table, write_text
from .significance import CONFIDENCE, Test, holm, of_separate_runs, of_turns

Row = Mapping[str, Any]

_MAKE_IT = "pass the JSON that `dpflash bench` writes"

# Growth of memory, in MiB, that is not reported, since the allocator alone may cause it.
MOST_MORE_MIB = 8.0
# In separate runs, rows with fewer trials are undecided.
FEWEST_TRIALS = 8
_MUST_AGREE = ("suite", "device", "threads", "clock", "quick")
_REGRESSIONS = ("slower", "more memory", "fails")
_OTHERS = ("undecided", "faster", "unchanged", "not comparable")
_BY_TIMES = "by its times"  # verdict of a row until its times are tested


class Unusable(ValueError):
    """Raised if two results cannot be compared; the message gives the reason."""


@dataclass(frozen=True)
class Line:
    """The result of comparing one row."""

    name: str  # name of the row
    # "slower", "more memory", "fails" (the new row is wrong, missing, without figures or measured
    # otherwise), "undecided" (the difference may be chance), "faster", "unchanged" or "not
    # comparable" (the old row is missing or without figures)
    verdict: str
    old_ms: float | None = None  # median
    new_ms: float | None = None
    ratio: float | None = None  # new time over old time
    interval: tuple[float, float] | None = None  # 95% interval of the ratio
    p: float | None = None  # p-value of "not slower", adjusted over all rows (Holm)
    note: str = ""  # the reason for the verdict, if it needs a reason

    @property
    def is_regression(self) -> bool:
        """Whether the verdict makes the comparison fail."""
        return self.verdict in _REGRESSIONS


@dataclass(frozen=True)
class Report:
    """The comparison of two results."""

    lines: tuple[Line, ...]  # a line for each measured row of either result
    paired: bool  # whether the trials of both results took turns
    threshold: float  # allowed relative increase of a time or of a peak memory

    @property
    def exit_code(self) -> int:
        """1 for a regression, else 0."""
        return int(any(line.is_regression for line in self.lines))

    @property
    def summary(self) -> str:
        """The number of rows that were compared, and the number with each verdict."""
        verdicts = [line.verdict for line in self.lines]
        texts = [f"{sum(line.ratio is not None for line in self.lines)} compared"]
        texts += [
            f"{verdicts.count(word)} {word}"
            for word in (*_REGRESSIONS, *_OTHERS)
            if word in verdicts or word == "slower"
        ]
        way = "trials took turns" if self.paired else "separate runs: in CI take `versus`"
        return f"{', '.join(texts)} (threshold {self.threshold:.3g}, {way})"

    def markdown(self) -> str:
        """Return the table and the summary as Markdown."""
        ratio = f"ratio [{CONFIDENCE:.0%}]"
        header = ("row", "old ms", "new ms", ratio, "p (adjusted)", "verdict")
        return f"{markdown_table(header, map(_cells, self.lines))}\n\n{self.summary}\n"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {**asdict(self), "summary": self.summary, "exit_code": self.exit_code}


def _cells(line: Line) -> tuple[Any, ...]:
    ratio = None
    if line.ratio is not None and line.interval is not None:
        ratio = f"{line.ratio:.3f} [{line.interval[0]:.3f}, {line.interval[1]:.3f}]"
    verdict = line.verdict.upper() if line.is_regression else line.verdict
    note = f" ({line.note})" if line.note else ""
    return (line.name, line.old_ms, line.new_ms, ratio, line.p, verdict + note)


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, threshold: float = 0.05) -> Report:
    """Compare two results of `suite.run_suite`, without peers' rows and derived rows.

    Raises Unusable if the environments differ, a run was interrupted, or no row is in both.

    - If trials took turns, a row is slower if the estimated ratio of new to old time exceeds
      1 + threshold and is significantly above 1 (one-sided, 5% over all rows, Holm).
    - In separate runs, a row is slower if its new interval lies above its old interval by more
      than the threshold. If trials are fewer than 8 or loads differ, the row is undecided.
    """
    _validate.positive(threshold=threshold)
    environments = (old["environment"], new["environment"])
    in_old, in_new = ([found.get(key) for key in _MUST_AGREE] for found in environments)
    unlike = [
        f"{key} is {a!r} in OLD and {b!r} in NEW"
        for key, a, b in zip(_MUST_AGREE, in_old, in_new, strict=True)
        if a != b
    ]
    if unlike:
        raise Unusable(f"{'; '.join(unlike)}: measure both alike")
    if not all(found.get("complete", True) for found in (old, new)):
        raise Unusable("a run was broken off, so slower rows may be missing; measure again")
    turns = environments[0].get("versus")
    if turns != environments[1].get("versus"):
        turns = None
    pairs = _pairs(old["rows"], new["rows"])
    lines = {}
    for name, pair in pairs.items():
        verdict, note = _verdict(*pair)
        old_ms, new_ms = (row["median_ms"] if row and _is_measured(row) else None for row in pair)
        lines[name] = Line(name, verdict, old_ms, new_ms, note=note)
    unlike_loads = not turns and _are_loads_unlike(*environments)
    tests: dict[str, Test] = {}
    for name, line in lines.items():
        if line.verdict != _BY_TIMES:
            continue
        a, b = (np.asarray(row and row["samples_ms"], float) for row in pairs[name])
        if turns:
            tests[name] = of_turns(a, b, _launches(name, len(a), len(b), turns))
        elif not unlike_loads and min(len(a), len(b)) >= FEWEST_TRIALS:
            tests[name] = of_separate_runs(a, b)
        else:
            why = "unlike loads" if unlike_loads else "too few trials"
            ratio = float(np.median(b) / np.median(a))
            lines[name] = replace(line, verdict="undecided", note=why, ratio=ratio)
    p = {
        verdict: holm({name: test.p[verdict] for name, test in tests.items() if test.p})
        for verdict in ("slower", "faster")
    }
    for name, test in tests.items():
        adjusted = {verdict: own[name] for verdict, own in p.items() if name in own}
        lines[name] = _judge(lines[name], test, adjusted, threshold)
    for name, pair in pairs.items():
        lines[name] = _judge_memory(lines[name], *pair, threshold)
    if all(line.verdict == "not comparable" for line in lines.values()):
        raise Unusable("no row of dpflash can be compared; pass two runs of one suite")
    return Report(tuple(lines.values()), bool(turns), threshold)


def _are_loads_unlike(old: Row, new: Row) -> bool:
    """Whether two load averages differ by more than 1, and also by a factor of more than 2."""
    a, b = old.get("load_average"), new.get("load_average")
    return a is not None and b is not None and abs(a - b) > max(1, min(a, b))


def _pairs(old: Iterable[Row], new: Iterable[Row]) -> dict[str, tuple[Row | None, Row | None]]:
    """Return (old, new) rows by name, without peers' rows and rows derived from other rows."""
    by_name = [{row["name"]: row for row in rows} for rows in (old, new)]
    found = {}
    for name in {**by_name[0], **by_name[1]}:
        pair = (by_name[0].get(name), by_name[1].get(name))
        there = [row for row in pair if row is not None]
        is_own = any(row["correct"] is not None or row.get("samples_ms") for row in there)
        is_own = is_own or all(row.get("needs") for row in there)
        if is_own and not all(row.get("peer") for row in there):
            found[name] = pair
    return found


def _verdict(old: Row | None, new: Row | None) -> tuple[str, str]:
    """Return (verdict, reason); the verdict is _BY_TIMES if it depends on a test of the times."""
    for row, which in ((old, "old"), (new, "new")):
        if row is not None and not _is_measured(row):
            return "fails", f"a figure of the {which} file is no measurement"
    was_wrong = old is not None and old["correct"] is False
    if new is not None and new["correct"] is False and not was_wrong:
        return "fails", new.get("failure") or "it is wrong now"
    if old is None or was_wrong or (old["median_ms"] is None and not old["correct"]):
        return "not comparable", "the old file has no figures of it"
    if new is None:
        return "fails", "missing in the new file"
    if old["config"] != new["config"]:
        return "fails", "its config differs"
    if old["correct"] and new["correct"] is None:
        return "fails", new.get("needs") or "it is not checked any more"
    if old["median_ms"] is None:
        return "unchanged", ""
    if new["median_ms"] is None:
        return "fails", new.get("needs") or "it has no figures any more"
    if old.get("range_ms") or new.get("range_ms"):
        return "not comparable", "it is slow: too few calls"
    if not (old.get("samples_ms") and new.get("samples_ms")):
        return "fails", "its trials are missing"
    return _BY_TIMES, ""


def _is_measured(row: Row) -> bool:
    times = () if row["median_ms"] is None else (row["median_ms"], *(row.get("samples_ms") or ()))
    peak = row["peak_memory_mb"] or 0.0
    return 0 <= peak < math.inf and all(0 < ms < math.inf for ms in times)


def _launches(name: str, old: int, new: int, turns: Mapping[str, Any]) -> int:
    launches = int(turns["launches"])
    if old != new or old % launches or old < 2:
        raise Unusable(
            f"row {name!r}: {old} and {new} trials in {launches} launches do not pair: "
            "expected equal numbers, at least 2, and equally many per launch; measure both again"
        )
    return launches


def _judge(line: Line, test: Test, p: Mapping[str, float], threshold: float) -> Line:
    edge = math.log1p(threshold)
    low, high = test.interval
    way = "slower" if test.estimate > 0 else "faster"
    # Separate runs have no p-value, so the whole interval must be beyond the threshold.
    is_sure = p[way] < 1 - CONFIDENCE if p else low > edge or high < -edge
    verdict, note = "unchanged", ""
    if abs(test.estimate) > edge:
        verdict, note = (way, "") if is_sure else ("undecided", "it may be chance")
    ratio, interval = math.exp(test.estimate), (math.exp(low), math.exp(high))
    return replace(
        line, verdict=verdict, note=note, p=p.get("slower"), ratio=ratio, interval=interval
    )


def _judge_memory(line: Line, old: Row | None, new: Row | None, threshold: float) -> Line:
    if old is None or new is None or line.verdict in ("not comparable", "fails", "slower"):
        return line
    before, now = old["peak_memory_mb"], new["peak_memory_mb"]
    if before is None:
        return line
    if now is None:
        return replace(line, verdict="fails", note="its peak memory is not measured any more")
    if now > max(before * (1 + threshold), before + MOST_MORE_MIB):
        return replace(line, verdict="more memory", note=f"{before:.0f} to {now:.0f} MiB")
    return line


def run_compare(
    old_path: str | os.PathLike[str],
    new_path: str | os.PathLike[str],
    *,
    threshold: float = 0.05,
    json_path: str | os.PathLike[str] | None = None,
) -> int:
    """Compare two JSON files of `dpflash bench`; print the table, or why comparing is impossible.

    Returns 1 for a regression, 2 if the files cannot be compared, else 0. The report is also
    written to `json_path` if this is not None.
    """
    problem = ""
    try:
        results = [_read(Path(path)) for path in (old_path, new_path)]
        report = compare(*results, threshold=threshold)
        if json_path is not None:
            write_text(Path(json_path), json.dumps(report.as_dict(), indent=1) + "\n")
    except Unusable as error:
        problem = str(error)
    except OSError as error:
        problem = f"{json_path}: {error.strerror}; pass --json another file"
    if problem:
        print(f"dpflash: error: {problem}", file=sys.stderr, flush=True)
        return 2
    print(report.markdown())
    return report.exit_code


def _read(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}; {_MAKE_IT}") from None
    except ValueError as error:
        raise Unusable(f"{path}: {error}; {_MAKE_IT}") from None
    if not isinstance(found, Mapping) or not {"environment", "rows"} <= found.keys():
        raise Unusable(f"{path}: it has no environment and rows; {_MAKE_IT}")
    if (schema := found.get("schema", SCHEMA)) != SCHEMA:
        raise Unusable(f"{path}: schema={schema!r}, this dpflash reads {SCHEMA}; {_MAKE_IT}")
    return found
