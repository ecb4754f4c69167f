"""What others report, row by row, what is wrong with it, and which rows of ours answer it.

These are their figures, on their machines. They stand beside ours on the page of results and are
no baseline of ours: the code behind them does not compute what it says, or was never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .reported import Answer, Figure, Report, Reported, ReportTable
from .reports_dilated import COMPREHENSIVE, DILATED, HYBRID
from .reports_scaling import CONTEXT_PARALLEL, CONTEXT_PARALLEL_TABLE

_SHAPES = ((512, 12, 64), (1024, 16, 64), (2048, 20, 80))  # N, H, D
_SIMULATED = (
    'every figure is synthetic: the "time" is 0.1 log(operations), with 10% of chance on top, and '
    "the throughput the operations over it",
    "no kernel was compiled; the attention ran over heads by a missing transpose (without noise "
    "and clipping its output differs by up to 2.1 from that of torch's "
    "scaled_dot_product_attention), is NaN in 94% of its outputs where it is causal, and no "
    "gradient was clipped per sample or noised",
)


_PRIVATE = {"provider": "dpflash-flat-auto"}
# Of a run without any.
_FASTER = "a faster device (no"
_IN_TIME = "fits the time that a row may take, --max-seconds)"


def _batch_sweep() -> Iterator[Reported]:
    figures = ((3.795e11, 0.38), (9.722e11, 0.26), (1.963e12, 0.12))
    for (tokens, heads, head_dim), (most, slope) in zip(_SHAPES, figures, strict=True):
        curve = f"seq{tokens}_h{heads}_d{head_dim}"
        yield Reported(
            f"{curve}, B 1, 1, 3, 5, 10, 19, 35, 64",
            (Figure(1, "optimal batch"), Figure(most, "ops/s"), Figure(slope, "slope")),
            answers=[
                Answer("batch", "private_batch_optimal", {"curve": curve}),
                Answer("batch", "private_batch_exponent", {"curve": curve}),
                *(
                    Answer("batch", "private_batch", {**_PRIVATE, "curve": curve, "batch": batch})
                    for batch in (1, 3, 5, 10, 19, 35, 64)
                ),
            ],
        )


def _sequence_sweep() -> Iterator[Reported]:
    figures = ((1.706e12, 1.34), (1.814e12, 1.30), (1.757e12, 1.21))
    for (_, heads, head_dim), (most, slope) in zip(_SHAPES, figures, strict=True):
        curve = f"b16_h{heads}_d{head_dim}"
        yield Reported(
            f"{curve}, N from 128 to 2048, 6 lengths",
            (Figure(128, "optimal N"), Figure(most, "ops/s"), Figure(slope, "slope")),
            answers=[
                Answer("sequence", "private_sequence_exponent", {"curve": curve}),
                *(
                    Answer("sequence", "private_sequence", {"curve": curve, "tokens": tokens})
                    for tokens in (128, 223, 389, 677, 1179, 2048)
                ),
            ],
        )


def _worker_sweep() -> Iterator[Reported]:
    for workers, rate in ((1, 0.9), (2, 1.8), (4, 3.4), (8, 6.3), (16, 11.5)):
        yield Reported(
            f"{workers} worker{'s' * (workers > 1)}, 50 tasks each",
            (Figure(rate, "tasks/s"), Figure("100%", "efficiency")),
            answers=[
                Answer(
                    "ranks",
                    "private_training",
                    {"ranks": workers, "batch": batch, "tokens": tokens},
                )
                for batch, tokens in ((8, 256), (16, 512))
            ],
        )


def _levels() -> Iterator[Reported]:
    for level, gain, seconds in (
        ("conservative", 1.10, 0.10),
        ("balanced", 1.30, 0.30),
        ("aggressive", 1.60, 0.70),
    ):
        yield Reported(
            level,
            (Figure(gain, "times as fast"), Figure(seconds, "s to optimize")),
            answers=[
                Answer("optimize", "gains", {"level": level}, f"{_FASTER} workload {_IN_TIME}"),
                Answer("optimize", "levels", {"level": level}),
            ],
        )


DP_FLASH_ATTENTION = Report(
    'dp-flash-attention, "Comprehensive Scaling Analysis Report"',
    (
        ReportTable(
            "S0.1",
            "Batch sweep",
            tuple(_batch_sweep()),
            (*_SIMULATED, "the score punishes large batches, so the best is always 1"),
            "private forward and backward",
        ),
        ReportTable(
            "S0.2",
            "Sequence sweep",
            tuple(_sequence_sweep()),
            (*_SIMULATED, "the score punishes long sequences, so the best is always the shortest"),
            "private forward and backward; the exponent with its interval",
        ),
        ReportTable(
            "S0.3",
            "Workers",
            tuple(_worker_sweep()),
            (
                "the tasks are pauses of log(operations) / 20 seconds and chance, in threads",
                '"efficiency 100%" is the share of tasks that raised nothing; their own rates '
                "make 80% with 16 workers",
            ),
            "private training in so many processes; efficiency is throughput(P) / (P "
            "throughput(1))",
        ),
        ReportTable(
            "S0.4",
            "Optimization levels",
            tuple(_levels()),
            ("the gains are written into the code (1.1, 1.3, 1.6) behind a pause",),
            "tuned against untuned, measured",
        ),
        ReportTable(
            "S0.5-S0.8",
            "Bottleneck, insights, report, the operator",
            (
                Reported(
                    "bottleneck: memory_bandwidth, memory_capacity, compute_bound, balanced",
                    wrong="a rule over synthetic figures",
                    features=("dpflash.bench.work.place_under_roofs",),
                ),
                Reported(
                    "key insights: mean best batch, efficiency of workers, best level",
                    wrong="of synthetic figures",
                    answers=[
                        Answer(suite, "insights", needs=f"{_FASTER} size {_IN_TIME}")
                        for suite in ("batch", "sequence")
                    ],
                ),
                Reported(
                    "JSON and Markdown report",
                    features=("dpflash.bench.suite.run_suite", "dpflash bench batch"),
                ),
                Reported(
                    "attention with epsilon, delta and a bound in each call",
                    wrong="scores were scaled and noised, gradients were not; its accountant says "
                    "epsilon 2.84 where it is 4.49 (sample rate 0.001, noise multiplier 0.4, 50 "
                    "steps)",
                    features=("dpflash.PrivacyEngine", "dpflash.private_boundary"),
                ),
            ),
        ),
    ),
    id="S0",
    repository="danieleschmidt/dp-flash-attention",
    file="scaling_outputs/scaling_report_1755031364.md",
    commit="5f1e3bb",
)


_LENGTHS = (
    "this T in `dpflash bench scaling --sections memory`, which has 16,384 and 65,536 (see S3.3)"
)


def _ring_memory() -> Iterator[Reported]:
    for named, standard, ring in (
        ("32K", "24.3 GB", 8.1),
        ("128K", "out of memory", 31.7),
        ("1M", "out of memory", 249),
    ):
        yield Reported(
            f"{named} tokens",
            (Figure(standard, "standard"), Figure(ring, "GB, ring")),
            needs=_LENGTHS,
        )
    yield Reported(
        "the longest sequence on one device",
        (Figure("32K", "standard"),),
        answers=[
            Answer("max-length", "max_length", {"variant": variant})
            for variant in ("Dense", "LongNet")
        ],
    )


def _sparse() -> Iterator[Reported]:
    for percent, gain, loss in ((50, 2.1, "<0.1%"), (75, 4.2, "<0.5%"), (90, 8.7, "<1.0%")):
        yield Reported(
            f"{percent}% sparse",
            (Figure(gain, "times as fast"), Figure(loss, "accuracy lost")),
            answers=[
                Answer("variants", "sparse", {"variant": f"Sparse{percent}"}),
                Answer("variants", "sparse", {"variant": f"SparseRandom{percent}"}),
                Answer("variants", "quality", {"what": f"sparse {percent}%"}),
            ],
        )


# Rows of ours for each of their tables.
_CONTEXT = tuple(
    {"scaling": "weak", "mode": "ring", "pattern": pattern, "sharding": sharding}
    for pattern, sharding in (
        ("dense causal", "zigzag"),
        ("dilated", "contiguous"),
        ("sliding window", "contiguous"),
    )
)
_TRAINING = tuple({"scaling": "weak", "scheme": scheme} for scheme in ("replicated", "fsdp2"))


def _over_workers(
    kind: str, section: str, ours: str, rows: Sequence[Mapping[str, str]]
) -> Iterator[Reported]:
    for what, workers, efficiency in CONTEXT_PARALLEL_TABLE:
        if what.startswith(kind):
            needs = f"{workers} GPUs, or CPU cores for as many workers"
            options = "--ranks 1,2,4,8" if workers > 4 else ""
            yield Reported(
                f"{what}, {workers} of them",
                (Figure(f"{efficiency:.0%}", "efficiency"),),
                answers=[
                    Answer("ranks", ours, {"ranks": workers}),
                    *(
                        Answer("scaling", section, {**row, "ranks": workers}, needs, options)
                        for row in rows
                    ),
                ],
            )


TORCHBRIDGE = Report(
    'torchbridge, "Performance Analysis"',
    (
        ReportTable(
            "S2.1",
            "Memory of ring attention",
            tuple(_ring_memory()),
            (
                "no code in the repository produces the figures",
                "its ring takes the mean of softmaxes, and sees one piece of each worker only",
            ),
        ),
        ReportTable(
            "S2.2",
            "Sparse attention",
            tuple(_sparse()),
            (
                "all scores are computed and then masked, so no work is left out",
                "no code in the repository produces the figures",
            ),
            "blocks that are left out are not computed; the loss of a small model trained with "
            "each beside",
        ),
        ReportTable(
            "S2.9",
            "Context parallel",
            tuple(_over_workers("context", "attention", "context", _CONTEXT)),
            CONTEXT_PARALLEL.wrong,
            "T grows with the workers; efficiency is of tokens/s, over one of the same workers",
        ),
        ReportTable(
            "S2.10",
            "Nodes",
            tuple(_over_workers("nodes", "training", "nodes", _TRAINING)),
            CONTEXT_PARALLEL.wrong[:1],
            "private training steps, the batch grows with the workers, which are processes of one "
            "machine",
        ),
        ReportTable(
            "S2.13-S2.16",
            "Tools",
            (
                Reported(
                    "benchmark_with_statistics(func, trials=20): 5 warm-ups, 95% interval, Tukey",
                    wrong="outliers stay in; the interval is 1.96 s / sqrt(n)",
                    features=("dpflash.bench.timing.time_call",),
                ),
                Reported(
                    "MemoryProfiler(): peak of GPU and CPU, efficiency score",
                    wrong="the class does not exist",
                    features=("dpflash.bench.memory.PeakMemory",),
                ),
                Reported(
                    "traces of torch.profiler with a table",
                    features=(
                        "dpflash.bench.work.trace_call",
                        "dpflash bench variants --traces",
                    ),
                ),
                Reported(
                    "regressions over 5%",
                    wrong="a speed-up of 10% is critical, since it takes the absolute difference",
                    features=("dpflash bench compare",),
                ),
            ),
        ),
    ),
    id="S2",
    repository="CloudlyIO/torchbridge",
    file="docs/capabilities/performance.md",
    commit="7ca252e",
    note="S2.3 to S2.8, S2.11, S2.12 and S2.17 (FP8, compilers, CUDA graphs, checkpointing, mixed "
    "precision, GPUs of several makers, goals) have no row on this page.",
)

REPORTS = (DP_FLASH_ATTENTION, DILATED, TORCHBRIDGE, HYBRID, COMPREHENSIVE)
