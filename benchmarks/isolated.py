"""Runs a function in a process of its own, with limits of memory and time."""

from __future__ import annotations

import multiprocessing
import pickle
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

import torch
from tqdm import tqdm

_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory", "bad_alloc")
# In an isolated process: the pipe to the process that waits for it.
_pipe: Connection | None = None
# A process that reaches the function sends what it raises.
_NO_GUARD = (
    " and without a result. Most likely it imported the script that started it, which began to "
    'measure again; put what the script runs under `if __name__ == "__main__":`'
)


class Failed(Exception):
    """The process ended without a result."""


class OutOfMemory(Failed):
    """The function needed more memory than its limit."""


class OutOfTime(Failed):
    """The function took longer than its limit."""


def fresh_processes() -> ForkServerContext:
    """Starts processes as copies of a server that has imported torch and the benchmarks once."""
    context = multiprocessing.get_context("forkserver")
    # Importing takes seconds; an optimizer imports torch._dynamo.
    context.set_forkserver_preload(["dpflash.bench.suite", "torch._dynamo"])
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
    context = fresh_processes()
    ours, theirs = context.Pipe(duplex=False)
    given = (theirs, function, arguments, memory_limit, threads or torch.get_num_threads())
    process = context.Process(target=_work, args=given, daemon=True)
    process.start()
    theirs.close()
    try:
        kind, value = _result(ours, timeout)
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


def begin_process(threads: int) -> None:
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
    begin_process(threads)
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
