"""Public data is neither clipped nor noised nor counted, and is no way around clipping."""

import copy
import pickle
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.packing.units import Units

FEATURES, CLASSES = 8, 3
ONE_PART = {"physical_batch_size": 24, "max_batch_size": 24}
UNTRIED = {**ONE_PART, "verify_first_batch": False}


class Net(nn.Module):
    """Two layers and a norm; `recomputed` in the backward, but for the last layer."""

    def __init__(self, recomputed=False, dropout=0.0):
        super().__init__()
        self.recomputed = recomputed
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x):
        if self.recomputed:
            return self.last(checkpoint(self.block, x, use_reentrant=False))
        return self.last(self.block(x))

    def block(self, x):
        return self.dropout(torch.tanh(self.norm(self.first(x))))


def numbers(size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


PRIVATE, PUBLIC = numbers(24, 1), numbers(5, 2)


def made(kind=Net, **options):
    torch.manual_seed(0)
    return kind(**options)


def run(model=None, *, ledger=None, batch_size=6, **options):
    """engine, model, optimizer, loader, with noise."""
    model = made() if model is None else model
    engine = dpflash.PrivacyEngine(seed=3, ledger=ledger, accountant="rdp")
    return engine, *engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(*PRIVATE), batch_size=batch_size),
        **{"noise_multiplier": 1.0, "max_grad_norm": 0.5, **options},
    )


def public_loss(model, data=PUBLIC):
    return F.cross_entropy(model(data[0]), data[1])


def losses_of(model, x, y):
    return dpflash.losses.cross_entropy(model(x), y)


def on_public(engine, model):
    with engine.public_data():
        public_loss(model).backward()


def grads(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def plain_grads(model, loss=public_loss):
    """By autograd on a plain copy."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss(plain).backward()
    return grads(plain)


def released(engine, model, optimizer, loader, *, public=(), count=3):
    """Gradients of some releases, each from the same parameters whatever was released before.

    Args:
        public: places in the loop where there is a forward and backward of public data.
    """
    found = []
    for x, y in loader:
        if "before" in public:
            on_public(engine, model)
        losses = losses_of(model, x, y)
        if "between" in public:
            on_public(engine, model)
        engine.backward(losses)
        if "after" in public:
            on_public(engine, model)
        if "dropped" in public:
            on_public(engine, model)
            engine._step.public.drop()
        optimizer.step()
        if loader.is_last:
            found.append(grads(model))
        optimizer.zero_grad()
        if "turns" in public and loader.is_last:
            on_public(engine, model)
            optimizer.step()
            optimizer.zero_grad()
        if loader.is_last:
            for parameter in model.parameters():
                parameter.data.fill_(0.1 * len(found))
        if len(found) == count:
            break
    return found


def at_the_parameters(model):
    """Public gradients where `released` makes its releases."""
    plain = copy.deepcopy(model)
    for number in range(3):
        if number:
            for parameter in plain.parameters():
                parameter.data.fill_(0.1 * number)
        yield plain_grads(plain)


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


# The private part


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("mode", ["instantiate", "ghost", "book_keeping"])
def test_a_release_has_the_same_bits_with_public_data(tmp_path, place, clipping, mode):
    options = {"clipping": clipping, **ONE_PART}
    if clipping == "flat":
        options["grad_sample_mode"] = mode
    alone = run(made(recomputed=True), ledger=tmp_path / "alone", **options)
    own = released(*alone)
    both = run(made(recomputed=True), ledger=tmp_path / "both", **options)
    public = list(at_the_parameters(both[1]))
    assert public[0]["first.weight"].any()
    for found, private, gradient in zip(released(*both, public=place), own, public, strict=True):
        assert_equal(found, {name: private[name] + gradient[name] for name in private})
    assert alone[0].get_epsilon(1e-5) == both[0].get_epsilon(1e-5) > 0
    events = [
        [
            line.split(b'"event"')[1].split(b'"digest"')[0]
            for line in path.read_bytes().split(b"\n")[:-1]
        ]
        for path in (tmp_path / "alone", tmp_path / "both")
    ]
    assert events[0] == events[1] and len(events[0]) == 3


def test_public_forwards_prove_nothing_and_disturb_no_proof():
    engine, model, optimizer, loader = run(made(recomputed=True), **ONE_PART)
    for seed in range(4):
        with engine.public_data():
            public_loss(model, numbers(16, seed)).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert engine.verified == "pending"
    proof = engine._run.backward.proof
    assert not proof._modes
    for _ in range(3):
        released(engine, model, optimizer, loader, public=("before", "between"), count=4)
    assert engine.verified is True


@pytest.mark.parametrize("place", ["turns", "dropped"])
def test_releases_between_public_steps_have_the_same_bits(place):
    """Also with random masks, of which the public forwards draw their own."""
    own = released(*run(made(dropout=0.5), **ONE_PART))
    for found, private in zip(
        released(*run(made(dropout=0.5), **ONE_PART), public=place), own, strict=True
    ):
        assert_equal(found, private)


@pytest.mark.parametrize(
    ("blocks", "only_last_steps"),
    [(["top"], False), (["behind"], True), (["top", "top", "behind"], False), (["outside"], True)],
    ids=["each microbatch", "one step", "three blocks", "between draws"],
)
def test_public_gradients_count_once_a_release_in_however_many_microbatches(
    blocks, only_last_steps
):
    """Their number is private; blocks of one microbatch, or between two draws, add up."""
    options = {"physical_batch_size": 2, "max_batch_size": 24}
    own = released(*run(**options), count=2)
    engine, model, optimizer, loader = run(**options)
    public = list(at_the_parameters(model))
    microbatches = 0
    for _ in range(2 * blocks.count("outside")):
        on_public(engine, model)
    for x, y in loader:
        microbatches += 1
        for _ in range(blocks.count("top")):
            on_public(engine, model)
        engine.backward(losses_of(model, x, y))
        for _ in range(blocks.count("behind")):
            on_public(engine, model)
        if loader.is_last or not only_last_steps:
            optimizer.step()
        if loader.is_last:
            break
        optimizer.zero_grad()
    assert microbatches > 1
    count = 2 if "outside" in blocks else len(blocks)
    expected = own[0]["last.bias"] + count * public[0]["last.bias"]
    torch.testing.assert_close(model.last.bias.grad, expected, rtol=1e-5, atol=1e-6)
    model.zero_grad()  # which, unlike the optimizer's, drops no public gradients
    for parameter in model.parameters():
        parameter.data.fill_(0.1)
    for x, y in loader:
        engine.backward(losses_of(model, x, y))
        optimizer.step()
        if loader.is_last:
            assert_equal(grads(model), own[1])
            break
        optimizer.zero_grad()


def test_zero_grad_drops_public_gradients():
    own = released(*run(**UNTRIED), count=1)
    engine, model, optimizer, loader = run(**UNTRIED)
    x, y = next(iter(loader))
    on_public(engine, model)
    optimizer.zero_grad()
    engine.backward(losses_of(model, x, y))
    optimizer.step()
    assert_equal(grads(model), own[0])


def test_a_draw_without_samples_is_released_and_charged_beside_public_data():
    """Public data cannot stand in for it: the number of releases would tell that it was empty."""
    engine, model, optimizer, loader = run(batch_size=1, **UNTRIED)
    empty = 0
    for number, (x, y) in enumerate(loader):
        expected = plain_grads(model)
        on_public(engine, model)
        engine.backward(losses_of(model, x, y))
        empty += not loader.is_real.any()
        optimizer.step()
        assert optimizer.releases == number + 1
        noise = model.first.weight.grad - expected["first.weight"]
        assert noise.std() > 0.1
        optimizer.zero_grad()
    assert empty


@pytest.mark.parametrize("size", [0, 4])
def test_batches_that_are_not_from_the_loader_are_released_and_charged(size):
    engine, model, optimizer, _ = run(**ONE_PART, foreign_batches=True)
    x, y = (t[:size] for t in PRIVATE)
    expected = plain_grads(model)
    on_public(engine, model)
    engine.backward(losses_of(model, x, y))
    optimizer.step()
    assert optimizer.releases == 1 and engine.get_epsilon(1e-5) > 0
    assert not torch.equal(model.last.bias.grad, expected["last.bias"])


# The public part


class ClassToken(nn.Module):
    """A parameter beside layers, which private training runs sample by sample."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.mix = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.last = nn.Linear(4, CLASSES)

    def forward(self, x):
        x = x.view(len(x), 2, 4)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.last(self.mix(x)[:, 0])


class Tied(nn.Module):
    """Recurrent, with a weight of two layers."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(2, FEATURES, batch_first=True)
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.b.weight = self.a.weight
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        hidden = self.recurrent(x.view(len(x), 4, 2))[0][:, -1]
        return self.last(self.b(torch.tanh(self.a(hidden))))


def one_layer():
    return nn.Linear(FEATURES, CLASSES)


@pytest.mark.parametrize("kind", [Net, ClassToken, Tied, one_layer])
def test_a_step_between_private_batches_is_that_of_the_plain_model(kind, tmp_path):
    engine, model, optimizer, loader = run(made(kind), ledger=tmp_path / "ledger", **UNTRIED)
    hooked = []
    optimizer.attach_step_hook(hooked.append)
    for place in ("first", "behind a release"):
        if place != "first":
            x, y = next(iter(loader))
            engine.backward(losses_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
        before = (optimizer.releases, engine.get_epsilon(1e-5), len(hooked))
        path = tmp_path / "ledger"
        ledger = path.read_bytes() if place != "first" else None
        plain = copy.deepcopy(model)
        assert not any(type(m).__module__.startswith("dpflash") for m in plain.modules())
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for data in (PUBLIC, numbers(7, 8)):
            public_loss(plain, data).backward()
            with engine.public_data():
                public_loss(model, data).backward()
        plain_optimizer.step()
        optimizer.step()
        assert_equal(model.state_dict(), plain.state_dict())
        assert_equal(grads(model), grads(plain))
        assert before == (optimizer.releases, engine.get_epsilon(1e-5), len(hooked))
        assert path.exists() == (ledger is not None)
        assert ledger is None or ledger == path.read_bytes()
        with pytest.raises(RuntimeError, match="with no engine.backward"):
            optimizer.step()
        optimizer.zero_grad()


def test_inside_only_public_gradients_are_in_grad_and_may_be_clipped():
    engine, model, optimizer, loader = run(**UNTRIED)
    x, y = next(iter(loader))
    engine.backward(losses_of(model, x, y))
    private = grads(model)
    expected = plain_grads(model, lambda m: 100 * public_loss(m))
    with engine.public_data():
        (100 * public_loss(model)).backward()
        assert_equal(grads(model), expected)
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        clipped = grads(model)
    assert_equal(grads(model), private)
    optimizer.step()
    own = released(*run(**UNTRIED), count=1)[0]
    assert_equal(grads(model), {name: own[name] + clipped[name] for name in own})


def test_the_autocast_of_a_level_is_that_of_public_forwards():
    engine, model, _, _ = run(optimize="balanced", **ONE_PART)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = plain(PUBLIC[0]).float()
    with engine.public_data():
        assert torch.equal(model(PUBLIC[0]), outputs)


@pytest.mark.cases(0)
def test_a_model_that_the_user_compiles_sees_both_kinds_of_data():
    results = []
    for public in ((), ("before",)):
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        engine, model, optimizer, loader = run(model, **ONE_PART)
        gradients = list(at_the_parameters(model))
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        found = released(engine, compiled, optimizer, loader, public=public, count=2)
        results.append([{n.removeprefix("_orig_mod."): g for n, g in x.items()} for x in found])
    for private, found, gradient in zip(*results, gradients[:2], strict=True):
        assert_equal(found, {name: private[name] + gradient[name] for name in private})


@pytest.mark.parametrize("when_spent", ["raise", "stop"])
def test_a_spent_budget_allows_public_steps(when_spent):
    budget = dpflash.PrivacyBudget(epsilon=1.0, delta=1e-5, when_spent=when_spent)
    engine, model, optimizer, loader = run(budget=budget, noise_multiplier=3.0, **ONE_PART)
    ended = False
    while not ended:
        try:
            taken = optimizer.releases
            for x, y in loader:
                engine.backward(losses_of(model, x, y))
                optimizer.step()
                optimizer.zero_grad()
            ended = optimizer.releases == taken
        except dpflash.BudgetSpent:
            ended = True
    spent, taken = engine.get_epsilon(1e-5), optimizer.releases
    expected = plain_grads(model)
    on_public(engine, model)
    optimizer.step()
    assert_equal(grads(model), expected)
    assert (engine.get_epsilon(1e-5), optimizer.releases) == (spent, taken) and taken > 1


def test_a_checkpoint_leaves_public_gradients_out(tmp_path):
    def begun():
        engine, model, optimizer, loader = run(**UNTRIED)
        x, y = next(iter(loader))
        engine.backward(losses_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
        return engine, model, optimizer, loader

    first = begun()
    on_public(*first[:2])
    first[0].save_checkpoint(tmp_path / "run")
    first[2].zero_grad()
    own = released(*first, count=2)
    second = run(**UNTRIED)
    on_public(*second[:2])
    second[0].load_checkpoint(tmp_path / "run")
    for found, private in zip(released(*second, count=2), own, strict=True):
        assert_equal(found, private)


# No way around clipping


@pytest.mark.parametrize("reduction", [None, "mean"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("caught", [False, True])
def test_private_outputs_in_a_public_loss_are_refused(clipping, recomputed, caught, reduction):
    model = made(recomputed=recomputed)
    options = {"clipping": clipping, "loss_reduction": reduction, **ONE_PART}
    engine, model, optimizer, loader = run(model, **options)
    x, _ = next(iter(loader))
    outputs = model(x)

    def inside():
        # The gradient of the public factor depends on the private one.
        (model(PUBLIC[0]).sum() * outputs.square().sum()).backward()

    with pytest.raises(RuntimeError, match="reached a forward that ran outside of it"):
        with engine.public_data():
            if not caught:
                inside()
            try:
                inside()
            except RuntimeError:
                assert model.last.bias.grad is None
    assert not engine._step.public.are_waiting
    assert model.last.bias.grad is None


@pytest.mark.parametrize("options", [ONE_PART, {"poisson_sampling": False}])
@pytest.mark.parametrize("rows", ["all", "some, sorted", "released", "one among public ones"])
def test_the_private_loaders_batch_is_refused_inside(rows, options):
    engine, model, optimizer, loader = run(**options)
    x, y = next(iter(loader))
    if rows == "released":
        engine.backward(losses_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    elif rows == "some, sorted":
        x = x[x[:, 0].argsort()][1:4].clone()
    elif rows == "one among public ones":
        x = torch.cat([PUBLIC[0], x[:1], PUBLIC[0]])
    with pytest.raises(dpflash.PrivateRefusal, match="rows of the private loader's batches") as e:
        with engine.public_data():
            model(x).sum().backward()
    assert e.value.details["rows"] == ([5] if len(x) == 11 else [*range(len(x))])


@pytest.mark.parametrize("has_grad", [False, True])
def test_single_layers_do_not_get_the_private_loaders_batch_inside(has_grad):
    engine, model, _, loader = run(**ONE_PART)
    x, _ = next(iter(loader))
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear))
    with engine.public_data():
        first(PUBLIC[0]).sum().backward()
    with pytest.raises(dpflash.PrivateRefusal, match="rows of the private loader's batches"):
        with engine.public_data():
            first(x.clone().requires_grad_(has_grad)).sum().backward()
    assert not any(layer._forward_pre_hooks for layer in model.modules())


class Own:
    def __init__(self, x):
        self.x = x


WITHOUT_TENSORS = {
    "arrays": (lambda x: (x.numpy(), 0), lambda b: torch.from_numpy(b[0])),
    "float64": (lambda x: {"x": x.double().numpy()}, lambda b: torch.tensor(b["x"]).float()),
    "lists": (lambda x: [x.tolist()], lambda b: torch.tensor(b[0])),
    "namespace": (lambda x: SimpleNamespace(x=x.numpy()), lambda b: torch.from_numpy(b.x)),
    "own class": (lambda x: Own([x]), lambda b: b.x[0]),
    "samples": (lambda x: [(row, "") for row in x], lambda b: torch.stack([r for r, _ in b])),
}


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("kind", WITHOUT_TENSORS)
def test_rows_of_batches_that_hold_no_tensors_are_refused_inside(kind, earlier):
    packed, taken = WITHOUT_TENSORS[kind]
    engine, model, _, loader = run(**ONE_PART)
    x = torch.randn_like(next(iter(loader))[0])  # Of no batch that held tensors.
    loader.seen.observe(packed(x), loader.tracker.current)
    held = taken(packed(x))
    if earlier:
        loader.seen.observe(packed(x + 1), loader.tracker.current)
    with pytest.raises(dpflash.PrivateRefusal, match="rows of the private loader's batches"):
        with engine.public_data():
            model(torch.cat([PUBLIC[0], held[1:2]])).sum().backward()


def test_batches_of_which_nothing_is_recognised_are_warned_of_once():
    engine, model, _, loader = run(**ONE_PART)
    next(iter(loader))
    for batch in (["a text", "another one"], {"texts": [b""]}):
        loader.seen.observe(batch, loader.tracker.current)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            on_public(engine, model)
            on_public(engine, model)
        messages = [str(w.message) for w in found if w.category is dpflash.PrivateWarning]
        assert len([m for m in messages if "would not be recognised" in m]) == ("a text" in batch)


@pytest.mark.parametrize("options", [ONE_PART, {"poisson_sampling": False}])
@pytest.mark.parametrize("part", [slice(None), slice(2, 3)])
def test_rows_of_an_earlier_batch_of_the_private_loader_are_refused_inside(options, part):
    engine, model, optimizer, loader = run(**options)
    on_public(engine, model)
    kept = []
    for x, y in loader:
        kept.append(x)
        engine.backward(losses_of(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(dpflash.PrivateRefusal, match="rows of the private loader's batches"):
        with engine.public_data():
            model(torch.cat([PUBLIC[0], kept[0][part]])).sum().backward()


def test_rows_of_few_different_numbers_may_be_in_public_data_too():
    engine, model, _, loader = run(**ONE_PART)
    x, _ = next(iter(loader))
    x[:, :2] = 1.0  # 7 different ones are left
    loader.seen.observe((x,), loader.tracker.current)
    with engine.public_data():
        model(torch.cat([x, PUBLIC[0]])).sum().backward()


GRID = torch.linspace(0, 1, FEATURES)


def is_refused_inside(loader, public):
    return bool(loader.seen.drawn([torch.cat([PUBLIC[0], public])]))


def mark_of(loader, rows, **changes):
    changes = {"real": None, "is_trial": False, **changes}
    return replace(loader.tracker.current, size=rows, **changes)


@pytest.mark.parametrize("looked_at", [True, False])
def test_a_row_that_all_samples_share_may_be_in_public_data_too(looked_at, monkeypatch):
    if not looked_at:  # As on a GPU behind the first batches.
        monkeypatch.setattr("dpflash.sampling.seen_batches.SeenBatches._is_checked", lambda *_: 0)
    _, _, _, loader = run(**ONE_PART)
    next(iter(loader))
    x, mark = PRIVATE[0], mark_of(loader, 24)
    grid = GRID.expand(24, -1)
    loader.seen.observe((x, grid), mark)
    assert not is_refused_inside(loader, GRID[None])
    assert is_refused_inside(loader, x[:1])
    # A row that other samples do not have is of its sample.
    loader.seen.observe((x, torch.cat([grid[1:], PUBLIC[0][:1]])), mark)
    assert is_refused_inside(loader, GRID[None])


def test_a_row_that_all_samples_of_an_earlier_batch_share_may_be_in_public_data_too():
    _, _, _, loader = run(**ONE_PART)
    next(iter(loader))
    x, mark = PRIVATE[0], mark_of(loader, 24)
    # Of a batch with one sample nothing is known of others.
    one = mark_of(loader, 24, real=torch.arange(24) == 0)
    loader.seen.observe((x[:1].expand_as(x), GRID.expand(24, -1)), one)
    assert is_refused_inside(loader, GRID[None])
    for shift in range(3):
        loader.seen.observe((x + shift, GRID.expand(24, -1)), mark)
    loader.seen.observe((x + 3, x + 4), mark)
    assert not is_refused_inside(loader, GRID[None])
    assert is_refused_inside(loader, x[:1])


UNITS_OF = {
    "one row": (1, {}),
    "one sample": (4, {"real": torch.tensor([True, False, False, False])}),
    "a user": (4, {"units": Units((4,), ((0, 3), (3, 3)))}),
    "documents": (4, {"units": Units((4, FEATURES), ((0, 9), (9, 32)))}),
    "equal samples": (4, {}),
}


@pytest.mark.parametrize("kind", UNITS_OF)
def test_equal_rows_that_may_be_of_one_sample_are_refused_inside(kind):
    rows, changes = UNITS_OF[kind]
    _, _, _, loader = run(**ONE_PART)
    next(iter(loader))
    # Other numbers than of samples differ too, such as random ones for each row.
    other = torch.arange(rows if kind != "equal samples" else 3)
    mark = mark_of(loader, rows, **changes)
    loader.seen.observe((GRID.expand(rows, -1), other, PRIVATE[0]), mark)
    assert is_refused_inside(loader, GRID[None])


def test_losses_of_public_data_are_refused_outside():
    engine, model, optimizer, loader = run(**ONE_PART)
    x, y = next(iter(loader))
    data = numbers(len(x), 9)
    with engine.public_data():
        losses = losses_of(model, *data)
    with pytest.raises(RuntimeError, match="got a gradient past its private layer"):
        engine.backward(losses)
    with engine.public_data():
        losses = losses_of(model, *data)
    with pytest.raises(RuntimeError, match="got a gradient past its private layer"):
        engine.backward(losses + losses_of(model, x, y))
    engine, model, optimizer, _ = run(**ONE_PART)
    with engine.public_data():
        loss = public_loss(model)
    with pytest.raises(RuntimeError, match=r"run it inside engine\.public_data\(\) too"):
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.releases == 0 and engine.get_epsilon(1e-5) == 0


@pytest.mark.parametrize("private_batch", [False, True])
def test_a_gradient_that_bypasses_clipping_is_refused_beside_public_ones(private_batch):
    engine, model, optimizer, loader = run(**ONE_PART)
    on_public(engine, model)
    with pytest.raises(RuntimeError, match=r"'first\.weight' got.* forward of the module that"):
        if private_batch:
            x, y = next(iter(loader))
            engine.backward(losses_of(model, x, y) + F.linear(x, model.first.weight).sum(1))
        else:
            F.linear(PRIVATE[0], model.first.weight).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_inside_nothing_else_of_the_engine_runs(tmp_path):
    engine, model, optimizer, loader = run(**ONE_PART)
    running = iter(loader)
    calls = {
        "optimizer.step()": optimizer.step,
        "optimizer.zero_grad()": optimizer.zero_grad,
        "a call of the engine": lambda: engine.backward(torch.zeros(24)),
        "a call of the engine inside": lambda: engine.detach(model),
        "a call of the engine inside engine": lambda: engine.load_checkpoint(tmp_path),
        "a call of the engine ": lambda: engine.public_data().__enter__(),
        "a batch of the private loader": lambda: next(running),
    }
    for message, call in calls.items():
        with pytest.raises(RuntimeError, match=message.replace("(", r"\(").replace(")", r"\)")):
            with engine.public_data():
                public_loss(model).backward()
                call()
        assert not engine._step.public.are_waiting
    with pytest.raises(RuntimeError, match="no private model"):
        with dpflash.PrivacyEngine().public_data():
            pass


def test_behind_the_block_the_model_is_private_as_before():
    engine, model, _, _ = run()
    kinds = [type(module) for module in model.modules()]
    grad = model.last.bias.grad = torch.ones(CLASSES)
    for error in (ValueError, None):
        try:
            with engine.public_data():
                assert pickle.loads(pickle.dumps(model.state_dict())).keys()
                copied = copy.deepcopy(model)
                public_loss(model).backward()
                if error is not None:
                    raise error
        except ValueError:
            assert not engine._step.public.are_waiting
        # Not equal classes but the same ones, on which torch.compile guards.
        assert all(type(m) is kind for m, kind in zip(model.modules(), kinds, strict=True))
        assert all("_dpflash" not in vars(module) for module in copied.modules())
        assert type(copied) is Net
        assert model.last.bias.grad is grad
    step = engine._step
    engine.detach(model)
    assert not step.public.are_waiting and type(model.last) is nn.Linear


class Counting(nn.Module):
    """Writes what it has seen into a buffer."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x):
        self.mean += x.detach().mean(0)
        return self.last(x)


def test_a_buffer_that_a_public_forward_changes_is_refused_unless_allowed():
    engine, model, _, _ = run(made(Counting))
    with pytest.raises(RuntimeError, match="'mean' changed since make_private"):
        on_public(engine, model)
    assert not engine._step.public.are_waiting
    engine, model, _, _ = run(made(Counting), allow_buffers=["mean"])
    on_public(engine, model)
    assert engine._step.public.are_waiting
