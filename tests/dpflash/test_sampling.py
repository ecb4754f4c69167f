"""Poisson sampling: who is drawn, when a logical batch ends, and what an empty draw looks like."""

import itertools
import math
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dpflash.sampling import BatchMark, BatchTracker, PoissonBatchSampler, PrivateDataLoader
from dpflash.streams import master_key

KEY = master_key(0)


def sampler(num_samples=50, sample_rate=0.1, steps=10, physical=None, key=KEY):
    return PoissonBatchSampler(
        num_samples, sample_rate, steps_per_epoch=steps, key=key, physical_batch_size=physical
    )


def private_loader(data, batch_size=4, physical=None, poisson=True, tracker=None, **options):
    return PrivateDataLoader(
        DataLoader(data, batch_size=batch_size, **options),
        tracker or BatchTracker(),
        poisson=poisson,
        key=KEY,
        physical_batch_size=physical,
    )


def inclusions(rate, draws=4000, num_samples=20):
    found = np.zeros((draws, num_samples))
    source = sampler(num_samples, rate)
    for index in range(draws):
        found[index, source.draw(index)] = 1
    return found


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.97])
def test_each_sample_is_drawn_with_the_sampling_rate(rate):
    found = inclusions(rate)
    spread = math.sqrt(rate * (1 - rate) / len(found))
    assert np.abs(found.mean(0) - rate).max() <= 4.5 * spread
    assert abs(found.mean() - rate) <= 4.5 * spread / math.sqrt(found.shape[1])


def test_batch_sizes_have_the_variance_of_independent_inclusions():
    sizes = inclusions(0.3).sum(1)
    variance = 20 * 0.3 * 0.7
    assert abs(sizes.var() / variance - 1) <= 5 * math.sqrt(2 / len(sizes))


def test_inclusions_of_two_samples_and_of_two_draws_are_uncorrelated():
    found = inclusions(0.3) - 0.3
    bound = 5 * 0.3 * 0.7 / math.sqrt(len(found))
    products = found.T @ found / len(found)
    np.fill_diagonal(products, 0)
    assert np.abs(products).max() <= bound
    for lag in (1, 2, 7):
        assert np.abs((found[:-lag] * found[lag:]).mean(0)).max() <= bound


def test_a_rate_of_one_draws_everything_and_draws_are_functions_of_key_and_index():
    assert sampler(7, 1.0).draw(3) == list(range(7))
    first, second = sampler(), sampler()
    assert [first.draw(i) for i in range(5)] == [second.draw(i) for i in (0, 1, 2, 3, 4)]
    assert [first.draw(i) for i in range(9)] != [
        sampler(key=master_key(1)).draw(i) for i in range(9)
    ]
    assert len({tuple(first.draw(i)) for i in range(20)}) > 15


@pytest.mark.parametrize("physical", [None, 1, 3, 1000])
def test_parts_make_up_the_draw_and_only_its_last_part_is_marked(physical):
    source = sampler(num_samples=60, sample_rate=0.12, steps=40, physical=physical)
    parts = []
    for part in source:
        parts.append((part, source.marks.popleft()))
    assert not source.marks
    for draw, group in itertools.groupby(parts, key=lambda pair: pair[1].draw):
        group = list(group)
        assert sum((part for part, _ in group), []) == source.draw(draw)
        assert [mark.last for _, mark in group] == [False] * (len(group) - 1) + [True]
        assert all(mark.size == len(part) <= (physical or 1000) for part, mark in group)
        assert len(group) == 1 or all(part for part, _ in group)
    assert sum(mark.last for _, mark in parts) == 40
    assert [m.draw for _, m in parts if m.last] == list(range(40))


def test_empty_draws_are_yielded_and_every_declared_draw_is_made():
    source = sampler(num_samples=5, sample_rate=0.01, steps=100, physical=2)
    batches = list(source)
    assert len(batches) == len(source) == 100 and batches.count([]) > 80


def test_the_next_pass_goes_on_with_new_draws():
    source = sampler(steps=10)
    first, second = list(source), list(source)
    assert first == [source.draw(i) for i in range(10)]
    assert second == [source.draw(i) for i in range(10, 20)]


def test_a_resumed_sampler_ends_the_pass_that_was_begun_and_repeats_nothing():
    straight, resumed = sampler(steps=10), sampler(steps=10)
    expected = [list(straight), list(straight)]
    resumed.resume(13)
    assert list(resumed) == expected[1][3:]
    assert list(resumed) == list(straight)
    resumed.resume(20)
    assert len(list(resumed)) == 10


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, math.nan])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(ValueError, match="sample_rate="):
        sampler(sample_rate=rate)


class Numbered(Dataset):
    """Sample i is the number i, so that a batch shows its draw."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor([index])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_marks_come_with_their_batches_also_from_workers(workers, persistent):
    if persistent and not workers:
        pytest.skip("only workers persist")
    tracker = BatchTracker()
    loader = private_loader(
        Numbered(), 8, 3, tracker=tracker, num_workers=workers, persistent_workers=persistent
    )
    draws = {}
    for stop in (4, None, None):
        for number, batch in enumerate(loader):
            if number == stop:
                break
            mark = tracker.current
            assert mark.size == len(batch)
            draws.setdefault(mark.draw, []).extend(batch.flatten().tolist())
            if mark.last:
                assert draws[mark.draw] == loader._poisson.draw(mark.draw)
                tracker.released()
        if stop:
            draws = {k: v for k, v in draws.items() if v == loader._poisson.draw(k)}
    assert len(draws) >= 10


def test_a_released_draw_is_not_drawn_again_after_a_resume_and_an_unreleased_one_is():
    tracker = BatchTracker()
    loader = private_loader(Numbered(), 8, tracker=tracker)
    batches = iter(loader)
    next(batches)
    tracker.released()
    assert loader.state_dict() == {"next_draw": 1}
    next(batches)
    assert loader.state_dict() == {"next_draw": 1}
    tracker.released()
    assert loader.state_dict() == {"next_draw": 2}


def test_a_plain_pass_gives_every_sample_once_with_marks_of_the_right_sizes():
    tracker = BatchTracker()
    loader = private_loader(Numbered(), 7, tracker=tracker, poisson=False, shuffle=True)
    for _ in range(2):
        seen = []
        for batch in loader:
            assert tracker.current == BatchMark(len(seen) // 7, len(batch), True)
            seen += batch.flatten().tolist()
            tracker.released()
        assert sorted(seen) == list(range(40))
    assert loader.sample_rate is None and loader.sampler_name == "shuffled"
    assert loader.expected_batch_size == 7


Pair = namedtuple("Pair", "a b")


class Record(dict):
    """A mapping of its own kind."""


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda n: torch.zeros(n, 3), lambda v: v.shape == (0, 3)),
        (lambda n: {"x": torch.zeros(n, 3)}, lambda v: v["x"].shape == (0, 3)),
        (lambda n: Record(x=torch.zeros(n, 2)), lambda v: type(v) is Record and len(v["x"]) == 0),
        (
            lambda n: [torch.zeros(n), (torch.ones(n, 2).long(), ["a"] * n)],
            lambda v: v[0].shape == (0,) and v[1][0].dtype == torch.int64 and v[1][1] == [],
        ),
        (
            lambda n: Pair(torch.zeros(n, 1).half(), {"y": torch.zeros(n, 2, 2)}),
            lambda v: (
                type(v) is Pair and v.a.dtype == torch.float16 and v.b["y"].shape == (0, 2, 2)
            ),
        ),
    ],
    ids=["tensor", "dict", "own mapping", "nested list", "named tuple"],
)
def test_an_empty_batch_has_the_structure_of_a_full_one(make, same):
    loader = private_loader(
        Numbered(), 1, collate_fn=lambda samples: make(len(samples)) if samples else 1 / 0
    )
    sizes, empty = [], 0
    for batch in loader:
        mark = loader._tracker.current
        sizes.append(mark.size)
        if mark.size == 0:
            empty += 1
            assert same(batch)
        loader._tracker.released()
    assert empty > 3 and max(sizes) > 0 and len(sizes) == 40


@pytest.mark.parametrize(
    "value", [object(), torch.tensor(1.0), None], ids=["object", "0-D", "None"]
)
def test_a_batch_that_cannot_be_emptied_is_refused_with_the_way_out(value):
    loader = private_loader(Numbered(), 1, collate_fn=lambda samples: value)
    with pytest.raises(ValueError, match="empty batch .*collate_fn"):
        for _ in loader:
            loader._tracker.released()


def test_the_expected_batch_size_and_the_rate_are_the_loaders():
    loader = private_loader(TensorDataset(torch.zeros(93, 1)), 10)
    assert loader.sample_rate == 10 / 93 and loader.expected_batch_size == 10
    assert len(loader) == loader.steps_per_epoch == 10
    big = private_loader(TensorDataset(torch.zeros(5, 1)), 10)
    assert big.sample_rate == 1 and big.expected_batch_size == 5 and len(big) == 1
