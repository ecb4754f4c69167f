"""Recommends the fastest measured attention pattern that fits into the memory."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from . import _validate
from .clipping.device_speed import cpu_model
from .patterns import Dense, Documents, Pattern
from .patterns import from_key as pattern_from_key
from .patterns.reach import reaches_all

DIRECTIONS = ("forward", "forward+backward")
DTYPES = ("float64", "float32", "bfloat16", "float16")
Results = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
_Row = Mapping[str, Any]

_MIB = 2**20
_WIDTH_REACH = 16  # largest factor between H * D and the measured H * D
_AS_FAST = 1.05  # times that differ by at most this factor count as equal
_TABLE = "recommendations.json"
_ENVIRONMENT = ("device", "threads", "date", "torch", "dpflash", "commit", "quick")
# The arguments of patterns that are numbers of tokens.
_IN_TOKENS = ("block_size", "global_tokens", "levels", "segment_lengths", "window")
_MEASURE = (
    "run `dpflash bench attention --out DIR` on your machine (`variants` and `sequence` add "
    "patterns) and pass results=DIR"
)


@dataclass(frozen=True)
class Quality:
    """Held-out loss of a small language model with a pattern, minus its loss with dense attention.

    The two models differ only in their pattern.
    """

    tokens: int  # tokens per window of the small model, to which the pattern's lengths were scaled
    difference: float  # nats per byte; lower is better
    difference_ci95: tuple[float, float]  # confidence interval over the choice of windows
    relative_difference: float  # difference / loss with dense attention

    def __str__(self) -> str:
        low, high = self.difference_ci95
        return (
            f"{self.relative_difference:+.2%} ({self.difference:+.4f} [{low:+.4f}, {high:+.4f}] "
            f"nats a byte, lower is better) over dense attention at T={self.tokens:,}"
        )


@dataclass(frozen=True)
class Candidate:
    """A pattern, and the expected time and memory of attention with it."""

    variant: str  # name of the pattern in the measurements
    pattern: Pattern  # for `dpflash.attention(pattern=...)` and the modules
    expected_ms: float  # time of one call, ms
    expected_peak_mib: float | None  # growth of memory during a call, in MiB; None if unknown
    fits: bool  # whether the growth of memory is within the limit
    pair_share: float  # number of (query, key) pairs / number in dense attention
    quality: Quality | None  # held-out loss of a small model; None if not measured

    @property
    def is_worse(self) -> bool:
        """Whether the measured loss is above the loss with dense attention."""
        return self.quality is not None and self.quality.difference > 0

    @property
    def _cells(self) -> tuple[str, ...]:
        mib = "unknown" if self.expected_peak_mib is None else _digits(self.expected_peak_mib)
        loss = "reference" if isinstance(self.pattern, Dense) else "not measured"
        if self.quality is not None:
            loss = f"{self.quality.relative_difference:+.2%}"
        fits = "yes" if self.fits else "NO"
        # Do not round a share below 1 to 100%.
        share = self.pair_share if self.pair_share >= 1 else min(self.pair_share, 0.999)
        return self.variant, _digits(self.expected_ms), mib, fits, f"{share:.1%}", loss


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class Recommendation:
    """The recommended pattern, and its alternatives; `str` shows them as a table."""

    chosen: Candidate  # the recommended pattern, see `recommend`
    alternatives: tuple[Candidate, ...]  # sorted by `fits` (True first), then by time
    measured_on: str  # device, threads, date and versions of the measurements
    reasons: tuple[str, ...]  # why the pattern was chosen, and which patterns were left out
    asked: str  # the arguments of `recommend`, as text

    @property
    def pattern(self) -> Pattern:
        """The chosen pattern."""
        return self.chosen.pattern

    @property
    def variant(self) -> str:
        """The name of the chosen pattern."""
        return self.chosen.variant

    def __str__(self) -> str:
        rows = [("variant", "ms", "peak MiB", "fits", "pairs", "loss")]
        rows += [one._cells for one in (self.chosen, *self.alternatives)]  # type: ignore[misc]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        return "\n".join(
            [
                f"{self.asked}: {self.variant}",
                f"pattern={self.pattern!r}",
                *(f"- {reason}" for reason in self.reasons),
                f"- measured on {self.measured_on}",
                "pairs: (query, key) pairs relative to dense attention; loss: held-out loss of a "
                "small model, relative to dense attention, lower is better",
                *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
            ]
        )


@dataclass(frozen=True)
class _Question:
    tokens: int
    memory: int | None
    causal: bool
    heads: int
    head_dim: int
    direction: str
    dtype: str

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


@dataclass(frozen=True)
class _Case:
    direction: str
    dtype: str
    tokens: int
    width: int  # batch * heads * head_dim
    ms: float
    peak_mib: float | None  # growth of memory during a call; None if not measured
    variant: str
    pattern: Pattern
    source: str  # device, date and versions


def recommend(
    tokens: int,
    *,
    memory: int | str | None = None,
    causal: bool = True,
    heads: int = 8,
    head_dim: int = 64,
    direction: str = "forward+backward",
    device: str | None = None,
    dtype: str | None = None,
    patterns: Collection[type[Pattern]] | type[Pattern] | None = None,
    results: Results = None,
) -> Recommendation:
    """Recommend the fastest measured attention pattern for samples of `tokens` tokens.

    Models with different patterns are different models: a sparse pattern is faster because its
    queries attend to fewer keys. The result shows the number of (query, key) pairs of each pattern
    and, if it was measured, the held-out loss of a small model. Among the patterns whose time is
    within 5% of the fastest, the pattern with the largest number of pairs is chosen. A pattern is
    never chosen if its last position cannot depend on all earlier positions. A pattern whose
    measured loss is above the loss with dense attention is chosen only if no other pattern fits.

    Times and memory were measured at the same T and dtype, and are scaled in proportion to heads *
    head_dim, by a factor of at most 16. Nothing else is estimated.

    Args:
        tokens: T, the number of tokens of a sample.
        memory: limit in bytes, or text such as "80GB" or "512MiB", for the growth of memory during
            one call of attention: the output, the gradients of q, k and v, and temporary tensors,
            but not q, k, v, the output's gradient, or the rest of a model. None for no limit.
        causal: whether queries attend to no later key.
        heads: H.
        head_dim: D.
        direction: "forward" or "forward+backward".
        device: "cpu" or "cuda" for this machine's device, or the name of a measured device, such
            as "CPU AMD EPYC"; None for a GPU if torch finds one, else "cpu".
        dtype: dtype of q, k and v; None for "float32" on a CPU and "bfloat16" on a GPU.
        patterns: the class or classes of `dpflash.patterns` to choose from; None for all.
        results: folders or JSON files of `dpflash bench` with the suites `attention`, `variants`
            and `sequence`; None for the figures that come with the library.

    Returns:
        The chosen pattern, its expected time and memory, their measurements, and alternatives.

    Raises:
        ValueError: the case was not measured, no pattern fits, or an argument is invalid.
    """
    _validate.positive_int(tokens=tokens, heads=heads, head_dim=head_dim)
    limit = None if memory is None else _validate.bytes_of(memory=memory)
    _validate.one_of(
        direction=(direction, DIRECTIONS),
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
            "[Dense, SlidingWindow], or None for all patterns"
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    runs = _of_device(_read(results), device)
    is_cpu = str(runs[0]["environment"]["device"]).startswith("CPU ")
    dtype = dtype or ("float32" if is_cpu else "bfloat16")
    asked = _Question(tokens, limit, causal, heads, head_dim, direction, dtype)
    cases = _nearest([case for run in runs for case in _cases(run)], asked, kinds)
    losses = [loss for run in runs for loss in _losses(run)]
    found = list(_candidates(cases, asked, losses))
    found.sort(key=lambda one: (not one.fits, one.expected_ms))
    joined = [one for one in found if reaches_all(one.pattern, tokens, heads)]
    chosen, reasons = _choose(joined, asked)
    if apart := [one.variant for one in found if one not in joined]:
        reasons.append(
            "left out, since their last position cannot depend on all earlier positions, however "
            f"many layers: {', '.join(apart)}"
        )
    sources = "; ".join(dict.fromkeys(case.source for case in cases))
    others = tuple(one for one in joined if one is not chosen)
    return Recommendation(chosen, others, sources, tuple(reasons), str(asked))


# Reading the measurements


@functools.cache
def _shipped() -> list[_Row]:
    return _from_table(resources.files(__package__).joinpath(_TABLE).read_text("utf-8"))


def _read(results: Results) -> list[_Row]:
    """Read the measurements that `dpflash bench` wrote; None for the library's own table."""
    if results is None:
        return _shipped()
    found: list[_Row] = []
    for path in map(Path, [results] if isinstance(results, str | os.PathLike) else results):
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                held = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"results={os.fspath(file)!r}: it cannot be read ({error}); pass folders or "
                    "files that `dpflash bench --out` wrote"
                ) from None
            if isinstance(held, dict) and {"environment", "rows"} <= held.keys():
                found.append(held)
    return found


def _of_device(runs: Iterable[_Row], device: str) -> list[_Row]:
    """Return the runs on a device: full runs before quick runs, and later before earlier runs."""
    name = f"CPU {cpu_model()}" if device == "cpu" else device
    if device == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    ordered = sorted(runs, key=lambda run: str(run["environment"].get("date")), reverse=True)
    ordered.sort(key=lambda run: bool(run["environment"].get("quick")))
    found = [run for run in ordered if run["environment"].get("device") == name]
    if not found:
        others = sorted({str(run["environment"].get("device")) for run in ordered})
        raise ValueError(
            f"device={device!r}: nothing was measured on {name}; {_MEASURE}, or for the figures "
            f"of another device pass its name: {', '.join(map(repr, others)) or 'there is none'}"
        )
    return found


def _cases(run: _Row) -> Iterator[_Case]:
    """Yield the correct measurements of dpflash's attention, without packed documents."""
    at = run["environment"]
    source = (
        f"{at['device']}, {at.get('threads')} thread(s), {at.get('date')}, torch "
        f"{at.get('torch')}, dpflash {at.get('dpflash')}{', quick run' * bool(at.get('quick'))}"
    )
    for row in run["rows"]:
        if row.get("operator") != "dpflash" or row.get("correct") is False:
            continue
        if not row.get("pattern_key") or not row.get("median_ms"):
            continue
        pattern, config = pattern_from_key(row["pattern_key"]), row["config"]
        if isinstance(pattern, Documents):
            continue
        yield _Case(
            config["direction"],
            config["dtype"],
            config["tokens"],
            config["batch"] * config["heads"] * config["head_dim"],
            row["median_ms"],
            row.get("peak_memory_mb"),
            str(config.get("variant") or _brief(pattern)),
            pattern,
            source,
        )


def _brief(pattern: Pattern) -> str:
    named = [
        f"{one.name}={value!r}"
        for one in fields(pattern)  # type: ignore[arg-type]
        if (value := getattr(pattern, one.name)) != one.default and one.name != "causal"
    ]
    return type(pattern).__name__ + f"({', '.join(named)})" * bool(named)


def _losses(run: _Row) -> Iterator[tuple[Pattern, Quality]]:
    # Leave out quick runs, which train too briefly, and private models: their baselines differ,
    # and their noise is larger than the differences between patterns.
    rows = [] if run["environment"].get("quick") else run["rows"]
    for row in rows:
        if (row.get("section"), row.get("baseline")) != ("quality", "dense"):
            continue
        pattern = pattern_from_key(row["pattern_key"])
        if not isinstance(pattern, Dense):
            interval = tuple(row["difference_ci95"])
            figures = row["difference"], interval, row["relative_difference"]
            yield pattern, Quality(row["config"]["tokens"], *figures)


# The table that comes with the library

_COLUMNS = (
    *("operator", "variant", "direction", "dtype", "tokens", "batch", "heads", "head_dim"),
    *("median_ms", "peak_memory_mb", "section", "baseline", "difference", "difference_ci95"),
    *("relative_difference", "pattern_key"),
)


def shipped_table(files: Iterable[Path]) -> str:
    """Return the text of recommendations.json: one line per measured time or loss in the files.

    Figures have five digits. Rows with a wrong result or without a measurement are left out.
    """
    runs = []
    for file in files:
        held = json.loads(file.read_text(encoding="utf-8"))
        environment = {k: held["environment"].get(k) for k in _ENVIRONMENT}
        rows = [
            json.dumps([_rounded({**row["config"], **row}.get(column)) for column in _COLUMNS])
            for row in held["rows"]
            if row.get("pattern_key") and row.get("correct") is not False
            if (row.get("operator") == "dpflash" and row.get("median_ms"))
            or (row.get("section"), row.get("baseline")) == ("quality", "dense")
        ]
        lines = ",\n".join(rows)
        runs.append(f'{{"environment": {json.dumps(environment)}, "rows": [\n{lines}\n]}}')
    return "[\n" + ",\n".join(runs) + "\n]\n"


def _from_table(text: str) -> list[_Row]:
    runs: list[_Row] = []
    for held in json.loads(text):
        rows = [dict(zip(_COLUMNS, row, strict=True)) for row in held["rows"]]
        runs.append({**held, "rows": [{**row, "config": row} for row in rows]})
    return runs


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


# Answering


def _nearest(cases: Sequence[_Case], asked: _Question, kinds: tuple[type, ...]) -> list[_Case]:
    """Return each pattern's first measurement with the asked T and the nearest width."""
    of_kind = [
        case
        for case in cases
        if (case.direction, case.dtype) == (asked.direction, asked.dtype)
        if case.pattern.causal == asked.causal and isinstance(case.pattern, kinds)
    ]
    nearest: dict[str, _Case] = {}
    for case in sorted(of_kind, key=lambda case: abs(math.log(case.width / asked.width))):
        ratio = case.width / asked.width
        if case.tokens == asked.tokens and 1 / _WIDTH_REACH <= ratio <= _WIDTH_REACH:
            nearest.setdefault(case.pattern.key, case)
    if not nearest:
        there = {(case.tokens, case.width) for case in of_kind}
        raise ValueError(
            f"{asked}: not measured for {', '.join(kind.__name__ for kind in kinds)}. Measured "
            f"are tokens={sorted({t for t, _ in there})} with heads * head_dim="
            f"{sorted({width for _, width in there})} (which may differ by a factor of up to "
            f"{_WIDTH_REACH}). Pass such a value, or {_MEASURE}"
        )
    return list(nearest.values())


def _candidates(
    cases: Sequence[_Case], asked: _Question, losses: Sequence[tuple[Pattern, Quality]]
) -> Iterator[Candidate]:
    """Yield the patterns with their times and memory, scaled in proportion to the width."""
    tokens, heads = asked.tokens, asked.heads
    for case in cases:
        pattern, wider = case.pattern, asked.width / case.width
        try:
            pairs = pattern.edges(tokens, heads) / Dense(causal=asked.causal).edges(tokens, heads)
        except ValueError:  # the pattern lists blocks for another number of heads
            continue
        peak = None if case.peak_mib is None else case.peak_mib * wider
        fits = asked.memory is None or (peak is not None and peak * _MIB <= asked.memory)
        form = _over_tokens(pattern, tokens)
        loss = next((q for other, q in losses if _over_tokens(other, q.tokens) == form), None)
        yield Candidate(case.variant, pattern, case.ms * wider, peak, fits, pairs, loss)


def _over_tokens(pattern: Pattern, tokens: int) -> Mapping[str, Any]:
    """Return the pattern's arguments, with numbers of tokens divided by T."""

    def over(value: Any) -> Any:
        if isinstance(value, list):
            return [over(one) for one in value]
        return value if value == -1 else Fraction(value, tokens)  # -1: all tokens

    named = json.loads(pattern.key)
    return {key: over(one) if key in _IN_TOKENS else one for key, one in named.items()}


def _choose(found: Sequence[Candidate], asked: _Question) -> tuple[Candidate, list[str]]:
    """Return the chosen candidate and the reasons; `found` is sorted by `fits` and time."""
    fitting = [one for one in found if one.fits]
    if not fitting:
        needs = ", ".join(f"{one.variant} {one._cells[2]} MiB" for one in found) or "none is left"
        raise ValueError(
            f"{asked}: no measured pattern whose last position depends on all earlier ones fits "
            f"memory={asked.memory} ({needs}). Pass a larger memory, fewer heads, or other "
            "patterns"
        )
    no_worse = [one for one in fitting if not one.is_worse] or fitting
    as_fast = [one for one in no_worse if one.expected_ms <= _AS_FAST * no_worse[0].expected_ms]
    # Limit the share to 1, which it may exceed since some patterns count a pair twice.
    chosen = max(
        as_fast,
        key=lambda one: (min(1.0, one.pair_share), isinstance(one.pattern, Dense)),
    )
    _, ms, mib, _, pairs, _ = chosen._cells
    reasons = [f"{ms} ms and {mib} MiB expected: the fastest of {len(no_worse)} that fit"]
    if chosen is not no_worse[0]:
        reasons[0] += f", within 5% ({no_worse[0].variant} sees less)"
    if not isinstance(chosen.pattern, Dense):
        loss = "was not measured" if chosen.quality is None else f"was {chosen.quality}"
        reasons.append(
            f"another model than dense attention: a query sees {pairs} of its pairs on average; "
            f"the held-out loss of a small model {loss}; measure the loss of your model"
        )
    if worse := [one.variant for one in fitting if one not in no_worse]:
        reasons.append(
            "not chosen, since their measured loss is above that of dense attention: "
            f"{', '.join(worse)}"
        )
    if large := [one.variant for one in found if not one.fits]:
        reasons.append(f"do not fit, or their memory is unknown: {', '.join(large)}")
    return chosen, reasons
