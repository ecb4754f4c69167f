"""The suite "scaling": attention, its memory and private training on several ranks.

Letters: B samples, T tokens, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dpflash import _validate

from .document import Chart, Column, column, columns, milliseconds, page
from .environment import usable_cores
from .ranks import EFFICIENCY, PEAK, P, X, blank_row, on_ranks
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

    def case(self, pattern: str, tokens: int, **more: Any) -> AttentionCase:
        """Attention by one rank; `more` are further fields of the case."""
        checked = min(self.checked_tokens, tokens)
        shape = (pattern, tokens, self.heads, self.head_dim)
        return AttentionCase(*shape, checked_tokens=checked, **more)


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


RANKS = (1, 2, 4)


def _is_possible(case: AttentionCase, ranks: int) -> bool:
    """Whether its mode exists on so many ranks, and differs from "ring" there."""
    if ranks == 1:
        return case.mode == "ring"
    return case.mode != "ulysses" or case.heads >= ranks


@dataclass(frozen=True)
class _Sections:
    """The sections of the suite "scaling"."""

    ranks: Sequence[int]
    sizes: Sizes | None

    def plan(self, request: Request) -> Sequence[Callable[[Request], Iterator[Row]]]:
        return self.attention, self.memory, self.reported, self.training

    def _sizes(self, request: Request) -> Sizes:
        return self.sizes or (QUICK_SIZES if request.quick else FULL_SIZES)

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
        given: dict[str, Any] = {"tokens_alone": tokens}
        given["effort"] = None if is_memory else request.calls
        for ranks in self.ranks:
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
            cases = [replace(case, mode=mode) for mode in modes]
            yield from self._attention("memory", cases, request)

    def training(self, request: Request) -> Iterator[Row]:
        """Private training steps, strong and weak scaling."""
        sizes = self._sizes(request)
        for ranks in self.ranks:
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
                    given["effort"] = request.calls
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


def _sent_mib(row: Mapping[str, Any]) -> float | None:
    """By the busiest rank."""
    if not row.get("bytes_counted"):
        return None
    return max(float(np.sum(each)) for each in row["bytes_counted"]) / _MIB


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
}
_TIMES = "ms | ms of one rank | tokens_per_s: tokens/s | efficiency"
_SENT = "MiB sent | bytes_equal: as predicted"
_TABLES = {
    "attention": f"scaling | pattern | mode | P | tokens: T | {_TIMES} | "
    f"work_efficiency: of work | {_SENT} | balance | peak MiB of a rank | correct",
    "memory": "pattern | mode | P | tokens: T | peak MiB of a rank | peak x P | "
    "saved_mb: saved MiB | saved x P | correct",
    "reported": f"tokens: T | batch: B | P | direction | {_TIMES} | {_SENT} | "
    "peak MiB of a rank | correct",
    "training": f"scaling | ranks are | P | batch: B | tokens: T | {_TIMES} | "
    "peak MiB of a rank | correct",
}


def _scaled(
    section: str,
    title: str,
    y: Column,
    series: Callable[[Mapping[str, Any]], str],
    scalings: Iterable[str] = ("strong", "weak"),
) -> Iterator[Chart]:
    """A panel over ranks for each kind of scaling."""
    for scaling in scalings:

        def value(row: Mapping[str, Any], scaling: str = scaling) -> Any:
            return y[1](row) if row["config"]["scaling"] == scaling else None

        title_of = f"{title}, {scaling} scaling"
        yield Chart(section, title_of, X, (y[0], value), series, logarithmic=False)


_EFFICIENCY, _OF_WORK = column("efficiency"), column("work_efficiency", "efficiency of work")
_CHARTS = (
    *_scaled("attention", "Attention", _EFFICIENCY, _by_mode, ["strong"]),
    *_scaled("attention", "Attention", _OF_WORK, _by_mode, ["weak"]),
    *_scaled("training", "Private training steps", _EFFICIENCY, _scheme),
    Chart("memory", "Peak memory of a rank, T fixed", X, PEAK, _by_mode),
    Chart("memory", "Kept by autograd, T fixed", X, column("saved_mb", "saved MiB"), _by_mode),
    Chart(
        "reported",
        "Dilated attention, forward: peak memory of a rank",
        column("tokens", "T"),
        ("MiB", lambda row: None if row["config"]["backward"] else row["peak_memory_mb"]),
        lambda row: f"P {row['ranks']}",
    ),
)


def scaling_suite(ranks: Sequence[int] = RANKS, sizes: Sizes | None = None) -> Suite:
    """The suite "scaling" on these numbers of ranks; sizes are for tests."""
    for number in ranks:
        _validate.positive_int(ranks=number)
    most = max(_MOST_RANKS_A_CORE * usable_cores(), torch.cuda.device_count())
    if max(ranks) > most:
        raise ValueError(
            f"ranks={max(ranks)}: this machine has {usable_cores()} cores, too few for more than "
            f"{most} ranks; pass fewer"
        )
    return Suite(
        name="scaling",
        **page(
            "scaling", {name: columns(spec, computed=_COMPUTED) for name, spec in _TABLES.items()}
        ),
        plan=_Sections(ranks, sizes).plan,
        charts=_CHARTS,
        on_ranks=True,
    )


SUITE = scaling_suite()
