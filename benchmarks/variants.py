"""The suite "variants": attention variants named as in published tables.

Letters: B samples, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpflash.patterns import Adaptive, BlockSparse, Dense, Dilated, Hierarchical, Pattern

from .attention import (
    DIRECTIONS,
    SHAPE,
    case_subject,
    dilated_subject,
    is_small,
    shape,
    sparse_pattern,
)
from .document import FIGURES, ROOFS, SPEEDUP, Row, chart, columns, page, ratio
from .quality import QUALITY, quality_rows
from .suite import Comparison, Part, Request, Subject, Suite, compared


@dataclass(frozen=True)
class Variant:
    """The attention that is measured under a name of published tables."""

    pattern: Callable[[int, bool], Pattern]  # of (T, causal); may raise `Unsupported`
    operator: str = "dpflash"  # one of `peers.OPERATORS`


def fixed(kind: Callable[..., Pattern], **arguments: Any) -> Callable[[int, bool], Pattern]:
    """Return a function that makes a pattern with these arguments for every T."""
    return lambda tokens, causal: kind(**arguments, causal=causal)


def _adaptive(tokens: int, causal: bool) -> Pattern:
    return Adaptive(block_size=64, keep=max(1, -(-tokens // 64) // 10), causal=causal)


# As in the published tables, with a window of 256 tokens.
_DENSE = fixed(Dense)
_SEGMENTS = {"segment_lengths": (2048, 4096, 8192), "dilation_rates": (1, 2, 4)}
_DILATED = fixed(Dilated, **_SEGMENTS)
_LOCAL = fixed(BlockSparse, block_size=64, local_blocks=2)
_LOCAL_GLOBAL = fixed(BlockSparse, block_size=64, local_blocks=2, global_blocks=1)
_LEVELS = fixed(Hierarchical, levels=((64, 256), (256, 1024), (1024, -1)), block_size=64)
VARIANTS: Mapping[str, Variant] = {
    "SDPA": Variant(_DENSE, "sdpa-flash"),
    "Dense": Variant(_DENSE),
    "DilatedAttention": Variant(_DILATED),
    "BlockSparse": Variant(_LOCAL_GLOBAL),
    "BlockSparseOptimized": Variant(_LOCAL),
    "BlockSparseHierarchical": Variant(_LEVELS),
    "BlockSparseAdaptive": Variant(_adaptive),
    **{
        f"Sparse{'Random' * drawn}{percent}": Variant(
            partial(sparse_pattern, percent=percent, drawn=drawn)
        )
        for drawn in (False, True)
        for percent in (50, 75, 90)
    },
}
_SPARSE = [name for name in VARIANTS if name.startswith("Sparse")]


def variant_subject(*, variant: str, causal: bool, **given: Any) -> Subject:
    """Return the subject that calls one of VARIANTS."""
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
    """Return the subject that calls dilated attention with one of SEGMENTS."""
    lengths, rates = SEGMENTS[segments]
    return dilated_subject(segment_lengths=lengths, dilation_rates=rates, **given)


OURS = "DilatedAttention"
_REPORTED = (
    OURS,
    "BlockSparse",
    "BlockSparseOptimized",
    "BlockSparseHierarchical",
    "BlockSparseAdaptive",
    "SDPA",
)
# T, B and H of the published tables, whose text does not state the last H.
_SIZES = {"small": (2048, 2, 8), "medium": (8192, 1, 8), "large": (16384, 1, 12)}
# T is long enough for each pattern to differ from dense attention; one head per segment length.
_QUICK_SIZES = {"quick": (3072, 1, 3)}


def _plan(request: Request) -> Iterator[Comparison | Part]:
    is_cuda, small = request.where.type == "cuda", is_small(request)
    yield from _reports(request)
    # In a shorter sequence there are too few blocks to leave out 90% of the pairs.
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


def _beside_first(section: str, variants: Sequence[str], given: Mapping[str, Any]) -> Comparison:
    place = f"{section}/T{given['tokens']}/{given['direction']}"
    own = (place, variant_subject, "variant", variants, given, section, variants[0])
    return compared(*own, peers=["SDPA"])


def _reports(request: Request) -> Iterator[Comparison]:
    """Yield comparisons at the sizes of the published tables, which are not causal."""
    for size, sizes in (_QUICK_SIZES if is_small(request) else _SIZES).items():
        for direction in DIRECTIONS:
            place, given = f"reports/{size}/{direction}", shape(request, direction, *sizes)
            own = (place, variant_subject, "variant", _REPORTED, given, "reports", "SDPA")
            yield compared(*own, peers=["SDPA"], columns={"size": size})


def _pairs_left_out(row: Row) -> str | None:
    if row.get("density") is None:
        return None
    tokens = row["config"]["tokens"]
    return f"{1 - row['density'] / ((tokens + 1) / (2 * tokens)):.1%}"


_CHECKED = "checked_rows: checked rows | correct"
_WHO = columns("variant | direction", SHAPE, FIGURES)
_TABLES = {
    "reports": columns(
        "size | direction | variant",
        SHAPE,
        FIGURES,
        [("speed-up over SDPA", ratio)],
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
_TIME = "median_ms: ms"
SUITE = Suite(
    name="variants",
    **page("variants", _TABLES),
    plan=_plan,
    charts=[
        chart("reports", "The sizes of the published tables", "size", _TIME, "variant direction"),
        chart("sparse", "Sparse causal attention", "density: pairs of T x T", _TIME, "variant"),
    ],
)
