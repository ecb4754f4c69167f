"""PrivateRun: the objects that train a private model, from `make_private` to `detach`."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ._validate import counted, positive_int
from .checkpoint import sharded
from .checkpoint import state as checkpoint
from .clipping.backward import PrivateBackward
from .clipping.explain import ClippingGroups, ClippingPlan, describe_groups, explain_plan
from .clipping.precision import without_autocast
from .config import Settings
from .distributed.validate import release_ranks
from .grad_rules import PrivateModule
from .grad_rules.convert import detach as make_plain
from .isolation.place import OF_DOCUMENTS, OF_ROWS, PlaceTrial
from .isolation.rows import entries_of, exchanged
from .isolation.trial import Trial
from .losses import NAMES_OF_CRITERIA, of_criterion, require_known
from .opacus_calls import (
    Scheduler,
    refuse_keywords_of,
    require_own,
    require_states,
    restore_schedulers,
    with_schedulers,
)
from .optimize.wrapper import ForwardWrapper
from .optimizer import PrivateOptimizer, joined, listed
from .packing import PackedBatch
from .privacy.card import versions
from .privacy.keys import RunKeys, place_of
from .privacy.public_facts import PublicFacts
from .privacy.spending import Spending
from .refusal import PrivateRefusal, PrivateWarning, warn
from .sampling.loader import PrivateDataLoader
from .sampling.tracker import OF_TOKENS, SECOND
from .step import PrivateStep
from .verification.attributes import OwnAttributes
from .verification.digests import is_deterministic, row_digests
from .verification.nested import tensors_of

# loss_fn(model, sample) -> the sample's loss.
LossFunction = Callable[[nn.Module, Any], Tensor]

# Optimizer attributes that users may set between releases, and that a checkpoint restores.
OF_STEPS = ("noise_multiplier", "max_grad_norm", "expected_batch_size")

# The largest number of parameters that `trials` names.
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class PrivateRun:
    """A private model with the objects that train it and account for its releases.

    Attributes:
        settings: the arguments of `make_private`.
        model: the private model.
        loader: the private data loader, which samples the logical batches.
        step: the current logical batch: its clipped sums, noise and charge.
        optimizers: the wrapped optimizers, whose `step` releases the logical batch.
        backward: the clipped backward of the model's layers.
        wrapper: the wrapper of the model's forward.
        trial, place_trial: isolation tests with other contents, and with other rows; or None.
        keys, spending: the engine's, which keeps them after `detach`.
        as_folder: whether checkpoints are folders, not single files.
    """

    settings: Settings
    model: nn.Module
    loader: PrivateDataLoader
    step: PrivateStep
    optimizers: list[PrivateOptimizer]
    backward: PrivateBackward
    wrapper: ForwardWrapper
    trial: Trial | None
    place_trial: PlaceTrial | None
    keys: RunKeys
    spending: Spending
    as_folder: bool

    def leave_ranks(self) -> None:
        """Continue in a forked child process, which is not a rank and already has new keys."""
        self.loader.load_state_dict(self.loader.state_dict(), key=self.keys.sampling)
        self.step.leave_ranks()
        self.wrapper.leave_compiler("the process was forked")

    # Losses

    def run_backward(self, losses: Tensor | LossFunction, batch: Any = None) -> Tensor | None:
        """See `PrivacyEngine.backward`."""
        given = losses
        if isinstance(losses, nn.modules.loss._Loss):
            require_known(losses)
            is_pair = isinstance(batch, tuple | list) and len(batch) == 2
            if not is_pair or not all(isinstance(x, Tensor) for x in batch):
                raise ValueError(
                    "engine.backward(criterion, batch): expected the pair (outputs, targets) of "
                    "the criterion's arguments; pass (model(x), y)"
                )
            losses = of_criterion(losses, *batch)
        elif not isinstance(losses, Tensor) and callable(losses):
            return self._run_by_sample(losses, batch)
        if self.trial is not None and self.trial.is_by_sample:
            raise ValueError(
                "engine.backward(losses) after engine.backward(loss_fn, batch): trials no longer "
                "compare the forwards of this run; pass the function for each of its batches"
            )
        self._run_losses(losses)
        return None if losses is given else losses.detach()

    def _run_losses(self, losses: Tensor) -> None:
        step = self.step
        with step.noting_refusals():
            losses = self._losses_of_samples(losses)
            if losses.ndim == 1:
                step.tracker.before_backward(losses.shape[0])
                if losses.shape[0] == 0 and step.sums.ranks.everyone is None:
                    # With several ranks, an empty batch still takes part in the communication.
                    step.end_backward()
                    return
            with without_autocast(losses.device.type):
                if not self._is_tried(losses):
                    self.backward.backward(losses)

    def _run_by_sample(self, loss_fn: LossFunction, batch: Any) -> Tensor:
        """Run forward and backward one row at a time, and return the losses `[B]`."""
        tracker, trial = self.step.tracker, self.trial
        mark = tracker.current
        if batch is None:
            raise ValueError(
                "engine.backward(loss_fn, batch): expected the loader's batch; "
                "loss_fn(model, sample) gets one row of it at a time"
            )
        if any(x.requires_grad for _, x in tensors_of(batch)):
            raise ValueError(
                "engine.backward(loss_fn, batch): the batch holds outputs of the model. Pass the "
                "losses [B] that a function or criterion of your own makes from them, as in "
                'engine.backward(F.cross_entropy(model(x), y, reduction="none")). Or replace '
                f"loss_fn by a criterion object of torch: {NAMES_OF_CRITERIA}"
            )
        if mark is None or mark.units is not None or self.backward.loss_reduction is not None:
            raise ValueError(
                "engine.backward(loss_fn, batch): takes batches of the private loader with a row "
                "for each sample, and needs loss_reduction=None; pass the samples' losses instead"
            )
        recording = self.backward.recording
        with self.step.noting_refusals():
            tracker.before_rows()
            given = [x for _, x in tensors_of(batch) if x.ndim]
            self.loader.seen.check(given)
        digests = [row_digests(x) for _, x in entries_of(batch, mark.size)]
        if trial is not None:
            trial.take_by_sample()
            if self.place_trial is not None:
                self.place_trial.take_by_sample()
            self._refuse_tried(trial.refusal_of_batch(digests))
        if recording is not None:
            if recording.had_backward:
                raise RuntimeError(SECOND)
            recording.take_apart(digests)
        kept, losses = OwnAttributes(self.model.named_modules()), []
        assert self.wrapper.unchanged is not None
        contents = self.wrapper.unchanged.allowed_contents()

        def loss_of(row: int) -> Tensor:
            kept.restore_copies()
            contents.restore()
            sample, has_rows = exchanged(batch, [row], mark.size)
            if not has_rows:
                raise PrivateRefusal(
                    "engine.backward(loss_fn, batch): cannot tell which parts of the batch belong "
                    "to one sample: a list in the batch has as many entries as there are samples, "
                    "but each entry also has that many rows. Let collate_fn return a list of "
                    "dicts, one for each sample, or pass the samples' losses"
                ) from None
            loss = loss_fn(self.model, sample)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise PrivateRefusal(
                    "loss_fn(model, sample) did not return the loss of one sample: expected a "
                    "tensor of one number",
                    loss=type(loss).__name__,
                ) from None
            losses.append(loss.detach().reshape(()))
            return loss.reshape(1)

        try:
            for row in range(mark.size):
                if mark.is_trial:
                    self.step.begin_row()
                    own = loss_of(row)
                    with without_autocast(own.device.type):
                        self.backward.record_row(own)
                    continue
                with tracker.row(row):
                    own = loss_of(row)
                    self._refuse_tried(None if trial is None else trial.refusal_of(row, own))
                    self._run_losses(own)
        except BaseException:
            self.backward.discard()
            raise
        finally:
            kept.restore()
            contents.restore()
        found = torch.stack(losses)
        if mark.is_trial:
            self._is_tried(found)
        elif trial is not None:
            trial.finish()
        return found

    def _refuse_tried(self, refusal: str | None) -> None:
        try:
            self.backward.proof.refuse(refusal)
        except RuntimeError as error:
            # Raise again in the next batch if the loop catches this error.
            if self.trial is not None:
                self.trial.restart(str(error))
            self.backward.discard()
            raise

    def _losses_of_samples(self, losses: Tensor) -> Tensor:
        """Check `losses`. Return one loss per sample, or the scalar of a declared reduction."""
        is_tensor = isinstance(losses, Tensor)
        dims = (1,) if self.backward.loss_reduction is None else (0, 1)
        if not is_tensor or losses.ndim not in dims:
            raise PrivateRefusal(
                "losses is not one loss per sample: expected a tensor [B] in each batch. Use "
                "dpflash.losses, or reduction='none' (then losses.flatten(1).mean(1) if its shape "
                "is [B, ...]), also in compute_loss of a DPTrainer. In your own loop, a scalar is "
                "accepted only if it is a mean or sum over samples, such as a classifier's loss, "
                "and make_private(loss_reduction='mean' or 'sum') declares it. The loss of a "
                "Hugging Face language model is a mean over tokens, so it is not accepted",
                losses=tuple(losses.shape) if is_tensor else type(losses).__name__,
            ) from None
        units = self.backward.forward.units
        if units is not None and units.are_rows and losses.ndim == 1:
            has_pairs = self.loader.has_pairs
            if losses.shape[0] == units.positions:
                losses = units.mean(losses)
            elif not (has_pairs and losses.shape[0] == units.size):
                raise PrivateRefusal(
                    "losses has another number of entries than the batch has rows: pass one loss "
                    "for each row, padding rows included, in the loader's order"
                    + (", or one for each pair" if has_pairs else "")
                    + f". {OF_TOKENS}",
                    losses=losses.shape[0],
                    rows=units.positions,
                ) from None
        if not losses.requires_grad and (
            losses.numel() or self.step.sums.ranks.everyone is not None
        ):
            raise PrivateRefusal(
                "losses do not require grad, so no private layer gets a gradient: compute losses "
                "from the model's output outside of torch.no_grad() and without detach(). If no "
                "row of a batch should count, give its losses the weight 0"
            ) from None
        return losses

    def _is_tried(self, losses: Tensor) -> bool:
        """Return True for the losses of a trial, which has no backward; else check the losses."""
        trial, place_trial = self.trial, self.place_trial
        if place_trial is not None and place_trial.is_running:
            self.step.begin_trial()
            if losses.ndim:
                place_trial.take(losses)
            self.backward.record_place(losses)
            self._refuse_tried(None)  # raises, before the next forward, if another rank has ended
            return True
        if self.backward.record(losses):
            return True
        if trial is not None and trial.decides and not trial.is_by_sample:
            self._refuse_tried(trial.refusal(losses))
        # Check the place trial last, since the other errors are more precise.
        if place_trial is not None:
            if place_trial.waits and losses.ndim:
                place_trial.take(losses)
            self._refuse_tried(place_trial.refused)
        return False

    # Reports

    def remaining_steps(self) -> int | None:
        """See `PrivacyEngine.remaining_steps`."""
        return self.step.charge.remaining_steps(self.step.options.noise_multiplier)

    def groups(self) -> ClippingGroups:
        """Return the clipping groups of the private model: parameters, bounds and sensitivity.

        Returns:
            A sequence of `GroupInfo`, with the total sensitivity; str() returns a table.

        Raises:
            ValueError: no model is private.
        """
        bound = self.step.options.max_grad_norm
        return describe_groups(self.backward.groups, self.backward.names, bound)

    def plan(self) -> ClippingPlan:
        """Return how each matrix parameter's clipped gradient is computed, and why.

        Costs are for the shapes of the last forward, so run the model once before.

        Returns:
            A sequence of `PlannedUse`; str() returns a table.

        Raises:
            ValueError: no model is private, the private model has not run yet, or it was compiled
                by optimize="aggressive", which plans no layer.
        """
        if self.wrapper.optimization.compiled:
            raise ValueError(
                "plan() with optimize='aggressive': every layer of the compiled model stores its "
                "per-sample gradients, so nothing is planned; engine.optimization states their "
                "memory. Pass optimize='balanced' for a planned model"
            )
        parallel = getattr(self.model, "context_parallel", None)
        context = "" if parallel is None else parallel.plan()
        return explain_plan(self.backward, self.public, self.wrapper.attention, context)

    @property
    def public(self) -> PublicFacts:
        """Public facts about the batches."""
        plan = self.loader.plan
        return PublicFacts(
            slots=self.loader.slots,
            others=self.spending.has_foreign_batches or self.loader.tracker.signalled,
            lengths=str(self.loader.lengths),
            dataset_size=plan.dataset_size,
            is_declared=plan.has_public_size,
            unit=plan.unit_in_words.replace(plan.unit, self.spending.unit or plan.unit, 1),
            packing=plan.packing,
            is_exact=self.settings.privacy.exact is True,
            noise=f"{plan.mechanism!r}, {counted(plan.bands - 1, 'tensor')} of 8 bytes an element"
            if plan.bands > 1
            else None,
        )

    def report(self) -> dict[str, Any]:
        """Return the facts of a model card as plain values, without epsilon and the ledger."""
        plan, options = self.loader.plan, self.step.options
        public = self.public.as_dict()
        del public["lengths"]  # unless declared, it shows whether drawn samples differ in length
        return {
            "privacy_unit": self.public.unit,
            "sampler": self.loader.sampler_name,
            "noise_multiplier": options.noise_multiplier,
            "bands": plan.bands,
            "noise_coefficients": getattr(plan.mechanism, "coefficients", (1.0,)),
            "max_grad_norm": options.max_grad_norm,
            "clipping": self.settings.clipping,
            "sample_rate": plan.sample_rate,
            "expected_batch_size": plan.expected_batch_size,
            "public": public,
            "steps": self.step.releases,
            "versions": versions(),
            "config": {"unit": plan.unit.split(": ")[-1]},
        }

    @property
    def verified(self) -> bool | str:
        """See `PrivacyEngine.verified`."""
        verified, trial = self.backward.proof.verified, self.trial
        if trial is not None and trial.is_by_sample:
            return "by construction" if trial.has_compared else "pending"
        if verified is True and self.backward.is_past_calls:
            return "gradients"
        if verified is not True or trial is None or trial.has_compared or not trial.has_begun:
            return verified
        return "model" if trial.is_impossible else "pending"

    @property
    def trials(self) -> str:
        """See `PrivacyEngine.trials`."""
        trial, place_trial, facts = self.trial, self.place_trial, self.public
        if trial is None:
            return "There were no trials: make_private(verify_first_batch=False)."
        by_sample = trial.is_by_sample
        what = "losses and gradients" if by_sample else "losses, layers' inputs and gradients"
        how = (
            "bit for bit"
            if is_deterministic(next(self.model.parameters()).device) and not by_sample
            else "up to rounding"
        )
        said = [
            f"In trials the {what} of half of the samples were compared, {how}, with the same "
            "samples' values among other samples."
            if trial.has_compared
            else "No trial has compared samples so far."
        ]
        declared = self.backward.loss_reduction is not None
        compared = "Gradients" if declared else "Losses"
        closely = "eps ** (2 / 3)"
        if declared:
            closely = "a thousandth for all samples together, or in 16 bit to sqrt(eps) for each"
        for kind in OF_ROWS if facts.packing is None else OF_DOCUMENTS:
            if place_trial is None or kind not in place_trial.compared:
                said.append(f"No batch was tried {kind.how}.")
            else:
                said.append(f"{compared} {kind.how} were compared, to {closely}.")
        if facts.others or trial.is_impossible:
            said.append(
                "Batches that are not from the loader, are from BatchMemoryManager, or have no "
                "entry for each sample had no trials: there only the model was tested."
            )
        if self.verified == "pending":
            said.append(self._pending())
        return " ".join(said)

    def _pending(self) -> str:
        is_few, slots = self.backward.proof.waiting
        if is_few or not slots:
            return "Too few samples were in one batch with other samples so far."
        groups, names = self.backward.groups, self.step.sums.names
        missing = sorted(names[groups[index].parameters[position]] for index, position in slots)
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        return (
            f"engine.verified is pending, because the gradients of {shown} were zero so far, and "
            "zeros test nothing. Remove or freeze a parameter whose gradient is always zero, such "
            "as a bias in a difference of two outputs."
        )

    def diagnostics(self) -> dict[str, Any]:
        """Return numbers for debugging. PRIVATE: no epsilon covers them; do not release them.

        Returns:
            A dict with the keys
            per_sample_norms: gradient norms of the samples in the last backward, without padding
            rows (with clipping="per_layer", the norms of the last group);
            clip_fraction: fraction of all samples so far that were clipped;
            nonfinite_samples: number of samples so far that contributed zero because their loss
            or gradient was NaN or infinite, for example because of a label out of range;
            bad_entries: number of samples so far that contributed zero because they could not be
            read or collated, plus the number of entries for which unit_of returns no unit.
        """
        statistics = self.backward.statistics
        squares = statistics.squared_norms
        return {
            "per_sample_norms": None if squares is None else squares.sqrt(),
            "clip_fraction": statistics.clipped_samples / max(statistics.seen_samples, 1),
            "nonfinite_samples": statistics.nonfinite_samples,
            "bad_entries": self.loader.bad_entries,
        }

    def prepare(self, batch: int | PackedBatch) -> None:
        """Prepare the model for a batch that did not come from the loader.

        Call this before the forward of a packed batch, or of a model under torch.compile.

        Args:
            batch: the packed batch (not divided among context ranks), or the number of rows.
        """
        if isinstance(batch, PackedBatch):
            self.backward.begin_microbatch(batch.max_documents, batch.units)
        else:
            positive_int(batch_size=batch)
            self.backward.forward.prepare(batch)

    # Checkpoints

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        extra: dict[str, Any] | None = None,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        """Write a checkpoint from which a later process, with any number of ranks, can resume.

        The checkpoint contains the parameters, the optimizer's state, the accountant's state, the
        noise counter and the loader's position, without an unfinished logical batch. It replaces
        an older checkpoint atomically. With a seed it contains the keys of noise and sampling.
        Only the file's owner can read it. Keep it secret, and release model.state_dict() instead.

        Args:
            path: the file; with a mesh a folder, on a file system that all ranks share. All ranks
                call this together.
            extra: plain values (numbers, strings, lists, tensors) that load_checkpoint returns;
                with a mesh, the first rank's `extra` is stored.
            module, optimizer: for compatibility with Opacus; this engine's objects or None.
            noise_scheduler, grad_clip_scheduler: Opacus' schedulers, whose state is stored too.
            checkpoint_dict: Opacus' name of extra.

        Raises:
            ValueError: extra contains values that cannot be stored; path is a folder although a
                file must be written, or the reverse; module or optimizer is not this engine's.
            RuntimeError: a buffer or a frozen parameter changed, see make_private(allow_buffers=);
                or another rank failed. An older checkpoint at path stays unchanged.
        """
        refuse_keywords_of(self.save_checkpoint, unknown)
        self._require_own(module, optimizer)
        if extra is not None and checkpoint_dict is not None:
            raise ValueError("checkpoint_dict with extra: both are the same argument; pass one")
        extra = checkpoint_dict if extra is None else extra
        theirs = {"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
        self.step.sums.ranks.run_on_all("save_checkpoint", self.model.state_dict)
        sharded.save(
            path,
            lambda: self._own_state(with_schedulers(extra, theirs)),
            model=self.model,
            optimizer=joined(self.optimizers),
            ranks=self.step.sums.ranks,
            as_folder=self.as_folder,
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Resume from a checkpoint, after the same make_private call.

        The number of ranks, and how the model is sharded over them, may differ from the run that
        wrote the checkpoint. With a mesh, path may be a file too; all ranks call this together.

        The run continues under new keys of noise and sampling, since another process may have
        resumed from the same checkpoint. A seeded run is an exception: if the ledger has no
        releases later than the checkpoint, it continues bit for bit as if not stopped.
        Each continuation is a branch with a name in the ledger. The epsilons of branches compose.
        If two ledgers contain the same release, `dpflash budget LEDGER LEDGER` counts it once.
        Releases in the ledger that are later than the checkpoint stay counted.

        Args:
            path: path of a file or folder that save_checkpoint wrote.
            module, optimizer: for compatibility with Opacus; this engine's objects or None.
            noise_scheduler, grad_clip_scheduler: Opacus' schedulers; their states are restored.

        Returns:
            The `extra` that was passed to save_checkpoint.

        Raises:
            FileNotFoundError, ValueError: the checkpoint is missing or damaged, or does not match
                the make_private call; nothing has been changed.
            RuntimeError: this engine has released steps that no ledger records, or another rank
                could not read the checkpoint.
        """
        refuse_keywords_of(self.load_checkpoint, unknown)
        self._require_own(module, optimizer)
        theirs = {"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
        where = f"path={os.fspath(path)!r}"

        def check(state: dict[str, Any]) -> None:
            shapes = sharded.shapes(self.model)
            checkpoint.check_model(where, state, shapes=shapes, optimizers=self.optimizers)
            self._check_fits(where, state)
            require_states(state["extra"], theirs)

        state = sharded.load(
            path,
            model=self.model,
            optimizer=joined(self.optimizers),
            ranks=self.step.sums.ranks,
            check=check,
        )
        self._restore(where, state)
        return restore_schedulers(state["extra"], theirs)

    def _require_own(self, module: nn.Module | None, optimizer: object) -> None:
        own = optimizer if listed(optimizer) == self.optimizers else self.optimizers
        require_own(module=(module, self.model), optimizer=(optimizer, own))

    def state_dict(self) -> dict[str, str]:
        """Return the state that `save_checkpoint` stores, without model and optimizer.

        Use it for torch.distributed.checkpoint (with `load_state_dict` it implements the Stateful
        protocol) or for your own checkpoints: save it with model.state_dict() and
        optimizer.state_dict(), and load all three. Its one value is a string, equal on all ranks.
        """
        return checkpoint.as_text(self._own_state({}))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a `state_dict()` like `load_checkpoint`, without model and optimizer.

        All ranks call this together, after the same make_private call.

        Raises:
            ValueError: state_dict is not an engine's, or does not match the make_private call;
                nothing has been changed.
            RuntimeError: this engine has released steps that no ledger records.
        """
        where, ranks = "state_dict", self.step.sums.ranks

        def read() -> dict[str, Any]:
            state = checkpoint.from_text(state_dict)
            self._check_fits(where, state)
            return state

        state = ranks.run_on_all("load_state_dict", read)
        ranks.agree("load_state_dict", place_of(state))
        self._restore(where, state)

    @property
    def _fixed(self) -> dict[str, Any]:
        """The settings of `make_private` that a resumed run must share with its checkpoint."""
        return {
            "sampling": self.loader.plan.scheme,
            "clipping": self.settings.clipping,
            "shares": [(group.name, group.share) for group in self.backward.groups],
            "clip_function": self.backward.clip_function,
        }

    def _own_state(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's contents without model and optimizer; equal on all ranks."""
        checkpoint.check_extra(extra)
        ledger, block = self.spending.ledger, self.step.charge.block.state_dict()
        return {
            "spending": self.spending.state_dict(),
            **self.keys.state_dict(),
            "releases": self.step.releases,
            "ledger_releases": None if ledger is None else ledger.releases,
            "ledger_digest": None if ledger is None else ledger.digest(),
            **{name: getattr(self.step.options, name) for name in OF_STEPS},
            "loader": self.loader.state_dict(),
            **self._fixed,
            **({} if block is None else {"block": block}),
            "extra": extra,
        }

    def _check_fits(self, where: str, state: Mapping[str, Any]) -> None:
        missing = sorted(self._own_state({}).keys() - state.keys() - {"block"})
        if missing:
            raise ValueError(
                f"{where}: another version of dpflash wrote it, without {', '.join(missing)}; "
                "load it with the version that wrote it"
            )
        checkpoint.check_fits(
            where,
            state,
            self._fixed,
            mechanism=type(self.spending.accountant).mechanism(),
            ledger=self.spending.ledger,
        )

    def _restore(self, where: str, state: Mapping[str, Any]) -> None:
        """Resume from the contents of a matching checkpoint, with or without model states."""
        step, ledger = self.step, self.spending.ledger
        spent = not self.spending.is_empty or step.releases
        if ledger is None and spent and not self.keys.knows_all(state, step.releases):
            raise RuntimeError(
                f"{where}: this engine has spent privacy already, and loading would forget these "
                "releases. Load into a new engine, right after make_private; to return to an "
                "earlier checkpoint within a run use PrivacyEngine(ledger=...)"
            )
        self.spending.load_state_dict(state["spending"])
        checkpoint.warn_of_changes(
            state,
            restored={name: getattr(step.options, name) for name in OF_STEPS},
            unchanged={name: self._fixed[name] for name in ("clipping", "clip_function")},
        )
        if "module" in state:
            sharded.put(self.model, state["module"])
            joined(self.optimizers).load_state_dict(state["optimizer"])
        releases = None if ledger is None else ledger.releases
        self.keys.load_state_dict(state, ledger_releases=releases)
        self.loader.load_state_dict(state["loader"], key=self.keys.sampling)
        options = {name: state[name] for name in ("releases", *OF_STEPS)}
        step.resume(**options, block=state.get("block"))


class Attachment:
    """Links the layers of a private model to its run and, by a weak reference, to its engine.

    Args:
        run: the model's run.
        detach: the bound method `engine.detach`.
    """

    def __init__(self, run: PrivateRun, detach: Callable[[nn.Module], object]) -> None:
        self._run = run
        self._detach = weakref.WeakMethod(detach)

    @property
    def is_orphan(self) -> bool:
        """Whether the engine no longer exists."""
        return self._detach() is None

    def give_back(self) -> str | None:
        """Make the model ordinary again, drop an open batch, and refuse further releases.

        Return the reason why the model must not be released, or None.
        """
        run = self._run
        run.loader.tracker.abandon()
        assert run.wrapper.unchanged is not None
        refusal = run.wrapper.unchanged.leaving()
        if refusal is not None:
            warn(
                f"the detached model is not for release: {refusal}",
                PrivateWarning,
            )
        run.wrapper.remove()
        make_plain(run.model)
        _releases[run.model] = _releases.get(run.model, 0) + run.step.releases
        release_ranks(run.model)
        for optimizer in run.optimizers:
            optimizer.release_original()
        run.step.close()
        return refusal

    def refuse_use(self) -> None:
        """Raise if another engine must not take the model over.

        Raises:
            ValueError: the model's engine still exists, and has no release yet or an open batch.
        """
        step = self._run.step
        if not self.is_orphan and (step.is_open or not step.releases):
            raise ValueError(
                "module is private already: another PrivacyEngine uses it and has "
                + ("a batch to release" if step.is_open else "released nothing yet")
                + ". Call engine.detach(model) of that engine first"
            )

    def hand_over(self) -> None:
        """Detach the model for another engine, even if the model's own engine still exists."""
        detach = self._detach()
        if detach is None:
            self.give_back()
        else:
            detach(self._run.model)


def attachments_of(module: nn.Module) -> list[Attachment]:
    """Return the attachments of all private layers of a model."""
    layers = (m for m in module.modules() if isinstance(m, PrivateModule))
    found = dict.fromkeys(layer._dpflash.backward.attachment for layer in layers)
    return [attachment for attachment in found if isinstance(attachment, Attachment)]


def take_over(module: nn.Module) -> int:
    """Detach a model if it is private, and return the number of its releases so far.

    Raises:
        ValueError: another engine still uses the model; nothing has been changed.
    """
    attachments = attachments_of(module)
    for attachment in attachments:
        attachment.refuse_use()
    for attachment in attachments:
        attachment.hand_over()
    return sum(_releases.get(m, 0) for m in module.modules())


# The number of releases of each model that was detached.
_releases: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
