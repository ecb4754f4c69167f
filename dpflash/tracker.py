"""What is known about the batch that is being trained on."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

EARLIER_PASS = (
    "an earlier pass over the loader goes on beside a newer one, so a sample could be released "
    "twice for one payment; finish or leave a pass first"
)


@dataclass(frozen=True)
class BatchMark:
    """What travels with a physical batch: the draw it is part of, its rows, whether it ends it.

    Attributes:
        size: its rows, padding rows included.
        part: its number among the physical batches of the draw.
        real: `[size]`, bool: which rows are samples of the draw. None where all of them are.
    """

    draw: int
    size: int
    last: bool
    part: int = 0
    real: Tensor | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        """How many rows are samples of the draw."""
        return self.size if self.real is None else int(self.real.sum())


class BatchTracker:
    """The batch in the training loop's hands.

    Attributes:
        current: its mark; None when the batch did not come from a private loader.
        backward_done: whether its gradients were taken.
        passes: how many passes over the data were begun.
        next_draw: the draw at which a resumed run goes on.
        emitted: sizes of the logical batches that the private sampler drew in this pass and that
            no signalled release has used.
        unstepped: how many signals of another loader no step has taken yet.
        fetched_ahead: whether signals may be of batches that the loop does not have yet.
        equal_sizes: whether the private sampler's logical batches are all of one size.
        signalled: whether a release was told by the signal of another loader, such as that of
            Opacus' BatchMemoryManager, which calls step() for each physical batch.
        may_begin: whether a further logical batch may be drawn, told whether it begins a pass.
    """

    def __init__(self) -> None:
        self.current: BatchMark | None = None
        self.backward_done = False
        self.passes = 0
        self.next_draw = 0
        self.emitted: deque[int] = deque()
        self.signalled = False
        self._seen = 0
        self._still_to_come = 0
        # Also after its release: its rows may come back.
        self._last_yielded: BatchMark | None = None
        self._refused: BatchMark | None = None
        self.unstepped: Callable[[], int] = lambda: 0
        self.fetched_ahead = False
        self.equal_sizes = False
        self.has_sums: Callable[[], bool] = lambda: False
        self.abandon: Callable[[], None] = lambda: None
        self.on_batch: Callable[[int], None] = lambda size: None
        self.may_begin: Callable[[bool], bool] = lambda new_pass: True

    def begin_pass(self) -> None:
        """A new pass over the data drops what an unreleased logical batch left."""
        if self.has_sums():
            warnings.warn(
                "the loop left its last logical batch before optimizer.step() released it; its "
                "gradients are dropped",
                stacklevel=3,
            )
        self.abandon()
        self.current = self._last_yielded = None
        self.dropped()
        self.emitted.clear()
        self.passes += 1

    def dropped(self) -> None:
        """The gradients of the logical batch under way were thrown away."""
        self.backward_done = False
        self._seen = 0

    def refused(self) -> None:
        """The batch at hand may not be released; that it is not is no mistake of the loop."""
        self.dropped()
        self._refused = self.current

    def place(self) -> tuple[int, int] | None:
        """(draw, part) of the batch at hand; None where it is not of the private loader."""
        return None if self.current is None else (self.current.draw, self.current.part)

    def real_rows(self, rows: int) -> Tensor | None:
        """`[rows]`: which rows of the batch at hand are samples; None where all of them are.

        A batch of as many rows as the one that was just released may be that one again, whose
        padding rows would count a sample twice.
        """
        mark = self.current or self._last_yielded
        return None if mark is None or mark.size != rows else mark.real

    def still_to_come(self, batches: int) -> None:
        """How many batches follow in a pass of the loader's own, the one at hand left out."""
        self._still_to_come = batches

    @property
    def left_of_pass(self) -> int:
        """Batches of the loader's own pass to be released still, the one at hand included."""
        by_signal = self.signalled or self.unstepped() > 0
        at_hand = len(self.emitted) if by_signal else int(self.current is not None)
        return self._still_to_come + at_hand

    def begin_batch(self, mark: BatchMark, number_of_pass: int) -> None:
        """The loop gets a batch of the pass that was begun as the so-manieth."""
        if number_of_pass != self.passes:
            # Workers may have fetched the older pass to its end, so its sampler cannot tell.
            raise RuntimeError(EARLIER_PASS)
        previous = self.current
        if previous is not None and previous.draw != mark.draw:
            if self.has_sums():
                self._refuse_unreleased()
            if previous is not self._refused:
                warnings.warn(
                    "a drawn batch was not released: optimizer.step() must follow each logical "
                    "batch, an empty one too, or the number of steps tells which draws were empty",
                    stacklevel=3,
                )
        self.current = self._last_yielded = mark
        self.backward_done = False
        self.next_draw = mark.draw
        self.on_batch(mark.size)

    def before_backward(self, batch_size: int) -> None:
        """Refuse to take the same samples into one release twice."""
        mark = self.current
        if mark is not None and batch_size != mark.size:
            raise ValueError(
                f"losses has {batch_size} entries but the loader gave a batch of {mark.size}: "
                "give one loss for each row, padding rows included, in the loader's order"
            )
        signals = self.unstepped() if mark is None else 0
        if signals and self._hides_repeats:
            raise RuntimeError(
                "BatchMemoryManager over a loader with workers whose batches are all of one size: "
                "a second step on one batch could not be told from a step on the next, so nothing "
                "was released. Use num_workers=0, or physical_batch_size= without the manager"
            )
        if signals > 1 and not self.fetched_ahead:
            raise RuntimeError(
                f"{signals} batches were drawn and not stepped: optimizer.step() must "
                "follow every physical batch of BatchMemoryManager, an empty or a skipped one "
                "too, or samples of two draws meet in one step. Call step() before `continue`"
            )
        if signals and self.emitted and self._seen + batch_size > self.emitted[0]:
            raise RuntimeError(
                f"a batch of {batch_size} after {self._seen} samples of the step, but the draw "
                f"has {self.emitted[0]}: samples of two draws would meet in one step. Call "
                "optimizer.step() after every physical batch, an empty or a skipped one too"
            )
        if self.backward_done:
            raise RuntimeError(
                "a second backward on the same batch: its samples would enter the step twice and "
                "break the bound. Add the losses up and call engine.backward once for each batch "
                "(to accumulate, pass physical_batch_size= and iterate over the private loader)"
            )
        real = self.real_rows(batch_size)
        if mark is None and real is not None and not bool(real.all()):
            warnings.warn(
                f"a batch of {batch_size} rows after the loader's last one was released: it is "
                "taken for that batch, whose padding rows count for nothing. Train on batches of "
                "your own outside of the loop over the private loader, or in another size",
                stacklevel=3,
            )
        self.backward_done = True
        self._seen += batch_size if mark is None else mark.count

    def warn_of_missing_backward(self) -> None:
        """Only an empty batch may be released without a backward."""
        mark = self.current
        if mark is not None and mark.count and not self.backward_done:
            warnings.warn(
                "a drawn batch is released without engine.backward(losses) having been called on "
                "it: the step is noise alone, and is paid for. Only an empty batch may skip it",
                stacklevel=4,
            )

    def signalled_step(self) -> None:
        """A step that was told by a signal ends a physical batch of another loader."""
        if self.current is None:
            self.backward_done = False

    def came_from_loader(self, signalled: bool) -> bool:
        """Whether the release's samples are a draw of the private sampler.

        A signal proves nothing by itself: the samples seen since the last release must be as many
        as the next drawn batch has.
        """
        if not signalled:
            return self.current is not None
        self.signalled = True
        if self._hides_repeats:
            return False
        return bool(self.emitted) and self.emitted.popleft() == self._seen

    @property
    def _hides_repeats(self) -> bool:
        """Whether sizes cannot tell the batch at hand from those that workers fetched ahead."""
        return self.fetched_ahead and self.equal_sizes

    def released(self) -> None:
        self.dropped()
        if self.current is not None:
            self.next_draw = self.current.draw + 1
        self.current = None

    @staticmethod
    def _refuse_unreleased() -> None:
        raise RuntimeError(
            "a new logical batch began before optimizer.step() released the last one; one sample "
            "could enter a step twice. Call step() of the optimizer that make_private returned, "
            "and use physical_batch_size= to accumulate (or zero_grad() to drop a batch)"
        )
