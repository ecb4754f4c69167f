"""The suite "scaling": attention, its memory and private training on several ranks.

Letters: B samples, T tokens, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dpflash import _validate
from dpflash.clipping.device_speed import usable_cores

from .document import Chart, Column, column, columns, milliseconds, page
from .ranks import CPU_OVERHEAD, EFFICIENCY, OVER_PLAIN, PEAK, P, X, blank_row, on_ranks
from .scaling_tasks import (
    MODES,
    SPREADS,
    AttentionCase,
    TrainingCase,
    measure_attention,
    measure_training,
    spread,
)
from .suite import Request, Row, Suite

RANKS = (1, 2, 4)
_MORE_TRIALS = 3  # factor for the number of trials of data parallel steps
SCALINGS = ("strong", "weak")
SECTIONS = ("attention", "memory", "reported", "training")

_MOST_RANKS_A_CORE = 8
# In weak scaling, the samples of each rank are a quarter of the samples of strong scaling.
_PARTS = 4


@dataclass(frozen=True)
class Sizes:
    """Sizes of the suite "scaling"."""

    attention: Mapping[str, int]  # pattern -> T in strong scaling; in weak T / 2 for each rank
    memory: Mapping[str, int]  # pattern -> T
    reported: Sequence[tuple[int, int]]  # (B, T) of a published table of dilated attention
    training: Sequence[TrainingCase]  # cases of strong scaling


def _training_cases(batch: int, tokens: int, context: int, width: int) -> list[TrainingCase]:
    """Return data parallel cases of `batch` samples, and context parallel cases of 1 and 2."""
    shapes = [("replicated", batch, tokens), ("fsdp2", batch, tokens)]
    shapes += [("context", 1, context), ("context", 2, context // 2)]
    return [TrainingCase(*shape, width=width) for shape in shapes]


FULL_SIZES = Sizes(
    attention={"dense causal": 4096, "dilated": 8192, "sliding window": 8192},
    memory={"dense causal": 16384, "dilated": 65536},
    reported=((2, 1024), (2, 2048), (1, 4096), (1, 8192), (1, 16384)),
    training=_training_cases(16, 512, 8192, width=128),
)
QUICK_SIZES = Sizes(
    attention={"dense causal": 1024, "dilated": 2048, "sliding window": 2048},
    memory={"dense causal": 4096, "dilated": 16384},
    reported=FULL_SIZES.reported[:3],
    training=_training_cases(8, 128, 512, width=64),
)


def _is_possible(case: AttentionCase, ranks: int) -> bool:
    """Whether `ranks` ranks support the case's mode; on one rank only "ring" is measured."""
    if ranks == 1:
        return case.mode == "ring"
    return case.mode != "ulysses" or case.heads >= ranks


@dataclass(frozen=True)
class _Sections:
    ranks: Sequence[int]
    sizes: Sizes | None
    names: Sequence[str]

    def plan(self, request: Request) -> Sequence[Callable[[Request], Iterator[Row]]]:
        return [getattr(self, name) for name in self.names]

    def _sizes(self, request: Request) -> Sizes:
        return self.sizes or (QUICK_SIZES if request.quick else FULL_SIZES)

    def _attention(
        self,
        section: str,
        cases: Sequence[AttentionCase],
        request: Request,
        scaling: str = "strong",
    ) -> Iterator[Row]:
        """Yield the rows of cases, which are timed in turns; for weak scaling, T is times P."""
        tokens = cases[0].tokens
        given: dict[str, Any] = {"tokens_alone": tokens}
        given["effort"] = None if section == "memory" else request.calls
        for ranks in self.ranks:
            whole = tokens * ranks if scaling == "weak" else tokens
            own = [replace(case, tokens=whole) for case in cases if _is_possible(case, ranks)]
            rows = []
            for case in own:
                name = f"{scaling}/{spread(case.pattern, case.sharding)}/{case.mode}/T{whole}"
                rows.append(blank_row(section, name, case, ranks, scaling=scaling))
            if own:
                yield from on_ranks(rows, measure_attention, request, cases=own, **given)

    def attention(self, request: Request) -> Iterator[Row]:
        sizes = self._sizes(request)
        for scaling in SCALINGS:
            for pattern, sharding in SPREADS:
                tokens = sizes.attention[pattern] // (2 if scaling == "weak" else 1)
                case = AttentionCase(pattern, tokens, sharding=sharding)
                cases = [replace(case, mode=mode) for mode in MODES]
                yield from self._attention("attention", cases, request, scaling)

    def memory(self, request: Request) -> Iterator[Row]:
        sizes = self._sizes(request)
        for pattern, sharding, modes in (
            ("dense causal", "zigzag", MODES),
            ("dilated", "contiguous", MODES[:1]),
        ):
            for mode in modes:
                case = AttentionCase(pattern, sizes.memory[pattern], sharding=sharding, mode=mode)
                yield from self._attention("memory", [case], request)

    def reported(self, request: Request) -> Iterator[Row]:
        """Yield rows of the forward of dilated attention at the sizes of a published table."""
        sizes = self._sizes(request)
        for batch, tokens in sizes.reported:
            case = AttentionCase("dilated", tokens, batch=batch, backward=False)
            yield from self._attention("reported", [case], request)

    def training(self, request: Request) -> Iterator[Row]:
        for ranks in self.ranks:
            for whole in self._sizes(request).training:
                if ranks == 1 and whole.scheme == "fsdp2":
                    continue  # on one rank this is the same as "replicated"
                cases = [("strong", whole, whole)]
                if whole.scheme != "context":
                    part = replace(whole, batch=max(1, whole.batch // _PARTS))
                    cases.append(("weak", replace(part, batch=part.batch * ranks), part))
                for scaling, case, alone in cases:
                    name = f"{scaling}/{case.scheme}/B{case.batch}/T{case.tokens}"
                    row = blank_row("training", name, case, ranks, scaling=scaling)
                    given: dict[str, Any] = {"case": case, "alone": alone}
                    # Short steps of processes that wait for one another vary most.
                    more = 1 if whole.scheme == "context" else _MORE_TRIALS
                    effort = replace(request.calls, trials=more * request.calls.trials)
                    given["effort"] = effort
                    yield from on_ranks([row], measure_training, request, **given)


def _spread(row: Mapping[str, Any]) -> str:
    return spread(row["config"]["pattern"], row["config"]["sharding"])


def _by_mode(row: Mapping[str, Any]) -> str:
    return f"{_spread(row)}, {row['config']['mode']}"


def _scheme(row: Mapping[str, Any]) -> str:
    return {
        "replicated": "data parallel, replicated",
        "fsdp2": "data parallel, FSDP2",
        "context": "context parallel",
    }[row["config"]["scheme"]]


def _case(row: Mapping[str, Any]) -> str:
    config = row["config"]
    return f"{_scheme(row)}, B {config['batch']}, T {config['tokens']}"


# Header of a column -> function that computes a row's cell.
_COMPUTED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict((P, EFFICIENCY, *OVER_PLAIN)),
    "pattern": _spread,
    "ranks are": _scheme,
    "direction": lambda row: "forward" + "+backward" * row["config"]["backward"],
    "ms": milliseconds,
    "ms of one rank": lambda row: (row.get("alone") or row)["median_ms"],
}
_TIMES = "ms | ms of one rank | tokens_per_s: tokens/s | efficiency"
_END = "peak_memory_mb: peak MiB of a rank | correct"
_TABLES = {
    "attention": f"scaling | pattern | mode | P | tokens: T | {_TIMES} | "
    f"work_efficiency: of work | {_END}",
    "memory": f"pattern | mode | P | tokens: T | {_END}",
    "reported": f"tokens: T | batch: B | P | direction | {_TIMES} | {_END}",
    "training": f"scaling | ranks are | P | batch: B | tokens: T | {_TIMES} | "
    f"{' | '.join(header for header, _ in OVER_PLAIN)} | {_END}",
}


def _scaled(
    section: str, title: str, scaling: str, y: Column, series: Callable[[Mapping[str, Any]], str]
) -> Chart:

    def value(row: Mapping[str, Any]) -> Any:
        return y[1](row) if row["config"]["scaling"] == scaling else None

    title = f"{title}, {scaling} scaling"
    return Chart(section, title, X, (y[0], value), series, logarithmic=False)


_EFFICIENCY, _OF_WORK = column("efficiency"), column("work_efficiency", "efficiency of work")
_CHARTS = (
    _scaled("attention", "Attention", "strong", _EFFICIENCY, _by_mode),
    _scaled("attention", "Attention", "weak", _OF_WORK, _by_mode),
    _scaled("training", "Private steps", "strong", column("cpu_overhead", CPU_OVERHEAD[0]), _case),
    _scaled("training", "Private steps", "strong", _EFFICIENCY, _case),
    _scaled("training", "Private steps", "weak", _EFFICIENCY, _scheme),
    Chart("memory", "Peak memory of a rank, T fixed", X, PEAK, _by_mode),
)


def scaling_suite(
    ranks: Sequence[int] = RANKS,
    sizes: Sizes | None = None,
    sections: Sequence[str] = SECTIONS,
) -> Suite:
    """Return the suite "scaling" for these numbers of ranks; only tests pass `sizes`.

    If only some sections are run, the suite's name lists them, so that other files are kept.
    """
    for section in sections:
        _validate.one_of(sections=(section, SECTIONS))
    for number in ranks:
        _validate.positive_int(ranks=number)
    most = max(_MOST_RANKS_A_CORE * usable_cores(), torch.cuda.device_count())
    if max(ranks) > most:
        raise ValueError(
            f"ranks={max(ranks)}: this machine has {usable_cores()} cores, too few for more than "
            f"{most} ranks; pass fewer ranks"
        )
    tables = {name: columns(_TABLES[name], computed=_COMPUTED) for name in sections}
    return Suite(
        name="-".join(["scaling", *(sections if len(sections) < len(SECTIONS) else ())]),
        **page("scaling", tables),
        plan=_Sections(ranks, sizes, sections).plan,
        charts=[chart for chart in _CHARTS if chart.section in sections],
        on_ranks=True,
    )


SUITE = scaling_suite()
