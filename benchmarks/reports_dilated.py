"""What dilated-attention-pytorch (DarcStar) reports, in three documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .attention import DIRECTIONS
from .reported import Answer, Figure, Report, Reported, ReportTable
from .reports_scaling import RING_DILATED, RING_DILATED_TABLE
from .variants import variant_named


def _ms(value: float, spread: float | None = None) -> Figure:
    return Figure(value, "ms", spread)


def _mb(value: float) -> Figure:
    return Figure(value, "MB")


def _rate(value: float) -> Figure:
    return Figure(value, "tokens/s")


_REPOSITORY = "DarcStar-Solutions-Tech/dilated-attention-pytorch"
_LEAKY_DILATED = (
    "heads are shared out over the segments, and what comes out is divided by their number: two "
    "equal segments give exactly half of the right result",
)
_NO_BACKWARD = "forward passes without gradients only, of 3 to 10 runs on a GTX 1080, float16"


def _quick_table() -> Iterator[Reported]:
    for batch, tokens, segments, time, memory, rate in (
        (2, 1024, (256, 512), 8.3, 19.5, 245_546),
        (2, 2048, (512, 1024), 24.8, 39, 165_474),
        (2, 4096, (1024, 2048), 93.4, 78, 87_705),
        (1, 8192, (2048, 4096), 354.1, 78, 23_131),
        (1, 16384, (4096, 8192), 1967.3, 156, 8_327),
    ):
        yield Reported(
            f"B {batch}, N {tokens}, H 8, D 64, {list(segments)} / [1, 2]",
            (_ms(time), _mb(memory), _rate(rate)),
            wrong="the standard deviation, 83% of the mean, is not told" * (tokens == 8192),
            answers=[
                Answer("sequence", "quick_table", {"batch": batch, "tokens": tokens, "heads": 8})
            ],
        )


def _proportional() -> Iterator[Reported]:
    for tokens, time, memory in (
        (512, 1.6, 4.4),
        (1024, 4.3, 8.8),
        (2048, 16.3, 17.5),
        (4096, 46.2, 35),
        (8192, 239.7, 70),
    ):
        yield Reported(
            f"B 1, N {tokens}, H 8, D 64, [N/4, N/2] / [1, 2]",
            (_ms(time), _mb(memory)),
            answers=[
                Answer(
                    "sequence", "dilated_proportional", {"tokens": tokens, "batch": 1, "heads": 8}
                ),
                Answer("sequence", "dilated_fixed", {"tokens": tokens, "batch": 1, "heads": 8}),
            ],
        )


def _heads() -> Iterator[Reported]:
    for heads, time in ((2, 8.0), (4, 16.0), (8, 55.3), (16, 91.5), (32, 113.3)):
        memory = {2: (_mb(8.8),), 32: (_mb(140),)}.get(heads, ())
        yield Reported(
            f"B 2, N 2048, H {heads}, D 64, [512, 1024] / [1, 2]",
            (_ms(time), *memory),
            answers=[Answer("heads", "heads", {"tokens": 2048, "batch": 2, "heads": heads})],
        )


def _dilated_batches() -> Iterator[Reported]:
    for batch, time in ((1, 33.7), (2, 37.5), (4, 55.5), (8, 293.4)):
        yield Reported(
            f"B {batch}, N 2048, H 8, D 64, [512, 1024] / [1, 2]",
            (_ms(time),),
            answers=[
                Answer("batch", "dilated_batch", {"tokens": 2048, "batch": batch, "heads": 8})
            ],
        )


def _segments() -> Iterator[Reported]:
    for name, lengths, rates, time in (
        ("Standard", (1024, 2048), (1, 2), 93.4),
        ("More", (512, 1024, 2048), (1, 2, 4), 92.1),
        ("Extreme", (512, 1024, 2048, 4096), (1, 4, 16, 64), 37.9),
    ):
        yield Reported(
            f"{name}, {list(lengths)} / {list(rates)}",
            (_ms(time),),
            wrong="B 1 and N 8192, where the others are of B 2 and N 4096" * (name == "Extreme"),
            answers=[
                Answer("variants", "segments", {"segments": name, "tokens": 4096, "heads": 8})
            ],
        )


DILATED = Report(
    'dilated-attention-pytorch, "Original DilatedAttention Benchmark Report": GTX 1080, float16',
    (
        ReportTable("S1.1", "Quick table", tuple(_quick_table()), (_NO_BACKWARD, *_LEAKY_DILATED)),
        ReportTable(
            "S1.2",
            "Sequence lengths",
            tuple(_proportional()),
            (
                _NO_BACKWARD,
                *_LEAKY_DILATED,
                "segments grow with N, which makes it quadratic by construction",
            ),
            "segments that grow with N, and segments that do not",
        ),
        ReportTable("S1.3", "Heads", tuple(_heads()), (_NO_BACKWARD, *_LEAKY_DILATED)),
        ReportTable("S1.4", "Batches", tuple(_dilated_batches()), (_NO_BACKWARD, *_LEAKY_DILATED)),
        ReportTable(
            "S1.5",
            "Segments",
            tuple(_segments()),
            (_NO_BACKWARD, *_LEAKY_DILATED),
            "the cost of a set of segments beside the pairs that it sees",
        ),
        ReportTable(
            "S1.6-S1.10",
            "Memory, exponent, backends, recommendations",
            (
                Reported(
                    "memory of a token, N up to 16K",
                    (Figure(8.75, "KB/token"), _mb(156)),
                    wrong='"the s x s weights dominate" contradicts its own linear figures',
                    answers=[Answer("sequence", "bytes_per_token")],
                ),
                Reported(
                    "exponent of the time in N",
                    (Figure(1.80, "exponent"), _rate(316_102)),
                    wrong="from two end points; quadratic by construction, see S1.2",
                    answers=[
                        Answer("sequence", "exponents", {"curve": f"{curve}, {direction}"})
                        for curve in ("dilated_proportional", "dilated_fixed")
                        for direction in DIRECTIONS
                    ],
                ),
                Reported(
                    '"Flash Attention not available (needs Ampere)"',
                    features=("dpflash doctor",),
                ),
                Reported(
                    "opportunities: fused dilated kernels, caches of patterns, half precision",
                    wrong="proposed, not done",
                    features=("dpflash.attention", "dpflash.patterns.Dilated"),
                ),
                Reported(
                    "recommendations for N up to 4K, above, and for hardware",
                    wrong="from the figures above",
                    features=("dpflash.recommend",),
                ),
            ),
        ),
    ),
    id="S1",
    repository=_REPOSITORY,
    file="docs/reports/original-dilated-benchmark-2025-07-06-2254-UTC.md",
    commit="8b036b9",
)


def _ring_dilated() -> Iterator[Reported]:
    for tokens, batch, memory, kilobytes, rate in RING_DILATED_TABLE:
        yield Reported(
            f"B {batch}, N {tokens}, 2 GPUs",
            (_mb(memory), Figure(kilobytes, "KB/token"), _rate(rate)),
            answers=[
                Answer(
                    "scaling",
                    "reported",
                    {"tokens": tokens, "batch": batch, "backward": False},
                )
            ],
        )


HYBRID = Report(
    RING_DILATED.source,
    (
        ReportTable(
            "S3.1",
            "The operator",
            (
                Reported(
                    "ring communication, dilated segments, log-sum-exp accumulation",
                    wrong="a buffer is sent while it is received into: 6 of 8 runs were wrong",
                    features=("dpflash.distributed.ring_attention",),
                ),
            ),
        ),
        ReportTable(
            "S3.2",
            "Memory of each GPU",
            tuple(_ring_dilated()),
            RING_DILATED.wrong,
            "the same shapes on CPU workers, P of them; memory of the one that takes most",
        ),
        ReportTable(
            "S3.3-S3.5",
            "Growth of memory, standard attention, the future",
            (
                Reported(
                    "memory of 16K over memory of 1K",
                    (Figure(1.15, "times"), Figure("O(n/p)", "claimed")),
                    wrong="of two workers only; B halves on the way; each holds all of q, k and v",
                    answers=[Answer("scaling", "memory", {"pattern": "dilated"})],
                ),
                Reported(
                    "standard attention at 16K",
                    (Figure(4, "GB"), Figure("75%", "less")),
                    wrong="the full matrix would take 8 GiB, and no attention of today holds it",
                    answers=[Answer("variants", "dense", {"tokens": 16384})],
                ),
                Reported(
                    "future: 32K and 64K, more GPUs, a flash backend",
                    wrong="proposed, not done",
                    features=("dpflash bench scaling", "dpflash bench max-length"),
                ),
            ),
        ),
    ),
    id="S3",
    repository=_REPOSITORY,
    file="benchmarks/hybrid_performance_summary.md",
    commit="c300897",
)


_S4 = (("Small", 2048, 2, 8), ("Medium", 8192, 1, 8), ("Large", 16384, 1, 12))


class _Variant(NamedTuple):
    id: str
    name: str
    ours: str
    # (ms, its standard deviation, MB) of each size, or why there is none.
    figures: tuple[tuple[float, float, float] | str, ...]
    longest: int | None
    wrong: tuple[str, ...]


_BLOCK_SOFTMAX = (
    "each pair of blocks has a softmax of its own and these are added up: where all values are 1 "
    "the output is 3, 4 or 5",
    "`sparsity_ratio` changes nothing",
)
_VARIANTS = (
    _Variant(
        "S4.1",
        "RingDilatedAttentionV2",
        "RingDilatedAttentionV2",
        ((3.53, 0.32, 38.88), (36.63, 4.66, 103.16), (465.16, 296.81, 404.19)),
        65_536,
        (
            "on one GPU it is four independent pieces of the sequence (its output differs by up "
            "to 1.9 from that of torch's scaled_dot_product_attention), which is why it is fast; "
            "the path over several calls a function that torch does not have",
            "causal attention sees later tokens",
        ),
    ),
    _Variant(
        "S4.2",
        "BlockSparseRing, local_window, block 64, window 256",
        "BlockSparseRing",
        ((35.10, 2.15, 28.88), (120.55, 3.16, 48.45), (233.75, 3.5, 128.61)),
        524_288,
        _BLOCK_SOFTMAX,
    ),
    _Variant(
        "S4.3",
        "BlockSparseOptimized, the same pattern",
        "BlockSparseOptimized",
        ((12.56, 1.75, 148.13), (39.70, 1.56, 288.13), (213.24, 209.15, 848.14)),
        65_536,
        (*_BLOCK_SOFTMAX, "causal raises, or gives NaN"),
    ),
    _Variant(
        "S4.4",
        "BlockSparseHierarchical, sparsity 73.4%",
        "BlockSparseHierarchical",
        ((21.52, 1.95, 232.13), (197.81, 176.04, 759.90), "out of memory"),
        16_384,
        (*_BLOCK_SOFTMAX, "73.4% is the sparsity at N 2048 only", "causal raises"),
    ),
    _Variant(
        "S4.5",
        "BlockSparseAdaptive, sparsity 90.6%, 0.05 times as fast",
        "BlockSparseAdaptive",
        (),
        None,
        (
            "the choice is a mean over the batch, so samples depend on each other",
            "causal attention sees later tokens; its scorer gets no gradient",
        ),
    ),
    _Variant(
        "S4.6",
        "DilatedAttention",
        "DilatedAttention",
        ('"Seq length issue"', (57.05, 3.09, 56.62), (131.18, 2.72, 154.12)),
        131_072,
        (*_LEAKY_DILATED, "N that is no multiple of the longest segment is refused"),
    ),
    _Variant(
        "S4.7",
        "ImprovedDilatedAttention",
        "ImprovedDilatedAttention",
        ('"Seq length issue"', (64.02, 7.66, 67.53), (135.19, 3.4, 172.16)),
        262_144,
        ("attends over heads and not over tokens, by a missing transpose",),
    ),
)


def _variant_table(variant: _Variant) -> ReportTable:
    found = variant_named(variant.ours)
    measured = found.same_as or found.name
    rows = []
    for (place, tokens, batch, heads), told in zip(
        _S4, (*variant.figures, *[()] * (len(_S4) - len(variant.figures))), strict=True
    ):
        figures: tuple[Figure, ...] = ()
        if isinstance(told, str):
            figures = (Figure(told, ""),)
        elif told:
            figures = (_ms(told[0], told[1]), _mb(told[2]))
        shape = {"tokens": tokens, "batch": batch, "heads": heads}
        rows.append(
            Reported(
                f"{place}: N {tokens}, B {batch}, H {heads}, D 64",
                figures,
                wrong="that H is 12 and not 8 is not told" * (place == "Large"),
                answers=[Answer("variants", "reports", {"variant": measured, **shape})],
            )
        )
    if variant.longest is not None:
        rows.append(
            Reported(
                "longest N (S4.8)",
                (Figure(variant.longest, "tokens"),),
                wrong="the search doubles from 8192 and ends below a million: its own ceiling"
                * (variant.longest == 524_288),
                answers=[
                    Answer("max-length", "max_length", {"variant": measured, "direction": one})
                    for one in DIRECTIONS
                ],
            )
        )
    return ReportTable(variant.id, variant.name, tuple(rows), variant.wrong, found.about)


COMPREHENSIVE = Report(
    'dilated-attention-pytorch, "Comprehensive Performance Analysis Report": float16, forward, '
    "[2048, 4096, 8192] / [1, 2, 4], 10 runs",
    (
        *(_variant_table(variant) for variant in _VARIANTS),
        ReportTable(
            "S4.9-S4.13",
            "Variance, caches, plans, tests, selection",
            (
                Reported(
                    '"high variance" flags',
                    features=("dpflash.bench.timing.Statistics.high_variance",),
                ),
                Reported(
                    "caches of patterns, memory pool",
                    (Figure("30-40%", "faster"), Figure("15-25%", "less memory")),
                    wrong="no code measures them",
                    features=("dpflash.patterns.Pattern.graph",),
                ),
                Reported(
                    "pending: patterns for a GPU, 1B tokens, FlashAttention 3",
                    (Figure("20-30%", "faster"), Figure("1.5-2x", "over FA2")),
                    wrong="plans",
                    needs="code to measure; nothing is claimed here",
                ),
                Reported(
                    "tests: 108 of 108, 13 of 14 adaptive",
                    wrong="gradients of the adaptive one were skipped; when we ran its own "
                    "tests, in 11 files, 253 passed, 7 failed and 28 were skipped",
                    features=("make test",),
                ),
                Reported(
                    "selection: up to 8K the ring, above DilatedAttention, from 100K block-sparse",
                    wrong="from the figures above",
                    features=("dpflash.recommend",),
                ),
            ),
        ),
    ),
    id="S4",
    repository=_REPOSITORY,
    file="docs/reports/performance-analysis-2025-06-28-0006-UTC.md",
    commit="3912939",
    note="Its code was read and run at this commit; what is said of ImprovedDilatedAttention and "
    "of the block-sparse softmax still holds at 193f007.",
)
