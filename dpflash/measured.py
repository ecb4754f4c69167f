"""Reads what `dpflash bench` measured of attention patterns: time, memory and held-out losses.

Letters: B samples, H heads, T tokens, D head dim.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any

from . import _validate
from .patterns import Dense, Documents, Pattern, from_key

DIRECTIONS = ("forward", "forward+backward")
DTYPES = ("float64", "float32", "bfloat16", "float16")
# How far from a measured T a figure is told, and from a measured B H D.
TOKENS_REACH, WIDTH_REACH = 4, 16
MIB = 2**20
MEASURE = (
    "run `dpflash bench attention --out DIR` on your machine (`variants` and `sequence` add "
    "patterns; --quick will do, except for held-out losses) and pass results=DIR"
)

Results = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None

_FILE = "recommendations.json"
_OF_ENVIRONMENT = ("device", "threads", "date", "torch", "dpflash")
# Arguments of patterns that are tokens; all others are numbers of blocks, rates or words.
_IN_TOKENS = ("block_size", "global_tokens", "levels", "segment_lengths", "window")


@dataclass(frozen=True)
class Run:
    """What a file holds that a recommendation may use."""

    file: str
    environment: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def is_quick(self) -> bool:
        """Whether its trials are few."""
        return bool(self.environment.get("quick"))

    @property
    def kind(self) -> str:
        """Of its device: "cpu" or "cuda"."""
        return "cpu" if str(self.environment["device"]).startswith("CPU ") else "cuda"

    @property
    def source(self) -> str:
        """On what and when it was measured."""
        e = self.environment
        return (
            f"{e['device']}, {e['threads']} thread(s), {e['date']}, torch {e['torch']}, dpflash "
            f"{e['dpflash']} ({e.get('commit')}){', quick run' * self.is_quick}"
        )

    def refusal(self, row: Mapping[str, Any], error: Exception) -> str:
        """Why a row cannot be used."""
        said = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        return f"{self.file}: row {row.get('name')!r}: {said}"


@dataclass(frozen=True)
class Point:
    """A measured row; its width is B H D, its interval the 95% one of the median."""

    tokens: int
    width: int
    milliseconds: float
    interval: tuple[float, float]
    peak_mib: float | None
    source: str
    is_quick: bool


@dataclass(frozen=True)
class Curve:
    """A pattern's measured rows in one dtype."""

    pattern: Pattern
    variant: str
    dtype: str
    points: list[Point] = field(default_factory=list)

    def ends(self, tokens: int, width: int) -> list[Point]:
        """The points that tell of T; none where nothing was measured near enough."""
        full = [point for point in self.points if not point.is_quick]
        for points in (full, self.points):
            ends = _ends(_nearest_in_width(points, width), tokens)
            if ends:
                return ends
        return []


@dataclass(frozen=True)
class Quality:
    """The held-out loss of a small language model with a pattern, over that with dense attention.

    The models differ in their pattern alone.

    Attributes:
        tokens: of its windows; lengths of the pattern are scaled to them.
        difference: loss minus that with dense attention, nats a byte; lower is better.
        difference_ci95: its 95% interval, by the choice of windows.
        relative_difference: over the loss with dense attention.
        seed_difference: the most by which the loss of a dense model changed with another seed;
            None where that was not measured.
    """

    tokens: int
    difference: float
    difference_ci95: tuple[float, float]
    relative_difference: float
    seed_difference: float | None

    @property
    def is_chance(self) -> bool:
        """Whether another seed changes as much."""
        return self.seed_difference is not None and abs(self.difference) <= self.seed_difference

    def __str__(self) -> str:
        low, high = self.difference_ci95
        if self.seed_difference is None:
            seed = "what another seed changes was not measured"
        elif self.is_chance:
            seed = f"within what another seed changes ({self.seed_difference:.4f} nats)"
        else:
            seed = f"more than another seed changes ({self.seed_difference:.4f} nats)"
        return (
            f"{self.relative_difference:+.2%} ({self.difference:+.4f} [{low:+.4f}, {high:+.4f}] "
            f"nats a byte, lower is better) over dense attention at T={self.tokens:,}, {seed}"
        )


# Of a pattern whose lengths are told over T.
Qualities = Sequence[tuple[Mapping[str, Any], Quality]]


def read_runs(results: Results, left_out: list[str]) -> list[Run]:
    """The results in folders or files, None for the shipped ones; those of no use are told."""
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
            runs.append(Run(file, environment, rows))
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


def read_curves(
    runs: Iterable[Run], direction: str, causal: bool, tokens: int, left_out: list[str]
) -> list[Curve]:
    """The patterns measured in this direction; of equal points the first run's count."""
    curves: dict[tuple[str, str], Curve] = {}
    for run in runs:
        for row in run.rows:
            if row.get("operator") != "dpflash":
                continue
            try:
                found = _measured(row, run, direction, causal, tokens)
            except (KeyError, TypeError, ValueError) as error:
                left_out.append(run.refusal(row, error))
                continue
            if found is not None:
                curve, point = found
                key = (curve.pattern.key, curve.dtype)
                curves.setdefault(key, curve).points.append(point)
    return list(curves.values())


def _measured(
    row: Mapping[str, Any], run: Run, direction: str, causal: bool, tokens: int
) -> tuple[Curve, Point] | None:
    """A row's point and the curve it may begin; None where something else was asked for."""
    config = row["config"]
    if config["direction"] != direction or config.get("causal", causal) != causal:
        return None
    key = row.get("pattern_key")
    pattern = None if key is None else from_key(key)
    # Documents are a matter of the data and not of taste.
    if isinstance(pattern, Documents) or (pattern is not None and pattern.causal != causal):
        return None
    if row.get("correct") is False:
        raise ValueError(row.get("failure") or "it is wrong")
    if pattern is None or row.get("median_ms") is None:
        if row.get("needs") and config["tokens"] == tokens:
            raise ValueError(f"not measured, needs {row['needs']}")
        return None
    ms, peak = row["median_ms"], row.get("peak_memory_mb")
    low, high = row.get("ci95_ms") or row.get("range_ms") or (ms, ms)
    _validate.positive(median_ms=ms)
    _validate.finite(median_ms=ms, low=low, high=high)
    if peak is not None:
        _validate.non_negative(peak_memory_mb=peak)
        _validate.finite(peak_memory_mb=peak)
    sizes = {key: config[key] for key in ("tokens", "batch", "heads", "head_dim")}
    _validate.positive_int(**sizes)
    _validate.one_of(dtype=(config["dtype"], DTYPES))
    width = sizes["batch"] * sizes["heads"] * sizes["head_dim"]
    return (
        Curve(pattern, str(config.get("variant") or _brief(pattern)), config["dtype"]),
        Point(sizes["tokens"], width, ms, (low, high), peak, run.source, run.is_quick),
    )


def measured_ways(runs: Iterable[Run]) -> list[tuple[str, bool, str]]:
    """What has figures: (class of the pattern, causal, direction), each once."""
    found = set()
    for run in runs:
        for row in run.rows:
            if row.get("operator") == "dpflash" and row.get("median_ms") is not None:
                try:
                    pattern = from_key(row["pattern_key"])
                    found.add((type(pattern).__name__, pattern.causal, row["config"]["direction"]))
                except (KeyError, TypeError, ValueError):
                    continue  # `read_curves` tells why
    return sorted(found)


def _brief(pattern: Pattern) -> str:
    """The pattern with those arguments that are no defaults, but for `causal`."""
    named = [
        f"{one.name}={value!r}"
        for one in fields(pattern)  # type: ignore[arg-type]
        if one.name != "causal" and (value := getattr(pattern, one.name)) != one.default
    ]
    return type(pattern).__name__ + f"({', '.join(named)})" * bool(named)


def _nearest_in_width(points: Iterable[Point], width: int) -> list[Point]:
    """For each T the point with the nearest width, within reach; sorted by T."""

    def distance(point: Point) -> float:
        return abs(math.log(point.width / width))

    nearest: dict[int, Point] = {}
    for point in sorted(points, key=lambda point: (distance(point), point.is_quick)):
        if distance(point) <= math.log(WIDTH_REACH):
            nearest.setdefault(point.tokens, point)
    return [nearest[tokens] for tokens in sorted(nearest)]


def _ends(points: Sequence[Point], tokens: int) -> list[Point]:
    """The point at T, or the two whose line goes through T; none where T is out of reach."""
    exact = [point for point in points if point.tokens == tokens]
    if exact or len(points) < 2:
        return exact
    distance = min(abs(math.log(point.tokens / tokens)) for point in points)
    if distance > math.log(TOKENS_REACH):
        return []
    above = next((i for i, p in enumerate(points) if p.tokens > tokens), len(points))
    begin = min(max(above - 1, 0), len(points) - 2)
    return list(points[begin : begin + 2])


def read_qualities(runs: Iterable[Run], left_out: list[str]) -> Qualities:
    """Of models that differ from one with dense attention in their pattern alone.

    Those of quick runs, and of private models, whose noise drowns the difference, do not count.
    """
    found: list[tuple[Mapping[str, Any], Quality]] = []
    for run in runs:
        own = [row for row in run.rows if row.get("section") == "quality" and not run.is_quick]
        for row in own:
            try:
                found += _qualities(row, own)
            except (KeyError, TypeError, ValueError) as error:
                left_out.append(run.refusal(row, error))
    return found


def _qualities(
    row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Quality]]:
    """Of a row with all that it takes; none of another."""
    if row.get("difference") is None or row["config"].get("epsilon") is not None:
        return
    pattern = from_key(row["pattern_key"])
    dense = next((one for one in rows if one["what"] == row["baseline"]), None)
    if isinstance(pattern, Dense) or dense is None or _setting(row) != _setting(dense):
        return
    if not isinstance(from_key(dense["pattern_key"]), Dense):
        return
    seeds = [
        abs(one["difference"])
        for one in rows
        if one.get("baseline") == row["baseline"]
        and one.get("difference") is not None
        and one.get("pattern_key") == dense["pattern_key"]
        and _setting(one, "seed") == _setting(dense, "seed")
    ]
    low, high = row["difference_ci95"]
    numbers = {key: row[key] for key in ("difference", "relative_difference")}
    _validate.finite(**numbers, low=low, high=high)
    tokens = row["config"]["tokens"]
    quality = Quality(
        tokens, difference_ci95=(low, high), seed_difference=max(seeds, default=None), **numbers
    )
    yield _over_tokens(pattern, tokens), quality


def _setting(row: Mapping[str, Any], *apart: str) -> dict[str, Any]:
    """Everything of a model's training but its pattern, and what else is to be left aside."""
    config: Mapping[str, Any] = row["config"]
    return {key: value for key, value in config.items() if key not in ("pattern", *apart)}


def quality_of(pattern: Pattern, tokens: int, qualities: Qualities) -> Quality | None:
    """Of a model with this pattern, whose lengths have the same share of its T; None if none."""
    form = _over_tokens(pattern, tokens)
    return next((quality for other, quality in qualities if other == form), None)


def _over_tokens(pattern: Pattern, tokens: int) -> dict[str, Any]:
    """The pattern's arguments, those in tokens over T."""

    def over(value: Any) -> Any:
        if isinstance(value, list):
            return [over(one) for one in value]
        return value if value == -1 else Fraction(value, tokens)  # -1: all

    named = json.loads(pattern.key)
    return {key: over(one) if key in _IN_TOKENS else one for key, one in named.items()}
