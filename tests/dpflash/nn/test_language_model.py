import copy
import math

import pytest
import torch
from torch import nn

import dpflash
from dpflash import losses
from dpflash.nn import LongContextLM

V = 257
VARIANTS = [
    {},
    {"positions": "learned", "norm": "rms_norm", "bias": False, "num_kv_heads": 1},
    {"tie_embeddings": False, "mlp_ratio": 2},
]


def make_model(**arguments):
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "embed_dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 9}
    return LongContextLM(**{**sizes, **arguments})


def make_tokens(batch=3, length=9, vocab_size=V):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("arguments", VARIANTS, ids=str)
@pytest.mark.parametrize(("batch", "length"), [(3, 9), (1, 1), (0, 7), (2, 0)])
def test_logits_and_gradients_have_the_right_shapes(arguments, batch, length):
    model = make_model(**arguments)
    tokens = make_tokens(batch, length)
    logits = model(tokens)
    assert logits.shape == (batch, length, V)
    losses.cross_entropy(logits, tokens).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("arguments", VARIANTS, ids=str)
def test_logits_at_t_never_depend_on_later_tokens_but_do_on_earlier_ones(arguments):
    model = make_model(**arguments).double()
    tokens = make_tokens()
    logits = model(tokens)
    for t in range(8):
        changed = tokens.clone()
        changed[:, t + 1 :] = (changed[:, t + 1 :] + 1) % V
        torch.testing.assert_close(model(changed)[:, : t + 1], logits[:, : t + 1])
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % V
    assert (model(changed) - logits).abs().amax(dim=2).min() > 0


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_the_order_of_earlier_tokens_matters(positions):
    model = make_model(positions=positions).double()
    tokens = torch.tensor([[5, 9, 7]])
    swapped = torch.tensor([[9, 5, 7]])
    assert not torch.allclose(model(tokens)[:, 2], model(swapped)[:, 2], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_gives_equal_gradients(dropout):
    plain = make_model(dropout=dropout)
    saving = copy.deepcopy(plain)
    saving.activation_checkpointing = True
    tokens = make_tokens()
    for model in (plain, saving):
        torch.manual_seed(7)
        losses.cross_entropy(model(tokens), tokens).sum().backward()
    for (name, expected), result in zip(
        plain.named_parameters(), saving.parameters(), strict=True
    ):
        assert torch.equal(expected.grad, result.grad), name


def test_activation_checkpointing_keeps_fewer_activations():
    def kept_bytes(activation_checkpointing):
        model = make_model(activation_checkpointing=activation_checkpointing)
        total = 0

        def pack(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(make_tokens())
        return total

    assert kept_bytes(True) < kept_bytes(False) / 2


@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("embed_dim", [16, 256])
def test_first_predictions_are_nearly_uniform(embed_dim, tie_embeddings):
    model = make_model(embed_dim=embed_dim, tie_embeddings=tie_embeddings, max_seq_len=64)
    tokens = make_tokens(8, 64)
    bits = losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean() / math.log(2)
    assert abs(bits.item() - math.log2(V)) < 0.2


def test_tied_head_is_the_token_embedding_and_saved_under_both_names():
    tied, untied = make_model(), make_model(tie_embeddings=False)
    assert tied.lm_head.weight is tied.token_embedding.weight
    assert untied.lm_head.weight is not untied.token_embedding.weight
    assert {"lm_head.weight", "token_embedding.weight"} <= tied.state_dict().keys()


@pytest.mark.parametrize("arguments", VARIANTS, ids=str)
def test_every_parameter_belongs_to_a_plain_layer(arguments):
    model = make_model(**arguments)
    owners = {type(m) for m in model.modules() if list(m.parameters(recurse=False))}
    assert owners <= {nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm}


def test_every_layer_sees_the_batch_or_an_explicit_one_in_dimension_zero():
    model = make_model(positions="learned")
    shapes = {}
    for name, module in model.named_modules():
        if list(module.parameters(recurse=False)):
            module.register_forward_pre_hook(
                lambda _, inputs, name=name: shapes.update({name: tuple(inputs[0].shape)})
            )
    model(make_tokens(3, 7))
    assert shapes.pop("position_embedding") == (1, 7)
    assert len(shapes) == 15 and all(shape[:2] == (3, 7) for shape in shapes.values())


def test_projections_into_the_residual_stream_start_narrower():
    model = make_model(embed_dim=64, num_layers=8)
    narrow = 0.02 / math.sqrt(16)
    for block in model.blocks:
        assert block.attention.out_proj.weight.std().item() == pytest.approx(narrow, rel=0.1)
        assert block.mlp_down.weight.std().item() == pytest.approx(narrow, rel=0.1)
        assert block.attention.qkv_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert not block.mlp_up.bias.any()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(2, 10, dtype=torch.int64), "more positions than max_seq_len=9"),
        (torch.zeros(7, dtype=torch.int64), r"tokens\.unsqueeze\(0\)"),
        (torch.zeros(2, 7, dtype=torch.int32), r"tokens\.long\(\)"),
    ],
    ids=["long", "unbatched", "int32"],
)
def test_tokens_that_do_not_fit_are_refused(tokens, message):
    with pytest.raises((ValueError, dpflash.PrivateRefusal), match=message):
        make_model()(tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"vocab_size": 2.5}, r"vocab_size=2\.5"),
        ({"positions": "sinus"}, "positions='sinus': expected one of 'rotary', 'learned'"),
        ({"norm": "none"}, "norm='none'"),
        ({"dropout": 2}, "dropout=2"),
        ({"num_heads": 16}, "even head_dim"),
    ],
    ids=str,
)
def test_constructor_arguments_are_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(**arguments)
