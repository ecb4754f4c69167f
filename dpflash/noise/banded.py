"""`Banded`: noise that is correlated over b steps, as a frozen value."""

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
_BYTES = 8  # of an element of the noise that training keeps


@dataclass(frozen=True, kw_only=True, repr=False)
class Banded:
    r"""Banded Toeplitz noise (BandMF): a release is a clipped sum s_t and y_t = (C^-1 z)_t.

    C is lower triangular with c_i at (t, t - i) for i < b, and z is independent Gaussian noise of
    standard deviation noise_multiplier * noise_scale() * max_grad_norm. The releases are
    C^-1 (C s + z), so C s + z, one Gaussian mechanism, is what has to be private. Noise of one
    step is partly taken back in the b - 1 next ones: sums over steps, which is what parameters
    are, have less of it, for the price of a larger z.

    Args:
        bands: b >= 1. With 1 it is independent noise.
        coefficients: c_0 = 1 >= c_1 >= ... >= c_(b-1) >= 0, each rounded to a multiple of 2^-8.
            Left out, the first b of the square root of the prefix sums, which fit about b steps;
            `optimized` has better ones for longer runs.

    Raises:
        ValueError: an argument is out of its range.

    Guarantees:
        Contributions of one unit at least b steps apart meet disjoint rows of C, so sensitivities
        are exact for any direction and sign of them. Zeros of the polynomial of falling
        coefficients are not inside the unit circle, so y does not grow exponentially.

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
                f"coefficients: {len(given)} with bands={self.bands!r}; expected one for each "
                "band, 1 first; pass as many, or leave them out"
            )
        unit = 1 << FRACTION_BITS
        rounded = tuple(round(value * unit) / unit for value in given)
        falls = all(x >= y for x, y in zip(rounded, (*rounded[1:], 0.0), strict=True))
        if rounded[0] != 1 or not falls:
            raise ValueError(
                f"coefficients={tuple(map(float, given[:_SHOWN]))!r}...: expected 1 first, then "
                "none above the one before it and none below 0; divide them by the first, or use "
                "Banded.optimized(...)"
            )
        object.__setattr__(self, "coefficients", rounded)

    @classmethod
    def optimized(
        cls, *, bands: int, steps: int, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> Banded:
        """The noise of b bands with the least `expected_error`; equal calls compute it once.

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
        """2^8 times the coefficients."""
        return tuple(int(c * (1 << FRACTION_BITS)) for c in self.coefficients)

    def sensitivity(
        self, *, steps: int, participations: int | None = None, separation: int | None = None
    ) -> float:
        """The most that one unit changes C s, in L2, over the bound of one contribution.

        Args:
            steps: T >= 1.
            participations: the most contributions of a unit; None for as many as fit.
            separation: the least number of steps from one to the next, at least b; None for b.

        Returns:
            The root of the sum of the first columns' squared norms, 0, separation, 2 separation
            and so on, of which the last may be cut by T: exact, rounded up to a float. It is
            attained by contributions of the full bound. Without sampling, the releases are one
            Gaussian mechanism of noise_multiplier * noise_scale() / sensitivity.

        Raises:
            ValueError: contributions may be closer than b steps, or an argument is no number >= 1.
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
        whole = min(count, max(0, steps - self.bands) // separation)  # whose columns end before T
        rest = (self._squared_norm(steps - i * separation) for i in range(whole, count))
        return _root_up(whole * self._squared_norm(self.bands) + sum(rest))

    def noise_scale(self) -> float:
        """Standard deviation of z over noise_multiplier and bound: the norm of c, a column of C.

        It is rounded up to a float.
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
        """What all steps cost under cyclic Poisson sampling.

        The dataset is in b parts. Step t draws from part t mod b, each sample with probability
        b * sample_rate, so the expected batch is that of `sample_rate` on the whole dataset.

        Args:
            noise_multiplier: >= 0.
            sample_rate: expected batch size over the size of the dataset, at most 1 / b.
            steps: T >= 1.
            relation: of the events.

        Returns:
            ceil(T / b) Poisson-subsampled Gaussians at rate b * sample_rate. If b does not divide
            T, the last one has more noise: its column of C is cut.

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
        """Probability of a sample in the step that draws from its part: b * sample_rate."""
        rate = self.bands * sample_rate
        if rate > 1 and not math.isclose(rate, 1, rel_tol=1e-9):
            raise ValueError(
                f"sample_rate={sample_rate!r}: bands={self.bands!r} times it is above 1, so a "
                "part of the dataset is smaller than a batch; pass fewer bands or smaller batches"
            )
        return min(1.0, rate)

    def state_bytes(self, elements: int) -> int:
        """Bytes of the b - 1 tensors of noise that training keeps, given their elements."""
        return (self.bands - 1) * _BYTES * elements

    def expected_error(
        self,
        *,
        steps: int,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        statistic: str = "rms",
    ) -> float:
        r"""Error of the iterates by the noise, for noise_multiplier 1 and bound 1.

        Without momentum and weight decay, iterates are prefix sums of the releases. In general
        iterate t is the sum over i <= t of a_(t-i) times release i, with a_0 = 1 and the others
        the coefficients of 1 / ((1 - momentum x) (1 - (1 - weight_decay) x)). Let B = A C^-1, so
        that A (s + y) = A s + B z.

        Args:
            steps: T >= 1, the number of iterates.
            momentum: in [0, 1), as in torch.optim.SGD without dampening.
            weight_decay: the share of a parameter that a step takes away, learning rate times
                decoupled weight decay, in [0, 1).
            statistic: "rms" over all iterates, or "max", that of the last one.

        Returns:
            The standard deviation of an element of the iterates, the norm of c times
            sqrt(mean over t of sum over i <= t of B_i^2), or of the last one. Times
            noise_multiplier, bound and learning rate it is in units of the parameters (over the
            expected batch size for mean gradients). The square of "rms" is `toeplitz.loss` of
            jax_privacy.
        """
        _check_workload(steps, momentum, weight_decay)
        one_of(statistic=(statistic, ("rms", "max")))
        responses = error.workload(int(steps), momentum, weight_decay)
        errors = error.squared_errors(np.array(self.coefficients), responses)
        of_z = errors.mean() if statistic == "rms" else errors[-1]
        return self.noise_scale() * math.sqrt(of_z)

    def plot(self, path: str | os.PathLike[str] | None = None, *, steps: int) -> Path:
        """Draws the coefficients of C and C^-1, and the error of prefix sums over the steps.

        Args:
            path: of the PNG; None, ``Banded_b<bands>_T<steps>.png`` in the current folder.
            steps: T.

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
        """Squared norm of a column of C with this many rows left, in units of 2^-16."""
        return sum(k * k for k in self.integers[:rows])


def _check_workload(steps: int, momentum: float, weight_decay: float) -> None:
    positive_int(steps=steps)
    finite(momentum=momentum, weight_decay=weight_decay)
    for name, value in {"momentum": momentum, "weight_decay": weight_decay}.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name}={value!r}: expected 0 <= {name} < 1; pass such a number")


def _root_up(square: int) -> float:
    """The least float of at least sqrt(square) / 2^8."""
    exact = Fraction(square, 1 << 2 * FRACTION_BITS)
    root = math.sqrt(exact)
    while Fraction(root) ** 2 < exact:
        root = math.nextafter(root, math.inf)
    while root and Fraction(below := math.nextafter(root, 0.0)) ** 2 >= exact:
        root = below
    return root
