"""PrivateDataLoader: yields logical batches in microbatches with a public number of rows.

One noisy step releases one logical batch, which comes in one or more microbatches. The mark that
ends a logical batch travels with the data, so a loop that stops in the middle leaves nothing
behind. `slots` decides which rows of a microbatch hold samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from dpflash.accounting import Event
from dpflash.accounting.events import ADD_REMOVE, ZERO_OUT

from .._validate import positive_int
from ..packing import PackedBatch, PackTo, Pairs
from ..privacy.keys import Uncopied
from ..privacy.privacy_unit import (
    DOCUMENT,
    PREFERENCE_PAIR,
    SAMPLE,
    USER,
    USER_OF_FIXED_GRAPH,
    named,
)
from ..refusal import PrivateRefusal
from ..verification.loss_trial import LossTrial
from ..verification.nested import map_leaves
from .collate import TriedCollate
from .entries import Collated, FittingCollate, ReadableEntries
from .lengths import Lengths, PadTo
from .packed import DocumentsOf, PackedCollate, PackedSampler
from .prepared import Prepared, wrapper_of
from .row_order import RowOrder
from .samplers import (
    DrawSampler,
    FixedSizeBatchSampler,
    PoissonBatchSampler,
    PublicSize,
    ShuffledBatchSampler,
)
from .slots import SlotSampler, slots_of_draws, slots_of_size
from .tracker import BatchMark, BatchTracker
from .unit_groups import UnitGroups
from .unit_slots import UnitSlots

SAMPLINGS = ("poisson", "fixed_size", "shuffled")


class _CollateForOthers:
    """The user's collate function for loaders that copy it, whose batches have no padding rows.

    Of an empty draw it makes a batch of one padding row, which is entry 0. Where DataLoader
    workers fetch ahead, it is blank: a loop that leaves out steps could then take it for a sample,
    see `BatchTracker`.

    Raises:
        PrivateRefusal: an entry cannot be part of a batch; here it has no padding row.
    """

    def __init__(self, collate: Callable[[list[Any]], Collated], dataset: Any, *, blank: bool):
        self.collate = collate
        self.dataset = dataset
        self.blank = blank

    def __call__(self, samples: list[Any]) -> Any:
        batch, bad = self.collate(samples or [self.dataset[0]])
        if samples and bad:
            raise PrivateRefusal(
                "an entry of the dataset cannot be part of a batch, and a loader that iterates "
                "batch_sampler by itself, such as BatchMemoryManager, has no padding rows to put "
                "in its place: pass physical_batch_size= instead",
                rows=bad,
            ) from None
        if samples:
            return batch
        return map_leaves(_blank, batch, kinds=_VALUES) if self.blank else batch


_PLAIN = (bool, int, float, str, bytes)
_VALUES = (Tensor, np.ndarray, np.generic, *_PLAIN)


def _blank(value: Any) -> Any:
    """A value of the same kind and shape that holds nothing of the data."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, np.generic):
        return np.zeros_like(value)[()]
    return next(kind() for kind in _PLAIN if isinstance(value, kind))  # also of a subclass


class PrivateDataLoader(Prepared, Uncopied, DataLoader):
    """A DataLoader that draws logical batches, in microbatches with a public number of rows.

    The samples of a draw are in secret random rows of its microbatches. The other rows are padding
    rows: they repeat a sample of the batch (entry 0 in an empty one) and count for nothing, since
    their clipping factor is 0. A loader that iterates `batch_sampler` itself, such as Opacus'
    BatchMemoryManager, gets the samples alone, and of an empty draw one padding row.

    Args:
        rank_part: (number of this rank, number of ranks) that split each draw.
        max_dataset_size: public; with max_batch_size no dataset may be larger.
        public_size: determines rate, steps and divisor; None for the size of the dataset.
        public_length: public length of dimension 1; None if none is declared.
        groups: the entries of each privacy unit; None where each entry is one.
        foreign_batches: whether batches that are not of this loader are trained on too.

    Attributes:
        sampler_name: "poisson", "truncated_poisson", "fixed_size", or "shuffled" for epochs
            without amplification.
        event_covers_epoch: whether `event` is the cost of an epoch instead of one release.
        sample_rate: probability of a sample in a draw (both kinds of "poisson"), else None.
        expected_batch_size: the public divisor of a step.
        steps_per_epoch: logical batches of one epoch.
        dataset_size: the public size; the size of the dataset where none was declared.
        slots: rows of each microbatch of this rank; None for "shuffled", whose batches have
            the loader's own sizes.
        packing: the collate function that packs documents; None where rows are samples.
        has_pairs: whether samples are pairs of rows, see `dpflash.packing.Pairs`.
        lengths: compares the shapes of its batches.
        order: compares the rows that the model gets with those of its batches.
        tracker: follows the loop over its batches.
        bad_entries: samples so far that could not be read or put into a batch, which a padding
            row replaced, and entries of the dataset without a unit. PRIVATE.
    """

    no_copy = (
        "it would make the same draws, charged as new ones. Iterate over it again for new draws; "
        "for another run call make_private of another PrivacyEngine"
    )

    def __init__(
        self,
        loader: DataLoader,
        *,
        sampling: str,
        key: bytes,
        physical_batch_size: int | None = None,
        max_batch_size: int | None = None,
        max_dataset_size: int | None = None,
        rank_part: tuple[int, int] = (0, 1),
        public_size: PublicSize | None = None,
        public_length: int | None = None,
        groups: UnitGroups | None = None,
        foreign_batches: bool = False,
    ):
        num_samples, batch_size = check_loader(loader, sampling=sampling)
        dataset = loader.dataset
        per_unit: int | None = None
        if groups is not None and groups.are_drawn:
            num_samples = len(groups)
        elif groups is not None:
            kept = groups.kept().tolist()
            dataset, num_samples, per_unit = Subset(dataset, kept), len(kept), groups.limit
        self.dataset_size, rate = num_samples, 1.0
        if public_size is None:
            batch_size = min(batch_size, num_samples)
            rate, self.steps_per_epoch = batch_size / num_samples, -(-num_samples // batch_size)
        else:
            self.dataset_size, rate, self.steps_per_epoch = public_size.of(batch_size)
        # Where no size was declared, the dataset's own is public.
        most = max_dataset_size or num_samples
        if max_batch_size is not None and num_samples > most:
            raise PrivateRefusal(
                f"data_loader.dataset has more entries than max_dataset_size={most}, so "
                "max_batch_size would cut draws more often than accounted for; pass a public "
                "number that no dataset of this kind exceeds",
                num_samples=num_samples,
            ) from None
        self._groups = groups
        self.tracker = tracker = BatchTracker(
            fetched_ahead=loader.num_workers > 0,
            equal_sizes=sampling != "poisson",
            foreign_batches=foreign_batches,
        )
        self.sample_rate = rate if sampling == "poisson" else None
        self.expected_batch_size = float(batch_size)
        self.max_batch_size = max_batch_size
        self._max_dataset_size = max_dataset_size
        self.has_public_size = public_size is not None
        if public_length is None and isinstance(loader.collate_fn, PadTo):
            public_length = loader.collate_fn.length
        self.lengths = Lengths(public_length)
        self.order = RowOrder()
        self.slots: int | None = None
        self.packing = loader.collate_fn if isinstance(loader.collate_fn, PackTo) else None
        self.has_pairs = isinstance(loader.collate_fn, Pairs)
        self.bad_entries = 0 if groups is None else groups.left_out
        self._draws: DrawSampler | None = None
        self._mark: BatchMark | None = None
        self._trial: LossTrial | None = None
        if sampling == "shuffled":
            assert loader.batch_size is not None
            own = ShuffledBatchSampler(
                loader.sampler, loader.batch_size, loader.drop_last, tracker
            )
            self.steps_per_epoch = len(own)
            self._source: DrawSampler | ShuffledBatchSampler = own
        else:
            drawn: dict[str, Any] = {
                "steps_per_epoch": self.steps_per_epoch,
                "key": key,
                "physical_batch_size": physical_batch_size,
            }
            bounds: dict[str, Any] = {"ranks": rank_part[1], "at_most": physical_batch_size}
            if sampling == "fixed_size":
                self._draws = FixedSizeBatchSampler(num_samples, batch_size, **drawn)
                self.slots = slots_of_size(batch_size, **bounds)
            else:
                self.slots = slots_of_draws(self.dataset_size, rate, cap=max_batch_size, **bounds)
                if (max_batch_size or 0) >= most:
                    max_batch_size = None  # no draw is larger
                self._draws = PoissonBatchSampler(
                    num_samples,
                    rate,
                    max_batch_size=max_batch_size,
                    accounted_size=most,
                    # Who owns which entry is public where entries are of several units.
                    relation=ADD_REMOVE
                    if public_size is not None and not (groups and groups.has_shared)
                    else ZERO_OUT,
                    examples_per_unit=per_unit,
                    **drawn,
                )
            self._draws.follow(tracker, rank_part)
            if groups is not None and groups.are_drawn:
                self._draws.refuse_other_loaders(
                    "batches of this loader's batch_sampler are units, not entries of the dataset "
                    "(unit_of): iterate over the loader that make_private returned, without "
                    "BatchMemoryManager; physical_batch_size= bounds its microbatches"
                )
            elif self.has_pairs:
                self._draws.refuse_other_loaders(
                    "in batches of another loader the rows of a pair (collate_fn=Pairs(...)) are "
                    "clipped each by itself: iterate over the loader that make_private returned, "
                    "without BatchMemoryManager; physical_batch_size= bounds its microbatches"
                )
            self._source = self._draws
        self.sampler_name = self.event(1.0).sampler
        self.event_covers_epoch = sampling == "shuffled"
        options: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "multiprocessing_context": loader.multiprocessing_context,
            "generator": loader.generator,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
        }
        collate, readable = loader.collate_fn, ReadableEntries(dataset)
        made: Callable[[list[Any]], Collated]
        if isinstance(collate, PackTo):
            made = PackedCollate(collate)
        else:
            is_public = self.lengths.declared is not None
            made = FittingCollate(collate, readable, has_public_length=is_public)
            if loader.num_workers:
                made = TriedCollate(made, may_sort=self.slots is None)
        super().__init__(
            dataset,
            batch_sampler=self._source,
            # Loaders that copy it get empty draws as empty lists.
            collate_fn=_CollateForOthers(made, readable, blank=loader.num_workers > 0),
            **options,
        )
        entries: Dataset[Any] = readable
        if self._draws is not None:
            assert self.slots is not None
            units = groups if groups is not None and groups.are_drawn else None
            self._rows: SlotSampler
            if isinstance(collate, PackTo):
                self.slots = collate.max_documents
                self._rows = PackedSampler(self._draws, readable, collate, units)
                if units is not None:
                    entries = DocumentsOf(readable)
            elif units is not None:
                self._rows = UnitSlots(self._draws, self.slots, units)
            else:
                self._rows = SlotSampler(self._draws, self.slots)
        # Loaders that iterate batch_sampler would train on padding rows; this one has them.
        rows = self._source if self._draws is None else self._rows
        self._padded: DataLoader[Any] = DataLoader(
            entries, batch_sampler=rows, collate_fn=made, **options
        )

    def event(self, noise_multiplier: float) -> Event:
        """Cost of releasing one logical batch with this noise.

        The event of a shuffled loader is a whole epoch, with its least noise multiplier.
        """
        return self._source.event(noise_multiplier)

    @property
    def unit(self) -> str:
        """The privacy unit, such as "document"; see `PrivacyEngine.privacy_unit`."""
        if self._groups is None and self.has_pairs:
            return PREFERENCE_PAIR
        if self._groups is None:
            return SAMPLE if self.packing is None else DOCUMENT
        unit = USER_OF_FIXED_GRAPH if self._groups.has_shared else USER
        return named(unit, self._groups.unit_name)

    @property
    def grouping(self) -> str | None:
        """Digest of which entries are of one unit. PRIVATE. None where each entry is one."""
        return None if self._groups is None else self._groups.digest

    @property
    def unit_in_words(self) -> str:
        """The privacy unit, for reports."""
        if self.unit == PREFERENCE_PAIR:
            return "one preference pair of the dataset, its two rows clipped as one"
        if self._groups is None:
            return f"one {'document' if self.unit == DOCUMENT else 'entry'} of the dataset"
        most = "one entry" if self._groups.limit == 1 else f"{self._groups.limit} entries"
        user = f"{self.unit} (unit_of)"
        if self._groups.are_drawn:
            return f"{user}, of which each draw uses at most {most}, clipped as one"
        text = f"{user}, of which training uses at most {most}, each clipped by itself"
        if self._groups.has_shared:
            text += (
                "; an entry may be of several users, and who owns which entry is taken as public "
                "(fixed-graph relation, arXiv:2503.03622)"
            )
        return text

    @property
    def sampling_scheme(self) -> dict[str, Any]:
        """What a run that goes on must draw alike."""
        scheme = {
            "sampler": self.sampler_name,
            "num_samples": self.dataset_size,
            "expected_batch_size": self.expected_batch_size,
            "max_batch_size": self.max_batch_size,
        }
        if self._max_dataset_size is not None:
            scheme["max_dataset_size"] = self._max_dataset_size
        if self._groups is not None:
            # Another user in a user's place would be protected from some of the releases alone.
            scheme["entries of each unit"] = self.grouping
        return scheme if self.unit == SAMPLE else {**scheme, "unit": self.unit_in_words}

    @property
    def is_real(self) -> Tensor:
        """`[B]`, bool: which rows of the current microbatch are samples. PRIVATE: keep it secret.

        Of packed documents it is which documents there are, of pairs which pairs.

        The losses of padding rows mean nothing: `losses[loader.is_real].mean()`.
        """
        mark = self._current_mark()
        if mark.units is not None and mark.units.are_rows and not self.has_pairs:
            mark = mark.of_rows
        # The clipping gates read the original.
        return torch.ones(mark.size, dtype=torch.bool) if mark.real is None else mark.real.clone()

    @property
    def is_last(self) -> bool:
        """Whether the current microbatch ends its logical batch, which step() releases."""
        return self._current_mark().last

    @property
    def releases(self) -> int:
        """How many logical batches were released so far, with the one whose release has begun.

        It is public, unlike the number of microbatches: count steps and schedules by it.
        """
        return self.tracker.releases

    def _current_mark(self) -> BatchMark:
        if self._mark is None:
            raise RuntimeError(
                "there is no current batch of this loader: iterate over it first. Batches of "
                "BatchMemoryManager are its own: in place of `if loader.is_last:` write `if not "
                "optimizer.step_was_skipped:` behind optimizer.step(), and all its rows are "
                "samples"
            )
        return self._mark

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # The samplers ask too, but DataLoader workers fetch batches ahead of the releases.
        if not self.tracker.may_begin(True):
            return
        self.tracker.abandon()
        marked = self._marked_epoch() if self._draws is None else self._marked_draws()
        with self.tracker.noting_refusals():
            with self.order.iterated():
                yield from self._observed(marked)
            self.tracker.end_epoch(self._mark)

    def _observed(self, marked: Iterator[tuple[Any, BatchMark]]) -> Iterator[Any]:
        """The batches, each compared with those before it."""
        for batch, mark in marked:
            self._mark = mark
            if self.has_pairs:
                rows, each = Pairs.rows(batch), Pairs.ROWS
            else:
                rows, each, mark = batch, 1, mark.of_rows
            self.lengths.observe(rows, mark.size * each)
            self.order.observe(rows, mark, each)
            yield batch
            if mark.last and not self.tracker.may_begin(False):
                return

    def _marked_draws(self) -> Iterator[tuple[Any, BatchMark]]:
        """Microbatches of draws, with their marks."""
        marks = None
        for batch, bad in self._padded:
            if marks is None:
                marks, own = self._rows.marks, self.tracker.epochs
            mark = self._without(bad, marks.popleft())
            if isinstance(batch, PackedBatch):
                mark = replace(mark, units=batch.units)
                if self._trial is not None and self._trial.is_due(mark.microbatch):
                    changed = self._trial.begin(batch)
                    trial = replace(mark.of_trial, units=changed.units)
                    self.tracker.begin_batch(trial, own)
                    yield changed, trial
                    self._trial.end()
            elif self.has_pairs:
                mark = replace(mark, units=Pairs.units(mark.size))
            self.tracker.begin_batch(mark, own)
            yield batch, mark

    def _marked_epoch(self) -> Iterator[tuple[Any, BatchMark]]:
        """Batches of the loader's own epoch, with their marks."""
        remaining = len(self.dataset)  # type: ignore[arg-type]
        for number, (batch, bad) in enumerate(self._padded):
            size = min(int(self.expected_batch_size), remaining)
            remaining -= size
            if not number:
                own = self.tracker.epochs
            mark = self._without(bad, BatchMark(number, size, True))
            self.tracker.begin_batch(mark, own)
            self.tracker.still_to_come(self.steps_per_epoch - number - 1)
            yield batch, mark

    def _without(self, bad: Sequence[int], mark: BatchMark) -> BatchMark:
        """The mark of a batch in which padding is in place of some entries."""
        left = mark.without(bad)
        self.bad_entries += mark.count - left.count
        return left

    def try_losses(self, trial: LossTrial) -> None:
        """Yield some packed microbatches twice, first as the trial changes them."""
        self._trial = trial

    def state_dict(self) -> dict[str, int]:
        """The position. A draw that was not released yet is still to come."""
        state = {"next_draw": self.tracker.next_draw, "returns": self.tracker.returns}
        # With another loader's signals the current draw is unknown.
        if self.tracker.signalled and self._draws is not None:
            state["next_draw"] = self._draws.position
        return state

    def load_state_dict(self, state: Mapping[str, int], *, key: bytes | None = None) -> None:
        """Continue at a position; epochs that are under way end. All ranks call this together.

        A loader that is set back makes other draws in place of those that it has made.

        Args:
            state: a `state_dict()` of a loader with this sampling scheme.
            key: a key that replaces the loader's own.
        """
        draw, returns = int(state["next_draw"]), int(state.get("returns", 0))
        if self._draws is None:
            self.tracker.resume(draw)
        else:
            self._draws.resume(draw, returns=returns, key=key)


def _length(dataset: Any) -> int:
    """Number of entries of a map-style dataset; refuses an empty one."""
    remedy = "use a map-style dataset, with __len__ and __getitem__"
    try:
        num_samples = len(dataset)
    except Exception as error:
        raise ValueError(
            f"data_loader.dataset={type(dataset).__name__} has no length (len raised "
            f"{type(error).__name__}), so the probability of a sample is unknown; {remedy}"
        ) from error
    if getattr(type(dataset), "__getitem__", None) in (None, Dataset.__getitem__):
        raise ValueError(
            f"data_loader.dataset={type(dataset).__name__} has no __getitem__, by which its "
            f"entries are drawn; {remedy}"
        )
    if num_samples == 0:
        raise ValueError("data_loader.dataset is empty; training needs at least one sample")
    return num_samples


def check_loader(loader: DataLoader, *, sampling: str) -> tuple[int, int]:
    """Refuse loaders whose sampling cannot be replaced or accounted for.

    Returns:
        (number of samples, batch size).
    """
    library = wrapper_of(loader)
    if library is not None:
        raise ValueError(
            f"data_loader={type(loader).__name__} of {library}, which draws in its own way: pass "
            "the DataLoader that was prepared or set up, and prepare what make_private returns"
        )
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
    positive_int(**{"data_loader.batch_size": loader.batch_size})
    num_samples = _length(loader.dataset)
    # A subclass may draw differently.
    plain = type(loader.sampler) is SequentialSampler or (
        type(loader.sampler) is RandomSampler
        and not loader.sampler.replacement
        and len(loader.sampler) == num_samples
    )
    if not plain:
        verb = "accounted for" if sampling == "shuffled" else f"replaced by {sampling} sampling"
        raise ValueError(
            f"data_loader.sampler={type(loader.sampler).__name__} cannot be {verb}: a sample's "
            "probability is unknown. Use DataLoader(dataset, batch_size=..., shuffle=True)"
        )
    return num_samples, loader.batch_size
