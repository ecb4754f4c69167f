"""A world of processes that is started once and then given one case after another.

    with World(4) as world:
        world.run(cases_file, "name of a function", size=3, argument=...)

The processes are forked from one that has imported torch and dpflash, which saves seconds each.
Each member of a group calls ``function(group, **arguments)`` of the file; what they return comes
back by rank. Groups smaller than the world leave other ranks out than the last ones, so that ranks
in a group and ranks in the world differ.
"""

from __future__ import annotations

import importlib.util
import queue
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from fresh_process import FORKED

MEMBERS = {1: [1], 2: [1, 3], 3: [0, 2, 3]}


@dataclass
class Failure:
    """What a case raised on one rank."""

    kind: str
    message: str
    trace: str


class World:
    """Processes with a gloo group.

    Args:
        size: number of processes.
        timeout: of the group's exchanges, in seconds.
    """

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = size
        self.dead = False
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes: list[BaseProcess] = []
        self._channels: list[Connection] = []
        for rank in range(size):
            ours, theirs = FORKED.Pipe()
            arguments = (rank, size, port, timeout, theirs)
            process = FORKED.Process(target=_work, args=arguments)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._channels.append(ours)
        self._answers: queue.Queue = queue.Queue()
        for rank, channel in enumerate(self._channels):
            threading.Thread(target=self._listen, args=(rank, channel), daemon=True).start()
        self._collect("starting", list(range(size)), 180.0)

    def _listen(self, rank: int, channel: Connection) -> None:
        try:
            while True:
                returned, answer = channel.recv()
                self._answers.put((rank, answer if returned else Failure(*answer)))
        except (EOFError, OSError):
            self._answers.put((rank, Failure("Died", f"rank {rank} ended", "")))

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes."""
        self.dead = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def gather(self, file: str, case: str, size: int, /, seconds: float = 60.0, **arguments):
        """What each rank of the group of `size` returned or, as a `Failure`, raised."""
        ranks = list(range(self.size)) if size == self.size else MEMBERS[size]
        for rank in ranks:
            self._channels[rank].send((file, case, size, arguments))
        return self._collect(case, ranks, seconds)

    def _collect(self, case: str, ranks: list[int], seconds: float) -> list:
        answers = {}
        try:
            while len(answers) < len(ranks):
                rank, answer = self._answers.get(timeout=seconds)
                if rank in ranks:
                    answers[rank] = answer
        except queue.Empty:
            self.close()
            missing = [rank for rank in ranks if rank not in answers]
            raise TimeoutError(f"{case}: ranks {missing} hang, others: {answers}") from None
        return [answers[rank] for rank in ranks]

    def run(self, file: str, case: str, size: int, /, seconds: float = 60.0, **arguments):
        """As `gather`, but a failure is raised here."""
        answers = self.gather(file, case, size, seconds, **arguments)
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            raise AssertionError("\n".join(f.trace or f.message for f in failures))
        return answers


def load(file: str) -> ModuleType:
    """A Python file as a module, the same one for the same file."""
    name = f"distributed_{Path(file).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _work(rank: int, size: int, port: int, timeout: float, channel: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    groups = {size: None}
    for smaller, members in MEMBERS.items():
        if smaller < size:
            groups[smaller] = dist.new_group(members, timeout=wait) if max(members) < size else 0
    channel.send((True, "ready"))
    while True:
        try:
            file, name, group_size, arguments = channel.recv()
        except EOFError:
            return
        try:
            answer = True, getattr(load(file), name)(groups[group_size], **arguments)
        except BaseException as error:
            answer = False, (type(error).__name__, str(error), traceback.format_exc())
        channel.send(answer)
