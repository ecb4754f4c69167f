"""torch's own attention and transformer layers train privately as they are."""

import copy
import math
import pickle

import pytest
import torch
from kinds import KINDS, every_kind, loss_of, scrambled
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import dpflash

every_order = pytest.mark.parametrize("batch_first", [True, False], ids=["batch", "tokens"])
pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor is True", "ignore:Support for mismatched"
)
B, T, S, E, HEADS = 5, 4, 6, 8, 2


class Attention(nn.Module):
    """Attention inside of a model whose batch comes first, whatever its own order."""

    def __init__(self, source="self", is_causal=False, weights=None, **options):
        super().__init__()
        self.inner = nn.Linear(E, E)
        self.attention = nn.MultiheadAttention(E, HEADS, **options)
        self.source, self.is_causal, self.weights = source, is_causal, weights

    def inputs(self, x, memory):
        """Query, key and value."""
        if self.source == "self":
            return (x, x, x)
        key = memory[..., : self.attention.kdim]
        if self.source == "memory":
            return (x, key, key)
        return (x, key, memory.flip(2)[..., : self.attention.vdim])

    def forward(self, x, memory, padding=None, masks=None):
        x = torch.tanh(self.inner(x))
        if not self.attention.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        mask = None if masks is None else masks.flatten(0, 1)
        if self.is_causal:
            mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
        y, weights = self.attention(
            *self.inputs(x, memory),
            key_padding_mask=padding,
            attn_mask=mask,
            need_weights=self.weights is not None,
            average_attn_weights=self.weights == "mean",
            is_causal=self.is_causal,
        )
        y = y if self.attention.batch_first else y.transpose(0, 1)
        return y if weights is None else torch.cat([y.flatten(1), 9 * weights.flatten(1)], 1)


def samples():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T, E, generator=generator)
    memory = torch.randn(B, S, E, generator=generator)
    return x * torch.tensor([1.0, 2.0, 0.2, 0.5, 1.0]).view(-1, 1, 1), memory


def padding(keys):
    mask = torch.zeros(B, keys, dtype=torch.bool)
    mask[0, 2:] = mask[2, 3:] = True
    return mask


def masks(keys, dtype):
    """A mask for each sample, head, query and key; every query sees a key."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(B, HEADS, T, keys, generator=generator)
    if dtype != torch.bool:
        return drawn.to(dtype)
    hidden = drawn > 0.5
    hidden[..., 0] = False
    return hidden


CASES = {
    "self": ({}, ()),
    "no_bias": ({"bias": False}, ()),
    "memory": ({"source": "memory"}, ()),
    "three": ({"source": "three"}, ()),
    "kdim": ({"source": "three", "kdim": 3, "vdim": 5}, ()),
    "kdim_bias_kv": ({"source": "three", "kdim": 3, "add_bias_kv": True}, ()),
    "padding": ({}, (padding(T),)),
    "masks": ({"source": "memory"}, (padding(S), masks(S, torch.bool))),
    "float_masks": ({"source": "memory"}, (padding(S), masks(S, torch.float64))),
    "causal": ({"is_causal": True}, ()),
    "causal_padding": ({"is_causal": True}, (padding(T),)),
    "weights": ({"weights": "mean"}, (padding(T),)),
    "all_weights": ({"weights": "each", "source": "memory"}, ()),
    "causal_weights": ({"weights": "mean", "is_causal": True}, ()),
    "bias_kv": ({"add_bias_kv": True}, (padding(T),)),
    "zero_attn": ({"add_zero_attn": True, "source": "memory"}, (padding(S), masks(S, torch.bool))),
    "both": ({"add_zero_attn": True, "add_bias_kv": True, "weights": "mean"}, ()),
}


class Encoder(nn.Module):
    def __init__(self, batch_first, norm=nn.LayerNorm, **options):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": batch_first, **options}
        layer = nn.TransformerEncoderLayer(E, HEADS, 12, **options)
        self.inner = nn.TransformerEncoder(layer, 2, norm=norm(E))
        self.batch_first = batch_first

    def forward(self, x, memory, padding=None):
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.inner(x, src_key_padding_mask=padding)
        return y if self.batch_first else y.transpose(0, 1)


class Decoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        layer = nn.TransformerDecoderLayer(
            E, HEADS, 12, dropout=0.0, batch_first=batch_first, norm_first=True
        )
        self.inner = nn.TransformerDecoder(layer, 1, norm=nn.RMSNorm(E))
        self.batch_first = batch_first

    def forward(self, x, memory, padding=None):
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
        y = self.inner(x, memory, tgt_mask=causal, tgt_is_causal=True)
        return y if self.batch_first else y.transpose(0, 1)


class Both(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.inner = nn.Transformer(E, HEADS, 1, 1, 12, dropout=0.0, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x, memory, padding=None):
        if not self.batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        y = self.inner(memory, x)
        return y if self.batch_first else y.transpose(0, 1)


TRANSFORMERS = {"encoder": Encoder, "decoder": Decoder, "transformer": Both}


@every_kind
@every_order
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_torch_and_with_single_samples(
    case, train, batch_first, kind, agree
):
    torch.manual_seed(0)
    options, more = CASES[case]
    plain = scrambled(Attention(batch_first=batch_first, **options)).train(train)
    agree(plain, (*samples(), *more), kind)


@every_kind
@every_order
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_agrees_with_torch_and_with_single_samples(
    name, train, batch_first, kind, agree
):
    torch.manual_seed(0)
    agree(scrambled(TRANSFORMERS[name](batch_first)).train(train), samples(), kind)


@every_order
def test_as_many_tokens_as_samples_are_not_taken_for_samples(batch_first, agree):
    torch.manual_seed(0)
    x, memory = samples()
    agree(scrambled(Encoder(batch_first)), (x[:T], memory[:T]), KINDS[1])


FROZEN = {
    "all_but_output": lambda n: "out_proj" not in n,
    "output": lambda n: "out_proj" in n,
    "weights": lambda n: "attention.in_proj_weight" in n,
    "bias_k": lambda n: "bias_k" in n,
    "layer": lambda n: "inner.layers.0" in n,
}


@every_kind
@pytest.mark.parametrize("case", FROZEN)
def test_frozen_parameters_neither_count_nor_open_a_way_around_the_gates(case, kind, agree):
    torch.manual_seed(0)
    model = Encoder(True) if case == "layer" else Attention(batch_first=True, add_bias_kv=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[case](name))
    # In eval, behind a frozen first layer, torch would make nested tensors, and fail.
    agree(scrambled(model), (*samples(), padding(T)), kind, train=False)


class Twice(nn.Module):
    """One attention module in two places, and an output projection that is also a layer."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.last = nn.Linear(E, E)
        self.last.weight = self.attention.out_proj.weight

    def forward(self, x, memory):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(self.attention(x, memory, memory)[0])


@every_kind
def test_a_module_called_twice_with_a_tied_weight_agrees(kind, agree):
    torch.manual_seed(0)
    agree(scrambled(Twice()), samples(), kind)


class Checkpointed(Encoder):
    def forward(self, x, memory):
        return checkpoint(super().forward, x, memory, use_reentrant=False)


@every_order
@pytest.mark.parametrize("kind", KINDS[1:4], ids=["book_keeping", "ghost", "per_layer"])
def test_activation_checkpointing_agrees(batch_first, kind, agree):
    torch.manual_seed(0)
    agree(scrambled(Checkpointed(batch_first)), samples(), kind)


@pytest.mark.parametrize("build", [Encoder, Decoder], ids=["encoder", "decoder"])
def test_bf16_autocast_agrees_with_torch_to_its_digits(build, private, sums, distance):
    torch.manual_seed(0)
    plain, batch = build(False).train(), samples()
    found = []
    for name in ("plain", "private"):
        model = copy.deepcopy(plain)
        if name == "private":
            engine, model, _, _ = private(model, max_grad_norm=math.inf)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = loss_of(model, *batch)
        if name == "private":
            engine.backward(losses.float())
            found.append(sums(engine, model))
        else:
            losses.sum().backward()
            found.append({n: p.grad for n, p in model.named_parameters()})
    assert distance(found[1], found[0]) <= 2e-2


@every_order
def test_dropout_draws_a_mask_for_each_sample_and_weight(batch_first, private):
    torch.manual_seed(0)
    _, model, _, _ = private(Encoder(batch_first, dropout=0.5))
    x, memory = samples()
    same = x[:1].expand(B, -1, -1), memory
    assert not torch.equal(model(*same)[0], model(*same)[1])
    model.eval()
    assert torch.equal(model(*same)[0], model(*same)[1])


def test_attention_dropout_scales_what_it_keeps(private):
    torch.manual_seed(0)
    plain = Attention(batch_first=True, dropout=0.5, weights="each", source="memory")
    _, model, _, _ = private(plain)
    with torch.no_grad():
        alive = plain.eval()(*samples())[:, T * E :]
    dropped = model.train()(*samples())[:, T * E :]
    kept = dropped != 0
    assert 0.3 < kept.double().mean() < 0.7
    torch.testing.assert_close(dropped[kept], 2 * alive[kept])


@every_kind
@pytest.mark.parametrize("name", ["tokens_first", "attention"])
def test_removing_a_sample_changes_the_sum_by_at_most_c(name, kind, private, sums):
    torch.manual_seed(0)
    build = {
        "tokens_first": lambda: Encoder(False),
        "attention": lambda: Attention(batch_first=False, source="three", add_bias_kv=True),
    }[name]
    plain = scrambled(build()).float()
    bound = 0.7
    found = []
    for kept in [torch.ones(B)] + [1 - row for row in torch.eye(B)]:
        engine, model, _, _ = private(copy.deepcopy(plain), max_grad_norm=bound, **kind)
        engine.backward(kept * 50 * loss_of(model, *samples()))
        found.append(torch.cat([t.double().flatten() for t in sums(engine, model).values()]))
    moves = [float((found[0] - other).norm()) for other in found[1:]]
    assert max(moves) <= bound * (1 + 2**-18)
    assert min(moves) >= 0.3 * bound


@pytest.mark.parametrize("name", TRANSFORMERS)
@every_order
def test_the_first_batch_proves_a_transformer(name, batch_first, private):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(4)
    data = [torch.randn(60, length, E, generator=generator) for length in (T, S)]
    made = private(TRANSFORMERS[name](batch_first), *data, batch_size=20)
    engine, model, optimizer, loader = made
    for x, memory in loader:
        engine.backward(loss_of(model, x, memory)), optimizer.step()
    assert engine.verified is True


@pytest.mark.parametrize("name", TRANSFORMERS)
@every_order
def test_engine_check_accepts_a_transformer(name, batch_first):
    torch.manual_seed(0)
    report = dpflash.PrivacyEngine().check(
        TRANSFORMERS[name](batch_first), samples(), lambda model, batch: loss_of(model, *batch)
    )
    assert report.ok and not report.problems, str(report)


def test_the_module_keeps_its_class_keys_and_copies(private):
    plain = Encoder(True)
    keys, types = list(plain.state_dict()), [type(m) for m in plain.modules()]
    engine, model, _, _ = private(plain)
    assert model is plain and list(model.state_dict()) == keys
    assert isinstance(model.inner.layers[0].self_attn, nn.MultiheadAttention)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), engine.detach(model)):
        assert [type(m) for m in copied.modules()] == types
        assert copied.inner.use_nested_tensor


def test_evaluation_without_gradients_may_take_the_fused_path(private):
    torch.manual_seed(0)
    plain = Encoder(True).eval()
    _, model, _, _ = private(copy.deepcopy(plain))
    with torch.no_grad():
        batch = (*samples(), padding(T))
        torch.testing.assert_close(model(*batch), plain(*batch))


class Uses(nn.Module):
    """Calls a layer with another shape than the model's batch."""

    def __init__(self, layer, use, first=False):
        super().__init__()
        self.first = nn.Linear(E, E) if first else nn.Identity()
        self.layer, self.use = layer, use

    def forward(self, x):
        return self.use(self.layer, self.first(x))


def attention(**options):
    return nn.MultiheadAttention(E, HEADS, **options)


REFUSED = {
    "unbatched": (attention(batch_first=True), lambda m, x: m(*[x[0]] * 3)[0], "unsqueeze"),
    "nested": (
        attention(batch_first=True),
        lambda m, x: m(*[torch.nested.nested_tensor(list(x))] * 3)[0],
        "is nested",
    ),
    "not_transposed": (attention(), lambda m, x: m(x, x, x)[0], "batch_first=True"),
    "hint": (
        attention(batch_first=True),
        lambda m, x: m(x, x, x, is_causal=True)[0],
        "Pass both",
    ),
    "mask": (
        attention(batch_first=True),
        lambda m, x: m(x, x, x, attn_mask=torch.ones(1, T))[0],
        "attn_mask.* expected torch's shape",
    ),
    "two_batches": (
        attention(batch_first=True),
        lambda m, x: m(x, x[:2], x[:2])[0],
        "different numbers of samples",
    ),
    "stack": (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(E, HEADS, 12), 1, enable_nested_tensor=False
        ),
        lambda m, x: m(x),
        "batch_first=True",
    ),
}


@pytest.mark.parametrize("first", [True, False], ids=["after_a_layer", "first"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_use_that_tells_no_samples_is_refused_by_name(case, first, private):
    layer, use, words = REFUSED[case]
    _, model, _, _ = private(Uses(copy.deepcopy(layer), use, first))
    kind = ValueError if case == "hint" else dpflash.PrivateRefusal
    with pytest.raises(kind, match=words) as error:
        model(samples()[0])
    assert "'layer" in str(error.value)


def test_samples_of_one_token_are_not_taken_for_the_tokens_of_one_sample(private):
    _, model, _, _ = private(Uses(attention(), lambda m, x: m(x, x, x)[0]))
    with pytest.raises(dpflash.PrivateRefusal, match="or no tensor that the model got has"):
        model(samples()[0][:, :1])


def test_a_model_given_tokens_first_is_refused(private):
    _, model, _, _ = private(nn.Transformer(E, HEADS, 1, 1, 12))
    x, memory = samples()
    with pytest.raises(
        dpflash.PrivateRefusal, match="no tensor that the model got.*batch_first=True"
    ):
        model(memory.transpose(0, 1), x.transpose(0, 1))


class OwnForward(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


def only_output_trained(module):
    module.in_proj_weight.requires_grad_(False)
    module.in_proj_bias.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: OwnForward(E, HEADS), "OwnForward, a nn.MultiheadAttention with a forward"),
        (lambda: only_output_trained(OwnForward(E, HEADS)), "with a forward of its own"),
        (lambda: parametrizations.weight_norm(attention(), "in_proj_weight"), "in_proj_weight"),
        (lambda: prune.l1_unstructured(attention(), "in_proj_weight", 0.5), "in_proj_weight"),
    ],
    ids=["forward", "forward_output", "weight_norm", "pruned"],
)
def test_parameters_that_the_rule_would_not_see_are_refused(build, words, private):
    with pytest.raises(ValueError, match=words):
        private(nn.Sequential(nn.Linear(E, E), build()))


def test_an_empty_batch_gives_zeros(private, sums):
    engine, model, _, _ = private(Encoder(False))
    x, memory = samples()
    engine.backward(loss_of(model, x[:0], memory[:0]))
    assert not any(t.any() for t in sums(engine, model).values())


@pytest.mark.cases(0)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@every_order
def test_a_compiled_encoder_agrees_with_an_eager_one(
    clipping, batch_first, private, sums, distance
):
    torch.manual_seed(0)
    torch.compiler.reset()
    plain, found = Encoder(batch_first), []
    for compiled in (False, True):
        engine, model, _, _ = private(copy.deepcopy(plain), max_grad_norm=0.5, clipping=clipping)
        called = model
        if compiled:
            called = torch.compile(model, fullgraph=True, backend="aot_eager")
            engine.prepare(B)
        engine.backward(loss_of(called, *samples()))
        found.append(sums(engine, model))
    assert distance(found[1], found[0]) <= 2e-6
