"""Worker processes on this machine, which work through a list of tasks together."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dpflash.distributed.collectives import RankError

Task = tuple[Callable[..., Any], Mapping[str, Any]]

_SECONDS_FOR_OTHERS = 3.0  # in which the other workers' failures come in behind the first
_SECONDS_TO_START = 120.0
_SECONDS_BEHIND = 60.0  # by which exchanges time out later than tasks, which name who hangs
# What gloo says, in a plain RuntimeError, of a worker that is gone.
_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused")
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class TaskError(RuntimeError):
    """A task failed on a worker, or did not end in time."""


@dataclass(frozen=True)
class Place:
    """Where a task runs.

    Attributes:
        rank: this worker's number.
        world_size: how many workers there are, in the default group of torch.distributed.
        device: "cpu", or a GPU of this worker's own.
    """

    rank: int
    world_size: int
    device: torch.device

    def barrier(self) -> None:
        """Waits for all workers."""
        dist.barrier(device_ids=None if self.device.type == "cpu" else [self.rank])

    def all_say(self, said: bool) -> bool:
        """Whether all workers say yes."""
        told = torch.tensor([int(said)], device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MIN)
        return bool(told.item())


def run_workers(
    tasks: Sequence[Task], world_size: int, *, device: str, timeout: float
) -> Iterator[list[Any]]:
    """Starts workers, gives all of them the same tasks, and ends them.

    Args:
        tasks: (function, keywords) each; every worker calls ``function(place, **keywords)``.
            Functions, keywords and results travel by pickle.
        world_size: number of processes.
        device: "cpu" (gloo, one thread each) or "cuda" (nccl, one GPU each).
        timeout: seconds that each task may take; starting may take two minutes.

    Yields:
        For each task, when it is through, what the workers returned, by rank.

    Raises:
        TaskError: a worker failed or died (what it said is in the message), or the time is up;
            all workers have ended then.
    """
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dpflash-bench-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, world_size, device, str(Path(folder) / "store"), timeout)
                given = [(_ready, {}), *tasks]
                process = context.Process(
                    target=_work, args=(*arguments, given, theirs), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            told = _collected(len(tasks) + 1, processes, pipes, timeout)
            next(told)  # they have started
            yield from told
            for process in processes:
                process.join(timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _collected(
    count: int, processes: list[Any], pipes: list[Connection], timeout: float
) -> Iterator[list[Any]]:
    results: list[dict[int, Any]] = [{} for _ in range(count)]
    opened = dict(zip(pipes, range(len(pipes)), strict=True))
    for index in range(count):
        limit = timeout if index else max(timeout, _SECONDS_TO_START)
        deadline = time.monotonic() + limit
        while len(results[index]) < len(pipes):
            left = deadline - time.monotonic()
            ready = wait(list(opened), timeout=max(0.0, left))
            if not ready:
                missing = sorted(set(range(len(pipes))) - set(results[index]))
                what = f"task {index} of {count - 1}" if index else "starting"
                raise TaskError(
                    f"{what} did not end within timeout={limit:g} seconds on workers {missing}; "
                    "all were ended. Pass a longer timeout, or smaller sizes"
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = opened[pipe]
                try:
                    kind, number, value = pipe.recv()
                except (EOFError, OSError):
                    kind, number, value = "died", index, None
                if kind == "done":
                    results[number][rank] = value
                    continue
                if kind == "died":
                    del opened[pipe]
                    if rank in results[-1]:
                        continue
                raise TaskError(_blame(processes, pipes, opened, {rank: (kind, value)}))
        yield [results[index][rank] for rank in range(len(pipes))]


def _blame(
    processes: list[Any],
    pipes: list[Connection],
    opened: Mapping[Connection, int],
    failures: dict[int, tuple[str, Any]],
) -> str:
    """What is said of a failure: the first of a worker that did not just lose the others."""
    deadline = time.monotonic() + _SECONDS_FOR_OTHERS
    waiting = [pipe for pipe, rank in opened.items() if rank not in failures]
    while waiting and (ready := wait(waiting, timeout=max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                kind, _, value = pipe.recv()
            except (EOFError, OSError):
                kind, value = "died", None
            if kind != "done":
                waiting.remove(pipe)
                failures[opened[pipe]] = (kind, value)

    def weight(rank: int) -> tuple[int, float]:
        kind, value = failures[rank]
        return (1, 0.0) if kind == "died" else (2 if value.is_lost else 0, value.when)

    rank = min(failures, key=weight)
    kind, value = failures[rank]
    if kind == "failed":
        return f"worker {rank} of {len(pipes)} failed:\n{value.trace}"
    processes[rank].join(_SECONDS_FOR_OTHERS)
    return (
        f"worker {rank} of {len(pipes)} died with exit code {processes[rank].exitcode}; if it was "
        "killed for memory, pass smaller sizes or fewer workers"
    )


class _Failure(NamedTuple):
    """What a task raised, when, and whether it only lost the other workers."""

    is_lost: bool
    when: float
    trace: str


def _ready(place: Place) -> None:
    """The first task: all have met."""
    place.barrier()


def _work(
    rank: int,
    world_size: int,
    device: str,
    store: str,
    timeout: float,
    tasks: list[Task],
    pipe: Connection,
) -> None:
    """The life of a worker."""
    number = 0
    try:
        own = torch.device("cpu")
        if device == "cuda":
            own = torch.device("cuda", rank)
            torch.cuda.set_device(own)
        else:
            torch.set_num_threads(1)
        wait_for = timedelta(seconds=max(timeout, _SECONDS_TO_START) + _SECONDS_BEHIND)
        dist.init_process_group(
            _BACKENDS[device],
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=wait_for,
        )
        place = Place(rank, world_size, own)
        for number, (function, keywords) in enumerate(tasks):
            pipe.send(("done", number, function(place, **keywords)))
        place.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        is_lost = isinstance(error, RankError) or any(text in str(error) for text in _LOST)
        failure = _Failure(is_lost, time.monotonic(), traceback.format_exc())
        pipe.send(("failed", number, failure))
        raise SystemExit(1) from None
    finally:
        pipe.close()
