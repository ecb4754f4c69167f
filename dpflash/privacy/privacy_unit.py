"""Names of privacy units: what neighboring datasets differ in."""

from __future__ import annotations

from .._validate import words

# One entry of the dataset.
SAMPLE = "sample"
DOCUMENT = "document"
# Two rows, such as a chosen and a rejected answer.
PREFERENCE_PAIR = "preference pair"
# A person or another owner of several entries.
USER = "user"
# An owner who may share entries with others, where who owns which entry is public.
USER_OF_FIXED_GRAPH = "user, fixed graph"
_USERS = (USER, USER_OF_FIXED_GRAPH)


def named(unit: str, name: str | None) -> str:
    """Add a name to a unit of users that says what they are, such as "user: patient"."""
    return unit if name is None else f"{unit}: {name}"


def kind_of(unit: str) -> str:
    """A unit without the name of what users are."""
    return unit.split(": ")[0]


def renamed(unit: str, name: str) -> str:
    """A unit of users by another name; refuses other units, which no name makes users."""
    words(unit_name=name)
    if kind_of(unit) not in _USERS:
        raise ValueError(
            f"unit_name={name!r}: the privacy unit is a {unit!r}, and each of it was drawn and "
            "clipped by itself; only users (unit_of, or dpflash train --unit folder) have a name"
        )
    return named(kind_of(unit), name)


def has_several_rows(unit: str | None) -> bool:
    """Whether a unit may have several rows of a batch."""
    return unit is not None and kind_of(unit) in (PREFERENCE_PAIR, *_USERS)


def is_unnamed(unit: str) -> bool:
    """Whether units are users of whom no name says what they are."""
    return unit in _USERS
