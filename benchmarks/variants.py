"""The suite "variants": attention variants by the names of published tables.

Letters: B samples, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpflash.patterns import Adaptive, BlockSparse, Dense, Dilated, Hierarchical, Pattern

from . import output
from .attention import (
    DIRECTIONS,
    SHAPE,
    case_subject,
    dilated_subject,
    is_small,
    shape,
    sparse_pattern,
)
from .document import FIGURES, ROOFS, SPEEDUP, Row, chart, columns, glossary, page, ratio
from .quality import QUALITY, quality_rows
from .suite import (
    Comparison,
    Measurement,
    Part,
    Request,
    Subject,
    Suite,
    compared,
    not_measured,
)


@dataclass(frozen=True)
class Variant:
    """A name of published tables, and the attention that is measured under it."""

    about: str  # the computation of that name elsewhere, and the one that is measured here
    pattern: Callable[[int, bool], Pattern]  # of T and causal; may raise `Unsupported`
    operator: str = "dpflash"  # of `peers.OPERATORS`


def fixed(kind: Callable[..., Pattern], **arguments: Any) -> Callable[[int, bool], Pattern]:
    """The pattern of these arguments at every T."""
    return lambda tokens, causal: kind(**arguments, causal=causal)


def _adaptive(tokens: int, causal: bool) -> Pattern:
    return Adaptive(block_size=64, keep=max(1, -(-tokens // 64) // 10), causal=causal)


# As in the published tables; a window of 256 tokens.
_DENSE = fixed(Dense)
_SEGMENTS = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
_DILATED = fixed(Dilated, **_SEGMENTS)
_GROUPED = fixed(Dilated, **_SEGMENTS, heads="grouped")
_LOCAL = fixed(BlockSparse, block_size=64, local_blocks=2)
_LOCAL_GLOBAL = fixed(BlockSparse, block_size=64, local_blocks=2, global_blocks=1)
_LEVELS = fixed(Hierarchical, levels=((64, 256), (256, 1024), (1024, -1)), block_size=64)
_MEASURED: Mapping[str, tuple[Any, ...]] = {  # pattern, operator
    "SDPA": (_DENSE, "sdpa-flash"),
    "Dense": (_DENSE,),
    "DilatedAttention": (_DILATED,),
    "BranchByBranch": (_DILATED, "branch-by-branch"),
    "GroupedDilatedAttention": (_GROUPED,),
    "BlockSparse": (_LOCAL_GLOBAL,),
    "BlockSparseOptimized": (_LOCAL,),
    "BlockSparseHierarchical": (_LEVELS,),
    "BlockSparseAdaptive": (_adaptive,),
}
_ABOUT = glossary("glossary")
_SPARSE = {
    f"Sparse{'Random' * drawn}{percent}": Variant(
        _ABOUT[f"Sparse{'Random' * drawn}"].format(percent=percent),
        partial(sparse_pattern, percent=percent, drawn=drawn),
    )
    for drawn in (False, True)
    for percent in (50, 75, 90)
}
VARIANTS = {name: Variant(_ABOUT[name], *own) for name, own in _MEASURED.items()} | _SPARSE


def variant_subject(*, variant: str, causal: bool, **given: Any) -> Subject:
    """One of VARIANTS."""
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r}: expected one of {', '.join(VARIANTS)}")
    found = VARIANTS[variant]
    return case_subject(found.pattern(given["tokens"], causal), found.operator, **given)


SEGMENTS = {
    "Standard": ((1024, 2048), (1, 2)),
    "More": ((512, 1024, 2048), (1, 2, 4)),
    "Extreme": ((512, 1024, 2048, 4096), (1, 4, 16, 64)),
}


def segments_subject(*, segments: str, **given: Any) -> Subject:
    """Dilated attention with one of SEGMENTS."""
    lengths, rates = SEGMENTS[segments]
    return dilated_subject(segment_lengths=lengths, dilation_rates=rates, **given)


FORMULA, OURS = "BranchByBranch", "DilatedAttention"
_BLOCKS = ("BlockSparse", "BlockSparseOptimized")
_REPORTED = (
    OURS,
    FORMULA,
    "GroupedDilatedAttention",
    *_BLOCKS,
    "BlockSparseHierarchical",
    "BlockSparseAdaptive",
    "SDPA",
)
# T, B and H of the published tables; the text does not name the last H.
_SIZES = {"small": (2048, 2, 8), "medium": (8192, 1, 8), "large": (16384, 1, 12)}
# Long enough for each pattern to differ from dense attention, and one head for each segment.
_QUICK_SIZES = {"quick": (3072, 1, 3)}
# Those that a CPU has the time for where T is large; forward alone, it has more up to "medium".
_ON_CPU = (OURS, FORMULA, *_BLOCKS)
_PATIENT = 150.0  # seconds for a row, above which a CPU measures the others too
_NO_TIME = f"a GPU, or --max-seconds above {_PATIENT:g}: not tried on a CPU, to keep the run short"


def _plan(request: Request) -> Iterator[Comparison | Part]:
    is_cuda, small = request.where.type == "cuda", is_small(request)
    yield _names
    yield from _reports(request)
    # A shorter sequence has too few blocks to leave out 90% of the pairs.
    size = (6400, 1, 1) if small else (8192, 1, 8 if is_cuda else 4)
    given = shape(request, "forward+backward", *size, causal=True)
    yield _beside_first("sparse", ["Dense", *_SPARSE], given)
    size = (4096, 1, 2) if small else (4096, 2 if is_cuda else 1, 8)
    for direction in DIRECTIONS:
        place, given = f"segments/{direction}", shape(request, direction, *size)
        yield compared(
            place, segments_subject, "segments", SEGMENTS, given, "segments", "Standard"
        )
    size = (4096, 1, 1) if small else (16384, 1, 8 if is_cuda else 1)
    for direction in DIRECTIONS:
        yield _beside_first("dense", ["SDPA", OURS], shape(request, direction, *size))
    yield quality_rows


def _names(request: Request) -> Iterator[dict[str, Any]]:
    """The meaning of each name."""
    for name, variant in VARIANTS.items():
        yield output.row(f"names/{name}", {"variant": name}, section="names", about=variant.about)


def _rows(
    place: str, variants: Sequence[str], given: Mapping[str, Any], **figures: Any
) -> list[Measurement]:
    return [
        Measurement(
            f"{place}/{name}",
            variant_subject,
            {"variant": name, **given},
            {**figures, "operator": VARIANTS[name].operator, "peer": name == "SDPA"},
        )
        for name in variants
    ]


def _beside_first(section: str, variants: Sequence[str], given: Mapping[str, Any]) -> Comparison:
    """Variants at one size; speed-ups are over the first."""
    place = f"{section}/T{given['tokens']}/{given['direction']}"
    return Comparison(
        _rows(place, variants, given, section=section), baseline=f"{place}/{variants[0]}"
    )


def _reports(request: Request) -> Iterator[Comparison | Part]:
    """The sizes of the published tables, not causal, as there."""
    small = is_small(request)
    has_time = request.where.type == "cuda" or small or request.limit > _PATIENT
    for size, sizes in (_QUICK_SIZES if small else _SIZES).items():
        for direction in DIRECTIONS:
            place, given = f"reports/{size}/{direction}", shape(request, direction, *sizes)
            is_short = size == "small" or (size, direction) == ("medium", "forward")
            tried = _REPORTED if has_time or is_short else _ON_CPU
            rows = _rows(place, _REPORTED, given, section="reports", size=size)
            measured = [one for one in rows if one.config["variant"] in tried]
            yield Comparison(measured, f"{place}/{FORMULA}")
            if left := [one for one in rows if one not in measured]:
                yield not_measured(left, _NO_TIME)


def _pairs_left_out(row: Row) -> str | None:
    """Of dense causal attention's pairs."""
    if row.get("density") is None:
        return None
    tokens = row["config"]["tokens"]
    return f"{1 - row['density'] / ((tokens + 1) / (2 * tokens)):.1%}"


def _segment_rule(row: Row) -> str:
    lengths, rates = SEGMENTS[row["config"]["segments"]]
    return f"{list(lengths)} / {list(rates)}"


_CHECKED = "checked_rows: checked rows | correct"
_WHO = columns("variant | direction", SHAPE, FIGURES)
_TABLES = {
    "names": columns("variant | about: what is run"),
    "reports": columns(
        "size | direction | variant",
        SHAPE,
        FIGURES,
        [("speed-up over BranchByBranch", ratio)],
        ROOFS,
        "density",
        _CHECKED,
    ),
    "sparse": columns(
        _WHO,
        [("speed-up over Dense", ratio), ("pairs left out", _pairs_left_out)],
        _CHECKED,
    ),
    "segments": columns(
        "segments",
        [("lengths / rates", _segment_rule)],
        "direction",
        SHAPE,
        FIGURES,
        [SPEEDUP],
        "density: pairs seen of all",
        _CHECKED,
    ),
    "dense": columns(_WHO, [("speed-up over SDPA", ratio)], _CHECKED),
    "quality": QUALITY,
}
SUITE = Suite(
    name="variants",
    **page("variants", _TABLES),
    plan=_plan,
    charts=(
        chart(
            "reports",
            "DilatedAttention over LongNet's formula in plain torch",
            ("", lambda row: f"{row['size']}\n{row['config']['direction']}"),
            "speedup: times as fast",
            "variant",
            logarithmic=False,
            only={"variant": OURS},
        ),
        chart(
            "sparse",
            "Sparse causal attention",
            "density: pairs of T x T",
            "median_ms: ms",
            "variant",
            logarithmic=False,
        ),
        *(
            chart(
                "reports",
                f"Variants, {direction}",
                "size",
                "tokens_per_s: tokens/s",
                "variant",
                only={"direction": direction},
            )
            for direction in DIRECTIONS
        ),
    ),
)
