"""Whether a benchmark became slower: two results, row by row.

Results whose trials took turns (`versus`) are compared trial by trial, those of separate runs as
two samples. `significance` has the tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpflash import _validate

from .output import markdown_table
from .significance import Test, holm, of_samples, of_turns

Row = Mapping[str, Any]

# Growth of memory that is flagged is at least this many MiB: less is a matter of the allocator.
MOST_MORE_MIB = 8.0
# Trials in turns of one code differed by up to 2.4% (tests/benchmarks/check_compare.py, 60 rows).
SAME_CODE = 0.03
# Of fewer trials a bootstrap of the median tells little, and the rank test has few values of p.
FEWEST_TRIALS = 8
_MUST_AGREE = ("suite", "device", "threads", "clock", "quick")
_SHOULD_AGREE = ("cores", "python", "torch")
_REGRESSIONS = ("slower", "more memory", "fails", "lost")
_OTHERS = ("undecided", "faster", "unchanged", "new", "not comparable")


class Unusable(ValueError):
    """The two results cannot be compared; the message says why."""


@dataclass(frozen=True)
class Line:
    """The comparison of one row."""

    name: str  # of the row
    # "slower", "more memory", "slower, more memory", "fails" (wrong now, or no measurement),
    # "lost" (missing, without figures or measured in another way now), "undecided" (it may be
    # chance, or the runs cannot tell), "faster", "unchanged", "new" or "not comparable"
    verdict: str
    old_ms: float | None = None  # median
    new_ms: float | None = None
    ratio: float | None = None  # new time over old time
    interval: tuple[float, float] | None = None  # of the ratio, at the report's confidence
    # Of "it takes no longer" (of separate runs: no longer than the threshold allows), corrected
    # for the number of rows (Holm).
    p: float | None = None
    memory_ratio: float | None = None  # new peak memory over the old one, unless that is 0
    note: str = ""  # the reason, where the verdict needs one

    @property
    def is_regression(self) -> bool:
        """Whether the comparison must not pass."""
        return any(part in _REGRESSIONS for part in self.verdict.split(", "))


@dataclass(frozen=True)
class Report:
    """The comparison of two results."""

    lines: tuple[Line, ...]  # one for each measured row of either one
    paired: bool  # whether their trials took turns
    threshold: float  # share by which a time or a memory may grow
    confidence: float  # of the intervals; 1 less it is the chance of a false alarm over all rows
    warnings: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Line, ...]:
        """The lines for which the comparison must not pass."""
        return tuple(line for line in self.lines if line.is_regression)

    @property
    def exit_code(self) -> int:
        """1 for a regression, else 0."""
        return int(bool(self.regressions))

    @property
    def summary(self) -> str:
        """How many rows were compared, and with which verdicts."""
        verdicts = [part for line in self.lines for part in line.verdict.split(", ")]
        texts = [f"{sum(line.ratio is not None for line in self.lines)} compared"]
        texts += [
            f"{verdicts.count(word)} {word}"
            for word in (*_REGRESSIONS, *_OTHERS)
            if word in verdicts or word == "slower"
        ]
        way = "trials took turns" if self.paired else "separate runs"
        return f"{', '.join(texts)} (threshold {self.threshold:.3g}, {way})"

    def markdown(self) -> str:
        """The table, the warnings and the summary."""
        ratio = f"ratio [{100 * self.confidence:.3g}%]"
        header = ("row", "old ms", "new ms", ratio, "p (adjusted)", "verdict")
        table = markdown_table(header, [_cells(line) for line in self.lines])
        warnings = [f"Warning: {text}." for text in self.warnings]
        return "\n\n".join([table, *warnings, f"{self.summary}\n"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "summary": self.summary, "exit_code": self.exit_code}


def _cells(line: Line) -> tuple[Any, ...]:
    ratio = None
    if line.ratio is not None and line.interval is not None:
        ratio = f"{line.ratio:.3f} [{line.interval[0]:.3f}, {line.interval[1]:.3f}]"
    verdict = line.verdict.upper() if line.is_regression else line.verdict
    note = f" ({line.note})" if line.note else ""
    return (line.name, line.old_ms, line.new_ms, ratio, line.p, verdict + note)


def compare(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    names: tuple[str, str] = ("the old file", "the new file"),
    threshold: float = 0.05,
    confidence: float = 0.95,
    force: bool = False,
) -> Report:
    """Compare two results, as `suite.run_suite` writes them.

    Of trials that took turns a row is slower where the estimate of its ratio is beyond
    1 + threshold and the ratio is significantly above 1. Of separate runs it is slower where the
    ratio is significantly above 1 + threshold and all of its interval is; fewer than 8 trials,
    and load averages that differ by more than 1 and a factor of 2, decide nothing on times. Tests
    are one-sided, at 1 - confidence over all rows together (Holm). A row fails where it is wrong
    and was not, and where a figure of either result is no finite number above 0; it is lost where
    it had figures, or was right, and now is missing, has none or another config. Peers' rows, and
    rows that only follow from others, such as exponents, are left out.

    Args:
        old: the baseline; rows as `compare_files.checked` takes them.
        new: the result that is judged.
        names: of the two in messages.
        threshold: share by which a time or a peak memory may grow, > 0.
        confidence: in (0, 1).
        force: compare what was measured on another device or in another way, or broken off.

    Raises:
        Unusable: they were measured in different ways, the new one was broken off, or no row can
            be compared.
    """
    _validate.positive(threshold=threshold)
    _validate.probability(confidence=confidence)
    environments = (old["environment"], new["environment"])
    warnings = _differences(*environments, force) + _broken_off((old, new), names, force)
    turns = environments[0].get("versus")
    if turns is None or turns != environments[1].get("versus"):
        turns = None
    pairs = _pairs(old["rows"], new["rows"])
    lines = {name: _line(name, *pair) for name, pair in pairs.items()}
    timed = {name: _samples(pairs[name]) for name, line in lines.items() if line.ratio is not None}
    unlike_loads = _are_loads_unlike(*environments)
    tests: dict[str, Test] = {}
    for name, (a, b) in timed.items():
        if turns:
            tests[name] = of_turns(a, b, _launches(name, a, b, turns), confidence, threshold)
        elif not unlike_loads and min(len(a), len(b)) >= FEWEST_TRIALS:
            tests[name] = of_samples(a, b, confidence, threshold)
    p_slower = holm({name: test.p_slower for name, test in tests.items()})
    p_faster = holm({name: test.p_faster for name, test in tests.items()})
    for name, line in lines.items():
        if name in tests:
            p = (p_slower[name], p_faster[name])
            line = _judge(line, tests[name], p, threshold, 1 - confidence)
        elif name in timed:
            line = replace(
                line,
                verdict="undecided",
                note="unlike loads" if unlike_loads else "too few trials",
            )
        lines[name] = _judge_memory(line, *pairs[name], threshold)
    if all(line.verdict in ("new", "not comparable") for line in lines.values()):
        raise Unusable(
            f"{' and '.join(names)}: no row of dpflash can be compared; pass two runs of one suite"
        )
    warnings += _about_times(turns is not None, threshold, len(timed) - len(tests))
    return Report(tuple(lines.values()), turns is not None, threshold, confidence, tuple(warnings))


def _differences(old: Row, new: Row, force: bool) -> list[str]:
    """Warnings of environments that differ, of which some are refused without force."""
    unlike = {
        key: f"{key} is {old.get(key)!r} in OLD and {new.get(key)!r} in NEW"
        for key in (*_MUST_AGREE, *_SHOULD_AGREE)
        if old.get(key) != new.get(key)
    }
    refused = [text for key, text in unlike.items() if key in _MUST_AGREE]
    if refused and not force:
        raise Unusable(f"{'; '.join(refused)}: measure both alike, or compare them with --force")
    return list(unlike.values())


def _broken_off(files: tuple[Row, Row], names: tuple[str, str], force: bool) -> list[str]:
    """Warnings of runs that did not come to their end; a new one is refused without force."""
    are_whole = [bool(found.get("complete", True)) for found in files]
    if not are_whole[1] and not force:
        raise Unusable(
            f"{names[1]}: the run was broken off, and what is missing may be slower; measure "
            "again, or compare what is there with --force"
        )
    pairs = zip(names, are_whole, strict=True)
    return [f"{name}: the run was broken off" for name, is_whole in pairs if not is_whole]


def _are_loads_unlike(old: Row, new: Row) -> bool:
    """Whether the load averages differ by more than 1 and a factor of 2, as times then do."""
    a, b = old.get("load_average"), new.get("load_average")
    return a is not None and b is not None and abs(a - b) > max(1, min(a, b))


def _about_times(is_paired: bool, threshold: float, undecided: int) -> Iterator[str]:
    """Warnings on how far times of these runs can be trusted."""
    if not is_paired:
        yield (
            "the runs are separate, so that a change of the machine between them looks like a "
            "change of the code; in CI take `dpflash bench versus`, which measures two checkouts "
            "in turns"
        )
    elif threshold < SAME_CODE:
        yield (
            "launches are copies of one process for each checkout and share where its code lies: "
            f"equal code may differ by some {SAME_CODE:.0%}, more than the threshold and more "
            "than intervals say"
        )
    if undecided:
        yield (
            f"the times of {undecided} rows cannot be decided on; measure again without --quick, "
            "under equal load"
        )


def _pairs(old: list[Row], new: list[Row]) -> dict[str, tuple[Row | None, Row | None]]:
    """The rows by name, without peers' and without those that follow from others."""
    by_name = [{row["name"]: row for row in rows} for rows in (old, new)]
    found = {}
    for name in {**by_name[0], **by_name[1]}:
        pair = (by_name[0].get(name), by_name[1].get(name))
        there = [row for row in pair if row is not None]
        is_measured = any(row["correct"] is not None or row.get("samples_ms") for row in there)
        if not is_measured and not all(row.get("needs") for row in there):
            continue
        if not all(row.get("peer") for row in there):
            found[name] = pair
    return found


def bad_figures(row: Row) -> str:
    """The figures that cannot be measurements, in words; empty where there are none."""
    times = [row["median_ms"], *(row.get("samples_ms") or ())]
    if row["median_ms"] is not None and not all(0 < ms < math.inf for ms in times):
        return f"a time that is no finite number above 0 (median {row['median_ms']!r} ms)"
    peak = row["peak_memory_mb"]
    if peak is not None and not 0 <= peak < math.inf:
        return f"a peak memory of {peak!r} MiB"
    return ""


def _line(name: str, old: Row | None, new: Row | None) -> Line:
    """A line with the verdict that needs no test; with a ratio where times can be tested."""
    verdict, note = _verdict_without_times(old, new)
    old_ms, new_ms = (
        None if row is None or bad_figures(row) else row["median_ms"] for row in (old, new)
    )
    line = Line(name, verdict, old_ms, new_ms, note=note)
    if verdict != "unchanged" or old is None or new is None or old_ms is None or new_ms is None:
        return line
    if old.get("range_ms") or new.get("range_ms"):
        return replace(line, verdict="not comparable", note="it is slow: too few calls")
    if not (old.get("samples_ms") and new.get("samples_ms")):
        return replace(line, verdict="lost", note="its trials are missing")
    return replace(line, ratio=new_ms / old_ms)


def _verdict_without_times(old: Row | None, new: Row | None) -> tuple[str, str]:
    """(verdict, note); "unchanged" where times decide, or where there are none."""
    for row, which in ((old, "old"), (new, "new")):
        if row is not None and bad_figures(row):
            return "fails", f"the {which} file has {bad_figures(row)}"
    was_wrong = old is not None and old["correct"] is False
    if new is not None and new["correct"] is False and not was_wrong:
        return "fails", new.get("failure") or "it is wrong now"
    if old is None:
        return "new", ""
    was_good = not was_wrong and (old["median_ms"] is not None or bool(old["correct"]))
    if new is None:
        return "lost" if was_good else "not comparable", "missing in the new file"
    if not was_good:
        return "not comparable", "the old one was wrong or has no figures"
    if old["config"] != new["config"]:
        return "lost", "its config differs"
    if old["correct"] and new["correct"] is None:
        return "lost", new.get("needs") or "it is not checked any more"
    if old["median_ms"] is not None and new["median_ms"] is None:
        return "lost", new.get("needs") or "it has no figures any more"
    return "unchanged", ""


def _samples(pair: tuple[Row | None, Row | None]) -> tuple[np.ndarray, np.ndarray]:
    old, new = pair
    assert old is not None and new is not None
    return np.asarray(old["samples_ms"], float), np.asarray(new["samples_ms"], float)


def _launches(name: str, old: np.ndarray, new: np.ndarray, turns: Mapping[str, Any]) -> int:
    launches = int(turns["launches"])
    if len(old) != len(new) or len(old) % launches or len(old) < 2:
        raise Unusable(
            f"row {name!r}: {len(old)} and {len(new)} trials in {launches} launches do not pair; "
            "measure both again"
        )
    return launches


def _judge(line: Line, test: Test, p: tuple[float, float], threshold: float, alpha: float) -> Line:
    """The verdict on times, by the adjusted p of slower and of faster."""
    slower, faster = (one < alpha for one in p)
    verdict, note = "unchanged", ""
    if test.is_slower and slower:
        verdict = "slower"
    elif test.is_faster and faster:
        verdict = "faster"
    elif abs(test.estimate) > math.log1p(threshold):
        is_significant = slower if test.estimate > 0 else faster
        reach = f"its interval includes changes below {threshold:.3g}"
        verdict, note = "undecided", reach if is_significant else "not significant"
    low, high = (math.exp(end) for end in test.interval)
    ratio = math.exp(test.estimate)
    return replace(line, verdict=verdict, note=note, p=p[0], ratio=ratio, interval=(low, high))


def _judge_memory(line: Line, old: Row | None, new: Row | None, threshold: float) -> Line:
    if old is None or new is None or line.verdict in ("not comparable", "fails", "lost"):
        return line
    before, now = old["peak_memory_mb"], new["peak_memory_mb"]
    if before is None:
        return line
    if now is None:
        verdict = "slower" if line.verdict == "slower" else "lost"
        return replace(line, verdict=verdict, note="its peak memory is not measured any more")
    line = replace(line, memory_ratio=now / before if before else None)
    if now > before * (1 + threshold) and now > before + MOST_MORE_MIB:
        verdict = "slower, more memory" if line.verdict == "slower" else "more memory"
        return replace(line, verdict=verdict, note=f"{before:.0f} to {now:.0f} MiB")
    return line
