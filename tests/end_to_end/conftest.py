"""The command in a process that is killed."""

import multiprocessing
import threading
import time

import pytest
from tqdm import tqdm

from dpflash.cli import main

# Forked from this process, which has imported everything: a new one would take seconds for it.
FORKED = multiprocessing.get_context("fork")


def _command(words):
    # tqdm's own lock is shared with the parent, which would wait for it forever.
    tqdm.set_lock(threading.RLock())
    main(words)


def _killed_after(releases, words, ledger):
    process = FORKED.Process(target=_command, args=(words,))
    process.start()
    deadline = time.monotonic() + 120
    while not ledger.exists() or ledger.read_bytes().count(b"\n") < releases:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.join()


@pytest.fixture
def killed_after():
    """Run the command in another process, and kill it once it has made so many releases."""
    return _killed_after
