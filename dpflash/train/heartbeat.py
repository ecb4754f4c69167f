"""Heartbeat: notices a rank that is stopped, hangs or is cut off, while others wait for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

_SECONDS = 1.0  # between two counts
_ENDED = "ended"  # the count of a rank that has done its work, or raised an error


class Heartbeat:
    """A thread that writes a count to the job's store each second, and reads the next rank's.

    Without it a rank that waits in an exchange learns of a silent one when the timeout of the
    exchange ends, which must be longer than the longest step. A rank that works beats on, however
    long its step takes.

    Args:
        store: of the job; the thread has a connection of its own.
        rank: this rank.
        world_size: number of ranks.
        timeout: seconds without a new count after which the next rank is lost.
        on_loss: called once, in the thread, with a text that says what was lost.
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
        self._thread = threading.Thread(target=self._run, name="dpflash-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the rank before this one no longer expects its counts."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        count, seen, at = 0, b"", time.monotonic()
        try:
            while not self._ended.wait(_SECONDS):
                count += 1
                self._store.set(str(self._rank), str(count))
                key = str(self._next)
                found = self._store.get(key) if self._store.check([key]) else b""
                if found != seen or found == _ENDED.encode():
                    seen, at = found, time.monotonic()
                elif time.monotonic() - at > self._timeout:
                    self._on_loss(
                        f"no sign of rank {self._next} for {self._timeout:g} seconds: it was "
                        "stopped, or its network is cut"
                    )
                    return
            self._store.set(str(self._rank), _ENDED)
        except RuntimeError as error:  # of torch's store
            if not self._ended.is_set():
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                self._on_loss(f"the store of the job does not answer ({reason})")
