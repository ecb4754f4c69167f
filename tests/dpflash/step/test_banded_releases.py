"""Releases with banded noise: their integers, their blocks, their cost, and what is refused."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpflash
from dpflash import PrivacyBudget
from dpflash.accounting import ContourAccountant, CyclicPoissonGaussian
from dpflash.kernels import gaussian_noise_, grid_of
from dpflash.noise import Banded
from dpflash.noise.reference import correlated
from dpflash.privacy.ledger import Ledger, _covered_after
from dpflash.sampling import CyclicPoissonBatchSampler
from dpflash.step import noise as noise_module
from dpflash.step.block import Block
from dpflash.step.gradients import Gradients

BANDED = Banded(bands=3, coefficients=(1.0, 0.75, 0.3))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def data(samples=60):
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))


def losses_of(made, x):
    return made(x).square().mean(1)


@pytest.fixture
def banded(private):
    """`private` with banded noise, on its loader's batches alone and without trials."""

    def make(own=None, x=None, *, mechanism=BANDED, **options):
        cyclic = {"sampling": "cyclic_poisson", "noise_mechanism": mechanism}
        fixed = {"foreign_batches": False, "verify_first_batch": False, "noise_multiplier": 0.5}
        x = data() if x is None else x
        return private(own or model(), x, **{**fixed, **cyclic, **options})

    return make


def train(made, steps, scale=1.0):
    """Release so many logical batches more, and keep every draw."""
    engine, made, optimizer, loader = made
    last = loader.releases + steps
    while loader.releases < last:
        for (x,) in loader:
            engine.backward(losses_of(made, x) * scale)
            optimizer.step()
            if loader.is_last and loader.releases == last:
                break
    return torch.cat([p.detach().flatten() for p in made.parameters()])


def lose_a_draw(loader):
    with torch.no_grad():
        next(iter(loader))


@pytest.fixture
def recorded(monkeypatch):
    """(release, place, number of the parameter -> y) of each release."""
    rows, original = [], noise_module.BandedNoise.add_

    def add_(self, totals, begins):
        before = {p: total.clone() for p, total in totals.items()}
        original(self, totals, begins)
        ids, added = self._parameter_ids, {}
        for p, total in totals.items():
            added[ids[p]] = y = (total - before[p]) / self._grid
            assert torch.equal(y, y.round())
        rows.append((self._step, self._place, added))

    monkeypatch.setattr(noise_module.BandedNoise, "add_", add_)
    return rows


def expected(key, shape, number, steps, *, noise_multiplier=0.5, bound=1.0, mechanism=BANDED):
    """y of some consecutive releases, a block, in Python's integers."""
    std = math.nextafter(
        math.nextafter(noise_multiplier * bound, math.inf) * mechanism.noise_scale(), math.inf
    )
    unit = grid_of(bound) / 2**8
    z = []
    for step in steps:
        out = torch.zeros(shape, dtype=torch.float64)
        address = {"key": key, "step": step, "parameter_id": number}
        gaussian_noise_(out, std=std, grid=unit, **address)
        z.append([int(Fraction(v) / Fraction(unit)) for v in out.flatten().tolist()])
    each = [correlated(element, mechanism.integers) for element in zip(*z, strict=True)]
    return [list(y) for y in zip(*each, strict=True)]


def assert_reference(engine, rows):
    """That the releases of each block are those of the reference."""
    blocks = []
    for row in rows:
        blocks.append([]) if row[1] == 0 else None
        blocks[-1].append(row)
    for block in blocks:
        assert [place for _, place, _ in block] == list(range(len(block)))
        steps = [step for step, _, _ in block]
        assert steps == list(range(steps[0], steps[0] + len(steps)))
        for number in block[0][2]:
            found = [ys[number].long().flatten().tolist() for _, _, ys in block]
            shape = block[0][2][number].shape
            assert found == expected(engine._keys.noise, shape, number, steps)
    return [len(block) for block in blocks]


def test_noise_is_that_of_the_reference_in_integers(banded, recorded):
    made = banded()
    train(made, 11)
    assert assert_reference(made[0], recorded) == [11]


def test_a_lost_draw_begins_another_block(banded, recorded):
    made = banded()
    train(made, 4)
    lose_a_draw(made[3])
    train(made, 5)
    assert assert_reference(made[0], recorded) == [4, 5]
    assert made[0].accountant.events[0][1] == 4  # 2 rounds and 2


def test_a_release_that_was_charged_and_dropped_ends_its_block(banded, recorded, monkeypatch):
    engine, made, optimizer, loader = run = banded()
    train(run, 2)
    batches = iter(loader)

    def failing(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Gradients, "set", failing)
        with pytest.raises(MemoryError):
            for (x,) in batches:
                engine.backward(losses_of(made, x))
    optimizer.zero_grad()
    train(run, 2)
    # The one that failed had added its noise.
    assert [place for _, place, _ in recorded] == [0, 1, 2, 0, 1]
    del recorded[2]
    assert assert_reference(engine, recorded) == [2, 2]


@pytest.mark.parametrize(
    ("owner", "name"), [(Gradients, "set"), (Block, "complete")], ids=["before", "behind"]
)
def test_an_interrupted_release_is_made_again_with_the_same_bits(owner, name, banded, monkeypatch):
    """Also where its noise is part of the past already."""
    whole = train(banded(), 5)
    engine, made, optimizer, loader = run = banded()
    train(run, 3)
    original, calls = getattr(owner, name), []

    def once(self, *given):
        calls.append(given)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(self, *given)

    monkeypatch.setattr(owner, name, once)
    for (x,) in loader:
        try:
            engine.backward(losses_of(made, x))
        except KeyboardInterrupt:
            assert loader.is_last
        optimizer.step()
        if loader.is_last:
            break
    assert torch.equal(train(run, 1), whole)


@pytest.mark.parametrize("at", [2, 7])
def test_with_a_seed_a_resumed_run_has_the_bits_of_the_whole(at, banded, tmp_path, recorded):
    whole = banded()
    train(whole, at)
    whole[0].save_checkpoint(tmp_path / "run.pt")
    wanted = train(whole, 6)
    del recorded[:]
    resumed = banded()
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    found = train(resumed, 6)
    assert [place for _, place, _ in recorded] == list(range(at, at + 6))
    assert torch.equal(found, wanted)
    assert resumed[0].get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)


def test_a_release_keeps_its_noise_for_the_next_ones(banded, monkeypatch):
    """Else each would draw the noise of the whole block again."""
    run, drawn = banded(), []
    original = noise_module.add_noise_

    def add_noise_(outs, streams):
        drawn.extend((stream.step, stream.parameter_id) for stream in streams)
        return original(outs, streams)

    monkeypatch.setattr(noise_module, "add_noise_", add_noise_)
    train(run, 5)
    assert drawn == [(step, number) for step in range(5) for number in range(6)]


def test_in_a_forked_process_a_block_ends(banded, recorded):
    run = banded()
    train(run, 2)
    # What the process that was forked does.
    run[0]._keys.leave_ranks()
    run[0]._run.leave_ranks()
    train(run, 2)
    assert [place for _, place, _ in recorded] == [0, 1, 0, 1]
    assert run[0].accountant.events[0][1] == 2


def test_without_a_seed_a_load_begins_another_block(banded, tmp_path, recorded):
    run = banded(seed=None)
    train(run, 4)
    run[0].save_checkpoint(tmp_path / "run.pt")
    assert "block" not in run[0].state_dict()["dpflash-engine-1"]
    del recorded[:]
    resumed = banded(seed=None)
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    train(resumed, 4)
    assert assert_reference(resumed[0], recorded) == [4]
    assert resumed[0].accountant.events[0][1] == 4


def test_a_parameter_that_was_frozen_meanwhile_has_the_noise_of_its_place(banded, recorded):
    run = banded()
    weight = run[1][2].weight
    for frozen in (False, True, True, False):
        weight.requires_grad_(not frozen)
        train(run, 1)
    assert [len(ys) for _, _, ys in recorded] == [6, 5, 5, 6]
    key, number = run[0]._keys.noise, 4
    assert list(run[1].parameters())[number] is weight
    wanted = expected(key, weight.shape, number, range(4))
    assert recorded[3][2][number].flatten().tolist() == wanted[3]


@pytest.mark.parametrize("sampling", ["cyclic_poisson", "poisson"])
def test_one_band_is_independent_noise_bit_for_bit(sampling, banded):
    one = banded(mechanism=Banded(bands=1), sampling=sampling)
    none = banded(mechanism=None, sampling="poisson")
    assert torch.equal(train(one, 6), train(none, 6))
    assert one[0].get_epsilon(1e-5) == none[0].get_epsilon(1e-5)


@pytest.mark.parametrize("width", [5_000, 60_000])
def test_the_covariance_of_releases_is_that_of_the_inverse(width, banded, recorded):
    """Chi-square of the whitened covariance of 6 releases, at a false-alarm rate of 1e-6.

    Of 90,000 values, and of more than 10^6.
    """
    steps, mechanism = 6, Banded.optimized(bands=4, steps=6)
    run = banded(nn.Linear(3, width), mechanism=mechanism, noise_multiplier=2.0)
    train(run, steps, scale=0.0)
    y = np.stack([ys[0].double().flatten().numpy() for _, _, ys in recorded]) * grid_of(1.0)
    draws = y.shape[1]
    c = sum(x * np.eye(steps, k=-i) for i, x in enumerate(mechanism.coefficients))
    white = c @ y / (2.0 * mechanism.noise_scale())
    white = white @ white.T / draws
    off = white[np.triu_indices(steps, 1)]
    statistic = draws * ((off**2).sum() + ((np.diag(white) - 1) ** 2).sum() / 2)
    assert statistic < chi2.isf(1e-6, steps * (steps + 1) // 2)


@pytest.mark.parametrize("kind", ["users", "public size", "packed"])
def test_users_documents_and_public_sizes_are_drawn_by_parts(kind, banded, monkeypatch):
    drawn, original = {}, CyclicPoissonBatchSampler.draw

    def draw(self, index):
        drawn[index] = original(self, index)
        return drawn[index]

    monkeypatch.setattr(CyclicPoissonBatchSampler, "draw", draw)
    if kind == "packed":
        documents = [torch.randint(0, 50, (3 + i % 9,)) for i in range(30)]
        own = dpflash.nn.LongContextLM(50, 8, 1, 1, max_seq_len=64)
        engine = dpflash.PrivacyEngine(seed=0)
        packing = dpflash.packing.PackTo(tokens=64, max_documents=8)
        made, optimizer, loader = engine.make_private(
            module=own,
            optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
            data_loader=DataLoader(documents, batch_size=4, collate_fn=packing),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            verify_first_batch=False,
            noise_mechanism=BANDED,
            sampling="cyclic_poisson",
        )
        for batch in loader:
            engine.backward(made(batch.input_ids, batch.targets, packed=batch))
            optimizer.step()
        samples, relation = 30, "zero_out"
    else:
        users = {"unit_of": [i // 2 for i in range(60)], "examples_per_unit": 2}
        options = users if kind == "users" else {"dataset_size": 90}
        run = banded(**options)
        train(run, 12)
        engine, loader, samples = run[0], run[3], 30 if kind == "users" else 60
        relation = "zero_out" if kind == "users" else "add_remove"
    ((event, count),) = engine.accountant.events
    assert count == -(-loader.releases // 3) and event.relation == relation
    size = 90 if kind == "public size" else samples
    assert event.sample_rate == pytest.approx(3 * 4 / size)
    parts = {}
    for t, those in drawn.items():
        assert all(parts.setdefault(i, t % 3) == t % 3 for i in those)
    assert max(parts) < samples and set(parts.values()) == {0, 1, 2}


# The cost


def test_releases_cost_a_round_for_each_of_their_bands(banded):
    run, spent = banded(accountant="contour"), []
    for steps in range(1, 10):
        train(run, 1)
        spent.append(run[0].get_epsilon(1e-5))
        ((event, count),) = run[0].accountant.events
        rate = pytest.approx(3 * 4 / 60)
        assert (event.sample_rate, event.bands, count) == (rate, 3, -(-steps // 3))
        claimed = ContourAccountant(neighboring_relation="zero_out")
        options = {"noise_multiplier": 0.5, "sample_rate": 4 / 60, "steps": steps}
        claimed.compose(BANDED.event(**options, relation="zero_out"))
        # The last column of a round that is not whole is longer in truth.
        assert spent[-1] >= claimed.get_epsilon(1e-5) * (1 - 1e-9)
        if steps % 3 == 0:
            assert spent[-1] == pytest.approx(claimed.get_epsilon(1e-5), rel=1e-9)
    assert len(set(spent)) == 3


def test_a_budget_counts_rounds(banded):
    four = ContourAccountant(neighboring_relation="zero_out")
    event = CyclicPoissonGaussian(
        relation="zero_out", noise_multiplier=0.5, sample_rate=0.2, bands=3
    )
    four.compose(event, 4)
    budget = PrivacyBudget(four.get_epsilon(1e-5) * (1 + 1e-9), 1e-5, when_spent="stop")
    run = banded(budget=budget, accountant="contour")
    left = [run[0].remaining_steps()]
    for _ in range(4):
        train(run, 1)
        left.append(run[0].remaining_steps())
    assert left == [12, 11, 10, 9, 8]
    lose_a_draw(run[3])
    train(run, 1)
    assert run[0].remaining_steps() == 5
    for _ in range(3):
        for (x,) in run[3]:
            run[0].backward(losses_of(run[1], x))
            run[2].step()
    assert run[3].releases == 4 + 6 and run[0].remaining_steps() == 0


@pytest.mark.parametrize("lost", ["left", "read", "fetched ahead"])
def test_a_loop_ends_where_a_lost_draw_leaves_no_round(lost, banded):
    """Two releases of the last round are left, and no other draw may have their places."""
    event = CyclicPoissonGaussian(
        relation="zero_out", noise_multiplier=0.5, sample_rate=0.2, bands=3
    )
    two = ContourAccountant(neighboring_relation="zero_out")
    two.compose(event, 2)
    budget = PrivacyBudget(two.get_epsilon(1e-5) * (1 + 1e-9), 1e-5, when_spent="stop")
    options = {"workers": 2} if lost == "fetched ahead" else {}
    engine, made, optimizer, loader = run = banded(budget=budget, accountant="contour", **options)
    train(run, 4)
    if lost == "left":
        lose_a_draw(loader)
    batches = iter(loader)
    if lost == "read":
        with torch.no_grad():
            next(batches)
    for (x,) in batches:
        engine.backward(losses_of(made, x))
        optimizer.step()
    assert list(loader) == [] and loader.releases == 4 and engine.remaining_steps() == 0


def test_noise_for_an_epsilon_is_that_of_the_rounds():
    own = model()
    engine = dpflash.PrivacyEngine(seed=0)
    _, optimizer, _ = engine.make_private_with_epsilon(
        module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data()), batch_size=4),
        target_epsilon=3.0,
        target_delta=1e-5,
        steps=10,
        max_grad_norm=1.0,
        sampling="cyclic_poisson",
        noise_mechanism=BANDED,
    )
    accountant = ContourAccountant(neighboring_relation="zero_out")
    event = CyclicPoissonGaussian(
        relation="zero_out",
        noise_multiplier=optimizer.noise_multiplier,
        sample_rate=0.2,
        bands=3,
    )
    accountant.compose(event, 4)
    assert 2.99 < accountant.get_epsilon(1e-5) <= 3.0


def test_a_ledger_counts_rounds_also_of_a_run_that_is_resumed_in_one(banded, tmp_path):
    path = tmp_path / "ledger.jsonl"
    run = banded(ledger=path)
    train(run, 4)
    run[0].save_checkpoint(tmp_path / "run.pt")
    resumed = banded(ledger=path)
    resumed[0].load_checkpoint(tmp_path / "run.pt")
    train(resumed, 3)
    lines = Ledger(path).lines
    assert [line.event is None for line in lines] == [False, True, True] * 2 + [False]
    assert lines[3].branch == "" != lines[4].branch
    cover = _covered_after(None, lines[0])
    for line in lines[1:3]:
        cover = _covered_after(cover, line)
    with pytest.raises(ValueError, match="no earlier line of the same run covers its"):
        _covered_after(cover, lines[2])
    with pytest.raises(ValueError, match="no earlier line of the same run covers its"):
        _covered_after(_covered_after(None, lines[0]), replace(lines[1], run="other"))


def test_reports_name_the_mechanism_and_its_memory(banded, tmp_path):
    run = banded(ledger=tmp_path / "ledger.jsonl")
    train(run, 2)
    assert run[0].sampler == "cyclic_poisson"
    said = "Banded(bands=3, coefficients=(1, 0.75, 0.30078)), 2 tensors of 8 bytes an element"
    assert f"noise mechanism: {said}" in str(run[0].public)
    first, second = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert '"CyclicPoissonGaussian"' in first and '"bands": 3' in first
    assert "CyclicPoissonGaussian" not in second


def test_a_split_round_warns_that_the_target_is_exceeded(banded):
    run = banded()
    run[0]._run.step.charge.expect(4, target_epsilon=3.0)
    train(run, 1)
    for _ in range(2):
        lose_a_draw(run[3])
        if run[3].releases == 2:
            with pytest.warns(UserWarning, match="release 3: .* 2 rounds of 3, and a logical"):
                train(run, 1)
        else:
            train(run, 1)


# noise_mechanism="auto"


def auto(method="make_private_with_epsilon", samples=60, batch_size=4, epsilon=8.0, **options):
    engine = dpflash.PrivacyEngine(seed=0)
    own = model()
    target = {"target_epsilon": epsilon, "target_delta": 1e-3, "epochs": 2}
    found = getattr(engine, method)(
        module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(data(samples)), batch_size=batch_size),
        max_grad_norm=1.0,
        verify_first_batch=False,
        noise_mechanism="auto",
        **(target if method != "make_private" else {}),
        **options,
    )
    return engine, *found


def test_auto_takes_the_bands_of_the_least_error_and_meets_the_target(caplog):
    with caplog.at_level("INFO", logger="dpflash.build"):
        run = auto()
    engine, _, _, loader = run
    best = dpflash.noise.compare_bands(
        num_samples=60, batch_size=4, epochs=2, target_epsilon=8.0, target_delta=1e-3
    )[0]
    assert best.noise.bands > 1 and loader.plan.mechanism == best.noise
    assert f"noise_mechanism='auto': {best.noise.bands} bands, with 0." in caplog.text
    assert f"Banded(bands={best.noise.bands}" in str(engine.public)
    assert engine.sampler == "cyclic_poisson"
    train(run, 30)
    assert 0.97 * 8 < engine.get_epsilon(1e-3) <= 8


def test_auto_is_independent_noise_where_bands_gain_nothing_or_have_no_memory(caplog):
    for run in (
        auto(epsilon=0.5, batch_size=30),
        auto(memory_budget=8 * 42 - 1),
        auto(sample_rate=0.6, steps_per_epoch=2),  # two parts would be smaller than a batch
    ):
        engine, _, _, loader = run
        assert loader.plan.mechanism is None and engine.sampler == "poisson"
    parameters = sum(p.numel() for p in model().parameters())
    assert parameters == 42
    assert auto(memory_budget=8 * 42)[3].plan.bands == 2


def test_auto_leaves_no_part_smaller_than_a_batch_where_a_rate_is_declared():
    # The size that the rate gives is rounded up to 16, of which four parts would have a batch.
    plan = auto(epsilon=30.0, sample_rate=0.255, steps_per_epoch=4)[3].plan
    assert plan.dataset_size == 16 and plan.bands == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"method": "make_private", "noise_multiplier": 1.0}, "make_private, which does not know"),
        ({"sampling": "cyclic_poisson"}, "sampling='cyclic_poisson' with .*; leave sampling out"),
        ({"poisson_sampling": False}, "sampling='shuffled' with .*; leave sampling out"),
        ({"max_batch_size": 9}, "max_batch_size=9 with .*; leave max_batch_size or"),
        ({"foreign_batches": True}, "foreign_batches=True with .*; leave foreign_batches or"),
        (
            {"unit_of": [0] * 60, "examples_per_unit": 2, "unit_sampling": "example"},
            "unit_sampling='example' with .*; leave unit_sampling or",
        ),
    ],
)
def test_what_auto_cannot_choose_for_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        auto(**options)


# What is refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mechanism": None}, "sampling='cyclic_poisson' with noise_mechanism=None"),
        ({"sampling": "poisson"}, "pass sampling='cyclic_poisson'"),
        ({"sampling": "fixed_size"}, "pass sampling='cyclic_poisson'"),
        ({"sampling": "shuffled", "mechanism": Banded(bands=1)}, "pass sampling='poisson'"),
        ({"mechanism": 4}, "noise_mechanism=4: expected a dpflash.noise.Banded"),
        ({"noise_multiplier": 60.0}, "noise_multiplier=60.0 with this noise_mechanism"),
        ({"foreign_batches": True}, "foreign_batches=True with noise_mechanism"),
        ({"max_batch_size": 9}, "for which no epsilon of truncated batches is known"),
        ({"batch_size": 21}, r"data_loader.batch_size=21 with 3 bands of noise_mechanism"),
        (
            {"unit_of": [0] * 60, "examples_per_unit": 2, "unit_sampling": "example"},
            "sampling='cyclic_poisson' with unit_of",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(options, message, banded):
    with pytest.raises(ValueError, match=message):
        banded(**options)


@pytest.mark.parametrize("name, value", [("noise_multiplier", 0.6), ("max_grad_norm", 2.0)])
def test_schedules_of_noise_and_bound_are_refused_before_the_charge(name, value, banded):
    engine, _, optimizer, loader = run = banded()
    train(run, 3)  # the next one is charged
    setattr(optimizer, name, value)
    with pytest.raises(ValueError, match=f"{name}={value}, and .* in the release before"):
        train(run, 1)
    assert engine.accountant.events[0][1] == 1 and loader.releases == 3


def test_other_loaders_and_accountants_are_refused(banded):
    with pytest.raises(ValueError, match="needs the number of each logical batch"):
        next(iter(banded()[3].batch_sampler))
    opacus = pytest.importorskip("opacus.accountants")
    with pytest.raises(ValueError, match="not the cyclic_poisson sampler"):
        banded(accountant=opacus.RDPAccountant())


def test_a_checkpoint_of_another_mechanism_is_refused(banded, tmp_path):
    run = banded()
    train(run, 1)
    run[0].save_checkpoint(tmp_path / "run.pt")
    for other in (Banded(bands=3), Banded(bands=2), Banded(bands=1)):
        with pytest.raises(ValueError, match="the checkpoint does not fit"):
            banded(mechanism=other)[0].load_checkpoint(tmp_path / "run.pt")
