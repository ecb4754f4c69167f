"""Seeds the random generators of a private forward, such as those of dropout, from a secret key.

With a known seed, dropout's masks are known too, and the mask of a sample depends on the number of
rows before it. With a secret seed the masks of all rows are independent for everybody who does not
have the key.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .keys import derive_key

_SEED_BYTES = 8


class SecretMasks:
    """Seeds torch's, Python's and numpy's generators for the private forwards of one model.

    A forward that starts from the same state of the user's generator as an earlier one of the
    same batch gets the same seed. So activation checkpointing recomputes the same masks.

    Args:
        devices: the model's devices other than the CPU.
        key: returns the current 32-byte key.
        place: returns an identifier of the current batch; no two batches have the same one.
    """

    def __init__(
        self,
        devices: frozenset[torch.device],
        key: Callable[[], bytes],
        place: Callable[[], object],
    ) -> None:
        self._devices = devices
        self._key = key
        self._place = place
        self._at: object = None
        self._seeds: dict[int, int] = {}
        self._active = False

    @contextmanager
    def seeded(self, *, recomputing: bool) -> Iterator[None]:
        """Seed the generators during an outermost forward, and restore the user's states after it.

        Torch's generator continues as if the forward had drawn one number.

        Args:
            recomputing: whether this forward runs inside a backward.
        """
        if self._active:
            yield
            return
        # Distinguishes two calls of one batch, and is the same in a recomputation.
        word = int(torch.randint(2**62, (), device="cpu"))
        seed = self._seed(word, recomputing)
        held = _Generators(self._devices)
        self._active = True
        try:
            held.seed(seed)
            yield
        finally:
            self._active = False
            held.restore()

    def _seed(self, word: int, recomputing: bool) -> int:
        # The step may be released during the backward, after which the place is another one; a
        # recomputation takes that of its forward.
        place = self._at if recomputing else self._place()
        if place != self._at:
            self._at, self._seeds = place, {}
        if word not in self._seeds:
            key = derive_key(self._key(), f"masks-{place}-{len(self._seeds)}")
            self._seeds[word] = int.from_bytes(key[:_SEED_BYTES], "little") >> 1
        return self._seeds[word]


class _Generators:
    """The states of the generators that a forward on these devices may draw from."""

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self._torch = [torch.default_generator]
        for device in devices:
            own = getattr(torch.get_device_module(device), "default_generators", ())
            index = device.index or 0
            self._torch += own[index : index + 1]
        self._states = [generator.get_state() for generator in self._torch]
        self._python = random.getstate()
        # numpy is not imported only for this.
        self._numpy = sys.modules.get("numpy.random")
        if self._numpy is not None:
            self._numpy_state = self._numpy.get_state(legacy=False)

    def seed(self, seed: int) -> None:
        for generator in self._torch:
            generator.manual_seed(seed)
        random.seed(seed)
        if self._numpy is not None:
            self._numpy.seed([seed & 0xFFFFFFFF, seed >> 32])

    def restore(self) -> None:
        for generator, state in zip(self._torch, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.set_state(self._numpy_state)
