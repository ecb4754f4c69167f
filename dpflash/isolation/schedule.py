"""Schedule: decides which microbatches are tried, that is, run with altered samples first.

The microbatches of the first logical batches and of a few later logical batches are tried: a
dependence between samples shows in most batches. A microbatch is also tried if it has a label
that no trial had, or if the model or the loop runs an operation that no trial ran.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..packing import Units
from ..verification.nested import tensors_of
from .labels import ReplacedLabels

# Number of first logical batches that are tried. A later one is tried if its number is a power of
# two. All of its microbatches are tried, since the first may hold only the longest document.
_ALL_TRIED = 4
# Last logical batch that is tried if shapes stay the same and no label or operation is new.
_LAST_TRIED = 64
# New operations restart trials this often at most; further ones seem to depend on the data.
_MOST_PATHS = 8
# Small logical batches are tried until they have this many samples in expectation.
_ENOUGH = 16


class Schedule:
    """Decides which microbatches are tried.

    Args:
        expected_batch_size: expected size of a logical batch.
        has_ranks: whether there are other ranks, which must try the same microbatches. New labels
            then begin no trials, since each rank sees only its own samples.
        path: function that returns the operations of the backward that is about to begin.

    Attributes:
        trials: number of tried logical batches since the last restart, minus 1.
    """

    def __init__(
        self,
        expected_batch_size: float,
        *,
        has_ranks: bool,
        path: Callable[[], set[tuple[str, str]]],
    ) -> None:
        self.trials = -1
        self._draws = 0
        self._all_tried = max(_ALL_TRIED, -(-_ENOUGH // max(1, round(expected_batch_size))))
        self._labels = None if has_ranks else ReplacedLabels()
        self._path = path
        self._tried_path: set[tuple[str, str]] = set()
        self._new_paths = 0
        self._is_skipped = self._ignores_grad = False
        self._shapes: list[torch.Size] | None = None
        self._has_shapes = False  # Whether microbatches have several shapes.

    @property
    def has_begun(self) -> bool:
        """Whether a logical batch has begun since the last restart."""
        return self._draws > 0

    def is_due(self, microbatch: int) -> bool:
        """Return whether to try this microbatch of the logical batch; all ranks agree."""
        self._draws += not microbatch
        due = self._is_tried(self._draws)
        self.trials += due and not microbatch
        self._is_skipped = due and not (torch.is_grad_enabled() or self._ignores_grad)
        return due and not self._is_skipped

    @property
    def is_near(self) -> bool:
        """Whether microbatches of the current or the next logical batch are tried."""
        return self._is_tried(self._draws) or self._is_tried(self._draws + 1)

    def _is_tried(self, draw: int) -> bool:
        often = draw <= self._all_tried or draw & (draw - 1) == 0
        return often and (draw <= _LAST_TRIED or self._has_shapes or self._labels is None)

    def is_new(self, batch: Any, real: Tensor, units: Units | None) -> bool:
        """Return whether to try a microbatch that is not due, because it has a new label.

        Args:
            batch: the microbatch.
            real: `[U]`, bool: the samples that are not padding.
            units: the samples if they are not single rows of the batch, else None.
        """
        shapes = [x.shape for _, x in tensors_of(batch)]
        self._shapes = shapes if self._shapes is None else self._shapes
        self._has_shapes |= shapes != self._shapes
        if self._labels is None or len(real) < 2 or not torch.is_grad_enabled():
            return False
        return self._labels.has_new(batch, real, units)

    def note(self, batch: Any, kept: Tensor, real: Tensor, units: Units | None) -> None:
        """Note a microbatch that is tried; the arguments are those of `ReplacedLabels.note`."""
        if self._labels is not None:
            self._labels.note(batch, kept, real, units)

    def begin_backward(self) -> bool:
        """If the microbatch was fetched under no_grad, try later microbatches and return True."""
        if not self._is_skipped:
            return False
        self._is_skipped, self._ignores_grad, self._draws = False, True, 0
        return True

    def has_new_path(self, *, is_tried: bool) -> bool:
        """Return whether the backward has operations that no tried microbatch had."""
        path = self._path()
        if is_tried:
            self._tried_path |= path
        return not path <= self._tried_path and self._new_paths < _MOST_PATHS

    def try_next(self) -> None:
        """Try the next microbatches, since the model or the loop ran a new operation."""
        self._draws = 0
        self._new_paths += 1

    def restart(self) -> None:
        """Begin again with the next logical batch."""
        self._draws, self.trials = 0, -1
