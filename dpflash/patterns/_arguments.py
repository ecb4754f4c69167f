"""Checks the arguments of patterns and converts them to ints and tuples of ints."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from numbers import Integral

from ..refusal import PrivateRefusal

# Arguments with private values (lengths of documents), which no error message may show.
_OF_DATA = {"cu_seqlens"}


def store(pattern: object, **values: object) -> None:
    """Set fields of a frozen dataclass in its `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(pattern, name, value)


def refusal(name: str, value: object, expected: str, remedy: str) -> Exception:
    """Make the error for an argument: its name and value, what is expected, and a remedy."""
    if name in _OF_DATA:
        return PrivateRefusal(f"{name}=...: expected {expected}; {remedy}", **{name: value})
    return ValueError(f"{name}={reprlib.repr(value)}: expected {expected}; {remedy}")


def integer(name: str, value: object, least: int) -> int:
    """Return the value as an int; raise unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise refusal(name, value, f"an integer >= {least}", f"pass a whole number from {least}")
    return int(value)


def flag(name: str, value: object) -> None:
    """Raise unless the value is True or False."""
    if not isinstance(value, bool):
        raise refusal(name, value, "True or False", "pass one of the two")


def items(name: str, values: object) -> tuple[object, ...]:
    """Return the items of a sequence, array or tensor."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise refusal(name, values, "a sequence", "pass a tuple or list")
    return tuple(values)


def integers(name: str, values: object, least: int) -> tuple[int, ...]:
    """Return a sequence as ints; raise unless each item is an integer of at least `least`."""
    for value in (found := items(name, values)):
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise refusal(
                name, found, f"integers >= {least}", "replace all other values by such integers"
            )
    return tuple(int(value) for value in found)  # type: ignore[call-overload]
