"""A collate function that mixes the entries of a batch is refused before training, by name."""

import functools
import os
import queue
import random
import threading
import time
import traceback
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, default_collate

from dpflash import PrivacyEngine, PrivateRefusal, PrivateWarning
from dpflash.sampling.collate import _Trial

FULL = os.environ.get("DPFLASH_FULL") == "1"
IMAGES = [
    (torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(i)), i * i % 7) for i in range(9)
]
TEXTS = [
    torch.randint(1, 90, (length,), generator=torch.Generator().manual_seed(length))
    for length in (5, 9, 7, 8, 4, 6)
]


class Entries(Dataset):
    """A dataset that counts what is read of it."""

    def __init__(self, entries):
        self.entries = entries
        self.read = 0

    def __len__(self):
        return len(self.entries)

    def __getitem__(self, index):
        self.read += 1
        return self.entries[index]


# What mixes.


def mixup(batch, alpha=0.2, chance=1.0):
    x, y = default_collate(batch)
    if random.random() < chance:
        share = np.random.beta(alpha, alpha)
        x = share * x + (1 - share) * x[torch.randperm(len(x))]
    return x, y


def sometimes_mixup(batch):
    return mixup(batch, chance=0.5)


def even_mixup(batch):
    assert len(batch) % 2 == 0
    return mixup(batch)


def cutmix(batch):
    x, y = default_collate(batch)
    left, others = random.randrange(3), torch.randperm(len(x))
    x[:, :, :, left : left + 2] = x[others, :, :, left : left + 2]
    return x, y


def with_the_next(batch):
    x, y = default_collate(batch)
    return x, 0.9 * y + 0.1 * y.roll(1)


def with_the_one_before(batch):
    x, y = default_collate(batch)
    x[1:] += 0.01 * x[:-1].clone()
    return x, y


def with_its_mirror(batch):
    x, y = default_collate(batch)
    return {"x": (0.7 * x + 0.3 * x.flip(0)).numpy(), "y": y}


def centred(batch):
    x, y = default_collate(batch)
    return x - x.mean(0), y


def weights_that_sum_to_one(batch):
    return *default_collate(batch), torch.full((len(batch),), 1 / len(batch))


def ranks(batch):
    labels = [y for _, y in batch]
    return [x for x, _ in batch], [sorted(labels).index(y) for y in labels]


def mixed_padded(batch):
    x = pad_sequence(batch, batch_first=True).float()
    return 0.5 * x + 0.5 * x[torch.randperm(len(x))]


# What does not.


def flipped(batch):
    return default_collate([(x.flip(-1) if random.random() < 0.5 else x, y) for x, y in batch])


def noisy(batch):
    x, y = default_collate(batch)
    return x + 0.1 * torch.randn_like(x), y


class Own:
    """Random by a generator of its own, now and then."""

    def __init__(self, chance):
        self.chance = chance
        self.generator = np.random.default_rng(0)

    def __call__(self, batch):
        return default_collate(
            [(-x if self.generator.random() < self.chance else x, y) for x, y in batch]
        )


class Counting:
    """Keeps something between calls."""

    calls = 0

    def __call__(self, batch):
        self.calls += 1
        x, y = default_collate(batch)
        return -x if self.calls % 2 else x, y


def by_label(batch):
    order = sorted(range(len(batch)), key=lambda i: -batch[i][1])
    return default_collate([batch[i] for i in order]), torch.tensor(order)


def as_they_are(batch):
    return batch


def field_by_field(batch):
    return tuple(zip(*batch, strict=True))


def numbered(batch):
    return *default_collate(batch), torch.arange(len(batch)), len(batch)


def padded(batch):
    return {
        "ids": pad_sequence(batch, batch_first=True),
        "relative": torch.tensor([len(x) / max(map(len, batch)) for x in batch]),
    }


def padded_on_the_left(batch):
    longest = max(map(len, batch))
    return torch.stack([torch.cat([x.new_zeros(longest - len(x)), x]) for x in batch])


def time_first(batch):
    return pad_sequence(batch), [len(x) for x in batch]


def cut_to_the_shortest(batch):
    return torch.stack([x[: min(map(len, batch))] for x in batch])


def four_fields(batch):
    return default_collate([(x, y, x.sum(), -y) for x, y in batch])


def packed(batch):
    return torch.cat(batch)[None], torch.tensor([0, *map(len, batch)]).cumsum(0)


def masked(batch):
    ids = pad_sequence(batch, batch_first=True)
    mask = torch.bernoulli(torch.full(ids.shape, 0.15)).bool()
    words = torch.randint(90, ids.shape)
    return torch.where(mask, words, ids), ids.masked_fill(~mask, -100)


def masked_in_two_rounds(batch):
    """Each round draws as often as the entries want, so a longer one shifts the others' draws."""
    batch = [x.clone() for x in batch]
    for ids in batch:
        for t in range(len(ids)):
            if ids[t] % 3 == 0 and random.random() < 0.5:
                ids[t] = 91
    for ids in batch:
        for t in range(len(ids)):
            if ids[t] % 2 == 0 and random.random() < 0.3:
                ids[t] = 92
    return pad_sequence(batch, batch_first=True)


def in_place(batch):
    for ids in batch:
        ids.add_(1)
    return pad_sequence(batch, batch_first=True)


class Batch:
    """A class that the trial does not know."""

    def __init__(self, x):
        self.x = x


def of_a_class_of_its_own(batch):
    return Batch(pad_sequence(batch))


def raising(batch):
    raise KeyError("no such column")


MIXING = [
    (function, IMAGES)
    for function in (
        mixup,
        sometimes_mixup,
        even_mixup,
        cutmix,
        with_the_next,
        with_the_one_before,
        with_its_mirror,
        centred,
        weights_that_sum_to_one,
        ranks,
    )
] + [(mixed_padded, TEXTS)]
INNOCENT = [
    (function, IMAGES)
    for function in (
        default_collate,
        flipped,
        noisy,
        Own(0.5),
        Own(0.02),
        Counting(),
        as_they_are,
        field_by_field,
        numbered,
        four_fields,
    )
] + [
    (function, TEXTS)
    for function in (
        padded,
        padded_on_the_left,
        time_first,
        cut_to_the_shortest,
        packed,
        masked,
        masked_in_two_rounds,
        in_place,
        of_a_class_of_its_own,
    )
]
# As many tokens as entries in a batch of the trial.
INNOCENT += [(time_first, [ids[:4] for ids in TEXTS])]


def named(case):
    return getattr(case, "__name__", type(case).__name__) if callable(case) else ""


def make(collate, entries, *, workers=0, model=None, seed=0, **options):
    model = nn.Linear(2, 2) if model is None else model
    loader = DataLoader(entries, batch_size=4, collate_fn=collate, num_workers=workers)
    return PrivacyEngine(accountant="rdp", seed=seed).make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


@pytest.mark.parametrize(("collate", "entries"), MIXING, ids=named)
def test_a_function_that_mixes_entries_is_refused_by_its_name(collate, entries):
    model = nn.Linear(2, 2)
    with pytest.raises(PrivateRefusal, match=rf"collate_fn={collate.__name__} mixes the entries"):
        make(collate, Entries(entries), model=model)
    assert type(model) is nn.Linear


VECTORS = list(torch.randn(12, 5, generator=torch.Generator().manual_seed(0)))


def beside(shared):
    """A function that puts a value made of the stacked entries `[B, ...]` beside them."""
    return lambda entries: {"x": (x := torch.stack(entries)), "shared": shared(x)}


SHARED = {
    "float": lambda x: float(x.abs().mean()),
    "greatest": lambda x: float(x.max()),
    "int": lambda x: int(1000 * x.abs().max()),
    "text": lambda x: f"{float(x.mean()):.3f}",
    "0-dim tensor": torch.mean,
    "array": lambda x: np.array(float(x.mean())),
    "one number": lambda x: x.mean()[None],
    "a mean of rows": lambda x: x.mean(0),
    "nested": lambda x: [{"scale": float(x.norm())}],
}


@pytest.mark.parametrize("shared", SHARED.values(), ids=list(SHARED))
def test_a_value_of_all_entries_beside_the_rows_is_refused_by_its_place(shared):
    with pytest.raises(PrivateRefusal, match=r"makes batch\['shared'\].* from all entries"):
        make(beside(shared), VECTORS)


@pytest.mark.parametrize(
    "shared",
    [len, lambda x: x.shape[1], lambda x: "text", lambda x: x.transpose(0, -1), lambda x: None]
    + [lambda x: torch.tensor(x.shape[-1]), lambda x: [float(row.sum()) for row in x]],
)
def test_lengths_constants_and_columns_beside_the_rows_are_taken(shared):
    make(beside(shared), VECTORS)


def with_longest(entries):
    batch = pad_sequence(entries, batch_first=True)
    longest = batch.shape[1]
    as_float = torch.tensor([float(longest)])
    return {"x": batch, "n": longest, "float": as_float, "positions": torch.arange(longest)}


def test_the_longest_length_beside_the_rows_is_taken():
    make(with_longest, Entries(TEXTS))


def with_means_by_position(entries):
    x = pad_sequence(entries, batch_first=True)
    return {"x": x, "means": x.double().mean(0)}


def test_means_by_position_are_refused_also_where_entries_grow_longer():
    grown = sorted(TEXTS, key=len)
    with pytest.raises(PrivateRefusal, match=r"makes batch\['means'\]"):
        make(with_means_by_position, Entries(grown))


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, entries):
        self.calls += 1
        return {"x": torch.stack(entries), "number": self.calls + 0.5}


def test_a_counter_of_batches_beside_the_rows_is_taken():
    make(Counting(), VECTORS)


@pytest.mark.parametrize(("collate", "entries"), INNOCENT, ids=named)
def test_a_function_that_makes_each_row_of_its_own_entry_is_taken(collate, entries):
    before = [tuple(e) if isinstance(e, tuple) else e.clone() for e in entries]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivateWarning)
        make(collate, Entries(entries))
    for entry, known in zip(entries, before, strict=True):
        assert entry == known if isinstance(entry, tuple) else torch.equal(entry, known)


def test_draws_that_depend_on_other_entries_are_no_mixing():
    """Two entries draw equally often in all, and not in each round: the third gets others."""

    def in_two_rounds(batch):
        rounds = [[sum(random.random() for _ in range(n)) for *_, n in batch]]
        rounds += [[sum(random.random() for _ in range(n)) for _, n, _ in batch]]
        return torch.tensor([[x, *y] for (x, *_), *y in zip(batch, *rounds, strict=True)])

    assert not _Trial(in_two_rounds, [(1.0, 1, 2), (2.0, 2, 1), (3.0, 3, 3)]).mixes()
    for case in range(4):
        generator = torch.Generator().manual_seed(case)
        lengths = torch.randint(3, 8, (6,), generator=generator).tolist()
        entries = [torch.randint(1, 90, (n,), generator=generator) for n in lengths]
        assert not _Trial(masked_in_two_rounds, entries).mixes()


@pytest.mark.parametrize("sampling", ["poisson", "fixed_size", "shuffled"])
def test_every_sampling_has_the_trial(sampling):
    with pytest.raises(PrivateRefusal, match="centred mixes"):
        make(centred, Entries(IMAGES), sampling=sampling)


def test_a_target_epsilon_has_the_trial():
    model = nn.Linear(2, 2)
    with pytest.raises(PrivateRefusal, match="centred mixes"):
        PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(Entries(IMAGES), batch_size=4, collate_fn=centred),
            target_epsilon=3.0,
            target_delta=1e-3,
            epochs=1,
            max_grad_norm=1.0,
        )


NUMPY, TORCH = np.random.default_rng(0), torch.Generator()


def mixed(batch, order):
    x, y = default_collate(batch)
    return 0.6 * x + 0.4 * x[torch.as_tensor(order)], y


def by_numpy(batch):
    return mixed(batch, NUMPY.permutation(len(batch)))


def by_torch(batch):
    return (lambda: mixed(batch, torch.randperm(len(batch), generator=TORCH)))()


class ByAttribute:
    def __init__(self):
        self.options = {"source": [random.Random(0)]}

    def __call__(self, batch):
        source = self.options["source"][0]
        return mixed(batch, source.sample(range(len(batch)), len(batch)))


class ByLateGenerator:
    generator = None

    def __call__(self, batch):
        if self.generator is None:
            self.generator = np.random.default_rng()
        return mixed(batch, self.generator.permutation(len(batch)))


def by_legacy():
    source = np.random.RandomState(0)
    return functools.partial(lambda batch: mixed(batch, source.permutation(len(batch))))


def by_new_ones(batch):
    """Nothing sets them back, but one entry alone is not random."""
    return mixed(batch, np.random.default_rng().permutation(len(batch)))


OWN = [by_numpy, by_torch, ByAttribute(), ByLateGenerator(), by_legacy(), by_new_ones]


@pytest.mark.parametrize("collate", OWN, ids=named)
def test_mixing_by_a_generator_of_the_functions_own_is_refused(collate):
    with pytest.raises(PrivateRefusal, match="mixes the entries"):
        make(collate, Entries(IMAGES))
    *_, loader = make(collate, Entries(IMAGES), workers=1)
    with pytest.raises(PrivateRefusal, match="mixes the entries"):
        loader.collate_fn(IMAGES[:4])


@pytest.mark.parametrize(
    "uniform",
    [random.random, np.random.rand, lambda: float(torch.rand(())), NUMPY.random],
    ids=["python", "numpy", "torch", "own"],
)
@pytest.mark.parametrize("is_low", [True, False])
def test_mixing_in_one_batch_of_twenty_is_refused(uniform, is_low):
    def collate(batch):
        drawn = uniform()
        rare = drawn < 0.05 if is_low else drawn > 0.95
        return centred(batch) if rare else default_collate(batch)

    with pytest.raises(PrivateRefusal, match="mixes the entries"):
        make(collate, Entries(IMAGES))


def test_generators_of_the_functions_own_are_left_as_they_were():
    before = NUMPY.bit_generator.state, TORCH.get_state()
    for function in (by_numpy, by_torch):
        with pytest.raises(PrivateRefusal, match="mixes"):
            make(function, Entries(IMAGES))
    assert NUMPY.bit_generator.state == before[0] and torch.equal(TORCH.get_state(), before[1])


def test_a_function_whose_randomness_cannot_be_set_back_is_named():
    def noisy_by_new_ones(batch):
        x, y = default_collate(batch)
        return x + torch.as_tensor(np.random.default_rng().normal(size=x.shape)), y

    with pytest.warns(PrivateWarning, match="noisy_by_new_ones could not be tried"):
        make(noisy_by_new_ones, Entries(IMAGES))


# What is kept of a batch for the next.


class Kept:
    """Keeps the mean of the last batch, or of the first, in one of several places."""

    def __init__(self, where, first=False):
        self.where, self.first = where, first
        self.mean, self.means, self.tensor = None, [], torch.zeros(2, 4, 4)
        self.array = np.zeros((2, 4, 4))
        self.inner = Linked(torch.zeros(1))

    def get(self):
        if self.where == "list":
            return self.means[-1] if self.means else None
        if self.where in ("tensor", "array"):
            value = torch.as_tensor(getattr(self, self.where))
            return value.clone() if value.any() else None
        return getattr(self.inner if self.where == "inner" else self, "mean", None)

    def set(self, mean):
        if self.where == "list":
            self.means.append(mean)
        elif self.where in ("tensor", "array"):
            getattr(self, self.where)[...] = torch.as_tensor(mean)
        else:
            (self.inner if self.where == "inner" else self).mean = mean

    def __call__(self, batch):
        x, y = default_collate(batch)
        known = self.get()
        if known is None or not self.first:
            self.set(x.mean(0))
        return x - (self.get() if known is None else known), y


def kept_in_a_closure():
    greatest = 0.0

    def collate(batch):
        nonlocal greatest
        x, y = default_collate(batch)
        greatest = max(greatest, float(x.abs().max()))
        return x / greatest, y

    return collate


def kept_in_an_attribute(batch):
    x, y = default_collate(batch)
    own = kept_in_an_attribute
    own.mean = 0.9 * getattr(own, "mean", 0.0) + 0.1 * x.mean(0)
    return x - own.mean, y


RUNNING = None


def kept_in_a_global(batch):
    global RUNNING
    x, y = default_collate(batch)
    RUNNING = x.mean(0) if RUNNING is None else 0.9 * RUNNING + 0.1 * x.mean(0)
    return x - RUNNING, y


def numbered_labels():
    numbers = {}
    return lambda batch: [(x, numbers.setdefault(y, len(numbers))) for x, y in batch]


KEPT = {
    **{where: lambda where=where: Kept(where) for where in ("list", "tensor", "array", "inner")},
    "first batch": lambda: Kept("attribute", first=True),
    "closure": kept_in_a_closure,
    "function": lambda: kept_in_an_attribute,
    "global": lambda: kept_in_a_global,
    "labels": numbered_labels,
}


@pytest.mark.parametrize("make_collate", KEPT.values(), ids=KEPT)
def test_what_a_function_keeps_of_a_batch_for_the_next_is_refused(make_collate):
    with pytest.raises(PrivateRefusal, match="keeps values computed from one batch for the next"):
        make(make_collate(), Entries(IMAGES))


class Scaling:
    """Counts its calls, and keeps what it made of each entry."""

    def __init__(self):
        self.calls, self.made = 0, {}

    def __call__(self, batch):
        self.calls += 1
        rows = [self.made.setdefault(x.numpy().tobytes(), x.exp()) for x, _ in batch]
        return torch.stack(rows) * self.calls, [y for _, y in batch]


class LateNoise:
    """Makes its generator in the first call, and draws more numbers for some entries."""

    generator = None

    def __call__(self, batch):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(0)
        for _, y in batch:
            torch.rand(y, generator=self.generator)
        return [(x + torch.randn(x.shape, generator=self.generator), y) for x, y in batch]


@pytest.mark.parametrize("collate", [Scaling(), LateNoise()], ids=named)
def test_counters_caches_and_late_generators_are_taken(collate):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivateWarning)
        make(collate, Entries(IMAGES))


# What is read together.


class Transformed(Entries):
    """Reads several entries at once, and transforms them together."""

    def __init__(self, transform):
        super().__init__(IMAGES)
        self.transform = transform

    def __getitems__(self, indices):
        x = torch.stack([self.entries[i][0] for i in indices])
        return list(zip(self.transform(x), [self.entries[i][1] for i in indices], strict=True))


def standardized(x):
    return (x - x.mean(0)) / (x.std(0, correction=0) + 0.1)


def mixed_by_numpy(x):
    return 0.6 * x + 0.4 * x[torch.as_tensor(NUMPY.permutation(len(x)))]


def noisy_by_torch(x):
    return x + torch.randn(x.shape, generator=TORCH)


@pytest.mark.parametrize("transform", [standardized, mixed_by_numpy])
@pytest.mark.parametrize("collate", [None, as_they_are], ids=["default", "own"])
def test_entries_that_are_mixed_as_they_are_read_are_refused(transform, collate):
    for sampling in ("poisson", "shuffled"):
        with pytest.raises(PrivateRefusal, match="__getitems__ mixes the entries"):
            make(collate, Transformed(transform), sampling=sampling)


@pytest.mark.parametrize("transform", [torch.exp, noisy_by_torch])
def test_entries_that_are_read_together_and_not_mixed_are_taken(transform):
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivateWarning)
        make(None, Transformed(transform))
        # Random numbers of an entry depend on how many are before it.
        make(None, ReadTogether(keeps_order=False), sampling="shuffled")


def by_length(batch):
    return padded(sorted(batch, key=len, reverse=True))


def backwards(batch):
    return default_collate(batch[::-1])


def rotated(batch):
    return default_collate([*batch[1:], batch[0]])


@pytest.mark.parametrize(
    ("function", "entries"),
    [(by_label, IMAGES), (by_length, TEXTS), (backwards, IMAGES), (rotated, IMAGES)],
)
def test_a_function_that_sorts_is_refused_where_there_are_padding_rows(function, entries):
    wanted = f"{function.__name__} puts the rows in another order"
    for sampling in ("poisson", "fixed_size"):
        with pytest.raises(PrivateRefusal, match=wanted):
            make(function, Entries(entries), sampling=sampling)
    make(function, Entries(entries), sampling="shuffled")
    *_, loader = make(function, Entries(entries), workers=1)
    with pytest.raises(PrivateRefusal, match=wanted):
        loader.collate_fn(entries[:5])


def dropped(ids):
    return ids.masked_fill(torch.rand(len(ids)) < 0.2, 89)


class ReadTogether(Entries):
    """Reads entries in increasing order, as files of arrays want it, with augmentation."""

    def __init__(self, keeps_order):
        super().__init__([x + i for i, (x, _) in enumerate(IMAGES)])
        self.keeps_order = keeps_order

    def __getitem__(self, index):
        return super().__getitem__(index) + 0.05 * torch.randn(2, 4, 4)

    def __getitems__(self, indices):
        return [self[i] for i in (indices if self.keeps_order else sorted(indices))]


@pytest.mark.parametrize("is_sorted", [True, False], ids=["sorted", "kept"])
@pytest.mark.parametrize("where", ["dropout", "dropout of a short one", "own class", "getitems"])
def test_an_order_is_seen_where_contents_are_random(where, is_sorted):
    def collate(batch):
        batch = sorted(batch, key=len) if is_sorted else batch
        x = pad_sequence([F.pad(dropped(x), (0, 9 - len(x))) for x in batch], True)
        return Batch(x) if where == "own class" else x

    torch.manual_seed(0)
    full = [torch.randint(1, 90, (9,)) for _ in range(20)]
    full[16] = full[16][: 4 if where == "dropout of a short one" else 9]
    entries, function = Entries(full if "short" in where else TEXTS), collate
    if where == "getitems":
        entries, function = ReadTogether(keeps_order=not is_sorted), None
    if is_sorted:
        with pytest.raises(PrivateRefusal, match="collate puts the rows|__getitems__ puts the"):
            make(function, entries)
    else:
        make(function, entries)


class Linked:
    """Holds itself, and what is no number."""

    def __init__(self, x):
        self.x, self.me = x, self
        self.words = np.array(["secret", "words"])
        self.anything = np.array([x, None, "secret"], dtype=object)
        self.both = {"me": self}


def test_entries_and_batches_that_hold_themselves_are_taken():
    def collate(batch):
        return Linked(torch.stack([linked.x for linked in batch]))

    make(collate, Entries([Linked(x) for x, _ in IMAGES]))
    entries = [{"x": x} for x, _ in IMAGES]
    for entry in entries:
        entry["me"] = [entry]
    make(lambda batch: torch.stack([entry["x"] for entry in batch]), Entries(entries))


@pytest.mark.parametrize("kind", ["noise", "flipped", "heavy tail", "rare"])
def test_random_contents_are_not_taken_for_another_order(kind):
    class Random(ReadTogether):
        def __getitem__(self, index):
            x = self.entries[index].flatten()[:1]
            return {
                "noise": torch.randn(1),
                "flipped": x * (1 if torch.rand(()) < 0.5 else -1),
                "heavy tail": torch.randn(3) / torch.randn(3),
                "rare": 100.0 * (torch.rand(1) < 0.02),
            }[kind]

    for seed in range(10 if FULL else 3):
        torch.manual_seed(seed)
        make(None, Random(keeps_order=True))


@pytest.mark.parametrize("entries", [IMAGES[:1], IMAGES[:2], IMAGES[:3]], ids=len)
def test_few_entries_are_enough(entries):
    make(numbered, Entries(entries))
    if len(entries) > 1:
        with pytest.raises(PrivateRefusal, match="centred mixes"):
            make(centred, Entries(entries))


def test_a_function_without_a_name_is_refused_by_its_class():
    with pytest.raises(PrivateRefusal, match="collate_fn=partial mixes"):
        make(functools.partial(mixup, alpha=1.0), Entries(IMAGES))


def test_no_value_is_in_the_message():
    entries = [(torch.full((3,), 1234.5 + i), 98765 + i) for i in range(4)]
    with pytest.raises(PrivateRefusal) as caught:
        make(ranks, Entries(entries))
    assert "1234" not in str(caught.value) and "9876" not in str(caught.value)


@pytest.mark.parametrize("collate", [mixup, masked, raising, in_place], ids=named)
def test_the_trial_leaves_the_users_random_numbers_alone(collate):
    def drawn():
        return random.random(), np.random.rand(), float(torch.rand(()))

    def seeded():
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    model = nn.Linear(2, 2)
    seeded()
    expected = drawn()
    seeded()
    entries = IMAGES if collate is mixup else TEXTS
    try:
        make(collate, Entries(entries), model=model)
    except PrivateRefusal:
        assert collate is mixup
    assert drawn() == expected


def test_a_function_or_dataset_that_raises_is_left_to_the_loop():
    make(raising, Entries(IMAGES))

    class Gone(Entries):
        def __getitem__(self, index):
            raise OSError("gone")

    make(centred, Gone(IMAGES))
    make(centred, Entries([(memoryview(b"0"), i) for i in range(4)]))  # not copied


@pytest.mark.parametrize("entries", [9, 1000])
def test_a_handful_of_entries_is_read_and_none_for_torchs_own_function(entries):
    dataset = Entries([IMAGES[i % 9] for i in range(entries)])
    make(default_collate, dataset)
    make(None, dataset)
    assert dataset.read == 0
    make(numbered, dataset)
    assert dataset.read <= 6 + 7 + 32  # across the dataset twice, and the first ones


@pytest.mark.parametrize("sampling", ["poisson", "shuffled"])
def test_with_loader_workers_they_try_it(sampling):
    """What a dataset opens as it is read is not open when workers are forked."""
    dataset = Entries(IMAGES)
    *_, loader = make(centred, dataset, workers=1, sampling=sampling)
    assert dataset.read == 0
    # As a worker calls it. Rows that repeat one entry would show nothing.
    with pytest.raises(PrivateRefusal, match="centred mixes the entries"):
        loader.collate_fn(IMAGES[:1] * 4)
    calls = []
    *_, loader = make(lambda b: calls.append(b) or numbered(b), dataset, workers=1)
    tried = []
    for count in (1, 4, 4):
        calls.clear()
        loader.collate_fn(IMAGES[:count])
        tried.append(len(calls) > 30)  # what an entry must be like takes fewer
    assert tried == [True, False, False]


def test_what_a_worker_found_ends_the_loop():
    *_, loader = make(centred, Entries(IMAGES), workers=1)
    with pytest.raises(PrivateRefusal, match="centred mixes the entries") as caught:
        list(loader)
    traceback.clear_frames(caught.tb)  # or a search for garbage waits 5 s for the worker


def in_one_sequence(batch):
    return pack_sequence(batch, enforce_sorted=False)


def with_offsets(batch):
    lengths = torch.tensor([0, *map(len, batch[:-1])])
    return torch.cat(batch), lengths.cumsum(0), torch.stack([text[0] for text in batch])


@pytest.mark.parametrize("collate", [in_one_sequence, with_offsets])
def test_rows_that_are_concatenated_are_refused_with_what_to_return(collate):
    with pytest.raises(PrivateRefusal, match=r"concatenates the rows of.*\[B, T\]"):
        make(collate, TEXTS)


class Watched:
    """Tells a thread of each batch."""

    def __init__(self):
        self.queue, self.seen = queue.Queue(maxsize=2), []
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while True:
            self.seen.append(self.queue.get())

    def __call__(self, batch):
        self.queue.put(len(batch), timeout=10)
        return torch.stack(batch)


class Lazy:
    """Of a library: reads its file when it is first used, and closes it."""

    __module__ = "library.images"

    def __init__(self, path):
        self.file, self.tiles = open(path, "rb"), [1]  # noqa: SIM115

    def load(self):
        if self.tiles:
            self.value, self.tiles = len(self.file.read()), []
            self.file.close()
        return self.value


class WithLogo:
    def __init__(self, path):
        self.logo = Lazy(path)

    def __call__(self, batch):
        return torch.stack(batch) + self.logo.load()


def test_threads_and_files_that_a_function_uses_work_as_before(tmp_path):
    (tmp_path / "logo").write_bytes(b"12")
    logo, watched = WithLogo(tmp_path / "logo"), Watched()
    for collate in (logo, watched):
        make(collate, [*VECTORS])
        assert len(collate(VECTORS[:3])) == 3
    for _ in range(1000):
        if watched.queue.empty():
            break
        time.sleep(0.01)
    assert watched.queue.empty()
