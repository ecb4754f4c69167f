"""Epsilon is computed for the sampler that drew the batches, under its neighboring relation."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash import PrivacyBudget, PrivacyEngine
from dpflash.accounting import (
    FixedSizeGaussian,
    Gaussian,
    PoissonGaussian,
    RDPAccountant,
    ShuffledGaussian,
    TruncatedPoissonGaussian,
)
from dpflash.privacy.spending import common_relation, convert_event

try:
    import opacus
except ImportError:
    opacus = None

needs_opacus = pytest.mark.skipif(opacus is None, reason="needs Opacus")
pytestmark = pytest.mark.filterwarnings("ignore:a step was made on a batch that did not")

DELTA = 1e-5
DATA = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
RATE = 4 / 32

# Options, the event of one draw (of a shuffled loader: pass), and its own relation.
PUBLIC = {"dataset_size": 32}
KINDS = {
    "poisson": (PUBLIC, lambda s: PoissonGaussian(noise_multiplier=s, sample_rate=RATE)),
    "truncated_poisson": (
        {"max_batch_size": 24, "max_dataset_size": 32, **PUBLIC},
        lambda s: TruncatedPoissonGaussian(
            noise_multiplier=s, sample_rate=RATE, max_batch_size=24, num_samples=32
        ),
    ),
    "fixed_size": (
        {"sampling": "fixed_size"},
        lambda s: FixedSizeGaussian(noise_multiplier=s, batch_size=4, num_samples=32),
    ),
    "shuffled": ({"poisson_sampling": False}, lambda s: ShuffledGaussian(noise_multiplier=s)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def epsilon_of(*events):
    accountant = RDPAccountant(neighboring_relation=events[0][0].relation)
    for event, count in events:
        accountant.compose(event, count)
    return accountant.get_epsilon(DELTA)


def count_of(kind, passes):
    return passes * (1 if kind == "shuffled" else 8)


def train(engine, model, optimizer, loader, passes=1):
    """Train; the drawn sizes of the physical batches."""
    sizes = []
    for _ in range(passes):
        for (x,) in loader:
            optimizer.zero_grad()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
            sizes.append(int(loader.is_real.sum()))
    return sizes


def calibrated(engine, target=3.0, epochs=5, batch_size=4, **options):
    model = nn.Linear(3, 2)
    return engine, *engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(DATA), batch_size=batch_size),
        target_epsilon=target,
        target_delta=DELTA,
        epochs=epochs,
        max_grad_norm=1.0,
        **options,
    )


@every_kind
def test_epsilon_is_that_of_the_sampler_and_never_poissons(kind, private):
    options, event = KINDS[kind]
    made = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0, **options)
    engine = made[0]
    train(*made, passes=3)
    assert engine.sampler == kind
    assert engine.neighboring_relation == event(2.0).relation
    assert engine.accountant.neighboring_relation == engine.neighboring_relation
    found = engine.get_epsilon(DELTA)
    assert found == epsilon_of((event(2.0), count_of(kind, 3)))
    poisson = epsilon_of((KINDS["poisson"][1](2.0), 24))
    if kind in ("fixed_size", "shuffled"):
        assert found > 1.3 * poisson
    else:
        assert found == pytest.approx(poisson, rel=1e-3) and found >= poisson
    lower, upper = engine.get_epsilon(DELTA, interval=True)
    assert upper == found and (lower is None or lower <= upper)


@pytest.mark.parametrize("physical", [None, 1, 3])
def test_fixed_size_batches_have_exactly_the_size_and_the_divisor_is_it(physical, private):
    options = {"sampling": "fixed_size", "physical_batch_size": physical}
    made = private(nn.Linear(3, 2), DATA, verify_first_batch=False, **options)
    sizes = train(*made, passes=2)
    assert made[2].expected_batch_size == 4 and made[2].releases == 16
    assert sum(sizes) == 64 and set(sizes) == {4 if physical is None else physical // 2 + 1}


def test_a_truncated_draw_is_never_larger_than_the_cap_and_is_divided_by_the_batch_size(private):
    made = private(nn.Linear(3, 2), DATA, batch_size=8, noise_multiplier=1.0, max_batch_size=9)
    train(*made, passes=10)
    sizes = [len(made[3]._draws.draw(index)) for index in range(made[2].releases)]
    assert max(sizes) == 9 and min(sizes) < 8 and made[2].expected_batch_size == 8


@every_kind
@pytest.mark.parametrize("target", [1.5, 8.0])
def test_calibration_is_for_the_sampler_and_meets_its_target(kind, target):
    options, event = KINDS[kind]
    if kind == "shuffled":
        target *= 4
    engine, model, optimizer, loader = calibrated(
        PrivacyEngine(accountant="rdp"), target, **options
    )
    noise, count = optimizer.noise_multiplier, count_of(kind, 5)
    assert epsilon_of((event(noise), count)) <= target
    assert epsilon_of((event(noise / 1.0002), count)) > target
    train(engine, model, optimizer, loader, passes=5)
    assert 0.999 * target < engine.get_epsilon(DELTA) <= target


def test_a_cap_too_low_for_the_target_is_named():
    with pytest.raises(ValueError, match="target_epsilon=3.0: no noise.*raise max_batch_size"):
        calibrated(PrivacyEngine(accountant="rdp"), max_batch_size=9)


def released(private, **options):
    """Epsilon of an epoch of draws with 8 of 256 samples, and the warnings of make_private."""
    options |= {"batch_size": 8, "noise_multiplier": 2.0, "verify_first_batch": False}
    with warnings.catch_warnings(record=True) as caught:
        made = private(nn.Linear(3, 2), DATA.repeat(8, 1), **options)
    train(*made)
    return made[0].get_epsilon(DELTA), [str(x.message) for x in caught]


@pytest.mark.parametrize(("cap", "factor"), [(3, float("inf")), (9, float("inf")), (27, 1.03)])
def test_a_cap_that_adds_to_delta_is_warned_about_with_one_that_does_not(cap, factor, private):
    free, _ = released(private)
    epsilon, (text,) = released(private, max_batch_size=cap)
    assert epsilon >= factor * free
    told = rf"max_batch_size={cap}: each epoch adds .* to delta, .*; pass max_batch_size=(\d+) or"
    size = int(re.match(told, text)[1])
    assert released(private, max_batch_size=size) == (pytest.approx(free, rel=1e-6), [])
    assert size < 48


def test_a_cap_is_judged_by_the_delta_of_the_budget(private):
    assert not released(private, max_batch_size=33)[1]
    budget = PrivacyBudget(epsilon=9.0, delta=1e-8)
    _, (text,) = released(private, max_batch_size=33, budget=budget)
    assert "infinite at delta < 5.8e-10, and too large near it" in text


def test_a_cap_is_judged_by_the_target_delta(monkeypatch):
    monkeypatch.setattr(f"{__name__}.DATA", DATA.repeat(8, 1))
    options = {"batch_size": 8, "max_batch_size": 33, "target": 9.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrated(PrivacyEngine(), **options)
    monkeypatch.setattr(f"{__name__}.DELTA", 1e-8)
    with pytest.warns(UserWarning, match="infinite at delta < 5.8e-10, and too large near it"):
        calibrated(PrivacyEngine(), **options)


@pytest.mark.parametrize("planned", [{"epochs": 2}, {"epochs": None, "steps": 16}])
@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_the_first_release_beyond_the_calibrated_ones_says_so_once(planned, sampling):
    made = calibrated(PrivacyEngine(accountant="rdp"), sampling=sampling, **planned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(*made, passes=2)
    assert made[0].get_epsilon(DELTA) <= 3.0
    with pytest.warns(UserWarning, match=r"release 17: .* calibrated for 16 .*=3\.0") as caught:
        train(*made, passes=2)
    assert len(caught) == 1 and made[0].get_epsilon(DELTA) > 3.0


@pytest.mark.parametrize("units", [None, [i // 2 for i in range(32)]])
def test_a_batch_size_above_the_number_of_units_is_said(units):
    options = {"unit_of": units, "examples_per_unit": 2} if units else {}
    with pytest.warns(UserWarning, match=f"batch_size=33 is above the {16 if units else 32} "):
        calibrated(PrivacyEngine(accountant="rdp"), batch_size=33, **options)


# Passes and workers


def step(engine, model, optimizer, x):
    engine.backward(model(x).square().mean(1))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
def test_an_older_pass_gives_nothing_beside_a_newer_one_also_from_workers(
    sampling, workers, private
):
    budget = {} if sampling == "poisson" else {"budget": PrivacyBudget(50.0, DELTA)}
    engine, model, optimizer, loader = private(
        nn.Linear(3, 2),
        torch.randn(64, 3),
        batch_size=16,
        noise_multiplier=1.0,
        sampling=sampling,
        workers=workers,
        **budget,
    )
    older = iter(loader)
    next(older)
    for (x,) in loader:
        step(engine, model, optimizer, x)
    with pytest.raises(RuntimeError, match="an earlier epoch"):
        next(older)
    assert engine._step.tracker.current is None and optimizer.releases == 4
    # Nothing is stranded: the next pass is a pass.
    for (x,) in loader:
        step(engine, model, optimizer, x)
    events = [(KINDS["shuffled"][1](1.0), 2)]
    assert optimizer.releases == 8
    assert sampling != "shuffled" or engine.accountant.events == events


@needs_opacus
@pytest.mark.parametrize("sampling", ["fixed_size", "shuffled"])
def test_a_managed_loop_whose_workers_hide_repeated_batches_is_refused(sampling, private):
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    engine, model, optimizer, loader = private(
        nn.Linear(3, 2),
        torch.randn(512, 3),
        batch_size=16,
        noise_multiplier=1.0,
        sampling=sampling,
        workers=2,
    )
    with (
        BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=16, optimizer=optimizer
        ) as batches,
        pytest.raises(RuntimeError, match="nothing was released. Use num_workers=0"),
    ):
        for (x,) in batches:
            for _ in range(2):
                step(engine, model, optimizer, x)
    assert optimizer.releases == 0 and engine.get_epsilon(DELTA) == 0
    assert not engine._step.sums
    # A step without a backward cannot claim the draw either.
    optimizer.step()
    assert engine.accountant.events == [(Gaussian(relation="zero_out", noise_multiplier=1.0), 1)]
    optimizer.zero_grad()
    for (x,) in loader:
        step(engine, model, optimizer, x)
    assert optimizer.releases == 1 + 32


# Relations


@pytest.mark.parametrize(
    ("relations", "common"),
    [
        (["add_remove"], "add_remove"),
        (["replace_one", "replace_one"], "replace_one"),
        (["zero_out", "add_remove"], "zero_out"),
        (["replace_one", "add_remove"], "zero_out"),
        (["replace_one", "zero_out"], "zero_out"),
        (["add_remove", "zero_out", "replace_one"], "zero_out"),
    ],
)
def test_events_of_different_relations_meet_in_zero_out(relations, common):
    assert common_relation(relations) == common


@pytest.mark.parametrize("kind", ["poisson", "truncated_poisson", "fixed_size", "shuffled"])
@pytest.mark.parametrize("relation", ["add_remove", "zero_out", "replace_one"])
def test_a_relation_that_is_asked_for_is_accounted_for_or_refused(kind, relation):
    options, event = KINDS[kind]
    engine = PrivacyEngine(accountant="rdp", neighboring_relation=relation)
    assert engine.neighboring_relation == relation
    if relation == "add_remove" and kind in ("fixed_size", "shuffled"):
        with pytest.raises(ValueError, match=f"neighboring_relation='add_remove'.*{kind}"):
            calibrated(engine, **options)
        return
    made = calibrated(engine, **options)
    train(*made, passes=5)
    assert engine.neighboring_relation == engine.accountant.neighboring_relation == relation
    expected = event(made[2].noise_multiplier).convert(relation)
    assert engine.get_epsilon(DELTA) == epsilon_of((expected, count_of(kind, 5)))
    assert 2.99 < engine.get_epsilon(DELTA) <= 3.0


def test_poisson_under_replace_one_costs_more(private):
    noise = [
        calibrated(PrivacyEngine(accountant="rdp", neighboring_relation=r), **PUBLIC)[
            2
        ].noise_multiplier
        for r in ("add_remove", "zero_out", "replace_one")
    ]
    assert noise[0] == noise[1] < 0.7 * noise[2]


def test_a_foreign_batch_is_refused_where_add_remove_was_asked_for():
    engine = PrivacyEngine(accountant="rdp", neighboring_relation="add_remove")
    made = calibrated(engine, foreign_batches=True, **PUBLIC)
    train(*made)
    made[2].zero_grad()
    before = made[1].weight.detach().clone()
    with pytest.raises(ValueError, match="neighboring_relation='add_remove'.*zero_out"):
        engine.backward(made[1](DATA[:4]).square().mean(1))
        made[2].step()
    assert torch.equal(made[1].weight, before) and not engine._step.sums
    assert engine.accountant.events == [] and engine.neighboring_relation == "add_remove"
    train(*made)


def test_a_foreign_batch_in_a_fixed_size_run_brings_it_to_zero_out(private):
    made = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0, sampling="fixed_size")
    engine, model, optimizer, _ = made
    train(*made)
    assert engine.neighboring_relation == "replace_one"
    optimizer.zero_grad()
    engine.backward(model(DATA[:4]).square().mean(1))
    optimizer.step()
    assert engine.neighboring_relation == engine.accountant.neighboring_relation == "zero_out"
    expected = [
        (KINDS["fixed_size"][1](2.0).convert("zero_out"), 8),
        (Gaussian(relation="zero_out", noise_multiplier=2.0), 1),
    ]
    assert engine.accountant.events == expected
    assert engine.get_epsilon(DELTA) == epsilon_of(*expected)


def test_an_accountant_of_another_relation_keeps_it(private):
    accountant = RDPAccountant(neighboring_relation="replace_one")
    made = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0, accountant=accountant)
    train(*made)
    assert made[0].neighboring_relation == accountant.neighboring_relation == "replace_one"
    assert made[0].get_epsilon(DELTA) == epsilon_of(
        (KINDS["poisson"][1](2.0).convert("replace_one"), 8)
    )


def test_an_unknown_relation_is_named():
    with pytest.raises(ValueError, match="neighboring_relation='both'"):
        PrivacyEngine(neighboring_relation="both")


def test_a_gaussian_of_unknown_batches_is_never_taken_for_add_remove():
    event = Gaussian(relation="zero_out", noise_multiplier=1.0)
    assert convert_event(event, "replace_one").relation == "replace_one"
    with pytest.raises(ValueError, match="add_remove"):
        convert_event(event, "add_remove")


@pytest.mark.parametrize("first", ["poisson", "fixed_size", "shuffled"])
@pytest.mark.parametrize("second", ["poisson", "fixed_size", "shuffled"])
def test_two_models_of_one_engine_add_up(first, second):
    engine = PrivacyEngine(accountant="rdp", seed=0)
    events = []
    for kind in (first, second):
        model = nn.Linear(3, 2)
        made = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(DATA), batch_size=4),
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            **KINDS[kind][0],
        )
        train(engine, *made)
        engine.detach(model)
        events.append(KINDS[kind][1](2.0))
    relation = common_relation([event.relation for event in events])
    expected = [
        (event.convert(relation), count_of(kind, 1))
        for event, kind in zip(events, (first, second), strict=True)
    ]
    assert engine.neighboring_relation == relation
    assert engine.get_epsilon(DELTA) == pytest.approx(epsilon_of(*expected), rel=1e-12)


# Checkpoints


@every_kind
def test_a_checkpoint_carries_every_sampler_s_events(kind, private, tmp_path):
    options, event = KINDS[kind]

    def make(**changes):
        return private(nn.Linear(3, 2), DATA, noise_multiplier=2.0, **{**options, **changes})

    made = make()
    train(*made, passes=2)
    made[0].save_checkpoint(tmp_path / "c")
    resumed = make()
    resumed[0].load_checkpoint(tmp_path / "c")
    assert resumed[0].accountant.state_dict() == made[0].accountant.state_dict()
    for run in (made, resumed):
        torch.manual_seed(5)
        train(*run)
    assert resumed[0].get_epsilon(DELTA) == made[0].get_epsilon(DELTA)
    assert resumed[0].neighboring_relation == event(2.0).relation
    assert torch.equal(made[1].weight, resumed[1].weight)


def test_a_checkpoint_of_another_sampler_or_cap_is_refused(private, tmp_path):
    made = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0, max_batch_size=24)
    made[0].save_checkpoint(tmp_path / "c")
    for options in ({}, {"max_batch_size": 20}, {"sampling": "fixed_size"}):
        other = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0, **options)
        with pytest.raises(ValueError, match="does not fit the data loader"):
            other[0].load_checkpoint(tmp_path / "c")


def test_a_mixed_history_is_zero_out_after_a_resume_too(private, tmp_path):
    made = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0)
    engine, model, optimizer, _ = made
    train(*made)
    optimizer.zero_grad()
    engine.backward(model(DATA[:4]).square().mean(1))
    optimizer.step()
    engine.save_checkpoint(tmp_path / "c")
    resumed = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0)
    resumed[0].load_checkpoint(tmp_path / "c")
    assert resumed[0].neighboring_relation == "zero_out"
    assert "some batches not from its loader" in resumed[0].sampler
    assert resumed[0].get_epsilon(DELTA) == engine.get_epsilon(DELTA)


def momentum(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize("whole", [False, True], ids=["without the engine", "with it"])
@pytest.mark.parametrize("kind", [momentum, torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_goes_on_without_its_engine_is_warned_about(kind, whole, private):
    options = {"noise_multiplier": 1.0, "kind": kind}
    engine, _, optimizer, loader = made = private(nn.Linear(3, 2), DATA, **options)
    train(*made)
    later = private(nn.Linear(3, 2), DATA, **options)
    later[2].load_state_dict(optimizer.state_dict())
    if whole:
        later[0].load_state_dict(engine.state_dict())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train(*later)
        train(*later)
    assert ["engine.state_dict" in str(w.message) for w in found].count(True) == (not whole)


def test_an_optimizer_of_an_earlier_loop_is_warned_about_unless_its_steps_are_counted(private):
    model = nn.Linear(3, 2)
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    model(DATA).mean().backward()
    plain.step()
    made = private(model, DATA, noise_multiplier=1.0, kind=lambda parameters, lr: plain)
    with pytest.warns(UserWarning, match="this engine counts none of its steps"):
        train(*made)


def test_a_checkpoint_that_has_no_guarantee_for_the_relation_is_refused(private, tmp_path):
    made = private(nn.Linear(3, 2), DATA, noise_multiplier=2.0)
    engine, model, optimizer, _ = made
    engine.backward(model(DATA[:4]).square().mean(1))
    optimizer.step()
    engine.save_checkpoint(tmp_path / "c")
    strict = PrivacyEngine(accountant="rdp", neighboring_relation="add_remove", seed=0)
    other = calibrated(strict, **PUBLIC)
    before = other[1].weight.detach().clone()
    with pytest.raises(ValueError, match="neighboring_relation='add_remove'"):
        strict.load_checkpoint(tmp_path / "c")
    assert torch.equal(other[1].weight, before) and strict.get_epsilon(DELTA) == 0


# Accountants of Opacus inside ours

OPACUS = ["RDPAccountant", "PRVAccountant", "GaussianAccountant"]
opacus_warnings = pytest.mark.filterwarnings(
    "ignore:GDP accounting is experimental", "ignore:Optimal order is the (largest|smallest)"
)


@pytest.mark.cases(0)
@needs_opacus
@opacus_warnings
@pytest.mark.parametrize("name", OPACUS)
def test_an_accountant_of_opacus_accounts_calibrates_and_is_resumed(name, private, tmp_path):
    kind = getattr(opacus.accountants, name)
    made = calibrated(PrivacyEngine(accountant=kind(), seed=0), **PUBLIC)
    engine, _, optimizer, _ = made
    assert engine.get_epsilon(DELTA) == 0
    train(*made, passes=5)
    noise = optimizer.noise_multiplier
    assert engine.accountant.history == [(noise, RATE, 40)]
    meter = kind()
    meter.history = [(noise, RATE, 40)]
    assert engine.get_epsilon(DELTA) == meter.get_epsilon(DELTA) <= 3.0
    assert engine.get_epsilon(DELTA) > 2.9
    assert engine.neighboring_relation == "add_remove"
    engine.save_checkpoint(tmp_path / "c")
    options = {"noise_multiplier": noise, "foreign_batches": False, **PUBLIC}
    resumed = private(nn.Linear(3, 2), DATA, accountant=kind(), **options)
    resumed[0].load_checkpoint(tmp_path / "c")
    assert resumed[0].accountant.history == engine.accountant.history
    train(*resumed)
    assert resumed[0].accountant.history == [(noise, RATE, 48)]


@needs_opacus
def test_an_accountant_of_opacus_takes_shuffled_and_foreign_batches_as_full_steps(private):
    made = private(
        nn.Linear(3, 2),
        DATA,
        noise_multiplier=2.0,
        accountant=opacus.accountants.RDPAccountant(),
        poisson_sampling=False,
    )
    train(*made, passes=2)
    engine, model, optimizer, _ = made
    assert engine.accountant.history == [(2.0, 1.0, 2)]
    assert engine.neighboring_relation == "zero_out"
    optimizer.zero_grad()
    engine.backward(model(DATA[:4]).square().mean(1))
    optimizer.step()
    assert engine.accountant.history == [(2.0, 1.0, 3)]


@needs_opacus
@pytest.mark.parametrize("options", [{"sampling": "fixed_size"}, {"max_batch_size": 20}], ids=str)
def test_what_an_accountant_of_opacus_does_not_know_is_refused_by_name(options, private, tmp_path):
    with pytest.raises(ValueError, match="accountant=opacus.*RDPAccountant.*(fixed|truncated)"):
        private(
            nn.Linear(3, 2),
            DATA,
            noise_multiplier=2.0,
            accountant=opacus.accountants.RDPAccountant(),
            **options,
        )
    with pytest.raises(ValueError, match="accountant=opacus.*with ledger='.*l'"):
        PrivacyEngine(accountant=opacus.accountants.RDPAccountant(), ledger=tmp_path / "l")
    with pytest.raises(ValueError, match="neighboring_relation='replace_one'.*opacus"):
        PrivacyEngine(
            accountant=opacus.accountants.RDPAccountant(), neighboring_relation="replace_one"
        )


@needs_opacus
@opacus_warnings
def test_a_step_that_an_accountant_of_opacus_refuses_is_not_counted(private):
    """Its GaussianAccountant takes one noise only, and forgets its history when it says so."""
    made = private(
        nn.Linear(3, 2),
        DATA,
        noise_multiplier=2.0,
        accountant=opacus.accountants.GaussianAccountant(),
    )
    train(*made)
    made[2].noise_multiplier = 3.0
    with pytest.raises(ValueError, match="constant"):
        train(*made)
    assert made[0].accountant.history == [(2.0, RATE, 8)]
    assert made[3].releases == 8


@needs_opacus
@pytest.mark.filterwarnings("ignore:Secure RNG turned off", "ignore:Full backward hook")
def test_the_accountant_state_of_a_checkpoint_by_opacus_goes_on_in_ours(private, tmp_path):
    theirs = opacus.PrivacyEngine(accountant="rdp")
    model = nn.Linear(3, 2)
    wrapped, optimizer, loader = theirs.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(DATA), batch_size=4),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
    )
    for (x,) in loader:
        optimizer.zero_grad()
        if len(x):
            wrapped(x).square().mean().backward()
            optimizer.step()
    theirs.save_checkpoint(path=tmp_path / "c", module=wrapped, optimizer=optimizer)
    state = torch.load(tmp_path / "c", weights_only=False)["privacy_accountant_state_dict"]
    for kind in ("poisson", "shuffled"):
        made = private(nn.Linear(3, 2), DATA, noise_multiplier=3.0, **KINDS[kind][0])
        engine = made[0]
        engine.accountant.load_state_dict(state)
        assert engine.accountant.history == state["history"] != []
        spent = epsilon_of((KINDS["poisson"][1](2.0), state["history"][0][2]))
        assert engine.get_epsilon(DELTA) == spent
        train(*made)
        own = KINDS[kind][1](3.0)
        relation = own.relation
        assert engine.neighboring_relation == engine.accountant.neighboring_relation == relation
        assert engine.get_epsilon(DELTA) == pytest.approx(
            epsilon_of(
                (KINDS["poisson"][1](2.0).convert(relation), state["history"][0][2]),
                (own, count_of(kind, 1)),
            ),
            rel=1e-12,
        )


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
@pytest.mark.parametrize("has_ledger", [False, True], ids=["", "ledger"])
def test_an_engines_accountant_loses_no_release(sampling, has_ledger, private, tmp_path):
    ledger = tmp_path / "l" if has_ledger else None
    made = private(
        nn.Linear(3, 2),
        DATA,
        noise_multiplier=1.0,
        sampling=sampling,
        accountant="contour",
        ledger=ledger,
        foreign_batches=False,
    )
    accountant = made[0].accountant
    train(*made)
    earlier, spent = copy.deepcopy(accountant.state_dict()), made[0].get_epsilon(DELTA)
    train(*made)
    after = made[0].get_epsilon(DELTA)
    assert after > spent > 0
    name = "history" if sampling == "poisson" else "events"
    held = getattr(accountant, name)
    # With a ledger no history can be loaded or assigned at all.
    refused = "counts the ledger's releases" if has_ledger else "{} lacks releases"
    with pytest.raises((ValueError, RuntimeError), match=refused.format("state_dict")):
        accountant.load_state_dict(earlier)
    with pytest.raises((ValueError, RuntimeError), match=refused.format(name)):
        setattr(accountant, name, [])
    for change in (held.clear, held.pop, held.reverse):
        with pytest.raises(TypeError, match="cannot be changed in place"):
            change()
    assert made[0].get_epsilon(DELTA) == after and isinstance(held, list)
    # A copy, and an accountant of its own, are free.
    getattr(copy.copy(accountant), name).clear()
    assert made[0].get_epsilon(DELTA) == after
    meter = copy.deepcopy(accountant)
    meter.load_state_dict(earlier)
    assert meter.get_epsilon(DELTA) == spent and pickle.loads(pickle.dumps(held)) == held
    if not has_ledger:
        accountant.load_state_dict(accountant.state_dict())
    if sampling == "poisson" and not has_ledger:
        accountant.history += [(2.0, 0.5, 1)]
        assert made[0].get_epsilon(DELTA) > after
    fresh = PrivacyEngine()
    fresh.accountant.load_state_dict(earlier)
    assert fresh.get_epsilon(DELTA) == spent
    own = copy.deepcopy(meter)
    kept, fresh = getattr(own, name), PrivacyEngine(accountant=own)
    kept.clear()
    assert fresh.get_epsilon(DELTA) == spent


@needs_opacus
@opacus_warnings
def test_a_history_of_opacus_that_lost_releases_is_refused(private):
    theirs = opacus.accountants.RDPAccountant()
    made = private(
        nn.Linear(3, 2), DATA, noise_multiplier=1.0, accountant=theirs, foreign_batches=False
    )
    train(*made)
    whole, releases = list(theirs.history), made[2].releases
    for lost in ([], [(1.0, RATE, 1)]):
        theirs.history = lost
        with pytest.raises(RuntimeError, match="lacks releases that were made"):
            made[0].get_epsilon(DELTA)
        with pytest.raises(RuntimeError, match="lacks releases that were made"):
            train(*made)
        assert made[2].releases == releases
    theirs.history = whole
    train(*made)
    assert made[0].get_epsilon(DELTA) > 0
