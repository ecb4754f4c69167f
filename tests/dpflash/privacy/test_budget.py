"""The privacy budget: the step that would exceed it is refused before anything of it happens."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash import BudgetSpent, PrivacyBudget, PrivacyEngine, PrivateRefusal
from dpflash.accounting import (
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    RDPAccountant,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
    create_accountant,
)
from dpflash.accounting.registry import ACCOUNTANTS
from dpflash.privacy import spending as spending_module
from dpflash.privacy.ledger import Ledger

try:
    import opacus
    from opacus.utils.batch_memory_manager import BatchMemoryManager
except ImportError:
    opacus = None

needs_opacus = pytest.mark.skipif(opacus is None, reason="needs Opacus")
pytestmark = [
    pytest.mark.filterwarnings("ignore:a step was made on a batch that did not come:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha"),
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
]

DELTA = 1e-5
SAMPLES, BATCH = 24, 4
PASS = SAMPLES // BATCH
DATA = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))

# Options of make_private, and the event of what they do; of a shuffled loader, for a whole pass.
KINDS = {
    "poisson": (
        {"dataset_size": SAMPLES},
        lambda s: PoissonGaussian(noise_multiplier=s, sample_rate=1 / 6),
    ),
    "physical": (
        {"physical_batch_size": 1, "dataset_size": SAMPLES},
        lambda s: PoissonGaussian(noise_multiplier=s, sample_rate=1 / 6),
    ),
    "truncated_poisson": (
        {"max_batch_size": 22, "max_dataset_size": SAMPLES, "dataset_size": SAMPLES},
        lambda s: TruncatedPoissonGaussian(
            noise_multiplier=s, sample_rate=1 / 6, max_batch_size=22, num_samples=SAMPLES
        ),
    ),
    "fixed_size": (
        {"sampling": "fixed_size"},
        lambda s: FixedSizeGaussian(noise_multiplier=s, batch_size=BATCH, num_samples=SAMPLES),
    ),
    "shuffled": ({"sampling": "shuffled"}, lambda s: ShuffledGaussian(noise_multiplier=s)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
NOISE = 2.0
UNTRIED = {"verify_first_batch": False}


def steps_of(kind):
    """How many steps one event pays for."""
    return PASS if kind == "shuffled" else 1


def epsilon_after(events):
    accountant = RDPAccountant(neighboring_relation=events[0].relation)
    for event in events:
        accountant.compose(event)
    return accountant.get_epsilon(DELTA)


def brute_force(limit, event, most=400):
    """How many such events fit, counted one after the other."""
    count = 0
    while count < most and epsilon_after([event] * (count + 1)) <= limit:
        count += 1
    assert 0 < count < most
    return count


@pytest.fixture
def run(private):
    def make(kind="poisson", epsilon=None, when_spent="raise", **options):
        if epsilon is not None:
            options["budget"] = PrivacyBudget(epsilon, DELTA, when_spent=when_spent)
        return private(
            nn.Linear(3, 2),
            DATA,
            batch_size=BATCH,
            **{"noise_multiplier": NOISE, **KINDS[kind][0], **options},
        )

    return make


def step(engine, model, optimizer, x):
    optimizer.zero_grad()
    engine.backward(model(x).square().mean(1))
    optimizer.step()


def train(engine, model, optimizer, loader, passes=100):
    for _ in range(passes):
        for (x,) in loader:
            step(engine, model, optimizer, x)


def until_refused(made):
    with pytest.raises(BudgetSpent) as caught:
        train(*made)
    return str(caught.value)


@every_kind
@pytest.mark.parametrize("limit", [2.5, 6.0])
def test_the_step_is_refused_at_which_a_loop_over_the_accountant_exceeds_the_budget(
    kind, limit, run
):
    limit *= 2 if kind in ("fixed_size", "shuffled") else 1
    expected = brute_force(limit, KINDS[kind][1](NOISE)) * steps_of(kind)
    made = run(kind, limit)
    engine, _, optimizer, loader = made
    assert loader.sampler_name == KINDS[kind][1](NOISE).sampler
    assert engine.remaining_steps() == expected
    until_refused(made)
    assert optimizer.releases == expected and engine.remaining_steps() == 0
    assert engine.get_epsilon(DELTA) <= limit


@every_kind
def test_a_budget_of_exactly_what_the_steps_cost_allows_them_and_a_hair_less_does_not(kind, run):
    exact = epsilon_after([KINDS[kind][1](NOISE)] * 3)
    for limit, events in ((exact, 3), (math.nextafter(exact, 0), 2)):
        made = run(kind, limit)
        until_refused(made)
        assert made[2].releases == events * steps_of(kind)


@every_kind
@pytest.mark.parametrize("ledger", [False, True], ids=["alone", "ledger"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "again"])
def test_a_refused_step_changes_nothing(kind, ledger, twice, run, tmp_path):
    event = KINDS[kind][1](NOISE)
    path = tmp_path / "l" if ledger else None
    made = run(kind, epsilon_after([event] * 2), ledger=path)
    engine, model, optimizer, loader = made
    with pytest.raises(BudgetSpent) as caught:
        for _ in range(9):
            for (x,) in loader:
                before = copy.deepcopy(model.state_dict())
                counted = copy.deepcopy(engine.accountant.state_dict())
                content = path.read_bytes() if ledger and path.exists() else b""
                releases = optimizer.releases
                step(engine, model, optimizer, x)
    message = str(caught.value)
    for _ in range(2 if twice else 1):
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert engine.accountant.state_dict() == counted and optimizer.releases == releases
        assert engine.accountant.neighboring_relation == event.relation
        if ledger:
            assert path.read_bytes() == content
        assert all(p.grad is None for p in model.parameters()) and not engine._step.sums
        if twice:
            # The sum without the draw's other microbatches is refused before it is charged.
            with pytest.raises((BudgetSpent, PrivateRefusal)) as again:
                step(engine, model, optimizer, x)
            if ledger and again.type is PrivateRefusal:
                content = path.read_bytes()  # with a line that says so
    spent = engine.get_epsilon(DELTA)
    for word in (f"epsilon={spent:g}", f"delta={DELTA:g}", f"{spent:.6g} is spent", "budget="):
        assert word in message
    assert f"would reach {epsilon_after([event] * 3):.6g}" in message
    assert "when_spent='stop'" in message and "raise noise_multiplier" in message
    assert "Nothing was released" in message


@every_kind
def test_an_engine_goes_on_after_a_refused_step_with_more_noise_or_as_a_plain_one(kind, run):
    made = run(kind, 1.05 * epsilon_after([KINDS[kind][1](NOISE)] * 2))
    engine, model, optimizer, loader = made
    until_refused(made)
    assert optimizer.releases == 2 * steps_of(kind)
    optimizer.noise_multiplier = 500.0
    assert engine.remaining_steps() > 0
    releases = optimizer.releases
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(*made, passes=1)
    assert optimizer.releases == releases + PASS
    engine.detach(model)
    assert engine.remaining_steps() is None
    optimizer.original_optimizer.step()


@pytest.mark.parametrize("kind", ["poisson", "fixed_size", "physical"])
@pytest.mark.parametrize("same_batch", [True, False], ids=["same", "next"])
def test_a_loop_that_catches_the_refusal_goes_on_with_the_same_or_the_next_batch(
    kind, same_batch, run
):
    events = [KINDS[kind][1](s) for s in (NOISE, NOISE, 50.0, 50.0)]
    made = run(kind, epsilon_after(events[:2]) * 1.01)
    engine, model, optimizer, loader = made
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for (x,) in loader:
            try:
                step(engine, model, optimizer, x)
            except BudgetSpent:
                refused += 1
                optimizer.noise_multiplier = 50.0
                if same_batch and kind != "physical":
                    step(engine, model, optimizer, x)
            if optimizer.releases == 4:
                break
    assert refused == 1 and optimizer.releases == 4
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon_after(events), rel=1e-12)
    assert engine.neighboring_relation == events[0].relation


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_plain_loss_backward_is_refused_and_drops_the_batch(reduction, run):
    made = run("physical", epsilon_after([KINDS["poisson"][1](NOISE)]), loss_reduction=reduction)
    engine, model, optimizer, loader = made
    with pytest.raises(BudgetSpent):
        for (x,) in loader:
            optimizer.zero_grad()
            getattr(model(x).square().mean(1), reduction)().backward()
            optimizer.step()
    assert optimizer.releases == 1 and not engine._step.sums
    assert all(p.grad is None for p in model.parameters())


@every_kind
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_ends_by_itself_where_the_budget_says_stop(kind, workers, run):
    # One step (or pass) into the second pass over the data.
    events = 2 if kind == "shuffled" else PASS + 2
    made = run(kind, epsilon_after([KINDS[kind][1](NOISE)] * events), "stop", workers=workers)
    engine, model, optimizer, loader = made
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(*made, passes=5)
    assert optimizer.releases == events * steps_of(kind)
    assert engine.remaining_steps() == 0
    assert list(loader) == []


@needs_opacus
@pytest.mark.parametrize("kind", ["poisson", "shuffled", "fixed_size", "truncated_poisson"])
def test_a_loop_of_a_batch_memory_manager_ends_by_itself_too(kind, run):
    events = 2 if kind == "shuffled" else PASS + 2
    made = run(kind, epsilon_after([KINDS[kind][1](NOISE)] * events), "stop")
    engine, model, optimizer, loader = made
    for _ in range(4):
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as parts:
            for (x,) in parts:
                if engine._run.loader.sampler_name == "shuffled" and optimizer.releases % PASS:
                    left = -optimizer.releases % PASS
                    whole = PASS * (events - optimizer.releases // PASS - 1)
                    assert engine.remaining_steps() == left + whole
                step(engine, model, optimizer, x)
    assert optimizer.releases == events * steps_of(kind)
    assert engine.get_epsilon(DELTA) == epsilon_after([KINDS[kind][1](NOISE)] * events)


@pytest.mark.parametrize("kind", ["poisson", "fixed_size"])
def test_under_a_noise_scheduler_each_step_is_compared_with_its_own_noise(kind, run):
    limit, events = 9.0, []
    made = run(kind, limit)
    engine, model, optimizer, loader = made
    while epsilon_after([*events, KINDS[kind][1](NOISE * 0.95 ** len(events))]) <= limit:
        events.append(KINDS[kind][1](NOISE * 0.95 ** len(events)))
    assert 3 < len(events) < 100
    with pytest.raises(BudgetSpent):
        for _ in range(99):
            for (x,) in loader:
                step(engine, model, optimizer, x)
                optimizer.noise_multiplier = NOISE * 0.95**optimizer.releases
    assert optimizer.releases == len(events)
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon_after(events), rel=1e-12)


def test_steps_are_counted_once_and_counted_down(run, monkeypatch):
    calls = []
    plain = spending_module.remaining_steps

    def counting(*arguments, **options):
        calls.append(1)
        return plain(*arguments, **options)

    evaluations = []
    get_epsilon = RDPAccountant._epsilon

    def evaluating(self, *arguments):
        evaluations.append(1)
        return get_epsilon(self, *arguments)

    monkeypatch.setattr(spending_module, "remaining_steps", counting)
    made = run("poisson", 20.0)
    monkeypatch.setattr(RDPAccountant, "_epsilon", evaluating)
    left = made[0].remaining_steps()
    train(*made, passes=5)
    assert made[0].remaining_steps() == left - 30
    assert len(calls) == 1 and not evaluations
    made[2].noise_multiplier = 3.0
    train(*made, passes=5)
    assert len(calls) == 2
    monkeypatch.undo()
    made[0]._spending._room = None
    assert made[0].remaining_steps() > 0


def test_the_count_follows_what_others_do_to_the_accountant(run):
    event = KINDS["poisson"][1](NOISE)
    made = run("poisson", epsilon_after([event] * 9))
    engine = made[0]
    train(*made, passes=1)
    assert engine.remaining_steps() == 3
    engine.accountant.step(noise_multiplier=NOISE, sample_rate=1 / 6)
    assert engine.remaining_steps() == 2
    engine.accountant.compose(event)
    assert engine.remaining_steps() == 1
    until_refused(made)
    assert made[2].releases == 7


# Passes over a shuffled loader


def test_within_a_paid_pass_the_loop_goes_on_and_an_unpaid_pass_is_never_begun(run):
    made = run("shuffled", epsilon_after([KINDS["shuffled"][1](NOISE)]), "stop", **UNTRIED)
    engine, model, optimizer, loader = made
    left = []
    assert engine.remaining_steps() == PASS
    for (x,) in loader:
        left.append(engine.remaining_steps())
        step(engine, model, optimizer, x)
        left.append(engine.remaining_steps())
    assert left == [6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0]
    assert list(loader) == [] and engine.remaining_steps() == 0


def test_a_pass_that_was_left_is_not_gone_on_with_for_free(run):
    made = run("shuffled", epsilon_after([KINDS["shuffled"][1](NOISE)] * 2), "stop", **UNTRIED)
    engine, model, optimizer, loader = made
    for (x,) in loader:
        step(engine, model, optimizer, x)
        break
    assert engine.remaining_steps() == PASS
    train(*made, passes=9)
    assert optimizer.releases == 1 + PASS
    assert engine.accountant.events == [(KINDS["shuffled"][1](NOISE), 2)]


def test_noise_lowered_within_a_paid_pass_must_be_paid_for_and_fit(run):
    high, low = KINDS["shuffled"][1](NOISE), KINDS["shuffled"][1](NOISE / 2)
    made = run("shuffled", epsilon_after([high, low]), **UNTRIED)
    engine, model, optimizer, loader = made
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches))
    optimizer.noise_multiplier = NOISE / 2
    assert engine.remaining_steps() == PASS - 1
    step(engine, model, optimizer, *next(batches))
    assert engine.accountant.events == [(high, 1), (low, 1)]
    optimizer.noise_multiplier = NOISE / 4
    assert engine.remaining_steps() == 0
    x = next(batches)
    with pytest.raises(BudgetSpent):
        step(engine, model, optimizer, *x)
    optimizer.noise_multiplier = NOISE
    for x in batches:
        step(engine, model, optimizer, *x)
    assert optimizer.releases == PASS - 1
    assert engine.accountant.events == [(high, 1), (low, 1)]


def test_a_payment_that_could_not_be_written_does_not_pay(run, tmp_path, monkeypatch):
    """Else a step with less noise than its pass was paid for would be free the second time."""
    made = run("shuffled", ledger=tmp_path / "l", **UNTRIED)
    engine, model, optimizer, loader = made
    batches = iter(loader)
    step(engine, model, optimizer, *next(batches))
    optimizer.noise_multiplier = NOISE / 2

    def fail(**line):
        raise OSError("disk full")

    x = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(engine._spending.ledger, "append", fail)
        with pytest.raises(OSError, match="full"):
            step(engine, model, optimizer, *x)
    step(engine, model, optimizer, *x)
    events = [KINDS["shuffled"][1](s) for s in (NOISE, NOISE / 2)]
    assert engine.accountant.events == [(event, 1) for event in events]
    assert [line.event for line in Ledger(tmp_path / "l").lines] == events


# What was spent before


@every_kind
def test_what_a_ledger_holds_counts_against_the_budget(kind, run, tmp_path):
    event = KINDS[kind][1](NOISE)
    path = tmp_path / "l"
    first = run(kind, ledger=path)
    train(*first, passes=2 if kind == "shuffled" else 1)
    spent = 2 if kind == "shuffled" else PASS
    made = run(kind, epsilon_after([event] * (spent + 1)), ledger=path)
    until_refused(made)
    assert made[2].releases == steps_of(kind)
    with pytest.raises(ValueError, match="budget=PrivacyBudget.*allows no further"):
        run(kind, epsilon_after([event] * (spent + 1)), ledger=path)
    with pytest.warns(UserWarning, match="is spent, so training ends before its first step"):
        made = run(kind, epsilon_after([event] * (spent + 1)), "stop", ledger=path)
    train(*made, passes=2)
    assert (made[2].releases, made[0].remaining_steps()) == (0, 0)


@every_kind
@pytest.mark.parametrize("ledger", [False, True], ids=["alone", "ledger"])
def test_the_budget_holds_for_a_resumed_run(kind, ledger, run, tmp_path):
    event = KINDS[kind][1](NOISE)
    events = 2 if kind == "shuffled" else PASS + 1
    limit = epsilon_after([event] * events)
    path = tmp_path / "l" if ledger else None
    first = run(kind, limit, ledger=path)
    train(*first, passes=1)
    first[0].save_checkpoint(tmp_path / "c")
    second = run(kind, limit, ledger=path)
    second[0].load_checkpoint(tmp_path / "c")
    assert second[0].get_epsilon(DELTA) == first[0].get_epsilon(DELTA)
    assert second[0].remaining_steps() == steps_of(kind)
    until_refused(second)
    assert second[2].releases == events * steps_of(kind)
    assert second[0].neighboring_relation == event.relation


def test_a_batch_from_elsewhere_must_fit_as_a_full_step(run):
    made = run("poisson", epsilon_after([KINDS["poisson"][1](NOISE)] * 6))
    engine, model, optimizer, loader = made
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BudgetSpent, match="one more step on a batch of unknown origin"):
        step(engine, model, optimizer, DATA[:4])
    assert engine.neighboring_relation == "add_remove" and not engine.accountant.events
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    train(*made, passes=1)
    assert optimizer.releases == PASS


def test_a_foreign_batch_that_fits_moves_the_run_to_zero_out_and_the_count_with_it(run):
    foreign = Gaussian(relation="zero_out", noise_multiplier=NOISE)
    own = KINDS["poisson"][1](NOISE).convert("zero_out")
    made = run("poisson", epsilon_after([foreign, *[own] * 4]))
    engine, model, optimizer, loader = made
    step(engine, model, optimizer, DATA[:4])
    assert engine.neighboring_relation == "zero_out" and engine.remaining_steps() == 4
    until_refused(made)
    assert optimizer.releases == 5


def test_a_step_without_noise_never_fits(run):
    made = run("poisson", 50.0)
    made[2].noise_multiplier = 0.0
    assert made[0].remaining_steps() == 0
    until_refused(made)
    assert made[2].releases == 0 and not made[0]._spending.noiseless


# Arguments


def test_without_a_budget_nothing_remains_to_be_told(run):
    assert run()[0].remaining_steps() is None
    assert PrivacyEngine().remaining_steps() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.0, DELTA), "epsilon=0.0"),
        ((math.inf, DELTA), "epsilon=inf"),
        ((True, DELTA), "epsilon=True"),
        ((1.0, 0.0), "delta=0.0"),
        ((1.0, 1), "delta=1"),
        ((1.0, DELTA, "warn"), "when_spent='warn'"),
    ],
)
def test_a_bad_value_is_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        PrivacyBudget(*arguments[:2], **dict(zip(["when_spent"], arguments[2:], strict=False)))


def test_a_budget_cannot_be_changed_afterwards():
    with pytest.raises(AttributeError):
        PrivacyBudget(1.0, DELTA).epsilon = 2.0


@every_kind
def test_a_budget_that_allows_no_step_is_refused_and_nothing_is_changed(kind, run):
    too_little = epsilon_after([KINDS[kind][1](NOISE)]) * 0.99
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(accountant="rdp")
    arguments = {
        "module": model,
        "optimizer": optimizer,
        "data_loader": DataLoader(TensorDataset(DATA), batch_size=BATCH),
        "max_grad_norm": 1.0,
        **KINDS[kind][0],
    }
    for noise, epsilon, words in ((NOISE, too_little, "allows no further"), (0, 9.0, "noise_mu")):
        with pytest.raises(ValueError, match=f"budget=PrivacyBudget.*{words}"):
            engine.make_private(
                noise_multiplier=noise, budget=PrivacyBudget(epsilon, DELTA), **arguments
            )
    assert type(model) is nn.Linear and engine.remaining_steps() is None
    assert engine.neighboring_relation == "add_remove"
    optimizer.step()
    engine.make_private(noise_multiplier=NOISE, budget=PrivacyBudget(50.0, DELTA), **arguments)


def test_a_budget_beside_a_target_limits_the_sum_of_both(run, tmp_path):
    path = tmp_path / "l"
    train(*run(ledger=path), passes=1)
    spent = epsilon_after([KINDS["poisson"][1](NOISE)] * PASS)

    def target(epsilon):
        model = nn.Linear(3, 2)
        engine = PrivacyEngine(accountant="rdp", ledger=path)
        with pytest.warns(UserWarning, match="target_epsilon covers the coming"):
            made = engine.make_private_with_epsilon(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(DATA), batch_size=BATCH),
                target_epsilon=3.0,
                target_delta=DELTA,
                epochs=5,
                max_grad_norm=1.0,
                budget=PrivacyBudget(epsilon, DELTA),
            )
        return engine, *made

    made = target(spent + 0.5)
    noise = made[2].noise_multiplier
    alone = epsilon_after([KINDS["poisson"][1](noise)] * 5 * PASS)
    assert 2.99 < alone <= 3.0
    until_refused(made)
    assert 0 < made[2].releases < 5 * PASS
    assert spent < made[0].get_epsilon(DELTA) <= spent + 0.5
    with pytest.raises(ValueError, match="budget="):
        target(spent * 0.9)


@pytest.mark.filterwarnings("ignore:accountant=.*approximation")
@pytest.mark.parametrize("kind", ["poisson", "shuffled"])
@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_the_budget_holds_with_every_accountant_that_bounds(name, kind, run):
    if not ACCOUNTANTS[name].is_bound:
        with pytest.raises(ValueError, match="no upper bound"):
            run(kind, 5.0, noise_multiplier=3.0, accountant=name)
        return
    if name == "prv":
        pytest.importorskip("opacus")
    limit, noise, expected = 5.0, 3.0 if kind == "shuffled" else 1.5, 0
    event = KINDS[kind][1](noise)
    while True:
        meter = create_accountant(name)
        meter.convert(event.relation)
        try:
            meter.compose(event, expected + 1)
            if meter.get_epsilon(DELTA) > limit:
                break
        except ValueError:
            pytest.skip(f"{name} does not know {kind} sampling")
        expected += 1
    made = run(kind, limit, noise_multiplier=noise, accountant=name)
    assert made[0].remaining_steps() == expected * steps_of(kind) > 0
    until_refused(made)
    assert made[2].releases == expected * steps_of(kind)


@pytest.mark.cases(0)
@needs_opacus
@pytest.mark.parametrize("name", ["RDPAccountant", "PRVAccountant", "GaussianAccountant"])
def test_the_budget_holds_with_an_accountant_of_opacus(name, run, tmp_path):
    kind = getattr(opacus.accountants, name)
    meter = kind()
    limit, expected = 2.5, 0
    while True:
        meter.step(noise_multiplier=NOISE, sample_rate=1 / 6)
        if meter.get_epsilon(DELTA) > limit:
            break
        expected += 1
    made = run("poisson", limit, accountant=kind())
    assert made[0].remaining_steps() == expected > 0
    until_refused(made)
    assert made[2].releases == expected
    assert made[0].accountant.history == [(NOISE, 1 / 6, expected)]
    # What was spent before counts, though one of these looks at its last phase only.
    first = run("poisson", limit, accountant=kind())
    train(*first, passes=1)
    first[0].save_checkpoint(tmp_path / "c")
    second = run("poisson", limit, accountant=kind())
    second[0].load_checkpoint(tmp_path / "c")
    assert second[0].remaining_steps() == expected - PASS
    until_refused(second)
    assert second[2].releases == expected
