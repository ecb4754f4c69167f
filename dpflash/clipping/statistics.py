"""ClipStatistics: counts clipped and removed samples. The counts are private."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling.slots import RealRows


class ClipStatistics:
    """Counts of all samples, and norms of the last backward. Epsilon covers neither."""

    def __init__(self, rows: RealRows):
        self._rows = rows
        self._squares: tuple[Tensor | None, Tensor | None] = (None, None)
        self._samples: int | None = None
        self._factors: list[Tensor] = []
        self._real: Tensor | None = None
        self._counted = [0, 0]
        self._counts: list[Tensor] = []
        self.seen_samples = 0

    def begin_backward(self, losses: Tensor | None = None) -> None:
        """Begin to count the clipped and removed samples of a new backward.

        Args:
            losses: `[B]`; a sample is removed if its loss is NaN or infinite. None if the loss is
                a scalar.
        """
        self._end_backward()
        if losses is not None:
            self._real = self._rows.of(losses)
            self._factors = [losses.detach().isfinite().float()]

    def note(self, squares: Tensor, factors: Tensor) -> None:
        """Record the squared norms and the clipping factors of one group, `[B]` each.

        The counts stay on their device until they are read.
        """
        self._real = self._rows.of(factors)
        self._squares = (squares, self._real)
        self._factors.append(factors)
        if self._samples is None:
            self._samples = self._rows.count(len(factors))
        self.seen_samples += self._samples

    def _end_backward(self) -> None:
        """Count the samples of the last backward; a sample in several groups is counted once."""
        noted, real, self._factors, self._samples = self._factors, self._real, [], None
        if not noted:
            return
        factors = torch.stack([own.to(noted[-1].device) for own in noted])
        removed, clipped = factors == 0, factors < 1
        if real is not None:
            removed, clipped = removed & real, clipped & real
        counts = torch.stack([removed.any(0).sum(), (clipped & ~removed).sum()])
        if self._counts and self._counts[-1].device == counts.device:
            self._counts[-1] = self._counts[-1] + counts
        else:
            self._counts.append(counts)

    def _count(self) -> list[int]:
        """Return the numbers of removed and of clipped samples so far; may wait for the device."""
        self._end_backward()
        if self._counts:
            device = self._counts[0].device
            new = torch.stack([counts.to(device) for counts in self._counts]).sum(0).tolist()
            self._counted = [held + n for held, n in zip(self._counted, new, strict=True)]
            self._counts = []
        return self._counted

    @property
    def nonfinite_samples(self) -> int:
        """Number of samples that contributed 0 because their loss or gradient was not finite."""
        return self._count()[0]

    @property
    def clipped_samples(self) -> int:
        """Number of clipped samples that were not removed, summed over the clipping groups."""
        return self._count()[1]

    @property
    def squared_norms(self) -> Tensor | None:
        """Squared norms `[n]` of the group that was clipped last; None before a backward."""
        squares, real = self._squares
        return squares if squares is None or real is None else squares[real]
