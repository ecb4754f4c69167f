"""Which number of bands gives the least error at a target epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpflash.accounting import Accountant, epochs_to_steps, noise_multiplier_for
from dpflash.accounting.events import ADD_REMOVE

from .._validate import positive_int, probability
from .banded import Banded


@dataclass(frozen=True, kw_only=True)
class BandsOfRun:
    """A noise, and what it is for one run.

    Attributes:
        noise: optimized for the run; one band is independent noise.
        noise_multiplier: the least that meets the target under cyclic Poisson sampling.
        expected_error: of the iterates of mean gradients (`Banded.expected_error` times the noise
            multiplier, over the batch size), for bound and learning rate 1.
    """

    noise: Banded
    noise_multiplier: float
    expected_error: float


def compare_bands(
    *,
    num_samples: int,
    batch_size: int,
    epochs: float,
    target_epsilon: float,
    target_delta: float,
    bands: Sequence[int] | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    relation: str = ADD_REMOVE,
    accountant: str | Accountant = "contour",
) -> list[BandsOfRun]:
    """The error of a run's iterates at one epsilon, by number of bands.

    Args:
        num_samples: size of the dataset (units, if these are drawn).
        batch_size: expected batch size, at most num_samples.
        epochs: > 0; the run has `epochs_to_steps` steps.
        target_epsilon, target_delta, accountant: see `dpflash.accounting.get_noise_multiplier`.
        bands: numbers of bands to compare; None for powers of two from 1 on. All are at most the
            number of steps and num_samples / batch_size.
        momentum, weight_decay: see `Banded.expected_error`.
        relation: of the events.

    Returns:
        One entry for each number of bands, the least error first. With one band among them, the
        first is never worse than independent noise with Poisson sampling.

    Raises:
        ValueError: an argument is out of its range, or no noise meets the target.
    """
    positive_int(num_samples=num_samples, batch_size=batch_size)
    probability(target_delta=target_delta)
    if batch_size > num_samples:
        raise ValueError(
            f"batch_size={batch_size!r}: expected at most num_samples={num_samples!r}; pass a "
            "smaller batch"
        )
    rate = batch_size / num_samples
    steps = epochs_to_steps(epochs=epochs, sample_rate=rate)
    if bands is None:
        most = min(steps, num_samples // batch_size)
        bands = [1 << i for i in range(most.bit_length())]
    found = []
    for count in bands:
        noise = Banded.optimized(
            bands=count, steps=steps, momentum=momentum, weight_decay=weight_decay
        )
        noise_multiplier = noise_multiplier_for(
            lambda value, noise=noise: noise.event(  # type: ignore[misc]
                noise_multiplier=value, sample_rate=rate, steps=steps, relation=relation
            ),
            1,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            accountant=accountant,
        )
        per_unit = noise.expected_error(steps=steps, momentum=momentum, weight_decay=weight_decay)
        found.append(
            BandsOfRun(
                noise=noise,
                noise_multiplier=noise_multiplier,
                expected_error=noise_multiplier * per_unit / batch_size,
            )
        )
    return sorted(found, key=lambda choice: choice.expected_error)
