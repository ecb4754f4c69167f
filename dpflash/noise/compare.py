"""Compares numbers of bands by their error at a target epsilon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from dpflash.accounting import (
    Accountant,
    PoissonGaussian,
    epochs_to_steps,
    noise_multiplier_for,
)
from dpflash.accounting.events import ADD_REMOVE

from .._validate import optional, positive_int, probability
from .banded import Banded
from .reference import MOST_NOISE


@dataclass(frozen=True, kw_only=True)
class BandsOfRun:
    """Banded noise with a number of bands, its noise multiplier and its error in one run.

    Attributes:
        noise: the noise, optimized for the run; with one band it is independent.
        batch_size: the run's expected batch size.
        epochs: the run's number of epochs.
        steps: the run's number of steps.
        noise_multiplier: the smallest value that meets target_epsilon (cyclic Poisson sampling).
        expected_error: the error of the iterates if max_grad_norm and learning rate are 1, and
            gradients are means: `Banded.expected_error` * noise_multiplier / batch_size.
    """

    noise: Banded
    batch_size: int
    epochs: float
    steps: int
    noise_multiplier: float
    expected_error: float

    @property
    def scaled_error(self) -> float:
        """`expected_error` / steps, the error if the learning rates of all steps add up to 1.

        Use it to compare runs with different numbers of steps: the learning rate then grows with
        the batch size, and falls with the epochs. Only the noise's error is counted. Fewer,
        larger steps may also teach the model less, and more epochs may teach it more.
        """
        return self.expected_error / self.steps


def compare_bands(
    *,
    num_samples: int,
    batch_size: int | Sequence[int],
    epochs: float | Sequence[float],
    target_epsilon: float,
    target_delta: float,
    bands: Sequence[int] | None = None,
    parameters: int | None = None,
    max_memory: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    relation: str = ADD_REMOVE,
    accountant: str | Accountant = "contour",
) -> list[BandsOfRun]:
    """Compare numbers of bands by the error of a run's iterates at one epsilon.

    Args:
        num_samples: size of the dataset (the number of units, if units are sampled).
        batch_size: expected batch size, at most num_samples; or several sizes to compare.
        epochs: > 0, each of ceil(num_samples / batch_size) steps; or several to compare.
        target_epsilon, target_delta, accountant: see `dpflash.accounting.get_noise_multiplier`.
        bands: numbers of bands to compare, each at most the number of steps and
            num_samples / batch_size; None for powers of two from 1 on, until the error has risen
            twice. Numbers of bands whose noise cannot be drawn exactly are left out.
        parameters: the number of elements of the trained parameters; pass it with max_memory.
        max_memory: leave out noise whose tensors (`Banded.state_bytes`) need more bytes than this.
        momentum, weight_decay: see `Banded.expected_error`.
        relation: the neighboring relation of target_epsilon.

    Returns:
        One entry for each number of bands, batch size and epochs, the smallest `scaled_error`
        first. If 1 is among the numbers of bands, the first entry is never worse than independent
        noise with Poisson sampling. As in training, an incomplete last round is charged whole.

    Raises:
        ValueError: an argument is out of its range, or no noise meets the target.
    """
    sizes = batch_size if isinstance(batch_size, Sequence) else [batch_size]
    lengths = epochs if isinstance(epochs, Sequence) else [epochs]
    positive_int(num_samples=num_samples)
    probability(target_delta=target_delta)
    optional(positive_int, parameters=parameters, max_memory=max_memory)
    if (parameters is None) != (max_memory is None):
        raise ValueError(
            f"parameters={parameters!r} with max_memory={max_memory!r}: the memory of the noise "
            "is computed from the number of parameters; pass both arguments, or neither"
        )
    found = []
    for size, length in product(sizes, lengths):
        positive_int(batch_size=size)
        if size > num_samples:
            raise ValueError(
                f"batch_size={size!r}: expected at most num_samples={num_samples!r}; pass a "
                "smaller batch"
            )
        rate = size / num_samples
        steps = epochs_to_steps(epochs=length, sample_rate=1 / -(-num_samples // size))
        most = min(steps, num_samples // size)
        errors: list[float] = []
        for count in [1 << i for i in range(most.bit_length())] if bands is None else bands:
            noise = Banded.optimized(
                bands=count, steps=steps, momentum=momentum, weight_decay=weight_decay
            )
            if max_memory is not None and noise.state_bytes(parameters or 0) > max_memory:
                continue
            part = noise.rate_of_part(rate)
            noise_multiplier = noise_multiplier_for(
                lambda value, part=part: PoissonGaussian(  # type: ignore[misc]
                    noise_multiplier=value, sample_rate=part, relation=relation
                ),
                -(-steps // count),
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                accountant=accountant,
            )
            if count > 1 and noise_multiplier * noise.noise_scale() >= MOST_NOISE:
                continue
            per_unit = noise.expected_error(
                steps=steps, momentum=momentum, weight_decay=weight_decay
            )
            run = BandsOfRun(
                noise=noise,
                batch_size=size,
                epochs=length,
                steps=steps,
                noise_multiplier=noise_multiplier,
                expected_error=noise_multiplier * per_unit / size,
            )
            found.append(run)
            errors.append(run.expected_error)
            # Stop: above the number of bands with the smallest error, errors only increase.
            if bands is None and len(errors) > 2 and errors[-3] < errors[-2] < errors[-1]:
                break
    if not found:
        raise ValueError(
            f"bands={bands!r}: noise of so many bands would not be exact, or its tensors need "
            f"more than max_memory={max_memory!r} bytes; pass fewer bands"
        )
    return sorted(found, key=lambda run: run.scaled_error)
