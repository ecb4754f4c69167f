"""The suite "max-length": the longest sequence of attention within limits of memory and time.

Every call runs in its own process, which has these limits. T is the number of tokens of a
sequence.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from dpflash.patterns import SlidingWindow

from . import output
from .attention import DIRECTIONS, LONGNET, goes_backward, operator_subject
from .attention_cases import TOLERANCES, Case
from .document import Row, chart, columns, page, why_not
from .isolated import Failed, OutOfMemory, OutOfTime, run_isolated
from .memory import device_memory, peak_growth
from .peers import build_run
from .suite import Part, Request, Suite, refuse, worst
from .timing import Stopwatch
from .variants import VARIANTS, Variant, fixed

SECTION = "max_length"
CEILING = "the ceiling of the search"

_HEADS, _HEAD_DIM = 8, 64
# The size at which each process checks its variant, where windows and segments leave out pairs.
_CHECKED_TOKENS, _CHECKED_HEADS = 3072, 2
_WITHIN = 8  # the relative error of the longest T is at most 1 / _WITHIN
_LEAST = 256
# A call may take 1 / _CALLS of the row's time limit, since a search makes a dozen calls or more.
_CALLS = 24
# Seconds for a process to start and to check a short sequence, in addition to its call.
_SECONDS_AROUND = 10.0
_CPU_MEMORY = 4 * 2**30

_OWN = {
    "LongNet": Variant(fixed(LONGNET)),
    "SlidingWindow": Variant(fixed(SlidingWindow, window=1024)),
}
_SHARED = ["DilatedAttention", "BlockSparse", "BlockSparseOptimized"]
_SHARED += ["BlockSparseHierarchical", "BlockSparseAdaptive", "Dense", "SDPA"]
SEARCHED = _OWN | {name: VARIANTS[name] for name in _SHARED}
_QUICK = ("LongNet", "DilatedAttention", "BlockSparseOptimized", "Dense", "SDPA")


class Measured(NamedTuple):
    """Error, time and memory of a call."""

    error: float  # relative error of the same variant at a small T
    seconds: float  # time of the call, without a warm-up
    peak_mb: float | None  # growth of memory in MiB, including inputs; None if unknown


def make_call(
    *, variant: str, direction: str, tokens: int, dtype: str, device: str, seed: int
) -> Measured:
    """Check a variant of SEARCHED at a small T, then measure a causal call on one sample."""
    own, where, backward = SEARCHED[variant], torch.device(device), goes_backward(direction)
    case = Case(own.pattern(tokens, True), tokens, 1, _HEADS, _HEAD_DIM, dtype, device)
    small = dataclasses.replace(case, tokens=_CHECKED_TOKENS, heads=_CHECKED_HEADS)
    error = operator_subject(small, own.operator, direction, seed).error()
    run, seconds = build_run(own.operator, case), 0.0

    def whole() -> None:
        nonlocal seconds
        inputs = case.inputs(seed, with_do=backward)

        def call() -> None:
            with torch.set_grad_enabled(backward):
                o = run(*inputs[:3])
            if backward:
                torch.autograd.grad(o, inputs[:3], inputs[3])

        seconds = _seconds(call, where)

    peak = peak_growth(whole, where)
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


def search(
    why_failed: Callable[[int], str | None], first: int, ceiling: int
) -> tuple[int | None, int | None, str]:
    """Double or halve T, beginning with `first`, until calls begin to fail, then bisect.

    `why_failed` makes a call with T tokens and returns the reason why it failed, or None. Returns
    (longest T that succeeded, shortest T that failed, reason of its failure or CEILING).
    """
    good, bad, tokens, reason = 0, 0, first, ""
    while bad == 0 or (good == 0 and bad > _LEAST) or (good and (bad - good) * _WITHIN > good):
        failure = why_failed(tokens)
        if failure is None:
            good = tokens
            if good == ceiling:
                return good, None, CEILING
        else:
            bad, reason = tokens, failure
        tokens = min(2 * good, ceiling) if bad == 0 else (good + bad) // 2
    return good or None, bad, reason


def _search_row(variant: str, direction: str, request: Request) -> dict[str, Any]:
    device = request.where
    is_cuda = device.type == "cuda"
    dtype = "bfloat16" if is_cuda else "float32"
    limit = int(device_memory(device) * 2**20) if is_cuda else _CPU_MEMORY
    call_seconds = request.limit / _CALLS
    given: dict[str, Any] = {"variant": variant, "direction": direction, "dtype": dtype}
    shape = {"batch": 1, "heads": _HEADS, "head_dim": _HEAD_DIM, "causal": True}
    name = f"{SECTION}/{variant}/{direction}"
    row = output.row(name, {**given, **shape}, section=SECTION, limit_bytes=limit)
    calls: dict[int, Measured] = {}

    def failure(tokens: int) -> str | None:
        try:
            measured = run_isolated(
                make_call,
                # A GPU raises its own error if its memory does not suffice.
                memory_limit=None if is_cuda else limit,
                timeout=call_seconds + _SECONDS_AROUND,
                **given,
                tokens=tokens,
                device=device.type,
                seed=request.seed,
            )
        except OutOfMemory:
            return "memory"
        except OutOfTime:
            return "time"
        except Failed as error:
            return f"failure: {error}"
        calls[tokens] = measured
        return "time" if measured.seconds > call_seconds else None

    try:
        longest, shortest, stopped_by = search(failure, *_range(request))
    except Exception as error:
        refuse(row, error)
        return row
    if calls:
        row["error"] = worst(one.error for one in calls.values())
        row["correct"] = row["error"] <= TOLERANCES[dtype]
        if not row["correct"]:
            return row
    row.update(max_tokens=longest, failed_tokens=shortest, stopped_by=stopped_by)
    if longest is not None:
        _, row["call_seconds"], row["peak_memory_mb"] = calls[longest]
    return row


def _range(request: Request) -> tuple[int, int]:
    if request.where.type == "cuda":
        return (2**14, 2**17) if request.quick else (2**17, 2**21)
    return (2**11, 2**13) if request.quick else (2**12, 2**18)


def _searches(variant: str) -> Part:
    def rows(request: Request) -> Iterator[dict[str, Any]]:
        # Starts the server of new processes, so that no call's time includes it.
        run_isolated(torch.get_num_threads)
        for direction in DIRECTIONS:
            yield _search_row(variant, direction, request)

    rows.__doc__ = f"Searching the longest sequence of {variant}."
    return rows


def _shown_tokens(row: Row) -> str:
    if reason := why_not(row):
        return reason
    return f"fewer than {_LEAST:,}" if row["max_tokens"] is None else f"{row['max_tokens']:,}"


_COLUMNS = columns(
    "variant | direction | dtype",
    [("longest T", _shown_tokens)],
    "stopped_by: stopped by | failed_tokens: failed at | limit_bytes: limit of memory, bytes",
    "peak_memory_mb: peak MiB there | call_seconds: seconds there, one cold call | correct",
)
_TITLE = "Longest sequence within the limits (or the ceiling of the search)"
SUITE = Suite(
    name="max-length",
    **page("max-length", {SECTION: _COLUMNS}, {"tokens": _CHECKED_TOKENS}),
    plan=lambda request: [_searches(name) for name in (_QUICK if request.quick else SEARCHED)],
    charts=[chart(SECTION, _TITLE, "variant", "max_tokens: tokens", "direction")],
)
