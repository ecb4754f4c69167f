"""Checks the arguments of make_private and builds the PrivateRun from them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils.data import DataLoader, Subset, TensorDataset

from ._validate import counted, positive_int
from .clipping.backward import PrivateBackward
from .clipping.context_gate import ContextGate
from .clipping.device_speed import ceilings_for
from .clipping.gate import Gate
from .clipping.groups import Group
from .clipping.planner import Planner, default_memory_budget
from .clipping.precision import narrow_parameters, refuse_coarse_mean
from .config import AUTO, PerformanceConfig, PrivacyConfig, Settings
from .distributed.mesh import Ranks
from .distributed.validate import check_module, digests_of, require_same_data, synchronize_ranks
from .grad_rules.convert import Layer, attach, check_model, make_groups
from .grad_rules.embedding import padding_rows
from .isolation.backward_rows import allow_second_backwards
from .isolation.example import ExampleTrial, samples_in
from .isolation.place import PlaceTrial
from .isolation.proof import Proof
from .isolation.sandbox import Sandbox
from .isolation.schedule import Schedule
from .isolation.trial import Trial
from .kernels import grid_of
from .kernels.attention_vendor import FAST, OWN
from .kernels.devices import problem_with
from .noise import Banded, compare_bands
from .optimize.captured import CapturedCalls, obstacle
from .optimize.float8 import with_float8
from .optimize.levels import Asked, Optimization, choose
from .optimize.wrapper import ForwardWrapper
from .optimizer import PrivateOptimizer, joined, listed, trained_parameters
from .packing import PackTo
from .packing.pack import EXACT_ALIGN
from .privacy.keys import RunKeys
from .privacy.privacy_unit import SAMPLE, has_several_rows
from .privacy.seeds import SecretMasks
from .privacy.source import about_run, source_digest
from .privacy.spending import Spending
from .refusal import PrivateRefusal, warn
from .run import PrivateRun, take_over
from .sampling.collate import refuse_mixing
from .sampling.entries import ReadableEntries
from .sampling.loader import PrivateDataLoader
from .sampling.plan import ENTRIES_OF_UNITS, SamplingPlan
from .sampling.slots import check_slots
from .sampling.unit_groups import UnitGroups
from .step import (
    BandedGaussian,
    Charge,
    ClippedSums,
    PrivateStep,
    ReleaseOptions,
    RoundedGaussian,
    Turns,
)
from .verification.unchanged import Unchanged, check_allowed
from .verification.uncovered import Uncovered

_log = logging.getLogger(__name__)

# The settings that must be equal on all ranks, in addition to `SamplingPlan.scheme`.
_EQUAL = (
    *("noise_multiplier", "max_grad_norm", "clipping", "clip_function", "loss_reduction"),
    *("budget", "exact", "verify_first_batch", "foreign_batches"),
    *("grad_sample_mode", "optimize", "fp8", "physical_batch_size", "attention_backend"),
)
_OF_DRAWS = (
    *("sampling", "noise_mechanism", "max_batch_size", "max_dataset_size"),
    *("dataset_size", "sample_rate", "steps_per_epoch"),
)

_USUAL_DELTA = 1e-5  # assumed if no delta is known
# With this bound the grid step is 1e-5. Without noise, smaller gradients are rounded to zero.
_COARSE_BOUND = 1e4


class Given(NamedTuple):
    """The objects passed to make_private."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    data_loader: DataLoader


class _Checked(NamedTuple):
    layers: list[Layer]
    trained: list[nn.Parameter]
    groups: list[Group]
    loader: PrivateDataLoader
    entries: list[str]  # digests of some entries of the dataset; empty for one rank
    planned_batch_size: int  # samples of a microbatch, for the planner's costs
    optimization: Optimization


def build(
    given: Given,
    settings: Settings,
    plan: SamplingPlan | None,
    *,
    keys: RunKeys,
    spending: Spending,
    ranks: Ranks,
    as_folder: bool,
    delta: float | None = None,
) -> PrivateRun:
    """Make a model, its optimizer and its data loader private; all ranks call this together.

    Args:
        given, settings: the arguments of make_private.
        plan: the sampling plan; None to compute the plan here.
        keys, spending, ranks: the engine's.
        as_folder: whether checkpoints are folders, not single files.
        delta: delta at which epsilon is reported if there is no budget.

    Raises:
        ValueError: names the argument; nothing has been changed.
    """
    module, _, data_loader = given
    optimizers = listed(given.optimizer)
    privacy = settings.privacy

    def checks() -> _Checked:
        releases = take_over(module)
        if releases and spending.is_empty:
            warn(
                "another PrivacyEngine trained this model, and the new epsilon does "
                "not count its releases. If both train on data of the same people, use one "
                "engine, or pass the same PrivacyEngine(ledger=...) to both, or "
                "accountant=earlier.accountant",
            )
        found = _check(given, settings, plan, keys, ranks)
        if _is_trained_on(data_loader.dataset, spending) and not releases:
            warn(
                "another PrivacyEngine trained on this dataset: each engine's epsilon counts only "
                "its own releases, but the epsilons add up for people in both datasets. Use one "
                "engine, or pass PrivacyEngine(ledger=...) to all engines, or "
                "accountant=earlier.accountant",
            )
        return found

    bound, is_exact = privacy.bound, privacy.exact is not False
    if privacy.noise_multiplier == 0 and is_exact and _COARSE_BOUND < bound < math.inf:
        warn(
            f"max_grad_norm={bound!r} without noise: exact sums have steps of "
            f"{grid_of(bound):.1g}, and smaller gradients become zero; pass "
            "max_grad_norm=math.inf for no clipping"
        )
    checked = ranks.run_on_all("make_private", checks)
    trained, loader = checked.trained, checked.loader
    names = {p: n for n, p in module.named_parameters()}
    parameters = [(names[p], tuple(p.shape), p.dtype) for p in trained]
    _agree(settings, loader, parameters, keys, ranks)
    require_same_data(checked.entries, ranks)
    plan = loader.plan
    event = plan.event(settings.noise_multiplier)
    about = None
    if spending.ledger is not None:
        about = about_run(privacy.run_name, privacy.data_name, keys.seed is not None, ranks)
        about["dataset_size"] = plan.dataset_size
        if (budget := privacy.budget) is not None:
            about |= {"max_epsilon": float(budget.epsilon), "at_delta": float(budget.delta)}
    spending.begin(event, privacy.budget, unit=plan.unit, grouping=plan.grouping, about=about)
    if privacy.budget is None and delta is not None:
        spending.set_delta(delta)
    if (budget := privacy.budget) is not None and not spending.fits(event):
        warn(
            f"the privacy budget epsilon={budget.epsilon:g} at delta={budget.delta:g} is spent, "
            "so training ends before its first step"
        )
    synchronize_ranks(module, ranks)
    step = PrivateStep(
        joined(optimizers),
        ClippedSums(trained, names=names, ranks=ranks, exact=privacy.exact is not False),
        tracker=loader.tracker,
        options=ReleaseOptions(
            joined(optimizers),
            noise_multiplier=settings.noise_multiplier,
            max_grad_norm=privacy.bound,
            expected_batch_size=loader.expected_batch_size,
            divides=privacy.loss_reduction != "sum",
        ),
        charge=Charge(spending, keys, plan, loader.tracker, ranks),
        kind_of_noise=(
            RoundedGaussian(keys, trained)
            if plan.mechanism is None or plan.bands == 1
            else BandedGaussian(plan.mechanism, keys, trained)
        ),
        padding_rows=padding_rows(module),
    )
    _warn_of_sizes(data_loader, plan, spending.delta)
    for parameter in trained:
        parameter.grad = None
    unchanged = Unchanged(module, trained, privacy.allow_buffers)
    uncovered = Uncovered(module, trained)
    trial = place_trial = example = None
    if privacy.verify_first_batch:
        sandbox = Sandbox(
            module.named_modules(), unchanged.allowed_contents, optimizers, step.options.numbers
        )
        schedule = Schedule(
            loader.expected_batch_size,
            has_ranks=ranks.everyone is not None,
            path=lambda: uncovered.path,
        )
        trial = Trial(sandbox, schedule)
        declared = privacy.loss_reduction
        # No place trials on context ranks, whose losses are of their own tokens only.
        if (plan.packing is None and declared is None) or ranks.context is None:
            place_trial = PlaceTrial(
                sandbox,
                has_ranks=ranks.everyone is not None,
                devices=_devices_of(module),
                modules=module.modules,
                is_alone=ranks.context is None and not step.sums.is_sharded,
                declared=declared,
                numbers=step.options.numbers,
            )
        if privacy.example is not None:
            example = ExampleTrial(privacy.example, sandbox)
        loader.try_first(trial, place_trial, example)
    backward = _backward(module, checked, settings, step, unchanged, uncovered)
    backward.try_first(trial, place_trial, example)
    attach(module, checked.layers, backward, checked.optimization.float8)
    step.watch_gradients()

    masks = SecretMasks(
        _devices_of(module),
        lambda: keys.noise,
        lambda: (step.releases, step.tracker.place(), ranks.data_rank),
        lambda: step.tracker.received,
    )
    optimization, captured = checked.optimization, None
    if settings.performance.cuda_graph:
        why = obstacle(backward, optimization)
        if why is None:
            captured = CapturedCalls(module, backward, step)
        else:
            optimization = optimization.with_change(f"left out: CUDA graphs, since {why}")
    wrapper = ForwardWrapper(
        module, backward, optimization, unchanged, masks, loader.seen, uncovered, captured,
        OWN if privacy.exact is True else settings.performance.attention_backend,
    )  # fmt: skip
    wrapper.put()
    _log.info("%s", optimization.summary)
    turns = Turns(joined(optimizers), step)
    return PrivateRun(
        settings=settings,
        model=module,
        loader=loader,
        step=step,
        optimizers=[
            PrivateOptimizer(o, step, turns, loss_reduction=privacy.loss_reduction)
            for o in optimizers
        ],
        backward=backward,
        wrapper=wrapper,
        trial=trial,
        place_trial=place_trial,
        keys=keys,
        spending=spending,
        as_folder=as_folder,
    )


# id of a dataset -> (a weak reference to the dataset, [(spending, entries), ...]). The list has
# the engines that have released steps on the dataset, and the engine that used the dataset last.
# `entries` are the indices from which the engine's loader samples; None for all entries.
_spendings: dict[int, tuple[ref[Any], list[tuple[Spending, set[Any] | None]]]] = {}


def _is_trained_on(dataset: Any, spending: Spending) -> bool:
    """Return True if another engine trained on this dataset and this engine has no release yet.

    Two subsets of a dataset count as the same dataset if they have an entry in common.
    """
    origin, entries = _origin(dataset)
    key = id(origin)
    try:
        own = ref(origin, lambda _: _spendings.pop(key, None))
    except TypeError:  # no weak reference, such as to a list
        return False
    _, before = _spendings.get(key, (own, []))
    earlier: list[tuple[Spending, set[Any] | None]] = []
    for known, of in before:
        is_covered = any(wide is None or (of is not None and of <= wide) for _, wide in earlier)
        if not (known.is_empty or is_covered):
            earlier.append((known, of))
    _spendings[key] = own, [*earlier, (spending, entries)]
    shared = (entries is None or of is None or not entries.isdisjoint(of) for _, of in earlier)
    return spending.is_empty and any(shared)


def _origin(dataset: Any) -> tuple[Any, set[Any] | None]:
    """Return (the object that holds a dataset's entries, their indices or None for all)."""
    entries: Sequence[Any] | None = None
    while isinstance(dataset, Subset):
        own = dataset.indices
        entries = own if entries is None else [own[i] for i in entries]
        dataset = dataset.dataset
    if isinstance(dataset, TensorDataset) and dataset.tensors:
        dataset = dataset.tensors[0]
    try:
        return dataset, None if entries is None else set(np.asarray(entries).tolist())
    except (TypeError, ValueError):  # an index is several numbers
        return dataset, None


def _devices_of(module: nn.Module) -> frozenset[torch.device]:
    return frozenset(p.device for p in module.parameters() if p.device.type != "cpu")


def _check_devices(module: nn.Module) -> None:
    for device in sorted(_devices_of(module), key=str):
        problem = problem_with(device)
        if problem is not None:
            raise ValueError(f"module has parameters on {problem}")


def _check(
    given: Given, settings: Settings, plan: SamplingPlan | None, keys: RunKeys, ranks: Ranks
) -> _Checked:
    """Check model, optimizer, data loader and settings together, without changing anything."""
    module, optimizer, data_loader = given
    privacy, performance = settings.privacy, settings.performance
    mode = performance.grad_sample_mode
    check_module(module, ranks)
    _check_devices(module)
    layers = check_model(module)
    _check_joint(privacy, mode, ranks)
    plan = plan or sampling_plan(data_loader, privacy)
    loader = PrivateDataLoader(
        data_loader,
        plan,
        key=keys.sampling,
        physical_batch_size=performance.physical_batch_size,
        rank_part=(ranks.data_rank, ranks.data_size),
        public_length=privacy.public_length,
        # With several ranks, optimizer.step() refuses foreign batches, on all ranks together.
        foreign_batches=privacy.foreign_batches or ranks.everyone is not None,
        devices=_devices_of(module),
    )
    if privacy.foreign_batches:
        _check_foreign(plan.unit, ranks)
    check_slots(loader.expected_batch_size, privacy.bound)
    if plan.packing is not None:
        _check_packed(plan.packing, privacy, performance, ranks)
        if privacy.exact is True:
            _check_exact_packing(plan.packing, module)
    else:
        refuse_mixing(data_loader, may_sort=loader.slots is None)
    if plan.has_pairs:
        _check_pairs(privacy, ranks)
    if privacy.example is not None:
        samples_in(privacy.example)
    trained = trained_parameters(module, listed(optimizer))
    entries = []
    if ranks.everyone is not None:
        entries = digests_of(ReadableEntries(loader.dataset), keys.master)
    expected = math.ceil(loader.expected_batch_size / ranks.data_size)
    planned = performance.physical_batch_size or expected
    if plan.packing is not None:
        planned = plan.packing.max_documents
    memory = performance.memory_budget or default_memory_budget(trained[0].device)
    level = Asked(performance.optimize, settings.asked_clipping, mode, planned, memory, ranks)
    optimization = choose(level, module, layers, trained)
    if optimization.compiled and plan.unit != SAMPLE:
        optimization = optimization.without_compiler(f"the privacy unit is a {plan.unit}")
    if privacy.loss_reduction == "mean":
        narrow = narrow_parameters(module)
        refuse_coarse_mean(f"parameter '{narrow[0]}' in 16 bit" if narrow else None)
        level_name = f"optimize={performance.optimize!r}"
        refuse_coarse_mean(level_name if optimization.autocast else None)
        refuse_coarse_mean("fp8=True" if performance.fp8 else None)
    if performance.fp8:
        optimization = with_float8(optimization, module, layers, trained)
    groups = make_groups(layers, trained, settings.clipping, privacy.bounds)
    check_allowed(module, privacy.allow_buffers)
    return _Checked(layers, trained, groups, loader, entries, planned, optimization)


def sampling_plan(data_loader: DataLoader, privacy: PrivacyConfig) -> SamplingPlan:
    """Return the sampling plan. If unit_of is a function, call it for every entry.

    Raises:
        ValueError: the loader cannot be replaced, or unit_of does not match the dataset.
        PrivateRefusal: the dataset is larger than max_dataset_size, or most entries have no unit.
    """
    groups = None
    if privacy.unit_of is not None and isinstance(data_loader, DataLoader):
        assert privacy.examples_per_unit is not None
        groups = UnitGroups(
            data_loader.dataset,
            privacy.unit_of,
            limit=privacy.examples_per_unit,
            sampling=privacy.unit_sampling,
            unit_name=privacy.unit_name,
        )
    declared = {name: getattr(privacy, name) for name in _OF_DRAWS}
    if declared["noise_mechanism"] == AUTO:
        declared["noise_mechanism"] = None
    return SamplingPlan.of(data_loader, **declared, groups=groups)


def memory_of_states(given: Given, performance: PerformanceConfig) -> tuple[int, int]:
    """Return (elements of trained parameters, bytes that states of banded noise may take)."""
    if not isinstance(given.module, nn.Module):
        return 1, 1  # make_private refuses this module later
    trained = trained_parameters(given.module, listed(given.optimizer))
    memory = performance.memory_budget or default_memory_budget(trained[0].device)
    return sum(parameter.numel() for parameter in trained), memory


def calibrated(
    plan: SamplingPlan,
    spending: Spending,
    ranks: Ranks,
    *,
    epochs: int | None,
    steps: int | None,
    epsilon: float,
    delta: float,
    state_memory: tuple[int, int] | None = None,
) -> tuple[SamplingPlan, int, float]:
    """Return (plan, steps, noise multiplier) such that these steps spend (epsilon, delta).

    All ranks use the first rank's noise multiplier. If `state_memory` (see `memory_of_states`) is
    passed, the plan's banded noise has the number of bands with the least expected error.
    """
    if steps is None:
        assert epochs is not None
        positive_int(epochs=epochs)
        steps = epochs * plan.steps_per_epoch
    positive_int(steps=steps)
    if delta >= 1 / plan.dataset_size:
        one = plan.unit.split(": ")[-1]
        warn(
            f"target_delta={delta!r} is not below 1 / {plan.dataset_size}, the number of privacy "
            f"units of the data: such a guarantee would permit publishing one {one} unchanged; "
            "choose target_delta well below this value",
        )
    if not spending.is_empty:
        warn(
            "the accountant has spent privacy already; target_epsilon covers the coming epochs "
            "alone, but get_epsilon returns the sum. If you call load_checkpoint next, the run "
            "continues with the checkpoint's noise multiplier",
        )
    if state_memory is not None:
        plan = _with_bands(plan, spending, ranks, steps, epsilon, delta, state_memory)
    count = plan.events_of(steps)
    noise = spending.noise_for(plan.event, count, epsilon=epsilon, delta=delta)
    agreed = ranks.broadcast_from_first(repr(noise).encode(), "the noise multiplier")
    return plan, steps, float(agreed)


def _with_bands(
    plan: SamplingPlan,
    spending: Spending,
    ranks: Ranks,
    steps: int,
    epsilon: float,
    delta: float,
    state_memory: tuple[int, int],
) -> SamplingPlan:
    """Return the plan with the noise bands of least error; several need cyclic sampling."""
    parameters, memory = state_memory
    # The factor offsets the quotient's rounding, so that no part is smaller than a batch.
    size = math.floor(plan.batch_size / plan.sample_rate * (1 + 1e-9))
    found = compare_bands(
        num_samples=size,
        batch_size=plan.batch_size,
        epochs=steps / -(-size // plan.batch_size),
        target_epsilon=epsilon,
        target_delta=delta,
        parameters=parameters,
        max_memory=memory,
        relation=plan.event(1.0).relation,
        accountant=spending.accountant,
    )
    chosen = ranks.broadcast_from_first(
        json.dumps(found[0].noise.coefficients).encode(), "the bands of the noise"
    )
    coefficients = json.loads(chosen)
    noise = Banded(bands=len(coefficients), coefficients=tuple(coefficients))
    ratio = found[0].expected_error / next(
        run.expected_error for run in found if run.noise.bands == 1
    )
    _log.info(
        "noise_mechanism='auto': %s, with %.3g times the error of independent noise, and states "
        "of %.3g MB",
        counted(noise.bands, "band"),
        ratio,
        noise.state_bytes(parameters) / 1e6,
    )
    if noise.bands == 1:
        return plan
    return replace(plan, sampling="cyclic_poisson", mechanism=noise)


def _agree(
    settings: Settings,
    loader: PrivateDataLoader,
    parameters: Sequence[object],
    keys: RunKeys,
    ranks: Ranks,
) -> None:
    """Raise if the ranks passed different arguments, datasets or units.

    Raises:
        PrivateRefusal: the numbers of entries, or the units, differ; both are private.
    """
    plan = loader.plan
    scheme = {name: value for name, value in plan.scheme.items() if name != ENTRIES_OF_UNITS}
    given = {**vars(settings.privacy), **vars(settings.performance)}
    ranks.agree(
        "make_private",
        {
            **{name: given[name] for name in _EQUAL},
            "allow_buffers": sorted(settings.privacy.allow_buffers),
            "example": settings.privacy.example is not None,
            "sampling": scheme,
            "parameters": parameters,
            "the code": source_digest() if ranks.everyone is not None else None,
            "the engine's run": keys.run,  # differs after a detach on one rank alone
        },
    )
    # Units could be guessed and compared with their digest, so no refusal may contain the digest.
    entries = (len(loader.dataset), plan.grouping)  # type: ignore[arg-type]
    found = ranks.gather(entries, "make_private")
    if len(set(found)) > 1:
        raise PrivateRefusal(
            "make_private: data_loader.dataset has other entries, or unit_of returns other units "
            "for them, on another rank; pass the same dataset and units on all ranks (hash() of "
            "texts and the order of a set differ between processes)",
            entries=found,
        ) from None


def _warn_of_sizes(data_loader: DataLoader, plan: SamplingPlan, delta: float | None) -> None:
    asked_for, entries, most = data_loader.batch_size, plan.dataset_size, plan.max_batch_size
    if asked_for is not None and not plan.has_public_size and asked_for > entries:
        warn(
            f"data_loader.batch_size={asked_for} is above the {entries} privacy units of the "
            "data: each logical batch contains every unit, without amplification by sampling. "
            "Pass a smaller batch_size",
        )
    cut = plan.event(1.0).failure() * plan.steps_per_epoch
    if 100 * cut > (delta or min(_USUAL_DELTA, 1 / entries)):
        warn(
            f"max_batch_size={most}: each epoch adds (1 + exp(epsilon)) * {cut:.2g} to delta, "
            "since a batch may be truncated. So epsilon is infinite at delta < "
            f"{min(1, 2 * cut):.2g}, and too large near it; pass "
            f"max_batch_size={plan.least_free_cut} or more",
        )


def _backward(
    module: nn.Module,
    checked: _Checked,
    settings: Settings,
    step: PrivateStep,
    unchanged: Unchanged,
    uncovered: Uncovered,
) -> PrivateBackward:
    privacy, performance = settings.privacy, settings.performance
    ranks, device, seen = step.sums.ranks, checked.trained[0].device, checked.loader.seen
    proof = Proof(
        module.modules(),
        device=device,
        group=ranks.everyone if step.sums.is_sharded else ranks.context,
        context=ranks.context,
        is_on=privacy.verify_first_batch,
    )
    if privacy.verify_first_batch:
        allow_second_backwards()
    only_instantiate = performance.optimize == "none" or privacy.exact is True
    # The two backwards of "ghost" must compute the same gradients.
    repeats = performance.attention_backend != FAST
    memory = performance.memory_budget or default_memory_budget(device)
    planner = Planner(
        mode="instantiate" if only_instantiate else performance.grad_sample_mode,
        memory_budget=int(ranks.broadcast_from_first(str(memory).encode(), "the memory budget")),
        batch_size=checked.planned_batch_size,
        ghost_allowed=repeats and privacy.loss_reduction is None and settings.clipping == "flat",
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
            seen.refusal()
            or unchanged.before_backward()
            or uncovered.refusal(losses, batch, leading)
        ),
    )


def _check_foreign(unit: str, ranks: Ranks) -> None:
    """Refuse foreign_batches if a unit could be in several rows of such a batch."""
    if has_several_rows(unit):
        raise ValueError(
            "foreign_batches=True with unit_of or Pairs: a unit may be in several rows of such a "
            "batch, and each row is clipped by itself; leave foreign_batches out"
        )
    if ranks.everyone is not None:
        raise ValueError(
            "foreign_batches=True with a mesh: one sample could be on several ranks, or one row "
            "could hold several samples, so one sample's effect has no bound; leave it out"
        )


def _check_packed(
    collate: PackTo, privacy: PrivacyConfig, performance: PerformanceConfig, ranks: Ranks
) -> None:
    packed = "with collate_fn=PackTo(...)"
    if type(collate) is not PackTo:
        raise ValueError(
            f"data_loader.collate_fn={type(collate).__name__}, a subclass of PackTo: tensors that "
            "the subclass adds to a batch (such as targets) may mix documents, and no test covers "
            "them. Pass PackTo(...), and compute these tensors from the batch in the loop"
        )
    if privacy.sampling == "shuffled":
        raise ValueError(
            f"sampling='shuffled' (poisson_sampling=False) {packed}, which cannot "
            "pack a loader's own batches; use sampling='poisson' or 'fixed_size'"
        )
    if privacy.loss_reduction is not None:
        raise ValueError(
            f"loss_reduction={privacy.loss_reduction!r} {packed}, which needs a loss for each "
            "document; leave it out, and pass dpflash.losses with sample_index= to engine.backward"
        )
    if performance.physical_batch_size is not None:
        raise ValueError(
            f"physical_batch_size={performance.physical_batch_size} {packed}, whose tokens= and "
            "max_documents= determine the size of microbatches; leave physical_batch_size out"
        )
    if ranks.context is not None and privacy.exact is True:
        raise ValueError(
            f"exact=True {packed} on a mesh with a context dimension: a document's rounding "
            "depends on where ranks divide the document, and so on its position in the batch; "
            "leave exact='auto'"
        )


def _check_pairs(privacy: PrivacyConfig, ranks: Ranks) -> None:
    pairs = "with collate_fn=Pairs(...)"
    if privacy.sampling == "shuffled":
        raise ValueError(
            f"sampling='shuffled' (poisson_sampling=False) {pairs}: each row would be clipped by "
            "itself, not each pair; use sampling='poisson' or 'fixed_size'"
        )
    if privacy.loss_reduction is not None:
        raise ValueError(
            f"loss_reduction={privacy.loss_reduction!r} {pairs}: a scalar cannot be split into "
            "pairs; leave it out, and pass engine.backward one loss for each pair"
        )
    if privacy.unit_of is not None and privacy.unit_sampling == "unit":
        raise ValueError(
            f"unit_of {pairs}: the pairs of one user cannot be clipped together; pass "
            "unit_sampling='example', which clips each pair and accounts for a user's pairs"
        )
    if ranks.context is not None:
        raise ValueError(
            f"a mesh with a context dimension {pairs}: pairs whose rows are on several ranks are "
            "not supported; use a data dimension alone"
        )


def _check_exact_packing(collate: PackTo, module: nn.Module) -> None:
    if collate.align % EXACT_ALIGN:
        raise ValueError(
            f"exact=True with PackTo(align={collate.align}): a document's rounding would depend "
            f"on its position in the batch; pass align={EXACT_ALIGN}, or leave exact='auto'"
        )
    threads = torch.get_num_threads()
    on_cpu = any(p.device.type == "cpu" for p in module.parameters())
    if on_cpu and collate.tokens % (EXACT_ALIGN * math.lcm(*range(1, threads + 1))):
        raise ValueError(
            f"exact=True with PackTo(tokens={collate.tokens}) on {threads} CPU threads: "
            "torch may divide a document among threads, which changes the document's rounding; "
            "call torch.set_num_threads(2), make tokens a multiple of "
            f"{EXACT_ALIGN * math.lcm(*range(1, threads + 1))}, or leave exact='auto'"
        )


def _check_joint(privacy: PrivacyConfig, mode: str, ranks: Ranks) -> None:
    if ranks.everyone is not None and privacy.sampling == "shuffled":
        raise ValueError(
            "sampling='shuffled' (poisson_sampling=False) with a mesh: the loader of each "
            "rank shuffles independently; use sampling='poisson' or 'fixed_size'"
        )
    if ranks.context is not None and mode == "book_keeping":
        raise ValueError(
            "grad_sample_mode='book_keeping' with a context dimension: a sample's norm needs the "
            "sum of the sample's gradients over the ranks, so the gradients must be computed; use "
            "'auto', 'instantiate' or 'ghost'"
        )
    draws_units = privacy.unit_of is not None and privacy.unit_sampling == "unit"
    if ranks.context is not None and draws_units:
        raise ValueError(
            "unit_of with a mesh that has a context dimension: users whose rows are spread over "
            "ranks are not supported; use a data dimension alone, or unit_sampling='example'"
        )
