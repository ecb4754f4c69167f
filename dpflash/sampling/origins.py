"""Detects changed and repeated entries of a dataset, also inside Subset and ConcatDataset."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from ..refusal import PrivateRefusal


class FixedEntries:
    """Checks that a dataset keeps the entries for which sampling, units and epsilon were computed.

    The contents of the entries may change, for example in a curriculum.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._seen = _digest(dataset)

    def refuse_changed(self) -> None:
        """Raise PrivateRefusal if the length, or an entry in Subset or ConcatDataset, changed."""
        if _digest(self._dataset) != self._seen:
            raise PrivateRefusal(
                "data_loader.dataset has other entries than in make_private (it was extended or "
                "truncated, or the indices of a Subset were replaced), but sampling and epsilon "
                "were computed for the earlier entries. Call engine.detach(model), and "
                "make_private with the new dataset: the epsilons add up. Whether an entry is in "
                "the new dataset must depend on that entry alone (a threshold), and not on others "
                "(the k hardest)"
            ) from None


def _digest(dataset: Dataset[Any]) -> int | bytes:
    if type(dataset) not in (Subset, ConcatDataset):
        return len(dataset)  # type: ignore[arg-type]
    digest = blake2b(digest_size=16)
    for numbers in _origins(dataset, {}):
        digest.update(numbers.data)
    return digest.digest()


def refuse_repeated(dataset: Dataset[Any]) -> None:
    """Refuse a dataset that visibly has an entry more than once, for example by oversampling."""
    whose, which = _origins(dataset, {})
    if len(np.unique(whose * (which.max() + 1) + which)) < len(which):
        raise ValueError(
            "data_loader.dataset has an entry more than once (a dataset that is twice in a "
            "ConcatDataset, or indices of a Subset that repeat). Each copy would be a separate "
            "privacy unit, and epsilon would be too small. Include the entry once, and give its "
            "loss a larger weight; or pass unit_of=, which names one unit for all of its copies"
        )


def _origins(dataset: Dataset[Any], known: dict[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each entry, the number of its innermost dataset and its index there."""
    if type(dataset) is ConcatDataset:
        parts = [_origins(part, known) for part in dataset.datasets]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    if type(dataset) is Subset:
        whose, which = _origins(dataset.dataset, known)
        indices = np.asarray(dataset.indices)
        if (
            indices.dtype.kind in "iu"
            and indices.ndim == 1
            and abs(indices + 0.5).max(initial=0) < len(which)
        ):
            return whose[indices], which[indices]
    length = len(dataset)  # type: ignore[arg-type]
    return np.full(length, known.setdefault(id(dataset), len(known))), np.arange(length)
