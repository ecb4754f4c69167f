"""The benchmark of the attention variants that other libraries' published tables name.

Letters: B samples, H heads, T tokens, D head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dpflash.patterns import Dilated

from . import output as results
from .attention import (
    DIRECTIONS,
    SHAPE,
    attention_subject,
    default_dtype,
    dilated_subject,
    is_small,
    of_curve,
)
from .document import CORRECT, FIGURES, ROOFS, SPEEDUP, Chart, Table, column, config, ratio
from .named_variants import VARIANTS
from .quality import quality_rows
from .quality_table import QUALITY_TABLE
from .suite import Comparison, Measurement, Request, Row, Subject, Suite, needs

__all__ = ["SUITE", "VARIANTS", "segments_subject"]

Item = Comparison | Callable[[Request], Iterable[Row]]

FORMULA, OURS = "BranchByBranch", "DilatedAttention"
_BLOCKS = ("BlockSparse", "BlockSparseOptimized")
_REPORTED = (
    OURS,
    FORMULA,
    "BranchByBranchDetached",
    "GroupedDilatedAttention",
    "MultiheadDilatedAttention",
    *_BLOCKS,
    "BlockSparseHierarchical",
    "BlockSparseAdaptive",
    "SDPA",
)
# T, B and H of the published tables; the last one's H is not in its text.
_SIZES = {"small": (2048, 2, 8), "medium": (8192, 1, 8), "large": (16384, 1, 12)}
# Long enough for each pattern to differ from dense attention, and a head for each of 3 segments.
_QUICK_SIZES = {"quick": (3072, 1, 3)}
_HEAD_DIM = 64
# The rows for which a CPU has the time; all of the sizes that are not named.
_ON_CPU: Mapping[tuple[str, str], Sequence[str]] = {
    ("medium", "forward"): (*_REPORTED[:2], *_REPORTED[3:-1]),
    ("medium", "forward+backward"): (OURS, FORMULA, *_BLOCKS),
    ("large", "forward"): (OURS, FORMULA, *_BLOCKS),
    ("large", "forward+backward"): (OURS, FORMULA, "BranchByBranchDetached"),
}
_PATIENT = 150.0  # seconds of a row, beyond which a CPU tries the others too
_NO_TIME = f"a GPU, or --max-seconds above {_PATIENT:g}: not tried on a CPU, to keep the run short"

SEGMENTS = {
    "Standard": ((1024, 2048), (1, 2)),
    "More": ((512, 1024, 2048), (1, 2, 4)),
    "Extreme": ((512, 1024, 2048, 4096), (1, 4, 16, 64)),
}
_SPARSE = tuple(f"Sparse{drawn}{percent}" for drawn in ("", "Random") for percent in (50, 75, 90))


def segments_subject(
    *,
    segments: str,
    direction: str,
    tokens: int,
    batch: int,
    heads: int,
    head_dim: int,
    dtype: str,
    causal: bool,
    device: str,
    seed: int,
) -> Subject:
    """A set of SEGMENTS, with what it sees; see `attention.attention_subject`."""
    lengths, rates = SEGMENTS[segments]
    subject = dilated_subject(
        segment_lengths=lengths,
        dilation_rates=rates,
        direction=direction,
        tokens=tokens,
        batch=batch,
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
        device=device,
        seed=seed,
    )
    live = live_shares(Dilated(segment_lengths=lengths, dilation_rates=rates), tokens, heads)
    figures = {"coverage": subject.figures["density"], "live_tokens": live}
    return dataclasses.replace(subject, figures={**subject.figures, **figures})


def live_shares(pattern: Dilated, tokens: int, heads: int) -> list[float]:
    """The part of all tokens, over all heads, that is live in each branch."""
    t, h = torch.arange(tokens), torch.arange(heads)[:, None]
    shares = []
    for length, rate in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True):
        live = (t % min(length, tokens)) % rate == h % rate
        shares.append(live.double().mean().item())
    return shares


def _plan(request: Request) -> Iterator[Item]:
    yield _names
    yield from _reports(request)
    yield from _sparse(request)
    yield from _segments(request)
    yield from _dense(request)
    yield quality_rows


def _names(request: Request) -> Iterator[Row]:
    """What each name stands for."""
    for name, variant in VARIANTS.items():
        columns = {"section": "names", "about": variant.about, "same_as": variant.same_as}
        yield results.row(f"names/{name}", {"variant": name}, **columns)


def _measurement(
    section: str,
    place: str,
    variant: str,
    direction: str,
    shape: tuple[int, int, int],
    request: Request,
    *,
    causal: bool = False,
    **columns: object,
) -> Measurement:
    tokens, batch, heads = shape
    given = {
        "variant": variant,
        "direction": direction,
        "tokens": tokens,
        "batch": batch,
        "heads": heads,
        "head_dim": _HEAD_DIM,
        "dtype": default_dtype(request),
        "causal": causal,
    }
    name = f"{section}/{place}/{direction}/{variant}"
    operator = VARIANTS[variant].operator
    who = {"operator": operator, "peer": operator == "sdpa-flash"}
    return Measurement(name, attention_subject, given, {"section": section, **who, **columns})


def _reports(request: Request) -> Iterator[Item]:
    """The sizes of the published tables, not causal, as there."""
    has_time = request.where.type == "cuda" or is_small(request) or request.limit > _PATIENT
    sizes = _QUICK_SIZES if is_small(request) else _SIZES
    for size, shape in sizes.items():
        for direction in DIRECTIONS:
            measurements = [
                _measurement("reports", size, name, direction, shape, request, size=size)
                for name in _REPORTED
                # Forward it is the same computation as the other form.
                if direction != "forward" or name != "BranchByBranchDetached"
            ]
            possible = _REPORTED if has_time else _ON_CPU.get((size, direction), _REPORTED)
            tried = [one for one in measurements if one.config["variant"] in possible]
            if tried:
                yield Comparison(tried, f"reports/{size}/{direction}/{FORMULA}")
            left = [one for one in measurements if one not in tried]
            if left:
                yield _left_out(left)


def _left_out(measurements: Sequence[Measurement]) -> Callable[[Request], Iterator[Row]]:
    def rows(request: Request) -> Iterator[Row]:
        """Listing what takes minutes here."""
        for one in measurements:
            yield needs(one.name, one.config, _NO_TIME, **one.columns)

    return rows


def _sparse(request: Request) -> Iterator[Comparison]:
    """Causal, over dense causal attention."""
    is_cuda = request.where.type == "cuda"
    # What it costs is linear in the heads; a CPU has the time for fewer of them.
    # A shorter sequence has too few blocks to leave out 90% of the pairs.
    shape = (6400, 1, 1) if is_small(request) else (8192, 1, 8 if is_cuda else 4)
    direction = "forward+backward"
    place = f"T{shape[0]}"
    measurements = [
        _measurement("sparse", place, name, direction, shape, request, causal=True)
        for name in ("Dense", *_SPARSE)
    ]
    yield Comparison(measurements, measurements[0].name)


def _segments(request: Request) -> Iterator[Comparison]:
    is_cuda = request.where.type == "cuda"
    tokens, batch, heads = (4096, 1, 2) if is_small(request) else (4096, 2 if is_cuda else 1, 8)
    for direction in DIRECTIONS:
        measurements = [
            Measurement(
                f"segments/{direction}/{name}",
                segments_subject,
                {
                    "segments": name,
                    "direction": direction,
                    "tokens": tokens,
                    "batch": batch,
                    "heads": heads,
                    "head_dim": _HEAD_DIM,
                    "dtype": default_dtype(request),
                    "causal": False,
                },
                {"section": "segments"},
            )
            for name in SEGMENTS
        ]
        yield Comparison(measurements, measurements[0].name)


def _dense(request: Request) -> Iterator[Comparison]:
    is_cuda = request.where.type == "cuda"
    shape = (4096, 1, 1) if is_small(request) else (16384, 1, 8 if is_cuda else 1)
    for direction in DIRECTIONS:
        place = f"T{shape[0]}"
        measurements = [
            _measurement("dense", place, name, direction, shape, request)
            for name in ("SDPA", OURS)
        ]
        yield Comparison(measurements, measurements[0].name)


def _left_out_part(row: Mapping[str, Any]) -> str | None:
    """Of dense causal attention's pairs."""
    if row.get("density") is None:
        return None
    tokens = row["config"]["tokens"]
    return f"{1 - row['density'] / ((tokens + 1) / (2 * tokens)):.1%}"


def _live(row: Mapping[str, Any]) -> str | None:
    shares = row.get("live_tokens")
    return None if shares is None else " / ".join(f"{share:.1%}" for share in shares)


def _segment_rule(row: Mapping[str, Any]) -> str:
    lengths, rates = SEGMENTS[row["config"]["segments"]]
    return f"{list(lengths)} / {list(rates)}"


_CHECKED = (column("checked_rows", "checked rows"), *CORRECT)

SUITE = Suite(
    name="variants",
    title="Attention variants of published tables",
    about=(
        "The libraries dilated-attention-pytorch and torchbridge publish tables of the speed of "
        "attention variants. Each of their names is timed here as the operator that the name "
        "promises; the first table says what that is, and what their code does instead. Outputs "
        "and gradients are compared with the definition in float64 before anything is timed, of "
        "a long sequence at 64 drawn query rows. BranchByBranch is LongNet's formula for dilated "
        "attention as one writes it in plain torch with flash attention, and the baseline of "
        "DilatedAttention; BranchByBranchDetached is the same with the gradient that torchscale "
        "(LongNet's published code) has, which is not that of the formula: of it only the output "
        "is checked. Speed and quality belong together: the last table has the held-out loss of "
        "a small model trained with each kind of pattern. float16 on a GPU, as in those tables; "
        "float32 on a CPU. A CPU takes fewer heads in the sparse and dense tables, in which all "
        "costs are linear in them."
    ),
    plan=_plan,
    tables=(
        Table(
            "names",
            "What the names stand for",
            (config("variant"), column("about", "what is run"), column("same_as", "measured as")),
        ),
        Table(
            "reports",
            "The sizes of the published tables",
            (
                column("size"),
                config("direction"),
                config("variant"),
                *SHAPE,
                *FIGURES,
                ("speed-up over BranchByBranch", ratio),
                *ROOFS,
                column("density"),
                column("gradient"),
                *_CHECKED,
            ),
            "Dilated: segments of 2048, 4096 and 8192 tokens at rates 1, 2 and 4. Block-sparse: "
            "blocks of 64, window 256. Not causal. At T = 2048 the shortest segment is the whole "
            "sequence, so that DilatedAttention sees all pairs (density 1): it cannot be faster "
            "than dense attention there.",
        ),
        Table(
            "sparse",
            "Sparse causal attention over dense causal attention",
            (
                config("variant"),
                config("direction"),
                *SHAPE,
                *FIGURES,
                ("speed-up over Dense", ratio),
                ("pairs left out", _left_out_part),
                *_CHECKED,
            ),
            "Pairs that are left out are not computed. SparseRandom draws its blocks, and a block "
            "that no later one has drawn is lost to all that follows: `dpflash.recommend` leaves "
            "such a pattern out. What sparsity costs in quality is in the last table.",
        ),
        Table(
            "segments",
            "Segments: their cost and what they see",
            (
                config("segments"),
                ("lengths / rates", _segment_rule),
                config("direction"),
                *SHAPE,
                *FIGURES,
                SPEEDUP,
                column("coverage", "pairs seen of all"),
                ("live tokens, by branch", _live),
                *_CHECKED,
            ),
        ),
        Table(
            "dense",
            "Dense attention, as torch has it today, beside dilated",
            (
                config("variant"),
                config("direction"),
                *SHAPE,
                *FIGURES,
                ("speed-up over SDPA", ratio),
                *_CHECKED,
            ),
            "Dense attention holds no matrix of T x T either.",
        ),
        QUALITY_TABLE,
    ),
    charts=(
        Chart(
            "reports",
            "DilatedAttention over LongNet's formula in plain torch",
            ("", lambda row: f"{row['size']}\n{row['config']['direction']}"),
            ("times as fast", of_curve("speedup", variant=OURS)),
            lambda row: str(row["config"]["variant"]),
            logarithmic=False,
        ),
        Chart(
            "sparse",
            "Sparse causal attention",
            column("density", "pairs of T x T"),
            column("median_ms", "ms"),
            lambda row: row["config"]["variant"],
            logarithmic=False,
        ),
        *(
            Chart(
                "reports",
                f"Variants, {direction}",
                column("size"),
                ("tokens/s", of_curve("tokens_per_s", direction=direction)),
                lambda row: row["config"]["variant"],
            )
            for direction in DIRECTIONS
        ),
    ),
)
