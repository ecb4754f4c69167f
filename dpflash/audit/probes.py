"""Short runs of the engine that measure one quantity each, for the named checks.

With little noise a release shows how much each canary contributed; with the audited noise and few
canaries it shows the noise. `dpflash.audit.checks` tests the measured values. Banded
noise samples the parts of the data in turn; a round over all parts then counts as one release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dpflash.kernels import grid_of

from ..config import PerformanceConfig, PrivacyConfig
from ..noise.error import squared_errors
from .checks import Drawn
from .layers import LayersRun
from .packed import PackedRun
from .releases import NewEngine, Release, Run, as_it_is, mechanism_of, whitened

# Noise multiplier in runs that measure contributions.
LITTLE = 2.0**-8
# (units, sample rate, releases) of runs; number of releases of the run at the audited rate.
_FEW, _MANY, _AUDITED_RELEASES = (32, 1 / 8, 32), (64, 1 / 4, 16), 64
_PACKED, _ENTRIES = (32, 1 / 4, 16), 2
_DRAWN, _LEAST_UNITS, _MOST_UNITS = 8.0, 64, 1 << 14
# Values of grad_sample_mode whose sums are exact, unless exact=False.
_EXACT_MODES = ("auto", "instantiate")
_NOISE_RELEASES, _NOISE_WIDTH = 16, 2048
# Canaries per logical batch: a power of two, so that sums divided by it are still on a grid.
_NOISE_CANARIES = 64
# Logical batches drawn by the sampler alone, for each release at the audited rate.
_DRAWS = 100
# (units, sample rate, releases); three in four of these releases sample no unit.
_EMPTY = (4, 1 / 16, 32)


@dataclass(frozen=True)
class Contributions:
    """The contribution of every unit to each release, measured with little noise."""

    # `[T, N]`, or `[T, 2 N]` with two tables: each unit's part of the release, divided by the
    # contribution of one sampled unit. Up to noise, it is 1 if the unit was sampled, else 0
    units: NDArray[np.float64]
    # `[T]`: sum in a parameter that all units share, divided by one contribution; nan without one
    background: NDArray[np.float64]
    drawn: NDArray[np.int64]  # how often the loader sampled each unit; has the shape of `units`
    std: float  # standard deviation of the noise in `units`
    background_std: float  # standard deviation of the noise in `background`
    rate: float  # the claimed sample rate


@dataclass(frozen=True)
class Noise:
    """The noise of some releases."""

    # `[T, tables, n]`: the noise of each table in each release, divided by its claimed standard
    # deviation, see `whitened`
    vectors: NDArray[np.float64]
    alone: NDArray[np.float64]  # `[T, tables, m]`: the same at elements without a contribution
    # `[T, tables, n]`: released sums divided by the grid's spacing, which must be whole numbers if
    # sums are exact; None if sums are not claimed to be exact
    multiples: NDArray[np.float64] | None
    std_in_steps: float  # the claimed standard deviation divided by the grid's spacing


@dataclass(frozen=True)
class Probes:
    """The readings that the named checks test."""

    inclusions: Contributions  # at the audited sample rate
    sampler: Drawn  # draws of the sampler alone, at the audited sample rate
    # of few units, so that most rows are padding and some batches are empty
    padding: Contributions
    divisor: Contributions  # with a background sum of many units
    packed: Contributions  # documents that share rows
    users: Contributions  # users of two entries each
    layers: Contributions  # to the weights and biases of a linear layer and a norm
    noise: Noise  # at the audited noise multiplier
    # `[T, tables, n]`: noise of releases without samples, over its claimed standard deviation
    empty: NDArray[np.float64]


@dataclass(frozen=True)
class Prober:
    """Makes short runs with new engines, without isolation tests, which release nothing."""

    new_engine: NewEngine
    privacy: PrivacyConfig
    performance: PerformanceConfig
    device: str = "cpu"

    def read(self) -> Probes:
        """Run all probes."""
        rate = mechanism_of(self.privacy).rate_of_part(self.privacy.sample_rate or 1.0)
        units = int(min(_MOST_UNITS, max(_LEAST_UNITS, _DRAWN / rate)))
        return Probes(
            inclusions=self.contributions(units, rate, _AUDITED_RELEASES),
            sampler=self.sampler(units, rate, _DRAWS * _AUDITED_RELEASES),
            padding=self.contributions(*_FEW),
            divisor=self.contributions(*_MANY),
            packed=self.packed(),
            users=self.users(),
            layers=self.layers(),
            noise=self.noise(),
            empty=self.empty(),
        )

    def contributions(
        self,
        units: int,
        rate: float,
        releases: int,
        *,
        prepare: Callable[[nn.Module], object] = as_it_is,
    ) -> Contributions:
        """Measure releases of `units` units with little noise; all units are in the data.

        If `privacy.unit_of` is set, it contains the unit of each entry.
        """
        of = self.privacy.unit_of
        numbers = None if of is None else np.array(of)
        asked = self._asked(rate, releases, noise_multiplier=LITTLE)
        return _contributions(
            self._run(asked, units, numbers=numbers, background=True, prepare=prepare), asked
        )

    def sampler(self, units: int, rate: float, draws: int) -> Drawn:
        """Count units in logical batches of the private loader's sampler, without training."""
        bands = mechanism_of(self.privacy).bands
        run = self._run(self._asked(rate, 1), units)
        return Drawn.of(run.draws(draws), bands)

    def layers(self) -> Contributions:
        """Measure releases of canaries whose gradients are in weights and biases of layers."""
        units, rate, releases = _FEW
        asked = self._asked(rate, releases, noise_multiplier=LITTLE)
        return _contributions(self._run(asked, units, kind=LayersRun), asked)

    def users(self) -> Contributions:
        """Measure releases of users with two entries each; a sampled user has both entries."""
        of_users = np.repeat(np.arange(_FEW[0]), _ENTRIES).tolist()
        privacy = replace(self.privacy, unit_of=of_users, examples_per_unit=_ENTRIES)
        return replace(self, privacy=privacy).contributions(*_FEW)

    def packed(self) -> Contributions:
        """Measure releases of packed documents; unit 0 stands for padding, and is never drawn."""
        units, rate, releases = _PACKED
        # These documents do not begin at multiples of 64 tokens, as exact=True requires.
        exact = "auto" if self.privacy.exact is True else self.privacy.exact
        asked = self._asked(rate, releases, noise_multiplier=LITTLE, exact=exact)
        run = self._run(asked, units, kind=PackedRun, numbers=np.arange(1, units))
        return _contributions(run, asked)

    def noise(self) -> Noise:
        """Measure the noise of releases of few canaries, whose contributions are subtracted."""
        mode = self.performance.grad_sample_mode
        exact = self.privacy.exact is not False and mode in _EXACT_MODES
        asked = self._asked(1.0, _NOISE_RELEASES, exact=exact)
        canaries = _NOISE_CANARIES * mechanism_of(asked).bands
        run = self._run(asked, _NOISE_WIDTH + canaries, numbers=np.arange(canaries))
        found = list(run.releases())
        vectors, grid = _noise_of(found, run, asked), grid_of(asked.bound)
        return Noise(
            vectors=vectors,
            alone=vectors[..., canaries:],
            multiples=np.stack([release.sums / grid for release in found]) if exact else None,
            std_in_steps=(asked.noise_multiplier or 0.0) * asked.bound / grid,
        )

    def empty(self) -> NDArray[np.float64]:
        """Measure the noise of releases that sampled no unit."""
        units, rate, releases = _EMPTY
        asked = self._asked(rate, releases)
        run = self._run(asked, _NOISE_WIDTH, numbers=np.arange(units))
        found = list(run.releases())
        is_empty = [not release.drawn.any() for release in found]
        return _noise_of(found, run, asked)[is_empty]

    def _asked(self, rate: float, releases: int, **changes: Any) -> PrivacyConfig:
        bands = mechanism_of(self.privacy).bands
        own = {"sample_rate": rate / bands, "steps_per_epoch": releases * bands}
        return replace(self.privacy, **(own | {"verify_first_batch": False} | changes))

    def _run(
        self, asked: PrivacyConfig, canaries: int, *, kind: type[Run] = Run, **options: Any
    ) -> Run:
        options |= {"canaries": canaries, "device": self.device}
        return kind(self.new_engine(), asked, self.performance, **options)


def _noise_of(found: list[Release], run: Run, asked: PrivacyConfig) -> NDArray[np.float64]:
    """Return the noise of releases, `[T, tables, n]`, over its claimed standard deviation."""
    noise = [release.sums - release.drawn * run.bounds[:, None] for release in found]
    assert asked.noise_multiplier is not None
    std = asked.noise_multiplier * asked.bound
    return whitened(np.stack(noise), mechanism_of(asked)) / std


def _contributions(run: Run, asked: PrivacyConfig) -> Contributions:
    found = list(run.releases())
    sums = np.stack([release.sums for release in found])
    tables = sums.shape[1]
    unit, common = run.bounds[:tables], float(run.bounds[-1])
    # All entries of a sampled user are in the logical batch.
    drawn = np.stack([release.drawn for release in found]) // (asked.examples_per_unit or 1)
    assert asked.sample_rate is not None
    mechanism = mechanism_of(asked)
    # The noise of the last release has the largest standard deviation.
    impulse, coefficients = np.eye(1, len(found))[0], np.array(mechanism.coefficients)
    growth = float(squared_errors(coefficients, impulse)[-1]) ** 0.5
    little = LITTLE * asked.bound * mechanism.noise_scale() * growth
    return Contributions(
        units=(sums / unit[:, None]).reshape(len(found), -1),
        background=np.array([release.background for release in found]) / common,
        drawn=np.tile(drawn, tables),
        std=little / float(unit.min()),
        background_std=little / common,
        rate=mechanism.rate_of_part(asked.sample_rate),
    )
