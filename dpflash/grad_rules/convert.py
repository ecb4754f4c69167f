"""Makes the layers of a model private in place, and plain again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from ..clipping.backward import PrivateBackward
from ..clipping.groups import (
    Bounds,
    Group,
    flat_groups,
    per_block_groups,
    per_layer_groups,
    with_bounds,
)
from . import ModuleContext, PrivateModule, block_rule_for, rule_for
from .base import plain_class
from .generic import PrivateParametrized
from .linear import PrivateConv1D, PrivateLinear
from .owner import PrivateOwner


def check_model(model: nn.Module) -> None:
    """Refuse, by dotted name, what cannot be trained privately.

    Raises:
        ValueError: for modules that mix samples, and for trainable parameters that no rule covers.
    """
    for name, module in _modules(model):
        check_module(name or "(the model itself)", module)


def check_module(name: str, module: nn.Module) -> None:
    """`check_model` for one module, without its children."""
    if isinstance(module, PrivateModule):
        raise ValueError(f"module '{name}' is private already; call engine.detach(model) first")
    if isinstance(module, _BatchNorm) and not _is_frozen(module):
        raise ValueError(
            f"module '{name}' is {type(module).__name__}: it mixes the samples of a batch, so "
            "no sample's gradient can be bounded. Replace it by nn.GroupNorm or nn.LayerNorm, or "
            "freeze it: .eval() and requires_grad_(False) before make_private"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise ValueError(
            f"module '{name}' is {type(module).__name__} with track_running_stats=True: its "
            "statistics mix samples and leave the model unprotected. Set it to False"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) has max_norm={module.max_norm}: it "
            "rewrites the rows that the data look up, trainable or not, so they would leave "
            "without noise. Set max_norm=None"
        )
    own = [n for n, p in _own_parameters(module).items() if p.requires_grad]
    if own:
        _check_owner(name, module, own)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that no layer below it has too, as `decoder.bias` of BERT's head.

    Those are that layer's. Where the module itself uses one, its gradient is not the clipped sum,
    and the step refuses the release.
    """
    if parametrize.is_parametrized(module):
        return dict(module.named_parameters())
    below = {id(p) for child in module.children() for p in child.parameters()}
    return {n: p for n, p in module._parameters.items() if p is not None and id(p) not in below}


def _check_owner(name: str, module: nn.Module, own: list[str]) -> None:
    kind = type(module).__name__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(f"module '{name}' is a lazy {kind}; run the model once before this call")
    if isinstance(module, nn.MultiheadAttention):
        raise ValueError(
            f"module '{name}' is torch.nn.MultiheadAttention, which uses its projections outside "
            "of their modules. Replace it by dpflash.nn.MultiheadAttention"
        )
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        raise ValueError(
            f"module '{name}' is {kind}: recurrent layers have no rule for private training. "
            "Replace it by attention (dpflash.nn), or freeze it with requires_grad_(False)"
        )
    if isinstance(module, nn.EmbeddingBag):
        raise ValueError(f"module '{name}' is an EmbeddingBag; use nn.Embedding and a sum")
    if isinstance(module, nn.Embedding):
        # Gradients of PrivateEmbedding are dense, so sparse=True changes nothing there.
        own_forward = type(module).forward is not nn.Embedding.forward
        for flag in ("scale_grad_by_freq", *(["sparse"] if own_forward else [])):
            if getattr(module, flag):
                raise ValueError(
                    f"module '{name}' has {flag}=True, which has no rule for private training. "
                    f"Set {flag}=False"
                )
    if parametrize.is_parametrized(module):
        _check_parametrized(name, module)
        return
    weight = module._parameters.get("weight", module)
    if isinstance(module, nn.Linear | nn.Embedding) and not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"module '{name}' ({kind}) computes its weight from other parameters (weight_norm, "
            "pruning), which has no rule for private training. Make the weight a parameter again"
        )
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        raise ValueError(
            f"module '{name}' is a {kind}: its parameters are used by another module, where no "
            "rule for private training covers them. Use layers such as nn.Linear instead"
        )
    if "forward" in module.__dict__:
        raise ValueError(
            f"module '{name}' has a forward of its own on the instance (a wrapper or hook put it "
            "there), which would bypass private training. Remove it before make_private"
        )


def _is_frozen(module: _BatchNorm) -> bool:
    """Whether a batch norm maps each sample by itself, by statistics that are kept."""
    has_statistics = module.running_mean is not None and module.running_var is not None
    trained = any(p.requires_grad for p in module.parameters())
    return has_statistics and not module.training and not trained


def _check_parametrized(name: str, module: nn.Module) -> None:
    children = [m for n, m in module.named_modules() if n and "parametrizations" not in n]
    parametrizations: Any = module.parametrizations
    if any(True for child in children for _ in child.parameters()):
        raise ValueError(
            f"module '{name}' is parametrized and has layers below it, which has no rule for "
            "private training. Call torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if any(True for _ in parametrizations.buffers()):
        raise ValueError(
            f"module '{name}' has a parametrization that keeps statistics (spectral_norm), which "
            "would be released without noise. Call "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name. What computes a parametrized weight is a part of the layer."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            inside |= {id(m) for m in module.parametrizations.modules()}
        if id(module) not in inside:
            yield name, module


def owners(
    model: nn.Module, trained: Iterable[nn.Parameter]
) -> list[tuple[str, list[nn.Parameter]]]:
    """(name, own trained parameters) of each module, in the model's order."""
    wanted = {id(p) for p in trained}
    return [
        (name, own)
        for name, module in _modules(model)
        if (own := [p for p in _own_parameters(module).values() if id(p) in wanted])
    ]


def untraceable(model: nn.Module) -> str | None:
    """Name of the first module whose private forward torch.compile cannot trace; None if none."""
    for name, module in _modules(model):
        trained = any(p.requires_grad for p in _own_parameters(module).values())
        rule = rule_for(module) if trained else block_rule_for(module)
        if rule is not None and issubclass(rule, (PrivateOwner, PrivateParametrized)):
            return name or "(the model itself)"
    return None


def tileable(model: nn.Module) -> set[int]:
    """Ids of the weights that are clipped by tiles: those of one linear layer and nothing else."""
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append(module)
    return {
        key
        for key, modules in users.items()
        if len(modules) == 1
        and rule_for(modules[0]) in (PrivateLinear, PrivateConv1D)
        and key == id(modules[0].weight)
    }


def attach(model: nn.Module, backward: PrivateBackward) -> None:
    """Swap the class of every module that holds trainable parameters for its private one.

    Objects, parameters, buffers and state_dict keys stay the same.
    """
    for name, module in list(_modules(model)):
        own = _own_parameters(module)
        trained = any(p.requires_grad for p in own.values())
        rule = rule_for(module) if trained else block_rule_for(module)
        if rule is None:
            continue
        module.__dict__["_dpflash"] = ModuleContext(
            backward,
            name,
            {n: backward.slots[id(p)] for n, p in own.items() if id(p) in backward.slots},
            frozenset(n for n, p in own.items() if not p.requires_grad),
        )
        original = type(module)
        module.__class__ = type(f"Private{original.__name__}", (rule, original), {})


def detach(model: nn.Module) -> None:
    """Restore the original classes of the modules."""
    for module in model.modules():
        if isinstance(module, PrivateModule):
            original = plain_class(module)
            del module.__dict__["_dpflash"]
            object.__setattr__(module, "__class__", original)


def make_groups(
    module: nn.Module, trained: list[nn.Parameter], clipping: str, bounds: Bounds | None = None
) -> list[Group]:
    """The clipping groups of a kind of clipping, with equal bounds where none are given."""
    if clipping == "flat":
        return flat_groups(trained)
    if clipping == "per_layer":
        groups = per_layer_groups(owners(module, trained))
    else:
        names = {p: n for n, p in module.named_parameters()}
        groups = per_block_groups(trained, names, tileable(module))
    return groups if bounds is None else with_bounds(groups, bounds)
