"""Random numbers of a logical batch come from a secret, not from a seed that somebody knows."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

import dpflash
from dpflash.optimize import wrapper as leveled
from dpflash.random_state import seed_generators


class Dropping(nn.Module):
    """Keeps the masks that it drew, one for each call."""

    def __init__(self, draw=lambda shape: torch.nn.functional.dropout(torch.ones(shape))):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.draw = draw
        self.masks = []

    def forward(self, x):
        mask = self.draw(x.shape)
        self.masks.append(mask.detach().clone())
        return self.layer(x * mask)


def python_mask(shape):
    return torch.tensor([random.random() < 0.5 for _ in range(shape.numel())]).view(shape).float()


def numpy_mask(shape):
    return torch.from_numpy(np.random.rand(*shape) < 0.5).float()


SOURCES = [Dropping().draw, python_mask, numpy_mask]
every_source = pytest.mark.parametrize("draw", SOURCES, ids=["torch", "python", "numpy"])


def known_seed(seed=0):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def masks_of(private, draw, *, seed=None, calls=1):
    engine, model, *_ = private(Dropping(draw), seed=seed)
    known_seed()
    for _ in range(calls):
        model(torch.ones(6, 8))
    return model.masks


@every_source
def test_a_known_seed_of_the_user_tells_no_mask(draw, private):
    first, second = (masks_of(private, draw)[0] for _ in range(2))
    assert not torch.equal(first, second)
    # A seeded engine is for research, and repeats them.
    first, second = (masks_of(private, draw, seed=5)[0] for _ in range(2))
    assert torch.equal(first, second)


@every_source
def test_two_calls_two_batches_and_two_ranks_have_masks_of_their_own(draw, private, monkeypatch):
    masks = masks_of(private, draw, seed=5, calls=3)
    engine, model, optimizer, loader = private(
        Dropping(draw), torch.ones(60, 8), batch_size=7, seed=5, verify_first_batch=False
    )
    for (x,) in loader:
        known_seed()
        engine.backward(model(x).square().mean(1))
        optimizer.step()
        optimizer.zero_grad()
        if len(model.masks) == 5:
            break
    engine, other, *_ = private(Dropping(draw), seed=5)
    monkeypatch.setattr(type(engine._ranks), "data_rank", 1)
    other(torch.ones(6, 8))
    found = [m[0] for m in (*masks, *model.masks, *other.masks)]
    assert len({tuple(m.tolist()) for m in found}) == len(found) == 9


@every_source
def test_the_users_generators_go_on_as_if_one_number_had_been_drawn(draw, private):
    engine, model, *_ = private(Dropping(draw), seed=5)

    def following():
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    known_seed(3)
    torch.randint(2**62, ())
    expected = following()
    known_seed(3)
    model(torch.ones(6, 8))
    assert following() == expected
    # Also where the forward fails, and none where nothing is trained.
    known_seed(3)
    with pytest.raises(RuntimeError):
        model(torch.ones(6, 9))
    assert following() == expected
    known_seed(3)
    with torch.no_grad():
        model(torch.ones(6, 8))
    known_seed(3)
    draw(torch.Size((6, 8)))
    expected = following()
    known_seed(3)
    with torch.no_grad():
        model(torch.ones(6, 8))
    assert following() == expected


class Augmented(Dataset):
    """Zeros plus random numbers, which are read from the generators."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


class AugmentedTogether(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def drawn(data, *, releases=4, seed=None, workers=0, shuffle=False, **options):
    """What dataset and loop draw for each microbatch, and what is drawn after each release."""
    model, engine = nn.Linear(4, 2), dpflash.PrivacyEngine(seed=seed)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=4, num_workers=workers, shuffle=shuffle),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        verify_first_batch=False,
        **options,
    )
    read, looped, after = [], [], []
    known_seed()
    while len(after) < releases:
        for batch in loader:
            read.append(str(batch[:, 1:].tolist()))
            looped.append(str([torch.rand(1).item(), random.random(), np.random.rand()]))
            engine.backward(model(batch * torch.rand(len(batch), 1)).square().mean(1))
            optimizer.step()
            if loader.is_last:
                after.append((torch.rand(1).item(), random.random(), np.random.rand()))
    return read, looped, after


KINDS = [
    {},
    {"sampling": "shuffled", "shuffle": True},
    {"sampling": "fixed_size", "physical_batch_size": 2},
    {"workers": 1},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("kind", [Augmented, AugmentedTogether])
def test_a_known_seed_tells_nothing_that_dataset_and_loop_draw(kind, options):
    one, two = (drawn(kind(16), **options) for _ in range(2))
    for ours, theirs in zip(one[:2], two[:2], strict=True):
        assert not set(ours) & set(theirs) and len(set(ours)) == len(ours)
    # What is drawn after a release does not tell how many microbatches there were.
    assert one[2] == two[2] and len(set(one[2])) == len(one[2])
    one, two = (drawn(kind(16), seed=5, **options) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("workers", [0, 1])
def test_a_known_seed_tells_nothing_in_a_managed_loop(workers):
    manager = pytest.importorskip("opacus.utils.batch_memory_manager").BatchMemoryManager

    def run():
        model, engine = nn.Linear(4, 2), dpflash.PrivacyEngine()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            data_loader=DataLoader(Augmented(16), batch_size=4, num_workers=workers),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        drawn = []
        known_seed()
        with manager(
            data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
        ) as managed:
            for batch in managed:
                drawn += [str(batch[:, 1:].tolist()), str(torch.rand(2).tolist())]
                engine.backward(model(batch).square().mean(1))
                optimizer.step()
                optimizer.zero_grad()
        return drawn

    one, two = run(), run()
    assert not set(one) & set(two) and len(set(one)) == len(one)


class OfWorker(Augmented):
    """Draws from a generator of each worker, which begins as the worker does."""

    def __getitem__(self, index):
        if not hasattr(self, "generator"):
            self.generator = np.random.default_rng(get_worker_info().seed)
        return torch.tensor([index, *self.generator.random(3)], dtype=torch.float32)


def test_workers_begin_each_epoch_otherwise_and_from_a_secret():
    one, two = (drawn(OfWorker(16), releases=12, workers=1)[0] for _ in range(2))
    assert not set(one) & set(two) and len(set(one)) == len(one)


@pytest.mark.parametrize("options", [{}, {"sampling": "shuffled"}], ids=str)
def test_a_seed_set_after_a_pass_that_was_left_goes_on_after_another(options, private):
    engine, model, optimizer, loader = private(
        nn.Linear(4, 2), torch.randn(16, 4), seed=None, **options
    )
    left = iter(loader)
    next(left)
    known_seed()
    expected = torch.rand(3).tolist()
    known_seed()
    del left
    assert torch.rand(3).tolist() == expected
    known_seed()
    with torch.no_grad():
        for _ in loader:
            torch.rand(1)
    assert torch.rand(3).tolist() == expected


def test_other_draws_have_the_random_numbers_that_they_had_with_one_entry_less():
    few, many = (drawn(Augmented(size), seed=3, releases=8, dataset_size=64) for size in (63, 64))
    assert len(few[0]) != len(many[0]) and few[2] == many[2]
    assert [few[0][-1], few[1][-1]] == [many[0][-1], many[1][-1]]


def test_each_generator_has_a_stream_of_its_own():
    seed_generators(2**40 + 3)
    values = {random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()}
    assert len(values) == 3


def test_each_epoch_of_a_shuffled_loader_has_an_order_of_its_own():
    torch.manual_seed(0)
    x = torch.arange(8.0)[:, None]
    model, engine = nn.Linear(1, 2), dpflash.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x), batch_size=4, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sampling="shuffled",
    )
    epochs = []
    for _ in range(3):
        epochs.append([])
        for (x,) in loader:
            epochs[-1] += x.flatten().tolist()
            engine.backward(model(x).square().mean(1))
            optimizer.step()
    assert len(set(map(tuple, epochs))) == 3


class Inside(nn.Module):
    """A checkpoint within the model."""

    def __init__(self):
        super().__init__()
        self.part = Dropping()

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=False)


@pytest.mark.parametrize("mode", ["instantiate", "book_keeping", "ghost"])
@pytest.mark.parametrize("outside", [False, True], ids=["inside", "around"])
def test_a_recomputed_forward_has_the_masks_that_it_had(outside, mode, private):
    engine, model, *_ = private(
        Dropping() if outside else Inside(),
        grad_sample_mode=mode,
        noise_multiplier=1.0,
        verify_first_batch=False,  # its forward draws masks, too
    )
    drawn = model.masks if outside else model.part.masks
    x = torch.randn(6, 8)

    def run(x):
        return checkpoint(model, x, use_reentrant=False) if outside else model(x)

    # Two calls in one backward, from which a release begins.
    known_seed()
    engine.backward((run(x) + run(2 * x)).square().mean(1))
    again = drawn[2:]
    assert not torch.equal(drawn[0], drawn[1]) and len(again) >= 2
    assert all(any(torch.equal(m, first) for first in drawn[:2]) for m in again)
    assert {i for m in again for i in (0, 1) if torch.equal(m, drawn[i])} == {0, 1}


def test_a_resumed_run_has_the_masks_of_the_uninterrupted_one(private, tmp_path):
    def run(passes, load=False):
        known_seed()
        engine, model, optimizer, loader = private(
            Dropping(), torch.ones(24, 8), noise_multiplier=1.0, seed=3
        )
        if load:
            engine.load_checkpoint(tmp_path / "c")
        random.seed()
        for _ in range(passes):
            for (x,) in loader:
                engine.backward(model(x).square().mean(1))
                optimizer.step()
                optimizer.zero_grad()
        return engine, model

    whole = run(2)[1].masks
    run(1)[0].save_checkpoint(tmp_path / "c")
    torch.manual_seed(99)
    resumed = run(1, load=True)[1].masks
    assert len(resumed) > 3
    assert all(map(torch.equal, resumed, whole[-len(resumed) :]))


def test_a_compiled_model_has_secret_masks_too(private, monkeypatch):
    monkeypatch.setattr(leveled, "_BACKEND", "aot_eager")
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        engine, model, *_ = private(model, seed=None, optimize="aggressive")
        torch.manual_seed(0)
        outputs.append(model(torch.ones(6, 8)).detach())
        assert engine.optimization.compiled
    assert not torch.equal(*(output == 0 for output in outputs))
