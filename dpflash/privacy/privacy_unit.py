"""Names of privacy units. Neighboring datasets differ in one unit."""

from __future__ import annotations

from .._validate import words

# One entry of the dataset.
SAMPLE = "sample"
DOCUMENT = "document"
# Two rows, such as a chosen and a rejected answer.
PREFERENCE_PAIR = "preference pair"
# A person or another owner of several entries.
USER = "user"
# An owner who may share entries with others; the assignment of entries to owners is public.
USER_OF_FIXED_GRAPH = "user, fixed graph"
_USERS = (USER, USER_OF_FIXED_GRAPH)


def named(unit: str, name: str | None) -> str:
    """Return the unit with its unit_name, such as "user: patient"."""
    return unit if name is None else f"{unit}: {name}"


def kind_of(unit: str) -> str:
    """Return the unit without its unit_name, such as "user" for "user: patient"."""
    return unit.split(": ")[0]


def renamed(unit: str, name: str) -> str:
    """Return a unit of users with another unit_name; raise ValueError for other units."""
    words(unit_name=name)
    if kind_of(unit) not in _USERS:
        raise ValueError(
            f"unit_name={name!r}: the privacy unit is {unit!r}, whose name is fixed; only users "
            "(unit_of, or dpflash train --unit folder) can have a unit_name"
        )
    return named(kind_of(unit), name)


def has_several_rows(unit: str | None) -> bool:
    """Return whether a unit may have several rows of a batch."""
    return unit is not None and kind_of(unit) in (PREFERENCE_PAIR, *_USERS)


def is_unnamed(unit: str) -> bool:
    """Return whether units are users without a unit_name."""
    return unit in _USERS
