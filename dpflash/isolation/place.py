"""PlaceTrial: the loss of a sample must not depend on its place in the batch.

The place is how far the sample is padded; of a packed document it is where in its row the document
stands, and beside which others. Before a microbatch is trained on, it is run with its samples in
other places, without dropout: the shorter samples by themselves, without the padding that only the
longer ones need, or the documents of each row in the reverse order. The losses must be those of
training up to rounding. If the model has dropout, they are compared with another run without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import PackedBatch
from ..refusal import UNTESTED
from .comparison import changed_losses
from .copies import copied
from .dropout import WithoutDropout
from .rows import mask_sums, rows_of
from .sandbox import Sandbox

_CHANGED = (
    "the loss of a sample changed as longer samples of the batch were left out and it was padded "
    "less, so nothing was released: other samples' lengths change its gradient. Mask the padding "
    "(attention_mask, means over a sample's own tokens, pack_padded_sequence), with positions "
    "that padding does not shift; or pad all samples to one public length, as by "
    f"collate_fn=dpflash.sampling.PadTo(512, {{'labels': -100}}). {UNTESTED}"
)
_MOVED = (
    "the loss of a document changed as documents stood elsewhere in their row, so nothing was "
    "released: it depends on its place, which the lengths of other documents determine, or on "
    "the documents beside it. Positions must begin anew with each document: use "
    "batch.position_ids, not arange(T). Attention must see one document, see docs/packing.md; "
    "so must targets (batch.targets, not input_ids.roll(-1)), convolutions and other layers. "
    f"{UNTESTED}"
)


class PlaceTrial:
    """Tests that losses do not depend on places: padding, and neighbors in a packed row.

    Args:
        sandbox: of model and loop.
        has_ranks: whether there are other ranks, which must run as many microbatches.

    Attributes:
        is_running: whether one of the runs is under way.
        waits: whether the losses of the microbatch itself are to be compared.
        refused: why the last microbatch that was tried was refused, or None.
        has_compared: whether samples kept their losses in some microbatch.
    """

    def __init__(self, sandbox: Sandbox, *, has_ranks: bool) -> None:
        self.is_running = self.has_compared = self.waits = False
        self.refused: str | None = None
        self._sandbox, self._has_ranks = sandbox, has_ranks
        self._is_tried = False
        self._text = _CHANGED
        self._kept: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._dtypes: set[torch.dtype] = set()
        self._words = 0
        self._is_random = self._is_by_sample = False
        self._without_dropout = WithoutDropout()
        self._stack = ExitStack()
        self._expected: torch.Generator | None = None
        self._others: tuple[Any, Any] = (None, None)

    def is_due(self, *, begins_draw: bool, is_tried: bool) -> bool:
        """Whether to try the microbatch that comes, of which a draw has one.

        Args:
            begins_draw: whether it is the first microbatch of a draw.
            is_tried: whether microbatches of this draw are tried.
        """
        self.end(loop=False)  # of an iterator that the loop has left
        self.waits = False
        self._is_tried &= not begins_draw
        return is_tried and not self._is_tried

    def take_by_sample(self) -> None:
        """Losses of the microbatch itself come one at a time."""
        self._is_by_sample = True

    def runs(self, batch: Any, shorter: Sequence[tuple[Any, Tensor]]) -> Iterator[Any]:
        """The microbatches to run, the shorter ones first; none where nothing is compared.

        Args:
            batch: not changed.
            shorter: the same without its longer samples, which are copies of others, or with
                documents elsewhere; and `[U]`, bool: samples that are in both.
        """
        if self._has_ranks:
            none = torch.zeros(0, dtype=torch.bool)
            shorter = shorter[:1] or [(copied(batch), none)]
        elif not any(bool(kept.any()) for _, kept in shorter):
            return
        self._is_tried = True
        self._kept = [kept for _, kept in shorter]
        self._losses, self._is_random = [], False
        self._without_dropout, self._is_by_sample = WithoutDropout(), False
        self._text = _MOVED if isinstance(batch, PackedBatch) else _CHANGED
        yield from (own for own, _ in shorter)
        if self._has_ranks or self._without_dropout.seen or self._is_by_sample:
            yield copied(batch)
        else:
            self.waits = len(self._losses) == len(self._kept)

    def begin(self) -> None:
        """A run begins."""
        self._sandbox.enter()
        self._stack.enter_context(self._without_dropout)
        self.is_running = True

    def start(self) -> None:
        """The loop gets the microbatch now, with its generators seeded."""
        if self.is_running:
            self._words = 0
            self._expected = torch.Generator()
            self._expected.set_state(torch.get_rng_state())
            self._others = random.getstate(), _numpy_state()

    def forward(self, dtypes: set[torch.dtype], *, is_random: bool) -> None:
        """The model was called, which draws one number of torch's generator for its masks.

        Args:
            dtypes: that it computes in.
            is_random: whether it drew other numbers too, dropout aside.
        """
        self._words += 1
        self._dtypes |= dtypes
        self._is_random |= is_random

    def end(self, *, loop: bool = True) -> None:
        """A run is over; restores model and loop."""
        if not self.is_running:
            return
        self.is_running = False
        self._stack.close()
        if self._expected is not None:
            for _ in range(self._words):
                torch.randint(2**62, (), generator=self._expected)
            same = torch.equal(self._expected.get_state(), torch.get_rng_state())
            self._is_random |= not same or self._others != (random.getstate(), _numpy_state())
        self._sandbox.leave(loop=loop)

    def refusal(self, losses: Tensor) -> str | None:
        """A message where losses `[U]` of the last run are not those of another, or None.

        The last is that of the microbatch itself where it `waits`.
        """
        self._losses.append(losses.detach().clone())
        if len(self._losses) <= len(self._kept):
            return None
        (*before, now), self._losses, self.waits = self._losses, [], False
        if self._is_random or any(x.shape != self._kept[0].shape for x in (*before, now)):
            return None
        # Float64 models of Hugging Face have norms and rotations in float32.
        dtypes = self._dtypes | {now.dtype, torch.float32}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        pairs = zip(before, self._kept, strict=True)
        if any(bool((changed_losses(x, now, eps=eps) & kept).any()) for x, kept in pairs):
            # A loop that catches the error meets it again.
            self.refused = self._text
        else:
            self.refused, self.has_compared = None, True
        return self.refused


def _numpy_state() -> Any:
    return repr(np.random.get_state(legacy=False))


def fuller_left_out(batch: Any, rows: Sequence[bool]) -> tuple[Any, list[bool]] | None:
    """A batch in which copies of others are in place of the rows with more ones in a mask.

    A loop may cut rows of one length to the longest of the batch.

    Args:
        batch: not changed.
        rows: which of its rows are samples.

    Returns:
        (batch, which rows are of their own sample); None where masks do not differ.
    """
    size, samples = len(rows), [row for row, is_sample in enumerate(rows) if is_sample]
    for sums in mask_sums(batch, size) if samples else ():
        filled = sums.tolist()
        own = sorted(filled[row] for row in samples)
        most = min(own[(len(own) - 1) // 2], own[-1] - 1)
        kept = [filled[row] <= most and is_sample for row, is_sample in enumerate(rows)]
        if any(kept):
            source = [row if kept[row] else kept.index(True) for row in range(size)]
            return rows_of(batch, source, size), kept
    return None
