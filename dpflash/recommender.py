"""Recommends an attention pattern by measurements: the fastest that fits the memory."""

from __future__ import annotations

import functools
import json
import math
import os
from bisect import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import _validate
from .clipping.device_speed import cpu_model
from .patterns import BlockSparse, Dense, Documents, Hierarchical, Pattern, SlidingWindow
from .patterns import from_key as pattern_from_key
from .patterns.reach import reaches_all

DIRECTIONS = ("forward", "forward+backward")
DTYPES = ("float64", "float32", "bfloat16", "float16")
Results = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_Row = Mapping[str, Any]

_MIB = 2**20
_TOKENS_REACH, _WIDTH_REACH = 4, 16  # factors by which T and H D may differ from measured ones
_LEAST_MIB = 1.0  # a smaller growth of memory is noise
_AS_FAST = 1.05  # a factor of the time that is within noise
_NAMED = 3  # of a longer list the rest is counted
_TABLE = "recommendations.json"
_ENVIRONMENT = ("device", "threads", "date", "torch", "dpflash")
# Arguments of patterns in tokens; the others are numbers of blocks, rates or words.
_IN_TOKENS = ("block_size", "global_tokens", "levels", "segment_lengths", "window")
_MEASURE = (
    "run `dpflash bench attention --out DIR` on your machine (`variants` and `sequence` add "
    "patterns; --quick will do, except for held-out losses) and pass results=DIR"
)
_WAY_OUT = f"{_MEASURE}, or take another value"


@dataclass(frozen=True)
class Quality:
    """The held-out loss of a small language model with a pattern, minus that with dense attention.

    The models differ in their pattern alone.
    """

    tokens: int  # of its windows; lengths of the pattern are scaled to them
    difference: float  # nats a byte; lower is better
    difference_ci95: tuple[float, float]  # over the choice of windows
    relative_difference: float  # over the loss with dense attention
    seed_difference: float | None  # the most by which another seed changed a dense model's loss

    @property
    def is_chance(self) -> bool:
        """Whether another seed changes the loss as much."""
        return self.seed_difference is not None and abs(self.difference) <= self.seed_difference

    def __str__(self) -> str:
        low, high = self.difference_ci95
        seed = "the effect of another seed was not measured"
        if self.seed_difference is not None:
            size = "no more" if self.is_chance else "more"
            seed = f"{size} than another seed changes it ({self.seed_difference:.4f} nats)"
        return (
            f"{self.relative_difference:+.2%} ({self.difference:+.4f} [{low:+.4f}, {high:+.4f}] "
            f"nats a byte, lower is better) over dense attention at T={self.tokens:,}, {seed}"
        )


@dataclass(frozen=True)
class Candidate:
    """A pattern, and the expected cost of its attention."""

    variant: str  # its name in the measurements
    pattern: Pattern  # for `dpflash.attention(pattern=...)` and the modules
    expected_ms: float
    expected_peak_mib: float | None  # growth of memory during a call, where it is known
    fits: bool  # whether that is within the limit
    pair_share: float  # pairs (query, key) over those of dense attention, causal or not
    quality: Quality | None  # of a small model with this pattern, where it was measured
    basis: str  # the rows that the figures come from, and how
    expected_ms_ci95: tuple[float, float]

    @property
    def is_worse(self) -> bool:
        """Whether the measured loss is above that of dense attention."""
        return self.quality is not None and self.quality.difference > 0

    @property
    def _cells(self) -> tuple[str, ...]:
        """Time, memory, pairs and loss as text."""
        mib, share = self.expected_peak_mib, self.pair_share
        loss = "reference" if isinstance(self.pattern, Dense) else "not measured"
        if self.quality is not None:
            chance = " (as a seed)" * self.quality.is_chance
            loss = f"{self.quality.relative_difference:+.2%}{chance}"
        # Almost all pairs must not read as 100%.
        pairs = f"{share if share >= 1 else min(share, 0.999):.1%}"
        return _digits(self.expected_ms), "unknown" if mib is None else _digits(mib), pairs, loss


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Recommendation:
    """The recommended pattern."""

    chosen: Candidate  # see `recommend`
    alternatives: tuple[Candidate, ...]  # those that fit first, each by time
    measured_on: str  # device, threads, date and version
    reasons: tuple[str, ...]  # reasons of the choice, omissions and warnings
    asked: str  # the question in words

    @property
    def pattern(self) -> Pattern:
        """The chosen pattern."""
        return self.chosen.pattern

    @property
    def variant(self) -> str:
        """Its name."""
        return self.chosen.variant

    def __str__(self) -> str:
        chosen, found = self.chosen, (self.chosen, *self.alternatives)
        rivals = [one for one in found if one.fits and one.is_worse <= chosen.is_worse]
        fastest = all(chosen.expected_ms <= one.expected_ms for one in rivals)
        gist = "fastest that fits" if fastest else "as fast as the fastest that fits"
        if chosen.quality is not None:
            gist += f"; held-out loss {chosen._cells[-1]}"
        elif not isinstance(chosen.pattern, Dense):
            gist += "; its quality is not known"
        rows: list[tuple[str, ...]] = [("variant", "ms", "peak MiB", "fits", "pairs", "loss")]
        for one in found:
            ms, mib, *rest = one._cells
            rows.append((one.variant, ms, mib, "yes" if one.fits else "NO", *rest))
        (basis, count), *_ = Counter(one.basis for one in found).most_common(1)
        source = f"figures: {basis}"
        if count < len(found):
            own = ["from", *("" if one.basis == basis else one.basis for one in found)]
            rows = [(*row, cell) for row, cell in zip(rows, own, strict=True)]
            source += ", where `from` says nothing else"
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        return "\n".join(
            [
                f"{self.asked}: {self.variant} ({gist})",
                f"pattern={self.pattern!r}",
                *(f"- {reason}" for reason in self.reasons),
                f"- measured on {self.measured_on}",
                "pairs: of those of dense attention; loss: held-out, of a small model with the "
                "pattern, over that with dense attention, lower is better",
                source,
                *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            ]
        )


@dataclass(frozen=True)
class _Question:
    """The arguments of `recommend`; dtype becomes that of the figures."""

    tokens: int
    memory: int | None
    causal: bool
    heads: int
    head_dim: int
    direction: str
    dtype: str | None

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def __str__(self) -> str:
        kind = "causal" if self.causal else "not causal"
        limit = "" if self.memory is None else f", within {self.memory / _MIB:,.0f} MiB"
        return (
            f"tokens={self.tokens}, heads={self.heads}, head_dim={self.head_dim}, {kind}, "
            f"{self.direction}, {self.dtype}{limit}"
        )


def recommend(
    tokens: int,
    *,
    memory: int | None = None,
    causal: bool = True,
    heads: int = 8,
    head_dim: int = 64,
    direction: str = "forward+backward",
    device: str | None = None,
    dtype: str | None = None,
    patterns: Collection[type[Pattern]] | type[Pattern] | None = None,
    results: Results = None,
) -> Recommendation:
    """Recommend the fastest attention pattern for a sample of `tokens` tokens, by measurements.

    Patterns are different models: a sparse one is faster because it sees less. The answer shows
    the pairs that each sees and, where it was measured, the held-out loss of a small model. Of
    patterns as fast as the fastest within noise (overlapping 95% intervals, or 5%) the one that
    sees most is chosen, and never one whose last position cannot depend on all earlier ones. A
    pattern whose loss was measured above that of dense attention is chosen only if no other fits.

    Time is interpolated over a pattern's pairs and memory over T, on straight lines in logarithms,
    and extrapolated up to 4 times T. Both are proportional to heads * head_dim. Only figures of
    one dtype are ranked, and figures of a quick run only if no full run is near.

    Args:
        tokens: T.
        memory: limit in bytes for the growth of memory during one call of attention: the output,
            gradients of q, k and v, and temporaries. q, k, v and the output's gradient do not
            count, nor does the rest of a model. None for no limit.
        causal: no query sees a later key.
        heads: H.
        head_dim: D.
        direction: "forward" or "forward+backward".
        device: "cpu" or "cuda"; None for a GPU if torch finds one.
        dtype: of q, k and v, such as "float32"; None for float32 on a CPU if it was measured, else
            for the dtype of most patterns.
        patterns: classes of `dpflash.patterns` to choose from, or one; None for all.
        results: folders or JSON files of `dpflash bench`, of which `attention`, `variants` and
            `sequence` are read; None for the figures that come with the library.

    Returns:
        The choice with its expected time and memory, their sources, and the alternatives.

    Raises:
        ValueError: nothing was measured near enough, nothing fits, or an argument is invalid.
    """
    _validate.positive_int(tokens=tokens, heads=heads, head_dim=head_dim)
    if isinstance(memory, str):
        raise ValueError(
            f"memory={memory!r}: expected bytes as a number; pass for example 100 * 2**20 for "
            "100 MiB"
        )
    if memory is not None:
        _validate.positive(memory=memory)
    _validate.one_of(
        direction=(direction, DIRECTIONS),
        device=(device, (None, "cpu", "cuda")),
        dtype=(dtype, (None, *DTYPES)),
        causal=(causal, (True, False)),
    )
    kinds = (Pattern,) if patterns is None else patterns
    kinds = tuple(kinds if isinstance(kinds, Collection) else (kinds,))
    if not kinds or not all(
        isinstance(kind, type) and issubclass(kind, Pattern) for kind in kinds
    ):
        raise ValueError(
            f"patterns={patterns!r}: expected classes of dpflash.patterns; pass some, such as "
            "[Dense, SlidingWindow], or None for all"
        )
    asked = _Question(tokens, memory, causal, heads, head_dim, direction, dtype)
    runs, left_out = _read_runs(results)
    if not runs:
        raise ValueError(f"results: there are no measurements; {_MEASURE}{_left_out(left_out)}")
    runs, reasons = _of_device(runs, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    left_out += [reason for run in runs for reason in run.unused]
    curves = _curves(runs, asked, kinds)
    near = [ends for curve in curves if (ends := _near(curve, asked, left_out))]
    if not near:
        raise ValueError(_nothing_near(asked, curves, kinds, runs) + _left_out(left_out))
    dtype, *other_dtypes = _dtypes(near, asked, runs[0].is_cpu)
    asked = replace(asked, dtype=dtype)
    ranked = [ends for ends in near if ends[0].dtype == dtype]
    joined = [ends for ends in ranked if reaches_all(ends[0].pattern, tokens, heads)]
    apart = [ends[0].variant for ends in ranked if ends not in joined]
    if not joined:
        raise ValueError(
            f"tokens={tokens}: in the patterns measured near it ({_listed(apart)}) the last "
            f"position never depends on all earlier ones; {_WAY_OUT}"
        )
    losses = [one for run in runs for one in run.losses]
    found = [_candidate(ends, asked, losses) for ends in joined]
    found.sort(key=lambda one: (not one.fits, one.expected_ms))
    if not found[0].fits:
        least = min(found, key=lambda one: one.expected_peak_mib or math.inf)
        raise ValueError(
            f"memory={memory}: none of the {len(found)} patterns measured near tokens={tokens} "
            f"fits; {least.variant} takes least, {least._cells[1]} MiB. Pass more bytes, fewer "
            "tokens or heads, or other patterns"
        )
    fitting = [one for one in found if one.fits]
    no_worse = [one for one in fitting if not one.is_worse] or fitting
    chosen = _sees_most(no_worse)
    passed_over = [one for one in fitting if one not in no_worse]
    reasons += _reasons(chosen, [one for one in found if one not in passed_over])
    if passed_over:
        reasons.append(
            f"{len(passed_over)} not chosen, since their measured loss is above that of dense "
            f"attention: {_listed([one.variant for one in passed_over])}"
        )
    if other_dtypes:
        reasons.append(
            f"{dtype} only; measured near this T too, and not ranked with it: "
            f"{', '.join(other_dtypes)} (pass dtype=)"
        )
    if apart:
        reasons.append(
            f"{len(apart)} left out, since their last position never depends on all earlier ones, "
            f"however many layers: {_listed(apart)}"
        )
    far = [
        f"{curve[0].variant} ({_lengths(curve)})"
        for curve in curves
        if curve[0].dtype == dtype and all(curve[0].pattern != ends[0].pattern for ends in near)
    ]
    if far:
        reasons.append(
            f"{len(far)} left out, since they were not measured near this T: {_listed(far)}"
        )
    if left_out:
        reasons.append(_left_out(left_out).removeprefix(". "))
    alternatives = tuple(one for one in found if one is not chosen)
    sources = "; ".join(dict.fromkeys(case.source for ends in joined for case in ends))
    return Recommendation(chosen, alternatives, sources, tuple(reasons), str(asked))


# Reading the measurements


@dataclass(frozen=True)
class _Case:
    """A measured row of attention."""

    direction: str
    dtype: str
    tokens: int
    width: int  # batch * heads * head_dim
    ms: float  # median, with its 95% interval
    low: float
    high: float
    peak_mib: float | None  # growth of memory during a call, where it was measured
    variant: str
    pattern: Pattern
    source: str  # device, date and versions
    is_quick: bool


_Curve = Sequence[_Case]  # of one pattern and dtype


@dataclass
class _Run:
    """The figures of one file."""

    environment: _Row
    cases: list[_Case]
    losses: list[tuple[Pattern, Quality]]
    unused: list[str]  # which rows cannot be used, and why

    @property
    def is_cpu(self) -> bool:
        return str(self.environment["device"]).startswith("CPU ")


@functools.cache
def _shipped() -> tuple[_Run, ...]:
    return _from_table(resources.files(__package__).joinpath(_TABLE).read_text("utf-8"))


def _read_runs(results: Results) -> tuple[list[_Run], list[str]]:
    """The runs in folders or files, None for those of the library; and why others are left out."""
    if results is None:
        return list(_shipped()), []
    runs, left_out = list[_Run](), list[str]()
    for path in map(Path, [results] if isinstance(results, str | os.PathLike) else results):
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                held = json.loads(file.read_text(encoding="utf-8"))
                if rows := _used_rows(held):
                    runs.append(_run(file.name, held["environment"] or {}, rows))
            except KeyError as error:
                left_out.append(f"{file.name}: its environment has no {error}")
            except (OSError, ValueError) as error:
                if not path.is_dir():
                    raise ValueError(
                        f"results={os.fspath(file)!r}: it cannot be read ({error}); pass folders "
                        "or files that `dpflash bench --out` wrote"
                    ) from None
                left_out.append(f"{file.name}: it cannot be read ({error})")
    return runs, left_out


def _used_rows(held: Any) -> list[_Row]:
    """The rows of attention and of held-out losses; none of a file of another kind."""
    rows = held.get("rows") if isinstance(held, dict) and "environment" in held else None
    listed = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [r for r in listed if r.get("operator") == "dpflash" or r.get("section") == "quality"]


def _run(file: str, environment: _Row, rows: Sequence[_Row]) -> _Run:
    device, threads, date, torch_, own = (environment[key] for key in _ENVIRONMENT)
    is_quick = bool(environment.get("quick"))
    source = (
        f"{device}, {threads} thread(s), {date}, torch {torch_}, dpflash {own} "
        f"({environment.get('commit')}){', quick run' * is_quick}"
    )
    run = _Run(environment, [], [], [])
    for row in rows:
        try:
            if row.get("operator") == "dpflash":
                run.cases += _cases(row, source, is_quick)
            elif not is_quick:  # a quick run trains too briefly
                run.losses += _losses(row, rows)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            run.unused.append(f"{file}: row {row.get('name')!r}: {reason}")
    return run


def _cases(row: _Row, source: str, is_quick: bool) -> Iterator[_Case]:
    """The case of a row; none of one that was not timed, or whose pattern depends on the data."""
    config = row["config"]
    direction, tokens = config["direction"], config["tokens"]
    if row.get("correct") is False:
        raise ValueError(row.get("failure") or "it is wrong")
    key, ms, peak = row.get("pattern_key"), row.get("median_ms"), row.get("peak_memory_mb")
    pattern = None if key is None else pattern_from_key(key)
    if pattern is None or isinstance(pattern, Documents) or ms is None:
        return
    low, high = row.get("ci95_ms") or row.get("range_ms") or (ms, ms)
    _validate.positive(median_ms=ms)
    _validate.finite(median_ms=ms, low=low, high=high)
    if peak is not None:
        _validate.non_negative(peak_memory_mb=peak)
        _validate.finite(peak_memory_mb=peak)
    width = config["batch"] * config["heads"] * config["head_dim"]
    variant = str(config.get("variant") or _brief(pattern))
    figures = (tokens, width, ms, low, high, peak)
    yield _Case(direction, config["dtype"], *figures, variant, pattern, source, is_quick)


def _brief(pattern: Pattern) -> str:
    """The pattern with its arguments, but for defaults and `causal`."""
    named = [
        f"{one.name}={value!r}"
        for one in fields(pattern)  # type: ignore[arg-type]
        if (value := getattr(pattern, one.name)) != one.default and one.name != "causal"
    ]
    return type(pattern).__name__ + f"({', '.join(named)})" * bool(named)


def _losses(row: _Row, rows: Sequence[_Row]) -> Iterator[tuple[Pattern, Quality]]:
    """A model's loss beside that of the dense one with the same seed and training."""

    def is_dense(one: _Row) -> bool:
        return isinstance(pattern_from_key(one["pattern_key"]), Dense)

    # Noise drowns the differences of private models, which have other baselines.
    if row.get("baseline") != "dense" or is_dense(row):
        return
    low, high = row["difference_ci95"]
    difference, relative = row["difference"], row["relative_difference"]
    _validate.finite(difference=difference, relative_difference=relative, low=low, high=high)
    trained = [one for one in rows if one.get("operator") != "dpflash" and is_dense(one)]
    seeds = [abs(one["difference"]) for one in trained if one.get("baseline") == "dense"]
    tokens, most = row["config"]["tokens"], max(seeds, default=None)
    quality = Quality(tokens, difference, (low, high), relative, most)
    yield pattern_from_key(row["pattern_key"]), quality


# The table that comes with the library

_COLUMNS = (
    *("operator", "variant", "direction", "causal", "dtype", "tokens", "batch", "heads"),
    *("head_dim", "median_ms", "ci95_ms", "range_ms", "peak_memory_mb", "baseline", "difference"),
    *("difference_ci95", "relative_difference", "pattern_key"),
)


def shipped_table(files: Iterable[Path]) -> str:
    """The text of recommendations.json: one line for each case and each loss in these files.

    Figures have five digits. Rows that are wrong or were not measured are left out.
    """
    runs = []
    for file in files:
        held = json.loads(file.read_text(encoding="utf-8"))
        environment = {k: held["environment"].get(k) for k in (*_ENVIRONMENT, "commit", "quick")}
        rows = [
            json.dumps([_rounded({**row["config"], **row}.get(column)) for column in _COLUMNS])
            for row in _used_rows(held)
            if row.get("pattern_key") and row.get("correct") is not False
            if row.get("median_ms")
            or (row.get("section"), row.get("baseline")) == ("quality", "dense")
        ]
        lines = ",\n".join(rows)
        runs.append(f'{{"environment": {json.dumps(environment)}, "rows": [\n{lines}\n]}}')
    return "[\n" + ",\n".join(runs) + "\n]\n"


def _from_table(text: str) -> tuple[_Run, ...]:
    runs = []
    for held in json.loads(text):
        rows = [dict(zip(_COLUMNS, row, strict=True)) for row in held["rows"]]
        rows = [{**row, "config": row} for row in rows]
        runs.append(_run(_TABLE, held["environment"], rows))
    return tuple(runs)


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# Answering


def _of_device(runs: list[_Run], device: str) -> tuple[list[_Run], list[str]]:
    """The runs of this device, else of one like it, else of any, latest first; and warnings."""
    runs = sorted(runs, key=lambda run: str(run.environment["date"]), reverse=True)
    own: str | None = f"CPU {cpu_model()}"
    if device == "cuda":
        own = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    same = [run for run in runs if run.environment["device"] == own]
    like = same or [run for run in runs if run.is_cpu == (device == "cpu")] or runs
    # Of one device only: figures of two cannot be ranked.
    named = like[0].environment["device"]
    runs = [run for run in runs if run.environment["device"] == named]
    warnings = []
    if not same:
        warnings.append(
            f"WARNING: the figures are of another device ({named}) than yours "
            f"({own or 'no GPU'}), where times and their order may differ; {_MEASURE}"
        )
    try:
        release = version("dpflash")
    except PackageNotFoundError:  # a source tree that is not installed
        return runs, warnings
    others = {str(run.environment["dpflash"]) for run in runs} - {release}
    if others:
        warnings.append(
            f"WARNING: figures of dpflash {', '.join(sorted(others))}, and this is {release}, "
            f"which may be faster or slower; {_MEASURE}"
        )
    return runs, warnings


def _curves(runs: Sequence[_Run], asked: _Question, kinds: tuple[type, ...]) -> list[_Curve]:
    """The measured patterns; of equal points the first run's count."""
    curves: dict[tuple[str, str], list[_Case]] = {}
    for case in (case for run in runs for case in run.cases):
        pattern = case.pattern
        is_asked = (case.direction, pattern.causal) == (asked.direction, asked.causal)
        if is_asked and isinstance(pattern, kinds):
            curve = curves.setdefault((pattern.key, case.dtype), [])
            curve.append(replace(case, variant=(curve or [case])[0].variant))
    return list(curves.values())


def _near(curve: _Curve, asked: _Question, left_out: list[str]) -> _Curve:
    """The case at T, or the two whose line goes through T; none if T is out of reach."""
    ends = _ends([case for case in curve if not case.is_quick], asked) or _ends(curve, asked)
    try:
        for case in ends[:1]:
            case.pattern.edges(asked.tokens, asked.heads)
    except ValueError as error:  # its blocks are listed for other heads or another T
        left_out.append(f"{ends[0].variant}: {error}")
        return []
    return ends


def _ends(curve: _Curve, asked: _Question) -> _Curve:
    def distance(case: _Case) -> float:
        return abs(math.log(case.width / asked.width))

    nearest: dict[int, _Case] = {}  # for each T the case of the nearest width
    for case in sorted(curve, key=lambda case: (distance(case), case.is_quick)):
        if distance(case) <= math.log(_WIDTH_REACH):
            nearest.setdefault(case.tokens, case)
    if asked.tokens in nearest:
        return [nearest[asked.tokens]]
    lengths = sorted(nearest)
    is_near = any(1 / _TOKENS_REACH <= t / asked.tokens <= _TOKENS_REACH for t in lengths)
    if len(lengths) < 2 or not is_near:
        return []
    begin = min(max(bisect(lengths, asked.tokens) - 1, 0), len(lengths) - 2)
    return [nearest[t] for t in lengths[begin : begin + 2]]


def _dtypes(near: Sequence[_Curve], asked: _Question, is_cpu: bool) -> list[str]:
    """The dtype whose figures are ranked, then the others."""
    found = [dtype for dtype, _ in Counter(sorted(ends[0].dtype for ends in near)).most_common()]
    first = asked.dtype or ("float32" if is_cpu and "float32" in found else found[0])
    if first not in found:
        raise ValueError(
            f"dtype={first!r}: measured near tokens={asked.tokens} were {', '.join(found)} only; "
            f"{_WAY_OUT}"
        )
    return [first, *(dtype for dtype in found if dtype != first)]


def _candidate(
    ends: _Curve, asked: _Question, losses: Sequence[tuple[Pattern, Quality]]
) -> Candidate:
    pattern, tokens = ends[0].pattern, asked.tokens

    def expected(sizes: Sequence[int], size: int, values: Sequence[float]) -> float:
        """The value at a size, on the line through one or two points in logarithms."""
        y = [asked.width / case.width * value for case, value in zip(ends, values, strict=True)]
        if len(y) == 1:
            return y[0]
        slope = math.log(y[1] / y[0]) / math.log(sizes[1] / sizes[0])
        return y[0] * (size / sizes[0]) ** float(slope)

    lengths = [case.tokens for case in ends]
    # Over its pairs the time of a pattern is a line at every length. Over T it is not: one that
    # sees all of a short sequence is quadratic there.
    *measured, pairs = (pattern.edges(length, asked.heads) for length in (*lengths, tokens))
    columns = zip(*((case.ms, case.low, case.high) for case in ends), strict=True)
    ms, *interval = (expected(measured, pairs, values) for values in columns)
    peaks = [max(case.peak_mib, _LEAST_MIB) for case in ends if case.peak_mib is not None]
    peak = expected(lengths, tokens, peaks) if len(peaks) == len(ends) else None
    form = _over_tokens(pattern, tokens)
    return Candidate(
        ends[0].variant,
        pattern,
        ms,
        peak,
        asked.memory is None or (peak is not None and peak * _MIB <= asked.memory),
        pairs / Dense(causal=asked.causal).edges(tokens, asked.heads),
        next((q for other, q in losses if _over_tokens(other, q.tokens) == form), None),
        f"{_basis(ends, asked)}, {ends[0].dtype}",
        (min(interval), max(interval)),
    )


def _over_tokens(pattern: Pattern, tokens: int) -> Mapping[str, Any]:
    """The pattern's arguments, those in tokens over T."""

    def over(value: Any) -> Any:
        if isinstance(value, list):
            return [over(one) for one in value]
        return value if value == -1 else Fraction(value, tokens)  # -1: all

    named = json.loads(pattern.key)
    return {key: over(one) if key in _IN_TOKENS else one for key, one in named.items()}


def _sees_most(found: Sequence[Candidate]) -> Candidate:
    """Of those as fast as the first, within noise, the one that sees most."""
    fastest = found[0]
    as_fast = [
        one
        for one in found
        if one.expected_ms <= _AS_FAST * fastest.expected_ms
        or one.expected_ms_ci95[0] <= fastest.expected_ms_ci95[1]
    ]
    # A pattern that counts pairs twice sees no more than all.
    return max(
        as_fast,
        key=lambda one: (
            min(1.0, one.pair_share),
            isinstance(one.pattern, Dense),
            -one.expected_ms,
        ),
    )


# Explaining the answer


def _basis(ends: _Curve, asked: _Question) -> str:
    where = " and ".join(f"T={case.tokens:,}" for case in ends)
    how = f"EXTRAPOLATED from {where}"
    if len(ends) == 1:
        how = "measured"
    elif ends[0].tokens < asked.tokens < ends[1].tokens:
        how = f"between {where}"
    if any(case.width != asked.width for case in ends):
        widths = ", ".join(dict.fromkeys(str(case.width) for case in ends))
        how += f", scaled from B x H x D = {widths}"
    return how + ", quick run" * any(case.is_quick for case in ends)


def _reasons(chosen: Candidate, found: Sequence[Candidate]) -> Iterator[str]:
    large = [one.variant for one in found if not one.fits]
    count = f"the fastest of {len(found) - len(large)} that fit"
    fastest = found[0]
    if fastest.expected_ms < chosen.expected_ms:
        count = (
            f"as fast within noise as {count} ({fastest.variant}, {fastest._cells[0]} ms), and "
            "sees as much or more"
        )
    ms, mib, pairs, _ = chosen._cells
    yield f"{ms} ms and {mib} MiB expected ({chosen.basis}): {count}"
    is_whole = chosen.pair_share >= 1
    if is_whole and isinstance(chosen.pattern, BlockSparse | Hierarchical | SlidingWindow):
        yield "it sees all that dense attention sees at this T, and no longer at a greater one"
    elif not isinstance(chosen.pattern, Dense):
        sees = f"a query sees {pairs} of its pairs on average"
        if is_whole:
            sees = "it sees every pair, but some weigh more than others"
        text = f"not equivalent to dense attention: {sees}, which makes another model"
        for dense in (one for one in found if isinstance(one.pattern, Dense)):
            text += f"; dense attention is expected to take {dense._cells[0]} ms"
        if chosen.quality is None:
            yield (
                f"{text}; held-out loss not measured for this pattern (a full run of `dpflash "
                "bench variants` has some), so compare that of your model"
            )
        else:
            yield (
                f"{text}; the held-out loss of a small model was {chosen.quality}: measure yours, "
                "which may use far tokens more"
            )
    if large:
        yield f"{len(large)} more do not fit, or their memory is unknown: {_listed(large)}"


def _nothing_near(
    asked: _Question, curves: Sequence[_Curve], kinds: tuple[type, ...], runs: Sequence[_Run]
) -> str:
    """Why there are no figures for the question, and which ones there are."""
    if curves:
        lengths = sorted({case.tokens for curve in curves for case in curve})
        widths = [case.width for curve in curves for case in curve]
        return (
            f"tokens={asked.tokens}, heads={asked.heads}, head_dim={asked.head_dim}: nothing was "
            f"measured near enough. Measured were T = {', '.join(f'{t:,}' for t in lengths)} and "
            f"B x H x D = {min(widths):,} to {max(widths):,}; figures hold up to {_TOKENS_REACH} "
            "times away in T (of a pattern measured at one T only, at that T) and "
            f"{_WIDTH_REACH} times in H x D; {_WAY_OUT}"
        )
    measured = sorted(
        {
            f"{type(case.pattern).__name__} (causal={case.pattern.causal}, {case.direction})"
            for run in runs
            for case in run.cases
        }
    )
    return (
        f"patterns={', '.join(kind.__name__ for kind in kinds)}: none was measured with "
        f"causal={asked.causal}, direction={asked.direction!r}; measured: "
        f"{', '.join(measured) or 'nothing'}. To measure it, {_MEASURE}"
    )


def _lengths(curve: _Curve) -> str:
    sizes = [case.tokens for case in curve]
    least, most = min(sizes), max(sizes)
    return f"at T={most:,} only" if least == most else f"from T={least:,} up to {most:,}"


def _listed(names: Sequence[str], separator: str = ", ", last: str = " and ") -> str:
    more = f"{last}{len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{separator.join(names[:_NAMED])}{more}"


def _left_out(reasons: Sequence[str]) -> str:
    """The reasons why measurements could not be used, as a further sentence."""
    return f". Left out: {_listed(reasons, '; ', '; and ')}" if reasons else ""
