"""Seeds the random generators from a secret key during a logical batch.

If the seed were known, random masks and augmentations would be known too, and the masks of a
sample would depend on the number of rows and microbatches before the sample. To everybody without
the secret key, masks whose seed was derived from the key are independent random numbers.
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
    """Derive a seed of 63 bits from a key."""
    return int.from_bytes(derive_key(key, purpose)[:_SEED_BYTES], "little") >> 1


class SecretMasks:
    """Seeds torch's, Python's and numpy's generators for the private forwards of one model.

    Isolation tests (trials) run a batch several times:
    - Within one run, two forwards that start from the same state of the user's generator get the
      same seed, so that activation checkpointing recomputes the same masks.
    - The n-th forward that starts from a new state gets the same seed in each run of the batch,
      whatever random numbers the loop has drawn.

    Args:
        devices: the devices other than the CPU.
        key: function that returns the current 32-byte key.
        place: function that returns a unique identifier of the current batch.
        run: function that returns the number of the batch's current run.
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

        Afterwards torch's generator has advanced by one number. `recomputing`: whether this
        forward runs inside a backward.
        """
        if self._active:
            yield
            return
        # The number differs between two forwards of a batch; a recomputation draws it again.
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
        # A recomputation uses the place that its forward had, since a release during the backward
        # changes the result of `_place`.
        at = self._at if recomputing else (self._place(), self._run())
        if at != self._at:
            self._at, self._seeds = at, {}
        if word not in self._seeds:
            self._seeds[word] = seed_of(self._key(), f"masks-{at[0]}-{len(self._seeds)}")
        return self._seeds[word]


class LoopSeeds:
    """Seeds the generators for dataset, collate function and loop during a logical batch.

    At the end of the batch the user's generators are restored: numbers drawn after a release, for
    example for a public batch, must not show the number of microbatches. Ranks with different
    samples have different seeds. `key` is a function that returns the current 32-byte key.
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
        """Derive a seed of 63 bits from the key and an address, such as (release, microbatch)."""
        return seed_of(self._key(), f"loop-{self._rank}-{place}")

    def begin(self) -> None:
        """Save the generators' states until the end of the logical batch."""
        if self._held is None:
            self._held = RandomState(*self._devices)

    def seed(self, *place: object) -> None:
        """Seed the generators for an address, see `of`."""
        self.begin()
        self._at, self._blocks = place, 0
        seed_generators(self.of(*place), *self._devices)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Use another seed in the with block, and restore the generators' states after it."""
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
        """Restore the generators' saved states."""
        if self._held is not None:
            self._held.restore()
            self._held = None

    def forget(self) -> None:
        """Drop the saved states, since the loop left a logical batch before its end."""
        # Restoring the states later, at garbage collection, would change them in other code.
        self._held = None


class SeededIndices(list[Any]):
    """The dataset indices of a microbatch, with the seed for reading its entries."""

    def __init__(self, indices: Iterable[Any], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed


def seed_reading(indices: object) -> None:
    """Seed this process's generators from `SeededIndices`; do nothing for other indices."""
    if isinstance(indices, SeededIndices):
        seed_generators(indices.seed)
