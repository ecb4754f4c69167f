"""Noise of a release: which stream each sum gets, once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from dpflash.kernels import NoiseStream, grid_of, settle_noise

from ..distributed.fsdp import first_element

if TYPE_CHECKING:
    from dpflash.kernels.noise_triton import OpenList

    from ..privacy.keys import RunKeys


class Noise(Protocol):
    """A kind of noise. A release with it is charged as `Charge.admit` says."""

    def begin(self, step: int, bound: float, noise_multiplier: float) -> BatchNoise:
        """The noise of a release.

        Args:
            step: number of the release; no other release under the same key has it.
            bound: the most that one sample may change the sum, in L2.
            noise_multiplier: standard deviation of the noise over the bound; 0 for no noise.
        """


class RoundedGaussian:
    """Gaussian noise, rounded to the grid of exact sums, and independent for each release.

    Args:
        keys: of the noise.
        trained: the parameters with private gradients.
    """

    def __init__(self, keys: RunKeys, trained: Sequence[nn.Parameter]):
        self._keys = keys
        self._ids = {parameter: number for number, parameter in enumerate(trained)}

    def begin(self, step: int, bound: float, noise_multiplier: float) -> BatchNoise:
        """See `Noise.begin`."""
        return BatchNoise(
            noise_multiplier, bound, key=self._keys.noise, step=step, parameter_ids=self._ids
        )


class BatchNoise:
    """The noise of one logical batch, added to the sum of each parameter exactly once.

    An element's noise is a function of its address in the whole parameter. A rank that holds a
    part of a parameter, or a copy, draws the other ranks' noise for the same elements.

    Args:
        noise_multiplier: standard deviation of the noise over the bound; 0 for no noise.
        bound: the most that one sample may change the sum; it determines the noise's grid.
        key: 32 secret bytes.
        step: number of the release; no other release under this key has it.
        parameter_ids: a number for each parameter; no two are equal.
    """

    def __init__(
        self,
        noise_multiplier: float,
        bound: float,
        *,
        key: bytes,
        step: int,
        parameter_ids: dict[nn.Parameter, int],
    ):
        # Computed in float64 and rounded up: never less noise than was charged for.
        std = float(noise_multiplier) * float(bound) if noise_multiplier else 0.0
        self._std = math.nextafter(std, math.inf) if std else 0.0
        self._grid = grid_of(bound) if std else 1.0
        self._key = key
        self._step = step
        self._parameter_ids = parameter_ids
        self._noised: set[nn.Parameter] = set()
        self._unsettled: list[OpenList] = []

    def stream(self, parameter: nn.Parameter) -> NoiseStream | None:
        """Noise still to be added to this parameter's sum, or None."""
        if self._std == 0 or parameter in self._noised or parameter not in self._parameter_ids:
            return None
        return NoiseStream(
            std=self._std,
            grid=self._grid,
            key=self._key,
            step=self._step,
            parameter_id=self._parameter_ids[parameter],
            offset=first_element(parameter),
            unsettled=self._unsettled,
        )

    def streams(self, parameters: Sequence[nn.Parameter]) -> list[NoiseStream] | None:
        """Noise still to be added to the sums of all these parameters, or None."""
        found = [self.stream(parameter) for parameter in parameters]
        streams = [stream for stream in found if stream is not None]
        return streams if len(streams) == len(parameters) else None

    def mark_added(self, totals: Mapping[nn.Parameter, Tensor]) -> None:
        """Record that these are the parameters' sums with their noise."""
        if self._unsettled:
            # The last entries may be those of these sums.
            outs = {self._parameter_ids[p]: total for p, total in totals.items()}
            for i in range(max(0, len(self._unsettled) - len(outs)), len(self._unsettled)):
                entry = self._unsettled[i]
                out = outs.get(entry.stream.parameter_id, entry.out)
                self._unsettled[i] = entry._replace(out=out)
        self._noised.update(totals)

    def settle(self) -> bool:
        """Write the noise that GPU kernels left undecided; waits for the GPU once.

        Returns:
            Whether there was any.
        """
        found = settle_noise(self._unsettled)
        # Cleared last: a step that failed above can be tried again.
        self._unsettled.clear()
        return found
