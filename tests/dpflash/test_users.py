"""A user with several entries is one privacy unit: make_private(unit_of=, examples_per_unit=)."""

import copy
import json
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import accounting
from dpflash.privacy.ledger import Ledger

HUGE = 1e6
KINDS = [{"grad_sample_mode": mode} for mode in ("instantiate", "book_keeping", "ghost")]
KINDS.append({"clipping": "per_layer"})
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))


class Scaled(nn.Module):
    """Parameters of its own, and a layer below it."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return self.inner(x) * self.scale


class Attended(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


LAYERS = {
    "linear": lambda: nn.Linear(8, 8),
    "norms": lambda: nn.Sequential(nn.LayerNorm(8), nn.RMSNorm(8)),
    "conv": lambda: nn.Conv1d(6, 6, 3, padding=1),
    "lstm": lambda: First(nn.LSTM(8, 8, batch_first=True)),
    "owner": lambda: Scaled(8),
    "attention": lambda: First(dpflash.nn.MultiheadAttention(8, 2)),
    "sinks": lambda: First(dpflash.nn.MultiheadAttention(8, 2, attention_sinks=True)),
    "torch-attention": lambda: Attended(nn.MultiheadAttention(8, 2, batch_first=True)),
}


class Net(nn.Module):
    """Embedding, one layer that is tested, and a head, which a chunked loss may have."""

    def __init__(self, layer, chunked=False):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = LAYERS[layer]()
        self.head = dpflash.nn.LinearCrossEntropy(8, 11) if chunked else nn.Linear(8, 11)

    def forward(self, tokens):
        hidden = self.layer(self.embedding(tokens))
        if isinstance(self.head, dpflash.nn.LinearCrossEntropy):
            return self.head(hidden, tokens.flip(1))
        return dpflash.losses.cross_entropy(self.head(hidden), tokens.flip(1))


def entries(count=24, users=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (count, 6), generator=generator)
    # The last user has one entry, the others several.
    return tokens, [index % (users - 1) for index in range(count - 1)] + [users - 1]


def private(model, tokens, owners, *, batch_size=3, engine=None, **options):
    engine = engine or dpflash.PrivacyEngine(seed=5)
    dataset = TensorDataset(tokens, torch.arange(len(tokens)))
    given = {"noise_multiplier": 0.0, "max_grad_norm": HUGE, "examples_per_unit": 2, **options}
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(dataset, batch_size=batch_size),
        unit_of=owners,
        **given,
    )
    return engine, *made


def released(run, draws=3):
    """The sum of each draw, and the entries that each of its users had in it."""
    engine, model, optimizer, loader = run
    found, users = [], []
    for tokens, index in loader:
        engine.backward(model(tokens))
        mark = loader.tracker.current
        spans = () if mark.is_trial else mark.units.spans
        users += [index[a:b].tolist() for a, b in spans if a != b]
        if loader.is_last:
            optimizer.step()
            size = loader.expected_batch_size
            found.append(({n: p.grad * size for n, p in model.named_parameters()}, users))
            optimizer.zero_grad()
            users = []
            if len(found) == draws:
                break
    return found


def gradient(model, rows):
    grads = torch.autograd.grad(model(rows).mean(), list(model.parameters()))
    return {n: g for (n, _), g in zip(model.named_parameters(), grads, strict=True)}


def norm(grads):
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))


@pytest.mark.parametrize("chunked", [False, True], ids=["logits", "chunked"])
@pytest.mark.parametrize("layer", LAYERS)
@every_kind
def test_the_sum_is_over_users_of_the_gradient_of_their_mean_loss(layer, kind, chunked):
    torch.manual_seed(1)
    model = Net(layer, chunked).double()
    plain = copy.deepcopy(model)
    tokens, owners = entries()
    for sums, users in released(private(model, tokens, owners, exact=False, **kind)):
        assert {len(own) for own in users} <= {1, 2}
        assert all(len({owners[i] for i in own}) == 1 for own in users)
        expected = {n: torch.zeros_like(p) for n, p in plain.named_parameters()}
        for own in users:
            for name, grad in gradient(plain, tokens[own]).items():
                expected[name] += grad
        for name, total in sums.items():
            assert float((total - expected[name]).norm()) <= 1e-10 * (1 + norm(expected))


@pytest.mark.parametrize("layer", ["linear", "lstm", "attention"])
@every_kind
def test_one_user_more_moves_the_sum_by_at_most_the_bound(layer, kind):
    # All users are drawn, and each user's gradient is far above the bound.
    bound, users = 1e-3, 7
    tokens, owners = entries(users=users)
    totals = []
    for kept in (users, users - 1):
        torch.manual_seed(1)
        chosen = [i for i, owner in enumerate(owners) if owner < kept]
        own = [owners[i] for i in chosen]
        rate = {"sample_rate": 1.0, "steps_per_epoch": 1, "batch_size": users}
        run = private(
            Net(layer),
            tokens[chosen],
            own,
            max_grad_norm=bound,
            examples_per_unit=9,
            **rate,
            **kind,
        )
        ((sums, _),) = released(run, 1)
        totals.append(sums)
    moved = {name: totals[0][name] - totals[1][name] for name in totals[0]}
    # The released sums are rounded to float32.
    assert 0.3 * bound <= norm(moved) <= bound * (1 + 1e-5)


@every_kind
def test_padding_rows_of_users_count_for_nothing_even_if_their_losses_are_nan(kind):
    tokens, owners = entries()
    sums, padded = [], False
    for poison in (False, True):
        torch.manual_seed(1)
        sums.append([])
        options = {**kind, "verify_first_batch": False}
        engine, model, optimizer, loader = private(Net("linear"), tokens, owners, **options)
        for batch, _ in loader:
            losses = model(batch)
            if poison:
                losses = losses * torch.where(loader.is_real, 1.0, math.nan)
            padded |= not bool(loader.is_real.all())
            engine.backward(losses)
            optimizer.step()
            sums[-1] += [p.grad.clone() for p in model.parameters()] if loader.is_last else []
            optimizer.zero_grad()
    assert padded and len(sums[0]) > 3
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


def test_a_model_that_mixes_users_is_refused_and_one_that_mixes_a_users_entries_is_not():
    class Centred(nn.Module):
        def __init__(self, by_user):
            super().__init__()
            self.inner, self.by_user = Net("linear"), by_user

        def forward(self, tokens):
            losses = self.inner(tokens)
            if self.by_user:
                pairs = losses.view(-1, 2)
                return (pairs - 0.5 * pairs.mean(1, keepdim=True)).flatten()
            return losses - 0.5 * losses.mean()

    tokens, owners = entries(count=48, users=12)
    for by_user in (True, False):
        engine, model, optimizer, loader = private(
            Centred(by_user), tokens, owners, batch_size=8, max_grad_norm=1.0
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not by_user:
                with pytest.raises(RuntimeError, match="samples whose losses have weight 0|chang"):
                    for batch, _ in loader:
                        engine.backward(model(batch))
                        optimizer.step()
                continue
            for _ in range(4):
                for batch, _ in loader:
                    engine.backward(model(batch))
                    optimizer.step()
                    optimizer.zero_grad()
        assert engine.verified is True


def test_rows_in_another_order_are_refused():
    tokens, owners = entries()
    engine, model, _, loader = private(Net("linear"), tokens, owners)
    with pytest.raises(RuntimeError, match="another order"):
        for batch, _ in loader:
            engine.backward(model(batch.flip(0)))


def test_another_number_of_rows_is_refused_in_words_of_users():
    tokens, owners = entries()
    _, model, _, loader = private(Net("linear"), tokens, owners)
    batch, _ = next(iter(loader))
    others = tokens[: len(batch) - 1]
    with pytest.raises(dpflash.PrivateRefusal, match=r"the rows of users \(unit_of\)"):
        model(others)
    with torch.no_grad():
        assert len(model(others)) == len(others)


def test_losses_of_another_number_than_rows_are_refused():
    tokens, owners = entries()
    engine, model, _, loader = private(Net("linear"), tokens, owners)
    batch, _ = next(iter(loader))
    with pytest.raises(dpflash.PrivateRefusal, match="another number of entries.*losses.view"):
        engine.backward(model(batch).view(-1, 2).mean(1))


def test_a_batch_that_is_not_of_the_loader_is_not_released():
    tokens, owners = entries()
    engine, model, optimizer, _ = private(Net("linear"), tokens, owners, noise_multiplier=1.0)
    with pytest.raises(RuntimeError, match="the batch is not of the private loader"):
        engine.backward(model(tokens[:4]))
    assert engine.get_epsilon(1e-5) == 0
    with pytest.raises(ValueError, match="foreign_batches=True with unit_of or Pairs"):
        private(Net("linear"), tokens, owners, foreign_batches=True)


def test_other_loaders_over_its_sampler_are_refused():
    tokens, owners = entries()
    *_, loader = private(Net("linear"), tokens, owners)
    with pytest.raises(ValueError, match="are units, not entries of the dataset"):
        next(iter(DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"examples_per_unit": None}, "examples_per_unit=None: unit_of and examples_per_unit"),
        ({"examples_per_unit": 0}, "examples_per_unit=0"),
        ({"sampling": "shuffled"}, "sampling='shuffled' with unit_of"),
        ({"loss_reduction": "mean"}, "loss_reduction='mean' with unit_of"),
        ({"unit_sampling": "user"}, "unit_sampling='user'"),
        ({"unit_sampling": "example", "max_batch_size": 9}, "max_batch_size=9 with unit_sampling"),
        ({"unit_sampling": "example", "sampling": "fixed_size"}, "sampling='fixed_size' with"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_that_do_not_go_with_users_are_refused(options, message):
    tokens, owners = entries()
    with pytest.raises(ValueError, match=message):
        private(Net("linear"), tokens, owners, **options)


def test_entries_drawn_one_by_one_are_at_most_k_of_each_user_and_accounted_for():
    tokens, owners = entries()
    engine, model, optimizer, loader = private(
        Net("linear"), tokens, owners, noise_multiplier=1.0, unit_sampling="example"
    )
    seen = set()
    for _ in range(10):
        for batch, index in loader:
            seen |= set(index[loader.is_real].tolist())
            engine.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
    counts = [sum(owners[i] == user for i in seen) for user in range(7)]
    assert counts == [2] * 6 + [1] and loader.dataset_size == 13
    accountant = accounting.create_accountant("contour", neighboring_relation="zero_out")
    event = accounting.UnitPoissonGaussian(
        noise_multiplier=1.0, sample_rate=3 / 13, examples_per_unit=2, relation="zero_out"
    )
    accountant.compose(event, 10 * loader.steps_per_epoch)
    assert engine.get_epsilon(1e-5) == accountant.get_epsilon(1e-5)
    assert "each clipped by itself" in engine.public.unit


def test_entries_of_several_users_have_the_fixed_graph_relation():
    tokens, owners = entries()
    both = [(owner, (owner + 1) % 7) for owner in owners]
    options = {"noise_multiplier": 1.0, "unit_sampling": "example", "dataset_size": 12}
    engine, *_, loader = private(Net("linear"), tokens, both, **options)
    counts = torch.zeros(7)
    for entry in loader.dataset.indices:
        counts[list(both[entry])] += 1
    assert counts.max() == 2
    # Without one user other entries would be kept, so adding a user is no neighbor.
    assert engine.neighboring_relation == "zero_out"
    assert engine.privacy_unit == "user, fixed graph"
    assert "arXiv:2503.03622" in engine.public.unit


def test_the_compiler_is_left_out_where_units_are_no_rows():
    # Compiled handles are those of rows.
    tokens, owners = entries()
    run = private(Net("linear"), tokens, owners, optimize="aggressive")
    assert not run[0].optimization.compiled and "unit is a user" in str(run[0].optimization)
    assert len(released(run, 1)) == 1


def test_rate_and_divisor_count_users():
    tokens, owners = entries()
    engine, *_, loader = private(Net("linear"), tokens, owners, noise_multiplier=1.0)
    assert (loader.dataset_size, loader.expected_batch_size) == (7, 3.0)
    assert loader.sample_rate == 3 / 7 and loader.steps_per_epoch == 3
    assert "user (unit_of), of which each draw uses at most 2 entries" in str(engine.public)
    assert engine.privacy_unit == "user"


def test_the_ledger_names_the_unit_and_refuses_another(tmp_path):
    tokens, owners = entries()
    path = tmp_path / "ledger.jsonl"
    engine = dpflash.PrivacyEngine(ledger=path)
    noisy = {"noise_multiplier": 1.0}
    with pytest.raises(ValueError, match="unit_name=None with unit_of and ledger=.*'patient'"):
        private(Net("linear"), tokens, owners, engine=engine, **noisy)
    patients = {"unit_name": "patient", **noisy}
    run = private(Net("linear"), tokens, owners, engine=engine, **patients)
    released(run, 1)
    assert json.loads(path.read_text())["unit"] == engine.privacy_unit == "user: patient"
    assert "user: patient (unit_of), of which" in str(engine.public)
    other = dpflash.PrivacyEngine(ledger=path)
    model = Net("linear")
    with pytest.raises(ValueError, match="unit is a 'sample' here, and a 'user: patient' in the"):
        other.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(tokens), batch_size=3),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    hospitals = dpflash.PrivacyEngine(ledger=path)
    with pytest.raises(ValueError, match="a 'user: hospital' here, and a 'user: patient' in the"):
        private(
            model, tokens, owners[::-1], engine=hospitals, **{**patients, "unit_name": "hospital"}
        )
    # More entries of patients are entries of patients.
    again = dpflash.PrivacyEngine(ledger=path)
    given = (model, tokens, owners[1:] + [99])
    with pytest.raises(ValueError, match="with unit_of or Pairs: a unit may be in several"):
        private(*given, engine=again, foreign_batches=True, **patients)
    private(*given, engine=again, **patients)


def test_a_run_goes_on_by_the_old_name_of_its_users_and_writes_the_corrected_one(tmp_path):
    tokens, owners = entries()
    path = tmp_path / "ledger.jsonl"

    def engine_of(name):
        engine = dpflash.PrivacyEngine(ledger=path)
        run = private(
            Net("linear"), tokens, owners, noise_multiplier=1.0, engine=engine, unit_name=name
        )
        released(run, 1)
        return engine

    engine_of("patient_id")
    Ledger(path).rename("patient")
    for name in ("patient", "patient_id"):
        engine = engine_of(name)
        assert engine.privacy_unit == "user: patient"
        assert engine.public.unit.startswith("user: patient (unit_of)")
    units = [line.unit for line in Ledger(path).lines if line.note is None]
    assert units == ["user: patient_id", "user: patient", "user: patient"]
    with pytest.raises(ValueError, match="a 'user: hospital' here, and a 'user: patient' in the"):
        engine_of("hospital")


def test_users_without_a_name_are_read_and_continued_once_the_ledger_names_them(tmp_path):
    tokens, owners = entries()
    path = tmp_path / "ledger.jsonl"
    event = accounting.PoissonGaussian(relation="zero_out", noise_multiplier=1.0, sample_rate=0.1)
    Ledger(path).append(run="a", event=event, accountant="contour", unit="user")
    engine = dpflash.PrivacyEngine(ledger=path)
    assert engine.privacy_unit == "user" and engine.get_epsilon(1e-5) > 0
    given = {"noise_multiplier": 1.0, "unit_name": "patient"}
    with pytest.raises(ValueError, match="a 'user: patient' here, and a 'user' in the releases"):
        private(Net("linear"), tokens, owners, engine=engine, **given)
    Ledger(path).rename("patient")
    engine = dpflash.PrivacyEngine(ledger=path)
    with pytest.raises(ValueError, match="unit_name=None with unit_of and ledger"):
        private(Net("linear"), tokens, owners, engine=engine, **{**given, "unit_name": None})
    private(Net("linear"), tokens, owners, engine=engine, **given)


def test_an_engine_refuses_another_grouping_of_users_that_have_no_name():
    tokens, owners = entries()
    engine = dpflash.PrivacyEngine(seed=5)
    others = [*owners[1:], owners[0]]

    def second(units, **options):
        run = private(Net("linear"), tokens, units, noise_multiplier=1.0, engine=engine, **options)
        released(run, 1)
        engine.detach(run[1])

    second(owners)
    second([f"user {owner}" for owner in owners])
    with pytest.raises(ValueError, match="unit_of groups the entries otherwise .*unit_name="):
        second(others)
    named = dpflash.PrivacyEngine(seed=5)
    for units in (owners, others):
        run = private(
            Net("linear"), tokens, units, noise_multiplier=1.0, engine=named, unit_name="patient"
        )
        released(run, 1)
        named.detach(run[1])


@pytest.mark.parametrize("name", ["", " patient", "two\nlines", 3])
def test_a_unit_name_is_a_word(name):
    with pytest.raises(ValueError, match="unit_name=.*expected a word"):
        dpflash.PrivacyConfig(1.0, unit_of=[0], examples_per_unit=1, unit_name=name)
    with pytest.raises(ValueError, match="unit_name='patient' without unit_of"):
        dpflash.PrivacyConfig(1.0, unit_name="patient")


def test_a_resumed_run_draws_the_same_entries_of_users(tmp_path):
    tokens, owners = entries()
    model = Net("linear")
    run = private(model, tokens, owners, noise_multiplier=1.0)
    released(run, 1)
    run[0].save_checkpoint(tmp_path / "state")
    later = [users for _, users in released(run, 2)]
    resumed = private(Net("linear"), tokens, owners, noise_multiplier=1.0)
    resumed[0].load_checkpoint(tmp_path / "state")
    assert [users for _, users in released(resumed, 2)] == later


def test_a_resumed_run_has_the_same_users(tmp_path):
    tokens, owners = entries()
    run = private(Net("linear"), tokens, owners, noise_multiplier=1.0)
    released(run, 1)
    run[0].save_checkpoint(tmp_path / "state")
    others = [*owners[1:], owners[0]]
    resumed = private(Net("linear"), tokens, others, noise_multiplier=1.0)
    words = "does not fit the data loader.*units have changed"
    with pytest.raises(dpflash.PrivateRefusal, match=words) as caught:
        resumed[0].load_checkpoint(tmp_path / "state")
    assert not any(made[3].plan.grouping in str(caught.value) for made in (run, resumed))
    renamed = [f"user {owner}" for owner in owners]
    resumed = private(Net("linear"), tokens, renamed, noise_multiplier=1.0)
    resumed[0].load_checkpoint(tmp_path / "state")


def test_views_of_a_sample_are_averaged_before_they_are_clipped():
    # Each entry twice, as two views of it.
    tokens, _ = entries(count=6)
    owners = [*range(6), *range(6)]
    torch.manual_seed(1)
    model = Net("linear").double()
    plain = copy.deepcopy(model)
    run = private(model, torch.cat([tokens, tokens.flip(1)]), owners, max_grad_norm=0.1)
    ((sums, users),) = released(run, 1)
    both = torch.cat([tokens, tokens.flip(1)])
    expected = {n: torch.zeros_like(p) for n, p in plain.named_parameters()}
    for own in users:
        assert len(own) == 2
        grads = gradient(plain, both[own])
        for name, grad in grads.items():
            expected[name] += grad * min(1, 0.1 / norm(grads))
    for name, total in sums.items():
        assert float((total - expected[name]).norm()) <= 1e-7 * norm(expected)


class Placed(nn.Module):
    """Positions that all rows share, and a layer of them."""

    def __init__(self, positions):
        super().__init__()
        self.tokens, self.places, self.of_places = (
            nn.Embedding(9, 4),
            nn.Embedding(6, 4),
            nn.Linear(4, 4),
        )
        self.positions = positions

    def forward(self, x):
        return (
            (self.tokens(x) + self.of_places(self.places(self.positions(x)))).square().mean((1, 2))
        )


@pytest.mark.parametrize(
    "positions",
    [
        lambda x: torch.arange(x.shape[1])[None],
        lambda x: torch.arange(x.shape[1]),
        lambda x: torch.arange(x.shape[1]).expand(x.shape),
    ],
    ids=["one-row", "no-rows", "all-rows"],
)
@every_kind
def test_positions_that_all_rows_share_have_each_users_gradient(
    kind, positions, private, sums, distance
):
    torch.manual_seed(0)
    plain, rows = Placed(positions), torch.randint(9, (24, 5))
    options = {"unit_of": [i % 8 for i in range(24)], "examples_per_unit": 2, "unit_name": "user"}
    engine, model, _, loader = private(
        copy.deepcopy(plain), rows, max_grad_norm=HUGE, exact=False, verify_first_batch=False,
        **options, **kind,
    )  # fmt: skip
    (x,) = next(iter(loader))
    engine.backward(model(x))
    engine._run.backward.forward.units.mean(plain(x)).sum().backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    assert distance(sums(engine, model), expected) <= 1e-5
