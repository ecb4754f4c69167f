"""ClipStatistics: how many samples were clipped or removed. Private: depends on the data."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling.slots import RealRows


class ClipStatistics:
    """Counts over all samples so far, and norms of the last backward. No epsilon covers them."""

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
        """Begin to count the removed samples of another backward.

        Args:
            losses: `[B]`; a sample whose loss is NaN or infinite is removed; None where the loss
                is a scalar.
        """
        self._end_backward()
        if losses is not None:
            self._real = self._rows.of(losses)
            self._factors = [losses.detach().isfinite().float()]

    def note(self, squares: Tensor, factors: Tensor) -> None:
        """Note the squared norms and the clipping factors of one group, `[B]` each.

        Numbers stay on their device until they are asked for.
        """
        self._real = self._rows.of(factors)
        self._squares = (squares, self._real)
        self._factors.append(factors)
        if self._samples is None:
            self._samples = self._rows.count(len(factors))
        self.seen_samples += self._samples

    def _end_backward(self) -> None:
        """Count the samples of the last backward; a sample of several groups is one."""
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
        """Samples that were removed, and clipped, so far. Waits for the device if some are new."""
        self._end_backward()
        if self._counts:
            device = self._counts[0].device
            new = torch.stack([counts.to(device) for counts in self._counts]).sum(0).tolist()
            self._counted = [held + n for held, n in zip(self._counted, new, strict=True)]
            self._counts = []
        return self._counted

    @property
    def nonfinite_samples(self) -> int:
        """Samples that contributed nothing, since their loss or gradient was NaN or infinite."""
        return self._count()[0]

    @property
    def clipped_samples(self) -> int:
        """How often a sample was clipped by a group, and not removed."""
        return self._count()[1]

    @property
    def squared_norms(self) -> Tensor | None:
        """Squared norms `[n]` of the last backward's last group; None if it has none."""
        squares, real = self._squares
        return squares if squares is None or real is None else squares[real]
