"""Runs functions in fresh processes: one with limits, or the ranks of a distributed group."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tqdm import tqdm

from dpflash.distributed.collectives import RankError

_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")
# In an isolated process: the pipe to the process that waits for it.
_pipe: Connection | None = None
# A process that reaches the function sends what it raises.
_NO_GUARD = (
    " and without a result. Most likely it imported the script that started it, which began to "
    'measure again; put what the script runs under `if __name__ == "__main__":`'
)

_SECONDS_FOR_OTHERS = 3.0  # in which other ranks' failures arrive after the first
_SECONDS_TO_START = 120.0
_SECONDS_BEHIND = 60.0  # by which exchanges time out later than the function, which names ranks
# Messages of gloo's plain RuntimeError about a rank that is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Failed(Exception):
    """The process ended without a result."""


class OutOfMemory(Failed):
    """The function needed more memory than its limit."""


class OutOfTime(Failed):
    """The function took longer than its limit."""


def _start(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Starts a process that calls ``target(pipe, *arguments)``; returns it and the other end.

    It is a copy of a server that has imported torch and the benchmarks once, which takes seconds.
    """
    context = multiprocessing.get_context("forkserver")
    # An optimizer imports torch._dynamo.
    context.set_forkserver_preload(["dpflash.bench.scaling_tasks", "torch._dynamo"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _end(process: Any, pipe: Connection) -> None:
    process.kill()
    process.join()
    pipe.close()


def run_isolated(
    function: Callable[..., Any],
    *,
    memory_limit: int | None = None,
    timeout: float | None = None,
    threads: int | None = None,
    **arguments: Any,
) -> Any:
    """Returns ``function(**arguments)``, called in a fresh process.

    Args:
        function: of a module; it, its arguments and its result travel by pickle.
        memory_limit: bytes of private memory that the process may take (Linux).
        timeout: seconds, after which the process is killed.
        threads: of torch; those of this process by default.

    Raises:
        OutOfMemory: it needed more than the limit, or the system killed it.
        OutOfTime: it took longer.
        Failed: its process died, or raised what does not travel by pickle.
        Exception: whatever else the function raised.
    """
    threads = threads or torch.get_num_threads()
    process, ours = _start(_work, function, arguments, memory_limit, threads)
    try:
        kind, value = _result(ours, timeout)
    except EOFError:
        process.join()
        if process.exitcode == -9:
            raise OutOfMemory("the system ended it, most likely for memory") from None
        why = _NO_GUARD if process.exitcode == 1 else ""
        raise Failed(f"its process ended with exit code {process.exitcode}{why}") from None
    finally:
        _end(process, ours)
    if kind == "memory":
        raise OutOfMemory(value)
    if kind == "failed":
        raise value
    return value


def report_phase(phase: str) -> None:
    """Reports to the waiting process what begins now, for `OutOfTime` to name."""
    if _pipe is not None:
        _pipe.send(("phase", phase))


def _result(pipe: Connection, timeout: float | None) -> tuple[str, Any]:
    phase, began = "it", time.monotonic()
    while pipe.poll(timeout and max(0.0, began + timeout - time.monotonic())):
        kind, value = pipe.recv()
        if kind != "phase":
            return kind, value
        phase = value
    raise OutOfTime(f"{phase} took longer than {timeout:g} seconds")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports too little memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def brief(error: Exception) -> str:
    """An exception as one line: its type and its message."""
    return "".join(traceback.format_exception_only(error)).strip()


def _begin(threads: int) -> None:
    """Prepares a fresh process that another one waits for and kills."""
    # Ctrl-C reaches all processes of a terminal; the one that waits ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # tqdm's own lock is a semaphore of the system, which a killed process leaves behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(threads)


def _work(
    pipe: Connection,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    memory_limit: int | None,
    threads: int,
) -> None:
    global _pipe
    _pipe = pipe
    _begin(threads)
    if memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    try:
        pipe.send(("done", function(**arguments)))
    except Exception as error:
        if is_out_of_memory(error):
            pipe.send(("memory", brief(error).splitlines()[0]))
        else:
            pipe.send(("failed", error if _travels(error) else Failed(brief(error))))
    finally:
        pipe.close()


def _travels(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


class RankFailed(RuntimeError):
    """A rank raised, died, or did not end in time."""


@dataclass(frozen=True)
class Place:
    """Where a function runs: a rank of the default group of torch.distributed."""

    rank: int
    world_size: int
    device: torch.device  # "cpu", or a GPU of this rank's own

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.rank])

    def all_true(self, value: bool) -> bool:
        """Whether the value is true on all ranks."""
        least = torch.tensor([int(value)], device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return bool(least.item())


class _Failure(NamedTuple):
    """What a rank raised, when, and whether it only lost the other ranks."""

    is_lost: bool
    when: float
    trace: str


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *,
    device: str,
    timeout: float,
    **arguments: Any,
) -> list[Any]:
    """Returns what ``function(place, **arguments)`` returned on each rank.

    Args:
        function: of a module; it, its arguments and its result travel by pickle.
        world_size: number of processes, which are fresh.
        device: "cpu" (gloo, one thread each) or "cuda" (nccl, one GPU each).
        timeout: seconds that it may take; starting may take two minutes.

    Raises:
        RankFailed: a rank raised or died, or the time is up; all processes have ended then.
    """
    started: list[tuple[Any, Connection]] = []
    with tempfile.TemporaryDirectory(prefix="dpflash-bench-") as folder:
        try:
            for rank in range(world_size):
                place = (rank, world_size, device, str(Path(folder) / "store"), timeout)
                started.append(_start(_run_rank, function, arguments, *place))
            return _results_by_rank(started, timeout)
        finally:
            for process, pipe in started:
                _end(process, pipe)


def _results_by_rank(processes: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
    started: set[int] = set()
    results: dict[int, Any] = {}
    failures: dict[int, _Failure | None] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(processes)}
    limit, deadline = _SECONDS_TO_START, time.monotonic() + _SECONDS_TO_START
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            what = "the ranks" if len(started) == len(processes) else "starting"
            raise RankFailed(
                f"{what} did not end within timeout={limit:g} seconds on ranks "
                f"{sorted(waiting.values())}; all were ended. Pass a longer timeout, or smaller "
                "sizes"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                kind, value = pipe.recv()
            except (EOFError, OSError):
                kind, value = "failed", None
            if kind == "started":
                started.add(rank)
                if len(started) == len(processes):
                    limit, deadline = timeout, time.monotonic() + timeout
                continue
            del waiting[pipe]
            if kind == "done":
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OTHERS)
    if failures:
        raise RankFailed(_first_cause([process for process, _ in processes], failures))
    return [results[rank] for rank in range(len(processes))]


def _first_cause(processes: list[Any], failures: Mapping[int, _Failure | None]) -> str:
    """The message of the earliest failure of a rank that did not just lose the others."""

    def order(rank: int) -> tuple[int, float]:
        failure = failures[rank]
        return (1, 0.0) if failure is None else (2 if failure.is_lost else 0, failure.when)

    rank = min(failures, key=order)
    failure = failures[rank]
    if failure is not None:
        return f"rank {rank} of {len(processes)} failed:\n{failure.trace}"
    processes[rank].join(_SECONDS_FOR_OTHERS)
    return (
        f"rank {rank} of {len(processes)} died with exit code {processes[rank].exitcode}; if it "
        "was killed for memory, pass smaller sizes or fewer ranks"
    )


def _run_rank(
    pipe: Connection,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    rank: int,
    world_size: int,
    device: str,
    store: str,
    timeout: float,
) -> None:
    _begin(threads=1)
    try:
        own = torch.device("cpu")
        if device == "cuda":
            own = torch.device("cuda", rank)
            torch.cuda.set_device(own)
        dist.init_process_group(
            _BACKENDS[device],
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=max(timeout, _SECONDS_TO_START) + _SECONDS_BEHIND),
        )
        place = Place(rank, world_size, own)
        place.barrier()
        pipe.send(("started", None))
        result = function(place, **arguments)
        place.barrier()
        dist.destroy_process_group()
        pipe.send(("done", result))
    except BaseException as error:
        is_lost = isinstance(error, RankError) or any(text in str(error) for text in _LOST)
        pipe.send(("failed", _Failure(is_lost, time.monotonic(), traceback.format_exc())))
        raise SystemExit(1) from None
    finally:
        pipe.close()
