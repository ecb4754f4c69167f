"""PrivateBackward: runs the backward of one microbatch through the clipping gates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import CheckpointError

from dpflash.kernels import clip_factors

from ..distributed.collectives import agree, gather_rows, rank_in, world_size
from ..distributed.layout import Layout
from ..distributed.mesh import Ranks
from ..isolation.backward_rows import WatchedRows, differentiate
from ..isolation.declared_reduction import refuse_weights
from ..isolation.example import ExampleTrial
from ..isolation.forward_rows import ForwardRows
from ..isolation.place import PlaceTrial
from ..isolation.proof import OFF, ComparedBackward, Proof
from ..isolation.recording import Recording
from ..isolation.trial import Trial
from ..packing.units import Units
from ..refusal import TOGETHER, PrivateRefusal, warn
from ..sampling.tracker import STEP_OF_ANOTHER
from ..verification.two_backwards import (
    BackwardsDiffer,
    FirstBackward,
    SecondBackward,
    grad_before_backward,
)
from ..verification.watch import Watch
from .forward import ALL_ROWS, SHARED, PrivateForward, refuse_anomaly_mode, refuse_for_memory
from .gate import Gate
from .groups import Group
from .planner import Planner
from .rules import BackwardRun, GateRules, Step
from .statistics import ClipStatistics

# See `Uncovered.refusal`.
Refusal = Callable[[Tensor | None, object, Sequence[int | None]], str | None]


class PrivateBackward:
    """Runs a private model's backward: chooses its mode, and checks its clipping gates (`Gate`).

    Args:
        groups: the clipping groups.
        step: the logical batch to which clipped sums are added.
        planner: chooses how the gradients of matrix parameters are computed.
        loss_reduction: "mean" or "sum" if the loss is a scalar; None for losses `[B]`.
        clip_function: the clipping function, see `dpflash.kernels.clip_factors`.
        gate_type: class of the gates.
        convolves: whether the model has convolutions, whose operands cudnn rounds by default.
        proof: the isolation tests of the model, and their progress.
        refusal: function that returns the reason to refuse the backward, or None.

    Attributes:
        trial, place_trial, example: the isolation tests (trials) that run now; None for no test.
        forward: the forward whose gates the backward runs.
        statistics: counts of clipped samples.
        rules: the objects and options that all gates share.
        wants_trials: whether this rank ran a new code path, which other ranks do not know yet.
        is_past_calls: whether layers computed the last losses without a call of the whole model.
        attachment: the changes that make_private made to the model, see `Attachment`.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        step: Step,
        planner: Planner,
        *,
        loss_reduction: str | None,
        clip_function: str,
        gate_type: type[Gate] = Gate,
        convolves: bool = False,
        proof: Proof = OFF,
        refusal: Refusal = lambda losses, batch, leading: None,
    ):
        self.groups = list(groups)
        self.step = step
        self.planner = planner
        self.names = step.sums.names
        self.loss_reduction = loss_reduction
        self.clip_function = clip_function
        self.proof = proof
        self.statistics = ClipStatistics(step.rows)
        self._run = BackwardRun()
        self.rules = GateRules(
            step=step,
            planner=planner,
            clip_function=clip_function,
            loss_reduction=loss_reduction,
            convolves=convolves,
            statistics=self.statistics,
            run=lambda: self._run,
            admit=self.check_gate,
            refuse_size=self.refuse_size,
        )
        self.forward = PrivateForward(self.groups, functools.partial(gate_type, self.rules))
        self.attachment: object = None
        self.trial: Trial | None = None
        self.place_trial: PlaceTrial | None = None
        self.example: ExampleTrial | None = None
        self.wants_trials = False
        self._refusal = refusal
        self._task = -1
        self._is_called = self._has_warned = self.is_past_calls = False
        self._in_backward = False
        self._expected_size: int | None = None
        self._arrived: set[int] = set()
        self._arrived_generation: int | None = None
        self._summing: Gate | None = None
        step.attach(self)

    def attach(self, attachment: object) -> None:
        """Set the changes that make_private made to the model."""
        self.attachment = attachment

    def try_first(
        self, trial: Trial | None, place_trial: PlaceTrial | None, example: ExampleTrial | None
    ) -> None:
        """Set the trials of the loader's microbatches and of a public batch."""
        self.trial, self.place_trial, self.example = trial, place_trial, example
        if place_trial is not None:
            place_trial.attach(self._differentiate_places)

    @property
    def recording(self) -> Recording | None:
        """The recording of the current trial; None if no trial runs."""
        found = None if self.example is None else self.example.recording
        return found or (None if self.trial is None else self.trial.recording)

    @property
    def slots(self) -> dict[int, tuple[int, int]]:
        """Parameter ids -> (group, position in the group)."""
        return {
            id(parameter): (number, position)
            for number, group in enumerate(self.groups)
            for position, parameter in enumerate(group.parameters)
        }

    @contextmanager
    def call(self, sizes: frozenset[int]) -> Iterator[bool]:
        """See `PrivateForward.call`."""
        if torch.is_grad_enabled():
            refuse_anomaly_mode()
        with self.step.noting_refusals(), self.forward.call(sizes) as is_outermost:
            if is_outermost:
                self._is_called |= torch.is_grad_enabled()
                self._rest()
            yield is_outermost

    def begin_microbatch(self, samples: int, units: Units | None) -> None:
        """Begin a microbatch. If rows are packed, keep only `units` of this rank's tokens."""
        context = self.ranks.context
        if units is not None and not units.are_rows and context is not None:
            (own,) = Layout(units.shape[1], world_size(context)).chunks(rank_in(context))
            units = units.columns(own.start, own.start + own.length)
        self.forward.begin_microbatch(samples, units)
        self._is_called = False

    def _rest(self) -> None:
        """Set the mode and the watches of the next backward that trains."""
        trial, recording, watches = self.trial, self.recording, self.proof.resting
        if recording is not None:
            watch = recording.backward if recording.had_backward else recording.watch()
            self._run = BackwardRun("prove", () if watch is None else (watch,))
            return
        places = self.place_trial
        if places is not None and places.is_running and self.loss_reduction is not None:
            watch_of_run = places.gradients
            self._run = BackwardRun("prove", () if watch_of_run is None else (watch_of_run,))
            return
        held = None if trial is None else trial.held_backward
        if trial is not None and held is not None and self.is_compared:
            text = trial.of_gradients(self.loss_reduction)
            watches = (ComparedBackward(self.proof, *held, text, trial.restart),)
        if places is not None:
            watches = (*watches, *places.of_training(self._refuse_places))
        self._run = BackwardRun(watches=watches)

    def _refuse_places(self, refusal: str) -> None:
        self.proof.refuse(self._of_places(refusal))

    def _of_places(self, refusal: str | None) -> str | None:
        if refusal is not None and self.trial is not None:
            # Restart the trial, so that a loop that catches this error gets the error again.
            self.trial.restart(refusal)
        return refusal

    @property
    def may_replay(self) -> bool:
        """Whether no test records or compares this forward or its backward."""
        run, trial = self._run, self.trial
        is_tried = trial is not None and (trial.decides or trial.is_by_sample)
        is_watched = run.mode != "clip" or run.watches != self.proof.resting
        is_seen = self.forward.rows is not None or self.recording is not None
        return self.proof.is_settled and not (is_tried or is_watched or is_seen)

    @property
    def is_compared(self) -> bool:
        """Whether the backward is compared with the backward of a trial."""
        is_alone = self.proof.group is None
        return self.trial is not None and self.trial.compares_gradients(is_alone=is_alone)

    def _end_trial(self) -> None:
        # If a batch runs row by row, each row has a backward, and `record_row` compares it.
        if self.trial is not None and not (self.trial.is_altered or self.trial.is_by_sample):
            self.trial.finish()

    def _end_of_loop(self) -> None:
        self._end_trial()
        self.step.end_backward()

    def record(self, losses: Tensor) -> bool:
        """If an isolation test (trial) runs, record the losses' backward and return True."""
        recording = self.recording
        if recording is None:
            return False
        self.step.begin_trial()
        recording.hold(losses)
        if recording.has_rows and not self._is_seen(losses, recording.watch()):
            recording.drop_backward()
        return True

    def record_place(self, losses: Tensor) -> None:
        """Record the backward of a trial in which samples are in other rows."""
        assert self.place_trial is not None
        if losses.requires_grad and (losses.ndim or not self.place_trial.take_scalar(losses)):
            self._differentiate_places([losses], [self._seed(losses)])

    def _differentiate_places(self, outputs: list[Tensor], grads: list[Tensor]) -> None:
        """Record this backward for the trial; checkpointed layers recompute without dropout."""
        watch = None if self.place_trial is None else self.place_trial.gradients
        if watch is None:
            return
        assert self.place_trial is not None
        try:
            with self.only_watched(watch), self.place_trial.evaluating():
                could_run = differentiate(self, outputs, grads, watch, keeps_graph=False)
        except CheckpointError:  # recomputed dropout drew other values
            could_run = False
        if not could_run:
            watch.values.clear()

    def record_row(self, loss: Tensor) -> None:
        """Like `record`, for the loss `[1]` of one row of a batch that runs row by row."""
        if self.recording is not None:
            self.step.begin_trial()
            watch = self.recording.watch_row()
            if loss.requires_grad and not self._is_seen(loss, watch):
                self.recording.rows[-1] = None

    def _is_seen(self, losses: Tensor, watch: WatchedRows) -> bool:
        """Record a backward in `watch`, without clipping; return whether it could run."""
        with self.only_watched(watch):
            seeds = [self._seed(losses)]
            return differentiate(self, [losses], seeds, watch, keeps_graph=False)

    # Backward

    def backward(self, losses: Tensor) -> None:
        """Run the backward of losses [B], or of a scalar if loss_reduction is declared."""
        self._in_backward = True
        self._expected_size = losses.shape[0] if losses.ndim else None
        self._rest()
        try:
            self.rules.refuse_coarse_use(losses)
            self._begin(losses if losses.ndim else None)
            gates = list(self.forward.state.gates.values())
            twice = len(self.groups) == 1 and any(g.shapes and g.plan().is_ghost for g in gates)
            twice, proving = self._meet(losses, twice, self._wants_proof(self._expected_size))
            proving &= not self.is_compared
            seed = self._seed(losses)
            if proving:
                self._prove([losses], [seed], len(losses))
            if twice:
                self._backward_twice(losses, seed, gates[0])
            else:
                torch.autograd.backward(losses, seed)
            self._is_called = False
            if not self._arrived:
                raise PrivateRefusal(
                    "losses did not reach any private layer: no parameter got a gradient. Compute "
                    "losses from the output of the model given to make_private, with gradients on"
                ) from None
        except BaseException as error:
            self.discard()
            if isinstance(error, RuntimeError):
                refuse_for_memory(error, self.forward.batch_hint)
            raise
        finally:
            self._end_trial()
            self._rest()
            self._summing = None
            self._in_backward = False
            self._expected_size = None
        self.step.end_backward()

    def _seed(self, losses: Tensor) -> Tensor:
        """Return the gradient of the losses, with which the backward begins."""
        seed = torch.ones_like(losses)
        if losses.ndim:  # A loss that is not finite may have finite gradients in some groups.
            seed = seed.masked_fill(~losses.detach().isfinite(), 0)
        return seed / max(1, losses.numel()) if self.loss_reduction == "mean" else seed

    @property
    def ranks(self) -> Ranks:
        """This process and its peers."""
        return self.step.sums.ranks

    @property
    def meeting(self) -> ProcessGroup | None:
        """The process group whose ranks exchange gradients in the backward, or None."""
        return self.ranks.everyone if self.step.sums.is_sharded else self.ranks.context

    def _meet(
        self, losses: Tensor | None, twice: bool = False, proving: bool = False
    ) -> tuple[bool, bool]:
        """Agree with the other ranks on the next backward; raise if their backwards differ.

        Args:
            losses: the losses of the next backward; None inside the backward of a scalar loss.
            twice: whether this rank would run the two backwards of ghost clipping.
            proving: whether this rank would run an isolation test of this batch.

        Returns:
            (twice, proving), each True if it is True on some rank.

        Raises:
            ValueError: on all ranks, if the backwards differ; the message names the difference.
            RuntimeError: on all ranks, if the model changed a value that is never released.
        """
        ranks, group = self.ranks, self.meeting
        with self.step.dropping():
            batch, units = self.step.tracker.place(), self.forward.units
            leading = (self.forward.state.batch_size,) if units is None else units.shape
            refusal = self._refusal(losses, batch or self.forward.number, leading)
            if losses is None and refusal is None and self.place_trial is not None:
                refusal = self._of_places(self.place_trial.refused)
            if group is None and refusal is not None:
                raise PrivateRefusal(refusal) from None
        is_new = self.trial is not None and self.trial.has_new_path()
        if not self.step.sums.is_sharded and ranks.data is not None:
            self.wants_trials |= is_new
            is_new = False
        if group is None:
            if is_new:
                self.try_next()
            return twice, proving
        operation = "engine.backward"
        # If modules or their order differed, gradients of different parameters would be added.
        same = {
            "(logical batch, microbatch)": self.step.tracker.place(),
            "max_grad_norm": self.step.sums.bound,
            "modules that ran, and how often": list(self.forward.state.used.items()),
        }
        samples = {"number of samples": self.forward.state.batch_size}
        if group is ranks.context:
            same |= samples
        flags = [int(twice), int(proving), int(is_new)]
        with self.step.dropping():
            rows = agree(operation, same, group, flags, refusal)
        if any(row[2] for row in rows):
            self.try_next()
        if group is not ranks.context:
            agree(operation, samples, ranks.context)
        return any(row[0] for row in rows), any(row[1] for row in rows)

    def try_next(self) -> None:
        """Run trials on the next microbatches, on all ranks."""
        self.wants_trials = False
        if self.trial is not None:
            self.trial.schedule.try_next()

    def _backward_twice(self, losses: Tensor, seed: Tensor, gate: Gate) -> None:
        # The gates of the second backward multiply gradients by the factors. If losses were
        # multiplied instead, each layer would round differently, beyond the bound.
        first = FirstBackward(gate.device)
        self._run = BackwardRun("norms", (*self._run.watches, first))
        (handles,) = self.forward.state.handles.values()
        grads = grad_before_backward([losses], handles, [seed])
        with self.step.dropping():
            gate.compare(grads)
        squares = gate.finish_norms(grads)
        gate.reset()
        if squares.shape != losses.shape:
            self.refuse_size(gate.batch_size, losses.shape[0])
        allowed = first.allowed(squares)
        keep = self.step.rows.of(allowed)
        factors = clip_factors(allowed, gate.bound, self.clip_function, keep=keep)
        self.statistics.note(squares, factors)
        del grads
        self._summing = gate
        watches = (SecondBackward(first, allowed, self.meeting),)
        self._run = BackwardRun("sum", watches, factors, norms_again=not first.exact)
        try:
            torch.autograd.backward(losses, seed)
        except BackwardsDiffer:
            self.planner.avoid_ghost()
            raise

    # Proof

    def begin_proof(self, size: int) -> bool:
        """Return whether an isolation test repeats this call, which has at most `size` samples."""
        mark = self.step.tracker.current
        if mark is not None and mark.is_trial:
            return False
        return self.proof.begin_forward(size, new_pass=self.forward.state.is_over)

    def compare(self, rows: ForwardRows) -> None:
        """Compare the layers' inputs in this call with the inputs that the trial recorded."""
        trial = self.trial
        assert trial is not None
        refusal, samples = trial.compare_rows(rows)
        try:
            self.proof.forward_repeated(rows.layers, samples, refusal)
        except PrivateRefusal as error:
            trial.restart(str(error))
            self.discard()
            raise
        # The trial may compare fewer samples from now on, and a loop's own loss.backward() begins
        # with no `_rest`.
        self._rest()

    def expect_scalar(self, outputs: Any, size: int, inputs: Sequence[Tensor]) -> Any:
        """If the loss is a scalar, wrap the outputs: isolation tests then see their gradients."""
        if self.loss_reduction is None or not self.proof.is_on:
            return outputs
        if self.place_trial is not None and self.place_trial.is_running:
            # The backward must continue below the outputs if the loop needs gradients of inputs
            # (FGSM), or if FSDP2 gathers parameters when the output's gradient arrives.
            goes_on = self.step.sums.is_sharded or any(x.requires_grad for x in inputs)
            return outputs if goes_on else self.place_trial.ends_at(outputs)
        return self.proof.cross(outputs, size, self, is_altered=self.recording is not None)

    def _wants_proof(self, size: int | None) -> bool:
        return self.proof.wants_backward(self.forward.state.used, size)

    def _prove(self, outputs: Sequence[Tensor], seeds: Sequence[Tensor], size: int) -> None:
        """Run an additional backward, with which the training backward will be compared."""
        watch = self.proof.prove(self, outputs, seeds, size, self.step.rows.mask_of(size))
        if watch is not None:
            places = self.place_trial
            own = () if places is None else places.of_training(self._refuse_places)
            self._run = BackwardRun(watches=(watch, *own))

    def crossed(self, outputs: Sequence[Tensor], grads: Sequence[Tensor], size: int) -> None:
        """Run a scalar loss's isolation test, from the gradients `[B, ...]` of the outputs."""
        if self._expected_size is not None:
            return  # For losses [B], `_prove` gives each loss a weight instead.
        with self.step.dropping():
            wanted = self._wants_proof(size) and not self.is_compared
            rows = gather_rows([int(wanted)], self.meeting, "the proof of the first batch")
            if any(row[0] for row in rows):
                self._prove(outputs, grads, size)

    def refuse_reduction(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], size: int
    ) -> None:
        """Test a declared reduction; see `ProvableBackward`."""
        if self._expected_size is not None:
            return
        assert self.loss_reduction is not None
        with self.step.dropping():
            self.proof.refuse(refuse_weights(outputs, grads, size, self.loss_reduction))

    @property
    def is_compiled(self) -> bool:
        """See `dpflash.isolation.backward_rows.ProvableBackward`."""
        return self.forward.is_compiled

    def handles(self) -> Iterator[tuple[tuple[int, int], str, bool, Tensor]]:
        """See `dpflash.isolation.backward_rows.ProvableBackward`."""
        for index, gate in self.forward.state.gates.items():
            for position, handle in enumerate(self.forward.state.handles[index]):
                yield (index, position), gate.layer_of(position), gate.is_dense(position), handle
        for index, handles in enumerate(self.forward.prepared_handles):
            for position, handle in enumerate(handles):
                layer = self.rules.layer_of(self.groups[index].parameters[position])
                yield (index, position), layer, True, handle

    @contextmanager
    def only_watched(self, watch: Watch) -> Iterator[None]:
        """See `dpflash.isolation.backward_rows.ProvableBackward`."""
        held, self._run = self._run, BackwardRun("prove", (watch,))
        try:
            yield
        finally:
            self._run = held
            for gate in self.forward.state.gates.values():
                gate.reset()

    def _begin(self, losses: Tensor | None = None) -> None:
        refuse_anomaly_mode()
        self._warn_uncalled()
        if self.trial is not None:
            self.trial.begin_backward()
        self._arrived = set()
        self._arrived_generation = None
        self._task = -1
        self.statistics.begin_backward(losses)
        self.step.begin_backward()

    def _warn_uncalled(self) -> None:
        self.is_past_calls = not self._is_called or self.forward.state.is_past_calls
        if not self.is_past_calls or self._has_warned or not self.proof.is_on:
            return
        self._has_warned = True
        warn(
            "losses were computed without a call of the private model itself: its layers were "
            "called one by one, by one of its methods, or through your own torch.compile. So "
            "dpflash does not check the order of rows, random masks, or whether the forward mixes "
            "samples; see engine.verified. Call model(x), and use trained parameters in its "
            "forward only; to compile it, pass make_private(optimize='aggressive')",
        )

    def check_gate(self, gate: Gate) -> None:
        """Check a gate before it clips; raise if its sum would not be bounded."""
        if not self._in_backward:
            if self.loss_reduction is None:
                raise RuntimeError(
                    "loss.backward() was called on a private model. Call engine.backward(losses) "
                    "with one loss per sample, or declare make_private(..., loss_reduction='mean' "
                    "or 'sum') if the scalar is the mean or sum of such losses. For gradients "
                    "of inputs alone, as in FGSM, call torch.autograd.grad(losses.sum(), x). "
                    f"{STEP_OF_ANOTHER}. {TOGETHER}. After the private training call "
                    "engine.detach(model)"
                )
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._begin()
                self._meet(None)
                self._task = task
                self.step.tracker.before_backward(gate.batch_size)
                torch.autograd.Variable._execution_engine.queue_callback(self._end_of_loop)
        elif self._expected_size is None and not self._arrived:
            self.step.tracker.before_backward(gate.batch_size)
        if self._expected_size is not None and gate.batch_size != self._expected_size:
            self.refuse_size(gate.batch_size, self._expected_size)
        if id(gate) in self._arrived:
            raise RuntimeError(
                "the clipping gate ran twice in one backward, so parts of a sample's gradient "
                "would be clipped separately. Use non-reentrant checkpointing and a single "
                "backward"
            )
        mixed = self._arrived_generation not in (None, gate.generation)
        if mixed or (self._run.mode == "sum" and gate is not self._summing):
            raise PrivateRefusal(
                f"{self.forward.misfit}losses come from more than one forward, or from an earlier "
                "forward; call engine.backward after each forward, and give every layer inputs "
                f"whose first dimension is the batch. {ALL_ROWS}. {SHARED}"
            ) from None
        self.step.sums.refuse_inexact(gate.batch_size)
        self._arrived.add(id(gate))
        self._arrived_generation = gate.generation
        self.forward.finish()

    def refuse_size(self, gate_size: int, loss_size: int) -> None:
        why = (
            f"{misfit}Give every layer inputs whose first dimension is the batch, and one loss "
            "per sample"
            if (misfit := self.forward.misfit)
            else "losses has another number of entries than the batch that the model saw: give "
            "one loss per sample of the forward, batch first. If a loop calls the model on one "
            "row x[None] at a time, call engine.backward(loss_fn, batch) with the loss of one row"
        )
        raise PrivateRefusal(
            f"{why}. {ALL_ROWS}. {SHARED}",
            losses=loss_size,
            batch_size=gate_size,
        ) from None

    def discard(self) -> None:
        """Drop the logical batch; see `PrivateStep.discard`."""
        self.step.discard()

    def end_batch(self, *, parameters_change: bool) -> None:
        """Note that the logical batch was dropped, or that the parameters are about to change."""
        self._rest()
        self.forward.end_batch(parameters_change=parameters_change)
