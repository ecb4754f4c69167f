"""Whether a benchmark became slower: two results, row by row.

Results whose trials took turns (`versus`) are compared trial by trial. Those of separate runs are
compared as two samples, which says nothing of how the machine changed between them, so that only
what lies clearly beyond the threshold counts. `significance` has the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpflash import _validate

from .comparable import (
    Row,
    Unusable,
    bad_figures,
    broken_off,
    checked_rows,
    differences,
    is_figure,
    turns_of,
    unlike_loads,
)
from .output import markdown_table
from .significance import FEWEST_TRIALS, Test, holm, of_intervals, of_pairs, of_two_samples

# Growth of memory that is flagged is at least this many MiB: less is a matter of the allocator.
MOST_MORE_MIB = 8.0
# Trials in turns of one code differed by up to 2.4% (`scripts/check_compare.py`, 60 rows).
LEAST_TOLD = 0.03
_REGRESSIONS = ("slower", "more memory", "fails", "lost")
_OTHERS = ("undecided", "faster", "still right", "new", "not comparable")


@dataclass(frozen=True)
class Line:
    """What became of a row.

    Attributes:
        name: of the row.
        verdict: "slower", "more memory", "slower, more memory", "fails" (wrong now, or no
            measurement), "lost" (missing, without figures or measured in another way now),
            "undecided" (it may be chance, or the runs cannot tell), "faster", "unchanged", "still
            right" (of a row without times), "new" or "not comparable".
        old_ms, new_ms: medians.
        ratio: of new over old time, and its interval at the report's confidence.
        interval: (low, high).
        p: corrected for the number of rows (Holm), of the null hypothesis that it takes no longer;
            of separate runs, no longer than the threshold allows. None where ranges decide.
        memory_ratio: of new over old peak memory; None where the old one is 0.
        note: why, where the verdict does not tell.
        of_peer: whether it is another library's, which is told and no regression of dpflash.
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
    of_peer: bool = False

    @property
    def is_regression(self) -> bool:
        """Whether the comparison must not pass."""
        parts = self.verdict.split(", ")
        return not self.of_peer and any(part in _REGRESSIONS for part in parts)


@dataclass(frozen=True)
class Report:
    """The comparison of two results.

    Attributes:
        lines: one for each measured row of either one.
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

    @property
    def summary(self) -> str:
        """How many rows were compared, and what came of them."""
        own = [line for line in self.lines if not line.of_peer]
        parts = [part for line in own for part in line.verdict.split(", ")]
        counts = {word: parts.count(word) for word in (*_REGRESSIONS, *_OTHERS)}
        told = [f"{sum(line.ratio is not None for line in own)} compared"]
        told += [f"{counts.pop('slower')} slower"]
        told += [f"{count} {word}" for word, count in counts.items() if count]
        if len(own) < len(self.lines):
            told.append(f"{len(self.lines) - len(own)} of peers beside them")
        way = "trials took turns" if self.paired else "separate runs"
        return f"{', '.join(told)} (threshold {self.threshold:.3g}, {way})"

    def markdown(self) -> str:
        """The table, and what is to be said of it."""
        ratio = f"ratio [{100 * self.confidence:.3g}%]"
        has_p = any(line.p is not None for line in self.lines)
        header = ("row", "old ms", "new ms", ratio, *["p (adjusted)"] * has_p, "verdict")
        table = markdown_table(header, [_cells(line, has_p) for line in self.lines])
        warnings = [f"Warning: {text}." for text in self.warnings]
        return "\n\n".join([table, *warnings, f"{self.summary}\n"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "summary": self.summary, "exit_code": self.exit_code}


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
    it had figures, or was right, and now is missing, has none or another config, or became a
    peer's. Rows that only follow from others, such as exponents, are left out; rows that are
    peers' in both are shown and do not count.

    Args:
        old: the baseline.
        new: what is judged.
        names: what messages call the two.
        threshold: share by which a time or a peak memory may grow, > 0.
        confidence: in (0, 1).
        force: compare what was measured on another device or in another way, or broken off.

    Raises:
        Unusable: they were measured in different ways, one is no whole result, or no row but
            peers' can be compared.
    """
    _validate.positive(threshold=threshold)
    _validate.probability(confidence=confidence)
    rows_old, rows_new = _measured(checked_rows(old, names[0]), checked_rows(new, names[1]))
    turns = turns_of(old)
    paired = turns is not None and turns == turns_of(new)
    warnings = differences(old["environment"], new["environment"], force)
    warnings += broken_off(old, new, names, force)
    tests = {
        name: _test(rows_old[name], row, turns if paired else None, confidence, threshold)
        for name, row in rows_new.items()
        if name in rows_old and _are_timed(rows_old[name], row)
    }
    p_slower = holm({name: test.p for name, test in tests.items()})
    p_faster = holm({name: test.p_faster for name, test in tests.items()})
    if paired and threshold < LEAST_TOLD:
        warnings.append(
            f"launches are copies of one process for each checkout and share where its code lies: "
            f"equal code may differ by some {LEAST_TOLD:.0%}, more than the threshold and more "
            "than intervals say"
        )
    undecidable: dict[str, str] = {}
    if not paired:
        loads = unlike_loads(old["environment"], new["environment"])
        few = {name for name in tests if _are_few(rows_old[name], rows_new[name])}
        undecidable = {name: "too few trials" if name in few else loads for name in tests}
        environments = (old["environment"], new["environment"])
        warnings += _of_separate_runs(environments, loads, len(few))
    lines = []
    for name in dict.fromkeys([*rows_old, *rows_new]):
        row_old, row_new, test = rows_old.get(name), rows_new.get(name), tests.get(name)
        of_peer = all(row is None or row.get("peer") for row in (row_old, row_new))
        line = replace(_line(name, row_old, row_new, test), of_peer=of_peer)
        if test is not None:
            p = (p_slower.get(name), p_faster.get(name))
            line = _judge(line, test, p, threshold, 1 - confidence, undecidable.get(name, ""))
        lines.append(_judge_memory(line, row_old, row_new, threshold))
    if all(line.of_peer or line.verdict in ("new", "not comparable") for line in lines):
        raise Unusable(
            f"{' and '.join(names)}: no row of dpflash can be compared (rows: {len(rows_old)} and "
            f"{len(rows_new)}); pass two runs of one suite"
        )
    return Report(tuple(lines), paired, threshold, confidence, tuple(warnings))


def _of_separate_runs(environments: Sequence[Row], unlike: str, few: int) -> list[str]:
    """Warnings of what separate runs cannot tell: of unlike loads, and of rows of few trials."""
    loads = [environment.get("load_average") for environment in environments]
    told = "" if None in loads else f" (load averages {loads[0]} and {loads[1]})"
    texts = [
        f"the runs are separate, and what changed on the machine between them{told} is not told "
        "from what changed in the code; in CI take `dpflash bench versus`, which measures two "
        "checkouts in turns"
    ]
    if few:
        texts.append(
            f"{few} rows have fewer than {FEWEST_TRIALS} trials, too few to decide on times: "
            "their intervals are the trials' ranges; run without --quick, or take "
            "`dpflash bench versus`"
        )
    if unlike:
        texts.append(
            f"{unlike} are too unlike to decide on times; measure again under equal load, or take "
            "`dpflash bench versus`"
        )
    return texts


def _measured(*files: dict[str, Row]) -> list[dict[str, Row]]:
    """The rows of each file, less those that follow from others."""
    figures = {
        name for rows in files for name in rows if is_figure(*(other.get(name) for other in files))
    }
    return [{name: row for name, row in rows.items() if name not in figures} for rows in files]


def _are_timed(old: Row, new: Row) -> bool:
    return (
        old["config"] == new["config"]
        and new["correct"] is not False
        and old["correct"] is not False
        and old["median_ms"] is not None
        and new["median_ms"] is not None
        and not (bad_figures(old) or bad_figures(new))
        and not (old.get("range_ms") or new.get("range_ms"))
    )


def _milliseconds(row: Row | None) -> float | None:
    return None if row is None or bad_figures(row) else row["median_ms"]


def _test(
    old: Row, new: Row, turns: Mapping[str, Any] | None, confidence: float, threshold: float
) -> Test:
    a, b = (np.asarray(row.get("samples_ms") or [], float) for row in (old, new))
    estimate = math.log(new["median_ms"] / old["median_ms"])
    if not (len(a) and len(b)):
        return of_intervals(estimate, old["ci95_ms"], new["ci95_ms"], threshold)
    if turns is None:
        return of_two_samples(estimate, a, b, confidence, threshold)
    launches = int(turns["launches"])
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
    return of_pairs(a, b, launches, confidence, threshold)


def _are_few(*rows: Row) -> bool:
    """Whether a row has too few trials for a test."""
    trials = [len(row.get("samples_ms") or []) or row.get("trials") or 0 for row in rows]
    return min(trials) < FEWEST_TRIALS


def _line(name: str, old: Row | None, new: Row | None, test: Test | None) -> Line:
    """A line before its times are judged."""
    plain = Line(name, "unchanged", _milliseconds(old), _milliseconds(new))
    for row, which in ((old, "old"), (new, "new")):
        if row is not None and bad_figures(row):
            note = f"the {which} file has {bad_figures(row)}"
            return replace(plain, verdict="fails", note=note)
    # A wrong result is none, whatever else became of the row.
    if (
        new is not None
        and new["correct"] is False
        and (old is None or old["correct"] is not False)
    ):
        return replace(plain, verdict="fails", note=new.get("failure") or "it is wrong now")
    if old is None:
        return replace(plain, verdict="new")
    if new is None:
        verdict = "lost" if _was_good(old) else "not comparable"
        return replace(plain, verdict=verdict, note="missing in the new file")
    if not _was_good(old):
        note = "the old one was wrong" if old["correct"] is False else "the old one has no figures"
        return replace(plain, verdict="not comparable", note=note)
    if old["config"] != new["config"]:
        return replace(plain, verdict="lost", note="its config differs")
    if bool(old.get("peer")) != bool(new.get("peer")):
        return replace(plain, verdict="lost", note="it is a peer's in one file alone")
    if old["correct"] and new["correct"] is None:
        note = new.get("needs") or "it is not checked any more"
        return replace(plain, verdict="lost", note=note)
    if old["median_ms"] is not None and new["median_ms"] is None:
        note = new.get("needs") or "it has no figures any more"
        return replace(plain, verdict="lost", note=note)
    if old.get("range_ms") or new.get("range_ms"):
        note = "it is slow: too few calls for an interval"
        return replace(plain, verdict="not comparable", note=note)
    if test is None:
        return replace(plain, verdict="still right", note="it has no times")
    low, high = test.interval
    return replace(plain, ratio=math.exp(test.estimate), interval=(math.exp(low), math.exp(high)))


def _was_good(row: Row) -> bool:
    return row["correct"] is not False and (row["median_ms"] is not None or bool(row["correct"]))


def _judge(
    line: Line,
    test: Test,
    p: tuple[float | None, float | None],
    threshold: float,
    alpha: float,
    undecidable: str,
) -> Line:
    """A line with the verdict on its times, by the adjusted p of slower and of faster.

    `undecidable` says why these runs cannot tell; empty where they can.
    """
    if line.verdict != "unchanged":
        return line
    slower, faster = (one is None or one < alpha for one in p)
    verdict, note = line.verdict, line.note
    if undecidable:
        verdict, note = "undecided", undecidable
    elif test.slower and slower:
        verdict = "slower"
    elif test.faster and faster:
        verdict = "faster"
    elif abs(test.estimate) > math.log1p(threshold):
        verdict = "undecided"
        is_significant = slower if test.estimate > 0 else faster
        reach = f"its interval includes changes below {threshold:.3g}"
        note = reach if is_significant else "not significant"
    return replace(line, p=p[0], verdict=verdict, note=note)


def _judge_memory(line: Line, old: Row | None, new: Row | None, threshold: float) -> Line:
    if old is None or new is None or line.verdict in ("not comparable", "fails", "lost"):
        return line
    before, now = old["peak_memory_mb"], new["peak_memory_mb"]
    if before is None:
        return line
    verdict, note = line.verdict, line.note
    if now is None:
        verdict = "slower" if verdict == "slower" else "lost"
        return replace(line, verdict=verdict, note="its peak memory is not measured any more")
    if now > before * (1 + threshold) and now > before + MOST_MORE_MIB:
        verdict = "slower, more memory" if line.verdict == "slower" else "more memory"
        note = f"{before:.0f} to {now:.0f} MiB"
    return replace(line, verdict=verdict, note=note, memory_ratio=now / before if before else None)


def _cells(line: Line, has_p: bool) -> Sequence[Any]:
    ratio = None
    if line.ratio is not None and line.interval is not None:
        ratio = f"{line.ratio:.3f} [{line.interval[0]:.3f}, {line.interval[1]:.3f}]"
    verdict = line.verdict.upper() if line.is_regression else line.verdict
    verdict = f"peer: {verdict}" if line.of_peer else verdict
    note = f" ({line.note})" if line.note else ""
    return (line.name, line.old_ms, line.new_ms, ratio, *[line.p] * has_p, verdict + note)
