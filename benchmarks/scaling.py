"""The suites "scaling" and "ranks": attention and private training on several ranks.

Letters: B samples, T tokens, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from dpflash import _validate

from . import output as results
from .document import Chart, Column, Table, column, config, milliseconds
from .environment import usable_cores
from .private_scaling import insight
from .ranks import run_ranks
from .scaling_model import ASSUMPTIONS, LINKS, Link, model_rows
from .scaling_tasks import (
    MODES,
    SCHEMES,
    SPREADS,
    AttentionCase,
    TrainingCase,
    measure_attention,
    measure_training,
    spread,
)
from .suite import Request, Row, Suite, Unsupported, needs, refuse, too_slow, worst
from .timing import Effort, columns, speedup, summarize

SECTIONS = ("attention", "memory", "reported", "training", "model")
# Of the suite "ranks".
SAMPLES, CONTEXT, NODE = "private_training", "context", "nodes"
RANKS = (1, 2, 4, 8, 16)
CONTEXT_RANKS = NODES = (1, 2, 4, 8)

_MIB = 2**20
_TIMEOUT = 900.0
_MOST_RANKS_A_CORE = 8


@dataclass(frozen=True)
class Sizes:
    """Sizes of the suite "scaling"."""

    strong: Mapping[str, int]  # T of attention, by pattern; others are left out
    weak: Mapping[str, int]  # T of each rank, by pattern
    memory: Sequence[tuple[str, str, Sequence[str], int]]  # pattern, sharding, modes, T
    reported: Sequence[tuple[int, int]]  # B, T of a published table of dilated attention
    checked_tokens: int  # T of the comparison with one process
    # Of strong scaling; in weak scaling each rank has this part of its samples, or of its tokens.
    training: TrainingCase
    training_divisor: int = 4
    heads: int = 8
    head_dim: int = 64
    # Of the model: T of each rank (weak) and of all (strong), and P.
    modelled: tuple[tuple[str, int], ...] = (("weak", 8192), ("strong", 2**20))
    modelled_ranks: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024)


FULL_SIZES = Sizes(
    strong={"dense causal": 4096, "dilated": 8192, "sliding window": 8192},
    weak={"dense causal": 2048, "dilated": 4096, "sliding window": 4096},
    memory=(
        ("dense causal", "zigzag", MODES, 16384),
        ("dilated", "contiguous", ("ring",), 65536),
    ),
    reported=((2, 1024), (2, 2048), (1, 4096), (1, 8192), (1, 16384)),
    checked_tokens=2051,
    training=TrainingCase("replicated", 16, 512),
)
QUICK_SIZES = Sizes(
    strong={"dense causal": 1024, "dilated": 2048, "sliding window": 2048},
    weak={"dense causal": 512, "dilated": 1024, "sliding window": 1024},
    memory=(
        ("dense causal", "zigzag", ("ring",), 4096),
        ("dilated", "contiguous", ("ring",), 16384),
    ),
    reported=FULL_SIZES.reported[:3],
    checked_tokens=1027,
    training=TrainingCase("replicated", 8, 128, width=64),
)


@dataclass(frozen=True)
class Options:
    """What the suite "scaling" measures."""

    ranks: Sequence[int] = (1, 2, 4)  # numbers of ranks
    sections: Sequence[str] = SECTIONS
    timeout: float = _TIMEOUT  # of one launch of ranks, seconds
    flops: Sequence[float] = ()  # FLOP/s of a rank, for the model, beside the measured ones
    link_gbps: float | None = None  # GB/s of the model's link; None for LINKS
    link_latency_us: float = 5.0  # microseconds, of that link
    sizes: Sizes | None = None  # None for the usual ones

    def __post_init__(self) -> None:
        for number in self.ranks:
            _validate.positive_int(ranks=number)
        for section in self.sections:
            _validate.one_of(sections=(section, SECTIONS))
        positive = {"timeout": self.timeout}
        if self.link_gbps is not None:
            positive["link_gbps"] = self.link_gbps
        _validate.positive(**positive)
        _validate.finite(**positive, link_latency_us=self.link_latency_us)
        _validate.non_negative(link_latency_us=self.link_latency_us)
        for flops in self.flops:
            _validate.positive(flops=flops)
            _validate.finite(flops=flops)
        most = max(_MOST_RANKS_A_CORE * usable_cores(), torch.cuda.device_count())
        if max(self.ranks) > most:
            raise ValueError(
                f"ranks={max(self.ranks)}: this machine has {usable_cores()} cores, on which more "
                f"than {most} ranks tell nothing; pass fewer"
            )


def fill(row: Row, returned: Sequence[Mapping[str, Any]], *, is_short: bool = False) -> None:
    """Writes what a function of `scaling_tasks` returned for a row, by rank, into it."""
    row.update(
        error=worst(one["error"] for one in returned),
        correct=all(one["correct"] for one in returned),
    )
    if not row["correct"]:
        return
    first = returned[0]
    row.update(first["columns"])
    for key in ("peak_memory_mb", "saved_mb"):
        if key in first:
            each = [one[key] for one in returned]
            row.update({key: None if None in each else max(each), f"{key}_per_rank": each})
    if "seconds" not in first:
        return
    # A trial ends when its slowest rank does.
    seconds = [max(trial) for trial in zip(*(one["seconds"] for one in returned), strict=True)]
    row.update(columns(seconds, is_short=is_short), alone=None, speedup=1.0, efficiency=1.0)
    row["tokens_per_s"] = 1e3 * first["tokens"] / row["median_ms"]
    gain = first["tokens"] / first["tokens_alone"]
    if "alone_seconds" in first:
        over = speedup(seconds, first["alone_seconds"])
        row["alone"] = summarize(first["alone_seconds"]).as_row()
        row["speedup"] = gain * over.median
        row["efficiency"] = row["speedup"] / len(returned)
        if not is_short:
            row["speedup_ci95"] = [gain * end for end in over.ci95]
            row["efficiency_ci95"] = [end / len(returned) for end in row["speedup_ci95"]]
    if "edges_per_rank" in row:
        edges, work = row["edges_per_rank"], sum(row["edges_per_rank"])
        row["work_efficiency"] = row["efficiency"] * work / row.pop("edges_alone") / gain
        row["balance"] = max(edges) * len(edges) / work
    row["bytes_counted"], row["bytes_predicted"] = (
        [one[key] for one in returned] for key in ("counted", "predicted")
    )
    row["bytes_equal"] = row["bytes_counted"] == row["bytes_predicted"]


def _row(section: str, name: str, case: Any, ranks: int, **more: Any) -> Row:
    shape = {**asdict(case), "ranks": ranks, **more, "dtype": "float32"}
    return results.row(f"{section}/{name}/P{ranks}", shape, section=section, ranks=ranks)


def _on_ranks(
    rows: Sequence[Row],
    function: Callable[..., list[dict[str, Any]]],
    request: Request,
    timeout: float = _TIMEOUT,
    *,
    is_short: bool = False,
    **arguments: Any,
) -> Sequence[Row]:
    """Runs a function on ranks and fills each row with what it returned for it."""
    ranks, device = rows[0]["ranks"], request.where.type
    try:
        if device == "cuda" and ranks > torch.cuda.device_count():
            raise Unsupported(f"{ranks} GPUs: this machine has {torch.cuda.device_count()}")
        returned = run_ranks(function, ranks, device=device, timeout=timeout, **arguments)
        for number, row in enumerate(rows):
            row["oversubscribed"] = device == "cpu" and ranks > usable_cores()
            fill(row, [one[number] for one in returned], is_short=is_short)
    except Exception as error:
        for row in rows:
            refuse(row, error)
    return rows


def _spread(row: Mapping[str, Any]) -> str:
    return spread(row["config"]["pattern"], row["config"]["sharding"])


def _modes(ranks: int, heads: int, modes: Sequence[str]) -> list[str]:
    """Those that differ and are possible on so many ranks."""
    if ranks == 1:
        return ["ring"]
    return [mode for mode in modes if mode != "ulysses" or heads >= ranks]


@dataclass(frozen=True)
class _Sections:
    """The sections of the suite "scaling"."""

    options: Options

    def plan(self, request: Request) -> Iterator[Callable[[Request], Iterator[Row]]]:
        for section in self.options.sections:
            if section != "model":
                yield getattr(self, section)

    def _sizes(self, request: Request) -> Sizes:
        return self.options.sizes or (QUICK_SIZES if request.quick else FULL_SIZES)

    def _attention(
        self,
        section: str,
        scaling: str,
        tokens: int,
        cases: Sequence[AttentionCase],
        request: Request,
    ) -> Iterator[Row]:
        """Cases that take turns, on each number of ranks; one rank has so many tokens."""
        for ranks in self.options.ranks:
            whole = tokens * ranks if scaling == "weak" else tokens
            modes = _modes(ranks, cases[0].heads, MODES)
            own = [replace(case, tokens=whole) for case in cases if case.mode in modes]
            rows = []
            for case in own:
                direction = "forward" + "+backward" * case.backward
                place = f"{scaling}/{spread(case.pattern, case.sharding)}/{case.mode}/{direction}"
                rows.append(_row(section, f"{place}/T{whole}", case, ranks, scaling=scaling))
            yield from _on_ranks(
                rows,
                measure_attention,
                request,
                self.options.timeout,
                cases=own,
                tokens_alone=tokens,
                effort=request.calls,
            )

    def attention(self, request: Request) -> Iterator[Row]:
        """Attention, strong and weak scaling."""
        sizes = self._sizes(request)
        for scaling, lengths in (("strong", sizes.strong), ("weak", sizes.weak)):
            for pattern, sharding in SPREADS:
                if pattern in lengths:
                    shape = (pattern, lengths[pattern], sizes.heads, sizes.head_dim, 1, sharding)
                    checked = sizes.checked_tokens
                    cases = [AttentionCase(*shape, mode, checked_tokens=checked) for mode in MODES]
                    yield from self._attention(
                        "attention", scaling, lengths[pattern], cases, request
                    )

    def reported(self, request: Request) -> Iterator[Row]:
        """Dilated attention at the sizes of a published table."""
        sizes = self._sizes(request)
        for batch, tokens in sizes.reported:
            shape = ("dilated", tokens, sizes.heads, sizes.head_dim, batch)
            cases = [
                AttentionCase(*shape, backward=backward, checked_tokens=sizes.checked_tokens)
                for backward in (True, False)
            ]
            yield from self._attention("reported", "strong", tokens, cases, request)

    def memory(self, request: Request) -> Iterator[Row]:
        """Memory of attention on each rank."""
        sizes = self._sizes(request)
        for pattern, sharding, modes, tokens in sizes.memory:
            for ranks in self.options.ranks:
                for mode in _modes(ranks, sizes.heads, modes):
                    shape = (pattern, tokens, sizes.heads, sizes.head_dim, 1, sharding, mode)
                    checked = min(sizes.checked_tokens, tokens)
                    case = AttentionCase(*shape, checked_tokens=checked)
                    yield from _on_ranks(
                        [_row("memory", f"{pattern}/{mode}/T{tokens}", case, ranks)],
                        measure_attention,
                        request,
                        self.options.timeout,
                        cases=[case],
                        tokens_alone=tokens,
                        effort=None,
                    )

    def training(self, request: Request) -> Iterator[Row]:
        """Private training steps, strong and weak scaling."""
        sizes = self._sizes(request)
        for ranks in self.options.ranks:
            for scheme in SCHEMES:
                if ranks == 1 and scheme == "fsdp2":
                    continue  # the same as replicated
                whole = replace(sizes.training, scheme=scheme)
                key = "tokens" if scheme == "context" else "batch"
                own = max(1, getattr(whole, key) // sizes.training_divisor)
                part, weak = (replace(whole, **{key: own * times}) for times in (1, ranks))
                for scaling, case, alone in (("strong", whole, whole), ("weak", weak, part)):
                    name = f"{scaling}/{scheme}/B{case.batch}/T{case.tokens}"
                    yield from _on_ranks(
                        [_row("training", name, case, ranks, scaling=scaling)],
                        measure_training,
                        request,
                        self.options.timeout,
                        case=case,
                        alone=alone,
                        effort=request.calls,
                    )

    def model(self, rows: Sequence[Row]) -> Iterator[Row]:
        """The model's rows, at the speeds that were measured on one rank and those given."""
        options, sizes = self.options, self.options.sizes or FULL_SIZES
        links: Sequence[Link] = LINKS
        if options.link_gbps is not None:
            name = f"{options.link_gbps:g} GB/s, {options.link_latency_us:g} us (given)"
            links = [Link(name, 1e9 * options.link_gbps, options.link_latency_us / 1e6)]
        shape = (sizes.heads, sizes.head_dim)
        if "model" in options.sections:
            yield from model_rows(
                rows, options.flops, links, sizes.modelled, sizes.modelled_ranks, *shape
            )


def _ranks(row: Mapping[str, Any]) -> str:
    return f"{row['ranks']}{' over' if row.get('oversubscribed') else ''}"


def _scheme(row: Mapping[str, Any]) -> str:
    return {
        "replicated": "data parallel, replicated",
        "fsdp2": "data parallel, FSDP2",
        "context": "context parallel",
    }[row["config"]["scheme"]]


def _efficiency(row: Mapping[str, Any]) -> str | None:
    if row.get("efficiency") is None:
        return None
    if row.get("efficiency_ci95") is None:
        return f"{row['efficiency']:.0%}"
    low, high = row["efficiency_ci95"]
    return f"{row['efficiency']:.0%} [{low:.0%}, {high:.0%}]"


def _sent_mib(row: Mapping[str, Any]) -> float | None:
    """By the busiest rank."""
    if not row.get("bytes_counted"):
        return None
    return max(float(np.sum(each)) for each in row["bytes_counted"]) / _MIB


def _purposes(row: Mapping[str, Any]) -> str | None:
    sent = (row.get("bytes_by_purpose") or {}).items()
    return ", ".join(f"{purpose} {size / _MIB:.3g}" for purpose, size in sent) or None


def _times_ranks(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda row: None if row.get(key) is None else row[key] * row["ranks"]


_P: Column = ("P", _ranks)
_PEAK = column("peak_memory_mb", "peak MiB of a rank")
_SENT = (("MiB sent", _sent_mib), column("bytes_equal", "as predicted"))
_B, _T, _CORRECT = config("batch", "B"), config("tokens", "T"), column("correct")
_SPEED: tuple[Column, ...] = (
    ("ms", milliseconds),
    ("ms of one rank", lambda row: (row.get("alone") or row)["median_ms"]),
    column("tokens_per_s", "tokens/s"),
    ("efficiency", _efficiency),
)
_ATTENTION = (config("scaling"), ("pattern", _spread), config("mode"))
_SHAPE = "`ring_attention`, H 8, D 64, float32; dilated is [512, 1024] / [1, 2]."

_TABLES = (
    Table(
        "attention",
        "Attention: T fixed (strong scaling), T of each rank fixed (weak)",
        (
            *(*_ATTENTION, _P, _T, *_SPEED, column("work_efficiency", "of work"), *_SENT),
            *(column("balance"), _PEAK, _CORRECT),
        ),
        f"{_SHAPE} B 1, forward and backward. In weak scaling one rank has its own T.",
    ),
    Table(
        "memory",
        "Memory of each rank, T fixed",
        (
            *(*_ATTENTION[1:], _P, _T, _PEAK, ("peak x P", _times_ranks("peak_memory_mb"))),
            column("saved_mb", "saved MiB"),
            *(("saved x P", _times_ranks("saved_mb")), _CORRECT),
        ),
        f"{_SHAPE} B 1. Where memory falls as 1 / P, memory x P stays the same.",
    ),
    Table(
        "reported",
        "Dilated attention at the sizes of a published table",
        (
            *(_T, _B, _P),
            ("direction", lambda row: "forward" + "+backward" * row["config"]["backward"]),
            *(*_SPEED, *_SENT, _PEAK, _CORRECT),
        ),
        f"{_SHAPE} Shards of a multiple of 1024 tokens hold whole segments, so nothing is sent. "
        "The published figures are on the page of results.",
    ),
    Table(
        "training",
        "Private training steps, strong and weak scaling",
        (
            *(config("scaling"), ("ranks are", _scheme), _P, _B, _T, *_SPEED, *_SENT),
            *(("MiB by purpose", _purposes), _PEAK, _CORRECT),
        ),
        "A `LongContextLM` (vocab 256, width 128, 2 layers, 4 heads; width 64 in a quick run), "
        "flat clipping, noise, SGD, one microbatch. Weak scaling fixes the samples of each rank, "
        "of context parallel the tokens. MiB sent: numbers handed to collectives and pairwise "
        "exchanges, counted; what ranks agree on before (some words a call) is left out. MiB by "
        "purpose: of rank 0, by formula.",
    ),
    Table(
        "model",
        "A model of larger clusters, no measurement",
        (
            *_ATTENTION[:2],
            ("FLOP/s", lambda row: f"{row['config']['flops']:.3g}"),
            *(config("flops_source", "which are"), config("link"), _P, _T),
            *(column("compute_ms", "compute ms"), column("exchange_ms", "exchange ms")),
            column("modelled_ms", "modelled ms"),
            column("modelled_overlapped_ms", "overlapped ms"),
            column("efficiency", "modelled efficiency"),
            column("efficiency_overlapped", "overlapped"),
        ),
        f"No rank ran for this. It assumes: {'; '.join(ASSUMPTIONS)}.",
    ),
)

_X: Column = ("P", lambda row: row["ranks"])


def _chart(
    section: str,
    title: str,
    y: Column,
    series: Callable[[Mapping[str, Any]], str],
    scaling: str = "",
) -> Chart:
    """A panel over ranks, of one kind of scaling where it is given."""

    def value(row: Mapping[str, Any]) -> Any:
        return y[1](row) if row["config"].get("scaling", "").startswith(scaling) else None

    title = f"{title}, {scaling} scaling" if scaling else title
    return Chart(section, title, _X, (y[0], value), series, logarithmic=section == "memory")


def _by_mode(row: Mapping[str, Any]) -> str:
    return f"{_spread(row)}, {row['config']['mode']}"


def _by_link(row: Mapping[str, Any]) -> str:
    link, source = row["config"]["link"], row["config"]["flops_source"]
    return f"{_spread(row)}, {link.split(',')[0]}, {source}"


_OF_WORK = column("work_efficiency", "efficiency of work")
_CHARTS = (
    _chart("attention", "Attention", column("efficiency"), _by_mode, "strong"),
    _chart("attention", "Attention", _OF_WORK, _by_mode, "weak"),
    _chart("training", "Private training steps", column("efficiency"), _scheme, "strong"),
    _chart("training", "Private training steps", column("efficiency"), _scheme, "weak"),
    _chart("memory", "Peak memory of a rank, T fixed", _PEAK, _by_mode),
    _chart("memory", "Kept by autograd, T fixed", column("saved_mb", "saved MiB"), _by_mode),
    _chart("attention", "Sent by the busiest rank", _SENT[0], _by_mode, "strong"),
    Chart(
        "reported",
        "Dilated attention, forward: peak memory of a rank",
        _T,
        ("MiB", lambda row: None if row["config"]["backward"] else row["peak_memory_mb"]),
        lambda row: f"P {row['ranks']}",
    ),
    _chart("model", "MODEL, no measurement", column("efficiency"), _by_link, "weak"),
    _chart("model", "MODEL, no measurement", column("efficiency"), _by_link, "strong"),
)


def scaling_suite(options: Options) -> Suite:
    """The suite "scaling" with these options."""
    sections = _Sections(options)
    return Suite(
        name="scaling",
        title="Scaling of attention and private training over ranks",
        about=(
            "Attention, its memory and private training steps on P ranks, fresh processes of this "
            "machine with a GPU or one thread each. They begin a trial together, and it ends with "
            "the slowest. Before anything is timed, its result is compared with that of one "
            "process."
        ),
        plan=sections.plan,
        tables=_TABLES,
        charts=_CHARTS,
        derive=sections.model,
        on_ranks=True,
    )


SCALING = scaling_suite(Options())


def training_row(
    section: str,
    case: TrainingCase,
    alone: TrainingCase,
    ranks: int,
    request: Request,
    effort: Effort,
) -> Row:
    """The row of a private step by ranks that each have a core, or a GPU, of their own."""
    row = _row(section, f"B{case.batch}/T{case.tokens}", case, ranks)
    if request.where.type == "cpu" and ranks > usable_cores():
        return {**row, "needs": f"{ranks} cores: this machine has {usable_cores()}"}
    given: dict[str, Any] = {"case": case, "alone": alone, "effort": effort}
    _on_ranks([row], measure_training, request, is_short=effort != request.calls, **given)
    if row["median_ms"] is not None:
        row["tasks_per_s"] = 1e3 / row["median_ms"]
    return row


def step_seconds(case: TrainingCase, request: Request) -> float:
    """Seconds of one step by one rank; 0 of a wrong one, which its row reports."""
    given = {"case": case, "alone": case, "effort": Effort(0, 1)}
    device = request.where.type
    ((found,),) = run_ranks(measure_training, 1, device=device, timeout=_TIMEOUT, **given)
    return float(found["seconds"][0]) if found["correct"] else 0.0


def sample_cases(request: Request) -> list[TrainingCase]:
    """B and T of the steps, the smallest first; 12 heads of 64, as in a published table."""
    sizes = [(batch, tokens) for batch in (8, 16, 32) for tokens in (256, 512, 1024)]
    cases = [
        TrainingCase("replicated", *size, width=768, layers=1, heads=12)
        for size in ([(8, 32)] if request.quick else sizes)
    ]
    return sorted(cases, key=lambda case: (case.batch * case.tokens, case.batch))


def sample_rows(
    request: Request, seconds_of: Callable[[TrainingCase, Request], float] = step_seconds
) -> Iterator[Row]:
    """Strong scaling: the samples of a step are spread over the ranks.

    Args:
        request: how to measure.
        seconds_of: times a step by one rank, which decides how many calls a row makes.
    """
    slow: list[tuple[TrainingCase, float]] = []
    for case in sample_cases(request):
        # A step with as many samples and tokens, or more, takes no less time.
        known = [
            one for one in slow if case.batch >= one[0].batch and case.tokens >= one[0].tokens
        ]
        effort = None
        if not known:
            seconds = seconds_of(case, request)
            effort = request.calls.within(seconds, request.limit)
            known = [(case, seconds)]
            slow += known if effort is None else []
        for ranks in RANKS:
            if effort is not None:
                yield training_row(SAMPLES, case, case, ranks, request, effort)
                continue
            other, seconds = known[0]
            size = "" if other == case else f" of B {other.batch}, T {other.tokens} already"
            reason = too_slow(f"one rank's step{size} takes {seconds:.3g} s", request.limit)
            row = _row(SAMPLES, f"B{case.batch}/T{case.tokens}", case, ranks)
            yield {**row, "needs": reason}


def context_rows(request: Request) -> Iterator[Row]:
    """Weak scaling: each rank has the same number of tokens of every sample."""
    alone = TrainingCase("context", 2, 128 if request.quick else 512)
    for ranks in CONTEXT_RANKS:
        case = replace(alone, tokens=alone.tokens * ranks)
        yield training_row(CONTEXT, case, alone, ranks, request, request.calls)


def node_rows(request: Request) -> Iterator[Row]:
    """Rows that need several machines."""
    for nodes in NODES:
        yield needs(
            f"{NODE}/P{nodes}",
            {"ranks": nodes, "model": "7B"},
            f"{nodes} machine{'s' * (nodes > 1)} with GPUs that hold a 7B model: "
            f"torchrun --nnodes {nodes} -m dpflash train --shard-parameters",
            section=NODE,
            ranks=nodes,
        )


def throughput_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """The speed-up of further ranks, as sentences."""
    for row in rows:
        if row.get("efficiency_ci95") is not None:
            ranks, case = row["ranks"], row["config"]
            low, high = row["speedup_ci95"]
            yield insight(
                row["name"],
                f"{ranks} ranks with B = {case['batch']}, T = {case['tokens']:,} train "
                f"{row['speedup']:.2f} [{low:.2f}, {high:.2f}] times the tokens/s of one, "
                f"{row['efficiency']:.0%} of {ranks} times.",
                efficiency=row["efficiency"],
            )


_STEPS: tuple[Column, ...] = (
    *(_P, _B, _T, ("ms of a step", milliseconds), column("tasks_per_s", "steps/s")),
    *(column("tokens_per_s", "tokens/s"), ("efficiency", _efficiency), _PEAK, _CORRECT),
)
RANKS_SUITE = Suite(
    name="ranks",
    title="Private training on several ranks: throughput and efficiency",
    about=(
        "Private steps (per-sample clipping, noise, one sum over all ranks) of a transformer on P "
        "ranks of this machine: a GPU each, or one core and one thread each, and never more ranks "
        "than cores. Efficiency is throughput(P) / (P throughput(1)); rank 0 by itself takes "
        "turns with all of them, so that both see the same machine. Before anything is timed, the "
        "ranks' step without noise is compared with a loop over single samples in one process. P, "
        "B and T are those of tables that earlier libraries published (dp-flash-attention and "
        "torchbridge). Bytes, memory and more ways to share the work are "
        "in `dpflash bench scaling`."
    ),
    plan=lambda request: [sample_rows, context_rows, node_rows],
    derive=throughput_rows,
    on_ranks=True,
    tables=(
        Table(
            SAMPLES,
            "The samples of a step spread over P ranks: strong scaling",
            _STEPS,
            "A layer of 12 heads of 64; B and T stay as P grows.",
        ),
        Table(
            CONTEXT,
            "The tokens of each sample spread over P ranks: weak scaling",
            _STEPS,
            "Two layers of 4 heads of 32. T grows with P; attention is dense, so a token's work "
            "grows too, and an efficiency below 100% is not lost time alone. For attention by "
            "itself see `dpflash bench scaling`.",
        ),
        Table(NODE, "Several machines", (column("ranks", "machines"), ("", milliseconds))),
    ),
    charts=(
        Chart(
            SAMPLES,
            "Throughput, strong scaling",
            _X,
            column("tasks_per_s", "steps/s"),
            lambda row: f"B {row['config']['batch']}, T {row['config']['tokens']}",
        ),
        Chart(
            CONTEXT,
            "Tokens/s, weak scaling",
            _X,
            column("tokens_per_s", "tokens/s"),
            lambda row: f"B {row['config']['batch']}",
        ),
    ),
)
