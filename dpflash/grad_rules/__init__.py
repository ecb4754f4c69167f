"""The layers that can be trained privately, and the rule of each."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from .attention import PrivateMultiheadAttention
from .base import ModuleContext, PrivateModule, name_of_forward, plain_forward
from .embedding import FrozenTable, PrivateEmbedding
from .experts import PrivateExperts, is_experts
from .generic import PrivateLeaf, PrivateParametrized
from .linear import PrivateConv1D, PrivateLinear
from .linear_cross_entropy import PrivateLinearCrossEntropy
from .norm import FrozenBatchNorm, PrivateLayerNorm, PrivateRMSNorm
from .owner import PrivateOwner, PrivateRelativeBias, PrivateSampleBySample
from .peft import PrivateDora, PrivatePrompts, PrivateTrainableTokens, is_adapter, makes_prompts
from .recurrent import PrivateRecurrent
from .recurrent_step import PrivateRecurrentCell
from .torch_attention import PrivateTorchMultiheadAttention, PrivateTransformerEncoder

__all__ = ["ModuleContext", "PrivateModule", "block_rule_for", "rule_for"]

# Forward -> its rule. Keys are forwards, since a subclass may have a forward of its own, which
# needs another rule. A forward that cannot be imported here is listed under its full name.
RULES: dict[object, type[PrivateModule]] = {
    nn.Linear.forward: PrivateLinear,
    nn.Embedding.forward: PrivateEmbedding,
    nn.LayerNorm.forward: PrivateLayerNorm,
    nn.RMSNorm.forward: PrivateRMSNorm,
    nn.MultiheadAttention.forward: PrivateTorchMultiheadAttention,
    nn.LSTM.forward: PrivateRecurrent,
    nn.GRU.forward: PrivateRecurrent,
    nn.RNN.forward: PrivateRecurrent,
    nn.LSTMCell.forward: PrivateRecurrentCell,
    nn.GRUCell.forward: PrivateRecurrentCell,
    nn.RNNCell.forward: PrivateRecurrentCell,
    "dpflash.nn.linear_cross_entropy.LinearCrossEntropy.forward": PrivateLinearCrossEntropy,
    "transformers.pytorch_utils.Conv1D.forward": PrivateConv1D,
    "peft.tuners.lora.dora.DoraLinearLayer.forward": PrivateDora,
    "peft.tuners.trainable_tokens.layer.TrainableTokensLayer.forward": PrivateTrainableTokens,
}

# Rules of modules without parameters of their own.
BLOCK_RULES: dict[object, type[PrivateModule]] = {
    "dpflash.nn.attention.MultiheadAttention.forward": PrivateMultiheadAttention,
    # Needed even if only the output projection is trained, which is a layer with its own rule.
    nn.MultiheadAttention.forward: PrivateTorchMultiheadAttention,
    nn.TransformerEncoder.forward: PrivateTransformerEncoder,
    "transformers.models.t5.modeling_t5.T5Attention.forward": PrivateRelativeBias,
    "transformers.models.mt5.modeling_mt5.MT5Attention.forward": PrivateRelativeBias,
    "transformers.models.swin.modeling_swin.SwinAttention.forward": PrivateSampleBySample,
    "transformers.models.swin.modeling_swin.SwinLayer.forward": PrivateSampleBySample,
    # Needed even if magnitudes are frozen: PEFT's forward runs A and B on an identity matrix.
    "peft.tuners.lora.dora.DoraLinearLayer.forward": PrivateDora,
}


def rule_for(module: nn.Module) -> type[PrivateModule]:
    """Return the private class for a module that holds trained parameters."""
    if is_experts(module):
        return PrivateExperts
    if is_adapter(module):
        return RULES.get(name_of_forward(module)) or PrivateLeaf
    if parametrize.is_parametrized(module):
        return PrivateParametrized
    rule = RULES.get(plain_forward(module)) or RULES.get(name_of_forward(module))
    has_layers = any(True for child in module.children() for _ in child.parameters())
    return rule or (PrivateOwner if has_layers else PrivateLeaf)


def block_rule_for(module: nn.Module) -> type[PrivateModule] | None:
    """Return the private class, if any, for a module without trained parameters of its own."""
    if isinstance(module, _BatchNorm):
        return FrozenBatchNorm
    if is_experts(module):
        return PrivateExperts
    if makes_prompts(module):
        return PrivatePrompts
    if isinstance(module, nn.Embedding):
        return RULES.get(plain_forward(module), FrozenTable)
    return BLOCK_RULES.get(plain_forward(module)) or BLOCK_RULES.get(name_of_forward(module))
