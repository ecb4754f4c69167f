"""Runs functions in fresh processes: one process with limits, or one process per rank."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from dpflash.distributed.collectives import RankError

_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")
# Likely reason for exit code 1. After the function begins, a process sends its error instead.
_NO_GUARD = (
    " and without a result. Most likely the process imported the script that started it, and so "
    'began to measure again; put the calls of the script under `if __name__ == "__main__":`'
)

_SECONDS_TO_START = 120.0
_SECONDS_BEHIND = 60.0  # collectives time out after the function, whose error names the ranks
# A rank that lost another rank waits this long, so that the other rank's failure is reported.
_SECONDS_FOR_OTHERS = 3.0
# Messages of gloo's plain RuntimeError about a rank that is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused")
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}

# Processes are forked from a server, which imports torch and the benchmarks once (torch._dynamo
# for optimizers). The list is set only here, so a program may replace it with more modules.
_FORKED: Any = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["dpflash.bench.scaling_tasks", "torch._dynamo"])

Call = tuple[Callable[..., Any], Mapping[str, Any]]


class Failed(Exception):
    """Raised if the process ended without a result."""


class OutOfMemory(Failed):
    """Raised if the function needed more memory than its limit."""


class OutOfTime(Failed):
    """Raised if the function took longer than its limit."""


def run_isolated(
    function: Callable[..., Any],
    *,
    memory_limit: int | None = None,
    timeout: float | None = None,
    **arguments: Any,
) -> Any:
    """Run ``function(**arguments)`` in a fresh process and return its result.

    Arguments and result are pickled; torch has as many threads as in this process. Raises the
    function's exception, or Failed if pickling failed or the process died. Raises OutOfMemory
    beyond `memory_limit` bytes of private memory (Linux), and OutOfTime beyond `timeout` seconds.
    """
    threads = torch.get_num_threads()
    for _, result in _results([(function, arguments)], threads, timeout, memory_limit):
        if isinstance(result, Exception):
            raise result
    return result


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *,
    device: str,
    timeout: float,
    **arguments: Any,
) -> list[Any]:
    """Run ``function(place, **arguments)`` on ranks, each a fresh process; return all results.

    On "cpu" each rank has one thread and gloo, on "cuda" one GPU and nccl. The processes have two
    minutes to start, and then `timeout` seconds to run. If a rank fails, all processes are ended
    and OutOfMemory or Failed is raised.
    """
    found: dict[int, Any] = {}
    limit = _SECONDS_TO_START + timeout
    with tempfile.TemporaryDirectory(prefix="dpflash-bench-") as folder:
        given = {
            "function": function,
            "arguments": arguments,
            "world_size": world_size,
            "device": device,
            "store": str(Path(folder) / "store"),
            "timeout": limit + _SECONDS_BEHIND,
        }
        calls = [(_run_rank, {**given, "rank": rank}) for rank in range(world_size)]
        try:
            for rank, result in _results(calls, 1, limit, None):
                if isinstance(result, Exception):
                    kind = OutOfMemory if isinstance(result, OutOfMemory) else Failed
                    raise kind(f"rank {rank} of {world_size} failed: {result}")
                found[rank] = result
        except OutOfTime:
            raise Failed(
                f"the ranks did not end within timeout={timeout:g} seconds and "
                f"{_SECONDS_TO_START:g} seconds to start; all were ended. Pass a longer timeout, "
                "or smaller sizes"
            ) from None
    return [found[rank] for rank in range(world_size)]


def _results(
    calls: Sequence[Call], threads: int, timeout: float | None, memory_limit: int | None
) -> Iterator[tuple[int, Any]]:
    """Yield (number of a call, its result or exception), in the order in which calls end.

    If the caller stops iterating, the processes that still run are killed.
    """
    running: dict[Any, tuple[int, Any]] = {}  # pipe -> (number of the call, process)
    try:
        for number, call in enumerate(calls):
            ours, theirs = _FORKED.Pipe(duplex=False)
            process = _FORKED.Process(
                target=_work, args=(theirs, call, memory_limit, threads), daemon=True
            )
            process.start()
            theirs.close()
            running[ours] = (number, process)
        deadline = None if timeout is None else time.monotonic() + timeout
        while running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(running), left)
            if not ready:
                raise OutOfTime(f"it took longer than {timeout:g} seconds")
            for pipe in running.keys() & set(ready):
                number, process = running[pipe]
                result = _received(pipe, process)
                _end(pipe, process)
                del running[pipe]
                yield number, result
    finally:
        for pipe, (_, process) in running.items():
            _end(pipe, process)


def _end(pipe: Connection, process: Any) -> None:
    process.kill()
    process.join()
    pipe.close()


def _received(pipe: Connection, process: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        process.join()
    if process.exitcode == -signal.SIGKILL:
        return OutOfMemory("the system ended the process, most likely because memory ran out")
    why = _NO_GUARD if process.exitcode == 1 else ""
    return Failed(f"its process ended with exit code {process.exitcode}{why}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports too little memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def brief(error: Exception) -> str:
    """Return an exception as one line: its type and its message."""
    return "".join(traceback.format_exception_only(error)).strip()


def _work(pipe: Connection, call: Call, memory_limit: int | None, threads: int) -> None:
    """Call the function in the fresh process, and send its result or exception."""
    # Ctrl-C reaches all processes of a terminal; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # tqdm's default lock is a semaphore of the system, which a killed process would leave behind.
    tqdm.set_lock(threading.RLock())
    torch.set_num_threads(threads)
    if memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, memory_limit))
    function, arguments = call
    try:
        pipe.send(function(**arguments))
    except Exception as error:
        if is_out_of_memory(error):
            pipe.send(OutOfMemory(brief(error).splitlines()[0]))
        else:
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                error = Failed(brief(error))
            pipe.send(error)


@dataclass(frozen=True)
class Place:
    """The rank on which a function runs, in the default group of torch.distributed."""

    rank: int
    world_size: int
    device: torch.device  # "cpu", or this rank's own GPU

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.rank])

    def all_true(self, value: bool) -> bool:
        """Whether the value is true on all ranks."""
        least = torch.tensor([int(value)], device=self.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return bool(least.item())


def _run_rank(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    rank: int,
    world_size: int,
    device: str,
    store: str,
    timeout: float,
) -> Any:
    own = torch.device("cpu")
    if device == "cuda":
        own = torch.device("cuda", rank)
        torch.cuda.set_device(own)
    try:
        dist.init_process_group(
            _BACKENDS[device],
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        place = Place(rank, world_size, own)
        place.barrier()
        result = function(place, **arguments)
        place.barrier()
        dist.destroy_process_group()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, RankError) or any(text in str(error) for text in _LOST):
            threading.Event().wait(_SECONDS_FOR_OTHERS)
        raise Failed(f"\n{traceback.format_exc()}") from None
    return result
