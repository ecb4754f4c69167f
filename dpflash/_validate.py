"""Checks of arguments. The keyword under which a value is passed is named in the error message.

``positive(max_grad_norm=-1.0)`` raises a ValueError that begins with "max_grad_norm=-1.0:".
"""

import difflib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

_T = TypeVar("_T")

_LEAST_BOUND, _MOST_BOUND = 1e-30, 1e30
_LEAST_NOISE = 2.0**-30
# Times 2^31, the largest bound in grid steps, this is `dpflash.kernels.noise.MAX_SCALE`.
_MOST_NOISE = 2.0**14


def _real(name: str, value: object) -> float:
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
        raise ValueError(f"{name}=nan: expected a number; look for 0/0 or inf-inf in your code")
    return number


def positive(**values: object) -> None:
    """Refuse values that are not numbers > 0. Accepts infinity, which `finite` refuses."""
    for name, value in values.items():
        if _real(name, value) <= 0:
            raise ValueError(f"{name}={value!r}: expected a number > 0; pass a greater one")


def non_negative(**values: object) -> None:
    """Refuse values that are not numbers >= 0. Accepts infinity, which `finite` refuses."""
    for name, value in values.items():
        if _real(name, value) < 0:
            raise ValueError(f"{name}={value!r}: expected a number >= 0; pass 0 or a greater one")


def finite(**values: object) -> None:
    """Refuse values that are not finite numbers."""
    for name, value in values.items():
        if math.isinf(_real(name, value)):
            raise ValueError(f"{name}={value!r}: expected a finite number; pass one")


def noise_fits(*, max_grad_norm: float, noise_multiplier: float) -> None:
    """Refuse bounds and noise that float32 sums cannot represent. Without noise accept any bound.

    For accepted values, sums of 10^8 samples and noise of 300 standard deviations stay below
    float32's maximum, 3.4e38. Clipped gradients are rounded to a step of 2^-30 of the bound. The
    step is above float32's smallest number, and at most the noise's standard deviation.
    """
    positive(max_grad_norm=max_grad_norm)
    non_negative(noise_multiplier=noise_multiplier)
    finite(noise_multiplier=noise_multiplier)
    if noise_multiplier == 0:
        return
    if noise_multiplier >= _MOST_NOISE:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r}: expected less than {_MOST_NOISE:g}, since "
            "larger noise would not be exact in float64; pass a smaller number"
        )
    if not _LEAST_BOUND <= float(max_grad_norm) <= _MOST_BOUND:
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r} with noise: expected a number between "
            f"{_LEAST_BOUND:g} and {_MOST_BOUND:g}, so that sums fit into float32; scale the "
            "losses and the bound alike, or pass noise_multiplier=0 for any bound, also infinity"
        )
    if noise_multiplier < _LEAST_NOISE:
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r}: expected 0 or at least {_LEAST_NOISE:.3g}; "
            "smaller noise would be rounded to 0, so pass 0 for no noise, or a larger number"
        )


def probability(**values: object) -> None:
    """Refuse values that are not numbers in the open interval (0, 1)."""
    for name, value in values.items():
        if not 0 < _real(name, value) < 1:
            raise ValueError(
                f"{name}={value!r}: expected 0 < {name} < 1; pass a number strictly between these"
            )


def positive_int(**values: object) -> None:
    """Refuse values that are not integers from 1 to 2^63 - 1."""
    for name, value in values.items():
        if isinstance(value, Integral) and not value < 1 << 63:
            raise ValueError(f"{name}: expected an integer below 2^63; pass a smaller one")
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(
                f"{name}={value!r}: expected an integer >= 1; pass a whole number such as 1"
            )


def words(**values: object) -> None:
    """Refuse values that are not one line of printable text, or begin or end with a space."""
    for name, value in values.items():
        is_text = isinstance(value, str) and value.isprintable() and value.strip() == value != ""
        if not is_text:
            raise ValueError(
                f"{name}={value!r}: expected a word, or several in one line; pass printable text "
                "that does not begin or end with a space"
            )


def bytes_of(**values: object) -> int:
    """Return the number of bytes in one value: a number, or text such as "80GB" or "512 MiB"."""
    ((name, value),) = values.items()
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9.]+)\s*(?:([kmgt])(i?)b?|b)?\s*", value, re.IGNORECASE)
        try:
            number = float(found.group(1)) if found else math.nan
        except ValueError:
            number = math.nan
        # Refuse text without a unit, such as "80", which hardly means 80 bytes.
        if found is None or not number > (0 if found.group(2) else 2**10):
            raise ValueError(
                f"{name}={value!r}: expected bytes; pass a number of bytes, or a string with a "
                "unit, such as '80GB' (80 * 10^9) or '512MiB' (512 * 2^20)"
            )
        power = " kmgt".index((found.group(2) or " ").lower())
        return int(number * (1024 if found.group(3) else 1000) ** power)
    positive(**values)
    finite(**values)
    return int(value)  # type: ignore[call-overload]


def one_of(**choices: tuple[object, Collection[object]]) -> None:
    """Refuse a value that is not in a list: ``one_of(clipping=(value, ("flat",)))``."""
    for name, (value, allowed) in choices.items():
        # Test isinstance first, since `==` of arrays and tensors compares element by element.
        if not any(isinstance(value, type(choice)) and value == choice for choice in allowed):
            listed = ", ".join(repr(choice) for choice in allowed)
            raise ValueError(f"{name}={value!r}: expected one of {listed}; pass one of these")


def optional(check: Callable[..., None], **values: object) -> None:
    """Apply a check to the values that are not None: ``optional(positive, memory=None)``."""
    check(**{name: value for name, value in values.items() if value is not None})


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, such as "1 document" or "2 documents"."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def did_you_mean(name: str, known: Iterable[str], *, always: bool = False) -> str:
    """Return the end of an error message, "; did you mean 'a' or 'b'?", for an unknown name.

    If no known name is similar, return "", or with `always` the three most similar names.
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=2)
    if always and not close:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.0)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""


def naming_unknown_fields(kind: type[_T]) -> type[_T]:
    """Class decorator: errors about unknown keywords of a dataclass suggest similar fields."""
    init: Any = kind.__init__
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        for name in named.keys() - known:
            hint = did_you_mean(name, known, always=True)
            raise TypeError(f"{kind.__name__} has no field {name!r}{hint}")
        init(self, *values, **named)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


def class_name(value: object) -> str:
    """Return the full name of an object's class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def large_delta(delta: float, size: int, thing: str) -> str | None:
    """Return an error message if delta is not below 1 / size of the dataset, else None."""
    if delta < 1 / size:
        return None
    smaller = _power_of_ten_below(0.1 / size)
    return (
        f"delta={delta!r}: not below 1 / {counted(size, thing)}, so the guarantee would permit "
        f"publishing one of them; pass a smaller delta, such as {smaller:g}"
    )


def _power_of_ten_below(value: float) -> float:
    power = float(f"1e{math.floor(math.log10(value))}")
    return power if power < value else float(f"1e{math.floor(math.log10(value)) - 1}")
