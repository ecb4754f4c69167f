"""Whether a benchmark became slower: two results, row by row.

Results whose trials took turns (`versus`) are compared trial by trial, those of separate runs as
two samples. `significance` has the tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from dpflash import _validate

from .output import markdown_table
from .significance import FEWEST_TRIALS, Test, holm, of_intervals, of_samples, of_turns

Row = Mapping[str, Any]

# Growth of memory that is flagged is at least this many MiB: less is a matter of the allocator.
MOST_MORE_MIB = 8.0
# Trials in turns of one code differed by up to 2.4% (tests/benchmarks/check_compare.py, 60 rows).
SAME_CODE = 0.03
# Load averages that differ by more than this factor and this number make times differ too.
_LOADS_FACTOR, _LOADS_APART = 2, 1
_MUST_AGREE = ("suite", "device", "threads", "clock", "quick")
_SHOULD_AGREE = ("cores", "python", "torch")
_REGRESSIONS = ("slower", "more memory", "fails", "lost")
_OTHERS = ("undecided", "faster", "still right", "new", "not comparable")


class Unusable(ValueError):
    """The two results cannot be compared; the message says why."""


@dataclass(frozen=True)
class Line:
    """The comparison of one row.

    Attributes:
        name: of the row.
        verdict: "slower", "more memory", "slower, more memory", "fails" (wrong now, or no
            measurement), "lost" (missing, without figures or measured in another way now),
            "undecided" (it may be chance, or the runs cannot tell), "faster", "unchanged", "still
            right" (a row without times), "new" or "not comparable".
        old_ms, new_ms: medians.
        ratio: new time over old time.
        interval: (low, high) of the ratio, at the report's confidence.
        p: of "it takes no longer" (of separate runs: no longer than the threshold allows),
            corrected for the number of rows (Holm); None where ranges decide.
        memory_ratio: new peak memory over the old one; None where the old one is 0.
        note: the reason, where the verdict needs one.
        of_peer: whether it is another library's row, which is no regression of dpflash.
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
        return not self.of_peer and any(part in _REGRESSIONS for part in self.verdict.split(", "))


@dataclass(frozen=True)
class Report:
    """The comparison of two results.

    Attributes:
        lines: one for each measured row of either one.
        paired: whether their trials took turns.
        threshold: share by which a time or a memory may grow.
        confidence: of the intervals; 1 less it is the chance of a false alarm over all rows.
        warnings: what a reader must know.
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
        """How many rows were compared, and with which verdicts."""
        own = [line for line in self.lines if not line.of_peer]
        parts = [part for line in own for part in line.verdict.split(", ")]
        texts = [f"{sum(line.ratio is not None for line in own)} compared"]
        texts += [
            f"{parts.count(word)} {word}"
            for word in (*_REGRESSIONS, *_OTHERS)
            if word in parts or word == "slower"
        ]
        if len(own) < len(self.lines):
            texts.append(f"{len(self.lines) - len(own)} of peers beside them")
        way = "trials took turns" if self.paired else "separate runs"
        return f"{', '.join(texts)} (threshold {self.threshold:.3g}, {way})"

    def markdown(self) -> str:
        """The table, the warnings and the summary."""
        has_p = any(line.p is not None for line in self.lines)
        ratio = f"ratio [{100 * self.confidence:.3g}%]"
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
        old: the baseline; rows as `compare_files.checked` takes them.
        new: the result that is judged.
        names: of the two in messages.
        threshold: share by which a time or a peak memory may grow, > 0.
        confidence: in (0, 1).
        force: compare what was measured on another device or in another way, or broken off.

    Raises:
        Unusable: they were measured in different ways, the new one was broken off, or no row but
            peers' can be compared.
    """
    _validate.positive(threshold=threshold)
    _validate.probability(confidence=confidence)
    environments = (old["environment"], new["environment"])
    warnings = _differences(*environments, force) + _broken_off(old, new, names, force)
    turns = environments[0].get("versus")
    if turns is None or turns != environments[1].get("versus"):
        turns = None
    rows = [{row["name"]: row for row in found["rows"]} for found in (old, new)]
    pairs = {name: (rows[0].get(name), rows[1].get(name)) for name in {**rows[0], **rows[1]}}
    pairs = {name: pair for name, pair in pairs.items() if not _follows_from_others(*pair)}
    timed = {
        name: (a, b)
        for name, (a, b) in pairs.items()
        if a is not None and b is not None and _are_timed(a, b)
    }
    tests = {name: _test(*pair, turns, confidence, threshold) for name, pair in timed.items()}
    if turns is None:
        undecidable, texts = _of_separate_runs(environments, timed)
        warnings += texts
    else:
        undecidable = {}
        if threshold < SAME_CODE:
            warnings.append(
                "launches are copies of one process for each checkout and share where its code "
                f"lies: equal code may differ by some {SAME_CODE:.0%}, more than the threshold "
                "and more than intervals say"
            )
    p_slower = holm({name: test.p for name, test in tests.items()})
    p_faster = holm({name: test.p_faster for name, test in tests.items()})
    lines = []
    for name, pair in pairs.items():
        line, test = _line(name, *pair), tests.get(name)
        if line.verdict == "unchanged" and test is not None:
            p = (p_slower.get(name), p_faster.get(name))
            line = _judge(line, test, p, threshold, 1 - confidence, undecidable.get(name, ""))
        lines.append(_judge_memory(line, *pair, threshold))
    if all(line.of_peer or line.verdict in ("new", "not comparable") for line in lines):
        raise Unusable(
            f"{' and '.join(names)}: no row of dpflash can be compared (rows: {len(rows[0])} and "
            f"{len(rows[1])}); pass two runs of one suite"
        )
    return Report(tuple(lines), turns is not None, threshold, confidence, tuple(warnings))


def _differences(old: Row, new: Row, force: bool) -> list[str]:
    """Warnings of environments that differ, of which some are refused without force."""

    def texts(keys: Sequence[str]) -> list[str]:
        unlike = [key for key in keys if old.get(key) != new.get(key)]
        return [f"{key} is {old.get(key)!r} in OLD and {new.get(key)!r} in NEW" for key in unlike]

    refused = texts(_MUST_AGREE)
    if refused and not force:
        raise Unusable(f"{'; '.join(refused)}: measure both alike, or compare them with --force")
    return refused + texts(_SHOULD_AGREE)


def _broken_off(old: Row, new: Row, names: tuple[str, str], force: bool) -> list[str]:
    """Warnings of runs that did not come to their end; a new one is refused without force."""
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


def _of_separate_runs(
    environments: tuple[Row, Row], pairs: Mapping[str, tuple[Row, Row]]
) -> tuple[dict[str, str], list[str]]:
    """The rows whose times these runs cannot decide on, with the reason; and the warnings."""
    loads = [environment.get("load_average") for environment in environments]
    known = [load for load in loads if isinstance(load, int | float)]
    shown, unlike = "", False
    if len(known) == 2:
        shown = f"load averages {known[0]:g} and {known[1]:g}"
        unlike = max(known) > _LOADS_FACTOR * min(known)
        unlike = unlike and max(known) - min(known) > _LOADS_APART
    few = {name for name, pair in pairs.items() if min(map(_trials, pair)) < FEWEST_TRIALS}
    texts = [
        f"the runs are separate, so that a change of the machine between them"
        f"{f' ({shown})' if shown else ''} looks like a change of the code; in CI take "
        "`dpflash bench versus`, which measures two checkouts in turns"
    ]
    if few:
        texts.append(
            f"{len(few)} rows have fewer than {FEWEST_TRIALS} trials, too few to decide on times: "
            "their intervals are the trials' ranges; run without --quick, or take "
            "`dpflash bench versus`"
        )
    if unlike:
        texts.append(
            f"{shown} are too unlike to decide on times; measure again under equal load, or take "
            "`dpflash bench versus`"
        )
    reasons = dict.fromkeys(pairs, shown if unlike else "")
    return {**reasons, **dict.fromkeys(few, "too few trials")}, texts


def _trials(row: Row) -> int:
    return len(row.get("samples_ms") or []) or row.get("trials") or 0


def _follows_from_others(*rows: Row | None) -> bool:
    """Whether rows of one name are no measurements but follow from some, such as an exponent."""
    there = [row for row in rows if row is not None]
    measured = any(
        row["correct"] is not None or row.get("samples_ms") or row.get("ci95_ms") for row in there
    )
    return not measured and not all(row.get("needs") for row in there)


def _are_timed(old: Row, new: Row) -> bool:
    return old["config"] == new["config"] and all(
        row["correct"] is not False
        and row["median_ms"] is not None
        and not bad_figures(row)
        and not row.get("range_ms")
        for row in (old, new)
    )


def bad_figures(row: Row) -> str:
    """The figures that cannot be measurements, in words; empty where there are none."""
    times = [row["median_ms"], *(row.get("samples_ms") or row.get("ci95_ms") or ())]
    if row["median_ms"] is not None and not all(0 < ms < math.inf for ms in times):
        return f"a time that is no finite number above 0 (median {row['median_ms']!r} ms)"
    peak = row["peak_memory_mb"]
    if peak is not None and not 0 <= peak < math.inf:
        return f"a peak memory of {peak!r} MiB"
    return ""


def _test(
    old: Row, new: Row, turns: Mapping[str, Any] | None, confidence: float, threshold: float
) -> Test:
    a, b = (np.asarray(row.get("samples_ms") or [], float) for row in (old, new))
    estimate = math.log(new["median_ms"] / old["median_ms"])
    if not (len(a) and len(b)):
        return of_intervals(estimate, old["ci95_ms"], new["ci95_ms"], threshold)
    if turns is None:
        return of_samples(estimate, a, b, confidence, threshold)
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
    return of_turns(a, b, launches, confidence, threshold)


def _line(name: str, old: Row | None, new: Row | None) -> Line:
    """A line with the verdict that needs no times; "unchanged" where they decide."""
    verdict, note = _verdict_without_times(old, new)
    old_ms, new_ms = (
        None if row is None or bad_figures(row) else row["median_ms"] for row in (old, new)
    )
    of_peer = all(row is None or row.get("peer") for row in (old, new))
    return Line(name, verdict, old_ms, new_ms, note=note, of_peer=of_peer)


def _verdict_without_times(old: Row | None, new: Row | None) -> tuple[str, str]:
    """(verdict, note)."""
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
        reason = "the old one was wrong" if was_wrong else "the old one has no figures"
        return "not comparable", reason
    needs = new.get("needs")
    for is_lost, note in (
        (old["config"] != new["config"], "its config differs"),
        (bool(old.get("peer")) != bool(new.get("peer")), "it is a peer's in one file alone"),
        (old["correct"] and new["correct"] is None, needs or "it is not checked any more"),
        (
            old["median_ms"] is not None and new["median_ms"] is None,
            needs or "it has no figures any more",
        ),
    ):
        if is_lost:
            return "lost", note
    if old.get("range_ms") or new.get("range_ms"):
        return "not comparable", "it is slow: too few calls for an interval"
    if not _are_timed(old, new):
        return "still right", "it has no times"
    return "unchanged", ""


def _judge(
    line: Line,
    test: Test,
    p: tuple[float | None, float | None],
    threshold: float,
    alpha: float,
    undecidable: str,
) -> Line:
    """The verdict on times, by the adjusted p of slower and of faster.

    `undecidable` is why these runs cannot decide; empty where they can.
    """
    slower, faster = (one is None or one < alpha for one in p)
    verdict, note = "unchanged", ""
    if undecidable:
        verdict, note = "undecided", undecidable
    elif test.slower and slower:
        verdict = "slower"
    elif test.faster and faster:
        verdict = "faster"
    elif abs(test.estimate) > math.log1p(threshold):
        is_significant = slower if test.estimate > 0 else faster
        reach = f"its interval includes changes below {threshold:.3g}"
        verdict, note = "undecided", reach if is_significant else "not significant"
    low, high = test.interval
    interval = (math.exp(low), math.exp(high))
    ratio = math.exp(test.estimate)
    return replace(line, verdict=verdict, note=note, p=p[0], ratio=ratio, interval=interval)


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


def _cells(line: Line, has_p: bool) -> Sequence[Any]:
    ratio = None
    if line.ratio is not None and line.interval is not None:
        ratio = f"{line.ratio:.3f} [{line.interval[0]:.3f}, {line.interval[1]:.3f}]"
    verdict = line.verdict.upper() if line.is_regression else line.verdict
    verdict = f"peer: {verdict}" if line.of_peer else verdict
    note = f" ({line.note})" if line.note else ""
    return (line.name, line.old_ms, line.new_ms, ratio, *[line.p] * has_p, verdict + note)
