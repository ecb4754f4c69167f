"""PrivateStep: one logical batch, from its first microbatch to its release.

    for microbatch in logical_batch:                   # the loader marks the last microbatch
        losses = model(microbatch)                     # [B]
        losses.backward():                             # autograd runs the clipping gates, which
            factors = min(1, C / norms)                #   clip per-sample gradients
            sums[parameter] += sum_i factors_i g_i     # add, add_clipped
            if last microbatch:
                charge the accountant and the ledger   # _charge: before a noisy value exists
                sums[parameter] += N(0, (sigma C)^2)   # BatchNoise
        if last microbatch:                            # release
            charge, add over the ranks, add noise   # unless the gates charged and added noise
            parameter.grad = sums[parameter] / expected_batch_size
    optimizer.step():                                  # see turns.py
        release                                        # of a batch that is not the loader's
        parameter.grad += gradient of public data      # see dpflash.privacy.public_data
        the wrapped optimizer's step

Until the release `.grad` of a private parameter is None; everything computed from it afterwards
is post-processing. If there is one rank, sums are complete in the gates of the last microbatch,
and these gates charge and add noise. Exact sums and noise are multiples of one grid (see
`dpflash.kernels.grid_of`), so their bits do not depend on the order of microbatches and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from dpflash.kernels import NoiseStream, refuse_capture

from .noise import BatchNoise
from .open_batch import OpenBatch

CAPTURED = "each replay would release again, without charging for it and with the same noise"


class PrivateStep(OpenBatch):
    """Adds up the clipped gradients of a logical batch; its last backward makes the release.

    Guarantees:
        A release is charged to the accountant and written to the ledger before its first noisy
        value exists. Noise of standard deviation noise_multiplier * max_grad_norm is added to
        each coordinate once per logical batch, over all ranks, also to parameters without a
        gradient. Public gradients change neither the sums nor the noise nor the charge.
    """

    _may_charge = False

    def begin_backward(self) -> None:
        """Begin a backward; the first backward of a logical batch fixes the bound."""
        self.progress += 1
        if self.noise is not None:
            raise RuntimeError(
                "a backward pass after the release of this logical batch had begun: the release's "
                "noise would be used for another sum. To complete an interrupted release, call "
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

    def begin_trial(self) -> None:
        """Begin the backward of an isolation test, and drop the previous release from `.grad`."""
        if not self.sums.has_begun:
            self.gradients.drop()

    def before_gate(self) -> None:
        """Refuse a backward of public data that reaches the clipping of a private parameter."""
        self.public.refuse_gate()

    def add_clipped(
        self, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor], factors: Tensor
    ) -> None:
        """Sum per-sample gradients `[B, ...]` times clipping factors; see `ClippedSums`."""
        noise = self._noise_if_complete(parameters) if self.sums.take_noise(parameters) else None
        self.sums.add_clipped(parameters, grads, factors, noise)
        self._add_noise(parameters, have_noise=noise is not None)

    def add(
        self,
        parameters: Sequence[nn.Parameter],
        totals: Iterable[Tensor],
        *,
        is_exact: bool = True,
    ) -> None:
        """Add a microbatch's clipped sums; see `ClippedSums`."""
        self.sums.add(parameters, totals, is_exact=is_exact)
        self._add_noise(parameters, have_noise=False)

    def _add_noise(self, parameters: Sequence[nn.Parameter], *, have_noise: bool) -> None:
        """Add the noise that is due, unless the sums' kernel has added it (`have_noise`)."""
        if not have_noise and self.sums.is_alone:
            streams = self._noise_if_complete(parameters)
            have_noise = streams is not None
            if streams is not None:
                self.sums.add_noise(parameters, streams)
        # Marked last: if adding the noise fails, the sum is not marked as noisy.
        if have_noise:
            assert self.noise is not None
            self.noise.mark_added({p: self.sums[p] for p in parameters})

    def _noise_if_complete(self, parameters: Sequence[nn.Parameter]) -> list[NoiseStream] | None:
        """Return the noise to add now; the first call in the last backward charges the release."""
        if self._may_charge:
            self._may_charge = False
            # With several ranks, noise is added after the ranks' sums are added (`release`).
            if self.sums.is_alone and self.options.noise_multiplier != 0 and self._ends_here():
                self.noise = self._charge(signalled=self.tracker.waiting_signals > 0)
        return None if self.noise is None else self.noise.streams(parameters)

    def _ends_here(self) -> bool:
        """Return whether the current backward completes the sums of the logical batch."""
        refuse_capture(CAPTURED)
        return self.tracker.step_will_release

    def end_backward(self) -> None:
        """End a backward; the backward of the last microbatch releases."""
        with self.noting_refusals():
            with self.dropping():
                self.sums.exchange()
            if self._ends_here():
                self.release(signalled=self.tracker.waiting_signals > 0)

    # The release

    def _refuse_charged(self) -> None:
        if self.tracker.is_charged:
            self.discard()
            self.tracker.refused()
            raise RuntimeError(
                "a backward pass on a logical batch whose release was charged and dropped. A "
                "second release of the batch costs epsilon again; go on with the next batch"
            )

    def _charge(self, *, signalled: bool) -> BatchNoise:
        """Charge the accountant and the ledger for this logical batch, then return its noise.

        Args:
            signalled: whether another loader signalled that the logical batch ends here.

        Raises:
            RuntimeError: the batch's release was charged before; the batch is dropped.
            Exception: any exception of `Admission.of_release`; the batch is dropped.
        """
        self._refuse_charged()
        clipper = self._clipper
        wants = clipper is not None and clipper.wants_trials
        try:
            order = self.admission.of_release(
                self.parameters, signalled=signalled, wants_trials=wants
            )
        except Exception:
            self.discard()
            self.tracker.refused()
            raise
        if clipper is not None and order.wants_trials:
            clipper.try_next()
        number = self.charge.pay(order, self.sums.carrier(self.parameters))
        place = self.charge.block.begin(order.bound, order.noise_multiplier)
        self.tracker.charged()
        return self._kind_of_noise.begin(number, place, order.bound, order.noise_multiplier)

    def release(self, *, signalled: bool) -> None:
        """Set `.grad` to the sums of the logical batch plus noise, divided by the public divisor.

        An interrupted release can be made again; it has the same sums and the same noise.

        Args:
            signalled: see `_charge`.
        """
        with self.dropping():
            if self.noise is None:  # the backward has not charged this release
                if not self.sums.has_begun:
                    self.gradients.drop()  # of the release before
                self.gradients.refuse_written()
        parameters = self.parameters
        if self.noise is None:
            self.noise = self._charge(signalled=signalled)
        self.noise.settle()
        self.charge.warn_beyond_target()
        try:
            divisor = self.options.divisor
            for theirs, means in self.sums.with_noise(parameters, self.noise, divisor):
                self.gradients.set(theirs, means)
        except (RuntimeError, ValueError):  # optimizers must not step on an incomplete release
            self.gradients.drop(parameters)
            raise
        self.released_std = self.noise.std / self.options.divisor
        self.noise.complete()
        self.charge.block.complete()
        # Cleared last: a release that is interrupted and made again still has its sums.
        self.released = parameters
        self.noise = None
        self.sums.clear()

    def end(self) -> None:
        """End the logical batch, before optimizers step on its release."""
        self._clear()
        self.parameters_change()
        self.tracker.released()
