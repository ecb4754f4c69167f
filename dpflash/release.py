"""One release: its place in the noise streams, and which parameters have their noise already."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dpflash.kernels import NoiseStream, grid_of, settle_noise

from .sharding import first_element

if TYPE_CHECKING:
    from dpflash.kernels.noise_triton import OpenList


class Release:
    """The noise of one logical batch, for each parameter's clipped sum exactly once.

    An element's noise follows from its address in the whole parameter, so that a worker which
    holds a part of it, or a copy, draws what the others draw for the same elements.

    Args:
        noise_multiplier: standard deviation of the noise over the bound; 0 for none.
        bound: what one sample may move the sum by; it says the grid of the noise.
        key: 32 bytes, secret.
        step: number of the release; no other under the same key has it.
        parameter_ids: number of each parameter; no two have the same.
    """

    def __init__(
        self,
        noise_multiplier: float,
        bound: float,
        key: bytes,
        step: int,
        parameter_ids: dict[nn.Parameter, int],
    ):
        # Rounded up: never less noise than is paid for.
        # In fp64, also where a scheduler gave numpy's narrower numbers.
        std = float(noise_multiplier) * float(bound) if noise_multiplier else 0.0
        self._std = math.nextafter(std, math.inf) if std else 0.0
        self._grid = grid_of(bound) if std else 1.0
        self._key = key
        self._step = step
        self._parameter_ids = parameter_ids
        self._noised: set[nn.Parameter] = set()
        self._unsettled: list[OpenList] = []

    def noise_for(self, parameter: nn.Parameter) -> NoiseStream | None:
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

    def noised(self, parameter: nn.Parameter) -> None:
        """The parameter's sum has its noise from now on."""
        self._noised.add(parameter)

    def holds(self, parameter: nn.Parameter, total: Tensor) -> None:
        """The parameter's sum with its noise is this tensor from now on, whatever was noised."""
        if self._unsettled:
            last = self._unsettled[-1]
            if last.stream.parameter_id == self._parameter_ids[parameter]:
                self._unsettled[-1] = last._replace(out=total)

    def settle(self) -> bool:
        """Write the noise that kernels of a GPU left undecided, which waits for the GPU once.

        Returns:
            Whether there was some.
        """
        found = settle_noise(self._unsettled)
        # Only now: a step that failed here can be tried again.
        self._unsettled.clear()
        return found
