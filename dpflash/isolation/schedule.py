"""Schedule: decides which microbatches are tried.

Tried are the microbatches of the first draws, since most batches show a dependence between
samples, and of a few later draws; and microbatches with something new that no trial had: a label,
or an operation of the model or of the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..packing import Units
from ..verification.nested import tensors_of
from .labels import ReplacedLabels

# All microbatches of the first draws are tried, and of later draws at powers of two. The first
# microbatch of a draw is not enough: it has the longest documents, and may have only one.
_ALL_TRIED = 4
# The last tried draw, if the shapes of microbatches do not change and nothing is new.
_LAST_TRIED = 64
# New operations restart the trials at most so often: further new operations depend on the data.
_MOST_PATHS = 8
# More of the first draws are tried if draws are small, to compare at least so many samples.
_ENOUGH = 16


class Schedule:
    """Decides which microbatches are tried.

    Args:
        expected_batch_size: expected size of a draw.
        has_ranks: whether there are other ranks, which must try the same microbatches. New labels
            then begin no trials, since each rank sees its own samples alone.
        path: returns the operations of the backward that is about to begin.

    Attributes:
        trials: number of the last tried draw, from 0 since the last restart; -1 if none was.
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
        """Whether a draw has begun since the last restart."""
        return self._draws > 0

    def is_due(self, microbatch: int) -> bool:
        """Whether to try the microbatch with this number in its draw; the same on all ranks."""
        self._draws += not microbatch
        due = self._is_tried(self._draws)
        self.trials += due and not microbatch
        self._is_skipped = due and not (torch.is_grad_enabled() or self._ignores_grad)
        return due and not self._is_skipped

    @property
    def is_near(self) -> bool:
        """Whether microbatches of the draw under way, or of the next draw, are tried."""
        return self._is_tried(self._draws) or self._is_tried(self._draws + 1)

    def _is_tried(self, draw: int) -> bool:
        often = draw <= self._all_tried or draw & (draw - 1) == 0
        return often and (draw <= _LAST_TRIED or self._has_shapes or self._labels is None)

    def is_new(self, batch: Any, real: Tensor, units: Units | None) -> bool:
        """Whether to try a microbatch that is not due, because it has a new label.

        Args:
            batch: the microbatch.
            real: `[U]`, bool: its samples that are not padding.
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
        """Whether this backward's microbatch was fetched under no_grad; if so, try next draws."""
        if not self._is_skipped:
            return False
        self._is_skipped, self._ignores_grad, self._draws = False, True, 0
        return True

    def has_new_path(self, *, is_tried: bool) -> bool:
        """Whether the backward has operations that no tried microbatch had."""
        path = self._path()
        if is_tried:
            self._tried_path |= path
        return not path <= self._tried_path and self._new_paths < _MOST_PATHS

    def try_next(self) -> None:
        """Try the next microbatches, since model or loop do something new."""
        self._draws = 0
        self._new_paths += 1

    def restart(self) -> None:
        """Begin again with the next draw."""
        self._draws, self.trials = 0, -1
