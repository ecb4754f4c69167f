"""SamplingPlan: the sampling scheme of the logical batches, and the privacy cost of a release."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dpflash.accounting import (
    CyclicPoissonGaussian,
    Event,
    FixedSizeGaussian,
    PoissonGaussian,
    RandomAllocationGaussian,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    UnitPoissonGaussian,
    truncation_probability,
)
from dpflash.accounting.events import ADD_REMOVE, ZERO_OUT

from .._validate import positive_int
from ..noise import Banded
from ..packing import PackTo, Pairs
from ..privacy.privacy_unit import (
    DOCUMENT,
    PREFERENCE_PAIR,
    SAMPLE,
    USER,
    USER_OF_FIXED_GRAPH,
    named,
)
from ..refusal import PrivateRefusal
from .origins import refuse_repeated
from .prepared import Prepared, wrapper_of
from .slots import slots_of_draws, slots_of_size
from .unit_groups import UnitGroups

ALLOCATION = "random_allocation"
SAMPLINGS = ("poisson", "fixed_size", "shuffled", "cyclic_poisson", ALLOCATION)
# Samplings that draw samples independently of each other, so that logical batches vary in size.
INDEPENDENT = ("poisson", "cyclic_poisson", ALLOCATION)
# Key in `scheme` of a digest of the entries of each unit. PRIVATE.
ENTRIES_OF_UNITS = "entries of each unit"
# A probability that is negligible compared to delta, even in thousands of steps at epsilon 10.
_FREE = 1e-16


@dataclass(frozen=True)
class SamplingPlan:
    """The public sampling scheme of a run. If a public size is declared, num_samples is private.

    Attributes:
        sampling: one of `SAMPLINGS`.
        dataset: the dataset that is sampled from.
        num_samples: the number of units if units are sampled, else the number of entries.
        dataset_size: the declared public size, or else num_samples.
        has_public_size: whether a public size was declared.
        batch_size: batch size of the user's loader.
        sample_rate: probability of a sample in a logical batch, for samplings in `INDEPENDENT`.
            For cyclic Poisson sampling it is the probability averaged over the parts.
        steps_per_epoch: number of logical batches in an epoch.
        max_batch_size: larger logical batches are truncated to this size; None for no limit.
        max_dataset_size: declared upper bound of any dataset's size; None if not declared.
        groups: the entries of each privacy unit; None if each entry is a unit.
        packing: the collate function that packs documents; None if rows are samples.
        has_pairs: whether samples are pairs of rows, see `dpflash.packing.Pairs`.
        mechanism: the banded noise mechanism, also if it has one band; None for plain noise.
    """

    sampling: str
    dataset: Dataset[Any]
    num_samples: int
    dataset_size: int
    has_public_size: bool
    batch_size: int
    sample_rate: float
    steps_per_epoch: int
    max_batch_size: int | None
    max_dataset_size: int | None
    groups: UnitGroups | None
    packing: PackTo | None
    has_pairs: bool
    mechanism: Banded | None = None

    @classmethod
    def of(
        cls,
        loader: DataLoader[Any],
        *,
        sampling: str,
        max_batch_size: int | None = None,
        max_dataset_size: int | None = None,
        dataset_size: int | None = None,
        sample_rate: float | None = None,
        steps_per_epoch: int | None = None,
        groups: UnitGroups | None = None,
        noise_mechanism: Banded | None = None,
    ) -> SamplingPlan:
        """Return the plan for the dataset and the batch size of a plain loader.

        The other arguments are fields of `dpflash.PrivacyConfig`; `groups` are its units' entries.

        Raises:
            ValueError: the loader's sampling cannot be replaced or accounted for, or its batches
                are larger than dataset_size.
            PrivateRefusal: the dataset is larger than max_dataset_size.
        """
        num_samples, batch_size = check_loader(loader, sampling=sampling)
        dataset = loader.dataset
        if groups is None:
            refuse_repeated(dataset)
        if groups is not None and groups.are_drawn:
            num_samples = len(groups)
        elif groups is not None:
            kept = groups.kept().tolist()
            dataset, num_samples = Subset(dataset, kept), len(kept)
        is_declared = dataset_size is not None or sample_rate is not None
        if is_declared:
            size, rate, steps = _declared(batch_size, dataset_size, sample_rate, steps_per_epoch)
        else:
            batch_size = min(batch_size, num_samples)
            size, rate, steps = _declared(batch_size, num_samples, None, None)
        if sampling == ALLOCATION:
            rate = 1 / steps
        if noise_mechanism is not None:
            _refuse_small_parts(noise_mechanism.bands, batch_size, rate)
        # If no size was declared, the number of entries counts as public.
        most = max_dataset_size or num_samples
        if max_batch_size is not None and num_samples > most:
            raise PrivateRefusal(
                f"data_loader.dataset has more entries than max_dataset_size={most}, so "
                "max_batch_size would truncate batches more often than accounted for; pass a "
                "public number that no dataset of this kind exceeds",
                num_samples=num_samples,
            ) from None
        if sampling == "shuffled":
            assert loader.batch_size is not None
            steps = len(BatchSampler(loader.sampler, loader.batch_size, loader.drop_last))
        collate = loader.collate_fn
        return cls(
            sampling,
            dataset,
            num_samples=num_samples,
            dataset_size=size,
            has_public_size=is_declared,
            batch_size=batch_size,
            sample_rate=rate,
            steps_per_epoch=steps,
            max_batch_size=max_batch_size,
            max_dataset_size=max_dataset_size,
            groups=groups,
            packing=collate if isinstance(collate, PackTo) else None,
            has_pairs=isinstance(collate, Pairs),
            mechanism=noise_mechanism,
        )

    # Logical batches

    @property
    def expected_batch_size(self) -> float:
        """The expected number of samples in a logical batch, which is the divisor of a step."""
        if self.sampling == ALLOCATION:
            return self.dataset_size / self.steps_per_epoch
        return float(self.batch_size)

    @property
    def cut(self) -> int | None:
        """The size to which logical batches are truncated; None if they are never larger."""
        return None if (self.max_batch_size or 0) >= self._most else self.max_batch_size

    @property
    def _most(self) -> int:
        return self.max_dataset_size or self.num_samples

    @property
    def least_free_cut(self) -> int:
        """The smallest max_batch_size whose effect on delta is negligible."""

        def is_free(cap: int) -> bool:
            return truncation_probability(self._most, self.sample_rate, cap) < _FREE

        return 1 + bisect_left(range(1, self._most), True, key=is_free)

    def slots(self, *, ranks: int = 1, at_most: int | None = None) -> int | None:
        """Return the number of rows of each microbatch on a rank; None for shuffled epochs.

        Args:
            ranks: number of ranks that divide each logical batch.
            at_most: upper bound of the number of rows; None for no bound.
        """
        if self.sampling == "shuffled":
            return None
        if self.packing is not None:
            return self.packing.max_documents
        if self.sampling == "fixed_size":
            return slots_of_size(self.batch_size, ranks=ranks, at_most=at_most)
        size, rate, cap = self.dataset_size, self.sample_rate, self.max_batch_size
        return slots_of_draws(size, rate, cap=cap, ranks=ranks, at_most=at_most)

    # Cost

    @property
    def bands(self) -> int:
        """Number of bands of the noise, and of releases that `event` covers."""
        return 1 if self.mechanism is None else self.mechanism.bands

    @property
    def rate_of_part(self) -> float:
        """The probability of a sample in a logical batch that is sampled from its own part."""
        return 1.0 if self.sample_rate * self.bands > 1 else self.sample_rate * self.bands

    def events_of(self, steps: int) -> int:
        """Return how often `event` is charged for `steps` consecutive logical batches."""
        is_epoch = self.event_covers_epoch or self.is_allocated
        return -(-steps // (self.steps_per_epoch if is_epoch else self.bands))

    @property
    def event_covers_epoch(self) -> bool:
        """Whether `event` is the cost of a whole epoch of the loader's own batches."""
        return self.sampling == "shuffled"

    @property
    def is_allocated(self) -> bool:
        """Whether `event` is the cost of an epoch of random allocation."""
        return self.sampling == ALLOCATION

    def event(self, noise_multiplier: float) -> Event:
        """Return the cost of releasing one logical batch with this noise.

        With shuffled epochs or random allocation, the event is the cost of a whole epoch, and
        `noise_multiplier` is the smallest noise multiplier of the epoch's steps. With cyclic
        Poisson sampling, the event is the cost of one batch from each part.
        """
        if self.sampling == "shuffled":
            return ShuffledGaussian(noise_multiplier=noise_multiplier)
        if self.sampling == "fixed_size":
            return FixedSizeGaussian(
                noise_multiplier=noise_multiplier,
                batch_size=self.batch_size,
                num_samples=self.num_samples,
            )
        # If entries have several units, the assignment of entries to units is public.
        is_public = self.has_public_size and not (self.groups and self.groups.has_shared)
        given: dict[str, Any] = {
            "relation": ADD_REMOVE if is_public else ZERO_OUT,
            "noise_multiplier": noise_multiplier,
        }
        if self.is_allocated:
            return RandomAllocationGaussian(**given, steps=self.steps_per_epoch)
        given["sample_rate"] = self.sample_rate
        if self.groups is not None and not self.groups.are_drawn:
            return UnitPoissonGaussian(**given, examples_per_unit=self.groups.limit)
        if self.sampling == "cyclic_poisson":
            given["sample_rate"] = self.rate_of_part
            return CyclicPoissonGaussian(**given, bands=self.bands)
        if self.cut is None:
            return PoissonGaussian(**given)
        return TruncatedPoissonGaussian(**given, max_batch_size=self.cut, num_samples=self._most)

    @property
    def sampler_name(self) -> str:
        """The accountant's name of the sampling: "truncated_poisson" with max_batch_size."""
        return self.event(1.0).sampler

    # Privacy unit

    @property
    def unit(self) -> str:
        """The privacy unit, such as "document"; see `PrivacyEngine.privacy_unit`."""
        if self.groups is not None:
            unit = USER_OF_FIXED_GRAPH if self.groups.has_shared else USER
            return named(unit, self.groups.unit_name)
        if self.has_pairs:
            return PREFERENCE_PAIR
        return SAMPLE if self.packing is None else DOCUMENT

    @property
    def grouping(self) -> str | None:
        """Digest of the entries of each unit; None if each entry is a unit. PRIVATE."""
        return None if self.groups is None else self.groups.digest

    @property
    def unit_in_words(self) -> str:
        """The privacy unit, for reports."""
        if self.unit == PREFERENCE_PAIR:
            return "one preference pair of the dataset, its two rows clipped as one"
        if self.groups is None:
            return f"one {'document' if self.unit == DOCUMENT else 'entry'} of the dataset"
        most = "one entry" if self.groups.limit == 1 else f"{self.groups.limit} entries"
        user = f"{self.unit} (unit_of)"
        if self.groups.are_drawn:
            return f"{user}, of which each draw uses at most {most}, clipped as one"
        text = f"{user}, of which training uses at most {most}, each clipped by itself"
        if self.groups.has_shared:
            text += (
                "; an entry may be of several users, and who owns which entry counts as public "
                "(fixed-graph relation, arXiv:2503.03622)"
            )
        return text

    @property
    def scheme(self) -> dict[str, Any]:
        """The properties that a resumed run must share with the run that was saved."""
        scheme = {
            "sampler": self.sampler_name,
            "num_samples": self.dataset_size,
            "expected_batch_size": self.expected_batch_size,
            "max_batch_size": self.max_batch_size,
        }
        if self.max_dataset_size is not None:
            scheme["max_dataset_size"] = self.max_dataset_size
        if self.mechanism is not None and self.bands > 1:
            scheme["noise_mechanism"] = list(self.mechanism.coefficients)
        if self.groups is not None:
            # If entries moved to other units, epsilon would miss some releases on these units.
            scheme[ENTRIES_OF_UNITS] = self.grouping
        return scheme if self.unit == SAMPLE else {**scheme, "unit": self.unit_in_words}


def _declared(
    batch_size: int, size: int | None, rate: float | None, steps: int | None
) -> tuple[int, float, int]:
    """Return (public size, sample rate, steps per epoch) from `size`, or `rate` and `steps`."""
    if size is None:
        assert rate is not None and steps is not None
        return round(Fraction(batch_size) / Fraction(rate)), rate, steps
    if batch_size > size:
        raise ValueError(
            f"dataset_size={size!r} below the loader's batch_size={batch_size}: "
            "the sample rate would be above 1; pass a smaller batch_size"
        )
    return size, batch_size / size, -(-size // batch_size)


def _refuse_small_parts(bands: int, batch_size: int, rate: float) -> None:
    """Refuse an expected batch size that is larger than a part of the dataset."""
    if bands * rate > 1 and not math.isclose(bands * rate, 1, rel_tol=1e-9):
        raise ValueError(
            f"data_loader.batch_size={batch_size} with {bands} bands of noise_mechanism: each "
            f"batch is sampled from one of {bands} parts of the dataset, whose expected size is "
            "below batch_size; pass a smaller batch_size, or fewer bands"
        )


def _length(dataset: Any) -> int:
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
            f"data_loader.dataset={type(dataset).__name__} has no __getitem__, which sampling "
            f"needs to read single entries; {remedy}"
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
            f"data_loader={type(loader).__name__} of {library}, which draws batches itself: pass "
            "the DataLoader that it was made from, and prepare the loader that make_private "
            "returns"
        )
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"data_loader={type(loader).__name__}: expected a torch.utils.data.DataLoader"
        )
    if isinstance(loader, Prepared):
        raise ValueError("data_loader is private already; pass the original DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "data_loader.dataset is an IterableDataset, whose samples cannot be drawn "
            "independently; use a map-style dataset (with __len__ and __getitem__)"
        )
    if type(loader).__module__.startswith("opacus."):
        raise ValueError(
            f"data_loader={type(loader).__name__} of Opacus, which draws batches itself: pass the "
            "plain DataLoader that it was made from, whose sampling make_private replaces"
        )
    if loader.batch_size is None:
        raise ValueError(
            "data_loader has no batch_size (a batch_sampler of its own, or batching disabled), "
            "so the expected batch size is unknown; pass DataLoader(dataset, batch_size=...)"
        )
    positive_int(**{"data_loader.batch_size": loader.batch_size})
    num_samples = _length(loader.dataset)
    # A subclass of a sampler may sample differently.
    plain = type(loader.sampler) is SequentialSampler or (
        type(loader.sampler) is RandomSampler
        and not loader.sampler.replacement
        and len(loader.sampler) == num_samples
    )
    if not plain:
        verb = "accounted for" if sampling == "shuffled" else f"replaced by {sampling} sampling"
        way_out = "DataLoader(dataset, batch_size=..., shuffle=True)"
        if isinstance(loader.sampler, SubsetRandomSampler):
            # Sampling from the whole dataset would include the held-out entries.
            way_out = "DataLoader(Subset(dataset, indices), batch_size=...) with its indices"
        elif isinstance(loader.sampler, WeightedRandomSampler):
            way_out += ", and multiply the losses by public weights of the classes"
        raise ValueError(
            f"data_loader.sampler={type(loader.sampler).__name__} cannot be {verb}: a sample's "
            f"probability is unknown. Use {way_out}"
        )
    return num_samples, loader.batch_size
