import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpflash.nn import TransformerBlock


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_block_equals_its_formula(norm, causal):
    torch.manual_seed(0)
    block = TransformerBlock(12, 3, mlp_ratio=2.5, norm=norm, causal=causal).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 7, 12, dtype=torch.float64)

    def normalise(values, module):
        centred = values - values.mean(-1, keepdim=True) if norm == "layer_norm" else values
        epsilon = 1e-5 if norm == "layer_norm" else torch.finfo(torch.float64).eps
        scaled = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return scaled * module.weight + (module.bias if norm == "layer_norm" else 0)

    attended, _ = block.attention(normalise(x, block.attention_norm), is_causal=causal)
    middle = x + attended
    hidden = F.linear(normalise(middle, block.mlp_norm), block.mlp_up.weight, block.mlp_up.bias)
    inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
    hidden = 0.5 * hidden * (1 + inner.tanh())
    expected = middle + F.linear(hidden, block.mlp_down.weight, block.mlp_down.bias)
    assert hidden.shape[-1] == 30
    torch.testing.assert_close(block(x), expected)


def test_padding_is_not_attended_to():
    block = TransformerBlock(12, 3, causal=False, rotary=True)
    x = torch.randn(2, 7, 12)
    changed = x.clone()
    changed[:, 5:] = torch.randn(2, 2, 12)
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[:, 5:] = True
    torch.testing.assert_close(block(x, mask)[:, :5], block(changed, mask)[:, :5])
    assert not torch.allclose(block(x)[:, :5], block(changed)[:, :5])


def test_without_bias_no_parameter_is_called_bias():
    block = TransformerBlock(12, 3, bias=False, num_kv_heads=1)
    assert not [name for name, _ in block.named_parameters() if "bias" in name]
    assert block(torch.randn(0, 7, 12)).shape == (0, 7, 12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "batch_norm"}, "norm='batch_norm': expected one of 'layer_norm', 'rms_norm'"),
        ({"mlp_ratio": 0}, "mlp_ratio=0"),
        ({"mlp_ratio": math.inf}, "mlp_ratio=inf"),
        ({"mlp_ratio": 1.3}, r"mlp_ratio=1\.3"),
        ({"dropout": -0.1}, r"dropout=-0\.1"),
        ({"pattern": "dilated"}, "pattern='dilated'"),
    ],
    ids=str,
)
def test_constructor_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        TransformerBlock(12, 3, **arguments)
