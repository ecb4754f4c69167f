"""Checks the arguments of make_private together, before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from .clipping.groups import Group
from .clipping.planner import default_memory_budget
from .clipping.precision import narrow_parameters, refuse_coarse_mean
from .config import PerformanceConfig, PrivacyConfig
from .distributed.mesh import Ranks
from .distributed.validate import check_module, digests_of
from .grad_rules.convert import check_model, make_groups
from .optimize.levels import Asked, Optimization, choose
from .optimizer import trained_parameters
from .packing import PackTo
from .packing.pack import EXACT_ALIGN
from .privacy.keys import RunKeys
from .privacy.privacy_unit import SAMPLE, has_several_rows
from .sampling.collate import refuse_mixing
from .sampling.entries import ReadableEntries
from .sampling.loader import PrivateDataLoader
from .sampling.plan import SamplingPlan
from .sampling.slots import check_slots
from .sampling.unit_groups import UnitGroups
from .verification.unchanged import check_allowed


class CheckedArguments(NamedTuple):
    """What the checks found out.

    Attributes:
        trained: the parameters to train.
        loader: the private one.
        groups: the clipping groups.
        entries: digests of some entries of the dataset, where there are several ranks.
        planned_batch_size: samples of a microbatch for the planner's costs.
        optimization: what the optimization level does.
    """

    trained: list[nn.Parameter]
    loader: PrivateDataLoader
    groups: list[Group]
    entries: list[str]
    planned_batch_size: int
    optimization: Optimization


def check_arguments(
    given: tuple[nn.Module, torch.optim.Optimizer, DataLoader],
    privacy: PrivacyConfig,
    performance: PerformanceConfig,
    *,
    clipping_asked: str | None,
    plan: SamplingPlan | None,
    keys: RunKeys,
    ranks: Ranks,
) -> CheckedArguments:
    """Check model, optimizer, data loader and both configurations together.

    Args:
        given: model, optimizer and data loader.
        privacy, performance: after `config.resolved`.
        clipping_asked: as it was passed.
        plan: how logical batches are drawn, where it is known already.
        keys: of sampling and of the digests of entries.
        ranks: this process and its peers.

    Raises:
        ValueError: naming the argument; nothing is changed then.
    """
    module, optimizer, data_loader = given
    mode = performance.grad_sample_mode
    check_module(module, ranks)
    check_model(module)
    _check_joint(privacy, mode, ranks)
    plan = plan or sampling_plan(data_loader, privacy)
    loader = PrivateDataLoader(
        data_loader,
        plan,
        key=keys.sampling,
        physical_batch_size=performance.physical_batch_size,
        rank_part=(ranks.data_rank, ranks.data_size),
        public_length=privacy.public_length,
        # Ranks refuse them together, in the step.
        foreign_batches=privacy.foreign_batches or ranks.everyone is not None,
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
    trained = trained_parameters(module, optimizer)
    entries = []
    if ranks.everyone is not None:
        entries = digests_of(ReadableEntries(loader.dataset), keys.master)
    expected = math.ceil(loader.expected_batch_size / ranks.data_size)
    planned = performance.physical_batch_size or expected
    if plan.packing is not None:
        planned = plan.packing.max_documents
    memory = performance.memory_budget or default_memory_budget(trained[0].device)
    level = Asked(performance.optimize, clipping_asked, mode, planned, memory, ranks)
    optimization = choose(level, module, trained)
    if optimization.compiled and plan.unit != SAMPLE:
        optimization = optimization.without_compiler(f"the privacy unit is a {plan.unit}")
    if privacy.loss_reduction == "mean":
        narrow = narrow_parameters(module)
        refuse_coarse_mean(f"parameter '{narrow[0]}' in 16 bit" if narrow else None)
        level_name = f"optimize={performance.optimize!r}"
        refuse_coarse_mean(level_name if optimization.autocast else None)
    assert privacy.clipping is not None
    groups = make_groups(module, trained, privacy.clipping, privacy.bounds)
    check_allowed(module, privacy.allow_buffers)
    return CheckedArguments(trained, loader, groups, entries, planned, optimization)


def sampling_plan(data_loader: DataLoader, privacy: PrivacyConfig) -> SamplingPlan:
    """How logical batches are drawn. A function unit_of reads the whole dataset.

    Raises:
        ValueError: the loader cannot be replaced, or unit_of does not fit the dataset.
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
    return SamplingPlan.of(
        data_loader,
        sampling=privacy.sampling,
        max_batch_size=privacy.max_batch_size,
        max_dataset_size=privacy.max_dataset_size,
        public_size=privacy.public_size,
        groups=groups,
    )


def agree_on_arguments(
    checked: CheckedArguments,
    names: Mapping[nn.Parameter, str],
    privacy: PrivacyConfig,
    performance: PerformanceConfig,
    ranks: Ranks,
) -> None:
    """Raise where the ranks passed different arguments."""
    ranks.agree(
        "make_private",
        {
            "noise_multiplier": privacy.noise_multiplier,
            "max_grad_norm": privacy.max_grad_norm,
            "clipping": privacy.clipping,
            "clip_function": privacy.clip_function,
            "grad_sample_mode": performance.grad_sample_mode,
            "optimize": performance.optimize,
            "exact": privacy.exact,
            "sampling": checked.loader.plan.scheme,
            "entries of the dataset": len(checked.loader.dataset),  # type: ignore[arg-type]
            "physical_batch_size": performance.physical_batch_size,
            "loss_reduction": privacy.loss_reduction,
            "budget": privacy.budget,
            "verify_first_batch": privacy.verify_first_batch,
            "allow_buffers": sorted(privacy.allow_buffers),
            "foreign_batches": privacy.foreign_batches,
            "parameters": [(names[p], tuple(p.shape), p.dtype) for p in checked.trained],
        },
    )


def _check_foreign(unit: str, ranks: Ranks) -> None:
    """Refuse batches that are not of the loader where nothing bounds a unit's part of them."""
    if has_several_rows(unit):
        raise ValueError(
            "foreign_batches=True with unit_of or Pairs: a unit may be in several rows of a batch "
            "that is not of the private loader, each clipped by itself; leave it out"
        )
    if ranks.everyone is not None:
        raise ValueError(
            "foreign_batches=True with a mesh: ranks may hold the same samples, or different "
            "ones in one row, and nothing bounds that; leave it out"
        )


def _check_packed(
    collate: PackTo, privacy: PrivacyConfig, performance: PerformanceConfig, ranks: Ranks
) -> None:
    """Refuse options that do not go with packed documents."""
    packed = "with collate_fn=PackTo(...)"
    if type(collate) is not PackTo:
        raise ValueError(
            f"data_loader.collate_fn={type(collate).__name__}, a subclass of PackTo: what it puts "
            "into a batch (targets of its own, say) may be of other documents, and no trial "
            "changes it. Pass PackTo(...), and compute the rest from the batch in the loop"
        )
    if privacy.sampling == "shuffled":
        raise ValueError(
            f"sampling='shuffled' (poisson_sampling=False) {packed}: its microbatches "
            "are packed from each draw; use sampling='poisson' or 'fixed_size'"
        )
    if privacy.loss_reduction is not None:
        raise ValueError(
            f"loss_reduction={privacy.loss_reduction!r} {packed}, where documents have "
            "losses of their own; pass those of dpflash.losses with sample_index= to backward"
        )
    if performance.physical_batch_size is not None:
        raise ValueError(
            f"physical_batch_size={performance.physical_batch_size} {packed}, which determines "
            "the size of microbatches by its tokens and max_documents; leave it out"
        )
    if ranks.context is not None and privacy.exact is True:
        raise ValueError(
            f"exact=True {packed} on a mesh with a context dimension, whose ranks cut documents "
            "where they are packed, so that bits depend on the place; leave exact='auto'"
        )


def _check_pairs(privacy: PrivacyConfig, ranks: Ranks) -> None:
    """Refuse options that do not go with pairs of rows."""
    pairs = "with collate_fn=Pairs(...)"
    if privacy.sampling == "shuffled":
        raise ValueError(
            f"sampling='shuffled' (poisson_sampling=False) {pairs}: rows of its batches would be "
            "clipped each by itself; use sampling='poisson' or 'fixed_size'"
        )
    if privacy.loss_reduction is not None:
        raise ValueError(
            f"loss_reduction={privacy.loss_reduction!r} {pairs}: a scalar is no loss of pairs; "
            "pass engine.backward one loss for each pair"
        )
    if privacy.unit_of is not None and privacy.unit_sampling == "unit":
        raise ValueError(
            f"unit_of {pairs}: pairs of one user are not clipped as one; pass "
            "unit_sampling='example', which clips each pair and counts those of a user"
        )
    if ranks.context is not None:
        raise ValueError(
            f"a mesh with a context dimension {pairs}: the rows of a pair would cross ranks, "
            "which is not supported; use a data dimension alone"
        )


def _check_exact_packing(collate: PackTo, module: nn.Module) -> None:
    """Refuse exact=True where a document's bits depend on where it is packed."""
    if collate.align % EXACT_ALIGN:
        raise ValueError(
            f"exact=True with PackTo(align={collate.align}), where kernels tile a document by its "
            f"place in the batch; pass align={EXACT_ALIGN}, or leave exact='auto'"
        )
    threads = torch.get_num_threads()
    on_cpu = any(p.device.type == "cpu" for p in module.parameters())
    if on_cpu and collate.tokens % (EXACT_ALIGN * math.lcm(*range(1, threads + 1))):
        raise ValueError(
            f"exact=True with PackTo(tokens={collate.tokens}) on {threads} CPU threads, among "
            "which torch cuts tensors inside of documents and rounds differently at the cuts; "
            "call torch.set_num_threads(2), make tokens a multiple of "
            f"{EXACT_ALIGN * math.lcm(*range(1, threads + 1))}, or leave exact='auto'"
        )


def _check_joint(privacy: PrivacyConfig, mode: str, ranks: Ranks) -> None:
    """Refuse options that do not work with several ranks."""
    if ranks.everyone is not None and privacy.sampling == "shuffled":
        raise ValueError(
            "sampling='shuffled' (poisson_sampling=False) with a mesh: the loader of each "
            "rank shuffles independently; use sampling='poisson' or 'fixed_size'"
        )
    if ranks.context is not None and mode == "book_keeping":
        raise ValueError(
            "grad_sample_mode='book_keeping' with a context dimension: norms need the sum "
            "over a sample's shards, so gradients are made; use 'auto', 'instantiate' or "
            "'ghost'"
        )
    draws_units = privacy.unit_of is not None and privacy.unit_sampling == "unit"
    if ranks.context is not None and draws_units:
        raise ValueError(
            "unit_of with a mesh that has a context dimension: users whose rows are spread over "
            "ranks are not supported; use a data dimension alone, or unit_sampling='example'"
        )
