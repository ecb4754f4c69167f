"""Heartbeat: detects a rank that stopped, hangs or lost its network while other ranks wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

_SECONDS = 1.0  # interval between two counts
_ENDED = "ended"  # a rank that has finished or failed writes this in place of a count


class Heartbeat:
    """A thread that writes a count to the job's store each second and reads the next rank's count.

    Without a heartbeat, a rank that waits in a collective notices a silent rank only after the
    collective's timeout, which must be longer than the longest step. A working rank continues to
    count however long its step takes, unless a single call holds Python's lock (GIL) longer than
    the timeout. A second thread watches the first, which blocks if the store fails.

    Args:
        store: the job's store; the thread opens its own connection.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds without a new count after which the next rank counts as lost.
        on_loss: called once, in a thread, with a message that names the lost rank or store.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: float,
        on_loss: Callable[[str], None],
    ):
        self._store = dist.PrefixStore("dpflash heartbeat", store.clone())  # type: ignore[attr-defined]
        self._rank, self._next = rank, (rank + 1) % world_size
        self._timeout, self._on_loss = timeout, on_loss
        self._ended = threading.Event()
        # When the store last answered, and when the next rank's count last changed.
        self._answered = self._counted = time.monotonic()
        self._threads = [
            threading.Thread(target=work, name="dpflash-heartbeat", daemon=True)
            for work in (self._count, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads; the previous rank no longer expects counts from this rank."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_SECONDS)  # with a limit, since the store may be gone

    def _count(self) -> None:
        count, seen, key = 0, b"", str(self._next)
        try:
            while not self._ended.wait(_SECONDS):
                count += 1
                self._store.set(str(self._rank), str(count))
                found = self._store.get(key) if self._store.check([key]) else b""
                self._answered = time.monotonic()
                if found != seen or found == _ENDED.encode():
                    seen, self._counted = found, self._answered
            self._store.set(str(self._rank), _ENDED)
        except RuntimeError:  # torch's store failed; the other thread reports it
            return

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS):
            now = time.monotonic()
            if now - self._answered > self._timeout:
                self._on_loss(
                    f"no answer of the job's store for {self._timeout:g} seconds: the machine "
                    "that started the job was stopped, or its network is cut"
                )
                return
            if now - self._counted > self._timeout:
                self._on_loss(
                    f"no sign of rank {self._next} for {self._timeout:g} seconds: it was "
                    "stopped, or its network is cut"
                )
                return
