"""Lengths of samples: checks whether they are public, and `PadTo`, which makes them public.

If a collate function pads to the longest sample of a batch, that sample determines the padded
length of all other samples, and thereby the kernels and the rounding of all other samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from .._validate import optional, positive_int
from ..refusal import PrivateRefusal
from ..verification.nested import leaves_of

_TARGETS = ("labels", "label", "targets", "target", "y")


class PadTo:
    """A `collate_fn` that pads or truncates each sample to one public length.

    Args:
        length: T, the size of dimension 0 of each tensor or list of a sample after padding.
        padding_value: the value to append; None means 0. If samples are mappings or tuples, it may
            be a mapping from keys or positions to values; other fields are padded with 0. For
            targets pass the index that the loss ignores: ``PadTo(512, {"labels": -100})``.
            `make_private` refuses a key that entries do not have. It also refuses a field of
            integers that looks like targets, by name or position, if it has no padding value.

    A sample is a tensor, a list of numbers, or a mapping or tuple of tensors and lists. Its
    scalars and strings are collated without padding.
    """

    def __init__(
        self, length: int, padding_value: float | Mapping[Any, float] | None = None
    ) -> None:
        positive_int(length=length)
        self.length = length
        self.padding_value = padding_value

    def __call__(self, samples: list[Any]) -> Any:
        """Collate samples; each tensor or list of a sample becomes `[B, length, ...]`."""
        return default_collate([self._sample(sample) for sample in samples])

    def unknown(self, sample: Any) -> list[Any]:
        """Return the keys of `padding_value` that a sample does not have."""
        given = self.padding_value if isinstance(self.padding_value, Mapping) else {}
        names = set(sample) if isinstance(sample, Mapping) else set()
        if isinstance(sample, tuple):
            names = set(range(len(sample)))
        return [name for name in given if name not in names]

    def without_value(self, sample: Any) -> list[Any]:
        """Return the keys of a sample's target sequences for which no padding value was given."""
        given: Any = {} if self.padding_value is None else self.padding_value
        if not isinstance(given, Mapping):
            return []
        named: list[tuple[Any, Any]] = []
        if isinstance(sample, Mapping):
            named = [(key, value) for key, value in sample.items() if key in _TARGETS]
        elif isinstance(sample, tuple):
            named = [*enumerate(sample)][1:]
        return [name for name, value in named if name not in given and _has_integers(value)]

    def _sample(self, sample: Any) -> Any:
        if isinstance(sample, Mapping):
            return {key: self._padded(value, key) for key, value in sample.items()}
        if isinstance(sample, tuple):
            parts = [self._padded(value, place) for place, value in enumerate(sample)]
            return type(sample)(*parts) if hasattr(sample, "_fields") else tuple(parts)
        return self._padded(sample, None)

    def _padded(self, value: Any, name: Any) -> Any:
        if isinstance(value, list):
            value = torch.tensor(value)
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        missing = self.length - value.shape[0]
        given = self.padding_value
        padding = given.get(name, 0) if isinstance(given, Mapping) else given or 0
        sides = (0, 0) * (value.ndim - 1) + (0, missing)  # a negative number truncates
        return F.pad(value, sides, value=padding)


def _has_integers(value: Any) -> bool:
    """Return whether a value is a sequence of integers, like token targets; bool masks are not."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], int) and not isinstance(value[0], bool)
    is_tensor = isinstance(value, Tensor) and value.ndim > 0 and value.dtype != torch.bool
    return is_tensor and not (value.is_floating_point() or value.is_complex())


class Lengths:
    """Compares the shapes of a loader's batches.

    Args:
        declared: public length that batches must have; None if no length is declared.

    Attributes:
        differ: whether two batches had different shapes, ignoring dimension 0.
    """

    def __init__(self, declared: int | None = None) -> None:
        optional(positive_int, public_length=declared)
        self.declared = declared
        self.differ = False
        self._seen: dict[str, tuple[int, ...]] | None = None

    def observe(self, batch: Any, rows: int) -> None:
        """Compare the shapes of a batch with the shapes of the first batch.

        Args:
            batch: nested tensors and arrays.
            rows: the public number of rows; another size of dimension 0 is compared as a length.

        Raises:
            PrivateRefusal: shapes differ although a public length is declared.
        """
        shapes = {
            place: tuple(x.shape[1:] if len(x) == rows else x.shape)
            for place, x in leaves_of(batch, kinds=(Tensor, np.ndarray))
            if x.ndim
        }
        if self._seen is None:
            self._seen = shapes
            lengths = [shape[0] for shape in shapes.values() if shape]
            if self.declared is not None and self.declared not in lengths:
                raise PrivateRefusal(
                    f"public_length={self.declared}: no tensor of a batch has this length in "
                    f"dimension 1; pass collate_fn=dpflash.sampling.PadTo({self.declared}) to the "
                    "DataLoader",
                    lengths=lengths,
                ) from None
        if shapes == self._seen:
            return
        self.differ = True
        if self.declared is not None:
            different = [p for p in shapes if shapes[p] != self._seen.get(p)] or ["the batch"]
            raise PrivateRefusal(
                f"public_length={self.declared}, and batch{different[0]} had other shapes in two "
                "batches: its shape differed between them, so its length is not public; pad all "
                f"samples to one length by collate_fn=dpflash.sampling.PadTo({self.declared})",
                shapes=[self._seen, shapes],
            ) from None

    def __str__(self) -> str:
        if self.declared is not None:
            return f"public, {self.declared} as declared"
        if self.differ:
            return (
                "not public, shapes differ between batches: if padding does not change a "
                "sample's own loss, the bound holds up to the rounding of other lengths (for an "
                "exact bound, pad with dpflash.sampling.PadTo)"
            )
        if self._seen is None:
            return "unknown, the private loader itself has yielded no batch yet"
        return "the same in all batches so far"
