import copy
import math

import pytest
import torch
from torch import nn

from dpflash.nn import MultiheadAttention

E, H, B, T, S = 12, 3, 2, 7, 5


def make_pair(self_attention=True, bias=True, **widths):
    """Our module and torch's, in float64, with the same weights and non-zero biases."""
    torch.manual_seed(0)
    arguments = {"bias": bias, "dtype": torch.float64, **widths}
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **arguments)
    ours = MultiheadAttention(E, H, self_attention=self_attention, **arguments)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    if theirs.in_proj_weight is not None:
        weights = theirs.in_proj_weight.detach().chunk(3)
    else:
        weights = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
    if self_attention:
        weights, biases = [torch.cat(list(weights))], [theirs.in_proj_bias]
        projections = [ours.qkv_proj]
    else:
        biases = theirs.in_proj_bias.detach().chunk(3) if bias else []
        projections = [ours.q_proj, ours.k_proj, ours.v_proj]
    with torch.no_grad():
        for projection, weight in zip(projections, weights, strict=True):
            projection.weight.copy_(weight)
        if bias:
            for projection, vector in zip(projections, biases, strict=True):
                projection.bias.copy_(vector)
    ours.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return ours, theirs


def padding_mask(keys):
    mask = torch.zeros(B, keys, dtype=torch.bool)
    mask[0, -2:] = True
    return mask


def random_mask(*shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[..., 0] = False
    return mask


def as_float(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": padding_mask(T)},
    "float-padding": {"key_padding_mask": as_float(padding_mask(T))},
    "attn": {"attn_mask": random_mask(T, T)},
    "attn-per-head": {"attn_mask": random_mask(B * H, T, T)},
    "additive": {"attn_mask": torch.randn(T, T, dtype=torch.float64)},
    "both": {"attn_mask": random_mask(T, T), "key_padding_mask": padding_mask(T)},
    "both-float": {
        "attn_mask": torch.randn(B * H, T, T, dtype=torch.float64),
        "key_padding_mask": as_float(padding_mask(T)),
    },
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_self_attention_and_its_gradients_equal_torchs(masks, bias):
    ours, theirs = make_pair(bias=bias)
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    result, weights = ours(x, x, x, **masks)
    expected, _ = theirs(x, x, x, need_weights=False, **masks)
    assert weights is None
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    result.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(
        ours.qkv_proj.weight.grad, theirs.in_proj_weight.grad, rtol=1e-8, atol=1e-8
    )


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
def test_is_causal_adds_to_the_masks(masks):
    ours, _ = make_pair()
    x = torch.randn(B, T, E, dtype=torch.float64)
    result, _ = ours(x, is_causal=True, **masks)
    attn_mask = masks.get("attn_mask", torch.zeros(T, T, dtype=torch.bool))
    causal = CAUSAL if attn_mask.dtype == torch.bool else as_float(CAUSAL)
    combined = attn_mask | CAUSAL if attn_mask.dtype == torch.bool else attn_mask + causal
    expected, _ = ours(x, **{**masks, "attn_mask": combined})
    torch.testing.assert_close(result, expected)
    alone, _ = ours(x, **masks)
    assert not torch.allclose(result, alone)


@pytest.mark.parametrize("widths", [{}, {"kdim": 4, "vdim": 9}], ids=["equal", "kdim-vdim"])
def test_cross_attention_equals_torchs(widths):
    ours, theirs = make_pair(self_attention=False, **widths)
    query = torch.randn(B, T, E, dtype=torch.float64)
    key = torch.randn(B, S, widths.get("kdim", E), dtype=torch.float64)
    value = torch.randn(B, S, widths.get("vdim", E), dtype=torch.float64)
    masks = {"key_padding_mask": padding_mask(S), "attn_mask": random_mask(T, S)}
    for given in ({}, masks):
        result, _ = ours(query, key, value, **given)
        expected, _ = theirs(query, key, value, need_weights=False, **given)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("self_attention", [True, False])
def test_grouped_heads_equal_full_heads_with_repeated_projections(self_attention):
    torch.manual_seed(0)
    arguments = {"self_attention": self_attention, "dtype": torch.float64}
    grouped = MultiheadAttention(16, 4, num_kv_heads=2, **arguments)
    full = MultiheadAttention(16, 4, **arguments)

    def repeated(weight):
        return weight.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1)

    with torch.no_grad():
        if self_attention:
            q, k, v = grouped.qkv_proj.weight.split((16, 8, 8))
            full.qkv_proj.weight.copy_(torch.cat((q, repeated(k), repeated(v))))
        else:
            full.q_proj.weight.copy_(grouped.q_proj.weight)
            full.k_proj.weight.copy_(repeated(grouped.k_proj.weight))
            full.v_proj.weight.copy_(repeated(grouped.v_proj.weight))
        full.out_proj.load_state_dict(grouped.out_proj.state_dict())
    x = torch.randn(B, T, 16, dtype=torch.float64)
    for masks in ({}, {"key_padding_mask": padding_mask(T)}):
        torch.testing.assert_close(grouped(x, **masks)[0], full(x, **masks)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("as_dtype", [lambda mask: mask, as_float], ids=["bool", "float"])
def test_a_sample_whose_keys_are_all_masked_gets_the_bias_and_no_nan(as_dtype, dropout):
    ours, _ = make_pair()
    ours.dropout = dropout
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[1] = True
    result, _ = ours(x, key_padding_mask=as_dtype(mask))
    torch.testing.assert_close(result[1], ours.out_proj.bias.expand(T, E))
    result.sum().backward()
    assert torch.equal(x.grad[1], torch.zeros(T, E, dtype=torch.float64))
    assert x.grad.isfinite().all()


def test_dropout_acts_while_training_and_never_in_evaluation():
    module = MultiheadAttention(E, H, dropout=0.5)
    x = torch.randn(B, T, E)
    assert not torch.equal(module(x)[0], module(x)[0])
    module.eval()
    assert torch.equal(module(x)[0], module(x)[0])


@pytest.mark.parametrize("masked", [False, True])
def test_causal_attention_with_dropout_never_looks_ahead(masked):
    module = MultiheadAttention(E, H, dropout=0.3)
    x = torch.randn(B, T, E, requires_grad=True)
    mask = torch.zeros(B, T, dtype=torch.bool) if masked else None
    output, _ = module(x, key_padding_mask=mask, is_causal=True)
    (gradient,) = torch.autograd.grad(output[:, 3].square().sum(), x)
    assert not gradient[:, 4:].any() and gradient[:, :4].any()


@pytest.mark.parametrize("masked", [False, True])
def test_an_empty_batch_gives_an_empty_output_and_zero_gradients(masked):
    module = MultiheadAttention(E, H, rotary=True)
    mask = torch.zeros(0, T, dtype=torch.bool) if masked else None
    output, _ = module(torch.randn(0, T, E), key_padding_mask=mask, is_causal=True)
    output.sum().backward()
    assert output.shape == (0, T, E)
    assert torch.equal(module.qkv_proj.weight.grad, torch.zeros(3 * E, E))


def test_rotary_scores_depend_on_distances_and_not_on_places():
    torch.manual_seed(0)
    module = MultiheadAttention(E, H, rotary=True, dtype=torch.float64)
    plain = copy.deepcopy(module)
    plain.rotary = False
    pattern = torch.randn(B, 3, E, dtype=torch.float64)
    padding = torch.zeros(B, T, E, dtype=torch.float64)
    masks = torch.ones(B, T + 3, dtype=torch.bool)
    early, late = masks.clone(), masks.clone()
    early[:, :3], late[:, T:] = False, False
    first = module(torch.cat((pattern, padding), 1), key_padding_mask=early)[0][:, :3]
    last = module(torch.cat((padding, pattern), 1), key_padding_mask=late)[0][:, T:]
    torch.testing.assert_close(first, last)
    assert not torch.allclose(module(pattern)[0], plain(pattern)[0])


def test_all_parameters_belong_to_linear_layers():
    for self_attention in (True, False):
        module = MultiheadAttention(E, H, self_attention=self_attention)
        assert not list(module.named_parameters(recurse=False))
        assert {type(child) for child in module.children()} == {nn.Linear}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_first": False}, "samples in dimension 0"),
        ({"add_bias_kv": True}, "add_bias_kv=True"),
        ({"add_zero_attn": True}, "add_zero_attn=True"),
        ({"pattern": "dilated"}, "pattern='dilated'"),
        ({"context_parallel": "mesh"}, "mesh="),
        ({"num_heads": 5}, "num_heads=5.*divisor of embed_dim=12"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_kv_heads": 2}, "num_kv_heads=2"),
        ({"kdim": 4}, "self_attention=False"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"num_heads": 4, "rotary": True}, "even head_dim"),
        ({"self_attention": False, "rotary": True}, "rotary=True with self_attention=False"),
    ],
    ids=str,
)
def test_constructor_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiheadAttention(**{"embed_dim": E, "num_heads": H, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"need_weights": True}, "need_weights=True"),
        ({"key": torch.zeros(B, T, E)}, "self_attention=False"),
        ({"value": torch.zeros(B, T, E)}, "self_attention=False"),
        ({"query": torch.zeros(T, E)}, r"query has shape \(7, 12\)"),
        ({"query": torch.zeros(B, T, E + 1)}, r"expected \[batch, tokens, 12\]"),
        ({"key_padding_mask": torch.zeros(T, B).bool()}, "key_padding_mask has shape"),
        ({"attn_mask": torch.zeros(B, T, T).bool()}, "attn_mask has shape"),
        ({"attn_mask": torch.zeros(T, T).long()}, r"attn_mask has dtype torch\.int64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_inputs_are_refused_by_name(arguments, message):
    module = MultiheadAttention(E, H)
    with pytest.raises(ValueError, match=message):
        module(**{"query": torch.zeros(B, T, E), **arguments})


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_causal_cross_attention_of_unequal_lengths_is_refused(dropout):
    module = MultiheadAttention(E, H, dropout=dropout, self_attention=False)
    with pytest.raises(ValueError, match="causal=True with 7 queries and 5 keys"):
        module(torch.zeros(B, T, E), torch.zeros(B, S, E), is_causal=True)


def test_cross_attention_inputs_must_fit_each_other():
    module = MultiheadAttention(E, H, self_attention=False)
    with pytest.raises(ValueError, match="as many values as keys"):
        module(torch.zeros(B, T, E), torch.zeros(B, S, E), torch.zeros(B, T, E))
    with pytest.raises(ValueError, match="one batch size"):
        module(torch.zeros(B, T, E), torch.zeros(1, S, E))
