"""Which attention pattern for so many tokens: the fastest one measured that fits the memory.

It reads what `dpflash bench attention`, `variants` and `sequence` write; the figures that come
with the library are those of the repository's own runs.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from . import _validate
from .ceilings import cpu_model
from .patterns import (
    BlockSparse,
    Dense,
    Documents,
    Hierarchical,
    Pattern,
    SlidingWindow,
    from_key,
)

__all__ = ["Candidate", "Quality", "Recommendation", "recommend"]

_DIRECTIONS = ("forward", "forward+backward")
_FILE = "recommendations.json"
_MIB = 2**20
# How far from a measured T a figure is told, and from a measured heads * head_dim * batch.
_TOKENS_REACH, _WIDTH_REACH = 4, 16
# Growth of memory below this is noise of the system.
_LEAST_MIB = 1.0
# Models of `dpflash.bench.quality` that tell of chance, and of what attention is worth at all.
_NO_PATTERN = ("dense, another seed", "no context")
# Patterns that are dense attention where they see all pairs.
_EACH_PAIR_ONCE = (BlockSparse, Hierarchical, SlidingWindow)
_MEASURE = "run `dpflash bench attention --out DIR` on your machine and pass results=DIR"
_WAY_OUT = f"{_MEASURE}, or take another value"
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_OF_ENVIRONMENT = ("device", "threads", "date", "torch", "dpflash")
# Rows left out that are told one by one.
_TOLD = 3


@dataclass(frozen=True)
class Quality:
    """The held-out loss of a small language model that was trained with a pattern of the kind.

    Attributes:
        pattern: its own, in words.
        tokens: of its windows.
        sparsity: part of all causal pairs that its pattern leaves out.
        difference: loss minus that of the same model with dense attention, nats a byte.
        difference_ci95: its 95% interval.
        relative_difference: over the loss with dense attention.
    """

    pattern: str
    tokens: int
    sparsity: float
    difference: float
    difference_ci95: tuple[float, float]
    relative_difference: float

    def __str__(self) -> str:
        low, high = self.difference_ci95
        return (
            f"{self.relative_difference:+.2%} ({self.difference:+.4f} [{low:+.4f}, {high:+.4f}] "
            f"nats a byte) at {self.tokens} tokens with {self.pattern}"
        )


@dataclass(frozen=True)
class Candidate:
    """A pattern, and what its attention is expected to take.

    Attributes:
        variant: under which name it was measured.
        pattern: for `dpflash.attention(pattern=...)` and the modules.
        expected_ms: milliseconds of a call.
        expected_peak_mib: MiB by which memory grows during a call; None where it is not known.
        fits: whether that is within the limit.
        pair_share: pairs (query, key) seen, over those of dense attention (causal or not).
        quality: of a small model with a pattern of the same class, that with the nearest
            sparsity; None where there is none.
        basis: which rows the figures are from, and how.
    """

    variant: str
    pattern: Pattern
    expected_ms: float
    expected_peak_mib: float | None
    fits: bool
    pair_share: float
    quality: Quality | None
    basis: str


@dataclass(frozen=True)
class Recommendation:
    """The pattern to take.

    Attributes:
        chosen: the fastest candidate that fits.
        alternatives: all other candidates, those that fit first, each by time.
        measured_on: device, threads, date and version of the figures.
        reasons: why, and what to mind.
        asked: the question in words.
    """

    chosen: Candidate
    alternatives: tuple[Candidate, ...]
    measured_on: str
    reasons: tuple[str, ...]
    asked: str

    @property
    def pattern(self) -> Pattern:
        """The chosen pattern."""
        return self.chosen.pattern

    @property
    def variant(self) -> str:
        """Its name."""
        return self.chosen.variant

    def __str__(self) -> str:
        header = ("variant", "ms", "peak MiB", "fits", "pairs", "loss", "from")
        rows = [header, *(_cells(one) for one in (self.chosen, *self.alternatives))]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(
            [
                f"{self.asked}: {self.variant}",
                f"pattern={self.pattern!r}",
                *(f"- {reason}" for reason in self.reasons),
                f"- measured on {self.measured_on}",
                "pairs: of those of dense attention; loss: of a small model with a pattern of the "
                "class, against dense",
                *lines,
            ]
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
    results: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
) -> Recommendation:
    """The fastest attention pattern for one sample of so many tokens, by measurements.

    Patterns are different models: a sparse one is faster because it sees less. What each sees and,
    where it was measured, the held-out loss of a small model with one of its class stand beside
    the times; ``patterns=[Dense]`` asks for dense attention only.

    Between measured T, time follows a straight line over the pattern's pairs and memory one
    over T, in logarithms; beyond, the line of the nearest two, up to 4 times T. Both count as
    proportional to heads * head_dim. Figures of one dtype only are ranked, and those of a quick
    run only where no full one has the pattern near this T.

    Args:
        tokens: T.
        memory: bytes by which memory may grow during a call; None for no limit.
        causal: no query sees a later key.
        heads: H.
        head_dim: D.
        direction: "forward" or "forward+backward".
        device: "cpu" or "cuda"; None for a GPU where torch finds one.
        dtype: of q, k and v, such as "float32"; None for float32 on a CPU, where it was measured,
            else for that in which most patterns were.
        patterns: classes of `dpflash.patterns` to choose from, or one; None for all.
        results: folders or JSON files of `dpflash bench`; None for the figures that come with the
            library.

    Returns:
        The choice with its expected time and memory, what these rest on, and the others.

    Raises:
        ValueError: nothing was measured near enough, or nothing fits.
    """
    _validate.positive_int(tokens=tokens, heads=heads, head_dim=head_dim)
    if memory is not None:
        _validate.positive(memory=memory)
    _validate.one_of(
        direction=(direction, _DIRECTIONS),
        device=(device, (None, "cpu", "cuda")),
        dtype=(dtype, (None, *_DTYPES)),
        causal=(causal, (True, False)),
    )
    kinds = _kinds(patterns)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    question = _Question(tokens, memory, causal, heads, head_dim, direction, dtype)
    left_out: list[str] = []
    runs, warning = _of_device(_runs(results, left_out), device, left_out)
    curves = [c for c in _curves(runs, question, left_out) if isinstance(c.pattern, kinds)]
    near = list(_near(curves, question, left_out))
    if not near:
        raise ValueError(_too_far(question, curves, kinds) + _told(left_out))
    dtype, *others = _dtypes([curve.dtype for curve, _ in near], _kind(runs[0]), question)
    question = replace(question, dtype=dtype)
    taken = [(curve, ends) for curve, ends in near if curve.dtype == dtype]
    qualities = _qualities(runs, left_out)
    found = [curve.candidate(ends, question, qualities) for curve, ends in taken]
    found.sort(key=lambda one: (not one.fits, one.expected_ms))
    chosen, *alternatives = found
    if not chosen.fits:
        least = min(found, key=lambda one: one.expected_peak_mib or math.inf)
        raise ValueError(
            f"memory={memory}: none of the {len(found)} patterns measured near tokens={tokens} "
            f"fits; {least.variant} takes least, {_mib(least)} MiB. Pass more, fewer tokens or "
            "heads, or other patterns"
        )
    reasons = [*warning, *_reasons(chosen, found, question)]
    if others:
        reasons.append(
            f"{dtype} only; measured near this T too, and not ranked with it: {', '.join(others)} "
            "(pass dtype=)"
        )
    if left_out:
        reasons.append(_told(left_out).removeprefix(". "))
    sources = dict.fromkeys(point.source for _, ends in taken for point in ends)
    return Recommendation(
        chosen, tuple(alternatives), "; ".join(sources), tuple(reasons), question.words
    )


def _kinds(patterns: Collection[type[Pattern]] | type[Pattern] | None) -> tuple[type, ...]:
    if patterns is None:
        return (Pattern,)
    listed = patterns if isinstance(patterns, Collection) else (patterns,)
    kinds = tuple(kind for kind in listed if isinstance(kind, type) and issubclass(kind, Pattern))
    if not kinds or len(kinds) < len(listed):
        raise ValueError(
            f"patterns={patterns!r}: expected classes of dpflash.patterns; pass some, such as "
            "[Dense, SlidingWindow], or None for all"
        )
    return kinds


def _near(
    curves: Iterable[_Curve], asked: _Question, left_out: list[str]
) -> Iterator[tuple[_Curve, list[_Point]]]:
    """The patterns that were measured near T and can be used there, and the points that tell."""
    for curve in curves:
        ends = curve.ends(asked)
        if not ends:
            continue
        try:
            curve.pattern.edges(asked.tokens, asked.heads)
        except ValueError as error:  # its blocks are listed for other heads or another T
            left_out.append(f"{curve.variant}: {error}")
        else:
            yield curve, ends


def _dtypes(measured: Sequence[str], kind: str, asked: _Question) -> list[str]:
    """The dtype whose figures are ranked, then the others."""
    by_count = sorted(set(measured), key=lambda dtype: (-measured.count(dtype), dtype))
    first = asked.dtype or ("float32" if kind == "cpu" else by_count[0])
    if first in by_count:
        return [first, *(dtype for dtype in by_count if dtype != first)]
    if asked.dtype is None:
        return by_count
    raise ValueError(
        f"dtype={first!r}: measured near tokens={asked.tokens} were {', '.join(by_count)} only; "
        f"{_WAY_OUT}"
    )


def _told(left_out: Sequence[str]) -> str:
    """What could not be used, as a further sentence; empty where there is nothing."""
    if not left_out:
        return ""
    more = f"; and {len(left_out) - _TOLD} more" if len(left_out) > _TOLD else ""
    return f". Left out: {'; '.join(left_out[:_TOLD])}{more}"


@dataclass(frozen=True)
class _Question:
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

    @property
    def words(self) -> str:
        kind = "causal" if self.causal else "not causal"
        limit = "" if self.memory is None else f", within {self.memory / _MIB:,.0f} MiB"
        return (
            f"tokens={self.tokens}, heads={self.heads}, head_dim={self.head_dim}, {kind}, "
            f"{self.direction}, {self.dtype}{limit}"
        )


@dataclass(frozen=True)
class _Run:
    """What a file holds that a recommendation may use."""

    file: str
    environment: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def is_quick(self) -> bool:
        return bool(self.environment.get("quick"))

    @property
    def source(self) -> str:
        e = self.environment
        return (
            f"{e['device']}, {e['threads']} thread(s), {e['date']}, torch {e['torch']}, dpflash "
            f"{e['dpflash']} ({e.get('commit')}){', quick run' * self.is_quick}"
        )

    def named(self, row: Mapping[str, Any]) -> str:
        return f"{self.file}: row {row.get('name')!r}"


@dataclass(frozen=True)
class _Point:
    """A measured row."""

    tokens: int
    width: int  # batch * heads * head_dim
    milliseconds: float
    peak_mib: float | None
    source: str
    is_quick: bool


@dataclass(frozen=True)
class _Curve:
    """A pattern's measured rows in one dtype."""

    pattern: Pattern
    variant: str
    dtype: str
    points: list[_Point] = field(default_factory=list)

    def ends(self, asked: _Question) -> list[_Point]:
        """The points that tell of T; none where nothing was measured near enough."""
        full = [point for point in self.points if not point.is_quick]
        for points in (full, self.points):
            ends = _ends(_nearest_in_width(points, asked.width), asked.tokens)
            if ends:
                return ends
        return []

    def candidate(
        self, ends: Sequence[_Point], asked: _Question, qualities: Sequence[Quality]
    ) -> Candidate:
        """What is expected by these points."""
        factors = [asked.width / point.width for point in ends]

        def expected(sizes: Sequence[int], size: int, values: Sequence[float]) -> float:
            scaled = [factor * value for factor, value in zip(factors, values, strict=True)]
            return _on_line(sizes, scaled, size)

        lengths, tokens = [point.tokens for point in ends], asked.tokens
        # A pattern that sees all of a short sequence is quadratic there and nowhere else; in its
        # pairs the time is a line at every length.
        pairs = [self.pattern.edges(length, asked.heads) for length in (*lengths, tokens)]
        times = [point.milliseconds for point in ends]
        peaks = [max(p.peak_mib, _LEAST_MIB) for p in ends if p.peak_mib is not None]
        share = _share(self.pattern, asked)
        peak = expected(lengths, tokens, peaks) if len(peaks) == len(ends) else None
        return Candidate(
            self.variant,
            self.pattern,
            expected(pairs[:-1], pairs[-1], times),
            peak,
            asked.memory is None or (peak is not None and peak * _MIB <= asked.memory),
            share,
            _nearest_quality(self.pattern, 1 - share, qualities),
            f"{_basis(ends, asked)}, {self.dtype}",
        )


def _nearest_in_width(points: Iterable[_Point], width: int) -> list[_Point]:
    """For each T the point with the nearest width, within reach; sorted by T."""

    def distance(point: _Point) -> float:
        return abs(math.log(point.width / width))

    nearest: dict[int, _Point] = {}
    for point in sorted(points, key=lambda point: (distance(point), point.is_quick)):
        if distance(point) <= math.log(_WIDTH_REACH):
            nearest.setdefault(point.tokens, point)
    return [nearest[tokens] for tokens in sorted(nearest)]


def _ends(points: Sequence[_Point], tokens: int) -> list[_Point]:
    """The point at T, or the two whose line goes through T; none where T is out of reach."""
    exact = [point for point in points if point.tokens == tokens]
    if exact or len(points) < 2:
        return exact
    distance = min(abs(math.log(point.tokens / tokens)) for point in points)
    if distance > math.log(_TOKENS_REACH):
        return []
    above = next((i for i, p in enumerate(points) if p.tokens > tokens), len(points))
    begin = min(max(above - 1, 0), len(points) - 2)
    return list(points[begin : begin + 2])


def _on_line(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """The value at a size, on the line through one or two points in logarithms."""
    if len(sizes) == 1:
        return values[0]
    (x0, x1), (y0, y1) = (map(math.log, pair) for pair in (sizes, values))
    return math.exp(y0 + (y1 - y0) * (math.log(size) - x0) / (x1 - x0))


def _share(pattern: Pattern, asked: _Question) -> float:
    dense = Dense(causal=asked.causal).edges(asked.tokens, asked.heads)
    return pattern.edges(asked.tokens, asked.heads) / dense


def _basis(ends: Sequence[_Point], asked: _Question) -> str:
    where = " and ".join(f"T={point.tokens:,}" for point in ends)
    if len(ends) == 1:
        how = "measured"
    elif ends[0].tokens < asked.tokens < ends[1].tokens:
        how = f"between {where}"
    else:
        how = f"EXTRAPOLATED from {where}"
    if any(point.width != asked.width for point in ends):
        widths = ", ".join(dict.fromkeys(str(point.width) for point in ends))
        how += f", scaled from B x H x D = {widths}"
    if any(point.is_quick for point in ends):
        how += ", quick run"
    return how


def _curves(runs: Iterable[_Run], asked: _Question, left_out: list[str]) -> list[_Curve]:
    """The patterns measured in this direction; of equal points the first run's count."""
    curves: dict[tuple[str, str], _Curve] = {}
    for run in runs:
        for row in run.rows:
            if row.get("operator") != "dpflash" or row.get("median_ms") is None:
                continue
            try:
                found = _measured(row, run, asked)
            except (KeyError, TypeError, ValueError) as error:
                left_out.append(f"{run.named(row)}: {_said(error)}")
                continue
            if found is not None:
                curve, point = found
                key = (curve.pattern.key, curve.dtype)
                curves.setdefault(key, curve).points.append(point)
    return list(curves.values())


def _measured(row: Mapping[str, Any], run: _Run, asked: _Question) -> tuple[_Curve, _Point] | None:
    """A row's point and the curve it may begin; None where something else was asked for."""
    config = row["config"]
    if row.get("pattern_key") is None or config["direction"] != asked.direction:
        return None
    pattern = from_key(row["pattern_key"])
    # Documents are a matter of the data and not of taste.
    if pattern.causal != asked.causal or isinstance(pattern, Documents):
        return None
    if row.get("correct") is False:
        raise ValueError("it is wrong")
    ms, peak = row["median_ms"], row.get("peak_memory_mb")
    _validate.positive(median_ms=ms)
    _validate.finite(median_ms=ms)
    if peak is not None:
        _validate.non_negative(peak_memory_mb=peak)
        _validate.finite(peak_memory_mb=peak)
    sizes = {key: config[key] for key in ("tokens", "batch", "heads", "head_dim")}
    _validate.positive_int(**sizes)
    _validate.one_of(dtype=(config["dtype"], _DTYPES))
    width = sizes["batch"] * sizes["heads"] * sizes["head_dim"]
    variant = str(config.get("variant") or type(pattern).__name__)
    return (
        _Curve(pattern, variant, config["dtype"]),
        _Point(sizes["tokens"], width, ms, peak, run.source, run.is_quick),
    )


def _said(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _qualities(runs: Iterable[_Run], left_out: list[str]) -> list[Quality]:
    """Of the models without noise, which differ from the dense one in nothing but the pattern."""
    qualities = []
    for run in runs:
        for row in run.rows:
            if row.get("section") != "quality" or row.get("difference") is None:
                continue
            try:
                if row["baseline"] == "dense" and row["what"] not in _NO_PATTERN:
                    qualities.append(_quality(row))
            except (KeyError, TypeError, ValueError) as error:
                left_out.append(f"{run.named(row)}: {_said(error)}")
    return qualities


def _quality(row: Mapping[str, Any]) -> Quality:
    low, high = row["difference_ci95"]
    numbers = {key: row[key] for key in ("sparsity", "difference", "relative_difference")}
    _validate.finite(**numbers, low=low, high=high)
    config = row["config"]
    return Quality(
        str(config["pattern"]), config["tokens"], difference_ci95=(low, high), **numbers
    )


def _nearest_quality(
    pattern: Pattern, sparsity: float, qualities: Iterable[Quality]
) -> Quality | None:
    of_class = [one for one in qualities if one.pattern.startswith(f"{type(pattern).__name__}(")]
    return min(of_class, key=lambda one: abs(one.sparsity - sparsity), default=None)


def _runs(
    results: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    left_out: list[str],
) -> list[_Run]:
    if results is None:
        held = [(_FILE, run) for run in _shipped()]
    else:
        given = [results] if isinstance(results, str | os.PathLike) else results
        held = [one for path in map(Path, given) for one in _read(path, left_out)]
    runs = []
    for file, one in held:
        listed = one["rows"] if isinstance(one["rows"], list) else []
        rows = [row for row in listed if isinstance(row, Mapping) and _is_used(row)]
        if not rows:
            continue
        environment = one["environment"] if isinstance(one["environment"], Mapping) else {}
        lacking = [key for key in _OF_ENVIRONMENT if key not in environment]
        if lacking:
            left_out.append(f"{file}: its environment has no {lacking[0]!r}")
        else:
            runs.append(_Run(file, environment, rows))
    return runs


def _is_used(row: Mapping[str, Any]) -> bool:
    return row.get("operator") == "dpflash" or row.get("section") == "quality"


def _read(path: Path, left_out: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The files' names and results; a folder may hold files of other kinds too."""
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        try:
            held = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            if path.is_dir():
                left_out.append(f"{file.name}: it cannot be read ({error})")
                continue
            raise ValueError(
                f"results={os.fspath(file)!r}: it cannot be read ({error}); pass folders or "
                "files that `dpflash bench --out` wrote"
            ) from None
        if isinstance(held, dict) and {"environment", "rows"} <= held.keys():
            yield file.name, held


@functools.cache
def _shipped() -> tuple[Mapping[str, Any], ...]:
    file = resources.files(__package__).joinpath(_FILE)
    return tuple(json.loads(file.read_text(encoding="utf-8"))["runs"])


def _of_device(
    runs: list[_Run], device: str, left_out: Sequence[str]
) -> tuple[list[_Run], tuple[str, ...]]:
    """The runs of this device, else of one like it, else of any, latest first; and a warning."""
    if not runs:
        raise ValueError(f"results: there are no measurements; {_MEASURE}{_told(left_out)}")
    runs = sorted(runs, key=lambda run: str(run.environment["date"]), reverse=True)
    own = f"CPU {cpu_model()}"
    if device == "cuda":
        own = torch.cuda.get_device_name() if torch.cuda.is_available() else "a GPU"
    same = [run for run in runs if run.environment["device"] == own]
    if same:
        return same, ()
    like = [run for run in runs if _kind(run) == device]
    # Of one device only: figures of two have no ranking.
    named = (like or runs)[0].environment["device"]
    chosen = [run for run in runs if run.environment["device"] == named]
    return chosen, (
        f"WARNING: the figures are of another device ({named}) than yours ({own}), where times "
        "and their order may differ; `dpflash bench attention --out DIR` measures yours, and "
        "results=DIR reads that",
    )


def _kind(run: _Run) -> str:
    return "cpu" if str(run.environment["device"]).startswith("CPU ") else "cuda"


def _too_far(asked: _Question, curves: Sequence[_Curve], kinds: tuple[type, ...]) -> str:
    if not curves:
        named = None if kinds == (Pattern,) else ", ".join(kind.__name__ for kind in kinds)
        return (
            f"patterns={named}: none was measured with causal={asked.causal}, "
            f"direction={asked.direction!r}; {_WAY_OUT}"
        )
    widths = {point.width for curve in curves for point in curve.points}
    if not any(max(w / asked.width, asked.width / w) <= _WIDTH_REACH for w in widths):
        return (
            f"heads={asked.heads}, head_dim={asked.head_dim}: their product {asked.width} is more "
            f"than {_WIDTH_REACH} times away from what was measured ({min(widths)} to "
            f"{max(widths)}); {_WAY_OUT}"
        )
    sizes = sorted({point.tokens for curve in curves for point in curve.points})
    return (
        f"tokens={asked.tokens}: more than {_TOKENS_REACH} times away from what was measured "
        f"({', '.join(map(str, sizes))}), or measured at one length only; {_WAY_OUT}"
    )


def _reasons(chosen: Candidate, found: Sequence[Candidate], asked: _Question) -> Iterator[str]:
    fitting = sum(one.fits for one in found)
    yield (
        f"{chosen.expected_ms:.3g} ms and {_mib(chosen)} MiB expected ({chosen.basis}): the "
        f"fastest of {fitting} that fit, of {len(found)} measured near this T"
    )
    if not isinstance(chosen.pattern, Dense):
        yield _other_model(chosen, found)


def _other_model(chosen: Candidate, found: Sequence[Candidate]) -> str:
    """That it is not dense attention, and what is known of the difference."""
    dense = next((one for one in found if isinstance(one.pattern, Dense)), None)
    if chosen.pair_share >= 1 and isinstance(chosen.pattern, _EACH_PAIR_ONCE):
        return "it sees all that dense attention sees at this T, and no longer at a greater one"
    text = (
        f"not equivalent to dense attention: a query sees {chosen.pair_share:.1%} of its pairs, "
        "which is another model"
    )
    if dense is not None:
        text += f"; dense attention is expected to take {dense.expected_ms:.3g} ms"
    if chosen.quality is None:
        return f"{text}; its quality was not measured, so compare held-out losses of your model"
    return (
        f"{text}; the held-out loss of a small model was {chosen.quality}: measure yours, which "
        "may use far tokens more"
    )


def _cells(one: Candidate) -> tuple[str, ...]:
    return (
        one.variant,
        f"{one.expected_ms:.3g}",
        _mib(one),
        "yes" if one.fits else "NO",
        f"{one.pair_share:.1%}",
        "-" if one.quality is None else f"{one.quality.relative_difference:+.2%}",
        one.basis,
    )


def _mib(one: Candidate) -> str:
    mib = one.expected_peak_mib
    return "unknown" if mib is None else f"{mib:,.0f}" if mib >= 100 else f"{mib:.3g}"
