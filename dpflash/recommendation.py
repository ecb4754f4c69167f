"""The choice of `recommend`, and its words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .measured import MIB, Curve, Point, Quality
from .patterns import BlockSparse, Dense, Hierarchical, Pattern, SlidingWindow

# Measured patterns, and the points of each that tell of T.
Near = list[tuple[Curve, list[Point]]]

# Patterns that are dense attention where they see all pairs.
_EACH_PAIR_ONCE = (BlockSparse, Hierarchical, SlidingWindow)
# Of what was left out, so many are named.
_NAMED = 3


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
        quality: of a small model with this very pattern, its lengths scaled with T, over that
            with dense attention; None where it was not measured, and for dense attention.
        basis: which rows the figures are from, and how.
        expected_ms_ci95: the 95% interval of the time, by those of these rows.
    """

    variant: str
    pattern: Pattern
    expected_ms: float
    expected_peak_mib: float | None
    fits: bool
    pair_share: float
    quality: Quality | None
    basis: str
    expected_ms_ci95: tuple[float, float]


@dataclass(frozen=True)
class Recommendation:
    """The pattern to take.

    Attributes:
        chosen: the fastest candidate that fits; of those as fast within noise the one that sees
            most.
        alternatives: all other candidates, those that fit first, each by time.
        measured_on: device, threads, date and version of the figures.
        reasons: why, what was left out, and what to mind.
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
        found = (self.chosen, *self.alternatives)
        bases = [one.basis for one in found]
        most = max(bases, key=bases.count)
        header: tuple[str, ...] = ("variant", "ms", "peak MiB", "fits", "pairs", "loss")
        rows = [header, *(_cells(one) for one in found)]
        source = f"figures: {most}"
        if len(set(bases)) > 1:
            # Once what most have, and in the table what differs.
            own = ["from", *("" if basis == most else basis for basis in bases)]
            rows = [(*row, cell) for row, cell in zip(rows, own, strict=True)]
            source += ", where `from` says nothing else"
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(
            [
                f"{self.asked}: {self.variant} ({_gist(self.chosen, self.alternatives)})",
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
class Question:
    """What was asked; dtype becomes that of the figures."""

    tokens: int
    memory: int | None
    causal: bool
    heads: int
    head_dim: int
    direction: str
    dtype: str | None

    @property
    def width(self) -> int:
        """H D."""
        return self.heads * self.head_dim

    @property
    def words(self) -> str:
        """The question in words."""
        kind = "causal" if self.causal else "not causal"
        limit = "" if self.memory is None else f", within {self.memory / MIB:,.0f} MiB"
        return (
            f"tokens={self.tokens}, heads={self.heads}, head_dim={self.head_dim}, {kind}, "
            f"{self.direction}, {self.dtype}{limit}"
        )


def too_little(found: Sequence[Candidate], asked: Question) -> str:
    """That nothing fits, and what takes least."""
    least = min(found, key=lambda one: one.expected_peak_mib or math.inf)
    return (
        f"memory={asked.memory}: none of the {len(found)} patterns measured near "
        f"tokens={asked.tokens} fits; {least.variant} takes least, {_mib(least)} MiB. Pass more "
        "bytes, fewer tokens or heads, or other patterns"
    )


def reasons(chosen: Candidate, found: Sequence[Candidate], asked: Question) -> Iterator[str]:
    """Why it was chosen, and what to mind."""
    large = [one.variant for one in found if not one.fits]
    count = f"the fastest of {len(found) - len(large)} that fit"
    fastest = min((one for one in found if one.fits), key=lambda one: one.expected_ms)
    if fastest is not chosen:
        count = (
            f"as fast within noise as {count} ({fastest.variant}, {_ms(fastest.expected_ms)} ms), "
            "and sees as much or more"
        )
    yield (
        f"{_ms(chosen.expected_ms)} ms and {_mib(chosen)} MiB expected ({chosen.basis}): {count}"
    )
    if not isinstance(chosen.pattern, Dense):
        yield _other_model(chosen, found)
    if large:
        yield f"{len(large)} more do not fit, or their memory is unknown: {listed(large)}"


def _other_model(chosen: Candidate, found: Sequence[Candidate]) -> str:
    """That it is not dense attention, and what is known of the difference."""
    if chosen.pair_share < 1:
        sees = f"a query sees {_part(chosen.pair_share)} of its pairs on average"
    elif isinstance(chosen.pattern, _EACH_PAIR_ONCE):
        return "it sees all that dense attention sees at this T, and no longer at a greater one"
    else:
        sees = "it sees every pair, but some weigh more than others"
    text = f"not equivalent to dense attention: {sees}, which makes another model"
    dense = next((one for one in found if isinstance(one.pattern, Dense)), None)
    if dense is not None:
        text += f"; dense attention is expected to take {_ms(dense.expected_ms)} ms"
    if chosen.quality is None:
        return (
            f"{text}; held-out loss not measured for this pattern (a full run of `dpflash bench "
            "variants` has some), so compare that of your model"
        )
    return (
        f"{text}; the held-out loss of a small model was {chosen.quality}: measure yours, which "
        "may use far tokens more"
    )


def unranked(
    apart: Sequence[str], curves: Sequence[Curve], near: Near, asked: Question
) -> Iterator[str]:
    """What was measured and is no candidate, and why."""
    if apart:
        yield (
            f"{len(apart)} left out, since their last position never learns of all earlier ones, "
            f"however many layers: {listed(apart)}"
        )
    used = [curve for curve, _ in near]
    far = [
        f"{curve.variant} ({_lengths(curve)})"
        for curve in curves
        if curve.dtype == asked.dtype and curve not in used
    ]
    if far:
        yield f"{len(far)} left out, since they were not measured near this T: {listed(far)}"


def _lengths(curve: Curve) -> str:
    sizes = [point.tokens for point in curve.points]
    least, most = min(sizes), max(sizes)
    return f"at T={most:,} only" if least == most else f"from T={least:,} up to {most:,}"


def listed(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def told(left_out: Sequence[str]) -> str:
    """What could not be used, as a further sentence; empty where there is nothing."""
    if not left_out:
        return ""
    more = f"; and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    return f". Left out: {'; '.join(left_out[:_NAMED])}{more}"


def _cells(one: Candidate) -> tuple[str, ...]:
    return (
        one.variant,
        _ms(one.expected_ms),
        _mib(one),
        "yes" if one.fits else "NO",
        _part(one.pair_share),
        _loss(one),
    )


def _gist(chosen: Candidate, others: Sequence[Candidate]) -> str:
    """What the choice is, in the first line."""
    is_fastest = all(chosen.expected_ms <= one.expected_ms for one in others if one.fits)
    gist = "fastest that fits" if is_fastest else "as fast as the fastest that fits"
    if isinstance(chosen.pattern, Dense):
        return gist
    if chosen.quality is None:
        return f"{gist}; its quality is not known"
    return f"{gist}; held-out loss {_loss(chosen)}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _loss(one: Candidate) -> str:
    if isinstance(one.pattern, Dense):
        return "reference"
    if one.quality is None:
        return "not measured"
    return f"{one.quality.relative_difference:+.2%}" + " (as a seed)" * one.quality.is_chance


def _part(share: float) -> str:
    """Of pairs; what is not all does not read as 100%."""
    return f"{share if share >= 1 else min(share, 0.999):.1%}"


def _mib(one: Candidate) -> str:
    mib = one.expected_peak_mib
    return "unknown" if mib is None else f"{mib:,.0f}" if mib >= 100 else f"{mib:.3g}"
