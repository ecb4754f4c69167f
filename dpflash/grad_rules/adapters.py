"""Layers of PEFT that keep adapters in a ParameterDict and use them beside the adapted layer.

IA3, LoRA on embeddings, VeRA, LoHa, LoKr and others. Such a layer is one layer of the generic rule
together with all modules below it: vmap gives each sample its own adapters.
"""

from __future__ import annotations

from torch import nn


def is_adapter(module: nn.Module) -> bool:
    """Whether the parameters below a module are its own."""
    if not type(module).__module__.startswith("peft.tuners."):
        return False
    return any(
        isinstance(child, nn.ParameterDict | nn.ParameterList)
        and any(p.requires_grad for p in child.parameters())
        for child in module.children()
    )


def inside_adapters(model: nn.Module) -> set[nn.Module]:
    """The modules below adapters."""
    adapters = [module for module in model.modules() if is_adapter(module)]
    return {inner for outer in adapters for inner in outer.modules() if inner is not outer}
