"""The noise that keeps a number of events within a target, whatever their sampler."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

from dpflash.accounting import Accountant, Event, PoissonGaussian, get_noise_multiplier

from .relations import as_step

_RELATIVE_TOLERANCE = 1e-4
_LEAST_NOISE, _MOST_NOISE = 0.01, 1e8


def noise_for(
    accountant: Accountant,
    event: Callable[[float], Event],
    count: int,
    *,
    epsilon: float,
    delta: float,
) -> float:
    """The least noise at which `count` events alone stay within (epsilon, delta).

    Args:
        accountant: of the kind that will report them, ours or one of Opacus; its history is left
            alone and not counted.
        event: the event with a noise multiplier.
        count: how often it happens, >= 1.
        epsilon, delta: the target.

    Raises:
        ValueError: no noise reaches the target, or the accountant does not know such events.

    Guarantees:
        The accountant's epsilon at the value returned was computed; the value is at most 1e-4
        relative above the least one, and at least 0.01.
    """
    ours = isinstance(accountant, Accountant)
    if not ours or type(event(1.0)) is PoissonGaussian:
        empty = copy.copy(accountant)
        if ours:
            empty.neighboring_relation = event(1.0).relation
        return get_noise_multiplier(
            target_epsilon=epsilon,
            target_delta=delta,
            sample_rate=as_step(accountant, event(1.0))[1],
            steps=count,
            accountant=empty,
        )

    def passes(noise_multiplier: float) -> bool:
        meter = copy.copy(accountant)
        meter.history, meter.events = [], []
        step = event(noise_multiplier)
        meter.neighboring_relation = step.relation
        meter.compose(step, count)
        return bool(meter.get_epsilon(delta) <= epsilon)

    low, high = _LEAST_NOISE, 1.0
    while not passes(high):
        low, high = high, 2 * high
        if high > _MOST_NOISE:
            raise ValueError(
                f"target_epsilon={epsilon!r}: no noise_multiplier up to {_MOST_NOISE:g} reaches "
                f"it at target_delta={delta!r} with {count} events such as {event(high)}; raise "
                "target_epsilon or target_delta, train fewer epochs"
                + (", or raise max_batch_size" if event(high).failure() else "")
            )
    if passes(low):
        return low
    while high > low * (1 + _RELATIVE_TOLERANCE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high
