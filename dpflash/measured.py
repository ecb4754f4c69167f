"""Figures of `dpflash bench` that `recommend` uses: time, memory and held-out losses of patterns.

The library comes with the table recommendations.json, which `shipped_table` makes.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from . import _validate
from .patterns import Dense, Documents, Pattern, from_key

DIRECTIONS = ("forward", "forward+backward")
DTYPES = ("float64", "float32", "bfloat16", "float16")

Results = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_Row = Mapping[str, Any]

_FILE = "recommendations.json"
_ENVIRONMENT = ("device", "threads", "date", "torch", "dpflash")


@dataclass(frozen=True)
class Case:
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
    source: str  # on what and when it was measured
    is_quick: bool


@dataclass(frozen=True)
class Quality:
    """The held-out loss of a small language model with a pattern, over that with dense attention.

    The models differ in their pattern alone.
    """

    tokens: int  # of its windows; lengths of the pattern are scaled to them
    difference: float  # loss minus that with dense attention, nats a byte; lower is better
    difference_ci95: tuple[float, float]  # over the choice of windows
    relative_difference: float  # over the loss with dense attention
    seed_difference: float | None  # the most by which another seed changed a dense model's loss

    @property
    def is_chance(self) -> bool:
        """Whether another seed changes as much."""
        return self.seed_difference is not None and abs(self.difference) <= self.seed_difference

    def __str__(self) -> str:
        low, high = self.difference_ci95
        if self.seed_difference is None:
            seed = "the effect of another seed was not measured"
        else:
            size = "no more" if self.is_chance else "more"
            seed = f"{size} than another seed changes it ({self.seed_difference:.4f} nats)"
        return (
            f"{self.relative_difference:+.2%} ({self.difference:+.4f} [{low:+.4f}, {high:+.4f}] "
            f"nats a byte, lower is better) over dense attention at T={self.tokens:,}, {seed}"
        )


@dataclass(frozen=True)
class Unused:
    """Why a row cannot be used, and the questions that it would have answered (None: all)."""

    reason: str
    direction: str | None = None
    causal: bool | None = None
    tokens: int | None = None


@dataclass(frozen=True)
class Run:
    """The figures of one file."""

    environment: _Row
    cases: Sequence[Case]
    losses: Sequence[tuple[Pattern, Quality]]
    unused: Sequence[Unused] = ()

    @property
    def kind(self) -> str:
        """Of its device: "cpu" or "cuda"."""
        return "cpu" if str(self.environment["device"]).startswith("CPU ") else "cuda"


def read_runs(results: Results) -> tuple[list[Run], list[str]]:
    """The runs in folders or files, None for those of the library; and what cannot be read.

    Raises:
        ValueError: a file that was passed itself cannot be read.
    """
    if results is None:
        return list(_shipped()), []
    given = [results] if isinstance(results, str | os.PathLike) else results
    runs, left_out = list[Run](), list[str]()
    for path in map(Path, given):
        # A folder may hold files of other kinds too.
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                held = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                if not path.is_dir():
                    raise ValueError(
                        f"results={os.fspath(file)!r}: it cannot be read ({error}); pass folders "
                        "or files that `dpflash bench --out` wrote"
                    ) from None
                left_out.append(f"{file.name}: it cannot be read ({error})")
                continue
            rows = held.get("rows") if isinstance(held, dict) and "environment" in held else None
            used = [
                row
                for row in (rows if isinstance(rows, list) else ())
                if isinstance(row, Mapping)
                and (row.get("operator") == "dpflash" or row.get("section") == "quality")
            ]
            environment = held["environment"] or {} if used else {}
            missing = [key for key in _ENVIRONMENT if key not in environment]
            if used and missing:
                left_out.append(f"{file.name}: its environment has no {missing[0]!r}")
            elif used:
                runs.append(_run(file.name, environment, used))
    return runs, left_out


def _source(environment: _Row) -> str:
    e = environment
    return (
        f"{e['device']}, {e['threads']} thread(s), {e['date']}, torch {e['torch']}, dpflash "
        f"{e['dpflash']} ({e.get('commit')}){', quick run' * bool(e.get('quick'))}"
    )


def _run(file: str, environment: _Row, rows: Sequence[_Row]) -> Run:
    cases, losses, unused = list[Case](), list[tuple[Pattern, Quality]](), list[Unused]()
    trained = [row for row in rows if row.get("section") == "quality"]
    for row in rows:
        config = row["config"] if isinstance(row.get("config"), Mapping) else {}
        about = (config.get("direction"), config.get("causal"))
        name = f"{file}: row {row.get('name')!r}"
        try:
            if row.get("operator") == "dpflash":
                if row.get("median_ms") is None and row.get("needs"):
                    text = f"{name}: not measured, needs {row['needs']}"
                    unused.append(Unused(text, *about, config["tokens"]))
                else:
                    cases += _cases(row, environment)
            # Quick runs train too briefly.
            elif not environment.get("quick"):
                losses += _losses(row, trained)
        except (KeyError, TypeError, ValueError) as error:
            text = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            unused.append(Unused(f"{name}: {text}", *about))
    return Run(environment, cases, losses, unused)


def _cases(row: _Row, environment: _Row) -> Iterator[Case]:
    """The case of a row; none of one that was not timed, or whose pattern depends on the data."""
    config = row["config"]
    direction, key = config["direction"], row.get("pattern_key")
    pattern = None if key is None else from_key(key)
    if isinstance(pattern, Documents):
        return
    if row.get("correct") is False:
        raise ValueError(row.get("failure") or "it is wrong")
    if pattern is None or row.get("median_ms") is None:
        return
    ms, peak = row["median_ms"], row.get("peak_memory_mb")
    low, high = row.get("ci95_ms") or row.get("range_ms") or (ms, ms)
    _validate.positive(median_ms=ms)
    _validate.finite(median_ms=ms, low=low, high=high)
    if peak is not None:
        _validate.non_negative(peak_memory_mb=peak)
        _validate.finite(peak_memory_mb=peak)
    sizes = {name: config[name] for name in ("tokens", "batch", "heads", "head_dim")}
    _validate.positive_int(**sizes)
    _validate.one_of(dtype=(config["dtype"], DTYPES))
    width = sizes["batch"] * sizes["heads"] * sizes["head_dim"]
    variant = str(config.get("variant") or _brief(pattern))
    figures = (sizes["tokens"], width, ms, low, high, peak)
    source, is_quick = _source(environment), bool(environment.get("quick"))
    yield Case(direction, config["dtype"], *figures, variant, pattern, source, is_quick)


def _arguments(pattern: Pattern) -> dict[str, Any]:
    """The arguments that are not defaults."""
    return {
        one.name: value
        for one in fields(pattern)  # type: ignore[arg-type]
        if (value := getattr(pattern, one.name)) != one.default
    }


def _brief(pattern: Pattern) -> str:
    """The pattern with its arguments, but for defaults and `causal`."""
    named = [
        f"{name}={value!r}" for name, value in _arguments(pattern).items() if name != "causal"
    ]
    return type(pattern).__name__ + f"({', '.join(named)})" * bool(named)


def _losses(row: _Row, rows: Sequence[_Row]) -> Iterator[tuple[Pattern, Quality]]:
    """A model's loss over that of the dense one with the same seed and training."""
    # Noise drowns the differences of private models, which have other baselines.
    if row.get("baseline") != "dense" or isinstance(from_key(row["pattern_key"]), Dense):
        return
    low, high = row["difference_ci95"]
    difference, relative = row["difference"], row["relative_difference"]
    _validate.finite(difference=difference, relative_difference=relative, low=low, high=high)
    dense = [one for one in rows if isinstance(from_key(one["pattern_key"]), Dense)]
    seeds = [abs(one["difference"]) for one in dense if one.get("baseline") == "dense"]
    quality = Quality(
        row["config"]["tokens"], difference, (low, high), relative, max(seeds, default=None)
    )
    yield from_key(row["pattern_key"]), quality


@functools.cache
def _shipped() -> tuple[Run, ...]:
    text = resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return tuple(_from_table(held) for held in json.loads(text))


def _from_table(held: _Row) -> Run:
    environment = held["environment"]
    about = (_source(environment), bool(environment["quick"]))
    cases = [Case(*[*row, from_key(json.dumps(named)), *about]) for *row, named in held["cases"]]
    losses = [
        (from_key(json.dumps(named)), Quality(tokens, difference, (low, high), *rest))
        for tokens, difference, low, high, *rest, named in held["losses"]
    ]
    return Run(environment, cases, losses)


def shipped_table(files: Iterable[Path]) -> str:
    """The text of recommendations.json: one line for each case and each loss in these files.

    A line has the fields of `Case` or `Quality` with five digits, then the pattern's arguments.
    Rows that are wrong or were not measured are not in it.
    """
    runs, _ = read_runs(list(files))
    parts = []
    for run in runs:
        environment = {key: run.environment.get(key) for key in (*_ENVIRONMENT, "commit", "quick")}
        cases = [(case.pattern, astuple(replace(case, pattern=Dense()))[:9]) for case in run.cases]
        losses = [
            (pattern, (q.tokens, q.difference, *q.difference_ci95, *astuple(q)[3:]))
            for pattern, q in run.losses
        ]
        parts.append(
            f'{{"environment": {json.dumps(environment)},\n"cases": [\n{_lines(cases)}\n],\n'
            f'"losses": [\n{_lines(losses)}\n]}}'
        )
    return "[\n" + ",\n".join(parts) + "\n]\n"


def _lines(rows: Iterable[tuple[Pattern, Sequence[Any]]]) -> str:
    return ",\n".join(
        json.dumps(
            [
                *(float(f"{one:.5g}") if isinstance(one, float) else one for one in row),
                {"pattern": type(pattern).__name__, **_arguments(pattern)},
            ]
        )
        for pattern, row in rows
    )
