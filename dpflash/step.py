"""PrivateStep: owns one logical batch, from its first microbatch to its release.

    for microbatch in logical_batch:                   # the loader marks the last one
        losses = model(microbatch)                     # [B]
        losses.backward():                             # autograd runs the clipping gates, which
            factors = min(1, C / norms)                #   clip per-sample gradients
            sums[parameter] += sum_i factors_i g_i     # add, add_clipped
            if last microbatch:
                charge the accountant and the ledger   # _charge: before a noisy value exists
                sums[parameter] += N(0, (sigma C)^2)   # BatchNoise
        if last microbatch:                            # release
            charge, all-reduce over the ranks, add noise   # what the gates did not do
            parameter.grad = sums[parameter] / expected_batch_size
    optimizer.step():
        release                                        # if no backward could: a batch of others
        parameter.grad += gradient of public data      # see dpflash.privacy.public_data
        the wrapped optimizer's step

Until the release `.grad` of a private parameter is None; what is done with it afterwards is
post-processing. The gates of the last microbatch charge and add noise where the sum is complete
on this rank: with the private loader, on a single rank. Sums and noise are multiples of one grid
(see `dpflash.kernels.grid_of`), so the order of microbatches and ranks does not change a bit of
the result.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpflash.kernels import (
    NoiseStream,
    clip_reduce,
    exact_slots,
    grid_of,
    refuse_capture,
    settle_noise,
)

from ._validate import finite, noise_fits, positive
from .distributed.collectives import all_reduce_all_
from .distributed.fsdp import as_grad, first_element, is_sharded, local_shape, reduce_to_part
from .distributed.mesh import Ranks
from .packing import Units
from .privacy.budget import BudgetSpent
from .privacy.public_data import PublicGradients
from .refusal import PrivateRefusal
from .sampling.slots import RealRows
from .sampling.tracker import FOREIGN, BatchTracker

if TYPE_CHECKING:
    from dpflash.accounting import Event
    from dpflash.kernels.noise_triton import OpenList

    from .privacy.keys import RunKeys
    from .privacy.spending import Spending
    from .sampling.plan import SamplingPlan

_AGREED = (
    "noise_multiplier",
    "max_grad_norm",
    "expected_batch_size",
    "batch of the private loader",
)
_OPTIONS = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
CAPTURED = "each replay would release again, without charging for it and with the same noise"


class Clipper(Protocol):
    """Clips the gradients of a model. The step reports where logical batches begin and end."""

    def begin_batch(self, samples: int, units: Units | None) -> None:
        """The loader yields a microbatch of so many samples, which are its rows or units."""

    def end_batch(self, *, released: bool) -> None:
        """The logical batch was released, and parameters are about to change, or was dropped."""


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

    def was_added(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Record that `total` is the parameter's sum with its noise."""
        if self._unsettled:
            last = self._unsettled[-1]
            if last.stream.parameter_id == self._parameter_ids[parameter]:
                self._unsettled[-1] = last._replace(out=total)
        self._noised.add(parameter)

    def settle(self) -> bool:
        """Write the noise that GPU kernels left undecided; waits for the GPU once.

        Returns:
            Whether there was any.
        """
        found = settle_noise(self._unsettled)
        # Cleared last: a step that failed above can be tried again.
        self._unsettled.clear()
        return found


class ClippedSums:
    """Sums of the clipped gradients of one logical batch, over its microbatches.

    Only the clipping gates add to `sums`, and only `sums` is released.

    Args:
        trained: the parameters with private gradients.
        names: dotted name of each parameter.
        tracker: follows the microbatches of the training loop.
        ranks: this process and its peers.
        max_grad_norm: bound of one sample's gradient.
        exact: whether sums of per-sample gradients are multiples of the grid.

    Attributes:
        sums: the clipped sum of each parameter, over the samples of this rank. Of a sharded
            parameter: this rank's rows, over the samples of all ranks. Exact sums are float64;
            rounded sums, and sums with noise, are float32 or wider.
        rounded: names of the parameters of which some sum was rounded.
        bound: max_grad_norm of the current logical batch; nan before its first backward.
        releases: how many releases were charged so far; each has its own noise.
        rows: which rows of the current microbatch are samples.
    """

    def __init__(
        self,
        trained: Sequence[nn.Parameter],
        *,
        names: dict[nn.Parameter, str],
        tracker: BatchTracker,
        ranks: Ranks | None = None,
        max_grad_norm: float = math.inf,
        exact: bool = True,
    ):
        self.trained = tuple(trained)
        self.names = names
        self.tracker = tracker
        self.ranks = ranks or Ranks()
        self.is_sharded = any(is_sharded(p) for p in trained)
        self.exact = exact
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.rounded: set[str] = set()
        self.bound = math.nan
        self.releases = 0
        self.rows = RealRows(tracker.real_rows)
        self._max_grad_norm = max_grad_norm
        self._ids = {parameter: number for number, parameter in enumerate(self.trained)}
        self._mixed: list[Tensor] = []
        self._clipper: Clipper | None = None
        tracker.attach(self)

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Whether it is one of the parameters with private gradients."""
        return parameter in self._ids

    def attach(self, clipper: Clipper) -> None:
        """Report to `clipper` where logical batches begin and end."""
        self._clipper = clipper

    @property
    def max_grad_norm(self) -> float:
        """L2 bound of one sample's contribution to the next logical batch."""
        return self._max_grad_norm

    @property
    def grid(self) -> float | None:
        """Exact sums are multiples of this number; None if sums are rounded."""
        if not self.exact or not math.isfinite(self.bound):
            return None
        return grid_of(self.bound)

    # Microbatches: called by the tracker, for the loader.

    @property
    def is_open(self) -> bool:
        """Whether a part of a logical batch waits for its release."""
        return bool(self.sums)

    def begin_batch(self, samples: int, units: Units | None, *, begins_draw: bool) -> None:
        """The loader yields a microbatch of so many samples, which are its rows or units."""
        if self._clipper is not None:
            self._clipper.begin_batch(samples, units)

    def may_begin(self, new_epoch: bool) -> bool:
        """Whether the loader may draw one more logical batch."""
        return True

    def abandon(self) -> None:
        """Drop the logical batch: the loop began another epoch."""
        self.discard()

    def begin_backward(self) -> None:
        """Fix the bound of the logical batch, if this is its first backward."""
        if math.isnan(self.bound):
            self.bound = self.max_grad_norm

    def note_refusal(self) -> None:
        """Private data ended the training loop."""

    @contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Note a private refusal that the block raises."""
        try:
            yield
        except PrivateRefusal:
            self.note_refusal()
            raise

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the logical batch where the block fails."""
        try:
            with self.noting_refusals():
                yield
        except BaseException:
            self.discard()
            raise

    # Sums: called by the clipping gates.

    def before_gate(self) -> None:
        """A backward has reached a use of a private parameter, or a gate."""

    def refuse_inexact(self, rows: int) -> None:
        """Refuse a microbatch whose sums float64 might not hold exactly.

        Raises:
            PrivateRefusal: naming the greatest number of samples.
        """
        # The private loader's batches were checked before; others may have any size.
        if self.grid is None:
            return
        most = exact_slots(self.grid, self.bound) // self.ranks.data_size
        if rows > most:
            raise PrivateRefusal(
                f"a batch has more than {most} samples, the most whose sums are exact in "
                "float64; use smaller batches, or make_private(..., exact=False)",
                rows=rows,
            ) from None

    def end_backward(self) -> None:
        """A backward has run to its end."""

    def add_clipped(self, parameter: nn.Parameter, grads: Tensor, factors: Tensor) -> None:
        """Reduce per-sample gradients `[B, ...]` by their clipping factors, and add the sum."""
        into = self._sum_to_extend(parameter)
        self._note_rounding(parameter)
        noise = self._noise_to_fuse(parameter)
        total = clip_reduce(grads, factors, grid=self.grid, into=into, noise=noise)
        self._add(parameter, total, has_noise=noise is not None)

    def add(self, parameter: nn.Parameter, total: Tensor, *, is_exact: bool = True) -> None:
        """Add a microbatch's clipped sum, and the noise where it is due.

        Args:
            parameter: the parameter of the sum.
            total: the sum.
            is_exact: whether `total` is a multiple of the grid, where there is one.
        """
        if not is_exact:
            self.rounded.add(self.names[parameter])
        self._note_rounding(parameter)
        self._add(parameter, total)

    def add_zero(self, parameter: nn.Parameter) -> None:
        """Take part in the exchange of a sharded parameter that got no gradient on this rank."""
        sharded: bool = is_sharded(parameter)
        if sharded:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            zeros = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            self._add_rows(parameter, zeros)

    def _sum_to_extend(self, parameter: nn.Parameter) -> Tensor | None:
        """The exact sum of earlier microbatches, to which a kernel may add in place, or None."""
        held = self.sums.get(parameter)
        if held is None or is_sharded(parameter):
            return None
        return held if self.grid is not None and held.dtype == torch.float64 else None

    def mark_of(self, parameter: nn.Parameter) -> int:
        """A number that travels with a parameter's gradient and identifies it."""
        return 1 + self._ids[parameter] % 4093

    def check_exchanges(self) -> None:
        """Raise where ranks exchanged gradients of different parameters; drops the batch."""
        with self.dropping():
            refuse_mixed(self._mixed)

    def discard(self) -> None:
        """Drop the sums of a logical batch, or its release."""
        self._drop_gradients()
        self._clear()
        self.tracker.dropped()
        if self._clipper is not None:
            self._clipper.end_batch(released=False)

    def _drop_gradients(self) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def _clear(self) -> None:
        self.sums = {}
        self._mixed = []
        self.bound = math.nan

    def _note_rounding(self, parameter: nn.Parameter) -> None:
        if self.grid is None:
            self.rounded.add(self.names[parameter])

    def _noise_to_fuse(self, parameter: nn.Parameter) -> NoiseStream | None:
        """Noise for the kernel that makes a parameter's sum, or None."""
        return None

    def _add(self, parameter: nn.Parameter, total: Tensor, *, has_noise: bool = False) -> None:
        sharded: bool = is_sharded(parameter)
        if sharded:
            self._add_rows(parameter, total)
            return
        held = self.sums.get(parameter)
        if held is not None and total is not held:
            total = held + total
        self._store(parameter, total, has_noise)

    def _store(self, parameter: nn.Parameter, total: Tensor, has_noise: bool) -> None:
        """Store a parameter's sum; with its noise, where it is due."""
        self.sums[parameter] = total

    def _add_rows(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Add this rank's rows of a sharded parameter's sum; `release` adds their noise."""
        rows = parameter
        assert is_sharded(rows)
        # Ranks add in one dtype, however each of them got its sum.
        total = total if self.grid is None else total.double()
        mark = self.mark_of(parameter)
        own, mixed = reduce_to_part(total, rows, self.ranks.data, mark)
        self._mixed.append(mixed)
        held = self.sums.get(parameter)
        self.sums[parameter] = own if held is None else held + own


class PrivateStep(ClippedSums):
    """One logical batch at a time: clipped sums, charge, noise, and release to the optimizer.

    Args:
        optimizer: the wrapped optimizer; a release sets the gradients of its parameters.
        trained: the parameters with private gradients.
        names: dotted name of each parameter.
        tracker: follows the microbatches of the training loop.
        sampler: draws the logical batches; knows the privacy cost of each.
        spending: the privacy cost of all releases so far.
        keys: of the noise.
        ranks: this process and its peers.
        noise_multiplier: standard deviation of the noise over the bound.
        max_grad_norm: L2 bound C of one sample's contribution.
        expected_batch_size: the divisor of the released sums; public.
        divides: whether sums are divided.
        exact: whether sums of per-sample gradients are multiples of the grid.

    Attributes:
        noise_multiplier: of the next release; `set_noise_multiplier` changes it.
        expected_batch_size: of the next release; `set_expected_batch_size` changes it.
        noise: of the release under way; None before it was charged and after it was made.
        released: the parameters whose `.grad` is a release that waits for its step, or None.
        public: gradients of public data that the next step adds to its release.

    Guarantees:
        A release is charged to the accountant, and written to the ledger, before its first noisy
        value exists. Noise of standard deviation noise_multiplier * max_grad_norm is added to
        each coordinate once for a logical batch, over all ranks, also where a parameter got no
        gradient. A logical batch that is dropped after its charge stays charged. Public gradients
        change neither the sums nor the noise nor the charge.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Sequence[nn.Parameter],
        *,
        names: dict[nn.Parameter, str],
        tracker: BatchTracker,
        sampler: SamplingPlan,
        spending: Spending,
        keys: RunKeys,
        ranks: Ranks,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
        divides: bool,
        exact: bool,
    ):
        super().__init__(
            trained,
            names=names,
            tracker=tracker,
            ranks=ranks,
            max_grad_norm=max_grad_norm,
            exact=exact,
        )
        self.noise: BatchNoise | None = None
        self.released: list[nn.Parameter] | None = None
        self._hooks: list[RemovableHandle] = []
        self._options: dict[Any, Any] | None = None
        self._changed: Any = None
        self._is_first = False
        self.public = PublicGradients(self.trained, names)
        self._optimizer = optimizer
        self._sampler = sampler
        self._spending = spending
        self._keys = keys
        self._expected_batch_size = expected_batch_size
        self._divides = divides
        self._noise_multiplier = noise_multiplier
        self._is_closed = False
        self._may_charge = False
        self._planned: tuple[int, float] | None = None
        # The last epoch of a shuffled loader that was charged, and its noise.
        self._paid = (0, math.inf)

    @property
    def noise_multiplier(self) -> float:
        return self._noise_multiplier

    def set_noise_multiplier(self, value: float) -> None:
        """Change the noise from the next release on; 0 warns.

        Raises:
            ValueError: it is not a number >= 0 that fits the bound.
        """
        noise_fits(max_grad_norm=self._max_grad_norm, noise_multiplier=value)
        if value == 0 < self._noise_multiplier:
            warnings.warn(
                "noise_multiplier=0: the next release has no noise, and epsilon is inf then",
                stacklevel=4,
            )
        # numpy's narrower numbers would round products with it.
        self._noise_multiplier = float(value)

    def set_max_grad_norm(self, value: float) -> None:
        """Change the bound, and the noise that is scaled to it, from the next logical batch on.

        Raises:
            ValueError: it is not a finite number > 0 that fits the noise.
        """
        positive(max_grad_norm=value)
        finite(max_grad_norm=value)
        noise_fits(max_grad_norm=value, noise_multiplier=self._noise_multiplier)
        self._max_grad_norm = float(value)

    @property
    def expected_batch_size(self) -> float:
        return self._expected_batch_size

    def set_expected_batch_size(self, value: float) -> None:
        """Change the divisor from the next release on; the sample rate stays as it is.

        Raises:
            ValueError: it is not a finite number > 0, or sums are released undivided.
        """
        positive(expected_batch_size=value)
        finite(expected_batch_size=value)
        if not self._divides:
            raise ValueError(
                f"expected_batch_size={value!r} with loss_reduction='sum', where sums are not "
                "divided; scale the learning rate in optimizer.param_groups"
            )
        self._expected_batch_size = float(value)

    def watch_gradients(self) -> None:
        """Refuse gradients that reach a parameter past its gate, from now on."""
        # A parameter that held the step would be in a cycle.
        refuse = functools.partial(_refuse_gradient, weakref.ref(self))
        whole = (p for p in self.trained if not is_sharded(p))
        self._hooks = [p.register_post_accumulate_grad_hook(refuse) for p in whole]

    def close(self) -> None:
        """Refuse further releases: the keys are those of the engine's next model from now on."""
        self._is_closed = True
        self.public.drop()
        for hook in self._hooks:
            hook.remove()

    def refuse_closed(self) -> None:
        """Raises RuntimeError where the model was detached, or another engine has it."""
        if self._is_closed:
            raise RuntimeError(
                "the model of this optimizer was detached, so it releases nothing more: its noise "
                "would be that of the engine's next model. Use the optimizer that the last "
                "make_private returned"
            )

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that a release changes."""
        held = [p for group in self._optimizer.param_groups for p in group["params"]]
        return [p for p in held if p in self._ids and p.requires_grad]

    def plan(self, releases: int, *, target_epsilon: float) -> None:
        """Warn at the first release beyond those that the noise was calibrated for."""
        self._planned = (self.releases + releases, target_epsilon)

    def resume(
        self,
        *,
        releases: int,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
    ) -> None:
        """Go on where a checkpoint was written."""
        noise_fits(max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier)
        self.releases = releases
        self._noise_multiplier = float(noise_multiplier)
        self._max_grad_norm = float(max_grad_norm)
        self._expected_batch_size = float(expected_batch_size)
        self.public.drop()
        self.discard()

    def leave_ranks(self) -> None:
        """Continue as a process by itself: a forked child is none of the ranks."""
        self.ranks = Ranks()

    # The last microbatch's backward

    @property
    def is_open(self) -> bool:
        # A backward that failed may leave a release without sums.
        return bool(self.sums) or self.noise is not None or self.released is not None

    def begin_batch(self, samples: int, units: Units | None, *, begins_draw: bool) -> None:
        self.public.refuse_inside("a batch of the private loader")
        self.public.begin_batch(begins_draw=begins_draw)
        super().begin_batch(samples, units, begins_draw=begins_draw)

    def before_gate(self) -> None:
        self.public.refuse_gate()

    def begin_backward(self) -> None:
        if self.noise is not None:
            raise RuntimeError(
                "a backward pass after a release of this logical batch was begun: its noise would "
                "be used for another sum, so the batch is dropped. To complete a release that was "
                "interrupted, call optimizer.step() again without a backward pass"
            )
        if self.tracker.is_charged:
            self.discard()
            raise RuntimeError(
                "a backward pass on a draw whose release was charged and dropped: two releases of "
                "one draw cost more than those of two draws. Go on with the loader's next batch"
            )
        if math.isnan(self.bound):
            self._drop_gradients()  # of the release before
            self._refuse_hooks()
        super().begin_backward()
        self.note_options()
        self._may_charge = True

    def end_backward(self) -> None:
        with self.noting_refusals():
            if self._ends_here():
                self.release(signalled=self.tracker.waiting_signals > 0)

    def _refuse_hooks(self) -> None:
        """Refuse hooks on gradients, which would see nothing: autograd makes none of parameters.

        Raises:
            RuntimeError: naming the first parameter.
        """
        own = {hook.id for hook in self._hooks}
        for parameter in self.trained:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
            if parameter._backward_hooks or not hooks.keys() <= own:
                name = self.names[parameter]
                raise RuntimeError(
                    f"parameter '{name}' has a hook on its gradient, which would "
                    "not run in private training: remove it, and read .grad after the last "
                    "engine.backward of a logical batch"
                )

    def note_refusal(self) -> None:
        # A ledger that cannot be written is refused at the next release; this error tells more.
        with suppress(OSError, RuntimeError):
            self._spending.note_refusal(self._keys.run)

    def note_options(self) -> None:
        """Compare the options of the next release with those of the draw's first backward."""
        options: dict[Any, Any] = {name: getattr(self, name) for name in _OPTIONS}
        for number, group in enumerate(self._optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    options[number, name] = _comparable(value)
        if self._options is None:
            self._options = options
        elif self._changed is None and options != self._options:
            both = self._options.keys() | options.keys()
            self._changed = next(n for n in both if options.get(n) != self._options.get(n))

    def warn_of_forgotten_releases(self) -> None:
        """Warn if epsilon counts no releases for the steps that the optimizer has made."""
        if self._is_first:
            warnings.warn(
                "the optimizer's state is of a run that made steps, and this engine counts none "
                "of them. If they were on private data, epsilon is too small: resume with "
                "engine.save_checkpoint and load_checkpoint, or save engine.state_dict() beside "
                "those of model and optimizer, and load all three before the first step",
                stacklevel=3,
            )

    def refuse_changed_options(self) -> None:
        """Refuse a step whose learning rate, or another option, is not that of its first backward.

        Raises:
            PrivateRefusal: naming the option and the line to write.
        """
        if self._options is not None:
            self.note_options()
        changed = self._changed
        if changed is None:
            return
        if isinstance(changed, tuple):
            changed = f"param_groups[{changed[0]}]['{changed[1]}']"
        raise PrivateRefusal(
            f"optimizer.{changed} changed between the first backward of a logical batch and its "
            "step(), so nothing was released: the number of microbatches between is private. "
            "Behind optimizer.step() write\n"
            "    if loader.is_last: scheduler.step()\n"
            "(of BatchMemoryManager `if not optimizer.step_was_skipped: scheduler.step()`), and "
            "compute what you set by hand from loader.releases"
        ) from None

    def abandon(self) -> None:
        self.tracker.forget_signals()
        super().abandon()

    def _clear(self) -> None:
        super()._clear()
        self.noise = self.released = self._options = self._changed = None

    def _noise_to_fuse(self, parameter: nn.Parameter) -> NoiseStream | None:
        # Only into a sum that is exact, complete and of this process alone.
        alone = self.grid is not None and parameter not in self.sums
        return self._noise_due(parameter) if alone and not is_sharded(parameter) else None

    def _store(self, parameter: nn.Parameter, total: Tensor, has_noise: bool) -> None:
        if not has_noise:
            stream = self._noise_due(parameter)
            if stream is not None:
                total = stream.add_to_(total.contiguous())
                has_noise = True
        if has_noise:
            total = total.to(torch.promote_types(parameter.dtype, torch.float32))
        self.sums[parameter] = total
        # Last: a failure above leaves a sum marked as lacking noise, never one without noise.
        if has_noise:
            assert self.noise is not None
            self.noise.was_added(parameter, total)

    def _noise_due(self, parameter: nn.Parameter) -> NoiseStream | None:
        """Noise to add in this backward; the first call of the last backward charges for it."""
        if self._may_charge:
            self._may_charge = False
            # Noise is for the sum over all ranks' samples.
            alone = self.ranks.data is None and not self.is_sharded
            if alone and self.noise_multiplier != 0 and self._ends_here():
                self.noise = self._charge(signalled=self.tracker.waiting_signals > 0)
        return None if self.noise is None else self.noise.stream(parameter)

    def _ends_here(self) -> bool:
        """Whether the backward under way completes the sums of the logical batch."""
        refuse_capture(CAPTURED)
        return self.tracker.step_will_release

    # Charge

    def _charge(self, *, signalled: bool) -> BatchNoise:
        """Charge accountant and ledger for this logical batch; only then is there noise for it.

        Args:
            signalled: whether another loader signalled that the logical batch ends here.

        Raises:
            BudgetSpent: the release does not fit into the budget; the batch is dropped.
            ValueError: the accountant does not support this event; the batch is dropped.
            RuntimeError: the batch is not of the private loader.
        """
        bound = self.max_grad_norm if math.isnan(self.bound) else self.bound
        noise_fits(max_grad_norm=bound, noise_multiplier=self.noise_multiplier)
        noise_multiplier = self.noise_multiplier
        drawn = self.tracker.came_from_loader(signalled)
        self._require_same_release(noise_multiplier, bound, drawn)
        takes_others = self.tracker.foreign_batches and self.ranks.everyone is None
        if not drawn and not takes_others:
            self.discard()
            self.tracker.refused()
            # What another loader signalled may hang on which samples the loop left out.
            raise PrivateRefusal(FOREIGN) if signalled else RuntimeError(FOREIGN)
        # Models that are not private need no accounting, which is slow to import.
        from dpflash.accounting import Gaussian

        # No amplification can be claimed for a batch of unknown origin.
        event: Event | None = (
            self._next_event(noise_multiplier)
            if drawn
            else Gaussian(relation="zero_out", noise_multiplier=noise_multiplier)
        )
        self._is_first = not self.releases and self._spending.is_empty
        try:
            self._spending.admit(event)
        except (BudgetSpent, ValueError):
            self.discard()
            self.tracker.refused()
            raise
        if self._spending.ledger is None and noise_multiplier > 0:
            self._keys.claim(self.releases)
        self._charge_on_all_ranks(event, is_foreign=not drawn)
        self.tracker.charged()
        if drawn and event is not None:
            self._paid = (self.tracker.epochs, noise_multiplier)
        step = self.releases
        self.releases += 1
        return BatchNoise(
            noise_multiplier, bound, key=self._keys.noise, step=step, parameter_ids=self._ids
        )

    def _next_event(self, noise_multiplier: float, *, new_epoch: bool = False) -> Event | None:
        """The event that the next release is charged as; None if it is already charged."""
        event = self._sampler.event(noise_multiplier)
        if self._sampler.event_covers_epoch and not new_epoch:
            # Batches of an epoch are disjoint, so the step with the least noise covers all.
            epoch, least = self._paid
            if epoch == self.tracker.epochs and noise_multiplier >= least:
                return None
        return event

    def may_begin(self, new_epoch: bool) -> bool:
        """Whether the budget allows the release of a logical batch that is not drawn yet."""
        budget = self._spending.budget
        if budget is None or budget.when_spent != "stop":
            return True
        return self._spending.fits(self._next_event(self.noise_multiplier, new_epoch=new_epoch))

    def remaining_steps(self) -> int | None:
        """How many more releases the budget allows; None without a budget."""
        if self._spending.budget is None:
            return None
        fit = self._spending.remaining(self._sampler.event(self.noise_multiplier))
        if not self._sampler.event_covers_epoch:
            return fit
        left, whole = self.tracker.left_of_epoch, self._sampler.steps_per_epoch
        if self._next_event(self.noise_multiplier) is None:
            return left + fit * whole
        return left + (fit - 1) * whole if fit and left else fit * whole

    def _require_same_release(self, noise_multiplier: float, bound: float, drawn: bool) -> None:
        """Check that all ranks are about to make the same release.

        Raises:
            ValueError: on all ranks, naming the difference; the batch is dropped.
        """
        try:
            now = noise_multiplier, bound, self.expected_batch_size, drawn
            self._agree("a private batch", dict(zip(_AGREED, now, strict=True)))
        except ValueError:
            self.discard()
            self.tracker.refused()
            raise

    def _agree(self, kind: str, values: dict[str, Any] | None = None) -> None:
        """Raise a ValueError on all ranks where they are about to make different steps."""
        if self.ranks.everyone is None:
            return
        current = self.tracker.current
        self.ranks.agree(
            "optimizer.step()",
            {
                "data of the step": kind,
                "release": self.releases,
                "draw": None if current is None else (self.tracker.returns, current.draw),
                **dict.fromkeys(_AGREED),
                **(values or {}),
                "trained parameters": [self.names[p] for p in self.parameters],
                # Those beside a release are made until its step.
                "parameters with a public gradient": () if values else self.public.names,
            },
        )

    def _charge_on_all_ranks(self, event: Event | None, *, is_foreign: bool) -> None:
        """Charge a release on all ranks; first on the first rank, which writes the ledger."""

        def charge() -> bytes:
            keys = self._keys
            self._spending.charge(event, run=keys.run, branch=keys.branch, is_foreign=is_foreign)
            return b""

        self.ranks.run_on_first("the payment of a release", charge)
        if not self.ranks.is_first:
            charge()

    # Release

    def release(self, *, signalled: bool) -> None:
        """Set the gradients of the logical batch: sums with noise, over the public divisor.

        A release that is interrupted can be made again: sums and noise are the same then.

        Args:
            signalled: see `_charge`.
        """
        with self.dropping():
            self.refuse_changed_options()
            self._refuse_written_gradients()
        self.check_exchanges()
        parameters = self.parameters
        if self.noise is None:
            self.noise = self._charge(signalled=signalled)
        self.noise.settle()
        if self._planned is not None and self.releases > self._planned[0]:
            (most, epsilon), self._planned = self._planned, None
            warnings.warn(
                f"release {self.releases}: the noise was calibrated for {most} releases, so "
                f"epsilon is above target_epsilon={epsilon!r} from now on. Pass the epochs or "
                "steps that you train for to make_private_with_epsilon; "
                "budget=PrivacyBudget(...) stops training by itself",
                stacklevel=3,
            )
        # Ranks add in one dtype; a sum that has its noise is of this process alone.
        wide = self.ranks.data is not None
        divisor = self.expected_batch_size if self._divides else 1.0
        totals = [_copy_of_sum(p, self.sums.get(p), wide=wide) for p in parameters]
        whole = [t for p, t in zip(parameters, totals, strict=True) if not is_sharded(p)]
        all_reduce_all_(whole, self.ranks.data)
        for parameter, total in zip(parameters, totals, strict=True):
            stream = self.noise.stream(parameter)
            if stream is not None:
                stream.add_to_(total)
        self.noise.settle()
        for parameter, total in zip(parameters, totals, strict=True):
            total = total.to(torch.promote_types(parameter.dtype, torch.float32))
            parameter.grad = as_grad(total.div_(divisor).to(parameter.dtype), parameter)
        options = self._options
        self._clear()
        self._options, self.released = options, parameters

    def take_release(self) -> None:
        """End the logical batch; `.grad` is its release, with the gradients of public data.

        Raises:
            RuntimeError: the released gradients are gone.
        """
        if self.released is None:
            self.release(signalled=self.tracker.signalled_now)
        if self.released and all(p.grad is None for p in self.released):
            self.discard()
            raise RuntimeError(
                "every .grad was cleared between the last backward of a logical batch and "
                "optimizer.step(), so its release is lost: call model.zero_grad() after step()"
            )
        self._agree("a private batch")
        for parameter, grad in self.public.mean(self.ranks).items():
            if parameter.grad is not None:
                parameter.grad.add_(grad)
        self.public.drop()
        self._clear()
        if self._clipper is not None:
            self._clipper.end_batch(released=True)
        self.tracker.released()

    def _refuse_written_gradients(self) -> None:
        """Refuse `.grad` before the release: what others wrote there is not private."""
        if self.noise is not None:
            return  # an interrupted release
        if math.isnan(self.bound):
            self._drop_gradients()  # of the release before
        for parameter in self.trained:
            if parameter.grad is not None:
                parameter.grad = None
                name = self.names[parameter]
                raise PrivateRefusal(
                    f".grad of parameter '{name}' was written before the release "
                    "of the logical batch, so nothing was released: leave it alone between the "
                    "first backward of a logical batch and its last one; it is None there. The "
                    "backward of a public loss runs inside engine.public_data()"
                ) from None

    @property
    def has_public_alone(self) -> bool:
        """Whether the step under way is of public gradients, and no private batch waits for it."""
        return self.public.are_waiting and not self.is_open and self.tracker.is_between_batches

    def set_public_gradients(self) -> None:
        """Set the gradients of public data alone; nothing is released or charged."""
        self._agree("public data alone")
        self._drop_gradients()
        for parameter, grad in self.public.mean(self.ranks).items():
            parameter.grad = grad
        self.public.drop()
        if self._clipper is not None:
            # Parameters are about to change, as behind a release.
            self._clipper.end_batch(released=True)


def _refuse_gradient(step: weakref.ref[PrivateStep], parameter: nn.Parameter) -> None:
    """Refuse a gradient that reached a parameter past its gate."""
    owner = step()
    if owner is None or owner.public.is_inside or parameter.grad is None:
        return
    parameter.grad = None
    name = owner.names[parameter]
    with owner.dropping():
        raise PrivateRefusal(
            f"parameter '{name}' got a gradient past its private layer, which "
            "is neither clipped nor noised, so nothing was released. Either it is used outside of "
            "its own module (tie modules instead: lm_head.weight = embedding.weight; in place of "
            "a penalty on weights use weight_decay, or run its backward inside "
            "engine.public_data()), or this is the backward of a public loss (run it inside "
            "engine.public_data() too)"
        ) from None


def refuse_mixed(mixed: Sequence[Tensor]) -> None:
    """Raise where ranks exchanged gradients of different parameters."""
    if mixed and bool(torch.stack(list(mixed)).any()):
        raise RuntimeError(
            "ranks exchanged gradients of different parameters, so nothing was released: "
            "each of them must run the same layers in the same order, and use their outputs in "
            "its losses (with weight 0 where it has nothing to add)"
        )


def _comparable(option: Any) -> Any:
    """An option of an optimizer, to compare later without waiting for a GPU."""
    if isinstance(option, Tensor):
        return id(option), option._version
    return tuple(map(_comparable, option)) if isinstance(option, (tuple, list)) else option


def _copy_of_sum(parameter: Tensor, clipped_sum: Tensor | None, *, wide: bool) -> Tensor:
    """A copy of a parameter's sum (for a sharded one: this rank's rows); zeros without one."""
    dtype = torch.float64 if wide or parameter.dtype == torch.float64 else torch.float32
    if clipped_sum is not None:
        dtype = torch.promote_types(dtype, clipped_sum.dtype)
        return clipped_sum.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return torch.zeros(local_shape(parameter), dtype=dtype, device=parameter.device)
