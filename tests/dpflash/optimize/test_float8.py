"""fp8=True: no sample rounds another, gradients are those of what clipping sees, casts are few."""

import copy
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import dpflash
from dpflash.grad_rules import PrivateModule, linear
from dpflash.grad_rules import float8 as casting
from dpflash.kernels import float8 as kernel
from dpflash.kernels import scaled_rows
from dpflash.nn import LongContextLM
from dpflash.optimize import float8 as choosing
from dpflash.optimize import wrapper

WIDTH, BATCH, TOKENS = 64, 6, 5
OUTLIER = 2
OTHERS = [i for i in range(BATCH) if i != OUTLIER]
RELATIVE = 1 + 1e-6


def model_of(layers=3):
    torch.manual_seed(0)
    blocks = [m for _ in range(layers - 1) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def batch_of(outlier=1e4):
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    x[OUTLIER] *= outlier
    return x


def loss(model, x, weights=None):
    losses = model(x).square().flatten(1).mean(1)
    return losses if weights is None else losses * weights


def make(private, model=None, data=(), **options):
    options = {"fp8": True, "verify_first_batch": False} | options
    return private(model or model_of(), *data, **options)


def run(engine, model, optimizer, loader, loss=loss):
    """Three epochs; returns the number of microbatches."""
    count = 0
    for (x,) in itertools.chain(loader, loader, loader):
        engine.backward(loss(model, x))
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    return count


def per_tensor(monkeypatch):
    """Scales over all tokens of the batch, as fp8=True must not have them."""
    monkeypatch.setattr(kernel, "_greatest", lambda x: x.abs().amax().expand(len(x), 1))


def seen_by_others(model, outlier):
    """Outputs of the other samples, and the gradients that reach their inputs."""
    x = batch_of(outlier).requires_grad_()
    weights = torch.ones(BATCH)
    weights[OUTLIER] = outlier
    outputs = model(x)
    (grad,) = torch.autograd.grad((outputs.square().flatten(1).mean(1) * weights).sum(), x)
    return torch.cat([outputs[OTHERS].flatten(1), grad[OTHERS].flatten(1)], 1)


@pytest.mark.cases(0)
@pytest.mark.parametrize("level", ["conservative", "balanced"])
@pytest.mark.parametrize("couples", [False, True])
def test_a_batch_mate_of_1e4_changes_bits_under_per_tensor_scales_alone(
    couples, level, private, monkeypatch
):
    if couples:
        per_tensor(monkeypatch)
    _, model, _, _ = make(private, optimize=level)
    assert torch.equal(seen_by_others(model, 1.0), seen_by_others(model, 1e4)) != couples


@pytest.mark.parametrize("couples", [False, True])
def test_trials_refuse_scales_over_the_batch(couples, private, monkeypatch):
    if couples:
        per_tensor(monkeypatch)
    data = batch_of().repeat(4, 1, 1) * torch.logspace(0, 6, 4 * BATCH)[:, None, None]
    options = {"batch_size": BATCH, "verify_first_batch": True}
    engine, model, optimizer, loader = make(private, data=(data,), **options)
    if couples:
        with pytest.raises(dpflash.PrivateRefusal, match=r"input of layer '2' changed"):
            run(engine, model, optimizer, loader)
    else:
        run(engine, model, optimizer, loader)
        assert engine.verified is True


@pytest.mark.parametrize("couples", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"grad_sample_mode": "ghost"}, {"clipping": "per_layer"}, {"optimize": "balanced"}],
    ids=str,
)
def test_invariant_1_a_sample_moves_the_sum_by_at_most_the_bound(
    options, couples, private, sums, monkeypatch
):
    """With its slot filled and empty, in the arithmetic used."""
    if couples:
        per_tensor(monkeypatch)
    found = []
    for is_there in (True, False):
        x, weights = batch_of(), torch.full((BATCH,), 1e3)
        if not is_there:
            x[OUTLIER], weights[OUTLIER] = 0, 0
        engine, model, _, _ = make(private, **options)
        engine.backward(loss(model, x, weights))
        found.append(torch.cat([t.double().flatten() for t in sums(engine, model).values()]))
    moved = float((found[0] - found[1]).norm())
    assert 0.5 < moved
    assert (moved <= RELATIVE) != couples


def test_norms_are_those_of_each_sample_alone_in_float64(private, monkeypatch):
    """Of the inputs and output gradients that layers got, which are rounded in products alone."""
    seen, uses = [], []
    product, taken = linear.scaled_product, linear.taken

    def noted(a, b):
        seen.append((a.detach().flatten(0, -2), b, product(a, b).detach().flatten(0, -2)))
        return product(a, b)

    def noted_use(slot, x, dy, **options):
        uses.append((x.double(), dy.double()))
        return taken(slot, x, dy, **options)

    monkeypatch.setattr(linear, "scaled_product", noted)
    monkeypatch.setattr(linear, "taken", noted_use)
    engine, model, _, _ = make(private)
    engine.backward(loss(model, batch_of(1.0)))
    assert len(seen) == 3  # two forwards, and one gradient of an input
    for given, cast, found in seen:
        rows = scaled_rows(given)
        wanted = (rows.values.double() * rows.scales) @ (cast.values.double() * cast.scales).T
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
    assert len(uses) == 3
    loop = [
        sum((dy[i].T @ x[i]).square().sum() + dy[i].sum(0).square().sum() for x, dy in uses).sqrt()
        for i in range(BATCH)
    ]
    norms = engine.diagnostics()["per_sample_norms"].double()
    assert torch.allclose(norms, torch.stack(loop), rtol=1e-5)


class WritesData(torch.optim.SGD):
    """Writes to `.data`, which torch's version counter does not see."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, WritesData])
def test_weights_are_cast_once_a_release(kind, private, monkeypatch):
    casts = []

    def counted(x):
        casts.append(x.shape)
        return scaled_rows(x)

    monkeypatch.setattr(casting, "scaled_rows", counted)
    model = model_of()
    model[0].requires_grad_(False)
    data = batch_of(1.0).repeat(2, 1, 1)
    options = {"batch_size": 6, "physical_batch_size": 3, "kind": kind, "lr": 5.0}
    engine, model, optimizer, loader = make(private, model, data=(data,), **options)
    microbatches = run(engine, model, optimizer, loader)
    assert microbatches > optimizer.releases > 1
    # Two directions of a frozen layer and of a trained one, in each logical batch.
    assert len(casts) == 4 * optimizer.releases
    with torch.inference_mode():
        before = model(data)
    assert len(casts) == 4 * optimizer.releases + 4
    assert torch.equal(before, model(data))
    for layer in (0, 2):  # as an average of weights, or a merged adapter, is put in
        model[layer].weight.data.mul_(2)
        after = model(data)
        assert not torch.equal(before, after)
        before = after


def test_an_evaluation_keeps_no_casts_for_the_training_behind_it(private, monkeypatch):
    casts = []
    monkeypatch.setattr(casting, "scaled_rows", lambda x: casts.append(0) or scaled_rows(x))
    data = batch_of(1.0).repeat(2, 1, 1)
    options = {"batch_size": 6, "kind": WritesData, "lr": 5.0}
    engine, model, optimizer, loader = make(private, data=(data,), **options)
    optimizer.original_optimizer.register_step_pre_hook(lambda *_: [model(data)] and None)
    run(engine, model, optimizer, loader)
    assert len(casts) == 2 * 4 * optimizer.releases  # before the step, and behind it


def test_a_sample_that_is_not_finite_stays_in_its_rows(private, sums):
    found = []
    for value in (0.0, torch.nan, torch.inf):
        engine, model, _, _ = make(private)
        x = batch_of(1.0)
        x[OUTLIER, 1] = value
        weights = torch.ones(BATCH)
        weights[OUTLIER] = float(value != 0.0)
        engine.backward(loss(model, x, weights))
        found.append(torch.cat([t.flatten() for t in sums(engine, model).values()]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exact": True},
        {"optimize": "none"},
        {"clipping": "per_layer"},
        {"grad_sample_mode": "book_keeping"},
        {"optimize": "balanced", "grad_sample_mode": "ghost"},
        {"checkpoints": True},
    ],
    ids=str,
)
def test_training_passes_its_trials(options, private):
    model = model_of()
    if options.pop("checkpoints", False):
        model = Checkpointed(*model)
    data = batch_of(1.0).repeat(4, 1, 1)
    options = {"foreign_batches": False, "verify_first_batch": True, **options}
    engine, model, optimizer, loader = make(private, model, data=(data,), **options)
    run(engine, model, optimizer, loader)
    assert engine.verified is True


@pytest.mark.cases(0)
def test_a_compiled_forward_casts_the_weights_of_the_last_release(private, monkeypatch):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(wrapper, "_BACKEND", counter)
    data = batch_of(1.0).repeat(2, 1, 1)
    options = {"optimize": "aggressive", "lr": 5.0}
    engine, model, optimizer, loader = make(private, data=(data,), **options)
    for (x,) in itertools.chain(loader, loader):
        outputs = model(x)
        with torch.no_grad():
            assert torch.allclose(outputs, model(x), rtol=1e-2, atol=1e-2)
        engine.backward(outputs.square().flatten(1).mean(1))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.optimization.compiled
    # The first batch's sizes are not marked as dynamic.
    assert counter.frame_count <= 2 < optimizer.releases


def test_the_base_of_lora_and_conv1d_multiply_in_float8(private, next_token_loss):
    peft, transformers = (pytest.importorskip(name) for name in ("peft", "transformers"))
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 64, "n_layer": 1, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropout))
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = peft.get_peft_model(model, config)
    tokens = torch.randint(0, 32, (16, 9))
    engine, model, optimizer, loader = make(
        private, model, data=(tokens,), verify_first_batch=True, foreign_batches=False
    )
    assert len(engine.optimization.float8) == 4  # c_attn, c_proj twice, c_fc
    assert not any("lora" in name for name in engine.optimization.float8)
    run(engine, model, optimizer, loader, next_token_loss)
    assert engine.verified is True
    base = model.get_submodule(next(n for n in engine.optimization.float8 if "c_fc" in n))
    x = torch.randn(2, 64)
    assert not torch.equal(base(x), copy.deepcopy(base)(x))
    assert torch.allclose(base(x), copy.deepcopy(base)(x), atol=0.2)


def test_casts_stay_with_the_engine(private):
    plain = model_of()
    keys = list(plain.state_dict())
    engine, model, _, _ = make(private, plain)
    model(batch_of(1.0))
    assert list(model.state_dict()) == keys
    held = weakref.ref(model[0]._dpflash.float8)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(isinstance(m, PrivateModule) for m in copied.modules())
        assert list(copied.state_dict()) == keys
    with engine.public_data():
        wide = model(batch_of(1.0))
    assert not torch.equal(wide, model(batch_of(1.0)))
    engine.detach(model)
    gc.collect()
    assert held() is None
    assert torch.equal(wide, model(batch_of(1.0)))


def test_layers_are_left_out_by_name_and_reason(private):
    torch.manual_seed(0)
    model = LongContextLM(32, 64, 1, 2, max_seq_len=8, mlp_ratio=1.5)
    engine, *_ = make(private, model)
    text = str(engine.optimization)
    assert "'lm_head', since it is the last linear layer" in text
    assert engine.optimization.float8 == {
        name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"
    }
    assert "float8 products" in engine.optimization.summary
    odd = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    engine, *_ = make(private, odd)
    assert engine.optimization.float8 == {"1"}
    assert "float8 in '0', since it is" in str(engine.optimization)


@pytest.mark.cases(0)
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fp8": "tensorwise"}, r"fp8='tensorwise': scales over tokens or over the batch"),
        ({"fp8": 2}, r"fp8=2: expected one of False, True"),
        ({"cuda_graph": True}, r"fp8=True with cuda_graph=True"),
        ({"loss_reduction": "mean"}, r"loss_reduction='mean' with fp8=True"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options, says, private):
    model = model_of()
    with pytest.raises(ValueError, match=says):
        make(private, model, **options)
    assert not any(isinstance(m, PrivateModule) for m in model.modules())


def test_models_that_cannot_have_it_are_refused(private, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"no linear layer .*'0' is 20 x 20: both sizes have to be multiples of 16",
    ):
        make(private, nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 4)))
    with pytest.raises(ValueError, match="has a weight of torch.float64"):
        make(private, model_of().double())
    monkeypatch.setattr(choosing, "is_sharded", lambda p: p.ndim == 2)
    with pytest.raises(ValueError, match=r"'0.weight' sharded by fully_shard"):
        make(private)
