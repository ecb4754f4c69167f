"""Which layers can be trained privately, and how: the whole list on one screen."""

from __future__ import annotations

from torch import nn

from .base import ModuleContext, PrivateModule
from .embedding import PrivateEmbedding
from .generic import PrivateLeaf
from .linear import PrivateConv1D, PrivateLinear
from .linear_cross_entropy import PrivateLinearCrossEntropy
from .norm import PrivateLayerNorm, PrivateRMSNorm

__all__ = ["ModuleContext", "PrivateModule", "rule_for"]

# A rule replaces one forward, so it is looked up by the forward: a subclass with a forward of its
# own is another layer. A forward that cannot be imported here stands under its full name.
RULES: dict[object, type[PrivateModule]] = {
    nn.Linear.forward: PrivateLinear,
    nn.Embedding.forward: PrivateEmbedding,
    nn.LayerNorm.forward: PrivateLayerNorm,
    nn.RMSNorm.forward: PrivateRMSNorm,
    "dpflash.nn.linear_cross_entropy.LinearCrossEntropy.forward": PrivateLinearCrossEntropy,
    "transformers.pytorch_utils.Conv1D.forward": PrivateConv1D,
}


def rule_for(module: nn.Module) -> type[PrivateModule]:
    """The private counterpart of a module that holds parameters and whose children hold none."""
    forward = type(module).forward
    # A forward may be any callable, even one without a name.
    names = (getattr(forward, "__module__", ""), getattr(forward, "__qualname__", ""))
    return RULES.get(forward) or RULES.get(".".join(map(str, names))) or PrivateLeaf
