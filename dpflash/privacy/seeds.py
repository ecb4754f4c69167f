"""Seeds the random generators from a secret key, while a logical batch is under way.

With a known seed, random masks and augmentations are known too, and those of a sample depend on
the number of rows and microbatches before it. From a secret key they are independent for
everybody who does not have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..random_state import RandomState, seed_generators
from .keys import derive_key

_SEED_BYTES = 8


def seed_of(key: bytes, purpose: str) -> int:
    """A seed of 63 bits."""
    return int.from_bytes(derive_key(key, purpose)[:_SEED_BYTES], "little") >> 1


class SecretMasks:
    """Seeds torch's, Python's and numpy's generators for the private forwards of one model.

    A forward that starts from the same state of the user's generator as an earlier one of the same
    run of a batch gets the same seed. So activation checkpointing recomputes the same masks. The
    n-th other forward gets the same seed in each run of the batch, whatever the loop has drawn.

    Args:
        devices: other than the CPU.
        key: returns the current 32-byte key.
        place: returns an identifier of the current batch, like no other's.
        run: returns the number of its current run, such as that of a trial.
    """

    def __init__(
        self,
        devices: frozenset[torch.device],
        key: Callable[[], bytes],
        place: Callable[[], object],
        run: Callable[[], int],
    ) -> None:
        self._devices = devices
        self._key = key
        self._place = place
        self._run = run
        self._at: tuple[object, int] = (None, 0)
        self._seeds: dict[int, int] = {}
        self._active = False

    @contextmanager
    def seeded(self, *, recomputing: bool) -> Iterator[None]:
        """Seed the generators during an outermost forward, and restore the user's states after it.

        Torch's generator continues as if the forward had drawn one number. `recomputing` says
        whether this forward runs inside a backward.
        """
        if self._active:
            yield
            return
        # Distinguishes two calls of one batch, and is the same in a recomputation.
        word = int(torch.randint(2**62, (), device="cpu"))
        seed = self._seed(word, recomputing)
        held = RandomState(*self._devices)
        self._active = True
        try:
            seed_generators(seed, *self._devices)
            yield
        finally:
            self._active = False
            held.restore()

    def _seed(self, word: int, recomputing: bool) -> int:
        # The step may be released during the backward, after which the place is another one; a
        # recomputation takes that of its forward.
        at = self._at if recomputing else (self._place(), self._run())
        if at != self._at:
            self._at, self._seeds = at, {}
        if word not in self._seeds:
            self._seeds[word] = seed_of(self._key(), f"masks-{at[0]}-{len(self._seeds)}")
        return self._seeds[word]


class LoopSeeds:
    """Seeds what dataset, collate function and loop draw during a logical batch.

    At its end the user's generators continue as if it had drawn nothing: what is drawn after a
    release, such as a public batch, must not tell how many microbatches there were. `key` returns
    the current 32-byte key; ranks with other samples have other numbers.
    """

    def __init__(
        self, key: Callable[[], bytes], rank: int, devices: frozenset[torch.device] = frozenset()
    ) -> None:
        self._key = key
        self._rank = rank
        self._devices = devices
        self._held: RandomState | None = None
        self._at: tuple[object, ...] = ()
        self._blocks = 0

    def of(self, *place: object) -> int:
        """The seed of a place, 63 bits, derived from the key."""
        return seed_of(self._key(), f"loop-{self._rank}-{place}")

    def begin(self) -> None:
        """Hold the user's states until the end of the logical batch."""
        if self._held is None:
            self._held = RandomState(*self._devices)

    def seed(self, *place: object) -> None:
        """Seed the generators for a place."""
        self.begin()
        self._at, self._blocks = place, 0
        seed_generators(self.of(*place), *self._devices)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Draw other numbers in the block, and then those that would have come without it."""
        if self._held is None:
            yield
            return
        held, self._blocks = RandomState(*self._devices), self._blocks + 1
        seed_generators(self.of("apart", self._blocks, *self._at), *self._devices)
        try:
            yield
        finally:
            held.restore()

    def end(self) -> None:
        """Restore the user's states."""
        if self._held is not None:
            self._held.restore()
            self._held = None

    def forget(self) -> None:
        """The user's states are the current ones: a logical batch was left before its end."""
        # Restored when an iterator is collected, they would come back in the middle of other code.
        self._held = None


class SeededIndices(list[Any]):
    """The indices of a microbatch, with the seed under which its entries are read."""

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


def seed_reading(indices: object) -> None:
    """Seed this process for reading a microbatch; do nothing for indices of other loaders."""
    if isinstance(indices, SeededIndices):
        seed_generators(indices.seed)
