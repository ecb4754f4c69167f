"""ClippedSums: the sums of the clipped gradients of one logical batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dpflash.kernels import NoiseStream, add_noise_, clip_reduce_all, exact_slots, grid_of
from dpflash.kernels.layout import in_dtypes

from ..distributed.collectives import BUNDLE_BYTES
from ..distributed.fsdp import is_sharded
from ..distributed.mesh import Ranks
from ..distributed.slices import Slices
from ..refusal import PrivateRefusal
from .noise import BatchNoise


class _OneSample(NamedTuple):
    """Holds the gradient and factor of one sample instead of their product, to save memory."""

    grad: Tensor  # [1, ...]
    factors: Tensor  # [1]


class ClippedSums(Mapping[nn.Parameter, Tensor]):
    """Sums of the clipped gradients of one logical batch, over its microbatches.

    Only clipping gates add to these sums, and only these sums are released. The mapping holds the
    clipped sum of each parameter over the samples of this rank. If a parameter is sharded over the
    ranks (scattered), it holds this rank's rows of the sum over all samples; under context
    parallelism, this rank's slice, see `Slices`. Exact sums are float64; others at least float32.

    Args:
        trained: the parameters with private gradients.
        names: dotted name of each parameter.
        ranks: this process and its peers.
        exact: whether sums of per-sample gradients are rounded to multiples of the grid.

    Attributes:
        rounded: names of the parameters with a rounded sum.
        bound: L2 bound of one sample in this logical batch; nan before its first backward.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        *,
        names: dict[nn.Parameter, str],
        ranks: Ranks | None = None,
        exact: bool = True,
    ):
        self.trained = tuple(trained)
        self.names = names
        self.ranks = ranks or Ranks()
        self.slices = Slices(self.ranks)
        self.is_sharded = any(is_sharded(p) for p in trained)
        self.exact = exact
        self.rounded: set[str] = set()
        self._ids = {parameter: number for number, parameter in enumerate(self.trained)}
        # Reduced as if it were the sum of a parameter, see `carrier`.
        self._has_failed = nn.Parameter(torch.empty(0))
        self.clear()

    def begin(self, bound: float) -> None:
        """Begin a logical batch with its first backward, which fixes the bound."""
        self.bound = bound

    def leave_ranks(self) -> None:
        """Continue as a single process."""
        self.ranks = Ranks()
        self._reduced.clear()
        self.slices = Slices(self.ranks)

    def clear(self) -> None:
        """Drop the sums; the next backward begins a new logical batch."""
        self._sums: dict[nn.Parameter, Tensor | _OneSample] = {}
        self._waiting: dict[nn.Parameter, Tensor] = {}
        self._attempt = 0
        self._reduced: dict[nn.Parameter, Tensor] = {}
        self.bound = math.nan

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        held = self._sums[parameter]
        if isinstance(held, Tensor):
            return held
        return clip_reduce_all([held.grad], held.factors, grid=self.grid)[0]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks, and parameters are not sharded."""
        return self.ranks.everyone is None and not self.is_sharded

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Return whether this parameter has a private gradient."""
        return parameter in self._ids

    @property
    def has_begun(self) -> bool:
        """Whether a backward of this logical batch has begun."""
        return not math.isnan(self.bound)

    @property
    def grid(self) -> float | None:
        """Exact sums are multiples of this number, the grid; None if sums are rounded."""
        return grid_of(self.bound) if self.exact and math.isfinite(self.bound) else None

    def refuse_inexact(self, rows: int) -> None:
        """Refuse a microbatch whose sums float64 might not hold exactly.

        Raises:
            PrivateRefusal: there are too many samples; the message says how many are allowed.
        """
        # Batches of the private loader were checked earlier; other batches may have any size.
        if self.grid is None:
            return
        most = exact_slots(self.grid, self.bound) // self.ranks.data_size
        if rows > most:
            raise PrivateRefusal(
                f"a batch has more than {most} samples, the limit for exact sums in float64; use "
                "smaller batches, or make_private(..., exact=False)",
                rows=rows,
            ) from None

    def take_noise(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Return whether the kernel that writes these exact, complete sums may add their noise."""
        return self.is_alone and self.grid is not None and self._sums.keys().isdisjoint(parameters)

    def add_clipped(
        self,
        parameters: Sequence[nn.Parameter],
        grads: Sequence[Tensor],
        factors: Tensor,
        noise: Sequence[NoiseStream] | None = None,
    ) -> None:
        """Multiply per-sample gradients `[B, ...]` by their clipping factors, and add them up.

        Args:
            parameters: the parameters of the sums.
            grads: `[B, *parameter.shape]` for each parameter.
            factors: `[B]`, the clipping factors.
            noise: noise of each parameter, added in the same kernel; only if `take_noise`.
        """
        held = [(p, g, self._sum_to_extend(p)) for p, g in zip(parameters, grads, strict=True)]
        kept = [(p, g, total) for p, g, total in held if total is not None]
        if kept:
            _, theirs, into = zip(*kept, strict=True)
            clip_reduce_all(theirs, factors, grid=self.grid, into=into)
        new = {p: g for p, g, total in held if total is None}
        for parameter in new:
            self._note_rounding(parameter)
        if len(factors) == 1 and self.ranks.context is not None:
            # Nothing else references these gradients: they are slices that this rank received.
            first = [p for p in new if p not in self._sums]
            self._sums.update({p: _OneSample(new.pop(p), factors) for p in first})
        if new:
            totals = clip_reduce_all(list(new.values()), factors, grid=self.grid, noise=noise)
            for parameter, total in zip(new, totals, strict=True):
                self._add(parameter, total)
            if noise is not None:
                self._narrow(list(new))

    def add(
        self,
        parameters: Sequence[nn.Parameter],
        totals: Iterable[Tensor],
        *,
        is_exact: bool = True,
    ) -> None:
        """Add a microbatch's clipped sums.

        Args:
            parameters: the parameters of the sums.
            totals: the sum of each parameter; an iterator is read one sum at a time.
            is_exact: whether the sums are multiples of the grid, if there is a grid.
        """
        for parameter, total in zip(parameters, totals, strict=True):
            self._note_rounding(parameter, is_exact=is_exact)
            self._add(parameter, total)

    def add_zero(self, parameter: nn.Parameter) -> None:
        """Add zeros for a sharded parameter without a gradient: all ranks must exchange a sum."""
        if self.slices.is_scattered(parameter):
            self._add(parameter, torch.zeros(parameter.shape, device=parameter.device))

    def exchange(self) -> None:
        """Add the waiting sums of scattered parameters over the ranks; keep this rank's rows."""
        # All ranks add in one dtype, even if the dtypes of their own sums differ.
        wide = {p: total.double() for p, total in self._waiting.items()}
        self._waiting = {}
        if not wide:
            return
        ids = [self._ids[p] for p in wide]
        for parameter, own in self.slices.scattered(wide, ids).items():
            held = self.get(parameter)
            self._sums[parameter] = own if held is None else held + own

    def add_noise(self, parameters: Sequence[nn.Parameter], noise: Sequence[NoiseStream]) -> None:
        """Add noise to complete sums."""
        totals = add_noise_([self[p].contiguous() for p in parameters], noise)
        self._sums.update(zip(parameters, totals, strict=True))
        self._narrow(parameters)

    def carrier(self, parameters: Sequence[nn.Parameter]) -> Callable[[bool], bool] | None:
        """Return a function that reduces the first sums and tells all ranks if rank 0 failed.

        The reduced sums are the first bundle of parameters of `with_noise`. Returns None if the
        exchange of this bundle does not reach all ranks.
        """
        if self.is_sharded or not self.ranks.data_may_carry(parameters):
            return None

        def carry(failed: bool) -> bool:
            sums = {p: self._wide(p) for p in next(self.slices.bundled(parameters))}
            # One element for each rank.
            flag = torch.full((self.ranks.data_size,), failed, dtype=torch.float64)
            sums[self._has_failed] = flag.to(parameters[0].device)
            self._reduced = self.slices.reduced(sums, None)
            return bool(self._reduced.pop(self._has_failed))

        return carry

    def with_noise(
        self, parameters: Sequence[nn.Parameter], noise: BatchNoise, divisor: float
    ) -> Iterator[tuple[list[nn.Parameter], list[Tensor]]]:
        """Yield (parameters, noisy sums over all ranks / divisor); a missing sum counts as 0.

        With several ranks, yields a group of parameters (bundle) at a time, to save memory; with
        one rank, all parameters at once. The tensors are new.
        """
        self._attempt += 1
        if self._attempt > 1 and not self.is_alone:
            # If only one rank repeated a release, the ranks would exchange different bundles.
            self.ranks.agree("an interrupted release", {"attempt": self._attempt})
        bundles = [list(parameters)] if self.is_alone else self.slices.bundled(parameters)
        for number, theirs in enumerate(bundles):
            yield theirs, self.slices.released(self._noisy_means(theirs, number, noise, divisor))

    def _noisy_means(
        self, parameters: Sequence[nn.Parameter], number: int, noise: BatchNoise, divisor: float
    ) -> dict[nn.Parameter, Tensor]:
        """Return this rank's elements of bundle `number` of the release."""
        totals, self._reduced = self._reduced, {}
        # Noise is added in place: a release that is made again reduces its sums again.
        if not totals or self._attempt > 1:
            # Ranks have agreed on the release before the first bundle.
            names = [self._ids[p] for p in parameters] if number else None
            totals = self.slices.reduced({p: self._wide(p) for p in parameters}, names)
        for parameter, total in totals.items():
            held = self._sums.get(parameter)
            # If the release is interrupted, it is made again from the sums without noise.
            if isinstance(held, Tensor) and total.data_ptr() == held.data_ptr():
                totals[parameter] = total.clone() if noise.is_due(parameter) else total
        noise.add_(totals, {p: self.slices.owned(p).start for p in totals})
        narrow = in_dtypes(totals.values(), [wide_dtype(p) for p in totals])
        means = torch._foreach_div(narrow, divisor) if narrow else ()
        return dict(zip(totals, means, strict=True))

    def _wide(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's part of a sum, or zeros, in the dtype in which ranks add."""
        # Several ranks add in float64: only a single rank's sums may have their noise already.
        dtype = wide_dtype(parameter) if self.is_alone else torch.float64
        held = self.get(parameter)
        if held is None:
            cut = self.slices.held(parameter)
            return torch.zeros(cut.stop - cut.start, dtype=dtype, device=parameter.device)
        dtype = max(dtype, held.dtype, key=lambda held: held.itemsize)
        return held.to(dtype, memory_format=torch.contiguous_format)

    def _sum_to_extend(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the exact sum of earlier microbatches that a kernel may add to, or None."""
        held = self.get(parameter)
        if held is None or self.slices.is_scattered(parameter):
            return None
        self._sums[parameter] = held
        return held if self.grid is not None and held.dtype == torch.float64 else None

    def _note_rounding(self, parameter: nn.Parameter, *, is_exact: bool = True) -> None:
        if self.grid is None or not is_exact:
            self.rounded.add(self.names[parameter])

    def _add(self, parameter: nn.Parameter, total: Tensor) -> None:
        is_scattered = self.slices.is_scattered(parameter)
        held = self._waiting.get(parameter) if is_scattered else self.get(parameter)
        total = total if held is None or total is held else held + total
        (self._waiting if is_scattered else self._sums)[parameter] = total
        # Counted as float64 on every rank, so that all ranks cut the same bundles.
        if 8 * sum(x.numel() for x in self._waiting.values()) >= BUNDLE_BYTES:
            self.exchange()

    def _narrow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Convert sums that contain their noise to the dtypes of their release."""
        totals = in_dtypes([self[p] for p in parameters], [wide_dtype(p) for p in parameters])
        self._sums.update(zip(parameters, totals, strict=True))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for a float64 tensor, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
