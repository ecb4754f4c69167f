"""Checks of arguments, passed by keyword: `positive(epsilon=x)` names epsilon in its error."""

import math
from numbers import Integral, Real


def _real(name: str, value: object) -> float:
    """Return the value as a float. Refuse booleans, NaN and values that are not numbers."""
    if type(value) is float and value == value:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(
            f"{name}={value!r}: expected a number, got {type(value).__name__}; "
            "pass a plain int or float"
        )
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{name}: expected a number within float's range, below 1e308") from None
    if math.isnan(number):
        raise ValueError(f"{name}=nan: expected a number; find the 0/0 or inf-inf that gave it")
    return number


def positive(**values: object) -> None:
    """Refuse values that are not finite numbers > 0."""
    for name, value in values.items():
        if not 0 < _real(name, value) < math.inf:
            raise ValueError(f"{name}={value!r}: expected a finite number > 0; pass such a number")


def non_negative(**values: object) -> None:
    """Refuse values that are not numbers >= 0. Infinity is accepted."""
    for name, value in values.items():
        if _real(name, value) < 0:
            raise ValueError(f"{name}={value!r}: expected a number >= 0; pass such a number")


def finite_non_negative(**values: object) -> None:
    """Refuse values that are not finite numbers >= 0."""
    non_negative(**values)
    for name, value in values.items():
        if _real(name, value) == math.inf:
            raise ValueError(f"{name}={value!r}: expected a finite number, not infinity")


def probability(**values: object) -> None:
    """Refuse values that are not numbers in the open interval (0, 1)."""
    for name, value in values.items():
        if not 0 < _real(name, value) < 1:
            raise ValueError(
                f"{name}={value!r}: expected 0 < {name} < 1; pass a number between 0 and 1"
            )


def rate(**values: object) -> None:
    """Refuse values that are not numbers in the closed interval [0, 1]."""
    for name, value in values.items():
        if not 0 <= _real(name, value) <= 1:
            raise ValueError(
                f"{name}={value!r}: expected 0 <= {name} <= 1; "
                "pass the probability that a sample is in a batch, batch size / dataset size"
            )


def error_rate(**values: object) -> None:
    """Refuse values that are not numbers in [0, 1]; each value is a test's type I error."""
    for name, value in values.items():
        if not 0 <= _real(name, value) <= 1:
            raise ValueError(
                f"{name}={value!r}: expected 0 <= {name} <= 1; pass the false alarm rate"
            )


def whole(least: int, **values: object) -> None:
    """Refuse values that are not integers from `least` to 2^63 - 1."""
    for name, value in values.items():
        if type(value) is int and least <= value < 1 << 63:
            continue
        if isinstance(value, Integral) and not value < 1 << 63:
            raise ValueError(f"{name}: expected an integer below 2^63; pass a smaller number")
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(
                f"{name}={value!r}: expected an integer >= {least}; pass a whole number such as 1"
            )


def one_of(**choices: tuple[object, tuple[object, ...]]) -> None:
    """Refuse a value that is not one of the allowed values: ``one_of(name=(value, allowed))``."""
    for name, (value, allowed) in choices.items():
        # Arrays compare element by element.
        if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):
            listed = ", ".join(map(repr, allowed))
            raise ValueError(f"{name}={value!r}: expected one of {listed}; pass one of these")


def phase(entry: object) -> None:
    """Refuse history entries that are not (noise_multiplier, sample_rate, steps)."""
    if not isinstance(entry, tuple | list) or len(entry) != 3:
        raise ValueError(
            f"history entry {entry!r}: expected (noise_multiplier, sample_rate, steps); "
            "pass one such triple per phase"
        )
    noise_multiplier, sample_rate, steps = entry
    non_negative(noise_multiplier=noise_multiplier)
    rate(sample_rate=sample_rate)
    whole(0, steps=steps)
