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
    """The least x >= `least` that passes, or slightly more, if all values above it pass too.

    `high` must pass. The search halves x down to a bracket, then bisects in log space. The
    returned value was itself tested and passed.
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
