"""Optimization levels: what each changes, and that none of them changes what privacy costs."""

import copy
import inspect
import os
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash.cli import main
from dpflash.clipping.planner import LEVELS
from dpflash.distributed.mesh import Ranks
from dpflash.grad_rules import PrivateModule
from dpflash.grad_rules.convert import layers_of
from dpflash.nn import LongContextLM
from dpflash.optimize import levels as optimization
from dpflash.optimize import wrapper as leveled
from dpflash.train.config import TrainingConfig

GRAD_SAMPLE_MODES = ["instantiate", "book_keeping", "ghost"]
KINDS = [{"grad_sample_mode": mode} for mode in GRAD_SAMPLE_MODES] + [
    {"clipping": "per_layer"},
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
every_level = pytest.mark.parametrize("level", LEVELS)

# Rounding of fp32 sums.
SLACK = 1e-6


def tokens(batch=8, length=6, rows=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, (batch, length), generator=generator)


@pytest.fixture
def quick(monkeypatch):
    """A compiler without code generation, which counts the graphs that it gets."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(leveled, "_BACKEND", counter)
    return counter


def flat(found):
    return torch.cat([t.double().flatten() for t in found.values()])


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(engine, model, optimizer, loader, loss, steps=10**6):
    """Losses of the first passes' batches."""
    found = []
    while len(found) < steps:
        for (batch,) in loader:
            losses = loss(model, batch)
            engine.backward(losses)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(losses.detach().mean()) if len(batch) else None)
            if len(found) == steps:
                break
    return found


# The argument


def test_an_unknown_level_is_refused_by_its_value(private, tiny_lm):
    model = tiny_lm()
    with pytest.raises(ValueError, match=r"optimize='fast': expected one of 'none', 'conserv"):
        private(model, optimize="fast")
    assert not any(isinstance(m, PrivateModule) for m in model.modules())


@pytest.mark.parametrize("mode", ["book_keeping", "ghost"])
def test_level_none_refuses_a_way_that_stores_nothing(mode, private, tiny_lm):
    with pytest.raises(
        ValueError, match=rf"grad_sample_mode='{mode}' with optimize='none'.*'conservative'"
    ):
        private(tiny_lm(), optimize="none", grad_sample_mode=mode)


@every_level
def test_make_private_with_epsilon_hands_the_level_on(level, tiny_lm, quick):
    model = tiny_lm()
    engine = dpflash.PrivacyEngine(accountant="rdp")
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(tokens(64)), batch_size=4),
        target_epsilon=8.0,
        target_delta=1e-3,
        epochs=1,
        max_grad_norm=1.0,
        optimize=level,
    )
    assert engine.optimization.level == level


def test_workers_agree_on_the_level(private, tiny_lm, monkeypatch):
    told = {}
    agree = Ranks.agree

    def heard(self, what, same, *args, **kwargs):
        told.setdefault(what, {}).update(same)
        return agree(self, what, same, *args, **kwargs)

    monkeypatch.setattr(Ranks, "agree", heard)
    private(tiny_lm(), optimize="balanced")
    assert told["make_private"]["optimize"] == "balanced"


# Conservative and none


def test_the_default_changes_nothing(private, tiny_lm, next_token_loss):
    torch.manual_seed(0)
    plain = tiny_lm()
    runs = []
    for options in (
        {},
        {"optimize": "conservative", "clipping": "flat", "grad_sample_mode": "auto"},
    ):
        engine, model, optimizer, loader = private(
            copy.deepcopy(plain), tokens(32), noise_multiplier=0.5, **options
        )
        assert torch.equal(model(tokens()), plain(tokens()))
        assert engine.optimization.clipping == "flat"
        assert not engine.optimization.autocast and not engine.optimization.compiled
        train(engine, model, optimizer, loader, next_token_loss, 12)
        runs.append(weights(model))
    assert torch.equal(*runs)
    assert not torch.equal(runs[0], weights(plain))


def test_level_none_stores_where_the_planner_would_not(private):
    modes = {}
    for level in ("none", "conservative"):
        torch.manual_seed(0)
        engine, model, *_ = private(nn.Linear(300, 300), optimize=level)
        model(torch.randn(4, 1, 300))
        modes[level] = {use.grad_sample_mode for use in engine.plan()}
    assert modes == {"none": {"instantiate"}, "conservative": {"book_keeping"}}


# Balanced


def test_balanced_multiplies_in_bfloat16_and_gives_float32(private, tiny_lm):
    torch.manual_seed(0)
    plain = tiny_lm()
    seen = []
    _, model, *_ = private(copy.deepcopy(plain), optimize="balanced")
    model.mix.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    found = model(tokens())
    # The first call is repeated with other samples.
    assert set(seen) == {torch.bfloat16} and found.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, plain(tokens()).float())
    with torch.no_grad():
        assert torch.equal(model(tokens()), found)


class Several(nn.Module):
    """Outputs in containers, some of them no floats."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x, *, extra=None):
        y = self.first(x)
        return {"y": y, "more": (y.argmax(-1), [y, None, "name"])}


def test_balanced_widens_all_outputs_and_nothing_else(private):
    _, model, *_ = private(Several(), optimize="balanced")
    found = model(torch.randn(3, 4))
    indices, (y, nothing, name) = found["more"]
    assert found["y"].dtype == y.dtype == torch.float32
    assert (indices.dtype, nothing, name) == (torch.int64, None, "name")


class Wide(nn.Module):
    """Gradients with many elements and rounding that adds up."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 64)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def square_losses(model, x):
    y = model(x)
    return 100 * y.square().flatten(1).mean(1)


def worst_change(private, sums, loss, *, model, seeds, **options):
    """The most that one of five samples moves the sum of a noiseless batch by."""
    worst = 0.0
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 7, 8, generator=generator)
        # The last one's terms cancel.
        x[4] = torch.cat([x[4, :1], -x[4, :1] * (1 + 1e-3), torch.zeros(5, 8)])

        def of(batch):
            engine, private_model, *_ = private(copy.deepcopy(model), **options)
            loss(engine, private_model, batch)
            wide = {torch.float32, torch.float64}
            assert {t.dtype for t in engine._step.sums.values()} <= wide
            return flat(sums(engine, private_model))

        whole = of(x)
        for i in range(5):
            rest = of(torch.cat([x[:i], x[i + 1 :]]))
            worst = max(worst, float((whole - rest).norm()))
    return worst


@every_kind
@pytest.mark.parametrize("region", [False, True], ids=["level", "own-region"])
def test_under_balanced_one_sample_moves_the_sum_by_at_most_the_bound(region, kind, private, sums):
    torch.manual_seed(0)

    def loss(engine, model, batch):
        # Whole steps in a region of the user's own are common.
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            engine.backward(square_losses(model, batch))

    worst = worst_change(
        private, sums, loss, model=Wide(), seeds=4, max_grad_norm=0.7, optimize="balanced", **kind
    )
    least = 0.3 if "clipping" in kind else 0.7 * (1 - SLACK)
    assert least <= worst <= 0.7 * (1 + SLACK)


def deep_sum(private, sums, batch, reduction, *, region=False, dtype=torch.float32, **options):
    """The released sum of a model whose gradients are rounded in many layers."""
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.Tanh())]
    model = nn.Sequential(*layers).to(dtype)
    engine, model, *_ = private(model, loss_reduction=reduction, max_grad_norm=0.7, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=region):
        losses = model(batch.to(dtype)).float().square().sum((1, 2))
    if reduction is None:
        engine.backward(losses)
    else:
        (losses.mean() if reduction == "mean" else losses.sum()).backward()
    return flat(sums(engine, model))


COARSE = {
    "region": {"region": True},
    "parameters": {"dtype": torch.bfloat16},
    "balanced": {"optimize": "balanced"},
}


@pytest.mark.parametrize("reduction", [None, "sum", "mean"], ids=str)
@pytest.mark.parametrize("coarse", ["float32", "region", "parameters", "balanced"])
def test_in_a_large_batch_one_sample_moves_the_sum_by_at_most_the_bound_or_is_refused(
    coarse, reduction, private, sums
):
    generator = torch.Generator().manual_seed(1)
    one, odd = (torch.randn(1, 3, 32, generator=generator) for _ in range(2))
    batch = torch.cat([one.expand(256, -1, -1), odd])
    options = COARSE.get(coarse, {})
    if reduction == "mean" and coarse != "float32":
        with pytest.raises(ValueError, match="loss_reduction='mean' with .*'sum'"):
            deep_sum(private, sums, batch, reduction, **options)
        return
    whole = deep_sum(private, sums, batch, reduction, **options)
    moved = (whole - deep_sum(private, sums, batch[:-1], reduction, **options)).norm()
    # 256 samples are added in float32.
    assert 0.69 <= moved <= 0.7 * (1 + 1e-4)


@every_level
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_norms_sums_and_gradients_stay_float32(level, clipping, private, tiny_lm, quick):
    engine, model, optimizer, _ = private(tiny_lm(), optimize=level, clipping=clipping)
    found = dpflash.losses.cross_entropy(model(tokens())[:, :-1], tokens()[:, 1:])
    assert found.dtype == torch.float32
    engine.backward(found)
    wide = (torch.float32, torch.float64)
    assert engine.diagnostics()["per_sample_norms"].dtype in wide
    held = engine._step.sums
    assert {held[p].dtype for p in model.parameters()} <= set(wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("level", ["balanced", "aggressive"])
def test_a_region_of_the_users_own_decides_the_dtype(level, private, tiny_lm, quick):
    torch.manual_seed(0)
    plain = tiny_lm()
    engine, model, *_ = private(copy.deepcopy(plain), optimize=level)
    outputs = {}
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            outputs[dtype] = model(tokens())
            assert torch.get_autocast_dtype("cpu") == dtype and torch.is_autocast_enabled("cpu")
            expected = plain(tokens()).float()
        assert outputs[dtype].dtype == torch.float32
        torch.testing.assert_close(outputs[dtype], expected, rtol=0, atol=1e-6)
    assert (outputs[torch.float16] - outputs[torch.bfloat16]).abs().max() > 1e-4
    assert engine.optimization.compiled == (level == "aggressive")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_model_of_another_dtype_is_left_without_autocast(dtype, private, tiny_lm):
    engine, model, *_ = private(tiny_lm().to(dtype), optimize="balanced")
    assert not engine.optimization.autocast
    assert f"left out: autocast, since parameters are {dtype}" in str(engine.optimization)
    assert model(tokens()).dtype == dtype


def test_a_device_without_bfloat16_is_refused_by_the_argument(private, tiny_lm, monkeypatch):
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    model = tiny_lm()
    with pytest.raises(ValueError, match="optimize='balanced': .*no bfloat16.*'conservative'"):
        private(model, optimize="balanced")
    assert not any(isinstance(m, PrivateModule) for m in model.modules())
    private(model, optimize="conservative")


# The model stays the same object, and comes back


class Leaf(nn.Module):
    """A leaf that only the generic rule covers."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.scale


def same(found, expected):
    """Whether two outputs are equal, bit for bit."""
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


ROOTS = {
    "module": Several,
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "rule": lambda: nn.Linear(4, 4),
    "leaf": Leaf,
}


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("level", ["balanced", "aggressive"])
def test_detach_gives_the_model_back_as_it_was(level, root, private, quick):
    torch.manual_seed(0)
    plain = ROOTS[root]()
    kind, keys, x = type(plain), list(plain.state_dict()), torch.randn(3, 4)
    expected = plain(x)
    engine, model, *_ = private(plain, optimize=level)
    assert model is plain and isinstance(model, kind) and list(model.state_dict()) == keys
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The compiler does not know the generic rule.
        outputs = tree_leaves(model(x))[0]
    torch.testing.assert_close(outputs, tree_leaves(expected)[0], rtol=2e-2, atol=2e-2)
    engine.backward(outputs.square().sum(1))
    assert len(engine._step.sums) == len(list(model.parameters()))
    _, unchanged, *_ = private(ROOTS[root](), optimize="conservative")
    assert inspect.signature(model.forward) == inspect.signature(unchanged.forward)
    assert type(model).__name__ == type(unchanged).__name__
    assert engine.detach(model) is plain
    assert type(plain) is kind and not any(isinstance(m, PrivateModule) for m in plain.modules())
    assert same(plain(x), expected)
    with pytest.raises(ValueError, match="optimization: this engine has no private model"):
        _ = engine.optimization
    again, *_ = private(plain, optimize="conservative")
    assert again.optimization.level == "conservative"


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("mode", ["deepcopy", "pickle", "copy"])
def test_copies_and_pickles_are_of_the_plain_model(mode, root, private):
    torch.manual_seed(0)
    plain = ROOTS[root]()
    kind, x = type(plain), torch.randn(3, 4)
    expected = plain(x)
    engine, model, *_ = private(plain, optimize="balanced")
    made = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda m: pickle.loads(pickle.dumps(m)),
        "copy": copy.copy,
    }[mode](model)
    assert type(made) is kind and list(made.state_dict()) == list(model.state_dict())
    if mode != "copy":
        assert not any(isinstance(m, PrivateModule) for m in made.modules())
        assert same(made(x), expected)
    engine.detach(model)
    assert type(model) is kind


# Aggressive


@pytest.mark.cases(0)
@pytest.mark.parametrize("region", [False, True], ids=["level", "own-region"])
def test_the_compiled_model_releases_what_the_eager_one_does(
    region, private, sums, distance, tiny_lm, next_token_loss, quick
):
    torch.manual_seed(0)
    plain = tiny_lm(rows=23) if region else LongContextLM(23, 8, 1, 2, max_seq_len=9)
    found = []
    for level in ("balanced", "aggressive"):
        engine, model, *_ = private(
            copy.deepcopy(plain), max_grad_norm=0.2, clipping="per_layer", optimize=level
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=region):
            engine.backward(next_token_loss(model, tokens(rows=23)))
        found.append(sums(engine, model))
    assert quick.frame_count == 1 and engine.optimization.compiled
    assert distance(found[1], found[0]) <= 1e-5


@pytest.mark.cases(0)
def test_the_real_compiler_gives_the_sums_of_the_eager_model_and_trains(
    private, sums, distance, next_token_loss, tiny_lm
):
    torch.compiler.reset()
    torch.manual_seed(0)
    plain, found = tiny_lm(rows=11, width=16), []
    for level in ("balanced", "aggressive"):
        engine, model, optimizer, loader = private(
            copy.deepcopy(plain),
            tokens(64),
            batch_size=8,
            lr=1.0,
            clipping="per_layer",
            optimize=level,
        )
        engine.backward(next_token_loss(model, tokens()))
        found.append(sums(engine, model))
        optimizer.zero_grad()
    assert engine.optimization.compiled
    # The compiler keeps in fp32 what eager operations round to bfloat16 in between.
    assert distance(found[1], found[0]) <= 1e-2
    losses = [x for x in train(engine, model, optimizer, loader, next_token_loss, 60) if x]
    assert engine.optimization.compiled
    assert sum(losses[-10:]) < 0.98 * sum(losses[:10])


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_under_aggressive_one_sample_moves_the_sum_by_at_most_the_bound(
    clipping, private, sums, quick
):
    torch.manual_seed(0)
    engine, model, optimizer, _ = private(
        Wide(), max_grad_norm=0.7, clipping=clipping, optimize="aggressive"
    )

    def of(batch):
        engine.backward(square_losses(model, batch))
        found = flat(sums(engine, model))
        optimizer.zero_grad()
        return found

    worst = 0.0
    for seed in range(5):
        x = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(seed))
        whole, two = of(x), of(x[:2])
        changes = (whole - two, whole - of(x[1:]), two - of(x[:1]), of(x[:1]))
        worst = max(worst, *(float(change.norm()) for change in changes))
    assert engine.optimization.compiled
    assert 0.3 <= worst <= 0.7 * (1 + SLACK)


@pytest.mark.cases(0)
def test_ten_batch_sizes_compile_twice(private, sums, distance, tiny_lm, next_token_loss, quick):
    torch.manual_seed(0)
    plain = tiny_lm()
    compiled, model, optimizer, _ = private(copy.deepcopy(plain), optimize="aggressive")
    eager, reference, other, _ = private(
        copy.deepcopy(plain), clipping="per_layer", optimize="balanced"
    )
    for size in (5, 9, 2, 1, 7, 3, 4, 8, 6, 11, 0, 5, 1):
        batch = tokens(size)
        if size:
            compiled.backward(next_token_loss(model, batch))
            eager.backward(next_token_loss(reference, batch))
            assert distance(sums(compiled, model), sums(eager, reference)) <= 1e-5
        else:
            assert model(batch).shape == (0, 6, 11)
        optimizer.zero_grad()
        other.zero_grad()
    assert compiled.optimization.compiled
    # A batch of one sample is a graph of its own.
    assert quick.frame_count == 2


@pytest.mark.cases(0)
def test_models_do_not_use_up_each_others_recompilations(private, tiny_lm, next_token_loss, quick):
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        engine, model, *_ = private(nn.Linear(3, 2), optimize="aggressive")
        engine.backward(model(torch.randn(4, 3)).square().mean(1))
        assert engine.optimization.compiled


def test_evaluation_is_not_compiled(private, tiny_lm, quick):
    _, model, *_ = private(tiny_lm(), optimize="aggressive")
    with torch.no_grad():
        model(tokens())
    assert quick.frame_count == 0


@pytest.mark.parametrize(
    ("asked", "clipping"),
    [
        ({}, "per_layer"),
        ({"clipping": "flat"}, "flat"),
        ({"grad_sample_mode": "instantiate"}, "flat"),
        ({"grad_sample_mode": "ghost"}, "flat"),
    ],
    ids=lambda asked: str(asked),
)
def test_a_clipping_that_is_asked_for_wins(asked, clipping, private, tiny_lm, quick):
    engine, *_ = private(tiny_lm(tied=False), optimize="aggressive", **asked)
    assert engine.optimization.clipping == engine._run.settings.clipping == clipping
    names = {group.name for group in engine.groups()}
    assert (names == {"all"}) == (clipping == "flat")
    (line,) = (c for c in engine.optimization.changes if c.startswith("clipping: "))
    assert clipping in line
    assert ("as asked for" in line) == bool(asked)
    for level in ("none", "conservative", "balanced"):
        assert private(tiny_lm(), optimize=level)[0].optimization.clipping == "flat"


def left_out(engine):
    assert not engine.optimization.compiled
    (line,) = (c for c in engine.optimization.changes if c.startswith("left out: torch.compile"))
    return line


def test_what_cannot_be_compiled_is_left_out_with_its_reason(private, tiny_lm, quick):
    def line(model=None, **options):
        return left_out(private(model or tiny_lm(), optimize="aggressive", **options)[0])

    assert "grad_sample_mode='ghost'" in line(grad_sample_mode="ghost")
    assert "grad_sample_mode='book_keeping'" in line(grad_sample_mode="book_keeping")
    assert "memory_budget=1000" in line(memory_budget=1000)
    compiled = tiny_lm()
    compiled.mix.requires_grad_(False).compile(backend="eager")
    assert "compiled already" in line(compiled)
    frozen = nn.Linear(3, 3).requires_grad_(False)
    inner = nn.Sequential(torch.compile(frozen, backend="eager"), nn.Linear(3, 3))
    assert "compiled already" in line(inner)
    plain = tiny_lm()
    workers = SimpleNamespace(everyone=object())
    asked = optimization.Asked("aggressive", None, "auto", 4, 10**9, workers)
    chosen = optimization.choose(asked, plain, layers_of(plain), list(plain.parameters()))
    assert not chosen.compiled and "several ranks" in str(chosen)


def test_a_compiler_that_fails_is_left_with_a_warning(
    private, sums, distance, tiny_lm, next_token_loss, monkeypatch
):
    def fails(graph, inputs):
        raise RuntimeError("no such instruction")

    torch.compiler.reset()
    monkeypatch.setattr(leveled, "_BACKEND", fails)
    torch.manual_seed(0)
    plain, found = tiny_lm(), []
    for level in ("balanced", "aggressive"):
        engine, model, optimizer, _ = private(
            copy.deepcopy(plain), clipping="per_layer", optimize=level
        )
        if level == "aggressive":
            assert engine.optimization.compiled
            with pytest.warns(UserWarning, match=r"goes on without torch\.compile, .*failed"):
                losses = next_token_loss(model, tokens())
            assert "no such instruction" in left_out(engine)
            assert "batch sizes do not recompile" not in str(engine.optimization)
        else:
            losses = next_token_loss(model, tokens())
        engine.backward(losses)
        found.append(sums(engine, model))
        optimizer.zero_grad()
        with warnings.catch_warnings():
            # It is not tried again.
            warnings.simplefilter("error")
            next_token_loss(model, tokens())
    assert torch.equal(flat(found[0]), flat(found[1]))


@pytest.mark.cases(0)
def test_an_error_of_the_model_is_its_own_and_leaves_the_compiler(private, next_token_loss, quick):
    engine, model, *_ = private(LongContextLM(23, 8, 1, 2, max_seq_len=4), optimize="aggressive")
    with pytest.raises(dpflash.PrivateRefusal, match="than max_seq_len=4"):
        model(tokens(rows=23))
    assert engine.optimization.compiled
    engine.backward(next_token_loss(model, tokens(length=5, rows=23)))
    assert quick.frame_count == 1


def test_a_forked_process_goes_on_without_the_compiler(private, tiny_lm, quick):
    engine, *_ = private(tiny_lm(), optimize="aggressive")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        os._exit(0 if "forked" in str(engine.optimization) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.optimization.compiled


@pytest.mark.cases(0)
def test_a_compiled_model_has_no_plan_and_says_what_to_do(
    private, tiny_lm, next_token_loss, quick
):
    engine, model, *_ = private(tiny_lm(), optimize="aggressive")
    message = "plan.. with optimize='aggressive': .*nothing is planned.*Pass optimize='balanced'"
    with pytest.raises(ValueError, match=message):
        engine.plan()
    # A call that is not compiled leaves shapes behind.
    model(tokens(0))
    next_token_loss(model, tokens())
    with pytest.raises(ValueError, match=message):
        engine.plan()
    engine, model, *_ = private(tiny_lm(), optimize="aggressive", grad_sample_mode="book_keeping")
    next_token_loss(model, tokens())
    assert {use.grad_sample_mode for use in engine.plan()} == {"book_keeping"}


class WeightsFirst(nn.Module):
    """Its first argument is of no sample."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, weights, x):
        return self.inner(x * weights[:, None])


def test_the_drawn_batch_tells_its_size_to_the_compiler(private, quick):
    torch.manual_seed(0)
    plain, data, found = WeightsFirst(), torch.randn(24, 7, 3), []
    for level in ("balanced", "aggressive"):
        engine, model, optimizer, loader = private(
            copy.deepcopy(plain), data, clipping="per_layer", optimize=level
        )
        for (x,) in loader:
            engine.backward(model(torch.arange(7.0), x).square().mean((1, 2)))
            optimizer.step()
            optimizer.zero_grad()
        assert engine.optimization.compiled == (level == "aggressive")
        found.append(weights(model))
    assert quick.frame_count
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


# All levels


@pytest.mark.usefixtures("one_batch_a_draw")
@every_level
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_parts_of_a_batch_add_up_and_empty_ones_count(
    level, clipping, private, tiny_lm, distance, next_token_loss, quick
):
    torch.manual_seed(0)
    plain, found = tiny_lm(), []
    for physical in (None, 2):
        engine, model, optimizer, loader = private(
            copy.deepcopy(plain),
            tokens(40),
            batch_size=2,
            max_grad_norm=0.2,
            clipping=clipping,
            physical_batch_size=physical,
            optimize=level,
        )
        sizes = []
        for (batch,) in loader:
            sizes.append(len(batch))
            engine.backward(next_token_loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.releases == 20 and len(sizes) >= 20
        assert max(sizes) == (2 if physical else max(sizes)) and (physical or max(sizes) > 2)
        found.append({n: p.detach() for n, p in model.named_parameters()})
    assert distance(found[1], found[0]) <= 1e-5


def test_no_level_changes_what_a_step_costs(private, tiny_lm, next_token_loss, quick):
    spent, noise = [], []
    for level in LEVELS:
        torch.manual_seed(0)
        engine, model, optimizer, loader = private(
            tiny_lm(), tokens(32), noise_multiplier=1.5, max_grad_norm=0.5, optimize=level
        )
        train(engine, model, optimizer, loader, next_token_loss, 5)
        state = engine.accountant.state_dict()
        spent.append((repr(state), engine.get_epsilon(1e-5), engine.neighboring_relation))
        assert engine.groups().sensitivity == pytest.approx(0.5)
        noise.append(optimizer.noise_multiplier * optimizer.max_grad_norm)
        assert "privacy: epsilon is that of every other level" in str(engine.optimization)
    assert len(set(spent)) == 1 and set(noise) == {0.75}


@every_level
def test_each_level_adds_the_noise_of_every_other_level(level, private, tiny_lm, quick):
    """An empty batch is released as noise alone, from the same stream at the same size."""
    torch.manual_seed(0)
    plain, found = tiny_lm(), []
    for chosen in ("conservative", level):
        _, model, optimizer, _ = private(
            copy.deepcopy(plain), noise_multiplier=1.0, clipping="per_layer", optimize=chosen
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        found.append(weights(model))
    assert torch.equal(*found) and not torch.equal(found[0], weights(plain))


@pytest.mark.usefixtures("one_batch_a_draw")
def test_the_noise_of_a_compiled_model_never_repeats(private, quick):
    """With losses of weight 0 what is released is noise alone."""
    options = {"noise_multiplier": 1.0, "verify_first_batch": False, "optimize": "aggressive"}
    _, model, optimizer, loader = made = private(nn.Linear(8, 64), torch.zeros(16, 8), **options)
    engine, released = made[0], []
    for (x,) in loader:
        engine.backward(0 * model(x).square().mean(1))
        optimizer.step()
        released.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.zero_grad()
    assert len(released) == 4 and engine.optimization.compiled and quick.frame_count
    table = torch.stack(released)
    assert table.flatten().unique().numel() == table.numel()


@pytest.mark.usefixtures("one_batch_a_draw")
def test_a_resumed_run_may_have_another_level(private, tiny_lm, next_token_loss, tmp_path, quick):
    def resumed(expected, **options):
        made = private(tiny_lm(), tokens(32), noise_multiplier=1.0, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made[0].load_checkpoint(tmp_path / "checkpoint")
        warned = [str(w.message) for w in caught if "passed to make_private" in str(w.message)]
        assert [t.split()[0] for t in warned] == expected
        return made

    engine, model, optimizer, loader = private(tiny_lm(), tokens(32), noise_multiplier=1.0)
    train(engine, model, optimizer, loader, next_token_loss, 6)  # with trials
    released = optimizer.releases
    engine.save_checkpoint(tmp_path / "checkpoint")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # As of a clipping that was asked for.
        resumed(["clipping"], optimize="aggressive")
        resumed([], optimize="aggressive", clipping="flat")
        made = resumed([], optimize="balanced")
        assert made[0].optimization.level == "balanced"
        assert made[2].releases == released > 0
        train(*made, next_token_loss, 6)
        assert made[2].releases > released


# The command


def test_the_config_of_a_job_knows_the_levels():
    assert TrainingConfig().optimize == "conservative" and TrainingConfig().clipping == "flat"
    assert TrainingConfig(optimize="aggressive").clipping == "per_layer"
    assert TrainingConfig(optimize="aggressive", clipping="flat").clipping == "flat"
    assert TrainingConfig(optimize="aggressive", grad_sample_mode="instantiate").clipping == "flat"
    with pytest.raises(ValueError, match=r"optimize='fast': expected one of 'none'"):
        TrainingConfig(optimize="fast")


@pytest.mark.parametrize("level", ["none", "balanced"])
def test_dpflash_train_takes_a_level(level, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"document {number} " * 4)
    tiny = {
        **{"seq-len": 16, "batch-size": 6, "physical-batch-size": 4, "steps": 2, "delta": 1e-3},
        **{"embed-dim": 8, "layers": 1, "heads": 1, "eval-windows": 4, "accountant": "rdp"},
    }
    options = [str(x) for name, value in tiny.items() for x in (f"--{name}", value)]
    out = tmp_path / "out"
    arguments = ["train", "--data", str(folder), "--out", str(out), "--no-baseline", *options]
    assert main([*arguments, "--optimize", level]) == 0
    printed = capsys.readouterr().out
    assert f"optimize={level!r}" in printed and "privacy: epsilon is that of" in printed
    assert ("bfloat16" in printed) == (level == "balanced")
    report = (out / "report.json").read_text()
    assert f'"optimize": "{level}"' in report
    assert main(["train", "--resume", str(out), "--optimize", "aggressive"]) != 0
    assert f"the run to resume has --optimize '{level}'" in capsys.readouterr().err
