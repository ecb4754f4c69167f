"""Time and memory of one call of attention, for `bench_attention.py` and `tune_attention.py`."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import _attention_cases as cases
import torch
from _attention_cases import Case, Run
from torch import Tensor

WARM_UP = 3
FEWEST_ROUNDS = 5
FLUSHED_BYTES = 2**28
# About a millisecond, in which the host queues what is timed.
HEAD_START_CYCLES = 2_000_000

Step = Callable[[], object]


def build_step(direction: str, run: Run, inputs: Sequence[Tensor]) -> Step:
    """What is timed: a closure that makes one call."""
    q, k, v, do = inputs
    if direction == "forward":

        def forward() -> Tensor:
            with torch.no_grad():
                return run(q, k, v)

        return forward
    if direction == "backward":
        o = run(q, k, v)
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    return lambda: torch.autograd.grad(run(q, k, v), (q, k, v), do)


class Stopwatch:
    """Seconds of a call, by the clock that is the most telling on a device."""

    def __init__(self, device: str) -> None:
        self.cuda = device != "cpu"
        self.one_thread = torch.get_num_threads() == 1
        if self.cuda:
            self.name = "CUDA events, L2 overwritten, queued ahead"
            self.flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
        else:
            self.name = "CPU time" if self.one_thread else "wall"

    def __call__(self, step: Step) -> float:
        if self.cuda:
            self.flush.zero_()
            # Keeps the GPU busy while the call is being queued, so that Python is not timed.
            torch.cuda._sleep(HEAD_START_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        clock = time.process_time if self.one_thread else time.perf_counter
        begin = clock()
        step()
        return clock() - begin


def time_steps(
    steps: dict[str, Step], rounds: int, stopwatch: Stopwatch
) -> dict[str, list[float]]:
    """Seconds of each round for each provider, interleaved."""
    providers = list(steps)
    seconds: dict[str, list[float]] = {provider: [] for provider in providers}
    for number in range(WARM_UP + rounds):
        # The order turns, so that nobody always follows the same neighbour.
        shift = number % len(providers)
        for provider in providers[shift:] + providers[:shift]:
            taken = stopwatch(steps[provider])
            if number >= WARM_UP:
                seconds[provider].append(taken)
    return seconds


def median_interval(values: Sequence[float]) -> list[float]:
    """The 95% interval of the median by order statistics; below 6 values their whole range."""
    ordered, n = sorted(values), len(values)
    outside, k = 0.0, 0
    # The largest k with P(fewer than k of n values below the median) <= 2.5%.
    while k < n // 2 and outside + math.comb(n, k) / 2**n <= 0.025:
        outside += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return [ordered[k - 1], ordered[n - k]]


def planned_rounds(seconds: float, providers: int, rounds: int, limit: float) -> int:
    """As many rounds as fit the limit of a case, 0 if not even the fewest do."""
    fitting = int(limit / max(seconds * providers, 1e-9)) - WARM_UP
    return 0 if fitting < min(FEWEST_ROUNDS, rounds) else min(rounds, fitting)


def peak_on_gpu(step: Step) -> float:
    """MiB that the allocator gave out at most, beyond what it had given out before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_on_cpu(case: Case, provider: str, direction: str) -> float:
    """MiB by which the peak resident memory grows, in a process that did nothing before."""
    context = multiprocessing.get_context("forkserver")
    # The server imports once; its children begin as fresh copies of it.
    context.set_forkserver_preload(["torch", "dpflash"])
    with context.Pool(1) as pool:
        return pool.apply(resident_growth, (case, provider, direction))


def resident_growth(case: Case, provider: str, direction: str) -> float:
    """See `peak_on_cpu`; runs in the fresh process."""
    torch.set_num_threads(1)
    small = Case("dense", True, 64, 1, 1, case.head_dim, case.dtype, "cpu")
    build_step(direction, cases.build(provider, small), small.inputs())()
    step = build_step(direction, cases.build(provider, case), case.inputs())
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    before = resident * os.sysconf("SC_PAGE_SIZE") / 2**20
    # Begins a new peak, so that making the inputs does not count.
    Path("/proc/self/clear_refs").write_text("5")
    step()
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 2**10 - before
