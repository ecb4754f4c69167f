"""Checks a model before training, and replaces layers that cannot be trained (Opacus' API)."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..grad_rules.convert import check_module
from ..optimizer import listed, trained_parameters
from ..refusal import warn
from ..sampling.plan import check_loader
from .layers import refused_modules
from .report import ITSELF

_MOST_GROUPS = 32
# Smallest number of channels in a group if statistics are over channels alone (1d).
_LEAST_CHANNELS = 4


def get_compatible_module(module: nn.Module) -> nn.Module:
    """Copy a model, and replace the copy's layers that private training refuses.

    `nn.BatchNorm1d`, `2d`, `3d` and `nn.SyncBatchNorm` are replaced by `nn.GroupNorm` of
    gcd(32, channels) groups (fewer in 1d, where a group of one channel would be constant) with the
    same weight and bias. `nn.InstanceNorm` is replaced by a copy that does not track statistics.
    `max_norm` of embeddings is set to None. Frozen batch norms in eval mode are not replaced. A
    warning lists the replaced layers, since the copy computes other outputs. Build the optimizer
    from the copy's parameters.

    Args:
        module: the plain model; it is not changed.

    Returns:
        The copy, on the same devices and with the same dtypes.

    Raises:
        ValueError: names each module of the copy that make_private would still refuse.
    """
    for name, part in module.named_modules():
        if issubclass(type(part), LazyModuleMixin):
            check_module(name, part)  # a lazy module cannot be copied
    module = copy.deepcopy(module)
    replaced: dict[nn.Module, nn.Module] = {}
    done = []
    for name, old in list(module.named_modules()):
        new, what = _replacement(old)
        if what:
            done.append(f"{name or ITSELF}: {what}")
            replaced[old] = new
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in replaced:
                setattr(parent, name, replaced[child])
    module = replaced.get(module, module)
    if done:
        warn(
            "get_compatible_module replaced: "
            + "; ".join(done)
            + ". Build the optimizer from the parameters of the model that it returned",
        )
    validate(module=module)
    return module


def validate(
    *,
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    data_loader: DataLoader | None = None,
) -> None:
    """Raise one error with all reasons why make_private would refuse the arguments; read no data.

    Args:
        module: the model.
        optimizer: the optimizer or optimizers of all trained parameters; None to skip the check.
        data_loader: has a batch_size, and samples all entries alike; None to skip the check.

    Raises:
        ValueError: names each problem and what to do, one problem per line.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module={type(module).__name__}: expected a torch.nn.Module")
    problems = [str(error) for _, error in refused_modules(module)]
    for check in (
        lambda: optimizer is None or trained_parameters(module, listed(optimizer)),
        lambda: data_loader is None or check_loader(data_loader, sampling="poisson"),
    ):
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def is_compatible(
    *,
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    data_loader: DataLoader | None = None,
) -> bool:
    """Return whether `validate` accepts model, optimizer and data loader."""
    try:
        validate(module=module, optimizer=optimizer, data_loader=data_loader)
    except ValueError:
        return False
    return True


def _replacement(module: nn.Module) -> tuple[nn.Module, str]:
    """Return (replacement of a refused module, description), or (module, "") without one."""
    if isinstance(module, LazyModuleMixin):
        return module, ""
    try:
        check_module("", module)
    except ValueError:
        pass
    else:
        return module, ""
    kind = type(module).__name__
    if isinstance(module, _BatchNorm):
        norm = _group_norm(module)
        if norm is None:
            return module, ""
        return norm, f"{kind} by GroupNorm of {norm.num_groups} groups"
    if isinstance(module, _InstanceNorm):
        without = type(module)(module.num_features, module.eps, affine=module.affine)
        return _with_affine(without, module), f"{kind} without running statistics"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        module.max_norm = None
        return module, f"max_norm of {kind} by None"
    return module, ""


def _group_norm(module: _BatchNorm) -> nn.GroupNorm | None:
    channels = module.num_features
    groups = math.gcd(_MOST_GROUPS, channels)
    if isinstance(module, nn.BatchNorm1d):
        while groups > 1 and channels // groups < _LEAST_CHANNELS:
            groups //= 2
        if channels == groups:
            return None  # A group of one channel in 1d would normalize one number.
    norm = nn.GroupNorm(groups, channels, module.eps, affine=module.affine)
    _with_affine(norm, module)
    return norm


def _with_affine(norm: nn.Module, old: nn.Module) -> nn.Module:
    for name, parameter in old.named_parameters(recurse=False):
        norm.register_parameter(name, parameter)
    return norm.train(old.training)
