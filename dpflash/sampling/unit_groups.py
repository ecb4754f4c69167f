"""UnitGroups: which entries of a dataset are of which privacy unit, such as a user."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..privacy.keys import derive_key, uniform_words
from ..refusal import PrivateRefusal

Indices = NDArray[np.int64]


class UnitGroups:
    """The entries of each unit.

    Args:
        dataset: map-style.
        unit_of: the unit of each entry, in their order; or a function from an entry to its unit,
            which reads the whole dataset once. A unit is compared by its value, such as a number
            or a text; an entry of several units has a tuple, list, set or 1-D tensor of them.
        limit: k, the most entries of a unit in one draw, or in all of training.
        sampling: "unit" if units are drawn, "example" if entries are.
        unit_name: what a unit is, such as "patient"; None if it has no name.

    Attributes:
        names: the unit of each entry.
        members: for each unit the indices of its entries, in the order of the units' first ones.
        has_shared: whether some entry is of several units.

    Raises:
        ValueError: another number of units than entries, an entry of no unit, or one of several
            where units are drawn; or a unit that is equal to itself alone, such as NaN.
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
        if callable(unit_of):
            named = [unit_of(dataset[index]) for index in range(size)]
        else:
            named = _as_list(unit_of)
        if len(named) != size:
            raise PrivateRefusal(
                "unit_of has another number of units than the dataset has entries: pass one for "
                "each entry, in the dataset's order",
                units=len(named),
                entries=size,
            ) from None
        self.names = named
        self.limit = limit
        self.unit_name = unit_name
        self.are_drawn = sampling == "unit"
        self.has_shared = False
        found: dict[Hashable, list[int]] = {}
        for index, name in enumerate(named):
            owners = _owners_of(name, index)
            self.has_shared |= len(owners) > 1
            if self.has_shared and self.are_drawn:
                raise PrivateRefusal(
                    "unit_of gives several units for an entry, which cannot be clipped as one "
                    "each: pass unit_sampling='example', or one unit for each entry",
                    entry=index,
                    units=name,
                ) from None
            for owner in owners:
                found.setdefault(owner, []).append(index)
        self.members: list[Indices] = [np.array(own) for own in found.values()]

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def digest(self) -> str:
        """Of which entries are of one unit, in hexadecimal; the units' names do not matter."""
        digest = blake2b(digest_size=16)
        for own in self.members:
            digest.update(np.array([len(own), *own], dtype="<i8").tobytes())
        return digest.hexdigest()

    def selected(self, units: Sequence[int], *, key: bytes, draw: int) -> list[Indices]:
        """Entries of each of these units for one draw: all of them, or `limit` at random."""
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
        """Entries such that no unit has more than `limit`, ascending.

        Entries are taken in the dataset's order if all of their units have room. What is kept
        depends on who owns which entry alone, not on what the entries hold.

        Source: greedy contribution bounding of Ganesh et al. (arXiv:2503.03622).
        """
        owners: list[list[int]] = [[] for _ in self.names]
        for unit, own in enumerate(self.members):
            for index in own:
                owners[index].append(unit)
        count = np.zeros(len(self.members), dtype=np.int64)
        kept = []
        for index, units in enumerate(owners):
            if (count[units] < self.limit).all():
                count[units] += 1
                kept.append(index)
        return np.array(kept, dtype=np.int64)


def _owners_of(name: Any, index: int) -> dict[Hashable, None]:
    """The units of an entry, in order."""
    name = _as_value(name)
    several = name if isinstance(name, tuple | list | set | frozenset) else [name]
    owners: dict[Hashable, None] = {}
    for owner in map(_as_value, several):
        if owner is not None and not _has_value(owner):
            raise PrivateRefusal(
                "unit_of gives an object for an entry that is equal to no other object, so "
                "entries of one unit would each be one by itself: name units by numbers or texts, "
                "and none by NaN",
                entry=index,
                unit=owner,
            ) from None
        owners[owner] = None
    if not owners or None in owners:
        raise PrivateRefusal(
            "unit_of gives no unit for an entry: each entry needs one, since nothing would "
            "protect it otherwise; give entries of nobody one each",
            entry=index,
            unit=name,
        ) from None
    return owners


def _as_value(name: Any) -> Any:
    # Two tensors of one number are different keys.
    return name.tolist() if isinstance(name, Tensor | np.ndarray) else name


def _has_value(owner: Any) -> bool:
    """Whether this can be equal to another object."""
    try:
        hash(owner)
        is_equal = bool(owner == owner)  # NaN is not.
    except (TypeError, ValueError):
        return False
    by_identity: Any = object.__hash__
    return is_equal and type(owner).__hash__ is not by_identity


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
