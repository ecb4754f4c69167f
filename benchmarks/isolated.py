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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import (
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)
from tqdm import tqdm

from dpflash.distributed.collectives import RankError

_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")
# A process that reaches the function sends what it raises.
_NO_GUARD = (
    " and without a result. Most likely it imported the script that started it, which began to "
    'measure again; put what the script runs under `if __name__ == "__main__":`'
)

_SECONDS_TO_START = 120.0
_SECONDS_BEHIND = 60.0  # by which exchanges time out later than the function, which names ranks
# A rank that lost another waits so long, for the other's failure to be the first.
_SECONDS_FOR_OTHERS = 3.0
# Messages of gloo's plain RuntimeError about a rank that is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Failed(Exception):
    """The process ended without a result."""


class OutOfMemory(Failed):
    """The function needed more memory than its limit."""


class OutOfTime(Failed):
    """The function took longer than its limit."""


def _server() -> Any:
    """Starts processes as copies of a server, which imports torch and the benchmarks once."""
    context = multiprocessing.get_context("forkserver")
    # An optimizer imports torch._dynamo.
    context.set_forkserver_preload(["dpflash.bench.scaling_tasks", "torch._dynamo"])
    return context


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
    context = _server()
    ours, theirs = context.Pipe(duplex=False)
    threads = threads or torch.get_num_threads()
    process = context.Process(
        target=_work, args=(theirs, function, arguments, memory_limit, threads), daemon=True
    )
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise OutOfTime(f"it took longer than {timeout:g} seconds")
        kind, value = ours.recv()
    except EOFError:
        process.join()
        if process.exitcode == -9:
            raise OutOfMemory("the system ended it, most likely for memory") from None
        why = _NO_GUARD if process.exitcode == 1 else ""
        raise Failed(f"its process ended with exit code {process.exitcode}{why}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if kind == "memory":
        raise OutOfMemory(value)
    if kind == "failed":
        raise value
    return value


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
        timeout: seconds that it may take, beside two minutes to start.

    Raises:
        RankFailed: a rank raised or died, or the time is up; all processes have ended then.
    """
    _server()
    deadline = time.monotonic() + _SECONDS_TO_START + timeout
    with tempfile.TemporaryDirectory(prefix="dpflash-bench-") as folder:
        given = (function, arguments, world_size, device, Path(folder), timeout)
        ranks = start_processes(
            _run_rank, given, world_size, join=False, daemon=True, start_method="forkserver"
        )
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    raise RankFailed(
                        f"the ranks did not end within timeout={timeout:g} seconds, and "
                        f"{_SECONDS_TO_START:g} to start; all were ended. Pass a longer timeout, "
                        "or smaller sizes"
                    )
        except ProcessRaisedException as error:
            raise RankFailed(
                f"rank {error.error_index} of {world_size} failed:\n{error}"
            ) from None
        except ProcessExitedException as error:
            raise RankFailed(
                f"rank {error.error_index} of {world_size} died with exit code "
                f"{error.exit_code}; if it was killed for memory, pass smaller sizes or fewer "
                "ranks"
            ) from None
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [pickle.loads(_result(Path(folder), n).read_bytes()) for n in range(world_size)]


def _result(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    world_size: int,
    device: str,
    folder: Path,
    timeout: float,
) -> None:
    _begin(threads=1)
    own = torch.device("cpu")
    if device == "cuda":
        own = torch.device("cuda", rank)
        torch.cuda.set_device(own)
    try:
        dist.init_process_group(
            _BACKENDS[device],
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=_SECONDS_TO_START + timeout + _SECONDS_BEHIND),
        )
        place = Place(rank, world_size, own)
        place.barrier()
        result = function(place, **arguments)
        place.barrier()
        dist.destroy_process_group()
    except Exception as error:
        if isinstance(error, RankError) or any(text in str(error) for text in _LOST):
            threading.Event().wait(_SECONDS_FOR_OTHERS)
        raise
    _result(folder, rank).write_bytes(pickle.dumps(result))
