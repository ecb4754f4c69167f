"""OpenBatch: holds the state of the current logical batch, and drops it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from ..distributed.collectives import PrivateRankError, RankError
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


class Clipper(Protocol):
    """Clips gradients; is notified when microbatches begin and logical batches end.

    Attributes:
        wants_trials: whether this rank wants isolation tests (trials) of the next microbatches.
    """

    wants_trials: bool

    def try_next(self) -> None:
        """Run trials on the next microbatches; called on all ranks."""

    def begin_microbatch(self, samples: int, units: Units | None) -> None:
        """Note that the loader yields a microbatch of `samples` samples (rows or packed units)."""

    def end_batch(self, *, parameters_change: bool) -> None:
        """Note that the logical batch was dropped, or that the parameters are about to change."""


class OpenBatch:
    """The state of a logical batch until it ends, and the methods that drop it.

    Args:
        optimizer: the wrapped optimizer, or several as one. A release sets `.grad` of its
            parameters.
        sums: sums of the clipped gradients of the logical batch.
        tracker: follows the microbatches of the training loop.
        options: noise multiplier, bound and divisor of the next release.
        charge: charges releases.
        kind_of_noise: creates the noise of each release.
        padding_rows: see `Gradients`.

    Attributes:
        noise: noise of the current release; None before it is charged and after the release.
        released: the parameters whose `.grad` is a release that waits for its step, or None.
        released_std: standard deviation of the noise in each element of the last release.
        public: gradients of public data that the next step adds to its release.
        rows: tells which rows of the current microbatch are samples.
        admission: checks whether a release or a step is allowed.
        progress: number of microbatches, backwards and dropped batches so far.

    Guarantees:
        A logical batch that is dropped after its charge stays charged.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        sums: ClippedSums,
        *,
        tracker: BatchTracker,
        options: ReleaseOptions,
        charge: Charge,
        kind_of_noise: Noise,
        padding_rows: Mapping[nn.Parameter, int],
    ):
        self.sums = sums
        self.tracker = tracker
        self.options = options
        self.charge = charge
        self.noise: BatchNoise | None = None
        self.released: list[nn.Parameter] | None = None
        self.released_std = 0.0
        self.public = PublicGradients(sums.trained, sums.names)
        self.gradients = Gradients(sums.trained, sums.names, self.public, padding_rows)
        self.admission = Admission(sums, tracker, options, charge)
        self.rows = RealRows(tracker.real_rows)
        self.progress = 0
        self._optimizer = optimizer
        self._kind_of_noise = kind_of_noise
        self._clipper: Clipper | None = None
        tracker.attach(self)

    @property
    def bound(self) -> float:
        """L2 bound of one sample in the current logical batch; in the next if none has begun."""
        return self.sums.bound if self.sums.has_begun else self.options.max_grad_norm

    @property
    def releases(self) -> int:
        """Number of releases charged so far."""
        return self.charge.releases

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that a release changes."""
        return self.parameters_of(self._optimizer)

    def parameters_of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of the optimizer's groups, which may have changed."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        return [p for p in held if self.sums.is_trained(p) and p.requires_grad]

    def attach(self, clipper: Clipper) -> None:
        """Report to `clipper` when logical batches begin and end."""
        self._clipper = clipper

    def watch_gradients(self) -> None:
        """From now on, refuse gradients that reach a parameter without being clipped."""
        self.gradients.watch(self.dropping)

    def resume(self, *, releases: int, block: Mapping[str, Any] | None, **options: float) -> None:
        """Continue from a checkpoint."""
        self.options.load(**options)
        self.charge.resume(releases)
        self.charge.block.load_state_dict(block)
        self.public.drop()
        self.discard()

    def close(self) -> None:
        """Stop watching gradients: the model is no longer private."""
        self.public.drop()
        self.gradients.unwatch()

    def leave_ranks(self) -> None:
        """Continue as a single process: a forked child is not one of the ranks."""
        self.sums.leave_ranks()
        self.charge.leave_ranks()

    # Microbatches: called by the tracker, for the loader.

    @property
    def is_open(self) -> bool:
        """Whether sums wait for their release, or a release waits for its step."""
        # Also check `noise`: a backward that failed may leave a release without sums.
        return bool(self.sums) or self.noise is not None or self.released is not None

    def begin_microbatch(self, samples: int, units: Units | None, *, begins_draw: bool) -> None:
        """Note that the loader yields a microbatch of `samples` samples (rows or packed units)."""
        self.public.refuse_inside("a batch of the private loader")
        self.public.begin_microbatch(begins_draw=begins_draw)
        self.progress += 1
        if self._clipper is not None:
            self._clipper.begin_microbatch(samples, units)

    def begin_row(self) -> None:
        """Note that the next forward runs a single row of the microbatch."""
        self.progress += 1
        if self._clipper is not None:
            self._clipper.begin_microbatch(1, None)

    def may_begin(self, new_epoch: bool, draw: int | None) -> bool:
        """Return, before sampling, whether the budget allows to release the next logical batch."""
        noise_multiplier = self.options.noise_multiplier
        return self.charge.may_begin(noise_multiplier, new_epoch=new_epoch, draw=draw)

    def abandon(self) -> None:
        """Drop the logical batch, because the loop began another epoch."""
        self.tracker.forget_signals()
        self.discard()

    def discard(self) -> None:
        """Drop the logical batch: its sums, or the release in `.grad`."""
        self.progress += 1
        self.gradients.drop()
        self.drop_sums()

    def drop_sums(self) -> None:
        """Drop the sums of the logical batch, but keep `.grad`."""
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
        """Record a `PrivateRefusal` that the body raised, or a lost rank may have raised."""
        try:
            yield
        except RankError as error:
            if error.__cause__ is None:  # recorded already, or public
                raise
            self.charge.note_refusal(may_be=True)
            raise PrivateRankError(str(error)) from None
        except PrivateRefusal:
            self.charge.note_refusal()
            raise

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the logical batch if the body raises."""
        try:
            with self.noting_refusals():
                yield
        except BaseException:
            self.discard()
            raise

    def parameters_change(self) -> None:
        """Make the next forward read the parameters again."""
        if self._clipper is not None:
            self._clipper.end_batch(parameters_change=True)
