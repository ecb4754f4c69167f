"""Checks of patterns' arguments, which become plain ints and tuples of ints."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from numbers import Integral

from ..refusal import PrivateRefusal

# Documents' lengths are private.
_OF_DATA = {"cu_seqlens"}


def store(pattern: object, **values: object) -> None:
    """Sets fields of a frozen dataclass while it is being made."""
    for name, value in values.items():
        object.__setattr__(pattern, name, value)


def refusal(name: str, value: object, expected: str, remedy: str) -> Exception:
    """The error for an argument: its name, its value, what was expected and the way out."""
    if name in _OF_DATA:
        return PrivateRefusal(f"{name}=...: expected {expected}; {remedy}", **{name: value})
    return ValueError(f"{name}={reprlib.repr(value)}: expected {expected}; {remedy}")


def integer(name: str, value: object, least: int) -> int:
    """The value as an int; raises unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise refusal(name, value, f"an integer >= {least}", f"pass a whole number from {least}")
    return int(value)


def flag(name: str, value: object) -> None:
    """Raise for anything but True and False."""
    if not isinstance(value, bool):
        raise refusal(name, value, "True or False", "pass one of the two")


def items(name: str, values: object) -> tuple[object, ...]:
    """The members of a sequence, array or tensor."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise refusal(name, values, "a sequence", "pass a tuple or list")
    return tuple(values)


def integers(name: str, values: object, least: int) -> tuple[int, ...]:
    """The members of a sequence as ints; refuses any that is no integer of at least `least`."""
    for value in (found := items(name, values)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise refusal(
                name, found, f"integers >= {least}", "replace the others by whole numbers"
            )
    return tuple(int(value) for value in found)  # type: ignore[call-overload]
