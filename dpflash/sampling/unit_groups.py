"""UnitGroups: the entries of each privacy unit, such as a user."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..privacy.keys import derive_key, uniform_words
from ..random_state import random_state_kept
from ..refusal import PrivateRefusal

Indices = NDArray[np.int64]


class UnitGroups:
    """The entries of each unit.

    An entry is left out if unit_of raises an error for the entry, returns no unit (None, or an
    object that equals no other, like NaN), or returns several units although units are sampled.

    Args:
        dataset: a map-style dataset.
        unit_of: the unit of each entry, in the dataset's order; or a function from an entry to its
            unit, for which the whole dataset is read once. Units are compared by value, such as
            numbers or strings. Several units are a tuple, list, set or 1-D tensor.
        limit: k, the largest number of entries of a unit in one logical batch ("unit"), or in all
            of training ("example").
        sampling: "unit" if units are sampled, "example" if entries are sampled.
        unit_name: the name of a unit, such as "patient"; None for no name.

    Attributes:
        names: the unit of each entry.
        members: the indices of each unit's entries; units are ordered by their first entry.
        has_shared: whether some entry belongs to several units.
        left_out: the number of entries that are left out. PRIVATE.

    Raises:
        PrivateRefusal: the numbers of units and entries differ, or most entries have no unit.
    """

    def __init__(
        self,
        dataset: Any,
        unit_of: Sequence[Any] | Callable[[Any], Any],
        *,
        limit: int,
        sampling: str,
        unit_name: str | None = None,
    ) -> None:
        size = len(dataset)
        named = units_of(dataset, unit_of) if callable(unit_of) else _as_list(unit_of)
        if len(named) != size:
            raise PrivateRefusal(
                "unit_of has another number of units than the dataset has entries: pass one unit "
                "for each entry, in the dataset's order",
                units=len(named),
                entries=size,
            ) from None
        self.names = named
        self.limit = limit
        self.unit_name = unit_name
        self.are_drawn = sampling == "unit"
        owners = [_owners_of(name, several=not self.are_drawn) for name in named]
        self.has_shared = any(len(own) > 1 for own in owners)
        self.left_out = sum(not own for own in owners)
        if 2 * self.left_out > size:
            raise PrivateRefusal(
                "unit_of gives most entries no unit: it fails (it gets the entry, not its index), "
                "gives None, NaN or an object that equals no other, or gives several units "
                "without unit_sampling='example'. Name units by numbers or strings, and give each "
                "entry without an owner its own unit",
                left_out=self.left_out,
                units=named,
            ) from None
        found: dict[Hashable, list[int]] = {}
        for index, own in enumerate(owners):
            for owner in own:
                found.setdefault(owner, []).append(index)
        self.members: list[Indices] = [np.array(own) for own in found.values()]

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the entries of each unit, without the units' names."""
        digest = blake2b(digest_size=16)
        for own in self.members:
            digest.update(np.array([len(own), *own], dtype="<i8").tobytes())
        return digest.hexdigest()

    def selected(self, units: Sequence[int], *, key: bytes, draw: int) -> list[Indices]:
        """Return at most `limit` random entries of each unit, for one logical batch."""
        words: NDArray[np.uint64] | None = None
        chosen = []
        for unit in units:
            own = self.members[unit]
            if len(own) > self.limit:
                if words is None:
                    examples = derive_key(key, "examples of units")
                    words = uniform_words(examples, index=draw, count=len(self.names))
                own = np.sort(own[words[own].argsort(kind="stable")[: self.limit]])
            chosen.append(own)
        return chosen

    def kept(self) -> Indices:
        """Return the entries to train on, at most `limit` of each unit, ascending.

        In the dataset's order, an entry is taken if each of its units has fewer than `limit`
        entries so far. The choice depends on the entries' units, not on their contents.

        Source: greedy contribution bounding of Ganesh et al. (arXiv:2503.03622).
        """
        owners: list[list[int]] = [[] for _ in self.names]
        for unit, own in enumerate(self.members):
            for index in own:
                owners[index].append(unit)
        count = np.zeros(len(self.members), dtype=np.int64)
        kept = []
        for index, units in enumerate(owners):
            if units and (count[units] < self.limit).all():
                count[units] += 1
                kept.append(index)
        return np.array(kept, dtype=np.int64)


def units_of(dataset: Any, unit_of: Callable[[Any], Any]) -> list[Any]:
    """Return the unit of each entry, or None if the dataset or the function raises an error."""
    found: list[Any] = []
    with random_state_kept():  # else later random numbers would reveal the number of entries
        for index in range(len(dataset)):
            try:
                found.append(unit_of(dataset[index]))
            except Exception:
                found.append(None)
    return found


def _owners_of(name: Any, *, several: bool) -> dict[Hashable, None]:
    """Return the units of an entry, in order; {} if it has no unit."""
    try:
        name = _as_value(name)
        names = name if isinstance(name, tuple | list | set | frozenset) else [name]
        owners: dict[Hashable, None] = dict.fromkeys(map(_as_value, names))
        has_unit = all(map(_has_value, owners)) and (several or len(owners) < 2)
    except Exception:  # The units cannot be hashed or compared.
        return {}
    return owners if has_unit else {}


def _as_value(name: Any) -> Any:
    # Tensors hash by identity, so equal tensors would be different keys.
    return name.tolist() if isinstance(name, Tensor | np.ndarray) else name


def _has_value(owner: Any) -> bool:
    """Return whether a unit can be equal to another object."""
    by_identity: Any = object.__hash__
    is_equal = bool(owner == owner)  # NaN is not.
    return owner is not None and is_equal and type(owner).__hash__ is not by_identity


def _as_list(values: Any) -> list[Any]:
    if isinstance(values, Tensor | np.ndarray):
        if values.ndim != 1:
            raise ValueError(
                f"unit_of has shape {tuple(values.shape)}: pass one unit for each entry, [N]"
            )
        return list(values.tolist())
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(
            f"unit_of is a {type(values).__name__}: pass one unit for each entry of the dataset "
            "(a list or an array), or a function from an entry to its unit"
        )
    return list(values)
