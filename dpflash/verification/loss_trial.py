"""LossTrial: the first packed batches show that a document's loss depends on that document alone.

Losses are often computed by the training loop, which no forward of the model repeats. So the
loader yields some microbatches twice, first with half of the documents changed or left out. The
losses of the other documents must be the same both times. Nothing is trained on the changed
microbatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import PackedBatch
from ..packing.changed import with_changed_documents
from ..random_state import RandomState
from .digests import is_deterministic

# All microbatches of the first draws are tried, and those of later ones at powers of two. Not the
# first microbatch alone: it has the longest documents, and may have a single one.
_ALL_TRIED = 4

_CHANGED = (
    "the loss of a document changed as other documents of the batch got other tokens or "
    "were left out, so nothing was released: it depends on them. The usual causes are targets "
    "shifted by hand (input_ids.roll(-1)), where the last token of a document predicts the first "
    "one of the next (use batch.targets, or batch.labels with causal_lm(sample_index=...)); "
    "division by a number of the whole batch, such as that of its tokens or documents; attention "
    "that sees other documents (see docs/packing.md); and random masks that are not from the "
    "global generators. make_private(verify_first_batch=False) leaves this proof out"
)


class LossTrial:
    """Which microbatches are tried, and the losses of the one that is.

    Args:
        device: of the model; the global generators of the CPU and of this device are as before
            when the microbatch itself follows.

    Attributes:
        has_compared: whether documents with changed neighbors kept their losses in some batch.
    """

    def __init__(self, device: torch.device) -> None:
        self.has_compared = False
        self._device = device
        self._draws, self._trials = 0, -1  # Number of the last draw, and of the last tried one.
        self._random: RandomState | None = None
        self._kept: Tensor | None = None
        self._roots = torch.empty(0)
        self._losses: Tensor | None = None
        self._refused: str | None = None

    def is_due(self, microbatch: int) -> bool:
        """Whether to try this microbatch, the same on all ranks; the first one begins a draw."""
        self._kept = self._losses = None
        self._draws += not microbatch
        due = self._draws <= _ALL_TRIED or self._draws & (self._draws - 1) == 0
        self._trials += due and not microbatch
        return due

    def begin(self, batch: PackedBatch) -> PackedBatch:
        """A copy of the batch, of which half of the documents are others or left out."""
        self._random = RandomState(self._device)
        lengths = [end - start for start, end in batch.units.spans]
        self._roots = torch.tensor(lengths).sqrt()
        changed, self._kept = with_changed_documents(batch, self._trials)
        return changed

    def end(self) -> None:
        """The batch itself follows; its random masks are those of the changed one."""
        assert self._random is not None
        self._random.restore()

    @property
    def decides(self) -> bool:
        """Whether the microbatch was tried and is not compared yet, or an earlier one failed."""
        return self._kept is not None or self._refused is not None

    def restart(self, refusal: str) -> None:
        """Try the next draws; refuse the rest of this one, and then all until a trial passes."""
        self._draws, self._trials, self._refused = 0, -1, refusal

    def hold(self, losses: Tensor) -> None:
        """Keep the losses `[U]` of the changed batch."""
        self._losses = losses.detach().clone()

    def refusal(self, losses: Tensor) -> str | None:
        """A message if losses `[U]` of the batch differ from those that are held."""
        kept, before = self._kept, self._losses
        self._kept = self._losses = None
        if kept is None or before is None or not bool(kept.any()):
            return self._refused
        now = losses.detach()
        apart = (before - now).abs()
        if is_deterministic(now.device):
            allowed = torch.zeros_like(apart)
        else:
            # A sum of n numbers in another order is rounded by some sqrt(n) eps.
            allowed = torch.finfo(now.dtype).eps * (8 + self._roots.to(now)) * now.abs()
        same = (apart <= allowed) | ~(before.isfinite() | now.isfinite())
        wrong = (~same).cpu() & kept
        if bool(wrong.any()):
            return _CHANGED
        if self._draws:
            self.has_compared, self._refused = True, None
        return self._refused
