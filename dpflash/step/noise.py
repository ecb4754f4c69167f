"""Noise of a release: adds noise to the sum of each parameter exactly once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpflash.kernels import NoiseStream, add_noise_, grid_of, settle_noise

from ..noise.error import squared_errors
from ..noise.reference import FRACTION_BITS

if TYPE_CHECKING:
    from dpflash.kernels.noise_triton import OpenList

    from ..noise import Banded
    from ..privacy.keys import RunKeys


# Elements per thread for which banded noise allocates scratch memory.
_PART = 1 << 14

Totals: TypeAlias = Mapping[nn.Parameter, Tensor]
Begins: TypeAlias = Mapping[nn.Parameter, int]


class Noise(Protocol):
    """A type of noise: independent or banded. `Charge.admit` chooses the event to charge."""

    def begin(self, step: int, place: int, bound: float, noise_multiplier: float) -> BatchNoise:
        """Return the noise of a release.

        Args:
            step: number of the release, unique among the releases under one key.
            place: number of earlier releases in the block of releases, see `Block`.
            bound: L2 bound of one sample's contribution to the sum.
            noise_multiplier: the noise's standard deviation divided by the bound; 0: no noise.
        """


class RoundedGaussian:
    """Independent Gaussian noise in each release, rounded to the grid of the exact sums.

    Args:
        keys: the keys of the noise.
        trained: the parameters with private gradients.
    """

    def __init__(self, keys: RunKeys, trained: Sequence[nn.Parameter]):
        self._keys = keys
        self._ids = {parameter: number for number, parameter in enumerate(trained)}

    def begin(self, step: int, place: int, bound: float, noise_multiplier: float) -> BatchNoise:
        """See `Noise.begin`."""
        return BatchNoise(
            noise_multiplier, bound, key=self._keys.noise, step=step, parameter_ids=self._ids
        )


class BatchNoise:
    """The noise of one logical batch, added to the sum of each parameter exactly once.

    The noise of an element is a function of the element's index in the unsharded parameter, so it
    does not depend on which rank adds it.

    Args:
        noise_multiplier: the noise's standard deviation divided by the bound; 0 for no noise.
        bound: L2 bound of one sample's contribution; it determines the grid of the noise.
        key: 32 secret bytes.
        step: number of the release, unique among the releases under this key.
        parameter_ids: a unique number for each parameter.
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
        # Compute in float64 and round up, so that the noise is never less than the charged noise.
        std = float(noise_multiplier) * float(bound) if noise_multiplier else 0.0
        self._std = math.nextafter(std, math.inf) if std else 0.0
        self._grid = grid_of(bound) if std else 1.0
        self._key = key
        self._step = step
        self._unsettled: list[OpenList] = []
        self._parameter_ids = parameter_ids
        self._noised: set[nn.Parameter] = set()

    @property
    def std(self) -> float:
        """Standard deviation of the noise of each element of a sum."""
        return self._std

    def is_due(self, parameter: nn.Parameter) -> bool:
        """Return whether noise must still be added to this parameter's sum."""
        is_known = parameter in self._parameter_ids and parameter not in self._noised
        return self._std > 0 and is_known

    @functools.cached_property
    def _first(self) -> NoiseStream:
        return self._stream(self._std, self._grid, self._step, self._unsettled)

    def stream(self, parameter: nn.Parameter, begin: int = 0) -> NoiseStream | None:
        """Return the noise of a sum from element `begin` on; None if it needs no more noise."""
        if not self.is_due(parameter):
            return None
        return self._first.at(self._parameter_ids[parameter], begin)

    def _stream(
        self, std: float, grid: float, step: int, unsettled: list[OpenList]
    ) -> NoiseStream:
        return NoiseStream(
            std=std, grid=grid, key=self._key, step=step, parameter_id=0, unsettled=unsettled
        )

    def streams(self, parameters: Sequence[nn.Parameter]) -> list[NoiseStream] | None:
        """Return the noise of the parameters' sums; None if a sum needs no more noise."""
        streams = [stream for p in parameters if (stream := self.stream(p)) is not None]
        return streams if len(streams) == len(parameters) else None

    def mark_added(self, totals: Totals) -> None:
        """Record that the sums of these parameters contain their noise."""
        if self._unsettled:
            outs = {self._parameter_ids[p]: total for p, total in totals.items()}
            # These sums are in the last entry, or in the last two if a launch summed two dtypes.
            for i in reversed(range(len(self._unsettled))):
                entry = self._unsettled[i]
                ids = [stream.parameter_id for stream in entry.streams]
                if not outs.keys() & set(ids):
                    break
                own = tuple(outs.get(n, out) for n, out in zip(ids, entry.outs, strict=True))
                self._unsettled[i] = entry._replace(outs=own)
        self._noised.update(totals)

    def add_(self, totals: Totals, begins: Begins) -> None:
        """Add the noise that sums over all ranks still lack; an interrupted release adds it again.

        Args:
            totals: the elements of each sum that this rank owns.
            begins: the index of the first of these elements in each parameter.
        """
        due = {p: stream for p in totals if (stream := self.stream(p, begins[p])) is not None}
        add_noise_([totals[p] for p in due], list(due.values()))
        self.settle()

    def complete(self) -> None:
        """Record that the release is complete."""

    def settle(self) -> bool:
        """Write noise values whose rounding GPU kernels left undecided; wait for the GPU once.

        Returns:
            Whether the rounding of some noise was undecided.
        """
        found = settle_noise(self._unsettled)
        # Clear last, so that this method can be called again if a line above raises.
        self._unsettled.clear()
        return found


class _Past(NamedTuple):
    """The noise of one parameter in the block's releases so far, in the elements this rank owns.

    Attributes:
        place: the number of releases in the block so far.
        last: int64, in units of the grid: noise of the last bands - 1 releases, newest first.
    """

    place: int = 0
    last: tuple[Tensor, ...] = ()


class BandedGaussian:
    """Gaussian noise that is correlated over a block of releases, see `dpflash.noise.Banded`.

    Computes the integer noise of `dpflash.noise.reference`. `dpflash.kernels` draws its
    independent Gaussians z. The noise of a block is a function of key, steps and standard
    deviation, so checkpoints do not contain it. The noise of the block's earlier releases is drawn
    again after a resume, or if a parameter was frozen for a while.

    Args:
        mechanism: the banded noise, with at least two bands.
        keys: the keys with which z is drawn.
        trained: the parameters with private gradients.
    """

    def __init__(self, mechanism: Banded, keys: RunKeys, trained: Sequence[nn.Parameter]):
        self._mechanism = mechanism
        self._keys = keys
        self._ids = {parameter: number for number, parameter in enumerate(trained)}
        self._pasts: dict[nn.Parameter, _Past] = {}
        self._block: tuple[bytes, int] | None = None

    def begin(self, step: int, place: int, bound: float, noise_multiplier: float) -> BatchNoise:
        """See `Noise.begin`."""
        key = self._keys.noise
        if self._block != (block := (key, step - place)):
            self._pasts.clear()
            self._block = block
        return BandedNoise(
            noise_multiplier,
            bound,
            key=key,
            step=step,
            parameter_ids=self._ids,
            place=place,
            mechanism=self._mechanism,
            pasts=self._pasts,
        )


class BandedNoise(BatchNoise):
    """The noise of one logical batch, correlated over a block of releases.

    Args:
        noise_multiplier, bound, key, step, parameter_ids: see `BatchNoise`.
        place: number of earlier releases in the block.
        mechanism: holds the coefficients c, which are the bands of the matrix C.
        pasts: the noise of the block so far; `complete` appends the noise of this release.

    Guarantees:
        A noisy sum on the grid is a function of the integers 2^8 C S + z alone. S holds the sums
        of the block in units of the grid. z is a rounded Gaussian in the same unit, whose
        standard deviation is noise_multiplier * |c| * bound or more.
    """

    def __init__(
        self,
        noise_multiplier: float,
        bound: float,
        *,
        key: bytes,
        step: int,
        parameter_ids: dict[nn.Parameter, int],
        place: int,
        mechanism: Banded,
        pasts: dict[nn.Parameter, _Past],
    ):
        super().__init__(noise_multiplier, bound, key=key, step=step, parameter_ids=parameter_ids)
        scale = mechanism.noise_scale()
        self._std_of_z = math.nextafter(self._std * scale, math.inf) if self._std else 0.0
        self._unit_of_z = math.ldexp(self._grid, -FRACTION_BITS)
        self._integers = mechanism.integers
        self._place = place
        self._pasts = pasts
        self._made: dict[nn.Parameter, Tensor] = {}

    @property
    def std(self) -> float:
        """See `BatchNoise.std`. Within a block, it decreases from release to release."""
        if not self._std:
            return 0.0
        norms = _row_norms(self._integers, 1 << self._place.bit_length())
        return self._std_of_z * float(norms[self._place])

    def streams(self, parameters: Sequence[nn.Parameter]) -> None:
        """Return None, since the kernels of the sums can add independent noise only."""

    def add_(self, totals: Totals, begins: Begins) -> None:
        """See `BatchNoise.add_`."""
        due = [p for p in totals if self.is_due(p)]
        first = min((self._past(p).place for p in due), default=self._place)
        for place in range(first, self._place):
            behind = {p: totals[p] for p in due if self._past(p).place == place}
            self._extend(self._values(behind, place, begins))
        missing = {p: totals[p] for p in due if p not in self._made}
        self._made |= self._values(missing, self._place, begins)
        for parameter in due:
            total, y = totals[parameter].view(-1), self._made[parameter].view(-1)
            for part in _parts(total):
                # Round a sum that is not on the grid to the grid, as independent noise does.
                steps = (total[part].double() / self._grid).round_().add_(y[part])
                total[part] = steps.mul_(self._grid)

    def complete(self) -> None:
        """Record that the release is complete. The noise of the next release depends on it.

        If the release is made again after an interruption, it has the same noise.
        """
        made = self._made.items()
        self._extend({p: y for p, y in made if self._past(p).place == self._place})

    def _past(self, parameter: nn.Parameter) -> _Past:
        return self._pasts.get(parameter, _Past())

    def _extend(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        most, extended = len(self._integers) - 1, {}
        for parameter, value in values.items():
            place, last = self._past(parameter)
            extended[parameter] = _Past(place + 1, (value, *last)[:most])
        self._pasts.update(extended)  # in one call, in case of an interruption

    def _values(self, totals: Totals, place: int, begins: Begins) -> dict[nn.Parameter, Tensor]:
        """Return the int64 noise of release `place` of the block, from earlier releases' noise."""
        step = self._step - self._place + place
        found = {p: torch.empty_like(total, dtype=torch.int64) for p, total in totals.items()}
        # Settle the noise of all tensors on a GPU together, to wait for the GPU once.
        groups = [[(p, slice(0, y.numel())) for p, y in found.items() if y.is_cuda]]
        groups += [[(p, part)] for p, y in found.items() if not y.is_cuda for part in _parts(y)]
        for group in groups:
            unsettled: list[OpenList] = []
            first = self._stream(self._std_of_z, self._unit_of_z, step, unsettled)
            streams, drawn = [], []
            for parameter, part in group:
                begin = begins[parameter] + part.start
                streams.append(first.at(self._parameter_ids[parameter], begin))
                y = found[parameter].view(-1)[part]
                drawn.append(torch.zeros_like(y, dtype=torch.float64))
            add_noise_(drawn, streams)
            settle_noise(unsettled)
            for (parameter, part), z in zip(group, drawn, strict=True):
                y = found[parameter].view(-1)[part].copy_(z.div_(self._unit_of_z))
                past = self._past(parameter).last
                for integer, before in zip(self._integers[1:], past, strict=False):
                    y.sub_(before.to(y.device).view(-1)[part], alpha=integer)
                y.add_(1 << (FRACTION_BITS - 1)).bitwise_right_shift_(FRACTION_BITS)
        return found


@functools.lru_cache(maxsize=4)
def _row_norms(integers: tuple[int, ...], rows: int) -> NDArray[np.float64]:
    """Return the norms `[rows]` of the rows of C^-1; C has the bands `integers` times 2^-8."""
    impulse = np.zeros(rows)
    impulse[0] = 1.0
    return np.sqrt(squared_errors(np.array(integers) / (1 << FRACTION_BITS), impulse))


def _parts(tensor: Tensor) -> list[slice]:
    """Split a flat tensor into parts whose scratch memory fits into a CPU's caches."""
    count = tensor.numel()
    size = count if tensor.is_cuda else _PART * torch.get_num_threads()
    return [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]
