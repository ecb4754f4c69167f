"""RandomState: saves and restores the global random generators of torch, NumPy and Python."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


class RandomState:
    """The states of the global generators of the CPU and of `devices`, at one time."""

    def __init__(self, *devices: torch.device) -> None:
        self._torch = generators_of(*devices)
        self._states = [generator.get_state() for generator in self._torch]
        self._numpy = np.random.get_state(legacy=False)
        self._python = random.getstate()

    def equals(self, other: RandomState) -> bool:
        """Return whether two snapshots hold the same states."""
        pairs = zip(self._states, other._states, strict=False)
        own, theirs = (pickle.dumps(x._numpy) for x in (self, other))
        same = own == theirs and self._python == other._python
        return same and all(torch.equal(x, y) for x, y in pairs)

    def restore(self) -> None:
        """Set the global generators to the saved states."""
        for generator, state in zip(self._torch, self._states, strict=True):
            generator.set_state(state)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@contextmanager
def random_state_kept(*devices: torch.device) -> Iterator[None]:
    """Restore the global generators' states at the end of the with block."""
    held = RandomState(*devices)
    try:
        yield
    finally:
        held.restore()


def seed_generators(seed: int, *devices: torch.device) -> None:
    """Seed the global generators with 63 bits, of which torch's CPU generator uses 32."""
    for generator in generators_of(*devices):
        generator.manual_seed(seed)
    random.seed(seed)
    # Add a third word: with only the seed's two words, NumPy's numbers would equal Python's.
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32, 1])


def generators_of(*devices: torch.device) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of these devices."""
    found = [torch.default_generator]
    for device in devices:
        if device.type != "cpu":
            own = getattr(torch.get_device_module(device), "default_generators", ())
            index = device.index or 0
            found += own[index : index + 1]
    return found
