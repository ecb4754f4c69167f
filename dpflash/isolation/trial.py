"""Trial: runs a microbatch twice, first with other contents in some of its samples.

For the other samples, the losses, the layers' inputs and the per-sample gradients must be the same
in both runs. Otherwise model or loop computes something from several samples. Nothing is trained
on the altered microbatch, which the loader yields before the microbatch itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import PackedBatch, Units
from ..refusal import MORE_CAUSES, UNTESTED
from ..verification.attributes import OwnAttributes
from . import alteration
from .alteration import Alteration
from .backward_rows import BackwardRows
from .comparison import changed_losses, changed_rows, mixed, reached
from .copies import copied
from .declared_reduction import REMEDY
from .forward_rows import ForwardRows
from .recording import Recording
from .sandbox import Sandbox
from .schedule import Schedule

# Number of rows to compare one at a time before `engine.verified` is "by construction".
_ENOUGH = 16

_CHANGED = (
    "the loss of a sample changed as other samples of the batch were replaced, so nothing was "
    "released: it depends on them. Compute the loss of each sample from its own row alone; "
    "engine.check(model, batch, loss_fn) helps to find the operation. The usual causes:\n"
    "  - a mean, a norm or a maximum over the batch, in the loop or in the loss (mixup, "
    "normalized advantages, a term with reduction='mean', outputs [B, 1] against targets [B])\n"
    "  - losses * loader.is_real: leave that out, since padding counts for nothing\n"
    "  - data that the loop keeps for the next microbatch: a queue of embeddings, a running mean\n"
    "  - weights, or an attribute of the model, that the loop writes in each iteration: write "
    "them after optimizer.step(), if loader.is_last\n"
    f"{MORE_CAUSES}. "
    f"{UNTESTED}"
)
_CHANGED_DOCUMENT = (
    "the loss of a document changed as other documents of the batch got other tokens or "
    "were left out, so nothing was released: it depends on them. The usual causes are targets "
    "shifted by hand (input_ids.roll(-1)), where the last token of a document predicts the first "
    "token of the next one (use batch.targets, or batch.labels with causal_lm(sample_index=...)); "
    "division by a number of the whole batch, such as that of its tokens or documents; attention "
    "that sees other documents (see docs/packing.md); and random masks that are not from the "
    f"global generators. {UNTESTED}"
)
_GRADIENT = (
    "the gradient of layer '{layer}' for a sample changed as other samples of the batch were "
    "replaced, so nothing was released. The usual causes:\n"
    "  - it depends on other samples: a factor of the losses that the batch determines (is_real, "
    "1 / their number), a contrastive loss, another model that the loop trains in between\n"
    "  - its rounding depends on the length of a list of all samples' tokens or pairs: compute "
    "[B, T], then mask\n"
    "  - two backwards of one batch differ: checkpointing without the random state, hooks that "
    "keep state; if only rounding differs, torch.use_deterministic_algorithms(True) helps\n"
    f"{UNTESTED}"
)
_REDUCTION = (
    "loss_reduction={declared!r}, but the scalar is not the {declared} of losses of single "
    "samples: the gradient of layer '{{layer}}' for a sample changed as other samples of the "
    "batch were replaced, so nothing was released. A mean over the batch's valid tokens, the "
    "default of Hugging Face models, and a mean with class weights do that. " + REMEDY
)
_CALLS = (
    "the model was called a different number of times for a microbatch and for its trial, in "
    "which some samples are replaced, or the trial had no backward, so nothing was released: call "
    "engine.backward(losses) for each microbatch, trials too, and call the model the same number "
    "of times whatever the batch contains (no `if not loader.is_real.any(): continue`)"
)


class Trial:
    """Decides which microbatches are tried, and compares them with their altered versions.

    Args:
        sandbox: the sandbox of model and loop. Data that modules keep in an altered microbatch is
            stored separately, so that only later altered microbatches see these data.
        schedule: decides which microbatches are tried.

    Attributes:
        has_compared: whether a comparison was made and passed.
        has_begun: whether some microbatch was due to be tried.
        is_impossible: whether no microbatch so far could be altered.
        sandbox, schedule: see Args.
        real: `[U]`, bool: the samples of the microbatch that are not padding.
        rows: number of rows that were compared one at a time.
        is_by_sample: whether losses are computed one row at a time.
        is_altered: whether the altered microbatch is being run.
        altered: the recording of the altered microbatch, or None.
    """

    def __init__(self, sandbox: Sandbox, schedule: Schedule) -> None:
        self.has_compared = self.has_begun = self.is_altered = False
        self.is_impossible, self.is_by_sample = True, False
        self.rows = 0
        self.real = torch.empty(0, dtype=torch.bool)
        self.altered: Recording | None = None
        self.sandbox = sandbox
        self.schedule = schedule
        self._alteration: Alteration | None = None
        self._of_altered: OwnAttributes | None = None
        self._calls = self._row = 0
        self._before: Any = None  # The previous microbatch, if each has one sample.
        self._number = -1
        self._refused: str | None = None

    def is_due(self, microbatch: int) -> bool:
        """Return whether to try this microbatch of the logical batch; all ranks agree."""
        # Do not restore the model, which the user may have changed since the last run.
        self.is_altered = False
        self.finish()
        if not microbatch:
            self._before, self._number = None, -1
        due = self.schedule.is_due(microbatch)
        if not due:
            self._of_altered = None
        return due

    def begin_backward(self) -> None:
        """Begin a backward; if its batch was fetched under no_grad, try a later microbatch."""
        self.has_begun |= self.schedule.begin_backward()

    def has_new_path(self) -> bool:
        """Return whether the backward has operations that no tried microbatch had."""
        return self.schedule.has_new_path(is_tried=self._alteration is not None)

    def finish(self) -> None:
        """End the comparison with the altered microbatch."""
        self._alteration = self.altered = None
        self._calls = 0

    def begin(
        self, batch: Any, size: int, real: Tensor | None, units: Units | None, *, seed: int
    ) -> Alteration | None:
        """Return the altered microbatch, to be run now, or None if the batch cannot be altered.

        Args:
            batch: the microbatch, which is not changed.
            size: U, the number of samples including padding.
            real: `[U]`, bool: which samples are not padding; None if there is no padding.
            units: the samples if they are not single rows of the batch, else None.
            seed: a secret seed, the same on all ranks that hold parts of these samples.
        """
        if isinstance(batch, PackedBatch):
            real = torch.tensor([start < end for start, end in batch.units.spans])
        if alteration.is_single(batch, size):
            # Other samples came before in altered runs, which must not change a sample's results.
            self._number += 1
            before = self._before if self._number % 2 else None
            one = torch.ones(size, dtype=torch.bool) if real is None else real
            self._alteration = alteration.of_one(batch, before, one)
            self._before = copied(batch)
        elif isinstance(batch, PackedBatch):
            self._alteration = alteration.of_documents(batch, self.schedule.trials)
        else:
            rng = np.random.default_rng(seed)
            self._alteration = alteration.of_samples(batch, size, real, units, rng)
        self.has_begun = True
        if self._alteration is None:
            self._of_altered = None
            return None
        self.is_impossible = False
        self.real = torch.ones(size, dtype=torch.bool) if real is None else real
        self.schedule.note(batch, self._alteration.kept, self.real, units)
        self.sandbox.enter(self._of_altered)
        self.is_altered = True
        self.altered = Recording(self.real, has_rows=self.sees_rows)
        return self._alteration

    def end(self) -> None:
        """End the altered microbatch, and restore the state for the microbatch itself."""
        self._of_altered = self.sandbox.attributes()
        self.sandbox.leave()
        self.is_altered = False

    def abandon(self, left: Alteration) -> bool:
        """Return whether the loop has left this altered microbatch before its end.

        If so, restore the model, but not the generators.
        """
        if not self.is_altered or left is not self._alteration:
            return False
        self.sandbox.leave(loop=False)
        self.sandbox.end_microbatch()
        self._of_altered, self.is_altered = None, False
        self.finish()
        return True

    def take_by_sample(self) -> None:
        """Note that losses and gradients are computed one row at a time."""
        self.is_by_sample = True

    # Results

    @property
    def recording(self) -> Recording | None:
        """The recording of the altered microbatch while it is being run, else None."""
        return self.altered if self.is_altered else None

    @property
    def sees_rows(self) -> bool:
        """Whether layers' inputs and gradients of the whole microbatch are compared too."""
        found = self._alteration
        return found is not None and not self.is_by_sample

    def compares_gradients(self, *, is_alone: bool) -> bool:
        """Return whether to compare the backward with the altered microbatch's backward.

        Args:
            is_alone: whether there are no other ranks; then empty comparisons are skipped.
        """
        held = self.held_backward
        return held is not None and (not is_alone or bool(held[1].any()))

    @property
    def held_backward(self) -> tuple[BackwardRows, Tensor] | None:
        """The pair (rows of the altered microbatch's backward, which samples were kept: `[B]`)."""
        found, altered = self._alteration, self.altered
        if found is None or altered is None:
            return None
        if not self.is_by_sample:
            return None if altered.backward is None else (altered.backward, found.kept)
        row = slice(self._row, self._row + 1)
        before = next(iter(altered.rows[row]), None)
        return None if before is None else (before, found.kept[row])

    @property
    def kept(self) -> Tensor:
        """`[U]`, bool: samples that keep their contents, whose results must not change."""
        assert self._alteration is not None
        return self._alteration.kept

    @property
    def decides(self) -> bool:
        """Whether this microbatch is to be compared, or an earlier one failed its comparison."""
        return self._alteration is not None or self._refused is not None

    def restart(self, refusal: str) -> None:
        """Try the next logical batches, and refuse all microbatches until a trial passes."""
        self.schedule.restart()
        self._refused, self._of_altered = refusal, None
        self.has_compared, self.rows = False, 0  # what passed before shows nothing now

    def compare_rows(self, rows: ForwardRows) -> tuple[str | None, int]:
        """Compare a call of the model with the same call in the altered microbatch.

        Returns:
            (why nothing may be released, or None; the number of samples that were compared).
        """
        number, self._calls = self._calls, self._calls + 1
        if self.altered is None or number >= len(self.altered.calls):
            return _CALLS, 0
        first = self.altered.calls[number]
        if first.size != rows.size or rows.size != len(self.kept):
            return None, 0  # A call on other samples, or a size that other code refuses.
        if not bool(self.kept.any()):
            return None, 0
        if first.padded != rows.padded:  # other padding: later layers round or mask otherwise
            assert self._alteration is not None
            self._alteration = replace(self._alteration, kept=torch.zeros_like(self.kept))
            return None, 0
        refusal = mixed(first, rows, self.kept)
        if rows.size > 1 and not reached(first, rows, ~self.kept):
            return refusal, 0
        self.has_compared |= refusal is None
        return refusal, int(self.real.sum())

    @staticmethod
    def of_gradients(declared: str | None) -> str:
        """Return the message about a changed gradient, to be formatted with the layer's name.

        Args:
            declared: the loss_reduction, or None.
        """
        return _GRADIENT if declared is None else _REDUCTION.format(declared=declared)

    def refusal_of_batch(self, given: list[Tensor]) -> str | None:
        """Return a message if rows of kept samples differ from the altered batch's, or None.

        Args:
            given: digests `[U]` of the batch's tensors.
        """
        if self._alteration is None or self.altered is None or self.is_altered:
            return None
        changed = changed_rows(self.altered.batch, given)
        return _CHANGED if changed is None or bool((changed & self.kept).any()) else None

    def refusal_of(self, row: int, loss: Tensor) -> str | None:
        """Return a message if a kept row's loss `[1]` differs from its loss in the altered batch.

        The backward of the row is compared afterwards.
        """
        self._row = row
        found, before = self._alteration, self._held
        if found is None or self.is_altered or not bool(found.kept[row]):
            return self._refused
        if before is None:
            return _CALLS
        # Rounding may differ, since a recurrent layer pads each row to the longest row so far.
        rounding = torch.finfo(loss.dtype).eps ** (2 / 3)
        one = found.kept[row : row + 1]
        same = not changed_losses(before[row : row + 1], loss, one, rounding=rounding).any()
        if same:
            self.rows += 1
            self.has_compared, self._refused = self.rows >= _ENOUGH, None
        return None if same else _CHANGED

    @property
    def _held(self) -> Tensor | None:
        return None if self.altered is None else self.altered.losses

    def refusal(self, losses: Tensor) -> str | None:
        """Return a message if losses `[U]` of kept samples changed in the altered microbatch."""
        found, altered, before = self._alteration, self.altered, self._held
        if found is not None:
            if before is None or altered is None or self._calls != len(altered.calls):
                return _CALLS
        if found is None or before is None or not bool(found.kept.any()):
            return self._refused
        if not before.shape == losses.shape == found.kept.shape:
            return self._refused  # A scalar loss, or losses that other code refuses.
        if bool(changed_losses(before, losses, found.kept).any()):
            return _CHANGED_DOCUMENT if found.is_packed else _CHANGED
        if self.schedule.has_begun:
            self.has_compared, self._refused = True, None
        return self._refused
