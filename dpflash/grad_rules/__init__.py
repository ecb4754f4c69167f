"""Which layers can be trained privately, and how: the whole list on one screen."""

from __future__ import annotations

from torch import nn

from .base import ModuleContext, PrivateModule
from .embedding import PrivateEmbedding
from .generic import PrivateLeaf
from .linear import PrivateConv1D, PrivateLinear
from .norm import PrivateLayerNorm, PrivateRMSNorm

__all__ = ["ModuleContext", "PrivateModule", "rule_for"]

# A rule replaces one forward, so it is looked up by the forward: a subclass with a forward of its
# own is another layer.
RULES: dict[object, type[PrivateModule]] = {
    nn.Linear.forward: PrivateLinear,
    nn.Embedding.forward: PrivateEmbedding,
    nn.LayerNorm.forward: PrivateLayerNorm,
    nn.RMSNorm.forward: PrivateRMSNorm,
}


def rule_for(module: nn.Module) -> type[PrivateModule]:
    """The private counterpart of a module that holds parameters and whose children hold none."""
    forward = type(module).forward
    rule = RULES.get(forward)
    if rule is not None:
        return rule
    # Hugging Face's Conv1D, recognised without importing transformers.
    if getattr(forward, "__module__", "") == "transformers.pytorch_utils":
        if getattr(forward, "__qualname__", "") == "Conv1D.forward":
            return PrivateConv1D
    return PrivateLeaf
