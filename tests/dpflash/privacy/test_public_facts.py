"""Rates, steps and divisors come from a public number, or the relation says what is public."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpflash import PrivacyEngine, PrivateRefusal
from dpflash.accounting import PoissonGaussian, TruncatedPoissonGaussian
from dpflash.train.config import TrainingConfig, noise_for

try:
    import opacus
except ImportError:
    opacus = None

DELTA = 1e-5


def made(entries, *, batch_size=10, engine=None, target=None, **options):
    """(engine, model, optimizer, loader) for a dataset of so many equal entries."""
    model = nn.Linear(1, 1, bias=False)
    engine = engine or PrivacyEngine(accountant="rdp", seed=0)
    parts = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.0),
        "data_loader": DataLoader(TensorDataset(torch.full((entries, 1), 7.0)), batch_size),
        "max_grad_norm": 1.0,
        **options,
    }
    if target is None:
        return engine, *engine.make_private(noise_multiplier=2.0, **parts)
    return engine, *engine.make_private_with_epsilon(
        target_epsilon=target, target_delta=DELTA, epochs=2, **parts
    )


def public_numbers(engine, model, optimizer, loader):
    """What an observer sees of a run without looking at its parameters."""
    return {
        "rate": loader.sample_rate,
        "steps": (len(loader), loader.steps_per_epoch),
        "divisor": (optimizer.expected_batch_size, loader.expected_batch_size),
        "slots": loader.slots,
        "event": loader.plan.event(1.0),
        "noise": optimizer.noise_multiplier,
        "plan": str(engine.public),
    }


# The attack of Opacus issue 819: both datasets have equal large gradients, so that every mean
# of an update is a function of the rate and the divisor.
NEIGHBORS = [(101, 100), (100, 99), (11, 10), (10, 9)]


@pytest.mark.parametrize(("entries", "neighbor"), NEIGHBORS)
@pytest.mark.parametrize(
    "options",
    [{}, {"target": 3.0}, {"max_batch_size": 40, "max_dataset_size": 1000}],
    ids=["noise", "target", "cut"],
)
def test_neighbors_have_the_same_rates_steps_divisors_and_noise_under_a_public_size(
    entries, neighbor, options
):
    one, two = (
        public_numbers(*made(n, dataset_size=1000, **options)) for n in (entries, neighbor)
    )
    assert one == two
    assert one["rate"] == 0.01 and one["steps"] == (100, 100) and one["divisor"] == (10, 10)


@pytest.mark.parametrize(("entries", "neighbor"), NEIGHBORS)
def test_without_one_they_differ_and_the_relation_is_of_datasets_of_one_size(entries, neighbor):
    one, two = (made(n) for n in (entries, neighbor))
    assert public_numbers(*one)["rate"] != public_numbers(*two)["rate"] or neighbor <= 10
    assert public_numbers(*one) != public_numbers(*two)
    for engine, _, _, loader in (one, two):
        assert loader.plan.event(1.0).relation == engine.neighboring_relation == "zero_out"
        assert "taken as public" in str(engine.public)


@pytest.mark.skipif(opacus is None, reason="needs Opacus")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
def test_opacus_has_another_rate_and_divisor_for_a_neighbor_under_add_remove():
    found = []
    for entries in (101, 100):
        model = nn.Linear(1, 1)
        _, optimizer, loader = opacus.PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(TensorDataset(torch.zeros(entries, 1)), batch_size=10),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        found.append((loader.batch_sampler.sample_rate, optimizer.expected_batch_size))
    (rate, divisor), (other_rate, other_divisor) = found
    assert rate != other_rate and divisor != other_divisor
    # The mean update of all entries, each clipped to 1, of which one adds rate / divisor.
    moved = abs(101 * rate / divisor - 100 * other_rate / other_divisor)
    assert moved > 1.5 * max(rate / divisor, other_rate / other_divisor)


@pytest.mark.parametrize(
    "declared", [{"dataset_size": 40}, {"sample_rate": 0.25, "steps_per_epoch": 7}], ids=str
)
def test_each_entry_is_drawn_at_the_declared_rate_and_divided_by_the_batch_size(declared):
    """Entries are clipped to exactly C, so a release counts them; draws at 5 sigma."""
    engine, model, optimizer, loader = made(160, **declared, batch_size=10)
    optimizer.noise_multiplier = 0.0
    total = 0.0
    for _ in range(4):
        for (x,) in loader:
            engine.backward(model(x).squeeze(1))
            optimizer.step()
            if loader.is_last:
                total += float(model.weight.grad) * 10
            optimizer.zero_grad()
    steps = optimizer.releases
    assert steps == 4 * loader.steps_per_epoch and loader.steps_per_epoch in (4, 7)
    assert loader.sample_rate == 0.25
    spread = math.sqrt(steps * 160 * 0.25 * 0.75)
    assert abs(total - steps * 40) <= 5 * spread


@pytest.mark.parametrize("entries", [5, 9, 500])
def test_a_declared_size_is_never_compared_with_the_number_of_entries(entries):
    engine, model, optimizer, loader = made(entries, dataset_size=20, batch_size=10)
    assert loader.sample_rate == 0.5 and loader.steps_per_epoch == 2
    assert engine.neighboring_relation == "add_remove"
    assert engine.public.dataset_size == 20 and engine.public.is_declared
    assert "dataset size: 20, declared" in str(engine.public) and str(entries) not in str(
        engine.public
    ).replace("500 ", "")


def test_epsilon_is_that_of_the_public_rate_and_the_same_with_a_size_that_is_taken_as_public():
    declared, taken = made(100, dataset_size=100), made(100)
    for run in (declared, taken):
        engine, model, optimizer, loader = run
        for (x,) in loader:
            engine.backward(model(x).squeeze(1))
            optimizer.step()
            optimizer.zero_grad()
    assert declared[0].get_epsilon(DELTA) == taken[0].get_epsilon(DELTA) > 0
    relations = [engine.neighboring_relation for engine, *_ in (declared, taken)]
    assert relations == ["add_remove", "zero_out"]
    assert declared[0].accountant.neighboring_relation == "add_remove"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dataset_size": 9}, "dataset_size=9 below the loader's batch_size=10"),
        ({"dataset_size": 0}, "dataset_size=0"),
        ({"dataset_size": 10.0}, "dataset_size=10.0"),
        ({"dataset_size": 50, "sampling": "fixed_size"}, "dataset_size=50 with sampling='fixed"),
        ({"dataset_size": 50, "poisson_sampling": False}, "dataset_size=50 with sampling='shuf"),
        ({"sample_rate": 0.1}, "sample_rate=0.1: sample_rate and steps_per_epoch come together"),
        ({"steps_per_epoch": 4}, "steps_per_epoch=4: sample_rate and steps_per_epoch"),
        ({"sample_rate": 1.5, "steps_per_epoch": 4}, "sample_rate=1.5"),
        ({"sample_rate": 0.0, "steps_per_epoch": 4}, "sample_rate=0.0"),
        ({"sample_rate": 0.1, "steps_per_epoch": 0}, "steps_per_epoch=0"),
        (
            {"dataset_size": 90, "sample_rate": 0.1, "steps_per_epoch": 4},
            "the size gives the rate",
        ),
    ],
    ids=str,
)
def test_public_numbers_that_contradict_each_other_are_refused_by_name(options, words):
    with pytest.raises(ValueError, match=words):
        made(30, **options)


def test_add_remove_needs_a_public_size():
    engine = PrivacyEngine(neighboring_relation="add_remove")
    with pytest.raises(
        ValueError, match=r"neighboring_relation='add_remove'.*dataset_size=\.\.\."
    ):
        made(30, engine=engine)
    made(30, engine=engine, dataset_size=40)
    assert engine.neighboring_relation == "add_remove"


@pytest.mark.parametrize(
    "declared", [{"dataset_size": 200}, {"sample_rate": 0.05, "steps_per_epoch": 20}]
)
def test_the_chance_of_a_cut_is_that_of_the_largest_dataset(declared):
    given = {"max_batch_size": 25, "max_dataset_size": 300, **declared}
    expected = TruncatedPoissonGaussian(
        noise_multiplier=1.0, sample_rate=0.05, max_batch_size=25, num_samples=300
    )
    # A cap that the private number of entries cannot exceed is not taken for none.
    for entries in (20, 30, 300):
        assert made(entries, **given)[3].plan.event(1.0) == expected
    with pytest.raises(PrivateRefusal, match="than max_dataset_size=300, so") as caught:
        made(301, **given)
    assert "301" not in str(caught.value) and caught.value.details == {"num_samples": 301}
    no_cut = made(30, **{**given, "max_batch_size": 300})[3]
    assert no_cut.plan.event(1.0) == PoissonGaussian(noise_multiplier=1.0, sample_rate=0.05)
    with pytest.raises(ValueError, match="Pass max_dataset_size=, a public number"):
        made(30, **{**given, "max_dataset_size": None})
    with pytest.raises(ValueError, match="max_dataset_size=0|max_dataset_size=150 below dataset_"):
        made(30, **{**given, "max_dataset_size": 150 if "dataset_size" in declared else 0})


def test_a_draw_that_cannot_be_larger_is_not_cut():
    whole = made(20, max_batch_size=20)[3]
    assert whole.plan.event(1.0) == PoissonGaussian(
        relation="zero_out", noise_multiplier=1.0, sample_rate=0.5
    )


def test_a_delta_is_compared_with_the_public_size():
    with pytest.warns(UserWarning, match="not below 1 / 200000, the number of privacy units"):
        made(30, dataset_size=200_000, target=1.0)


def test_a_checkpoint_of_another_public_size_is_refused_and_of_another_number_is_not(tmp_path):
    first = made(30, dataset_size=100)
    first[0].save_checkpoint(tmp_path / "c")
    made(31, dataset_size=100)[0].load_checkpoint(tmp_path / "c")
    with pytest.raises(ValueError, match="does not fit the data loader"):
        made(30, dataset_size=200)[0].load_checkpoint(tmp_path / "c")


def test_the_plan_says_what_is_public():
    engine, model, _, _ = made(100, dataset_size=1000)
    model(torch.ones(2, 1))
    text = str(engine.plan())
    assert "public slots: 2 in each microbatch" in text
    assert "lengths: unknown" in text and "dataset size: 1000, declared" in text
    with pytest.raises(ValueError, match="no private model"):
        _ = PrivacyEngine().public


def test_a_training_job_takes_rate_and_noise_from_a_declared_size():
    options = {"steps": 5, "batch_size": 10}
    config = TrainingConfig(dataset_size=1000, **options)
    assert config.sample_rate(37) == 0.01 and noise_for(config, 37) == noise_for(config, 999)
    assert TrainingConfig(**options).sample_rate(40) == 0.25
    with pytest.raises(ValueError, match="dataset_size=9 below batch_size=10"):
        TrainingConfig(dataset_size=9, **options)
