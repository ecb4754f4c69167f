"""`Banded`: an immutable description of noise that is correlated over b steps."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from dpflash.accounting import Composed, Event, PoissonGaussian, SelfComposed
from dpflash.accounting.events import ADD_REMOVE

from .._validate import finite, non_negative, one_of, optional, positive_int
from . import error
from .reference import FRACTION_BITS

_SHOWN = 4
_BYTES = 8  # bytes per element of the noise that training stores


@dataclass(frozen=True, kw_only=True, repr=False)
class Banded:
    r"""Banded Toeplitz noise (BandMF): a release is a clipped sum s_t plus y_t = (C^-1 z)_t.

    C is a lower triangular matrix over the steps with entry c_i at row t, column t - i, for i < b.
    z is independent Gaussian noise of standard deviation noise_multiplier * noise_scale() *
    max_grad_norm. The releases are C^-1 (C s + z), so they are private if C s + z, one Gaussian
    mechanism, is private. Part of a step's noise is subtracted again in the next b - 1 steps.
    Parameters are sums over steps, so less noise is left in the parameters, although z is larger.

    Args:
        bands: b >= 1. With b = 1 the noise is independent.
        coefficients: c_0 = 1 >= c_1 >= ... >= c_(b-1) >= 0, each rounded to a multiple of 2^-8.
            The default is the first b coefficients of the square root of the prefix sums, which
            suits about b steps. `optimized` finds better coefficients for longer runs.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        Contributions of one unit that are at least b steps apart affect disjoint rows of C, so
        sensitivities are exact for any direction and sign of the contributions. The coefficients
        do not increase, so the polynomial of c has no zeros inside the unit circle. So y does not
        grow exponentially.

    Source:
        Choquette-Choo et al. 2023 (arXiv 2306.08153); Toeplitz: McKenna 2024 (arXiv 2405.15913),
        Kalinin and Lampert 2024 (arXiv 2405.13763).
    """

    bands: int
    coefficients: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        positive_int(bands=self.bands)
        given = tuple(self.coefficients) or tuple(error.square_root(self.bands).tolist())
        finite(**{f"coefficients[{i}]": value for i, value in enumerate(given)})
        if len(given) != self.bands:
            raise ValueError(
                f"coefficients: got {len(given)} with bands={self.bands!r}; expected one for each "
                "band, the first equal to 1; pass one for each band, or leave coefficients out"
            )
        unit = 1 << FRACTION_BITS
        rounded = tuple(round(value * unit) / unit for value in given)
        falls = all(x >= y for x, y in zip(rounded, (*rounded[1:], 0.0), strict=True))
        if rounded[0] != 1 or not falls:
            raise ValueError(
                f"coefficients={tuple(map(float, given[:_SHOWN]))!r}...: expected 1 first, "
                "none above the coefficient before it, and none below 0; divide all coefficients "
                "by the first, or use Banded.optimized(...)"
            )
        object.__setattr__(self, "coefficients", rounded)

    @classmethod
    def optimized(
        cls, *, bands: int, steps: int, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> Banded:
        """Find the noise of b bands with the least `expected_error`. Results are cached.

        Args:
            bands: b, at most `steps`.
            steps, momentum, weight_decay: see `expected_error`.
        """
        positive_int(bands=bands)
        _check_workload(steps, momentum, weight_decay)
        if bands > steps:
            raise ValueError(
                f"bands={bands!r}: expected at most steps={steps!r}; pass fewer bands"
            )
        found = error.optimized(int(bands), int(steps), float(momentum), float(weight_decay))
        return cls(bands=bands, coefficients=found)

    @property
    def integers(self) -> tuple[int, ...]:
        """The coefficients times 2^8, which are integers."""
        return tuple(int(c * (1 << FRACTION_BITS)) for c in self.coefficients)

    def sensitivity(
        self, *, steps: int, participations: int | None = None, separation: int | None = None
    ) -> float:
        """Compute the largest L2 change of C s by one unit, divided by one contribution's bound.

        Args:
            steps: T >= 1.
            participations: the largest number of contributions of a unit; None for no limit.
            separation: the smallest number of steps between two contributions, >= b; None for b.

        Returns:
            The root of the sum of the squared norms of C's columns 0, separation, 2 separation,
            ..., one for each contribution; the last column ends at T. The exact value is rounded
            up to a float. Contributions of the full bound attain it. Without sampling, releases
            are one Gaussian mechanism, with noise multiplier noise_multiplier * noise_scale() /
            sensitivity.

        Raises:
            ValueError: separation is below b, or an argument is not positive.
        """
        separation = self.bands if separation is None else separation
        positive_int(steps=steps, separation=separation)
        optional(positive_int, participations=participations)
        if separation < self.bands:
            raise ValueError(
                f"separation={separation!r}: expected at least bands={self.bands!r}, since closer "
                "contributions add up; pass fewer bands, or a sampler that keeps them apart"
            )
        count = -(-steps // separation)
        count = count if participations is None else min(count, participations)
        whole = min(count, max(0, steps - self.bands) // separation)  # columns that end before T
        rest = (self._squared_norm(steps - i * separation) for i in range(whole, count))
        return _root_up(whole * self._squared_norm(self.bands) + sum(rest))

    def noise_scale(self) -> float:
        """Return the norm of C's columns, rounded up to a float.

        It is the standard deviation of z divided by noise_multiplier and max_grad_norm.
        """
        return _root_up(self._squared_norm(self.bands))

    def event(
        self,
        *,
        noise_multiplier: float,
        sample_rate: float,
        steps: int,
        relation: str = ADD_REMOVE,
    ) -> Event:
        """Return the privacy event of all steps under cyclic Poisson sampling.

        The dataset is divided into b parts. Step t draws each sample of part t mod b with
        probability b * sample_rate. The expected batch size is sample_rate * dataset size.

        Args:
            noise_multiplier: >= 0, see `noise_scale`.
            sample_rate: expected batch size divided by the size of the dataset, at most 1 / b.
            steps: T >= 1.
            relation: the neighboring relation of the event.

        Returns:
            ceil(T / b) Poisson-subsampled Gaussians at rate b * sample_rate. If b does not divide
            T, the last Gaussian has more noise, because its column of C ends at T.

        Raises:
            ValueError: b * sample_rate is above 1, or an argument is out of its range.

        Source:
            arXiv 2306.08153, Theorem 4 and Algorithm 2.
        """
        positive_int(steps=steps)
        non_negative(noise_multiplier=noise_multiplier)
        step = PoissonGaussian(
            noise_multiplier=noise_multiplier,
            sample_rate=self.rate_of_part(sample_rate),
            relation=relation,
        )
        rounds = -(-steps // self.bands)
        last = steps - (rounds - 1) * self.bands
        if last == self.bands:
            return SelfComposed(event=step, count=rounds, relation=relation)
        cut = Fraction(self._squared_norm(self.bands), self._squared_norm(last))
        final = PoissonGaussian(
            noise_multiplier=noise_multiplier * math.sqrt(cut) * (1 - 1e-15),  # rounded down
            sample_rate=step.sample_rate,
            relation=relation,
        )
        if rounds == 1:
            return final
        full = SelfComposed(event=step, count=rounds - 1, relation=relation)
        return Composed(events=(full, final), relation=relation)

    def rate_of_part(self, sample_rate: float) -> float:
        """Return b * sample_rate, the probability of a sample in a step that samples its part."""
        rate = self.bands * sample_rate
        if rate > 1 and not math.isclose(rate, 1, rel_tol=1e-9):
            raise ValueError(
                f"sample_rate={sample_rate!r}: bands={self.bands!r} times it is above 1, so a "
                "part of the dataset is smaller than a batch; pass fewer bands or smaller batches"
            )
        return min(1.0, rate)

    def state_bytes(self, elements: int) -> int:
        """Return the bytes of the b - 1 tensors of `elements` elements that training stores."""
        return (self.bands - 1) * _BYTES * elements

    def expected_error(
        self,
        *,
        steps: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        statistic: str = "rms",
    ) -> float:
        r"""Compute the noise's standard deviation in the iterates, at noise multiplier 1, bound 1.

        Without momentum and weight decay, iterates are prefix sums of the releases. In general
        iterate t is the sum over i <= t of a_(t-i) times release i, where a_0, a_1, ... are the
        coefficients of 1 / ((1 - momentum x) (1 - (1 - weight_decay) x)).
        Let B = A C^-1 for the matrix A of these coefficients, so that A (s + y) = A s + B z.

        Args:
            steps: T >= 1, the number of iterates.
            momentum: in [0, 1), as in torch.optim.SGD without dampening.
            weight_decay: the fraction by which a step shrinks a parameter, learning rate times
                decoupled weight decay, in [0, 1).
            statistic: "rms" for the root mean square of all iterates, "max" for the last iterate.

        Returns:
            For "rms", the standard deviation of an element of the iterates: the norm of c times
            sqrt(mean over t of sum over i <= t of B_i^2). For "max", of the last iterate alone.
            A parameter's error is this value * noise_multiplier * bound * learning rate (divided
            by the expected batch size for mean gradients). The square of "rms" is `toeplitz.loss`
            of jax_privacy.
        """
        _check_workload(steps, momentum, weight_decay)
        one_of(statistic=(statistic, ("rms", "max")))
        responses = error.workload(int(steps), momentum, weight_decay)
        errors = error.squared_errors(np.array(self.coefficients), responses)
        of_z = errors.mean() if statistic == "rms" else errors[-1]
        return self.noise_scale() * math.sqrt(of_z)

    def plot(self, path: str | os.PathLike[str] | None = None, *, steps: int) -> Path:
        """Plot the coefficients of C and C^-1, and the error of prefix sums over the steps.

        Args:
            path: path of the PNG; None for ``Banded_b<bands>_T<steps>.png`` in this folder.
            steps: T, the number of steps shown.

        Returns:
            The path of the PNG.

        Raises:
            ImportError: matplotlib is missing.
        """
        from .plot import plot

        positive_int(steps=steps)
        target = Path(f"Banded_b{self.bands}_T{steps}.png" if path is None else path)
        plot(np.array(self.coefficients), self.noise_scale(), int(steps), target)
        return target

    def __repr__(self) -> str:
        shown: Sequence[str] = [f"{c:.5g}" for c in self.coefficients]
        if len(shown) > 2 * _SHOWN:
            shown = [*shown[:_SHOWN], "...", shown[-1]]
        comma = "," if self.bands == 1 else ""
        return f"Banded(bands={self.bands}, coefficients=({', '.join(shown)}{comma}))"

    def _squared_norm(self, rows: int) -> int:
        """Return the squared norm of a column's first `rows` entries, in units of 2^-16."""
        return sum(k * k for k in self.integers[:rows])


def _check_workload(steps: int, momentum: float, weight_decay: float) -> None:
    positive_int(steps=steps)
    finite(momentum=momentum, weight_decay=weight_decay)
    for name, value in {"momentum": momentum, "weight_decay": weight_decay}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value!r}: expected 0 <= {name} < 1; pass such a number")


def _root_up(square: int) -> float:
    """Return sqrt(square) / 2^8, rounded up to a float."""
    exact = Fraction(square, 1 << 2 * FRACTION_BITS)
    root = math.sqrt(exact)
    while Fraction(root) ** 2 < exact:
        root = math.nextafter(root, math.inf)
    while root and Fraction(below := math.nextafter(root, 0.0)) ** 2 >= exact:
        root = below
    return root
