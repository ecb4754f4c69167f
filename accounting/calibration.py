"""From a privacy target to a noise multiplier, and from a name to an accountant."""

import math

from . import _validate
from ._search import least_that_passes
from .accountant import Accountant
from .rdp import RDPAccountant

__all__ = ["create_accountant", "epochs_to_steps", "get_noise_multiplier"]

ACCOUNTANTS: dict[str, type[Accountant]] = {"rdp": RDPAccountant}

_RELATIVE_TOLERANCE = 1e-4
_SMALLEST_NOISE_MULTIPLIER = 0.01
_LARGEST_NOISE_MULTIPLIER = 1e8


def create_accountant(name: str) -> Accountant:
    """A new accountant with an empty history.

    Args:
        name: `"rdp"`.

    Raises:
        ValueError: there is no accountant of this name.
    """
    if name not in ACCOUNTANTS:
        available = ", ".join(map(repr, ACCOUNTANTS))
        raise ValueError(f"accountant={name!r}: expected one of {available}; pass one of these")
    return ACCOUNTANTS[name]()


def epochs_to_steps(*, epochs: float, sample_rate: float) -> int:
    """The steps of that many passes over the data, a begun step counted whole.

    Args:
        epochs: passes over the data in expectation, > 0.
        sample_rate: the chance of one sample to be in a batch, in (0, 1].

    Returns:
        ceil(epochs / sample_rate), where a quotient within 1e-9 relative of an integer is that
        integer: sample_rate is mostly a rounded 1 / (number of batches).

    Raises:
        ValueError: an argument is out of its range.
    """
    _validate.positive(epochs=epochs, sample_rate=sample_rate)
    _validate.rate(sample_rate=sample_rate)
    steps = epochs / sample_rate
    if steps == math.inf:
        raise ValueError(
            f"epochs={epochs!r}, sample_rate={sample_rate!r}: expected finitely many steps; "
            "pass fewer epochs or a greater sample_rate"
        )
    nearest = round(steps)
    is_nearest = nearest > 0 and math.isclose(steps, nearest, rel_tol=1e-9)
    return nearest if is_nearest else math.ceil(steps)


def get_noise_multiplier(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int | None = None,
    epochs: float | None = None,
    accountant: str = "rdp",
) -> float:
    """The least noise that keeps a run within (target_epsilon, target_delta).

    Args:
        target_epsilon: epsilon at the end of the run, > 0.
        target_delta: delta at the end of the run, in (0, 1).
        sample_rate: the chance of one sample to be in a batch, in (0, 1].
        steps: number of steps, >= 1. Either this or epochs.
        epochs: number of passes over the data, > 0; see `epochs_to_steps`.
        accountant: the one that will report the run's epsilon, by its name.

    Returns:
        The noise_multiplier, at most 1e-4 relative above the least one that meets the target
        (and at least 0.01).

    Raises:
        ValueError: an argument is out of its range, both or neither of steps and epochs are
            given, or no noise up to 1e8 meets the target.

    Guarantees:
        This accountant's epsilon at the returned value, sample_rate and steps was computed and is
        at most target_epsilon.
    """
    _validate.positive(target_epsilon=target_epsilon, sample_rate=sample_rate)
    _validate.probability(target_delta=target_delta)
    _validate.rate(sample_rate=sample_rate)
    if (steps is None) == (epochs is None):
        raise ValueError(
            f"steps={steps!r}, epochs={epochs!r}: expected exactly one of them; "
            "leave the other out"
        )
    if epochs is not None:
        steps = epochs_to_steps(epochs=epochs, sample_rate=sample_rate)
    _validate.whole(1, steps=steps)
    meter = create_accountant(accountant)

    def passes(noise_multiplier: float) -> bool:
        meter.history = [(noise_multiplier, sample_rate, int(steps or 0))]
        return meter.get_epsilon(target_delta) <= target_epsilon

    high = 1.0
    while not passes(high):
        high *= 2
        if high > _LARGEST_NOISE_MULTIPLIER:
            raise ValueError(
                f"target_epsilon={target_epsilon!r}: no noise_multiplier up to "
                f"{_LARGEST_NOISE_MULTIPLIER:g} reaches it at target_delta={target_delta!r}, "
                f"sample_rate={sample_rate!r}, steps={steps!r} with accountant={accountant!r}; "
                "raise target_epsilon or target_delta, or take fewer steps"
            )
    return least_that_passes(
        passes,
        high=high,
        least=_SMALLEST_NOISE_MULTIPLIER,
        relative_tolerance=_RELATIVE_TOLERANCE,
    )
