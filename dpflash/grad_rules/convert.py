"""Makes the layers of a model private in place, and restores them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..clipping.backward import PrivateBackward
from ..clipping.groups import (
    Bounds,
    Group,
    flat_groups,
    per_layer_groups,
    with_bounds,
)
from ..verification.optimizer_hooks import hook_of_optimizer
from . import ModuleContext, PrivateModule, block_rule_for, rule_for
from .base import plain_class, plain_forward
from .batch_second import BatchSecond, batch_second
from .experts import check_routing
from .float8 import Float8Weight
from .generic import PrivateLeaf, PrivateParametrized
from .linear import PrivateConv1D
from .owner import PrivateOwner
from .peft import check_adapter, is_adapter

_OF_ATTENTION = (
    "in_proj_weight",
    "q_proj_weight",
    "k_proj_weight",
    "v_proj_weight",
    "in_proj_bias",
)
_OF_CELL = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_HOOKS = {WeightNorm: "weight_norm", SpectralNorm: "spectral_norm"}


class Layer(NamedTuple):
    """A module whose parameters no module above it owns."""

    name: str  # dotted; "" for the model itself
    module: nn.Module
    own: dict[str, nn.Parameter]  # its parameters, except those of layers below it

    @property
    def rule(self) -> type[PrivateModule] | None:
        """The class that makes the module private; None if the module stays as it is."""
        trained = any(p.requires_grad for p in self.own.values())
        return rule_for(self.module) if trained else block_rule_for(self.module)


def check_model(model: nn.Module) -> list[Layer]:
    """Refuse a model that cannot be trained privately; the message names the module.

    Returns:
        The model's layers.

    Raises:
        ValueError: a module mixes samples, a trainable parameter has no rule, or a forward was
            assigned to the model object.
    """
    if "forward" in vars(model) and not _was_compiled(model) and not _is_scripted(model):
        raise ValueError(
            "module.forward was assigned to the object (by Accelerator.prepare with "
            "mixed_precision, or by a hook), so the private forward would not run: pass the model "
            "as its class defines it, and call prepare on the objects that make_private returns"
        )
    inside = parts_of_layers(model)
    refuse_compiled(model)
    for name, module in model.named_modules():
        check_module(name or "(the model itself)", module, is_inside=module in inside)
    return layers_of(model, inside)


def check_module(name: str, module: nn.Module, *, is_inside: bool = False) -> None:
    """Check one module as `check_model` does. `is_inside`: a layer above owns its parameters."""
    if isinstance(module, PrivateModule):
        raise ValueError(f"module '{name}' is private already; call engine.detach(model) first")
    if type(module).__name__.startswith("GradSampleModule"):
        raise ValueError(
            f"module '{name}' is a {type(module).__name__} of Opacus, whose hooks are not needed "
            "and keep per-sample gradients: pass the plain module, its to_standard_module()"
        )
    if _is_scripted(module):
        raise ValueError(
            f"module '{name}' is compiled by torch.jit, whose layers no rule for private training "
            "covers. Pass the plain model, before torch.jit.script or trace"
        )
    if _was_compiled(module):
        _refuse_compiled(name, module)
    _check_computed(name, module)
    if (refusal := hook_of_optimizer(name, module)) is not None:
        raise ValueError(refusal)
    if isinstance(module, _BatchNorm) and (is_inside or not _is_frozen(module)):
        freeze = ", or freeze it: .eval() and requires_grad_(False) before make_private"
        if module.running_mean is None:
            freeze = "; without running statistics .eval() uses those of the batch too"
        raise ValueError(
            f"module '{name}' is {type(module).__name__}: it mixes the samples of a batch, so "
            "no sample's gradient can be bounded. Replace it by nn.GroupNorm or nn.LayerNorm "
            f"(PrivacyEngine.get_compatible_module(model) does){freeze}"
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise ValueError(
            f"module '{name}' is {type(module).__name__} with track_running_stats=True: its "
            "statistics mix samples and leave the model unprotected. Set it to False"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        raise ValueError(
            f"module '{name}' ({type(module).__name__}) has max_norm={module.max_norm}: each "
            "look-up rewrites rows of the table, trainable or not, and the changes would be "
            "released without noise. Set max_norm=None"
        )
    check_routing(name, module)
    if not is_inside:
        check_adapter(name, module)
    if isinstance(module, nn.MultiheadAttention):
        _check_torch_layer(name, module, _OF_ATTENTION)
    if isinstance(module, nn.RNNBase):
        _check_torch_layer(name, module, module._flat_weights_names)
    if isinstance(module, nn.RNNCellBase):
        _check_torch_layer(name, module, _OF_CELL)
    own = [n for n, p in _own_parameters(module).items() if p.requires_grad]
    if own and not is_inside:
        _check_owner(name, module, own)


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _was_compiled(module: nn.Module) -> bool:
    return hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")


def refuse_compiled(model: nn.Module) -> None:
    """Refuse modules below the model that torch.compile has compiled."""
    for name, module in model.named_modules():
        if module is not model and (module._compiled_call_impl or _was_compiled(module)):
            _refuse_compiled(name, module)


def _refuse_compiled(name: str, module: nn.Module) -> None:
    if any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"module '{name}' is compiled by torch.compile, which would not run the private "
            "layers. Use the plain module (module._orig_mod), also after make_private: "
            "make_private itself compiles the model if optimize= says so"
        )


def _check_computed(name: str, module: nn.Module) -> None:
    """Refuse parameters that a hook computes before each forward: no rule covers them."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod):
            way, key = "prune.remove", hook._tensor_name
        elif isinstance(hook, WeightNorm | SpectralNorm):
            way, key = f"remove_{_HOOKS[type(hook)]}", hook.name
        else:
            continue
        then = (
            ", and parametrizations.weight_norm behind it" if isinstance(hook, WeightNorm) else ""
        )
        if any(p.requires_grad for p in module._parameters.values() if p is not None):
            raise ValueError(
                f"parameter '{key}' of module '{name}' ({type(module).__name__}) is computed by a "
                f"hook from others, which no rule for private training covers. Call "
                f"torch.nn.utils.{way}(module, {key!r}) first{then}"
            )


def _check_torch_layer(name: str, module: nn.Module, names: Collection[str]) -> None:
    """Refuse a layer with a forward of its own, with computed weights (parametrizations,
    weight_norm, pruning), or with parameters other than `names`.
    """
    if not any(p.requires_grad for p in module.parameters()):
        return
    if rule_for(module) in (PrivateLeaf, PrivateOwner):
        raise ValueError(
            f"module '{name}' is {type(module).__name__}, a {_torch_kind(module)} with a forward "
            "of its own, which no rule for private training covers. Use the "
            f"plain {_torch_kind(module)} inside a module, or freeze it with requires_grad_(False)"
        )
    computed = [n for n in names if n not in module._parameters]
    others = [n for n, p in module._parameters.items() if n not in names and p is not None]
    others = [n for n in others if n not in ("bias_k", "bias_v")]
    if computed or others:
        raise ValueError(
            f"parameters {computed + others} of module '{name}' ({type(module).__name__}) are "
            "computed from others (weight_norm, pruning, a parametrization) or unknown to the "
            "rule for private training. Make them parameters of the plain layer again"
        )


def _torch_kind(module: nn.Module) -> str:
    """Return the name of the torch layer from which a module's class is derived."""
    kinds = (k for k in type(module).__mro__ if k.__module__.startswith("torch.nn.modules"))
    return f"nn.{next(kinds).__name__}"


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters, except those of layers below it; all of them if `is_whole`.

    A parameter of the module and of a layer below, such as `decoder.bias` in BERT's head, belongs
    to the layer below. If the module uses the parameter, the gradient bypasses clipping, and the
    step is refused.
    """
    if is_whole(module):
        return dict(module.named_parameters())
    below = {id(p) for child in module.children() for p in child.parameters()}
    return {n: p for n, p in module._parameters.items() if p is not None and id(p) not in below}


def _check_owner(name: str, module: nn.Module, own: list[str]) -> None:
    kind = type(module).__name__
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError(f"module '{name}' is a lazy {kind}; run the model once before this call")
    if isinstance(module, nn.EmbeddingBag):
        raise ValueError(
            f"module '{name}' is an EmbeddingBag, which has no rule for private training: use "
            "nn.Embedding(padding_idx=...) on bags that are padded to one public length, [B, T], "
            "and the sum or mean of its outputs over dimension 1"
        )
    if isinstance(module, nn.Embedding):
        # sparse=True has no effect in PrivateEmbedding, whose gradients are dense.
        own_forward = plain_forward(module) is not nn.Embedding.forward
        for flag in ("scale_grad_by_freq", *(["sparse"] if own_forward else [])):
            if getattr(module, flag):
                raise ValueError(
                    f"module '{name}' has {flag}=True, which has no rule for private training. "
                    f"Set {flag}=False"
                )
    if parametrize.is_parametrized(module):
        _check_parametrized(name, module)
    elif isinstance(module, nn.Linear | nn.Embedding) and "weight" not in module._parameters:
        raise ValueError(
            f"module '{name}' ({kind}) computes its weight from other parameters, which has no "
            "rule for private training. Make the weight a parameter again"
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
    """Return whether a batch norm uses fixed statistics, so that it does not mix samples."""
    has_statistics = module.running_mean is not None and module.running_var is not None
    trained = any(p.requires_grad for p in module.parameters())
    return has_statistics and not module.training and not trained


def _check_parametrized(name: str, module: nn.Module) -> None:
    children = [m for n, m in module.named_modules() if n and "parametrizations" not in n]
    parametrizations: Any = module.parametrizations
    if any(True for child in children for _ in child.parameters()):
        raise ValueError(
            f"module '{name}' is parametrized and has layers below it; no rule for private "
            "training covers this. Call torch.nn.utils.parametrize.remove_parametrizations first"
        )
    for key, steps in parametrizations.items():
        for step in steps:
            if buffers := [n for n, _ in step.named_buffers()]:
                raise ValueError(
                    f"module '{name}' computes its {key!r} by the parametrization "
                    f"{type(step).__name__}. A forward may change its buffers {buffers}, which "
                    "would be released without noise. Call torch.nn.utils.parametrize."
                    f"remove_parametrizations(module, {key!r}) first, or use one without buffers "
                    "(such as orthogonal with use_trivialization=False)"
                )


def is_whole(module: nn.Module) -> bool:
    """Return whether a module (an adapter or parametrized layer) owns the parameters below."""
    return is_adapter(module) or parametrize.is_parametrized(module)


def parts_of_layers(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose parameters an adapter or parametrized layer above them owns."""
    parts: set[nn.Module] = set()
    for module in model.modules():
        if is_adapter(module):
            parts |= {inner for inner in module.modules() if inner is not module}
        elif parametrize.is_parametrized(module):
            parametrizations: Any = module.parametrizations
            parts |= set(parametrizations.modules())
    return parts


def layers_of(model: nn.Module, parts: Collection[nn.Module] | None = None) -> list[Layer]:
    """Return the layers in the model's order, without the modules `parts`."""
    inside = parts_of_layers(model) if parts is None else parts
    return [
        Layer(name, module, _own_parameters(module))
        for name, module in model.named_modules()
        if module not in inside
    ]


def untraceable(layers: Iterable[Layer]) -> str | None:
    """Return the name of the first layer that torch.compile cannot trace privately, or None."""
    for layer in layers:
        rule = layer.rule
        if rule is not None and issubclass(rule, (PrivateOwner, PrivateParametrized)):
            return layer.name or "(the model itself)"
    return None


def attach(
    model: nn.Module,
    layers: Sequence[Layer],
    backward: PrivateBackward,
    float8: Collection[str] = (),
) -> None:
    """Change the class of every layer that holds trainable parameters to its private class.

    Objects, parameters, buffers and state_dict keys stay the same.

    Args:
        model, layers: the model, and its layers from `check_model`.
        backward: the private backward of the layers.
        float8: names of the linear layers that multiply in float8, trained or frozen.
    """
    second = batch_second(model)
    for layer in layers:
        (name, module, own), rule = layer, layer.rule
        if rule is None and name in float8:
            rule = rule_for(module)
        if rule is None:
            continue
        module.__dict__["_dpflash"] = ModuleContext(
            backward,
            name,
            {n: backward.slots[id(p)] for n, p in own.items() if id(p) in backward.slots},
            frozenset(n for n, p in own.items() if not p.requires_grad),
            takes_units=rule.takes_units,
            takes_documents=rule.takes_documents,
            is_whole=is_whole(module),
            float8=_float8_weight(rule) if name in float8 else None,
        )
        original = type(module)
        if id(module) in second and not isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            rule = type(rule.__name__, (BatchSecond, rule), {})
        module.__class__ = type(f"Private{original.__name__}", (rule, original), {})


def _float8_weight(rule: type[PrivateModule]) -> Float8Weight:
    return Float8Weight(transposed=issubclass(rule, PrivateConv1D))


def detach(model: nn.Module) -> None:
    """Restore the original classes of the modules."""
    for module in model.modules():
        if isinstance(module, PrivateModule):
            original = plain_class(module)
            del module.__dict__["_dpflash"]
            object.__setattr__(module, "__class__", original)


@contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """Give the layers their original classes in the with block."""
    held = [(m, type(m), m._dpflash) for m in model.modules() if isinstance(m, PrivateModule)]
    detach(model)
    try:
        yield
    finally:
        for module, kind, context in held:
            module.__dict__["_dpflash"] = context
            object.__setattr__(module, "__class__", kind)


def make_groups(
    layers: Iterable[Layer],
    trained: list[nn.Parameter],
    clipping: str,
    bounds: Bounds | None = None,
) -> list[Group]:
    """Return the clipping groups for `clipping`, with equal bounds unless `bounds` are given."""
    if clipping == "flat":
        return flat_groups(trained)
    wanted = {id(p) for p in trained}
    groups = per_layer_groups(
        (layer.name, [p for p in layer.own.values() if id(p) in wanted]) for layer in layers
    )
    return groups if bounds is None else with_bounds(groups, bounds)
