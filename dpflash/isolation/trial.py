"""Trial: a microbatch is run twice, first with other contents in some of its samples.

The losses, the layers' inputs and the per-sample gradients of the other samples must be the same
both times. So nothing that model or loop computes of one sample depends on another one. Nothing
is trained on the altered microbatch, which the loader yields before the microbatch itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..packing import PackedBatch, Units
from ..verification.attributes import OwnAttributes
from ..verification.declared_reduction import REMEDY
from ..verification.digests import is_deterministic
from ..verification.forward_rows import ForwardRows, mixed, reached
from ..verification.proof import WeightedBackward
from . import alteration
from .alteration import Alteration
from .sandbox import Sandbox

# All microbatches of the first draws are tried, and those of later ones at powers of two. Not the
# first microbatch alone: it has the longest documents, and may have a single one.
_ALL_TRIED = 4
# Where draws are small, more of them, so that so many samples are compared.
_ENOUGH = 16

_CHANGED = (
    "the loss of a sample changed as other samples of the batch were replaced, so nothing was "
    "released: it depends on them. The usual causes are a mean, a norm or a maximum over the "
    "batch in the loop or in the loss (normalized advantages, class weights, mixup, hard "
    "negatives); something that the loop keeps of a microbatch for the next one (a queue of "
    "embeddings, a running mean); a weight that the loop changes with each microbatch (count "
    "loader.releases instead); losses that are multiplied by loader.is_real (leave that out: "
    "padding counts for nothing); another batch that the loop fetches for each microbatch; and "
    "random numbers whose count depends on the contents (draw for the whole shape, then mask). "
    "Compute the loss of each sample from its own row alone; engine.check helps to find where it "
    "is not. make_private(verify_first_batch=False) leaves this proof out"
)
_CHANGED_DOCUMENT = (
    "the loss of a document changed as other documents of the batch got other tokens or "
    "were left out, so nothing was released: it depends on them. The usual causes are targets "
    "shifted by hand (input_ids.roll(-1)), where the last token of a document predicts the first "
    "one of the next (use batch.targets, or batch.labels with causal_lm(sample_index=...)); "
    "division by a number of the whole batch, such as that of its tokens or documents; attention "
    "that sees other documents (see docs/packing.md); and random masks that are not from the "
    "global generators. make_private(verify_first_batch=False) leaves this proof out"
)
_GRADIENT = (
    "the gradient of layer '{layer}' for a sample changed as other samples of the batch were "
    "replaced, so nothing was released: it depends on them (a factor of the losses that the batch "
    "determines, a contrastive loss), or two backwards of one batch differ (checkpointing without "
    "the random state, hooks that keep something; where only rounding differs, "
    "torch.use_deterministic_algorithms(True) helps). "
    "make_private(verify_first_batch=False) leaves this proof out"
)
_REDUCTION = (
    "loss_reduction={declared!r}, but the scalar is not the {declared} of losses of single "
    "samples: the gradient of layer '{{layer}}' for a sample changed as other samples of the "
    "batch were replaced, so nothing was released. A mean over the batch's valid tokens, the "
    "default of Hugging Face models, and a mean with class weights do that. " + REMEDY
)
_CALLS = (
    "the model was called another number of times for a microbatch than for its trial, in which "
    "some samples are others, or the trial had no backward, so nothing was released: treat trials "
    "as any other microbatch (no `if not loader.is_real.any(): continue`). "
    "make_private(verify_first_batch=False) leaves trials out"
)


class Trial:
    """Which microbatches are tried, and what the one that is has shown.

    Args:
        sandbox: of model and loop. What modules keep between forwards is kept apart: that of
            altered microbatches is what altered microbatches find.
        expected_batch_size: of a draw.

    Attributes:
        has_compared: whether samples kept their results in some microbatch.
        has_begun: whether some microbatch was to be tried.
        is_impossible: whether no microbatch so far could be altered.
        real: `[U]`, bool: the samples of the microbatch that are not padding.
        is_by_sample: whether losses are computed one row at a time.
        is_altered: whether the altered microbatch is under way.
        recorded: what the backward of the altered microbatch has shown, or None.
    """

    def __init__(self, sandbox: Sandbox, expected_batch_size: float) -> None:
        self.has_compared = self.has_begun = self.is_altered = False
        self.is_impossible, self.is_by_sample = True, False
        self.real = torch.empty(0, dtype=torch.bool)
        self.recorded: WeightedBackward | None = None
        self._sandbox = sandbox
        self._all_tried = max(_ALL_TRIED, -(-_ENOUGH // max(1, round(expected_batch_size))))
        self._draws, self._trials = 0, -1  # Number of the last draw, and of the last tried one.
        self._alteration: Alteration | None = None
        self._of_altered: OwnAttributes | None = None
        self._rows: list[ForwardRows] = []
        self._calls = 0
        self._before: Any = None  # The microbatch before this one, where each has one sample.
        self._number = -1
        self._is_skipped = self._ignores_grad = False
        self._roots: Tensor | float = 1.0
        self._losses: Tensor | None = None
        self._refused: str | None = None

    def is_due(self, microbatch: int) -> bool:
        """Whether to try this microbatch, the same on all ranks; the first one begins a draw."""
        # Not restored late: the user may have changed the model since.
        self.is_altered = False
        self.finish()
        self._draws += not microbatch
        if not microbatch:
            self._before, self._number = None, -1
        due = self._draws <= self._all_tried or self._draws & (self._draws - 1) == 0
        self._trials += due and not microbatch
        self._is_skipped = due and not (torch.is_grad_enabled() or self._ignores_grad)
        due &= not self._is_skipped
        if not due:
            self._of_altered = None
        return due

    def begin_backward(self) -> None:
        """A backward begins: of a microbatch that was fetched under no_grad, others are tried."""
        if self._is_skipped:
            self._is_skipped, self._ignores_grad, self.has_begun = False, True, True
            self._draws = 0

    def finish(self) -> None:
        """Nothing more is compared with the altered microbatch."""
        self._alteration = self._losses = self.recorded = None
        self._rows, self._calls = [], 0

    def begin(
        self, batch: Any, size: int, real: Tensor | None, units: Units | None, *, seed: int
    ) -> Alteration | None:
        """The altered microbatch, which is to be run now; None where the batch cannot be altered.

        Args:
            batch: not changed.
            size: U, its samples with those of padding.
            real: `[U]`, bool: which are samples; None for all.
            units: the samples where they are no rows of the batch.
            seed: a secret one, the same on all ranks that hold parts of these samples.
        """
        if isinstance(batch, PackedBatch):
            self._alteration = alteration.of_documents(batch, self._trials)
            lengths = [end - start for start, end in batch.units.spans]
            self._roots = torch.tensor(lengths).sqrt()
        elif size == 1:
            # What model and loop keep of a sample must not reach the one after the next.
            self._number += 1
            before = self._before if self._number % 2 else None
            self._alteration = alteration.of_one(batch, before, real)
            self._before = alteration.copied(batch)
        else:
            rng = np.random.default_rng(seed)
            self._alteration = alteration.of_samples(batch, size, real, units, rng)
        self.has_begun = True
        if self._alteration is None:
            self._of_altered = None
            return None
        self.is_impossible = False
        self.real = torch.ones(size, dtype=torch.bool) if real is None else real
        self._sandbox.enter(self._of_altered)
        self.is_altered = True
        return self._alteration

    def end(self) -> None:
        """The microbatch itself follows, in the state in which the altered one began."""
        self._of_altered = self._sandbox.attributes()
        self._sandbox.leave()
        self.is_altered = False

    def abandon(self, left: Alteration) -> None:
        """The loop has left an altered microbatch: the model is as before, generators go on."""
        if self.is_altered and left is self._alteration:
            self._sandbox.leave(loop=False)
            self._of_altered, self.is_altered = None, False
            self.finish()

    def take_by_sample(self) -> None:
        """Losses are computed one row at a time, so they are all that is compared."""
        self.is_by_sample, self.recorded = True, None

    # Results

    @property
    def sees_rows(self) -> bool:
        """Whether layers' inputs and gradients are compared too."""
        found = self._alteration
        return found is not None and found.places and not self.is_by_sample

    def compares_gradients(self, *, is_alone: bool) -> bool:
        """Whether the backward is to be compared with that of the altered microbatch.

        Args:
            is_alone: whether other ranks need not compare too.
        """
        is_recorded = self.sees_rows and self.recorded is not None
        return is_recorded and (not is_alone or bool(self.kept.any()))

    @property
    def kept(self) -> Tensor:
        """`[U]`, bool: samples whose results must stay as they were."""
        assert self._alteration is not None
        return self._alteration.kept

    @property
    def decides(self) -> bool:
        """Whether the microbatch was tried and is not compared yet, or an earlier one failed."""
        return self._alteration is not None or self._refused is not None

    def restart(self, refusal: str) -> None:
        """Try the next draws; refuse the rest of this one, and then all until a trial passes."""
        self._draws, self._trials, self._refused = 0, -1, refusal
        self._of_altered = None

    def compare_rows(self, rows: ForwardRows) -> tuple[str | None, int]:
        """Take the rows of a call of the model; those of an altered microbatch are held.

        Returns:
            (why nothing may be released, or None; how many samples were compared)
        """
        if self.is_altered:
            self._rows.append(rows)
            return None, 0
        number, self._calls = self._calls, self._calls + 1
        if number >= len(self._rows):
            return _CALLS, 0
        first = self._rows[number]
        if first.size != rows.size or rows.size != len(self.kept):
            return None, 0  # Refused elsewhere, or of other samples.
        if not bool(self.kept.any()):
            return None, 0
        if first.padded != rows.padded:  # what follows is rounded, or masked, in other ways
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
        """The message about a gradient that changed in a layer, to be formatted with its name.

        Args:
            declared: the loss_reduction, or None.
        """
        return _GRADIENT if declared is None else _REDUCTION.format(declared=declared)

    def refusal_of(self, row: int, loss: Tensor) -> str | None:
        """A message where the loss `[1]` of a kept row differs from the one that is held."""
        found, before = self._alteration, self._losses
        if found is None or self.is_altered or not bool(found.kept[row]):
            return self._refused
        if before is None:
            return _CALLS
        same = torch.equal(before[row], loss.detach()[0]) or not loss.isfinite()
        if same:
            self.has_compared, self._refused = True, None
        return None if same else _CHANGED

    def hold(self, losses: Tensor) -> None:
        """Keep the losses `[U]`, or the scalar, of the altered microbatch."""
        self._losses = losses.detach().clone()

    def refusal(self, losses: Tensor) -> str | None:
        """A message if losses `[U]` of the batch differ from those that are held."""
        found, before = self._alteration, self._losses
        if found is not None and found.places:
            if self._calls != len(self._rows) or before is None:
                return _CALLS
        if found is None or before is None or not bool(found.kept.any()):
            return self._refused
        if not before.shape == losses.shape == found.kept.shape:
            return self._refused  # A scalar, or refused elsewhere.
        now = losses.detach()
        apart = (before - now).abs()
        if is_deterministic(now.device):
            allowed = torch.zeros_like(apart)
        else:
            # A sum of n numbers in another order is rounded by some sqrt(n) eps.
            roots = self._roots if isinstance(self._roots, float) else self._roots.to(now)
            allowed = torch.finfo(now.dtype).eps * (8 + roots) * now.abs()
        same = (apart <= allowed) | ~(before.isfinite() | now.isfinite())
        if bool(((~same).cpu() & found.kept).any()):
            return _CHANGED if found.places else _CHANGED_DOCUMENT
        if self._draws:
            self.has_compared, self._refused = True, None
        return self._refused
