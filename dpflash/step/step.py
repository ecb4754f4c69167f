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
    optimizer.step():                                  # see turns.py
        release                                        # if no backward could: a batch of others
        parameter.grad += gradient of public data      # see dpflash.privacy.public_data
        the wrapped optimizer's step

Until the release `.grad` of a private parameter is None; what is done with it afterwards is
post-processing. The gates of the last microbatch charge and add noise where the sum is complete
on this rank, which is alone. Exact sums, and noise, are multiples of one grid (see
`dpflash.kernels.grid_of`), so the order of microbatches and ranks does not change a bit of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from dpflash.kernels import NoiseStream, refuse_capture

from ..distributed.fsdp import is_sharded
from ..packing import Units
from ..privacy.public_data import PublicGradients
from ..refusal import PrivateRefusal
from ..sampling.slots import RealRows
from ..sampling.tracker import BatchTracker
from .admission import Admission
from .charge import Charge
from .gradients import Gradients
from .noise import BatchNoise, Noise
from .options import ReleaseOptions
from .sums import ClippedSums

CAPTURED = "each replay would release again, without charging for it and with the same noise"


class Clipper(Protocol):
    """Clips gradients. The step reports where microbatches begin and logical batches end."""

    def begin_microbatch(self, samples: int, units: Units | None) -> None:
        """The loader yields a microbatch of so many samples, which are its rows or units."""

    def end_batch(self, *, parameters_change: bool) -> None:
        """The logical batch was dropped, or parameters are about to change."""


class PrivateStep:
    """One logical batch at a time: clipped sums, charge, noise, and release to the optimizer.

    Args:
        optimizer: the wrapped optimizer, or several as one; a release sets the gradients of its
            parameters.
        sums: of the clipped gradients of the logical batch.
        tracker: follows the microbatches of the training loop.
        options: noise, bound and divisor of the next release.
        charge: pays for releases.
        kind_of_noise: makes the noise of each release.

    Attributes:
        noise: of the release under way; None before it was charged and after it was made.
        released: the parameters whose `.grad` is a release that waits for its step, or None.
        public: gradients of public data that the next step adds to its release.
        rows: which rows of the current microbatch are samples.
        admission: says whether a release or a step is allowed.
        progress: counts microbatches, backwards and batches that were dropped.

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
        sums: ClippedSums,
        *,
        tracker: BatchTracker,
        options: ReleaseOptions,
        charge: Charge,
        kind_of_noise: Noise,
    ):
        self.sums = sums
        self.tracker = tracker
        self.options = options
        self.charge = charge
        self.noise: BatchNoise | None = None
        self.released: list[nn.Parameter] | None = None
        self.public = PublicGradients(sums.trained, sums.names)
        self.gradients = Gradients(sums.trained, sums.names, self.public)
        self.rows = RealRows(tracker.real_rows)
        self.admission = Admission(sums, tracker, options, charge)
        self.progress = 0
        self._optimizer = optimizer
        self._kind_of_noise = kind_of_noise
        self._clipper: Clipper | None = None
        self._may_charge = False
        tracker.attach(self)

    @property
    def releases(self) -> int:
        """How many releases were charged so far."""
        return self.charge.releases

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that a release changes."""
        return self.parameters_of(self._optimizer)

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        """Those of a wrapped optimizer as it is now: groups can be added, parameters frozen."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in held if self.sums.is_trained(p) and p.requires_grad]

    def attach(self, clipper: Clipper) -> None:
        """Report to `clipper` where logical batches begin and end."""
        self._clipper = clipper

    def watch_gradients(self) -> None:
        """Refuse gradients that reach a parameter past its gate, from now on."""
        self.gradients.watch(self.dropping)

    def resume(self, *, releases: int, **options: float) -> None:
        """Go on where a checkpoint was written."""
        self.options.load(**options)
        self.charge.resume(releases)
        self.public.drop()
        self.discard()

    def close(self) -> None:
        """The model is made plain again."""
        self.public.drop()
        self.gradients.unwatch()

    # Microbatches: called by the tracker, for the loader.

    @property
    def is_open(self) -> bool:
        """Whether a part of a logical batch waits for its release, or a release for its step."""
        # A backward that failed may leave a release without sums.
        return bool(self.sums) or self.noise is not None or self.released is not None

    def begin_microbatch(self, samples: int, units: Units | None, *, begins_draw: bool) -> None:
        """The loader yields a microbatch of so many samples, which are its rows or units."""
        self.public.refuse_inside("a batch of the private loader")
        self.public.begin_microbatch(begins_draw=begins_draw)
        self.progress += 1
        if self._clipper is not None:
            self._clipper.begin_microbatch(samples, units)

    def may_begin(self, new_epoch: bool) -> bool:
        """Whether the budget allows the release of a logical batch that is not drawn yet."""
        return self.charge.may_begin(self.options.noise_multiplier, new_epoch=new_epoch)

    def abandon(self) -> None:
        """Drop the logical batch: the loop began another epoch."""
        self.tracker.forget_signals()
        self.discard()

    def discard(self) -> None:
        """Drop the sums of a logical batch, or its release."""
        self.progress += 1
        self.gradients.drop()
        self.drop_sums()

    def drop_sums(self) -> None:
        """Drop the sums of a logical batch."""
        self._clear()
        self.tracker.dropped()
        if self._clipper is not None:
            self._clipper.end_batch(parameters_change=False)

    def _clear(self) -> None:
        self.sums.clear()
        self.options.end_batch()
        self.noise = self.released = None

    @contextmanager
    def noting_refusals(self) -> Iterator[None]:
        """Note a private refusal that the block raises."""
        try:
            yield
        except PrivateRefusal:
            self.charge.note_refusal()
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

    # The backward: called by the private backward and its gates.

    def begin_backward(self) -> None:
        """A backward begins; the first of a logical batch fixes the bound."""
        self.progress += 1
        if self.noise is not None:
            raise RuntimeError(
                "a backward pass after a release of this logical batch was begun: its noise would "
                "be used for another sum. To complete a release that was interrupted, call "
                "optimizer.step() again without a backward pass"
            )
        self._refuse_charged()
        if self.sums.has_begun:
            with self.dropping():
                self.gradients.refuse_written()
        else:
            self.gradients.drop()  # of the release before
            self.gradients.refuse_hooks()
            self.sums.begin(self.options.max_grad_norm)
        self.options.note()
        self._may_charge = True

    def _refuse_charged(self) -> None:
        if self.tracker.is_charged:
            self.discard()
            self.tracker.refused()
            raise RuntimeError(
                "a backward pass on a draw whose release was charged and dropped: two releases of "
                "one draw cost more than those of two draws. Go on with the loader's next batch"
            )

    def before_gate(self) -> None:
        """A backward has reached a use of a private parameter, or a gate."""
        self.public.refuse_gate()

    def add_clipped(self, parameter: nn.Parameter, grads: Tensor, factors: Tensor) -> None:
        """Reduce per-sample gradients `[B, ...]` by their factors; see `ClippedSums`."""
        noise = self._noise_if_complete(parameter) if self.sums.takes_noise(parameter) else None
        self.sums.add_clipped(parameter, grads, factors, noise)
        self._add_noise(parameter, has_noise=noise is not None)

    def add(self, parameter: nn.Parameter, total: Tensor, *, is_exact: bool = True) -> None:
        """Add a microbatch's clipped sum; see `ClippedSums`."""
        self.sums.add(parameter, total, is_exact=is_exact)
        self._add_noise(parameter, has_noise=False)

    def _add_noise(self, parameter: nn.Parameter, *, has_noise: bool) -> None:
        """Add the noise of a sum where it is due, and was not added by the sum's own kernel."""
        if not has_noise and not is_sharded(parameter):
            stream = self._noise_if_complete(parameter)
            has_noise = stream is not None
            if stream is not None:
                self.sums.add_noise(parameter, stream)
        # Marked last, so that a sum is not taken for noised where adding its noise failed.
        if has_noise:
            assert self.noise is not None
            self.noise.mark_added(parameter, self.sums[parameter])

    def _noise_if_complete(self, parameter: nn.Parameter) -> NoiseStream | None:
        """Noise to add in this backward; the first call of the last backward charges for it."""
        if self._may_charge:
            self._may_charge = False
            # Noise is for the sum over all ranks' samples.
            alone = self.sums.ranks.data is None and not self.sums.is_sharded
            if alone and self.options.noise_multiplier != 0 and self._ends_here():
                self.noise = self._charge(signalled=self.tracker.waiting_signals > 0)
        return None if self.noise is None else self.noise.stream(parameter)

    def _ends_here(self) -> bool:
        """Whether the backward under way completes the sums of the logical batch."""
        refuse_capture(CAPTURED)
        return self.tracker.step_will_release

    def end_backward(self) -> None:
        """A backward has run to its end; that of the last microbatch releases."""
        with self.noting_refusals():
            if self._ends_here():
                self.release(signalled=self.tracker.waiting_signals > 0)

    # The release

    def _charge(self, *, signalled: bool) -> BatchNoise:
        """Charge accountant and ledger for this logical batch; only then is there noise for it.

        Args:
            signalled: whether another loader signalled that the logical batch ends here.

        Raises:
            RuntimeError: the batch's release was charged before; the batch is dropped.
            Exception: what `Admission.of_release` raises; the batch is dropped.
        """
        self._refuse_charged()
        try:
            order = self.admission.of_release(self.parameters, signalled=signalled)
        except Exception:
            self.discard()
            self.tracker.refused()
            raise
        number = self.charge.pay(order.event, order.noise_multiplier, is_foreign=order.is_foreign)
        self.tracker.charged()
        return self._kind_of_noise.begin(number, order.bound, order.noise_multiplier)

    def release(self, *, signalled: bool) -> None:
        """Set the gradients of the logical batch: sums with noise, over the public divisor.

        A release that is interrupted can be made again: sums and noise are the same then.

        Args:
            signalled: see `_charge`.
        """
        with self.dropping():
            if self.noise is None:  # no gate charged for it
                if not self.sums.has_begun:
                    self.gradients.drop()  # of the release before
                self.gradients.refuse_written()
            self.sums.refuse_mixed()
        parameters = self.parameters
        if self.noise is None:
            self.noise = self._charge(signalled=signalled)
        self.noise.settle()
        self.charge.warn_beyond_target()
        totals = self.sums.with_noise(parameters, self.noise)
        self.gradients.set(parameters, totals, self.options.divisor)
        # Cleared last, so that an interrupted release is not made again from cleared sums.
        self.released = parameters
        self.noise = None
        self.sums.clear()

    def end(self) -> None:
        """End the logical batch: optimizers are about to step on its release."""
        self._clear()
        self.parameters_change()
        self.tracker.released()

    def parameters_change(self) -> None:
        """Have the next forward read the parameters again."""
        if self._clipper is not None:
            self._clipper.end_batch(parameters_change=True)

    def leave_ranks(self) -> None:
        """Continue as a process by itself: a forked child is none of the ranks."""
        self.sums.leave_ranks()
        self.charge.leave_ranks()
