"""Without noise, every mode of clipping gives what a loop over single samples gives."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dpflash
from dpflash.attn import rotary
from dpflash.clipping import compiling
from dpflash.nn import LongContextLM

try:
    import opacus
    from opacus.optimizers import DPOptimizer
    from opacus.schedulers import ExponentialGradClip, ExponentialNoise
    from opacus.utils.batch_memory_manager import BatchMemoryManager
except ImportError:
    opacus = None
try:
    import transformers
except ImportError:
    transformers = None

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
needs_opacus = pytest.mark.skipif(opacus is None, reason="needs Opacus")
needs_transformers = pytest.mark.skipif(transformers is None, reason="needs transformers")

GRAD_SAMPLE_MODES = ("instantiate", "book_keeping", "ghost")
KINDS = [{"grad_sample_mode": mode} for mode in GRAD_SAMPLE_MODES] + [{"clipping": "per_layer"}]
every_way = pytest.mark.parametrize("mode", GRAD_SAMPLE_MODES)
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=[k.get("grad_sample_mode", k.get("clipping")) for k in KINDS]
)
# Factors are rounded down by 2^-22 and kept in fp32. Measured: 2.4e-7.
EXACT = 1e-6
# The same models in fp32. Measured: 3.1e-7.
FP32 = 2e-6


def language_model():
    return LongContextLM(23, 16, 2, 2, max_seq_len=16)


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=23,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank trainable adapter."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class AdaptedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 8).requires_grad_(False)
        self.hidden = Adapted(nn.Linear(8, 12))
        self.norm = nn.LayerNorm(12)
        self.norm.weight.requires_grad_(False)
        self.head = Adapted(nn.Linear(12, 23))

    def forward(self, tokens):
        return self.head(self.norm(torch.tanh(self.hidden(self.embedding(tokens)))))


def tokens(batch=5, length=9, vocabulary=23):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocabulary, (batch, length), generator=generator)


def scaled(loss, factor):
    return lambda *arguments: factor * loss(*arguments)


def middle(norms):
    """A bound that some norms exceed and others do not."""
    ordered = sorted(norms)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


MODELS = {
    "language_model": language_model,
    "adapters": AdaptedLM,
    "gpt2": pytest.param(gpt2, marks=needs_transformers),
    "llama": pytest.param(llama, marks=needs_transformers),
}
every_model = pytest.mark.parametrize("build", list(MODELS.values()), ids=list(MODELS))


@pytest.fixture
def agree(oracle, private, sums, distance):
    """agree(model, loss, *batch, ...): dpflash's clipped sum against the loop's."""

    def check(model, loss, *batch, tolerance=EXACT, bound=None, dtype=torch.float64, **kind):
        reference = oracle(model, loss, *batch)
        clipping = kind.get("clipping", "flat")
        bound = bound or middle(reference.norms())
        model = copy.deepcopy(model).to(dtype)
        batch = [t.to(dtype) if t.is_floating_point() else t for t in batch]
        engine, model, _, _ = private(model, max_grad_norm=bound, **kind)
        engine.backward(loss(model, *batch))
        found = sums(engine, model)
        assert distance(found, reference.clipped_sum(bound, clipping)) <= tolerance
        return found

    return check


@every_model
@every_kind
def test_the_clipped_sum_is_that_of_a_float64_loop(build, kind, agree, next_token_loss):
    torch.manual_seed(0)
    loss = scaled(next_token_loss, 10.0)
    model = build()
    agree(model, loss, tokens(), **kind)
    agree(model, loss, tokens(), dtype=torch.float32, tolerance=FP32, **kind)


@needs_opacus
@every_model
@every_way
def test_the_clipped_sum_is_that_of_opacus(
    build, mode, oracle, private, sums, distance, next_token_loss
):
    torch.manual_seed(0)
    model = build().double()
    batch = tokens()
    loss = scaled(next_token_loss, 50.0)
    bound = middle(oracle(model, loss, batch).norms())
    theirs = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")

    def logits(ids):
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            return theirs(ids)
        # Opacus wants the batch first in position ids too.
        return theirs(ids, position_ids=torch.arange(ids.shape[1]).expand(*ids.shape)).logits

    loss(logits, batch).sum().backward()
    optimizer = DPOptimizer(
        torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
        loss_reduction="sum",
    )
    optimizer.clip_and_accumulate()
    expected = {
        n.removeprefix("_module."): p.summed_grad
        for n, p in theirs.named_parameters()
        if p.requires_grad
    }
    engine, model, _, _ = private(model, max_grad_norm=bound, grad_sample_mode=mode)
    engine.backward(loss(model, batch))
    assert distance(sums(engine, model), expected) <= EXACT


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("batch", [1, 7])
@every_kind
def test_an_mlp_agrees_in_odd_sizes_for_one_token_and_for_one_sample(length, batch, kind, agree):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    x = torch.randn(batch, length, 5)
    y = torch.randn(batch, length, 3)
    agree(model, lambda m, x, y: 10 * dpflash.losses.mse(m(x), y), x, y, **kind)


@pytest.mark.parametrize("shape", [(4, 5), (4, 2, 3, 5)], ids=["2-D", "4-D"])
@every_kind
def test_linear_inputs_of_two_and_four_dimensions_agree(shape, kind, agree):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6, bias=False), nn.Linear(6, 2))
    x = torch.randn(shape)
    agree(model, lambda m, x: 9 * m(x).square().flatten(1).mean(1), x, **kind)


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(23, 4), nn.LayerNorm(4)
        self.linear = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.linear(input=self.norm(input=self.embedding(input=tokens)))


@every_kind
def test_layers_called_by_keyword_agree(kind, agree):
    torch.manual_seed(0)
    agree(ByKeyword(), lambda m, t: 9 * m(tokens=t).square().mean((1, 2)), tokens(), **kind)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=2)
        self.head = nn.Linear(4, 9)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


@every_kind
def test_the_row_of_padding_idx_gets_no_gradient_and_counts_in_no_norm(
    kind, agree, next_token_loss
):
    torch.manual_seed(0)
    batch = tokens(6, 8, 9)
    batch[:, ::2] = 2
    found = agree(Padded(), scaled(next_token_loss, 10.0), batch, **kind)
    assert not found["embedding.weight"][2].any()


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)

    def forward(self, x):
        return self.layer(self.norm(torch.tanh(self.layer(self.norm(x)))))


@every_kind
def test_a_module_called_twice_has_the_norm_of_its_summed_gradient(kind, agree):
    torch.manual_seed(0)
    agree(Twice(), lambda m, x: 9 * m(x).square().mean((1, 2)), torch.randn(4, 3, 5), **kind)


@pytest.mark.parametrize("dominant", ["embedding", "head", "equal"])
@every_kind
def test_tied_weights_are_clipped_by_the_norm_of_their_sum_whichever_use_dominates(
    dominant, kind, agree
):
    """The two gradients are parallel, so that without the cross term the norm is too small."""
    embed, head = {"embedding": (100, 1), "head": (1, 100), "equal": (30, 30)}[dominant]

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(3, 4)
            self.head = nn.Linear(4, 3, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens, x):
            return embed * (self.embedding(tokens) * x).sum((1, 2)) + head * self.head(x)[
                ..., 0
            ].sum(1)

    torch.manual_seed(0)
    batch = torch.zeros(3, 2, dtype=torch.int64)
    agree(Tied(), lambda m, t, x: m(t, x), batch, torch.rand(3, 2, 4), **kind)


class Scale(nn.Module):
    """A leaf layer with no rule of its own."""

    def __init__(self, features):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(features))
        self.power = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * x.abs().pow(self.power)


def with_convolution():
    return nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), Scale(7), nn.Tanh())


@every_kind
def test_layers_without_a_rule_of_their_own_agree(kind, agree):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 7)
    agree(with_convolution(), lambda m, x: 9 * m(x).square().mean((1, 2)), x, **kind)


class Borrowed(nn.Module):
    """A leaf layer whose weight is that of a linear layer."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight.t()


class LinearAndBorrowed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.leaf = Borrowed(self.layer.weight)

    def forward(self, x):
        return self.layer(x) + self.leaf(x)


@every_kind
def test_a_weight_tied_between_a_linear_layer_and_a_layer_without_a_rule_agrees(kind, agree):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 4)
    agree(LinearAndBorrowed(), lambda m, x: 9 * m(x).square().mean((1, 2)), x, **kind)


def test_rms_norm_agrees(agree):
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(5), nn.Linear(5, 3), nn.RMSNorm(3, eps=1e-3))
    agree(model, lambda m, x: 9 * m(x).pow(3).mean((1, 2)), torch.randn(4, 3, 5))


@every_kind
def test_an_infinite_bound_gives_the_ordinary_gradient(
    kind, private, sums, distance, next_token_loss
):
    torch.manual_seed(0)
    plain = language_model().double()
    next_token_loss(plain, tokens()).sum().backward()
    expected = {n: p.grad.clone() for n, p in plain.named_parameters()}
    engine, model, _, _ = private(copy.deepcopy(plain), max_grad_norm=math.inf, **kind)
    engine.backward(next_token_loss(model, tokens()))
    assert distance(sums(engine, model), expected) <= 1e-12


class Checkpointed(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))
        self.options = options

    def forward(self, x):
        return checkpoint(self.block, self.first(x), **self.options)


def _selective(which):
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, which)}


@pytest.mark.parametrize(
    "selective",
    [
        {},
        _selective([torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
        _selective(lambda ctx, op, *args, **kwargs: op is torch.ops.aten.tanh.default),
    ],
    ids=["nothing-saved", "products-saved", "by-policy"],
)
@every_kind
def test_non_reentrant_checkpointing_agrees(kind, selective, agree):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5)
    agree(
        Checkpointed(use_reentrant=False, **selective),
        lambda m, x: 9 * m(x).square().mean((1, 2)),
        x,
        **kind,
    )


class Turned(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.attention = dpflash.nn.MultiheadAttention(8, 2, rotary=True, self_attention=True)
        self.options = options

    def forward(self, x):
        return checkpoint(lambda x: self.attention(x, x, x)[0], self.first(x), **self.options)


@pytest.mark.parametrize("saved", ["mm", "mul"])
def test_rotary_attention_agrees_in_a_selective_checkpoint(saved, agree):
    """Whether its angles are new or known."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    which = products if saved == "mm" else [torch.ops.aten.mul.Tensor]
    torch.manual_seed(0)
    rotary._of_first.__wrapped__.cache_clear()
    model, x = Turned(use_reentrant=False, **_selective(which)), torch.randn(4, 3, 5)
    plain = copy.deepcopy(model)
    plain.options = {"use_reentrant": False}
    for one in (model, plain):
        one(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    if saved == "mm":
        agree(model.requires_grad_(), lambda m, x: 9 * m(x).square().mean((1, 2)), x)


@every_kind
def test_the_library_model_agrees_with_activation_checkpointing(kind, agree, next_token_loss):
    torch.manual_seed(0)
    model = LongContextLM(
        23, 8, 2, 2, max_seq_len=9, activation_checkpointing=True, norm="rms_norm"
    )
    agree(model, scaled(next_token_loss, 10.0), tokens(), **kind)


@every_kind
def test_reentrant_checkpointing_is_refused(kind, private):
    engine, model, _, _ = private(Checkpointed(use_reentrant=True), **kind)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        engine.backward(model(torch.randn(4, 3, 5)).sum((1, 2)))


@pytest.mark.cases(0)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_compiled_model_agrees_with_an_eager_one(
    clipping, positions, private, sums, distance, next_token_loss
):
    torch.manual_seed(0)
    torch.compiler.reset()
    plain = LongContextLM(23, 8, 1, 2, max_seq_len=9, positions=positions)
    batch = tokens()
    found = []
    for compiled in (False, True):
        engine, model, _, _ = private(copy.deepcopy(plain), max_grad_norm=0.2, clipping=clipping)
        called = model
        if compiled:
            called = torch.compile(model, fullgraph=True, backend="aot_eager")
            engine.prepare(batch.shape[0])
        engine.backward(next_token_loss(called, batch))
        found.append(sums(engine, model))
    assert distance(found[1], found[0]) <= 2e-6


def test_a_compiled_model_trains_in_the_ordinary_loop(private, next_token_loss, monkeypatch):
    torch.manual_seed(0)
    torch.compiler.reset()
    # As the first one that a process compiles, whose handles do not exist yet.
    monkeypatch.setattr(compiling, "_has_begun", False)
    plain = LongContextLM(23, 8, 1, 2, max_seq_len=9)
    weights = []
    for compiled in (False, True):
        engine, model, optimizer, loader = private(copy.deepcopy(plain), tokens(12))
        called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for (batch,) in loader:
            optimizer.zero_grad()
            engine.backward(next_token_loss(called, batch))
            optimizer.step()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-7)


@every_kind
def test_physical_batches_add_up_to_one_big_batch(kind, private, distance, next_token_loss):
    torch.manual_seed(0)
    plain = language_model().double()
    found = []
    parts = []
    for options in ({"one_part": True}, {"physical_batch_size": 3}):
        engine, model, optimizer, loader = private(
            copy.deepcopy(plain),
            tokens(24),
            batch_size=12,
            max_grad_norm=0.2,
            verify_first_batch=False,
            **options,
            **kind,
        )
        parts.append(0)
        for (batch,) in loader:
            optimizer.zero_grad()
            engine.backward(next_token_loss(model, batch))
            optimizer.step()
            parts[-1] += 1
            if optimizer.releases == 1:
                break
        found.append({n: p.grad for n, p in model.named_parameters()})
    assert parts[0] == 1 and parts[1] > 3
    assert distance(found[1], found[0]) <= 1e-12


@needs_opacus
def test_batch_memory_manager_makes_the_steps_of_the_plain_loader(private, distance):
    torch.manual_seed(0)
    plain = nn.Linear(4, 2).double()
    x, y = torch.randn(24, 4).double(), torch.randn(24, 2).double()
    found, releases = [], []
    for managed in (False, True):
        engine, model, optimizer, loader = private(
            copy.deepcopy(plain), x, y, batch_size=8, noise_multiplier=0.5
        )
        if managed:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
            ) as small:
                for a, b in small:
                    assert len(a) <= 3
                    optimizer.zero_grad()
                    engine.backward(dpflash.losses.mse(model(a), b))
                    optimizer.step()
        else:
            for a, b in loader:
                optimizer.zero_grad()
                engine.backward(dpflash.losses.mse(model(a), b))
                optimizer.step()
        found.append({n: p.detach() for n, p in model.named_parameters()})
        releases.append(engine.accountant.history)
    assert distance(found[1], found[0]) <= 1e-12
    assert releases[0] == releases[1] == [(0.5, 8 / 24, 3)]


@needs_opacus
def test_opacus_schedulers_change_noise_and_bound_of_the_coming_releases(private):
    engine, model, optimizer, loader = private(
        nn.Linear(4, 2), torch.randn(16, 4), noise_multiplier=2.0, max_grad_norm=1.0
    )
    noise = ExponentialNoise(optimizer, gamma=0.5)
    bound = ExponentialGradClip(optimizer, gamma=0.25)
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(dpflash.losses.mse(model(x), torch.zeros(len(x), 2)))
        optimizer.step()
        if loader.is_last:
            noise.step()
            bound.step()
    assert optimizer.max_grad_norm == 0.25**4
    assert engine.accountant.history == [(2.0 * 0.5**k, 0.25, 1) for k in range(4)]


def test_a_learning_rate_scheduler_drives_the_wrapped_optimizer(private):
    engine, model, optimizer, loader = private(nn.Linear(4, 2), torch.randn(16, 4), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for (x,) in loader:
        optimizer.zero_grad()
        engine.backward(dpflash.losses.mse(model(x), torch.zeros(len(x), 2)))
        before = model.weight.detach().clone()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        if loader.is_last:
            torch.testing.assert_close(model.weight, before - rate * model.weight.grad)
            scheduler.step()
    assert optimizer.original_optimizer.param_groups[0]["lr"] == 0.5**4


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scalar", [True, False], ids=["scalar", "losses"])
def test_loss_backward_with_a_declared_reduction_gives_the_clipped_sum(
    reduction, scalar, oracle, private, sums, distance
):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    x, y = torch.randn(6, 4).double(), torch.randn(6, 1).double()

    def loss(m, x, y):
        return 10 * (m(x) - y).square().squeeze(1)

    reference = oracle(plain, loss, x, y)
    bound = middle(reference.norms())
    engine, model, _, _ = private(
        copy.deepcopy(plain), max_grad_norm=bound, loss_reduction=reduction
    )
    losses = loss(model, x, y)
    if scalar:
        getattr(losses, reduction)().backward()
    else:
        engine.backward(losses)
    assert distance(sums(engine, model), reference.clipped_sum(bound)) <= EXACT


@needs_opacus
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_step_with_a_declared_reduction_is_that_of_opacus(reduction, private, distance):
    torch.manual_seed(0)
    plain = nn.Linear(4, 1).double()
    x, y = torch.randn(6, 4).double() * 10, torch.randn(6, 1).double() * 10
    theirs = opacus.GradSampleModule(copy.deepcopy(plain), loss_reduction=reduction)
    optimizer = DPOptimizer(
        torch.optim.SGD(theirs.parameters(), lr=0.1),
        noise_multiplier=0.0,
        max_grad_norm=20.0,
        expected_batch_size=4,
        loss_reduction=reduction,
    )
    F.mse_loss(theirs(x), y, reduction=reduction).backward()
    optimizer.step()
    engine, model, mine, _ = private(plain, max_grad_norm=20.0, loss_reduction=reduction)
    F.mse_loss(model(x), y, reduction=reduction).backward()
    mine.step()
    expected = {n.removeprefix("_module."): p.detach() for n, p in theirs.named_parameters()}
    assert distance({n: p.detach() for n, p in model.named_parameters()}, expected) <= EXACT


@every_way
def test_an_input_gradient_taken_before_leaves_nothing_in_the_clipped_sum(mode, agree):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def loss(m, x):
        x = x.detach().requires_grad_()
        losses = 10 * m(x).square().mean((1, 2))
        torch.autograd.grad(losses.sum(), x, retain_graph=True)
        return losses

    agree(model, loss, torch.randn(5, 3, 4), grad_sample_mode=mode)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_private_rms_norm_has_torchs_own_eps(dtype, private):
    x = 0.01 * torch.randn(4, 8).to(getattr(torch, dtype))
    model = nn.RMSNorm(8, dtype=x.dtype)
    expected = model(x).detach()
    _, model, _, _ = private(model, x)
    found = model(x)
    assert "_RMSNorm" in type(found.grad_fn).__name__
    tolerance = 2 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(found.detach(), expected, rtol=tolerance, atol=0)
