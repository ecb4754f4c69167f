"""Heartbeat: who is lost, and who has only ended."""

import threading
import time
from types import SimpleNamespace

import pytest

from dpflash.train import heartbeat
from dpflash.train.heartbeat import Heartbeat

TIMEOUT, STEP = 1.0, 0.8  # of a clock that tests move


class Store(dict):
    """Stands in for torch's store; a frozen rank gets no answer."""

    def __init__(self):
        super().__init__()
        self.freed, self.frozen, self.asked = threading.Event(), set(), [0, 0]

    def clone(self):
        return self

    def set(self, key, value):
        if int(key) in self.frozen:
            self.freed.wait()
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)

    def get(self, key):
        self.asked[1 - int(key)] += 1
        return self[key]


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def two(monkeypatch):
    """The store of two ranks, what each heard of losses, their heartbeats, and `move(*ranks)`.

    It moves the clock, which stands until these ranks have read a count of the other since.
    """
    now = [0.0]
    monkeypatch.setattr(heartbeat, "_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(heartbeat.dist, "PrefixStore", lambda _, store: store)
    store, losses = Store(), ([], [])
    beats = [Heartbeat(store, rank, 2, TIMEOUT, losses[rank].append) for rank in range(2)]

    def move(*ranks):
        now[0] += STEP
        before = list(store.asked)
        wait_until(lambda: all(store.asked[rank] > before[rank] + 2 for rank in ranks))

    yield store, losses, beats, move
    store.freed.set()
    for beat in beats:
        beat.stop()


def test_ranks_that_count_and_one_that_has_ended_are_not_lost(two):
    _, losses, beats, move = two
    for _ in range(4):
        move(0, 1)
    beats[1].stop()
    for _ in range(4):
        move(0)
    assert losses == ([], [])


def test_a_store_that_does_not_answer_is_noticed_and_delays_no_end(two):
    store, losses, beats, move = two
    move(0, 1)
    store.frozen.add(1)
    for _ in range(3):
        move(0)
    wait_until(lambda: losses[0] and losses[1])
    (other,), (own,) = losses
    assert "no answer of the job's store" in own and "no sign of rank 1" in other
    beats[1].stop()  # ends, though the store still does not answer
