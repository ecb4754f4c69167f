"""Ghost clipping sums in its second backward what its first one normed, or nothing."""

import copy
import random
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpflash.nn import LongContextLM
from dpflash.verification import digests
from dpflash.verification import two_backwards as twice

BOUND = 1.0


class Random(nn.Module):
    """A block that another of the modes to be random, or to keep state, stands around."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.kind = kind
        self.calls = 0

    def block(self, x):
        scale = random.choice([0.1, 1.0, 5.0]) if self.kind == "python's random" else 1.0
        h = torch.tanh(self.mix(self.first(x)) * scale)
        return nn.functional.dropout(h, 0.5) if self.kind == "no random state" else h

    def forward(self, x):
        if self.kind == "python's random":
            h = checkpoint(self.block, x, use_reentrant=False)
        elif self.kind == "no random state":
            h = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False)
        else:
            h = self.block(x)
        if self.kind == "random backward":
            h = _RandomBackward.apply(h)
        if self.kind == "hook with state" and h.requires_grad:
            h.register_hook(self.more)
        return self.last(h)

    def more(self, grad):
        self.calls += 1
        return grad * 3.0**self.calls


class _RandomBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad)


FINDINGS = ["python's random", "no random state", "random backward", "hook with state"]
# `memory_budget=1` is what makes the planner choose this mode.
CHOICES = {"asked for": {"grad_sample_mode": "ghost"}, "planned": {"memory_budget": 1}}
every_choice = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)


def data(size=12, seed=0):
    return 10 * torch.randn(size, 6, generator=torch.Generator().manual_seed(seed))


def losses_of(model, x):
    return model(x).square().sum(1)


def norm(sums):
    return float(torch.cat([t.double().flatten() for t in sums.values()]).norm())


@every_choice
@pytest.mark.parametrize("verify", [True, False], ids=["proven", "unproven"])
@pytest.mark.parametrize("kind", FINDINGS)
def test_two_backwards_that_differ_release_nothing(kind, verify, choice, private, sums):
    torch.manual_seed(0)
    random.seed(0)
    engine, model, optimizer, _ = private(
        Random(kind), max_grad_norm=BOUND, verify_first_batch=verify, **choice
    )
    with pytest.raises(RuntimeError, match="layer '(first|mix)'") as refused:
        # Draws may be alike by chance.
        for seed in range(6):
            engine.backward(losses_of(model, data(1, seed)))
            assert norm(sums(engine, model)) <= BOUND * (1 + 1e-6)
            optimizer.zero_grad()
            model.calls = 0
    assert "second backward of grad_sample_mode='ghost'" in str(refused.value) or verify
    assert engine._step.sums == {}
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", FINDINGS)
def test_after_a_difference_the_planner_takes_another_way(kind, private, sums):
    torch.manual_seed(0)
    random.seed(0)
    engine, model, optimizer, _ = private(
        Random(kind), max_grad_norm=BOUND, verify_first_batch=False, memory_budget=1
    )
    model(data())
    assert {use.grad_sample_mode for use in engine.plan()} == {"ghost"}
    with pytest.raises(twice.BackwardsDiffer):
        for seed in range(6):
            engine.backward(losses_of(model, data(seed=seed)))
            optimizer.zero_grad()
    model(data())
    assert "ghost" not in {use.grad_sample_mode for use in engine.plan()}
    for seed in range(6):
        model.calls = 0
        engine.backward(losses_of(model, data(1, seed)))
        assert 0 < norm(sums(engine, model)) <= BOUND * (1 + 1e-6)
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", FINDINGS)
def test_the_noise_of_a_last_microbatch_does_not_leave_where_backwards_differ(kind, private):
    torch.manual_seed(0)
    random.seed(0)
    model = Random(kind)
    engine, model, optimizer, loader = private(
        model, data(60), batch_size=20, grad_sample_mode="ghost", noise_multiplier=1.0, lr=1.0
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="nothing was released"):
        for _ in range(4):
            for (x,) in loader:
                model.calls = 0
                engine.backward(losses_of(model, x))
                optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.releases == len(engine.accountant.history) or engine._spending.is_empty


@every_choice
def test_a_use_that_only_one_backward_has_is_refused(choice, private):
    """As where a hook drops what comes to a layer in the second backward."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
            self.reach = []

        def forward(self, x):
            return self.last(_Sometimes.apply(self.first(x), self.reach))

    class _Sometimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, reach):
            ctx.reach = reach
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            ctx.reach.append(0)
            return (grad if len(ctx.reach) < 2 else None), None

    torch.manual_seed(0)
    engine, model, *_ = private(Sometimes(), verify_first_batch=False, **choice)
    with pytest.raises(twice.BackwardsDiffer, match="layer 'first'"):
        engine.backward(losses_of(model, data()))


class Norms(nn.Module):
    """Gradients that reach the handles, and those of a look-up and a tied head."""

    def __init__(self, scale):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 6, 1)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight
        self.scale = scale

    def forward(self, tokens):
        h = self.norm(self.table(tokens))
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        if self.scale is not None:
            h.register_hook(self.scale)
        return self.head(h)


@pytest.mark.parametrize("deterministic", [True, False], ids=["digests", "norms"])
@pytest.mark.parametrize("factor", [1.0, 1.01, 0.5, 4.0, float("nan")])
def test_every_kind_of_use_is_compared(factor, deterministic, private, monkeypatch, sums):
    if not deterministic:
        monkeypatch.setattr(twice, "is_deterministic", lambda device: False)
    passes = []

    def scaled(grad):
        passes.append(0)
        return grad * (factor if len(passes) % 2 == 0 else 1.0)

    torch.manual_seed(0)
    engine, model, *_ = private(Norms(scaled), grad_sample_mode="ghost", verify_first_batch=False)
    tokens = torch.randint(0, 9, (5, 7))
    losses = model(tokens).square().sum((1, 2))
    if factor == 1.0 or (factor == 0.5 and not deterministic):
        # Norms that are smaller than they may be are no harm.
        engine.backward(losses)
        assert 0 < norm(sums(engine, model)) <= 5 * (1 + 1e-6)
        return
    where = "layer 'table'" if deterministic else "the layers"
    with pytest.raises(twice.BackwardsDiffer, match=f"^{where} had other gradients"):
        engine.backward(losses)


def test_on_a_device_that_rounds_anew_each_sample_is_clipped_by_the_greatest_norm_it_may_have(
    private, monkeypatch, sums
):
    monkeypatch.setattr(twice, "is_deterministic", lambda device: False)
    passes = []

    def rounded(grad):
        passes.append(0)
        return grad * (1 + 2.0**-13 if len(passes) % 2 == 0 else 1.0)

    for seed in range(3):
        torch.manual_seed(seed)
        engine, model, *_ = private(
            Norms(rounded), grad_sample_mode="ghost", verify_first_batch=False
        )
        engine.backward(1e3 * model(torch.randint(0, 9, (1, 7))).square().sum((1, 2)))
        assert 0.999 <= norm(sums(engine, model)) <= 1.0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_language_model_trains_in_two_equal_backwards(chunked, private, sums, distance):
    found = []
    for mode in ("instantiate", "ghost"):
        torch.manual_seed(0)
        plain = LongContextLM(
            11, 8, 1, 2, max_seq_len=6, dropout=0.2, chunked_loss=chunked,
            activation_checkpointing=True,
        )  # fmt: skip
        engine, model, *_ = private(plain, grad_sample_mode=mode, verify_first_batch=False)
        tokens = torch.randint(0, 11, (6, 7))
        engine.backward(model(tokens[:, :-1], tokens[:, 1:]))
        found.append(sums(engine, model))
    assert distance(found[1], found[0]) <= 1e-5


def test_targets_and_sums_that_a_chunked_head_makes_its_gradient_from_are_compared(private):
    """Its output gradient is made anew, from more than the losses' gradient."""
    torch.manual_seed(0)
    engine, model, *_ = private(
        LongContextLM(11, 8, 1, 2, max_seq_len=6, chunked_loss=True, tie_embeddings=False),
        grad_sample_mode="ghost",
        verify_first_batch=False,
    )
    tokens = torch.randint(0, 11, (6, 7))
    targets = tokens[:, 1:].contiguous()
    losses = model(tokens[:, :-1], targets)
    passes = []

    def changed(grad):
        passes.append(0)
        if len(passes) == 2:
            # No version counter tells.
            targets.data.zero_()

    losses.register_hook(changed)
    with pytest.raises(twice.BackwardsDiffer, match="layer 'lm_head'"):
        engine.backward(losses)


def test_the_proof_of_the_first_batch_does_not_hide_a_difference(private):
    """With the random state that it restores a random backward repeats itself, else not."""
    torch.manual_seed(0)
    engine, model, *_ = private(Random("random backward"), grad_sample_mode="ghost")
    with pytest.raises(twice.BackwardsDiffer):
        engine.backward(losses_of(model, data(20)))
    options = {"batch_size": 20, "grad_sample_mode": "instantiate"}
    engine, model, optimizer, loader = private(Random("random backward"), data(60), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for (x,) in loader:
            engine.backward(losses_of(model, x)), optimizer.step()
    assert engine.verified is True


def test_digests_are_what_is_compared_where_bits_repeat():
    assert digests.is_deterministic(torch.device("cpu"))
    assert twice.FirstBackward(torch.device("cpu")).exact
