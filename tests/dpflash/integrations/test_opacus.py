"""Opacus with this library's norms, noise and accountants: equal results, and what is better."""

import copy
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

opacus = pytest.importorskip("opacus")

from opacus.accountants import RDPAccountant as OpacusRDPAccountant  # noqa: E402
from opacus.accountants import registry  # noqa: E402
from opacus.grad_sample import (  # noqa: E402
    GradSampleModuleFastGradientClipping,
    register_norm_sampler,
)
from opacus.optimizers import (  # noqa: E402
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
)
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402

import dpflash  # noqa: E402
from dpflash.accounting import RDPAccountant, create_accountant  # noqa: E402
from dpflash.accounting.registry import ACCOUNTANTS  # noqa: E402
from dpflash.integrations import opacus as integration  # noqa: E402
from dpflash.kernels import NoiseStream, grid_of  # noqa: E402

# Inputs of these models are data, which need no gradient; secure_mode is what is replaced here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
]

NORM_SAMPLERS = GradSampleModuleFastGradientClipping.NORM_SAMPLERS


@pytest.fixture(autouse=True)
def _leave_opacus_as_it_was():
    yield
    integration.unregister()


@pytest.fixture
def registered():
    integration.register()


class Block(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.up = nn.Linear(width, 2 * width, bias=bias)
        self.down = nn.Linear(2 * width, width, bias=bias)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    def __init__(self, rows=13, width=16, bias=True, classes=5):
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.blocks = nn.Sequential(Block(width, bias), Block(width, bias))
        self.head = nn.Linear(width, classes, bias=bias)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)).mean(1))


def mlp(bias=True, width=12):
    return nn.Sequential(nn.Linear(width, 17, bias=bias), nn.Tanh(), nn.Linear(17, 5, bias=bias))


def losses_of(output):
    return output.flatten(1).square().sum(1) + output.flatten(1).sum(1)


def ghost_norms(model, x, reduction="mean"):
    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(model), loss_reduction=reduction)
    losses = losses_of(wrapped(x))
    (losses.mean() if reduction == "mean" else losses.sum()).backward()
    return wrapped.get_norm_sample()


def loop_norms(model, x):
    """The definition, one sample after the other, in float64."""
    model = copy.deepcopy(model).double()
    x = x.double() if x.is_floating_point() else x
    parameters = [p for p in model.parameters() if p.requires_grad]
    norms = []
    for sample in x.split(1):
        grads = torch.autograd.grad(losses_of(model(sample)).sum(), parameters)
        norms.append(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
    return torch.stack(norms)


torch.manual_seed(0)
CASES = {
    "mlp-2d-bias": (mlp(), torch.randn(6, 12)),
    "mlp-2d": (mlp(bias=False), torch.randn(6, 12)),
    "mlp-3d-bias": (mlp(), torch.randn(5, 3, 12)),
    "mlp-3d-long": (mlp(), torch.randn(3, 70, 12)),
    "wide-3d-short": (mlp(width=192), torch.randn(4, 2, 192)),
    "transformer-bias": (Transformer(), torch.randint(0, 13, (4, 33))),
    "transformer": (Transformer(bias=False), torch.randint(0, 13, (4, 33))),
    "transformer-T1": (Transformer(), torch.randint(0, 13, (4, 1))),
    "one-sample": (Transformer(), torch.randint(0, 13, (1, 9))),
}
every_case = pytest.mark.parametrize(("model", "x"), CASES.values(), ids=CASES)


@every_case
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_norms_are_those_of_stock_ghost_and_of_a_loop_in_float64(model, x, reduction):
    stock = ghost_norms(model, x, reduction)
    integration.register()
    ours = ghost_norms(model, x, reduction)
    assert ours.dtype == stock.dtype and ours.shape == stock.shape
    torch.testing.assert_close(ours, stock, rtol=2e-5, atol=0)
    torch.testing.assert_close(ours.double(), loop_norms(model, x), rtol=1e-5, atol=0)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("middle", [(2, 3), (2, 3, 4)], ids=["4d", "5d"])
def test_inputs_of_more_than_three_dimensions_are_flattened(middle):
    model, x = mlp(), torch.randn(4, *middle, 12)
    torch.testing.assert_close(
        ghost_norms(model, x).double(), loop_norms(model, x), rtol=1e-5, atol=0
    )


@pytest.mark.usefixtures("registered")
def test_batch_may_be_the_second_dimension():
    model, x = mlp(), torch.randn(4, 7, 12)
    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(model), batch_first=False)
    losses_of(wrapped(x.transpose(0, 1)).transpose(0, 1)).mean().backward()
    torch.testing.assert_close(
        wrapped.get_norm_sample().double(), loop_norms(model, x), rtol=1e-5, atol=0
    )


@pytest.mark.usefixtures("registered")
def test_float64_models_keep_float64_norms():
    model, x = Transformer().double(), torch.randint(0, 13, (3, 9))
    norms = ghost_norms(model, x)
    assert norms.dtype == torch.float64
    torch.testing.assert_close(norms, loop_norms(model, x), rtol=1e-10, atol=0)


@pytest.mark.parametrize("shape", [(8, 64), (8, 5, 64), (8, 100, 64)], ids=["2d", "short", "long"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_norms_of_16_bit_models_are_not_rounded_to_16_bits(dtype, shape):
    layer = nn.Linear(64, 48, dtype=dtype)
    x, dy = torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 48).to(dtype)
    wide_x, wide_dy = x.double().view(8, -1, 64), dy.double().view(8, -1, 48)
    weight = torch.einsum("bti,bto->boi", wide_x, wide_dy).flatten(1).norm(dim=1)
    bias = wide_dy.sum(1).norm(dim=1)
    stock = NORM_SAMPLERS[nn.Linear](layer, [x], dy)
    integration.register()
    ours = NORM_SAMPLERS[nn.Linear](layer, [x], dy)
    for parameter, exact in ((layer.weight, weight), (layer.bias, bias)):
        assert ours[parameter].dtype == torch.float32
        torch.testing.assert_close(ours[parameter].double(), exact, rtol=1e-5, atol=0)
        assert ((stock[parameter].double() - exact).abs() > 1e-4 * exact).any()


@pytest.mark.usefixtures("registered")
def test_under_autocast_the_input_counts_as_it_was_multiplied():
    layer = nn.Linear(64, 48)
    x, dy = torch.randn(3, 9, 64), torch.randn(3, 9, 48).bfloat16()
    sampler = NORM_SAMPLERS[nn.Linear]
    mixed, rounded = sampler(layer, [x], dy), sampler(layer, [x.bfloat16()], dy)
    assert torch.equal(mixed[layer.weight], rounded[layer.weight])


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_a_backward_inside_of_autocast_rounds_no_norm(tokens):
    layer, x, dy = nn.Linear(64, 48), torch.randn(3, tokens, 64), torch.randn(3, tokens, 48)
    sampler = NORM_SAMPLERS[nn.Linear]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = sampler(layer, [x], dy)
    outside = sampler(layer, [x], dy)
    assert all(torch.equal(inside[p], outside[p]) for p in layer.parameters())


@pytest.mark.usefixtures("registered")
def test_frozen_parameters_have_no_norm():
    x = torch.randn(2, 3, 4)
    layer = nn.Linear(4, 5)
    layer.weight.requires_grad_(False)
    assert list(NORM_SAMPLERS[nn.Linear](layer, [x], torch.randn(2, 3, 5))) == [layer.bias]
    layer.weight.requires_grad_(True)
    layer.bias.requires_grad_(False)
    assert list(NORM_SAMPLERS[nn.Linear](layer, [x], torch.randn(2, 3, 5))) == [layer.weight]
    table = nn.Embedding(4, 5)
    table.weight.requires_grad_(False)
    indices = torch.zeros(2, 3, dtype=torch.long)
    assert NORM_SAMPLERS[nn.Embedding](table, [indices], torch.randn(2, 3, 5)) == {}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("width", [3, 64])
def test_an_empty_batch_has_empty_norms(width):
    layer, table = nn.Linear(width, width), nn.Embedding(4, width)
    for middle in ((), (5,), (2, 5)):
        empty = torch.zeros(0, *middle, width)
        for norms in NORM_SAMPLERS[nn.Linear](layer, [empty], empty).values():
            assert norms.shape == (0,) and norms.dtype == torch.float32
        indices = torch.zeros(0, *middle, dtype=torch.long)
        (norms,) = NORM_SAMPLERS[nn.Embedding](table, [indices], empty).values()
        assert norms.shape == (0,)


@pytest.mark.usefixtures("registered")
def test_a_vector_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="expected samples first"):
        NORM_SAMPLERS[nn.Linear](nn.Linear(4, 5), [torch.randn(4)], torch.randn(5))


@pytest.mark.parametrize("shape", [(6,), (6, 5), (6, 2, 5)], ids=["1d", "2d", "3d"])
def test_embeddings_take_indices_of_any_shape(shape):
    table, indices = nn.Embedding(7, 4), torch.randint(0, 7, shape)
    stock = ghost_norms(table, indices)
    integration.register()
    ours = ghost_norms(table, indices)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.double(), loop_norms(table, indices), rtol=1e-5, atol=0)


def test_the_padding_row_has_no_gradient_and_counts_for_no_norm():
    table = nn.Embedding(7, 4, padding_idx=0)
    nn.init.ones_(table.weight)
    indices = torch.tensor([[0, 0, 0, 1], [1, 2, 3, 4]])
    exact = loop_norms(table, indices)
    assert ghost_norms(table, indices)[0] > 2 * exact[0]
    integration.register()
    torch.testing.assert_close(ghost_norms(table, indices).double(), exact, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("registered")
def test_an_embedding_that_divides_by_counts_of_the_batch_is_refused():
    with pytest.raises(ValueError, match="scale_grad_by_freq=True"):
        ghost_norms(nn.Embedding(7, 4, scale_grad_by_freq=True), torch.zeros(2, 3).long())


@pytest.mark.parametrize(("tokens", "width"), [(6, 64), (64, 16)], ids=["gram", "tile"])
def test_a_norm_survives_tokens_that_cancel(tokens, width):
    x = torch.randn(16, tokens, width) * 1e3
    dy = torch.randn(16, tokens, width)
    x[:, 1::2] = x[:, ::2]
    dy[:, 1::2] = -dy[:, ::2] * (1 + 1e-6)
    layer = nn.Linear(width, width, bias=False)
    exact = torch.einsum("bti,bto->boi", x.double(), dy.double()).flatten(1).norm(dim=1)
    (stock,) = NORM_SAMPLERS[nn.Linear](layer, [x], dy).values()
    integration.register()
    (ours,) = NORM_SAMPLERS[nn.Linear](layer, [x], dy).values()
    error = ((ours.double() - exact) / exact).abs().max()
    assert error < 0.15
    assert error < 0.1 * ((stock.double() - exact) / exact).abs().max()


def trained(mode, model, x, y, *, max_grad_norm=0.5, steps=3):
    model = copy.deepcopy(model)
    parts = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        grad_sample_mode=mode,
        poisson_sampling=False,
    )
    wrapped, optimizer = parts[0], parts[1]
    criterion = parts[2] if mode == "ghost" else nn.CrossEntropyLoss()
    for _ in range(steps):
        criterion(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["mlp-2d-bias", "transformer-bias", "transformer"])
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6], ids=["clipped", "free"])
def test_ghost_training_is_that_of_hooks_mode(name, max_grad_norm):
    model, x = CASES[name]
    y = torch.arange(len(x)) % 5
    ghost = trained("ghost", model, x, y, max_grad_norm=max_grad_norm)
    hooks = trained("hooks", model, x, y, max_grad_norm=max_grad_norm)
    for ours, theirs, start in zip(ghost, hooks, model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert not torch.equal(ours, start)


def clip_factors(model, x):
    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(model))
    losses_of(wrapped(x)).mean().backward()
    return wrapped.get_clipping_coef()


def test_a_norm_that_is_no_number_is_infinite():
    layer = nn.Linear(4, 3, bias=False)
    x, dy = torch.ones(3, 2, 4), torch.ones(3, 2, 3)
    x[1], dy[1] = 1e30, torch.tensor([[1e30], [-1e30]])
    x[2, 0] = math.nan
    stock = NORM_SAMPLERS[nn.Linear](layer, [x], dy)[layer.weight]
    assert stock.isnan().tolist() == [False, True, True]
    integration.register()
    ours = NORM_SAMPLERS[nn.Linear](layer, [x], dy)[layer.weight]
    assert ours.tolist() == [pytest.approx(stock[0].item()), math.inf, math.inf]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_sample_leaves_the_clip_factors_of_the_others(poison):
    model, x = mlp(), torch.randn(4, 3, 12)
    integration.register()
    clean = clip_factors(model, x)
    x[2] = poison
    factors = clip_factors(model, x)
    others = [0, 1, 3]
    torch.testing.assert_close(factors[others], clean[others], rtol=1e-6, atol=0)
    assert factors[2] == 0


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return out


def test_a_matrix_of_tokens_is_made_only_below_a_quarter_of_the_gradient():
    integration.register()
    layer = nn.Linear(64, 64, bias=False)
    for tokens in range(2, 70):
        x = torch.randn(1, tokens, 64)
        with Sizes() as seen:
            NORM_SAMPLERS[nn.Linear](layer, [x], x)
        assert seen.largest <= max(x.numel(), 64 * 64)


def test_registering_again_and_unregistering_restores_opacus_exactly():
    samplers, accountants = dict(NORM_SAMPLERS), dict(registry._ACCOUNTANTS)
    integration.register()
    first = dict(NORM_SAMPLERS), dict(registry._ACCOUNTANTS)
    assert {layer for layer in samplers if samplers[layer] is not NORM_SAMPLERS[layer]} == {
        nn.Linear,
        nn.Embedding,
    }
    integration.register()
    assert (NORM_SAMPLERS, registry._ACCOUNTANTS) == first
    integration.register(replace_accountants=True)
    assert registry._ACCOUNTANTS["rdp"] is not accountants["rdp"]
    integration.unregister()
    assert (NORM_SAMPLERS, registry._ACCOUNTANTS) == (samplers, accountants)
    integration.unregister()
    assert (NORM_SAMPLERS, registry._ACCOUNTANTS) == (samplers, accountants)


def test_what_somebody_else_registered_later_stays():
    stock = NORM_SAMPLERS[nn.Linear]

    def other(layer, activations, backprops):
        return {}

    try:
        integration.register()
        register_norm_sampler(nn.Linear)(other)
        integration.unregister()
        assert NORM_SAMPLERS[nn.Linear] is other
    finally:
        register_norm_sampler(nn.Linear)(stock)


def test_a_layer_that_had_no_norm_sampler_has_none_afterwards(monkeypatch):
    monkeypatch.delitem(NORM_SAMPLERS, nn.Embedding)
    integration.register()
    assert nn.Embedding in NORM_SAMPLERS
    integration.unregister()
    assert nn.Embedding not in NORM_SAMPLERS


def test_a_missing_or_old_opacus_is_named(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(opacus.grad_sample, "register_norm_sampler")
        with pytest.raises(ImportError, match="1.6 or newer: pip install --upgrade opacus"):
            integration.register()
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(ImportError, match="pip install --upgrade opacus"):
        integration.register()
    with pytest.raises(ImportError, match="pip install --upgrade opacus"):
        integration.use_secure_noise(torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_accountants_do_not_replace_those_of_opacus_unless_asked():
    integration.register()
    assert type(opacus.PrivacyEngine(accountant="rdp").accountant) is OpacusRDPAccountant
    assert isinstance(opacus.PrivacyEngine(accountant="dpflash_rdp").accountant, RDPAccountant)
    integration.register(replace_accountants=True)
    assert isinstance(opacus.PrivacyEngine(accountant="rdp").accountant, RDPAccountant)


@pytest.mark.usefixtures("registered")
def test_opacus_calibrates_and_reports_by_the_registered_accountant(monkeypatch):
    read = []
    monkeypatch.setattr(
        RDPAccountant,
        "get_epsilon",
        lambda self, *given, plain=RDPAccountant.get_epsilon: (
            read.append(1) or plain(self, *given)
        ),
    )
    model = nn.Linear(3, 2)
    engine = opacus.PrivacyEngine(accountant="dpflash_rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=8),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        # Meant for AdaClipDPOptimizer, and handed to get_epsilon too.
        clipping="adaptive",
        target_unclipped_quantile=0.5,
        clipbound_learning_rate=0.2,
        max_clipbound=10.0,
        min_clipbound=0.1,
        unclipped_num_std=5.0,
    )
    assert len(read) > 3
    engine.accountant.history = [(optimizer.noise_multiplier, 1 / 5, 10)]
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0


@pytest.mark.usefixtures("registered")
@pytest.mark.filterwarnings("ignore:accountant=.*approximation")
@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_every_accountant_is_registered_and_tells_both_ends(name):
    rate = 1.0 if name == "gaussian" else 0.1
    registered = registry.create_accountant(f"dpflash_{name}")
    plain = create_accountant(name)
    assert type(registered).mechanism() == f"dpflash_{name}"
    for accountant in (registered, plain):
        for _ in range(3):
            accountant.step(noise_multiplier=1.0, sample_rate=rate)
    # Opacus hands all accountants the keywords of its optimizers.
    assert registered.get_epsilon(1e-5, eps_error=0.1) == plain.get_epsilon(1e-5)
    both = registered.get_epsilon(delta=1e-5, interval=True, max_clipbound=1.0)
    assert both == plain.get_epsilon(1e-5, interval=True)
    resumed = registry.create_accountant(f"dpflash_{name}")
    resumed.load_state_dict(registered.state_dict())
    assert resumed.history == registered.history == [(1.0, rate, 3)]


@pytest.mark.usefixtures("registered")
def test_states_of_opacus_and_of_ours_load():
    accountant = registry.create_accountant("dpflash_rdp")
    theirs = OpacusRDPAccountant()
    theirs.history = [(1.0, 0.1, 10)]
    for state in (theirs.state_dict(), RDPAccountant().state_dict()):
        accountant.load_state_dict(state)
        assert accountant.history == state["history"]
    accountant.history = [(1.0, 0.1, 10)]
    resumed = registry.create_accountant("dpflash_rdp")
    resumed.load_state_dict(accountant.state_dict())
    assert resumed.get_epsilon(1e-5) == accountant.get_epsilon(1e-5) > 0
    with pytest.raises(ValueError, match="mechanism 'prv'"):
        accountant.load_state_dict({"history": [], "mechanism": "prv"})


SHAPES = ((200, 300), (300,))
NOISE_MULTIPLIER = 0.75
ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.0,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 2.0,
}
OPTIMIZERS = {
    "flat": (DPOptimizer, 2.0, {}, NOISE_MULTIPLIER * 2.0),
    "ghost": (DPOptimizerFastGradientClipping, 2.0, {}, NOISE_MULTIPLIER * 2.0),
    "per_layer": (DPPerLayerOptimizer, [3.0, 4.0], {}, NOISE_MULTIPLIER * 5.0),
    "adaptive": (
        AdaClipDPOptimizer,
        2.0,
        ADAPTIVE,
        (NOISE_MULTIPLIER**-2 - (2 * 2.0) ** -2) ** -0.5 * 2.0,
    ),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def optimizer_of(name, dtype=torch.float32, **arguments):
    kind, max_grad_norm, extra, _ = OPTIMIZERS[name]
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad_sample = None
    return kind(
        torch.optim.SGD(parameters, lr=0.0),
        noise_multiplier=arguments.pop("noise_multiplier", NOISE_MULTIPLIER),
        max_grad_norm=max_grad_norm,
        expected_batch_size=None,
        loss_reduction="sum",
        **extra,
        **arguments,
    )


def released(optimizer):
    """The gradients of a step without samples' gradients, which is noise alone."""
    for parameter in optimizer.params:
        parameter.grad_sample = parameter.new_zeros(1, *parameter.shape)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    noise = [p.grad.clone() for p in optimizer.params]
    optimizer.zero_grad()
    return noise


@every_optimizer
def test_secure_noise_has_the_standard_deviation_of_the_optimizer(name, monkeypatch):
    """Five standard errors: a false alarm in 2e6 runs, were the keys not fixed."""
    keys = iter(range(100))
    monkeypatch.setattr(integration, "master_key", lambda: bytes([next(keys)]) * 32)
    optimizer = integration.use_secure_noise(optimizer_of(name))
    noise = torch.cat([g.flatten() for _ in range(3) for g in released(optimizer)])
    expected = OPTIMIZERS[name][3]
    assert noise.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * noise.numel()))
    assert abs(noise.mean().item()) < 5 * expected / math.sqrt(noise.numel())


@every_optimizer
def test_no_two_steps_or_parameters_or_optimizers_share_noise(name):
    first, second = (integration.use_secure_noise(optimizer_of(name)) for _ in range(2))
    rows = []
    for optimizer in (first, second, first):
        torch.manual_seed(0)
        weight, bias = released(optimizer)
        rows += [weight[0], weight[1], bias]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            assert (
                not (row == other).any()
                and torch.corrcoef(torch.stack([row, other]))[0, 1].abs() < 0.4
            )


@every_optimizer
def test_a_release_is_the_sum_on_the_grid_plus_integers_rounded_once(name, monkeypatch):
    monkeypatch.setattr(integration, "master_key", lambda: bytes(32))
    optimizer = integration.use_secure_noise(optimizer_of(name))
    torch.manual_seed(0)
    for parameter in optimizer.params:
        parameter.grad_sample = torch.randn(3, *parameter.shape)
        parameter.grad = torch.randn_like(parameter)
    sums = []
    optimizer.attach_step_hook(lambda o: sums.extend(p.summed_grad.clone() for p in o.params))
    optimizer.step()
    std = math.nextafter(OPTIMIZERS[name][3], math.inf)
    for number, (parameter, total) in enumerate(zip(optimizer.params, sums, strict=True)):
        stream = NoiseStream(
            std=std, grid=grid_of(std), key=bytes(32), step=0, parameter_id=number
        )
        assert total.any() and torch.equal(parameter.grad, stream.add_to_(total))


def test_noise_goes_on_differently_after_loading_a_state():
    optimizer = integration.use_secure_noise(optimizer_of("flat"))
    state = copy.deepcopy(optimizer.state_dict())
    first = released(optimizer)
    optimizer.load_state_dict(state)
    assert not (released(optimizer)[0] == first[0]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_parameters_of_other_dtypes_get_noise_of_theirs(dtype):
    noise = released(integration.use_secure_noise(optimizer_of("ghost", dtype)))[0]
    assert noise.dtype == dtype
    assert noise.float().std().item() == pytest.approx(1.5, rel=0.05)


def test_without_noise_the_clipped_sums_are_released():
    optimizer = integration.use_secure_noise(optimizer_of("flat", noise_multiplier=0.0))
    assert not any(g.any() for g in released(optimizer))


def test_securing_twice_is_securing_once_and_the_class_stays_opacus_own():
    optimizer = optimizer_of("ghost")
    assert integration.use_secure_noise(optimizer) is optimizer
    kind = type(optimizer)
    assert integration.use_secure_noise(optimizer) is optimizer and type(optimizer) is kind
    assert isinstance(optimizer, DPOptimizerFastGradientClipping)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_accounting_of_opacus_is_untouched_also_with_split_batches(mode):
    x, y = torch.randn(16, 12), torch.arange(16) % 5
    model = mlp()
    engine = opacus.PrivacyEngine(accountant="rdp")
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        poisson_sampling=False,
    )
    wrapped, optimizer, loader = parts[0], parts[1], parts[-1]
    criterion = parts[2] if mode == "ghost" else nn.CrossEntropyLoss()
    integration.use_secure_noise(optimizer)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
    ) as split:
        for features, labels in split:
            optimizer.zero_grad()
            criterion(wrapped(features), labels).backward()
            optimizer.step()
    assert engine.accountant.history == [(1.0, 0.5, 2)]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_what_cannot_be_secured_is_refused_by_name():
    with pytest.raises(ValueError, match="optimizer is of type SGD: expected one of Opacus"):
        integration.use_secure_noise(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    with pytest.raises(ValueError, match="optimizer.secure_mode=True"):
        integration.use_secure_noise(optimizer_of("flat", secure_mode=True))
    with pytest.raises(ValueError, match="noise_generator"):
        integration.use_secure_noise(optimizer_of("flat", generator=torch.Generator()))


def test_optimizers_for_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    from opacus.optimizers import (
        DistributedDPOptimizer,
        DistributedDPOptimizerFastGradientClipping,
        FSDPOptimizerFastGradientClipping,
        SimpleDistributedPerLayerOptimizer,
    )

    for kind in (
        DistributedDPOptimizer,
        DistributedDPOptimizerFastGradientClipping,
        FSDPOptimizerFastGradientClipping,
        SimpleDistributedPerLayerOptimizer,
    ):
        optimizer = kind(
            torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1),
            noise_multiplier=1.0,
            max_grad_norm=[1.0] if kind is SimpleDistributedPerLayerOptimizer else 1.0,
            expected_batch_size=4,
        )
        with pytest.raises(ValueError, match=f"{kind.__name__}: secure noise is for one process"):
            integration.use_secure_noise(optimizer)


def test_a_generator_set_later_releases_nothing():
    optimizer = integration.use_secure_noise(optimizer_of("flat"))
    optimizer.generator = torch.Generator()
    with pytest.raises(RuntimeError, match="generator"):
        released(optimizer)
    assert all(p.grad is None for p in optimizer.params)


def test_noise_that_is_drawn_otherwise_is_not_released():
    class Own(DPOptimizer):
        def add_noise(self):
            for p in self.params:
                p.grad = p.summed_grad + torch.randn_like(p)

    optimizer = optimizer_of("flat")
    optimizer.__class__ = Own
    integration.use_secure_noise(optimizer)
    with pytest.raises(RuntimeError, match="add_noise of Own drew 0 secure numbers for 60300"):
        released(optimizer)
    assert all(p.grad is None for p in optimizer.params)


def test_an_adaptive_ghost_engine_whose_quantile_is_noised_elsewhere_is_refused():
    optimizer = integration.use_secure_noise(optimizer_of("ghost"))
    optimizer._adjusted_noise_multiplier = 1.0
    with pytest.raises(RuntimeError, match="PrivacyEngineAdaptiveClipping"):
        released(optimizer)
    assert all(p.grad is None for p in optimizer.params)


@pytest.mark.gpu
@pytest.mark.usefixtures("registered")
@every_case
def test_norms_on_a_gpu_are_those_of_the_loop(model, x):
    norms = ghost_norms(copy.deepcopy(model).cuda(), x.cuda())
    torch.testing.assert_close(norms.double().cpu(), loop_norms(model, x), rtol=1e-4, atol=0)


def test_an_optimizer_of_opacus_is_refused_and_names_the_one_to_pass():
    model = nn.Linear(3, 2)
    theirs = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=4,
    )
    with pytest.raises(ValueError, match="of Opacus.*pass its original_optimizer"):
        dpflash.PrivacyEngine().make_private(
            module=model,
            optimizer=theirs,
            data_loader=DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=4),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
