"""Adapters of PEFT: their sums are those of a loop over samples, or they are refused by name."""

import copy
import math

import pytest
import torch
from small_runs import TINY, gpt2, mixture
from torch import nn

import dpflash

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def llama(**changes):
    options = {**TINY, "num_key_value_heads": 2, "attn_implementation": "eager", **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **options))


def lora(**options):
    return peft.LoraConfig(r=2, **{"target_modules": ["q_proj", "down_proj"], **options})


CONFIGS = {
    "lora": lora(),
    "rslora": lora(use_rslora=True, target_modules="all-linear"),
    "lora with biases": lora(lora_bias=True),
    "dora": lora(use_dora=True),
    # It drops nothing, but then PEFT leaves the base's product to DoRA.
    "dora with dropout": lora(use_dora=True, lora_dropout=1e-12),
    "lora of embeddings": lora(target_modules=["embed_tokens", "q_proj"]),
    "dora of embeddings": lora(target_modules=["embed_tokens", "q_proj"], use_dora=True),
    "trainable tokens": peft.TrainableTokensConfig(
        token_indices=[3, 5, 8], target_modules=["embed_tokens"]
    ),
    "lora and tokens": lora(trainable_token_indices={"embed_tokens": [3, 4]}),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8),
    "p-tuning by an LSTM": peft.PromptEncoderConfig(
        num_virtual_tokens=3, encoder_hidden_size=8, encoder_reparameterization_type="LSTM"
    ),
    "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=3),
    "saved head": lora(modules_to_save=["lm_head"]),
    "saved embedding": lora(modules_to_save=["embed_tokens"]),
    "vera": peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "norms": peft.LNTuningConfig(target_modules=["norm", "input_layernorm"]),
}
KINDS = (
    {"grad_sample_mode": "instantiate"},
    {"grad_sample_mode": "book_keeping"},
    {"grad_sample_mode": "ghost"},
    {"clipping": "per_layer"},
)
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind.values())))


def adapted(config, base=None):
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    config.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(llama() if base is None else base, config).train()
    for parameter in model.parameters():
        if parameter.requires_grad:  # adapters begin at 0 or 1
            nn.init.normal_(parameter, std=0.3)
    return model


def losses(model, batch):
    """Of the logits of the batch's own tokens, after the virtual ones."""
    logits = model(batch[:, :-1]).logits[:, -(batch.shape[1] - 1) :]
    return 10 * dpflash.losses.cross_entropy(logits, batch[:, 1:])


def tokens(samples=4, length=8, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 9, (samples, length), generator=generator)


@pytest.fixture
def as_the_loop(private, oracle, sums, distance):
    """as_the_loop(model, ...): checks its sums; gives the private model and its optimizer."""

    def check(model, **kind):
        batch = tokens()
        expected = oracle(model, losses, batch)
        model = copy.deepcopy(model).double()
        engine, made, optimizer, _ = private(model, max_grad_norm=1e9, exact=False, **kind)
        engine.backward(losses(made, batch))
        assert distance(sums(engine, made), expected.clipped_sum(1e9)) <= 1e-10
        return made, optimizer

    return check


def test_dora_with_frozen_magnitudes_trains(as_the_loop):
    model = adapted(CONFIGS["dora"])
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.requires_grad_(False)
    as_the_loop(model)


@pytest.mark.parametrize("name", list(CONFIGS))
@every_kind
def test_gradients_are_those_of_a_loop_over_samples(name, kind, as_the_loop):
    as_the_loop(adapted(CONFIGS[name]), **kind)


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind["grad_sample_mode"])
def test_clipped_sums_are_those_of_a_loop_over_samples(
    name, kind, private, oracle, sums, distance
):
    model, batch = adapted(CONFIGS[name]), tokens()
    expected = oracle(model, losses, batch)
    bound = sorted(expected.norms())[2] * 0.999
    engine, made, _, _ = private(copy.deepcopy(model).double(), max_grad_norm=bound, **kind)
    engine.backward(losses(made, batch))
    assert distance(sums(engine, made), expected.clipped_sum(bound)) <= 1e-6


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("kind", KINDS[2:], ids=lambda kind: next(iter(kind.values())))
def test_one_sample_in_or_out_moves_the_sum_by_at_most_the_bound(name, kind, private):
    model, batch, bound, found = adapted(CONFIGS[name]), tokens(), 0.5, []
    for weights in (torch.full((4,), 1e4), torch.tensor([0.0, 1e4, 1e4, 1e4])):
        engine, made, _, _ = private(copy.deepcopy(model), max_grad_norm=bound, **kind)
        engine.backward(losses(made, batch) * weights)
        found.append(
            torch.cat([engine._step.sums[p].double().flatten() for p in engine._step.sums.trained])
        )
    moved = float((found[0] - found[1]).norm())
    assert 0.2 * bound < moved <= bound * (1 + 2.0**-18)


@pytest.mark.parametrize("name", ["dora", "dora with dropout"])
@pytest.mark.parametrize("base", ["biases", "transposed", "flattened"])
def test_dora_beside_layers_of_other_kinds(base, name, as_the_loop):
    config = copy.deepcopy(CONFIGS[name])
    if base == "biases":
        plain = llama(attention_bias=True)
        nn.init.normal_(plain.model.layers[0].self_attn.q_proj.bias)
    elif base == "transposed":
        config.target_modules, config.fan_in_fan_out = {"c_attn", "c_fc"}, True
        plain = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    else:
        config.target_modules = {"q_proj", "fc1", "fc2"}
        sizes = {**TINY, "ffn_dim": 24, "word_embed_proj_dim": 16}
        plain = transformers.OPTForCausalLM(
            transformers.OPTConfig(**sizes, dropout=0.0, use_cache=False)
        )
    as_the_loop(adapted(config, plain))


def test_tokens_trained_in_a_table_that_is_the_head_too(as_the_loop):
    as_the_loop(adapted(lora(trainable_token_indices=[3, 4]), llama(tie_word_embeddings=True)))


def test_trained_tokens_take_no_memory_of_a_table_for_each_sample(private):
    """PEFT writes the rows into a copy of the table, of which vmap would make B."""
    model = adapted(CONFIGS["trainable tokens"], llama(vocab_size=4096))
    engine, made, _, _ = private(model, batch_size=4)
    largest = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.untyped_storage().nbytes():
                largest.append(result.untyped_storage().nbytes() // result.element_size())
            return result

    with Seen():
        made.base_model.model.model.embed_tokens(tokens())
    assert max(largest) <= 2 * 4096 * 16


class Quantized(nn.Module):
    """A frozen layer of 8 or 4 bits: integers, two of 4 bits in a byte, and a scale a row."""

    def __init__(self, layer, bits):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bits = bits
        weight, most = layer.weight.detach(), 2 ** (bits - 1) - 1
        scale = weight.abs().amax(1, keepdim=True) / most
        codes = ((weight / scale).round() + most + 1).to(torch.uint8)
        if bits == 4:
            codes = codes[:, ::2] * 16 + codes[:, 1::2]
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Buffer(scale)

    def forward(self, x):
        codes = self.weight
        if self.bits == 4:
            codes = torch.stack([codes // 16, codes % 16], 2).flatten(1)
        weight = (codes.to(self.scale.dtype) - 2 ** (self.bits - 1)) * self.scale
        return nn.functional.linear(x, weight)


class Beside(nn.Module):
    """LoRA beside a frozen layer of few bits, as PEFT's for bitsandbytes."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("bits", [8, 4])
@every_kind
def test_adapters_of_a_base_of_few_bits_agree_with_the_loop(bits, kind, as_the_loop):
    torch.manual_seed(0)
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            plain = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, Beside(Quantized(plain, bits)))
    before = {n: b.clone() for n, b in model.named_parameters() if b.dtype == torch.uint8}
    made, optimizer = as_the_loop(model, **kind)
    optimizer.step()
    assert before and all(torch.equal(b, made.get_parameter(n)) for n, b in before.items())


def test_what_has_no_rule_is_refused_by_name(private):
    config = lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    error = r"mlp.experts' adds LoRA to a parameter of another module \(target_parameters\)"
    with pytest.raises(ValueError, match=error):
        private(adapted(config, mixture()))


@pytest.mark.parametrize(
    "config",
    [
        peft.OFTConfig(oft_block_size=4, target_modules=["q_proj"]),
        peft.LoHaConfig(r=2, target_modules=["q_proj"]),
        peft.LoKrConfig(r=2, target_modules=["q_proj"]),
    ],
    ids=["oft", "loha", "lokr"],
)
def test_what_vmap_cannot_run_is_refused_by_name(config, private):
    engine, model, _, _ = private(adapted(config))
    with pytest.raises(RuntimeError, match="layers.0.self_attn.q_proj.*vmap.*fails.*Freeze it"):
        losses(model, tokens())


def test_the_state_and_the_outputs_of_an_adapted_model_stay_as_they_were(private):
    for name in ("dora", "ia3", "trainable tokens", "prompt tuning"):
        model, batch = adapted(CONFIGS[name]).double(), tokens()
        expected, keys = model(batch).logits, set(model.state_dict())
        engine, made, _, _ = private(model)
        assert torch.allclose(made(batch).logits, expected, rtol=0, atol=1e-12)
        with torch.no_grad():
            assert torch.allclose(made.eval()(batch).logits, expected, rtol=0, atol=1e-12)
        assert set(made.state_dict()) == keys
        assert math.isfinite(float(expected.sum()))
        engine.detach(made)
        assert type(made) is getattr(peft, type(made).__name__)
        assert torch.allclose(made(batch).logits, expected, rtol=0, atol=1e-12)


def test_adapters_that_were_merged_and_unmerged_are_refused_with_the_way_out(private):
    engine, model, *_ = private(adapted(CONFIGS["rslora"]))
    before = copy.deepcopy(model)
    copy.deepcopy(model).merge_adapter()
    engine.backward(losses(model, tokens()))
    model.merge_adapter()
    model.unmerge_adapter()
    with pytest.raises(dpflash.PrivateRefusal, match=r"base_layer.weight'.*merge.*deepcopy"):
        model.state_dict()
    model.load_state_dict(before.state_dict())
    model.state_dict()
