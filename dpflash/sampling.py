"""Which samples make a batch, and what is known about the batch being trained on.

A logical batch is what one noisy step releases; it may come as several physical batches. The
mark that ends a logical batch travels with the data, so that a loop which is left in mid-batch
leaves nothing behind.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ._validate import positive_int
from .streams import uniform_words


@dataclass(frozen=True)
class BatchMark:
    """What travels with a physical batch: the draw it is part of, its size, whether it ends it."""

    draw: int
    size: int
    last: bool


class BatchTracker:
    """The batch in the training loop's hands.

    Attributes:
        current: its mark; None when the batch did not come from a private loader.
        backward_done: whether its gradients were taken.
        first_of_pass: whether no release was made yet in this pass over the data.
        next_draw: the draw at which a resumed run goes on.
        emitted: sizes of the logical batches that the private sampler drew in this pass and that
            no signalled release has used.
        unstepped: how many signals of another loader no step has taken yet.
        fetched_ahead: whether signals may be of batches that the loop does not have yet.
        signalled: whether a release was told by the signal of another loader, such as that of
            Opacus' BatchMemoryManager, which calls step() for each physical batch.
    """

    def __init__(self) -> None:
        self.current: BatchMark | None = None
        self.backward_done = False
        self.first_of_pass = False
        self.next_draw = 0
        self.emitted: deque[int] = deque()
        self.signalled = False
        self._seen = 0
        self.unstepped: Callable[[], int] = lambda: 0
        self.fetched_ahead = False
        self.has_sums: Callable[[], bool] = lambda: False
        self.abandon: Callable[[], None] = lambda: None
        self.on_batch: Callable[[int], None] = lambda size: None

    def begin_pass(self) -> None:
        """A new pass over the data drops what an unreleased logical batch left."""
        if self.has_sums():
            warnings.warn(
                "the loop left its last logical batch before optimizer.step() released it; its "
                "gradients are dropped",
                stacklevel=3,
            )
        self.abandon()
        self.current = None
        self.dropped()
        self.emitted.clear()
        self.first_of_pass = True

    def dropped(self) -> None:
        """The gradients of the logical batch under way were thrown away."""
        self.backward_done = False
        self._seen = 0

    def begin_batch(self, mark: BatchMark) -> None:
        previous = self.current
        if previous is not None and previous.draw != mark.draw:
            if self.has_sums():
                self._refuse_unreleased()
            warnings.warn(
                "a drawn batch was not released: optimizer.step() must follow each logical batch, "
                "an empty one too, or the number of steps tells which draws were empty",
                stacklevel=3,
            )
        self.current = mark
        self.backward_done = False
        self.next_draw = mark.draw
        self.on_batch(mark.size)

    def before_backward(self, batch_size: int) -> None:
        """Refuse to take the same samples into one release twice."""
        mark = self.current
        if mark is not None and batch_size != mark.size:
            raise ValueError(
                f"losses has {batch_size} entries but the loader gave a batch of {mark.size}: "
                "give one loss for each sample that was drawn"
            )
        signals = self.unstepped() if mark is None else 0
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
        self.backward_done = True
        self._seen += batch_size

    def warn_of_missing_backward(self) -> None:
        """Only an empty batch may be released without a backward."""
        mark = self.current
        if mark is not None and mark.size and not self.backward_done:
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
        return bool(self.emitted) and self.emitted.popleft() == self._seen

    def released(self) -> None:
        self.dropped()
        if self.current is not None:
            self.next_draw = self.current.draw + 1
        self.current = None
        self.first_of_pass = False

    @staticmethod
    def _refuse_unreleased() -> None:
        raise RuntimeError(
            "a new logical batch began before optimizer.step() released the last one; one sample "
            "could enter a step twice. Call optimizer.step() after each engine.backward(), and "
            "use physical_batch_size= to accumulate (or optimizer.zero_grad() to drop a batch)"
        )


class PoissonBatchSampler:
    """Draws each sample with probability sample_rate, independently, for every logical batch.

    Args:
        num_samples: size of the dataset.
        sample_rate: probability of each sample in each draw.
        steps_per_epoch: logical batches of one pass.
        key: 32 bytes; draw t is a function of (key, t).
        physical_batch_size: upper bound of an emitted list of indices; None for no bound.

    Guarantees:
        Inclusions are independent over samples and draws (64-bit thresholds, so that the
        probability is sample_rate to 2^-64); empty draws are emitted as empty lists.
    """

    def __init__(
        self,
        num_samples: int,
        sample_rate: float,
        *,
        steps_per_epoch: int,
        key: bytes,
        physical_batch_size: int | None = None,
    ):
        positive_int(num_samples=num_samples, steps_per_epoch=steps_per_epoch)
        if physical_batch_size is not None:
            positive_int(physical_batch_size=physical_batch_size)
        if not 0 < sample_rate <= 1:
            raise ValueError(f"sample_rate={sample_rate!r}: expected a number in (0, 1]")
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps_per_epoch = steps_per_epoch
        self.physical_batch_size = physical_batch_size
        self.marks: deque[BatchMark] = deque()
        self.position = 0
        self.pass_remainder: int | None = None
        self.on_pass: Callable[[], None] = lambda: None
        self.on_draw: Callable[[int], None] = lambda size: None
        self._key = key

    def draw(self, index: int) -> list[int]:
        """The samples of draw `index`, ascending; the same for the same key and index."""
        words = uniform_words(self._key, index=index, count=self.num_samples)
        if self.sample_rate == 1:
            return list(range(self.num_samples))
        included = words < int(self.sample_rate * 2**64)
        return [int(i) for i in included.nonzero()[0]]

    def __iter__(self) -> Iterator[list[int]]:
        self.on_pass()
        # One queue a pass: an older pass that is still open keeps its own marks.
        marks = self.marks = deque()
        steps = self.steps_per_epoch if self.pass_remainder is None else self.pass_remainder
        self.pass_remainder = None
        for _ in range(steps):
            draw = self.position
            self.position += 1
            indices = self.draw(draw)
            self.on_draw(len(indices))
            size = self.physical_batch_size or max(len(indices), 1)
            parts = [indices[i : i + size] for i in range(0, len(indices), size)] or [[]]
            for number, part in enumerate(parts, start=1):
                marks.append(BatchMark(draw, len(part), number == len(parts)))
                yield part

    def __len__(self) -> int:
        return self.steps_per_epoch

    def set_key(self, key: bytes) -> None:
        self._key = key

    def resume(self, position: int) -> None:
        """Go on at a draw; the next pass is what was left of the pass it belongs to."""
        self.position = position
        remainder = -position % self.steps_per_epoch
        self.pass_remainder = remainder or None


class _PassBatchSampler(BatchSampler):
    """The loader's own batches; says when a pass begins, also where another loader iterates it."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, tracker: BatchTracker):
        super().__init__(sampler, batch_size, drop_last)
        self._tracker = tracker
        self._passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self._tracker.begin_pass()
        self._passes += 1
        own = self._passes
        for batch in super().__iter__():
            if own != self._passes:
                raise RuntimeError(
                    "an earlier pass over the loader goes on beside a newer one, so a sample "
                    "could be released twice for one payment; finish or leave a pass first"
                )
            self._tracker.emitted.append(len(batch))
            yield batch


class _CollateWithEmpty:
    """The user's collate function, and for an empty draw a batch of the same structure, size 0."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any):
        self.collate = collate
        self.dataset = dataset

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            return self.collate(samples)
        return _emptied(self.collate([self.dataset[0]]))


def _emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.ndim == 0:
            raise ValueError(
                "the collate function made a tensor without a batch dimension, so an empty batch "
                "cannot be built; give collate_fn results with the batch first"
            )
        return value[:0]
    if isinstance(value, Mapping):
        emptied = {k: _emptied(v) for k, v in value.items()}
        return emptied if type(value) is dict else type(value)(emptied)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_emptied(v) for v in value))
    if isinstance(value, list | tuple):
        if value and all(isinstance(v, str | bytes | int | float) for v in value):
            return type(value)()
        return type(value)(_emptied(v) for v in value)
    raise ValueError(
        f"cannot build an empty batch from a {type(value).__name__}; make collate_fn return "
        "tensors, dicts, lists or tuples of tensors"
    )


class PrivateDataLoader(DataLoader):
    """A DataLoader whose batches carry marks.

    Attributes:
        sampler_name: "poisson", or "shuffled" for one pass over the data without amplification.
        sample_rate: probability of a sample in a draw ("poisson"), else None.
        expected_batch_size: the public divisor of a step.
        steps_per_epoch: logical batches of one pass.
    """

    def __init__(
        self,
        loader: DataLoader,
        tracker: BatchTracker,
        *,
        poisson: bool,
        key: bytes,
        physical_batch_size: int | None,
    ):
        num_samples, batch_size = check_loader(loader, poisson=poisson)
        self._tracker = tracker
        self.sampler_name = "poisson" if poisson else "shuffled"
        self.steps_per_epoch = -(-num_samples // batch_size)
        self.sample_rate = min(1.0, batch_size / num_samples) if poisson else None
        self.expected_batch_size = float(min(batch_size, num_samples))
        common: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "generator": loader.generator,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
        if poisson:
            assert self.sample_rate is not None
            sampler = PoissonBatchSampler(
                num_samples,
                self.sample_rate,
                steps_per_epoch=self.steps_per_epoch,
                key=key,
                physical_batch_size=physical_batch_size,
            )
            sampler.on_pass = tracker.begin_pass
            sampler.on_draw = tracker.emitted.append
            self._poisson: PoissonBatchSampler | None = sampler
            super().__init__(
                loader.dataset,
                batch_sampler=sampler,
                collate_fn=_CollateWithEmpty(loader.collate_fn, loader.dataset),
                **common,
            )
        else:
            self._poisson = None
            super().__init__(
                loader.dataset,
                batch_sampler=_PassBatchSampler(
                    loader.sampler, batch_size, loader.drop_last, tracker
                ),
                collate_fn=loader.collate_fn,
                **common,
            )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._poisson is None:
            remaining = len(self.dataset)  # type: ignore[arg-type]
            for number, batch in enumerate(super().__iter__()):
                size = min(int(self.expected_batch_size), remaining)
                remaining -= size
                self._tracker.begin_batch(BatchMark(number, size, True))
                yield batch
            return
        marks = None
        for batch in super().__iter__():
            marks = self._poisson.marks if marks is None else marks
            self._tracker.begin_batch(marks.popleft())
            yield batch

    def set_key(self, key: bytes) -> None:
        """Draw from another key, that of a checkpoint."""
        if self._poisson is not None:
            self._poisson.set_key(key)

    def state_dict(self) -> dict[str, int]:
        """The position among the draws; a draw that was not released is drawn again."""
        # Under another loader's signals nothing tells which draw is in the loop's hands.
        if self._tracker.signalled and self._poisson is not None:
            return {"next_draw": self._poisson.position}
        return {"next_draw": self._tracker.next_draw}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._tracker.next_draw = int(state["next_draw"])
        if self._poisson is not None:
            self._poisson.resume(self._tracker.next_draw)


def check_loader(loader: DataLoader, *, poisson: bool) -> tuple[int, int]:
    """Refuse loaders whose sampling cannot be replaced or accounted for.

    Returns:
        (number of samples, batch size).
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"data_loader={type(loader).__name__}: expected a torch.utils.data.DataLoader"
        )
    if isinstance(loader, PrivateDataLoader):
        raise ValueError("data_loader is private already; pass the DataLoader it was made from")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "data_loader.dataset is an IterableDataset, whose samples cannot be drawn "
            "independently; use a map-style dataset (with __len__ and __getitem__)"
        )
    if loader.batch_size is None:
        raise ValueError(
            "data_loader has no batch_size (a batch_sampler of its own, or batching disabled), "
            "so the expected batch size is unknown; pass DataLoader(dataset, batch_size=...)"
        )
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if num_samples == 0:
        raise ValueError("data_loader.dataset is empty; training needs at least one sample")
    # A subclass may draw as it likes.
    plain = type(loader.sampler) is SequentialSampler or (
        type(loader.sampler) is RandomSampler
        and not loader.sampler.replacement
        and len(loader.sampler) == num_samples
    )
    if not plain:
        what = "replaced by Poisson sampling" if poisson else "accounted for"
        raise ValueError(
            f"data_loader.sampler={type(loader.sampler).__name__} cannot be {what}: a sample's "
            "probability is unknown. Use DataLoader(dataset, batch_size=..., shuffle=True)"
        )
    return num_samples, loader.batch_size
