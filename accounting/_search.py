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
    """Return the least x >= `least` with `passes(x)`, or a slightly larger such x.

    `passes(high)` must be true. If `passes(x)` is true, it must be true for all larger x too. The
    search halves x until `passes(x)` is false, then bisects in log space. The result was tested.
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
