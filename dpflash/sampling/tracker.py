"""BatchTracker: follows the microbatches and logical batches that the training loop receives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ..packing import Units
from ..privacy.seeds import LoopSeeds
from ..refusal import PrivateRefusal, PrivateWarning, warn
from .origins import FixedEntries

STEP_OF_ANOTHER = (
    "For the step of another model through this one (a GAN's generator), freeze this model's "
    "parameters with requires_grad_(False), or run it inside engine.public_data()"
)
FOREIGN = (
    "the batch is not of the private loader: how the batch was sampled is unknown, and several "
    "rows may belong to one sample, so nothing was released. Iterate over the loader that "
    "make_private returned, and do so anew in each epoch (itertools.cycle repeats old batches; "
    "after load_checkpoint the loader itself continues, without Accelerate's skip_first_batches). "
    "Compute views of a sample inside the model, and combine two models that share batches into "
    "one module, called as a whole. make_private(foreign_batches=True) accepts your own batches; "
    f"dpflash.PrivacyConfig lists the properties that you must guarantee then. {STEP_OF_ANOTHER}"
)
OF_TOKENS = (
    "For losses of tokens pass the mean of each row: losses.view(len(x), -1).mean(1), or "
    "dpflash.losses.cross_entropy(logits, targets). Compute several views of each sample inside "
    "the model, and pass the mean of their losses"
)
SECOND = (
    "a second backward on the same batch: its samples would enter the step twice and break the "
    "bound. Add the losses up and call engine.backward once for each batch of `for batch in "
    "loader` (microbatches accumulate until optimizer.step()). For gradients of inputs alone, as "
    "in FGSM, use torch.autograd.grad(losses.sum(), x); SAM's second backward is not supported"
)
EARLIER_EPOCH = (
    "an earlier epoch of the loader continues beside a newer one, so a sample could be released "
    "twice for one charge; finish or leave an epoch before the next one begins"
)
_ONLY_READ = (
    "An epoch that only reads the loader, without training, must run under torch.no_grad()"
)
_INCOMPLETE = (
    "the sum of a logical batch lacks a microbatch, so it is not released. Each microbatch of the "
    "private loader needs its engine.backward(losses), before optimizer.step() and before the "
    "next microbatch. Possible causes:\n"
    "- step() before the backward, or microbatches that were read ahead, as by list(loader)\n"
    "- a guard such as `if not torch.isfinite(loss): continue`: remove it, since samples whose "
    "gradient is not finite contribute zero; an empty microbatch needs its backward too\n"
    "- a backward through a copy of the model: call the model that make_private returned\n"
    "- a backward that raised an error, or ran inside engine.public_data()\n"
    f"- an epoch without training. {_ONLY_READ}"
)
_UNRELEASED = (
    "a drawn batch was not released: optimizer.step() must follow each logical batch before the "
    "next one begins or the epoch ends, even if the batch is empty and whatever its losses are. "
    "Otherwise the number of steps reveals private data. Pass the optimizer to make_private, and "
    "call step() of the returned optimizer after each microbatch; an optimizer that was built on "
    "the returned model releases nothing. The step at a logical batch's last microbatch releases, "
    f"so larger batches need no gradient accumulation of your own. {_ONLY_READ}"
)


@dataclass(frozen=True)
class BatchMark:
    """Describes a microbatch and its place in the logical batch.

    Attributes:
        draw: number of the logical batch.
        size: number of rows, padding rows included; with `units`, the number of units.
        last: whether the microbatch is the last one of the logical batch.
        microbatch: index of the microbatch in the logical batch.
        real: `[size]`, bool: True for rows (or units) that are samples; None if all are samples.
        units: the samples, if samples are not rows; else None.
        is_trial: whether this is a trial of the microbatch (see `Trial`), which is not trained on.
    """

    draw: int
    size: int
    last: bool
    microbatch: int = 0
    real: Tensor | None = field(default=None, compare=False)
    units: Units | None = field(default=None, compare=False)
    is_trial: bool = False

    @property
    def of_rows(self) -> BatchMark:
        """This mark, but `size` counts rows; `real` is True for rows that belong to a unit."""
        units = self.units
        if units is None:
            return self
        rows = units.shape[0]
        real = units.index < units.size if units.are_rows else torch.ones(rows, dtype=torch.bool)
        real &= not self.is_trial
        return replace(self, size=rows, real=real)

    @property
    def of_trial(self) -> BatchMark:
        """The mark for a trial of this microbatch, in which all rows count as padding."""
        none = torch.zeros(self.size, dtype=torch.bool)
        return replace(self, last=False, real=none, is_trial=True)

    def without(self, bad: Sequence[int]) -> BatchMark:
        """Return the mark in which entries `bad`, or units that contain them, are padding."""
        if not bad and self.real is not None:
            return self
        real = torch.ones(self.size, dtype=torch.bool) if self.real is None else self.real.clone()
        units = self.units
        index = torch.arange(self.size) if units is None else units.index
        of_units = index[list(bad)]
        real[of_units[of_units < self.size]] = False
        return replace(self, real=real)

    @property
    def count(self) -> int:
        """Number of samples, without padding."""
        return self.size if self.real is None else int(self.real.sum())


class LogicalBatch(Protocol):
    """The methods of the private step that the tracker calls."""

    @property
    def is_open(self) -> bool:
        """Whether the sum holds microbatches of a logical batch that was not released yet."""

    @property
    def releases(self) -> int:
        """Number of releases charged so far."""

    def begin_microbatch(self, samples: int, units: Units | None, *, begins_draw: bool) -> None:
        """Begin a microbatch with this number of samples, which are its rows or units."""

    def begin_row(self) -> None:
        """Begin one row, which is trained on like a microbatch."""

    def may_begin(self, new_epoch: bool, draw: int | None) -> bool:
        """Return whether the loader may draw another logical batch, see `BatchTracker`."""

    def abandon(self) -> None:
        """Drop the logical batch, since the loop began another epoch."""

    def noting_refusals(self) -> AbstractContextManager[None]:
        """Return a context that records a PrivateRefusal raised in it."""


class BatchTracker:
    """Follows the training loop over microbatches, and refuses steps without a sensitivity bound.

    Args:
        fetched_ahead: whether DataLoader workers fetch batches ahead of the loop.
        equal_sizes: whether all logical batches have the same size.
        foreign_batches: whether batches that are not from the loader are accepted.
        seeds: seeds of the random numbers that the loop draws during a logical batch.
        entries: the dataset's entries, which must not change between epochs.

    Attributes:
        foreign_batches: the argument.
        current: mark of the current microbatch; None if it did not come from a private loader.
        backward_done: whether the current microbatch had its backward.
        epochs: number of epochs that have started.
        received: number of microbatches that the loop has received, trials included. PRIVATE.
        next_draw: number of the logical batch at which a resumed run continues.
        returns: number of times that the loader was set back to an earlier logical batch.
        emitted: sizes of the logical batches that another loader fetched and did not release yet.
        signalled: whether another loader has signalled which steps release. The loop of Opacus'
            BatchMemoryManager calls step() for each microbatch, and so needs such signals.
        signalled_now: whether the current step was signalled.
        skipped_last_step: whether the last step only ended a microbatch, without a release.
    """

    def __init__(
        self,
        *,
        fetched_ahead: bool = False,
        equal_sizes: bool = False,
        foreign_batches: bool = True,
        seeds: LoopSeeds | None = None,
        entries: FixedEntries | None = None,
    ) -> None:
        self.foreign_batches = foreign_batches
        self.current: BatchMark | None = None
        self.backward_done = False
        self.epochs = self.received = 0
        self.next_draw = 0
        self.returns = 0
        self.emitted: deque[int] = deque()
        self.signalled = False
        self.signalled_now = False
        self.skipped_last_step = False
        self.is_inside = self.is_waiting = False
        self._fetched_ahead = fetched_ahead
        self._equal_sizes = equal_sizes
        self._batch: LogicalBatch | None = None
        self._signals: deque[bool] = deque()
        self._seeds = seeds
        self._entries = entries
        self._signalled = 0
        self._seen = 0
        self._summed = 0
        self._without_grad = False
        # Whether a batch of this epoch had a backward / was left without a backward under no_grad.
        self._is_trained = self._is_read = False
        self._releases_before = 0  # number of releases when the epoch began
        self._still_to_come = 0
        # Keep it after the release, since the loop may pass the rows of this batch again.
        self._last_yielded: BatchMark | None = None
        self._refused: BatchMark | None = None
        self._charged: BatchMark | None = None
        self._left: BatchMark | None = None

    def attach(self, batch: LogicalBatch) -> None:
        """Set the private step, to which the loader's microbatches are reported."""
        self._batch = batch

    def may_begin(self, new_epoch: bool, draw: int | None = None) -> bool:
        """Return whether the loader may draw another logical batch, or begin an epoch with it.

        `draw` is the number of that batch; None means the batch after the loop's current one.
        """
        return self._batch is None or self._batch.may_begin(new_epoch, draw)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark in the with block that the loop iterates over one `LogicalBatch`."""
        self.is_inside, self.is_waiting, epoch = True, False, self.epochs
        try:
            yield
        finally:
            if epoch == self.epochs:  # else the batch is of an earlier epoch
                self.is_inside, self.is_waiting = False, True

    def wait(self) -> None:
        """Mark that the loop has received a `LogicalBatch` but does not iterate over it yet."""
        self.is_waiting = True

    def noting_refusals(self) -> AbstractContextManager[None]:
        """Return a context that records a PrivateRefusal raised in it."""
        return nullcontext() if self._batch is None else self._batch.noting_refusals()

    @property
    def releases(self) -> int:
        """Number of releases that have begun so far."""
        return 0 if self._batch is None else self._batch.releases

    # Signals of another loader: Opacus' BatchMemoryManager

    def signal(self, do_skip: bool) -> None:
        """Record that the next step ends only a microbatch (True), or a logical batch (False)."""
        self._signals.append(do_skip)
        self._seed_signalled()

    def _seed_signalled(self) -> None:
        """Seed the generators for the next batch, which comes from another loader."""
        self._signalled += 1
        if self._seeds is not None:
            self._seeds.seed("signal", self.epochs, self._signalled)

    @property
    def waiting_signals(self) -> int:
        """Number of signals that no step has used yet."""
        return len(self._signals)

    @property
    def step_will_release(self) -> bool:
        """Whether the step after the current backward will release a logical batch."""
        if self._signals:
            return not self._signals[0]
        return self.current is not None and self.current.last

    def forget_signals(self) -> None:
        """Drop signals of batches that the loop will not receive."""
        self._signals.clear()
        self.skipped_last_step = False

    def step_ends_microbatch(self) -> bool:
        """Return whether the current step ends only a microbatch; consume its signal."""
        self.signalled_now = bool(self._signals)
        mark = self.current
        if self.signalled_now:
            skip = self._signals.popleft()
            if skip and mark is None:
                self.backward_done = False
        else:
            skip = mark is not None and not mark.last
        if mark is not None and mark is not self._refused:
            self._require_backward()
            if not (skip or mark.last):
                raise PrivateRefusal(_INCOMPLETE) from None
        self.skipped_last_step = skip
        return skip

    @property
    def has_left_trial(self) -> bool:
        """Whether the loop left a trial before the sum had any microbatch."""
        return self.current is not None and self.current is self._left

    @property
    def is_between_batches(self) -> bool:
        """Whether the current step belongs to no private batch."""
        is_free = self.current is None or self.current is self._refused
        return is_free and not self.backward_done and not self.signalled_now

    # Epochs and microbatches of the private loader

    def abandon(self) -> None:
        """Drop a logical batch that the loop left before its release."""
        if self._batch is not None and self._batch.is_open:
            warn(
                "the loop left its last logical batch before optimizer.step() released it; its "
                "gradients are dropped. Leave `for batch in loader` only if loader.is_last is "
                "True, or at its end; next(iter(loader)) begins an epoch each time",
                PrivateWarning,
            )
        elif (
            self._is_trained
            and self.current is not None
            and self.current is not self._refused
            and self.releases == self._releases_before
        ):
            warn(
                "the loop left an epoch of the private loader before anything was released in it, "
                "so it trained nothing: the first iterations are trials, and a release may need "
                "several microbatches. Count loader.releases instead of iterations, and leave "
                "`for batch in loader` only if loader.is_last is True",
                PrivateWarning,
            )
        self._is_trained = False
        if self._batch is not None:
            self._batch.abandon()

    def begin_epoch(self, next_draw: int | None = None) -> None:
        """Begin an epoch; drop a logical batch that was not released.

        Args:
            next_draw: number of the epoch's first logical batch; None for a shuffled epoch.

        Raises:
            PrivateRefusal: the dataset has other entries than before.
        """
        self.abandon()
        if self._entries is not None:
            self._entries.refuse_changed()
        self.is_inside = self.is_waiting = False
        self.current = self._last_yielded = None
        self.next_draw = self.next_draw if next_draw is None else next_draw
        self._is_trained = self._is_read = False
        self._releases_before = self.releases
        self.dropped()
        self.emitted.clear()
        self.epochs += 1

    def dropped(self) -> None:
        """Record that the gradients of the logical batch were dropped."""
        self.backward_done = False
        self._seen = self._summed = 0

    def refused(self) -> None:
        """Drop the current batch without warning about the missing step."""
        self.dropped()
        self._refused = self.current

    def place(self) -> tuple[int, int, int] | None:
        """Return (returns, draw, microbatch) of the current mark; None for another loader."""
        mark = self.current
        return None if mark is None else (self.returns, mark.draw, mark.microbatch)

    def real_rows(self, rows: int) -> Tensor | None:
        """Return a mask `[rows]`, True for the current microbatch's samples; None if all are.

        If a batch from elsewhere has as many rows as the last released batch, it may be a copy of
        that batch. Padding rows would then count a sample twice, so the released mask is used.
        If a loader iterates `batch_sampler`, an empty logical batch is one padding row.
        """
        if rows == 1 and self._is_empty_draw:
            return torch.zeros(1, dtype=torch.bool)
        mark = self.current or self._last_yielded
        return None if mark is None or mark.size != rows else mark.real

    @property
    def _is_empty_draw(self) -> bool:
        """Whether another loader signals the steps, and the current logical batch is empty."""
        by_signal = self.current is None and self.waiting_signals > 0
        return by_signal and bool(self.emitted) and self.emitted[0] == 0

    def resume(self, draw: int, *, returns: int = 0) -> None:
        """Continue at logical batch `draw`; open epochs get no further batch."""
        self.next_draw, self.returns = draw, returns
        self.epochs += 1
        self.current = None
        self.is_inside = False

    def charged(self) -> None:
        """Record that the current logical batch was charged, so a resumed run skips it."""
        self._charged = self.current
        if self.current is not None:
            self.next_draw = self.current.draw + 1

    @property
    def is_charged(self) -> bool:
        """Whether the release of the current logical batch was charged already."""
        return self.current is not None and self.current is self._charged

    def still_to_come(self, batches: int) -> None:
        """Set the number of batches of a shuffled epoch after the current batch."""
        self._still_to_come = batches

    @property
    def left_of_epoch(self) -> int:
        """Number of unreleased batches of a shuffled epoch, the current batch included."""
        by_signal = self.signalled or self.waiting_signals > 0
        at_hand = len(self.emitted) if by_signal else int(self.current is not None)
        return self._still_to_come + at_hand

    def begin_microbatch(self, mark: BatchMark, epoch: int) -> None:
        """Record that the loop received a microbatch of epoch number `epoch`."""
        if epoch != self.epochs:
            # Samplers cannot check this: workers may have fetched the older epoch's batches.
            raise RuntimeError(EARLIER_EPOCH)
        begins_draw = self.current is None or self.current.draw != mark.draw
        self._leave_batch(ends_draw=begins_draw)
        self.current = self._last_yielded = mark
        self.received += 1
        self.backward_done = False
        self._without_grad = not torch.is_grad_enabled()
        self.next_draw = mark.draw
        if self._batch is not None:
            self._batch.begin_microbatch(mark.size, mark.units, begins_draw=begins_draw)

    def before_rows(self) -> None:
        """Refuse to run row by row if this microbatch is in the sum, or an earlier one is not."""
        if self.backward_done:
            raise PrivateRefusal(SECOND) from None
        if self.current is not None and self._summed < self.current.microbatch:
            raise PrivateRefusal(_INCOMPLETE) from None

    def leave_trial(self) -> None:
        """Record that the loop left a trial, which must not be released."""
        if self.current is not None and self.current.is_trial and not self._summed:
            self._left = self.current

    @contextmanager
    def row(self, number: int) -> Iterator[None]:
        """In the with block, treat one row of the current microbatch as a microbatch."""
        whole = self.current
        assert whole is not None and self._batch is not None
        real = None if whole.real is None else whole.real[number : number + 1]
        is_last = whole.last and number + 1 == whole.size
        own = self.current = replace(whole, size=1, real=real, last=is_last)
        self.backward_done, self._summed = False, whole.microbatch
        self._batch.begin_row()
        try:
            yield
        finally:
            self._charged = whole if self._charged is own else self._charged
            self._refused = whole if self._refused is own else self._refused
            self.current = whole if self.current is own else self.current

    def end_epoch(self, last: BatchMark | None) -> None:
        """Record that the loader has no more batches after the batch with this mark."""
        if self.current is last:
            self._leave_batch(ends_draw=True)

    def _leave_batch(self, *, ends_draw: bool) -> None:
        """Refuse to leave a microbatch without backward, or a logical batch without release."""
        mark = self.current
        if self._batch is None or mark is None or mark is self._refused:
            return
        if self._without_grad and not self._is_trained:
            self._is_read = True
            return
        self._require_backward()
        if ends_draw:
            raise PrivateRefusal(_UNRELEASED) from None

    def _require_backward(self) -> None:
        """Refuse a sum that lacks the current or an earlier microbatch, even an empty one."""
        mark = self.current
        if mark is not None and not mark.is_trial and self._summed <= mark.microbatch:
            raise PrivateRefusal(_INCOMPLETE) from None

    @property
    def is_within_draw(self) -> bool:
        """Whether the sum has some, but not all microbatches of the current logical batch."""
        mark = self.current
        is_whole = self.backward_done and mark is not None and mark.last
        return (self._summed > 0 or (mark is not None and mark.is_trial)) and not is_whole

    def before_backward(self, batch_size: int) -> None:
        """Refuse to add the same samples to one release twice."""
        mark = self.current
        if mark is not None and batch_size != mark.size:
            one = (
                f"row, padding rows included, in the loader's order. {OF_TOKENS}"
                if mark.units is None
                else "document of the batch, up to its max_documents: dpflash.losses takes "
                "sample_index=batch.sample_index, num_samples=batch.max_documents"
            )
            raise PrivateRefusal(
                "losses has another number of entries than the batch that the loader gave: give "
                f"one loss for each {one}. For public samples use engine.public_data()",
                losses=batch_size,
                batch=mark.size,
            ) from None
        if mark is not None and self._summed < mark.microbatch:
            raise PrivateRefusal(_INCOMPLETE) from None
        if mark is not None and self._is_read:
            raise PrivateRefusal(_UNRELEASED) from None
        self._is_trained = True
        signals = self.waiting_signals if mark is None else 0
        if mark is None and not signals and not self.foreign_batches:
            raise RuntimeError(FOREIGN)
        if signals and self._hides_repeats:
            raise RuntimeError(
                "BatchMemoryManager with DataLoader workers and batches of one size: a second "
                "step on a batch would look like a step on the next batch, so nothing was "
                "released. Use num_workers=0, or physical_batch_size= without the manager"
            )
        if signals > 1 and not self._fetched_ahead:
            raise PrivateRefusal(
                "batches were drawn and not stepped, so samples of two logical batches would mix "
                "in one step: optimizer.step() must follow every physical batch of "
                "BatchMemoryManager, also an empty or skipped one (call it before `continue`)",
                batches=signals,
            ) from None
        is_padding = batch_size == 1 and self._is_empty_draw
        if (
            signals
            and self.emitted
            and not is_padding
            and self._seen + batch_size > self.emitted[0]
        ):
            raise PrivateRefusal(
                "a batch has more samples than are left of the logical batch: samples of two "
                "logical batches would mix in one step. Call optimizer.step() after every "
                "physical batch, also after an empty or skipped batch",
                batch=batch_size,
                seen=self._seen,
                draw=self.emitted[0],
            ) from None
        if self.backward_done:
            raise PrivateRefusal(SECOND) from None
        if mark is None and not is_padding and self.real_rows(batch_size) is not None:
            warn(
                "a batch has as many rows as the loader's last one, which was released: it is "
                "treated as the released batch, whose padding rows contribute zero. Train on your "
                "own batches outside of the loop over the private loader, or in another size",
                PrivateWarning,
            )
        self.backward_done = True
        self._summed += mark is not None and not mark.is_trial
        if not is_padding:
            self._seen += batch_size if mark is None else mark.count

    def take_draw(self, signalled: bool) -> bool:
        """Return whether the samples of this release are a logical batch of the private sampler.

        If another loader signals the release, the number of samples seen since the last release
        must be the size of the next logical batch.
        """
        if not signalled:
            return self.current is not None
        self.signalled = True
        if self._hides_repeats:
            return False
        return bool(self.emitted) and self.emitted.popleft() == self._seen

    @property
    def _hides_repeats(self) -> bool:
        """Whether repeated batches go unnoticed: workers fetch ahead, and sizes are equal."""
        return self._fetched_ahead and self._equal_sizes

    def released(self) -> None:
        """Record that the logical batch was released."""
        self.dropped()
        if self._seeds is not None:
            self._seeds.end()
        if self._signals:  # the next batch has been fetched already
            self._seed_signalled()
        if self.current is not None:
            self.next_draw = self.current.draw + 1
        self.current = None
