"""The suite "scaling": attention and private training on several ranks, and a model of more.

Letters: B samples, T tokens, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpflash import _validate

from .document import Chart, Column, column, columns, config, milliseconds
from .environment import usable_cores
from .ranks import EFFICIENCY, PEAK, TIMEOUT, P, X, blank_row, on_ranks
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
from .suite import Request, Row, Suite
from .suite_pages import page

SECTIONS = ("attention", "memory", "reported", "training", "model")

_MIB = 2**20
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

    def case(self, pattern: str, tokens: int, **more: Any) -> AttentionCase:
        """Attention by one rank; `more` are further fields of the case."""
        shape = (pattern, tokens, self.heads, self.head_dim)
        return AttentionCase(*shape, checked_tokens=self.checked_tokens, **more)


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
    """Options of the suite "scaling"."""

    ranks: Sequence[int] = (1, 2, 4)  # numbers of ranks
    sections: Sequence[str] = SECTIONS
    timeout: float = TIMEOUT  # of one launch of ranks, seconds
    flops: Sequence[float] = ()  # FLOP/s of a rank, for the model, beside the measured ones
    link_gbps: float | None = None  # GB/s of the model's link; None for LINKS
    link_latency_us: float = 5.0  # microseconds, of that link
    sizes: Sizes | None = None  # None for the usual ones

    def __post_init__(self) -> None:
        for number in self.ranks:
            _validate.positive_int(ranks=number)
        for section in self.sections:
            _validate.one_of(sections=(section, SECTIONS))
        link = 1.0 if self.link_gbps is None else self.link_gbps
        given = [{"timeout": self.timeout, "link_gbps": link}, *({"flops": f} for f in self.flops)]
        for values in given:
            _validate.positive(**values)
            _validate.finite(**values)
        _validate.non_negative(link_latency_us=self.link_latency_us)
        _validate.finite(link_latency_us=self.link_latency_us)
        most = max(_MOST_RANKS_A_CORE * usable_cores(), torch.cuda.device_count())
        if max(self.ranks) > most:
            raise ValueError(
                f"ranks={max(self.ranks)}: this machine has {usable_cores()} cores, too few "
                f"for more than {most} ranks; pass fewer"
            )


def _is_possible(case: AttentionCase, ranks: int) -> bool:
    """Whether its mode exists on so many ranks, and differs from "ring" there."""
    if ranks == 1:
        return case.mode == "ring"
    return case.mode != "ulysses" or case.heads >= ranks


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
        cases: Sequence[AttentionCase],
        request: Request,
        scaling: str = "strong",
    ) -> Iterator[Row]:
        """Cases on each number of ranks; their tokens are those of one rank.

        They take turns, but for those whose memory is measured.
        """
        tokens, is_memory = cases[0].tokens, section == "memory"
        more = {} if is_memory else {"scaling": scaling}
        given: dict[str, Any] = {"timeout": self.options.timeout, "tokens_alone": tokens}
        given["effort"] = None if is_memory else request.calls
        for ranks in self.options.ranks:
            whole = tokens * ranks if scaling == "weak" else tokens
            own = [replace(case, tokens=whole) for case in cases if _is_possible(case, ranks)]
            for turns in [[case] for case in own] if is_memory else [own]:
                rows = []
                for case in turns:
                    name = f"{case.pattern}/{case.mode}"
                    if not is_memory:
                        name = f"{spread(case.pattern, case.sharding)}/{case.mode}"
                        name = f"{scaling}/{name}/{'forward' + '+backward' * case.backward}"
                    rows.append(blank_row(section, f"{name}/T{whole}", case, ranks, **more))
                yield from on_ranks(rows, measure_attention, request, cases=turns, **given)

    def attention(self, request: Request) -> Iterator[Row]:
        """Attention, strong and weak scaling."""
        sizes = self._sizes(request)
        for scaling, lengths in (("strong", sizes.strong), ("weak", sizes.weak)):
            for pattern, sharding in SPREADS:
                if pattern in lengths:
                    case = sizes.case(pattern, lengths[pattern], sharding=sharding)
                    cases = [replace(case, mode=mode) for mode in MODES]
                    yield from self._attention("attention", cases, request, scaling)

    def reported(self, request: Request) -> Iterator[Row]:
        """Dilated attention at the sizes of a published table."""
        sizes = self._sizes(request)
        for batch, tokens in sizes.reported:
            case = sizes.case("dilated", tokens, batch=batch)
            cases = [case, replace(case, backward=False)]
            yield from self._attention("reported", cases, request)

    def memory(self, request: Request) -> Iterator[Row]:
        """Memory of attention on each rank."""
        sizes = self._sizes(request)
        for pattern, sharding, modes, tokens in sizes.memory:
            case = sizes.case(pattern, tokens, sharding=sharding)
            case = replace(case, checked_tokens=min(case.checked_tokens, tokens))
            cases = [replace(case, mode=mode) for mode in modes]
            yield from self._attention("memory", cases, request)

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
                    row = blank_row("training", name, case, ranks, scaling=scaling)
                    given: dict[str, Any] = {"case": case, "alone": alone}
                    given |= {"timeout": self.options.timeout, "effort": request.calls}
                    yield from on_ranks([row], measure_training, request, **given)

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


def _spread(row: Mapping[str, Any]) -> str:
    return spread(row["config"]["pattern"], row["config"]["sharding"])


def _scheme(row: Mapping[str, Any]) -> str:
    return {
        "replicated": "data parallel, replicated",
        "fsdp2": "data parallel, FSDP2",
        "context": "context parallel",
    }[row["config"]["scheme"]]


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


# Cells that are computed, by header.
_COMPUTED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict((P, EFFICIENCY, PEAK)),
    "pattern": _spread,
    "ranks are": _scheme,
    "direction": lambda row: "forward" + "+backward" * row["config"]["backward"],
    "ms": milliseconds,
    "ms of one rank": lambda row: (row.get("alone") or row)["median_ms"],
    "peak x P": _times_ranks("peak_memory_mb"),
    "saved x P": _times_ranks("saved_mb"),
    "MiB sent": _sent_mib,
    "MiB by purpose": _purposes,
    "FLOP/s": lambda row: f"{row['config']['flops']:.3g}",
}
_TIMES = "ms | ms of one rank | tokens_per_s: tokens/s | efficiency"
_BYTES = "MiB sent | bytes_equal: as predicted"
_TABLES = {
    "attention": f"scaling | pattern | mode | P | tokens: T | {_TIMES} | "
    f"work_efficiency: of work | {_BYTES} | balance | peak MiB of a rank | correct",
    "memory": "pattern | mode | P | tokens: T | peak MiB of a rank | peak x P | "
    "saved_mb: saved MiB | saved x P | correct",
    "reported": f"tokens: T | batch: B | P | direction | {_TIMES} | {_BYTES} | "
    "peak MiB of a rank | correct",
    "training": f"scaling | ranks are | P | batch: B | tokens: T | {_TIMES} | {_BYTES} | "
    "MiB by purpose | peak MiB of a rank | correct",
    "model": "scaling | pattern | FLOP/s | flops_source: which are | link | P | tokens: T | "
    "compute_ms: compute ms | exchange_ms: exchange ms | modelled_ms: modelled ms | "
    "modelled_overlapped_ms: overlapped ms | efficiency: modelled efficiency | "
    "efficiency_overlapped: overlapped",
}


def _columns(spec: str) -> Sequence[Column]:
    parts = spec.split(" | ")
    return columns(*([(part, _COMPUTED[part])] if part in _COMPUTED else part for part in parts))


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
    return Chart(section, title, X, (y[0], value), series, logarithmic=section == "memory")


def _by_mode(row: Mapping[str, Any]) -> str:
    return f"{_spread(row)}, {row['config']['mode']}"


def _by_link(row: Mapping[str, Any]) -> str:
    link, source = row["config"]["link"], row["config"]["flops_source"]
    return f"{_spread(row)}, {link.split(',')[0]}, {source}"


_EFFICIENCY, _MODEL = column("efficiency"), "MODEL, no measurement"
_OF_WORK = column("work_efficiency", "efficiency of work")
_CHARTS = (
    _chart("attention", "Attention", _EFFICIENCY, _by_mode, "strong"),
    _chart("attention", "Attention", _OF_WORK, _by_mode, "weak"),
    _chart("training", "Private training steps", _EFFICIENCY, _scheme, "strong"),
    _chart("training", "Private training steps", _EFFICIENCY, _scheme, "weak"),
    _chart("memory", "Peak memory of a rank, T fixed", PEAK, _by_mode),
    _chart("memory", "Kept by autograd, T fixed", column("saved_mb", "saved MiB"), _by_mode),
    _chart("attention", "Sent by the busiest rank", ("MiB sent", _sent_mib), _by_mode, "strong"),
    Chart(
        "reported",
        "Dilated attention, forward: peak memory of a rank",
        config("tokens", "T"),
        ("MiB", lambda row: None if row["config"]["backward"] else row["peak_memory_mb"]),
        lambda row: f"P {row['ranks']}",
    ),
    _chart("model", _MODEL, _EFFICIENCY, _by_link, "weak"),
    _chart("model", _MODEL, _EFFICIENCY, _by_link, "strong"),
)


def scaling_suite(options: Options) -> Suite:
    """The suite "scaling" with these options."""
    sections = _Sections(options)
    tables = {section: _columns(spec) for section, spec in _TABLES.items()}
    return Suite(
        name="scaling",
        **page("scaling", tables, {"assumptions": "; ".join(ASSUMPTIONS)}),
        plan=sections.plan,
        charts=_CHARTS,
        derive=sections.model,
        on_ranks=True,
    )


SUITE = scaling_suite(Options())
