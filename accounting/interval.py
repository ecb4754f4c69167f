"""Two ends between which a value certainly lies."""

from typing import NamedTuple

__all__ = ["Interval"]


class Interval(NamedTuple):
    """Certified ends of a value; lower is None where none is known."""

    lower: float | None
    upper: float
