"""Samplers, which draw logical batches. `SamplingPlan.event` is the cost of releasing one."""

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
    """Base class of private loaders and samplers, whose attributes determine epsilon."""

    fixed_by = "make_private"
    instead_of_setting = {
        "collate_fn": "pass it to the DataLoader that make_private gets",
        "physical_batch_size": "pass it to make_private",
        "position": "a checkpoint sets it, engine.load_checkpoint(path)",
    }
    instead_of_setting_others = (
        "draws and epsilon depend on that value. For another batch size or dataset in the same "
        "run call engine.detach(model), and engine.make_private with a new DataLoader and the "
        "plain optimizer: the epsilons add up"
    )


class DrawSampler(FixedDraws, Uncopied, ABC):
    """Draws logical batches. Each draw is a function of (key, number of the draw).

    Iteration yields this rank's samples only, at most physical_batch_size at a time. Only loaders
    other than the private loader iterate it; the private loader adds padding rows (see `slots`).

    Args:
        num_samples: size of the dataset.
        steps_per_epoch: logical batches of one epoch.
        key: 32 bytes; draw t is a function of (key, t).
        physical_batch_size: largest length of a yielded list of indices; None for no bound.

    Public attributes are set once, in `__init__`.
    """

    no_copy = "it would make the same draws; iterate over the loader that make_private returned"

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
        """Raise a ValueError with this reason if another loader iterates this sampler."""
        self._refusal = reason

    def follow(self, tracker: BatchTracker, rank_part: tuple[int, int]) -> None:
        """Report epochs and draws to a tracker, and yield one rank's part of each draw."""
        self._tracker = tracker
        self._rank_part = rank_part

    @property
    def position(self) -> int:
        """The number of the next draw."""
        return self._position

    @property
    def rank_part(self) -> tuple[int, int]:
        """(index of this rank, number of ranks), where the ranks split each draw.

        All ranks yield the same number of microbatches of a draw; some may be empty.
        """
        return self._rank_part

    @abstractmethod
    def draw(self, index: int) -> list[int]:
        """The samples of draw `index`, ascending; the same for the same key and index."""

    def logical_batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of the draw, its samples on all ranks) over one epoch."""
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
        """The key of the next draws."""
        returns = self._tracker.returns
        return derive_key(self._key, f"return-{returns}") if returns else self._key

    def resume(self, position: int, *, returns: int = 0, key: bytes | None = None) -> None:
        """Continue at a draw; the next epoch is the rest of the epoch to which the draw belongs.

        If this sampler has already made that draw, it makes another one under a new key.

        Args:
            position: number of the draw.
            returns: how often the sampler had been set back when that draw was saved.
            key: a key that replaces the sampler's own key; None to keep it.
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
        sample_rate: probability of each sample in each draw.
        steps_per_epoch: logical batches of one epoch.
        key: 32 bytes; draw t is a function of (key, t).
        physical_batch_size: upper bound of an emitted list of indices; None for no bound.
        max_batch_size: a draw with more samples is truncated to a uniform subset of this size;
            None for no truncation.

    Guarantees:
        Inclusions are independent over samples and draws. Thresholds have 64 bits, so the
        probability is sample_rate to 2^-64. Empty draws are yielded as empty lists.
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
        """The samples of draw `index`, ascending; the same for the same key and index."""
        cap = self.max_batch_size
        if self.sample_rate == 1 and (cap is None or cap >= self.num_samples):
            return list(range(self.num_samples))
        words = self._words(index)
        if self.sample_rate == 1:
            included = np.arange(self.num_samples)
        else:
            included = (words < int(self.sample_rate * 2**64)).nonzero()[0]
        if cap is not None and len(included) > cap:
            # Words below the threshold are uniform, so the smallest ones are a uniform subset.
            included = included[_least(words[included], cap)]
        return [int(i) for i in included]


class CyclicPoissonBatchSampler(PoissonBatchSampler):
    """Draws from the parts of the dataset in turn; each sample of a part is drawn independently.

    Draw t is from part t modulo the number of parts. A sample's part is uniformly random, and a
    function of the key and the sample's index.

    Args:
        num_samples: size of the dataset.
        sample_rate: probability of each sample in each draw of its part.
        parts: the number of parts. With 1 the sampler equals a `PoissonBatchSampler`.
        steps_per_epoch: logical batches of one epoch.
        key: 32 bytes; parts are a function of the key, and draw t is a function of (key, t).
        physical_batch_size: largest length of a yielded list of indices; None for no bound.

    Guarantees:
        Parts and inclusions are independent between samples: adding a sample changes neither for
        another sample. Under one key, two draws of a sample are a multiple of `parts` draws apart.
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
        """The samples of draw `index`, ascending; the same for the same key and index."""
        drawn = np.array(super().draw(index), dtype=np.int64)
        return [int(i) for i in drawn[self._parts()[drawn] == index % self.parts]]

    def _parts(self) -> np.ndarray:
        """`[num_samples]`: the part of each sample."""
        key = self.key
        if self._known is None or self._known[0] != key:
            words = uniform_words(derive_key(key, "parts"), index=0, count=self.num_samples)
            # The modulo makes some parts likelier than others, by at most parts 2^-64 (relative).
            self._known = key, words % np.uint64(self.parts)
        return self._known[1]


class RandomAllocationBatchSampler(DrawSampler):
    """Draws each sample in one random step of each epoch ("balls in bins").

    Epoch e consists of draws e T to (e + 1) T - 1, where T is the number of steps of an epoch,
    however often the loop begins to iterate. A sample's step is a function of the key, the epoch
    and the sample's index.

    Args:
        num_samples: size of the dataset.
        steps_per_epoch: T, logical batches of one epoch.
        key: 32 bytes; the steps of epoch e are a function of (key, e).
        physical_batch_size: largest length of a yielded list of indices; None for no bound.

    Guarantees:
        Under one key each sample is in exactly one draw of each epoch. This draw is uniform to
        2^-64 and independent of other samples and epochs: adding a sample changes no other's draw.
        Empty draws are yielded as empty lists.
    """

    _known: tuple[bytes, int, np.ndarray] | None = None

    def draw(self, index: int) -> list[int]:
        """The samples of draw `index`, ascending; the same for the same key and index."""
        epoch, step = divmod(index, self.steps_per_epoch)
        return [int(i) for i in (self._steps(epoch) == step).nonzero()[0]]

    def _steps(self, epoch: int) -> np.ndarray:
        """`[num_samples]`: the step of each sample in an epoch."""
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
        batch_size: samples of a draw, at most num_samples.
        steps_per_epoch: logical batches of one epoch.
        key: 32 bytes; draw t is a function of (key, t).
        physical_batch_size: upper bound of an emitted list of indices; None for no bound.

    Guarantees:
        Draws are independent. They are uniform unless two 64-bit words are equal, which has
        probability below num_samples^2 / 2^65 in a draw.
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
        """The samples of draw `index`, ascending; the same for the same key and index."""
        return [int(i) for i in _least(self._words(index), self.batch_size)]


def _least(words: np.ndarray, count: int) -> np.ndarray:
    """Positions of the `count` smallest words, ascending."""
    if count >= len(words):
        return np.arange(len(words))
    return np.sort(np.argpartition(words, count - 1)[:count])


class ShuffledBatchSampler(FixedDraws, BatchSampler):
    """The batches of the user's loader; reports to the tracker, also if others iterate it."""

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
