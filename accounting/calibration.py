"""Calibration: compute the noise, sample rate or number of steps that meets a privacy target."""

import math
from collections.abc import Callable

from . import _validate
from ._search import smallest_passing
from .accountant import Accountant, Phase
from .events import ADD_REMOVE, Event, PoissonGaussian, UnitPoissonGaussian
from .registry import as_accountant, as_phase, copied

_RELATIVE_TOLERANCE = 1e-4
_SMALLEST_NOISE_MULTIPLIER = 0.01
_LARGEST_NOISE_MULTIPLIER = 1e8
_SMALLEST_SAMPLE_RATE = 1e-12
_MOST_STEPS = 10**12


def epochs_to_steps(*, epochs: float, sample_rate: float) -> int:
    """Return the number of steps of `epochs` epochs, rounded up.

    Args:
        epochs: expected number of batches that each sample is in, > 0.
        sample_rate: the probability that a sample is in a batch, in (0, 1].

    Returns:
        ceil(epochs / sample_rate). A quotient within 1e-9 relative of an integer is rounded to
        that integer, because sample_rate is usually a rounded 1 / (number of batches).

    Raises:
        ValueError: an argument is out of its range.
    """
    _validate.positive(epochs=epochs, sample_rate=sample_rate)
    _validate.rate(sample_rate=sample_rate)
    steps = epochs / sample_rate
    if steps >= 1 << 63:
        raise ValueError(
            f"epochs={epochs!r}, sample_rate={sample_rate!r}: expected fewer than 2^63 steps; "
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
    examples_per_unit: int = 1,
    accountant: str | Accountant = "contour",
) -> float:
    """Compute the least noise multiplier that keeps a run with Poisson sampling within a target.

    Args:
        target_epsilon: epsilon at the end of the run, > 0.
        target_delta: delta at the end of the run, in (0, 1).
        sample_rate: the probability that a sample is in a batch, in (0, 1].
        steps: number of steps, >= 1. Pass either steps or epochs.
        epochs: number of epochs, > 0; see `epochs_to_steps`.
        examples_per_unit: the largest number of examples of one user or other privacy unit, see
            `UnitPoissonGaussian`. 1 if each sample is a unit.
        accountant: the accountant that will report the run's epsilon: its name, or an object,
            whose history is neither changed nor counted.

    Returns:
        The noise_multiplier, at most 1e-4 relative above the least value that meets the target
        (and at least 0.01).

    Raises:
        ValueError: an argument is out of its range, both or neither of steps and epochs are
            given, or no noise_multiplier up to 1e8 meets the target.

    Guarantees:
        This accountant's epsilon at the returned value, sample_rate and steps was computed and is
        at most target_epsilon.
    """
    _validate.positive(target_epsilon=target_epsilon, sample_rate=sample_rate)
    _validate.probability(target_delta=target_delta)
    _validate.rate(sample_rate=sample_rate)
    sample_rate = float(sample_rate)
    steps = _number_of_steps(steps, epochs, sample_rate)
    relation = _relation_of(accountant)
    return noise_multiplier_for(
        lambda noise_multiplier: _step(noise_multiplier, sample_rate, examples_per_unit, relation),
        steps,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        accountant=accountant,
    )


def noise_multiplier_for(
    event: Callable[[float], Event],
    count: int,
    *,
    target_epsilon: float,
    target_delta: float,
    accountant: str | Accountant = "contour",
) -> float:
    """Compute the least noise multiplier at which `count` events of any kind meet a target.

    Args:
        event: a function that returns the event for a noise multiplier.
        count: number of events, >= 1.
        target_epsilon, target_delta, accountant: as in `get_noise_multiplier`; target_epsilon is
            for the event's neighboring relation.

    Returns:
        The noise_multiplier, as in `get_noise_multiplier`.

    Raises:
        ValueError: no noise_multiplier up to 1e8 meets the target, or the accountant does not
            support such events.
    """
    _validate.whole(1, count=count)
    trial = copied(as_accountant(accountant))

    def passes(noise_multiplier: float) -> bool:
        _replace_history(trial, event(noise_multiplier), count)
        return bool(trial.get_epsilon(target_delta) <= target_epsilon)

    high = 1.0
    while not passes(high):
        high *= 2
        if high > _LARGEST_NOISE_MULTIPLIER:
            cap = ", or raise max_batch_size" if event(high).failure() else ""
            raise ValueError(
                f"target_epsilon={target_epsilon!r}: no noise_multiplier up to "
                f"{_LARGEST_NOISE_MULTIPLIER:g} reaches it at target_delta={target_delta!r} in "
                f"{count} steps of the {event(high).sampler} sampler with accountant="
                f"{trial.mechanism()!r}; raise target_epsilon or target_delta, take fewer steps"
                f"{cap}"
            )
    return smallest_passing(
        passes,
        high=high,
        least=_SMALLEST_NOISE_MULTIPLIER,
        relative_tolerance=_RELATIVE_TOLERANCE,
    )


def get_sample_rate(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    steps: int,
    examples_per_unit: int = 1,
    accountant: str | Accountant = "contour",
) -> float:
    """Compute the greatest sample rate at which a run stays within a target.

    Args:
        target_epsilon, target_delta, steps, examples_per_unit, accountant: as in
            `get_noise_multiplier`.
        noise_multiplier: the noise's standard deviation divided by the bound of one sample, > 0.

    Returns:
        The sample_rate in (0, 1], at most 1e-4 relative below the greatest such rate.

    Raises:
        ValueError: an argument is out of its range, or no sample_rate down to 1e-12 meets the
            target.

    Guarantees:
        This accountant's epsilon at the returned value was computed and is at most target_epsilon.
    """
    _validate.positive(target_epsilon=target_epsilon, noise_multiplier=noise_multiplier)
    _validate.probability(target_delta=target_delta)
    _validate.whole(1, steps=steps)
    trial = copied(as_accountant(accountant))
    relation = _relation_of(trial)

    def passes(inverse: float) -> bool:
        step = _step(noise_multiplier, 1 / inverse, examples_per_unit, relation)
        _replace_history(trial, step, steps)
        return trial.get_epsilon(target_delta) <= target_epsilon

    high = 1.0
    while not passes(high):
        high *= 4
        if high > 1 / _SMALLEST_SAMPLE_RATE:
            raise ValueError(
                f"target_epsilon={target_epsilon!r}: no sample_rate down to "
                f"{_SMALLEST_SAMPLE_RATE:g} reaches it at target_delta={target_delta!r}, "
                f"noise_multiplier={noise_multiplier!r}, steps={steps!r} with accountant="
                f"{trial.mechanism()!r}; raise the noise or the target, or take fewer steps"
            )
    return 1 / smallest_passing(
        passes, high=high, least=1.0, relative_tolerance=_RELATIVE_TOLERANCE
    )


def get_steps(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    examples_per_unit: int = 1,
    accountant: str | Accountant = "contour",
) -> int:
    """Compute how many steps with Poisson sampling a target allows; 0 if it allows none.

    Args:
        target_epsilon, target_delta, examples_per_unit, accountant: as in `get_noise_multiplier`.
        noise_multiplier: the noise's standard deviation divided by the bound of one sample, > 0.
        sample_rate: the probability that a sample is in a batch, in (0, 1].

    Returns:
        A whole number, at most 10^12.

    Raises:
        ValueError: an argument is out of its range.
    """
    _validate.positive(noise_multiplier=noise_multiplier, sample_rate=sample_rate)
    trial = copied(as_accountant(accountant))
    trial.history = []
    if isinstance(trial, Accountant):
        trial.events = []
    return remaining_steps(
        trial,
        _step(noise_multiplier, sample_rate, examples_per_unit, _relation_of(trial)),
        target_epsilon=target_epsilon,
        target_delta=target_delta,
    )


def remaining_steps(
    accountant: Accountant, event: Event, *, target_epsilon: float, target_delta: float
) -> int:
    """Compute how many more events can follow before the history exceeds a target.

    Args:
        accountant: the accountant whose history the events follow; it is not changed. For a
            `PoissonGaussian` or a `Gaussian` it may be an accountant of Opacus.
        event: an event whose relation is the accountant's neighboring relation.
        target_epsilon: > 0.
        target_delta: in (0, 1).

    Returns:
        A whole number, at most 10^12; 0 if the history already exceeds the target.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        The accountant's epsilon after that many events was computed and is at most
        target_epsilon. If the result is below 10^12, one more event exceeds the target.
    """
    _validate.positive(target_epsilon=target_epsilon)
    _validate.probability(target_delta=target_delta)

    def passes(count: int) -> bool:
        trial = copied(accountant)
        if isinstance(accountant, Accountant):
            trial.compose(event, count)
        else:
            _append(trial.history, *as_phase(trial, event), count)
        return trial.get_epsilon(target_delta) <= target_epsilon

    if not passes(1):
        return 0
    low, high = 1, 2
    while high <= _MOST_STEPS and passes(high):
        low, high = high, 8 * high
    if high > _MOST_STEPS:
        high = _MOST_STEPS + 1
    while high - low > 1:
        # Use the geometric mean while the bracket spans orders of magnitude.
        middle = math.isqrt(low * high) if high > 4 * low else (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _step(
    noise_multiplier: float, sample_rate: float, examples_per_unit: int, relation: str
) -> PoissonGaussian:
    _validate.whole(1, examples_per_unit=examples_per_unit)
    if examples_per_unit == 1:
        return PoissonGaussian(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, relation=relation
        )
    return UnitPoissonGaussian(
        noise_multiplier=noise_multiplier,
        sample_rate=sample_rate,
        examples_per_unit=examples_per_unit,
        relation=relation,
    )


def _replace_history(trial: Accountant, step: Event, count: int) -> None:
    if isinstance(trial, Accountant):
        trial.history, trial.events = [], []
        trial.neighboring_relation = step.relation
        trial.compose(step, count)
    else:
        trial.history = [(*as_phase(trial, step), count)]


def _relation_of(accountant: object) -> str:
    return accountant.neighboring_relation if isinstance(accountant, Accountant) else ADD_REMOVE


def _append(history: list[Phase], noise_multiplier: float, rate: float, count: int) -> None:
    """Append steps, merging equal phases: Opacus' GaussianAccountant reads only one phase."""
    if history and tuple(history[-1][:2]) == (noise_multiplier, rate):
        count += history.pop()[2]
    history.append((noise_multiplier, rate, count))


def _number_of_steps(steps: int | None, epochs: float | None, sample_rate: float) -> int:
    if (steps is None) == (epochs is None):
        raise ValueError(
            f"steps={steps!r}, epochs={epochs!r}: expected exactly one of steps and epochs; "
            + ("pass one of them" if steps is None else "leave one of them out")
        )
    if epochs is not None:
        return epochs_to_steps(epochs=epochs, sample_rate=sample_rate)
    _validate.whole(1, steps=steps)
    assert steps is not None
    return int(steps)
