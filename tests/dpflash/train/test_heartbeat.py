"""Heartbeat: who is lost, and who has only ended."""

import threading
import time

import pytest

from dpflash.train import heartbeat
from dpflash.train.heartbeat import Heartbeat


class Store(dict):
    """Stands in for torch's store; `frozen` ranks get no answer."""

    def __init__(self):
        super().__init__()
        self.freed, self.frozen = threading.Event(), set()

    def clone(self):
        return self

    def set(self, key, value):
        if int(key) in self.frozen:
            self.freed.wait()
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def begun(monkeypatch):
    """begun(): the store of two ranks, what each heard of losses, and their heartbeats."""
    monkeypatch.setattr(heartbeat, "_SECONDS", 0.05)
    monkeypatch.setattr(heartbeat.dist, "PrefixStore", lambda _, store: store)
    store, losses = Store(), ([], [])
    beats = [Heartbeat(store, rank, 2, 0.5, losses[rank].append) for rank in range(2)]
    time.sleep(1.0)
    assert losses == ([], [])
    yield store, losses, beats
    store.freed.set()
    for beat in beats:
        beat.stop()


def test_a_rank_that_has_ended_is_not_lost(begun):
    _, losses, beats = begun
    beats[1].stop()
    time.sleep(1.0)
    assert losses == ([], [])


def test_a_store_that_does_not_answer_is_noticed_and_delays_no_end(begun):
    store, losses, beats = begun
    store.frozen.add(1)
    time.sleep(1.5)
    assert len(losses[1]) == 1 and "no answer of the job's store" in losses[1][0]
    # The other rank sees no count of it.
    assert len(losses[0]) == 1 and "no sign of rank 1" in losses[0][0]
    at = time.monotonic()
    beats[1].stop()
    assert time.monotonic() - at < 1.0
