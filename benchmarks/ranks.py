"""Runs a function on the ranks of a torch.distributed group, processes of this machine."""

from __future__ import annotations

import tempfile
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

from dpflash.distributed.collectives import RankError

from .isolated import begin_process, fresh_processes

_SECONDS_FOR_OTHERS = 3.0  # in which other ranks' failures arrive after the first
_SECONDS_TO_START = 120.0
_SECONDS_BEHIND = 60.0  # by which exchanges time out later than the function, which names ranks
# Messages of gloo's plain RuntimeError about a rank that is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


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
    context = fresh_processes()
    processes: list[Any] = []
    pipes: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="dpflash-bench-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                place = (rank, world_size, device, str(Path(folder) / "store"), timeout)
                process = context.Process(
                    target=_run_rank, args=(theirs, function, arguments, *place), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _results(processes, pipes, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _results(processes: list[Any], pipes: list[Connection], timeout: float) -> list[Any]:
    started: set[int] = set()
    results: dict[int, Any] = {}
    failures: dict[int, _Failure | None] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    limit, deadline = _SECONDS_TO_START, time.monotonic() + _SECONDS_TO_START
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready and failures:
            break
        if not ready:
            what = "the ranks" if len(started) == len(pipes) else "starting"
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
                if len(started) == len(pipes):
                    limit, deadline = timeout, time.monotonic() + timeout
                continue
            del waiting[pipe]
            if kind == "done":
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + _SECONDS_FOR_OTHERS)
    if failures:
        raise RankFailed(_first_cause(processes, failures))
    return [results[rank] for rank in range(len(pipes))]


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
    begin_process(threads=1)
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
