"""Four processes for all tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Forked processes find the modules there too. Never `tests/` itself: `tests/dpflash` would hide
# the package from processes that have not imported it.
sys.path.insert(0, str(Path(__file__).parent))
import distributed_world  # noqa: E402


class Worlds:
    """Hands out a world that lives, and starts another after one that hung."""

    def __init__(self) -> None:
        self._world = None

    def get(self):
        if self._world is None or self._world.dead:
            self._world = distributed_world.World(4)
        return self._world

    def close(self) -> None:
        if self._world is not None:
            self._world.close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    held = Worlds()
    yield held
    held.close()


@pytest.fixture
def world(worlds):
    """Four processes, and groups of 1, 2 and 3 of them: see `distributed_world.World`."""
    return worlds.get()


@pytest.fixture
def new_world():
    """new_world(size, timeout): processes of a test's own, ended behind it."""
    made = []

    def make(size, timeout=30.0):
        made.append(distributed_world.World(size, timeout))
        return made[-1]

    yield make
    for one in made:
        one.close()
