"""The first batch proves that a model keeps its samples apart, or nothing is released."""

import contextlib
import copy
import random
import re
import warnings
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import dpflash
from dpflash.isolation import copies, proof
from dpflash.isolation.alteration import kept_by, sources
from dpflash.isolation.call import Call
from dpflash.nn import LongContextLM, MultiheadAttention
from dpflash.optimize import wrapper as leveled
from dpflash.verification import digests

KINDS = {
    "instantiate": {"grad_sample_mode": "instantiate"},
    "book_keeping": {"grad_sample_mode": "book_keeping"},
    "ghost": {"grad_sample_mode": "ghost"},
    "per_layer": {"clipping": "per_layer"},
    "scalar": {"loss_reduction": "sum"},
    "mean": {"loss_reduction": "mean"},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
BATCH = 24


@pytest.fixture(autouse=True)
def known_weights(monkeypatch):
    """Secret numbers are the same in each run: what they overlook by chance, they always would."""
    numbers = iter(range(5000, 10**6))
    monkeypatch.setattr(proof, "_secret", lambda: next(numbers))


def data(size=BATCH, width=5, seed=1):
    return torch.randn(size, width, generator=torch.Generator().manual_seed(seed))


class Between(nn.Module):
    """Three linear layers, and what comes between them."""

    def __init__(self, first=None, second=None, width=5):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.first, self.second = first or (lambda h: h), second or (lambda h: h)

    def forward(self, x):
        h = self.first(torch.tanh(self.a(x)))
        return self.c(self.second(torch.tanh(self.b(h))))


def losses_of(model, x):
    return model(x).square().flatten(1).sum(1)


def backward(engine, model, x, kind=None):
    """As a training loop has it."""
    losses = losses_of(model, x)
    reduction = (kind or {}).get("loss_reduction")
    if reduction is None:
        engine.backward(losses)
    else:
        getattr(losses, reduction)().backward()


def assert_nothing_is_left(engine, model):
    assert engine._step.sums == {}
    assert all(p.grad is None for p in model.parameters())


def backward_by(change, forward=lambda x: x.view_as(x)):
    """The identity, or another forward, whose backward changes the gradient."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, grad):
            return change(grad)

    return Changed.apply


batch_gradient = backward_by(lambda grad: grad - grad.mean(0))
scaled_gradient = backward_by(lambda grad: grad / grad.abs().amax(0).clamp(min=1e-6))
tensor_scale = backward_by(lambda grad: grad / grad.abs().max())


def routed(h):
    """Top-1 routing with a capacity, first come, first served."""
    chosen = h.argmax(1)
    place = torch.zeros_like(chosen)
    for expert in range(h.shape[1]):
        hit = chosen == expert
        place[hit] = torch.arange(int(hit.sum()))
    return h * (place < len(h) // h.shape[1])[:, None]


def sorted_by_first(h):
    """Rows by the size of their first entry; their places are kept for `unsorted`."""
    sorted_by_first.order = h[:, 0].detach().argsort()
    return h[sorted_by_first.order]


def unsorted(h):
    return h[sorted_by_first.order.argsort()]


def flipped(h):
    return h.flip(0)


# What stands behind layers a and b, and the first layer that sees it.
FORWARDS = {
    "flip": (flipped, flipped, "b"),
    "sort": (sorted_by_first, unsorted, "b"),
    "batch mean": (lambda h: h - h.mean(0), None, "b"),
    "detached mean": (None, lambda h: h - h.detach().mean(0), "c"),
    "detached scale": (lambda h: h / h.detach().abs().max(), None, "b"),
    "capacity": (routed, None, "b"),
}
BACKWARDS = {
    "batch gradient": (batch_gradient, None, "a"),
    "scaled gradient": (None, scaled_gradient, "b"),
}


@every_kind
@pytest.mark.parametrize("between", FORWARDS.values(), ids=FORWARDS)
def test_what_a_forward_mixes_is_refused_by_the_first_layer_that_sees_it(between, kind, private):
    torch.manual_seed(0)
    *functions, layer = between
    engine, model, *_ = private(Between(*functions), **kind)
    with pytest.raises(RuntimeError, match=rf"^the input of layer '{layer}' changed .* replaced"):
        backward(engine, model, data(), kind)
    assert_nothing_is_left(engine, model)
    assert engine.verified == "pending"


@every_kind
@pytest.mark.parametrize("between", BACKWARDS.values(), ids=BACKWARDS)
def test_what_only_a_backward_mixes_is_refused_by_the_first_layer_that_sees_it(
    between, kind, private
):
    torch.manual_seed(0)
    *functions, layer = between
    engine, model, *_ = private(Between(*functions), **kind)
    with pytest.raises(RuntimeError, match=rf"layer '{layer}' .*weight 0"):
        backward(engine, model, data(), kind)
    assert_nothing_is_left(engine, model)
    assert engine.verified == "pending"


def test_a_scale_that_one_sample_sets_is_refused_whatever_weights_were_drawn(private):
    """The sample of the greatest loss has weight 0, or half of all proofs would not see it."""
    for loudest in range(6):
        torch.manual_seed(loudest)
        engine, model, *_ = private(Between(None, tensor_scale))
        losses = losses_of(model, data())
        losses = torch.where(torch.arange(BATCH) == loudest, 1e3 * losses, losses)
        with pytest.raises(RuntimeError, match="of layer 'b' for a sample changed"):
            engine.backward(losses)


@pytest.mark.parametrize("mode", ["instantiate", "ghost"])
@pytest.mark.parametrize(
    "couple",
    [lambda x: x - x.mean(), lambda x: x.flip(0), lambda x: x / x.sum(), lambda x: x.cumsum(0)],
    ids=["mean", "order", "share", "cumulative"],
)
def test_losses_that_depend_on_several_samples_are_refused(couple, mode, private):
    torch.manual_seed(0)
    engine, model, *_ = private(Between(), grad_sample_mode=mode)
    with pytest.raises(RuntimeError, match="layer 'c' got a gradient .*losses depend on several"):
        engine.backward(couple(losses_of(model, data())))
    assert_nothing_is_left(engine, model)


def test_rows_in_another_order_are_seen_by_the_gradient_alone(private, monkeypatch):
    """Also where no forward could be repeated, as for a layer that is called by itself."""
    torch.manual_seed(0)
    engine, model, *_ = private(Between())

    def losses(x):
        h = torch.tanh(model.a(x)).flip(0)
        return model.c(torch.tanh(model.b(h)).flip(0)).square().sum(1)

    with pytest.raises(RuntimeError, match="layer 'b' got a gradient for samples whose losses"):
        engine.backward(losses(data()))


@pytest.mark.parametrize("couple", ["forward", "backward"])
def test_a_refusal_tells_nothing_of_the_data(couple, private):
    """Not which sample, nor which weights were drawn, nor how many samples there are."""
    texts = set()
    for seed, size in ((1, 17), (2, 23), (3, 40)):
        torch.manual_seed(seed)
        between = FORWARDS["flip"] if couple == "forward" else BACKWARDS["batch gradient"]
        engine, model, *_ = private(Between(*between[:2]))
        with pytest.raises(RuntimeError) as refused:
            backward(engine, model, data(size, seed=seed))
        texts.add(str(refused.value))
    assert len(texts) == 1
    assert not re.search(r"[1-9]", texts.pop())


@every_kind
def test_a_refused_batch_has_left_nothing_even_where_noise_is_fused_in(kind, private):
    """The last layers' gates have run, been paid for and been noised where another one refuses."""
    torch.manual_seed(0)
    model = Between(None, scaled_gradient)
    engine, model, optimizer, loader = private(
        model, data(200), batch_size=BATCH, noise_multiplier=1.0, **kind
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="layer 'b'"):
        for (x,) in loader:
            backward(engine, model, x, kind)
    assert_nothing_is_left(engine, model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@every_kind
def test_without_the_proof_a_coupled_model_trains_and_the_engine_says_so(kind, private):
    engine, model, *_ = private(Between(flipped, flipped), verify_first_batch=False, **kind)
    backward(engine, model, data(), kind)
    assert engine._step.sums
    assert engine.verified is False


# Models that keep samples apart


class Lora(nn.Module):
    """A frozen layer, beside it two factors of which the second begins at zero."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + self.up(self.down(x))


class Twice(nn.Module):
    """One layer called twice, one of whose weights is another layer's too."""

    def __init__(self):
        super().__init__()
        self.mix, self.tied, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.tied.weight = self.mix.weight

    def forward(self, x):
        return self.last(self.tied(torch.tanh(self.mix(torch.tanh(self.mix(x))))))


class Dropping(nn.Module):
    """Draws from all generators: torch's, numpy's and Python's."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = nn.functional.dropout(torch.tanh(self.a(x)), 0.3)
        return self.b(h * (1 + random.random()) * (1 + np.random.rand()))


class Checkpointed(Between):
    def forward(self, x):
        h = checkpoint(
            lambda x: nn.functional.dropout(torch.tanh(self.b(self.a(x))), 0.2),
            x,
            use_reentrant=False,
        )
        return self.c(h)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = MultiheadAttention(6, 2, batch_first=True, attention_sinks=True)
        self.conv = nn.Conv1d(6, 2, 2)

    def forward(self, x):
        x = x.unsqueeze(2).expand(-1, -1, 6)
        return self.conv(self.attention(x, x, x, is_causal=True)[0].transpose(1, 2))


class InPlace(Between):
    """Changes what it is given and what it returns."""

    def forward(self, x):
        return super().forward(x.mul_(2.0)).div_(3.0)


MODELS = {
    "plain": Between,
    "twice and tied": Twice,
    "random": Dropping,
    "checkpointed": Checkpointed,
    "attention, sinks, convolution": Attending,
    "in place": InPlace,
    "one layer": lambda: nn.Linear(5, 3),
}


def trained(private, make, kind, *, verify, steps=2, model=None, **options):
    """Parameters, and the generators' states, after some noisy steps."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    engine, model, optimizer, _ = private(
        model or make(), noise_multiplier=0.5, verify_first_batch=verify, **kind, **options
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # batches of unknown origin
        for step in range(steps):
            backward(engine, model, data(seed=step), kind)
            optimizer.step()
            optimizer.zero_grad()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return engine, [p.detach().clone() for p in model.parameters()], states


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    "kind", [KINDS[k] for k in ("instantiate", "ghost", "per_layer", "scalar")], ids=str
)
def test_a_proof_changes_no_bit_of_training_and_draws_from_no_generator(make, kind, private):
    engine, found, states = trained(private, make, kind, verify=True)
    other, expected, expected_states = trained(private, make, kind, verify=False)
    assert (engine.verified, other.verified) == (True, False)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert torch.equal(states[0], expected_states[0]) and states[1:] == expected_states[1:]


@every_kind
@pytest.mark.parametrize("chunked", [True, False])
def test_a_language_model_is_proven(chunked, kind, private):
    if chunked and kind.get("loss_reduction"):
        kind = {**kind, "loss_reduction": "sum"}
    torch.manual_seed(0)
    plain = LongContextLM(11, 8, 1, 2, max_seq_len=6, dropout=0.1, chunked_loss=chunked)
    engine, model, *_ = private(plain, **kind)
    tokens = torch.randint(0, 11, (BATCH, 7))
    losses = model(tokens[:, :-1], tokens[:, 1:])
    reduction = kind.get("loss_reduction")
    engine.backward(losses if reduction is None else getattr(losses, reduction)())
    assert engine.verified is True


@pytest.mark.parametrize("level", ["balanced", "aggressive"])
@pytest.mark.parametrize("mixing", [False, True], ids=["apart", "mixing"])
def test_levels_are_proven_too(level, mixing, private, monkeypatch):
    torch.compiler.reset()
    monkeypatch.setattr(leveled, "_BACKEND", CompileCounterWithBackend("aot_eager"))
    torch.manual_seed(0)
    between = [lambda h: h - h.detach().mean(0)] if mixing else []
    engine, model, *_ = private(Between(*between), optimize=level)
    assert engine.optimization.compiled == (level == "aggressive")
    if not mixing:
        backward(engine, model, data())
        assert engine.verified is True
        return
    # Inside of compiled code no layer is seen, only what comes out.
    where = "the model's output" if level == "aggressive" else "the input of layer 'b'"
    with pytest.raises(RuntimeError, match=f"^{where} changed for a sample"):
        backward(engine, model, data())
    assert engine.optimization.compiled == (level == "aggressive")


@pytest.mark.parametrize("mixing", [False, True], ids=["apart", "mixing"])
def test_of_a_model_that_the_user_compiles_the_gradients_are_proven(mixing, private):
    torch.compiler.reset()
    torch.manual_seed(0)
    couple = (lambda h: h - h.mean(0)) if mixing else None
    engine, model, optimizer, _ = private(Between(couple))
    compiled = torch.compile(model, backend="aot_eager")
    if mixing:
        with pytest.raises(RuntimeError, match="layer 'a' got a gradient for samples"):
            engine.prepare(BATCH)
            backward(engine, compiled, data())
        return
    for _ in range(2):
        engine.prepare(BATCH)
        backward(engine, compiled, data())
        optimizer.zero_grad()
        assert engine.verified == "gradients"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes_are_proven(dtype, private):
    torch.manual_seed(0)
    engine, model, *_ = private(Between().to(dtype))
    backward(engine, model, data().to(dtype))
    assert engine.verified is True


# How long the proof goes on


class Runs:
    """An object whose contents the proof does not restore."""

    def __init__(self):
        self.forwards, self.backwards = [], []


class Counted(nn.Module):
    """Counts the forwards and the backwards through a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.runs = Runs()

    def forward(self, x):
        self.runs.forwards.append(len(x))
        y = self.model(x)
        if y.requires_grad:
            y.register_hook(lambda grad: self.runs.backwards.append(len(grad)))
        return y

    def counts(self):
        counted = len(self.runs.forwards), len(self.runs.backwards)
        self.runs.forwards.clear()
        self.runs.backwards.clear()
        return counted


@pytest.mark.parametrize(("mode", "passes"), [("instantiate", 1), ("ghost", 2)])
def test_a_batch_is_enough_and_costs_two_forwards_and_one_backward(mode, passes, private):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Counted(Between()), grad_sample_mode=mode)
    for step in range(4):
        backward(engine, model, data(16, seed=step))
        optimizer.zero_grad()
        assert model.counts() == ((3, passes + 1) if step == 0 else (1, passes))
        assert engine.verified is True


def test_small_batches_prove_together_and_single_samples_prove_nothing(private):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Counted(Between()))
    found = []
    for step, size in enumerate((1, 1, 4, 1, 4, 4, 1, 4, 4)):
        backward(engine, model, data(size, seed=step))
        optimizer.zero_grad()
        found.append((model.counts(), engine.verified))
    more, done = ((3, 2), "pending"), ((1, 1), True)
    one = ((1, 1), "pending")
    assert found == [one, one, more, one, more, more, one, ((3, 2), True), done]


def test_accumulated_microbatches_prove_together(private):
    torch.manual_seed(0)
    engine, model, optimizer, loader = private(
        Counted(Between()), data(64), batch_size=32, physical_batch_size=8, noise_multiplier=1.0
    )
    forwards = []
    for _ in range(2):
        for (x,) in loader:
            backward(engine, model, x)
            optimizer.step()
            optimizer.zero_grad()
            forwards.append(model.counts()[0])
    assert engine.verified is True
    assert set(forwards) == {1}  # the loader repeats microbatches, not the model its forwards


def test_a_layer_without_a_gradient_yet_is_proven_when_it_gets_one(private):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Counted(Lora()))
    found = []
    for step in range(3):
        backward(engine, model, data(seed=step))
        optimizer.step()
        optimizer.zero_grad()
        found.append((model.counts(), engine.verified))
    # The forward is proven at once, the gradient of `down` when `up` is no longer zero.
    assert found == [((3, 2), "pending"), ((1, 2), True), ((1, 1), True)]


def test_a_layer_that_mixes_is_refused_when_its_gradient_is_first_not_zero(private):
    torch.manual_seed(0)
    plain = Lora()
    plain.up.register_full_backward_hook(lambda m, grads, _: tuple(g - g.mean(0) for g in grads))
    engine, model, optimizer, _ = private(plain)
    backward(engine, model, data())
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="layer 'down' .*weight 0"):
        backward(engine, model, data(seed=2))


def test_a_layer_whose_gradient_stays_zero_costs_little_and_is_proven_when_it_wakes(private):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Counted(Lora()), lr=0.0)
    backwards = []
    for step in range(20):
        backward(engine, model, data(seed=step))
        optimizer.zero_grad()
        backwards.append(model.counts()[1])
    assert engine.verified == "pending"
    # The first eight batches, then those at powers of two.
    assert backwards == [2] * 9 + [1] * 7 + [2] + [1] * 3
    with torch.no_grad():
        model.model.up.weight.fill_(1.0)
    for _ in range(2):
        backward(engine, model, data())
        optimizer.zero_grad()
    assert engine.verified is True


class Branches(nn.Module):
    """Another layer in training mode than in evaluation mode, or when it is told to."""

    def __init__(self, then=None):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 2)
        self.use_second = False
        self.then = then or (lambda h: h)

    def forward(self, x):
        if self.use_second:
            return self.last(self.then(self.second(x)))
        h = self.first(x)
        return self.last(h if self.training else self.then(h))


def test_the_proof_begins_anew_with_other_layers_and_with_other_modes(private):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Counted(Branches()))

    def step():
        backward(engine, model, data())
        optimizer.zero_grad()
        return model.counts(), engine.verified

    assert step() == ((3, 2), True)
    model.eval()
    assert step() == ((3, 2), True)
    assert step() == ((1, 1), True)
    model.train()
    assert step() == ((1, 1), True)
    model.model.use_second = True
    # A layer that is met in a forward is proven in its backward, and in the next forward.
    assert [step() for _ in range(3)] == [((1, 2), "pending"), ((3, 1), True), ((1, 1), True)]


@pytest.mark.parametrize("couple", ["forward", "backward"])
def test_a_loop_that_goes_on_after_a_refusal_meets_it_in_each_batch(couple, private):
    torch.manual_seed(0)
    between = FORWARDS["flip"] if couple == "forward" else BACKWARDS["batch gradient"]
    engine, model, optimizer, _ = private(Between(*between[:2]))
    for seed in range(25):
        with pytest.raises(RuntimeError, match="layer 'a'|layer 'b'"):
            backward(engine, model, data(seed=seed))
        optimizer.zero_grad()
    assert engine.verified == "pending"


def test_forwards_that_no_backward_follows_do_not_count(private):
    torch.manual_seed(0)
    engine, model, *_ = private(Branches())
    backward(engine, model, data())
    model.eval()
    model(data())
    model.train()
    assert engine.verified is True


@pytest.mark.parametrize("how", ["mode", "layer, forward", "layer, backward"])
def test_what_mixes_later_is_refused_later(how, private):
    torch.manual_seed(0)
    detached = "backward" not in how
    then = (lambda h: h - h.detach().mean(0)) if detached else batch_gradient
    engine, model, optimizer, _ = private(Branches(then))
    backward(engine, model, data())
    optimizer.zero_grad()
    assert engine.verified is True
    if how == "mode":
        model.eval()
    else:
        model.use_second = True
    if how == "layer, forward":
        # Its gradient is fine; the next forward is repeated.
        backward(engine, model, data())
        optimizer.zero_grad()
        assert engine.verified == "pending"
    with pytest.raises(RuntimeError, match="changed for a sample|got a gradient|weight 0"):
        backward(engine, model, data())
    assert_nothing_is_left(engine, model)


@every_kind
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_left_out_of_the_proof(value, kind, private):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Between(), **kind)
    for seed in range(4):
        x = data(seed=seed)
        x[3 * seed] = value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            backward(engine, model, x, kind)
        optimizer.zero_grad()
        assert engine.verified is True
    assert engine.diagnostics()["nonfinite_samples"] == 4


def test_a_secret_half_of_the_samples_is_kept():
    draw, two = proof.Proof().draw, torch.arange(8) > 5
    drawn = [draw(lambda rng: sources((), 8, two, None, rng)) for _ in range(20)]
    assert all(sorted(kept_by(source, two)[two].tolist()) == [False, True] for source in drawn)
    drawn = [draw(lambda rng: sources((), 64, None, None, rng)) for _ in range(200)]
    kept = torch.stack([kept_by(source, None) for source in drawn])
    assert (kept.sum(1) == 32).all() and (kept.sum(0) > 64).all() and (kept.sum(0) < 136).all()


def test_the_longest_and_the_shortest_sample_are_kept_though_padding_repeats_them():
    mask = torch.ones(8, 6).tril()[[4, 0, 4, 0, 1, 2, 3, 1]]
    real = torch.arange(8) > 1
    for seed in range(20):
        kept = sources(mask, 8, real, None, np.random.default_rng(seed))
        assert kept[2] == 2 and kept[3] == 3


def test_the_forward_is_repeated_under_the_same_random_numbers_and_leaves_none_behind(private):
    """Dropout masks of the repeat are those of the first forward, and the user's come next."""
    found = []
    for verify in (True, False):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        engine, model, *_ = private(Dropping(), verify_first_batch=verify)
        outputs = [model(data()).tolist() for _ in range(2)]
        assert outputs[0] != outputs[1]
        found.append((outputs, torch.rand(3).tolist(), random.random(), np.random.rand()))
    assert found[0] == found[1]


def test_masks_that_only_some_samples_have_stay_in_the_repeat(private):
    """Where no sample is padded any more, a fast path without masks rounds otherwise."""

    class Masked(Between):
        def forward(self, x, mask):
            scale = 1.0 if mask.all() else 1.0000001
            return super().forward(x * scale)

    for seed in range(6):
        torch.manual_seed(seed)
        engine, model, *_ = private(Masked())
        mask = torch.ones(16, 3, dtype=torch.bool)
        mask[seed, 2:] = False
        engine.backward(model(data(16), mask).square().sum(1))
        assert engine.verified is True


@pytest.mark.parametrize("call", ["engine", "user"])
@pytest.mark.parametrize("returned", ["tensor", "dict"])
def test_a_scalar_is_proven_by_the_gradients_at_the_outputs(call, returned, private):
    class Named(Between):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "none": None, "more": (y.sum(1), 3)} if returned == "dict" else y

    for between in ([], [None, scaled_gradient]):
        torch.manual_seed(0)
        engine, model, *_ = private(Named(*between), loss_reduction="mean")
        y = model(data())
        terms = y["y"].square().sum(1) + y["more"][0] if returned == "dict" else y.square().sum(1)
        loss = terms.mean()
        if between:
            with pytest.raises(RuntimeError, match="layer 'b'"):
                engine.backward(loss) if call == "engine" else loss.backward()
            assert_nothing_is_left(engine, model)
        else:
            engine.backward(loss) if call == "engine" else loss.backward()
            assert engine.verified is True


@pytest.mark.parametrize("call", ["engine", "user"])
def test_a_scalar_with_terms_that_the_model_did_not_return_is_refused(call, private):
    class Hiding(Between):
        def forward(self, x):
            self.hidden = torch.tanh(self.a(x))
            return self.c(torch.tanh(self.b(self.hidden)))

    torch.manual_seed(0)
    engine, model, *_ = private(Hiding(), loss_reduction="sum")
    loss = model(data()).square().sum() + model.hidden.square().sum()
    with pytest.raises(RuntimeError, match="layer 'a' .*weight 0"):
        engine.backward(loss) if call == "engine" else loss.backward()
    assert_nothing_is_left(engine, model)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x):
        return {name: head(self.body(x)) for name, head in (("a", self.a), ("b", self.b))}


def test_a_scalar_loss_may_use_one_output_alone(private):
    engine, model, optimizer, loader = private(
        TwoHeads(), torch.randn(64, 4), batch_size=16, loss_reduction="mean"
    )
    for head in ("a", "b"):
        for (x,) in loader:
            model(x)[head].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert head == "b" or engine.verified == "pending"
    assert optimizer.releases == 2 * len(loader)


def test_a_model_that_returns_a_scalar_loss_is_proven_in_its_forward_only(private):
    class Scalar(Between):
        def forward(self, x):
            return super().forward(x).square().mean()

    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Scalar(), loss_reduction="mean")
    with pytest.warns(UserWarning, match="engine.verified will be 'forward'"):
        model(data(8)).backward()
    assert engine.verified == "pending"
    optimizer.step()
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(data(8, seed=1)).backward()
    assert engine.verified == "forward"


def test_what_a_model_keeps_for_its_losses_is_that_of_the_first_forward(private):
    """Attributes and lists of modules, which losses may be made of beside the outputs."""

    class Keeping(Between):
        def __init__(self):
            super().__init__()
            self.list, self.calls, self.named = [], 0, {}

        def forward(self, x):
            self.calls += 1
            h = torch.tanh(self.a(x))
            self.hidden = h * (1 + self.calls)
            self.list.append(h.square().sum(1))
            self.named["h"] = h
            return self.c(torch.tanh(self.b(self.hidden)))

    for mode in ("instantiate", "ghost"):
        torch.manual_seed(0)
        engine, model, optimizer, _ = private(Keeping(), grad_sample_mode=mode)
        losses = losses_of(model, data())
        assert (model.calls, len(model.list), list(model.named)) == (1, 1, ["h"])
        engine.backward(
            losses
            + model.hidden.square().sum(1)
            + sum(model.list)
            + model.named["h"].square().sum(1)
        )
        assert engine.verified is True


class Keeps(nn.Module):
    """Takes off what the forward before it has kept."""

    def __init__(self, how):
        super().__init__()
        self.how, self.kept, self.named, self.calls = how, 0.0, {"last": [None]}, 0
        self.total = torch.zeros(5)
        self.part = self.total[:2]

    def forward(self, x):
        self.calls += 1
        taken = x.detach()[0]
        if self.how == "attribute":
            x, self.kept = x - self.kept, taken
        elif self.how == "number":
            x, self.kept = x - self.kept, float(taken.sum())
        elif self.how == "container":
            last, self.named["last"][0] = self.named["last"][0], taken
            x = x if last is None else x - last
        elif self.how == "in place":
            x = x - self.total
            self.total += taken
        elif self.how == "view":
            x = x - self.part.sum()
            self.total += taken
        elif self.how == "replaced":
            # Read only after it was written: no batch sees another one.
            self.kept, self.named["last"][0] = taken, taken
            x = x + self.total.add_(taken).sub_(taken) * self.calls
        return x


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("attribute", "'0.kept'"),
        ("number", "'0.kept'"),
        ("container", "'0.named'"),
        ("in place", "'0.total', '0.part'"),
        ("view", "'0.total', '0.part'"),
    ],
)
def test_what_a_forward_keeps_for_the_next_batch_is_refused(how, named, private):
    torch.manual_seed(0)
    engine, model, *_ = private(nn.Sequential(Keeps(how), nn.Linear(5, 3)))
    with pytest.raises(RuntimeError, match=f"an earlier forward has kept in {re.escape(named)}"):
        backward(engine, model, data())
    assert_nothing_is_left(engine, model)


def test_what_is_kept_of_the_sample_with_most_padding_is_refused(private):
    """Its row keeps its contents where the others are replaced."""

    class Shortest(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept, self.last = None, nn.Linear(5, 3)

        def forward(self, x, mask):
            y = x if self.kept is None else x - self.kept
            self.kept = x.detach()[mask.sum(1).argmin()]
            return self.last(y * mask)

    torch.manual_seed(0)
    mask = torch.ones(BATCH, 5)
    mask[3, 2:] = 0
    _, model, *_ = private(Shortest())
    with pytest.raises(RuntimeError, match="an earlier forward has kept in 'kept'"):
        model(data(), mask)


def test_what_is_kept_and_used_many_batches_later_is_refused_then(private):
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.calls = 0.0, 0

        def forward(self, x):
            self.calls += 1
            y = x - self.mean if self.calls > 12 else x
            self.mean = x.detach().mean(0)
            return y

    torch.manual_seed(0)
    engine, model, optimizer, _ = private(nn.Sequential(Warm(), nn.Linear(5, 3)))
    for seed in range(8):
        backward(engine, model, data(seed=seed))
        optimizer.zero_grad()
    assert engine.verified is True
    with pytest.raises(RuntimeError, match="an earlier forward has kept in '0.mean'"):
        for seed in range(8, 20):
            backward(engine, model, data(seed=seed))
            optimizer.zero_grad()


def test_what_hooks_keep_for_the_losses_is_that_of_the_batch_itself(private, oracle, sums):
    """In objects that the proof cannot restore."""
    kept = {}

    def losses(model, x):
        y = losses_of(model, x)
        return y + kept["h"].square().sum(1)

    torch.manual_seed(0)
    plain = Between()
    plain.a.register_forward_hook(lambda module, args, h: kept.update(h=h))
    expected = oracle(plain, losses, data()).clipped_sum(1.0)
    engine, model, *_ = private(plain, exact=False, max_grad_norm=1.0)
    engine.backward(losses(model, data()))
    for name, found in sums(engine, model).items():
        assert torch.allclose(found.double(), expected[name].double(), atol=1e-5)


def test_a_list_that_keeps_the_proofs_forwards_is_refused_with_the_reason(private):
    kept = []
    torch.manual_seed(0)
    engine, model, *_ = private(Between())
    model.a.register_forward_hook(lambda module, args, h: kept.append(h))
    losses = losses_of(model, data())
    with pytest.raises(RuntimeError, match="a hook may have put their outputs in a list"):
        engine.backward(losses + sum(h.square().sum(1) for h in kept))


def test_a_rank_without_samples_has_none_to_replace():
    call = Call(((torch.empty(0, 3),), {}), 0, None)
    source = sources((), 0, None, None, np.random.default_rng(0))
    for (x,), _ in (call.altered(source), call.of_one(source)):
        assert x.shape == (0, 3)


class Odd(nn.Module):
    """Attributes of kinds that cannot be compared, or contain themselves."""

    def __init__(self):
        super().__init__()
        self.sparse, self.meta = torch.eye(3).to_sparse(), torch.empty(3, device="meta")
        self.named = {"self": None}
        self.named["self"] = [self.named]

    def forward(self, x):
        return x


def test_attributes_of_any_kind_are_no_matter_where_they_stay_as_they_are(private):
    torch.manual_seed(0)
    engine, model, *_ = private(nn.Sequential(Odd(), nn.Linear(5, 3)))
    backward(engine, model, data())
    assert engine.verified is True


def test_what_a_forward_keeps_and_writes_before_it_reads_is_no_matter(private):
    torch.manual_seed(0)
    engine, model, *_ = private(nn.Sequential(Keeps("replaced"), nn.Linear(5, 3)))
    x = data()
    backward(engine, model, x)
    assert engine.verified is True
    keeps = model[0]
    assert (
        keeps.calls == 1 and torch.equal(keeps.kept, x[0]) and keeps.named["last"][0] is not None
    )


def test_hooks_that_a_first_forward_installs_are_installed_once(private):
    class Hooked(Between):
        is_hooked = False

        def forward(self, x):
            if not self.is_hooked:
                self.is_hooked = True
                self.a.register_forward_hook(lambda *args: None)
            return super().forward(x)

    engine, model, *_ = private(Hooked())
    backward(engine, model, data())
    assert model.is_hooked and len(model.a._forward_hooks) == 1


def centred(h):
    return h - h.detach().mean(0)


class Centred(nn.Module):
    def forward(self, h):
        return centred(h)


def _forward(model):
    forward = model.b.forward
    model.b.forward = lambda h: forward(centred(h))


CHANGED = {
    "hook": lambda model: model.b.register_forward_hook(lambda _, args, h: centred(h)),
    "pre-hook": lambda model: model.b.register_forward_pre_hook(lambda _, args: centred(*args)),
    "layer": lambda model: setattr(model, "b", nn.Sequential(Centred(), model.b)),
    "part": lambda model: model.second._modules.update({"0": Centred()}),
    "forward": _forward,
    "backward hook": lambda model: model.b.register_full_backward_hook(
        lambda _, grads, __: tuple(map(centred, grads))
    ),
    "backward pre-hook": lambda model: model.b.register_full_backward_pre_hook(
        lambda _, grads: tuple(g / g.norm() for g in grads)
    ),
    "backward pre-hook of the model": lambda model: model.register_full_backward_pre_hook(
        lambda _, grads: tuple(map(centred, grads))
    ),
}


@pytest.mark.parametrize("how", CHANGED)
def test_what_mixes_in_modules_that_were_changed_is_refused(how, private):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(Between(second=nn.Sequential(nn.Identity())))
    backward(engine, model, data())
    optimizer.zero_grad()
    assert engine.verified is True
    CHANGED[how](model)
    mixed = "layer '.*' (changed for a sample|got a gradient for|for a sample changed)"
    with pytest.raises(RuntimeError, match=mixed):
        backward(engine, model, data())
    assert engine.verified == "pending"


def test_hooks_around_each_forward_are_warned_about_once(private, recwarn):
    engine, model, optimizer, _ = private(Between())
    for _ in range(6):
        hook = model.a.register_forward_hook(lambda *args: None)
        backward(engine, model, data())
        optimizer.zero_grad()
        hook.remove()
    found = [w for w in recwarn if "register hooks once" in str(w.message)]
    assert [w.filename for w in found] == [__file__]
    assert engine.verified is True


def test_losses_of_an_earlier_forward_are_refused(private):
    torch.manual_seed(0)
    engine, model, *_ = private(Between())
    losses = losses_of(model, data())
    model(data(30))
    with pytest.raises(RuntimeError, match="gradient reached layer .* from the last forward and"):
        engine.backward(losses)
    assert_nothing_is_left(engine, model)


def test_the_arguments_of_a_repeated_forward_lie_in_memory_as_the_first_ones_do():
    """Strides and alignment choose kernels, and whether a compiled model is compiled anew."""
    x = torch.arange(70.0).view(5, 14)
    for t in (x, x[:, 1:], x.t(), x[:1].expand(5, 14), x[:, :1].expand(5, 3), x[:0], x[:, 3:3]):
        (copied,) = copies.copied([t])
        assert torch.equal(copied, t) and copied.stride() == t.stride()
        assert (copied.storage_offset() - t.storage_offset()) % 16 == 0
        assert not t.numel() or copied.data_ptr() != t.data_ptr()


def test_outputs_may_be_changed_in_place_where_a_scalar_is_declared(private):
    engine, model, *_ = private(Between(), loss_reduction="sum")
    y = model(data())
    y.div_(2.0)
    y.square().sum().backward()
    assert engine.verified is True


def test_a_model_whose_layers_are_called_one_by_one_is_proven_by_its_gradients_alone(private):
    torch.manual_seed(0)
    expected = pytest.warns(UserWarning, match="without a call of the private model itself")
    engine, model, optimizer, _ = private(Between())
    for _ in range(2):
        losses = model.c(torch.tanh(model.a(data()))).square().sum(1)
        with expected:
            engine.backward(losses)
        expected = contextlib.nullcontext()
        optimizer.zero_grad()
    assert engine.verified == "gradients"
    backward(engine, model, data())
    optimizer.zero_grad()
    backward(engine, model, data())
    assert engine.verified is True


@pytest.mark.parametrize("order", ["metric first", "metric last", "both in the losses"])
def test_a_call_of_the_model_beside_its_layers_does_not_hide_them(order, private):
    engine, model, *_ = private(Between())
    if order == "metric first":
        model(data())
    losses = model.c(torch.tanh(model.a(data()))).square().sum(1)
    if order == "metric last":
        model(data()).sum().item()
    if order == "both in the losses":
        losses = losses + losses_of(model, data())
    with pytest.warns(UserWarning, match="without a call of the private model itself"):
        engine.backward(losses)
    assert engine.verified in ("gradients", "pending")


def test_forwards_without_a_gradient_are_not_repeated(private):
    engine, model, *_ = private(Counted(Between()))
    with torch.no_grad():
        model(data())
    assert model.counts() == (1, 0)
    backward(engine, model, data())
    assert model.counts() == (3, 2)


def test_the_repeat_leaves_no_trace_in_what_the_engine_plans(private):
    engine, model, *_ = private(Between())
    model(data())
    shapes = copy.deepcopy(engine._run.backward.forward.state.shapes)
    assert [len(uses) for uses in shapes[0].values()] == [1, 1, 1]
    assert engine._run.backward.forward.rows is None


def test_a_device_that_does_not_repeat_its_bits_is_allowed_to_round(private, monkeypatch):
    own = torch.Generator().manual_seed(0)

    def rounded(x):
        return x * (1 + 1e-7 * torch.randn(x.shape, generator=own))

    rounding = backward_by(rounded, forward=rounded)
    torch.manual_seed(0)
    engine, model, *_ = private(Between(rounding))
    with pytest.raises(RuntimeError, match="changed"):
        backward(engine, model, data())
    monkeypatch.setattr(digests, "is_deterministic", lambda device: False)
    engine, model, *_ = private(Between(rounding))
    backward(engine, model, data())
    assert engine.verified is True
    for between in (FORWARDS["detached mean"], BACKWARDS["scaled gradient"]):
        engine, model, *_ = private(Between(*between[:2]))
        with pytest.raises(RuntimeError, match="changed|got a gradient"):
            backward(engine, model, data())


@pytest.mark.parametrize("method", ["make_private", "make_private_with_epsilon"])
def test_the_proof_is_on_by_default_and_both_ways_of_making_private_take_it(method):
    engine = dpflash.PrivacyEngine(accountant="rdp")
    model = Between()
    budget = {"noise_multiplier": 1.0}
    if method != "make_private":
        budget = {"target_epsilon": 8.0, "target_delta": 1e-3, "epochs": 1}
    arguments = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": torch.utils.data.DataLoader(data(64), batch_size=8),
        "max_grad_norm": 1.0,
        **budget,
    }
    with pytest.raises(ValueError, match="verified: this engine has no private model"):
        engine.verified  # noqa: B018
    with pytest.raises(ValueError, match="verify_first_batch='no': expected one of True, False"):
        getattr(engine, method)(**arguments, verify_first_batch="no")
    getattr(engine, method)(**arguments, verify_first_batch=False)
    assert engine.verified is False
    engine.detach(model)
    getattr(engine, method)(**arguments)
    assert engine.verified == "pending"


def test_a_contrastive_loss_outside_of_the_model_is_refused_for_what_it_is(private):
    x = data()
    engine, model, *_ = private(Between(), x, one_part=True)
    scores = model(x) @ model(x).T
    with pytest.raises(
        RuntimeError, match="a contrastive loss, which has no per-sample"
    ) as caught:
        engine.backward(nn.functional.cross_entropy(scores, torch.arange(BATCH), reduction="none"))
    assert "verify_first_batch" not in str(caught.value)


Samples = namedtuple("Samples", "xs")


class OfLists(nn.Module):
    """Takes samples of differing lengths in a list."""

    def __init__(self, mixing):
        super().__init__()
        self.l, self.mixing = nn.Linear(3, 2), mixing

    def forward(self, batch, lengths=None):
        batch = batch["xs"] if isinstance(batch, dict | UserDict) else getattr(batch, "xs", batch)
        parts = [self.tensor(part) for part in batch]
        if lengths is not None:
            assert [len(x) for x in parts] == lengths
        x = torch.stack([x.sum(0) for x in parts])
        return self.l(x - x.mean(0) if self.mixing else x)

    def tensor(self, part):
        if isinstance(part, str):
            return torch.tensor([[float(ord(c)), 1.0, 2.0] for c in part]) / 100
        return part["x"] if isinstance(part, dict) else part


LISTS = {
    "list": lambda xs: (xs,),
    "tuple": lambda xs: (tuple(xs),),
    "dict of a list": lambda xs: ({"xs": xs},),
    "user dict of a list": lambda xs: (UserDict(xs=xs),),
    "named tuple of a list": lambda xs: (Samples(xs),),
    "list of dicts": lambda xs: ([{"x": x} for x in xs],),
    "strings": lambda xs: ([chr(97 + i) * len(x) for i, x in enumerate(xs)],),
    "lengths": lambda xs: (xs, [len(x) for x in xs]),
}


@pytest.mark.parametrize("mixing", [False, True], ids=["apart", "mixing"])
@pytest.mark.parametrize("as_arguments", LISTS.values(), ids=LISTS)
def test_samples_in_lists_are_replaced_whatever_their_lengths(as_arguments, mixing, private):
    engine, model, *_ = private(OfLists(mixing))
    # Some samples of the honest model are as long as the batch.
    lengths = [BATCH if i % 3 == 0 and not mixing else 1 + i % 7 for i in range(BATCH)]
    xs = [data(length, 3, seed=i) for i, length in enumerate(lengths)]
    if mixing:
        with pytest.raises(RuntimeError, match="layer 'l' changed for a sample"):
            model(*as_arguments(xs))
        return
    engine.backward(model(*as_arguments(xs)).square().sum(1))
    assert engine.verified is True


class WithLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(5, 2)

    def forward(self, x, past):
        for part in past:
            x = x + sum(part) if isinstance(part, tuple) else x + part
        return self.l(x)


PASTS = {
    "tensors": lambda: [data(seed=i) for i in range(BATCH)],
    "pairs": lambda: tuple((data(seed=i), data(seed=-i)) for i in range(1, BATCH + 1)),
    "two": lambda: [data(), data(seed=3)],
}


@pytest.mark.parametrize("past", PASTS.values(), ids=PASTS)
def test_lists_of_batches_are_no_lists_of_samples(past, private):
    engine, model, *_ = private(WithLayers())
    engine.backward(model(data(), past()).square().sum(1))
    # With as many batches as samples they are not replaced.
    assert engine.verified is (True if len(past()) == 2 else "gradients")


class Beside(nn.Module):
    """Takes something beside a tensor of the samples."""

    def __init__(self, tensor_of):
        super().__init__()
        self.l, self.tensor_of = nn.Linear(3, 2), tensor_of

    def forward(self, t, other):
        return self.l(t + self.tensor_of(other))


class Box:
    def __init__(self, x):
        self.x = x


REPLACED = {
    "array": (lambda x: x.numpy(), torch.tensor),
    "objects": (lambda x: [Box(row) for row in x], lambda x: torch.stack([b.x for b in x])),
    "arrays": (lambda x: list(x.numpy()), lambda x: torch.stack([torch.tensor(a) for a in x])),
    "lists": (lambda x: x.tolist(), torch.tensor),
    "sparse": (lambda x: x.to_sparse(), lambda x: x.to_dense()),
}
LEFT = {
    "flattened": (lambda x: x.repeat(2, 1), lambda x: x[:BATCH]),
    "object": (lambda x: Box(x), lambda x: x.x),
}


def standardised(x):
    return (x - x.mean(0)) / x.std(0)


@pytest.mark.parametrize(("make", "tensor_of"), REPLACED.values(), ids=REPLACED)
def test_arrays_and_objects_of_samples_are_replaced(make, tensor_of, private):
    engine, model, *_ = private(Beside(tensor_of))
    engine.backward(model(data(BATCH, 3), make(data(BATCH, 3, 2))).square().sum(1))
    assert engine.verified is True
    engine, model, *_ = private(Beside(lambda x: standardised(tensor_of(x))))
    with pytest.raises(dpflash.PrivateRefusal, match="layer 'l' changed for a sample"):
        model(data(BATCH, 3), make(data(BATCH, 3, 2)))


@pytest.mark.parametrize(("make", "tensor_of"), LEFT.values(), ids=LEFT)
def test_what_cannot_be_replaced_beside_samples_is_not_taken_for_tested(make, tensor_of, private):
    engine, model, optimizer, _ = private(Beside(lambda x: standardised(tensor_of(x))))
    with pytest.warns(dpflash.PrivateWarning, match=r"argument 1\), that could not be replaced"):
        for seed in range(3):
            losses = model(data(BATCH, 3, seed), make(data(BATCH, 3, seed + 9))).square().sum(1)
            engine.backward(losses)
            optimizer.step()
    assert engine.verified == "gradients"


@pytest.mark.parametrize("make", [make for make, _ in LEFT.values()], ids=LEFT)
def test_what_is_the_same_in_all_calls_needs_no_replacement(make, private):
    engine, model, optimizer, _ = private(Beside(lambda x: 0.0))
    other = make(data(BATCH, 3, 1))
    for seed in range(2):
        engine.backward(model(data(BATCH, 3, seed), other).square().sum(1))
        optimizer.step()
    assert engine.verified is True


def test_samples_that_reach_no_layer_prove_nothing(private):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(3, 2)

        def forward(self, x):
            return self.l(torch.ones(len(x), 3))

    engine, model, *_ = private(Constant())
    engine.backward(model(data()).square().sum(1))
    assert engine.verified == "gradients"


def test_a_setting_of_two_numbers_beside_a_list_of_two_samples_is_left_alone(private):
    class Resized(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(24, 2)

        def forward(self, images, size):
            assert size == (4, 6)
            return self.l(torch.stack([x.reshape(24) for x in images]))

    engine, model, *_ = private(Resized())
    engine.backward(model([data(4, 6), data(4, 6, 1)], (4, 6)).square().sum(1))


def test_samples_that_are_all_as_long_as_the_batch_are_not_taken_for_batches(private):
    engine, model, optimizer, _ = private(OfLists(mixing=False))
    xs = [data(BATCH, 3, i) for i in range(BATCH)]
    for _ in range(2):
        engine.backward(model(xs).square().sum(1))
        optimizer.step()
    with pytest.warns(dpflash.PrivateWarning, match="could not be replaced"):
        engine.backward(model(xs).square().sum(1))
    assert engine.verified == "gradients"


class Halting(nn.Module):
    """Runs its layer until all samples of the batch have halted, or, `fixed`, four times."""

    def __init__(self, fixed):
        super().__init__()
        self.layer, self.head, self.fixed = nn.Linear(3, 3), nn.Linear(3, 2), fixed

    def forward(self, x):
        for _ in range(4):
            going = x[:, :1] > 0
            if not self.fixed and not going.any():
                break
            x = torch.where(going, self.layer(x) - 0.5, x)
        return self.head(x)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_loop_that_halts_with_its_batch_is_told_to_run_a_fixed_number_of_steps(fixed, private):
    data = torch.zeros(16, 3)
    data[::8, 0] = 1.0
    engine, model, optimizer, loader = private(Halting(fixed), data, one_part=True)

    def train():
        for _ in range(4):
            for (x,) in loader:
                engine.backward(model(x).square().mean(1))
                optimizer.step()
                optimizer.zero_grad()

    if fixed:
        return train()
    with pytest.raises(dpflash.PrivateRefusal, match="takes a fixed number of steps"):
        train()
