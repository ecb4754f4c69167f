"""Slots: the number of rows of a microbatch, and the choice of the rows that hold samples.

The number of rows is public. The samples of a logical batch are in secret random rows. The other
rows are padding rows, whose clipping factor is 0. With an additional sample the microbatches
differ in one row only, so the same kernels run and the other samples are rounded in the same way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpflash.kernels import exact_slots, grid_of

from ..packing import Units
from ..privacy.keys import derive_key, uniform_words
from .tracker import BatchMark

# Largest fraction of padding rows, averaged over logical batches.
MOST_PADDING = 0.1
# If a rank expects fewer samples, a microbatch of two rows would often be half empty.
_LEAST_PAIRED = 3


def slots_of_size(size: int, *, ranks: int = 1, at_most: int | None = None) -> int:
    """Return the number of rows per microbatch, for the fewest microbatches of equal size.

    Args:
        size: number of samples of a logical batch.
        ranks: number of ranks that divide a logical batch.
        at_most: upper bound of the number of rows; None for no bound.
    """
    per_rank = -(-size // ranks)
    parts = -(-per_rank // (at_most or per_rank))
    return -(-per_rank // parts)


def slots_of_draws(
    num_samples: int,
    sample_rate: float,
    *,
    ranks: int = 1,
    at_most: int | None = None,
    cap: int | None = None,
) -> int:
    """Return the number of rows of a microbatch for Poisson sampling.

    This is the largest number with at most 10% padding on average. It is a power of two, or three
    times a power of two, so that vector loops have no scalar remainder. It is at least two if a
    rank expects three samples or more. If a microbatch may hold `cap` samples, the number is
    `cap`: each logical batch is then one microbatch, with more padding.

    Args:
        num_samples: public size of the dataset.
        sample_rate: probability of each sample in a logical batch.
        ranks: number of ranks that divide a logical batch.
        at_most: upper bound of the number of rows; None for no bound.
        cap: largest number of samples of a logical batch; None for no truncation.
    """
    expected = mean_size = num_samples * sample_rate
    if sample_rate == 1:
        return slots_of_size(min(num_samples, cap or num_samples), ranks=ranks, at_most=at_most)
    if cap is not None and at_most is not None and cap <= at_most * ranks:
        return -(-cap // ranks)
    bound = min(at_most or num_samples, num_samples)
    if cap is not None and cap < num_samples:
        mean_size = _sum_of_tails(np.arange(cap), num_samples, sample_rate)
    chosen = 2 if expected >= _LEAST_PAIRED * ranks and bound > 1 else 1
    for slots in sorted({2**k for k in range(30)} | {3 * 2**k for k in range(1, 29)}):
        if slots > bound or slots > 2 * expected + 1:
            break
        rows = slots * ranks * _mean_rounds(num_samples, sample_rate, slots * ranks, cap)
        if 1 - mean_size / rows <= MOST_PADDING:
            chosen = max(chosen, slots)
    return chosen


def _mean_rounds(num_samples: int, sample_rate: float, slots: int, cap: int | None) -> float:
    """Return the mean number of microbatches of a logical batch, max(1, ceil(size / slots))."""
    mean = num_samples * sample_rate
    likely = int(mean + 12 * mean**0.5) + 40  # larger batches are negligible for the mean
    most = min(num_samples, cap or num_samples, likely)
    below = np.arange(1, -(-most // slots)) * slots  # exceeding any of these adds a microbatch
    return 1.0 + _sum_of_tails(below, num_samples, sample_rate)


def _sum_of_tails(sizes: NDArray[np.int64], num_samples: int, sample_rate: float) -> float:
    """Return the sum over `sizes` of the probability that a logical batch exceeds the size."""
    from scipy.special import bdtrc  # takes a third of a second to import

    return float(bdtrc(sizes, num_samples, sample_rate).sum())


class Draws(Protocol):
    """A sampler of logical batches."""

    @property
    def rank_part(self) -> tuple[int, int]:
        """(index of this rank, number of ranks that divide each logical batch)."""

    @property
    def key(self) -> bytes:
        """The key of the sampling."""

    def logical_batches(self) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of the logical batch, its samples) over one epoch."""


class SlotSampler:
    """Yields each microbatch as a list of dataset indices, and stores its `BatchMark`.

    Args:
        draws: the sampler; the key of the slots is derived from its key.
        slots: number of rows of each microbatch on each rank.

    Attributes:
        marks: marks of the yielded microbatches that the loader has not taken yet, in order.
        last: mark of the microbatch that was yielded last.

    Guarantees:
        The samples of a logical batch are in uniformly random rows of its microbatches over all
        ranks, for any samples. A logical batch has as many microbatches as its samples need.
    """

    def __init__(self, draws: Draws, slots: int):
        self.slots = slots
        self.marks: deque[BatchMark] = deque()
        self.last: BatchMark | None = None
        self._draws = draws

    def __iter__(self) -> Iterator[list[Any]]:
        # Each epoch has its own queue, so an earlier epoch that is still open keeps its marks.
        marks = None
        for draw, drawn in self._draws.logical_batches():
            if marks is None:
                marks = self.marks = deque()
            rounds = self.placed(draw, drawn)
            for part, placed in enumerate(rounds):
                rows, real, units = self._rows(placed, draw)
                is_last = part + 1 == len(rounds)
                self.last = BatchMark(draw, self.slots, is_last, part, real, units)
                marks.append(self.last)
                yield rows

    def _rows(self, placed: Any, draw: int) -> tuple[list[Any], Tensor, Units | None]:
        """Return (dataset index of each row, bool mask of rows that are samples, units)."""
        real = placed >= 0
        # Padding repeats a sample of the same batch, so that it adds no new length.
        filler = int(placed[real.argmax()]) if real.any() else 0
        return [int(x) if x >= 0 else filler for x in placed], torch.from_numpy(real), None

    def placed(self, draw: int, drawn: list[int]) -> Any:
        """Return the sample in each row of this rank, `[microbatches, slots]`; -1 for padding."""
        rank, ranks = self._draws.rank_part
        rounds = max(1, -(-len(drawn) // (self.slots * ranks)))
        key = derive_key(self._draws.key, "slots")
        words = uniform_words(key, index=draw, count=rounds * ranks * self.slots)
        table = np.full(len(words), -1, dtype=np.int64)
        table[words.argsort(kind="stable")[: len(drawn)]] = drawn
        return table.reshape(ranks, rounds, self.slots)[rank]


class RealRows:
    """Returns the mask of the current microbatch's rows that are samples, on the model's device.

    Args:
        mask_of: takes B, and returns the bool mask `[B]` on the CPU; None if no row is padding.
    """

    def __init__(self, mask_of: Callable[[int], Tensor | None]) -> None:
        self.mask_of = mask_of
        self._held: tuple[Tensor, Tensor] | None = None

    def of(self, x: Tensor) -> Tensor | None:
        """Return the mask for the rows of x on x's device; copy it once per microbatch."""
        mask = self.mask_of(x.shape[0])
        if mask is None:
            return None
        if self._held is None or self._held[0] is not mask or self._held[1].device != x.device:
            # Use pinned memory, so that the host does not wait for the copy.
            is_cuda = x.device.type == "cuda"
            sent = mask.pin_memory() if is_cuda else mask
            self._held = (mask, sent.to(x.device, non_blocking=is_cuda))
        return self._held[1]

    def count(self, rows: int) -> int:
        """Return the number of a microbatch's rows that are samples."""
        mask = self.mask_of(rows)
        return rows if mask is None else int(mask.sum())


def check_slots(expected_batch_size: float, max_grad_norm: float) -> None:
    """Raise ValueError if float64 might not represent the sums of a batch exactly."""
    if math.isinf(max_grad_norm):
        return
    most = exact_slots(grid_of(max_grad_norm), max_grad_norm)
    # No logical batch exceeds twice the expected size, plus 4096 for small batches.
    if 2 * expected_batch_size + 4096 > most:
        raise ValueError(
            f"data_loader.batch_size={expected_batch_size:g}: expected at most "
            f"{(most - 4096) // 2}, so that sums are exact in float64; use smaller batches"
        )
