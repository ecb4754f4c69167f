"""Whether a benchmark became slower: two result files, row by row.

Files whose trials took turns (`versus`) are compared trial by trial, and a launch of the two
processes is what is independent of the next. Files of separate runs are compared as two samples,
which says nothing of how the machine changed between them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from dpflash import _validate

from .results import markdown_table, write_text

Row = Mapping[str, Any]

# Growth of memory that is flagged is at least this many MiB: less is a matter of the allocator.
MOST_MORE_MIB = 8.0
# Where launches are fewer, each round counts as independent.
_FEWEST_LAUNCHES = 3
_MUST_AGREE = ("suite", "device", "threads", "clock", "quick")
_NUMBER = (int, float)
_COLUMNS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "config": (Mapping,),
    "median_ms": (*_NUMBER, type(None)),
    "peak_memory_mb": (*_NUMBER, type(None)),
    "correct": (bool, type(None)),
}
_MAKE_IT = "pass the JSON that `dpflash bench` writes"


class Unusable(ValueError):
    """The two files cannot be compared; the message says why."""


@dataclass(frozen=True)
class Line:
    """What became of a row.

    Attributes:
        name: of the row.
        verdict: "slower", "more memory", "slower, more memory", "fails", "faster", "unchanged",
            "new" or "not comparable".
        old_ms, new_ms: medians.
        ratio: of new over old time, and its interval at the report's confidence.
        interval: (low, high).
        p: of the null hypothesis that it takes no longer, corrected for the number of rows.
        memory_ratio: of new over old peak memory; None where the old one is 0.
        note: why, where the verdict does not tell.
    """

    name: str
    verdict: str
    old_ms: float | None = None
    new_ms: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    memory_ratio: float | None = None
    note: str = ""

    @property
    def is_regression(self) -> bool:
        """Whether the comparison must not pass."""
        return self.verdict in ("slower", "more memory", "slower, more memory", "fails")


@dataclass(frozen=True)
class Report:
    """The comparison of two files.

    Attributes:
        lines: one for each row of either file.
        paired: whether their trials took turns.
        threshold: share by which a time or a memory may grow.
        confidence: of the intervals; 1 less it is the chance of a false alarm over all rows.
        warnings: what to keep in mind.
    """

    lines: tuple[Line, ...]
    paired: bool
    threshold: float
    confidence: float
    warnings: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Line, ...]:
        """The lines for which the comparison must not pass."""
        return tuple(line for line in self.lines if line.is_regression)

    @property
    def exit_code(self) -> int:
        """1 for a regression, else 0."""
        return int(bool(self.regressions))

    def markdown(self) -> str:
        """The table, and what is to be said of it."""
        header = ("row", "old ms", "new ms", f"ratio [{self.confidence:.0%}]", "p", "verdict")
        table = markdown_table(header, [_cells(line) for line in self.lines])
        way = "trials took turns" if self.paired else "separate runs"
        count = len(self.regressions)
        end = f"{count} of {len(self.lines)} rows regressed (more than {self.threshold:.0%})"
        return "\n\n".join([table, *(f"Warning: {text}." for text in self.warnings)]) + (
            f"\n\n{end}; {way}.\n"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "exit_code": self.exit_code}


@dataclass(frozen=True)
class _Test:
    """Of log(new / old): estimate, interval, and p of "it is not above 0"."""

    estimate: float
    interval: tuple[float, float]
    p: float | None
    p_faster: float | None
    is_apart: bool = False  # where there is no p: the intervals of the medians do not meet


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    threshold: float = 0.05,
    confidence: float = 0.95,
    force: bool = False,
) -> Report:
    """Compare two results, as `suite.run_suite` writes them.

    A row is slower where the estimate of its ratio is beyond 1 + threshold and the ratio is
    significantly above 1: one-sided, at 1 - confidence over all rows together (Holm). It fails
    where it had figures, or was right, and now is missing, or has none; where it is wrong and was
    not; and where a figure of either file is no finite number above 0.

    Args:
        old: the baseline.
        new: what is judged.
        threshold: share by which a time or a peak memory may grow, > 0.
        confidence: in (0, 1).
        force: compare what was measured on another device or in another way, or broken off.

    Raises:
        Unusable: they were measured in different ways, one is no whole result, or they have no
            row in common that can be compared.
    """
    return _compare(old, new, ("the old file", "the new file"), threshold, confidence, force)


def _compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    names: tuple[str, str],
    threshold: float,
    confidence: float,
    force: bool,
) -> Report:
    """Like `compare`; messages call the files by the names."""
    _validate.positive(threshold=threshold)
    _validate.probability(confidence=confidence)
    rows_old, rows_new = _rows(old, names[0]), _rows(new, names[1])
    paired = _turns(old) is not None and _turns(old) == _turns(new)
    warnings = _differences(old["environment"], new["environment"], force)
    warnings += _broken_off(old, new, names, force)
    if not paired:
        warnings.append(
            "the runs are separate, and what changed on the machine between them is not covered; "
            "`dpflash bench versus` measures two checkouts in turns"
        )
    launches = int(_turns(old)["launches"]) if paired else 1
    tests = {
        name: _test(rows_old[name], row, paired, launches, confidence)
        for name, row in rows_new.items()
        if name in rows_old and _are_timed(rows_old[name], row)
    }
    p_slower = _holm({name: test.p for name, test in tests.items()})
    p_faster = _holm({name: test.p_faster for name, test in tests.items()})
    if not paired:
        warnings += _powerless(tests, rows_old, rows_new, 1 - confidence)
    lines = [
        _line(name, rows_old.get(name), rows_new.get(name), tests.get(name))
        for name in dict.fromkeys([*rows_old, *rows_new])
    ]
    if all(line.verdict in ("new", "not comparable") for line in lines):
        raise Unusable(
            f"{' and '.join(names)}: no row can be compared (rows: {len(rows_old)} and "
            f"{len(rows_new)}); pass two runs of one suite"
        )
    judged = [
        _judge(line, tests[line.name], p_slower, p_faster, threshold, 1 - confidence)
        if line.name in tests
        else line
        for line in lines
    ]
    done = [
        _judge_memory(line, rows_old.get(line.name), rows_new.get(line.name), threshold)
        for line in judged
    ]
    return Report(tuple(done), paired, threshold, confidence, tuple(warnings))


def run_compare(
    old_path: str | Path,
    new_path: str | Path,
    *,
    threshold: float = 0.05,
    force: bool = False,
    json_path: str | Path | None = None,
) -> int:
    """Compare two files and print the table.

    Returns:
        1 for a regression, 0 for none, 2 for files that cannot be compared.
    """
    names = (os.fspath(old_path), os.fspath(new_path))
    try:
        old, new = (_read(Path(name)) for name in names)
        report = _compare(old, new, names, threshold, confidence=0.95, force=force)
        if json_path is not None:
            _write(Path(json_path), report)
    except Unusable as error:
        print(f"dpflash: error: {error}", file=sys.stderr)
        return 2
    print(report.markdown(), end="")
    return report.exit_code


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unusable(f"{path}: not a readable JSON file ({error}); {_MAKE_IT}") from None


def _write(path: Path, report: Report) -> None:
    try:
        write_text(path, json.dumps(report.as_dict(), indent=1) + "\n")
    except OSError as error:
        raise Unusable(
            f"{path}: it cannot be written ({error.strerror}); pass --json another file"
        ) from None


def _rows(found: Any, file: str) -> dict[str, Row]:
    """The rows by their names, each with what a comparison reads of it."""
    held = found if isinstance(found, Mapping) else {}
    environment, rows = held.get("environment"), held.get("rows")
    if not (isinstance(environment, Mapping) and isinstance(rows, list)):
        raise Unusable(f"{file}: it has no environment (an object) and rows (a list); {_MAKE_IT}")
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
            raise Unusable(f"{file}: row {name or number!r}: {lack}; {_MAKE_IT}")
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
    for key in ("samples_ms", "ci95_ms"):
        numbers = row.get(key) or []
        if not (isinstance(numbers, list) and all(map(_is_number, numbers))):
            return f"its {key} is {numbers!r}"
    interval = row.get("ci95_ms") or []
    if row["median_ms"] is not None and not row.get("samples_ms") and len(interval) != 2:
        return "it has a median and neither trials nor an interval"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, _NUMBER) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _broken_off(old: Row, new: Row, names: tuple[str, str], force: bool) -> list[str]:
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


def _turns(found: Mapping[str, Any]) -> Any:
    return found["environment"].get("versus")


def _differences(old: Row, new: Row, force: bool) -> list[str]:
    """Warnings of what was measured in another way, refused without force."""
    unlike = [key for key in _MUST_AGREE if old.get(key) != new.get(key)]
    texts = [f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in unlike]
    if texts and not force:
        raise Unusable(f"{'; '.join(texts)}: measure both alike, or compare them with --force")
    return texts


def _are_timed(old: Row, new: Row) -> bool:
    return (
        old["config"] == new["config"]
        and new["correct"] is not False
        and old["correct"] is not False
        and old["median_ms"] is not None
        and new["median_ms"] is not None
        and not (_bad_figures(old) or _bad_figures(new))
    )


def _bad_figures(row: Row) -> str:
    """Those that cannot be measurements, in words; empty where there are none."""
    times = [row["median_ms"], *(row.get("samples_ms") or row.get("ci95_ms") or ())]
    if row["median_ms"] is not None and not all(0 < ms < math.inf for ms in times):
        return f"a time that is no finite number above 0 (median {row['median_ms']!r} ms)"
    peak = row["peak_memory_mb"]
    if peak is not None and not 0 <= peak < math.inf:
        return f"a peak memory of {peak!r} MiB"
    return ""


def _milliseconds(row: Row | None) -> float | None:
    return None if row is None or _bad_figures(row) else row["median_ms"]


def _test(old: Row, new: Row, paired: bool, launches: int, confidence: float) -> _Test:
    a, b = (np.asarray(row.get("samples_ms") or [], float) for row in (old, new))
    if not (len(a) and len(b)):
        return _by_intervals(old, new)
    if not paired:
        return _of_two_samples(a, b, confidence)
    if len(a) != len(b) or len(a) % launches:
        raise Unusable(
            f"row {new['name']!r}: {len(a)} and {len(b)} trials in {launches} launches do not "
            "pair; measure both again"
        )
    if len(a) < 2:
        raise Unusable(
            f"row {new['name']!r}: one launch of one round shows no spread; measure 2 or more "
            "rounds"
        )
    return _of_pairs(a, b, launches, confidence)


def _of_pairs(a: np.ndarray, b: np.ndarray, launches: int, confidence: float) -> _Test:
    """Student's t over the launches, or over the rounds where launches are few."""
    units = np.log(b / a)
    if launches >= _FEWEST_LAUNCHES:
        units = np.median(units.reshape(launches, -1), axis=1)
    found = scipy.stats.ttest_1samp(units, 0.0, alternative="greater")
    p = float(np.nan_to_num(found.pvalue, nan=1.0))
    other = scipy.stats.ttest_1samp(units, 0.0, alternative="less")
    p_faster = float(np.nan_to_num(other.pvalue, nan=1.0))
    reach = scipy.stats.t.ppf((1 + confidence) / 2, len(units) - 1) * scipy.stats.sem(units)
    mean = float(np.mean(units))
    return _Test(mean, (mean - float(reach), mean + float(reach)), p, p_faster)


def _of_two_samples(a: np.ndarray, b: np.ndarray, confidence: float) -> _Test:
    """Mann and Whitney's test, and the bootstrap of the ratio of the medians."""
    greater, less = (
        float(scipy.stats.mannwhitneyu(b, a, alternative=way).pvalue)
        for way in ("greater", "less")
    )

    def log_ratio(y: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
        return np.log(np.median(y, axis=axis) / np.median(x, axis=axis))

    estimate = float(log_ratio(b, a, 0))
    if min(len(a), len(b)) < 2 or np.ptp(a) == np.ptp(b) == 0:
        return _Test(estimate, (estimate, estimate), greater, less)
    interval = scipy.stats.bootstrap(
        (b, a),
        log_ratio,
        n_resamples=2000,
        vectorized=True,
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return _Test(estimate, (float(interval.low), float(interval.high)), greater, less)


def _by_intervals(old: Row, new: Row) -> _Test:
    """Of rows without trials: whether the intervals of their medians meet."""
    estimate = math.log(new["median_ms"] / old["median_ms"])
    (old_low, old_high), (low, high) = old["ci95_ms"], new["ci95_ms"]
    interval = (math.log(low / old_high), math.log(high / old_low))
    return _Test(estimate, interval, None, None, is_apart=low > old_high or high < old_low)


def _holm(p: Mapping[str, float | None]) -> dict[str, float]:
    """Holm's adjusted p of those that have one."""
    known = sorted((value, name) for name, value in p.items() if value is not None)
    adjusted: dict[str, float] = {}
    largest = 0.0
    for number, (value, name) in enumerate(known):
        largest = max(largest, min(1.0, value * (len(known) - number)))
        adjusted[name] = largest
    return adjusted


def _powerless(
    tests: Mapping[str, _Test], old: Mapping[str, Row], new: Mapping[str, Row], alpha: float
) -> list[str]:
    """A warning where no difference, however great, could be significant."""
    names = [name for name, test in tests.items() if test.p is not None]
    trials = [(len(old[name]["samples_ms"]), len(new[name]["samples_ms"])) for name in names]
    least = max((1 / math.comb(a + b, a) for a, b in trials), default=0.0)
    if least * len(names) <= alpha:
        return []
    return [
        f"with so few trials nothing in {len(names)} rows can be significant; measure more trials"
    ]


def _line(name: str, old: Row | None, new: Row | None, test: _Test | None) -> Line:
    """A line before its times are judged."""
    plain = Line(name, "unchanged", _milliseconds(old), _milliseconds(new))
    for row, which in ((old, "old"), (new, "new")):
        if row is not None and _bad_figures(row):
            note = f"the {which} file has {_bad_figures(row)}"
            return replace(plain, verdict="fails", note=note)
    # A wrong result is none, whatever else became of the row.
    if (
        new is not None
        and new["correct"] is False
        and (old is None or old["correct"] is not False)
    ):
        return replace(plain, verdict="fails", note="it is wrong now")
    if old is None:
        return replace(plain, verdict="new")
    if new is None:
        verdict = "fails" if _was_good(old) else "not comparable"
        return replace(plain, verdict=verdict, note="missing in the new file")
    if old["config"] != new["config"]:
        return replace(plain, verdict="not comparable", note="its config differs")
    if not _was_good(old):
        note = "the old one was wrong" if old["correct"] is False else "the old one has no figures"
        return replace(plain, verdict="not comparable", note=note)
    if old["correct"] and new["correct"] is None:
        note = new.get("needs") or "it is not checked any more"
        return replace(plain, verdict="fails", note=note)
    if old["median_ms"] is not None and new["median_ms"] is None:
        note = new.get("needs") or "it has no figures any more"
        return replace(plain, verdict="fails", note=note)
    if test is None:
        return replace(plain, note="it has no times")
    low, high = test.interval
    return replace(plain, ratio=math.exp(test.estimate), interval=(math.exp(low), math.exp(high)))


def _was_good(row: Row) -> bool:
    return row["correct"] is not False and (row["median_ms"] is not None or bool(row["correct"]))


def _judge(
    line: Line,
    test: _Test,
    p_slower: Mapping[str, float],
    p_faster: Mapping[str, float],
    threshold: float,
    alpha: float,
) -> Line:
    if line.verdict != "unchanged":
        return line
    p, edge = p_slower.get(line.name), math.log1p(threshold)
    verdict, note = line.verdict, line.note
    if test.estimate > edge and (test.is_apart if p is None else p < alpha):
        verdict = "slower"
    elif test.estimate < -edge and (test.is_apart if p is None else p_faster[line.name] < alpha):
        verdict = "faster"
    elif test.estimate > edge:
        note = "not significant"
    return replace(line, p=p, verdict=verdict, note=note)


def _judge_memory(line: Line, old: Row | None, new: Row | None, threshold: float) -> Line:
    if old is None or new is None or line.verdict in ("not comparable", "fails"):
        return line
    before, now = old["peak_memory_mb"], new["peak_memory_mb"]
    if before is None:
        return line
    verdict, note = line.verdict, line.note
    if now is None:
        if verdict != "slower":
            verdict = "fails"
        return replace(line, verdict=verdict, note="its peak memory is not measured any more")
    if now > before * (1 + threshold) and now > before + MOST_MORE_MIB:
        verdict = "slower, more memory" if line.verdict == "slower" else "more memory"
        note = f"{before:.0f} to {now:.0f} MiB"
    return replace(line, verdict=verdict, note=note, memory_ratio=now / before if before else None)


def _cells(line: Line) -> Sequence[Any]:
    ratio = None
    if line.ratio is not None and line.interval is not None:
        ratio = f"{line.ratio:.3f} [{line.interval[0]:.3f}, {line.interval[1]:.3f}]"
    verdict = line.verdict.upper() if line.is_regression else line.verdict
    note = f" ({line.note})" if line.note else ""
    return (line.name, line.old_ms, line.new_ms, ratio, line.p, verdict + note)
