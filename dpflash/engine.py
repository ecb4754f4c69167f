"""PrivacyEngine: wires model, optimizer, loader and accountant together."""

from __future__ import annotations

import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import DataLoader

from dpflash.accounting import Accountant, Interval

from ._validate import finite, noise_fits, one_of, positive, positive_int, probability
from .arguments import (
    check_exact,
    check_slots,
    make_groups,
    public_size_of,
    refuse_keywords,
    sampling_of,
    trained_parameters,
)
from .check import CheckReport, run_check
from .checkpoint import sharded as sharded_checkpoint
from .checkpoint import state as checkpoint
from .clipping.backward import PrivateBackward
from .clipping.context_gate import ContextGate
from .clipping.device_speed import ceilings_for
from .clipping.explain import ClippingGroups, ClippingPlan, describe_groups, explain_plan
from .clipping.gate import Gate
from .clipping.groups import Group
from .clipping.planner import (
    DEFAULT_LEVEL,
    LEVELS,
    WAYS,
    Planner,
    clipping_for,
    default_memory_budget,
)
from .clipping.precision import narrow_parameters, refuse_coarse_mean, without_autocast
from .distributed.mesh import Workers
from .distributed.validate import (
    check_module,
    digests_of,
    join,
    open_ledger,
    part,
    require_same_data,
)
from .grad_rules.convert import attach, check_model, detach
from .optimize.levels import Asked, Optimization, choose
from .optimize.wrapper import LeveledForward
from .optimizer import PrivateOptimizer
from .privacy.budget import PrivacyBudget
from .privacy.keys import RunKeys
from .privacy.masks import SecretMasks
from .privacy.public_facts import PublicFacts
from .privacy.relations import DEFAULT_ACCOUNTANT
from .privacy.spending import Spending
from .sampling.collate import refuse_mixing
from .sampling.loader import PrivateDataLoader
from .step import PrivateStep
from .verification.proof import Proof, allow_second_backwards
from .verification.unchanged import Unchanged, check_allowed

CLIPPINGS = ("flat", "per_layer", "per_block")
CLIP_FUNCTIONS = ("hard", "automatic")

_log = logging.getLogger(__name__)
_engines: weakref.WeakSet[PrivacyEngine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in _engines:
        # A child that was forked is none of the workers.
        engine._workers = Workers()
        engine._keys.leave_ranks()
        if engine._step is not None:
            engine._step.leave_ranks()
        if engine._leveled is not None:
            engine._leveled.leave_compiler("the process was forked")


os.register_at_fork(after_in_child=_after_fork)


class PrivacyEngine:
    """Trains a model with differential privacy (DP-SGD).

    Args:
        accountant: name of the accountant ("contour"), or an object with its interface, of
            `dpflash.accounting` or of Opacus; what it has counted already stays counted.
        seed: derives all private randomness from this number, for reproducible research. Whoever
            knows the seed can subtract the noise, so results are not for release. By default
            keys come from the operating system.
        ledger: path of a file that gets one line for each release, before it leaves. Its lines
            so far count: several runs on the same data compose in one ledger.
        mesh: the workers that train one model together, as a `DeviceMesh` of all of them with
            dimensions named "data" (other samples) and "context" (other tokens of the same
            samples; the model went through `dpflash.distributed.context_parallel`), or one of
            them; every worker makes the same calls, on the same data set (of which some entries
            are compared). None for a process by itself.
        neighboring_relation: "add_remove", "zero_out" or "replace_one" to account for that one;
            None for the samplers' own ("add_remove" for Poisson sampling with a public
            dataset_size, "zero_out" without one, for shuffled batches, foreign ones and mixtures,
            "replace_one" for fixed-size batches).

    Guarantees:
        The sequence of parameter values after each optimizer.step() is (epsilon, delta)-DP for
        epsilon = get_epsilon(delta), for the neighbouring relation that `neighboring_relation`
        names. Not covered: losses, per-sample norms, drawn batch sizes, gradients before the
        step, and a choice among several runs. With a mesh the guarantee is that of one process:
        norms are of whole samples, noise is added once to the sum over all workers.
    """

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
        if unknown:
            refuse_keywords(unknown, PrivacyEngine)
        self._workers = Workers.of(mesh)
        if mesh is None and dist.is_initialized() and dist.get_world_size() > 1:
            warnings.warn(
                f"PrivacyEngine without mesh in one of {dist.get_world_size()} workers: each "
                "trains by itself, and the epsilon of none covers what the others release. Pass "
                "mesh=init_device_mesh(..., mesh_dim_names=('data', 'context'))",
                stacklevel=2,
            )
        # One worker of a mesh writes what several would, so that more of them can go on from it.
        self._has_mesh = mesh is not None
        self._spending = Spending(
            accountant,
            relation=neighboring_relation,
            ledger=open_ledger(ledger, self._workers),
        )
        self._ledger = self._spending.ledger
        self._workers.agree(
            "PrivacyEngine",
            {"seed": seed, "accountant": self._spending.state_dict(), "ledger": ledger is None},
        )
        self._keys = RunKeys(seed, self._workers)
        self._model: nn.Module | None = None
        self._backward: PrivateBackward | None = None
        self._leveled: LeveledForward | None = None
        self._optimizer: PrivateOptimizer | None = None
        self._loader: PrivateDataLoader | None = None
        self._clipping = "flat"
        self._step: PrivateStep | None = None
        _engines.add(self)

    @property
    def seed(self) -> int | None:
        """The number that all private randomness derives from; None for secret keys."""
        return self._keys.seed

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "a copy of an engine would draw the same noise; build another PrivacyEngine"
        )

    def __copy__(self) -> NoReturn:
        self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__({})

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float,
        clipping: str | None = None,
        way: str = "auto",
        clip_function: str = "hard",
        poisson_sampling: bool = True,
        sampling: str | None = None,
        physical_batch_size: int | None = None,
        max_batch_size: int | None = None,
        dataset_size: int | None = None,
        sample_rate: float | None = None,
        steps_per_epoch: int | None = None,
        public_length: int | None = None,
        loss_reduction: str | None = None,
        memory_budget: int | None = None,
        budget: PrivacyBudget | None = None,
        optimize: str = DEFAULT_LEVEL,
        exact: bool | str = "auto",
        verify_first_batch: bool = True,
        allow_buffers: Sequence[str] = (),
        **unknown: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """Make a model, its optimizer and its data loader private.

        Args:
            module: the model; its layers are changed in place and keep their state_dict keys.
            optimizer: any torch optimizer over parameters of the model.
            data_loader: DataLoader(dataset, batch_size=...); one entry of the dataset is one
                privacy unit, batch_size the expected batch size, of all workers together. The
                dataset and collate_fn must make each row of its own entry alone: a collate_fn
                that visibly mixes entries (mixup) is refused, which a dataset's __getitem__
                cannot be.
            noise_multiplier: noise standard deviation over max_grad_norm; 0 for none (no epsilon).
            max_grad_norm: L2 bound C of one sample's gradient over all parameters; with noise
                between 1e-30 and 1e30.
            clipping: "flat" (one norm over all parameters), "per_layer" (one a module, each with
                an equal share of C^2) or "per_block" (one a 128 x 128 tile of a linear layer's
                weight, and one a parameter elsewhere, C^2 shared by number of elements). None
                for that of the level: "flat", or "per_layer" where `optimize` is "aggressive"
                and no way is asked for.
            clip_function: "hard", c_i = min(1, C / n_i), or "automatic", c_i = C / (n_i + 0.01).
            way: how flat clipping gets its norms: "auto", "stored", "book_keeping", "two_pass".
            poisson_sampling: draw batches by Poisson sampling. False keeps the loader's own
                passes over the data and accounts for them without amplification.
            sampling: "poisson", "fixed_size" (each batch batch_size different samples, drawn
                anew) or "shuffled" (the loader's own passes); None for what poisson_sampling
                says. Epsilon is that of the sampler: a shuffled pass costs one Gaussian step,
                an upper bound without amplification.
            physical_batch_size: upper bound of a batch that the loader yields to a worker. All
                of them have one public number of rows, `loader.slots`, at most this one; without
                it as many as leave about 10% of all rows empty on average. A draw comes in as
                many of them as it needs, and step() waits for the last.
            max_batch_size: of a Poisson draw with more samples only so many are kept. What that
                costs is accounted for; well above batch_size it is next to nothing. Where
                physical_batch_size holds so many too, every draw is one batch of so many rows.
            dataset_size: the size of the dataset that may be known to everybody. Sample rate,
                steps of a pass and the divisor come from it alone; the number of entries, which
                is private, may be another and is never compared with it. With max_batch_size it
                must not be less, or cuts are likelier than accounted for. None takes the number
                of entries for public, and the relation is "zero_out". Poisson sampling only.
            sample_rate: in place of dataset_size, the rate itself, with steps_per_epoch.
            steps_per_epoch: draws of a pass over the loader, with sample_rate.
            public_length: length of all samples, dimension 1 of the batch's tensors. A batch of
                other shapes than the first is refused then; `dpflash.sampling.PadTo` pads to it,
                and declares it by itself.
            loss_reduction: "mean" or "sum" where the training loop calls loss.backward() on a
                scalar that is that reduction over samples; None for engine.backward(losses).
                "mean" in full float32 only: where parameters, autocast (that of a level too) or
                products of float32 are rounded more, it is refused. Not seen: convolutions that
                the model calls as functions, on a GPU whose cudnn rounds them (its default; set
                torch.backends.cudnn.conv.fp32_precision = "ieee").
            memory_budget: bytes that stored gradients of physical_batch_size samples (None: of
                the expected batch) may take; default a quarter of the device's.
            budget: a limit on what everything released so far and from now on may spend; a step
                beyond it raises `BudgetSpent` and releases nothing.
            optimize: "none" (textbook DP-SGD: each layer keeps its per-sample gradients),
                "conservative" (a planner picks the way, and nothing changes but rounding),
                "balanced" (and the model's forward under bfloat16 autocast) or "aggressive" (and
                per_layer clipping, and torch.compile). `engine.optimization` tells what was
                changed, and what was left out; epsilon never is.
            exact: "auto" sums clipped gradients exactly, on the grid 2^(floor(log2 max_grad_norm)
                - 30), wherever per-sample gradients are at hand (way "stored", tiles, layers
                other than linear ones and tables), and never changes the way. True takes ways
                that are exact for all parameters; False sums in float32 everywhere. Noise is
                exact in all three. `engine.plan()` and `engine.rounded_sums` say what was.
            verify_first_batch: prove on the first batch that the model keeps its samples apart,
                see below. False leaves that out, and `engine.verified` says so.
            allow_buffers: names of buffers and frozen parameters that the forward may change,
                since you vouch that they hold nothing of the data (a counter of steps). All
                others are compared, and a change is refused.

        The proof of the first batch is one more forward and one more backward. In the backward a
        random half of the losses has weight 0: each layer must then see zeros for these samples,
        and the same gradients as before for the others. In the forward most samples are replaced:
        what each layer gets for the others, and what the model returns, must not change. Sorted
        rows, statistics of the batch, scales and routing across samples are refused by the
        layer's name. It is done again where layers run that did not run before, and where
        training flags change; with less than 16 samples, or gradients that are all zero, it goes
        on with the next batches. Of a scalar loss (loss_reduction) the rows of its gradient at
        the model's outputs are weighted, so what makes the scalar of them is not proven.

        Batches of the private loader have a public number of rows, and a sample's row is secret
        and does not depend on the others, so a sample more changes none of the kernels that round
        the others' gradients, in any dtype. Rows that are not samples (`~loader.is_real`) count
        for nothing, whatever their losses. Keep the loader's order of rows up to the losses.
        Three kinds of batches have no such rows: those of Opacus' BatchMemoryManager, those that
        did not come from the loader, and those of a collate_fn that pads to the longest sample,
        whose lengths are not public. There a sample more may round the others anew, beyond the
        bound: in 16 bit one was seen to move the sum by 1.0009 max_grad_norm, by 1.0083 where
        model and data were searched for it. `engine.public` tells what a run has.

        Returns:
            (module, optimizer, data_loader): the same model object, the wrapped optimizer, and
            a loader that draws as the accountant assumes.

        Raises:
            ValueError: naming the argument, its value and the way out; nothing is changed then.
            TypeError: for an unknown keyword.
        """
        if unknown:
            refuse_keywords(unknown, self.make_private)
        if not isinstance(module, nn.Module):
            raise ValueError(f"module={type(module).__name__}: expected a torch.nn.Module")
        if isinstance(max_grad_norm, list | tuple):
            raise ValueError(
                f"max_grad_norm={max_grad_norm!r}: expected one number; clipping='per_layer' "
                "gives each layer an equal share of it"
            )
        noise_fits(max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier)
        max_grad_norm, noise_multiplier = float(max_grad_norm), float(noise_multiplier)
        one_of(optimize=(optimize, LEVELS))
        one_of(way=(way, ("auto", *WAYS)))
        asked_clipping = clipping
        clipping = clipping_for(optimize, clipping, way)
        one_of(clipping=(clipping, CLIPPINGS))
        one_of(loss_reduction=(loss_reduction, (None, "mean", "sum")))
        one_of(clip_function=(clip_function, CLIP_FUNCTIONS))
        one_of(verify_first_batch=(verify_first_batch, (True, False)))
        if clip_function == "automatic" and (clipping == "per_block" or math.isinf(max_grad_norm)):
            raise ValueError(
                f"clip_function='automatic' with clipping={clipping!r} and max_grad_norm="
                f"{max_grad_norm}: it needs a finite bound and flat or per_layer clipping; pass "
                "clip_function='hard' here"
            )
        if clipping != "flat" and way != "auto":
            raise ValueError(f"way={way!r}: ways belong to clipping='flat'; leave way='auto' here")
        check_exact(exact, way, noise_multiplier, max_grad_norm)
        if optimize == "none" and way not in ("auto", "stored"):
            raise ValueError(
                f"way={way!r} with optimize='none', where each layer keeps its per-sample "
                "gradients (way='stored'); leave way='auto', or pass optimize='conservative'"
            )
        if way == "two_pass" and loss_reduction is not None:
            raise ValueError(
                "way='two_pass' weights the losses of the samples, so it needs them one by one; "
                "leave loss_reduction=None and call engine.backward(losses)"
            )
        if physical_batch_size is not None:
            positive_int(physical_batch_size=physical_batch_size)
        sampling = sampling_of(sampling, poisson_sampling, physical_batch_size, max_batch_size)
        public_size = public_size_of(sampling, dataset_size, sample_rate, steps_per_epoch)
        if budget is not None and not isinstance(budget, PrivacyBudget):
            raise ValueError(
                f"budget={budget!r}: expected a dpflash.PrivacyBudget(epsilon, delta) or None"
            )
        if memory_budget is not None:
            positive_int(memory_budget=memory_budget)
        if self._model is not None:
            raise ValueError("this engine has a model already; call engine.detach(model) first")

        def checked() -> tuple[
            list[nn.Parameter], PrivateDataLoader, list[Group], list[str], int, Optimization
        ]:
            check_module(module, self._workers)
            check_model(module)
            self._check_joint(sampling, way)
            loader = PrivateDataLoader(
                data_loader,
                sampling=sampling,
                key=self._keys.sampling,
                physical_batch_size=physical_batch_size,
                max_batch_size=max_batch_size,
                share=(self._workers.data_rank, self._workers.data_size),
                public_size=public_size,
                public_length=public_length,
            )
            check_slots(loader.expected_batch_size, max_grad_norm)
            refuse_mixing(data_loader, may_sort=loader.slots is None)
            trained = trained_parameters(module, optimizer)
            entries = []
            if self._workers.everyone is not None:
                entries = digests_of(loader.dataset, self._keys.master)
            expected = math.ceil(loader.expected_batch_size / self._workers.data_size)
            planned = physical_batch_size or expected
            budget_bytes = memory_budget or default_memory_budget(trained[0].device)
            asked = Asked(optimize, asked_clipping, way, planned, budget_bytes, self._workers)
            optimization = choose(asked, module, trained)
            if loss_reduction == "mean":
                narrow = narrow_parameters(module)
                refuse_coarse_mean(f"parameter '{narrow[0]}' in 16 bit" if narrow else None)
                refuse_coarse_mean(f"optimize={optimize!r}" if optimization.autocast else None)
            groups = make_groups(module, trained, clipping)
            check_allowed(module, trained, allow_buffers)
            return trained, loader, groups, entries, planned, optimization

        trained, loader, groups, entries, planned, optimization = self._workers.on_all(
            "make_private", checked
        )
        names = {p: n for n, p in module.named_parameters()}
        self._workers.agree(
            "make_private",
            {
                "noise_multiplier": float(noise_multiplier),
                "max_grad_norm": float(max_grad_norm),
                "clipping": clipping,
                "clip_function": clip_function,
                "way": way,
                "optimize": optimize,
                "exact": exact,
                "sampling": self._sampling_of(loader),
                "entries of the dataset": len(loader.dataset),  # type: ignore[arg-type]
                "physical_batch_size": physical_batch_size,
                "loss_reduction": loss_reduction,
                "budget": budget,
                "verify_first_batch": verify_first_batch,
                "allow_buffers": sorted(allow_buffers),
                "parameters": [(names[p], tuple(p.shape), p.dtype) for p in trained],
            },
        )
        require_same_data(entries, self._workers)
        self._spending.begin(loader.event(float(noise_multiplier)), budget)
        join(module, self._workers)
        step = PrivateStep(
            optimizer,
            trained,
            names=names,
            tracker=loader.tracker,
            sampler=loader,
            spending=self._spending,
            keys=self._keys,
            ranks=self._workers,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            divisor=1.0 if loss_reduction == "sum" else loader.expected_batch_size,
            exact=exact is not False,
        )
        if max_batch_size is not None and max_batch_size < loader.expected_batch_size:
            warnings.warn(
                f"max_batch_size={max_batch_size!r} is below the expected batch size, so most "
                "draws are cut and epsilon is infinite; pass one well above it",
                stacklevel=2,
            )
        for parameter in trained:
            parameter.grad = None
        unchanged = Unchanged(module, trained, allow_buffers)
        ranks = self._workers
        proof = Proof(
            module.modules(),
            device=trained[0].device,
            group=ranks.everyone if step.is_sharded else ranks.context,
            context=ranks.context,
            is_on=verify_first_batch,
        )
        if verify_first_batch:
            allow_second_backwards()
        device = trained[0].device
        planner = Planner(
            way="stored" if optimize == "none" or exact is True else way,
            memory_budget=self._common(memory_budget or default_memory_budget(device)),
            batch_size=planned,
            two_pass_allowed=loss_reduction is None and clipping == "flat",
            book_keeping_allowed=ranks.context is None,
            ceilings=ceilings_for(device),
        )
        backward = PrivateBackward(
            groups,
            step,
            planner,
            loss_reduction=loss_reduction,
            clip_function=clip_function,
            gate_type=Gate if ranks.context is None else ContextGate,
            convolves=any(isinstance(m, _ConvNd) for m in module.modules()),
            proof=proof,
            refusal=unchanged.before_backward,
        )
        attach(module, backward)

        def place() -> tuple[object, ...]:
            return (step.releases, step.tracker.place(), ranks.data_rank)

        devices = frozenset(p.device for p in module.parameters() if p.device.type != "cpu")
        masks = SecretMasks(devices, lambda: self._keys.noise, place)
        self._leveled = LeveledForward(
            module, backward, optimization, unchanged, masks, loader.order
        )
        self._leveled.put()
        _log.info("%s", optimization.summary)
        private_optimizer = PrivateOptimizer(
            optimizer,
            step,
            expected_batch_size=loader.expected_batch_size,
            loss_reduction=loss_reduction,
        )
        self._model, self._backward, self._step = module, backward, step
        self._clipping = clipping
        self._optimizer, self._loader = private_optimizer, loader
        return module, private_optimizer, loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float,
        clipping: str | None = None,
        way: str = "auto",
        clip_function: str = "hard",
        poisson_sampling: bool = True,
        sampling: str | None = None,
        physical_batch_size: int | None = None,
        max_batch_size: int | None = None,
        dataset_size: int | None = None,
        sample_rate: float | None = None,
        steps_per_epoch: int | None = None,
        public_length: int | None = None,
        loss_reduction: str | None = None,
        memory_budget: int | None = None,
        budget: PrivacyBudget | None = None,
        optimize: str = DEFAULT_LEVEL,
        exact: bool | str = "auto",
        verify_first_batch: bool = True,
        allow_buffers: Sequence[str] = (),
        **unknown: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PrivateDataLoader]:
        """`make_private` with the noise that spends target_epsilon after `epochs` passes.

        Args:
            target_epsilon: epsilon > 0 at the end of training.
            target_delta: delta in (0, 1), well below 1 / size of the dataset.
            epochs: passes over the loader, >= 1.
            budget: a limit on the sum of what was spent before and is spent from now on, while
                target_epsilon is for the coming epochs alone.

        The other arguments, the result and the errors are those of `make_private`.
        """
        if "noise_multiplier" in unknown:
            raise ValueError(
                f"noise_multiplier={unknown['noise_multiplier']!r} beside a target epsilon: the "
                "target decides the noise. Drop it, or call make_private"
            )
        if unknown:
            refuse_keywords(unknown, self.make_private_with_epsilon)
        positive(target_epsilon=target_epsilon)
        finite(target_epsilon=target_epsilon)
        probability(target_delta=target_delta)
        positive_int(epochs=epochs)
        sampling = sampling_of(sampling, poisson_sampling, physical_batch_size, max_batch_size)
        drawn = PrivateDataLoader(
            data_loader,
            sampling=sampling,
            key=bytes(32),
            max_batch_size=max_batch_size,
            public_size=public_size_of(sampling, dataset_size, sample_rate, steps_per_epoch),
        )
        if target_delta >= 1 / drawn.dataset_size:
            warnings.warn(
                f"target_delta={target_delta!r} is not below 1 / {drawn.dataset_size} entries of "
                "the data: releasing one of them outright would be allowed; choose it well below",
                stacklevel=2,
            )
        if not self._spending.is_empty:
            warnings.warn(
                "the accountant has spent privacy already; target_epsilon covers the coming "
                "epochs alone, get_epsilon the sum",
                stacklevel=2,
            )
        noise_multiplier = self._spending.noise_for(
            drawn.event,
            epochs if sampling == "shuffled" else epochs * drawn.steps_per_epoch,
            epsilon=target_epsilon,
            delta=target_delta,
        )
        noise_multiplier = float(
            self._workers.from_first(repr(noise_multiplier).encode(), "the noise multiplier")
        )
        made = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            clipping=clipping,
            way=way,
            clip_function=clip_function,
            poisson_sampling=poisson_sampling,
            sampling=sampling,
            physical_batch_size=physical_batch_size,
            max_batch_size=max_batch_size,
            dataset_size=dataset_size,
            sample_rate=sample_rate,
            steps_per_epoch=steps_per_epoch,
            public_length=public_length,
            loss_reduction=loss_reduction,
            memory_budget=memory_budget,
            budget=budget,
            optimize=optimize,
            exact=exact,
            verify_first_batch=verify_first_batch,
            allow_buffers=allow_buffers,
        )
        if budget is None:
            self._spending.set_delta(target_delta)
        return made

    def backward(self, losses: Tensor) -> None:
        """Add the clipped gradients of a batch to the logical batch's sum.

        Args:
            losses: [B], one number for each row of the batch in the loader's order, computed from
                that row alone; those of padding rows count for nothing. A scalar only where
                make_private got loss_reduction.

        Raises:
            ValueError: for another shape, or a number of losses that is not the batch's.
            RuntimeError: for losses that reached no private layer, or a second call on a batch.

        Guarantees:
            Each sample changes the sum by at most max_grad_norm in L2, over all parameters
            together, whatever its loss; one with a NaN or Inf gradient changes it by nothing. In
            batches without public slots up to how the others are rounded, see `make_private`.
        """
        backward = self._attached()
        if not isinstance(losses, Tensor):
            raise ValueError(f"losses={type(losses).__name__}: expected a tensor [B]")
        scalar_allowed = backward.loss_reduction is not None
        if losses.ndim != 1 and not (scalar_allowed and losses.ndim == 0):
            scalar = (
                "; a scalar is taken only where it is a reduction over samples, declared by "
                "make_private(loss_reduction=...); Hugging Face's own loss, over tokens, is not"
            )
            raise ValueError(
                f"losses has shape {tuple(losses.shape)}: expected one loss per sample, [B]. Use "
                "dpflash.losses, or reduction='none' and a mean over each sample's own elements"
                + ("" if losses.ndim else scalar)
            )
        if losses.ndim == 1 and losses.shape[0] == 0 and self._workers.everyone is None:
            # Beside other workers an empty batch has its part in what they exchange.
            backward.step.tracker.before_backward(0)
            return
        if not losses.requires_grad:
            raise RuntimeError(
                "losses do not require grad, so they reach no private layer: compute them from "
                "the model's output outside of torch.no_grad() and without detach()"
            )
        if losses.ndim == 1:
            backward.step.tracker.before_backward(losses.shape[0])
        nonfinite = backward.statistics.nonfinite_samples
        try:
            with without_autocast(losses.device.type):
                backward.backward(losses)
        except BaseException:
            # Its sums are dropped, so the batch may be tried again.
            backward.step.tracker.dropped()
            raise
        found = backward.statistics.nonfinite_samples - nonfinite
        if found:
            warnings.warn(
                f"{found} sample(s) of a batch had a NaN or Inf gradient and contributed "
                "zero (their number is private: do not release it)",
                stacklevel=2,
            )

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
        """How many more steps of the present kind the budget allows; None without a budget.

        For a shuffled loader, what is left of a pass that is paid for counts, and then whole
        passes.
        """
        return None if self._step is None else self._step.remaining_steps()

    @property
    def accountant(self) -> Accountant:
        """What counts the releases."""
        return self._spending.accountant

    @property
    def _noiseless(self) -> bool:
        return self._spending.noiseless

    @property
    def sampler(self) -> str:
        """How the batches of the releases were drawn, as accounted for."""
        name = "none" if self._loader is None else self._loader.sampler_name
        if self._spending.has_foreign_batches:
            return f"{name}, some batches not from its loader"
        return name

    @property
    def neighboring_relation(self) -> str:
        """What epsilon is for: "add_remove", "zero_out" or "replace_one" of one sample."""
        return self._spending.relation

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
            batch: what loss_fn takes: a tensor, a tuple or a dict of tensors whose first
                dimension is the batch, of two samples or more. Four to eight are enough. The
                report is not covered by epsilon, so rather use data that are nobody's.
            loss_fn: loss_fn(model, batch) -> losses [B]; it calls the model that it is given.
            loss_reduction: "mean" or "sum" as declared to make_private; loss_fn then returns a
                scalar, and what is tried is whether the scalar of several batches, and its
                gradient, is that reduction of what their samples give alone.

        Returns:
            A CheckReport: `.ok`, `.problems`, and as text what was and was not checked. It is a
            test on this batch, not a proof.

        Raises:
            ValueError: for a batch that holds no tensor, one sample, or samples of unequal number,
                and for another loss_reduction than None, "mean" and "sum".
        """
        return run_check(model, batch, loss_fn, loss_reduction=loss_reduction)

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
        """What the level that make_private was given changes; as text, sentence by sentence.

        Raises:
            ValueError: no model is private.
        """
        if self._leveled is None:
            raise ValueError("optimization before make_private: there is no private model yet")
        return self._leveled.optimization

    @property
    def verified(self) -> bool | str:
        """Whether real batches have proven that the model keeps its samples apart.

        True, or False where make_private(verify_first_batch=False) left that out; "pending" until
        enough samples were seen, and every layer that ran had gradients that are not zero;
        "gradients" where only these are proven, since no call of the model itself was seen in
        which samples could be replaced (its layers are called one by one, or it went through
        your own torch.compile); "forward" where the model returns its loss as a scalar, so that
        losses of single samples cannot be weighted. It depends on the data no more than a refusal
        does. A factor that the batch makes of all losses, as the count of its tokens, is not
        seen: `check` tries it.

        Raises:
            ValueError: no model is private.
        """
        backward, _ = self._require_private("verified")
        return backward.proof.verified

    def plan(self) -> ClippingPlan:
        """How each matrix parameter's clipped gradient is computed, and why.

        Costs are those of the last forward pass's shapes, so run the model once before.

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
                "per-sample gradients, so nothing is planned; engine.optimization tells what that "
                "takes. Pass optimize='balanced' for a planned model"
            )
        return explain_plan(backward, self.public)

    @property
    def public(self) -> PublicFacts:
        """What of the batches is public: slots, lengths, the dataset's size; as text, by line.

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
            is_declared=self._loader.has_public_size,
        )

    @property
    def rounded_sums(self) -> tuple[str, ...]:
        """Names of the parameters whose sums were rounded in float32 in some batch so far.

        Of all others each sum was exact: one sample moves it by at most its bound in real
        arithmetic, whatever the order of the samples.

        Raises:
            ValueError: no model is private.
        """
        backward, _ = self._require_private("rounded_sums")
        return tuple(sorted(backward.step.rounded))

    def _require_private(self, method: str) -> tuple[PrivateBackward, PrivateOptimizer]:
        if self._backward is None or self._optimizer is None:
            raise ValueError(f"{method}() before make_private: there is no private model yet")
        return self._backward, self._optimizer

    def prepare(self, batch_size: int) -> None:
        """Get a torch.compile'd model ready for a batch that did not come from the loader."""
        positive_int(batch_size=batch_size)
        self._attached().forward.prepare(batch_size)

    def detach(self, model: nn.Module) -> nn.Module:
        """Give the plain model back; it keeps its parameters, the engine its spent privacy."""
        if model is not self._model:
            raise ValueError("model is not the one that this engine made private")
        self._attached().discard()
        assert self._leveled is not None and self._leveled.unchanged is not None
        refusal = self._leveled.unchanged.refusal()
        if refusal is not None:
            warnings.warn(
                f"the model that is given back is not for release: {refusal}", stacklevel=2
            )
        self._leveled.remove()
        detach(model)
        part(model)
        assert self._optimizer is not None
        self._optimizer.release_original()
        # The next model starts counting at 0 again; under the old keys it would repeat the noise.
        self._keys.begin_model()
        self._spending.set_budget(None)
        self._model = self._backward = self._leveled = None
        return model

    def save_checkpoint(
        self, path: str | os.PathLike[str], *, extra: dict[str, Any] | None = None
    ) -> None:
        """Write everything a later process needs to go on, with whatever number of workers.

        Parameters, optimizer, spent privacy, noise counter and the loader's position, so that the
        checkpoint is at any moment the old one or the new one. The clipped sum of an unfinished
        logical batch is left out: the batch is drawn again.

        Args:
            path: the file; with a mesh a folder, on a file system that all workers share: all of
                them call this together, each writes its part of the model, the first one the
                rest. It holds the noise key and can be read by its owner only: keep it as secret
                as the data, and release model.state_dict() instead.
            extra: plain values (numbers, strings, lists, tensors) that load_checkpoint returns;
                with a mesh, those of the first worker.

        Raises:
            ValueError: extra holds what could not be read again; path is a folder where a file
                is to be written, or the reverse.
            RuntimeError: a buffer or a frozen parameter changed, see make_private(allow_buffers=);
                or another worker failed, as its message says; the checkpoint before this
                one is as it was.
        """
        self._attached()
        assert self._model is not None and self._optimizer is not None
        assert self._leveled is not None and self._leveled.unchanged is not None
        self._workers.on_all("save_checkpoint", self._leveled.unchanged.compare)
        sharded_checkpoint.save(
            path,
            lambda: self._own_state(extra),
            model=self._model,
            optimizer=self._optimizer.original_optimizer,
            workers=self._workers,
            as_folder=self._has_mesh,
        )

    def _own_state(self, extra: dict[str, Any] | None) -> dict[str, Any]:
        """What a checkpoint holds beside model and optimizer; the same on all workers."""
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
            "loader": self._loader.state_dict(),
            "sampling": self._sampling(),
            "clipping": self._clipping,
            "clip_function": self._attached().clip_function,
            "extra": extra or {},
        }

    def load_checkpoint(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Go on from a checkpoint, after the same make_private call.

        A file or a folder, of an engine with or without a mesh: the number of workers and how the
        model lies on them may differ from the run that wrote it. With a mesh all workers call
        this together, and each reads what it needs.

        With a seed or a ledger the run goes on bit for bit as if it had not stopped; else it draws
        the same batches with noise under a new key, since the run that wrote the checkpoint may
        have gone on with the old one. Where the ledger has releases that the checkpoint does not
        know, they stay counted, and noise and sampling both go on under new keys.

        Returns:
            What save_checkpoint got as `extra`.

        Raises:
            FileNotFoundError, ValueError: for a missing, damaged or mismatched checkpoint;
                nothing is changed then.
            RuntimeError: where steps were released already and no ledger remembers them, or
                another worker could not read the checkpoint.
        """
        backward = self._attached()
        assert self._model is not None and self._optimizer is not None
        assert self._loader is not None

        def check(state: dict[str, Any]) -> None:
            assert self._model is not None and self._optimizer is not None
            checkpoint.check_fits(
                path,
                state,
                shapes=sharded_checkpoint.shapes(self._model),
                optimizer=self._optimizer,
                sampling=self._sampling(),
                mechanism=type(self.accountant).mechanism(),
                ledger=self._ledger,
            )

        state = sharded_checkpoint.load(
            path,
            model=self._model,
            optimizer=self._optimizer.original_optimizer,
            workers=self._workers,
            check=check,
        )
        assert self._step is not None
        here = (self._keys.master, self._keys.incarnation, self._step.releases)
        there = (state["key"], state["incarnation"], state["releases"])
        spent = not self._spending.is_empty or self._optimizer.releases
        if self._ledger is None and spent and here != there:
            raise RuntimeError(
                f"path={os.fspath(path)!r}: this engine has spent privacy already, and loading "
                "would forget it. Load into a new engine, right after make_private; to go back "
                "within a run use PrivacyEngine(ledger=...)"
            )
        self._spending.load_state_dict(state["spending"])
        checkpoint.warn_of_changes(
            state,
            restored={
                "noise_multiplier": self._optimizer.noise_multiplier,
                "max_grad_norm": self._optimizer.max_grad_norm,
            },
            kept={"clipping": self._clipping, "clip_function": backward.clip_function},
        )
        sharded_checkpoint.put(self._model, state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        releases = None if self._ledger is None else self._ledger.releases
        self._keys.load_state_dict(state, ledger_releases=releases)
        self._loader.set_key(self._keys.sampling)
        self._loader.load_state_dict(state["loader"])
        self._step.resume(
            releases=state["releases"],
            noise_multiplier=state["noise_multiplier"],
            max_grad_norm=state["max_grad_norm"],
        )
        return dict(state["extra"])

    def diagnostics(self) -> dict[str, Any]:
        """Numbers for the eyes of who trains. PRIVATE: no epsilon covers them; do not release.

        Returns:
            per_sample_norms: of the samples of the last backward, padding rows left out (of the
            last group when per_layer);
            clip_fraction and nonfinite_samples: over all samples so far.
        """
        statistics = self._attached().statistics
        squares = statistics.squared_norms
        return {
            "per_sample_norms": None if squares is None else squares.sqrt(),
            "clip_fraction": statistics.clipped_samples / max(statistics.seen_samples, 1),
            "nonfinite_samples": statistics.nonfinite_samples,
        }

    def _attached(self) -> PrivateBackward:
        if self._backward is None:
            raise RuntimeError("no model is private yet; call engine.make_private first")
        return self._backward

    def _sampling(self) -> dict[str, Any]:
        assert self._loader is not None
        return self._sampling_of(self._loader)

    @staticmethod
    def _sampling_of(loader: PrivateDataLoader) -> dict[str, Any]:
        return {
            "sampler": loader.sampler_name,
            "num_samples": loader.dataset_size,
            "expected_batch_size": loader.expected_batch_size,
            "max_batch_size": loader.max_batch_size,
        }

    def _common(self, number: int) -> int:
        """The first worker's number."""
        return int(self._workers.from_first(str(number).encode(), "the memory budget"))

    def _check_joint(self, sampling: str, way: str) -> None:
        """Refuse what several workers cannot do together."""
        if self._workers.everyone is not None and sampling == "shuffled":
            raise ValueError(
                "sampling='shuffled' (poisson_sampling=False) with a mesh: the loaders of the "
                "workers shuffle each by itself; use sampling='poisson' or 'fixed_size'"
            )
        if self._workers.context is not None and way == "book_keeping":
            raise ValueError(
                "way='book_keeping' with a context dimension: norms need the sum over a sample's "
                "shards, so gradients are made; use way='auto', 'stored' or 'two_pass'"
            )
