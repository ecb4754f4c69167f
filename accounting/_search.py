"""A root search for monotone conditions."""

import math
from collections.abc import Callable


def smallest_passing(
    passes: Callable[[float], bool],
    *,
    high: float,
    relative_tolerance: float,
    least: float = 1e-300,
) -> float:
    """Return the least x >= `least` that passes, or a slightly larger x that passes.

    `high` must pass; if a value passes, all larger values must pass too. The search halves x until
    it fails, then bisects in log space. The returned value was itself tested.
    """
    low = max(high / 2, least)
    while passes(low):
        if low == least:
            return least
        low, high = max(low / 2, least), low
    while high > low * (1 + relative_tolerance):
        middle = math.sqrt(low) * math.sqrt(high)
        if not low < middle < high:
            break
        if passes(middle):
            high = middle
        else:
            low = middle
    return high
