"""Checks at the door: the keyword under which a value comes becomes the name in the message.

``positive(max_grad_norm=-1.0)`` raises a ValueError that begins with "max_grad_norm=-1.0:".
"""

import math
from collections.abc import Collection
from numbers import Integral, Real


def _real(name: str, value: object) -> float:
    """The value as a float; refuses booleans, non-numbers and NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(
            f"{name}={value!r}: expected a number, got {type(value).__name__}; "
            "pass a plain int or float"
        )
    if math.isnan(value):
        raise ValueError(f"{name}=nan: expected a number; look for the 0/0 or inf-inf behind it")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number within float's range, below 1e308") from None


def positive(**values: object) -> None:
    """Refuses what is not a number greater than 0; infinity passes (see `finite`)."""
    for name, value in values.items():
        if _real(name, value) <= 0:
            raise ValueError(f"{name}={value!r}: expected a number > 0; pass a greater one")


def non_negative(**values: object) -> None:
    """Refuses what is not a number of at least 0; infinity passes (see `finite`)."""
    for name, value in values.items():
        if _real(name, value) < 0:
            raise ValueError(f"{name}={value!r}: expected a number >= 0; pass 0 or a greater one")


def finite(**values: object) -> None:
    """Refuses what is not a finite number."""
    for name, value in values.items():
        if math.isinf(_real(name, value)):
            raise ValueError(f"{name}={value!r}: expected a finite number; pass a bounded one")


def probability(**values: object) -> None:
    """Refuses what is not a number of the open interval (0, 1)."""
    for name, value in values.items():
        if not 0 < _real(name, value) < 1:
            raise ValueError(
                f"{name}={value!r}: expected 0 < {name} < 1; pass a number strictly between"
            )


def positive_int(**values: object) -> None:
    """Refuses what is not an integer of at least 1."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(
                f"{name}={value!r}: expected an integer >= 1; pass a whole number such as 1"
            )


def one_of(**choices: tuple[object, Collection[object]]) -> None:
    """Refuses a value outside of its allowed ones: ``one_of(clipping=(value, ("flat",)))``."""
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            listed = ", ".join(repr(choice) for choice in allowed)
            raise ValueError(f"{name}={value!r}: expected one of {listed}; pass one of these")
