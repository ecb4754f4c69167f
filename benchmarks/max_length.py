"""The suite "max-length": the longest sequence that attention takes in this memory and time.

Every call runs in a process of its own with limits of memory and time, so that a call too many
does no harm. T is the tokens of a sequence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dpflash.patterns import SlidingWindow

from . import output as results
from .attention import DIRECTIONS, goes_backward, longnet
from .attention_cases import TOLERANCES, Case, check, reference
from .document import Chart, Table, column, config, wrong
from .isolated import Failed, OutOfMemory, OutOfTime, brief, run_isolated
from .memory import device_memory, peak_growth
from .peers import build_run
from .suite import Request, Row, Suite, Unsupported, worst
from .timing import Stopwatch
from .variants import VARIANTS, Variant, fixed

SECTION = "max_length"
CEILING = "the ceiling of the search"

_HEADS, _HEAD_DIM = 8, 64
# Checked in each process: long enough that windows and short segments leave something out.
_CHECKED_TOKENS, _CHECKED_HEADS = 3072, 2
_WITHIN = 8  # the longest T is known to one part in this many
_LEAST = 256
# A search makes a dozen calls, and a call that fails takes longer than one may.
_CALLS = 24
# The time that a process takes to start and to check a short sequence, beside its call.
_SECONDS_AROUND = 10.0
_CPU_MEMORY = 4 * 2**30

SEARCHED: Mapping[str, Variant] = {
    "LongNet": Variant(
        "LongNet", "LongNet's own segments, five of them up to 32,768", fixed(longnet)
    ),
    "SlidingWindow": Variant(
        "SlidingWindow", "1,024 tokens back", fixed(SlidingWindow, window=1024)
    ),
    **{
        name: VARIANTS[name]
        for name in (
            "DilatedAttention",
            "BranchByBranch",
            "BlockSparse",
            "BlockSparseOptimized",
            "BlockSparseHierarchical",
            "BlockSparseAdaptive",
            "Dense",
            "SDPA",
        )
    },
}
_QUICK = ("LongNet", "DilatedAttention", "BlockSparseOptimized", "Dense", "SDPA")


@dataclass(frozen=True)
class Call:
    """A call of causal attention with B = 1; variant is of SEARCHED, direction of DIRECTIONS."""

    variant: str
    direction: str
    tokens: int
    dtype: str
    device: str
    seed: int


@dataclass(frozen=True)
class Measured:
    """The measurements of a call."""

    error: float  # relative, of the same variant at a small T
    seconds: float  # without warm-up
    peak_mb: float | None  # growth of its process in MiB, inputs included, where it is known


@dataclass(frozen=True)
class Found:
    """The end of a search."""

    tokens: int | None  # the longest T that succeeded
    failed_tokens: int | None  # the shortest T that failed
    stopped_by: str  # why it failed, or CEILING


def make_call(call: Call) -> Measured:
    """Checks a variant at a small T, then calls it once; runs in a process of its own."""
    variant, device = SEARCHED[call.variant], torch.device(call.device)
    pattern, backward = variant.pattern(call.tokens, True), goes_backward(call.direction)
    case = Case(pattern, call.tokens, 1, _HEADS, _HEAD_DIM, call.dtype, call.device)
    small = dataclasses.replace(case, tokens=_CHECKED_TOKENS, heads=_CHECKED_HEADS)
    inputs = small.inputs(call.seed)
    expected = reference(small, *inputs, with_grads=backward, seed=call.seed)
    error = worst(check(build_run(variant.operator, small), inputs, expected).values())
    del inputs, expected
    run = build_run(variant.operator, case)
    shape, dtype = (1, _HEADS, call.tokens, _HEAD_DIM), getattr(torch, call.dtype)
    seconds = 0.0

    def whole() -> None:
        nonlocal seconds
        q, k, v = (
            torch.randn(shape, dtype=dtype, device=device, requires_grad=backward)
            for _ in range(3)
        )
        if backward:
            do = torch.randn(shape, dtype=dtype, device=device)
            seconds = _seconds(lambda: torch.autograd.grad(run(q, k, v), (q, k, v), do), device)
        else:
            seconds = _seconds(lambda: run(q, k, v), device)

    peak = peak_growth(whole, device)
    return Measured(error, seconds, peak)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        return Stopwatch(device)(call)
    # Stopwatch overwrites the cache with a buffer that would count as memory here.
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def search(why_not: Callable[[int], str | None], first: int, ceiling: int) -> Found:
    """Doubles or halves T until calls begin to fail, then bisects.

    Args:
        why_not: makes a call with this T, and returns why it failed or None.
        first: T of the first call.
        ceiling: the largest T that is tried.
    """
    good, bad, tokens, reason = 0, 0, first, ""
    while bad == 0 or (good == 0 and bad > _LEAST) or (good and (bad - good) * _WITHIN > good):
        failure = why_not(tokens)
        if failure is None:
            good = tokens
            if good == ceiling:
                return Found(good, None, CEILING)
        else:
            bad, reason = tokens, failure
        tokens = min(2 * good, ceiling) if bad == 0 else (good + bad) // 2
    return Found(good or None, bad, reason)


class _WrongResult(Exception):
    """A result is wrong; the argument is its relative error."""


def _search_row(variant: str, direction: str, request: Request) -> Row:
    device = request.where
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    limit = int(device_memory(device) * 2**20) if device.type == "cuda" else _CPU_MEMORY
    call_seconds = request.limit / _CALLS
    first, ceiling = _range(request)
    row = results.row(
        f"{SECTION}/{variant}/{direction}",
        {
            "variant": variant,
            "direction": direction,
            "batch": 1,
            "heads": _HEADS,
            "head_dim": _HEAD_DIM,
            "dtype": dtype,
            "causal": True,
            "ceiling": ceiling,
        },
        section=SECTION,
        about=SEARCHED[variant].about,
        limit_bytes=limit,
        call_limit_s=call_seconds,
    )
    calls: dict[int, Measured] = {}

    def why_not(tokens: int) -> str | None:
        try:
            measured = run_isolated(
                make_call,
                # A GPU refuses such a call by itself.
                memory_limit=limit if device.type == "cpu" else None,
                timeout=call_seconds + _SECONDS_AROUND,
                call=Call(variant, direction, tokens, dtype, device.type, request.seed),
            )
        except OutOfMemory:
            return "memory"
        except OutOfTime:
            return "time"
        except Failed as error:
            return f"failure: {error}"
        if not measured.error <= TOLERANCES[dtype]:
            raise _WrongResult(measured.error)
        calls[tokens] = measured
        return "time" if measured.seconds > call_seconds else None

    try:
        found = search(why_not, first, ceiling)
    except Unsupported as reason:
        row["needs"] = str(reason)
    except _WrongResult as wrong_result:
        row.update(correct=False, error=wrong_result.args[0])
    except Exception as error:
        row.update(correct=False, failure=brief(error))
    else:
        row.update(
            max_tokens=found.tokens, failed_tokens=found.failed_tokens, stopped_by=found.stopped_by
        )
        if calls:
            row.update(correct=True, error=max(one.error for one in calls.values()))
        if found.tokens is not None:
            longest = calls[found.tokens]
            row.update(call_seconds=longest.seconds, peak_memory_mb=longest.peak_mb)
            if longest.peak_mb is not None:
                row["bytes_per_token"] = longest.peak_mb * 2**20 / found.tokens
    return row


def _range(request: Request) -> tuple[int, int]:
    """The first T and the ceiling of a search."""
    if request.where.type == "cuda":
        return (2**14, 2**17) if request.quick else (2**17, 2**21)
    return (2**11, 2**13) if request.quick else (2**12, 2**18)


def _searches(variant: str) -> Callable[[Request], Iterator[Row]]:
    def rows(request: Request) -> Iterator[Row]:
        # Starts the server of new processes, so that no call's time includes it.
        run_isolated(torch.get_num_threads)
        for direction in DIRECTIONS:
            yield _search_row(variant, direction, request)

    rows.__doc__ = f"Searching the longest sequence of {variant}."
    return rows


def _shown_tokens(row: Mapping[str, Any]) -> str | None:
    if row.get("failure"):
        return f"FAILED: {row['failure']}"
    if row["correct"] is False:
        return wrong(row)
    if row.get("needs"):
        return f"needs: {row['needs']}"
    if row["max_tokens"] is None:
        return f"fewer than {_LEAST:,}"
    return f"{row['max_tokens']:,}"


SUITE = Suite(
    name="max-length",
    title="The longest sequence that fits",
    about=(
        "The longest sequence of causal attention, one sample of 8 heads of 64, before the memory "
        "or the time of a call ends. A T that was stopped by memory compares the memory of the "
        "kinds; one stopped by time says how fast this machine is; one at the ceiling of the "
        "search does not say where the kind ends. `dpflash bench variants` explains the names.\n\n"
        "Lengths are doubled until a call fails, then bisected to within an eighth. Every call "
        "runs once, in a process of its own, which first checks the kind against its definition "
        f"at T = {_CHECKED_TOKENS:,}. The limit of memory is that of a process's private memory, "
        "with some 270 MB of the libraries' own, or a GPU's. q, k, v and the output's gradient "
        "count. The time of a call is a part of that of a row (--max-seconds)."
    ),
    plan=lambda request: [_searches(name) for name in (_QUICK if request.quick else SEARCHED)],
    tables=(
        Table(
            SECTION,
            "Longest sequences",
            (
                config("variant"),
                config("direction"),
                config("dtype"),
                ("longest T", _shown_tokens),
                column("stopped_by", "stopped by"),
                column("failed_tokens", "failed at"),
                column("limit_bytes", "limit of memory, bytes"),
                column("peak_memory_mb", "peak MiB there"),
                column("bytes_per_token", "bytes a token"),
                column("call_seconds", "seconds there, one cold call"),
                column("call_limit_s", "limit, seconds"),
                column("correct"),
            ),
            "Peak memory is what the process grew by, inputs included. dilated-attention-pytorch "
            "publishes, for forward passes alone, 16,384 to 524,288 tokens, of which 524,288 was "
            "the ceiling of the search.",
        ),
    ),
    charts=(
        Chart(
            SECTION,
            "Longest sequence within the limits (or the ceiling of the search)",
            ("variant", lambda row: row["config"]["variant"]),
            ("tokens", lambda row: row.get("max_tokens")),
            lambda row: str(row["config"]["direction"]),
        ),
    ),
)
