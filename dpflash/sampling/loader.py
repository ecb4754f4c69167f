"""PrivateDataLoader: yields logical batches in microbatches with a public number of rows.

One optimizer step releases one logical batch, which consists of one or more microbatches. The
`BatchMark` of a microbatch tells whether it is the last one. So a loop that stops within a logical
batch leaves no stale state. `slots` chooses the rows that hold samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..isolation.copies import copied
from ..isolation.documents import moved
from ..isolation.example import ExampleTrial
from ..isolation.place import (
    LESS_PADDING,
    OTHER_NEIGHBORS,
    OTHER_ORDER,
    Place,
    PlaceTrial,
    fuller_left_out,
    in_another_order,
)
from ..isolation.trial import Trial
from ..packing import PackedBatch, Pairs
from ..privacy.keys import Uncopied
from ..privacy.seeds import LoopSeeds, SeededIndices
from ..refusal import PrivateRefusal
from ..verification.nested import map_leaves
from .collate import TriedCollate
from .entries import BadShare, Collated, FittingCollate, ReadableEntries, Shorter
from .lengths import Lengths, PadTo
from .origins import FixedEntries
from .other_steps import refusing_counted_steps
from .packed import DocumentsOf, PackedCollate, PackedSampler
from .plan import INDEPENDENT, SamplingPlan
from .prepared import Prepared
from .samplers import (
    CyclicPoissonBatchSampler,
    DrawSampler,
    FixedDraws,
    FixedSizeBatchSampler,
    PoissonBatchSampler,
    RandomAllocationBatchSampler,
    ShuffledBatchSampler,
)
from .seen_batches import SeenBatches
from .slots import SlotSampler
from .tracker import BatchMark, BatchTracker
from .unit_slots import UnitSlots


class _Seeded:
    """Iterates over a sampler's microbatches, and adds the seed for reading their entries."""

    def __init__(
        self, rows: Any, place: Callable[[int], tuple[int, int, int]], seeds: LoopSeeds
    ) -> None:
        self._rows = rows
        self._place = place
        self._seeds = seeds

    def __iter__(self) -> Iterator[SeededIndices]:
        for number, indices in enumerate(self._rows):
            # Begin only now, after a sampler of the user has drawn its own random numbers.
            self._seeds.begin()
            yield SeededIndices(indices, self._seeds.of("reading", *self._place(number)))


class _CollateForOthers:
    """The user's collate function for other loaders, whose batches have no padding rows.

    An empty logical batch becomes one padding row, a copy of entry 0. If DataLoader workers fetch
    ahead, this row holds zeros instead: a loop that skips steps could count it as a sample, see
    `BatchTracker`.

    Raises:
        PrivateRefusal: an entry cannot be part of a batch, and no padding row can replace it.
    """

    def __init__(self, collate: Callable[[list[Any]], Collated], dataset: Any, *, blank: bool):
        self.collate = collate
        self.dataset = dataset
        self.blank = blank

    def __call__(self, samples: list[Any]) -> Any:
        batch, bad, _ = self.collate(samples or [self.dataset[0]])
        if samples and bad:
            raise PrivateRefusal(
                "an entry of the dataset cannot be part of a batch, and a loader that iterates "
                "batch_sampler by itself, such as BatchMemoryManager, has no padding rows to "
                "replace the entry: pass physical_batch_size= instead",
                rows=bad,
            ) from None
        if samples:
            return batch
        return map_leaves(_blank, batch, kinds=_VALUES) if self.blank else batch


# The options that the private loader copies from the user's loader.
_KEPT = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers"),
)

_PLAIN = (bool, int, float, str, bytes)
_VALUES = (Tensor, np.ndarray, np.generic, *_PLAIN)


def _blank(value: Any) -> Any:
    """Return a value of the same type and shape that holds no data."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, np.generic):
        return np.zeros_like(value)[()]
    return next(kind() for kind in _PLAIN if isinstance(value, kind))  # also for a subclass


def _real(mark: BatchMark) -> Tensor:
    """Return `[U]`, bool: True for samples of a microbatch that are not padding."""
    return torch.ones(mark.size, dtype=torch.bool) if mark.real is None else mark.real


class PrivateDataLoader(Prepared, Uncopied, FixedDraws, DataLoader):
    """A DataLoader of logical batches, in microbatches with a public number of rows.

    The samples of a logical batch are in secret random rows of its microbatches. The other rows
    are padding rows: they repeat a sample of the batch (entry 0 in an empty batch) and contribute
    zero, since their clipping factor is 0. A loader that iterates `batch_sampler` itself, such as
    Opacus' BatchMemoryManager, gets the samples alone, and one padding row for an empty batch.

    Args:
        loader: the plain loader.
        plan: the sampling scheme of the logical batches.
        key: 32 bytes, from which all samples are drawn.
        physical_batch_size: largest number of rows of a microbatch; None for no bound.
        rank_part: (index of this rank, number of ranks that divide each logical batch).
        public_length: public length of dimension 1; None if no length is declared.
        foreign_batches: whether training also accepts batches that are not from this loader.
        devices: the model's devices other than the CPU.

    Attributes:
        plan: the sampling scheme, and the privacy cost of releasing a logical batch.
        sampler_name: "poisson", "truncated_poisson", "cyclic_poisson", "random_allocation",
            "fixed_size", or "shuffled" for epochs without amplification.
        sample_rate: probability of a sample in a batch; None for "fixed_size" and "shuffled".
        expected_batch_size: the public divisor of a step.
        steps_per_epoch: number of logical batches in an epoch.
        dataset_size: the declared public size, or else the number of samples in the dataset.
        slots: number of rows of each microbatch on this rank; None for "shuffled", whose batches
            have the loader's own sizes.
        has_pairs: whether samples are pairs of rows, see `dpflash.packing.Pairs`.
        lengths: compares the shapes of the loader's batches.
        seen: recognizes the loader's batches in calls of the model.
        tracker: follows the training loop over the batches.
    """

    no_copy = (
        "it would draw the same samples, charged as new ones. Iterate over it again for new "
        "batches; for another run call make_private of another PrivacyEngine"
    )

    def __init__(
        self,
        loader: DataLoader,
        plan: SamplingPlan,
        *,
        key: bytes,
        physical_batch_size: int | None = None,
        rank_part: tuple[int, int] = (0, 1),
        public_length: int | None = None,
        foreign_batches: bool = False,
        devices: frozenset[torch.device] = frozenset(),
    ):
        self.plan = plan
        self.dataset_size, self.steps_per_epoch = plan.dataset_size, plan.steps_per_epoch
        self.expected_batch_size = plan.expected_batch_size
        self.sample_rate = plan.sample_rate if plan.sampling in INDEPENDENT else None
        self.sampler_name = plan.sampler_name
        self.has_pairs = plan.has_pairs
        self.slots = plan.slots(ranks=rank_part[1], at_most=physical_batch_size)
        self._key = key
        self._draws: DrawSampler | None = None
        self._seeds = LoopSeeds(self._current_key, rank_part[0], devices)
        self.tracker = tracker = BatchTracker(
            fetched_ahead=loader.num_workers > 0,
            equal_sizes=plan.sampling not in INDEPENDENT,
            foreign_batches=foreign_batches,
            seeds=self._seeds,
            entries=FixedEntries(loader.dataset),
        )
        if public_length is None and isinstance(loader.collate_fn, PadTo):
            public_length = loader.collate_fn.length
        self.lengths = Lengths(public_length)
        self.seen = SeenBatches()
        groups = plan.groups
        self._bad_entries = 0 if groups is None else groups.left_out
        self._bad_share = BadShare(1 if groups is None or groups.are_drawn else groups.limit)
        self._mark: BatchMark | None = None
        self._trial: Trial | None = None
        self._place_trial: PlaceTrial | None = None
        self._example: ExampleTrial | None = None
        source: DrawSampler | ShuffledBatchSampler
        if plan.sampling == "shuffled":
            assert loader.batch_size is not None
            source = ShuffledBatchSampler(
                loader.sampler, loader.batch_size, loader.drop_last, tracker
            )
        else:
            drawn: dict[str, Any] = {
                "steps_per_epoch": plan.steps_per_epoch,
                "key": key,
                "physical_batch_size": physical_batch_size,
            }
            if plan.sampling == "fixed_size":
                source = FixedSizeBatchSampler(plan.num_samples, plan.batch_size, **drawn)
            elif plan.is_allocated:
                source = RandomAllocationBatchSampler(plan.num_samples, **drawn)
            elif plan.sampling == "cyclic_poisson":
                source = CyclicPoissonBatchSampler(
                    plan.num_samples, plan.rate_of_part, parts=plan.bands, **drawn
                )
            else:
                source = PoissonBatchSampler(
                    plan.num_samples, plan.sample_rate, max_batch_size=plan.cut, **drawn
                )
            self._draws = source
            source.follow(tracker, rank_part)
            if groups is not None and groups.are_drawn:
                source.refuse_other_loaders(
                    "batches of this loader's batch_sampler are units, not entries of the dataset "
                    "(unit_of): iterate over the loader that make_private returned, without "
                    "BatchMemoryManager; physical_batch_size= bounds its microbatches"
                )
            elif self.has_pairs:
                source.refuse_other_loaders(
                    "in batches of another loader the rows of a pair (collate_fn=Pairs(...)) are "
                    "clipped each by itself: iterate over the loader that make_private returned, "
                    "without BatchMemoryManager; physical_batch_size= bounds its microbatches"
                )
            elif plan.bands > 1 or plan.is_allocated:
                what = "noise_mechanism= of several bands" if plan.bands > 1 else "sampling="
                what += "" if plan.bands > 1 else repr(plan.sampling)
                source.refuse_other_loaders(
                    f"{what} needs the number of each logical batch, which another loader does "
                    "not report: iterate over the loader that make_private returned, without "
                    "BatchMemoryManager; physical_batch_size= bounds its microbatches"
                )
        options = {name: getattr(loader, name) for name in _KEPT}
        # DataLoader workers get their seeds from this generator, also in loaders that reuse it.
        options["generator"] = torch.Generator().manual_seed(self._seeds.of("workers"))
        collate, readable = loader.collate_fn, ReadableEntries(plan.dataset)
        self._fitting: FittingCollate | None = None
        made: Callable[[list[Any]], Collated]
        if plan.packing is not None:
            made = PackedCollate(plan.packing)
        else:
            is_public = self.lengths.declared is not None
            each = groups.limit if groups is not None and groups.are_drawn else 1
            made = self._fitting = FittingCollate(
                collate, readable, has_public_length=is_public, each=each
            )
            if loader.num_workers:
                made = TriedCollate(made, may_sort=self.slots is None)
        super().__init__(
            plan.dataset,
            batch_sampler=source,
            # Other loaders over batch_sampler use it, and call it with [] for an empty batch.
            collate_fn=_CollateForOthers(made, readable, blank=loader.num_workers > 0),
            **options,
        )
        entries: Dataset[Any] = readable
        collate_rows: Callable[[list[Any]], Collated] = made
        if self._draws is not None:
            assert self.slots is not None
            units = groups if groups is not None and groups.are_drawn else None
            self._rows: SlotSampler
            if plan.packing is not None:
                self._rows = PackedSampler(self._draws, readable, plan.packing, units)
                entries, collate_rows = DocumentsOf(readable), PackedCollate(plan.packing).placed
            elif units is not None:
                self._rows = UnitSlots(self._draws, self.slots, units)
            else:
                self._rows = SlotSampler(self._draws, self.slots)
        # Padding rows are added here and not in batch_sampler, since other loaders that iterate
        # batch_sampler would train on padding rows.
        rows = source if self._draws is None else self._rows
        self._padded: DataLoader[Any] = DataLoader(
            entries,
            batch_sampler=_Seeded(rows, self._place, self._seeds),
            collate_fn=collate_rows,
            **options,
        )

    def _current_key(self) -> bytes:
        return self._key if self._draws is None else self._draws.key

    def _place(self, number: int) -> tuple[int, int, int]:
        """Return the numbers of epoch, logical batch and microbatch that were yielded last."""
        if self._draws is None:
            return self.tracker.epochs, number, 0
        mark = self._rows.last
        assert mark is not None
        return 0, mark.draw, mark.microbatch

    @property
    def is_real(self) -> Tensor:
        """`[B]`, bool: True for the current microbatch's rows that are samples. PRIVATE.

        With packed documents there is one element for each document, with pairs one for each pair.
        In an isolation test (trial) all elements are False, so that a mean would be NaN. Use sums
        and counts: `total += losses[loader.is_real].sum()`, `count += loader.is_real.sum()`. The
        losses of padding rows have no meaning.
        """
        mark = self._current_mark()
        if mark.units is not None and mark.units.are_rows and not self.has_pairs:
            mark = mark.of_rows
        # Clone, since the clipped backward reads the original.
        return torch.ones(mark.size, dtype=torch.bool) if mark.real is None else mark.real.clone()

    @property
    def is_last(self) -> bool:
        """Whether the current microbatch is the last of its logical batch, so step() releases."""
        return self._current_mark().last

    @property
    def bad_entries(self) -> int:
        """Number of samples that could not be read or collated, plus entries without a unit.

        Padding rows have replaced these samples. PRIVATE.
        """
        return self._bad_entries

    @property
    def releases(self) -> int:
        """Number of logical batches whose release has begun or ended so far.

        It is public, unlike the number of microbatches. Use it to count steps and for schedules.
        """
        return self.tracker.releases

    def _current_mark(self) -> BatchMark:
        if self._mark is None:
            raise RuntimeError(
                "there is no current batch of this loader: iterate over it first. With "
                "BatchMemoryManager there is never one: in place of `if loader.is_last:` write "
                "`if not optimizer.step_was_skipped:` after optimizer.step(); all rows of its "
                "batches are samples"
            )
        return self._mark

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # Samplers test the budget too, but only after the DataLoader has started its workers.
        if not self.tracker.may_begin(True):
            return
        self.tracker.abandon()
        marked = self._marked_epoch() if self._draws is None else self._marked_draws()
        self._seeds.forget()
        with self.tracker.noting_refusals():
            with self.seen.iterated(), refusing_counted_steps(self.tracker):
                yield from self._observed(marked)
            self._seeds.end()
            self.tracker.end_epoch(self._mark)

    def _observed(self, marked: Iterator[tuple[Any, BatchMark]]) -> Iterator[Any]:
        for batch, mark in marked:
            self._mark = mark
            if self.has_pairs:
                rows, each = Pairs.rows(batch), Pairs.ROWS
            else:
                rows, each, mark = batch, 1, mark.of_rows
            if not mark.is_trial:
                self.lengths.observe(rows, mark.size * each)
            self.seen.observe(rows, mark, each)
            self.seed_loop()
            yield batch
            behind = None if self._draws is None else mark.draw + 1
            if mark.last and not self.tracker.may_begin(False, behind):
                return

    def seed_loop(self, purpose: str = "loop") -> None:
        """Seed the generators for the loop's random numbers on the current microbatch."""
        mark = self._current_mark()
        epoch = self.tracker.epochs if self._draws is None else 0
        self._seeds.seed(purpose, epoch, mark.draw, mark.microbatch)
        if self._place_trial is not None:
            self._place_trial.start()

    def drawing_apart(self) -> AbstractContextManager[None]:
        """Return a context with another seed, after which the generators are restored."""
        return self._seeds.apart()

    def _fetched(self) -> Iterator[Collated]:
        """Yield the fetched batches; unless shuffled, save the generators' states after each."""
        if self._draws is not None:
            self._seeds.begin()
        batches, trial, fitting = iter(self._padded), self._trial, self._fitting
        while True:
            if fitting is not None:
                is_near = trial is not None and trial.schedule.is_near
                fitting.shorten(is_near and self.lengths.declared is None)
            if (batch := next(batches, None)) is None:
                return
            yield batch
            if self._draws is not None:
                self._seeds.begin()

    def _marked_draws(self) -> Iterator[tuple[Any, BatchMark]]:
        marks = None
        for made in self._fetched():
            if marks is None:
                marks, own = self._rows.marks, self.tracker.epochs
            mark = self._without(made.bad, marks.popleft())
            if isinstance(made.batch, PackedBatch):
                mark = replace(mark, units=made.batch.units)
            elif self.has_pairs:
                mark = replace(mark, units=Pairs.units(mark.size))
            yield from self._tried(made, mark, own)

    def _tried(
        self, made: Collated, mark: BatchMark, epoch: int
    ) -> Iterator[tuple[Any, BatchMark]]:
        """Yield the batches of the isolation tests that are due, and then the microbatch."""
        trial, batch = self._trial, made.batch
        if trial is not None:
            trial.sandbox.end_microbatch()
        yield from self._example_tried(mark, epoch)
        is_due = trial is not None and trial.is_due(mark.microbatch)
        real = _real(mark)
        units = None if self.has_pairs else mark.units
        is_new = trial is not None and trial.schedule.is_new(batch, real, units)
        yield from self._tried_elsewhere(made, mark, epoch, is_due=is_due)
        if trial is not None and (is_due or is_new):
            seed = self._seeds.of("trial", epoch, mark.draw, mark.microbatch)
            altered = trial.begin(batch, mark.size, mark.real, units, seed=seed)
            if altered is not None:
                own = replace(mark.of_trial, units=mark.units)
                if isinstance(batch, PackedBatch):
                    own = replace(own, units=altered.units)
                try:
                    self.tracker.begin_microbatch(own, epoch)
                    yield altered.batch, own
                    trial.end()
                finally:
                    if trial.abandon(altered):
                        self.tracker.leave_trial()
        self.tracker.begin_microbatch(mark, epoch)
        yield batch, mark

    def _example_tried(self, mark: BatchMark, epoch: int) -> Iterator[tuple[Any, BatchMark]]:
        """Yield make_private's example, altered and unaltered, before the first microbatch."""
        for given in () if self._example is None else self._example.runs():
            size = len(given.kept)
            units = Pairs.units(size) if self.has_pairs else given.units
            # Number -1, so that the example's random masks are not those of microbatch 0.
            own = replace(BatchMark(mark.draw, size, False, -1).of_trial, units=units)
            self.tracker.begin_microbatch(own, epoch)
            yield given.batch, own

    def _tried_elsewhere(
        self, made: Collated, mark: BatchMark, epoch: int, *, is_due: bool
    ) -> Iterator[tuple[Any, BatchMark]]:
        """Yield isolation tests with moved samples, once per logical batch.

        In a test, samples have less padding or exchange rows, or documents move in their rows.
        """
        place_trial = self._place_trial
        begins = mark.microbatch == 0
        if place_trial is None or not place_trial.is_due(begins_draw=begins, is_tried=is_due):
            return
        for given in place_trial.runs(made.batch, self._places(made, mark, epoch)):
            try:
                # Numbers below -1, so that these runs do not change the microbatch's masks.
                own = replace(mark.of_trial, microbatch=-2 - mark.microbatch)
                if isinstance(given, PackedBatch):
                    own = replace(own, units=given.units)
                self.tracker.begin_microbatch(own, epoch)
                place_trial.begin()
                yield given, own
                place_trial.end()
            finally:
                if place_trial.is_running:
                    place_trial.end(loop=False)
                    self.tracker.leave_trial()

    def _places(self, made: Collated, mark: BatchMark, epoch: int) -> list[Place]:
        if isinstance(made.batch, PackedBatch):
            other = moved(made.batch) or copied(made.batch)
            return [Place(other, self._kept_units([True] * mark.size, mark), OTHER_NEIGHBORS)]
        shorter = made.shorter
        if not shorter and not self.has_pairs:
            cut = fuller_left_out(made.batch, _real(mark.of_rows).tolist())
            shorter = () if cut is None else [Shorter(*cut)]
        places = [Place(own, self._kept_units(kept, mark), LESS_PADDING) for own, kept in shorter]
        # Rows of a sample's pairs are moved together.
        units = None if self.has_pairs else mark.units
        numbers = torch.arange(mark.size) if units is None else units.index
        real = _real(mark if units is None else mark.of_rows)
        samples = numbers.masked_fill(~real, -1)
        seed = self._seeds.of("places", epoch, mark.draw, mark.microbatch)
        found = in_another_order(made.batch, samples, np.random.default_rng(seed))
        if found is not None:
            places.append(Place(found[0], self._kept_units(found[1], mark), OTHER_ORDER))
        return places

    def _kept_units(self, rows: list[bool], mark: BatchMark) -> Tensor:
        """Return `[U]`, bool: True for samples of which `rows` keeps all rows."""
        index = torch.arange(mark.size) if mark.units is None else mark.units.index
        if len(index) != len(rows):  # `rows` has one element for each pair
            index = torch.arange(mark.size)
        lost = index[[not kept for kept in rows]]
        kept = torch.bincount(lost, minlength=mark.size)[: mark.size] == 0
        return kept if mark.real is None else kept & mark.real

    def _marked_epoch(self) -> Iterator[tuple[Any, BatchMark]]:
        remaining = len(self.dataset)  # type: ignore[arg-type]
        for number, made in enumerate(self._fetched()):
            size = min(int(self.expected_batch_size), remaining)
            remaining -= size
            if not number:
                own = self.tracker.epochs
            mark = self._without(made.bad, BatchMark(number, size, True))
            for given, its_mark in self._tried(made, mark, own):
                self.tracker.still_to_come(self.steps_per_epoch - number - 1)
                yield given, its_mark

    def _without(self, bad: Sequence[int], mark: BatchMark) -> BatchMark:
        """Count the bad entries of a microbatch; return its mark with padding in their place."""
        left = mark.without(bad)
        count = mark.count
        self._bad_entries += count - left.count
        self._bad_share.observe(count, count - left.count, is_last=mark.last)
        return left

    def try_first(
        self, trial: Trial, place_trial: PlaceTrial | None, example: ExampleTrial | None
    ) -> None:
        """Set the trials, which yield altered versions of a microbatch before it."""
        self._trial, self._place_trial, self._example = trial, place_trial, example

    def state_dict(self) -> dict[str, int]:
        """Return the position; a logical batch that was not released yet will be drawn again."""
        state = {"next_draw": self.tracker.next_draw, "returns": self.tracker.returns}
        # If another loader signals the steps, the number of the current logical batch is unknown.
        if self.tracker.signalled and self._draws is not None:
            state["next_draw"] = self._draws.position
        return state

    def load_state_dict(self, state: Mapping[str, int], *, key: bytes | None = None) -> None:
        """Continue at a position, and end epochs in progress. All ranks call this together.

        If the loader was past this position, logical batches from the position on are sampled
        anew.

        Args:
            state: a `state_dict()` of a loader with this sampling scheme.
            key: a key that replaces the loader's own key; None to keep the own key.
        """
        draw, returns = int(state["next_draw"]), int(state.get("returns", 0))
        if self._draws is None:
            self._key = key or self._key
            self.tracker.resume(draw)
        else:
            self._draws.resume(draw, returns=returns, key=key)
