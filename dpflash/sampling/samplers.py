"""Samplers of logical batches; `SamplingPlan.event` is the cost of releasing a logical batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler

from .._validate import optional, positive_int
from ..privacy.keys import Uncopied, derive_key, uniform_words
from ..verification.settable import Fixed
from .tracker import EARLIER_EPOCH, BatchTracker


class FixedDraws(Fixed):
    """Base class of private loaders and samplers, whose attributes cannot be set."""

    fixed_by = "make_private"
    instead_of_setting = {
        "collate_fn": "pass it to the DataLoader that make_private gets",
        "physical_batch_size": "pass it to make_private",
        "position": "a checkpoint sets it, engine.load_checkpoint(path)",
    }
    instead_of_setting_others = (
        "sampling and epsilon depend on that value. For another batch size or dataset in the same "
        "run call engine.detach(model), and engine.make_private with a new DataLoader and the "
        "plain optimizer: the epsilons add up"
    )


class DrawSampler(FixedDraws, Uncopied, ABC):
    """Base class of samplers. Logical batch t is a function of the key and t.

    Iteration yields this rank's samples only, at most physical_batch_size at a time. Only other
    loaders iterate over a sampler; the private loader adds padding rows (see `slots`).

    Args:
        num_samples: size of the dataset.
        steps_per_epoch: number of logical batches in an epoch.
        key: 32 bytes; logical batch t is a function of (key, t).
        physical_batch_size: largest length of a yielded list of indices; None for no bound.

    Public attributes are set once, in `__init__`.
    """

    no_copy = "it would draw the same samples; iterate over the loader that make_private returned"

    def __init__(
        self,
        num_samples: int,
        *,
        steps_per_epoch: int,
        key: bytes,
        physical_batch_size: int | None = None,
    ):
        positive_int(num_samples=num_samples, steps_per_epoch=steps_per_epoch)
        optional(positive_int, physical_batch_size=physical_batch_size)
        self.num_samples = num_samples
        self.steps_per_epoch = steps_per_epoch
        self.physical_batch_size = physical_batch_size
        self._position = 0
        self._rank_part = (0, 1)
        self._remainder: int | None = None
        self._tracker = BatchTracker()
        self._key = key
        self._refusal: str | None = None

    def refuse_other_loaders(self, reason: str) -> None:
        """Make iteration by other loaders raise ValueError with this reason from now on."""
        self._refusal = reason

    def follow(self, tracker: BatchTracker, rank_part: tuple[int, int]) -> None:
        """Report epochs and batch sizes to a tracker, and yield one rank's part of each batch."""
        self._tracker = tracker
        self._rank_part = rank_part

    @property
    def position(self) -> int:
        """The number of the next logical batch."""
        return self._position

    @property
    def rank_part(self) -> tuple[int, int]:
        """(index of this rank, number of ranks that divide each logical batch).

        All ranks yield the same number of microbatches; some may be empty.
        """
        return self._rank_part

    @abstractmethod
    def draw(self, index: int) -> list[int]:
        """Return the samples of logical batch `index`, ascending; key and index determine them."""

    def logical_batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of the logical batch, its samples on all ranks) over one epoch."""
        self._tracker.begin_epoch(self.position)
        if not self._tracker.may_begin(True):
            return
        steps = self.steps_per_epoch if self._remainder is None else self._remainder
        self._remainder = None
        for step in range(steps):
            if step and not self._tracker.may_begin(False):
                return
            draw = self._position
            self._position += 1
            drawn = self.draw(draw)
            self._tracker.emitted.append(len(self._own(drawn)))
            yield draw, drawn

    def __iter__(self) -> Iterator[list[int]]:
        if self._refusal is not None:
            raise ValueError(self._refusal)
        for _, drawn in self.logical_batches():
            indices, most = self._own(drawn), max(1, -(-len(drawn) // self.rank_part[1]))
            size = self.physical_batch_size or most
            for start in range(0, most, size):
                yield indices[start : start + size]

    def __len__(self) -> int:
        return self.steps_per_epoch

    @property
    def key(self) -> bytes:
        """The key of the next logical batches."""
        returns = self._tracker.returns
        return derive_key(self._key, f"return-{returns}") if returns else self._key

    def resume(self, position: int, *, returns: int = 0, key: bytes | None = None) -> None:
        """Continue at logical batch `position`; the next epoch is the rest of that batch's epoch.

        If this sampler has already drawn logical batch `position`, it draws that batch anew under
        a new key.

        Args:
            position: number of the logical batch.
            returns: how often the sampler had been set back when the position was saved.
            key: a key that replaces the sampler's own key; None to keep the own key.
        """
        reached = (self._tracker.returns, self.position)
        if key not in (None, self._key):
            self._key, reached = key, (0, 0)
        if (returns, position) < reached:
            returns = reached[0] + 1
        self._position = position
        self._tracker.resume(position, returns=returns)
        self._remainder = -position % self.steps_per_epoch or None

    def _own(self, drawn: list[int]) -> list[int]:
        number, count = self.rank_part
        return drawn[number::count]

    def _words(self, index: int) -> np.ndarray:
        return uniform_words(self.key, index=index, count=self.num_samples)


class PoissonBatchSampler(DrawSampler):
    """Draws each sample with probability sample_rate, independently, for every logical batch.

    Args:
        num_samples: size of the dataset.
        sample_rate: probability of each sample in each logical batch.
        steps_per_epoch: number of logical batches in an epoch.
        key: 32 bytes; logical batch t is a function of (key, t).
        physical_batch_size: largest length of a yielded list of indices; None for no bound.
        max_batch_size: a larger logical batch is truncated to a uniform subset of this size;
            None for no truncation.

    Guarantees:
        Inclusions are independent over samples and logical batches. Thresholds have 64 bits, so
        the probability is sample_rate to 2^-64. Empty batches are yielded as empty lists.
    """

    def __init__(
        self,
        num_samples: int,
        sample_rate: float,
        *,
        steps_per_epoch: int,
        key: bytes,
        physical_batch_size: int | None = None,
        max_batch_size: int | None = None,
    ):
        super().__init__(
            num_samples,
            steps_per_epoch=steps_per_epoch,
            key=key,
            physical_batch_size=physical_batch_size,
        )
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate={sample_rate!r}: expected a number in (0, 1]")
        optional(positive_int, max_batch_size=max_batch_size)
        self.sample_rate = sample_rate
        self.max_batch_size = max_batch_size

    def draw(self, index: int) -> list[int]:
        """Return the samples of logical batch `index`, ascending; key and index determine them."""
        cap = self.max_batch_size
        if self.sample_rate == 1 and (cap is None or cap >= self.num_samples):
            return list(range(self.num_samples))
        words = self._words(index)
        if self.sample_rate == 1:
            included = np.arange(self.num_samples)
        else:
            included = (words < int(self.sample_rate * 2**64)).nonzero()[0]
        if cap is not None and len(included) > cap:
            # Words below the threshold are uniform, so the samples with the smallest words are a
            # uniform subset.
            included = included[_least(words[included], cap)]
        return [int(i) for i in included]


class CyclicPoissonBatchSampler(PoissonBatchSampler):
    """Samples from the parts of the dataset in turn; each sample of a part independently.

    Logical batch t is sampled from part number t modulo `parts`. A sample's part is uniformly
    random, and a function of the key and the sample's index.

    Args:
        num_samples: size of the dataset.
        sample_rate: probability that a logical batch of a part contains a sample of the part.
        parts: the number of parts. With 1 the sampler equals a `PoissonBatchSampler`.
        steps_per_epoch: number of logical batches in an epoch.
        key: 32 bytes. It determines the parts; key and t determine logical batch t.
        physical_batch_size: largest length of a yielded list of indices; None for no bound.

    Guarantees:
        Parts and inclusions are independent between samples: adding a sample changes no other
        sample's part or inclusions. If two batches under one key contain the same sample, their
        numbers differ by a multiple of `parts`.
    """

    def __init__(
        self,
        num_samples: int,
        sample_rate: float,
        *,
        parts: int,
        steps_per_epoch: int,
        key: bytes,
        physical_batch_size: int | None = None,
    ):
        super().__init__(
            num_samples,
            sample_rate,
            steps_per_epoch=steps_per_epoch,
            key=key,
            physical_batch_size=physical_batch_size,
        )
        positive_int(parts=parts)
        self.parts = parts
        self._known: tuple[bytes, np.ndarray] | None = None

    def draw(self, index: int) -> list[int]:
        """Return the samples of logical batch `index`, ascending; key and index determine them."""
        drawn = np.array(super().draw(index), dtype=np.int64)
        return [int(i) for i in drawn[self._parts()[drawn] == index % self.parts]]

    def _parts(self) -> np.ndarray:
        key = self.key
        if self._known is None or self._known[0] != key:
            words = uniform_words(derive_key(key, "parts"), index=0, count=self.num_samples)
            # The modulo makes some parts likelier than others, by a relative parts * 2^-64.
            self._known = key, words % np.uint64(self.parts)
        return self._known[1]


class RandomAllocationBatchSampler(DrawSampler):
    """Draws each sample in one random step of each epoch ("balls in bins").

    Epoch e consists of logical batches e * T to (e + 1) * T - 1, where T is the number of steps of
    an epoch. This holds however often the loop begins to iterate. A sample's step is a function of
    the key, the epoch and the sample's index.

    Args:
        num_samples: size of the dataset.
        steps_per_epoch: T, number of logical batches in an epoch.
        key: 32 bytes; the samples' steps in epoch e are a function of (key, e).
        physical_batch_size: largest length of a yielded list of indices; None for no bound.

    Guarantees:
        Under one key each sample is in exactly one logical batch of each epoch. This batch is
        uniform to 2^-64 and independent of other samples and epochs: adding a sample changes no
        other sample's batch. Empty batches are yielded as empty lists.
    """

    _known: tuple[bytes, int, np.ndarray] | None = None

    def draw(self, index: int) -> list[int]:
        """Return the samples of logical batch `index`, ascending; key and index determine them."""
        epoch, step = divmod(index, self.steps_per_epoch)
        return [int(i) for i in (self._steps(epoch) == step).nonzero()[0]]

    def _steps(self, epoch: int) -> np.ndarray:
        key = self.key
        if self._known is None or self._known[:2] != (key, epoch):
            own = derive_key(key, "allocation")
            words = uniform_words(own, index=epoch, count=self.num_samples)
            self._known = key, epoch, words % np.uint64(self.steps_per_epoch)
        return self._known[2]


class FixedSizeBatchSampler(DrawSampler):
    """Draws batch_size distinct samples for every logical batch; all subsets are equally likely.

    Args:
        num_samples: size of the dataset.
        batch_size: samples of a logical batch, at most num_samples.
        steps_per_epoch: number of logical batches in an epoch.
        key: 32 bytes; logical batch t is a function of (key, t).
        physical_batch_size: largest length of a yielded list of indices; None for no bound.

    Guarantees:
        Logical batches are independent. The subsets are uniform unless two 64-bit words are equal,
        which has probability below num_samples^2 / 2^65 in a logical batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        steps_per_epoch: int,
        key: bytes,
        physical_batch_size: int | None = None,
    ):
        super().__init__(
            num_samples,
            steps_per_epoch=steps_per_epoch,
            key=key,
            physical_batch_size=physical_batch_size,
        )
        positive_int(batch_size=batch_size)
        if batch_size > num_samples:
            raise ValueError(
                f"batch_size={batch_size!r}: expected at most num_samples={num_samples!r}; pass a "
                "smaller batch"
            )
        self.batch_size = batch_size

    def draw(self, index: int) -> list[int]:
        """Return the samples of logical batch `index`, ascending; key and index determine them."""
        return [int(i) for i in _least(self._words(index), self.batch_size)]


def _least(words: np.ndarray, count: int) -> np.ndarray:
    if count >= len(words):
        return np.arange(len(words))
    return np.sort(np.argpartition(words, count - 1)[:count])


class ShuffledBatchSampler(FixedDraws, BatchSampler):
    """Yields the batches of the user's shuffled loader, and reports their sizes to the tracker."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, tracker: BatchTracker):
        super().__init__(sampler, batch_size, drop_last)
        self._tracker = tracker
        self._epochs = 0

    def __iter__(self) -> Iterator[list[int]]:
        tracker = self._tracker
        if not tracker.may_begin(True):
            return
        tracker.begin_epoch()
        self._epochs += 1
        own = self._epochs
        try:
            for number, batch in enumerate(super().__iter__()):
                if own != self._epochs:
                    raise RuntimeError(EARLIER_EPOCH)
                if number and not tracker.may_begin(False):
                    return
                tracker.emitted.append(len(batch))
                tracker.still_to_come(len(self) - number - 1)
                yield batch
        finally:
            if own == self._epochs:
                tracker.still_to_come(0)
