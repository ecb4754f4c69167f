"""PublicFacts: the public properties of a run's batches, for `engine.plan` and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..packing import PackTo


@dataclass(frozen=True)
class PublicFacts:
    """Properties of a run's batches that do not depend on who is in the dataset."""

    # rows of each microbatch on each rank; None if batches have the sizes of the user's loader,
    # which are as public as the dataset's size
    slots: int | None
    # whether some batches did not come from iterating over the private loader itself
    others: bool
    lengths: str  # the lengths of the samples, as text
    dataset_size: int  # determines sample rate, steps per epoch and divisor
    is_declared: bool  # whether the user declared dataset_size; else it is the number of entries
    unit: str = "one entry of the dataset"  # the privacy unit, as text
    packing: PackTo | None = None  # the packing of documents; None if documents are not packed
    is_exact: bool = False  # whether make_private got exact=True
    noise: str | None = None  # the mechanism of correlated noise; None for independent noise

    def __str__(self) -> str:
        if self.slots is None:
            slots = "none; batches have the public sizes of the loader's own epochs"
        elif self.packing is not None:
            slots = f"{self.slots} documents in each microbatch at most, {self._packed_in_words}"
        else:
            slots = f"{self.slots} in each microbatch, samples in secret random slots"
        if self.others:
            slots += (
                "; some batches did not come from the private loader's own iteration and had no "
                "slots: in such a batch one sample may also change how others are rounded, so "
                "that the bound is approximate"
            )
        size = (
            "declared"
            if self.is_declared
            else "taken as public; pass make_private(dataset_size=...) to declare one"
        )
        return (
            f"privacy unit: {self.unit}\n"
            f"public slots: {slots}\n"
            f"lengths: {self.lengths}\n"
            f"dataset size: {self.dataset_size}, {size}"
            + ("" if self.noise is None else f"\nnoise mechanism: {self.noise}")
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return {
            "slots": self.slots,
            "batches_without_slots": self.others,
            "lengths": self.lengths,
            "dataset_size": self.dataset_size,
            "dataset_size_declared": self.is_declared,
            "unit": self.unit,
            **({} if self.packing is None else {"packed": self._packed_in_words}),
            **({} if self.noise is None else {"noise_mechanism": self.noise}),
        }

    @property
    def _packed_in_words(self) -> str:
        assert self.packing is not None
        rows, row_len = self.packing.rows, self.packing.tokens // self.packing.rows
        return f"packed by length into {rows} x {row_len} tokens: the bound holds " + (
            "in the arithmetic used: a document's gradients do not depend on the packing"
            if self.is_exact
            else "given that a document's gradients do not depend on the packing. The packing may "
            "change their rounding (make_private(exact=True) rules that out)"
        )
