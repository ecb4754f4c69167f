"""PrivacyEngine: wires model, optimizer, loader and accountant together."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import DataLoader

from dpflash.accounting import Accountant, Interval

from ._validate import positive_int, probability
from .check import CheckReport, run_check
from .check.compatible import get_compatible_module, is_compatible, validate
from .checked_arguments import (
    CheckedArguments,
    agree_on_arguments,
    check_arguments,
    sampling_plan,
)
from .checkpoint import sharded as sharded_checkpoint
from .checkpoint import state as checkpoint
from .clipping.backward import PrivateBackward
from .clipping.context_gate import ContextGate
from .clipping.device_speed import ceilings_for
from .clipping.explain import ClippingGroups, ClippingPlan, describe_groups, explain_plan
from .clipping.gate import Gate
from .clipping.groups import Bounds
from .clipping.planner import Planner, default_memory_budget
from .clipping.precision import without_autocast
from .config import (
    TARGETS,
    UNSET,
    PerformanceConfig,
    PrivacyConfig,
    configs_of,
    refuse_keywords_of,
    resolved,
    take_targets,
)
from .distributed.mesh import Ranks
from .distributed.validate import (
    open_ledger,
    require_same_data,
    synchronize_ranks,
)
from .grad_rules.convert import attach
from .opacus_calls import (
    Scheduler,
    keywords_alone,
    require_own,
    require_states,
    restore_schedulers,
    with_schedulers,
)
from .optimize.attachment import Attachment, attachments_of, take_over
from .optimize.levels import Optimization
from .optimize.wrapper import ForwardWrapper
from .optimizer import PrivateOptimizer
from .packing import PackedBatch
from .privacy.budget import PrivacyBudget
from .privacy.keys import RunKeys, Uncopied, place_of
from .privacy.masks import SecretMasks
from .privacy.privacy_unit import SAMPLE
from .privacy.public_facts import PublicFacts
from .privacy.spending import DEFAULT_ACCOUNTANT, Spending
from .refusal import PrivateRefusal
from .sampling.loader import PrivateDataLoader
from .sampling.plan import SamplingPlan
from .step import PrivateStep
from .verification.loss_trial import LossTrial
from .verification.proof import Proof, allow_second_backwards
from .verification.settable import OnlySettable
from .verification.unchanged import Unchanged
from .verification.uncovered import Uncovered

if TYPE_CHECKING:
    from .audit.report import AuditReport

_log = logging.getLogger(__name__)
_engines: weakref.WeakSet[PrivacyEngine] = weakref.WeakSet()


# What the optimizer lets callers set between releases.
_OF_STEPS = ("noise_multiplier", "max_grad_norm", "expected_batch_size")
_OF_ENGINE = ("accountant", "seed", "ledger", "mesh", "neighboring_relation")
_NOT_PRIVATE = (
    "this engine has no private model: none was made, or it was detached or made private by "
    "another engine since. Call engine.make_private first"
)
_FIELDS = {f.name for kind in (PrivacyConfig, PerformanceConfig) for f in fields(kind)}


def _keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of a call that belong to a configuration, of the call's local names."""
    names = _FIELDS - set(TARGETS) | {"poisson_sampling", "unknown"}
    return {name: value for name, value in values.items() if name in names}


def _after_fork() -> None:
    for engine in _engines:
        # A forked child is none of the ranks.
        engine._ranks = Ranks()
        engine._keys.leave_ranks()
        loader = engine._loader
        if loader is not None:
            loader.load_state_dict(loader.state_dict(), key=engine._keys.sampling)
        if engine._step is not None:
            engine._step.leave_ranks()
        if engine._wrapper is not None:
            engine._wrapper.leave_compiler("the process was forked")


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


class PrivacyEngine(Uncopied, OnlySettable):
    """Trains a model with differential privacy (DP-SGD).

    Args:
        accountant: name of the accountant ("contour"), or an object with its interface, of
            `dpflash.accounting` or of Opacus; what it has counted already stays counted.
        seed: derives all private randomness from this number, for reproducible research. Whoever
            knows the seed can subtract the noise, so results are not for release. By default
            keys come from the operating system.
        ledger: path of a file that gets one line for each release, before it leaves. Its lines
            so far count: several runs on the same data compose in one ledger.
        mesh: the ranks that train one model together: a `DeviceMesh` of all of them with the
            dimensions "data" (other samples), "context" (other tokens of the same samples, for a
            model that went through `dpflash.distributed.context_parallel`), or both. Every rank
            makes the same calls, on the same dataset (of which some entries are compared). None
            for a single process.
        neighboring_relation: "add_remove", "zero_out" or "replace_one" to account for that one;
            None for the samplers' own ("add_remove" for Poisson sampling with a public
            dataset_size, "zero_out" without one, for shuffled batches, foreign ones and mixtures,
            "replace_one" for fixed-size batches).

    Guarantees:
        The sequence of parameter values after each optimizer.step() is (epsilon, delta)-DP for
        epsilon = get_epsilon(delta), for the neighboring relation that `neighboring_relation`
        names. Not covered: losses, per-sample norms, drawn batch sizes, gradients before the
        step, and a choice among several runs. With a mesh the guarantee is that of one process:
        norms are of whole samples, and noise is added once to the sum over all ranks.
    """

    no_copy = "it would draw the same noise; build another PrivacyEngine"
    instead_of_setting = {
        **{name: f"set {name} of the optimizer that make_private returned" for name in _OF_STEPS},
        **dict.fromkeys(_FIELDS - {*_OF_STEPS, *TARGETS}, "pass it to make_private"),
        **dict.fromkeys(TARGETS, "pass it to make_private_with_epsilon"),
        **dict.fromkeys(_OF_ENGINE, "pass it to PrivacyEngine(...)"),
    }

    def __init__(
        self,
        *,
        accountant: str | Accountant = DEFAULT_ACCOUNTANT,
        seed: int | None = None,
        ledger: str | os.PathLike[str] | None = None,
        mesh: DeviceMesh | None = None,
        neighboring_relation: str | None = None,
        **unknown: Any,
    ):
        refuse_keywords_of(PrivacyEngine, unknown)
        self._ranks = Ranks.of(mesh)
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                f"PrivacyEngine without mesh in one of {dist.get_world_size()} ranks: each "
                "trains alone, and its epsilon does not cover the releases of the others. Pass "
                "mesh=init_device_mesh(..., mesh_dim_names=('data', 'context'))",
                stacklevel=2,
            )
        # A mesh of one rank writes a folder too, so that more ranks can go on from it.
        self._has_mesh = mesh is not None
        self._spending = Spending(
            accountant,
            relation=neighboring_relation,
            ledger=open_ledger(ledger, self._ranks),
        )
        self._ledger = self._spending.ledger
        self._ranks.agree(
            "PrivacyEngine",
            {"seed": seed, "accountant": self._spending.state_dict(), "ledger": ledger is None},
        )
        spent = 0 if self._ledger is None else self._ledger.releases
        self._keys = RunKeys(seed, self._ranks, ledger_releases=spent)
        self._model: nn.Module | None = None
        self._backward: PrivateBackward | None = None
        self._wrapper: ForwardWrapper | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._loader: PrivateDataLoader | None = None
        self._clipping = "flat"
        self._settings: tuple[PrivacyConfig, PerformanceConfig] | None = None
        self._step: PrivateStep | None = None
        self._trial: LossTrial | None = None
        _engines.add(self)

    @property
    def seed(self) -> int | None:
        """The number that all private randomness derives from; None for secret keys."""
        return self._keys.seed

    @property
    def ledger(self) -> Path | None:
        """The file that gets a line for each release; None without one."""
        return None if self._ledger is None else self._ledger.path

    get_compatible_module = staticmethod(get_compatible_module)
    validate = staticmethod(validate)
    is_compatible = staticmethod(is_compatible)

    @keywords_alone
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        privacy: PrivacyConfig | None = None,
        performance: PerformanceConfig | None = None,
        noise_multiplier: float = UNSET,
        max_grad_norm: float | Bounds = UNSET,
        clipping: str | None = UNSET,
        clip_function: str = UNSET,
        sampling: str | None = UNSET,
        poisson_sampling: bool = UNSET,
        max_batch_size: int | None = UNSET,
        max_dataset_size: int | None = UNSET,
        dataset_size: int | None = UNSET,
        sample_rate: float | None = UNSET,
        steps_per_epoch: int | None = UNSET,
        unit_of: Sequence[Any] | Callable[[Any], Any] | None = UNSET,
        examples_per_unit: int | None = UNSET,
        unit_sampling: str = UNSET,
        unit_name: str | None = UNSET,
        public_length: int | None = UNSET,
        loss_reduction: str | None = UNSET,
        budget: PrivacyBudget | None = UNSET,
        exact: bool | str = UNSET,
        verify_first_batch: bool = UNSET,
        foreign_batches: bool = UNSET,
        allow_buffers: Sequence[str] = UNSET,
        grad_sample_mode: str = UNSET,
        physical_batch_size: int | None = UNSET,
        memory_budget: int | None = UNSET,
        optimize: str = UNSET,
        **unknown: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """Make a model, its optimizer and its data loader private.

        Args:
            module: the model; its layers are changed in place and keep their state_dict keys.
            optimizer: any torch optimizer over parameters of the model.
            data_loader: DataLoader(dataset, batch_size=...); one entry of the dataset is one
                privacy unit, batch_size the expected batch size, over all ranks together. The
                dataset and collate_fn must make each row of its own entry alone: a collate_fn
                that visibly mixes entries (mixup) is refused, which a dataset's __getitem__
                cannot be.
            privacy: what decides epsilon; or its fields as keywords, see `dpflash.PrivacyConfig`.
            performance: what decides time and memory; or its fields as keywords, see
                `dpflash.PerformanceConfig`.
            poisson_sampling: Opacus' keyword; False means sampling="shuffled".

        The first batches prove that the model keeps its samples apart, by two more forwards and
        one more backward. In the backward a random half of the losses has weight 0: each layer
        must see zeros for these samples, and unchanged gradients for the others. In the forward
        most samples are replaced: the inputs of each layer for the others, and the model's
        outputs, must not change. Sorted rows, statistics of the batch, and scales or routing
        across samples are refused by the layer's name. The proof is repeated where new layers
        run or training flags change; with fewer than 16 samples, or gradients that are all zero,
        it continues with the next batches. For a scalar loss (loss_reduction) it weights the rows
        of the gradient at the model's outputs. Of the reduction itself two cases are tested: a
        scalar that the model returns must keep its sum where samples of two batches are
        exchanged, and a cross-entropy of its outputs must give all samples the declared weight.

        Packed documents: a loss that the loop computes is tested too. In the first draws, and in
        some later ones, a trial precedes each microbatch: a copy of which half of the documents
        have other tokens or are left out, and in which `loader.is_real` is False everywhere. It
        has no backward and is not trained on; the losses of the other documents must be the same
        in the microbatch itself, which follows with the same random numbers of the global
        generators.

        Batches of the private loader have a public number of rows. A sample's row is secret and
        does not depend on the other samples, so one sample more changes no kernel that computes
        the others' gradients, in any dtype. Padding rows (`~loader.is_real`) count for nothing,
        whatever their losses. Keep the loader's order of rows up to the losses. Three kinds of
        batches have no padding rows: those of Opacus' BatchMemoryManager, those that did not come
        from the loader, and those of a collate_fn that pads to the longest sample, whose lengths
        are not public. There one sample more may change how the others are rounded, beyond the
        bound: in 16 bit the sum was seen to move by 1.0009 max_grad_norm, and by 1.0083 where
        model and data were searched for it. `engine.public` shows what a run has.

        Packed documents (`dpflash.packing`) are placed by their lengths, so one document more may
        move others to other tokens. Where gradients of a document do not depend on that, the
        bound holds. With exact=True, which needs PackTo(align=64), they do not, to the last bit,
        for models made of `dpflash.nn` on a CPU; otherwise their rounding may.

        Returns:
            (module, optimizer, data_loader): the same model object, the wrapped optimizer, and
            a loader that draws as the accountant assumes.

        Raises:
            ValueError: naming the argument, its value and the way out; nothing is changed then.
            TypeError: for an unknown keyword.
        """
        asked = configs_of(self.make_private, privacy, performance, _keywords(locals()))
        return self._make_private(module, optimizer, data_loader, *asked)

    def _make_private(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        asked: PrivacyConfig,
        performance: PerformanceConfig,
        plan: SamplingPlan | None = None,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        if not isinstance(module, nn.Module):
            raise ValueError(f"module={type(module).__name__}: expected a torch.nn.Module")
        privacy, performance = resolved(asked, performance)
        assert privacy.noise_multiplier is not None and privacy.clipping is not None
        if self._model is not None:
            raise ValueError("this engine has a model already; call engine.detach(model) first")
        ranks = self._ranks

        def checks() -> CheckedArguments:
            releases = take_over(module)
            if releases and self._spending.is_empty:
                warnings.warn(
                    "another PrivacyEngine trained this model, and the epsilon of this one does "
                    "not count its releases. Where both train on the same people's data, use one "
                    "engine, or pass PrivacyEngine(ledger=...) to all of them, or "
                    "accountant=earlier.accountant",
                    stacklevel=6,
                )
            return check_arguments(
                (module, optimizer, data_loader),
                privacy,
                performance,
                clipping_asked=asked.clipping,
                plan=plan,
                keys=self._keys,
                ranks=ranks,
            )

        checked = ranks.run_on_all("make_private", checks)
        trained, loader = checked.trained, checked.loader
        names = {p: n for n, p in module.named_parameters()}
        agree_on_arguments(checked, names, privacy, performance, ranks)
        require_same_data(checked.entries, ranks)
        plan = loader.plan
        event = plan.event(privacy.noise_multiplier)
        self._spending.begin(event, privacy.budget, unit=plan.unit, grouping=plan.grouping)
        synchronize_ranks(module, ranks)
        step = PrivateStep(
            optimizer,
            trained,
            names=names,
            tracker=loader.tracker,
            sampler=plan,
            spending=self._spending,
            keys=self._keys,
            ranks=ranks,
            noise_multiplier=privacy.noise_multiplier,
            max_grad_norm=privacy.bound,
            expected_batch_size=loader.expected_batch_size,
            divides=privacy.loss_reduction != "sum",
            exact=privacy.exact is not False,
        )
        asked_for, entries = data_loader.batch_size, loader.dataset_size
        if asked_for is not None and not plan.has_public_size and asked_for > entries:
            warnings.warn(
                f"data_loader.batch_size={asked_for} above the {entries} privacy units of the "
                "data: each draw takes all of them, without amplification by sampling. Pass a "
                "smaller batch_size",
                stacklevel=4,
            )
        most = privacy.max_batch_size
        if most is not None and most < loader.expected_batch_size:
            warnings.warn(
                f"max_batch_size={most!r} is below the expected batch size, so most "
                "draws are cut and epsilon is infinite; pass one well above it",
                stacklevel=4,
            )
        for parameter in trained:
            parameter.grad = None
        self._trial = None
        if plan.packing is not None and privacy.verify_first_batch:
            self._trial = LossTrial(trained[0].device)
            loader.try_losses(self._trial)
        unchanged = Unchanged(module, trained, privacy.allow_buffers)
        uncovered = Uncovered(module, trained)
        backward = self._new_backward(
            module, checked, step, unchanged, uncovered, privacy, performance
        )
        attach(module, backward)

        def place() -> tuple[object, ...]:
            return (step.releases, step.tracker.place(), ranks.data_rank)

        devices = frozenset(p.device for p in module.parameters() if p.device.type != "cpu")
        keys = self._keys  # A model does not keep its engine alive.
        masks = SecretMasks(devices, lambda: keys.noise, place)
        optimization = checked.optimization
        self._wrapper = ForwardWrapper(
            module, backward, optimization, unchanged, masks, loader.order, uncovered
        )
        self._wrapper.put()
        _log.info("%s", optimization.summary)
        private_optimizer = PrivateOptimizer(
            optimizer, step, loss_reduction=privacy.loss_reduction
        )
        self._model, self._backward, self._step = module, backward, step
        self._clipping, self._settings = privacy.clipping, (privacy, performance)
        self._optimizer, self._loader = private_optimizer, loader
        backward.attach(Attachment(self, module, self._wrapper, private_optimizer, step))
        return module, private_optimizer, loader

    def _new_backward(
        self,
        module: nn.Module,
        checked: CheckedArguments,
        step: PrivateStep,
        unchanged: Unchanged,
        uncovered: Uncovered,
        privacy: PrivacyConfig,
        performance: PerformanceConfig,
    ) -> PrivateBackward:
        ranks, device = self._ranks, checked.trained[0].device
        proof = Proof(
            module.modules(),
            device=device,
            group=ranks.everyone if step.is_sharded else ranks.context,
            context=ranks.context,
            is_on=privacy.verify_first_batch,
        )
        if privacy.verify_first_batch:
            allow_second_backwards()
        only_instantiate = performance.optimize == "none" or privacy.exact is True
        planner = Planner(
            mode="instantiate" if only_instantiate else performance.grad_sample_mode,
            memory_budget=self._common(performance.memory_budget or default_memory_budget(device)),
            batch_size=checked.planned_batch_size,
            ghost_allowed=privacy.loss_reduction is None and privacy.clipping == "flat",
            book_keeping_allowed=ranks.context is None,
            ceilings=ceilings_for(device),
        )
        return PrivateBackward(
            checked.groups,
            step,
            planner,
            loss_reduction=privacy.loss_reduction,
            clip_function=privacy.clip_function,
            gate_type=Gate if ranks.context is None else ContextGate,
            convolves=any(isinstance(m, _ConvNd) for m in module.modules()),
            proof=proof,
            refusal=lambda losses, batch, leading: (
                checked.loader.order.refusal()
                or unchanged.before_backward()
                or uncovered.refusal(losses, batch, leading)
            ),
        )

    @keywords_alone
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        privacy: PrivacyConfig | None = None,
        performance: PerformanceConfig | None = None,
        max_grad_norm: float | Bounds = UNSET,
        clipping: str | None = UNSET,
        clip_function: str = UNSET,
        sampling: str | None = UNSET,
        poisson_sampling: bool = UNSET,
        max_batch_size: int | None = UNSET,
        max_dataset_size: int | None = UNSET,
        dataset_size: int | None = UNSET,
        sample_rate: float | None = UNSET,
        steps_per_epoch: int | None = UNSET,
        unit_of: Sequence[Any] | Callable[[Any], Any] | None = UNSET,
        examples_per_unit: int | None = UNSET,
        unit_sampling: str = UNSET,
        unit_name: str | None = UNSET,
        public_length: int | None = UNSET,
        loss_reduction: str | None = UNSET,
        budget: PrivacyBudget | None = UNSET,
        exact: bool | str = UNSET,
        verify_first_batch: bool = UNSET,
        foreign_batches: bool = UNSET,
        allow_buffers: Sequence[str] = UNSET,
        grad_sample_mode: str = UNSET,
        physical_batch_size: int | None = UNSET,
        memory_budget: int | None = UNSET,
        optimize: str = UNSET,
        **unknown: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """`make_private` with the noise that spends target_epsilon after `epochs` or `steps`.

        Args:
            target_epsilon: epsilon > 0 at the end of training; or a field of `privacy`.
            target_delta: delta in (0, 1), well below 1 / size of the dataset; or a field of
                `privacy`.
            epochs: epochs of the loader, >= 1.
            steps: in place of epochs, the number of logical batches, >= 1; of a shuffled loader
                the epochs that they begin are counted.
            budget: a limit on the sum of what was spent before and is spent from now on, while
                target_epsilon is for the coming epochs alone.

        The other arguments, the result and the errors are those of `make_private`.
        """
        noise = unknown.get("noise_multiplier")
        if noise is None and isinstance(privacy, PrivacyConfig):
            noise = privacy.noise_multiplier
        if noise is not None:
            raise ValueError(
                f"noise_multiplier={noise!r} conflicts with target_epsilon, which determines it. "
                "Drop it, or call make_private"
            )
        asked, performance = configs_of(
            self.make_private_with_epsilon, privacy, performance, _keywords(locals())
        )
        asked, target_epsilon, target_delta = take_targets(asked, target_epsilon, target_delta)
        if (epochs is None) == (steps is None):
            raise TypeError("make_private_with_epsilon needs epochs= or steps=, one of the two")
        plan = sampling_plan(data_loader, asked)
        if steps is None:
            assert epochs is not None
            positive_int(epochs=epochs)
            steps = epochs * plan.steps_per_epoch
        positive_int(steps=steps)
        if target_delta >= 1 / plan.dataset_size:
            warnings.warn(
                f"target_delta={target_delta!r} is not below 1 / {plan.dataset_size} entries of "
                "the data: releasing one of them outright would be allowed; choose it well below",
                stacklevel=3,
            )
        if not self._spending.is_empty:
            warnings.warn(
                "the accountant has spent privacy already; target_epsilon covers the coming "
                "epochs alone, get_epsilon the sum. If you call load_checkpoint next, that run "
                "goes on with its own noise multiplier",
                stacklevel=3,
            )
        noise_multiplier = self._spending.noise_for(
            plan.event,
            -(-steps // plan.steps_per_epoch) if plan.event_covers_epoch else steps,
            epsilon=target_epsilon,
            delta=target_delta,
        )
        noise_multiplier = float(
            self._ranks.broadcast_from_first(
                repr(noise_multiplier).encode(), "the noise multiplier"
            )
        )
        asked = replace(asked, noise_multiplier=noise_multiplier)
        made = self._make_private(module, optimizer, data_loader, asked, performance, plan)
        assert self._step is not None
        self._step.plan(steps, target_epsilon=target_epsilon)
        if asked.budget is None:
            self._spending.set_delta(target_delta)
        return made

    def backward(self, losses: Tensor) -> None:
        """Add the clipped gradients of a batch to the logical batch's sum.

        Args:
            losses: [B], one number for each row of the batch in the loader's order, computed from
                that row alone; those of padding rows count for nothing. Where units have several
                rows (unit_of), the loss of a unit is the mean of its rows'. Of
                `dpflash.packing.Pairs` one number for each pair, or for each row, whose mean is
                the pair's. Of packed documents one for each, [max_documents]. A scalar only where
                make_private got loss_reduction.

        Raises:
            PrivateRefusal: for another shape, a number of losses that is not the batch's, or
                losses that reached no private layer; or the loss of a packed document changed
                with the tokens of others.
            RuntimeError: for a second call on a batch.

        Guarantees:
            Each sample changes the sum by at most max_grad_norm in L2, over all parameters
            together, whatever its loss; one with a NaN or Inf gradient changes it by nothing. In
            batches without public slots this holds up to rounding, see `make_private`.
        """
        backward = self._attached()
        with backward.step.noting_refusals():
            losses = self._losses_of_samples(backward, losses)
            if losses.ndim == 1:
                backward.step.tracker.before_backward(losses.shape[0])
                if losses.shape[0] == 0 and self._ranks.everyone is None:
                    return  # With other ranks an empty batch takes part in the exchanges.
            if self._trial is not None and self._is_tried(losses, self._trial):
                return
            with without_autocast(losses.device.type):
                backward.backward(losses)

    def _losses_of_samples(self, backward: PrivateBackward, losses: Tensor) -> Tensor:
        """Losses [B] of samples, or a scalar where loss_reduction is declared."""
        is_tensor = isinstance(losses, Tensor)
        dims = (1,) if backward.loss_reduction is None else (0, 1)
        if not is_tensor or losses.ndim not in dims:
            raise PrivateRefusal(
                "losses is not one loss per sample: expected a tensor [B] in each batch. Use "
                "dpflash.losses, or reduction='none' and a mean over each sample's own elements; "
                "a scalar is taken only where it is a reduction over samples, declared by "
                "make_private(loss_reduction='mean' or 'sum'), as a classifier's is; that of a "
                "language model of Hugging Face, over tokens, is not",
                losses=tuple(losses.shape) if is_tensor else type(losses).__name__,
            ) from None
        units = backward.forward.units
        if units is not None and units.are_rows and losses.ndim == 1:
            assert self._loader is not None
            has_pairs = self._loader.has_pairs
            if losses.shape[0] == units.positions:
                losses = units.mean(losses)
            elif not (has_pairs and losses.shape[0] == units.size):
                raise PrivateRefusal(
                    "losses has another number of entries than the batch has rows: give one loss "
                    "for each row, padding rows included, in the loader's order"
                    + (", or one for each pair" if has_pairs else ""),
                    losses=losses.shape[0],
                    rows=units.positions,
                ) from None
        if not losses.requires_grad and (losses.numel() or self._ranks.everyone is not None):
            raise PrivateRefusal(
                "losses do not require grad, so they reach no private layer: compute them from "
                "the model's output outside of torch.no_grad() and without detach(), also in a "
                "batch none of whose rows counts: give those the weight 0"
            ) from None
        return losses

    def _is_tried(self, losses: Tensor, trial: LossTrial) -> bool:
        """Whether losses are of a trial, which has no backward; compares those that follow it."""
        backward = self._attached()
        mark = backward.step.tracker.current
        if mark is not None and mark.is_trial:
            assert self._step is not None
            self._step.note_options()
            trial.hold(losses)
            return True
        if trial.decides:
            try:
                backward.proof.refuse(trial.refusal(losses))
            except RuntimeError as error:
                # A loop that catches the error meets it again.
                trial.restart(str(error))
                backward.discard()
                raise
        return False

    @contextmanager
    def public_data(self) -> Iterator[None]:
        """Train on public data inside a with block, which is not clipped, noised or counted.

        ::

            with engine.public_data():
                F.cross_entropy(model(x_public), y_public).backward()  # any scalar loss
            optimizer.step()

        Inside the block the model is a plain one: its layers have no clipping gates, batches have
        any size, and losses are ordinary scalars, whose backward runs inside too. `.grad` of the
        trained parameters holds the gradients of the block alone (they may be clipped by
        `clip_grad_norm_`, or unscaled) and is as before afterwards. They add up over blocks until
        the next step, and `optimizer.zero_grad()` drops them. Checkpoints leave them out.

        `optimizer.step()` adds them to the gradient of the private batch: (clipped sum + noise) /
        expected_batch_size + public gradient, so scale the public loss to weight it. Between
        private batches (behind a step, before the next batch of the loader) it steps on them
        alone, without noise, charge, ledger line or step hook; a spent budget allows that too.
        With a mesh, public gradients are averaged over the ranks with other samples.

        Raises:
            RuntimeError: the engine, step, zero_grad or the private loader is used inside; a
                backward inside reaches a private forward; the model got rows of the private
                loader's batch, where they can be recognized; or a buffer or a frozen parameter
                changed, see make_private(allow_buffers=). The block's gradients are dropped.
            ValueError: fully_shard with a context, or over some ranks only.

        Guarantees:
            Sums, noise and charge of private batches are the same with and without public ones,
            bit for bit. Epsilon covers the private data alone. It holds if the public data, its
            order, weights and losses were chosen without the private data: nothing may enter that
            was computed from it, apart from the released parameters. Public data gets no
            protection.
        """
        self._attached()
        assert self._step is not None and self._wrapper is not None
        self._step.public.refuse_ranks(self._ranks)
        with self._step.public.collected(), self._wrapper.plain():
            yield

    @overload
    def get_epsilon(self, delta: float, interval: Literal[False] = False) -> float: ...

    @overload
    def get_epsilon(self, delta: float, interval: Literal[True]) -> Interval: ...

    def get_epsilon(self, delta: float, interval: bool = False) -> float | Interval:
        """Epsilon spent so far at delta; inf once a step was released without noise.

        Args:
            delta: in (0, 1).
            interval: whether the lower end is wanted too, where the accountant knows one.
        """
        probability(delta=delta)
        found = self._spending.epsilon(delta)
        return found if interval else found.upper

    def remaining_steps(self) -> int | None:
        """How many more steps like the next one the budget allows; None without a budget.

        With a shuffled loader: the rest of an epoch that is paid for, and then whole epochs.
        """
        return None if self._step is None else self._step.remaining_steps()

    @property
    def accountant(self) -> Accountant:
        """The accountant, which counts the releases."""
        return self._spending.accountant

    @property
    def _noiseless(self) -> bool:
        return self._spending.noiseless

    @property
    def sampler(self) -> str:
        """The sampling scheme that the accountant assumes."""
        name = "none" if self._loader is None else self._loader.sampler_name
        if self._spending.has_foreign_batches:
            return f"{name}, some batches not from its loader"
        return name

    @property
    def neighboring_relation(self) -> str:
        """Neighboring relation of epsilon: "add_remove", "zero_out" or "replace_one"."""
        return self._spending.relation

    @property
    def privacy_unit(self) -> str:
        """The privacy unit, of which neighbors differ in one.

        "sample", "document", "preference pair" or "user"; "user, fixed graph" where an entry may
        be of several users, see `dpflash.PrivacyConfig.unit_sampling`. A unit_name follows, as in
        "user: patient".
        """
        return self._spending.unit or SAMPLE

    def check(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        *,
        loss_reduction: str | None = None,
    ) -> CheckReport:
        """Try on one batch whether losses[i] and its gradient depend on sample i alone.

        Args:
            model: plain or private; the check works on a plain copy and changes nothing.
            batch: argument of loss_fn: a tensor, a tuple or a dict of tensors whose first
                dimension is the batch, of at least two samples; four to eight are enough. No
                epsilon covers the report, so use data of nobody. Each row counts as a sample of
                its own; where users have several rows (unit_of), that finds more than is needed.
            loss_fn: loss_fn(model, batch) -> losses [B]; it calls the model that it is given.
            loss_reduction: "mean" or "sum" as declared to make_private; loss_fn then returns a
                scalar, and the check compares the scalar of several batches, and its gradient,
                with that reduction over their samples.

        Returns:
            A CheckReport: `.ok`, `.problems`, and as text what was and was not checked. It is a
            test on this batch, not a proof.

        Raises:
            ValueError: for a batch that holds no tensor, one sample, or samples of unequal number,
                or is packed; and for another loss_reduction than None, "mean" and "sum".
        """
        return run_check(model, batch, loss_fn, loss_reduction=loss_reduction)

    def audit(
        self,
        *,
        steps: int | None = None,
        canaries: int = 1000,
        delta: float = 1e-5,
        confidence: float = 0.95,
        scores: ArrayLike | None = None,
        included: ArrayLike | None = None,
        seed: int | None = None,
        ranks: bool = True,
    ) -> AuditReport:
        """Test whether this engine's settings keep the epsilon that they claim.

        Without scores (white box) canaries with orthogonal gradients are trained through new
        engines with these settings: accountant, noise, bound, clipping, sample rate and exactness.
        The model and its data are not touched, and nothing is charged. With scores (black box)
        the training run itself is audited, by losses of canary documents that were in its data.

        Args:
            steps: releases of the claimed run; None for one epoch of the loader.
            canaries: of the white-box audit; more give tighter bounds.
            delta: of the claim and the bounds.
            confidence: of each of the two bounds on epsilon.
            scores: `[N]`, higher for canaries that look trained on, such as the loss before minus
                the loss after training; against the epsilon that was spent so far.
            included: `[N]`, bool, with scores: which canaries were in the data, each by a fair
                coin of its own.
            seed: for a reproducible audit.
            ranks: whether to probe two ranks too, in processes that take some seconds.

        Returns:
            An `AuditReport`: `.ok`, the claimed epsilon, two lower bounds, the named checks; as
            text a table. It is a test, not a proof.

        Raises:
            ValueError: no model is private, an argument is out of its range, or sampling is not
                Poisson.

        Source:
            Steinke, Nasr, Jagielski 2023; see `dpflash.audit.bounds`.
        """
        # A second, which no training run needs: scipy's distributions and torch's FSDP.
        from .audit.ranks import Audited
        from .audit.run import audit_losses, auditable, run_audit

        self._require_private("audit")
        assert self._settings is not None and self._optimizer is not None
        assert self._loader is not None and self._model is not None
        if (scores is None) != (included is None):
            raise ValueError("scores and included come together; pass both, or neither")
        if scores is not None:
            releases = self._optimizer.releases
            return audit_losses(
                np.asarray(scores, dtype=np.float64), np.asarray(included), self.accountant,
                steps=releases, delta=delta, confidence=confidence, seed=seed,
                privacy_unit=self.privacy_unit,
            )  # fmt: skip
        privacy, performance = self._settings
        privacy, performance = auditable(
            replace(privacy, noise_multiplier=self._optimizer.noise_multiplier),
            performance,
            sample_rate=self._loader.sample_rate or 1.0,
            steps=self._loader.steps_per_epoch if steps is None else steps,
        )
        arguments = {"accountant": type(self.accountant).mechanism(), "seed": seed}
        return run_audit(
            Audited(PrivacyEngine, arguments, privacy, performance),
            canaries=canaries, delta=delta, confidence=confidence, seed=seed, ranks=ranks,
            device=str(next(self._model.parameters()).device), privacy_unit=self.privacy_unit,
        )  # fmt: skip

    def groups(self) -> ClippingGroups:
        """The clipping groups of the private model: their parameters, bounds and sensitivity.

        Returns:
            A sequence of `GroupInfo`, with the sensitivity of the whole; as text, a table.

        Raises:
            ValueError: no model is private.
        """
        backward, optimizer = self._require_private("groups")
        return describe_groups(backward.groups, backward.names, optimizer.max_grad_norm)

    @property
    def optimization(self) -> Optimization:
        """What the optimization level changes; as text, one sentence for each change.

        Raises:
            ValueError: no model is private.
        """
        if self._wrapper is None:
            raise ValueError(f"optimization: {_NOT_PRIVATE}")
        return self._wrapper.optimization

    @property
    def verified(self) -> bool | str:
        """Whether real batches have proven that the model keeps its samples apart.

        True; or False with make_private(verify_first_batch=False). "pending" until enough samples
        were seen and every layer that ran had nonzero gradients. "gradients" where only the
        backward is proven, because no call of the model was seen in which samples could be
        replaced (its layers are called one by one, or it went through your own torch.compile).
        "forward" where the model returns a scalar loss, so that losses of single samples cannot
        be weighted. It depends on the data no more than a refusal does. A common factor of all
        losses, such as the number of tokens in the batch, is not seen; `check` tries it. Of packed
        documents "pending" too until their losses were seen to stay as their neighbors changed.

        Raises:
            ValueError: no model is private.
        """
        backward, _ = self._require_private("verified")
        verified = backward.proof.verified
        is_open = self._trial is not None and not self._trial.has_compared
        return "pending" if verified is True and is_open else verified

    def plan(self) -> ClippingPlan:
        """How each matrix parameter's clipped gradient is computed, and why.

        Costs are for the shapes of the last forward, so run the model once before.

        Returns:
            A sequence of `PlannedUse`; as text, a table.

        Raises:
            ValueError: no model is private, or it has not run since it is, or it is compiled by
                optimize="aggressive", where nothing is planned.
        """
        backward, _ = self._require_private("plan")
        if self.optimization.compiled:
            raise ValueError(
                "plan() with optimize='aggressive': every layer of the compiled model keeps its "
                "per-sample gradients, so nothing is planned; engine.optimization says what that "
                "takes. Pass optimize='balanced' for a planned model"
            )
        return explain_plan(backward, self.public)

    @property
    def public(self) -> PublicFacts:
        """Public facts about the batches: slots, lengths, dataset size; as text, one a line.

        Raises:
            ValueError: no model is private.
        """
        self._require_private("public")
        assert self._loader is not None
        return PublicFacts(
            slots=self._loader.slots,
            others=self._spending.has_foreign_batches or self._loader.tracker.signalled,
            lengths=str(self._loader.lengths),
            dataset_size=self._loader.dataset_size,
            is_declared=self._loader.plan.has_public_size,
            unit=self._loader.plan.unit_in_words,
            packing=self._loader.plan.packing,
            is_exact=self._settings is not None and self._settings[0].exact is True,
        )

    @property
    def rounded_sums(self) -> tuple[str, ...]:
        """Names of the parameters whose sums were rounded in float32 in some batch so far.

        The sums of all other parameters were exact: one sample moves them by at most its bound in
        real arithmetic, whatever the order of the samples.

        Raises:
            ValueError: no model is private.
        """
        backward, _ = self._require_private("rounded_sums")
        return tuple(sorted(backward.step.rounded))

    def _require_private(self, method: str) -> tuple[PrivateBackward, PrivateOptimizer]:
        if self._backward is None or self._optimizer is None:
            raise ValueError(f"{method}: {_NOT_PRIVATE}")
        return self._backward, self._optimizer

    def prepare(self, batch: int | PackedBatch) -> None:
        """Prepare the model for a batch that did not come from the loader.

        Only packed batches, and models that torch.compile compiled, need it.

        Args:
            batch: the packed batch, of all ranks of a context, or the number of rows.
        """
        backward = self._attached()
        if isinstance(batch, PackedBatch):
            backward.begin_batch(batch.max_documents, batch.units)
        else:
            positive_int(batch_size=batch)
            backward.forward.prepare(batch)

    def detach(self, model: nn.Module) -> nn.Module:
        """Return the plain model, with its parameters; the engine keeps its spent privacy.

        Any engine gives back a model whose own engine does not exist any more.
        """
        if model is not self._model:
            attachments = attachments_of(model)
            if not attachments or not all(a.is_orphan for a in attachments):
                raise ValueError("model is not the one that this engine made private")
            for attachment in attachments:
                attachment.give_back()
            return model
        own = self._attached().attachment
        assert isinstance(own, Attachment)
        own.give_back()
        # The next model starts counting at 0 again; under the old keys it would repeat the noise.
        self._keys.begin_model()
        self._spending.set_budget(None)
        self._model = self._backward = self._wrapper = None
        return model

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        extra: dict[str, Any] | None = None,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
        checkpoint_dict: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        """Write everything that a later process needs to go on, with any number of ranks.

        That is parameters, optimizer, spent privacy, noise counter and the loader's position. The
        checkpoint is replaced in one step, so it is always the old one or the new one. The
        clipped sum of an unfinished logical batch is left out. Without a seed there is no key in
        it; with one it holds the keys of noise and draws.

        Args:
            path: the file; with a mesh a folder, on a file system that all ranks share: all ranks
                call this together, each writes its part of the model, and the first rank the
                rest. It can be read by its owner only: keep it to yourself, and release
                model.state_dict() instead.
            extra: plain values (numbers, strings, lists, tensors) that load_checkpoint returns;
                with a mesh, those of the first rank.
            module, optimizer: Opacus' arguments; those of this engine or None.
            noise_scheduler, grad_clip_scheduler: of Opacus, whose state is stored too.
            checkpoint_dict: Opacus' name of extra.

        Raises:
            ValueError: extra holds what could not be read again; path is a folder where a file
                is to be written, or the reverse; module or optimizer is another one.
            RuntimeError: a buffer or a frozen parameter changed, see make_private(allow_buffers=);
                or another rank failed, as its message says; the checkpoint before this one is
                unchanged.
        """
        self._attached()
        assert self._model is not None and self._optimizer is not None
        refuse_keywords_of(self.save_checkpoint, unknown)
        require_own(module=(module, self._model), optimizer=(optimizer, self._optimizer))
        if extra is not None and checkpoint_dict is not None:
            raise ValueError("checkpoint_dict with extra, which is the same: pass one of them")
        extra = checkpoint_dict if extra is None else extra
        schedulers = {
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        self._ranks.run_on_all("save_checkpoint", self._model.state_dict)
        sharded_checkpoint.save(
            path,
            lambda: self._own_state(with_schedulers(extra, schedulers)),
            model=self._model,
            optimizer=self._optimizer.original_optimizer,
            ranks=self._ranks,
            as_folder=self._has_mesh,
        )

    def _own_state(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Contents of a checkpoint besides model and optimizer; the same on all ranks."""
        assert self._optimizer is not None and self._loader is not None
        checkpoint.check_extra(extra)
        return {
            "spending": self._spending.state_dict(),
            **self._keys.state_dict(),
            "releases": self._optimizer.releases,
            "ledger_releases": None if self._ledger is None else self._ledger.releases,
            "ledger_digest": None if self._ledger is None else self._ledger.digest(),
            "noise_multiplier": self._optimizer.noise_multiplier,
            "max_grad_norm": self._optimizer.max_grad_norm,
            "expected_batch_size": self._optimizer.expected_batch_size,
            "loader": self._loader.state_dict(),
            "sampling": self._sampling(),
            "clipping": self._clipping,
            "shares": [(group.name, group.share) for group in self._attached().groups],
            "clip_function": self._attached().clip_function,
            "extra": extra,
        }

    def state_dict(self) -> dict[str, str]:
        """What `save_checkpoint` stores besides the states of model and optimizer.

        For torch.distributed.checkpoint, whose Stateful protocol it follows with
        `load_state_dict`, and for checkpoints of your own: save it with model.state_dict() and
        optimizer.state_dict(), and load all three. Its one value is a text, equal on all ranks.
        """
        self._attached()
        return checkpoint.as_text(self._own_state({}))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()` as `load_checkpoint` does, but for model and optimizer.

        All ranks call this together, after the same make_private call.

        Raises:
            ValueError: it is not that of an engine, or does not fit; nothing is changed then.
            RuntimeError: steps were released already and no ledger remembers them.
        """
        self._attached()
        where = "state_dict"

        def read() -> dict[str, Any]:
            state = checkpoint.from_text(state_dict)
            self._check_fits(where, state)
            return state

        state = self._ranks.run_on_all("load_state_dict", read)
        self._ranks.agree("load_state_dict", place_of(state))
        self._restore(where, state)

    def _check_fits(self, where: str, state: Mapping[str, Any]) -> None:
        checkpoint.check_fits(
            where,
            state,
            sampling=self._sampling(),
            mechanism=type(self.accountant).mechanism(),
            ledger=self._ledger,
            clipping=self._clipping,
            shares=[(group.name, group.share) for group in self._attached().groups],
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        *,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        noise_scheduler: Scheduler | None = None,
        grad_clip_scheduler: Scheduler | None = None,
        **unknown: Any,
    ) -> dict[str, Any]:
        """Go on from a checkpoint, after the same make_private call.

        The number of ranks, and how the model is sharded over them, may differ from the run that
        wrote it; a file and a folder can both be read with or without a mesh. With a mesh all
        ranks call this together, and each reads what it needs.

        The run continues under new keys of noise and sampling, since another process may have
        gone on from the same checkpoint, or a copy of it. Each continuation is a branch, which
        lines of the ledger name. Branches share no noise and no draws, and their epsilons compose:
        `dpflash budget LEDGER LEDGER` counts what they have in common once. Releases in the ledger
        that the checkpoint does not know stay counted.

        With a seed the run continues bit for bit as if it had not stopped, unless the ledger has
        releases that the checkpoint does not know: then draws and noise are new, too.

        Args:
            path: of a file or folder that save_checkpoint wrote.
            module, optimizer: Opacus' arguments; those of this engine or None.
            noise_scheduler, grad_clip_scheduler: of Opacus; they get back the states that
                save_checkpoint stored.

        Returns:
            What save_checkpoint got as `extra`.

        Raises:
            FileNotFoundError, ValueError: for a missing, damaged or mismatched checkpoint;
                nothing is changed then.
            RuntimeError: where steps were released already and no ledger remembers them, or
                another rank could not read the checkpoint.
        """
        self._attached()
        assert self._model is not None and self._optimizer is not None
        refuse_keywords_of(self.load_checkpoint, unknown)
        require_own(module=(module, self._model), optimizer=(optimizer, self._optimizer))
        schedulers = {
            "noise_scheduler": noise_scheduler,
            "grad_clip_scheduler": grad_clip_scheduler,
        }
        where = f"path={os.fspath(path)!r}"

        def check(state: dict[str, Any]) -> None:
            assert self._model is not None and self._optimizer is not None
            checkpoint.check_model(
                where,
                state,
                shapes=sharded_checkpoint.shapes(self._model),
                optimizer=self._optimizer,
            )
            self._check_fits(where, state)
            require_states(state["extra"], schedulers)

        state = sharded_checkpoint.load(
            path,
            model=self._model,
            optimizer=self._optimizer.original_optimizer,
            ranks=self._ranks,
            check=check,
        )
        self._restore(where, state)
        return restore_schedulers(state["extra"], schedulers)

    def _restore(self, where: str, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint that fits, or from an engine's own part of it."""
        assert self._model is not None and self._optimizer is not None
        assert self._loader is not None and self._step is not None
        spent = not self._spending.is_empty or self._optimizer.releases
        is_known = self._keys.knows_all(state, self._optimizer.releases)
        if self._ledger is None and spent and not is_known:
            raise RuntimeError(
                f"{where}: this engine has spent privacy already, and loading would forget it. "
                "Load into a new engine, right after make_private; to go back within a run use "
                "PrivacyEngine(ledger=...)"
            )
        self._spending.load_state_dict(state["spending"])
        checkpoint.warn_of_changes(
            state,
            restored={
                "noise_multiplier": self._optimizer.noise_multiplier,
                "max_grad_norm": self._optimizer.max_grad_norm,
                "expected_batch_size": self._optimizer.expected_batch_size,
            },
            unchanged={
                "clipping": self._clipping,
                "clip_function": self._attached().clip_function,
            },
        )
        if "module" in state:
            sharded_checkpoint.put(self._model, state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
        releases = None if self._ledger is None else self._ledger.releases
        self._keys.load_state_dict(state, ledger_releases=releases)
        self._loader.load_state_dict(state["loader"], key=self._keys.sampling)
        self._step.resume(
            releases=state["releases"],
            noise_multiplier=state["noise_multiplier"],
            max_grad_norm=state["max_grad_norm"],
            expected_batch_size=state["expected_batch_size"],
        )

    def diagnostics(self) -> dict[str, Any]:
        """Numbers for debugging. PRIVATE: no epsilon covers them; do not release.

        Returns:
            per_sample_norms: of the samples of the last backward, padding rows left out (of the
            last group when per_layer);
            clip_fraction: over all samples so far;
            nonfinite_samples: samples so far that added nothing, since their loss or gradient
            was NaN or infinite, such as by a label out of range;
            bad_entries: samples so far that added nothing, since they could not be read or put
            into a batch; and entries of the dataset to which unit_of gives no unit.
        """
        statistics = self._attached().statistics
        assert self._loader is not None
        squares = statistics.squared_norms
        return {
            "per_sample_norms": None if squares is None else squares.sqrt(),
            "clip_fraction": statistics.clipped_samples / max(statistics.seen_samples, 1),
            "nonfinite_samples": statistics.nonfinite_samples,
            "bad_entries": self._loader.bad_entries,
        }

    def _attached(self) -> PrivateBackward:
        if self._backward is None:
            raise RuntimeError(_NOT_PRIVATE)
        assert self._step is not None
        self._step.public.refuse_inside("a call of the engine")
        return self._backward

    def _sampling(self) -> dict[str, Any]:
        assert self._loader is not None
        return self._loader.plan.scheme

    def _common(self, number: int) -> int:
        """The number of the first rank."""
        return int(self._ranks.broadcast_from_first(str(number).encode(), "the memory budget"))
