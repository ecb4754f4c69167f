"""Releases of random allocation: a sample is in one of each epoch, which is paid for once."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import PrivacyBudget
from dpflash.accounting import (
    ContourAccountant,
    PoissonGaussian,
    RandomAllocationGaussian,
    create_accountant,
)
from dpflash.noise import Banded
from dpflash.privacy.ledger import Ledger, _covered_after
from dpflash.step.gradients import Gradients

SAMPLES, BATCH, STEPS, NOISE = 30, 4, 8, 1.5
DELTA = 1e-5


def data(samples=SAMPLES):
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))


def losses_of(made, x):
    return made(x).square().mean(1)


@pytest.fixture
def allocated(private):
    """`private` with random allocation, on its loader's batches alone and without trials."""

    def make(own=None, x=None, **options):
        fixed = {"sampling": "random_allocation", "accountant": "contour"}
        fixed |= {"foreign_batches": False, "verify_first_batch": False}
        torch.manual_seed(0)
        own = own or nn.Linear(3, 2)
        fixed["noise_multiplier"] = NOISE
        fixed["batch_size"] = BATCH
        return private(own, data() if x is None else x, **{**fixed, **options})

    return make


def train(made, steps):
    """Release so many logical batches more, and keep every draw."""
    engine, made, optimizer, loader = made
    last = loader.releases + steps
    while loader.releases < last:
        for (x,) in loader:
            engine.backward(losses_of(made, x))
            optimizer.step()
            if loader.is_last and loader.releases == last:
                break
    return torch.cat([p.detach().flatten() for p in made.parameters()])


def lose_draws(loader, draws):
    with torch.no_grad():
        for _ in range(draws):
            next(iter(loader))


def epochs(made):
    """How many epochs were charged; nothing else was."""
    events = made[0].accountant.events
    expected = RandomAllocationGaussian(
        relation=made[0].neighboring_relation, noise_multiplier=NOISE, steps=STEPS
    )
    assert {event for event, _ in events} <= {expected} and not made[0].accountant.history
    return sum(count for _, count in events)


def epsilon(count, relation="zero_out", **options):
    accountant = ContourAccountant(neighboring_relation=relation)
    given = {"noise_multiplier": NOISE, "steps": STEPS, **options}
    accountant.compose(RandomAllocationGaussian(relation=relation, **given), count)
    return accountant.get_epsilon(DELTA)


# The draws


@pytest.mark.parametrize("kind", ["samples", "users", "parts"])
def test_each_unit_is_in_exactly_one_release_of_each_epoch(kind, allocated):
    """Read from the releases themselves, without noise."""
    options = {"samples": {}, "parts": {"physical_batch_size": 2}}.get(
        kind, {"unit_of": [i // 2 for i in range(SAMPLES)], "examples_per_unit": 2}
    )
    units = SAMPLES // 2 if kind == "users" else SAMPLES
    x = torch.eye(units).repeat_interleave(SAMPLES // units, 0)
    own = nn.Sequential(nn.Linear(units, 1, bias=False))
    engine, made, optimizer, loader = allocated(own, x, noise_multiplier=0.0, **options)
    steps = loader.steps_per_epoch
    rows = []
    for _ in range(3):
        for (x,) in loader:
            engine.backward(made(x)[:, 0])
            optimizer.step()
            if loader.is_last:
                rows.append(own[0].weight.grad.flatten() * optimizer.expected_batch_size)
    counts = torch.stack(rows).view(3, steps, units)
    assert torch.equal(counts.sum(1).round(), torch.ones(3, units))
    assert ((counts - counts.round()).abs() < 1e-4).all()
    assert len({tuple(of.argmax(0).tolist()) for of in counts}) == 3


def test_packed_documents_are_in_one_draw_of_an_epoch():
    documents = [torch.full((3 + i % 9,), i) for i in range(SAMPLES)]
    own = dpflash.nn.LongContextLM(50, 8, 1, 1, max_seq_len=64)
    engine = dpflash.PrivacyEngine(seed=0)
    made, optimizer, loader = engine.make_private(
        module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
        data_loader=DataLoader(
            documents,
            batch_size=BATCH,
            collate_fn=dpflash.packing.PackTo(tokens=64, max_documents=8),
        ),
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
        verify_first_batch=False,
        sampling="random_allocation",
    )
    found = []
    for batch in loader:
        index, ids = batch.sample_index, batch.input_ids
        found += [int(ids[index == i].unique()) for i in range(8) if (index == i).any()]
        engine.backward(made(batch.input_ids, batch.targets, packed=batch))
        optimizer.step()
    assert sorted(found) == list(range(SAMPLES))
    assert epochs((engine,)) == 1 and engine.privacy_unit == "document"


def test_the_divisor_is_the_expected_size_and_empty_draws_release_noise(allocated):
    _, _, optimizer, loader = run = allocated(x=data(3), batch_size=2, noise_multiplier=50.0)
    assert (loader.steps_per_epoch, loader.sample_rate) == (2, 0.5)
    assert optimizer.expected_batch_size == 1.5
    sizes, before = [], train(run, 0)
    for _ in range(30):
        after = train(run, 1)
        sizes.append(int(loader.is_real.sum()))
        assert (after != before).all()
        before = after
    assert sizes.count(0) > 0


# The cost


def test_an_epoch_is_paid_for_with_its_first_release(allocated):
    run = allocated()
    assert run[3].steps_per_epoch == STEPS
    for step in range(3 * STEPS):
        train(run, 1)
        assert epochs(run) == step // STEPS + 1
    assert run[0].get_epsilon(DELTA) == epsilon(3)


@pytest.mark.parametrize("size", [None, 29])
def test_a_public_size_determines_steps_and_relation(size, allocated):
    run = allocated(dataset_size=size)
    train(run, 9)
    relation = "zero_out" if size is None else "add_remove"
    assert run[0].neighboring_relation == relation and epochs(run) == 2
    assert run[3].sample_rate == 1 / STEPS
    assert run[2].expected_batch_size == (size or SAMPLES) / STEPS


def test_a_loop_that_leaves_an_epoch_goes_on_in_it(allocated):
    run = allocated()
    train(run, 3)
    lose_draws(run[3], 2)
    train(run, 3)  # draws 5 to 7
    assert epochs(run) == 1
    lose_draws(run[3], STEPS)  # all of an epoch
    assert epochs(run) == 1
    train(run, 1)
    assert epochs(run) == 2


def test_draws_that_workers_fetched_ahead_are_lost_in_their_epoch(allocated):
    budget = PrivacyBudget(epsilon(2) * (1 + 1e-9), DELTA, when_spent="stop")
    engine, made, optimizer, loader = run = allocated(workers=1, budget=budget)
    draws = []
    for _ in range(20):
        for (x,) in loader:
            engine.backward(losses_of(made, x))
            draws.append(loader._mark.draw)
            optimizer.step()
            if loader.is_last:
                break
    used = sorted(set(draws))
    assert len(used) == loader.releases < 2 * STEPS and used[-1] < 2 * STEPS
    assert epochs(run) == len({draw // STEPS for draw in used}) == 2


def test_with_trials_pairs_are_in_one_draw_of_an_epoch():
    x, own, engine = (
        torch.randn(SAMPLES, 2, 3),
        nn.Sequential(nn.Linear(3, 2)),
        dpflash.PrivacyEngine(seed=0),
    )
    x[:, 0, 0] = torch.arange(SAMPLES)

    def collate(pairs):
        return {"x": torch.stack(pairs, 1).flatten(0, 1)}

    made, optimizer, loader = engine.make_private(
        module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
        data_loader=DataLoader(x, batch_size=BATCH, collate_fn=dpflash.packing.Pairs(collate)),
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
        sampling="random_allocation",
    )
    found = []
    for batch in loader:
        engine.backward(losses_of(made, dpflash.packing.Pairs.rows(batch)["x"]))
        found += batch["x"][loader.is_real, 0, 0].tolist()
        optimizer.step()
    assert sorted(found) == list(range(SAMPLES))
    assert epochs((engine,)) == 1 and loader.releases == STEPS


def test_a_release_that_was_charged_and_dropped_has_paid_for_its_epoch(allocated, monkeypatch):
    engine, made, optimizer, loader = run = allocated()

    def failing(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "set", failing)
        with pytest.raises(MemoryError):
            for (x,) in loader:
                engine.backward(losses_of(made, x))
    optimizer.zero_grad()
    train(run, STEPS - 1)
    assert epochs(run) == 1
    train(run, 1)
    assert epochs(run) == 2


@pytest.mark.parametrize("at", [3, STEPS, 13])
def test_with_a_seed_a_resumed_run_has_bits_and_cost_of_the_whole(at, allocated, tmp_path):
    whole = allocated()
    train(whole, at)
    whole[0].save_checkpoint(tmp_path / "run.pt")
    wanted = train(whole, 9)
    resumed = allocated()
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    assert torch.equal(train(resumed, 9), wanted)
    assert epochs(resumed) == epochs(whole) == -(-(at + 9) // STEPS)


def test_without_a_seed_a_load_pays_for_another_allocation(allocated, tmp_path):
    run = allocated(seed=None)
    train(run, 3)
    run[0].save_checkpoint(tmp_path / "run.pt")
    assert "block" not in run[0].state_dict()["dpflash-engine-1"]
    resumed = allocated(seed=None)
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    train(resumed, 5)  # the rest of the epoch
    assert epochs(resumed) == 2
    train(resumed, STEPS)
    assert epochs(resumed) == 3
    assert resumed[0].get_epsilon(DELTA) == epsilon(3)


def test_an_engine_that_is_set_back_pays_for_its_new_allocation(allocated, tmp_path):
    """Also with a seed: draws of a loader that is set back are other ones."""
    run = allocated(ledger=tmp_path / "ledger.jsonl")
    train(run, 2)
    run[0].save_checkpoint(tmp_path / "run.pt")
    train(run, 2)
    run[0].load_checkpoint(tmp_path / "run.pt")
    train(run, 2)
    assert epochs(run) == 2


def test_in_a_forked_process_an_epoch_is_paid_for_anew(allocated):
    run = allocated()
    train(run, 2)
    # What the process that was forked does.
    run[0]._keys.leave_ranks()
    run[0]._run.leave_ranks()
    train(run, 2)
    assert epochs(run) == 2


def test_batches_of_unknown_origin_are_paid_for_by_themselves(allocated):
    engine, made, optimizer, _ = run = allocated(foreign_batches=True)
    train(run, 2)
    engine.backward(losses_of(made, data(5)))
    optimizer.step()
    train(run, STEPS - 2)
    kinds = [(type(event).__name__, count) for event, count in engine.accountant.events]
    assert kinds == [("RandomAllocationGaussian", 1), ("Gaussian", 1)]
    assert engine.neighboring_relation == "zero_out"


def test_noise_may_rise_within_an_epoch_and_fall_at_its_end(allocated):
    engine, _, optimizer, loader = run = allocated()
    train(run, 2)
    optimizer.noise_multiplier = 2.0
    train(run, 2)
    optimizer.noise_multiplier = 1.4
    with pytest.raises(ValueError, match=r"noise_multiplier=1.4 in an epoch .* with 1.5"):
        train(run, 1)
    assert epochs(run) == 1 and loader.releases == 4
    optimizer.noise_multiplier = NOISE
    train(run, 3)  # a draw was lost
    optimizer.noise_multiplier, optimizer.max_grad_norm = 1.4, 3.0
    train(run, 1)
    noises = [(e.noise_multiplier, count) for e, count in engine.accountant.events]
    assert noises == [(NOISE, 1), (1.4, 1)]


# Budgets and ledgers


def test_a_budget_counts_epochs(allocated):
    budget = PrivacyBudget(epsilon(3) * (1 + 1e-9), DELTA, when_spent="stop")
    run = allocated(budget=budget)
    engine, made, optimizer, loader = run
    assert engine.remaining_steps() == 3 * STEPS
    train(run, 3)
    assert engine.remaining_steps() == 3 * STEPS - 3
    lose_draws(loader, 2)
    train(run, 1)
    assert engine.remaining_steps() == 3 * STEPS - 6
    for _ in range(4):
        for (x,) in loader:
            engine.backward(losses_of(made, x))
            optimizer.step()
    assert loader.releases == 3 * STEPS - 2 and engine.remaining_steps() == 0
    assert epochs(run) == 3


def test_a_budget_stops_where_the_last_draw_of_an_epoch_was_lost(allocated):
    run = allocated(budget=PrivacyBudget(epsilon(1) * (1 + 1e-9), DELTA, when_spent="stop"))
    train(run, STEPS - 1)
    lose_draws(run[3], 1)
    assert list(run[3]) == [] and epochs(run) == 1


def test_noise_for_an_epsilon_is_that_of_the_epochs():
    own = nn.Linear(3, 2)
    engine = dpflash.PrivacyEngine(seed=0)
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data()), batch_size=BATCH),
        target_epsilon=3.0,
        target_delta=DELTA,
        epochs=2,
        max_grad_norm=1.0,
        sampling="random_allocation",
        verify_first_batch=False,
    )
    noise = optimizer.noise_multiplier
    assert 2.99 < epsilon(2, noise_multiplier=noise) <= 3.0
    poisson = ContourAccountant(neighboring_relation="zero_out")
    event = PoissonGaussian(relation="zero_out", noise_multiplier=noise, sample_rate=1 / STEPS)
    poisson.compose(event, 2 * STEPS)
    assert poisson.get_epsilon(DELTA) > 3.0
    run = engine, own, optimizer, loader
    train(run, STEPS + 3)
    engine.load_state_dict(engine.state_dict())
    with pytest.warns(UserWarning, match=f"in 2 epochs of {STEPS}, and a checkpoint loaded with"):
        engine._run.step.charge._events += 1
        train(run, 6)


def test_a_ledger_counts_epochs_also_of_a_run_that_is_resumed_in_one(allocated, tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = allocated(ledger=path)
    train(run, 3)
    run[0].save_checkpoint(tmp_path / "run.pt")
    resumed = allocated(ledger=path)
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    train(resumed, 6)
    lines = Ledger(path).lines
    assert [line.event is None for line in lines] == [False, *[True] * (STEPS - 1), False]
    assert lines[2].branch == "" != lines[3].branch
    again = dpflash.PrivacyEngine(ledger=path)
    assert again.get_epsilon(DELTA) == epsilon(2)
    cover = None
    for line in lines[:STEPS]:
        cover = _covered_after(cover, line)
    with pytest.raises(ValueError, match="no earlier line of the same run covers its"):
        _covered_after(cover, lines[1])


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise_mechanism": Banded(bands=3)}, "pass sampling='cyclic_poisson'"),
        ({"max_batch_size": 9}, "for which no epsilon of truncated batches is known"),
        ({"sample_rate": 0.1, "steps_per_epoch": 10}, "sample_rate=0.1 with sampling='random_all"),
        (
            {"unit_of": [0] * SAMPLES, "examples_per_unit": 2, "unit_sampling": "example"},
            "sampling='random_allocation' with unit_of",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, message, allocated):
    with pytest.raises(ValueError, match=message):
        allocated(**options)


def test_one_band_is_independent_noise(allocated):
    one, none = allocated(noise_mechanism=Banded(bands=1)), allocated()
    assert torch.equal(train(one, 9), train(none, 9)) and epochs(one) == 2


@pytest.mark.parametrize("name", ["rdp", "gdp", "gaussian"])
def test_accountants_without_a_bound_are_refused_before_training(name, allocated):
    with pytest.raises(ValueError, match=f"accountant='{name}' does not support RandomAllocation"):
        allocated(accountant=create_accountant(name))


def test_opacus_accountants_loaders_and_relations_are_refused(allocated):
    with pytest.raises(ValueError, match="sampling='random_allocation' needs the number of each"):
        next(iter(allocated()[3].batch_sampler))
    with pytest.raises(ValueError, match="neighboring_relation='add_remove': .*dataset_size="):
        engine = dpflash.PrivacyEngine(neighboring_relation="add_remove")
        own = nn.Linear(3, 2)
        engine.make_private(
            module=own,
            optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(data()), batch_size=BATCH),
            noise_multiplier=NOISE,
            max_grad_norm=1.0,
            sampling="random_allocation",
        )
    opacus = pytest.importorskip("opacus.accountants")
    with pytest.raises(ValueError, match="not the random_allocation sampler"):
        allocated(accountant=opacus.RDPAccountant())


def test_an_audit_is_refused(allocated):
    with pytest.raises(ValueError, match="sampling='random_allocation': the audit's claim"):
        allocated()[0].audit(steps=2)


def test_a_checkpoint_of_another_sampler_or_epoch_is_refused(allocated, tmp_path):
    run = allocated()
    train(run, 1)
    run[0].save_checkpoint(tmp_path / "run.pt")
    for other in ({"sampling": "poisson"}, {"dataset_size": 40}):
        with pytest.raises(ValueError, match="the checkpoint does not fit"):
            allocated(**other)[0].load_checkpoint(tmp_path / "run.pt")


def test_a_signalled_batch_without_a_draw_is_no_part_of_a_paid_epoch(allocated):
    engine, made, optimizer, loader = run = allocated()
    train(run, 2)
    size = loader.tracker.emitted[0]
    optimizer.signal_skip_step(do_skip=False)
    with pytest.raises(dpflash.PrivateRefusal, match="the batch is not of the private loader"):
        engine.backward(losses_of(made, data(size)))
    assert epochs(run) == 1 and loader.releases == 2
