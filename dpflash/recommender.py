"""Which attention pattern for so many tokens: the fastest one measured that fits the memory.

Of those as fast within noise it is the one that sees most.

What was measured comes from `measured`; the figures that come with the library are those of the
repository's own runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch

from . import _validate
from .clipping.device_speed import cpu_model
from .connectivity import reaches_all
from .measured import (
    DIRECTIONS,
    DTYPES,
    MEASURE,
    MIB,
    TOKENS_REACH,
    WIDTH_REACH,
    Curve,
    Point,
    Qualities,
    Quality,
    Results,
    Run,
    measured_ways,
    quality_of,
    read_curves,
    read_qualities,
    read_runs,
)
from .patterns import Dense, Pattern
from .recommendation import (
    Candidate,
    Near,
    Question,
    Recommendation,
    listed,
    reasons,
    told,
    too_little,
    unranked,
)

__all__ = ["Candidate", "Quality", "Recommendation", "recommend"]

# Growth of memory below this is noise of the system.
_LEAST_MIB = 1.0
_WAY_OUT = f"{MEASURE}, or take another value"
# Of the fastest one's time; nearer than this no order is told by single runs.
_AS_FAST = 1.05


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
    """The fastest attention pattern for one sample of so many tokens, by measurements.

    Patterns are different models: a sparse one is faster because it sees less. What each sees and,
    where it was measured, the held-out loss of a small model that has it stand beside the times;
    ``patterns=[Dense]`` asks for dense attention only. Of those as fast as the fastest within
    noise (95% intervals that overlap, or 5%) the one that sees most is taken. A pattern whose last
    position cannot learn of all earlier ones, over any number of layers, is never taken.

    Between measured T, time follows a straight line over the pattern's pairs and memory one
    over T, in logarithms; beyond, the line of the nearest two, up to 4 times T. Both count as
    proportional to heads * head_dim. Figures of one dtype only are ranked, and those of a quick
    run only where no full one has the pattern near this T.

    Args:
        tokens: T.
        memory: bytes by which memory may grow during one call of attention, forward or with its
            backward as `direction` says: the output, gradients of q, k and v, and what the
            operator needs meanwhile. q, k, v and the output's gradient are there before and do
            not count, nor does the rest of a model. None for no limit.
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
        The choice with its expected time and memory, what these rest on, and the others.

    Raises:
        ValueError: nothing was measured near enough, nothing fits, or an argument of the wrong
            type or range.
    """
    _validate.positive_int(tokens=tokens, heads=heads, head_dim=head_dim)
    _check_memory(memory)
    _validate.one_of(
        direction=(direction, DIRECTIONS),
        device=(device, (None, "cpu", "cuda")),
        dtype=(dtype, (None, *DTYPES)),
        causal=(causal, (True, False)),
    )
    kinds = _kinds(patterns)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    question = Question(tokens, memory, causal, heads, head_dim, direction, dtype)
    left_out: list[str] = []
    runs, warning = _of_device(read_runs(results, left_out), device, left_out)
    warning += _of_version(runs)
    curves = read_curves(runs, direction, causal, tokens, left_out)
    curves = [curve for curve in curves if isinstance(curve.pattern, kinds)]
    near = _near(curves, question, left_out)
    if not near:
        ways = measured_ways(runs)
        raise ValueError(_too_far(question, curves, kinds, ways) + told(left_out))
    dtype, *others = _dtypes([curve.dtype for curve, _ in near], runs[0].kind, question)
    question = replace(question, dtype=dtype)
    taken = [(curve, ends) for curve, ends in near if curve.dtype == dtype]
    joined = [one for one in taken if reaches_all(one[0].pattern, tokens, heads)]
    apart = [curve.variant for curve, ends in taken if (curve, ends) not in joined]
    if not joined:
        raise ValueError(
            f"tokens={tokens}: what was measured near it ({listed(apart)}) never lets the last "
            f"position learn of all earlier ones; {_WAY_OUT}"
        )
    qualities = read_qualities(runs, left_out)
    found = [_candidate(curve, ends, question, qualities) for curve, ends in joined]
    found.sort(key=lambda one: (not one.fits, one.expected_ms))
    if not found[0].fits:
        raise ValueError(too_little(found, question))
    chosen = max((one for one in found if _is_as_fast(one, found[0])), key=_sees)
    alternatives = [one for one in found if one is not chosen]
    why = [*warning, *reasons(chosen, found, question)]
    if others:
        why.append(
            f"{dtype} only; measured near this T too, and not ranked with it: {', '.join(others)} "
            "(pass dtype=)"
        )
    why += unranked(apart, curves, near, question)
    if left_out:
        why.append(told(left_out).removeprefix(". "))
    sources = dict.fromkeys(point.source for _, ends in joined for point in ends)
    return Recommendation(
        chosen, tuple(alternatives), "; ".join(sources), tuple(why), question.words
    )


def _check_memory(memory: object) -> None:
    if isinstance(memory, str):
        raise ValueError(
            f"memory={memory!r}: expected bytes as a number; pass for example 100 * 2**20 for "
            "100 MiB"
        )
    if memory is not None:
        _validate.positive(memory=memory)


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


def _of_device(
    runs: list[Run], device: str, left_out: Sequence[str]
) -> tuple[list[Run], tuple[str, ...]]:
    """The runs of this device, else of one like it, else of any, latest first; and a warning."""
    if not runs:
        raise ValueError(f"results: there are no measurements; {MEASURE}{told(left_out)}")
    runs = sorted(runs, key=lambda run: str(run.environment["date"]), reverse=True)
    own: str | None = f"CPU {cpu_model()}"
    if device == "cuda":
        own = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    same = [run for run in runs if run.environment["device"] == own]
    if same:
        return same, ()
    like = [run for run in runs if run.kind == device]
    # Of one device only: figures of two have no ranking.
    named = (like or runs)[0].environment["device"]
    chosen = [run for run in runs if run.environment["device"] == named]
    if own is not None:
        what = f"the figures are of another device ({named}) than yours ({own})"
    elif like:
        what = f"the figures are of {named}, and no GPU is found here to compare with"
    else:
        what = f"there are no figures of a GPU, and these are of another device ({named})"
    return chosen, (f"WARNING: {what}, where times and their order may differ; {MEASURE}",)


def _of_version(runs: Sequence[Run]) -> tuple[str, ...]:
    """A warning where the figures are of another release than this one."""
    try:
        own = version("dpflash")
    except PackageNotFoundError:  # a source tree that is not installed
        return ()
    others = {str(run.environment["dpflash"]) for run in runs} - {own}
    if not others:
        return ()
    return (
        f"WARNING: figures of dpflash {', '.join(sorted(others))}, and this is {own}, "
        f"which may be faster or slower; {MEASURE}",
    )


def _is_as_fast(one: Candidate, fastest: Candidate) -> bool:
    """Whether it fits, and no more than noise lies between the two."""
    if not one.fits:
        return False
    is_near = one.expected_ms <= _AS_FAST * fastest.expected_ms
    return is_near or one.expected_ms_ci95[0] <= fastest.expected_ms_ci95[1]


def _sees(one: Candidate) -> tuple[float, bool, float]:
    """Order of those as fast; a pattern that counts pairs twice sees no more than all."""
    return min(1.0, one.pair_share), isinstance(one.pattern, Dense), -one.expected_ms


def _near(curves: Sequence[Curve], asked: Question, left_out: list[str]) -> Near:
    """The patterns that were measured near T and can be used there, and the points that tell."""
    near = []
    for curve in curves:
        ends = curve.ends(asked.tokens, asked.width)
        if not ends:
            continue
        try:
            curve.pattern.edges(asked.tokens, asked.heads)
        except ValueError as error:  # its blocks are listed for other heads or another T
            left_out.append(f"{curve.variant}: {error}")
        else:
            near.append((curve, ends))
    return near


def _dtypes(measured: Sequence[str], kind: str, asked: Question) -> list[str]:
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
    curve: Curve, ends: Sequence[Point], asked: Question, qualities: Qualities
) -> Candidate:
    """What is expected by these points."""
    factors = [asked.width / point.width for point in ends]

    def expected(sizes: Sequence[int], size: int, values: Sequence[float]) -> float:
        scaled = [factor * value for factor, value in zip(factors, values, strict=True)]
        return _on_line(sizes, scaled, size)

    pattern, tokens, lengths = curve.pattern, asked.tokens, [point.tokens for point in ends]
    # A pattern that sees all of a short sequence is quadratic there and nowhere else; in its
    # pairs the time is a line at every length.
    *measured, pairs = (pattern.edges(length, asked.heads) for length in (*lengths, tokens))
    peaks = [max(p.peak_mib, _LEAST_MIB) for p in ends if p.peak_mib is not None]
    peak = expected(lengths, tokens, peaks) if len(peaks) == len(ends) else None
    low, high = (
        expected(measured, pairs, [point.interval[side] for point in ends]) for side in (0, 1)
    )
    return Candidate(
        curve.variant,
        pattern,
        expected(measured, pairs, [point.milliseconds for point in ends]),
        peak,
        asked.memory is None or (peak is not None and peak * MIB <= asked.memory),
        pairs / Dense(causal=asked.causal).edges(tokens, asked.heads),
        quality_of(pattern, tokens, qualities),
        f"{_basis(ends, asked)}, {curve.dtype}",
        (min(low, high), max(low, high)),
    )


def _on_line(sizes: Sequence[int], values: Sequence[float], size: int) -> float:
    """The value at a size, on the line through one or two points in logarithms."""
    if len(sizes) == 1:
        return values[0]
    (x0, x1), (y0, y1) = (map(math.log, pair) for pair in (sizes, values))
    return math.exp(y0 + (y1 - y0) * (math.log(size) - x0) / (x1 - x0))


def _basis(ends: Sequence[Point], asked: Question) -> str:
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


def _too_far(
    asked: Question,
    curves: Sequence[Curve],
    kinds: tuple[type, ...],
    ways: Sequence[tuple[str, bool, str]],
) -> str:
    if not curves:
        way = f"measured with causal={asked.causal}, direction={asked.direction!r}"
        if kinds == (Pattern,):
            none, others = f"results: no pattern was {way}", ways
        else:
            names = [kind.__name__ for kind in kinds]
            none = f"patterns={', '.join(names)}: none was {way}"
            others = [one for one in ways if one[0] in names] or ways
        return f"{none}; {_found(others, kinds)}{MEASURE}"
    widths = {point.width for curve in curves for point in curve.points}
    if not any(max(w / asked.width, asked.width / w) <= WIDTH_REACH for w in widths):
        return (
            f"heads={asked.heads}, head_dim={asked.head_dim}: their product {asked.width} is more "
            f"than {WIDTH_REACH} times away from what was measured ({min(widths)} to "
            f"{max(widths)}); {_WAY_OUT}"
        )
    lengths = [{point.tokens for point in curve.points} for curve in curves]
    sizes = sorted({tokens for one in lengths for tokens in one if len(one) > 1})
    if not sizes:
        once = ", ".join(f"{tokens:,}" for tokens in sorted(set().union(*lengths)))
        return (
            f"tokens={asked.tokens}: each pattern was measured at one length only ({once}), which "
            f"tells nothing of others; {_WAY_OUT}"
        )
    measured = ", ".join(f"{size:,}" for size in sizes)
    least, most = sizes[0] / TOKENS_REACH, sizes[-1] * TOKENS_REACH
    if asked.tokens > most:
        limit = f"figures reach to T = {most:,}"
    elif asked.tokens < least:
        limit = f"figures begin at T = {least:,.0f}"
    else:
        limit = "no figures are near it"
    return (
        f"tokens={asked.tokens}: {limit} (measured at {measured}, and told up to {TOKENS_REACH} "
        f"times away); {_WAY_OUT}"
    )


def _found(ways: Sequence[tuple[str, bool, str]], kinds: tuple[type, ...]) -> str:
    """The arguments that would find figures."""
    if not ways:
        return ""
    found: dict[str, list[str]] = {}
    for name, causal, direction in ways:
        found.setdefault(f"causal={causal}, direction={direction!r}", []).append(name)
    if kinds == (Pattern,):
        return f"there are figures with {' and with '.join(found)}; "
    with_names = (f"{way} of {', '.join(names)}" for way, names in found.items())
    return f"there are figures with {' and with '.join(with_names)}; "
