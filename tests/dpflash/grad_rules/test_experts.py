"""Mixtures of experts of transformers: per-sample gradients by segments of tokens."""

import copy

import pytest
import torch
from kinds import KINDS, every_kind
from torch import nn

from dpflash.grad_rules.experts import ExpertsUse, Routing, is_experts
from dpflash.integrations import transformers as dpflash_transformers

transformers = pytest.importorskip("transformers")

pytestmark = [
    # Two routers use scatter_, for which functorch loops over the samples.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*RoPE:UserWarning"),
]

SMALL = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "mixtral": ("Mixtral", SMALL | {"num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        SMALL | {"num_experts": 4, "moe_intermediate_size": 12, "head_dim": 4},
    ),
    "gpt_oss": (
        "GptOss",
        SMALL | {"num_local_experts": 4, "head_dim": 4, "layer_types": ["full_attention"] * 2},
    ),
    "deepseek_v2": ("DeepseekV2", LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", LATENT),
}
# Their routers multiply in float32 whatever the model's dtype is.
ROUTES_IN_FP32 = ("deepseek_v2", "deepseek_v3")


def mixture(name, **changes):
    torch.manual_seed(0)
    kind, options = CONFIGS[name]
    config = getattr(transformers, f"{kind}Config")(**{**options, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for part, parameter in model.named_parameters():
        if "experts" in part or part.endswith(("gate.weight", "router.weight")):
            nn.init.normal_(parameter, std=0.3)
        parameter.requires_grad_("sinks" not in part)
    return model


UNCLIPPED = {"max_grad_norm": 1e9, "exact": False}


def tokens(batch=4, length=7, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 23, (batch, length), generator=generator)


@pytest.fixture
def losses(next_token_loss):
    return lambda model, batch: 10 * next_token_loss(model, batch)


@pytest.mark.parametrize("name", list(CONFIGS))
@every_kind
def test_gradients_are_those_of_a_loop_over_samples(name, kind, losses, from_loop):
    """In float64, below a bound that clips nothing; sums are not rounded to a grid."""
    limit = 1.2e-7 if name in ROUTES_IN_FP32 else 1e-10
    assert from_loop(mixture(name).double(), losses, tokens(), **UNCLIPPED, **kind) <= limit


@pytest.mark.parametrize("name", list(CONFIGS))
@every_kind
def test_clipped_sums_are_those_of_a_loop_over_samples(name, kind, oracle, losses, from_loop):
    model, batch = mixture(name).double(), tokens()
    bound = sorted(oracle(model, losses, batch).norms())[2] * 0.999
    limit = 1e-5 if name in ROUTES_IN_FP32 else 1e-6
    assert from_loop(model, losses, batch, max_grad_norm=bound, **kind) <= limit


@every_kind
def test_experts_that_two_layers_share_get_the_gradients_of_both(kind, losses, from_loop):
    """Top-1 of many experts, so that most pairs (sample, expert) are in one of the layers only."""
    model, batch = mixture("mixtral", num_local_experts=8, num_experts_per_tok=1), tokens(length=3)
    first, second = model.model.layers
    second.mlp.experts = first.mlp.experts
    assert from_loop(model.double(), losses, batch, **UNCLIPPED, **kind) <= 1e-10
    if kind.get("clipping") is None:
        assert from_loop(model, losses, batch, max_grad_norm=0.1, **kind) <= 1e-6


def released(engine, model):
    return torch.cat(
        [
            engine._step.sums.get(p, torch.zeros_like(p)).double().flatten()
            for p in model.parameters()
        ]
    )


@pytest.mark.parametrize("name", list(CONFIGS))
@every_kind
def test_one_sample_in_or_out_moves_the_sum_by_at_most_the_bound(name, kind, private, losses):
    """With huge losses, so that each sample is clipped: by differencing, in float32."""
    model, batch, bound = mixture(name), tokens(), 0.5
    found = []
    for left_out in (None, 0, 3):
        weights = torch.full((4,), 1e3)
        if left_out is not None:
            weights[left_out] = 0
        engine, made, _, _ = private(copy.deepcopy(model), max_grad_norm=bound, **kind)
        engine.backward(losses(made, batch) * weights)
        found.append(released(engine, made))
    for other in found[1:]:
        moved = float((found[0] - other).norm())
        assert 0.3 * bound < moved <= bound * (1 + 2.0**-18)


class Routed(nn.Module):
    """Experts whose routing is an argument, between two layers."""

    def __init__(self, width=64):
        super().__init__()
        config = transformers.MixtralConfig(
            hidden_size=width,
            intermediate_size=width,
            num_local_experts=4,
            experts_implementation="eager",
        )
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.experts = type(mixture("mixtral").model.layers[0].mlp.experts)(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, x, index):
        hidden = self.first(x)
        rows, chosen = hidden.flatten(0, 1), index.flatten(0, 1)
        mixed = self.experts(rows, chosen, torch.full(chosen.shape, 0.5))
        return self.last(mixed.view_as(hidden))


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@every_kind
def test_the_bits_of_a_sample_do_not_depend_on_what_others_route_where(kind, is_frozen, private):
    """Products over all tokens of an expert, as transformers makes them, round otherwise where the
    others leave a sample's expert to it alone.
    """
    torch.manual_seed(0)
    model, found = Routed(), []
    model.experts.requires_grad_(not is_frozen)
    own, own_index = torch.randn(1, 8, 64), torch.rand(1, 8, 4).argsort(2)[..., :2]
    for others in (torch.rand(5, 8, 4).argsort(2)[..., :2], torch.full((5, 8, 2), 3)):
        x, index = torch.cat([own, torch.randn(5, 8, 64)]), torch.cat([own_index, others])
        engine, made, _, _ = private(copy.deepcopy(model), **kind)
        losses = made(x, index).square().sum((1, 2))
        engine.backward(losses * torch.eye(6)[0])
        found.append(released(engine, made))
    assert found[0].norm() > 0 and torch.equal(*found)


@pytest.mark.parametrize("trained", ["q_proj", "gate.weight", "down_proj", "gate_up_proj"])
@every_kind
def test_frozen_parts_of_a_mixture_leave_the_sums_of_the_others(trained, kind, losses, from_loop):
    model = mixture("mixtral").double()
    for part, parameter in model.named_parameters():
        parameter.requires_grad_(trained in part)
    assert from_loop(model, losses, tokens(), **UNCLIPPED, **kind) <= 1e-10


def test_a_mixture_is_proven_by_its_first_batch(private, losses):
    """Its rows for tokens are compared by sample, forward and backward, bit for bit."""
    engine, model, optimizer, loader = private(mixture("mixtral"), tokens(60), batch_size=20)
    for (batch,) in loader:
        engine.backward(losses(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.verified is True


def test_samples_that_use_one_expert_each_have_gradients_of_that_expert_alone():
    x, dy = torch.randn(12, 3), torch.randn(12, 2)
    index = torch.tensor([[1] * 4, [0] * 4, [1, 0, 1, 0]])
    routing = Routing.of(index.reshape(12, 1), 3, 3, None)
    assert routing.segments == ((0, 1, 0, 4), (1, 0, 4, 8), (2, 0, 8, 10), (2, 1, 10, 12))
    assert torch.equal(routing.order[routing.inverse], torch.arange(12))
    use = ExpertsUse(x[routing.order], dy[routing.order], routing, transposed=False)
    grads = use.grad(slice(0, 3), slice(0, 3))
    for sample in range(3):
        for expert in range(3):
            rows = 4 * sample + (index[sample] == expert).nonzero().flatten()
            assert torch.allclose(grads[sample, expert], dy[rows].t() @ x[rows], atol=1e-6)
    # Tiles are the same bits, and outside of them it is zero.
    tiled = torch.zeros_like(grads)
    for samples, rows in use.tiles():
        tiled[samples, rows] = use.grad(samples, rows)
    assert torch.equal(tiled, grads)


def test_no_gradient_of_all_experts_is_kept_without_need(private, losses, monkeypatch):
    """In all modes but "instantiate", G exists for one sample and one expert at a time."""
    largest = []
    plain = ExpertsUse.grad

    def grad(self, samples, rows):
        made = plain(self, samples, rows)
        largest.append(made.shape[0] * made.shape[1])
        return made

    monkeypatch.setattr(ExpertsUse, "grad", grad)
    for kind in KINDS[1:3]:
        engine, model, _, _ = private(mixture("mixtral"), **kind)
        engine.backward(losses(model, tokens()))
    assert max(largest) == 1
    largest.clear()
    engine, model, _, _ = private(mixture("mixtral"), **KINDS[0])
    engine.backward(losses(model, tokens()))
    assert max(largest) == 16


def test_an_empty_batch_takes_part():
    routing = Routing.of(torch.empty(0, 2, dtype=torch.int64), 3, 0, None)
    use = ExpertsUse(torch.empty(0, 3), torch.empty(0, 2), routing, transposed=True)
    assert routing.segments == () and use.rows[0].shape[0] == 0
    assert [use.grad(*tile).shape for tile in use.tiles()] == [(0, 1, 3, 2)]


def test_losses_of_the_router_are_refused_by_name(private, losses):
    with pytest.raises(ValueError, match="output_router_logits=True.*balances.*all tokens"):
        private(mixture("mixtral", output_router_logits=True))
    engine, model, _, _ = private(mixture("mixtral"))
    with pytest.raises(ValueError, match="call of the model.*output_router_logits=True"):
        model(tokens(), output_router_logits=True)


def test_routing_with_a_capacity_is_refused_by_name(private):
    config = transformers.SwitchTransformersConfig(
        vocab_size=23, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2, num_experts=2
    )
    with pytest.raises(ValueError, match="router.*expert_capacity=64: it drops tokens"):
        private(transformers.SwitchTransformersForConditionalGeneration(config))


def test_experts_spread_over_ranks_are_refused_by_name(private, losses):
    model = mixture("mixtral")
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    engine, model, _, _ = private(model)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts' is spread over ranks"):
        model(tokens())


def test_a_subclass_with_a_forward_of_its_own_is_no_mixture_of_theirs():
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    class Own(MixtralExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    config = transformers.MixtralConfig(**CONFIGS["mixtral"][1])
    assert is_experts(MixtralExperts(config)) and not is_experts(Own(config))
    assert not is_experts(nn.Linear(2, 2))


def test_experts_by_the_name_of_dpflash_give_what_eager_ones_do(private, losses):
    """Before the model is private, and after; state and outputs are those of the plain model."""
    dpflash_transformers.register()
    eager = mixture("gpt_oss").double()
    model = mixture("gpt_oss", experts_implementation="dpflash").double()
    batch = tokens()
    expected = eager(batch).logits
    assert torch.allclose(model(batch).logits, expected, rtol=0, atol=1e-12)
    engine, model, _, _ = private(model)
    assert torch.allclose(model(batch).logits, expected, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert torch.allclose(model(batch).logits, expected, rtol=0, atol=1e-12)
    assert model.state_dict().keys() == eager.state_dict().keys()


def test_a_routing_that_mixes_samples_is_refused_by_the_first_batch(private, losses):
    """A token's experts change places where the next sample's token goes to the same expert."""
    model = mixture("mixtral")

    class Batched(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states):
            logits, scores, index = self.inner(hidden_states)
            taken = index[:, :1] == index[:, :1].roll(7, 0)
            return logits, scores, torch.where(taken, index.flip(1), index)

    model.model.layers[1].mlp.gate = Batched(model.model.layers[1].mlp.gate)
    engine, model, _, _ = private(model)
    with pytest.raises(RuntimeError, match="nothing was released"):
        engine.backward(losses(model, tokens(16)))


def test_a_step_under_autocast_is_finite_and_bounded(private, losses):
    engine, model, _, _ = private(mixture("qwen3_moe"), max_grad_norm=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = losses(model, tokens())
    engine.backward(100 * found.float())
    assert 0 < float(released(engine, model).norm()) <= 4 * 0.5
