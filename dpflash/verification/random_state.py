"""Saves and restores the global random generators of torch, numpy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RandomState:
    """The current state of the global generators.

    Args:
        device: its generator is saved in addition to that of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = torch.get_rng_state()
        self._cuda: Tensor | None = None
        if device.type == "cuda":
            self._cuda = torch.cuda.get_rng_state(device)
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def equals(self, other: RandomState) -> bool:
        """Whether the generators of torch are in the same state."""
        if self._cuda is not None and other._cuda is not None:
            if not torch.equal(self._cuda, other._cuda):
                return False
        return torch.equal(self._torch, other._torch)

    def restore(self) -> None:
        """Restore the generators."""
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore the generators at the end of the block."""
    held = RandomState(device)
    try:
        yield
    finally:
        held.restore()
