"""Recommends an attention pattern by measurements: the fastest that fits the memory.

`measured` reads the figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import _validate
from .clipping.device_speed import cpu_model
from .measured import DIRECTIONS, DTYPES, Case, Quality, Results, Run, read_runs
from .patterns import Adaptive, BlockSparse, Dense, Hierarchical, Pattern, SlidingWindow

__all__ = ["Candidate", "Quality", "Recommendation", "reaches_all", "recommend"]

_Curve = list[Case]  # of one pattern and dtype

_MIB = 2**20
# Figures reach this far from a measured T, and from a measured B H D.
_TOKENS_REACH, _WIDTH_REACH = 4, 16
_LEAST_MIB = 1.0  # less growth of memory is noise
_AS_FAST = 1.05  # times the fastest one's time is within noise
_NAMED = 3  # of a list of names, the others are counted
_MEASURE = (
    "run `dpflash bench attention --out DIR` on your machine (`variants` and `sequence` add "
    "patterns; --quick will do, except for held-out losses) and pass results=DIR"
)
_WAY_OUT = f"{_MEASURE}, or take another value"
# Arguments in tokens; the others are numbers of blocks, rates or words.
_IN_TOKENS = ("block_size", "global_tokens", "levels", "segment_lengths", "window")


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
    def _ms(self) -> str:
        return f"{self.expected_ms:,.0f}" if self.expected_ms >= 100 else f"{self.expected_ms:.3g}"

    @property
    def _mib(self) -> str:
        mib = self.expected_peak_mib
        return "unknown" if mib is None else f"{mib:,.0f}" if mib >= 100 else f"{mib:.3g}"

    @property
    def _pairs(self) -> str:
        # Almost all pairs must not read as 100%.
        share = self.pair_share
        return f"{share if share >= 1 else min(share, 0.999):.1%}"

    @property
    def _loss(self) -> str:
        if isinstance(self.pattern, Dense):
            return "reference"
        if self.quality is None:
            return "not measured"
        chance = " (as a seed)" * self.quality.is_chance
        return f"{self.quality.relative_difference:+.2%}{chance}"


@dataclass(frozen=True)
class Recommendation:
    """The recommended pattern."""

    chosen: Candidate  # of those as fast as the fastest that fits, the one that sees most
    alternatives: tuple[Candidate, ...]  # those that fit first, each by time
    measured_on: str  # device, threads, date and version
    reasons: tuple[str, ...]  # why, what was left out, and warnings
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
        fastest = all(chosen.expected_ms <= one.expected_ms for one in found if one.fits)
        gist = "fastest that fits" if fastest else "as fast as the fastest that fits"
        if chosen.quality is not None:
            gist += f"; held-out loss {chosen._loss}"
        elif not isinstance(chosen.pattern, Dense):
            gist += "; its quality is not known"
        rows: list[tuple[str, ...]] = [("variant", "ms", "peak MiB", "fits", "pairs", "loss")]
        for one in found:
            fits = "yes" if one.fits else "NO"
            rows.append((one.variant, one._ms, one._mib, fits, one._pairs, one._loss))
        bases = [one.basis for one in found]
        most = max(bases, key=bases.count)
        source = f"figures: {most}"
        if len(set(bases)) > 1:
            own = ["from", *("" if basis == most else basis for basis in bases)]
            rows = [(*row, cell) for row, cell in zip(rows, own, strict=True)]
            source += ", where `from` says nothing else"
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(
            [
                f"{self.asked}: {self.variant} ({gist})",
                f"pattern={self.pattern!r}",
                *(f"- {reason}" for reason in self.reasons),
                f"- measured on {self.measured_on}",
                "pairs: of those of dense attention; loss: held-out, of a small model with the "
                "pattern, over that with dense attention, lower is better",
                source,
                *lines,
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
    """The fastest attention pattern for one sample of this many tokens, by measurements.

    Patterns are different models: a sparse one is faster because it sees less. The answer shows
    how many pairs each sees and, where it was measured, the held-out loss of a small model. Of
    patterns as fast as the fastest within noise (95% intervals that overlap, or 5%) the one that
    sees most is chosen, and never one whose last position cannot depend on all earlier ones.

    Between measured T, time follows a straight line over the pattern's pairs and memory one
    over T, in logarithms; beyond, the line of the nearest two, up to 4 times T. Both count as
    proportional to heads * head_dim. Figures of one dtype only are ranked, and those of a quick
    run only where no full one has the pattern near this T.

    Args:
        tokens: T.
        memory: bytes by which memory may grow during one call of attention, forward or with its
            backward as `direction` says: the output, gradients of q, k and v, and temporaries.
            q, k, v and the output's gradient exist before and do not count, nor does the rest of
            a model. None for no limit.
        causal: no query sees a later key.
        heads: H.
        head_dim: D.
        direction: "forward" or "forward+backward".
        device: "cpu" or "cuda"; None for a GPU where torch finds one.
        dtype: of q, k and v, such as "float32"; None for float32 on a CPU, where it was measured,
            else for that in which most patterns were.
        patterns: classes of `dpflash.patterns` to choose from, or one; None for all.
        results: folders or JSON files of `dpflash bench`, of which `attention`, `variants` and
            `sequence` are read; None for the figures that come with the library.

    Returns:
        The choice with its expected time and memory, their sources, and the alternatives.

    Raises:
        ValueError: nothing was measured near enough, nothing fits, or an argument of the wrong
            type or range.
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
    kinds = _kinds(patterns)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    asked = _Question(tokens, memory, causal, heads, head_dim, direction, dtype)
    runs, left_out = read_runs(results)
    if not runs:
        raise ValueError(f"results: there are no measurements; {_MEASURE}{_left_out(left_out)}")
    runs, warnings = _of_device(runs, device)
    left_out += [
        one.reason
        for run in runs
        for one in run.unused
        if one.direction in (None, direction)
        and one.causal in (None, causal)
        and one.tokens in (None, tokens)
    ]
    curves = _curves(runs, asked, kinds)
    near = _near(curves, asked, left_out)
    if not near:
        raise ValueError(_too_far(asked, curves, kinds, runs) + _left_out(left_out))
    dtype, *other_dtypes = _dtypes([ends[0].dtype for ends in near], runs[0].kind, asked)
    asked = replace(asked, dtype=dtype)
    joined, apart = list[_Curve](), list[str]()
    for ends in near:
        if ends[0].dtype == dtype and reaches_all(ends[0].pattern, tokens, heads):
            joined.append(ends)
        elif ends[0].dtype == dtype:
            apart.append(ends[0].variant)
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
            f"fits; {least.variant} takes least, {least._mib} MiB. Pass more bytes, fewer tokens "
            "or heads, or other patterns"
        )
    chosen = max((one for one in found if _is_as_fast(one, found[0])), key=_sees)
    why = [*warnings, *_reasons(chosen, found)]
    if other_dtypes:
        why.append(
            f"{dtype} only; measured near this T too, and not ranked with it: "
            f"{', '.join(other_dtypes)} (pass dtype=)"
        )
    if apart:
        why.append(
            f"{len(apart)} left out, since their last position never depends on all earlier ones, "
            f"however many layers: {_listed(apart)}"
        )
    near_patterns = [ends[0].pattern for ends in near]
    far = [
        f"{curve[0].variant} ({_lengths(curve)})"
        for curve in curves
        if curve[0].dtype == dtype and curve[0].pattern not in near_patterns
    ]
    if far:
        why.append(
            f"{len(far)} left out, since they were not measured near this T: {_listed(far)}"
        )
    if left_out:
        why.append(_left_out(left_out).removeprefix(". "))
    return Recommendation(
        chosen,
        tuple(one for one in found if one is not chosen),
        "; ".join(dict.fromkeys(case.source for ends in joined for case in ends)),
        tuple(why),
        str(asked),
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


def _of_device(runs: list[Run], device: str) -> tuple[list[Run], list[str]]:
    """The runs of this device, else of one like it, else of any, latest first; and warnings."""
    runs = sorted(runs, key=lambda run: str(run.environment["date"]), reverse=True)
    own: str | None = f"CPU {cpu_model()}"
    if device == "cuda":
        own = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    same = [run for run in runs if run.environment["device"] == own]
    like = same or [run for run in runs if run.kind == device]
    # Of one device only: figures of two cannot be ranked.
    named = (like or runs)[0].environment["device"]
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


def _curves(runs: Sequence[Run], asked: _Question, kinds: tuple[type, ...]) -> list[_Curve]:
    """The measured patterns; of equal points the first run's count."""
    curves: dict[tuple[str, str], _Curve] = {}
    for run in runs:
        for case in run.cases:
            pattern = case.pattern
            is_asked = (case.direction, pattern.causal) == (asked.direction, asked.causal)
            if is_asked and isinstance(pattern, kinds):
                curve = curves.setdefault((pattern.key, case.dtype), [])
                curve.append(replace(case, variant=(curve or [case])[0].variant))
    return list(curves.values())


def _near(curves: Sequence[_Curve], asked: _Question, left_out: list[str]) -> list[_Curve]:
    """For each pattern measured near T, the one or two cases that its figures come from."""
    near = []
    for curve in curves:
        full = [case for case in curve if not case.is_quick]
        ends = _ends(full, asked) or _ends(curve, asked)
        if not ends:
            continue
        try:
            ends[0].pattern.edges(asked.tokens, asked.heads)
        except ValueError as error:  # its blocks are listed for other heads or another T
            left_out.append(f"{ends[0].variant}: {error}")
        else:
            near.append(ends)
    return near


def _ends(cases: Sequence[Case], asked: _Question) -> list[Case]:
    """The case at T, or the two whose line goes through T; none where T is out of reach."""

    def distance(case: Case) -> float:
        return abs(math.log(case.width / asked.width))

    # For each T the nearest width.
    nearest: dict[int, Case] = {}
    for case in sorted(cases, key=lambda case: (distance(case), case.is_quick)):
        if distance(case) <= math.log(_WIDTH_REACH):
            nearest.setdefault(case.tokens, case)
    points = [nearest[tokens] for tokens in sorted(nearest)]
    if asked.tokens in nearest:
        return [nearest[asked.tokens]]
    reach = min((abs(math.log(one.tokens / asked.tokens)) for one in points), default=math.inf)
    if len(points) < 2 or reach > math.log(_TOKENS_REACH):
        return []
    above = next((i for i, p in enumerate(points) if p.tokens > asked.tokens), len(points))
    begin = min(max(above - 1, 0), len(points) - 2)
    return points[begin : begin + 2]


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


def _candidate(
    ends: Sequence[Case], asked: _Question, losses: Sequence[tuple[Pattern, Quality]]
) -> Candidate:
    pattern, tokens = ends[0].pattern, asked.tokens

    def expected(sizes: Sequence[int], size: int, values: Sequence[float]) -> float:
        """The value at a size, on the line through one or two points in logarithms."""
        scaled = [
            asked.width / case.width * value for case, value in zip(ends, values, strict=True)
        ]
        if len(scaled) == 1:
            return scaled[0]
        (x0, x1), (y0, y1) = (map(math.log, pair) for pair in (sizes, scaled))
        return math.exp(y0 + (y1 - y0) * (math.log(size) - x0) / (x1 - x0))

    lengths = [case.tokens for case in ends]
    # Over its pairs the time of a pattern is a line at every length. Over T it is not: one that
    # sees all of a short sequence is quadratic there.
    *measured, pairs = (pattern.edges(length, asked.heads) for length in (*lengths, tokens))
    peaks = [max(case.peak_mib, _LEAST_MIB) for case in ends if case.peak_mib is not None]
    peak = expected(lengths, tokens, peaks) if len(peaks) == len(ends) else None
    interval = [
        expected(measured, pairs, side)
        for side in zip(*((c.low, c.high) for c in ends), strict=True)
    ]
    form = _over_tokens(pattern, tokens)
    return Candidate(
        ends[0].variant,
        pattern,
        expected(measured, pairs, [case.ms for case in ends]),
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


def _basis(ends: Sequence[Case], asked: _Question) -> str:
    where = " and ".join(f"T={case.tokens:,}" for case in ends)
    if len(ends) == 1:
        how = "measured"
    elif ends[0].tokens < asked.tokens < ends[1].tokens:
        how = f"between {where}"
    else:
        how = f"EXTRAPOLATED from {where}"
    if any(case.width != asked.width for case in ends):
        widths = ", ".join(dict.fromkeys(str(case.width) for case in ends))
        how += f", scaled from B x H x D = {widths}"
    return how + ", quick run" * any(case.is_quick for case in ends)


def _is_as_fast(one: Candidate, fastest: Candidate) -> bool:
    is_near = one.expected_ms <= _AS_FAST * fastest.expected_ms
    return one.fits and (is_near or one.expected_ms_ci95[0] <= fastest.expected_ms_ci95[1])


def _sees(one: Candidate) -> tuple[float, bool, float]:
    """The order of equally fast ones; a pattern that counts pairs twice sees no more than all."""
    return min(1.0, one.pair_share), isinstance(one.pattern, Dense), -one.expected_ms


def _reasons(chosen: Candidate, found: Sequence[Candidate]) -> Iterator[str]:
    large = [one.variant for one in found if not one.fits]
    count = f"the fastest of {len(found) - len(large)} that fit"
    fastest = found[0]
    if fastest.expected_ms < chosen.expected_ms:
        count = (
            f"as fast within noise as {count} ({fastest.variant}, {fastest._ms} ms), and sees as "
            "much or more"
        )
    yield f"{chosen._ms} ms and {chosen._mib} MiB expected ({chosen.basis}): {count}"
    if not isinstance(chosen.pattern, Dense):
        yield _other_model(chosen, found)
    if large:
        yield f"{len(large)} more do not fit, or their memory is unknown: {_listed(large)}"


def _other_model(chosen: Candidate, found: Sequence[Candidate]) -> str:
    """How a pattern differs from dense attention."""
    sees = "it sees every pair, but some weigh more than others"
    if chosen.pair_share < 1:
        sees = f"a query sees {chosen._pairs} of its pairs on average"
    elif isinstance(chosen.pattern, BlockSparse | Hierarchical | SlidingWindow):
        return "it sees all that dense attention sees at this T, and no longer at a greater one"
    text = f"not equivalent to dense attention: {sees}, which makes another model"
    dense = next((one for one in found if isinstance(one.pattern, Dense)), None)
    if dense is not None:
        text += f"; dense attention is expected to take {dense._ms} ms"
    if chosen.quality is None:
        return (
            f"{text}; held-out loss not measured for this pattern (a full run of `dpflash bench "
            "variants` has some), so compare that of your model"
        )
    return (
        f"{text}; the held-out loss of a small model was {chosen.quality}: measure yours, which "
        "may use far tokens more"
    )


def _too_far(
    asked: _Question, curves: Sequence[_Curve], kinds: tuple[type, ...], runs: Sequence[Run]
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
    names = [kind.__name__ for kind in kinds]
    cases = [case for run in runs for case in run.cases]
    own = [case for case in cases if isinstance(case.pattern, kinds)] or cases
    found: dict[str, dict[str, None]] = {}
    for case in sorted(own, key=lambda case: (type(case.pattern).__name__, case.direction)):
        way = f"causal={case.pattern.causal}, direction={case.direction!r}"
        found.setdefault(way, {})[type(case.pattern).__name__] = None
    others = "; ".join(f"{way} ({', '.join(of)})" for way, of in found.items()) or "nothing"
    return (
        f"patterns={', '.join(names)}: none was measured with causal={asked.causal}, "
        f"direction={asked.direction!r}; measured: {others}. To measure it, {_MEASURE}"
    )


def _lengths(curve: _Curve) -> str:
    sizes = [case.tokens for case in curve]
    least, most = min(sizes), max(sizes)
    return f"at T={most:,} only" if least == most else f"from T={least:,} up to {most:,}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _left_out(reasons: Sequence[str]) -> str:
    """What could not be used, as a further sentence; empty where there is nothing."""
    if not reasons:
        return ""
    more = f"; and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    return f". Left out: {'; '.join(reasons[:_NAMED])}{more}"


def reaches_all(pattern: Pattern, tokens: int, heads: int = 1) -> bool:
    """Whether the last position depends on the whole sequence, given enough layers.

    Each step goes to what a position sees, over all heads of one layer. Blocks that see only
    themselves do not reach all, nor do segments that no branch joins.

    Args:
        pattern: of the attention.
        tokens: T, at least 1.
        heads: H.
    """
    if isinstance(pattern, Adaptive):
        return True  # any block may be chosen
    if isinstance(pattern, SlidingWindow) and pattern.window > 0:
        return True  # from neighbour to neighbour; below that would take T / window rounds
    side = pattern.graph(tokens, heads).rows
    groups, runs = side.groups.long().numpy(), side.runs.long().numpy()
    reached = np.zeros(tokens, dtype=bool)
    reached[-1] = True
    # Most pairs lead back, so that one round from the end is enough for most patterns.
    order = np.argsort(-(groups[:, 0] + groups[:, 1] * (groups[:, 2] - 1)))
    followed = np.zeros(len(groups), dtype=np.int64)
    before = 0
    while before < reached.sum() < tokens:
        before = reached.sum()
        for group in order:
            start, stride, length, first, end = groups[group]
            rows = start + stride * np.flatnonzero(reached[start:][: stride * length : stride])
            if len(rows) > followed[group]:
                followed[group] = len(rows)
                for run in runs[first:end]:
                    reached[_columns(rows, run)] = True
    return bool(reached.all())


def _columns(rows: NDArray[np.int64], run: NDArray[np.int64]) -> NDArray[np.int64]:
    """The columns of a run that one of these rows sees, see `tile_graph.Side`."""
    column, step, count, lo, hi = run
    first = np.maximum(-((column + hi - rows) // step), 0)
    last = np.minimum((rows - lo - column) // step, count - 1)
    kept = first <= last
    begins, ends = (
        np.bincount(at[kept], minlength=count + 1)[: count + 1] for at in (first, last + 1)
    )
    return column + step * np.flatnonzero((begins - ends).cumsum() > 0)
